"""A loader with ``global_batch=``, seen as its global batches: the laws count, cut and compare these."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map

__all__ = ["GlobalBatches", "by_steps"]

_REMEMBERED = 1024


def by_steps(loader: Any) -> Any:
    """The loader, or a view of it if several of its batches make one step of the optimizer."""
    return loader if getattr(loader, "global_batch", None) is None else GlobalBatches(loader)


class GlobalBatches:
    """Each batch is this rank's part of one global batch. Batches with weight 0 are left out, so it may be empty.

    All else is the loader's. There is no `peek`, since a global batch may not be shown before all of it is read.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._sizes: deque[int] = deque(maxlen=_REMEMBERED)  # batches of the loader in each of ours

    def __getattr__(self, name: str) -> Any:
        if name == "peek":
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __iter__(self) -> Iterator[Any]:
        # `iter` begins no pass, so that of the loader may be made at once.
        return self._steps(iter(self._loader))

    def _steps(self, batches: Iterator[Any]) -> Iterator[Any]:
        parts, taken = [], 0
        for batch in batches:
            taken += 1
            if self._loader.weight:
                parts.append(batch)
            if self._loader.step_due:
                self._sizes.append(taken)
                yield _joined(parts) if parts else _without_samples(batch)
                parts, taken = [], 0

    def __len__(self) -> int:
        size, together = self._loader.state_dict()["size"], self._loader.global_batch
        return int(size // together if self._loader.drop_last else -(-size // together))

    def state_dict(self, in_flight: int = 0) -> dict[str, Any]:
        """The loader's state. `in_flight` counts global batches."""
        known = in_flight <= len(self._sizes)
        sizes = list(self._sizes)[len(self._sizes) - in_flight :] if known else [_REMEMBERED]
        state: dict[str, Any] = self._loader.state_dict(sum(sizes))
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load into the wrapped loader."""
        self._loader.load_state_dict(state)
        self._sizes.clear()


def _joined(parts: list[Any]) -> Any:
    """One batch of several, if they consist of tensors; otherwise the list."""
    if len(parts) == 1:
        return parts[0]
    if all(map(_of_tensors, parts)):
        return tree_map(lambda *each: torch.cat(each), *parts)
    return parts


def _without_samples(batch: Any) -> Any:
    return tree_map(lambda tensor: tensor[:0], batch) if _of_tensors(batch) else []


def _of_tensors(batch: Any) -> bool:
    return all(isinstance(leaf, torch.Tensor) for leaf in tree_flatten(batch)[0])
