"""The chosen tilings fit, are what good kernels use, and the model behaves as it says."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise

import pytest

from flashwright.author.builtin import cost, steps
from flashwright.author.builtin.author import write_code, write_sketch
from flashwright.author.builtin.choose import (
    TIE,
    Decision,
    NothingFits,
    choose,
    enumerate_tilings,
)
from flashwright.author.builtin.cost import estimate, masked_waste
from flashwright.author.builtin.needs import Tiling, Workload, footprint
from flashwright.author.builtin.reasoning import reasoning
from flashwright.author.builtin.variants import make_spec
from flashwright.gpu import A100, GPUS, H100, H200, L40S, RTX8000, T4, Gpu
from tests.share import some
from tests.unit.call_count import calls

USUAL = (T4, RTX8000, A100, L40S, H100, H200, GPUS["b200"], GPUS["rtx5090"])
DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256))
CASES = [
    (gpu, dtype, dims)
    for gpu in USUAL
    for dtype in ("fp16", "bf16", "e4m3")
    if gpu.takes(dtype)
    for dims in DIMS
]


def work(qk: int, v: int | None = None, **more: object) -> Workload:
    v = qk if v is None else v
    heads = 2048 // v
    return replace(Workload(qk, v, heads=heads, kv_heads=heads), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("causal", some([False, True]))
@pytest.mark.parametrize(("gpu", "dtype", "dims"), CASES)
def test_every_choice_fits(gpu: Gpu, dtype: str, dims: tuple[int, int], causal: bool) -> None:
    decision = choose(work(*dims, dtype=dtype, causal=causal), gpu)
    need = decision.chosen.footprint
    assert need.shared_bytes <= gpu.shared_per_block
    assert need.registers <= need.register_limit
    t = decision.tiling
    assert t.bm % (16 * t.warps) == 0
    assert t.bn % (32 if dtype == "e4m3" else 16) == 0
    if gpu.wgmma:
        assert (t.bm % 64, t.warps) == (0, t.bm // 16)
    if not gpu.cp_async:
        assert t.stages == 1
    assert decision.chosen.cost.tflops * 1e12 < gpu.tensor_flops[dtype]


def test_footprint_by_hand() -> None:
    # Q 128x128 and two stages of K and V 176x128, in 2 bytes; O, S, P and rows over 256 threads.
    need = footprint(work(128), Tiling(128, 176, 2, 8), H200)
    assert need.shared_bytes == 128 * 128 * 2 + 2 * 176 * 256 * 2
    assert need.registers == 64 + 88 + 44 + 6 + 24
    assert need.register_limit == 240
    # FlashAttention-2's tiling: P takes S's place, 4 rows a thread.
    assert footprint(work(128), Tiling(128, 64, 1, 4), A100).registers == 128 + 64 + 12 + 32


def sizes(decision: Decision) -> tuple[int, int, int, int]:
    t = decision.tiling
    return t.bm, t.bn, t.stages, t.warps


@pytest.mark.parametrize("causal", [False, True])
def test_near_the_fastest_kernels(causal: bool) -> None:
    bm, bn, stages, warps = sizes(choose(work(128, causal=causal), H200))
    assert (bm, stages, warps) == (128, 2, 8)
    assert 128 <= bn <= 176
    assert sizes(choose(work(192, 128, causal=causal), H200)) == (128, 128, 2, 8)
    bm, bn, stages, warps = sizes(choose(work(256, causal=causal), H200))
    assert (bm, stages, warps) == (128, 2, 8)
    assert bn in (64, 80)
    assert sizes(choose(work(64, causal=causal), H200))[0] in (128, 192)
    # FlashAttention-2 has 128x64 and 128x128 here: a step narrower leaves ptxas room not to spill.
    assert sizes(choose(work(128, causal=causal), A100)) == (128, 48, 1, 4)
    assert sizes(choose(work(64, causal=causal), A100)) == (128, 112, 1, 4)
    for gpu in (T4, RTX8000):
        assert sizes(choose(work(128, causal=causal), gpu)) == (128, 64, 1, 8)


def test_without_headroom_a_tuner_gets_the_tight_tilings() -> None:
    tight = Tiling(192, 128, 2, 12)  # FlashAttention-3, d64 causal
    need = footprint(work(64), tight, H200)
    assert need.registers <= need.register_limit < need.registers + 8
    assert choose(work(64), H200, headroom=8).tiling != tight
    ranked = choose(work(64), H200, headroom=0).ranked
    assert tight in [replace(c.tiling, q_stages=1) for c in ranked]


@pytest.mark.parametrize("gpu", USUAL, ids=lambda gpu: gpu.name)
def test_less_shared_memory_is_never_better(gpu: Gpu) -> None:
    half = replace(
        gpu,
        shared_per_block=gpu.shared_per_block // 2,
        shared_per_sm=gpu.shared_per_sm // 2,
    )
    for dims in ((64, 64), (96, 96), (128, 128)):
        whole = choose(work(*dims), gpu)
        less = choose(work(*dims), half)
        assert less.chosen.footprint.shared_bytes <= half.shared_per_block
        slower = less.chosen.cost.microseconds / whole.chosen.cost.microseconds
        assert slower >= 1 / (1 + TIE)
        assert less.over_shared >= whole.over_shared


def test_a_t4_refuses_bf16_and_says_what_it_takes() -> None:
    with pytest.raises(NothingFits, match=r"no tensor instruction for bf16; it takes fp16"):
        choose(work(128, dtype="bf16"), T4)


def test_nothing_fits_names_the_nearest_and_what_it_lacks() -> None:
    with pytest.raises(NothingFits) as caught:
        choose(Workload(576, 512, heads=16, kv_heads=1), T4)
    text = str(caught.value)
    need = footprint(Workload(576, 512), Tiling(16, 32, 1, 1), T4)
    assert "16x32 with 1 stage and 1 warp" in text
    assert f"{need.shared_bytes - T4.shared_per_block} more than" in text


def test_what_falls_out_is_counted() -> None:
    decision = choose(work(128), H200)
    fitting = decision.enumerated - decision.over_shared - decision.over_registers
    assert decision.enumerated == len(enumerate_tilings(work(128), H200))
    assert decision.over_shared > 0
    assert decision.over_registers > 0
    assert 0 < len(decision.ranked) <= fitting
    assert decision.ranked[0] is decision.chosen
    rest = [c.cost.microseconds for c in decision.ranked[1:]]
    assert rest == sorted(rest)
    assert all(decision.chosen.cost.microseconds <= (1 + TIE) * us for us in rest)


def test_reasons_are_sentences_with_the_figures() -> None:
    decision = choose(work(128, causal=True), H200)
    assert list(decision.reasons) == ["BM", "BN", "Stages", "Warps"]
    values = dict(zip(decision.reasons, sizes(decision), strict=True))
    for name, text in decision.reasons.items():
        assert text.startswith(f"{values[name]} ")
        assert text.endswith(".")
        assert "\n" not in text
    assert "of 240 registers" in decision.reasons["BN"]


def test_deterministic() -> None:
    assert choose(work(96), L40S) == choose(work(96), L40S)


def test_cheap_enough_to_call_anywhere() -> None:
    """60,000 calls of functions, some 20 ms: each further tiling that is ranked adds to them."""
    steps.walk.cache_clear()
    steps.needed.cache_clear()
    assert calls(lambda: choose(work(128, causal=True), H200)) < 120_000


# --- terms of the model -----------------------------------------------------------------------


def test_full_attention_wastes_nothing_when_tiles_divide_it() -> None:
    assert masked_waste(work(128), Tiling(128, 128, 2, 8)) == 1.0
    assert masked_waste(work(128), Tiling(128, 176, 2, 8)) == pytest.approx(24 * 176 / 4096)


def test_causal_waste_is_the_diagonal() -> None:
    w = work(128, causal=True, q_len=256, kv_len=256)
    # Rows 0-127 see one block of 128 keys, rows 128-255 two: 3 of 4 tiles for 256*257/2 scores.
    assert masked_waste(w, Tiling(128, 128, 2, 8)) == pytest.approx(3 * 128 * 128 / (256 * 257 / 2))
    wastes = [
        masked_waste(work(128, causal=True), Tiling(bm, bm, 1, 4)) for bm in (32, 64, 128, 256)
    ]
    assert all(small < large for small, large in pairwise(wastes))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 1, 33, 100])
@pytest.mark.parametrize(("q_len", "kv_len"), [(100, 100), (40, 130), (130, 40)])
def test_walk_and_needed_against_brute_force(
    causal: bool, window: int | None, q_len: int, kv_len: int
) -> None:
    w = work(64, causal=causal, window=window, q_len=q_len, kv_len=kv_len)

    def seen(q: int, k: int) -> bool:
        at = q + kv_len - q_len
        right = k <= at if causal else window is None or k < at + window
        return right and (window is None or k > at - window)

    needed = sum(seen(q, k) for q in range(q_len) for k in range(kv_len))
    tiles = {(q // 32, k // 16) for q in range(q_len) for k in range(kv_len) if seen(q, k)}
    tiling = Tiling(32, 16, 1, 2)
    whole = [
        all(
            seen(q, k)
            for q in range(32 * i, min(32 * i + 32, q_len))
            for k in range(16 * j, 16 * j + 16)
        )
        and 16 * j + 16 <= kv_len
        for i, j in tiles
    ]
    assert cost.walk(w, tiling).steps == len(tiles)
    assert cost.walk(w, tiling).masked == len(tiles) - sum(whole)
    assert masked_waste(w, tiling) == pytest.approx(len(tiles) * 32 * 16 / needed)


def test_a_window_prefers_no_wider_steps_than_full_attention() -> None:
    narrow = choose(work(128, causal=True, window=128), H200).tiling
    assert narrow.bn <= choose(work(128), H200).tiling.bn


def test_more_rows_per_warp_read_less_shared_memory() -> None:
    four = cost.shared_cycles(work(128), Tiling(128, 64, 1, 4), A100)
    eight = cost.shared_cycles(work(128), Tiling(128, 64, 1, 8), A100)
    assert four < eight
    assert estimate(work(128), Tiling(128, 64, 1, 8), A100).limit == "shared memory"


def test_exponentials_limit_small_heads_and_mma_large_ones() -> None:
    assert estimate(work(64), Tiling(128, 128, 2, 8), H200).limit == "softmax"
    assert estimate(work(128), Tiling(128, 128, 2, 8), H200).limit == "tensor cores"


def test_more_to_switch_between_hides_more() -> None:
    shown = [cost.exposed(work(128), Tiling(64 * n, 96, 2, 4 * n), H200, 1) for n in (1, 2, 3)]
    assert shown == sorted(shown, reverse=True)
    t = Tiling(128, 64, 1, 4)
    one, two = (cost.exposed(work(128), t, A100, blocks) for blocks in (1, 2))
    assert two < one


def test_a_second_stage_hides_the_loads_on_hopper() -> None:
    one = estimate(work(128), Tiling(128, 128, 1, 8), H200)
    two = estimate(work(128), Tiling(128, 128, 2, 8), H200)
    assert one.stall_cycles > 0 == two.stall_cycles
    assert two.microseconds < one.microseconds


def test_idle_schedulers_cost() -> None:
    two = estimate(work(192, 128), Tiling(64, 64, 1, 2), T4)
    four = estimate(work(192, 128), Tiling(64, 64, 1, 4), T4)
    assert two.mma_cycles == pytest.approx(2 * four.mma_cycles)


def test_extra_score_work_costs_time() -> None:
    for gpu, t in ((H200, Tiling(128, 128, 2, 8)), (A100, Tiling(128, 64, 1, 4))):
        plain = estimate(work(64), t, gpu)
        alibi = estimate(work(64, options=("alibi",)), t, gpu)
        softcap = estimate(work(64, options=("softcap",)), t, gpu)
        assert plain.microseconds < alibi.microseconds < softcap.microseconds
        # tanh is an exponential and half a reciprocal more; the rows' own factors are few.
        assert softcap.exp_cycles == pytest.approx(2.5 * plain.exp_cycles, rel=0.1)


def test_masks_cost_time_where_steps_have_them() -> None:
    t = Tiling(128, 64, 1, 4)
    assert cost.masked_share(work(64), t) == 0
    assert cost.masked_share(work(64, causal=True), t) == pytest.approx(2 / 33, rel=0.05)
    assert cost.masked_share(work(64, causal=True, window=64), t) == 1
    terms = [
        cost.elementwise_cycles(work(64, causal=True, window=window), t, A100)
        for window in (None, 1024, 64)
    ]
    assert terms == sorted(terms)


def test_memory_bound_work_takes_as_long_as_its_bytes() -> None:
    w = work(128, q_len=128, kv_len=128, batch=4096)
    bytes_moved = 4 * 4096 * 16 * 128 * 128 * 2
    for gpu in (H100, H200):
        spent = estimate(w, Tiling(128, 128, 2, 8), gpu)
        assert spent.microseconds >= bytes_moved / gpu.bandwidth * 1e6


def test_a_tiling_that_does_not_fit_has_no_price() -> None:
    with pytest.raises(ValueError, match="does not fit"):
        estimate(work(256), Tiling(128, 128, 2, 8), T4)


# --- dictated tiles ---------------------------------------------------------------------------


@pytest.mark.parametrize("gpu", [A100, H200], ids=lambda gpu: gpu.name)
def test_selected_blocks_of_a_group_of_16_heads(gpu: Gpu) -> None:
    w = Workload(128, 128, "bf16", heads=64, kv_heads=4, kv_len=1024, rows_fixed=16, cols_fixed=64)
    decision = choose(w, gpu)
    assert (decision.tiling.bm, decision.tiling.bn, decision.tiling.warps) == (16, 64, 1)
    assert decision.chosen.cost.blocks == 4 * 4096 * 4


def test_dictated_tiles_must_suit_the_matrix_instructions() -> None:
    with pytest.raises(ValueError, match="multiple of 16 rows, not 8"):
        choose(work(128, rows_fixed=8), A100)
    with pytest.raises(ValueError, match="multiple of 16, not 40"):
        choose(work(128, cols_fixed=40), A100)


NAMED = re.compile(r"(\d+)x(\d+) with (\d+) stages? and (\d+) warps?(?:, (\d+) buffers for Q)?")


@pytest.mark.parametrize(
    ("variant", "gpu", "causal", "head_dim"),
    [
        ("mha", "h200", False, 64),
        ("gqa", "h200", True, 128),
        ("mha", "a100", True, 64),
        ("mha", "l40s", True, 128),
        ("mha", "t4", False, 128),
        ("mha", "h100", True, 256),
    ],
)
def test_reasons_name_only_tilings_of_the_table(
    variant: str, gpu: str, causal: bool, head_dim: int
) -> None:
    spec = make_spec(variant, causal=causal, head_dim=head_dim)
    page = reasoning(spec, GPUS[gpu], write_code(write_sketch(spec), spec, GPUS[gpu]))
    row = r"^\| \**(\d+) x (\d+)\** \| (\d+) \| (\d+) \| (\d+) \|"
    rows = re.findall(row, page, re.MULTILINE)
    named = [(*found[:4], found[4] or "1") for found in NAMED.findall(page)]
    assert named
    assert set(named) <= set(rows)
