"""Python processes that are forked from one that has imported torch already: a start takes 0.1 instead of 2 s.

``Program([script, *arguments])``, also with "-m" or "-c" first, is to tests what `subprocess.Popen` with
``sys.executable`` is: a process of its own, with its own environment, folder, output and random generators, which runs
what was registered with atexit. What is tested must not depend on a variable that is read at import, such as
NUMBA_NUM_THREADS, nor on what has been imported: then start an interpreter.

What starts interpreters by itself is given ``executable(...)`` in place of Python's, torchrun in the variable
PYTHON_EXEC. It imports nothing, has a process forked in its place, hands signals on to that one and ends as that one
does; where it is killed, so is that one.

All processes that have the same folder in the variable MIDEPOCH_FORKING fork from the same ones.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import functools
import gc
import hashlib
import importlib
import json
import math
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

# What test modules import, the slowest first; what is not installed is left out.
IMPORTED = (
    "ffcv.loader", "torch._dynamo", "lightning", "transformers.trainer", "scipy.stats", "matplotlib.pyplot",
    "hypothesis", "nvidia.dali.fn", "nvidia.dali.experimental.dynamic", "cpu_torchvision", "streaming", "webdataset",
    "ignite.engine", "albumentations", "sklearn.datasets", "torchdata.stateful_dataloader",
)  # fmt: skip


def _readable(files: Iterable[Any], timeout: float | None) -> list[Any]:
    """Those that can be read, or have ended; select() knows only the first 1024 descriptors of a process."""
    polled, by_number = select.poll(), {each if isinstance(each, int) else each.fileno(): each for each in files}
    for number in by_number:
        polled.register(number, select.POLLIN)
    return [by_number[number] for number, _ in polled.poll(None if timeout is None else math.ceil(timeout * 1000))]


_ALWAYS = ("torch", "midepoch")


@functools.cache
def _folder() -> str:
    """Where the sockets are. The processes that are forked from end with whoever made it."""
    if "MIDEPOCH_FORKING" in os.environ:
        return os.environ["MIDEPOCH_FORKING"]
    folder, made_by = tempfile.mkdtemp(prefix="midepoch-fork-"), os.getpid()
    os.mkfifo(f"{folder}/alive")
    os.open(f"{folder}/alive", os.O_RDWR)  # until this process ends; those that read from the other end are told

    @atexit.register
    def remove() -> None:
        if os.getpid() == made_by:
            shutil.rmtree(folder, ignore_errors=True)

    return folder


def share() -> None:
    """Let all processes that this one starts fork from the same ones as this one."""
    os.environ["MIDEPOCH_FORKING"] = _folder()


@functools.cache
def _server(modules: tuple[str, ...]) -> str:
    """The socket of the process that has imported these, started by the first who asks."""
    address = f"{_folder()}/{hashlib.sha256(repr(modules).encode()).hexdigest()[:12]}"
    with Path(f"{address}.lock").open("w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not Path(address).exists():
            environment = {"OMP_NUM_THREADS": "1", **os.environ}
            command = [sys.executable, __file__, address, *modules]
            server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env=environment)
            assert server.stdout is not None
            with server.stdout as said:
                if said.readline() != b"ready\n":
                    raise RuntimeError(f"the process that imports {', '.join(modules)} has ended")
            server.returncode = 0  # nobody waits for it, nor is to be warned of it
    return address


def executable(*modules: str) -> str:
    """A program that is started as an interpreter is."""
    address = _server((*_ALWAYS, *modules))
    program = Path(f"{address}.python")
    if not program.exists():
        draft = program.with_suffix(f".{os.getpid()}")
        draft.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{__file__}" --instead "{address}" "$@"\n')
        draft.chmod(0o755)
        draft.replace(program)
    return str(program)


def _ask(address: str, request: dict[str, Any], streams: Sequence[int]) -> tuple[socket.socket, IO[str], int]:
    """The connection to the server, what it answers, and the forked process."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(address)
    socket.send_fds(connection, [json.dumps(request).encode() + b"\n"], streams)
    answers = connection.makefile("r")
    return connection, answers, int(answers.readline())


