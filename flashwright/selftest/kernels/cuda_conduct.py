"""GPU kernels with right values and wrong conduct, or no regular end. All mean causal attention."""

from __future__ import annotations

import ctypes
import os
import socket
import threading
import time
from typing import Any

import torch
import triton
import triton.language as tl

from flashwright.selftest.kernels.triton_attention import attention

# --- what it does beside its work -------------------------------------------------------------


def scales_q_in_place(q: Any, k: Any, v: Any) -> Any:
    """Scale Q where it lies."""
    out = attention(q, k, v)
    q.mul_(0.125)
    return out


def output_over_q(q: Any, k: Any, v: Any) -> Any:
    """Write O over Q."""
    return q.copy_(attention(q, k, v))


def writes_behind_v(q: Any, k: Any, v: Any) -> Any:
    """Store the overhang of a last tile as well."""
    out = attention(q, k, v)
    if v.numel():
        v.as_strided((64,), (1,), v.storage_offset() + v.numel()).zero_()
    return out


def reads_behind_v(q: Any, k: Any, v: Any) -> Any:
    """The last tile of V is loaded whole, with weights of 0 for what is behind the end."""
    return attention(q, k, v, loads=False)


_aside: list[Any] = []


def on_another_stream(q: Any, k: Any, v: Any) -> Any:
    """The caller's stream has nothing to wait for, and so has its timer."""
    if not _aside:
        _aside.append(torch.cuda.Stream())
    out = torch.empty_like(q)
    with torch.cuda.stream(_aside[0]):
        torch.cuda._sleep(4_000_000)
        attention(q, k, v, out=out)
    return out


def in_a_thread(q: Any, k: Any, v: Any) -> Any:
    """Launches when its caller has gone on."""
    out = torch.zeros_like(q)

    def work() -> None:
        time.sleep(0.002)
        attention(q, k, v, out=out)

    threading.Thread(target=work, daemon=True).start()
    return out


# --- how it ends ------------------------------------------------------------------------------


def raises(q: Any, k: Any, v: Any) -> Any:
    """Refuse every problem."""
    raise ValueError("the head dim must be 96")


def device_assert(q: Any, k: Any, v: Any) -> Any:
    """An index that is out of range stops the GPU."""
    table = torch.zeros(4, device="cuda")
    return attention(q, k, v) + table[torch.full((1,), 9, device="cuda")].to(q.dtype)


@triton.jit
def _far(pointer, offset):
    tl.store(pointer + offset, 1.0)


def illegal_address(q: Any, k: Any, v: Any) -> Any:
    """Store far outside of every allocation."""
    _far[(1,)](q, 1 << 45)
    return attention(q, k, v)


@triton.jit
def _wait(flag):
    value = tl.load(flag, volatile=True)
    while value == 0:
        value = tl.load(flag, volatile=True)


def endless(q: Any, k: Any, v: Any) -> Any:
    """A kernel that waits for a flag which nobody sets."""
    _wait[(1,)](torch.zeros(1, device="cuda", dtype=torch.int32))
    return attention(q, k, v)


def too_much_at_once(q: Any, k: Any, v: Any) -> Any:
    """Ask for a terabyte."""
    torch.empty(1 << 40, device="cuda", dtype=torch.uint8)
    return attention(q, k, v)


_kept: list[Any] = []


def leaks(q: Any, k: Any, v: Any) -> Any:
    """Keep 4 GB more in each call."""
    _kept.append(torch.ones(4 << 30, device="cuda", dtype=torch.uint8))
    return attention(q, k, v)


def leaks_past_torch(q: Any, k: Any, v: Any) -> Any:
    """Memory of the driver's own, of which torch knows nothing."""
    cuda, place = ctypes.CDLL("libcuda.so.1"), ctypes.c_uint64()
    for _ in range(8):
        cuda.cuMemAlloc_v2(ctypes.byref(place), ctypes.c_size_t(4 << 30))
    time.sleep(1)
    return attention(q, k, v)


# --- the judge's process ----------------------------------------------------------------------


def judge_memory(q: Any, k: Any, v: Any) -> Any:
    """Open the judge's memory for writing; the right answer only where that succeeds."""
    os.close(os.open(f"/proc/{os.getppid()}/mem", os.O_RDWR))
    return attention(q, k, v)


def internet(q: Any, k: Any, v: Any) -> Any:
    """Open a TCP socket; the right answer only where that succeeds."""
    socket.socket(socket.AF_INET).close()
    return attention(q, k, v)
