"""Pieces of HTML for notebooks: what `_repr_html_` of verdicts, kernels and diagnostics is made of.

A notebook has its own style, so there are no classes here, and all text is escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

TONES = {"good": "#1a7443", "bad": "#b3261e", "open": "#8a5a00", "plain": "inherit"}


def heading(said: str, tone: str = "plain") -> str:
    """A line in bold, in the colour of good or bad news."""
    return f'<p><strong style="color: {TONES[tone]}">{escape(said)}</strong></p>'


def paragraph(label: str, said: str) -> str:
    """A sentence behind its label."""
    return f"<p><em>{escape(label)}</em> {escape(said)}</p>"


def listed(items: Iterable[str]) -> str:
    """A list; nothing where it would be empty."""
    inside = "".join(f"<li>{escape(item)}</li>" for item in items)
    return f"<ul>{inside}</ul>" if inside else ""


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table with a heading."""
    cells = "".join(f"<th>{escape(name)}</th>" for name in head)
    lines = (
        "<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table><thead><tr>{cells}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
