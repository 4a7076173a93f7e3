"""What the GPU multiplies and copies with: MMA atoms, and where the tiles lie in shared memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set

from flashwright.gpu import Gpu
from flashwright.lang.nodes import Span
from flashwright.lower import ir
from flashwright.lower.element import Leaf, variable
from flashwright.lower.frontend.scalars import refused
from flashwright.lower.names import tile_name
from flashwright.program.conversions import converted_tiles
from flashwright.program.program import Buffer, Key, Program
from flashwright.program.vocabulary import DTYPES

CPP_TYPES = {
    "fp16": "fw::fp16",
    "bf16": "fw::bf16",
    "e4m3": "fw::e4m3",
    "e5m2": "fw::e5m2",
    "fp32": "float",
    "int32": "int",
    "int8": "fw::int8",
}

ATOMS = {
    (75, "fp16"): "SM75_16x8x8_F32F16F16F32_TN",
    (80, "fp16"): "SM80_16x8x16_F32F16F16F32_TN",
    (80, "bf16"): "SM80_16x8x16_F32BF16BF16F32_TN",
    (89, "e4m3"): "SM89_16x8x32_F32E4M3E4M3F32_TN",
    (89, "e5m2"): "SM89_16x8x32_F32E5M2E5M2F32_TN",
}

ALIGNMENT = 1024  # the largest swizzle atom: 8 rows of 128 bytes


def atom(gpu: Gpu, dtype: str, span: Span) -> str:
    """The newest MMA atom of the GPU for an element type."""
    found = [since for since, taken in ATOMS if taken == dtype and since <= gpu.capability]
    if not found:
        raise refused(f"no mma.sync for {dtype} on {gpu.title}", span)
    return f"cute::{ATOMS[max(found), dtype]}"


def shared_layout(program: Program, stages: dict[Key, int]) -> tuple[dict[Key, int], int]:
    """The offset of each shared tile, and the bytes in all."""
    offsets: dict[Key, int] = {}
    size = 0
    for key, buffer in program.buffers.items():
        if buffer.space != "shared":
            continue
        _check(buffer)
        offsets[key] = size
        size += -(-buffer.bytes * stages[key] // ALIGNMENT) * ALIGNMENT
    return offsets, size


def check_registers(
    program: Program, sides: Mapping[Key, ir.Side], split: Set[Key], why: str
) -> None:
    """Rows are dealt to the warps 16 at a time, columns to the threads of a row 8 at a time; the
    columns of tiles in `split` to warpgroups before that. Tiles that are converted a few elements
    at a time are in no registers. `why` there is no wgmma, if not."""
    warps, passing = program.warps, converted_tiles(program)
    for key, buffer in program.buffers.items():
        if buffer.space != "register" or key in passing:
            continue
        by_rows, by_columns = (64, 8 * (warps // 4)) if key in split else (16 * warps, 8)
        named = f"{by_rows}" if key in split else f"16 * Warps = {by_rows}"
        if len(buffer.shape) == 2:
            rows, columns = buffer.shape
            whole = rows % by_rows == 0 and columns % by_columns == 0
            text = f"a register tile of {rows} rows and {columns} columns for {warps} warps"
            hint = f"rows go by {named}, columns by {by_columns}"
        else:
            whole = buffer.shape[0] % (by_rows if sides[key] == "rows" else by_columns) == 0
            text = f"a vector of {buffer.shape[0]} along the {sides[key]}"
            hint = f"along rows it goes by {named}, along columns by {by_columns}"
        if not whole:
            raise refused(text, buffer.declared.span, f"{hint}{why and f' ({why})'}")


def _check(buffer: Buffer) -> None:
    span = buffer.declared.span
    if len(buffer.shape) != 2:
        return
    rows, cols = buffer.shape
    width = cols * (buffer.bytes // (rows * cols))
    if rows % 8 or width % 32:
        text = f"a tile of {rows} rows of {width} bytes: rows go by 8, bytes by 32"
        raise refused(text, span)


def _bytes(program: Program, key: Key) -> int:
    return DTYPES[program.buffers[key].dtype]


def wide_tiles(body: tuple[ir.Statement, ...], program: Program) -> frozenset[Key]:
    """Tiles whose columns lie as a product with 8-bit columns leaves them: the products themselves,
    and whatever is computed with them."""
    nodes = list(ir.flat(body))
    gemms = [n for n in nodes if isinstance(n, ir.Gemm)]
    wide = {n.target for n in gemms if _leaves_wide(program, n)}
    if not wide:
        return frozenset()
    together = [_columns(xs, program) for xs in ir.combined(body)]
    while more := {key for keys in together if keys & wide for key in keys} - wide:
        wide |= more
    narrow = {n.target for n in gemms if not _leaves_wide(program, n)}
    narrow |= {n.source for n in nodes if isinstance(n, ir.Operand)}
    narrow |= {k for k in wide if len(program.buffers[k].shape) == 1}
    for key in sorted(wide & narrow):
        span, hint = program.buffers[key].declared.span, "Copy it through shared memory"
        text = f"the columns of `{key[0]}` lie otherwise than those of the 8-bit product it is"
        raise refused(f"{text} computed with", span, hint)
    return frozenset(wide)


def _leaves_wide(program: Program, node: ir.Gemm) -> bool:
    return not node.transposed and _bytes(program, node.right) == 1


def _columns(elements: Iterable[Leaf], program: Program) -> set[Key]:
    """The tiles, and vectors along columns, among elements that are combined."""
    named = {variable(x) for x in elements if "n" in x.axes}
    return {k for k in program.buffers if k[1] == "register" and tile_name(k) in named}
