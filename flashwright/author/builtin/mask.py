"""The mask of a spec as TL: its condition and the range of blocks to visit.

A key counts if the condition holds. The bounds only skip blocks that are hidden from a whole tile
of queries.

With sink tokens the visible keys have a gap: the first blocks, then those of the window. One loop
visits both. It begins as many iterations before the window as the sinks have blocks, and those
iterations take the sinks' blocks instead.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashwright.spec import AttentionSpec

POSITION = "q_idx + kv_len - q_len"
FIRST_ROW = "block_idx * BM + kv_len - q_len"
START = "Start"
PLACE = f"where(i < {START} + SinkBlocks, i - {START}, i)"
LAST_ROW = "(block_idx + 1) * BM + kv_len - q_len"  # one past the last row's position
FROM_ROW = f"floor(max(0, {FIRST_ROW} - Window + 1) / BN)"
UNTIL_ROW = f"min(kv_len, {LAST_ROW}) / BN"


@dataclass(frozen=True)
class MaskText:
    """A mask in TL: condition, first and last block, and a description."""

    condition: str
    low: str
    high: str
    words: str
    start: str = ""
    """The value of START if the loop begins with the sinks' blocks."""
    place: str = ""
    """The block of an iteration, if it is not the loop variable."""


def mask_text(spec: AttentionSpec) -> MaskText:
    """The mask of a spec."""
    if spec.branch == "compressed":
        return _compressed(spec)
    if spec.window is None and spec.causal:
        words = "causal: a query sees the keys up to its own position"
        return MaskText(f"kv_idx <= {POSITION}", "0", UNTIL_ROW, words)
    if spec.window is None:
        return MaskText("kv_idx < kv_len", "0", "kv_len / BN", "full: every query sees every key")
    return _with_sinks(spec) if spec.sink_tokens else _window(spec, spec.window)


def _window(spec: AttentionSpec, window: int) -> MaskText:
    if spec.causal:
        condition = f"kv_idx <= {POSITION} and kv_idx > {POSITION} - Window"
        words = f"a query sees its own position and the {window - 1} before it"
        return MaskText(condition, FROM_ROW, UNTIL_ROW, words)
    condition = f"kv_idx < kv_len and abs({POSITION} - kv_idx) < Window"
    high = f"min(kv_len, {LAST_ROW} + Window - 1) / BN"
    words = f"a query sees the positions nearer than {window}"
    return MaskText(condition, FROM_ROW, high, words)


def _with_sinks(spec: AttentionSpec) -> MaskText:
    """A window, and the first keys. Without `causal` they are seen even where no window is."""
    assert spec.window is not None
    assert spec.sink_tokens is not None
    plain, sinks = _window(spec, spec.window), spec.sink_tokens
    first = "the first key" if sinks == 1 else f"the first {sinks} keys"
    words = f"{plain.words}, and {first}; no block between the two is visited"
    start = f"max(0, {FROM_ROW} - SinkBlocks)"
    if spec.causal:
        seen = f"kv_idx > {POSITION} - Window or kv_idx < SinkTokens"
        condition, high = f"kv_idx <= {POSITION} and ({seen})", UNTIL_ROW
    else:
        seen = f"abs({POSITION} - kv_idx) < Window or kv_idx < SinkTokens"
        condition = f"kv_idx < kv_len and ({seen})"
        high = f"min(kv_len, max(SinkTokens, {LAST_ROW} + Window - 1)) / BN"
    return MaskText(condition, START, high, words, start, PLACE)


def _compressed(spec: AttentionSpec) -> MaskText:
    """A compressed key stands for Block tokens from kv_idx * Stride on; the last must be past."""
    if not spec.causal:
        return MaskText("kv_idx < kv_len", "0", "kv_len / BN", "full: every block is seen")
    condition = "kv_idx < kv_len and kv_idx * Stride + Block <= q_idx + tokens - q_len + 1"
    reach = "((block_idx + 1) * BM + tokens - q_len - Block) / Stride + 1"
    words = "a query sees the compressed blocks that end at or before its position"
    return MaskText(condition, "0", f"min(kv_len, {reach}) / BN", words)
