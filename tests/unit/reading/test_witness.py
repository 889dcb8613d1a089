"""The witness of a state: another sample is refused when it is read, other bits are told, and nothing else is."""

from __future__ import annotations

import copy
import itertools
import json
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import midepoch
from midepoch import MidepochWarning, StateCorruptError, StateMismatchError
from midepoch.state.digest import checksum_of
from midepoch.state.witness import LONGEST, Witness, summary_of
from support import sources, witness_sources
from support.witness_sources import SIZE, make, outcome, resume

PLACES = {"in mid-epoch": 3, "at the boundary": 8, "in a later epoch": 11}  # batches of 8 an epoch


def saved(batches: int, **arguments: Any) -> dict[str, Any]:
    """The state after so many batches."""
    with make(**arguments) as loader:
        for _ in itertools.islice(itertools.chain(loader, loader), batches):
            pass
        return dict(loader.state_dict())


@pytest.fixture(scope="module")
def states() -> dict[str, dict[str, Any]]:
    return {name: saved(batches) for name, batches in PLACES.items()}


# What has changed when the state is loaded, and what comes of it.
CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": ({}, "exact"), "workers": ({"workers": 2}, "exact"), "batch size": ({"batch": 2}, "exact"),
    "the files' order": ({"order": "as glob gives it"}, "StateMismatchError"),
    "the files' order, read by workers": ({"order": "as glob gives it", "workers": 2}, "StateMismatchError"),
    "the augmentation": ({"strength": 11.0}, "told"),
    "the decoder": ({"rounding": True}, "told"),
    "the augmentation, strictly": ({"strength": 11.0, "options": {"verify": "strict"}}, "StateMismatchError"),
    "the files' order, gone on with": ({"order": "as glob gives it", "options": {"verify": "warn"}}, "told"),
    "the files' order, not looked at": ({"order": "as glob gives it", "options": {"verify": "off"}}, "exact"),
}  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
def test_what_has_changed_is_told(place: str, states: dict[str, dict[str, Any]]) -> None:
    found = {name: resume(states[place], arguments) for name, (arguments, _) in CHANGES.items()}
    expected = {name: end for name, (_, end) in CHANGES.items()}
    if place == "at the boundary":  # the data may be meant to be others from epoch to epoch
        expected.update(dict.fromkeys(("the files' order", "the files' order, read by workers"), "told"))
    assert {name: outcome(each) for name, each in found.items()} == expected
    told = found["the files' order"]
    assert re.search(r"\(\['label'\]\): sort the list of files", told["error"] or told["warnings"][0])
    assert all(len(each["warnings"]) <= 1 for each in found.values())
    whole = found["nothing"]["rest"]
    assert len(whole) == SIZE - 4 * (PLACES[place] % 8) and found["the decoder"]["rest"] == whole


# --- what looking at a sample may not do ------------------------------------------------------------------------------


class Asked(Mapping[str, Any]):
    """A sample that does its work when it is asked for a value. `once`: it gives each value once."""

    def __init__(self, index: int, once: bool) -> None:
        self.values_left, self.once = {"x": index}, once

    def __getitem__(self, key: str) -> Any:
        value = self.values_left.pop(key) if self.once else self.values_left[key]
        return value if self.once else value + torch.rand(())

    def __iter__(self) -> Iterator[str]:
        return iter(list(self.values_left))

    def __len__(self) -> int:
        return len(self.values_left)


@pytest.mark.parametrize("once", [True, False])
def test_a_sample_that_works_when_it_is_asked_is_not_looked_at(once: bool) -> None:
    values_of = lambda samples: [float(sample["x"]) for sample in samples]
    data = sources.Made(lambda index: Asked(index, once), 16)
    loaded = lambda: midepoch.wrap(DataLoader(data, 4, shuffle=True, collate_fn=values_of), seed=3)
    sources.every_place(loaded, read=str)


@pytest.mark.parametrize("options", [{"batch_size": 1, "collate_fn": lambda samples: samples[0]}, {"batch_size": None}])
def test_a_buffer_that_each_read_fills_is_given_as_it_was_read(options: dict[str, Any]) -> None:
    def make_loader() -> Any:
        buffer = torch.zeros(3)
        samples = sources.Made(lambda index: {"x": buffer.fill_(index)}, 16)
        return midepoch.wrap(DataLoader(samples, shuffle=True, **options), seed=3)

    sources.every_place(make_loader, read=str)


