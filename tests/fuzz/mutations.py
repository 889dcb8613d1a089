"""Seeded mutations of states and of files: the same generator makes the same mutation, so that each can be repeated."""

from __future__ import annotations

import json
import random
from collections import OrderedDict, UserDict
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

State = dict[str, Any]

NUMBERS = ("version", "epoch", "position", "seed", "size", "world_size", "batch_size")
TEXTS = ("adapter", "fingerprint", "detail", "witness", "changed", "omit", "checksum")
ADAPTERS = (
    "dataloader", "iterable-dataloader", "iterable", "sequence", "sampler", "stateful", "stateful-dataloader",
    "datasets", "grain", "combined", "webdataset", "webdataset-streams", "streaming", "dali", "dali-sampled", "ffcv",
)  # fmt: skip

HUGE = (
    2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**61, 2**62 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**30, 10**5000,
)  # fmt: skip
OTHER_TYPES: tuple[Callable[[], Any], ...] = (
    lambda: None, lambda: True, lambda: False, lambda: 1.5, lambda: 8.0, lambda: float("nan"), lambda: float("inf"),
    lambda: -0.0, lambda: "", lambda: "8", lambda: "\udc80", lambda: "x" * 70_000, list, lambda: [8],
    dict, lambda: {"a": 1}, lambda: (8,), lambda: b"8", lambda: np.int64(8), lambda: torch.tensor(8),
    lambda: torch.zeros(3), lambda: object(), lambda: range(3), lambda: 1j,
)  # fmt: skip


def nested(depth: int, kind: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value] if kind == 0 else {"parts": value} if kind == 1 else (value,)
    return value


# --- one change to a state: each takes the generator, a copy that it may change, and other states ---


def flip_in_json(generator: random.Random, state: State, others: Sequence[State]) -> Any:
    """A bit of the state as text; where that parses no longer, a bit of one of its texts."""
    text = bytearray(json.dumps(state).encode())
    text[generator.randrange(len(text))] ^= 1 << generator.randrange(8)
    try:
        return json.loads(text.decode("utf-8", "surrogateescape"))
    except ValueError:
        return flip_in_text(generator, state, others)


def flip_in_text(generator: random.Random, state: State, others: Sequence[State]) -> Any:
    name = generator.choice([name for name in TEXTS if isinstance(state.get(name), str) and state[name]] or ["adapter"])
    text = state.get(name)
    if isinstance(text, str) and text:
        place = generator.randrange(len(text))
        state[name] = text[:place] + chr(ord(text[place]) ^ 1 << generator.randrange(8)) + text[place + 1 :]
    return state


def another_number(generator: random.Random, state: State, others: Sequence[State]) -> Any:
    """One bit of it; one that could be meant, such as the next position or another world; a huge or a negative one."""
    name = generator.choice((*NUMBERS, "position", "position"))
    value, size = state.get(name), state.get("size")
    if type(value) is int:
        near = [value - 1, value + 1, value + generator.randint(-9, 9), 0, 1, generator.randint(0, 24)]
        near += [size, size - 1, size + 1, 2 * size] if type(size) is int else []
        huge = generator.choice((1, 2, 8, *HUGE))
        flipped = value ^ 1 << generator.randrange(generator.choice((4, 8, 64)))
        state[name] = generator.choice((flipped, *generator.sample(near, 2), huge, -huge))
    return state


def place_and_size(generator: random.Random, state: State, others: Sequence[State]) -> Any:
    """Several numbers at once, so that they agree with each other."""
    state["epoch"] = generator.choice((0, 0, 1, 2, 3, generator.randrange(1 << 40)))
    state["position"] = generator.choice((0, generator.randint(0, 30), generator.randrange(1 << 40)))
    if generator.random() < 0.3:
        state["size"] = generator.choice((None, state["position"], state["position"] + 1, 1 << 61))
    if generator.random() < 0.3:
        state["detail"] = ""
    return state


def other_type(generator: random.Random, state: State, others: Sequence[State]) -> Any:
    state[generator.choice(NUMBERS + TEXTS)] = generator.choice(OTHER_TYPES)()
    return state


def missing_key(generator: random.Random, state: State, others: Sequence[State]) -> Any:
    for name in generator.sample(sorted(state), min(len(state), generator.choice((1, 1, 2, 10)))):
        del state[name]
    return state


