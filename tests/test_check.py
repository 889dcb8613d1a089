"""`midepoch check`: the table, the page, and what is told to whoever names the wrong thing."""

from __future__ import annotations

import html.parser
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

import check_sources
import forking

from midepoch.testing import items
from midepoch.tools.cli import main

pytest.importorskip("typer", reason="needs midepoch[cli]")

TESTS = Path(__file__).parent
ROOT = TESTS.parent
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def check(*arguments: str, folder: Path = TESTS) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "160"}
    return forking.run(["-m", "midepoch", "check", *arguments], cwd=folder, env=environment, timeout=400)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The pages of a sound loader and of one that loses samples."""
    folder = tmp_path_factory.mktemp("pages")
    good = check("check_sources:good", "--quick", "--shuffled", "--epochs=1", f"--report={folder / 'good.html'}")
    assert good.returncode == 0, good.stdout + good.stderr
    assert "holds" in good.stdout and "failed" not in good.stdout
    bad = check("check_sources:forgetful", "--quick", "--epochs=1", f"--report={folder / 'bad.html'}")
    assert bad.returncode == 1, bad.stdout + bad.stderr
    assert re.search(r"tail +failed +0 ", bad.stdout)
    assert "the law 'tail' is broken at epoch 0" in bad.stdout
    for word in ("expected:", "got:", "usually:", "cure:"):
        assert word in bad.stdout
    return folder / "good.html", folder / "bad.html"


class Strict(html.parser.HTMLParser):
    """Every element is closed in turn; nothing is fetched from anywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        assert not {"src", "href"} & dict(attributes).keys()
        assert tag not in ("script", "link", "img")
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_says_what_was_found(pages: tuple[Path, Path]) -> None:
    texts = []
    for page in pages:
        parser = Strict()
        parser.feed(page.read_text())
        assert parser.open == []
        texts.append(parser.text)
    good, bad = texts
    assert "every law that applies holds" in good
    assert "proved at each resume" in good and "86 samples of 8 epochs, 344 reads in 2 processes" in good
    assert "1 of 5 trials find a promise that is not kept" in bad and "believed" in bad
    assert good.count("40 samples: 0 lost") == 9, "nine changes of one, two and three ranks"
    assert good.count("3 cuts: at worst 0 lost") == 9
    assert "1 rank before and 1 rank after, a row for each cut: 3 cuts: at worst 4 lost" in bad
    assert "epoch 0, 1 rank before and 1 rank after, cut after 1 batches of each rank: 24 samples: 4 lost" in bad
    assert "laws are broken" in bad and "usually" in bad


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed (apt-get install chromium)")
def test_lost_samples_stand_out_in_a_browser(pages: tuple[Path, Path], tmp_path: Path) -> None:
    from PIL import Image

    shown = []
    for page in pages:
        picture = tmp_path / f"{page.stem}.png"
        options = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-quic",
            "--no-first-run",
            "--hide-scrollbars",
        ]
        options += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
        options += [f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1200,6000", f"--screenshot={picture}"]
        subprocess.run([str(CHROMIUM), *options, page.as_uri()], capture_output=True, timeout=120, check=True)
        with Image.open(picture) as image:
            colours = {colour: count for count, colour in image.convert("RGB").getcolors(1 << 24) or []}
        shown.append({name: colours.get(colour, 0) for name, colour in COLOURS.items()})
    good, bad = shown
    assert good["before"] > 1000 and good["after"] > 1000 and good["lost"] == 0
    assert bad["before"] > 1000 and bad["after"] > 1000 and bad["lost"] > 500


COLOURS = {"before": (0x3B, 0x6F, 0xB6), "after": (0x7F, 0xB3, 0xE6), "lost": (0xD0, 0x20, 0x2B)}


def test_what_a_trial_finds_is_named_before_anything_else(tmp_path: Path) -> None:
    """And what each promise rests on is said. Without time there are no trials."""
    page = tmp_path / "page.html"
    done = check("check_sources:promising", "--quick", "--laws=tail,honesty", "--epochs=1", f"--report={page}")
    assert done.returncode == 1, done.stdout + done.stderr
    first = done.stdout.strip().splitlines()[0]
    assert first == "check_sources:promising does not keep what it promises (samples)"
    assert done.stdout.index("two reads of sample") < done.stdout.index("the law 'tail' is broken")
    assert re.search(r"same data +proved at each resume", done.stdout)
    assert re.search(r"exact_order +not kept +samples: two reads of sample (5|12|19) differ in the sample", done.stdout)
    assert re.search(r"constant_time_resume +believed ", done.stdout)
    parser = Strict()
    parser.feed(page.read_text())
    assert parser.open == [] and parser.text.index("two reads of sample") < parser.text.index("rests on")
    without = check("check_sources:promising", "--quick", "--epochs=1", "--laws=honesty", "--trials=0").stdout
    assert "does not keep" not in without and "believed" not in without


@pytest.mark.parametrize("factory", ["of_kinds", pytest.param("of_nested", marks=pytest.mark.long)])
def test_tensors_of_every_layout_are_compared(factory: str) -> None:
    done = check(f"check_sources:{factory}", "--quick", "--epochs=1", "--laws=tail,isolation,witness")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"tail +holds", done.stdout) and "failed" not in done.stdout