@pytest.mark.filterwarnings("ignore:two reads of sample")
def test_what_varies_from_read_to_read_is_no_false_alarm() -> None:
    data = sources.Made(lambda index: (index, time.time_ns()), 16)
    make_loader: Callable[..., Any] = lambda: midepoch.wrap(DataLoader(data, 4, shuffle=True), seed=3)
    whole, (_, state) = sources.taken(make_loader()), sources.heads(make_loader, 2)
    rest = sources.resumed(make_loader, state)
    assert [labels for labels, _ in rest] == [labels for labels, _ in whole[2:]]
    assert not state["witness"]


# --- what it costs, and what is in the state --------------------------------------------------------------------------


def test_one_sample_of_each_epoch_is_read_again() -> None:
    loader, other = make(), make(options={"world": midepoch.World(1, 2)})
    for epoch in range(3):  # rank 0's first batch begins with it
        list(loader)
        read = loader.source.dataset.reads
        assert len(read) == SIZE + 1 and len(set(read)) == SIZE, epoch
        read.clear()
    for epoch in range(3):  # its share does not begin with the sample that each rank tells
        list(other)
        assert len(other.source.dataset.reads) == SIZE // 2 + 2, epoch
        other.source.dataset.reads.clear()
    resumed, off = make(), make(options={"verify": "off"})
    resumed.load_state_dict(saved(5))
    list(resumed)
    assert len(resumed.source.dataset.reads) == SIZE - 20 + 2
    list(off)
    assert len(off.source.dataset.reads) == SIZE and off.state_dict()["witness"] == ""


def test_batches_in_flight_have_the_witness_of_their_epoch() -> None:
    ahead, behind = make(), make()
    for _ in itertools.islice(itertools.chain(ahead, ahead), 9):
        pass
    for _ in itertools.islice(behind, 7):
        pass
    assert ahead.state_dict(in_flight=2) == behind.state_dict()
    list(itertools.islice(iter(behind), 0))
    assert ahead.state_dict()["witness"].startswith("1/") and behind.state_dict()["witness"].startswith("0/")


def test_the_error_comes_again_until_the_data_are_restored(states: dict[str, dict[str, Any]]) -> None:
    loader = make(order="as glob gives it")
    loader.load_state_dict(states["in mid-epoch"])
    for _ in range(2):
        with pytest.raises(StateMismatchError):
            next(iter(loader))
    with pytest.raises(StateMismatchError):
        loader.peek()
    loader.source.dataset.numbers.sort()
    assert len(list(loader)) == 5


@pytest.mark.filterwarnings("error::midepoch.MidepochWarning")
@pytest.mark.parametrize("hole", [0, 5])
def test_a_sample_that_cannot_be_read_fails_where_it_does_plain(hole: int, tmp_path: Path) -> None:
    """Also where one of a later batch is the damaged one."""
    plain, ours = DataLoader(sources.Failing(12, [hole], tmp_path), 4), []
    given: list[Any] = []
    with pytest.raises(RuntimeError, match="cannot be read"):
        given.extend(each[:, 0].tolist() for each in plain)
    with midepoch.wrap(plain, seed=1) as loader:
        with pytest.raises(RuntimeError, match="cannot be read"):
            for batch in loader:
                ours.append(batch[:, 0].tolist())
        assert ours == given and len(ours) == hole // 4 and loader.position == 4 * len(ours)
        loader.seek(position=8)
        next(iter(loader))
        assert bool(loader.state_dict()["witness"]) is (hole != 0), "no witness of what cannot be read"


