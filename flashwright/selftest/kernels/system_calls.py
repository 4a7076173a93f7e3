"""System calls by name, for kernels that try what Python has no function for."""

from __future__ import annotations

import ctypes
import os
import platform

from flashwright.confine.calls import ALLOWED, REFUSED, RULED

_TABLE = {**ALLOWED, **RULED, **REFUSED}


def call(name: str, *arguments: int | bytes) -> int:
    """What the system call returns; OSError where it fails or this machine has no such call."""
    libc = ctypes.CDLL(None, use_errno=True)
    number = _TABLE[name].get(platform.machine(), -1)
    given = [a if isinstance(a, bytes) else ctypes.c_long(a) for a in arguments]
    ctypes.set_errno(0)
    done = int(libc.syscall(ctypes.c_long(number), *given))
    if done < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return done
