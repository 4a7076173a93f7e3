"""Row sums that a loop adds up are kept in parts, one for each of the four threads of a row, and
are put together once behind the loop instead of in every iteration."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from flashwright.lower import ir
from flashwright.lower.element import Element, Leaf, Op, Reduce, leaves, variable
from flashwright.lower.names import tile_name
from flashwright.program.program import Buffer


def keep_partial_sums(body: tuple[ir.Statement, ...]) -> tuple[ir.Statement, ...]:
    """The top level of a program, or of a branch of it, with its loops' sums kept in parts."""
    out = list(body)
    position = 0
    while position < len(out):
        node = out[position]
        position += 1
        if isinstance(node, ir.Branch):
            then, orelse = map(keep_partial_sums, (node.then, node.orelse))
            out[position - 1] = replace(node, then=then, orelse=orelse)
        if isinstance(node, ir.Loop):
            at = position - 1
            for target, buffer in _sums(node).items():
                start = _start(out[:at], target, buffer)
                if start is None:
                    continue
                out[start] = _started(out[start], target)
                (out[at],) = ir.changed((out[at],), partial(_marked, target=target))
                out.insert(position, _whole(target, buffer, node.origin))
                position += 1
    return tuple(out)


def _whole(target: Leaf, buffer: Buffer, loop: ir.Origin) -> ir.Compute:
    assign = ir.Assign(target, Op("row_sum", (target,)), buffer)
    note = f"In the loop each of the four threads of a row has had its own part of {buffer.name}."
    return ir.Compute(buffer.shape, (assign,), note=note, origin=loop.untitled)


def _assigns(body: tuple[ir.Statement, ...]) -> list[ir.Assign]:
    return [a for node in ir.flat(body) if isinstance(node, ir.Compute) for a in node.assigns]


def _sums(loop: ir.Loop) -> dict[Leaf, Buffer]:
    """The vectors that the loop touches only by adding row sums to them and by rescaling them."""
    assigns = _assigns(loop.body)
    return {
        a.target: a.buffer
        for a in assigns
        if a.buffer is not None
        and len(a.buffer.shape) == 1
        and a.buffer.dtype == "fp32"
        and any(isinstance(x, Reduce) and x.op == "sum" for x in _terms(a.value))
        and all(_keeps(b, a.target) for b in assigns)
        and not any(_copies(n, a.buffer) for n in ir.flat(loop.body))
    }


def _keeps(assign: ir.Assign, target: Leaf) -> bool:
    if assign.target == target:
        return _additive(assign.value, target)
    return not reads(assign.value, target)


def _copies(node: ir.Statement, buffer: Buffer) -> bool:
    """Whether a vector is copied from somewhere or to somewhere."""
    key = (buffer.name, buffer.space)
    match node:
        case ir.Fill(dest):
            return dest == key
        case ir.Store(source):
            return source == key
        case ir.Scatter(_, held, place):
            return tile_name(key) in {variable(x) for x in (held, *leaves(place))}
        case ir.Move(source, dest):
            return key in (source, dest)
    return False


def _terms(x: Element) -> list[Element]:
    return [t for a in x.args for t in _terms(a)] if isinstance(x, Op) and x.op == "+" else [x]


def _additive(x: Element, target: Leaf) -> bool:
    """Whether the value is `target * anything` and row sums, added up."""
    return all(_added(term, target) for term in _terms(x))


def _added(term: Element, target: Leaf) -> bool:
    match term:
        case Leaf():
            return term == target
        case Op("*", (a, b)) if target in (a, b):
            factor = b if a == target else a
            return not reads(factor, target) and not _summed(factor)
        case Reduce("sum", arg):
            return not reads(arg, target) and not _summed(arg)
    return False


def _summed(x: Element) -> bool:
    """Whether an expression needs a whole sum."""
    match x:
        case Op(_, args):
            return any(map(_summed, args))
        case Reduce(op, arg):
            return op == "sum" or _summed(arg)
    return False


def reads(x: Element, target: Leaf) -> bool:
    """Whether an expression uses a tile's or vector's value."""
    match x:
        case Leaf():
            return x == target
        case Op(_, args):
            return any(reads(a, target) for a in args)
        case Reduce(_, arg):
            return reads(arg, target)


def _start(before: list[ir.Statement], target: Leaf, buffer: Buffer) -> int | None:
    """Where the vector gets its first value, if nothing between there and the loop touches it."""
    for position in reversed(range(len(before))):
        node = before[position]
        if any(_copies(n, buffer) for n in ir.flat((node,))):
            return None
        if isinstance(node, (ir.Loop, ir.Branch)):
            if any(a.target == target or reads(a.value, target) for a in _assigns((node,))):
                return None
        elif isinstance(node, ir.Compute):
            if any(reads(a.value, target) for a in node.assigns):
                return None
            if any(a.target == target for a in node.assigns):
                return position
    return None


def _started(node: ir.Statement, target: Leaf) -> ir.Statement:
    assert isinstance(node, ir.Compute)

    def part(value: Element) -> Element:
        zero = isinstance(value, Leaf) and value.value == 0
        return value if zero else Op("row_part", (value,))

    return replace(
        node,
        assigns=tuple(
            replace(a, value=part(a.value)) if a.target == target else a for a in node.assigns
        ),
    )


def _marked(node: ir.Statement, target: Leaf) -> ir.Statement:
    """The statement with the sums of a vector left in parts."""
    if not isinstance(node, ir.Compute):
        return node
    assigns = (replace(a, partial=a.partial or a.target == target) for a in node.assigns)
    return replace(node, assigns=tuple(assigns))
