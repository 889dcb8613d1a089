"""Mutated states and files end in an error of midepoch's or in the exact continuation; `fuzz.py` makes many more.

The long form makes 100,000 of each adapter's states: ``MIDEPOCH_CHAOS=1``, or ``python tests/fuzz/fuzz.py`` with
``--count 100000``.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.util
import io
import json
import os
import pickle
import random
import warnings
from collections.abc import Callable
from typing import Any

import fuzz
import fuzz_states
import mutations
import pytest
import torch

import midepoch
from midepoch import StateCorruptError
from midepoch.state import parts

LONG = bool(os.environ.get("MIDEPOCH_CHAOS"))
SEED = 7

# What has compiled code that a state or a file reaches: a crash must end another process than this one.
SHORT = {"dali": 150, "dali-sampled": 150, "ffcv": 100, "beton files": 10}
NEEDS = {
    "dali": "nvidia.dali", "dali-sampled": "nvidia.dali", "ffcv": "ffcv", "beton files": "ffcv", "datasets": "datasets",
    "grain": "grain", "streaming": "streaming", "stateful-dataloader": "torchdata", "webdataset": "webdataset",
    "webdataset counted": "webdataset", "webdataset-streams": "webdataset",
    "webdataset index caches": "webdataset",
}  # fmt: skip


def _skip_without(package: str) -> None:
    if importlib.util.find_spec(package.partition(".")[0]) is None:
        pytest.skip(f"{package} is not installed")


@functools.cache
def fuzzer(target: str) -> Any:
    return fuzz.fuzzer_of(target)


@pytest.mark.timeout(0 if LONG else 120)
@pytest.mark.parametrize(
    "target",
    # FFCV compiles its pipelines in each process. Its states are read as those of DataLoaders are, by the same code;
    # files that are cut, or whose tables differ, are in test_ffcv.
    [pytest.param(each, marks=pytest.mark.long if NEEDS.get(each) == "ffcv" else ()) for each in fuzz.TARGETS],
)
def test_every_mutation_is_refused_or_continued_exactly(target: str) -> None:
    _skip_without(NEEDS.get(target, "torch"))
    if LONG or target in SHORT:
        count = 100_000 if target in fuzz_states.TARGETS else 20_000
        outcome = fuzz.run(target, SEED, count if LONG else SHORT[target])
        print(outcome.as_json())
        assert not outcome.failures, "\n\n".join(outcome.failures)
        found, refused = outcome.continued, sum(outcome.refused.values())
    else:
        outcomes = []
        with warnings.catch_warnings(), fuzz.bounded_memory():
            for number in range(150):
                try:
                    outcomes.append(fuzzer(target).check(SEED, number))
                except Exception as error:
                    raise AssertionError(fuzz.Outcome(target, SEED, 0).again(number)) from error
        found, refused = outcomes.count("continued"), len(outcomes) - outcomes.count("continued")
    assert refused > found
    assert found or (target in SHORT and not LONG)  # both have been seen, unless there were a dozen


def through_torch(value: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


CARRIERS: tuple[Callable[[Any], Any], ...] = (
    lambda value: json.loads(json.dumps(value)),
    lambda value: json.loads(json.dumps(value, indent=1, sort_keys=True)),
    through_torch,
    lambda value: pickle.loads(pickle.dumps(value)),
    copy.deepcopy,
    lambda value: dict(random.Random(3).sample(sorted(value.items()), len(value))),
    midepoch.reseal,
)


@pytest.mark.parametrize("target", fuzz_states.TARGETS)
def test_states_round_trip(target: str) -> None:
    """Each place of three epochs, by all ways, into a loader that stands elsewhere."""
    if target == "ffcv" and not LONG:
        pytest.skip("FFCV compiles its pipelines in each process; MIDEPOCH_CHAOS=1 runs it")
    _skip_without(NEEDS.get(target, "torch"))
    loaders = fuzzer(target)
    for base in random.Random(SEED).sample(loaders.bases, len(loaders.bases)):
        carried = functools.reduce(lambda value, carry: carry(value), CARRIERS, base)
        assert carried == base and loaders.outcome(carried, "carried") == "continued"


def test_a_wrong_continuation_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the seal a state that was edited around a part of the source's own goes on elsewhere."""
    monkeypatch.setattr(parts, "_seal_of", lambda *arguments: "00000000")
    loaders = fuzz_states.Fuzzer("stateful of all epochs")
    with pytest.raises(fuzz_states.Wrong, match="goes on with"):
        for number in range(150):
            loaders.check(1, number)


def test_a_refusal_that_changes_something_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    loaders = fuzz_states.Fuzzer("dataloader")
    load = loaders.loader.load_state_dict

    def hasty(given: Any) -> None:
        if isinstance(given, dict) and type(given.get("position")) is int and 0 <= given["position"] <= 22:
            loaders.loader.seek(position=given["position"])
        load(given)

    monkeypatch.setattr(loaders.loader, "load_state_dict", hasty)
    with pytest.raises(fuzz_states.Wrong, match="has changed the loader"):
        for number in range(150):
            loaders.check(1, number)


def test_the_same_number_is_the_same_mutation() -> None:
    states, other = fuzzer("dataloader"), fuzz_states.Fuzzer("dataloader")
    for number in range(20):
        one, another = states.mutation(3, number), other.mutation(3, number)
        assert one[1] == another[1]
        with contextlib.suppress(ValueError, RecursionError):  # numbers of 5,000 digits, or nested as deep
            assert repr(one) == repr(another)
    kinds = {kind for number in range(2000) for kind in states.mutation(2, number)[1].split(",")[0].split("+")}
    assert kinds >= {kind.__name__ for kind in mutations.KINDS}


def test_an_epoch_beyond_what_is_counted_is_refused() -> None:
    """Samples of a webdataset are counted through all epochs."""
    _skip_without("webdataset")
    loaders = fuzzer("webdataset")
    good, before = loaders.bases[1], loaders.loader.state_dict()
    for epoch in (1 << 57, (1 << 62) - 1):
        with pytest.raises(StateCorruptError, match="which is too many"):
            loaders.loader.load_state_dict(midepoch.reseal({**good, "epoch": epoch}))
        assert loaders.loader.state_dict() == before
    distant = midepoch.reseal({**good, "epoch": 1 << 50})
    loaders.loader.load_state_dict(distant)
    assert fuzz_states.first_batches(loaders.loader, fuzz_states.rows) == loaders.reference.of(distant)
