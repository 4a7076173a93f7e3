"""The backward pass as TL: the preprocess kernel, the main kernel and the conversion kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from flashwright.grad.adjoint import Leaf
from flashwright.grad.algebra import (
    ONE,
    ZERO,
    Product,
    Step,
    add,
    call,
    constant,
    div,
    mul,
    per_element,
    renamed,
    sub,
    substitute,
    total,
    values_in,
)
from flashwright.grad.derive import Backward, tidy
from flashwright.grad.invert import query_bounds
from flashwright.grad.normalise import KEY, QUERY, Forward, Load, refuse
from flashwright.grad.tiles import Writer
from flashwright.lang.nodes import (
    Allocate,
    Axis,
    Binary,
    Call,
    Comment,
    Compute,
    Coord,
    Copy,
    Dim,
    Expr,
    For,
    Grid,
    GridAxis,
    Index,
    Let,
    Mode,
    Name,
    Num,
    Param,
    Side,
    Space,
    Statement,
    Tree,
    expressions,
    statements,
    value_names,
)
from flashwright.program.program import Tensor
from flashwright.program.vocabulary import RESERVED_PARAMS

TILE = Num("64")
WARPS = Param(Name("Warps"), Num("4"))
FLOATS = ("fp16", "bf16", "fp32")


def emit(back: Backward) -> tuple[Tree, tuple[str, ...]]:
    """The kernels of a backward pass with their declarations, and the gradients' names."""
    program = _Program(back)
    main = program.main()
    kernels = [*program.preprocess(), *main, *program.conversion(), *program.reduction()]
    return Tree((*program.declarations(kernels), *kernels)), tuple(program.outputs())


@dataclass(frozen=True)
class _Sum:
    """A gradient that blocks add up in fp32: its scratch tensor, and the factor that is left."""

    tensor: Tensor
    factor: Expr
    load: Load


@dataclass(frozen=True)
class _Parts:
    """The gradient of a number per head, before its sum over the batch and a sequence."""

    tensor: Tensor
    name: str
    length: Expr
    tile: Expr


