"""A run of Composer's Trainer with midepoch's callback, alone or under torchrun: ``composer_job.py FOLDER --cut 5``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import cpu_torchvision  # noqa: F401  Composer imports torchvision
import torch
from composer import Trainer
from composer.models import ComposerModel
from composer.utils import dist
from torch.utils.data import DataLoader

import midepoch
from midepoch.trainers.composer import ExactResume
from support import jobs

SIZE, GLOBAL_BATCH = 66, 6


class Model(ComposerModel):
    """Writes down what it is given, and draws from the process's generator."""

    def __init__(self, seen: list[Any], fail_at: int = -1) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.dropout = torch.nn.Dropout(0.3)
        self.seen, self.fail_at = seen, fail_at

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        if len(self.seen) == self.fail_at:
            raise ValueError("a bad batch")
        self.seen.append(batch.tolist())
        predicted: torch.Tensor = self.dropout(self.layer(batch / SIZE))
        return predicted

    def loss(self, outputs: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        return outputs.square().mean()


def make(folder: Path, resume: int | None = None, stop: str = "2ep", data: Any = None, **settings: Any) -> Any:
    """A Trainer, and the list to which its model adds what it sees."""
    seen: list[Any] = []
    batch_size = GLOBAL_BATCH // dist.get_world_size()
    source = DataLoader(jobs.Noisy(SIZE), batch_size, shuffle=True) if data is None else DataLoader(data, batch_size)
    model = Model(seen, **settings.pop("model", {}))
    trainer = Trainer(
        model=model, train_dataloader=midepoch.wrap(source, seed=3),
        device_train_microbatch_size=GLOBAL_BATCH, optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        max_duration=stop, save_folder=str(folder), save_filename="batch{batch}.pt", save_interval="1ba",
        save_overwrite=True, load_path=None if resume is None else str(folder / f"batch{resume}.pt"),
        callbacks=[ExactResume()], progress_bar=False, seed=7, device="cpu", **settings,
    )  # fmt: skip
    return trainer, seen


def finish(trainer: Any) -> tuple[Any, Any]:
    count = int(trainer.state.timestamp.epoch), int(trainer.state.timestamp.batch)
    weights = [each.detach().clone() for each in trainer.state.model.parameters()]
    trainer.close()
    return weights, count


def run(folder: Path, resume: int | None = None, stop: str = "2ep", **settings: Any) -> tuple[list[Any], Any, Any]:
    """Batches, weights and counts of a run from the beginning or from a checkpoint."""
    trainer, seen = make(folder, resume, stop, **settings)
    trainer.fit()
    return seen, *finish(trainer)


def every_cut(folder: Path) -> dict[str, bool]:
    """Whether batches, weights and counts are those of an undisturbed run, for a cut at each batch."""
    exact = {}
    subsets: dict[str, Any] = {
        "whole epochs": {},
        "five batches of each": {"train_subset_num_batches": 5},
        "unknown length": {"data": jobs.Stream(SIZE), "stop": "25ba"},
        "unknown length, more than there are": {"data": jobs.Stream(SIZE), "train_subset_num_batches": 20},
    }
    for name, settings in subsets.items():
        batches, weights, count = run(folder / name, **settings)
        few = [1, 10, 11, 12, 21] if "data" in settings else range(1, len(batches))
        for cut in few:
            again = run(folder / name, cut, **settings)
            same = all(map(torch.equal, again[1], weights))
            exact[f"{name}, cut at {cut}"] = same and (again[0], again[2]) == (batches[cut:], count)
    return exact


def others(folder: Path) -> dict[str, bool]:
    """Whether a Trainer that fits again goes on, and whether a batch that failed comes again."""
    batches, _, _ = run(folder / "whole")
    exact = {}
    for first, more in (("3ba", "19ba"), ("1ep", "1ep"), ("11ba", "11ba")):
        trainer, seen = make(folder / "again", stop=first)
        trainer.fit()
        trainer.fit(duration=more)
        exact[f"fit for {first}, then for {more}"] = seen == batches and finish(trainer)[1][1] == 22
    for fail_at in (3, 10, 11):
        trainer, seen = make(folder / "failing", model={"fail_at": fail_at})
        try:
            trainer.fit()
        except ValueError:
            trainer.save_checkpoint(str(folder / "failing" / "batch99.pt"))
        trainer.close()
        rest, _, _ = run(folder / "failing", 99)
        exact[f"batch {fail_at} failed"] = seen + rest == batches
    return exact


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--every-cut", action="store_true")
    parser.add_argument("--resume", type=int)
    parser.add_argument("--stop", default="2ep")
    options = parser.parse_args()
    if options.every_cut:
        (options.folder / "cuts").write_text(json.dumps({**every_cut(options.folder), **others(options.folder)}))
        return
    dist.initialize_dist("cpu")
    seen, _, count = run(options.folder, options.resume, options.stop)
    who = {"rank": dist.get_global_rank(), "world_size": dist.get_world_size()}
    log = options.folder / f"log-{who['world_size']}-{who['rank']}"
    for step, batch in enumerate(seen, (options.resume or 0) + 1):
        jobs.note(log, {**who, "step": step, "batch": batch})
    jobs.note(log, {**who, "count": count})


if __name__ == "__main__":
    main()
