"""Every law that midepoch's own adapters satisfy: ``pytest test_rows.py`` after ``pip install .``."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from midepoch_rows import Rows

import midepoch
from midepoch.testing import ResumableTests


def make_loader(rank: int = 0, world_size: int = 1, batch_size: int = 2, seed: int = 0, size: int = 17) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "data.npy"
        np.save(path, np.arange(size))
        source = Rows(str(path), batch_size)  # keeps the file open
    return midepoch.wrap(source, seed=seed, world=midepoch.World(rank, world_size))


class TestRows(ResumableTests):
    make_loader = staticmethod(make_loader)
    shuffled = True
