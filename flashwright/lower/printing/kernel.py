"""The printer: the file around the rules, every block of it under the line of TL it comes from."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from flashwright.gpu import Gpu
from flashwright.lang import nodes as tl
from flashwright.lang.format import format_expr
from flashwright.lower import ir
from flashwright.lower.launch_plan import COUNTER
from flashwright.lower.names import (
    EXCHANGE,
    by_tma,
    cpp,
    operand_name,
    place_name,
    ring_name,
    tile_name,
)
from flashwright.lower.passes.fp8_transpose import landing
from flashwright.lower.passes.overlap import kept_vectors
from flashwright.lower.plan import launch_order
from flashwright.lower.printing.cpp import text
from flashwright.lower.printing.local_products import local_products
from flashwright.lower.printing.rules import RULES, Context, Lines
from flashwright.lower.targets.atoms import CPP_TYPES, atom
from flashwright.lower.targets.shared_memory import QUEUE
from flashwright.lower.term import ZERO, real, variables
from flashwright.program.program import Buffer, Key, Program, Tensor
from flashwright.program.vocabulary import DTYPES, SCHEDULE_PARAMS

WIDTH = 100
# Registers of a producer and of a consumer thread, by consumer warpgroups: setmaxnreg.
REGISTERS = {1: (0, 0), 2: (24, 240), 3: (32, 160)}
REGISTERS_WIDE = {1: (0, 0), 2: (32, 232), 3: (32, 160)}  # where a tile is more than 4 boxes,
REGISTERS_PAGED = {1: (0, 0), 2: (72, 216), 3: (32, 160)}  # where its rows lie in pages,
REGISTERS_HELPED = {1: (0, 0), 2: (40, 232), 3: (32, 160)}  # where are helpers or a queue,
REGISTERS_STAGING = {1: (0, 0), 2: (56, 224), 3: (56, 152)}  # and helper warps with more to do
REGISTERS_TWO_HELPING = (128, 240)  # where one warpgroup consumes, and helpers fill two
REGISTERS_OF_TWO_BLOCKS = 256  # of a producer and a consumer thread, two blocks on an SM
LOOSEST = (("?", ":"), ("||",), ("&&",), ("|",), ("&",), ("+", "-"))
BREAKS = re.compile(  # an angle bracket stands right behind a name, a comparison between spaces
    r"(?P<open>[({\[]|(?<=\w)<)|(?P<close>[)}\]]|(?<=\S)>)|(?P<comma>,)|(?P<end>;(?= ))"
    r"| (?P<operator>\?|:|&&?|\|\|?|\+|-) "
)


@dataclass
class Page:
    """Lines of the kernel, and for each the lines of TL it comes from."""

    text: list[str] = field(default_factory=list)
    lines: list[ir.Lines | None] = field(default_factory=list)

    def write(self, lines: Iterable[str], source: ir.Lines | None = None, indent: int = 0) -> None:
        """Append lines, broken where they are too long."""
        for line in lines:
            for part in wrapped("  " * indent + line) if line else [""]:
                self.text.append(part)
                self.lines.append(source if line else None)

    def add(self, other: Page) -> None:
        """Append another page, with its TL lines."""
        self.text += other.text
        self.lines += other.lines

    @property
    def names(self) -> set[str]:
        """All words of the code."""
        code = (re.sub(r"//.*", "", line) for line in self.text)
        return {word for line in code for word in re.findall(r"[A-Za-z_]\w*", line)}

    @property
    def source(self) -> str:
        """The text of the file, with a newline at its end."""
        return "\n".join(self.text) + "\n"


class Printer:
    """Prints a kernel and the file around it."""

    def __init__(
        self,
        program: Program,
        gpu: Gpu,
        kernel: ir.Kernel,
        offsets: dict[Key, int],
        blocks: int,
        rings: dict[Key, int] | None = None,
        epilogue: int | None = None,
        queue: int = 0,
    ) -> None:
        self.program = program
        self.gpu = gpu
        self.kernel = kernel
        self.offsets = offsets
        self.blocks = blocks
        self.rings = rings or {}
        self.queue = queue
        self.context = Context(program, kernel, gpu.cp_async, bool(rings), epilogue)
        self.local: dict[int, list[Key]] = {}  # by loop, the accumulators that it declares

    def print(self) -> Page:
        """The whole file. What is declared depends on what is used, so the kernel comes first."""
        kernel, page = self._kernel(), Page()
        page.write(self._head(kernel.names))
        page.write(self._params())
        page.add(kernel)
        return page

    # --- before the kernel ----------------------------------------------------------------

    def opening(self, shared: int) -> Page:
        """The file up to the kernel's body, with all constants, for a model that writes the
        body."""
        page = Page()
        for line in self._constants({*map(cpp, self.program.params)} - {*SCHEDULE_PARAMS}):
            page.write([line])
            if line.startswith("constexpr int Threads"):
                page.write([f"constexpr int SharedBytes = {shared};"])
        page.write(["", *self._params(), *self._signature()])
        return page

    def _head(self, used: set[str]) -> Lines:
        yield f"// Attention for {self.gpu.title} ({self.gpu.arch}), translated by Flashwright."
        yield "// Each block stands under the line of TL that it implements: `//  12 | Copy ...`."
        yield from self._constants(used)
        yield ""

    def _constants(self, used: set[str]) -> Lines:
        yield f"#include <fw/{'hopper' if self.rings else 'attention'}.cuh>"
        yield ""
        params = [s for s in tl.statements(self.program.tree.body) if isinstance(s, tl.Param)]
        for stmt in params:
            if cpp(stmt.name.id) in {*used, "Warps"}:
                yield self._param(stmt)
        if "Warps" not in self.program.params:
            yield f"constexpr int Warps = {self.program.warps};"
        if self.kernel.beside:
            yield "constexpr int RowWarps = 4;  // along the rows: warpgroups have the same ones,"
            yield "constexpr int Beside = Warps / RowWarps;  // and each a share of the columns"
        if self.rings:
            yield from self._producers()
        else:
            yield "constexpr int Threads = 32 * Warps;"
        for dtype in () if self.rings else self.context.gemm_dtypes:
            yield f"using {self.context.mma(dtype)} = {self._atom(dtype)};"

    def _producers(self) -> Lines:
        if self.kernel.helpers == ir.HELPERS:
            yield "constexpr int Threads = 32 * Warps + 128;  // and the producer warpgroup"
            return
        yield f"constexpr int Helpers = {self.kernel.helpers};  // warps beside the producer"
        yield "constexpr int Threads = 32 * (Warps + 1 + Helpers);"

    def _atom(self, dtype: str) -> str:
        held = next(b for b in self.program.buffers.values() if b.dtype == dtype)
        return atom(self.gpu, dtype, held.declared.span)

    def _param(self, stmt: tl.Param) -> str:
        value = self.program.params[stmt.name.id]
        name = cpp(stmt.name.id)
        note = "" if isinstance(stmt.value, tl.Num) else f"  // {format_expr(stmt.value)}"
        if isinstance(value, int):
            return f"constexpr int {name} = {int(value)};{note}"
        return f"constexpr float {name} = {text(real(float(value)))};{note}"

    def _params(self) -> Lines:
        yield "struct Params {"
        for where, piece in self.context.loaded.items() if self.rings else ():
            buffer = self.program.buffers[where[0]]
            rows, cols = (self._size(buffer, axis) for axis in (0, 1))
            shown = cols if piece.width == buffer.shape[1] else str(piece.width)
            if piece.window.pages is not None:
                rows = str(piece.window.page_rows)
            yield f"  fw::Map {self.context.maps[where]};  // tiles of {rows} x {shown}"
        for tensor in (*self.program.tensors.values(), *self.program.counters.values()):
            sizes = ", ".join(format_expr(a.size) for a in tensor.axes)
            kind = f"fw::Global<{CPP_TYPES[tensor.dtype]}, {len(tensor.axes)}>"
            yield f"  {kind} {cpp(tensor.name)};  // ({sizes})"
        if self.kernel.queued:
            yield f"  int* {COUNTER};  // by thread blocks, beyond their first ones"
        yield f"  int {', '.join(map(cpp, self.program.dims))};"
        yield "};"
        yield ""

    # --- the kernel -----------------------------------------------------------------------

    def _signature(self) -> Lines:
        alone = self.blocks <= 1 and not self.rings  # setmaxnreg wants to be told of one block
        bounds = "Threads" if alone else f"Threads, {self.blocks}"
        yield f'extern "C" __global__ void __launch_bounds__({bounds})'
        yield "    attention(__grid_constant__ Params const p) {"

    def _kernel(self) -> Page:
        body = Page([""], [None])
        self._body(body, self.kernel.body, 1)
        used = body.names.union(*(variables(a.low) for a in self.kernel.grid))
        if self.rings:
            used |= set().union(*(variables(a.count) for a in self.kernel.grid))
        page = Page()
        page.write(self._signature())
        page.write(self._coordinates(used), _lines(self.program.grid), 1)
        for key, buffer in self.program.buffers.items():
            if not self.rings or buffer.space == "shared":
                page.write(self._declare(key, buffer), _lines(buffer.declared), 1)
        for tensor in self._in_pages():
            page.write([self._rows_of_a_page(tensor)], _lines(tensor.declared), 1)
        if self.kernel.queued:
            page.write([f"fw::TileQueue const tile_queue(shared + {self.queue});"], None, 1)
        if self.kernel.work is not None:
            place = f"reinterpret_cast<uint32_t*>(shared + {self.queue + QUEUE})"
            page.write([f"auto* const tile_order = {place};"], None, 1)
        if not self.rings:
            page.write(self._turns(), None, 1)
            self._places(page, used)
        page.add(body)
        page.write(["}"])
        return page

    def _in_pages(self) -> list[Tensor]:
        """The tensors that TMA loads page by page."""
        windows = (p.window for p in self.context.loaded.values()) if self.rings else ()
        found = {w.tensor.name: w.tensor for w in windows if w.page_rows is not None}
        return list(found.values())

    def _rows_of_a_page(self, tensor: Tensor) -> str:
        strides = [f"p.{cpp(tensor.name)}.stride[{axis}]" for axis in (0, len(tensor.axes) - 2)]
        rows = ir.rows_of_a_page(tensor).name
        return f"int const {rows} = static_cast<int>({' / '.join(strides)});  // in rows"

    def _turns(self) -> Lines:
        for tensor in self.program.counters.values():
            yield f"fw::Turns {cpp(tensor.name)};"

    def _places(self, page: Page, used: set[str]) -> None:
        for columns in sorted({b.shape[-1] for b in self.program.buffers.values()} | {0}):
            if (name := place_name(columns)) in used and self.kernel.beside:
                kind = f"fw::Place<RowWarps, false, Beside, {columns}>"
                page.write([f"{kind} const {name};"], None, 1)
        for name, wide in (("at", ""), ("wide_at", ", true")):
            if name in used:
                page.write([f"fw::Place<Warps{wide}> const {name};"], None, 1)

    def _roles(self, page: Page, node: ir.Roles) -> None:
        """The producer warpgroup returns when it is done; the rest of the kernel is the
        consumers'."""
        producer, consumer = register_counts(self.program, self.kernel, node, self.blocks)
        if page.text[-1]:
            page.write([""])
        for key in sorted(self.context.tma_optional):
            given = [f"p.{m}.given()" for (k, *_), m in self.context.maps.items() if k == key]
            page.write([f"bool const {by_tma(key)} = {' && '.join(given)};"], None, 1)
        page.write(["if (threadIdx.x == 0) {"], None, 1)
        page.write([f"{ring_name(key)}.init({self._users(key)});" for key in self.rings], None, 2)
        if self.kernel.queued:
            helpers = f" + {self.context.helpers}" if node.helpers else ""
            page.write([f"tile_queue.init(Warps{helpers});"], None, 2)
        page.write(["}", "fw::rings_ready();", ""], None, 1)
        if self.kernel.work is not None:
            self._sorting(page, self.kernel.work)
        page.write(["if (threadIdx.x >= 32 * Warps) {"], None, 1)
        if producer:
            page.write([f"fw::dealloc_registers<{producer}>();"], None, 2)
        page.write(["if (fw::is_producer<Warps>()) {"], None, 2)
        self._scheduled(page, node.producer, 3, producer=True)
        if node.helpers:
            page.write(["} else if (fw::is_helper<Warps>()) {"], None, 2)
            self._scheduled(page, node.helpers, 3)
        page.write(["}", "return;"], None, 2)
        page.write(["}"], None, 1)
        if consumer:
            page.write([f"fw::alloc_registers<{consumer}>();"], None, 1)
        page.write([""])
        consumers = Page([""], [None])
        local = self.local = local_products(node.consumers)
        if any(isinstance(n, ir.PingPong) for n in ir.flat(node.consumers)):
            consumers.write(["fw::ping_pong_start<Warps / 4>(group);"], None, 1)
        self._scheduled(consumers, node.consumers, 1)
        declared = {key for loop in local.values() for key in loop}
        for key, buffer in self.program.buffers.items():
            if buffer.space == "register" and key not in declared:
                page.write(self._declare(key, buffer), _lines(buffer.declared), 1)
        for name, rows in kept_vectors(node.consumers).items():
            along = "Warps" if self.gpu.beside(rows, self.program.warps) == 1 else "RowWarps"
            page.write([f"auto {name} = fw::row_vector<{rows}, {along}>();"], None, 1)
        if any(isinstance(n, ir.Exchange) for n in ir.flat(node.consumers)):
            place = tile_name(EXCHANGE)
            page.write([f"fw::Exchange<RowWarps, Beside> exchange({place});"], None, 1)
        page.write(self._turns(), None, 1)
        self._places(page, consumers.names)
        page.write(["int const group = fw::warpgroup();"], None, 1)
        page.add(consumers)

    def _sorting(self, page: Page, work: ir.Work) -> None:
        """The order of tiles of which data say how much there is to do."""
        axis = self.kernel.grid[0]
        given = f"tile_order, {text(axis.count)}, [&](int {axis.name}) {{"
        title = "// The tiles with the most to do come first."
        page.write([title, f"fw::SortedTiles::sort<Threads>({given}"], None, 1)
        if axis.low != ZERO:
            page.write([f"{axis.name} += {text(axis.low)};"], None, 2)
        self._body(page, work.defined, 2)
        page.write([f"return {text(work.amount)};"], None, 2)
        page.write(["});", ""], None, 1)

    def _users(self, key: Key) -> str:
        """The arguments of a ring's init: its consumer warps, and its producer warps where TMA does
        not fill it."""
        helpers = self.context.helpers
        if key in self.context.tma_optional:
            return f"Warps, {by_tma(key)} ? 1 : {helpers}"
        if key in self.context.transposed_tiles | self.context.helped:
            return f"Warps, {helpers}"
        if key in self.context.restaged:
            return f"Warps + {helpers}" if key in self._consumed() else helpers
        return helpers if key in map(landing, self.context.transposed_tiles) else "Warps"

    def _consumed(self) -> set[Key]:
        """The rings that consumers empty."""
        (roles,) = (n for n in self.kernel.body if isinstance(n, ir.Roles))
        kinds = (ir.Release, ir.Drain)
        return {n.key for n in ir.flat(roles.consumers) if isinstance(n, kinds)}

    def _scheduled(
        self, page: Page, body: tuple[ir.Statement, ...], indent: int, producer: bool = False
    ) -> None:
        """A role's work, for each tile of the grid that the scheduler gives its thread block."""
        part, lines, grid = Page([""], [None]), _lines(self.program.grid), self.kernel.grid
        self._body(part, body, indent + 1)
        page.write([f"{tile_loop(self.kernel, producer)} {{"], lines, indent)
        for axis, letter in zip(grid, "xyz", strict=False):
            if axis.name in part.names:
                low = "" if axis.low == ZERO else f"{text(axis.low)} + "
                page.write([f"int const {axis.name} = {low}tile.{letter}();"], lines, indent + 1)
        page.add(part)
        page.write(["}"], lines, indent)

    def _coordinates(self, used: set[str]) -> Lines:
        dims = [cpp(d) for d in self.program.dims if cpp(d) in used]
        if dims:
            yield "int const " + ", ".join(f"{d} = p.{d}" for d in dims) + ";"
        axes = launch_order(self.program, self.kernel.grid)
        for axis, letter in zip(() if self.rings else axes, "xyz", strict=False):
            value = f"blockIdx.{letter}"
            note = ""
            if axis.longest == "last":
                value, note = f"gridDim.{letter} - 1 - {value}", "  // the longest first"
            low = "" if axis.low == ZERO else f"{text(axis.low)} + "
            yield f"int const {axis.name} = {low}{value};{note}"
        if any(k[1] == "shared" for k in self.program.buffers):
            name = "memory" if self.rings else "shared"
            yield f"extern __shared__ __align__(1024) unsigned char {name}[];"
            if self.rings:
                yield f"unsigned char* const shared = fw::pinned({name});"

    def _declare(self, key: Key, buffer: Buffer) -> Lines:
        name = tile_name(key)
        sizes = [self._size(buffer, i) for i in range(len(buffer.shape))]
        if buffer.space == "shared":
            sizes = sizes[::-1] if key in self.context.transposed_tiles else sizes
            kind = f"{CPP_TYPES[buffer.dtype]}, {', '.join(sizes)}"
            place = f"shared + {self.offsets[key]}" if self.offsets[key] else "shared"
            what = "vector" if len(sizes) == 1 else "tile"
            yield f"auto const {name} = fw::shared_{what}<{kind}>({place});"
            if key in self.rings:
                yield f"fw::Ring<{buffer.stages}> {ring_name(key)}(shared + {self.rings[key]});"
            if self._staged(key):
                yield f"fw::Staged<Threads, decltype({name})> {name}_staged;"
            return
        if key in self._assigned():
            yield self._assigned_tile(key, buffer, sizes)
        if key in self.kernel.operands:
            along = 4 if key in self.kernel.beside else self.program.warps
            rows, columns = buffer.shape[0] // (16 * along), buffer.shape[1]
            steps = columns * DTYPES[self.kernel.operands[key]] // 32
            yield f"fw::OperandA<{rows}, {steps}> {operand_name(key)};"

    def _assigned_tile(self, key: Key, buffer: Buffer, sizes: list[str]) -> str:
        """The declaration of an accumulator or a vector."""
        name, split = tile_name(key), key in self.kernel.beside
        along, share = ("RowWarps", " / Beside") if split else ("Warps", "")
        if len(buffer.shape) == 2:
            wide = ", true" if self.rings and key in self.kernel.wide else ""
            return f"auto {name} = fw::accumulator<{sizes[0]}, {sizes[1]}{share}, {along}{wide}>();"
        more = ", int" if buffer.dtype == "int32" else ""
        if self.context.side(key) == "rows":
            return f"auto {name} = fw::row_vector<{sizes[0]}, {along}{more}>();"
        return f"auto {name} = fw::col_vector<{sizes[0]}{share}{more}>();"

    def _staged(self, key: Key) -> bool:
        """Whether a shared tile is filled through registers."""
        return any(isinstance(n, ir.Put) and n.dest == key for n in ir.flat(self.kernel.body))

    def _assigned(self) -> set[Key]:
        """Register tiles that are accumulators or vectors (operands are made where they are)."""
        found: set[Key] = set()
        for node in ir.flat(self.kernel.body):
            match node:
                case ir.Gemm(target):
                    found.add(target)
                case ir.Fill(dest, helped=False):
                    found.add(dest)
                case ir.Move(_, dest) if not node.operand and not node.in_place:
                    found.add(dest)
                case ir.Compute():
                    found |= {(a.buffer.name, "register") for a in node.assigns if a.buffer}
        return found

    def _size(self, buffer: Buffer, axis: int) -> str:
        name = buffer.named_size(axis)
        return cpp(name.id) if name else str(buffer.shape[axis])

    # --- statements -----------------------------------------------------------------------

    def _body(self, page: Page, body: tuple[ir.Statement, ...], indent: int) -> None:
        before: ir.Lines | None = None
        for node in body:
            lines = node.origin.lines
            if _begins(node, before) and page.text[-1] and not page.text[-1].endswith("{"):
                page.write([""])
            if lines and node.origin.title:
                page.write([f"// {lines[0]:3} | {node.origin.title}"], lines, indent)
            before = lines
            if isinstance(node, ir.Loop):
                page.write(["CUTE_NO_UNROLL", _head(node)], lines, indent)
                if node.where is not None:
                    page.write([f"if (!({text(node.where)})) continue;"], lines, indent + 1)
                for key in self.local.get(id(node), ()):
                    page.write(self._declare(key, self.program.buffers[key]), lines, indent + 1)
                self._body(page, node.body, indent + 1)
                page.write(["}"], lines, indent)
            elif isinstance(node, ir.Branch):
                self._branch(page, node, indent)
            elif isinstance(node, ir.Roles):
                self._roles(page, node)
            else:
                page.write(RULES[type(node)](self.context, node), lines, indent)

    def _branch(self, page: Page, node: ir.Branch, indent: int) -> None:
        lines = node.origin.lines
        page.write([f"if ({text(node.condition)}) {{"], lines, indent)
        self._body(page, node.then, indent + 1)
        if node.orelse:
            page.write(["} else {"], lines, indent)
            self._body(page, node.orelse, indent + 1)
        page.write(["}"], lines, indent)


