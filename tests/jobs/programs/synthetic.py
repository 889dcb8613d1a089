"""Data for the programs: small, made up, and augmented at random."""

from __future__ import annotations

import torch
from torch.utils.data import Dataset


class Pictures(Dataset[tuple[torch.Tensor, int]]):
    """Pictures of 8 x 8 with labels. For training they are flipped and blurred by chance."""

    def __init__(self, size: int, train: bool, channels: int = 3) -> None:
        generator = torch.Generator().manual_seed(size)
        self.pictures = torch.randn(size, channels, 8, 8, generator=generator)
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


class Rows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Twenty numbers and one to be guessed."""

    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(size)
        self.data = [(torch.rand(20, generator=generator), torch.rand(1, generator=generator)) for _ in range(size)]

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.data[index]


class Characters(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Blocks of a text, as numbers; the targets are one character further on."""

    def __init__(self, size: int, block_size: int = 8) -> None:
        self.text = torch.randint(16, (size + block_size,), generator=torch.Generator().manual_seed(size))
        self.size, self.block_size = size, block_size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        block = self.text[index : index + self.block_size + 1]
        return block[:-1], block[1:]
