"""Conditions for Mask: the ragged end of the keys, causal masks, windows and random ones."""

from __future__ import annotations

from dataclasses import dataclass

from flashwright.fuzz.draft import Draft
from flashwright.fuzz.plan import ProgramPlan


@dataclass(frozen=True)
class MaskConditions:
    """The mask conditions of a program, and the loop bounds that they need."""

    conditions: tuple[str, ...]
    low: str
    high: str


def choose_masks(draft: Draft, plan: ProgramPlan) -> MaskConditions:
    """Draw conditions on q_idx and the key's position, and the bounds of the loop."""
    c = draft.c
    key = "kv_idx"
    if plan.paged:
        key = "(kv_idx + {block} * BN)"
    kind = c.weighted([("full", 30), ("causal", 30), ("window", 14), ("prefix", 6), ("odd", 20)])
    draft.tag(f"mask:{kind}")
    shift = c.weighted([("kv_len - q_len", 60), ("Shift", 25), ("kv_len - q_len + 3", 15)])
    if shift == "Shift":
        draft.lets.append("let Shift = kv_len - q_len")
    more = 3 if "3" in shift else 0
    tail = f"{key} < kv_len"
    low, high = "0", _full(draft)
    found = [tail]
    causal = c.pick([f"{key} <= q_idx + {shift}", f"q_idx + {shift} >= {key}"])
    if c.chance(0.2):
        causal = f"not {key} > q_idx + {shift}" if c.chance(0.5) else f"{key} - q_idx <= {shift}"
    reach = f"(block_idx + 1) * BM + {shift}"
    if kind in ("causal", "window"):
        found.append(causal)
        if more == 0 and c.chance(0.3):
            found.remove(tail)  # the condition implies it
            draft.tag("mask:no tail")
        if c.chance(0.6):
            high = _short(draft, f"min(kv_len, {reach})")
    if kind == "window":
        draft.params["Window"] = str(c.pick([plan.sizes.bn, 20, plan.sizes.bn + 7, 5, 96]))
        found.append(f"{key} > q_idx + {shift} - Window")
        if c.chance(0.5):
            low = f"floor(max(0, block_idx * BM + {shift} - Window + 1) / BN)"
            draft.tag("low:window")
    if kind == "prefix":
        draft.params["Prefix"] = str(c.pick([9, plan.sizes.bn, plan.sizes.bn + 3, 70]))
        found.append(f"({key} < Prefix or {causal})")
    if kind == "odd":
        found.append(_odd(draft, key, shift))
    if plan.lengths:
        found.append(f"{key} < Length")
        if kind in ("full", "odd", "prefix") and c.chance(0.6):
            high = c.pick(["Length / BN", "ceil(Length / BN)", "min(kv_len, Length) / BN"])
            draft.tag("high:length")
    if not plan.paged and draft.chance(0.07, "mask:documents"):
        limit = f"{key} >= 4 * DocQ - 9"  # another one in each row
        forms = ["DocQ == DocK", f"{limit} and DocQ <= DocK + 1", f"({limit} or DocQ == DocK)"]
        found.append(c.weighted(list(zip(forms, (50, 35, 15), strict=True))))
        plan.extras.append("documents")
    if c.chance(0.08):
        found.append(_odd(draft, key, shift))
    return MaskConditions(tuple(c.shuffled(found)), low, high)


def _full(draft: Draft) -> str:
    """The end of a loop over all keys, in one of several spellings."""
    return draft.c.pick(
        [
            *("kv_len / BN", "ceil(kv_len / BN)", "floor((kv_len + BN - 1) / BN)"),
            *("min(kv_len, kv_len + 0) / BN", "max(1, kv_len) / BN", "kv_len * (1 / BN)"),
        ]
    )


def _short(draft: Draft, end: str) -> str:
    """The end of a loop that stops where the mask hides the rest."""
    draft.tag("high:short")
    return draft.c.pick([f"{end} / BN", f"ceil({end} / BN)", f"max(0, ceil({end} / BN))"])


def _odd(draft: Draft, key: str, shift: str) -> str:
    """An unusual condition, to cover every part of the mask expressions."""
    options = [
        ("modulo", f"({key} + q_idx) % 3 != 0"),
        ("modulo", f"{key} % 5 < 3"),
        ("modulo", f"(q_idx - {key}) % 4 != 1"),
        ("floor", f"floor(q_idx / 16) >= floor({key} / 16) - 2"),
        ("floor", f"floor({key} / 7) % 2 == floor(q_idx / 7) % 2"),
        ("abs", f"abs(q_idx + {shift} - {key}) < 40"),
        ("or", f"({key} < 8 or {key} >= 24 or q_idx % 2 == 0)"),
        ("not", f"not ({key} >= 10 and {key} < 20)"),
        ("scaled", f"2 * {key} <= 3 * q_idx + 9"),
        ("fraction", f"{key} / 2 <= q_idx + {shift} + 1 / 2"),
        ("where", f"{key} < where(q_idx < 20, 30, kv_len)"),
        ("min", f"{key} < min(kv_len, 2 * q_idx + 5)"),
        ("max", f"max({key}, q_idx) < kv_len + 3"),
        ("row", "q_idx % 3 != 1"),
        ("head", f"{key} >= head_idx * 3"),
        ("equal", f"{key} != q_idx + {shift}"),
        ("block", f"{key} >= block_idx * 8"),
        ("negative", f"-{key} > -kv_len + 2"),
    ]
    name, text = draft.c.pick(options)
    draft.tag(f"odd:{name}")
    return text


def write_masks(
    draft: Draft, plan: ProgramPlan, masks: MaskConditions, tile: str, block: str
) -> None:
    """Mask statements for a tile: one with all conditions, or several."""
    c = draft.c
    conditions = [text.replace("{block}", block) for text in masks.conditions]
    tail = "kv_idx < kv_len" if "kv_idx < kv_len" in conditions else None
    form = c.weighted([("one", 70), ("several", 20), ("guarded", 10)])
    shift = "kv_len - q_len"
    whole = masks.low == "0" and "block_idx" not in masks.high  # the check cannot see through a let
    if tail and whole and any(shift in t for t in conditions) and draft.chance(0.3, "let in mask"):
        name = f"edge{len(draft.lines)}"
        draft.line(f"let {name} = {shift}")
        conditions = [text.replace(shift, name) for text in conditions]
    if form == "guarded" and tail is not None and len(conditions) > 1:
        draft.tag("mask:guarded")
        with draft.block(f"if ({block} + 1) * BN > kv_len"):
            draft.line(f"Compute Mask {tile} where {tail}")
        conditions.remove(tail)
    if form == "several":
        draft.tag("mask:several")
        for text in conditions:
            draft.line(f"Compute Mask {tile} where {text}")
        return
    draft.line(f"Compute Mask {tile} where {' and '.join(conditions)}")
