"""Attention of packed sequences, with the signature of FlashAttention's `flash_attn_varlen_func`.

The first call for an operator makes its kernel or finds it in the store; later calls look it up.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from flashwright.flex.attention import SETTINGS, task_of
from flashwright.flex.task import (
    LIMIT,
    ROWS,
    NoKernel,
    Task,
    WrongKernel,
    compare_rows,
    find_or_make,
    first_results,
    spec_of,
)
from flashwright.generate.packed import PackedOrder
from flashwright.generate.store import tell
from flashwright.lang.diagnostic import Failed
from flashwright.pytorch import reference
from flashwright.pytorch.operator import Operator, torch_operator
from flashwright.spec import AttentionSpec

Tensors = Mapping[str, Any]
Check = Callable[[AttentionSpec, Tensors, Tensors], None]
"""A look at first results: the call's tensors, and the results by their names."""
_CHECKED = 4  # sequences of a first output
_MOST_SCORES = 1 << 20  # of the sequence whose first gradients are checked


def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    sink: Any = None,
    return_softmax_lse: bool = False,
) -> Any:
    """Attention within each sequence of a packed batch: (tokens, heads, dim) tensors.

    `cu_seqlens_q` and `cu_seqlens_k`, int32, say where the sequences begin, and where the last one
    ends; none is longer than `max_seqlen_q` queries and `max_seqlen_k` keys. With `causal` and a
    window the last query of a sequence stands at its last key. `window_size` has the keys to the
    left and to the right that a query sees besides its own, -1 for all. `alibi_slopes` and `sink`
    have a number for each head. Returns O, and with `return_softmax_lse` also the log-sum-exp
    (heads, tokens), which has no gradient. CPU tensors are computed by PyTorch. Gradients of q, k
    and v come from the kernel's derived backward, packed as well; they are sums in any order.
    Raises NoKernel with the reason where no kernel can be made.
    """
    given = {"q": q, "k": k, "v": v, "startsq": cu_seqlens_q, "startsk": cu_seqlens_k}
    _check(given)
    settings = _settings(softmax_scale, causal, window_size, softcap)
    for name, extra in (("slopes", alibi_slopes), ("sink", sink)):
        if extra is not None:
            given[name] = extra
    if alibi_slopes is not None:
        _check_slopes(alibi_slopes, causal, q.shape[1])
        settings["alibi"] = True
    if sink is not None:
        settings["sink"] = True
    flags = tuple(name for name in ("alibi", "sink") if settings.pop(name, False))
    query, key, value = (x.transpose(0, 1)[None] for x in (q, k, v))
    if _on_cpu(q):
        settings |= dict.fromkeys(flags, True)
        found = by_pytorch(spec_of(query, key, value, **settings), given)
    else:
        task = task_of(query, key, value, tuple(settings.get(name) for name in SETTINGS), flags)
        found = _by_kernel(_Call(task, given, (max_seqlen_q, max_seqlen_k)))
    return found if return_softmax_lse else found[0]


def _on_cpu(tensor: Any) -> bool:
    return bool(tensor.is_cpu)


def _settings(
    scale: float | None, causal: bool, window: Sequence[int], softcap: float
) -> dict[str, Any]:
    """The spec's settings for FlashAttention's."""
    found: dict[str, Any] = {"causal": True} if causal else {}
    left, right = window
    if left >= 0 or (right >= 0 and not causal):
        if left < 0 or not (causal or left == right):
            text = (
                f"window_size = {(left, right)}: kernels see as far to the left as to the right, "
            )
            raise NoKernel(text + "or to the left alone with causal=True")
        found["window"] = left + 1
    if softcap:
        found["softcap"] = float(softcap)
    if scale is not None:
        found["scale"] = float(scale)
    return found


