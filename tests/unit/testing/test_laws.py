"""The laws are examined: a correct loader satisfies all of them, and each broken one fails exactly its own."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import inspect
import pickle
import re
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
import torch

import midepoch
from midepoch import StateError, StateMismatchError
from midepoch.testing import LAWS, LawError, Report, ResumableTests, check_resumable, digest, laws_of_callers
from midepoch.testing.items import first_difference, leaves
from midepoch.testing.naming import split
from midepoch.testing.pool import Call, ProcessError, shared_pool
from midepoch.testing.record import Settings
from support import batch_shapes, broken_loaders, forking, reference_loader
from support.broken_loaders import BROKEN, BROKEN_OTHERWISE, Dies, Hangs, NeverEnds, Raises
from support.places import TESTS
from support.reference_loader import BareLoader, PartialLoader, ReferenceLoader, ReplayingLoader, RigidLoader

check = functools.partial(
    check_resumable, identify=reference_loader.identify, draws=reference_loader.draws, shuffled=True,
    gather=reference_loader.gather, reseal=midepoch.reseal, plain=reference_loader.plain, raise_on_failure=False,
)  # fmt: skip


def pause(seconds: float) -> None:
    laws_of_callers._PAUSE = seconds


@pytest.fixture(scope="module", autouse=True)
def no_pause() -> Iterator[None]:
    """No loader here reads ahead while the law `delivery` waits for it."""
    shared_pool().run([Call(process, pause, (0.0,)) for process in range(3)], timeout=60)
    yield
    shared_pool().close()


def statuses(report: Report) -> dict[str, str]:
    return {verdict.law: verdict.status for verdict in report.verdicts}


@pytest.mark.parametrize("options", [
    {}, {"tail": "uneven"}, {"tail": "drop", "drop_last": True, "size": 23},
    {"num_workers": 2, "batch_size": 1, "size": 8}, {"size": 18, "shuffle": False},
], ids=str)  # fmt: skip
def test_correct_loaders_satisfy_every_law(options: dict[str, Any]) -> None:
    rule = {name: options[name] for name in ("tail", "drop_last") if name in options}
    make_loader = functools.partial(ReferenceLoader, **options)
    plain = functools.partial(reference_loader.plain, **options)
    report = check(make_loader, plain=plain, quick=True, shuffled=options.get("shuffle", True), **rule)
    assert set(statuses(report).values()) == {"holds"}, str(report)
    assert list(statuses(report)) == list(LAWS)


@pytest.mark.parametrize(("kind", "law", "status", "reason"), [
    (RigidLoader, "topology", "refused clearly", "it was told not to"),
    (PartialLoader, "topology", "refused clearly", "it was told not to"),
    (ReplayingLoader, "cost", "not promised", "constant_time_resume is declared no: it was told not to"),
])  # fmt: skip
def test_what_a_loader_declines_it_refuses_or_does_not_promise(
    kind: Callable[..., Any], law: str, status: str, reason: str
) -> None:
    """Refused is what was tried, and raised an error; not promised what there is nothing to try of."""
    report = check(kind)
    assert report[law].status == status
    assert reason in report[law].reason
    assert set(statuses(report).values()) == {"holds", status}, str(report)


def test_a_loader_of_three_methods_is_examined_as_far_as_it_goes() -> None:
    report = check(BareLoader, plain=None)
    assert report.holds, str(report)
    assert {verdict.law: verdict.reason for verdict in report.verdicts if verdict.status == "not applicable"} == {
        "transparent": "no plain loader is known: give plain=, a function that makes it",
        "cost": "the factory takes no read_log",
        "any item": "the factory takes no items",
        "witness": "the state has no witness: nothing of the data is compared at a resume",
        "holes": "the loader has no skip",
        "reshard": "the loader has no reshard",
        "rollback": "the loader has no commit and rollback",
    }
    assert "the factory takes no batch_size" in report["topology"].reason
    assert "state_dict takes no in_flight" in report["delivery"].reason
    assert "not midepoch's" in report["refusal"].reason


def lone_loader(size: int = 6, batch_size: int = 6) -> ReferenceLoader:
    return ReferenceLoader(size=size, batch_size=batch_size)


class DrawsItsSeed(ReferenceLoader):
    """Takes the process's seed where none is stated, and keeps it in its state."""

    def __init__(self, rank: int = 0, world_size: int = 1, *, seed: int | None = None, **more: Any) -> None:
        super().__init__(rank, world_size, seed=seed, **more)
        self.seed = torch.initial_seed() if seed is None else seed


