"""The forward's loop once more, for what the gradients need and no output has: the log-sum-exp."""

from __future__ import annotations

from dataclasses import replace

from flashwright.grad.algebra import call, renamed
from flashwright.grad.declare import WARPS, Scope
from flashwright.grad.normalise import QUERY
from flashwright.lang import nodes as tl
from flashwright.program.needed import is_store, needed


def recompute(scope: Scope) -> list[tl.Statement]:
    """The kernel that computes these values, if there are any."""
    values = scope.back.again
    if not values:
        return []
    names = {begin: _tile(scope, begin.split(".")[0]) for begin in scope.forward.carried}
    ends: list[tl.Statement] = []
    for value, expr in values.items():
        copy = scope.row_copy(value)
        tile = _tile(scope, copy.name.id)
        if not any(base == copy.name.id for base, _ in scope.program.buffers):
            shape = tuple(tl.Axis(None, size) for size in copy.shape or ())
            ends.append(tl.Allocate(copy.name, "register", shape, tl.Name("fp32")))
        ends.append(tl.Compute(None, (renamed(expr, names),), mode="get", target=tile))
        ends.append(replace(copy, source="register", dest="global", gap=False, comment=None))
    stores = [s for s in ends if is_store(s)]
    title = tl.Comment("The forward again, for what none of its outputs has.", gap=True)
    grid = tl.Grid(scope.program.grid.axes)
    kernel = (grid, WARPS, *_vectors(scope), *_before(scope), *ends)
    return [title, *needed(kernel, stores)]


def _before(scope: Scope) -> list[tl.Statement]:
    """The forward up to the end of its loop, without its grid, params and tensors."""
    made: list[tl.Statement] = []
    for stmt in scope.program.tree.body:
        in_global = isinstance(stmt, tl.Allocate) and stmt.space == "global"
        if not in_global and not isinstance(stmt, tl.Comment | tl.Param | tl.Dim | tl.Grid):
            made += _spelt_out(scope, replace(stmt, gap=False))
        if stmt is scope.forward.loop:
            break
    for stmt in tl.statements(tuple(made)):
        if isinstance(stmt, tl.Copy) and stmt.source == "global":
            scope.declare_input(scope.program.tensors[scope.program.source(stmt)[0]])
    return made


def _vectors(scope: Scope) -> list[tl.Statement]:
    """The vectors that a Softmax needs if it is spelt out."""
    shape = (tl.Axis(None, scope.sizes[QUERY]),)
    names = (scope.new_name(name) for name in ("Top", "Drop"))
    return [tl.Allocate(name, "register", shape, tl.Name("fp32")) for name in names]


def _spelt_out(scope: Scope, stmt: tl.Statement) -> list[tl.Statement]:
    """A statement with each Softmax as the assignments that it stands for, so that those of values
    that nothing reads can go."""
    if isinstance(stmt, tl.For):
        return [replace(stmt, body=tuple(s for b in stmt.body for s in _spelt_out(scope, b)))]
    if not isinstance(stmt, tl.Compute) or stmt.operation != "softmax":
        return [stmt]
    scores, (high, weights) = stmt.args[0], stmt.state
    assert isinstance(scores, tl.Name)
    top, drop = scope.new_name("Top"), scope.new_name("Drop")
    risen = tl.Binary("*", weights, drop)
    made: list[tuple[tl.Name, tl.Expr]] = [
        (top, call("max", high, call("rowmax", scores))),
        (drop, call("exp", tl.Binary("-", high, top))),
        (scores, call("exp", tl.Binary("-", scores, top))),
        (weights, tl.Binary("+", risen, call("rowsum", scores))),
        (high, top),
        *((name, tl.Binary("*", name, drop)) for name in stmt.rescale),
    ]
    return [tl.Compute(None, (value,), mode="get", target=name) for name, value in made]


def _tile(scope: Scope, base: str) -> tl.Name:
    """The name of a tile in registers."""
    spaces = {space for name, space in scope.program.buffers if name == base}
    clear = base in scope.globals or base in scope.program.tensors or "shared" in spaces
    return tl.Name(f"{base}_register" if clear else base)
