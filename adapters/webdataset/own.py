"""Shard lists and shuffles of the user's own: what they do is tried on a copy, never guessed from their names."""

from __future__ import annotations

import itertools
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from webdataset.pipeline import DataPipeline

from midepoch.adapters.webdataset.draws import Draws
from midepoch.copying import copy_apart
from midepoch.errors import UnsupportedSourceError
from midepoch.order.keys import derive_key
from midepoch.randomness.streams import Purpose, Streams

__all__ = ["OwnShards", "is_own_shuffle", "own_shards", "weights_of"]

_FEWEST = 64  # shards taken from a list that goes on; chance does not give so many draws without repetition
_MOST = 2_000  # shards taken from a list to find its end
_LEAST = 8  # shards taken from any list
_TELLING = 50  # draws of one shard, from which on their number tells something
_DEVIATIONS = 6  # standard deviations that chance does not give
_MOST_WEIGHTED = 200_000  # the same, times the number of weights: python adds them up for each draw


class OwnShards(NamedTuple):
    """What a list of shards does.

    Attributes:
        urls: in the list's order.
        endless: it begins again where it ends, or goes on drawing.
        shuffled: one pass is in another order than `urls`.
        draws: how it draws shards with replacement; None if it gives each of them once in a pass.
    """

    urls: list[str]
    endless: bool
    shuffled: bool
    draws: Draws | None


def own_shards(stage: Any) -> OwnShards | str:
    """What a list of shards of the user's own does, as tried on a copy; or why that is not known.

    It has to show all its shards as a list, ``.urls``, and may show ``.weights``, one for each. Nothing is
    tried of an empty list.

    Raises:
        UnsupportedSourceError: the weights are not numbers of 0 or more, one for each shard.
    """
    urls = getattr(stage, "urls", None)
    if isinstance(urls, list | tuple) and not urls:
        return OwnShards([], False, False, None)
    if not isinstance(urls, list | tuple) or not all(isinstance(url, str) for url in urls):
        return "it shows no list of its shards as .urls"
    weights = weights_of(stage, len(urls))
    copied = copy_apart(stage)
    if copied.value is None:
        return f"it could not be tried: {copied.why}"
    try:
        with _streams(copied.value, 0):
            given = _Given(DataPipeline().invoke(copied.value))
            found = _found(given, list(urls), weights, getattr(stage, "nshards", None))
        if isinstance(found, str) or found.draws is not None or found.shuffled:
            return found
        # A shuffle may leave the order as it is by chance.
        with _streams(copied.value, 1):
            again = list(itertools.islice(_Given(DataPipeline().invoke(copied.value)), len(urls)))
        return found._replace(shuffled=again != found.urls)
    except UnsupportedSourceError:
        raise
    except Exception as error:  # noqa: BLE001  # of the user's own code
        return f"a copy of it raised {type(error).__name__}: {error!s:.100}"


def weights_of(stage: Any, shards: int) -> tuple[float, ...] | None:
    """A shard list's weights; None if it has none.

    Raises:
        UnsupportedSourceError: they are not numbers of 0 or more, one for each shard.
    """
    weights = getattr(stage, "weights", None)
    if weights is None:
        return None
    try:
        numbers = tuple(map(float, weights))
    except (TypeError, ValueError):
        numbers = ()
    sound = len(numbers) == shards and all(math.isfinite(each) and each >= 0 for each in numbers) and sum(numbers) > 0
    if not sound:
        raise UnsupportedSourceError(
            f"{type(stage).__name__}.weights are not {shards} numbers of 0 or more, one for each of its urls, with a "
            f"sum above 0: got {weights!r:.80}; correct them"
        )
    return numbers


def _streams(value: Any, number: int) -> AbstractContextManager[None]:
    """Random streams under which a copy is tried; the caller's generators come back after it."""
    streams = Streams(value)
    streams.begin_pass()
    return streams.under(derive_key(Purpose.TRIAL, number))


