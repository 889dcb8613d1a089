"""Jobs whose threads finish batches out of order, killed again and again, and compared with an undisturbed order.

``python tests/jobs/ticket_job.py KILLS SEED`` prints how often what happened. Each launch is a process with another
number of ranks (loaders of one process), batch size and threads, which is killed with SIGKILL after a drawn number of
events. What is saved, the states of the ranks united and what was trained on, is replaced as one file. In the end each
sample of each epoch was trained on once, with the bits of an undisturbed run.
"""

from __future__ import annotations

import json
import multiprocessing
import random
import signal
import sys
import threading
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import midepoch
from midepoch.state.parts import join_states
from support.left_out import sample_of, wrapped

FORK = multiprocessing.get_context("fork")
SIZE, EPOCHS, EVERY = 60, 3, 2
MOST_EVENTS = 120  # before a kill: an epoch has about as many


class Job:
    """One launch. `counter`: where each event is counted, for who kills."""

    def __init__(self, path: Path, seed: int, counter: Any) -> None:
        self.path, self.draws, self.counter = path, random.Random(seed), counter
        self.changed = threading.Condition()
        self.pool: list[tuple[int, Any, int, list[Any]]] = []  # rank, ticket, epoch, samples
        self.failed = False
        saved: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"state": None, "trained": []}
        self.trained: list[Any] = saved["trained"]
        world, batch_size = self.draws.choice((1, 2, 3)), self.draws.randint(1, 5)
        self.loaders = [
            wrapped(SIZE, batch_size, world=midepoch.World(rank, world), tail="uneven") for rank in range(world)
        ]
        self.begun = [False] * world
        self.load(saved["state"])

    def event(self) -> None:
        self.counter.value += 1

    def load(self, state: Any) -> None:
        for loader in self.loaders if state is not None else ():
            loader.load_state_dict(state)

    def work(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.pool)
                rank, ticket, epoch, samples = self.pool.pop(self.draws.randrange(len(self.pool)))
                if self.draws.random() < 0.05:
                    self.failed = True  # a rollout that failed: it is given again
                else:
                    self.trained += [(epoch, *sample) for sample in samples]
                    self.loaders[rank].finish(ticket)
                self.event()
                self.changed.notify_all()

    def save(self) -> Any:
        """With what was trained on, at one instant. A rank that had no batch yet has no ticket."""
        with self.changed:
            if not all(self.begun):
                return None
            states = [loader.state_dict() for loader in self.loaders]
            state = join_states(states, self.loaders[0]) if len(states) > 1 else states[0]
            text = json.dumps({"state": state, "trained": self.trained})
        new = self.path.with_suffix(".new")
        new.write_text(text)
        self.event()
        new.replace(self.path)
        return state

    def run(self) -> None:
        for _ in range(4):
            threading.Thread(target=self.work, daemon=True).start()
        while self.loaders[0].frontier[0] < EPOCHS:
            step, more = 0, True
            passes = list(map(iter, self.loaders))
            while more:
                more = False
                for rank, (loader, each) in enumerate(zip(self.loaders, passes, strict=True)):
                    batch = next(each, None)
                    if batch is not None:
                        with self.changed:
                            self.pool.append((rank, loader.ticket, loader.ticket.epoch, batch))
                            self.changed.notify_all()
                        more = self.begun[rank] = True
                self.event()
                step += 1
                if step % EVERY == 0:
                    self.save()
            with self.changed:
                self.changed.wait_for(lambda: not self.pool)
            state = self.save()
            if self.failed:
                if state is None:
                    return  # the next launch gives it again
                self.failed = False
                self.load(state)
        self.save()


def launch(path: Path, seed: int, kill_at: int | None) -> bool:
    """Whether it was killed."""
    counter = FORK.Value("i", 0, lock=False)
    process = FORK.Process(target=lambda: Job(path, seed, counter).run())
    process.start()
    while process.is_alive():
        if kill_at is not None and counter.value >= kill_at:
            process.kill()
        process.join(0.0005)
    if process.exitcode not in (0, -signal.SIGKILL):
        raise SystemExit(f"the launch with seed {seed} failed")
    return process.exitcode != 0


def main(kills: int, seed: int) -> None:
    draws, sample, counts = random.Random(seed), sample_of(SIZE), Counter[str]()
    expected = sorted((epoch, *sample(epoch, position)) for epoch in range(EPOCHS) for position in range(SIZE))
    with TemporaryDirectory(prefix="midepoch-tickets-") as folder:
        while counts["kills"] < kills:
            path = Path(folder) / f"job{counts['jobs']}.json"
            saved: dict[str, Any] = {"state": {"epoch": 0, "omit": ""}}
            while saved["state"]["epoch"] < EPOCHS:
                kill_at = draws.randrange(MOST_EVENTS) if counts["kills"] < kills else None
                counts["launches"] += 1
                counts["kills"] += launch(path, draws.getrandbits(32), kill_at)
                saved = json.loads(path.read_text()) if path.exists() else saved
                counts["beyond"] += "done" in saved["state"]["omit"]
            found = sorted(tuple(each) for each in saved["trained"])
            if found != expected:
                raise SystemExit(f"lost or different: {sorted({*expected} - {*found})[:9]}; "
                                 f"repeated: {sorted((Counter(found) - Counter(expected)).elements())[:9]}")
            counts["jobs"] += 1
    print(json.dumps(counts))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
