"""The yardstick of a kernel's exactness: PyTorch's flash backend on the same problem.

It calls the operator under `scaled_dot_product_attention` directly: only that one takes windows,
and causal masks with unequal numbers of queries and keys. The operator has no softcap, ALiBi, sinks
or sink tokens. For a spec with those, its error is that of the problem without them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flashwright.judge import oracle_device
from flashwright.judge.gradients import gradients
from flashwright.judge.oracle import Array
from flashwright.spec import AttentionSpec

WIDEST = 256


def unable(spec: AttentionSpec) -> str | None:
    """Why the library cannot run this spec; None if it can."""
    if spec.reference is not None:
        return "the program has a reference of its own"
    if spec.batch is not None:
        return "torch's flash backend is called with rectangular batches alone"
    if spec.dtype == "fp8":
        return "torch's flash backend has no fp8"
    if spec.branch in ("compressed", "selected"):
        return "torch's flash backend has no such sparsity"
    if max(spec.head_dim, spec.value_dim) > WIDEST:
        return f"torch's flash backend has head dims up to {WIDEST}"
    return None


def errors(
    spec: AttentionSpec,
    inputs: Mapping[str, Any],
    dims: Mapping[str, int],
    expected: Mapping[str, Array],
) -> dict[str, float | None]:
    """The library's error of O, or of dQ, dK and dV, relative to the RMS of each.

    `expected` is the oracle's answer for the spec. What this torch cannot compute is missing.
    """
    import torch

    if unable(spec) is not None:
        return {}
    lacks: dict[str, Any] = {"softcap": None, "alibi": False, "sink": False, "sink_tokens": None}
    plain = spec.model_copy(update={**lacks, "branch": None})
    if any(getattr(spec, name) != value for name, value in lacks.items()):
        expected = _expected(plain, inputs, dims)
    try:
        found = _gradients(plain, inputs) if spec.backward else {"O": _forward(plain, inputs)}
    except (RuntimeError, TypeError, AttributeError):
        return {}  # this torch cannot run it: the verdict then has no ratio
    exact = {n: torch.as_tensor(expected[n], device=inputs["Q"].device) for n in found}
    return {n: relative_rms(x, exact[n]) for n, x in found.items()}


def _expected(
    spec: AttentionSpec, inputs: Mapping[str, Any], dims: Mapping[str, int]
) -> Mapping[str, Any]:
    import torch

    if not spec.backward:
        return oracle_device.attention(torch, spec, inputs, dims)
    return {name: one.value for name, one in gradients(spec, inputs, dims, torch).items()}


def relative_rms(found: Any, expected: Any) -> float | None:
    """The RMS of the error over the RMS of the expected output; None if that is undefined."""
    whole = float((expected**2).mean().sqrt())
    part = float(((found.double() - expected) ** 2).mean().sqrt())
    return part / whole if whole > 0 and part < float("inf") else None


def _gradients(spec: AttentionSpec, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """dQ, dK and dV of the flash operator."""
    import torch

    leaves = {name: inputs[name].detach().requires_grad_() for name in "QKV"}
    with torch.enable_grad():
        out = _forward(spec, leaves)
    found = torch.autograd.grad(out, tuple(leaves.values()), inputs["dO"])
    return {f"d{name}": one for name, one in zip(leaves, found, strict=True)}


def _forward(spec: AttentionSpec, inputs: Mapping[str, Any]) -> Any:
    """O of the flash operator as (batch, heads, length, dim)."""
    import torch

    q, k, v = inputs["Q"], inputs["K"], spec.values(inputs)
    wide = spec.head_dim - spec.value_dim
    if wide > 0:  # the operator needs V as wide as K
        v = torch.nn.functional.pad(v, (0, wide))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    window = {}
    if spec.window is not None:
        right = 0 if spec.causal else spec.window - 1
        window = {"window_size_left": spec.window - 1, "window_size_right": right}
    found = torch.ops.aten._flash_attention_forward(
        *(q, k, v, None, None, q.shape[1], k.shape[1], 0.0, spec.causal, False),
        scale=spec.softmax_scale,
        **window,
    )[0]
    return found.transpose(1, 2)[..., : spec.value_dim]
