"""mosaicml-streaming: a StreamingDataLoader, counted by midepoch and put where it says.

Streaming's own order is a function too, of its shuffle seed, the epoch and the number of canonical nodes, so its state
is a place. It is set before each pass in full, which leaves no room for what its loader gets wrong by itself: a state
of the current or an earlier epoch that is ignored in a live process, an epoch's end that resumes into nothing, a batch
size that is guessed from the first field.
"""

from __future__ import annotations

import atexit
import re
import zlib
from typing import Any, ClassVar, NamedTuple

from streaming import StreamingDataLoader, StreamingDataset
from streaming.base.shared import SharedMemory
from torch.utils.data import DataLoader

from midepoch import promises
from midepoch.adapter import Adapter, Options, Run, Session
from midepoch.errors import MidepochError, StateCorruptError, StateMismatchError, UnsupportedSourceError
from midepoch.keys import derive_key
from midepoch.protocol import Capabilities, Capability
from midepoch.randomness import Purpose, Streams
from midepoch.serving import WorkerAnswers
from midepoch.world import World

__all__ = ["StreamingAdapter"]


class _Plan(NamedTuple):
    """What Streaming's order depends on besides seed, epoch and data.

    Attributes:
        canonical: nodes that the samples are divided over, whatever nodes there are.
        nodes: machines of the run that began.
        batch: samples in one step of all ranks.
    """

    canonical: int
    nodes: int
    batch: int

    def __str__(self) -> str:
        return f"canonical={self.canonical};nodes={self.nodes};batch={self.batch}"

    @classmethod
    def parsed(cls, detail: str) -> _Plan:
        found = re.fullmatch(r"canonical=(\d{1,9});nodes=(\d{1,9});batch=(\d{1,12})", detail, re.ASCII)
        plan = None if found is None else cls(*map(int, found.groups()))
        if plan is None or not all(plan):
            raise StateCorruptError(f"the detail of a streaming state says {detail[:80]!r}: use an undamaged state")
        return plan


