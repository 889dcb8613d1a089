"""Grain: its iterators keep the state; wrapped, a dataset has the calls that every loader here has.

``python examples/grain_dataset.py``
"""

from __future__ import annotations

import itertools
import json
from typing import Any

import grain

import midepoch


def make() -> Any:
    numbers = grain.MapDataset.range(40).shuffle(seed=1).batch(4)
    return midepoch.wrap(numbers.to_iter_dataset(), seed=0)


def read(loader: Any, batches: int) -> list[Any]:
    return [batch.tolist() for batch in itertools.islice(loader, batches)]


loader = make()
head = read(loader, 3)
checkpoint = json.dumps(loader.state_dict())

loader = make()  # a new process
loader.load_state_dict(json.loads(checkpoint))
assert head + read(loader, 7) == read(make(), 10)
print("3 batches and the 7 after them are bit-equal to an epoch of 10")
