"""The loop over epochs of a run: which body is running, and what the next one continues."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..errors import MidepochError, warn
from ..loader.body import RUNNING, Body, Record
from ..loader.lending import loader_of
from ..loader.loader import Loader

__all__ = ["EpochLoop"]


class EpochLoop:
    """The bodies of a `Snapshot.epochs` loop, of the loaders among its parts. Nothing here communicates or saves."""

    def __init__(self, parts: Mapping[str, Any]) -> None:
        self._parts = parts
        self.epoch: int | None = None  # whose body is running, or will be next; None before the first one
        self.body: Body | None = None  # that is running; None between two of them and outside of the loop
        # Of the loaded snapshot, or of a body that was left, until a body continues it. `was_left`: of one that this
        # process has left, whose passes may have been left on purpose.
        self.resumed: Record | None = None
        self.was_left = False
        self._awaited: dict[str, bool] = {}  # of all bodies
        self._ended: Body | None = None  # the body before this one, in the same loop
        self._between = Record()  # of the loaders that are where an earlier body has left them, and read ahead
        self.read_at_save: tuple[str, int] | None = None  # the loader whose pass `save` took for one that is read

    def loaders(self) -> dict[str, Loader]:
        """The loaders by name. A `StatefulIterable` may have been given its loader only now."""
        found = {name: loader_of(part) for name, part in self._parts.items()}
        return {name: loader for name, loader in found.items() if loader is not None}

    def record(self, ends: bool = False) -> Record:
        """Of a snapshot that is saved now. `ends`: after an epoch's last batch."""
        if self.body is not None:
            return replace(self.body.record(), epoch=self.epoch)
        record = self.resumed or replace(self._between, epoch=self.epoch)
        return replace(record, ends=ends and self.epoch is None)

    def load(self, record: Record) -> None:
        """Take over the record of a snapshot, whose loaders were loaded."""
        at_end = any(loader._progress.is_at_end for loader in self.loaders().values())
        self.resumed = replace(record, ends=record.ends or at_end)
        self.epoch, self.was_left, self._between = None, False, Record()

    def start(self, is_trained: bool) -> int:
        """Start a loop. Returns its first epoch.

        Args:
            is_trained: the run was trained on what was read since the last loop; otherwise that counts for nothing.
        """
        looks = [] if is_trained else [loader._progress.take_back_look() for loader in self.loaders().values()]
        epoch = self.epoch if self.resumed is None or self.epoch is not None else self.resumed.epoch
        if epoch is None and looks and looks[0] is not None:
            return looks[0].epoch
        return next((loader.epoch for loader in self.loaders().values()), 0) if epoch is None else epoch

    def begin(self, epoch: int, first: bool) -> None:
        """A body begins. `first`: of the loop; it continues what was loaded, or left.

        Raises:
            MidepochError: a loader is in the body of another loop.
        """
        progress = {name: loader._progress for name, loader in self.loaders().items()}
        if any(each.body is not None for each in progress.values()):
            raise MidepochError(RUNNING)
        record = self._between if not first else self.resumed or Record()
        continues = first and (self.resumed is not None or self.epoch is None)  # not after a loop that came to its end
        body = Body(progress, record, self._ended, left=self.was_left, awaited=self._awaited)
        for name, each in progress.items():
            each.enter_body(body, name not in record.left if continues else None)
        self.epoch, self.body, self.resumed, self.was_left = epoch, body, None, False

    def finish(self, body: Body) -> None:
        """The code of the running body has ended. Warn of iterators that it keeps."""
        for name in sorted(set(body.read_on)):
            # If a signal ends the first body, no one knows that it would continue: a zip with one looks alike.
            warn(
                f"an iterator over {name} that was first read in the body of an epoch goes on after it. If a signal "
                "ends the run at the last batch of that body, the run that resumes begins a new epoch "
                f"of {name} instead: make the iterator before the loop over epochs, by iter({name}) and not in "
                f"a generator, and by iter({name}) again where it ends. If it is to end with the body, do not "
                "keep it in a variable",
            )
        if body.lead is not None and self.read_at_save == (body.lead.name, body.lead.took):
            warn(
                f"save() saved in the middle of a pass over {body.lead.name}. The body then read nothing more of that "
                "pass, but something still holds it (a variable, a progress bar). If your loop had left the pass "
                "before save(), a run that resumes there reads the rest of it: let only the loop hold the pass, and "
                "save() waits for the end of the body",
            )
        self.read_at_save = None
        body.leave()

    def end(self, body: Body) -> bool:
        """End the running body. Returns whether an iterator first read in it is kept, in the middle of an epoch."""
        loaders = self.loaders()
        continues = [loader._progress.leave_body() for loader in loaders.values()]
        progress = {name: loader._progress for name, loader in loaders.items()}
        left = [name for name, each in progress.items() if each.new_epoch and each.has_begun and each.latest() is None]
        self._between = Record(left=left, ahead=body.kept.ahead)
        self._ended, self.body = body, None
        assert self.epoch is not None  # that of the body
        self.epoch += 1
        return any(continues)

    def leave(self) -> None:
        """The loop was left, perhaps within a body, or has come to its end. Another one continues here."""
        if self.body is not None:
            self.resumed, self.was_left = replace(self.body.record(interrupted=True), epoch=self.epoch), True
        self.body = self._ended = self.read_at_save = None
        for loader in self.loaders().values():
            loader._progress.body = None
