"""The adapter of iterables, in this process or in workers: driven by their samplers if exact, otherwise replayed."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from ..attributes import directly_held
from ..errors import (
    SourceError,
    StateCorruptError,
    StateMismatchError,
    UnsupportedSourceError,
    warn,
)
from ..loader import promises
from ..loader.adapter import Adapter, Facts, Options, Run, Session
from ..loader.capabilities import Capabilities, Capability
from ..loader.place import Place
from ..order import MAXIMUM_SIZE
from ..samplers import SamplerSpec, interpret_sampler, length_of
from ..sharding import check_sharding
from ..trying import Finding
from ..world import World
from .collating import keeps_nothing
from .driven import AloneReader, Driven, DrivenReader, driven_requests, exposed_samplers
from .indexed import unchanged
from .private import sent_error
from .replay import Chain, End, Found, Open, Replayed, ReplayReader, ReplayRequest
from .units import Units
from .workers import Server

__all__ = ["IterableAdapter", "IterableLoaderAdapter"]

_DRIVEN_DETAIL = re.compile(r"draws=(\d{1,6}(?:,\d{1,6})*)(?:;crc=([0-9a-f]{8}))?")
_VARIES = "varies;workers=0;chain="
_REPLAY_DETAIL = re.compile(r"(varies;)?workers=(\d{1,6});chain=([0-9a-f]{8})?")


class IterableAdapter(Adapter):
    """The common part of adapters for `IterableDataset`s, re-iterable objects and generator functions.

    If the source exposes samplers and each sample draws a constant number from them, midepoch drives these samplers.
    Otherwise it replays the source. With ``shard=False`` each process reads its own stream, in units of batches.

    Args:
        source: the object given to `wrap`.
        options: as given to `wrap`.
        stream: the object to iterate, or a function that returns an iterator.
        workers: the number of worker processes that read it; 0 for this process.
        collate: from a list of samples to a batch; None if the stream yields batches.
        batch_size: samples in a batch; None if samples are handed out one by one.
        drop_last: leave out a last batch that is not full.
        why: it is read from its start; empty if that follows from its samplers.
    """

    _reads_a_dataloader = False

    def __init__(
        self,
        source: Any,
        options: Options,
        *,
        stream: Any,
        workers: int = 0,
        collate: Callable[[Any], Any] | None = None,
        batch_size: int | None = None,
        drop_last: bool = False,
        why: str = "",
    ) -> None:
        super().__init__(source, options)
        self._stream, self._workers, self._collate = stream, workers, collate
        self._samples_in_batch = batch_size
        self._own_streams = options.shard is False
        # Each process's own stream may have batches of any size, so batches are counted.
        self.facts = Facts(
            "sample" if collate is not None and not self._own_streams else "batch",
            1 if self._own_streams or batch_size is None else batch_size,
            drop_last,
        )
        self._readers: dict[str, Any] = {}
        self._may_drive = options.shard is None and not why
        self._why = ""
        self._interpret()
        self._why = why or self._why
        if options.shard is not None and not why and exposed_samplers(stream):
            self._why = f"shard={options.shard} was stated"
        self._warned = False
        # Why two passes are not compared; empty if they have been.
        self._untried = "randomness='none'" if not options.streams else "verify='off'"
        self._tries = options.streams and options.verify != "off"  # with the next batch that is read
        if self._tries:
            self._untried = "that happens when reading begins"
        if workers > 1 and self._driven is None:
            self._require_shard(f"{workers} worker processes")

    def _interpret(self) -> None:
        """Learn what the exposed samplers stand for."""
        stream = self._stream
        samplers = exposed_samplers(stream) if self._may_drive else {}
        self._exposes, self._held = bool(samplers), _held_by(samplers)
        specs = {path: interpret_sampler(each) for path, each in samplers.items()}
        self._driven = Driven(stream, {path: each.order for path, each in specs.items()}) if specs else None
        self._draws: tuple[int, ...] | None = None
        self._counted = False  # by reading, not by a state
        self._varies = False  # a sample has deviated: from then on the source is replayed, with our samplers
        self._why = "its draws have not been counted yet" if specs else "it exposes no samplers"
        self._readers.clear()
        for path, each in specs.items():
            check_sharding(samplers[path], each.sharding)
            self._adopt(each)

    def refresh(self) -> None:
        """Follow another collate function, another exposed sampler, or other data of one of torch's."""
        collate = getattr(self.source, "collate_fn", None) if self._reads_a_dataloader else self._collate
        if collate is not self._collate:
            self._collate = collate
            self._readers.clear()
            self.close()  # workers that are kept have the other one
            self.learned()
        if self._may_drive and _held_by(exposed_samplers(self._stream)) != self._held:
            self._interpret()
            self.redescribed += 1
            self.learned()

    def _adopt(self, spec: SamplerSpec) -> None:
        known = self.facts
        self.facts = replace(
            known,
            seed=spec.seed if known.seed is None else known.seed,
            tail=spec.tail if known.tail is None else known.tail,
            world=spec.world if known.world is None else known.world,
        )

    def _require_shard(self, among: str) -> None:
        if self.options.shard is None:
            raise UnsupportedSourceError(
                f"{_name(self._stream)} would be read by {among}, and midepoch cannot see whether it divides its "
                "data among them: pass shard=True to let midepoch divide it (every process reads all of it and "
                "keeps its part), or shard=False if it divides itself, by rank or get_worker_info, as torch's docs "
                f"show{self._instead('to have it divided without reading all of it')}"
            )

    def _instead(self, gain: str) -> str:
        """What to pass in place of a source that reads a DataLoader."""
        held = (self._stream, *directly_held(self._stream).values())
        if not any(isinstance(each, DataLoader) for each in held):
            return ""
        return f"; {gain}, wrap the DataLoader itself, and pass what is done with its batches as then="

    # --- what it is ---

    def _drive(self, seed: int) -> tuple[int, ...] | None:
        """The draws of one sample from each sampler; None if the source has to be replayed."""
        driven = self._driven
        if driven is None or self._counted or self._draws is not None:
            return self._draws
        reader = self._alone(driven)
        self._why = reader.count(seed)
        size = 0 if self._why else driven.size(reader.draws, seed, 0)
        if not self._why and (stated := length_of(driven.dataset)) not in (None, size):
            self._why = f"its len() is {stated}, but its samplers are enough for {size} samples"
        self._counted = True
        self.learned()
        if not self._why:
            self._draws = reader.draws
            return self._draws
        self._driven = None
        self._readers.clear()
        if self._workers > 1:
            self._require_shard(f"{self._workers} worker processes")
        return None

    def _draws_for(self, seed: int, detail: str) -> tuple[int, ...] | None:
        """The same, taken from a state's detail if possible, so that nothing has to be read."""
        if self._driven is None or detail.startswith("varies"):
            return None
        if match := _DRIVEN_DETAIL.fullmatch(detail):
            # Also of a place before the sample that has deviated. What is impossible is refused by `check_detail`.
            saved = tuple(map(int, match[1].split(",")))
            if len(saved) == len(self._driven.orders) and any(saved):
                return saved
        return None if self._varies else self._drive(seed)

    def size(self, seed: int, epoch: int, world: World, detail: str = "") -> int | None:
        """The samples that the samplers suffice for. For a replay, the length of the stream, if all ranks share it."""
        draws = self._draws_for(seed, detail)
        if draws is not None and self._driven is not None:
            return self._driven.size(draws, seed, epoch) if self._driven.ends(draws) else None
        varies = detail.startswith("varies") or (self._varies and not detail)
        return None if self._own_streams or varies else length_of(self._stream)

    def prepare(self, seed: int, epoch: int) -> None:
        """The same, and let the samplers whose order is not computed give their lists."""
        self.refresh()
        if self._driven is not None:
            self._driven.prepare(seed, epoch)
            for finding in self._driven.findings:
                self.note(finding)

    def expect(self, seed: int, epoch: int) -> None:
        """List copies of the samplers, if only a list tells how many there are."""
        driven = self._driven
        if driven is not None and driven.lists and self._drive(seed) is not None:
            driven.listed(seed, epoch)

    def stated_length(self) -> int | None:
        """As the source says that divides itself."""
        return length_of(self.source) if self._own_streams else None

    def describe(self) -> dict[str, str]:
        """The samplers' orders, or whose stream it is."""
        if self._driven is not None:
            return {"order": "+".join(order.describe() for order in self._driven.orders.values())}
        return {"order": "stream of its own" if self._own_streams else "stream"}

    def drawing(self) -> tuple[object, ...]:
        """The stream and the collate function."""
        return self._stream, self._collate

    def capabilities(self) -> Capabilities:
        """See the table in the README."""
        exact = promises.augmentations(self.options)
        if self._driven is not None and not self._varies:
            return Capabilities(
                exact_order=_believed(promises.OUR_ORDER, _FOLLOWS),
                exact_augmentations=_believed(exact, _FOLLOWS),
                constant_time_resume=promises.CONSTANT_TIME,
                elastic_world=promises.POSITIONS,
                elastic_workers=promises.POSITIONS,
                rank_independent=promises.ONE_STATE,
            )
        whole = Capability(True, "every rank reads the whole stream and keeps its part (shard=True)")
        part = Capability(False, "midepoch divides this source only with shard=True")
        repeats = Capability(True, "the stream is read again from its start, and a chain proves what was consumed")
        compared = f"two passes were not compared: {self._untried}" if self._untried else ""
        return Capabilities(
            exact_order=_believed(repeats, compared),
            exact_augmentations=_believed(exact, compared),
            constant_time_resume=promises.replay_costs(self._why),
            elastic_world=whole if self.options.shard else part,
            elastic_workers=Capability(False, "a replay can be checked only with the same number of worker processes"),
            rank_independent=promises.ONE_STATE,
        )

    def detail_at(self, here: Place, there: tuple[int, int], seed: int, world: World) -> str:
        """The draws of a sample, or the number of workers. Stored so that loaders with others refuse the state."""
        if self._varies:
            return _VARIES
        if not there[1]:
            return ""
        if self._driven is not None:
            return "" if self._draws is None else self._detail(self._draws, seed, there[0])
        return f"workers={self._workers};chain="

    def _detail(self, draws: tuple[int, ...], seed: int, epoch: int) -> str:
        """Of a place within an epoch: the draws of a sample, and the CRC of the samplers' lists, if there are any."""
        crc = "" if self._driven is None else self._driven.crc(seed, epoch)
        return f"draws={','.join(map(str, draws))}{f';crc={crc}' if crc else ''}"

    def check_detail(self, detail: str, seed: int, epoch: int, position: int, world: World) -> None:
        """The draws of a sample, or the workers and the chain of a replay."""
        if not detail:
            if position:
                raise StateCorruptError(
                    f"the state stands at position {position} but has no detail: use an undamaged state"
                )
            return
        driven, replayed = _DRIVEN_DETAIL.fullmatch(detail), _REPLAY_DETAIL.fullmatch(detail)
        if driven and self._driven is not None:
            saved = tuple(map(int, driven[1].split(",")))
            lengths = self._driven.lengths(seed, epoch)
            if len(saved) != len(lengths) or not any(saved) or any(d > n for d, n in zip(saved, lengths, strict=True)):
                raise StateCorruptError(
                    f"the state's detail {detail!r} is impossible for this source: use an undamaged state"
                )
            if self._draws is not None and self._draws != saved:
                raise StateMismatchError(
                    f"draws per sample differ: the state was saved with {saved}, this source draws {self._draws}; "
                    "restore the dataset that the state was saved with, or start over with this data"
                )
            if position:
                self._check_lists(self._driven, driven[2] or "", seed, epoch)
            return
        if not replayed or (replayed[1] and not self._exposes):
            raise StateCorruptError(f"the state's detail {detail!r} is not one of this source: use an undamaged state")
        if not replayed[1] and self._drive(seed) is not None:
            raise StateMismatchError(
                f"the way of reading differs: the state was saved by a replay, this source can jump ({self._why}); "
                "restore the dataset that the state was saved with, or start over with this data"
            )
        if int(replayed[2]) != self._workers:
            raise StateMismatchError(
                f"num_workers differs: the state was saved with {replayed[2]}, this loader has {self._workers}; a "
                "replayed source can continue only with the same number: restore num_workers for the rest of this "
                "epoch"
            )
        if replayed[1] and world.world_size > 1:
            raise StateMismatchError(
                "the world size differs: samples of this epoch draw different numbers, so only 1 process can continue "
                f"it, and the world has {world.world_size}: run 1 process for the rest of this epoch"
            )

    def _check_lists(self, driven: Driven, saved: str, seed: int, epoch: int) -> None:
        if (crc := driven.crc(seed, epoch)) != saved:
            raise StateMismatchError(
                f"the list of epoch {epoch} differs: the state was saved with crc={saved}, the samplers of "
                f"{_name(self._stream)} give crc={crc}; restore what they are made of (sort what comes from a set or a "
                "folder), or start over without the state"
            )

    def moved(self, detail: str) -> None:
        """Let the samplers give their lists again: the training loop may have changed them."""
        if self._driven is not None:
            self._driven.moved()

    # --- sessions ---

    def serve(self, reader: Any, requests: Iterator[Any], run: Run) -> tuple[Iterator[Any], Callable[[], None]]:
        """Answers in the order of the requests, and a function that stops. Overridden where workers answer."""
        return map(reader, requests), _nothing

    def open(self, run: Run) -> Session:
        """A driven session, or a replay."""
        draws = self._draws_for(run.seed, run.detail)
        if draws is not None and self._driven is not None:
            self._draws = draws
            return self._open_driven(run, self._driven, draws)
        if run.world.world_size > 1:
            self._require_shard(f"{run.world.world_size} ranks")
        if self._workers > 1:
            self._require_shard(f"{self._workers} worker processes")
        return self._open_replay(run)

    def _arguments(self, driven: Driven) -> tuple[Any, ...]:
        single, collate = self._samples_in_batch is None, self._collate or _as_it_is
        return driven, collate, single, self.options.streams, self._draws or (), self._counted

    def _alone(self, driven: Driven) -> AloneReader:
        """The reader of all samples in this process, which counts the draws, too."""
        reader = self._readers.get("alone")
        if reader is None or reader.varies:
            arguments = self._samples_in_batch or 1, self.facts.drop_last, self._deviated, *self._arguments(driven)
            reader = self._readers["alone"] = AloneReader(*arguments)
        return reader

    def _open_driven(self, run: Run, driven: Driven, draws: tuple[int, ...]) -> Session:
        if run.share is None:
            run = replace(run, share=self._share_of(MAXIMUM_SIZE, run.position, run.world))
        if self._collate is not None and not keeps_nothing(self._collate):
            why = "the collate function was not tried: the source is read through its samplers"
            self.note(Finding(untried=why))
        reader: DrivenReader
        if run.world.world_size == 1 and not self._workers:
            reader = self._alone(driven)
        else:
            self._readers.pop("alone", None)
            reader = self._readers.setdefault("divided", DrivenReader(*self._arguments(driven)))
        reader.draws = draws
        if run.position and (saved := _DRIVEN_DETAIL.fullmatch(run.detail)):
            self._check_lists(driven, saved[2] or "", run.seed, run.epoch)  # they may have changed since the load
        check = unchanged(self._stream, length_of(self._stream))
        lists = driven.listed(run.seed, run.epoch) if self._workers else ()
        requests = driven_requests(run, check, draws, lists, max(self._workers, 1), reader.goes_on)
        answers, close = self.serve(reader, requests, run)
        detail = self._detail(draws, run.seed, run.epoch)
        if isinstance(reader, AloneReader):
            return _AloneSession(answers, close, detail, reader)
        return _DrivenSession(answers, close, detail)

    def _deviated(self, why: str) -> None:
        """A sample of a driven session has deviated: from here on, the source is replayed."""
        if not self._varies:
            warn(
                f"{_name(self._stream)} {why}: from here on, a resume reads the epoch again from its start. To resume "
                "at once, let each sample draw as many indices, and let the source end with its samplers"
            )
        self._varies, self._why = True, f"it {why}"
        self.learned()

    def _open_replay(self, run: Run) -> Session:
        varies = self._varies or run.detail.startswith("varies")
        if not self._warned and run.position > 0:
            instead = "" if "then=" in self._why else self._instead("to jump")
            warn(
                f"{_name(self._stream)} is read again from its start to position {run.position} ({self._why}): "
                f"loader.capabilities.constant_time_resume says what that costs{instead}",
            )
            self._warned = True
        key = "varying" if varies else "replay"
        reader = self._readers.get(key)
        if reader is None:
            reader = self._readers[key] = ReplayReader(
                self._stream,
                _OpenDriven(self._driven) if varies and self._driven is not None else Open(self._stream),
                self._samples_in_batch or 1,
                self._collate,
                self._samples_in_batch is None,
                self.facts.drop_last,
                not self._own_streams,
                self.options.streams,
            )
        match = _REPLAY_DETAIL.fullmatch(run.detail)
        expected = (match[3] or "") if match else ""
        requests = self._replay_requests(run, expected, self._tries and not varies)
        tell = getattr(self._stream, "set_epoch", None)
        if self._workers and callable(tell) and not getattr(self.source, "persistent_workers", False):
            tell(run.epoch)  # worker processes start with the stream as it is now
        answers, close = self.serve(reader, requests, run)
        slots = max(self._workers, 1)
        if self._own_streams:
            consumed = run.position // run.world.world_size
            told = run.world.world_size == 1
            learn = self._learn
            return _OwnStreamsSession(answers, close, learn, slots, consumed, expected, varies, told, self._workers)
        return _SharedStreamSession(answers, close, self._learn, varies, self._workers)

    def _learn(self, found: Found) -> None:
        """Take over what a reader has found out about the source."""
        for finding in found.others:
            self.note(finding)
        if found.passes is not None:
            self._tries, self._untried = False, found.passes.untried
            why = f"two passes over {_name(self._stream)} under the same random numbers differ in their first unit"
            self.note(Finding(why if found.passes.differs else "", True, _REPEAT, unseen=found.passes.unseen))

    def _replay_requests(self, run: Run, expected: str, tries: bool) -> Iterator[ReplayRequest]:
        consumed = run.position // run.world.world_size if self._own_streams else run.position
        size = None if run.share is None else run.share.size
        request = ReplayRequest(
            run.session, run.seed, run.epoch, 0 if self._own_streams else consumed, 0, expected, run.world.rank,
            run.world.world_size, run.tail, size, False,
        )  # fmt: skip
        request = request._replace(tries=tries)
        steps = itertools.count() if run.share is None else range(run.share.steps)
        check = unchanged(self._stream, length_of(self._stream))
        for step in steps:
            check()
            yield request._replace(step=step, skip=self._own_streams and step < consumed)
            tries = False


