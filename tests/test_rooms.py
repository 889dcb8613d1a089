"""The house: which modules may import which, and who may know whom by name."""

from __future__ import annotations

import ast
import copy
import functools
import graphlib
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

from support.places import ROOT

# From the ground up: a room imports rooms that stand before it, and none of its own line.
FLOORS = (
    ("errors", "backends", "summary"), ("world", "packages", "attributes"), ("sharding", "order"), ("state",),
    ("randomness",), ("trying",), ("loader",), ("samplers",), ("reading",), ("resumable_sampler",),
    ("combine", "checkpoint"), ("wrapping",), ("stateful_iterable",), ("testing",), ("tools",),
)  # fmt: skip
# No rooms: midepoch/__init__.py imports all of them, `python -m midepoch` runs __main__, adapters stand on top.
OUTSIDE = ("", "__main__", "adapters")

# Backends and trainers: no code in core may name them.
STRANGERS = {
    "nvidia", "dali", "ffcv", "webdataset", "streaming", "torchdata", "datasets", "grain", "litdata", "energon",
    "lightning", "accelerate", "transformers", "ignite", "composer", "ray", "torchtitan", "torchft",
}  # fmt: skip
# Its tables name every backend, so that none has to be imported.
MAY_NAME = ("midepoch.backends",)


def modules() -> dict[str, Path]:
    """Each module's name, and its file."""
    found = {}
    for folder, package in (("core", "midepoch"), ("adapters", "midepoch.adapters")):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join((package, *parts)).removesuffix(".__init__")] = path
    return found


MODULES = modules()


@functools.cache
def trees() -> dict[str, ast.Module]:
    return {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in MODULES.items()}


@functools.cache
def imports(name: str) -> set[str]:
    """The modules of midepoch that one imports, inside functions too, but for those that only type checkers import."""
    found = set()
    for node in walk(trees()[name]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = name if MODULES[name].name == "__init__.py" else name.rpartition(".")[0]
                above = package.rsplit(".", node.level - 1)[0]
                base = f"{above}.{base}" if base else above
            # `from . import format` imports a module, `from .format import check` a name in one.
            found |= {one if (one := f"{base}.{alias.name}") in MODULES else base for alias in node.names}
    return {each for each in found if each in MODULES} - {name}


def walk(tree: ast.AST) -> Iterator[ast.AST]:
    """Like `ast.walk`, without what stands under ``if TYPE_CHECKING:``."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            waiting += node.orelse
        else:
            waiting += ast.iter_child_nodes(node)


def edges() -> list[tuple[str, str]]:
    return [(name, each) for name in sorted(MODULES) for each in sorted(imports(name))]


def room_of(module: str) -> str:
    """The room of a module of core: a folder, or a file beside the folders."""
    return module.removeprefix("midepoch").removeprefix(".").partition(".")[0]


def rooms() -> dict[str, set[str]]:
    """Each room of core, and the rooms that it imports."""
    graph: dict[str, set[str]] = {}
    for name in MODULES:
        room = room_of(name)
        if room not in OUTSIDE:
            graph.setdefault(room, set()).update(map(room_of, imports(name)))
    return {room: imported - {room, *OUTSIDE} for room, imported in sorted(graph.items())}


def test_no_circle_among_modules() -> None:
    graphlib.TopologicalSorter({name: imports(name) for name in MODULES}).prepare()  # its error names the modules


def test_rooms_import_downwards_only() -> None:
    floor = {room: number for number, names in enumerate(FLOORS) for room in names}
    graph = rooms()
    assert graph.keys() == floor.keys(), "each room has its floor"
    assert [f"{room} imports {each}" for room in graph for each in graph[room] if floor[each] >= floor[room]] == []


def test_core_imports_neither_adapters_nor_the_front_door() -> None:
    """But for `__main__`, which imports nothing either."""
    core = [(name, each) for name, each in edges() if not name.startswith("midepoch.adapters")]
    assert [edge for edge in core if edge[1] == "midepoch" or edge[1].startswith("midepoch.adapters")] == []


def test_core_imports_only_what_the_package_requires() -> None:
    """What the commands and the laws need besides is asked for by name when they are used."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    required = {re.split(r"[^\w-]", each)[0] for each in project["dependencies"]}
    assert required == {"torch", "numpy"}
    found = [
        f"{name} imports {each}"
        for name, tree in trees().items()
        if not name.startswith(("midepoch.adapters", "midepoch.testing", "midepoch.tools"))
        for node in walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom) and not getattr(node, "level", 0)
        for each in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [one.name for one in node.names])
        if each.partition(".")[0] not in {*sys.stdlib_module_names, *required, "midepoch"}
    ]
    assert found == []


