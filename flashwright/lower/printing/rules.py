"""The printer's table of rules: an IR node to a few lines of CuTe C++."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from flashwright.lower import ir
from flashwright.lower.element import ROW, Leaf, leaves, variable, with_leaves
from flashwright.lower.names import (
    MapKey,
    by_tma,
    cpp,
    map_names,
    operand_name,
    place_name,
    ring_name,
    tile_name,
)
from flashwright.lower.passes.fp8_transpose import landing
from flashwright.lower.printing.cpp import text
from flashwright.lower.printing.elementwise import compute, converted, scatter
from flashwright.lower.targets.atoms import CPP_TYPES
from flashwright.lower.targets.tensor_maps import loaded_pieces, tma_optional_tiles
from flashwright.lower.term import ZERO, At, Term, Var, integer
from flashwright.program.program import Buffer, Key, Program

Lines = Iterator[str]


@dataclass(frozen=True)
class Context:
    """What the rules know of the kernel they print."""

    program: Program
    kernel: ir.Kernel
    asynchronous: bool  # there is cp.async
    roles: bool = False  # a producer that loads by TMA, consumer warpgroups that use wgmma
    epilogue: int | None = None  # where in shared memory the epilogue puts results in order

    @cached_property
    def gemm_dtypes(self) -> tuple[str, ...]:
        """The element types that are multiplied."""
        gemms = (n for n in ir.flat(self.kernel.body) if isinstance(n, ir.Gemm))
        return tuple(sorted({self.program.buffers[n.right].dtype for n in gemms}))

    @cached_property
    def transposed_tiles(self) -> frozenset[Key]:
        """Tiles that helper warps transpose on their way to the consumers."""
        nodes = ir.flat(self.kernel.body)
        return frozenset(n.key for n in nodes if isinstance(n, ir.Transpose))

    @cached_property
    def helped(self) -> frozenset[Key]:
        """Tiles that helper warps fill."""
        nodes = ir.flat(self.kernel.body)
        kinds = (ir.Load, ir.Restage)
        return frozenset(n.dest for n in nodes if isinstance(n, kinds) and n.helped)

    @cached_property
    def tma_optional(self) -> frozenset[Key]:
        """Tiles that TMA or helper warps fill: the call shows which."""
        return tma_optional_tiles(self.kernel.body)

    @cached_property
    def restaged(self) -> frozenset[Key]:
        """Tiles that helper warps read."""
        nodes = ir.flat(self.kernel.body)
        return frozenset(n.source for n in nodes if isinstance(n, ir.Restage) and n.helped)

    @cached_property
    def in_place(self) -> frozenset[Key]:
        """Vectors that are read where they lie in shared memory."""
        nodes = ir.flat(self.kernel.body)
        return frozenset(k for n in nodes if isinstance(n, ir.Compute) for k in n.in_place)

    @property
    def helpers(self) -> str:
        """How many helper warps there are."""
        return "fw::helpers" if self.kernel.helpers == ir.HELPERS else "Helpers"

    @property
    def helped_by(self) -> str:
        """The template arguments of what all helper warps do together."""
        return "Warps" if self.kernel.helpers == ir.HELPERS else "Warps, Helpers"

    def mma(self, dtype: str) -> str:
        """The name of an element type's MMA atom."""
        return "Mma" if len(self.gemm_dtypes) == 1 else f"Mma_{dtype}"

    def shared(self, key: Key, stage: Term | None) -> str:
        """A shared tile, at one of its stages."""
        return tile_name(key) if stage is None else f"{tile_name(key)}.stage({text(stage)})"

    def window(self, window: ir.Window, kind: str = "tile") -> str:
        """A tile in global memory."""
        if window.pages is not None:
            return self._paged(window, window.pages, kind)
        start = list(window.start)
        moved: list[Term] = [ZERO, ZERO]
        lows = (window.first_row, window.first_col)[: 1 if kind == "line" else 2]
        for axis, low in enumerate(lows, -len(lows)):
            if low is not None:  # a coordinate is not negative, a way is
                moved[axis + len(lows)], start[axis] = start[axis], ZERO
        while start and start[-1] == ZERO:
            start.pop()
        places = ", ".join(map(text, start))
        tensor = f"p.{cpp(window.tensor.name)}"
        if window.offset is not None:
            tensor += f".from({text(window.offset)})"
        way = f".moved({', '.join(map(text, moved))})" if moved != [ZERO, ZERO] else ""
        return f"{tensor}.{kind}({places}){way}"

    def _paged(self, window: ir.Window, pages: ir.Pages, kind: str) -> str:
        """A tile whose rows lie in several pages."""
        assert window.rows is not None  # they have a range
        page = self.window(replace(window, pages=None, first_row=None), kind)
        of = f"[&](int {ir.PAGE_IDX.name}) {{ return {page}; }}"
        return f"fw::paged<{pages.size}>({text(pages.first)}, {text(window.rows)}, {of})"

    @cached_property
    def loaded(self) -> dict[MapKey, ir.Piece]:
        """What TMA loads, where it does."""
        return loaded_pieces(self.program, self.kernel)

    @cached_property
    def maps(self) -> dict[MapKey, str]:
        """The names of tensor maps, by the columns that are filled and the tensor they are filled
        from."""
        return map_names(self.loaded)

    def map(self, key: Key, window: ir.Window, column: int = 0) -> str:
        """The tensor map that columns of a tile are loaded by."""
        return self.maps[key, column, window.tensor.name]

    def coordinates(self, window: ir.Window) -> str:
        """Where a tile begins, as TMA is told."""
        if window.pages is not None:
            return self._page_boxes(window, window.pages)
        return ", ".join(map(text, window.coordinates))

    def _page_boxes(self, window: ir.Window, pages: ir.Pages) -> str:
        """The same of a tile in several pages."""
        assert window.rows is not None  # they have a range
        *others, _, column = window.start
        page = f"fw::coordinates({', '.join(map(text, others))})"
        of = f"[&](int {ir.PAGE_IDX.name}) {{ return {page}; }}"
        sizes = f"{pages.size}, {window.page_rows}"
        step = text(ir.rows_of_a_page(window.tensor))
        place = f"{text(pages.first)}, {text(window.rows)}, {step}"
        return f"fw::page_boxes<{sizes}>({place}, {of}), {text(column)}"

    def rows(self, window: ir.Window, key: Key) -> str:
        """Which rows of a tile are inside."""
        return _bounds(window.first_row, window.rows, self.program.buffers[key].shape[0])

    def cols(self, window: ir.Window, key: Key) -> str:
        """Which columns of a tile are inside."""
        return _bounds(window.first_col, window.cols, self.program.buffers[key].shape[1])

    def inside(self, window: ir.Window, key: Key) -> str:
        """Which rows of a tile are inside, and which columns where that may not be all."""
        rows = self.rows(window, key)
        return rows if window.cols is None else f"{rows}, {self.cols(window, key)}"

    def warps(self, key: Key) -> str:
        """The template arguments that say how a tile lies."""
        if key in self.kernel.beside:
            return "RowWarps, false, Beside"
        return "Warps, true" if key in self.kernel.wide else "Warps"

    def line(self, key: Key) -> str:
        """The same of a vector, or of a tile that is never wide."""
        return "RowWarps, Beside" if key in self.kernel.beside else "Warps"

    def place(self, elements: Iterable[Leaf], shape: tuple[int, ...]) -> str:
        """What knows the places of rows and columns of a tile with these elements."""
        names = {variable(x) for x in elements}
        if names & {tile_name(k) for k in self.kernel.beside}:
            return place_name(shape[-1] if len(shape) == 2 else 0)
        return "wide_at" if names & {tile_name(k) for k in self.kernel.wide} else "at"

    def side(self, key: Key) -> str:
        """Along what a vector lies."""
        return "rows" if self.kernel.sides.get(key, "rows") == "rows" else "cols"

    def operand(self, key: Key) -> str:
        """The left operand of a GEMM in registers."""
        return operand_name(key)


