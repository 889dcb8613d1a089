"""LitData: its StreamingDataLoader with the calls that every loader here has.

``python examples/litdata_loader.py FOLDER``, where the data is written first
"""

from __future__ import annotations

import itertools
import json
import sys
from typing import Any

import litdata

import midepoch


def sample(number: int) -> dict[str, int]:
    return {"number": number}


def make() -> Any:
    dataset = litdata.StreamingDataset(sys.argv[1], shuffle=True, seed=1)
    return midepoch.wrap(litdata.StreamingDataLoader(dataset, batch_size=4), seed=0)


def read(loader: Any, batches: int) -> list[Any]:
    return [batch["number"].tolist() for batch in itertools.islice(loader, batches)]


if __name__ == "__main__":
    litdata.optimize(sample, inputs=list(range(40)), output_dir=sys.argv[1], chunk_bytes="64MB", num_workers=1)
    loader = make()
    head = read(loader, 3)
    checkpoint = json.dumps(loader.state_dict())

    loader = make()  # a new process
    loader.load_state_dict(json.loads(checkpoint))
    assert head + read(loader, 7) == read(make(), 10)
    print("3 batches and the 7 after them are bit-equal to an epoch of 10")
