"""Loaders that leave positions out, and what each rank is to get of a list of positions."""

from __future__ import annotations

import random
from typing import Any

from torch.utils.data import DataLoader

import midepoch
from support import sources

Shape = tuple[int, int, str, bool, int | None]  # batch size, world size, tail, drop_last, global_batch
Plans = list[list[tuple[list[int], list[int]]]]  # by rank and step, the batch's own positions, and repeats


class Noisy(sources.Indices):
    """Each sample is its index and a random number."""

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index), random.random()


def wrapped(size: int, batch_size: int, drop_last: bool = False, **options: Any) -> midepoch.Loader:
    kinds = {"shuffle": options.pop("shuffle", True), "num_workers": options.pop("num_workers", 0)}
    if sampler := options.pop("sampler", None):
        kinds |= {"sampler": sampler, "shuffle": None}
    source: Any = DataLoader(Noisy(size), batch_size, drop_last=drop_last, collate_fn=list, **kinds)
    return midepoch.wrap(source, seed=5, **options)


def sample_of(size: int, shuffle: bool = True) -> Any:
    """From (epoch, position) to the sample there, as an undisturbed run gives it."""
    known: dict[int, list[Any]] = {}

    def at(epoch: int, position: int) -> Any:
        if epoch not in known:
            loader = wrapped(size, max(size, 1), shuffle=shuffle)
            loader.seek(epoch)
            known[epoch] = next(iter(loader), [])
        return known[epoch][position]

    return at


def shares(rest: list[int], unskipped: list[int], shape: Shape) -> Plans:
    """What each rank gets of a list of positions. `unskipped`: of the epoch. Written without `Share`."""
    batch_size, world, tail, drop_last, together = shape
    found: Plans = [[] for _ in range(world)]
    units = together or max(len(rest), 1)
    for whole_at in range(0, len(rest), units):
        whole = rest[whole_at : whole_at + units]
        if together and drop_last and len(whole) < together:
            break
        for at in range(0, len(whole), batch_size * world):
            part = whole[at : at + batch_size * world]
            each = len(part) // world if tail == "drop" else -(-len(part) // world)
            each = batch_size if len(part) == batch_size * world else each
            for rank in range(world):
                own = part[rank * each : (rank + 1) * each]
                lack, beyond = 0, 0
                if together and not own:
                    lack = batch_size
                elif tail == "pad" and not together:
                    lack, beyond = each - len(own), max(0, rank * each - len(part))
                repeats = [unskipped[(beyond + i) % len(unskipped)] for i in range(lack)]
                if (count := len(own) + lack) and (together or not drop_last or count == batch_size):
                    found[rank].append((own, repeats))
    return found
