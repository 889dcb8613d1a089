"""The written format: docs/format.md says what comes next after a state, and sixty lines of Python follow it."""

from __future__ import annotations

import itertools
import json
import random
import re
import subprocess
import sys
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import midepoch
from midepoch.order import Endless, Shuffled, Windowed
from midepoch.order.keys import derive_key
from midepoch.state.parts import join_states
from midepoch.world import Tail, World
from support.places import ROOT, module_of
from support.sources import Indices, loaded

EXAMPLE = ROOT / "examples" / "without_midepoch.py"
PAGE = (ROOT / "docs" / "format.md").read_text(encoding="utf-8")
without = module_of(EXAMPLE)


def wrapped(size: int, batch_size: int, **options: Any) -> midepoch.Loader:
    shuffle, drop_last = options.pop("shuffle", True), options.pop("drop_last", False)
    source: Any = DataLoader(Indices(size), batch_size, shuffle=shuffle, collate_fn=list, drop_last=drop_last)
    return midepoch.wrap(source, **options)


def next_batches(loader: midepoch.Loader, count: int) -> list[list[int]]:
    """At most `count` batches, over the ends of epochs; fewer if two epochs have none."""
    found: list[list[int]] = []
    empty = 0
    while len(found) < count and empty < 2:
        before = len(found)
        found += itertools.islice(loader, count - len(found))
        empty = empty + 1 if len(found) == before else 0
    return found


def with_some_finished(loader: midepoch.Loader, data: st.DataObject) -> dict[str, Any]:
    """Of all ranks, of which each has finished some of its batches."""
    saved, size = loader.state_dict(), loader.state_dict()["size"]
    kinds = {"shuffle": "shuffled" in saved["fingerprint"], "seed": saved["seed"]}
    ranks = [wrapped(size, loader.batch_size, world=World(rank, 3), **kinds) for rank in range(3)]
    for each in ranks:
        each.load_state_dict(saved)
        tickets = [each.ticket for _ in itertools.islice(each, 6)]
        for ticket in data.draw(st.lists(st.sampled_from(tickets), unique=True)) if tickets else ():
            each.finish(ticket)
    return join_states([each.state_dict() for each in ranks], ranks[0])


