"""Copies that run ahead: how far, to which stage, and when they may not."""

from __future__ import annotations

import pytest

from flashwright import gpu as gpus
from flashwright.lower import ir
from flashwright.lower.printing.cpp import text as in_cpp
from flashwright.lower.term import (
    Call,
    Read,
    Term,
    Var,
    binary,
    inlined,
    integer,
    minus,
    plus,
    substitute,
    times,
)
from tests.unit.happens_before import Checker
from tests.unit.lowered import printed, scheduled
from tests.unit.tl_attention import COPY, attention, program

TABLE = {
    "allocate": "Allocate Table in global (B: batch, T: n_blocks) as int32",
    "params": "dim n_blocks",
    "copy_k": f"let page = Table[item, i]\n  {COPY.format('K').replace('L = i', 'L = page')}",
    "copy_v": COPY.format("V").replace("L = i", "L = page"),
    "mask": "kv_idx < kv_len",
}
PLACE = {"block": 0, "head": 1, "item": 1}


def ahead(text: str) -> set[str]:
    """The tiles whose copies run ahead."""
    loads = [n for n in ir.flat(scheduled(text, strict=False)) if isinstance(n, ir.Load)]
    return {n.dest[0] for n in loads if n.stage is not None}


def test_three_stages() -> None:
    source = printed(attention(k_stages=3, v_stages=3))
    before, inside = source.split("CUTE_NO_UNROLL")
    for stage, start, left in ((0, "item, head", "kv_len"), (1, "item, head, BN", "kv_len - BN")):
        assert f"K_shared.stage({stage}), p.K.tile({start}), {left})" in before
    assert "if (0 < kv_len) {" in before
    assert "if (BN < kv_len) {" in before
    assert "if ((i + 2) * BN < kv_len) {" in inside
    assert "K_shared.stage((i + 2) % 3), p.K.tile(item, head, (i + 2) * BN)" in inside
    assert "fw::right_transposed(K_shared.stage(i % 3))" in inside
    assert "fw::right(V_shared.stage(i % 3))" in inside


def test_a_loop_that_does_not_begin_at_0_counts_its_stages_from_there() -> None:
    source = printed(attention(k_stages=2, v_stages=2, low="floor(block / 2)"), strict=False)
    before, inside = source.split("CUTE_NO_UNROLL")
    assert "int const i_first = fw::floor_div<2>(block);" in before
    assert "K_shared.stage(0), p.K.tile(item, head, i_first * BN)" in before
    assert "for (int i = i_first; i * BN < kv_len; ++i) {" in inside
    assert "K_shared.stage((i - i_first + 1) % 2)" in inside
    assert "K_shared.stage((i - i_first) % 2)" in inside


@pytest.mark.parametrize("gpu", ["t4", "a100"])
def test_a_let_from_a_table_is_read_for_the_later_round(gpu: str) -> None:
    """The page of block i + 1, not that of block i."""
    text = attention(k_stages=2, v_stages=2, **TABLE)
    assert ahead(text) == {"K", "V"}
    source = printed(text, strict=False)
    assert "p.K.tile(item, head, *p.Table.at(item, i + 1) * BN)" in source
    made = program(text, strict=False)
    done = Checker(made, gpus.find(gpu)).check({"q_len": 64, "kv_len": 300}, PLACE)
    assert len({str(x) for x in done.seen}) > 4, "the pages differ"


def test_one_stage_does_not_run_ahead() -> None:
    assert ahead(attention()) == set()


def test_reads_and_copies_in_the_wrong_order_do_not_run_ahead() -> None:
    """The copy at the end of a round is for the next round already."""
    late = COPY.format("K").replace("L = i", "L = min(i + 1, n - 1)")
    text = attention(
        k_stages=2,
        v_stages=2,
        params="dim n",
        copy_k="",
        mask="q_idx < q_len",  # nobody could tell which keys the first round has
        scale=f"{late}\n  Compute S * 1 and get S",
    )
    assert ahead(text) == {"V"}


def test_a_tile_that_is_filled_twice_does_not_run_ahead() -> None:
    again = f"{COPY.format('K')}\n  if i > 2\n    {COPY.format('K')}\n  end"
    assert ahead(attention(k_stages=2, v_stages=2, copy_k=again)) == {"V"}


def test_a_tile_that_is_read_behind_the_loop_does_not_run_ahead() -> None:
    end = "Compute GEMM Q_shared, K_shared.T and get S"
    assert ahead(attention(k_stages=2, v_stages=2, end=end)) == {"V"}


def test_a_loop_in_the_loop_reads_the_round_s_stage() -> None:
    text = attention(k_stages=2, v_stages=2)
    gemm = "  Compute GEMM Q_shared, K_shared.T and get S\n"
    inner = f"  for j = 0:2\n  {gemm}  end\n"
    source = printed(text.replace(gemm, inner), strict=False)
    assert "fw::right_transposed(K_shared.stage(i % 2))" in source


# --- the terms of another iteration -----------------------------------------------------------

VAR, BN, LENGTH = Var("i"), Var("BN"), Var("kv_len")
NEXT = plus(VAR, 1)


@pytest.mark.parametrize(
    ("term", "name", "value", "printed_as"),
    [
        (plus(times(VAR, BN), Var("ii")), "i", NEXT, "(i + 1) * BN + ii"),
        (Read("i", (VAR,), "int"), "i", NEXT, "*p.i.at(i + 1)"),
        (Call("min", (Var("min"), VAR), "int"), "min", VAR, "fw::min(i, i)"),
        (minus(LENGTH, times(VAR, BN)), "i", integer(0), "kv_len"),
        (binary("<", times(times(VAR, BN), Var("Stride")), Var("n")), "i", integer(0), "0 < n"),
        (plus(times(integer(10), BN), VAR), "i", integer(0), "10 * BN"),
        (minus(LENGTH, times(VAR, BN)), "i", integer(1), "kv_len - BN"),
    ],
)
def test_a_variable_is_replaced_and_nothing_else(
    term: Term, name: str, value: Term, printed_as: str
) -> None:
    """Not a longer name, nor a tensor or a function of the same name."""
    assert in_cpp(substitute(term, {name: value})) == printed_as


def test_lets_are_replaced_by_what_is_defined_outside_the_loop() -> None:
    page = Read("Table", (VAR,), "int")
    found = inlined({"page": page, "row": times(Var("page"), BN)}, {"i": NEXT})
    assert in_cpp(found["row"]) == "*p.Table.at(i + 1) * BN"
    assert in_cpp(substitute(plus(VAR, Var("row")), found)) == "i + 1 + *p.Table.at(i + 1) * BN"
