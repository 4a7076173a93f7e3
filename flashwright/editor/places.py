"""Places in a text: words, comments, the kernel at a line."""

from __future__ import annotations

import re

from flashwright.lang.nodes import Span

WORD = re.compile(r"[A-Za-z_]\w*")


def span_of(text: str, start: int, end: int) -> Span:
    """The span of a stretch of a text."""
    return Span(start, end, *_line_and_column(text, start), *_line_and_column(text, end))


def _line_and_column(text: str, offset: int) -> tuple[int, int]:
    return text.count("\n", 0, offset) + 1, offset - text.rfind("\n", 0, offset)


def offset_of(text: str, line: int, column: int) -> int:
    """The offset of a line and a column, both counted from 0; the nearest one there is."""
    lines = text.split("\n")
    if line >= len(lines):
        return len(text)
    return sum(len(row) + 1 for row in lines[:line]) + min(column, len(lines[line]))


def line_before(text: str, offset: int) -> str:
    """The part of a line before a place."""
    return text[text.rfind("\n", 0, offset) + 1 : offset]


def in_comment(text: str, offset: int) -> bool:
    """Whether a place is in a comment."""
    return "//" in line_before(text, offset)


def word_at(text: str, offset: int) -> Span | None:
    """The word at a place or just before it; None if there is none, or if it is in a comment."""
    if in_comment(text, offset):
        return None
    row = text.rfind("\n", 0, offset) + 1
    end = text.find("\n", offset)
    for match in WORD.finditer(text, row, len(text) if end < 0 else end):
        if match.start() <= offset <= match.end():
            return span_of(text, match.start(), match.end())
    return None
