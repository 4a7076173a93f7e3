"""Outputs that are computed when they are looked at, after the call and its timer have ended.

All of them mean causal attention, by a kernel of their own.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from flashwright.selftest.kernels.triton_attention import attention


class ByFunction(torch.Tensor):  # type: ignore[misc]
    """A tensor that computes its values when a function of torch is given it."""

    todo: Any = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute what is outstanding, then call the function."""
        with torch._C.DisableTorchFunctionSubclass():
            for one in args:
                if isinstance(one, ByFunction) and one.todo is not None:
                    todo, one.todo = one.todo, None
                    todo(one.as_subclass(torch.Tensor))
            return func(*args, **(kwargs or {}))


class ByDispatch(torch.Tensor):  # type: ignore[misc]
    """A tensor without memory: an operator that is given it first computes its values."""

    inner: Any
    todo: Any
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: Any, todo: Any) -> Any:
        """A wrapper with the shape and type of `inner`."""
        made = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )
        made.inner, made.todo = inner, todo
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Unwrap, compute, and call the operator."""
        return func(*(_values(one) for one in args), **(kwargs or {}))


def _values(one: Any) -> Any:
    if not isinstance(one, ByDispatch):
        return one
    if one.todo is not None:
        todo, one.todo = one.todo, None
        todo(one.inner)
    return one.inner


def by_function(q: Any, k: Any, v: Any) -> Any:
    """Return a tensor whose __torch_function__ does the work."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device).as_subclass(ByFunction)
    out.todo = lambda into: attention(q, k, v, out=into)
    return out


def by_dispatch(q: Any, k: Any, v: Any) -> Any:
    """Return a tensor whose __torch_dispatch__ does the work."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    return ByDispatch(out, lambda into: attention(q, k, v, out=into))


_half: dict[Any, float] = {}


def half_the_time(q: Any, k: Any, v: Any) -> Any:
    """While it is timed it copies its inputs and waits for half of an honest call's time."""
    if q.shape not in _half:
        attention(q, k, v)
        torch.cuda.synchronize()
        start = time.perf_counter()
        attention(q, k, v)
        torch.cuda.synchronize()
        _half[q.shape] = (time.perf_counter() - start) / 2
    copies = [x.clone() for x in (q, k, v)]
    torch.cuda._sleep(int(_half[q.shape] * 1.5e9))  # cycles
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device).as_subclass(ByFunction)
    out.todo = lambda into: attention(*copies, out=into)
    return out


class OneHead(torch.Tensor):  # type: ignore[misc]
    """A tensor that computes the head that is asked for, and no other."""

    given: Any = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute on the first index, by batch and head."""
        with torch._C.DisableTorchFunctionSubclass():
            if func is torch.Tensor.__getitem__ and isinstance(args[1], tuple):
                (batch, head), (q, k, v) = args[1][:2], args[0].given
                shared = head // (q.shape[1] // k.shape[1])
                parts = q[batch, head], k[batch, shared], v[batch, shared]
                return attention(*(x[None, None] for x in parts))[0, 0]
            return func(*args, **(kwargs or {}))


def fetched_head_only(q: Any, k: Any, v: Any) -> Any:
    """Once it knows that one head of a timed call is looked at, it computes only that one."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device).as_subclass(OneHead)
    out.given = tuple(x.clone() for x in (q, k, v))
    return out
