"""Lets torchvision, which mosaicml-streaming and LitData import, be imported beside a CPU build of torch.

Its wheel describes operators that its compiled part, made for CUDA, would have defined. The set-up keeps it apart,
since others try to import it too.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch

if importlib.util.find_spec("torchvision") is None:
    sys.path.append(str(Path(sys.prefix) / "apart"))

_LIBRARY: Any = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
for _name in ("nms", "qnms"):
    if not hasattr(torch.ops.torchvision, _name):
        _LIBRARY.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
