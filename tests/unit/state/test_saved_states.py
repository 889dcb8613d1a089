"""States that were saved by earlier code go on as they did there, bit for bit."""

from __future__ import annotations

import json

import pytest

from support import sources
from support.places import TESTS
from support.saved_state_sources import SOURCES, file_of, following

FOLDER = TESTS / "saved_states"

pytestmark = pytest.mark.filterwarnings("ignore::midepoch.MidepochWarning")


@pytest.mark.parametrize("name", SOURCES)
def test_saved_states_go_on(name: str) -> None:
    if name == "state of its own":
        pytest.importorskip("torchdata", reason="needs the extra torchdata")
    for saved in json.loads((FOLDER / file_of(name)).read_text()):
        assert following(sources.loaded(SOURCES[name](), saved["state"])) == saved["following"]


def test_each_file_is_read() -> None:
    assert len(list(FOLDER.glob("*.json"))) == len(SOURCES)
