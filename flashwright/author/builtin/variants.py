"""The variants the built-in author knows. A new one is a sketch in sketches/ and a line here."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flashwright.spec import AttentionSpec, BadSpec

# Tensors in global memory: the letter and the size of each axis. Letters: B batch, H head, G head
# within its group, L position, D dimension, T anything else. The caller's tensors are in the order
# B, H, G, L, D whatever the order here (G is part of H to the caller).
DENSE: dict[str, str] = {
    "Q": "B:batch H:heads L:q_len D:HeadDim",
    "K": "B:batch H:kv_heads L:kv_len D:HeadDim",
    "V": "B:batch H:kv_heads L:kv_len D:VDim",
    "O": "B:batch H:heads L:q_len D:VDim",
    "LSE": "B:batch H:heads L:q_len",
    "Slopes": "H:heads",
    "Sink": "H:heads",
    "KDescale": "B:batch H:kv_heads",
    "VDescale": "B:batch H:kv_heads",
}
GROUPED: dict[str, str] = {
    "Q": "B:batch L:q_len H:kv_heads G:Group D:HeadDim",
    "K": "B:batch H:kv_heads L:kv_len D:HeadDim",
    "V": "B:batch H:kv_heads L:kv_len D:VDim",
    "O": "B:batch L:q_len H:kv_heads G:Group D:VDim",
    "LSE": "B:batch L:q_len H:kv_heads G:Group",
    "Idx": "B:batch H:kv_heads L:q_len T:TopK",
}
# Tiles that hold some columns of a tensor: how many.
LATENT: dict[str, str] = {
    "Qlatent": "VDim",
    "Klatent": "VDim",
    "Qrope": "RopeDim",
    "Krope": "RopeDim",
}


@dataclass(frozen=True)
class Variant:
    """A variant: its name, its sketch, the tensors of the sketch, and the default spec."""

    name: str
    summary: str
    sketch: str = "attention.tl"
    tensors: Mapping[str, str] = field(default_factory=lambda: DENSE)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    widths: Mapping[str, str] = field(default_factory=dict)
    """Of tiles that hold some columns of their tensor."""
    weights: str = ""
    """What its weights are made of, as an expression of PyTorch of the visible `scores`; empty for
    a softmax. A file says so to the judge (`reference_of`)."""


VARIANTS: dict[str, Variant] = {
    v.name: v
    for v in (
        Variant("mha", "multi-head attention", defaults={"heads": 16}),
        Variant("gqa", "grouped-query attention", defaults={"heads": 32, "kv_heads": 8}),
        Variant("mqa", "multi-query attention", defaults={"heads": 32, "kv_heads": 1}),
        Variant(
            "mla",
            "multi-head latent attention, prefill: Q and K 192 wide, V 128",
            defaults={"heads": 16, "head_dim": 192, "v_dim": 128},
        ),
        Variant(
            "mla-decode",
            "absorbed MLA, decode: Q and the latent cache 576 wide, V its first 512 columns",
            "latent.tl",
            defaults={
                "heads": 128,
                "kv_heads": 1,
                "head_dim": 576,
                "v_dim": 512,
                "latent": True,
                "dtype": "bf16",
                "decode": 1,
                "page": 64,
            },
            widths=LATENT,
        ),
        Variant(
            "nsa-compressed",
            "NSA's branch over compressed blocks of keys",
            defaults={"heads": 64, "kv_heads": 4, "branch": "compressed", "causal": True},
        ),
        Variant(
            "nsa-selected",
            "NSA's branch over selected blocks of keys",
            "nsa_selected.tl",
            GROUPED,
            {"heads": 64, "kv_heads": 4, "branch": "selected", "causal": True},
        ),
        Variant(
            "nsa-window",
            "NSA's sliding-window branch",
            defaults={
                "heads": 64,
                "kv_heads": 4,
                "branch": "window",
                "causal": True,
                "window": 512,
            },
        ),
    )
}

OTHERS: dict[str, Variant] = {
    v.name: v
    for v in (
        Variant(
            "relu",
            "multi-head or grouped attention with ReLU in place of softmax",
            "relu.tl",
            defaults={"heads": 16, "lse": False},
            weights="scores.relu()",
        ),
    )
}
"""Variants whose weights are no softmax: a reference says what they compute."""

_REFERENCE = '''\
"""{summary}."""

import math

import torch


def attention(q, k, v, q_len, kv_len):
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.transpose(-2, -1) * {scale!r}
{softcap}    behind = torch.arange(q_len)[:, None] + kv_len - q_len - torch.arange(kv_len)
    scores = scores.masked_fill({hidden}, -math.inf)
    return {weights} @ v
'''


def reference_of(spec: AttentionSpec) -> bytes | None:
    """A file with the function that a spec's variant computes; None for a softmax."""
    variant = find(spec.variant)
    if not variant.weights:
        return None
    hidden = ["behind < 0"] if spec.causal else []
    hidden += [f"behind.abs() >= {spec.window}"] if spec.window is not None else []
    if spec.sink_tokens is not None or spec.alibi or spec.sink or spec.batch is not None:
        raise BadSpec(f"variant: {variant.name} has no sink, no ALiBi and rectangular batches")
    cap = spec.softcap
    text = _REFERENCE.format(
        summary=variant.summary[:1].upper() + variant.summary[1:],
        scale=spec.softmax_scale,
        softcap=f"    scores = {cap!r} * torch.tanh(scores / {cap!r})\n" if cap is not None else "",
        hidden=" | ".join(f"({one})" for one in hidden) or "behind > kv_len",
        weights=variant.weights,
    )
    return text.encode()


