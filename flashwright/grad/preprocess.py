"""The preprocess kernel: what the main kernel needs of each query, and gradients of what only the
epilogue reads."""

from __future__ import annotations

from dataclasses import replace

from flashwright.grad.algebra import ZERO, Step, call, total, values_in
from flashwright.grad.declare import FLOATS, WARPS, Scope, place_names
from flashwright.grad.indexed import add_by_index
from flashwright.grad.normalise import QUERY
from flashwright.grad.reduce import Parts, declare_parts, kept_along, per_head
from flashwright.grad.tiles import Writer
from flashwright.lang import nodes as tl


def preprocess(scope: Scope) -> tuple[list[tl.Statement], list[Parts]]:
    """The kernel, if anything is needed, and the parts of gradients that it writes."""
    partial, parts = _row_parts(scope)
    tiles, indexed = _row_tiles(scope), _indexed(scope)
    steps = [*scope.back.rows, *partial, *(step for step, _ in tiles)]
    if not steps and not indexed:
        return [], parts
    write = Writer(scope)
    used = [*(s.value for s in steps), *indexed, *indexed.values()]
    read = {v for expr in used for v in values_in(expr)} - {s.target for s in steps}
    write.body += [write.load(v, scope.row_copy(v), "register") for v in sorted(read)]
    stored = [*scope.back.scratch, *(s.target for s in partial)]
    write.steps(steps, stored)
    for leaf, value in indexed.items():
        add_by_index(scope, write, leaf, value)
    out = [scope.row_copy(value) for value in stored]
    out += [
        replace(copy, name=tl.Name(write.base[step.target]), target=None) for step, copy in tiles
    ]
    write.body += [replace(copy, source="register", dest="global") for copy in out]
    title = tl.Comment("Preprocess: what the main kernel needs of each query.", gap=True)
    grid = tl.Grid(scope.program.grid.axes)
    return [title, grid, WARPS, *write.allocated.values(), *write.body], parts


def note_missing(scope: Scope) -> None:
    """Note the tensors whose gradients blocks of this kernel would have to add up."""
    grid = {a.name.id for a in scope.program.grid.axes}
    loads = scope.forward.loads
    looped = {loads[leaf].tensor.name for leaf in scope.back.grads if isinstance(leaf, str)}
    for leaf in scope.back.row_grads:
        load = loads[leaf] if isinstance(leaf, str) else None
        if load and (load.tensor.name in looped or not grid <= place_names(load.copy)):
            scope.missing[load.tensor.name] = "several blocks read each of its elements"


def _row_parts(scope: Scope) -> tuple[list[Step], list[Parts]]:
    """The gradients of numbers per head that the epilogue and the first values use."""
    steps, parts = [], []
    for leaf, terms in scope.back.row_grads.items():
        if not isinstance(leaf, tl.Index) or leaf.tensor.id in scope.missing:
            continue
        if per_head(scope, leaf):
            parts.append(declare_parts(scope, leaf, QUERY))
            value = kept_along(scope.forward, total(terms), QUERY)
            steps.append(Step(f"{parts[-1].name}.0", value))
            scope.forward.axes[steps[-1].target] = (QUERY,)
    return steps, parts


def _indexed(scope: Scope) -> dict[tl.Index, tl.Expr]:
    """The gradients of elements that this kernel adds by index, without lets; 0 past the end."""
    made: dict[tl.Index, tl.Expr] = {}
    for leaf, terms in scope.back.row_grads.items():
        if not isinstance(leaf, tl.Index) or leaf.tensor.id in scope.missing:
            continue
        floats = scope.program.tensors[leaf.tensor.id].dtype in FLOATS
        if floats and not per_head(scope, leaf):
            args = tuple(map(scope.forward.spelt_out, leaf.args))
            parts = kept_along(scope.forward, total(terms), QUERY)
            made[tl.Index(leaf.tensor, args)] = call("where", scope.forward.inside, parts, ZERO)
    return made


def _row_tiles(scope: Scope) -> list[tuple[Step, tl.Copy]]:
    """The gradients of tiles that only the epilogue reads (a gate on the output)."""
    made = []
    for leaf, terms in scope.back.row_grads.items():
        if not isinstance(leaf, str):
            continue
        load = scope.forward.loads[leaf]
        if load.tensor.name in scope.missing:
            continue
        step = Step(f"d{load.tensor.name}.0", total(terms))
        scope.forward.axes[step.target] = load.axes
        scope.declare_gradient(load.tensor)
        made.append((step, load.copy))
    return made
