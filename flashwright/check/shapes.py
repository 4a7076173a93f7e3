"""Shapes: GEMM operands match, elementwise operands broadcast, results and tiles fit."""

from __future__ import annotations

from collections.abc import Iterator

from flashwright.check.names import Names
from flashwright.check.operations import is_elementwise
from flashwright.lang.diagnostic import Diagnostic, Edit, Fix, Label
from flashwright.lang.format import format_expr
from flashwright.lang.nodes import (
    Allocate,
    Binary,
    Call,
    Compute,
    Copy,
    Expr,
    Index,
    Name,
    Reshape,
    Transpose,
    Unary,
    expressions,
    statements,
)
from flashwright.program.program import Buffer, Key, Tensor, tile_of
from flashwright.program.scalars import NotScalar, Unknown, evaluate, whole
from flashwright.program.vocabulary import FUNCTIONS, PAGE, VERBS, split
from flashwright.semantics.compute import expression

Shape = tuple[int, ...]


class Misfit(Exception):
    """An operand whose shape does not broadcast; `expr` is the operand."""

    def __init__(self, expr: Expr, message: str) -> None:
        super().__init__(message)
        self.expr = expr


def check_shapes(names: Names) -> Iterator[Diagnostic]:
    """Findings about every Copy, Compute and Reshape of code."""
    for stmt in statements(names.tree.body):
        match stmt:
            case Copy():
                yield from _copy(stmt, names)
            case Compute() if stmt.operation == "gemm":
                yield from _gemm(stmt, names)
            case Compute() if is_elementwise(stmt):
                yield from _elementwise(stmt, names)
            case Compute():
                yield from _in_place(stmt, names)
            case Reshape():
                yield from _reshape(stmt, names)


def show(buffer: Buffer) -> str:
    """A shape as declared and as numbers: `(BM, HeadDim) = (128, 64)`."""
    declared = buffer.declared
    numbers = f"({', '.join(map(str, buffer.shape))})"
    sizes: tuple[Expr, ...] | None = None
    if isinstance(declared, Allocate):
        sizes = tuple(a.size for a in declared.shape)
    elif isinstance(declared, Copy):
        sizes = declared.shape
    text = f"({', '.join(map(format_expr, sizes))})" if sizes else numbers
    return numbers if text == numbers else f"{text} = {numbers}"


def _held(name: Name, names: Names) -> Buffer | None:
    key = tile_of(name, names.buffers)
    return names.buffers[key] if key else None


# --- GEMM -------------------------------------------------------------------------------------


def _gemm(stmt: Compute, names: Names) -> Iterator[Diagnostic]:
    if len(stmt.args) != 2 or stmt.target is None:
        return
    shapes: list[Shape] = []
    buffers: list[Buffer] = []
    for arg in stmt.args:
        name = arg.operand if isinstance(arg, Transpose) else arg
        held = _held(name, names) if isinstance(name, Name) else None
        if not isinstance(name, Name):
            yield Diagnostic("FW206", "a GEMM operand must be the name of a tile", arg.span)
        if held is None:
            return
        if len(held.shape) != 2:
            text = f"a GEMM multiplies two-dimensional tiles; `{name.id}` is {show(held)}"  # type: ignore[union-attr]
            yield Diagnostic("FW301", text, arg.span)
            return
        shapes.append(held.shape[::-1] if isinstance(arg, Transpose) else held.shape)
        buffers.append(held)
    (m, k), (k2, n) = shapes
    result = _held(stmt.target, names)
    if k != k2:
        yield _gemm_mismatch(stmt, buffers, shapes, result.shape if result else None)
        return
    if result is not None and result.shape != (m, n):
        text = f"the product is ({m}, {n}), but `{stmt.target.id}` is {show(result)}"
        where = (Label(result.declared.span, "its size is set here"),)
        yield Diagnostic("FW302", text, stmt.target.span, secondary=where)


def _gemm_mismatch(
    stmt: Compute, buffers: list[Buffer], shapes: list[Shape], result: Shape | None
) -> Diagnostic:
    left, right = stmt.args
    (m, k), (k2, n) = shapes
    fix = None
    if k == n and result == (m, k2):
        if isinstance(right, Transpose):
            edit = Edit(right.operand.span.end, right.span.end, "")
            fix = Fix(f"drop the `.T` of `{right.operand.id}`", (edit,))
        else:
            fix = Fix(
                f"transpose it: `{format_expr(right)}.T`",
                (Edit(right.span.end, right.span.end, ".T"),),
            )
    text = (
        f"cannot multiply: `{format_expr(left)}` has {k} columns, "
        f"`{format_expr(right)}` has {k2} rows"
    )
    where = tuple(
        Label(arg.span, f"{show(b)}{', read transposed' if isinstance(arg, Transpose) else ''}")
        for arg, b in zip(stmt.args, buffers, strict=True)
    )
    return Diagnostic("FW301", text, stmt.span, secondary=where, fix=fix)


