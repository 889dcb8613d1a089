"""The laws as tests: subclass `ResumableTests` and set how a loader is built."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from .examine import Examination
from .laws import LAWS, judge
from .record import Settings
from .report import Law

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

    not_applicable: ClassVar[frozenset[str]] = frozenset()

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...  # the settings and the tests, which are set below

    def _examine(self, law: str) -> None:
        verdict = next(judge(self._examination(), [law]))
        if verdict.error is not None:
            raise verdict.error
        if verdict.status == "not applicable":
            import pytest

            pytest.skip(f"{law}: {verdict.reason}")
        if law in self.not_applicable:
            raise AssertionError(f"the law '{law}' is applicable and {verdict.status}; remove it from not_applicable")

    def _examination(self) -> Examination:
        """The only examination of this class, so that its laws share their runs."""
        kind = type(self)
        found = vars(kind).get("_kept")
        if not isinstance(found, Examination):
            settings = Settings(**{each.name: self._value(each.name) for each in dataclasses.fields(Settings)})
            found = Examination(settings)
            kind._kept = found  # type: ignore[attr-defined]
        return found

    def _value(self, name: str) -> Any:
        """This attribute. A function may be a method, a staticmethod or a plain module-level function."""
        value = getattr(self, name, None)
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


for _field in dataclasses.fields(Settings)[1:]:
    setattr(ResumableTests, _field.name, _field.default)
for _law in LAWS.values():
    _test = _test_of(_law)
    setattr(ResumableTests, _test.__name__, _test)
