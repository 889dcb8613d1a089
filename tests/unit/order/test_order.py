"""Orders are pinned, exact, uniform, and cheap at any size."""

from __future__ import annotations

import itertools
import math
import os
import pickle
import zlib
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from midepoch.order import EpochOrder, Order, Sequential, Shuffled, Windowed

Indices = npt.NDArray[np.int64]

MASK = (1 << 64) - 1


def assert_uniform(counts: npt.NDArray[np.int64], expected: npt.NDArray[np.float64] | None = None) -> None:
    """Counts are as expected, equal ones if that is not given.

    Every statistical test here runs on fixed seeds, so it gives the same p-value each time. Close to 1 is as suspicious
    as close to 0: values spread more evenly than chance does.
    """
    p_value = float(stats.chisquare(counts.ravel(), None if expected is None else expected.ravel())[1])
    assert 1e-4 < p_value < 1 - 1e-4, p_value


# --- pinned: a failure here means that positions saved by earlier versions have lost their meaning ---

# Size, seed, epoch, the first four indices, CRC32 of up to 10000 indices (little-endian int64) from 90 % on.
GOLDEN = [
    (1000, 0, 0, [250, 608, 478, 842], 0x658DC844),
    (1000, 123456789, 3, [288, 177, 95, 58], 0x1A1EEEAC),
    (65536, 0, 0, [53752, 14461, 55493, 50281], 0x215E9D8D),
    (65536, 123456789, 3, [13463, 49736, 52010, 61597], 0xC970C134),
    (65537, 0, 0, [7537, 40513, 20950, 11088], 0xCE7651CB),
    (65537, 123456789, 3, [47474, 62564, 39183, 44067], 0x040E746C),
    (10**6, 0, 0, [559499, 28705, 63947, 969945], 0xA4862933),
    (10**6, 123456789, 3, [860015, 774556, 175380, 839539], 0xE9F2D0E5),
    (10**9, 0, 0, [867972898, 428372809, 168304384, 574275293], 0x2AE326B2),
    (10**9, 123456789, 3, [676723667, 428470130, 688406616, 450572998], 0x2C04C866),
    (10**12, 0, 0, [928804739513, 201770413559, 84054747023, 866678395061], 0x1A19D1C9),
    (10**12, 123456789, 3, [550794923404, 559302064946, 663392865428, 130578768123], 0xA17408EC),
    (10**15, 0, 0, [285797815205884, 987037953541974, 383046678550773, 83658403592144], 0x363B5A18),
    (10**15, 123456789, 3, [371418541502377, 54094449465006, 942442197108672, 806848073591355], 0x845E1E8F),
]

WINDOWED_GOLDEN = [
    (Windowed(10, 3, 2), [7, 8, 0, 6], 0x7A6DC442),
    (Windowed(100, 10, 4), [29, 53, 52, 50], 0x2B6C9882),
    (Windowed(65537, 1, 2), [13919, 5814, 7716, 47128], 0xB6D02D99),
    (Windowed(10**6 + 7, 1024, 16), [662460, 277699, 631249, 380611], 0x611B899C),
    (Windowed(10**7, 10**6, 4), [1108563, 1559931, 1136189, 351203], 0xAB5C8BF3),
    (Windowed(10**12, 1024, 16), [441230488700, 606854154116, 601047408893, 606854154160], 0x52E88B68),
    (Windowed(12, (3, 0, 4, 5), 2), [1, 3, 2, 0], 0xA92F7BC3),
    (Windowed(70100, (70000, 30, 70), 1), [33952, 25528, 1247, 36907], 0x0E21210C),
]


@pytest.mark.parametrize(("size", "seed", "epoch", "expected"), [
    (1, 0, 0, [0]), (5, 0, 0, [3, 0, 2, 4, 1]), (5, 0, 1, [0, 4, 3, 2, 1]), (5, 1, 0, [3, 1, 2, 4, 0]),
    (5, MASK, 7, [0, 3, 1, 4, 2]),
])  # fmt: skip
def test_golden_whole_epochs(size: int, seed: int, epoch: int, expected: list[int]) -> None:
    assert Shuffled(size).epoch(seed, epoch)[:].tolist() == expected


