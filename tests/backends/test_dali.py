"""DALI, as it is and fed by midepoch: the laws, what is refused, and what happens to bad data."""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import itertools
import json
import multiprocessing
import shutil
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.places import ROOT

pytest.importorskip("nvidia.dali", reason="NVIDIA DALI is not installed (pip install midepoch[dali])")
pytest.importorskip("PIL", reason="pillow, which writes the images, is not installed (pip install midepoch[demo])")

import nvidia.dali
from nvidia.dali import fn, pipeline_def, types
from nvidia.dali.plugin.pytorch import DALIGenericIterator, LastBatchPolicy
from PIL import Image

import midepoch
from midepoch import World
from midepoch.adapters import dali
from midepoch.adapters.dali.random import _first_that_fits
from midepoch.adapters.dali.readers import _Files
from midepoch.adapters.dali.sizes import Sizes, jpeg_size
from midepoch.errors import SourceError, StateError, StateMismatchError
from midepoch.errors import UnsupportedSourceError as Unsupported
from midepoch.testing import check_resumable, digest
from support import commands
from support import dali_sources as sources
from support.dali_sources import draws, identify, native, sampled
from support.sources import heads

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(sources.write_images(tmp_path_factory.mktemp("dali")))


def loader_after(loader: Any, state: dict[str, Any]) -> Any:
    loader.load_state_dict(state)
    return loader


def over(define: Callable[[], Any], names: list[str], batch_size: int = 2, **options: Any) -> Any:
    pipeline = pipeline_def(define)(batch_size=batch_size, num_threads=1, device_id=None)
    return DALIGenericIterator([pipeline], names, **options)


def ids(loader: Any, batches: int | None = None) -> list[list[int]]:
    return [identify(batch) for batch in itertools.islice(loader, batches)]


# --- files that change ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reader", ["numpy", "webdataset"])
@pytest.mark.parametrize("cut", [4, 14])
def test_changed_files_are_told_and_moved_ones_are_not(
    root: str, tmp_path: Path, reader: str, cut: int, recwarn: pytest.WarningsRecorder
) -> None:
    """The same files elsewhere, written at another time; and files of the same names with each other's contents."""
    shutil.copytree(root, tmp_path / "copied", copy_function=shutil.copyfile)
    sources.swap_contents(Path(shutil.copytree(root, tmp_path / "changed")))

    def rest(batches: Any) -> Any:
        return torch.cat([batch[0]["label"].clone() for batch in batches])

    with sources.found(root, reader) as loader:
        batches = iter(loader)
        for _ in range(cut):
            next(batches)
        state = json.loads(json.dumps(loader.state_dict()))
        assert state["witness"].startswith("0/")
        assert (state["epoch"], state["position"]) == ((0, 12) if cut == 4 else (1, 0))
        following = rest(batches if cut == 4 else loader)
    for rank in range(2):
        with loader_after(sources.found(str(tmp_path / "copied"), reader, rank, rank + 1), state) as loader:
            went_on = rest(loader)
        assert rank or torch.equal(went_on, following)
    assert not [warning for warning in recwarn.list if warning.category is midepoch.MidepochWarning]
    with loader_after(sources.found(str(tmp_path / "changed"), reader), state) as loader:
        within: Any = pytest.raises(StateMismatchError, match="the first of epoch 0, is another one than")
        at_boundary = pytest.warns(midepoch.MidepochWarning, match="the first of epoch 0, is another one than")
        with within if cut == 4 else at_boundary:
            next(iter(loader))


# --- the laws --------------------------------------------------------------------------------------------------------

