"""Deriving which part of a batch names its samples, if the user has not said so.

A batch is split into columns: tensors along their first dimension, lists into their elements. A column names the
samples if other batches bring the same rows: those of the next epoch, or of the same epoch on more ranks.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from . import items

__all__ = ["UNNAMED", "Column", "Naming", "View", "choose", "read_columns", "split", "with_contents"]

UNNAMED = "no leaf of the batch names the sample; give identify"

_ENOUGH = 0.5  # share of a column's rows that must occur again
_UNIQUE = 0.85  # share of distinct rows that is enough to tell samples apart
_ALL = "all"  # the path of a column with one row: the whole batch
_MOST_PARTS = 16  # elements of a sequence that may be columns


@dataclasses.dataclass(frozen=True)
class Column:
    """A path in a batch, and the value that fills up rows of unequal length: at their ends, or at their ``start``."""

    path: str
    padding: float | None = None
    start: bool = False


View = dict[Column, list[list[Hashable]]]
"""Column -> the rows of each batch of an epoch, for the columns that every batch has."""


@dataclasses.dataclass(frozen=True)
class Naming:
    """Names the samples of a batch by ``columns``. The columns of their content are in ``contents``.

    If no column names them, ``columns`` is empty, and the first part of the batch is used. ``blind``: that part is no
    name either, because it differs each time.
    """

    columns: tuple[Column, ...] = ()
    contents: tuple[Column, ...] = ()
    blind: bool = False

    def __call__(self, batch: Any) -> list[Hashable]:
        """The identities of the batch's samples."""
        found = dict(_columns(batch))
        columns = [column for column in self.columns if column.path in found] or [Column(next(iter(found)))]
        named = [_rows(found[column.path], column) for column in columns]
        return named[0] if len(named) == 1 else [items.digest(row) for row in zip(*named, strict=False)]

    def samples(self, batch: Any) -> list[str] | None:
        """The digest of each sample, without what depends on the others in its batch: padding, and unequal widths."""
        found = dict(_columns(batch))
        if not self.contents or any(column.path not in found for column in self.contents):
            return None
        parts = [_rows(found[column.path], column) for column in self.contents]
        return [items.digest(row) for row in zip(*parts, strict=False)]


def split(batch: Any, count: int) -> list[str] | None:
    """The digest of each of the ``count`` samples in a batch; None if it is not made of columns of so many rows."""
    columns = {path: column for path, column in _columns(batch) if path != _ALL}
    # A list with an element that is a column is no column, although it may have as many elements as the batch samples.
    paths = [path for path, column in columns.items() if len(column) == count]
    fitting = [path for path in paths if not any(_is_within(other, path) for other in paths)]
    related = {path for path in columns for each in fitting
               if path == each or _is_within(path, each) or _is_within(each, path)}  # fmt: skip
    if not fitting or related != columns.keys():
        return None
    return [items.digest(row) for row in zip(*(_rows(columns[path], Column(path)) for path in fitting), strict=True)]


def read_columns(
    loader: Iterable[Any], passes: int, limit: int, paddings: Sequence[Column]
) -> tuple[list[View], list[Column], list[str]]:
    """(the rows of each pass over a loader, the possible paddings, the paths whose widths vary).

    Paddings are searched for unless some are given.
    """
    epochs: list[list[dict[str, Any]]] = []
    for _ in range(passes):
        batches = itertools.islice(loader, limit)
        epochs.append([{path: _kept(column) for path, column in _columns(batch)} for batch in batches])
    every = [batch for epoch in epochs for batch in epoch]
    paths = [path for path in (every[0] if every else {}) if all(path in batch for batch in every)]
    # Padded variants come first: a padding that changes nothing here may do so in other batches.
    found = list(paddings) or [each for path in paths for each in _paddings(path, [batch[path] for batch in every])]
    columns = [column for column in found if column.path in paths] + [Column(path) for path in paths]
    views = [{column: [_rows(batch[column.path], column) for batch in epoch] for column in columns} for epoch in epochs]
    ragged = [path for path in paths if len({batch[path].shape[1:] for batch in every if _is_array(batch[path])}) > 1]
    return views, found, ragged


