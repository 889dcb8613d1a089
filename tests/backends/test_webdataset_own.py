"""webdataset pipelines with shard lists, shuffles and readers of the user's own; draws and streams; refusals."""

from __future__ import annotations

import functools
import importlib.metadata
import itertools
import json
import random
import runpy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterableDataset

import midepoch
from midepoch import MidepochWarning, SourceError, StateMismatchError, UnsupportedSourceError, World

wds = pytest.importorskip("webdataset", reason="webdataset is not installed")


from support import own_shards as own  # noqa: E402
from support.sources import every_place, flat, plain, under_other_seeds  # noqa: E402
from support.webdataset_sources import as_it_is, compress, make_shards  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

COUNTS = [4, 6, 2, 7, 3, 5]


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIDEPOCH_CACHE", str(tmp_path / "cache"))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def urls(tmp_path: Path) -> list[str]:
    """27 samples in six shards."""
    return make_shards(tmp_path / "shards", COUNTS)


def number(sample: dict[str, Any]) -> int:
    return int(sample["cls"])


def noisy(sample: dict[str, Any]) -> tuple[int, float]:
    return int(sample["cls"]), random.random()


def pipeline(*stages: Any, reading: Any = None, function: Any = number, batch: int = 3, partial: bool = True) -> Any:
    reads = wds.tarfile_to_samples(handler=own.go_on) if reading is None else reading
    return wds.DataPipeline(*stages, reads, wds.map(function), wds.batched(batch, collation_fn=list, partial=partial))


def in_workers(dataset: Any, workers: int, **settings: Any) -> Any:
    return DataLoader(dataset, batch_size=None, num_workers=workers, collate_fn=as_it_is, **settings)


def check_resumes(make: Callable[[], Any], cuts: Iterable[int]) -> list[list[Any]]:
    return every_place(make, cuts, read=plain)


# --- what own stages are ----------------------------------------------------------------------------------------------


def training(urls: list[str], **arguments: Any) -> Any:
    """As open_clip builds it: shards shuffled by an epoch that processes share, then divided, then read."""
    shuffle = own.EpochShuffle(2000, 500, epoch=own.SharedEpoch(3), **arguments)
    return pipeline(wds.SimpleShardList(urls), shuffle, wds.split_by_node, wds.split_by_worker, partial=False)


@pytest.mark.parametrize("kind", ["indexed", "streamed"])
@pytest.mark.parametrize("workers", [0, 2])
def test_an_own_shuffle_of_shards_is_replaced(urls: list[str], kind: str, workers: int) -> None:
    shards = urls if kind == "indexed" else compress(urls)

    def make() -> Any:
        return midepoch.wrap(in_workers(training(shards).with_epoch(4), workers), seed=5)

    whole = check_resumes(make, (1, 5) if workers else range(1, 8))
    assert whole[0] != whole[1]
    capabilities = make().capabilities
    assert capabilities.constant_time_resume
    assert capabilities.exact_order.reason.endswith("in place of EpochShuffle, by its `draws`")
    assert not capabilities.exact_order.believed


def test_an_own_shuffle_of_shards_says_so(urls: list[str]) -> None:
    def make(stage: Any) -> Any:
        return midepoch.wrap(pipeline(wds.SimpleShardList(urls), stage, wds.split_by_worker), seed=5)

    expected = flat(make(wds.detshuffle(10)))
    for stage in (own.EpochShuffle(), own.EpochShuffle(epoch=own.SharedEpoch()), own.EpochShuffle(seed=-1)):
        assert flat(make(stage)) == expected
        assert getattr(stage, "epoch", -1) == -1 or isinstance(stage.epoch, own.SharedEpoch)  # it was not moved
    line = r"midepoch.wrap\(lambda: make\(seed=random.getrandbits\(32\)\), shard=...\)"
    with pytest.raises(
        UnsupportedSourceError,
        match=rf"stage own_split comes before the shards are opened.*say own_split.draws = 'once'; or.*{line}",
    ):
        make(own.own_split)
    # Its seed is the order's, unless wrap is given one.
    seeded = midepoch.wrap(pipeline(wds.SimpleShardList(urls), own.EpochShuffle(seed=5), wds.split_by_worker))
    assert flat(seeded) == expected


@pytest.mark.parametrize("kind", ["indexed", "streamed"])
def test_own_lists_of_shards_say_how_they_draw(urls: list[str], kind: str) -> None:
    shards = urls if kind == "indexed" else compress(urls)

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
    for list_of in (own.DrawnShards(shards, [1, 2, 0, 1, 1, 1.5]), own.DrawnShards(shards, nshards=4), drawn):
        check_resumes(lambda: make(list_of), (1, 13))  # noqa: B023  # called at once


