"""Flow: run the program on a few small problems without numbers and report what goes wrong.

The problems are chosen from the program's own tile sizes: several blocks with ragged ends, exact
multiples, a single position, more queries than keys, and one long enough for every window in it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from flashwright.lang.diagnostic import Diagnostic, Label
from flashwright.lang.format import format_expr
from flashwright.lang.nodes import Comment, Copy, Name, expressions, statements
from flashwright.program.program import Program, Tensor
from flashwright.program.scalars import NotScalar, evaluate, whole
from flashwright.program.vocabulary import PREDEFINED_DIMS
from flashwright.semantics.machine import GaveUp, Machine
from flashwright.semantics.state import Region
from flashwright.semantics.worlds import (
    OF_SIZES,
    OF_SUMS,
    World,
    deciding,
    equally_long,
    is_length,
    resized,
    worlds,
)

STEPS = 20_000
"""Statements one problem may execute before the check gives up (a 60-line program takes 2,000)."""

THOROUGH = 1
"""Problems that are run under every assumption about the caller's data."""


def check_flow(program: Program, given: Mapping[str, int]) -> Iterator[Diagnostic]:
    """Findings of the first problem that shows any; `given` are dims whose sizes are known."""
    small = list(_different(program, problems(program, given)))
    for number, dims in enumerate((*small, *_stretched(program, small, given))):
        try:
            findings = _on_problem(program, dims, number < THOROUGH)
        except GaveUp:
            if number >= len(small):
                return  # a loop over a stretched length: the small problems ran all of it
            text = f"the check stopped after {STEPS} statements; the rest was not checked"
            yield Diagnostic("FW611", text, program.grid.span)
            return
        except NotScalar as problem:
            yield Diagnostic("FW306", problem.why, problem.culprit.span)
            return
        if findings:
            yield from findings
            return


def _different(program: Program, sized: Iterable[dict[str, int]]) -> Iterator[dict[str, int]]:
    """The problems without those that differ from an earlier one only in sizes that the program
    does not name. What is assumed of the caller's data depends on all sizes."""
    if deciding(program) or program.ranges:
        yield from sized
        return
    parts = (e for stmt in statements(program.tree.body) for e in expressions(stmt))
    named = {e.id for e in parts if isinstance(e, Name)}
    seen = set()
    for dims in sized:
        key = tuple((name, size) for name, size in sorted(dims.items()) if name in named)
        if key not in seen:
            seen.add(key)
            yield dims


def _on_problem(program: Program, dims: dict[str, int], thorough: bool) -> list[Diagnostic]:
    """Findings on one problem that hold for any data of the caller (worlds.py). If not `thorough`,
    stop after the first world that visits all keys and has no findings."""
    step = _tile_size(program, "kv_len")
    lengths = is_length(program)
    doubtful: list[Diagnostic] = []
    right = False
    every = worlds(program, dims, step)
    first = every[0]
    for world in every:
        found = _in_world(program, world)
        if any(d.code not in OF_SIZES for d in found):
            return found
        sure = [d for d in found if d.code in OF_SUMS or (lengths and world.whole)]
        if sure:
            doubtful, first, right = found, world, False
            break
        if found and not doubtful:
            doubtful, first = found, world
        right |= world.whole and not found
        if right and not thorough:
            break
    if right or not doubtful:
        return []
    for world in resized(program, first, step, lambda dim: _tile_size(program, dim) > 1):
        if not _in_world(program, world):
            return []
    return doubtful


def _in_world(program: Program, world: World) -> list[Diagnostic]:
    machine = Machine(program, world.dims, steps=STEPS, world=world)
    machine.run()
    return _causes(list(machine.findings.values())) or list(_written_once(machine))


def _causes(findings: list[Diagnostic]) -> list[Diagnostic]:
    """The findings without consequences of an overwrite: a lost value is also missing from its sum,
    and its replacement is combined with the wrong tile."""
    lost = {d.span for d in findings if d.code == "FW602"}
    if not lost:
        return findings
    kept = [d for d in findings if d.code not in ("FW604", "FW606")]
    return [d for d in kept if d.code != "FW603" or not lost & {w.span for w in d.secondary}]


