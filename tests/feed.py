"""A module that keeps what it gives in variables of its own, for test_trials.py."""

from __future__ import annotations

from collections import deque

FEED: deque[int] = deque()
place = 0


def refill() -> None:
    """Begin anew."""
    FEED.clear()
    FEED.extend(range(20))


def pull() -> int | None:
    """The next number; None at the end."""
    return FEED.popleft() if FEED else None
