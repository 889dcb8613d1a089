"""From what is named on the command line to a function that builds a loader."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from torch.utils.data import DataLoader

from ..loader.loader import Loader
from ..testing.subjects import Imported

__all__ = ["TargetError", "find_target"]


class TargetError(Exception):
    """What to check cannot be loaded. The message says why, and what to name instead."""


def find_target(target: str, *, loader: bool = True) -> Callable[..., Any]:
    """The function of ``package.module:name`` or ``folder/file.py:name``.

    If it is to build a ``loader``, the name may also be that of a loader or of a generator function, and ``file.py``
    alone names the only one in the script. Names are seen from the current folder.

    Raises:
        TargetError: it does not exist, it is neither, or its module fails.
    """
    module_name, colon, name = target.rpartition(":")
    if loader and not colon and target.endswith(".py"):
        module_name = target
    elif not (module_name and name):
        raise TargetError(f"{target!r} names no loader or function: write package.module:make_loader or file.py:name")
    module, folder = _import(module_name, target)
    name = name if colon else _only_one(module, target)
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    is_object = hasattr(type(found), "__iter__") and not isinstance(found, type | str | bytes)
    if loader and (inspect.isgeneratorfunction(found) or is_object):
        return Imported(module.__name__, folder, name)
    if not callable(found):
        if not loader:
            raise TargetError(f"{module_name} has no function {name!r}: name one")
        names = _named(_candidates(module), module_name)
        raise TargetError(f"{module_name} has no function and no loader {name!r}: name one{names}")
    function: Callable[..., Any] = found
    return function


def _import(module_name: str, target: str) -> tuple[ModuleType, str]:
    """The module, and the folder in which Python finds it."""
    file, folder = None, Path.cwd()
    if module_name.endswith(".py"):
        file = Path(module_name).resolve()
        if not file.is_file():
            raise TargetError(f"there is no file {module_name}: name one, or package.module:make_loader")
        folder, module_name = file.parent, file.stem
    # The spawned processes also import it by this name and path, so the folder must come first there.
    sys.path[:] = [str(folder), *(path for path in sys.path if path != str(folder))]
    try:
        found = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        cure = "run this in the module's folder, or install the module"
        raise TargetError(f"{target!r} cannot be imported ({error}): {cure}") from error
    except (Exception, SystemExit) as error:
        cure = 'fix it, and put what a script does under `if __name__ == "__main__":`'
        told = f"{module_name} fails when it is imported: {type(error).__name__}: {error}"
        raise TargetError(f"{told}; {cure}") from error
    imported = getattr(found, "__file__", None)
    if file is not None and (imported is None or Path(imported).resolve() != file):
        raise TargetError(
            f"there is another module {module_name!r} ({imported or 'of Python itself'}), which Python imports instead "
            f"of {file}: give the file another name"
        )
    return found, str(folder)


def _candidates(module: ModuleType) -> list[str]:
    """The names of a module's loaders, and of its functions that may build one."""
    return [
        name
        for name, value in vars(module).items()
        if isinstance(value, DataLoader | Loader)
        or (inspect.isfunction(value) and value.__module__ == module.__name__ and "loader" in name.lower())
    ]


def _only_one(module: ModuleType, target: str) -> str:
    names = _candidates(module)
    if "make_loader" in names:
        return "make_loader"
    if len(names) == 1:
        return names[0]
    if names:
        raise TargetError(f"{target} has several loaders: name one{_named(names, target)}")
    raise TargetError(
        f"{target} makes no loader when it is imported: write a function make_loader() in it that returns one, and put "
        'the training under `if __name__ == "__main__":`'
    )


def _named(names: list[str], target: str) -> str:
    return f", {' or '.join(f'{target}:{name}' for name in names[:4])}" if names else " that builds a loader"
