"""FFCV's Loader, resumed in the middle of an epoch: order and pixels, on any number of threads and processes."""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
import os
import pkgutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.places import ROOT

pytest.importorskip("ffcv", reason="FFCV is not installed (it needs system packages, see docs/sources.md#ffcv)")

import numba
from ffcv.fields.decoders import IntDecoder, RandomResizedCropRGBImageDecoder, SimpleRGBImageDecoder
from ffcv.loader import OrderOption
from ffcv.pipeline.operation import Operation
from ffcv.transforms import RandomBrightness, RandomHorizontalFlip, ToDevice, ToTensor, ToTorchImage

import midepoch
from midepoch import SourceError, StateMismatchError, World
from midepoch.adapters import ffcv as adapter
from midepoch.adapters.ffcv import adapter as adapter_module
from midepoch.adapters.ffcv import beton, epoch, kernels, private, random_streams
from midepoch.order.keys import derive_keys
from midepoch.testing import ResumableTests
from support import ffcv_sources as sources
from support import forking

ALL = bool(os.environ.get("MIDEPOCH_CHAOS"))  # every combination, every thread layer: a quarter of an hour

Batches = list[tuple[torch.Tensor, ...]]


def read(loader: Any, count: int | None = None) -> Batches:
    """The next batches of one pass, copied out of FFCV's buffers."""
    return [tuple(torch.as_tensor(part).clone() for part in batch) for batch in itertools.islice(loader, count)]


def same(one: Batches, other: Batches) -> bool:
    return len(one) == len(other) and all(
        len(a) == len(b) and all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(a, b, strict=True))
        for a, b in zip(one, other, strict=True)
    )


def images_with(*operations: Any) -> dict[str, Any]:
    return {"image": [SimpleRGBImageDecoder(), *operations, ToTensor()], "label": [IntDecoder(), ToTensor()]}


# --- the laws ---------------------------------------------------------------------------------------------------------


class Laws(ResumableTests):
    identify = staticmethod(sources.identify)
    shuffled = True
    # Each process compiles for seconds, each pipeline by itself: two ranks show what three do.
    world_sizes = (1, 2, 3) if ALL else (1, 2)
    num_workers = (1, 2) if ALL else (1,)
    state_bytes = 512
    timeout = 300.0
    not_applicable = frozenset({"cost", "any item"})


class TestRandom(Laws):
    """FFCV's readme, or what compiles in a third of the time; the test of every random operation has its crop, too."""

    make_loader = staticmethod(sources.load if ALL else sources.quick_load)
    quick = not ALL  # each process compiles for itself


class TestQuasiRandomThroughPages(Laws):
    make_loader = staticmethod(
        functools.partial(sources.plain_load, order="quasi", os_cache=False, tail="drop", drop_last=True, subset=True)
    )
    tail, drop_last, quick = "drop", True, True


class TestMixed(Laws):
    """Samples are mixed with their neighbours in the batch, so another world is refused."""

    make_loader = staticmethod(functools.partial(sources.load, pipelines="mixed", kind="raw"))
    elastic_content, quick = False, True


# --- streams ----------------------------------------------------------------------------------------------------------


