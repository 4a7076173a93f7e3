"""What an operator computes, told to a model: tensors, formulas, which keys a query sees.

The words come from the spec alone, as the judge's reference does, so that model and judge are told
the same. What a user wrote (a description, a function) stands beside them as data, between marks.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass

from flashwright.spec import AttentionSpec

OPEN, CLOSE = "<<<USER_TEXT", "USER_TEXT>>>"
LONGEST = 16_000
"""Characters of a user's text that are passed on."""


Line = tuple[str, str, str, str]
"""Of a tensor: its name, its shape, its type, what it is."""


@dataclass(frozen=True)
class Given:
    """What a user's reference takes and gives, where it was called and showed it."""

    drawn: tuple[Line, ...] = ()
    """Inputs that its make_inputs draws."""
    reads: tuple[str, ...] = ()
    """The names that it asks for; empty where that is not known."""
    outputs: tuple[str, ...] | None = None
    empty_rows: bool | None = None
    """Whether queries before the first key give 0."""


def tensors(spec: AttentionSpec, given: Given | None = None) -> str:
    """The inputs and outputs, one line each."""
    found = _tensors(spec) if given is None else _given(spec, given)
    lines = [f"- {name} ({shape}) {dtype}: {what}" for name, shape, dtype, what in found]
    if given is not None:
        known = {name.lower() for name, *_ in found} | {size.lower() for size in _SIZES}
        own = [n for n in given.reads if n.lower() not in known and n not in spec.dims]
        lines += [
            f"- {n}: input, random numbers in the shape and type that you declare" for n in own
        ]
    return "\n".join(lines)


def outputs(spec: AttentionSpec, given: Given | None = None) -> list[str]:
    """The names of the tensors that are written: those that are judged."""
    if given is not None and given.outputs is not None:
        return [name for name in ("O", "LSE") if name in given.outputs]
    return ["O", "LSE"] if spec.lse else ["O"]


def _given(spec: AttentionSpec, given: Given) -> list[Line]:
    """The tensors of a reference: what it draws itself, and those of the spec that it asks for."""
    drawn = {name for name, *_ in given.drawn}
    asked = {name.lower() for name in given.reads}
    written = outputs(spec, given)
    found = []
    for line in _tensors(spec):
        name, is_input = line[0], line[3].startswith("input")
        wanted = not asked or name.lower() in asked if is_input else name in written
        if wanted and name not in drawn:
            found.append(line)
    many = sum(1 for line in found if line[3].startswith("input"))
    return [*found[:many], *given.drawn, *found[many:]]


def _tensors(spec: AttentionSpec) -> list[Line]:
    d, dv = spec.head_dim, spec.value_dim
    rows, keys, heads, last = "batch, heads, q_len", "batch, kv_heads, kv_len", "heads", ""
    if spec.batch is not None:  # with the letters of axes, which are not always the usual ones
        rows = "H: heads, L: q_tokens" if spec.packed else "B: batch, H: heads, L: q_len"
        paged = f"P: pages, H: kv_heads, L: {spec.page}"
        keys = paged if spec.page is not None else "H: kv_heads, L: kv_tokens"
        heads, last = "H: heads", "D: "
    found: list[Line] = [
        ("Q", f"{rows}, {last}{d}", spec.input_dtype, "input, queries"),
        ("K", f"{keys}, {last}{d}", spec.key_dtype, "input, keys"),
    ]
    if not spec.latent:
        found.append(("V", f"{keys}, {last}{dv}", spec.key_dtype, "input, values"))
    found += _places(spec)
    if spec.alibi:
        found.append(("Slopes", heads, "fp32", "input, one slope for each query head"))
    if spec.sink:
        found.append(("Sink", heads, "fp32", "input, one logit for each query head"))
    if spec.branch == "selected":
        shape = f"batch, kv_heads, q_len, {spec.top_k}"
        what = "input, numbers of the blocks of keys that a query reads; -1: none"
        found.append(("Idx", shape, "int32", what))
    found.append(("O", f"{rows}, {last}{dv}", spec.output_dtype, "output"))
    if spec.lse:
        found.append(("LSE", rows, "fp32", "output, natural log-sum-exp of a row"))
    return found


