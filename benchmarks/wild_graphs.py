"""A loader of torch_geometric, over a sampler that draws neighbours with torch's generator."""

from __future__ import annotations

from typing import Any

import torch
from torch_geometric.data import Data
from torch_geometric.loader import NodeLoader
from torch_geometric.sampler import BaseSampler, SamplerOutput


class Neighbours(BaseSampler):  # type: ignore[misc]
    """Two nodes for each root."""

    def __init__(self, size: int) -> None:
        self.size = size

    def sample_from_nodes(self, index: Any, **keywords: Any) -> Any:
        count = len(index.node)
        nodes = torch.cat([index.node, torch.randint(self.size, (2 * count,))])
        roots = torch.arange(count).repeat(2)
        metadata = index.input_id, None
        return SamplerOutput(
            node=nodes, row=torch.arange(count, 3 * count), col=roots, edge=None, batch=None, metadata=metadata
        )

    def sample_from_edges(self, index: Any, **keywords: Any) -> Any:
        raise NotImplementedError


def with_noise(data: Any) -> Any:
    data.noise = torch.rand(len(data.x))
    return data


def loader(size: int, batch: int, **keywords: Any) -> Any:
    data = Data(x=torch.arange(2.0 * size).view(size, 2), edge_index=torch.arange(size).repeat(2, 1))
    return NodeLoader(
        data, Neighbours(size), input_nodes=torch.arange(size), batch_size=batch, shuffle=True, transform=with_noise,
        **keywords,
    )  # fmt: skip
