"""Where things are, and scripts that are imported from there."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

TESTS = Path(__file__).parents[1]
"""The folder that is on the import path: `support` is found there."""

ROOT = TESTS.parent


def module_of(path: Path) -> ModuleType:
    """A script of the repository as a module, anew."""
    found = importlib.util.spec_from_file_location(f"midepoch_{path.stem}", path)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[found.name] = module  # dataclasses look their module up
    found.loader.exec_module(module)
    return module
