"""torch's DataLoader, and objects around one."""

from midepoch.adapters.dataloader.adapter import IterableDataLoaderAdapter, MapDataLoaderAdapter
from midepoch.adapters.dataloader.wrapper import WrapperAdapter

__all__ = ["IterableDataLoaderAdapter", "MapDataLoaderAdapter", "WrapperAdapter"]