def _held_by(samplers: dict[Any, Any]) -> list[Any]:
    """What tells whether the samplers are the same: they themselves; of torch's, what their order follows from."""
    held: list[Any] = []
    for path, sampler in samplers.items():
        held += path, id(sampler)
        if type(sampler) in (RandomSampler, SequentialSampler, DistributedSampler):
            # Its epoch is ours.
            held += (id(value) for name, value in vars(sampler).items() if name != "epoch")
            data = getattr(sampler, "dataset", None) if type(sampler) is DistributedSampler else sampler.data_source
            held.append(length_of(data))
    return held


_FOLLOWS = "that its samples follow from its samplers alone is believed"
_REPEAT = (
    "let its order and content follow from the random generators or the epoch alone; if it takes what it reads from a "
    "queue, pass verify='off'"
)


def _believed(capability: Capability, why: str) -> Capability:
    """The same, believed for a reason; as it is without one."""
    if not (capability and why):
        return capability
    return Capability(True, f"{capability.reason}; {why}", believed=True)


def _nothing() -> None:
    pass


def _as_it_is(value: Any) -> Any:
    return value


def _name(source: Any) -> str:
    return getattr(source, "__qualname__", None) or type(source).__name__


class IterableLoaderAdapter(IterableAdapter):
    """A torch DataLoader over a stream, which its worker processes read.

    Args:
        source: the DataLoader.
        options: as given to `wrap`.
        stream: what it reads.
    """

    _reads_a_dataloader = True

    def __init__(self, source: DataLoader[Any], options: Options, *, stream: Any) -> None:
        super().__init__(
            source,
            options,
            stream=stream,
            workers=source.num_workers,
            collate=source.collate_fn,
            batch_size=source.batch_size,
            drop_last=source.drop_last,
        )
        self._server = Server(source, options)

    def serve(self, reader: Any, requests: Iterator[Any], run: Run) -> tuple[Iterator[Any], Callable[[], None]]:
        """Read in the loader's worker processes."""
        return self._server(reader, requests, run)

    def close(self) -> None:
        """End persistent worker processes."""
        self._server.close()