def _bounds(first: Term | None, end: Term | None, size: int) -> str:
    """So many from the first one on, or from one to another."""
    last = text(integer(size) if end is None else end)
    return last if first is None else f"fw::Inside{{{text(first)}, {last}}}"


def in_lines(node: ir.Store, buffer: Buffer) -> bool:
    """Whether a result in registers is stored 16 bytes at a time."""
    return (
        node.source[1] == "register"
        and len(buffer.shape) == 2
        and node.window.chunked
        and node.window.tensor.dtype in ("fp16", "bf16")
        and buffer.shape[1] % 16 == 0
    )


def adds_in_lines(node: ir.Store, buffer: Buffer, kernel: ir.Kernel) -> bool:
    """Whether a tile is added to global memory 8 or 16 bytes at a time."""
    whole = len(buffer.shape) == 2 and node.window.chunked
    return node.adds and whole and node.source not in kernel.wide


def through_epilogue(node: ir.Store, buffer: Buffer, kernel: ir.Kernel) -> bool:
    """Whether the epilogue puts it in order in shared memory, where there is room. Wide tiles need
    not be: a thread has neighbouring columns there."""
    return in_lines(node, buffer) and node.source not in kernel.wide


def _define(at: Context, node: ir.Define) -> Lines:
    note = f"  // {node.note.format(text(node.below))}" if node.note else ""
    kind = node.value.type if node.varies else f"{node.value.type} const"
    name = node.name if node.again else f"{kind} {node.name}"
    yield f"{name} = {text(node.value)};{note}"


