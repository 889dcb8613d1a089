"""`midepoch trace` of sources that cannot skip, and whose order follows from the source alone."""

from __future__ import annotations

import copy
import importlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import midepoch
from midepoch.tools.trace import trace

_FOLDER = "MIDEPOCH_TRACED_IMAGES"  # where the loader that is made anew finds its images


def of_dali(rank: int = 0, world_size: int = 1) -> Any:
    from support import dali_sources

    return dali_sources.sampled(rank, world_size, root=os.environ[_FOLDER], seed=3)


def parts_of(batch: Any) -> list[Any]:
    if isinstance(batch, dict):
        batch = list(batch.values())
    if isinstance(batch, torch.Tensor):
        return [batch.tolist()]
    return [part for each in batch for part in parts_of(each)]


@pytest.mark.parametrize(("package", "support", "make"), [
    ("ffcv", "ffcv_sources", "support.ffcv_sources:plain_load"),
    ("nvidia.dali", "dali_sources", f"{__file__}:of_dali"),
    ("webdataset", "webdataset_sources", "support.webdataset_sources:indexed"),
])  # fmt: skip
def test_the_source_tells_its_order(
    package: str, support: str, make: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(package)
    sources: Any = importlib.import_module(f"support.{support}")
    if package == "nvidia.dali":
        monkeypatch.setenv(_FOLDER, str(sources.write_images(tmp_path / "images")))
    made = of_dali if package == "nvidia.dali" else getattr(sources, make.partition(":")[2])
    seen: dict[int, Any] = {}
    loader = made(rank=0, world_size=2)
    with midepoch.Snapshot(tmp_path / "snapshot.pt", ledger=True, signals=(), data=loader) as snapshot:
        for _ in snapshot.epochs(2):
            for batch in loader:
                snapshot.step()
                seen[snapshot.steps] = copy.deepcopy(parts_of(batch)), sources.identify(batch)
        snapshot.save()
    loader.close()
    with pytest.raises(midepoch.UnsupportedSourceError, match="pass --source"):
        trace(tmp_path, 2)
    for step in (1, len(seen) // 2, len(seen)):
        (told,) = trace(tmp_path, step, rank=0, source=make, out=tmp_path / f"{step}.pt")["rows"]
        batch, indices = seen[step]
        assert told["indices"] == indices
        ((again,),) = torch.load(tmp_path / f"{step}.pt", weights_only=False).values()
        assert parts_of(again) == batch, "bit for bit"
    index = seen[2][1][0]
    given = trace(tmp_path, sample=index, rank=0, source=make)["rows"]
    assert [each["step"] for each in given] == [step for step, (_, indices) in seen.items() if index in indices]
