"""webdataset pipelines: its documented idioms, the index, damage, object stores. The laws: test_webdataset_laws."""

from __future__ import annotations

import bz2
import gc
import gzip
import io
import itertools
import json
import logging
import lzma
import os
import random
import shutil
import tarfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import midepoch
import midepoch.reading.tar
from midepoch import SourceError, StateMismatchError, UnsupportedSourceError, World
from support.places import ROOT

wds = pytest.importorskip("webdataset", reason="webdataset is not installed")


from support import forking  # noqa: E402
from support import webdataset_sources as sources  # noqa: E402
from support.object_server import nginx  # noqa: E402
from support.sources import flat  # noqa: E402
from support.webdataset_sources import compress, encoded, make_shards, write_shard  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::midepoch.MidepochWarning"),
]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("MIDEPOCH_CACHE", str(folder))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    return folder


@pytest.fixture
def urls(tmp_path: Path) -> list[str]:
    """20 samples in five shards of unequal sizes, one of them empty."""
    return make_shards(tmp_path / "shards", [4, 6, 0, 7, 3])


def number(sample: dict[str, Any]) -> int:
    return int(sample["cls"])


def plain(urls: list[str] | str, **arguments: Any) -> Any:
    arguments.setdefault("shardshuffle", False)
    return wds.WebDataset(urls, **arguments)


def numbers(urls: list[str] | str, batch: int = 2, **arguments: Any) -> Any:
    """Batches of sample numbers, in order."""
    return plain(urls, **arguments).map(number).batched(batch, collation_fn=list)


def resumed(make: Any, cut: int, make_again: Any = None) -> tuple[list[Any], list[Any]]:
    """What came before the cut, and what another loader gives that goes on from there."""
    with make() as loader:
        iterator = iter(loader)
        head = [next(iterator) for _ in range(cut)]
        state = json.loads(json.dumps(loader.state_dict()))
    with (make_again or make)() as other:
        other.load_state_dict(state)
        return head, list(other)


# --- what a pipeline means --------------------------------------------------------------------------------------------


def test_files_with_odd_names_are_as_in_the_plain_pipeline(tmp_path: Path) -> None:
    names = [
        "__meta__",
        "dir.v1/a.cls",
        "dir.v1/a.b.TXT",
        "nodot",
        ".hidden",
        "__x__/b.cls",
        "b.cls",
        "_c.cls",
    ]
    with tarfile.open(tmp_path / "x.tar", "w", format=tarfile.PAX_FORMAT) as archive:
        for name in [*names, "a.cls", "ö/ü.cls", "long" * 40 + ".cls", "dir/", "d.cls"]:
            info = tarfile.TarInfo(name)
            info.size = 3
            archive.addfile(info, io.BytesIO(b"123"))
    expected = list(plain(str(tmp_path / "x.tar")))
    assert len(expected) == 7
    assert list(midepoch.wrap(plain(str(tmp_path / "x.tar")))) == expected
    for extra in ({"select_files": lambda name: "a" in name}, {"rename_files": lambda name: name.replace("b.", "e.")}):
        expected = list(plain(str(tmp_path / "x.tar"), **extra))
        assert list(midepoch.wrap(plain(str(tmp_path / "x.tar"), **extra))) == expected


def _images(folder: Path) -> str:
    from PIL import Image

    with wds.TarWriter(str(folder / "images-0.tar")) as first, wds.TarWriter(str(folder / "images-1.tar")) as second:
        for index in range(12):
            picture = io.BytesIO()
            Image.fromarray(np.full((4, 4, 3), index, np.uint8)).save(picture, "PNG")
            sample = {"__key__": f"{index:04d}", "png": picture.getvalue(), "cls": str(index).encode()}
            (first if index < 5 else second).write({**sample, "json": b'{"a": 1}', "npy": encoded(np.arange(2))})
    return str(folder / "images-{0..1}.tar")


def augment(image: Any) -> Any:
    return image + float(torch.rand(1))