FEW = ("determinism", "tail", "next epoch", "boundary", "observer", "delivery")
SHARED = (*FEW, "partition", "topology")  # by several ranks
DRAWS_ITSELF = (*FEW, "chain", "guest")
NOISY = {"reader": "numpy", "then": sources.noisy}
# The loader, its options, and those of the laws. The first of each kind has all of them.
LAWS: list[tuple[Callable[..., Any], dict[str, Any], dict[str, Any]]] = [
    (native, {"reader": "file"}, {"world_sizes": (1, 2)}),
    (native, {"reader": "file", "size": 17, "pad_last_batch": True, "policy": "PARTIAL", "kind": "ragged"},
     {"laws": FEW}),
    (native, {"reader": "file", "size": 20, "auto_reset": True}, {"laws": FEW}),  # epochs differ in length
    (native, {"reader": "numpy", "policy": "DROP", "stick_to_shard": True},
     {"world_sizes": (2,), "laws": (*SHARED, "transparent")}),
    (native, {"reader": "webdataset", "size": 40, "batch_size": 5, "pipelines": 2},
     {"world_sizes": (1, 2), "laws": (*FEW, "partition")}),
    (native, {"reader": "file", "shuffle_after_epoch": True, "pipeline": {"exec_dynamic": False}}, {"laws": FEW}),
    (native, {"prepare": False, "kind": "ragged", "pipeline": {"enable_checkpointing": True, "exec_dynamic": False},
     "pipelines": 2, "size": 20, "pad_last_batch": True, "policy": "PARTIAL"}, {"laws": FEW}),
    (native, NOISY, {"world_sizes": (1, 2), "laws": DRAWS_ITSELF}),
    (sources.from_factory, {"kind": "external"}, {"laws": FEW}),
    (sources.from_factory, {"kind": "python"}, {"laws": FEW}),
    (sampled, {"reader": "file"}, {"world_sizes": (1, 2), "state_bytes": 512}),
    (sampled, {"reader": "webdataset", "size": 40, "batch_size": 6, "drop_last": True, "prepare": False},
     {"drop_last": True, "world_sizes": (1, 2), "laws": SHARED}),
    (sampled, {"reader": "numpy", "size": 17, "tail": "uneven", "kind": "ragged"},
     {"tail": "uneven", "world_sizes": (1, 2), "laws": SHARED}),
    (sampled, {"reader": "numpy", "size": 16, "tail": "drop", "pipeline": {"exec_dynamic": False}},
     {"tail": "drop", "world_sizes": (1, 2), "laws": SHARED}),
    (sampled, NOISY, {"world_sizes": (1, 2), "laws": DRAWS_ITSELF}),
]  # fmt: skip
REFUSED = {native: ("topology", "reshard", "holes"), sampled: ("holes",)}
# One sample of DALI's own reader cannot be read; midepoch's readers are read by midepoch alone.
INAPPLICABLE = {native: ("cost", "any item", "witness"), sampled: ("cost", "any item", "transparent")}


@pytest.mark.parametrize(("make", "options", "how"), LAWS)
def test_laws(root: str, make: Any, options: dict[str, Any], how: dict[str, Any]) -> None:
    report = check_resumable(
        functools.partial(make, root=root, **options), identify=identify, draws=draws,
        **{"quick": True, "shuffled": True, "world_sizes": (1,), **how},
    )  # fmt: skip
    expected = dict.fromkeys(REFUSED.get(make, ()), "refused clearly")
    expected |= dict.fromkeys(INAPPLICABLE.get(make, ()), "not applicable")
    for verdict in report.verdicts:
        assert verdict.status == expected.get(verdict.law, "holds"), str(report)


def test_pipelines_are_ended_when_they_are_let_go(root: str) -> None:
    """Somebody else refers to each, as garbage in a cycle does. Their threads would call Python for ever."""
    make = sources.MakeCallback("python", root)
    made: list[Any] = []

    def factory(checkpointing: dict[str, Any]) -> Any:
        made.append(make(checkpointing))
        return made[-1]

    def ended() -> list[bool]:
        return [pipeline._pipe is None for iterator in made for pipeline in iterator._pipes]

    loader = midepoch.wrap(dali.factory(factory))
    batches = iter(loader)
    next(batches)
    state, length = loader.state_dict(), len(loader)
    second = digest(next(batches))
    assert ended() == [False]
    next(iter(loader_after(loader, state)))
    assert ended() == [True, False]
    loader.close()
    assert ended() == [True, True]
    loader.load_state_dict(state)  # what the pipelines said of their readers is known
    assert len(loader) == length and digest(next(iter(loader))) == second


# --- native: what the user had, and nothing else ---------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["FILL", "DROP", "PARTIAL"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("shards", [1, 3])
def test_batches_and_lengths_are_those_of_the_bare_iterator(root: str, policy: str, padded: bool, shards: int) -> None:
    options = {"random_shuffle": True, "initial_fill": 7, "pad_last_batch": padded}

    def make() -> Any:
        made = sources.native_pipeline(root, 20, "file", (shards - 1, shards), options, batch_size=3, seed=11)
        arguments = {"reader_name": "Reader", "last_batch_policy": LastBatchPolicy[policy], "auto_reset": True}
        return DALIGenericIterator([made], ["label", "data", "random"], **arguments)

    bare = make()
    expected = [[digest(batch) for batch in bare] for _ in range(5)]
    loader = midepoch.wrap(make(), world=World(), shard=False)
    always = policy != "FILL" or padded  # else DALI takes an epoch's last batch partly from the next one
    for epoch, batches in enumerate(expected):
        assert (len(loader), loader.epoch) == (len(batches) if always else len(expected[0]), epoch)
        with contextlib.nullcontext() if always else pytest.raises(TypeError, match="no length"):
            assert loader.batches_left == len(batches)
        found = []
        for batch in loader:
            found.append(digest(batch))
            assert loader.batches_done == (len(found) if len(found) < len(batches) or not always else 0)
        assert found == batches
    # A state from any epoch goes on in the same epoch, whatever its length.
    again = loader_after(midepoch.wrap(make(), world=World(), shard=False), loader.state_dict())
    assert [digest(batch) for batch in again] == [digest(batch) for batch in bare]


