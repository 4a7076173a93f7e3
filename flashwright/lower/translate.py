"""The translator, whole: a checked program and a GPU to CuTe C++, its map and its launch plan."""

from __future__ import annotations

from dataclasses import dataclass, replace

from flashwright.gpu import MOST_REGISTERS, REGISTER_UNIT, Gpu
from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.lang.nodes import Copy, statements
from flashwright.lower import ir
from flashwright.lower.frontend.lowering import lower
from flashwright.lower.launch_plan import LaunchPlan
from flashwright.lower.names import Names, reserved
from flashwright.lower.passes.bad_ir import BadIR
from flashwright.lower.passes.dead_code import without_dead_code
from flashwright.lower.passes.delay_turns import delay_turns
from flashwright.lower.passes.early_reads import read_before_loops
from flashwright.lower.passes.fuse_staging import fuse_conversions
from flashwright.lower.passes.partial_sums import keep_partial_sums
from flashwright.lower.passes.place_barriers import Travel, place_barriers
from flashwright.lower.passes.prefetch import run_copies_ahead
from flashwright.lower.passes.row_terms import move_row_terms
from flashwright.lower.passes.specialize_warps import ring_offsets, specialize_warps
from flashwright.lower.passes.split_columns import left_in_registers, split_tiles
from flashwright.lower.passes.verify import Verifier, strict
from flashwright.lower.plan import make_plan, ordered, scheduler_waves, sequences, work_by_data
from flashwright.lower.printing.kernel import Printer, helper_warps, register_counts
from flashwright.lower.report import NOT_AHEAD, UNVERIFIED, Report
from flashwright.lower.source_map import SourceMap, source_map
from flashwright.lower.targets.atoms import check_registers, shared_layout, wide_tiles
from flashwright.lower.targets.shared_memory import epilogue_offset, with_queue
from flashwright.program.program import Key, Program

FULL = 240  # of the 255 registers of a thread: beyond that, fetching ahead makes it spill
REPORT_IT = "the program is right, the translator is not: please report it with the program"
SPARE_REGISTERS = 64  # of a thread, beside its tiles: addresses, operands on their way


@dataclass(frozen=True)
class Translation:
    """A kernel as text, and what belongs to it."""

    source: str
    map: SourceMap
    plan: LaunchPlan
    report: Report | None = None
    """The path that the kernel takes; None where a model wrote it."""


def translate(
    program: Program, gpu: Gpu, sparing: bool = False, blocks: int | None = None
) -> Translation:
    """Translate a program for a GPU; Failed says what cannot be translated, and where.

    A `sparing` kernel needs fewer registers and is a little slower. `blocks` is the most that an
    SM is to hold at once: fewer leave each thread more registers.
    """
    printer, plan, report = prepared(program, gpu, sparing, blocks)
    printed = printer.print()
    return Translation(printed.source, source_map(printed.lines), plan, report)


def prepared(
    program: Program, gpu: Gpu, sparing: bool = False, blocks: int | None = None
) -> tuple[Printer, LaunchPlan, Report]:
    """All that is decided before a line is printed, how the kernel will be launched, and the path
    that it takes.

    A schedule that the verifier refuses, a mistake of ours, gives way to a simpler one: mma.sync
    instead of wgmma, then plain copies instead of asynchronous ones. The report says so.
    """
    mistakes: list[BadIR] = []
    plain = replace(gpu, wgmma=False)
    for simpler in dict.fromkeys((gpu, plain, replace(plain, cp_async=False))):
        report = Report(sparing=sparing)
        for bad in mistakes:
            report.remark(UNVERIFIED, f"a simpler schedule is taken: {bad}", bad.lines, REPORT_IT)
        try:
            return *_prepared(program, simpler, report, blocks), report
        except BadIR as bad:
            if strict():
                raise
            mistakes.append(bad)
    text = f"no schedule keeps the translator's own rules: {mistakes[-1]}"
    raise Failed(Diagnostic("FW811", text, help=REPORT_IT))


def _prepared(
    program: Program, gpu: Gpu, report: Report, most: int | None
) -> tuple[Printer, LaunchPlan]:
    sparing = report.sparing
    report.copies = "cp.async" if gpu.cp_async else "registers"
    kernel = lower(program)
    verifier = Verifier(program, kernel.grid)
    verifier.front_end(kernel.body)
    names = Names((*reserved(program), *ir.defined_names(kernel.body)))
    stored = frozenset(t.name for t in program.outputs)
    early = verifier(read_before_loops(kernel.body, names, stored), "reads before loops")
    kernel = replace(kernel, body=verifier(without_dead_code(early), "dead code"))
    kernel = replace(kernel, body=verifier(delay_turns(kernel.body), "delayed turns"))
    kernel = replace(kernel, body=verifier(move_row_terms(kernel.body), "terms of rows"))
    partial = verifier(keep_partial_sums(kernel.body), "partial sums")
    split = split_tiles(program, gpu, kernel)
    roles = specialize_warps(
        program, gpu, partial, names, report, kernel.sides, sparing, verifier, split
    )
    body: tuple[ir.Statement, ...]
    check_registers(program, kernel.sides, split if roles else frozenset(), report.no_wgmma)
    if roles:
        program, body = roles[0], (roles[1],)
        kernel = replace(kernel, beside=split, operands=left_in_registers(kernel, body))
    else:
        program, fused = fuse_conversions(program, kernel.body)
        written = ir.changed(fused, _sparing) if sparing else fused
        body = schedule(program, gpu, written, report, verifier)
    wide = wide_tiles(body, program)
    kernel = replace(kernel, body=body, grid=ordered(program, kernel.grid), wide=wide)
    if roles:
        waves = scheduler_waves(program, gpu, kernel)
        persistent, helpers = program.schedule.persistent, helper_warps(program, roles[1])
        found = sequences(program) if persistent else None
        by_data = persistent and found is None and waves < 0
        work = work_by_data(kernel, roles[1]) if by_data else None
        kernel = replace(kernel, waves=waves, sequences=found, work=work, helpers=helpers)
    stages: dict[Key, int] = {k: b.stages for k, b in program.buffers.items()}
    offsets, size = shared_layout(program, stages)
    blocks = _blocks(program, gpu, size, most)
    rings: dict[Key, int] = {}
    epilogue: int | None = None
    queue = 0
    if roles:
        rings, size = ring_offsets(program, kernel, size)
        queue = size
        kernel, size = with_queue(program, gpu, kernel, size, report)
        epilogue, size = epilogue_offset(program, gpu, kernel, size)
        blocks = _blocks_of_roles(program, gpu, kernel, size, most)
    report.blocks = blocks
    report.registers, report.dealt = _registers(program, gpu, kernel, blocks)
    printer = Printer(program, gpu, kernel, offsets, blocks, rings, epilogue, queue)
    return printer, make_plan(program, gpu, kernel, size)


