"""A DataLoader's attributes on a wrapped loader: read from the source, or stand-ins that cannot make up a loader."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, NoReturn

from torch.utils.data import IterableDataset

from ..errors import MidepochError, UnsupportedSourceError

__all__ = ["BatchSamplerOfSource", "SamplerOfSource", "SourceAttribute", "SourceDataset", "refuse_change"]


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


class _Of(NamedTuple):
    """What a `SamplerOfSource` stands for: its arguments."""

    loader: Any
    path: tuple[str, ...]
    length: Callable[[], int]
    is_read: Callable[[], bool]

    def sampler(self) -> Any:
        """The source's own."""
        found = source = self.loader.source
        if isinstance(getattr(source, "dataset", None), IterableDataset):
            raise AttributeError("a DataLoader over an IterableDataset has no sampler: see loader.source.dataset")
        for name in self.path:
            if (found := getattr(found, name, None)) is None:
                raise AttributeError(f"the wrapped {type(source).__name__} has no {'.'.join(self.path)}")
        return found


class SamplerOfSource:
    """A stand-in for a DataLoader's sampler: trainers call `set_epoch`, programs print the length.

    Other attributes are the sampler's own. They can be set between two passes; the next one follows.

    Args:
        loader: the wrapped loader.
        path: of the attributes that lead from the source to the sampler.
        length: samples of one epoch on this rank, or batches of a batch sampler; raises TypeError if it is unknown.
        is_read: whether a pass is being read.
    """

    set_epoch: Callable[[int], None]
    _midepoch: _Of

    def __init__(
        self, loader: Any, path: tuple[str, ...], length: Callable[[], int], is_read: Callable[[], bool]
    ) -> None:
        self.__dict__.update(_midepoch=_Of(loader, path, length, is_read), set_epoch=loader.set_epoch)

    def __len__(self) -> int:
        return self._midepoch.length()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_midepoch" not in self.__dict__:
            raise AttributeError(name)
        of = self._midepoch
        value = getattr(of.sampler(), name)
        return value if name != "sampler" else SamplerOfSource(of.loader, (*of.path, name), of.length, of.is_read)

    def __setattr__(self, name: str, value: object) -> None:
        of = self._midepoch
        sampler = of.sampler()
        if of.is_read():
            raise MidepochError(
                f"loader.{'.'.join(of.path)}.{name} was set while a pass is read, whose indices are listed already: "
                "set it between two passes, or leave this one first, with break or loader.close()"
            )
        setattr(sampler, name, value._midepoch.sampler() if isinstance(value, SamplerOfSource) else value)


class BatchSamplerOfSource(SamplerOfSource):
    """The same for its batch sampler. It raises when it is iterated: a loader made of it would skip batches."""

    def __iter__(self) -> Iterator[Any]:
        raise UnsupportedSourceError(
            "a loader was rebuilt from the parts of a wrapped one; it would lose the place, the order and the streams: "
            "iterate the wrapped loader itself, which continues by itself after load_state_dict. With a trainer that "
            "skips batches when it resumes, use that trainer's adapter in midepoch.trainers"
        )
