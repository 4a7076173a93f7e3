"""The syntax tree of TL.

Nodes are frozen and compare by content: spans do not take part in equality, so that
`parse(format(tree)) == tree` is a plain comparison. Statements keep their comments and blank lines
for the formatter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, Literal, cast

Space = Literal["global", "shared", "register"]
SPACES: tuple[Space, ...] = ("global", "shared", "register")
Side = Literal["rows", "columns"]


@dataclass(frozen=True)
class Span:
    """A stretch of source text: character offsets, and 1-based line and column of both ends."""

    start: int
    end: int
    line: int
    column: int
    end_line: int
    end_column: int

    def to(self, other: Span) -> Span:
        """The span from the start of this one to the end of the other."""
        return Span(self.start, other.end, self.line, self.column, other.end_line, other.end_column)


NOWHERE = Span(0, 0, 1, 1, 1, 1)


def line_span(source: str, number: int) -> Span | None:
    """The span of a whole line of a text without its indentation; None if there is no such line."""
    lines = source.split("\n")
    if not 1 <= number <= len(lines):
        return None
    text = lines[number - 1].rstrip()
    begin = len(text) - len(text.lstrip())
    start = sum(len(line) + 1 for line in lines[: number - 1])
    return Span(start + begin, start + len(text), number, begin + 1, number, len(text) + 1)


# --- expressions ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Num:
    """A number, kept as written (`1e30` stays `1e30`)."""

    text: str
    span: Span = field(default=NOWHERE, compare=False, repr=False, kw_only=True)


@dataclass(frozen=True)
class Name:
    """A name: parameter, dimension, loop variable, tensor or tile."""

    id: str
    span: Span = field(default=NOWHERE, compare=False, repr=False, kw_only=True)


@dataclass(frozen=True)
class Unary:
    """A unary operation: `-x` or `not x`."""

    op: str
    operand: Expr
    span: Span = field(default=NOWHERE, compare=False, repr=False, kw_only=True)


@dataclass(frozen=True)
class Binary:
    """`x op y` with op one of `+ - * / % < <= > >= == != and or`."""

    op: str
    left: Expr
    right: Expr
    span: Span = field(default=NOWHERE, compare=False, repr=False, kw_only=True)


@dataclass(frozen=True)
class Call:
    """A call of a function: `f(x, y)`."""

    func: Name
    args: tuple[Expr, ...]
    span: Span = field(default=NOWHERE, compare=False, repr=False, kw_only=True)


@dataclass(frozen=True)
class Index:
    """`T[a, b]`: an element of a global tensor.

    In a Compute an index may depend on the element that is computed (`T[kv_idx - q_idx]`): then
    every element reads its own.
    """

    tensor: Name
    args: tuple[Expr, ...]
    span: Span = field(default=NOWHERE, compare=False, repr=False, kw_only=True)


@dataclass(frozen=True)
class Transpose:
    """`K.T`: the operand seen transposed, in a GEMM."""

    operand: Name
    span: Span = field(default=NOWHERE, compare=False, repr=False, kw_only=True)


Expr = Num | Name | Unary | Binary | Call | Index | Transpose

# Params of TL's own that had another name: read as today's, with the warning FW210.
EARLIER_PARAMS = {"Apart": "SplitMasked"}

# --- statements -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stmt:
    """The base of statements: the span, a comment at the end, a blank line above."""

    span: Span = field(default=NOWHERE, compare=False, repr=False, kw_only=True)
    comment: str | None = field(default=None, kw_only=True)
    gap: bool = field(default=False, kw_only=True)


@dataclass(frozen=True)
class Comment(Stmt):
    """A comment on a line of its own (text after `//`, stripped)."""

    text: str


@dataclass(frozen=True)
class Param(Stmt):
    """`param BM = 128`: a number fixed when the program is compiled.

    `earlier` is the name in the file, where that is the earlier name of a param of TL's own (see
    EARLIER_PARAMS): `name` then has today's name.
    """

    name: Name
    value: Expr
    earlier: str = field(default="", compare=False, repr=False, kw_only=True)


@dataclass(frozen=True)
class Dim(Stmt):
    """`dim top_k`: sizes known when the kernel is called, beside the predefined ones."""

    names: tuple[Name, ...]


@dataclass(frozen=True)
class Let(Stmt):
    """`let kv_head = floor(head_idx / 4)`: a name for a scalar."""

    name: Name
    value: Expr


@dataclass(frozen=True)
class GridAxis:
    """`block_idx = 0:q_len / BM` inside `grid`."""

    name: Name
    low: Expr
    high: Expr
    span: Span = field(default=NOWHERE, compare=False, repr=False, kw_only=True)


@dataclass(frozen=True)
class Grid(Stmt):
    """`grid a = 0:n, b = 0:m`: one thread block for each combination."""

    axes: tuple[GridAxis, ...]


@dataclass(frozen=True)
class Axis:
    """One dimension of an Allocate: `kv_len`, or with its label `L: kv_len`."""

    label: Name | None
    size: Expr
    span: Span = field(default=NOWHERE, compare=False, repr=False, kw_only=True)


@dataclass(frozen=True)
class Allocate(Stmt):
    """`Allocate K in shared (BN, HeadDim) as bf16 with stages 2`.

    `along` says how a vector in registers lies in tiles: with an element for each row or column.
    `in fragments`, a tensor between kernels lies in memory as the threads of an MMA hold it. An
    output `in place` keeps what the caller has in it where nothing is stored. The last axis of a
    `strided` tensor may have any stride.
    """

    name: Name
    space: Space
    shape: tuple[Axis, ...]
    dtype: Name | None = None
    offset: Expr | None = None
    stages: Expr | None = None
    along: Side | None = None
    fragments: bool = False
    in_place: bool = False
    strided: bool = False


@dataclass(frozen=True)
class Coord:
    """`L = i` inside `in coordinate [...]`: in tiles on an axis of the tile.

    `L at i * BN` has `in_elements` set: the value is the position at which the tile begins.
    `L = i in First:Last` counts from position First and ends before Last: `within` one sequence of
    several that lie behind each other.
    """

    axis: Name
    value: Expr
    in_elements: bool = False
    within: tuple[Expr, Expr] | None = None
    span: Span = field(default=NOWHERE, compare=False, repr=False, kw_only=True)


@dataclass(frozen=True)
class Copy(Stmt):
    """`Copy K (BN, HeadDim) in coordinate [L = i] from global to shared and get K2`.

    `column` is the first column to be filled where the Copy fills only some: `at column 128`.
    `adds` is set by `and accumulate`: the tile is added to what is in global memory. `turn` is how
    many other additions to the same place come before this one: `at turn block_idx`. With an
    `index` each element of the tile is added to its own element of the target:
    `and accumulate T[kv_idx - q_idx]`.
    """

    name: Name
    shape: tuple[Expr, ...] | None
    coords: tuple[Coord, ...] | None
    source: Space
    dest: Space
    target: Name | None = None
    column: Expr | None = None
    adds: bool = False
    turn: Expr | None = None
    index: tuple[Expr, ...] = ()

    @property
    def element(self) -> Index:
        """The element of the target that an `index` names, as a Compute would read it."""
        assert self.target is not None
        span = self.target.span.to(self.index[-1].span)
        return Index(self.target, self.index, span=span)


Mode = Literal["get", "get new", "accumulate"]


@dataclass(frozen=True)
class Compute(Stmt):
    """`Compute Verb a, b with s and t where c and get T and rescale O`.

    `verb` is None for the expression form: `Compute S * 2 and get S`.
    """

    verb: Name | None
    args: tuple[Expr, ...]
    state: tuple[Name, ...] = ()
    where: Expr | None = None
    mode: Mode | None = None
    target: Name | None = None
    rescale: tuple[Name, ...] = ()

    @property
    def operation(self) -> str:
        """The verb in lower case (`gemm`); empty for the expression form."""
        return self.verb.id.lower() if self.verb else ""


@dataclass(frozen=True)
class Reshape(Stmt):
    """`Reshape S from (MMA_C, MMA_M, MMA_N) to (MMA_A, MMA_M, MMA_N_new) as bf16`."""

    name: Name
    source: tuple[Name, ...]
    dest: tuple[Name, ...]
    dtype: Name | None = None
    target: Name | None = None


@dataclass(frozen=True)
class For(Stmt):
    """`for i = low:high ... end`: i takes every integer with low <= i < high.

    The span is that of the header line; the body's statements have their own.
    """

    var: Name
    low: Expr
    high: Expr
    body: tuple[Statement, ...]


@dataclass(frozen=True)
class If(Stmt):
    """`if cond ... else ... end`. The span is that of the header line."""

    cond: Expr
    then: tuple[Statement, ...]
    orelse: tuple[Statement, ...] = ()


Statement = Comment | Param | Dim | Let | Grid | Allocate | Copy | Compute | Reshape | For | If


@dataclass(frozen=True)
class Tree:
    """A whole program as written."""

    body: tuple[Statement, ...]

    @property
    def level(self) -> Literal["sketch", "code"]:
        """`sketch`, or `code` if the program has a size, an allocation or a layout."""
        for stmt in statements(self.body):
            if isinstance(stmt, (Param, Grid, Allocate, Reshape)):
                return "code"
            sizes = (stmt.shape, stmt.column, stmt.turn) if isinstance(stmt, Copy) else ()
            if any(size is not None for size in sizes):
                return "code"
        return "sketch"


def statements(body: tuple[Statement, ...]) -> Iterator[Statement]:
    """All statements in program order, those inside loops and branches included."""
    for stmt in body:
        yield stmt
        if isinstance(stmt, For):
            yield from statements(stmt.body)
        elif isinstance(stmt, If):
            yield from statements(stmt.then)
            yield from statements(stmt.orelse)


def expressions(node: object) -> tuple[Expr, ...]:
    """Every expression below a node, the node itself included, outermost first.

    Bodies of loops and branches are not entered: they are statements of their own. A node does not
    change, so its expressions are collected once and stay with it.
    """
    known: tuple[Expr, ...] | None = node.__dict__.get("_expressions")
    if known is None:
        found: list[Expr] = []
        _gather(node, found)
        known = node.__dict__["_expressions"] = tuple(found)
    return known


def value_names(expr: Expr) -> Iterator[Name]:
    """The names in an expression that are values, without functions and indexed tensors."""
    match expr:
        case Name():
            yield expr
        case Unary(_, operand) | Transpose(operand):
            yield from value_names(operand)
        case Binary(_, left, right):
            yield from value_names(left)
            yield from value_names(right)
        case Call(_, args) | Index(_, args):
            for arg in args:
                yield from value_names(arg)


def _gather(node: object, found: list[Expr]) -> None:
    if isinstance(node, (Num, Name, Unary, Binary, Call, Index, Transpose)):
        found.append(node)
    for part in _parts(cast(Any, type(node))):
        value = getattr(node, part)
        for item in value if isinstance(value, tuple) else (value,):
            if hasattr(item, "__dataclass_fields__"):
                _gather(item, found)


@cache
def _parts(kind: Any) -> tuple[str, ...]:
    skipped = ("span", "body", "then", "orelse", "comment", "gap")
    return tuple(f.name for f in fields(kind) if f.name not in skipped)
