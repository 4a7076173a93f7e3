"""What the kernels of a backward pass share: tensors, tile sizes, and the head of the program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from flashwright.grad.algebra import renamed, values_in
from flashwright.grad.derive import Backward
from flashwright.grad.listed import OF_KEYS, Listed
from flashwright.grad.normalise import KEY, QUERY, Axes, Forward, refuse, unused_name
from flashwright.lang import nodes as tl
from flashwright.lang.format import format_expr
from flashwright.program.program import Tensor
from flashwright.program.vocabulary import RESERVED_PARAMS

WARPS = tl.Param(tl.Name("Warps"), tl.Num("4"))
FLOATS = ("fp16", "bf16", "fp32")


@dataclass(frozen=True)
class Sum:
    """A gradient that several blocks add up in fp32: its tensor, the axes of the tiles in which it
    is rounded, and the factor that is left."""

    tensor: Tensor
    axes: Axes
    factor: tl.Expr


class Scope:
    """The tensors and sizes of a backward program.

    `globals` are the tensors declared so far, `missing` the inputs without a gradient and why,
    `sums` the gradients in fp32 that are to be rounded, by the name of their scratch.
    `sizes` has the tile's size along each axis, `pair` the order of axes in tiles of queries and
    keys (`turns`: the other order is possible too), `half` the type of GEMM operands, `output` the
    store of the output. `deterministic`: additions to global memory have an order.
    """

    def __init__(self, back: Backward, deterministic: bool = False) -> None:
        self.back, self.forward, self.program = back, back.forward, back.forward.program
        self.deterministic = deterministic
        loads = self.forward.loads.values()
        shapes = [dict(zip(v.axes, v.copy.shape or (), strict=True)) for v in loads]
        self.sizes = {axis: size for shape in shapes for axis, size in shape.items()}
        self.turns = not any(set(v.axes) == {QUERY, KEY} for v in loads)
        self.pair: Axes = (KEY, QUERY) if self.turns else (QUERY, KEY)
        if not back.given:
            raise refuse(self.forward.loop.span, "no output is a tile of queries and dimensions")
        self.output = next(iter(back.given.values()))
        self.half = _operand_type(self.forward)
        self.given = {value.split(".")[0] for value in back.given}
        self.globals: dict[str, tl.Allocate] = {}
        self.missing: dict[str, str] = {}
        self.sums: dict[str, Sum] = {}

    @property
    def outputs(self) -> list[str]:
        """The names of the gradients that the kernels write."""
        inputs = [f"d{t.name}" for t in self.program.inputs]
        return [n for n in inputs if n in self.globals and n not in self.given]

    @property
    def notes(self) -> list[str]:
        """What a reader should know of the result, a sentence each."""
        made = [f"No gradient of {name}: {why}." for name, why in self.missing.items()]
        if self.forward.listed is not None:
            lists = ", ".join(name for name in self.globals if name.endswith(OF_KEYS))
            made.append(f"{lists}: for each block of keys, which blocks of queries visit it.")
        for value, expr in self.back.again.items():
            bases = {v: tl.Name(v.split(".")[0]) for v in values_in(expr)}
            text = format_expr(renamed(expr, bases))
            made.append(f"{value.split('.')[0]} is computed again: store {text} in the forward.")
        return made

    @property
    def key_length(self) -> tl.Expr:
        """The number of keys."""
        for load in self.forward.loads.values():
            if KEY in load.axes and load.axes != (QUERY, KEY):
                return load.tensor.axes[load.axes.index(KEY) - len(load.axes)].size
        raise refuse(self.forward.loop.span, "the loop loads no keys")

    def new_name(self, name: str, *replaced: str) -> tl.Name:
        """A name that the forward program does not use, or only for what it replaces here: the
        forward's loop variable, and `replaced`."""
        return tl.Name(unused_name(self.program, name, self.forward.loop.var.id, *replaced))

    def declare(self, name: str, like: Tensor, dtype: str, axes: int | None = None) -> None:
        """Declare a tensor with the axes of another one, or with the first of them."""
        shape = like.declared.shape[:axes]
        if any(axis.label is None for axis in shape) and axes is not None and len(shape) != 3:
            labels = [tl.Name(a.label) for a in like.axes]
            shape = tuple(tl.Axis(n, a.size) for n, a in zip(labels, shape, strict=False))
        stmt = tl.Allocate(tl.Name(name), "global", shape, tl.Name(dtype))
        self.globals.setdefault(name, stmt)

    def declare_gradient(self, tensor: Tensor) -> None:
        """Declare the gradient of an input."""
        self.declare(f"d{tensor.name}", tensor, tensor.dtype)

    def declare_input(self, tensor: Tensor) -> None:
        """Declare a tensor of the forward program."""
        self.globals.setdefault(tensor.name, replace(tensor.declared, comment=None, gap=False))

    def declare_lists(self, listed: Listed) -> None:
        """Declare the lists of the blocks of queries that visit each block of keys."""
        names, tensors = (listed.counts, listed.blocks), self.program.tensors
        counts, blocks = (tensors[name].declared for name in names)
        for name in (listed.counts, *listed.prefixes, listed.blocks):
            stmt = listed.declared(name, counts, blocks)
            self.globals.setdefault(stmt.name.id, stmt)

    def row_copy(self, value: str) -> tl.Copy:
        """The Copy of a value that lies along the queries, its tensor declared."""
        load = self.forward.loads.get(value)
        if load is not None:
            if self.forward.loop.var.id in place_names(load.copy):
                text = f"`{load.tensor.name}` is read after the loop as the last iteration left it"
                raise refuse(load.copy.span, text)
            self.declare_input(load.tensor)
            return load.copy
        name = value.split(".")[0]
        store = self.back.saved.get(value) or self.back.given.get(value) or self.output
        copy, tensor = store.copy, store.tensor
        vector = self.forward.axes[value] == (QUERY,)
        if value in self.back.saved or (value in self.back.given and vector):
            self.declare(name, tensor, tensor.dtype)
        elif not vector:
            self.declare(name, tensor, "fp32" if value in self.back.again else self.half)
        else:
            self.declare(name, tensor, "fp32", len(tensor.axes) - 1)
            last = tensor.axes[-1].label
            coords = tuple(c for c in copy.coords or () if c.axis.id != last)
            copy = replace(copy, coords=coords, shape=(copy.shape or ())[:1])
        return replace(copy, name=tl.Name(name), target=None)

    def head(self, kernels: Sequence[tl.Statement], more: Sequence[tl.Param]) -> list[tl.Statement]:
        """The title, the params and dims that the kernels use, more params, and the tensors."""
        parts = [e for s in tl.statements(tuple(kernels)) for e in tl.expressions(s)]
        for part in parts:
            if isinstance(part, tl.Index) and part.tensor.id not in self.globals:
                self.declare_input(self.program.tensors[part.tensor.id])
        tensors = sorted(self.globals.values(), key=self._rank)
        parts += [axis.size for t in tensors for axis in t.shape]
        title = tl.Comment(f"The backward pass: {', '.join(self.outputs)}.")
        notes = [tl.Comment(note) for note in self.notes]
        params = self._params({n.id for e in parts for n in tl.value_names(e)})
        gapped = [replace(stmt, gap=n == 0) for n, stmt in enumerate(tensors)]
        return [title, *notes, *params, *more, *gapped]

    def _rank(self, stmt: tl.Allocate) -> int:
        """The order of tensors: the forward's, the given gradients, scratch, the gradients."""
        name = stmt.name.id
        if name in self.program.tensors or name.endswith(OF_KEYS):
            return 0
        return 1 if name in self.given else 3 if name in self.outputs else 2

    def _params(self, used: set[str]) -> list[tl.Statement]:
        """The params and dims that these names need, directly or through other params."""
        params: list[tl.Statement] = []
        notes = {self.sizes.get(KEY): "keys per thread block"}
        notes[self.sizes.get(QUERY)] = "queries per step"
        for stmt in reversed(self.program.tree.body):
            if isinstance(stmt, tl.Param) and stmt.name.id in used - set(RESERVED_PARAMS):
                used |= {n.id for n in tl.value_names(stmt.value)}
                value = tl.Num("64") if stmt.name in notes else stmt.value
                note = notes.get(stmt.name)
                params.append(replace(stmt, value=value, comment=note, gap=False))
            if isinstance(stmt, tl.Dim) and {n.id for n in stmt.names} & used:
                params.append(replace(stmt, gap=True))
        return params[::-1]


def _operand_type(forward: Forward) -> str:
    """The type of GEMM operands: that of the keys; Failed if it is no 16-bit type."""
    tiles = [v for v in forward.loads.values() if KEY in v.axes and len(v.axes) == 2]
    keys = [v for v in tiles if QUERY not in v.axes]
    for load in keys:
        if load.tensor.dtype not in ("fp16", "bf16"):
            why = f"`{load.tensor.name}` is {load.tensor.dtype}: gradients need fp16 or bf16"
            raise refuse(load.tensor.declared.span, why)
    return next((load.tensor.dtype for load in keys), "fp16")


def place_names(copy: tl.Copy) -> set[str]:
    """The scalars that the place of a Copy depends on."""
    return {n.id for c in copy.coords or () for n in tl.value_names(c.value)}
