"""Fixes that several checks offer."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from flashwright.lang.diagnostic import Diagnostic, Edit, Fix, Label
from flashwright.lang.format import format_expr
from flashwright.lang.nodes import Compute, Expr, Name
from flashwright.program.vocabulary import split


def guess_fix(name: Name, known: Iterable[str], cutoff: float = 0.72) -> Fix | None:
    """A fix that replaces a name by the most similar known one; None if none is similar enough."""
    near = difflib.get_close_matches(name.id, list(known), n=1, cutoff=cutoff)
    if not near or near[0] == name.id:
        return None
    # `Q_shared` and `K_shared` are similar as texts, but one is not a misspelling of the other.
    (base, space), (other, _) = split(name.id), split(near[0])
    if space and difflib.SequenceMatcher(None, base.lower(), other.lower()).ratio() < 0.72:
        return None
    return Fix(f"did you mean `{near[0]}`?", (Edit(name.span.start, name.span.end, near[0]),))


def rounded_down(expr: Expr) -> Fix:
    """A fix that puts `floor(...)` around an expression that must be a whole number."""
    span = expr.span
    edits = (Edit(span.start, span.start, "floor("), Edit(span.end, span.end, ")"))
    return Fix(f"round it down: `floor({format_expr(expr)})`", edits)


def missing_reshape(stmt: Compute, operand: Name) -> Diagnostic:
    """FW501 for a GEMM whose operand is the result of another GEMM without a Reshape."""
    name = operand.id
    text = f"`{name}` is the result of a GEMM and cannot be the operand of another as it is"
    line = f"Reshape {name} from (MMA_C, MMA_M, MMA_N) to (MMA_A, MMA_M, MMA_N_new)"
    indent = " " * (stmt.span.column - 1)
    fix = Fix(f"insert `{line}`", (Edit(stmt.span.start, stmt.span.start, f"{line}\n{indent}"),))
    hint = "its layout in registers is MMA_C; an operand's is MMA_A"
    where = (Label(operand.span, "in the layout MMA_C"),)
    return Diagnostic("FW501", text, stmt.span, help=hint, fix=fix, secondary=where)