def test_a_pipeline_without_a_seed_takes_midepochs(root: str) -> None:
    @pipeline_def(batch_size=4, num_threads=1, device_id=None)
    def unseeded(rank: int, ranks: int) -> Any:
        shuffle = {"random_shuffle": True, "initial_fill": 7, "shard_id": rank, "num_shards": ranks}
        label = fn.readers.numpy(file_root=f"{root}/npy", name="Reader", **shuffle)
        return label, fn.random.uniform()

    def make(seed: int | None = None, rank: int = 0, ranks: int = 1) -> Any:
        iterator = DALIGenericIterator([unseeded(rank, ranks)], ["label", "random"], reader_name="Reader")
        return midepoch.wrap(iterator, seed=seed, world=World(rank, ranks))

    first, same, other = ([digest(batch) for batch in make(seed)] for seed in (5, 5, 6))
    assert first == same != other
    assert not torch.equal(*(next(iter(make(5, rank, 2)))[0]["random"] for rank in range(2))), "each rank draws its own"
    state = heads(lambda: make(5), 1)[1]
    assert [digest(batch) for batch in loader_after(make(), state)] == first[1:]
    with pytest.raises(StateMismatchError, match="the seed differs"):
        make(6).load_state_dict(state)


def test_where_only_a_checkpoint_leads_is_refused(root: str) -> None:
    with native(root=root) as loader:
        given = iter(loader)
        expected = [identify(next(given)) for _ in range(2)]
        for elsewhere in ({"position": 4}, {"epoch": 1, "position": 3}, {"epoch": 2}, {"epoch": 0}):
            with pytest.raises(StateError, match="load a state instead of seeking"):
                loader.seek(**elsewhere)
        with pytest.raises(StateError, match=r"does not lead to epoch 9, position 0: load a state"):
            loader.set_epoch(9)
        assert (loader.epoch, loader.position) == (0, 2)
        expected += [identify(batch) for batch in given]
    assert expected == ids(native(root=root))


@pytest.mark.parametrize("padded", [False, True])
def test_the_next_epoch_after_a_break_is_reached_by_reading(root: str, padded: bool) -> None:
    make = functools.partial(native, root=root, size=20, pad_last_batch=padded)
    epochs = [ids(loader) for loader in [make()] for _ in range(3)]
    rest = len(epochs[0]) - 2
    thrown_away = f"has read the rest of epoch 0, {rest} batches from position 2 on, and thrown it away"
    with make() as loader:
        assert ids(loader, 2) == epochs[0][:2]
        with pytest.warns(midepoch.MidepochWarning, match=thrown_away):
            assert ids(loader) == epochs[1]
        assert ids(loader) == epochs[2]
    with make() as loader:
        ids(loader, 2)
        loader.set_epoch(1)
        state = loader.state_dict()
    with make() as loader, pytest.warns(midepoch.MidepochWarning, match=thrown_away):
        assert ids(loader_after(loader, state)) == epochs[1]


def test_shards_of_other_ranks_are_refused_by_name(root: str) -> None:
    for shards in (3, 1):
        wrong = native(1, 2, root=root, num_shards=shards, shard_id=0)
        told = rf"num_shards={shards}, shard_id=0.*rank 1 of 2: write num_shards=2, shard_id=1"
        with pytest.raises(Unsupported, match=told):
            next(iter(wrong))
    made = dali.factory(sources.MakeCallback("python", root))
    with pytest.raises(Unsupported, match="write num_shards=2, shard_id=0, or pass shard=False"):
        len(midepoch.wrap(made, world=World(0, 2)))
    assert len(midepoch.wrap(made, world=World(0, 2), shard=False)) == 10


def test_what_native_cannot_resume_is_refused_with_the_way_out(root: str) -> None:
    used = sources.classification(root)
    next(used)
    with pytest.raises(Unsupported, match="wrap it before its first batch"):
        midepoch.wrap(used)
    for kind in ("external", "python"):
        with pytest.raises(Unsupported, match=r"calls python .*dali\.factory.*your_pipeline\(\*\*checkpointing\)"):
            midepoch.wrap(sources.MakeCallback(kind, root)({}))
    with pytest.raises(Unsupported, match="give it a function of one argument"):
        midepoch.wrap(dali.factory(sources.MakeCallback("generator", root)))
    with pytest.raises(Unsupported, match="must return a DALIGenericIterator over 1 pipelines"):
        midepoch.wrap(dali.factory(lambda checkpointing: sources.classification(root)))
    build = functools.partial(sources.classification_pipeline, root, batch_size=5, enable_checkpointing=True)
    restored = build(checkpoint=build().checkpoint())
    with pytest.raises(Unsupported, match="build it without checkpoint="):
        midepoch.wrap(DALIGenericIterator([restored], ["a", "b"], reader_name="Reader"))
    with pytest.raises((TypeError, ValueError)):
        dali.factory(sources.classification, 0)


# --- native: states that do not fit ----------------------------------------------------------------------------------


