"""What a run really trained on, from what each rank wrote down, and how two runs differ.

A batch counts as trained when its optimizer step is in the model that the run ended with. A run that was killed goes on
from its last snapshot, so of each segment (from one start to the next) those steps count that lie before the step from
which the next segment started. Later ones are done again, and must be the same when they are.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

__all__ = ["Comparison", "GlobalBatch", "Run", "Segment", "read_events", "read_segment"]


@dataclass(frozen=True)
class GlobalBatch:
    """The batches of all ranks at one step. `ranks` holds what those wrote that got so far, by rank.

    Attributes:
        step: of the optimizer, counted from 0.
    """

    step: int
    world_size: int
    ranks: dict[int, dict[str, Any]]

    @property
    def complete(self) -> bool:
        """Every rank has read its part."""
        return len(self.ranks) == self.world_size

    @property
    def epoch(self) -> int:
        """As the training loop counted."""
        return int(next(iter(self.ranks.values()))["epoch"])

    @property
    def indices(self) -> list[int]:
        """Of the samples, in rank order."""
        return list(chain.from_iterable(self.ranks[rank]["indices"] for rank in sorted(self.ranks)))

    @property
    def samples(self) -> list[tuple[int, int, str]]:
        """Epoch, index and digest of the samples, in rank order."""
        return [
            (part["epoch"], index, digest)
            for _, part in sorted(self.ranks.items())
            for index, digest in zip(part["indices"], part["digests"], strict=True)
        ]

    @property
    def losses(self) -> list[float]:
        """Of each rank."""
        return [float(self.ranks[rank]["loss"]) for rank in sorted(self.ranks)]

    @property
    def loss(self) -> float:
        """Of the global batch; the ranks' batches are equally large."""
        return sum(self.losses) / len(self.losses)

    def agrees_with(self, other: GlobalBatch) -> bool:
        """Whether the ranks that got so far read, bit for bit, their part of `other`, which is complete.

        On the same number of ranks the losses must be equal too.
        """
        whole = other.samples
        for rank, part in self.ranks.items():
            size = len(part["indices"])
            mine = GlobalBatch(self.step, 1, {0: part}).samples
            if size * self.world_size != len(whole) or whole[rank * size : (rank + 1) * size] != mine:
                return False
            if self.world_size == other.world_size and part["loss"] != other.ranks[rank]["loss"]:
                return False
        return True


@dataclass(frozen=True)
class Segment:
    """A run from one start of its processes to their end.

    Attributes:
        world_size: processes.
        first_step: the step from which it started.
        epoch, position: of the data, from which it started.
        batches: by step; the last ones may not be complete.
        weights: of the model at the end, as a digest; None where the segment did not come to the end.
        loader_seconds: from making the loader to the first batch in the slowest rank; None where there was none.
        start_seconds: from the command to the first batch, process starts included.
    """

    world_size: int
    first_step: int
    epoch: int
    position: int
    batches: dict[int, GlobalBatch]
    weights: str | None
    loader_seconds: float | None
    start_seconds: float | None

    @property
    def reached(self) -> int:
        """The last step that all ranks wrote down; `first_step` - 1 where there was none."""
        return max((step for step, batch in self.batches.items() if batch.complete), default=self.first_step - 1)


def read_events(path: Path) -> list[dict[str, Any]]:
    """The lines of one rank's log. A last line that is cut off is left out: its writer was killed."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


def read_segment(folder: Path, world_size: int, started: float) -> Segment:
    """What the ranks of one segment wrote; `started` is when it was, in seconds since 1970."""
    logs = [read_events(folder / f"rank-{rank}.jsonl") for rank in range(world_size)]
    starts = [event for log in logs for event in log if event["event"] == "start"]
    if len(starts) != world_size or len({(event["step"], event["epoch"], event["position"]) for event in starts}) != 1:
        raise ValueError(f"the ranks in {folder} did not start at one and the same place: {starts}")
    ranks: dict[int, dict[int, dict[str, Any]]] = {}
    for rank, log in enumerate(logs):
        for event in log:
            if event["event"] == "batch":
                ranks.setdefault(event["step"], {})[rank] = event
    ends = [event["weights"] for log in logs for event in log if event["event"] == "end"]
    first = ranks.get(starts[0]["step"], {}).values()
    return Segment(
        world_size=world_size,
        first_step=starts[0]["step"],
        epoch=starts[0]["epoch"],
        position=starts[0]["position"],
        batches={step: GlobalBatch(step, world_size, parts) for step, parts in ranks.items()},
        weights=ends[0] if len(ends) == world_size and len(set(ends)) == 1 else None,
        loader_seconds=max((event["waited"] for event in first), default=None),
        start_seconds=max((event["time"] for event in first), default=started) - started if first else None,
    )


@dataclass(frozen=True)
class Run:
    """A training job with all its restarts."""

    segments: Sequence[Segment]

    @cached_property
    def trained(self) -> dict[int, GlobalBatch]:
        """What the optimizer's steps, as far as they are in the final model, were made of; complete batches only."""
        trained = {}
        ends = [segment.first_step for segment in self.segments[1:]] + [None]
        for segment, end in zip(self.segments, ends, strict=True):
            for step, batch in segment.batches.items():
                if (end is None or step < end) and batch.complete:
                    trained[step] = batch
        return dict(sorted(trained.items()))

    @property
    def done_again(self) -> list[GlobalBatch]:
        """Batches, some of them not complete, that came after the last snapshot before a kill."""
        return [
            batch
            for segment, following in zip(self.segments, self.segments[1:], strict=False)
            for step, batch in segment.batches.items()
            if step >= following.first_step
        ]

    @property
    def counts(self) -> Counter[tuple[int, int]]:
        """How often each (epoch, sample index) was trained on."""
        return Counter((batch.epoch, index) for batch in self.trained.values() for index in batch.indices)

    @property
    def same_world_steps(self) -> int:
        """Steps before the number of processes changed for the first time."""
        for segment in self.segments:
            if segment.world_size != self.segments[0].world_size:
                return segment.first_step
        return len(self.trained)