IDIOMS: dict[str, Any] = {
    "fluid": lambda u: (
        wds.WebDataset(u, shardshuffle=100).shuffle(1000).decode("rgb").to_tuple("png", "cls").map_tuple(augment, None)
    ),
    "map_dict, rename": lambda u: (
        wds.WebDataset(u, shardshuffle=5)
        .decode("rgb")
        .rename(image="jpg;png", label="cls")
        .map_dict(image=augment)
        .to_tuple("image", "label")
    ),
    "pipeline, detshuffle": lambda u: wds.DataPipeline(
        wds.SimpleShardList(u),
        wds.detshuffle(),
        wds.split_by_node,
        wds.split_by_worker,
        wds.tarfile_to_samples(handler=wds.warn_and_continue),
        wds.decode("rgb", handler=wds.warn_and_continue),
        wds.to_tuple("png", "cls", handler=wds.warn_and_continue),
    ),
    "pipeline of a pipeline": lambda u: wds.DataPipeline(
        wds.WebDataset(u, shardshuffle=False).decode("rgb"), wds.to_tuple("png", "cls"), wds.batched(5, partial=False)
    ),
    "DataLoader": lambda u: DataLoader(
        wds.WebDataset(u, shardshuffle=5).shuffle(5).decode("torchrgb").to_tuple("png", "cls"),
        batch_size=4,
        num_workers=2,
    ),
    "select, rsample": lambda u: (
        wds.WebDataset(u, shardshuffle=5)
        .select(lambda sample: sample["__key__"] != "0003")
        .rsample(0.8)
        .decode("rgb")
        .to_tuple("png", "cls")
        .batched(2)
    ),
    "extract_keys": lambda u: (
        wds.WebDataset(u, shardshuffle=5).decode("rgb").compose(wds.extract_keys("*.png", "*.cls")).batched(2)
    ),
    "associate, xdecode": lambda u: wds.DataPipeline(
        wds.WebDataset(u, shardshuffle=5),
        wds.associate({"0001": {"extra": 1}}),
        wds.xdecode(png=lambda stream: len(stream.read()), cls=lambda stream: int(stream.read()), must_decode=False),
        wds.to_tuple("png", "cls"),
    ),
    "nested batches": lambda u: DataLoader(
        wds.WebDataset(u, shardshuffle=5).decode("torchrgb").to_tuple("png", "cls").batched(2), batch_size=3
    ),
    "resampled": lambda u: (
        wds.WebDataset(u, resampled=True, nodesplitter=None)
        .shuffle(5)
        .decode("rgb")
        .to_tuple("png", "cls")
        .batched(4)
        .with_epoch(5)
    ),
    "WebLoader, with_epoch": lambda u: (
        wds.WebLoader(
            wds.WebDataset(u, shardshuffle=5, repeat=True).decode("rgb").to_tuple("png", "cls").batched(4),
            batch_size=None,
            num_workers=1,
        )
        .unbatched()
        .batched(5)
        .with_epoch(4)
    ),
}


def digest(batches: Iterable[Any]) -> list[str]:
    from midepoch.testing import digest as of

    return [of(batch) for batch in batches]


@pytest.mark.parametrize("name", IDIOMS)
def test_idioms_of_the_documentation_resume(tmp_path: Path, name: str) -> None:
    images = _images(tmp_path)

    def make() -> Any:
        return midepoch.wrap(IDIOMS[name](images), seed=5)

    with make() as loader:
        whole, following = digest(loader), digest(loader)
    assert len(whole) >= 2 and (whole != following or name == "pipeline of a pipeline")
    head, rest = resumed(make, 1)
    assert digest(head + rest) == whole


def stream_stage(source: Iterable[Any]) -> Iterator[Any]:
    yield from source


def own_split(source: Iterable[Any]) -> Iterator[Any]:
    yield from source


