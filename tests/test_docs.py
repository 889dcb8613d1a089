"""Every code block of the README and of docs/ runs, and so does every example."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

# In one process, one after the other, since each start of torch costs seconds; with names of their own.
RUN_ALL = """
import runpy, sys
for path in sys.argv[1:]:
    print(path, flush=True)
    runpy.run_path(path)
"""


def blocks(page: Path, language: str) -> list[str]:
    return [code for kind, code in BLOCK.findall(page.read_text()) if kind == language]


def run(command: list[str], folder: Path) -> str:
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: page.name)
def test_python_blocks_run(page: Path, tmp_path: Path) -> None:
    if page.name == "dali.md":
        pytest.importorskip("nvidia.dali", reason="NVIDIA DALI is not installed (pip install midepoch[dali])")
    together = []
    for number, code in enumerate(blocks(page, "python")):
        path = tmp_path / f"block_{number}.py"
        path.write_text(code)
        if "__main__" in code:
            run([sys.executable, str(path)], tmp_path)
        else:
            together.append(str(path))
    run([sys.executable, "-c", RUN_ALL, *together], tmp_path)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "bash")], ids=lambda page: page.name)
def test_shell_blocks_name_what_exists(page: Path) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for code in blocks(page, "bash"):
        for line in filter(None, (line.partition("#")[0].strip() for line in code.splitlines())):
            if match := re.fullmatch(r"make (\w+)\b.*", line):
                run(["make", "-n", match[1]], ROOT)
            elif match := re.fullmatch(r"pip install midepoch(?:\[(\w+)\])?", line):
                assert match[1] is None or match[1] in extras, line
            elif match := re.match(r"(?:\.venv/bin/)?python (benchmarks/\w+\.py)", line):
                assert (ROOT / match[1]).exists(), line
            else:
                assert re.match(r"(git|cd|\.venv/bin/|midepoch|torchrun) ?", line), f"nothing checks {line!r}"


def test_no_block_is_of_an_unknown_language() -> None:
    for page in PAGES:
        for kind, code in BLOCK.findall(page.read_text()):
            assert kind in ("python", "bash", "text", "toml"), f"{page.name}: {kind!r} {code[:60]!r}"


@pytest.mark.parametrize("name", ["dataloader.py", "iterable.py", "several_loaders.py"])
def test_example(name: str, tmp_path: Path) -> None:
    output = run([sys.executable, str(ROOT / "examples" / name)], tmp_path)
    assert "bit-equal" in output or "each exactly once" in output or "none lost" in output


def test_torchrun_example_goes_on_with_another_number_of_processes(tmp_path: Path) -> None:
    environment = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "TORCHELASTIC_USE_AGENT_STORE": "False"}
    os.environ.update({name: os.environ.get(name, value) for name, value in environment.items()})

    def torchrun(processes: int, epochs: int) -> str:
        rendezvous = ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", f"--nproc-per-node={processes}"]
        script = [str(ROOT / "examples" / "torchrun.py"), str(tmp_path / "snapshot.pt"), f"--epochs={epochs}"]
        return run([sys.executable, "-m", "torch.distributed.run", *rendezvous, *script], tmp_path)

    # 12 batches of two processes an epoch, a snapshot after each fifth.
    assert "finished at epoch 1, position 0" in torchrun(2, 1)
    output = torchrun(1, 2)
    assert "resuming at epoch 0, position 80" in output
    assert "finished at epoch 2, position 0" in output


def test_every_example_is_run() -> None:
    tested = set(re.findall(r'"(\w+\.py)"', Path(__file__).read_text()))
    others = "".join(path.read_text() for path in (ROOT / "tests").glob("test_*.py"))
    for example in (ROOT / "examples").glob("*.py"):
        assert example.name in tested or f'"{example.name}"' in others, f"no test runs {example.name}"
        assert len(example.read_text().splitlines()) <= 60, f"{example.name} has more than 60 lines"