def choose(first: View, second: View, other: View | None, random: bool) -> Naming | None:
    """Choose how to name samples. None if that needs a third view and ``other`` is None.

    ``first`` and ``second`` are two epochs. ``other`` is the first epoch shared out differently, or empty if that is
    impossible. ``random``: content may be random, so a column that differs in the second epoch names nothing.
    """
    informative = any(first[column] != second.get(column) for column in first)
    chosen = _together(first, second, []) if informative else []
    if informative and _distinct(first, chosen) >= _UNIQUE:
        return Naming(tuple(chosen))
    if other is None:
        return None
    if not other and not informative:
        chosen = _together(first, second, [])
    elif other and not (random and informative):
        chosen = _together(first, other, chosen)
        if not chosen:
            # Numbers and texts that are the same in each epoch are ids. It is the sharing that is wrong.
            chosen = [column for column in first if _is_plain(first, column) and _score(first, second, [column])][:1]
    return Naming(tuple(chosen), blind=not chosen and bool(other or random))


def with_contents(naming: Naming, found: Iterable[Column], ragged: Collection[str], one: View, two: View) -> Naming:
    """``naming``, extended by a sample's content: the columns with as many rows, each without its padding."""
    if not naming.columns:
        return naming
    names = naming.columns[0]
    paddings = {column.path: column for column in naming.columns if column.padding is not None}
    for score, column in sorted(((_score(one, two, [each]), each) for each in found), key=lambda pair: -pair[0]):
        if score:
            paddings.setdefault(column.path, column)
    fitting = [column.path for column in one if column.padding is None and _fits(one, [names, column])]
    # A sequence with an element that is a column is not a column itself, even if its length is the batch size.
    fitting = [path for path in fitting if not _is_within(names.path, path)]
    outermost = [path for path in fitting if not any(_is_within(path, other) for other in fitting)]
    contents = [paddings.get(path, Column(path)) for path in outermost if path in paddings or path not in ragged]
    return dataclasses.replace(naming, contents=tuple(contents))


def _is_within(path: str, other: str) -> bool:
    return path != _ALL and path != other and (not other or path.startswith((f"{other}[", f"{other}.")))


def _is_plain(view: View, column: Column) -> bool:
    """Whether its rows are readable numbers or texts, not digests."""
    return column.padding is None and not any(
        isinstance(row, float) or len(str(row)) == 32 for batch in view[column] for row in batch
    )


def _together(first: View, second: View, chosen: Sequence[Column]) -> list[Column]:
    """``chosen``, and each other column in both views with which fewer samples share a name."""
    columns = list(chosen)
    scores = {column: _score(first, second, [column]) for column in first}
    for column in sorted(scores, key=lambda each: (each.path == _ALL, -scores[each], not _is_plain(first, each))):
        if columns and _distinct(first, columns) >= _UNIQUE:
            break
        more = [*columns, column]
        if scores[column] and _fits(first, more) and _distinct(first, more) > _distinct(first, columns):
            columns = more
    return columns


def _fits(view: View, columns: Sequence[Column]) -> bool:
    counts = [[len(batch) for batch in view[column]] for column in columns]
    return all(count == counts[0] for count in counts)


def _distinct(view: View, columns: Sequence[Column]) -> float:
    """The share of distinct names among the rows of a view."""
    rows = _named(view, columns) if columns else Counter[Hashable]()
    return len(rows) / max(1, rows.total())


def _named(view: View, columns: Sequence[Column]) -> Counter[Hashable]:
    batches = zip(*(view.get(column, []) for column in columns), strict=False)
    return Counter(row for batch in batches for row in zip(*batch, strict=False))


def _score(first: View, second: View, columns: Sequence[Column]) -> float:
    """The share of rows that occur again in the second view, times the share of distinct ones; 0 if too few do."""
    one, two = _named(first, columns), _named(second, columns)
    again = (one & two).total() / max(1, one.total())
    return again * _distinct(first, columns) if again >= _ENOUGH else 0.0


