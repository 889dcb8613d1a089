"""DALI through other fronts: jax's iterator, objects around an iterator, dynamic mode, and what is said to them."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("nvidia.dali", reason="NVIDIA DALI is not installed (pip install midepoch[dali])")
pytest.importorskip("PIL", reason="pillow, which writes the images, is not installed (pip install midepoch[demo])")

import nvidia.dali.experimental.dynamic as ndd
from nvidia.dali import fn, pipeline_def, types
from nvidia.dali.plugin.pytorch import DALIGenericIterator

import midepoch
from midepoch import World
from midepoch.adapters import dali
from midepoch.errors import SourceError, StateMismatchError
from midepoch.errors import UnsupportedSourceError as Unsupported
from midepoch.testing import check_resumable
from support import dali_sources as sources
from support.sources import every_place, flat, heads

SIZE, BATCH = 16, 4


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(sources.write_images(tmp_path_factory.mktemp("dali"), SIZE)) + "/npy"


def every_cut(make: Callable[[], midepoch.Loader], epochs: int = 3) -> list[str]:
    return flat(every_place(make, epochs=epochs))


@pipeline_def(batch_size=BATCH, num_threads=1, device_id=None, seed=3)
def native(root: str, plus: int = 1, shifted: bool = False, shards: int = 1) -> Any:
    options = {"random_shuffle": True, "initial_fill": 5, "num_shards": shards, "shard_id": 0}
    number = fn.readers.numpy(file_root=root, name="Reader", **options)
    number = fn.cast(number, dtype=types.FLOAT if plus == 1 else types.FLOAT64)
    return (number + 1.0 if shifted else number), fn.random.uniform(shape=[2])


@pipeline_def(batch_size=BATCH, num_threads=1, device_id=None)
def fed(root: str) -> Any:
    number = dali.readers.numpy(file_root=root, random_shuffle=True)
    return fn.cast(number, dtype=types.FLOAT), dali.random.uniform(shape=[2])


def iterator(root: str, ours: bool = False, kind: Any = DALIGenericIterator, **options: Any) -> Any:
    made = fed(root) if ours else native(root, **options)
    return kind([made], ["number", "drawn"], **({} if ours else {"reader_name": "Reader"}))


# --- objects around an iterator ---------------------------------------------------------------------------------------


class Reshapes:
    """As DALIWrapper of NVIDIA's examples: a generator over the iterator, which it resets; and it draws."""

    def __init__(self, inside: Any) -> None:
        self.inside = inside

    def batches(self) -> Iterator[Any]:
        for batch in self.inside:
            noise = random.random() + float(np.random.rand()) + float(torch.rand(()))
            yield batch[0]["number"].reshape(-1), batch[0]["drawn"] + noise
        self.inside.reset()

    def __iter__(self) -> Iterator[Any]:
        return self.batches()


class ReadsAhead(Reshapes):
    """As prefetchers to a device: it has always read one batch more than it has given."""

    def batches(self) -> Iterator[Any]:
        batches = iter(self.inside)
        following = next(batches, None)
        while following is not None:
            batch, following = following, next(batches, None)
            yield batch[0]["number"] + 0

    def __len__(self) -> int:
        return len(self.inside)


@pytest.mark.parametrize("ours", [False, True])
@pytest.mark.parametrize("kind", [Reshapes, ReadsAhead])
def test_objects_that_hold_an_iterator_go_on_exactly(kind: Any, ours: bool, root: str) -> None:
    given = every_cut(lambda: midepoch.wrap(kind(iterator(root, ours)), seed=5, inside="inside"), 2)
    assert len(given) == len(set(given)) == 8
    with midepoch.wrap(kind(iterator(root, ours)), seed=5, inside="inside") as loader:
        batches = iter(loader)
        next(batches)
        state = loader.state_dict()
        next(batches), next(batches)
        assert loader.state_dict(in_flight=2) == state
        assert loader.capabilities.elastic_world.holds is ours
        assert f"numbers drawn in {kind.__name__} are the batch's" in loader.capabilities.exact_augmentations.reason


def test_what_is_not_declared_is_refused_with_the_line(root: str) -> None:
    made = iterator(root)
    with pytest.raises(Unsupported, match=r'Reshapes reads a DALI iterator.*Write .*inside="inside".*then='):
        midepoch.wrap(Reshapes(made))
    with pytest.raises(Unsupported, match=r"reads a DALI iterator.*Wrap the DALI iterator itself.*then="):
        midepoch.wrap(lambda: iter(made))
    with pytest.raises(Unsupported, match=r"has no loader there: write inside='inside'"):
        midepoch.wrap(Reshapes(made), inside="iterator")


class TwoOfThem(Reshapes):
    def batches(self) -> Iterator[Any]:
        for batch in self.inside:
            yield [batch, next(self.inside)]


def test_what_is_declared_is_watched(root: str) -> None:
    told = "TwoOfThem has handed out 2 batches, and asked for 4 inside"
    with midepoch.wrap(TwoOfThem(iterator(root)), inside="inside") as two, pytest.raises(SourceError, match=told):
        list(two)


class Two(DALIGenericIterator):  # type: ignore[misc]
    def __next__(self) -> Any:
        return [super().__next__(), super().__next__()]


class Yields(DALIGenericIterator):  # type: ignore[misc]
    def __iter__(self) -> Iterator[Any]:
        return (batch[0]["number"] for batch in super().__iter__())


