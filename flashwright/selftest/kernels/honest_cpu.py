"""Honest NumPy kernels with unusual habits. All of them mean causal attention."""

from __future__ import annotations

import mmap
import os
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np

from flashwright.selftest.kernels.honest import Array, attention, causal

_kept: dict[Any, Array] = {}


def transposed_output(q: Array, k: Array, v: Array) -> Array:
    """O lies as (batch, length, heads, dim), and is returned as a view in the usual order."""
    return np.ascontiguousarray(causal(q, k, v).swapaxes(1, 2)).swapaxes(1, 2)


def padded_output(q: Array, k: Array, v: Array) -> Array:
    """Rows are padded to a whole tile, and the output is a slice of that."""
    rows = -(-q.shape[2] // 64) * 64
    out: Array = np.zeros((*q.shape[:2], rows, q.shape[3]), q.dtype)
    out[:, :, : q.shape[2]] = causal(q, k, v)
    return out[:, :, : q.shape[2]]


def workspace(q: Array, k: Array, v: Array) -> Array:
    """Its output buffer is kept from call to call, and written anew in each."""
    out = _kept.setdefault(q.shape, np.empty_like(q))
    out[:] = causal(q, k, v)
    return out


def threads(q: Array, k: Array, v: Array) -> Array:
    """One thread for each batch; it waits for all of them."""
    out = np.empty_like(q)

    def work(n: int) -> None:
        out[n] = causal(q[n : n + 1], k[n : n + 1], v[n : n + 1])[0]

    started = [threading.Thread(target=work, args=(n,)) for n in range(q.shape[0])]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    return out


def with_lse(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
    """Return O and LSE."""
    return attention(q, k, v, causal=True)


def two_parts(q: Array, k: Array, v: Array) -> Array:
    """Split-KV: two halves of the keys, combined by their LSE."""
    half = k.shape[2] // 2
    if not half:
        return causal(q, k, v)
    parts = [
        attention(
            q, k[:, :, :half], v[:, :, :half], causal=True, ahead=k.shape[2] - half, out=np.float32
        ),
        attention(q, k[:, :, half:], v[:, :, half:], causal=True, out=np.float32),
    ]
    sums = np.stack([lse for _, lse in parts])
    top = sums.max(axis=0)
    weights = np.exp(sums - np.where(top == -np.inf, 0, top))
    total = weights.sum(axis=0)
    out: Array = weights[0][..., None] * parts[0][0] + weights[1][..., None] * parts[1][0]
    return np.divide(out, np.where(total == 0, 1, total)[..., None]).astype(q.dtype)


def takes_its_own_head_dim_only(q: Array, k: Array, v: Array) -> Array:
    """Raise where the problem is outside of the spec that it was written for."""
    if q.shape[3] != 16:
        raise ValueError("the head dim must be 16")
    return causal(q, k, v)


def uses_the_system(q: Array, k: Array, v: Array) -> Array:
    """Temporary memory, a pair of sockets, a child process and a file: all within its process."""
    memory = os.memfd_create("workspace")
    os.ftruncate(memory, mmap.PAGESIZE)
    mmap.mmap(memory, mmap.PAGESIZE)[:4] = b"fast"
    os.close(memory)
    for end in socket.socketpair():
        end.close()
    subprocess.run([sys.executable, "-c", ""], check=True)
    Path("cache").write_text("x")
    return causal(q, k, v)


def compiles(q: Array, k: Array, v: Array) -> Array:
    """Run the C compiler where there is one, as Triton does."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is not None and not Path("one.so").exists():
        Path("one.c").write_text("int one(void) { return 1; }\n")
        subprocess.run([compiler, "-shared", "-fPIC", "-o", "one.so", "one.c"], check=True)
    return causal(q, k, v)
