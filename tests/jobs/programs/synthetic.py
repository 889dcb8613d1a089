"""What the programs share: small data, made up and augmented at random, and a meter."""

from __future__ import annotations

import torch
from torch import distributed as dist
from torch.utils.data import Dataset


class Pictures(Dataset[tuple[torch.Tensor, int]]):
    """Pictures of 8 x 8 with labels. For training they are flipped and blurred by chance."""

    def __init__(self, size: int, train: bool) -> None:
        generator = torch.Generator().manual_seed(size)
        self.pictures = torch.randn(size, 3, 8, 8, generator=generator)
        self.labels = torch.randint(10, (size,), generator=generator).tolist()
        self.train = train

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        picture = self.pictures[index]
        if self.train:
            if torch.rand(()) < 0.5:
                picture = picture.flip(-1)
            picture = picture + 0.1 * torch.randn(picture.shape)
        return picture, int(self.labels[index])


class AverageMeter:
    def __init__(self) -> None:
        self.avg = self.sum = 0.0
        self.count = 0

    def update(self, val: float, n: int = 1) -> None:
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count

    def all_reduce(self) -> None:
        total = torch.tensor([self.sum, self.count], dtype=torch.float64)
        dist.all_reduce(total)
        self.avg = float(total[0] / total[1])
