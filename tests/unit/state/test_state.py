"""The saved state: what it holds, what is refused and by which name, and that it goes through every usual format."""

from __future__ import annotations

import base64
import contextlib
import decimal
import functools
import json
import pickle
import random
import zlib
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.utils.data import DataLoader

import midepoch
from midepoch import StateCorruptError, StateError, StateMismatchError, StateVersionError
from midepoch.loader.loader import Loader
from midepoch.state import codec
from midepoch.state.codec import decode, encode
from midepoch.state.digest import checksum_of
from midepoch.state.parts import join_states
from midepoch.testing import digest
from support import sources


def make_loader(size: int = 22, **keywords: Any) -> Loader:
    return midepoch.wrap(sources.noisy_loader(size), **{"seed": 5, **keywords})


MAKERS: dict[str, Callable[[], Loader]] = {
    "dataloader": make_loader,
    "batch sampler": lambda: midepoch.wrap(DataLoader(sources.Noisy(22), batch_sampler=sources.Buckets(22)), seed=5),
    "stream": lambda: midepoch.wrap(DataLoader(sources.Stream(22), batch_size=4), seed=5),
    "list": lambda: midepoch.wrap([10, 20, 30, 40, 50], seed=5),
    "state of its own": lambda: midepoch.wrap(sources.Counter(6)),
}


# --- what it holds: the laws have its keys, its size, its ways of transport ---


@pytest.mark.filterwarnings("ignore:torch.distributed is")  # of one process, which torch 2.6 cannot be told
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("batches", [0, 2])
def test_distributed_checkpoint_loads_into_a_fresh_loader(make: Any, batches: int, tmp_path: Path) -> None:
    """It asks the fresh object for its keys, so they must be there before the first batch."""
    with make() as loader, make() as fresh:
        sources.taken(loader, batches)
        save({"data": loader}, checkpoint_id=tmp_path)
        load({"data": fresh}, checkpoint_id=tmp_path)
        assert fresh.state_dict() == loader.state_dict()
        assert (fresh.epoch, fresh.position) == (loader.epoch, loader.position)


# --- what is refused: the law 'refusal' has damage of each key ---


def refuses(loader: Loader, state: Any, kind: type[StateError], *named: object) -> None:
    """The right error, its message naming all of `named`."""
    before = loader.state_dict()
    with pytest.raises(StateError) as caught:
        loader.load_state_dict(state)
    assert type(caught.value) is kind or kind is StateError, caught.value
    message = str(caught.value)
    assert all(str(each) in message for each in named), message
    assert ":" in message or ";" in message, f"no cure in {message!r}"
    assert loader.state_dict() == before


def state_with(**changes: Any) -> dict[str, Any]:
    """A state from the middle of an epoch, edited and resealed."""
    loader = make_loader()
    sources.taken(loader, 2)
    return midepoch.reseal({**loader.state_dict(), **changes})


def test_a_later_format_is_named_whatever_its_keys() -> None:
    for version in (0, 2, -1, 10**30, 10**5000):  # of more digits than Python turns into text
        refuses(make_loader(), {"version": version, "cursor": 3}, StateVersionError, "reads version 1")


def test_what_does_not_belong_to_the_source_is_refused() -> None:
    loader = make_loader()
    next(batches := iter(loader))
    expected = sources.resumed(make_loader, loader.state_dict())
    for position in (23, 10**18):
        refuses(loader, state_with(position=position), StateCorruptError, position, 22)
    for fingerprint in ("", "{", "[]", "null", '{"order":1}', "[" * 4000, '{"order":"shuffled"} '):
        refuses(loader, state_with(fingerprint=fingerprint), StateError)
    for make, named in DIFFERING.values():
        refuses(loader, make().state_dict(), StateMismatchError, *named)
    assert [sources.plain(batch) for batch in batches] == expected


DIFFERING: dict[str, tuple[Callable[[], Loader], list[object]]] = {
    "seed": (functools.partial(make_loader, seed=6), ["seed", 5, 6]),
    "smaller": (functools.partial(make_loader, 21), ["size", 22, 21]),
    "larger": (functools.partial(make_loader, 23), ["size", 22, 23]),
    "order": (lambda: midepoch.wrap(sources.noisy_loader(shuffle=False), seed=5), ["order", "shuffled", "sequential"]),
    "adapter": (MAKERS["list"], ["adapter", "sequence", "dataloader"]),
    "fingerprint": (functools.partial(make_loader, fingerprint="train-2"), ["fingerprint", "train-2", "none"]),
    "sampler": (MAKERS["batch sampler"], ["listed", "shuffled"]),
}


def test_what_need_not_fit_does_not_matter() -> None:
    """World size, batch size, workers, tail and randomness inform; where the order is ours they may change."""
    state, found = state_with(world_size=7, batch_size=5), list[Any]()
    ways: Any = ({}, {}), ({"batch_size": 3}, {"tail": "drop"}), ({"num_workers": 1}, {"randomness": "none"})
    for batches, options in ways:
        with sources.loaded(midepoch.wrap(sources.noisy_loader(**batches), seed=5, **options), state) as loader:
            found.append([sample[0] for sample in sources.flat(sources.taken(loader))])
    assert len(found[0]) == 14 and found == found[:1] * 3


