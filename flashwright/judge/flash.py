"""The yardstick of a kernel's exactness: PyTorch's flash backend on the same problem.

It calls the operator under `scaled_dot_product_attention` directly: only that one takes windows,
and causal masks with unequal numbers of queries and keys. The operator has no softcap, ALiBi, sinks
or sink tokens. For a spec with those, its error is that of the problem without them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flashwright.judge import oracle_device
from flashwright.spec import AttentionSpec

WIDEST = 256


def unable(spec: AttentionSpec) -> str | None:
    """Why the library cannot run this spec; None if it can."""
    if spec.reference is not None:
        return "the program has a reference of its own"
    if spec.dtype == "fp8":
        return "torch's flash backend has no fp8"
    if spec.branch in ("compressed", "selected"):
        return "torch's flash backend has no such sparsity"
    if max(spec.head_dim, spec.value_dim) > WIDEST:
        return f"torch's flash backend has head dims up to {WIDEST}"
    return None


def error(
    spec: AttentionSpec, inputs: Mapping[str, Any], dims: Mapping[str, int], expected: Any
) -> float | None:
    """The library's error of O, relative to its RMS; `expected` is the oracle's O for the spec."""
    import torch

    if unable(spec) is not None:
        return None
    lacks: dict[str, Any] = {"softcap": None, "alibi": False, "sink": False, "sink_tokens": None}
    plain = spec.model_copy(update={**lacks, "branch": None})
    if any(getattr(spec, name) != value for name, value in lacks.items()):
        expected = oracle_device.attention(torch, plain, inputs, dims)["O"]
    try:
        found = _forward(plain, *(inputs[name] for name in "QKV"))
    except (RuntimeError, TypeError, AttributeError):
        return None  # this torch cannot run it: the verdict then has no ratio
    return relative_rms(found, expected)


def relative_rms(found: Any, expected: Any) -> float | None:
    """The RMS of the error over the RMS of the expected output; None if that is undefined."""
    whole = float((expected**2).mean().sqrt())
    part = float(((found.double() - expected) ** 2).mean().sqrt())
    return part / whole if whole > 0 and part < float("inf") else None


def _forward(spec: AttentionSpec, q: Any, k: Any, v: Any) -> Any:
    """O of the flash operator as (batch, heads, length, dim)."""
    import torch

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
