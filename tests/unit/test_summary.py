"""The summary of a user's objects, and kept workers, which start anew where it has changed."""

from __future__ import annotations

import enum
import functools
import json
import logging
import os
import random
import subprocess
import sys
import tracemalloc
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, TensorDataset

import midepoch
from midepoch import MidepochError
from midepoch.loader.loader import Loader
from midepoch.summary import CUT_OFF, HERE, Watch, _Walk, changed_paths, summarize
from support import sources
from support.places import TESTS


class Mode(enum.Enum):
    TRAIN = 1
    TEST = 2


class Holding(sources.Indices):
    """A dataset that holds one of each kind of value."""

    of_class = 3

    def __init__(self) -> None:
        super().__init__(24)
        self.p, self.name, self.flag, self.mode = 0.5, "train", True, Mode.TRAIN
        self.sizes, self.pair = [224, 256], (1, 2)
        self.options: dict[str, Any] = {"scale": 0.1, "inner": {"ratio": 2}}
        self.ordered, self.kinds, self.recent = OrderedDict(a=1), {1, 2}, deque([1, 2], maxlen=4)
        self.paths = [f"/data/{number}.jpg" for number in range(1000)]
        self.index = {number: number for number in range(1000)}
        self.transforms: list[Any] = [sources.Slotted(0.1), functools.partial(pow, exp=2), self.half, adding(3)]
        self.array, self.large = np.arange(8), np.zeros(1 << 15)
        self.tensor, self.generator = torch.arange(8.0), np.random.default_rng(1)
        self.wide = torch.zeros(2, 1 << 20)
        self.simple, self.kind, self.nothing = types.SimpleNamespace(a=1), sources.Slotted, None
        self.number = np.float64(0.25)

    def half(self, value: Any) -> Any:
        return value / 2


def adding(number: int) -> Callable[[int], int]:
    return lambda value: value + number


