"""Scalar expressions of the kernel, as trees: built here, rewritten by passes, printed by
printing/cpp.py and nowhere else. Every variable has one definition, so that a name means one value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

Type = Literal["int", "float", "bool"]
Axes = frozenset[str]


@dataclass(frozen=True)
class Lit:
    """A number that is known now."""

    value: int | float
    type: Type = "int"


@dataclass(frozen=True)
class Var:
    """A parameter, a dimension, a coordinate of the block, a loop's variable or a defined name."""

    name: str
    type: Type = "int"


@dataclass(frozen=True)
class At:
    """The element of a tile or a vector in registers at the present row (m) and column (n)."""

    name: str
    axes: Axes
    type: Type = "float"


@dataclass(frozen=True)
class Position:
    """The position of the present element among the queries (`q_idx`) or the keys (`kv_idx`)."""

    name: Literal["q_idx", "kv_idx"]
    type: Type = "int"


@dataclass(frozen=True)
class RingStage:
    """The stage of a ring that is read now, or the one `ahead` of it."""

    ring: str
    ahead: bool = False
    type: Type = "int"


@dataclass(frozen=True)
class Unary:
    """A sign or a negation: `-x` or `!x`."""

    op: str
    operand: Term

    @property
    def type(self) -> Type:
        """That of its operand."""
        return self.operand.type


@dataclass(frozen=True)
class Binary:
    """An operator between two terms."""

    op: str
    left: Term
    right: Term
    type: Type


@dataclass(frozen=True)
class Call:
    """A function of the device vocabulary (namespace fw)."""

    func: str
    args: tuple[Term, ...]
    type: Type


@dataclass(frozen=True)
class Select:
    """`condition ? yes : no`."""

    condition: Term
    yes: Term
    no: Term

    @property
    def type(self) -> Type:
        """That of its values."""
        return self.yes.type


@dataclass(frozen=True)
class Read:
    """An element of a tensor in global memory; the tensor's elements are ints or floats."""

    tensor: str
    index: tuple[Term, ...]
    type: Type
    offset: Term | None = None  # of a view


@dataclass(frozen=True)
class Line:
    """Where in a tensor in global memory a gather begins: at an index on every axis, and an offset
    of a view. Its type is that of the elements, as they are computed with."""

    tensor: str
    index: tuple[Term, ...]
    type: Type
    offset: Term | None = None


@dataclass(frozen=True)
class Gather:
    """The element of a tensor that a row or column chooses: from a line, so many steps further on
    these axes. It never changes while the kernel runs."""

    line: Line
    axes: tuple[int, ...]
    index: tuple[Term, ...]

    @property
    def type(self) -> Type:
        """That of the tensor's elements."""
        return self.line.type


@dataclass(frozen=True)
class Convert:
    """An int as fp32, or in 64 bits."""

    to: Literal["float", "int64_t"]
    operand: Term

    @property
    def type(self) -> Type:
        """The type of the result."""
        return "float" if self.to == "float" else "int"


Term = (
    Lit | Var | At | Position | RingStage | Unary | Binary | Call | Select | Read | Line | Gather
    | Convert
)  # fmt: skip

COMPARISONS = ("<", "<=", ">", ">=", "==", "!=")
MIRRORED = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "==": "==", "!=": "!="}
"""The comparison with its sides exchanged."""
ZERO, ONE = Lit(0), Lit(1)


# --- making terms -----------------------------------------------------------------------------


def integer(value: int) -> Lit:
    """A whole number as a term."""
    return Lit(value)


def real(value: float) -> Lit:
    """A number as fp32."""
    return Lit(float(value), "float")


def binary(op: str, left: Term, right: Term, type: Type | None = None) -> Binary:
    """`left op right`, as it is."""
    if op in (*COMPARISONS, "&", "|", "&&", "||"):
        type = "bool"
    return Binary(op, left, right, type or left.type)


def call(func: str, *args: Term, type: Type) -> Call:
    """A function of the device vocabulary."""
    return Call(func, args, type)


def as_float(x: Term) -> Term:
    """The term as fp32."""
    if x.type == "float":
        return x
    return real(float(x.value)) if isinstance(x, Lit) else Convert("float", x)


def times(a: Term, b: Term) -> Term:
    """A product of whole numbers, without factors of 0 and 1."""
    x, y = literal(a), literal(b)
    if x is not None and y is not None:
        return integer(x * y)
    if 0 in (x, y):
        return ZERO
    if y == 1:
        return a
    return b if x == 1 else binary("*", a, b)


def plus(a: Term, b: Term | int) -> Term:
    """A sum of whole numbers, without terms of 0."""
    return _sum("+", a, Lit(b) if isinstance(b, int) else b)


def minus(a: Term, b: Term | int) -> Term:
    """A difference of whole numbers, without terms of 0."""
    return _sum("-", a, Lit(b) if isinstance(b, int) else b)