SIZES = st.one_of(
    st.integers(1, 8), st.integers(1, 60), st.integers(1, 3000), st.integers(65_530, 65_545), st.just(10**6 + 3)
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_sixty_lines_say_what_comes_next(data: st.DataObject) -> None:
    size, shuffle = data.draw(SIZES), data.draw(st.booleans())
    seed = data.draw(st.sampled_from([0, 1, 2**64 - 1]) | st.integers(0, 2**64 - 1))
    world = World(0, data.draw(st.integers(1, 5)))
    saved = wrapped(size, data.draw(st.integers(1, 40)), shuffle=shuffle, seed=seed, world=world)
    saved.seek(data.draw(st.integers(0, 3)), 0)
    for _ in range(data.draw(st.integers(0, 4))):
        start = data.draw(st.integers(0, size - 1))
        stop = data.draw(st.integers(start + 1, size))
        saved.skip(start, stop, epoch=saved.epoch + data.draw(st.integers(0, 2)))
    if data.draw(st.booleans()):
        next_batches(saved, data.draw(st.integers(0, 12)))
        state = saved.state_dict()
    else:
        state = with_some_finished(saved, data)
    state = json.loads(json.dumps(state))
    batch_size, world_size = data.draw(st.integers(1, 50)), data.draw(st.integers(1, 6))
    tail: Tail = data.draw(st.sampled_from(["pad", "drop", "uneven"]))
    drop_last, rank = data.draw(st.booleans()), data.draw(st.integers(0, world_size - 1))
    loader = wrapped(size, batch_size, shuffle=shuffle, drop_last=drop_last, world=World(rank, world_size), tail=tail)
    loader.load_state_dict(state)
    expected = next_batches(loader, 12)
    options = [tail] + ["drop_last"] * drop_last
    found = without.batches(state, batch_size, rank, world_size, *options)
    assert list(itertools.islice(found, len(expected))) == expected


def test_it_runs_as_a_program_and_imports_nothing_of_others() -> None:
    loader = wrapped(100, 4, seed=3)
    next_batches(loader, 5)
    command = [sys.executable, str(EXAMPLE), "3", "1", "2", "4", "uneven"]
    run = subprocess.run(command, input=json.dumps(loader.state_dict()), capture_output=True, text=True, check=True)
    other = loaded(wrapped(100, 3, seed=3, world=World(1, 2), tail="uneven"), loader.state_dict())
    assert [json.loads(line) for line in run.stdout.splitlines()] == next_batches(other, 4)
    imported = set(re.findall(r"^(?:import|from) (\w+)", EXAMPLE.read_text(encoding="utf-8"), re.MULTILINE))
    assert imported <= sys.stdlib_module_names


@pytest.mark.parametrize("size", [65_537, 10**6, 10**9, 10**12 + 7, 10**15, 2**40, 2**40 + 1])
def test_permutations_of_large_sizes(size: int) -> None:
    draws = random.Random(size)
    for seed, epoch in ((0, 0), (2**64 - 1, 3), (123_456_789, 10**6)):
        positions = [0, 1, 2, size // 2, size - 2, size - 1, *(draws.randrange(size) for _ in range(60))]
        key = without.extended(0, int.from_bytes(b"shuffled", "big"), seed, epoch, size)
        order = Shuffled(size).epoch(seed, epoch)
        assert without.permuted(size, key, positions) == [int(order[p : p + 1][0]) for p in positions]


def rows(heading: str) -> list[list[str]]:
    """The cells of the table below a row that begins with `heading`."""
    table = PAGE.split(f"\n| {heading}")[1].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in table]


def test_the_vectors_of_the_page() -> None:
    for said, value in rows("|"):
        name, *words = re.findall(r'"\w+"|\d+', said)
        first = int.from_bytes(name.strip('"').encode(), "big") if name.startswith('"') else int(name)
        assert f"{derive_key(first, *map(int, words)):016x}" == value
        assert f"{without.extended(0, first, *map(int, words)):016x}" == value
    for size, numbers in rows("P(n"):
        key = derive_key(int.from_bytes(b"shuffled", "big"), 0, 0, int(size))
        assert Shuffled(int(size)).epoch(0, 0)[:5].tolist() == list(map(int, numbers.split()))
        assert without.permuted(int(size), key, list(range(5))) == list(map(int, numbers.split()))
    for text, numbers in rows("order, N"):
        numbered = list(map(int, re.findall(r"\d+", text)))
        order = Endless(Shuffled(numbered[0])) if "endless" in text else Windowed(numbered[2], *numbered[:2])
        assert text.startswith(order.describe())
        assert order.epoch(*numbered[-2:])[:4].tolist() == list(map(int, numbers.split()))
    assert len(rows("|")) + len(rows("P(n")) + len(rows("order, N")) == 10


def test_the_texts_of_holes() -> None:
    loader = wrapped(40, 2)
    loader.skip(6, 11)
    loader.skip(31, 36)
    loader.skip(10, 20, epoch=12)
    state = loader.state_dict()
    assert state["omit"] == "0:1.6.5.k.5 12:a.1.1"
    assert all(f"`{text}`" in PAGE for text in state["omit"].split())
    loader = wrapped(40, 2)
    loader.skip(6, 11)
    tickets = [loader.ticket for _ in itertools.islice(loader, 8)]
    for step in (6, 0, 3, 2):  # positions 17 and 18, 0 and 1, 11 and 12, 4 and 5
        loader.finish(tickets[step])
    state = loader.state_dict()
    assert (state["omit"], state["position"]) == ("done:2.2.2.2.1 0:1.6.5", 2)
    assert f"`{state['omit']}`" in PAGE


def as_written(text: str, size: int, seed: int, epoch: int, position: int) -> int:
    """The index at a position, as the page says it. Orders of which the sixty lines know nothing are here."""
    if text.startswith("endless"):
        inner, size = text.split()[1], int(text.split()[-1])
        key = without.extended(0, int.from_bytes(b"endless", "big"), seed, epoch)
        return as_written(inner, size, key, position // size, position % size)
    if text == "sequential":
        return position
    extended, permuted = without.extended, without.permuted
    key = extended(0, int.from_bytes(re.split(r"\W", text)[0].encode(), "big"), seed, epoch, size)
    if text == "shuffled":
        return int(permuted(size, key, [position])[0])
    block, window = map(int, re.findall(r"\d+", text))
    count = -(-size // block)
    slots = permuted(count, extended(key, 0), list(range(count)))
    starts = [0, *itertools.accumulate(min(block, size - each * block) for each in slots)]
    cuts = [*starts[: -1 : max(1, window // 2)], size]
    middles = [0, *((a + z) // 2 for a, z in itertools.pairwise(cuts)), size]
    for layer, bounds in [(2, middles), (1, cuts)][window == 1 :]:
        i = max(i for i, start in enumerate(bounds[:-1]) if start <= position)
        a, z = bounds[i : i + 2]
        position = a + permuted(z - a, extended(key, layer, i), [position - a])[0]
    slot = max(slot for slot, start in enumerate(starts[:-1]) if start <= position)
    return int(slots[slot] * block + position - starts[slot])


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_other_orders_are_as_written(data: st.DataObject) -> None:
    size, seed = data.draw(st.integers(1, 200)), data.draw(st.integers(0, 2**64 - 1))
    epoch = data.draw(st.integers(0, 9))
    order: Any = data.draw(st.sampled_from([
        Endless(Shuffled(size)), Windowed(size, data.draw(st.integers(1, 30)), data.draw(st.integers(1, 12))),
    ]))  # fmt: skip
    start = data.draw(st.integers(0, 3 * size if isinstance(order, Endless) else size - 1))
    stop = start + 20 if isinstance(order, Endless) else min(size, start + 20)
    written = [as_written(order.describe(), size, seed, epoch, p) for p in range(start, stop)]
    assert order.epoch(seed, epoch)[start:stop].tolist() == written


def test_the_checksum_is_as_written() -> None:
    state = wrapped(20, 3, fingerprint="ü").state_dict()
    values = [value for name, value in state.items() if name != "checksum"]
    assert f"{zlib.crc32(json.dumps(values, separators=(',', ':')).encode('ascii')):08x}" == state["checksum"]


def test_streams_are_as_written() -> None:
    class Drawing(Indices):
        def __init__(self) -> None:
            super().__init__(7)
            self.own, self.old = np.random.default_rng(), np.random.RandomState()

        def __getitem__(self, index: int) -> Any:
            index = super().__getitem__(index)
            return index, random.random(), np.random.rand(), self.own.random(), self.old.rand()

    order = Shuffled(7).epoch(5, 0)[:].tolist()
    loader = midepoch.wrap(DataLoader(Drawing(), batch_size=None, shuffle=True), seed=5)
    for position, found in enumerate(loader):
        key = derive_key(1, 5, 0, position)
        x, y = (without.extended(key, zlib.crc32(f"Drawing.{name}".encode())) for name in ("own", "old"))
        bits = np.random.PCG64()
        mixed = [without.extended((x + i - 0x9E3779B97F4A7C15) % 2**64, 0) for i in range(3)]
        bits.state = {"bit_generator": "PCG64", "has_uint32": 0, "uinteger": 0,
                      "state": {"state": x << 64 | mixed[0], "inc": mixed[1] << 64 | mixed[2] | 1}}  # fmt: skip
        expected = [random.Random(key).random(), np.random.RandomState(key >> 32).rand()]
        expected += [np.random.Generator(bits).random(), np.random.RandomState(y >> 32).rand()]
        assert found == [order[position], *expected]
