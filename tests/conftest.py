"""Which tests run, and in which order: long forms only where they are asked for, the slowest files first."""

from __future__ import annotations

import atexit
import datetime
import gc
import json
import logging
import os
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support import forking

# torch's TCPStore looks up the name of each client that connects, in its one thread, and answers nobody meanwhile. A
# lost packet to the name server cost glibc's five seconds, which is what some tests give a store: ask again earlier.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:5")

# Before numba is imported, by whichever file comes first: it refuses more threads later, and there may be two cores.
os.environ.setdefault("NUMBA_NUM_THREADS", "4")

if not os.environ.get("MIDEPOCH_CHAOS"):
    # Before torch and numba are imported. Tests run side by side, and compile more than they compute.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("NUMBA_OPT", "0")

if "PYTEST_XDIST_WORKER" not in os.environ:
    # One folder for all processes of this run. MosaicML's Streaming leaves two lock files there for each dataset, and
    # looks at all of them for the next one: after a few runs, its tests did little else.
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())  # pytest's own folders stay for a while
    TEMPORARY = os.environ["TMPDIR"] = tempfile.mkdtemp(prefix="midepoch-")
    tempfile.tempdir = None  # ask again
    atexit.register(shutil.rmtree, TEMPORARY, ignore_errors=True)
    forking.share()

DURATIONS = Path(__file__).with_name("durations.json")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-durations", action="store_true", help="write durations.json from this run")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(specs: list[Any]) -> None:
    """Fork pytest's processes from one that has imported what all test modules do, which takes 10 s of a core."""
    python = forking.executable(*forking.IMPORTED)
    for spec in specs:
        spec.python = python


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the long forms unless asked for; put the slowest files first, as last they would keep one process busy.

    durations.json says which files are slow. One that is not in it comes first: nobody knows.
    """
    if not os.environ.get("MIDEPOCH_CHAOS"):
        for item in items:
            if item.get_closest_marker("long"):
                item.add_marker(pytest.mark.skip(reason="a long form: make chaos runs it"))
    files = json.loads(DURATIONS.read_text())["files"]
    seconds = {name: taken["seconds"] for name, taken in files.items()}
    items.sort(key=lambda item: (-seconds.get(item.path.name, 10_000), item.path.name))


def pytest_collection_finish() -> None:
    """Take what has been imported out of the garbage collector's sight: a collection takes 0.2 s less, a fork too."""
    gc.collect()
    gc.freeze()
    if "PYTEST_XDIST_WORKER" in os.environ:
        forking.in_large_pages()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if not config.getoption("--record-durations"):
        return
    seconds: dict[str, float] = defaultdict(float)
    tests: dict[str, int] = defaultdict(int)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                name = Path(report.fspath).name
                seconds[name] += report.duration
                tests[name] += report.when == "call"
    slowest = sorted(seconds.items(), key=lambda row: -row[1])
    run = f"{datetime.datetime.now(datetime.UTC).date()}, {os.cpu_count()} cores"
    files = {name: {"seconds": round(taken), "tests": tests[name]} for name, taken in slowest}
    rows = ",\n".join(f"    {json.dumps(name)}: {json.dumps(row)}" for name, row in files.items())
    DURATIONS.write_text(f'{{\n  "run": {json.dumps(run)},\n  "files": {{\n{rows}\n  }}\n}}\n')


@pytest.fixture
def no_logs() -> Iterator[None]:
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for the indexes of shards of each test alone."""
    monkeypatch.setenv("MIDEPOCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def urls(tmp_path: Path) -> list[str]:
    """Webdataset's shards: 20 samples in five of unequal sizes, one of them empty."""
    from support.webdataset_sources import make_shards

    return make_shards(tmp_path / "shards", [4, 6, 0, 7, 3])
