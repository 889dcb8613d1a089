"""The adapter of iterables, in this process or in workers: driven by their samplers if exact, otherwise replayed."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from torch.utils.data import DataLoader

from ..attributes import directly_held
from ..errors import StateCorruptError, StateMismatchError, UnsupportedSourceError, warn
from ..loader import promises
from ..loader.adapter import Adapter, Facts, Options, Run, Session, Why
from ..loader.capabilities import Capabilities, Capability
from ..loader.place import Place
from ..order import MAXIMUM_SIZE
from ..samplers import MaterializedOrder, interpret_sampler, length_of
from ..sharding import check_sharding
from ..trying import Finding
from ..world import World
from .collating import as_it_is, keeps_nothing
from .driven import DrivenReader, SamplerDriven, driven_requests
from .exposed import exposed_samplers
from .indexed import unchanged
from .replay import PrefixDigest, Replayed, ReplayReader, ReplayRequest, ReplaySession
from .sessions import IteratorSession
from .workers import Server

__all__ = ["IterableAdapter"]

_DRIVEN_DETAIL = re.compile(r"draws=(\d{1,6}(?:,\d{1,6})*)(?:;crc=([0-9a-f]{8}))?")
_REPLAY_DETAIL = re.compile(r"workers=(\d{1,6});chain=([0-9a-f]{8})?")


class IterableAdapter(Adapter):
    """The common part of adapters for `IterableDataset`s, re-iterable objects and generator functions.

    If the source exposes samplers, midepoch drives these: each sample must draw a constant number of indices. Without
    samplers, or where `shard` is stated, it replays the source. With ``shard=False`` each process reads its own stream,
    in units of batches.

    Args:
        source: the object given to `wrap`.
        options: as given to `wrap`.
        stream: the object to iterate, or a function that returns an iterator.
        loader: the DataLoader that makes its batches, in this process or in workers; None if the stream yields batches.
        why: it is read from its start; empty if that follows from its samplers.
    """

    def __init__(self, source: Any, options: Options, *, stream: Any, loader: Any = None, why: str = "") -> None:
        super().__init__(source, options)
        self._stream, self._loader = stream, loader
        self._own_streams = options.shard is False
        self._opened: int | None = None  # the epoch that was opened last, unless the loader was led elsewhere since
        self._server: Server | None = None
        self._workers, self._single, self._collate, self.facts = 0, True, as_it_is, Facts("batch")
        if loader is not None:
            # Where midepoch divides a stream, each worker would read all of it: one suffices.
            self._workers = min(loader.num_workers, 1) if options.shard else loader.num_workers
            self._server = Server(loader, options, self._workers)
            self._single, self._collate = loader.batch_size is None, loader.collate_fn
            size, drop_last = loader.batch_size or 1, loader.drop_last
            # Each process's own stream may have batches of any size, so batches are counted.
            self.facts = Facts("batch", 1, drop_last) if self._own_streams else Facts("sample", size, drop_last)
        self._may_drive = options.shard is None and not why
        self._held: Any = None  # the exposed samplers, and the orders that are computed
        self._driven: SamplerDriven | None = None
        self._draws: tuple[int, ...] | None = None  # of one sample, from each sampler
        self._reader: DrivenReader | None = None
        self._replayer: ReplayReader | None = None
        self._follow()
        stated = options.shard is not None and exposed_samplers(stream)
        self._why = why or (f"shard={options.shard} was stated" if stated else "it exposes no samplers in attributes")
        self._warned = False
        self._tries = options.streams and options.verify != "off"  # with the next batch that is replayed
        # Why two passes are not compared; empty if they have been.
        self._untried = "that happens when reading begins" if self._tries else "verify='off'"
        if not options.streams:
            self._untried = "randomness='none'"
        if self._workers > 1 and self._driven is None:
            self._require_shard(f"{self._workers} worker processes")

    def _follow(self) -> None:
        """Take over another collate function, another exposed sampler, or other data of one whose order is computed."""
        if self._loader is not None and self._loader.collate_fn is not self._collate:
            self._collate = self._loader.collate_fn
            self._reader = self._replayer = None
            self.close()  # workers that are kept have the other one
            self.learned()
        samplers = exposed_samplers(self._stream) if self._may_drive else {}
        specs = {name: interpret_sampler(each) for name, each in samplers.items()}
        orders = {name: each.order for name, each in specs.items()}
        computed = [None if isinstance(each, MaterializedOrder) else each for each in orders.values()]
        held = list(map(id, samplers.values())), list(orders), computed
        if held == self._held:
            return
        self._held, self._draws, self._reader, self._replayer = held, None, None, None
        self._driven = SamplerDriven(self._stream, orders) if orders else None
        for name, each in specs.items():
            check_sharding(samplers[name], each.sharding)
            known = self.facts
            self.facts = replace(
                known,
                seed=each.seed if known.seed is None else known.seed,
                tail=known.tail or each.tail,
                world=known.world or each.world,
            )
        self.learned()

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

    def _drive(self, driven: SamplerDriven, seed: int, detail: str = "") -> tuple[int, ...]:
        """The draws of one sample from each sampler: of a state's detail if possible, so that nothing has to be read.

        Raises:
            UnsupportedSourceError: no sample can be jumped to.
        """
        if match := _DRIVEN_DETAIL.fullmatch(detail):  # what is impossible is refused by `check_detail`
            saved = tuple(map(int, match[1].split(",")))
            if len(saved) == len(driven.orders) and any(saved):
                return saved
        if self._draws is None:
            self._draws = self._driven_reader(driven).count(driven, seed)
        return self._draws

    def size(self, seed: int, epoch: int, world: World, detail: str = "") -> int | None:
        """The samples that the samplers suffice for. For a replay, the length of the stream, if all ranks share it."""
        if epoch != self._opened:
            self._follow()
        if self._driven is not None:
            draws = self._drive(self._driven, seed, detail)
            return self._driven.size(draws, seed, epoch) if self._driven.ends(draws) else None
        return None if self._own_streams else length_of(self._stream)

    def prepare(self, place: Place, seed: int, why: Why) -> None:
        """Follow the source, and list samplers whose order is not computed: themselves for a pass, otherwise copies."""
        if why == "moved":
            self._opened = None
            if self._driven is not None:
                self._driven.moved()
            return
        if why == "opened" or place.epoch != self._opened:
            self._follow()
        if why == "opened":
            self._opened = place.epoch
        driven = self._driven
        if driven is not None and why == "opened":
            driven.prepare(seed, place.epoch)
            for finding in driven.findings:
                self.note(finding)
        elif driven is not None and driven.lists:
            self._drive(driven, seed)
            driven.crc(seed, place.epoch)

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
        if self._driven is not None:
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
            elastic_workers=Capability(True, "one process reads the whole stream (shard=True)")
            if self.options.shard
            else part,
            rank_independent=promises.ONE_STATE,
        )

    def detail_at(self, here: Place, there: tuple[int, int], seed: int, world: World) -> str:
        """The draws of a sample, or the number of streams. Stored so that loaders with others refuse the state."""
        if not there[1]:
            return ""
        if self._driven is not None:
            return "" if self._draws is None else self._detail(self._driven, self._draws, seed, there[0])
        return self._replay_detail

    @property
    def _replay_detail(self) -> str:
        """Of a replay, before the chain: how many workers read it; 0 if that does not matter."""
        return f"workers={0 if self.options.shard else self._workers};chain="

    def _detail(self, driven: SamplerDriven, draws: tuple[int, ...], seed: int, epoch: int) -> str:
        """Of a place within an epoch: the draws of a sample, and the CRC of the samplers' lists, if there are any."""
        crc = driven.crc(seed, epoch)
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
        if self._driven is not None and driven:
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
        if not replayed or self._driven is not None:
            raise StateCorruptError(f"the state's detail {detail!r} is not one of this source: use an undamaged state")
        if not self.options.shard and int(replayed[1]) != self._workers:
            raise StateMismatchError(
                f"num_workers differs: the state was saved with {replayed[1]}, this loader has {self._workers}; a "
                "source that midepoch does not divide can continue only with the same number: restore num_workers for "
                "the rest of this epoch"
            )

    def _check_lists(self, driven: SamplerDriven, saved: str, seed: int, epoch: int) -> None:
        if (crc := driven.crc(seed, epoch)) != saved:
            raise StateMismatchError(
                f"the list of epoch {epoch} differs: the state was saved with crc={saved}, the samplers of "
                f"{_name(self._stream)} give crc={crc}; restore what they are made of (sort what comes from a set or a "
                "folder), or start over without the state"
            )

    # --- sessions ---

    def _serve(self, reader: Any, requests: Iterator[Any], run: Run) -> tuple[Iterator[Any], Callable[[], None]]:
        """Answers in the order of the requests, and a function that stops."""
        return (map(reader, requests), lambda: None) if self._server is None else self._server(reader, requests, run)

    def close(self) -> None:
        """End persistent worker processes."""
        if self._server is not None:
            self._server.close()

    def open(self, run: Run) -> Session:
        """A driven session, or a replay."""
        if self._driven is not None:
            return self._open_driven(run, self._driven)
        if run.world.world_size > 1:
            self._require_shard(f"{run.world.world_size} ranks")
        if self._workers > 1:
            self._require_shard("worker processes")
        return self._open_replay(run)

    def _open_driven(self, run: Run, driven: SamplerDriven) -> Session:
        self._draws = draws = self._drive(driven, run.seed, run.detail)
        if run.share is None:
            run = replace(run, share=self._share_of(MAXIMUM_SIZE, run.position, run.world))
        if not keeps_nothing(self._collate):
            why = "the collate function was not tried: the source is read through its samplers"
            self.note(Finding(untried=why))
        if run.position and (saved := _DRIVEN_DETAIL.fullmatch(run.detail)):
            self._check_lists(driven, saved[2] or "", run.seed, run.epoch)  # they may have changed since the load
        check = unchanged(self._stream, length_of(self._stream))
        requests = driven_requests(run, check, driven, draws, max(self._workers, 1))
        answers, close = self._serve(self._driven_reader(driven), requests, run)
        return IteratorSession(answers, self._detail(driven, draws, run.seed, run.epoch), close=close)

    def _driven_reader(self, driven: SamplerDriven) -> DrivenReader:
        if self._reader is None:
            self._reader = DrivenReader(driven, self._collate, self._single, self.options.streams)
        return self._reader

    def _open_replay(self, run: Run) -> Session:
        if not self._warned and run.position > 0:
            instead = "" if "then=" in self._why else self._instead("to jump")
            warn(
                f"{_name(self._stream)} is read again from its start to position {run.position} ({self._why}): "
                f"loader.capabilities.constant_time_resume says what that costs{instead}",
            )
            self._warned = True
        if self._replayer is None:
            self._replayer = ReplayReader(
                self._stream,
                self._collate,
                self._single,
                self.options.streams,
                batch_size=1 if self._loader is None else self._loader.batch_size or 1,
                drop_last=self.facts.drop_last,
                shared=not self._own_streams,
            )
        match = _REPLAY_DETAIL.fullmatch(run.detail)
        expected = (match[2] or "") if match else ""
        tell = getattr(self._stream, "set_epoch", None)
        if self._loader is not None and self._workers and callable(tell) and not self._loader.persistent_workers:
            tell(run.epoch)  # worker processes start with the stream as it is now
        answers, close = self._serve(self._replayer, self._replay_requests(run, expected), run)
        prefix = self._replay_detail
        if not self._own_streams:
            return ReplaySession(answers, close, self._learn, prefix)
        readers, world_size = max(self._workers, 1), run.world.world_size
        consumed, chain = run.position // world_size, PrefixDigest()
        return ReplaySession(
            answers, close, self._learn, prefix, readers, consumed, expected, chain, saves=world_size == 1
        )

    def _learn(self, answer: Replayed) -> None:
        """Take over what a reader has found out about the source by a session's first batch."""
        for finding in answer.findings:
            self.note(finding)
        if (passes := answer.passes) is not None:
            self._tries, self._untried = False, passes.untried
            why = f"two passes over {_name(self._stream)} under the same random numbers differ in their first unit"
            self.note(Finding(why if passes.differs else "", True, _REPEAT, unseen=passes.unseen))

    def _replay_requests(self, run: Run, expected: str) -> Iterator[ReplayRequest]:
        consumed = run.position // run.world.world_size if self._own_streams else 0
        request = ReplayRequest(
            run.session, run.seed, run.epoch, 0 if self._own_streams else run.position, 0, expected, run.world.rank,
            run.world.world_size, run.tail, None if run.share is None else run.share.size,
        )  # fmt: skip
        check = unchanged(self._stream, length_of(self._stream))
        for step in itertools.count() if run.share is None else range(run.share.steps):
            check()
            yield request._replace(step=step, skip=step < consumed, tries=self._tries and not step)
        yield request._replace(ends=True)


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


def _name(source: Any) -> str:
    return getattr(source, "__qualname__", None) or type(source).__name__
