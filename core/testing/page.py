"""The report of an examination as one HTML page: the laws, and which samples each rank received around each cut."""

from __future__ import annotations

import html
import time
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from .examine import Examination
from .report import LawError, Report, Verdict

__all__ = ["Picture", "make_page", "take_pictures"]

_MOST_SAMPLES = 2000  # of an epoch that are drawn
_WIDTH = 1000


@dataclass(frozen=True)
class Picture:
    """What became of one epoch that was cut, and continued on so many ranks.

    Attributes:
        epoch: its number.
        cut: batches of each rank before the cut.
        worlds: ranks before the cut, and after it.
        order: the epoch's samples in the order in which one rank alone gives them, uninterrupted.
        before: for each rank the samples that it gave before the cut.
        after: the same after it; empty where `problem` says why there is nothing.
        problem: what went wrong, or why the loader refused.
    """

    epoch: int
    cut: int
    worlds: tuple[int, int]
    order: tuple[Hashable, ...]
    before: tuple[tuple[Hashable, ...], ...]
    after: tuple[tuple[Hashable, ...], ...]
    problem: str = ""

    @property
    def counts(self) -> Counter[Hashable]:
        """How often each sample was given."""
        return Counter(sample for ranks in (self.before, self.after) for rank in ranks for sample in rank)

    @property
    def lost(self) -> tuple[Hashable, ...]:
        """Samples of the epoch that nobody was given."""
        counts = self.counts
        return tuple(sample for sample in self.order if not counts[sample])

    @property
    def repeated(self) -> tuple[Hashable, ...]:
        """Samples that were given more often than the epoch has them."""
        expected = Counter(self.order)
        return tuple(sample for sample, count in self.counts.items() if count > expected[sample])


def take_pictures(examination: Examination) -> list[Picture]:
    """One picture for each change of the number of ranks that can be examined, and for each epoch's middle cut."""
    examination.begin("picture", "", "")
    try:
        whole = examination.whole()
    except LawError:
        return []
    sizes = examination.worlds
    pairs = [(one, other) for one in sizes for other in sizes]
    return [
        _take(examination, epoch, pair, tuple(sample for batch in whole.passes[epoch].ids for sample in batch))
        for epoch in range(examination.settings.epochs)
        for pair in pairs
    ]


def _take(examination: Examination, epoch: int, worlds: tuple[int, int], order: tuple[Hashable, ...]) -> Picture:
    before: tuple[tuple[Hashable, ...], ...] = ()
    cut = 0
    try:
        heads = examination.heads(worlds[0])
        cut = len(heads[0].passes[epoch].batches) // 2
        before = tuple(tuple(sample for batch in head.passes[epoch].ids[:cut] for sample in batch) for head in heads)
        resumed = examination.resume_world(heads, [(epoch, cut)], worlds[1])
    except LawError as error:
        return Picture(epoch, cut, worlds, order, before, (), error.got.splitlines()[0])
    problems = [recordings[0].failure for recordings in resumed if recordings[0].failure is not None]
    if problems:
        return Picture(epoch, cut, worlds, order, before, (), str(problems[0]))
    after = tuple(tuple(sample for batch in recordings[0].passes[0].ids for sample in batch) for recordings in resumed)
    return Picture(epoch, cut, worlds, order, before, after)


def make_page(target: str, report: Report, pictures: Sequence[Picture], versions: str) -> str:
    """A page that needs nothing else: no script, no font, no address."""
    failed = len(report.failures)
    verdict = "every law that applies holds" if not failed else f"{failed} of {len(report.verdicts)} laws are broken"
    rows = "\n".join(_row(verdict) for verdict in report.verdicts)
    drawn = "\n".join(_figure(picture) for picture in pictures)
    return _PAGE.format(
        target=html.escape(target),
        verdict=html.escape(verdict),
        tone="bad" if failed else "good",
        versions=html.escape(versions),
        date=time.strftime("%Y-%m-%d %H:%M"),
        rows=rows,
        pictures=drawn or "<p>There is nothing to draw: the loader did not get through an uninterrupted run.</p>",
    )


def _row(verdict: Verdict) -> str:
    tone = {"holds": "good", "failed": "bad"}.get(verdict.status, "other")
    details = html.escape(verdict.reason)
    if (error := verdict.error) is not None:
        place = ", ".join(
            f"{name} {value}" for name, value in (("epoch", error.epoch), ("batch", error.batch)) if value is not None
        )
        lines = {
            "where": place,
            "expected": error.expected,
            "got": error.got,
            "usually": error.cause,
            "cure": error.cure,
        }
        details = "".join(f"<dt>{name}</dt><dd>{html.escape(text[:4000])}</dd>" for name, text in lines.items() if text)
        details = f"<dl>{details}</dl>"
    return (
        f'<tr class="{tone}"><th scope="row">{html.escape(verdict.law)}</th><td>{verdict.status}</td>'
        f"<td>{details}</td><td>{verdict.seconds:.2f}</td></tr>"
    )


