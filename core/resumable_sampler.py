"""A torch Sampler with a state, in place of RandomSampler and DistributedSampler."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from dataclasses import replace
from operator import length_hint
from typing import Any, ClassVar

from .loader.adapter import Adapter, Facts, Options, Run, Session, Why
from .loader.capabilities import Capabilities, Capability
from .loader.loader import Loader
from .loader.place import Place
from .order import MAXIMUM_SIZE, Endless, Order, Sequential, Shuffled
from .reading.indexed import map_requests
from .reading.sessions import IteratorSession
from .samplers import OrderedSampler, SamplerSpec
from .state.format import reseal
from .world import Share, Tail, World

__all__ = ["IndexAdapter", "ResumableSampler"]

_INDEX_BLOCK = 512


class ResumableSampler(OrderedSampler):
    """Indices in place of RandomSampler and DistributedSampler, with a state.

    Each rank's indices are its part of the global batches, so pass the loader's `batch_size` if there are several
    ranks. If the loader prefetches, take the state from ``midepoch.wrap(loader)``: the sampler only knows which indices
    it has handed out.

    Args:
        size: of the dataset.
        seed: of the order.
        shuffle: True for a new order in each epoch, False for the dataset's own order, or an `Order` of midepoch.order.
            ``Endless(Shuffled(size))`` gives rounds over all samples, one after the other, and does not end.
        world: the ranks that share the indices; None for the world at the time when iteration starts.
        batch_size: of one rank's batches.
        drop_last: as in DistributedSampler: if the size is not divisible by the world size, leave out the last indices
            instead of repeating some.
    """

    def __init__(
        self,
        size: int,
        *,
        seed: int = 0,
        shuffle: bool | Order = True,
        world: World | None = None,
        batch_size: int = 1,
        drop_last: bool = False,
    ) -> None:
        if type(seed) is not int or not 0 <= seed < 1 << 64:
            raise ValueError(f"seed must be an int in [0, 2**64), got {seed!r}")
        if type(batch_size) is not int or batch_size < 1:
            raise ValueError(f"batch_size must be an int of at least 1, got {batch_size!r}")
        order = (Shuffled(size) if shuffle else Sequential(size)) if isinstance(shuffle, bool) else shuffle
        if not callable(getattr(order, "epoch", None)):
            raise TypeError(f"shuffle must be True, False or an order of midepoch.order, got {shuffle!r}")
        over = order.round.size if isinstance(order, Endless) else order.size
        if over != size:
            raise ValueError(f"the order is over {over} positions, size is {size}: make them equal")
        self.order, self.seed, self.world, self.batch_size = order, seed, world, batch_size
        self.tail: Tail = "drop" if drop_last else "pad"
        options = Options(seed=seed, world=world, tail=self.tail)
        self._loader = Loader(IndexAdapter(self, options), options)
        self._block_length = 0
        self._rest: Iterator[int] = iter(())

    def __iter__(self) -> Iterator[int]:
        self._drop_block()  # an older pass ends with an error that says why
        for block in self._loader:
            self._block_length = len(block)
            self._rest = iter(block)
            yield from self._rest

    def _drop_block(self) -> None:
        """Empty the running pass's block, so that its next index comes from the loader."""
        collections.deque(self._rest, maxlen=0)

    def spec(self) -> SamplerSpec:
        """The order, seed, tail and world that it was given."""
        return SamplerSpec(self.order, seed=self.seed, tail=self.tail, world=self.world)

    def __len__(self) -> int:
        """Indices of one full epoch on this rank.

        Raises:
            TypeError: its order does not end.
        """
        if isinstance(self.order, Endless):
            raise TypeError("this ResumableSampler has no length: its order does not end")
        world = self.world or World.current()
        share = Share(self.order.size, 0, 1, world, self.tail, False)
        return share.steps

    def set_epoch(self, epoch: int) -> None:
        """As `DistributedSampler.set_epoch`; not needed: each pass is a new epoch."""
        if length_hint(self._rest) and epoch > self.state_dict()["epoch"]:
            self._drop_block()  # the rest of the epoch that ends here
        self._loader.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """The sampler's position: after the last index handed out or, with several ranks, after its batch."""
        rest = length_hint(self._rest)
        if not rest or not _is_alone(self.world):
            return self._loader.state_dict()
        state = self._loader.state_dict(in_flight=1)
        return reseal({**state, "position": state["position"] + self._block_length - rest})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state` at the next index; see `midepoch.Loader.load_state_dict`."""
        self._loader.load_state_dict(state)
        self._drop_block()  # a running pass continues from the state too


def _is_alone(world: World | None) -> bool:
    """Whether this is a single process. States may then fall inside a block."""
    return (world or World.current()).world_size == 1


class IndexAdapter(Adapter):
    """The adapter of a ResumableSampler. Its batches are lists of indices."""

    name: ClassVar[str] = "sampler"

    def __init__(self, source: ResumableSampler, options: Options) -> None:
        super().__init__(source, options)
        self.facts = Facts(batch_size=source.batch_size)
        self._order = source.order

    @classmethod
    def recognises(cls, source: object) -> bool:
        """`ResumableSampler` makes this adapter itself."""
        return False

    def size(self, seed: int, epoch: int, world: World, detail: str = "") -> int | None:
        """Indices in one epoch; None if it does not end."""
        return None if isinstance(self._order, Endless) else self._order.size

    def prepare(self, place: Place, seed: int, why: Why) -> None:
        """In a single process the batch size does not affect the order, and long blocks make each index cheap."""
        size: int = self.source.batch_size
        self.facts = Facts(batch_size=max(size, _INDEX_BLOCK) if _is_alone(self.options.world) else size)

    def describe(self) -> dict[str, str]:
        """The order."""
        return {"order": self._order.describe()}

    def capabilities(self) -> Capabilities:
        """All yes, for indices."""
        yes = Capability(True, "an index is a function of seed, epoch and position")
        return Capabilities(yes, yes, yes, yes, yes, yes)

    def open(self, run: Run) -> Session:
        """Lists of indices."""
        if run.share is None:
            run = replace(run, share=self._share_of(MAXIMUM_SIZE, run.position, run.world))
        order = self._order.epoch(run.seed, run.epoch)
        return IteratorSession(request.indices for request in map_requests(run, order, lambda: None))
