"""Every code block of the README and of docs/ runs, and so does every example."""

from __future__ import annotations

import contextlib
import html
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import midepoch
from midepoch.testing import digest
from midepoch.testing.report import MEANINGS
from support import forking
from support.jobs import MODULES, torchrun
from support.kill_examples import assert_went_on, kill_with_children
from support.places import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
RUN_ELSEWHERE = ("start.md", "README.md", "holes.md")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TAB = re.compile(r'^=== "(.*)"\n((?:\n| {4}.*\n)+)', re.MULTILINE)

# In one process, one after the other, since each start of torch costs seconds; with names of their own.
RUN_ALL = """
import runpy, sys
for path in sys.argv[1:]:
    print(path, flush=True)
    runpy.run_path(path)
"""


def shown(page: Path) -> list[tuple[str, str]]:
    """The language and the code of each block, of tabs too."""
    text = TAB.sub(lambda tab: textwrap.dedent(tab[2]), page.read_text(encoding="utf-8"))
    return BLOCK.findall(text)


def blocks(page: Path, language: str) -> list[str]:
    return [code for kind, code in shown(page) if kind == language]


ALONE = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
ALONE["NO_MKDOCS_2_WARNING"] = "1"


def python(arguments: list[Any], folder: Path) -> str:
    """What a program prints on its standard output."""
    return forking.run(arguments, cwd=folder, env=ALONE, modules=forking.IMPORTED, check=True).stdout


def importable(name: str) -> bool:
    """Without importing it here, which takes seconds."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # of nvidia.dali where there is no nvidia
        return False


def skip_without(packages: list[str], extras: str) -> None:
    if missing := [each for each in packages if not importable(each)]:
        pytest.skip(f"not installed: {', '.join(missing)} (pip install midepoch[{extras}])")


def run(command: list[str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, env=ALONE, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.mark.parametrize(
    "page",
    # Tests of their own run the tutorial, the entries of the page for a start, and the front page.
    [page for page in PAGES if blocks(page, "python") and page.name not in RUN_ELSEWHERE],
    ids=lambda page: page.name,
)
def test_python_blocks_run(page: Path, tmp_path: Path) -> None:
    codes = blocks(page, "python")
    needed = {code: set(re.findall(r"^(?:from|import) ([a-z]\w*(?:\.dali)?)", code, re.MULTILINE)) for code in codes}
    missing = {name for names in needed.values() for name in names if not importable(name)}
    together = []
    for number, code in enumerate(codes):
        path = tmp_path / f"block_{number}.py"
        path.write_text(code.replace("quick=True)", "quick=True, laws=['tail'])"))
        if needed[code] & missing:
            continue
        if "__main__" in code:
            python([path], tmp_path)
        else:
            together.append(str(path))
    python(["-c", RUN_ALL, *together], tmp_path)
    if missing:
        pytest.skip(f"blocks were left out, since these are not installed: {', '.join(sorted(missing))}")


def test_the_stories_of_leaving_data_out(tmp_path: Path) -> None:
    """Each block as it stands, in their order: programs, and the commands for what they leave."""
    said = ""
    for number, (kind, code) in enumerate(shown(ROOT / "docs" / "holes.md")):
        if kind == "python":
            named = re.match(r"# (\w+\.py)\n", code)
            path = tmp_path / (named[1] if named else f"block_{number}.py")
            path.write_text(code)
            said += python([path], tmp_path)
        for line in code.splitlines() if kind == "bash" else ():
            words = shlex.split(line, comments=True)
            said += python(["-m", *words], tmp_path) if words[0] == "midepoch" else run(words, tmp_path)
    assert "epoch 0, positions 130..139, indices 130 131 132" in said
    assert said.count("step 14, rank 0, epoch 0, position 135\n") == 1
    ((batch,),) = torch.load(tmp_path / "step14.pt", weights_only=False)[0]
    assert batch.tolist() == [1e6] * 10


START = ROOT / "docs" / "start.md"
# The name of each entry of the page for a start -> its text, and its block.
TABS = {name: textwrap.dedent(text) for name, text in TAB.findall(START.read_text(encoding="utf-8"))}
ENTRIES = {name: code for name, text in TABS.items() for _, code in BLOCK.findall(text)[:1]}
TUTORIAL, IMPORTS, PROGRAM = blocks(START, "python")[:3]


@pytest.mark.parametrize("name", [name for name, code in ENTRIES.items() if "make" in code and code[0] != "#"])
def test_an_entry_of_the_start_resumes_exactly(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the program that the page gives for all of them, which dies in mid-epoch and after an epoch's last batch."""
    if "torchdata" in ENTRIES[name]:
        skip_without(["torchdata"], "torchdata")

    def trained(folder: str, dies_after: int | None = None) -> list[tuple[int, str]]:
        found: list[tuple[int, str]] = []

        def train(epoch: int, batch: Any) -> None:
            if len(found) == dies_after:
                raise KeyboardInterrupt
            found.append((epoch, digest(batch)))

        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "rows.csv").write_text("".join(f"{row},{row * row}\n" for row in range(10)))
        monkeypatch.chdir(tmp_path / folder)
        with pytest.raises(KeyboardInterrupt) if dies_after else contextlib.nullcontext():
            exec(f"{IMPORTS}\n{ENTRIES[name]}\n{PROGRAM}", {"print": train, "__name__": "__main__"})
        return found

    whole = trained("whole")
    of_an_epoch = len(whole) // 2
    assert of_an_epoch > 5 and [epoch for epoch, _ in whole] == [0] * of_an_epoch + [1] * of_an_epoch
    for number in (1, of_an_epoch):
        assert trained(f"{number}", number) + trained(f"{number}") == whole