@pytest.mark.parametrize("ours", [False, True])
@pytest.mark.parametrize(("kind", "method"), [(Two, "__next__"), (Yields, "__iter__")])
def test_a_subclass_that_reads_in_its_own_way_is_refused(kind: Any, method: str, ours: bool, root: str) -> None:
    told = rf"{kind.__name__} has a {method} of its own.* move what is done with a batch to then=: midepoch.wrap\("
    with pytest.raises(Unsupported, match=told):
        midepoch.wrap(iterator(root, ours, kind))
    with pytest.raises(Unsupported, match=told):
        midepoch.wrap(Reshapes(iterator(root, ours, kind)), inside="inside")


# --- an epoch that a source ends --------------------------------------------------------------------------------------


@pipeline_def(batch_size=BATCH, num_threads=1, device_id=None, py_num_workers=1, py_start_method="fork")
def from_source(parallel: bool) -> Any:
    return fn.external_source(source=sources.numbered, batch=False, parallel=parallel)


RESETS = {"auto_reset": True}


@pytest.mark.parametrize(
    ("in_processes", "options"), [(False, RESETS), (False, {**RESETS, "prepare_first_batch": False}), (True, {})]
)
def test_a_factory_goes_on_at_every_place(in_processes: bool, options: dict[str, Any]) -> None:
    @dali.factory
    def make(checkpointing: dict[str, Any]) -> Any:
        return DALIGenericIterator([from_source(in_processes, **checkpointing)], ["number"], **options)

    with midepoch.wrap(make) as loader:
        epochs = [[int(batch[0]["number"][0]) for batch in loader] for _ in range(3)]
    assert epochs == [[100 * epoch + first for first in range(0, 20, 4)] for epoch in range(3)]
    assert len(every_cut(lambda: midepoch.wrap(make))) == 15


# --- jax -------------------------------------------------------------------------------------------------------------


def test_the_laws_hold_for_jax_s_iterator(root: str) -> None:
    pytest.importorskip("jax", reason="jax is not installed; make wild runs this test")
    report = check_resumable(
        functools.partial(sources.of_jax, root), quick=True, shuffled=True, identify=sources.identify,
        draws=sources.draws, raise_on_failure=False,
    )  # fmt: skip
    assert report.holds, str(report)
    refused = {verdict.law: verdict.reason for verdict in report.verdicts if verdict.status == "refused clearly"}
    assert list(refused) == ["topology", "holes", "reshard"]
    assert all("number of shards" in why for law, why in refused.items() if law != "holes")


# --- dynamic mode -----------------------------------------------------------------------------------------------------


def test_a_reader_of_dynamic_mode_is_refused_with_the_line(root: str) -> None:
    reader = ndd.readers.Numpy(file_root=root)

    def batches() -> Iterator[Any]:
        yield from reader.next_epoch(batch_size=BATCH)

    of_reader = (reader, reader.next_epoch, functools.partial(reader.next_epoch, batch_size=BATCH))
    for source in (batches, Reshapes(reader), lambda: reader.next_epoch(batch_size=BATCH), *of_reader):
        with pytest.raises(Unsupported, match=r"dynamic mode.* Wrap a function that makes the reader anew.*seed="):
            midepoch.wrap(source)


def test_a_function_that_makes_a_dynamic_reader_is_read_again(root: str) -> None:
    def batches() -> Any:
        options = {"random_shuffle": True, "initial_fill": 5, "seed": random.getrandbits(31)}
        return ndd.readers.Numpy(file_root=root, **options).next_epoch(batch_size=BATCH)

    def numbers(batch: Any) -> list[int]:
        return [int(np.asarray(each)[0]) for each in batch[0]]

    with pytest.warns(midepoch.MidepochWarning, match="read again from its start"):
        given = every_cut(lambda: midepoch.wrap(batches, seed=1, then=numbers))
    assert len(set(given)) == 12


# --- what is said -----------------------------------------------------------------------------------------------------


def test_another_graph_or_world_is_refused_by_its_name(root: str) -> None:
    state = heads(lambda: midepoch.wrap(iterator(root)), 1)[1]
    cure = r"dali\.readers\.numpy\(\.\.\.\) of midepoch\.adapters in place of fn\.readers\.numpy.*, dali\.random in "
    for world, other, told in (
        (None, {"plus": 2}, r"graph differs: .*\(in Cast\)"),
        (None, {"shifted": True}, r"graph differs: .*\(in ArithmeticGenericOp\)"),
        (World(0, 2), {"shards": 2}, cure),
    ):
        with pytest.raises(StateMismatchError, match=told):
            midepoch.wrap(iterator(root, **other), world=world).load_state_dict(state)


def test_what_dali_cannot_build_with_checkpoints_is_refused(root: str) -> None:
    @pipeline_def(batch_size=BATCH, num_threads=1, device_id=None)
    def fits() -> Any:
        return fn.experimental.readers.fits(file_root=root, file_filter="*.npy", name="Reader")

    keeps_none = DALIGenericIterator([fits()], ["number"], reader_name="Reader", prepare_first_batch=False)
    separated = iterator(root, prefetch_queue_depth={"cpu_size": 2, "gpu_size": 3}, exec_dynamic=False)
    for made, why in ((keeps_none, "Fits reader"), (separated, "Checkpointing is not supported with `separated`")):
        with pytest.raises(SourceError, match=rf"cannot build this pipeline with checkpoints \(.*{why}.*dali.readers"):
            next(iter(midepoch.wrap(made)))
