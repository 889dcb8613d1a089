"""Replica groups that die and come back: the shape of torchft's train_ddp.py, fed by midepoch.

    torchft_lighthouse --min_replicas 1 --join_timeout_ms 1000
    TORCHFT_LIGHTHOUSE=http://localhost:29510 python examples/torchft_groups.py FOLDER GROUP    # for each GROUP

A process of each group; kill one with ``pkill -9 -f "torchft_groups.py FOLDER 1"``, and start it again.
"""

import sys
from datetime import timedelta
from pathlib import Path

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.utils.data import DataLoader, TensorDataset
from torchft import Manager, Optimizer, ProcessGroupGloo

import midepoch
from midepoch.trainers.torchft import feed

folder, group = Path(sys.argv[1]), sys.argv[2]
inputs = torch.randn(600, 8, generator=torch.Generator().manual_seed(0))
store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
model = torch.nn.Linear(8, 1)
plain = torch.optim.AdamW(model.parameters(), lr=0.01)
manager = Manager(
    pg=ProcessGroupGloo(timeout=timedelta(seconds=5)), min_replica_size=1, replica_id=f"group_{group}", rank=0,
    world_size=1, store_addr="localhost", store_port=store.port, load_state_dict=None, state_dict=None,
)  # fmt: skip
manager.register_state_dict_fn("model", model.load_state_dict, model.state_dict)
manager.register_state_dict_fn("optimizer", plain.load_state_dict, plain.state_dict)
optimizer = Optimizer(manager, plain)

loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=16, shuffle=True)
batches = feed(manager, midepoch.wrap(loader, seed=0, world=midepoch.World(), tail="uneven"))

saved = {"model": model, "optimizer": plain, "manager": manager, "data": batches}
if (folder / "saved.pt").exists():  # all groups have died
    for name, state in torch.load(folder / "saved.pt").items():
        saved[name].load_state_dict(state)

while batches.epoch < 3:
    for x, y in batches:
        optimizer.zero_grad()
        loss = batches.weight * (model(x) - y).square().mean()
        loss.backward()
        # torchft's DistributedDataParallel does this in backward. In 0.2.0 it raises an AssertionError there when
        # another group dies meanwhile, before the vote can fail.
        for parameter in model.parameters():
            manager.allreduce(parameter.grad).wait()
        optimizer.step()
        print(f"step {manager.current_step()} of {manager.num_participants()} groups", flush=True)
        if manager.current_step() % 10 == 0 and manager.participating_rank() == 0:
            torch.save({name: part.state_dict() for name, part in saved.items()}, folder / group)
            (folder / group).replace(folder / "saved.pt")
manager.shutdown()