def _places(spec: AttentionSpec) -> list[Line]:
    """What says where sequences lie, and the scales of their keys."""
    found: list[Line] = []
    batch = spec.batch
    if batch is None:
        return found
    starts = "input, where the {} of each sequence begin; the last number: where the last one's end"
    if spec.packed:
        found.append(("StartsQ", "B: batch + 1", "int32", starts.format("queries")))
    if batch.page is not None:
        what = "input, row b: the pages of sequence b, in the order of its keys"
        found.append(("Table", "B: batch, T: max_pages", "int32", what))
    elif batch.lengths:
        what = "input, where the keys of each sequence begin, in any order"
        found.append(("StartsK", "B: batch", "int32", what))
    else:
        found.append(("StartsK", "B: batch + 1", "int32", starts.format("keys")))
    if batch.page is not None or batch.lengths:
        found.append(("LengthsK", "B: batch", "int32", "input, how many keys each sequence has"))
    if spec.kv_dtype is not None:
        of = ["K"] if spec.latent else ["K", "V"]
        what = "input, a factor of all numbers in {} of that sequence and head"
        found += [(f"{n}Descale", "B: batch, H: kv_heads", "fp32", what.format(n)) for n in of]
    return found


def formulas(spec: AttentionSpec) -> str:
    """From the inputs to the outputs, for one row of one head."""
    of_key, of_value = (
        f" * {name}[batch, kv_head]" if spec.kv_dtype is not None else ""
        for name in ("KDescale", "VDescale")
    )
    lines = [
        f"p = {_position(spec)}   (the position of query q_idx: the last query is the last token)",
        f"s[k] = {spec.softmax_scale:.10g} * dot(Q[q_idx], K[k]){of_key}   ({_scale(spec)})",
    ]
    if spec.softcap is not None:
        lines.append(f"s[k] = {spec.softcap:g} * tanh(s[k] / {spec.softcap:g})")
    if spec.alibi:
        lines.append("s[k] = s[k] + Slopes[head] * (k - p)")
    lines.append(f"s[k] = -inf unless {visible(spec)}")
    total = "sum over k of exp(s[k])"
    lines.append(f"Z = {total} + exp(Sink[head])" if spec.sink else f"Z = {total}")
    lines.append(f"O[q_idx] = (sum over k of exp(s[k]) * V[k]) / Z{of_value}")
    if spec.latent:
        lines.append(f"where V[k] is the first {spec.value_dim} numbers of K[k]")
    if spec.lse:
        lines.append("LSE[q_idx] = log(Z)")
    text = "\n".join(lines)
    if spec.batch is not None:
        text = text.replace("kv_len", "kv_length")
    return text.replace("q_len", "q_length") if spec.packed else text


def gradient_formulas(spec: AttentionSpec) -> str:
    """From P and the gradient of O to the gradients, for one head."""
    scale = f"{spec.softmax_scale:.10g}"
    lines = [
        "dP[q, k] = dot(dO[q], V[k])",
        "Delta[q] = dot(dO[q], O[q])",
        "dS[q, k] = P[q, k] * (dP[q, k] - Delta[q])",
    ]
    if spec.alibi:
        lines.append("dSlopes[head] = sum over q, k of dS[q, k] * (k - p)")
    if spec.sink:
        lines.append("dSink[head] = -sum over q of exp(Sink[head] - LSE[q]) * Delta[q]")
    if spec.softcap is not None:
        chain = f"(1 - tanh({scale} * dot(Q[q], K[k]) / {spec.softcap:g}) ^ 2)"
        lines.append(f"dS[q, k] = dS[q, k] * {chain}")
    return "\n".join(
        [
            *lines,
            f"dQ[q] = {scale} * sum over k of dS[q, k] * K[k]",
            f"dK[k] = {scale} * sum over q of dS[q, k] * Q[q]",
            "dV[k] = sum over q of P[q, k] * dO[q]",
        ]
    )


def inputs(spec: AttentionSpec) -> list[str]:
    """The names of the tensors that are read."""
    return [name for name, _, _, what in _tensors(spec) if what.startswith("input")]


