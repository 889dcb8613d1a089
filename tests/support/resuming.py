"""Saving in one process and resuming in another: what follows, and what is told on the way."""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

import midepoch


class Saved(NamedTuple):
    states: list[dict[str, Any]]  # in mid-epoch, at the boundary, and in the second epoch
    following: list[list[str]]  # the batches of the rest of each epoch, as text
    told: list[str]  # midepoch's warnings before the first state can be used
    told_in_all: list[str]  # and later
    answers: dict[str, str]  # of the capabilities


def wrapped(make: Callable[[], Any]) -> midepoch.Loader:
    """The loader that `make` makes, or one over the source that it makes."""
    made = make()
    return made if isinstance(made, midepoch.Loader) else midepoch.wrap(made, seed=3)


def text_of(batch: Any) -> str:
    """A batch's content, the same in each process."""
    if isinstance(batch, torch.Tensor | np.ndarray):
        return repr(batch.tolist())
    if isinstance(batch, dict):
        return repr({key: text_of(part) for key, part in batch.items()})
    if isinstance(batch, list | tuple):
        return repr([text_of(part) for part in batch])
    if type(batch).__module__.startswith("PIL"):
        return repr(np.asarray(batch).tolist())
    if hasattr(batch, "__dict__"):
        return f"{type(batch).__name__} {text_of(vars(batch))}"
    return re.sub(" at 0x[0-9a-f]+", "", repr(batch))


def ours(caught: list[warnings.WarningMessage]) -> list[str]:
    """The texts of midepoch's warnings, but for those that say what a replay costs."""
    told = [str(each.message) for each in caught if issubclass(each.category, midepoch.MidepochWarning)]
    return [each for each in told if "is read again from its start to position" not in each]


def save(make: Callable[[], Any], cut: int) -> Saved:
    """Run two epochs in this process, and save at three places, within an epoch after so many batches as `cut`."""
    states: list[dict[str, Any]] = []
    with warnings.catch_warnings(record=True) as caught, wrapped(make) as loader:
        warnings.simplefilter("always")
        epochs: list[list[str]] = []
        told: list[str] | None = None
        for epoch in range(2):
            epochs.append([])
            for batch in loader:
                epochs[-1].append(text_of(batch))
                state = loader.state_dict()
                told = ours(caught) if told is None else told
                if len(epochs[-1]) == cut:
                    states.append(state)
            if not epoch:
                states.insert(1, loader.state_dict())
        promised = loader.capabilities
    answers = {name: getattr(promised, name).answer for name in ("exact_order", "exact_augmentations")}
    return Saved(states, [epochs[0][cut:], epochs[1], epochs[1][cut:]], told or [], ours(caught), answers)


class Resumed(NamedTuple):
    """What came of a state: batches as text, or the error that ended them; and warnings."""

    batches: list[str]
    error: str
    told: list[str]


def resume(make: Callable[[], Any], states: list[dict[str, Any]], seed: int) -> list[Resumed]:
    """In another process, under other global seeds: the rest of each epoch."""
    found = []
    for state in states:
        random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)
        batches, error = [], ""
        with warnings.catch_warnings(record=True) as caught, wrapped(make) as loader:
            warnings.simplefilter("always")
            loader.load_state_dict(state)
            try:
                batches += [text_of(batch) for batch in loader]
            except midepoch.MidepochError as raised:
                error = f"{type(raised).__name__}: {raised}"
        found.append(Resumed(batches, error, ours(caught)))
    return found
