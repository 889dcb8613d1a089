"""The laws, on every source of the core: 1, 2 and 3 ranks in real processes, 0 and 2 workers."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from midepoch.testing import ResumableTests
from support import law_sources as sources
from support.laws import laws

pytestmark = pytest.mark.filterwarnings("ignore::midepoch.MidepochWarning")

# Each mechanism once: samples by index, in our orders and in a list of somebody's; each tail; whole batches as units; a
# DataLoader in wrappers; samplers that are driven, in a loader with workers and, by inheritance, without one; lists;
# replay; streams that divide themselves; a source's own state. Orders are tried one by one in test_order and
# test_dataloader.


class _Sampled(ResumableTests):
    identify = staticmethod(sources.identify)
    draws: ClassVar[Any] = staticmethod(sources.draws)
    quick = True
    state_bytes = 512


class _Indexed(_Sampled):
    num_workers = (0, 1)  # which worker reads what is the same arithmetic as with two, which the first has


TestMapShuffled = laws(_Sampled, sources.map_shuffled, shuffled=True)
TestMapSequentialDrop = laws(_Indexed, sources.map_sequential_drop, tail="drop", drop_last=True)
TestMapUneven = laws(_Indexed, sources.map_uneven, tail="uneven")
TestMapListed = laws(_Indexed, sources.map_listed, shuffled=True)
TestMapLeftAlone = laws(_Indexed, sources.map_left_alone, shuffled=True)
TestMapBatchSampler = laws(_Indexed, sources.map_batch_sampler)
TestExposingGeneratorInLoader = laws(_Sampled, sources.exposing_generator_in_loader)
# An object of the class takes its world from the process.
TestInheriting = laws(_Sampled, sources.inheriting, world_sizes=(1,))
# Numbers drawn in the wrapper are the batch's.
TestMapWrapped = laws(_Indexed, sources.map_wrapped, shuffled=True, elastic_content=False)
TestBatchesList = laws(_Sampled, sources.batches_list, draws=None)
TestGeneratorFunction = laws(_Sampled, sources.generator_function)
# Every rank and worker reads it whole and keeps its part.
TestDividedStreamInLoader = laws(_Sampled, sources.divided_stream_in_loader, world_sizes=(1, 2))
# The dataset divides itself, and its streams are those of its worker.
TestDividingStreamInLoader = laws(_Sampled, sources.dividing_stream_in_loader, tail="uneven", elastic_content=False)
TestCarried = laws(_Sampled, sources.carried, tail="drop", draws=None)  # it leaves out what does not divide