def _load(at: Context, node: ir.Load) -> Lines:
    dest, source = at.shared(node.dest, node.stage), at.window(node.window)
    inside = at.inside(node.window, node.dest)
    if node.helped:
        yield from _helped(at, node)
    elif node.window.line:
        source = at.window(node.window, "line")
        yield f"fw::copy_vector<Threads>({dest}, {source}, {inside});"
    elif node.pieces:
        yield from _pieces(at, node)
    elif at.roles:
        tile, ring, of = tile_name(node.dest), ring_name(node.dest), at.map(node.dest, node.window)
        when = f"if ({by_tma(node.dest)}) " if node.tma_optional else ""
        start = at.coordinates(node.window)
        yield f"{when}fw::fetch({tile}, {ring}, p.{of}, {start});"
    elif not node.window.chunked:
        inside = f"{at.rows(node.window, node.dest)}, {at.cols(node.window, node.dest)}"
        yield f"fw::copy_elements<Threads>({dest}, {source}, {inside});"
    elif at.asynchronous:
        yield f"fw::copy_async<Threads>({dest}, {source}, {inside});"
    else:
        yield f"{tile_name(node.dest)}_staged.load({source}, {inside});"


def _pieces(at: Context, node: ir.Load) -> Lines:
    """A tile of which each Copy fills some columns."""
    tile, ring = tile_name(node.dest), ring_name(node.dest)
    dest = at.shared(node.dest, node.stage)
    if at.roles:
        yield f"{ring}.acquire({tile}.bytes);"
    for piece in node.pieces:
        columns = f"{piece.column}, {piece.width}"
        source, inside = at.window(piece.window), at.inside(piece.window, node.dest)
        if at.roles:
            of = at.map(node.dest, piece.window, piece.column)
            start = at.coordinates(piece.window)
            yield f"fw::fetch_columns<{columns}>({tile}, {ring}, p.{of}, {start});"
        elif at.asynchronous:
            yield f"fw::copy_columns_async<Threads, {columns}>({dest}, {source}, {inside});"
        else:
            yield f"{tile}_staged.load<{columns}>({source}, {inside});"
    if at.roles:
        yield f"{ring}.next();"