class WritesHistoryDifferently(ReferenceLoader):
    """What is in flight is in the state's detail, which changes nothing else."""

    def state_dict(self, in_flight: int = 0) -> dict[str, Any]:
        state = super().state_dict(in_flight)
        return midepoch.reseal(state | {"detail": "in flight"}) if in_flight else state

    def check_topology(self, state: dict[str, Any]) -> None:
        super().check_topology(state | {"detail": "" if state["detail"] == "in flight" else state["detail"]})


def plain_without_length(rank: int = 0, world_size: int = 1, **options: Any) -> Any:
    return Unsized(reference_loader.plain(rank, world_size, **options))


class Unsized:
    def __init__(self, inside: Any) -> None:
        self.inside, self.sampler = inside, inside.sampler

    def __iter__(self) -> Iterator[Any]:
        return iter(self.inside)


@pytest.mark.parametrize(("kind", "plain"), [
    (WritesHistoryDifferently, reference_loader.plain),
    (broken_loaders.HasNoLength, plain_without_length),
    (ReferenceLoader, plain_without_length),
    (functools.partial(DrawsItsSeed, size=14), functools.partial(reference_loader.plain, size=14)),
])  # fmt: skip
def test_what_is_allowed_is_not_held_against_a_loader(kind: Callable[..., Any], plain: Any) -> None:
    report = check(kind, plain=plain, quick=True)
    assert set(statuses(report).values()) <= {"holds", "not applicable"}, str(report)


def test_what_cannot_be_examined_says_why() -> None:
    report = check(lone_loader, plain=functools.partial(reference_loader.plain, size=6, batch_size=6))
    assert "no more than one batch" in report["tail"].reason
    assert "fewer than three batches" in report["chain"].reason
    assert report["partition"].reason == "the factory takes no rank and world_size"
    assert {report[law].status for law in ("tail", "chain", "partition")} == {"not applicable"}
    assert report.holds


def test_there_is_a_broken_loader_for_each_law() -> None:
    assert BROKEN.keys() == LAWS.keys()


@pytest.mark.parametrize("law", BROKEN)
def test_each_broken_loader_fails_exactly_its_law(law: str) -> None:
    report = check(BROKEN[law], quick=True, world_sizes=(1, 2))
    assert [error.law for error in report.failures] == [law], str(report)
    error = report.failures[0]
    assert all((error.expected, error.got, error.cause, error.cure))
    assert "Traceback" not in error.expected
    assert report[law].error is error
    assert not report.holds


@pytest.mark.parametrize(("law", "kind"), BROKEN_OTHERWISE, ids=lambda value: getattr(value, "__name__", value))
def test_a_law_is_failed_in_each_of_its_parts(law: str, kind: type[ReferenceLoader]) -> None:
    plain = getattr(kind, "plain", reference_loader.plain)
    report = check(kind, plain=plain, quick=True, world_sizes=(1, 2), laws=[law])
    assert [error.law for error in report.failures] == [law], str(report)


def test_an_order_by_the_process_seed_is_named_as_the_cause() -> None:
    report = check(broken_loaders.OrdersByTheProcessSeed, quick=True, plain=None)
    assert "tail" in [error.law for error in report.failures], str(report)
    assert all("depends on the global seeds of its process" in error.cause for error in report.failures)


class RefusesWithinAPass(ReferenceLoader):
    """Takes a state between two passes only, and says so."""

    running = False

    def __iter__(self) -> Iterator[Any]:
        self.running = True
        try:
            yield from super().__iter__()
        finally:
            self.running = False

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.check(state)
        if self.running:
            raise RuntimeError("a pass is running")
        self.apply(state)


class IsReadOnce(ReferenceLoader):
    was_read = False

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            self.was_read = True
            yield batch

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.check(state)
        if self.was_read:
            raise StateError("it was read: make another one")
        self.apply(state)

    def rollback(self) -> None:
        if self.was_read:
            raise StateError("it was read, so it cannot go back")


class GoesBackNever(ReferenceLoader):
    """Takes states when it was read, and so could go back."""

    def rollback(self) -> None:
        raise StateError("it cannot go back")


class DrawsAtALoad(IsReadOnce):
    def apply(self, state: dict[str, Any]) -> None:
        torch.rand(1)
        super().apply(state)


