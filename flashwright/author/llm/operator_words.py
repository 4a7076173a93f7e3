"""What an operator computes, told to a model: tensors, formulas, which keys a query sees.

The words come from the spec alone, as the judge's reference does, so that model and judge are told
the same. What a user wrote (a description, a function) stands beside them as data, between marks.
"""

from __future__ import annotations

import re
import unicodedata

from flashwright.spec import AttentionSpec

OPEN, CLOSE = "<<<USER_TEXT", "USER_TEXT>>>"
LONGEST = 16_000
"""Characters of a user's text that are passed on."""


def tensors(spec: AttentionSpec) -> str:
    """The inputs and outputs, one line each."""
    lines = [f"- {name} ({shape}) {dtype}: {what}" for name, shape, dtype, what in _tensors(spec)]
    return "\n".join(lines)


def _tensors(spec: AttentionSpec) -> list[tuple[str, str, str, str]]:
    given, d, dv = spec.input_dtype, spec.head_dim, spec.value_dim
    found: list[tuple[str, str, str, str]] = [
        ("Q", f"batch, heads, q_len, {d}", given, "input, queries"),
        ("K", f"batch, kv_heads, kv_len, {d}", given, "input, keys"),
        ("V", f"batch, kv_heads, kv_len, {dv}", given, "input, values"),
    ]
    if spec.alibi:
        found.append(("Slopes", "heads", "fp32", "input, one slope for each query head"))
    if spec.sink:
        found.append(("Sink", "heads", "fp32", "input, one logit for each query head"))
    if spec.branch == "selected":
        shape = f"batch, kv_heads, q_len, {spec.top_k}"
        what = "input, numbers of the blocks of keys that a query reads; -1: none"
        found.append(("Idx", shape, "int32", what))
    found.append(("O", f"batch, heads, q_len, {dv}", spec.output_dtype, "output"))
    if spec.lse:
        found.append(("LSE", "batch, heads, q_len", "fp32", "output, natural log-sum-exp of a row"))
    return found


def formulas(spec: AttentionSpec) -> str:
    """From the inputs to the outputs, for one row of one head."""
    lines = [
        f"p = {_position(spec)}   (the position of query q_idx: the last query is the last token)",
        f"s[k] = {spec.softmax_scale:.10g} * dot(Q[q_idx], K[k])   ({_scale(spec)})",
    ]
    if spec.softcap is not None:
        lines.append(f"s[k] = {spec.softcap:g} * tanh(s[k] / {spec.softcap:g})")
    if spec.alibi:
        lines.append("s[k] = s[k] + Slopes[head] * (k - p)")
    lines.append(f"s[k] = -inf unless {visible(spec)}")
    total = "sum over k of exp(s[k])"
    lines.append(f"Z = {total} + exp(Sink[head])" if spec.sink else f"Z = {total}")
    lines.append("O[q_idx] = (sum over k of exp(s[k]) * V[k]) / Z")
    if spec.lse:
        lines.append("LSE[q_idx] = log(Z)")
    return "\n".join(lines)


def inputs(spec: AttentionSpec) -> list[str]:
    """The names of the tensors that are read."""
    return [name for name, _, _, what in _tensors(spec) if what.startswith("input")]


def notes(spec: AttentionSpec, *, custom: bool = False) -> str:
    """What the formulas leave open, one line each; `custom`: what holds of any operator."""
    lines = [
        "batch, q_len and kv_len are any numbers, known only when the kernel is called: the last "
        "tile of queries or keys is mostly not full, and q_len and kv_len may differ either way. "
        "Keys past kv_len must have no weight; queries past q_len are not stored.",
        _heads(spec),
    ]
    if custom:
        return "\n".join(f"- {line}" for line in lines)
    lines += [
        "Sums and the softmax are kept in fp32. exp is taken relative to the row's greatest score "
        "so far; nothing may overflow.",
    ]
    if not spec.repeatable:
        lines.append("Two calls may differ in the last bits: atomic additions may be used.")
    if not spec.sink:
        lines.append(
            "A row that sees no key gives O = 0" + (" and LSE = -inf." if spec.lse else ".")
        )
    if spec.dtype == "fp8":
        lines.append(
            "Q, K and V are e4m3. Weights below 2^-9 vanish in e4m3: multiply the weights by 256 "
            "after the softmax (not Ssum), and O by 1/256 at the end."
        )
    return "\n".join(f"- {line}" for line in lines)


def visible(spec: AttentionSpec) -> str:
    """The condition under which key k counts."""
    if spec.branch == "compressed":
        seen = ["k < kv_len"]
        if spec.causal:
            seen.append(f"{spec.stride} * k + {spec.block} - 1 <= p")
        return " and ".join(seen)
    seen = ["k < kv_len"]
    if spec.causal:
        seen.append("k <= p")
    if spec.window is not None:
        near = f"p - k < {spec.window}" if spec.causal else f"|p - k| < {spec.window}"
        first = getattr(spec, "sink_tokens", None)
        seen.append(f"({near} or k < {first})" if first else near)
    if spec.branch == "selected":
        seen.append(f"floor(k / {spec.selected_block}) is one of Idx[batch, kv_head, q_idx]")
    return " and ".join(seen)


def _position(spec: AttentionSpec) -> str:
    if spec.branch == "compressed":
        return (
            "q_idx + tokens - q_len, where `dim tokens` is the length in tokens; key k stands "
            + (f"for the tokens from {spec.stride} * k on, {spec.block} of them")
        )
    return "q_idx + kv_len - q_len"


def _scale(spec: AttentionSpec) -> str:
    return f"1 / sqrt({spec.head_dim})" if spec.scale is None else "the scale asked for"


def _heads(spec: AttentionSpec) -> str:
    if spec.kv_heads == spec.heads:
        return "Every query head has a K and a V head of its own: kv_heads = heads."
    return (
        "Query heads share K and V heads in equal groups: query head h reads K and V head "
        f"floor(h * kv_heads / heads). Typically heads = {spec.heads}, kv_heads = {spec.kv_heads}; "
        "both are known only when the kernel is called."
    )


def quoted(text: str) -> str:
    """A user's text between marks that it cannot itself contain, as data for the model."""
    clean = "".join(c for c in text if c in "\n\t" or unicodedata.category(c) not in _HIDDEN)
    before = None
    while before != clean:  # what is left of a mark may be a mark again
        before = clean
        clean = re.sub(r"<{3,}|>{3,}|USER_TEXT", "", clean, flags=re.IGNORECASE)
    cut = "" if len(clean) <= LONGEST else f"\n(cut after {LONGEST} characters)"
    return f"{OPEN}\n{clean[:LONGEST].strip()}{cut}\n{CLOSE}"


_HIDDEN = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
