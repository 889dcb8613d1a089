"""A real server of objects: nginx, which serves byte ranges and gives strong etags."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def nginx(folder: Path, root: Path, ranges: bool = True) -> Iterator[str]:
    """A real server of objects on this machine, and its url."""
    program = shutil.which("nginx") or "/usr/sbin/nginx"
    if not Path(program).exists():
        pytest.skip("nginx is not installed: apt-get install nginx-light")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder.mkdir()
    kept = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    temporary = "".join(f"{name}_temp_path {folder}/{name};" for name in kept)
    user = "user root;" if os.getuid() == 0 else ""
    configuration = f"""
        daemon off; {user} pid {folder}/pid; error_log {folder}/error.log; worker_processes 1;
        events {{ worker_connections 256; }}
        http {{ access_log {folder}/access.log; {temporary}
            server {{ listen 127.0.0.1:{port}; root {root}; {"" if ranges else "max_ranges 0;"} }} }}
    """
    (folder / "nginx.conf").write_text(configuration)
    arguments = [program, "-p", str(folder), "-c", str(folder / "nginx.conf"), "-e", str(folder / "error.log")]
    process = subprocess.Popen(arguments, stderr=subprocess.PIPE)
    try:
        for _ in range(100):
            with socket.socket() as client:
                if client.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert process.poll() is None, (folder / "error.log").read_text()
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(timeout=10)
        if process.stderr is not None:
            process.stderr.close()


def requests(folder: Path, url: str) -> list[str]:
    """The lines that nginx has logged, up to now: it logs a request after it has answered it."""
    last = f"/last-{time.monotonic_ns()}"
    with contextlib.suppress(urllib.error.HTTPError):
        urllib.request.urlopen(url + last).close()
    while last not in (logged := (folder / "access.log").read_text()):
        time.sleep(0.001)
    return [line for line in logged.splitlines() if "/last-" not in line]
