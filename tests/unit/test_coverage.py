"""Lengths and inputs that can tell: from a program's own sizes, both sides of every bound."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from flashwright import gpu as gpus
from flashwright import spec as specs
from flashwright.build import package
from flashwright.build.make import make
from flashwright.check.check import checked_program
from flashwright.judge import oracle
from flashwright.judge.coverage import FEW, Budget, cover
from flashwright.judge.cpu import CpuVerdict, cases_of, coverage, judge, reference_spread
from flashwright.judge.emulated import judge_emulated
from flashwright.judge.inputs import factor_of, make_inputs, spread_of
from flashwright.judge.problems import coverage as trial_coverage
from flashwright.judge.problems import problems
from flashwright.judge.reference import user_reference
from flashwright.judge.tiling import Served, Tiling, served_by, tiling_of
from flashwright.lang.parse import parse
from flashwright.spec import AttentionSpec
from tests.share import some
from tests.unit import emulated, tl_attention
from tests.unit.emulated import needs_compilers
from tests.unit.test_cli import Outcome

TL = """\
param HeadDim = 64
param BM = 64
param BN = 64
param Warps = 4
{params}

grid block_idx = 0:q_len / BM, head_idx = 0:heads, batch_idx = 0:batch
let kv_head = floor(head_idx * kv_heads / heads)

Allocate Q in global (batch, heads, q_len, HeadDim) as fp16
Allocate K in global (batch, kv_heads, kv_len, HeadDim) as fp16
Allocate V in global (batch, kv_heads, kv_len, HeadDim) as fp16
Allocate O in global (batch, heads, q_len, HeadDim) as fp16
Allocate K in shared (BN, HeadDim) as fp16 with stages 2
Allocate S in register (BM, BN) as fp32
Allocate O in register (BM, HeadDim) as fp32
Allocate Smax in register (BM) as fp32
Allocate Ssum in register (BM) as fp32

Copy Q (BM, HeadDim) in coordinate [B = batch_idx, H = head_idx, L = block_idx]
  from global to shared
Compute -1e30 and get Smax
Compute 0 and get Ssum
Compute 0 and get O_register
for i = 0:kv_len / BN
  Copy K (BN, HeadDim) in coordinate [B = batch_idx, H = kv_head, L = i] from global to shared
  Copy V (BN, HeadDim) in coordinate [B = batch_idx, H = kv_head, L = i] from global to shared
  Compute GEMM Q_shared, K_shared.T and get S
  Compute Mask S where kv_idx < kv_len and {mask}
  Compute Softmax S with Smax and Ssum and rescale O_register
  Reshape S from (MMA_C, MMA_M, MMA_N) to (MMA_A, MMA_M, MMA_N_new)
  Compute GEMM S, V_shared and accumulate O_register
end
Compute where(Ssum > 0, O_register / Ssum, 0) and get new O_register
Copy O (BM, HeadDim) in coordinate [B = batch_idx, H = head_idx, L = block_idx]
  from register to global
"""
P = "q_idx + kv_len - q_len"
REFERENCE = """\
import numpy as np

def attention(q, k, v, q_len, kv_len):
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    s = q @ k.swapaxes(-1, -2)
    kv_idx = np.arange(kv_len)[None, :]
    p = np.arange(q_len)[:, None] + kv_len - q_len
    s = np.where({mask}, s, -np.inf)
    top = s.max(-1, keepdims=True)
    w = np.exp(s - np.where(np.isfinite(top), top, 0))
    total = w.sum(-1, keepdims=True)
    return (w / np.where(total > 0, total, 1)) @ v
"""
CAUSAL = f"kv_idx <= {P}"
WINDOW = f"{CAUSAL} and kv_idx > {P} - Window"
SINKS = f"{CAUSAL} and (kv_idx > {P} - Window or kv_idx < SinkTokens)"
PREFIX = f"(kv_idx < Prefix or {CAUSAL})"
WRONG_END = "kv_idx < kv_len or kv_idx >= BN"
CAUSAL_SPEC = {"heads": 4, "kv_heads": 2, "head_dim": 64, "scale": 1.0, "lse": False}


def judged(
    mask: str, params: str, right: str | None = None, folder: Path | None = None, **settings: object
) -> CpuVerdict:
    """The verdict on a program; with `right`, the mask of a user's reference in NumPy."""
    given: dict[str, object] = {**CAUSAL_SPEC, **settings}
    if right is not None:
        assert folder is not None
        (folder / "mine.py").write_text(REFERENCE.format(mask=right))
        given = {**given, "scale": None, "reference": "mine.py"}
    spec = AttentionSpec.make(variant="own", **given)
    program = checked_program(parse(TL.format(mask=mask, params=params)))
    return judge(program, spec, base=folder)


