"""Faults of the machine: full and read-only disks, reads and servers that fail, killed workers, clocks, forks."""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import multiprocessing
import multiprocessing.resource_sharer
import os
import random
import shutil
import threading
import time
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import DataLoader

import midepoch
from midepoch import Snapshot, SnapshotError, SourceError
from midepoch.reading.tar import TarError
from midepoch.testing import digest
from support import fault_sources as faults
from support import jobs, sources

CHAOS = bool(os.environ.get("MIDEPOCH_CHAOS"))

pytestmark = [*faults.QUIET, pytest.mark.usefixtures("cache")]


def shards(folder: Path, counts: tuple[int, ...] = (4, 6, 0, 7, 3), size: int = 0) -> list[str]:
    pytest.importorskip("webdataset", reason="webdataset is not installed")
    from support import webdataset_sources

    return webdataset_sources.make_shards(folder, list(counts), size)


def contents(sample: dict[str, Any]) -> tuple[int, int]:
    return int(sample["cls"]), zlib.crc32(sample["bin"])


def indexed(urls: list[str], workers: int = 0, **settings: Any) -> Any:
    import webdataset as wds

    dataset = wds.WebDataset(urls, shardshuffle=9).shuffle(20).map(contents).batched(3, collation_fn=list)
    return midepoch.wrap(DataLoader(dataset, batch_size=None, num_workers=workers), seed=1, **settings)


def model(value: float = 0.0) -> torch.nn.Module:
    made = torch.nn.Linear(100, 100)  # 40 kB
    torch.nn.init.constant_(made.weight, value)
    return made


CURES = {"full": r"has room \(0 MiB are free\)", "read-only": "let this process write to .*/disk, or"}
REFUSE: dict[str, Callable[[Path], None]] = {"full": faults.fill, "read-only": faults.read_only}


@faults.AS_ROOT
@pytest.mark.parametrize("why", REFUSE)
def test_a_snapshot_on_a_disk_that_takes_no_more(why: str, tmp_path: Path) -> None:
    with faults.disk(tmp_path / "disk", "300k") as disk:
        path = disk / "snapshot.pt"
        with Snapshot(path, model=model(1), signals=()) as snapshot:
            snapshot.save()
        REFUSE[why](disk)
        before = path.read_bytes()
        with Snapshot(path, model=model(2), signals=()) as snapshot:
            assert snapshot.load()
            with pytest.raises(SnapshotError, match=rf"the previous snapshot is unchanged: .*; .*{CURES[why]}"):
                snapshot.save()
            assert path.read_bytes() == before and not list(disk.glob("*.draft"))
            faults.read_only(disk, False)
            (disk / "filler").unlink(missing_ok=True)
            snapshot.save()  # when there is room again, the same run goes on