def tile_loop(kernel: ir.Kernel, producer: bool = False) -> str:
    """The head of the loop over a thread block's tiles (device/fw/tile_scheduler.cuh). Tiles of
    sequences are taken by the producer, and handed on (tile_queue.cuh)."""
    counts = [text(axis.count) for axis in kernel.grid]
    first = ", true" if kernel.waves > 0 and kernel.grid[0].longest == "first" else ""
    kind = f"TileScheduler<{kernel.waves}{first}>"
    if kernel.queued and producer:
        if kernel.sequences is not None:
            order = {None: "even", "last": "rising", "first": "falling"}[kernel.grid[0].longest]
            tiles = f"SequenceTiles<{kernel.sequences.rows}, fw::Order::{order}>"
            counts[0] = f"p.{cpp(kernel.sequences.starts)}"
        else:
            tiles, counts = "SortedTiles", ["tile_order", *counts]
        taken = f"fw::{tiles}({', '.join(counts)})"
        kind, counts = "TilesToTake", [taken, "tile_queue", f"p.{COUNTER}"]
    elif kernel.queued:
        kind, counts = "TakenTiles", ["tile_queue"]
    return f"for (fw::{kind} tile({', '.join(counts)}); tile.more(); tile.next())"


def helper_warps(program: Program, roles: ir.Roles) -> int:
    """How many helper warps there are. Three of them convert tiles more slowly than TMA loads and
    one warpgroup consumes them: there is another warpgroup where that leaves it registers."""
    converts = any(isinstance(n, ir.Restage) and n.converts for n in ir.flat(roles.helpers))
    return ir.HELPERS + 4 if converts and program.warps == 4 else ir.HELPERS