@dataclass
class _Program:
    back: Backward
    globals: dict[str, Allocate] = field(default_factory=dict)
    sums: dict[str, _Sum] = field(default_factory=dict)
    parts: list[_Parts] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.forward = self.back.forward
        self.program = self.forward.program
        self.sizes: dict[str, Expr] = {}
        for load in self.forward.loads.values():
            self.sizes |= dict(zip(load.axes, load.copy.shape or (), strict=True))
        pairs = [v for v in self.forward.loads.values() if set(v.axes) == {QUERY, KEY}]
        self.pair = (QUERY, KEY) if pairs else (KEY, QUERY)
        self.output = next(iter(self.back.given.values()))
        self.half = self._operand_type()

    def _operand_type(self) -> str:
        """The type of GEMM operands: that of the keys; Failed if it is no 16-bit type."""
        keys = [t for t in self.forward.loads.values() if KEY in t.axes and len(t.axes) == 2]
        for load in keys:
            if load.tensor.dtype not in ("fp16", "bf16"):
                why = f"`{load.tensor.name}` is {load.tensor.dtype}: gradients need fp16 or bf16"
                raise refuse(load.tensor.declared.span, why)
        return next((load.tensor.dtype for load in keys if QUERY not in load.axes), "fp16")

    # --- declarations -------------------------------------------------------------------------

    def declarations(self, kernels: Sequence[Statement]) -> list[Statement]:
        """The title, the params and dims that the kernels use, and the tensors."""
        parts = [e for s in statements(tuple(kernels)) for e in expressions(s)]
        used = {n.id for e in parts for n in value_names(e)}
        for part in parts:
            if isinstance(part, Index):
                self._declare_input(self.program.tensors[part.tensor.id])
        tensors = sorted(self.globals.values(), key=self._rank)
        used |= {n.id for t in tensors for axis in t.shape for n in value_names(axis.size)}
        params: list[Statement] = []
        for stmt in reversed(self.program.tree.body):
            if isinstance(stmt, Param) and stmt.name.id in used - set(RESERVED_PARAMS):
                used |= {n.id for n in value_names(stmt.value)}
                params.append(self._param(stmt))
            if isinstance(stmt, Dim) and {n.id for n in stmt.names} & used:
                params.append(replace(stmt, gap=True))
        first = Comment(f"The backward pass: {', '.join(self.outputs())}.")
        notes = [Comment(f"No gradient of {name}: {why}.") for name, why in self.missing.items()]
        if self.parts:
            params.insert(0, Param(Name("BH"), Num("16"), comment="heads per block of a reduction"))
        return [first, *notes, *params[::-1], *_gapped(tensors)]

    def _rank(self, stmt: Allocate) -> int:
        """The order of tensors: the forward's, the given gradients, scratch, the gradients."""
        name = stmt.name.id
        if name in self.program.tensors:
            return 0
        given = {f"d{store.tensor.name}" for store in self.back.given.values()}
        return 1 if name in given else 3 if name in self.outputs() else 2

    def _param(self, stmt: Param) -> Param:
        tiles = (self.sizes.get(QUERY), self.sizes.get(KEY))
        value = TILE if stmt.name in tiles else stmt.value
        notes = {0: "queries per step", 1: "keys per thread block"}
        note = notes[tiles.index(stmt.name)] if stmt.name in tiles else None
        return replace(stmt, value=value, comment=note, gap=False)

    def outputs(self) -> list[str]:
        """The names of the gradients that the kernels write."""
        given = {f"d{store.tensor.name}" for store in self.back.given.values()}
        inputs = [f"d{t.name}" for t in self.program.inputs]
        return [n for n in inputs if n in self.globals and n not in given]

    def _tensor(self, name: str, like: Tensor, dtype: str, axes: int | None = None) -> None:
        """Declare a tensor with the axes of another one, or with the first of them."""
        shape = like.declared.shape[:axes]
        if any(axis.label is None for axis in shape) and axes is not None and len(shape) != 3:
            labels = [Name(a.label) for a in like.axes]
            shape = tuple(Axis(n, a.size) for n, a in zip(labels, shape, strict=False))
        self.globals.setdefault(name, Allocate(Name(name), "global", shape, Name(dtype)))

    def new_name(self, name: str) -> Name:
        """A name that the forward program does not use."""
        taken = {base for base, _ in self.program.buffers} | self.program.tensors.keys()
        while name in taken or self.program.is_scalar(name):
            name += "_"
        return Name(name)

    def writer(self) -> Writer:
        """The writer of a kernel."""
        return Writer(self.forward, self.pair, self.sizes, self.half, self.globals)

    # --- the preprocess kernel ----------------------------------------------------------------

    def preprocess(self) -> list[Statement]:
        """Delta, and what else of the epilogue's adjoint the main kernel reads."""
        partial, tiles = self._row_parts(), self._row_tiles()
        steps = [*self.back.rows, *partial, *tiles]
        if not steps:
            return []
        write = self.writer()
        read = {v for s in steps for v in values_in(s.value)} - {s.target for s in steps}
        for value in sorted(read):
            write.load(value, self.row_copy(value), "register")
        stored = [*self.back.scratch, *(s.target for s in partial)]
        write.uses(steps, stored)
        for n, step in enumerate(steps):
            write.step(n, step)
        for value in stored:
            write.body.append(replace(self.row_copy(value), source="register", dest="global"))
        for step in tiles:
            (copy,) = [
                load.copy
                for load in self.forward.loads.values()
                if f"d{load.tensor.name}.0" == step.target
            ]
            name = Name(write.base[step.target])
            out = replace(copy, name=name, source="register", dest="global", target=None)
            write.body.append(out)
        title = Comment("Preprocess: what the main kernel needs of each query.", gap=True)
        grid = Grid(self.program.grid.axes)
        return [title, grid, WARPS, *write.allocated.values(), *write.body]

    def _row_parts(self) -> list[Step]:
        """The gradients of numbers per head that the epilogue and the first values use."""
        made = []
        for leaf, terms in self.back.row_grads.items():
            if isinstance(leaf, Index) and self.per_head(leaf):
                step = Step(
                    f"d{leaf.tensor.id}parts.0", kept_along(self.forward, total(terms), QUERY)
                )
                self.forward.axes[step.target] = (QUERY,)
                self._add_parts(leaf, QUERY)
                made.append(step)
        return made

    def _row_tiles(self) -> list[Step]:
        """The gradients of tiles that only the epilogue reads (a gate on the output)."""
        made = []
        for leaf, terms in self.back.row_grads.items():
            if not isinstance(leaf, str):
                continue
            load = self.forward.loads[leaf]
            grid = {a.name.id for a in self.program.grid.axes}
            if leaf in self.back.grads or not grid <= _names(load.copy):
                self.missing[load.tensor.name] = "several blocks read each of its elements"
                continue
            self.forward.axes[f"d{load.tensor.name}.0"] = load.axes
            self._tensor(f"d{load.tensor.name}", load.tensor, load.tensor.dtype)
            made.append(Step(f"d{load.tensor.name}.0", total(terms)))
        return made

    def per_head(self, leaf: Index) -> bool:
        """Whether an element is a number per head, so that its gradient is a sum over rows."""
        tensor = self.program.tensors[leaf.tensor.id]
        heads = [a for a in self.output.copy.coords or () if a.value == leaf.args[0]]
        single = (
            len(leaf.args) == 1 and tensor.dtype == "fp32" and len(self.output.tensor.axes) == 4
        )
        if tensor.dtype in FLOATS and not (single and heads):
            self.missing[tensor.name] = "its index is not the head alone"
        elif leaf in self.back.grads and leaf in self.back.row_grads:
            self.missing[tensor.name] = "the loop and the rows both use it"
        return tensor.name not in self.missing and tensor.dtype in FLOATS

    def _add_parts(self, leaf: Index, side: str) -> None:
        tensor, output = self.program.tensors[leaf.tensor.id], self.output.tensor
        length = output.axes[2].size if side == QUERY else key_length(self)
        name = f"d{tensor.name}parts"
        shape = (*output.declared.shape[:2], replace(output.declared.shape[2], size=length))
        self.globals[name] = Allocate(Name(name), "global", shape, Name("fp32"))
        self._tensor(f"d{tensor.name}", tensor, tensor.dtype)
        self.parts.append(_Parts(tensor, name, length, self.sizes[side]))

    def key_parts(self, leaf: Index) -> str:
        """The scratch tensor for the gradient of a number per head, by keys or by queries."""
        self._add_parts(leaf, self.pair[0])
        return f"d{leaf.tensor.id}parts"

    def reduction(self) -> list[Statement]:
        """The gradients of numbers per head: sums over the batch and the sequence."""
        made: list[Statement] = []
        for item in self.parts:
            name, rows, block = Name(f"d{item.tensor.name}"), Name("BH"), Name("block_idx")
            heads = item.tensor.axes[0]
            batch, place = self.output.tensor.axes[0].size, Name("batch_idx")
            coords = tuple(map(Coord, map(Name, "BHL"), (place, block, Name("i"))))
            body: tuple[Statement, ...] = (
                Copy(Name(item.name), (rows, item.tile), coords, "global", "register"),
                Compute(
                    None, (Call(Name("rowsum"), (Name(item.name),)),), (), None, "accumulate", name
                ),
            )
            made += [
                Comment(f"Reduction: {name.id}, summed over the sequence and the batch.", gap=True),
                Grid((GridAxis(block, ZERO, div(heads.size, rows)), GridAxis(place, ZERO, batch))),
                replace(WARPS, value=ONE),
                Allocate(name, "register", (Axis(None, rows),), Name("fp32")),
                Compute(None, (ZERO,), mode="get", target=name),
                For(Name("i"), ZERO, div(item.length, item.tile), body),
                Copy(
                    name,
                    (rows,),
                    (Coord(Name(heads.label), block),),
                    "register",
                    "global",
                    adds=True,
                ),
            ]
        return made

    def row_copy(self, value: str) -> Copy:
        """The Copy of a value that lies along the queries: saved, given, scratch or loaded."""
        name = value.split(".")[0]
        load = self.forward.loads.get(value)
        if load is not None:
            self._declare_input(load.tensor)
            return load.copy
        store = self.back.saved.get(value) or self.back.given.get(value)
        if store is not None:
            given = value in self.back.given
            self._tensor(name, store.tensor, self.half if given else store.tensor.dtype)
            return replace(store.copy, name=Name(name), target=None)
        return self._scratch_copy(name, value)

    def _scratch_copy(self, name: str, value: str) -> Copy:
        copy, tensor = self.output.copy, self.output.tensor
        if self.forward.axes[value] != (QUERY,):
            self._tensor(name, tensor, self.half)
            return replace(copy, name=Name(name), target=None)
        self._tensor(name, tensor, "fp32", len(tensor.axes) - 1)
        last = tensor.axes[-1].label
        coords = tuple(c for c in copy.coords or () if c.axis.id != last)
        return replace(
            copy, name=Name(name), target=None, coords=coords, shape=(copy.shape or ())[:1]
        )

    def _declare_input(self, tensor: Tensor) -> None:
        self.globals.setdefault(tensor.name, replace(tensor.declared, comment=None, gap=False))

    # --- the main kernel ----------------------------------------------------------------------

    def main(self) -> list[Statement]:
        """A block owns keys and loops over the queries that see them."""
        for value in self.back.forward.loads:
            if value in self.read():
                self._declare_input(self.forward.loads[value].tensor)
        needed = {v for s in self.back.rows for v in values_in(s.value)} | self.read()
        for value in (*self.back.saved, *self.back.given, *self.back.scratch):
            if value in needed:
                self.row_copy(value)
        owner = _owner(self)
        made = _Main(self, owner)
        for load in self.forward.loads.values():
            if load.value in self.back.grads:
                self._tensor(f"d{load.tensor.name}", load.tensor, load.tensor.dtype)
        return made.kernel()

    def read(self) -> set[str]:
        """The values that the main kernel reads."""
        exprs = [s.value for s in self.back.body]
        exprs += [d for ds in self.back.grads.values() for d in ds]
        return {v for e in exprs for v in values_in(e)}

    def scratch_sum(self, load: Load, factor: Expr) -> str:
        """The fp32 tensor that blocks add a gradient to; it is converted afterwards."""
        name = f"d{load.tensor.name}sum"
        self._tensor(name, load.tensor, "fp32")
        self.sums[load.tensor.name] = _Sum(load.tensor, factor, load)
        return name

    # --- the conversion kernel ----------------------------------------------------------------

    def conversion(self) -> list[Statement]:
        """The gradients that were added up in fp32, scaled and rounded."""
        made: list[Statement] = []
        groups: dict[tuple[GridAxis, ...], list[_Sum]] = {}
        for item in self.sums.values():
            groups.setdefault(self._grid_of(item), []).append(item)
        for axes, items in groups.items():
            write = self.writer()
            for item in items:
                self._convert(write, item, axes)
            names = ", ".join(f"d{item.tensor.name}" for item in items)
            title = Comment(f"Conversion: the sums of {names}, rounded.", gap=True)
            made += [title, Grid(axes), WARPS, *write.allocated.values(), *write.body]
        return made

    def _grid_of(self, item: _Sum) -> tuple[GridAxis, ...]:
        """A block for each tile of the tensor."""
        axes: list[GridAxis] = []
        tiled = len(item.tensor.axes) - len(item.load.axes)
        for n, axis in enumerate(item.tensor.axes):
            side = item.load.axes[n - tiled] if n >= tiled else ""
            if n < tiled:
                axes.append(GridAxis(Name(_index_name(axis.label)), ZERO, axis.size))
            elif side in (QUERY, KEY):
                name = Name("block_idx" if side == item.load.axes[0] else "column_idx")
                axes.append(GridAxis(name, ZERO, div(axis.size, self.sizes[side])))
        return tuple(reversed(axes))

    def _convert(self, write: Writer, item: _Sum, axes: tuple[GridAxis, ...]) -> None:
        tensor, load = item.tensor, item.load
        names = {axis.name.id for axis in axes}
        tiled = len(tensor.axes) - len(load.axes)
        coords, shape = [], []
        for n, axis in enumerate(tensor.axes):
            side = load.axes[n - tiled] if n >= tiled else ""
            place = _index_name(axis.label)
            if side in (QUERY, KEY):
                place = "block_idx" if side == load.axes[0] else "column_idx"
                shape.append(self.sizes[side])
            elif n >= tiled:
                shape.append(axis.size)
                continue
            assert place in names
            coords.append(Coord(Name(axis.label), Name(place)))
        name = f"d{tensor.name}"
        copy = Copy(Name(f"{name}sum"), tuple(shape), tuple(coords), "global", "register")
        value, total_value = f"{name}.out", f"{name}sum.in"
        self.forward.axes |= {value: load.axes, total_value: load.axes}
        write.load(total_value, copy, "register")
        write.step(0, Step(value, mul(Name(total_value), item.factor)))
        stored = tuple(Axis(None, size) for size in shape)
        key: tuple[str, Space] = (write.base[value], "register")
        write.allocated[key] = replace(write.allocated[key], shape=stored)
        write.body.append(replace(copy, name=Name(name), source="register", dest="global"))


