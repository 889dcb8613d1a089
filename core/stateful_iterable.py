"""`StatefulIterable`: the protocol of every resumable loader, and a base class that implements it."""

from __future__ import annotations

import functools
import mmap
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol, Self, runtime_checkable

import torch
from torch.utils.data import get_worker_info

from .errors import StateError
from .loader.lending import LENDS
from .reading.driven import RAW
from .state.format import State
from .wrapping import wrap

__all__ = ["StatefulIterable"]

_INHERITED = "_midepoch_inherited"


@runtime_checkable
class StatefulIterable(Protocol):
    """Anything that can be iterated and that can save and restore where it stands.

    What `midepoch.wrap` returns satisfies it. A class of your own can also derive from it. It inherits the two methods,
    and the torch Samplers that its objects expose are made resumable and sharded. They are a way to jump: the object
    itself says when a pass ends.

        class Samples(StatefulIterable, IterableDataset):
            def __init__(self, data):
                self.data, self.sampler = data, RandomSampler(data)
            def __iter__(self):
                self.sampler_iter = iter(self.sampler)
                return self
            def __next__(self):
                return self.data[next(self.sampler_iter)]

    If such a dataset is read by a DataLoader, wrap the DataLoader: worker processes iterate copies of the dataset, and
    the original does not see how far they are.
    """

    def __iter__(self) -> Iterator[Any]:
        """One pass: one epoch, or the rest of one after a load."""
        ...

    def state_dict(self) -> State:
        """Where the training loop stands; see `midepoch.Loader.state_dict`."""
        state: State = _inherited(self).loader().state_dict()
        return state

    def load_state_dict(self, state: State) -> None:
        """Continue from `state` at the next ``next()``; see `midepoch.Loader.load_state_dict`."""
        _inherited(self).loader().load_state_dict(state)

    def __new__(cls, *arguments: Any, **keywords: Any) -> Self:  # noqa: D102  # nothing for users
        made = super().__new__(cls)
        # Made before any worker process is forked, so that all share its mark.
        object.__setattr__(made, _INHERITED, _Inherited(made))
        return made

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        # Protocol's own __init__ would silently end the chain of super().__init__() calls.
        super().__init__(*arguments, **keywords)

    if not TYPE_CHECKING:  # type checkers would require it of every implementation

        def __init_subclass__(cls, **arguments: Any) -> None:
            super().__init_subclass__(**arguments)
            if getattr(cls, "_is_protocol", False):
                return
            setattr(cls, LENDS, _lend)
            own = cls.__dict__.get("__iter__")
            if own is not None:
                setattr(cls, RAW, False)
                cls.__iter__ = _resumable_iter(own)  # type: ignore[method-assign]


def _lend(owner: object) -> Any:
    """The loader that was made for an object of a subclass."""
    return _inherited(owner).loader()


def _resumable_iter(own: Callable[[Any], Iterator[Any]]) -> Callable[[Any], Iterator[Any]]:
    @functools.wraps(own)
    def __iter__(self: Any) -> Iterator[Any]:  # noqa: N807  # it takes that name's place
        if getattr(self, RAW):
            return own(self)
        inherited = _inherited(self)
        if get_worker_info() is not None:
            inherited.mark()
            return own(self)
        return iter(inherited.loader())

    return __iter__


class _Inherited:
    """Kept by each object of a subclass: its loader, made when needed, and a mark that workers iterate copies."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner
        self._loader: Any = None
        # Shared memory: what forked worker processes write is seen here.
        self._mark: Any = mmap.mmap(-1, 1)
        # The same for spawned workers. Made when the first one starts, since it takes a file descriptor.
        self._sent_mark: torch.Tensor | None = None

    def mark(self) -> None:
        """Record that a worker process iterates a copy of the owner."""
        if self._mark is not None:
            self._mark[0] = 1
        if self._sent_mark is not None:
            self._sent_mark.fill_(1)

    def _marked(self) -> bool:
        return bool(self._mark is not None and self._mark[0]) or bool(
            self._sent_mark is not None and self._sent_mark.item()
        )

    def loader(self) -> Any:
        if get_worker_info() is not None or self._marked():
            raise StateError(
                f"{type(self.owner).__name__} is iterated by the worker processes of a DataLoader that is not "
                "wrapped, so it does not know where the training loop stands: use wrap(DataLoader(dataset)) and its "
                "state"
            )
        if self._loader is None:
            self._loader = wrap(self.owner)
        return self._loader

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None  # a copy of the owner makes its own

    def __getstate__(self) -> dict[str, Any]:
        # The loader stays here; a worker process needs only the shared mark.
        if self._sent_mark is None:
            self._sent_mark = torch.zeros(1, dtype=torch.uint8).share_memory_()  # type: ignore[no-untyped-call]
        return {"owner": self.owner, "_loader": None, "_mark": None, "_sent_mark": self._sent_mark}


def _inherited(owner: Any) -> _Inherited:
    found = getattr(owner, _INHERITED, None)
    if isinstance(found, _Inherited) and found.owner is owner:
        return found
    made = _Inherited(owner)  # a copy's
    object.__setattr__(owner, _INHERITED, made)
    return made
