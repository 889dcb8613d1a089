"""Faults of a machine, made on purpose: reads that fail, a server out of order, small and read-only disks, counts."""

from __future__ import annotations

import builtins
import contextlib
import errno
import gc
import hashlib
import http.server
import io
import itertools
import multiprocessing
import os
import random
import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

QUIET = [pytest.mark.filterwarnings("ignore::UserWarning", "ignore::midepoch.MidepochWarning")]
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0 or shutil.which("mount") is None, reason="mounting needs root")


@contextlib.contextmanager
def disk(folder: Path, size: str) -> Iterator[Path]:
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)], capture_output=True)
    if made.returncode:
        pytest.skip(f"no disk could be mounted: {made.stderr.decode()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path) -> None:
    with contextlib.suppress(OSError), (folder / "filler").open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass


def read_only(folder: Path, yes: bool = True) -> None:
    subprocess.run(["mount", "-o", f"remount,{'ro' if yes else 'rw'}", str(folder)], check=True)


@contextlib.contextmanager
def reads(folder: Path, fault: str, every: int) -> Iterator[None]:
    """Of so many reads of files in a folder one fails ("eio"), or gives half of what was asked for ("short").

    Workers that are forked meanwhile have the same faults.
    """
    count, opened = itertools.count(1), open

    def strikes(file: int) -> bool:
        if not Path(f"/proc/self/fd/{file}").readlink().is_relative_to(folder) or next(count) % every:
            return False
        if fault == "eio":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return True

    class Raw(io.FileIO):
        read = io.RawIOBase.read  # type: ignore[assignment]  # which calls `readinto`
        readall = io.RawIOBase.readall

        def readinto(self, buffer: Any) -> int:
            view = memoryview(buffer).cast("B")
            return super().readinto(view[: max(1, len(view) // 2)] if strikes(self.fileno()) else view)

    def open_(path: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        if mode == "rb" and str(path).startswith(str(folder)):
            return io.BufferedReader(Raw(path))
        return opened(path, mode, *arguments, **options)

    def pread(file: int, size: int, start: int) -> bytes:
        return os_pread(file, max(1, size // 2) if strikes(file) else size, start)

    def preadv(file: int, buffers: Any, start: int, *flags: int) -> int:
        first = memoryview(buffers[0])
        return os_preadv(file, [first[: max(1, len(first) // 2)]] if strikes(file) else buffers, start, *flags)

    os_pread, os_preadv = os.pread, os.preadv
    with pytest.MonkeyPatch.context() as patch:
        for module in (io, builtins):
            patch.setattr(module, "open", open_)
        patch.setattr(os, "pread", pread)
        patch.setattr(os, "preadv", preadv)
        yield


class Server:
    """Serves a folder by ranges; each answer, by chance or as it is told, may be one of FAULTS."""

    FAULTS = ("500", "reset", "cut", "stall", "whole", "empty")

    def __init__(self, root: Path, seed: int) -> None:
        self._chance, self._root = random.Random(seed), root
        self.often = 0.0  # how many of the answers fail
        self.faults: tuple[str, ...] = self.FAULTS
        self.failed: dict[str, int] = dict.fromkeys(self.FAULTS, 0)
        self._lock, self._ended = threading.Lock(), threading.Event()
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                outer.answer(self)

            do_HEAD = do_GET  # noqa: N815

            def log_message(self, format: str, *arguments: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def answer(self, request: Any) -> None:
        data = (self._root / request.path.strip("/")).read_bytes()
        with self._lock:
            fault = self._chance.choice(self.faults) if self._chance.random() < self.often else ""
            if fault:
                self.failed[fault] += 1
        first, last, status = 0, len(data) - 1, 200
        stated = request.headers.get("Range")
        if stated and fault != "whole":
            begin, _, end = stated.removeprefix("bytes=").partition("-")
            first, last, status = int(begin), min(int(end or last), last), 206
        body = data[first : last + 1]
        if fault == "reset":
            request.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            request.close_connection = True
            request.connection.close()
            return
        if fault == "stall":
            self._ended.wait(2.0)
        request.send_response(500 if fault == "500" else status)
        request.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        request.send_header("Content-Length", "0" if fault in ("500", "empty") else str(len(body)))
        if status == 206:
            request.send_header("Content-Range", f"bytes {first}-{last}/{len(data)}")
        request.end_headers()
        if request.command == "HEAD" or fault in ("500", "empty"):
            return
        if fault == "cut":
            body, request.close_connection = body[: len(body) // 2], True
        with contextlib.suppress(OSError):
            request.wfile.write(body)

    def close(self) -> None:
        self._ended.set()
        self._server.shutdown()
        self._server.server_close()


def as_nobody(folder: Path, function: Callable[[], None]) -> None:
    """Run it as a user without rights, in a process of its own, who may look into a folder and what it lies in."""
    for each in (folder, *folder.parents):
        with contextlib.suppress(PermissionError):
            each.chmod(each.stat().st_mode | 0o055)  # pytest's folders are root's alone

    def run() -> None:
        os.setgid(65534)
        os.setuid(65534)
        function()

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join()
    assert process.exitcode == 0


class Held(NamedTuple):
    files: int
    threads: int
    children: int
    shared: int  # entries of /dev/shm that no other process uses
    memory: int  # bytes


def held() -> Held:
    """Now, once what is on its way out has gone."""
    gc.collect()
    process = psutil.Process()
    children, memory = process.children(recursive=True), process.memory_info().rss
    return Held(process.num_fds(), process.num_threads(), len(children), len(_shared(process)), memory)


def _shared(process: psutil.Process) -> set[str]:
    """Names in /dev/shm, but for those of other tests that run at the same time.

    What killed processes have left of Streaming's has no name of theirs, so in the short form, when jobs that use it
    are killed beside this one, it is left out.
    """
    folder = Path("/dev/shm")
    names = {each.name for each in folder.iterdir()} if folder.is_dir() else set()
    if not os.environ.get("MIDEPOCH_CHAOS"):
        names = {name for name in names if not re.match(r"\d{6}_", name)}
    ours = {process.pid, *(child.pid for child in process.children(recursive=True))}
    for maps in Path("/proc").glob("[0-9]*/maps"):
        if int(maps.parent.name) not in ours:
            with contextlib.suppress(OSError):
                names -= set(re.findall(r"/dev/shm/(\S+)", maps.read_text()))
    return names


def quiet() -> Held:
    """`held` once it is twice the same but for memory: nothing is on its way out any more."""
    now, then = held(), None
    while now[:4] != (then or ())[:4]:
        time.sleep(0.05)
        now, then = held(), now
    return now


def settled(before: Held, patience: float = 30.0) -> Held:
    """`held` when nothing but memory is more than `before`, or when patience is at its end."""
    wait_until(lambda: all(mine <= theirs for mine, theirs in zip(held()[:4], before[:4], strict=True)), patience)
    return held()


def wait_until(true: Callable[[], bool], seconds: float = 60.0) -> bool:
    until = time.monotonic() + seconds
    while not true():
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True