def test_the_evaluation_of_one_rank_has_all_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a world of two, where each block's own assertions fail once it does not say so."""
    (code,) = (code for code in blocks(ROOT / "docs" / "howto.md", "python") if "midepoch.World()" in code)
    for variable, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(variable, value)
    exec(code, {})
    for said in (", world=midepoch.World()", "test_loader.seek(epoch=0)"):
        assert said in code
        with pytest.raises((AssertionError, RuntimeError)):
            exec(code.replace(said, "" if said[0] == "," else "pass"), {})


def lines_of(code: str) -> list[str]:
    """Without what they say to tools."""
    return [re.sub(r"  # (type: ignore|fmt: skip).*", "", line).strip() for line in code.splitlines() if line.strip()]


@pytest.mark.parametrize("name", ENTRIES)
def test_an_entry_of_the_start_has_six_lines_to_be_pasted(name: str) -> None:
    """Those that need files or a trainer are lines of a program that is run, in its order."""
    first, *others = ENTRIES[name].splitlines()
    excerpt = lines_of("\n".join(others if first.startswith("# ") else [first, *others]))
    assert 0 < len(excerpt) <= 6
    compile(ENTRIES[name], name, "exec")
    if first.startswith("# "):
        program = iter(lines_of((ROOT / first.removeprefix("# ")).read_text(encoding="utf-8")))
        for text in excerpt:
            assert text in program, f"not in {first[2:]}, or in another order: {text}"


def test_the_start_says_where_the_names_of_adapters_come_from() -> None:
    assert len(ENTRIES) > 20
    for entry, section in TABS.items():
        name = re.search(r"\b(feed|ExactResume|dali)[(.]", "".join(code for _, code in BLOCK.findall(section)))
        if name:
            module = r"`?(from )?midepoch\.(trainers\.\w+`|trainers\.\w+ import \w+|adapters import dali`)"
            assert re.search(module, section), f"{entry} uses {name[1]}, and does not import it"