def register_counts(
    program: Program, kernel: ir.Kernel, roles: ir.Roles, blocks: int = 1
) -> tuple[int, int]:
    """What setmaxnreg leaves a producer thread and gives a consumer one; 0 where it is not used.
    Two blocks on an SM have one consumer warpgroup each, and leave producers what two would."""
    if kernel.helpers != ir.HELPERS:
        return REGISTERS_TWO_HELPING
    groups = program.warps // 4 if blocks == 1 else 2
    found = _by_work(program, kernel, roles)[groups]
    return found if blocks == 1 else (found[0], REGISTERS_OF_TWO_BLOCKS - found[0])


def _by_work(program: Program, kernel: ir.Kernel, roles: ir.Roles) -> Mapping[int, tuple[int, int]]:
    """The registers by consumer warpgroups, for what producers and helpers do."""
    if any(isinstance(n, ir.Load) and n.window.page_rows for n in ir.flat(roles.producer)):
        return REGISTERS_PAGED
    if any(_by_element(n) for n in ir.flat(roles.helpers)):
        return REGISTERS_STAGING
    if _reads_table(roles) or (roles.helpers and _wide(program, roles.helpers)):
        return REGISTERS_STAGING
    if roles.helpers or kernel.queued:
        return REGISTERS_HELPED
    return REGISTERS_WIDE if _wide(program, roles.producer) else REGISTERS


