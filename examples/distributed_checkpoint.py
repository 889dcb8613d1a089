"""torch.distributed.checkpoint takes a loader as it takes a model.

``python examples/distributed_checkpoint.py FOLDER``: kill it at any time, run it again, and it goes on at that batch.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.utils.data import DataLoader, Dataset

import midepoch


class Noisy(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index / 40]) + 0.1 * torch.randn(1)


class Training:
    """As torch's recipe has it: an optimizer that was made again has no state that could be loaded into."""

    def state_dict(self) -> Any:
        return get_state_dict(model, optimizer)

    def load_state_dict(self, state: Any) -> None:
        set_state_dict(model, optimizer, model_state_dict=state[0], optim_state_dict=state[1])


torch.manual_seed(0)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
loader = midepoch.wrap(DataLoader(Noisy(), batch_size=4, shuffle=True), seed=0)
state: dict[str, Any] = {"training": Training(), "loader": loader, "step": 0}

folder = Path(sys.argv[1])
if checkpoints := sorted(folder.glob("batch-*"), key=lambda path: int(path.name[6:])):
    dcp.load(state, checkpoint_id=checkpoints[-1])  # type: ignore[attr-defined]
for _ in loader.epochs(2):
    for batch in loader:
        loss: torch.Tensor = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        state["step"] += 1
        print(f"batch {state['step']}: {batch.tolist()}, loss {loss.item()}", flush=True)
        if state["step"] % 3 == 0 or state["step"] == 2 * len(loader):
            # Of several processes the first alone renames, between two barriers.
            dcp.save(state, checkpoint_id=folder / "draft")  # type: ignore[attr-defined]
            (folder / "draft").rename(folder / f"batch-{state['step']}")  # whoever is killed in a save has those before
        time.sleep(0.1)  # so that there is time to kill it
