"""Gradients of tensors that are read by index (a relative position bias): each element of a tile
adds its part to the element that it has read."""

from __future__ import annotations

from flashwright.grad.algebra import ONE, is_value
from flashwright.grad.declare import Scope, Sum
from flashwright.grad.normalise import QUERY, refuse
from flashwright.grad.tiles import Writer
from flashwright.lang import nodes as tl


def note_mixed(scope: Scope) -> None:
    """Note the tensors that are read both in tiles and by index: each kind of gradient has its own
    sum."""
    leaves = (*scope.back.grads, *scope.back.row_grads)
    tiled = {scope.forward.loads[leaf].tensor.name for leaf in leaves if isinstance(leaf, str)}
    for leaf in leaves:
        if isinstance(leaf, tl.Index) and leaf.tensor.id in tiled:
            scope.missing[leaf.tensor.id] = "it is read in tiles and by index"


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