def test_every_random_operation_repeats_itself() -> None:
    from ffcv.transforms import Cutout, RandomContrast, RandomResizedCrop, RandomSaturation, RandomTranslate

    chain = [
        RandomHorizontalFlip(), Cutout(3), RandomTranslate(2), RandomBrightness(0.5), RandomContrast(0.5),
        RandomSaturation(0.5), RandomResizedCrop((0.5, 1.0), (0.75, 1.3), 10),
    ]  # fmt: skip
    image = [RandomResizedCropRGBImageDecoder((12, 12)), *chain, ToTensor(), ToTorchImage()]
    pipelines = {"image": image, "label": [IntDecoder(), ToTensor()]}
    bare = sources.make(pipelines, sources.file("jpeg"))
    kinds = {type(each).__name__ for each in image}
    random = {path.partition(":")[2] for path, kind in private._KINDS.items() if kind == "sample"}
    assert random <= kinds, "this test leaves out a random operation"
    loader = midepoch.wrap(bare, seed=1)
    first, state = read(loader, 3), loader.state_dict()
    rest, second_epoch = read(midepoch_at(bare, state)), read(midepoch_at(bare, state, skip=1))
    again = read(midepoch.wrap(bare, seed=1))
    assert same(first + rest, again)
    assert not any(torch.equal(a[0], b[0]) for a, b in zip(again, second_epoch, strict=False))
    loader.close()
    # Three ranks go on with the pixels that one had; the last of them fills its batch up from the epoch's beginning.
    alone = {n: pixels for batch in again for n, pixels in zip(sources.identify(batch), batch[0], strict=True)}
    three = [batch for rank in range(3) for batch in read(midepoch_at(bare, state, world=World(rank, 3)))]
    pixels = [torch.stack([alone[number] for number in sources.identify(batch)]) for batch in three]
    assert list(map(len, pixels)) == [4] * 3 and all(map(torch.equal, pixels, [batch[0] for batch in three]))
    if ALL:
        for workers in (2, 4):
            other = sources.make(pipelines, sources.file("jpeg"), num_workers=workers)
            assert same(again, read(midepoch.wrap(other, seed=1))), workers


def midepoch_at(bare: Any, state: dict[str, Any], skip: int = 0, world: World | None = None) -> Any:
    loader = midepoch.wrap(bare, seed=1, world=world)
    loader.load_state_dict(state)
    for _ in range(skip):
        read(loader)
    return loader


def test_every_operation_of_ffcv_is_known() -> None:
    import ffcv.fields
    import ffcv.transforms

    packages = [(each.__path__, f"{each.__name__}.") for each in (ffcv.fields, ffcv.transforms)]
    modules = [module.name for each in packages for module in pkgutil.walk_packages(*each)]
    kinds = {kind for name in modules for kind in vars(importlib.import_module(name)).values() if inspect.isclass(kind)}
    found = {kind for kind in kinds if issubclass(kind, Operation) and kind is not Operation}
    assert len(found) >= 25
    assert not [kind.__name__ for kind in found if private.kind_of(kind) == "unknown"]


def test_a_stream_begins_with_words_of_its_own() -> None:
    # Pinned without numba: a change of these words changes every augmentation that anybody has resumed.
    @numba.njit
    def numbers(key: Any, count: int) -> Any:
        random_streams.restart(key)
        found = np.empty(count)
        for i in range(count):
            found[i] = np.random.random()
        return found

    for key in (0, 5, (1 << 64) - 1):
        words = derive_keys(key, np.arange(36)).view(np.uint32)
        table = random_streams._table().reshape(-1, 8)
        state = np.concatenate([words[:64], (table + words[64:]).ravel()])
        expected = np.random.RandomState()
        expected.set_state(("MT19937", state, 0, 0, 0.0))
        assert (numbers(np.uint64(key), 2000) == expected.random_sample(2000)).all()
    assert [int(word) for word in random_streams._table()[:3]] == [3156123708, 4045495669, 3823616104]


def test_an_operation_of_a_users_own() -> None:
    pipelines = images_with(sources.UndeclaredNoise())
    loader = midepoch.wrap(sources.make(pipelines), seed=1)
    whole = read(loader)
    assert same(whole, read(midepoch.wrap(sources.make(pipelines, num_workers=2), seed=1)))
    assert loader.capabilities.exact_augmentations
    assert "UndeclaredNoise" in loader.capabilities.exact_augmentations.reason

    adapter.declare(sources.Noise, "sample")
    pipelines = images_with(sources.Noise())
    loaders = [midepoch.wrap(sources.make(pipelines), seed=1, world=World(rank, 2)) for rank in range(2)]
    two = [read(loader, 1)[0] for loader in loaders]
    one = read(midepoch.wrap(sources.make(pipelines), seed=1, world=World()), 2)
    assert torch.equal(torch.cat([two[0][0], two[1][0]]), torch.cat([one[0][0], one[1][0]]))
    assert "Noise" not in loaders[0].capabilities.exact_augmentations.reason
    for wrong, error in (((dict, "sample"), TypeError), ((sources.Noise, "some"), ValueError)):
        with pytest.raises(error):
            adapter.declare(*wrong)


