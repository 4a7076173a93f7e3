"""Attention of packed sequences, with the signature of FlashAttention's `flash_attn_varlen_func`.

The first call for an operator makes its kernel or finds it in the store; later calls look it up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from flashwright.flex.task import NoKernel
from flashwright.pytorch.rules import is_deterministic
from flashwright.serving import arguments, reference
from flashwright.serving.kernels import Asked, Check, Wanted, attend
from flashwright.spec import Batch

Tensors = Mapping[str, Any]
ARGUMENTS = {
    "startsq": "cu_seqlens_q",
    "startsk": "cu_seqlens_k",
    "lengthsk": "seqused_k",
    "table": "block_table",
    **arguments.ARGUMENTS,
}
"""The arguments of the function by what its tensors are called here."""


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
    deterministic: bool | None = None,
    return_softmax_lse: bool = False,
) -> Any:
    """Attention within each sequence of a packed batch: (tokens, heads, dim) tensors.

    `cu_seqlens_q` and `cu_seqlens_k`, int32, say where the sequences begin, and where the last one
    ends; none is longer than `max_seqlen_q` queries and `max_seqlen_k` keys. `seqused_k` says how
    many keys each has, where there is room for more. With `block_table` k and v lie in pages,
    (pages, positions, heads, dim): row b of the table names those of sequence b, `seqused_k` says
    how many keys it has, and `cu_seqlens_k` is None. With `causal` and a window the last query of a
    sequence stands at its last key. Beside 16-bit q, k and v may be float8_e4m3fn or int8,
    multiplied by `k_descale` and `v_descale`, numbers or float32 (batch, KV heads); None is 1.
    `window_size` has the keys to the left and to the right that a query sees besides its own, -1
    for all. `alibi_slopes` and `sink` have a number for each head.

    Returns O, and with `return_softmax_lse` also the log-sum-exp (heads, tokens), which has no
    gradient; rows behind the last sequence are not computed. CPU tensors are computed by PyTorch,
    which looks at lengths and tables too; on a GPU only the kernel reads them. Gradients
    of q, k, v, slopes and sinks come from the kernel's derived backward, packed as well. With
    `deterministic` they have the same bits in every run; by default they do if PyTorch's
    deterministic algorithms are on. Keys in a cache have none. Raises NoKernel with the reason
    where no kernel can be made.
    """
    tensors = {
        "q": q,
        "k": k,
        "v": v,
        "startsq": cu_seqlens_q,
        "startsk": cu_seqlens_k,
        "lengthsk": seqused_k,
        "table": block_table,
        "slopes": arguments.in_fp32(alibi_slopes),
        "sink": arguments.in_fp32(sink),
    }
    longest = _longest(max_seqlen_q, max_seqlen_k)
    causal, window = arguments.masks_of(causal, window_size)
    options: tuple[Any, ...] = (softmax_scale, causal, window, softcap, longest)
    options = (*options, *arguments.take_scales(tensors, k_descale, v_descale))
    if _on_cpu(q):
        given, settings = _given(tensors, options)
        reference.check_numbers(given, ARGUMENTS, longest)
        found: Sequence[Any] = reference.attention(arguments.spec(given, settings), given)
    else:
        prepare = partial(_asked, tensors, options, deterministic)
        found = attend(("varlen", *options), tensors, return_softmax_lse, prepare)
    return (found[0], found[1]) if return_softmax_lse else found[0]


def _longest(queries: Any, keys: Any) -> tuple[int, int]:
    """The lengths of the longest sequence as numbers."""
    try:
        return int(queries), int(keys)
    except (TypeError, ValueError):
        text = "max_seqlen_q and max_seqlen_k must be numbers, those of the longest sequence"
        raise TypeError(f"{text}; they are {queries!r} and {keys!r}") from None


def _on_cpu(tensor: Any) -> bool:
    return bool(getattr(tensor, "is_cpu", False))


def _given(tensors: Tensors, options: tuple[Any, ...]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tensors of a call, as reference.py names them, and the settings of its spec. Raises an
    error with the argument for what does not fit."""
    scale, causal, window, softcap, _, *numbers = options
    extras = ("slopes", "sink", *arguments.SCALES)
    arguments.check_tensors(tensors, ARGUMENTS, "q", "k", "v", "startsq")
    given = {n: x for n, x in tensors.items() if x is not None and n not in extras}
    _check(given)
    slopes, sink = tensors["slopes"], tensors["sink"]
    scales = arguments.given_scales(tensors, numbers)
    narrow, own = arguments.scales_of(given, given["startsq"].shape[0] - 1, *scales)
    given |= own | arguments.extras_of(slopes, sink, causal, given["q"].shape[1])
    return given, arguments.settings_of(scale, causal, window, softcap) | narrow


