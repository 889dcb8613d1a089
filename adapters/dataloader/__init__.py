"""torch's DataLoader."""

from midepoch.adapters.dataloader.adapter import IterableDataLoaderAdapter, MapDataLoaderAdapter

__all__ = ["IterableDataLoaderAdapter", "MapDataLoaderAdapter"]