class TakesAnyPart(PartialLoader):
    """Each rank has a part, and that of any other one leads to the same place."""

    def check_topology(self, state: dict[str, Any]) -> None:
        if not state["detail"]:
            raise StateMismatchError("the detail is empty")
        super().check_topology(state | {"detail": "all ranks"})


class TakesAnyPartForTheBeginning(TakesAnyPart):
    def apply(self, state: dict[str, Any]) -> None:
        super().apply(state)
        if state["detail"] not in ("all ranks", self.detail()):
            self.cursor = (state["epoch"], 0)


@pytest.mark.parametrize(("kind", "law", "status", "words"), [
    (RefusesWithinAPass, "round trip", "refused clearly", "RuntimeError: a pass is running"),
    (IsReadOnce, "round trip", "refused clearly", "it was read"),
    (IsReadOnce, "guest", "holds", ""),
    (IsReadOnce, "rollback", "refused clearly", "cannot go back"),
    (GoesBackNever, "rollback", "failed", ""),
    (DrawsAtALoad, "guest", "failed", ""),
    (TakesAnyPart, "topology", "refused clearly", ""),
    (TakesAnyPartForTheBeginning, "topology", "failed", "the state of rank 0 alone, loaded on rank 1 of 2"),
])  # fmt: skip
def test_each_is_judged_by_what_it_declines(kind: type[ReferenceLoader], law: str, status: str, words: str) -> None:
    """A refusal is clear, or a fault where the loader can do what it refuses."""
    verdict = check(kind, quick=True, world_sizes=(1, 2), laws=[law])[law]
    assert verdict.status == status, verdict
    assert words in (verdict.error.expected if verdict.error else verdict.reason)


def test_a_script_that_every_new_process_runs_is_told_so(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        f"import sys\nsys.path.insert(0, {str(TESTS)!r})\n"
        "from midepoch.testing import check_resumable\nfrom support.reference_loader import ReferenceLoader\n"
        "check_resumable(ReferenceLoader, laws=['determinism'])\n"
    )
    done = forking.run([script])
    assert "needs `if __name__ == '__main__':` around the call" in done.stderr.splitlines()[-1]
    assert done.stderr.count("An attempt has been made to start a new process") == 1


def test_a_failure_is_raised_with_the_report() -> None:
    with pytest.raises(LawError) as caught:
        check(broken_loaders.IsFreshUntilStarted, laws=["round trip", "tail"], raise_on_failure=True)
    error = caught.value
    assert (error.law, error.epoch, error.batch) == ("round trip", 0, 1)
    assert error.report is not None
    assert list(statuses(error.report).items()) == [("tail", "holds"), ("round trip", "failed")]
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    for part in ("'round trip'", "epoch 0, batch 1", error.expected, error.got, error.cause, error.cure):
        assert part in str(error)
        assert part in str(error.report) or part == "'round trip'"


FOR_NAMES = ("determinism", "tail", "partition", "topology", "delivery")
look = functools.partial(check_resumable, laws=FOR_NAMES, quick=True, epochs=1, raise_on_failure=False)


@pytest.mark.parametrize("kind", batch_shapes.KINDS)
def test_samples_are_named_in_any_shape_and_missed(kind: str) -> None:
    report = look(functools.partial(batch_shapes.make, kind, len(kind) % 2 == 0), world_sizes=(1, 2))
    assert set(statuses(report).values()) == {"holds"}, str(report)
    forgets = functools.partial(batch_shapes.make, kind, forgets=True)
    error = look(forgets, world_sizes=(1, 2), laws=["topology"])["topology"].error
    assert error is not None and error.got.startswith("1 lost" if kind == "nothing" else "2 lost")


def test_a_loader_whose_samples_have_no_names_is_told_so() -> None:
    report = look(batch_shapes.Unnamed, world_sizes=(1, 2))
    assert report.holds, str(report)
    for law in ("tail", "partition", "topology", "delivery"):
        assert report[law].status == "not applicable"
        assert report[law].reason == "no leaf of the batch names the sample; give identify"


@pytest.mark.parametrize(("kind", "timeout", "told"), [
    (Hangs, 1.0, "(?s)did not finish.*raise timeout="),
    (Dies, 120.0, "died with exit code 7"),
    (Raises, 120.0, "(?s)OSError while iterating, pass 0: the disk is gone.*broken_loaders.py"),
    (NeverEnds, 120.0, "."),
])  # fmt: skip
def test_a_loader_that_fails_is_told_and_the_next_one_works(kind: Any, timeout: float, told: str) -> None:
    error = check(kind, laws=["tail"], timeout=timeout)["tail"].error
    assert error is not None and re.search(told, error.got)
    assert check(ReferenceLoader, laws=["determinism"], quick=True).holds


