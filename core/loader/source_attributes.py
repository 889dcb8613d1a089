"""A DataLoader's attributes on a wrapped loader: read from the source, or stand-ins that cannot make up a loader."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from torch.utils.data import IterableDataset

from ..errors import MidepochError, UnsupportedSourceError

__all__ = ["SourceAttribute", "SourceDataset", "SourceSampler"]


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
        raise AttributeError(
            f"{self._name} of a wrapped loader cannot be changed: wrap a loader that is made with it, as in "
            f"midepoch.wrap(DataLoader(dataset, {self._name}=...))"
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


class SourceSampler(SourceAttribute):
    """The source's sampler or batch sampler, to be read on the loader as a stand-in."""

    def __get__(self, loader: Any, owner: type | None = None) -> Any:
        if loader is None:
            return self
        return (SamplerOfSource if self._name == "sampler" else BatchSamplerOfSource)(loader, self._name)


class SamplerOfSource:
    """A stand-in for a DataLoader's sampler: trainers call `set_epoch`, programs print the length.

    Other attributes are the sampler's own. They can be set between two passes; the next one follows.

    Args:
        loader: the wrapped loader.
        path: of the attributes that lead from the source to the sampler.
    """

    set_epoch: Callable[[int], None]
    _midepoch: tuple[Any, tuple[str, ...]]  # the arguments; no sampler has an attribute of this name

    def __init__(self, loader: Any, *path: str) -> None:
        self.__dict__.update(_midepoch=(loader, path), set_epoch=loader.set_epoch)

    def __len__(self) -> int:
        loader, path = self._midepoch
        return len(loader) if path[-1] == "batch_sampler" else loader._samples()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_midepoch" not in self.__dict__:
            raise AttributeError(name)
        loader, path = self._midepoch
        value = getattr(_sampler_of(self), name)
        return SamplerOfSource(loader, *path, name) if name == "sampler" else value

    def __setattr__(self, name: str, value: object) -> None:
        loader, path = self._midepoch
        sampler = _sampler_of(self)
        if loader._progress.is_reading:
            raise MidepochError(
                f"loader.{'.'.join(path)}.{name} was set while a pass is read, whose indices are listed already: set "
                "it between two passes, or leave this one first, with break or loader.close()"
            )
        setattr(sampler, name, _sampler_of(value) if isinstance(value, SamplerOfSource) else value)


class BatchSamplerOfSource(SamplerOfSource):
    """The same for its batch sampler. It raises when it is iterated: a loader made of it would skip batches."""

    def __iter__(self) -> Iterator[Any]:
        raise UnsupportedSourceError(
            "a loader was rebuilt from the parts of a wrapped one; it would lose the place, the order and the streams: "
            "iterate the wrapped loader itself, which continues by itself after load_state_dict. With a trainer that "
            "skips batches when it resumes, use that trainer's adapter in midepoch.trainers"
        )


def _sampler_of(stand_in: SamplerOfSource) -> Any:
    """The source's own."""
    loader, path = stand_in._midepoch
    found = source = loader.source
    if isinstance(getattr(source, "dataset", None), IterableDataset):
        raise AttributeError("a DataLoader over an IterableDataset has no sampler: see loader.source.dataset")
    for name in path:
        if (found := getattr(found, name, None)) is None:
            raise AttributeError(f"the wrapped {type(source).__name__} has no {'.'.join(path)}")
    return found
