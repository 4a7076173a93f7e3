"""Warp specialization on Hopper: one thread loads tiles by TMA, consumer warpgroups multiply with
wgmma and compute.

The program is written out twice, once for each side of the rings (rings.py). Where fp8 tiles are
transposed on their way (fp8_transpose.py), it is written out a third time, for the warps doing it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from flashwright.gpu import Gpu
from flashwright.lower import ir
from flashwright.lower.names import Names, ring_name
from flashwright.lower.passes.double_buffer import double_buffered
from flashwright.lower.passes.fills_by_tma import through_rings
from flashwright.lower.passes.fp8_sums import can_step, in_steps, long_sums, with_steps
from flashwright.lower.passes.fp8_transpose import landed, transposed_tiles, transposing
from flashwright.lower.passes.fuse_staging import fuse_staging
from flashwright.lower.passes.integer_maxima import use_integer_maxima
from flashwright.lower.passes.offload_staging import (
    filled_by_helpers,
    for_consumers,
    for_helpers,
    late_sources,
    offloaded,
    sources,
)
from flashwright.lower.passes.prefetch import remark_single_stages
from flashwright.lower.passes.rings import consuming, needed_last, producing
from flashwright.lower.passes.scale_in_exponent import in_exponent
from flashwright.lower.passes.software_pipeline import SoftwarePipeline
from flashwright.lower.passes.split_columns import (
    exchanged,
    rescaled_where_needed,
    shared_operands,
)
from flashwright.lower.passes.vectors_in_place import vectors_in_place
from flashwright.lower.passes.verify import Verifier
from flashwright.lower.passes.wgmma_groups import asynchronous
from flashwright.lower.report import (
    NO_PING_PONG,
    NO_WGMMA,
    NOT_PERSISTENT,
    ParamEdit,
    Report,
    param_lines,
)
from flashwright.lower.targets.hopper import copies, line_of
from flashwright.lower.targets.shared_memory import (
    BARRIERS,
    has_room,
    with_landing_tiles,
    with_two_stages,
)
from flashwright.lower.term import ZERO, RingStage, Term
from flashwright.program.program import Key, Program
from flashwright.program.vocabulary import DTYPES


def specialize_warps(
    program: Program,
    gpu: Gpu,
    body: tuple[ir.Statement, ...],
    names: Names,
    report: Report,
    sides: Mapping[Key, ir.Side],
    sparing: bool = False,
    verifier: Verifier | None = None,
    split: frozenset[Key] = frozenset(),
) -> tuple[Program, ir.Roles] | None:
    """The roles, and the program with the tiles that they need besides; None if the program cannot
    use wgmma and TMA, for reasons that the report then has. `sparing` ones need fewer registers;
    of the tiles in `split` each warpgroup has some columns."""
    ways = copies(program, gpu, body, report) if gpu.wgmma else None
    if ways is None:
        return None
    transposed, sums = transposed_tiles(program, body), long_sums(program, body)
    if not can_step(program, sums):
        text = (
            "no wgmma: an fp8 sum wider than 128 columns has no registers for the product of a step"
        )
        wide = (n for n in ir.flat(body) if isinstance(n, ir.Gemm) and n.target in sums)
        report.remark(NO_WGMMA, text, next(wide).origin.lines)
        return None
    more = with_landing_tiles(with_steps(program, sums), gpu, transposed)
    if more is None:
        text = "no wgmma: shared memory has no room to transpose an fp8 tile in"
        report.remark(NO_WGMMA, text, line_of(body, ir.Load))
        return None
    if not has_room(more, gpu):
        text = "no wgmma: shared memory has no room for the barriers of its rings beside the tiles"
        report.remark(NO_WGMMA, text, line_of(body, ir.Load), "fewer stages leave some")
        return None
    whole = shared_operands(more, gpu, body, split, names)
    if whole is None:
        text = "no wgmma: shared memory has no room for a left operand that warpgroups share"
        report.remark(NO_WGMMA, text, line_of(body, ir.Operand), "let BN be smaller")
        return None
    more, body = whole
    body = vectors_in_place(body, sides)
    if not sparing:  # the warps that may have to copy them need registers as well
        more, body, ways = through_rings(more, gpu, body, ways, report)
    helped = ways.helped | ways.tma_optional
    verifier = replace(verifier or Verifier(program, (), on=False), meant=body)
    body = in_exponent(in_steps(more, _trimmed(more, body), sums))
    body = verifier(body, "fp8 sums", more)
    keys = {n.dest for n in ir.flat(body) if isinstance(n, ir.Load)}
    rings = frozenset(keys) - helped - transposed
    body = offloaded(fuse_staging(body, more), rings, more.buffers)
    more = with_two_stages(with_two_stages(more, gpu, filled_by_helpers(body)), gpu, sources(body))
    seen = for_consumers(body)
    remark_single_stages(seen, more.buffers, report)
    more, consumers, late = _consumers(more, gpu, seen, names, report, verifier, bool(split))
    if split:
        consumers = rescaled_where_needed(exchanged(more, gpu, consumers, names))
        verifier.products(consumers, "splitting columns", more)
    elif not sparing:
        consumers = use_integer_maxima(more, gpu, consumers)
        verifier.products(consumers, "integer maxima", more)
    late = {var: late_sources(body, seen, tiles) for var, tiles in late.items()}
    body = ir.changed(body, lambda node: _tma_optional(node, ways.tma_optional))
    produced = _in_need_order(producing(body, keys - ways.helped), late)
    producer = ir.changed(produced, lambda node: landed(node, transposed))
    helping = ir.changed(body, lambda node: _by_helpers(node, transposed, helped))
    filled = transposed | helped | filled_by_helpers(body)
    helpers = for_helpers(helping, filled, lambda part: _in_need_order(part, late))
    helpers = ir.changed(helpers, lambda node: _staged(node, keys, more))
    report.products, report.copies = "wgmma", "TMA" if keys - ways.helped else "three warps"
    report.persistent = program.schedule.persistent
    if not report.persistent:
        text = "the kernel is not persistent: `param Persistent = 0`"
        where = param_lines(program.tree, "Persistent")
        report.remark(NOT_PERSISTENT, text, where, edit=ParamEdit("Persistent"))
    roles = ir.Roles(producer, consumers, helpers)
    verifier.roles(roles, more)
    return more, roles


def _tma_optional(node: ir.Statement, keys: frozenset[Key]) -> ir.Statement:
    """A copy that TMA or helper warps do: the call shows which."""
    if isinstance(node, ir.Load) and node.dest in keys:
        return replace(node, tma_optional=True)
    return node


def _by_helpers(
    node: ir.Statement, transposed: frozenset[Key], helped: frozenset[Key]
) -> ir.Statement:
    """A copy as the helper warps see it."""
    if isinstance(node, ir.Load) and node.dest in transposed:
        return transposing(node)
    if isinstance(node, ir.Load) and node.dest in helped:
        return replace(node, helped=True)
    return node


def _consumers(
    program: Program,
    gpu: Gpu,
    body: tuple[ir.Statement, ...],
    names: Names,
    report: Report,
    verifier: Verifier,
    split: bool,
) -> tuple[Program, tuple[ir.Statement, ...], dict[str, frozenset[Key]]]:
    schedule = program.schedule
    keys = {n.dest for n in ir.flat(body) if isinstance(n, ir.Load)}
    met = _with_syncs(body)
    ping_pong = schedule.ping_pong and program.warps > 4 and not _meet_in_loops(met) and not split
    pipeline = SoftwarePipeline(
        program,
        names,
        report,
        overlap=schedule.overlap,
        ping_pong=ping_pong,
        split=schedule.split_masked,
        exits=not split,
        meeting=split,
    )
    ringed = verifier.consumers(consuming(met, keys), "rings", program)
    found = verifier.consumers(pipeline.run(ringed), "software pipelining", program)
    report.ping_pong = any(isinstance(n, ir.PingPong) for n in ir.flat(found))
    if not report.ping_pong:
        _no_ping_pong(program, met, report, split)
    program, found = double_buffered(program, gpu, found, names)
    staged = ir.changed(found, lambda node: _staged(node, keys, program))
    waited = asynchronous(staged, late=program.warps > 8)
    return program, verifier.products(waited, "wgmma groups", program), pipeline.late


def _meet_in_loops(body: tuple[ir.Statement, ...]) -> bool:
    """Whether warpgroups meet between products of a loop, which leaves no ping-pong."""
    loops = [list(ir.flat(n.body)) for n in ir.flat(body) if isinstance(n, ir.Loop)]
    return any(
        any(isinstance(n, ir.Gemm) for n in inner) and any(isinstance(n, ir.Sync) for n in inner)
        for inner in loops
    )


def _no_ping_pong(
    program: Program, body: tuple[ir.Statement, ...], report: Report, split: bool
) -> None:
    """Report why consumer warpgroups do not alternate between GEMMs and softmax."""
    where, help, edit = line_of(body, ir.Gemm), "", None
    synced = [n.origin.lines for n in ir.flat(body) if isinstance(n, (ir.Move, ir.Restage))]
    if not program.schedule.ping_pong:
        why, where = "`param PingPong = 0`", param_lines(program.tree, "PingPong")
        edit = ParamEdit("PingPong")
    elif program.warps <= 4:
        why = "there is one consumer warpgroup"
        help = "a tile of 128 rows and `param Warps = 8` give two"
    elif split:
        why = "the warpgroups have the same rows, and each some of the columns"
        help = "a tile of 64 rows for each warpgroup gives them rows of their own"
    elif _meet_in_loops(body):
        why, where = "the warpgroups meet at a Copy to shared memory", synced[0]
        help = "Reshape the tile in registers instead"
    elif not report.loops:
        why = "the GEMMs are in no loop"
    else:
        return  # the remark on each loop says so
    report.remark(NO_PING_PONG, f"no ping-pong: {why}", where, help, edit)


def _in_need_order(
    body: tuple[ir.Statement, ...], late: dict[str, frozenset[Key]]
) -> tuple[ir.Statement, ...]:
    """The producer's loops with their copies in the order in which consumers need them."""
    out: list[ir.Statement] = []
    for node in body:
        if isinstance(node, ir.Loop):
            inner = _in_need_order(node.body, late)
            tiles = late.get(node.var, frozenset())
            out.append(replace(node, body=needed_last(inner, tiles)))
        elif isinstance(node, ir.Branch):
            then, orelse = (_in_need_order(part, late) for part in (node.then, node.orelse))
            out.append(replace(node, then=then, orelse=orelse))
        else:
            out.append(node)
    return tuple(out)


