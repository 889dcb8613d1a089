"""Megatron-Energon, which `make wild` installs into a folder of its own and runs these tests with."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, ClassVar

import cpu_torchvision  # noqa: F401
import pytest

pytest.importorskip("megatron.energon", reason="Megatron-Energon is not installed; make wild runs these tests")


import midepoch
from midepoch import StateError, wrap
from midepoch.loader.loader import Loader
from midepoch.testing import ResumableTests
from support import energon_sources as sources
from support.sources import every_place

pytestmark = pytest.mark.filterwarnings("ignore::midepoch.MidepochWarning", "ignore:'pin_memory'")


class _Energon(ResumableTests):
    identify: ClassVar[Any] = staticmethod(sources.texts)
    quick = True
    num_workers = (0, 1)


class TestValidation(_Energon):
    """Its passes end, and have each sample once."""

    make_loader = staticmethod(sources.wrapped_validation)
    world_sizes = (1, 3)
    shuffled = False


class TestTraining(_Energon):
    """Its virtual epochs are parts of a stream, so ranks together have no samples exactly once."""

    make_loader = staticmethod(sources.wrapped_training)
    world_sizes = (1,)


def taken(loader: Loader, count: int | None = None) -> list[list[int]]:
    return [sources.texts(batch) for batch in itertools.islice(loader, count)]


KINDS: dict[str, Callable[[], Any]] = {
    "validation": lambda: sources.validation(sources.kept(), num_workers=2),
    "virtual epochs": lambda: sources.training(sources.kept(), num_workers=2, length=5),
}


@pytest.mark.parametrize("kind", KINDS)
def test_workers_that_share_passes_are_refused(kind: str) -> None:
    """Behind the last batch but one, a worker has given all of its batches, and the other has one left."""
    with pytest.raises(midepoch.UnsupportedSourceError, match=r"one worker process at most.*num_workers=1"):
        wrap(KINDS[kind](), seed=1)
    alone, own = KINDS[kind](), KINDS[kind]()
    given = len(list(KINDS[kind]()))
    for _ in zip(range(given - 1), alone, strict=False):
        saved = alone.save_state_rank()
    own.restore_state_rank(saved)
    assert len(list(own)) > 1, "Energon resumes this exactly by now: drop the refusal"


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_loader_that_was_read_refuses_states(num_workers: int) -> None:
    loader = wrap(sources.validation(sources.kept(), num_workers=num_workers), seed=1)
    beginning = loader.state_dict()
    batches = iter(loader)
    head = [sources.texts(next(batches)) for _ in range(2)]
    state = loader.state_dict()
    loader.load_state_dict(state)  # it stands there
    head += [sources.texts(next(batches))]
    for each in (state, beginning):
        with pytest.raises(StateError, match="cannot go elsewhere: make another one"):
            loader.load_state_dict(each)
    assert [*head, *map(sources.texts, batches)] == taken(wrap(sources.validation(sources.kept()), seed=1))


@pytest.mark.parametrize("length", [0, 5])
def test_an_epoch_behind_one_that_was_left_is_refused(length: int) -> None:
    def make() -> Loader:
        return wrap(sources.training(sources.kept(), length=length), seed=1)

    loader = make()
    for epoch in loader.epochs(2):
        if epoch == 1:
            with pytest.warns(midepoch.MidepochWarning, match="beginning of epoch 1"):
                state = loader.state_dict()
            break
        taken(loader, 2)
    assert (state["epoch"], state["position"]) == (1, 0)
    with pytest.raises(StateError, match=r"beginning of epoch 1, .*epoch 0 was not read to its end"):
        make().load_state_dict(state)


def test_draws_in_then_are_exact() -> None:
    assert wrap(sources.validation(sources.kept(), num_workers=1), seed=7).capabilities.exact_augmentations
    every_place(sources.wrapped_drawing, (1, 6), epochs=1)
