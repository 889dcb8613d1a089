"""Shards whose samples can be read one by one, in midepoch's order: the state is a position in it."""

from __future__ import annotations

import contextlib
import re
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple, cast

import numpy as np
import numpy.typing as npt
from torch.utils.data import default_collate, default_convert
from webdataset import filters

from midepoch.adapters.webdataset.finish import Answer, Finish
from midepoch.adapters.webdataset.index import Index, Keys
from midepoch.adapters.webdataset.pipeline import Pipeline, grouped, run_stages
from midepoch.adapters.webdataset.shards import RangeReader, Take
from midepoch.errors import SourceError, StateCorruptError
from midepoch.loader import promises
from midepoch.loader.adapter import Adapter, Options, Run, Seen, Session
from midepoch.loader.capabilities import Capabilities, Capability
from midepoch.loader.place import Place
from midepoch.order import EpochOrder, Order, Sequential, Shuffled, Windowed
from midepoch.order.keys import derive_key, derive_keys
from midepoch.randomness.streams import Purpose, Streams
from midepoch.reading.indexed import First, LookRequest, SeeingSession, spans
from midepoch.reading.stored import seen_as_stored
from midepoch.reading.tar import parse_members
from midepoch.reading.workers import Server
from midepoch.world import Share, World

__all__ = ["IndexedAdapter", "order_of"]

_FEWEST_SHARDS = 16  # mixed at a time: more than most loaders have workers, each of which mixes one
_WIDER = 4  # times webdataset's buffer, so that samples move at least as far
_ENDLESS_PASSES = 1 << 16  # length of an epoch that has no end
_UNITS = 1 << 60  # limit of positions, counted from the first epoch on
_MOST_LOOKED_AT = 256 << 10  # bytes of a sample, which may come over a network: they tell it from others