class _OpenDriven:
    """Returns a new iterator over a source with our samplers. A class, so that it can be sent to worker processes."""

    def __init__(self, driven: Driven) -> None:
        self._driven = driven

    def __call__(self, seed: int, epoch: int) -> Iterator[Any]:
        return self._left(Units(self._driven.open(seed, epoch)[0]))

    def _left(self, source: Units) -> Iterator[Any]:
        try:
            while True:
                sample = source.next()
                self._driven.leave()
                yield sample
        except StopIteration:
            self._driven.leave()


class _DrivenSession(Session):
    def __init__(self, answers: Iterator[Any], close: Callable[[], None], detail: str) -> None:
        self.take = answers.__next__
        self._close, self._detail = close, detail

    def detail(self, bookmark: Any) -> str:
        """The draws of a sample, and the CRC of the lists."""
        return self._detail

    def close(self) -> None:
        self.take = iter(()).__next__
        self._close()


class _AloneSession(_DrivenSession):
    """A session whose bookmark is whether a sample has deviated."""

    bookmarks = True

    def __init__(self, answers: Iterator[Any], close: Callable[[], None], detail: str, reader: AloneReader) -> None:
        super().__init__(answers, close, detail)
        self._reader, self._next, self.take = reader, answers.__next__, self._take

    def _take(self) -> Any:
        try:
            return self._next()
        except StopIteration:
            self._next = iter(()).__next__  # asked again, as `peek` may, the reader would begin anew
            raise

    @property
    def varies(self) -> bool:
        """Whether some sample drew another number of indices."""
        return self._reader.varies

    @property
    def position_correction(self) -> int:  # type: ignore[override]
        """Samples by which the last batch was short."""
        return -self._reader.missing

    def bookmark(self) -> bool:
        """Whether a sample has deviated."""
        return self._reader.varies

    def detail(self, bookmark: bool | None) -> str:
        """That the epoch can only be replayed from now on, or what leads to a jump."""
        return _VARIES if bookmark else self._detail

    def next_epoch_detail(self) -> str:
        """The same, for the next epoch's beginning."""
        return _VARIES if self._reader.varies else ""