@faults.AS_ROOT
@pytest.mark.parametrize("why", REFUSE)
def test_indexes_on_a_disk_that_takes_no_more(why: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    urls = shards(tmp_path / "shards")
    whole = list(indexed(urls))
    with faults.disk(tmp_path / "disk", "300k") as disk:
        kept = list(indexed(urls[:2], index_cache=disk))
        REFUSE[why](disk)
        caplog.clear()
        assert list(indexed(urls, index_cache=disk)) == whole
        told = [each.getMessage() for each in caplog.records if each.name == "midepoch.webdataset"]
        assert len(told) == 1, "once, however many shards there are"
        assert "cannot be kept" in told[0] and "set MIDEPOCH_CACHE or index_cache= to a folder with space" in told[0]
        assert list(indexed(urls[:2], index_cache=disk)) == kept
        assert len(list(disk.glob("*/*.index"))) == 2 and not list(disk.glob("*/*.part"))


def maker_of(source: str, workers: int, data: Path) -> Callable[[], Any]:
    if source == "ffcv":
        ffcv_sources = pytest.importorskip("support.ffcv_sources", reason="ffcv is not installed")
        data.mkdir()
        shutil.copy(ffcv_sources.file("pages"), data / "raw.beton")
        # FFCV's own constructor reads the tables, and fails in ways of its own.
        made = ffcv_sources.make(path=str(data / "raw.beton"), os_cache=False, num_workers=workers)
        return lambda: midepoch.wrap(made, seed=1)
    urls = shards(data, (9, 3, 14, 7, 11), size=40000)
    if source == "webdataset streamed":
        from support import webdataset_sources

        urls = webdataset_sources.compress(urls)
    return lambda: indexed(urls, workers)


@pytest.mark.parametrize(
    ("source", "workers"),
    [("webdataset", 0), ("webdataset", 2), ("webdataset streamed", 0), pytest.param("ffcv", 2, marks=pytest.mark.long)],
)
def test_reads_that_fail_give_the_same_batches_or_an_error(source: str, workers: int, tmp_path: Path) -> None:
    """After an error the same loader goes on, or another one from the state."""
    make, failed = maker_of(source, workers, tmp_path / "data"), 0
    with make() as loader:
        whole = list(map(digest, loader))
    for turn in range(200 if CHAOS else 6):
        fault, every = ("eio", "short")[turn % 2], 2 + 3 * (turn // 2)
        loader, got, batches = None, list[str](), iter(list[Any]())
        try:
            with faults.reads(tmp_path / "data", fault, every):
                loader = make()
                batches = iter(loader)
                got.extend(map(digest, batches))
        except (SourceError, TarError):
            assert fault == "eio"
            failed += 1
            state = None if loader is None else loader.state_dict()
            if loader is None or turn % 4 == 0:
                if loader is not None:
                    loader.close()
                loader = make()
                if state is not None:
                    loader.load_state_dict(state)
                batches = iter(loader)
            if state is None or state["epoch"] == 0:
                got.extend(map(digest, batches))
        loader.close()
        assert got == whole, (turn, fault)
    assert failed, "some must have failed"


def test_reads_of_a_snapshot_that_fail(tmp_path: Path) -> None:
    """What was saved last is loaded; or, told, what was saved before; or an error changes nothing."""
    path, errors = tmp_path / "snapshot.pt", 0
    saved = model()
    with Snapshot(path, model=saved, signals=()) as snapshot:
        for value in (1.0, 2.0):
            torch.nn.init.constant_(saved.weight, value)  # type: ignore[arg-type]
            snapshot.save()
    for turn in range(200 if CHAOS else 12):
        fresh: Any = model(0)
        reader = Snapshot(path, model=fresh, signals=())
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            try:
                with faults.reads(tmp_path, ("eio", "short")[turn % 2], 1 + turn // 2):
                    reader.load()
                expected = 1.0 if told else 2.0
            except SnapshotError:
                expected = 0.0
                errors += 1
        assert bool((fresh.weight == expected).all()), turn
        assert reader.load() and bool((fresh.weight == 2.0).all())
        reader.close()
    assert errors, "some must have failed"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[faults.Server]:
    fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed")
    aiohttp = pytest.importorskip("aiohttp", reason="aiohttp is not installed")
    monkeypatch.setitem(fsspec.config.conf, "http", {"client_kwargs": {"timeout": aiohttp.ClientTimeout(total=0.5)}})
    made = faults.Server(tmp_path / "shards", seed=11)
    yield made
    made.close()


def test_a_server_out_of_order_changes_no_batch(server: faults.Server, tmp_path: Path) -> None:
    urls = [f"{server.url}/{Path(url).name}" for url in shards(tmp_path / "shards", (5, 3, 6, 4), size=30000)]
    whole = list(indexed(urls))
    refused = resumed = 0
    for turn in range(60 if CHAOS else 4):
        workers, settings = 2 if turn % 4 == 3 else 0, {"index_cache": tmp_path / f"cache{turn % 2 and turn}"}
        loader, got = None, []
        server.often = 0.05 if turn % 2 else 0.2
        # A server that ignores ranges, or says that a shard is empty, is believed: it may be so.
        server.faults = ("500", "reset", "cut", "stall")
        while loader is None:
            try:
                loader = indexed(urls, workers, **settings)
            except SourceError:
                refused += 1
                server.often /= 2
        assert loader.capabilities.rank_independent, "a fault must not make streams of what is indexed"
        batches, server.faults = iter(loader), server.FAULTS
        for attempt in itertools.count():
            try:
                got.extend(batches)
                break
            except SourceError:
                state = loader.state_dict()
                assert state["position"] == sum(map(len, got))
                resumed += 1
                if attempt > 3:
                    server.often = 0.0
                if attempt % 2:
                    loader.close()
                    server.often, often = 0.0, server.often
                    loader = indexed(urls, workers, **settings)
                    loader.load_state_dict(state)
                    batches, server.often = iter(loader), often
        loader.close()
        assert got == whole, f"turn {turn}"
    print(f"{refused} times refused at once, {resumed} resumes, failures: {server.failed}")
    assert resumed > 1 and sum(server.failed.values()) > 5


def slow(**options: Any) -> DataLoader[Any]:
    return DataLoader(jobs.Noisy(96, 0.001), 4, **options)


def errors_of(killed: list[psutil.Process]) -> int:
    """How many errors torch still raises from its handler of signals until these have died: here, and not later."""
    errors = 0
    while True:
        try:
            for worker in killed:
                with contextlib.suppress(psutil.NoSuchProcess):
                    while worker.status() != psutil.STATUS_ZOMBIE:
                        time.sleep(0.01)
            time.sleep(0.05)
        except RuntimeError as error:
            assert "is killed by signal" in str(error)
            errors += 1
        else:
            return errors


@pytest.mark.parametrize("persistent", [False, True])
def test_a_killed_worker_loses_no_batch_and_repeats_none(persistent: bool) -> None:
    whole = sources.taken(midepoch.wrap(slow(), seed=1))
    generator = random.Random(5)
    errors = 0
    for kill in range(12 if CHAOS else 4):
        loader = midepoch.wrap(slow(num_workers=2, persistent_workers=persistent), seed=1)
        others = set(multiprocessing.active_children())
        batches, got = iter(loader), []
        at, killed = generator.randrange(1, 16), []
        try:
            for batch in batches:
                got.append(batch.tolist())
                if len(got) == at:
                    workers = sorted(each.pid or 0 for each in set(multiprocessing.active_children()) - others)
                    for worker in map(psutil.Process, generator.sample(workers, 2 if kill % 4 == 3 else 1)):
                        killed.append(worker)
                        worker.kill()
        except RuntimeError as error:
            # torch raises it out of a signal's handler, wherever the main process happens to be: in the loader, where
            # it becomes a SourceError, or in the lines above.
            errors += 1
            assert any(told in str(error) for told in ("is killed by signal", "exited unexpectedly"))
        errors += errors_of(killed)
        state = loader.state_dict()
        assert got == whole[: len(got)]
        assert (state["epoch"], state["position"]) == (0, 4 * len(got)) or len(got) == len(whole)
        if kill % 2:
            loader.close()
            loader = midepoch.wrap(slow(num_workers=1), seed=1)
            loader.load_state_dict(state)
            batches = iter(loader)
        if len(got) < len(whole):
            got += sources.taken(batches)
        assert got == whole, f"kill {kill} at batch {at}"
        loader.close()
    assert errors, "some kill must have been met before all batches were there"


def test_clocks_that_jump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By days, back and forth, at every look at the clock: nothing that midepoch does goes by the time of day."""
    urls = shards(tmp_path / "shards")
    whole, noisy = list(indexed(urls)), sources.taken(midepoch.wrap(slow(), seed=1))
    real, jumps = time.time, random.Random(3)
    monkeypatch.setattr(time, "time", lambda: real() + 86400 * jumps.uniform(-400, 400))
    monkeypatch.setattr(time, "time_ns", lambda: int(time.time() * 1e9))
    for number, url in enumerate(urls):  # shards from the future and from long ago
        os.utime(url, ((1e9, 4e9)[number % 2],) * 2)
    assert [list(indexed(urls)) for _ in range(2)] == [whole] * 2
    path, got = tmp_path / "snapshot.pt", list[Any]()
    loader = midepoch.wrap(slow(), seed=1)
    with Snapshot(path, every=3, data=loader, signals=()) as snapshot:
        for batch in loader:
            got.append(batch.tolist())
            snapshot.step()
            os.utime(tmp_path, (1e9, 1e9))
            assert len(got) < 3 or torch.load(path, weights_only=True)["steps"] == len(got) // 3 * 3
    assert got == noisy
    with Snapshot(path, data=midepoch.wrap(slow(), seed=1), signals=()) as again:
        assert again.load() and again.steps == 24


def test_workers_are_forked_while_threads_run(tmp_path: Path) -> None:
    """torch's threads compute, another thread iterates a loader of its own: no worker waits for a lock of theirs."""
    urls = shards(tmp_path / "shards")
    shard_batches, noisy = list(indexed(urls)), sources.taken(midepoch.wrap(slow(), seed=1))
    stop = threading.Event()

    def compute() -> None:
        while not stop.is_set():
            torch.mm(torch.ones(200, 200), torch.ones(200, 200))

    def iterate() -> None:
        while not stop.is_set():
            assert list(indexed(urls)) == shard_batches

    with concurrent.futures.ThreadPoolExecutor() as pool:
        running = [pool.submit(each) for each in (compute, iterate)]
        try:
            for turn in range(60 if CHAOS else 3):
                with midepoch.wrap(slow(num_workers=2, multiprocessing_context="fork", timeout=60), seed=1) as wrapped:
                    assert sources.taken(wrapped) == noisy, turn
                with indexed(urls, 2) as wrapped:
                    assert list(wrapped) == shard_batches, turn
        finally:
            stop.set()
        for each in running:
            each.result()


def build_indexes(urls: list[str], results: Any = None) -> None:
    batches = list(indexed(urls))
    if results is not None:
        results.put(batches)


def test_two_jobs_build_indexes_in_one_folder_and_one_is_killed(tmp_path: Path, cache: Path) -> None:
    urls = shards(tmp_path / "shards", tuple([3] * 60))
    whole = list(indexed(urls, index_cache=tmp_path / "other"))
    context = multiprocessing.get_context("fork")
    generator = random.Random(8)
    interrupted = 0
    for turn in range(200 if CHAOS else 6):
        shutil.rmtree(cache, ignore_errors=True)
        results = context.SimpleQueue()
        victim = context.Process(target=build_indexes, args=(urls,))
        other = context.Process(target=build_indexes, args=(urls, results))
        victim.start()
        other.start()
        seen = generator.randrange(8)  # the victim has found so many indexes, or is done
        while victim.is_alive() and len(list(cache.glob("*/*"))) < seen:
            time.sleep(0.0005)
        victim.kill()
        victim.join()
        interrupted += victim.exitcode != 0
        assert results.get() == whole, f"turn {turn}"
        other.join()
        assert list(indexed(urls)) == whole, f"turn {turn}"
        kept = [each.suffix for each in cache.glob("*/*")]
        assert kept.count(".index") == len(urls)
        assert len(kept) <= len(urls) + 16, "each of its threads leaves one draft at most"
    assert interrupted
