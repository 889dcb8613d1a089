"""Sessions of replayed sources: the batches that follow a place, of one stream or of one in each process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ..errors import SourceError
from ..loader.adapter import Session
from .private import sent_error
from .replay import PrefixDigest, Replayed

__all__ = ["OwnStreamsSession", "SharedStreamSession"]


class _ReplaySession(Session):
    """A session whose bookmark is the digest of what was consumed."""

    def __init__(
        self, answers: Iterator[Replayed], close: Callable[[], None], learn: Callable[[Replayed], None], prefix: str
    ) -> None:
        self._answers, self._close, self._learn, self._prefix = answers, close, learn, prefix
        self._digest = ""

    def _answer(self) -> Replayed:
        answer = next(self._answers)
        if answer.findings or answer.passes is not None:
            self._learn(answer)
        return answer

    def bookmark(self) -> str:
        """The digest of what was consumed."""
        return self._digest

    def detail(self, bookmark: str) -> str:
        """The number of workers, and the digest, which is called the chain."""
        return self._prefix + bookmark

    def close(self) -> None:
        self._answers = iter(())
        self._close()


class SharedStreamSession(_ReplaySession):
    """Every process reads the same stream."""

    _first: str | None = None
    _ended = False
    _late: Exception | None = None

    def take(self) -> Any:
        """The next batch."""
        if self._ended:
            raise StopIteration
        if self._late is not None:
            self._ended = True
            raise self._late
        answer = self._answer()
        if self._first is None:
            self._first = answer.first
        elif answer.first != self._first:
            raise SourceError(
                "worker processes that should read the same stream begin with different items: the source divides its "
                "data by get_worker_info, and so does midepoch (shard=True); pass shard=False"
            )
        self._ended = answer.ended
        if not answer.ended or answer.correction:  # units that other ranks have received
            self._digest, self.position_correction = answer.digest, answer.correction
        if answer.ended:
            raise StopIteration
        if answer.late is not None:  # it ends by an error of its own, after as many batches as its length says
            self._late, self.varies = sent_error(answer.late), True
        return answer.batch


class OwnStreamsSession(_ReplaySession):
    """Each worker process has a stream of its own. Their batches alternate, as in a DataLoader.

    Args:
        answers, close, learn, prefix: of a `_ReplaySession`.
        readers: processes that read.
        consumed: batches before the session's place, which are read and dropped.
        expected: their digest, or empty.
        saves: the digest is saved.
    """

    def __init__(
        self, answers: Iterator[Replayed], close: Callable[[], None], learn: Callable[[Replayed], None], prefix: str,
        readers: int, consumed: int, expected: str, saves: bool,
    ) -> None:  # fmt: skip
        super().__init__(answers, close, learn, prefix)
        self._readers, self._consumed, self._expected, self._saves = readers, consumed, expected, saves
        self._ended_in_a_row = self._batches = 0
        self._whole = PrefixDigest()  # of this process's batches

    def take(self) -> Any:
        """The next batch."""
        while self._ended_in_a_row < self._readers:
            answer = self._answer()
            if answer.ended:
                self._ended_in_a_row += 1
                continue
            self._ended_in_a_row = 0
            self._batches += 1
            if self._batches == self._whole.next:
                self._whole.add(answer.digest)
            seen = self._whole.up_to(answer.digest)
            if not self._consumed:
                self._digest = seen if self._saves else ""
                return answer.batch
            self._consumed -= 1
            if not self._consumed and self._expected not in ("", seen):
                raise SourceError(
                    "the source does not repeat itself: the batches consumed before the save differ now; make it "
                    "depend on midepoch's streams or a seed alone"
                )
        if self._consumed:
            raise SourceError(
                f"the source ended {self._consumed} batches before the state's position: it does not repeat itself; "
                "seed it, or start over with this data"
            )
        raise StopIteration
