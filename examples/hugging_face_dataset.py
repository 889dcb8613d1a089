"""Hugging Face datasets: a stream with its own state, and a table in a DataLoader, exact on any number of ranks.

``python examples/hugging_face_dataset.py``
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import datasets
from torch.utils.data import DataLoader

import midepoch

TABLE = datasets.Dataset.from_dict({"number": list(range(40))})


def stream() -> Any:
    return midepoch.wrap(TABLE.to_iterable_dataset(num_shards=4).batch(4), seed=0)


def table() -> Any:
    source: Any = TABLE.with_format("torch")
    return midepoch.wrap(DataLoader(source, batch_size=4, shuffle=True), seed=0)


def read(loader: Any, batches: int) -> list[Any]:
    return [list(map(int, batch["number"])) for batch in itertools.islice(loader, batches)]


def resume(make: Callable[[], Any]) -> None:
    loader = make()
    head = read(loader, 3)
    checkpoint = json.dumps(loader.state_dict())

    loader = make()  # a new process
    loader.load_state_dict(json.loads(checkpoint))
    assert head + read(loader, 7) == read(make(), 10)


resume(stream)
resume(table)
print("3 batches and the 7 after them are bit-equal to an epoch of 10, of the stream and of the table")
