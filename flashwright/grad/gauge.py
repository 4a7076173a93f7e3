"""The running maximum as a gauge: outputs do not depend on its value.

Every value has a kind. It moves as x + a.t (`add`) or as x * exp(w.t) (`mul`) when the references
shift by t; a value that moves as neither is `Unmovable`. A choice between values of different kinds
begins a new reference, whose value is free. A program whose outputs are invariant therefore has
the same outputs for any reference, also for the one that makes the row sum 1: the log-sum-exp.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Literal

from flashwright.grad.algebra import Step, constant
from flashwright.grad.normalise import QUERY, Forward, refuse
from flashwright.lang import nodes as tl

LN2 = math.log(2)
Linear = Mapping[str, float]


@dataclass(frozen=True)
class Kind:
    """How a value moves with the references; `sums` marks what depends on an accumulator."""

    moves: Literal["add", "mul"] = "add"
    by: Linear = field(default_factory=dict)
    constant: float | None = None
    zero: bool = False
    sums: bool = False

    @property
    def invariant(self) -> bool:
        """Whether the value does not move."""
        return not self.by

    def like(self, other: Kind) -> bool:
        """Whether two values move alike."""
        if self.invariant or other.invariant:
            return self.invariant and other.invariant
        names = self.by.keys() | other.by.keys()
        near = all(abs(self.by.get(n, 0) - other.by.get(n, 0)) < 1e-9 for n in names)
        return self.moves == other.moves and near


STILL = Kind()


class Unmovable(Exception):
    """A value that moves neither as a sum nor as a product, or a sum that is not linear."""


def _linear(a: Kind, b: Kind, sign: float) -> dict[str, float]:
    """The references that a sum or a product moves by."""
    names = {**a.by, **b.by}
    found = {n: a.by.get(n, 0.0) + sign * b.by.get(n, 0.0) for n in names}
    return {n: x for n, x in found.items() if abs(x) > 1e-12}


class Typing:
    """The kinds of a list of steps, from the kinds of the values they begin with."""

    def __init__(self, forward: Forward, kinds: dict[str, Kind]) -> None:
        self.params = forward.program.params
        self.kinds = dict(kinds)
        self.fresh = 0

    def run(self, steps: list[Step]) -> None:
        """Add the kind of every step; Unmovable if one has none."""
        for step in steps:
            self.kinds[step.target] = self.of(step.value)

    def of(self, expr: tl.Expr) -> Kind:
        """The kind of an expression."""
        known = constant(expr, self.params)
        if known is not None:
            return Kind(constant=known, zero=known == 0)
        match expr:
            case tl.Name(id):
                return self.kinds.get(id, STILL)
            case tl.Unary("-", operand):
                return self._product(Kind(constant=-1.0), self.of(operand), 1)
            case tl.Binary("+" | "-" as op, left, right):
                return self._sum(self.of(left), self.of(right), 1 if op == "+" else -1)
            case tl.Binary("*" | "/" as op, left, right):
                return self._product(self.of(left), self.of(right), 1 if op == "*" else -1)
            case tl.Binary("<" | "<=" | ">" | ">=" | "==" | "!=", left, right):
                return self._comparison(self.of(left), self.of(right))
            case tl.Call(func, args):
                return self._call(func.id, args)
        return STILL

    def _sum(self, a: Kind, b: Kind, sign: float) -> Kind:
        """The kind of a sum, or of a difference."""
        sums = a.sums or b.sums
        if a.zero or b.zero:
            kept = b if a.zero else a
            turned = a.zero and sign < 0 and kept.moves == "add"
            by = {name: -x for name, x in kept.by.items()} if turned else kept.by
            return replace(kept, by=by, sums=sums, zero=a.zero and b.zero, constant=None)
        if a.moves == b.moves == "mul" and a.like(b):
            return replace(a, sums=sums)
        if any(k.moves == "mul" and not k.invariant for k in (a, b)):
            raise Unmovable
        return Kind("add", _linear(a, b, sign), sums=sums)

    def _product(self, a: Kind, b: Kind, sign: float) -> Kind:
        """The kind of a product, or of a quotient."""
        if (a.sums and b.sums) or (b.sums and sign < 0):
            raise Unmovable
        sums = a.sums or b.sums
        if a.zero or (b.zero and sign > 0):
            return Kind(zero=True, sums=sums)
        for kind, factor in ((a, b), (b, a)):
            if kind.moves == "add" and not kind.invariant:
                if factor.constant is None or (sign < 0 and kind is b):
                    raise Unmovable
                scale = factor.constant if sign > 0 else 1 / factor.constant
                return Kind("add", {n: x * scale for n, x in kind.by.items()}, sums=sums)
        return Kind("mul", _linear(a, b, sign), sums=sums)

    def _comparison(self, a: Kind, b: Kind) -> Kind:
        """The kind of a comparison: values that move alike, or a sign."""
        signs = (a.moves == "mul" and b.zero) or (b.moves == "mul" and a.zero)
        if a.sums or b.sums or not (a.like(b) or signs):
            raise Unmovable
        return STILL

    def _call(self, name: str, args: tuple[tl.Expr, ...]) -> Kind:
        """The kind of a function's value."""
        if name == "where":
            return self._where(*args)
        kinds = [self.of(a) for a in args[: 1 if name == "mask" else None]]
        if name == "gemm":
            return self._product(kinds[0], kinds[1], 1)
        if name == "rowsum":
            return kinds[0]
        if any(k.sums for k in kinds):
            raise Unmovable
        if name in ("rowmax", "mask"):
            return kinds[0]
        if name in ("max", "min"):
            return self._choice(kinds)
        return self._function(name, kinds)

    def _function(self, name: str, kinds: list[Kind]) -> Kind:
        """The kind of an exponential, a logarithm, or a function of values that do not move."""
        kind = kinds[0]
        if all(k.invariant for k in kinds):
            return STILL
        grows = {"exp": 1.0, "exp2": LN2}.get(name)
        falls = {"log": 1.0, "log2": 1 / LN2}.get(name)
        if grows and kind.moves == "add":
            return Kind("mul", {n: x * grows for n, x in kind.by.items()})
        if falls and kind.moves == "mul":
            return Kind("add", {n: x * falls for n, x in kind.by.items()})
        raise Unmovable

    def _where(self, condition: tl.Expr, a: tl.Expr, b: tl.Expr) -> Kind:
        """The kind of a choice by a condition."""
        kinds = [self.of(a), self.of(b)]
        if any(k.sums for k in kinds):
            raise Unmovable
        try:
            self.of(condition)
        except Unmovable:
            return self._reference(kinds)
        if kinds[0].zero or kinds[1].zero:
            return kinds[kinds[0].zero]
        return self._choice(kinds)

    def _choice(self, kinds: list[Kind]) -> Kind:
        """The kind of one of several values."""
        if all(k.like(kinds[0]) for k in kinds):
            return replace(kinds[0], constant=None, zero=False)
        return self._reference(kinds)

    def _reference(self, kinds: list[Kind]) -> Kind:
        """A new reference, chosen among values."""
        if any(k.moves == "mul" and not k.invariant for k in kinds):
            raise Unmovable
        self.fresh += 1
        return Kind("add", {f"fresh {self.fresh}": 1.0})