def _check(given: Tensors) -> None:
    """Raise ValueError or TypeError, with the argument, for tensors that do not fit."""
    keys = "tokens, heads, dim" if "table" not in given else "pages, positions, heads, dim"
    arguments.check_axes(given, {"q": "tokens, heads, dim", "k": keys, "v": keys})
    if given["k"].shape[:-1] != given["v"].shape[:-1]:
        raise ValueError("k and v must have the same tokens and heads")
    arguments.check_widths(given["q"], "k", given["k"])
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


def kernel_tensors(given: Tensors) -> dict[str, Any]:
    """The tensors of a call as kernels take them, with heads before tokens."""
    named = {**given, **{name: given[name].transpose(-3, -2) for name in "qkv"}}
    if "lengthsk" in given and "startsk" in given:
        named["startsk"] = given["startsk"][: given["lengthsk"].shape[0]]
    return named


@dataclass(frozen=True)
class PackedCall(Asked):
    """A call for packed sequences, with gradients if they may be asked for."""

    given: Tensors
    deterministic: bool | None

    @property
    def trained(self) -> tuple[str, ...]:
        """The inputs whose gradients a backward gives."""
        extras = (n for n in arguments.FLAGS if n in self.given and self.given[n].requires_grad)
        return ("q", "k", "v", *extras)

    def run(self) -> Sequence[Any]:
        """O and LSE."""
        given = self.given
        if not torch.is_grad_enabled() or not any(x.requires_grad for x in given.values()):
            return super().run()
        if "kdescale" in given:
            raise NoKernel("keys and values of 8 bits have no gradient: use no_grad()")
        if "lengthsk" in given:
            text = "keys in a cache (seqused_k, block_table) have no gradient: use no_grad()"
            raise NoKernel(text)
        found: tuple[Any, Any] = _Attention.apply(self, *(given[name] for name in self.trained))
        return found

    def forward(self) -> Sequence[Any]:
        """O and LSE, without gradients."""
        return super().run()

    def backward(self, tensors: Tensors, names: tuple[str, ...], check: Check) -> dict[str, Any]:
        """The gradients of these inputs by their names, from tensors with the axes (heads, tokens,
        ...). By PyTorch's setting they are deterministic, if the call does not say."""
        exactly = is_deterministic(self.deterministic)
        wanted = replace(self.wanted, gradients=names, deterministic=exactly)
        return wanted.run({**self.tensors, **tensors}, self.sizes, check)


def _asked(tensors: Tensors, options: tuple[Any, ...], deterministic: bool | None) -> PackedCall:
    """What a kernel is made for and called with."""
    given, settings = _given(tensors, options)
    page = given["k"].shape[1] if "table" in given else None
    batch = Batch(lengths="lengthsk" in given, page=page)
    task = arguments.task(given, settings)
    sizes = dict(zip(("q_len", "kv_len"), options[4], strict=True))
    sizes["batch"] = given["startsq"].shape[0] - 1
    check = partial(reference.check, task.spec, given)
    return PackedCall(
        Wanted(task, batch), kernel_tensors(given), sizes, check, given, deterministic
    )


class _Attention(torch.autograd.Function):  # type: ignore[misc]
    """The kernel and its derived backward."""

    @staticmethod
    def forward(ctx: Any, call: PackedCall, *inputs: Any) -> tuple[Any, Any]:
        """O and LSE."""
        out, lse = call.forward()
        ctx.call, ctx.names = call, call.trained
        ctx.save_for_backward(out, lse, *inputs)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad: Any, _: Any) -> tuple[Any, ...]:
        """The gradients of the inputs."""
        call: PackedCall = ctx.call
        names: tuple[str, ...] = ctx.names
        out, lse, *inputs = ctx.saved_tensors
        given = {**dict(zip(names, inputs, strict=True)), "o": out}
        given["do"] = grad.contiguous()  # it may be a number that is expanded
        turned = {name: x.transpose(0, 1) if x.ndim > 1 else x for name, x in given.items()}
        spec = call.wanted.task.spec
        look = partial(reference.check_gradients, spec, call.given, names=names, grad=grad)
        found = call.backward({**turned, "lse": lse}, names, look)
        each = (found[f"d{name}"] for name in names)
        return None, *(x.transpose(0, 1) if x.ndim > 1 else x for x in each)
