"""What a statement reads and writes: the ground of every change of order.

A resource is a register tile, vector or scalar by its name in the kernel, a shared tile by its key,
or ORDER, which keeps statements with effects outside of the thread block's own memory in order.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from flashwright.lower import ir
from flashwright.lower.element import Element, leaves, variable
from flashwright.lower.names import operand_name, tile_name
from flashwright.lower.term import At, Term, Var, walk
from flashwright.program.program import Key

Resource = str | Key
ORDER = "(order)"


@dataclass(frozen=True)
class Effects:
    """The resources that are read, and those that are written."""

    reads: frozenset[Resource] = frozenset()
    writes: frozenset[Resource] = frozenset()

    def __or__(self, other: Effects) -> Effects:
        return Effects(self.reads | other.reads, self.writes | other.writes)

    @property
    def all(self) -> frozenset[Resource]:
        """All resources that are read or written."""
        return self.reads | self.writes

    def without(self, resources: frozenset[Key]) -> Effects:
        """The same without some tiles."""
        return Effects(self.reads - resources, self.writes - resources)

    def conflicts(self, later: Effects) -> bool:
        """Whether something later has to stay behind this."""
        return bool(self.writes & later.all or self.reads & later.writes)


def effects(node: ir.Statement) -> Effects:
    """Of one statement, with all that is inside of it."""
    match node:
        case ir.Compute():
            return _compute(node)
        case ir.Loop(var, _, _, body):
            inside = together(body) | _bounds(node)
            return Effects(inside.reads - {var}, inside.writes - {var})
        case ir.Branch(condition, then, orelse):
            return together((*then, *orelse)) | _reading(condition)
        case ir.Define(name, value):
            return _reading(value) | _writing(name)
        case ir.Gemm():
            target = tile_name(node.target)
            old = [] if node.fresh else [target]
            return Effects(frozenset([register_or_shared(node.left), node.right, *old])) | _writing(
                target
            )
        case ir.Start(gemm):
            return effects(gemm)
        case ir.Operand(target, source):
            return Effects(frozenset([tile_name(source)])) | _writing(operand_name(target))
        case ir.Fill(dest, window):
            return _window(window) | _writing(tile_name(dest))
        case ir.Load(dest):
            return _reading(*(t for w in node.windows for t in w.terms)) | _writing(dest)
        case ir.Store(source, window):
            held: Resource = tile_name(source) if source[1] == "register" else source
            return _window(window) | Effects(frozenset([held])) | _writing(ORDER)
        case ir.Scatter(_, held_leaf, place):
            starts = (t for t in (node.rows, node.cols) if t is not None)
            return _element(held_leaf) | _element(place) | _reading(*starts) | _writing(ORDER)
        case ir.TakeTurn(counters, turn):
            return _window(counters) | _reading(turn) | _writing(ORDER)
        case ir.PassTurn():
            return _writing(ORDER)
        case ir.Move(source, dest):
            read: Resource = tile_name(source) if source[1] == "register" else source
            return Effects(frozenset([read])) | _writing(_moved_to(node, dest))
        case ir.Restage(source, dest, held=held_leaf, value=value):
            found = _element(value) | Effects(frozenset([source])) | _writing(dest)
            return Effects(found.reads - {variable(held_leaf)}, found.writes)
        case ir.Await(key) | ir.Release(key) | ir.Refill(key) | ir.Drain(key) | ir.Transpose(key):
            return _writing(key)
        case ir.Sync(keys):
            return _writing(ORDER, *keys)
        case ir.Exchange(vector):
            return Effects(frozenset([vector])) | _writing(vector, ORDER)
        case ir.PingPong():
            return _writing(ORDER)
    return Effects()


def together(body: Iterable[ir.Statement]) -> Effects:
    """Of statements one after the other."""
    found = Effects()
    for node in body:
        found |= effects(node)
    return found


def exposed(body: Iterable[ir.Statement]) -> Effects:
    """What statements may read of the values from before them, and what they surely write."""
    reads: frozenset[Resource] = frozenset()
    writes: frozenset[Resource] = frozenset()
    for node in body:
        match node:
            case ir.Loop():
                inside = exposed(node.body)
                found = Effects(inside.reads | _bounds(node).reads)
            case ir.Branch():
                then, orelse = exposed(node.then), exposed(node.orelse)
                own = then.reads | orelse.reads | _reading(node.condition).reads
                found = Effects(own, then.writes & orelse.writes)
            case _:
                found = effects(node)
        reads |= found.reads - writes
        writes |= found.writes
    return Effects(reads, writes)


def live_before(body: Iterable[ir.Statement], behind: frozenset[Resource]) -> frozenset[Resource]:
    """The resources whose values are still needed before statements, given those needed behind."""
    found = exposed(body)
    return found.reads | (behind - found.writes)


def assign_effects(node: ir.Compute, assign: ir.Assign) -> Effects:
    """Of one assignment of a statement, its names local to the row included."""
    found = _element(assign.value) | _writing(variable(assign.target))
    return found | _reading(*(t for t in (node.rows, node.cols, node.unless) if t is not None))


def register_or_shared(left: Key) -> Resource:
    """What a GEMM reads as its left operand."""
    return operand_name(left) if left[1] == "register" else left


def _moved_to(node: ir.Move, dest: Key) -> Resource:
    if dest[1] != "register":
        return dest
    return operand_name(dest) if node.operand else tile_name(dest)


def _compute(node: ir.Compute) -> Effects:
    found = _reading(*(t for t in (node.rows, node.cols, node.unless) if t is not None))
    local = {variable(a.target) for a in node.assigns if a.buffer is None and not a.kept}
    for assign in node.assigns:
        found |= assign_effects(node, assign)
    if node.clear is not None:
        found |= _element(node.clear)
    reads = (found.reads - local) | frozenset(node.in_place)
    return Effects(reads, found.writes - local)


def _element(value: Element) -> Effects:
    return _reading(*(leaf.term for leaf in leaves(value)))


def _reading(*terms: Term) -> Effects:
    parts = (part for term in terms for part in walk(term))
    return Effects(frozenset(part.name for part in parts if isinstance(part, (Var, At))))


def _writing(*resources: Resource) -> Effects:
    return Effects(writes=frozenset(resources))


def _bounds(loop: ir.Loop) -> Effects:
    return _reading(loop.low, loop.condition, *(() if loop.where is None else (loop.where,)))


def _window(window: ir.Window) -> Effects:
    return _reading(*window.terms)
