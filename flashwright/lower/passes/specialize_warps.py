"""Hopper's division of labour: one thread loads tiles by TMA, the warpgroups multiply and compute.

The program is written out twice. The loader keeps the copies and what leads to them; the readers
keep everything else, wait for a tile where they first need it, and hand its stage back where they
last do. How often a tile is filled need not be known: both sides count as they go (device/fw/
ring.cuh), so that any loop or branch around a copy will do, as long as it is the same for both.
Where tiles are turned on their way (turned.py), it is written out a third time, for the warps that
do it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, replace

from flashwright.check.program import Buffer, Key, Program
from flashwright.check.vocabulary import DTYPES
from flashwright.gpu import Gpu
from flashwright.lower import ir
from flashwright.lower.names import ring_name
from flashwright.lower.passes.fp8_sums import can_step, in_steps, long_sums, with_steps
from flashwright.lower.passes.fp8_transpose import can_turn, landed, turned_tiles, turning
from flashwright.lower.passes.integer_maxima import by_threes
from flashwright.lower.passes.overlap import overlapped
from flashwright.lower.passes.scale_in_exponent import in_exponent
from flashwright.lower.targets.shared_memory import BARRIERS, with_room
from flashwright.lower.term import RingStage, Term, variables

WIDEST = 256  # columns of one wgmma
MOST_GROUPS = 3
MOST_AXES = 5  # of a tensor map


def divided(
    program: Program, gpu: Gpu, body: tuple[ir.Statement, ...], sparing: bool = False
) -> tuple[Program, ir.Roles] | None:
    """The roles, and the program with the tiles that they need besides; None where it is no program
    for wgmma and TMA. `sparing` ones need fewer registers."""
    if not gpu.wgmma or not _fits(program, body):
        return None
    turned, sums = turned_tiles(program, body), long_sums(program, body)
    if not can_step(program, sums):
        return None
    more = with_room(with_steps(program, sums), gpu, turned)
    if more is None:
        return None
    body = in_exponent(in_steps(program, body, sums))
    keys = {n.dest for n in ir.flat(body) if isinstance(n, ir.Load)}
    loader = ir.changed(_loading(body, keys), lambda node: landed(node, turned))
    turner = _loading(ir.changed(body, turning), turned)
    reading = _reading(more, body, keys)
    if not sparing:
        reading = by_threes(more, gpu, reading)
    return more, ir.Roles(loader, reading, turner)


def _reading(
    program: Program, body: tuple[ir.Statement, ...], keys: set[Key]
) -> tuple[ir.Statement, ...]:
    readers = _Readers(keys, program.buffers)
    reading, schedule = readers.body(body), program.schedule
    if schedule.overlap:
        turns = schedule.ping_pong and program.warps > 4
        reading = overlapped(reading, turns, schedule.apart)
    return reading


def ring_offsets(program: Program, kernel: ir.Kernel, begin: int) -> tuple[dict[Key, int], int]:
    """Where the barriers of each tile's ring lie in shared memory, and where they end."""
    offsets: dict[Key, int] = {}
    filled = {n.dest for n in ir.flat(kernel.body) if isinstance(n, ir.Load)}
    filled |= {n.key for n in ir.flat(kernel.body) if isinstance(n, ir.Transpose)}
    for key in (k for k in program.buffers if k in filled):
        offsets[key] = begin
        begin += BARRIERS * program.buffers[key].stages
    return offsets, begin


# --- what wgmma and TMA can do ----------------------------------------------------------------


def _fits(program: Program, body: tuple[ir.Statement, ...]) -> bool:
    nodes = list(ir.flat(body))
    loads = [n for n in nodes if isinstance(n, ir.Load)]
    gemms = [n for n in nodes if isinstance(n, ir.Gemm)]
    groups, rest = divmod(program.warps, 4)
    turned = turned_tiles(program, body)
    return (
        bool(gemms)
        and not rest
        and 1 <= groups <= MOST_GROUPS
        and len({load.dest for load in loads}) == len(loads)
        and all(_by_tma(load, program) for load in loads)
        and all(_by_wgmma(gemm, program, turned) for gemm in gemms)
        and not any(_otherwise(n) for n in nodes)
    )


def _by_tma(load: ir.Load, program: Program) -> bool:
    window, buffer = load.window, program.buffers[load.dest]
    whole = window.cols is None and window.offset is None and len(buffer.shape) == 2
    return whole and 2 <= len(window.start) <= MOST_AXES and buffer.shape[0] <= 256


