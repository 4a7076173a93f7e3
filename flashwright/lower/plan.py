"""The launch plan of a kernel, and the order in which its blocks start."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any, Literal, TypeVar

from flashwright.gpu import Gpu
from flashwright.lang import nodes as tl
from flashwright.lang.nodes import Binary, Call, Expr, Index, Name, Num, Unary
from flashwright.lower import ir
from flashwright.lower.frontend.scalars import refused
from flashwright.lower.launch_plan import (
    OPERATORS,
    LaunchPlan,
    PlanAxis,
    PlanMap,
    PlanTensor,
    Postfix,
)
from flashwright.lower.names import cpp
from flashwright.lower.printing.rules import adds_in_lines, in_lines
from flashwright.lower.targets.swizzle import swizzle_bytes
from flashwright.lower.targets.tensor_maps import loaded_pieces, tma_optional_tiles
from flashwright.lower.term import Binary as TermBinary
from flashwright.lower.term import (
    Term,
    Var,
    binary,
    call,
    integer,
    minus,
    plus,
    reads_memory,
    substitute,
    variables,
)
from flashwright.program.program import Program, Tensor
from flashwright.program.scalars import NotScalar, Reader, Value, apply, evaluate
from flashwright.program.vocabulary import DTYPES

Axis = TypeVar("Axis")
BYTES_AT_ONCE = 16
L2_SHARE = 0.4  # it has two halves, and what both read is in both
REACHED = 0.6  # of the tensor cores' rate: about what the kernels do
MEMORY_SHARE = 0.8  # of its bandwidth that keys may take
POSITIONS = 4096  # of queries and of keys, to see which blocks take longest
FAR = 16 * POSITIONS  # where that is seen only between blocks that lie far apart
WAVES_WITH_TURNS = 16  # on an H200 about as fast as 4 (docs/performance.md)
_SIGNS = {"+": "+", "-": "-", "*": "*", "mod": "%", "floor_div": "/"}


def make_plan(program: Program, gpu: Gpu, kernel: ir.Kernel, shared: int) -> LaunchPlan:
    """All that a caller must know."""
    if len(program.grid.axes) > 3:
        raise refused("a grid has at most three axes", program.grid.span)
    roles = any(isinstance(n, ir.Roles) for n in kernel.body)
    counts = _counts(program)
    return LaunchPlan(
        entry="attention",
        arch=gpu.arch,
        threads=32 * (program.warps + (1 + kernel.helpers if roles else 0)),
        shared=shared,
        grid=(reduce(_product, counts),) if roles else launch_order(program, counts),
        stays=roles and program.schedule.persistent,
        counter=kernel.queued,
        dims=program.dims,
        tensors=tuple(
            _tensor(t, program, kernel)
            for t in (*program.tensors.values(), *program.counters.values())
        ),
        maps=tuple(_maps(program, kernel)) if roles else (),
    )


def _maps(program: Program, kernel: ir.Kernel) -> Iterator[PlanMap]:
    """The boxes that TMA loads: as many rows as the tile, or as lie in one page, and as wide as its
    swizzle."""
    optional = tma_optional_tiles(kernel.body)
    for (key, _, tensor), piece in loaded_pieces(program, kernel).items():
        buffer = program.buffers[key]
        rows, cols = buffer.shape
        size = DTYPES[buffer.dtype]
        swizzle = swizzle_bytes(cols * size)
        window = piece.window
        outer = len(window.coordinates) - 2
        box = (*(1,) * outer, window.page_rows or rows, swizzle // size)
        yield PlanMap(
            tensor=tensor,
            box=box,
            swizzle=swizzle,
            ranges=window.last is not None and window.page_rows is None,
            pages=window.page_rows is not None,
            optional=key in optional,
        )


def _counts(program: Program) -> tuple[Postfix, ...]:
    """The blocks along each axis of the grid."""
    return tuple(_ceiling(_difference(a.high, a.low), program) for a in program.grid.axes)


def _difference(high: Expr, low: Expr) -> Expr:
    return high if low == Num("0") else Binary("-", high, low)


def _tensor(tensor: Tensor, program: Program, kernel: ir.Kernel) -> PlanTensor:
    size = DTYPES[tensor.dtype]
    lines = any(
        (isinstance(n, ir.Load) and any(w.tensor is tensor and w.chunked for w in n.windows))
        or (
            isinstance(n, ir.Store)
            and n.window.tensor is tensor
            and len(program.buffers[n.source].shape) == 2
            and (
                n.source[1] == "shared"
                or in_lines(n, program.buffers[n.source])
                or adds_in_lines(n, program.buffers[n.source], kernel)
            )
        )
        for n in ir.flat(kernel.body)
    )
    return PlanTensor(
        name=tensor.name,
        dtype=tensor.dtype,
        axes=tuple(PlanAxis(label=a.label, size=_postfix(a.size, program)) for a in tensor.axes),
        read=tensor.read or tensor.kept,
        written=tensor.written,
        vector=BYTES_AT_ONCE // size if lines else 1,
        flat=tensor.offset is not None,
        fragments=tensor.declared.fragments,
    )


# --- sizes in postfix form --------------------------------------------------------------------


def _ceiling(expr: Expr, program: Program) -> Postfix:
    above, below = _fraction(expr, program)
    return above if below == (1,) else (*above, *below, "ceil_div")


def _postfix(expr: Expr, program: Program) -> Postfix:
    above, below = _fraction(expr, program)
    return above if below == (1,) else (*above, *below, "floor_div")


def _fraction(expr: Expr, program: Program) -> tuple[Postfix, Postfix]:
    """Numerator and denominator, each an integer expression over the dimensions."""
    try:
        value = evaluate(expr, program.params)
        if not isinstance(value, (float, str)):
            return (int(value.numerator),), (int(value.denominator),)
    except NotScalar:
        pass
    match expr:
        case Name(id) if id in program.dims:
            return (id,), (1,)
        case Unary("-", operand):
            above, below = _fraction(operand, program)
            return (0, *above, "-"), below
        case Binary("+" | "-" as op, left, right):
            (a, b), (c, d) = _fraction(left, program), _fraction(right, program)
            if b == d:
                return (*a, *c, op), b
            return (*a, *d, "*", *c, *b, "*", op), (*b, *d, "*")
        case Binary("*", left, right):
            (a, b), (c, d) = _fraction(left, program), _fraction(right, program)
            return (*a, *c, "*"), _product(b, d)
        case Binary("/", left, right):
            (a, b), (c, d) = _fraction(left, program), _fraction(right, program)
            return (*a, *d, "*") if d != (1,) else a, _product(b, c)
        case Call(func, (operand,)) if func.id.lower() in ("floor", "ceil"):
            above, below = _fraction(operand, program)
            return (*above, *below, f"{func.id.lower()}_div"), (1,)
        case Call(func, (left, right)) if func.id.lower() in ("min", "max"):
            (a, b), (c, d) = _fraction(left, program), _fraction(right, program)
            if b != d:
                a, c, b = (*a, *d, "*"), (*c, *b, "*"), (*b, *d, "*")
            return (*a, *c, func.id.lower()), b
    raise refused("a size that a launch cannot compute", expr.span)


def _product(a: Postfix, b: Postfix) -> Postfix:
    if a == (1,):
        return b
    return a if b == (1,) else (*a, *b, "*")


# --- the order of blocks ----------------------------------------------------------------------


def launch_order(program: Program, axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
    """The axes of the grid, the one along which thread blocks start first at the front. Where they
    take turns, that is not the first one: those that wait for each other start far apart."""
    return (*axes[1:], axes[0]) if program.counters else axes


def ordered(program: Program, grid: tuple[ir.GridAxis, ...]) -> tuple[ir.GridAxis, ...]:
    """The axes with their counts, and where the tiles with the most iterations are: these come
    first, so that no long one is left for the end."""
    grid = tuple(replace(a, count=_term(c)) for a, c in zip(grid, _counts(program), strict=True))
    if program.counters:  # turns rise along the first axis: thread blocks wait for those before
        return (replace(grid[0], longest="first"), *grid[1:])
    return (replace(grid[0], longest=_longest(program)), *grid[1:])


def _longest(program: Program) -> Literal["first", "last"] | None:
    """Where the blocks with the most iterations are, among those of a sequence if there are such;
    None if all have as many, or data decide."""
    elements = (_rising,) if sequences(program) else (_zero, _rising)
    found = {_longest_if(program, element) for element in elements}
    return found.pop() if len(found) == 1 else None


def _longest_if(program: Program, element: Reader) -> Literal["first", "last"] | None:
    """The same for tensors with these elements."""
    loops = program.outer_loops
    few, many = (_iterations(program, loops[0], n, element) if loops else None for n in (0, 7))
    if few is None or many is None:
        return None
    if many == few:
        return _longest_far_apart(program, loops[0], element)
    return "last" if many > few else "first"


def _longest_far_apart(
    program: Program, loop: tl.For, element: Reader
) -> Literal["first", "last"] | None:
    """The same where the first blocks have as many, as behind a prefix that all queries see. A few
    shorter blocks at one end, as those of a window, are no order."""
    blocks = _blocks(program, FAR)
    if blocks is None:
        return None
    each = [_iterations(program, loop, blocks * n // 16, element, FAR) for n in range(16)]
    rising = sorted(n for n in each if n is not None)
    if len(rising) < len(each) or len(set(each)) < 4:
        return None
    return "last" if each == rising else "first" if each == rising[::-1] else None


def _zero(element: Index, place: Sequence[Value]) -> Value:
    return 0


def _rising(element: Index, place: Sequence[Value]) -> Value:
    """Elements as those of a tensor that says where sequences begin, or how long they are."""
    return apply("*", element, [POSITIONS, apply("+", element, [place[-1], 1])])


def scheduler_waves(program: Program, gpu: Gpu, kernel: ir.Kernel) -> int:
    """The waves in a group of tiles (device/fw/tile_scheduler.cuh); 0 where all tiles take as long,
    -1 where data decide how long, or where tiles at the end are shorter, as those of a window.

    An even number, for which about all that the group's tiles read in their loops stays in the L2,
    with some room for what they write. Where memory is fast enough to be read anew by each tile, a
    group has twice as many waves, which balances the load better. Where tiles take turns, many
    columns at once let few tiles of each wait for one another."""
    if kernel.grid[0].longest is None:
        loops = program.outer_loops
        by_data = any(program.sources(bound) for s in loops for bound in (s.low, s.high))
        return -1 if by_data or (loops and _shorter_at_the_end(program, loops[0])) else 0
    if program.counters:
        return WAVES_WITH_TURNS
    inner = [n for lp in ir.flat(kernel.body) if isinstance(lp, ir.Loop) for n in ir.flat(lp.body)]
    loads = {n.dest for n in inner if isinstance(n, ir.Load)}
    tiles = [program.buffers[key] for key in loads if len(program.buffers[key].shape) == 2]
    added = {n.source for n in inner if isinstance(n, ir.Store) and n.adds}
    moved = [*tiles, *(program.buffers[key] for key in added)]
    held = (b.shape for b in program.buffers.values() if b.space == "register")
    rows, widths = max(s[0] for s in held if len(s) == 2), sum(b.shape[1] for b in tiles)
    line = sum(b.bytes // b.shape[0] for b in moved)  # bytes read or added to for one key
    multiplied = (b.dtype for b in tiles if b.dtype in gpu.tensor_flops)  # a bias may be fp32
    rate = REACHED * min((gpu.tensor_flops[d] for d in multiplied), default=0.0)
    fitting = 2 * max(1, round(L2_SHARE * gpu.l2_bytes / max(2 * gpu.sms * rows * line, 1)))
    enough = rate * line < MEMORY_SHARE * gpu.bandwidth * 2 * rows * widths
    return 2 * fitting if enough else fitting


def sequences(program: Program) -> ir.Sequences | None:
    """The sequences whose tiles are the only ones with work: a program that does everything under
    `block_idx * BM < Starts[batch_idx + 1] - Starts[batch_idx]`."""
    work = [s for s in program.tree.body if not isinstance(s, _DECLARING)]
    axes = program.grid.axes
    if len(work) != 1 or len(axes) != 3 or any(axis.low != Num("0") for axis in axes):
        return None
    lets = {s.name: s.value for s in program.tree.body if isinstance(s, tl.Let)}

    def seen(expr: Expr) -> Expr:
        while expr in lets:
            expr = lets[expr]
        return expr

    match work[0], axes[0].high:
        case tl.If(Binary("<", Binary("*", block, rows), length), _, ()), Binary("/", _, per):
            if block != axes[0].name or rows != per:
                return None
            match seen(length):
                case Binary("-", last, first):
                    starts = _starts(seen(first), seen(last), axes[2].name)
                    size = evaluate(rows, program.params)
                    return ir.Sequences(starts, int(size)) if starts else None
    return None


def work_by_data(kernel: ir.Kernel, roles: ir.Roles) -> ir.Work | None:
    """How much a tile's loops do, if tensors say so and only the place along the grid's first axis
    decides: then blocks can be sorted by it."""
    body = roles.producer
    loops = [n for n in body if isinstance(n, ir.Loop)]
    amounts = [_iterated(loop) for loop in loops]
    if not loops or None in amounts:
        return None
    amount = reduce(plus, [a for a in amounts if a is not None])
    needed, defined = variables(amount), list[ir.Define]()
    for node in reversed(body):
        if isinstance(node, ir.Define) and node.name in needed:
            if node.varies or node.again:
                return None
            needed |= variables(node.value) | variables(node.below)
            defined.append(node)
    terms = [amount, *(n.value for n in defined)]
    others = {axis.name for axis in kernel.grid[1:]}
    inner = {n.name for n in ir.flat(body) if isinstance(n, ir.Define)} - {n.name for n in defined}
    if not any(map(reads_memory, terms)) or needed & (others | inner | {n.var for n in loops}):
        return None
    return ir.Work(tuple(reversed(defined)), amount)


def _iterated(loop: ir.Loop) -> Term | None:
    """The iterations of a loop, or a multiple of them."""
    match loop.condition:
        case TermBinary("<", place, end) if loop.var not in variables(end):
            return minus(end, substitute(place, {loop.var: loop.low}))
    return None


_DECLARING = (tl.Param, tl.Dim, tl.Let, tl.Grid, tl.Allocate, tl.Comment)


def _starts(first: Expr, last: Expr, sequence: Name) -> str | None:
    """The tensor of which these are the elements of a sequence and of the next one."""
    match first, last:
        case Index(tensor, (one,)), Index(other, (Binary("+", at, Num("1")),)):
            return tensor.id if tensor == other and one == at == sequence else None
    return None


def _term(size: Postfix) -> Term:
    """A size as a term of the kernel."""
    stack: list[Term] = []
    for token in size:
        if isinstance(token, int):
            stack.append(integer(token))
        elif token not in OPERATORS:
            stack.append(Var(cpp(token)))
        else:
            right, left = stack.pop(), stack.pop()
            if token in _SIGNS:
                stack.append(binary(_SIGNS[token], left, right))
            else:
                stack.append(call(token, left, right, type="int"))
    (found,) = stack
    return found


def _shorter_at_the_end(program: Program, loop: tl.For) -> bool:
    """Whether the last block of a square problem has other iterations than the first."""
    last = (_blocks(program, POSITIONS) or 1) - 1
    return bool(_iterations(program, loop, last, _zero) != _iterations(program, loop, 0, _zero))


def _blocks(program: Program, positions: int) -> int | None:
    """The blocks along the first axis of a square problem; None if data decide."""
    try:
        high = program.grid.axes[0].high
        count = evaluate(high, {**program.params, **dict.fromkeys(program.dims, positions)})
    except NotScalar:
        return None
    return None if isinstance(count, str) else math.ceil(count)


def _iterations(
    program: Program, loop: tl.For, block: int, element: Reader, positions: int = POSITIONS
) -> Any:
    """Iterations of the loop in one block of a square problem; None if data decide."""
    env: dict[str, Any] = {**program.params, **dict.fromkeys(program.dims, positions)}
    env |= {a.name.id: 0 for a in program.grid.axes} | {program.grid.axes[0].name.id: block}
    try:
        for stmt in program.tree.body:
            if isinstance(stmt, tl.Let):
                env[stmt.name.id] = evaluate(stmt.value, env, element)
        return evaluate(loop.high, env) - evaluate(loop.low, env)  # type: ignore[operator]
    except (NotScalar, TypeError):
        return None
