"""Elementwise work on a shared tile that goes back to shared memory, a few elements at a time.

`Copy V from shared to register`, `Compute V * Gate and get new V`, `Copy V from register to shared`
would hold the whole tile in registers between the two copies. Where nothing else uses the tile in
registers, the three are one statement, which loads, computes and stores a few elements at a time.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import replace

from flashwright.lower import ir
from flashwright.lower.element import TILE, Leaf, Reduce, leaves, variable
from flashwright.lower.names import tile_name
from flashwright.lower.passes.effects import effects
from flashwright.lower.term import Position
from flashwright.program.program import Key, Program
from flashwright.program.vocabulary import DTYPES


def fuse_staging(body: tuple[ir.Statement, ...], program: Program) -> tuple[ir.Statement, ...]:
    """Every such group of statements as one, for tiles of 16-bit elements."""
    touched = [name for node in ir.flat(body) for name in _register_tiles(node)]
    pairs = {k for k, b in program.buffers.items() if DTYPES[b.dtype] == 2 and len(b.shape) == 2}
    return _fused(body, touched, pairs)


def _register_tiles(node: ir.Statement) -> set[str]:
    """The register tiles that a statement itself touches."""
    if isinstance(node, (ir.Loop, ir.Branch)):
        return set()
    return {r for r in effects(node).all if isinstance(r, str)}


def _fused(
    body: Sequence[ir.Statement], touched: list[str], pairs: Set[Key]
) -> tuple[ir.Statement, ...]:
    out: list[ir.Statement] = []
    for node in body:
        if isinstance(node, ir.Loop):
            node = replace(node, body=_fused(node.body, touched, pairs))
        elif isinstance(node, ir.Branch):
            then, orelse = (_fused(part, touched, pairs) for part in (node.then, node.orelse))
            node = replace(node, then=then, orelse=orelse)
        out.append(node)
        one = _together(out[-3], out[-2], out[-1], touched) if len(out) >= 3 else None
        if one and one.source in pairs and one.dest in pairs:
            out[-3:] = [one]
    return tuple(out)


def _together(
    load: ir.Statement, work: ir.Statement, store: ir.Statement, touched: list[str]
) -> ir.Restage | None:
    match load, work, store:
        case (
            ir.Move(source, held, operand=False),
            ir.Compute(assigns=(ir.Assign(target, value, buffer),)),
            ir.Move(again, dest),
        ) if source[1] == dest[1] == "shared" and held == again and buffer is not None:
            name = tile_name(held)
            own = [leaf for leaf in leaves(value) if leaf.axes == TILE]
            alone = touched.count(name) == 3 and variable(target) == name
            plain = all(leaf == target for leaf in own) and not _reduces(value)
            placed = any(isinstance(leaf.term, Position) for leaf in leaves(value))
            if alone and plain and not placed and work.unless is None:
                return ir.Restage(source, dest, buffer, target, value, origin=load.origin)
    return None


def _reduces(value: object) -> bool:
    if isinstance(value, Reduce):
        return True
    return any(map(_reduces, getattr(value, "args", ()))) if not isinstance(value, Leaf) else False