def test_the_program_of_the_front_page_is_killed_and_goes_on(tmp_path: Path) -> None:
    """With SIGKILL, in mid-epoch and right after it has saved an epoch's last batch."""
    (program,) = blocks(ROOT / "README.md", "python")
    assert len(program.splitlines()) <= 15
    assert max(map(len, program.splitlines())) <= 80, "the site cuts it off at a usual width"
    program = program.replace("range(100_000)", "range(100)").replace(", batch)  #", ", batch, flush=True)  #")
    assert "range(100)," in program and "flush=True" in program
    outputs = []
    for place in ("(0, 40)", "(0, 100)", "(2, 96)", "nowhere"):
        folder = tmp_path / place
        folder.mkdir()
        dying = f"            if str((epoch, loader.position)) == {place!r}: os.kill(os.getpid(), {signal.SIGKILL})\n"
        (folder / "train.py").write_text(program)
        (folder / "dying.py").write_text(program + dying)
        job = forking.Program(["dying.py"], modules=MODULES, cwd=folder)
        head, _ = job.communicate()
        assert job.returncode == (0 if place == "nowhere" else -signal.SIGKILL)
        outputs.append(head + python(["train.py"], folder))
    assert len(re.findall(r"^\d \d+ tensor", outputs[-1], re.MULTILINE)) == 3 * 13
    assert len(set(outputs)) == 1