def _check(given: Tensors) -> None:
    """Raise ValueError or TypeError, with the argument, for tensors that do not fit."""
    for name in "qkv":
        if given[name].ndim != 3:
            shape = tuple(given[name].shape)
            raise ValueError(
                f"{name} must have the axes (tokens, heads, dim); its shape is {shape}"
            )
    if given["k"].shape[:2] != given["v"].shape[:2]:
        raise ValueError("k and v must have the same tokens and heads")
    for name, starts in (("cu_seqlens_q", given["startsq"]), ("cu_seqlens_k", given["startsk"])):
        if starts.dtype != torch.int32 or starts.ndim != 1 or starts.shape[0] < 2:
            text = f"{name} must be int32, with one element more than there are sequences"
            raise TypeError(f"{text}; it is {starts.dtype}, of shape {tuple(starts.shape)}")
        if starts.device != given["q"].device:
            raise ValueError(f"{name} is on {starts.device}, q on {given['q'].device}")
    if given["startsq"].shape != given["startsk"].shape:
        raise ValueError("cu_seqlens_q and cu_seqlens_k must be of the same sequences")


def _check_slopes(slopes: Any, causal: bool, heads: int) -> None:
    if not causal:
        raise NoKernel("alibi_slopes: kernels have ALiBi with causal=True alone")
    if tuple(slopes.shape) != (heads,):
        shape = tuple(slopes.shape)
        raise NoKernel(f"alibi_slopes must have one slope for each of {heads} heads, not {shape}")


# --- by a kernel --------------------------------------------------------------------------------


@dataclass
class _Entry:
    operator: Operator
    folder: Path
    new: bool
    """Whether the kernel was made now, so that its first results are checked."""


_KERNELS: dict[tuple[Task, bool], _Entry] = {}
"""By the task, and whether it is the backward."""


@dataclass(frozen=True)
class _Call:
    """A call with CUDA tensors."""

    task: Task
    given: Tensors
    longest: tuple[int, int]

    def run(self, tensors: Tensors, backward: bool, check: Check) -> dict[str, Any]:
        """The results of the forward or the backward kernel by their names, from tensors with the
        axes (heads, tokens, ...) and the others of the call. `check` sees the first ones."""
        known = self.task, backward
        entry = _KERNELS.get(known) or _new_entry(self.task, backward)
        _KERNELS[known] = entry
        operator = entry.operator
        floats = {n: self.given[n].float() for n in ("slopes", "sink") if n in self.given}
        named = {**self.given, **floats, **tensors}
        sizes = dict(zip(("q_len", "kv_len"), map(int, self.longest), strict=True))
        sizes["batch"] = self.given["startsq"].shape[0] - 1
        dims: dict[str, Any] = {name: sizes[name] for name in operator.dims}
        found = operator.compute(*(named[name] for name in operator.inputs), **dims)
        results = {n.lower(): x for n, x in zip(operator.outputs, found, strict=True)}
        if entry.new:
            with first_results(entry, _KERNELS, known):
                check(self.task.spec, self.given, results)
        return results


def _new_entry(task: Task, backward: bool) -> _Entry:
    order = PackedOrder(task.spec, task.card)
    try:
        folder, new = find_or_make(order.backward if backward else order)
        return _Entry(torch_operator(folder), folder, new)
    except Failed as error:
        raise NoKernel(str(error)) from None


def _by_kernel(call: _Call) -> tuple[Any, Any]:
    """O and LSE, with gradients if they may be asked for."""
    q, k, v = (call.given[name] for name in "qkv")
    if not torch.is_grad_enabled() or not any(x.requires_grad for x in call.given.values()):
        return _forward(call, q, k, v)
    for name in ("slopes", "sink"):
        if name in call.given and call.given[name].requires_grad:
            raise NoKernel(f"packed sequences have no gradient of {_ARGUMENTS[name]}")
    found: tuple[Any, Any] = _Attention.apply(q, k, v, call)
    return found


_ARGUMENTS = {"slopes": "alibi_slopes", "sink": "sink"}