@pytest.fixture
def saved(root: str) -> dict[str, Any]:
    return heads(functools.partial(native, root=root), 2)[1]


SHARD = {"pad_last_batch": True, "batch_size": 10}  # of which several have the same length


@pytest.mark.parametrize(
    ("there", "here", "message"),
    [
        ({}, {"size": 17}, r"Reader\.data differs: .*18 samples:.*17 samples:"),
        ({}, {"random_shuffle": False}, r"Reader\.(initial_fill|random_shuffle) differs: .*True.*False"),
        ({}, {"initial_fill": 9}, r"Reader\.initial_fill differs: .*7.*9"),
        ({}, {"batch_size": 2}, r"batch_size differs: .*3.*2"),
        ({}, {"policy": "PARTIAL"}, r"last_batch differs: .*fill.*partial"),
        ({}, {"pad_last_batch": True}, r"Reader\.pad_last_batch differs: .*False.*True"),
        ({}, {"stick_to_shard": True}, r"Reader\.stick_to_shard differs"),
        ({}, {"reader": "numpy"}, r"Reader\.data differs|graph differs"),
        ({}, {"pipelines": 2}, "pipelines differs: .*1.*2"),
        ({}, {"num_shards": 2}, "num_shards differs: .*1.*2|the size differs: .*6.*3"),
        ({}, {"num_shards": 2, "size": 36}, r"Reader\.data differs"),
        ({**SHARD, "num_shards": 2}, {**SHARD, "num_shards": 2, "shard_id": 1},
         "shard_id differs: the state was saved with 0, this reader has 1"),
        ({**SHARD, "num_shards": 2}, {**SHARD, "num_shards": 3},
         "num_shards differs: the state was saved with 2, this reader has 3"),
    ],
    ids=str,
)  # fmt: skip
def test_what_dali_accepts_and_gets_wrong_is_refused(
    root: str, there: dict[str, Any], here: dict[str, Any], message: str
) -> None:
    saved = native(root=root, **there)
    ids(saved, 1)
    native(root=root, **there).load_state_dict(saved.state_dict())
    loader = native(root=root, **here)
    with pytest.raises(StateMismatchError, match=message):
        loader.load_state_dict(saved.state_dict())
    assert (loader.epoch, loader.position) == (0, 0)


def test_what_a_state_does_not_depend_on(root: str, saved: dict[str, Any]) -> None:
    rest = ids(loader_after(native(root=root), saved))
    for settings in ({"num_threads": 1}, {"prefetch_queue_depth": 3}, {"exec_dynamic": False}, {"seed": 99}):
        assert ids(loader_after(native(root=root, pipeline=settings, read_ahead=True), saved)) == rest


def test_a_dali_of_another_format(root: str, saved: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvidia.dali, "__version__", "3.1.0")
    with pytest.raises(StateMismatchError, match=r"dali differs: .* with '2\.\d+', this loader has '3\.1'"):
        native(root=root).load_state_dict(saved)


def test_a_state_of_one_mode_is_refused_by_the_other(root: str, saved: dict[str, Any]) -> None:
    with pytest.raises(StateMismatchError, match=r"the adapter differs: .*'dali'.*'dali-sampled'"):
        sampled(root=root).load_state_dict(saved)
    with pytest.raises(StateMismatchError, match=r"the adapter differs: .*'dali-sampled'.*'dali'"):
        native(root=root).load_state_dict(sampled(root=root).state_dict())


# --- bad data --------------------------------------------------------------------------------------------------------


@pytest.fixture
def bad(root: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(root, tmp_path / "bad"))


@pytest.mark.parametrize("how", ["corrupt", "missing"])
@pytest.mark.parametrize("make", [native, sampled])
@pytest.mark.parametrize("dynamic", [True, False])
def test_bad_data_is_named_and_can_be_skipped(
    bad: Path, make: Callable[..., Any], how: str, dynamic: bool, root: str
) -> None:
    # DALI reads a file when it enters the shuffle buffer, so that one that is missing fails long before its turn.
    options = {"random_shuffle": make is sampled or how == "corrupt", "seed": 3}
    good = make(root=root, **options)
    expected, following = ids(good), ids(good)
    # Not at the beginning of the next epoch, which is prefetched while this one ends.
    late = {label for batch in following[3:] for label in batch}
    victim = next(label for label in expected[3] if label in late)
    spoilt = Path(sources.images(str(bad), 18)[victim])
    spoilt.unlink() if how == "missing" else spoilt.write_bytes(b"\xff\xd8garbage" * 20)
    loader = make(root=str(bad), pipeline={"exec_dynamic": dynamic}, **options)
    found, states = [], [loader.state_dict()]
    with pytest.raises(SourceError, match=r"position") as caught:
        for batch in loader:
            found.append(identify(batch))
            states.append(loader.state_dict())
    reached = len(found)
    # DALI's readers read one sample ahead, and without exec_dynamic so does its executor, by batches.
    ahead = 2 if not dynamic else make is native and how == "missing"
    assert 3 - ahead <= reached <= 3 and found == expected[:reached]
    unit = 1 if make is native else 3
    assert f"{'position ' if make is native else 'positions '}{reached * unit}" in str(caught.value)
    cure = "Repair the data, and load the last state" if make is native else f"seek(position={(reached + 1) * unit})"
    assert cure in str(caught.value)
    assert loader.state_dict() == states[reached]
    if dynamic or make is sampled:
        # It is still there, and such a pipeline of midepoch's is of no use after an error.
        loader.load_state_dict(loader.state_dict())  # else a new pass begins the next epoch
        with pytest.raises(SourceError, match="DALI failed" if dynamic else "make and wrap the iterator again"):
            next(iter(loader))
        assert loader.state_dict() == states[reached]
    if make is native and how == "missing":  # what it has opened, DALI keeps as it was
        shutil.copy(sources.images(root, 18)[victim], spoilt)
        assert ids(loader_after(loader, states[reached])) == expected[reached:]
    if make is sampled and dynamic:
        loader.seek(position=4 * unit)
        assert ids(loader) == expected[4:]
        assert (loader.epoch, loader.position) == (1, 0)