def test_the_first_programs_train_only_as_scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So `midepoch check` can import them."""
    monkeypatch.chdir(tmp_path)
    for code in (*blocks(ROOT / "README.md", "python"), f"{IMPORTS}\n{ENTRIES['DataLoader']}\n{PROGRAM}"):
        exec(code, {"__name__": "train", "print": lambda *_: pytest.fail("it trains")})
    assert not list(tmp_path.iterdir())


def test_the_front_pages_have_the_figures_of_the_page_on_costs() -> None:
    """Rounded; a page that was measured anew needs other front pages."""
    costs = (ROOT / "docs" / "benchmarks" / "index.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| 32 \| (\d) \| (no|yes) \| ([\d.]+) \| [^|]* \| ([\d.]+); ([\d.]+) ", costs, re.MULTILINE)
    table = {(workers, draw): tuple(map(float, figures)) for workers, draw, *figures in rows}
    (plain, drawing, _), (simple, wrapped, _) = table["0", "yes"], table["0", "no"]
    assert "0.0 µs a sample and" in costs
    readme, index = (
        " ".join(page.read_text(encoding="utf-8").split()) for page in (ROOT / "README.md", ROOT / "docs" / "index.md")
    )
    assert f"{(drawing - plain) / 32:.0f} µs for each sample that draws random numbers" in readme
    assert f"at worst {drawing:.0f} µs instead of {plain:.0f} for 32 bare integers" in readme
    assert (
        f"Worst case, a batch of 32 integers: {drawing:.0f} µs instead of {plain:.0f} if they draw, {wrapped:.0f} "
        f"instead of {simple:.0f} if they do not. With two workers: {table['2', 'yes'][2]:.2f} and "
        f"{table['2', 'no'][2]:.2f} times as long"
    ) in index


def slug(title: str) -> str:
    """Of a heading or a tab, as the site and most viewers of Markdown make it."""
    return re.sub(r"[^\w -]", "", re.sub(r"\[(.*?)\]\(.*?\)", r"\1", title).lower()).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r'^(?:#+ |=== ")(.*?)"?$', text, re.MULTILINE)
    return {slug(title) for title in titles}


def test_every_link_leads_somewhere() -> None:
    """mkdocs only tells of pages that are not there."""
    found = 0
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
            if not target.startswith("http"):
                name, _, anchor = target.partition("#")
                path = page.parent / name if name else page
                assert path.exists(), f"{page.name}: {target}"
                assert not anchor or anchor in anchors(path), f"{page.name}: {target}"
                found += 1
    assert found > 100


def test_every_file_that_a_page_names_is_there() -> None:
    name = re.compile(r"(?<![\w/.(])((?:adapters|benchmarks|core|examples|scripts|tests)/[\w/.]*\w)(?![\w<])")
    found = {(page.name, each) for page in PAGES for each in name.findall(page.read_text(encoding="utf-8"))}
    assert len(found) > 20
    assert not {(page, each) for page, each in found if not (ROOT / each).exists()}


def navigation() -> list[Path]:
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2].partition("\nnot_in_nav")[0]
    return [ROOT / "docs" / name for name in re.findall(r"([\w/]+\.md)$", nav, re.MULTILINE)]


def words(page: Path) -> int:
    return len(page.read_text(encoding="utf-8").split())


def test_the_documentation_is_short() -> None:
    """With -s, it prints the words of each page, code and tables among them."""
    found = {page.relative_to(ROOT).as_posix(): words(page) for page in navigation()}
    print(*(f"{number:6,} {name}" for name, number in found.items()), f"{sum(found.values()):6,} in all", sep="\n")
    assert len(found) == 12 and all(number > 100 for number in found.values())
    assert sum(found.values()) <= 30_000
    assert words(ROOT / "README.md") <= 550
    assert found["docs/design.md"] <= 1_500
    others = "README.md", "CHANGELOG.md", "docs/decisions.md"
    assert sum(found.values()) + sum(words(ROOT / each) for each in others) <= 31_000
    unlisted = {page for page in PAGES if page.is_relative_to(ROOT / "docs")} - {*navigation()}
    assert {page.name for page in unlisted} == {"decisions.md"}, "a page that no reader of the site finds"


def test_the_tests_are_short() -> None:
    """With -s, it prints their lines."""
    text = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "tests").rglob("*.py"))
    lines = text.count("\n")
    print(f"{lines:6,} lines of tests")
    assert lines <= 33_000
    assert [name for name in re.findall(r"def (test_\w+)", text) if len(name) > 60] == []


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "bash")], ids=lambda page: page.name)
def test_shell_blocks_name_what_exists(page: Path) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for code in blocks(page, "bash"):
        for line in filter(None, (line.partition("#")[0].strip() for line in code.splitlines())):
            if match := re.fullmatch(r"make (\w+)\b.*", line):
                run(["make", "-n", match[1]], ROOT)
            elif match := re.fullmatch(r"pip install (?:\.|'\.\[(\w+)\]')", line):
                assert match[1] is None or match[1] in extras, line
            elif match := re.match(r"(?:(?:\.venv/bin/)?python|bash) ((?:benchmarks|scripts|examples)/\w+\.\w+)", line):
                assert (ROOT / match[1]).exists(), line
            elif page == START and line in ("python train.py", "python train.py & PID=$!", "kill -9 $PID"):
                pass  # which test_the_tutorial does
            else:
                assert re.match(r"(git|cd|mv|\.venv/bin/|midepoch|torchrun) ?", line), f"nothing checks {line!r}"


def test_every_enumeration_and_bar_counts_on_where_it_was() -> None:
    """Of all that is shown, but what is shown as it was before (a line of a diff), and lists made once."""
    codes = [code for page in PAGES for kind, code in shown(page) if kind in ("python", "diff")]
    codes += [path.read_text(encoding="utf-8") for path in sorted((ROOT / "examples").rglob("*.py"))]
    counting = re.compile(r"^(?!-).*\b(?:enumerate|tqdm)\((\w*(?:loader|labelled))\b(.*)", re.MULTILINE)
    found = [match for code in codes for match in counting.finditer(code)]
    assert len(found) > 8
    assert [match[0] for match in found if "batches_done" not in match[2]] == []


def test_the_page_on_checks_explains_the_words_of_verdicts() -> None:
    page = (ROOT / "docs" / "check.md").read_text(encoding="utf-8").replace("`", "")
    assert "\n".join(f"| {word} | {meaning} |" for word, meaning in MEANINGS.items()) in page


def test_each_page_begins_with_something_to_see() -> None:
    """An example, a picture or a table of figures, within a screen; and no block is of an unknown language."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        shows = re.search(r"^(```|!\[|\| ?---)", "\n".join(text.splitlines()[:20]), re.MULTILINE)
        assert shows or page.name in ("CONTRIBUTING.md", "reference.md"), f"{page.name} begins with text alone"
        for kind, code in shown(page):
            assert kind in ("python", "bash", "text", "toml", "diff"), f"{page.name}: {kind!r} {code[:60]!r}"
        for command in re.findall(r"\bpip install\s[^`#\n]*", text):
            assert "midepoch" not in command, f"{page.name} installs by a name that was not published: {command}"


def test_examples_of_trainers_are_killed_and_go_on(tmp_path: Path) -> None:
    """In mid-epoch and in a save; batches and losses are bit-equal to those of a run that nobody killed."""
    names = ["lightning_trainer.py", "hugging_face_trainer.py", "fabric_loop.py", "accelerate_loop.py"]
    names += ["distributed_checkpoint.py", "ignite_engine.py"]
    skip_without(["lightning", "transformers", "accelerate", "ignite"], "trainers")
    killer = ROOT / "tests" / "support" / "kill_examples.py"
    command = [killer, tmp_path, *["--in-a-save"] * bool(os.environ.get("MIDEPOCH_CHAOS"))]
    command += [ROOT / "examples" / name for name in names]
    report = json.loads(python(command, tmp_path))
    assert list(report) == names
    for name, runs in report.items():
        assert_went_on(name, **runs)


def test_torchrun_example_is_killed_and_goes_on_elsewhere(tmp_path: Path) -> None:
    """In mid-epoch, with its agent; what is left has each sample once, in the order of an undisturbed run."""
    script = [ROOT / "examples" / "torchrun.py", tmp_path / "snapshot.pt"]
    inputs = torch.randn(96, 4, generator=torch.Generator().manual_seed(0))
    data = DataLoader(TensorDataset(inputs.sum(1, keepdim=True)), batch_size=96, shuffle=True)
    orders = [rows.tolist() for loader in [midepoch.wrap(data, seed=0)] for _ in range(1000) for (rows,) in loader]

    # 12 batches of two processes an epoch, a snapshot after each fifth.
    job = torchrun(2, [*script, "--epochs=1000"], cwd=tmp_path)
    killed = [job.stdout.readline() for _ in range(71)]
    kill_with_children(job.pid)
    killed += job.stdout.readlines()
    last = max(map(int, re.findall(r"batch (\d+) of rank", "".join(killed))))

    epoch = last // 12 + 1
    job = torchrun(1, [*script, f"--epochs={epoch + 1}"], cwd=tmp_path)
    output, _ = job.communicate()
    assert job.returncode == 0, output[-3000:]
    resumed, *_ = re.findall(r"^epoch (\d+) from position (\d+)$", output, re.MULTILINE)
    begin, position = int(resumed[0]), int(resumed[1])
    assert 12 * begin + position // 8 in (last // 5 * 5, last // 5 * 5 + 5, last // 5 * 5 - 5)
    batches = re.findall(r"^batch \d+ of rank 0: (.*)$", output, re.MULTILINE)
    rest = [row for rows in batches for row in json.loads(rows)]
    assert rest == [row for order in orders[begin : epoch + 1] for row in order][position:]


def test_the_tutorial(tmp_path: Path) -> None:
    """The job is killed, and asked to end, and goes on; each of its steps has the loss of an undisturbed run."""
    assert "time.sleep(0.5)" in TUTORIAL, "so that people have the time to kill it; nobody here needs it"
    losses: dict[str, dict[str, str]] = {}
    for name, number in (("undisturbed", None), ("killed", signal.SIGKILL), ("ended", signal.SIGTERM)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "train.py").write_text(TUTORIAL.replace("time.sleep(0.5)", "time.sleep(0.02)"))
        lines: list[str] = []
        if number is not None:
            job = forking.Program(["train.py"], modules=MODULES, cwd=folder, merged=True)
            with job.stdout as output:
                lines = [next(output) for _ in range(17)]
                job.send_signal(number)
                lines += list(output) if number == signal.SIGTERM else []
            job.wait()
            if number == signal.SIGTERM:
                assert job.returncode == 0 and "leaving" in lines[-1], lines
                assert all(re.match(r"step \d+: loss|a signal was received", line) for line in lines[17:]), lines
        lines += python(["train.py"], folder).splitlines()
        found = [re.fullmatch(r"step (\d+): loss ([\d.]+)", line.strip()) for line in lines]
        steps = [(match[1], match[2]) for match in found if match]
        losses[name] = dict(steps)
        assert all(losses[name][step] == loss for step, loss in steps), "a step has two losses"
        # Those since the last snapshot are done again; of the last one before it leaves a job says nothing any more.
        assert len(losses[name]) == (47 if number == signal.SIGTERM else 48)
        assert (number == signal.SIGKILL) == (len(steps) > 48)
        assert (number == signal.SIGKILL) == any(line.startswith("going on in epoch 0 after 15") for line in lines)
        assert (number is None) != any(line.startswith("going on in epoch 0") for line in lines)
    assert losses["killed"] == losses["undisturbed"] and len(losses["killed"]) == 48
    assert losses["ended"].items() < losses["undisturbed"].items()


def test_the_site_is_built(tmp_path: Path) -> None:
    """Strictly: a link that leads nowhere, or a name in the reference that is not there, is an error."""
    pytest.importorskip("mkdocs", reason="needs midepoch[docs]")
    run([sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path)], ROOT)
    pages = {each.stem for each in PAGES if each.parent.name == "docs"} - {"index"}
    assert pages <= {each.name for each in tmp_path.iterdir()}
    reference = (tmp_path / "reference" / "index.html").read_text(encoding="utf-8")
    text = " ".join(html.unescape(re.sub(r"<[^>]+>", "", reference)).split())
    for name in midepoch.__all__:
        assert re.search(rf"midepoch\.(errors\.)?{name}\b", reference), f"{name} is not in the reference"
        thing = getattr(midepoch, name)
        if thing.__module__.startswith("midepoch"):  # `combine` has the name of a package, which was shown in its place
            assert " ".join(thing.__doc__.partition("\n\n")[0].partition("`")[0].split()) in text, name