def test_a_torch_module_draws_under_the_batchs_stream() -> None:
    pipelines = images_with(ToTensor(), ToTorchImage(), sources.Jitter())
    pipelines["image"].pop()
    bare = sources.make(pipelines)
    loader = midepoch.wrap(bare, seed=1)
    torch.manual_seed(4)
    before = torch.get_rng_state()
    first, state = read(loader, 2), loader.state_dict()
    assert torch.equal(before, torch.get_rng_state())
    torch.rand(3)
    rest = read(midepoch_at(bare, state))
    assert same(first + rest, read(midepoch.wrap(bare, seed=1)))
    assert not torch.equal(first[0][0] % 1, first[1][0] % 1)
    reason = loader.capabilities.exact_augmentations.reason
    assert "ModuleWrapper" in reason and "same split" in reason


def test_what_an_earlier_batch_left_is_not_handed_out() -> None:
    from ffcv.fields.bytes import BytesDecoder

    pipelines = {"text": [BytesDecoder(), ToTensor()], "label": [IntDecoder(), ToTensor()]}
    for text, label in midepoch.wrap(sources.make(pipelines, sources.file("text"), batches_ahead=1), seed=1):
        for row, number in zip(text, label.flatten().tolist(), strict=True):
            length = 1 + (7 * number) % 23
            assert row.tolist() == [number + 1] * length + [0] * (len(row) - length)


# --- compiling --------------------------------------------------------------------------------------------------------


def compilations(work: Callable[[], Any]) -> int:
    from numba.core.event import install_recorder

    with install_recorder("numba:compile") as recorder:
        work()
    return len(recorder.buffer)


def test_a_second_loader_compiles_nothing() -> None:
    def use(p: float) -> int:
        loader = midepoch.wrap(sources.make(images_with(RandomHorizontalFlip(p))), seed=1)
        return compilations(lambda: read(loader))

    assert use(0.25) > 0
    assert use(0.25) == 0
    assert use(0.75) > 0, "another probability is another kernel"


def test_recompile_follows_an_operation_that_changes() -> None:
    for recompile in (False, True):
        flip = RandomHorizontalFlip(0.0)
        loader = midepoch.wrap(sources.make(images_with(flip), recompile=recompile, order=OrderOption.SEQUENTIAL))
        upright = read(loader)
        flip.flip_prob = 1.0
        mirrored: Batches = [(image.flip(2), label) for image, label in upright]
        assert same(read(loader), mirrored if recompile else upright)
        if recompile:
            assert compilations(lambda loader=loader: read(loader)) == 0  # type: ignore[misc]


def test_functions_that_differ_are_not_exchanged() -> None:
    def make(value: Any) -> Any:
        def enclosing(x: Any) -> Any:
            return x, value

        return enclosing

    def defaults(x: Any, y: int = 1) -> Any:
        return x, y

    def other_defaults(x: Any, y: int = 2) -> Any:
        return x, y

    values = [0, 0.0, -0.0, 1, True, "1", None, (1,), (1, 1), np.array([1]), np.array([1.0]), np.array([[1]]),
              np.float32(1), np.float64(1), np.int64(1), object(), object(), make(3), make(4)]  # fmt: skip
    identities = [kernels.identity(make(value)) for value in values]
    assert len(set(identities)) == len(values)
    assert [kernels.identity(make(value)) for value in values] == identities
    assert kernels.identity(defaults) != kernels.identity(other_defaults)


def test_what_is_wrapped_does_not_disturb_what_is_not() -> None:
    bare = sources.make(order=OrderOption.SEQUENTIAL)
    code, num_threads = bare.code, private.parts().Compiler.num_threads
    wrapped = read(midepoch.wrap(bare))
    assert bare.code is code and private.parts().Compiler.num_threads == num_threads
    assert bare.next_epoch == 0
    assert same(read(bare), wrapped)


