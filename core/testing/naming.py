"""Finding out which part of a batch names its samples, where nobody has said so.

Batches of all shapes are cut into columns: tensors along their first dimension, lists into their elements. A column
names the samples if other batches bring the same rows: those of the next epoch, or of the same epoch on more ranks.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from . import items

__all__ = ["UNNAMED", "Column", "Naming", "View", "choose", "read_columns", "with_contents"]

UNNAMED = "no leaf of the batch names the sample; give identify"

_ENOUGH = 0.5  # of a column's rows must come again
_UNIQUE = 0.85  # of the rows differ: enough to tell samples apart
_ALL = "all"  # the path of a column of one row: the batch
_MOST_PARTS = 16  # of a sequence that may be columns


@dataclasses.dataclass(frozen=True)
class Padding:
    """What fills up rows of unequal length, to be taken off again: at the end, or at the ``start``."""

    value: float
    start: bool


@dataclasses.dataclass(frozen=True)
class Column:
    """Where in a batch to look: a path, and the padding that is taken off each row."""

    path: str
    padding: Padding | None = None


View = dict[Column, list[list[Hashable]]]
"""Column -> the rows of each batch of an epoch; with the columns that every batch has."""


@dataclasses.dataclass(frozen=True)
class Naming:
    """Names the samples of a batch by ``columns``; what they are beside is in ``contents``.

    Without a column that names them, ``columns`` is empty, and what comes first in the batch is taken. ``blind``: that
    will not do, for it differs each time.
    """

    columns: tuple[Column, ...] = ()
    contents: tuple[Column, ...] = ()
    blind: bool = False

    def __call__(self, batch: Any) -> list[Hashable]:
        """The identities of the batch's samples."""
        found = dict(_columns(batch))
        named = [_rows(found[column.path], column.padding) for column in self.columns if column.path in found]
        if not named:
            return items.identify(batch)
        return named[0] if len(named) == 1 else [items.digest(row) for row in zip(*named, strict=False)]

    def samples(self, batch: Any) -> list[str] | None:
        """The digest of each sample, but for what depends on the others in its batch: padding, and unequal widths."""
        found = dict(_columns(batch))
        if not self.contents or any(column.path not in found for column in self.contents):
            return None
        parts = [_rows(found[column.path], column.padding) for column in self.contents]
        return [items.digest(row) for row in zip(*parts, strict=False)]


def read_columns(
    loader: Iterable[Any], passes: int, limit: int, paddings: Sequence[Column]
) -> tuple[list[View], list[Column], list[str]]:
    """(the rows of each pass over a loader, the paddings that may be, the paths whose widths vary).

    Paddings are looked for unless some are given.
    """
    epochs: list[list[dict[str, Any]]] = []
    for _ in range(passes):
        batches = itertools.islice(loader, limit)
        epochs.append([{path: _kept(column) for path, column in _columns(batch)} for batch in batches])
    every = [batch for epoch in epochs for batch in epoch]
    paths = [path for path in (every[0] if every else {}) if all(path in batch for batch in every)]
    # Padded variants come first: a padding that changes nothing here may do so in batches of other samples.
    found = list(paddings) or [
        Column(path, padding) for path in paths for padding in _paddings([batch[path] for batch in every])
    ]
    columns = [column for column in found if column.path in paths] + [Column(path) for path in paths]
    views = [
        {column: [_rows(batch[column.path], column.padding) for batch in epoch] for column in columns}
        for epoch in epochs
    ]
    ragged = [path for path in paths if len({batch[path].shape[1:] for batch in every if _is_array(batch[path])}) > 1]
    return views, found, ragged