REFUSED: dict[str, tuple[Any, str]] = {
    "stream_stage": (lambda u: plain(u).compose(stream_stage), "stream_stage may work on the stream as a whole"),
    "pipelinefilter": (lambda u: plain(u).compose(wds.pipelinefilter(stream_stage)()), "stage stream_stage"),
    "slice": (lambda u: plain(u).slice(3), "stage islice takes part of a stream"),
    "info": (lambda u: plain(u).compose(wds.filters.info()), "stage info prints"),
    "cached": (lambda u: plain(u).compose(wds.Cached()), "stage Cached caches"),
    "own_split": (lambda u: plain(u, nodesplitter=own_split), "own_split comes before the shards are opened"),
    "mix": (
        lambda u: wds.DataPipeline(wds.RandomMix([plain(u), plain(u)])),
        "stage RandomMix takes samples of several pipelines in turn: wrap each.*combine",
    ),
    "unbatched": (lambda u: plain(u).unbatched(), "stage unbatched makes several samples of one"),
    "batch stage": (lambda u: plain(u).batched(2).map(len).unbatched(), "stage map works on batches of 2"),
    "no reader": (lambda u: wds.DataPipeline(wds.SimpleShardList(u)), "opens no shards"),
    "keeps open": (
        lambda u: wds.DataPipeline(
            wds.SimpleShardList(u), wds.tariterators.tarfile_to_samples(), wds.shardlists.resampled()
        ),
        "stage resampled",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_understood_is_refused_by_name(urls: list[str], name: str) -> None:
    make, message = REFUSED[name]
    with pytest.raises(UnsupportedSourceError, match=message):
        midepoch.wrap(make(urls))


def test_urls_that_may_be_a_rank_s_own_must_be_told(urls: list[str]) -> None:
    loader = midepoch.wrap(numbers(urls, nodesplitter=None), world=World(0, 2))
    with pytest.raises(UnsupportedSourceError, match="pass shard=True to wrap"):
        next(iter(loader))
    ranks = [midepoch.wrap(numbers(urls, nodesplitter=None), world=World(rank, 2), shard=True) for rank in range(2)]
    assert sorted(flat(flat(rank) for rank in ranks)) == list(range(20))


def test_capabilities_are_those_promised(urls: list[str]) -> None:
    for loader, one_state in (
        (midepoch.wrap(numbers(urls)), True),
        (midepoch.wrap(numbers(urls), refill=True), False),
        (midepoch.wrap(numbers(compress(urls))), False),
    ):
        answers = {field.name: bool(getattr(loader.capabilities, field.name)) for field in fields(loader.capabilities)}
        assert answers == {**dict.fromkeys(answers, True), "rank_independent": one_state, "skips": False}


@pytest.mark.parametrize("kind", ["indexed", "streamed"])
def test_worker_processes_may_be_spawned(urls: list[str], kind: str) -> None:
    shards = urls if kind == "indexed" else compress(urls)
    loader = DataLoader(
        numbers(shards), batch_size=None, num_workers=1, multiprocessing_context="spawn", collate_fn=sources.as_it_is
    )
    with midepoch.wrap(loader, streams=2) if kind == "streamed" else midepoch.wrap(loader) as wrapped:
        assert sorted(flat(wrapped)) == list(range(20))


def test_persistent_workers_go_on_with_the_next_epoch(urls: list[str]) -> None:
    for shards in (urls, compress(urls)):
        dataset = wds.WebDataset(shards, shardshuffle=5).map(number).batched(2, collation_fn=list)
        loader = DataLoader(
            dataset, batch_size=None, num_workers=2, persistent_workers=True, collate_fn=sources.as_it_is
        )
        settings: dict[str, Any] = {} if shards is urls else {"streams": 2}
        with midepoch.wrap(loader, seed=1, **settings) as wrapped:
            first, second = flat(wrapped), flat(wrapped)
        assert sorted(first) == sorted(second) == list(range(20)) and first != second


def test_fewer_shards_than_workers_and_ranks(tmp_path: Path) -> None:
    one = make_shards(tmp_path / "one", [10])
    with pytest.raises(ValueError, match="fewer shards than workers"):
        list(DataLoader(numbers(one), batch_size=None, num_workers=3, collate_fn=sources.as_it_is))
    ranks = []
    for rank in range(2):
        loader = DataLoader(numbers(one, batch=1), batch_size=None, num_workers=3, collate_fn=sources.as_it_is)
        with midepoch.wrap(loader, world=World(rank, 2)) as wrapped:
            ranks.append(flat(wrapped))
    assert list(map(len, ranks)) == [5, 5] and sorted(flat(ranks)) == list(range(10))


# --- how long an epoch is ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["indexed", "streamed"])
def test_with_epoch_counts_batches_and_goes_on_with_new_samples(urls: list[str], kind: str) -> None:
    shards = urls if kind == "indexed" else compress(urls)
    settings: dict[str, Any] = {} if kind == "indexed" else {"streams": 1}
    loader = midepoch.wrap(numbers(shards, batch=2).with_epoch(3), **settings)
    epochs = [list(loader) for _ in range(4)]
    assert [len(epoch) for epoch in epochs] == [3] * 4
    # In order, so that the passes can be told: the data begin again behind sample 19.
    assert flat(flat(epochs)) == [*range(20), *range(4)]
    if kind == "indexed":
        assert len(loader) == 3


def test_with_epoch_counts_for_each_worker(urls: list[str]) -> None:
    for workers, expected in ((0, 3), (2, 6)):
        plain_loader = DataLoader(
            numbers(urls).with_epoch(3), batch_size=None, num_workers=workers, collate_fn=sources.as_it_is
        )
        assert len(list(plain_loader)) == expected
        with midepoch.wrap(plain_loader) as loader:
            assert len(list(loader)) == len(loader) == expected


@pytest.mark.parametrize("kind", ["indexed", "streamed"])
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 3), (3, 2)])
def test_with_epoch_is_finished_in_another_world(tmp_path: Path, kind: str, before: int, after: int) -> None:
    urls = make_shards(tmp_path / "even", [12] * 6)
    shards = urls if kind == "indexed" else compress(urls)

    def make(rank: int, world_size: int) -> Any:
        dataset = wds.WebDataset(shards, shardshuffle=9, nodesplitter=wds.split_by_node).map(number)
        dataset = dataset.batched(2, collation_fn=list).with_epoch(6)
        settings: dict[str, Any] = {} if kind == "indexed" else {"streams": 6}
        return midepoch.wrap(dataset, world=World(rank, world_size), seed=3, **settings)

    begun = [make(rank, before) for rank in range(before)]
    iterators = [iter(loader) for loader in begun]
    first = [next(iterator) for _ in range(2) for iterator in iterators]
    states = [loader.state_dict() for loader in begun]
    whole = flat([*first, *(batch for iterator in iterators for batch in iterator)])
    assert len(whole) == 12 * before
    state = states[0]
    if kind == "streamed" and before > 1:
        parts = [json.loads(each["detail"])["part"] for each in states]
        state = midepoch.reseal({**state, "detail": json.dumps({"parts": parts}, separators=(",", ":"))})
    continued = [make(rank, after) for rank in range(after)]
    for loader in continued:
        loader.load_state_dict(state)
        assert loader.state_dict() == state
    rests = [list(loader) for loader in continued]
    assert len({len(rest) for rest in rests}) == 1  # as many on each rank
    rest = flat(flat(rests))
    assert len(rest) >= len(whole) - len(flat(first))
    if len(rest) == len(whole) - len(flat(first)):
        assert Counter(flat(first)) + Counter(rest) == Counter(whole)
    # The next epoch has this world's own length, and is new.
    following = [list(loader) for loader in continued]
    assert {len(batches) for batches in following} == {6}
    if kind == "indexed" and after * 12 + len(whole) <= 72:
        assert not set(flat(flat(following))) & set(whole)


