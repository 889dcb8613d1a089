"""Two loaders of unequal length as one: interrupted on two ranks, continued on three, nothing lost."""

from __future__ import annotations

import sys

from torch.utils.data import DataLoader

import midepoch


def make_loader(rank: int, world_size: int) -> midepoch.StatefulIterable:
    world = midepoch.World(rank, world_size)  # torchrun's environment says this by itself
    parts = {
        name: midepoch.wrap(DataLoader(data, batch_size=2, shuffle=True), seed=0, world=world)  # type: ignore[arg-type]
        for name, data in (("small", range(12)), ("large", range(100, 136)))
    }
    return midepoch.combine(parts, "weighted", weights={"small": 1, "large": 3}, seed=0)


def main() -> None:
    seen: list[int] = []
    two = [make_loader(rank, 2) for rank in range(2)]
    for _, *batches in zip(range(6), *two, strict=False):
        seen += [int(sample) for batch in batches for sample in batch]
    state = two[0].state_dict()  # any rank's will do

    for rank in range(3):
        loader = make_loader(rank, 3)
        loader.load_state_dict(state)
        seen += [int(sample) for batch in loader for sample in batch]
    everything = {*range(12), *range(100, 136)}
    again = len(seen) - len(everything)
    exact = set(seen) == everything and again <= 4  # what is left over of each part is padded to three equal shares
    print(f"24 samples on 2 ranks, the rest on 3: {'none lost' if exact else 'NOT exact'}, {again} repeated by padding")
    sys.exit(not exact)


if __name__ == "__main__":
    main()