# Names that users ask for as variants and that are options of all variants.
_OPTIONS = {
    "causal": "causal",
    "window": "window 4096",
    "sliding-window": "window 4096",
    "softcap": "softcap 30",
    "alibi": "alibi",
    "sink": "sink",
}


class UnknownVariant(ValueError):
    """A variant that is not in the table; the message lists all and suggests one."""


def find(name: str) -> Variant:
    """The variant of that name, in any case, dashes and underscores alike."""
    key = name.strip().lower().replace("_", "-")
    every = VARIANTS | OTHERS
    if key not in every:
        near = difflib.get_close_matches(key, every, n=1)
        guess = f"; did you mean {near[0]}?" if near else "."
        if key in _OPTIONS:
            guess = f": it is an option, as in `generate gqa --{_OPTIONS[key]}`."
        raise UnknownVariant(f"there is no variant {name!r}{guess} Known are {', '.join(every)}")
    return every[key]


def make_spec(variant: str, **options: Any) -> AttentionSpec:
    """The spec of a variant: its defaults, overridden by the options that are not None."""
    known = find(variant)
    given = {k: v for k, v in options.items() if v is not None}
    settings = {**known.defaults, **given}
    if "heads" in given and "kv_heads" not in given:
        settings["kv_heads"] = _kv_heads(known, given["heads"])
    spec = AttentionSpec.make(variant=known.name, **settings)
    if known.name == "mha" and spec.kv_heads != spec.heads:
        raise BadSpec("kv_heads: mha has as many kv heads as query heads; use gqa for fewer")
    if known.name == "mqa" and spec.kv_heads != 1:
        raise BadSpec("kv_heads: mqa has one kv head; use gqa for more")
    for option in ("alibi", "sink"):
        if spec.branch == "selected" and getattr(spec, option):
            raise BadSpec(f"{option}: {known.name} has no sketch with it; write it in TL")
    return spec


def _kv_heads(variant: Variant, heads: int) -> int:
    """Where only the query heads are given, the variant's own grouping is kept if it divides."""
    usual = variant.defaults
    if "kv_heads" not in usual:
        return heads
    group = max(usual["heads"] // usual["kv_heads"], 1)
    if usual["kv_heads"] == 1:
        return 1
    return heads // group if heads % group == 0 and heads >= group else heads
