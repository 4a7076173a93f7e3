"""Expressions of values: constructors that simplify, substitution, and factors.

A value of the program has a name with a dot (`S.1`): every name is assigned once. Other names are
scalars of TL. GEMM and Mask are calls here (`gemm(Q.0, K.0)`, `mask(S.0, condition)`); which
operand a GEMM transposes follows from the axes of the values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial, reduce
from itertools import filterfalse
from typing import TypeGuard

from flashwright.lang import nodes as tl
from flashwright.program.scalars import Scalar, Unknown, evaluate
from flashwright.program.vocabulary import POSITIONS

ZERO: tl.Expr = tl.Num("0")
ONE: tl.Expr = tl.Num("1")


@dataclass(frozen=True)
class Step:
    """The assignment of a value, at its place in the program."""

    target: str
    value: tl.Expr
    span: tl.Span = tl.NOWHERE


def is_value(expr: object) -> TypeGuard[tl.Name]:
    """Whether an expression is the name of a value."""
    return isinstance(expr, tl.Name) and "." in expr.id


def values_in(expr: tl.Expr) -> list[str]:
    """The values that an expression uses, each as often as it is used."""
    return [e.id for e in tl.expressions(expr) if is_value(e)]


def gemm_operands(expr: tl.Expr) -> list[str]:
    """The values that an expression multiplies by GEMMs, each as often as it is used."""
    gemms = [e for e in tl.expressions(expr) if isinstance(e, tl.Call) and e.func.id == "gemm"]
    return [a.id for e in gemms for a in e.args if isinstance(a, tl.Name)]


def per_element(expr: tl.Expr) -> bool:
    """Whether an expression has values or positions, so that it is no scalar."""
    names = [e for e in tl.expressions(expr) if isinstance(e, tl.Name)]
    return any(is_value(name) or name.id in POSITIONS for name in names)


def call(function: str, *args: tl.Expr) -> tl.Expr:
    """A call, or its value where the arguments settle it."""
    first = args[0]
    if function in ("exp", "exp2") and first == ZERO:
        return ONE
    if function in ("log", "log2") and first == ONE:
        return ZERO
    if function == "where" and first in (ZERO, ONE):
        return args[1] if first == ONE else args[2]
    if function == "where" and args[1] == args[2]:
        return args[1]
    return tl.Call(tl.Name(function), args)


def number(value: float) -> tl.Expr:
    """A number as TL writes it: whole where it is whole, in all its digits otherwise."""
    text = repr(abs(value)).removesuffix(".0")
    return tl.Unary("-", tl.Num(text)) if value < 0 else tl.Num(text)


def neg(a: tl.Expr) -> tl.Expr:
    """The expression with the other sign."""
    if a == ZERO:
        return ZERO
    if isinstance(a, tl.Binary) and a.op == "-":
        return tl.Binary("-", a.right, a.left)
    return a.operand if isinstance(a, tl.Unary) and a.op == "-" else tl.Unary("-", a)


def add(a: tl.Expr, b: tl.Expr) -> tl.Expr:
    """The sum, without zeros and double signs."""
    if a == ZERO or b == ZERO:
        return b if a == ZERO else a
    if isinstance(b, tl.Unary) and b.op == "-":
        return sub(a, b.operand)
    if isinstance(a, tl.Unary) and a.op == "-":
        return sub(b, a.operand)
    return tl.Binary("+", a, b)


def sub(a: tl.Expr, b: tl.Expr) -> tl.Expr:
    """The difference, without zeros and double signs."""
    if a == b or b == ZERO:
        return ZERO if a == b else a
    if a == ZERO:
        return neg(b)
    if isinstance(b, tl.Unary) and b.op == "-":
        return add(a, b.operand)
    return tl.Binary("-", a, b)


def total(terms: Iterable[tl.Expr]) -> tl.Expr:
    """The sum of all terms."""
    return reduce(add, terms, ZERO)


@dataclass(frozen=True)
class Product:
    """A product as its sign, its factors and its divisors."""

    negative: bool
    tops: tuple[tl.Expr, ...]
    bottoms: tuple[tl.Expr, ...] = ()

    @staticmethod
    def of(expr: tl.Expr) -> Product:
        """The factors of an expression; a sum is one factor."""
        if isinstance(expr, tl.Unary) and expr.op == "-":
            inner = Product.of(expr.operand)
            return Product(not inner.negative, inner.tops, inner.bottoms)
        if isinstance(expr, tl.Binary) and expr.op in ("*", "/"):
            a, b = Product.of(expr.left), Product.of(expr.right)
            if expr.op == "/":
                b = Product(b.negative, b.bottoms, b.tops)
            return Product(a.negative != b.negative, a.tops + b.tops, a.bottoms + b.bottoms)
        return Product(False, () if expr == ONE else (expr,))

    def expr(self) -> tl.Expr:
        """The product as an expression: tiles first, equal factors cancelled, scalars last."""
        tops, bottoms = list(self.tops), []
        for divisor in self.bottoms:
            if divisor in tops:
                tops.remove(divisor)
            else:
                bottoms.append(divisor)
        if ZERO in tops:
            return ZERO
        tops.sort(key=lambda e: not per_element(e))
        result = reduce(partial(tl.Binary, "*"), tops) if tops else ONE
        result = reduce(partial(tl.Binary, "/"), bottoms, result)
        return neg(result) if self.negative else result


def split_scalars(expr: tl.Expr) -> tuple[tl.Expr, tl.Expr]:
    """The product of an expression's tiles, and that of its scalar factors with the sign."""
    product = Product.of(expr)
    sides = (product.tops, product.bottoms)
    tiles = [tuple(filter(per_element, side)) for side in sides]
    scalars = [tuple(filterfalse(per_element, side)) for side in sides]
    return Product(False, *tiles).expr(), Product(product.negative, *scalars).expr()