def test_a_sample_that_is_gone_or_cannot_be_read_now(states: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    epoch, _, *rest = states["in mid-epoch"]["witness"].split("/")
    loader, without = make(), make()
    loader.load_state_dict(midepoch.reseal({**states["in mid-epoch"], "witness": "/".join([epoch, "99", *rest])}))
    with pytest.raises(StateMismatchError, match="is not there now"):
        next(iter(loader))
    index, read = int(states["at the boundary"]["witness"].split("/")[1]), witness_sources.Files.__getitem__

    def with_a_hole(files: Any, number: int) -> Any:
        if number == index:
            raise OSError("the disk has a hole")
        return read(files, number)

    monkeypatch.setattr(witness_sources.Files, "__getitem__", with_a_hole)
    without.load_state_dict(states["at the boundary"])
    with pytest.warns(MidepochWarning, match="cannot be compared.*hole"):
        next(iter(without))


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("witness", [
    None, 3, "x", "0/1//", "0/1/" * 60, "0/1/abc//0:AA", "\u0663/1/aaaaaaaa//", "/" * 4,
])  # fmt: skip
def test_a_witness_of_another_form_is_refused(witness: Any, states: dict[str, dict[str, Any]]) -> None:
    loader = make()
    with pytest.raises(StateCorruptError):
        loader.load_state_dict(midepoch.reseal({**states["in mid-epoch"], "witness": witness}))
    assert loader.state_dict() == make().state_dict()


# --- looks ------------------------------------------------------------------------------------------------------------


def text_of(value: Any) -> str:
    return str(Witness.of(0, 0, summary_of(value)))


def compared(one: Any, other: Any) -> str:
    witness, look = Witness.parse(text_of(one)), summary_of(other)
    assert witness is not None and not witness.differs(summary_of(one)) and not witness.has_other_bits(summary_of(one))
    return "another" if witness.differs(look) else "other bits" if witness.has_other_bits(look) else "the same"


# Two values of one kind, and what the second is when the first was saved.
PAIRS: dict[str, tuple[Any, Any, str]] = {
    "integers": (3, 4, "another"),
    "large integers": (10**5000, 10**5000 + 1, "another"),
    "an integer and a boolean": (1, True, "another"),
    "floats": (0.5, 0.25, "other bits"),
    "floats of other signs": (0.0, -0.0, "other bits"),
    "no number": (math.nan, -math.nan, "other bits"),
    "a float and an integer": (1.0, 1, "another"),
    "complex numbers": (1j, 2j, "other bits"),
    "texts": ("a", "b", "another"),
    "lone surrogates": ("\ud800", "\ud801", "another"),
    "bytes": (b"a", b"b", "another"),
    "labels": (np.int64(3), np.int64(4), "another"),
    "a numpy float": (np.float64(3), np.float64(4), "other bits"),
    "tokens": (torch.arange(9), torch.arange(1, 10), "another"),
    "tokens of 32 bits": (np.arange(9, dtype=np.int32), np.arange(1, 10, dtype=np.int32), "another"),
    "a mask": (torch.tensor([True, False]), torch.tensor([True, True]), "another"),
    "names": (np.array(["a"]), np.array(["b"]), "another"),
    "a label of 8 bits": (torch.tensor(3, dtype=torch.uint8), torch.tensor(4, dtype=torch.uint8), "other bits"),
    "sound of 16 bits": (np.zeros(9, np.int16), np.ones(9, np.int16), "other bits"),
    "integers with two dimensions": (torch.zeros(2, 2, dtype=torch.int64), torch.eye(2).long(), "other bits"),
    "a picture": (witness_sources.image_of(0), witness_sources.image_of(1), "other bits"),
    "floating-point pixels": (torch.zeros(3, 4, 4), torch.ones(3, 4, 4), "other bits"),
    "half of the precision": (torch.zeros(4).bfloat16(), torch.ones(4).bfloat16(), "other bits"),
    "shapes": (torch.zeros(3, 4), torch.zeros(4, 3), "another"),
    "dtypes": (torch.zeros(3), torch.zeros(3).double(), "another"),
    "a list of floats": ([0.5] * 100, [0.25] * 100, "other bits"),
    "a list of integers": ([1] * 100, [2] * 100, "another"),
    "a list of integers beyond 64 bits": ([1 << 80] * 100, [1 << 81] * 100, "another"),
    "lists of other lengths": ([0.5], [0.5, 0.5], "another"),
    "a set": ({"a", "b"}, {"a", "c"}, "another"),
    "keys in another order": ({"a": 1, "b": 2}, {"b": 2, "a": 1}, "the same"),
    "keys": ({"a": 1}, {"b": 1}, "another"),
    "a picture beside a label": ((torch.zeros(3, 4, 4), 3), (torch.ones(3, 4, 4), 3), "other bits"),
    "a label beside a picture": ((torch.zeros(3, 4, 4), 3), (torch.zeros(3, 4, 4), 4), "another"),
    "the twentieth of many": (list("a" * 20), [*"a" * 19, "b"], "another"),
    "the thousandth of many": (list("a" * 1000), [*"a" * 999, "b"], "another"),
    "objects": (Fraction(1, 2), Fraction(1, 3), "another"),
    "objects without equality": (object(), object(), "the same"),
    "a counter": (Counter({1: 1}), Counter({2: 1}), "another"),
    "a counter of many": (Counter(range(20)), Counter(range(20, 40)), "another"),
    "keys that are paths": ({"/data/1.png": 1}, {"/data/2.png": 1}, "another"),
    "keys behind the first": (dict.fromkeys(range(101), 1), dict.fromkeys([*range(100), 101], 1), "another"),
    "keys in another order, on another mount": (
        dict.fromkeys(("/a/1.png", "/a/2.png"), 1), dict.fromkeys(("/b/c/2.png", "/b/c/1.png"), 1), "the same",
    ),
    "a large set": (set(range(5000)), set(range(9000, 14_000)), "another"),
    "the middle of an object array": (
        np.array(["<s>"] * 50 + ["a"] + ["</s>"] * 50, object), np.array(["<s>"] * 50 + ["b"] + ["</s>"] * 50, object),
        "another",
    ),
    # Texts whose ends are the same after a slash, and which are no paths.
    "a conversation": ("<s>user: 1 + 1? assistant: 2</s>", "<s>user: 1 + 2? assistant: 3</s>", "another"),
    "markup": ('{"number": 1, "type": "text/plain"}', '{"number": 2, "type": "text/plain"}', "another"),
    "a command": ("/imagine 1 cats and/or dogs", "/imagine 2 cats and/or dogs", "another"),
    "a relative path": ("1/of a row.png", "2/of a row.png", "another"),
    "a picture as base64": ("/9j/" + "1SkZ/" * 150 + "/2Q==", "/9j/" + "2SkZ/" * 150 + "/2Q==", "another"),
    # Of a path, only the last component counts: the folders may be the mount.
    "an address": ("https://example.org/1/full.jpg", "s3://bucket/2/full.jpg", "the same"),
    "a path": ("/data/1/image.png", "/mnt/job-2/image.png", "the same"),
    "a path with spaces": ("/data/my pictures/IMG 1.png", "//host/b/IMG 1.png", "the same"),
    "a path of Windows": ("D:\\data\\1\\image.png", "C:/image.png", "the same"),
    "a path by its type": (Path("/data/1/x.png"), Path("data/2/x.png"), "the same"),
    "a path to another file": ("/data/1.png", "/data/2.png", "another"),
}  # fmt: skip


@pytest.mark.parametrize("kind", PAIRS)
def test_what_no_decoder_computes_makes_it_another_sample(kind: str) -> None:
    one, other, expected = PAIRS[kind]
    assert compared(one, copy.deepcopy(one)) == "the same" and compared(one, other) == expected


def test_a_checksum_sees_both_ends_of_what_is_long() -> None:
    assert checksum_of([*range(100)]) != checksum_of([*range(99), 0])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_content_on_a_gpu_is_seen_as_that_of_the_cpu() -> None:
    for each in (torch.arange(9.0), torch.arange(9.0).bfloat16(), torch.arange(6).reshape(2, 3)):
        assert summary_of(each.cuda()) == summary_of(each)
        assert summary_of(each.cuda()).differing(summary_of((each + 1).cuda()))
    large = torch.arange(100_000.0)
    assert checksum_of(large.cuda()) == checksum_of(large) != checksum_of((large + 1).cuda())


def test_a_look_is_pinned() -> None:
    """A witness is compared by other versions and on other machines, so what it says must never change."""
    seen = {"image": witness_sources.image_of(0), "x": [1, 2.5, None, "a/b.txt", b"12"], "t": torch.arange(6.0)}
    assert text_of(seen) == "0/0/38bfc32c/f906ffefde48c7ad3d775e95dd82d81c1fbe/"


ITSELF: list[Any] = []
ITSELF.append(ITSELF)
ODD: dict[str, Callable[[], Any]] = {
    "a list in itself": lambda: ITSELF, "one list many times": lambda: [[]] * 1000,
    "an array of objects": lambda: {"a": np.array([object(), ITSELF], dtype=object)},
    "an empty tensor": lambda: torch.empty(0), "no numbers": lambda: np.array([np.nan, np.inf, -np.inf]),
    "a nested tensor": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "a sparse tensor": lambda: torch.eye(4).to_sparse(), "a long list": lambda: list(range(100_000)),
    "a tensor without content": lambda: torch.ones(4, device="meta"), "a mixed set": lambda: {1, 2, "x"},
    "an array of texts": lambda: np.array(["a", "bc"]),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", ODD)
def test_any_value_can_be_looked_at(kind: str) -> None:
    value = ODD[kind]()
    assert compared(value, value) == "the same" and len(text_of(value)) <= LONGEST


@pytest.mark.parametrize("fingerprint", [None, "x" * 64])
def test_the_largest_numbers_fit_into_512_bytes(fingerprint: str | None) -> None:
    world = midepoch.World(16383, 16384)
    rich = lambda index: {f"part {number}": torch.full((64,), index * 1.2345e-7 + number) for number in range(8)}
    source = DataLoader(sources.Made(rich, 10**15), batch_size=4096, shuffle=True)
    loader = midepoch.wrap(source, seed=2**64 - 1, world=world, fingerprint=fingerprint)
    loader.seek(epoch=10**7, position=4096 * 16384 * 7_000_000)
    next(iter(loader))
    state = loader.state_dict()
    assert len(state["witness"].split("/")[3]) == 9 * 4  # the sample, and its eight parts
    assert len(json.dumps(state)) <= 512
    again = midepoch.wrap(source, world=world, fingerprint=fingerprint)
    again.load_state_dict(state)
    next(iter(again))
