"""Ray Train, ``ray_job.py FOLDER``: of two workers one kills itself, both go on, and then three finish the run.

``ray_job.py FOLDER elastic``: as many workers as there are machines, of which one joins and leaves again. Each worker
writes down every batch.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import ray.cluster_utils
import ray.train
import ray.train.torch
import torch
from torch.utils.data import DataLoader

import midepoch
from support import jobs

SIZE, GLOBAL_BATCH, EPOCHS = 72, 6, 2


def train(settings: dict[str, Any]) -> None:
    context = ray.train.get_context()
    rank, world_size = context.get_world_rank(), context.get_world_size()
    folder = Path(settings["folder"])
    data = DataLoader(jobs.Noisy(SIZE), batch_size=GLOBAL_BATCH // world_size, shuffle=True)
    loader = midepoch.wrap(data, seed=3)
    torch.manual_seed(0)
    model = ray.train.torch.prepare_model(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    steps = 0
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as saved:
            state = torch.load(Path(saved) / "state.pt", weights_only=True)
        steps = state["steps"]
        model.load_state_dict(state["model"])
        loader.load_state_dict(state["loader"])
    log = folder / f"log-{world_size}-{rank}-{os.getpid()}"
    while loader.epoch < EPOCHS and steps < settings["stop_at"]:
        for batch in loader:
            steps += 1
            time.sleep(settings["pause"])
            jobs.note(log, {"step": steps, "rank": rank, "world_size": world_size, "batch": batch.tolist()})
            if steps == settings["kill_at"] and rank == world_size - 1 and not (folder / "killed").exists():
                (folder / "killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            model(batch / SIZE).square().mean().backward()
            optimizer.step()
            with tempfile.TemporaryDirectory() as draft:
                checkpoint = None
                state = {"steps": steps, "model": model.state_dict(), "loader": midepoch.gather(loader)}
                if rank == 0:
                    torch.save(state, Path(draft) / "state.pt")
                    checkpoint = ray.train.Checkpoint.from_directory(draft)
                ray.train.report({"steps": steps}, checkpoint=checkpoint)
            if steps == settings["stop_at"]:
                break


def fit(folder: Path, workers: int | tuple[int, int], kill_at: int, stop_at: int, pause: float = 0.0) -> None:
    """One run of Ray's, under a name that it knows again."""
    run = ray.train.RunConfig(
        name="run", storage_path=str(folder / "storage"), failure_config=ray.train.FailureConfig(max_failures=3),
        checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
    )  # fmt: skip
    ray.train.torch.TorchTrainer(
        train, run_config=run, torch_config=ray.train.torch.TorchConfig(backend="gloo"),
        train_loop_config={"folder": str(folder), "kill_at": kill_at, "stop_at": stop_at, "pause": pause},
        scaling_config=ray.train.ScalingConfig(num_workers=workers, elastic_resize_monitor_interval_s=1),
    ).fit()  # fmt: skip


def reached(folder: Path, workers: int, steps: int) -> bool:
    return any(len(log.read_text().splitlines()) >= steps for log in folder.glob(f"log-{workers}-*"))


def elastic(folder: Path) -> None:
    """Two machines, a third one that joins, and leaves again."""
    cluster = ray.cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    ray.init(cluster.address, log_to_driver=False)

    # Machines are started by the main thread only.
    training = threading.Thread(target=fit, args=(folder, (1, 3), 0, SIZE, 0.5))
    training.start()
    while not reached(folder, 2, 2):
        time.sleep(0.1)
    third = cluster.add_node(num_cpus=1)
    while not reached(folder, 3, 3):
        time.sleep(0.1)
    cluster.remove_node(third, allow_graceful=False)
    training.join()
    # Otherwise the machines may end first, and this process with them, by an error.
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__" and sys.argv[2:]:
    elastic(Path(sys.argv[1]))
elif __name__ == "__main__":
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    fit(Path(sys.argv[1]), workers=2, kill_at=5, stop_at=8)
    fit(Path(sys.argv[1]), workers=3, kill_at=0, stop_at=SIZE)
