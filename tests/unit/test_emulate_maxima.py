"""Maxima as integers under emulation: to the bit what they are in floats, whatever the signs."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

import flashwright.emulate
from flashwright import gpu as gpus
from flashwright.author.builtin.author import write_code, write_sketch
from flashwright.author.builtin.variants import make_spec
from flashwright.emulate.emulate import LaunchResult, run
from flashwright.emulate.encode import EncodedKernel
from flashwright.emulate.own import EmulatedKernel
from flashwright.lower.launch_plan import LaunchPlan
from flashwright.lower.translate import translate
from tests.share import some
from tests.unit.emulated import needs_compilers
from tests.unit.tl_attention import program
from tests.unit.together import SCHEDULES, compiled

pytestmark = needs_compilers

Scores = NDArray[np.float64]
ROWS, KEYS, TILE = 64, 128, 16  # as many rows as columns of Q: its scores can be chosen one by one
CARD = gpus.find("h200")
SIZES = {"BM": ROWS, "BN": TILE, "Warps": 4, "Stages": 2, "QStages": 1, "SplitMasked": 1}
TINY = 2.0**-133  # the smallest of bf16; times Q and Scale it is -0 where it is negative
# What is planted: the code, and what stands there instead.
PLANTED = {
    "nothing in floats": ("if (!above) {", "if (false) {"),
    "a vote that one row is enough for": (
        "int above = fw::none_negative(Smax);",
        "int above = __any_sync(0xffffffffu, Smax(0) >= 0.f);",
    ),
    "floats that are forgotten": ("fw::max(reached(m), most", "fw::max(Smax(m), most"),
}


# --- scores -------------------------------------------------------------------------------------


def rising(keys: int = KEYS) -> Scores:
    """Negative all along. In each tile one score is far above those of the tiles before; among
    integers another one is the largest."""
    scores = -1050 - 50 * np.random.default_rng(1).random((ROWS, keys))
    for tile in range(keys // TILE):
        scores[:, tile * TILE] = -1000 + 100 * tile  # exp(100) is more than fp32 has
    return scores


def later(keys: int = KEYS) -> Scores:
    """Negative for half of the tiles; then each row has a positive score."""
    scores, rows = rising(keys), np.arange(ROWS)
    scores[rows, keys // 2 + rows % TILE] = 1 + rows
    return scores


def mixed() -> Scores:
    """In each warp rows that are positive at once, later, and never."""
    rows, normal = np.arange(ROWS), 5 * np.random.default_rng(2).standard_normal((ROWS, KEYS))
    kinds = np.stack([rising(), later(), normal])
    return np.asarray(kinds[rows % 3, rows])


def zeros() -> Scores:
    """Rows whose first maximum is 0 or -0, among others; what follows is below or above it."""
    scores, rows = mixed(), np.arange(ROWS)
    scores[:, :TILE] = -np.abs(scores[:, :TILE]) - 1
    scores[rows, rows % TILE] = np.where(rows % 2, 0, -TINY)
    return scores


CASES: dict[str, Callable[[], Scores]] = {
    "rising": rising,
    "later": later,
    "mixed": mixed,
    "zeros": zeros,
    "rows that see one key at first": lambda: rising(ROWS),
    "the same, with a positive score later": lambda: later(ROWS),
    "rows that see nothing": lambda: later(ROWS)[:, :50],
    "all positive": lambda: -rising(),
}


# --- kernels ------------------------------------------------------------------------------------


@functools.cache
def source(negative: bool, sparing: bool) -> tuple[str, LaunchPlan]:
    """Causal attention in small tiles; with a negative scale, too."""
    spec = make_spec("mha", head_dim=ROWS, dtype="bf16", causal=True)
    code = write_code(write_sketch(spec), spec, CARD).code
    for name, value in SIZES.items():
        code = f"param {name} = {value}\n" + re.sub(rf"param {name} = .*\n", "", code)
    if negative:
        code = code.replace("param Scale = ", "param Scale = 0 - ")
    made = translate(program(code, strict=False), CARD, sparing)
    assert ("as_integers" in made.source) != sparing
    return made.source, made.plan


@functools.cache
def kernels() -> dict[str, EncodedKernel]:
    """With maxima as integers and in floats, and the first with each bug."""
    right, _ = source(False, False)
    texts = {
        "integers": right,
        "floats": source(False, True)[0],
        "integers, negative": source(True, False)[0],
        "floats, negative": source(True, True)[0],
    }
    for name, (old, new) in PLANTED.items():
        assert old in right
        texts[name] = right.replace(old, new)
    listed = list(texts.values())
    return dict(zip(texts, compiled(listed, "attention", CARD.arch), strict=True))


Outputs = dict[str, NDArray[np.float64]]


def attended(kernel: str, scores: Scores, schedule: str = "eager") -> tuple[LaunchResult, Outputs]:
    """With Q diagonal, column i of K are the scores of row i."""
    keys = scores.shape[1]
    sign = -1 if "negative" in kernel else 1
    row = np.where(np.abs(scores).min(1) == TINY, 2.0**-14, 8.0)  # the scale is 1 / 8
    whole = np.where(np.abs(scores) == TINY, scores, scores * (8 / row)[:, None])
    arrays = {
        "Q": np.diag(row).astype(ml_dtypes.bfloat16),
        "K": sign * whole.T.astype(ml_dtypes.bfloat16),
        "V": np.random.default_rng(3).standard_normal((keys, ROWS)).astype(ml_dtypes.bfloat16),
        "O": np.full((ROWS, ROWS), np.nan, ml_dtypes.bfloat16),
    }
    given = {name: np.ascontiguousarray(array[None, None]) for name, array in arrays.items()}
    given["LSE"] = np.full((1, 1, ROWS), np.nan, np.float32)
    dims = {"batch": 1, "heads": 1, "kv_heads": 1, "q_len": ROWS, "kv_len": keys}
    result = run(kernels()[kernel], source(False, False)[1], given, dims, schedule)
    return result, {name: given[name][0, 0].astype(np.float64) for name in ("O", "LSE")}


def expected(scores: Scores) -> Outputs:
    """In fp64."""
    keys = scores.shape[1]
    seen = np.arange(keys) <= np.arange(ROWS)[:, None] + keys - ROWS
    exact = np.where(seen, scores.astype(ml_dtypes.bfloat16).astype(np.float64), -np.inf)
    values = np.random.default_rng(3).standard_normal((keys, ROWS)).astype(ml_dtypes.bfloat16)
    with np.errstate(divide="ignore"):
        most = np.where(seen.any(1), exact.max(1), 0)
        lse = most + np.log(np.exp(exact - most[:, None]).sum(1))
    weights = np.where(seen, np.exp(exact - np.where(seen.any(1), lse, 0)[:, None]), 0)
    return {"O": weights @ values.astype(np.float64), "LSE": lse}


def right(outputs: Outputs, scores: Scores) -> bool:
    wanted = expected(scores)
    shown = np.isfinite(wanted["LSE"])
    return (
        np.allclose(outputs["O"], wanted["O"], rtol=0.02, atol=0.02)
        and np.allclose(outputs["LSE"][shown], wanted["LSE"][shown], rtol=1e-4, atol=1e-4)
        and not np.isfinite(outputs["LSE"][~shown]).any()
    )


# --- tests --------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", some(CASES, every=4))
def test_maxima_are_those_of_floats(case: str) -> None:
    scores = CASES[case]()
    for sign in ("", ", negative"):
        outputs = []
        for kind in ("integers", "floats"):
            result, found = attended(kind + sign, scores)
            assert not result.findings
            assert right(found, scores)
            outputs.append(found)
        for name in ("O", "LSE"):
            np.testing.assert_array_equal(outputs[0][name], outputs[1][name])


@pytest.mark.parametrize("schedule", SCHEDULES[1:])
def test_whatever_comes_first(schedule: str) -> None:
    result, found = attended("integers", mixed(), schedule)
    assert not result.findings
    assert right(found, mixed())


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_shows(bug: str) -> None:
    wrong = [
        case for case, scores in CASES.items() if not right(attended(bug, scores())[1], scores())
    ]
    assert "mixed" in wrong
    assert ("later" in wrong) == ("rising" in wrong) == ("vote" not in bug)
    assert "all positive" not in wrong


# --- the parts in C++ ---------------------------------------------------------------------------

PARTS = """
#include <fw/maxima.cuh>
template <int Cols>
__device__ void one(float const* in, float* most) {
  auto tile = cute::make_tensor<float>(cute::Layout<cute::Shape<cute::_2, cute::Int<Cols>>>{});
  for (int m = 0; m < 2; ++m) {
    for (int n = 0; n < Cols; ++n) tile(m, n) = in[(threadIdx.x * 2 + m) * 9 + n];
    most[(Cols * 32 + threadIdx.x) * 2 + m] = fw::most_as_integers(tile, m);
  }
}
extern "C" __global__ void parts(float const* in, float* most, int* above) {
  one<1>(in, most), one<2>(in, most), one<3>(in, most), one<4>(in, most);
  one<7>(in, most), one<8>(in, most), one<9>(in, most);
  auto rows = cute::make_tensor<float>(cute::Layout<cute::_2>{});
  for (int m = 0; m < 2; ++m) rows(m) = in[(threadIdx.x * 2 + m) * 9];
  above[threadIdx.x] = fw::none_negative(rows);
}
"""


@functools.cache
def parts() -> EmulatedKernel:
    return flashwright.emulate.kernel(PARTS, arch=CARD.arch)


def test_the_largest_of_any_number_of_columns_or_one_of_them() -> None:
    rng = np.random.default_rng(4)
    given = rng.choice(
        [-np.inf, -3e38, -1.0, -TINY, -0.0, 0.0, TINY, 1.0, np.inf], (64, 9), p=[0.12] * 8 + [0.04]
    ).astype(np.float32)
    given[::4] = -np.abs(given[::4])
    most, above = np.full((10, 64), np.nan, np.float32), np.zeros(32, np.int32)
    assert parts()(1, 32, given, most, above).ok
    for columns in (1, 2, 3, 4, 7, 8, 9):
        part, found = given[:, :columns], most[columns]
        top = part.max(1)
        assert (part == found[:, None]).any(1).all()
        assert (found[top >= 0] == top[top >= 0])[np.signbit(top[top >= 0]) == 0].all()
        assert (found <= top).all()


@pytest.mark.parametrize(
    ("value", "above"), [(0.0, 1), (-0.0, 1), (TINY, 1), (-TINY, 0), (-np.inf, 0), (np.nan, 0)]
)
@pytest.mark.parametrize("row", [0, 1, 37, 63])
def test_all_rows_of_a_warp_have_a_vote(row: int, value: float, above: int) -> None:
    given, most = np.ones((64, 9), np.float32), np.zeros((10, 64), np.float32)
    given[row] = value
    votes = np.full(32, -1, np.int32)
    assert parts()(1, 32, given, most, votes).ok
    assert set(votes) == {above}