def _staged(node: ir.Statement, keys: set[Key], program: Program) -> ir.Statement:
    """A reader of rings, at the stage that is read now."""

    def stage(key: Key, ahead: bool = False) -> Term | None:
        ring = key in keys and program.buffers[key].stages > 1
        return RingStage(ring_name(key), ahead) if ring else None

    if isinstance(node, ir.Gemm):
        left = stage(node.left) or node.left_stage
        right = stage(node.right, node.ahead) or node.right_stage
        return replace(node, left_stage=left, right_stage=right)
    if isinstance(node, (ir.Move, ir.Restage)) and node.source[1] == "shared":
        return replace(node, stage=stage(node.source))
    return node


def _with_syncs(body: tuple[ir.Statement, ...]) -> tuple[ir.Statement, ...]:
    """Consumers meet before they overwrite a shared tile, which others may still read, and when it
    has been written."""
    out: list[ir.Statement] = []
    for node in body:
        if isinstance(node, ir.Loop):
            out.append(replace(node, body=_with_syncs(node.body)))
        elif isinstance(node, ir.Branch):
            then, orelse = _with_syncs(node.then), _with_syncs(node.orelse)
            out.append(replace(node, then=then, orelse=orelse))
        elif isinstance(node, (ir.Move, ir.Restage)) and node.dest[1] == "shared":
            if out and isinstance(met := out[-1], ir.Sync):  # for another tile: once is enough
                out[-1] = replace(met, keys=(*met.keys, node.dest))
            else:
                out.append(ir.Sync((node.dest,)))
            out += [node, ir.Sync((node.dest,), publish=True)]
        else:
            out.append(node)
    return tuple(out)


