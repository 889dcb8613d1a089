"""Shards whose samples can be read one by one, in midepoch's order: the state is a position in it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, ClassVar

from midepoch.adapters.webdataset.finish import Finish
from midepoch.adapters.webdataset.index import Index, Keys
from midepoch.adapters.webdataset.indexed_reader import IndexedReader, IndexedRequest, order_of
from midepoch.adapters.webdataset.pipeline import Pipeline
from midepoch.errors import SourceError, StateCorruptError
from midepoch.loader import promises
from midepoch.loader.adapter import Adapter, Facts, Options, Run, Session
from midepoch.loader.capabilities import Capabilities
from midepoch.loader.place import Place
from midepoch.reading.indexed import spans
from midepoch.reading.sessions import unwrapped
from midepoch.reading.workers import Server
from midepoch.world import Share, World

__all__ = ["IndexedAdapter"]

_ENDLESS_PASSES = 1 << 16  # length of an epoch that has no end
_UNITS = 1 << 60  # limit of positions, counted from the first epoch on


class IndexedAdapter(Adapter):
    """A pipeline over indexed shards."""

    name: ClassVar[str] = "webdataset"

    def __init__(self, source: Any, options: Options, pipeline: Pipeline, keys: Keys, index: Index) -> None:
        super().__init__(source, options)
        self._pipeline, self._index = pipeline, index
        if pipeline.draws is not None:
            pipeline.draws = pipeline.draws.among(index.kept)
        self._order = order_of(pipeline, index.counts)
        if index.size and not self._order.size:
            raise SourceError("no shard with a weight above 0 has samples: check the weights and the shards")
        self._limit = pipeline.limit
        self.facts = Facts(
            batch_size=pipeline.batch_size or 1, drop_last=pipeline.drop_last, seed=pipeline.seed,
            order=self._order if self._limit is None else None,
        )  # fmt: skip
        # An epoch ends where with_epoch says, so the state must say where it began.
        self._counted = self._limit is not None and self._limit.units is not None
        self._reader = IndexedReader(index, self._order, pipeline, keys, options.streams)
        self._finish = Finish(pipeline, options.streams)
        self._server = Server(pipeline.loader, options)
        self._opened: tuple[int, int] | None = None  # epoch and size of the open session

    @classmethod
    def recognises(cls, source: object) -> bool:
        """Never: WebDatasetAdapter makes this adapter."""
        return False

    # --- length ---

    def _full_size(self, world: World) -> int | None:
        """Samples of all ranks in an epoch that begins in this world; None if it has no end."""
        passes, limit = self._order.size, self._limit
        if limit is None:
            return passes
        if limit.passes is not None:
            passes *= limit.passes
        if limit.units is None:
            return passes if limit.passes is not None else None
        units = limit.units * (self._pipeline.workers if limit.of_worker else 1) * world.world_size
        return units if limit.passes is None else min(units, passes)

    def size(self, seed: int, epoch: int, world: World, detail: str = "") -> int | None:
        """The number of samples. An epoch of with_epoch keeps its size after a change of world."""
        if self._counted:
            if detail:
                return _parse_counted(detail)[1]
            if self._opened is not None and self._opened[0] == epoch:
                return self._opened[1]
        return self._full_size(world)

    def _base(self, epoch: int, world: World, detail: str) -> int:
        if detail:
            return _parse_counted(detail)[0]
        size = self._full_size(world)
        base = epoch * (self._order.size * _ENDLESS_PASSES if size is None else size)
        if base >= _UNITS:
            raise StateCorruptError(f"epoch {epoch} begins after {base} samples, which is too many: use a lower epoch")
        return base

    def detail_at(self, here: Place, there: tuple[int, int], seed: int, world: World) -> str:
        """With with_epoch: where the epoch begins, counted through all passes, and its size."""
        if not self._counted:
            return ""
        if here.detail and there[0] == here.epoch:
            return here.detail
        base = self._base(there[0], world, "")
        if here.detail and there == (here.epoch + 1, 0):  # the rest of the epoch is skipped
            base = sum(_parse_counted(here.detail))
        return _counted_detail(base, self._full_size(world) or 0)

    # --- description ---

    def describe(self) -> dict[str, str]:
        """The order, the shards, and whether epochs are passes."""
        index = self._index
        shards = f"{len(index.shards)} shards of {index.size} samples, {index.checksum}"
        described = {"order": self._order.describe(), "shards": shards}
        if self._limit is not None:
            described["epochs"] = "counted" if self._limit.units is not None else f"{self._limit.passes} passes"
        return described

    def drawing(self) -> tuple[object, ...]:
        """The stages, wherever they run."""
        return tuple(self._pipeline.stages)

    def capabilities(self) -> Capabilities:
        """All yes."""
        return Capabilities(
            exact_order=self._pipeline.exact_order,
            exact_augmentations=promises.augmentations(
                self.options, "numbers drawn for a whole batch are exact on the same split"
            ),
            constant_time_resume=promises.CONSTANT_TIME,
            elastic_world=promises.POSITIONS,
            elastic_workers=promises.POSITIONS,
            rank_independent=promises.ONE_STATE,
        )

    def check_detail(self, detail: str, seed: int, epoch: int, position: int, world: World) -> None:
        """Check where the epoch began."""
        if not self._counted:
            super().check_detail(detail, seed, epoch, position, world)
            self._base(epoch, world, detail)
        else:
            size = _parse_counted(detail)[1]
            if position > size:
                raise StateCorruptError(f"position {position} lies beyond the epoch's {size}: load an undamaged state")

    # --- sessions ---

    def open(self, run: Run) -> Session:
        """Open a session at the run's position."""
        self._pipeline.check_shared(run.world, self.options.shard)  # now that the world is known
        share = run.share
        if share is None:
            size = self._order.size * _ENDLESS_PASSES
            share = Share(size, run.position, self.facts.batch_size, run.world, run.tail, self.facts.drop_last)
        base = self._base(run.epoch, run.world, run.detail)
        if self._counted:
            self._opened = (run.epoch, share.size)
        answers, close = self._server(self._reader, _requests(run, base, share), run)
        detail = _counted_detail(base, share.size) if self._counted else ""
        after = _counted_detail(base + share.size, self._full_size(run.world) or 0) if self._counted else ""
        self._finish.begin_pass()
        answers = unwrapped(answers, run.reports.append)
        return _IndexedSession(answers, close, self._finish, share, (detail, after))

    def close(self) -> None:
        """End persistent worker processes, and close this process's files."""
        self._reader.close()
        self._server.close()


