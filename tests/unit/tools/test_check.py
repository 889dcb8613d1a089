"""`midepoch check`: the table, the page, and what is told to whoever names the wrong thing."""

from __future__ import annotations

import html
import inspect
import os
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, TensorDataset

import midepoch
import midepoch.adapters.dataloader
from midepoch import adapters
from midepoch.testing import diagnosis
from midepoch.testing.diagnosis import entropy
from midepoch.testing.record import Settings
from midepoch.testing.subjects import ByCount, Side, Subject, recognise
from midepoch.tools import check as checking
from support import check_sources, commands
from support.commands import Done

pytest.importorskip("typer", reason="needs midepoch[cli]")

SOURCES = Path(check_sources.__file__)


def check(*arguments: str, folder: Path = SOURCES.parent, terminal: bool = False) -> Done:
    """In this process, so that all tests share those in which loaders are resumed; with time on a busy machine."""
    if not any(each.startswith("--seconds") for each in arguments):
        arguments = (*arguments, "--seconds=900")
    return commands.run("check", *arguments, folder=folder, terminal=terminal)


def text_of(page: Path) -> str:
    """What a reader sees, of a page that fetches nothing and runs nothing."""
    found = page.read_text("utf-8")
    assert not re.search(r"<(script|link|img)|(src|href)=", found)
    return html.unescape(re.sub(r"<[^>]*>", "", found))


def checked(name: str, page: Path, *options: str) -> tuple[Done, str]:
    """What is printed about a loader, and its page, which says the same in its order."""
    done = check(f"check_sources:{name}", "--quick", "--epochs=1", f"--report={page}", *options)
    text = text_of(page)
    finding = done.stdout.splitlines()[1]
    in_order = [finding, "rest of an epoch that was cut", "Which samples the ranks received", "What it rests on"]
    assert [text.index(each) for each in in_order] == sorted(text.index(each) for each in in_order)
    return done, text


def test_a_sound_loader_is_called_exact_in_one_table(tmp_path: Path) -> None:
    """Without a terminal each stage is a line, on stderr, so that stdout has the report alone."""
    done, page = checked("good", tmp_path / "good.html", "--shuffled")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[:2] == ["check_sources:good (DataLoader)", "It continues exactly where it was cut"]
    assert re.search(r"rest of an epoch that was cut +\d+ of 40 samples lost, \d+ twice +exact", done.stdout)
    assert re.search(r"continued on 2 ranks .* exact", done.stdout) and "fail" not in done.stdout
    assert "proved at each resume: same data" in done.stdout and len(lines) <= 20
    stages = done.stderr.splitlines()
    assert stages[0] == "   0 s: what it is (1 of 32)" and len(stages) == 32, done.stderr
    assert all(re.fullmatch(r" +\d+ s: [a-z, ]+ \(\d+ of 32\)", line) for line in stages), done.stderr
    assert " of 32)" not in done.stdout
    assert " fail" not in page and "not applicable: it could not be tried" in page
    assert "proved at each resume" in page and "86 samples of 8 epochs, 344 reads in 2 processes" in page
    assert page.count("3 cuts of 40 samples: at worst 0 lost") == 9, "nine changes of one, two and three ranks"
    assert re.search("after 1 +█+", page)


def test_a_broken_loader_leads_with_the_cause(tmp_path: Path) -> None:
    done, page = checked("forgetful", tmp_path / "bad.html", "--verbose")
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.splitlines()[1] == "A resumed run is not the run that was cut"
    assert re.search(r"first seen +epoch 0, batch 1", done.stdout)
    assert re.search(r"\d+ more fail with it: tail, boundary, round trip, chain", done.stdout)
    assert re.search(r"rest of an epoch that was cut +4 of 24 samples lost, 0 twice", done.stdout)
    assert re.search(r"tail +failed +epoch 0, batch \d", done.stdout), "with --verbose"
    for word in ("expected:", "got:", "usually:", "cure:", "not applicable: it could not be tried"):
        assert word in done.stdout
    assert re.search(r"Laws and trials: \d+ hold; \d+ fail", page) and "believed" in page and "usually" in page
    worst = r"24 samples: at worst 4 lost \(\d+, \d+, \d+, \d+\) and 0 repeated"
    assert re.search(rf"epoch 0, 1 rank before and 1 rank after: 3 cuts of {worst}", page)


