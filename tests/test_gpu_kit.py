"""What scripts/gpu.py packs for a GPU machine, and what scripts/gpu.sh makes of it; all of it on the CPU."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from support.places import ROOT, module_of

HERE = f"{sys.version_info.major}.{sys.version_info.minor}"
OTHER = "3.12" if HERE != "3.12" else "3.13"
SCRIPT = ROOT / "scripts" / "gpu.sh"
NEEDED = re.findall(r'^NEEDED="([^"]+)"', SCRIPT.read_text(), re.MULTILINE)[0].split()  # by a GPU machine

needs_ffcv = pytest.mark.skipif(importlib.util.find_spec("ffcv") is None, reason="FFCV is not installed")
pytestmark = pytest.mark.skipif(
    (sys.platform, os.uname().machine) != ("linux", "x86_64"), reason="a kit is for Linux on x86-64"
)


gpu = module_of(ROOT / "scripts" / "gpu.py")


def wheels_from_installed(versions: Mapping[str, str], python: str, into: Path) -> None:
    """In place of a download: a wheel of each package's installed files, which fits this Python alone."""
    for name, version in versions.items():
        distribution = importlib.metadata.distribution(name)
        (tag, *_) = re.findall(r"^Tag: (.+)$", distribution.read_text("WHEEL") or "", re.MULTILINE)
        with zipfile.ZipFile(into / f"{name.replace('-', '_').lower()}-{version}-{tag}.whl", "w") as wheel:
            for file, path in gpu.installed_files(distribution):
                wheel.write(path, file)


def python_of(path: Path, script: str) -> Path:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def shell(*words: str | Path, env: Mapping[str, str | Path], status: int = 0) -> str:
    """What `scripts/gpu.sh` prints; its exit status must be this one."""
    environment = os.environ | {name: str(value) for name, value in env.items()}
    command = ["bash", SCRIPT, *words]
    run = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8")
    assert run.returncode == status, run.stdout
    return run.stdout


LIMIT = 20_000


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed")
    gpu.pack(folder, HERE, packages=["pluggy"], part_size=LIMIT)
    return folder


@pytest.fixture
def parts(packed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(packed, tmp_path / "parts"))


def refused(capsys: pytest.CaptureFixture[str], into: Path, *folders: Path) -> str:
    """What is said of parts that cannot be unpacked; nothing is written."""
    assert gpu.main(["unpack", *map(str, folders), "--into", str(into)]) == 2
    assert not into.exists()
    return capsys.readouterr().err


