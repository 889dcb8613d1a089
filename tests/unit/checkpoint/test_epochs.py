"""The end of an epoch is part of the epoch: `loader.epochs`, `Snapshot.epochs`. Killed programs are in test_bodies."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import logging
import os
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

import midepoch
from midepoch import MidepochError, MidepochWarning, Snapshot, SnapshotError
from support import bodies, sources
from support.bodies import KilledError

pytestmark = pytest.mark.filterwarnings("ignore::midepoch.MidepochWarning")


def shuffled(seed: int = 3, **settings: Any) -> Any:
    return midepoch.wrap(sources.noisy_loader(), seed=seed, **settings)


def only(path: Path, **settings: Any) -> tuple[Any, Snapshot]:
    """A loader, and a Snapshot of it alone."""
    loader = shuffled()
    return loader, Snapshot(path, signals=(), data=loader, **settings)


# The law 'boundary' has other sources.
LOADERS: dict[str, Callable[[], Any]] = {
    "rank 1 of 3": functools.partial(shuffled, world=midepoch.World(1, 3)),
    "own state, unknown length": lambda: midepoch.wrap(StatefulDataLoader(sources.Stream(10), batch_size=4), seed=3),
    "combination, unknown length": lambda: midepoch.combine([midepoch.wrap(sources.numbers, seed=1), shuffled(2)]),
}


def epochs_of(loader: Any, first: int, last: int) -> list[Any]:
    """The batches of each epoch, and the epochs."""
    with loader:
        found = [(epoch, [sources.plain(batch) for batch in loader]) for epoch in loader.epochs(last)]
    assert [epoch for epoch, _ in found] == list(range(first, last))
    return [batches for _, batches in found]


@pytest.mark.parametrize("kind", LOADERS)
def test_the_state_stays_at_the_end_until_the_body_has_ended(kind: str) -> None:
    make, ends, whole = LOADERS[kind], [], []
    with make() as loader:
        for epoch in loader.epochs(3):
            whole.append([sources.plain(batch) for batch in loader])
            assert (loader.epoch, loader.position) == (epoch, loader.state_dict()["size"])
            ends.append(json.loads(json.dumps(loader.state_dict())))
        assert (loader.epoch, loader.position) == (3, 0)
    with make() as loader:
        assert whole == [sources.taken(loader) for _ in range(3)]
    for epoch, state in enumerate(ends):
        loader = sources.loaded(make(), state)
        assert loader.state_dict() == state
        assert epochs_of(loader, epoch, 3) == [[], *whole[epoch + 1 :]]
    assert sources.resumed(make, ends[0]) == whole[1]


def test_an_empty_pass_says_what_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    first, loader = shuffled(), shuffled()
    for _ in first.epochs(1):
        list(first)
        loader.load_state_dict(first.state_dict())
    with caplog.at_level(logging.WARNING):
        for epoch in loader.epochs(2):
            assert (loader.batches_done, loader.batches_left) == ((6, 0) if epoch == 0 else (0, 6))
            list(loader)
    assert [record.message for record in caplog.records] == [
        "a pass over a loader (dataloader) is empty: its batches were handed out before"
    ]


def test_a_body_without_a_pass_or_with_a_part_of_one() -> None:
    loader, whole, seen = shuffled(), epochs_of(shuffled(), 0, 4), []
    for epoch in loader.epochs(4):
        if epoch == 1:
            continue
        for batch in loader:
            seen.append((epoch, sources.plain(batch)))
            assert loader.epoch == epoch
            if epoch == 2:
                break
    assert seen == [*((0, batch) for batch in whole[0]), (2, whole[2][0]), *((3, batch) for batch in whole[3])]


def test_numbers_of_epochs(tmp_path: Path) -> None:
    loader, snapshot = only(tmp_path / "snapshot.pt")
    for each in (loader, snapshot):
        with pytest.raises(TypeError, match="number of epochs in all"):
            each.epochs(2.0)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="at least 0"):
            each.epochs(-1)
        running = each.epochs(2)
        assert next(running) == 0
        with pytest.raises(MidepochError, match=r"running already.*call close\(\) on what epochs\(\) has returned"):
            next(each.epochs(2))
        running.close()  # type: ignore[union-attr]
        again = each.epochs(2)
        assert next(again) == 0
        del again
    for _ in snapshot.epochs(2):
        list(loader)
    for each in (loader, snapshot):
        with pytest.warns(MidepochWarning, match=r"epochs\(1\) runs nothing, because 2 epochs are done"):
            assert list(each.epochs(1)) == []
        with warnings.catch_warnings(action="error"):
            assert list(each.epochs(2)) == []


def test_a_second_pass_in_a_body_is_told() -> None:
    loader = shuffled()
    with pytest.warns(MidepochWarning, match="a second pass over the loader in one body"):
        for _ in loader.epochs(1):
            list(loader)
            list(loader)


@pytest.mark.parametrize("taken", [1, 2])
def test_a_resumed_pass_that_is_looked_at_is_told(taken: int) -> None:
    """In a body one batch is taken by mistake; a pass that is left after more was meant."""
    loader = sources.loaded(shuffled(), sources.heads(shuffled, 2)[1])
    with warnings.catch_warnings(record=True, action="always") as told:
        for _ in loader.epochs(1):
            sources.taken(loader, taken)
            list(loader)
    assert any("drops the rest of the resumed epoch 0" in str(each.message) for each in told) == (taken == 1)


def test_what_is_in_flight_of_nobody_knows_whom_is_told(tmp_path: Path) -> None:
    """All of a loader was read ahead, and then a validation was made, before the first step told of it."""
    train, snapshot = only(path := tmp_path / "snapshot.pt", every=1, validation=(validation := shuffled()))
    for _ in snapshot.epochs(1):
        batches = list(train)
        list(validation)
        with pytest.warns(MidepochWarning, match="in_flight=5, but no pass is read.* less than an epoch"):
            snapshot.step(len(batches) - 1)
        break
    with pytest.raises(SnapshotError, match=r"cannot be resumed: in_flight=5.*midepoch\.combine"):
        only(path, validation=shuffled())[1].load()


@pytest.mark.parametrize("steps", [3, 7])
def test_all_of_the_only_pass_may_be_read_ahead(steps: int, tmp_path: Path) -> None:
    """So that it has ended before the first step tells of batches in flight, which can be of no other pass."""

    def trained(steps: int = 0) -> list[Any]:
        (loader, snapshot), seen = only(tmp_path / "snapshot.pt", every=1), list[Any]()
        for epoch in snapshot.epochs(2):
            for batch, in_flight in bodies.ahead(loader, 9):
                seen.append((epoch, sources.plain(batch)))
                snapshot.step(in_flight)
                if len(seen) == steps:
                    return seen
        return seen

    with warnings.catch_warnings(action="error"):
        seen = [*trained(steps), *trained()]
    assert seen == [(epoch, batch) for epoch, batches in enumerate(epochs_of(shuffled(), 0, 2)) for batch in batches]


# --- when it is saved ---


def places(path: Path) -> tuple[int, int, int, int | None]:
    """Steps, and the loader's epoch and position, and the epoch of the loop."""
    content = torch.load(path, weights_only=True)
    state = content["parts"]["data"]
    return content["steps"], state["epoch"], state["position"], content["body"]["epoch"]


