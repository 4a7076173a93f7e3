"""The algebra of elementwise work: cheaper, and the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashwright.lower.element import COLUMN, ROW, TILE, Element, Leaf, Op, Reduce, fold, term
from flashwright.lower.element import element as tile
from flashwright.lower.printing import cpp
from flashwright.lower.term import Position, Var, integer, real
from tests.unit.lowered import printed
from tests.unit.tl_attention import attention

S = tile("S", TILE)
OLD, NEW = (tile(x, ROW) for x in ("Old", "New"))
SCALE = Leaf(Var("Scale", "float"), value=0.125)
COL = tile("B", COLUMN)
NOW = Leaf(Position("kv_idx"), COLUMN)
TWO = Leaf(integer(2), value=2.0)


def text(x: Element) -> str:
    return cpp.text(term(fold(x)))


def minus(a: Element, b: Element) -> Element:
    return Op("-", (a, b))


@pytest.mark.parametrize(
    ("element", "printed_as"),
    [
        # the scale and log2(e) are one constant, each term one FMA
        (
            Op("exp", (minus(Op("*", (S, SCALE)), NEW),)),
            "fw::exp2(S(m, n) * (Scale * fw::log2_e) - New(m) * fw::log2_e)",
        ),
        # of rows: the difference first; distributed it would be inf - inf, and inexact
        (Op("exp", (minus(OLD, NEW),)), "fw::exp2((Old(m) - New(m)) * fw::log2_e)"),
        (Op("/", (S, NEW)), "S(m, n) * fw::reciprocal(New(m))"),
        (Op("/", (S, COL)), "S(m, n) / B(n)"),
        (Op("/", (OLD, NEW)), "Old(m) / New(m)"),
        (Op("/", (S, TWO)), "S(m, n) * (1.f / 2.f)"),
        (Op("*", (SCALE, S)), "S(m, n) * Scale"),
        (Op("*", (Op("*", (S, SCALE)), TWO)), "S(m, n) * (Scale * 2.f)"),
        (Op("+", (S, NOW)), "S(m, n) + float(kv_idx)"),
        (Op("<", (NOW, TWO)), "kv_idx < 2"),
        (Op("where", (Op("<", (NOW, TWO)), S, TWO)), "kv_idx < 2 ? S(m, n) : 2.f"),
        (Op("%", (NOW, TWO)), "fw::floor_mod<2>(kv_idx)"),
        (Op("max", (S, OLD, NEW)), "fw::max(fw::max(S(m, n), Old(m)), New(m))"),
    ],
)
def test_folded(element: Element, printed_as: str) -> None:
    assert text(element) == printed_as


def test_a_positive_factor_leaves_a_maximum_but_no_other() -> None:
    assert fold(Reduce("max", Op("*", (S, SCALE)))) == Op("*", (Reduce("max", S), SCALE))
    negative = Leaf(real(-2.0), value=-2.0)
    inside = Op("*", (S, negative))
    assert fold(Reduce("max", inside)) == Reduce("max", inside)
    assert fold(Reduce("sum", inside)) == Op("*", (Reduce("sum", S), negative))


# --- the factor that is put off ---------------------------------------------------------------

PUT_OFF = "// (a constant factor: taken along by what reads the tile next)"


def test_a_constant_factor_is_taken_along() -> None:
    source = printed(attention())
    assert PUT_OFF in source
    assert "fw::max(Smax(m), most * Scale)" in source
    assert "fw::exp2(S(m, n) * (Scale * fw::log2_e) - row_0)" in source
    assert "S(m, n) = S(m, n) * Scale" not in source


def test_a_factor_of_unknown_sign_is_not() -> None:
    """It could turn the maximum round, and turn what is masked to +inf."""
    source = printed(attention(params="param Down = -2", scale="Compute S * Down and get new S"))
    assert PUT_OFF not in source
    assert "S(m, n) = S(m, n) * float(Down);" in source


def test_it_is_carried_out_before_a_gemm_takes_the_tile() -> None:
    """Once, and under its own line."""
    after = (
        "Compute Softmax S with Smax and Ssum and rescale O_register\n  Compute 2 * S and get new S"
    )
    source = printed(attention(softmax=after))
    assert source.count(PUT_OFF) == 1
    assert source.count("S(m, n) = S(m, n) * 2.f;") == 1
    scaled = source.index("S(m, n) = S(m, n) * 2.f;")
    assert source.index("| Compute 2 * S and get new S") < scaled < source.index("| Reshape S")


def test_it_is_gone_when_the_tile_is_overwritten() -> None:
    """Every round begins with a fresh product: nothing is scaled twice."""
    after = "Compute Softmax S with Smax and Ssum and rescale O_register\n  Compute 2 * S and get S"
    source = printed(attention(softmax=after, reshape="Reshape S from mma_C to mma_A"))
    assert "S(m, n) * (Scale * fw::log2_e)" in source
    assert "Scale * 2.f" not in source
    assert "2.f * " not in source


def test_what_does_not_vary_along_a_row_is_computed_once_for_it() -> None:
    source = printed(attention())
    assert "float const row_0 = fw::reciprocal(Ssum(m));" in source
    assert "O(m, n) = Ssum(m) > 0.f ? O(m, n) * row_0 : 0.f;" in source


def test_infinity_is_a_number_of_the_kernel_too() -> None:
    source = printed((Path(__file__).parents[1] / "recorded/mha-causal-a100/code.tl").read_text())
    assert "LSE(m) = Ssum(m) > 0.f ? Smax(m) + fw::log(Ssum(m)) : -INFINITY;" in source
