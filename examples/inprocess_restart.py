"""NVIDIA's in-process restart: when a rank dies the others go on without it, from the checkpoint, at the very batch.

    export WORLD_SIZE=3 MASTER_ADDR=localhost MASTER_PORT=29600
    for RANK in 0 1 2; do RANK=$RANK python examples/inprocess_restart.py FOLDER & done; wait

Kill one with ``kill -9``, but not rank 0, which has the Wrapper's store.
"""

import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from nvidia_resiliency_ext.inprocess import CallWrapper, Wrapper
from torch.utils.data import DataLoader, TensorDataset

import midepoch
from midepoch.trainers.inprocess import feed

saved, port = Path(sys.argv[1], "saved.pt"), int(os.environ["MASTER_PORT"]) + 1
data = DataLoader(TensorDataset(torch.arange(600).reshape(600, 1)), batch_size=4, shuffle=True, num_workers=1)
loader = midepoch.wrap(data, seed=0, global_batch=24)  # a step, however many ranks are left


@Wrapper(monitor_thread_interval=timedelta(seconds=0.1), last_call_wait=timedelta(seconds=0.1))
def train(call: CallWrapper = None) -> None:
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])  # as the Wrapper sets them for this start
    dist.init_process_group("gloo", f"tcp://localhost:{port + call.iteration}", timedelta(seconds=15), ranks, rank)
    feed(call, loader)  # shared among the ranks that are left; at a restart, a state must follow
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW((model := torch.nn.Linear(1, 1)).parameters(), lr=0.01)
    parts: list[Any] = [model, optimizer, loader]
    if saved.exists():
        for part, state in zip(parts, torch.load(saved), strict=True):
            part.load_state_dict(state)
    else:
        loader.seek(epoch=0)  # the weights begin anew, too
    for epoch in loader.epochs(2):
        trained: list[int] = []
        for (ids,) in loader:
            (loader.weight * (model(ids / 600) - 1).square().mean()).backward()
            trained += ids.flatten().tolist()
            if loader.step_due:
                for gradient in [each.grad for each in model.parameters() if each.grad is not None]:
                    dist.all_reduce(gradient)
                    gradient /= ranks
                optimizer.step()
                optimizer.zero_grad()
                print(f"start {call.iteration}, epoch {epoch}, up to {loader.position}: rank {rank} took {trained}")
                trained = []
                if rank == 0 and loader.position % 120 == 0:
                    torch.save([part.state_dict() for part in parts], saved.with_suffix(".draft"))
                    saved.with_suffix(".draft").replace(saved)
    dist.destroy_process_group()


train()