def _sum(op: str, a: Term, b: Term) -> Term:
    x, y = literal(a), literal(b)
    if x is not None and y is not None:
        return integer(x + y if op == "+" else x - y)
    if y == 0:
        return a
    return b if x == 0 and op == "+" else binary(op, a, b)


def negated(x: Term) -> Term:
    """Where a condition does not hold."""
    return Unary("!", x)


def literal(x: Term) -> int | None:
    """The value of a whole number that is known now."""
    return x.value if isinstance(x, Lit) and isinstance(x.value, int) else None


def parts(x: Term) -> tuple[Term, ...]:
    """The terms that a term is made of."""
    match x:
        case Unary(_, operand) | Convert(_, operand):
            return (operand,)
        case Binary(_, left, right):
            return left, right
        case Call(_, args):
            return args
        case Select(condition, yes, no):
            return condition, yes, no
        case Read(_, index) | Line(_, index):
            return index if x.offset is None else (*index, x.offset)
        case Gather(line, _, index):
            return line, *index
    return ()


def walk(x: Term) -> Iterator[Term]:
    """A term and all that it is made of."""
    yield x
    for part in parts(x):
        yield from walk(part)


def variables(x: Term) -> set[str]:
    """The names of the variables in a term."""
    return {part.name for part in walk(x) if isinstance(part, Var)}


def reads_memory(x: Term) -> bool:
    """Whether a term depends on what is in a tensor."""
    return any(isinstance(part, (Read, Gather)) for part in walk(x))


def positive(x: Term, known: Callable[[str], int | None] = lambda name: None) -> bool:
    """Whether a whole number is surely above 0; `known` gives the least value of a variable."""
    return _least(x, known) > 0


def _least(x: Term, known: Callable[[str], int | None]) -> float:
    """A lower bound of a whole number."""
    nothing = float("-inf")
    match x:
        case Lit(value):
            return value
        case Var(name):
            least = known(name)
            return nothing if least is None else least
        case Binary("+", left, right):
            return _least(left, known) + _least(right, known)
        case Binary("-", left, Lit(value)):
            return _least(left, known) - value
        case Binary("*", left, right):
            a, b = _least(left, known), _least(right, known)
            return a * b if a >= 0 and b >= 0 else nothing
        case Call("max", args):
            return max(_least(a, known) for a in args)
        case Call("min", args):
            return min(_least(a, known) for a in args)
        case Call("abs", _):
            return 0
        case Call("floor_mod", (_, below)):  # has the sign of its divisor
            return 0 if _least(below, known) > 0 else nothing
        case Call("ceil_div", (above, below)):
            return min(1, _least(above, known)) if _least(below, known) > 0 else nothing
        case Call("floor_div", (above, below)):
            return 0 if _least(above, known) >= 0 and _least(below, known) > 0 else nothing
        case Select(_, yes, no):
            return min(_least(yes, known), _least(no, known))
    return nothing


# --- rewriting terms --------------------------------------------------------------------------


def substitute(x: Term, values: Mapping[str, Term]) -> Term:
    """The term with other terms in the place of variables, simplified."""
    if isinstance(x, Var):
        return values.get(x.name, x)
    if not parts(x):
        return x
    return rebuilt(x, tuple(substitute(part, values) for part in parts(x)))


def inlined(lets: Mapping[str, Term], values: Mapping[str, Term] | None = None) -> dict[str, Term]:
    """What names stand for, each in terms of what is defined outside; `values` are put in."""
    found = dict(values or {})
    for name, value in lets.items():
        found[name] = substitute(value, found)
    return found


def widened(x: Term) -> Term:
    """The term computed in 64 bits; functions take and give ints."""
    if isinstance(x, (Var, Read, Call)) and x.type == "int":
        return Convert("int64_t", x)
    if not parts(x):
        return x
    return rebuilt(x, tuple(widened(part) for part in parts(x)))


def rebuilt(x: Term, inner: tuple[Term, ...]) -> Term:
    """The term with other parts."""
    if inner == parts(x):
        return x
    match x:
        case Binary("*", _, _, "int"):
            return times(*inner)
        case Binary("+", _, _, "int"):
            return plus(*inner)
        case Binary("-", _, _, "int"):
            return minus(*inner)
        case Binary():
            return replace(x, left=inner[0], right=inner[1])
        case Unary() | Convert():
            return replace(x, operand=inner[0])
        case Call():
            return replace(x, args=inner)
        case Select():
            return Select(*inner)
        case Read() | Line():
            index, offset = inner[: len(x.index)], inner[len(x.index) :]
            return replace(x, index=index, offset=offset[0] if offset else None)
        case Gather():
            assert isinstance(inner[0], Line)
            return replace(x, line=inner[0], index=inner[1:])
    return x
