"""The key `changed`: what the training loop has changed in what the readers hold, as text of a bounded length."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence

from ..errors import StateCorruptError
from .format import LONGEST_CHANGED, State, reseal

__all__ = ["REST", "changed_text", "parse_changed", "share_changed"]

REST = "*"
"""In place of the attributes that do not fit, one CRC over all of them."""

_MOST = 8  # attributes


def changed_text(known: Mapping[str, str]) -> str:
    """JSON of at most `LONGEST_CHANGED` characters; empty if nothing has changed.

    It names the attributes with the shortest paths. The CRC of the others tells that they have changed: no resume can
    compare it, since it does not know the paths. It is carried over, as one more of the others.
    """
    if not known:
        return ""
    ordered = sorted(known, key=lambda path: (path == REST, len(path), path))
    for count in range(min(_MOST, len(ordered)), -1, -1):
        some = {path: known[path] for path in ordered[:count]}
        if others := [(path, known[path]) for path in ordered[count:]]:
            some[REST] = f"#{zlib.crc32(repr(others).encode()):08x}" if others[0][0] != REST else others[0][1]
        text = json.dumps(some, separators=(",", ":"))
        if len(text) <= LONGEST_CHANGED:
            break
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
    if isinstance(parsed, dict) and len(parsed) <= _MOST + 1 and all(type(each) is str for each in parsed.values()):
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