@dataclass(frozen=True)
class Comparison:
    """A run against the uninterrupted one, and against what each epoch should hold: every image once.

    Args:
        run, reference: `reference` is the uninterrupted run, which may be compared with itself.
        images: in the data set.
        epochs: that were asked for.
    """

    run: Run
    reference: Run
    images: int
    epochs: int

    @cached_property
    def _expected(self) -> Counter[tuple[int, int]]:
        return Counter((epoch, index) for epoch in range(self.epochs) for index in range(self.images))

    @cached_property
    def lost(self) -> int:
        """Samples that were not trained on in an epoch."""
        return (self._expected - self.run.counts).total()

    @cached_property
    def repeated(self) -> int:
        """Samples that were trained on once more than they should be in an epoch."""
        return (self.run.counts - self._expected).total()

    @property
    def steps(self) -> int:
        """Global batches that either run has."""
        return len(self.run.trained.keys() | self.reference.trained.keys())

    @cached_property
    def equal_batches(self) -> int:
        """Steps whose global batches hold the same samples in the same order, with the same pixels and labels."""
        theirs = self.reference.trained
        return sum(step in theirs and batch.samples == theirs[step].samples for step, batch in self.run.trained.items())

    @property
    def comparable_losses(self) -> int:
        """Steps before the number of processes differed from the reference's.

        From there on other sums are rounded, so losses are only close.
        """
        if self.run.segments[0].world_size != self.reference.segments[0].world_size:
            return 0
        return self.run.same_world_steps

    @cached_property
    def equal_losses(self) -> int:
        """Comparable steps in which the loss of every rank is the same, bit for bit."""
        ours, theirs = self.run.trained, self.reference.trained
        return sum(
            step in ours and step in theirs and ours[step].losses == theirs[step].losses
            for step in range(self.comparable_losses)
        )

    @property
    def largest_loss_difference(self) -> float:
        """Of the losses of global batches, over all steps that both have."""
        ours, theirs = self.run.trained, self.reference.trained
        return max((abs(ours[step].loss - theirs[step].loss) for step in ours.keys() & theirs.keys()), default=0.0)

    @property
    def one_world(self) -> bool:
        """The number of processes never differs, so that everything must be equal."""
        return {segment.world_size for run in (self.run, self.reference) for segment in run.segments} == {
            self.run.segments[0].world_size
        }

    @property
    def equal_weights(self) -> bool:
        """The final weights are the same, bit for bit."""
        ours, theirs = self.run.segments[-1].weights, self.reference.segments[-1].weights
        return ours is not None and ours == theirs

    @cached_property
    def differing_again(self) -> int:
        """Batches that were done again after a kill and were not what they had been the first time."""
        trained = self.run.trained
        return sum(
            batch.step not in trained or not batch.agrees_with(trained[batch.step]) for batch in self.run.done_again
        )

    @property
    def problems(self) -> list[str]:
        """What went wrong, in words; empty where all is as it should be."""
        found = {
            "samples lost": self.lost,
            "samples repeated": self.repeated,
            "global batches that differ from the uninterrupted run's": self.steps - self.equal_batches,
            "losses that differ on the same number of processes": self.comparable_losses - self.equal_losses,
            "batches that were not the same when they were done again": self.differing_again,
            "final weights that differ on the same number of processes": int(self.one_world and not self.equal_weights),
        }
        return [f"{count} {what}" for what, count in found.items() if count]
