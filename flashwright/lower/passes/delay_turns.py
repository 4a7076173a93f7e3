"""Where warps pass their turn on: not right behind an addition, but when it is likely to be done.

To pass a turn on, a warp waits until its additions have reached memory. In a loop it does so in the
next iteration, before it waits for the last of the first GEMMs, and once more behind the loop.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

from flashwright.lower import ir
from flashwright.lower.passes.effects import effects


def delay_turns(body: tuple[ir.Statement, ...]) -> tuple[ir.Statement, ...]:
    """The statements with the turns of loops passed on one iteration later."""
    out: list[ir.Statement] = []
    for node in body:
        if not isinstance(node, ir.Loop):
            out.append(node)
            continue
        inner = delay_turns(node.body)
        place = _before_last_result(inner)
        passed = _delayed(inner, place)
        rest = (n for n in inner[place:] if n not in passed)
        out += [replace(node, body=(*inner[:place], *passed, *rest)), *passed]
    return tuple(out)


def _delayed(body: tuple[ir.Statement, ...], place: int) -> list[ir.PassTurn]:
    """The turns to pass on at a place of the next iteration: a warp that takes several of a tensor
    passes each on before it takes the next."""
    taken = [n.counters.tensor.name for n in body if isinstance(n, ir.TakeTurn)]
    passed = (n for n in body[place:] if isinstance(n, ir.PassTurn))
    return [n for n in passed if place and taken.count(n.counters.name) == 1]


def _before_last_result(body: tuple[ir.Statement, ...]) -> int:
    """The place before the first GEMMs that follow each other are all waited for: where the result
    of the last one is needed, or the next turn is taken. 0 if there are no GEMMs."""
    first = next((n for n, node in enumerate(body) if isinstance(node, ir.Gemm)), len(body))
    run = list(itertools.takewhile(lambda node: isinstance(node, ir.Gemm), body[first:]))
    results = frozenset().union(*(effects(n).writes for n in run[-1:]))
    for place in range(first + len(run), len(body)):
        if isinstance(body[place], ir.TakeTurn) or results & effects(body[place]).all:
            return place
    return 0
