"""Renderers of diagnostics: for the terminal, as JSON, for a model's prompt."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flashwright.lang.codes import CODES
from flashwright.lang.diagnostic import Diagnostic
from flashwright.lang.nodes import Span

_TAB = 4
_WIDEST = 160  # a longer line is shown in part, around what is wrong
_COLORS = {
    "error": "\x1b[1;31m",
    "warning": "\x1b[1;33m",
    "note": "\x1b[1;36m",
    "blue": "\x1b[1;34m",
}
_BOLD, _PLAIN = "\x1b[1m", "\x1b[0m"


@dataclass(frozen=True)
class _Mark:
    """An underline on one line: columns from 0, half-open."""

    line: int
    start: int
    end: int
    sign: str
    text: str


def summary(diagnostics: Sequence[Diagnostic]) -> str:
    """One line such as `2 errors, 1 warning`."""
    parts = []
    for severity in ("error", "warning", "note"):
        count = sum(d.severity == severity for d in diagnostics)
        if count:
            parts.append(f"{count} {severity}{'s' if count > 1 else ''}")
    return ", ".join(parts) or "no problems"


def terminal(
    diagnostics: Sequence[Diagnostic], source: str, filename: str, color: bool = False
) -> str:
    """All diagnostics for a terminal, each with its lines of source and carets."""
    lines = source.split("\n")
    return "\n\n".join(_one(d, lines, filename, color) for d in diagnostics) + "\n"


def _one(d: Diagnostic, lines: list[str], filename: str, color: bool) -> str:
    def paint(text: str, style: str) -> str:
        return f"{style}{text}{_PLAIN}" if color and text else text

    tone, blue = _COLORS[d.severity], _COLORS["blue"]
    head = paint(f"{d.severity}[{d.code}]", tone) + paint(f": {_clean(d.message)}", _BOLD)
    marks = _marks(d, lines)
    shown = sorted({m.line for m in marks})
    pad = len(str(shown[-1])) if shown else 1
    bar = paint(" " * pad + " |", blue)
    place = f"{filename}:{d.span.line}:{d.span.column}" if d.span else filename
    out = [head, paint(" " * pad + "--> ", blue) + place]
    if shown:
        out.append(bar)
    for before, line in zip([shown[0] - 1 if shown else 0, *shown], shown, strict=False):
        if line > before + 1:
            out.append(paint("...", blue))
        here = [m for m in marks if m.line == line]
        text, offset = _crop(lines[line - 1], here[0].start)
        out.append(f"{paint(f'{line:>{pad}} |', blue)} {_cells(text)}".rstrip())
        for m in here:
            left = _width(text[: max(0, m.start - offset)])
            width = max(1, _width(text[max(0, m.start - offset) : max(0, m.end - offset)]))
            under = f"{m.sign * width} {_clean(m.text)}".rstrip()
            out.append(f"{bar} {' ' * left}{paint(under, tone if m.sign == '^' else blue)}")
    notes = [("help", d.help)] if d.help else []
    if d.fix:
        how = "" if d.severity == "note" else " (flashwright check --fix)"
        notes.append(("edit" if d.severity == "note" else "fix", f"{d.fix.title}{how}"))
    if shown and notes:
        out.append(bar)
    for kind, text in notes:
        out.append(f"{paint(' ' * pad + ' =', blue)} {paint(f'{kind}:', _BOLD)} {_clean(text)}")
    return "\n".join(out)


def _marks(d: Diagnostic, lines: list[str]) -> list[_Mark]:
    marks: list[_Mark] = []
    if d.span:
        marks += _underlines(d.span, "^", d.label, lines)
    for label in d.secondary:
        marks += _underlines(label.span, "-", label.text, lines)
    return marks


def _underlines(span: Span, sign: str, text: str, lines: list[str]) -> list[_Mark]:
    """One mark a line; of a long span the first two lines and the last, which has the text."""
    last = max(1, min(span.end_line, len(lines)))
    first = min(span.line, last)
    numbers = list(range(first, last + 1))
    if len(numbers) > 3:
        numbers = [*numbers[:2], numbers[-1]]
    marks = []
    for line in numbers:
        row = lines[line - 1]
        start = span.column - 1 if line == span.line else len(row) - len(row.lstrip())
        end = span.end_column - 1 if line == span.end_line else len(row)
        marks.append(_Mark(line, start, end, sign, text if line == last else ""))
    return marks


def _crop(line: str, column: int) -> tuple[str, int]:
    """The part of a line to show, and how many characters of it are left out in front."""
    if len(line) <= _WIDEST:
        return line, 0
    start = max(0, column - _WIDEST // 2)
    part = line[start : start + _WIDEST]
    if start:
        return "\u2026" + part[1:], start
    return part + "\u2026", 0


def _width(text: str) -> int:
    return sum(_cell(char)[1] for char in text)


def _cells(text: str) -> str:
    return "".join(_cell(char)[0] for char in text)


def _cell(char: str) -> tuple[str, int]:
    """How a character is shown and how many cells it takes; control codes are never passed on."""
    if char == "\t":
        return " " * _TAB, _TAB
    category = unicodedata.category(char)
    if category in ("Cc", "Cf", "Cs", "Zl", "Zp"):
        return "\ufffd", 1
    if category in ("Mn", "Me"):
        return char, 0
    return char, 2 if unicodedata.east_asian_width(char) in "WF" else 1


def _clean(text: str) -> str:
    return _cells(text.replace("\n", " "))


def as_json(diagnostics: Sequence[Diagnostic], filename: str) -> str:
    """All diagnostics for another program: a list of objects, positions 1-based."""
    return json.dumps([_record(d, filename) for d in diagnostics], indent=2)


def _record(d: Diagnostic, filename: str) -> dict[str, Any]:
    edits = [{"start": e.start, "end": e.end, "text": e.text} for e in d.fix.edits] if d.fix else []
    return {
        "code": d.code,
        "severity": d.severity,
        "title": CODES[d.code].title,
        "message": d.message,
        "file": filename,
        **(_place(d.span) if d.span else dict.fromkeys(_PLACE)),
        "label": d.label,
        "secondary": [{**_place(s.span), "text": s.text} for s in d.secondary],
        "help": d.help,
        "fix": {"title": d.fix.title, "edits": edits} if d.fix else None,
    }


_PLACE = ("line", "column", "end_line", "end_column")


def _place(span: Span) -> dict[str, int]:
    return {key: getattr(span, key) for key in _PLACE}


def for_model(diagnostics: Sequence[Diagnostic], source: str) -> str:
    """All diagnostics as short plain text for a prompt: what is wrong on which line, what to do."""
    lines = source.split("\n")
    out = []
    for n, d in enumerate(diagnostics, 1):
        where = f" on line {d.span.line}" if d.span else ""
        out.append(f"{n}. {d.severity} {d.code}{where}: {_clean(d.message)}")
        if d.span:
            out.append(f"   line {d.span.line}: {_quoted(lines, d.span)}")
            if d.label:
                out.append(f"   at `{_part(lines, d.span)}`: {_clean(d.label)}")
        for label in d.secondary:
            quoted = _quoted(lines, label.span)
            out.append(f"   line {label.span.line}: {quoted}   <- {_clean(label.text)}")
        if d.fix:
            kind = "edit" if d.severity == "note" else "fix"
            out.append(f"   {kind}: {_clean(d.fix.title)}")
        if d.help:
            out.append(f"   help: {_clean(d.help)}")
    return "\n".join(out) + "\n" if out else ""


def _quoted(lines: list[str], span: Span) -> str:
    row = lines[span.line - 1] if span.line <= len(lines) else ""
    return _cells(row.strip())[:_WIDEST]


def _part(lines: list[str], span: Span) -> str:
    row = lines[span.line - 1] if span.line <= len(lines) else ""
    end = span.end_column - 1 if span.end_line == span.line else len(row)
    return _cells(row[span.column - 1 : end])[:_WIDEST]