def adapter_of(module: str) -> str:
    """The adapter that a module belongs to: a package or a module directly in midepoch.adapters; '' for neither.

    Each trainer is a backend of its own. Its modules begin with its name: ``lightning``, ``lightning_private``.
    """
    first, _, rest = module.removeprefix("midepoch.adapters.").partition(".")
    if not module.startswith("midepoch.adapters."):
        return ""
    return f"trainers.{rest.partition('.')[0].partition('_')[0]}" if first == "trainers" and rest else first


def test_no_adapter_imports_another() -> None:
    of = [(adapter_of(name), adapter_of(each), name, each) for name, each in edges()]
    assert [edge for edge in of if edge[0] and edge[1] and edge[0] != edge[1]] == []


def strangers_in(tree: ast.Module) -> set[str]:
    """The backends and trainers that code names, in whatever but docstrings and comments."""
    tree = copy.deepcopy(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body[: ast.get_docstring(node) is not None] = [ast.Pass()]
    code = ast.unparse(tree).replace(".datasets", "")  # torch's own word, of its StackDataset
    words = re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", " ", code).lower()
    return STRANGERS & {*re.split(r"[^a-z0-9]+", words)}


def test_core_knows_no_backend_and_no_trainer_by_name() -> None:
    core = {name: tree for name, tree in trees().items() if not name.startswith(("midepoch.adapters", *MAY_NAME))}
    assert {name: found for name, tree in core.items() if (found := strangers_in(tree))} == {}


def test_core_knows_no_adapter_by_the_name_in_its_states() -> None:
    names = {
        node.value.value
        for module, tree in trees().items()
        if module.startswith("midepoch.adapters.")
        for node in ast.walk(tree)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == "name"
        and isinstance(node.value, ast.Constant)
    }  # fmt: skip
    assert {"dataloader", "sequence", "iterable"} <= names
    known = [
        f"{MODULES[module].relative_to(ROOT)}:{node.lineno}: {node.value!r}"
        for module, tree in trees().items()
        if not module.startswith(("midepoch.adapters", *MAY_NAME))
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and node.value in names
    ]
    assert known == []


# --- the picture in docs/design.md, which docs/pictures.py draws from rooms.mmd ---


def reduced(graph: dict[str, set[str]]) -> set[tuple[str, str]]:
    """The edges of a graph without circles that no longer way replaces."""

    def below(room: str) -> set[str]:
        return graph[room].union(*map(below, graph[room]))

    return {
        (room, each)
        for room, imported in graph.items()
        for each in imported
        if not any(each in below(other) for other in imported - {each})
    }


def test_the_picture_of_the_rooms_is_what_the_imports_are() -> None:
    drawn = (ROOT / "docs" / "pictures" / "rooms.mmd").read_text(encoding="utf-8")
    expected = "".join(["graph TD\n", *(f"  {a} --> {b}\n" for a, b in sorted(reduced(rooms())))])
    assert drawn == expected, f"docs/pictures/rooms.mmd should be this, and then docs/pictures.py run:\n{expected}"


def overridable(base: str) -> set[str]:
    """The public names of a class that those derived from it may override or set: what is `final` is not among them.

    Methods, properties and class attributes; and attributes that its `__init__` sets and another class assigns.
    """
    kinds = [node for tree in trees().values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    (kind,) = (each for each in kinds if each.name == base and each in trees()["midepoch.loader.adapter"].body)
    names: set[str] = set()
    for node in kind.body:
        if isinstance(node, ast.FunctionDef) and "final" not in map(ast.unparse, node.decorator_list):
            names.add(node.name)
        elif isinstance(node, ast.AnnAssign | ast.Assign):
            names |= set(map(ast.unparse, [node.target] if isinstance(node, ast.AnnAssign) else node.targets))
    others = set().union(*(assigned(each) for each in kinds if each is not kind))
    return {name for name in names | (assigned(kind) & others) if not name.startswith("_")}


def assigned(kind: ast.ClassDef) -> set[str]:
    """The attributes that a class sets on its objects, if it is derived from an adapter or a session."""
    if kind.name != "Adapter" and not any(re.search("Adapter|Session", ast.unparse(each)) for each in kind.bases):
        return set()
    return {
        node.attr
        for node in ast.walk(kind)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
    }


def test_an_adapter_and_its_sessions_have_few_names() -> None:
    adapter, session = overridable("Adapter"), overridable("Session")
    assert session == {
        "bookmark", "close", "detail", "next_epoch_detail", "position_correction", "take", "varies",
    }  # fmt: skip
    assert adapter == {
        "capabilities", "check_detail", "choose", "close", "describe", "detail_at", "drawing", "facts", "name", "open",
        "parts", "prepare", "rank_part", "reach", "recognises", "samples", "share", "size",
    }  # fmt: skip
    assert len(adapter) + len(session) <= 25