def test_golden_size_two() -> None:
    firsts = "".join(str(int(Shuffled(2).epoch(seed, epoch)[0:1][0])) for seed in range(4) for epoch in range(8))
    assert firsts == "00100000011110101110111001010010"


@pytest.mark.parametrize(("order", "seed", "epoch", "head", "crc"), [
    *((Shuffled(size), *row) for size, *row in GOLDEN), *((order, 5, 2, *row) for order, *row in WINDOWED_GOLDEN),
])  # fmt: skip
def test_golden_places(order: Order, seed: int, epoch: int, head: list[int], crc: int) -> None:
    indices, start = order.epoch(seed, epoch), order.size * 9 // 10
    assert indices[:4].tolist() == head
    assert zlib.crc32(indices[start : min(order.size, start + 10000)].astype("<i8").tobytes()) == crc


def test_descriptions_are_pinned() -> None:
    assert Sequential(5).describe() == "sequential"
    assert Shuffled(5).describe() == "shuffled"
    assert Windowed(10**12, 1024, 16).describe() == "windowed(block=1024,window=16)"
    assert Windowed(12, (3, 0, 4, 5), 2).describe() == "windowed(blocks=4:4cc41ff1,window=2)"
    assert Windowed(12, (3, 0, 5, 4), 2).describe() != Windowed(12, (3, 0, 4, 5), 2).describe()


# --- exact: every sample once, however the epoch is cut ---