@pytest.mark.parametrize("kind", check_sources.KINDS)
def test_content_of_every_layout_is_told_apart(kind: str) -> None:
    of, row = check_sources.KINDS[kind], torch.arange(4.0)
    assert items.digest(of(row)) == items.digest(of(row.clone()))
    assert items.digest(of(row)) != items.digest(of(row + torch.tensor([0.0, 1.0, 0.0, 0.0])))
    assert len(set(items.identify(of(row)))) == len(items.identify(of(row)))
    same_integers = torch.quantize_per_tensor(row * 2, 0.2, 0, torch.quint8)
    assert kind != "quantized" or items.digest(of(row)) != items.digest(same_integers)


@pytest.mark.parametrize(
    ("line", "expected"),
    [("midepoch ch", "check"), ("midepoch ins", "inspect"), ("midepoch check --wor", "--world-sizes")],
)
def test_a_shell_completes_commands_and_options(line: str, expected: str) -> None:
    words = {"COMP_WORDS": line, "COMP_CWORD": str(line.count(" ")), "_MIDEPOCH_COMPLETE": "complete_bash"}
    assert forking.run(["-m", "midepoch"], env=os.environ | words).stdout.split() == [expected]


def test_a_file_and_a_function_without_arguments(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text((TESTS / "check_sources.py").read_text())
    done = check("mine.py:alone", "--quick", "--epochs=1", "--laws=determinism,tail", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("holds") == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["good"], r"names no function: write package.module:make_loader"),
        (["nowhere:good"], r"cannot be imported .*run this in the module's folder"),
        (["nowhere.py:good"], "there is no file nowhere.py"),
        (["check_sources:bad"], "has no function 'bad'"),
        (["check_sources:number"], "has no function 'number'"),
        (["check_sources:alone", "--laws=tale"], "there is no law 'tale'; the laws are determinism"),
        (["check_sources:alone", "--tail=wag"], "tail must be 'pad', 'drop' or 'uneven'"),
        (["check_sources:alone", "--epochs=0"], "epochs must be at least 1"),
        (["check_sources:alone", "--world-sizes=two"], "numbers separated by commas"),
        (["check_sources:alone", "--laws=round trip", "--report=/nowhere/page.html"], "No such file or directory"),
        (["check_sources:empty"], "without a single batch"),
        (["check_sources:raises"], "builds no loader: fix it.*RuntimeError: no data here"),
        (["check_sources:needs"], "builds no loader: fix it, or give its parameters defaults.*path"),
        (["check_sources:bare"], r"a DataLoader, which has no state_dict and no load_state_dict: return midepoch"),
        (["check_sources:alone", "--report=/tmp"], "/tmp is a folder: name a file for the page"),
        (["check_sources:alone", "--cuts=0"], "cuts must be integers of at least 1"),
        (["check_sources:alone", "--identify=check_sources:who"], "has no function 'who'"),
    ],
)
def test_what_cannot_be_examined_is_told(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(TESTS)
    monkeypatch.setattr(sys, "argv", ["midepoch", "check", *arguments])
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit) as end:
        main()
    told = capsys.readouterr().err
    assert end.value.code == 2
    assert re.search(message, re.sub(r"[│\s]+", " ", told)), told
    assert ("Traceback" in told) == ("builds no loader" in message), "of the function's own errors only"


def test_a_module_that_leaves_when_it_is_imported(tmp_path: Path) -> None:
    (tmp_path / "leaves.py").write_text("def make_loader(): pass\nraise SystemExit(0)\n")
    done = check("leaves.py:make_loader", folder=tmp_path)
    assert done.returncode == 2 and "fails when it is imported: SystemExit: 0" in done.stderr


