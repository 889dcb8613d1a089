"""Mutated states and files, led by coverage: ``python tests/fuzz/fuzz_guided.py --target "tar archives" --minutes 10``.

fuzz.py draws each mutation by itself. Here libFuzzer, by atheris, goes on from those that have reached code of
midepoch's that none before them had. What may become of a mutation is decided as there (fuzz_states.py, fuzz_files.py),
and half of them get checksums that fit. It ends at the first failure and says in which file the input is; ``--input``
runs that alone.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import atheris

sys.path.insert(0, str(Path(__file__).parents[1]))

with atheris.instrument_imports(include=["midepoch"]):
    import fuzz_files
    import fuzz_states

    import midepoch
    import midepoch.adapters.webdataset
    import midepoch.reading.tar

FILES = ["snapshot files", "tar archives", "webdataset index caches"]  # compiled readers show no coverage
TARGETS = [*fuzz_states.TARGETS, *FILES]


class Files:
    """A file's bytes."""

    def __init__(self, name: str) -> None:
        self._fuzzer = fuzz_files.FUZZERS[name](name)
        self.seeds = [self._fuzzer.whole, *self._fuzzer.others]

    def outcome(self, data: bytes) -> str:
        return self._fuzzer.outcome(data, sealed=True)  # whether it is cannot be told of bytes

    def changed(self, data: bytes, most: int, generator: random.Random) -> bytes:
        found: bytes = atheris.Mutate(data, most)
        sealed = self._fuzzer.reseal(bytearray(found), generator) if generator.random() < 0.5 else None
        return found if sealed is None else sealed


class States:
    """A state as JSON, of which one value is changed at a time: bytes at random would seldom be JSON."""

    def __init__(self, name: str) -> None:
        self._fuzzer = fuzz_states.Fuzzer(name)
        self.seeds = [json.dumps(state).encode() for state in self._fuzzer.others]

    def outcome(self, data: bytes) -> str:
        try:
            return self._fuzzer.outcome(json.loads(data), data.decode(errors="replace"))
        except (UnicodeDecodeError, json.JSONDecodeError):
            return "no JSON"

    def changed(self, data: bytes, most: int, generator: random.Random) -> bytes:
        try:
            state = json.loads(data)
            name = generator.choice(sorted(state))
        except (ValueError, TypeError, IndexError):
            return generator.choice(self.seeds)
        text = isinstance(state[name], str)
        value = (state[name] if text else json.dumps(state[name])).encode("utf-8", "replace")
        found = atheris.Mutate(value, len(value) + 64).decode(errors="replace")
        try:
            state[name] = found if text else json.loads(found)
            state = midepoch.reseal(state) if generator.random() < 0.5 else state
        except (ValueError, RecursionError, midepoch.MidepochError):
            pass  # no value, or none that can be sealed
        return json.dumps(state).encode()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", choices=TARGETS, required=True)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=1, help="other than 0")
    parser.add_argument("--input", type=Path, help="only this one, which was found to fail")
    chosen = parser.parse_args()
    logging.disable()  # warnings by the thousand
    target: Files | States = Files(chosen.target) if chosen.target in FILES else States(chosen.target)
    if chosen.input:
        print(target.outcome(chosen.input.read_bytes()))
        return
    outcomes: Counter[str] = Counter()

    def one(data: bytes) -> None:
        outcomes[target.outcome(data)] += 1
        total = sum(outcomes.values())
        if total & (total - 1) == 0:  # libFuzzer ends the process without a word to Python
            print(total, dict(outcomes.most_common()), flush=True)

    def mutated(data: bytes, most: int, seed: int) -> bytes:
        return target.changed(data, most, random.Random(seed))[:most]

    corpus, found = (Path(tempfile.mkdtemp(prefix=f"midepoch-guided-{kind}-")) for kind in ("corpus", "found"))
    for number, seed in enumerate(target.seeds):
        (corpus / str(number)).write_bytes(seed)
    # The process itself may grow: atheris, which traces comparisons, keeps the arrays that comparisons of numpy's give.
    options: dict[str, Any] = {
        "max_total_time": round(60 * chosen.minutes), "seed": chosen.seed, "max_len": 2 * max(map(len, target.seeds)),
        "timeout": 20, "malloc_limit_mb": 1024, "rss_limit_mb": 12288, "artifact_prefix": f"{found}/",
    }  # fmt: skip
    arguments = [sys.argv[0], str(corpus), *(f"-{name}={value}" for name, value in options.items())]
    mutator: Callable[[bytes, int, int], bytes] = mutated
    atheris.Setup(arguments, one, custom_mutator=mutator)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
