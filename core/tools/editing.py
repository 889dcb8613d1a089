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
    chosen = list(states.values()) if name is None else [states[name]] if name in states else []
    if len(chosen) != 1:
        raise SnapshotError(
            f"{path} has {len(states)} states of loaders ({', '.join(states)[:200]}): name one of them with --state"
            if states
            else f"{path} has no state of a loader: name a checkpoint that has"
        )
    (found,) = chosen
    if found.problem:
        raise StateError(f"{found.name or path}: {found.problem}")
    state = found.state
    omit = Omit.parse(state["omit"], state["epoch"])
    for each in ranges:
        match = _RANGE.fullmatch(each)
        epoch, start, stop = map(int, match.groups()) if match else (0, 0, 0)
        if start >= stop:
            raise ValueError(f"{each!r:.60} is no range of positions: write EPOCH:START..STOP, such as 0:1280..1920")
        if epoch < state["epoch"]:
            raise ValueError(f"epoch {epoch} has ended: the state is in epoch {state['epoch']}")
        if state["size"] is None or stop > state["size"]:
            raise ValueError(f"{each} lies beyond the epoch: the state's size is {state['size']}")
        omit = omit.with_skip(epoch, start, stop)
    state.update(reseal({**state, "omit": omit.text(state["epoch"])}))
    text = None if is_archive(path) else json.dumps(content).encode()
    with checksums():
        write_new(out, lambda file: torch.save(content, file) if text is None else file.write(text))

