"""webdataset pipelines with shard lists, shuffles and readers of the user's own; draws, streams and replays."""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import random
import runpy
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import midepoch
from midepoch import MidepochWarning, SourceError, StateError, StateMismatchError, UnsupportedSourceError, World

wds = pytest.importorskip("webdataset", reason="webdataset is not installed")

sys.path.insert(0, str(Path(__file__).parent))

import own_shards as own  # noqa: E402
from webdataset_sources import as_it_is, compress, make_shards  # noqa: E402

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


def flat(batches: Iterable[Any]) -> list[Any]:
    return list(itertools.chain.from_iterable(batches))


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def check_resumes(make: Callable[[], Any], cuts: Iterable[int], epochs: int = 2) -> list[list[Any]]:
    """Cut anywhere in some epochs, what is left comes from a new loader, under other global seeds."""
    seed_all(1)
    with make() as loader:
        whole = [list(loader) for _ in range(epochs)]
    assert all(whole)
    for cut in cuts:
        seed_all(cut + 2)
        with make() as loader:
            head: list[Any] = []
            while len(head) < cut:
                head += itertools.islice(loader, cut - len(head))
                state = json.loads(json.dumps(loader.state_dict()))
        seed_all(cut + 102)
        with make() as other:
            other.load_state_dict(state)
            rest: list[Any] = []
            while len(head) + len(rest) < sum(map(len, whole)):
                rest += list(other)
        assert head + rest == flat(whole), cut
    return whole


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
    assert "in place of EpochShuffle, as tried on a copy" in capabilities.exact_order.reason
    assert not capabilities.exact_order.believed


def test_an_own_shuffle_is_known_by_what_it_does(urls: list[str]) -> None:
    def make(stage: Any) -> Any:
        return midepoch.wrap(pipeline(wds.SimpleShardList(urls), stage, wds.split_by_worker), seed=5)

    expected = flat(make(wds.detshuffle(10)))
    for stage in (own.EpochShuffle(), own.EpochShuffle(epoch=own.SharedEpoch()), own.EpochShuffle(seed=-1)):
        assert flat(make(stage)) == expected
        assert getattr(stage, "epoch", -1) == -1 or isinstance(stage.epoch, own.SharedEpoch)  # it was not moved
    for refused in (own.own_split, own.backwards):
        with pytest.raises(
            UnsupportedSourceError, match=f"stage {refused.__name__} comes before the shards are opened"
        ):
            make(refused)
    # Its seed is the order's, unless wrap is given one.
    seeded = midepoch.wrap(pipeline(wds.SimpleShardList(urls), own.EpochShuffle(seed=5), wds.split_by_worker))
    assert flat(seeded) == expected


def test_an_own_shuffle_of_samples_needs_a_buffer(urls: list[str]) -> None:
    def make(stage: Any) -> Any:
        return wds.DataPipeline(wds.SimpleShardList(urls), wds.tarfile_to_samples(), stage, wds.map(number))

    assert sorted(midepoch.wrap(make(own.EpochShuffle(bufsize=50)), seed=1)) == list(range(27))
    assert list(midepoch.wrap(make(own.EpochShuffle(bufsize=50)), seed=1)) == list(
        midepoch.wrap(make(wds.shuffle(50)), seed=1)
    )
    with pytest.raises(UnsupportedSourceError, match="stage backwards may work on the stream as a whole"):
        midepoch.wrap(make(own.backwards))


@pytest.mark.parametrize("kind", ["indexed", "streamed"])
def test_own_lists_of_shards_are_known_by_what_they_give(urls: list[str], kind: str) -> None:
    shards = urls if kind == "indexed" else compress(urls)

    def make(given: Any, **settings: Any) -> Any:
        return midepoch.wrap(pipeline(given).with_epoch(12), seed=5, **settings)

    ordered = list(make(wds.SimpleShardList(shards)))
    assert list(make(own.RepeatedShards(shards))) == ordered
    drawn = own.DrawnShards(shards, epoch=own.SharedEpoch(2))
    before = drawn.rng.getstate()
    seed_all(9)
    given = random.getstate()
    assert list(make(drawn)) == list(make(wds.ResampledShards(shards))) != ordered
    assert drawn.rng.getstate() == before and random.getstate() == given
    for list_of in (own.DrawnShards(shards, [1, 2, 0, 1, 1, 1.5]), own.DrawnShards(shards, nshards=4), drawn):
        check_resumes(lambda: make(list_of), (1, 13))  # noqa: B023  # called at once