def _helped(at: Context, node: ir.Load) -> Lines:
    """A tile that helper warps copy."""
    tile, ring, threads = tile_name(node.dest), ring_name(node.dest), f"32 * {at.helpers}"
    when = f"if (!{by_tma(node.dest)}) " if node.tma_optional else ""
    if node.window.line:
        source, inside = at.window(node.window, "line"), at.rows(node.window, node.dest)
        yield f"{when}fw::fill_vector_stage<{at.helped_by}>({tile}, {ring}, {source}, {inside});"
        return
    yield f"{when}fw::fill_stage<Warps>({tile}, {ring}, [&](auto to, int thread) {{"
    if not node.window.chunked:
        source, rows = at.window(node.window), at.rows(node.window, node.dest)
        cols = at.cols(node.window, node.dest)
        yield f"  fw::copy_elements<{threads}>(to, {source}, {rows}, {cols}, thread);"
    else:
        for piece in node.filled(at.program.buffers[node.dest].shape[1]):
            source, rows = at.window(piece.window), at.rows(piece.window, node.dest)
            whole = piece.window.cols is None
            cols = "fw::AllColumns{}" if whole else at.cols(piece.window, node.dest)
            columns = f"{threads}, {piece.column}, {piece.width}"
            yield f"  fw::copy_columns_async<{columns}>(to, {source}, {rows}, {cols}, thread);"
        yield "  fw::commit();"
        yield "  fw::wait<0>();"
    yield "});"


def _transpose(at: Context, node: ir.Transpose) -> Lines:
    source, dest = landing(node.key), node.key
    names = (tile_name(source), ring_name(source), tile_name(dest), ring_name(dest))
    yield f"fw::transpose<{at.helped_by}>({', '.join(names)});"


def _put(at: Context, node: ir.Put) -> Lines:
    yield f"{tile_name(node.dest)}_staged.store({at.shared(node.dest, node.stage)});"


def _fill(at: Context, node: ir.Fill) -> Lines:
    name, rows = tile_name(node.dest), at.rows(node.window, node.dest)
    if node.helped:
        yield f"fw::Line const {name}{{{at.window(node.window, 'line')}, {rows}}};"
    elif len(at.program.buffers[node.dest].shape) == 1:
        source = at.window(node.window, "line")
        yield f"fw::load_{at.side(node.dest)}<{at.line(node.dest)}>({name}, {source}, {rows});"
    else:
        source, cols = at.window(node.window), at.cols(node.window, node.dest)
        if node.window.tensor.declared.fragments:
            yield f"fw::load_fragments<{at.line(node.dest)}>({name}, {source});"
            return
        yield f"fw::load<{at.warps(node.dest)}>({name}, {source}, {rows}, {cols});"


def _store(at: Context, node: ir.Store) -> Lines:
    buffer, window = at.program.buffers[node.source], node.window
    name, rows = tile_name(node.source), at.rows(window, node.source)
    lines = adds_in_lines(node, buffer, at.kernel)
    target = at.window(window, "line" if len(buffer.shape) == 1 else "tile")
    target = f"fw::added({target})" if node.adds and not lines else target
    warps, along = at.warps(node.source), at.line(node.source)
    if node.source[1] == "shared":
        threads = "32 * Warps" if at.roles else "Threads"
        store = f"fw::copy_out<{threads}>({target}, {name}, {rows});"
    elif len(buffer.shape) == 1:
        store = f"fw::store_{at.side(node.source)}<{along}>({target}, {name}, {rows});"
    elif in_lines(node, buffer):
        inside = at.inside(window, node.source)
        store = f"fw::store<{warps}>({target}, {name}, {inside});"
        if at.epilogue is not None and through_epilogue(node, buffer, at.kernel):
            staging = f"shared + {at.epilogue}"
            store = f"fw::store_epilogue<{along}>({staging}, {target}, {name}, {inside});"
    elif lines:
        store = f"fw::add_tile<{along}>({target}, {name}, {at.inside(window, node.source)});"
        if window.tensor.declared.fragments:
            store = f"fw::add_fragments<{along}>({target}, {name});"
    else:
        cols = at.cols(window, node.source)
        store = f"fw::store_elements<{warps}>({target}, {name}, {rows}, {cols});"
    if node.optional:
        yield f"if (p.{cpp(window.tensor.name)}.data != nullptr) {{"
        yield f"  {store}"
        yield "}"
    else:
        yield store


