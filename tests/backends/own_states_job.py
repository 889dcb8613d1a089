"""A job for torchrun over a source that divides itself: reads some batches, and leaves a state for the next run.

``torchrun ... own_states_job.py FOLDER KIND BATCHES GLOBAL_BATCH``; BATCHES 0 reads what is left of the epoch. Each
rank writes down its samples, the warnings, and the error of a state that was refused.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import cpu_torchvision  # noqa: F401  # before what imports torchvision
import torch.distributed

import midepoch
from support import own_state_sources as own

SIZE, WORKERS = 72, 6


def run(folder: Path, kind: str, ranks: int, batches: int, global_batch: int = 12) -> list[dict[str, Any]]:
    """Run it on so many ranks of a real torchrun. What each has written down."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    environment |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    written(kind)  # by one process
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    options = map(str, (folder, kind, batches, global_batch))
    ended = subprocess.run(
        [sys.executable, *torchrun, __file__, *options],
        env=environment, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return [json.loads((folder / f"{ranks}-{rank}.json").read_text()) for rank in range(ranks)]


def samples(found: list[dict[str, Any]]) -> list[int]:
    """Of all ranks together."""
    return [sample for rank in found for batch in rank["samples"] for sample in batch]


def written(kind: str) -> Any:
    """The data of a kind."""
    if kind == "litdata":
        return own.written_by_litdata(SIZE)
    if kind == "energon":
        from support import energon_sources

        return energon_sources.kept(SIZE)
    return None


def source(kind: str, rank: int, world_size: int, global_batch: int) -> Any:
    if kind == "elastic":
        return own.grain_elastic(rank, world_size, global_batch, SIZE)
    if kind == "litdata":
        import litdata

        dataset = litdata.StreamingDataset(written(kind), shuffle=True, seed=3)
        return litdata.StreamingDataLoader(dataset, batch_size=global_batch // world_size)
    from support import energon_sources

    # Energon's rule: all ranks together keep their number of worker processes, and each its batch size.
    return energon_sources.validation(written(kind), rank, world_size, WORKERS // world_size)


def numbers(batch: Any) -> list[int]:
    return [int(text) for text in batch.text] if hasattr(batch, "text") else own.identify(batch)


def main() -> None:
    folder, kind, batches, global_batch = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    torch.distributed.init_process_group("gloo")
    world = midepoch.World.current()
    made = source(kind, world.rank, world.world_size, global_batch)
    redistributed = sorted(folder.glob(f"energon-{world.world_size}/*"))
    if redistributed:  # by Energon's own tool, before it is wrapped
        made.restore_state_rank(torch.load(redistributed[world.rank], weights_only=False))
    loader = midepoch.wrap(made, seed=5)
    found: dict[str, Any] = {"world_size": world.world_size, "rank": world.rank, "samples": []}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", midepoch.MidepochWarning)
        try:
            if (folder / "state.json").exists() and not redistributed:
                loader.load_state_dict(json.loads((folder / "state.json").read_text()))
            for batch in loader:
                found["samples"].append(numbers(batch))
                if len(found["samples"]) == batches:
                    break
        except midepoch.StateError as error:
            found["refused"] = str(error)
    found["told"] = [str(each.message) for each in caught]
    if batches:
        state = midepoch.gather(loader)
        if world.rank == 0:
            (folder / "state.json").write_text(json.dumps(state))
        if kind == "energon":
            kept = folder / "energon"
            kept.mkdir(exist_ok=True)
            states = made.save_state_global(0)
            if world.rank == 0:
                for rank, each in enumerate(states):
                    torch.save(each, kept / f"dataloader_state_{rank}.pt")
    (folder / f"{world.world_size}-{world.rank}.json").write_text(json.dumps(found))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    os._exit(0)


if __name__ == "__main__":
    main()
