"""The pictures and the table of the documentation are what its programs make, and what they show is true."""

from __future__ import annotations

import importlib
import json
import re
import xml.etree.ElementTree
from collections import Counter

import pytest

from support.places import ROOT, module_of

DOCS = ROOT / "docs"
pictures = module_of(DOCS / "pictures.py")


def test_the_table_of_attacks_is_that_of_the_results() -> None:
    attacks = module_of(DOCS / "attacks.py")
    assert attacks.PAGE.read_text(encoding="utf-8") == attacks.written(), "run python docs/attacks.py"
    assert all(str(row[-1]) in ("0", "-") for row in attacks.lines()[1:])


def test_the_table_of_other_packages_is_that_of_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    wild = importlib.import_module("wild")
    kept = json.loads(wild.KEPT.read_text(encoding="utf-8"))
    assert wild.PAGE.read_text(encoding="utf-8") == wild.page(kept)
    assert len(kept["loaders"]) > 100 and "| **silently wrong** | 0 |" in wild.table(kept)
    for file, _, name in (row.tests.partition("::") for row in wild.ROWS.values() if row.tests):
        assert f"def {name}" in (ROOT / file).read_text(encoding="utf-8")


def test_what_is_stored_is_what_is_drawn_and_shown() -> None:
    pages = "".join(path.read_text(encoding="utf-8") for path in DOCS.glob("*.md"))
    stored = {path.stem: path.read_text(encoding="utf-8") for path in (DOCS / "pictures").glob("*.svg")}
    drawn = {name: str(draw()) for name, draw in pictures.PICTURES.items()}
    assert stored.keys() == drawn.keys()
    for name in drawn:
        assert stored[name] == drawn[name], f"{name}.svg is old: run python docs/pictures.py"
        xml.etree.ElementTree.fromstring(drawn[name])
        shown = re.search(rf"!\[[^\]]{{20,}}\]\(pictures/{name}\.svg\)", pages)
        assert shown, f"no page shows {name}.svg, with words for those who cannot see it"


def test_ranks_take_contiguous_blocks_of_each_global_batch() -> None:
    """Worked out by hand for 24 samples in batches of 3: two ranks, two steps, then three ranks."""
    order, before, after, state = pictures.cut()
    assert sorted(order) == list(range(24))
    assert before == [[order[0:3], order[6:9]], [order[3:6], order[9:12]]]
    assert after == [[order[12:15], order[21:22]], [order[15:18], order[22:23]], [order[18:21], order[23:24]]]
    assert (state["epoch"], state["position"]) == (0, 12)
    given = Counter(sample for ranks in (before, after) for rank in ranks for batch in rank for sample in batch)
    assert given == Counter(range(24))
    assert list(pictures.MEANINGS) == list(state), "every key of a state is explained"
