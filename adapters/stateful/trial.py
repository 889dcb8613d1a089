"""Whether a source's own state leads to the batch that comes next: tried on a copy of the source.

The copy is made before the source is first read, so it stands for the source that another process would make. What
it reads is compared with what the source itself hands out next. Nothing of the source's own is asked twice or lost.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from midepoch.loader.adapter import Run, Session
from midepoch.order.keys import derive_key
from midepoch.randomness.owned import find_generators
from midepoch.randomness.streams import Purpose, Streams
from midepoch.reading.trials import Outcome
from midepoch.state.codec import encode

__all__ = ["Loaded", "Report", "differing", "read_from"]


def read_from(open_copy: Callable[[Run], Session], pristine: Any, copy: Any, run: Run) -> Outcome:
    """The first batch of a session over a copy of `pristine`, itself a copy. The caller's generators stay as they are.

    The global generators, and those that no copy has its own of, stand where another process may have them. The source
    is not searched for them: Python 3.11 reads an object's attributes more slowly once somebody asked for all of them.
    """
    key = derive_key(Purpose.TRIAL, run.seed, run.epoch, run.position)
    try:
        with warnings.catch_warnings(), Streams().under(key), _shared_under(key, pristine, copy):
            warnings.simplefilter("ignore")
            session = open_copy(run)
            try:
                return Outcome(session.take())
            finally:
                session.close()
    except Exception as error:  # noqa: BLE001  # of the source's code
        return Outcome(error=error.with_traceback(None))  # which would keep the copy alive


@contextlib.contextmanager
def _shared_under(key: int, pristine: Any, copy: Any) -> Iterator[None]:
    own = {id(each.generator) for each in find_generators(pristine)[0]}
    shared = [each for each in find_generators(copy)[0] if id(each.generator) in own]
    saved = [each.save() for each in shared]
    for each in shared:
        each.start(derive_key(key, each.salt))
    try:
        yield
    finally:
        for each, state in zip(shared, saved, strict=True):
            each.restore(state)


# --- what a source reports after a load -------------------------------------------------------------------------------


class Loaded(NamedTuple):
    """A state that was loaded.

    Attributes:
        state: a copy of it.
        before: what the source reported before; None if it could not say.
        report: how it reported another one right after the load; None if it did not.
    """

    state: Any
    before: Any
    report: Report | None


class Report(NamedTuple):
    """How a source reports another state than it was given.

    Attributes:
        differs: from where in the state to what was loaded there, and what is reported.
        as_before: it reports what it reported before the load.
    """

    differs: dict[tuple[Any, ...], tuple[Any, Any]]
    as_before: bool

    @classmethod
    def of(cls, loaded: Any, before: Any, reported: Any) -> Report | None:
        """How `reported` differs from what was loaded; None if it does not. `before`: what was reported before."""
        differs = differing(loaded, reported)
        # One that applies its state when it is read still reports the one before.
        return cls(differs, not differing(before, reported)) if differs else None

    def merged(self, other: Report) -> Report:
        """What was reported here and there."""
        return Report({**self.differs, **other.differs}, self.as_before or other.as_before)

    def is_excused_by(self, other: Report) -> bool:
        """Whether a copy that reported as `other`, and then read on rightly, did the same."""
        return (self.as_before and other.as_before) or self.differs.keys() <= other.differs.keys()

    @property
    def words(self) -> str:
        """The first difference."""
        path, (loaded, reported) = next(iter(self.differs.items()))
        where = ".".join(map(str, path)) or "it"
        return f"{where} is {reported!r:.60}, and {loaded!r:.60} was loaded"


def differing(loaded: Any, reported: Any, path: tuple[Any, ...] = ()) -> dict[tuple[Any, ...], tuple[Any, Any]]:
    """Where two states differ, and how. What a dict or a list has on one side only is None on the other one."""
    pairs: list[tuple[Any, Any, Any]]
    if isinstance(loaded, dict) and isinstance(reported, dict):
        keys = dict.fromkeys((*loaded, *reported))
        pairs = [(key, loaded.get(key), reported.get(key)) for key in keys]
    elif isinstance(loaded, list | tuple) and isinstance(reported, list | tuple) and len(loaded) == len(reported):
        pairs = [(place, *each) for place, each in enumerate(zip(loaded, reported, strict=True))]
    else:
        return {} if _are_equal(loaded, reported) else {path: (loaded, reported)}
    found: dict[tuple[Any, ...], tuple[Any, Any]] = {}
    for key, one, other in pairs:
        found |= differing(one, other, (*path, key))
    return found


def _are_equal(one: Any, other: Any) -> bool:
    """By value: a number, or a list of them, is often loaded into an array and reported from there."""
    if encode(one) == encode(other):
        return True
    one, other = (each.tolist() if hasattr(each, "tolist") else each for each in (one, other))
    return bool(one == other)
