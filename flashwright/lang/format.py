"""The formatter: one canonical form of TL, which parses to the same tree."""

from __future__ import annotations

import re
from collections.abc import Iterator

from flashwright.lang.nodes import (
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
    If,
    Index,
    Let,
    Name,
    Num,
    Param,
    Reshape,
    Statement,
    Transpose,
    Tree,
    Unary,
)

_LEVEL = {"or": 1, "and": 2, "not": 3, "+": 5, "-": 5, "*": 6, "/": 6, "%": 6}
_COMPARE, _NEGATIVE = 4, 7


def format_tree(tree: Tree) -> str:
    """The whole program, comments and blank lines included, ending in a line end."""
    return "".join(line + "\n" for line in _body(tree.body, ""))


def format_stmt(stmt: Statement) -> str:
    """One statement on one line, without its comment; of a block, the header."""
    match stmt:
        case Comment():
            return _comment(stmt.text)
        case Param():
            return f"param {stmt.name.id} = {format_expr(stmt.value)}"
        case Let():
            return f"let {stmt.name.id} = {format_expr(stmt.value)}"
        case Dim():
            return f"dim {_names(stmt.names)}"
        case Grid():
            axes = [f"{a.name.id} = {format_expr(a.low)}:{format_expr(a.high)}" for a in stmt.axes]
            return f"grid {', '.join(axes)}"
        case Allocate():
            return _allocate(stmt)
        case Copy():
            return _copy(stmt)
        case Compute():
            return _compute(stmt)
        case Reshape():
            return _reshape(stmt)
        case For():
            return f"for {stmt.var.id} = {format_expr(stmt.low)}:{format_expr(stmt.high)}"
        case If():
            return f"if {format_expr(stmt.cond)}"


def format_expr(expr: Expr, level: int = 0) -> str:
    """An expression with the fewest brackets, in a context of precedence `level`."""
    match expr:
        case Num():
            return expr.text
        case Name():
            return expr.id
        case Transpose():
            return f"{expr.operand.id}.T"
        case Call():
            return f"{expr.func.id}({_exprs(expr.args)})"
        case Index():
            return f"{expr.tensor.id}[{_exprs(expr.args)}]"
        case Unary():
            own = _LEVEL["not"] if expr.op == "not" else _NEGATIVE
            sign = "not " if expr.op == "not" else "-"
            text = sign + format_expr(expr.operand, own)
        case Binary():
            own = _LEVEL.get(expr.op, _COMPARE)
            # `a < b < c` is not TL, so a comparison has brackets on its left side too.
            left = format_expr(expr.left, own + 1 if own == _COMPARE else own)
            text = f"{left} {expr.op} {format_expr(expr.right, own + 1)}"
    return f"({text})" if own < level else text


def _exprs(items: tuple[Expr, ...]) -> str:
    return ", ".join([format_expr(item) for item in items])


def _names(names: tuple[Name, ...]) -> str:
    return ", ".join(name.id for name in names)


def _comment(text: str) -> str:
    return f"// {text}".rstrip()


def _axis(axis: Axis) -> str:
    size = format_expr(axis.size)
    return f"{axis.label.id}: {size}" if axis.label else size


def _allocate(stmt: Allocate) -> str:
    shape = ", ".join(_axis(axis) for axis in stmt.shape)
    text = f"Allocate {stmt.name.id} in {stmt.space} ({shape})"
    if stmt.dtype:
        text += f" as {stmt.dtype.id}"
    if stmt.offset:
        text += f" with offset {format_expr(stmt.offset)}"
    if stmt.stages:
        text += f" with stages {format_expr(stmt.stages)}"
    if stmt.along:
        text += f" along {stmt.along}"
    if stmt.fragments:
        text += " in fragments"
    if stmt.in_place:
        text += " in place"
    if stmt.strided:
        text += " strided"
    return text


def _copy(stmt: Copy) -> str:
    text = f"Copy {stmt.name.id}"
    if stmt.shape is not None:
        text += f" ({_exprs(stmt.shape)})"
    if stmt.coords is not None:
        coords = ", ".join(format_coord(coord) for coord in stmt.coords)
        text += f" in coordinate [{coords}]"
    text += f" from {stmt.source} to {stmt.dest}"
    if stmt.adds:
        text += " and accumulate"
    if stmt.target:
        text += f" {stmt.target.id}" if stmt.adds else f" and get {stmt.target.id}"
    if stmt.index:
        text += f"[{_exprs(stmt.index)}]"
    if stmt.column:
        text += f" at column {format_expr(stmt.column)}"
    return f"{text} at turn {format_expr(stmt.turn)}" if stmt.turn else text


def format_coord(coord: Coord) -> str:
    """One axis of a coordinate, in tiles (`L = i`) or in elements (`L at i * BN`)."""
    joint = "at" if coord.in_elements else "="
    text = f"{coord.axis.id} {joint} {format_expr(coord.value)}"
    if coord.within is None:
        return text
    first, last = map(format_expr, coord.within)
    return f"{text} in {first}:{last}"


def _compute(stmt: Compute) -> str:
    operands = _exprs(stmt.args)
    text = f"Compute {operands}"
    if stmt.verb:
        # A bracket, a sign or `where` after the name would change its meaning as a verb.
        plain = re.match(r"(?!where\b)\w", operands, re.IGNORECASE)
        verb = stmt.verb.id
        text = f"Compute {verb} {operands}" if plain else f"Compute {verb}({operands})"
    if stmt.state:
        text += f" with {' and '.join(name.id for name in stmt.state)}"
    if stmt.where:
        text += f" where {format_expr(stmt.where)}"
    if stmt.target:
        text += f" and {stmt.mode} {stmt.target.id}"
    if stmt.rescale:
        text += f" and rescale {_names(stmt.rescale)}"
    return text


def _reshape(stmt: Reshape) -> str:
    source, dest = (
        _names(side) if len(side) == 1 else f"({_names(side)})" for side in (stmt.source, stmt.dest)
    )
    text = f"Reshape {stmt.name.id} from {source} to {dest}"
    if stmt.dtype:
        text += f" as {stmt.dtype.id}"
    return f"{text} and get {stmt.target.id}" if stmt.target else text


def _body(body: tuple[Statement, ...], indent: str) -> Iterator[str]:
    widths = _param_widths(body)
    for n, stmt in enumerate(body):
        if stmt.gap and n:
            yield ""
        line = format_stmt(stmt)
        if stmt.comment is not None and not isinstance(stmt, Comment):
            line = f"{line:{widths[n]}}  {_comment(stmt.comment)}"
        yield indent + line
        if isinstance(stmt, For):
            yield from _body(stmt.body, indent + "  ")
        elif isinstance(stmt, If):
            yield from _body(stmt.then, indent + "  ")
            if stmt.orelse:
                yield f"{indent}else"
                yield from _body(stmt.orelse, indent + "  ")
        if isinstance(stmt, (For, If)):
            yield f"{indent}end"


def _param_widths(body: tuple[Statement, ...]) -> list[int]:
    """The width of each statement before its comment: comments of consecutive params align."""
    widths = [0] * len(body)
    run: list[int] = []
    for n, stmt in enumerate(body):
        if not isinstance(stmt, Param) or stmt.gap:
            run = []
        if isinstance(stmt, Param) and stmt.comment is not None:
            run.append(n)
            widest = max(len(format_stmt(stmt)), widths[run[0]])
            for k in run:
                widths[k] = widest
    return widths
