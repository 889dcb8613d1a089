"""What the training loop has changed in what the readers hold: a state says it, and a resume compares it.

A loop may end an augmentation or set a probability, in `loader.source.dataset` or in the transforms that it holds. No
order and no seed tells that. So the state names what was changed since the run's first pass, as the readers had it,
and a run that continues within an epoch is warned of what it has not restored; one that begins another epoch, of what
it has not set at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils.data import IterableDataset

from ..errors import warn
from ..state.changed import changed_text, parse_changed
from ..summary import CUT_OFF, HERE, Watch
from ..trying import Finding
from .adapter import Adapter

__all__ = ["LoopChanges"]

_LONGEST_VALUE = 24
_OF_CALLERS = ".__self__."  # a method's object may be a trainer, whose counters follow the step

_Look = dict[str, str]
"""By path, the value of each attribute as a short text."""


class LoopChanges:
    """The attributes that the loop has changed since the run's first pass.

    What reading changes is not the loop's: what moved while an epoch's first batch was read is left out. Nor is what
    means something in one process alone, as paths and addresses do, or what only appears, as a cache does.

    `watches`: False with ``verify="off"``: nothing is looked at, and nothing said.
    """

    def __init__(self, adapter: Adapter, watches: bool) -> None:
        self._adapter, self._watches = adapter, watches
        self._known: _Look = {}  # as the readers had it
        self._expected: _Look = {}  # of a loaded state, until a pass begins
        self._watch = Watch({})  # over the objects whose code reads in this pass
        self._summary: dict[str, int] = {}  # at the latest look, and that look
        self._latest: _Look = {}
        self._held: _Look | None = None  # by the readers of this epoch, of all attributes; None before the first pass
        self._by_reading: set[str] = set()
        self._told: set[str] = set()  # what was said to move from pass to pass, or after workers had started
        self._was_loaded = False  # since the last pass
        # When the next pass began, an attribute had another value than a loaded state names, or than at the load.
        self.since_saved = False

    def expect(self, text: str) -> None:
        """Compare with the `text` of a loaded state when the next pass begins, and with what is held now."""
        self._known = parse_changed(text) if self._watches else {}
        self._expected = dict(self._known)
        self._watch = Watch(self._named())
        self._held, self._was_loaded = self._look(), True
        self.rest()

    def opened(self, inside: bool) -> None:
        """A session was opened. `inside`: within an epoch, so what its readers had is known."""
        self._watch = Watch(self._named())
        look = self._look()
        self.since_saved = any(_of(look, path) != value for path, value in self._expected.items())
        # At a boundary the loop may have set them for the next epoch. What it has not set since the load, it has not.
        # Content tells nothing there: data may have been renewed before the load.
        held = look if inside or self._held is None else self._held
        differing = [
            f"{path} was {value} for the readers, is {now} now"
            for path, value in self._expected.items()
            if (now := _of(look, path)) == _of(held, path) and now != value and (inside or not value.startswith("#"))
        ]
        if differing:
            them = "it" if len(differing) == 1 else "them"
            warn(f"{'; '.join(differing)}: restore {them} before the first batch")
        if self._was_loaded:  # what the loop has set since the load, it has set for this pass
            self.since_saved, self._was_loaded = self.since_saved or bool(_differing(self._held or {}, look)), False
        self._expected = {}
        if self._held is not None:
            moved = _differing(self._held, look)
            self._note(moved, look)
            self._believe(moved & self._by_reading)
        self._refresh(look)
        self._held = look

    def first_batch(self) -> None:
        """The session's first batch was read."""
        if self._held:
            look = self._look()
            self._by_reading |= _differing(self._held, look) | (self._held.keys() ^ look.keys())
            self._known = {path: value for path, value in self._known.items() if path not in self._by_reading}

    def rest(self) -> None:
        """No pass is read: what the loop replaces now is held by nobody, so that it can be renewed in its place."""
        self._watch.rest()

    def text(self, inside: bool) -> str:
        """For a state: `changed_text`.

        Args:
            inside: the state is of a place within an epoch. A process that reads by itself has the values of now.
        """
        # At each state, though it takes longer than the rest of it: a state that says less than an earlier one, or than
        # that of a rank which was asked less often, would leave a change unsaid.
        if self._held and (look := self._look()) is not self._held:
            alone, moved = not getattr(self._adapter.source, "num_workers", 0), _differing(self._held, look)
            read = look if alone and inside else self._held
            self._refresh(read)
            self._note(moved, read)
            if inside and not alone and (late := moved - self._by_reading - self._told):
                # Workers read what they were started with, and those of a resume what the loop restores.
                self._told |= late
                warn(
                    f"{', '.join(sorted(late)[:3])} changed after this epoch's workers started, so samples that depend "
                    "on it may differ after a resume: change it between epochs, or share it with the workers "
                    "(torch.Tensor.share_memory_)"
                )
        if not inside:
            self.rest()
        return changed_text(self._known)

    def _refresh(self, look: _Look) -> None:
        """What the readers have now of what was changed: it may have been set back."""
        if not self._expected:  # else a load has just named it
            self._known = {path: _of(look, path) for path in self._known}

    def _note(self, moved: set[str], look: _Look) -> None:
        for path in sorted(moved - self._by_reading):
            self._known[path] = _of(look, path)

    def _believe(self, moved: set[str]) -> None:
        """An iterable, or a collate function, that remembers what it has read may give other batches in each pass."""
        source = self._adapter.source
        dataset = getattr(source, "dataset", None)
        if hasattr(source, "state_dict") or hasattr(dataset, "state_dict"):
            return  # what it remembers is in its state
        indexed = not isinstance(dataset, IterableDataset)
        kept = sorted(path for path in moved - self._told if not (indexed and path.startswith("dataset")))
        if kept:
            self._told.update(kept)
            why = f"{', '.join(kept[:3])} moves from pass to pass as it is read"
            self._adapter.note(Finding(untried=why, order=not all(path.startswith("collate_fn") for path in kept)))

    def _named(self) -> dict[str, Any]:
        """The objects whose code reads, by the names that messages give them."""
        source, roots = self._adapter.source, dict[str, Any]()
        for each in self._adapter.drawing() if self._watches else ():
            names = (name for name in ("dataset", "collate_fn") if getattr(source, name, None) is each)
            roots.setdefault(next(names, type(each).__name__), each)
        return roots

    def _look(self) -> _Look:
        summary = self._watch.summary()
        if summary is not self._summary:
            self._summary, values, before = summary, self._watch.values, self._latest
            self._latest = {
                path: _short(values.get(path), crc)
                for path, crc in summary.items()
                if not path.endswith(HERE) and path != CUT_OFF and _OF_CALLERS not in path
            }
            # What is not met this time need not be gone: it may lie beyond the bounds, or in what has grown large.
            unmet = [path for path in before.keys() - self._latest.keys() if _may_be_there(path, summary)]
            self._latest |= {path: before[path] for path in unmet}
        return self._latest


def _differing(before: _Look, after: _Look) -> set[str]:
    """What has another value, or is gone. What only appears is left out: it may be a cache."""
    return {path for path, value in before.items() if after.get(path) != value}


def _may_be_there(path: str, summary: Mapping[str, int]) -> bool:
    holders = (path[:at] for at, sign in enumerate(path) if sign == "[")
    return CUT_OFF in summary or any(each + HERE in summary or f"{each}[*]" in summary for each in holders)


def _of(look: Mapping[str, str], path: str) -> str:
    return look.get(path, "not set")


def _short(value: Any, crc: int) -> str:
    """A number or a short text as it is written, and of all else the CRC."""
    text = "" if value is None else repr(value)
    return text if 0 < len(text) <= _LONGEST_VALUE else f"#{crc:08x}"
