"""CUDA C++ as a row of tokens, as its preprocessor sees it, each with its place in the text.

Comments, strings and lines that go on behind a backslash are taken as the compiler takes them, so
that nothing in them passes as code and no code passes as them. Where a text could be read in two
ways (a quote that is not closed, a raw string), there is no guessing: Unreadable.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from flashwright.lang.nodes import Span

Kind = Literal["name", "number", "string", "sign", "directive"]
# GCC takes blanks behind the backslash too.
_SPLICE = re.compile(r"\\[ \t]*\r?\n")
_TOKEN = re.compile(
    r"(?P<comment>//[^\n]*|/\*.*?\*/)"
    r"|(?P<raw>(?:u8|[uUL])?R\")"
    r"|(?P<string>(?:u8|[uUL])?(?:\"(?:[^\"\\\n]|\\[^\n])*\"|'(?:[^'\\\n]|\\[^\n])*'))"
    r"|(?P<open>[\"']|/\*)"
    r"|(?P<name>[^\W\d]\w*)"
    r"|(?P<number>\.?\d(?:[eEpP][+-]|'\w|[\w.])*)"
    r"|(?P<line>\n)"
    r"|(?P<blank>[ \t\r]+)"
    r"|(?P<sign><<<|::|##|%:%:|%:|<%|%>|<:|:>|->|.)",
    re.DOTALL,
)
_SAME = {"%:": "#", "%:%:": "##", "<%": "{", "%>": "}", "<:": "[", ":>": "]"}  # digraphs
_OPEN = {
    "raw": "a raw string",
    "open": "a quote or a comment that is not closed",
}


class Unreadable(Exception):
    """A text that cannot be read in one way only: what, and where."""

    def __init__(self, what: str, span: Span) -> None:
        super().__init__(what)
        self.what, self.span = what, span


@dataclass(frozen=True, eq=False, slots=True)
class Token:
    """A word of the code. A directive is one token, with its line, without `#` and comments."""

    kind: Kind
    text: str
    start: int
    end: int
    """Places in the text without its splices: where two are the same, tokens touch."""
    reader: _Reader

    @property
    def span(self) -> Span:
        """Its place in the source; few are ever asked for theirs."""
        return self.reader.span(self.start, self.end)


@dataclass(frozen=True)
class Comment:
    """A comment, as it stands."""

    text: str
    span: Span


@dataclass(frozen=True)
class Text:
    """What was read: code and comments apart."""

    tokens: tuple[Token, ...]
    comments: tuple[Comment, ...]


def read(source: str) -> Text:
    """All tokens and comments of a text; Unreadable where there is more than one way to read it."""
    return _Reader(source).read()


class _Reader:
    def __init__(self, source: str) -> None:
        self.source = source
        self.lines = [0, *(m.end() for m in re.finditer("\n", source))]
        self.cuts: list[tuple[int, int]] = [(0, 0)]
        """From which place in the joined text on the source is how much further."""
        parts, end, taken = [], 0, 0
        for match in _SPLICE.finditer(source):
            parts.append(source[end : match.start()])
            taken += len(match[0])
            end = match.end()
            self.cuts.append((end - taken, taken))
        self.joined = "".join(parts) + source[end:]

    def read(self) -> Text:
        tokens: list[Token] = []
        comments: list[Comment] = []
        row: list[re.Match[str]] = []
        for match in _TOKEN.finditer(self.joined + "\n"):
            kind = match.lastgroup or ""
            if kind in _OPEN:
                raise Unreadable(_OPEN[kind], self.span(match.start(), match.end()))
            if kind == "comment":
                comments.append(Comment(match[0], self.span(match.start(), match.end())))
            if kind == "line":
                tokens += self._row(row)
                row = []
            else:
                row.append(match)
        return Text(tuple(tokens), tuple(comments))

    def _row(self, row: list[re.Match[str]]) -> Iterator[Token]:
        """The tokens of a line: a directive is a single one."""
        code = [m for m in row if m.lastgroup not in ("comment", "blank")]
        if code and code[0][0] in ("#", "%:"):
            rest = row[row.index(code[0]) + 1 :]
            text = "".join(" " if m.lastgroup in ("comment", "blank") else m[0] for m in rest)
            yield Token("directive", text.strip(), code[0].start(), code[-1].end(), self)
            return
        for match in code:
            kind: Kind = match.lastgroup  # type: ignore[assignment]
            text = _SAME.get(match[0], match[0])
            yield Token(kind, text, match.start(), match.end(), self)

    def span(self, start: int, end: int) -> Span:
        """A stretch of the joined text in the source itself."""
        first, last = self._original(start), self._original(max(start, end - 1)) + 1
        (line, column), (end_line, end_column) = self._place(first), self._place(last)
        return Span(first, last, line, column, end_line, end_column)

    def _original(self, place: int) -> int:
        _, further = self.cuts[bisect_right(self.cuts, (place, len(self.source))) - 1]
        return min(place + further, len(self.source))

    def _place(self, offset: int) -> tuple[int, int]:
        line = bisect_right(self.lines, offset)
        return line, offset - self.lines[line - 1] + 1
