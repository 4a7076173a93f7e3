"""Eager PyTorch attention: two matmuls and a softmax, with all scores in memory.

The matmuls run in the type of the inputs and the softmax in fp32, as in eager code of models. If
the scores do not fit in memory, it computes some heads at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from flashwright.judge import nsa
from flashwright.measure.peers.features import features
from flashwright.sandbox.candidate import Unable
from flashwright.spec import AttentionSpec

SCORES = 1 << 29
"""Scores in memory at a time: 1 GB in 16 bit, plus three such tensors in fp32."""


def naive_torch(spec: AttentionSpec) -> Callable[..., Any]:
    """Supports every spec without a reference; computes fp8 in bf16."""
    if "a reference of its own" in features(spec):
        raise Unable("it does not support a spec with a reference of its own")
    return _NaiveNsa(spec) if spec.branch == "all" else _Naive(spec)


class _NaiveNsa:
    """NSA as a whole: its branches one by one, with all scores in memory (nsa.py)."""

    def __init__(self, spec: AttentionSpec) -> None:
        import torch

        self.spec, self.torch = spec, torch
        self.branches = {name: _Naive(nsa.branch_of(spec, name)) for name in nsa.GATES}

    def __call__(self, q: Any, k: Any, v: Any, *gates: Any) -> Any:
        pooled = [nsa.means(x, self.spec.block) for x in (k, v)]
        idx = self._blocks(q, pooled[0])
        given = {"compressed": pooled, "selected": (k, v, idx), "window": (k, v)}
        out = self.torch.zeros_like(q)
        for (name, tensors), gate in zip(given.items(), gates, strict=True):
            out += self.branches[name](q, *tensors) * gate.mT[..., None].to(q.dtype)
        return out, idx

    def _blocks(self, q: Any, means: Any) -> Any:
        """The blocks of each query: the first, its own and the one before, then the heaviest."""
        torch, spec, count = self.torch, self.spec, -(-q.shape[2] // self.spec.block)
        place = torch.arange(q.shape[2], device=q.device)[:, None]
        number, own = torch.arange(count, device=q.device), place // spec.block
        scores = (q.unflatten(1, (spec.kv_heads, -1)) @ means[:, :, None].mT) * spec.softmax_scale
        scores = scores.masked_fill(
            number[: means.shape[2]] >= (place + 1) // spec.block, -torch.inf
        )
        heavy = torch.softmax(scores, dim=-1, dtype=torch.float32).nan_to_num().sum(2)
        heavy = torch.nn.functional.pad(heavy, (0, count - means.shape[2]))
        always = (number == 0) | (number == own) | (number == own - 1)
        heavy = heavy.masked_fill(always, torch.inf).masked_fill(number > own, -1.0)
        best, found = heavy.topk(min(spec.top_k, count), dim=-1)
        found = torch.where(best < 0, -1, found)
        return torch.nn.functional.pad(found, (0, spec.top_k - found.shape[3]), value=-1)


class _Naive:
    def __init__(self, spec: AttentionSpec) -> None:
        import torch

        self.spec, self.torch = spec, torch
        self.masks: dict[tuple[int, int], Any] = {}

    def __call__(self, q: Any, k: Any, v: Any, *extra: Any) -> Any:
        spec = self.spec
        if spec.dtype == "fp8":
            q, k, v = (x.to(self.torch.bfloat16) for x in (q, k, v))
        rest = iter(extra)
        slopes = next(rest) if spec.alibi else None
        sink = next(rest) if spec.sink else None
        idx = next(rest) if spec.branch == "selected" else None
        (batch, heads, rows, _), keys, group = q.shape, k.shape[2], q.shape[1] // k.shape[1]
        out = q.new_empty(batch, heads, rows, v.shape[3])
        for some, kv in _parts(batch, heads, k.shape[1], rows * keys):
            mine = slice(kv.start * group, kv.stop * group)
            s = q[some, mine] @ self._shared(k[some, kv], group).transpose(-1, -2)
            s = self._biased(s * spec.softmax_scale, None if slopes is None else slopes[mine])
            seen = self._seen(q, k, None if idx is None else idx[some, kv], group)
            if seen is not None:
                s = s.masked_fill(~seen, float("-inf"))
            p = self._softmax(s, None if sink is None else sink[mine], seen)
            out[some, mine] = p.to(q.dtype) @ self._shared(v[some, kv], group)
        return out

    def _shared(self, x: Any, group: int) -> Any:
        return x.repeat_interleave(group, dim=1) if group > 1 else x

    def _biased(self, s: Any, slopes: Any) -> Any:
        cap = self.spec.softcap
        if cap is not None:
            s = cap * self.torch.tanh(s / cap)
        if slopes is not None:  # 16 bits cannot hold a distance of thousands exactly
            s = s.float() + slopes[:, None, None] * self._distance(s)
        return s

    def _distance(self, s: Any) -> Any:
        rows, keys = s.shape[-2:]
        p = self.torch.arange(rows, device=s.device)[:, None] + (keys - rows)
        return self.torch.arange(keys, device=s.device)[None, :] - p

    def _seen(self, q: Any, k: Any, idx: Any, group: int) -> Any:
        """The visible keys of each row as a mask; None if all are visible."""
        rows, keys = q.shape[2], k.shape[2]
        if (rows, keys) not in self.masks:
            self.masks = {(rows, keys): self._mask(rows, keys, q.device)}
        mask = self.masks[rows, keys]
        if idx is None:
            return mask
        count = -(-keys // self.spec.selected_block)
        table = self.torch.zeros(
            (*idx.shape[:3], count + 1), dtype=self.torch.bool, device=idx.device
        )
        table.scatter_(3, self.torch.where(idx < 0, count, idx).long(), True)
        chosen = table[..., :count].repeat_interleave(self.spec.selected_block, dim=3)
        return self._shared(chosen[..., :keys] & mask, group)

    def _mask(self, rows: int, keys: int, device: Any) -> Any:
        spec, count = self.spec, self.torch.arange(keys, device=device)[None, :]
        compressed = spec.branch == "compressed"
        p = self.torch.arange(rows, device=device)[:, None]
        if not compressed:
            p = p + (keys - rows)
        mask = None
        if spec.causal:
            last = count * spec.stride + spec.block - 1 if compressed else count
            mask = last <= p
        if spec.window is not None:
            near = ((p - count).abs() < spec.window) | (count < (spec.sink_tokens or 0))
            mask = near if mask is None else mask & near
        return mask

    def _softmax(self, s: Any, sink: Any, seen: Any) -> Any:
        if sink is not None:  # one more column, without a value
            column = sink.to(s.dtype)[:, None, None].expand(s.shape[0], -1, s.shape[2], 1)
            s = self.torch.cat([s, column], dim=-1)
        p = self.torch.softmax(s, dim=-1, dtype=self.torch.float32)
        p = p[..., :-1] if sink is not None else p
        # A row without visible keys is 0 / 0; only compressed keys have such rows.
        return p.masked_fill(~seen, 0.0) if self.spec.branch == "compressed" else p


def _parts(batch: int, heads: int, kv_heads: int, scores: int) -> Iterator[tuple[slice, slice]]:
    """Slices of the batch and of the kv heads, each with at most SCORES scores."""
    group, scores = heads // kv_heads, max(1, scores)
    many_heads = max(1, min(kv_heads, SCORES // (group * scores)))
    many = max(1, min(batch, SCORES // (heads * scores))) if many_heads == kv_heads else 1
    for b in range(0, batch, many):
        for h in range(0, kv_heads, many_heads):
            yield slice(b, min(b + many, batch)), slice(h, min(h + many_heads, kv_heads))
