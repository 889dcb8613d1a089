"""mosaicml-streaming: counted by us, its traps mended, elastic as it is itself."""

from __future__ import annotations

import functools
import itertools
import json
import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import cpu_torchvision  # noqa: F401
import pytest

from support.places import ROOT

pytest.importorskip("streaming", reason="mosaicml-streaming is not installed (pip install midepoch[streaming])")

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from streaming import Stream, StreamingDataLoader, StreamingDataset
from streaming.base.partition import get_partitions
from streaming.base.world import World
from torch.utils.data import DataLoader

import midepoch
from midepoch import MidepochError, SourceError, StateMismatchError, UnsupportedSourceError, wrap
from midepoch.adapters.streaming.adapter import _KeyedPass
from midepoch.loader.loader import Loader
from midepoch.state.witness import LONGEST
from midepoch.testing import ResumableTests
from support import commands, forking, jobs, witness_sources
from support import streaming_sources as sources
from support.sources import every_place, flat, heads
from support.witness_sources import found_in, state_after


@pytest.fixture(autouse=True)
def _nothing_is_left_open() -> Iterator[None]:
    yield
    sources.let_go()


def make(**options: Any) -> Loader:
    return wrap(sources.bare(**options))


def taken(loader: Loader, count: int | None = None) -> list[list[int]]:
    return sources.numbers(list(itertools.islice(iter(loader), count)))


def resumed(state: dict[str, Any], **options: Any) -> Loader:
    loader = make(**options)
    loader.load_state_dict(state)
    return loader


@pytest.mark.parametrize(("drop_last", "num_workers"), [(False, 0), (True, 2)])
def test_every_place_of_two_epochs_is_gone_on_from(num_workers: int, drop_last: bool) -> None:
    options = {"num_workers": num_workers, "drop_last": drop_last}
    first, second = every_place(functools.partial(make, **options), (1, 4, 5, 7), read=sources.identify)
    assert first != second and len(first) == len(second) == len(make(**options))
    assert drop_last or sorted(flat(second)) == list(range(sources.SIZE))


def test_other_ways_to_make_batches_are_counted_too() -> None:
    options = {"batching_method": "per_stream", "size": 15}
    loader = make(**options)
    assert len(loader) == len(loader.source)  # as the source says: only partitioning the epoch tells
    every_place(functools.partial(make, **options), epochs=1, read=sources.identify)
    taken(loader, 2)
    with pytest.raises(StateMismatchError, match=r"global batch size differs.*per_stream.*needs the same"):
        resumed(loader.state_dict(), batch_size=4, **options)


CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"size": 15}, "samples"), ({"epoch_size": 12}, "samples"), ({"shuffle_algo": "py1s"}, "shuffle"),
    ({"shuffle": False}, "shuffle"), ({"shuffle_block_size": 4}, "shuffle"), ({"sampling_method": "fixed"}, "sampling"),
    ({"partition_algo": "orig"}, "partition"), ({"batching_method": "stratified"}, "batching"), ({"seed": 8}, "seed"),
]  # fmt: skip


def test_what_does_not_fit_is_refused_by_name() -> None:
    state = heads(make, 2)[1]
    for change, told in CHANGES:
        other = wrap(sources.bare(**change), seed=8 if told == "seed" else None)
        before = other.state_dict()
        with pytest.raises(StateMismatchError, match=told):
            other.load_state_dict(state)
        assert other.state_dict() == before


def test_another_seed_of_the_dataset_gives_way_to_the_state_s() -> None:
    loader = make()
    head, state = taken(loader, 2), loader.state_dict()
    fresh = resumed(state, seed=99)
    assert head + taken(fresh) == taken(make())
    assert taken(fresh) == taken(loader)


class ItsOwnWay(DataLoader[Any]):
    def __iter__(self) -> Any:
        return super().__iter__()


class Picky(StreamingDataset):  # type: ignore[misc]
    def __iter__(self) -> Iterator[Any]:
        return (sample for sample in super().__iter__() if sample["number"] % 2)


def test_what_cannot_be_wrapped_says_what_can() -> None:
    dataset = sources.bare().dataset
    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: wrap(dataset), "StreamingDataLoader"),
        (lambda: wrap(DataLoader(dataset, batch_size=5)), "batch_size"),
        (lambda: wrap(sources.bare(), shard=True), "shard"),
        (lambda: wrap(sources.bare(), tail="drop"), "tail"),
        (lambda: wrap(ItsOwnWay(dataset, batch_size=sources.BATCH)), "its own way to iterate"),
        (lambda: make(kind=Picky), r"Picky has its own __iter__.*__getitem__"),
    ]
    for call, told in cases:
        with pytest.raises(UnsupportedSourceError, match=told):
            call()
    with pytest.raises(MidepochError, match="rank 0 of 1"):
        next(iter(wrap(sources.bare(), world=midepoch.World(0, 2))))