SOURCE = r"check_sources.py:\d+: "
SAID: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "drifting --epochs=1": ("nearly every law fails, for one cause", 1, (
        "^It does not repeat itself", "first seen +epoch 0, batch 0",
        rf"drawn at +{SOURCE}generator = np.random.default_rng\(\)",
        r"1\d more fail with it: states, determinism, tail", "instead +draw from the global generators",
    )),
    "unseeded --laws=tail": ("midepoch refuses the order", 1, (
        "^Unseeded does not repeat itself: two lists for epoch 0",
        rf"drawn at +{SOURCE}return iter\(np.random.default_rng\(\)",
        r"cut +\d+ of 24 samples lost, \d+ twice +fails: SourceError",
    )),
    "dropping --quick --epochs=1 --laws=partition,topology": (
        "two of 22 in batches of four, and what does not divide by the ranks, are not lost", 0,
        ("Laws and trials: 2 hold.", "continued on 2 ranks .* exact", "continued with batches of 5 .* exact"),
    ),
    "built_for_its_rank --quick --epochs=1 --laws=reshard": (
        "a loader that is built for its rank refuses to change it", 0, (r"1 refused clearly \(reshard\)",),
    ),
    "ends_early --quick --epochs=1 --laws=transparent": (
        "a resumed run agrees with the wrapped one, so that only the plain loader can show it", 1,
        ("^Without any resume, it does not give what the plain loader gives", "first seen +epoch 0, batch 4",
         "expected +as the plain loader: sample 8 once", "got +never; lost: 8, 9"),
    ),
    "failing": ("an error of the dataset", 1, (
        "OSError while iterating, pass 0: seven is damaged", "first seen +epoch 0, batch 1",
        rf"raised at +{SOURCE}raise OSError",
    )),
    "once": ("what cannot be wrapped", 1, ("^midepoch.wrap refuses it: ",)),
    "alone --seconds=0.001 --epochs=1": ("no law is begun when the time is over", 0, (
        r"27 not reached \(lists, .*rollback\)", "--seconds 300", "^No law that was examined is broken",
    )),
    "entropic --laws=tail,isolation,refusal --epochs=1 --world-sizes=1": (
        "numbers that no seed restores, as capabilities says, are no fault of states", 1,
        (r"^It does not continue exactly, and says so: two reads of sample \d+ differ in \[1\] *$",
         rf"drawn at +{SOURCE}return index, int.from_bytes\(os.urandom\(6\)\)",
         "instead +draw from the global generators"),
    ),
    "entropic --laws=tail --trials=0 --epochs=1 --world-sizes=1 --quick --lenient": (
        "it passes where that is asked for", 0, ("^It does not continue exactly, and says so",),
    ),
}  # fmt: skip
"""Source and options -> what that shows, the exit status, what is told."""


@pytest.mark.parametrize("command", SAID)
def test_what_is_found_fits_on_a_screen(command: str) -> None:
    name, *options = command.split()
    why, status, told = SAID[command]
    done = check(f"check_sources:{name}", *options)
    assert done.returncode == status, why + done.stdout + done.stderr
    for words in told:
        assert re.search(words, done.stdout, re.MULTILINE), words + done.stdout
    assert len(done.stdout.splitlines()) <= 25 and "Traceback" not in done.stdout


