"""The printer: a table of rules, IR node to a few lines of CuTe C++."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from flashwright.check.program import Buffer, Key, Program
from flashwright.gpu import Gpu
from flashwright.lang import nodes as tl
from flashwright.lang.format import format_expr
from flashwright.lang.nodes import Param
from flashwright.lower import ir
from flashwright.lower.atoms import CPP_TYPES, atom, generation
from flashwright.lower.code import Code, integer, real
from flashwright.lower.names import cpp, tile_name
from flashwright.lower.print_compute import compute

Lines = Iterator[str]
WIDTH = 100


@dataclass(frozen=True)
class Printed:
    """The source, and for each of its lines the lines of TL it comes from."""

    source: str
    lines: tuple[ir.Lines | None, ...]


class Printer:
    """Prints one kernel."""

    def __init__(
        self, program: Program, gpu: Gpu, kernel: ir.Kernel, offsets: dict[Key, int], blocks: int
    ) -> None:
        self.program = program
        self.gpu = gpu
        self.kernel = kernel
        self.offsets = offsets
        self.blocks = blocks
        self.asynchronous = generation(gpu) >= 80
        self.text: list[str] = []
        self.lines: list[ir.Lines | None] = []
        self.operand: set[Key] = set()

    def print(self) -> Printed:
        """The whole file."""
        self._write(self._head())
        self._write(self._params())
        self._kernel()
        return Printed("\n".join(self.text) + "\n", tuple(self.lines))

    def _write(self, lines: Lines, source: ir.Lines | None = None, indent: int = 0) -> None:
        for line in lines:
            for part in wrapped("  " * indent + line) if line else [""]:
                self.text.append(part)
                self.lines.append(source if line else None)

    # --- before the kernel ----------------------------------------------------------------

    def _head(self) -> Lines:
        yield f"// Attention for {self.gpu.title} ({self.gpu.arch}), translated by Flashwright."
        yield "// Each block stands under the line of TL that it implements: `//  12 | Copy ...`."
        yield "#include <fw/attention.cuh>"
        yield ""
        for stmt in tl.statements(self.program.tree.body):
            if isinstance(stmt, Param):
                yield self._param(stmt)
        if "Warps" not in self.program.params:
            yield f"constexpr int Warps = {self.program.warps};"
        yield "constexpr int Threads = 32 * Warps;"
        dtypes = sorted(_gemm_dtypes(self.program, self.kernel.body))
        for dtype in dtypes:
            yield f"using {self._mma(dtype)} = {atom(self.gpu, dtype, None)};"
        yield ""

    def _param(self, stmt: Param) -> str:
        value = self.program.params[stmt.name.id]
        name = cpp(stmt.name.id)
        note = "" if isinstance(stmt.value, tl.Num) else f"  // {format_expr(stmt.value)}"
        if isinstance(value, int):
            return f"constexpr int {name} = {value};{note}"
        return f"constexpr float {name} = {real(float(value))};{note}"

    def _mma(self, dtype: str) -> str:
        one = len(_gemm_dtypes(self.program, self.kernel.body)) == 1
        return "Mma" if one else f"Mma_{dtype}"

    def _params(self) -> Lines:
        yield "struct Params {"
        for tensor in self.program.tensors.values():
            sizes = ", ".join(format_expr(a.size) for a in tensor.axes)
            kind = f"fw::Global<{CPP_TYPES[tensor.dtype]}, {len(tensor.axes)}>"
            yield f"  {kind} {cpp(tensor.name)};  // ({sizes})"
        yield f"  int {', '.join(map(cpp, self.program.dims))};"
        yield "};"
        yield ""

    # --- the kernel -----------------------------------------------------------------------

    def _kernel(self) -> None:
        bounds = "Threads" if self.blocks <= 1 else f"Threads, {self.blocks}"
        self._write(
            iter(
                [
                    f'extern "C" __global__ void __launch_bounds__({bounds})',
                    "    attention(__grid_constant__ Params const p) {",
                ]
            )
        )
        text, lines = self.text, self.lines
        self.text, self.lines = [""], [None]
        self._body(self.kernel.body, 1)
        body, self.text, self.lines = (self.text, self.lines), text, lines
        code = "\n".join(line for line in body[0] if not line.lstrip().startswith("//"))
        used = set(
            re.findall(r"[A-Za-z_]\w*", code + " ".join(a.low.text for a in self.kernel.grid))
        )
        self._write(self._coordinates(used), _lines(self.program.grid), 1)
        for key, buffer in self.program.buffers.items():
            self._write(self._declare(key, buffer), _lines(buffer.declared), 1)
        for name, wide in (("at", ""), ("wide_at", ", true")):
            if name in used:
                self._write(iter([f"fw::Place<Warps{wide}> const {name};"]), None, 1)
        self.text += body[0]
        self.lines += body[1]
        self._write(iter(["}"]))

    def _coordinates(self, used: set[str]) -> Lines:
        dims = [cpp(d) for d in self.program.dims if cpp(d) in used]
        if dims:
            yield "int const " + ", ".join(f"{d} = p.{d}" for d in dims) + ";"
        for axis, letter in zip(self.kernel.grid, "xyz", strict=False):
            value = f"blockIdx.{letter}"
            note = ""
            if axis.reversed:
                value, note = f"gridDim.{letter} - 1 - {value}", "  // the longest first"
            low = "" if axis.low.text == "0" else f"{axis.low} + "
            yield f"int const {axis.name} = {low}{value};{note}"
        if any(k[1] == "shared" for k in self.program.buffers):
            yield "extern __shared__ __align__(1024) unsigned char shared[];"

    def _declare(self, key: Key, buffer: Buffer) -> Lines:
        name = tile_name(key)
        sizes = [self._size(buffer, i) for i in range(len(buffer.shape))]
        if buffer.space == "shared":
            kind = f"{CPP_TYPES[buffer.dtype]}, {', '.join(sizes)}"
            place = f"shared + {self.offsets[key]}" if self.offsets[key] else "shared"
            yield f"auto const {name} = fw::shared_tile<{kind}>({place});"
            if not self.asynchronous and self._loaded(key):
                yield f"fw::Staged<Threads, decltype({name})> {name}_staged;"
        elif key in self._assigned():
            if len(buffer.shape) == 2:
                yield f"auto {name} = fw::accumulator<{', '.join(sizes)}, Warps>();"
            else:
                more = ", int" if buffer.dtype == "int32" else ""
                if self.kernel.sides.get(key, "rows") == "rows":
                    yield f"auto {name} = fw::row_vector<{sizes[0]}, Warps{more}>();"
                else:
                    yield f"auto {name} = fw::col_vector<{sizes[0]}{more}>();"

    def _loaded(self, key: Key) -> bool:
        return any(isinstance(n, ir.Put) and n.dest == key for n in ir.flat(self.kernel.body))

    def _assigned(self) -> set[Key]:
        """Register tiles that are accumulators or vectors (operands are made where they are)."""
        found: set[Key] = set()
        for node in ir.flat(self.kernel.body):
            match node:
                case ir.Gemm(target):
                    found.add(target)
                case ir.Fill(dest) | ir.Move(_, dest) if dest not in self.kernel.operands:
                    found.add(dest)
                case ir.Compute():
                    found |= {
                        (a.buffer.name, "register") for a in node.assigns if a.buffer is not None
                    }
        return found

    def _size(self, buffer: Buffer, axis: int) -> str:
        declared = buffer.declared
        sizes = declared.shape if not isinstance(declared, tl.Reshape) else None
        expr: Any = sizes[axis] if sizes else None
        expr = expr.size if isinstance(expr, tl.Axis) else expr
        return cpp(expr.id) if isinstance(expr, tl.Name) else str(buffer.shape[axis])

    # --- statements -----------------------------------------------------------------------

    def _body(self, body: tuple[ir.Statement, ...], indent: int) -> None:
        for node in body:
            if node.title:
                if self.text[-1] and not self.text[-1].endswith("{"):
                    self._write(iter([""]))
                self._write(iter([f"// {node.lines[0]:3} | {node.title}"]), node.lines, indent)
            if isinstance(node, ir.Loop):
                head = f"for (int {node.var} = {node.low}; {node.condition}; ++{node.var}) {{"
                self._write(iter(["CUTE_NO_UNROLL", head]), node.lines, indent)
                self._body(node.body, indent + 1)
                self._write(iter(["}"]), node.lines, indent)
            elif isinstance(node, ir.Branch):
                self._branch(node, indent)
            else:
                self._write(RULES[type(node)](self, node), node.lines or None, indent)

    def _branch(self, node: ir.Branch, indent: int) -> None:
        self._write(iter([f"if ({node.condition}) {{"]), node.lines, indent)
        self._body(node.then, indent + 1)
        if node.orelse:
            self._write(iter(["} else {"]), node.lines, indent)
            self._body(node.orelse, indent + 1)
        self._write(iter(["}"]), node.lines, indent)

    def shared(self, key: Key, stage: Code | None) -> str:
        """A shared tile, at one of its stages."""
        return tile_name(key) if stage is None else f"{tile_name(key)}.stage({stage})"

    def window(self, window: ir.Window, kind: str = "tile") -> str:
        """A tile in global memory."""
        start = list(window.start)
        while start and start[-1].text == "0":
            start.pop()
        places = ", ".join(c.text for c in start)
        tensor = f"p.{cpp(window.tensor.name)}"
        if window.offset is not None:
            tensor += f".from({window.offset})"
        return f"{tensor}.{kind}({places})"

    def warps(self, key: Key) -> str:
        """The template arguments that say how a tile lies."""
        return "Warps, true" if key in self.kernel.wide else "Warps"

    def operand_name(self, key: Key) -> str:
        """The left operand of a GEMM in registers."""
        return tile_name(key) if key in self.kernel.operands else f"{tile_name(key)}_operand"


def wrapped(line: str) -> list[str]:
    """A line of at most 100 characters, or its parts: broken at commas of the outermost call."""
    if len(line) <= WIDTH or line.lstrip().startswith("//"):
        return [line]
    indent = len(line) - len(line.lstrip()) + 4
    depth, cuts = 0, []
    for place, letter in enumerate(line):
        depth += (letter in "(<{") - (letter in ")}" or (letter == ">" and line[place - 1] != "-"))
        if letter == "," and depth <= 1 and place < WIDTH - 1:
            cuts.append(place + 1)
    if not cuts:
        return [line]
    return [line[: cuts[-1]], *wrapped(" " * indent + line[cuts[-1] :].lstrip())]


# --- the rules --------------------------------------------------------------------------------


def _define(printer: Printer, node: ir.Define) -> Lines:
    note = f"  // {node.note}" if node.note else ""
    yield f"{node.value.type} const {node.name} = {node.value};{note}"


def _load(printer: Printer, node: ir.Load) -> Lines:
    dest = printer.shared(node.dest, node.stage)
    source = printer.window(node.window)
    rows = node.window.rows or integer(printer.program.buffers[node.dest].shape[0])
    if node.window.cols is not None:
        yield f"fw::copy_elements<Threads>({dest}, {source}, {rows}, {node.window.cols});"
    elif printer.asynchronous:
        yield f"fw::copy_async<Threads>({dest}, {source}, {rows});"
    else:
        yield f"{tile_name(node.dest)}_staged.load({source}, {rows});"


def _put(printer: Printer, node: ir.Put) -> Lines:
    yield f"{tile_name(node.dest)}_staged.store({printer.shared(node.dest, node.stage)});"


def _fill(printer: Printer, node: ir.Fill) -> Lines:
    buffer = printer.program.buffers[node.dest]
    name, window = tile_name(node.dest), node.window
    rows = window.rows or integer(buffer.shape[0])
    if len(buffer.shape) == 2:
        cols = window.cols or integer(buffer.shape[1])
        yield f"fw::load<{printer.warps(node.dest)}>({name}, {printer.window(window)}, {rows}, {cols});"
    else:
        side = "rows" if printer.kernel.sides.get(node.dest, "rows") == "rows" else "cols"
        yield f"fw::load_{side}<Warps>({name}, {printer.window(window, 'line')}, {rows});"


def _store(printer: Printer, node: ir.Store) -> Lines:
    buffer = printer.program.buffers[node.source]
    name, window = tile_name(node.source), node.window
    rows = window.rows or integer(buffer.shape[0])
    guard = f"if (p.{cpp(window.tensor.name)}.data != nullptr) " if node.optional else ""
    if len(buffer.shape) == 1:
        side = "rows" if printer.kernel.sides.get(node.source, "rows") == "rows" else "cols"
        target = printer.window(window, "line")
        yield f"{guard}fw::store_{side}<Warps>({target}, {name}, {rows});"
    elif whole_lines(window, buffer):
        yield f"{guard}fw::store<{printer.warps(node.source)}>({printer.window(window)}, {name}, {rows});"
    else:
        cols = window.cols or integer(buffer.shape[1])
        target = printer.window(window)
        yield f"{guard}fw::store_elements<{printer.warps(node.source)}>({target}, {name}, {rows}, {cols});"


def whole_lines(window: ir.Window, buffer: Buffer) -> bool:
    """Whether a result can be stored 16 bytes at a time."""
    return (
        window.cols is None
        and window.tensor.dtype in ("fp16", "bf16")
        and buffer.shape[1] % 32 == 0
    )


def _move(printer: Printer, node: ir.Move) -> Lines:
    if node.dest[1] == "shared":
        dest = printer.shared(node.dest, node.stage)
        yield f"fw::to_shared<{printer.warps(node.source)}>({dest}, {tile_name(node.source)});"
    elif node.dest in printer.kernel.operands:
        source = printer.shared(node.source, node.stage)
        yield f"auto const {tile_name(node.dest)} = fw::load_operand<Warps>({source});"
    else:
        source = printer.shared(node.source, node.stage)
        yield f"fw::from_shared<{printer.warps(node.dest)}>({tile_name(node.dest)}, {source});"


def _gemm(printer: Printer, node: ir.Gemm) -> Lines:
    target = tile_name(node.target)
    if node.fresh:
        yield f"cute::clear({target});"
    if node.left[1] == "shared":
        left = f"fw::left<Warps>({printer.shared(node.left, node.left_stage)})"
    else:
        left = printer.operand_name(node.left)
    right = printer.shared(node.right, node.right_stage)
    side = "right_transposed" if node.transposed else "right"
    mma = printer._mma(printer.program.buffers[node.right].dtype)
    yield f"fw::gemm<{mma}>({target}, {left}, fw::{side}({right}));"


def _operand(printer: Printer, node: ir.Operand) -> Lines:
    name = f"{tile_name(node.target)}_operand"
    yield f"auto const {name} = fw::operand<{CPP_TYPES[node.dtype]}>({tile_name(node.source)});"


def _compute(printer: Printer, node: ir.Compute) -> Lines:
    wide = any(
        a.buffer and (a.buffer.name, "register") in printer.kernel.wide for a in node.assigns
    )
    yield from compute(node, "wide_at" if wide else "at")


RULES: dict[type, Callable[[Printer, Any], Lines]] = {
    ir.Define: _define,
    ir.Load: _load,
    ir.Put: _put,
    ir.Commit: lambda printer, node: iter(["fw::commit();"]),
    ir.Wait: lambda printer, node: iter([f"fw::wait<{node.left}>();"]),
    ir.Barrier: lambda printer, node: iter(["__syncthreads();"]),
    ir.Fill: _fill,
    ir.Store: _store,
    ir.Move: _move,
    ir.Gemm: _gemm,
    ir.Operand: _operand,
    ir.Compute: _compute,
}


def _lines(stmt: tl.Statement) -> ir.Lines:
    return stmt.span.line, stmt.span.end_line


def _gemm_dtypes(program: Program, body: tuple[ir.Statement, ...]) -> set[str]:
    return {program.buffers[n.right].dtype for n in ir.flat(body) if isinstance(n, ir.Gemm)}
