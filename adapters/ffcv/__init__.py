"""FFCV's Loader, resumed exactly: the order and every augmented pixel, on any number of threads and processes.

Four optional functions complement `midepoch.wrap(Loader(...))`:

* `declare` says what an Operation of your own draws;
* `hand_out_copies` makes batches stay valid;
* `on_local_device` directs the pipelines' ToDevice to this process's GPU;
* `check_file` checks that a .beton file is complete, before a Loader fails on it.
"""

from midepoch.adapters.ffcv.adapter import FFCVAdapter, hand_out_copies, on_local_device
from midepoch.adapters.ffcv.beton import check_file
from midepoch.adapters.ffcv.pipeline import declare

__all__ = ["FFCVAdapter", "check_file", "declare", "hand_out_copies", "on_local_device"]
