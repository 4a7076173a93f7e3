"""From text to tokens, and from lark's reductions to nodes.

lark calls a method of Builder as soon as a rule is complete, so the tree grows bottom-up and
nothing here recurses, however deep the program is.
"""

# ruff: noqa: D102  Builder's methods are named by the rules; the grammar is their description.

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from flashwright.lang.nodes import (
    EARLIER_PARAMS,
    Allocate,
    Axis,
    Binary,
    Call,
    Comment,
    Compute,
    Coord,
    Copy,
    Dim,
    Expr,
    For,
    Grid,
    GridAxis,
    If,
    Index,
    Let,
    Mode,
    Name,
    Num,
    Param,
    Reshape,
    Side,
    Space,
    Span,
    Statement,
    Transpose,
    Tree,
    Unary,
)
from flashwright.version import __version__

if TYPE_CHECKING:
    from lark import Lark

# Verbs that are never functions: `GEMM(Q, K.T)` can only mean `GEMM Q, K.T`.
VERBS_ONLY = frozenset({"gemm", "softmax", "mask", "add", "subtract", "multiply", "divide"})


@dataclass(slots=True)
class Tok:
    """A token of the source. The keyword of a statement carries its comment and blank line."""

    type: str
    text: str
    span: Span
    first: bool = False  # the first on its line
    blank: bool = False  # a blank line stands above
    gap: bool = False
    comment: str | None = None
    whole: Span | None = None  # of the statement (the header, for a block)

    def stmt(self) -> dict[str, Any]:
        return {"span": self.whole or self.span, "comment": self.comment, "gap": self.gap}


@cache
def grammar() -> Lark:
    """The LALR parser, built on first use: importing lark takes longer than most programs."""
    from lark import Lark

    text = Path(__file__).with_name("grammar.lark").read_text(encoding="utf-8")
    builder = cast(Any, Builder())
    return Lark(text, parser="lalr", lexer="basic", transformer=builder, cache=_cache())


