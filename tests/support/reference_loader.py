"""A small loader, complete and correct, that satisfies every law: what the laws themselves are tested with.

Its batches are float64 tensors of shape (batch, 3): the sample's index and two random columns.
"""

from __future__ import annotations

import collections
import itertools
import math
import os
import types
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from midepoch.errors import MidepochError, StateCorruptError, StateMismatchError, UnsupportedSourceError
from midepoch.order.holes import Holes, Omit
from midepoch.state.format import build, reseal
from midepoch.state.format import check as check_format
from midepoch.state.witness import Witness, summary_of
from midepoch.world import World


def identify(batch: torch.Tensor) -> list[int]:
    return [int(value) for value in batch[:, 0].tolist()]


def draws(batch: torch.Tensor) -> list[float]:
    return [float(value) for value in batch[:, 1].tolist()]


class Rows(Dataset[torch.Tensor]):
    """The rows of the reference loader, as they are without one: with numbers from torch's generator."""

    def __init__(self, size: int) -> None:
        self.size, self.reads = size, 0

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        self.reads += 1
        return torch.cat([torch.tensor([float(index)]), torch.rand(2)]).double()


class InItsOrder(Sampler[int]):
    def __init__(self, loader: ReferenceLoader) -> None:
        self._loader, self.epoch, self.passes = loader, 0, 0

    def __len__(self) -> int:
        return self._loader.size

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        return iter(ReferenceLoader.order(self._loader, self.epoch))


def plain(rank: int = 0, world_size: int = 1, **options: Any) -> Any:
    """What the reference loader stands for: a DataLoader, as a torch program makes it."""
    options.pop("read_log", None)
    return plain_of(ReferenceLoader(rank, world_size, **options))


def plain_of(loader: ReferenceLoader) -> Any:
    if loader.items is not None:
        return loader.items
    return DataLoader(Rows(loader.size), loader.batch_size, sampler=InItsOrder(loader), drop_last=loader.drop_last)


def gather(loader: ReferenceLoader) -> dict[str, Any]:
    """One state of all ranks, where each knows only its own."""
    states: list[dict[str, Any]] = [{} for _ in range(loader.world_size)]
    torch.distributed.all_gather_object(states, loader.state_dict())
    return reseal(states[0] | {"detail": "all ranks"})


class Capability:
    """Without midepoch's classes: laws need only a truth value and a reason."""

    def __init__(self, holds: bool) -> None:
        self.holds, self.reason = holds, "so it was built" if holds else "it was told not to"

    def __bool__(self) -> bool:
        return self.holds


