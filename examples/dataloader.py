"""A DataLoader that is interrupted in the middle of an epoch, and goes on in another process on other workers."""

from __future__ import annotations

import json
import random
import sys
import tempfile
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

import midepoch


class Augmented(Dataset[torch.Tensor]):
    """Samples with a random augmentation, drawn from python's global generator as such code does."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, random.random()], dtype=torch.float64)


def make_loader(num_workers: int) -> midepoch.Loader:
    return midepoch.wrap(DataLoader(Augmented(), batch_size=4, shuffle=True, num_workers=num_workers), seed=0)


def main() -> None:
    whole = list(make_loader(num_workers=0))
    checkpoint = Path(tempfile.mkdtemp()) / "data.json"

    loader = make_loader(num_workers=0)
    for number, batch in enumerate(loader, loader.batches_done + 1):
        assert torch.equal(batch, whole[number - 1])
        checkpoint.write_text(json.dumps(loader.state_dict()))
        if number == 3:
            break  # the job dies here

    loader = make_loader(num_workers=2)
    loader.load_state_dict(json.loads(checkpoint.read_text()))
    rest = list(loader)
    same = len(rest) == 5 and all(torch.equal(a, b) for a, b in zip(rest, whole[3:], strict=True))
    print(f"resumed at batch 4 of 8; the other 5 are {'bit-equal' if same else 'DIFFERENT'}")
    sys.exit(not same)


if __name__ == "__main__":
    main()