def test_an_epoch_given_up_passes_by(urls: list[str]) -> None:
    loader = midepoch.wrap(numbers(urls, batch=2).with_epoch(3))
    for batch in loader:
        assert batch == [0, 1]
        break
    assert next(iter(loader)) == [6, 7]


def test_repeat_makes_one_epoch_of_several_passes(urls: list[str]) -> None:
    loader = midepoch.wrap(numbers(urls, batch=8).repeat(2))
    assert flat(loader) == [*range(20), *range(20)]
    assert loader.epoch == 1


def test_an_endless_pipeline_has_no_length_and_resumes(urls: list[str]) -> None:
    def make() -> Any:
        return midepoch.wrap(numbers(urls, batch=3).repeat())

    loader = make()
    with pytest.raises(TypeError, match="no length"):
        len(loader)
    iterator = iter(loader)
    head = [next(iterator) for _ in range(9)]
    state = loader.state_dict()
    other = make()
    other.load_state_dict(state)
    assert list(itertools.islice(other, 5)) == [next(iterator) for _ in range(5)]
    assert flat(head) == [*range(20), *range(7)]


# --- samples that are dropped -----------------------------------------------------------------------------------------


def keeps(kept: Any) -> Any:
    return lambda sample: number(sample) in kept


def selected(urls: list[str], kept: Any, rank: int = 0, world_size: int = 1, batch: int = 2, **settings: Any) -> Any:
    dataset = plain(urls, nodesplitter=wds.split_by_node).select(keeps(kept)).map(number)
    return midepoch.wrap(dataset.batched(batch, collation_fn=list), world=World(rank, world_size), **settings)


def test_dropped_samples_leave_holes_in_their_batches(urls: list[str]) -> None:
    loader = selected(urls, {0, 1, 2, 5, 6, 7, 15}, batch=4)
    batches, positions = [], []
    for batch in loader:
        batches.append(batch)
        positions.append((loader.epoch, loader.position))
    # Positions 8 to 11 are all dropped, and so is the end.
    assert batches == [[0, 1, 2], [5, 6, 7], [15]]
    assert positions == [(0, 4), (0, 8), (0, 16)]
    assert (loader.epoch, loader.position) == (1, 0)


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_resume_among_holes_is_exact(urls: list[str], cut: int) -> None:
    kept = {0, 1, 2, 5, 6, 7, 15}
    head, rest = resumed(lambda: selected(urls, kept, batch=4), cut)
    whole = [[0, 1, 2], [5, 6, 7], [15]]
    # Nothing is left behind the last batch, so the next epoch follows.
    assert head + rest == (whole if cut < 3 else whole * 2)


def test_states_of_batches_in_flight_are_right_among_holes(urls: list[str]) -> None:
    loader = selected(urls, {0, 5, 15, 16}, batch=4)
    iterator = iter(loader)
    states = [loader.state_dict(), *(loader.state_dict() for _ in itertools.islice(iterator, 3))]
    for back in range(4):
        assert loader.state_dict(in_flight=back) == states[3 - back]
    assert [state["position"] for state in states] == [0, 4, 8, 16]
    assert loader.peek() == [16] and loader.state_dict() == states[3]


@pytest.mark.parametrize("world_size", [2, 3])
def test_no_rank_alone_is_left_without_a_batch(urls: list[str], world_size: int) -> None:
    # Samples 4 to 11 are dropped: two whole steps of two ranks, and a rank's whole batch in other steps.
    kept = {0, 1, 2, 3, 12, 17}
    ranks = [list(selected(urls, kept, rank, world_size)) for rank in range(world_size)]
    assert len({len(rank) for rank in ranks}) == 1
    assert all(batch for rank in ranks for batch in rank)
    assert set(flat(flat(ranks))) == kept
    # Only what stands in for an empty batch comes twice.
    alone = flat(selected(urls, kept))
    assert sorted(alone) == sorted(kept)


