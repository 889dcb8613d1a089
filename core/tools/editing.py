"""A copy of a checkpoint whose loaders leave out more positions."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import torch

from ..checkpoint.files import checksums
from ..errors import SnapshotError, StateError
from ..order.holes import Omit
from ..state.format import reseal
from .command import write_new
from .inspection import content_of, find_states, is_archive

__all__ = ["skip"]

_RANGE = re.compile(r"(\d{1,18}):(\d{1,18})\.\.(\d{1,18})")


def skip(path: Path, ranges: Sequence[str], out: Path, name: str | None = None) -> None:
    """Write a copy of a checkpoint, in which a loader leaves out ranges of positions, as after `Loader.skip`.

    Args:
        path: a file of torch.save, or JSON.
        ranges: each as ``EPOCH:START..STOP``, START included, STOP not.
        out: a file that does not exist yet.
        name: of the state, as `look` tells it; None if there is one.

    Raises:
        ValueError: a range is none, lies in an epoch that has ended, or beyond its epoch.
        StateError: the state is damaged, or would have too many ranges.
        SnapshotError: the checkpoint cannot be read, has no such state, or the copy cannot be written.
    """
    if path.is_dir():
        raise SnapshotError(f"{path} is a folder: name the file in it that has the loader's state")
    content = content_of(path)
    states = {each.name: each for each in find_states(path, content)}
    chosen = [each for key, each in states.items() if name in (None, key)]
    if len(chosen) != 1:
        raise SnapshotError(
            f"{path} has {len(states)} states of loaders ({', '.join(states)[:200]}): name one of them with --state"
        )
    state = chosen[0].state
    if problem := chosen[0].problem:
        raise StateError(f"{chosen[0].name or path}: {problem}")
    omit, now = Omit.parse(state["omit"], state["epoch"]), state["epoch"]
    for each in ranges:
        if (match := _RANGE.fullmatch(each)) is None:
            raise ValueError(f"{each!r:.60} is no range of positions: write EPOCH:START..STOP, such as 0:1280..1920")
        epoch, start, stop = map(int, match.groups())
        omit = omit.with_skip(start, stop, epoch, now, state["size"] or 0)
    state.update(reseal({**state, "omit": omit.text(now)}))
    text = None if is_archive(path) else json.dumps(content).encode()
    with checksums():
        write_new(out, lambda file: torch.save(content, file) if text is None else file.write(text))

