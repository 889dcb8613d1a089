"""Other people's packages: touched in modules named ``private``, checked there, and left as they were found."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.metadata
import importlib.util
import json
import random
import subprocess
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import cpu_torchvision  # noqa: F401
import pytest

import midepoch
from midepoch.packages import Package, Replacement
from support import forking
from support.places import ROOT

# Package, module of midepoch's that touches it, a part that this module looks for when it is imported.
CHECKED = [
    ("nvidia.dali", "midepoch.adapters.dali.private", "nvidia.dali:Pipeline._generate_build_args"),
    ("ffcv", "midepoch.adapters.ffcv.private", "ffcv.libffcv:imdecode"),
    ("streaming", "midepoch.adapters.streaming.private", "streaming:StreamingDataset._each_sample_id"),
    ("webdataset", "midepoch.adapters.webdataset.private", "webdataset.filters:_map_tuple"),
    ("transformers", "midepoch.trainers.transformers_private", "transformers.trainer:skip_first_batches"),
    ("torch", "midepoch.reading.private", "torch.utils.data:DataLoader._get_iterator"),
]


def fresh(name: str) -> types.ModuleType:
    """A module as its first import makes it, which nobody else sees."""
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def told_by_importing(module: str) -> list[str]:
    with warnings.catch_warnings(record=True, action="always") as told:
        fresh(module)
    return [str(each.message) for each in told if issubclass(each.category, midepoch.MidepochWarning)]


@pytest.mark.parametrize(("package", "module", "part"), CHECKED, ids=[each[0] for each in CHECKED])
def test_missing_parts_and_untested_versions_are_named(package: str, module: str, part: str, monkeypatch: Any) -> None:
    pytest.importorskip(package, reason=f"{package} is not installed")
    importlib.import_module(module)
    assert not told_by_importing(module)
    with monkeypatch.context() as patch:
        patch.setattr(importlib.metadata, "version", lambda name: "99.1.2")
        found = told_by_importing(module)
    # torch's range is midepoch's own requirement, which pip sees to.
    assert len(found) == (package != "torch")
    assert all(" 99.1.2 is installed" in each and "pip install '" in each and "tested with" in each for each in found)
    where, _, path = part.partition(":")
    *holders, name = path.split(".")
    monkeypatch.delattr(functools.reduce(getattr, holders, importlib.import_module(where)), name)
    with pytest.raises(midepoch.UnsupportedSourceError, match=rf"[\d.]+(\+\w+)? has no .*{name}.*install"):
        fresh(module)


def test_versions_and_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    def warns(version: str, tested: tuple[str, str]) -> bool:
        monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
        with warnings.catch_warnings(record=True, action="always") as told:
            Package("Some", ("some",), tested)
        return bool(told)

    ranges = ("2.4", "2.6")
    inside = ["2.4", "2.4.0", "2.5.7.post1", "2.6.6", "2.6.0rc1", "2.6.6+cu120"]
    assert [version for version in inside if warns(version, ranges)] == []
    outside = ["2.3.9", "2.7", "3.0", "1.9", "2", "2.10.1", "unknown"]
    assert [version for version in outside if not warns(version, ranges)] == []


def test_a_version_that_is_too_old_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("webdataset", reason="webdataset is not installed")
    importlib.import_module("midepoch.adapters.webdataset")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.2.86")
    with warnings.catch_warnings(action="ignore", category=midepoch.MidepochWarning):
        told = r"webdataset 0.2.86 is installed, and midepoch needs 1.0 or later: pip install 'webdataset==1.0"
        with pytest.raises(midepoch.UnsupportedSourceError, match=told):
            fresh("midepoch.adapters.webdataset.private")
        monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.1")
        fresh("midepoch.adapters.webdataset.private")


def test_a_replacement_is_there_while_anybody_needs_it() -> None:
    module = types.SimpleNamespace(name="theirs")
    replacement = Replacement(module, "name", "ours")
    assert module.name == "theirs"
    first, second = replacement.needed(), replacement.needed()
    assert module.name == "ours"
    first.close()
    first.close()
    assert module.name == "ours"
    del second  # a user that was dropped needs nothing
    assert module.name == "theirs"
    third = replacement.needed()
    module.name = "somebody else's"
    third.close()
    assert module.name == "somebody else's"


# --- importing an adapter, opening and closing ------------------------------------------------------------------------

IMPORTED = [
    ("torch.utils.data", "torch.utils.data", "midepoch.adapters.dataloader"),
    ("torch.utils.data", "torch.utils.data", "midepoch.adapters.stateful"),
    ("nvidia.dali", "nvidia.dali.plugin.pytorch", "midepoch.adapters.dali.native"),
    ("ffcv", "ffcv.loader", "midepoch.adapters.ffcv"),
    ("streaming", "streaming", "midepoch.adapters.streaming"),
    ("webdataset", "webdataset", "midepoch.adapters.webdataset"),
    ("transformers.trainer", "transformers.trainer", "midepoch.trainers.transformers"),
    ("lightning", "lightning.pytorch", "midepoch.trainers.lightning"),
]
"""A package, what of it is there before, and the adapter that is imported then."""

LOOKED_AT = """
import importlib, json, os, sys
sys.path.insert(0, {tests!r})
import cpu_torchvision