@pytest.mark.parametrize("kind", ["uncompressed", "compressed"])
def test_refill_keeps_batches_full_and_resumes(urls: list[str], kind: str) -> None:
    """Shards are read as streams, also those that could be indexed."""
    shards = urls if kind == "uncompressed" else compress(urls)
    kept = set(range(0, 20, 3))  # seven of them

    def make() -> Any:
        return selected(shards, kept, batch=4, refill=True, streams=1)

    loader = make()
    epochs = [list(loader) for _ in range(3)]
    assert epochs == [[[0, 3, 6, 9], [12, 15, 18]]] * 3
    assert "refill=True was stated" in loader.capabilities.constant_time_resume.reason
    for cut in (1, 2):
        head, rest = resumed(make, cut)
        assert head + rest == flat(epochs[:cut])
    whole = plain(shards).map(number).select(kept.__contains__).batched(4, collation_fn=list, partial=False)
    assert list(midepoch.wrap(whole, refill=True)) == [[0, 3, 6, 9]]


def test_refill_says_where_nothing_is_kept(urls: list[str]) -> None:
    with pytest.raises(SourceError, match="the stages dropped every sample of a whole pass"):
        next(iter(midepoch.wrap(plain(urls).select(lambda sample: False).with_epoch(3), refill=True)))
    assert list(selected(urls, (), refill=True)) == []


def failing(sample: dict[str, Any]) -> int:
    if number(sample) % 4 == 1:
        raise ValueError("no good")
    return number(sample)


def test_a_handler_that_goes_on_leaves_holes(urls: list[str]) -> None:
    def make(handler: Any) -> Any:
        return midepoch.wrap(plain(urls).map(failing, handler=handler).batched(4, collation_fn=list))

    assert list(make(wds.ignore_and_continue)) == [[i, i + 2, i + 3] for i in range(0, 20, 4)]
    head, rest = resumed(lambda: make(wds.ignore_and_continue), 2)
    assert flat(head + rest) == [i for i in range(20) if i % 4 != 1]
    with pytest.raises(ValueError, match="no good"):
        list(make(wds.reraise_exception))


class Draws:
    """A stage that makes its generator when it first draws from it."""

    generator: random.Random | None = None

    def __call__(self, sample: Any) -> Any:
        if self.generator is None:
            self.generator = random.Random()
        sample["cls"] = b"%d" % (100 * number(sample) + int(50 * self.generator.random()))  # in place
        return sample


def drawing(urls: list[str], kind: str) -> Any:
    dataset = plain(urls if kind == "indexed" else compress(urls)).map(Draws()).map(number)
    settings: dict[str, Any] = {} if kind == "indexed" else {"streams": 1}
    return midepoch.wrap(dataset.batched(2, collation_fn=list), **settings)


