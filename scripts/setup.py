#!/usr/bin/env python3
"""Set up all that `make demo` and `make test` need; return at once where that is done already.

Uses nothing but the standard library of Python 3.11 or later, for it runs before anything is installed:

1. system packages (apt-get; sudo where not root),
2. a virtual environment in `.venv`,
3. torch, in the tested version,
4. midepoch itself, editable, with every extra,
5. FFCV, the one backend that is compiled here. Where it cannot be, it is left out, and a line says so.

Nothing is done twice: a stamp, written last, remembers what the set-up was made from. After an interruption
the next run goes on where this one stopped. All output of pip and apt-get is kept in `.venv/setup.log`.
"""

from __future__ import annotations

import collections
import contextlib
import csv
import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "setup.json"
LOG = VENV / "setup.log"
CONSTRAINTS = ROOT / "constraints.txt"

OLDEST = (3, 11)
NEWEST_TESTED = (3, 13)  # the pins have no wheels beyond it
WORTH_SHOWING = ("Collecting", "Downloading", "Building", "Installing", "Get:", "Unpacking", "Setting up")


class SetupError(Exception):
    """The set-up cannot go on; the message ends in what to do."""


# --- What the system must have ---------------------------------------------------------------------------


def _pkg_config_knows(library: str) -> bool:
    if shutil.which("pkg-config") is None:
        return False
    return subprocess.run(["pkg-config", "--exists", library], check=False).returncode == 0


# Debian's name of each package -> whether what it brings is there, by whatever means.
FOR_VENV: dict[str, Callable[[], bool]] = {
    "python3-venv": lambda: importlib.util.find_spec("ensurepip") is not None,
}
FOR_FFCV: dict[str, Callable[[], bool]] = {
    "build-essential": lambda: shutil.which("g++") is not None and shutil.which("gcc") is not None,
    "pkg-config": lambda: shutil.which("pkg-config") is not None,
    "python3-dev": lambda: Path(sysconfig.get_path("include"), "Python.h").is_file(),
    "libturbojpeg0-dev": lambda: _pkg_config_knows("libturbojpeg"),
    "libopencv-dev": lambda: _pkg_config_knows("opencv4"),
}

# Extras that ask for clients of clouds, and for a torchvision that would bring another torch: they are installed
# without what they ask for, beside what they import.
BY_THEMSELVES = ("streaming", "litdata")
ALONE_TOO = ("boto3", "botocore", "s3transfer", "jmespath")  # they ask for an older dateutil than others
WHAT_THEY_IMPORT = (
    "Brotli", "catalogue", "lightning-utilities", "obstore", "python-snappy", "requests", "tifffile", "tqdm",
    "transformers", "xxhash", "zstd",
)  # fmt: skip

# Only tests need these; without them, those are skipped with the reason.
FOR_TESTS: dict[str, Callable[[], bool]] = {
    "nginx-light": lambda: shutil.which("nginx") is not None or Path("/usr/sbin/nginx").exists(),
    "chromium": lambda: any(map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))),
}


def missing(packages: dict[str, Callable[[], bool]]) -> list[str]:
    """Debian's names of the packages whose content this machine lacks."""
    return [name for name, present in packages.items() if not present()]


def install_system_packages(names: Sequence[str]) -> str | None:
    """Install Debian packages.

    Returns:
        None, or why they could not be had, in words that fit after 'because'.
    """
    if shutil.which("apt-get") is None:
        return "there is no apt-get on this machine"
    as_root = [] if os.geteuid() == 0 else ["sudo"]
    if as_root and shutil.which("sudo") is None:
        return "this user is not root and there is no sudo"
    if as_root and not _on_a_terminal():
        as_root = ["sudo", "--non-interactive"]  # nobody is there to type a password
    # On a machine that has just been started, Debian's own daily upgrade may hold the lock.
    apt_get = [*as_root, "env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-o", "DPkg::Lock::Timeout=300"]
    # apt-get installs all that it is asked for or nothing, and FFCV's packages must not cost us the others.
    needed, *optional = ([n for n in names if n in table] for table in (FOR_VENV, FOR_FFCV, FOR_TESTS))
    with contextlib.suppress(SetupError):  # a stale list is often good enough; the installation will tell
        run([*apt_get, "update"])
    try:
        for group in filter(None, (needed, *optional)):
            run([*apt_get, "install", "--yes", "--no-install-recommends", *group])
    except SetupError as error:
        say(str(error))
        return "apt-get could not install them (.venv/setup.log)"
    return None


# --- Running commands, and saying so ---------------------------------------------------------------------


def _on_a_terminal() -> bool:
    return sys.stdout is not None and sys.stdout.isatty()


