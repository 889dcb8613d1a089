"""Megatron-Energon: ``save_state_rank`` and ``restore_state_rank`` behind the two calls."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator
from typing import Any, ClassVar, cast

from midepoch.adapters.stateful.adapter import StatefulAdapter, is_of
from midepoch.adapters.stateful.session import ENDED
from midepoch.errors import StateCorruptError, StateError, UnsupportedSourceError
from midepoch.loader.adapter import Options, Run
from midepoch.loader.capabilities import Capabilities, Capability
from midepoch.reading.workers import workers_outlive_signals
from midepoch.state.codec import encode
from midepoch.world import World

__all__ = ["EnergonAdapter"]

_PACKAGE = "megatron.energon"
_MAKE_ANOTHER = (
    "a Megatron-Energon loader that was read cannot go elsewhere: make another one, and load this state into it"
)
_KIND = "energon"  # the key under which a plain state has the class of a part


class EnergonAdapter(StatefulAdapter):
    """What `megatron.energon.get_savable_loader` returns. A training loader's pass does not end."""

    name: ClassVar[str] = "energon"
    how_to_divide = "Make its WorkerConfig for this rank, as WorkerConfig.default_worker_config() does"

    def __init__(self, source: Any, options: Options) -> None:
        super().__init__(source, options)
        kinds = _kinds_in(source.dataset)
        # A training loader repeats its data without an end, unless it has virtual epochs.
        ends = "EpochizeDataset" in kinds or "RepeatDataset" not in kinds
        if ends and source.num_workers > 1:
            raise UnsupportedSourceError(
                "where passes end (validation, virtual epochs), Megatron-Energon resumes one worker process at most "
                "exactly: write WorkerConfig(num_workers=1)"
            )

    @classmethod
    def recognises(cls, source: object) -> bool:
        """A SavableDataLoader."""
        return is_of(_PACKAGE, source) and hasattr(source, "save_state_rank") and hasattr(source, "restore_state_rank")

    def size(self, seed: int, epoch: int, world: World, detail: str = "") -> int | None:
        """Unknown: its len() is that of one round through the data, of which a training loader makes many."""
        return None

    def describe(self) -> dict[str, str]:
        """The kind of loader and its workers, whose states are restored one by one."""
        kind = f"{type(self.source).__module__}.{type(self.source).__qualname__}"
        return {"source": kind, "num_workers": str(self.source.num_workers), **self.described_package()}

    def capabilities(self) -> Capabilities:
        """What Energon restores: in worker processes, the global generators too."""
        exact = Capability(True, "Energon's state holds the generators of its worker processes")
        if not self.source.num_workers:
            exact = Capability(
                False,
                "without worker processes, Energon does not restore the global generators: write "
                "WorkerConfig(num_workers=1) or more, or draw in then=, whose numbers are restored",
            )
        return dataclasses.replace(
            super().capabilities(),
            exact_augmentations=exact,
            elastic_world=Capability(False, "Energon's own rule: `energon checkpoint redist` makes states for others"),
        )

    @property
    def divides(self) -> bool:
        """Whether its WorkerConfig is for several ranks."""
        return getattr(getattr(self.source.dataset, "worker_config", None), "world_size", 1) > 1

    def rank_part(self, detail: str, saved_world_size: int, world: World) -> str:
        """This rank's, in a world of the same size. For others, Energon has a rule of its own."""
        if saved_world_size != world.world_size:
            cure = (
                ", or save Energon's own states (loader.source.save_state_global), and redistribute them with `energon "
                "checkpoint redist --new-world-size`, with as many worker processes on all ranks together"
            )
            self.refuse_world(saved_world_size, world, cure)
        return super().rank_part(detail, saved_world_size, world)

    def check_detail(self, detail: str, seed: int, epoch: int, position: int, world: World) -> None:
        """Check that Energon can go there: the loader was not read."""
        super().check_detail(detail, seed, epoch, position, world)
        if self._used and (detail.removeprefix(ENDED) != self._stands_at() if detail else not epoch):
            raise StateError(_MAKE_ANOTHER)

    def _stands_at(self) -> str:
        return encode(_plain(self.source.save_state_rank()))

    def start(self, run: Run, state: Any) -> Iterator[Any]:
        """Energon's own iterator, after its state is restored."""
        if state is not None and not self._used:
            self.source.restore_state_rank(_restored(state))
        elif self._used and (run.epoch == 0 if state is None else self._stands_at() != encode(state)):
            raise StateError(_MAKE_ANOTHER)
        self._used = True
        with workers_outlive_signals(self.source):
            return cast(Iterator[Any], iter(self.source))

    def current(self, iterator: Iterator[Any]) -> Any:
        """Energon's state of this rank."""
        return _plain(self.source.save_state_rank())


def _kinds_in(dataset: Any) -> set[str]:
    """The names of the classes of a dataset and of those that it reads."""
    inside = [*getattr(dataset, "datasets", ()), getattr(dataset, "dataset", None)]
    found = {type(dataset).__name__}
    return found.union(*(_kinds_in(each) for each in inside if each is not None))


def _plain(value: Any) -> Any:
    """A state as built-in types: objects of Energon's classes become dicts with the name of the class."""
    kind = type(value)
    if isinstance(value, dict):
        items = [[key, _plain(each)] for key, each in value.items()]
        return {_KIND: "" if kind is dict else f"{kind.__module__}:{kind.__qualname__}", "items": items}
    if dataclasses.is_dataclass(value):
        held = {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {_KIND: f"{kind.__module__}:{kind.__qualname__}", "fields": held}
    if isinstance(value, list | tuple):
        return kind(map(_plain, value)) if kind in (list, tuple) else value
    return value


def _restored(value: Any) -> Any:
    """The opposite of `_plain`. Makes objects of Energon's own data classes only."""
    if isinstance(value, list | tuple):
        return type(value)(map(_restored, value))
    if not isinstance(value, dict):
        return value
    kind: Any = dict
    if value.get(_KIND):
        module, _, name = str(value[_KIND]).partition(":")
        if not f"{module}.".startswith(f"{_PACKAGE}.") or not name.isidentifier():
            raise StateCorruptError(f"{value[_KIND]!r:.80} is not a part of Energon's states: use an undamaged state")
        kind = getattr(importlib.import_module(module), name)
        if not isinstance(kind, type) or not (dataclasses.is_dataclass(kind) or issubclass(kind, dict)):
            raise StateCorruptError(f"{value[_KIND]!r:.80} is not a part of Energon's states: use an undamaged state")
    if "fields" in value:
        return kind(**{name: _restored(each) for name, each in value["fields"].items()})
    return kind((key, _restored(each)) for key, each in value["items"])