# --- elementwise ------------------------------------------------------------------------------


def _elementwise(stmt: Compute, names: Names) -> Iterator[Diagnostic]:
    target = _held(stmt.target, names) if stmt.target else None
    arity = VERBS[stmt.operation].arity if stmt.operation in VERBS else (1,)
    if target is None or len(stmt.args) not in arity:
        return
    expr = expression(stmt)
    try:
        frame = _frame((expr,), target.shape, names)
        _fits(expr, frame, names)
    except Misfit as misfit:
        yield Diagnostic("FW303", str(misfit), misfit.expr.span)
        return
    if frame != target.shape:
        assert stmt.target is not None
        text = f"the result is {_text(frame)}, but `{stmt.target.id}` is {show(target)}"
        where = (Label(target.declared.span, "its size is set here"),)
        yield Diagnostic("FW302", text, stmt.target.span, secondary=where)


def _frame(args: tuple[Expr, ...], target: Shape, names: Names) -> Shape:
    """The shape of a result: that of its two-dimensional operands, else of its vectors."""
    shapes = [s for arg in args for s in _operand_shapes(arg, names)]
    tiles = [s for s in shapes if len(s) == 2]
    if tiles:
        return tiles[0]
    vectors = [s for s in shapes if len(s) == 1]
    if not vectors or len(target) == 2:
        return target
    return vectors[0]


def _operand_shapes(expr: Expr, names: Names) -> Iterator[Shape]:
    """The shapes of the tiles an expression combines element by element."""
    match expr:
        case Name():
            held = _held(expr, names) if expr.id not in names.scalars else None
            if held is not None:
                yield held.shape
        case Unary(_, operand):
            yield from _operand_shapes(operand, names)
        case Binary(_, left, right):
            yield from _operand_shapes(left, names)
            yield from _operand_shapes(right, names)
        case Call(func, args) if _reduces(func):
            for shape in _operand_shapes(args[0], names):
                if len(shape) == 2:
                    yield (shape[0],)
        case Call(_, args) | Index(_, args):
            for arg in args:
                yield from _operand_shapes(arg, names)


def _reduces(func: Name) -> bool:
    known = FUNCTIONS.get(func.id.lower())
    return known is not None and known.reduces


def _fits(expr: Expr, frame: Shape, names: Names) -> None:
    """Raise Misfit at the first operand that does not broadcast to the frame."""
    match expr:
        case Name():
            held = _held(expr, names) if expr.id not in names.scalars else None
            if held is not None and not _broadcasts(held.shape, frame):
                raise Misfit(
                    expr, f"`{expr.id}` is {show(held)}, which does not broadcast to {_text(frame)}"
                )
            if held is not None and held.along is not None and len(frame) == 2:
                count = frame[0 if held.along == "rows" else 1]
                if held.shape[0] != count:
                    text = f"`{expr.id}` is {show(held)} along {held.along}, not {count}"
                    raise Misfit(expr, text)
        case Unary(_, operand):
            _fits(operand, frame, names)
        case Binary(_, left, right):
            _fits(left, frame, names)
            _fits(right, frame, names)
        case Call(func, args) if _reduces(func):
            inner = _frame(args, (0, 0), names)
            if len(inner) != 2 or inner == (0, 0):
                raise Misfit(expr, f"`{func.id}` reduces the rows of a two-dimensional tile")
            _fits(args[0], inner, names)
            if not _broadcasts(inner[:1], frame):
                raise Misfit(
                    expr, f"this has {inner[0]} rows, which do not broadcast to {_text(frame)}"
                )
        case Call(_, args) | Index(_, args):
            for arg in args:
                _fits(arg, frame, names)


def _broadcasts(shape: Shape, frame: Shape) -> bool:
    return shape == frame or (len(shape) == 1 and len(frame) == 2 and shape[0] in frame)


def _text(shape: Shape) -> str:
    return f"({', '.join(map(str, shape))})"


