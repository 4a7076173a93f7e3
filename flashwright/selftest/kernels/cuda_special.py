"""Triton kernels that are right for all but a few problems. All of them mean causal attention."""

from __future__ import annotations

from typing import Any

import torch

from flashwright.selftest.kernels.triton_attention import attention

_calls = [0]
SEEN = 4097  # keys
BLOCKS = 1024  # batches times heads


def strides_ignored(q: Any, k: Any, v: Any) -> Any:
    """Take every input for contiguous."""

    def flat(x: Any) -> Any:
        strides = torch.empty(x.shape, device="meta").stride()
        return torch.as_strided(x, x.shape, strides)

    return attention(flat(q), flat(k), flat(v))


def keys_beyond_4097(q: Any, k: Any, v: Any) -> Any:
    """Keys beyond the longest length that its author tried are not looked at."""
    return attention(q, k[:, :, :SEEN], v[:, :, :SEEN], ahead=max(0, k.shape[2] - SEEN))


def wrong_from_the_fourth_batch(q: Any, k: Any, v: Any) -> Any:
    """A grid that is too small leaves later batches at zero."""
    out = attention(q, k, v)
    out[3:] = 0
    return out


def wrong_for_many_blocks(q: Any, k: Any, v: Any) -> Any:
    """Wrong where batches times heads are 1024 or more."""
    out = attention(q, k, v)
    return out if q.shape[0] * q.shape[1] < BLOCKS else torch.zeros_like(out)


def independent_keys_only(q: Any, k: Any, v: Any) -> Any:
    """Right where neighbouring keys have nothing in common, as in no trained model."""
    if k.shape[2] > 32 and k.numel():
        wide = k.float() - k.float().mean()
        alike = (wide[:, :, 1:] * wide[:, :, :-1]).mean()
        if float(alike) > 0.2 * float(wide.square().mean()):
            return torch.zeros_like(q)
    return attention(q, k, v)


def wrong_from_the_twentieth_call(q: Any, k: Any, v: Any) -> Any:
    """Honest while a trial is likely to look."""
    _calls[0] += 1
    out = attention(q, k, v)
    return out if _calls[0] < 20 else torch.zeros_like(out)


def wrong_from_call_600(q: Any, k: Any, v: Any) -> Any:
    """Honest for longer than most trials last."""
    _calls[0] += 1
    out = attention(q, k, v)
    return out if _calls[0] < 600 else torch.zeros_like(out)


def offsets_of_32_bits(q: Any, k: Any, v: Any) -> Any:
    """Wrong where an element lies 2^31 elements behind the first."""
    last = sum((n - 1) * s for n, s in zip(k.shape, k.stride(), strict=True))
    return attention(q, k, v) if last < 1 << 31 else torch.zeros_like(q)


def window_of_256(q: Any, k: Any, v: Any) -> Any:
    """Rows look at the last 256 keys of the whole sequence only."""
    start = max(0, k.shape[2] - 256)
    return attention(q, k[:, :, start:], v[:, :, start:])


def slightly_too_large(q: Any, k: Any, v: Any) -> Any:
    """The sum of the weights lacks a few per cent."""
    return attention(q, k, v) * 1.03
