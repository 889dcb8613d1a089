"""An undisturbed wrapped run is the plain one: each kind of source. Broken ones: test_bad_sources.

Sources of DALI, FFCV, webdataset, Streaming and packages with a state of their own have this law in their own files.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from midepoch.testing import check_resumable
from support import transparent_sources as sources
from support.places import TESTS

pytestmark = pytest.mark.filterwarnings("ignore::midepoch.MidepochWarning")

REFUSED = {
    "exposes its sampler, three samples for some",
    "exposes its sampler, none for some",
    "exposes its sampler, flushes",
    "its own iterator with a state, in a DataLoader",
}
"""With two workers, `wrap` asks for shard=, which the message names."""


def examine(make: Callable[..., Any], **how: Any) -> tuple[str, str]:
    report = check_resumable(
        make, laws=["transparent"], identify=sources.identify, timeout=240, raise_on_failure=False, **how
    )
    return report["transparent"].status, str(report)


@pytest.mark.parametrize("name", sources.SOUND)
def test_a_sound_source(name: str) -> None:
    """With and without workers as the platform starts them, on one rank and on two."""
    status, report = examine(sources.SOUND[name], quick=True, world_sizes=(1, 2))
    assert status == ("refused clearly" if name in REFUSED else "holds"), report


@pytest.mark.long
@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("name", sources.SOUND)
def test_a_sound_source_in_workers_kept_and_not(name: str, method: str) -> None:
    """In an interpreter of its own: the processes that the law uses start workers as that one does."""
    program = (
        "import multiprocessing, sys; sys.path.insert(0, '..'); import test_transparent as here\n"
        "multiprocessing.set_start_method(sys.argv[2])\n"
        "print(*here.examine(here.sources.SOUND[sys.argv[1]], world_sizes=(1, 2, 3)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, name, method], cwd=TESTS / "laws", capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("refused clearly" if name in REFUSED else "holds"), done.stdout
