"""Checks the confinement from inside, before untrusted code runs: each attempt must be refused.

It takes a millisecond. An attempt that succeeds has no lasting effect; it is only reported.
"""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Callable, Iterable, Iterator
from functools import partial

_INTERNET, _STREAM = 2, 1  # of a socket
_SEIZE, _INTERRUPT, _DETACH = 0x4206, 0x4207, 17  # ptrace
_ANY_CHILD = 0x40000000  # waitpid: also for a process that is no child
_OUTSIDE = ("/", "/etc", "/home", "/root")
_SCRATCH = ("/tmp", "/var/tmp", "/dev/shm")

Try = Callable[[], object]


def open_files(parent: int, allowed: Iterable[str]) -> Iterator[str]:
    """What Landlock should refuse and does not, as phrases for a message.

    `parent` is the judge's process, `allowed` are the files and folders that may be opened.
    """
    inside = [os.path.realpath(path) for path in allowed]
    tries: dict[str, Try] = {}
    if parent:  # 0 if the parent is in another pid namespace
        tries["the judge's memory"] = partial(_open, f"/proc/{parent}/mem", os.O_RDWR)
        tries["the judge's environment"] = partial(_open, f"/proc/{parent}/environ", os.O_RDONLY)
    for place in _OUTSIDE:
        if not _below(place, inside):
            tries[f"the folder {place}"] = partial(_open, place, os.O_RDONLY)
    for place in _SCRATCH:
        if not _below(place, inside):
            tries[f"a new file in {place}"] = partial(_open, place, os.O_TMPFILE | os.O_WRONLY)
    return _succeeding(tries)


def open_calls(parent: int) -> Iterator[str]:
    """What seccomp should refuse and does not, as phrases for a message."""
    tries: dict[str, Try] = {"a socket": _socket}
    if parent:  # kill(0) would signal a whole group
        tries["signals to the judge"] = partial(os.kill, parent, 0)
        tries["limits of the judge"] = partial(resource.prlimit, parent, resource.RLIMIT_CORE)
        tries["ptrace of the judge"] = partial(_trace, parent)
    return _succeeding(tries)


def _succeeding(tries: dict[str, Try]) -> Iterator[str]:
    for name, attempt in tries.items():
        try:
            attempt()
        except OSError:
            continue
        yield name


def _below(path: str, folders: Iterable[str]) -> bool:
    real = os.path.realpath(path)
    return any(folder == "/" or f"{real}/".startswith(f"{folder}/") for folder in folders)


def _open(path: str, how: int) -> None:
    os.close(os.open(path, how | os.O_CLOEXEC, 0o600))


def _socket() -> None:
    opened = ctypes.CDLL(None).socket(_INTERNET, _STREAM, 0)
    if opened < 0:
        raise OSError
    os.close(opened)


def _trace(process: int) -> None:
    """Seize a process and let it go again."""
    system = ctypes.CDLL(None)
    system.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
    if system.ptrace(_SEIZE, process, None, None) < 0:
        raise OSError
    system.ptrace(_INTERRUPT, process, None, None)
    os.waitpid(process, _ANY_CHILD)
    system.ptrace(_DETACH, process, None, None)