@pytest.mark.parametrize("how", ["shrinks", "is replaced"])
def test_an_archive_that_changes_before_it_is_read(bad: Path, how: str) -> None:
    loader = sampled(root=str(bad), reader="webdataset", size=40, batch_size=5)
    data = (bad / "1.tar").read_bytes()
    (bad / "new.tar").write_bytes(data[:2000] if how == "shrinks" else data)
    (bad / "new.tar").replace(bad / "1.tar")
    with pytest.raises(SourceError, match=r"positions \d+ to \d+ .*1\.tar was changed after it was indexed"):
        list(loader)


def test_a_resume_reads_nothing_that_it_skips(bad: Path, root: str) -> None:
    # Of a native reader the benchmark shows it: it opens its first file when it is built.
    expected = ids(sampled(root=root, seed=1))
    loader = sampled(root=str(bad), seed=1)
    ids(loader, 4)
    for label in (label for batch in expected[:4] for label in batch):
        Path(sources.images(str(bad), 18)[label]).unlink()
    assert ids(loader_after(sampled(root=str(bad)), loader.state_dict())) == expected[4:]
    with pytest.raises(SourceError, match="seek"):
        ids(sampled(root=str(bad), seed=1))


# --- fed by midepoch --------------------------------------------------------------------------------------------------


def test_the_files_and_labels_are_those_that_dali_finds(root: str, tmp_path: Path) -> None:
    listing = tmp_path / "list.txt"
    names = [Path(path).relative_to(root) for path in sources.images(root, 9)]
    # DALI takes blanks and tabs.
    blanks = [" ", "\t"] * 5
    listing.write_text("".join(f"{name}{blanks[number]}{number * 7}\n" for number, name in enumerate(names)))
    filtered = {"file_root": f"{root}/jpeg", "dir_filters": ["class[12]"], "file_filters": ["*[05].JPG"]}
    given: list[tuple[int, dict[str, Any]]] = [
        (40, {"file_root": f"{root}/jpeg"}),
        (9, {"file_root": root, "file_list": str(listing)}),
        (5, filtered),
        (9, {"file_root": root, "files": [str(name) for name in names], "labels": list(range(9))}),
    ]
    for count, options in given:

        @pipeline_def(batch_size=100, num_threads=1, device_id=None)
        def pipeline(ours: bool, options: dict[str, Any] = options) -> Any:
            encoded, label = (dali.readers if ours else fn.readers).file(**options)
            return fn.pad(encoded), label

        theirs, labels = pipeline(False).run()
        loader = midepoch.wrap(DALIGenericIterator([pipeline(True)], ["data", "label"]))
        (batch,) = next(iter(loader))
        assert batch["label"].flatten().tolist() == [int(labels.at(n)[0]) for n in range(count)]
        for number in range(count):
            expected = theirs.at(number)
            assert (batch["data"][number].numpy()[: len(expected)] == expected[: batch["data"].shape[1]]).all()


@pytest.mark.parametrize("missing", ["empty", "skip", "error"])
def test_missing_components(tmp_path: Path, missing: Any) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name in ("0.a", "0.b", "1.a", "2.B", "2.a.x", "3.A", "3.b", "4.c"):
            info = tarfile.TarInfo(name)
            info.size = 5
            tar.addfile(info, io.BytesIO(name.ljust(5).encode()))

    def pipeline() -> Any:
        nodes = dali.readers.webdataset(
            tmp_path / "a.tar", ext=["a;a.x", "b"], missing_component_behavior=missing, case_sensitive_extensions=False
        )
        return tuple(fn.pad(node, shape=[5]) for node in nodes)

    if missing == "error":
        with pytest.raises(SourceError, match="sample '1' has no b"):
            over(pipeline, ["a", "b"])
        return
    (batch,) = next(iter(midepoch.wrap(over(pipeline, ["a", "b"], 9))))
    texts = [[bytes(row.tolist()).rstrip(b"\0 ").decode() for row in batch[name]] for name in ("a", "b")]
    if missing == "skip":
        assert texts == [["0.a", "2.a.x", "3.A"], ["0.b", "2.B", "3.b"]]
    else:
        assert texts == [["0.a", "1.a", "2.a.x", "3.A", ""], ["0.b", "", "2.B", "3.b", ""]]


