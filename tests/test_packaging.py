"""What is shipped, what an import loads, and the set-up that both commands start with."""

from __future__ import annotations

import importlib.metadata
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import midepoch
from support import forking
from support.places import ROOT, module_of

PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
FOLDERS = {"core": "midepoch", "adapters": "midepoch.adapters", "adapters/trainers": "midepoch.trainers"}

# Whatever takes long to load or needs an extra stays out until a source of that kind is wrapped.
NOT_LOADED = (
    "accelerate", "albumentations", "ffcv", "lightning", "matplotlib", "nvidia.dali", "pytest", "pytorch_lightning",
    "rich", "sklearn", "streaming", "torchdata", "transformers", "typer", "webdataset", "midepoch.trainers",
)  # fmt: skip


def shipped_files(suffix: str) -> set[str]:
    """Paths inside the import package, `midepoch/...`, of the files of the source folders; the innermost one counts."""
    return {*{
        path: f"{package.replace('.', '/')}/{path.relative_to(ROOT / folder)}"
        for folder, package in FOLDERS.items()
        for path in (ROOT / folder).rglob(f"*{suffix}")
    }.values()}


# Takes away what Python on Windows lacks, once all that midepoch imports has been imported, and midepoch itself.
AS_ON_WINDOWS = """
import multiprocessing.context, os, signal, sys, torch
import midepoch.testing
for name in [each for each in sys.modules if each.partition(".")[0] == "midepoch"]:
    del sys.modules[name]
for name in ("fcntl", "resource", "pwd", "grp", "termios"):
    sys.modules[name] = None
for name in ("ForkContext", "ForkProcess", "ForkServerContext", "ForkServerProcess"):
    delattr(multiprocessing.context, name)
del signal.SIGUSR1, signal.SIGCHLD, signal.SIGKILL, signal.pthread_sigmask, os.geteuid, os.register_at_fork
sys.platform = "win32"
"""


def test_import_needs_nothing_that_windows_lacks(tmp_path: Path) -> None:
    code = """
import midepoch, midepoch.testing
loader = midepoch.wrap(torch.utils.data.DataLoader(range(6), batch_size=2), seed=0)
print([batch.tolist() for batch in loader])
midepoch.Snapshot("snapshot.pt", data=loader).save()
"""
    run = [sys.executable, "-c", AS_ON_WINDOWS + code]
    assert subprocess.check_output(run, text=True, cwd=tmp_path).splitlines()[0] == "[[0, 1], [2, 3], [4, 5]]"
    assert [each.name for each in tmp_path.iterdir()] == ["snapshot.pt"]


def test_the_version_stands_in_one_place() -> None:
    assert importlib.metadata.version("midepoch") == midepoch.__version__
    assert forking.run(["-m", "midepoch", "--version"], check=True).stdout == f"midepoch {midepoch.__version__}\n"


