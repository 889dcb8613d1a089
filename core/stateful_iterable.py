"""`StatefulIterable`: the protocol of every resumable loader, and a base class that implements it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from torch.utils.data import get_worker_info

from .errors import StateError
from .loader.lending import LENDS
from .reading.exposed import RAW
from .state.format import State
from .wrapping import wrap

__all__ = ["StatefulIterable"]

_KEPT = "_midepoch_kept"


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

    The loop over its epochs, which also continues a resumed one:

        samples = Samples(data)
        samples.load_state_dict(checkpoint["data"])                # after a crash
        for epoch in range(samples.state_dict()["epoch"], 90):
            for sample in samples:
                ...

    If such a dataset is read by a DataLoader with workers, wrap the DataLoader: worker processes iterate copies of the
    dataset, and the original does not see how far they are.
    """

    def __iter__(self) -> Iterator[Any]:
        """One pass: one epoch, or the rest of one after a load."""
        ...

    def state_dict(self) -> State:
        """Where the training loop stands; see `midepoch.Loader.state_dict`."""
        state: State = _loader_of(self).state_dict()
        return state

    def load_state_dict(self, state: State) -> None:
        """Continue from `state` at the next ``next()``; see `midepoch.Loader.load_state_dict`."""
        _loader_of(self).load_state_dict(state)

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        # Protocol's own __init__ would silently end the chain of super().__init__() calls.
        super().__init__(*arguments, **keywords)

    if not TYPE_CHECKING:  # type checkers would require it of every implementation

        def __init_subclass__(cls, **arguments: Any) -> None:
            super().__init_subclass__(**arguments)
            if getattr(cls, "_is_protocol", False):
                return
            setattr(cls, LENDS, _loader_of)
            own = cls.__dict__.get("__iter__")
            if own is not None:
                setattr(cls, RAW, False)
                cls.__iter__ = _resumable_iter(own)  # type: ignore[method-assign]


def _resumable_iter(own: Callable[[Any], Iterator[Any]]) -> Callable[[Any], Iterator[Any]]:
    @functools.wraps(own)
    def __iter__(self: Any) -> Iterator[Any]:  # noqa: N807  # it takes that name's place
        return own(self) if getattr(self, RAW) else iter(_loader_of(self))

    return __iter__


class _Kept:
    """Kept by each object of a subclass: the loader that was made for it. A copy, or a pickled one, makes its own."""

    def __init__(self, owner: Any) -> None:
        self.owner, self.loader = owner, wrap(owner)

    def __reduce__(self) -> Any:
        return type(None), ()


def _loader_of(owner: Any) -> Any:
    """The loader of an object of a subclass, made when it is first needed."""
    if get_worker_info() is not None:
        raise StateError(
            f"{type(owner).__name__} is iterated by a worker process, and cannot know how far the training loop is: "
            "use wrap(DataLoader(dataset)) and its state"
        )
    kept = getattr(owner, _KEPT, None)
    if not isinstance(kept, _Kept) or kept.owner is not owner:
        kept = _Kept(owner)
        object.__setattr__(owner, _KEPT, kept)
    return kept.loader