@pytest.mark.parametrize("kind", ["indexed", "streamed"])
def test_shards_come_as_often_as_their_weights_say(tmp_path: Path, kind: str) -> None:
    urls = make_shards(tmp_path / "even", [5] * 4)
    shards = urls if kind == "indexed" else compress(urls)
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


@pytest.mark.parametrize("weights", [[1, 2], [1, 1, 1, 1, 1, -1], [0] * 6, [1, 1, 1, 1, 1, float("nan")], ["a"] * 6, 3])
def test_weights_are_checked(urls: list[str], weights: Any) -> None:
    with pytest.raises(
        UnsupportedSourceError, match=r"DrawnShards.weights are not 6 numbers of 0 or more.*correct them"
    ):
        midepoch.wrap(pipeline(own.DrawnShards(urls, weights)))


class Undeclared(IterableDataset[dict[str, str]]):
    """Says nothing of its order."""

    def __init__(self, urls: list[str]) -> None:
        self.urls = urls

    def __iter__(self) -> Iterator[dict[str, str]]:
        yield from ({"url": url} for url in self.urls)


class Declared(Undeclared):
    """What it says may be set, as for a class of another package."""

    draws: Any = None


def test_a_list_that_does_not_say_how_it_draws_is_refused(urls: list[str]) -> None:
    line = "Undeclared.draws = 'once', each shard once in a pass, or 'with replacement'"
    with pytest.raises(UnsupportedSourceError, match=f"stage Undeclared does not give shards.*{line}; or"):
        midepoch.wrap(pipeline(Undeclared(urls)))
    Undeclared.draws = "once"  # type: ignore[attr-defined]  # as the message says
    try:
        assert sorted(flat(midepoch.wrap(pipeline(Undeclared(urls)), seed=1))) == list(range(27))
    finally:
        del Undeclared.draws  # type: ignore[attr-defined]


@pytest.mark.parametrize("wrong", ["twice", 3, True, ["once"]])
def test_what_a_list_says_is_checked(urls: list[str], wrong: Any) -> None:
    shards = Declared(urls)
    shards.draws = wrong
    with pytest.raises(UnsupportedSourceError, match=r"Declared.draws is .*: say 'once' or 'with replacement'"):
        midepoch.wrap(pipeline(shards))
    shards.draws, shards.urls = "once", iter(urls)  # type: ignore[assignment]
    with pytest.raises(UnsupportedSourceError, match=r"Declared shows no list of its shards as .urls: give it one"):
        midepoch.wrap(pipeline(shards))


def test_an_own_reader_is_refused_with_the_line_to_write(urls: list[str]) -> None:
    for reader, given in (
        (own.samples_of_shards, ""),
        (partial(own.samples_of_each_shard, handler=own.go_on), "handler=go_on"),
    ):
        told = rf"stage samples_of_.* makes samples of shards itself.*write wds.tarfile_to_samples\({given}\) in its"
        with pytest.raises(UnsupportedSourceError, match=told):
            midepoch.wrap(pipeline(wds.SimpleShardList(urls), reading=reader))
    reads = [wds.tariterators.url_opener, wds.tariterators.tar_file_expander, own.own_split]
    with pytest.raises(
        UnsupportedSourceError, match=r"stage own_split makes samples.*write wds.tarfile_to_samples\(\)"
    ):
        midepoch.wrap(wds.DataPipeline(wds.SimpleShardList(urls), *reads))


# --- webdataset's own forms -------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("kind", ["indexed", "streamed"])
def test_a_finite_number_of_draws_ends_an_epoch(tmp_path: Path, kind: str) -> None:
    urls = make_shards(tmp_path / "even", [4] * 6)
    shards = urls if kind == "indexed" else compress(urls)
    for list_of in (
        [wds.SimpleShardList(shards), wds.resampled(5)],
        [wds.ResampledShards(shards, nshards=5)],
        [own.DrawnShards(shards, nshards=5)],
    ):
        whole = check_resumes(lambda: midepoch.wrap(pipeline(*list_of, batch=2), seed=1), (3, 12))  # noqa: B023
        assert [len(flat(epoch)) for epoch in whole] == [20, 20] and whole[0] != whole[1]
    for wrong in (0, -1, 2.5):
        with pytest.raises(UnsupportedSourceError, match=f"draws {wrong} shards: pass a number of at least 1"):
            midepoch.wrap(pipeline(wds.SimpleShardList(shards), wds.resampled(wrong)))


# --- streams ----------------------------------------------------------------------------------------------------------


