"""Gradients of tensors that are read by index (a relative position bias): each element of a tile
adds its part to the element that it has read."""

from __future__ import annotations

from flashwright.grad.algebra import ONE, is_value
from flashwright.grad.declare import FLOATS, Scope, Sum
from flashwright.grad.normalise import QUERY, refuse
from flashwright.grad.tiles import Writer
from flashwright.lang import nodes as tl

GRID_AXES = 3
"""The most axes of a grid: one for each axis of the sums that a conversion kernel rounds."""


def note_not_by_index(scope: Scope) -> None:
    """Note the tensors whose elements have gradients that cannot be added by index: those that are
    read in tiles too, whose gradient is another sum, and those that no grid can round."""
    leaves = (*scope.back.grads, *scope.back.row_grads)
    tiled = {scope.forward.loads[leaf].tensor.name for leaf in leaves if isinstance(leaf, str)}
    for leaf in leaves:
        if not isinstance(leaf, tl.Index):
            continue
        tensor = scope.program.tensors[leaf.tensor.id]
        if tensor.name in tiled:
            scope.missing[tensor.name] = "it is read in tiles and by index"
        elif tensor.dtype in FLOATS and tensor.dtype != "fp32" and len(tensor.axes) > GRID_AXES:
            scope.missing[tensor.name] = f"it has more than {GRID_AXES} axes and is not fp32"


def add_by_index(scope: Scope, write: Writer, leaf: tl.Index, parts: tl.Expr) -> None:
    """Append the addition of an element's gradient, in parts that lie as the index does, or are
    sums of rows. Failed with FW908 if additions need an order."""
    tensor = scope.program.tensors[leaf.tensor.id]
    if scope.deterministic:
        text = f"the additions to the gradient of `{tensor.name}`, by index, have no order"
        raise refuse(leaf.tensor.span, text, "derive it without --deterministic")
    scope.declare_gradient(tensor)
    target = f"d{tensor.name}"
    if tensor.dtype != "fp32":
        target += "sum"
        scope.declare(target, tensor, "fp32")
        scope.sums[target] = Sum(tensor, (QUERY,), ONE)  # in tiles as long as those of queries
    held = write.base[_computed(scope, write, leaf, parts)]
    index = tuple(map(write.expr, leaf.args))
    into = tl.Name(target)
    write.body.append(
        tl.Copy(tl.Name(held), None, None, "register", "global", into, adds=True, index=index)
    )


def _computed(scope: Scope, write: Writer, leaf: tl.Index, parts: tl.Expr) -> str:
    """The parts as a value that has a tile."""
    if is_value(parts):
        return parts.id
    value = f"d{leaf.tensor.id}.part"
    scope.forward.axes[value] = scope.forward.axes_of(parts)
    write.choose(value, 0)
    write.compute(value, parts)
    return value