def test_save_behind_the_pass_is_put_off_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loader, snapshot = only(path := tmp_path / "snapshot.pt")
    with pytest.warns(MidepochWarning, match="written when the body of snapshot.epochs ends") as told:
        for epoch in snapshot.epochs(2):
            snapshot.save()
            assert places(path)[1:3] == (epoch, 0)
            for _ in loader:
                snapshot.step()
            before = path.read_bytes()
            snapshot.save()
            assert path.read_bytes() == before
    told_at = {(each.filename, each.lineno) for each in told if "written when the body" in str(each.message)}
    assert len(told_at) == 1, "Python shows one for each line"
    with pytest.raises(KilledError), caplog.at_level(logging.WARNING):
        for _ in snapshot.epochs(3):
            list(loader)
            snapshot.save()
            raise KilledError
    assert f"to which a save was put off: {path} is unchanged" in caplog.text
    assert places(path) == (12, 2, 0, 2)


def test_a_signal_in_the_rest_of_a_body_is_answered_at_its_end(tmp_path: Path) -> None:
    """Which may be the end of the last epoch too. Others are in test_bodies."""

    def train(signalled: bool) -> tuple[int, int]:
        loader, ended = shuffled(), sources.Counter()
        with Snapshot(tmp_path / "snapshot.pt", data=loader, ended=ended) as snapshot:
            for _ in snapshot.epochs(3):
                for _ in loader:
                    snapshot.step()
                ended.given += 1
                if signalled:
                    os.kill(os.getpid(), signal.SIGTERM)
        return snapshot.steps, ended.given

    with pytest.raises(SystemExit):
        train(signalled=True)
    assert places(tmp_path / "snapshot.pt") == (6, 1, 0, 1)
    assert train(signalled=False) == (18, 3)