def test_random_parameters_are_pinned() -> None:
    def pipeline() -> Any:
        dali.readers.file(files=["x", "x"])
        uniform, matrix = dali.random.uniform((2.0, 5.0)), dali.random.uniform(shape=(2, 3))
        return uniform, matrix, dali.random.normal(1.0, 2.0, shape=4), dali.random.coin_flip(0.25)

    iterator = over(pipeline, ["uniform", "matrix", "normal", "coin"], prepare_first_batch=False)
    found = next(iter(midepoch.wrap(iterator, seed=7)))[0]
    assert found["uniform"].tolist() == [2.4611289501190186, 4.82540225982666]
    normal = [
        [-1.0790073871612549, 5.334432125091553, -2.6442599296569824, -2.4596941471099854],
        [0.0520007349550724, 3.1263158321380615, 3.4726626873016357, 0.7266173362731934],
    ]
    # Logarithm and cosine may differ in the last bit from one numpy to another.
    torch.testing.assert_close(found["normal"], torch.tensor(normal), rtol=1e-6, atol=0)
    assert found["coin"].tolist() == [0, 1]


def test_the_window_is_the_first_that_fits() -> None:
    generator = np.random.default_rng(0)
    area, log_ratio = generator.uniform(0.08, 1, (200, 10)), generator.uniform(-0.7, 0.7, (200, 10))
    for _ in range(20):
        sizes = generator.integers(1, 1000, (200, 2)).astype(np.int32)
        chosen = _first_that_fits(area, log_ratio, sizes)
        for number, (height, width) in enumerate(sizes.tolist()):
            ratio = np.exp(log_ratio[number])  # of the window's sides in pixels
            pixels = area[number] * height * width
            windows = np.stack([np.sqrt(pixels / ratio) / height, np.sqrt(pixels * ratio) / width], axis=1)
            fitting = [window for window in windows if window.max() <= 1]
            expected = fitting[0] if fitting else np.minimum(windows[-1], 1)
            assert np.allclose(chosen[number], expected, rtol=1e-12)


def jpeg(height: int, width: int, *segments: bytes, noise: int = 0) -> bytes:
    buffer = io.BytesIO()
    pixels = np.random.default_rng(noise).integers(0, 255, (height, width, 3), np.uint8)
    Image.fromarray(pixels).save(buffer, "JPEG", progressive=bool(noise % 2))
    return b"\xff\xd8" + b"".join(segments) + buffer.getvalue()[2:]


def exif(orientation: int, order: str = ">", tag: int = 0x0112) -> bytes:
    entries = struct.pack(order + "HHIHHHHIHH", 0x010F, 3, 1, 7, 0, tag, 3, 1, orientation, 0)
    body = (b"MM" if order == ">" else b"II") + struct.pack(order + "HIH", 42, 8, 2) + entries + bytes(4)
    return segment(0xE1, b"Exif\0\0" + body)


def segment(marker: int, content: bytes) -> bytes:
    return struct.pack(">BBH", 0xFF, marker, len(content) + 2) + content


def peeked(images: list[bytes]) -> list[list[int]]:
    """Heights and widths by DALI itself."""

    @pipeline_def(batch_size=len(images), num_threads=1, device_id=None)
    def pipeline() -> Any:
        return fn.peek_image_shape(fn.external_source(lambda: [np.frombuffer(each, np.uint8) for each in images]))

    found: list[list[int]] = np.asarray(pipeline().run()[0].as_tensor())[:, :2].tolist()
    return found


