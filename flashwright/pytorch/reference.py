"""Attention as a spec defines it, in plain PyTorch and fp32: an operator's result on CPU tensors.

It holds all scores of a problem at once, so it is for tests and small models. judge/oracle.py has
the same definition in fp64; a test compares them.
"""

from __future__ import annotations

from typing import Any

import torch

from flashwright.lower.launch_plan import LaunchPlan
from flashwright.spec import AttentionSpec

_COMPUTED = {
    *("variant", "heads", "kv_heads", "head_dim", "v_dim", "dtype", "lse"),
    *("causal", "window", "sink_tokens", "softcap", "alibi", "sink", "scale"),
    *("branch", "block", "stride", "selected_block", "top_k"),
    *("tolerance", "repeatable"),
}
"""The settings that `attention` takes into account, or may ignore."""


def obstacle(spec: AttentionSpec | None, plan: LaunchPlan) -> str:
    """Why a package's result cannot be computed here; empty if it can."""
    if spec is None:
        return "the package has no spec.toml"
    if spec.reference is not None:
        return f"its result is defined by {spec.reference}, not by the spec"
    if spec.branch in ("compressed", "selected"):
        return f"NSA's branch '{spec.branch}' is not written in PyTorch yet"
    for name, field in type(spec).model_fields.items():
        usual = field.get_default(call_default_factory=True)
        if name not in _COMPUTED and getattr(spec, name) != usual:
            return f"the spec's `{name}` is not written in PyTorch yet"
    wanted = ["Q", "K", "V", *["Slopes"] * spec.alibi, *["Sink"] * spec.sink]
    found = [t.name for t in plan.tensors if t.read]
    if sorted(found) != sorted(wanted):
        return f"the kernel reads {', '.join(found)}, the spec has {', '.join(wanted)}"
    others = [t.name for t in plan.tensors if t.written and t.name not in ("O", "LSE")]
    return f"the spec does not define the output {others[0]}" if others else ""


def attention(
    spec: AttentionSpec,
    q: Any,
    k: Any,
    v: Any,
    slopes: Any = None,
    sink: Any = None,
    mask: Any = None,
) -> tuple[Any, Any]:
    """O and LSE in fp32, or in fp64 for fp64 inputs; 0 and -inf in rows that see no key. `mask`
    says which keys each query may see besides, (q_len, kv_len).

    Every step is differentiable, also in rows that see no key.
    """
    kind = torch.float64 if q.dtype == torch.float64 else torch.float32
    heads = torch.arange(q.shape[1], device=q.device)
    group = heads * k.shape[1] // q.shape[1]  # the KV head of each query head
    k, v = (x.to(kind).index_select(1, group) for x in (k, v))
    scores = q.to(kind) @ k.mT * spec.softmax_scale
    distance = _distance(q.shape[2], k.shape[2], q.device)
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    if spec.alibi:
        scores = scores + slopes.to(kind)[:, None, None] * distance
    seen = _seen(spec, distance) if mask is None else _seen(spec, distance) & mask
    weights, lse = softmax(torch.where(seen, scores, -torch.inf), sink)
    return weights @ v, lse


def _distance(q_len: Any, kv_len: Any, device: Any) -> Any:
    """Key minus position (q_len, kv_len): the last query stands at the last key."""
    position = torch.arange(q_len, device=device) + (kv_len - q_len)
    return torch.arange(kv_len, device=device) - position[:, None]


def _seen(spec: AttentionSpec, distance: Any) -> Any:
    seen = distance <= 0 if spec.causal else torch.ones_like(distance, dtype=torch.bool)
    if spec.window is not None:
        near = distance.abs() < spec.window
        if spec.sink_tokens is not None:
            keys = torch.arange(distance.shape[1], device=distance.device)
            near = near | (keys < spec.sink_tokens)
        seen = seen & near
    return seen


def softmax(scores: Any, sink: Any = None) -> tuple[Any, Any]:
    """The weights and the log-sum-exp of each row; 0 and -inf in a row of -inf. `sink` has a logit
    for each head, which joins the sum.

    torch.softmax and torch.logsumexp have NaN there, in the value or in the gradient.
    """
    # One more column, the sink's logit: without a sink it is -inf and changes nothing.
    last = scores.new_full((1,), -torch.inf) if sink is None else sink.to(scores.dtype)
    last = last[:, None, None].expand(*scores.shape[:-1], 1)
    scores = torch.cat([scores, last], -1)
    top = scores.detach().amax(-1, keepdim=True)
    top = torch.where(top == -torch.inf, 0.0, top)
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True)
    some = total != 0
    total = torch.where(some, total, 1.0)
    lse = torch.where(some, top + torch.log(total), -torch.inf)
    return (weights / total)[..., :-1], lse.squeeze(-1)