class StreamingAdapter(Adapter):
    """A DataLoader over a StreamingDataset, Streaming's own or torch's."""

    name: ClassVar[str] = "streaming"
    seals_detail = True
    jumps: ClassVar[bool] = True

    def __init__(self, source: Any, options: Options) -> None:
        super().__init__(source, options)
        dataset = source.dataset
        if options.shard:
            raise UnsupportedSourceError(
                "shard=True: a StreamingDataset divides itself over ranks and workers; leave shard out"
            )
        if options.tail not in (None, "pad"):
            raise UnsupportedSourceError(
                f"tail={options.tail!r}: Streaming repeats samples until every rank has as many; leave tail out"
            )
        if type(dataset.batch_size) is not int or dataset.batch_size != source.batch_size:
            raise UnsupportedSourceError(
                f"batch_size is {dataset.batch_size} for the StreamingDataset and {source.batch_size} for its loader: "
                "pass the same number to both, since Streaming's order depends on it"
            )
        self.batch_size, self.drop_last = source.batch_size, source.drop_last
        self.seed = dataset.shuffle_seed
        self._opening = Streams()

    @classmethod
    def recognises(cls, source: object) -> bool:
        """Any loader of a StreamingDataset; the dataset by itself, to say what to do."""
        return isinstance(getattr(source, "dataset", source), StreamingDataset)

    @classmethod
    def choose(cls, source: Any, options: Options) -> Adapter | None:
        """The adapter, for a loader that iterates as Streaming's or torch's does."""
        if isinstance(source, StreamingDataset):
            raise UnsupportedSourceError(
                "a StreamingDataset has no batches: wrap StreamingDataLoader(dataset, batch_size=...) over it"
            )
        own = type(source).__iter__ if isinstance(source, DataLoader) else None
        if own not in (StreamingDataLoader.__iter__, DataLoader.__iter__):
            raise UnsupportedSourceError(
                f"{type(source).__name__} iterates a StreamingDataset in a way of its own, so its batches cannot be "
                "counted: wrap a StreamingDataLoader"
            )
        return cls(source, options)

    # --- worlds ---

    @property
    def _shared_by(self) -> int:
        """Ranks that are given the same samples."""
        return int(self.source.dataset.replication or 1)

    def sharing(self, world: World) -> World:
        """Without those that are given the same samples as another."""
        theirs = self.source.dataset._unique_rank_world
        if (theirs.rank, theirs.num_ranks) != (world.rank, world.world_size):
            raise MidepochError(
                f"the StreamingDataset was made by rank {theirs.rank} of {theirs.num_ranks}, this is rank {world.rank} "
                f"of {world.world_size}: make it after RANK and WORLD_SIZE are set, as torchrun does"
            )
        return World(world.rank // self._shared_by, world.world_size // self._shared_by)

    def _plan(self, world: World, detail: str = "") -> _Plan:
        if detail:
            return _Plan.parsed(detail)
        dataset = self.source.dataset
        nodes = dataset._parallel_rank_world.num_nodes
        canonical = dataset.num_canonical_nodes
        if not canonical:  # as Streaming itself settles it at the first pass
            canonical = 64 * nodes if dataset.shuffle_algo in ("py1s", "py2s") else nodes
        return _Plan(canonical, dataset.initial_physical_nodes or nodes, self.units_per_step(world))

    # --- what it is ---

    def size(self, seed: int, epoch: int, world: World, detail: str = "") -> int | None:
        """Samples in one epoch, those that Streaming repeats to fill canonical nodes included."""
        dataset = self.source.dataset
        if dataset.batching_method != "random":
            return None  # only making the plan of an epoch tells
        canonical = self._plan(world, detail).canonical
        each = -(-int(dataset.epoch_size) // canonical)
        nodes = dataset._parallel_rank_world.num_nodes
        if canonical < nodes:
            each += -each % max(1, nodes // canonical)
        return canonical * each

    def describe(self) -> dict[str, str]:
        """The data and all that shuffles it; what may change on other nodes is in the detail."""
        dataset = self.source.dataset
        streams = [(stream.choose, stream.split) for stream in dataset.streams]
        shards = [shard.samples for shard in dataset.shards]
        content = zlib.crc32(repr((streams, shards)).encode())
        return {
            "samples": f"{dataset.epoch_size} of {dataset.num_samples}:{content:08x}",
            "shuffle": f"{dataset.shuffle_algo},{self._block_size()}" if dataset.shuffle else "no",
            "partition": dataset.partition_algo,
            "sampling": f"{dataset.sampling_method},{dataset.sampling_granularity}",
            "batching": dataset.batching_method,
            "replication": str(self._shared_by),
        }

    def _block_size(self) -> str:
        dataset = self.source.dataset
        stated, canonical = dataset.shuffle_block_size, dataset.num_canonical_nodes
        # Streaming fills it in at the first pass, with the number of canonical nodes.
        by_itself = stated is None or (canonical and stated == max(4_000_000 // canonical, 1 << 18))
        return "default" if by_itself else str(stated)

    def capabilities(self) -> Capabilities:
        """As Streaming has it."""
        own = type(self.source.dataset).__getitem__ is not StreamingDataset.__getitem__
        exact = Capability(True, "samples are read as they were written")
        if own:
            exact = Capability(False, "what the dataset's own __getitem__ draws is nobody's to restore")
        return Capabilities(
            exact_order=Capability(True, "Streaming's order is a function of seed, epoch and canonical nodes"),
            exact_augmentations=exact,
            constant_time_resume=Capability(True, "whatever the progress; Streaming plans the whole epoch each time"),
            elastic_world=Capability(True, "as Streaming: with the same number of samples in a step of all ranks"),
            elastic_workers=Capability(True, "Streaming hands out batches in the order of its plan"),
            rank_independent=promises.ONE_STATE,
        )

    # --- states ---

    def beginning(self, epoch: int, world: World) -> str:
        """The plan."""
        return str(self._plan(world))

    def jump(self, here: tuple[int, int], detail: str, there: tuple[int, int], seed: int, world: World) -> str:
        """The same plan."""
        return detail or self.beginning(there[0], world)

    def check_detail(self, detail: str, seed: int, epoch: int, position: int, world: World) -> None:
        """The plan can be carried out here."""
        saved, here = _Plan.parsed(detail), self._plan(world)
        if saved.batch != here.batch:
            raise StateMismatchError(
                f"the global batch size differs: the state was saved with {saved.batch}, this loader has {here.batch}; "
                f"change batch_size with the number of ranks, so that their product stays {saved.batch}"
            )
        nodes = self.source.dataset._parallel_rank_world.num_nodes
        if saved.canonical % nodes and nodes % saved.canonical:
            raise StateMismatchError(
                f"the number of nodes differs: the state's order is over {saved.canonical} canonical nodes, and "
                f"{nodes} nodes neither divide that nor are a multiple of it; run on a number that is"
            )

    # --- sessions ---

    def open(self, run: Run) -> Session:
        """Batches from the position on."""
        self.sharing(run.world)  # refuses another world
        plan = self._plan(run.world, run.detail)
        loader, dataset = self.source, self.source.dataset
        _let_go_of_places(dataset)
        # A pass looks at both: it takes the place for stale if its epoch is not the next one.
        dataset.next_epoch = run.epoch
        dataset.load_state_dict(
            {
                "epoch": run.epoch,
                "sample_in_epoch": run.position,
                "num_canonical_nodes": plan.canonical,
                "shuffle_seed": run.seed,
                "initial_physical_nodes": plan.nodes,
            }
        )
        # torch draws the worker processes' seed, which is none of the caller's business.
        with self._opening.under(derive_key(Purpose.OPENING, run.seed, run.epoch)):
            return _StreamingSession(loader, str(plan))


def _let_go_of_places(dataset: StreamingDataset) -> None:
    """Close what earlier passes have opened to say or to read a place: four files a pass, until the process ends.

    The block itself stays, by its name: who made it removes it.
    """
    last = getattr(dataset, "_resume_shm", None)
    if last is not None:
        places: Any = _Places(last.shm.name)
        atexit.unregister(places)
        for memory in places.found:
            memory.cleanup()


class _Places:
    """Equal to each function, registered with atexit, that closes a shared block of this name that was only opened.

    Nothing else refers to those of Streaming, which makes one at each pass.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.found: list[SharedMemory] = []

    __hash__ = None  # type: ignore[assignment]  # it is only compared

    def __eq__(self, other: object) -> bool:
        memory = getattr(other, "__self__", None)
        equal = isinstance(memory, SharedMemory) and not memory.created_shms and memory.shm.name == self._name
        if equal:
            self.found.append(memory)
        return equal


class _StreamingSession(Session):
    def __init__(self, loader: DataLoader[Any], detail: str) -> None:
        self._loader, self._detail = loader, detail
        # torch's own, without Streaming's guess of how many samples a batch has.
        self._iterator: Any = DataLoader.__iter__(loader)
        self.take = WorkerAnswers(self._iterator).__next__

    def detail(self, back: int, finished: bool) -> str:
        """The plan."""
        return self._detail

    def close(self) -> None:
        """End the threads that read ahead; torch ends its worker processes."""
        self._iterator = None
        running = getattr(self._loader.dataset, "_iterator", None)
        if running is not None:
            running.exit()


