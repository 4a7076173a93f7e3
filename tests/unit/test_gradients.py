"""Gradients on the CPU: their fp64 values, the limits of their errors, the verdict on programs."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from flashwright.judge import oracle
from flashwright.judge.gradients import gradients
from flashwright.judge.inputs import make_inputs
from flashwright.spec import AttentionSpec

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
        **{"causal": True, "window": 4, "sink_tokens": 1, "softcap": 2.0, "alibi": True},
        **{"sink": True, "heads": 4, "kv_heads": 2, "v_dim": 16, "head_dim": 8, "scale": 0.6},
    },
    "compressed": {"branch": "compressed", "causal": True, "block": 4, "stride": 2},
    "selected": {"branch": "selected", "causal": True, "selected_block": 2, "top_k": 2},
}
LENGTHS = ((1, 1), (6, 6), (4, 7), (7, 4))


def problem(q_len: int, kv_len: int, **settings: Any) -> tuple[AttentionSpec, Any, Any]:
    given = {"heads": 2, "head_dim": 8, "dtype": "bf16", **settings}
    spec = AttentionSpec.make(variant="x", backward=True, **given)
    dims = {"batch": 2, "heads": spec.heads, "kv_heads": spec.kv_heads, "q_len": q_len}
    dims["kv_len"] = kv_len
    if spec.branch == "compressed":
        dims["tokens"] = (kv_len - 1) * spec.stride + spec.block
    made = make_inputs(spec, dims, 5)
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
        assert (ends[0] - ends[1]).sum() / (2 * step) == pytest.approx((got.value * way).sum(), 1e-7)


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
