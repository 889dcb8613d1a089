"""The traces in tests/traces/ come again: what drawn sequences of operations, and drawn programs, gave when written."""

from __future__ import annotations

import os

import pytest

from support import tracing

LONG = bool(os.environ.get("MIDEPOCH_CHAOS"))
SHORT = 20  # every so many of them, in the short form


pytestmark = pytest.mark.usefixtures("no_logs")


def expected(name: str) -> list[str]:
    return tracing.file_of(name).read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("name", [*tracing.SOURCES, *tracing.FEWER])
def test_a_sequence_of_operations_gives_what_it_gave(name: str) -> None:
    lines = expected(name)
    for number in range(0, len(lines), 1 if LONG else 5 if name in tracing.FEWER else SHORT):
        got, wanted = tracing.trace(name, number).split(), lines[number].split()
        first = next((place for place, (a, b) in enumerate(zip(got, wanted, strict=False)) if a != b), len(wanted))
        assert got == wanted, f"{name} {number}: {' '.join(wanted[:first])} then {wanted[first:]}, now {got[first:]}"


@pytest.mark.parametrize("first", range(0, tracing.BODIES, SHORT if LONG else 3 * SHORT))
def test_a_program_that_was_drawn_gives_what_it_gave(first: int) -> None:
    lines = expected("bodies")
    assert len(lines) == tracing.BODIES
    for number in range(first, first + (SHORT if LONG else 1)):
        assert tracing.body(number) == lines[number], number


def test_the_traces_are_of_each_kind() -> None:
    """Every operation was carried out on every source, and neither all of them nor none failed."""
    for name in tracing.SOURCES:
        lines = expected(name)
        operations = [operation for line in lines for operation in line.split()]
        assert len(lines) == tracing.SEQUENCES
        assert {operation[0] for operation in operations} == set(tracing.OPERATIONS)
        failed = [operation for operation in operations if operation.endswith("Error")]
        assert 0 < len(failed) < len(operations) / 4, (name, len(failed), len(operations))
