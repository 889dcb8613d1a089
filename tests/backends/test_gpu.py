"""On a GPU: each backend resumes to the bit in a new process, and states go from one backend of ranks to another.

The same programs run on the processor as a long form, so that a machine with a GPU finds them in order.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gpu_programs
import pytest
import torch

from support.places import ROOT

PROGRAM = Path(gpu_programs.__file__)

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
on_each_device = pytest.mark.parametrize(
    "device",
    [pytest.param("cuda:0", marks=[pytest.mark.gpu, needs_gpu]), pytest.param("cpu", marks=pytest.mark.long)],
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("gpu")
    gpu_programs.write_images(made)
    return made


def start(device: str, folder: Path, *arguments: str, status: int = 0) -> Any:
    """What a program prints last."""
    quickly = {"NUMBA_OPT": "0", **os.environ}  # FFCV compiles for longer than it reads
    command = [sys.executable, str(PROGRAM), device, str(folder), *arguments]
    done = subprocess.run(command, env=quickly, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == status, done.stderr[-3000:]
    return None if status else json.loads(done.stdout.splitlines()[-1])


def backend_of(name: str) -> str:
    return {"dali": "nvidia.dali", "dali-fed": "nvidia.dali", "ffcv": "ffcv"}.get(name, "torch")


@on_each_device
@pytest.mark.parametrize("name", gpu_programs.LOADERS)
def test_a_new_process_goes_on_to_the_bit(folder: Path, device: str, name: str) -> None:
    pytest.importorskip(backend_of(name))
    whole = start(device, folder, name)
    epochs = whole["epochs"]
    assert whole["devices"] == [device] and whole["untouched"]
    assert len({each for batches in epochs for each in batches}) == sum(map(len, epochs))
    resumed = start(device, folder, name, json.dumps(list(whole["states"].values())))
    for place, rest in zip(whole["states"], resumed, strict=True):
        epoch, number = map(int, place.split(","))
        left = [epochs[epoch][number + 1 :], *epochs[epoch + 1 :]]
        expected = left[1:] if not left[0] else left  # a state at an end begins the next epoch
        assert rest == expected[:2], place


@on_each_device
def test_a_prefetcher_on_a_stream_of_its_own_goes_on(folder: Path, device: str) -> None:
    whole, resumed = start(device, folder, "prefetch")
    assert len(set(whole)) == 8
    assert resumed == whole


@on_each_device
def test_a_snapshot_of_a_killed_process_goes_on(folder: Path, device: str) -> None:
    whole = start(device, folder, "train", f"whole-{device}", "0")
    start(device, folder, "train", f"killed-{device}", "8", status=9)
    resumed = start(device, folder, "train", f"killed-{device}", "0")
    assert resumed == {"losses": whole["losses"][5:], "weights": whole["weights"]}


@pytest.mark.gpu
@needs_gpu
def test_lightning_on_a_gpu_goes_on(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")
    from midepoch.trainers.lightning import ExactResume

    class Model(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 1), torch.nn.Dropout(0.2))
            self.seen: list[Any] = []

        def training_step(self, batch: Any, _: int) -> Any:
            loss = self.layers(batch[0]).pow(2).mean()
            self.seen.append((batch[1].tolist(), loss.item(), str(batch[0].device)))
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 1e-4)

    def fit(steps: int, checkpoint: str | None = None) -> list[Any]:
        torch.manual_seed(1)
        model, quiet = Model(), {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        trainer = lightning.Trainer(
            accelerator="gpu", devices=1, max_epochs=2, max_steps=steps, default_root_dir=tmp_path,
            callbacks=[ExactResume()], **quiet,
        )  # fmt: skip
        trainer.fit(model, gpu_programs.loader(torch.device("cuda", 0), 2), ckpt_path=checkpoint)
        trainer.save_checkpoint(tmp_path / f"{steps}.ckpt")
        return model.seen

    whole = fit(-1)
    assert whole[0][2] == "cuda:0"
    assert fit(5) + fit(-1, str(tmp_path / "5.ckpt")) == whole


@pytest.mark.gpu
@needs_gpu
def test_nccl_with_one_process_then_gloo_with_two_on_one_device(tmp_path: Path) -> None:
    def share(processes: int, backend: str, cut: str) -> list[int]:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        done = subprocess.run(
            [*torchrun, PROGRAM, "cuda:0", tmp_path, "share", backend, cut],
            env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        read: list[int] = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("[")))
        return read

    first = share(1, "nccl", "cut")
    assert len(first) == 12
    assert sorted(first + share(2, "gloo", "whole")) == list(range(64))


@pytest.mark.long
@pytest.mark.parametrize("question", ["crops", "dali", "ffcv", "load"])
def test_the_benchmark_runs_without_a_gpu(question: str) -> None:
    pytest.importorskip({"ffcv": "ffcv", "load": "torch"}.get(question, "nvidia.dali"))
    benchmark = ROOT / "benchmarks" / "gpu.py"
    quickly = {"NUMBA_OPT": "0", **os.environ}
    command = [sys.executable, str(benchmark), question, "--rounds", "2", "--scale", "0.001"]
    done = subprocess.run(command, env=quickly, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    heading, *lines = [line for line in done.stdout.splitlines() if line]
    assert f"torch {torch.__version__}" in heading
    rows = [line.split(" | ") for line in lines if line.startswith("| ") and line[2] != "|"]
    assert len(rows) == {"crops": 8, "dali": 6}.get(question, 2)
    assert all(float(row[1].replace(",", "")) > 0 for row in rows)


@pytest.mark.gpu
@needs_gpu
def test_a_digest_of_a_batch_on_a_gpu_is_that_on_the_cpu() -> None:
    from midepoch.testing import digest

    batch = {"image": torch.rand(4, 3, 8, 8), "half": torch.rand(5).bfloat16(), "turned": torch.rand(6, 2).T}
    moved = {name: part.cuda() for name, part in batch.items()}
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    assert digest(moved) == digest(batch)
    held = sum(part.numel() * part.element_size() for part in batch.values())
    assert torch.cuda.max_memory_allocated() - before < held  # nothing is copied on the device but what is turned