def _scatter(at: Context, node: ir.Scatter) -> Lines:
    tests = [f"p.{cpp(node.tensor.name)}.data != nullptr"] if node.optional else []
    if len(node.shape) == 1:  # several threads hold each element
        tests.append(f"fw::writes_{at.side(node.source)}<{at.line(node.source)}>()")
    lines = scatter(node, at.place((node.held, *leaves(node.place)), node.shape))
    if not tests:
        yield from lines
        return
    yield f"if ({' && '.join(tests)}) {{"
    yield from (f"  {line}" for line in lines)
    yield "}"


def _take_turn(at: Context, node: ir.TakeTurn) -> Lines:
    counters = node.counters
    yield f"{cpp(counters.tensor.name)}.take({at.window(counters, 'at')}, {text(node.turn)});"


def _move(at: Context, node: ir.Move) -> Lines:
    source, dest = tile_name(node.source), tile_name(node.dest)
    if len(at.program.buffers[node.dest].shape) == 1:
        yield from _moved_vector(at, node)
    elif node.dest[1] == "shared":
        to = at.shared(node.dest, node.stage)
        yield f"fw::to_shared<{at.warps(node.source)}>({to}, {source});"
    elif node.operand:
        held = at.shared(node.source, node.stage)
        yield f"{operand_name(node.dest)} = fw::load_operand<{at.line(node.dest)}>({held});"
    else:
        held = at.shared(node.source, node.stage)
        yield f"fw::from_shared<{at.warps(node.dest)}>({dest}, {held});"


def _moved_vector(at: Context, node: ir.Move) -> Lines:
    if node.dest[1] == "shared":
        to = at.shared(node.dest, node.stage)
        along, vector = at.line(node.source), tile_name(node.source)
        yield f"fw::{at.side(node.source)}_to_shared<{along}>({to}, {vector});"
    else:
        held = at.shared(node.source, node.stage)
        along, vector = at.line(node.dest), tile_name(node.dest)
        if node.in_place:
            size = at.program.buffers[node.dest].shape[0]
            yield f"auto const {vector} = fw::cols_in_shared<{size}, {along}>({held});"
            return
        yield f"fw::{at.side(node.dest)}_from_shared<{along}>({vector}, {held});"


def _release(at: Context, node: ir.Release) -> Lines:
    if node.key in at.in_place:
        yield "__syncwarp();"  # all threads have read the vector
    yield f"{ring_name(node.key)}.release({f'{node.known}(0)' if node.known else ''});"


def _restage(at: Context, node: ir.Restage) -> Lines:
    value = with_leaves(node.value, {node.held.term: Leaf(Var("x", "float"), node.held.axes)})
    dest, source = tile_name(node.dest), at.shared(node.source, node.stage)
    if node.converts:
        if node.helped:
            yield f"fw::convert_stage<{at.helped_by}>({dest}, {ring_name(node.dest)}, {source});"
        else:
            yield f"fw::convert_tile<32 * Warps>({dest}, {source}, threadIdx.x);"
        return
    rounded = node.buffer.dtype != at.program.buffers[node.dest].dtype  # once is enough
    one = converted(ir.Assign(node.held, value, node.buffer if rounded else None))
    if node.helped:
        vectors = {variable(x): x for x in leaves(node.value) if isinstance(x.term, At)}
        vectors.pop(variable(node.held), None)
        given = "".join(f", auto const& {name}" for name in vectors)
        sides = {name: "rows" if x.axes == ROW else "cols" for name, x in vectors.items()}
        passed = "".join(f", fw::along_{side}({name})" for name, side in sides.items())
        yield f"fw::restage_stage<{at.helped_by}>({dest}, {ring_name(node.dest)}, {source},"
        yield f"    [&](int m, int n, float x{given}) {{ return {one}; }}{passed});"
        return
    along = at.line((node.buffer.name, node.buffer.space))
    yield f"fw::restage<{along}>({dest}, {source}, [&](int m, int n, float x) {{ return {one}; }});"


