"""What a run really trained on, from the logs of its ranks, and how two runs differ.

A batch counts as trained when its optimizer step is in the model that the run ended with. A killed run resumes from its
last snapshot. So of each segment (from one start to the next), the steps before the next segment's first step count.
The later ones are done again, and must be the same as before.
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
    """The batches of all ranks at one step. `ranks` maps a rank to its log entry, for the ranks that got so far.

    Attributes:
        step: of the optimizer, counted from 0.
    """

    step: int
    world_size: int
    ranks: dict[int, dict[str, Any]]

    @property
    def complete(self) -> bool:
        """Whether every rank has read its part."""
        return len(self.ranks) == self.world_size

    @property
    def epoch(self) -> int:
        """The training loop's epoch."""
        return int(next(iter(self.ranks.values()))["epoch"])

    @property
    def indices(self) -> list[int]:
        """The samples' indices, in rank order."""
        return list(chain.from_iterable(self.ranks[rank]["indices"] for rank in sorted(self.ranks)))

    @property
    def samples(self) -> list[tuple[int, int, str]]:
        """Epoch, index and digest of each sample, in rank order."""
        return [
            (part["epoch"], index, digest)
            for _, part in sorted(self.ranks.items())
            for index, digest in zip(part["indices"], part["digests"], strict=True)
        ]

    @property
    def losses(self) -> list[float]:
        """Each rank's loss."""
        return [float(self.ranks[rank]["loss"]) for rank in sorted(self.ranks)]

    @property
    def loss(self) -> float:
        """The loss of the global batch. The ranks' batches are equally large."""
        return sum(self.losses) / len(self.losses)

    def agrees_with(self, other: GlobalBatch) -> bool:
        """Whether the ranks that got so far read exactly their part of `other`, which is complete.

        On the same number of ranks, the losses must be equal too.
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
    """The part of a run from one start of its processes to their end.

    Attributes:
        world_size: number of processes.
        first_step: the step at which it started.
        epoch, position: of the loader, at which it started.
        batches: by step; the last ones may not be complete.
        weights: a digest of the final model; None if the segment did not reach the end.
        loader_seconds: from making the loader to the first batch in the slowest rank; None if there was no batch.
        start_seconds: from the command to the first batch, including the start of processes.
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
        """The last step that all ranks logged; `first_step` - 1 if there is none."""
        return max((step for step, batch in self.batches.items() if batch.complete), default=self.first_step - 1)


def read_events(path: Path) -> list[dict[str, Any]]:
    """The lines of one rank's log. An incomplete last line is left out: its writer was killed."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


def read_segment(folder: Path, world_size: int, started: float) -> Segment:
    """Read the logs of one segment. `started`: when it was started, in seconds since 1970."""
    logs = [read_events(folder / f"rank-{rank}.jsonl") for rank in range(world_size)]
    starts = [event for log in logs for event in log if event["event"] == "start"]
    if len(starts) != world_size or len({(event["step"], event["epoch"], event["position"]) for event in starts}) != 1:
        raise ValueError(f"the ranks in {folder} did not start at the same position: {starts}")
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
        """The complete batches of the optimizer steps that are in the final model."""
        trained = {}
        ends = [segment.first_step for segment in self.segments[1:]] + [None]
        for segment, end in zip(self.segments, ends, strict=True):
            for step, batch in segment.batches.items():
                if (end is None or step < end) and batch.complete:
                    trained[step] = batch
        return dict(sorted(trained.items()))

    @property
    def done_again(self) -> list[GlobalBatch]:
        """Batches after the last snapshot before a kill. Some may not be complete."""
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
        """Number of steps before the number of processes first changed."""
        for segment in self.segments:
            if segment.world_size != self.segments[0].world_size:
                return segment.first_step
        return len(self.trained)


@dataclass(frozen=True)
class Comparison:
    """A run against the uninterrupted one, and against the rule that an epoch holds every image once.

    Args:
        run, reference: `reference` is the uninterrupted run. It may be compared with itself.
        images: number of images in the dataset.
        epochs: number of epochs requested.
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
        """Surplus times that samples were trained on in an epoch."""
        return (self.run.counts - self._expected).total()

    @property
    def steps(self) -> int:
        """Number of global batches in either run."""
        return len(self.run.trained.keys() | self.reference.trained.keys())

    @cached_property
    def equal_batches(self) -> int:
        """Number of global batches with the same samples in the same order, with the same pixels and labels."""
        theirs = self.reference.trained
        return sum(step in theirs and batch.samples == theirs[step].samples for step, batch in self.run.trained.items())

    @property
    def comparable_losses(self) -> int:
        """Number of steps before the number of processes differed from the reference's.

        After that, sums are rounded differently, so losses are only close.
        """
        if self.run.segments[0].world_size != self.reference.segments[0].world_size:
            return 0
        return self.run.same_world_steps

    @cached_property
    def equal_losses(self) -> int:
        """Number of comparable steps in which each rank's loss is the same, bit for bit."""
        ours, theirs = self.run.trained, self.reference.trained
        return sum(
            step in ours and step in theirs and ours[step].losses == theirs[step].losses
            for step in range(self.comparable_losses)
        )

    @property
    def largest_loss_difference(self) -> float:
        """The largest difference between the losses of global batches, over all steps of both runs."""
        ours, theirs = self.run.trained, self.reference.trained
        return max((abs(ours[step].loss - theirs[step].loss) for step in ours.keys() & theirs.keys()), default=0.0)

    @property
    def one_world(self) -> bool:
        """Whether the number of processes never differs, so that everything must be equal."""
        return {segment.world_size for run in (self.run, self.reference) for segment in run.segments} == {
            self.run.segments[0].world_size
        }

    @property
    def equal_weights(self) -> bool:
        """Whether the final weights are the same, bit for bit."""
        ours, theirs = self.run.segments[-1].weights, self.reference.segments[-1].weights
        return ours is not None and ours == theirs

    @cached_property
    def differing_again(self) -> int:
        """Number of batches that differed when they were done again after a kill."""
        trained = self.run.trained
        return sum(
            batch.step not in trained or not batch.agrees_with(trained[batch.step]) for batch in self.run.done_again
        )

    @property
    def problems(self) -> list[str]:
        """What went wrong, as text; empty if nothing did."""
        found = {
            "samples lost": self.lost,
            "samples repeated": self.repeated,
            "global batches that differ from the uninterrupted run's": self.steps - self.equal_batches,
            "losses that differ on the same number of processes": self.comparable_losses - self.equal_losses,
            "batches that were not the same when they were done again": self.differing_again,
            "final weights that differ on the same number of processes": int(self.one_world and not self.equal_weights),
        }
        return [f"{count} {what}" for what, count in found.items() if count]
