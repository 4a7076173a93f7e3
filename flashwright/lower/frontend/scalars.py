"""TL scalars as terms. TL's `/` is exact: an integer scalar has a numerator and a denominator, so
`i < kv_len / BN - 1` becomes `i * BN < kv_len - BN`, and no rounding ever happens unasked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction

from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.lang.nodes import Binary, Call, Expr, Index, Name, Num, Span, Transpose, Unary
from flashwright.lower import term as terms
from flashwright.lower.term import (
    ONE,
    Lit,
    Select,
    Term,
    Type,
    Var,
    as_float,
    binary,
    call,
    integer,
    literal,
    real,
    times,
)
from flashwright.program.scalars import Scalar as Number
from flashwright.program.scalars import number


@dataclass(frozen=True)
class Scalar:
    """A scalar: its numerator (or a float or a condition), its denominator (an int, positive), and
    its value where that is known now."""

    term: Term
    below: Term = ONE
    value: Number | None = None

    @property
    def type(self) -> Type:
        """int, float or bool; a fraction of ints is an int that is not whole."""
        return self.term.type

    @property
    def whole(self) -> bool:
        """Whether it has no denominator."""
        return self.below == ONE

    def as_float(self) -> Term:
        """The value as an fp32 term."""
        if self.value is not None and (not self.whole or isinstance(self.term, Lit)):
            return real(float(self.value))
        if self.whole:
            return as_float(self.term)
        return binary("/", as_float(self.term), as_float(self.below))

    def as_int(self, span: Span) -> Term:
        """As a whole number; TL allows fractions here only where they come out whole."""
        if self.type != "int":
            raise refused("this must be a whole number in the kernel", span)
        return self.term if self.whole else call("floor_div", self.term, self.below, type="int")


def refused(message: str, span: Span | None, help: str | None = None) -> Failed:
    """The program is right, but the translator cannot put it into CUDA."""
    return Failed(Diagnostic("FW811", message, span, help=help))


def constant(value: Number) -> Scalar:
    """A number that is known now."""
    if isinstance(value, bool):
        return Scalar(Lit(value, "bool"), value=value)
    if isinstance(value, int):
        return Scalar(integer(value), value=value)
    if isinstance(value, Fraction):
        return Scalar(integer(value.numerator), integer(value.denominator), value)
    return Scalar(real(value), value=value)


def named(name: str, value: Number) -> Scalar:
    """A parameter, by its name where that is a whole number or an fp32 one."""
    if isinstance(value, Fraction):
        return constant(value)
    return Scalar(Var(name, "float" if isinstance(value, float) else "int"), value=value)


Reader = Callable[[Index, tuple[Term, ...]], Term]


class Scalars:
    """Turns scalar expressions into terms within a scope; `least` gives the least value that is
    known of a variable (1 for a dimension)."""

    def __init__(
        self, scope: Mapping[str, Scalar], read: Reader, least: Mapping[str, int] | None = None
    ) -> None:
        self.scope = dict(scope)
        self.read = read
        self.least = dict(least or {})

    def define(self, name: str, scalar: Scalar) -> None:
        """Give a name its meaning."""
        self.scope[name] = scalar

    def __call__(self, expr: Expr) -> Scalar:
        """The expression as a term."""
        match expr:
            case Num(text):
                return constant(number(text))
            case Name(id):
                return self.scope[id]
            case Unary(op, operand):
                return _negated(self(operand)) if op == "-" else _not(self(operand))
            case Binary(op, left, right):
                return self.binary(op, self(left), self(right), expr.span)
            case Call(func, args):
                return self.call(func.id.lower(), [self(a) for a in args])
            case Index(_, args):
                places = tuple(self(a).as_int(a.span) for a in args)
                return Scalar(self.read(expr, places))
            case Transpose():
                raise AssertionError("`.T` belongs to a GEMM")

    def binary(self, op: str, a: Scalar, b: Scalar, span: Span) -> Scalar:
        """`a op b`, exact for whole numbers and fractions of them."""
        if op in ("and", "or"):
            return Scalar(binary("&&" if op == "and" else "||", a.term, b.term))
        if op in ("<", "<=", ">", ">=", "==", "!="):
            return Scalar(binary(op, *_comparable(a, b)))
        if "float" in (a.type, b.type):
            if op == "%":
                return Scalar(call("floor_mod", a.as_float(), b.as_float(), type="float"))
            return Scalar(binary(op, a.as_float(), b.as_float()))
        if op == "/":
            a, b = self._above(a, b)
            return _reduced(times(a.term, b.below), times(a.below, b.term))
        if op == "*":
            return _reduced(times(a.term, b.term), times(a.below, b.below))
        x, y, below = _common(a, b)
        if op == "%":
            return _reduced(_modulo(x, y), below)
        return _reduced(terms.plus(x, y) if op == "+" else terms.minus(x, y), below)

    def _above(self, a: Scalar, b: Scalar) -> tuple[Scalar, Scalar]:
        """The same quotient with a divisor above 0."""
        if b.value is not None:
            return (a, b) if b.value > 0 else (_negated(a), _negated(b))
        if terms.positive(b.term, self.least.get):
            return a, b
        flipped = Select(binary("<", b.term, integer(0)), _negated(a).term, a.term)
        return Scalar(flipped, a.below), Scalar(call("abs", b.term, type="int"), b.below)

    def call(self, name: str, args: list[Scalar]) -> Scalar:
        """A function of TL."""
        if name in ("floor", "ceil") and args[0].type == "int":
            (a,) = args
            return a if a.whole else Scalar(call(f"{name}_div", a.term, a.below, type="int"))
        if name in ("min", "max") and all(a.type == "int" for a in args):
            first = args[0]
            for other in args[1:]:
                x, y, below = _common(first, other)
                first = Scalar(call(name, x, y, type="int"), below)
            return first
        if name == "abs" and args[0].type == "int":
            return replace(args[0], term=call("abs", args[0].term, type="int"), value=None)
        if name == "where":
            condition, yes, no = args
            if yes.type == no.type == "int":
                x, y, below = _common(yes, no)
                return Scalar(Select(condition.term, x, y), below)
            return Scalar(Select(condition.term, yes.as_float(), no.as_float()))
        return Scalar(call(name, *(a.as_float() for a in args), type="float"))


def _negated(x: Scalar) -> Scalar:
    value = -x.value if x.value is not None else None
    known = literal(x.term)
    negative = integer(-known) if known is not None else terms.Unary("-", x.term)
    return Scalar(negative, x.below, value)


def _not(x: Scalar) -> Scalar:
    return Scalar(terms.Unary("!", x.term))


def _modulo(x: Term, y: Term) -> Term:
    a, b = literal(x), literal(y)
    if a is not None and b:
        return integer(a % b)
    return call("floor_mod", x, y, type="int")


def _reduced(above: Term, below: Term) -> Scalar:
    above, below = _cancelled(above, below)
    x, y = literal(above), literal(below)
    if x is not None and y is not None:
        return constant(number(str(x)) if y == 1 and x >= 0 else _simple(Fraction(x, y)))
    return Scalar(above, below)


def _cancelled(above: Term, below: Term) -> tuple[Term, Term]:
    """A fraction without the names that are a factor of both parts."""
    match below:
        case terms.Var():
            rest = _without(above, below)
            return (above, below) if rest is None else (rest, ONE)
        case terms.Binary("*", left, right):
            above, left = _cancelled(above, left)
            above, right = _cancelled(above, right)
            return above, times(left, right)
    return above, below


def _without(product: Term, factor: Term) -> Term | None:
    """The product without a factor; None if it has no such factor."""
    if product == factor:
        return ONE
    if not isinstance(product, terms.Binary) or product.op != "*":
        return None
    left, right = _without(product.left, factor), _without(product.right, factor)
    if left is not None:
        return times(left, product.right)
    return times(product.left, right) if right is not None else None


def _simple(value: Fraction) -> Number:
    return int(value) if value.denominator == 1 else value


def _common(a: Scalar, b: Scalar) -> tuple[Term, Term, Term]:
    if a.below == b.below:
        return a.term, b.term, a.below
    return times(a.term, b.below), times(b.term, a.below), times(a.below, b.below)


def _comparable(a: Scalar, b: Scalar) -> tuple[Term, Term]:
    if "float" in (a.type, b.type):
        return a.as_float(), b.as_float()
    x, y, _ = _common(a, b)
    return x, y
