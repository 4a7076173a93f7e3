"""NumPy kernels with right values and wrong conduct, or no regular end. All mean causal attention.

They write where they must not, work when their caller has gone on, raise, hang or crash.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
from numpy.lib.stride_tricks import as_strided

from flashwright.selftest.kernels.honest import Array, causal

TILE = 128

# --- what it does beside its work -------------------------------------------------------------


def scales_q_in_place(q: Array, k: Array, v: Array) -> Array:
    """Scale Q where it lies."""
    out = causal(q, k, v)
    q *= q.dtype.type(0.25)
    return out


def output_over_q(q: Array, k: Array, v: Array) -> Array:
    """Write O over Q."""
    q[:] = causal(q, k, v)
    return q


def writes_behind_v(q: Array, k: Array, v: Array) -> Array:
    """The overhang of a last tile is stored as well."""
    out = causal(q, k, v)
    if v.size:
        as_strided(v.reshape(-1), (v.size + 64,))[v.size :] = 0
    return out


def writes_before_q(q: Array, k: Array, v: Array) -> Array:
    """Store a few bytes in front of Q."""
    out = causal(q, k, v)
    if q.size:
        ctypes.memset(q.ctypes.data - 128, 0, 64)
    return out


def reads_behind_v(q: Array, k: Array, v: Array) -> Array:
    """The overhang of the last tile of V comes in with a weight of 0, and 0 times NaN is NaN."""
    out = causal(q, k, v)
    if v.size and k.shape[2] % TILE:
        flat = v.reshape(-1)
        behind = as_strided(flat[-1:], (2,), (flat.itemsize,))[1]
        out[-1, -1] += behind * 0
    return out


def in_a_thread(q: Array, k: Array, v: Array) -> Array:
    """Returns at once; the output comes when it comes."""
    out, inputs = np.zeros_like(q), [x.copy() for x in (q, k, v)]

    def work() -> None:
        time.sleep(0.005)
        out[:] = causal(*inputs)

    threading.Thread(target=work, daemon=True).start()
    return out


# --- how it ends ------------------------------------------------------------------------------


def scales_q_afterwards(q: Array, k: Array, v: Array) -> Array:
    """Change an input when the call is over."""

    def work() -> None:
        time.sleep(0.05)
        q[...] *= q.dtype.type(0.5)

    out = causal(q, k, v)
    threading.Thread(target=work, daemon=True).start()
    return out


def enormous(q: Array, k: Array, v: Array) -> Array:
    """More elements than any memory has, all of them the same."""
    return np.broadcast_to(np.zeros((), q.dtype), (10**9, 10**9))


def raises(q: Array, k: Array, v: Array) -> Array:
    """Refuse every problem."""
    raise ValueError("the head dim must be 128")


def raises_for_ragged(q: Array, k: Array, v: Array) -> Array:
    """Take whole tiles only."""
    if k.shape[2] % TILE:
        raise ValueError("the length must be a multiple of 128")
    return causal(q, k, v)


def exits_politely(q: Array, k: Array, v: Array) -> Array:
    """End by SystemExit, which no `except Exception` takes."""
    sys.exit(0)


def hangs(q: Array, k: Array, v: Array) -> Array:
    """Never return."""
    while True:
        time.sleep(0.01)


def hangs_deaf(q: Array, k: Array, v: Array) -> Array:
    """And does not hear any signal that can be refused."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)
    for _ in itertools.count():
        pass
    raise AssertionError


def crashes(q: Array, k: Array, v: Array) -> Array:
    """End by a segmentation fault."""
    os.kill(os.getpid(), signal.SIGSEGV)
    return q


def writes_to_null(q: Array, k: Array, v: Array) -> Array:
    """Store to address 8."""
    ctypes.memset(8, 0, 8)
    return q


def exits(q: Array, k: Array, v: Array) -> Array:
    """End the process with exit code 0."""
    os._exit(0)


def takes_memory(q: Array, k: Array, v: Array) -> Array:
    """Allocate until it is stopped."""
    kept = []
    while True:
        kept.append(np.ones(8 << 20))


def prints_a_lot(q: Array, k: Array, v: Array) -> Array:
    """No offence, only a nuisance."""
    for _ in range(200):
        print("x" * 10_000)
        print("y" * 1000, file=sys.stderr)
    return causal(q, k, v)


def leaves_children(q: Array, k: Array, v: Array) -> Array:
    """Forks one child that stays in the session and one that leaves it; writes down both."""
    note = Path("children")
    if not note.exists():
        note.write_text("")
        for detached in (False, True):
            if os.fork() == 0:
                _child(note, detached)
        while len(note.read_text().split()) < 2:
            time.sleep(0.01)
    return causal(q, k, v)


def _child(note: Path, detached: bool) -> None:
    if detached:
        os.setsid()
        if os.fork():
            os._exit(0)
    with open(note, "a") as file:
        print(os.getpid(), file=file)
    time.sleep(60)
    os._exit(0)