def kept_along(forward: Forward, expr: Expr, axis: str) -> Expr:
    """The sums in an expression over all axes but this one, instead of all axes."""

    def change(part: Expr) -> Expr | None:
        match part:
            case Call(Name("sum"), (operand, Name(""))):
                along = forward.axes_of(operand) == (axis,)
                return operand if along else call("sum", operand, Name(axis))
        return None

    return substitute(expr, change)


def key_length(program: _Program) -> Expr:
    """The number of keys."""
    for load in program.forward.loads.values():
        if KEY in load.axes and load.axes != (QUERY, KEY):
            place = len(load.tensor.axes) - len(load.axes) + load.axes.index(KEY)
            return load.tensor.axes[place].size
    raise refuse(program.forward.loop.span, "the loop loads no keys")


def _index_name(label: str) -> str:
    return {"B": "batch_idx", "H": "head_idx", "L": "block_idx"}.get(label, f"{label.lower()}_idx")


def _gapped(items: Sequence[Statement]) -> list[Statement]:
    return [replace(s, gap=n == 0) for n, s in enumerate(items)]


# --- who owns what ----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Owner:
    """The main kernel's blocks: its grid, its lets, its loop, and the forward's scalars there."""

    grid: Grid
    lets: tuple[Let, ...]
    loop: tuple[Name, Expr, Expr]
    inner: tuple[Let, ...]
    names: dict[str, Expr]

    @property
    def inside(self) -> set[str]:
        """The scalars that change from one iteration to the next."""
        return {self.loop[0].id, *(let.name.id for let in self.inner)}


