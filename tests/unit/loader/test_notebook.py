"""What a notebook shows of a loader, of what it promises, and of a report."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from xml.etree import ElementTree

import torch
from torch.utils.data import DataLoader, TensorDataset

import midepoch
from midepoch.testing.report import LawError, Report, Verdict


class Shown:
    """What a notebook shows of a thing. Every element is closed; none is other than a table's."""

    def __init__(self, thing: Any) -> None:
        found = ElementTree.fromstring(f"<div>{thing._repr_html_()}</div>")
        assert {each.tag for each in found.iter()} <= {"div", "b", "table", "thead", "tbody", "tr", "th", "td"}
        assert all(set(each.attrib) <= {"style"} for each in found.iter())
        self.rows = [["".join(cell.itertext()) for cell in row] for row in found.iter("tr")]
        self.text = "".join(found.itertext())


def test_a_loader_shows_where_it_stands_and_what_it_promises() -> None:
    loader = midepoch.wrap(DataLoader(TensorDataset(torch.arange(40)), batch_size=4, shuffle=True), seed=0)
    for number, _ in enumerate(loader, start=1):
        if number == 3:
            break
    before = loader.state_dict()
    cells = Shown(loader)
    assert cells.text.startswith("midepoch dataloader loader: epoch 0, 12 of 40 (30.0%) samples")
    assert cells.rows[0] == ["promise", "answer", "why"]
    assert [row[0] for row in cells.rows[1:]] == list(vars(loader.capabilities))
    assert cells.rows[1][1] == "yes" and cells.rows[1][2] == loader.capabilities.exact_order.reason
    assert Shown(loader.capabilities).rows == cells.rows
    assert loader.state_dict() == before and len(list(loader)) == 10, "to look changes nothing"


def test_what_a_user_writes_is_text() -> None:
    class Odd:
        def __iter__(self) -> Iterator[int]:
            return iter([1])

    Odd.__name__ = Odd.__qualname__ = "<script>alert(1)</script>"
    loader = midepoch.wrap(Odd(), seed=0)
    promise = midepoch.Capability(False, "a <b>&\"'</b>")
    capabilities = type(loader.capabilities)(*[promise] * 6)
    assert Shown(capabilities).rows[1] == ["exact_order", "no", "a <b>&\"'</b>"]
    assert "<script>" not in loader._repr_html_()


def test_a_report_shows_the_laws_and_what_was_got() -> None:
    error = LawError("tail", 1, 3, "<2>", "3", "a cause", "a cure")
    laws = (Verdict("tail", "failed", "3", error, 0.5), Verdict("cost", "not applicable", "no read_log", None, 0.0))
    cells = Shown(Report(laws))
    assert cells.text.startswith("1 of 2 laws and trials are broken")
    assert cells.rows[1][:3] == ["tail", "failed", "epoch 1, batch 3"]
    assert "expected: <2>" in cells.rows[1][3] and cells.rows[1][4] == "0.50"
    assert cells.rows[2] == ["cost", "not applicable", "", "no read_log", "0.00"]
    assert cells.text.endswith("not applicable: it could not be tried, for the reason given")
    assert Shown(Report(laws[1:])).text.startswith("every law that applies holds")
