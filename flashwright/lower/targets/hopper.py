"""What wgmma and TMA can do with a program, and what to say where they cannot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from flashwright.gpu import HALF_SWIZZLE, Gpu
from flashwright.lower import ir
from flashwright.lower.passes.fp8_transpose import can_transpose, transposed_tiles
from flashwright.lower.report import NO_TMA, NO_WGMMA, ParamEdit, Report
from flashwright.program.program import Buffer, Key, Program
from flashwright.program.vocabulary import DTYPES

WIDEST = 256  # columns of one wgmma
MOST_GROUPS = 3
MOST_AXES = 5  # of a tensor map
MOST_BOXES = 16  # of a tile in pages: the producer has a register for each
SWIZZLE_ROWS = 8  # the swizzle begins again


@dataclass(frozen=True)
class Copies:
    """The tiles that TMA cannot load, and those of which only the call shows whether it can: their
    rows may not be a multiple of 16 bytes long."""

    helped: frozenset[Key]
    tma_optional: frozenset[Key]


@dataclass(frozen=True)
class _Check:
    """Something that wgmma or TMA needs, and what to say where it is not so."""

    holds: bool
    text: str
    help: str = ""
    edit: ParamEdit | None = None
    shown_by_the_call: bool = False
    """It may hold with what the caller gives."""


def _fitting_warps(program: Program, nodes: list[ir.Statement]) -> int | None:
    """The warps with which all GEMMs have 16 rows for each; None where no number serves all."""
    rows = {program.buffers[n.target].shape[0] for n in nodes if isinstance(n, ir.Gemm)}
    groups, rest = divmod(rows.pop(), 64) if len(rows) == 1 else (0, 0)
    return 4 * groups if 1 <= groups <= MOST_GROUPS and not rest else None


def copies(
    program: Program, gpu: Gpu, body: tuple[ir.Statement, ...], report: Report
) -> Copies | None:
    """Who copies the tiles; None where wgmma cannot be used. Both are reported."""
    nodes = list(ir.flat(body))
    if not any(isinstance(n, ir.Gemm) for n in nodes):
        report.remark(NO_WGMMA, "no wgmma: there is no GEMM", None)
        return None
    ways: dict[str, dict[Key, None]] = {"helped": {}, "tma_optional": {}}
    transposed = transposed_tiles(program, body)
    groups, rest = divmod(program.warps, 4)
    fine = whole = not rest and 1 <= groups <= MOST_GROUPS
    if not whole:
        text = f"no wgmma: {program.warps} warps are not 1 to {MOST_GROUPS} warpgroups of 4"
        wanted = _fitting_warps(program, nodes)
        help = f"let Warps be {wanted}" if wanted else "let Warps be 4, 8 or 12"
        edit = ParamEdit("Warps", wanted) if wanted else None
        report.remark(NO_WGMMA, text, line_of(body, ir.Gemm), help, edit)
    written = {n.dest for n in nodes if isinstance(n, (ir.Move, ir.Restage))}
    mixed = mixed_maps(nodes)
    for node in nodes:
        checks: list[_Check] = []
        if isinstance(node, ir.Load):
            missing = missing_for_tma(node, program.buffers[node.dest], node.dest in transposed)
            if missing is None and node.dest in mixed:
                text = f"`{node.dest[0]}` is loaded with a range and without, by two Copies"
                missing = _Check(False, text, "give one of them a tile of its own: `and get ...`")
            checks = _any_copy(node.dest, written, transposed, missing)
            if missing:
                ways["tma_optional" if missing.shown_by_the_call else "helped"][node.dest] = None
                report_copies(node, missing, report)
        elif isinstance(node, ir.Gemm) and whole:
            checks = [*_by_wgmma(node, program, gpu, transposed)]
        elif isinstance(node, ir.Store) and node.source[1] == "shared":
            own = node.source in written
            checks = [_Check(own, "a tile that comes from global memory is stored from there")]
        if failed := next((c for c in checks if not c.holds), None):
            text = f"no wgmma: {failed.text}"
            report.remark(NO_WGMMA, text, node.origin.lines, failed.help, failed.edit)
            fine = False
    helped = frozenset(ways["helped"])
    return Copies(helped, frozenset(ways["tma_optional"]) - helped) if fine else None


def mixed_maps(nodes: Sequence[ir.Statement]) -> frozenset[Key]:
    """The tiles that some copies load from a range, or from pages, and others do not: a tensor map
    has one form."""
    forms: dict[Key, set[object]] = {}
    for node in (n for n in nodes if isinstance(n, ir.Load)):
        forms.setdefault(node.dest, set()).update(map(_map_form, node.windows))
    return frozenset(key for key, found in forms.items() if len(found) > 1)


def _map_form(window: ir.Window) -> tuple[bool, int | None]:
    """What a tensor map depends on beside its tensor and the tile."""
    in_range = window.last is not None and window.page_rows is None
    return in_range, window.page_rows


def missing_for_tma(node: ir.Load, buffer: Buffer, transposed: bool = False) -> _Check | None:
    """What keeps TMA from a copy for certain, or else what may do so."""
    checks = [c for w in node.windows for c in _by_tma(node.dest, w, buffer) if not c.holds]
    for_certain = bool(node.pieces) or transposed
    certain = (c for c in checks if for_certain or not c.shown_by_the_call)
    found = next(certain, None) or next(iter(checks), None)
    return replace(found, shown_by_the_call=False) if found and for_certain else found


def report_copies(node: ir.Load, missing: _Check, report: Report) -> None:
    """Report that TMA does not load a tile, or not always."""
    others = "helper warps copy the tile"
    if missing.shown_by_the_call:
        text = f"TMA only if the call allows it: {missing.text}; otherwise {others}"
    else:
        text = f"no TMA: {missing.text}; {others}"
    report.remark(NO_TMA, text, node.origin.lines, missing.help, missing.edit)


def line_of(body: tuple[ir.Statement, ...], kind: type) -> ir.Lines | None:
    """The TL lines of the first statement of a kind."""
    return next((n.origin.lines for n in ir.flat(body) if isinstance(n, kind)), None)


def _any_copy(
    dest: Key, written: set[Key], transposed: frozenset[Key], missing: _Check | None
) -> list[_Check]:
    """What a copy to a ring needs, whichever warps do it; `missing` is what keeps TMA from it."""
    return [
        _Check(missing is None or dest not in transposed,
               f"8-bit `{dest[0]}` is transposed on its way,"
               f" and {missing.text if missing else ''}"),
        _Check(dest not in written, f"`{dest[0]}` is loaded, and written by threads as well",
               "give what is computed a tile of its own"),
    ]  # fmt: skip


def _by_tma(dest: Key, window: ir.Window, buffer: Buffer) -> list[_Check]:
    name, axes = dest[0], len(window.coordinates)
    unit = 16 // DTYPES[window.tensor.dtype]
    return [
        _Check(not window.converts, f"`{window.tensor.name}` is {window.tensor.dtype}, `{name}` in"
               f" shared memory {buffer.dtype}",
               f"`Allocate {name} in shared (...) as {window.tensor.dtype}`"),
        _Check(window.offset is None or (window.view is not None and window.last is None),
               f"the offset of `{window.tensor.name}` is no multiple of the view's size",
               "give the tensor axes for batch and head, and coordinates on them"),
        _Check(len(buffer.shape) == 2, f"`{name}` is a vector"),
        _Check(not window.tensor.declared.strided, f"`{window.tensor.name}` is strided"),
        *_in_pages(window, buffer),
        _Check(window.last is None or window.first_row is None,
               f"the tile of `{window.tensor.name}` may begin before its range"),
        _Check(window.cols is None or window.aligned,
               f"the first column of `{name}` may not be a multiple of {unit}"),
        _Check(window.chunked and (window.view is None or _whole_rows(window, unit)),
               f"the rows of `{window.tensor.name}` may not be a multiple of 16 bytes long",
               f"let its last axis be a number, a multiple of {unit}",
               shown_by_the_call=window.aligned and window.offset is None),
        _Check(2 <= axes <= MOST_AXES, f"a tensor map has 2 to {MOST_AXES} axes, not {axes}"),
        _Check(buffer.shape[0] <= 256, f"`{name}` has {buffer.shape[0]} rows, a box at most 256"),
    ]  # fmt: skip


def _in_pages(window: ir.Window, buffer: Buffer) -> list[_Check]:
    """What TMA needs of rows that lie in several pages: boxes of rows that lie in one."""
    if window.pages is None:
        return []
    tile, rows = f"a tile of `{window.tensor.name}`", window.page_rows
    if rows is None:
        hint = "count its coordinate in tiles, from position 0 on" if window.pages.named else ""
        return [_Check(False, f"{tile} may lie in several pages", hint)]
    boxes = buffer.shape[0] // rows
    pages = f"pages of {window.pages.size} cut {tile} into {boxes} boxes of {rows} rows"
    return [
        _Check(rows % SWIZZLE_ROWS == 0, f"{pages}, no multiple of {SWIZZLE_ROWS}"),
        _Check(boxes <= MOST_BOXES, f"{pages}, more than {MOST_BOXES}", "let the page be longer"),
    ]


def _whole_rows(window: ir.Window, unit: int) -> bool:
    """Whether the rows of a contiguous view begin at multiples of 16 bytes."""
    return window.width is not None and window.width % unit == 0


def _by_wgmma(
    gemm: ir.Gemm, program: Program, gpu: Gpu, transposed: frozenset[Key]
) -> list[_Check]:
    target, left, right = (program.buffers[k] for k in (gemm.target, gemm.left, gemm.right))
    rows, columns = target.shape
    depth, size = right.shape[1 if gemm.transposed else 0], DTYPES[right.dtype]
    beside = gpu.beside(rows, program.warps)
    all_rows = 16 * program.warps // beside
    share = 16 if gemm.transposed else HALF_SWIZZLE  # of columns
    wanted = rows // 16 if rows % 64 == 0 and rows // 64 <= MOST_GROUPS else None
    return [
        _Check(size == 2 or (size == 1 and can_transpose(gemm, transposed)),
               f"8-bit operands `{gemm.left[0]}` and `{gemm.right[0]}` lie in different orders"),
        _Check(rows == all_rows, f"`{gemm.target[0]}` has {rows} rows, {program.warps} warps take"
               f" {all_rows}", f"let Warps be {wanted}" if wanted else "",
               ParamEdit("Warps", wanted) if wanted else None),
        _Check(columns % 8 == 0 and columns // beside <= WIDEST,
               f"{columns} columns: wgmma has multiples of 8 up to {WIDEST}"),
        _Check(beside == 1 or (size == 2 and columns % (beside * share) == 0),
               f"{beside} warpgroups cannot share the columns of `{gemm.target[0]}`",
               f"let Warps be {wanted}", ParamEdit("Warps", wanted) if wanted else None),
        _Check(depth * size % 32 == 0, f"a depth of {depth} is no multiple of 32 bytes"),
        _Check(gemm.left[1] == "register" or left.shape[gemm.left_transposed] == rows,
               "the left tile has more rows"),
    ]  # fmt: skip
