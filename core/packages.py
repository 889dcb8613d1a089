"""Private parts of other packages: checked once, replaced only while needed.

An adapter that needs private parts of its backend touches them in one module, ``private``, which checks them when it is
imported.
"""

from __future__ import annotations

import importlib.metadata
import operator
import pkgutil
import re
import threading
from collections.abc import Generator
from typing import Any

from .errors import UnsupportedSourceError, warn

__all__ = ["Package", "Replacement"]


class Package:
    """A package whose private parts midepoch uses.

    Args:
        name: for messages.
        distributions: the names under which it is published; the first one installed counts.
        tested: the first and the last series of versions that the tests ran with, such as ("2.4", "2.6"). The last
            series is tested as a whole: 2.6 stands for 2.6.0 and 2.6.9.
        oldest: the first version that has what is needed, such as "1.0".

    Warns:
        MidepochWarning: the installed version was not tested.

    Raises:
        UnsupportedSourceError: it is older than `oldest`. An unknown one is not.
    """

    def __init__(self, name: str, distributions: tuple[str, ...], tested: tuple[str, str], oldest: str = "0") -> None:
        self.name, self._distributions, self.tested = name, distributions, tested
        self.distribution, self.version = _installed(distributions)
        first, last = map(_numbers, tested)
        here = _numbers(self.version)
        # An unknown version was not tested either.
        if not here or here[: len(first)] < first or here[: len(last)] > last:
            warn(
                f"midepoch uses private parts of {name}, tested with versions {' to '.join(dict.fromkeys(tested))} "
                f"only, but {self.version} is installed: {self.cure}, or run midepoch.testing.check_resumable on your "
                "source"
            )

        if here and here < _numbers(oldest):
            raise UnsupportedSourceError(
                f"{name} {self.version} is installed, and midepoch needs {oldest} or later: {self.cure}"
            )

    @property
    def cure(self) -> str:
        """The command that installs a version that was tested."""
        return f"pip install '{self.distribution}=={self.tested[1]}.*'"

    def part(self, path: str) -> Any:
        """A part of the package: ``"module:name.name"``.

        Raises:
            UnsupportedSourceError: the package has no such part.
        """
        try:
            return pkgutil.resolve_name(path)
        except (ImportError, AttributeError) as error:
            raise self.lacks(path) from error

    def check(self, holder: object, *paths: str) -> None:
        """Check that an object has attributes, each written as ``"name.name"``.

        Raises:
            UnsupportedSourceError: an attribute is missing.
        """
        for path in paths:
            try:
                operator.attrgetter(path)(holder)
            except AttributeError as error:
                raise self.lacks(f"{type(holder).__name__}.{path}") from error

    def lacks(self, part: str) -> UnsupportedSourceError:
        """The error for a missing part."""
        return UnsupportedSourceError(
            f"{self.name} {self.version} has no {part}, a private part that midepoch uses: {self.cure}"
        )


class Replacement:
    """A value that replaces a name in a foreign module while somebody needs it.

    Several users may need it at once: the first puts it in place, the last restores the original. If someone else has
    replaced the name meanwhile, theirs stays.
    """

    def __init__(self, module: Any, name: str, value: Any) -> None:
        self._module, self._name, self._value = module, name, value
        self._theirs: Any = None
        self._users = 0
        self._lock = threading.RLock()  # the garbage collector may end one need while another is being counted

    def needed(self) -> Generator[None]:
        """Put it in place until what is returned is closed or dropped. It may be closed twice."""
        need = self._while_needed()
        next(need)
        return need

    def _while_needed(self) -> Generator[None]:
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._theirs = getattr(self._module, self._name)
                setattr(self._module, self._name, self._value)
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users and getattr(self._module, self._name) is self._value:
                    setattr(self._module, self._name, self._theirs)


def _installed(distributions: tuple[str, ...]) -> tuple[str, str]:
    for name in distributions:
        try:
            return name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return distributions[0], "of an unknown version"


def _numbers(version: str) -> tuple[int, ...]:
    found = re.match(r"\d+(\.\d+)*", version)
    return () if found is None else tuple(map(int, found[0].split(".")))