def mul(a: tl.Expr, b: tl.Expr) -> tl.Expr:
    """The product, with equal factors of divisors cancelled."""
    return Product.of(tl.Binary("*", a, b)).expr()


def div(a: tl.Expr, b: tl.Expr) -> tl.Expr:
    """The quotient, with equal factors cancelled."""
    return Product.of(tl.Binary("/", a, b)).expr()


_BINARY = {"+": add, "-": sub, "*": mul, "/": div}


def substitute(expr: tl.Expr, change: Callable[[tl.Expr], tl.Expr | None]) -> tl.Expr:
    """The expression with parts replaced (None keeps a part), simplified on the way up."""
    found = change(expr)
    if found is not None:
        return found
    match expr:
        case tl.Unary("-", operand):
            return neg(substitute(operand, change))
        case tl.Unary(op, operand):
            return tl.Unary(op, substitute(operand, change))
        case tl.Binary(op, left, right):
            a, b = substitute(left, change), substitute(right, change)
            return _BINARY[op](a, b) if op in _BINARY else _compared(op, a, b)
        case tl.Call(func, args):
            return call(func.id, *(substitute(a, change) for a in args))
        case tl.Index(tensor, args):
            return tl.Index(tensor, tuple(substitute(a, change) for a in args))
        case _:
            return expr


def renamed(expr: tl.Expr, names: Mapping[str, tl.Expr]) -> tl.Expr:
    """The expression with names replaced, simplified."""
    return substitute(expr, lambda e: names.get(e.id) if isinstance(e, tl.Name) else None)


def inlined(expr: tl.Expr, steps: Mapping[str, tl.Expr]) -> tl.Expr:
    """The expression with the steps that it names put in."""
    while steps.keys() & values_in(expr):
        expr = renamed(expr, steps)
    return expr


def _compared(op: str, a: tl.Expr, b: tl.Expr) -> tl.Expr:
    """A comparison, or its value if both sides are numbers."""
    if isinstance(a, tl.Num) and isinstance(b, tl.Num):
        return ONE if evaluate(tl.Binary(op, a, b), {}) else ZERO
    return tl.Binary(op, a, b)


def constant(expr: tl.Expr, params: Mapping[str, Scalar]) -> float | None:
    """The value of an expression of numbers and params; None if it has anything else."""
    names = {name.id for name in tl.value_names(expr)}
    if names - params.keys() or any(isinstance(e, tl.Index) for e in tl.expressions(expr)):
        return None
    value = evaluate(expr, params)
    assert not isinstance(value, Unknown)
    return float(value) if math.isfinite(value) else None
