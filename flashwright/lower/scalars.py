"""TL scalars in C++. TL's `/` is exact, so an integer scalar is kept as numerator and denominator:
`i < kv_len / BN - 1` becomes `i * BN < kv_len - BN`, and no rounding ever happens unasked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction

from flashwright.check.scalars import Scalar as Number
from flashwright.check.scalars import number
from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.lang.nodes import Binary, Call, Expr, Index, Name, Num, Span, Transpose, Unary
from flashwright.lower.code import Code, as_float, binary, call, choose, integer, real, unary

ONE = integer(1)


@dataclass(frozen=True)
class Scalar:
    """A scalar: its numerator (or a float or a condition), its denominator (an int, positive), and
    its value where that is known now."""

    code: Code
    below: Code = ONE
    value: Number | None = None

    @property
    def type(self) -> str:
        """int, float or bool; a fraction of ints is an int that is not whole."""
        return self.code.type

    @property
    def whole(self) -> bool:
        """Whether it has no denominator."""
        return self.below == ONE

    def as_float(self) -> Code:
        """As fp32."""
        if self.value is not None and (not self.whole or self.code.text.lstrip("-").isdigit()):
            return real(float(self.value))
        if self.whole:
            return as_float(self.code)
        return binary("/", as_float(self.code), as_float(self.below))

    def as_int(self, span: Span) -> Code:
        """As a whole number; TL allows fractions here only where they come out whole."""
        if self.type != "int":
            raise refused("this must be a whole number in the kernel", span)
        return self.code if self.whole else call("fw::floor_div", self.code, self.below, type="int")


def refused(message: str, span: Span | None, help: str | None = None) -> Failed:
    """The program is right, but the translator cannot put it into CUDA."""
    return Failed(Diagnostic("FW811", message, span, help=help))


def constant(value: Number) -> Scalar:
    """A number that is known now."""
    if isinstance(value, bool):
        return Scalar(Code("true" if value else "false", "bool"), value=value)
    if isinstance(value, int):
        return Scalar(integer(value), value=value)
    if isinstance(value, Fraction):
        return Scalar(integer(value.numerator), integer(value.denominator), value)
    return Scalar(real(value), value=value)


def named(name: str, value: Number) -> Scalar:
    """A parameter, by its name where that is a whole number or an fp32 one."""
    if isinstance(value, Fraction):
        return constant(value)
    return Scalar(Code(name, "float" if isinstance(value, float) else "int"), value=value)


Reader = Callable[[Index, tuple[Code, ...]], Code]


class Scalars:
    """Turns scalar expressions into C++ within a scope."""

    def __init__(self, scope: Mapping[str, Scalar], read: Reader) -> None:
        self.scope = dict(scope)
        self.read = read

    def define(self, name: str, scalar: Scalar) -> None:
        """Give a name its meaning."""
        self.scope[name] = scalar

    def __call__(self, expr: Expr) -> Scalar:
        """The expression in C++."""
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
        """`a op b`."""
        if op in ("and", "or"):
            return Scalar(binary("&&" if op == "and" else "||", a.code, b.code))
        if op in ("<", "<=", ">", ">=", "==", "!="):
            return Scalar(binary(op, *_comparable(a, b)))
        if "float" in (a.type, b.type):
            return Scalar(binary(op, a.as_float(), b.as_float()))
        if op in ("/", "%") and not _positive(b):
            raise refused("a divisor that is not surely positive", span)
        if op == "/":
            return _reduced(_times(a.code, b.below), _times(a.below, b.code))
        if op == "*":
            return _reduced(_times(a.code, b.code), _times(a.below, b.below))
        if op == "%":
            return Scalar(call("fw::floor_mod", a.as_int(span), b.as_int(span), type="int"))
        x, y, below = _common(a, b)
        return _reduced(_sum(op, x, y), below)

    def call(self, name: str, args: list[Scalar]) -> Scalar:
        """A function of TL."""
        if name in ("floor", "ceil") and args[0].type == "int":
            (a,) = args
            return a if a.whole else Scalar(call(f"fw::{name}_div", a.code, a.below, type="int"))
        if name in ("min", "max") and all(a.type == "int" for a in args):
            first = args[0]
            for other in args[1:]:
                x, y, below = _common(first, other)
                first = Scalar(call(f"fw::{name}", x, y, type="int"), below)
            return first
        if name == "abs" and args[0].type == "int":
            return replace(args[0], code=call("fw::abs", args[0].code, type="int"), value=None)
        if name == "where":
            condition, yes, no = args
            if yes.type == no.type == "int":
                x, y, below = _common(yes, no)
                return Scalar(choose(condition.code, x, y), below)
            return Scalar(choose(condition.code, yes.as_float(), no.as_float()))
        return Scalar(call(f"fw::{name}", *(a.as_float() for a in args), type="float"))


def _negated(x: Scalar) -> Scalar:
    value = -x.value if x.value is not None else None
    if isinstance(x.value, int) and x.code.text.isdigit():
        return Scalar(integer(-x.value), value=-x.value)
    return Scalar(unary("-", x.code), x.below, value)


def _positive(x: Scalar) -> bool:
    """Whether a divisor is known to be above 0, taking it that dimensions are."""
    return x.value > 0 if x.value is not None else "-" not in x.code.text


def _not(x: Scalar) -> Scalar:
    return Scalar(unary("!", x.code))


def _literal(x: Code) -> int | None:
    return int(x.text) if x.text.lstrip("-").isdigit() else None


def _times(a: Code, b: Code) -> Code:
    x, y = _literal(a), _literal(b)
    if x is not None and y is not None:
        return integer(x * y)
    if 0 in (x, y):
        return integer(0)
    if y == 1:
        return a
    return b if x == 1 else binary("*", a, b)


def _sum(op: str, a: Code, b: Code) -> Code:
    x, y = _literal(a), _literal(b)
    if x is not None and y is not None:
        return integer(x + y if op == "+" else x - y)
    if y == 0:
        return a
    return b if x == 0 and op == "+" else binary(op, a, b)


def _reduced(above: Code, below: Code) -> Scalar:
    x, y = _literal(above), _literal(below)
    if x is not None and y is not None:
        return constant(number(str(x)) if y == 1 else _simple(Fraction(x, y)))
    return Scalar(above, below)


def _simple(value: Fraction) -> Number:
    return int(value) if value.denominator == 1 else value


def _common(a: Scalar, b: Scalar) -> tuple[Code, Code, Code]:
    if a.below == b.below:
        return a.code, b.code, a.below
    return _times(a.code, b.below), _times(b.code, a.below), _times(a.below, b.below)


def _comparable(a: Scalar, b: Scalar) -> tuple[Code, Code]:
    if "float" in (a.type, b.type):
        return a.as_float(), b.as_float()
    x, y, _ = _common(a, b)
    return x, y
