"""Tiles that consumers pass through shared memory in a loop get two stages, where there is room.

With one, consumers meet twice in an iteration: before they overwrite the tile, which others may
still read, and when it has been written. With two they take the other stage each time: whoever
overwrites one has met all others since they have read it.
"""

from __future__ import annotations

from dataclasses import replace

from flashwright.lower import ir
from flashwright.lower.names import Names, tile_name
from flashwright.lower.term import ONE, ZERO, Var, binary
from flashwright.program.program import Key


def passed_in_loops(body: tuple[ir.Statement, ...]) -> frozenset[Key]:
    """The tiles that are written once, in a loop, and then read by products of the same body."""
    nodes = list(ir.flat(body))
    written = [n.dest for n in nodes if isinstance(n, (ir.Move, ir.Restage))]
    found: set[Key] = set()
    for loop in (n for n in nodes if isinstance(n, ir.Loop)):
        for place, node in enumerate(loop.body):
            if isinstance(node, ir.Move) and node.dest[1] == "shared":
                behind = sum(_reads(n, node.dest) for n in loop.body[place:])
                once = written.count(node.dest) == 1
                if once and behind == sum(_reads(n, node.dest) for n in nodes):
                    found.add(node.dest)
    return frozenset(found)


def _reads(node: ir.Statement, key: Key) -> bool:
    match node:
        case ir.Gemm():
            return key in (node.left, node.right)
        case ir.Move() | ir.Restage() | ir.Store():
            return node.source == key
    return False


def alternating(
    body: tuple[ir.Statement, ...], keys: frozenset[Key], names: Names
) -> tuple[ir.Statement, ...]:
    """The statements with two stages for these tiles, and consumers that meet once for them in an
    iteration, and once behind the loop."""
    stages = {key: Var(names.fresh(f"{tile_name(key)}_stage"), "int") for key in sorted(keys)}
    out: list[ir.Statement] = []
    for node in body:
        written = [k for k in stages if isinstance(node, ir.Loop) and _writes(node, k)]
        if not isinstance(node, ir.Loop) or not written:
            out.append(node)
            continue
        out += [ir.Define(stages[k].name, ZERO, varies=True) for k in written]
        inner = ir.changed(node.body, lambda n: _with_stage(n, stages))
        turns = (
            ir.Define(stages[k].name, binary("-", ONE, stages[k]), again=True) for k in written
        )
        out += [replace(node, body=(*inner, *turns)), ir.Sync(tuple(written))]
    return tuple(out)


def _writes(loop: ir.Loop, key: Key) -> bool:
    return any(isinstance(n, ir.Move) and n.dest == key for n in loop.body)


def _with_stage(node: ir.Statement, stages: dict[Key, Var]) -> ir.Statement | None:
    match node:
        case ir.Sync(keys, publish=False) if set(keys) <= set(stages):
            return None
        case ir.Move(_, dest) if dest in stages:
            return replace(node, stage=stages[dest])
        case ir.Gemm():
            left, right = (stages.get(key) for key in (node.left, node.right))
            return replace(node, left_stage=left, right_stage=right)
    return node