def _owner(program: _Program) -> _Owner:
    forward = program.forward
    key = forward.query.name
    low, high = query_bounds(forward, key)
    group = _group(program)
    query = Name("i" if forward.loop.var.id != "i" or key.id != "i" else "n")
    names: dict[str, Expr] = {forward.loop.var.id: key, forward.query.name.id: query}
    blocks = GridAxis(key, ZERO, div(key_length(program), program.sizes[KEY]))
    others = [a for a in forward.program.grid.axes if a is not forward.query]
    if group is None:
        return _Owner(Grid((blocks, *others)), (), (query, low, high), (), names)
    head, of, size, shared = group
    kv = Name("kv_head")
    axes = [GridAxis(kv, ZERO, size) if a.name.id == head else a for a in others]
    group_size, start, steps = (program.new_name(n) for n in ("Group", "Start", "Steps"))
    lets = (
        Let(group_size, call("floor", of)),  # a whole number, as the launcher has checked
        Let(start, low),
        Let(steps, call("max", ZERO, sub(call("ceil", high), start))),
    )
    count = Name("n")
    in_group = Call(Name("floor"), (Binary("/", count, steps),))
    inner = (
        Let(Name("head"), add(mul(kv, group_size), in_group)),
        Let(query, add(start, Binary("%", count, steps))),
    )
    names |= {head: Name("head"), shared: kv}
    loop = (count, ZERO, mul(group_size, steps))
    return _Owner(Grid((blocks, *axes)), lets, loop, inner, names)


