"""A DataLoader's attributes on a wrapped loader: read from the source, or stand-ins that cannot make up a loader."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from torch.utils.data import IterableDataset

from midepoch.errors import UnsupportedSourceError

__all__ = ["BatchesOfOurs", "Sampler", "SourceAttribute", "SourceDataset", "refuse_change"]


class SourceAttribute:
    """An attribute of the source, to be read on the loader. Assignment raises, because it would have no effect."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, loader: Any, owner: type | None = None) -> Any:
        return self if loader is None else self._read(loader.source)

    def _read(self, source: Any) -> Any:
        if not hasattr(source, self._name):
            raise AttributeError(f"the wrapped {type(source).__name__} has no {self._name}")
        return getattr(source, self._name)

    def __set__(self, loader: Any, value: object) -> NoReturn:
        refuse_change(self._name)


def refuse_change(name: str) -> NoReturn:
    """Say how to have another one."""
    raise AttributeError(
        f"{name} of a wrapped loader cannot be changed: wrap a loader that is made with it, as in "
        f"midepoch.wrap(DataLoader(dataset, {name}=...))"
    )


_NO_SKIPPING = "To resume, load a state and iterate the wrapped loader itself, which continues by itself: skip nothing"


class SourceDataset(SourceAttribute):
    """The source's dataset, if it can be indexed.

    Raises for an IterableDataset: trainers that skip batches would make a plain loader, which silently starts over.
    They ask for the dataset first.
    """

    def _read(self, source: Any) -> Any:
        try:
            dataset = super()._read(source)
        except AttributeError as error:
            raise AttributeError(f"{error}. {_NO_SKIPPING}") from None
        if isinstance(dataset, IterableDataset):
            raise AttributeError(
                "the dataset of a wrapped loader over an IterableDataset is loader.source.dataset: a loader that "
                f"somebody else makes of it would not resume. {_NO_SKIPPING}"
            )
        return dataset


class BatchesOfOurs:
    """A stand-in for a DataLoader's batch sampler. It raises when used: a loader made of it would skip batches.

    Trainers that look for a sampler in it find none.
    """

    def __iter__(self) -> Iterator[Any]:
        self._refuse()

    def __len__(self) -> int:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise UnsupportedSourceError(
            "a loader was rebuilt from the parts of a wrapped one; it would lose the place, the order and the streams: "
            "iterate the wrapped loader itself, which continues by itself after load_state_dict. With a trainer that "
            "skips batches when it resumes, use that trainer's adapter in midepoch.adapters.trainers"
        )


class Sampler:
    """A stand-in for a DataLoader's sampler: trainers call `set_epoch`, programs print the length.

    Args:
        set_epoch: the loader's.
        length: samples of one epoch on this rank; raises TypeError if it is unknown.
    """

    def __init__(self, set_epoch: Callable[[int], None], length: Callable[[], int]) -> None:
        self.set_epoch, self._length = set_epoch, length

    def __len__(self) -> int:
        return self._length()