def streamed(shards: list[str], rank: int = 0, world_size: int = 1, count: int | None = None, **settings: Any) -> Any:
    dataset = wds.WebDataset(shards, shardshuffle=9, nodesplitter=wds.split_by_node).shuffle(3).map(number)
    dataset = dataset.batched(2, collation_fn=list)
    dataset = dataset if count is None else dataset.with_epoch(count)
    return midepoch.wrap(dataset, seed=2, world=World(rank, world_size), tail="uneven", **settings)


def gathered(ranks: list[Any]) -> Any:
    """What `midepoch.gather` returns on ranks that run in one process here."""
    states = [rank.state_dict() for rank in ranks]
    parts = [json.loads(state["detail"])["part"] for state in states]
    return midepoch.reseal({**states[0], "detail": json.dumps({"parts": parts}, separators=(",", ":"))})


def test_the_world_chooses_the_number_of_streams(tmp_path: Path) -> None:
    shards = compress(make_shards(tmp_path / "many", [40] * 12))
    ranks = [streamed(shards, rank, 24) for rank in range(24)]
    iterators = [iter(rank) for rank in ranks]
    begun = [next(iterator) for iterator in iterators]
    state = gathered(ranks)
    assert len(json.dumps(state)) < 128 * 24
    rests = [list(iterator) for iterator in iterators]
    assert sorted(flat([*begun, *flat(rests)])) == list(range(480))
    following = [list(rank) for rank in ranks]
    # Six ranks, and one alone, go on with its streams, and keep them in later epochs.
    for world_size in (6, 1):
        others = [streamed(shards, rank, world_size) for rank in range(world_size)]
        for other in others:
            other.load_state_dict(state)
        for expected in (rests, following):
            assert sorted(flat(map(list, others))) == sorted(flat(expected))
    with pytest.raises(
        StateMismatchError, match=r"24 streams cannot be shared by 7 ranks x 1 workers.*rest of this epoch"
    ):
        streamed(shards, 0, 7).load_state_dict(state)
    # Where an epoch begins, any world can.
    seven = streamed(shards, 0, 7)
    seven.load_state_dict(streamed(shards).state_dict())
    assert next(iter(seven))


def test_an_older_webdataset_is_refused_by_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    from midepoch.adapters.webdataset import private

    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.2.86")
    line = r"webdataset 0\.2\.86 is installed, and midepoch needs 1\.0 or later: pip install 'webdataset==1\.0\.\*'"
    with pytest.warns(MidepochWarning, match="tested with"), pytest.raises(UnsupportedSourceError, match=line):
        runpy.run_path(str(private.__file__))  # as the first pipeline that is wrapped imports it


@pytest.mark.parametrize("streams", [1, 2, 4])
def test_no_empty_pass_is_behind_a_last_batch(urls: list[str], streams: int) -> None:
    shards = compress(urls)

    def make() -> Any:
        return midepoch.wrap(pipeline(wds.SimpleShardList(shards), batch=4, partial=False), seed=1, streams=streams)

    with make() as loader:
        epochs = [list(loader) for _ in range(3)]
    assert epochs[0] == epochs[1] == epochs[2] and {len(batch) for batch in epochs[0]} == {4}
    assert 27 // 4 - streams < len(epochs[0]) <= 27 // 4
    for cut in range(1, len(epochs[0]) + 1):
        with make() as loader:
            head = list(itertools.islice(loader, cut))
            state = loader.state_dict()
        with make() as other:
            other.load_state_dict(state)
            # Behind the last batch, the pass continues with the next epoch.
            assert head + list(other) == flat(epochs[: 1 if cut < len(epochs[0]) else 2])
            assert list(other) == epochs[0]


# --- what is read again from its start --------------------------------------------------------------------------------


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


@pytest.mark.filterwarnings("ignore::midepoch.MidepochWarning")
@pytest.mark.parametrize("name", READ_AGAIN)
def test_the_line_of_a_refusal_is_exact_by_replay(urls: list[str], name: str) -> None:
    """The function is called under random streams of seed and epoch, so each epoch has an order of its own."""
    make = functools.partial(READ_AGAIN[name], urls)
    with pytest.raises(UnsupportedSourceError, match=r"midepoch.wrap\(lambda: make\(seed=random.getrandbits\(32\)\)"):
        midepoch.wrap(make(1))
    whole = check_resumes(lambda: midepoch.wrap(lambda: make(random.getrandbits(32)), seed=1), (2, 8, 11))
    assert [sorted(number for number, _ in flat(epoch)) for epoch in whole] == [list(range(27))] * 2
    assert whole[0] != whole[1]