def notes(spec: AttentionSpec, *, custom: bool = False, given: Given | None = None) -> str:
    """What the formulas leave open, one line each; `custom`: what holds of any operator."""
    lengths = [
        "batch, q_len and kv_len are any numbers, known only when the kernel is called: the last "
        "tile of queries or keys is mostly not full, and q_len and kv_len may differ either way. "
        "Keys past kv_len must have no weight; queries past q_len are not stored."
    ]
    lines = [*(lengths if spec.batch is None else _of_sequences(spec)), _heads(spec)]
    if custom:
        lines += _judged(spec, given) if given is not None else []
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


def _of_sequences(spec: AttentionSpec) -> list[str]:
    """Where the rows of a sequence are, and what lies around them."""
    batch = spec.batch
    assert batch is not None
    queries = "q_length = StartsQ[b + 1] - StartsQ[b] queries" if spec.packed else "q_len queries"
    known = batch.page is not None or batch.lengths
    keys = "LengthsK[b]" if known else "StartsK[b + 1] - StartsK[b]"
    if batch.page is not None:
        place = f"row k % {batch.page} of page Table[b, floor(k / {batch.page})]"
        around = "The rest of a sequence's last page, and pages of no sequence, are NaN, and the "
        around += "table has nonsense behind a sequence's pages"
    else:
        place = "row StartsK[b] + k"
        around = "Rows of K and V that no sequence has are NaN"
    what = "K" if spec.latent else "K and V"
    lines = [
        f"Sequence b of the batch (`batch_idx`) has {queries} and kv_length = {keys} keys. The "
        "numbers are known only when the kernel is called and differ from sequence to sequence; "
        "there may be no keys, and more queries than keys. q_idx and k count from 0 in the "
        "sequence.",
        f"Key k is {place} of {what}. {around}: nothing of it may reach a result, not even times "
        "0. The range of a Copy reads such rows as 0; a Mask then hides them.",
    ]
    if spec.packed:
        lines.append(
            "Query q_idx is row StartsQ[b] + q_idx of Q, O and LSE. Rows of O and LSE that no "
            "sequence has must stay as they are. q_len is the number of queries of the longest "
            "sequence: the grid has blocks for it, and those past the end of theirs store nothing."
        )
    else:
        few = f", at most {spec.decode}" if spec.decode is not None else ""
        lines.append(f"All sequences have the same number of queries, q_len{few}.")
    if spec.decode is not None and not spec.unsplit:
        lines.append(
            "The caller gives the dim `splits` by name: over how many thread blocks the keys of a "
            "sequence are shared, so that few sequences keep all SMs busy. It may be more than a "
            "sequence has tiles: parts without a key count nothing."
        )
    names = {"q_tokens": spec.packed, "kv_tokens": batch.page is None}
    names |= dict.fromkeys(("pages", "max_pages"), batch.page is not None)
    sizes = ", ".join(name for name, there in names.items() if there)
    lines.append(f"Declare the sizes that only your tensors have: `dim {sizes}`.")
    return lines


def _judged(spec: AttentionSpec, given: Given) -> list[str]:
    """What of a reference's results is compared, and what rows without keys give."""
    both = "LSE" in outputs(spec, given)
    lines = [
        "O and LSE are compared with what the function returns, LSE in fp32."
        if both
        else "O is compared with what the function returns. It returns no LSE: write none."
    ]
    if given.empty_rows is not None:
        zero = "give O = 0" + (" and LSE = -inf" if both else "")
        told = zero if given.empty_rows else "are computed like all others, not set to 0"
        lines.append(f"Where q_len > kv_len, the first q_len - kv_len queries {told}.")
    return lines


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
    shared = "Query heads share K and V heads in equal groups: query head h reads K and V head "
    shared += "floor(h * kv_heads / heads). "
    if spec.decode is not None:
        return (
            f"{shared}There are always {spec.group} query heads for each kv head, so `param Group "
            f"= {spec.group}` may be in the program; kv_heads is known only when the kernel is "
            "called."
        )
    return (
        f"{shared}Typically heads = {spec.heads}, kv_heads = {spec.kv_heads}; "
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


_SIZES = ("batch", "heads", "kv_heads", "q_len", "kv_len")
_HIDDEN = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