def test_an_adapter_of_another_package(tmp_path: Path) -> None:
    """It is found by its entry point, and resumes, on other numbers of ranks too."""
    package = shutil.copytree(ROOT / "examples" / "adapter_package", tmp_path / "package")
    assert len((package / "midepoch_rows.py").read_text(encoding="utf-8").splitlines()) <= 60
    build = "from setuptools.build_meta import build_wheel; build_wheel('.')"
    forking.run(["-c", build], modules=MODULES, cwd=package, check=True)
    (wheel,) = package.glob("*.whl")
    shutil.unpack_archive(wheel, tmp_path / "site", "zip")
    command: list[str | Path] = ["-m", "pytest", "-qc", os.devnull, "-k", "tail or topology", package / "test_rows.py"]
    found = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    assert "2 passed" in forking.run(command, modules=MODULES, cwd=package, env=found, check=True).stdout


def test_every_example_is_run() -> None:
    tested = set(re.findall(r'"(\w+\.py)"', Path(__file__).read_text(encoding="utf-8")))
    others = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    for example in (ROOT / "examples").glob("*.py"):
        assert example.name in tested or f'"{example.name}"' in others, f"no test runs {example.name}"
        assert len(example.read_text(encoding="utf-8").splitlines()) <= 60, f"{example.name} has more than 60 lines"
