"""Objects around a DataLoader, and subclasses with an ``__iter__`` of their own, that pass its batches on one for one.

They are driven by the DataLoader inside (midepoch.reading.wrappers). One that does more than that is read from its
start, as any other iterable: a trial shows it when reading begins.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any, ClassVar

from midepoch.adapters.dataloader.adapter import MapDataLoaderAdapter
from midepoch.errors import SourceError
from midepoch.loader.adapter import Adapter, Options, OtherWayError, Run, Session
from midepoch.loader.capabilities import Capabilities
from midepoch.reading.copies import NotOneForOneError
from midepoch.reading.inside import inside_of
from midepoch.reading.iterables import IterableAdapter
from midepoch.reading.passed_on import PassedOnAdapter
from midepoch.reading.wrappers import Through
from midepoch.trying import Finding
from midepoch.world import World

__all__ = ["WrapperAdapter"]

_REPLAYED = "workers="  # how the details of a replay begin


class _Replayed(IterableAdapter):
    """A wrapper that a trial has shown to need more than the DataLoader inside."""

    name: ClassVar[str] = "wrapper"

    @classmethod
    def recognises(cls, source: object) -> bool:
        """Made by `WrapperAdapter`."""
        return False


class WrapperAdapter(PassedOnAdapter):
    """A wrapper: the adapter of the DataLoader inside, or, once a trial has failed, that of any iterable."""

    name: ClassVar[str] = "wrapper"

    def __init__(self, source: Any, options: Options) -> None:
        super().__init__(source, options)
        inside = inside_of(source)
        assert inside is not None  # recognises has found it
        self._inside = MapDataLoaderAdapter(inside.loader, options)
        self._through = Through(inside)
        self._why_replayed = "it was when the state was saved"
        self._use(self._inside)

    @classmethod
    def recognises(cls, source: object) -> bool:
        """An object that is, or holds in one attribute, the only DataLoader over a map-style dataset."""
        return inside_of(source) is not None

    @classmethod
    def choose(cls, source: Any, options: Options) -> Adapter | None:
        """None where the source divides itself among ranks, or draws from the caller's generators."""
        return None if options.shard is False or not options.streams else cls(source, options)

    # --- which way ---

    @functools.cached_property
    def _replay(self) -> _Replayed:
        why = f"{self._why_replayed}; wrap the DataLoader inside it, with then=, to jump"
        return _Replayed(self.source, self.options, stream=self.source, why=why)

    def _way_of(self, detail: str) -> Adapter:
        """The way of reading that a detail is of."""
        return self._replay if detail.startswith(_REPLAYED) else self._way

    def open(self, run: Run) -> Session:
        """A session of the wrapper's batches, driven from inside, or a replay."""
        if run.detail.startswith(_REPLAYED) and not self._replays:
            self._use(self._replay)  # the run that saved the state has found that out
        if self._replays:
            return self._replay.open(run)
        session = self._inside.open(run)
        try:
            through = self._through.around(session, run, self._inside)
        except NotOneForOneError as error:
            self._fail(str(error), run)
            raise OtherWayError from None
        self.learned()
        if self._through.statistics:
            self.note(Finding(untried=self._of_statistics()))
        if self._through.shares:
            why = f"{self._through.name} is read through copies, and {self._through.shares}"
            self.note(Finding(untried=why))
        return through

    def _of_statistics(self) -> str:
        names, lead = ", ".join(self._through.statistics[:4]), self._through.lead
        ahead = f", and has seen {lead} batches more than were handed out" if lead else ""
        return (
            f"{self._through.name} changes {names} of its modules with each batch, which a state does not hold"
            f"{ahead}: save them with the model"
        )

    def _fail(self, why: str, run: Run) -> None:
        if run.position or run.expects is not None:
            raise SourceError(
                f"{self._through.name} passed on the batches of the DataLoader inside one for one when the state was "
                f"saved, and does not now: {why}; restore the wrapper that it was saved with. If this is that wrapper, "
                "what it makes of a batch depends on other batches: start over, with a generator function that reads "
                "it, or with the DataLoader inside and then="
            )
        self._why_replayed = why
        self._use(self._replay)
        self.learned()

    # --- the answers of the way in use ---

    def stated_length(self) -> int | None:
        """What a wrapper that is replayed says itself."""
        return self._replay.stated_length() if self._replays else None

    @property
    def length_is_known(self) -> bool:
        """Not before it has been tried whether this wrapper passes on each batch, unless it has a length itself."""
        return self._replays or self._through.lead is not None or hasattr(type(self.source), "__len__")

    def describe(self) -> dict[str, str]:
        """What the DataLoader inside describes, however it is read: it is known before that is tried."""
        return self._inside.describe()

    def drawing(self) -> tuple[object, ...]:
        """The dataset, the collate function, and the wrapper."""
        return self.source, *self._inside.drawing()

    def capabilities(self) -> Capabilities:
        """Those of the DataLoader inside, or of a replay."""
        if self._replays:
            return self._replay.capabilities()
        told, lead = self._inside.capabilities(), self._through.lead
        seen = "tried when reading begins" if lead is None else f"the wrapper passes batches on, {lead} ahead"
        exact = told.exact_augmentations
        if exact:
            exact = replace(exact, reason=f"{exact.reason}; numbers drawn in {self._through.name} are the batch's")
        jumps = replace(told.constant_time_resume, reason=f"{told.constant_time_resume.reason}; {seen}")
        return replace(told, constant_time_resume=jumps, exact_augmentations=exact)

    @property
    def _replays(self) -> bool:
        return self._way is not self._inside

    @property
    def promises(self) -> Capabilities:
        """Of a replay, what that has learned."""
        return self._replay.promises if self._replays else super().promises

    def note(self, finding: Finding) -> None:
        """Kept by the way in use."""
        if self._replays:
            self._replay.note(finding)
        else:
            super().note(finding)

    def beginning(self, epoch: int, world: World) -> str:
        """That the source is replayed."""
        return f"{_REPLAYED}0;chain=" if self._replays else ""