def _in_place(stmt: Compute, names: Names) -> Iterator[Diagnostic]:
    """Findings about Softmax and Mask: a two-dimensional tile, state with one element per row."""
    tile = _held(stmt.args[0], names) if stmt.args and isinstance(stmt.args[0], Name) else None
    if tile is None:
        return
    if len(tile.shape) != 2:
        yield Diagnostic(
            "FW303",
            f"`{tile.name}` is {show(tile)}: a two-dimensional tile is needed",
            stmt.args[0].span,
        )
        return
    if stmt.where is not None:
        try:
            _fits(stmt.where, tile.shape, names)
        except Misfit as misfit:
            yield Diagnostic("FW303", str(misfit), misfit.expr.span)
    for name in (*stmt.state, *stmt.rescale):
        held = _held(name, names)
        if held is not None and held.shape[0] != tile.shape[0]:
            text = f"`{name.id}` is {show(held)}, `{tile.name}` has {tile.shape[0]} rows"
            yield Diagnostic("FW303", text, name.span)
        elif held is not None and name in stmt.state and len(held.shape) != 1:
            yield Diagnostic("FW303", f"`{name.id}` needs one element per row", name.span)


# --- Copy and Reshape -------------------------------------------------------------------------


def _copy(stmt: Copy, names: Names) -> Iterator[Diagnostic]:
    source: Key = (split(stmt.name.id)[0], stmt.source)
    dest: Key = (split((stmt.target or stmt.name).id)[0], stmt.dest)
    held = [names.buffers[k] for k in (source, dest) if k in names.buffers]
    if stmt.shape is not None:
        shape: Shape | None = tuple(names.size(s, "a size of the tile") for s in stmt.shape)
    elif stmt.column is not None:
        shape = None
    else:
        shape = held[0].shape if held else None
    if stmt.column is not None:
        yield from _copy_into_columns(stmt, shape, names.buffers.get(dest), names)
        held = []
    for buffer in held:
        if shape is not None and buffer.shape != shape:
            text = f"the Copy moves {_text(shape)}, but `{buffer.name}` in {buffer.space} is "
            where = (Label(buffer.declared.span, "its size is set here"),)
            part = (stmt.source, stmt.dest) == ("global", "shared") and len(shape) == 2
            hint = None
            if part and len(buffer.shape) == 2 and shape[1] < buffer.shape[1]:
                hint = "a Copy that fills some columns names the first: `... to shared at column 0`"
            yield Diagnostic("FW304", text + show(buffer), stmt.span, secondary=where, help=hint)
    outer = [names.tensors[b] for b, s in (source, dest) if s == "global" and b in names.tensors]
    if stmt.adds and outer and outer[0].dtype != "fp32":
        text = f"`and accumulate` adds in fp32, `{outer[0].name}` is {outer[0].dtype}"
        where = (Label(outer[0].declared.span, "its type is set here"),)
        yield Diagnostic("FW205", text, stmt.span, secondary=where)
    if stmt.turn is not None and outer and not stmt.index:
        yield from _turns(stmt, outer[0], names)
    if stmt.index:
        yield from _by_index(stmt, shape, names)
    elif not outer:
        if stmt.coords and "global" not in (stmt.source, stmt.dest):
            text = "a coordinate applies only to a Copy from or to global memory"
            yield Diagnostic("FW305", text, stmt.coords[0].span, help="leave it out here")
    elif shape is None:
        text = "the Copy has no tile"
        tile = "(BM, HeadDim)" if len(outer[0].axes) > 1 else "(BM)"
        hint = f"give the tile: `Copy {stmt.name.id} {tile} in coordinate [...]`"
        if len(outer[0].axes) == 1:
            hint += f"; one element is `{outer[0].name}[...]`, without a Copy"
        yield Diagnostic("FW304", text, stmt.span, help=hint)
    else:
        yield from _coordinates(stmt, shape, outer[0], names)


def _by_index(stmt: Copy, shape: Shape | None, names: Names) -> Iterator[Diagnostic]:
    """Findings about an addition by index: clauses that it cannot have, tiles that do not fit."""
    if stmt.coords:
        text = "the index says where each element is added, so a coordinate has no meaning"
        yield Diagnostic("FW305", text, stmt.coords[0].span, help="leave it out here")
    if stmt.turn is not None:
        text = "an addition by index has no turn: elements of several tiles meet at one place"
        yield Diagnostic("FW613", text, stmt.turn.span, help="leave `at turn` out")
    for arg in stmt.index if shape is not None else ():
        try:
            _fits(arg, shape or (), names)
        except Misfit as misfit:
            yield Diagnostic("FW303", str(misfit), misfit.expr.span)


