"""What the training loop changes in what the readers hold: a state says it, and a resume compares it."""

from __future__ import annotations

import functools
import itertools
import json
import random
import re
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

import midepoch
from midepoch import MidepochWarning, SourceError, StateCorruptError
from midepoch.loader import loop_changes
from midepoch.loader.loader import Loader
from midepoch.state.format import LONGEST_CHANGED
from midepoch.summary import Watch
from support import sources

RESTORE = "restore it before the first batch"


class Scaled(sources.Indices):
    """Sample i, a factor that the program may change, and a counter that reading moves."""

    def __init__(self, size: int = 12) -> None:
        super().__init__(size)
        self.factor, self.read = 1.0, 0
        self.data = torch.arange(float(size))

    def __getitem__(self, index: int) -> Any:
        self.read += 1
        return torch.tensor([float(self.data[index]), self.factor, random.random()])


class Stream(IterableDataset[Any]):
    def __init__(self, size: int = 12) -> None:
        self.size, self.factor = size, 1.0

    def __iter__(self) -> Iterator[Any]:
        for index in range(self.size):
            yield torch.tensor([float(index), self.factor, random.random()])


def wrapped(dataset: Any, workers: int = 0, kept: bool = False, **options: Any) -> Loader:
    source: Any = DataLoader(dataset, 2, num_workers=workers, persistent_workers=kept)
    shard = True if workers and isinstance(dataset, IterableDataset) else None
    return midepoch.wrap(source, seed=0, shard=shard, **options)


Change = Callable[[Any, int, int], None]
CHANGES: dict[str, Change] = {
    "by epoch": lambda dataset, epoch, step: setattr(dataset, "factor", 1.0 + epoch),
    "by step": lambda dataset, epoch, step: setattr(dataset, "factor", 1.0 + epoch + step / 8),
}


def cut(loader: Loader, change: Change, at: tuple[int, int] | None = None) -> tuple[list[Any], Any]:
    """Train until the cut: the batches, and the state. The loop changes the dataset before a pass and after a batch."""
    seen: list[Any] = []
    with loader:
        for epoch in loader.epochs(3):
            if not loader.position:
                change(loader.source.dataset, epoch, 0)
            for batch in loader:
                seen.append(batch.tolist())
                step = loader.position // 2
                change(loader.source.dataset, epoch, step)
                if at == (epoch, step):
                    return seen, (loader.state_dict(), loader.source.dataset.factor)
    return seen, None


@pytest.mark.parametrize(("workers", "kept"), [(0, False), (2, True)])
@pytest.mark.parametrize("change", CHANGES)
def test_what_the_program_restores_is_exact_or_said(change: str, workers: int, kept: bool, recwarn: Any) -> None:
    """It saves the factor with the state, and sets it before the first batch, as a program does.

    Datasets that are read by index are in tests/jobs/test_changed_data.py.
    """
    whole, _ = cut(wrapped(Stream(), workers, kept), CHANGES[change])
    for at in ((0, 3), (1, 1), (2, 2)):
        before, (state, factor) = cut(wrapped(Stream(), workers, kept), CHANGES[change], at)
        loader = sources.loaded(wrapped(Stream(), workers, kept), state)
        loader.source.dataset.factor = factor
        recwarn.clear()
        try:
            rest, _ = cut(loader, CHANGES[change])
        except SourceError as error:  # what a replay reads again is not what was read
            assert change == "by step" and "does not repeat itself" in str(error)
            continue
        said = [str(each.message) for each in recwarn if RESTORE in str(each.message)]
        if before + rest == whole:
            assert not said or change == "by step"  # workers that read ahead may not have come to where it differs
        else:
            assert change == "by step" and len(said) == 1
            assert f"dataset.factor was {1.0 + at[0]} for the readers, is {factor} now" in said[0]


def test_a_state_names_what_the_loop_has_changed_and_keeps_it() -> None:
    dataset = Scaled()
    loader = wrapped(dataset)
    next(batches := iter(loader))
    assert loader.state_dict()["changed"] == ""  # reading moves `read`, and nobody else has changed anything
    dataset.factor = 3.0
    next(batches)
    assert json.loads(loader.state_dict()["changed"]) == {"dataset.factor": "3.0"}
    again = sources.loaded(wrapped(Scaled()), loader.state_dict())
    again.source.dataset.factor = 3.0
    for _ in again.epochs(2):
        list(again)
    assert json.loads(again.state_dict()["changed"]) == {"dataset.factor": "3.0"}
    assert len(json.dumps(again.state_dict())) <= 512