def test_poll_leaves_with_the_snapshot_that_there_is(tmp_path: Path) -> None:
    path, loader = tmp_path / "snapshot.pt", shuffled()
    with Snapshot(path, every=4, data=loader) as snapshot:
        with pytest.raises(SystemExit):
            for _ in snapshot.epochs(2):
                for _ in loader:
                    snapshot.step()
                snapshot.poll()
                os.kill(os.getpid(), signal.SIGTERM)
                snapshot.poll()
                raise AssertionError("it has not left")
        snapshot.save()  # on the way out, which changes nothing
    assert places(path) == (4, 0, 16, 0)


@pytest.mark.parametrize("kept", [False, True])
def test_a_save_in_a_pass_that_runs_is_written_at_once(kept: bool, tmp_path: Path) -> None:
    path, other, third = tmp_path / "snapshot.pt", shuffled(4), shuffled(5)
    loader, snapshot = only(path, every=1, other=other, third=third)
    for _ in snapshot.epochs(1):
        pairs = zip(loader, other, strict=False)
        for number, _ in enumerate(pairs):
            snapshot.step()
            assert places(path)[0] == min(number + 1, 5)  # the last one is put off
        if not kept:
            del pairs
        for number, _ in enumerate(third):
            snapshot.step()
            assert places(path)[0] == min(number + 7, 11)
    assert places(path) == (12, 1, 0, 1)


