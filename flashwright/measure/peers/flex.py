"""FlexAttention, compiled: the mask as a mask_mod, softcap and ALiBi as a score_mod."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flashwright.measure.peers.features import first_line, is_memory, need
from flashwright.sandbox.candidate import Unable
from flashwright.spec import AttentionSpec

MOST_SHAPES = 256
"""Limit of compiled versions of one function. Torch's default is 8; beyond it, it runs eager."""


def flex_attention(spec: AttentionSpec) -> Callable[..., Any]:
    """Compiled for each shape: with symbolic lengths the kernel would be slower."""
    known = ("windows", "sink tokens", "softcap", "ALiBi", "compressed keys")
    need(spec, *known, "V of another width than K")
    try:
        from torch.nn.attention import flex_attention as flex
    except ImportError:
        raise Unable("this version of torch does not have it") from None
    return _Flex(spec, flex)


class _Flex:
    def __init__(self, spec: AttentionSpec, flex: Any) -> None:
        import torch

        self.spec, self.flex, self.torch = spec, flex, torch
        dynamo = torch._dynamo.config
        for name in ("recompile_limit", "cache_size_limit"):  # the new name and the old one
            if hasattr(dynamo, name):
                setattr(dynamo, name, MOST_SHAPES)
        # A single kernel gains nothing from parallel compilation, whose processes take memory.
        torch._inductor.config.compile_threads = 1
        self.compiled = torch.compile(flex.flex_attention, dynamic=False, fullgraph=True)
        self.ready: dict[tuple[int, ...], dict[str, Any]] = {}

    def __call__(self, q: Any, k: Any, v: Any, slopes: Any = None) -> Any:
        key = (*q.shape, *k.shape)
        if key in self.ready:
            return self.compiled(q, k, v, **self.ready[key])
        settings = {
            "score_mod": self._score(q, k, slopes),
            "block_mask": self._mask(q, k),
            "scale": self.spec.softmax_scale,
            "enable_gqa": self.spec.kv_heads != self.spec.heads,
        }
        try:
            found = self.compiled(q, k, v, **settings)
            self.torch.cuda.synchronize()
        except Exception as error:  # the compiler raises dozens of types
            if is_memory(error):
                raise
            raise Unable(f"it does not compile: {first_line(error)}") from None
        self.ready[key] = settings
        return found

    def _mask(self, q: Any, k: Any) -> Any:
        spec, offset = self.spec, self._offset(q, k)
        if not spec.causal and spec.window is None:
            return None

        def seen(b: Any, h: Any, i: Any, j: Any) -> Any:
            p = i + offset
            if spec.branch == "compressed":
                return j * spec.stride + spec.block - 1 <= p
            if spec.window is None:
                return j <= p
            near = p - j < spec.window
            if not spec.causal:
                near = near & (j - p < spec.window)
            if spec.sink_tokens is not None:
                near = near | (j < spec.sink_tokens)
            return (j <= p) & near if spec.causal else near

        sizes = (None, None, q.shape[2], k.shape[2])
        return self.flex.create_block_mask(seen, *sizes, device=q.device)

    def _score(self, q: Any, k: Any, slopes: Any) -> Any:
        cap, offset, tanh = self.spec.softcap, self._offset(q, k), self.torch.tanh
        if cap is None and not self.spec.alibi:
            return None

        def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            if cap is not None:
                s = cap * tanh(s / cap)
            return s + slopes[h] * (j - i - offset) if slopes is not None else s

        return score

    def _offset(self, q: Any, k: Any) -> int:
        """The key position of query 0: the last query is the last token."""
        return 0 if self.spec.branch == "compressed" else int(k.shape[2] - q.shape[2])