def _reads_table(roles: ir.Roles) -> bool:
    """Whether rows of a copied tile lie in several pages that a table names."""
    loads = (n for n in ir.flat((*roles.producer, *roles.helpers)) if isinstance(n, ir.Load))
    pages = (window.pages for n in loads for window in n.windows)
    return any(one.named for one in pages if one is not None)


def _wide(program: Program, body: tuple[ir.Statement, ...]) -> bool:
    """Whether some copied tile is more than 4 boxes of TMA wide."""
    loads = (n for n in ir.flat(body) if isinstance(n, ir.Load))
    return any(program.buffers[n.dest].shape[-1] > 256 for n in loads)


def _by_element(node: ir.Statement) -> bool:
    """Whether helpers compute, or copy element by element."""
    if isinstance(node, ir.Load):
        return not node.window.chunked and not node.window.line
    return isinstance(node, ir.Restage)


def _head(loop: ir.Loop) -> str:
    start = "" if loop.number == "resumes" else f"{loop.var} = {text(loop.low)}"
    kind = "int " if loop.number == "own" else ""
    return f"for ({kind}{start}; {text(loop.condition)}; ++{loop.var}) {{"


def _begins(node: ir.Statement, before: ir.Lines | None) -> bool:
    """Whether something new begins here, behind a statement of other lines."""
    if node.origin.title or (isinstance(node, ir.Compute) and node.note):
        return True
    return isinstance(node, (ir.Define, ir.Branch, ir.Compute)) and node.origin.lines != before


