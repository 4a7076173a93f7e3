"""The blocks of the main kernel: each owns keys and loops over the queries of all heads that share
them."""

from __future__ import annotations

from dataclasses import dataclass

from flashwright.grad.algebra import ONE, ZERO, Product, add, call, div, mul, sub
from flashwright.grad.declare import Scope
from flashwright.grad.invert import Visits, find_visits
from flashwright.grad.normalise import KEY, Forward, Load, refuse
from flashwright.lang import nodes as tl


@dataclass(frozen=True)
class Owner:
    """The main kernel's grid, lets, loop and lets in the loop; the forward's scalars in it; the
    block of queries of an iteration, and the first block of keys that adds to its gradients."""

    grid: tl.Grid
    lets: tuple[tl.Let, ...]
    loop: tuple[tl.Name, tl.Expr, tl.Expr]
    inner: tuple[tl.Let, ...]
    names: dict[str, tl.Expr]
    query: tl.Name
    first_key: tl.Expr

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
    visits = find_visits(forward, key, query)
    group = _group(forward)
    names: dict[str, tl.Expr] = {forward.loop.var.id: key, key.id: query}
    axes = [a for a in forward.program.grid.axes if a is not forward.query]
    axes.insert(0, tl.GridAxis(key, ZERO, div(scope.key_length, scope.sizes[KEY])))
    if group is not None or scope.deterministic:
        return _descending(scope, group, axes, names, visits)
    loop = (query, visits.first, visits.end)
    return Owner(tl.Grid(tuple(axes)), (), loop, (), names, query, visits.first_key)


def _descending(
    scope: Scope,
    group: _Group | None,
    axes: list[tl.GridAxis],
    names: dict[str, tl.Expr],
    visits: Visits,
) -> Owner:
    """The blocks that begin with the last tile of queries, and see it for all heads of a group at
    the same time: what they read and add to stays in the L2. In causal attention all blocks see
    that tile, so that those that take turns wait at the beginning only."""
    query = names[axes[0].name.id]
    assert isinstance(query, tl.Name)
    start, steps = map(scope.new_name, ("Start", "Steps"))
    lets = [
        tl.Let(start, visits.first),
        tl.Let(steps, call("max", ZERO, sub(call("ceil", visits.end), start))),
    ]
    inner: list[tl.Let] = []
    of_group = (group.head, group.index) if group else ()
    kv, head, count = (scope.new_name(name, *of_group) for name in ("kv_head", "head", "n"))
    done: tl.Expr = count
    iterations: tl.Expr = steps
    if group is not None:
        size = scope.new_name("Group")
        lets.insert(0, tl.Let(size, call("floor", group.size)))  # whole: the launcher has checked
        axes = [tl.GridAxis(kv, ZERO, group.count) if a.name.id == group.head else a for a in axes]
        inner.append(tl.Let(head, add(mul(kv, size), tl.Binary("%", count, size))))
        names = {**names, group.head: head, group.index: kv}
        done, iterations = call("floor", tl.Binary("/", count, size)), mul(size, steps)
    inner.append(tl.Let(query, sub(sub(add(start, steps), ONE), done)))
    grid, loop = tl.Grid(tuple(axes)), (count, ZERO, iterations)
    return Owner(grid, tuple(lets), loop, tuple(inner), names, query, visits.first_key)


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
