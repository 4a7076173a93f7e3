"""The exact work of a problem (operations and bytes), and its roofline."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashwright.spec import AttentionSpec

_BYTES = {"fp16": 2, "bf16": 2, "e4m3": 1, "int8": 1}


@dataclass(frozen=True)
class Work:
    """The work of one call, over the whole batch and all heads."""

    pairs: int
    """Visible (query, key) pairs; masked ones need not be computed."""
    flops: float
    read: int
    """Bytes of Q, K and V that at least one query needs."""
    written: int
    """Bytes of O."""

    @property
    def bytes(self) -> int:
        """Bytes of Q, K, V and O."""
        return self.read + self.written

    @property
    def intensity(self) -> float:
        """Arithmetic intensity: operations per byte."""
        return self.flops / self.bytes if self.bytes else 0.0


def sum_of(parts: Iterable[Work]) -> Work:
    """The work of several calls together."""
    found = list(parts)
    return Work(
        sum(one.pairs for one in found),
        sum(one.flops for one in found),
        sum(one.read for one in found),
        sum(one.written for one in found),
    )


@dataclass(frozen=True)
class Ceiling:
    """The upper limits of a GPU: compute rate and memory bandwidth."""

    flops: float
    """Dense operations per second in the dtype of the inputs."""
    bandwidth: float
    """Bytes per second."""
    l2_bytes: int = 0
    source: str = ""
    """The source of the limits, for messages."""

    def least_seconds(self, work: Work) -> float:
        """The shortest possible time (roofline). Output may stay in the L2 at the end of a call."""
        moved = work.read + max(0, work.written - self.l2_bytes)
        return max(work.flops / self.flops, moved / self.bandwidth)


def bound_by_memory(work: Work, tflops: float | None, gbs: float | None) -> bool:
    """Whether the work is memory-bound by two measured rates; False if one is unknown."""
    return tflops is not None and gbs is not None and work.intensity < tflops * 1e3 / gbs


def work_of(
    spec: AttentionSpec, batch: int, q_len: int, kv_len: int, idx: NDArray[Any] | None = None
) -> Work:
    """The work of one call. `idx` (batch, kv_heads, q_len, top_k) are the selected blocks.

    Without `idx`, a selected branch counts top_k full blocks, limited by the causal mask.
    """
    if spec.branch == "all":
        pairs = _all(spec, batch, q_len)
    elif spec.branch == "selected":
        pairs = _selected(spec, batch, q_len, kv_len, idx)
    else:
        rows = _visible(spec, q_len, kv_len)
        pairs = int(rows.sum()) * batch * spec.heads
    size = _BYTES[spec.input_dtype]
    queries = batch * spec.heads * q_len
    columns = spec.head_dim + (0 if spec.latent else spec.value_dim)
    keys = batch * spec.kv_heads * kv_len * columns
    keys *= _BYTES[spec.key_dtype]
    return Work(
        pairs,
        2.0 * pairs * (spec.head_dim + spec.value_dim),
        # The selection decides which keys are read: they are not counted.
        queries * spec.head_dim * size + (0 if spec.branch == "selected" else keys),
        queries * spec.value_dim * _BYTES[spec.output_dtype],
    )


def _visible(spec: AttentionSpec, q_len: int, kv_len: int) -> NDArray[np.int64]:
    """The number of visible keys of each row."""
    row = np.arange(q_len, dtype=np.int64)
    if spec.branch == "compressed":
        seen = (row - spec.block + 1) // spec.stride + 1 if spec.causal else row * 0 + kv_len
        return np.clip(seen, 0, kv_len)
    p = row + (kv_len - q_len)
    end = p + 1 if spec.causal else np.full_like(p, kv_len)
    begin = np.zeros_like(p)
    sinks = np.clip(end, 0, min(spec.sink_tokens or 0, kv_len))
    if spec.window is not None:
        begin, end = p - spec.window + 1, np.minimum(end, p + spec.window)
    found: NDArray[np.int64] = np.clip(end, 0, kv_len) - np.clip(
        np.maximum(begin, sinks), 0, kv_len
    )
    return sinks + np.maximum(found, 0)


def _selected(
    spec: AttentionSpec, batch: int, q_len: int, kv_len: int, idx: NDArray[Any] | None
) -> int:
    p = np.arange(q_len, dtype=np.int64) + (kv_len - q_len)
    if idx is None:
        whole = np.minimum(np.clip(p + 1, 0, kv_len), spec.top_k * spec.selected_block)
        return int(whole.sum()) * batch * spec.heads
    begin = idx.astype(np.int64) * spec.selected_block
    end = np.minimum(np.minimum(begin + spec.selected_block, kv_len), p[:, None] + 1)
    seen = np.where(idx >= 0, np.maximum(end - begin, 0), 0)
    return int(seen.sum()) * spec.group


def _all(spec: AttentionSpec, batch: int, tokens: int) -> int:
    """The pairs of NSA's three branches. Whichever blocks are chosen, the last one is cut off."""
    p = np.arange(tokens, dtype=np.int64)
    block = spec.selected_block
    of_means = (p + 1) // spec.block
    chosen = np.minimum(p // block, spec.top_k - 1) * block + p % block + 1
    near = np.minimum(p + 1, spec.window or 0)
    return int((of_means + chosen + near).sum()) * batch * spec.heads
