"""Gradients of numbers per head (a sink, a slope): parts for each row, and the kernel that sums
them over the sequence and the batch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from flashwright.grad.algebra import ONE, ZERO, call, div, substitute
from flashwright.grad.declare import WARPS, Scope
from flashwright.grad.normalise import QUERY, Forward
from flashwright.lang import nodes as tl
from flashwright.program.program import Tensor

HEADS = tl.Param(tl.Name("BH"), tl.Num("16"), comment="heads per block of a reduction")


@dataclass(frozen=True)
class Parts:
    """The parts of a gradient: the scratch tensor, the length of its rows, and of a tile's."""

    tensor: Tensor
    name: str
    length: tl.Expr
    tile: tl.Expr


def per_head(scope: Scope, leaf: tl.Index) -> bool:
    """Whether an element is a number per head that the loop or the rows use, not both: its gradient
    is a sum over rows. Those of other elements are added by index."""
    tensor, output = scope.program.tensors[leaf.tensor.id], scope.output
    heads = any(c.value == leaf.args[0] for c in output.copy.coords or ())
    single = len(leaf.args) == 1 and tensor.dtype == "fp32" and len(output.tensor.axes) == 4
    both = leaf in scope.back.grads and leaf in scope.back.row_grads
    return single and heads and not both


def declare_parts(scope: Scope, leaf: tl.Index, side: str) -> Parts:
    """The parts of an element's gradient along the queries or the keys, declared."""
    tensor, output = scope.program.tensors[leaf.tensor.id], scope.output.tensor
    length = output.axes[2].size if side == QUERY else scope.key_length
    name = f"d{tensor.name}parts"
    shape = (*output.declared.shape[:2], replace(output.declared.shape[2], size=length))
    scope.globals[name] = tl.Allocate(tl.Name(name), "global", shape, tl.Name("fp32"))
    scope.declare_gradient(tensor)
    return Parts(tensor, name, length, scope.sizes[side])


def kept_along(forward: Forward, expr: tl.Expr, axis: str) -> tl.Expr:
    """The sums in an expression over all axes but this one, instead of all axes."""

    def change(part: tl.Expr) -> tl.Expr | None:
        match part:
            case tl.Call(tl.Name("sum"), (operand, tl.Name(""))):
                along = forward.axes_of(operand) == (axis,)
                return operand if along else call("sum", operand, tl.Name(axis))
        return None

    return substitute(expr, change)


def reduction(scope: Scope, parts: Iterable[Parts]) -> list[tl.Statement]:
    """The kernels that sum the parts, a block for some heads of one batch element."""
    made: list[tl.Statement] = []
    block, batch, step = map(tl.Name, ("block_idx", "batch_idx", "i"))
    turn = batch if scope.deterministic else None
    for item in parts:
        name, rows = tl.Name(f"d{item.tensor.name}"), HEADS.name
        heads, scratch = item.tensor.axes[0], tl.Name(item.name)
        coords = tuple(map(tl.Coord, map(tl.Name, "BHL"), (batch, block, step)))
        rowsum = tl.Call(tl.Name("rowsum"), (scratch,))
        body: tuple[tl.Statement, ...] = (
            tl.Copy(scratch, (rows, item.tile), coords, "global", "register"),
            tl.Compute(None, (rowsum,), mode="accumulate", target=name),
        )
        place = (tl.Coord(tl.Name(heads.label), block),)
        blocks = tl.GridAxis(block, ZERO, div(heads.size, rows))
        made += [
            tl.Comment(f"Reduction: {name.id}, summed over the sequence and the batch.", gap=True),
            tl.Grid((blocks, tl.GridAxis(batch, ZERO, scope.output.tensor.axes[0].size))),
            replace(WARPS, value=ONE),
            tl.Allocate(name, "register", (tl.Axis(None, rows),), tl.Name("fp32")),
            tl.Compute(None, (ZERO,), mode="get", target=name),
            tl.For(step, ZERO, div(item.length, item.tile), body),
            tl.Copy(name, (rows,), place, "register", "global", adds=True, turn=turn),
        ]
    return made