def seen(package):
    # What every module of a package has, and every class that is defined in it.
    found = {{}}
    for name, module in list(sys.modules.items()):
        if module is None or not f"{{name}}.".startswith(f"{{package}}."):
            continue
        for attribute, value in list(vars(module).items()):
            found[f"{{name}}.{{attribute}}"] = id(value)
            if isinstance(value, type) and value.__module__ == name:
                found.update({{f"{{name}}.{{attribute}}.{{each}}": id(held) for each, held in vars(value).items()}})
    return found

told, registered = {{}}, []
os.register_at_fork = lambda **functions: registered.extend(
    name for name, function in functions.items() if str(function.__module__).startswith("midepoch")
)
for package, module, adapter in {imported!r}:
    try:
        importlib.import_module(module)
    except ImportError:
        continue
    before = seen(package)
    importlib.import_module(adapter)
    after = seen(package)
    told[adapter] = [name for name in before if before[name] != after.get(name)] + registered
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def changed() -> dict[str, list[str]]:
    """For each adapter whose backend is installed, what importing it changes there.

    Those of torch are imported where midepoch was not yet, the others where their backends have been.
    """
    parts = ([each for each in IMPORTED if each[0].startswith("torch") is torch] for torch in (True, False))
    code = [LOOKED_AT.format(tests=str(ROOT / "tests"), imported=part) for part in parts]
    alone = subprocess.run([sys.executable, "-c", code[0]], capture_output=True, text=True, timeout=500, check=True)
    done = forking.run(["-c", code[1]], modules=forking.IMPORTED, timeout=500, check=True)
    found: list[dict[str, list[str]]] = [json.loads(each.stdout.splitlines()[-1]) for each in (alone, done)]
    return found[0] | found[1]


@pytest.mark.parametrize("adapter", [each[2] for each in IMPORTED])
def test_importing_an_adapter_changes_nothing_in_its_backend(adapter: str, changed: dict[str, list[str]]) -> None:
    if adapter not in changed:
        pytest.skip(f"what {adapter} is for is not installed")
    assert changed[adapter] == []


def test_streaming_is_as_it_was_when_its_passes_are_over(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("streaming", reason="mosaicml-streaming is not installed")
    import streaming.base.util

    from midepoch.adapters.streaming import private
    from support import streaming_sources as sources

    # Loaders that other tests have left open keep the adapter's own in place.
    monkeypatch.setattr(streaming.base.util, "random", random)
    monkeypatch.setattr(private, "RETRIES", Replacement(streaming.base.util, "random", random.Random()))
    first, second = (midepoch.wrap(sources.bare(24)) for _ in range(2))
    assert streaming.base.util.random is random
    one, other = iter(first), iter(second)
    next(one)
    assert isinstance(streaming.base.util.random, random.Random)
    next(other)
    first.close()
    assert isinstance(streaming.base.util.random, random.Random)  # the other one still reads
    second.close()
    assert streaming.base.util.random is random
    list(first)
    assert streaming.base.util.random is random
    next(iter(first))
    del first, one
    assert streaming.base.util.random is random
    second.close()


# --- where private parts are touched ----------------------------------------------------------------------------------


def foreign(path: Path, ours: frozenset[str] = frozenset()) -> list[str]:
    """Attributes with a private name, none of `ours`, that a module takes of objects whose class it does not define."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    own = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    own |= {node.target.id for node in nodes if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
            own.add(node.attr)
    own |= ours
    public = {"_replace", "_exit", "_asdict", "_fields", "_getframe"}  # documented, for all their names
    found = []
    for node in nodes:
        name: object = node.attr if isinstance(node, ast.Attribute) else None
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id.endswith("attr"):
            name = node.args[1].value if isinstance(node.args[1], ast.Constant) else None
        if isinstance(name, str) and name.startswith("_") and not name.startswith("__") and name not in own | public:
            found.append(f"{path.name}:{getattr(node, 'lineno', 0)} {ast.unparse(node)}")
    return found


def test_private_parts_are_touched_in_modules_of_that_name_alone() -> None:
    paths = [*(ROOT / "adapters").rglob("*.py"), *(ROOT / "core" / "reading").rglob("*.py")]
    assert [each for path in paths if not path.stem.endswith("private") for each in foreign(path)] == []
    of_loaders = frozenset({"_progress", "_check_state", "_leave_body"})
    paths = [path for path in (ROOT / "core" / "checkpoint").glob("*.py") if path.stem != "private"]
    assert [each for path in paths for each in foreign(path, of_loaders)] == []
    assert foreign(ROOT / "core" / "reading" / "private.py")  # the search finds what there is
