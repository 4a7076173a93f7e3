"""Terms: substitution simplifies, text keeps what is meant, integer arithmetic is exact."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from flashwright.lang.nodes import NOWHERE, Binary, Call, Expr, Name, Num, Unary
from flashwright.lang.parse import parse
from flashwright.lower import term as terms
from flashwright.lower.frontend.scalars import Scalar, Scalars
from flashwright.lower.printing.cpp import text
from flashwright.lower.term import (
    ONE,
    ZERO,
    At,
    Convert,
    Position,
    Read,
    RingStage,
    Select,
    Term,
    Var,
    as_float,
    binary,
    call,
    integer,
    minus,
    plus,
    positive,
    reads_memory,
    real,
    substitute,
    times,
    variables,
    widened,
)
from flashwright.lower.term_value import value
from flashwright.program.scalars import NotScalar, evaluate

A, B, C = (Var(x) for x in "abc")
X, Y, Z = (Var(x, "float") for x in "xyz")


# --- printing ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("term", "cpp"),
    [
        (binary("+", X, binary("+", Y, Z)), "x + (y + z)"),  # the order of fp32 operations stays
        (binary("*", X, binary("*", Y, Z)), "x * (y * z)"),
        (binary("*", A, binary("*", B, C)), "a * b * c"),
        (binary("*", A, binary("%", B, C)), "a * (b % c)"),
        (binary("%", binary("*", A, B), C), "a * b % c"),
        (binary("-", A, binary("-", B, C)), "a - (b - c)"),
        (binary("-", binary("-", A, B), C), "a - b - c"),
        (binary("*", binary("+", A, B), C), "(a + b) * c"),
        (binary("<", plus(A, 1), times(B, C)), "a + 1 < b * c"),
        (binary("==", binary("<", A, B), binary("<", B, C)), "a < b == b < c"),
        (binary("-", A, integer(-1)), "a - -1"),
        (terms.Unary("-", integer(-1)), "-(-1)"),
        (terms.Unary("!", binary("<", A, B)), "!(a < b)"),
        (terms.Unary("-", Read("T", (A,), "int")), "-(*p.T.at(a))"),
        (times(Read("T", (A, B), "int"), C), "*p.T.at(a, b) * c"),
        (Read("T", (plus(A, 1),), "float"), "float(*p.T.at(a + 1))"),
        (Select(binary("<", X, Y), Select(A, Y, Z), Z), "x < y ? (a ? y : z) : z"),
        (plus(Select(A, B, C), 1), "(a ? b : c) + 1"),
        (binary("&&", binary("||", A, B), C), "(a || b) && c"),
        (binary("&&", A, binary("&&", B, C)), "a && b && c"),
        (binary("&", binary("|", A, B), binary("==", B, C)), "(a | b) & b == c"),
        (call("min", plus(A, 1), B, type="int"), "fw::min(a + 1, b)"),
        (as_float(plus(A, B)), "float(a + b)"),
        (as_float(integer(3)), "3.f"),
        (At("S", frozenset("mn")), "S(m, n)"),
        (At("Smax", frozenset("m")), "Smax(m)"),
        (Position("kv_idx"), "kv_idx"),
        (RingStage("K_ring"), "K_ring.stage"),
        (terms.Lit(True, "bool"), "true"),
        (real(0.125), "0.125f"),
        (real(-2), "-2.f"),
        (real(1e30), "1e+30f"),
        (real(float("inf")), "INFINITY"),
        (real(float("-inf")), "-INFINITY"),
        (binary("*", X, real(float("-inf"))), "x * -INFINITY"),
    ],
)
def test_parentheses_stand_where_they_are_needed(term: Term, cpp: str) -> None:
    assert text(term) == cpp


def test_a_tensor_has_a_name_that_cpp_has_not() -> None:
    assert text(Read("float", (A,), "int")) == "*p.float_.at(a)"


LEAVES = st.sampled_from((A, B, C)) | st.integers(-4, 9).map(integer)


def grown(inner: st.SearchStrategy[Term]) -> st.SearchStrategy[Term]:
    return (
        st.builds(binary, st.sampled_from(("+", "-", "*")), inner, inner)
        | st.builds(lambda x, n: binary("%", x, integer(n)), inner, st.integers(1, 7))
        | st.builds(lambda x: terms.Unary("-", x), inner)
    )


def chosen(inner: st.SearchStrategy[Term]) -> st.SearchStrategy[Term]:
    select = st.builds(lambda a, b, y, n: Select(binary("<", a, b), y, n), *[inner] * 4)
    return grown(inner) | select


ARITHMETIC = st.recursive(LEAVES, grown, max_leaves=8)
INT_TERMS = st.recursive(LEAVES, chosen, max_leaves=8)
VALUES = st.fixed_dictionaries({n: st.integers(-20, 20) for n in "abc"})


def parenthesised(x: Term) -> str:
    """The term with every parenthesis there can be."""
    match x:
        case terms.Unary(op, operand):
            return f"({op}{parenthesised(operand)})"
        case terms.Binary(op, left, right):
            return f"({parenthesised(left)} {op} {parenthesised(right)})"
    return f"({text(x)})"


@given(ARITHMETIC, VALUES)
def test_no_parenthesis_is_missing(x: Term, numbers: dict[str, int]) -> None:
    """Python reads `+ - * %` and the sign in the order in which C++ does."""
    printed, whole = (eval(t, {"__builtins__": {}}, numbers) for t in (text(x), parenthesised(x)))
    assert printed == whole, text(x)


# --- simplification ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("term", "name", "by", "expected"),
    [
        (times(A, B), "a", ZERO, ZERO),
        (times(A, B), "a", ONE, B),
        (plus(times(A, B), C), "a", ZERO, C),
        (minus(C, times(A, B)), "b", ZERO, C),
        (minus(A, B), "a", ZERO, binary("-", ZERO, B)),
        (plus(A, 2), "a", integer(3), integer(5)),
        (times(minus(A, B), C), "b", integer(0), times(A, C)),
        (binary("<", plus(A, 0), B), "b", ONE, binary("<", A, ONE)),
        (Select(binary("<", A, B), A, C), "a", ZERO, Select(binary("<", ZERO, B), ZERO, C)),
        (Read("a", (plus(A, 1),), "int"), "a", ONE, Read("a", (integer(2),), "int")),
        (Convert("float", A), "a", B, Convert("float", B)),
        (binary("*", X, Y), "x", Z, binary("*", Z, Y)),
        (At("a", frozenset("m")), "a", B, At("a", frozenset("m"))),
    ],
)
def test_substitution_simplifies(term: Term, name: str, by: Term, expected: Term) -> None:
    assert substitute(term, {name: by}) == expected


@given(INT_TERMS, INT_TERMS, VALUES)
def test_substitution_keeps_values(x: Term, by: Term, numbers: dict[str, int]) -> None:
    now = {**numbers, "a": value(by, numbers)}
    assert value(substitute(x, {"a": by}), numbers) == value(x, now)


def test_substitution_is_simultaneous() -> None:
    assert substitute(minus(A, B), {"a": B, "b": A}) == minus(B, A)


def test_a_term_without_the_variable_stays_as_it_is() -> None:
    term = binary("+", ZERO, times(A, B))
    assert substitute(term, {"c": ONE}) is term


def test_what_a_term_speaks_of() -> None:
    term = Select(binary("<", A, B), Read("T", (C,), "int"), At("S", frozenset("m")))
    assert variables(term) == {"a", "b", "c"}
    assert reads_memory(term)
    assert not reads_memory(plus(A, B))


def test_in_64_bits() -> None:
    assert text(widened(plus(times(A, B), 3))) == "int64_t(a) * int64_t(b) + 3"
    assert text(widened(Read("T", (A,), "int"))) == "int64_t(*p.T.at(a))"
    found = widened(times(call("floor_mod", A, B, type="int"), C))
    assert text(found) == "int64_t(fw::floor_mod(a, b)) * int64_t(c)", "which have no 64-bit form"


# --- signs ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("term", "surely"),
    [
        (integer(3), True),
        (ZERO, False),
        (A, True),
        (C, False),
        (times(A, B), True),
        (plus(A, B), True),
        (minus(A, 1), False),
        (minus(B, 1), True),
        (minus(A, B), False),
        (terms.Unary("-", A), False),
        (plus(call("abs", C, type="int"), 1), True),
        (call("max", ONE, C, type="int"), True),
        (call("min", ONE, C, type="int"), False),
        (call("ceil_div", A, B, type="int"), True),
        (call("floor_div", A, B, type="int"), False),
        (plus(call("floor_mod", C, B, type="int"), 1), True),
        (plus(call("floor_mod", B, C, type="int"), 1), False),  # it has the sign of the divisor
        (Select(C, A, B), True),
        (Select(C, A, ZERO), False),
        (Read("T", (A,), "int"), False),
    ],
)
def test_what_is_surely_positive(term: Term, surely: bool) -> None:
    """a is at least 1, b at least 2, nothing is known of c."""
    assert positive(term, {"a": 1, "b": 2}.get) is surely


@given(INT_TERMS, st.integers(-20, 0), VALUES)
def test_positive_terms_are_positive(x: Term, least: int, numbers: dict[str, int]) -> None:
    known = {"a": least, "b": 1}
    assume(all(numbers[n] >= low for n, low in known.items()))
    if positive(x, known.get):
        assert value(x, numbers) > 0


# --- divisors of either sign ------------------------------------------------------------------

DIMS = ("q_len", "kv_len")
FREE = ("i", "j")


def scalars() -> Scalars:
    return Scalars(
        {n: Scalar(Var(n)) for n in (*DIMS, *FREE)},
        lambda e, index: Read(e.tensor.id, index, "int"),
        dict.fromkeys(DIMS, 1),
    )


def expr(source: str) -> Expr:
    (stmt,) = parse(f"let x = {source}\n").body
    return stmt.value  # type: ignore[union-attr]


def exact(scalar: Scalar, env: dict[str, int]) -> object:
    """The value of a scalar as the kernel has it; its denominator must be above 0."""
    found = value(scalar.term, env)
    if scalar.type == "bool":
        return found
    below = value(scalar.below, env)
    assert below > 0
    return Fraction(found, below)


NUMBERS = st.fixed_dictionaries(
    {n: st.integers(1, 40) for n in DIMS} | {n: st.integers(-20, 20) for n in FREE}
)
NAMES = st.sampled_from((*DIMS, *FREE)).map(Name)
SMALL = st.integers(0, 9).map(lambda n: Num(str(n)))


def larger(inner: st.SearchStrategy[Expr]) -> st.SearchStrategy[Expr]:
    return (
        st.builds(Binary, st.sampled_from(("+", "-", "*", "/", "/", "%")), inner, inner)
        | st.builds(lambda a: Unary("-", a), inner)
        | st.builds(
            lambda f, a: Call(Name(f), (a,)), st.sampled_from(("floor", "ceil", "abs")), inner
        )
        | st.builds(
            lambda f, a, b: Call(Name(f), (a, b)), st.sampled_from(("min", "max")), inner, inner
        )
        | st.builds(
            lambda a, b, c: Call(Name("where"), (Binary("<", a, b), b, c)), inner, inner, inner
        )
    )


EXPRESSIONS = st.recursive(SMALL | NAMES, larger, max_leaves=6)
ENV = {"q_len": 7, "kv_len": 4, "i": -5, "j": 3}


def agrees(tree: Expr, numbers: dict[str, int]) -> bool:
    """Whether the kernel's value is that of exact fractions; what divides by 0 does not count (nor
    in the arm of a `where` that is not taken: the checker evaluates both)."""
    try:
        expected = evaluate(tree, numbers)
    except NotScalar:
        assume(False)
    return exact(scalars()(tree), numbers) == expected


@given(EXPRESSIONS, NUMBERS)
@example(expr("i % (q_len - kv_len * 3)"), ENV)
@example(expr("(i / 2) % (j / -3)"), ENV)
@example(expr("floor(q_len / (j - 5))"), ENV)
@example(expr("ceil(q_len / i)"), ENV)
def test_integer_arithmetic_is_exact(tree: Expr, numbers: dict[str, int]) -> None:
    """Whatever the sign of a divisor, and whether it is known."""
    assert agrees(tree, numbers)


@given(EXPRESSIONS, EXPRESSIONS, st.sampled_from(terms.COMPARISONS), NUMBERS)
def test_comparisons_are_exact_whatever_the_signs(
    left: Expr, right: Expr, op: str, numbers: dict[str, int]
) -> None:
    assert agrees(Binary(op, left, right), numbers)


@pytest.mark.parametrize(
    ("tl", "cpp"),
    [
        ("floor(i / -2)", "fw::floor_div<2>(-i)"),
        ("floor(kv_len / q_len)", "fw::floor_div(kv_len, q_len)"),
        ("floor(kv_len / (q_len + 1))", "fw::floor_div(kv_len, q_len + 1)"),
        ("floor(kv_len / i)", "fw::floor_div(i < 0 ? -kv_len : kv_len, fw::abs(i))"),
        ("7 % 4", "3"),
        ("-7 % 4", "1"),
        ("7 % -4", "-1"),
        ("i % 4", "fw::floor_mod<4>(i)"),
        ("i % j", "fw::floor_mod(i, j)"),
        ("floor(i / 2 % 3)", "fw::floor_div<2>(fw::floor_mod(i, 6))"),
    ],
)
def test_divisions_as_they_are_printed(tl: str, cpp: str) -> None:
    """A divisor that is surely positive costs nothing more."""
    assert text(scalars()(expr(tl)).as_int(NOWHERE)) == cpp