def say(text: str) -> None:
    """Print one line, at once."""
    print(text, flush=True)


@contextlib.contextmanager
def step(number: int, text: str) -> Iterator[None]:
    """Announce a step, and say how long it took once it is done."""
    say(f"[{number}/5] {text}")
    start = time.monotonic()
    yield
    say(f"      took {time.monotonic() - start:.0f} s")


def run(command: Sequence[str | os.PathLike[str]]) -> None:
    """Run a command with its output in the log; on a terminal, show what it is at.

    Raises:
        SetupError: The command failed. Holds the last lines it wrote.
    """
    # A PYTHONPATH of the caller's would make pip take foreign packages for installed ones.
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    environment |= {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}
    last_lines: collections.deque[str] = collections.deque(maxlen=15)
    VENV.mkdir(exist_ok=True)
    with (
        LOG.open("a", encoding="utf-8") as log,
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
        ) as process,
    ):
        log.write(f"$ {' '.join(map(str, command))}\n")
        assert process.stdout is not None  # asked for above; tells the type checker
        for line in process.stdout:
            log.write(line)
            last_lines.append(line)
            _show_progress(line)
    _show_progress("")
    if process.returncode != 0:
        raise SetupError("".join(f"      | {line}" for line in last_lines).rstrip())


def _show_progress(line: str) -> None:
    if not _on_a_terminal():
        return
    if not line:
        print("\r\033[K", end="", flush=True)
    elif line.lstrip().startswith(WORTH_SHOWING):
        width = shutil.get_terminal_size().columns - 8
        print(f"\r\033[K      {line.strip()[:width]}", end="", flush=True)


def pip_install(*arguments: str) -> None:
    """Install into the virtual environment, in the tested versions where this Python has been tested."""
    pins = ["-c", str(CONSTRAINTS)] if sys.version_info[:2] <= NEWEST_TESTED else []
    run([PYTHON, "-m", "pip", "install", *pins, *arguments])


# --- The virtual environment -----------------------------------------------------------------------------


def make_environment() -> None:
    """Create `.venv`, again where what is there does not work, and forget packages that are not whole."""
    try:
        run([PYTHON, "-m", "pip", "--version"])
    except (SetupError, OSError):
        run([sys.executable, "-m", "venv", "--clear", str(VENV)])
    for site_packages in VENV.glob("lib/python*/site-packages"):
        forget_half_installed(site_packages)


def forget_half_installed(site_packages: Path) -> list[str]:
    """Remove the records of packages whose installation was cut off, so that pip installs them again.

    Returns:
        The names of the records removed.
    """
    forgotten = []
    for record in sorted(site_packages.glob("*.dist-info")):
        if not _is_whole(record):
            shutil.rmtree(record)
            forgotten.append(record.name)
    for leftover in site_packages.glob("~*"):  # pip renames what it is about to replace
        shutil.rmtree(leftover, ignore_errors=True)
    return forgotten


def _is_whole(record: Path) -> bool:
    try:
        with (record / "RECORD").open(newline="", encoding="utf-8") as rows:
            names = [row[0] for row in csv.reader(rows) if row]
    except FileNotFoundError:
        return False
    return all(name.endswith(".pyc") or (record.parent / name).exists() for name in names)


def extras() -> dict[str, list[str]]:
    """The requirements of each extra in pyproject.toml."""
    import tomllib  # not in a Python too old for midepoch, which is to be told so

    with (ROOT / "pyproject.toml").open("rb") as file:
        table: dict[str, list[str]] = tomllib.load(file)["project"]["optional-dependencies"]
    return table


# --- The stamp -------------------------------------------------------------------------------------------


def wanted() -> dict[str, Any]:
    """What a set-up done now would be made from; the stamp holds the same of the last one."""
    inputs = hashlib.sha256()
    for path in (ROOT / "pyproject.toml", CONSTRAINTS, Path(__file__)):
        inputs.update(path.read_bytes())
    return {
        "root": str(ROOT),  # scripts in .venv/bin hold absolute paths
        "python": list(sys.version_info[:2]),
        "inputs": inputs.hexdigest(),
        "missing": missing(FOR_FFCV),
    }


def modules() -> list[str]:
    """The files of the package: an editable install in strict mode links each of them by name."""
    files = [path for folder in ("core", "adapters") for path in (ROOT / folder).rglob("*") if path.is_file()]
    return sorted(str(path.relative_to(ROOT)) for path in files if path.suffix != ".pyc")


def linked() -> bool:
    """Whether the folder of links that makes the package importable is still there."""
    pointers = list(VENV.glob("lib/python*/site-packages/__editable__.midepoch-*.pth"))
    return any(Path(pointer.read_text(encoding="utf-8").strip()).is_dir() for pointer in pointers)


