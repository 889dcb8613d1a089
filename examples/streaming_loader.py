"""mosaicml-streaming's own example of resuming: the state after batch 4, stopped after 6, continued with batch 5."""

from __future__ import annotations

import sys
import tempfile

import numpy as np
from streaming import MDSWriter, StreamingDataLoader, StreamingDataset

import midepoch


def write(folder: str) -> None:
    generator = np.random.default_rng(0)
    with MDSWriter(out=folder, columns={"image": "ndarray:float32:8", "label": "int"}) as writer:
        for label in range(256):
            writer.write({"image": generator.random(8, dtype=np.float32), "label": label})


def make_loader(folder: str) -> midepoch.Loader:
    dataset = StreamingDataset(local=folder, batch_size=32, shuffle=True)
    return midepoch.wrap(StreamingDataLoader(dataset, batch_size=32))


def main() -> None:
    folder = tempfile.mkdtemp()
    write(folder)
    loader = make_loader(folder)
    before = []
    for number, batch in enumerate(loader, loader.batches_done + 1):
        before.append(batch["label"].tolist())
        if number == 4:
            state = loader.state_dict()
        if number == 6:
            break  # the job dies here
    del loader  # Streaming allows one dataset at a time on a folder

    resumed = make_loader(folder)
    resumed.load_state_dict(state)
    after = [batch["label"].tolist() for batch in resumed]
    labels = [label for batch in before[:4] + after for label in batch]
    exact = after[:2] == before[4:] and sorted(labels) == list(range(256))
    print(f"batches 5 to 8 of 8 after the resume: {'exact' if exact else 'NOT exact'}")
    sys.exit(not exact)


if __name__ == "__main__":
    main()