def _group(program: _Program) -> tuple[str, Expr, Expr, str] | None:
    """The heads that share keys: the grid's variable, the heads of a group, the number of groups,
    and the name of the group's index; None if each head has its own keys."""
    forward = program.forward
    heads = {a.name.id for a in forward.program.grid.axes}
    for load in forward.loads.values():
        for coord in load.copy.coords or ():
            place = forward.spelt_out(coord.value)
            if KEY not in load.axes or isinstance(place, Name) or coord.axis.id in "LMD":
                continue
            match place:
                case Call(Name("floor"), (inner,)):
                    found = Product.of(inner)
                    own = [e for e in found.tops if isinstance(e, Name) and e.id in heads]
                    if len(own) == 1:
                        rest = Product(
                            False, tuple(e for e in found.tops if e not in own), found.bottoms
                        )
                        axis = next(a for a in load.tensor.axes if a.label == coord.axis.id)
                        shared = coord.value.id if isinstance(coord.value, Name) else ""
                        return own[0].id, div(ONE, rest.expr()), axis.size, shared
                case _:
                    if not {n.id for n in value_names(place)} & heads:
                        continue
            raise refuse(coord.span, f"which heads share `{load.tensor.name}` cannot be inverted")
    return None


# --- the body of the main kernel --------------------------------------------------------------


