"""Steps as statements of TL: names and allocations of tiles, operands of GEMMs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from flashwright.grad.algebra import Step, is_value, substitute, values_in
from flashwright.grad.declare import Scope
from flashwright.grad.normalise import KEY, QUERY, Axes, refuse
from flashwright.lang import nodes as tl

MMA_C = tuple(map(tl.Name, ("MMA_C", "MMA_M", "MMA_N")))
MMA_A = tuple(map(tl.Name, ("MMA_A", "MMA_M", "MMA_N_new")))


class Writer:
    """Writes the statements of one kernel; `names` are the forward's scalars in it."""

    def __init__(self, scope: Scope, names: Mapping[str, tl.Expr] | None = None) -> None:
        self.scope, self.forward, self.names = scope, scope.forward, names or {}
        self.allocated: dict[tuple[str, tl.Space], tl.Allocate] = {}
        self.body: list[tl.Statement] = []
        self.held: dict[str, str] = {}
        self.base: dict[str, str] = {}
        self.last: dict[str, int] = {}
        self.shared: set[str] = set()
        self.loaded: set[str] = set()
        self.reshaped: set[str] = set()
        self.span: tl.Span | None = None

    def stored(self, value: str) -> Axes:
        """The axes of a value in the order in which its tile has them."""
        return self._ordered(self.forward.axes[value])

    def _ordered(self, axes: Axes) -> Axes:
        """The axes in the order in which a tile has them."""
        return self.scope.pair if set(axes) == {QUERY, KEY} else axes

    def tile(self, value: str, space: tl.Space = "register") -> tl.Name:
        """The name of a value's tile as a statement says it."""
        base = self.base[value]
        if space == "shared":
            return tl.Name(f"{base if value in self.loaded else value.split('.')[0]}_shared")
        clear = base in self.scope.globals and len(self.forward.axes[value]) == 2
        return tl.Name(f"{base}_register" if clear else base)

    def allocate(
        self, base: str, space: tl.Space, axes: Axes, dtype: str, along: tl.Side | None = None
    ) -> None:
        """Allocate a tile, once."""
        shape = tuple(tl.Axis(None, self.scope.sizes.get(axis) or tl.Name(axis)) for axis in axes)
        stmt = tl.Allocate(tl.Name(base), space, shape, tl.Name(dtype), along=along)
        self.allocated.setdefault((base, space), stmt)

    def load(self, value: str, copy: tl.Copy, space: tl.Space) -> tl.Copy:
        """The Copy of a value from global memory, for the kernel to place."""
        name = copy.target or copy.name
        self.base[value] = base = name.id.removesuffix("_shared").removesuffix("_register")
        self.held[base] = value
        self.loaded.add(value)
        target = tl.Name(base) if base != copy.name.id else None
        if space == "shared":
            self.shared.add(value)
        return replace(copy, source="global", dest=space, target=target, comment=None, gap=False)

    def steps(self, steps: Sequence[Step], later: Iterable[str]) -> None:
        """The statements of all steps; the values in `later` are used after them."""
        for n, step in enumerate(steps):
            self.last |= dict.fromkeys(values_in(step.value), n)
        self.last |= dict.fromkeys(later, len(steps))
        for n, step in enumerate(steps):
            self.span = step.span
            self._step(n, step.target, step.value)
        self.span = None

    def _step(self, n: int, target: str, value: tl.Expr) -> None:
        """The statements of one step."""
        match value:
            case tl.Call(tl.Name("gemm"), (tl.Name(a), tl.Name(b))):
                self.choose(target, n)
                self.gemm(target, a, b, "get")
            case tl.Call(tl.Name("mask"), (scores, condition)):
                if is_value(scores) and self.last[scores.id] <= n:
                    self.base[target] = self.base[scores.id]
                    self.held[self.base[target]] = target
                else:
                    self._step(n, target, scores)
                where, args = self.expr(condition), (self.tile(target),)
                self.body.append(tl.Compute(tl.Name("Mask"), args, where=where))
            case _:
                new = self.choose(target, n, values_in(value))
                self.compute(target, value, "get new" if new else "get")

    def compute(self, target: str, value: tl.Expr, mode: tl.Mode = "get") -> None:
        """Compute a value into a tile that is chosen already."""
        made = self.expr(value)
        self.body.append(tl.Compute(None, (made,), mode=mode, target=self.tile(target)))

    def choose(self, target: str, n: int, operands: Iterable[str] = ()) -> bool:
        """Choose the tile for a value: that of a value of the same name, or of an adjoint among
        the operands, that is not used after statement n; else a new one. Returns whether the tile
        had a value."""
        base = target.split(".")[0]
        free = self._free(base, target, n)
        for operand in operands if self.stored(target) == self.scope.pair else ():
            other = self.base[operand]
            if not free and base[0] == other[0] == "d" and self._free(other, target, n):
                base, free = other, True
        while not free and base in self.held:
            base = _next_name(base)
        self.base[target], self.held[base] = base, target
        self.allocate(base, "register", self.stored(target), "fp32")
        return free

    def _free(self, base: str, target: str, n: int) -> bool:
        """Whether a tile fits a value and its own value is not used after statement n."""
        holder = self.held.get(base)
        same = holder is not None and self.stored(holder) == self.stored(target)
        return same and self.last.get(holder or "", -1) <= n and holder not in self.loaded

    def expr(self, expr: tl.Expr) -> tl.Expr:
        """An expression of values as one of tiles."""

        def change(part: tl.Expr) -> tl.Expr | None:
            match part:
                case tl.Call(tl.Name("sum"), (operand, tl.Name(kept))):
                    axes = self._ordered(self.forward.axes_of(operand))
                    if len(axes) != 2 or axes[0] not in kept.split("|"):
                        raise refuse(self.span, "a sum over the columns' other axis is not in TL")
                    return tl.Call(tl.Name("rowsum"), (self.expr(operand),))
                case tl.Call(tl.Name("gemm")):
                    raise refuse(self.span, "an element's gradient that is a part of a GEMM")
                case tl.Name(id) if "." in id:
                    return self.tile(id)
                case tl.Name(id):
                    return self.names.get(id)
            return None

        return substitute(expr, change)

    def gemm(self, target: str, a: str, b: str, mode: tl.Mode) -> None:
        """A GEMM into a tile that is chosen already; its operands are brought into place."""
        rows, columns = self.stored(target)
        left, right = (a, b) if rows in self.forward.axes[a] else (b, a)
        args = (self._left(left, rows), self._right(right, columns))
        self.body.append(tl.Compute(tl.Name("GEMM"), args, mode=mode, target=self.tile(target)))

    def _left(self, value: str, rows: str) -> tl.Expr:
        """The left operand of a GEMM with these rows."""
        if self.stored(value)[0] != rows:
            return tl.Transpose(self.to_shared(value))
        if value in self.loaded:
            return self.tile(value, "shared")
        if self.stored(value) != self.scope.pair:
            raise refuse(self.span, "a GEMM of a tile that is computed in registers, not of scores")
        if value not in self.reshaped:
            self.reshaped.add(value)
            self.body.append(tl.Reshape(self.tile(value), MMA_C, MMA_A))
        return self.tile(value)

    def _right(self, value: str, columns: str) -> tl.Expr:
        """The right operand of a GEMM with these columns."""
        tile = self.to_shared(value)
        return tile if self.stored(value)[1] == columns else tl.Transpose(tile)

    def to_shared(self, value: str) -> tl.Name:
        """The tile in shared memory; one in registers is copied there, once."""
        if value not in self.shared:
            self.shared.add(value)
            base = value.split(".")[0]
            target = tl.Name(base) if base != self.base[value] else None
            self.allocate(base, "shared", self.stored(value), self.scope.half)
            self.body.append(tl.Copy(self.tile(value), None, None, "register", "shared", target))
        return self.tile(value, "shared")


def _next_name(base: str) -> str:
    """S2 after S, S3 after S2."""
    stem = base.rstrip("0123456789")
    return f"{stem}{int(base[len(stem) :] or 1) + 1}"
