"""reference.py of a kernel with a score and a mask of the caller's own: the same in NumPy.

The judge runs it as any other reference. It is written from the TL expressions; whether those are
what the caller's function computes is compared when they are captured (flex/compare.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from flashwright.author.builtin.mods import BlockLists, Mods
from flashwright.lang.nodes import Binary, Call, Expr, Index, Name, Num, Unary, expressions
from flashwright.spec import AttentionSpec

FILE = "reference.py"
_INDICES = {"batch_idx": "b", "head_idx": "h", "q_idx": "q", "kv_idx": "kv"}
_LOGIC = {"and": "&", "or": "|"}
_CALLS = {"min": "np.minimum", "max": "np.maximum", "where": "np.where", "sigmoid": "sigmoid"}

_HELPERS = '''\
def read(tensor, *index):
    """The element at an index, which is clamped to its axis as in TL."""
    place = [np.clip(np.floor(i).astype(int), 0, n - 1) for i, n in zip(index, tensor.shape)]
    return tensor[tuple(place)]


def sigmoid(x):
    return 1 / (1 + np.exp(-x))
'''

_TEXT = '''\
"""The attention of this kernel in NumPy, written by Flashwright from its score and its mask."""

import numpy as np


def reference(inputs, dims):
    Q, K, V = inputs["Q"], inputs["K"], inputs["V"]
    heads, shared = Q.shape[1], Q.shape[1] // K.shape[1]
    K, V = np.repeat(K, shared, axis=1), np.repeat(V, shared, axis=1)
    b, h, q, kv = np.ogrid[: Q.shape[0], :heads, : Q.shape[2], : K.shape[2]]
    with np.errstate(all="ignore"):
        S = Q @ K.swapaxes(2, 3) * {scale!r}{options}
        S = {score} + 0.0 * S
        seen = {mask} & (S == S)
    S = np.where(seen, S, -np.inf)
    sink = {sink}
    top = np.maximum(S.max(axis=-1, keepdims=True, initial=-np.inf), sink)
    top = np.where(np.isfinite(top), top, 0.0)
    weight = np.exp(S - top)
    total = weight.sum(axis=-1, keepdims=True) + np.exp(sink - top)
    some = total > 0
    with np.errstate(all="ignore"):
        O = np.where(some, weight @ V / total, 0.0)
        LSE = np.where(some, top + np.log(total), -np.inf)
    return {{"O": O, "LSE": LSE[..., 0]}}


def make_inputs(rng, dims):
    size = {{**dims}}
    return {{{inputs}}}{lists}


{helpers}

def whole(rng, low, high, shape, ascending):
    """Whole numbers from low to high, ascending along the last axis if asked."""
    made = rng.integers(low, high + 1, shape)
    return (np.sort(made, axis=-1) if ascending else made).astype(np.int32)


def lists(rng, shape, full):
    """Lists of the blocks that are visited, some of each row. Full ones come first."""
    kind = rng.choice([0, 1, 2], shape, p=[0.2, 0.4, 0.4] if full else [0, 0.6, 0.4])
    made = {{"Counts": kind < 2}} | ({{"Full": kind < 1}} if full else {{}})
    counts = {{name: kept.sum(axis=-1).astype(np.int32) for name, kept in made.items()}}
    return counts | {{"Blocks": np.argsort(kind, axis=-1, kind="stable").astype(np.int32)}}


def listed(inputs, name):
    """As a table: the blocks that are visited, or those of them that are full."""
    counts, blocks = inputs[name].astype(int), inputs["Blocks"].astype(int)
    table = np.zeros(blocks.shape, bool)
    there = np.arange(blocks.shape[-1]) < counts[..., None]
    np.put_along_axis(table, blocks, there, axis=-1)
    return table
'''


@dataclass(frozen=True)
class Sample:
    """What the caller's tensor is like: its numbers lie between two bounds, ascending or not."""

    low: float
    high: float
    ascending: bool = False


