"""Sources that keep a state of their own: it is carried, checked and shared out like every other."""

from __future__ import annotations

from typing import Any, ClassVar

from midepoch.adapter import Adapter, Options, Run, Session
from midepoch.encoding import decode, encode
from midepoch.errors import SourceError, StateCorruptError, StateError, UnsupportedSourceError
from midepoch.protocol import RAW, Capabilities, Capability
from midepoch.sampler import length_of
from midepoch.world import World

__all__ = ["StatefulAdapter"]


class StatefulAdapter(Adapter):
    """Anything with ``__iter__``, ``state_dict`` and ``load_state_dict``, such as torchdata's StatefulDataLoader.

    The unit is a batch. The source shards itself, as it always did, so its state is this rank's alone.
    """

    name: ClassVar[str] = "stateful"
    rank_independent = False
    elastic = False
    remembers = False

    def __init__(self, source: Any, options: Options) -> None:
        super().__init__(source, options)
        if options.shard:
            raise UnsupportedSourceError(
                f"shard=True: {type(source).__name__} keeps a state of its own, which says nothing of ranks; shard "
                "what it reads, or wrap a plain loader"
            )

    @classmethod
    def recognises(cls, source: object) -> bool:
        """Has the three methods, and is iterable as data is: modules and optimizers are not."""
        methods = all(callable(getattr(source, name, None)) for name in ("__iter__", "state_dict", "load_state_dict"))
        # What derives from StatefulIterable has the methods from us.
        return methods and not hasattr(type(source), RAW)

    def size(self, seed: int, epoch: int, world: World, detail: str = "") -> int | None:
        """Batches of all ranks, where the source knows its own."""
        length = length_of(self.source)
        return None if length is None else length * world.world_size

    def describe(self) -> dict[str, str]:
        """The kind of source, since another's state means nothing to it, and what loaders' states depend on."""
        described = {"source": f"{type(self.source).__module__}.{type(self.source).__qualname__}"}
        for name in ("batch_size", "drop_last", "num_workers"):
            value = getattr(self.source, name, None)
            if isinstance(value, int):
                described[name] = str(value)
        samples = length_of(getattr(self.source, "dataset", None))
        return described if samples is None else {**described, "samples": str(samples)}

    def capabilities(self) -> Capabilities:
        """As the source's own state has it."""
        own = Capability(True, "as exact as the source's own state")
        return Capabilities(
            exact_order=own,
            exact_augmentations=own,
            constant_time_resume=Capability(True, "as fast as the source restores its own state"),
            elastic_world=Capability(False, "the source's own state knows one world size"),
            elastic_workers=Capability(False, "the source's own state decides; midepoch cannot see its workers"),
            rank_independent=Capability(False, "each rank's source knows its own part: use midepoch.gather(loader)"),
        )

    def check_detail(self, detail: str, seed: int, epoch: int, position: int, world: World) -> None:
        """The source's own state decodes; whether it fits, the source says when it is loaded."""
        if detail:
            decode(detail)
        elif position:
            raise StateCorruptError(
                f"the state stands at position {position} without the source's own part: use a whole one"
            )

    def open(self, run: Run) -> Session:
        """The source's own iterator, after its own load."""
        return _StatefulSession(self.source, run.detail, None if run.share is None else run.share.steps)


class _StatefulSession(Session):
    def __init__(self, source: Any, detail: str, steps: int | None) -> None:
        self._source, self._steps = source, steps
        self._iterator: Any = None
        self._handed_out = 0
        self._failed = self._finished = False
        self._opened = detail
        self._asked = (0, detail)  # batches handed out, and the source's state then

    def take(self) -> Any:
        """The source's next batch."""
        if self._iterator is None:
            if not self._opened:
                self._iterator = iter(self._source)
            else:
                try:
                    self._source.load_state_dict(decode(self._opened))
                    self._iterator = iter(self._source)
                except Exception as error:
                    raise StateError(
                        f"{type(self._source).__name__} refused its own state ({type(error).__name__}: {error}): "
                        "make the source as it was when the state was saved"
                    ) from error
        try:
            batch = next(self._iterator)
        except StopIteration:
            raise
        except BaseException:
            self._failed = True
            raise
        self._handed_out += 1
        return batch

    def detail(self, back: int, finished: bool) -> str:
        """The source's own state, as it is now."""
        if back or (self._failed and self._asked[0] != self._handed_out):
            raise StateError(
                "the source's own state is that of now, after a batch that failed: load an older state to go on"
                if self._failed
                else f"the source's own state is that of now, not of {back} batches ago: save it when no batch is in "
                "flight"
            )
        if finished:
            self._finish()
        elif self._asked[0] == self._handed_out:
            return self._asked[1]
        text = encode(self._source.state_dict())
        if not finished:
            self._asked = (self._handed_out, text)
        return text

    def _finish(self) -> None:
        """Let the source see its end: until then its state says that nothing is left, not that it is finished."""
        if self._finished:
            return
        self._finished = True
        try:
            next(self._iterator)
        except StopIteration:
            return
        raise SourceError(
            f"{type(self._source).__name__} goes on after the {self._steps} batches that were left by its len(): mend "
            "its __len__"
        )
