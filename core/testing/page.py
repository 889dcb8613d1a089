"""The report of an examination as an HTML page: the finding, which samples each rank received, the laws."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby

from . import items
from .diagnosis import Diagnosis
from .examine import Examination
from .record import Recording
from .report import LawError, Report, Verdict, legend
from .sides import Comparison

__all__ = ["Picture", "make_page", "take_pictures"]

_MOST_SAMPLES = 2000  # samples drawn for one epoch
_MOST_CUTS = 24  # cuts drawn for one epoch
_WIDTH = 1000
_LABELS = 110  # width of the labels
_HEIGHT = 16  # height of a row


@dataclass(frozen=True)
class Picture:
    """What happened to one epoch that was cut and continued, perhaps on another number of ranks.

    Attributes:
        epoch: its number.
        cut: batches of each rank before the cut.
        worlds: number of ranks before the cut, and after it.
        order: the epoch's samples in the order of an uninterrupted run on one rank.
        before: for each rank, the samples that it gave before the cut.
        after: the same after the cut; empty if `problem` is set.
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
        """Samples of the epoch that no rank received."""
        counts = self.counts
        return tuple(sample for sample in self.order if not counts[sample])

    @property
    def repeated(self) -> tuple[Hashable, ...]:
        """Samples that were given more often than the epoch has them."""
        expected = Counter(self.order)
        return tuple(sample for sample, count in self.counts.items() if count > expected[sample])


def take_pictures(examination: Examination, *, few: bool = False) -> list[list[Picture]]:
    """For each epoch and possible change of the number of ranks a list: one picture for each cut inside.

    If an epoch can be cut in very many places, some are chosen, evenly spaced. ``few``: only one rank before and after.
    """
    examination.begin("picture", "", "")
    try:
        whole = examination.whole()
    except LawError:
        return []
    sizes = (1,) if few else examination.worlds
    found = []
    for worlds in [(one, other) for one in sizes for other in sizes]:
        for epoch in range(examination.settings.epochs):
            order = tuple(sample for batch in whole.passes[epoch].ids for sample in batch)
            found.append(_take(examination, epoch, worlds, order))
    return list(filter(None, found))