def test_a_plain_loader_over_a_streaming_dataset_works_too() -> None:
    loader = wrap(DataLoader(sources.bare().dataset, batch_size=sources.BATCH))
    assert taken(loader, 2) + taken(resumed(loader.state_dict())) == taken(make())


DRAWS: dict[str, dict[str, Any]] = {
    "samples": {"kind": sources.Drawing},
    "batches": {"loading": {"collate_fn": sources.mix}},
    "batches made in another way": {"kind": sources.Drawing, "batching_method": "per_stream", "size": 15},
}


def drawn(loader: Loader, count: int | None = None) -> list[dict[str, list[Any]]]:
    return [sources.drawn(batch) for batch in itertools.islice(iter(loader), count)]


@pytest.mark.parametrize("options", DRAWS.values(), ids=DRAWS)
def test_what_is_drawn_comes_again_on_any_number_of_workers(options: dict[str, Any]) -> None:
    with make(**options) as loader:
        assert loader.capabilities.exact_augmentations
        epochs = [drawn(loader) for _ in range(2)]
    values = [str(batch[name]) for batch in flat(epochs) for name in ("drawn", "mixed") if name in batch]
    assert len(set(values)) == len(values)
    for cut, (before, after) in enumerate([(0, 2), (2, 1), (2, 0)], start=1):
        with make(num_workers=before, **options) as loader:
            assert drawn(loader, cut) == epochs[0][:cut]
            state = loader.state_dict()
        with resumed(state, num_workers=after, **options) as loader:
            assert [drawn(loader), drawn(loader)] == [epochs[0][cut:], epochs[1]]


