#!/usr/bin/env python3
"""Pack what a bare GPU machine without a network needs for the tests and benchmarks, and unpack it there.

Uses nothing but the standard library of Python 3.11 or later, for `unpack` runs before anything is installed.

`pack` writes parts of one tar stream, and a manifest that says what makes them whole. The stream holds

- `wheels/`: packages with compiled code, in the versions installed here, for the Python of the GPU machine,
- `copied/`: packages in pure Python, as installed here, and FFCV, which the index has no wheel of,
- `lib/`: the shared libraries that FFCV links to.

Not packed is what a machine for PyTorch has anyway: `scripts/gpu.sh`, which installs a kit, names what is missing.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import io
import json
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, cast

PART_SIZE = 48 << 20
MANIFEST = "manifest.json"
CONTENTS = ("wheels", "copied", "lib")

FOR_DALI = (
    "nvidia-dali-cuda120", "nvidia-nvimgcodec-cu12", "nvidia-nvjpeg-cu12", "nvidia-nvjpeg2k-cu12", "nvidia-nvtiff-cu12",
    "nvidia-libnvcomp-cu12", "astunparse", "gast", "optree", "nvtx", "makefun", "libcst", "six",
)  # fmt: skip
FOR_FFCV = ("ffcv", "terminaltables", "pytorch-pfn-extras", "fastargs", "assertpy")
FOR_WEBDATASET = ("webdataset", "braceexpand")
PACKAGES = (*FOR_DALI, *FOR_FFCV, *FOR_WEBDATASET)

# Newest first. pip does not conclude from one to those before it.
PLATFORMS = (
    *(f"manylinux_2_{minor}_x86_64" for minor in range(28, 16, -1)),
    *("manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"),
)

# glibc, the loader, and the compiler's libraries: every machine has them, and they must fit each other.
ON_EVERY_MACHINE = re.compile(
    r"(linux-vdso|ld-linux-x86-64|libc|libm|libmvec|libdl|libpthread|librt|libresolv|libutil|libanl|libnsl"
    r"|libstdc\+\+|libgcc_s)\.so"
)


class KitError(Exception):
    """A kit cannot be packed or unpacked; the message ends in what to do."""


@dataclass(frozen=True)
class Part:
    """One file of the stream."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a kit holds: the Python it is for, versions by package, names of libraries, and the parts in order."""

    python: str
    packages: dict[str, str]
    libraries: list[str]
    parts: list[Part]

    def write(self, folder: Path) -> None:
        """Write the manifest; the last file of a kit, so that an interrupted one has none."""
        (folder / MANIFEST).write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """Read a manifest.

        Raises:
            KitError: The file is damaged.
        """
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
            return cls(**fields | {"parts": [Part(**part) for part in fields["parts"]]})
        except (ValueError, TypeError, KeyError) as error:
            raise KitError(f"{path} is damaged: {error!r}. Copy it again.") from error


# --- The stream, in parts --------------------------------------------------------------------------------


class Cutter:
    """As much of a file as tarfile writes to; it becomes parts of at most `size` bytes each."""

    def __init__(self, folder: Path, size: int) -> None:
        self.parts: list[Part] = []
        self._folder = folder
        self._size = size
        self._file: IO[bytes] | None = None
        self._room = 0
        self._hash = hashlib.sha256()

    def write(self, data: bytes) -> int:
        """Write all of the data."""
        rest = memoryview(data)
        while rest:
            file = self._file if self._file and self._room else self._begin()
            piece, rest = rest[: self._room], rest[self._room :]
            file.write(piece)
            self._hash.update(piece)
            self._room -= len(piece)
        return len(data)

    def _begin(self) -> IO[bytes]:
        self.close()
        self._file = (self._folder / f"part-{len(self.parts):02}").open("wb")
        self._room = self._size
        self._hash = hashlib.sha256()
        return self._file

    def close(self) -> None:
        """End the part that is being written."""
        if self._file is not None:
            self._file.close()
            self._file = None
            self.parts.append(Part(f"part-{len(self.parts):02}", self._size - self._room, self._hash.hexdigest()))


