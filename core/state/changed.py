"""The key `changed`: what the training loop has changed in what the readers hold, as text of a bounded length."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from ..errors import StateCorruptError
from .format import LONGEST_CHANGED, State, reseal

__all__ = ["changed_text", "parse_changed", "share_changed"]

_MOST = 8  # attributes


def changed_text(known: Mapping[str, str]) -> str:
    """JSON of at most `LONGEST_CHANGED` characters with the shortest paths; empty if nothing has changed."""
    text, some = "", dict[str, str]()
    for path in sorted(known, key=lambda path: (len(path), path))[:_MOST]:
        some[path] = known[path]
        longer = json.dumps(some, separators=(",", ":"))
        if len(longer) > LONGEST_CHANGED:
            break
        text = longer
    return text


def parse_changed(text: str) -> dict[str, str]:
    """The attributes that a state's text names, with their values.

    Raises:
        StateCorruptError: it is none that `changed_text` makes.
    """
    if not text:
        return {}
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        parsed = None
    if isinstance(parsed, dict) and len(parsed) <= _MOST and all(type(each) is str for each in parsed.values()):
        return parsed
    raise StateCorruptError("the state's `changed` names no attributes and values: use an undamaged state")


def share_changed(state: State, states: Sequence[State]) -> State:
    """`state` with what the loops of all ranks have changed alike, by the `states` of all ranks.

    What differs between ranks is none of another rank's, so no other could compare it.
    """
    texts = {each["changed"] for each in states}
    if len(texts) == 1:
        return state
    shared = set.intersection(*(set(parse_changed(text).items()) for text in texts))
    return reseal({**state, "changed": changed_text(dict(shared))})
