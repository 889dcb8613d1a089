"""What is known of collate functions."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from torch.utils.data import default_collate, default_convert
from torch.utils.data._utils.collate import default_collate_fn_map

from ..backends import DRAWLESS_COLLATES

__all__ = ["as_it_is", "draws_nothing", "keeps_nothing"]

_DRAWLESS = {default_collate.__module__, *DRAWLESS_COLLATES}


def as_it_is(value: Any) -> Any:
    """Collates nothing: for what gives batches."""
    return value


def keeps_nothing(collate: Callable[[Any], Any]) -> bool:
    """Whether `collate` is one of torch's own functions or of midepoch's."""
    own = getattr(collate, "__module__", None) or ""
    return collate is default_convert or collate is default_collate or own.partition(".")[0] == "midepoch"


def draws_nothing(collate: Callable[[Any], Any]) -> bool:
    """Whether `collate` is one of torch's own functions, and no unknown function is registered with it."""
    if collate is default_convert or collate is as_it_is:
        return True
    modules = map(operator.attrgetter("__module__"), default_collate_fn_map.values())
    return collate is default_collate and _DRAWLESS.issuperset(modules)