def extra_key(generator: random.Random, state: State, others: Sequence[State]) -> Any:
    names: list[Any] = ["extra", "", "Epoch", "detail ", "_detail", "x" * 10_000, 7, None, (1, 2), 1.5, True, b"epoch"]
    state[generator.choice(names)] = generator.choice((0, "", None, nested(50, 0)))
    return state


def deep_nesting(generator: random.Random, state: State, others: Sequence[State]) -> Any:
    """As a value, and as text that a parser of JSON would follow down."""
    depth, name = generator.choice((10, 900, 5000, 100_000)), generator.choice(("fingerprint", "detail", "adapter"))
    texts = ("[" * depth, '{"parts":' * depth, "[" * depth + "]" * depth, '{"a":' * depth + "0" + "}" * depth)
    if generator.random() < 0.4:
        state[generator.choice(NUMBERS + TEXTS)] = nested(min(depth, 20_000), generator.randrange(3))
    else:
        state[name] = generator.choice(texts)
    return state


def edited_text(generator: random.Random, state: State, others: Sequence[State]) -> Any:
    """A text cut, doubled, spliced, or with another number in it."""
    name = generator.choice(("detail", "detail", "detail", "witness", "witness", "fingerprint", "adapter", "checksum"))
    text = state.get(name)
    if not isinstance(text, str):
        return state
    start, stop = sorted(generator.randrange(len(text) + 1) for _ in range(2))
    kind = generator.randrange(9)
    digits = [place for place, character in enumerate(text) if character.isdigit()]
    if kind == 0:
        text = text[:start]
    elif kind == 1:
        text = text[:start] + text[stop:]
    elif kind == 2:
        text = text[:stop] + text[start:]
    elif kind == 3:
        inserted = ("0", "9" * 30, "-", " ", "\n", "\x00", "٣", "\udc80", ",", ";", '"', "=", "None")
        text = text[:start] + generator.choice(inserted) + text[start:]
    elif kind in (4, 5) and digits:
        place = generator.choice(digits)
        text = text[:place] + generator.choice(("0", "1", "2", "7", "9", "10", "٣", "999999999")) + text[place + 1 :]
    elif kind == 6:
        text = ""
    elif kind == 7:
        text = generator.choice(("{}", "[]", "null", '{"parts":[]}', '{"rank":0,"part":""}', '{"rank":1,"part":"x"}',
                                 "crc=00000000", "draws=1", "draws=0", "draws=999999", "workers=0;digest=",
                                 "workers=0;chain=", "workers=0;chain=00000000",
                                 "varies;workers=0;digest=", "base=0;size=0", "base=4;size=8", "turn=1;skip=0",
                                 "canonical=1;nodes=1;batch=3", "next=0;size=0;"))  # fmt: skip
    else:
        donor = generator.choice(others).get(name) if others else ""
        text = text[:start] + (donor if isinstance(donor, str) else "")[start:]
    state[name] = text
    return state


def part_of_another(generator: random.Random, state: State, others: Sequence[State]) -> Any:
    """Some fields of another state: of the same loader elsewhere, or of another adapter."""
    if others:
        donor = generator.choice(others)
        for name in generator.sample(sorted(donor), generator.choice((1, 1, 2, 5))):
            state[name] = donor[name]
    return state


def another_adapter(generator: random.Random, state: State, others: Sequence[State]) -> Any:
    """A state of something else, or this one under another name."""
    if others and generator.random() < 0.5:
        return dict(generator.choice(others))
    state["adapter"] = generator.choice(ADAPTERS)
    return state


def another_container(generator: random.Random, state: State, others: Sequence[State]) -> Any:
    """The same in another mapping, which is no damage; or no mapping at all."""
    containers: list[Callable[[], Any]] = [
        lambda: OrderedDict(state), lambda: UserDict(state), lambda: MappingProxyType(state),
        lambda: dict(reversed(state.items())), lambda: list(state.items()), lambda: json.dumps(state),
        lambda: json.dumps(state).encode(), lambda: [state], lambda: (state,), lambda: {"state": state}, lambda: None,
        dict, lambda: 0, lambda: set(state), lambda: nested(1000, 1), lambda: torch.zeros(2),
    ]  # fmt: skip
    return generator.choice(containers)()