class Joiner:
    """As much of a file as tarfile reads from: all parts, one after the other."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._paths = iter(paths)
        self._file: IO[bytes] = io.BytesIO()

    def read(self, size: int) -> bytes:
        """At most `size` bytes; none at the end."""
        while not (data := self._file.read(size)):
            self._file.close()
            path = next(self._paths, None)
            if path is None:
                self._file = io.BytesIO()
                break
            self._file = path.open("rb")
        return data


# --- Packing ---------------------------------------------------------------------------------------------


def download(versions: Mapping[str, str], python: str, into: Path) -> None:
    """Get the wheels of packages for a Python on x86-64 Linux.

    Raises:
        KitError: pip did not get them. Holds the last line that it wrote.
    """
    platforms = [word for name in PLATFORMS for word in ("--platform", name)]
    target = ["--python-version", python, "--implementation", "cp", *platforms]
    wanted = [f"{name}=={version}" for name, version in versions.items()]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "download"]
    command = [*pip, "--no-deps", "--only-binary=:all:", *target, "--dest", str(into), *wanted]
    done = subprocess.run(command, check=False, stderr=subprocess.PIPE, encoding="utf-8", errors="replace")
    if done.returncode != 0:
        said = (done.stderr.strip().splitlines() or ["nothing was said"])[-1]
        raise KitError(f"pip could not download the wheels: {said}\nCheck the connection to the package index.")


def installed_files(distribution: importlib.metadata.Distribution) -> Iterator[tuple[str, Path]]:
    """The files of an installed package: each one's name in site-packages, and where it lies.

    Raises:
        KitError: A file is missing.
    """
    for file in distribution.files or []:
        if ".." in file.parts or file.suffix == ".pyc":
            continue  # programs in bin/, and what Python compiles again
        path = Path(str(distribution.locate_file(file)))
        if not path.is_file():
            raise KitError(f"{distribution.name} is installed without its {file}. Remove .venv and run: make setup")
        yield file.as_posix(), path


def is_pure(distribution: importlib.metadata.Distribution) -> bool:
    """Whether a package is in pure Python, so that its files fit every Python.

    By its tags: Root-Is-Purelib tells where a wheel is unpacked, and is true of some that hold nothing but libraries.
    """
    tags = re.findall(r"^Tag: (.+)$", distribution.read_text("WHEEL") or "", re.MULTILINE)
    return bool(tags) and all(tag.strip().endswith("-none-any") for tag in tags)


def linked_libraries(path: Path) -> dict[str, Path]:
    """The shared libraries that a file links to, directly or not, and that a bare machine may lack.

    Raises:
        KitError: One of them is not on this machine.
    """
    found = {}
    for line in subprocess.check_output(["ldd", path], encoding="utf-8").splitlines():
        name, arrow, place = line.strip().partition(" => ")
        if not arrow or ON_EVERY_MACHINE.match(name):
            continue
        if place == "not found":
            raise KitError(f"{path.name} links to {name}, which is not on this machine. Run: make setup")
        found[name] = Path(place.rpartition(" (")[0])
    return found


def ffcv_files(distribution: importlib.metadata.Distribution, python: str) -> Iterator[tuple[str, Path]]:
    """FFCV's files for another Python, and the libraries that its compiled part links to.

    That part is a plain shared library, which FFCV calls through ctypes. Its name alone ties it to one Python.
    """
    here = sysconfig.get_config_var("EXT_SUFFIX")
    there = f".cpython-{python.replace('.', '')}-x86_64-linux-gnu.so"
    for name, path in installed_files(distribution):
        if name.endswith(here):
            yield f"copied/{name.removesuffix(here)}{there}", path
            yield from ((f"lib/{library}", place) for library, place in linked_libraries(path).items())
        else:
            yield f"copied/{name}", path


def find_installed(packages: Iterable[str]) -> dict[str, importlib.metadata.Distribution]:
    """The installed packages by name.

    Raises:
        KitError: Some are not installed; all of them are named.
    """
    found, missing = {}, []
    for name in packages:
        try:
            found[name] = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    if missing:
        raise KitError(f"Not installed here: {', '.join(missing)}. Run: make setup")
    return found


def pack(
    into: Path,
    python: str,
    *,
    packages: Iterable[str] = PACKAGES,
    part_size: int = PART_SIZE,
    get_wheels: Callable[[Mapping[str, str], str, Path], None] = download,
) -> Manifest:
    """Write a kit of installed packages into a folder, in place of the kit that is there.

    Args:
        into: The folder, which is made where it is missing.
        python: The Python of the GPU machine, such as "3.12".
        packages: Names of installed packages.
        part_size: The most bytes of a part.
        get_wheels: Puts the wheels of packages into a folder; takes their versions by name, the Python, the folder.

    Raises:
        KitError: A package is not installed whole, or has no wheel for that Python.
    """
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise KitError("A kit is for Linux on x86-64, where FFCV is compiled. Pack it on such a machine.")
    installed = find_installed(packages)
    wheels: dict[str, str] = {}
    files: dict[str, Path] = {}
    for name, distribution in installed.items():
        if name == "ffcv":
            files |= ffcv_files(distribution, python)
        elif is_pure(distribution):
            files |= {f"copied/{file}": path for file, path in installed_files(distribution)}
        else:
            wheels[name] = distribution.version

    into.mkdir(parents=True, exist_ok=True)
    for old in (into / MANIFEST, *into.glob("part-*")):
        old.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(dir=into, prefix="wheels-") as folder:
        if wheels:
            get_wheels(wheels, python, Path(folder))
        files |= {f"wheels/{path.name}": path for path in Path(folder).iterdir()}
        cutter = Cutter(into, part_size)
        # Of what a link leads to: a library's name is often a link.
        with tarfile.open(fileobj=cast(IO[bytes], cutter), mode="w|", dereference=True) as tar:
            for name, path in sorted(files.items()):
                tar.add(path, name, filter=_without_owner)
        cutter.close()
    versions = {name: distribution.version for name, distribution in installed.items()}
    libraries = sorted(name.removeprefix("lib/") for name in files if name.startswith("lib/"))
    manifest = Manifest(python, versions, libraries, cutter.parts)
    manifest.write(into)
    return manifest


def _without_owner(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Equal contents make equal parts, whoever packs them and when."""
    return member.replace(uid=0, gid=0, uname="", gname="", mtime=0, deep=False)