# --- order ------------------------------------------------------------------------------------------------------------


def labels(batches: Batches) -> list[int]:
    return [number for batch in batches for number in sources.identify(batch)]


def test_quasi_random_reads_few_pages_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_module, "_OPEN_BYTES", 4 << 21)  # four of its twenty pages
    path = sources.file("pages")
    loader = midepoch.wrap(sources.make({"image": None}, path, order=OrderOption.QUASI_RANDOM, batch_size=5), seed=3)
    epochs = [[int(x) for (label,) in loader for x in label.flatten()] for _ in range(2)]
    assert epochs[0] != epochs[1]
    assert all(sorted(order) == list(range(40)) for order in epochs)
    pages = beton.pages_of(loader.source.reader)
    assert len(set(pages.tolist())) == 20
    for order in epochs:
        seen = pages[order].tolist()
        opened = [len({page for page in seen[: i + 1] if page in seen[i:]}) for i in range(len(seen))]
        assert max(opened) <= 4
        assert seen != sorted(seen)
    # Two ranks read what one reads, which FFCV refuses.
    parts = [midepoch.wrap(loader.source, seed=3, world=World(rank, 2), tail="uneven") for rank in range(2)]
    both = [[int(x) for (label,) in part for x in label.flatten()] for part in parts]
    assert sorted(both[0] + both[1]) == list(range(40))


def test_a_seed_that_ranks_may_not_share_has_to_be_stated() -> None:
    bare = sources.make()
    alone = midepoch.wrap(bare, world=World())
    assert alone.state_dict()["seed"] == bare.seed
    loader = midepoch.wrap(bare, world=World(0, 2))
    with pytest.raises(midepoch.MidepochError, match=r"pass seed= to midepoch\.wrap"):
        next(iter(loader))
    loader.load_state_dict(midepoch.wrap(bare, seed=9, world=World(0, 2)).state_dict())
    assert len(read(loader)) == 3


def test_what_ffcv_would_distribute_is_sharded_by_midepoch() -> None:
    bare = sources.make()
    bare.distributed = True  # as FFCV sets it, which would first ask for a process group
    parts = [read(midepoch.wrap(bare, world=World(rank, 2))) for rank in range(2)]
    assert sorted(labels(parts[0]) + labels(parts[1])) == list(range(sources.SIZE))


def test_capabilities_are_those_of_the_design() -> None:
    mixed = sources.load(pipelines="mixed", kind="raw")
    assert "mixes" in mixed.capabilities.elastic_world.reason
    bare = midepoch.wrap(sources.make(), randomness="none")
    for loader, no in ((sources.load(), []), (mixed, ["elastic_world"]), (bare, ["exact_augmentations"])):
        assert [name for name, promise in vars(loader.capabilities).items() if not promise] == [*no, "skips"]


def test_without_streams_all_is_as_ffcv_has_it() -> None:
    loader = midepoch.wrap(sources.make(order=OrderOption.SEQUENTIAL), randomness="none")
    whole = read(loader)
    assert labels(whole) == list(range(sources.SIZE))
    loader.seek(position=8)
    assert same(read(loader), whole[2:])


# --- threads and buffers ----------------------------------------------------------------------------------------------


def test_a_batch_is_valid_until_the_next_one_copies_stay() -> None:
    bare = sources.make(batches_ahead=1, batch_size=2, order=OrderOption.SEQUENTIAL)
    expected = read(midepoch.wrap(bare))
    assert not same(list(midepoch.wrap(bare)), expected), "FFCV's buffers are used again"
    loader = midepoch.wrap(bare)
    for number, batch in enumerate(loader):
        if number < len(expected) - 1:
            loader.peek()
            time.sleep(0.01)
        assert same([batch], [expected[number]]), "a peek leaves the batch alone"
    assert adapter.hand_out_copies(bare) is bare
    assert same(list(midepoch.wrap(bare)), expected)


