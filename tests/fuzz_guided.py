"""Mutated states and files, led by coverage: ``python tests/fuzz_guided.py --target "tar archives" --minutes 10``.

fuzz.py draws each mutation by itself. Here libFuzzer, by atheris, goes on from those that have reached code of
midepoch's that none before them had. What may become of a mutation is decided as there (fuzz_states.py, fuzz_files.py),
and half of them get checksums that fit. It stops at the first failure, shows it, and says in which file the input is;
``--input`` runs that alone.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import atheris

with atheris.instrument_imports(include=["midepoch"]):
    import fuzz_files
    import fuzz_states

    import midepoch
    import midepoch.adapters.webdataset
    import midepoch.archives

FILES = ["snapshot files", "tar archives", "webdataset index caches"]  # compiled readers show no coverage
TARGETS = [*fuzz_states.TARGETS, *FILES]
_MEBIBYTE = 1 << 20


class Files:
    """A file, as it is."""

    def __init__(self, name: str) -> None:
        self._fuzzer = fuzz_files.FUZZERS[name](name)
        self.seeds = [self._fuzzer.whole, *self._fuzzer.others]

    def outcome(self, data: bytes) -> str:
        return self._fuzzer.outcome(data, sealed=True)  # whether it is cannot be told of bytes

    def reseal(self, data: bytes, generator: random.Random) -> bytes | None:
        return self._fuzzer.reseal(bytearray(data), generator)


class States:
    """A state, as JSON; what is no JSON cannot be a state."""

    def __init__(self, name: str) -> None:
        self._fuzzer = fuzz_states.Fuzzer(name)
        self.seeds = [json.dumps(state).encode() for state in self._fuzzer.others]

    def outcome(self, data: bytes) -> str:
        try:
            state = json.loads(data)
        except (ValueError, RecursionError):
            return "no JSON"
        return self._fuzzer.outcome(state, data.decode(errors="replace"))

    def reseal(self, data: bytes, generator: random.Random) -> bytes | None:
        try:
            return json.dumps(midepoch.reseal(json.loads(data))).encode()
        except (ValueError, RecursionError, TypeError, AttributeError, midepoch.MidepochError):
            return None


def mutator(target: Files | States) -> Callable[[bytes, int, int], bytes]:
    """What libFuzzer changes, every other time with checksums that fit."""

    def mutated(data: bytes, most: int, seed: int) -> bytes:
        changed: bytes = atheris.Mutate(data, most)
        sealed = target.reseal(changed, random.Random(seed)) if seed % 2 else None
        return changed if sealed is None or len(sealed) > most else sealed

    return mutated


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", choices=TARGETS, required=True)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--input", type=Path, help="only this one, which was found to fail")
    chosen = parser.parse_args()
    target = Files(chosen.target) if chosen.target in FILES else States(chosen.target)
    if chosen.input:
        print(target.outcome(chosen.input.read_bytes()))
        return
    outcomes: Counter[str] = Counter()

    def one(data: bytes) -> None:
        outcomes[target.outcome(data)] += 1

    with tempfile.TemporaryDirectory(prefix="midepoch-guided-") as corpus:
        for number, seed in enumerate(target.seeds):
            Path(corpus, str(number)).write_bytes(seed)
        found = Path(tempfile.mkdtemp(prefix="midepoch-found-"))
        longest = 2 * max(map(len, target.seeds))
        options: dict[str, Any] = {
            "max_total_time": round(60 * chosen.minutes), "seed": chosen.seed, "max_len": longest, "timeout": 20,
            "malloc_limit_mb": 1024, "rss_limit_mb": 4096, "artifact_prefix": f"{found}/", "verbosity": 1,
        }  # fmt: skip
        arguments = [sys.argv[0], corpus, *(f"-{name}={value}" for name, value in options.items())]
        atheris.Setup(arguments, one, custom_mutator=mutator(target))
        atheris.Fuzz()


if __name__ == "__main__":
    main()
