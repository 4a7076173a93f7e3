"""The backward pass of a program, derived and written as TL."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from flashwright.grad.conversion import conversion
from flashwright.grad.declare import Scope
from flashwright.grad.derive import derive
from flashwright.grad.indexed import note_not_by_index
from flashwright.grad.main_kernel import MainKernel
from flashwright.grad.preprocess import note_missing, preprocess
from flashwright.grad.recompute import recompute
from flashwright.grad.reduce import HEADS, reduction
from flashwright.grad.views import without_views
from flashwright.lang.nodes import Tree
from flashwright.program.program import Program


@dataclass(frozen=True)
class Gradients:
    """A backward pass: its kernels, and the names of the gradients that it computes."""

    tree: Tree
    gradients: tuple[str, ...]
    notes: tuple[str, ...] = ()
    """Gradients that are missing, values that are computed again: a sentence each."""


def backward(
    program: Program,
    of: Collection[str] = (),
    wrt: Collection[str] | None = None,
    deterministic: bool = False,
) -> Gradients:
    """The backward pass of a checked program. Raises Failed with FW908 if it has none.

    It takes the gradient of O, or of each tile if no output is called O, and those of the outputs
    `of` (the log-sum-exp). It gives the gradients of the inputs `wrt`, or of all. A `deterministic`
    one gives the same bits in every run.
    """
    scope = Scope(derive(without_views(program), of, wrt), deterministic)
    note_missing(scope)
    note_not_by_index(scope)
    mains = _main_kernels(scope)
    rows, parts = preprocess(scope)
    parts = [*(part for main in mains for part in main.parts), *parts]
    kernels = [
        *recompute(scope),
        *rows,
        *(stmt for main in mains for stmt in main.statements),
        *conversion(scope),
        *reduction(scope, parts),
    ]
    head = scope.head(kernels, [HEADS] if parts else [])
    return Gradients(Tree((*head, *kernels)), tuple(scope.outputs), tuple(scope.notes))


def _main_kernels(scope: Scope) -> list[MainKernel]:
    """The main kernel, and one with tiles that have the axes in the other order, if gradients need
    sums over both."""
    first = MainKernel(scope)
    if not first.terms.turned:
        return [first]
    scope.pair = scope.pair[::-1]
    return [first, MainKernel(scope, first.terms.turned)]