def _product(at: Context, node: ir.Gemm, name: str) -> str:
    shared = node.left[1] == "shared"
    left = at.shared(node.left, node.left_stage) if shared else at.operand(node.left)
    right = at.shared(node.right, node.right_stage)
    transposed = node.transposed or node.right in at.transposed_tiles
    how = ", ".join(str(flag).lower() for flag in (node.fresh, transposed))
    shared_rows = node.target in at.kernel.beside
    how += f", {node.depth or 0}" if node.depth is not None or shared_rows else ""
    how += ", Beside" if shared_rows else ""
    left = f"fw::transposed({left})" if node.left_transposed else left
    return f"fw::{name}<{how}>(group, {tile_name(node.target)}, {left}, {right});"


def _start(at: Context, node: ir.Start) -> Lines:
    yield _product(at, node.gemm, "start_product")
    yield "fw::close_products();"


def _gemm(at: Context, node: ir.Gemm) -> Lines:
    target = tile_name(node.target)
    if at.roles:
        yield _product(at, node, "product")
        return
    if node.fresh:
        yield f"cute::clear({target});"
    if node.left[1] == "shared":
        how = "left_transposed" if node.left_transposed else "left"
        left, sparing = f"fw::{how}<Warps>({at.shared(node.left, node.left_stage)})", "gemm_rolled"
    else:
        left, sparing = at.operand(node.left), "gemm_in_order"
    right = at.shared(node.right, node.right_stage)
    side = "right_transposed" if node.transposed else "right"
    mma = at.mma(at.program.buffers[node.right].dtype)
    gemm = sparing if node.sparing else "gemm"
    yield f"fw::{gemm}<{mma}>({target}, {left}, fw::{side}({right}));"


def _operand(at: Context, node: ir.Operand) -> Lines:
    name, kind = operand_name(node.target), CPP_TYPES[node.dtype]
    yield f"{name} = fw::operand<{kind}>({tile_name(node.source)});"


def _listed(keys: tuple[Key, ...]) -> str:
    return ", ".join(map(tile_name, keys))


def _compute(at: Context, node: ir.Compute) -> Lines:
    elements = (x for xs in ir.combined((node,)) for x in xs)
    yield from compute(node, at.place(elements, node.shape))


def _sync(at: Context, node: ir.Sync) -> Lines:
    if node.stage is None:
        yield f"fw::consumers_meet<Warps{', true' if node.publish else ''}>();"
    else:
        yield f"fw::consumers_{node.step}<Warps>(group, {text(node.stage)});"


RULES: dict[type, Callable[[Context, Any], Lines]] = {
    ir.Define: _define,
    ir.Load: _load,
    ir.Transpose: _transpose,
    ir.Put: _put,
    ir.Commit: lambda at, node: iter(["fw::commit();"]),
    ir.Wait: lambda at, node: iter([f"fw::wait<{node.left}>();"]),
    ir.Barrier: lambda at, node: iter(["__syncthreads();"]),
    ir.Await: lambda at, node: iter(
        [f"{ring_name(node.key)}.wait{'_ahead' if node.ahead else ''}();"]
    ),
    ir.Release: _release,
    ir.Refill: lambda at, node: iter([f"{ring_name(node.key)}.refill();"]),
    ir.Drain: lambda at, node: iter([f"{ring_name(node.key)}.drain();"]),
    ir.Sync: _sync,
    ir.Open: lambda at, node: iter([f"fw::open_products({_listed(node.targets)});"]),
    ir.Start: _start,
    ir.PingPong: lambda at, node: iter([f"fw::ping_pong_{node.step}<Warps / 4>(group);"]),
    ir.Finish: lambda at, node: iter(
        [f"fw::finish_products<{node.left}>({_listed(node.targets)});"]
    ),
    ir.Exchange: lambda at, node: iter([f"exchange.{node.op}({node.vector});"]),
    ir.Fill: _fill,
    ir.Store: _store,
    ir.Scatter: _scatter,
    ir.TakeTurn: _take_turn,
    ir.PassTurn: lambda at, node: iter([f"{cpp(node.counters.name)}.hand_over();"]),
    ir.Move: _move,
    ir.Restage: _restage,
    ir.Gemm: _gemm,
    ir.Operand: _operand,
    ir.Compute: _compute,
}