def _cache() -> str | bool:
    """The file in which lark caches its tables, or False if there is no folder to write to. Making
    the tables takes ten times longer than reading them; lark detects a stale file by its hash."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(home) / "flashwright"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return str(folder / f"grammar-{__version__}.tables")


@cache
def _words() -> re.Pattern[str]:
    terminals = sorted(grammar().terminals, key=lambda t: -t.priority)
    known = "|".join(f"(?P<{t.name}>{t.pattern.to_regexp()})" for t in terminals)
    # An unknown character becomes a token that no rule accepts, and so an ordinary diagnostic.
    return re.compile(known + r"|(?P<STRANGE>&&|\|\||\*\*|.)")


def tokens(source: str) -> Iterator[Tok]:
    """The words and comments of the source, in order."""
    line, line_start, last_line, first = 1, 0, 1, True
    for match in _words().finditer(source):
        kind, text, start = match.lastgroup or "STRANGE", match[0], match.start()
        breaks = text.count("\n")
        end_line = line + breaks
        end_line_start = start + text.rindex("\n") + 1 if breaks else line_start
        if kind != "WS":
            column, end_column = start - line_start + 1, match.end() - end_line_start + 1
            span = Span(start, match.end(), line, column, end_line, end_column)
            yield Tok(kind, text, span, first, line - last_line > 1)
            last_line = end_line
        first = bool(breaks) if kind == "WS" else False
        line, line_start = end_line, end_line_start


def _names(children: list[Any]) -> tuple[Name, ...]:
    return tuple(_name(c) for c in children if isinstance(c, Tok) and c.type == "NAME")


def _name(tok: Tok) -> Name:
    return Name(tok.text, span=tok.span)


def _operands(children: list[Any]) -> tuple[Expr, ...]:
    return tuple(c for c in children if not isinstance(c, Tok))


class Builder:
    """One method for each rule of the grammar."""

    def start(self, c: list[Any]) -> Tree:
        return Tree(tuple(c))

    def body(self, c: list[Any]) -> tuple[Statement, ...]:
        return tuple(c)

    def comment(self, c: list[Any]) -> Comment:
        return Comment(c[0].text[2:].strip(), span=c[0].span, gap=c[0].gap)

    def param(self, c: list[Any]) -> Param:
        name = _name(c[1])
        if name.id in EARLIER_PARAMS:
            today = replace(name, id=EARLIER_PARAMS[name.id])
            return Param(today, c[2], earlier=name.id, **c[0].stmt())
        return Param(name, c[2], **c[0].stmt())

    def dim(self, c: list[Any]) -> Dim:
        return Dim(_names(c), **c[0].stmt())

    def let(self, c: list[Any]) -> Let:
        return Let(_name(c[1]), c[2], **c[0].stmt())

    def grid(self, c: list[Any]) -> Grid:
        return Grid(tuple(c[1:]), **c[0].stmt())

    def grid_axis(self, c: list[Any]) -> GridAxis:
        low, high = _operands(c)
        return GridAxis(_name(c[0]), low, high, span=c[0].span.to(high.span))

    def allocate(self, c: list[Any]) -> Allocate:
        keyword, name, _in, space, *rest = c
        shape = tuple(part for part in rest if isinstance(part, Axis))
        clauses: dict[str, Any] = dict(part for part in rest if isinstance(part, tuple))
        return Allocate(_name(name), space, shape, **clauses, **keyword.stmt())

    def axis(self, c: list[Any]) -> Axis:
        label, _colon, size = c
        span = label.span.to(size.span) if label else size.span
        return Axis(_name(label) if label else None, size, span=span)

    def dtype(self, c: list[Any]) -> tuple[str, Name]:
        return "dtype", _name(c[1])

    def offset(self, c: list[Any]) -> tuple[str, Expr]:
        return "offset", c[2]

    def stages(self, c: list[Any]) -> tuple[str, Expr]:
        return "stages", c[2]

    def along(self, c: list[Any]) -> tuple[str, Side]:
        return "along", cast(Side, c[1].type.lower())

    def fragments(self, c: list[Any]) -> tuple[str, bool]:
        return "fragments", True

    def in_place(self, c: list[Any]) -> tuple[str, bool]:
        return "in_place", True

    def strided(self, c: list[Any]) -> tuple[str, bool]:
        return "strided", True

    def space(self, c: list[Any]) -> Space:
        return cast(Space, c[0].type.lower())

    def copy(self, c: list[Any]) -> Copy:
        keyword, name, tile, coords, _from, source, _to, dest, target, place = c
        found = target or {"mode": "get", "target": None}
        adds = found["mode"] == "accumulate"
        clauses: dict[str, Any] = dict([place] if place else [])
        return Copy(
            _name(name),
            tile,
            coords,
            source,
            dest,
            found["target"],
            adds=adds,
            index=found.get("index", ()),
            **clauses,
            **keyword.stmt(),
        )

    def added(self, c: list[Any]) -> dict[str, Any]:
        target = c[-1] if len(c) == 2 else None
        if isinstance(target, Index):
            return {"mode": "accumulate", "target": target.tensor, "index": target.args}
        return {"mode": "accumulate", "target": _name(target) if target else None}

    def tile(self, c: list[Any]) -> tuple[Expr, ...]:
        return tuple(c)

    def coordinate(self, c: list[Any]) -> tuple[Coord, ...]:
        return tuple(part for part in c if isinstance(part, Coord))

    def coord(self, c: list[Any]) -> Coord:
        axis, *at, value, within = c
        end = within[1] if within else value
        return Coord(_name(axis), value, bool(at), within, span=axis.span.to(end.span))

    def within(self, c: list[Any]) -> tuple[Expr, Expr]:
        return c[1], c[3]

    def column(self, c: list[Any]) -> tuple[str, Expr]:
        return "column", c[2]

    def turn(self, c: list[Any]) -> tuple[str, Expr]:
        return "turn", c[2]

    def compute(self, c: list[Any]) -> Compute:
        keyword, verb, args, *clauses = c
        name = _name(verb) if verb else None
        head = args[0]
        if name is None and isinstance(head, Call) and head.func.id.lower() in VERBS_ONLY:
            name, args = head.func, head.args + args[1:]
        parts = {key: value for clause in clauses for key, value in clause.items()}
        return Compute(name, args, **parts, **keyword.stmt())

    def operands(self, c: list[Any]) -> tuple[Expr, ...]:
        return tuple(c)

    def state(self, c: list[Any]) -> dict[str, Any]:
        return {"state": _names(c)}

    def where(self, c: list[Any]) -> dict[str, Any]:
        return {"where": c[1]}

    def target(self, c: list[Any]) -> dict[str, Any]:
        mode: Mode = "get new" if len(c) == 3 else "get"
        return {"mode": mode, "target": _name(c[-1])}

    def accumulate(self, c: list[Any]) -> dict[str, Any]:
        return {"mode": "accumulate", "target": _name(c[-1])}

    def rescale(self, c: list[Any]) -> dict[str, Any]:
        return {"rescale": _names(c)}

    def reshape(self, c: list[Any]) -> Reshape:
        keyword, name, _from, source, _to, dest, dtype, target = c
        as_name = dtype[1] if dtype else None
        into = target["target"] if target else None
        return Reshape(_name(name), source, dest, as_name, into, **keyword.stmt())

    def layout(self, c: list[Any]) -> tuple[Name, ...]:
        return _names(c)

    def loop(self, c: list[Any]) -> For:
        low, high, body = _operands(c)
        return For(_name(c[1]), low, high, cast(Any, body), **c[0].stmt())

    def branch(self, c: list[Any]) -> If:
        bodies = [part for part in c if isinstance(part, tuple)]
        return If(c[1], *bodies, **c[0].stmt())

    def _infix(self, c: list[Any]) -> Binary:
        left, op, right = c
        return Binary(op.text.lower(), left, right, span=left.span.to(right.span))

    either = both = comparison = sum = product = _infix

    def _prefix(self, c: list[Any]) -> Unary:
        op, operand = c
        return Unary(op.text.lower(), operand, span=op.span.to(operand.span))

    inverse = negative = _prefix

    def number(self, c: list[Any]) -> Num:
        return Num(c[0].text, span=c[0].span)

    def name(self, c: list[Any]) -> Name:
        return _name(c[0])

    def call(self, c: list[Any]) -> Call:
        return Call(_name(c[0]), tuple(c[1:-1]), span=c[0].span.to(c[-1].span))

    def index(self, c: list[Any]) -> Index:
        return Index(_name(c[0]), tuple(c[1:-1]), span=c[0].span.to(c[-1].span))

    def group(self, c: list[Any]) -> Expr:
        return cast(Expr, replace(c[1], span=c[0].span.to(c[2].span)))

    def transpose(self, c: list[Any]) -> Transpose:
        return Transpose(_name(c[0]), span=c[0].span.to(c[1].span))


class Machine:
    """lark's LALR parser, fed token by token: it can be queried before a token and rolled back."""

    def __init__(self) -> None:
        self._parser = grammar().parse_interactive()
        self._state = self._parser.parser_state
        self._table = self._state.parse_conf.states

    def accepts(self, kind: str) -> bool:
        """Whether a token of this kind may come next. The parser does not change."""
        stack = self._state.state_stack
        kept = len(stack)
        top: list[Any] = []  # the stack after the reductions is stack[:kept] + top
        while True:
            state = top[-1] if top else stack[kept - 1]
            if kind not in self._table[state]:
                return False
            action, rule = self._table[state][kind]
            if action.name == "Shift":
                return True
            size = len(rule.expansion)
            kept -= max(0, size - len(top))
            del top[max(0, len(top) - size) :]
            state = top[-1] if top else stack[kept - 1]
            top.append(self._table[state][rule.origin.name][1])

    def between_statements(self) -> bool:
        """Whether a statement may begin (and so the one before may end) here."""
        return self.accepts("COPY")

    def feed(self, tok: Tok) -> None:
        self._parser.feed_token(cast(Any, tok))

    def mark(self) -> int:
        """The state just before the last token, for a rollback."""
        return len(self._state.value_stack) - 1

    def rollback(self, mark: int) -> None:
        del self._state.value_stack[mark:]
        del self._state.state_stack[mark + 1 :]

    def finish(self) -> Tree:
        return cast(Tree, self._parser.feed_eof())  # type: ignore[no-untyped-call]
