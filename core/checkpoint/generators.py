"""The global random generators of the training process: saved, checked, restored, seeded."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from ..order.keys import TORCH_KEYS
from ..state.codec import decode, encode

__all__ = ["check_generators", "save_generators", "seed_generators", "set_generators"]

_TWISTER_WORDS = 624  # of numpy's Mersenne twister


def save_generators() -> str:
    """The states of python's, numpy's and torch's generators, and of the current GPU's if CUDA is in use, as text."""
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state()
    return encode(state)


def check_generators(text: str) -> dict[str, Any]:
    """The decoded result of `save_generators`. It is tried on new generators, so nothing changes in this process.

    Raises:
        Exception: one of them does not take its state. The type depends on the generator.
    """
    state: dict[str, Any] = decode(text)
    random.Random().setstate(state["python"])
    place, words = state["numpy"]["state"]["pos"], state["numpy"]["state"]["key"]
    # numpy does not check the position, and would read memory beyond the key.
    if type(place) is not int or not 0 <= place <= _TWISTER_WORDS or np.shape(words) != (_TWISTER_WORDS,):
        raise ValueError("the position of numpy's generator is out of range")
    np.random.RandomState().set_state(state["numpy"])
    torch.Generator().set_state(state["torch"])
    return state


def set_generators(state: dict[str, Any]) -> None:
    """Restore the states that `check_generators` returned."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def seed_generators(key: int) -> None:
    """Seed all of them, also those of GPUs, from a key in [0, 2**64)."""
    random.seed(key)
    np.random.seed(np.array([key & 0xFFFFFFFF, key >> 32], dtype=np.uint32))
    torch.manual_seed(key & TORCH_KEYS)