def _forward(call: _Call, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
    turned = {name: x.transpose(0, 1) for name, x in (("q", q), ("k", k), ("v", v))}
    found = call.run(turned, False, check)
    return found["o"].transpose(0, 1), found["lse"]


class _Attention(torch.autograd.Function):  # type: ignore[misc]
    """The kernel and its derived backward."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, call: _Call) -> tuple[Any, Any]:
        """O and LSE."""
        out, lse = _forward(call, q, k, v)
        ctx.call = call
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad: Any, _: Any) -> tuple[Any, ...]:
        """The gradients of q, k and v."""
        _tell_if_not_deterministic()
        *rows, lse = ctx.saved_tensors
        names = ("q", "k", "v", "o", "do")
        grad = grad.contiguous()  # it may be a number that is expanded
        turned = {n: x.transpose(0, 1) for n, x in zip(names, (*rows, grad), strict=True)}
        looked = partial(check_gradients, grad=grad)
        found = ctx.call.run({**turned, "lse": lse}, True, looked)
        return *(found[f"d{name}"].transpose(0, 1) for name in "qkv"), None


def _tell_if_not_deterministic() -> None:
    if torch.are_deterministic_algorithms_enabled():
        text = "gradients of packed sequences are not deterministic: they are sums in any order"
        if not torch.is_deterministic_algorithms_warn_only_enabled():
            raise RuntimeError(text)
        warnings.warn(text, stacklevel=2)


def check(spec: AttentionSpec, given: Tensors, results: Tensors) -> None:
    """Raise WrongKernel if rows of a first output are not what PyTorch gives in fp64."""
    starts, out = given["startsq"].tolist(), results["o"].transpose(0, 1)
    filled = [b for b, n in enumerate(starts[:-1]) if starts[b + 1] > n]
    with torch.no_grad():
        for b in filled[:_CHECKED]:
            wanted, _ = _sequence(spec, given, b, torch.float64)
            found = out[starts[b] : starts[b + 1]].transpose(0, 1)
            rows = torch.linspace(0, found.shape[1] - 1, min(ROWS, found.shape[1])).long()
            for head in {0, found.shape[0] - 1}:
                at = head, rows.to(found.device)
                ours, right = (x[at].double().cpu().numpy() for x in (found, wanted))
                compare_rows(ours, right, spec, (b, head))


def check_gradients(spec: AttentionSpec, given: Tensors, results: Tensors, grad: Any) -> None:
    """Raise WrongKernel if the first gradients of a short sequence are not PyTorch's in fp64."""
    queries, keys = (given[name].tolist() for name in ("startsq", "startsk"))
    sizes = [
        (b, queries[b + 1] - queries[b], keys[b + 1] - keys[b]) for b in range(len(queries) - 1)
    ]
    short = [b for b, n, m in sizes if n and m and n * m <= _MOST_SCORES]
    if not short:
        tell(f"the first gradients are not checked: no sequence has at most {_MOST_SCORES} scores")
    for b in short[:1]:
        rows, places = slice(*queries[b : b + 2]), slice(*keys[b : b + 2])
        own = {n: given[n].detach().double().requires_grad_() for n in "qkv"}
        with torch.enable_grad():
            out, _ = _sequence(spec, {**given, **own}, b, torch.float64)
            wanted = torch.autograd.grad(
                out, tuple(own.values()), grad[rows].transpose(0, 1).double()
            )
        for (name, at), right in zip(
            (("q", rows), ("k", places), ("v", places)), wanted, strict=True
        ):
            found = results[f"d{name}"].transpose(0, 1)[at].double()
            error = float((found - right[at]).norm() / right[at].norm().clamp(min=1e-6))
            if not error <= LIMIT[spec.dtype]:
                text = (
                    f"a new backward is wrong: d{name} of sequence {b} is {error:.2g} of its norm"
                )
                raise WrongKernel(f"{text} from PyTorch's. Please report the shapes")


# --- by PyTorch ---------------------------------------------------------------------------------


def by_pytorch(spec: AttentionSpec, given: Tensors) -> tuple[Any, Any]:
    """O and LSE, a sequence at a time; every step is differentiable."""
    count = given["startsq"].shape[0] - 1
    found = [_sequence(spec, given, b, torch.float32) for b in range(count)]
    out = torch.cat([o.transpose(0, 1) for o, _ in found]).to(given["q"].dtype)
    return out, torch.cat([lse for _, lse in found], dim=1)


def _sequence(spec: AttentionSpec, given: Tensors, b: int, kind: Any) -> tuple[Any, Any]:
    """O (heads, tokens, dim) and LSE (heads, tokens) of one sequence."""
    parts = []
    for name, starts in (("q", "startsq"), ("k", "startsk"), ("v", "startsk")):
        first, last = given[starts][b : b + 2].tolist()
        parts.append(given[name][first:last].to(kind).transpose(0, 1)[None])
    extras = {name: given[name] for name in ("slopes", "sink") if name in given}
    out, lse = reference.attention(spec, *parts, **extras)
    return out[0], lse[0]
