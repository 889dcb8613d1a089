"""Where things are."""

from pathlib import Path

TESTS = Path(__file__).parents[1]
"""The folder that is on the import path: `support` is found there."""

ROOT = TESTS.parent
