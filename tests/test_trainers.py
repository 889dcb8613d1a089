"""One line for each trainer, and a real run of it that is cut and continued."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
from torch.utils.data import DataLoader, Dataset

import midepoch
from midepoch import StateMismatchError

dcp: Any = torch.distributed.checkpoint  # which does not say what it exports


class Noisy(Dataset[dict[str, torch.Tensor]]):
    def __init__(self, size: int = 22) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.tensor([float(index), float(torch.rand(()))])}


def make(size: int = 22, batch_size: int = 2) -> midepoch.loader.Loader:
    return midepoch.wrap(DataLoader(Noisy(size), batch_size=batch_size, shuffle=True), seed=3)


def whole(epochs: int = 2, **settings: Any) -> list[Any]:
    loader = make(**settings)
    return [batch["x"].tolist() for _ in range(epochs) for batch in loader]


def rest(loader: midepoch.loader.Loader, epochs: int = 2) -> list[Any]:
    found: list[Any] = []
    while loader.epoch < epochs:
        found += [batch["x"].tolist() for batch in loader]
    return found


def head(loader: midepoch.loader.Loader, batches: int) -> list[Any]:
    endless = (batch for _ in itertools.count() for batch in loader)
    return [batch["x"].tolist() for batch in itertools.islice(endless, batches)]


# --- Hugging Face Trainer ---------------------------------------------------------------------------------------------


class Model(torch.nn.Module):
    """Writes down what it is given."""

    def __init__(self, seen: list[Any]) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.seen = seen

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        self.seen.append(x.tolist())
        return {"loss": self.layer(x / 22).square().mean()}


def hugging_face(
    folder: Path, seen: list[Any], loader: Any = None, resume: Any = None, stop_at: int = -1, **settings: Any
) -> Any:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from midepoch.adapters.trainers.transformers import feed

    class Stop(transformers.TrainerCallback):  # type: ignore[misc,name-defined]
        def on_step_end(self, arguments: Any, state: Any, control: Any, **keywords: Any) -> None:
            control.should_training_stop = control.should_training_stop or state.global_step == stop_at

    torch.manual_seed(0)
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), num_train_epochs=2, save_strategy="steps", save_steps=1, report_to=[], use_cpu=True,
        disable_tqdm=True, remove_unused_columns=False, learning_rate=0.1, **settings,
    )  # fmt: skip
    trainer = transformers.Trainer(model=Model(seen), args=arguments, callbacks=[Stop()])
    feed(trainer, loader or make())
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.mark.parametrize("accumulate", [1, 3])
def test_hugging_face_trainer(accumulate: int, tmp_path: Path) -> None:
    expected: list[Any] = []
    reference = hugging_face(tmp_path / "whole", expected, gradient_accumulation_steps=accumulate)
    assert expected == whole()
    steps = reference.state.global_step
    for cut in sorted({1, 3, steps // 2 - 1, steps // 2, steps // 2 + 1, steps - 1}):
        seen: list[Any] = []
        folder = tmp_path / f"cut{cut}"
        hugging_face(folder, seen, stop_at=cut, gradient_accumulation_steps=accumulate)
        again = hugging_face(
            folder, seen, resume=str(folder / f"checkpoint-{cut}"), gradient_accumulation_steps=accumulate
        )
        assert seen == expected, cut
        assert again.state.global_step == steps
        for one, two in zip(again.model.parameters(), reference.model.parameters(), strict=True):
            assert torch.equal(one, two), f"weights differ after a cut at step {cut}"


def test_hugging_face_trainer_on_another_split(tmp_path: Path) -> None:
    hugging_face(tmp_path, [], stop_at=5)
    with pytest.raises(StateMismatchError, match=r"an epoch had 11 batches .* and has 6 now"):
        hugging_face(tmp_path, [], loader=make(batch_size=4), resume=str(tmp_path / "checkpoint-5"))
    with pytest.raises(TypeError, match="feed takes a Trainer and a loader that was wrapped"):
        from midepoch.adapters.trainers.transformers import feed

        feed(make(), make())  # type: ignore[arg-type]


# --- one line each ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [0, 1, 7, 11, 14])
def test_fabric(cut: int, tmp_path: Path) -> None:
    fabric = pytest.importorskip("lightning").Fabric(accelerator="cpu")
    loader = make()
    before = head(loader, cut)
    fabric.save(tmp_path / "checkpoint", {"loader": loader})
    resumed = make()
    fabric.load(tmp_path / "checkpoint", {"loader": resumed})
    assert before + rest(resumed) == whole()


@pytest.mark.parametrize("cut", [0, 1, 7, 11, 14])
def test_accelerate(cut: int, tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    loader = make()
    accelerator.register_for_checkpointing(loader)
    before = head(loader, cut)
    accelerator.save_state(str(tmp_path))
    other = accelerate.Accelerator(cpu=True)
    resumed = make()
    other.register_for_checkpointing(resumed)
    other.load_state(str(tmp_path))
    assert before + rest(resumed) == whole()


@pytest.mark.parametrize("cut", [0, 1, 7, 11, 14])
@pytest.mark.parametrize("background", [False, True])
def test_distributed_checkpoint(background: bool, cut: int, tmp_path: Path) -> None:
    loader = make()
    before = head(loader, cut)
    if background:
        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
        try:
            saving = dcp.async_save({"loader": loader}, checkpoint_id=str(tmp_path / "checkpoint"))
            head(loader, 2)  # training goes on meanwhile
            saving.result()
        finally:
            torch.distributed.destroy_process_group()
    else:
        dcp.save({"loader": loader}, checkpoint_id=str(tmp_path / "checkpoint"))
    resumed = make()
    dcp.load({"loader": resumed}, checkpoint_id=str(tmp_path / "checkpoint"))
    assert before + rest(resumed) == whole()


def test_distributed_checkpoint_on_another_number_of_processes(tmp_path: Path) -> None:
    two = [midepoch.wrap(DataLoader(Noisy(24), batch_size=2), seed=3, world=midepoch.World(r, 2)) for r in range(2)]
    samples = [int(x) for loader in two for batch in head(loader, 2) for x, _ in batch]
    dcp.save({"loader": two[0]}, checkpoint_id=str(tmp_path))
    for rank in range(3):
        loader = midepoch.wrap(DataLoader(Noisy(24), batch_size=2), seed=3, world=midepoch.World(rank, 3))
        dcp.load({"loader": loader}, checkpoint_id=str(tmp_path))
        samples += [int(x) for batch in rest(loader, 1) for x, _ in batch]
    assert set(samples) == set(range(24)) and len(samples) - 24 <= 2


@pytest.mark.parametrize("cut", [1, 7, 11, 14])
def test_ignite(cut: int, tmp_path: Path) -> None:
    pytest.importorskip("ignite")
    from ignite.engine import Engine, Events
    from ignite.handlers import Checkpoint, DiskSaver

    def engine(loader: Any, seen: list[Any], stop: int = -1) -> tuple[Any, Any]:
        made = Engine(lambda engine, batch: seen.append(batch["x"].tolist()))
        saver = DiskSaver(str(tmp_path / str(cut)), create_dir=True, require_empty=False)
        checkpoint = Checkpoint({"trainer": made, "loader": loader}, saver, filename_pattern="checkpoint.pt")

        @made.on(Events.ITERATION_COMPLETED)
        def _save() -> None:
            if made.state.iteration == stop:
                checkpoint(made)
                made.terminate()

        return made, checkpoint

    seen: list[Any] = []
    loader = make()
    engine(loader, seen, cut)[0].run(loader, max_epochs=2)
    loader = make()
    resumed, _ = engine(loader, seen)
    saved = torch.load(next((tmp_path / str(cut)).iterdir()), weights_only=True)
    Checkpoint.load_objects({"trainer": resumed, "loader": loader}, saved)
    resumed.run(loader)
    assert seen == whole()


# --- contracts of trainers that are not installed here ----------------------------------------------------------------


def test_torchtitan_and_whatever_else_asks_for_stateful() -> None:
    """torchtitan's BaseDataLoader is torch's Stateful and an iterable: its trainer saves it with DCP under one key."""
    from torch.distributed.checkpoint.stateful import Stateful

    loader = make()
    assert isinstance(loader, Stateful) and isinstance(loader, midepoch.StatefulIterable)
    fresh, later = loader.state_dict(), make()
    head(later, 3)
    assert fresh.keys() == later.state_dict().keys(), "DCP loads by the keys of a fresh object"


def test_ray_train_and_composer_save_what_json_and_torch_save() -> None:
    """Both leave it to a checkpoint of the user's own, or to a callback's state_dict, which goes through torch.save."""
    loader = make()
    before = head(loader, 5)
    resumed = make()
    resumed.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    assert before + rest(resumed) == whole()


def test_no_trainer_is_imported_by_midepoch() -> None:
    code = "import midepoch, sys; print(sorted({'lightning', 'transformers', 'accelerate'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