def test_sizes_are_those_that_dali_tells(tmp_path: Path) -> None:
    images = [jpeg(20 + number, 50 - number, exif(number, "><"[number % 2]), noise=number) for number in range(1, 9)]
    images += [
        jpeg(31, 17),
        jpeg(31, 17, b"\xff\xff" + segment(0xE2, b"profile" * 1000)[1:]),  # padded
        jpeg(31, 17, segment(0xE1, b"http://ns.adobe.com/xap/1.0/\0<x/>"), exif(6), segment(0xFE, b"a comment")),
        jpeg(31, 17, *[segment(0xE2, bytes(60_000))] * 2),  # its size lies beyond what is read first
        jpeg(31, 17, segment(0xE1, b"Exif\0\0" + b"MM\0*" + struct.pack(">IH", 8, 0) + bytes(4))),
        jpeg(31, 17, exif(6, tag=0x0113)),
    ]
    known = [jpeg_size(each) for each in images]
    assert [list(each or ()) for each in known] == peeked(images)
    assert len(set(known)) == 10
    plain = jpeg(31, 17)
    scan = plain.index(b"\xff\xda")
    behind = plain[:scan] + exif(6) + plain[scan:]
    assert jpeg_size(behind) == (17, 31) and peeked([behind]) == [[17, 31]]
    unlike = [jpeg(31, 17, exif(6), exif(6, tag=0x0113)), jpeg(31, 17, exif(6).replace(b"MM\0*", b"MM\0+"))]
    assert [jpeg_size(each) for each in unlike] == [None, None], "DALI is asked"
    images += [behind, *unlike]
    for wrong in (images[0][:40], images[0][:3], b"", b"\xff\xd8", b"GIF89a", jpeg(9, 8, segment(0xE1, b"Exif\0\0XX"))):
        assert jpeg_size(wrong) is None

    pixels = np.zeros((12, 30, 3), np.uint8)
    turned = Image.Exif()
    turned[0x0112] = 6
    for kind in ("PNG", "BMP", "TIFF", "PPM", "WEBP", "JPEG2000"):
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, kind, **({"exif": turned} if kind in ("PNG", "TIFF", "WEBP") else {}))
        images.append(buffer.getvalue())
    for number, each in enumerate(images):
        (tmp_path / f"{number:02}").write_bytes(each)
    sizes = Sizes(_Files("file", [f"{tmp_path}/{number:02}" for number in range(len(images))], "", None), 0)
    indices = np.array([3, 19, 3, 0, 15])
    assert sizes.of(indices).tolist() == np.array(peeked(images))[indices].tolist()
    assert (sizes._known > 0).all(axis=1).sum() == 4
    assert sizes.of(np.arange(len(images))).tolist() == peeked(images)


@pytest.mark.parametrize("damage", ["gone", "no image"])
def test_an_image_whose_size_cannot_be_told_is_named(tmp_path: Path, damage: str) -> None:
    paths = [tmp_path / f"{number}.jpg" for number in range(6)]
    for path in paths:
        path.write_bytes(jpeg(20, 30))

    def pipeline() -> Any:
        encoded, label = dali.readers.file(files=paths)
        return fn.decoders.image_slice(encoded, *dali.random.crop_window(encoded), axis_names="HW").shape(), label

    loader = midepoch.wrap(over(pipeline, ["shape", "label"]), seed=1)
    paths[3].unlink() if damage == "gone" else paths[3].write_bytes(b"no image" * 100)
    iterator = iter(loader)
    next(iterator)
    with pytest.raises(SourceError, match=r"positions 2 to 3 .*sample 3 \(.*3\.jpg\).*seek\(position=4\)"):
        next(iterator)
    loader.seek(position=4)
    assert [batch[0]["label"].flatten().tolist() for batch in loader] == [[4, 5]]


def test_crop_windows_are_distributed_as_dalis(root: str) -> None:
    from scipy import stats

    @pipeline_def(batch_size=40, num_threads=2, device_id=None, seed=4)
    def pipeline(ours: bool) -> Any:
        if ours:
            encoded, _ = dali.readers.file(f"{root}/jpeg")
            return dali.random.crop_window(encoded)[1]
        encoded, _ = fn.readers.file(file_root=f"{root}/jpeg", name="Reader")
        size = fn.cast(fn.peek_image_shape(encoded), dtype=types.FLOAT)
        cut = fn.cast(fn.decoders.image_random_crop(encoded).shape(), dtype=types.FLOAT)
        return fn.slice(cut / size, 0, 2, axes=[0])

    loader = midepoch.wrap(DALIGenericIterator([pipeline(True)], ["window"]), seed=1)
    ours = torch.cat([batch[0]["window"] for _ in range(25) for batch in loader]).double().numpy()
    bare = pipeline(False)
    theirs = np.concatenate([np.asarray(bare.run()[0].as_tensor()) for _ in range(25)]).astype(np.float64)
    assert stats.ks_2samp(ours.prod(1), theirs.prod(1)).pvalue > 1e-4
    assert stats.ks_2samp(ours[:, 1] / ours[:, 0], theirs[:, 1] / theirs[:, 0]).pvalue > 1e-4


