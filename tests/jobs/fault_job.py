"""A process whose reads are made to fail, by test_faults: ``python fault_job.py SOURCE FOLDER WORKERS TURNS``."""

from __future__ import annotations

import collections
import json
import os
import sys
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import midepoch
from midepoch import MidepochError

FAULTS = ("eio", "short", "eintr", "slow")


def contents(sample: dict[str, Any]) -> tuple[int, int]:
    return int(sample["cls"]), zlib.crc32(sample["bin"])


def webdataset(folder: Path, workers: int) -> Callable[[], Any]:
    import webdataset as wds
    from torch.utils.data import DataLoader

    urls = sorted(map(str, folder.glob("data/*.tar*")))

    def make() -> Any:
        dataset = wds.WebDataset(urls, shardshuffle=9).shuffle(20).map(contents).batched(4, collation_fn=list)
        return midepoch.wrap(DataLoader(dataset, batch_size=None, num_workers=workers), seed=1)

    return make


def ffcv(folder: Path, workers: int) -> Callable[[], Any]:
    from support import ffcv_sources as sources

    # FFCV's own constructor reads the tables, and fails in ways of its own.
    source = sources.make(path=str(folder / "data" / "raw.beton"), os_cache=False, num_workers=max(workers, 1))
    return lambda: midepoch.wrap(source, seed=1)


def known(batch: Any) -> Any:
    """A batch, so that two of them can be compared, also when it is no longer there."""
    if isinstance(batch, torch.Tensor):
        return zlib.crc32(batch.contiguous().numpy().tobytes())
    if isinstance(batch, dict):
        return {name: known(each) for name, each in batch.items()}
    if isinstance(batch, list | tuple):
        return [known(each) for each in batch]
    return batch


def endure(make: Callable[[], Any], when: Path, fault: str, every: int, retry: bool) -> tuple[list[Any], list[str]]:
    """An epoch under a fault; behind an error the rest of it without, in the same loader or in a new one."""
    got: list[Any] = []
    when.write_text(f"{fault} {every}")
    loader: Any = None
    batches: Any = iter(())
    try:
        loader = make()
        batches = iter(loader)
        for batch in batches:
            got.append(known(batch))
        return got, []
    except Exception as error:  # noqa: BLE001  # they are what is looked for
        told = f"{type(error).__name__}: {error}" if not isinstance(error, MidepochError) else type(error).__name__
    finally:
        when.unlink()
    state = None if loader is None else loader.state_dict()
    if loader is None or not retry:
        if loader is not None:
            loader.close()
        loader = make()
        if state is not None:
            loader.load_state_dict(state)
        batches = iter(loader)
    if state is None or state["epoch"] == 0:
        got.extend(known(batch) for batch in batches)
    loader.close()
    return got, [told]


def snapshots(folder: Path, when: Path, turns: int) -> dict[str, Any]:
    """Loads of a snapshot whose reads fail: what was saved last or, told, before, or an error."""
    path, outcomes, wrong = folder / "data" / "snapshot.pt", collections.Counter[str](), 0
    model = torch.nn.Linear(300, 300)
    with midepoch.Snapshot(path, model=model, signals=()) as snapshot:
        for step in (1, 2):
            torch.nn.init.constant_(model.weight, float(step))
            snapshot.steps = step
            snapshot.save()
    for turn in range(turns):
        fault = FAULTS[turn % len(FAULTS)]
        fresh = torch.nn.Linear(300, 300)
        before = fresh.weight.clone()
        reader = midepoch.Snapshot(path, model=fresh, signals=())
        when.write_text(f"{fault} {2 + turn // len(FAULTS)}")
        try:
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                reader.load()
            expected = torch.full_like(before, 1.0 if told else 2.0)
            outcomes[f"{fault}: {'the one before, told' if told else 'the newest'}"] += 1
        except MidepochError as error:
            expected = before
            outcomes[f"{fault}: {type(error).__name__}"] += 1
        finally:
            when.unlink()
        wrong += not torch.equal(fresh.weight, expected)
        assert reader.load() and torch.equal(fresh.weight, torch.full_like(before, 2.0))
    return {"outcomes": outcomes, "wrong": wrong}


def main() -> None:
    source, name, workers, turns = sys.argv[1:]
    folder, when = Path(name), Path(os.environ["FAULT_WHEN"])
    if source == "snapshot":
        print(json.dumps(snapshots(folder, when, int(turns))))
        return
    make = {"webdataset": webdataset, "ffcv": ffcv}[source](folder, int(workers))
    with make() as loader:
        whole = [known(batch) for batch in loader]
    outcomes, wrong = collections.Counter[str](), 0
    for turn in range(int(turns)):
        fault = FAULTS[turn % len(FAULTS)]
        every = 2 + 3 * (turn // len(FAULTS))  # a read that is always interrupted never ends
        got, errors = endure(make, when, fault, every, retry=bool(turn // len(FAULTS) % 2))
        outcomes[f"{fault}: {errors[0][:200] if errors else 'exact'}"] += 1
        wrong += got != whole
    print(json.dumps({"outcomes": outcomes, "wrong": wrong, "batches": len(whole)}))


if __name__ == "__main__":
    main()
