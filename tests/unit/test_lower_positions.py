"""Where tiles lie: which coordinates are the same, and what is known of them behind branches and in
loops."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from flashwright.lang.nodes import Binary, Call, Expr, Name, Num, Unary
from flashwright.lang.parse import parse
from flashwright.lower.frontend.positions import UNKNOWN, Form, Positions, Where, put
from flashwright.program.scalars import NotScalar, Value, evaluate
from tests.unit.lowered import printed, refusal
from tests.unit.tl_attention import COPY, attention

KNOWN: dict[str, Value] = {"BM": 64, "BN": 32, "Half": Fraction(1, 2), "Cap": 20.5}


def expr(source: str) -> Expr:
    (stmt,) = parse(f"let x = {source}\n").body
    return stmt.value  # type: ignore[union-attr]


def positions(**lets: str) -> Positions:
    made = Positions(KNOWN)
    for name, source in lets.items():
        made.let(name, expr(source))
    return made


def place(source: str, at: Positions | None = None) -> Where:
    coord = expr(source)
    return Where("kv_len", coord, 32, "L", (at or positions()).full(coord))


# --- the normal form --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("i + 1", "1 + i"),
        ("i - 1 + 1", "i"),
        ("2 * (i + j)", "j + i + i + j"),
        ("(i + 1) * (i - 1)", "i * i - 1"),
        ("i * BN / BN", "i"),
        ("kv_len / BN - 1", "(kv_len - BN) / BN"),
        ("i * Half", "i / 2"),
        ("BM / BN * i", "2 * i"),
        ("-(i - j)", "j - i"),
        ("i - i", "0"),
        ("floor(i / 2 + j)", "floor(j + i / 2)"),
        ("floor(BM / 5)", "12"),
        ("ceil(BM / 5)", "13"),
        ("floor(-BM / 5)", "-13"),
        ("min(i + 1, n)", "min(1 + i, n)"),
        ("max(i, i)", "i"),
        ("where(i < n, j, j + 0)", "j"),
        ("where(i + 1 < n, i + 1, 0)", "where(1 + i < n, 1 + i, 0)"),
        ("Table[item, i + 1]", "Table[item, 1 + i]"),
        ("Table[i] * 2", "Table[i] + Table[i]"),
        ("i % 2 + 1", "1 + i % 2"),
        ("i / n", "i / n"),
        ("MIN(i, 2)", "min(i, 2)"),
    ],
)
def test_the_same(a: str, b: str) -> None:
    assert positions().same(expr(a), expr(b))


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("i", "j"),
        ("i", "i + 1"),
        ("where(i + 1 < n, i + 1, 0)", "0"),
        ("where(i + 1 < n, i + 1, 0)", "i + 1"),
        ("where(i < n, i, 0)", "where(i < n, 0, i)"),
        ("where(i < n, i, 0)", "where(i <= n, i, 0)"),
        ("min(i, n - 1)", "i"),
        ("max(i, 0)", "i"),
        ("floor(i / 2)", "i / 2"),
        ("floor(i / 2)", "ceil(i / 2)"),
        ("floor(i / 2) * 2", "i"),
        ("i % 2", "0"),
        ("i / n", "n / i"),
        ("Table[i]", "Table[i + 1]"),
        ("Table[i]", "Other[i]"),
        ("i * j", "i + j"),
    ],
)
def test_not_the_same(a: str, b: str) -> None:
    assert not positions().same(expr(a), expr(b))


def test_lets_are_looked_through() -> None:
    at = positions(next="i + 1", later="next + 1")
    assert at.agree(place("later", at), place("i + 2", at))
    assert not at.agree(place("later", at), place("next", at))


def test_a_position_keeps_the_value_that_a_let_had() -> None:
    at = positions(page="i")
    noted = place("page", at)
    assert at.current(noted) == expr("page")
    at.let("page", expr("i + 1"))
    assert not at.agree(noted, place("page", at))
    assert at.current(noted) == expr("i")


def test_another_dimension_or_size_is_another_position() -> None:
    at, here = positions(), place("i")
    assert at.agree(here, place("i + 0"))
    assert not at.agree(here, replace(here, dim="q_len"))
    assert not at.agree(here, replace(here, size=64))
    assert not at.agree(here, None)
    assert not at.agree(UNKNOWN, UNKNOWN)


NAMES = st.sampled_from(("i", "j", "n", "BN")).map(Name)
SMALL = st.integers(0, 4).map(lambda n: Num(str(n)))


def larger(inner: st.SearchStrategy[Expr]) -> st.SearchStrategy[Expr]:
    return (
        st.builds(Binary, st.sampled_from(("+", "-", "*", "/", "%")), inner, inner)
        | st.builds(lambda a: Unary("-", a), inner)
        | st.builds(lambda f, a: Call(Name(f), (a,)), st.sampled_from(("floor", "ceil")), inner)
        | st.builds(
            lambda f, a, b: Call(Name(f), (a, b)), st.sampled_from(("min", "max")), *[inner] * 2
        )
        | st.builds(lambda a, b, c: Call(Name("where"), (Binary("<", a, b), b, c)), *[inner] * 3)
    )


EXPRESSIONS = st.recursive(SMALL | NAMES, larger, max_leaves=6)
NUMBERS = st.fixed_dictionaries({n: st.integers(-9, 9) for n in ("i", "j", "n")})


@given(st.lists(EXPRESSIONS, min_size=2, max_size=6), NUMBERS)
def test_equal_forms_are_equal_values(trees: list[Expr], numbers: dict[str, int]) -> None:
    at = positions()
    found: dict[Form, Value] = {}
    for tree in trees:
        try:
            value = evaluate(tree, {**KNOWN, **numbers})
        except NotScalar:
            continue
        assert found.setdefault(at.form(tree), value) == value


@given(EXPRESSIONS, EXPRESSIONS, NUMBERS)
def test_put_keeps_values(tree: Expr, value: Expr, numbers: dict[str, int]) -> None:
    env = {**KNOWN, **numbers}
    try:
        expected = evaluate(tree, {**env, "i": evaluate(value, env)})
    except NotScalar:
        assume(False)
    assert evaluate(put(tree, "i", value), env) == expected


CONDITIONS = st.recursive(
    st.builds(Binary, st.sampled_from(("<", "<=", ">", ">=", "==")), EXPRESSIONS, EXPRESSIONS),
    lambda inner: (
        st.builds(lambda a: Unary("not", a), inner)
        | st.builds(Binary, st.sampled_from(("and", "or")), inner, inner)
    ),
    max_leaves=3,
)
NEAR = [expr(x) for x in ("i + 1", "i", "2 * i", "i / 3", "n", "2 * n", "n / 3 - 1", "n - 1")]
BOUNDS = [*NEAR, *(expr(x) for x in ("ceil(n / 3)", "ceil(n / 3) - 1", "n / 3", "floor(n / 3)"))]
SIMILAR = st.builds(
    Binary,
    st.sampled_from(("<", "<=", ">", ">=")),
    st.sampled_from(BOUNDS),
    st.sampled_from(BOUNDS),
)


@given(CONDITIONS | SIMILAR, SIMILAR, NUMBERS)
def test_what_is_known_decides_no_more_than_follows(
    condition: Expr, true: Binary, numbers: dict[str, int]
) -> None:
    """Wherever `a < b` holds, an expression has the value it has without that knowledge."""
    true, env = replace(true, op="<"), {**KNOWN, **numbers}
    tree = Call(Name("where"), (condition, Num("1"), Num("2")))
    try:
        expected = evaluate(tree, env)
    except NotScalar:
        assume(False)
    if evaluate(true, env):
        assert evaluate(positions().given(tree, true), env) == expected


def test_put_is_tidy() -> None:
    assert put(expr("i + 1"), "i", expr("i - 1")) == expr("i")
    assert put(expr("i + 3"), "i", expr("i - 1")) == expr("i + 2")
    assert put(expr("Table[i]"), "i", expr("j")) == expr("Table[j]")


# --- branches and loops -----------------------------------------------------------------------


def test_behind_an_if_both_arms_count() -> None:
    at, condition = positions(), expr("i < 3")
    found = at.after_if(condition, place("i"), place("0"))
    assert found is not None
    assert at.same(found.full, expr("where(i < 3, i, 0)"))
    assert at.after_if(condition, place("i"), place("0 + i")) == place("i")
    assert at.after_if(condition, place("i"), None) == UNKNOWN
    assert at.after_if(condition, None, None) is None
    assert at.after_if(condition, place("i"), UNKNOWN) == UNKNOWN
    assert at.after_if(condition, place("i"), replace(place("0"), dim="q_len")) == UNKNOWN


HIGH = expr("kv_len / BN")


@pytest.mark.parametrize(
    ("before", "after", "low", "top"),
    [
        ("0", "i + 1", "0", "i"),
        ("first", "i + 1", "first", "i"),
        ("2", "i + 3", "0", "i + 2"),
        ("Table[0]", "Table[i + 1]", "0", "Table[i]"),
        ("7", "7", "0", "7"),
        ("0", "where(i < kv_len / BN - 1, i + 1, i)", "0", "i"),
        ("0", "where(i + 1 < kv_len / BN, i + 1, 0)", "0", "i"),
        ("0", "where(i * BN < kv_len - BN, i + 1, i)", "0", "i"),
        ("0", "where((i + 1) * BN < kv_len, i + 1, i)", "0", "i"),
        ("0", "where(kv_len > (i + 1) * BN, i + 1, i)", "0", "i"),
        ("0", "where((i + 1) * BN >= kv_len, 0, i + 1)", "0", "i"),
        ("0", "where(not (i + 1) * BN < kv_len, 0, i + 1)", "0", "i"),
        ("0", "where(i + 1 < ceil(kv_len / BN), i + 1, i)", "0", "i"),
        ("0", "where(i < ceil(kv_len / BN) - 1, i + 1, i)", "0", "i"),
        ("0", "where(i < kv_len / BN, i + 1, 0)", "0", "i"),  # in the body it always holds
        ("0", "where(i < kv_len / BN - 2, i + 1, i)", "0", None),  # ends earlier than the loop
        ("0", "where(i < kv_len / BN - 1 and i < n, i + 1, i)", "0", None),
        ("0", "where(i < kv_len / BN - 1 or i < n, i + 1, i)", "0", "i"),
        ("0", "where(i < floor(kv_len / BN) - 1, i + 1, i)", "0", None),
        ("0", "where(i / 2 < ceil(kv_len / BN) - 1, i + 1, i)", "0", None),
        ("0", "where(i < n, i + 1, i)", "0", None),  # goes on otherwise than the loop
        ("1", "i + 1", "0", None),
        ("0", "i", "0", None),
    ],
)
def test_at_the_top_of_a_loop(before: str, after: str, low: str, top: str | None) -> None:
    at = positions()
    found = at.at_top(place(before), place(after), "i", expr(low), HIGH)
    assert found is not None
    if top is None:
        assert found == UNKNOWN
        return
    assert at.same(found.full, expr(top))
    assert at.holds(found, place(after), "i", HIGH)


@pytest.mark.parametrize(
    ("top", "after", "holds"),
    [
        (place("i"), place("i + 1"), True),
        (place("i"), place("where(i < kv_len / BN - 1, i + 1, i)"), True),
        (place("i"), place("where(i < n, i + 1, i)"), False),
        (place("0"), place("0"), True),
        (place("0"), place("i"), False),
        (place("0"), None, False),
        (place("0"), UNKNOWN, False),
        (UNKNOWN, place("i"), True),
        (None, place("i"), True),
    ],
)
def test_what_holds_in_the_next_iteration_too(
    top: Where | None, after: Where | None, holds: bool
) -> None:
    assert positions().holds(top, after, "i", HIGH) is holds


@pytest.mark.parametrize(
    ("top", "after", "behind"),
    [
        ("i", "i + 1", "max(0, ceil(kv_len / BN))"),
        ("7", "7", "7"),
        (None, "i", "ceil(kv_len / BN) - 1"),
        (None, "7", "7"),
        ("i", "where(i < kv_len / BN - 1, i + 1, i)", None),  # the last iteration does otherwise
    ],
)
def test_behind_a_loop(top: str | None, after: str, behind: str | None) -> None:
    at = positions()
    found = at.behind(top and place(top), place(after), "i", expr("0"), HIGH)  # type: ignore[arg-type]
    assert found is not None
    if behind is None:
        assert found == UNKNOWN
    else:
        assert at.same(found.full, expr(behind))


# --- programs ---------------------------------------------------------------------------------


def copy_k(coord: str) -> str:
    return COPY.format("K").replace("L = i", f"L = {coord}")


FIRST = f"if 0 < kv_len / BN\n  {copy_k('0')}\nend"
POSITION = "int const kv_idx = {} + at.col(n);"


def masked_at(**parts: object) -> str:
    """How the kernel computes kv_idx in its mask."""
    source = printed(attention(copy_k="", **parts), strict=False)
    (found,) = (line.strip() for line in source.splitlines() if "int const kv_idx = " in line)
    return found.removeprefix("int const kv_idx = ").removesuffix(" + at.col(n);")


@pytest.mark.parametrize(
    "fetch",
    [
        f"if i < kv_len / BN - 1\n    {copy_k('i + 1')}\n  end",
        f"if i + 1 < kv_len / BN\n    {copy_k('i + 1')}\n  end",
        f"if kv_len / BN - 1 > i\n    {copy_k('i + 1')}\n  end",
        f"if (i + 1) * BN < kv_len\n    {copy_k('i + 1')}\n  end",
        f"if i + 1 < ceil(kv_len / BN)\n    {copy_k('i + 1')}\n  end",
        copy_k("i + 1"),
        copy_k("where(i + 1 < kv_len / BN, i + 1, 0)"),
        copy_k("where(i < kv_len / BN - 1, i + 1, i)"),
        f"let after = i + 1\n  {copy_k('after')}",
    ],
)
def test_prefetched_keys_are_masked_where_they_lie(fetch: str) -> None:
    """The scores are of block i, though K holds block i + 1 by the time of the mask."""
    prefetch = f"{fetch}\n  Compute S * 1 and get S"
    assert masked_at(copy_q=FIRST, scale=prefetch) == "i * BN"
    assert masked_at(copy_q=copy_k("0"), scale=prefetch) == "i * BN"


def test_a_let_in_a_loop_is_that_of_each_iteration() -> None:
    """It had the value of iteration 0."""
    source = printed(
        attention(copy_k=f"let here = floor(i / 1)\n  {copy_k('here')}", mask="kv_idx < kv_len")
    )
    assert POSITION.format("here * BN") in source


def test_the_arms_of_an_if_have_positions_of_their_own() -> None:
    """One of them was lost."""
    arms = f"if i < 3\n    {copy_k('i')}\n  else\n    {copy_k('i + 5')}\n  end"
    source = printed(attention(copy_k=arms), strict=False)
    assert POSITION.format("(i < 3 ? i : i + 5) * BN") in source


@pytest.mark.parametrize(
    "change",
    [
        f"if i < 3\n    {copy_k('i + 1')}\n  end",
        copy_k("i + 2"),
        copy_k("i"),
        f"for j = 0:2\n    if j < i\n      {copy_k('i + j')}\n    end\n  end",
    ],
)
def test_keys_that_lie_nobody_knows_where_are_refused(change: str) -> None:
    """They were masked as if they were those of before the loop."""
    found = refusal(attention(copy_q=FIRST, copy_k="", scale=change))
    assert found.code == "FW811"
    assert "where this tile lies cannot be told" in found.message
