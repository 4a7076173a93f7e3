"""The blocks of the main kernel: each owns keys and loops over the queries of all heads that share
them."""

from __future__ import annotations

from dataclasses import dataclass

from flashwright.grad.algebra import ONE, ZERO, Product, add, call, div, mul, sub
from flashwright.grad.declare import Scope
from flashwright.grad.invert import query_bounds
from flashwright.grad.normalise import KEY, Forward, Load, refuse
from flashwright.lang import nodes as tl


@dataclass(frozen=True)
class Owner:
    """The main kernel's grid, lets, loop and lets in the loop; the forward's scalars in it."""

    grid: tl.Grid
    lets: tuple[tl.Let, ...]
    loop: tuple[tl.Name, tl.Expr, tl.Expr]
    inner: tuple[tl.Let, ...]
    names: dict[str, tl.Expr]

    @property
    def inside(self) -> set[str]:
        """The scalars that change from one iteration to the next."""
        return {self.loop[0].id, *(let.name.id for let in self.inner)}


@dataclass(frozen=True)
class _Group:
    """Heads that share keys: the grid's axis of heads, the heads of a group, the number of groups,
    and the forward's name of the group's index."""

    head: str
    size: tl.Expr
    count: tl.Expr
    index: str


def find_owner(scope: Scope) -> Owner:
    """The blocks of the main kernel; Failed if the heads that share keys cannot be found."""
    forward = scope.forward
    key, query = forward.query.name, scope.new_name("i")
    low, high = query_bounds(forward, key)
    group = _group(forward)
    names: dict[str, tl.Expr] = {forward.loop.var.id: key, key.id: query}
    axes = [a for a in forward.program.grid.axes if a is not forward.query]
    axes.insert(0, tl.GridAxis(key, ZERO, div(scope.key_length, scope.sizes[KEY])))
    if group is None:
        return Owner(tl.Grid(tuple(axes)), (), (query, low, high), (), names)
    of_group = (group.head, group.index)
    kv, head, count = (scope.new_name(name, *of_group) for name in ("kv_head", "head", "n"))
    grid = (tl.GridAxis(kv, ZERO, group.count) if a.name.id == group.head else a for a in axes)
    size, start, steps = map(scope.new_name, ("Group", "Start", "Steps"))
    lets = (
        tl.Let(size, call("floor", group.size)),  # a whole number, as the launcher has checked
        tl.Let(start, low),
        tl.Let(steps, call("max", ZERO, sub(call("ceil", high), start))),
    )
    # All heads of a group see a tile of queries at the same time, and all blocks begin with the
    # last one: what they read and add to stays in the L2.
    done = call("floor", tl.Binary("/", count, size))
    inner = (
        tl.Let(head, add(mul(kv, size), tl.Binary("%", count, size))),
        tl.Let(query, sub(sub(add(start, steps), ONE), done)),
    )
    names |= {group.head: head, group.index: kv}
    return Owner(tl.Grid(tuple(grid)), lets, (count, ZERO, mul(size, steps)), inner, names)


def _group(forward: Forward) -> _Group | None:
    """The heads that share keys; None if each head has its own."""
    for load in forward.loads.values():
        for coord in load.copy.coords or ():
            if KEY in load.axes and coord.axis.id not in "LMD":
                found = _group_at(forward, load, coord)
                if found is not None:
                    return found
    return None


def _group_at(forward: Forward, load: Load, coord: tl.Coord) -> _Group | None:
    """The heads with the same index along one axis of the keys; None if it is no group's index."""
    place = forward.spelt_out(coord.value)
    heads = {a.name.id for a in forward.program.grid.axes}
    match place:
        case tl.Call(tl.Name("floor"), (inner,)):
            found = Product.of(inner)
            own = [e for e in found.tops if isinstance(e, tl.Name) and e.id in heads]
            if len(own) == 1:
                rest = Product(False, tuple(e for e in found.tops if e not in own), found.bottoms)
                count = next(a.size for a in load.tensor.axes if a.label == coord.axis.id)
                index = coord.value.id if isinstance(coord.value, tl.Name) else ""
                return _Group(own[0].id, div(ONE, rest.expr()), count, index)
        case _ if isinstance(place, tl.Name) or not {n.id for n in tl.value_names(place)} & heads:
            return None
    raise refuse(coord.span, f"which heads share `{load.tensor.name}` cannot be inverted")