def test_a_plain_dataloader_is_examined_bare_and_wrapped() -> None:
    """Named as an object. Ranks, workers and batch size are derived from it. The bar says what is tried."""
    done = check("check_sources:loader", "--quick", "--epochs=1", "--laws=tail", terminal=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "without midepoch" in done.stdout and "with midepoch.wrap(..., seed=0)" in done.stdout
    for question in ("rest of an epoch that was cut", "continued on 2 ranks", "continued with 2 workers",
                     "continued with batches of 5"):  # fmt: skip
        assert re.search(question + r" +\d+ of 24 samples lost, \d+ twice +exact", done.stdout), done.stdout
    assert re.search(r"the epoch after it +the same samples in another order +exact", done.stdout)
    assert re.search(r"its state +a number of batches, which are read again +\d+ bytes, nothing", done.stdout)
    assert "\n" not in done.stderr and done.stderr.endswith(" \r"), "in one line, which is wiped out"
    for tried in ("an uninterrupted run", "cut, and continued", "tail", "which cause"):
        assert tried in done.stderr


def test_a_line_of_the_users_is_known_in_any_folder(tmp_path: Path) -> None:
    """A checkout may be called midepoch, and midepoch's own files may be imported through links."""
    users = tmp_path / "midepoch" / "mine.py"
    users.parent.mkdir()
    users.write_text("def read(index):\n    raise OSError(index)\n")
    ours = [midepoch.__file__, adapters.dataloader.__file__, checking.__file__, os.path.realpath(midepoch.__file__)]
    frames = [(str(users), 2, "raise OSError(index)"), *((file, 1, "import os") for file in [*ours, os.__file__])]
    trace = "".join(f'  File "{file}", line {line}, in read\n    {text}\n' for file, line, text in frames)
    assert diagnosis._raised_at(trace) == ["mine.py:2: raise OSError(index)"]


LOADER = "from torch.utils.data import DataLoader\n{} = DataLoader(list(range(12)), batch_size=4, shuffle=True)\n"


def test_a_script_is_enough(tmp_path: Path) -> None:
    trains = "if __name__ == '__main__': raise SystemExit('trains')\n"
    for name, text, status, told in (
        ("alone", LOADER.format("data") + trains, 0, "train_alone.py (DataLoader)"),
        ("two", LOADER.format("a = b"), 2, "several loaders: name one, train_two.py:a or train_two.py:b"),
        ("none", "data = 3\n", 2, "write a function make_loader() in it"),
        ("leaves", "def make_loader(): pass\nraise SystemExit(0)\n", 2, "fails when it is imported: SystemExit: 0"),
    ):
        (tmp_path / f"train_{name}.py").write_text(text)
        done = check(f"train_{name}.py", "--quick", "--epochs=1", "--laws=tail", folder=tmp_path)
        assert done.returncode == status and told in done.stdout + done.stderr, done


def test_counting_is_what_programs_do() -> None:
    """Begin anew, skip, and tell the sampler its epoch."""
    data = TensorDataset(torch.arange(8))
    source = DataLoader(data, 2, sampler=DistributedSampler(data, num_replicas=1, rank=0, seed=3))
    whole = ByCount(source)
    epochs = [[batch[0].tolist() for batch in whole] for _ in range(2)]
    assert epochs[0] != epochs[1], "the sampler was told"
    resumed = ByCount(source)
    resumed.load_state_dict({"epoch": 1, "batches": 3})
    assert [batch[0].tolist() for batch in resumed] == epochs[1][3:]
    assert resumed.state_dict() == {"epoch": 2, "batches": 0}


def test_a_dataloader_is_varied_and_stays_the_same_otherwise() -> None:
    generator = torch.Generator()

    def make() -> Any:
        return DataLoader(range(9), 2, shuffle=True, drop_last=True, collate_fn=tuple, generator=generator)  # type: ignore

    subject = Subject(make, "bare", (("num_workers", 0), ("batch_size", 2)))
    made = subject(batch_size=4, num_workers=2)._source
    assert (made.batch_size, made.num_workers, made.drop_last) == (4, 2, True)
    assert made.collate_fn is tuple and made.generator is generator and type(made.sampler) is RandomSampler
    assert inspect.signature(subject).parameters["batch_size"].default == 2


@pytest.mark.parametrize("shuffle", [True, False])
def test_of_a_long_dataloader_the_first_samples_are_examined(shuffle: bool) -> None:
    def make() -> Any:
        return midepoch.wrap(DataLoader(range(1003), 4, shuffle=shuffle), seed=3)  # type: ignore[arg-type]

    nature = recognise(Settings(make), {})
    assert (nature.kind, nature.samples) == ("DataLoader; of its 1,003 samples the first 83", 20 * 4 + 3)
    side: Side
    for side in ("given", "bare"):
        batches = list(Subject(make, side, nature.derived, nature.samples)(num_workers=0, batch_size=5))
        assert len(batches) == 17 and sorted(torch.cat(batches).tolist()) == list(range(83))
        assert (torch.cat(batches).tolist() != list(range(83))) is shuffle


class Draws:
    """From seeded generators, from one that the operating system seeds, or from that itself."""

    def __init__(self, how: str) -> None:
        self.how = how

    def __iter__(self) -> Iterator[Any]:
        yield random.Random(3).random(), np.random.default_rng(3).random()
        if self.how == "python":
            yield random.Random().random()
        if self.how == "system":
            yield os.urandom(2)


@pytest.mark.parametrize(
    ("how", "line"), [("seeded", ""), ("python", "random.Random().random()"), ("system", "os.urandom(2)")]
)
def test_who_asks_the_operating_system_for_numbers_is_named(how: str, line: str) -> None:
    assert [each.partition(": yield ")[2] for each in entropy(Settings(lambda: Draws(how)), {})] == [line] * bool(line)


@pytest.mark.parametrize(("arguments", "message"), [
    (["good"], r"names no loader or function: write package.module:make_loader"),
    (["nowhere:good"], r"cannot be imported .*run this in the module's folder"),
    (["nowhere.py:good"], "there is no file nowhere.py"),
    (["check_sources:bad"], "has no function and no loader 'bad'"),
    (["check_sources:number"], "has no function and no loader 'number'"),
    (["check_sources:alone", "--laws=tale"], "there is no law 'tale'; the laws are transparent"),
    (["check_sources:alone", "--tail=wag"], "tail must be 'pad', 'drop' or 'uneven'"),
    (["check_sources:alone", "--epochs=0"], "epochs must be at least 1"),
    (["check_sources:alone", "--world-sizes=two"], "numbers separated by commas"),
    (["check_sources:alone", "--laws=round trip", "--report=/nowhere/page.html"], "cannot be written: name a file"),
    (["check_sources:empty"], "without a single batch"),
    (["check_sources:raises"], "builds no loader: fix it.*RuntimeError: no data here"),
    (["check_sources:in_steps"], "builds no loader: fix it.*examine it without global_batch="),
    (["check_sources:needs"], "builds no loader: fix it, or give its parameters defaults.*path"),
    (["check_sources:alone", "--report=/tmp"], "/tmp cannot be written: name a file for the page"),
    (["check_sources:alone", "--cuts=0"], "cuts must be integers of at least 1"),
    (["check_sources:alone", "--identify=check_sources:who"], "has no function 'who'"),
])  # fmt: skip
def test_what_cannot_be_examined_is_told(arguments: list[str], message: str) -> None:
    done = check(*arguments)
    assert done.returncode == 2
    assert re.search(message, re.sub(r"[│\s]+", " ", done.stderr)), done.stderr
    assert ("Traceback" in done.stderr) == ("builds no loader" in message), "of the function's own errors only"


def test_the_file_that_is_named_is_the_one_that_is_examined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = SOURCES.read_text(encoding="utf-8")
    for name, text in (("a", source), ("b", source.replace("def alone", "def other"))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine_of_two.py").write_text(text)
        monkeypatch.syspath_prepend(tmp_path / name)
    done = check("b/mine_of_two.py:alone", "--laws=tail", folder=tmp_path)
    assert done.returncode == 2 and "has no function and no loader 'alone'" in done.stderr, done.stdout
    (tmp_path / "types.py").write_text(source)
    for name, told in (("types.py", "there is no file"), ("../types.py", "there is another module 'types'")):
        done = check(f"{name}:alone", "--laws=tail", folder=tmp_path / "a")
        assert done.returncode == 2 and told in done.stderr


def test_names_are_text_and_the_page_is_written_whole(tmp_path: Path) -> None:
    folder = tmp_path / "x[red]"
    folder.mkdir()
    source = SOURCES.read_text(encoding="utf-8")
    names = "\n\ndef names(batch):\n    return [f'\\udc80é{n}' for n in batch[0]]\n"
    (folder / "red_mine.py").write_text(source + names, encoding="utf-8")
    (folder / "report[old].html").write_text("before")
    arguments = ("x[red]/red_mine.py:alone", "--quick", "--epochs=1", "--laws=partition")
    done = check(*arguments, "--report=x[red]/report[old].html", "--identify=x[red]/red_mine.py:names", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "x[red]/red_mine.py:alone" in done.stdout and "report[old].html" in done.stdout
    found = text_of(folder / "report[old].html")
    assert "x[red]/red_mine.py:alone (DataLoader)" in found and re.search(r"lost \(.*é\d", found)
    (folder / "report[old].html").write_text("before")
    done = check("x[red]/red_mine.py:empty", "--report=x[red]/report[old].html", folder=tmp_path)
    assert done.returncode == 2 and (folder / "report[old].html").read_text() == "before"
    assert sorted(each.name for each in folder.iterdir() if each.suffix != "") == ["red_mine.py", "report[old].html"]