class _ReplaySession(Session):
    """A session whose bookmark is the chain up to the last unit."""

    bookmarks = True

    def __init__(
        self, answers: Iterator[Any], close: Callable[[], None], learn: Callable[[Found], None], varies: bool,
        workers: int,
    ) -> None:  # fmt: skip
        self._answers, self._close, self._learn = answers, close, learn
        self._prefix = f"{'varies;' * varies}workers={workers};chain="
        self._chain = ""

    def _answer(self) -> Any:
        answer = next(self._answers)
        if answer.found is not None:
            self._learn(answer.found)
        return answer

    def bookmark(self) -> str:
        """The chain up to the last unit."""
        return self._chain

    def detail(self, bookmark: str) -> str:
        """The number of workers, and the chain."""
        return self._prefix + bookmark

    def close(self) -> None:
        self._answers = iter(())
        self._close()


class _SharedStreamSession(_ReplaySession):
    """Every process reads the same stream."""

    _first: str | None = None
    _ended = False
    _late: Exception | None = None

    @property
    def varies(self) -> bool:
        """Where it ends by an error of its own, after as many batches as its length says."""
        return self._late is not None

    @property
    def raises(self) -> Exception | None:
        """That error."""
        return self._late

    def take(self) -> Any:
        """The next batch."""
        if self._ended:
            raise StopIteration
        if self._late is not None:
            self._ended = True
            raise self._late
        answer = self._answer()
        if self._first is None:
            self._first = answer.first
        elif answer.first != self._first:
            raise SourceError(
                "worker processes that should read the same stream begin with different items: the source divides its "
                "data by get_worker_info, and so does midepoch (shard=True); pass shard=False"
            )
        if isinstance(answer, End):
            self._ended = True
            if answer.units:  # other ranks have received them
                self.position_correction += answer.units
                self._chain = answer.chain
            raise StopIteration
        self._chain = answer.chain
        self.position_correction = -answer.missing
        if answer.late is not None:
            self._late = sent_error(answer.late)
        return answer.batch


