"""What a pass does next, as docs/design.md has it, made by doing it.

``python tests/laws/test_transitions.py`` writes it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

from torch.utils.data import DataLoader

import midepoch
from midepoch import Loader, MidepochError, World
from support.places import ROOT

DESIGN = ROOT / "docs/design.md"


class Numbers(list[int]):
    """Six samples, of which one cannot be read, once."""

    fails = False

    def __getitem__(self, index: Any) -> Any:
        if self.fails and index == 2:
            self.fails = False
            raise KeyError(index)
        return super().__getitem__(index)


class Moved(NamedTuple):
    """A loader to which something has happened, and the pass that ran then."""

    loader: Loader
    batches: Iterator[Any] | None = None
    keeps: Any = None  # what must not be freed


def loader(**options: Any) -> Loader:
    return midepoch.wrap(DataLoader(cast(Any, Numbers(range(6))), batch_size=2), seed=0, **{"world": World()} | options)


def read(count: int, made: Loader | None = None) -> Moved:
    made = loader() if made is None else made
    batches = iter(made)
    for _ in range(count):
        next(batches)
    return Moved(made, batches)


def in_a_body(count: int, ends: bool = False) -> Moved:
    made = loader()
    epochs = made.epochs(2)
    next(epochs)
    moved = read(count, made)
    if ends:
        moved = Moved(made)
        next(epochs)
    return moved._replace(keeps=epochs)


def after(moved: Moved, act: Callable[[Loader], object]) -> Moved:
    act(moved.loader)
    return moved


def failed(**options: Any) -> Moved:
    moved = read(1, loader(**options))
    moved.loader.source.dataset.fails = True
    try:
        next(moved.batches or iter(()))
    except KeyError:
        return moved
    raise AssertionError("it did not fail")


def ended_of_unknown_length() -> Moved:
    moved = read(3, midepoch.wrap(lambda: iter([[0], [1], [2]])))
    assert next(moved.batches or iter(()), None) is None
    return moved


EVENTS: dict[str, Callable[[], Moved]] = {
    "the loader is made": lambda: Moved(loader()),
    "a batch is handed out": lambda: read(1),
    "an epoch's last batch is handed out": lambda: read(3),
    "the same, in the body of `epochs`": lambda: in_a_body(3),
    "the body ends, after its pass": lambda: in_a_body(3, ends=True),
    "the body ends, and a pass was left": lambda: in_a_body(1, ends=True),
    "a source of unknown length ends": ended_of_unknown_length,
    "`load_state_dict` or `seek`, to (0, 4)": lambda: after(read(1), lambda made: made.seek(epoch=0, position=4)),
    "the same, after the last batch": lambda: after(read(3), lambda made: made.seek(epoch=0, position=4)),
    "`rollback` to (0, 0)": lambda: after(read(2), Loader.rollback),
    "`set_epoch(2)`": lambda: after(read(1), lambda made: made.set_epoch(2)),
    "`reshard`": lambda: after(read(1), lambda made: made.reshard(World())),
    "a sample cannot be read": failed,
    "the same, with `on_error=\"retry\"`": lambda: failed(on_error="retry"),
    "`close`": lambda: after(read(1), Loader.close),
    "another pass takes its first batch": lambda: after(read(1), lambda made: next(iter(made))),
}  # fmt: skip


def begins(made: Loader, batches: Iterator[Any]) -> str:
    """What the next batch of a pass is."""
    try:
        batch = next(batches)
    except StopIteration:
        return "its end"
    except MidepochError:
        return "an error"
    epoch = made.epoch if made.position else made.epoch - 1
    return f"the batch at ({epoch}, {int(batch[0]) if len(batch) == 2 else made.position - 1})"


def rows() -> list[str]:
    lines = ["| event | the place after it | a new pass begins with | the pass that runs gives |", "|---|---|---|---|"]
    for event, happen in EVENTS.items():
        moved = happen()
        at = f"({moved.loader.epoch}, {moved.loader.position})"
        again = happen()
        new = begins(again.loader, iter(again.loader))
        runs = "" if moved.batches is None else begins(moved.loader, moved.batches)
        lines.append(f"| {event} | {at} | {new} | {runs} |")
        for each in (moved, again):
            each.loader.close()
    return lines


def test_the_table_of_what_a_pass_does_next_is_what_it_does() -> None:
    assert "\n".join(rows()) in DESIGN.read_text(encoding="utf-8")


if __name__ == "__main__":
    text = DESIGN.read_text(encoding="utf-8")
    table = "\n".join(rows())
    pattern = re.compile(r"\| event \| the place after it .*?(?=\n\n)", re.DOTALL)
    DESIGN.write_text(pattern.sub(lambda _: table, text), encoding="utf-8")
    sys.stdout.write(table + "\n")
