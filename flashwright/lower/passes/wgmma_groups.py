"""Asynchronous products: each GEMM is started as a group of its own, and waited for where a
statement needs it.

A statement needs a group if it touches its accumulator, overwrites its left operand in registers,
or gives away a shared tile that it reads. Giving one away can wait: it happens when something else
has waited for the group. Groups end in the order in which they were started, so a
wait for one is a wait for all before it: `wait_group N` leaves the N youngest under way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from flashwright.lower import ir
from flashwright.lower.names import operand_name, tile_name
from flashwright.lower.passes.effects import effects
from flashwright.program.program import Key


@dataclass(frozen=True)
class _Group:
    """A product under way."""

    gemm: ir.Gemm

    def needed_by(self, node: ir.Statement) -> bool:
        if isinstance(node, (ir.Gemm, ir.Await)):  # products follow each other in the tensor cores
            return False
        found, gemm = effects(node), self.gemm
        left = operand_name(gemm.left) if gemm.left[1] == "register" else gemm.left
        older = isinstance(node, ir.Release) and gemm.ahead  # it reads the stage behind that
        given = {left} if older else {gemm.right, left}
        return tile_name(gemm.target) in found.all or bool(found.writes & given)


def asynchronous(body: tuple[ir.Statement, ...], late: bool = False) -> tuple[ir.Statement, ...]:
    """The body with its GEMMs started and waited for. With `late`, what comes from shared memory
    to registers comes when the product that it is used with is done: sooner it takes registers."""
    open: list[_Group] = []
    waiting: list[ir.Release] = []
    out: list[ir.Statement] = []
    for position, node in enumerate(body):
        out += _finish(open, _due(open, *_before(waiting, node)))
        out += _ready(waiting, open)
        if isinstance(node, ir.Release) and _due(open, node):
            if _is_awaited(node, open):
                out += [*_finish(open, _due(open, node)), node]
            else:
                waiting.append(node)
        elif isinstance(node, (ir.Loop, ir.Branch)):
            multiplies = any(isinstance(n, ir.Gemm) for n in ir.flat((node,)))
            out += _finish(open, len(open) if multiplies else _due(open, node))
            out.append(_within(node, late))
        elif isinstance(node, ir.Gemm):
            out += _finish(open, _due(open, node))
            if not _fenced(body[:position], open):
                out.append(ir.Open(_cluster(body[position:], open)))
            out.append(ir.Start(node, origin=node.origin))
            open.append(_Group(node))
        else:
            loads = late and isinstance(node, ir.Move) and node.dest[1] == "register"
            used = body[position + 1 : position + 2] if loads else ()
            out += _finish(open, _due(open, node, *used))
            out += _ready(waiting, open)
            out.append(node)
    return (*out, *_finish(open, len(open)), *waiting)


def _is_awaited(release: ir.Release, open: Sequence[_Group]) -> bool:
    """Whether a younger value of the tile is being multiplied, so that the next one can come only
    when this one is handed back: that is worth a wait."""
    return any(group.gemm.ahead and group.gemm.right == release.key for group in open)


def _before(waiting: Sequence[ir.Release], node: ir.Statement) -> list[ir.Release]:
    """The tiles that have to be handed back before a statement, though products still read them:
    the producer may need them before it fills the tile that the statement waits for."""
    return list(waiting) if isinstance(node, (ir.Loop, ir.Branch, ir.Await)) else []


def _ready(waiting: list[ir.Release], open: Sequence[_Group]) -> list[ir.Statement]:
    """The tiles that no product reads any more, to be handed back now."""
    ready = [release for release in waiting if not _due(open, release)]
    waiting[:] = [release for release in waiting if release not in ready]
    return list(ready)


def _within(node: ir.Loop | ir.Branch, late: bool) -> ir.Statement:
    if isinstance(node, ir.Loop):
        return replace(node, body=asynchronous(node.body, late))
    then, orelse = (asynchronous(part, late) for part in (node.then, node.orelse))
    return replace(node, then=then, orelse=orelse)


def _due(open: Sequence[_Group], *nodes: ir.Statement) -> int:
    """How many of the oldest groups statements have to wait for."""
    needed = (n for n, group in enumerate(open, 1) if any(map(group.needed_by, nodes)))
    return max(needed, default=0)


def _finish(open: list[_Group], count: int) -> list[ir.Statement]:
    """The wait for the oldest groups."""
    if not count:
        return []
    done = [open.pop(0).gemm.target for _ in range(count)]
    still = {group.gemm.target for group in open}
    return [ir.Finish(len(open), tuple(k for k in dict.fromkeys(done) if k not in still))]


def _fenced(before: Sequence[ir.Statement], open: Sequence[_Group]) -> bool:
    """Whether nothing but waits for tiles stands between this product and the one before it."""
    for node in reversed(before):
        if isinstance(node, ir.Gemm):
            return bool(open) and open[-1].gemm is node
        if not isinstance(node, (ir.Await, ir.PingPong)):
            return False
    return False


def _cluster(rest: Sequence[ir.Statement], open: Sequence[_Group]) -> tuple[Key, ...]:
    """The accumulators of the products that follow each other without other work in between."""
    found: dict[Key, None] = {}
    for node in rest:
        if isinstance(node, ir.Gemm):
            found[node.target] = None
        elif not isinstance(node, (ir.Await, ir.PingPong)):
            break
    flying = {group.gemm.target for group in open}
    return tuple(key for key in found if key not in flying)