def problems(program: Program, given: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Small problems that expose mistakes, as sizes of all dims. That of several heads has two
    tiles on each axis, the last one ragged."""
    rows, cols = _tile_size(program, "q_len"), _tile_size(program, "kv_len")
    few = {"batch": 2, "heads": 4, "kv_heads": 2}
    one = {"batch": 1, "heads": 1, "kv_heads": 1}
    others = {d: 3 * _tile_size(program, d) + 2 for d in program.dims}
    others |= {d: 3 * max(rows, cols) + 2 for d in _free(program)}
    lengths = [
        (one, 2 * rows + 1, 3 * cols + 1),
        (few, rows + 1, 2 * cols + 1),
        (one, 2 * rows, 2 * cols),
        (one, 1, 1),
        (one, 2 * rows + 3, max(rows // 2, 1)),
        (one, 1, 2 * cols + 1),
    ]
    reach = _longest_reach(program, cols)
    if reach:
        lengths.append((one, rows + 3, reach + 3 * cols + 1))
    alike = set(equally_long(program))
    two_tiles = {d: size + 1 for d in program.dims if (size := _tile_size(program, d)) > 1}
    for heads, q_len, kv_len in lengths:
        own = {**others, **(two_tiles if heads is few else {}), **given}
        dims = {**own, **heads, "q_len": q_len, "kv_len": kv_len}
        for length, longest in program.longest_ranges.items():
            # all ranges but one are as long as the longest
            if isinstance(length, Name) and length.id != longest:
                less = dims[longest] // 2 if dims["batch"] > 1 and length not in alike else 0
                dims[length.id] = dims["batch"] * dims[longest] - less
        yield dims


def _free(program: Program) -> list[str]:
    """Dims that are no tensor axis, such as the number of tokens behind compressed keys."""
    axes = {a.size for t in program.tensors.values() for a in t.axes}
    return [d for d in program.dims if d not in PREDEFINED_DIMS and Name(d) not in axes]


def _stretched(
    program: Program, small: list[dict[str, int]], given: Mapping[str, int]
) -> Iterator[dict[str, int]]:
    """The first problems with such large free dims that every key may be visible."""
    free = [d for d in _free(program) if d not in given]
    for dims in small[:3] if free else []:
        yield {**dims, **dict.fromkeys(free, 32 * (dims["q_len"] + dims["kv_len"]))}


def _tile_size(program: Program, dim: str) -> int:
    """The largest tile of any Copy on an axis of that length, or of ranges of at most that length
    (1 if there is none)."""
    best = 1
    for stmt in statements(program.tree.body):
        if not isinstance(stmt, Copy) or "global" not in (stmt.source, stmt.dest) or stmt.index:
            continue
        best = max((best, *(size for length, size in program.tiled(stmt) if length == Name(dim))))
    return best


def _longest_reach(program: Program, cols: int) -> int:
    """The largest parameter that could be a window: from 2 to 64 tiles of keys; 0 if none."""
    sizes = [whole(v) or 0 for v in program.params.values()]
    return max((s for s in sizes if 2 * cols < s <= 64 * cols), default=0)


# --- outputs ----------------------------------------------------------------------------------


def _written_once(machine: Machine) -> Iterator[Diagnostic]:
    """FW610 for outputs with an element that is not stored exactly once, or, in place, twice."""
    if not machine.program.outputs:
        body = machine.program.tree.body  # a comment at its end may be the next kernel's
        last = next((s for s in reversed(body) if not isinstance(s, Comment)), body[-1])
        text = "the kernel has no output: no Copy stores to global memory"
        hint = "end with `Copy O (BM, HeadDim) in coordinate [...] from register to global`"
        yield Diagnostic("FW610", text, last.span, help=hint)
    for tensor in machine.program.outputs:
        if tensor.offset is not None or tensor.added:
            continue  # a view: the rest of the memory is unknown here; or it begins at 0
        shape = _shape(tensor, machine)
        stores = [(r, s) for n, r, s in machine.stores if n == tensor.name]
        if tensor.kept:  # data say where, so a place may be beyond the end
            ends = [[begin + size for begin, size in r] for r, _ in stores]
            shape = [max(sizes) for sizes in zip(shape, *ends, strict=True)]
        count = np.zeros(_coarse(shape, [r for r, _ in stores]), dtype=np.int32)
        cuts = _cuts(shape, [r for r, _ in stores])
        for region, _ in stores:
            count[tuple(_slice(r, c) for r, c in zip(region, cuts, strict=True))] += 1
        wrong = count > 1 if tensor.kept else count != 1
        if wrong.any():
            place = np.argwhere(wrong)[0]
            times = int(count[tuple(place)])
            where = ", ".join(
                f"{a.label} = {cut[p]}" for a, cut, p in zip(tensor.axes, cuts, place, strict=True)
            )
            done = "is never written" if times == 0 else f"is written {times} times"
            text = f"`{tensor.name}` at {where} {done}"
            span = stores[0][1].span if stores else tensor.declared.span
            sizes = ", ".join(
                f"{format_expr(a.size)} = {n}" for a, n in zip(tensor.axes, shape, strict=True)
            )
            hint = "the grid and the coordinates of the Copy must cover each element exactly once"
            grid_line = (Label(machine.program.grid.span, "the grid"),)
            yield Diagnostic(
                "FW610", text, span, label=f"with {sizes}", secondary=grid_line, help=hint
            )


def _shape(tensor: Tensor, machine: Machine) -> list[int]:
    env = {**machine.dims, **machine.program.params}
    return [math.ceil(evaluate(a.size, env)) for a in tensor.axes]  # type: ignore[arg-type]


def _cuts(shape: list[int], regions: list[Region]) -> list[list[int]]:
    """Per axis, the positions where a stored region begins or ends."""
    cuts = []
    for axis, size in enumerate(shape):
        edges = {0}
        for region in regions:
            start, length = region[axis]
            edges |= {min(max(e, 0), size) for e in (start, start + length)}
        cuts.append(sorted(e for e in edges if e < size))
    return cuts


def _coarse(shape: list[int], regions: list[Region]) -> tuple[int, ...]:
    return tuple(len(c) for c in _cuts(shape, regions))


def _slice(part: tuple[int, int], cuts: list[int]) -> slice:
    start, length = part
    inside = [i for i, cut in enumerate(cuts) if start <= cut < start + length]
    return slice(inside[0], inside[-1] + 1) if inside else slice(0, 0)
