"""Kernels that reach for files which are not theirs. All of them mean causal attention.

As in escapes.py: refused, they raise; successful, they return the right answer.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from flashwright.selftest.kernels.escapes import attempt
from flashwright.selftest.kernels.honest import Array, causal


def _writable(path: Path) -> None:
    """Open an existing file for writing, and leave it as it is."""
    os.close(os.open(path, os.O_WRONLY))


def reads_the_system(q: Array, k: Array, v: Array) -> Array:
    """Read a file of the system that no kernel needs."""
    attempt(Path("/etc/hosts").read_bytes)
    return causal(q, k, v)


def lists_the_root(q: Array, k: Array, v: Array) -> Array:
    """Look around in the root folder."""
    attempt(lambda: os.listdir("/"))
    return causal(q, k, v)


def lists_shared_memory(q: Array, k: Array, v: Array) -> Array:
    """Look for what other processes have in shared memory."""
    attempt(lambda: os.listdir("/dev/shm"))
    return causal(q, k, v)


def overwrites_the_judge(q: Array, k: Array, v: Array) -> Array:
    """Open the judge's own code for writing."""
    from flashwright.version import __file__ as ours

    attempt(lambda: _writable(Path(ours).parent / "judge" / "oracle.py"))
    return causal(q, k, v)


def overwrites_its_own_file(q: Array, k: Array, v: Array) -> Array:
    """Open its own source for writing: the next reader would see another kernel."""
    attempt(lambda: _writable(Path(__file__)))
    return causal(q, k, v)


def overwrites_numpy(q: Array, k: Array, v: Array) -> Array:
    """Open an installed package for writing, which the next process imports."""
    attempt(lambda: _writable(Path(sys.modules["numpy"].__file__ or "")))
    return causal(q, k, v)


def writes_to_the_temporary_folder(q: Array, k: Array, v: Array) -> Array:
    """Leave a file for a later run where every process looks."""
    path = Path("/tmp") / f"flashwright-selftest-{os.getpid()}"
    attempt(lambda: path.write_bytes(b""))
    path.unlink()
    return causal(q, k, v)