KINDS: tuple[Callable[[random.Random, State, Sequence[State]], Any], ...] = (
    flip_in_json, flip_in_text, *[another_number] * 5, place_and_size, other_type, missing_key, extra_key, deep_nesting,
    edited_text, edited_text, part_of_another, another_adapter, another_container,
)  # fmt: skip


def mutated(generator: random.Random, state: State, others: Sequence[State]) -> tuple[Any, str]:
    """A state with one change, sometimes several, and what was done to it."""
    changed: Any = dict(state)
    names = []
    for _ in range(generator.choice((1, 1, 1, 1, 2, 3))):
        if type(changed) is not dict:
            break
        try:
            change = generator.choice(KINDS)
            changed = change(generator, changed, others)
            names.append(change.__name__)
        except (TypeError, ValueError, RecursionError):
            continue  # a change before it made this one impossible, such as a value that JSON does not have
    return changed, "+".join(names)


def mutated_bytes(generator: random.Random, whole: bytes, others: Sequence[bytes] = ()) -> tuple[bytearray, str]:
    """A file with one kind of damage, sometimes several, and what was done to it."""
    data, names = bytearray(whole), []
    for _ in range(generator.choice((1, 1, 1, 2, 3))):
        if not data:
            break
        change = generator.choice(FILE_KINDS)
        names.append(change.__name__)
        change(generator, data, others)
    return data, "+".join(names)


def _place(generator: random.Random, data: bytearray) -> int:
    """Mostly where headers and tables are: at the beginning, at the end, at a block."""
    length = len(data)
    anywhere, near = generator.randrange(length), generator.randrange(min(length, 600))
    return generator.choice((anywhere, near, length - 1 - near, anywhere // 512 * 512))


def flipped(generator: random.Random, data: bytearray, others: Sequence[bytes]) -> None:
    for _ in range(generator.choice((1, 1, 4, 30))):
        data[_place(generator, data)] ^= 1 << generator.randrange(8)


def overwritten(generator: random.Random, data: bytearray, others: Sequence[bytes]) -> None:
    start, length = _place(generator, data), generator.choice((1, 4, 8, 512))
    filling = generator.choice((bytes(length), b"\xff" * length, generator.randbytes(length), b"7" * length))
    data[start : start + length] = filling[: len(data) - start]


def truncated(generator: random.Random, data: bytearray, others: Sequence[bytes]) -> None:
    del data[generator.randrange(len(data)) :]


def cut_out(generator: random.Random, data: bytearray, others: Sequence[bytes]) -> None:
    start = _place(generator, data)
    del data[start : start + generator.choice((1, 8, 512, 4096))]


def doubled(generator: random.Random, data: bytearray, others: Sequence[bytes]) -> None:
    start = _place(generator, data)
    data[start:start] = data[start : start + generator.choice((1, 8, 512, 4096))]


def inserted(generator: random.Random, data: bytearray, others: Sequence[bytes]) -> None:
    start = _place(generator, data)
    data[start:start] = generator.randbytes(generator.choice((1, 8, 512)))


def large_integer(generator: random.Random, data: bytearray, others: Sequence[bytes]) -> None:
    """A number that asks for much memory, in either order of bytes."""
    start, width = _place(generator, data) // 4 * 4, generator.choice((4, 8))
    value = generator.choice((1 << 31, 1 << 30, 1 << 40, 1 << 62, (1 << 64) - 1)) % (1 << 8 * width)
    data[start : start + width] = value.to_bytes(width, generator.choice(("little", "big")))[: len(data) - start]


def digits(generator: random.Random, data: bytearray, others: Sequence[bytes]) -> None:
    """Other digits where there are some: of sizes that are written as text."""
    first = max(0, _place(generator, data) - 300)
    places = [place for place in range(first, min(first + 1000, len(data))) if 48 <= data[place] < 58]
    for place in places[: generator.choice((1, 2, 12))]:
        data[place] = generator.choice(b"0179")


def spliced(generator: random.Random, data: bytearray, others: Sequence[bytes]) -> None:
    if others:
        start = generator.randrange(len(data))
        data[start:] = generator.choice(others)[start:]


FILE_KINDS: tuple[Callable[[random.Random, bytearray, Sequence[bytes]], None], ...] = (
    flipped, flipped, overwritten, truncated, cut_out, doubled, inserted, large_integer, digits, spliced,
)  # fmt: skip