def _figure(picture: Picture) -> str:
    title = (
        f"epoch {picture.epoch}, cut after {picture.cut} batches of each rank, "
        f"{_ranks(picture.worlds[0])} before and {_ranks(picture.worlds[1])} after"
    )
    if picture.problem:
        text = f'<p class="other">{html.escape(picture.problem[:1000])}</p>'
        return f"<figure><figcaption>{html.escape(title)}</figcaption>{text}</figure>"
    lost, repeated = picture.lost, picture.repeated
    words = f"{len(picture.order)} samples: {len(lost)} lost, {len(repeated)} repeated"
    tone = "bad" if lost else "warn" if repeated else "good"
    return (
        f"<figure><figcaption>{html.escape(title)}: <span class='{tone}'>{words}</span></figcaption>"
        f"{_drawing(picture, title + ': ' + words)}</figure>"
    )


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def _drawing(picture: Picture, words: str) -> str:
    """Lanes of ranks, before and after, over the samples in the epoch's order; what is lost or repeated below."""
    order = picture.order[:_MOST_SAMPLES]
    column: dict[Hashable, int] = {}
    for number, sample in enumerate(order):
        column.setdefault(sample, number)
    step = (_WIDTH - 120) / max(1, len(order))
    lanes = [(f"rank {rank}", "before", given) for rank, given in enumerate(picture.before)]
    lanes += [(f"rank {rank}", "after", given) for rank, given in enumerate(picture.after)]
    parts = []
    height = 0
    for label, phase, given in lanes:
        marks = [_mark(column[sample], height, step, phase, sample) for sample in given if sample in column]
        parts.append(f'<text x="0" y="{height + 11}">{label}, {phase}</text>{"".join(marks)}')
        height += 16
    for label, samples in (("lost", picture.lost), ("repeated", picture.repeated)):
        marks = [_mark(column[sample], height, step, label, sample) for sample in samples if sample in column]
        parts.append(f'<text x="0" y="{height + 11}">{label}</text>{"".join(marks)}')
        height += 16
    return f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{html.escape(words)}">{"".join(parts)}</svg>'


def _mark(column: int, top: int, step: float, kind: str, sample: Hashable) -> str:
    width = max(step * (0.9 if step > 3 else 1), 0.5)
    return (
        f'<rect class="{kind}" x="{110 + column * step:.2f}" y="{top + 1}" width="{width:.2f}" height="13">'
        f"<title>{html.escape(str(sample)[:60])}</title></rect>"
    )


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>midepoch check: {target}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 2rem auto; padding: 0 1rem; color: #222; }}
table {{ border-collapse: collapse; width: 100%; }}
th, td {{ border-bottom: 1px solid #ddd; padding: 0.3rem 0.6rem; text-align: left; vertical-align: top; }}
th[scope=row] {{ white-space: nowrap; }}
dl {{ margin: 0; }} dt {{ float: left; clear: left; width: 5.5rem; color: #666; }}
dd {{ margin-left: 6rem; white-space: pre-wrap; overflow-wrap: anywhere; }}
figure {{ margin: 1.5rem 0; }} figcaption {{ margin-bottom: 0.3rem; }}
svg {{ width: 100%; height: auto; }} svg text {{ font-size: 11px; fill: #555; }}
.good td:nth-child(2), span.good {{ color: #17702e; }}
.bad td:nth-child(2), span.bad {{ color: #b3121d; font-weight: 600; }}
span.warn {{ color: #96590b; }} .other {{ color: #666; }}
rect.before {{ fill: #3b6fb6; }} rect.after {{ fill: #7fb3e6; }}
rect.lost {{ fill: #d0202b; }} rect.repeated {{ fill: #e39a1c; }}
</style>
</head>
<body>
<h1>{target}</h1>
<p class="{tone}"><span class="{tone}">{verdict}</span>. {versions}; {date}.</p>
<table>
<thead><tr><th>law</th><th>verdict</th><th></th><th>seconds</th></tr></thead>
<tbody>
{rows}
</tbody>
</table>
<h2>Which samples each rank received</h2>
<p>Each column is a sample, in the order in which one rank alone gives them. Dark: before the cut; light: after it.
Ranks that must have as many batches each may be given samples once more at an epoch's end
(<code>tail="pad"</code>).</p>
{pictures}
</body>
</html>
"""