def test_resealing_refuses_what_no_state_holds() -> None:
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    wrong: list[Any] = [None, {}, *(state_with() | {"detail": value} for value in (object(), {1, 2}, nested))]
    for state in wrong:
        with pytest.raises(StateCorruptError):
            midepoch.reseal(state)


def test_states_of_ranks_that_stand_apart_are_not_joined() -> None:
    ranks = [make_loader(world=midepoch.World(rank, 2)) for rank in range(2)]
    first, second = (loader.state_dict() for loader in ranks)
    sources.taken(ranks[1], 1)
    for states in ([first], [first, ranks[1].state_dict()], [first, second, first]):
        with pytest.raises(midepoch.MidepochError, match="do not stand at the same place"):
            join_states(states)


# --- a source's own state as text ---


OWN_STATES: list[Any] = [
    None, True, 0, -(10**40), 1.5, float("inf"), "", "Zoë \udc80", b"", b"\x00\xff", [], {}, (), set(),
    {"a": [1, (2, {3, 4}), {"b": None}], 5: "five", (1, 2): b"x", "__midepoch__": "tensor"},
    frozenset({("a", 1), ("b", 2)}),
    random.Random(3).getstate(),
    torch.arange(6).reshape(2, 3), torch.zeros(0), torch.zeros(2, 0, 3), torch.tensor(3.5), torch.tensor([True]),
    torch.tensor([1 + 2j]), torch.zeros(2, dtype=torch.float16), torch.get_rng_state(), torch.arange(10)[::3],
    np.arange(6).reshape(2, 3).T, np.zeros(0), np.float32(1.5), np.int64(3), np.bool_(True), np.array(7, dtype=">i4"),
    np.random.RandomState(0).get_state(legacy=False), np.random.default_rng(0).bit_generator.state,
]  # fmt: skip


def test_what_is_encoded_decodes_to_the_same() -> None:
    for value in OWN_STATES:
        text = encode(value)
        assert text.isascii() and text.isprintable()
        assert digest(decode(text)) == digest(value), value


OPAQUE = decimal.Decimal(1)
UNSAVED: list[Any] = [
    OPAQUE, {"a": [OPAQUE]}, np.array([OPAQUE]), range(3), decimal.Decimal, torch.zeros(2, dtype=torch.bfloat16),
    torch.zeros(2, dtype=torch.float8_e4m3fn), torch.eye(2).to_sparse(), torch.zeros(2, device="meta"),
]  # fmt: skip


def test_what_only_pickle_could_save_is_refused_by_name() -> None:
    for value in UNSAVED:
        with pytest.raises(StateError, match="cannot be saved without pickle"):
            encode(value)
    itself: list[Any] = []
    itself.append({"inner": itself})
    with pytest.raises(StateError, match="holds itself"):
        encode(itself)


def test_what_could_not_be_decoded_is_not_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "_MOST_ITEMS", 100)
    for fits in (list(range(100)), {"text": 'a, "[{, \\' * 9}, np.arange(200), ["\\", '"', ","] * 10):
        assert digest(decode(encode(fits))) == digest(fits)
    for parts in (list(range(101)), [[0]] * 60, {str(number): "," for number in range(101)}):
        with pytest.raises(StateError, match=r"has more than 100 parts, .*: let its state_dict\(\) return long lists"):
            encode(parts)
        with pytest.raises(StateCorruptError, match="has more than 100 parts"):
            decode(as_text(json.dumps(parts).encode()))
    monkeypatch.setattr(codec, "_LARGEST_TEXT", 100)
    with pytest.raises(StateError, match="as text, so it could not be loaded"):
        encode("x" * 101)


def as_text(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data)).decode()


def tagged(**content: Any) -> str:
    return as_text(json.dumps({"__midepoch__": content.pop("kind"), **content}).encode())


# Large ones are made by the process that tests them, not by each that collects.
HOSTILE: dict[str, str | Callable[[], str]] = {
    "empty": "", "no base64": "%%%", "not ascii": "é", "no zlib": base64.b64encode(b"nonsense").decode(),
    "truncated": encode(list(range(1000)))[:40], "no json": as_text(b"{"),
    "pickle": base64.b64encode(pickle.dumps([1])).decode(),
    "deep": lambda: as_text(b"[" * 10_000_000 + b"]" * 10_000_000),
    "deep tags": lambda: as_text(b'{"__midepoch__":"tuple","items":[' * 100_000 + b"]}" * 100_000),
    "bomb": lambda: as_text(b"1" + b" " * (300 << 20)), "endless integer": lambda: as_text(b"9" * 100_000),
    "object array": tagged(kind="array", dtype="|O", shape=[1], data="AAAAAAAAAAA="),
    "void array": tagged(kind="array", dtype="V8", shape=[1], data="AAAAAAAAAAA="),
    "dtype of code": tagged(kind="array", dtype="__import__('os')", shape=[1], data=""),
    "dtype of commas": tagged(kind="array", dtype="i4,i4,(2,{", shape=[1], data=""),
    "dtype of half a pair": tagged(kind="array", dtype="(2,i4", shape=[1], data=""),
    "lists behind a text that does not end": lambda: as_text(b"[" + b"0," * 3_000_000 + b'"' + b"\\\\\\\"" * 100),
    "texts that take all memory": lambda: as_text(b"[" + b'"",' * 3_000_000 + b"0]"),
    "lists that take all memory": lambda: as_text(b"[" + b"[0]," * 3_000_000 + b"0]"),
    "dtype of a list": tagged(kind="array", dtype=[["a", "i4"]], shape=[1], data="AAAAAA=="),
    "foreign endianness": tagged(kind="tensor", dtype=">i8", shape=[1], data="AAAAAAAAAAA="),
    "long double tensor": tagged(kind="tensor", dtype="<f16", shape=[1], data="A" * 21 + "A=="),
}  # fmt: skip