class Program:
    """A forked process that runs a program. It is killed when this object is gone before its end.

    Args:
        arguments: the script and its arguments; or "-m", a module and its arguments; or "-c", code and its arguments.
        modules: what the process has imported before; "torch" and "midepoch" are always among it.
        cwd: its folder. env: all of its environment; None takes this process's.
        new_session: whether it leads a session of its own, so that `os.killpg` reaches all that it starts.
        merged: whether its errors go to its standard output too.
    """

    def __init__(
        self, arguments: Sequence[str | Path], *, modules: Sequence[str] = (), cwd: str | Path | None = None,
        env: Mapping[str, str] | None = None, new_session: bool = False, merged: bool = False,
    ) -> None:  # fmt: skip
        self.args = [str(argument) for argument in arguments]
        request = {"arguments": self.args, "cwd": str(cwd or Path.cwd()), "session": new_session,
                   "env": dict(os.environ if env is None else env)}  # fmt: skip
        address, pipes = _server((*_ALWAYS, *modules)), [os.pipe() for _ in range(2)]
        with Path(os.devnull).open(encoding="utf-8") as nothing:
            streams = [nothing.fileno(), pipes[0][1], pipes[0 if merged else 1][1]]
            self._connection, self._answers, self.pid = _ask(address, request, streams)
        for _, write in pipes:
            os.close(write)
        self.returncode: int | None = None
        self.stdout: IO[str] = os.fdopen(pipes[0][0])
        self.stderr: IO[str] = os.fdopen(pipes[1][0])

    def wait(self, timeout: float = 300) -> int:
        """The exit status, negative for a signal, as `subprocess.Popen.wait`."""
        if self.returncode is None:
            if not _readable([self._connection], timeout):
                raise subprocess.TimeoutExpired(self.args, timeout)
            self.returncode = os.waitstatus_to_exitcode(int(self._answers.readline()))
            self._answers.close()
            self._connection.close()
        return self.returncode

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def communicate(self, timeout: float = 300) -> tuple[str, str]:
        """All of its two outputs that was not read yet; waits for its end."""
        outputs = {self.stdout.fileno(): b"", self.stderr.fileno(): b""}
        opened, until = set(outputs), time.monotonic() + timeout
        while opened:
            ready = _readable(opened, max(0, until - time.monotonic()))
            if not ready:
                raise subprocess.TimeoutExpired(self.args, timeout)
            for descriptor in ready:
                read = os.read(descriptor, 1 << 16)
                outputs[descriptor] += read
                if not read:
                    opened.remove(descriptor)
        self.wait(max(1, until - time.monotonic()))
        said, errors = (text.decode(errors="replace") for text in outputs.values())
        self.stdout.close()
        self.stderr.close()
        return said, errors

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended, as in subprocess.Popen
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run(
    arguments: Sequence[str | Path], *, timeout: float = 300, check: bool = False, **options: Any
) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run` with text captured. Options are those of `Program`."""
    program = Program(arguments, **options)
    try:
        said, errors = program.communicate(timeout)
    finally:
        program.kill()
    assert program.returncode is not None
    if check and program.returncode:
        raise AssertionError(f"{program.args} ended with {program.returncode}: {said[-3000:]}\n{errors[-3000:]}")
    return subprocess.CompletedProcess(program.args, program.returncode, said, errors)


def in_large_pages() -> None:
    """Hold this process's memory in pages of 2 MB, where Linux can: 130,000 small ones cost each fork 27 ms more."""
    for addresses, rights, _, _, inode, *_ in map(str.split, Path("/proc/self/maps").read_text().splitlines()):
        start, end = (int(address, 16) for address in addresses.split("-"))
        if (rights, inode) == ("rw-p", "0"):
            ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), 25)  # MADV_COLLAPSE


# --- the process that is forked from ----------------------------------------------------------------------------------


def _serve(address: str, alive: int) -> dict[str, Any]:
    """Fork a process for each that connects; returns in the forked ones, with what they are to do."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(address)
    listener.listen()
    ended, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    asked: dict[int, socket.socket] = {}
    os.write(1, b"ready\n")
    while True:
        readers: list[Any] = [listener, ended, alive, *asked.values()]
        ready = _readable(readers, None)
        if alive in ready:
            os._exit(0)  # whoever started this has ended
        if ended in ready:
            os.read(ended, 1 << 12)
            for pid in list(asked):
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    with asked.pop(pid) as connection, contextlib.suppress(OSError):
                        connection.sendall(b"%d\n" % status)
        for pid, connection in asked.items():
            if connection in ready:
                os.kill(pid, signal.SIGKILL)
        if listener in ready:
            connection, _ = listener.accept()
            data, streams, *_ = socket.recv_fds(connection, 1 << 20, 250)
            while not data.endswith(b"\n"):
                data += connection.recv(1 << 20)
            request: dict[str, Any] = json.loads(data)
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for each in (listener, connection, *asked.values()):
                    each.close()
                for descriptor in (ended, wake, alive):
                    os.close(descriptor)
                _place(streams, request.get("numbers", [0, 1, 2]))
                return request
            for stream in streams:
                os.close(stream)
            asked[pid] = connection
            connection.sendall(b"%d\n" % pid)


def _place(streams: Sequence[int], numbers: Sequence[int]) -> None:
    """Give open files the numbers that they have where they come from."""
    above = [fcntl.fcntl(stream, fcntl.F_DUPFD, 1 + max(numbers)) for stream in streams]  # none is in another's place
    for stream in streams:
        os.close(stream)
    for stream, number in zip(above, numbers, strict=True):
        os.dup2(stream, number)
        os.close(stream)


def _instead() -> None:
    """Have a process forked that is this one to whoever started this one, all its open files included."""
    numbers = sorted(int(each.name) for each in list(Path("/proc/self/fd").iterdir()) if each.exists())
    arguments = sys.argv[3:]
    while arguments[0][0] == "-" and arguments[0] not in ("-c", "-m"):
        arguments.pop(0)  # how an interpreter is started
    request = {"arguments": arguments, "cwd": str(Path.cwd()), "env": dict(os.environ), "session": False,
               "numbers": numbers}  # fmt: skip
    _, answers, pid = _ask(sys.argv[2], request, numbers)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda number, _: os.kill(pid, number))
    status = os.waitstatus_to_exitcode(int(answers.readline()))
    if status < 0:
        signal.signal(-status, signal.SIG_DFL) if -status != signal.SIGKILL else None
        os.kill(os.getpid(), -status)
    os._exit(status)


def _run(arguments: list[str]) -> None:
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path[0] = str(Path.cwd())
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return
    if arguments[0] == "-c":
        code, arguments, name = arguments[1], ["-c", *arguments[2:]], "<string>"
        sys.path[0] = ""
    else:
        code, name = Path(arguments[0]).read_text(encoding="utf-8"), arguments[0]
        sys.path[0] = str(Path(name).parent.resolve())
    sys.argv = arguments
    # Not runpy's run_path: it takes the module away before the functions run that were registered with atexit.
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=__builtins__, **({} if name == "<string>" else {"__file__": name}))
    exec(compile(code, name, "exec"), main.__dict__)


def _status(arguments: list[str]) -> int:
    """What the work ends with, as an interpreter says it."""
    try:
        _run(arguments)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:  # noqa: BLE001 - it is printed, as the interpreter prints it
        traceback.print_exc()
        return 1
    return 0


def _main() -> None:
    address, modules = sys.argv[1], sys.argv[2:]
    sys.path.insert(0, str(Path(__file__).parents[1]))
    for module in modules:
        with contextlib.suppress(Exception):  # whoever needs it is told
            importlib.import_module(module)
    import numpy as np
    import torch

    for device in () if torch.accelerator.is_available() else (torch.cuda, torch.xpu, torch.mtia):
        device.manual_seed_all = lambda _: None  # type: ignore[attr-defined]  # else its caller formats the stack
    sys.path.pop(0)
    gc.collect()
    gc.freeze()  # else a collection writes to each object, and so copies all memory
    request = _serve(address, os.open(Path(address).with_name("alive"), os.O_RDONLY | os.O_NONBLOCK))
    if request["session"]:
        os.setsid()
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.path[1:1] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    np.random.seed()  # as Python does with its own after a fork; torch's has the same seed in each new process
    status = _status(request["arguments"])
    # As the interpreter ends, but for taking down all modules, which costs as much as importing them.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for output in (sys.stdout, sys.stderr):
        output.flush()
    os._exit(status)


if __name__ == "__main__":
    _instead() if sys.argv[1] == "--instead" else _main()