# --- Unpacking -------------------------------------------------------------------------------------------


def check(folders: Iterable[Path]) -> list[Path]:
    """Look whether folders hold together one whole kit for this Python.

    Returns:
        The parts in order.

    Raises:
        KitError: They do not. Names every part that is missing, damaged or surplus.
    """
    folders = list(folders)
    manifests = [folder / MANIFEST for folder in folders if (folder / MANIFEST).is_file()]
    if not manifests:
        raise KitError(f"There is no {MANIFEST} in {', '.join(map(str, folders))}. Copy there all that `pack` wrote.")
    manifest = Manifest.read(manifests[0])
    for other in manifests[1:]:
        if Manifest.read(other) != manifest:
            raise KitError(f"{manifests[0]} and {other} are of different kits. Remove the older one with its parts.")
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    if manifest.python != here:
        again = f"python scripts/gpu.py pack --python {here}"
        raise KitError(f"This kit is for Python {manifest.python}, and this is Python {here}. Pack another: {again}")

    found = {path.name: path for folder in folders for path in sorted(folder.glob("part-*"))}
    wanted = {part.name: part for part in manifest.parts}
    wrong = {
        "missing": [name for name in wanted if name not in found],
        "damaged": [name for name, path in found.items() if name in wanted and not _is_whole(path, wanted[name])],
        "surplus": [name for name in found if name not in wanted],
    }
    if any(wrong.values()):
        what = "; ".join(f"{kind}: {', '.join(names)}" for kind, names in wrong.items() if names)
        raise KitError(f"The kit is not whole. {what}.\nEmpty the folder, and copy there again all that `pack` wrote.")
    return [found[name] for name in wanted]


def _is_whole(path: Path, part: Part) -> bool:
    if path.stat().st_size != part.size:
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == part.sha256


def extract(parts: Iterable[Path], into: Path) -> None:
    """Extract the stream that the parts make; of an earlier kit there, nothing stays."""
    for name in CONTENTS:
        if (into / name).exists():
            shutil.rmtree(into / name)
    into.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=cast(IO[bytes], Joiner(parts)), mode="r|") as tar:
        tar.extractall(into, filter="data")


# --- The commands ----------------------------------------------------------------------------------------


def _python_version(text: str) -> str:
    if not re.fullmatch(r"3\.\d+", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no version such as 3.12")
    return text


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack", help="gather the parts, on the machine where midepoch is set up")
    packing.add_argument("--python", type=_python_version, default="3.12", help="the GPU machine's (3.12)")
    packing.add_argument("--into", type=Path, default=Path("build/gpu"), help="the folder to write (build/gpu)")
    unpacking = commands.add_parser("unpack", help="check the parts and extract them, on the GPU machine")
    unpacking.add_argument("folders", type=Path, nargs="+", metavar="FOLDER", help="where the parts are")
    unpacking.add_argument("--into", type=Path, default=Path("/tmp/midepoch-gpu"), help="(/tmp/midepoch-gpu)")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Run one command, and turn failures into messages.

    Returns:
        The exit status: 0, or 2 where a kit cannot be packed or unpacked.
    """
    arguments = _arguments(words)
    try:
        if arguments.command == "pack":
            manifest = pack(arguments.into, arguments.python)
            for name, version in manifest.packages.items():
                print(f"{name} {version}")
            size = sum(part.size for part in manifest.parts) / 2**20
            print(f"{size:.0f} MiB for Python {manifest.python} in {len(manifest.parts)} parts: {arguments.into}")
        else:
            extract(check(arguments.folders), arguments.into)
            print(f"Unpacked into {arguments.into}")
    except KitError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
