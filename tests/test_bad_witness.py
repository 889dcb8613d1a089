"""A witness that was edited: refused by its type, or the exact continuation. Never another error, and never a crash."""

from __future__ import annotations

import itertools
import os
import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, SubsetRandomSampler, TensorDataset

sys.path.insert(0, str(Path(__file__).parent))

import own_state_sources
import sources

import midepoch
from midepoch import MidepochWarning, StateCorruptError, StateMismatchError

CASES = 20_000 if os.environ.get("MIDEPOCH_CHAOS") else 2_000
"""Of each source."""


class Rich(Dataset[Any]):
    """Samples with parts of every kind that a witness tells apart, and one that differs at each read."""

    def __init__(self) -> None:
        self.reads = 0

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        return {
            "image": torch.arange(48.0).reshape(3, 4, 4) + index, "path": f"/a/{index}.png", "label": index,
            "mask": np.full(80, index, np.uint8), "zero": torch.zeros(3), "read": self.reads, "empty": torch.empty(0),
        }  # fmt: skip


class Strange(dict[Any, Any]):
    """Fails for what it has not, as datasets of other people do: each with an error of its own."""

    def __missing__(self, key: Any) -> Any:
        raise (IndexError, KeyError, TypeError, OverflowError, MemoryError, ZeroDivisionError)[hash(key) % 6](key)


def texts() -> Any:
    data = Strange({f"sample {number}": number for number in range(16)})
    return DataLoader(data, 2, sampler=SubsetRandomSampler(list(data)))  # type: ignore[arg-type]


def strange() -> Any:
    return DataLoader(Strange({number: float(number) for number in range(16)}), 2)  # type: ignore[arg-type]


MAKES: dict[str, Callable[[], Any]] = {
    "numbers": lambda: DataLoader(TensorDataset(torch.arange(16)), 2, shuffle=True),
    "rich samples": lambda: DataLoader(Rich(), 2, shuffle=True, collate_fn=list),
    "named by text": texts,
    "strange errors": strange,
    "a list": lambda: [[number] for number in range(8)],
    "a replay": lambda: sources.numbers,
    "a state of its own": own_state_sources.Stream,
}


def made(name: str) -> Any:
    return midepoch.wrap(MAKES[name](), seed=3)


def text_of(batch: Any) -> str:
    return repr(sources.plain(batch)) if not isinstance(batch, list) else repr([str(part) for part in batch])


def edited(text: str, others: list[str], draw: random.Random) -> Any:
    """A witness that somebody or something has changed."""
    kind = draw.randrange(9)
    if kind == 0:  # cut
        return text[: draw.randrange(len(text) + 1)]
    if kind == 1:  # a number of any size in place of one
        numbers = [str(draw.choice([0, 1, 5, 15, 16, 2**31, 2**62, 2**63, 10**19 - 1, 10**20])), "", "-3", "-0", "٣"]
        parts = text.split("/")
        parts[draw.randrange(len(parts))] = draw.choice(numbers)
        return "/".join(parts)
    if kind == 2:  # the head of one, the parts of another
        parts, other = text.split("/"), draw.choice(others).split("/")
        cut = draw.randrange(5)
        return "/".join([*parts[:cut], *other[cut:]])
    if kind == 3:  # parts in another order, doubled, or too many
        *head, told, left_out = text.split("/")
        codes = [told[at : at + 4] for at in range(0, len(told), 4)]
        return "/".join([*head, "".join(draw.choices(codes, k=draw.randrange(len(codes) + 3))), left_out])
    if kind == 4:
        return draw.choice([None, 3, 2.5, [], {}, b"0/1/", True, "\0", "x" * 500, "0" * 5000, "////", "0/1/aaaaaaaa//"])
    place = draw.randrange(len(text) + 1)
    signs = "0123456789abcdefABZ-_/:,=~+.z \n\u0660\ud800"
    inserted = "".join(draw.choices(signs, k=draw.randrange(5)))
    return text[:place] + inserted + text[place + draw.randrange(4) :]


@pytest.fixture(scope="module")
def witnesses() -> list[str]:
    found = []
    for name in MAKES:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loader = made(name)
            next(iter(loader))
            found.append(loader.state_dict()["witness"])
    return [text or "0/1/aaaaaaaa/abcdabcd/" for text in found]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MAKES)
def test_an_edited_witness_is_refused_by_its_type_or_continues_exactly(name: str, witnesses: list[str]) -> None:
    draw = random.Random(CASES)
    loader = made(name)
    whole = [text_of(batch) for batch in itertools.islice(loader, 5)]
    varies = name == "rich samples"
    loader = made(name)
    for _ in itertools.islice(loader, 3):
        pass
    state = loader.state_dict()
    own = state["witness"] or draw.choice(witnesses)
    outcomes: Counter[str] = Counter()
    for case in range(CASES):
        witness = edited(own, witnesses, draw)
        before = loader.state_dict()
        try:
            loader.load_state_dict(midepoch.reseal({**state, "witness": witness}))
        except StateCorruptError:
            outcomes["corrupt"] += 1
            assert loader.state_dict() == before, (case, witness)
            continue
        try:
            batch = next(iter(loader))
        except StateMismatchError:
            outcomes["mismatch"] += 1
            continue
        outcomes["continued"] += 1
        assert varies or text_of(batch) == whole[3], (case, witness)
    assert outcomes["corrupt"] > CASES / 10 and outcomes["continued"] > CASES / 100, outcomes
    assert outcomes["mismatch"] or name in ("a replay", "a state of its own"), outcomes


def test_verify_of_another_value_is_refused_for_every_source() -> None:
    for name, make in MAKES.items():
        for value in ("always", "", None, True, 0):
            with pytest.raises(ValueError, match="verify must be 'sample', 'strict', 'warn' or 'off'"):
                midepoch.wrap(make(), seed=3, verify=value)  # type: ignore[arg-type]
        assert name


class Hole(Dataset[int]):
    """One sample cannot be read."""

    def __init__(self, hole: int) -> None:
        self.hole = hole

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        if index == self.hole:
            raise ZeroDivisionError(f"sample {index} is damaged")
        return index


@pytest.mark.parametrize(
    ("hole", "workers"),
    [(0, 0), (0, 2), (5, 0), pytest.param(5, 2, marks=pytest.mark.long)],  # a worker reads as the main process does
)
def test_a_sample_that_cannot_be_read_fails_where_it_fails_without_midepoch(hole: int, workers: int) -> None:
    """Also where another one of the first batch, or of a later one, is the damaged one."""
    plain, given = DataLoader(Hole(hole), 4, num_workers=workers), []
    with pytest.raises(ZeroDivisionError, match="is damaged"):
        for batch in plain:
            given.append(batch.tolist())
    with midepoch.wrap(DataLoader(Hole(hole), 4, num_workers=workers), seed=1) as loader:
        ours: list[Any] = []
        with warnings.catch_warnings():
            warnings.simplefilter("error", MidepochWarning)
            with pytest.raises(ZeroDivisionError, match="is damaged"):
                for batch in loader:
                    ours.append(batch.tolist())
            assert ours == given and len(ours) == hole // 4 and loader.position == 4 * len(ours)
            loader.seek(position=8)
            next(iter(loader))
        assert bool(loader.state_dict()["witness"]) is (hole != 0), "no witness of what cannot be read"