def schedule(
    program: Program,
    gpu: Gpu,
    body: tuple[ir.Statement, ...],
    report: Report | None = None,
    verifier: Verifier | None = None,
) -> tuple[ir.Statement, ...]:
    """The same work with copies running ahead, and all that this makes necessary."""
    report = report or Report()
    asynchronous = gpu.cp_async
    stages = max(b.stages for b in program.buffers.values())
    verifier = verifier or Verifier(program, (), body, on=False)
    body = keep_partial_sums(body)
    body = run_copies_ahead(body, program.buffers, stages if asynchronous else 1, report)
    verifier(body, "prefetching")
    travel: Travel = "async" if asynchronous else "ahead"
    if not asynchronous and _held(program) + _travelling(program) + SPARE_REGISTERS > FULL:
        travel = "at once"
        _not_ahead(body, report)
    return verifier.scheduled(place_barriers(body, program.buffers, travel), asynchronous)


def _not_ahead(body: tuple[ir.Statement, ...], report: Report) -> None:
    """Report that tiles are not held in registers on their way to shared memory."""
    loops = [n for n in body if isinstance(n, ir.Loop)]
    load = next((n for lp in loops for n in ir.flat(lp.body) if isinstance(n, ir.Load)), None)
    report.loops = [replace(loop, ahead=0) for loop in report.loops]
    if load is not None:
        text = "copies do not run ahead: a thread has no registers left for tiles on their way"
        help = "smaller tiles or more warps leave some"
        report.remark(NOT_AHEAD, text, load.origin.lines, help)


def _registers(program: Program, gpu: Gpu, kernel: ir.Kernel, blocks: int) -> tuple[int, bool]:
    """The registers that a thread may use, and whether setmaxnreg gives them."""
    if roles := next((n for n in kernel.body if isinstance(n, ir.Roles)), None):
        _, given = register_counts(program, kernel, roles, blocks)
        return (given, True) if given else (MOST_REGISTERS, False)
    share = gpu.registers_per_sm // (32 * program.warps * blocks)
    return min(MOST_REGISTERS, share - share % REGISTER_UNIT), False


def _sparing(node: ir.Statement) -> ir.Statement:
    """A product with few operands in flight."""
    return replace(node, sparing=True) if isinstance(node, ir.Gemm) else node


def _blocks(program: Program, gpu: Gpu, shared: int, most: int | None) -> int:
    """How many blocks an SM should hold at once: what registers and shared memory allow, and
    `most` where it is given."""
    by_registers = gpu.blocks_by_registers(_held(program) + SPARE_REGISTERS, program.warps)
    each = shared + gpu.shared_reserved
    allowed = min(by_registers, gpu.shared_per_sm // each) if each else by_registers
    return max(1, allowed if most is None else min(allowed, most))


def _blocks_of_roles(
    program: Program, gpu: Gpu, kernel: ir.Kernel, shared: int, most: int | None
) -> int:
    """How many blocks an SM should hold at once where warps have roles. A persistent kernel has its
    SM for itself. Of others with one consumer warpgroup there are two, which hide each other's
    latency, if both have room."""
    roles = next(n for n in kernel.body if isinstance(n, ir.Roles))
    if program.schedule.persistent or program.warps != 4 or kernel.helpers != ir.HELPERS:
        return 1
    if most is not None and most < 2:
        return 1
    _, given = register_counts(program, kernel, roles, 2)
    both = 2 * (shared + gpu.shared_reserved) <= gpu.shared_per_sm
    return 2 if both and _held(program) + SPARE_REGISTERS <= given else 1


def _held(program: Program) -> int:
    """Registers of a thread for its tiles; it has a row's value for every eighth row of a warp."""
    threads = 32 * program.warps
    return sum(
        b.bytes // 4 // threads if len(b.shape) == 2 else -(-b.shape[0] // (8 * program.warps))
        for b in program.buffers.values()
        if b.space == "register"
    )


def _travelling(program: Program) -> int:
    """Registers of a thread for the tiles that a loop fetches ahead, where there is no cp.async."""
    copies = [s for f in program.outer_loops for s in statements(f.body) if isinstance(s, Copy)]
    keys = {program.dest(c) for c in copies if c.source == "global" and c.dest == "shared"}
    return sum(program.buffers[k].bytes // 4 // (32 * program.warps) for k in keys)
