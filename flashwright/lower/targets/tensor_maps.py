"""What TMA loads: the tiles, and the tensors that they are filled from."""

from __future__ import annotations

from flashwright.check.program import Key, Program
from flashwright.lower import ir


def loaded_tiles(program: Program, kernel: ir.Kernel) -> dict[tuple[Key, str], ir.Window]:
    """A window of each tensor that is copied to a shared tile, by tile and tensor: in the order in
    which the buffers are declared. Each has a tensor map of its own."""
    found: dict[tuple[Key, str], ir.Window] = {}
    for node in ir.flat(kernel.body):
        if isinstance(node, ir.Load):
            found.setdefault((node.dest, node.window.tensor.name), node.window)
    order = {key: number for number, key in enumerate(program.buffers)}
    return dict(sorted(found.items(), key=lambda item: order[item[0][0]]))