def choose(first: View, second: View, other: View | None, random: bool) -> Naming | None:
    """How to name samples, or None if a third view is needed to say and ``other`` is None.

    ``first`` and ``second`` are two epochs; ``other`` is the first one shared out otherwise, empty where it cannot be.
    ``random``: contents need not be the same each time, so that what differs in the second epoch names nothing.
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
            # Numbers and texts that are the same in each epoch are ids: what is wrong is the sharing.
            chosen = [column for column in first if _is_plain(first, column) and _score(first, second, [column])][:1]
    return Naming(tuple(chosen), blind=not chosen and bool(other or random))


def with_contents(naming: Naming, found: Iterable[Column], ragged: Collection[str], one: View, two: View) -> Naming:
    """``naming``, that also knows what makes up a sample: the columns with as many rows, each without its padding."""
    if not naming.columns:
        return naming
    names = naming.columns[0]
    paddings = {column.path: column for column in naming.columns if column.padding is not None}
    for score, column in sorted(((_score(one, two, [each]), each) for each in found), key=lambda pair: -pair[0]):
        if score:
            paddings.setdefault(column.path, column)
    fitting = [column.path for column in one if column.padding is None and _fits(one, [names, column])]
    # A sequence of which an element is a column is none itself, though a batch of so many samples looks like one.
    fitting = [path for path in fitting if not _is_within(names.path, path)]
    outermost = [path for path in fitting if not any(_is_within(path, other) for other in fitting)]
    contents = [paddings.get(path, Column(path)) for path in outermost if path in paddings or path not in ragged]
    return dataclasses.replace(naming, contents=tuple(contents))


def _is_within(path: str, other: str) -> bool:
    return path != _ALL and path != other and (not other or path.startswith((f"{other}[", f"{other}.")))


def _is_plain(view: View, column: Column) -> bool:
    """Whether its rows are numbers or texts that can be read, and no digests."""
    return column.padding is None and not any(
        isinstance(row, float) or len(str(row)) == 32 for batch in view[column] for row in batch
    )


def _together(first: View, second: View, chosen: Sequence[Column]) -> list[Column]:
    """``chosen``, and each other column that both views have and with which fewer samples have a name in common."""
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
    """The share of different names among the rows of a view."""
    rows = _named(view, columns) if columns else Counter[Hashable]()
    return len(rows) / max(1, rows.total())


def _named(view: View, columns: Sequence[Column]) -> Counter[Hashable]:
    batches = zip(*(view.get(column, []) for column in columns), strict=False)
    return Counter(row for batch in batches for row in zip(*batch, strict=False))


def _score(first: View, second: View, columns: Sequence[Column]) -> float:
    """The share of rows that come again in the second view, times how different they are; 0 where too few do."""
    one, two = _named(first, columns), _named(second, columns)
    again = (one & two).total() / max(1, one.total())
    return again * _distinct(first, columns) if again >= _ENOUGH else 0.0


# --- columns and rows ---------------------------------------------------------------------------------------------


def _columns(part: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Whatever in a batch may be a column. Of a sequence: its elements, or each of them if they are columns."""
    if isinstance(part, (torch.Tensor, np.ndarray)):
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
        if len(part) <= _MOST_PARTS and not all(isinstance(element, (str, bytes, int, float)) for element in part):
            for number, element in enumerate(part):
                yield from _columns(element, _place(path, number, part))
        yield path, list(part)
    if not path:
        yield _ALL, [part]


def _place(path: str, number: int, part: Sequence[Any]) -> str:
    """With the length: where it varies from batch to batch, the elements are samples and no columns."""
    return f"{path}[{number} of {len(part)}]"


def _is_array(column: Any) -> bool:
    return isinstance(column, (torch.Tensor, np.ndarray))


def _kept(column: Any) -> Any:
    """A column that stays as it is when the loader goes on: arrays that may be padded, else the names of the rows."""
    if _is_array(column) and column.ndim > 1:
        return torch.as_tensor(column).detach().cpu().clone() if _is_numeric(column) else column.copy()
    return _rows(column)


def _is_numeric(column: Any) -> bool:
    return isinstance(column, torch.Tensor) or column.dtype.kind in "biuf"


def _rows(column: Any, padding: Padding | None = None) -> list[Hashable]:
    if _is_array(column):
        if padding is None and _is_numeric(column) and all(size == 1 for size in column.shape[1:]):
            return [items.plain(value) for value in column.reshape(-1).tolist()]
        return [items.digest(_trimmed(row, padding)) for row in column]
    plain = all(isinstance(row, (str, int, float)) for row in column)
    return [items.plain(row) if plain else items.digest(row) for row in column]


def _trimmed(row: Any, padding: Padding | None) -> Any:
    if padding is None:
        return row
    row = torch.as_tensor(row)
    kept = (row != padding.value).nonzero()
    if not len(kept):
        return row[:0]
    return row[int(kept[0]) :] if padding.start else row[: int(kept[-1]) + 1]


def _paddings(columns: Sequence[Any]) -> list[Padding]:
    """What may fill up the rows of a column: the values at most of their ends, and of their starts."""
    if not all(isinstance(column, torch.Tensor) and column.ndim == 2 and not column.is_complex() for column in columns):
        return []
    filled = [column for column in columns if column.shape[1]]
    if all(column.shape[1] == 1 for column in filled):
        return []
    found = []
    for start, place, most in ((False, -1, 2), (True, 0, 1)):
        counts = Counter(value for column in filled for value in column[:, place].tolist())
        found += [Padding(value, start) for value, count in counts.most_common(most) if count > 1]
    return found
