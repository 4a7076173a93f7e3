"""Tiles that consumers pass through shared memory in a loop get two stages, where there is room.

With one, consumers meet twice in an iteration: before they overwrite the tile, which others may
still read, and when it has been written. With two they take the other stage each time: whoever
overwrites one has met all others since they have read it. If other products stand between the copy
and its readers, they meet in two steps, with those products between them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from flashwright.gpu import Gpu
from flashwright.lower import ir
from flashwright.lower.names import Names, tile_name
from flashwright.lower.passes.effects import effects
from flashwright.lower.targets.shared_memory import with_two_stages
from flashwright.lower.term import ONE, ZERO, Var, binary
from flashwright.program.program import Key, Program


def double_buffered(
    program: Program, gpu: Gpu, body: tuple[ir.Statement, ...], names: Names
) -> tuple[Program, tuple[ir.Statement, ...]]:
    """The consumers' statements, pipelined already, with two stages for such tiles, and the program
    that has them."""
    keys = passed_in_loops(body)
    roomy = with_two_stages(program, gpu, keys)
    if not keys or roomy is program:
        return program, body
    return roomy, alternating(body, keys, names, program.warps // 4)


def passed_in_loops(body: tuple[ir.Statement, ...]) -> frozenset[Key]:
    """The tiles that only loops write, once in an iteration, and only products behind that, in the
    same iteration, read; no other statement names them, since it would not know the stage."""
    every = Counter(use for node in ir.flat(body) for use in _uses(node))
    others = {key for use, key in every if use == "otherwise"}
    inside: Counter[tuple[str, Key]] = Counter()
    for loop in (n for n in body if isinstance(n, ir.Loop)):
        written: set[Key] = set()
        for node in loop.body:
            uses = list(_uses(node))
            inside.update(u for u in uses if u[0] == "reads" and u[1] in written)
            fresh = {k for use, k in uses if use == "writes"} - written
            inside.update(("writes", k) for k in fresh)
            written |= fresh
    moved = {k for use, k in inside if use == "writes"} - others
    kinds = ("reads", "writes")
    return frozenset(k for k in moved if all(inside[u, k] == every[u, k] for u in kinds))


def _uses(node: ir.Statement) -> Iterator[tuple[str, Key]]:
    """Whether and how a statement itself uses shared tiles."""
    match node:
        case ir.Gemm():
            yield from (("reads", k) for k in {node.left, node.right} if k[1] == "shared")
        case ir.Move(source, dest) if dest[1] == "shared" and source[1] == "register":
            yield "writes", dest
        case ir.Loop() | ir.Branch() | ir.Roles() | ir.Start() | ir.Sync():
            pass  # what is inside of them is a statement of its own
        case _:
            yield from (("otherwise", k) for k in effects(node).all if not isinstance(k, str))


def alternating(
    body: tuple[ir.Statement, ...], keys: frozenset[Key], names: Names, groups: int
) -> tuple[ir.Statement, ...]:
    """The statements with two stages for these tiles, and consumers that meet once for them in an
    iteration, and once behind the loop."""
    out: list[ir.Statement] = []
    for node in body:
        written = sorted(k for k in keys if isinstance(node, ir.Loop) and _writes(node, k))
        if isinstance(node, ir.Loop) and written:
            stages = {key: Var(names.fresh(f"{tile_name(key)}_stage"), "int") for key in written}
            out += [ir.Define(stage.name, ZERO, varies=True) for stage in stages.values()]
            out += [_alternating(node, stages, groups), ir.Sync(tuple(written))]
        else:
            out.append(node)
    return tuple(out)


def _writes(loop: ir.Loop, key: Key) -> bool:
    return any(isinstance(n, ir.Move) and n.dest == key for n in loop.body)


def _alternating(loop: ir.Loop, stages: dict[Key, Var], groups: int) -> ir.Loop:
    inner = ir.changed(loop.body, lambda node: _with_stage(node, stages))
    if len(stages) == 1 and groups > 1:  # each warpgroup has two barriers for one such tile
        inner = _in_two_steps(inner, *stages.items())
    turns = (ir.Define(s.name, binary("-", ONE, s), again=True) for s in stages.values())
    return replace(loop, body=(*inner, *turns))


def _in_two_steps(
    body: tuple[ir.Statement, ...], tile: tuple[Key, Var]
) -> tuple[ir.Statement, ...]:
    """The loop in which warpgroups tell each other that a tile has been written, start the products
    that stand before those that read it, and only then wait for each other."""
    key, stage = tile
    told = next(n for n, s in enumerate(body) if ("writes", key) in _uses(s)) + 1
    reads = next(n for n, s in enumerate(body) if n > told and ("reads", key) in _uses(s))
    between = body[told + 1 : reads]
    match body[told]:
        case ir.Sync(keys=(only,)) as meeting if only == key:  # nobody waits for more there
            if any(isinstance(s, ir.Gemm) for s in between):
                tell = replace(meeting, step="tell", stage=stage)
                return (*body[:told], tell, *between, replace(tell, step="hear"), *body[reads:])
    return body


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