@pytest.mark.parametrize(("wrong", "kind", "message"), [
    ({"make_loader": lambda rank, world_size: None}, TypeError, "must be picklable"),
    ({"make_loader": 3}, TypeError, "make_loader must be a function"),
    ({"laws": ["tail", "gravity"]}, ValueError, "no law 'gravity'"),
    ({"make_loader": functools.partial(ReferenceLoader, size=0)}, ValueError, "without a single batch"),
    ({"world_sizes": (0,)}, ValueError, "world_sizes"), ({"num_workers": (-1,)}, ValueError, "num_workers"),
    ({"cuts": (0,)}, ValueError, "cuts"), ({"epochs": 0}, ValueError, "epochs"),
    ({"tail": "cut"}, ValueError, "tail"), ({"timeout": 0}, ValueError, "timeout"),
    ({"options": ("rank", "colour")}, ValueError, r"options must be some of rank, .*got \['colour'\]"),
], ids=lambda value: value if isinstance(value, str) else "")  # fmt: skip
def test_wrong_arguments(wrong: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        check(**cast(Any, {"make_loader": ReferenceLoader, "laws": ["determinism"]} | wrong))


def double(value: int) -> int:
    return 2 * value


def fail(value: int) -> int:
    raise ValueError(f"not {value}")


def test_a_pool_runs_calls_in_order_and_names_failures() -> None:
    pool = shared_pool()
    results = pool.run([Call(number % 2, double, (number,)) for number in range(7)], timeout=60)
    assert results == [2 * number for number in range(7)]
    with pytest.raises(ProcessError, match=r"ValueError: not 5[\s\S]*in fail"):
        pool.run([Call(1, fail, (5,))], timeout=60)
    assert pool.run([Call(1, double, (4,))], timeout=60) == [8]


def test_a_pool_finds_modules_off_the_import_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As pytest imports test modules: under a name that no other process could import.
    file = tmp_path / "elsewhere.py"
    file.write_text("def answer(): return __name__\n")
    name = "folder_off_the_path.elsewhere"
    monkeypatch.setitem(sys.modules, "folder_off_the_path", types.ModuleType("folder_off_the_path"))
    specification = importlib.util.spec_from_file_location(name, file)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    monkeypatch.setitem(sys.modules, name, module)
    specification.loader.exec_module(module)
    assert shared_pool().run([Call(0, module.answer)], timeout=60) == [name]


def test_the_suite_has_one_test_for_each_law() -> None:
    tests = {name: function for name, function in vars(ResumableTests).items() if name.startswith("test_")}
    assert [name.removeprefix("test_").replace("_", " ") for name in tests] == list(LAWS)
    assert {function.__doc__ for function in tests.values()} == {law.sentence for law in LAWS.values()}
    assert all("\n" not in law.sentence and law.sentence for law in LAWS.values())


def test_the_suite_fails_and_skips_as_the_laws_do() -> None:
    class Broken(ResumableTests):
        make_loader = broken_loaders.IsFreshUntilStarted
        draws = reference_loader.draws  # without staticmethod(), as one forgets it
        reseal = midepoch.reseal

    class Short(ResumableTests):
        make_loader = lone_loader
        not_applicable = frozenset({"partition", "determinism"})

    class Forgotten(ResumableTests):
        pass

    with pytest.raises(LawError, match="round trip"):
        Broken().test_round_trip()
    Broken().test_boundary()
    with pytest.raises(pytest.skip.Exception, match="partition: the factory takes no rank"):
        Short().test_partition()
    with pytest.raises(AssertionError, match="remove it from not_applicable"):
        Short().test_determinism()
    with pytest.raises(TypeError, match="make_loader must be a function"):
        Forgotten().test_tail()


def test_the_knobs_of_the_suite_are_those_of_the_function() -> None:
    arguments = inspect.signature(check_resumable).parameters
    knobs = {field.name: field.default for field in dataclasses.fields(Settings)}
    assert knobs.keys() == set(arguments) - {"laws", "raise_on_failure"}
    assert all(default in (arguments[name].default, dataclasses.MISSING) for name, default in knobs.items())
    assert all(getattr(ResumableTests, name) == default for name, default in list(knobs.items())[1:])


def test_the_functions_need_no_pytest(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("midepoch.testing")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pytest", None)
    assert importlib.import_module("midepoch.testing").LAWS.keys() == LAWS.keys()


class Pair(NamedTuple):
    image: Any
    label: Any


@dataclasses.dataclass
class Sample:
    image: Any


DIFFERENT: list[Any] = [
    None, True, False, 1, 0, 1.0, 0.0, -0.0, float("nan"), "1", b"1", "", b"", (), [], {}, set(), {1}, (1,), [1],
    {1: 1}, {"1": 1}, [[1], 2], [1, [2]], torch.tensor(1), torch.tensor([1]), torch.tensor([1.0]), torch.tensor([True]),
    torch.tensor([1], dtype=torch.int32), torch.tensor([[1]]), torch.empty(0), torch.empty(0, 3), torch.empty(3, 0),
    torch.tensor([float("nan")]), torch.tensor([-0.0]), torch.tensor([0.0]), torch.tensor([1.0], dtype=torch.bfloat16),
    torch.tensor([1 + 2j]), np.array([1]), np.array([1.0]), np.float32(1), np.float64(1), np.int64(1),
    np.array(["a"]), np.array([None]), np.array([(1, 2)], dtype=[("x", "i4"), ("y", "i4")]), Pair(1, 2), (1, 2),
    Sample(1), Sample(2), Path("a"), torch.eye(2).to_sparse(), torch.eye(2),
    "a" * 5000 + "b", "a" * 5000 + "c",
]  # fmt: skip


def test_different_items_have_different_digests() -> None:
    digests = [digest(item) for item in DIFFERENT]
    twins = [(i, j) for i, one in enumerate(digests) for j, other in enumerate(digests) if i < j and one == other]
    assert not twins, [(DIFFERENT[i], DIFFERENT[j]) for i, j in twins]


def test_equal_items_have_equal_digests() -> None:
    for item in DIFFERENT:
        assert digest(pickle.loads(pickle.dumps(item))) == digest(item), item
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
    assert digest(torch.arange(6).reshape(2, 3).T) == digest(torch.arange(6).reshape(2, 3).T.contiguous())
    assert digest(torch.tensor([1 + 2j]).conj()) == digest(torch.tensor([1 - 2j]))


@pytest.mark.parametrize(("expected", "got", "texts"), [
    (torch.tensor([1, 2]), torch.tensor([1, 3]), ("int64 tensor 2, value 1: 2", "int64 tensor 2, value 1: 3")),
    ({"x": [1, 2]}, {"x": [1, 5]}, ("['x'][1]: int: 2", "['x'][1]: int: 5")),
    ([1, 2], [1, 2, 3], ("list of 2", "list of 3")),
    (torch.zeros(2), np.zeros(2), ("float32 tensor 2: 0.0, 0.0", "<f8 numpy 2: 0.0, 0.0")),
], ids=str)  # fmt: skip
def test_the_first_difference_is_readable(expected: Any, got: Any, texts: tuple[str, str]) -> None:
    assert first_difference(leaves(expected), leaves(got)) == texts


def test_batches_are_split_into_samples() -> None:
    x, y = torch.arange(6.0).reshape(3, 2), torch.arange(3)
    for batch in ((x, y), [x, y], {"x": x, "y": y}, x, [(x[0], 1), (x[1], 2), (x[2], 3)], ["a", "b", "c"]):
        parts = split(batch, 3)
        assert parts is not None
        assert len(set(parts)) == 3
        assert split(batch, 4) is None
    assert split((x, y), 3) == split((x.clone(), y.clone()), 3)
    assert split(None, 1) is None
    assert split([x[:1]], 1) == split(x[:1], 1), "a list of one column"
    pairs = [(7, 0.5), (8, 0.25), (9, 0.125)]
    assert split(pairs[:2], 2) == (split(pairs, 3) or [])[:2], "as many samples as each has parts"


def test_a_closed_pool_leaves_no_process() -> None:
    """At the end, since the next who needs a process has to wait for it."""
    pool = shared_pool()
    assert pool.run([Call(0, double, (1,))], timeout=60) == [2]
    processes = [server.process for server in pool._servers.values()]
    pool.close()
    assert not any(process.is_alive() for process in processes)
