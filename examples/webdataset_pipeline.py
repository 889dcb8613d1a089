"""A webdataset pipeline is interrupted in the middle of an epoch, and goes on with another number of workers.

python examples/webdataset_pipeline.py [folder for the shards]
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import webdataset as wds

import midepoch


def write_shards(folder: Path) -> str:
    for shard in range(4):
        with wds.TarWriter(str(folder / f"train-{shard}.tar")) as writer:
            for index in range(25):
                number = 25 * shard + index
                writer.write({"__key__": f"{number:06d}", "npy": np.full(8, number), "cls": number})
    return str(folder / "train-{0..3}.tar")


def augment(array: Any) -> Any:
    return array + np.random.normal(0, 0.1, array.shape)


def make_loader(urls: str, workers: int) -> midepoch.Loader:
    dataset = wds.WebDataset(urls, shardshuffle=100).shuffle(1000).decode()
    dataset = dataset.to_tuple("npy", "cls").map_tuple(augment, None).batched(8)
    return midepoch.wrap(wds.WebLoader(dataset, batch_size=None, num_workers=workers), seed=0)


def main(folder: Path) -> None:
    urls = write_shards(folder)
    seen: list[int] = []
    checkpoint: dict[str, Any] = {}

    loader = make_loader(urls, workers=2)
    for step, (_, labels) in enumerate(loader, loader.batches_done):
        seen += labels.tolist()
        checkpoint["data"] = loader.state_dict()
        if step == 4:
            print(f"interrupted after {len(seen)} samples; the state: {checkpoint['data']}")
            break

    loader = make_loader(urls, workers=1)
    loader.load_state_dict(checkpoint["data"])
    for _, labels in loader:
        seen += labels.tolist()
    print(f"every sample once: {sorted(seen) == list(range(100))}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()))
