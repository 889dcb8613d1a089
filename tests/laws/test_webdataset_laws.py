"""The laws on webdataset pipelines: indexed and streamed, with workers, 1 to 3 ranks in real processes.

Each mechanism once; idioms and pipes are continued from at every place in test_webdataset.
"""

from __future__ import annotations

import os
from typing import Any, ClassVar

import pytest

pytest.importorskip("webdataset", reason="webdataset is not installed")


from midepoch.testing import ResumableTests
from support import webdataset_sources as sources
from support.laws import laws

CHAOS = bool(os.environ.get("MIDEPOCH_CHAOS"))

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class _Pipeline(ResumableTests):
    identify: ClassVar[Any] = staticmethod(sources.identify)
    draws: ClassVar[Any] = staticmethod(sources.draws)
    # Which samples and which streams a rank or a worker reads is the same arithmetic for any number of them.
    world_sizes: ClassVar[tuple[int, ...]] = (1, 2, 3) if CHAOS else (1, 2)
    num_workers: ClassVar[Any] = (0, 1, 2, 3) if CHAOS else (0, 2)
    quick = True
    state_bytes = 512


TestIndexed = laws(_Pipeline, sources.indexed, shuffled=True)
TestIndexedSequential = laws(
    _Pipeline, sources.indexed_sequential, shuffled=False, tail="drop", drop_last=True, num_workers=(0, 1)
)
TestIndexedRebatched = laws(_Pipeline, sources.indexed_rebatched, num_workers=(0, 2))
TestStreamed = laws(
    _Pipeline, sources.streamed, shuffled=True, tail="uneven", num_workers=(0, 1, 2, 3) if CHAOS else (0, 3),
    state_bytes=16384,
)  # fmt: skip
