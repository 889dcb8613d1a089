"""`combine`: several wrapped loaders as one, with one state.

Each part keeps its own cursor, and advances when it is read. The combination adds two things: which parts are read at a
step (a function of its mode, its seed and the step), and where each part started in this epoch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from ..loader.adapter import Options
from ..loader.loader import Loader
from ..loader.part import Part
from ..world import World
from .adapter import CombinedAdapter, Mode, names_and_parts
from .draws import Until

__all__ = ["combine"]


def combine(
    loaders: Mapping[str, Loader] | Sequence[Loader],
    mode: Mode = "min_size",
    *,
    weights: Mapping[str, float] | Sequence[float] | None = None,
    until: Until | None = None,
    steps: int | None = None,
    labelled: bool = False,
    seed: int | None = None,
    world: World | None = None,
    fingerprint: str | None = None,
) -> Loader:
    """Several loaders as one: ``combine({"text": loader_a, "image": loader_b}, "max_size_cycle")``.

    In the first three modes, a batch is a dict, list or tuple as `loaders` is, with a batch of each part. In the
    others, it is the batch of one part.

    | mode | an epoch |
    |---|---|
    | min_size | until the shortest part ends |
    | max_size | until the longest part ends; None in place of a part that ended earlier |
    | max_size_cycle | until the longest part ends; a part that ended earlier begins its next epoch |
    | sequential | one part after the other |
    | weighted | a part is drawn for each step, by its weight |

    A part that is unfinished when the combination's epoch ends starts its own next epoch together with the combination.

    Args:
        loaders: what `wrap` or `combine` returned; no loader twice.
        mode: see above.
        weights: for "weighted", how often each part is drawn, relative to the others; at least 0. Not saved: a state
            can be loaded with other weights.
        until: for "weighted": "all" (the default) draws from unfinished parts until all are finished, so each sample
            comes once; "first" ends the epoch when the first part ends; "cycle" lets a part that ends begin its next
            epoch, until each has ended once.
        steps: for "weighted", instead of `until`: the steps in an epoch. A part that ends begins its next epoch.
        labelled: for "sequential" and "weighted", hand out (name, batch), where the name is a dict's key or a list's
            index.
        seed: of the draws; see `wrap`.
        world: see `wrap`; None: that of the parts.
        fingerprint: see `wrap`.

    Raises:
        TypeError, ValueError: an argument is out of range; a part has not been wrapped, or is there twice.
    """
    names, parts, _ = names_and_parts(loaders)
    if not parts:
        raise ValueError("combine needs at least one loader")
    for name, part in zip(names, parts, strict=True):
        if not isinstance(part, Loader):
            raise TypeError(f"part {name} is a {type(part).__name__}: wrap it first, midepoch.wrap(...)")
    if len({id(part) for part in parts}) < len(parts):
        raise ValueError("one loader cannot be two parts, since it stands at one place: wrap its source twice")
    if mode not in get_args(Mode):
        raise ValueError(f"mode must be one of {', '.join(map(repr, get_args(Mode)))}, got {mode!r}")
    if mode != "weighted" and (weights is not None or until is not None or steps is not None):
        raise ValueError(f"weights, until and steps are for mode='weighted', got them with {mode!r}")
    if labelled and mode not in ("sequential", "weighted"):
        raise ValueError(f"labelled is for modes that hand out one part's batch at a time, not for {mode!r}")
    if until is not None and (until not in get_args(Until) or steps is not None):
        raise ValueError(f"until must be one of {', '.join(map(repr, get_args(Until)))}, without steps; got {until!r}")
    if steps is not None and (type(steps) is not int or steps < 1):
        raise ValueError(f"steps must be an int of at least 1 or None, got {steps!r}")
    settings = {
        "mode": mode,
        "weights": _checked_weights(loaders, weights) if mode == "weighted" else None,
        "until": until or "all",
        "steps": steps,
        "labelled": labelled,
    }
    world = world or Part(names[0], parts[0]).context.options.world  # it is compared with those of the others
    options = Options(seed=seed, world=world, fingerprint=fingerprint, settings=settings)
    return Loader(CombinedAdapter(loaders, options), options)


def _checked_weights(loaders: Any, weights: Any) -> list[float]:
    _, parts, keys = names_and_parts(loaders)
    if weights is None:
        return [1.0] * len(parts)
    if isinstance(loaders, Mapping) != isinstance(weights, Mapping):
        raise TypeError("weights must be a dict for a dict of loaders, and a list for a list")
    if isinstance(weights, Mapping):
        if weights.keys() != set(keys):
            raise ValueError(f"weights must name the parts {keys}, got {list(weights)}")
        weights = [weights[key] for key in keys]
    try:
        numbers = [float(weight) for weight in weights]
    except (TypeError, ValueError) as error:
        raise TypeError(f"weights must be numbers, got {weights!r}") from error
    if len(numbers) != len(parts):
        raise ValueError(f"weights must have one number for each of the {len(parts)} parts, got {len(numbers)}")
    if not all(math.isfinite(number) and number >= 0 for number in numbers) or not 0 < sum(numbers) < math.inf:
        raise ValueError(f"weights must be finite, at least 0 and not all 0, got {weights!r}")
    return numbers
