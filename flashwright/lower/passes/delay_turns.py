"""Where warps pass their turn on: not right behind an addition, but when it is likely to be done.

To pass a turn on, a warp waits until its additions have reached memory. In a loop it does so in the
next iteration, while the first GEMMs run that it has to wait for anyway, and behind the last one.
"""

from __future__ import annotations

from dataclasses import replace

from flashwright.lower import ir


def delay_turns(body: tuple[ir.Statement, ...]) -> tuple[ir.Statement, ...]:
    """The statements with the turns of loops passed on one iteration later."""
    out: list[ir.Statement] = []
    for node in body:
        if not isinstance(node, ir.Loop):
            out.append(node)
            continue
        inner = delay_turns(node.body)
        place = _behind_gemms(inner)
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


def _behind_gemms(body: tuple[ir.Statement, ...]) -> int:
    """The place behind the first GEMMs that follow each other; 0 if there are none."""
    gemms = [isinstance(node, ir.Gemm) for node in body]
    if True not in gemms:
        return 0
    first = gemms.index(True)
    return next((n for n in range(first, len(body)) if not gemms[n]), len(body))