def test_the_file_that_is_named_is_the_one_that_is_examined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = (TESTS / "check_sources.py").read_text()
    for name, text in (("a", source), ("b", source.replace("def alone", "def other"))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'a'}:{tmp_path / 'b'}")
    done = check("b/mine.py:alone", "--laws=tail", folder=tmp_path)
    assert done.returncode == 2 and "has no function 'alone'" in done.stderr, done.stdout
    (tmp_path / "types.py").write_text(source)
    done = check("types.py:alone", "--laws=tail", folder=tmp_path / "a")
    assert done.returncode == 2 and "there is no file" in done.stderr
    done = check("../types.py:alone", "--laws=tail", folder=tmp_path / "a")
    assert done.returncode == 2 and "there is another module 'types'" in done.stderr


def test_names_are_text_and_the_page_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    folder = tmp_path / "x[red]"
    folder.mkdir()
    source = (TESTS / "check_sources.py").read_text()
    (folder / "mine.py").write_text(source + "\n\ndef names(batch):\n    return [f'\\udc80é{n}' for n in batch[0]]\n")
    (folder / "report[old].html").write_text("before")
    arguments = ("x[red]/mine.py:alone", "--quick", "--epochs=1", "--laws=partition")
    done = check(*arguments, "--report=x[red]/report[old].html", "--identify=x[red]/mine.py:names", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "x[red]/mine.py:alone" in done.stdout and "report[old].html" in done.stdout
    assert "é7" in (folder / "report[old].html").read_text("utf-8")
    (folder / "report[old].html").write_text("before")
    done = check("x[red]/mine.py:empty", "--report=x[red]/report[old].html", folder=tmp_path)
    assert done.returncode == 2 and (folder / "report[old].html").read_text() == "before"
    assert sorted(each.name for each in folder.iterdir() if each.suffix != "") == ["mine.py", "report[old].html"]


# --- as a new user would ------------------------------------------------------------------------------------------


USERS = """
import numpy as np
import torch
from torch.utils.data import DataLoader, Sampler, TensorDataset
import midepoch


class Shuffled(Sampler):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __iter__(self):
        return iter(np.random.default_rng({seed}).permutation(self.count).tolist())


def make_loader(rank=0, world_size=1):
    source = DataLoader(TensorDataset(torch.arange(24)), batch_size=4, sampler=Shuffled(24))
    return midepoch.wrap(source, seed=0, world=midepoch.World(rank, world_size))
"""


def test_from_an_empty_folder(tmp_path: Path) -> None:
    """Install the wheel, run the README, break a loader by a shuffle without a seed, find the fault, mend it."""
    tree = tmp_path / "tree"
    tree.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "core", "adapters"):
        found = ROOT / name
        (shutil.copytree if found.is_dir() else shutil.copy)(found, tree / name)
    build = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(tmp_path), str(tree)]
    subprocess.run(build, check=True, capture_output=True, timeout=120)
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True, timeout=120)
    python = str(environment / "bin" / "python")
    (wheel,) = tmp_path.glob("*.whl")
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*install, str(wheel)], check=True, capture_output=True, timeout=120)
    # torch and typer from here, but not this midepoch: the links in a folder that is merely listed are not followed.
    (site,) = environment.glob("lib/python3*/site-packages")
    (site / "others.pth").write_text(str(Path(importlib.util.find_spec("typer").origin).parents[1]))  # type: ignore

    folder = tmp_path / "mine"
    folder.mkdir()

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        quiet = {**os.environ, "COLUMNS": "140"}
        return subprocess.run([python, *command], cwd=folder, env=quiet, capture_output=True, text=True, timeout=300)

    def check_mine() -> subprocess.CompletedProcess[str]:
        return run("-m", "midepoch", "check", "mine:make_loader", "--quick", "--epochs=1", "--world-sizes=1,2")

    assert run("-c", "import midepoch; print(midepoch.__file__)").stdout.startswith(str(site))
    readme = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    (folder / "readme.py").write_text(readme[0])
    assert run("readme.py").returncode == 0

    (folder / "mine.py").write_text(USERS.format(seed=""))
    broken = check_mine()
    assert broken.returncode == 1, broken.stdout + broken.stderr
    assert "Shuffled does not repeat itself" in broken.stdout
    assert broken.stdout.count("cure:") == 1, "said once, not for each law"
    (folder / "mine.py").write_text(USERS.format(seed="7"))
    mended = check_mine()
    assert mended.returncode == 0, mended.stdout + mended.stderr