@pytest.mark.parametrize("kind", ["indexed", "streamed"])
def test_shards_come_as_often_as_their_weights_say(tmp_path: Path, kind: str) -> None:
    urls = make_shards(tmp_path / "even", [5] * 4)
    shards = urls if kind == "indexed" else compress(urls)
    weights = [1, 0, 2, 5]
    loader = midepoch.wrap(pipeline(own.DrawnShards(shards, weights), batch=5, function=noisy).with_epoch(400), seed=1)
    assert loader.capabilities.exact_order.believed
    samples = flat(loader)
    counted = Counter(number // 5 for number, _ in samples)
    for shard, weight in enumerate(weights):
        # 400 draws: three standard deviations are 7.5 % of them.
        assert counted[shard] == pytest.approx(2000 * weight / 8, abs=150)
    assert not counted[1]
    # A sample that comes again in a pass is augmented anew.
    assert len({drawn for _, drawn in samples}) == len(samples) == 2000


def test_weighted_shards_are_elastic(urls: list[str]) -> None:
    def make(rank: int = 0, world_size: int = 1) -> Any:
        dataset = pipeline(own.DrawnShards(urls, [1, 2, 3, 1, 1, 1]), function=noisy).with_epoch(6 // world_size)
        return midepoch.wrap(dataset, seed=2, world=World(rank, world_size))

    whole = sorted(flat(make()))
    ranks = [make(rank, 2) for rank in range(2)]
    begun = [next(iter(rank)) for rank in ranks]
    alone = make()
    alone.load_state_dict(ranks[0].state_dict())
    assert sorted(flat([*begun, *alone])) == whole


def test_weights_of_shards_that_cannot_be_opened_are_left_out(urls: list[str]) -> None:
    Path(urls[1]).unlink()
    weights = [0.0, 1, 0, 0, 0, 3]
    loader = midepoch.wrap(pipeline(own.DrawnShards(urls, weights)).with_epoch(9), seed=1)
    assert set(flat(loader)) == set(range(22, 27))
    with pytest.raises(SourceError, match="no shard with a weight above 0 has samples"):
        midepoch.wrap(pipeline(own.DrawnShards(urls, [0.0, 1, 0, 0, 0, 0])).with_epoch(9))


@pytest.mark.parametrize("weights", [[1, 2], [1, 1, 1, 1, 1, -1], [0] * 6, [1, 1, 1, 1, 1, float("nan")], ["a"] * 6, 3])
def test_weights_are_checked(urls: list[str], weights: Any) -> None:
    with pytest.raises(
        UnsupportedSourceError, match=r"DrawnShards.weights are not 6 numbers of 0 or more.*correct them"
    ):
        midepoch.wrap(pipeline(own.DrawnShards(urls, weights)))


class Pairs(own.RepeatedShards):
    """Gives more than urls."""

    def __iter__(self) -> Iterator[dict[str, str]]:
        yield from ({"url": url, "weight": "1"} for url in self.urls)


class Failing(own.RepeatedShards):
    """Cannot be read."""

    def __iter__(self) -> Iterator[dict[str, str]]:
        raise OSError("no list")


class InTurn(own.RepeatedShards):
    """Each shard once, by a weight that it alone understands."""

    weights = (1, 2, 3, 4, 5, 6)

    def __iter__(self) -> Iterator[dict[str, str]]:
        yield from ({"url": url} for url in self.urls[::-1])


class InTurnForEver(own.RepeatedShards):
    """All shards again and again, though it has weights."""

    weights = (1, 2, 3, 4, 5, 6)


class SomeMore(own.DrawnShards):
    """Draws the last shards more often than the others, by weights that it does not show."""

    def __iter__(self) -> Iterator[dict[str, str]]:
        while True:
            yield {"url": random.choice(self.urls + self.urls[3:])}


class Squared(own.DrawnShards):
    """Draws by the squares of its weights."""

    def __iter__(self) -> Iterator[dict[str, str]]:
        squares = [weight**2 for weight in self.weights or ()]
        while True:
            yield {"url": random.choices(self.urls, squares)[0]}


def test_lists_that_are_not_understood_say_why_and_replay(urls: list[str]) -> None:
    for list_of, why in (
        (own.SomeShards(urls), "gives 3 of its 6 urls"),
        (Pairs(urls), "not a dict with a url alone"),
        (Failing(urls), "a copy of it raised OSError: no list"),
        (InTurn(urls), "gives 6 of its 6 urls"),
        (SomeMore(urls), r"shards are not drawn alike: .* came \d+ times in 2\d\d\d draws, which should be about 34\d"),
        (Squared(urls, [1, 2, 3, 1, 2, 3]), "its .weights are not how often shards are drawn"),
        (InTurnForEver(urls), "it has weights, but no shard comes again before all have come"),
    ):
        with pytest.raises(
            UnsupportedSourceError, match=f"{type(list_of).__name__} .*{why}.*SimpleShardList.*replay=True"
        ):
            midepoch.wrap(pipeline(list_of))
    check_resumes(lambda: midepoch.wrap(pipeline(own.SomeShards(urls), wds.shuffle(3)), seed=1, replay=True), (1, 5))


def test_an_own_reader_is_refused_with_the_line_to_write(urls: list[str]) -> None:
    line = r"write wds.tarfile_to_samples\(handler=go_on\) in its place"
    outside = ", by an assignment to own_shards.samples_of_shards if that is not yours to change"
    for reader, more in ((own.samples_of_shards, outside), (partial(own.samples_of_each_shard, handler=own.go_on), "")):
        told = f"stage samples_of_.* makes samples of shards itself.*{line}{more}, or, if it runs by itself"
        with pytest.raises(UnsupportedSourceError, match=told):
            midepoch.wrap(pipeline(wds.SimpleShardList(urls), reading=reader))
    reads = [wds.tariterators.url_opener, wds.tariterators.tar_file_expander, own.own_split]
    with pytest.raises(
        UnsupportedSourceError, match=r"stage own_split makes samples.*write wds.tarfile_to_samples\(\)"
    ):
        midepoch.wrap(wds.DataPipeline(wds.SimpleShardList(urls), *reads))
    # One that webdataset 1.0 can run is exact by a replay; the older form fails by itself.
    made = pipeline(own.DrawnShards(urls, nshards=7), reading=own.samples_of_each_shard)
    check_resumes(lambda: midepoch.wrap(made, seed=1, replay=True), (2, 9))
    for dataset in (
        made,
        midepoch.wrap(pipeline(wds.SimpleShardList(urls), reading=own.samples_of_shards), replay=True),
    ):
        if dataset is not made:
            with pytest.raises(KeyError, match="fname"):
                list(dataset)


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


def test_what_draws_again_and_again_is_seen_by_states(urls: list[str]) -> None:
    state = midepoch.wrap(pipeline(own.DrawnShards(urls, [1, 2, 3, 4, 5, 6])).with_epoch(3), seed=1).state_dict()
    for other in ([1, 2, 3, 4, 5, 7], None):
        with pytest.raises(StateMismatchError, match="order differs"):
            midepoch.wrap(pipeline(own.DrawnShards(urls, other)).with_epoch(3), seed=1).load_state_dict(state)


def test_a_refilled_epoch_of_each_worker_s_batches_goes_on_with_other_workers(urls: list[str]) -> None:
    """As `elastic_workers` says. The epoch that was begun keeps its length; the next one has that of the workers."""

    def make(workers: int) -> Any:
        dataset = wds.WebDataset(urls, shardshuffle=9).select(lambda sample: number(sample) % 3).map(number)
        dataset = dataset.batched(3, collation_fn=list).with_epoch(3)
        return midepoch.wrap(in_workers(dataset, workers), seed=1, refill=True)

    with make(2) as loader:
        assert loader.capabilities.elastic_workers
        start = loader.state_dict()
        iterator = iter(loader)
        head = [next(iterator) for _ in range(2)]
        state = loader.state_dict()
        rest, following = list(iterator), list(loader)
        boundary = loader.state_dict()
        third = list(loader)
    assert [len(head) + len(rest), len(following)] == [6, 6]
    for begun, expected in ((start, head + rest), (state, rest), (boundary, third)):
        with make(0) as other:
            other.load_state_dict(begun)
            assert list(other) == expected
            if begun is state:
                assert list(other) == following[:3]


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


def test_streams_for_many_readers(tmp_path: Path) -> None:
    shards = compress(make_shards(tmp_path / "two", [270, 270]))
    ranks = [streamed(shards, rank, 512, count=2) for rank in (0, 511)]
    assert [len(next(iter(rank))) for rank in ranks] == [2, 2]
    assert "512 streams" in ranks[0].capabilities.elastic_workers.reason
    assert "4096 streams" in streamed(shards, streams=4096).capabilities.elastic_workers.reason
    with pytest.raises(
        UnsupportedSourceError, match="5000 ranks x 1 workers would read 5000 streams, and there are 4096"
    ):
        next(iter(streamed(shards, 0, 5000)))
    with pytest.raises(
        UnsupportedSourceError, match=r"12 streams .* 5 ranks.*pass streams=5 or a multiple.*leave streams="
    ):
        next(iter(streamed(shards, 0, 5, streams=12)))
    state = streamed(shards, 0, 512, count=2).state_dict()
    part = json.loads(state["detail"])["part"]
    for wrong in (part.replace("streams=512", "streams=9999"), part.replace("streams=512", "streams=0")):
        with pytest.raises(StateError):
            changed = midepoch.reseal({**state, "detail": json.dumps({"rank": 0, "part": wrong})})
            streamed(shards, 0, 512, count=2).load_state_dict(changed)


def test_one_stream_says_that_nobody_can_share_it(urls: list[str]) -> None:
    one = streamed(compress(urls), streams=1)
    assert not one.capabilities.elastic_workers and not one.capabilities.elastic_world
    two = streamed(compress(urls), streams=2)
    assert two.capabilities.elastic_workers and two.capabilities.elastic_world
    iterator = iter(one)
    next(iterator)
    with pytest.raises(StateMismatchError, match="1 streams cannot be shared by 2 ranks"):
        streamed(compress(urls), 0, 2, streams=1).load_state_dict(one.state_dict())


def test_capabilities_say_how_many_short_batches_a_streamed_epoch_may_have(urls: list[str]) -> None:
    def make(streams: int, **arguments: Any) -> Any:
        return midepoch.wrap(pipeline(wds.SimpleShardList(compress(urls)), **arguments), seed=1, streams=streams)

    loader = make(3, batch=4)
    said = loader.capabilities.exact_order.reason
    assert "is handed out if it has fewer than 4 samples: at most 3 such batches an epoch" in said
    epoch = list(loader)
    assert sorted(flat(epoch)) == list(range(27))
    assert 27 // 4 < len(epoch) <= 27 // 4 + 3
    assert 0 < sum(len(batch) < 4 for batch in epoch) <= 3
    assert "batch of its own" not in make(3, batch=1).capabilities.exact_order.reason


def test_a_list_without_shards_is_an_error() -> None:
    for empty in (own.RepeatedShards([]), own.DrawnShards([], weights=[])):
        with pytest.raises(SourceError, match="the pipeline has no shards: check its urls"):
            midepoch.wrap(pipeline(empty))


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
    said = make().capabilities.exact_order.reason
    assert f"is left out if it has fewer than 4 samples: at most {streams} such batches an epoch" in said
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


def test_bodies_begin_each_epoch_at_its_start(urls: list[str]) -> None:
    shards = compress(urls)

    def make() -> Any:
        return midepoch.wrap(pipeline(wds.SimpleShardList(shards), batch=4, partial=False), seed=1, streams=3)

    plain = make()
    expected = [list(plain) for _ in range(3)]
    loader = make()
    found = []
    for epoch in loader.epochs(3):
        found.append(list(loader))
        state = loader.state_dict()
        other = make()
        other.load_state_dict(state)
        rest = [list(other) for _ in other.epochs(3)]
        assert rest == [[], *expected[epoch + 1 :]]
    assert found == expected


# --- progress ---------------------------------------------------------------------------------------------------------


def test_a_bar_shows_what_is_read_again(
    urls: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from midepoch.adapters.webdataset import progress

    monkeypatch.setattr(progress, "_PATIENCE", 0.0)
    warnings.simplefilter("ignore", MidepochWarning)
    shards = compress(urls)
    for settings, what in (
        ({"streams": 2}, "finding the places of streams: 100%"),
        ({"replay": True}, "reading epoch 0 again: 100%"),
    ):
        loader = midepoch.wrap(pipeline(wds.SimpleShardList(shards)), seed=1, progress=True, **settings)
        batches = list(itertools.islice(loader, 5))
        assert len(batches) == 5 and "midepoch" not in capsys.readouterr().err
        for shown in (True, False):
            other = midepoch.wrap(pipeline(wds.SimpleShardList(shards)), seed=1, progress=shown, **settings)
            other.load_state_dict(loader.state_dict())
            list(other)
            assert (f"midepoch: {what}" in capsys.readouterr().err) is shown


# --- replays ----------------------------------------------------------------------------------------------------------


def fluid(urls: list[str], **arguments: Any) -> Any:
    return wds.WebDataset(urls, **arguments).map(number).batched(3, collation_fn=list)


REPLAYED: dict[str, Callable[[list[str]], Any]] = {
    "shuffle": lambda u: fluid(u, shardshuffle=9).shuffle(9),
    "detshuffle": lambda u: fluid(u, shardshuffle=9, detshuffle=True),
    "resampled": lambda u: fluid(u, resampled=True).with_epoch(9),
    "seed=True": lambda u: pipeline(wds.SimpleShardList(u, seed=True), wds.split_by_worker),
    "resampled(n)": lambda u: pipeline(wds.SimpleShardList(u), wds.resampled(7)),
    "RandomMix": lambda u: _mixed(wds.RandomMix, u),
    "RoundRobin": lambda u: _mixed(wds.RoundRobin, u),
    "own": lambda u: pipeline(
        own.DrawnShards(u, [1, 2, 3, 4, 5, 6], nshards=7, epoch=own.SharedEpoch()),
        reading=own.samples_of_each_shard,
    ),
    "own shuffle": lambda u: pipeline(
        wds.SimpleShardList(u),
        own.EpochShuffle(epoch=own.SharedEpoch()),
        wds.split_by_node,
        wds.split_by_worker,
        reading=own.samples_of_each_shard,
    ),
}  # fmt: skip


def _mixed(mix: Any, urls: list[str]) -> Any:
    parts = [wds.WebDataset(half, shardshuffle=9).shuffle(9).map(number) for half in (urls[:3], urls[3:])]
    return wds.DataPipeline(mix(parts, longest=True), wds.batched(3, collation_fn=list))


@pytest.mark.filterwarnings("error::midepoch.MidepochWarning:midepoch")
@pytest.mark.filterwarnings("ignore:.*is read again from its start:midepoch.MidepochWarning")
@pytest.mark.parametrize("name", REPLAYED)
def test_what_draws_is_keyed_where_it_is_replayed(urls: list[str], name: str) -> None:
    """Two epochs differ, as they would not if they followed from the global generators' seed alone."""
    whole = check_resumes(lambda: midepoch.wrap(REPLAYED[name](urls), seed=1, replay=True), (2, 8, 11))
    assert whole[0] != whole[1]
    again = midepoch.wrap(REPLAYED[name](urls), seed=1, replay=True)
    assert list(again) == whole[0]
    assert list(midepoch.wrap(REPLAYED[name](urls), seed=2, replay=True)) != whole[0]


@pytest.mark.filterwarnings("error::midepoch.MidepochWarning:midepoch")
@pytest.mark.filterwarnings("ignore:.*is read again from its start:midepoch.MidepochWarning")
@pytest.mark.parametrize("mix", [wds.RandomMix, wds.RoundRobin])
@pytest.mark.parametrize("workers", [None, 0, pytest.param(1, marks=pytest.mark.long)])
def test_a_mix_by_itself_is_replayed_and_keyed(urls: list[str], mix: Any, workers: int | None) -> None:
    def make(seed: int = 1) -> Any:
        mixed = _mixed(mix, urls).pipeline[0]
        return midepoch.wrap(mixed if workers is None else in_workers(mixed, workers), seed=seed)

    whole = check_resumes(make, (2, 8, 27, 31))
    assert [sorted(epoch) for epoch in whole] == [list(range(27))] * 2
    assert whole[0] != whole[1]
    assert list(make(2)) != whole[0]


def test_an_attribute_is_not_the_global_variable_of_its_name(
    urls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scripts have a variable `urls`."""
    monkeypatch.setattr(own, "urls", urls, raising=False)
    loader = midepoch.wrap(pipeline(own.RepeatedShards(urls)).with_epoch(9), seed=1)
    assert loader.capabilities.constant_time_resume


# Workers are the same mechanism for every stage: a generator of worker and rank, or one that all share.
IN_WORKERS = ["shuffle", "own", "own shuffle"]


@pytest.mark.filterwarnings("ignore::midepoch.MidepochWarning")
@pytest.mark.parametrize(
    "name", [name if name in IN_WORKERS else pytest.param(name, marks=pytest.mark.long) for name in REPLAYED]
)
def test_replays_in_workers_are_keyed_by_worker(urls: list[str], name: str) -> None:
    made = [midepoch.wrap(in_workers(REPLAYED[name](urls), 2), seed=1, replay=True) for _ in range(2)]
    with made[0] as loader:
        whole = [list(loader) for _ in range(2)]
        loader.load_state_dict(made[1].state_dict())
        assert list(itertools.islice(loader, 5)) == whole[0][:5]
        state = loader.state_dict()
    with made[1] as other:
        other.load_state_dict(state)
        assert [list(other), list(other)] == [whole[0][5:], whole[1]]
    if name in ("shuffle", "own shuffle", "detshuffle", "seed=True", "RandomMix", "RoundRobin"):
        assert sorted(flat(whole[0])) == list(range(27))
    elif name == "own":
        assert whole[0][0::2] != whole[0][1::2]  # each worker draws its own


def test_replays_behind_a_loader_are_keyed(urls: list[str]) -> None:
    warnings.simplefilter("ignore", MidepochWarning)

    def make() -> Any:
        dataset = wds.WebDataset(urls, shardshuffle=9).shuffle(9).map(number)
        loader = wds.WebLoader(dataset, batch_size=None, num_workers=1, collate_fn=as_it_is)
        return midepoch.wrap(loader.shuffle(5).batched(3, collation_fn=list), seed=1, replay=True)

    check_resumes(make, (4, 11))


def test_what_divides_by_itself_is_not_divided_again(urls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    divided = pipeline(wds.SimpleShardList(urls), wds.split_by_node, wds.split_by_worker)
    undivided = pipeline(wds.SimpleShardList(urls))
    with pytest.raises(UnsupportedSourceError, match=r"wds.split_by_worker divides the shards.*pass shard=False"):
        midepoch.wrap(in_workers(divided, 2), replay=True, shard=True)
    with pytest.raises(UnsupportedSourceError, match=r"no wds.split_by_worker divides.*put that after.*shard=True"):
        midepoch.wrap(in_workers(undivided, 2), replay=True)
    world = World(0, 2)
    with pytest.raises(
        UnsupportedSourceError, match=r"wds.split_by_node divides the shards among 2 ranks.*shard=False"
    ):
        next(iter(midepoch.wrap(divided, replay=True, world=world, shard=True)))
    with pytest.raises(UnsupportedSourceError, match=r"read by 2 ranks and does not divide.*pass shard=True"):
        next(iter(midepoch.wrap(undivided, replay=True, world=world)))
    ranks = [
        midepoch.wrap(undivided, replay=True, world=World(rank, 2), shard=True, tail="uneven") for rank in range(2)
    ]
    assert sorted(flat(flat(ranks))) == list(range(27))
    monkeypatch.setenv("WORLD_SIZE", "2")
    given = []
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        shuffled = pipeline(wds.SimpleShardList(urls), wds.shuffle(9), wds.split_by_node, wds.shuffle(9))
        given += flat(midepoch.wrap(shuffled, replay=True, shard=False))
    assert sorted(given) == list(range(27))  # the shuffle before the split is the same on both ranks


def test_a_folder_that_is_emptied_is_refused(tmp_path: Path) -> None:
    dataset = pipeline(wds.shardlists.DirectoryShardList(f"{tmp_path}/"))
    for replay in (False, True):
        with pytest.raises(UnsupportedSourceError, match=r"DirectoryShardList takes files.*SimpleShardList\(sorted"):
            midepoch.wrap(dataset, replay=replay)
