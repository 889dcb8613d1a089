"""torchtitan's own Trainer on the CPU, fed by midepoch: ``torchrun ... torchtitan_job.py FOLDER --steps 5``.

Writes down every batch of every process. torchtitan trains on GPUs; what it asks of one here, a CPU is made to answer.
"""

from __future__ import annotations

import argparse
import json
import os
import types
from pathlib import Path
from typing import Any

import torch
import torch._utils
import torch.distributed
from torch.utils.data import DataLoader, Dataset

import midepoch
from support import jobs

SIZE, GLOBAL_BATCH, LENGTH = 60, 6, 16

vars(torch._utils)["_get_available_device_type"] = lambda: "cpu"
vars(torch.cpu).update(
    get_device_name=lambda device: "CPU", current_device=lambda: 0, device_count=lambda: 8,
    get_device_properties=lambda device: types.SimpleNamespace(total_memory=2**30, name="CPU"),
    reset_peak_memory_stats=lambda: None, empty_cache=lambda: None, memory_stats=lambda device: {},
)  # fmt: skip
vars(torch.distributed).setdefault("set_timeout", lambda timeout, group: None)  # of a torch to come

from torchtitan.models.llama3.config_registry import llama3_debugmodel  # noqa: E402

from midepoch.trainers.torchtitan import feed  # noqa: E402


class Texts(Dataset[Any]):
    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        tokens = torch.cat([torch.tensor([index]), torch.randint(100, (LENGTH,))])
        return {"input": tokens[:-1]}, tokens[1:]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    options = parser.parse_args()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    log = options.folder / f"log-{world_size}-{rank}"

    def make(world: midepoch.World, batch_size: int = 0, **keywords: Any) -> Any:
        if "num_tokens_per_batch" in keywords:
            batch_size = keywords["num_tokens_per_batch"] // keywords["max_context_length"]
        batch_size = keywords.get("local_batch_size", batch_size)
        return midepoch.wrap(DataLoader(Texts(), batch_size=batch_size, shuffle=True), seed=3, world=world)

    config = llama3_debugmodel()
    batch_size = GLOBAL_BATCH // (world_size // options.tensor_parallel)
    if hasattr(config.training, "seq_len"):  # up to 0.3
        config.training.seq_len, config.training.local_batch_size = LENGTH, batch_size
    else:
        config.training.max_context_length = LENGTH
        config.training.num_tokens_per_microbatch_per_dp_rank = LENGTH * batch_size
    config.training.steps = options.steps
    config.training.disable_cuda_graphs = True
    config.parallelism.spmd_backend = "partial_dtensor"
    config.parallelism.tensor_parallel_degree = options.tensor_parallel
    config.validator.enable = False
    config.dump_folder = str(options.folder / "out")
    config.checkpoint.enable = True
    config.checkpoint.interval = 5
    config.hf_assets_path = str(options.folder / "tokenizer")
    tokenizer(options.folder / "tokenizer")
    feed(config, make)
    trainer = config.build()

    def step(*, input_dict: Any, labels: Any, global_valid_tokens: Any) -> torch.Tensor:
        """In place of the model's forward and backward, whose attention runs on GPUs only."""
        batch = input_dict["input"].tolist()
        jobs.note(log, {"step": trainer.step, "rank": rank, "world_size": world_size, "batch": batch})
        for part in trainer.model_parts:
            for parameter in part.parameters():
                parameter.grad = torch.ones_like(parameter)
        return torch.zeros(())

    trainer.forward_backward_step = step
    trainer.train()
    if rank == 0:
        undisturbed = make(midepoch.World(), GLOBAL_BATCH)
        batches = [inputs["input"].tolist() for _ in range(3) for inputs, _ in undisturbed]
        (options.folder / "expected").write_text(json.dumps(batches))
    trainer.close()
    torch.distributed.destroy_process_group()


def tokenizer(folder: Path) -> None:
    """A tokenizer of some words, which torchtitan wants to see."""
    import tokenizers

    folder.mkdir(exist_ok=True)
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<s>": 0, "</s>": 1, "a": 2}, unk_token="a"))
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')


if __name__ == "__main__":
    main()