def _by_wgmma(gemm: ir.Gemm, program: Program, turned: frozenset[Key]) -> bool:
    target, left, right = (program.buffers[k] for k in (gemm.target, gemm.left, gemm.right))
    rows, columns = target.shape
    depth, size = right.shape[1 if gemm.transposed else 0], DTYPES[right.dtype]
    return (
        (size == 2 or (size == 1 and can_turn(gemm, turned)))
        and gemm.right[1] == "shared"
        and rows == 16 * program.warps
        and columns % 8 == 0
        and columns <= WIDEST
        and depth * size % 32 == 0
        and (gemm.left[1] == "register" or left.shape[0] == rows)
    )


def _otherwise(node: ir.Statement) -> bool:
    """Whether a statement uses shared memory in another way."""
    if isinstance(node, ir.Move):
        return True
    return isinstance(node, ir.Store) and node.source[1] == "shared"


# --- the loader -------------------------------------------------------------------------------


def _loading(body: tuple[ir.Statement, ...], keys: Set[Key]) -> tuple[ir.Statement, ...]:
    """The copies to these tiles, and the loops, branches and names that they need."""
    out: list[ir.Statement] = []
    for node in reversed(body):
        if isinstance(node, ir.Define):
            if node.name in _words(out):
                out.append(node)
        elif not _loads(node) & keys:
            continue
        elif isinstance(node, ir.Loop):
            out.append(replace(node, body=_loading(node.body, keys)))
        elif isinstance(node, ir.Branch):
            then, orelse = (_loading(part, keys) for part in (node.then, node.orelse))
            out.append(replace(node, then=then, orelse=orelse))
        else:
            out.append(node)
    return tuple(reversed(out))


def _words(nodes: Iterable[ir.Statement]) -> set[str]:
    """The names that copies, and what leads to them, speak of."""
    used: list[Term] = []
    for node in ir.flat(tuple(nodes)):
        match node:
            case ir.Load(_, window):
                used += [*window.start]
            case ir.Define(_, value):
                used.append(value)
            case ir.Loop(_, low, condition):
                used += [low, condition]
            case ir.Branch(condition):
                used.append(condition)
    return {name for term in used for name in variables(term)}


def _loads(node: ir.Statement) -> set[Key]:
    nodes = list(ir.flat((node,)))
    copied = {n.dest for n in nodes if isinstance(n, ir.Load)}
    return copied | {n.key for n in nodes if isinstance(n, ir.Transpose)}


# --- the readers ------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Readers:
    """Puts in who waits for what: every tile is waited for and handed back in the body that its
    copy stood in, so that both are done as often as the copy."""

    filled: set[Key]
    buffers: Mapping[Key, Buffer]

    def body(self, body: tuple[ir.Statement, ...]) -> tuple[ir.Statement, ...]:
        before: dict[int, list[ir.Statement]] = {}
        after: dict[int, list[ir.Statement]] = {}
        for position, node in enumerate(body):
            if isinstance(node, ir.Load):
                uses = [n for n in range(position, len(body)) if _reads(body[n], node.dest)]
                first, last = (uses[0], uses[-1]) if uses else (position, position)
                before.setdefault(first, []).append(ir.Await(node.dest, origin=node.origin))
                after.setdefault(last, []).append(ir.Release(node.dest))
        out: list[ir.Statement] = []
        for position, node in enumerate(body):
            out += before.get(position, [])
            if not isinstance(node, ir.Load):
                out.append(self._node(node))
            out += after.get(position, [])
        return tuple(out)

    def _node(self, node: ir.Statement) -> ir.Statement:
        if isinstance(node, ir.Loop):
            return replace(node, body=self.body(node.body))
        if isinstance(node, ir.Branch):
            return replace(node, then=self.body(node.then), orelse=self.body(node.orelse))
        if isinstance(node, ir.Gemm):
            left, right = (self._stage(k) for k in (node.left, node.right))
            return replace(node, left_stage=left, right_stage=right)
        return node

    def _stage(self, key: Key) -> Term | None:
        if key not in self.filled or self.buffers[key].stages == 1:
            return None
        return RingStage(ring_name(key))


def _reads(node: ir.Statement, key: Key) -> bool:
    return any(isinstance(n, ir.Gemm) and key in (n.left, n.right) for n in ir.flat((node,)))