def _turns(stmt: Copy, tensor: Tensor, names: Names) -> Iterator[Diagnostic]:
    """Findings about additions at turns that do not count the same tiles."""
    assert stmt.turn is not None
    for coord in stmt.coords or ():
        if coord.in_elements:
            text = f"`at turn` counts additions to tiles, and {coord.axis.id} is in elements"
            hint = f"give it in tiles: `{coord.axis.id} = ...`"
            yield Diagnostic("FW613", text, coord.span, help=hint)
    copies = (s for s in statements(names.tree.body) if isinstance(s, Copy) and s.adds)
    for other in copies:
        if split((other.target or other.name).id)[0] != tensor.name:
            continue
        unlike = "without a turn" if other.turn is None else None
        if unlike is None and other.shape != stmt.shape:
            unlike = "in tiles of another size"
        if unlike is None and _ranged(other) != _ranged(stmt):
            unlike = "in tiles of a range" if _ranged(other) else "in tiles of the whole tensor"
        if unlike is not None:
            text = f"`{tensor.name}` is also accumulated {unlike}"
            where = (Label(other.span, "here"),)
            hint = "all additions to a tensor have a turn, and tiles of one kind, or none has"
            yield Diagnostic("FW613", text, stmt.span, secondary=where, help=hint)


def _ranged(copy: Copy) -> set[str]:
    """The axes along which a Copy counts from the beginning of a range."""
    return {c.axis.id for c in copy.coords or () if c.within is not None}


def _copy_into_columns(
    stmt: Copy, shape: Shape | None, buffer: Buffer | None, names: Names
) -> Iterator[Diagnostic]:
    """Findings about a Copy into some columns of a tile: it is allocated and wide enough."""
    assert stmt.column is not None
    target = stmt.target or stmt.name
    if (stmt.source, stmt.dest) != ("global", "shared"):
        text = "only a Copy from global to shared memory fills some columns of a tile"
        yield Diagnostic("FW304", text, stmt.column.span)
        return
    if buffer is None:
        text = f"`{target.id}` in shared memory is not allocated, so its width is unknown"
        hint = f"`Allocate {split(target.id)[0]} in shared (...)` with the width of all its parts"
        yield Diagnostic("FW304", text, target.span, help=hint)
        return
    try:
        value = evaluate(stmt.column, names.params)
    except NotScalar as problem:
        hint = "a column is a number made of params, known before the kernel runs"
        yield Diagnostic("FW306", problem.why, problem.culprit.span, help=hint)
        return
    column = whole(value)
    if column is None or column < 0:
        yield Diagnostic(
            "FW306", f"a column must be a whole number from 0, here it is {value}", stmt.column.span
        )
    elif shape is not None and (len(shape) != 2 or len(buffer.shape) != 2):
        text = "a Copy with `at column` needs two-dimensional tiles"
        yield Diagnostic("FW304", text, stmt.span)
    elif shape is not None and (shape[0] != buffer.shape[0] or column + shape[1] > buffer.shape[1]):
        text = f"the Copy fills {shape[0]} rows of columns {column}..{column + shape[1] - 1}, but "
        text += f"`{buffer.name}` in shared is {show(buffer)}"
        where = (Label(buffer.declared.span, "its size is set here"),)
        yield Diagnostic("FW304", text, stmt.span, secondary=where)


def _coordinates(stmt: Copy, shape: Shape, tensor: Tensor, names: Names) -> Iterator[Diagnostic]:
    labels = [a.label for a in tensor.axes]
    if len(shape) > len(labels):
        text = f"the tile has {len(shape)} axes, `{tensor.name}` has {len(labels)}"
        where = (Label(tensor.declared.span, "allocated here"),)
        yield Diagnostic("FW304", text, stmt.span, secondary=where)
        return
    given = [c.axis.id for c in stmt.coords or ()]
    for coord in stmt.coords or ():
        if coord.axis.id not in labels:
            text = f"`{tensor.name}` has no axis {coord.axis.id}; its axes are {', '.join(labels)}"
            where = (Label(tensor.declared.span, "allocated here"),)
            hint = f"name the axes where it is allocated: `({coord.axis.id}: ..., L: ...)`"
            yield Diagnostic("FW209", text, coord.axis.span, secondary=where, help=hint)
        elif given.count(coord.axis.id) > 1:
            yield Diagnostic("FW202", f"axis {coord.axis.id} is given twice", coord.span)
    if not set(given) <= set(labels):
        return
    tiled = labels[len(labels) - len(shape) :]
    for coord in stmt.coords or ():
        if coord.within is not None and coord.axis.id in tiled[1:]:
            if (stmt.source, stmt.dest) == ("global", "register") and not coord.in_elements:
                continue
            text = f"a range cannot be of the tile's columns, along {coord.axis.id}, "
            text += "except in tiles that are loaded to registers"
            hint = f"give `in ...` to axis {tiled[0]}, or leave it out"
            yield Diagnostic("FW305", text, coord.span, help=hint)
    yield from _pages(stmt, tiled, tensor, names)
    for axis in tensor.axes:
        spans = axis.label in tiled and _covers_axis(
            axis.size, shape[tiled.index(axis.label)], names
        )
        if axis.label not in given and not spans:
            text = f"the Copy has no coordinate on axis {axis.label} of `{tensor.name}`"
            where = (Label(tensor.declared.span, f"{axis.label} is {format_expr(axis.size)} long"),)
            hint = f"add `{axis.label} = ...` to the coordinate"
            yield Diagnostic("FW305", text, stmt.span, secondary=where, help=hint)


