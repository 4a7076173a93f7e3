"""Attention of packed sequences, with the signature of FlashAttention's `flash_attn_varlen_func`.

The first call for an operator makes its kernel or finds it in the store; later calls look it up.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from flashwright.flex.task import NoKernel
from flashwright.serving import arguments, reference
from flashwright.serving.kernels import Check, Wanted
from flashwright.spec import Batch

Tensors = Mapping[str, Any]


def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    seqused_k: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    sink: Any = None,
    block_table: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    return_softmax_lse: bool = False,
) -> Any:
    """Attention within each sequence of a packed batch: (tokens, heads, dim) tensors.

    `cu_seqlens_q` and `cu_seqlens_k`, int32, say where the sequences begin, and where the last one
    ends; none is longer than `max_seqlen_q` queries and `max_seqlen_k` keys. `seqused_k` says how
    many keys each has, where there is room for more. With `block_table` k and v lie in pages,
    (pages, positions, heads, dim): row b of the table names those of sequence b, `seqused_k` says
    how many keys it has, and `cu_seqlens_k` is None. With `causal` and a window the last query of a
    sequence stands at its last key. Beside 16-bit q, k and v may be float8_e4m3fn, multiplied by
    `k_descale` and `v_descale`, numbers or float32 (batch, KV heads). `window_size` has the keys to
    the left and to the right that a query sees besides its own, -1 for all. `alibi_slopes` and
    `sink` have a number for each head.

    Returns O, and with `return_softmax_lse` also the log-sum-exp (heads, tokens), which has no
    gradient. CPU tensors are computed by PyTorch. Gradients of q, k and v come from the kernel's
    derived backward, packed as well; they are sums in any order. Keys in a cache have none. Raises
    NoKernel with the reason where no kernel can be made.
    """
    given = {"q": q, "k": k, "v": v, "startsq": cu_seqlens_q}
    for name, tensor in (
        ("startsk", cu_seqlens_k),
        ("lengthsk", seqused_k),
        ("table", block_table),
    ):
        if tensor is not None:
            given[name] = tensor
    _check(given)
    narrow, scales = arguments.scales_of(given, cu_seqlens_q.shape[0] - 1, k_descale, v_descale)
    given |= scales
    settings = arguments.settings_of(softmax_scale, causal, window_size, softcap) | narrow
    given |= arguments.extras_of(alibi_slopes, sink, causal, q.shape[1])
    if _on_cpu(q):
        found = reference.attention(arguments.spec(given, settings), given)
    else:
        page = k.shape[1] if block_table is not None else None
        batch = Batch(lengths=seqused_k is not None, page=page)
        wanted = Wanted(arguments.task(given, settings), batch)
        found = _by_kernel(_Call(wanted, given, (max_seqlen_q, max_seqlen_k)))
    return found if return_softmax_lse else found[0]


def _on_cpu(tensor: Any) -> bool:
    return bool(tensor.is_cpu)


def _check(given: Tensors) -> None:
    """Raise ValueError or TypeError, with the argument, for tensors that do not fit."""
    keys = "tokens, heads, dim" if "table" not in given else "pages, positions, heads, dim"
    arguments.check_axes(given, {"q": "tokens, heads, dim", "k": keys, "v": keys})
    if given["k"].shape[:-1] != given["v"].shape[:-1]:
        raise ValueError("k and v must have the same tokens and heads")
    starts, device = given["startsq"], given["q"].device
    arguments.check_numbers("cu_seqlens_q", starts, device, (None,))
    batch = starts.shape[0] - 1
    if batch < 1:
        raise ValueError("cu_seqlens_q must have one element more than there are sequences")
    if ("table" in given) == ("startsk" in given):
        raise ValueError("keys are found by cu_seqlens_k or by block_table: pass one of them")
    if "table" in given:
        if "lengthsk" not in given:
            raise ValueError("block_table needs seqused_k: how many keys each sequence has")
        arguments.check_numbers("block_table", given["table"], device, (batch, None))
    else:
        arguments.check_numbers("cu_seqlens_k", given["startsk"], device, (batch + 1,))
    if "lengthsk" in given:
        arguments.check_numbers("seqused_k", given["lengthsk"], device, (batch,))


# --- by a kernel --------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Call:
    """A call with CUDA tensors."""

    wanted: Wanted
    given: Tensors
    longest: tuple[int, int]

    def run(self, tensors: Tensors, backward: bool, check: Check) -> dict[str, Any]:
        """The results of the forward or the backward kernel by their names, from tensors with the
        axes (heads, tokens, ...) and the others of the call. `check` sees the first ones."""
        wanted = replace(self.wanted, backward=True) if backward else self.wanted
        named = {**kernel_tensors(self.given), **tensors}
        sizes = dict(zip(("q_len", "kv_len"), map(int, self.longest), strict=True))
        sizes["batch"] = self.given["startsq"].shape[0] - 1
        return wanted.run(named, sizes, check)


def kernel_tensors(given: Tensors) -> dict[str, Any]:
    """The tensors of a call as kernels take them, with heads before tokens."""
    named = {**given, **{n: given[n].float() for n in arguments.FLAGS if n in given}}
    named |= {name: given[name].transpose(-3, -2) for name in "qkv"}
    if "lengthsk" in given and "startsk" in given:
        named["startsk"] = given["startsk"][: given["lengthsk"].shape[0]]
    return named


def _by_kernel(call: _Call) -> tuple[Any, Any]:
    """O and LSE, with gradients if they may be asked for."""
    q, k, v = (call.given[name] for name in "qkv")
    if not torch.is_grad_enabled() or not any(x.requires_grad for x in call.given.values()):
        return _forward(call)
    for name in arguments.FLAGS:
        if name in call.given and call.given[name].requires_grad:
            raise NoKernel(f"packed sequences have no gradient of {arguments.ARGUMENTS[name]}")
    if "kdescale" in call.given:
        raise NoKernel("keys and values of 8 bits have no gradient: use no_grad()")
    if "lengthsk" in call.given:
        raise NoKernel("keys in a cache (seqused_k, block_table) have no gradient: use no_grad()")
    found: tuple[Any, Any] = _Attention.apply(q, k, v, call)
    return found


def _forward(call: _Call) -> tuple[Any, Any]:
    look = partial(reference.check, call.wanted.task.spec, call.given)
    found = call.run({}, False, look)
    return found["o"].transpose(0, 1), found["lse"]


class _Attention(torch.autograd.Function):  # type: ignore[misc]
    """The kernel and its derived backward."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, call: _Call) -> tuple[Any, Any]:
        """O and LSE."""
        out, lse = _forward(call)
        ctx.call = call
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad: Any, _: Any) -> tuple[Any, ...]:
        """The gradients of q, k and v."""
        _tell_if_not_deterministic()
        call: _Call = ctx.call
        *rows, lse = ctx.saved_tensors
        names = ("q", "k", "v", "o", "do")
        grad = grad.contiguous()  # it may be a number that is expanded
        turned = {n: x.transpose(0, 1) for n, x in zip(names, (*rows, grad), strict=True)}
        look = partial(reference.check_gradients, call.wanted.task.spec, call.given, grad=grad)
        found = call.run({**turned, "lse": lse}, True, look)
        return *(found[f"d{name}"].transpose(0, 1) for name in "qkv"), None


def _tell_if_not_deterministic() -> None:
    if torch.are_deterministic_algorithms_enabled():
        text = "gradients of packed sequences are not deterministic: they are sums in any order"
        if not torch.is_deterministic_algorithms_warn_only_enabled():
            raise RuntimeError(text)
        warnings.warn(text, stacklevel=2)
