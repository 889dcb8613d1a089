"""What a warning points at."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

import midepoch
from midepoch.errors import warn
from support import forking


def test_a_warning_names_the_line_that_called_into_the_package() -> None:
    source: Any = list(range(8))
    loader = midepoch.wrap(DataLoader(source, 2), seed=0)
    next(iter(loader))
    with pytest.warns(midepoch.MidepochWarning, match="after its first batch") as told:
        line = sys._getframe().f_lineno + 1
        next(iter(loader))
    assert [(each.filename, each.lineno) for each in told] == [(__file__, line)]


def test_it_does_through_a_context_manager() -> None:
    @contextlib.contextmanager
    def outer() -> Iterator[None]:
        warn("something")
        yield

    with warnings.catch_warnings(record=True, action="always") as told, outer():
        pass
    assert [each.filename for each in told] == [__file__]


PROGRAM = """
import warnings
import midepoch.packages
midepoch.packages._installed = lambda names: (names[0], "9.0")
with warnings.catch_warnings(record=True, action="always") as told:
    import midepoch.adapters.webdataset.private
print([each.lineno for each in told if "private parts of webdataset" in str(each.message)])
"""


def test_a_warning_at_import_names_the_import(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    assert forking.run([program], check=True).stdout.strip() == "[6]"
