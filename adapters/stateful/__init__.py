"""Sources with their own state: StatefulDataLoader, Hugging Face's IterableDataset, Grain, and all others."""

from midepoch.adapters.stateful.adapter import DatasetsAdapter, GrainAdapter, StatefulAdapter, TorchdataAdapter

__all__ = ["DatasetsAdapter", "GrainAdapter", "StatefulAdapter", "TorchdataAdapter"]
