"""Scalars in C++: exact division without fractions, and no parenthesis too many or too few."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashwright.lang.diagnostic import Failed
from flashwright.lang.nodes import NOWHERE, Binary, Call, Expr, Name, Num, Unary
from flashwright.lang.parse import parse
from flashwright.lower.frontend.scalars import Scalar, Scalars, constant, named
from flashwright.lower.printing.cpp import text as in_cpp
from flashwright.lower.term import Read, Var
from flashwright.lower.term_value import value
from flashwright.program.scalars import evaluate

PARAMS: dict[str, int | float | Fraction] = {
    "BM": 64,
    "BN": 48,
    "Window": 70,
    "Scale": Fraction(1, 8),
    "Cap": 20.5,
}
DIMS = ("q_len", "kv_len", "heads", "kv_heads")


def expr(text: str) -> Expr:
    (stmt,) = parse(f"let x = {text}\n").body
    return stmt.value  # type: ignore[union-attr]


def scalars() -> Scalars:
    scope = {n: named(n, v) for n, v in PARAMS.items()}
    scope |= {n: Scalar(Var(n)) for n in (*DIMS, "i", "block")}
    least = {n: v for n, v in PARAMS.items() if isinstance(v, int)} | dict.fromkeys(DIMS, 1)
    return Scalars(scope, lambda e, index: Read(e.tensor.id, index, "int"), least)


def cpp(text: str) -> str:
    return in_cpp(scalars()(expr(text)).term)


def whole(text: str) -> str:
    return in_cpp(scalars()(expr(text)).as_int(NOWHERE))


@pytest.mark.parametrize(
    ("tl", "printed"),
    [
        ("i < kv_len / BN", "i * BN < kv_len"),
        ("i < kv_len / BN - 1", "i * BN < kv_len - BN"),
        ("i + 1 < kv_len / BN", "(i + 1) * BN < kv_len"),
        ("i / 2 < kv_len / BN", "i * BN < kv_len * 2"),
        ("i - (block - 1)", "i - (block - 1)"),
        ("(i - block) - 1", "i - block - 1"),
        ("i * (block + 1)", "i * (block + 1)"),
        ("-(i + 1)", "-(i + 1)"),
        ("i < 1 and (block < 2 or i > 3)", "i < 1 && (block < 2 || i > 3)"),
        ("not i < 1", "!(i < 1)"),
        ("i + 0", "i"),
        ("1 * i", "i"),
        ("2 * 3 + i", "6 + i"),
        ("Table[i]", "*p.Table.at(i)"),
    ],
)
def test_printed(tl: str, printed: str) -> None:
    assert cpp(tl) == printed


@pytest.mark.parametrize(
    ("tl", "printed"),
    [
        ("floor(i * kv_heads / heads)", "fw::floor_div(i * kv_heads, heads)"),
        ("ceil(kv_len / BN)", "fw::ceil_div(kv_len, BN)"),
        ("floor(i)", "i"),
        ("floor(min(kv_len / BN, i))", "fw::floor_div(fw::min(kv_len, i * BN), BN)"),
        ("i % 4", "fw::floor_mod<4>(i)"),
        ("where(i < 2, i, block)", "i < 2 ? i : block"),
    ],
)
def test_whole_numbers(tl: str, printed: str) -> None:
    assert whole(tl) == printed


def test_a_fraction_where_a_whole_number_belongs_comes_out_whole() -> None:
    """The checker sees to it, on its problems; the division is then exact."""
    assert whole("kv_len / BN") == "fw::floor_div(kv_len, BN)"
    with pytest.raises(Failed) as caught:
        whole("Cap * i")
    assert caught.value.diagnostics[0].code == "FW811"


def test_fractions_and_floats() -> None:
    assert in_cpp(scalars()(expr("Scale")).as_float()) == "0.125f"
    assert cpp("Cap * i") == "Cap * float(i)"
    assert cpp("sqrt(i)") == "fw::sqrt(float(i))"
    assert in_cpp(scalars()(expr("kv_len / 3")).as_float()) == "float(kv_len) / 3.f"
    assert in_cpp(constant(True).term) == "true"


SMALL = st.integers(1, 9).map(lambda n: Num(str(n)))
NAMES = st.sampled_from(("i", "block", "kv_len", "q_len", "BN")).map(Name)
OPERATORS = st.sampled_from(("+", "-", "*"))


def trees(inner: st.SearchStrategy[Expr]) -> st.SearchStrategy[Expr]:
    return (
        st.builds(Binary, OPERATORS, inner, inner)
        | st.builds(lambda a, b: Binary("/", a, b), inner, SMALL)
        | st.builds(lambda a: Unary("-", a), inner)
        | st.builds(lambda f, a: Call(Name(f), (a,)), st.sampled_from(("floor", "ceil")), inner)
        | st.builds(
            lambda f, a, b: Call(Name(f), (a, b)), st.sampled_from(("min", "max")), inner, inner
        )
    )


EXPRESSIONS = st.recursive(SMALL | NAMES, trees, max_leaves=7)
NUMBERS = st.fixed_dictionaries({n: st.integers(0, 50) for n in ("i", "block", "kv_len", "q_len")})


@given(EXPRESSIONS, EXPRESSIONS, st.sampled_from(("<", "<=", ">", ">=", "==", "!=")), NUMBERS)
def test_comparisons_are_exact(left: Expr, right: Expr, op: str, numbers: dict[str, int]) -> None:
    """Whatever is divided by what: C++ with whole numbers says the same as exact arithmetic."""
    tree, env = Binary(op, left, right), {**numbers, "BN": 48}
    found = scalars()(tree).term
    assert value(found, env) == evaluate(tree, env), in_cpp(found)
