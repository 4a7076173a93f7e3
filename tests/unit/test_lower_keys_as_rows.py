"""What a backward pass asks of the translator: keys as rows, and sums in global memory."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path

import pytest

from flashwright import gpu as gpus
from flashwright.fuzz.case import load
from flashwright.lang.nodes import Compute, Expr, Num
from flashwright.lang.parse import parse
from flashwright.lower import ir
from flashwright.lower.frontend.lowering import lower
from flashwright.lower.frontend.positions import STALE, UNKNOWN, Where, axis_of
from flashwright.lower.term_value import value
from flashwright.lower.translate import translate
from flashwright.program.scalars import evaluate
from tests.unit.lowered import printed, refusal
from tests.unit.tl_attention import program

CASES = Path(__file__).parents[1] / "cases"
CAUSAL = "kv_idx <= q_idx + kv_len - q_len"
ADDED = (
    "Copy dQ (BM, HeadDim) in coordinate [B = batch_idx, H = head, L = i] from register to global"
)


def backward(name: str = "backward_causal") -> str:
    """The kernel of dK and dV in one of the cases."""
    return load(CASES / f"{name}.tl").text


def condition(mask: str) -> Expr:
    (stmt,) = parse(f"Compute Mask S where {mask}\n").body
    assert isinstance(stmt, Compute)
    assert stmt.where is not None
    return stmt.where


@pytest.mark.parametrize(
    "mask",
    [
        CAUSAL,
        "q_idx >= kv_idx - (kv_len - q_len)",
        f"{CAUSAL} and q_idx < kv_idx + 70",
        "kv_idx < kv_len and q_idx < q_len",
    ],
)
def test_masks_of_keys_as_rows_are_left_out_where_they_hold(mask: str) -> None:
    made = program(backward().replace(CAUSAL, mask), strict=False)
    found = [n for n in ir.flat(lower(made).body) if isinstance(n, ir.Compute) and n.unless]
    asked, seen = condition(mask), set()
    for q_len, kv_len in ((128, 128), (200, 300), (300, 130)):
        for block, i in product(range(-(-kv_len // 64)), range(-(-q_len // 64))):
            env = {"BM": 64, "BN": 64, "q_len": q_len, "kv_len": kv_len}
            env |= {"block_idx": block, "i": i}
            corners = product((64 * i, 64 * i + 63), (64 * block, 64 * block + 63))
            true = all(evaluate(asked, {**env, "q_idx": q, "kv_idx": k}) for q, k in corners)
            left_out = all(value(n.unless, env) for n in found if n.unless is not None)
            assert left_out == true, (q_len, kv_len, block, i)
            seen.add(left_out)
    assert seen == {True, False}


def test_a_key_is_the_position_of_a_row_and_a_query_that_of_a_column() -> None:
    text = backward().replace("exp(S * Scale - LSE)", "exp(S * Scale - LSE + 0.5 * sqrt(q_idx))")
    source = printed(text)
    assert "int const kv_idx = block_idx * BN + at.row(m);" in source
    assert "~at.before(S, kv_idx + q_len - kv_len - i * BM)" in source
    assert "int const q_idx = i * BM + at.col(n);" in source
    assert not re.search(r"kv_idx = .*col|q_idx = .*row", source)


def test_a_query_is_the_position_of_a_vector_along_the_columns() -> None:
    shifted = "  Compute LSE + 0.25 * (q_idx % 4) and get new LSE\n  Compute GEMM K_shared, Q"
    source = printed(backward().replace("  Compute GEMM K_shared, Q", shifted))
    loop = "for (int n = 0; n < cute::size(LSE); ++n) {"
    assert "int const q_idx = i * BM + at.col(n);" in source.split(loop)[1].split("}")[0]


def test_an_axis_that_cannot_be_told_leaves_positions_open() -> None:
    keys, queries = (Where(dim, Num("0"), 64, "L", Num("0")) for dim in ("kv_len", "q_len"))
    names = ("q_idx", "kv_idx")
    assert [axis_of(n, (queries, keys)) for n in names] == [0, 1]
    assert [axis_of(n, (keys, queries)) for n in names] == [1, 0]
    assert [axis_of(n, (queries, UNKNOWN)) for n in names] == [0, 1]
    for open in ((keys, UNKNOWN), (STALE, queries), (UNKNOWN, UNKNOWN)):
        assert [axis_of(n, open) for n in names] == [None, None]
    assert axis_of("q_idx", (queries,)) == 0


@pytest.mark.parametrize("gpu", ["t4", "a100", "l40s", "h200"])
def test_tiles_are_added_in_pairs_where_lines_are_aligned(gpu: str) -> None:
    made = translate(program(backward(), strict=False), gpus.find(gpu))
    assert "fw::add_tile<Warps>(p.dQsum.tile(" in made.source
    assert {t.name: t.vector for t in made.plan.tensors}["dQsum"] == 4
    assert "fw::added" not in made.source


def test_tiles_that_end_within_a_line_are_added_one_by_one() -> None:
    text = backward().replace("Allocate dQsum in global (batch, heads, q_len, HeadDim)", "{}")
    text = text.format("Allocate dQsum in global (batch, heads, q_len, D: 62)")
    source = printed(text, strict=False)
    assert re.search(r"fw::store_elements<Warps>\(\s*fw::added\(p.dQsum.tile\(", source)


def test_vectors_are_added() -> None:
    """dSink, say: rows that are summed go to one place for all blocks."""
    text = """\
param BM = 64
param HeadDim = 64
param Warps = 4
grid block = 0:q_len / BM, head = 0:heads, item = 0:batch
Allocate X in global (batch, heads, q_len, HeadDim) as fp16
Allocate Total in global (B: batch, L: q_len) as fp32
Allocate Total in register (BM) as fp32
Copy X (BM, HeadDim) in coordinate [B = item, H = head, L = block] from global to register
Compute rowsum(X) and get Total
Copy Total (BM) in coordinate [B = item, L = block] from register to global and accumulate
"""
    assert "fw::store_rows<Warps>(fw::added(p.Total.line(" in printed(text, strict=False)


def test_a_shared_tile_is_not_added() -> None:
    text = backward().replace("Allocate dS in", "Allocate dQ2 in shared (BM, HeadDim) as fp32\n{}")
    text = text.format("Allocate dS in").replace(ADDED, ADDED.replace("dQ", "dQ2", 1))
    text = text.replace(
        "Copy dQ2 (BM", "Copy dQ from register to shared and get dQ2\n  Copy dQ2 (BM"
    )
    text = text.replace("from register to global and acc", "from shared to global and acc")
    found = refusal(text)
    assert (found.code, "a shared tile is added" in found.message) == ("FW811", True)
