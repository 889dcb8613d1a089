"""Which laws loaders that keep a state satisfy by themselves, and which wrapped: the same suite on both.

Run ``python benchmarks/laws_of_others.py``. Prints Markdown; docs/sources.md counts what fails. Grain's
iterators carry their state, so those of the bare ones are called through an object that forwards to them.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))  # the spawned processes take the import path over
sys.path.insert(0, str(Path(__file__).parent))

import cpu_torchvision  # noqa: F401
import laws_of_others as here  # under the name that a spawned process finds it by

from midepoch.testing import check_resumable
from support import own_state_sources as own
from support import streaming_sources


class Forwarding:
    """A source whose iterators keep the state, with the two methods of the protocol."""

    def __init__(self, source: Any) -> None:
        self.source, self.state = source, None
        self.iterator: Any = None

    def __iter__(self) -> Iterator[Any]:
        self.iterator = iter(self.source)
        if self.state is not None:
            self.iterator.set_state(self.state)
            self.state = None
        return iter(self.iterator)

    def state_dict(self) -> dict[str, Any]:
        state = self.state
        if state is None:
            state = (iter(self.source) if self.iterator is None else self.iterator).get_state()
        return {"state": state.decode() if isinstance(state, bytes) else state, "bytes": isinstance(state, bytes)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state["state"].encode() if state["bytes"] else state["state"]


def bare_grain_loader(seed: int | None = own.SEED, size: int = own.SIZE) -> Any:
    return Forwarding(own.grain_loader(seed, size))


def bare_grain_dataset(seed: int | None = own.SEED, size: int = own.SIZE) -> Any:
    return Forwarding(own.grain_dataset(seed, size))


def bare_streaming(num_workers: int = 0, seed: int | None = own.SEED, size: int = own.SIZE) -> Any:
    return streaming_sources.bare(size, num_workers=num_workers, seed=own.SEED if seed is None else seed)


def wrapped_streaming(num_workers: int = 0, seed: int | None = own.SEED, size: int = own.SIZE) -> Any:
    return streaming_sources.make_loader(num_workers, seed, size)


def identify(batch: Any) -> list[int]:
    return own.identify(batch)


SHOWN = {"failed": "**fails**", "refused clearly": "refused", "not applicable": "-"}


def verdicts(factory: Callable[..., Any]) -> dict[str, str]:
    report = check_resumable(
        factory, world_sizes=(1,), cuts=(2,), epochs=1, identify=here.identify, elastic_content=False, timeout=60,
        raise_on_failure=False,
    )  # fmt: skip
    return {verdict.law: SHOWN.get(verdict.status, verdict.status) for verdict in report.verdicts}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--json", action="store_true", help="what was found, as JSON")
    options = arguments.parse_args()
    warnings.simplefilter("ignore")
    bare: dict[str, Callable[..., Any]] = {
        **own.BARE,
        "Grain DataLoader": here.bare_grain_loader,
        "Grain IterDataset": here.bare_grain_dataset,
    }
    pairs: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {}
    pairs |= {name: (bare[name], own.WRAPPED[name]) for name in bare}
    pairs["mosaicml-streaming StreamingDataLoader"] = (here.bare_streaming, here.wrapped_streaming)
    found: dict[str, tuple[dict[str, str], dict[str, str]]] = {}
    for name, (unwrapped, wrapped) in pairs.items():
        found[name] = verdicts(unwrapped), verdicts(wrapped)
        print(f"{name} done", file=sys.stderr, flush=True)
    if options.json:
        print(json.dumps(found))
        return
    versions = [f"{each} {importlib.metadata.version(each)}" for each in
                ("torch", "torchdata", "datasets", "grain", "litdata", "mosaicml-streaming")]  # fmt: skip
    print(f"{time.strftime('%Y-%m-%d')}, Python {sys.version.split()[0]}, {', '.join(versions)}; by itself / wrapped\n")
    names = list(found)
    print(f"| law | {' | '.join(names)} |\n|---|{'---|' * len(names)}")
    for law in next(iter(found.values()))[0]:
        cells = [f"{before.get(law, '-')} / {after.get(law, '-')}" for before, after in found.values()]
        print(f"| {law} | {' | '.join(cells)} |")
    print("| laws that fail | " + " | ".join(
        f"{sum('fails' in each for each in before.values())} / {sum('fails' in each for each in after.values())}"
        for before, after in found.values()) + " |")  # fmt: skip


if __name__ == "__main__":
    main()