def reference_text(mods: Mods, spec: AttentionSpec, samples: Mapping[str, Sample]) -> str:
    """The text of reference.py. `samples` describes tensors of whole numbers and of constants."""
    made = [f'"{o.name}": {_draw(o.sizes, o.dtype, samples.get(o.name))}' for o in mods.operands]
    seen = [_python(mods.mask)] if mods.mask is not None else []
    position = "(q + K.shape[2] - Q.shape[2])"
    lists = ""
    if mods.lists is not None:
        batch, head = "b" if mods.lists.batched else "0", "h" if mods.lists.per_head else "0"
        here = f"q // {mods.lists.rows}, kv // {mods.lists.columns}"
        if mods.lists.full:
            seen = [f'(listed(inputs, "Full")[{batch}, {head}, {here}] | {seen[0]})']
        seen.append(f'listed(inputs, "Counts")[{batch}, {head}, {here}]')
        lists = f" | {_drawn_lists(mods.lists)}"
    seen += [f"(kv <= {position})"] if spec.causal else []
    seen += [f"(np.abs({position} - kv) < {spec.window})"] if spec.window is not None else []
    return _TEXT.format(
        scale=spec.softmax_scale,
        options=_options(spec, position),
        score=_python(mods.score) if mods.score is not None else "S",
        mask=" & ".join(seen) or "True",
        sink='inputs["Sink"][:, None, None]' if spec.sink else "-np.inf",
        inputs=", ".join(made),
        lists=lists,
        helpers=_HELPERS,
    )


def evaluate(expr: Expr, values: Mapping[str, Any], inputs: Mapping[str, Any]) -> Any:
    """A TL expression on arrays, which broadcast: `values` has S, the indices and the dims that it
    names, `inputs` its tensors."""
    names = {"np": np, "dims": values, "inputs": inputs}
    names |= {_INDICES.get(name, name): value for name, value in values.items()}
    exec(_HELPERS, names)
    with np.errstate(all="ignore"):
        return eval(_python(expr), names)


def _drawn_lists(lists: BlockLists) -> str:
    batch = 'size["batch"]' if lists.batched else "1"
    heads = 'size["heads"]' if lists.per_head else "1"
    blocks = f'-(-size["q_len"] // {lists.rows}), -(-size["kv_len"] // {lists.columns})'
    return f"lists(rng, ({batch}, {heads}, {blocks}), {lists.full})"


def _options(spec: AttentionSpec, position: str) -> str:
    """The lines of softcap and ALiBi."""
    lines = []
    if spec.softcap is not None:
        lines.append(f"S = {spec.softcap!r} * np.tanh(S / {spec.softcap!r})")
    if spec.alibi:
        lines.append(f'S = S + inputs["Slopes"][:, None, None] * (kv - {position})')
    return "".join(f"\n        {line}" for line in lines)


def _draw(sizes: tuple[str, ...], dtype: str, sample: Sample | None) -> str:
    axes = [size if size.isdecimal() else f'size["{size}"]' for size in sizes]
    shape = f"({', '.join(axes)},)"
    if dtype == "int32" and sample is not None:
        low, high = int(sample.low), int(sample.high)
        return f"whole(rng, {low}, {high}, {shape}, {sample.ascending})"
    kind = {"bf16": "float64", "fp16": "float64", "fp32": "float32", "int32": "int32"}[dtype]
    if sample is not None and sample.low == sample.high:
        return f"np.full({shape}, {sample.low!r}, np.{kind})"
    return f"rng.standard_normal({shape}).astype(np.{kind})"


def _python(expr: Expr) -> str:
    """A TL expression in NumPy."""
    match expr:
        case Num(text):
            return text
        case Name(name):
            if name in ("S", "inf"):
                return "S" if name == "S" else "np.inf"
            return _INDICES.get(name, f'dims["{name}"]')
        case Unary(op, operand):
            return f"{'-' if op == '-' else 'np.logical_not'}({_python(operand)})"
        case Binary("/" | "%" as op, left, right) if not any(
            isinstance(e, Name) for e in expressions(expr)
        ):  # Python raises at 1 / 0
            return f"(np.float64({_python(left)}) {op} {_python(right)})"
        case Binary(op, left, right):
            return f"({_python(left)} {_LOGIC.get(op, op)} {_python(right)})"
        case Call(Name("min" | "max" as name), args) if len(args) > 2:
            first, *rest = args
            return f"{_CALLS[name]}({_python(first)}, {_python(Call(Name(name), tuple(rest)))})"
        case Call(Name(name), args):
            given = ", ".join(_python(a) for a in args)
            return f"{_CALLS.get(name, f'np.{name}')}({given})"
        case Index(Name(tensor), args):
            return f'read(inputs["{tensor}"], {", ".join(_python(a) for a in args)})'
    raise ValueError(f"no NumPy for {expr}")
