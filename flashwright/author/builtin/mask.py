"""Which keys a query sees, as TL: the mask's condition and the blocks worth visiting.

The condition must hold for a key to count. The bounds only say where it can hold at all, so that
blocks hidden from a whole tile of queries are not visited.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashwright.spec import AttentionSpec

POSITION = "q_idx + kv_len - q_len"
FIRST_ROW = "block_idx * BM + kv_len - q_len"
LAST_ROW = "(block_idx + 1) * BM + kv_len - q_len"  # one past the last row's position


@dataclass(frozen=True)
class MaskText:
    """A mask in TL: condition, first and last block, and what it is in words."""

    condition: str
    low: str
    high: str
    words: str


def mask_text(spec: AttentionSpec) -> MaskText:
    """The mask of a spec."""
    if spec.branch == "compressed":
        return _compressed(spec)
    every = "kv_len / BN"
    until_row = f"min(kv_len, {LAST_ROW}) / BN"
    if spec.window is None and spec.causal:
        words = "causal: a query sees the keys up to its own position"
        return MaskText(f"kv_idx <= {POSITION}", "0", until_row, words)
    if spec.window is None:
        return MaskText("kv_idx < kv_len", "0", every, "full: every query sees every key")
    from_row = f"floor(max(0, {FIRST_ROW} - Window + 1) / BN)"
    if spec.causal:
        condition = f"kv_idx <= {POSITION} and kv_idx > {POSITION} - Window"
        words = f"a query sees its own position and the {spec.window - 1} before it"
        return MaskText(condition, from_row, until_row, words)
    condition = f"kv_idx < kv_len and abs({POSITION} - kv_idx) < Window"
    high = f"min(kv_len, {LAST_ROW} + Window - 1) / BN"
    words = f"a query sees the positions nearer than {spec.window}"
    return MaskText(condition, from_row, high, words)


def _compressed(spec: AttentionSpec) -> MaskText:
    """A compressed key stands for Block tokens from kv_idx * Stride on; the last must be past."""
    if not spec.causal:
        return MaskText("kv_idx < kv_len", "0", "kv_len / BN", "full: every block is seen")
    condition = "kv_idx < kv_len and kv_idx * Stride + Block <= q_idx + tokens - q_len + 1"
    reach = "((block_idx + 1) * BM + tokens - q_len - Block) / Stride + 1"
    words = "a query sees the compressed blocks that end at or before its position"
    return MaskText(condition, "0", f"min(kv_len, {reach}) / BN", words)
