"""Elementwise work whose results nobody reads is left out.

The front end puts a constant factor off to what reads the tile next, and makes up for it at the end
of a loop, where the tile may be read later. Mostly it is not.
"""

from __future__ import annotations

from dataclasses import replace

from flashwright.lower import ir
from flashwright.lower.passes.effects import Resource, effects, live_before


def without_dead_code(
    body: tuple[ir.Statement, ...], behind: frozenset[Resource] = frozenset()
) -> tuple[ir.Statement, ...]:
    """The statements that are needed, given the resources that are read behind them."""
    kept: list[ir.Statement] = []
    for node in reversed(body):
        match node:
            case ir.Loop():
                again = behind | live_before(node.body, frozenset())
                node = replace(node, body=without_dead_code(node.body, again))
            case ir.Branch():
                then, orelse = (without_dead_code(b, behind) for b in (node.then, node.orelse))
                node = replace(node, then=then, orelse=orelse)
            case ir.Compute() if node.assigns and not effects(node).writes & behind:
                continue
        kept.append(node)
        behind = live_before((node,), behind)
    return tuple(reversed(kept))