def test_every_bad_part_is_named_before_anything_is_written(
    parts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (parts / "part-00").unlink()
    (parts / "part-01").write_bytes((parts / "part-01").read_bytes()[:-1])
    whole = (parts / "part-02").read_bytes()
    (parts / "part-02").write_bytes(whole[:100] + bytes([whole[100] ^ 1]) + whole[101:])
    (parts / "part-77").write_bytes(whole)
    assert "missing: part-00; damaged: part-01, part-02; surplus: part-77." in refused(capsys, tmp_path / "kit", parts)


def test_what_is_no_kit_of_this_python_is_told(parts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    into, other, third = (tmp_path / name for name in ("kit", "other", "third"))
    gpu.pack(other, OTHER, packages=["pluggy"])
    said = refused(capsys, into, other)
    assert f"for Python {OTHER}, and this is Python {HERE}" in said and f"pack --python {HERE}" in said
    third.mkdir()
    assert f"There is no manifest.json in {third}" in refused(capsys, into, third)
    gpu.pack(third, HERE, packages=["pluggy"], part_size=LIMIT + 1)
    assert "different kits" in refused(capsys, into, parts, third)
    with pytest.raises(gpu.KitError, match=r"^Not installed here: nowhere-a, nowhere-b\. Run: make setup$"):
        gpu.pack(into, HERE, packages=["nowhere-a", "pluggy", "nowhere-b"])
    assert not into.exists()
    for text in ("", "{}", "[]", '{"parts": [{"name": "part-00"}]}'):
        (parts / "manifest.json").write_text(text)
        assert f"{parts / 'manifest.json'} is damaged" in refused(capsys, into, parts)


@needs_ffcv
def test_ffcv_is_named_for_the_other_python_with_libraries(tmp_path: Path) -> None:
    manifest = gpu.pack(tmp_path, OTHER, packages=["ffcv"])
    with tarfile.open(fileobj=gpu.Joiner(sorted(tmp_path.glob("part-*"))), mode="r|") as tar:
        names = [member.name for member in tar]
    compiled = [name for name in names if name.startswith("copied/ffcv/_libffcv")]
    assert compiled == [f"copied/ffcv/_libffcv.cpython-{OTHER.replace('.', '')}-x86_64-linux-gnu.so"]
    assert any(name.endswith(".dist-info/METADATA") for name in names)
    libraries = [name.removeprefix("lib/") for name in names if name.startswith("lib/")]
    assert libraries == manifest.libraries
    assert {name.partition(".so")[0] for name in libraries} >= {"libturbojpeg", "libopencv_core", "libopencv_imgproc"}
    assert not [name for name in libraries if re.match(r"(libc|libm|libstdc\+\+|libgcc_s|ld-linux.*)\.so", name)]


IMPORTS = """
import json, pathlib, assertpy, ffcv.libffcv, markupsafe._speedups, midepoch, midepoch.adapters.ffcv
modules = [assertpy, ffcv.libffcv, markupsafe._speedups, midepoch, midepoch.adapters.ffcv]
mapped = [line.split()[-1] for line in pathlib.Path("/proc/self/maps").read_text().splitlines()]
libraries = sorted({line for line in mapped if "opencv_core" in line or "turbojpeg" in line or "_libffcv" in line})
print(json.dumps([[module.__file__ for module in modules], libraries]))
"""


@needs_ffcv
def test_an_installed_kit_is_what_python_imports(tmp_path: Path) -> None:
    kit, parts, out = tmp_path / "kit", tmp_path / "parts", tmp_path / "out"
    packages = ["MarkupSafe", "assertpy", "ffcv", "fastargs", "terminaltables", "pytorch-pfn-extras"]
    gpu.pack(parts, HERE, packages=packages, part_size=8 << 20, get_wheels=wheels_from_installed)
    sizes = [path.stat().st_size for path in sorted(parts.glob("part-*"))]
    assert len(sizes) > 1 and set(sizes[:-1]) == {8 << 20} and 0 < sizes[-1] <= 8 << 20
    (kit / "copied" / "old").mkdir(parents=True)  # what an earlier kit left goes
    # Two transfers, each with the manifest; and what this machine lacks of a GPU machine's modules.
    second, stubs = tmp_path / "second", tmp_path / "stubs"
    second.mkdir()
    stubs.mkdir()
    shutil.copy(parts / "manifest.json", second)
    (parts / "part-01").rename(second / "part-01")
    # Asked of a new process: other tests put modules into this one.
    missing = "import sys; from importlib.util import find_spec as of; print(*[a for a in sys.argv[1:] if not of(a)])"
    for name in subprocess.check_output([sys.executable, "-c", missing, *NEEDED], text=True).split():
        (stubs / f"{name}.py").touch()
    env: dict[str, str | Path] = {"KIT": kit, "PYTHON": sys.executable, "OUT": out, "PYTHONPATH": stubs}
    said = shell("receive", parts, "receive", second, "unpack", "install", env=env)
    assert re.findall(r"^== (\w+): \d+ s, done$", said, re.MULTILINE) == ["receive", "receive", "unpack", "install"]
    assert f"Installed {len(packages)} packages" in (out / "install.log").read_text()
    assert not (kit / "copied" / "old").exists()

    paths = {"PYTHONPATH": f"{kit}/package:{kit}/site", "LD_LIBRARY_PATH": f"{kit}/lib"}
    said = subprocess.check_output([sys.executable, "-c", IMPORTS], env=os.environ | paths, cwd=tmp_path, text=True)
    modules, libraries = json.loads(said)
    assert (len(modules), len(libraries)) == (5, 3)
    assert all(Path(each).is_relative_to(kit) for each in (*modules, *libraries))


def test_all_that_a_machine_lacks_is_named_and_no_step_follows(parts: Path, tmp_path: Path) -> None:
    kit, bare_python = tmp_path / "kit", python_of(tmp_path / "python", f'exec "{sys.executable}" -I -S "$@"')
    said = shell("receive", parts, "unpack", "install", "tests", env={"KIT": kit, "PYTHON": bare_python}, status=1)
    assert f"lacks these modules: {', '.join(NEEDED)}. Install them there." in said
    assert "== tests" not in said
    assert not (kit / "site").exists()


def test_steps_run_in_the_kits_environment_each_by_itself(tmp_path: Path) -> None:
    python = python_of(tmp_path / "python", 'echo "$PYTHONPATH $LD_LIBRARY_PATH $*"\nexit 1')
    kit = tmp_path / "kit"
    (kit / "package").mkdir(parents=True)
    steps = ("bench-step", "tests", "bench-crops")
    env: dict[str, str | Path] = {"KIT": kit, "PYTHON": python, "OUT": tmp_path / "out"}
    said = shell(*steps, env={**env, "PYTHONPATH": "", "LD_LIBRARY_PATH": ""}, status=1)
    paths = f"{kit}/package:{kit}/site {kit}/lib"
    assert f"{paths} benchmarks/gpu.py crops\n" in said
    (files,) = re.findall(rf"^{paths} -m pytest -m gpu -q -rA -n 4 -p no:cacheprovider (.+)$", said, re.MULTILINE)
    assert {"tests/backends/test_dali.py", "tests/backends/test_gpu.py"} <= set(files.split())
    assert re.findall(r"^== ([\w-]+): \d+ s, FAILED, exit status 1$", said, re.MULTILINE) == list(steps)
    assert said.endswith("Failed: bench-step tests bench-crops\n")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(f"{step}.log" for step in steps)
