"""Peers for NSA as a whole, and for its selected branch.

A function of NSA as a whole gets Q, K and V, then the gates of the compressed branch, the selected
one and the window, (batch, length, heads). It returns O and the blocks that it chose, (batch, kv
heads, length, blocks), or a function that finds them again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flashwright.judge.nsa import branch_of
from flashwright.measure.peers.features import package
from flashwright.measure.peers.flex import flex_attention
from flashwright.sandbox.candidate import Unable
from flashwright.spec import AttentionSpec


def flash_linear_attention(spec: AttentionSpec) -> Callable[..., Any]:
    """parallel_nsa of the library fla. It leaves the window to flash-attn, and FlexAttention
    computes it here."""
    if spec.branch not in ("all", "selected"):
        raise Unable("it is measured on NSA as a whole and on the selected branch")
    if spec.group < 16 or spec.group & (spec.group - 1):
        raise Unable("its groups have 16 heads, or 32, 64 and so on")
    package("fla")
    library = package("fla.ops.nsa.parallel")
    return _Fla(spec, library) if spec.branch == "all" else _selected(spec, library)


def _rows_first(*tensors: Any) -> list[Any]:
    """Tensors with heads and tokens exchanged."""
    return [x.transpose(1, 2) for x in tensors]


def _selected(spec: AttentionSpec, library: Any) -> Callable[..., Any]:
    sizes = {"block_counts": spec.top_k, "block_size": spec.selected_block}

    def attention(q: Any, k: Any, v: Any, idx: Any) -> Any:
        q, k, v, idx = _rows_first(q, k, v, idx)
        out = library.parallel_nsa(q, k, v, block_indices=idx, scale=spec.softmax_scale, **sizes)
        return out.transpose(1, 2)

    return attention


class _Fla:
    def __init__(self, spec: AttentionSpec, library: Any) -> None:
        self.spec, self.library = spec, library
        self.latest = flex_attention(branch_of(spec, "window"))
        self.sizes = {
            "block_counts": spec.top_k,
            "block_size": spec.selected_block,
            "scale": spec.softmax_scale,
        }

    def __call__(self, q: Any, k: Any, v: Any, *gates: Any) -> Any:
        import torch

        compress, select, window = (gate.to(q.dtype) for gate in gates)
        given = _rows_first(q, k, v)
        out = self.library.parallel_nsa(*given, g_cmp=compress, g_slc=select, **self.sizes)
        latest = self.latest(q, k, v).transpose(1, 2)
        out = torch.addcmul(out, latest, window[..., None])
        return out.transpose(1, 2), lambda: self._blocks(*given)

    def _blocks(self, q: Any, k: Any, v: Any) -> Any:
        """The blocks that parallel_nsa chose and does not return, found again by its own steps."""
        size, keys = {"block_size": self.spec.block, "scale": self.spec.softmax_scale}, k.shape[1]
        q, k, v = (x.contiguous() for x in (q, k, v))
        k, v = (self.library.mean_pooling(x, self.spec.block, None) for x in (k, v))
        _, lse = self.library.parallel_nsa_compression(q=q, k=k, v=v, TK=keys, **size)
        choose = self.library.parallel_nsa_topk
        found = choose(q=q, k=k, lse=lse, TK=keys, block_counts=self.spec.top_k, **size)
        return found.transpose(1, 2)
