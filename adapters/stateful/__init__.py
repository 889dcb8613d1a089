"""Sources with their own state: StatefulDataLoader, Hugging Face's IterableDataset, Grain, and all others."""

from midepoch.adapters.stateful.adapter import StatefulAdapter
from midepoch.adapters.stateful.packages import DatasetsAdapter, GrainAdapter
from midepoch.adapters.stateful.torchdata import TorchdataAdapter

__all__ = ["DatasetsAdapter", "GrainAdapter", "StatefulAdapter", "TorchdataAdapter"]
