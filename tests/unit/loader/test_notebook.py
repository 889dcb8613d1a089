"""What a notebook shows of a loader, of what it promises, and of a report."""

from __future__ import annotations

import html.parser
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import midepoch
from midepoch.testing.report import LawError, Report, Verdict


class Cells(html.parser.HTMLParser):
    """The texts of a table's cells by rows. Every element is closed; none is other than a table's."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.rows: list[list[str]] = []
        self.title = ""
        self.below = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        assert tag in ("div", "b", "table", "thead", "tbody", "tr", "th", "td") and set(dict(attributes)) <= {"style"}
        self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("th", "td"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1] == "b":
            self.title += data
        elif self.open[-1] == "div":
            self.below += data
        else:
            self.rows[-1][-1] += data


def shown(thing: Any) -> Cells:
    return Cells(thing._repr_html_())


def test_a_loader_shows_where_it_stands_and_what_it_promises() -> None:
    loader = midepoch.wrap(DataLoader(TensorDataset(torch.arange(40)), batch_size=4, shuffle=True), seed=0)
    for number, _ in enumerate(loader, start=1):
        if number == 3:
            break
    before = loader.state_dict()
    cells = shown(loader)
    assert cells.title == "midepoch dataloader loader: epoch 0, 12 of 40 (30.0%) samples"
    assert cells.rows[0] == ["promise", "answer", "why"]
    assert [row[0] for row in cells.rows[1:]] == list(vars(loader.capabilities))
    assert cells.rows[1][1] == "yes" and cells.rows[1][2] == loader.capabilities.exact_order.reason
    assert shown(loader.capabilities).rows == cells.rows
    assert loader.state_dict() == before and len(list(loader)) == 10, "to look changes nothing"


def test_what_a_user_writes_is_text() -> None:
    class Odd:
        def __iter__(self) -> Iterator[int]:
            return iter([1])

    Odd.__name__ = Odd.__qualname__ = "<script>alert(1)</script>"
    loader = midepoch.wrap(Odd(), seed=0)
    promise = midepoch.Capability(False, "a <b>&\"'</b>")
    capabilities = type(loader.capabilities)(*[promise] * 6)
    assert shown(capabilities).rows[1] == ["exact_order", "no", "a <b>&\"'</b>"]
    assert "<script>" not in loader._repr_html_()


def test_a_report_shows_the_laws_and_what_was_got() -> None:
    error = LawError("tail", 1, 3, "<2>", "3", "a cause", "a cure")
    laws = (Verdict("tail", "failed", "3", error, 0.5), Verdict("cost", "not applicable", "no read_log", None, 0.0))
    cells = shown(Report(laws))
    assert cells.title == "1 of 2 laws and trials are broken"
    assert cells.rows[1][:3] == ["tail", "failed", "epoch 1, batch 3"]
    assert "expected: <2>" in cells.rows[1][3] and cells.rows[1][4] == "0.50"
    assert cells.rows[2] == ["cost", "not applicable", "", "no read_log", "0.00"]
    assert cells.below == "not applicable: it could not be tried, for the reason given"
    assert shown(Report(laws[1:])).title == "every law that applies holds"
