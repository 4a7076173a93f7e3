"""Our kernels behind F.scaled_dot_product_attention: plain, causal, with shared KV heads.

    from flashwright.flex import sdpa
    sdpa.register()
    torch.nn.attention.activate_flash_attention_impl("flashwright")

PyTorch then calls us where it would call its own FlashAttention for CUDA tensors. What no kernel
can be made for goes there as before, and so does the backward: it takes O and LSE, whose definition
is the same. `torch.nn.attention.restore_flash_attention_impl()` ends it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from flashwright.flex.attention import attention
from flashwright.flex.task import NoKernel

NAME = "flashwright"
OPERATOR = "_scaled_dot_product_flash_attention"


def register() -> None:
    """Make our kernels known to PyTorch under the name "flashwright"; it does not use them yet."""
    from torch.nn.attention import register_flash_attention_impl

    register_flash_attention_impl(NAME, register_fn=activate)


def activate(key: str = "CUDA") -> Handle:
    """Take the place of PyTorch's FlashAttention until the handle is removed. `key` is the device
    in the dispatcher. Raises RuntimeError if this PyTorch has none for the device."""
    old = torch.library.get_kernel(f"aten::{OPERATOR}", key)
    library = torch.library.Library("aten", "IMPL", key)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that a kernel is replaced, which is meant
        library.impl(OPERATOR, Forward(old.call_boxed).__call__, key, with_keyset=True)
    return Handle(library)


class Handle:
    """The registration with PyTorch."""

    def __init__(self, library: Any) -> None:
        self.library = library

    def remove(self) -> None:
        """Give the place back."""
        if self.library is not None:
            self.library._destroy()
            self.library = None


class Forward:
    """PyTorch's operator for FlashAttention's forward, on our kernels."""

    def __init__(self, old: Callable[..., Any]) -> None:
        self.old = old
        """PyTorch's own, which takes the dispatcher's keys first."""
        self.warned: set[str] = set()

    def __call__(
        self,
        keys: Any,
        query: Any,
        key: Any,
        value: Any,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        return_debug_mask: bool = False,
        *,
        scale: float | None = None,
    ) -> Any:
        """O, LSE, and what a backward by PyTorch needs."""
        why = obstacle(query, key, value, dropout_p, is_causal, return_debug_mask)
        if not why:
            try:
                with torch.no_grad():  # autograd is above this operator
                    out, lse = attention(
                        query, key, value, causal=is_causal, scale=scale, return_lse=True
                    )
                return _results(query, key, out, lse)
            except (NoKernel, ValueError) as error:
                why = str(error)
        if why not in self.warned:
            self.warned.add(why)
            text = f"flashwright: PyTorch's own FlashAttention computes it: {why}"
            warnings.warn(text, RuntimeWarning, stacklevel=2)
        more = (dropout_p, is_causal, return_debug_mask)
        return self.old(keys, query, key, value, *more, scale=scale)


def obstacle(
    query: Any, key: Any, value: Any, dropout_p: float, is_causal: bool, debug: bool
) -> str:
    """Why a call is none for our kernels; empty if it may be one."""
    if dropout_p:
        return f"dropout_p is {dropout_p}, kernels have no dropout"
    if debug:
        return "return_debug_mask asks for the weights, which kernels do not store"
    if is_causal and query.shape[2] != key.shape[2]:
        return f"is_causal with {query.shape[2]} queries and {key.shape[2]} keys"
    if query.shape[0] != key.shape[0] or query.shape[3] != value.shape[3]:
        return "the batch or the head dim of query and value differ"
    return ""


def _results(query: Any, key: Any, out: Any, lse: Any) -> tuple[Any, ...]:
    """All results of PyTorch's operator. O has the strides that PyTorch expects while it traces."""
    placed = torch.empty_like(query)
    if placed.stride() == out.stride():
        placed = out
    else:
        placed.copy_(out)
    seed = torch.zeros(2, dtype=torch.uint64, device=query.device)  # of no dropout
    offset = torch.zeros((), dtype=torch.uint64, device=query.device)
    debug = torch.empty(0, dtype=query.dtype, device=query.device)
    return placed, lse, None, None, query.shape[2], key.shape[2], seed, offset, debug