def order_of(pipeline: Pipeline, counts: list[int]) -> Order:
    """The order that replaces a pipeline's shuffles, over shards with these numbers of samples."""
    size, filled = sum(counts), sum(1 for count in counts if count)
    if not pipeline.shuffles:
        return Sequential(size)
    window = max(_FEWEST_SHARDS, -(-_WIDER * pipeline.buffer * filled // max(size, 1)))
    return Shuffled(size) if window >= filled else Windowed(size, tuple(counts), window)


class _Request(NamedTuple):
    """One batch: positions `start` to `stop` of an epoch.

    Attributes:
        seed: of the order and of the random streams.
        base: number of samples in earlier epochs, through all passes.
        size: number of positions in the epoch. Positions from there on repeat its beginning.
        first, last: the positions of all ranks at this step, for a rank left without a sample.
        session: identifies the run.
        left: number of that run's requests that are still to come.
        run: that asks to look at the first sample of its epoch; None for all but its first request.
    """

    seed: int
    base: int
    size: int
    start: int
    stop: int
    first: int
    last: int
    session: int
    left: int
    run: Run | None = None


class _Samples:
    """Makes webdataset's samples from the bytes of their files."""

    def __init__(self, pipeline: Pipeline, keys: Keys) -> None:
        self._grouping = pipeline.grouping
        self._keys = keys

    def __call__(self, take: Take, length: int, url: str, path: str, start: int) -> list[dict[str, Any]]:
        files = self._files(parse_members(take, length, url, start), url, path)
        return grouped(files, url, self._grouping)

    def _files(self, members: list[tuple[str, bytes]], url: str, path: str) -> Iterator[dict[str, Any]]:
        chosen = self._keys.chosen
        for name, content in members:
            renamed = chosen(name)
            if renamed is None:
                continue
            file = {"fname": renamed, "data": content, "__url__": url}
            if path:
                file["__local_path__"] = path
            yield file


class IndexedReader:
    """Reads batches by position, each sample under its own random stream.

    Args:
        index: of the shards.
        order: of the samples in one pass.
        pipeline: with the stages to run.
        keys: how files are grouped into samples.
        streams: False lets the stages draw from the caller's generators.
        batches: False hands out a request's samples one by one, for the main process to batch.
    """

    def __init__(
        self, index: Index, order: Order, pipeline: Pipeline, keys: Keys, streams: bool, batches: bool
    ) -> None:
        self.dataset = pipeline.dataset
        self._index, self._order = index, order
        self._samples = _Samples(pipeline, keys)
        self._sample_stages = pipeline.sample_stages
        self._batch_stages = pipeline.batch_stages if batches else []
        self._batches = batches
        self._draws_in_batch = any(_may_draw(stage) for stage in self._batch_stages)
        self._ranges = RangeReader(index.shards)
        self._streams = Streams(self._sample_stages, self._batch_stages, keys) if streams else None
        self._orders: dict[tuple[int, int], EpochOrder] = {}
        self._session: int | None = None

    def __call__(self, request: _Request) -> Answer | First:
        """Read a batch. The answer has no value if the stages dropped all of it."""
        answer = self._answer(request)
        return answer if request.run is None else First(answer, self._seen(request, request.run))

    def _seen(self, request: _Request, run: Run) -> Seen:
        """The first sample of the epoch as it is stored, read by its range: never more of a shard than that."""
        index, ranges = self._index, self._ranges

        def where(sample: int) -> tuple[int, int, int]:
            return index.ranges(np.array([sample]))[0]

        def stored(sample: int) -> bytes:
            number, start, length = where(sample)
            count = min(length, _MOST_LOOKED_AT)
            (take,) = ranges.takers([(number, start, count)])
            return take(0, count) + b"%d" % length

        def name(sample: int) -> str:
            number, start, _ = where(sample)
            return f"sample {sample}, from byte {start} of {index.shards[number].url} on,"

        look = LookRequest.of(run, int(self._places(request, 0, 1)[0][0]))
        assert look is not None  # a request has a run only if that looks
        return seen_as_stored(look, index.size, stored, name)

    def _answer(self, request: _Request) -> Answer:
        streams = self._streams
        if streams is not None and self._session != request.session:
            self._session = request.session
            streams.begin_pass()
        answer = self._read(request, request.start, request.stop)
        if streams is not None and streams.made_late():
            # Stages made their own generators while they ran. These are known now, so run once more.
            answer = self._read(request, request.start, request.stop)
        if answer.values or request.last - request.first <= request.stop - request.start or not self._batches:
            return answer
        # Every sample of this rank was dropped. Perhaps other ranks have some, and would wait for this one, so it reads
        # one of theirs. A batch that is empty on all ranks is skipped by all.
        for position in range(request.first, request.last):
            if not request.start <= position < request.stop:
                answer = self._read(request, position, position + 1)
                if answer.values:
                    return answer
        return answer

    def close(self) -> None:
        """Close this process's open shards. Reading opens them again."""
        self._ranges.close()

    def _places(self, request: _Request, start: int, stop: int) -> tuple[npt.NDArray[np.int64], list[int]]:
        """The numbers of the samples at these positions, and the keys of their random streams."""
        positions = request.base + np.arange(start, stop, dtype=np.int64) % request.size
        passes, places = np.divmod(positions, self._index.size)
        samples = np.empty(len(positions), np.int64)
        keys: list[int] = []
        cuts = [0, *(np.flatnonzero(np.diff(positions) != 1) + 1).tolist(), len(positions)]
        cuts = sorted({*cuts, *(np.flatnonzero(np.diff(passes)) + 1).tolist()})
        for first, last in pairwise(cuts):
            number = int(passes[first])
            begin = int(places[first])
            samples[first:last] = self._order_of(request.seed, number)[begin : begin + last - first]
            key = derive_key(Purpose.SAMPLE, request.seed, number)
            keys += cast(list[int], derive_keys(key, places[first:last]).tolist())
        return samples, keys

    def _order_of(self, seed: int, number: int) -> EpochOrder:
        order = self._orders.get((seed, number))
        if order is None:
            while len(self._orders) > 1:
                del self._orders[next(iter(self._orders))]
            order = self._orders[seed, number] = self._order.epoch(seed, number)
        return order

    def _read(self, request: _Request, start: int, stop: int) -> Answer:
        samples, keys = self._places(request, start, stop)
        ranges = self._index.ranges(samples)
        # This comes before any random stream begins, because a network file system may draw random numbers.
        takers = self._ranges.takers(ranges)
        with self._streams or contextlib.nullcontext() as begin:
            return self._run(request, start, ranges, takers, keys, begin)

    def _run(
        self,
        request: _Request,
        start: int,
        ranges: list[tuple[int, int, int]],
        takers: list[Take],
        keys: list[int],
        begin: Callable[[int], None] | None,
    ) -> Answer:
        shards, stages = self._index.shards, self._sample_stages
        survivors: list[Any] = []
        kept: list[int] = []
        for (number, first, length), take, key in zip(ranges, takers, keys, strict=True):
            if begin is not None:
                begin(key)
            shard = shards[number]
            values = run_stages(stages, self._samples(take, length, shard.url, shard.path, first))
            survivors += values
            kept += [key] * len(values)
        if not survivors or not self._batch_stages:
            return Answer(survivors, kept)
        if begin is not None and self._draws_in_batch:
            begin(_batch_key(request, start))
        return Answer(run_stages(self._batch_stages, survivors), [])


def _batch_key(request: _Request, start: int) -> int:
    return derive_key(Purpose.BATCH, request.seed, request.base + start)


def _may_draw(stage: Any) -> bool:
    """False for webdataset's and torch's own functions that make a batch, which draw nothing."""
    function = getattr(stage, "collate", getattr(stage, "function", stage))
    return function not in (None, filters.default_collation_fn, default_collate, default_convert)


class IndexedAdapter(Adapter):
    """A pipeline over indexed shards."""

    name: ClassVar[str] = "webdataset"

    def __init__(self, source: Any, options: Options, pipeline: Pipeline, keys: Keys, index: Index) -> None:
        super().__init__(source, options)
        self._pipeline, self._index = pipeline, index
        self._order = order_of(pipeline, index.counts)
        self.batch_size = pipeline.batch_size or 1
        self.drop_last = pipeline.drop_last
        self.seed = pipeline.seed
        self._refill = bool(options.settings.get("refill", False))
        self._limit = pipeline.limit
        self.leads = self._limit is not None or self._refill
        self.seals_detail = self._counted or self._refill
        self._whole = not self._refill and not pipeline.late_sample_stages
        self._reader = IndexedReader(index, self._order, pipeline, keys, options.streams, self._whole)
        self._finish = Finish(pipeline, options.streams, self._whole)
        self._server = None if pipeline.loader is None else Server(pipeline.loader, options)
        self._opened: tuple[int, int] | None = None  # epoch and size of the open session

    @classmethod
    def recognises(cls, source: object) -> bool:
        """Never: WebDatasetAdapter makes this adapter."""
        return False

    # --- length ---

    def _full_size(self, world: World) -> int | None:
        """Samples of all ranks in an epoch that begins in this world; None if it has no end."""
        passes, limit = self._index.size, self._limit
        if limit is None:
            return passes
        if limit.passes is not None:
            passes *= limit.passes
        if limit.units is None:
            return passes if limit.passes is not None else None
        loader = self._pipeline.loader
        workers = max(1, loader.num_workers) if limit.of_worker and loader is not None else 1
        units = limit.units * workers * world.world_size
        return units if limit.passes is None else min(units, passes)

    def size(self, seed: int, epoch: int, world: World, detail: str = "") -> int | None:
        """The number of samples. An epoch of with_epoch keeps its size after a change of world."""
        if self._counted:
            if detail:
                return _parse_counted(detail)[1]
            if self._opened is not None and self._opened[0] == epoch:
                return self._opened[1]
        return self._full_size(world)

    @property
    def _counted(self) -> bool:
        """Whether epochs end where with_epoch says, so that the state must say where they began."""
        return self._limit is not None and self._limit.units is not None and not self._refill

    def _base(self, epoch: int, world: World, detail: str) -> int:
        if detail and not self._refill:
            return _parse_counted(detail)[0]
        size = self._full_size(world)
        base = epoch * (self._index.size * _ENDLESS_PASSES if size is None else size)
        if base >= _UNITS:
            raise StateCorruptError(f"epoch {epoch} begins after {base} samples, which is too many: use a lower epoch")
        return base

    def beginning(self, epoch: int, world: World) -> str:
        """With with_epoch: where the epoch begins, counted through all passes, and its size."""
        if not self._counted:
            return ""
        return _counted_detail(self._base(epoch, world, ""), self._full_size(world) or 0)

    def lead(self, here: Place, there: tuple[int, int], seed: int, world: World) -> str:
        """Skip the rest of an epoch of with_epoch. With `refill`, nothing is skipped."""
        if there != (here.epoch + 1, 0):
            return ""
        if self._refill:
            return here.detail
        if not self._counted:
            return ""
        base, size = _parse_counted(here.detail or self.beginning(here.epoch, world))
        return _counted_detail(base + size, self._full_size(world) or 0)

    # --- description ---

    def describe(self) -> dict[str, str]:
        """The order, the shards, and whether epochs are passes."""
        index = self._index
        shards = f"{len(index.shards)} shards of {index.size} samples, {index.checksum}"
        described = {"order": self._order.describe(), "shards": shards}
        if self._refill:
            described["refill"] = "yes"
        if self._limit is not None:
            described["epochs"] = "counted" if self._limit.units is not None else f"{self._limit.passes} passes"
        return described

    def drawing(self) -> tuple[object, ...]:
        """The stages, wherever they run."""
        return tuple(self._pipeline.stages)

    def capabilities(self) -> Capabilities:
        """All yes, unless batches are refilled."""
        exact = promises.augmentations(
            self.options, "numbers drawn for a whole batch are exact on the same split"
        )
        own = Capability(False, "with refill=True each rank reads on to replace the samples that it dropped")
        return Capabilities(
            exact_order=promises.OUR_ORDER,
            exact_augmentations=exact,
            constant_time_resume=promises.CONSTANT_TIME,
            elastic_world=own if self._refill else promises.POSITIONS,
            elastic_workers=promises.POSITIONS,
            rank_independent=own if self._refill else promises.ONE_STATE,
        )

    def check_detail(self, detail: str, seed: int, epoch: int, position: int, world: World) -> None:
        """Check where the epoch began, or where a refilled stream is."""
        if self._refill:
            if detail:
                _parse_refill(detail)
            elif position:
                raise StateCorruptError(
                    f"the state stands at position {position} but lacks this rank's own part: load a complete state"
                )
        elif not self._counted:
            super().check_detail(detail, seed, epoch, position, world)
            self._base(epoch, world, detail)
        else:
            size = _parse_counted(detail)[1]
            if position > size:
                raise StateCorruptError(f"position {position} lies beyond the epoch's {size}: load an undamaged state")

    # --- sessions ---

    def open(self, run: Run) -> Session:
        """Open a session at the run's position."""
        if run.world.world_size > 1 and not self._pipeline.splits and self.options.shard is None:
            raise SourceError(  # raised at the first batch, when the world is known
                "the pipeline has no nodesplitter, so each rank may already have its own urls: pass shard=True to "
                "wrap() if every rank has the same urls (midepoch shards the samples), or world=midepoch.World() and "
                "a state for each rank if they differ"
            )
        if self._refill:
            return self._open_refilled(run)
        share = run.share
        if share is None:
            size = self._index.size * _ENDLESS_PASSES
            share = Share(size, run.position, self.batch_size, run.world, run.tail, self.drop_last)
        base = self._base(run.epoch, run.world, run.detail)
        if self._counted:
            self._opened = (run.epoch, share.size)
        requests = _requests(run, base, share)
        answers, close = self._serve(requests, run)
        detail = _counted_detail(base, share.size) if self._counted else ""
        after = _counted_detail(base + share.size, self._full_size(run.world) or 0) if self._counted else ""
        self._finish.begin_pass()
        return _IndexedSession(answers, close, self._finish, share, (detail, after), run, base)

    def _serve(self, requests: Iterator[_Request], run: Run) -> tuple[Iterator[Any], Callable[[], None]]:
        if self._server is None:
            return map(self._reader, requests), _nothing
        return self._server(self._reader, requests, run)

    def _open_refilled(self, run: Run) -> Session:
        alone = Share(_UNITS - 1, 0, self.batch_size, run.world, "drop", True)
        full = self._full_size(run.world)
        steps = 0 if full is None else replace(alone, size=full, tail=run.tail, drop_last=self.drop_last).steps
        turn, skip = _parse_refill(run.detail) if run.detail else (run.epoch * steps, 0)
        requests = _requests(run, 0, replace(alone, start=turn * alone.global_batch))
        answers, close = self._serve(requests, run)
        left = None if run.share is None else run.share.steps
        self._finish.begin_pass()
        return _RefilledSession(answers, close, self._finish, run, (turn, skip), self.batch_size, left, self._index)

    def close(self) -> None:
        """End persistent worker processes, and close this process's files."""
        self._reader.close()
        if self._server is not None:
            self._server.close()


def _nothing() -> None:
    pass


def _requests(run: Run, base: int, share: Share) -> Iterator[_Request]:
    first, ranks, left = share.start, range(share.world.world_size), share.steps
    asks = run if run.looks else None
    for step, (start, stop) in enumerate(spans(share)):
        last = first + share.global_batch
        if step >= share.full_steps:
            last = max(replace(share, world=World(rank, len(ranks))).span(step)[1] for rank in ranks)
        left -= 1
        yield _Request(run.seed, base, share.size, start, stop, first, last, run.session, left, asks)
        first, asks = first + share.global_batch, None


_COUNTED = re.compile(r"base=(\d{1,18});size=(\d{1,18})")
_REFILL = re.compile(r"turn=(\d{1,15});skip=(\d{1,9})")


def _counted_detail(base: int, size: int) -> str:
    return f"base={base};size={size}"


def _parse_counted(detail: str) -> tuple[int, int]:
    match = _COUNTED.fullmatch(detail)
    if match is None or not int(match[2]):
        raise StateCorruptError(f"the state's detail {detail!r} is not from this pipeline: load an undamaged state")
    return int(match[1]), int(match[2])


def _parse_refill(detail: str) -> tuple[int, int]:
    match = _REFILL.fullmatch(detail)
    if match is None:
        raise StateCorruptError(f"the state's detail {detail!r} is not from this pipeline: load an undamaged state")
    return int(match[1]), int(match[2])


class _IndexedSession(SeeingSession):
    marks = True

    def __init__(
        self,
        answers: Iterator[Any],
        close: Callable[[], None],
        finish: Finish,
        share: Share,
        details: tuple[str, str],
        run: Run,
        base: int,
    ) -> None:
        super().__init__()
        self._answers, self._close, self._finish = self.unwrapped(answers), close, finish
        self._share, self._details, self._run, self._base = share, details, run, base
        self._taken = self._passed_over = 0

    def take(self) -> Any:
        """The next batch that is not empty."""
        while True:
            answer = next(self._answers, None)
            if answer is None:
                raise StopIteration
            values = answer.values
            if self._finish.needed and values:
                values = self._finish(answer, self._key())
                self._finish.check(values, self._share.world)
            if values:
                break
            self._passed_over += 1
            self.drift = self._ahead()
        self._taken += 1
        self.drift = self._ahead()
        return values[0]

    def _key(self) -> int:
        """The key of the batch's stream in the main process, from its first position, as in the reader."""
        share = self._share
        step = self._taken + self._passed_over
        position = share.start + step * share.global_batch + share.world.rank * share.batch_size
        return derive_key(Purpose.BATCH, self._run.seed, self._base + position)

    def _ahead(self) -> int:
        """The number of units in skipped steps."""
        if not self._passed_over:
            return 0
        share = self._share
        reached = min((self._taken + self._passed_over) * share.global_batch, share.size - share.start)
        return reached - self._taken * share.global_batch

    @property
    def varies(self) -> bool:
        """Whether steps were skipped."""
        return self._passed_over > 0

    def mark(self) -> bool:
        """Empty, but signals that skipped steps may have changed the position."""
        return True

    def detail(self, mark: object) -> str:
        """With with_epoch: where the epoch began."""
        return self._details[0]

    def following(self) -> str:
        """Where the next epoch begins."""
        return self._details[1]

    def close(self) -> None:
        self._answers = iter(())
        self._close()


class _RefilledSession(SeeingSession):
    """Full batches: this rank reads on to replace dropped samples, into the next pass if necessary."""

    marks = True

    def __init__(
        self,
        answers: Iterator[Any],
        close: Callable[[], None],
        finish: Finish,
        run: Run,
        cursor: tuple[int, int],
        batch_size: int,
        left: int | None,
        index: Index,
    ) -> None:
        super().__init__()
        self._answers, self._close, self._finish, self._run = self.unwrapped(answers), close, finish, run
        self._batch_size, self._left = batch_size, left
        self._turn, self._skip = cursor  # the next span, or the one whose rest is held
        self._held: deque[tuple[int, Any]] = deque()
        self._open = False  # whether the span at `_turn` has been read
        self._patience = index.size // batch_size + 2  # spans without a sample before an error

    def take(self) -> Any:
        """The next batch."""
        if self._left == 0:
            raise StopIteration
        key = derive_key(self._run.seed, self._turn, self._skip)
        batch: list[tuple[int, Any]] = []
        empty = 0
        while len(batch) < self._batch_size:
            if not self._open:
                answer = next(self._answers)
                self._held = deque(zip(answer.keys, answer.values, strict=True))
                self._open = True
                for _ in range(min(self._skip, len(self._held))):
                    self._held.popleft()
            if self._held:
                batch.append(self._held.popleft())
                self._skip += 1
                empty = 0
                continue
            self._turn, self._skip, self._open = self._turn + 1, 0, False
            empty += 1
            if empty > self._patience:
                raise SourceError("the stages dropped every sample of a whole pass: make them keep some")
        keys, values = [key for key, _ in batch], [value for _, value in batch]
        outputs = self._finish(Answer(values, keys), key) if self._finish.needed else values
        if not outputs:
            raise SourceError("a stage dropped a whole batch: with refill=True drop samples before they are batched")
        if self._left is not None:
            self._left -= 1
        return outputs[0]

    def mark(self) -> tuple[int, int]:
        """The position of this rank's stream."""
        return self._turn, self._skip

    def detail(self, mark: tuple[int, int]) -> str:
        """As text."""
        turn, skip = mark
        return f"turn={turn};skip={skip}"

    def following(self) -> str:
        """The next epoch continues from there."""
        return self.detail(self.mark())

    def close(self) -> None:
        self._answers = iter(())
        self._close()