@given(
    canonical=st.sampled_from([1, 2, 4, 12]), nodes=st.sampled_from([1, 2, 4]), ranks_per_node=st.integers(1, 3),
    workers=st.integers(1, 3), batch_size=st.integers(1, 4), size=st.integers(13, 90), data=st.data(),
)  # fmt: skip
def test_samples_are_dealt_one_by_one_to_nodes_then_to_ranks(
    canonical: int, nodes: int, ranks_per_node: int, workers: int, batch_size: int, size: int, data: st.DataObject
) -> None:
    """Streaming's own plan, of any number of nodes that may go on with a state."""
    each = -(-size // canonical)
    each += -each % max(1, nodes // canonical)
    # Streaming refuses to begin in what fills up the sequence.
    behind = data.draw(st.integers(0, size // nodes)) * nodes
    sequence = get_partitions("relaxed", size, canonical, 1, 1, 1, 1).flatten()
    if canonical < nodes:  # which pads it by another number of samples
        sequence = get_partitions("relaxed", size, canonical, nodes, 1, 1, 1).transpose(3, 2, 0, 1, 4).flatten()
    plan = get_partitions("relaxed", size, canonical, nodes, ranks_per_node, workers, batch_size, behind, nodes)
    draws: Any = _KeyedPass(SimpleNamespace(batch_size=batch_size, shuffle_seed=0, batching_method="random"), None)
    found: dict[int, int] = {}
    for worker in range(nodes * ranks_per_node * workers):
        world = World(nodes, ranks_per_node, workers, worker)
        draws.stand(0, behind, world)
        mine = plan[world.node, world.rank_of_node, world.worker_of_rank].flatten()
        found |= {draws.words(index, number)[0]: number for index, number in enumerate(mine.tolist()) if number != -1}
    assert list(sequence[behind:]) == [found[position] for position in range(behind, len(sequence))]
    assert len(found) - (len(sequence) - behind) < nodes * ranks_per_node  # no more than to fill up a turn


def test_workers_that_persist_know_of_the_next_epoch() -> None:
    with make(kind=sources.Drawing) as loader:
        epochs = [drawn(loader) for _ in range(3)]
    loading = {"persistent_workers": True, "collate_fn": sources.mix}
    source = sources.bare(kind=sources.Drawing, num_workers=2, loading=loading)
    next(iter(source))  # workers of the loader as it was before
    with wrap(source) as loader:
        for epoch in range(3):
            loader.seek(epoch=epoch)
            got = drawn(loader)
            assert [batch["drawn"] for batch in got] == [batch["drawn"] for batch in epochs[epoch]]
        assert source.collate_fn is sources.mix
    with make(kind=sources.Drawing, loading={"collate_fn": sources.mix}) as loader:
        loader.seek(epoch=2)
        assert drawn(loader) == got


def test_a_place_that_the_nodes_do_not_divide_is_refused() -> None:
    loader = make()
    loader.seek(position=3)
    state = loader.state_dict()
    loader.source.dataset._parallel_rank_world = World(2, 1, 1, 0)
    for call in (functools.partial(loader.load_state_dict, state), functools.partial(loader.seek, position=5)):
        with pytest.raises(StateMismatchError, match=r"would repeat 1 of them on 2 nodes.*multiple of 2"):
            call()
    assert loader.position == 3
    loader.seek(position=4)
    assert loader.position == 4


@pytest.mark.parametrize("method", ["stratified", "per_stream", "device_per_stream"])
def test_a_place_within_a_batch_that_is_made_whole_is_refused(method: str) -> None:
    loader = make(batching_method=method)
    with pytest.raises(StateMismatchError, match=r"would repeat 1 of them.*multiple of the 3 samples"):
        loader.seek(position=4)
    loader.seek(position=3)
    assert loader.position == 3


class Held(Stream):  # type: ignore[misc]
    def __init__(self, local: str) -> None:
        super().__init__(local=local)
        self.generator = random.Random()


class OfStreams(StreamingDataset):  # type: ignore[misc]
    def __getitem__(self, at: Any) -> Any:
        return {**super().__getitem__(at), "drawn": self.streams[0].generator.random()}


def by_streams() -> StreamingDataLoader:
    return sources.bare(kind=OfStreams, streams=[Held(sources.a_copy(sources.SIZE))], local=None)


def by_an_attribute() -> StreamingDataLoader:
    loader = sources.bare()
    read = loader.dataset.get_item
    loader.dataset.get_item = lambda *arguments: {**read(*arguments), "drawn": random.random()}
    return loader


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("make_source", [by_streams, by_an_attribute])
def test_code_that_draws_is_found_where_it_hides(
    make_source: Callable[[], StreamingDataLoader], num_workers: int
) -> None:
    dataset = make_source().dataset

    def draws(epoch: int, position: int) -> list[list[float]]:
        source = StreamingDataLoader(dataset, batch_size=sources.BATCH, num_workers=num_workers)
        with wrap(source, seed=sources.SEED) as loader:
            assert loader.capabilities.exact_augmentations
            loader.seek(epoch=epoch, position=position)
            return [batch["drawn"].tolist() for batch in loader]

    whole = draws(1, 0)
    assert len(set(flat(whole))) == sources.SIZE
    assert draws(1, 2 * sources.BATCH) == whole[2:]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_dataset_is_read_for_one_loader_at_a_time(num_workers: int) -> None:
    """As Streaming has it: a second pass ends the first, which is said where that one is gone on with."""
    source = sources.bare(num_workers=num_workers)
    whole = taken(wrap(source))
    loaders = [wrap(source), wrap(source)]
    one, other = map(iter, loaders)
    assert sources.numbers([next(one), next(other)]) == whole[:1] * 2
    for batch in (1, 2):
        for each in (one, other):
            with pytest.raises(SourceError, match=r"another pass .* its own StreamingDataset; the next batch is"):
                next(each)
            assert sources.numbers([next(each)]) == whole[batch : batch + 1]
    assert sources.numbers(list(other)) == whole[3:]
    assert [(loader.epoch, loader.position) for loader in loaders] == [(0, 3 * sources.BATCH), (1, 0)]
    with pytest.raises(SourceError, match="another pass"):
        next(one)
    assert sources.numbers([next(one)]) == whole[3:4]
    next(iter(source))  # a pass that is not midepoch's
    if not num_workers:
        with pytest.raises(SourceError, match="another pass"):
            next(one)


def fail_at(dataset: StreamingDataset, call: int) -> None:
    """Let the thread that reads ahead fail."""
    calls = itertools.count()

    def prepare(shard: int, blocking: bool = True) -> None:
        if next(calls) == call:
            raise OSError("a connection that ended")

    dataset.prepare_shard = prepare


@pytest.mark.parametrize(("method", "num_workers"), [("random", 0), ("per_stream", 2)])
def test_a_pass_that_streaming_ends_silently_ends_no_epoch(method: str, num_workers: int) -> None:
    """As it does where a thread that reads ahead fails; some methods leave nobody to know how many batches remain."""
    source = sources.bare(batching_method=method, num_workers=num_workers)
    loader, whole = wrap(source), taken(make(batching_method=method))
    fail_at(source.dataset, 3)
    done: list[list[int]] = []
    with pytest.raises(SourceError, match=r"one of Streaming's prefetching threads has failed"):
        done.extend(map(sources.identify, loader))
    assert len(done) < len(whole) and done == whole[: len(done)]
    assert taken(resumed(loader.state_dict(), batching_method=method)) == whole[len(done) :]


@pytest.mark.parametrize("then", ["close", "seek", "load", "again", "wrap", "go on"])
def test_a_thread_of_streamings_that_failed_is_not_waited_for(then: str) -> None:
    """It says nothing when it ends, for which Streaming would wait."""
    source = sources.bare(predownload=2)
    loader = wrap(source)
    fail_at(source.dataset, 4)
    iterator = iter(loader)
    next(iterator)
    while not source.dataset._event.is_set():
        time.sleep(0.01)
    if then == "close":
        loader.close()
        return
    if then == "seek":
        loader.seek(epoch=0, position=0)
    if then == "load":
        loader.load_state_dict(loader.state_dict())
    goes_on: Any = loader if then == "again" else wrap(source) if then == "wrap" else iterator
    with pytest.raises(SourceError, match=r"one of Streaming's prefetching threads has failed"):
        list(goes_on)


def die_once(marker: str, worker: int) -> None:
    if worker == 1 and Path(marker).exists():
        Path(marker).unlink()
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_that_dies_as_a_pass_begins_stops_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streaming's workers wait for each other then, by counts in shared memory, and torch for them."""
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.2)
    (marker := tmp_path / "dies").touch()
    loading = {"worker_init_fn": functools.partial(die_once, str(marker))}
    with wrap(sources.bare(num_workers=2, loading=loading)) as loader:
        with pytest.raises(SourceError, match="DataLoader worker"):
            list(loader)
        assert taken(loader) == taken(make())


@pytest.mark.parametrize("num_workers", [0, 2])
def test_generators_and_the_dataset_stay_as_they_were(num_workers: int) -> None:
    generator = torch.Generator().manual_seed(1)
    loading = {"collate_fn": sources.mix, "generator": generator}
    source = sources.bare(kind=sources.Drawing, num_workers=num_workers, loading=loading)
    dataset = source.dataset

    def states() -> tuple[Any, ...]:
        held = generator.get_state().tolist(), str(dataset.generator.bit_generator.state)
        return random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist(), *held

    before = states()
    with wrap(source, seed=sources.SEED) as loader:
        assert len(list(loader)) == 5
    assert states() == before
    assert source.generator is generator and source.collate_fn is sources.mix
    assert not {"_get_work", "_each_sample_id"} & vars(dataset).keys()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_error_reaches_the_loop_and_the_loader_goes_on(num_workers: int, tmp_path: Path) -> None:
    whole = taken(make())
    (marker := tmp_path / "broken").touch()
    failing = functools.partial(sources.Failing, (whole[2][1], str(marker)))
    loader, got = make(kind=failing, num_workers=num_workers), list[list[int]]()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="out of order"):
            got.extend(map(sources.identify, loader))
        assert got == whole[:2]
        assert loader.state_dict()["position"] == 2 * sources.BATCH
        loader.load_state_dict(loader.state_dict())  # a new pass would begin the next epoch
    marker.unlink()
    assert got + taken(loader) == whole


# --- several ranks, in real processes ---


def ranks(
    out: Path, world_size: int, size: int, batch_size: int, steps: int = -1, state: dict[str, Any] | None = None,
    replication: int | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    shutil.copytree(sources.written(size), out / "local")
    (out / "state.json").write_text(json.dumps(state))
    told = ["-" if state is None else out / "state.json", steps, size, batch_size, replication or 1]
    command = [sources.__file__, str(out), *map(str, told)]
    processes = jobs.ranks(command, world_size, modules=forking.IMPORTED)
    errors = [process.communicate(timeout=120)[1] for process in processes]
    assert not any(process.returncode for process in processes), "\n".join(errors)[-3000:]
    return [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(world_size)]


def test_each_step_has_the_same_samples_on_other_ranks(tmp_path: Path) -> None:
    """1 x 12, 2 x 6 and 3 x 4 are the same steps; the ranks share each."""
    alone = ranks(tmp_path / "alone", 1, 48, 12)[0]
    whole, drawn = alone["batches"], dict(zip(flat(alone["batches"]), flat(alone["draws"]), strict=True))
    for world_size, new in ((2, 3), (3, 1), (1, 2)) if os.environ.get("MIDEPOCH_CHAOS") else ((2, 3),):
        head = ranks(tmp_path / f"{world_size}", world_size, 48, 12 // world_size, steps=2)
        states = [rank["state"] for rank in head]
        assert all(state == states[0] for state in states)
        rest = ranks(tmp_path / f"{world_size}to{new}", new, 48, 12 // new, state=states[-1])
        for part, start in ((head, 0), (rest, 2)):
            steps = [sorted(flat(list(step))) for step in zip(*(rank["batches"] for rank in part), strict=True)]
            assert steps == [sorted(step) for step in whole[start : start + len(steps)]]
            for rank in part:
                assert flat(rank["draws"]) == [drawn[number] for number in flat(rank["batches"])]
        assert [len(rank["batches"]) for rank in rest] == [rank["left"] for rank in rest] == [2] * new


def test_samples_are_repeated_as_streaming_does(tmp_path: Path) -> None:
    """On another number of ranks, too, where a step has another number of samples."""
    head = ranks(tmp_path / "two", 2, 21, 4, steps=1)
    alone = ranks(tmp_path / "alone", 1, 21, 1)[0]
    drawn = dict(zip(flat(alone["batches"]), flat(alone["draws"]), strict=True))
    for new, batch_size in ((2, 4), (1, 4), (3, 1)) if os.environ.get("MIDEPOCH_CHAOS") else ((2, 4), (3, 1)):
        rest = ranks(tmp_path / f"{new}x{batch_size}", new, 21, batch_size, state=head[0]["state"])
        got = Counter(flat([batch for rank in (*head, *rest) for batch in rank["batches"]]))
        assert set(got) == set(range(21)) and got.total() == 8 + -(-13 // new) * new
        assert [len(rank["batches"]) for rank in rest] == [rank["left"] for rank in rest]
        for rank in rest:
            assert rank["draws"][0] == [drawn[number] for number in rank["batches"][0]]


def test_replicated_samples_count_once(tmp_path: Path) -> None:
    head = ranks(tmp_path / "head", 2, 24, 4, steps=2, replication=2)
    assert head[0]["batches"] == head[1]["batches"]
    assert head[0]["state"]["position"] == 8
    rest = ranks(tmp_path / "rest", 2, 24, 4, state=head[0]["state"], replication=2)
    got = flat(head[1]["batches"] + rest[1]["batches"])
    assert sorted(got) == list(range(24))
    with pytest.raises(AssertionError, match="replication differs"):
        ranks(tmp_path / "other", 2, 24, 2, state=head[0]["state"])


# --- data that changed ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data; the same copied at another time; others of equal sizes; and all three with hashes in their index."""
    folder = tmp_path_factory.mktemp("mds")
    kinds: dict[str, dict[str, Any]] = {"": {}, "hashed-": {"hashes": ["sha1"]}, "zipped-": {"compression": "zstd"}}
    for name, keywords in kinds.items():
        witness_sources.write_mds(f"{folder}/{name}first", **keywords)
        witness_sources.write_mds(f"{folder}/{name}changed", content=1, **keywords)
        shutil.copytree(folder / f"{name}first", folder / f"{name}copied", copy_function=shutil.copyfile)
    return folder


PERSIST = "content, workers that persist"


@pytest.mark.parametrize("batches", [3, 12], ids=["in mid-epoch", "at the boundary"])
def test_data_that_changed_are_told(batches: int, folders: Path, tmp_path: Path) -> None:
    first, changed, copied = (str(folders / name) for name in ("first", "changed", "copied"))
    state, rest = state_after("streaming", batches, local=first)
    assert state["witness"].split("/")[1] == "0" and len(state["witness"]) <= LONGEST and len(json.dumps(state)) <= 512
    cases: witness_sources.Cases = {
        "nothing": ({"local": first}, "exact"),
        "workers": ({"local": first, "workers": 2}, "exact"),
        "batch size": ({"local": first, "batch": 4}, "exact"),
        "elsewhere": ({"local": copied}, "exact"),  # written at other times
        "content": ({"local": changed}, "StateMismatchError"),
        "content, workers": ({"local": changed, "workers": 2}, "StateMismatchError"),
        PERSIST: ({"local": changed, "workers": 2, "persistent": True}, "StateMismatchError"),
        "content, not looked at": ({"local": changed, "options": {"verify": "off"}}, "exact"),
    }
    found = found_in(state, cases, "streaming")
    told, at_boundary, others = found["content"]["error"], batches == 12, dict[str, str]()
    if at_boundary:  # another sample may be meant
        others = dict.fromkeys(("content", "content, workers", PERSIST), "told")
        (told,) = found["content"]["warnings"]
    witness_sources.check(found, cases, **others)
    assert all(found[name]["rest"] == rest for name in ("nothing", "workers", "batch size", "elsewhere"))
    assert "the dataset's first sample" in told
    if not at_boundary:
        assert found["content"]["batches"] == found["content, workers"]["batches"] == 0
    assert found["nothing"]["opened"] and not found["workers"]["opened"] and not found["content, workers"]["opened"]


def test_of_data_that_are_downloaded_the_index_is_compared(folders: Path, tmp_path: Path) -> None:
    caches = (str(tmp_path / f"cache-{number}") for number in itertools.count())

    def of(name: str, **arguments: Any) -> dict[str, Any]:
        return {"local": next(caches), "remote": str(folders / name), **arguments}

    plain, _ = state_after("streaming", 3, **of("first"))
    hashed, rest = state_after("streaming", 3, **of("hashed-first"))
    zipped, _ = state_after("streaming", 3, **of("zipped-first"))
    local, _ = state_after("streaming", 3, local=str(folders / "first"))
    assert all(state["witness"].startswith("0//") for state in (plain, hashed, zipped))
    cases = [
        (hashed, of("hashed-first"), "exact"),
        (hashed, of("hashed-copied", workers=2), "exact"),
        (hashed, of("hashed-copied", options={"verify": "strict"}), "exact"),
        (hashed, of("hashed-changed"), "StateMismatchError"),
        (hashed, of("hashed-changed", workers=2), "StateMismatchError"),
        (hashed, of("hashed-changed", options={"verify": "warn"}), "told"),
        (hashed, of("hashed-changed", options={"verify": "off"}), "exact"),
        # Equal sizes and no hashes: nothing that is known without a download differs (docs/guarantees.md).
        (plain, of("changed"), "exact"),
        (plain, of("copied"), "exact"),
        (plain, {"local": str(folders / "copied")}, "exact"),  # downloaded or not, the shards are the same
        (zipped, of("zipped-copied", workers=2), "exact"),
        (zipped, {"local": str(folders / "zipped-copied")}, "exact"),
        # A sample was compared, and cannot be now.
        (local, of("first"), "told"),
        (local, of("first", options={"verify": "strict"}), "StateMismatchError"),
    ]
    found = [witness_sources.resume(state, arguments, "streaming") for state, arguments, _ in cases]
    assert [witness_sources.outcome(each) for each in found] == [end for *_, end in cases]
    assert found[0]["rest"] == found[1]["rest"] == rest
    assert "cannot be read without a download" in found[-2]["warnings"][0]


def test_nothing_is_downloaded_for_the_witness(folders: Path, tmp_path: Path) -> None:
    """The shard of the first sample is gone from the remote. A resume behind it does not miss it."""
    remote = tmp_path / "remote"
    shutil.copytree(folders / "first", remote)
    state, rest = state_after("streaming", 6, remote=str(remote), local=str(tmp_path / "before"), shuffle=False)
    (remote / "shard.00000.mds").unlink()
    arguments = {"remote": str(remote), "local": str(tmp_path / "after"), "shuffle": False}
    found = witness_sources.resume(state, {**arguments, "options": {"verify": "strict"}}, "streaming")
    assert found["rest"] == rest and witness_sources.outcome(found) == "exact"
    assert not (tmp_path / "after" / "shard.00000.mds").exists()


def test_the_example() -> None:
    assert "exact" in commands.script(ROOT / "examples" / "streaming_loader.py")


class TestStreaming(ResumableTests):
    make_loader = staticmethod(sources.make_loader)
    identify: ClassVar[Any] = staticmethod(sources.identify)
    draws: ClassVar[Any] = staticmethod(sources.draws)
    world_sizes = (1,)
    shuffled = True
    # Each dataset of a machine looks through the shared memory of all that were made before it, and keeps it open.
    cuts = (2,)
    epochs = 1
    quick = True
    state_bytes = 512