@dataclass(frozen=True)
class Gauge:
    """The references of a program, and the kinds of what its loop carries.

    `norms` has for each reference the row sum of its weights and the factor c of
    exp(c * (score - reference)); `fixed` the values of the body that are a reference.
    """

    references: tuple[str, ...]
    kinds: Mapping[str, Kind]
    norms: Mapping[str, tuple[str, float]]
    fixed: Mapping[str, str]


def find_gauge(forward: Forward) -> Gauge:
    """The smallest set of references under which all outputs are invariant."""
    rows = [c for c in forward.carried if forward.axes[c] == (QUERY,)]
    for size in range(len(rows) + 1):
        for references in combinations(rows, size):
            with suppress(Unmovable):
                return _gauge(forward, references)
    raise refuse(
        forward.loop.span,
        "the loop carries values that are neither sums over the keys nor a running maximum, or an "
        "output depends on the maximum",
        "a sum is rescaled when the maximum changes, and divided by the sum of the weights",
    )


def _gauge(forward: Forward, references: tuple[str, ...]) -> Gauge:
    """The gauge with these references; Unmovable if the program has no such kinds."""
    kinds = {c: Kind(zero=True, sums=True) for c in forward.carried}
    kinds |= {r: Kind("add", {r: 1.0}) for r in references}
    for again in (False, True):
        typing = Typing(forward, kinds)
        typing.run(forward.body)
        ends = {c: typing.kinds[out] for c, out in forward.carried.items()}
        names = _renaming(references, ends)
        after = {c: _named(kind, names) for c, kind in ends.items()}
        if again and not all(after[c].like(kinds[c]) for c in after):
            raise Unmovable
        kinds = {c: replace(k, sums=c not in references, constant=None) for c, k in after.items()}
    _check_outputs(forward, kinds, typing)
    moving = {v: _moves_with(k) for v, k in typing.kinds.items()}
    fixed = {v: names[symbol] for v, symbol in moving.items() if symbol in names}
    fixed |= {r: r for r in references}
    return Gauge(references, kinds, _norms(forward, references, kinds), fixed)


def _moves_with(kind: Kind) -> str | None:
    """The reference that a value moves with by the same amount, if there is one."""
    names = [n for n, x in kind.by.items() if abs(x - 1) < 1e-9]
    return names[0] if kind.moves == "add" and len(kind.by) == len(names) == 1 else None


def _renaming(references: tuple[str, ...], ends: Mapping[str, Kind]) -> dict[str, str]:
    """The reference that each symbol at the end of the body stands for."""
    found = {}
    for reference in references:
        symbol = _moves_with(ends[reference])
        if symbol is None:
            raise Unmovable
        found[symbol] = reference
    return found


def _named(kind: Kind, names: Mapping[str, str]) -> Kind:
    """The kind with its symbols renamed; Unmovable if one has no name."""
    if kind.by.keys() - names.keys():
        raise Unmovable
    return replace(kind, by={names[n]: x for n, x in kind.by.items()})


def _check_outputs(forward: Forward, kinds: Mapping[str, Kind], body: Typing) -> None:
    """Unmovable if an output moves with a reference."""
    done = {out: replace(kinds[c], sums=False) for c, out in forward.carried.items()}
    typing = Typing(forward, {**body.kinds, **done})
    typing.run(forward.epilogue)
    if not all(typing.kinds[s.value].invariant for s in forward.stores):
        raise Unmovable


def _norms(
    forward: Forward, references: tuple[str, ...], kinds: Mapping[str, Kind]
) -> dict[str, tuple[str, float]]:
    """The row sum of each reference's weights, and its factor; Unmovable if there is none."""
    found = {}
    for reference in references:
        for name, kind in kinds.items():
            row = forward.axes[name] == (QUERY,)
            if row and kind.moves == "mul" and kind.by.keys() == {reference}:
                found[reference] = (name, -kind.by[reference])
        if reference not in found:
            raise Unmovable
    return found