class _OwnStreamsSession(_ReplaySession):
    """Each worker process has a stream of its own. Their batches alternate, as in a DataLoader."""

    def __init__(
        self, answers: Iterator[Any], close: Callable[[], None], learn: Callable[[Found], None], slots: int,
        consumed: int, expected: str, varies: bool, told: bool, workers: int,
    ) -> None:  # fmt: skip
        super().__init__(answers, close, learn, varies, workers)
        self._slots, self._consumed, self._told, self._expected = slots, consumed, told, expected
        self._ended_in_a_row = self._batches = 0
        self._whole = Chain()  # of this process's batches

    def take(self) -> Any:
        """The next batch."""
        while True:
            if self._ended_in_a_row == self._slots:
                if self._consumed:
                    raise SourceError(
                        f"the source ended {self._consumed} batches before the state's position: it does not repeat "
                        "itself; seed it, or start over with this data"
                    )
                raise StopIteration
            answer: Replayed | End = self._answer()
            if isinstance(answer, End):
                self._ended_in_a_row += 1
                continue
            self._ended_in_a_row = 0
            self._batches += 1
            if self._batches == self._whole.next:
                self._whole.add(answer.chain)
            seen = self._whole.up_to(answer.chain)
            if not self._consumed:
                self._chain = seen if self._told else ""
                return answer.batch
            self._consumed -= 1
            if self._consumed or not self._expected:
                continue
            if self._expected != seen:
                raise SourceError(
                    "the source does not repeat itself: the batches consumed before the save differ now; make it "
                    "depend on midepoch's streams or a seed alone"
                )
