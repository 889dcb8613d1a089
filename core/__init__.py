"""midepoch makes any data iterable resume in the middle of an epoch: exactly, at once, on another number of processes.

import midepoch

loader = midepoch.wrap(source, seed=0)         # a DataLoader, a dataset, a list, a generator function, ...
loader.load_state_dict(checkpoint["data"])     # after a crash; another world size or num_workers is fine
for batch in loader:
    ...
    checkpoint["data"] = loader.state_dict()   # any time, on any one rank
"""

from __future__ import annotations

from .combine import combine
from .errors import (
    MidepochError,
    MidepochWarning,
    SnapshotError,
    SourceError,
    StateCorruptError,
    StateError,
    StateMismatchError,
    StateVersionError,
    UnsupportedSourceError,
)
from .protocol import Capabilities, StatefulIterable
from .randomness import sample_generator
from .registry import wrap
from .sampler import ResumableSampler
from .snapshot import Snapshot
from .state import gather, reseal
from .world import World

__all__ = [
    "Capabilities",
    "MidepochError",
    "MidepochWarning",
    "ResumableSampler",
    "Snapshot",
    "SnapshotError",
    "SourceError",
    "StateCorruptError",
    "StateError",
    "StateMismatchError",
    "StateVersionError",
    "StatefulIterable",
    "UnsupportedSourceError",
    "World",
    "combine",
    "gather",
    "reseal",
    "sample_generator",
    "wrap",
]
