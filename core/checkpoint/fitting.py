"""The parts of a snapshot, by name; and whether a saved state fits the script's part."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ..errors import SnapshotError
from ..loader.lending import loader_of
from .private import has_own_loading, unwrapped

__all__ = ["check_fits", "kinds_of", "merge", "sharded"]

def merge(parts: Mapping[str, Any] | None, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """The parts by name, ready to be saved, from `Snapshot`'s ``parts=`` and its keywords.

    Raises:
        TypeError: a name is in both, is no str, or there is none; or something has no state to save.
    """
    if parts is not None and not isinstance(parts, Mapping):
        raise TypeError(
            f"parts must be a mapping of names to objects, got a {type(parts).__name__}: to save it under the name "
            "'parts', pass parts={'parts': ...}"
        )
    given = dict(parts or {})
    if unnamed := [name for name in given if not isinstance(name, str)]:
        raise TypeError(f"the names in parts must be str, got {unnamed[0]!r}")
    if twice := sorted(given.keys() & keywords.keys()):
        raise TypeError(f"{', '.join(twice)} is both in parts and a keyword: pass each part once")
    merged = {**given, **keywords}
    if not merged:
        raise TypeError("there is nothing to save: pass the parts by name, as in model=model, data=loader")
    for name, part in merged.items():
        if not (callable(getattr(part, "state_dict", None)) and callable(getattr(part, "load_state_dict", None))):
            raise TypeError(
                f"{name} is a {type(part).__name__} without state_dict and load_state_dict: pass an object that "
                "has them (midepoch.wrap gives them to loaders)"
            )
    return {name: unwrapped(part) for name, part in merged.items()}


def kinds_of(parts: Mapping[str, Any]) -> dict[str, str]:
    """The class names of the parts whose state fits only their own class.

    A model is identified by the names and shapes in its state, a loader by its fingerprint.
    """
    named = {each: part for each, part in parts.items() if not isinstance(part, torch.nn.Module)}
    return {name: type(part).__qualname__ for name, part in named.items() if loader_of(part) is None}


def check_fits(parts: Mapping[str, Any], states: Mapping[str, Any], saved_kinds: Mapping[str, str]) -> None:
    """Raise unless every part would accept its saved state. Changes nothing.

    Raises:
        SnapshotError: the names differ, or a model, an optimizer or another part does not fit.
        StateError: a loader does not fit.
    """
    if parts.keys() != states.keys():
        raise SnapshotError(
            f"the snapshot has {', '.join(sorted(states))}, but this Snapshot has {', '.join(sorted(parts))}: "
            "make it with the same parts, under the same names"
        )
    kinds = kinds_of(parts)
    for name, part in parts.items():
        state, kind, saved = states[name], kinds.get(name), saved_kinds.get(name)
        told = ""
        if kind != saved:
            told = f"is a {kind or type(part).__qualname__}, but the snapshot has the state of a "
            told += saved or "model or a loader"
        elif (loader := loader_of(part)) is not None:
            loader._progress.check(state)
        elif isinstance(part, torch.optim.Optimizer):
            told = _difference({"param_groups": _groups(part.state_dict())}, {"param_groups": _groups(state)})
        elif type(part).load_state_dict is torch.nn.Module.load_state_dict and not has_own_loading(part):
            told = _difference(*({key: _form(each[key]) for key in each} for each in (part.state_dict(), state)))
        elif not state and part.state_dict():
            told = "differs: its saved state is empty, as if it had been disabled"
        if told:
            raise SnapshotError(f"{name} {told}: make it as in the run that saved it")


def _difference(own: Mapping[str, str], saved: Mapping[str, str]) -> str:
    """The first name at which two descriptions differ, for a message; '' if there is none."""
    for key in sorted(own.keys() | saved.keys()):
        mine, theirs = own.get(key, "nothing"), saved.get(key, "nothing")
        judged = key.rpartition(".")[2] == "_extra_state" and "nothing" not in (mine, theirs)  # by its module
        if mine != theirs and not judged:
            return f"differs at {key!r}: the snapshot has {theirs}, this run {mine}"
    return ""


def _groups(state: Any) -> str:
    return f"groups of {[len(group['params']) for group in state['param_groups']]} parameters"


def _form(value: Any) -> str:
    """What a value of a model must have in common with the saved one."""
    if not isinstance(value, torch.Tensor):
        return f"a {type(value).__name__}"
    kind = " on meta" * value.is_meta + f" in {value.layout}" * (value.layout != torch.strided)
    return f"shape {tuple(value.shape)}{kind}"


def sharded(state: Any, path: str) -> str:
    """The path of a tensor of which each rank has only a part, such as ``model['weight']``; '' if there is none."""
    if type(state).__name__ in ("DTensor", "ShardedTensor"):
        return path
    items: Iterable[tuple[Any, Any]] = state.items() if isinstance(state, Mapping) else ()
    if isinstance(state, list | tuple):
        items = enumerate(state)
    return next(filter(None, (sharded(each, f"{path}[{key!r}]") for key, each in items)), "")