@pytest.mark.parametrize("where", ["in a pass", "behind the passes"])
def test_a_save_on_the_way_out_of_the_loop(where: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A step, or what follows the passes, fails for good: the log says what the run that resumes does again.

    Saves within the loop are in test_bodies and test_exceptions.
    """
    def train(path: Path, fails: bool) -> list[Any]:
        log, first, second = bodies.Log(), shuffled(1), shuffled(2)
        snapshot = Snapshot(path, every=4, signals=(), first=first, second=second, log=log)
        try:
            for epoch in snapshot.epochs(2):
                for batch in first:
                    log("first", epoch, batch)
                for number, batch in enumerate(second, second.batches_done):
                    log("second", epoch, batch)
                    if fails and where == "in a pass" and (epoch, number) == (1, 2):
                        raise KilledError
                    snapshot.step()
                log("schedule", epoch)
                if fails and epoch == 1:
                    raise KilledError
        except KilledError:
            snapshot.save()
            raise
        return log.lines

    path, whole = tmp_path / "snapshot.pt", train(tmp_path / "whole.pt", fails=False)
    with pytest.raises(KilledError), caplog.at_level(logging.WARNING):
        train(path, fails=True)
    assert "a run that resumes from this snapshot goes on" in caplog.text
    saved = torch.load(path, weights_only=True)
    # The ninth step is that of batch 2 in the second epoch.
    at, within = whole.index(["schedule", 1]), where == "in a pass"
    assert (saved["steps"], saved["parts"]["second"]["position"]) == ((8, 12) if within else (12, 22))
    assert train(path, fails=False) == (whole if within else [*whole[: at + 1], *whole[at:]])


@pytest.mark.parametrize(("how", "again"), [("zip", "in this process"), ("islice", "after a save")])
def test_what_is_left_of_passes_is_named(how: str, again: str, tmp_path: Path, caplog: Any) -> None:
    """Nobody knows whether the exception has left the longer pass, or whatever had read it on purpose."""
    long, short = midepoch.wrap([[1], [2], [3]]), midepoch.wrap([[1], [2]])
    snapshot = Snapshot(tmp_path / "snapshot.pt", signals=(), long=long, short=short)
    with pytest.raises(KilledError):
        for _ in snapshot.epochs(1):
            for _ in itertools.islice(long, 1) if how == "islice" else zip(long, short, strict=False):
                snapshot.step()
            raise KilledError
    caplog.set_level(logging.WARNING)
    if again == "after a save":
        snapshot.save()
    else:
        assert list(snapshot.epochs(1)) == [0]
    goes_on = "a run that resumes from this snapshot goes on" if again == "after a save" else "going on"
    assert f"left before its end: {goes_on} with what is left of the passes over long, and with" in caplog.text


def test_a_validation_that_an_exception_left_is_read_on(tmp_path: Path) -> None:
    """It ends within the pass over the longer loader, but nothing was read ahead of that, as a zip would."""
    long, short = midepoch.wrap([[1], [2], [3]]), midepoch.wrap([[1], [2]])
    snapshot, read = Snapshot(tmp_path / "snapshot.pt", signals=(), long=long, short=short), list[Any]()

    def train(fails: bool) -> None:
        for _ in snapshot.epochs(1):
            for batch in long:
                snapshot.step()
                read.append(batch)
                for other in short if batch == [2] or fails else ():
                    read.append([0, *other])
                    if fails:
                        raise KilledError

    with pytest.raises(KilledError):
        train(fails=True)
    with warnings.catch_warnings(action="error"):
        train(fails=False)
        snapshot.save()
    assert read == [[1], [0, 1], [2], [0, 2], [3]]


@pytest.mark.parametrize("holder", ["a variable", "a loop that ends"])
def test_a_save_in_a_pass_that_is_read_no_further_is_told(holder: str, tmp_path: Path) -> None:
    (loader, snapshot), bar = only(tmp_path / "snapshot.pt"), iter(())
    with warnings.catch_warnings(record=True, action="always") as caught:
        for _ in snapshot.epochs(1):
            if holder == "a variable":
                for _ in zip(bar := iter(loader), range(2), strict=False):
                    pass
                snapshot.save()
            for _ in itertools.islice(loader, 3) if holder == "a loop that ends" else bar or loader:
                snapshot.save()
                if holder == "a variable":
                    break
    told = [each for each in caught if "something still holds it" in str(each.message)]
    assert len(told) == (holder == "a variable")
    assert all(each.filename == __file__ for each in told)


@pytest.mark.parametrize("how", ["a pass that is kept", "a seek", "the first epoch's snapshot"])
def test_an_epoch_begun_before_the_loop_ends_with_its_body(how: str, tmp_path: Path) -> None:
    path, whole, kept = tmp_path / "snapshot.pt", epochs_of(shuffled(), 0, 3), None
    loader, snapshot = only(path, every=1)
    if how == "a pass that is kept":
        kept = iter(loader)
        assert next(kept) is not next(kept)
    elif how == "a seek":
        loader.seek(position=8)
    else:
        for _ in itertools.islice(loader, 2):
            snapshot.step()
        loader, snapshot = only(path, every=1)
    for epoch in snapshot.epochs(2):
        assert [sources.plain(batch) for batch in kept or loader] == whole[epoch][2 if epoch == 0 else 0 :]
        kept = None
        if epoch == 0:
            snapshot.step()  # put off to the body's end
        else:
            break
    loader, snapshot = only(path)
    assert {epoch: sources.taken(loader) for epoch in snapshot.epochs(3)} == {1: whole[1], 2: whole[2]}


# --- without epochs ---


def test_a_snapshot_at_a_boundary_is_told_without_epochs(tmp_path: Path) -> None:
    loader, snapshot = only(path := tmp_path / "snapshot.pt", every=6)
    for _ in loader:
        snapshot.step()
    with pytest.warns(MidepochWarning, match=r"after the last batch of an epoch.*snapshot\.epochs"):
        assert only(path)[1].load()
    with warnings.catch_warnings(action="error"):
        assert list(only(path)[1].epochs(1)) == []
        snapshot.save()  # whoever saves there means that place
        assert only(path)[1].load()


DAMAGED: list[Any] = [
    {"epoch": -1}, {"new": 1}, {"empty": {"other": 1}}, {"empty": {"data": "1"}}, {"left": ["other"]},
    {"open": "data"}, {"lead": 3}, {"unknown": None}, {"ends": None},
]  # fmt: skip


def test_a_damaged_record_is_refused(tmp_path: Path) -> None:
    only(path := tmp_path / "snapshot.pt")[1].save()
    saved = torch.load(path, weights_only=True)
    sound: dict[str, Any] = {name: [] for name in ("open", "left", "within", "ahead")}
    sound |= {"empty": {}, "lead": None, "unknown": "", "epoch": 0, "ends": False}
    for content in (3, None, {}, *(sound | changes for changes in DAMAGED)):
        torch.save({**saved, "body": content}, path)
        loader, snapshot = only(path)
        before = loader.state_dict()
        with pytest.raises(SnapshotError, match="record of its epochs is damaged"):
            next(snapshot.epochs(2))
        assert loader.state_dict() == before


def test_going_back_to_the_snapshot_leaves_the_loop_first(tmp_path: Path) -> None:
    log = bodies.Log()
    loader, snapshot = only(tmp_path / "snapshot.pt", every=2, log=log)
    for goes_back in (True, False):
        running = snapshot.epochs(2)
        for epoch in running:
            for batch in loader:
                log(epoch, batch)
                snapshot.step()
                if goes_back and len(log.lines) == 9:
                    with pytest.raises(MidepochError, match="leave the loop, call load"):
                        snapshot.load()
                    running.close()  # type: ignore[attr-defined]
                    break
        if goes_back:
            assert snapshot.load() and len(log.lines) == 8
    assert [line[1] for line in log.lines] == [batch for epoch in epochs_of(shuffled(), 0, 2) for batch in epoch]


def _other_bodies(rank: int, path: str, kind: str) -> str:
    """What is said where the second rank does otherwise in its second epoch."""
    loader, validation = shuffled(world=midepoch.World(rank, 2)), shuffled(4, world=midepoch.World(rank, 2))
    every = None if kind == "one loader more" else 2
    snapshot = Snapshot(path, every=every, signals=(), data=loader, validation=validation)
    try:
        for epoch in snapshot.epochs(3):
            for number, _ in enumerate(loader):
                other = kind if (rank, epoch, number) == (1, 1, 1) else ""
                if other == "one loader more":
                    list(validation)
                if other == "left early":
                    break
                snapshot.step()
            if kind == "one pass more" and (rank, epoch) == (1, 1):
                list(loader)
    except MidepochError as error:
        return str(error)
    return ""


def _save_behind_a_pass_that_one_rank_keeps(rank: int, path: str) -> int:
    loader = shuffled(world=midepoch.World(rank, 2))
    snapshot = Snapshot(path, signals=(), data=loader)
    for _ in snapshot.epochs(1):
        next(batches := iter(loader))
        if rank:
            del batches
        snapshot.save()
        if not rank:
            assert not Path(path).exists()
    return snapshot.steps


def test_a_save_is_put_off_on_every_rank_or_on_none(tmp_path: Path) -> None:
    path = tmp_path / "snapshot.pt"
    assert sources.in_gloo_world(_save_behind_a_pass_that_one_rank_keeps, 2, str(path)) == [0, 0]


@pytest.mark.parametrize("kind", ["left early", "one pass more", "one loader more"])
def test_ranks_whose_bodies_differ_are_told_by_name(kind: str, tmp_path: Path) -> None:
    told = sources.in_gloo_world(_other_bodies, 2, str(tmp_path / "snapshot.pt"), kind)
    assert all("rank 0" in each and "rank 1" in each for each in told), told
    assert len(set(told)) == 1
    assert kind != "one loader more" or "with passes over data (1), validation (0)" in told[0]


# --- what people write around it ---


def test_a_caller_who_counts_epochs_from_one_gets_them_all() -> None:
    loader, seen = shuffled(), []
    with pytest.warns(MidepochWarning, match="this is the body of epoch 0") as told:
        for epoch in loader.epochs(4):
            loader.set_epoch(epoch + 1)
            seen.append((epoch, len(list(loader))))
    assert seen == [(epoch, len(loader)) for epoch in range(4)]
    assert len([each for each in told if "is not followed" in str(each.message)]) == 1


def test_options_for_a_wrapped_loader_are_refused() -> None:
    loader = shuffled()
    assert midepoch.wrap(loader) is loader
    for options in ({"seed": 3}, {"then": str}, {"on_error": "next"}, {"refill": True}):
        with pytest.raises(TypeError, match="wrapped already"):
            midepoch.wrap(loader, **options)


@pytest.mark.parametrize("looked", ["one batch", "two that are held", "all of it, and more", "a resumed one"])
def test_what_was_looked_at_before_the_loop_comes_again(looked: str, tmp_path: Path) -> None:
    """A sanity check of a few batches, or statistics: as if they had not been read."""
    (loader, snapshot), whole = only(tmp_path / "snapshot.pt"), epochs_of(shuffled(), 0, 3)
    if looked == "a resumed one":
        loader.load_state_dict(sources.heads(shuffled, 2)[1])
        whole[0] = whole[0][2:]
    held = iter(loader)
    for count in {"one batch": [1], "all of it, and more": [99, 99, 2]}.get(looked, [2]):
        sources.taken(held if "held" in looked else loader, count)
    with warnings.catch_warnings(action="error"):
        got = {epoch: sources.taken(loader) for epoch in snapshot.epochs(3)}
    assert got == dict(enumerate(whole))


def test_a_look_that_a_body_goes_on_with_is_not_taken_back(tmp_path: Path) -> None:
    (loader, snapshot), whole = only(tmp_path / "snapshot.pt"), epochs_of(shuffled(), 0, 2)
    held, got = iter(loader), list[Any]()
    next(held)
    for epoch in snapshot.epochs(2):
        got.append(sources.taken(loader) if epoch else [sources.plain(next(held))])
    assert got == [[whole[0][1]], whole[1]]


@pytest.mark.parametrize("how", ["step", "save", "commit", "another loop", "a loop that was left"])
def test_what_was_trained_on_before_the_loop_counts(how: str, tmp_path: Path) -> None:
    (loader, snapshot), whole = only(tmp_path / "snapshot.pt"), epochs_of(shuffled(), 0, 2)
    if how == "another loop":
        assert [sources.taken(loader) for _ in loader.epochs(1)] == whole[:1]
    elif how == "a loop that was left":
        for _ in loader.epochs(1):
            sources.taken(loader, 2)
            break
    else:
        for _ in itertools.islice(loader, 2):
            getattr(loader if how == "commit" else snapshot, how)()
    rest = {1: whole[1]} if how == "another loop" else {0: whole[0][2:], 1: whole[1]}
    assert {epoch: sources.taken(loader) for epoch in snapshot.epochs(2)} == rest


def test_batches_read_before_a_loaders_own_loop_are_told() -> None:
    loader = shuffled()
    sources.taken(loader, 2)
    with pytest.warns(MidepochWarning, match=r"continues after them, at position 8 of epoch 0: .*loader\.peek"):
        for _ in loader.epochs(1):
            list(loader)


def test_passes_of_bodies_after_an_iterator_of_another_loop(tmp_path: Path) -> None:
    def live(steps: int = 99) -> list[Any]:
        loader, read = midepoch.wrap([[1], [2], [3]], seed=0), list[Any]()
        snapshot = Snapshot(tmp_path / "snapshot.pt", every=1, signals=(), data=loader)
        batches: Any = iter(loader)
        with contextlib.suppress(KilledError):
            for stage in (1, 2):
                for epoch in snapshot.epochs(stage):
                    for name in ["warm up"] if epoch == 0 else ["train", "evaluate"]:
                        for batch in batches if epoch == 0 else loader:
                            read.append((epoch, name, batch))
                            snapshot.step()
                            if len(read) == steps:
                                raise KilledError
        return read

    whole = live()
    assert len(whole) == 9
    for steps in range(1, 9):
        (tmp_path / "snapshot.pt").unlink()
        (tmp_path / "snapshot.pt.1").unlink(missing_ok=True)
        assert live(steps) == whole[:steps]
        rest = live()
        assert rest == whole[len(whole) - len(rest) :] and len(rest) in (9 - steps, 10 - steps), steps


def test_loader_epochs_beside_a_snapshot_names_its_epochs(tmp_path: Path) -> None:
    loader, snapshot = only(tmp_path / "run.pt", every=3)
    with pytest.warns(MidepochWarning, match=r"write `for epoch in snapshot.epochs\(n\):`") as told:
        for _ in loader.epochs(2):
            for _ in loader:
                snapshot.step()
    assert len(told) == 1 and (tmp_path / "run.pt").exists()
