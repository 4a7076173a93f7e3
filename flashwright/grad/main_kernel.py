"""The main kernel: a block owns keys and loops over the queries that see them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from flashwright.grad.algebra import ONE, ZERO, div, gemm_operands, mul, renamed, total, values_in
from flashwright.grad.declare import WARPS, Scope, Sum, place_names
from flashwright.grad.indexed import add_by_index
from flashwright.grad.normalise import KEY, QUERY, Load
from flashwright.grad.owner import find_owner
from flashwright.grad.reduce import Parts, declare_parts, kept_along, per_head
from flashwright.grad.terms import common_factor, gemm_parts, gradient_terms
from flashwright.grad.tiles import Writer
from flashwright.grad.turns import find_turn
from flashwright.lang import nodes as tl

_TURNED: dict[tl.Side, tl.Side] = {"rows": "columns", "columns": "rows"}


class MainKernel:
    """Writes a main kernel for all gradients, or for those of some loads; `parts` are the gradients
    that reductions complete."""

    def __init__(self, scope: Scope, only: Collection[str] = ()) -> None:
        self.scope, self.back, self.forward = scope, scope.back, scope.forward
        self._declare_read()
        self.owner = find_owner(scope)
        self.terms = gradient_terms(scope, only)
        for load in self.forward.loads.values():
            if load.value in self.terms.loads:
                scope.declare_gradient(load.tensor)
        self.write = Writer(scope, self.owner.names)
        self.before: list[tl.Statement] = []
        self.after: list[tl.Statement] = []
        self.parts: list[Parts] = []
        self.statements = self._kernel()

    def _declare_read(self) -> None:
        """Declare the tensors that this kernel and the preprocess kernel read."""
        exprs = [s.value for s in self.back.body]
        exprs += [d for ds in self.back.grads.values() for d in ds]
        exprs += [leaf for leaf in self.back.grads if isinstance(leaf, tl.Index)]
        read = {v for e in exprs for v in values_in(e)}
        for value, load in self.forward.loads.items():
            if value in read:
                self.scope.declare_input(load.tensor)
        read |= {v for s in self.back.rows for v in values_in(s.value)}
        for value in (*self.back.saved, *self.back.given, *self.back.scratch):
            if value in read:
                self.scope.row_copy(value)

    def _kernel(self) -> list[tl.Statement]:
        """The whole kernel, from its title on."""
        for value in (*self.forward.loads, *self.back.given, *self.back.saved, *self.back.scratch):
            self._load(value)
        self.write.steps(self.terms.steps, [v for d in self.terms.exprs for v in values_in(d)])
        self._gradients()
        loop = tl.For(*self.owner.loop, (*self.owner.inner, *self.write.body))
        title = tl.Comment("Main: a block of keys and the queries that see it.", gap=True)
        tiles, lets = self.write.allocated.values(), self.owner.lets
        return [title, self.owner.grid, WARPS, *lets, *tiles, *self.before, loop, *self.after]

    # --- loads --------------------------------------------------------------------------------

    def _load(self, value: str) -> None:
        """Load a value where it is used, before the loop if its place does not change in it."""
        spaces = self._spaces(value)
        if not spaces:
            return
        load = self.forward.loads.get(value)
        copy = self._placed(load.copy if load else self.scope.row_copy(value), value)
        if load:
            self._lies_along(load, self.forward.program.dest(load.copy)[0], load.tensor.dtype)
        body = self.write.body if place_names(copy) & self.owner.inside else self.before
        body += [self.write.load(value, copy, space) for space in spaces]

    def _spaces(self, value: str) -> list[tl.Space]:
        """Shared memory for an operand of a GEMM, registers for other uses."""
        in_gemm = in_other = False
        for expr in (*(s.value for s in self.terms.steps), *self.terms.exprs):
            inside = gemm_operands(expr).count(value)
            in_gemm |= inside > 0
            in_other |= values_in(expr).count(value) > inside
        wanted: tuple[tuple[tl.Space, bool], ...] = (("shared", in_gemm), ("register", in_other))
        return [space for space, needed in wanted if needed]

    def _lies_along(self, load: Load, name: str, dtype: str) -> None:
        """Declare a vector like one that lies along an axis by its Allocate: rows may be columns
        here."""
        buffer = self.forward.program.buffers.get(self.forward.program.dest(load.copy))
        if buffer is None or buffer.along is None:
            return
        along = _TURNED[buffer.along] if self.scope.pair[0] == KEY else buffer.along
        self.write.allocate(name, "register", load.axes, dtype, along)

    def _placed(self, copy: tl.Copy, value: str) -> tl.Copy:
        """The Copy with the coordinates of this kernel."""
        return replace(copy, coords=tuple(self._coord(c, value) for c in copy.coords or ()))

    def _coord(self, coord: tl.Coord, value: str) -> tl.Coord:
        """A coordinate of the forward in this kernel."""
        names, given = self.owner.names, coord.value
        full = self.forward.spelt_out(given)
        loops = self.forward.loop.var in tl.value_names(full)
        if KEY in self.forward.axes[value] and loops and not coord.in_elements:
            return replace(coord, value=self.forward.query.name)
        if isinstance(given, tl.Name) and given.id in names:
            return replace(coord, value=names[given.id])
        return replace(coord, value=renamed(full, names))

    # --- gradients ----------------------------------------------------------------------------

    def _gradients(self) -> None:
        """The GEMMs of the gradients, after everything that is computed element by element."""
        for element, terms in self.terms.elements.items():
            if per_head(self.scope, element):
                self._element(element, terms)
            else:
                parts = kept_along(self.forward, total(terms), self.scope.pair[0])
                add_by_index(self.scope, self.write, element, parts)
        for leaf, terms in self.terms.loads.items():
            for value in [v for t in terms for v in gemm_parts(t)[:2] if v]:
                # A GEMM takes its left operand from registers only as it lies there.
                if self.write.stored(value)[0] != self.forward.axes[leaf][0]:
                    self.write.to_shared(value)
        # Those of the keys first: then their operands are free when that of the queries is made.
        for leaf in sorted(self.terms.loads, key=lambda v: KEY not in self.forward.axes[v]):
            self._gradient(self.forward.loads[leaf], self.terms.loads[leaf])

    def _element(self, leaf: tl.Index, terms: list[tl.Expr]) -> None:
        """The gradient of a number per head: a sum over the columns of each tile."""
        side, query = self.scope.pair[0], self.forward.query.name
        parts = declare_parts(self.scope, leaf, side)
        self.parts.append(parts)
        value = f"{parts.name}.grad"
        self.forward.axes[value] = (side,)
        self.write.choose(value, 0)
        self.write.compute(value, kept_along(self.forward, total(terms), side))
        place = query if side == KEY else self.owner.names[query.id]
        coords = tuple(
            replace(c, value=place) if c.axis.id == "L" else self._coord(c, value)
            for c in (self.scope.output.copy.coords or ())[:3]
        )
        copy = tl.Copy(tl.Name(parts.name), (parts.tile,), coords, "register", "global", adds=True)
        turn = find_turn(self.scope, self.owner, copy, leaf.tensor.id)
        self.write.body.append(replace(copy, turn=turn))

    def _gradient(self, load: Load, terms: list[tl.Expr]) -> None:
        """The gradient of a load, added up in registers if the block owns it."""
        name = f"d{load.value.split('.')[0]}"
        value = f"{name}.grad"
        self.forward.axes[value] = load.axes
        copy = self._placed(load.copy, load.value)
        owned = KEY in load.axes and QUERY not in load.axes
        held = owned and not place_names(copy) & self.owner.inside
        factor = common_factor(terms)
        self.write.held.pop(name, None)
        self._lies_along(load, name, "fp32")
        if len(terms) == 1 or (not held and all(gemm_parts(t)[2] == factor for t in terms)):
            self._sum(value, terms, factor, held)
        else:
            # Sums that go over the same queries are added when they are complete.
            parts = [
                (self._part(load, term, n, held), gemm_parts(term)[2])
                for n, term in enumerate(terms)
            ]
            made = self.write.expr(total(mul(tl.Name(v), f) for v, f in parts))
            body = self.after if held else self.write.body
            value, factor = parts[0][0], ONE
            body.append(tl.Compute(None, (made,), mode="get new", target=self.write.tile(value)))
        self._out(load, value, copy, factor, held)

    def _part(self, load: Load, term: tl.Expr, n: int, held: bool) -> str:
        """One term of a gradient in a tile of its own, without its scalar factor."""
        value = f"d{load.value.split('.')[0]}.grad{n}"
        self.forward.axes[value] = load.axes
        self._sum(value, [term], gemm_parts(term)[2], held)
        self.write.last[value] = len(self.terms.steps) + 1
        return value

    def _sum(self, value: str, terms: list[tl.Expr], factor: tl.Expr, held: bool) -> None:
        """Terms with a common factor, added up in a tile without it."""
        self.write.choose(value, 0)
        if held:
            zero = tl.Compute(None, (ZERO,), mode="get", target=self.write.tile(value))
            self.before.append(zero)
        for n, term in enumerate(terms):
            mode: tl.Mode = "accumulate" if held or n else "get"
            a, b, _ = gemm_parts(term)
            if a:
                self.write.gemm(value, a, b, mode)
            else:
                self.write.compute(value, div(term, factor), mode)

    def _out(self, load: Load, value: str, copy: tl.Copy, factor: tl.Expr, held: bool) -> None:
        """Write a gradient, or add it to those of other blocks and of other tiles of its tensor."""
        body = self.after if held else self.write.body
        alone = held and {a.name.id for a in self.owner.grid.axes} <= place_names(copy)
        leaves = [v for v in self.back.grads if isinstance(v, str) and v != load.value]
        others = [o for v in leaves if (o := self.forward.loads[v]).tensor is load.tensor]
        alone &= all(_disjoint(load.copy, other.copy) for other in others)
        target, left = f"d{load.tensor.name}", factor
        if not alone and load.tensor.dtype != "fp32":
            target += "sum"
            self.scope.declare(target, load.tensor, "fp32")
            same = all(common_factor(self.back.grads[o.value]) == factor for o in others)
            self.scope.sums[target] = Sum(load.tensor, load.axes, factor if same else ONE)
            left = ONE if same else factor
        if left != ONE:
            scaled = self.write.expr(mul(tl.Name(value), left))
            tile = self.write.tile(value)
            body.append(tl.Compute(None, (scaled,), mode="get new", target=tile))
        base = self.write.base[value]
        get = tl.Name(target) if base != target else None
        made = replace(copy, name=tl.Name(base), source="register", dest="global", target=get)
        turn = find_turn(self.scope, self.owner, copy, load.tensor.name) if not alone else None
        body.append(replace(made, gap=False, adds=not alone, turn=turn))


def _disjoint(one: tl.Copy, other: tl.Copy) -> bool:
    """Whether two tiles of a tensor have no element in common: tiles of one size at different
    fixed places along some axis."""
    places = {c.axis.id: c.value for c in one.coords or ()}
    pairs = [(places.get(c.axis.id), c.value) for c in other.coords or ()]
    fixed = [p for p in pairs if all(isinstance(value, tl.Num) for value in p)]
    return one.shape == other.shape and any(a != b for a, b in fixed)
