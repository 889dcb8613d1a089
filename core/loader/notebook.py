"""Tables for notebooks, which show what an object's ``_repr_html_`` returns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

__all__ = ["table"]

_STYLE = "text-align: left; vertical-align: top; white-space: pre-wrap"


def table(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]], below: str = "") -> str:
    """An HTML table. Every text is escaped, so none of a user's can be anything but text.

    Args:
        title: above the table.
        headings: of the columns.
        rows: as many texts each as there are headings.
        below: a sentence under the table; '' for none.
    """
    head = "".join(f'<th style="{_STYLE}">{escape(heading)}</th>' for heading in headings)
    lines = ("".join(f'<td style="{_STYLE}">{escape(text)}</td>' for text in row) for row in rows)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    whole = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f"<div><b>{escape(title)}</b>{whole}{f'<div>{escape(below)}</div>' if below else ''}</div>"