def _take(examination: Examination, epoch: int, worlds: tuple[int, int], order: tuple[Hashable, ...]) -> list[Picture]:
    cuts = [0]
    try:
        heads = examination.heads(worlds[0])
        inside = examination.interior(heads[0], epoch)
        if not inside:
            return []
        cuts = inside[:: -(-len(inside) // _MOST_CUTS)]
        resumed = examination.resume_world(heads, [(epoch, cut) for cut in cuts], worlds[1])
    except LawError as error:
        return [Picture(epoch, cuts[len(cuts) // 2], worlds, order, (), (), error.got.splitlines()[0])]
    pictures = []
    for number, cut in enumerate(cuts):
        before = tuple(_samples(head, epoch, cut) for head in heads)
        failures = [recordings[number].failure for recordings in resumed]
        problem = next((str(failure) for failure in failures if failure is not None), "")
        after = () if problem else tuple(_samples(recordings[number], 0) for recordings in resumed)
        pictures.append(Picture(epoch, cut, worlds, order, before, after, problem))
    return pictures


def _samples(recording: Recording, epoch: int, batches: int | None = None) -> tuple[Hashable, ...]:
    return tuple(sample for batch in recording.passes[epoch].ids[:batches] for sample in batch)


def make_page(
    target: str,
    diagnosis: Diagnosis,
    comparison: Comparison,
    report: Report,
    pictures: Mapping[str, Sequence[Sequence[Picture]]],
    versions: str,
) -> str:
    """The page as HTML. It is self-contained: no script, no font, no link.

    Args:
        target: the name of the loader.
        diagnosis: the finding, with which the page opens.
        comparison: what happens with midepoch and without.
        report: the laws' verdicts.
        pictures: heading of a side -> the result of `take_pictures`.
        versions: of midepoch and its environment, as text.
    """
    failed = sum(verdict.error is not None for verdict in report.verdicts)
    unkept = sum(verdict.error is not None for verdict in report.trials)
    words = "every law that applies holds" if not failed else f"{failed} of {len(report.verdicts)} laws are broken"
    words = f"{unkept} of {len(report.trials)} trials find a promise that is not kept; {words}" if unkept else words
    parts = [
        f"<h1>{escape(target)}</h1>",
        f'<p class="finding">{_span(diagnosis.tone, diagnosis.title)}</p>',
        _listed(diagnosis.facts),
        f"<p>{escape(diagnosis.together)}. Mend this first, then check again.</p>" if diagnosis.together else "",
    ]
    for error in diagnosis.others:
        where = f" at {error.place}" if error.place else ""
        also = f"Also: the law '{error.law}' is broken{where}: {error.got[:1000]}"
        parts.append(f"<p>{escape(also)}</p>")
    rows = [("", question, *(_span(each.tone, each.text) for each in answers)) for question, answers in comparison.rows]
    parts += [_table(("", *comparison.headings), rows), "<h2>Which samples each rank received</h2>", _COLUMNS]
    for heading, taken in pictures.items():
        first, *others = list(map(_section, taken)) or [_NOTHING]
        more = f"<details><summary>Other epochs and numbers of ranks</summary>{''.join(others)}</details>"
        parts.append(f"<h3>{escape(heading)}</h3>{first}{more if others else ''}")
    tone, date = "bad" if failed or unkept else "good", time.strftime("%Y-%m-%d %H:%M")
    parts.append(f"<h2>What it rests on</h2><p>{_span(tone, words)}. {escape(versions)}; {date}.</p>")
    if report.promises:
        standing = [
            (_TONES.get(each.standing, "other"), each.name, each.standing, escape(each.reason))
            for each in report.promises
        ]
        parts.append(_table(("promise", "rests on", ""), standing) + _STANDINGS)
    # Trials before laws, since they name causes; in both, what failed before the others.
    verdicts = [each for group in (report.trials, report.verdicts) for each in sorted(group, key=_holds)]
    parts.append(_table(("law or trial", "verdict", "", "seconds"), map(_verdict_row, verdicts)))
    meaning = legend(verdicts)
    parts.append(f"<p>{escape(meaning)}.</p>" if meaning else "")
    return _PAGE.format(title=escape(target), style=_STYLE, body="\n".join(filter(None, parts)))


_TONES = {"holds": "good", "failed": "bad", "proved at each resume": "good", "tried": "good", "not kept": "bad"}


def _holds(verdict: Verdict) -> bool:
    return verdict.error is None


def _verdict_row(verdict: Verdict) -> tuple[str, ...]:
    error, reason = verdict.error, escape(verdict.reason)
    if error is not None:
        facts = (("where", error.place), ("expected", error.expected), ("got", error.got), ("usually", error.cause))
        reason = _listed([each for each in (*facts, ("cure", error.cure)) if each[1]])
    return _TONES.get(verdict.status, "other"), verdict.law, verdict.status, reason, f"{verdict.seconds:.2f}"


def _span(tone: str, text: str) -> str:
    return f'<span class="{tone}">{escape(text)}</span>'


def _listed(facts: Iterable[tuple[str, str]]) -> str:
    lines = "".join(f"<dt>{escape(label)}</dt><dd>{escape(text[:4000])}</dd>" for label, text in facts)
    return f"<dl>{lines}</dl>" if lines else ""


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A row begins with its tone and its name; its other cells are HTML."""
    head = "".join(f"<th>{escape(each)}</th>" for each in headings)
    body = "".join(
        f'<tr class="{tone}"><th scope="row">{escape(name)}</th>{"".join(f"<td>{each}</td>" for each in cells)}</tr>'
        for tone, name, *cells in rows
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


# --- drawings -----------------------------------------------------------------------------------------------------


def _section(cuts: Sequence[Picture]) -> str:
    """Every cut as a row. The first cut that failed, or else the middle one, also with a lane for each rank."""
    before, after = ("1 rank" if count == 1 else f"{count} ranks" for count in cuts[0].worlds)
    title = f"epoch {cuts[0].epoch}, {before} before and {after} after"
    parts = [f"<h4>{title}</h4>"]
    for problem in dict.fromkeys(picture.problem for picture in cuts if picture.problem):
        where = ", ".join(str(picture.cut) for picture in cuts if picture.problem == problem)
        parts.append(f'<p class="other">{escape(f"cut after {where} batches: {problem[:1000]}")}</p>')
    if drawn := [picture for picture in cuts if not picture.problem]:
        lost, repeated = max(len(each.lost) for each in drawn), max(len(each.repeated) for each in drawn)
        words = f"{len(drawn)} cuts: at worst {lost} lost and {repeated} repeated"
        parts.append(_drawing(f"{title}, a row for each cut", words, lost, repeated, map(_overview, drawn)))
        wrong = [each for each in drawn if each.lost] or [each for each in drawn if each.repeated]
        shown = wrong[0] if wrong else drawn[len(drawn) // 2]
        lost, repeated = len(shown.lost), len(shown.repeated)
        caption = f"{title}, cut after {shown.cut} batches of each rank"
        words = f"{len(shown.order)} samples: {lost} lost, {repeated} repeated"
        parts.append(_drawing(caption, words, lost, repeated, _lanes(shown)))
    return "".join(parts)


def _drawing(caption: str, words: str, lost: int, repeated: int, rows: Iterable[tuple[str, str]]) -> str:
    """Rows of bars, each with its label."""
    drawn = list(rows)
    tone = "bad" if lost else "warn" if repeated else "good"
    lanes = "".join(
        f'<g transform="translate(0,{number * _HEIGHT})"><text x="0" y="11">{label}</text>{bars}</g>'
        for number, (label, bars) in enumerate(drawn)
    )
    size = f'viewBox="0 0 {_WIDTH} {len(drawn) * _HEIGHT}" role="img" aria-label="{caption}: {words}"'
    return f"<figure><figcaption>{caption}: {_span(tone, words)}</figcaption><svg {size}>{lanes}</svg></figure>"


def _columns(order: Sequence[Hashable]) -> dict[Hashable, int]:
    """Sample -> column, for the samples that are drawn."""
    columns: dict[Hashable, int] = {}
    for sample in order[:_MOST_SAMPLES]:
        columns.setdefault(sample, len(columns))
    return columns


def _overview(picture: Picture) -> tuple[str, str]:
    """A row for a cut: which samples came before it, which after it, and which never or too often."""
    columns = _columns(picture.order)
    kinds = dict.fromkeys((sample for rank in picture.after for sample in rank), "after")
    kinds |= dict.fromkeys((sample for rank in picture.before for sample in rank), "before")
    kinds |= dict.fromkeys(picture.repeated, "repeated") | dict.fromkeys(picture.lost, "lost")
    stretches = groupby(enumerate(columns), key=lambda item: kinds.get(item[1], ""))
    return f"after {picture.cut}", "".join(_bar(kind, list(each), len(columns)) for kind, each in stretches if kind)


def _lanes(picture: Picture) -> list[tuple[str, str]]:
    """A row for each rank before and after the cut, and a row each for lost and repeated samples."""
    columns = _columns(picture.order)
    lanes = [(f"rank {rank}, before", "before", given) for rank, given in enumerate(picture.before)]
    lanes += [(f"rank {rank}, after", "after", given) for rank, given in enumerate(picture.after)]
    lanes += [("lost", "lost", picture.lost), ("repeated", "repeated", picture.repeated)]
    return [
        (label, "".join(_bar(kind, [(columns[each], each)], len(columns)) for each in given if each in columns))
        for label, kind, given in lanes
    ]


def _bar(kind: str, samples: Sequence[tuple[int, Hashable]], columns: int) -> str:
    """One bar for neighbouring samples, each with its column."""
    step = (_WIDTH - _LABELS) / max(1, columns)
    gap = step * 0.1 if step > 3 else 0
    (first, one), (last, other) = samples[0], samples[-1]
    name = f"column {first + 1}" if first == last else f"columns {first + 1} to {last + 1}"
    # Of a sample that nothing but its content names there is a digest, which says nothing to anyone.
    readable = [str(each) for each in (one, other)[: 1 + (first != last)] if not items.is_digest(each)]
    name = f"{name}: sample{'s' * (len(readable) > 1)} {' to '.join(readable)}" if readable else name
    place = f'x="{_LABELS + first * step:.2f}" width="{max((last - first + 1) * step - gap, 0.5):.2f}"'
    return f'<rect class="{kind}" y="1" height="{_HEIGHT - 3}" {place}><title>{escape(name[:120])}</title></rect>'


_COLUMNS = """\
<p>Each column is a sample, in the order of a run on one rank; point at it to see which. Dark blue: before the cut;
light blue: after it; red: never; orange: too often. If other numbers of ranks have another order, dark and light are
mixed. If all ranks must have equally many batches, some samples are repeated at an epoch's end
(<code>tail="pad"</code>).</p>"""
_STANDINGS = """\
<p>Proved at each resume: compared with the state before a resumed epoch goes on. Tried: here, at length, and in part
whenever reading begins. Believed: neither; it rests on what the source says of itself.</p>"""
_NOTHING = "<p>There is nothing to draw: the loader did not complete an uninterrupted run.</p>"
_STYLE = """\
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 2rem auto; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; width: 100%; }
th, td { border-bottom: 1px solid #ddd; padding: 0.3rem 0.6rem; text-align: left; vertical-align: top; }
th[scope=row] { white-space: nowrap; }
dl { margin: 0; } dt { float: left; clear: left; width: 5.5rem; color: #666; }
dd { margin-left: 6rem; white-space: pre-wrap; overflow-wrap: anywhere; }
h3 { margin: 2rem 0 0; } h4 { font-size: 1rem; margin: 1rem 0 0; }
p.finding { font-size: 1.3rem; }
figure { margin: 0.6rem 0 1rem; } figcaption { margin-bottom: 0.3rem; }
.wide, figure { overflow-x: auto; } h1, p { overflow-wrap: anywhere; }
svg { width: 100%; min-width: 700px; height: auto; } svg text { font-size: 11px; fill: #555; }
tr:not([class=""]) td:nth-child(2) { white-space: nowrap; }
@media (max-width: 40rem) { th[scope=row] { white-space: normal; } td { min-width: 7rem; } }
.good td:nth-child(2), span.good { color: #17702e; }
.bad td:nth-child(2), span.bad { color: #b3121d; font-weight: 600; }
span.warn { color: #96590b; } .other { color: #666; }
rect.before { fill: #3b6fb6; } rect.after { fill: #7fb3e6; }
rect.lost { fill: #d0202b; } rect.repeated { fill: #e39a1c; }
"""
_PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>midepoch check: {title}</title>
<style>
{style}</style>
</head>
<body>
{body}
</body>
</html>
"""
