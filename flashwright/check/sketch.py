"""What can be told of a sketch: sizes are open, but the order of things is not."""

from __future__ import annotations

from collections.abc import Iterator

from flashwright.check.vocabulary import split
from flashwright.lang.diagnostic import Diagnostic, Edit, Fix
from flashwright.lang.nodes import (
    Compute,
    Copy,
    For,
    If,
    Name,
    Statement,
    Tree,
    expressions,
)


def check_sketch(tree: Tree) -> Iterator[Diagnostic]:
    """Findings about a sketch."""
    yield from _body(tree.body, set(), None, set())


def _body(
    body: tuple[Statement, ...],
    placed: set[tuple[str, str]],
    walked: set[str] | None,
    weighed: set[str],
) -> Iterator[Diagnostic]:
    """`placed`: what is where; `walked`: copied in this loop; `weighed`: past its exponential."""
    for stmt in body:
        match stmt:
            case Copy():
                base = split((stmt.target or stmt.name).id)[0]
                origin = split(stmt.name.id)[0]
                if stmt.source != "global" and (origin, stmt.source) not in placed:
                    text = f"nothing puts `{origin}` into {stmt.source} before this Copy"
                    yield Diagnostic("FW403", text, stmt.name.span)
                placed.add((base, stmt.dest))
                if walked is not None:
                    walked.add(base)
            case Compute():
                yield from _compute(stmt, placed, walked, weighed)
            case For():
                yield from _body(stmt.body, placed, set(), weighed)
            case If():
                yield from _body(stmt.then, placed, walked, weighed)
                yield from _body(stmt.orelse, placed, walked, weighed)


def _compute(
    stmt: Compute, placed: set[tuple[str, str]], walked: set[str] | None, weighed: set[str]
) -> Iterator[Diagnostic]:
    verb = stmt.operation
    for expr in (e for arg in stmt.args for e in expressions(arg)):
        if isinstance(expr, Name):
            base, space = split(expr.id)
            if space is not None and space != "global" and (base, space) not in placed:
                text = f"nothing puts `{base}` into {space} before this line"
                hint = f"`Copy {base} from global to {space}`"
                yield Diagnostic("FW403", text, expr.span, help=hint)
    first = split(stmt.args[0].id)[0] if stmt.args and isinstance(stmt.args[0], Name) else ""
    if verb == "gemm" and len(stmt.args) == 2:
        yield from _contraction(stmt, walked or set())
        weighed.discard(split(stmt.target.id)[0] if stmt.target else "")
    elif verb == "softmax":
        weighed.add(first)
    elif verb == "mask" and first in weighed:
        text = f"`{first}` has been through the exponential: -inf is no weight"
        hint = "move the Mask up, between the GEMM and the Softmax"
        yield Diagnostic("FW608", text, stmt.span, help=hint)
    if stmt.target is not None:
        placed.add((split(stmt.target.id)[0], "register"))


def _contraction(stmt: Compute, walked: set[str]) -> Iterator[Diagnostic]:
    """A `get` over the rows of a block just copied would forget every block but the last."""
    left, right = stmt.args
    if stmt.mode == "accumulate" or not isinstance(right, Name) or not isinstance(left, Name):
        return
    if split(right.id)[0] in walked and split(left.id)[0] not in walked:
        text = (
            f"this sums over the rows of `{right.id}`, the positions that the loop walks along, "
            "and forgets the sum in the next round"
        )
        fix = Fix(f"transpose it: `{right.id}.T`", (Edit(right.span.end, right.span.end, ".T"),))
        yield Diagnostic("FW503", text, stmt.span, fix=fix)