def ring_offsets(program: Program, kernel: ir.Kernel, begin: int) -> tuple[dict[Key, int], int]:
    """Where the barriers of each tile's ring lie in shared memory, and where they end."""
    offsets: dict[Key, int] = {}
    filled = {n.dest for n in ir.flat(kernel.body) if isinstance(n, ir.Load)}
    filled |= {n.key for n in ir.flat(kernel.body) if isinstance(n, ir.Transpose)}
    filled |= filled_by_helpers(kernel.body)
    for key in (k for k in program.buffers if k in filled):
        offsets[key] = begin
        begin += BARRIERS * program.buffers[key].stages
    return offsets, begin


def _trimmed(program: Program, body: tuple[ir.Statement, ...]) -> tuple[ir.Statement, ...]:
    """Products along columns in which both tiles are wider than their tensors leave out the steps
    of zeros behind the tensors' ends: TMA has filled both tiles up."""
    filled: dict[Key, int] = {}  # columns of each tile that are not always 0
    for node in ir.flat(body):
        if isinstance(node, ir.Load) and len(program.buffers[node.dest].shape) == 2:
            for piece in node.filled(program.buffers[node.dest].shape[1]):
                window, columns = piece.window, piece.width
                ends = window.cols is not None and window.start[-1] == ZERO
                if ends and window.width is not None:
                    columns = min(columns, window.width)
                filled[node.dest] = max(filled.get(node.dest, 0), piece.column + columns)

    def trim(node: ir.Statement) -> ir.Statement:
        if not isinstance(node, ir.Gemm) or not node.transposed or node.left_transposed:
            return node
        if node.left not in filled or node.right not in filled:
            return node
        step = 32 // DTYPES[program.buffers[node.right].dtype]
        depth = -(-max(filled[node.left], filled[node.right]) // step) * step
        whole = depth >= program.buffers[node.right].shape[1]
        return node if whole else replace(node, depth=depth)

    return ir.changed(body, trim)