def wrapped(line: str) -> list[str]:
    """A line of at most 100 characters, or its parts, broken where the fewest brackets are open."""
    if len(line) <= WIDTH or line.lstrip().startswith("//"):
        return [line]
    indent = len(line) - len(line.lstrip())
    cuts = [cut for cut in _cuts(line.split("  // ")[0]) if indent + 4 < cut[2] <= WIDTH]
    if not cuts:
        return [line]
    depth, rank, _ = min(cuts)
    place = max(p for d, r, p in cuts if (d, r) == (depth, rank))
    return [line[:place].rstrip(), *wrapped(" " * (indent + 4) + line[place:].lstrip())]


def _cuts(line: str) -> Iterator[tuple[int, int, int]]:
    """Where a line may be broken: how many brackets are open, how loosely it binds, the place."""
    depth = 0
    for match in BREAKS.finditer(line):
        if match["open"]:
            depth += 1
        elif match["close"]:
            depth -= 1
        elif match["comma"]:
            yield depth, 0, match.end()
        elif match["end"]:
            yield depth, len(LOOSEST) + 1, match.end()
        else:
            rank = next(i for i, ops in enumerate(LOOSEST, 1) if match["operator"] in ops)
            yield depth, rank, match.start() + 1


def _lines(stmt: tl.Statement) -> ir.Lines:
    return stmt.span.line, stmt.span.end_line
