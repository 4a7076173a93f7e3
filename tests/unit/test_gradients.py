"""Gradients on the CPU: their fp64 values, the limits of their errors, the verdict on programs."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from flashwright.check.check import check
from flashwright.judge import oracle
from flashwright.judge.answer import backward_inputs
from flashwright.judge.cpu import default_cases, judge
from flashwright.judge.gradient_noise import compare, delta_error
from flashwright.judge.gradients import gradients
from flashwright.judge.inputs import KINDS, make_inputs
from flashwright.judge.reference import DELTA, NOISE, user_reference
from flashwright.lang.diagnostic import Failed
from flashwright.lang.parse import parse, read
from flashwright.program.kernels import Kernels
from flashwright.spec import AttentionSpec, BadSpec
from tests.unit.test_cli import Outcome
from tests.unit.test_reference import CAUSAL, TORCH

SETTINGS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "scale": {"scale": 0.7},
    "window": {"window": 3},
    "causal window": {"window": 2, "causal": True},
    "sink tokens": {"window": 2, "causal": True, "sink_tokens": 2},
    "softcap": {"softcap": 1.5, "causal": True},
    "alibi": {"alibi": True},
    "sink": {"sink": True, "causal": True},
    "shared heads": {"heads": 4, "kv_heads": 2},
    "one kv head": {"heads": 3, "kv_heads": 1, "causal": True},
    "narrow values": {"v_dim": 16, "head_dim": 8},
    "everything": {
        "causal": True,
        "window": 4,
        "sink_tokens": 1,
        "softcap": 2.0,
        "alibi": True,
        "sink": True,
        "heads": 4,
        "kv_heads": 2,
        "v_dim": 16,
        "scale": 0.6,
    },
    "compressed": {"branch": "compressed", "causal": True, "block": 4, "stride": 2},
    "selected": {"branch": "selected", "causal": True, "selected_block": 2, "top_k": 2},
}
LENGTHS = ((1, 1), (6, 6), (4, 7), (7, 4))


def problem(
    q_len: int, kv_len: int, kind: str = "normal", **settings: Any
) -> tuple[AttentionSpec, Any, Any]:
    given = {"heads": 2, "head_dim": 8, "dtype": "bf16", **settings}
    spec = AttentionSpec.make(variant="x", backward=True, **given)
    dims = {"batch": 2, "heads": spec.heads, "kv_heads": spec.kv_heads, "q_len": q_len}
    dims["kv_len"] = kv_len
    if spec.branch == "compressed":
        dims["tokens"] = (kv_len - 1) * spec.stride + spec.block
    made = make_inputs(spec, dims, 5, kind)
    return spec, {n: x if n == "Idx" else x.astype(np.float64) for n, x in made.items()}, dims


def loss(spec: AttentionSpec, inputs: Any, dims: Any) -> Any:
    """sum(O * dO), written for complex numbers and apart from the oracle."""
    q, k, v = (inputs[name] for name in "QKV")
    (_, heads, q_len, _), kv_len = q.shape, k.shape[2]
    k, v = (np.repeat(x, heads // x.shape[1], axis=1) for x in (k, v))
    s = np.einsum("bhqd,bhkd->bhqk", q, k) * spec.softmax_scale
    p = oracle.positions(spec, q_len, kv_len, dims.get("tokens"))
    if spec.softcap is not None:
        s = spec.softcap * np.tanh(s / spec.softcap)
    if spec.alibi:
        s = s + inputs["Slopes"][:, None, None] * (np.arange(kv_len) - p[:, None])
    seen = np.broadcast_to(oracle.visible(spec, q_len, kv_len, dims.get("tokens")), s.shape).copy()
    if spec.branch == "selected":
        for b, h in itertools.product(range(len(q)), range(heads)):
            idx = inputs["Idx"][b, h * inputs["Idx"].shape[1] // heads]
            seen[b, h] &= oracle.chosen(spec, idx, kv_len)
    weight = np.where(seen, np.exp(s), 0)
    total = weight.sum(axis=-1, keepdims=True)
    if spec.sink:
        total = total + np.exp(inputs["Sink"])[:, None, None]
    out = np.where(total != 0, weight, 0) / np.where(total != 0, total, 1) @ v
    return (out * inputs["dO"]).sum()


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("name", SETTINGS)
def test_gradients_are_those_of_the_complex_step(name: str, lengths: tuple[int, int]) -> None:
    spec, inputs, dims = problem(*lengths, **SETTINGS[name])
    found = gradients(spec, inputs, dims)
    assert set(found) == {f"d{n}" for n in inputs if n not in ("dO", "Idx")}
    for gradient, got in found.items():
        of = gradient.removeprefix("d")
        wanted = np.zeros(inputs[of].shape)
        for at in np.ndindex(wanted.shape):
            moved = inputs[of].astype(complex)
            moved[at] += 1e-30j
            wanted[at] = loss(spec, {**inputs, of: moved}, dims).imag / 1e-30
        assert np.abs(got.value - wanted).max() <= 1e-12 * max(1, np.abs(wanted).max()), gradient


@pytest.mark.parametrize("name", SETTINGS)
def test_gradients_are_those_of_the_oracle(name: str) -> None:
    spec, inputs, dims = problem(7, 5, **SETTINGS[name])
    rng, step = np.random.default_rng(3), 1e-5
    for gradient, got in gradients(spec, inputs, dims).items():
        of = gradient.removeprefix("d")
        way = rng.standard_normal(inputs[of].shape)
        ends = [
            (oracle.attention(spec, {**inputs, of: inputs[of] + s * way}, dims)["O"] * inputs["dO"])
            for s in (step, -step)
        ]
        assert (ends[0] - ends[1]).sum() / (2 * step) == pytest.approx(
            (got.value * way).sum(), 1e-7
        )


def test_what_is_hidden_has_gradient_and_limit_zero() -> None:
    spec, inputs, dims = problem(7, 4, causal=True, window=1, alibi=True)  # rows 0 to 2 see no key
    found = gradients(spec, inputs, dims)
    rows = found["dQ"]
    for part in (rows.value, rows.noise, rows.bound):
        assert not part[:, :, :3].any()
    assert (rows.bound[:, :, 3:] > 0).all()  # one visible key: noise, though the gradient is 0
    assert np.abs(rows.value).max() < 1e-15
    spec, inputs, dims = problem(4, 9, window=2)  # keys 0 to 3 are seen by no query
    found = gradients(spec, inputs, dims)
    for name, part in itertools.product(("dK", "dV"), ("value", "noise", "bound")):
        assert not getattr(found[name], part)[:, :, :4].any()
        assert getattr(found[name], part)[:, :, 4:].all()


# --- the limits -------------------------------------------------------------------------------

NARROW = {"bf16": ml_dtypes.bfloat16, "fp16": np.float16}


def simulated(spec: AttentionSpec, inputs: Any, dims: Any, factor: float = 1.0) -> dict[str, Any]:
    """The gradients as an honest kernel computes them: fp32, with P, dS and the results rounded.

    `factor` is put on the scale of dQ and dK, on dV and on the other gradients.
    """
    kind = NARROW[spec.dtype]
    given = backward_inputs(spec, inputs, oracle.attention(spec, inputs, dims), 0)
    f32 = {n: x.astype(np.float32) for n, x in given.items() if n != "Idx"}
    q, do, out, lse = (f32[n] for n in ("Q", "dO", "O", "LSE"))
    group = q.shape[1] // f32["K"].shape[1]
    k, v = (np.repeat(f32[n], group, axis=1) for n in "KV")
    q_len, kv_len, scale = q.shape[2], k.shape[2], np.float32(spec.softmax_scale)
    s, chain = np.einsum("bhqd,bhkd->bhqk", q, k) * scale, np.float32(1)
    if spec.softcap is not None:
        t = np.tanh(s / np.float32(spec.softcap))
        s, chain = np.float32(spec.softcap) * t, 1 - t * t
    p = oracle.positions(spec, q_len, kv_len)
    far = (np.arange(kv_len) - p[:, None]).astype(np.float32)
    if spec.alibi:
        s = s + f32["Slopes"][:, None, None] * far
    seen = np.broadcast_to(oracle.visible(spec, q_len, kv_len), s.shape)
    weight = np.where(seen, np.exp(np.where(seen, s - lse[..., None], 0)), np.float32(0))
    delta = (do * out).sum(axis=-1, keepdims=True, dtype=np.float32)
    ds = weight * (do @ v.swapaxes(-1, -2) - delta)
    dx = (ds * chain).astype(kind).astype(np.float32)
    shared = (q.shape[0], -1, group, kv_len)
    back = {
        "dQ": (dx @ k) * scale,
        "dK": ((dx.swapaxes(-1, -2) @ q) * scale).reshape(*shared, spec.head_dim).sum(axis=2),
        "dV": weight.astype(kind).astype(np.float32).swapaxes(-1, -2) @ do,
    }
    back["dV"] = back["dV"].reshape(*shared, spec.value_dim).sum(axis=2)
    found = {n: (x * np.float32(factor)).astype(kind) for n, x in back.items()}
    if spec.alibi:
        found["dSlopes"] = (ds * far).sum(axis=(0, 2, 3)) * np.float32(factor)
    if spec.sink:
        share = np.exp(f32["Sink"][:, None] - lse)
        found["dSink"] = -(share * delta[..., 0]).sum(axis=(0, 2)) * np.float32(factor)
    return found


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("name", [n for n in SETTINGS if n not in ("compressed", "selected")])
def test_rounding_is_within_the_limits_and_errors_are_not(name: str, dtype: str) -> None:
    settings = {**SETTINGS[name], "head_dim": 64, "dtype": dtype}
    for (q_len, kv_len), kind in itertools.product(((40, 56), (56, 40)), KINDS):
        if settings.get("sink") and kind in ("opposed", "shifted", "peaked", "outliers", "tail"):
            continue  # rows whose weight is all the sink's
        spec, inputs, dims = problem(q_len, kv_len, kind=kind, **settings)
        wanted = gradients(spec, inputs, dims)
        for output, array in simulated(spec, inputs, dims).items():
            result = compare(array, wanted[output])
            assert result.ok, (kind, output, result)
        if kind == "normal":
            for output in wanted:  # of a sum over all rows, more is noise
                factor = 1.02 if output in ("dQ", "dK", "dV") else 1.1
                array = simulated(spec, inputs, dims, factor)[output]
                assert not compare(array, wanted[output]).ok, output


# --- programs ---------------------------------------------------------------------------------

PROGRAM = read(Path(__file__).parents[1] / "backward.tl")
SPEC = AttentionSpec.make(
    variant="x", causal=True, head_dim=64, heads=4, kv_heads=2, dtype="bf16", backward=True
)
READ_DELTA = (
    "Copy Delta (BM) in coordinate [B = batch_idx, H = head, L = i] from global to register\n"
)
SEEN = "kv_idx <= q_idx + kv_len - q_len"
ADD = "Copy dQ (BM, HeadDim) in coordinate [B = batch_idx, H = head, L = i] from register to global"
TO_DV = "  Compute GEMM S, dO_shared and accumulate dV_register\n"


def changed(*changes: tuple[str, str]) -> str:
    source = PROGRAM
    for old, new in changes:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    return source


def kernels(source: str) -> Kernels:
    verdict = check(parse(source))
    assert verdict.ok, verdict.diagnostics
    return Kernels(verdict.kernels)


def test_a_right_backward_pass() -> None:
    found = judge(kernels(PROGRAM), SPEC)
    assert found.ok, found.diagnostics
    assert {case.output for case in found.cases} == {"dQ", "dK", "dV"}
    assert any(case.dims["q_len"] > case.dims["kv_len"] for case in found.cases)  # empty rows
    assert 0.5 < (found.of_limit or 0) < 1
    assert all("of_limit" in record for record in found.record())


WRONG: dict[str, Any] = {
    "Delta left out": ("dK", ("dP - Delta", "dP - 0 * Delta")),
    "Delta of the next row": (
        *("dK", (READ_DELTA, "let next = 1\n")),
        ("dP - Delta", "dP - Delta[batch_idx, head, min(q_idx + next, q_len - 1)]"),
    ),
    "log2 for log": ("dV", ("- LSE)", "- LSE * 0.6931472)")),
    "mask off by one": ("dV", (SEEN, "kv_idx < q_idx + kv_len - q_len")),
    "a key block missed": (*("dK", ("S > -1e30", "S > -1e30 and (kv_idx < 64 or kv_idx >= 128)")),),
    "one key missed": ("dK", ("S > -1e30", "S > -1e30 and not kv_idx == 30")),
    "scale 1 % off": ("dV", ("Scale = 1 /", "Scale = 1.01 /")),
    "scale of dK 1 % off": ("dK", ("dK_register * Scale", "dK_register * Scale * 1.01")),
    "a head of the group missed": ("dV", ("0:Group * Steps", "0:(Group - 1) * Steps")),
    "dQ not scaled": ("dQ", ("dQsum * Scale", "dQsum * 1")),
    "zeros for dK": ("dK", ("dK_register * Scale", "dK_register * 0")),
    "dS of hidden keys": ("dK", ("S * (dP - Delta)", "max(S, 0.001) * (dP - Delta)")),
    "dQ twice": ("dQ", ("dQsum * Scale", "(dQsum + dQsum) * Scale")),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_backward_pass_is_rejected_with_its_output(name: str) -> None:
    output, *changes = WRONG[name]
    found = judge(kernels(changed(*changes)), SPEC)
    assert not found.ok
    (finding,) = found.diagnostics
    assert finding.code == "FW801"
    assert finding.message.startswith(f"`{output}` is wrong: ")
    assert "every element is 0" in finding.message or "allowed is an error of" in finding.message
    kernel = 3 if output == "dQ" else 2
    assert finding.label.startswith(f"kernel {kernel} of 3 stores it; q_len = ")
    assert any("`Delta`, which kernel 1 stores here" in label.text for label in finding.secondary)


CAUGHT: dict[str, Any] = {
    "Delta unused": ("FW602", ("dP - Delta", "dP")),
    "mask too wide": ("FW604", (SEEN, f"{SEEN} + 1")),
    "a key block missed": (
        "FW604",
        ("grid block_idx = 0:kv_len / BN", "grid block_idx = 0:kv_len / BN - 1"),
    ),
    "a query block missed": ("FW604", ("ceil(q_len / BM) - Start", "ceil(q_len / BM) - 1 - Start")),
    "dS not masked": (
        *("FW604", ("S * (dP - Delta)", "exp(min(Raw * Scale - LSE, 80)) * (dP - Delta)")),
        (
            "Allocate dP in register",
            "Allocate Raw in register (BN, BM) as fp32\nAllocate dP in register",
        ),
        (
            f"  Compute Mask S where {SEEN}\n",
            f"  Compute S * 1 and get Raw\n  Compute Mask S where {SEEN}\n",
        ),
    ),
    "dQ added twice": ("FW606", (f"{ADD} and", f"{ADD} and accumulate dQsum\n  {ADD} and")),
    "dV added twice": ("FW606", (TO_DV, TO_DV * 2)),
}


@pytest.mark.parametrize("name", CAUGHT)
def test_the_checker_finds_these_before_they_run(name: str) -> None:
    code, *changes = CAUGHT[name]
    assert code in {d.code for d in check(parse(changed(*changes))).errors}


ONE_KEY = changed((SEEN, f"{SEEN} and kv_idx > q_idx + kv_len - q_len - 1"))


@pytest.mark.parametrize("kind", ["peaked", "shifted", "opposed", "tail", "repeated", "scaled"])
def test_a_right_program_passes_where_gradients_vanish(kind: str) -> None:
    lengths = [(1, 1), (33, 70), (100, 64)]
    one = SPEC.model_copy(update={"window": 1})
    for source, spec in ((PROGRAM, SPEC), (ONE_KEY, one)):
        found = judge(kernels(source), spec, cases=default_cases(spec, lengths), kind=kind)
        assert found.ok, found.diagnostics


def test_a_row_without_keys_must_not_give_nan() -> None:
    plain = changed(("where(S > -1e30, exp(S * Scale - LSE), 0)", "exp(S * Scale - LSE)"))
    found = judge(kernels(plain), SPEC, cases=default_cases(SPEC, [(70, 40)]))
    assert [d.code for d in found.diagnostics] == ["FW805"]  # -inf - -inf


def test_gradients_that_are_missing_or_unknown() -> None:
    start = PROGRAM.index("Copy dV (BN, HeadDim)")
    end = PROGRAM.index("\n", start) + 1
    without = PROGRAM[:start] + PROGRAM[end:]
    with pytest.raises(Failed, match="nothing is stored in `dV`"):
        judge(kernels(without), SPEC, cases=default_cases(SPEC, [(5, 5)]))
    without_delta = changed((READ_DELTA, "let unused = 1\n"), ("dP - Delta", "dP"))
    with pytest.raises(Failed, match="`Delta` is no gradient of this spec: it has dQ, dK, dV"):
        judge(kernels(without_delta), SPEC, cases=default_cases(SPEC, [(5, 5)]))
    forward = SPEC.model_copy(update={"backward": False})
    with pytest.raises(Failed, match="the spec has no input `O`"):
        judge(kernels(PROGRAM), forward, cases=default_cases(SPEC, [(5, 5)]))


def test_a_tolerance_of_the_users_is_relative_to_the_gradient() -> None:
    doubtful = kernels(changed(("dK_register * Scale", "dK_register * Scale * 1.03")))
    cases = default_cases(SPEC, [(1, 1), (70, 90)])
    assert not judge(doubtful, SPEC, cases=cases).ok
    assert judge(doubtful, SPEC.model_copy(update={"tolerance": 0.1}), cases=cases).ok
    assert not judge(doubtful, SPEC.model_copy(update={"tolerance": 0.02}), cases=cases).ok


# --- several kernels that are no backward pass ------------------------------------------------

HAND = read(Path(__file__).parents[2] / "examples" / "softmax_by_hand.tl")
FORWARD = AttentionSpec.make(
    variant="x", causal=True, head_dim=64, heads=4, kv_heads=2, dtype="bf16"
)
SECOND = """
grid block_idx = 0:q_len / BM, head_idx = 0:heads, batch_idx = 0:batch
Allocate O in global (batch, heads, q_len, HeadDim) as bf16
Allocate O in register (BM, HeadDim) as fp32
Copy Sum (BM, HeadDim) in coordinate [B = batch_idx, H = head_idx, L = block_idx] from global to register
Compute Sum * 1 and get O_register
Copy O (BM, HeadDim) in coordinate [B = batch_idx, H = head_idx, L = block_idx] from register to global
"""  # noqa: E501


def test_the_outputs_of_several_kernels_are_compared_as_usual() -> None:
    first = HAND.replace("Allocate O in global", "Allocate Sum in global").replace(
        "HeadDim) as bf16\nAllocate S in", "HeadDim) as fp32\nAllocate S in"
    )
    first = first.replace("from register to global", "from register to global and get Sum")
    found = judge(kernels(first + SECOND), FORWARD)
    assert found.ok, found.diagnostics
    assert {case.output for case in found.cases} == {"O"}
    wrong = judge(kernels(first + SECOND.replace("Sum * 1", "Sum * 1.1")), FORWARD)
    (finding,) = wrong.diagnostics
    assert finding.message.startswith("`O` is wrong: ")
    assert finding.label.startswith("kernel 2 of 2 stores it")
    (label,) = finding.secondary
    assert label.text == "kernel 2 reads `Sum`, which kernel 1 stores here"


# --- a user's reference -----------------------------------------------------------------------


@pytest.fixture
def of_reference(tmp_path: Path) -> AttentionSpec:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    (tmp_path / "mine.py").write_text(TORCH)
    settings = {"reference": "mine.py:mine", "causal": False}
    return AttentionSpec.make(**(SPEC.model_dump() | settings))


@pytest.mark.slow
def test_the_gradients_of_a_reference(of_reference: AttentionSpec, tmp_path: Path) -> None:
    cases = default_cases(SPEC, [(1, 1), (33, 70), (70, 40)])  # NaN in PyTorch's empty rows
    found = judge(kernels(PROGRAM), of_reference, base=tmp_path, cases=cases)
    assert found.ok, found.diagnostics
    assert len(found.cases) == 9
    output, *changes = WRONG["scale of dK 1 % off"]
    wrong = judge(kernels(changed(*changes)), of_reference, base=tmp_path, cases=cases[1:])
    assert wrong.diagnostics[0].message.startswith(f"`{output}` is wrong: ")


def test_autograd_agrees_with_the_analytic_gradients(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    (tmp_path / "mine.py").write_text(TORCH)
    reference = user_reference(f"{tmp_path}/mine.py:mine")
    for lengths in ((9, 14), (14, 9)):
        spec, inputs, dims = problem(*lengths, causal=True, heads=4, kv_heads=2)
        out = oracle.attention(spec, inputs, dims)["O"]
        error = delta_error(inputs["dO"], out, spec.dtype)
        found = reference.gradients({**inputs, DELTA: error}, dims)
        wanted = gradients(spec, inputs, dims)
        for name in "QKV":
            np.testing.assert_allclose(found[f"d{name}"], wanted[f"d{name}"].value, atol=1e-13)
            noise = found[f"{NOISE}{name}"]
            assert (noise <= 3 * wanted[f"d{name}"].noise).all(), name
            assert noise.any() == (name != "V")  # Delta has no part in dV


def test_a_reference_without_gradients(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(CAUSAL)
    spec = AttentionSpec.make(**(SPEC.model_dump() | {"reference": "mine.py", "causal": False}))
    with pytest.raises(BadSpec, match="a reference in NumPy has no gradients: write it in PyTorch"):
        judge(kernels(PROGRAM), spec, base=tmp_path)


# --- the command ------------------------------------------------------------------------------

FILE = str(Path(__file__).parents[1] / "backward.tl")
INLINE = "causal, head_dim=64, heads=4, kv_heads=2, dtype=bf16, backward"


def test_run(tmp_path: Path) -> None:
    sizes = ("--q-len", "40", "--kv-len", "70")
    right = Outcome("run", FILE, "--spec", INLINE, *sizes)
    assert right.code == 0, right.err
    assert "of its limit" in right.out
    assert "agrees with fp64" in right.out
    assert re.search(r"at most 0\.\d\d of a\s+limit", right.out)
    alone = Outcome("run", FILE)
    assert alone.code == 0
    assert "NOTHING WAS COMPARED" in alone.out
    output, *changes = WRONG["dQ not scaled"]
    wrong = tmp_path / "wrong.tl"
    wrong.write_text(changed(*changes))
    told = Outcome("run", str(wrong), "--spec", INLINE, "--format", "json")
    assert told.code == 1
    record = json.loads(told.out)
    assert not record["ok"]
    assert record["spec"]["backward"] is True
    assert record["cases"][-1]["of_limit"] > 10
    assert f"`{output}` is wrong" in record["diagnostics"][0]["message"]
    assert Outcome("run", FILE, "--spec", INLINE.replace(", backward", "")).code == 2


def test_of_a_gradient_the_rows_that_are_most_of_it_count() -> None:
    """With outliers dK is a matter of few keys, so the ratio of two errors scatters more."""
    spec, inputs, dims = problem(64, 64, causal=True)
    even = gradients(spec, inputs, dims)["dQ"].value
    _, inputs, _ = problem(64, 64, "outliers", causal=True)
    uneven = gradients(spec, inputs, dims)["dK"].value
    assert oracle.rows_that_count(np.ones((2, 3, 8))) == 6
    assert oracle.rows_that_count(np.zeros((2, 3, 8))) == 0
    assert oracle.rows_that_count(even) > 4 * oracle.rows_that_count(uneven)
