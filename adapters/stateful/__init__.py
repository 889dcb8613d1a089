"""Sources with their own state: StatefulDataLoader, Hugging Face's IterableDataset, Grain, and all others."""

from midepoch.adapters.stateful.adapter import StatefulAdapter
from midepoch.adapters.stateful.dataloaders import StreamAdapter
from midepoch.adapters.stateful.elastic import ElasticGrainAdapter, LitDataAdapter
from midepoch.adapters.stateful.energon import EnergonAdapter
from midepoch.adapters.stateful.packages import DatasetsAdapter, GrainAdapter
from midepoch.adapters.stateful.torchdata import TorchdataAdapter

__all__ = [
    "DatasetsAdapter", "ElasticGrainAdapter", "EnergonAdapter", "GrainAdapter", "LitDataAdapter",
    "StatefulAdapter", "StreamAdapter", "TorchdataAdapter",
]  # fmt: skip
