"""webdataset pipelines: its documented idioms, stages of the user's own, epochs, streams; with test_webdataset_laws."""

from __future__ import annotations

import bz2
import gzip
import io
import itertools
import json
import lzma
import multiprocessing
import random
import tarfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

import midepoch
from midepoch import SourceError, StateMismatchError, World
from midepoch import UnsupportedSourceError as Unsupported
from support.places import ROOT

wds = pytest.importorskip("webdataset", reason="webdataset is not installed")


from support import commands  # noqa: E402
from support import own_shards as own  # noqa: E402
from support import webdataset_sources as sources  # noqa: E402
from support.sources import every_place, flat, under_other_seeds  # noqa: E402
from support.webdataset_sources import compress, encoded, in_workers, make_shards, number, numbers, plain  # noqa: E402

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.usefixtures("cache")]


@pytest.fixture(params=["indexed", "streamed"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def of_kind(urls: list[str], kind: str) -> list[str]:
    if kind == "indexed":
        return urls
    return [f"{url}.gz" for url in urls] if Path(f"{urls[-1]}.gz").exists() else compress(urls)


def streams(kind: str, count: int) -> dict[str, Any]:
    return {} if kind == "indexed" else {"streams": count}


def noisy(sample: dict[str, Any]) -> tuple[int, float]:
    return int(sample["cls"]), random.random()


def pipeline(*stages: Any, reading: Any = None, function: Any = number, batch: int = 3, partial: bool = True) -> Any:
    reads = wds.tarfile_to_samples(handler=own.go_on) if reading is None else reading
    return wds.DataPipeline(*stages, reads, wds.map(function), wds.batched(batch, collation_fn=list, partial=partial))


# --- every place ------------------------------------------------------------------------------------------------------


def images(folder: Path) -> str:
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


def decoded(urls: str, **arguments: Any) -> Any:
    return wds.WebDataset(urls, **{"shardshuffle": 5, **arguments}).decode("rgb")


IDIOMS: dict[str, Any] = {
    "fluid": lambda u: (
        wds.WebDataset(u, shardshuffle=100).shuffle(1000).decode("rgb").to_tuple("png", "cls").map_tuple(augment, None)
    ),
    "map_dict, rename": lambda u: (
        decoded(u).rename(image="jpg;png", label="cls").map_dict(image=augment).to_tuple("image", "label")
    ),
    "pipeline, detshuffle": lambda u: wds.DataPipeline(
        wds.SimpleShardList(u), wds.detshuffle(), wds.split_by_node, wds.split_by_worker,
        wds.tarfile_to_samples(handler=wds.warn_and_continue), wds.decode("rgb", handler=wds.warn_and_continue),
        wds.to_tuple("png", "cls", handler=wds.warn_and_continue),
    ),
    "pipeline of a pipeline": lambda u: wds.DataPipeline(
        decoded(u, shardshuffle=False), wds.to_tuple("png", "cls"), wds.batched(5, partial=False)
    ),
    "DataLoader": lambda u: DataLoader(
        wds.WebDataset(u, shardshuffle=5).shuffle(5).decode("torchrgb").to_tuple("png", "cls"), 4, num_workers=2
    ),
    "select, rsample": lambda u: (
        decoded(u).select(lambda sample: sample["__key__"] != "0003").rsample(0.8).to_tuple("png", "cls").batched(2)
    ),
    "extract_keys": lambda u: decoded(u).compose(wds.extract_keys("*.png", "*.cls")).batched(2),
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
        wds.WebDataset(u, resampled=True, nodesplitter=None).shuffle(5).to_tuple("png", "cls").batched(4).with_epoch(5)
    ),
    "WebLoader, with_epoch": lambda u: (
        wds.WebLoader(decoded(u, repeat=True).to_tuple("png", "cls").batched(4), batch_size=None, num_workers=1)
        .unbatched().batched(5).with_epoch(4)
    ),
}  # fmt: skip


def selected(urls: list[str], kept: Any, rank: int = 0, world_size: int = 1, batch: int = 2, **settings: Any) -> Any:
    dataset = plain(urls, nodesplitter=wds.split_by_node).map(number).select(lambda each: each in kept)
    return midepoch.wrap(dataset.batched(batch, collation_fn=list), world=World(rank, world_size), **settings)


def failing(sample: dict[str, Any]) -> int:
    if (found := number(sample)) % 4 == 1:
        raise ValueError("no good")
    return found


class Draws:
    """A stage that makes its generator when it first draws from it."""

    generator: random.Random | None = None

    def __call__(self, sample: Any) -> Any:
        if self.generator is None:
            self.generator = random.Random()
        sample["cls"] = b"%d" % (100 * number(sample) + int(50 * self.generator.random()))  # in place
        return sample


def drawing(urls: list[str], kind: str) -> Any:
    dataset = plain(of_kind(urls, kind)).map(Draws()).map(number)
    return midepoch.wrap(dataset.batched(2, collation_fn=list), **streams(kind, 1))


PACKED: dict[str, Callable[[bytes], bytes]] = {
    "gz": partial(gzip.compress, mtime=0),
    "bz2": bz2.compress,
    "xz": lzma.compress,
}


def packed(urls: list[str], kind: str) -> list[str]:
    name = kind.rpartition(" ")[2]
    shards = urls if kind == "pipe" else [f"{url}.{name}" for url in urls]
    if kind != "pipe":
        for url, shard in zip(urls, shards, strict=True):
            Path(shard).write_bytes(PACKED[name](Path(url).read_bytes()))
    return [f"pipe:cat {shard}" for shard in shards] if kind.startswith("pipe") else shards


def streamed(urls: list[str], rank: int = 0, world_size: int = 1, workers: int = 0, **settings: Any) -> Any:
    dataset = wds.WebDataset(urls, shardshuffle=9, nodesplitter=wds.split_by_node).shuffle(3).map(sources.Reading())
    loader = DataLoader(dataset.batched(3, collation_fn=sources.stack), batch_size=None, num_workers=workers)
    return midepoch.wrap(loader, seed=2, world=World(rank, world_size), tail="uneven", **settings)


def read_again(urls: list[str], seed: int) -> Any:
    """A reader of the user's own, and webdataset's shuffles with this seed."""
    shards = (wds.SimpleShardList(urls), wds.shuffle(9, seed=seed), wds.split_by_worker)
    samples = (own.samples_of_each_shard, wds.shuffle(5, seed=seed), wds.map(noisy))
    return wds.DataPipeline(*shards, *samples, wds.batched(3, collation_fn=list))


def mixed(mix: Any, urls: list[str], seed: int) -> Any:
    parts = [wds.WebDataset(half, shardshuffle=9, seed=seed).map(noisy) for half in (urls[:3], urls[3:])]
    return wds.DataPipeline(mix(parts, longest=True), wds.batched(3, collation_fn=list))


READ_AGAIN: dict[str, Callable[[list[str], int], Any]] = {
    "own reader": read_again,
    "own reader, in workers": lambda urls, seed: in_workers(read_again(urls, seed), 2),
    "RandomMix": partial(mixed, wds.RandomMix),
    "RoundRobin": partial(mixed, wds.RoundRobin),
}


def trained(urls: list[str], kind: str, workers: int) -> Any:
    """As open_clip builds it: shards shuffled by an epoch that processes share, then divided, then read."""
    shuffle = own.EpochShuffle(2000, 500, epoch=own.SharedEpoch(3))
    stages = (wds.SimpleShardList(of_kind(urls, kind)), shuffle, wds.split_by_node, wds.split_by_worker)
    return midepoch.wrap(in_workers(pipeline(*stages, partial=False).with_epoch(4), workers), seed=5)


def refilled(shards: list[str]) -> Any:
    """Full batches of the seven samples that are kept."""
    return selected(shards, set(range(0, 20, 3)), batch=4, refill=True, streams=1)


def without_rests(urls: list[str], count: int) -> Any:
    dataset = pipeline(wds.SimpleShardList(of_kind(urls, "streamed")), partial=False)
    return midepoch.wrap(dataset, seed=1, streams=count)


Wrapped = Callable[[list[str]], Any]


def replayed(name: str) -> Wrapped:
    """By the line that the refusal names."""
    return lambda urls: midepoch.wrap(lambda: READ_AGAIN[name](urls, random.getrandbits(32)), seed=1)


def of_lists(made: Callable[[list[str]], Any], kind: str, epoch: int | None = None) -> Wrapped:
    """A list of shards by itself, or with what draws from it."""

    def make(urls: list[str]) -> Any:
        dataset = pipeline(*made(of_kind(urls, kind)), batch=2)
        return midepoch.wrap(dataset if epoch is None else dataset.with_epoch(epoch), seed=5)

    return make


FINITE: dict[str, Callable[[list[str]], Any]] = {
    "resampled": lambda urls: [wds.SimpleShardList(urls), wds.resampled(5)],
    "ResampledShards": lambda urls: [wds.ResampledShards(urls, nshards=5)],
    "DrawnShards": lambda urls: [own.DrawnShards(urls, nshards=5)],
}
ENDLESS: dict[str, Callable[[list[str]], Any]] = {
    "drawn": lambda urls: [own.DrawnShards(urls, epoch=own.SharedEpoch(2))],
    "drawn by weights": lambda urls: [own.DrawnShards(urls, [1, 2, 0, 1, 1.5])],
    "repeated": lambda urls: [own.RepeatedShards(urls)],
}
KEPT = {0, 1, 2, 5, 6, 7, 15}
IN_ORDER = ("samples that are dropped", "a handler", "refill", "no empty pass", "pipeline of a pipeline")
KINDS = ("indexed", "streamed")
PLACES: dict[str, Wrapped] = {
    "samples that are dropped": lambda urls: selected(urls, KEPT, batch=4),
    "a handler that goes on": lambda urls: midepoch.wrap(
        plain(urls).map(failing, handler=wds.ignore_and_continue).batched(4, collation_fn=list)
    ),
    **{f"refill, {kind}": lambda urls, kind=kind: refilled(of_kind(urls, kind)) for kind in KINDS},  # type: ignore[misc]
    **{f"a generator made late, {kind}": partial(drawing, kind=kind) for kind in KINDS},
    **{f"a stream of {kind}": lambda urls, kind=kind: streamed(packed(urls, kind), streams=2)  # type: ignore[misc]
       for kind in (*PACKED, "pipe", "pipe of gz")},
    **{f"an own shuffle of shards, {kind}, {workers} workers": partial(trained, kind=kind, workers=workers)
       for kind in KINDS for workers in (0, 2)},
    **{f"{name}, {kind}": of_lists(made, kind) for name, made in FINITE.items() for kind in KINDS},
    **{f"{name}, {kind}": of_lists(made, kind, 12) for name, made in ENDLESS.items() for kind in KINDS},
    **{f"no empty pass, {count} streams": partial(without_rests, count=count) for count in (1, 2, 4)},
    **{name: replayed(name) for name in READ_AGAIN},
}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> str:
    return images(tmp_path_factory.mktemp("images"))


@pytest.mark.parametrize("name", [*PLACES, *IDIOMS])
@pytest.mark.filterwarnings("error::midepoch.MidepochWarning", "ignore:.*is read again from its start")
def test_every_place_of_two_epochs_is_continued_from(name: str, urls: list[str], pictures: str) -> None:
    def make() -> Any:
        return midepoch.wrap(IDIOMS[name](pictures), seed=5) if name in IDIOMS else PLACES[name](urls)

    with make() as loader:
        processes = getattr(loader.source, "num_workers", 0)
    first, second = every_place(make, (1, 2, 5) if processes else ())
    assert len(first) >= 2 and (first == second) == name.startswith(IN_ORDER)


# --- what a pipeline means --------------------------------------------------------------------------------------------


def test_files_with_odd_names_are_as_in_the_plain_pipeline(tmp_path: Path) -> None:
    names = ["__meta__", "dir.v1/a.cls", "dir.v1/a.b.TXT", "nodot", ".hidden", "__x__/b.cls", "b.cls", "_c.cls"]
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


def stream_stage(source: Iterable[Any]) -> Iterator[Any]:
    yield from source


class Undeclared(IterableDataset[dict[str, str]]):
    """Says nothing of its order, unless that is set, as for a class of another package."""

    def __init__(self, urls: Any, **draws: Any) -> None:
        self.urls = urls
        vars(self).update(draws)

    def __iter__(self) -> Iterator[dict[str, str]]:
        yield from ({"url": url} for url in self.urls)


def read_by(*reads: Any) -> Any:
    """What makes a pipeline whose shards are made into samples by these stages."""
    return lambda urls: wds.DataPipeline(wds.SimpleShardList(urls), *reads)


REPLAY = r"midepoch.wrap\(lambda: make\(seed=random.getrandbits\(32\)\)"
OWN_READER = r"stage samples_of_.* makes samples of shards itself.*write wds.tarfile_to_samples\({}\) in its"
REFUSED: dict[str, tuple[Any, str]] = {
    "stream_stage": (lambda u: plain(u).compose(stream_stage), "stream_stage may work on the stream as a whole"),
    "pipelinefilter": (lambda u: plain(u).compose(wds.pipelinefilter(stream_stage)()), "stage stream_stage"),
    "slice": (lambda u: plain(u).slice(3), "stage islice takes part of a stream"),
    "info": (lambda u: plain(u).compose(wds.filters.info()), "stage info prints"),
    "cached": (lambda u: plain(u).compose(wds.Cached()), "stage Cached caches"),
    "own_split": (
        lambda u: plain(u, nodesplitter=own.own_split),
        f"own_split comes before the shards are opened.*say own_split.draws = 'once'; or.*{REPLAY}, shard=...",
    ),
    **{name: (lambda u, make=make: make(u, 1), REPLAY) for name, make in READ_AGAIN.items()},
    "mix": (
        lambda u: wds.DataPipeline(wds.RandomMix([plain(u), plain(u)])),
        "stage RandomMix takes samples of several pipelines in turn: wrap each.*combine",
    ),
    "unbatched": (lambda u: plain(u).unbatched(), "stage unbatched makes several samples of one"),
    "batch stage": (lambda u: plain(u).batched(2).map(len).unbatched(), "stage map works on batches of 2"),
    "no reader": (read_by(), "opens no shards"),
    "keeps open": (read_by(wds.tariterators.tarfile_to_samples(), wds.shardlists.resampled()), "stage resampled"),
    "own reader": (read_by(own.samples_of_each_shard), OWN_READER.format("")),
    "own reader with a handler": (
        read_by(partial(own.samples_of_each_shard, handler=own.go_on)), OWN_READER.format("handler=go_on")
    ),
    "own grouping": (
        read_by(wds.tariterators.url_opener, wds.tariterators.tar_file_expander, own.own_split),
        r"stage own_split makes samples.*write wds.tarfile_to_samples\(\)",
    ),
    **{f"weights {weights}": (
        lambda u, weights=weights: pipeline(own.DrawnShards(u, weights)),
        r"DrawnShards.weights are not 5 numbers of 0 or more.*correct them",
    ) for weights in ([1, 2], [1, 1, 1, 1, -1], [0] * 5, [1, 1, 1, 1, float("nan")], ["a"] * 5, 3)},
    **{f"{count} draws": (
        lambda u, count=count: pipeline(wds.SimpleShardList(u), wds.resampled(count)),
        f"draws {count} shards: pass a number of at least 1",
    ) for count in (0, -1, 2.5)},
    **{f"draws = {wrong!r}": (
        lambda u, wrong=wrong: pipeline(Undeclared(u, draws=wrong)),
        "Undeclared.draws is .*: say 'once' or 'with replacement'",
    ) for wrong in ("twice", 3, True, ["once"])},
    "no list": (
        lambda u: pipeline(Undeclared(iter(u), draws="once")), "Undeclared shows no list of its shards as .urls: give"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_understood_is_refused_by_name(urls: list[str], name: str) -> None:
    make, message = REFUSED[name]
    with pytest.raises(Unsupported, match=message):
        midepoch.wrap(make(urls))


def test_urls_that_may_be_a_rank_s_own_must_be_told(urls: list[str]) -> None:
    loader = midepoch.wrap(numbers(urls, nodesplitter=None), world=World(0, 2))
    with pytest.raises(Unsupported, match="pass shard=True to wrap"):
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


# Its processes are sent all that they need, as spawned ones are, and have imported the packages already.
SPAWNS = multiprocessing.get_context("forkserver")
SPAWNS.set_forkserver_preload(["torch", "webdataset", "midepoch"])
SETTINGS: dict[str, dict[str, Any]] = {
    "spawned": {"num_workers": 1, "multiprocessing_context": SPAWNS},
    "kept": {"num_workers": 2, "persistent_workers": True},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_workers_that_are_spawned_or_kept(urls: list[str], kind: str, name: str) -> None:
    dataset = plain(of_kind(urls, kind), shardshuffle=5).map(number).batched(2, collation_fn=list)
    loader = DataLoader(dataset, batch_size=None, collate_fn=sources.as_it_is, **SETTINGS[name])
    with midepoch.wrap(loader, seed=1, **streams(kind, 2)) as wrapped:
        first, second = flat(wrapped), flat(wrapped)
    assert sorted(first) == sorted(second) == list(range(20)) and first != second


def test_fewer_shards_than_workers_and_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.2)  # torch waits for those that failed
    one = make_shards(tmp_path / "one", [10])
    with pytest.raises(ValueError, match="fewer shards than workers"):
        list(in_workers(numbers(one), 3))
    ranks = []
    for rank in range(2):
        with midepoch.wrap(in_workers(numbers(one, batch=1), 3), world=World(rank, 2)) as wrapped:
            ranks.append(flat(wrapped))
    assert list(map(len, ranks)) == [5, 5] and sorted(flat(ranks)) == list(range(10))


# --- stages of the user's own -----------------------------------------------------------------------------------------


def test_an_own_shuffle_of_shards_says_so(urls: list[str]) -> None:
    def make(stage: Any) -> Any:
        return midepoch.wrap(pipeline(wds.SimpleShardList(urls), stage, wds.split_by_worker), seed=5)

    expected = flat(make(wds.detshuffle(10)))
    for stage in (own.EpochShuffle(), own.EpochShuffle(epoch=own.SharedEpoch()), own.EpochShuffle(seed=-1)):
        assert flat(make(stage)) == expected
        assert getattr(stage, "epoch", -1) == -1 or isinstance(stage.epoch, own.SharedEpoch)  # it was not moved
    told = trained(urls, "indexed", 0).capabilities.exact_order
    assert told.reason.endswith("in place of EpochShuffle, by its `draws`") and not told.believed
    # Its seed is the order's, unless wrap is given one.
    seeded = midepoch.wrap(pipeline(wds.SimpleShardList(urls), own.EpochShuffle(seed=5), wds.split_by_worker))
    assert flat(seeded) == expected


def test_own_lists_of_shards_say_how_they_draw(tmp_path: Path, kind: str) -> None:
    shards = of_kind(make_shards(tmp_path / "full", [4, 6, 2, 7, 3]), kind)

    def make(given: Any, **settings: Any) -> Any:
        return midepoch.wrap(pipeline(given).with_epoch(12), seed=5, **settings)

    shuffled = list(make(wds.SimpleShardList(shards, seed=1)))
    assert list(make(own.RepeatedShards(shards))) == shuffled != list(make(wds.SimpleShardList(shards)))
    drawn = own.DrawnShards(shards, epoch=own.SharedEpoch(2))
    before = drawn.rng.getstate()
    under_other_seeds(9)
    given = random.getstate()
    assert list(make(drawn)) == list(make(wds.ResampledShards(shards)))
    assert drawn.rng.getstate() == before and random.getstate() == given


def test_shards_come_as_often_as_their_weights_say(tmp_path: Path, kind: str) -> None:
    urls = make_shards(tmp_path / "even", [5] * 4)
    shards = of_kind(urls, kind)
    weights = [1, 0, 2, 5]
    loader = midepoch.wrap(pipeline(own.DrawnShards(shards, weights), batch=5, function=noisy).with_epoch(400), seed=1)
    assert "in place of DrawnShards, by its `draws`" in loader.capabilities.exact_order.reason
    samples = flat(loader)
    counted = Counter(number // 5 for number, _ in samples)
    for shard, weight in enumerate(weights):
        # 400 draws: three standard deviations are 7.5 % of them.
        assert counted[shard] == pytest.approx(2000 * weight / 8, abs=150)
    assert not counted[1]
    # A sample that comes again in a pass is augmented anew.
    assert len({drawn for _, drawn in samples}) == len(samples) == 2000


def test_a_list_that_does_not_say_how_it_draws_is_refused(urls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    line = "Undeclared.draws = 'once', each shard once in a pass, or 'with replacement'"
    with pytest.raises(Unsupported, match=f"stage Undeclared does not give shards.*{line}; or"):
        midepoch.wrap(pipeline(Undeclared(urls)))
    monkeypatch.setattr(Undeclared, "draws", "once", raising=False)  # as the message says
    assert sorted(flat(midepoch.wrap(pipeline(Undeclared(urls)), seed=1))) == list(range(20))


def test_bare_functions_are_stages(urls: list[str]) -> None:
    expected = list(midepoch.wrap(pipeline(wds.SimpleShardList(urls))))
    tar = wds.tariterators
    for reads in (
        [tar.tarfile_samples],
        [partial(tar.tarfile_samples, handler=own.go_on)],
        [tar.url_opener, tar.tar_file_expander, tar.group_by_keys],
        [partial(tar.url_opener, handler=own.go_on), partial(tar.tar_file_expander), tar.group_by_keys],
    ):
        dataset = pipeline(wds.SimpleShardList(urls), wds.split_by_node, *reads[:-1], reading=reads[-1])
        assert list(midepoch.wrap(dataset)) == expected == list(dataset)
    missing = [f"{urls[0]}.not", *urls]
    dataset = pipeline(wds.SimpleShardList(missing), reading=partial(tar.tarfile_samples, handler=own.go_on))
    assert list(midepoch.wrap(dataset)) == expected
    with pytest.raises(SourceError, match="cannot be opened"):
        midepoch.wrap(pipeline(wds.SimpleShardList(missing), reading=tar.tarfile_samples))


@pytest.mark.parametrize("name", FINITE)
def test_a_finite_number_of_draws_ends_an_epoch(tmp_path: Path, kind: str, name: str) -> None:
    urls = make_shards(tmp_path / "even", [4] * 6)
    assert len(flat(of_lists(FINITE[name], kind)(urls))) == 20


# --- how long an epoch is ---------------------------------------------------------------------------------------------


def test_with_epoch_counts_batches_and_goes_on_with_new_samples(urls: list[str], kind: str) -> None:
    loader = midepoch.wrap(numbers(of_kind(urls, kind), batch=2).with_epoch(3), **streams(kind, 1))
    epochs = [list(loader) for _ in range(4)]
    assert [len(epoch) for epoch in epochs] == [3] * 4
    # In order, so that the passes can be told: the data begin again behind sample 19.
    assert flat(flat(epochs)) == [*range(20), *range(4)]
    assert kind == "streamed" or len(loader) == 3
    given_up = midepoch.wrap(numbers(urls, batch=2).with_epoch(3))
    assert [next(iter(given_up)) for _ in range(2)] == [[0, 1], [6, 7]]


def test_with_epoch_counts_for_each_worker(urls: list[str]) -> None:
    for workers, expected in ((0, 3), (2, 6)):
        plain_loader = in_workers(numbers(urls).with_epoch(3), workers)
        assert len(list(plain_loader)) == expected
        with midepoch.wrap(plain_loader) as loader:
            assert len(list(loader)) == len(loader) == expected


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 3), (3, 2)])
def test_with_epoch_is_finished_in_another_world(tmp_path: Path, kind: str, before: int, after: int) -> None:
    shards = of_kind(make_shards(tmp_path / "even", [12] * 6), kind)

    def make(rank: int, world_size: int) -> Any:
        dataset = wds.WebDataset(shards, shardshuffle=9, nodesplitter=wds.split_by_node).map(number)
        dataset = dataset.batched(2, collation_fn=list).with_epoch(6)
        return midepoch.wrap(dataset, world=World(rank, world_size), seed=3, **streams(kind, 6))

    begun = [make(rank, before) for rank in range(before)]
    iterators = [iter(loader) for loader in begun]
    first = [next(iterator) for _ in range(2) for iterator in iterators]
    state = gathered(begun) if kind == "streamed" and before > 1 else begun[0].state_dict()
    whole = flat([*first, *(batch for iterator in iterators for batch in iterator)])
    assert len(whole) == 12 * before
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


def test_repeat_makes_one_epoch_of_several_passes(urls: list[str]) -> None:
    loader = midepoch.wrap(numbers(urls, batch=8).repeat(2))
    assert flat(loader) == [*range(20), *range(20)]
    assert loader.epoch == 1


def test_an_endless_pipeline_has_no_length_and_resumes(urls: list[str]) -> None:
    loader, other = (midepoch.wrap(numbers(urls, batch=3).repeat()) for _ in range(2))
    with pytest.raises(TypeError, match="no length"):
        len(loader)
    head = list(itertools.islice(loader, 9))
    other.load_state_dict(loader.state_dict())
    assert flat([*head, *itertools.islice(other, 5)]) == [*range(20), *range(20), *range(2)]


# --- samples that are dropped -----------------------------------------------------------------------------------------


def test_dropped_samples_leave_holes_in_their_batches(urls: list[str]) -> None:
    loader = selected(urls, KEPT, batch=4)
    iterator = iter(loader)
    for expected in ([0, 1, 2], [5, 6, 7], [15]):
        assert loader.peek() == expected == next(iterator)
    # Positions 8 to 11 are all dropped, and so is the end.
    assert [loader.state_dict(in_flight=back)["position"] for back in range(4)] == [16, 8, 4, 0]
    assert next(iterator, None) is None and (loader.epoch, loader.position) == (1, 0)


@pytest.mark.parametrize("world_size", [2, 3])
def test_no_rank_alone_is_left_without_a_batch(urls: list[str], world_size: int) -> None:
    # Samples 4 to 11 are dropped: two whole steps of two ranks, and a rank's whole batch in other steps.
    kept = {0, 1, 2, 3, 12, 17}
    ranks = [list(selected(urls, kept, rank, world_size)) for rank in range(world_size)]
    assert len({len(rank) for rank in ranks}) == 1 and all(flat(ranks))
    assert set(flat(flat(ranks))) == kept
    assert sorted(flat(selected(urls, kept))) == sorted(kept)  # only what stands in for an empty batch comes twice


def test_refill_keeps_batches_full(urls: list[str], kind: str) -> None:
    """Shards are read as streams, also those that could be indexed."""
    loader = refilled(of_kind(urls, kind))
    assert [list(loader) for _ in range(3)] == [[[0, 3, 6, 9], [12, 15, 18]]] * 3
    assert "refill=True was stated" in loader.capabilities.constant_time_resume.reason
    whole = plain(urls).map(number).select(lambda each: each % 3 == 0).batched(4, collation_fn=list, partial=False)
    assert list(midepoch.wrap(whole, refill=True)) == [[0, 3, 6, 9]]


def test_refill_says_where_nothing_is_kept(urls: list[str]) -> None:
    with pytest.raises(SourceError, match="the stages dropped every sample of a whole pass"):
        next(iter(midepoch.wrap(plain(urls).select(lambda sample: False).with_epoch(3), refill=True)))
    assert list(selected(urls, (), refill=True)) == []


def test_a_handler_that_goes_on_leaves_holes(urls: list[str]) -> None:
    assert list(PLACES["a handler that goes on"](urls)) == [[i, i + 2, i + 3] for i in range(0, 20, 4)]
    with pytest.raises(ValueError, match="no good"):
        list(midepoch.wrap(plain(urls).map(failing, handler=wds.reraise_exception)))


# --- streams, and who reads them --------------------------------------------------------------------------------------


def test_streams_of_unequal_length_give_every_sample_once(urls: list[str]) -> None:
    shards = compress(urls)
    for streams in (1, 2, 3, 5, 8):
        loader = streamed(shards, streams=streams)
        epochs = [sorted(flat(sources.identify(batch) for batch in loader)) for _ in range(2)]
        assert epochs == [list(range(20))] * 2


def test_streams_must_divide_among_ranks_and_workers(urls: list[str]) -> None:
    shards = compress(urls)
    with pytest.raises(Unsupported, match=r"4 streams cannot be shared by 3 ranks x 1 workers.*streams=3"):
        next(iter(streamed(shards, 0, 3, streams=4)))
    with pytest.raises(Unsupported, match=r"3 streams cannot be shared by 1 ranks x 2 workers"):
        next(iter(streamed(shards, workers=2, streams=3)))
    loader = streamed(shards, streams=4)
    next(iter(loader))
    with pytest.raises(StateMismatchError, match=r"4 streams cannot be shared by 1 ranks x 3 workers"):
        streamed(shards, workers=3, streams=4).load_state_dict(loader.state_dict())
    with pytest.raises(StateMismatchError, match=r"streams differs.*'4'.*'2'"):
        streamed(shards, streams=2).load_state_dict(loader.state_dict())


def test_equal_counts_on_several_ranks_need_with_epoch(urls: list[str]) -> None:
    loader = midepoch.wrap(numbers(compress(urls), nodesplitter=wds.split_by_node), world=World(0, 2), streams=2)
    with pytest.raises(Unsupported, match=r"use with_epoch\(n\).*tail='uneven'"):
        next(iter(loader))


def gathered(ranks: list[Any]) -> Any:
    """What `midepoch.gather` returns on ranks that run in one process here."""
    states = [rank.state_dict() for rank in ranks]
    parts = [json.loads(state["detail"])["part"] for state in states]
    return midepoch.reseal({**states[0], "detail": json.dumps({"parts": parts}, separators=(",", ":"))})


def of_streams(shards: list[str], rank: int = 0, world_size: int = 1) -> Any:
    dataset = wds.WebDataset(shards, shardshuffle=9, nodesplitter=wds.split_by_node).shuffle(3).map(number)
    return midepoch.wrap(dataset.batched(2, collation_fn=list), seed=2, world=World(rank, world_size), tail="uneven")


def test_the_world_chooses_the_number_of_streams(tmp_path: Path) -> None:
    shards = compress(make_shards(tmp_path / "many", [40] * 12))
    ranks = [of_streams(shards, rank, 24) for rank in range(24)]
    iterators = [iter(rank) for rank in ranks]
    begun = [next(iterator) for iterator in iterators]
    state = gathered(ranks)
    assert len(json.dumps(state)) < 128 * 24
    rests = [list(iterator) for iterator in iterators]
    assert sorted(flat([*begun, *flat(rests)])) == list(range(480))
    following = [list(rank) for rank in ranks]
    # Six ranks, and one alone, go on with its streams, and keep them in later epochs.
    for world_size in (6, 1):
        others = [of_streams(shards, rank, world_size) for rank in range(world_size)]
        for other in others:
            other.load_state_dict(state)
        for expected in (rests, following):
            assert sorted(flat(map(list, others))) == sorted(flat(expected))
    seven = of_streams(shards, 0, 7)
    with pytest.raises(StateMismatchError, match=r"24 streams cannot be shared by 7 ranks x 1 .*rest of this epoch"):
        seven.load_state_dict(state)
    # Where an epoch begins, any world can.
    seven.load_state_dict(of_streams(shards).state_dict())
    assert next(iter(seven))


def test_the_example_runs_and_resumes(tmp_path: Path) -> None:
    assert "every sample once: True" in commands.script(ROOT / "examples" / "webdataset_pipeline.py", tmp_path)