# --- what a program's sizes are ---------------------------------------------------------------


def test_sizes_are_read_off_the_program() -> None:
    params = "param Window = 300\nparam SinkTokens = 4\nparam Step = 2 * BN"
    mask = f"{SINKS} and kv_idx * 3 < Step * kv_len + 77"
    found = tiling_of(checked_program(parse(TL.format(mask=mask, params=params))))
    assert found == Tiling(64, 64, 2, {"Window": 300, "SinkTokens": 4, "77": 77}, diagonal=True)


def test_the_lengths_lie_on_both_sides_of_every_bound() -> None:
    spec = AttentionSpec.make(variant="own", **{**CAUSAL_SPEC, "causal": True, "window": 300})
    program = checked_program(parse(TL.format(mask=WINDOW, params="param Window = 300")))
    found = coverage(program, spec)
    keys = {kv for _, kv in found.pairs}
    assert {300, 301} <= keys
    assert {kv % 64 for kv in keys} >= {0, 1, 63}
    assert {q % 64 for q, _ in found.pairs} >= {0, 1, 63}
    assert {-(-kv // 64) for kv in keys} >= {1, 2, 3, 5}, "a ring of two stages"
    assert any(q >= FEW and kv >= 300 + 2 * 64 + FEW for q, kv in found.pairs), "skipped before"
    assert any(q >= 64 + 2 * 64 for q, _ in found.pairs), "skipped after"
    assert any(q > kv for q, kv in found.pairs)
    assert not found.unreached({"q_len": q, "kv_len": kv} for q, kv in found.pairs)
    assert len(found.pairs) <= 14, "few problems reach many goals"


@pytest.mark.parametrize("reference", [None, "mine.py"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("tiles", [(64, 64), (128, 64), (64, 128)])
def test_the_first_problem_has_many_blocks_of_several_batches_and_heads(
    tiles: tuple[int, int], kv_heads: int, reference: str | None
) -> None:
    """Without it a wrong stride of the batches would pass, where the others have one."""
    given = {**CAUSAL_SPEC, "kv_heads": kv_heads, "causal": True, "reference": reference}
    if reference:
        given = {name: given[name] for name in ("heads", "kv_heads", "head_dim", "reference")}
    spec = AttentionSpec.make(variant="own", **given)
    program = TL.format(mask=CAUSAL, params="").replace("BM = 64", f"BM = {tiles[0]}")
    program = program.replace("BN = 64", f"BN = {tiles[1]}").replace("Warps = 4", "Warps = 8")
    served = Served(tiling_of(checked_program(parse(program))))
    chosen = trial_coverage(spec, "emulated", (served,))
    emulated_ones = problems(spec, 1, "emulated", chosen=chosen)
    run = cases_of(coverage(checked_program(parse(program)), spec), spec)

    def has_many(dims: Mapping[str, int]) -> bool:
        counts = {"batch": 2, "kv_heads": min(kv_heads, 2)}
        counts["heads"] = counts["kv_heads"] * (1 if kv_heads == 4 else 2)
        every_query_sees_a_key = dims["q_len"] <= dims["kv_len"]
        blocks = tiles[0] < dims["q_len"] and tiles[1] < dims["kv_len"]
        return counts.items() <= dims.items() and blocks and every_query_sees_a_key

    assert has_many(emulated_ones[0].dims)
    assert any(has_many(dims) for dims in run)


def test_what_is_too_long_is_named() -> None:
    spec = AttentionSpec.make(variant="own", **{**CAUSAL_SPEC, "causal": True, "window": 100_000})
    budget = Budget(400_000, 800_000, "too long for emulation")
    found = cover((Served(Tiling(64, 64, 2, {"Window": 100_000}, diagonal=True)),), spec, budget)
    left = found.unreached({"q_len": q, "kv_len": kv} for q, kv in found.pairs)
    assert "kv_len = Window 100000 + 1 (too long for emulation)" in left
    assert "2 key blocks past Window (too long for emulation)" in left
    assert all("multiple" not in name for name in left)
    early = found.unreached([{"q_len": 1, "kv_len": 1}], "out of time")
    assert "q_len a multiple of 64 (out of time)" in early


def test_each_kernel_of_a_package_has_its_own_goals() -> None:
    spec = AttentionSpec.make(variant="own", **CAUSAL_SPEC)
    kernels = (Served(Tiling(64, 64, 2), 0, 1024), Served(Tiling(128, 160, 2), 1024))
    found = trial_coverage(spec, "cuda", kernels)
    keys = {kv for _, kv in found.pairs}
    assert any(kv > 1024 and kv % 160 == 1 for kv in keys)
    assert any(kv > 1024 and kv % 160 == 159 for kv in keys)
    emulated_ = trial_coverage(spec, "emulated", kernels, seconds=2.0)
    left = emulated_.unreached({"q_len": q, "kv_len": kv} for q, kv in emulated_.pairs)
    assert any(
        name.endswith("kernel for above 1024 keys (too long for emulation)") for name in left
    )


# --- inputs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [None, 1.0, 1e-3, 30.0])
def test_weights_are_neither_one_hot_nor_flat(scale: float | None) -> None:
    spec = AttentionSpec.make(variant="own", **{**CAUSAL_SPEC, "scale": scale})
    dims = {"batch": 1, "heads": 4, "kv_heads": 2, "q_len": 64, "kv_len": 256}
    made = make_inputs(spec, dims, 1)
    scores = oracle.weights(spec, made, dims, 0, 0).scores
    assert 0.7 < np.median(scores.std(axis=1)) < 2.8
    if scale is None:
        assert spread_of(spec) == pytest.approx(1)
        assert factor_of(spread_of(spec), "fp16") == 1


def test_a_scale_that_only_the_program_has_is_measured(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(REFERENCE.format(mask="kv_idx <= p"))
    spec = AttentionSpec.make(variant="own", **{**CAUSAL_SPEC, "scale": None})
    program = checked_program(parse(TL.format(mask=CAUSAL, params="")))
    spread = reference_spread(program, spec, user_reference(tmp_path / "mine.py"))
    assert spread == pytest.approx(8, rel=0.3), "sqrt(64): no scale"


# --- wrong programs ---------------------------------------------------------------------------


def test_a_rate_of_another_batch_is_caught(tmp_path: Path) -> None:
    """One position has no distance, so a problem of one key does not show the rates."""
    score = "Compute S * 0.125 - Rate[{0}] * abs(kv_idx - q_idx - kv_len + q_len) and get new S"
    program = TL.format(mask=CAUSAL, params="").replace(
        "  Compute Mask", "  " + score + "\n  Compute Mask", 1
    )
    program = program.replace(
        "\nAllocate S ", "\nAllocate Rate in global (B: batch) as fp32\nAllocate S "
    )
    reference = REFERENCE.format(mask="kv_idx <= p").replace("k, v, q_len", "k, v, rate, q_len")
    distance = "s = s / 8 - rate[:, None, None, None] * np.abs(p - kv_idx)\n"
    (tmp_path / "mine.py").write_text(
        reference.replace("    s = np.where", "    " + distance + "    s = np.where")
    )
    spec = AttentionSpec.make(
        variant="own", **{**CAUSAL_SPEC, "scale": None, "reference": "mine.py"}
    )
    for index, right in (("batch_idx", True), ("0", False)):
        found = judge(checked_program(parse(program.format(index))), spec, base=tmp_path)
        assert found.ok == right, index


@pytest.mark.slow
def test_another_window_than_the_users_reference_is_caught(tmp_path: Path) -> None:
    right = "(kv_idx <= p) & (kv_idx > p - 512)"
    fine = judged(WINDOW, "param Window = 512", right, tmp_path)
    assert fine.ok, fine.diagnostics
    assert not fine.unreached
    assert max(case.dims["kv_len"] for case in fine.cases) > 512 + 64
    assert not judged(WINDOW, "param Window = 400", right, tmp_path).ok
    assert not judged(CAUSAL, "", right, tmp_path).ok, "none at all"
    (tmp_path / "own.tl").write_text(TL.format(mask=WINDOW, params="param Window = 400"))
    settings = 'variant = "own"\nheads = 4\nkv_heads = 2\nhead_dim = 64\nreference = "mine.py"\n'
    (tmp_path / "own.toml").write_text(settings)
    done = Outcome("run", str(tmp_path / "own.tl"))
    assert done.code == 1
    assert "`O` is wrong" in done.out + done.err


OFF_BY_ONE = {
    "the diagonal": (CAUSAL, "", "kv_idx <= p", (CAUSAL + " + 1", CAUSAL + " - 1")),
    "the window": (
        *(WINDOW, "param Window = 300", "(kv_idx <= p) & (kv_idx > p - 300)"),
        (WINDOW + " - 1", WINDOW + " + 1"),
    ),
    "sink tokens": (
        *(SINKS, "param Window = 200\nparam SinkTokens = 5"),
        "(kv_idx <= p) & ((kv_idx > p - 200) | (kv_idx < 5))",
        (
            SINKS.replace("SinkTokens", "SinkTokens + 1"),
            SINKS.replace("SinkTokens", "SinkTokens - 1"),
        ),
    ),
    "the prefix": (
        *(PREFIX, "param Prefix = 150", "(kv_idx < 150) | (kv_idx <= p)"),
        (PREFIX.replace("Prefix", "Prefix + 1"), PREFIX.replace("Prefix", "Prefix - 1")),
    ),
}


@pytest.mark.parametrize("case", some(OFF_BY_ONE.values(), 4), ids=list(OFF_BY_ONE))
def test_a_mask_off_by_one_is_caught_without_a_scale(
    case: tuple[str, str, str, tuple[str, str]], tmp_path: Path
) -> None:
    mask, params, right, wrong = case
    fine = judged(mask, params, right, tmp_path)
    assert fine.ok, fine.diagnostics
    for other in wrong:
        assert not judged(other, params, right, tmp_path).ok, other


def test_a_mask_off_by_one_is_caught_by_the_spec() -> None:
    asked = {"causal": True, "window": 200, "sink_tokens": 5}
    params = "param Window = 200\nparam SinkTokens = 5"
    assert judged(SINKS, params, **asked).ok
    for old, new in (("Window", "Window - 1"), ("Window", "Window + 1"), ("Tokens", "Tokens - 1")):
        assert not judged(SINKS.replace(old, new), params, **asked).ok, new


# --- wrong kernels ----------------------------------------------------------------------------


@pytest.mark.slow
@needs_compilers
def test_a_ragged_end_that_is_masked_in_the_first_block_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel of another program beside the TL of the right one, without a scale.

    The score of a key past the end is 0: beside a largest one of 25, as standard normal inputs
    give, it has no weight.
    """
    spec = AttentionSpec.make(variant="own", heads=2, head_dim=64, lse=False, scale=1.0)
    card = gpus.find(emulated.GPU)
    scale = "param Scale = 1 / sqrt(HeadDim)\n"
    texts = {
        mask: tl_attention.attention(mask=mask, scale="").replace(scale, "")
        for mask in ("kv_idx < kv_len", WRONG_END)
    }
    made, built = make(tl_attention.program(texts[WRONG_END], strict=False), card)
    files = {
        **package.translated(made),
        **package.compiled(built),
        "code.tl": texts["kv_idx < kv_len"],
        "spec.toml": specs.dump(spec),
    }
    for name, data in files.items():
        (tmp_path / name).write_bytes(data if isinstance(data, bytes) else data.encode())
    assert [k.tiling for k in served_by(tmp_path)] == [Tiling(64, 32, 1)]
    found = judge_emulated(tmp_path, spec, seed=3, seconds=8.0)
    assert not found.ok
    assert {o.name for o in found.offences} & {"special_shapes", "wrong"}
    assert json.loads(json.dumps(found.record()))["unreached"] == []
    monkeypatch.setattr("flashwright.judge.inputs.factor_of", lambda spread, dtype: 1.0)
    assert judge_emulated(tmp_path, spec, seed=3, lengths=[(64, 257)]).ok, "one-hot weights"
