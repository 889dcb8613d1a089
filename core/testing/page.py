"""The report of an examination as an HTML page: the finding, which samples each rank received, the laws.

Needs jinja2, which the extra `midepoch[cli]` brings.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from jinja2 import Environment, StrictUndefined

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


def take_pictures(examination: Examination, *, few: bool = False) -> list[Picture]:
    """One picture for each cut inside each epoch and each possible change of the number of ranks.

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
            found += _take(examination, epoch, worlds, order)
    return found


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


@dataclass(frozen=True)
class _Bar:
    """Neighbouring samples of one kind in a row of a drawing."""

    kind: str
    left: float
    width: float
    name: str


@dataclass(frozen=True)
class _Drawing:
    """Rows of bars, each row with its label. `verdict` states the result, and `tone` is its colour."""

    caption: str
    verdict: str
    tone: str
    rows: tuple[tuple[str, tuple[_Bar, ...]], ...]


@dataclass(frozen=True)
class _Section:
    """One epoch and change of the number of ranks: what went wrong, and drawings of the other cuts."""

    title: str
    problems: tuple[str, ...]
    drawings: tuple[_Drawing, ...]


def make_page(
    target: str,
    diagnosis: Diagnosis,
    comparison: Comparison,
    report: Report,
    pictures: Mapping[str, Sequence[Picture]],
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
    return _PAGE.render(
        target=target,
        diagnosis=diagnosis,
        comparison=comparison,
        verdict=words,
        tone="bad" if failed or unkept else "good",
        promises=report.promises,
        versions=versions,
        date=time.strftime("%Y-%m-%d %H:%M"),
        verdicts=_in_order(report),
        legend=legend([*report.trials, *report.verdicts]),
        sides={heading: [_section(cuts) for cuts in _together(taken)] for heading, taken in pictures.items()},
        labels=_LABELS,
        height=_HEIGHT,
        width=_WIDTH,
    )


def _in_order(report: Report) -> list[Verdict]:
    """Trials before laws, since they name causes; in both, what failed before the others."""
    return [
        *sorted(report.trials, key=lambda verdict: verdict.error is None),
        *sorted(report.verdicts, key=lambda verdict: verdict.error is None),
    ]


def _together(pictures: Sequence[Picture]) -> list[list[Picture]]:
    """The pictures of each epoch and change of the number of ranks."""
    groups: dict[tuple[int, tuple[int, int]], list[Picture]] = {}
    for picture in pictures:
        groups.setdefault((picture.epoch, picture.worlds), []).append(picture)
    return list(groups.values())


def _section(cuts: Sequence[Picture]) -> _Section:
    """Every cut as a row. The first cut that failed, or else the middle one, also with a lane for each rank."""
    epoch, (old, new) = cuts[0].epoch, cuts[0].worlds
    title = f"epoch {epoch}, {_ranks(old)} before and {_ranks(new)} after"
    problems = []
    for problem in dict.fromkeys(picture.problem for picture in cuts if picture.problem):
        where = ", ".join(str(picture.cut) for picture in cuts if picture.problem == problem)
        problems.append(f"cut after {where} batches: {problem[:1000]}")
    drawn = [picture for picture in cuts if not picture.problem]
    drawings = []
    if drawn:
        lost, repeated = max(len(each.lost) for each in drawn), max(len(each.repeated) for each in drawn)
        words = f"{len(drawn)} cuts: at worst {lost} lost and {repeated} repeated"
        drawings.append(_Drawing(f"{title}, a row for each cut", words, _tone(lost, repeated), _overview(drawn)))
        wrong = [each for each in drawn if each.lost] or [each for each in drawn if each.repeated]
        shown = wrong[0] if wrong else drawn[len(drawn) // 2]
        lost, repeated = len(shown.lost), len(shown.repeated)
        words = f"{len(shown.order)} samples: {lost} lost, {repeated} repeated"
        caption = f"{title}, cut after {shown.cut} batches of each rank"
        drawings.append(_Drawing(caption, words, _tone(lost, repeated), _lanes(shown)))
    return _Section(title, tuple(problems), tuple(drawings))


def _tone(lost: int, repeated: int) -> str:
    return "bad" if lost else "warn" if repeated else "good"


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def _columns(order: Sequence[Hashable]) -> dict[Hashable, int]:
    """Sample -> column, for the samples that are drawn."""
    columns: dict[Hashable, int] = {}
    for sample in order[:_MOST_SAMPLES]:
        columns.setdefault(sample, len(columns))
    return columns


def _overview(pictures: Sequence[Picture]) -> tuple[tuple[str, tuple[_Bar, ...]], ...]:
    """A row for each cut: which samples came before it, which after it, and which never or too often."""
    columns = _columns(pictures[0].order)
    rows = []
    for picture in pictures:
        kinds = dict.fromkeys((sample for rank in picture.after for sample in rank), "after")
        kinds |= dict.fromkeys((sample for rank in picture.before for sample in rank), "before")
        kinds |= dict.fromkeys(picture.repeated, "repeated") | dict.fromkeys(picture.lost, "lost")
        stretches = groupby(enumerate(columns), key=lambda item: kinds.get(item[1], ""))
        bars = tuple(_bar(kind, list(items), len(columns)) for kind, items in stretches if kind)
        rows.append((f"after {picture.cut}", bars))
    return tuple(rows)


def _lanes(picture: Picture) -> tuple[tuple[str, tuple[_Bar, ...]], ...]:
    """A row for each rank before and after the cut, and a row each for lost and repeated samples."""
    columns = _columns(picture.order)
    lanes = [(f"rank {rank}, before", "before", given) for rank, given in enumerate(picture.before)]
    lanes += [(f"rank {rank}, after", "after", given) for rank, given in enumerate(picture.after)]
    lanes += [("lost", "lost", picture.lost), ("repeated", "repeated", picture.repeated)]
    return tuple(
        (label, tuple(_bar(kind, [(columns[each], each)], len(columns)) for each in given if each in columns))
        for label, kind, given in lanes
    )


def _bar(kind: str, samples: Sequence[tuple[int, Hashable]], columns: int) -> _Bar:
    """One bar for neighbouring samples, each with its column."""
    step = (_WIDTH - _LABELS) / max(1, columns)
    gap = step * 0.1 if step > 3 else 0
    (first, one), (last, other) = samples[0], samples[-1]
    name = f"column {first + 1}" if first == last else f"columns {first + 1} to {last + 1}"
    # Of a sample that nothing but its content names there is a digest, which says nothing to anyone.
    readable = [str(each) for each in (one, other)[: 1 + (first != last)] if not items.is_digest(each)]
    name = f"{name}: sample{'s' * (len(readable) > 1)} {' to '.join(readable)}" if readable else name
    return _Bar(kind, _LABELS + first * step, max((last - first + 1) * step - gap, 0.5), name[:120])


_PAGE = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True).from_string(
    """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>midepoch check: {{ target }}</title>
<style>
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
.verdicts td:nth-child(2) { white-space: nowrap; }
@media (max-width: 40rem) { th[scope=row] { white-space: normal; } td { min-width: 7rem; } }
.good td:nth-child(2), span.good { color: #17702e; }
.bad td:nth-child(2), span.bad { color: #b3121d; font-weight: 600; }
span.warn { color: #96590b; } .other { color: #666; }
rect.before { fill: #3b6fb6; } rect.after { fill: #7fb3e6; }
rect.lost { fill: #d0202b; } rect.repeated { fill: #e39a1c; }
</style>
</head>
<body>
<h1>{{ target }}</h1>
<p class="finding"><span class="{{ diagnosis.tone }}">{{ diagnosis.title }}</span></p>
{% if diagnosis.facts %}
<dl>
{% for label, text in diagnosis.facts %}
<dt>{{ label }}</dt><dd>{{ text[:4000] }}</dd>
{% endfor %}
</dl>
{% endif %}
{% if diagnosis.together %}
<p>{{ diagnosis.together }}. Mend this first, then check again.</p>
{% endif %}
{% for error in diagnosis.others %}
<p>Also: the law '{{ error.law }}' is broken{{ ' at ' + error.place if error.place }}: {{ error.got[:1000] }}</p>
{% endfor %}
<div class="wide"><table>
<thead><tr><th></th>{% for heading in comparison.headings %}<th>{{ heading }}</th>{% endfor %}</tr></thead>
<tbody>
{% for question, answers in comparison.rows %}
<tr><th scope="row">{{ question }}</th>
{%- for answer in answers %}<td><span class="{{ answer.tone }}">{{ answer.text }}</span></td>{% endfor %}</tr>
{% endfor %}
</tbody>
</table></div>
<h2>Which samples each rank received</h2>
<p>Each column is a sample, in the order of a run on one rank; point at it to see which. Dark blue: before the cut;
light blue: after it; red: never; orange: too often. If other numbers of ranks have another order, dark and light are
mixed. If all ranks must have equally many batches, some samples are repeated at an epoch's end
(<code>tail="pad"</code>).</p>
{% for heading, sections in sides.items() %}
<h3>{{ heading }}</h3>
{% for section in sections %}
{% if loop.index == 2 %}<details><summary>Other epochs and numbers of ranks</summary>{% endif %}
<h4>{{ section.title }}</h4>
{% for problem in section.problems %}
<p class="other">{{ problem }}</p>
{% endfor %}
{% for drawing in section.drawings %}
<figure><figcaption>{{ drawing.caption }}: <span class="{{ drawing.tone }}">{{ drawing.verdict }}</span></figcaption>
<svg viewBox="0 0 {{ width }} {{ drawing.rows | length * height }}" role="img"
 aria-label="{{ drawing.caption }}: {{ drawing.verdict }}">
{% for label, bars in drawing.rows %}
{% set top = loop.index0 * height %}
<text x="0" y="{{ top + 11 }}">{{ label }}</text>
{% for bar in bars %}
<rect class="{{ bar.kind }}" x="{{ '%.2f' | format(bar.left) }}" y="{{ top + 1 }}"
 width="{{ '%.2f' | format(bar.width) }}" height="{{ height - 3 }}"><title>{{ bar.name }}</title></rect>
{% endfor %}
{% endfor %}
</svg></figure>
{% endfor %}
{% if loop.last and loop.index > 1 %}</details>{% endif %}
{% else %}
<p>There is nothing to draw: the loader did not complete an uninterrupted run.</p>
{% endfor %}
{% endfor %}
<h2>What it rests on</h2>
<p><span class="{{ tone }}">{{ verdict }}</span>. {{ versions }}; {{ date }}.</p>
{% if promises %}
<div class="wide verdicts"><table>
<thead><tr><th>promise</th><th>rests on</th><th></th></tr></thead>
<tbody>
{% for promise in promises %}
<tr class="{{ {'proved at each resume': 'good', 'tried': 'good', 'not kept': 'bad'}.get(promise.standing, 'other') }}">
<th scope="row">{{ promise.name }}</th><td>{{ promise.standing }}</td><td>{{ promise.reason }}</td></tr>
{% endfor %}
</tbody>
</table></div>
<p>Proved at each resume: compared with the state before a resumed epoch goes on. Tried: here, at length, and in part
whenever reading begins. Believed: neither; it rests on what the source says of itself.</p>
{% endif %}
<div class="wide verdicts"><table>
<thead><tr><th>law or trial</th><th>verdict</th><th></th><th>seconds</th></tr></thead>
<tbody>
{% for verdict in verdicts %}
<tr class="{{ {'holds': 'good', 'failed': 'bad'}.get(verdict.status, 'other') }}">
<th scope="row">{{ verdict.law }}</th><td>{{ verdict.status }}</td><td>
{%- if verdict.error is none %}{{ verdict.reason }}{% else %}<dl>
{%- for name, text in (
    ('where', verdict.error.place), ('expected', verdict.error.expected), ('got', verdict.error.got),
    ('usually', verdict.error.cause), ('cure', verdict.error.cure),
) if text %}<dt>{{ name }}</dt><dd>{{ text[:4000] }}</dd>{% endfor %}</dl>{% endif -%}
</td><td>{{ '%.2f' | format(verdict.seconds) }}</td></tr>
{% endfor %}
</tbody>
</table></div>
{% if legend %}
<p>{{ legend }}.</p>
{% endif %}
</body>
</html>
"""
)