SEEDS = st.integers(-(2**70), 2**70)
EPOCHS = st.integers(0, 2**40)
BLOCKS = st.lists(st.integers(0, 200), max_size=60)
SMALL_ORDERS: st.SearchStrategy[Order] = st.one_of(
    st.builds(Shuffled, st.one_of(st.integers(0, 300), st.integers(65_000, 67_000), st.integers(0, 400_000))),
    st.builds(Windowed, st.integers(0, 20_000), st.integers(1, 3000), st.integers(1, 40)),
    st.builds(lambda sizes, window: Windowed(sum(sizes), tuple(sizes), window), BLOCKS, st.integers(1, 40)),
)
ANY_SIZE = st.integers(1, 10**15)
LARGE_ORDERS: st.SearchStrategy[Order] = st.one_of(
    st.builds(Shuffled, ANY_SIZE), st.builds(Windowed, ANY_SIZE, st.integers(1, 10**6), st.integers(1, 1000))
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(SMALL_ORDERS, SEEDS, EPOCHS)
def test_an_epoch_has_every_sample_once(order: Order, seed: int, epoch: int) -> None:
    indices = order.epoch(seed, epoch)[:]
    assert indices.dtype == np.int64
    assert indices.shape == (order.size,)
    assert np.array_equal(np.sort(indices), np.arange(order.size))


@settings(max_examples=2000 if os.environ.get("MIDEPOCH_CHAOS") else 120, deadline=None, derandomize=True)
@given(LARGE_ORDERS, st.floats(0, 1), SEEDS, EPOCHS)
def test_nothing_is_repeated_at_any_size(order: Order, place: float, seed: int, epoch: int) -> None:
    size = order.size
    start = min(int(place * size), size - 1)
    indices = order.epoch(seed, epoch)[start : min(start + 500, size)]
    assert indices.min() >= 0 and indices.max() < size
    assert np.unique(indices).size == indices.size == min(500, size - start)


CUT_ORDERS: list[Order] = [
    Sequential(100_003), Shuffled(50_000), Shuffled(100_003), Windowed(100_003, 100, 8), Windowed(100_003, 1, 2),
    Windowed(200_003, 50_000, 4), Windowed(100_003, (3,) + (0, 1000) * 100, 6),
]  # fmt: skip
cut = pytest.mark.parametrize("order", CUT_ORDERS, ids=lambda order: f"{order.describe()} of {order.size}")


@cut
def test_slices_agree_however_they_are_cut(order: Order) -> None:
    whole = order.epoch(1, 2)[:]
    random = np.random.default_rng(0)
    shared = order.epoch(1, 2)
    for length in (0, 1, 7, 32, 500, 9000):
        for start in random.integers(0, order.size - length, 20).tolist():
            assert np.array_equal(shared[start : start + length], whole[start : start + length])
            assert np.array_equal(order.epoch(1, 2)[start : start + length], whole[start : start + length])
    cuts = np.cumsum(random.integers(0, 100, 900))
    for start, stop in itertools.pairwise(cuts.tolist()):
        assert np.array_equal(shared[start:stop], whole[start:stop])
    for stride in (32, 33, 256, 10_000, 70_000):  # a rank's parts; the last global batch is smaller; then the first
        own = order.epoch(1, 2)
        for start in (*range(stride // 3, order.size - 32, stride), order.size - 5, 0):
            stop = min(start + 32, order.size)
            assert np.array_equal(own[start:stop], whole[start:stop]), start


@cut
def test_orders_and_their_epochs_can_be_pickled(order: Order) -> None:
    epoch = order.epoch(1, 2)
    expected = epoch[100:132].tolist()
    assert pickle.loads(pickle.dumps(epoch))[100:132].tolist() == expected
    assert pickle.loads(pickle.dumps(order)) == order
    assert len(pickle.dumps(order.epoch(1, 2))) < 2000


def test_seeds_are_taken_modulo_two_to_the_64() -> None:
    for make in (Shuffled, lambda size: Windowed(size, 10, 4)):
        order = make(1000)
        assert order.epoch(-1, 0)[:].tolist() == order.epoch(MASK, 0)[:].tolist()
        assert order.epoch(-1, 0)[:].tolist() != order.epoch(0, 0)[:].tolist()
        assert order.epoch(0, 0)[:].tolist() != order.epoch(0, 1)[:].tolist()


# --- uniform ---


def count_permutations(size: int, epochs: Sequence[EpochOrder]) -> npt.NDArray[np.int64]:
    numbers = {permutation: i for i, permutation in enumerate(itertools.permutations(range(size)))}
    counts = np.zeros(len(numbers), dtype=np.int64)
    for epoch in epochs:
        counts[numbers[tuple(epoch[:].tolist())]] += 1
    return counts


@pytest.mark.parametrize("size", [2, 3, 4, 5, 6])
def test_all_permutations_are_equally_frequent(size: int) -> None:
    trials = 20 * math.factorial(size) + 4000
    order = Shuffled(size)
    assert_uniform(count_permutations(size, [order.epoch(seed, 0) for seed in range(trials)]))
    assert_uniform(count_permutations(size, [order.epoch(0, epoch) for epoch in range(trials)]))


def bins(indices: Indices, size: int, count: int) -> Indices:
    """The bin of each index: ``count`` bins whose sizes differ by one at most."""
    return np.asarray((indices.astype(np.float64) / size * count).astype(np.int64))


@pytest.mark.parametrize("size", [1000, 65536, 65537, 100_003, 2**17, 10**6, 10**9, 10**12])
def test_every_position_holds_every_value_equally_often(size: int) -> None:
    """Over many seeds, a table of positions (bins, and each of the first and last) against values (bins)."""
    tables = np.zeros((3, 16, 64), dtype=np.int64)
    for seed in range(400):
        epoch = Shuffled(size).epoch(seed, 0)
        for i in range(16):
            start = size * i // 16
            tables[0, i] += np.bincount(bins(epoch[start : start + 32], size, 64), minlength=64)
        for table, ends in ((tables[1], epoch[:16]), (tables[2], epoch[size - 16 :])):
            np.add.at(table, (np.arange(16), bins(ends, size, 64)), 1)
    shares = np.diff(np.ceil(np.arange(65) * size / 64)) / size
    for table in tables:
        assert_uniform(table, table.sum(axis=1, keepdims=True) * shares)


# --- windowed: few open blocks, bounded moves, and yet mixed ---


def block_bounds(order: Windowed) -> Indices:
    """First samples of all blocks, and the size."""
    if isinstance(order.block_size, int):
        return np.array([*range(0, order.size, order.block_size), order.size])
    return np.array([0, *itertools.accumulate(order.block_size)])


@pytest.mark.parametrize("order", [
    Windowed(10_000, 50, 1), Windowed(10_000, 50, 2), Windowed(10_007, 50, 7), Windowed(10_007, 50, 16),
    Windowed(10_007, 50, 1000), Windowed(30 * 77 + 3 * 500, (77,) * 20 + (500,) * 3 + (77,) * 10, 6),
], ids=lambda order: order.describe())  # fmt: skip
def test_at_most_window_blocks_are_open(order: Windowed) -> None:
    most = 0
    for seed in range(5):
        blocks = np.searchsorted(block_bounds(order), order.epoch(seed, 0)[:], side="right") - 1
        _, first = np.unique(blocks, return_index=True)
        _, last = np.unique(blocks[::-1], return_index=True)
        change = np.zeros(order.size + 1, dtype=np.int64)
        np.add.at(change, first, 1)
        np.add.at(change, order.size - last, -1)
        most = max(most, int(np.cumsum(change).max()))
    blocks_in_all = block_bounds(order).size - 1
    assert most <= order.window
    # The allowance is made use of: all of an even window, or all blocks there are.
    assert most >= min(max(1, order.window // 2 * 2), blocks_in_all)


# --- bad input ---

NOT_INTEGERS = (1.0, "5", None, True)
WRONG: list[tuple[type[Exception], str, Callable[[], object]]] = [
    *((TypeError, "seed must be an integer", lambda value=each: Shuffled(9).epoch(value, 0)) for each in NOT_INTEGERS),
    *((TypeError, "epoch must be an integer", lambda value=each: Shuffled(9).epoch(0, value)) for each in NOT_INTEGERS),
    (ValueError, "epoch must be 0 or more, got -1", lambda: Shuffled(9).epoch(0, -1)),
    (ValueError, "block_size must be 1 or more, got 0", lambda: Windowed(10, 0, 4)),
    (TypeError, r"block_size must be an integer, got 2\.5", lambda: Windowed(10, 2.5, 4)),  # type: ignore[arg-type]
    (ValueError, "block_size must be 0 or more, got -1", lambda: Windowed(10, (11, -1), 4)),
    (ValueError, "sum to 9, but size is 10; give the size of every block", lambda: Windowed(10, (4, 5), 4)),
    (ValueError, "window must be 1 or more, got 0", lambda: Windowed(10, 2, 0)),
    (TypeError, "window must be an integer, got None", lambda: Windowed(10, 2, None)),  # type: ignore[arg-type]
]  # fmt: skip


def test_what_makes_no_order_is_named() -> None:
    for kind, told, make in WRONG:
        with pytest.raises(kind, match=told):
            make()


@pytest.mark.parametrize("make", [Sequential, Shuffled, lambda size: Windowed(size, 10, 4)])
def test_sizes_that_are_none(make: Callable[[object], Order]) -> None:
    for value in (*NOT_INTEGERS, np.float64(3)):
        with pytest.raises(TypeError, match="size must be an integer, got "):
            make(value)
    with pytest.raises(ValueError, match="size must be 0 or more, got -1"):
        make(-1)
    with pytest.raises(ValueError, match=f"size must be at most {10**15}, got {10**15 + 1}"):
        make(10**15 + 1)
    assert make(np.int32(20)) == make(20)
    assert type(make(np.int32(20)).size) is int


@pytest.mark.parametrize("size", [10, 100_000])
@pytest.mark.parametrize("make", [Sequential, Shuffled, lambda size: Windowed(size, 10, 4)])
def test_slices_that_are_none(make: Callable[[int], Order], size: int) -> None:
    epoch = make(size).epoch(0, 0)
    assert len(epoch) == size
    epoch[0:5]  # what was computed before must not let anything through
    for start, stop in ((-1, 3), (3, 2), (0, size + 1), (size + 1, size + 2), (-3, -1)):
        with pytest.raises(IndexError, match=f"positions {start}:{stop} are not within the {size} positions"):
            epoch[start:stop]
    for step in (2, -1, 0):
        with pytest.raises(ValueError, match="in steps of 1"):
            epoch[0:4:step]
    with pytest.raises(TypeError, match=r"order\[p:p \+ 1\], got 3"):
        epoch[3]  # type: ignore[index]
    with pytest.raises(TypeError, match=r"positions must be integers, got 0\.0"):
        epoch[0.0:2.0]
    assert epoch[np.int64(1) : np.int64(4) : 1].tolist() == epoch[1:4].tolist()
    assert epoch[size:].tolist() == []
    assert epoch[:3].tolist() == epoch[0:3].tolist()