@pytest.mark.parametrize("kind", ["indexed", "streamed"])
def test_a_generator_made_at_the_first_batch_is_exact(urls: list[str], kind: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", midepoch.MidepochWarning)
        loader = drawing(urls, kind)
        epochs = [list(loader), list(loader)]
        assert epochs[0] != epochs[1]
        assert flat([each // 100 for each in batch] for batch in epochs[0]) == list(range(20))
        for cut in range(1, 10):
            head, rest = resumed(lambda: drawing(urls, kind), cut)
            assert head + rest == epochs[0]


# --- how well it mixes ------------------------------------------------------------------------------------------------


def _mixing(order: list[int], shard_size: int) -> tuple[float, float]:
    """Shards in 64 samples in a row, on average, and the share of neighbours in a shard that stay within 64."""
    shards = np.array(order) // shard_size
    windows = [len(set(shards[start : start + 64])) for start in range(0, len(order) - 63, 64)]
    place = np.argsort(order)
    close = np.abs(np.diff(place)) < 64
    within = np.arange(len(order) - 1) % shard_size != shard_size - 1
    return float(np.mean(windows)), float(close[within].mean())


def test_it_mixes_at_least_as_well_as_webdataset_s_buffer(tmp_path: Path) -> None:
    urls = make_shards(tmp_path / "many", [100] * 40)

    def make() -> Any:
        return wds.WebDataset(urls, shardshuffle=100, seed=1).shuffle(500, seed=1).map(number)

    theirs, ours = _mixing(list(make()), 100), _mixing(list(midepoch.wrap(make(), seed=1)), 100)
    assert ours[0] >= theirs[0]
    assert ours[1] <= theirs[1]


# --- the index --------------------------------------------------------------------------------------------------------


def index_files(cache: Path) -> list[Path]:
    return sorted(cache.glob("webdataset-*/*.index"))


def counted_scans(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    from midepoch.adapters.webdataset import index

    scanned: list[str] = []
    original = midepoch.reading.tar.index_tar

    def scan(archive: Any, name: str) -> Any:
        scanned.append(name)
        return original(archive, name)

    monkeypatch.setattr(index, "index_tar", scan)
    return scanned


def test_an_index_is_built_anew_where_a_shard_has_changed(
    urls: list[str], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scanned = counted_scans(monkeypatch)
    assert flat(midepoch.wrap(numbers(urls))) == list(range(20))
    assert sorted(scanned) == sorted(urls) and len(index_files(cache)) == 5
    assert flat(midepoch.wrap(numbers(urls))) == list(range(20))
    assert len(scanned) == 5
    write_shard(Path(urls[1]), range(100, 103))
    assert flat(midepoch.wrap(numbers(urls))) == [*range(4), 100, 101, 102, *range(10, 20)]
    assert scanned[5:] == [urls[1]]
    assert not list(cache.glob("webdataset-*/*.part"))


@pytest.mark.parametrize("damage", ["cut", "garbage", "flipped", "empty", "other version"])
def test_an_unreadable_index_is_built_anew(
    urls: list[str], cache: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    midepoch.wrap(numbers(urls))
    for file in index_files(cache):
        data = file.read_bytes()
        flipped = data[:-1] + bytes([data[-1] ^ 1]) if data[-1:] != b"\n" else data
        changed = {
            "cut": data[:-5],
            "garbage": b"garbage",
            "flipped": flipped,
            "empty": b"",
            "other version": data.replace(b'"format": 1', b'"format": 0'),
        }
        file.write_bytes(changed[damage])
    assert flat(midepoch.wrap(numbers(urls))) == list(range(20))
    before = [file.stat().st_mtime_ns for file in index_files(cache)]
    assert flat(midepoch.wrap(numbers(urls))) == list(range(20))
    assert [file.stat().st_mtime_ns for file in index_files(cache)] == before


# --- shards that change -----------------------------------------------------------------------------------------------


def test_shards_added_removed_or_replaced_are_refused(urls: list[str], tmp_path: Path) -> None:
    loader = midepoch.wrap(numbers(urls))
    iterator = iter(loader)
    head = [next(iterator) for _ in range(4)]
    state = loader.state_dict()
    extra = make_shards(tmp_path / "extra", [2])
    for changed in ([*urls, *extra], urls[:-1], [*urls[:-1], *extra], urls[::-1]):
        with pytest.raises(StateMismatchError, match=r"shards differs.*5 shards of 20 samples"):
            midepoch.wrap(numbers(changed)).load_state_dict(state)
    # As many samples of the same sizes, but other files.
    write_shard(Path(urls[0]), range(6, 10))
    with pytest.raises(StateMismatchError, match="shards differs"):
        midepoch.wrap(numbers(urls)).load_state_dict(state)
    # Moved elsewhere they are the same data.
    write_shard(Path(urls[0]), range(4))
    moved = make_shards(tmp_path / "moved", [4, 6, 0, 7, 3])
    before = midepoch.wrap(numbers(moved))
    iterator = iter(before)
    head = [next(iterator) for _ in range(4)]
    state = before.state_dict()
    shutil.copytree(tmp_path / "moved", tmp_path / "again")
    after = midepoch.wrap(numbers([url.replace("/moved/", "/again/") for url in moved]))
    after.load_state_dict(state)
    assert flat([*head, *after]) == list(range(20))


def test_a_shard_that_changes_while_it_is_read_is_an_error(urls: list[str]) -> None:
    loader = midepoch.wrap(numbers(urls))
    write_shard(Path(urls[3]), range(100, 120))
    batches = []
    with pytest.raises(SourceError, match=f"{urls[3]} has changed since it was indexed"):
        batches += list(loader)
    assert loader.position == 10
    loader = midepoch.wrap(numbers(urls))
    Path(urls[3]).unlink()
    with pytest.raises(SourceError, match="cannot be opened"):
        list(loader)


def test_a_compressed_shard_with_a_wrong_checksum_is_an_error(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.tar", range(10))
    data = bytearray(gzip.compress((tmp_path / "a.tar").read_bytes(), mtime=0))
    data[-6] ^= 255
    (tmp_path / "a.tgz").write_bytes(data)
    dataset = wds.WebDataset([str(tmp_path / "a.tgz")], shardshuffle=False).map(sources.Reading()).batched(2)
    with pytest.raises(SourceError, match=r"a\.tgz"):
        list(midepoch.wrap(dataset, seed=0))


def test_a_missing_shard_is_an_error_unless_the_handler_goes_on(
    urls: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    Path(urls[1]).unlink()
    with pytest.raises(SourceError, match=f"{urls[1]} cannot be opened"):
        midepoch.wrap(numbers(urls))
    with caplog.at_level(logging.WARNING, "midepoch"):
        loader = midepoch.wrap(numbers(urls, handler=wds.ignore_and_continue))
    assert flat(loader) == [*range(4), *range(10, 20)]
    assert f"{urls[1]}: the shard is lost" in caplog.text


# --- damage -----------------------------------------------------------------------------------------------------------


def _damage(path: Path, kind: str) -> int:
    """Damage a shard at its fifth sample; the number of samples that are whole, as far as can be known."""
    from midepoch.reading.tar import index_tar

    index = index_tar(path)
    data = bytearray(path.read_bytes())
    header, content = int(index.headers[8]), int(index.offsets[8])  # two files a sample
    if kind == "truncated in the data":
        data = data[: content + 1]
    elif kind == "cut between files":
        data = data[: int(index.headers[9])]
    elif kind == "cut between samples":
        data = data[:header]
    elif kind == "corrupt header":
        data[content - 500 : content - 400] = bytes(100)
    elif kind == "no end marker":
        data = data[: index.end]
    path.write_bytes(data)
    return {"no end marker": 7, "cut between samples": 4}.get(kind, 4)


DAMAGE = ["truncated in the data", "cut between files", "cut between samples", "corrupt header", "no end marker"]


@pytest.mark.parametrize("way", ["indexed", "streamed", "piped"])
@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_an_error_that_names_shard_and_offset(tmp_path: Path, kind: str, way: str) -> None:
    urls = make_shards(tmp_path / "bad", [4, 7, 3])
    _damage(Path(urls[1]), kind)
    shards = {"indexed": urls, "streamed": compress(urls), "piped": [f"pipe:cat {url}" for url in urls]}[way]
    with pytest.raises(SourceError, match=r"shard-0001.* is damaged at byte \d+"):
        list(midepoch.wrap(numbers(shards)))


@pytest.mark.parametrize("way", ["indexed", "streamed"])
@pytest.mark.parametrize("kind", DAMAGE)
def test_a_handler_that_goes_on_loses_the_shards_rest(
    tmp_path: Path, kind: str, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    urls = make_shards(tmp_path / "bad", [4, 7, 3], size=40)
    whole = _damage(Path(urls[1]), kind)
    shards = urls if way == "indexed" else compress(urls)
    with caplog.at_level(logging.WARNING, "midepoch"):
        dataset = plain(shards, handler=wds.ignore_and_continue)
        settings: dict[str, Any] = {} if way == "indexed" else {"streams": 1}
        samples = list(midepoch.wrap(dataset, **settings))
    assert [number(sample) for sample in samples] == [*range(4), *range(4, 4 + whole), *range(11, 14)]
    assert all(len(sample["bin"]) == 40 for sample in samples)
    assert "shard-0001" in caplog.text and "lost" in caplog.text
    with pytest.raises(SourceError, match="is damaged at byte"):  # nothing of this was kept for other handlers
        list(midepoch.wrap(plain(shards), **settings))


# --- streams ----------------------------------------------------------------------------------------------------------


def streamed(urls: list[str], rank: int = 0, world_size: int = 1, workers: int = 0, **settings: Any) -> Any:
    dataset = wds.WebDataset(urls, shardshuffle=9, nodesplitter=wds.split_by_node).shuffle(3).map(sources.Reading())
    loader = DataLoader(dataset.batched(3, collation_fn=sources.stack), batch_size=None, num_workers=workers)
    return midepoch.wrap(loader, seed=2, world=World(rank, world_size), tail="uneven", **settings)


def test_streams_of_unequal_length_give_every_sample_once(urls: list[str]) -> None:
    shards = compress(urls)
    for streams in (1, 2, 3, 5, 8):
        loader = streamed(shards, streams=streams)
        epochs = [sorted(flat(sources.identify(batch) for batch in loader)) for _ in range(2)]
        assert epochs == [list(range(20))] * 2


PACKED: dict[str, Callable[[bytes], bytes]] = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}


@pytest.mark.parametrize("kind", [*PACKED, "pipe", "pipe of gz"])
def test_every_kind_of_stream_resumes_at_every_cut(urls: list[str], kind: str) -> None:
    shards = urls
    if kind != "pipe":
        name = kind.rpartition(" ")[2]
        shards = [f"{url}.{name}" for url in urls]
        for url, shard in zip(urls, shards, strict=True):
            Path(shard).write_bytes(PACKED[name](Path(url).read_bytes()))
    if kind.startswith("pipe"):
        shards = [f"pipe:cat {shard}" for shard in shards]
    whole = digest(streamed(shards, streams=2))
    for cut in range(1, len(whole)):
        head, rest = resumed(lambda: streamed(shards, streams=2), cut)
        assert digest(head + rest) == whole


def test_streams_must_divide_among_ranks_and_workers(urls: list[str]) -> None:
    shards = compress(urls)
    with pytest.raises(UnsupportedSourceError, match=r"4 streams cannot be shared by 3 ranks x 1 workers.*streams=3"):
        next(iter(streamed(shards, 0, 3, streams=4)))
    with pytest.raises(UnsupportedSourceError, match=r"3 streams cannot be shared by 1 ranks x 2 workers"):
        next(iter(streamed(shards, workers=2, streams=3)))
    loader = streamed(shards, streams=4)
    next(iter(loader))
    with pytest.raises(StateMismatchError, match=r"4 streams cannot be shared by 1 ranks x 3 workers"):
        streamed(shards, workers=3, streams=4).load_state_dict(loader.state_dict())
    with pytest.raises(StateMismatchError, match=r"streams differs.*'4'.*'2'"):
        streamed(shards, streams=2).load_state_dict(loader.state_dict())


def test_equal_counts_on_several_ranks_need_with_epoch(urls: list[str]) -> None:
    loader = midepoch.wrap(numbers(compress(urls), nodesplitter=wds.split_by_node), world=World(0, 2), streams=2)
    with pytest.raises(UnsupportedSourceError, match=r"use with_epoch\(n\).*tail='uneven'"):
        next(iter(loader))


# --- object stores ----------------------------------------------------------------------------------------------------


def remote(base: str, urls: list[str], workers: int, **arguments: Any) -> Any:
    shards = [f"{base}/{Path(url).name}" for url in urls]
    dataset = wds.WebDataset(shards, shardshuffle=5, **arguments).shuffle(9).map(sources.Reading())
    loader = DataLoader(dataset.batched(3, collation_fn=sources.stack), batch_size=None, num_workers=workers)
    return midepoch.wrap(loader, seed=4)


def test_shards_in_an_object_store_are_read_by_range(tmp_path: Path, cache: Path) -> None:
    pytest.importorskip("fsspec")
    pytest.importorskip("aiohttp")
    urls = make_shards(tmp_path / "shards", [5, 0, 6, 4], size=3000)
    with nginx(tmp_path / "nginx", tmp_path / "shards") as base:
        with remote(base, urls, 0) as loader:
            assert loader.capabilities.rank_independent
            whole = digest(loader)
        assert sorted(flat(sources.identify(batch) for batch in remote(base, urls, 0))) == list(range(15))
        assert len(index_files(cache)) == 4
        log = (tmp_path / "nginx" / "access.log").read_text()
        assert " 206 " in log
        for before, after in ((0, 2), (2, 0)):
            made = [lambda workers=workers: remote(base, urls, workers) for workers in (before, after)]
            head, rest = resumed(made[0], 2, made[1])
            assert digest(head + rest) == whole
        # The local files give the same, so a state may move with the data.
        with remote(str(tmp_path / "shards"), urls, 0) as local:
            assert digest(local) == whole
        # Behind the first indexing no shard is fetched whole.
        sent = [int(line.split('" ')[1].split()[1]) for line in log.splitlines() if " 206 " in line]
        assert len(sent) > 15


def test_an_object_that_is_replaced_while_it_is_read_is_an_error(tmp_path: Path, cache: Path) -> None:
    """By one of the same size, so that nothing but its etag tells."""
    pytest.importorskip("fsspec")
    urls = make_shards(tmp_path / "shards", [9, 9])
    size = Path(urls[0]).stat().st_size
    with nginx(tmp_path / "nginx", tmp_path / "shards") as base:
        loader = remote(base, urls, 0)
        whole = digest(remote(base, urls, 0))
        batches = iter(loader)
        got = [next(batches)]
        state, untouched = loader.state_dict(), Path(urls[0]).read_bytes()
        write_shard(Path(urls[0]), range(50, 59))
        assert Path(urls[0]).stat().st_size == size
        os.utime(urls[0], (1, 1))  # nginx makes an etag of this and the size
        with pytest.raises(SourceError, match=r"0\.tar has changed since it was indexed: wrap the pipeline again"):
            got.extend(batches)
        assert digest(got) == whole[: len(got)]
        assert loader.state_dict()["position"] >= state["position"]
        Path(urls[0]).write_bytes(untouched)
        with remote(base, urls, 0) as again:
            again.load_state_dict(state)
            assert digest(again) == whole[1:]


def test_a_server_that_gives_no_parts_is_streamed(tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    if shutil.which("curl") is None:
        pytest.skip("curl, with which webdataset reads http, is not installed")
    urls = make_shards(tmp_path / "shards", [5, 6])
    with nginx(tmp_path / "nginx", tmp_path / "shards", ranges=False) as base:
        loader = remote(base, urls, 0)
        assert not loader.capabilities.rank_independent
        assert sorted(flat(sources.identify(batch) for batch in loader)) == list(range(11))
        head, rest = resumed(lambda: remote(base, urls, 0), 2)
        assert sorted(flat(sources.identify(batch) for batch in head + rest)) == list(range(11))


# --- the example ------------------------------------------------------------------------------------------------------


def test_the_example_runs_and_resumes(tmp_path: Path) -> None:
    example = ROOT / "examples" / "webdataset_pipeline.py"
    assert len(example.read_text().splitlines()) <= 60
    run = forking.run([example, tmp_path], check=True)
    assert "every sample once: True" in run.stdout


_read = itertools.count()


def collected(sample: Any) -> Any:
    if next(_read) % 5 == 0:
        gc.collect()  # as it happens in any worker process sooner or later
    return sample


def test_workers_leave_their_parents_connections_alone(tmp_path: Path, cache: Path) -> None:
    pytest.importorskip("fsspec")
    pytest.importorskip("aiohttp")
    urls = make_shards(tmp_path / "shards", [5, 6, 4], size=3000)
    with nginx(tmp_path / "nginx", tmp_path / "shards") as base:
        whole = None
        for workers in (0, 2, 0):
            dataset = wds.WebDataset([f"{base}/{Path(url).name}" for url in urls], shardshuffle=5).map(collected)
            dataset = dataset.map(sources.Reading())
            loader = DataLoader(dataset.batched(3, collation_fn=sources.stack), batch_size=None, num_workers=workers)
            with midepoch.wrap(loader, seed=4) as wrapped:
                batches = digest(wrapped)
            whole = whole or batches
            assert batches == whole