def read_stamp() -> dict[str, Any]:
    """What the last set-up that came to its end was made from; empty where none did."""
    try:
        stamp = json.loads(STAMP.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def write_stamp(stamp: dict[str, Any]) -> None:
    """Write the stamp in one piece: a half-written one is never seen."""
    draft = STAMP.with_suffix(".draft")
    draft.write_text(json.dumps(stamp, indent=1), encoding="utf-8")
    draft.replace(STAMP)


# --- The whole -------------------------------------------------------------------------------------------


def set_up() -> None:
    """Bring `.venv` to what the files of this checkout ask for."""
    stamp = read_stamp()
    if stamp and stamp.get("root") != str(ROOT):
        say("This folder was moved since its set-up: .venv is made again.")
        shutil.rmtree(VENV)
        stamp = {}
    current = wanted()
    left_out = stamp.get("left_out")
    if {name: stamp.get(name) for name in current} != current:
        STAMP.unlink(missing_ok=True)
        left_out = install_everything()
        current = wanted()
    elif stamp.get("modules") != modules() or not linked():
        say("Files were added to the package or removed: linking them.")
        pip_install("--no-deps", "--no-build-isolation", "-e", ".")
    current |= {"modules": modules(), "left_out": left_out}
    if current != stamp:
        write_stamp(current)
    if left_out:
        say(left_out)


def install_everything() -> str | None:
    """Take the five steps.

    Returns:
        None, or the line that says why FFCV is left out.
    """
    say("Setting up midepoch in .venv. The first time takes some minutes; details are in .venv/setup.log.")
    if sys.version_info[:2] > NEWEST_TESTED:
        newest = ".".join(map(str, NEWEST_TESTED))
        say(f"This Python is newer than the newest tested, {newest}: pip chooses the versions.")
    requirements = extras()
    del requirements["peers"]  # all of it is in others
    ffcv = requirements.pop("ffcv")
    alone = [requirement for name in BY_THEMSELVES for requirement in requirements.pop(name)]

    lacking = missing(FOR_VENV) + missing(FOR_FFCV) + missing(FOR_TESTS)
    because = None
    with step(1, f"System packages: {' '.join(lacking) or 'all there'}"):
        if lacking:
            because = install_system_packages(lacking)
    because = because or "apt-get did not bring them for this Python"
    if missing(FOR_VENV):
        raise SetupError(
            f"A virtual environment needs Python's ensurepip, which this Python lacks: {because}.\n"
            "Install it (Debian: python3-venv), or name another Python: make PYTHON=/path/to/python3 ..."
        )
    with step(2, "Virtual environment"):
        make_environment()
    with step(3, "torch"):
        pip_install("torch", "numpy", "setuptools")
    with step(4, f"midepoch with its extras: {' '.join(requirements)}"):
        pip_install("--no-build-isolation", "-e", f".[{','.join(requirements)}]", *WHAT_THEY_IMPORT)
        pip_install("--no-deps", *ALONE_TOO, *alone)
        # Out of the way of those who try to import it, since that fails beside torch for the CPU; tests know a remedy.
        pip_install("--no-deps", "--upgrade", "--target", str(VENV / "apart"), "torchvision")
    return install_ffcv(ffcv, because)


def install_ffcv(requirements: Sequence[str], because: str) -> str | None:
    """Compile and install FFCV, or say in one line why not; nothing else depends on it."""
    still_missing = ", ".join(missing(FOR_FFCV))
    if still_missing:
        say("[5/5] FFCV")
        return (
            f"FFCV is left out, and its tests are skipped: {still_missing} missing, and {because}. "
            "Install what Debian calls by these names and run again."
        )
    try:
        with step(5, "FFCV (compiled here)"):
            pip_install(*requirements)
    except SetupError as error:
        say(str(error))
        return "FFCV is left out, and its tests are skipped: it did not compile (see .venv/setup.log)."
    return None


def main() -> int:
    """Set up under a lock, and turn failures into messages.

    Returns:
        The exit status.
    """
    if sys.version_info < OLDEST:
        say(
            f"midepoch needs Python 3.11 or later; {sys.executable} is {sys.version.split()[0]}. "
            "Name another one: make PYTHON=/path/to/python3.11 ..."
        )
        return 1
    try:
        with Path(__file__).open("rb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say("Another set-up of this folder is running: waiting for it.")
                fcntl.flock(lock, fcntl.LOCK_EX)
            set_up()
    except SetupError as error:
        say(f"{error}\nThe set-up did not finish. All output is in {LOG}; mend the cause and run again.")
        return 1
    except KeyboardInterrupt:
        say("\nInterrupted. Run again: it goes on where it stopped.")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