NOT_ALONE: dict[str, tuple[Callable[[str], Any], type[Exception], str]] = {
    "another of midepoch's": (
        lambda root: (dali.readers.numpy(root), dali.readers.numpy(root)), ValueError, "build a pipeline for each"
    ),
    "a reader of DALI's": (
        lambda root: (dali.readers.numpy(root), fn.readers.numpy(file_root=root)), Unsupported, "DALI readers beside"
    ),
    "an external source": (
        lambda root: (dali.readers.numpy(root), fn.external_source(source=lambda n: [np.zeros(1)] * 2)),
        Unsupported, "external_source beside",
    ),
    "draws for a reader of DALI's": (
        lambda root: (fn.readers.numpy(file_root=root), dali.random.coin_flip()),
        Unsupported, r"without one of dali\.readers",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_ALONE)
def test_what_stands_beside_a_reader_is_refused(name: str, root: str) -> None:
    define, error, words = NOT_ALONE[name]
    with pytest.raises(error, match=words):
        midepoch.wrap(over(lambda: define(f"{root}/npy"), ["a", "b"]))


def test_settings_that_a_reader_does_not_take_are_refused(root: str) -> None:
    def plain() -> Any:
        return dali.readers.numpy(f"{root}/npy")

    with pytest.raises(Unsupported, match=r"readers\.file does not take initial_fill=, num_shards=: midepoch"):
        dali.readers.file(root, initial_fill=3, num_shards=2)
    with pytest.raises(Unsupported, match="leave size out"), pytest.warns(Warning, match="reader_name"):
        midepoch.wrap(over(plain, ["a"], size=40, prepare_first_batch=False))
    with pytest.raises(Unsupported, match="shard=False"):
        midepoch.wrap(over(plain, ["a"]), shard=False)
    with pytest.raises(RuntimeError, match="outside a pipeline"):
        plain()


WRONG_ARGUMENTS: list[tuple[Callable[[], Any], str]] = [
    (lambda: dali.readers.file(), r"readers\.file"),
    (lambda: dali.readers.file(files=["a"], labels=[1, 2]), r"readers\.file"),
    (lambda: dali.readers.file(file_root="a", file_list="b", files=["c"]), r"readers\.file"),
    (lambda: dali.random.uniform((1.0, 1.0)), "must be"),
    (lambda: dali.random.uniform(shape=0), "must be"),
    (lambda: dali.random.coin_flip(2), "must be"),
    (lambda: dali.random.crop_window(None, (0.0, 1.0)), "must be"),
    (lambda: dali.random.crop_window(None, random_aspect_ratio=(2.0, 1.0)), "must be"),
]


@pytest.mark.parametrize(("call", "words"), WRONG_ARGUMENTS)
def test_wrong_arguments_of_midepochs_operators(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()


# --- what they promise -----------------------------------------------------------------------------------------------


def test_capabilities(root: str) -> None:
    mine, fed = (vars(make(root=root).capabilities) for make in (native, sampled))
    assert [name for name, promise in mine.items() if not promise] == ["elastic_world", "rank_independent", "skips"]
    assert [name for name, promise in fed.items() if not promise] == ["skips"]

    mixed = over(lambda: (dali.readers.numpy(f"{root}/npy"), fn.random.uniform()), ["label", "random"])
    found = midepoch.wrap(mixed).capabilities
    assert not found.exact_augmentations and "random.Uniform" in found.exact_augmentations.reason
    assert found.elastic_world


def test_device_of_the_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert dali.device_id() is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert dali.device_id(World(5, 8, 1)) == 1
    for name, value in (("RANK", 3), ("WORLD_SIZE", 4), ("LOCAL_RANK", 3)):
        monkeypatch.setenv(name, str(value))
    assert dali.device_id() == 3


@pytest.mark.parametrize("name", ["dali_native.py", "dali_elastic.py"])
def test_examples(name: str) -> None:
    assert "bit for bit" in commands.script(ROOT / "examples" / name)


# --- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@needs_gpu
def test_a_state_goes_on_another_gpu_and_not_on_the_cpu(root: str) -> None:
    def make(device: int | None) -> Any:
        @pipeline_def(batch_size=4, num_threads=2, device_id=device, seed=5)
        def pipeline() -> Any:
            encoded, label = fn.readers.file(file_root=f"{root}/jpeg", random_shuffle=True, name="Reader")
            decoded = fn.decoders.image(encoded, device="cpu" if device is None else "mixed")
            return fn.resize(decoded, resize_x=16, resize_y=16), label

        return midepoch.wrap(DALIGenericIterator([pipeline()], ["data", "label"], reader_name="Reader"))

    state = heads(lambda: make(0), 3)[1]
    rest = ids(loader_after(make(0), state))
    if torch.cuda.device_count() > 1:
        assert ids(loader_after(make(1), state)) == rest
    with pytest.raises(StateMismatchError, match="graph differs"):
        make(None).load_state_dict(state)


def test_a_forked_process_leaves_garbage_pipelines_alone(root: str) -> None:
    """They wait for threads, when they are collected, which that process has not."""

    @pipeline_def(batch_size=4, num_threads=2, device_id=None)
    def numbers() -> Any:
        return fn.readers.numpy(file_root=f"{root}/npy", name="Reader")

    gc.disable()
    try:
        cycle = [numbers()]
        cycle[0].build()
        cycle[0].run()
        cycle.append(cycle)
        del cycle
        process = multiprocessing.get_context("fork").Process(target=gc.collect)
        process.start()
        process.join(120)
        hangs = process.is_alive()
        process.kill()
        process.join()
        assert (hangs, process.exitcode) == (False, 0)
    finally:
        gc.enable()
