"""Mutated states and files, by the hundred thousand: ``python tests/fuzz/fuzz.py --target dataloader --count 100000``.

Each mutation must end in an error of midepoch's or in the exact continuation. A process of its own makes them, with a
bound on its memory, while this one watches: a crash or a mutation that takes too long is put down with its number. The
same seed and number are the same mutation, alone too::

    python tests/fuzz/fuzz.py --target dataloader --seed 1 --first 4711 --count 1

What only shows in a loader that others have been loaded into takes those before it: ``--count 4712``.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import faulthandler
import json
import logging
import os
import resource
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import fuzz_files
import fuzz_states

TARGETS = [*fuzz_states.TARGETS, *fuzz_files.FUZZERS]
MEBIBYTE = 1 << 20
_MOST_FAILURES = 20  # after which a target is given up


@dataclasses.dataclass
class Outcome:
    target: str
    seed: int
    first: int
    mutations: int = 0
    refused: dict[str, int] = dataclasses.field(default_factory=dict)  # how many mutations ended in which error
    continued: int = 0  # exactly where the state said
    wrong: list[str] = dataclasses.field(default_factory=list)  # what was found, with numbers, and so on
    crashed: list[str] = dataclasses.field(default_factory=list)
    hung: list[str] = dataclasses.field(default_factory=list)
    memory: float = 0.0  # mebibytes by which the process grew while it ran
    seconds: float = 0.0

    @property
    def failures(self) -> list[str]:
        return [*self.wrong, *self.crashed, *self.hung]

    def again(self, first: int, count: int = 1) -> str:
        command = f"python tests/fuzz/fuzz.py --target '{self.target}' --seed {self.seed}"
        return f"{command} --first {first} --count {count}" if first else f"{command} --count {count}"

    def as_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "repeat": self.again(self.first, self.mutations)}


def settings_of(target: str) -> Any:
    return fuzz_states.TARGETS.get(target) or fuzz_files.FUZZERS[target]


def fuzzer_of(target: str) -> Any:
    return fuzz_files.FUZZERS[target]() if target in fuzz_files.FUZZERS else fuzz_states.Fuzzer(target)


def _resident(name: str) -> float:
    """Mebibytes, as the kernel counts them."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"/proc/self/status does not tell {name}")


@contextlib.contextmanager
def bounded_memory(mebibytes: int = 1024) -> Iterator[None]:
    """A MemoryError for who asks for more than so much, even if it would not be used."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (int(_resident("VmData") + mebibytes) * MEBIBYTE, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def work(target: str, seed: int, first: int, count: int, progress: str) -> None:
    """Mutations one after the other; a line of JSON for each that failed, and one for all at the end."""
    logging.getLogger("midepoch").setLevel(logging.CRITICAL)  # warnings by the thousand
    faulthandler.dump_traceback_later(300, exit=True)  # to be ready
    patience, place = settings_of(target).patience, os.open(progress, os.O_WRONLY)
    fuzzer = fuzzer_of(target)
    outcomes = collections.Counter[str]()

    def tell() -> None:
        print(json.dumps({"outcomes": outcomes, "memory": _resident("VmHWM") - before}), flush=True)
        outcomes.clear()

    for number in range(first, first + 3):
        fuzzer.mutation(seed, number)  # what the first ones import and start counts to nobody
    Path("/proc/self/clear_refs").write_text("5")  # the highest mark of memory begins here
    before, failures = _resident("VmHWM"), 0
    with bounded_memory():
        for number in range(first, first + count):
            os.pwrite(place, b"%20d" % number, 0)
            faulthandler.dump_traceback_later(patience, exit=True)
            try:
                outcomes[fuzzer.check(seed, number)] += 1
            except Exception:  # noqa: BLE001  # put down, whatever it is
                failures += 1
                print(json.dumps({"number": number, "failure": traceback.format_exc(limit=8)[-3500:]}), flush=True)
                if failures >= _MOST_FAILURES:
                    break
                fuzzer = fuzzer_of(target)
            if number % 500 == 499:
                tell()
    tell()
    os._exit(0)  # backends' threads may take their time


def run(target: str, seed: int, count: int, first: int = 0) -> Outcome:
    """Fuzz one target, up to the first mutation that crashes or hangs."""
    outcome, begun = Outcome(target, seed, first), time.monotonic()
    together = settings_of(target).together
    start, stop = first, first + count
    while start < stop and len(outcome.failures) < _MOST_FAILURES and not (outcome.crashed or outcome.hung):
        start = _one_process(outcome, start, min(stop, start + together))
    outcome.mutations = start - first
    outcome.seconds = round(time.monotonic() - begun, 1)
    return outcome


def _one_process(outcome: Outcome, start: int, stop: int) -> int:
    """Mutations from `start` on; how far they came."""
    with tempfile.TemporaryDirectory() as folder:
        progress, output, errors = (Path(folder) / name for name in ("progress", "output", "errors"))
        progress.write_text(str(start - 1))
        command = [sys.executable, "-X", "faulthandler", __file__, "--work", str(progress), "--target", outcome.target]
        command += ["--seed", str(outcome.seed), "--first", str(start), "--count", str(stop - start)]
        with output.open("wb") as out, errors.open("wb") as err:
            status = subprocess.run(command, stdout=out, stderr=err).returncode
        at = int(progress.read_text())
        for line in output.read_text().splitlines():
            told = json.loads(line) if line.startswith("{") else {}
            if "failure" in told:
                outcome.wrong.append(f"{outcome.again(told['number'])}\n{told['failure']}")
            elif "outcomes" in told:
                outcome.memory = max(outcome.memory, round(told["memory"], 1))
                outcome.continued += told["outcomes"].pop("continued", 0)
                for name, times in told["outcomes"].items():
                    outcome.refused[name] = outcome.refused.get(name, 0) + times
        said = errors.read_text(errors="replace")[-3000:]
        if at < start:
            raise RuntimeError(f"{outcome.target} could not be made ready: {said}")
        if status:
            ended = outcome.hung if "Timeout (" in said else outcome.crashed
            ended.append(f"{outcome.again(at)}\nstatus {status}: {said}")
        return at + 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", action="append", help="one of --list; may be given often; without it, all")
    parser.add_argument("--list", action="store_true", help="name the targets")
    parser.add_argument("--count", type=int, default=1000, help="mutations of each target")
    parser.add_argument("--first", type=int, default=0, help="number of the first mutation")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the outcomes here, after each target; others' are kept")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.work:
        work(chosen.target[0], chosen.seed, chosen.first, chosen.count, chosen.work)
    if chosen.list:
        print("\n".join(TARGETS))
        return 0
    failed = 0
    for target in chosen.target or TARGETS:
        outcome = run(target, chosen.seed, chosen.count, chosen.first)
        print(json.dumps(outcome.as_json()), "\n\n".join(outcome.failures), flush=True)
        failed += len(outcome.failures)
        if chosen.json:
            before = json.loads(chosen.json.read_text()) if chosen.json.exists() else []
            kept = [each for each in before if each["target"] != target]
            chosen.json.write_text(json.dumps([*kept, outcome.as_json()], indent=1) + "\n")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
