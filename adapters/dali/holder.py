"""Objects that hold a DALI iterator, such as those that reshape its batches: driven by the iterator inside."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from midepoch.adapters.dali import private
from midepoch.adapters.dali.native import NativeAdapter
from midepoch.adapters.dali.sampled import SampledAdapter
from midepoch.errors import UnsupportedSourceError
from midepoch.loader.adapter import Adapter, Options, Run, Session
from midepoch.loader.capabilities import Capabilities
from midepoch.reading.copies import NotOneForOneError
from midepoch.reading.inside import Inside, held_in
from midepoch.reading.passed_on import PassedOnAdapter
from midepoch.reading.wrappers import Through

__all__ = ["HolderAdapter"]

_INSTEAD = "wrap the DALI iterator itself, and pass what is done with its batches as then="
_IDLE = frozenset({"reset"})  # the adapter decides when an epoch ends


def _inside_of(source: Any) -> Inside | None:
    return None if private.is_iterator(source) else held_in(source, private.is_iterator, _IDLE)


class HolderAdapter(PassedOnAdapter):
    """An object that passes on the batches of one DALI iterator, one for one.

    What it draws for a batch is under the batch's stream. When reading begins, a trial shows whether it is one for one.
    """

    name: ClassVar[str] = "dali-holder"

    def __init__(self, source: Any, options: Options) -> None:
        super().__init__(source, options)
        inside = _inside_of(source)
        assert inside is not None  # recognises has found it
        kind: type[Adapter] = SampledAdapter if SampledAdapter.recognises(inside.loader) else NativeAdapter
        self._through = Through(inside)
        self._use(kind(inside.loader, options))
        self.leads = self._way.leads

    @classmethod
    def recognises(cls, source: object) -> bool:
        """An object that holds one DALI iterator, or several, or a function that reads one."""
        if _inside_of(source) is not None or any(map(private.is_iterator, private.read_by(source))):
            return True
        keeps_a_state = hasattr(source, "state_dict") and hasattr(source, "load_state_dict")
        return not keeps_a_state and any(map(private.is_iterator, private.in_containers(source)))

    @classmethod
    def choose(cls, source: Any, options: Options) -> Adapter | None:
        """Refused where nothing can stand for the iterator."""
        if _inside_of(source) is None:
            name = getattr(source, "__qualname__", type(source).__name__)
            raise UnsupportedSourceError(
                f"{name} reads a DALI iterator, which cannot be read from its start again: {_INSTEAD}"
            )
        if not options.streams:
            raise UnsupportedSourceError(f"randomness='none' with a {type(source).__name__}: {_INSTEAD}")
        return cls(source, options)

    def open(self, run: Run) -> Session:
        """A session of the holder's batches, driven from inside."""
        session = self._way.open(run)
        try:
            return self._through.around(session, run, self._way)
        except NotOneForOneError as error:
            name = self._through.name
            raise UnsupportedSourceError(
                f"{name} does more than pass on the batches of the DALI iterator in it: {error}; {_INSTEAD}"
            ) from None

    def describe(self) -> dict[str, str]:
        """What the iterator inside describes."""
        return self._way.describe()

    def drawing(self) -> tuple[object, ...]:
        """The holder, without the iterator."""
        return self._way.drawing()

    @property
    def promises(self) -> Capabilities:
        """Asked anew each time, since the iterator inside learns while it is read."""
        self.learned()
        return super().promises

    def capabilities(self) -> Capabilities:
        """Those of the iterator inside."""
        told = self._way.capabilities()
        exact = told.exact_augmentations
        if not exact:
            return told
        reason = f"{exact.reason}; what {self._through.name} draws is the batch's: exact on the same split"
        return replace(told, exact_augmentations=replace(exact, reason=reason))
