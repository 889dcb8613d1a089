"""A class of tests, one for each law, without writing a class for each source."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from midepoch.testing import ResumableTests


def laws(base: type[ResumableTests], make_loader: Callable[..., Any], **settings: Any) -> type[ResumableTests]:
    """`base` for loaders of one source; `settings` are attributes of `ResumableTests`."""
    return type("Laws", (base,), {"make_loader": staticmethod(make_loader), **settings})
