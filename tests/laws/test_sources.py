"""The laws, on every source of the core: 1, 2 and 3 ranks in real processes, 0 and 2 workers."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from midepoch.testing import ResumableTests
from support import law_sources as sources

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


class TestMapShuffled(_Sampled):
    make_loader = staticmethod(sources.map_shuffled)
    shuffled = True


class TestMapSequentialDrop(_Indexed):
    make_loader = staticmethod(sources.map_sequential_drop)
    tail = "drop"
    drop_last = True


class TestMapUneven(_Indexed):
    make_loader = staticmethod(sources.map_uneven)
    tail = "uneven"


class TestMapListed(_Indexed):
    make_loader = staticmethod(sources.map_listed)
    shuffled = True


class TestMapLeftAlone(_Indexed):
    make_loader = staticmethod(sources.map_left_alone)
    shuffled = True


class TestMapBatchSampler(_Indexed):
    make_loader = staticmethod(sources.map_batch_sampler)


class TestExposingGeneratorInLoader(_Sampled):
    make_loader = staticmethod(sources.exposing_generator_in_loader)


class TestInheriting(_Sampled):
    make_loader = staticmethod(sources.inheriting)
    world_sizes = (1,)  # an object of the class takes its world from the process


class TestMapWrapped(_Indexed):
    make_loader = staticmethod(sources.map_wrapped)
    shuffled = True
    elastic_content = False  # numbers drawn in the wrapper are the batch's


class TestBatchesList(_Sampled):
    make_loader = staticmethod(sources.batches_list)
    draws = None


class TestGeneratorFunction(_Sampled):
    make_loader = staticmethod(sources.generator_function)


class TestDividedStreamInLoader(_Sampled):
    """Every rank and worker reads it whole and keeps its part."""

    make_loader = staticmethod(sources.divided_stream_in_loader)
    world_sizes = (1, 2)


class TestDividingStreamInLoader(_Sampled):
    make_loader = staticmethod(sources.dividing_stream_in_loader)
    tail = "uneven"  # as the dataset divides itself
    elastic_content = False  # its streams are those of its worker


class TestCarried(_Sampled):
    make_loader = staticmethod(sources.carried)
    tail = "drop"  # as the source does
    draws = None
