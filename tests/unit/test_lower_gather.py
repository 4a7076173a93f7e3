"""Indices that depend on the element, in kernels."""

from __future__ import annotations

import re

import pytest

from flashwright.fuzz.case import FuzzCase
from flashwright.fuzz.oracle import evaluate_cases
from tests.unit.emulated import needs_compilers
from tests.unit.lowered import printed
from tests.unit.tl_attention import attention

SHIFT = "kv_idx - q_idx - (kv_len - q_len)"
REACH = "Allocate Bias in global (H: heads, R: 41) as fp32"
FAR = "16 + floor(log(max(-(D), 1) / 16) / log(8) * 16)"
BUCKET = f"where(-(D) < 16, max(-(D), 0), min({FAR}, 31))".replace("D", SHIFT)
KIND = """\
Allocate Kind in global (B: batch, L: kv_len) as int32
Allocate Kind in register (BN) as int32
Allocate Row in global (T: 2) as int32
Allocate Bias in global (A: 7, L: q_len) as fp16"""
COPY_KIND = """\
Copy V (BN, HeadDim) in coordinate [B = item, H = head, L = i] from global to shared
  Copy Kind (BN) in coordinate [B = item, L = i] from global to register"""
PROBLEMS = tuple(
    {"batch": 1, "heads": 2, "kv_heads": 2, "q_len": q, "kv_len": k}
    for q, k in ((70, 200), (100, 40))
)


def biased(index: str, allocate: str = REACH, **more: str) -> str:
    scale = f"Compute S * Scale + {index} and get new S"
    return attention(allocate=allocate, scale=scale, **more)


def gathers(text: str) -> list[str]:
    """What a kernel gathers, without line breaks."""
    source = re.sub(r"\s+", " ", printed(text))
    return re.findall(r"[^;{]*fw::gather\([^;]*;", source)


# --- the text ---------------------------------------------------------------------------------


def test_an_index_is_whole_and_clamped() -> None:
    (line,) = gathers(biased(f"Bias[head, {SHIFT} + 20]"))
    index = "fw::min(fw::max(kv_idx - q_idx - (kv_len - q_len) + 20, 0), 40)"
    assert f"fw::gather(p.Bias.at(head), {index}, p.Bias.step<1>())" in line


@pytest.mark.parametrize(
    ("index", "extent", "shown"),
    [
        ("max(0, min(40, kv_idx))", "41", "fw::max(0, fw::min(40, kv_idx))"),
        ("max(0, min(41, kv_idx))", "41", "fw::min(fw::max(0, fw::min(41, kv_idx)), 40)"),
        ("min(kv_idx, kv_len - 1)", "kv_len", "fw::max(fw::min(kv_idx, kv_len - 1), 0)"),
        ("kv_idx % 5", "5", "fw::floor_mod(kv_idx, 5)"),
        ("kv_idx % 5", "4", "fw::min(fw::floor_mod(kv_idx, 5), 3)"),
        ("abs(kv_idx)", "kv_len", "fw::min(fw::abs(kv_idx), kv_len - 1)"),
        ("where(kv_idx < 3, 0, 2)", "3", "kv_idx < 3 ? 0 : 2"),
    ],
)
def test_what_is_inside_already_is_not_clamped(index: str, extent: str, shown: str) -> None:
    (line,) = gathers(biased(f"Bias[{index}]", f"Allocate Bias in global (L: {extent}) as fp32"))
    assert f"fw::gather(p.Bias.at(), {shown}, p.Bias.step<0>())" in line


def test_quotients_are_whole_divisions() -> None:
    (line,) = gathers(biased("Bias[head, floor(kv_idx / 3) + ceil(kv_idx / heads)]"))
    assert "fw::floor_div(kv_idx, 3) + fw::ceil_div(kv_idx, heads)" in line
    (line,) = gathers(biased("Bias[head, floor(log(max(kv_idx, 1)))]"))
    assert "fw::whole(fw::log(float(fw::max(kv_idx, 1))))" in line


def test_one_for_each_row_is_read_before_the_columns() -> None:
    (row,) = gathers(biased("Bias[head, q_idx % 41]"))
    assert row.lstrip().startswith("float const row_0 = fw::gather")
    mask = "kv_idx < kv_len and kv_idx <= Last[q_idx]"
    text = attention(mask=mask, allocate="Allocate Last in global (L: q_len) as int32")
    assert "fw::near(fw::gather(p.Last.at()" in printed(text)
    assert "S(m, n) = visible[n] ? S(m, n) : -INFINITY;" in printed(text)


def test_a_mask_by_a_table_holds_in_no_whole_tile() -> None:
    text = attention(
        mask="kv_idx < kv_len and Seen[floor(kv_idx / 16)] > 0",
        allocate="Allocate Seen in global (R: 9) as int32",
    )
    source = printed(text)
    bounded, table = source.split("fw::gather")[0], source.split("S(m, n) = fw::gather")
    assert "if (!(i * BN + BN - 1 < kv_len))" in bounded
    assert len(table) == 2


# --- emulated ---------------------------------------------------------------------------------

CAUSAL = {
    "mask": "kv_idx <= q_idx + kv_len - q_len",
    "high": "min(kv_len, (block + 1) * BM + kv_len - q_len) / BN",
}
PROGRAMS = {
    "distance": biased(f"Bias[head, {SHIFT} + 20]", REACH.replace("fp32", "fp16"), **CAUSAL),
    "buckets": biased(f"Bias[head, {BUCKET}]", REACH.replace("41", "32")),
    "rows and columns": biased(
        "Bias[floor(q_idx / 3), head] * Fall[floor(kv_idx / 7)] + Fall[q_idx % 5]",
        "Allocate Bias in global (R: 9, H: heads) as fp32\nAllocate Fall in global (R: 8) as bf16",
    ),
    "nested": biased("Bias[Row[Kind], q_idx]", KIND, copy_v=COPY_KIND),
    "mask": attention(
        allocate="Allocate Seen in global (R: 4, C: 5) as int32",
        mask="kv_idx < kv_len and (Seen[floor(q_idx / 32), floor(kv_idx / 16)] > 0 or kv_idx < 3)",
    ),
}


@pytest.mark.slow
@needs_compilers
@pytest.mark.parametrize("name", PROGRAMS)
def test_kernels_do_what_the_program_says(name: str) -> None:
    cases = [FuzzCase(gpu, PROGRAMS[name], PROBLEMS, spread=1.2) for gpu in ("a100", "h200")]
    for found in evaluate_cases(cases):
        assert found.kind == "agree", found
