"""The gradients that the main kernel computes, as GEMMs and sums of its values."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from flashwright.grad.adjoint import Grads, Leaf
from flashwright.grad.algebra import (
    ONE,
    Step,
    call,
    constant,
    mul,
    split_scalars,
    total,
    values_in,
)
from flashwright.grad.declare import FLOATS, Scope
from flashwright.grad.derive import tidy
from flashwright.grad.normalise import KEY, QUERY
from flashwright.lang import nodes as tl
from flashwright.program.program import Tensor


@dataclass(frozen=True)
class Terms:
    """The steps of a main kernel, the terms of each gradient of a load and of an element, all of
    these terms and elements, and the loads whose gradients need tiles with the axes in the other
    order."""

    steps: list[Step]
    loads: dict[str, list[tl.Expr]]
    elements: dict[tl.Index, list[tl.Expr]]
    exprs: list[tl.Expr]
    turned: list[str]


def gradient_terms(scope: Scope, only: Collection[str] = ()) -> Terms:
    """The gradients that TL can express, all or those of some loads; the others are noted as
    missing."""
    steps, grads = list(scope.back.body), _expressible(scope)
    if only:
        grads = {leaf: terms for leaf, terms in grads.items() if leaf in only}
    turned = [v for v in grads if isinstance(v, str) and _needs_turning(scope, v)]
    grads = {leaf: terms for leaf, terms in grads.items() if leaf not in turned}
    loads: dict[str, list[tl.Expr]] = {}
    for leaf, terms in grads.items():
        if isinstance(leaf, str):
            first, *more = {gemm_parts(t)[2] for t in terms}
            plain = not more and constant(first, scope.program.params) is not None
            loads[leaf] = terms if plain else _combined(scope, leaf, terms, steps)
    elements = {leaf: terms for leaf, terms in grads.items() if isinstance(leaf, tl.Index)}
    exprs = [d for ds in (*loads.values(), *elements.values()) for d in ds]
    exprs += elements
    steps = tidy(steps, {v for d in exprs for v in values_in(d)})
    return Terms(steps, loads, elements, exprs, turned)


def _expressible(scope: Scope) -> Grads:
    """The gradients that TL can express."""
    for leaf in scope.back.grads:
        if isinstance(leaf, str) and not scope.turns and _needs_turning(scope, leaf):
            scope.missing[_tensor(scope, leaf).name] = "TL has no sum over the rows of a tile"
    tensors = {leaf: _tensor(scope, leaf) for leaf in scope.back.grads}
    return {
        leaf: terms
        for leaf, terms in scope.back.grads.items()
        if tensors[leaf].name not in scope.missing and tensors[leaf].dtype in FLOATS
    }


def _tensor(scope: Scope, leaf: Leaf) -> Tensor:
    """The tensor of a load or an element."""
    if isinstance(leaf, str):
        return scope.forward.loads[leaf].tensor
    return scope.program.tensors[leaf.tensor.id]


def _needs_turning(scope: Scope, leaf: str) -> bool:
    """Whether a gradient is a sum over the rows of tiles: TL has sums over columns."""
    across = scope.forward.axes[leaf][:1] != scope.pair[:1]
    return across and any(map(_has_sum, scope.back.grads[leaf]))


def _has_sum(term: tl.Expr) -> bool:
    """Whether a term has a sum over an axis."""
    return any(isinstance(e, tl.Call) and e.func.id == "sum" for e in tl.expressions(term))


def _combined(scope: Scope, leaf: str, terms: list[tl.Expr], steps: list[Step]) -> list[tl.Expr]:
    """The GEMMs with the same operand beside the weights as one, whose weights are a step; factors
    that are constants stay apart."""
    parts = [gemm_parts(t) for t in terms]
    if not all(a for a, _, _ in parts):
        return [total(terms)]
    axes = scope.forward.axes
    groups: dict[str, list[tuple[tl.Expr, tl.Expr]]] = {}
    for a, b, factor in parts:
        pair, other = (a, b) if set(axes[a]) == {QUERY, KEY} else (b, a)
        groups.setdefault(other, []).append((tl.Name(pair), factor))
    made: list[tl.Expr] = []
    for other, group in groups.items():
        weights, factor = group[0]
        if len(group) > 1 or constant(factor, scope.program.params) is None:
            steps.append(Step(f"W.{leaf}|{other}", total(mul(w, f) for w, f in group)))
            axes[steps[-1].target] = scope.forward.axes_of(steps[-1].value)
            weights, factor = tl.Name(steps[-1].target), ONE
        made.append(mul(call("gemm", tl.Name(other), weights), factor))
    return made


def common_factor(terms: list[tl.Expr]) -> tl.Expr:
    """The scalar factor of all terms; 1 if they have different ones."""
    factors = {gemm_parts(t)[2] for t in terms}
    return factors.pop() if len(factors) == 1 else ONE


def gemm_parts(term: tl.Expr) -> tuple[str, str, tl.Expr]:
    """The operands of a GEMM and its scalar factors; empty names if a term is no GEMM."""
    product, factor = split_scalars(term)
    match product:
        case tl.Call(tl.Name("gemm"), (tl.Name(a), tl.Name(b))):
            return a, b, factor
    return "", "", factor
