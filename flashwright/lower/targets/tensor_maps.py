"""What TMA loads: columns of tiles, and the tensors that they are filled from."""

from __future__ import annotations

from collections.abc import Iterable

from flashwright.lower import ir
from flashwright.lower.names import MapKey
from flashwright.program.program import Key, Program


def tma_optional_tiles(body: Iterable[ir.Statement]) -> frozenset[Key]:
    """The tiles that come by TMA only where the caller's memory allows it."""
    loads = (n for n in ir.flat(tuple(body)) if isinstance(n, ir.Load))
    return frozenset(n.dest for n in loads if n.tma_optional)


def loaded_pieces(program: Program, kernel: ir.Kernel) -> dict[MapKey, ir.Piece]:
    """What is copied to shared tiles, by tile, column and tensor: in the order in which the buffers
    are declared. Each has a tensor map of its own."""
    found: dict[MapKey, ir.Piece] = {}
    for node in ir.flat(kernel.body):
        if isinstance(node, ir.Load) and not node.helped:
            for piece in node.filled(program.buffers[node.dest].shape[-1]):
                found.setdefault((node.dest, piece.column, piece.window.tensor.name), piece)
    order = {key: number for number, key in enumerate(program.buffers)}
    return dict(sorted(found.items(), key=lambda item: order[item[0][0]]))