def _requests(run: Run, base: int, share: Share) -> Iterator[IndexedRequest]:
    first, ranks = share.start, range(share.world.world_size)
    asks = run if run.looks else None
    for step, (start, stop) in enumerate(spans(share)):
        last = first + share.global_batch
        if step >= share.full_steps:
            last = max(replace(share, world=World(rank, len(ranks))).span(step)[1] for rank in ranks)
        yield IndexedRequest(run.seed, base, share.size, start, stop, first, last, run.session, asks)
        first, asks = first + share.global_batch, None


_COUNTED = re.compile(r"base=(\d{1,18});size=(\d{1,18})")


def _counted_detail(base: int, size: int) -> str:
    return f"base={base};size={size}"


def _parse_counted(detail: str) -> tuple[int, int]:
    match = _COUNTED.fullmatch(detail)
    if match is None or not int(match[2]):
        raise StateCorruptError(f"the state's detail {detail!r} is not from this pipeline: load an undamaged state")
    return int(match[1]), int(match[2])


class _IndexedSession(Session):
    def __init__(
        self,
        answers: Iterator[Any],
        close: Callable[[], None],
        finish: Finish,
        share: Share,
        details: tuple[str, str],
    ) -> None:
        self._answers, self._close, self._finish = answers, close, finish
        self._share, self._details = share, details
        self._taken = self._passed_over = 0

    def take(self) -> Any:
        """The next batch that is not empty."""
        while True:
            answer = next(self._answers, None)
            if answer is None:
                raise StopIteration
            values = answer.values
            if self._finish.needed and values:
                values = self._finish(answer, self._share.world)
            if values:
                break
            self._passed_over += 1
            self.position_correction = self._ahead()
        self._taken += 1
        self.position_correction = self._ahead()
        return values[0]

    def _ahead(self) -> int:
        """The number of units in skipped steps."""
        if not self._passed_over:
            return 0
        share = self._share
        reached = min((self._taken + self._passed_over) * share.global_batch, share.size - share.start)
        return reached - self._taken * share.global_batch

    @property
    def varies(self) -> bool:  # type: ignore[override]
        """Whether steps were skipped."""
        return self._passed_over > 0

    def bookmark(self) -> bool:
        """Empty, but signals that skipped steps may have changed the position."""
        return True

    def detail(self, bookmark: object) -> str:
        """With with_epoch: where the epoch began."""
        return self._details[0]

    def next_epoch_detail(self) -> str:
        """Where the next epoch begins."""
        return self._details[1]

    def close(self) -> None:
        self._answers = iter(())
        self._close()