class ReferenceLoader:
    """Rank r takes the r-th contiguous block of each global batch; the position counts the samples of all ranks."""

    departs: frozenset[str] = frozenset()  # it keeps the order of the plain loader
    elastic = True
    elastic_workers = True
    replays = False
    constant_time = True
    knows_all_ranks = True

    def __init__(
        self, rank: int = 0, world_size: int = 1, *, num_workers: int = 0, batch_size: int = 3, seed: int | None = None,
        size: int = 17, read_log: str | None = None, items: Sequence[Any] | None = None, tail: str = "pad",
        drop_last: bool = False, shuffle: bool = True,
    ) -> None:  # fmt: skip
        self.rank, self.world_size, self.num_workers = rank, world_size, num_workers
        self.batch_size = 1 if items is not None else batch_size
        self.stated_seed, self.seed = seed, seed or 0
        self.size = size if items is None else len(items)
        self.read_log, self.items = read_log, items
        self.tail, self.drop_last, self.shuffle = tail, drop_last, shuffle
        self.cursor = (0, 0)
        self.continues = True  # the next pass goes on at the cursor
        self.passes, self.loaded = 0, dict[str, Any]()
        self.passes_since_load: float = math.inf
        self.expected = ""  # the witness of the loaded state
        self.history: collections.deque[tuple[int, int]] = collections.deque(maxlen=8)
        self.peeked: list[Any] = []
        self.moved = False  # the running pass goes on at the cursor, in the world of now
        self.origin = self.cursor  # where a rollback leads
        self.committed: dict[str, Any] | None = None
        self.skips: dict[int, Holes] = {}

    @property
    def capabilities(self) -> types.SimpleNamespace:
        held = {
            "exact_order": True, "exact_augmentations": True, "constant_time_resume": self.constant_time,
            "elastic_world": self.elastic, "elastic_workers": self.elastic_workers,
            "rank_independent": self.knows_all_ranks, "skips": True,
        }  # fmt: skip
        return types.SimpleNamespace(**{name: Capability(holds) for name, holds in held.items()})

    def __len__(self) -> int:
        return len(list(self.blocks(0)))

    def blocks(self, position: int) -> Iterator[tuple[range, int]]:
        """(positions of this rank's batch, position after the global batch), from ``position`` to the end."""
        end = self.size - self.size % self.world_size if self.tail == "drop" else self.size
        while position < end:
            rest = end - position
            share = self.batch_size
            if rest < self.world_size * self.batch_size:
                if self.drop_last:
                    return
                share = math.ceil(rest / self.world_size)
            start = position + self.rank * share
            stop = min(start + share, end) if self.tail == "uneven" else start + share
            after = min(position + self.world_size * share, end)
            if start < stop:
                yield range(start, stop), after
            position = after

    def blocks_of(self, epoch: int, position: int) -> Iterator[tuple[Sequence[int], int]]:
        """As `blocks`, around what the epoch leaves out."""
        holes, size = self.skips.get(epoch, Holes()), self.size
        if not holes:
            yield from self.blocks(position)
            return
        self.size = left = size - holes.total
        blocks = list(self.blocks(holes.place_of(position)))
        self.size = size
        for places, after in blocks:
            positions = [holes.position_of(place % left) for place in places]
            yield positions, holes.position_of(after) if after < left else size

    def order(self, epoch: int) -> list[int]:
        if not self.shuffle:
            return list(range(self.size))
        return [int(index) for index in np.random.Generator(np.random.PCG64([self.seed, epoch])).permutation(self.size)]

    def key(self, epoch: int, position: int) -> list[int]:
        return [self.seed, epoch, position]

    def read(self, epoch: int, positions: Sequence[int], order: list[int]) -> Any:
        positions = [position % self.size for position in positions]  # padding repeats the epoch's first samples
        if self.read_log is not None:
            log = os.open(self.read_log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.write(log, "".join(f"{order[position]}\n" for position in positions).encode())
            os.close(log)
        if self.items is not None:
            return self.items[order[positions[0]]]
        generators = [np.random.Generator(np.random.PCG64(self.key(epoch, position))) for position in positions]
        rows = [[order[position], *each.random(2)] for position, each in zip(positions, generators, strict=True)]
        return torch.tensor(rows, dtype=torch.float64)

    def begin(self) -> tuple[int, int]:
        epoch, position = self.cursor
        if not self.continues and position:
            epoch, position = epoch + 1, 0
        self.cursor, self.continues = (epoch, position), False
        self.passes, self.passes_since_load = self.passes + 1, self.passes_since_load + 1
        return self.cursor

    def __iter__(self) -> Iterator[Any]:
        self.verify()
        epoch, position = self.begin()
        number = self.passes
        self.history.clear()
        ahead: collections.deque[tuple[Any, int]] = collections.deque()
        fetched = self.fetch(epoch, position)
        while self.passes == number:
            if self.moved:
                self.moved = False
                epoch, position = self.cursor
                self.peeked.clear()
                ahead.clear()
                fetched = self.fetch(epoch, position)
            if self.peeked:
                batch, after = self.peeked.pop()
                next(fetched, None) if not ahead else ahead.popleft()
            else:
                ahead.extend(itertools.islice(fetched, 1 + self.num_workers - len(ahead)))
                if not ahead:
                    return
                batch, after = ahead.popleft()
            self.deliver(epoch, after)
            yield batch

    def fetch(self, epoch: int, position: int) -> Iterator[tuple[Any, int]]:
        order = self.order(epoch)
        for skipped in range(position) if self.replays else ():
            self.read(epoch, [skipped], order)
        for positions, after in self.blocks_of(epoch, position):
            yield self.read(epoch, positions, order), after

    def deliver(self, epoch: int, after: int) -> None:
        self.history.append(self.cursor)
        own, self.rank = self.rank, 0  # the end of an epoch is the same for all ranks
        left = next(self.blocks_of(epoch, after), None)
        self.rank = own
        self.cursor = (epoch, after) if left is not None else (epoch + 1, 0)

    def peek(self) -> Any:
        if not self.peeked:
            self.peeked.append(next(self.fetch(*self.cursor)))
        return self.peeked[0][0]

    def skip(self, start: int, stop: int, epoch: int | None = None) -> None:
        epoch = self.cursor[0] if epoch is None else epoch
        if not 0 <= start < stop <= self.size:
            raise ValueError(f"there is no range from {start} to {stop}")
        self.skips[epoch] = Holes([*self.skips.get(epoch, ()), (start, stop)])
        self.moved = True

    def fingerprint(self) -> str:
        return f"reference, {self.size} samples, {'shuffled' if self.shuffle else 'in order'}"

    def detail(self) -> str:
        return "" if self.knows_all_ranks else f"rank {self.rank}"

    def state_dict(self, in_flight: int = 0) -> dict[str, Any]:
        return self.state_of_now(in_flight) if self.committed is None else dict(self.committed)

    def state_of_now(self, in_flight: int = 0) -> dict[str, Any]:
        epoch, position = self.history[-in_flight] if in_flight else self.cursor
        return build(
            adapter="reference", epoch=epoch, position=position, seed=self.seed, size=self.size,
            world_size=self.world_size, batch_size=self.batch_size, fingerprint=self.fingerprint(),
            detail=self.detail(), witness=self.witness(epoch if position else epoch - 1), changed="",
            omit=Omit(self.skips).text(epoch),
        )  # fmt: skip

    def witness(self, epoch: int) -> str:
        """Of the first sample of an epoch; empty before any was read."""
        return "" if epoch < 0 else str(Witness.of(epoch, None, summary_of(self.order(epoch)[0])))

    def verify(self) -> None:
        witness = Witness.parse(self.expected)
        if witness is not None and witness.differs(summary_of(self.order(witness.epoch)[0])):
            raise StateMismatchError("the first sample of the epoch is another one")
        self.expected = ""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.check(state)
        self.apply(state)

    def apply(self, state: dict[str, Any]) -> None:
        self.expected = state.get("witness", "")
        self.seed, self.cursor = state["seed"], (state["epoch"], state["position"])
        self.loaded, self.passes_since_load = dict(state), 0
        self.skips = dict(Omit.parse(state.get("omit", ""), state["epoch"]).skips)
        self.continues = True
        self.passes += 1  # ends a pass that runs
        self.history.clear()
        self.peeked.clear()
        self.origin, self.committed = self.cursor, None

    def check(self, state: Any) -> None:
        self.check_shape(state)
        mine = self.state_of_now()
        for key in ("adapter", "size", "fingerprint"):
            if state[key] != mine[key]:
                raise StateMismatchError(f"the state has {key} {state[key]!r}, this loader {mine[key]!r}")
        if self.stated_seed is not None and state["seed"] != self.stated_seed:
            raise StateMismatchError(f"the state has seed {state['seed']}, this loader {self.stated_seed}")
        self.check_topology(state)

    def check_shape(self, state: Any) -> None:
        check_format(state)
        Witness.parse(state["witness"])
        omit = Omit.parse(state["omit"], state["epoch"])
        if omit.done or any(holes.stops[-1] > self.size for holes in omit.skips.values()):
            raise StateCorruptError(f"omit is {state['omit']!r}, of {self.size} samples")
        if state["changed"]:
            raise StateCorruptError(f"changed is {state['changed']!r}, and nothing changes the data of this loader")

    def check_topology(self, state: dict[str, Any]) -> None:
        for key in ("world_size", "batch_size"):
            now = getattr(self, key)
            if not self.elastic and state[key] != now:
                raise StateMismatchError(f"the state is of {key}={state[key]}, this loader of {now}")
        allowed = [""] if self.knows_all_ranks else ["all ranks"] + ["rank 0"] * (self.world_size == 1)
        if state["detail"] not in allowed:
            raise StateMismatchError(f"the state's detail is {state['detail']!r}, this loader needs one of {allowed}")

    def reshard(self, world: World) -> None:
        if not (self.elastic and self.knows_all_ranks):
            raise UnsupportedSourceError("the rest of the epoch cannot be shared by another world")
        self.rank, self.world_size = world.rank, world.world_size
        self.moved = True

    def commit(self) -> None:
        if self.cursor == self.origin:
            raise MidepochError("nothing to commit")
        self.committed, self.origin = self.state_of_now(), self.cursor

    def rollback(self) -> None:
        self.cursor, self.moved, self.continues = self.origin, True, True


class RigidLoader(ReferenceLoader):
    elastic = elastic_workers = False

    def detail(self) -> str:
        return f"{self.num_workers} workers"

    def check_topology(self, state: dict[str, Any]) -> None:
        if state["detail"] != self.detail():
            raise StateMismatchError(f"the state is of {state['detail']}, this loader has {self.detail()}")
        super().check_topology(state | {"detail": ""})


class ReplayingLoader(ReferenceLoader):
    replays = True
    constant_time = False


class PartialLoader(ReferenceLoader):
    """Each rank knows only its own part; the parts must be gathered, and go on only in the same world."""

    elastic = False
    knows_all_ranks = False


class BareLoader:
    """The three methods and nothing else, as another library would write them."""

    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        self.inner = ReferenceLoader(rank, world_size)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.inner)

    def state_dict(self) -> dict[str, Any]:
        epoch, position = self.inner.cursor
        return {"epoch": epoch, "position": position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.apply({**state, "seed": 0})
