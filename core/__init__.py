"""midepoch makes any data iterable resume in the middle of an epoch: exactly, at once, on another number of processes.

One line wraps what you have, and two methods save and restore where it stands:

    import midepoch

    loader = midepoch.wrap(source, seed=0)         # a DataLoader, a dataset, a list, a generator function, ...
    loader.load_state_dict(checkpoint["data"])     # after a crash; another world size or num_workers is fine
    for batch in loader:
        ...
        checkpoint["data"] = loader.state_dict()   # any time, on any one rank
"""

from __future__ import annotations

from .checkpoint.snapshot import Snapshot
from .combine.combine import combine
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
from .loader.capabilities import Capabilities, Capability
from .loader.loader import Loader
from .randomness.streams import sample_generator
from .resumable_sampler import ResumableSampler
from .state.format import State, reseal
from .state.parts import gather
from .stateful_iterable import StatefulIterable
from .world import World
from .wrapping import wrap

__version__ = "0.1.0"  # pyproject.toml reads it here

__all__ = [
    "Capabilities",
    "Capability",
    "Loader",
    "MidepochError",
    "MidepochWarning",
    "ResumableSampler",
    "Snapshot",
    "SnapshotError",
    "SourceError",
    "State",
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