class _Given:
    """The urls that a list of shards gives."""

    def __init__(self, shards: Iterator[Any]) -> None:
        self._shards = shards

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        shard = next(self._shards)
        if not isinstance(shard, dict) or shard.keys() != {"url"}:
            raise ValueError(f"not a dict with a url alone: {shard!r:.60}")
        return str(shard["url"])


def _found(given: Iterator[str], urls: list[str], weights: tuple[float, ...] | None, stated: object) -> OwnShards | str:
    """What a list does, from what it gives. `stated`: the number of draws that it says it makes, if it says one."""
    shards, whole = len(urls), Counter(urls)
    most = _MOST if weights is None else min(_MOST, _MOST_WEIGHTED // shards)
    asked = max(shards + 1, _FEWEST)
    if weights is not None:
        asked = min(asked, max(most, _LEAST))
    first = list(itertools.islice(given, asked))
    if not set(first) <= whole.keys():
        return "it gives others than its .urls"
    rows = [first[start : start + shards] for start in range(0, len(first), shards)]
    whole_rows = all(Counter(row) <= whole for row in rows)  # no shard comes twice before all have come
    seen = Counter(first)
    if len(first) == asked:
        seen.update(itertools.islice(given, most))
    count = seen.total()
    if not whole_rows and (why := _uneven(seen, urls, weights)):
        return why
    ends = count < asked + most
    if type(stated) is int and 0 < stated < sys.maxsize and (not ends or count == stated):
        return OwnShards(urls, False, True, Draws(stated, weights))
    if ends and whole_rows:
        if count == shards and weights is None:
            return OwnShards(urls, False, first != urls, None)
        return f"it gives {count} of its {shards} urls, and by what it chooses them cannot be seen"
    if ends:
        return OwnShards(urls, False, True, Draws(count, weights))
    if weights is not None:
        if whole_rows and 1 < shards < asked:
            return "it has weights, but no shard comes again before all have come"
        return OwnShards(urls, True, True, Draws(shards, weights))
    return OwnShards(urls, True, not whole_rows or any(row != urls[: len(row)] for row in rows), None)


def _uneven(seen: Counter[str], urls: list[str], weights: tuple[float, ...] | None) -> str:
    """That a shard came far more or less often than by its weight; empty if none did, as far as so few draws tell."""
    shares: defaultdict[str, float] = defaultdict(float)
    for url, weight in zip(urls, weights or [1.0] * len(urls), strict=True):
        shares[url] += weight
    count, total = seen.total(), sum(shares.values())
    for url, share in shares.items():
        expected = count * share / total
        if (expected >= _TELLING or not share) and abs(seen[url] - expected) > _DEVIATIONS * math.sqrt(expected):
            by = "shards are not drawn alike" if weights is None else "its .weights are not how often shards are drawn"
            return f"{by}: {url} came {seen[url]} times in {count} draws, which should be about {expected:.0f}"
    return ""


def is_own_shuffle(stage: Any) -> bool:
    """Whether a stage hands out what it is given, each item once and in another order, as tried on a copy.

    The order has to vary, or the stage has to say the size of its buffer, ``bufsize``; a stage that sorts does neither.
    """
    copied = copy_apart(stage)
    if copied.value is None:
        return False
    items = [{"url": f"{number:03d}", "__key__": f"{number:03d}"} for number in range(_FEWEST)]
    orders = []
    for number in range(2):
        try:
            with _streams(copied.value, number):
                given = list(itertools.islice(DataPipeline().invoke(copied.value, iter(items)), _FEWEST + 1))
            order = [int(item["url"]) for item in given]
        except Exception:  # noqa: BLE001  # of the user's own code: it wants other items
            return False
        if sorted(order) != list(range(_FEWEST)) or given != [items[each] for each in order]:
            return False
        orders.append(order)
    varies = orders[0] != orders[1] or type(getattr(stage, "bufsize", None)) is int
    return varies and orders[0] != list(range(_FEWEST))
