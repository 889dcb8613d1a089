"""`midepoch trace`: what a step was trained on, bit for bit, and which steps were given a sample."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, WeightedRandomSampler

import midepoch
from midepoch import MidepochError, World
from midepoch.tools.trace import trace
from support import commands, sources

SIZE = 50


def plain(batch_size: int = 4, **options: Any) -> Any:
    return DataLoader(sources.Noisy(SIZE), batch_size, shuffle=True, **options)


def small() -> Any:
    return plain(3)


def in_workers() -> Any:
    return plain(num_workers=2)


def weighted() -> Any:
    return DataLoader(sources.Noisy(SIZE), 4, sampler=WeightedRandomSampler([1.0 + each for each in range(SIZE)], SIZE))


def in_batches() -> Any:
    return DataLoader(sources.Noisy(SIZE), batch_sampler=BatchSampler(RandomSampler(range(SIZE)), 7, False))


class Reversed(BatchSampler):
    def __iter__(self) -> Any:
        return reversed(list(super().__iter__()))


def own_batches() -> Any:
    return DataLoader(sources.Noisy(SIZE), batch_sampler=Reversed(RandomSampler(range(SIZE)), 7, False))


def wrapped(rank: int = 0, world_size: int = 1) -> Any:
    return midepoch.wrap(plain(), seed=5, tail="drop", then=torch.neg, world=World(rank, world_size))


def grouped() -> Any:
    return midepoch.wrap(small(), seed=5, global_batch=10)


def alone() -> Any:
    return midepoch.wrap(small(), seed=5, tail="uneven")


def fails() -> Any:
    raise RuntimeError("no such disk")


def train(path: Path, make: Any, steps: int = 30, ranks: int = 1, **options: Any) -> dict[int, Any]:
    """Train, and skip on the way. Returns the batches of rank 0 by step."""
    made = make()
    loader = made if isinstance(made, midepoch.Loader) else midepoch.wrap(made, seed=5, **options)
    if ranks > 1:
        loader.reshard(World(0, ranks))
    seen: dict[int, Any] = {}
    with midepoch.Snapshot(path, ledger=True, signals=(), data=loader) as snapshot:
        while snapshot.steps < steps:
            for batch in loader:
                snapshot.step()
                seen[snapshot.steps] = batch
                if snapshot.steps == steps:
                    break
                if snapshot.steps == 6 and loader.capabilities.skips:
                    loader.skip(*((30, 35) if loader.unit == "sample" else (3, 4)), epoch=1)
        snapshot.save()
    loader.close()
    return seen


@pytest.mark.parametrize(("make", "ranks"), [
    (plain, 1), (plain, 3), (in_workers, 2), (weighted, 2), (in_batches, 1), (own_batches, 2), (wrapped, 2),
    (grouped, 2),
])  # fmt: skip
def test_batches_of_steps_and_steps_of_samples(make: Any, ranks: int, tmp_path: Path) -> None:
    seen, target = train(tmp_path / "snapshot.pt", make, ranks=ranks), f"{__file__}:{make.__name__}"
    for step in (1, 5, 14, 20, 30):
        out = tmp_path / f"{step}.pt"
        rows = trace(tmp_path, step, source=target, out=out)["rows"]
        given = torch.load(out, weights_only=False)
        assert [row["rank"] for row in rows] == list(range(ranks)) == list(given)
        assert torch.equal(given[0][0], seen[step]), step
        for row in rows:
            assert given[row["rank"]][0][:, 0].abs().int().tolist() == row["indices"], row
    for index in (0, 7, 49):
        steps = [step for step, batch in seen.items() for each in batch[:, 0].abs().int().tolist() if each == index]
        assert [row["step"] for row in trace(tmp_path, sample=index, rank=0, source=target)["rows"]] == steps
        assert trace(tmp_path, sample=index, rank=ranks, source=target)["rows"] == []


def test_a_samplers_own_order_needs_the_source(tmp_path: Path) -> None:
    train(tmp_path / "snapshot.pt", weighted)
    for name in ("step", "sample"):
        with pytest.raises(midepoch.UnsupportedSourceError, match="pass --source"):
            trace(tmp_path, **{name: 3})  # type: ignore[arg-type]  # mypy takes it for any of the options


@pytest.mark.parametrize(("made", "named", "words"), [
    (plain, "small", "batch_size differs: the run had 4"),
    (plain, "weighted", "order differs"),
    (plain, "wrapped", "tail differs: the run had pad"),
    (plain, "fails", "fails .RuntimeError: no such disk"),
    (weighted, "plain", "order differs"),
    (grouped, "alone", "global_batch differs: the run had 10, .* has None"),
])  # fmt: skip
def test_another_source_is_refused(made: Any, named: str, words: str, tmp_path: Path) -> None:
    train(tmp_path / "snapshot.pt", made)
    with pytest.raises(MidepochError, match=words):
        trace(tmp_path, 3, source=f"{__file__}:{named}", out=tmp_path / "out.pt")
    assert not (tmp_path / "out.pt").exists()


def test_of_two_loaders_the_source_is_one(tmp_path: Path) -> None:
    loaders = {"one": midepoch.wrap(plain(), seed=1), "two": midepoch.wrap(plain(), seed=2)}
    with midepoch.Snapshot(tmp_path / "snapshot.pt", ledger=["one", "two"], signals=(), parts=loaders) as snapshot:
        seen: list[Any] = []
        for _, batch in zip(*loaders.values(), strict=True):
            seen.append(batch)
            snapshot.step()
            if snapshot.steps == 3:
                break
        snapshot.save()
    assert [row["loader"] for row in trace(tmp_path, 2)["rows"]] == ["one", "two"]
    target = f"{__file__}:plain"
    with pytest.raises(ValueError, match="name one with --loader"):
        trace(tmp_path, 3, source=target, out=tmp_path / "out.pt")
    trace(tmp_path, 3, loader="two", source=target, out=tmp_path / "out.pt")
    assert torch.equal(torch.load(tmp_path / "out.pt", weights_only=False)[0][0], seen[2])
    with pytest.raises(ValueError, match="batches of one, two were trained on there"):
        trace(tmp_path, 3, loader="three")


def test_it_takes_milliseconds_at_a_billion_samples(tmp_path: Path) -> None:
    train(tmp_path / "snapshot.pt", lambda: DataLoader(sources.Noisy(10**9), 64, shuffle=True), 3, verify="off")
    took = []
    for _ in range(3):
        since = time.perf_counter()
        index = trace(tmp_path, step=2)["rows"][0]["indices"][5]
        assert [(row["step"], row["position"]) for row in trace(tmp_path, sample=index)["rows"]] == [(2, 69)]
        took.append(time.perf_counter() - since)
    assert min(took) < 0.1, took  # two of them


def command(*arguments: object) -> commands.Done:
    return commands.run("trace", *map(str, arguments))


def test_as_people_and_programs_read_it(tmp_path: Path) -> None:
    path = tmp_path / "snapshot.pt"
    train(path, plain, ranks=2)
    done = command(tmp_path)
    assert done.returncode == 0, done.stderr
    assert "steps 1 to 30 of" in done.stdout and "started after steps 0\n" in done.stdout
    assert "  loader data, epoch 0, position 0, seed 5" in done.stdout
    assert "first 1, last 7, batch 0, each 1\n" in done.stdout
    done = command(path, "--step", 7, "--rank", 1)
    (row,) = trace(tmp_path, 7, rank=1)["rows"]
    assert f"step 7, rank 1, epoch 0, positions 49, indices {row['indices'][0]}\n" in done.stdout
    assert "positions 4..7, " in command(path, "--step", 1).stdout
    (row,) = [each for each in trace(tmp_path, sample=3)["rows"] if not each["epoch"]]
    told = f"step {row['step']}, rank {row['rank']}, epoch 0, position {row['position']}\n"
    assert told in command(path, "--sample", 3).stdout
    for question in (["--step", 7], ["--sample", 3], []):
        assert json.loads(command(path, "--json", *question).stdout)["steps"] == 30


def test_exit_statuses(tmp_path: Path) -> None:
    path, out = tmp_path / "snapshot.pt", ["--out", tmp_path / "out"]
    train(path, plain)
    for arguments, words in (
        ([path, "--step", 31], "step 31 is not of this run"),
        ([path, "--step", 3, "--rank", 1], "rank 1 did not take part"),
        ([path, "--step", 3, "--sample", 1], "ask one of them"),
        ([path, "--step", 3, *out], "needs --step and --source"),
        ([tmp_path / "none"], "is missing"),
        ([path, "--step", 3, "--source", "nothing:here", *out], "cannot be imported"),
        ([path, "--step", 3, "--source", f"{__file__}:plain", "--out", path], "exists already"),
    ):
        done = command(*arguments)
        assert done.returncode == 2 and words in done.stderr, done
    for index in (SIZE, -1):
        done = command(path, "--sample", index, "--json")
        assert done.returncode == 1 and f"no step that the ledger knows was given sample {index}" in done.stderr
        assert json.loads(done.stdout)["rows"] == []
    (file,) = (tmp_path / "snapshot.pt.ledger").iterdir()
    file.write_bytes(file.read_bytes().replace(b'"first":14', b'"first":15', 1))
    done = command(path, "--step", 3)
    assert done.returncode == 1 and "line 5: 1 of its 5 lines are damaged" in done.stdout and "rank 0" in done.stdout
    done = command(path, "--step", 15)
    assert done.returncode == 2 and "line 5: 1 of its 5 lines are damaged" in done.stderr
