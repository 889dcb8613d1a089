"""Gives each process of the tests, with those it starts, names of shared memory that no other one looks for.

Streaming takes the first number that is free on the machine, and does not take it in one step: of two processes that
make a dataset at once, one fails, or both wait in one barrier, forever. Ranks of one job do look for the same number.
"""

from __future__ import annotations

import itertools
import os
import zlib

import cpu_torchvision  # noqa: F401  # before streaming, which imports torchvision
import streaming.base.shared.prefix

_RUN = zlib.crc32(os.environ.get("TMPDIR", "").encode()) % 1000
_PROCESS = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % 10
_FIRST = 100_000 * _PROCESS + 100 * _RUN  # of six digits

streaming.base.shared.prefix._each_prefix_int = lambda: itertools.count(_FIRST)
