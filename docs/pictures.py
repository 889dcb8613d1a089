"""Draws the pictures of the documentation: ``python docs/pictures.py``. A test compares them with what is stored.

Nothing in them is made up: batches and states come from loaders, the rooms from docs/design.md, whose arrows another
test compares with the imports.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import midepoch

DOCS = Path(__file__).parent
FOLDER = DOCS / "pictures"

SIZE, BATCH, STEPS = 24, 3, 2  # samples of an epoch, in a batch of one rank, steps before the cut
COLOURS = ("#3b6fb6", "#b9770e", "#4a9e5c")  # of the ranks
INK, FAINT, PAPER = "#222222", "#777777", "#ffffff"


class Drawing:
    """An SVG picture on white paper, so that it can be read on a dark page too."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._width, self._height, self._title = width, height, title
        self._parts: list[str] = []

    def text(self, x: float, y: float, text: str, *, size: int = 13, colour: str = INK, middle: bool = False) -> None:
        """A line of text that begins at x, or has its middle there."""
        anchor = ' text-anchor="middle"' if middle else ""
        self._parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{colour}"{anchor}>{escape(text)}</text>'
        )

    def box(self, x: float, y: float, width: float, height: float, colour: str, text: str = "") -> None:
        """A box with a text in its middle, white on a dark colour."""
        line = FAINT if colour == PAPER else colour
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" fill="{colour}" stroke="{line}"/>'
        )
        if text:
            ink = INK if colour == PAPER else PAPER
            self.text(x + width / 2, y + height / 2 + 4, text, colour=ink, middle=True)

    def line(self, start: tuple[float, float], end: tuple[float, float], *, arrow: bool = False) -> None:
        """A straight line; dashed unless it is an arrow."""
        kind = ' marker-end="url(#tip)"' if arrow else ' stroke-dasharray="5 4"'
        (x1, y1), (x2, y2) = start, end
        self._parts.append(f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{FAINT}"{kind}/>')

    def __str__(self) -> str:
        tip = '<marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self._width} {self._height}" '
                f'width="{self._width}" height="{self._height}" font-family="system-ui, sans-serif" role="img">',
                f"<title>{escape(self._title)}</title>",
                f'<defs>{tip}<path d="M0 0 L8 4 L0 8 z" fill="{FAINT}"/></marker></defs>',
                f'<rect width="{self._width}" height="{self._height}" fill="{PAPER}"/>',
                *self._parts,
                "</svg>",
                "",
            ]
        )


def loader_of(rank: int, world_size: int) -> midepoch.Loader:
    """The loader of one rank."""
    source = DataLoader(TensorDataset(torch.arange(SIZE)), batch_size=BATCH, shuffle=True)
    return midepoch.wrap(source, seed=0, world=midepoch.World(rank, world_size))


def steps_of(loader: Iterable[Any]) -> list[list[int]]:
    """The samples of each batch."""
    return [batch[0].tolist() for batch in loader]


def cut() -> tuple[list[int], list[list[list[int]]], list[list[list[int]]], dict[str, Any]]:
    """The epoch's order; the batches of two ranks before a cut, and of three ranks after it; the state between."""
    order = [sample for batch in steps_of(loader_of(0, 1)) for sample in batch]
    before = []
    for rank in range(2):
        before.append(steps_of(itertools.islice(loader_of(rank, 2), STEPS)))
    loader = loader_of(0, 2)
    for number, _ in enumerate(loader, start=1):
        if number == STEPS:
            break
    state = loader.state_dict()
    after = []
    for rank in range(3):
        resumed = loader_of(rank, 3)
        resumed.load_state_dict(state)
        after.append(steps_of(resumed))
    return order, before, after, state


def draw_order() -> Drawing:
    """An order, and the batches that two ranks make of it before a cut, and three after it."""
    order, before, after, state = cut()
    cell, left, row = 30, 150, 26
    place = {sample: number for number, sample in enumerate(order)}
    picture = Drawing(
        left + SIZE * cell + 20, 420, "How an order becomes batches on two ranks, and on three after a cut"
    )
    picture.text(12, 24, "The order is a function of the seed and the epoch. Here is that of seed 0, epoch 0:", size=15)
    picture.text(12, 52, "position", colour=FAINT)
    picture.text(12, 78, "sample")
    for number, sample in enumerate(order):
        picture.text(left + number * cell + cell / 2, 52, str(number), size=11, colour=FAINT, middle=True)
        picture.box(left + number * cell + 1, 60, cell - 2, row - 2, PAPER, str(sample))

    def draw_ranks(ranks: Sequence[Sequence[Sequence[int]]], top: float) -> None:
        for rank, batches in enumerate(ranks):
            y = top + rank * row
            picture.text(12, y + 17, f"rank {rank} of {len(ranks)}")
            for step, batch in enumerate(batches, start=1):
                for sample in batch:
                    picture.box(left + place[sample] * cell + 1, y, cell - 2, row - 4, COLOURS[rank], str(sample))
                middle = left + (place[batch[0]] + len(batch) / 2) * cell
                if rank == 0:
                    picture.text(middle, y - 4, f"batch {step}", size=10, colour=FAINT, middle=True)

    position = state["position"]
    x = left + position * cell
    picture.text(12, 122, f"Two ranks take {STEPS} batches of {BATCH} each:", size=15)
    draw_ranks(before, 142)
    picture.line((x, 58), (x, 330))
    picture.text(x + 6, 214, f"cut: the state says epoch {state['epoch']}, position {position}")
    picture.text(12, 248, "Three ranks continue from that state:", size=15)
    draw_ranks(after, 268)
    given = sum(len(batch) for ranks in (before, after) for rank in ranks for batch in rank)
    words = f"{given} samples given, {len(set(order))} in the epoch: none is lost and none comes twice."
    picture.text(12, 385, words, size=15)
    picture.text(
        12, 406, "Each sample's random augmentations follow from the seed, the epoch and its position.", colour=FAINT
    )
    return picture


