"""Sources that keep a state of their own: StatefulDataLoader, Hugging Face's IterableDataset, Grain, and all others."""

from midepoch.adapters.stateful.adapter import DatasetsAdapter, GrainAdapter, StatefulAdapter, TorchdataAdapter

__all__ = ["DatasetsAdapter", "GrainAdapter", "StatefulAdapter", "TorchdataAdapter"]