def test_tested_versions_are_pinned_for_every_requirement() -> None:
    lines = re.findall(r"^([^#\s]+)==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    pins = {canonicalize_name(name): version for name, version in lines}
    project = PYPROJECT["project"]
    texts = [*project["dependencies"], *itertools.chain(*project["optional-dependencies"].values())]
    needed = [each for each in map(Requirement, texts) if each.name != "midepoch"]
    assert {canonicalize_name(each.name) for each in needed} <= pins.keys()
    assert [str(each) for each in needed if pins[canonicalize_name(each.name)] not in each.specifier] == []


def tracked() -> list[str]:
    """The repository's files, from its root."""
    if not (ROOT / ".git").exists():
        pytest.skip("this is no clone, so nobody knows what belongs to it")
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.check_output(listed, cwd=ROOT, text=True).splitlines()
    return [name for name in names if (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # A copy: a build in the tree itself would leave files in it that the next build takes along.
    tree = tmp_path_factory.mktemp("tree")
    for name in tracked():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tree / name)
    build = [sys.executable, "-m", "build", "--no-isolation", str(tree)]
    built = subprocess.run(build, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert built.returncode == 0, built.stdout
    return tree / "dist"


def only(folder: Path, pattern: str) -> Path:
    (path,) = folder.glob(pattern)
    return path


def test_wheel_and_sdist_hold_what_an_index_would_take(distributions: Path) -> None:
    """The wheel was built from the sdist; what is left to see is what people read and run."""
    with zipfile.ZipFile(only(distributions, "*.whl")) as wheel:
        names = set(wheel.namelist())
    records = {name for name in names if ".dist-info/" in name}
    assert names - records == shipped_files(".py") | {"midepoch/py.typed"}
    assert any(name.endswith("licenses/LICENSE") for name in records)
    with tarfile.open(only(distributions, "*.tar.gz")) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert {name for name in tracked() if not name.startswith(".")} <= names
    files = [str(only(distributions, pattern)) for pattern in ("*.whl", "*.tar.gz")]
    done = subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *files], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.count("PASSED") == 2, done.stdout + done.stderr


def test_an_import_of_the_wheel_loads_no_backend_and_no_adapter(distributions: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(only(distributions, "*.whl")) as wheel:
        wheel.extractall(tmp_path)
    code = "import sys, midepoch\nprint(*sys.modules)\nimport midepoch.adapters\n"
    code += "print(midepoch.__file__, midepoch.adapters.__file__)\n"
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    printed = subprocess.check_output([sys.executable, "-c", code], text=True, env=environment, cwd=tmp_path)
    loaded, places = map(str.split, printed.splitlines())
    package = tmp_path / "midepoch"
    assert places == [str(package / "__init__.py"), str(package / "adapters" / "__init__.py")]
    assert "midepoch" in loaded
    assert [each for each in loaded if f"{each}.".startswith(tuple(f"{name}." for name in NOT_LOADED))] == []
    assert [each for each in loaded if each.startswith("midepoch.adapters.")] == []


@pytest.fixture
def setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """scripts/setup.py as a module, working on an empty folder."""
    module = module_of(ROOT / "scripts" / "setup.py")
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    for name in FOLDERS:
        (tmp_path / name).mkdir()
    for name, path in {"ROOT": "", "VENV": ".venv", "PYTHON": ".venv/bin/python", "STAMP": ".venv/setup.json",
                       "LOG": ".venv/setup.log", "CONSTRAINTS": "constraints.txt"}.items():  # fmt: skip
        monkeypatch.setattr(module, name, tmp_path / path)
    return module


@pytest.fixture
def commands(setup: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the set-up would have run, which is recorded instead, on a machine that has everything."""
    ran: list[str] = []
    links = setup.ROOT / "build" / "links"

    def run(command: list[str | Path]) -> None:
        ran.append(" ".join(str(word) for word in command))
        if "-e" in command:
            site_packages = setup.VENV / "lib" / "python3" / "site-packages"
            for folder in (site_packages, links):
                folder.mkdir(parents=True, exist_ok=True)
            (site_packages / "__editable__.midepoch-0.1.0.pth").write_text(f"{links}\n")

    monkeypatch.setattr(setup, "run", run)
    for table in (setup.FOR_VENV, setup.FOR_FFCV, setup.FOR_TESTS):
        for name in table:
            monkeypatch.setitem(table, name, lambda: True)
    return ran


def test_set_up_installs_torch_first_then_every_extra(setup: ModuleType, commands: list[str]) -> None:
    setup.set_up()
    installs = [command for command in commands if "pip install" in command]
    assert all(f"-c {setup.CONSTRAINTS}" in command for command in installs)
    assert " torch" in installs[0]
    extras = PYPROJECT["project"]["optional-dependencies"]
    assert set(extras["ffcv"]) <= set(installs[-1].split())
    first, *_ = re.findall(r"\.\[(.*?)\]", " ".join(installs))
    assert set(first.split(",")) == set(extras) - {"ffcv", "peers", *setup.BY_THEMSELVES}
    alone = " ".join(command for command in installs if "--no-deps" in command)
    assert {requirement for name in setup.BY_THEMSELVES for requirement in extras[name]} <= set(alone.split())


def test_a_second_set_up_does_what_is_missing(setup: ModuleType, commands: list[str]) -> None:
    def again() -> list[str]:
        before = len(commands)
        setup.set_up()
        return commands[before:]

    whole = again()
    assert again() == []
    (setup.ROOT / "core" / "new.py").touch()
    (linked,) = again()
    assert linked.endswith("--no-deps --no-build-isolation -e .")
    shutil.rmtree(setup.ROOT / "build")
    assert again() == [linked], "lost links are made again"
    with setup.CONSTRAINTS.open("a") as file:
        file.write("another==1.0\n")
    assert again() == whole


def test_an_interrupted_set_up_is_not_taken_for_done(
    setup: ModuleType, commands: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    setup.set_up()
    pins = setup.CONSTRAINTS.read_text()
    setup.CONSTRAINTS.write_text(f"{pins}another==1.0\n")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(setup, "run", lambda command: signal.raise_signal(signal.SIGINT))
        setup.set_up()
    setup.CONSTRAINTS.write_text(pins)  # what the old stamp was made from, but no longer what is installed
    commands.clear()
    setup.set_up()
    assert any("torch" in command for command in commands)


@pytest.mark.parametrize("apt_get", [None, "/usr/bin/apt-get"])
def test_without_system_packages_only_ffcv_is_left_out(
    setup: ModuleType, commands: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    apt_get: str | None,
) -> None:  # fmt: skip
    """There is no apt-get, or it fails. Once the package is there the set-up takes notice by itself."""
    recorded = setup.run

    def run(command: list[str | Path]) -> None:
        if "apt-get" in command:
            raise setup.SetupError("Unable to locate package libopencv-dev")
        recorded(command)

    monkeypatch.setattr(setup, "run", run)
    monkeypatch.setattr(shutil, "which", lambda name: apt_get)
    monkeypatch.setitem(setup.FOR_FFCV, "libopencv-dev", lambda: False)
    for _ in range(2):
        setup.set_up()
        told = capsys.readouterr().out
        assert "FFCV is left out" in told and "libopencv-dev" in told
    assert any("dali" in command for command in commands)
    assert not any("ffcv" in command for command in commands)
    monkeypatch.setitem(setup.FOR_FFCV, "libopencv-dev", lambda: True)
    setup.set_up()
    assert any("ffcv==" in command for command in commands)
    assert "left out" not in capsys.readouterr().out


def test_packages_whose_installation_was_cut_off_are_forgotten(setup: ModuleType, tmp_path: Path) -> None:
    for name in ("whole", "cut", "unrecorded"):
        record = tmp_path / f"{name}-1.0.dist-info"
        record.mkdir()
        (tmp_path / f"{name}.py").touch()
        if name != "unrecorded":
            (record / "RECORD").write_text(f"{name}.py,,\n__pycache__/{name}.cpython-311.pyc,,\n")
    (tmp_path / "cut.py").unlink()
    (tmp_path / "~rch").mkdir()
    assert setup.forget_half_installed(tmp_path) == ["cut-1.0.dist-info", "unrecorded-1.0.dist-info"]
    assert sorted(path.name for path in tmp_path.glob("*[-~]*")) == ["whole-1.0.dist-info"]


def test_a_failing_command_is_shown_with_its_last_lines(setup: ModuleType) -> None:
    with pytest.raises(setup.SetupError, match="no such version"):
        setup.run([sys.executable, "-c", "print('downloading'); print('no such version'); raise SystemExit(1)"])
    assert "no such version" in setup.LOG.read_text()
