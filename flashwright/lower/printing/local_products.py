"""Accumulators that are declared inside of a loop.

What opens products names the accumulators before their first value. If one is declared outside, the
compiler keeps the registers of its last value, which nobody reads, until the next iteration.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from flashwright.lower import ir
from flashwright.lower.names import tile_name
from flashwright.lower.passes.effects import effects, exposed
from flashwright.lower.passes.verify import keys
from flashwright.program.program import Key


def local_products(body: tuple[ir.Statement, ...]) -> dict[int, list[Key]]:
    """By the id of a loop, the accumulators that each iteration fills anew, and that nothing
    outside of it uses."""
    every = _uses(ir.flat(body))
    products = {n.gemm.target for n in ir.flat(body) if isinstance(n, ir.Start) and n.gemm.fresh}
    found: dict[int, list[Key]] = {}
    for loop in (n for n in ir.flat(body) if isinstance(n, ir.Loop)):
        inner, carried = _uses(ir.flat(loop.body)), exposed(loop.body).reads
        own = {k for k in products if inner[tile_name(k)] == every[tile_name(k)]}
        found[id(loop)] = sorted(k for k in own if tile_name(k) not in carried)
    return found


def _uses(nodes: Iterable[ir.Statement]) -> Counter[str]:
    """How many statements name a register tile, loops and branches themselves not counted."""
    found: Counter[str] = Counter()
    for node in nodes:
        if not isinstance(node, ir.Loop | ir.Branch):
            touched = {name for name in effects(node).all if isinstance(name, str)}
            found.update(touched | {tile_name(key) for key in keys(node)})
    return found