class _Main:
    """Writes the main kernel."""

    def __init__(self, program: _Program, owner: _Owner) -> None:
        self.program, self.owner = program, owner
        self.back, self.forward = program.back, program.forward
        self.write = program.writer()
        self.write.names = owner.names
        self.before: list[Statement] = []
        self.after: list[Statement] = []
        self._select()
        self.leaves = self._merged()

    def kernel(self) -> list[Statement]:
        """The whole kernel, from its title on."""
        self._loads()
        steps = self.back.body
        elements = [ds for leaf, ds in self.back.grads.items() if isinstance(leaf, Index)]
        terms = [d for ds in (*self.leaves.values(), *elements) for d in ds]
        later = [v for d in terms for v in values_in(d)]
        self.write.uses(steps, later)
        for n, step in enumerate(steps):
            self.write.step(n, step)
        self._gradients()
        var, low, high = self.owner.loop
        loop = For(var, low, high, (*self.owner.inner, *self.write.body))
        title = Comment("Main: a block of keys and the queries that see it.", gap=True)
        declared = self.write.allocated.values()
        start: list[Statement] = [title, self.owner.grid, WARPS, *self.owner.lets, *declared]
        return [*start, *self.before, loop, *self.after]

    def _select(self) -> None:
        """Keep the gradients that TL can express; the others are named in the title."""
        missing = self.program.missing
        for leaf, terms in self.back.grads.items():
            if isinstance(leaf, Index):
                self.program.per_head(leaf)
                continue
            sums = [e for t in terms for e in expressions(t) if _is_sum(e)]
            axes = self.forward.axes[leaf]
            if any(axes[:1] != self.program.pair[:1] for _ in sums):
                name = self.forward.loads[leaf].tensor.name
                missing[name] = "TL has no sum over the rows of a tile"
        tensors = {k: self._tensor_of(k) for k in self.back.grads}
        self.back.grads = {
            k: ds
            for k, ds in self.back.grads.items()
            if tensors[k].name not in missing and tensors[k].dtype in FLOATS
        }

    def _tensor_of(self, leaf: Leaf) -> Tensor:
        if isinstance(leaf, Index):
            return self.program.program.tensors[leaf.tensor.id]
        return self.forward.loads[leaf].tensor

    def _merged(self) -> dict[str, list[Expr]]:
        """The gradients of loads; GEMMs whose factors are no constants take them as weights."""
        found: dict[str, list[Expr]] = {}
        for leaf, terms in self.back.grads.items():
            if not isinstance(leaf, str):
                continue
            factors = {self._gemm_parts(t)[2] for t in terms}
            known = [constant(f, self.program.program.params) for f in factors]
            plain = len(factors) == 1 and known[0] is not None
            found[leaf] = terms if plain else [self._combined(leaf, terms)]
        kept = [d for k, ds in self.back.grads.items() if not isinstance(k, str) for d in ds]
        kept += [d for ds in found.values() for d in ds]
        self.back.body = tidy(self.back.body, {v for d in kept for v in values_in(d)})
        return found

    def _combined(self, leaf: str, terms: list[Expr]) -> Expr:
        parts = [self._gemm_parts(t) for t in terms]
        if not parts[0][0]:
            return total(terms)
        common = {*parts[0][:2]}.intersection(*(p[:2] for p in parts))
        common = {v for v in common if set(self.forward.axes[v]) != {QUERY, KEY}}
        if len(common) != 1:
            span = self.forward.loads[leaf].copy.span
            raise refuse(span, "its gradient is a sum of GEMMs with different factors")
        other = common.pop()
        weights = total(mul(Name(b if a == other else a), f) for a, b, f in parts)
        value = f"W.{leaf}"
        self.forward.axes[value] = self.forward.axes_of(weights)
        self.back.body.append(Step(value, weights))
        return call("gemm", Name(other), Name(value))

    def _gemm_parts(self, term: Expr) -> tuple[str, str, Expr]:
        product, factor = Product.of(term).split(lambda e: not per_element(e))
        if isinstance(product, Call) and product.func.id == "gemm":
            a, b = (e.id for e in product.args if isinstance(e, Name))
            return a, b, factor
        return "", "", factor

    # --- loads --------------------------------------------------------------------------------

    def _loads(self) -> None:
        read = self.program.read() | {
            v for ds in self.leaves.values() for d in ds for v in values_in(d)
        }
        steps = {s.target for s in self.back.body}
        for value in [v for v in self._sources() if v in read - steps]:
            load = self.forward.loads.get(value)
            copy = self._placed(load.copy if load else self.program.row_copy(value), value)
            inside = _names(copy) & self.owner.inside
            spaces = self._spaces(value)
            self._lies_along(value)
            for space in spaces:
                self.write.body, kept = [], self.write.body
                self.write.load(value, copy, space)
                made, self.write.body = self.write.body, kept
                (self.write.body if inside else self.before).extend(made)

    def _lies_along(self, value: str) -> None:
        """Declare a vector that lies along an axis by its Allocate: rows may be columns here."""
        load = self.forward.loads.get(value)
        key = self.forward.program.dest(load.copy) if load else ("", "shared")
        buffer = self.forward.program.buffers.get(key)
        if load is None or buffer is None or buffer.along is None:
            return
        turned: dict[Side, Side] = {"rows": "columns", "columns": "rows"}
        along = turned[buffer.along] if self.program.pair[0] == KEY else buffer.along
        self.write.allocate(key[0], "register", load.axes, load.tensor.dtype)
        made = self.write.allocated[key[0], "register"]
        self.write.allocated[key[0], "register"] = replace(made, along=along)

    def _sources(self) -> list[str]:
        own = [*self.back.given, *self.back.saved, *self.back.scratch]
        return [*self.forward.loads, *own]

    def _spaces(self, value: str) -> list[Space]:
        """Shared memory for an operand of a GEMM, registers for other uses."""
        in_gemm = in_other = False
        exprs = [s.value for s in self.back.body]
        exprs += [d for ds in self.leaves.values() for d in ds]
        for expr in exprs:
            gemms = [e for e in expressions(expr) if isinstance(e, Call) and e.func.id == "gemm"]
            inside = [a for e in gemms for a in e.args if a == Name(value)]
            in_gemm |= bool(inside)
            in_other |= values_in(expr).count(value) > len(inside)
        wanted: tuple[tuple[Space, bool], ...] = (("shared", in_gemm), ("register", in_other))
        return [space for space, needed in wanted if needed]

    def _placed(self, copy: Copy, value: str) -> Copy:
        """The Copy with the coordinates of this kernel."""
        coords = []
        for coord in copy.coords or ():
            place = self._group_index(coord.value)
            if place is None:
                place = renamed(self.forward.spelt_out(coord.value), self.owner.names)
            if (
                KEY in self.forward.axes[value]
                and self._runs(coord.value)
                and not coord.in_elements
            ):
                place = self.forward.query.name
            coords.append(replace(coord, value=place))
        return replace(copy, coords=tuple(coords), target=copy.target)

    def _group_index(self, value: Expr) -> Expr | None:
        return self.owner.names.get(value.id) if isinstance(value, Name) else None

    def _runs(self, value: Expr) -> bool:
        names = {n.id for n in value_names(self.forward.spelt_out(value))}
        return self.forward.loop.var.id in names

    # --- gradients ----------------------------------------------------------------------------

    def _gradients(self) -> None:
        """The GEMMs of the gradients, after everything that is computed element by element."""
        for element, terms in self.back.grads.items():
            if isinstance(element, Index):
                self._element(element, terms)
        for leaf, terms in self.leaves.items():
            for term in terms:
                a, b, _ = self._gemm_parts(term)
                for value in (a, b):
                    if value and self._goes_through_shared(leaf, value):
                        self.write.to_shared(value)
        # Those of the keys first: then their operands are free when that of the queries is made.
        for leaf, terms in sorted(
            self.leaves.items(), key=lambda x: KEY not in self.forward.axes[x[0]]
        ):
            load = self.forward.loads[leaf]
            if load.tensor.dtype not in FLOATS:
                continue
            self._gradient(load, terms)

    def _element(self, leaf: Index, terms: list[Expr]) -> None:
        """The gradient of a number per head: a sum over the columns of each tile."""
        name, side = self.program.key_parts(leaf), self.program.pair[0]
        value = f"{name}.grad"
        self.forward.axes[value] = (side,)
        self.write.choose(value, 0)
        shown = self.write.expr(kept_along(self.forward, total(terms), side))
        tile = self.write.tile(value)
        output = self.program.output
        copy = self._placed(replace(output.copy, coords=(output.copy.coords or ())[:3]), value)
        place = (
            self.forward.query.name if side == KEY else self.owner.names[self.forward.query.name.id]
        )
        coords = tuple(
            replace(c, value=place) if c.axis.id == "L" else c for c in copy.coords or ()
        )
        self.write.body += [
            Compute(None, (shown,), mode="get", target=tile),
            Copy(Name(name), (self.program.sizes[side],), coords, "register", "global", adds=True),
        ]

    def _goes_through_shared(self, leaf: str, value: str) -> bool:
        """Whether a tile is an operand that a GEMM cannot take from registers."""
        if value in self.write.shared:
            return False
        return self.write.stored(value)[0] != self.forward.axes[leaf][0]

    def _gradient(self, load: Load, terms: list[Expr]) -> None:
        owned = KEY in load.axes and QUERY not in load.axes
        name = f"d{load.value.split('.')[0]}"
        value = f"{name}.grad"
        self.forward.axes[value] = load.axes
        copy = self._placed(load.copy, load.value)
        held = owned and not _names(copy) & self.owner.inside
        factors = {self._gemm_parts(t)[2] for t in terms}
        factor = factors.pop() if len(factors) == 1 else ONE
        self.write.held.pop(name, None)
        self.write.choose(value, 0)
        if held:
            tile = self.write.tile(value)
            self.before.append(Compute(None, (ZERO,), mode="get", target=tile))
        for n, term in enumerate(terms):
            mode: Mode = "accumulate" if held or n else "get"
            a, b, _ = self._gemm_parts(term)
            if a:
                self.write.gemm(value, a, b, mode)
            else:
                shown = self.write.expr(div(term, factor))
                self.write.body.append(
                    Compute(None, (shown,), mode=mode, target=self.write.tile(value))
                )
        self._out(load, value, copy, factor, held)

    def _out(self, load: Load, value: str, copy: Copy, factor: Expr, held: bool) -> None:
        """Write a gradient, or add it to those of other blocks."""
        body = self.after if held else self.write.body
        tile = self.write.tile(value)
        grid = {a.name.id for a in self.owner.grid.axes}
        alone = held and grid <= _names(copy)
        target = f"d{load.tensor.name}"
        direct = alone or load.tensor.dtype == "fp32"
        if direct and factor != ONE:
            scaled = self.write.expr(mul(Name(value), factor))
            body.append(Compute(None, (scaled,), mode="get new", target=tile))
        if not direct:
            target = self.program.scratch_sum(load, factor)
        base = self.write.base[value]
        get = Name(target) if base != target else None
        made = replace(
            copy, name=Name(base), source="register", dest="global", target=get, gap=False
        )
        body.append(replace(made, adds=not alone))


def _is_sum(expr: Expr) -> bool:
    return isinstance(expr, Call) and expr.func.id == "sum"


def _names(copy: Copy) -> set[str]:
    return {n.id for c in copy.coords or () for n in value_names(c.value)}