# --- columns and rows ---------------------------------------------------------------------------------------------


def _columns(part: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """All parts of a batch that may be columns. For a sequence: itself, or each of its elements if they are columns."""
    if isinstance(part, torch.Tensor) and not _is_stored_whole(part):
        yield path, list(part.detach().unbind()) if part.is_nested or part.ndim else [part]
    elif isinstance(part, (torch.Tensor, np.ndarray)):
        yield path, part if part.ndim else part.reshape(1)
    elif isinstance(part, (str, int, float)):
        yield path, [part]
    elif isinstance(part, Mapping):
        for key, value in part.items():
            yield from _columns(value, f"{path}[{key!r}]")
    elif dataclasses.is_dataclass(part) and not isinstance(part, type):
        for field in dataclasses.fields(part):
            yield from _columns(getattr(part, field.name), f"{path}.{field.name}")
    elif isinstance(part, Sequence) and not isinstance(part, bytes) and part:
        plain = all(isinstance(element, (str, bytes, int, float)) for element in part)
        if len(part) <= _MOST_PARTS and not plain:
            for number, element in enumerate(part):
                # With the length: if that varies between batches, the elements are samples and not columns.
                yield from _columns(element, f"{path}[{number} of {len(part)}]")
        if not (path and plain and len(set(map(type, part))) > 1):  # that is a sample, such as (index, value)
            yield path, list(part)
    if not path:
        yield _ALL, [part]


def _is_stored_whole(tensor: torch.Tensor) -> bool:
    """Whether its elements are all stored, one after another: it is not sparse, nested, quantized or without data."""
    strided = not tensor.is_nested and tensor.layout is torch.strided
    return strided and not tensor.is_quantized and tensor.device.type != "meta"


def _plain(value: Hashable) -> Hashable:
    """A number or text as a name. NaN gets a text, because it would not equal itself after pickling."""
    return "nan" if isinstance(value, float) and math.isnan(value) else value


def _is_array(column: Any) -> bool:
    return isinstance(column, (torch.Tensor, np.ndarray))


def _kept(column: Any) -> Any:
    """What to keep of a column when the loader continues: a copy of an array that may be padded, else the names."""
    if _is_array(column) and column.ndim > 1:
        return torch.as_tensor(column).detach().to("cpu", copy=True) if _is_numeric(column) else column.copy()
    return _rows(column, Column(""))


def _is_numeric(column: Any) -> bool:
    return isinstance(column, torch.Tensor) or column.dtype.kind in "biuf"


def _rows(data: Any, column: Column) -> list[Hashable]:
    """A name for each row: the row itself if it is a number or a text, else its digest."""
    if _is_array(data):
        if column.padding is None and _is_numeric(data) and all(size == 1 for size in data.shape[1:]):
            return [_plain(value) for value in data.reshape(-1).tolist()]
        return [items.digest(_trimmed(row, column)) for row in data]
    plain = all(isinstance(row, (str, int, float)) for row in data)
    return [_plain(row) if plain else items.digest(row) for row in data]


def _trimmed(row: Any, column: Column) -> Any:
    if column.padding is None:
        return row
    row = torch.as_tensor(row)
    kept = (row != column.padding).nonzero()
    if not len(kept):
        return row[:0]
    return row[int(kept[0]) :] if column.start else row[: int(kept[-1]) + 1]


def _paddings(path: str, columns: Sequence[Any]) -> list[Column]:
    """The column with each padding that it may have: the most frequent values at its rows' ends and starts."""
    if not all(isinstance(column, torch.Tensor) and column.ndim == 2 and not column.is_complex() for column in columns):
        return []
    filled = [column for column in columns if column.shape[1]]
    if all(column.shape[1] == 1 for column in filled):
        return []
    found = []
    for start, place, most in ((False, -1, 2), (True, 0, 1)):
        counts = Counter(value for column in filled for value in column[:, place].tolist())
        found += [Column(path, value, start) for value, count in counts.most_common(most) if count > 1]
    return found
