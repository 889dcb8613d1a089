"""ignite: its DeterministicEngine skips batches by itself when it resumes, which a wrapped loader refuses.

Its plain Engine needs nothing: the loader is one of the objects of a Checkpoint.
"""

from __future__ import annotations

from types import FrameType

from midepoch.errors import UnsupportedSourceError
from midepoch.loader.loader import Loader

__all__ = ["refuse_to_be_skipped"]


def refuse_to_be_skipped(loader: Loader, frame: FrameType) -> None:
    """Raise UnsupportedSourceError if the engine that asks for an iterator is about to skip batches of it."""
    # The engine's own number: it counts in batches of an epoch, whose length the loader need not know.
    skipped = frame.f_locals.get("iteration", 0)
    if skipped:
        raise UnsupportedSourceError(
            f"ignite's DeterministicEngine is about to skip {skipped} batches, but a wrapped loader is past them "
            "already, so the run would train on other batches: use ignite.engine.Engine, with the loader among the "
            "objects of its Checkpoint. The loader alone decides the order and the augmentations, so nothing is lost"
        )