# What the program does, and the path that has changed then.
CHANGES: dict[str, tuple[Callable[[Holding], Any], str]] = {
    "a number": (lambda data: setattr(data, "p", 0.0), "data.p"),
    "a numpy number": (lambda data: setattr(data, "number", np.float64(0.5)), "data.number"),
    "a text": (lambda data: setattr(data, "name", "test"), "data.name"),
    "a truth value": (lambda data: setattr(data, "flag", False), "data.flag"),
    "a member of an enum": (lambda data: setattr(data, "mode", Mode.TEST), "data.mode"),
    "a new attribute": (lambda data: setattr(data, "more", 1), "data.more"),
    "none is none": (lambda data: setattr(data, "nothing", 1), "data.nothing"),
    "an attribute of the class": (lambda data: setattr(data, "of_class", 4), "data.of_class"),
    "in a list": (lambda data: data.sizes.append(1), "data.sizes.len"),
    "in a dict of a dict": (lambda data: data.options["inner"].update(ratio=3), "data.options['inner']['ratio']"),
    "in an ordered dict": (lambda data: data.ordered.update(a=2), "data.ordered['a']"),
    "in a set": (lambda data: data.kinds.add(3), "data.kinds"),
    "in a deque": (lambda data: data.recent.append(3), "data.recent"),
    "in a namespace": (lambda data: setattr(data.simple, "a", 2), "data.simple.a"),
    "in slots": (lambda data: setattr(data.transforms[0], "held", 0.2), "data.transforms[0].held"),
    "in a partial": (lambda data: data.transforms[1].keywords.update(exp=3), "data.transforms[1].keywords['exp']"),
    "in a closure": (lambda data: data.transforms.__setitem__(3, adding(4)), "data.transforms[3].number"),
    "a class": (lambda data: setattr(data, "kind", Holding), "data.kind"),
    "a file of many": (lambda data: data.paths.__setitem__(0, "/data/other.jpg"), "data.paths[*]"),
    "another list of files": (lambda data: setattr(data, "paths", [*data.paths, "x.jpg"]), "data.paths.len"),
    "in an index": (lambda data: data.index.update({5000: 1}), "data.index"),
    "in a small array": (lambda data: data.array.fill(7), "data.array"),
    "another large array": (lambda data: setattr(data, "large", np.ones(1 << 15)), "data.large"),
    "in a tensor": (lambda data: data.tensor.add_(1), "data.tensor"),
    "at the end of wide rows": (lambda data: data.wide[1].fill_(1), "data.wide"),
    "the kind of a generator": (lambda data: setattr(data, "generator", random.Random(1)), "data.generator"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_program_changes_has_its_path(name: str) -> None:
    change, path = CHANGES[name]
    dataset = Holding()
    watch, before = Watch({"data": dataset}), summarize(data=dataset)
    assert watch.summary() is watch.summary() == summarize(data=dataset) == before
    change(dataset)
    assert path in changed_paths(before, summarize(data=dataset))
    assert watch.summary() == summarize(data=dataset)


class Own(midepoch.StatefulIterable):
    factor = 1.0

    def __iter__(self) -> Iterator[float]:
        yield from (self.factor * number for number in range(8))


def test_a_source_that_holds_its_loader_is_summarized_without_it() -> None:
    source = Own()
    next(iter(source))
    assert {path for path in summarize(dataset=source) if "kept" in path or "factor" in path} == {"dataset.factor"}


def test_drawing_changes_nothing() -> None:
    dataset = Holding()
    before = summarize(data=dataset)
    dataset.generator.random()
    assert summarize(data=dataset) == before


class Forbidding(type):
    """Whose classes answer no question."""

    __getattribute__ = sources.forbidden


class Unasked(metaclass=Forbidding):
    pass


class OwnDict(dict[str, Any]):
    __len__ = __iter__ = items = keys = sources.forbidden


class OwnList(list[Any]):
    __len__ = __iter__ = __getitem__ = sources.forbidden


def test_no_code_of_the_program_runs() -> None:
    held = [sources.Untouchable(), type.__call__(Unasked), OwnDict(a=1), OwnList([1])]
    assert summarize(data=held)["data.len"] == 4


ITSELF: list[Any] = []
ITSELF.append(ITSELF)


def deep() -> Any:
    value: Any = 1
    for _ in range(10_000):
        value = [value]
    return value


class Transform:
    def __init__(self, number: int) -> None:
        self.p, self.size, self.mean, self.name = 0.5, (224, 224), [0.1, 0.2, 0.3], f"transform {number}"
        self.inner, self.flags = functools.partial(pow, exp=number), {"first": not number, "number": number}


class Files(Dataset[str]):
    """100,000 paths, their labels, and 20 transforms."""

    def __init__(self) -> None:
        self.paths = [f"/data/{number % 1000}/{number}.jpg" for number in range(100_000)]
        self.labels = [number % 1000 for number in range(100_000)]
        self.samples = list(zip(self.paths, self.labels, strict=True))
        self.number_of = {f"class {number}": number for number in range(1000)}
        self.transforms = [Transform(number) for number in range(20)]
        self.weights = np.zeros(100_000)


class Wide:
    def __init__(self, count: int) -> None:
        vars(self).update({f"name_{number}": number for number in range(count)})


def nested(make: Callable[[], Any], depth: int = 2) -> list[Any]:
    return [make() if depth == 1 else nested(make, depth - 1) for _ in range(64)]


BOUNDED: dict[str, tuple[Callable[[], Any], int]] = {
    "files": (Files, 8_000), "objects": (lambda: nested(lambda: Transform(1)), 25_000),
    "dicts": (lambda: nested(lambda: {f"key {number}": {"p": number} for number in range(64)}), 25_000),
    "tuples": (lambda: nested(lambda: [("x" * 10_000,) * 99] * 99), 25_000),
    "texts": (lambda: nested(lambda: [f"{number}" * 5000 for number in range(64)], 1), 25_000),
    "sets": (lambda: nested(lambda: {f"{number}" * 5000 for number in range(64)}, 1), 25_000),
    "arrays": (lambda: nested(lambda: np.zeros(4096, np.float32)), 25_000),
    "attributes": (lambda: nested(lambda: Wide(1000), 1), 25_000),
    "wide": (lambda: Wide(100_000), 100), "long": (lambda: {"k" * 100_000: 1, "p": 1 << 100_000}, 100),
    "itself": (lambda: ITSELF, 100), "deep": (deep, 300), "a list": (lambda: list(range(10**6)), 1_000),
    "a dict": (lambda: {str(number): [number] for number in range(10**6)}, 2_000),
}  # fmt: skip


@pytest.mark.parametrize("name", BOUNDED)
def test_a_summary_looks_at_a_bounded_number(name: str) -> None:
    make, most = BOUNDED[name]
    value = make()
    summarize(data=value)  # learns of classes
    assert 10 < sources.calls_of(lambda: summarize(data=value), "call", "c_call") <= most
    assert summarize(data=value) == summarize(data=value) and len(summarize(data=value)) <= 1100
    assert _Walk({"data": value}).read < (1 << 20) + 64 * 4096, "bytes"


def test_unusual_values_are_summarized() -> None:
    with torch.inference_mode():
        inferred = torch.zeros(8)
    tensors = [inferred, torch.ones(4, dtype=torch.cfloat).conj(), torch.tensor(3.0)]
    for value in (*tensors, np.array("a" * 5000), np.zeros((0, 5)), [deep()] * 99):
        assert summarize(data=value) == summarize(data=value) != summarize(data=None)


def test_a_look_at_wide_rows_copies_none() -> None:
    rows = np.zeros((40, 1 << 18), np.float32)
    summarize(data=rows)
    tracemalloc.start()
    summarize(data=rows)
    taken = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert taken < 1 << 20


def test_what_is_cut_off_is_said_and_is_no_change() -> None:
    found = summarize(data=[[sources.Slotted(number) for number in range(60)] for _ in range(60)])
    assert CUT_OFF in found
    assert changed_paths(found, {path: value for path, value in found.items() if path != CUT_OFF}) == []


def steady() -> dict[str, dict[str, int]]:
    def generate() -> Iterator[int]:
        yield from range(3)

    held: dict[str, Any] = {
        "holding": Holding(), "tensors": TensorDataset(torch.arange(8)), "subset": Subset(Holding(), [1, 2, 3]),
        "both": ConcatDataset([Holding(), Holding()]), "function": generate, "list": list(range(100)),
        "of strings": {f"key_{number}" for number in range(50)}, "module": torch.nn.Linear(2, 2),
    }  # fmt: skip
    found = {name: summarize(data=each) for name, each in held.items()}
    return {name: {path: each[path] for path in each if not path.endswith(HERE)} for name, each in found.items()}


def test_each_process_finds_the_same() -> None:
    program = "import json, sys; sys.path += sys.argv[1:]; from test_summary import steady; print(json.dumps(steady()))"
    command = [sys.executable, "-c", program, str(Path(__file__).parent), str(TESTS)]
    first, second = (
        subprocess.run(command, capture_output=True, check=True, env={**os.environ, "PYTHONHASHSEED": seed}).stdout
        for seed in "12"
    )
    assert first == second
    assert all(json.loads(first).values())


# --- kept workers -----------------------------------------------------------------------------------------------------


class Scaled(sources.Indices):
    def __init__(self, size: int = 12) -> None:
        super().__init__(size)
        self.factor = 1.0
        self.shared: torch.Tensor = torch.ones(1).share_memory_()  # type: ignore[no-untyped-call]

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([float(index), self.factor, float(self.shared), random.random()])


class Stream(Scaled, IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return map(self.__getitem__, range(self.size))


def factors(loader: Loader) -> list[float]:
    return sorted({row[1] for batch in loader for row in batch.tolist()})


def kept(dataset: Any, method: str = "fork", workers: int = 1) -> Loader:
    settings: dict[str, Any] = {"num_workers": workers, "persistent_workers": True, "multiprocessing_context": method}
    return midepoch.wrap(DataLoader(dataset, 4, **settings), seed=0)


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", [Scaled, Stream])
def test_kept_workers_read_what_the_loop_has_set(kind: Any, method: str, caplog: pytest.LogCaptureFixture) -> None:
    dataset = kind()
    with kept(dataset, method) as loader, caplog.at_level(logging.INFO, "midepoch"):
        assert factors(loader) == factors(loader) == [1.0]
        assert not caplog.records
        for factor in (2.0, 3.0):
            dataset.factor = factor
            assert factors(loader) == factors(loader) == [factor]
    assert [each.getMessage().partition(" changed")[0] for each in caplog.records] == ["dataset.factor"] * 2


def test_workers_are_kept_where_nothing_changed() -> None:
    children: Callable[[], set[int | None]] = lambda: {child.pid for child in torch.multiprocessing.active_children()}
    others = children()  # of the tests before this one, in its process

    def pids(loader: Loader) -> set[int | None]:
        assert list(loader)
        return children() - others

    dataset = Scaled()
    with kept(dataset, workers=2) as loader:
        first = pids(loader)
        assert pids(loader) == first
        dataset.shared.fill_(3.0)  # each process sees it
        assert pids(loader) == first
        assert {row[2] for batch in loader for row in batch.tolist()} == {3.0}
        dataset.factor = 2.0
        assert not pids(loader) & first


def test_a_pass_that_is_open_over_a_restart_is_an_error() -> None:
    dataset = Scaled()
    with kept(dataset) as loader:
        next(left := iter(loader))
        dataset.factor = 2.0
        assert factors(loader) == [2.0]
        with pytest.raises(MidepochError):
            next(left)
