"""Orders by their description, and where they have a sample: the inverse of what they give."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from midepoch.order import Endless, Order, Sequential, Shuffled, Windowed
from midepoch.order.described import order_of, positions_of
from support import sources


@settings(max_examples=80, deadline=None)
@given(st.data(), st.integers(1, 60) | st.integers(65530, 65545), st.integers(0, 9), st.integers(0, 9))
def test_each_sample_is_found_where_it_is(data: st.DataObject, size: int, seed: int, epoch: int) -> None:
    block, window = data.draw(st.integers(1, 1 + size)), data.draw(st.integers(1, 9))
    sizes = tuple(data.draw(st.lists(st.integers(0, 7), min_size=1, max_size=9)))
    orders: list[Order] = [Sequential(size), Shuffled(size), Windowed(size, block, window)]
    if sum(sizes):
        orders.append(Windowed(sum(sizes), sizes, window))
    order = data.draw(st.sampled_from(orders))
    position = data.draw(st.integers(0, order.size - 1))
    (index,) = order.epoch(seed, epoch)[position : position + 1].tolist()
    assert list(positions_of(order, seed, epoch, index, 0, order.size)) == [position]
    assert list(positions_of(order, seed, epoch, index, position + 1, order.size)) == []
    assert list(positions_of(order, seed, epoch, order.size, 0, order.size)) == [], "there is no such sample"
    if isinstance(order.describe(), str) and "blocks=" not in order.describe():
        assert order_of(order.describe(), order.size) == order


@pytest.mark.parametrize("kind", [Sequential, Shuffled])
def test_an_order_without_an_end_has_each_sample_once_a_round(kind: type[Sequential | Shuffled]) -> None:
    order = Endless(kind(5))
    indices = order.epoch(3, 1)[7:40]
    for index in range(5):
        expected = (7 + np.flatnonzero(indices == index)).tolist()
        assert list(positions_of(order, 3, 1, index, 7, 40)) == expected
    assert order_of(order.describe(), None) == order


def test_an_order_that_its_description_does_not_compute() -> None:
    texts = "listed", "windowed(blocks=3:0123abcd,window=2)", "shuffled of 5", "endless listed of 5", ""
    assert [order_of(each, 5) for each in texts] == [None] * 5


def test_a_sample_of_a_billion_is_found_in_few_steps() -> None:
    for order in (Shuffled(10**9), Windowed(10**9, 1000, 64)):
        for index in (0, 123_456_789, 10**9 - 1):
            found: list[int] = []
            look = lambda: found.extend(positions_of(order, 1, 2, index, 0, order.size))  # noqa: B023
            assert sources.calls_of(look, "call", "c_call") < 1000
            assert order.epoch(1, 2)[found[0] : found[0] + 1].tolist() == [index] and len(found) == 1
