"""Elementwise work on a shared tile that goes back to shared memory, a few elements at a time.

`Copy V from shared to register`, `Compute V * Gate and get new V`, `Copy V from register to shared`
would hold the whole tile in registers between the two copies. Where nothing else uses the tile in
registers, the three are one statement, which loads, computes and stores a few elements at a time.
So are the two copies alone, if they convert a tile of 8-bit elements to one of 16-bit elements.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace

from flashwright.lower import ir
from flashwright.lower.element import TILE, Leaf, Reduce, element, leaves, variable
from flashwright.lower.names import tile_name
from flashwright.lower.passes.effects import effects
from flashwright.lower.term import Position
from flashwright.program.conversions import converted_tiles
from flashwright.program.program import Key, Program
from flashwright.program.vocabulary import DTYPES


def fuse_staging(body: tuple[ir.Statement, ...], program: Program) -> tuple[ir.Statement, ...]:
    """Every such group of statements as one."""
    pairs = {k for k, b in program.buffers.items() if DTYPES[b.dtype] == 2 and len(b.shape) == 2}
    return _Fusion(program, body, pairs, converted_tiles(program)).run(body)


def fuse_conversions(
    program: Program, body: tuple[ir.Statement, ...]
) -> tuple[Program, tuple[ir.Statement, ...]]:
    """Every conversion as one statement, and the program without the tiles in registers that this
    leaves unused."""
    fused = _Fusion(program, body, frozenset(), converted_tiles(program)).run(body)
    unused = {(n.buffer.name, n.buffer.space) for n in ir.flat(fused) if isinstance(n, ir.Restage)}
    if not unused:
        return program, body
    buffers = {key: buffer for key, buffer in program.buffers.items() if key not in unused}
    return replace(program, buffers=buffers), fused


@dataclass(frozen=True)
class _Fusion:
    """What may become one statement: work between two tiles of `pairs`, and conversions."""

    program: Program
    whole: tuple[ir.Statement, ...]
    pairs: Set[Key]
    converted: Set[Key]

    def run(self, body: Sequence[ir.Statement]) -> tuple[ir.Statement, ...]:
        """The body with each group of statements as one."""
        touched = [name for node in ir.flat(self.whole) for name in _register_tiles(node)]
        return self._fused(body, touched)

    def _fused(self, body: Sequence[ir.Statement], touched: list[str]) -> tuple[ir.Statement, ...]:
        out: list[ir.Statement] = []
        for node in body:
            if isinstance(node, ir.Loop):
                node = replace(node, body=self._fused(node.body, touched))
            elif isinstance(node, ir.Branch):
                then, orelse = (self._fused(part, touched) for part in (node.then, node.orelse))
                node = replace(node, then=then, orelse=orelse)
            out.append(node)
            one = _together(out[-3], out[-2], out[-1], touched) if len(out) >= 3 else None
            if one and one.source in self.pairs and one.dest in self.pairs:
                out[-3:] = [one]
            converted = self._conversion(out[-2], out[-1]) if len(out) >= 2 else None
            if converted:
                out[-2:] = [converted]
        return tuple(out)

    def _conversion(self, load: ir.Statement, store: ir.Statement) -> ir.Restage | None:
        match load, store:
            case (
                ir.Move(source, held, operand=False),
                ir.Move(again, dest),
            ) if held == again and held in self.converted:
                same = element(tile_name(held), TILE)
                buffer = self.program.buffers[held]
                return ir.Restage(source, dest, buffer, same, same, origin=load.origin)
        return None


def _register_tiles(node: ir.Statement) -> set[str]:
    """The register tiles that a statement itself touches."""
    if isinstance(node, (ir.Loop, ir.Branch)):
        return set()
    return {r for r in effects(node).all if isinstance(r, str)}


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
