"""The parts of a snapshot, by name; and whether a saved state fits the script's part."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ..errors import SnapshotError
from ..loader.lending import loader_of
from .private import has_own_loading, unwrapped

__all__ = ["check_fits", "kinds_of", "merge", "sharded"]

_AS_SAVED = "make it as in the run that saved it"


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
        saved = saved_kinds.get(name)
        if kinds.get(name) != saved:
            kind = kinds.get(name, type(part).__qualname__)
            told = f"{name} is a {kind}, but the snapshot has the state of a {saved or 'model or a loader'}"
            raise SnapshotError(f"{told}: {_AS_SAVED}")
        state = states[name]
        if (loader := loader_of(part)) is not None:
            loader._progress.check(state)
        elif type(part).load_state_dict is torch.nn.Module.load_state_dict and not has_own_loading(part):
            _check_model(name, part.state_dict(), state)
        elif isinstance(part, torch.optim.Optimizer):
            _check_optimizer(name, part.state_dict(), state)
        elif not state and part.state_dict():
            told = f"{name} differs: its saved state is empty, as if it had been disabled"
            raise SnapshotError(f"{told}; {_AS_SAVED}")


def _check_model(name: str, own: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    for key in sorted(own.keys() | saved.keys()):
        if (key in own) != (key in saved) or not _can_fill(own[key], saved[key]):
            told = f"{name} differs at {key!r}: the snapshot has {_described(saved, key)}"
            raise SnapshotError(f"{told}, this model {_described(own, key)}; {_AS_SAVED}")


def _check_optimizer(name: str, own: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    mine, theirs = ([len(group["params"]) for group in each["param_groups"]] for each in (own, saved))
    if mine != theirs:
        told = f"{name} differs: the snapshot has groups of {theirs} parameters, this optimizer {mine}"
        raise SnapshotError(f"{told}; {_AS_SAVED}")


def _can_fill(own: Any, saved: Any) -> bool:
    """Whether a saved value can fill a tensor of the model. The model itself judges other values."""
    if not isinstance(own, torch.Tensor):
        return True
    fits = isinstance(saved, torch.Tensor) and saved.shape == own.shape and saved.layout == own.layout
    return fits and not saved.is_meta


def _described(state: Mapping[str, Any], key: str) -> str:
    if key not in state:
        return "none"
    value = state[key]
    if not isinstance(value, torch.Tensor):
        return f"a {type(value).__name__}"
    kind = "" if value.layout == torch.strided and not value.is_meta else f", {value.layout} on {value.device}"
    return f"shape {tuple(value.shape)}{kind}"


def sharded(state: Any, path: str) -> str:
    """The path of a tensor of which each rank has only a part, such as ``model['weight']``; '' if there is none."""
    if type(state).__name__ in ("DTensor", "ShardedTensor"):
        return path
    items: Iterable[tuple[Any, Any]] = state.items() if isinstance(state, Mapping) else ()
    if isinstance(state, list | tuple):
        items = enumerate(state)
    return next(filter(None, (sharded(each, f"{path}[{key!r}]") for key, each in items)), "")