MEANINGS = {
    "version": "of the state's form: another one is refused, or converted",
    "adapter": "what kind of source it is from: another kind is refused",
    "epoch": "which order: it is a function of seed and epoch",
    "position": "how much of it all ranks together have received",
    "seed": "of the order and of every random number",
    "size": "units in the epoch: data of another size is refused",
    "world_size": "for you to read: it is not compared",
    "batch_size": "for you to read: it is not compared",
    "fingerprint": "what the order depends on: another source is refused",
    "detail": "a source's own checkpoint; empty where the order is ours",
    "witness": "what the epoch's first sample looked like: proves the data",
    "changed": "what the loop has changed in the dataset: to be restored",
    "omit": "what epochs leave out",
    "checksum": "over all of it: damage is refused",
}
"""What each key of a state is for. A test compares the keys."""


def draw_state() -> Drawing:
    """What a state holds, by the example of the cut."""
    state = cut()[3]
    row = 27
    picture = Drawing(900, 70 + row * len(state), "What a state holds")
    picture.text(12, 26, "The state at the cut, the same on every rank:", size=15)
    for number, (key, value) in enumerate(state.items()):
        y = 42 + number * row
        moves = key in ("epoch", "position")
        picture.box(12, y, 110, row - 4, COLOURS[0] if moves else PAPER, key)
        shown = repr(value)
        picture.text(134, y + 16, shown if len(shown) <= 44 else f"{shown[:41]}...", size=12)
        picture.text(470, y + 16, MEANINGS[key], size=12, colour=FAINT)
    picture.text(12, 58 + row * len(state), "Blue is the progress. The rest says of what, and proves it.", colour=FAINT)
    return picture


def rooms() -> tuple[dict[str, str], list[tuple[str, str]]]:
    """Room -> what it holds, of docs/design.md, and the arrows (who imports, what), of docs/pictures/rooms.mmd."""
    text = (DOCS / "design.md").read_text(encoding="utf-8")
    arrows = re.findall(r"(\w+) --> (\w+)", (FOLDER / "rooms.mmd").read_text(encoding="utf-8"))
    table = text.partition("| room | holds |")[2].partition("\n\n")[0]
    holds: dict[str, str] = {}
    for names, words in re.findall(r"^\| (.*?) \| (.*?) \|$", table, re.MULTILINE):
        holds |= dict.fromkeys((name.rstrip("/") for name in re.findall(r"`([\w/]+)`", names)), words)
    return {room: holds[room] for room in dict.fromkeys(room for arrow in arrows for room in arrow)}, arrows


def floors(arrows: Sequence[tuple[str, str]]) -> list[list[str]]:
    """The rooms by floors, the top one first: each as low as what it imports allows."""
    below: dict[str, set[str]] = {}
    for upper, lower in arrows:
        below.setdefault(upper, set()).add(lower)
        below.setdefault(lower, set())
    height: dict[str, int] = {}
    while len(height) < len(below):
        ready = [room for room in below if room not in height and below[room] <= height.keys()]
        height |= {room: max((height[each] + 1 for each in below[room]), default=0) for room in ready}
    return [sorted(room for room in height if height[room] == floor) for floor in range(max(height.values()), -1, -1)]


def draw_rooms() -> Drawing:
    """The rooms of core/: each imports downwards only."""
    _, arrows = rooms()
    levels = floors(arrows)
    width, high, wide, gap = 900, 30, 140, 62
    picture = Drawing(width, 50 + gap * len(levels), "The rooms of core: arrows are imports, and lead downwards only")
    picture.text(12, 26, "The rooms of core/. An arrow means: imports.", size=15)
    places: dict[str, tuple[float, float]] = {}
    for floor, level in enumerate(levels):
        # Below the middle of those that import it, so that fewer arrows cross.
        above = {room: [places[upper][0] for upper, lower in arrows if lower == room] for room in level}
        level = sorted(level, key=lambda room: (sum(above[room]) / len(above[room]) if above[room] else 0.0, room))
        for number, room in enumerate(level):
            places[room] = (width / (len(level) + 1) * (number + 1), 44.0 + gap * floor)
    for upper, lower in sorted(arrows):
        (x1, y1), (x2, y2) = places[upper], places[lower]
        picture.line((x1, y1 + high), (x2, y2), arrow=True)
    for room, (x, y) in places.items():
        picture.box(x - wide / 2, y, wide, high, COLOURS[0] if room == "loader" else "#5b6b80", room)
    return picture


PICTURES = {"order": draw_order, "state": draw_state, "rooms": draw_rooms}


def main() -> None:
    """Write all of them."""
    FOLDER.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(str(draw()), encoding="utf-8")


if __name__ == "__main__":
    main()
