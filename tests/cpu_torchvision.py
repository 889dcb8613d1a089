"""Lets torchvision, which mosaicml-streaming imports, be imported beside a CPU build of torch.

Its wheel describes operators that its compiled part, made for CUDA, would have defined.
"""

from __future__ import annotations

from typing import Any

import torch

_LIBRARY: Any = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
for _name in ("nms", "qnms"):
    if not hasattr(torch.ops.torchvision, _name):
        _LIBRARY.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
