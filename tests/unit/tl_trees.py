"""Random TL trees, as the parser could have made them."""

from dataclasses import replace

from hypothesis import strategies as st

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
    If,
    Index,
    Let,
    Mode,
    Name,
    Num,
    Param,
    Reshape,
    Statement,
    Transpose,
    Tree,
    Unary,
)

PLAIN_NAMES = ["Q", "K_shared", "S", "O_register", "i", "BM", "T", "end_", "forward", "_x", "gets"]
CLAUSE_WORDS = [
    "offset",
    "stages",
    "memory",
    "coord",
    "at",
    "along",
    "rows",
    "column",
]  # names where the clause cannot stand
names = st.sampled_from(PLAIN_NAMES + CLAUSE_WORDS).map(Name)
numbers = st.sampled_from(["0", "128", "1e30", "0.5", "2.5e-3", "1E+2"]).map(Num)
spaces = st.sampled_from(["global", "shared", "register"])
texts = st.text(st.characters(exclude_categories=["Cc", "Cs", "Zl", "Zp"]), max_size=12).map(
    str.strip
)
OPS = ["+", "-", "*", "/", "%", "<", "<=", ">", ">=", "==", "!=", "and", "or"]


def several(items: st.SearchStrategy, most: int = 3) -> st.SearchStrategy:
    return st.lists(items, min_size=1, max_size=most).map(tuple)


def _larger(inner: st.SearchStrategy[Expr]) -> st.SearchStrategy[Expr]:
    return st.one_of(
        st.builds(Unary, st.sampled_from(["-", "not"]), inner),
        st.builds(Binary, st.sampled_from(OPS), inner, inner),
        st.builds(Call, names, several(inner, 2)),
        st.builds(Index, names, several(inner, 2)),
    )


exprs = st.recursive(st.one_of(numbers, names, st.builds(Transpose, names)), _larger, max_leaves=8)
maybe_name = st.none() | names
verbs = st.sampled_from(["GEMM", "softmax", "Multiply", "exp", "offset"]).map(Name)
modes: list[Mode] = ["get", "get new", "accumulate"]
maybe_modes = st.none() | st.sampled_from(modes)


def _starts_plainly(expr: Expr) -> bool:
    while isinstance(expr, Binary):
        expr = expr.left
    return not isinstance(expr, Unary)


@st.composite
def computes(draw: st.DrawFn) -> Compute:
    verb = draw(st.none() | verbs)
    args = draw(several(exprs))
    if verb is not None and not _starts_plainly(args[0]):
        verb = Name("Multiply")
    elif verb is not None:
        args = (draw(names), *args)
    mode = draw(maybe_modes)
    return Compute(
        verb,
        args,
        draw(st.just(()) | several(names)),
        draw(st.none() | exprs),
        mode,
        draw(names) if mode else None,
        draw(st.just(()) | several(names)),
    )


plain = st.one_of(
    st.builds(Param, names, exprs),
    st.builds(Dim, several(names)),
    st.builds(Let, names, exprs),
    st.builds(Grid, several(st.builds(GridAxis, names, exprs, exprs))),
    st.builds(
        Allocate,
        names,
        spaces,
        several(st.builds(Axis, maybe_name, exprs)),
        maybe_name,
        st.none() | exprs,
        st.none() | exprs,
        st.sampled_from([None, "rows", "columns"]),
    ),
    st.builds(
        Copy,
        names,
        st.none() | several(exprs),
        st.none() | several(st.builds(Coord, names, exprs, st.booleans())),
        spaces,
        spaces,
        maybe_name,
        st.none() | exprs,
    ),
    computes(),
    st.builds(Reshape, names, several(names), several(names), maybe_name, maybe_name),
)


def _finish(stmts: list[tuple[Statement, str | None, bool]]) -> tuple[Statement, ...]:
    """Comments and blank lines where the parser would put them."""
    return tuple(
        replace(stmt, gap=gap and n > 0, comment=None if isinstance(stmt, Comment) else comment)
        for n, (stmt, comment, gap) in enumerate(stmts)
    )


def bodies(stmts: st.SearchStrategy[Statement], least: int = 0) -> st.SearchStrategy:
    one = st.tuples(stmts, st.none() | texts, st.booleans())
    return st.lists(one, min_size=least, max_size=4).map(_finish)


def _blocks(inner: st.SearchStrategy[Statement]) -> st.SearchStrategy[Statement]:
    body = bodies(inner)
    return st.one_of(
        st.builds(For, names, exprs, exprs, body), st.builds(If, exprs, body, st.just(()) | body)
    )


def trees() -> st.SearchStrategy[Tree]:
    stmts = st.recursive(plain | st.builds(Comment, texts), _blocks, max_leaves=6)
    # One real statement: a program of comments alone is refused.
    whole = st.tuples(bodies(stmts), plain)
    return whole.map(lambda parts: Tree((*parts[0], parts[1])))
