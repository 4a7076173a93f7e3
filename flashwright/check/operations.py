"""Operations: every verb is known and has its operands and clauses, in sketches and code."""

from __future__ import annotations

from collections.abc import Iterator

from flashwright.lang.diagnostic import Diagnostic
from flashwright.lang.nodes import (
    Call,
    Compute,
    Copy,
    Name,
    Span,
    Statement,
    Transpose,
    Tree,
    expressions,
    statements,
)
from flashwright.program.fixes import guess_fix
from flashwright.program.vocabulary import FUNCTIONS, STATEMENT_VERBS, VERBS, Operation


def check_operations(tree: Tree) -> Iterator[Diagnostic]:
    """Findings about verbs, functions and clauses."""
    for stmt in statements(tree.body):
        yield from _calls(stmt)
        if isinstance(stmt, Copy) and stmt.adds and stmt.dest != "global":
            text = "`and accumulate` of a Copy adds to global memory"
            hint = "to add to a tile in registers: `Compute X and accumulate Y`"
            yield Diagnostic("FW205", text, stmt.span, help=hint)
        if isinstance(stmt, Copy) and stmt.turn is not None and not stmt.adds:
            text = "`at turn` orders additions, and this Copy does not add"
            hint = "write `and accumulate` before it, or leave it out"
            yield Diagnostic("FW205", text, stmt.turn.span, help=hint)
        if isinstance(stmt, Compute):
            yield from _verb(stmt)
            if stmt.verb is None or stmt.operation in VERBS:
                yield from _clauses(stmt)


def _calls(stmt: Statement) -> Iterator[Diagnostic]:
    gemm = isinstance(stmt, Compute) and stmt.operation == "gemm"
    direct = {id(a) for a in stmt.args} if isinstance(stmt, Compute) and gemm else set()
    for expr in expressions(stmt):
        if isinstance(expr, Call):
            known = FUNCTIONS.get(expr.func.id.lower())
            if known is None:
                yield _unknown(expr.func, "function", FUNCTIONS)
            else:
                yield from _arity(expr.func.id, known, len(expr.args), expr.span)
        elif isinstance(expr, Transpose) and id(expr) not in direct:
            text = f"`{expr.operand.id}.T` can only be an operand of a GEMM"
            yield Diagnostic("FW206", text, expr.span)


def _verb(stmt: Compute) -> Iterator[Diagnostic]:
    if stmt.verb is None:
        yield from _arity("an expression", Operation((1,)), len(stmt.args), stmt.span)
        return
    known = VERBS.get(stmt.operation)
    if known is None:
        yield _unknown(stmt.verb, "operation", VERBS)
    else:
        yield from _arity(stmt.verb.id, known, len(stmt.args), stmt.span)


def _unknown(name: Name, what: str, table: dict[str, Operation]) -> Diagnostic:
    words = [w if w != "gemm" else "GEMM" for w in table]
    fix = guess_fix(name, [*words, *(w.capitalize() for w in words if w != "GEMM")])
    listed = ", ".join(words)
    return Diagnostic(
        "FW204", f"unknown {what} `{name.id}`", name.span, help=f"TL has {listed}", fix=fix
    )


def _arity(name: str, operation: Operation, count: int, span: Span) -> Iterator[Diagnostic]:
    if count not in operation.arity:
        wanted = operation.arity[0]
        more = " or more" if len(operation.arity) > 1 else ""
        noun = "operand" if wanted == 1 and not more else "operands"
        yield Diagnostic("FW205", f"{name} takes {wanted}{more} {noun}, not {count}", span)


def _clauses(stmt: Compute) -> Iterator[Diagnostic]:
    verb = stmt.operation
    in_place = verb in ("softmax", "mask")
    for arg in stmt.args if in_place else ():
        if not isinstance(arg, Name):
            text = f"{verb.capitalize()} works on a tile in place: name the tile"
            yield Diagnostic("FW206", text, arg.span)
    if not in_place and stmt.target is None:
        text = "the result has no target"
        hint = "end the statement with `and get X` (or `and accumulate X`)"
        yield Diagnostic("FW205", text, stmt.span, help=hint)
    if in_place and stmt.target is not None:
        text = f"{verb.capitalize()} changes its tile in place and takes no target"
        yield Diagnostic("FW205", text, stmt.target.span, help="drop the `and get` clause")
    if (verb == "mask") != (stmt.where is not None):
        text = "Mask has no condition" if verb == "mask" else "`where` belongs to Mask"
        hint = "`Compute Mask S where kv_idx <= q_idx`"
        yield Diagnostic("FW205", text, stmt.span, help=hint)
    if stmt.state and (verb != "softmax" or len(stmt.state) != 2):
        text = "`with` names the running maximum and sum of a Softmax"
        hint = "`Compute Softmax S with Smax and Ssum`"
        yield Diagnostic("FW205", text, stmt.state[0].span, help=hint)
    if stmt.rescale and (verb != "softmax" or not stmt.state):
        text = "`rescale` belongs to a Softmax with a running maximum"
        hint = "`Compute Softmax S with Smax and Ssum and rescale O`"
        yield Diagnostic("FW205", text, stmt.rescale[0].span, help=hint)


def is_elementwise(stmt: Compute) -> bool:
    """Whether a statement computes one elementwise expression (not GEMM, Softmax or Mask)."""
    return stmt.operation not in STATEMENT_VERBS
