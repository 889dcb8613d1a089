"""The laws as tests: subclass `ResumableTests` and set how a loader is built."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from .examine import Examination
from .law import Law
from .laws import LAWS, examine_law
from .record import Settings

__all__ = ["ResumableTests"]


class ResumableTests:
    """One test for each law. pytest collects subclasses whose names begin with ``Test``.

        class TestMyLoader(ResumableTests):
            make_loader = staticmethod(build_loader)      # a module-level function
            shuffled = True

    ``make_loader`` and the other attributes are the arguments of `check_resumable`, which documents them. A law that
    is not applicable is a skipped test with the reason. ``not_applicable`` may list laws that are known not to apply.
    If one of them becomes applicable, its test fails, so that you remove it from the list.
    """

    # Functions are typed Any: type checkers would take them for methods.
    make_loader: ClassVar[Any]
    world_sizes: ClassVar[Sequence[int]] = (1, 2, 3)
    num_workers: ClassVar[Sequence[int]] = (0, 2)
    epochs: ClassVar[int] = 2
    cuts: ClassVar[Sequence[int] | None] = None
    quick: ClassVar[bool] = False
    shuffled: ClassVar[bool | None] = None
    tail: ClassVar[Literal["pad", "drop", "uneven"]] = "pad"
    drop_last: ClassVar[bool] = False
    elastic_content: ClassVar[bool] = True
    parts: ClassVar[int] = 1
    identify: ClassVar[Any] = None
    draws: ClassVar[Any] = None
    gather: ClassVar[Any] = None
    reseal: ClassVar[Any] = None
    state_bytes: ClassVar[int] = 16384
    timeout: ClassVar[float] = 120.0
    options: ClassVar[Sequence[str] | None] = None
    plain: ClassVar[Any] = None
    not_applicable: ClassVar[frozenset[str]] = frozenset()

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Callable[[], None]: ...  # the tests, which are set below

    def _examine(self, law: str) -> None:
        outcome = examine_law(self._examination(), law)
        expected = law in self.not_applicable
        if outcome.status == "not applicable":
            import pytest

            pytest.skip(f"{law}: {outcome.reason}")
        if expected:
            raise AssertionError(f"the law '{law}' is applicable and {outcome.status}; remove it from not_applicable")

    def _examination(self) -> Examination:
        """The only examination of this class, so that its laws share their runs."""
        kind = type(self)
        found = vars(kind).get("_kept")
        if not isinstance(found, Examination):
            found = Examination(self._settings())
            kind._kept = found  # type: ignore[attr-defined]
        return found

    def _settings(self) -> Settings:
        given = [each.name for each in dataclasses.fields(Settings) if hasattr(type(self), each.name)]
        return Settings(**{"make_loader": self._value("make_loader")} | {name: self._value(name) for name in given})

    def _value(self, name: str) -> Any:
        """This attribute. A function may be a method, a staticmethod or a plain module-level function."""
        value = getattr(self, name, None)
        if name == "make_loader" and value is None:
            raise TypeError(f"{type(self).__name__} must set make_loader to a function that builds a fresh loader")
        if isinstance(value, types.MethodType) and "." not in value.__func__.__qualname__:
            # A module-level function that was assigned without staticmethod() does not expect self.
            return value.__func__
        return value


def _test_of(law: Law) -> Callable[[ResumableTests], None]:
    def test(self: ResumableTests) -> None:
        self._examine(law.name)

    test.__name__ = f"test_{law.name.replace(' ', '_')}"
    test.__qualname__, test.__doc__ = f"ResumableTests.{test.__name__}", law.sentence
    return test


for _law in LAWS.values():
    _test = _test_of(_law)
    setattr(ResumableTests, _test.__name__, _test)
