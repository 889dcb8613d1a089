"""Jobs with a ledger in one process: rank 0 has the Snapshot; the other ranks' batches come from loaders of theirs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import midepoch
from midepoch import Snapshot, World
from midepoch.order.holes import Omit
from midepoch.tools.ledgers import Ledger
from midepoch.tools.trace import given, taken

Seen = dict[int, dict[int, list[list[int]]]]
"""By step and rank: the batches, each as the indices of its samples."""


class Job:
    """A start of a run. Another one continues with the snapshot at `path`, as after a kill.

    The batches of the source that `make` makes are indices. From `seen`, what was trained on before, steps are dropped
    that were taken back.
    """

    def __init__(self, path: Path, make: Callable[[], Any], ranks: int, seen: Seen, **options: Any) -> None:
        self._make, self.ranks, self._options, self.seen = make, ranks, options, seen
        self.loader = self._loader(0)
        self.snapshot = Snapshot(path, data=self.loader, ledger=True, signals=())
        self.snapshot.load()
        for step in [each for each in seen if each > self.snapshot.steps]:
            del seen[step]
        self._pass = iter(self.loader)
        self._ahead: list[dict[int, list[int]]] = []

    def _loader(self, rank: int) -> midepoch.Loader:
        return midepoch.wrap(self._make(), world=World(rank, self.ranks), **self._options)

    def leave(self) -> None:
        """Leave the pass: the next one is of the next epoch."""
        self._pass = iter(self.loader)

    def reshard(self, ranks: int) -> None:
        self.ranks = ranks
        self.loader.reshard(World(0, ranks))

    def save_after(self, steps: int) -> None:
        for _ in range(steps):
            self.step()
        self.snapshot.save()

    def step(self, batches: int = 1, in_flight: int = 0) -> None:
        """Take batches until so many are in flight, and train on so many."""
        while len(self._ahead) < batches + in_flight:
            self._ahead.append(self._take())
        self.snapshot.step(in_flight)
        trained, self._ahead = self._ahead[:batches], self._ahead[batches:]
        self.seen[self.snapshot.steps] = {
            rank: [batch[rank] for batch in trained if rank in batch] for rank in range(self.ranks)
        }

    def _take(self) -> dict[int, list[int]]:
        progress = self.loader._progress
        state, new_epoch = self.loader.state_dict(), progress.latest() is None and progress.new_epoch
        reading = progress.reading
        within = reading.steps if reading is not None and reading.within else 0  # of a global batch
        try:
            batch = next(self._pass)
        except StopIteration:
            self._pass = iter(self.loader)
            batch = next(self._pass)
        now = progress.history[-1][0].run
        if new_epoch and now.epoch != state["epoch"]:
            omit = Omit.parse(state["omit"], state["epoch"]).text(now.epoch)
            state = midepoch.reseal({**state, "epoch": now.epoch, "position": 0, "omit": omit})
        found = {0: list(map(int, batch))}
        for rank in range(1, self.ranks):
            other = self._loader(rank)
            other.load_state_dict(state)
            batches = iter(other)
            skipped = within % getattr(now.share, "micro_steps", 1) if reading and now is reading.run else 0
            mine = [next(batches, None) for _ in range(skipped + 1)][-1]
            # A rank without samples of a global batch has a batch of weight 0.
            empty = "global_batch" in self._options and not other.weight
            if mine is not None and other._progress.history[-1][0].run.epoch == now.epoch and not empty:
                found[rank] = list(map(int, mine))
        return found


def told(ledger: Ledger, only: int = 0) -> Seen:
    """What a ledger says of all steps of a run, or of one."""
    found: Seen = {}
    for step in (only,) if only else range(1, ledger.steps + 1):
        found[step] = {rank: [] for each in ledger.at(step) for rank in range(each["world_size"])}
        for row in (row for each in ledger.at(step) for row in taken(each, step, None, None)):
            found[step][row["rank"]].append(row["indices"])
    return found


def sights(ledger: Ledger, index: int) -> list[tuple[int, int]]:
    """The steps and ranks that a ledger says were given a sample."""
    stretches = [each for line in ledger.lines for each in line["took"]]
    return [(row["step"], row["rank"]) for each in stretches for row in given(each, index, None, None)]