def _pages(stmt: Copy, tiled: list[str], tensor: Tensor, names: Names) -> Iterator[Diagnostic]:
    """Findings about a Copy whose rows lie in pages."""
    coords = {c.axis.id: c for c in stmt.coords or ()}
    naming = [c for c in coords.values() if Name(PAGE) in expressions(c.value)]
    if not naming:
        return
    rows, size = tiled[0], next(a.size for a in tensor.axes if a.label == tiled[0])
    kept = tensor.declared.in_place or stmt.adds
    if stmt.dest == "global" and [c.value for c in naming] != [Name(PAGE)] and not kept:
        text = f"data name the pages that are written, so `{tensor.name}` keeps what others hold"
        where = (Label(tensor.declared.span, "allocated here"),)
        place = f"{naming[0].axis.id} = {PAGE}"
        hint = f"add `in place` to its Allocate, or store along an axis: `{place}`"
        yield Diagnostic("FW305", text, naming[0].span, secondary=where, help=hint)
    for coord in (c for c in naming if c.axis.id in tiled):
        text = f"`{PAGE}` says where a page is, and along {coord.axis.id} lies the tile"
        yield Diagnostic(
            "FW305", text, coord.span, help=f"count positions: `{rows} = i in 0:length`"
        )
    if rows not in coords or coords[rows].within is None:
        text = "pages hold positions, and the Copy does not say how many there are"
        at = coords[rows].span if rows in coords else stmt.span
        hint = f"`{rows} = i in 0:length`: positions are counted over all pages of a sequence"
        yield Diagnostic("FW305", text, at, help=hint)
    try:
        evaluate(size, names.params)
    except NotScalar:
        text = f"the length of a page is a number, and {rows} is {format_expr(size)} long"
        where = (Label(tensor.declared.span, "allocated here"),)
        hint = "let it be a param: `param PageSize = 64`"
        yield Diagnostic("FW306", text, stmt.span, secondary=where, help=hint)


def _covers_axis(size: Expr, tile: int, names: Names) -> bool:
    """Whether a tile covers its whole axis, so that there is only one place for it."""
    try:
        value = evaluate(size, names.params)
    except NotScalar:
        return False
    return not isinstance(value, Unknown) and tile >= value


def _reshape(stmt: Reshape, names: Names) -> Iterator[Diagnostic]:
    forms = [layout[0].id.upper() for layout in (stmt.source, stmt.dest)]
    if forms != ["MMA_C", "MMA_A"]:
        text = "a Reshape turns the result of a GEMM (MMA_C) into an operand (MMA_A)"
        hint = "`Reshape S from (MMA_C, MMA_M, MMA_N) to (MMA_A, MMA_M, MMA_N_new)`"
        yield Diagnostic("FW502", text, stmt.span, help=hint)
    held = _held(stmt.name, names)
    if held is not None and (held.space != "register" or len(held.shape) != 2):
        text = f"a Reshape works on a two-dimensional register tile; `{stmt.name.id}` is not one"
        yield Diagnostic("FW502", text, stmt.name.span)
    target = _held(stmt.target, names) if stmt.target else None
    if held is not None and target is not None and held.shape != target.shape:
        assert stmt.target is not None
        text = f"`{stmt.name.id}` is {show(held)}, `{stmt.target.id}` is {show(target)}"
        yield Diagnostic("FW302", text, stmt.target.span)
