"""The answers of `Capabilities` that several adapters give."""

from __future__ import annotations

from .adapter import Options
from .capabilities import Capability

__all__ = ["CONSTANT_TIME", "NO_WORKERS", "ONE_STATE", "OUR_ORDER", "POSITIONS", "SKIPS", "augmentations",
           "replay_costs"]  # fmt: skip

OUR_ORDER = Capability(True, "the order is a function of seed and epoch")
CONSTANT_TIME = Capability(True, "a resume jumps to the position")
POSITIONS = Capability(True, "each rank's samples follow from the position by arithmetic")
ONE_STATE = Capability(True, "the state is (epoch, position), the same on every rank")
SKIPS = Capability(True, "the positions that are left are numbered without those that are left out")
NO_WORKERS = Capability(True, "there are no worker processes")


def augmentations(options: Options, same_split: str = "") -> Capability:
    """Whether random augmentations continue exactly. `same_split`: what holds on the same split only."""
    if not options.streams:
        return Capability(
            False, "randomness='none': samples draw from the caller's generators, which are not restored here"
        )
    reason = "the global generators, and those that the source holds, are keyed by (seed, epoch, position)"
    return Capability(True, f"{reason}; {same_split}" if same_split else reason)


def replay_costs(why: str) -> Capability:
    """The answer of a source that has to be read again from its start."""
    return Capability(False, f"what was consumed has to be read again: {why}")
