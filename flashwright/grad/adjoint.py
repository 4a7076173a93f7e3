"""Reverse differentiation of steps: the adjoint of each expression, and sums over uses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from flashwright.grad.algebra import (
    ONE,
    ZERO,
    Product,
    Step,
    call,
    div,
    is_value,
    mul,
    neg,
    number,
    per_element,
    split_scalars,
    sub,
    total,
    values_in,
)
from flashwright.grad.gauge import LN2
from flashwright.grad.normalise import Forward, refuse
from flashwright.lang import nodes as tl

Leaf = str | tl.Index
Grads = dict[Leaf, list[tl.Expr]]


@dataclass
class Reverse:
    """Differentiates steps from the last to the first.

    `grads` has the contributions to each value and to each element of a tensor that a step reads;
    `steps` are the steps of the adjoint, in order.
    """

    forward: Forward
    grads: Grads = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    zeros: dict[str, list[tl.Expr]] = field(default_factory=dict)
    _count: dict[str, int] = field(default_factory=dict)

    def run(self, steps: list[Step], seeds: Mapping[str, tl.Expr]) -> None:
        """Differentiate; `seeds` are the adjoints of the results."""
        self._note_zeros(steps)
        for name, seed in seeds.items():
            self.grads.setdefault(name, []).append(seed)
        for step in reversed(steps):
            d = total(self.grads.pop(step.target, []))
            if d != ZERO:
                self._push(step.value, self._named(step.target, d, step.span), step)

    def _named(self, target: str, d: tl.Expr, span: tl.Span) -> tl.Expr:
        """The adjoint of a value under a name of its own, apart from its scalar factors."""
        rest, factor = split_scalars(d)
        if is_value(rest) or not per_element(rest):
            return d
        return mul(tl.Name(self._step(target, rest, span)), factor)

    def _step(self, target: str, value: tl.Expr, span: tl.Span) -> str:
        """The name of a new step for the adjoint of `target`."""
        same = [s.target for s in self.steps if s.value == value]
        if same:
            return same[0]
        base = f"d{target.split('.')[0]}"
        self._count[base] = self._count.get(base, -1) + 1
        name = f"{base}.adjoint{self._count[base]}"
        self.forward.axes[name] = self.forward.axes_of(value)
        self.steps.append(Step(name, value, span))
        return name

    def _push(self, expr: tl.Expr, d: tl.Expr, step: Step) -> None:
        """Add d's part for each value and element in the expression."""
        match expr:
            case tl.Name():
                if is_value(expr):
                    self._leaf(expr.id, d)
            case tl.Index():
                self._leaf(expr, d)
            case tl.Unary("-", operand):
                self._push(operand, neg(d), step)
            case tl.Binary("+", left, right):
                self._push(left, d, step)
                self._push(right, d, step)
            case tl.Binary("-", left, right):
                self._push(left, d, step)
                self._push(right, neg(d), step)
            case tl.Binary("*", left, right):
                self._push(left, mul(d, right), step)
                self._push(right, mul(d, left), step)
            case tl.Binary("/", left, right):
                self._push(left, div(d, right), step)
                if differentiable(right):
                    self._push(right, neg(div(mul(d, self._result(expr, step)), right)), step)
            case tl.Binary("%", left, right):
                self._push(left, d, step)
            case tl.Call(func, args):
                self._call(func.id, args, d, step, self._result(expr, step))

    def _result(self, expr: tl.Expr, step: Step) -> tl.Expr:
        """The value of an expression: the step's name, if it is the whole step."""
        return tl.Name(step.target) if expr is step.value else expr

    def _call(
        self, name: str, args: tuple[tl.Expr, ...], d: tl.Expr, step: Step, y: tl.Expr
    ) -> None:
        """Add d's part for each argument of a function with the value y."""
        x = args[0]
        match name:
            case "gemm":
                self._gemm(args, d, step)
            case "rowsum":
                self._push(x, d, step)
            case "mask":
                hidden = self._zero_where_hidden(d, args[1])
                self._push(x, d if hidden else call("where", args[1], d, ZERO), step)
            case "where":
                self._push(args[1], call("where", x, d, ZERO), step)
                self._push(args[2], call("where", x, ZERO, d), step)
            case "max" | "min" if len(args) == 2:
                self._choice(name, args, d, step)
            case _ if name in ("floor", "ceil") or not any(map(differentiable, args)):
                pass
            case _ if name in _SLOPES:
                slope = _SLOPES[name](x, y)
                first = Product.of(slope).tops[:1]
                self._push(x, mul(slope, d) if any(map(is_value, first)) else mul(d, slope), step)
            case _:
                raise refuse(step.span, f"`{name}` has no gradient here")

    def _gemm(self, args: tuple[tl.Expr, ...], d: tl.Expr, step: Step) -> None:
        """Add the GEMM of d with the other operand to each operand."""
        rest, factor = split_scalars(d)
        for own, other in (args, args[::-1]):
            assert isinstance(own, tl.Name)
            product = call("gemm", rest, other)
            if own.id not in self.forward.loads:
                product = tl.Name(self._step(own.id, product, step.span))
            self._leaf(own.id, mul(product, factor))

    def _zero_where_hidden(self, d: tl.Expr, condition: tl.Expr) -> bool:
        """Whether a factor of d is exactly 0 where a Mask hides: the weight itself."""
        for factor in Product.of(d).tops:
            if is_value(factor):
                inner = [s.value for s in self.steps if s.target == factor.id]
                if condition in self.zeros.get(factor.id, ()):
                    return True
                if any(self._zero_where_hidden(value, condition) for value in inner):
                    return True
        return False

    def _note_zeros(self, steps: list[Step]) -> None:
        """Note the values that are 0 where a Mask hides: exp of a hidden score."""
        hidden: dict[str, list[tl.Expr]] = {}
        for step in steps:
            found = [c for v in values_in(step.value) for c in hidden.get(v, ())]
            match step.value:
                case tl.Call(tl.Name("mask"), (_, condition)):
                    hidden[step.target] = [*found, condition]
                case tl.Call(tl.Name("exp" | "exp2" | "sigmoid")):
                    self.zeros[step.target] = found
                case tl.Call():
                    pass
                case _:
                    hidden[step.target] = found

    def _choice(self, name: str, args: tuple[tl.Expr, ...], d: tl.Expr, step: Step) -> None:
        """Add d to the argument that is taken: at a tie the first one, or the constant."""
        a, b = args
        taken = tl.Binary({"max": ">", "min": "<"}[name] + ("=" if differentiable(b) else ""), a, b)
        self._push(a, call("where", taken, d, ZERO), step)
        self._push(b, call("where", taken, ZERO, d), step)

    def _leaf(self, leaf: Leaf, d: tl.Expr) -> None:
        """Add d to a value or an element, summed over the axes that it lacks. Where each element of
        a tile reads its own element of a tensor, d stays a tile."""
        own = self.forward.axes_of(tl.Name(leaf)) if isinstance(leaf, str) else ()
        by_element = isinstance(leaf, tl.Index) and self.forward.axes_of(leaf)
        if not by_element and set(self.forward.axes_of(d)) - set(own):
            rest, factor = split_scalars(d)
            d = mul(call("sum", rest, tl.Name("|".join(own))), factor)
        self.grads.setdefault(leaf, []).append(d)


def differentiable(expr: tl.Expr) -> bool:
    """Whether an expression has values or elements of tensors that may have gradients."""
    return bool(values_in(expr)) or any(isinstance(e, tl.Index) for e in tl.expressions(expr))


def _sign(x: tl.Expr, y: tl.Expr) -> tl.Expr:
    """The sign of x, 0 at 0."""
    less = call("where", tl.Binary("<", x, ZERO), tl.Unary("-", ONE), ZERO)
    return call("where", tl.Binary(">", x, ZERO), ONE, less)


_SLOPES = {
    "exp": lambda x, y: y,
    "exp2": lambda x, y: mul(y, number(LN2)),
    "log": lambda x, y: div(ONE, x),
    "log2": lambda x, y: div(number(1 / LN2), x),
    "tanh": lambda x, y: sub(ONE, mul(y, y)),
    "sigmoid": lambda x, y: mul(y, sub(ONE, y)),
    "sqrt": lambda x, y: div(tl.Num("0.5"), y),
    "abs": _sign,
}
