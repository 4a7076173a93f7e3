"""Syntax highlighting of TL and CUDA as HTML spans; all text is escaped."""

from __future__ import annotations

import re

from markupsafe import Markup, escape

from flashwright.lang.recover import STATEMENTS

_CLAUSES = (
    "and|get|new|accumulate|rescale|with|where|in|from|to|as|at|along|coordinate"
    "|stages|offset|memory|turn|or|not"
)
TL = re.compile(
    r"(?P<comment>//.*)"
    rf"|(?P<keyword>\b(?:{'|'.join(STATEMENTS.values())})\b)"
    r"|(?P<type>\b(?:global|shared|register)\b)"
    rf"|(?P<clause>\b(?:{_CLAUSES})\b)"
    r"|(?P<number>\b\d+(?:\.\d+)?(?:[eE][+-]?\d+)?\b)",
    re.IGNORECASE,
)
_KEYWORDS = (
    "alignas|auto|break|case|const|constexpr|continue|do|else|extern|for|if|inline|namespace|return"
    "|static|struct|switch|template|typename|using|while"
)
_TYPES = "bool|char|double|float|half|int|int32_t|int64_t|long|short|size_t|uint32_t|unsigned|void"
CUDA = re.compile(
    r"(?P<comment>//.*|/\*.*?\*/)"
    r'|(?P<string>"(?:[^"\\]|\\.)*")'
    r"|(?P<directive>^\s*#\s*\w+.*)"
    rf"|(?P<keyword>\b(?:{_KEYWORDS})\b|\b__\w+__\b)"
    rf"|(?P<type>\b(?:{_TYPES})\b)"
    r"|(?P<name>\b(?:fw|cute)::\w+)"
    r"|(?P<number>\b\d[\w.]*(?:[eE][+-]?\d+f?)?\b)",
)


def lines(source: str, language: re.Pattern[str]) -> list[Markup]:
    """The lines of a text as highlighted HTML; multi-line comments are not recognised."""
    return [_line(line, language) for line in source.rstrip("\n").split("\n")] if source else []


def _line(line: str, language: re.Pattern[str]) -> Markup:
    parts, end = [], 0
    for match in language.finditer(line):
        parts.append(escape(line[end : match.start()]))
        parts.append(Markup('<span class="t-{}">{}</span>').format(match.lastgroup, match[0]))
        end = match.end()
    return Markup("").join([*parts, escape(line[end:])])
