"""Runs a training program as it is, writes down what it does, and ends it where it is told to.

``program_job.py LOG WHERE NUMBER PROGRAM ARGUMENTS...`` ends it by SIGKILL in the NUMBERth backward pass of rank 0
("batch"), sends SIGTERM before the NUMBERth optimizer step ("signal"), or neither ("never"). Each rank writes into
LOG.RANK, a JSON line for each event, at once: what the model gets and returns, the losses, the learning rates, a
checksum of the weights after each optimizer step, the saves. A restart by torchrun's agent is left alone.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
import zlib
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules import module as hooks
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from midepoch.checkpoint.files import SnapshotFile


def checksum(value: Any) -> int:
    return zlib.crc32(value.detach().contiguous().numpy().tobytes())


class Watch:
    """Writes down events, and counts those at which the process is to be killed."""

    def __init__(self, log: str, where: str, number: int) -> None:
        rank, restarts = os.environ.get("RANK", "0"), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._file = os.open(f"{log}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.where, self.left = where if (rank, restarts) == ("0", "0") else "never", number
        self._depth = 0

    def write(self, *event: Any) -> None:
        os.write(self._file, (json.dumps(event) + "\n").encode())

    def happens(self, what: str) -> None:
        if what == self.where:
            self.left -= 1
            if not self.left:
                os.kill(os.getpid(), signal.SIGTERM if what == "signal" else signal.SIGKILL)

    # --- torch's hooks ---

    def enter(self, module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        self._depth += 1
        if self._depth == 1 and next(module.parameters(), None) is not None:  # a model, no loss function
            self.write("train" if module.training else "validate", [checksum(row) for row in inputs[0]])

    def leave(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        self._depth -= 1
        if not self._depth:
            self.write("gives", [checksum(each) for each in (output if isinstance(output, tuple) else (output,))])

    def before_step(self, optimizer: Any, *others: Any) -> None:
        self.happens("signal")

    def after_step(self, optimizer: Any, *others: Any) -> None:
        weights = [checksum(each) for group in optimizer.param_groups for each in group["params"]]
        self.write("step", [float(group["lr"]).hex() for group in optimizer.param_groups], weights)

    def install(self) -> None:
        hooks.register_module_forward_pre_hook(self.enter)
        hooks.register_module_forward_hook(self.leave)
        register_optimizer_step_pre_hook(self.before_step)
        register_optimizer_step_post_hook(self.after_step)
        backward, write = torch.Tensor.backward, SnapshotFile.write

        def watched_backward(loss: torch.Tensor, *arguments: Any, **options: Any) -> None:
            self.happens("batch")
            self.write("loss", float(loss).hex())
            backward(loss, *arguments, **options)  # type: ignore[no-untyped-call]

        def watched_write(file: SnapshotFile, content: dict[str, Any]) -> None:
            write(file, content)
            self.write("saved", content["steps"])

        torch.Tensor.backward = watched_backward  # type: ignore[method-assign,assignment]
        SnapshotFile.write = watched_write  # type: ignore[method-assign,assignment]


if __name__ == "__main__":
    log, where, number, program, *arguments = sys.argv[1:]
    Watch(log, where, int(number)).install()
    sys.argv = [program, *arguments]
    sys.path.insert(0, str(Path(program).parent))
    runpy.run_path(program, run_name="__main__")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # gloo's threads do not always survive the interpreter's end
