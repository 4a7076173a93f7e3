"""Vectors along the columns that a program copies from shared memory to registers are read where
they lie: a thread would need a register for every fourth column, and has none to spare next to
several accumulators. Their stage is then handed back behind what reads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from flashwright.lower import ir
from flashwright.lower.names import tile_name
from flashwright.lower.passes.effects import effects
from flashwright.program.program import Key


def vectors_in_place(
    body: tuple[ir.Statement, ...], sides: Mapping[Key, ir.Side]
) -> tuple[ir.Statement, ...]:
    """The statements, with moves of vectors that only elementwise work behind them reads marked."""
    written = [name for node in ir.flat(body) for name in _written(node)]
    once = {n for n in written if written.count(n) == 1}
    return _marked(body, {k for k, side in sides.items() if side == "columns"}, once)


def _marked(
    body: tuple[ir.Statement, ...], columns: set[Key], once: set[str]
) -> tuple[ir.Statement, ...]:
    out = list(body)
    for position, node in enumerate(body):
        match node:
            case ir.Loop():
                out[position] = replace(node, body=_marked(node.body, columns, once))
            case ir.Branch():
                then, orelse = (_marked(b, columns, once) for b in (node.then, node.orelse))
                out[position] = replace(node, then=then, orelse=orelse)
            case ir.Move(source, dest) if source[1] == "shared" and dest in columns:
                name = tile_name(dest)
                readers = [n for n in range(len(body)) if name in effects(body[n]).reads]
                behind = readers and readers[0] > position and name in once
                if not behind or not all(isinstance(body[n], ir.Compute) for n in readers):
                    continue
                out[position] = replace(node, in_place=True)
                for n in readers:
                    reader = out[n]
                    assert isinstance(reader, ir.Compute)
                    out[n] = replace(reader, in_place=(*reader.in_place, source))
    return tuple(out)


def _written(node: ir.Statement) -> list[str]:
    """The names in registers that a statement itself writes, not what is inside of it."""
    if isinstance(node, ir.Loop | ir.Branch):
        return []
    return [name for name in effects(node).writes if isinstance(name, str)]