def test_other_keys_are_named_whatever_they_are() -> None:
    """Some have no text that Python is able, or allowed, to make; or one that a terminal would obey."""
    deep: Any = ()
    for _ in range(3000):
        deep = (deep,)
    loader = midepoch.wrap(sources.noisy_loader(12), seed=1)
    state = loader.state_dict()
    keys: list[Any] = ["other", "x" * 10**6, 10**5000, deep, 1.5, None, b"epoch"]
    for key in keys:
        with pytest.raises(StateCorruptError, match="has unknown keys") as raised:
            loader.load_state_dict({**state, key: 1})
        assert len(str(raised.value)) < 400
    parts = {"\x1b[2J": "y" * 300, **json.loads(state["fingerprint"])}
    with pytest.raises(StateMismatchError) as mismatch:
        loader.load_state_dict(midepoch.reseal({**state, "fingerprint": json.dumps(parts)}))
    assert "\x1b" not in str(mismatch.value) and len(str(mismatch.value)) < 500


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_hostile_text_is_refused(text: str | Callable[[], str]) -> None:
    hostile = text if isinstance(text, str) else text()
    with pytest.raises(StateCorruptError):
        decode(hostile)


WORDS = ["tensor", "array", "scalar", "dict", "set", "tuple", "bytes", "<i4", "<i8", "|O", "AAAA", "A", "AAAAAAAAAAA="]


def jsons(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Lists, and objects that are tagged as values of some kind, or not."""
    named = st.dictionaries(st.sampled_from(["dtype", "shape", "data", "items", "a"]), inner, max_size=4)
    tagged = st.builds(lambda kind, content: {"__midepoch__": kind, **content}, st.sampled_from(WORDS) | inner, named)
    return st.lists(inner, max_size=3) | named | tagged


@settings(max_examples=1000, deadline=None)
@given(st.recursive(st.none() | st.booleans() | st.integers() | st.sampled_from(WORDS), jsons, max_leaves=12))
def test_any_json_decodes_or_is_refused(value: Any) -> None:
    with contextlib.suppress(StateCorruptError):
        decode(as_text(json.dumps(value).encode()))


def unlike() -> dict[str, tuple[Any, Any]]:
    """By kind: two values that differ in content alone."""
    pyarrow: Any = pytest.importorskip("pyarrow", reason="needs the extra datasets")
    tensors: dict[str, Callable[[Any], Any]] = {
        "bfloat16": lambda each: each.bfloat16(), "float8": lambda each: each.to(torch.float8_e4m3fn),
        "sparse": lambda each: each.to_sparse(), "sparse rows": lambda each: each.to_sparse_csr(),
        "nested": lambda each: torch.nested.nested_tensor([each, each[1:]]),
        "jagged": lambda each: torch.nested.nested_tensor([each[0], each[1]], layout=torch.jagged),
        "quantized": lambda each: torch.quantize_per_tensor(each, 0.1, 0, torch.qint8),
        "slots": lambda each: sources.Slotted(each.bfloat16()), "in a batch": lambda each: {"a": [each.bfloat16()]},
    }  # fmt: skip
    return {name: (make(torch.eye(4)), make(2 * torch.eye(4))) for name, make in tensors.items()} | {
        "image": (PIL.Image.new("RGB", (4, 4), "red"), PIL.Image.new("RGB", (4, 4), "blue")),
        "decimal": (decimal.Decimal(1), decimal.Decimal(2)), "path": (Path("a"), Path("b")),
        "set": ({1, 2}, {1, 3}), "large set": (set(range(100)), set(range(1, 101))),
        "set of sets": ({frozenset("ab")}, {frozenset("ac")}), "deque": (deque([1]), deque([2])),
        "table": (pyarrow.table({"a": [1]}), pyarrow.table({"a": [2]})),
    }  # fmt: skip


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_digests_see_values_of_all_kinds() -> None:
    again = unlike()
    for kind, (one, other) in unlike().items():
        unseen: dict[str, None] = {}
        assert checksum_of(one, unseen) == checksum_of(again[kind][0]) != checksum_of(other, unseen), kind
        assert not unseen, kind