# --- devices ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", [0, "cuda:0", torch.device("cuda", 0)], ids=str)
def test_a_device_in_the_pipeline_becomes_the_local_one(device: Any) -> None:
    pipelines = images_with(ToTensor())
    pipelines["image"][-1] = ToDevice(device)
    pipelines["label"].append(ToDevice(device))
    pipelines["none"] = None
    before = {name: list(steps) if steps else steps for name, steps in pipelines.items()}
    local = World(1, 2, local_rank=1)
    mapped = adapter.on_local_device(pipelines, local)
    assert [step.device for step in (mapped["image"][-1], mapped["label"][-1])] == [local.device] * 2
    assert pipelines == before
    assert pipelines["image"][-1].device == device
    assert mapped["image"][0] is pipelines["image"][0]
    if not torch.cuda.is_available():
        del mapped["none"]
        assert len(read(midepoch.wrap(sources.make(mapped), seed=1))) == 6
        assert pipelines == before


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.fixture
def copied(tmp_path: Path) -> Callable[[str], Path]:
    def copy(kind: Any) -> Path:
        path = tmp_path / f"{kind}.beton"
        path.write_bytes(Path(sources.file(kind)).read_bytes())
        return path

    return copy


def test_a_file_that_is_not_whole_is_told_from_one_that_is(copied: Callable[[str], Path]) -> None:
    path = copied("jpeg")
    adapter.check_file(path)
    size = path.stat().st_size
    for left, what in (
        (size - 100, "in the middle of an entry"), (size - 24, "no entry in the table"), (size // 2, "cut off at byte"),
        (100, "cut off at byte 100"), (10, "less than a .beton file's header"),
    ):  # fmt: skip
        os.truncate(path, left)
        with pytest.raises(SourceError, match=what):
            adapter.check_file(path)
    with pytest.raises(SourceError, match="does not exist"):
        adapter.check_file(path.with_name("nothing.beton"))
    path.write_bytes(b"no beton file" * 1000)
    with pytest.raises(SourceError, match="format version"):
        adapter.check_file(path)


@pytest.mark.parametrize("kind", ["raw", "text", "arrays"])
def test_tables_that_do_not_fit_each_other_are_damage(copied: Callable[[str], Path], kind: str) -> None:
    """FFCV would write beyond a batch, read another sample's page, or leave in a sample what memory held."""
    path = copied(kind)
    adapter.check_file(path)
    whole, (header_type, table_type) = path.read_bytes(), (private.parts().HeaderType, private.parts().ALLOC_TABLE_TYPE)
    header = np.frombuffer(whole, header_type, 1).copy()
    table = int(header["alloc_table_ptr"][0])
    entries = np.frombuffer(whole[table:], table_type)
    changes: list[tuple[str, int]] = [("sample_id", 1), ("sample_id", 1 << 40), *[("size", 8)] * (kind != "raw")]
    for name, more in changes:
        changed = entries.copy()
        changed[name][3] += more
        path.write_bytes(whole[:table] + changed.tobytes())
        with pytest.raises(SourceError, match="is damaged"):
            adapter.check_file(path)
    for size in (0, (1 << 21) + 1, 1 << 12):
        header["page_size"] = size
        path.write_bytes(header.tobytes() + whole[header.nbytes :])
        with pytest.raises(SourceError, match=f"pages have {size} bytes"):
            adapter.check_file(path)
    if kind == "arrays":
        path.write_bytes(whole.replace(b"<f4", b"<f2").replace(b'"<f4"', b'"<f2"'))
        assert path.read_bytes() != whole
        with pytest.raises(SourceError, match="is damaged"):
            adapter.check_file(path)
        path.write_bytes(whole.replace(b"<f4", b"<g4"))
        with pytest.raises(SourceError, match="cannot be read"):
            adapter.check_file(path)


@pytest.mark.parametrize("os_cache", [True, False])
def test_a_file_that_changes_or_goes_is_noticed(copied: Callable[[str], Path], os_cache: bool) -> None:
    path = copied("raw")
    loader = midepoch.wrap(sources.make(path=str(path), os_cache=os_cache), seed=1)
    read(loader)
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(SourceError, match="has changed since its Loader was wrapped"):
        read(loader)
    path.unlink()
    with pytest.raises(SourceError, match="no longer exists"):
        read(loader)
    assert (loader.epoch, loader.position) == (1, 0)


def test_a_file_that_goes_in_the_middle_of_an_epoch_is_noticed(
    copied: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(epoch, "_SECONDS_BETWEEN_CHECKS", 0.0)
    path = copied("raw")
    loader = midepoch.wrap(sources.make(path=str(path), batches_ahead=1, batch_size=1), seed=1)
    iterator = iter(loader)
    next(iterator)
    path.unlink()
    with pytest.raises(SourceError, match="no longer exists"):
        for _ in iterator:
            pass
    assert 0 < loader.position < sources.SIZE


def test_a_file_that_differs_beyond_its_fingerprint_is_told(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    """The state's witness has the first sample's bytes. A copy written at another time has the same."""

    def load(path: Path | str) -> Any:
        return midepoch.wrap(sources.make(path=str(path), order=OrderOption.SEQUENTIAL), seed=1)

    original = sources.file("pages")
    changed, copied = tmp_path / "changed.beton", tmp_path / "copied.beton"
    content = bytearray(Path(original).read_bytes())
    copied.write_bytes(content)
    loader = load(original)
    entries = loader.source.reader.alloc_table
    content[int(entries["ptr"][entries["sample_id"] == 0][0]) + 100_000] ^= 1
    changed.write_bytes(content)
    batches = iter(loader)
    states = [loader.state_dict() for count in (2, 8) if len(read(batches, count)) == count]
    loader = load(copied)
    for state, epoch_now in zip(states, (0, 1), strict=True):
        assert (state["epoch"], state["witness"][:4]) == (epoch_now, "0/0/")
        loader.load_state_dict(state)
        next(iter(loader))
        assert loader.state_dict()["witness"].partition("/")[2] == state["witness"].partition("/")[2]
    assert not [each for each in recwarn.list if each.category is midepoch.MidepochWarning]
    loader = load(changed)
    at_boundary = pytest.warns(midepoch.MidepochWarning, match="sample 0, the first of epoch 0, is another one")
    within: Any = pytest.raises(StateMismatchError, match="sample 0, the first of epoch 0, is another one")
    for state, told in zip(states, (within, at_boundary), strict=True):
        loader.load_state_dict(state)
        with told:
            next(iter(loader))


def test_a_state_of_another_file_is_refused() -> None:
    state = midepoch.wrap(sources.make(path=sources.file("raw")), seed=1).state_dict()
    for kind in ("other", "jpeg"):
        loader = midepoch.wrap(sources.make(sources.readme_pipelines(), sources.file(kind)), seed=1)
        with pytest.raises(StateMismatchError, match="file differs"):
            loader.load_state_dict(state)
    with pytest.raises(StateMismatchError, match="order differs"):
        midepoch.wrap(sources.make(indices=[1, 2, 3]), seed=1).load_state_dict(state)


@pytest.mark.parametrize("indices", [[0, 1, 10**6], [0, -1], [0.5]], ids=str)
def test_an_index_that_ffcv_would_die_of_is_refused(indices: list[Any]) -> None:
    with pytest.raises(SourceError, match=r"indices"):
        midepoch.wrap(sources.make(indices=indices))


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.long)])  # compiled anew
def test_a_damaged_jpeg_is_named(copied: Callable[[str], Path], workers: int) -> None:
    path = copied("jpeg")
    reader = sources.make(sources.readme_pipelines(), str(path)).reader
    entry = reader.alloc_table[reader.alloc_table["sample_id"] == 13][0]
    with path.open("r+b") as opened:
        opened.seek(int(entry["ptr"]) + int(entry["size"]) // 2)
        opened.write(bytes(int(entry["size"]) - int(entry["size"]) // 2))
    bare = sources.make(sources.readme_pipelines(), str(path), order=OrderOption.SEQUENTIAL, num_workers=workers)
    loader = midepoch.wrap(bare, seed=1)
    good: list[list[int]] = []
    with pytest.raises(SourceError, match=r"sample 13 of .* at position 13 of epoch 0, cannot be read: its JPEG data"):
        good.extend(map(sources.identify, loader))
    assert good == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert loader.position == 12
    loader.seek(position=16)
    assert len(read(loader)) == 2


def test_an_error_in_the_thread_reaches_the_consumer() -> None:
    fails = sources.Fails(sample=9)
    pipelines = images_with()
    pipelines["label"].append(fails)
    bare = sources.make(pipelines, order=OrderOption.SEQUENTIAL)
    for randomness in ("sample", "none"):  # in the consumer's thread, and in the other
        fails.fails = True
        loader = midepoch.wrap(bare, seed=1, randomness=randomness)
        iterator = iter(loader)
        with pytest.raises(SourceError, match=r"Fails of 'label' failed on positions 8 to 11 .*: OSError: the network"):
            read(iterator)
        assert loader.position == 8
        fails.fails = False
        assert labels(read(iterator)) == list(range(8, sources.SIZE))


@pytest.mark.long  # compiles in a process of its own
def test_example(tmp_path: Path) -> None:
    example = ROOT / "examples" / "ffcv_loader.py"
    done = forking.run([example], modules=forking.IMPORTED, cwd=tmp_path, check=True)
    assert "bit-equal" in done.stdout


def mixing(images: Any, memory: Any, indices: Any) -> Any:
    """As FFCV's mixups draw; of so many numbers that no thread has all of them to itself."""
    np.random.seed(indices[-1])
    shares = np.random.beta(0.4, 0.4, images.shape[0])
    for index in numba.prange(images.shape[0]):
        memory[index] = shares[index]
    return memory


def test_a_whole_array_is_drawn_on_one_thread() -> None:
    """Of several threads each would draw its part from a generator that nobody has set."""
    function: Any = mixing
    kernel = kernels.batchwise(function, loops=True)
    indices, drawn = np.array([5], dtype=np.uint64), []
    before = numba.get_num_threads()
    try:
        for threads in (1, 2, 2, 2):
            numba.set_num_threads(threads)
            drawn.append(kernel(np.uint64(1), np.zeros(200_000), np.zeros(200_000), (indices,)))
    finally:
        numba.set_num_threads(before)
    assert len(np.unique(drawn[0])) > 190_000
    assert all(np.array_equal(drawn[0], each) for each in drawn[1:])


@pytest.mark.parametrize("fault", ["short", "eio", "cut"])
def test_pages_are_read_whole_or_not_at_all(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """FFCV's own threads take what a reading gave for the page, and samples were silently wrong."""
    source = sources.shared("plain", "pages", "random", False, os_cache=False)
    whole, got, calls, real = read(midepoch.wrap(source, seed=1)), list[Any](), itertools.count(1), os.preadv

    def preadv(file: int, buffers: list[memoryview], at: int) -> int:
        number = next(calls)
        if fault == "eio" and number == 6:
            raise OSError(5, "Input/output error")
        if fault == "cut" and number == 6:
            return 0
        half = buffers[0][: 1 + len(buffers[0]) // 2]
        return real(file, [half] if fault == "short" else buffers, at)

    batches = iter(midepoch.wrap(source, seed=1))
    with monkeypatch.context() as patched:
        patched.setattr(os, "preadv", preadv)
        if fault == "short":
            got += read(batches)
            assert next(calls) > 20
        else:
            with pytest.raises(SourceError, match=r"could not be read at byte|was cut off while it was read"):
                for batch in batches:
                    got.append(tuple(part.clone() for part in batch))
            assert same(got, whole[: len(got)]) and len(got) < len(whole)
    assert same(got + read(batches), whole), "the next one is the one that was not given"
