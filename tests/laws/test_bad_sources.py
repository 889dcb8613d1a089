"""Sources that never end, end at once, raise, state a wrong length or give odd items, beside their plain form.

Each is read by plain torch (or python) and by midepoch, for as many batches as `BOUND`. Either both give the same, and
end by the same exception; or midepoch raises an error of its own that names the source or its length.
"""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch.utils.data import DataLoader, Dataset, IterableDataset

import midepoch
from midepoch import MidepochError, MidepochWarning
from support import sources

BOUND = 12  # batches: more than any source here has, but for the one without an end


class OwnError(Exception):
    """What a source raises."""


def _units(what: str) -> Iterator[Any]:
    """Six units, or what is wrong with them."""
    shared = ["the same object"]
    if what == "never ends":
        yield from itertools.count()
    for place in range(0 if what == "ends at once" else 6):
        if what == "raises first" or (what == "raises later" and place == 3):
            raise OwnError(f"unit {place}")
        yield None if what == "gives None" else shared if what == "gives one object" else place
    if what == "raises after its last":
        raise OwnError("after the last")


WHAT = [
    "never ends", "ends at once", "raises first", "raises later", "raises after its last", "gives None",
    "gives one object", "is sound",
]  # fmt: skip
LENGTHS = {"is short by two": 4, "is long by two": 8}


class Iterated:
    def __init__(self, what: str) -> None:
        self.what = what

    def __iter__(self) -> Iterator[Any]:
        return _units(self.what)


class Counted(Iterated):
    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.length = LENGTHS.get(what, 6)

    def __len__(self) -> int:
        return self.length


class Stream(Iterated, IterableDataset[Any]):
    """The same in a DataLoader. Each worker has its share."""

    def __iter__(self) -> Iterator[Any]:
        own = sources.part_of_worker(BOUND)
        return itertools.islice(_units(self.what), own.start, None, own.step)


class CountedStream(Counted, IterableDataset[Any]):
    """With a length."""


class Indexed(Dataset[Any]):
    """By index. One that never ends has a large length; a length that is too large meets an error of its own."""

    def __init__(self, what: str) -> None:
        self.what, self.shared = what, ["the same object"]
        self.length = {"never ends": 10**9, "ends at once": 0, **LENGTHS}.get(what, 6)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        if self.what == "raises first" or (self.what, index) in (("raises later", 3), ("is long by two", 6)):
            raise OwnError(f"unit {index}")
        if self.what == "raises after its last" and index == 5:
            raise OwnError("the last")
        return None if self.what == "gives None" else self.shared if self.what == "gives one object" else index


class Listed(list[Any]):
    def __init__(self, what: str) -> None:
        super().__init__(_units(what))
        self.length = LENGTHS.get(what, super().__len__())

    def __len__(self) -> int:
        return self.length


def _loader(dataset: Any, workers: int) -> Any:
    return DataLoader(dataset, 2, num_workers=workers, collate_fn=list)


Make = Callable[[str], Any]
KINDS: dict[str, tuple[Make, bool | None]] = {
    "function": (lambda what: lambda: _units(what), None),
    "iterated": (Iterated, None),
    "counted": (Counted, None),
    "stream": (lambda what: _loader(Stream(what), 0), None),
    "stream, 2 workers": (lambda what: _loader(Stream(what), 2), False),
    "counted stream": (lambda what: _loader(CountedStream(what), 0), None),
    "indexed": (lambda what: _loader(Indexed(what), 0), None),
    "indexed, 2 workers": (lambda what: _loader(Indexed(what), 2), None),
    "list": (Listed, None),
}


def _cases() -> Iterator[Any]:
    for name in KINDS:
        lies = name in ("counted", "counted stream", "indexed", "indexed, 2 workers", "list")
        for what in (*WHAT, *(LENGTHS if lies else ())):
            if not (name == "list" and ("raises" in what or what == "never ends")):
                yield pytest.param(name, what)


def _read(batches: Iterator[Any]) -> tuple[list[Any], BaseException | None]:
    """The batches up to the bound, and the exception that ended the pass."""
    got: list[Any] = []
    try:
        got.extend(itertools.islice(batches, BOUND))
    except Exception as error:  # noqa: BLE001  # compared
        return got, error
    return got, None


@pytest.mark.parametrize(("name", "what"), list(_cases()))
def test_a_bad_source_is_read_as_without_midepoch_or_named(name: str, what: str) -> None:
    make, shard = KINDS[name]
    for _ in range(2):  # epochs: a source may be worse in the second one
        plain = make(what)
        batches = iter(plain() if callable(plain) else plain)
        expected, error = _read(batches)
        getattr(batches, "_shutdown_workers", int)()  # left to the garbage, torch waits five seconds for each
    if name == "list" and what in LENGTHS:
        with pytest.raises(MidepochError, match=f"this Listed holds 6 items, but its len.. is {LENGTHS[what]}"):
            midepoch.wrap(make(what))
        return
    loader = midepoch.wrap(make(what), seed=0, shard=shard)
    with warnings.catch_warnings():
        warnings.simplefilter("error", MidepochWarning)
        for epoch in range(2):
            before = random.getstate()
            got, ours = _read(iter(loader))
            assert random.getstate() == before
            lies = what in LENGTHS or ("counted" in name and what in ("never ends", "ends at once"))
            if lies and isinstance(ours, MidepochError):  # what comes is not as much as its `__len__` says
                assert "len()" in str(ours)
                assert got == expected[: len(got)]
                return
            assert got == expected, epoch
            # Of a worker's exception, torch makes one with a longer message.
            assert (type(ours) is OwnError, ours is None) == (type(error) is OwnError, error is None), ours
            if what == "never ends" or error is not None:
                loader.seek(epoch=epoch + 1)
            assert loader.epoch == epoch + 1
    loader.close()


@pytest.mark.parametrize(
    ("units", "batch_size", "drop_last"), [(13, 3, False), (20, 3, False), (12, 3, True), (30, 4, True)]
)
def test_a_length_that_is_too_low_within_a_batch_is_refused(units: int, batch_size: int, drop_last: bool) -> None:
    class Stream(IterableDataset[int]):
        def __len__(self) -> int:
            return 10

        def __iter__(self) -> Iterator[int]:
            return iter(range(units))

    loader = midepoch.wrap(DataLoader(Stream(), batch_size, drop_last=drop_last), seed=0)
    with pytest.raises(midepoch.SourceError, match="more than the 10 units"):
        list(loader)