def test_what_is_kept_is_bounded() -> None:
    dataset: Any = Scaled()
    for number in range(40):
        setattr(dataset, f"probability_{number}", 0.5)
    loader = wrapped(dataset)
    list(loader)
    for number in range(40):
        setattr(dataset, f"probability_{number}", number / 64)
    next(iter(loader))
    state = loader.state_dict()
    assert 100 < len(state["changed"]) <= LONGEST_CHANGED
    assert all(name.startswith("dataset.probability_") for name in json.loads(state["changed"]))
    again = sources.loaded(wrapped(dataset), state)
    for _ in again:
        assert again.state_dict()["changed"] == state["changed"]


class Flipped(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.flip: Any = functools.partial(pow, exp=2)
        self.options = {"a": 1}


@pytest.mark.parametrize(("change", "path"), [
    (lambda data: setattr(data, "flip", None), "dataset.flip"), (lambda data: delattr(data, "flip"), "dataset.flip"),
    (lambda data: data.options.clear(), "dataset.options['a']"),
])  # fmt: skip
def test_what_the_loop_takes_away_is_said(change: Callable[[Any], Any], path: str) -> None:
    loader = wrapped(Flipped())
    next(iter(loader))
    change(loader.dataset)
    again = sources.loaded(wrapped(Flipped()), loader.state_dict())
    with pytest.warns(MidepochWarning, match=re.escape(f"{path} was not set for the readers, is ")):
        next(iter(again))


@pytest.mark.parametrize("many", [[1] * 65, {f"key {number}": 1 for number in range(65)}])
def test_what_has_grown_large_is_not_gone(many: Any) -> None:
    """As a cache does that reading fills: of a large one nothing but its length is looked at."""
    loader = wrapped(Flipped())
    loader.dataset.options = {"a": 1} if isinstance(many, dict) else [1]
    for _ in loader:
        loader.dataset.options = many
        assert "not set" not in loader.state_dict()["changed"]


def test_what_the_loop_sets_back_is_said_as_it_is() -> None:
    loader = wrapped(Scaled())
    said = []
    for _ in loader:
        loader.dataset.factor = 2.0 if loader.position == 4 else 1.0
        said.append(loader.state_dict()["changed"])
    assert said[:4] == ["", '{"dataset.factor":"2.0"}', *['{"dataset.factor":"1.0"}'] * 2]


class Collating:
    """Counts the steps of a trainer, whose method collates; or its own calls."""

    count = 0

    def collate(self, samples: Any) -> Any:
        return torch.stack(samples)

    def __call__(self, samples: Any) -> Any:
        self.count += 1
        return self.collate(samples)


def test_a_trainer_whose_method_collates_is_not_the_readers() -> None:
    trainer = Collating()
    loader = midepoch.wrap(DataLoader(Scaled(), 2, collate_fn=trainer.collate), seed=0)
    for _ in itertools.chain(loader, loader):
        trainer.count += 1
        assert loader.state_dict()["changed"] == ""


@pytest.mark.parametrize("changed", ["[]", '{"dataset.p":3}', "{", '{"' + "a" * 200 + '":"1"}'])
def test_an_edited_text_is_refused(changed: str) -> None:
    loader = wrapped(Scaled())
    next(iter(loader))
    with pytest.raises(StateCorruptError):
        wrapped(Scaled()).load_state_dict(midepoch.reseal({**loader.state_dict(), "changed": changed}))


def test_nothing_is_looked_at_with_verify_off(monkeypatch: pytest.MonkeyPatch) -> None:
    watched: list[dict[str, Any]] = []
    monkeypatch.setattr(loop_changes, "Watch", lambda objects: watched.append(objects) or Watch(objects))  # type: ignore[func-returns-value]
    loader = wrapped(Scaled(), verify="off")
    for factor in (1.0, 2.0):
        loader.dataset.factor = factor
        list(loader)
    assert loader.state_dict()["changed"] == "" and watched and not any(watched)


@pytest.mark.parametrize("renewed", [False, True])
def test_data_that_the_loop_renews_are_not_called_others(renewed: bool, recwarn: pytest.WarningsRecorder) -> None:
    """At an epoch's boundary: once the loop has renewed them, and the state says so, others are as they should be."""

    def renew(loader: Any, epoch: int) -> None:
        loader.dataset.data = torch.arange(12.0) + 100 * epoch * renewed

    loader = wrapped(Scaled())
    for epoch in loader.epochs(2):
        renew(loader, epoch)
        list(loader)
    state = loader.state_dict()
    assert (state["epoch"], state["position"], bool(state["changed"])) == (2, 0, renewed)
    again = sources.loaded(wrapped(Scaled()), state)
    renew(again, 2)
    recwarn.clear()
    next(iter(again))
    assert not recwarn.list
    if not renewed:
        again.dataset.data += 5
        again.load_state_dict(state)
        with pytest.warns(MidepochWarning, match="is not bit for bit"):
            next(iter(again))


@pytest.mark.parametrize("saves", [False, True])
def test_data_that_the_loop_drops_between_passes_are_freed(saves: bool) -> None:
    """So that it can load others in their place."""
    loader = wrapped(Scaled())
    for _ in loader.epochs(2):
        list(loader)
        if saves:
            loader.state_dict()
        old = weakref.ref(loader.dataset.data)
        loader.dataset.data = None
        assert old() is None
        loader.dataset.data = torch.arange(12.0)


@pytest.mark.parametrize("restored", ["not at all", "before the load", "in each epoch"])
def test_what_one_epoch_has_set_for_good_is_missed_at_a_boundary(restored: str) -> None:
    def factor(dataset: Any, epoch: int) -> None:
        if epoch == 1 or restored == "in each epoch":
            dataset.factor = 1.0 + epoch

    loader = wrapped(Scaled())
    for epoch in loader.epochs(2):
        factor(loader.dataset, epoch)
        list(loader)
    again = wrapped(Scaled())
    if restored == "before the load":
        again.dataset.factor = 2.0
    again.load_state_dict(loader.state_dict())
    with warnings.catch_warnings(record=True, action="always") as told:
        for epoch in again.epochs(3):
            factor(again.dataset, epoch)
            list(again)
    said = [f"dataset.factor was 2.0 for the readers, is 1.0 now: {RESTORE}"] if restored == "not at all" else []
    assert [str(each.message) for each in told] == said


class Remembering(Stream):
    def __init__(self) -> None:
        super().__init__()
        self.passes = 0

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        yield from itertools.islice(super().__iter__(), 6 + self.passes)


def test_what_moves_from_pass_to_pass_as_it_is_read_is_believed() -> None:
    stream = wrapped(Remembering())
    collating = midepoch.wrap(DataLoader(Scaled(), 2, collate_fn=Collating()), seed=0)
    for loader, name in ((stream, "passes"), (collating, "count")):
        for _ in range(3):
            list(loader)
        promises = loader.capabilities
        reasons = promises.exact_augmentations.reason + promises.exact_order.reason
        assert f"{name} moves from pass to pass as it is read" in reasons
    assert stream.capabilities.exact_order.believed
    assert collating.capabilities.exact_augmentations.believed
    assert not collating.capabilities.exact_order.believed


class OfRank(Scaled):
    """With one attribute that the loop sets alike on all ranks, and one that it sets by rank."""

    def __init__(self) -> None:
        super().__init__()
        self.crop, self.shift = 0, 0


def _resumed(rank: int, path: str) -> list[Any]:
    """What a resume within an epoch says that restores only what was set by rank, and what a gathered state says."""
    loader, again = wrapped(OfRank()), wrapped(OfRank())
    list(loader)
    loader.dataset.crop, loader.dataset.shift = 4, 1 + rank
    next(iter(loader))
    midepoch.Snapshot(path, signals=(), data=loader).save()
    assert midepoch.Snapshot(path, signals=(), data=again).load()
    again.dataset.shift = 1 + rank
    with warnings.catch_warnings(record=True, action="always") as told:
        next(iter(again))
    loader.finish(loader.ticket)  # so that a state is joined from those of all ranks
    return [*(str(each.message) for each in told), midepoch.gather(loader)["changed"]]


def test_ranks_compare_what_all_of_them_have_changed(tmp_path: Path) -> None:
    said = [f"dataset.crop was 4 for the readers, is 0 now: {RESTORE}", '{"dataset.crop":"4"}']
    assert sources.in_gloo_world(_resumed, 2, str(tmp_path / "snapshot.pt")) == [said] * 2
