"""What a confined process gives up before it becomes somebody's code.

System calls (seccomp), capabilities, and the life without its parent. No privilege is needed for
this, and none can be gained afterwards. Where the system has no seccomp, the caller is told.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import sys
import threading

from flashwright.confine.filter import AUDIT, Party, program

_PDEATHSIG, _GET_DUMPABLE, _SET_DUMPABLE, _NO_NEW_PRIVS = 1, 3, 4, 38  # prctl
_DROP, _AMBIENT, _CLEAR_ALL = 24, 47, 4  # of capabilities
_CAPSET = {"x86_64": 126, "aarch64": 91}
_CAPABILITIES_V3, _CAPABILITIES = 0x20080522, 64
_SECCOMP = {"x86_64": 317, "aarch64": 277}
_SET_FILTER, _GET_ACTION, _ALL_THREADS, _KILL_PROCESS = 1, 2, 1, 0x80000000


class _Instruction(ctypes.Structure):
    _fields_ = (
        ("code", ctypes.c_uint16),
        ("yes", ctypes.c_uint8),
        ("no", ctypes.c_uint8),
        ("value", ctypes.c_uint32),
    )


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_uint16), ("filter", ctypes.POINTER(_Instruction)))


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("process", ctypes.c_int))


def die_with_parent() -> None:
    """Be killed when the judge is gone: a hung kernel must not outlive it."""
    ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)


# --- capabilities -----------------------------------------------------------------------------


def drop_capabilities() -> None:
    """What is executed from now on has none, even as root, and sees into no other process.

    Root's own capabilities come back when it executes something, unless they are out of bounds.
    """
    system = ctypes.CDLL(None, use_errno=True)
    for capability in range(_CAPABILITIES):
        system.prctl(_DROP, capability, 0, 0, 0)
    system.prctl(_AMBIENT, _CLEAR_ALL, 0, 0, 0)
    number = _CAPSET.get(platform.machine())
    if number is not None:
        header, none = _Header(_CAPABILITIES_V3, 0), (ctypes.c_uint32 * 6)()
        system.syscall(ctypes.c_long(number), ctypes.byref(header), ctypes.byref(none))


# --- the judge --------------------------------------------------------------------------------


class Hidden:
    """This process cannot be looked into by others of the same user while somebody asks for it.

    Linux then refuses its memory, its environment and its files in /proc to all but root, and
    writes no core.
    """

    def __init__(self) -> None:
        self._lock, self._askers, self._before = threading.Lock(), 0, 1

    def begin(self) -> None:
        """One more asks for it."""
        with self._lock:
            self._askers += 1
            if self._askers == 1 and sys.platform == "linux":
                system = ctypes.CDLL(None)
                self._before = int(system.prctl(_GET_DUMPABLE, 0, 0, 0, 0))
                system.prctl(_SET_DUMPABLE, 0, 0, 0, 0)

    def end(self) -> None:
        """One asks for it no more; behind the last one all is as it was."""
        with self._lock:
            self._askers -= 1
            # Only a program that root alone may read has 2, and nobody can ask for that.
            if self._askers == 0 and self._before == 1 and sys.platform == "linux":
                ctypes.CDLL(None).prctl(_SET_DUMPABLE, 1, 0, 0, 0)


hidden = Hidden()
"""Of this process."""


# --- system calls -----------------------------------------------------------------------------


def available() -> bool:
    """Whether this system and machine have the filter."""
    number = _SECCOMP.get(platform.machine()) if sys.platform == "linux" else None
    if number is None:
        return False
    asked = ctypes.c_uint32(_KILL_PROCESS)
    return not _seccomp(number, _GET_ACTION, 0, ctypes.byref(asked))


def seal(judge: int, scoped: bool) -> bool:
    """Allow this process, in all its threads, the calls of filter.py and no others.

    It is the first of its group. `scoped` says whether Landlock keeps its signals in. Returns
    whether the system does it.
    """
    machine = platform.machine()
    if machine not in AUDIT:
        return False
    made = program(machine, Party(os.getpid(), judge, os.getpgid(judge), scoped))
    array = (_Instruction * len(made))(*(_Instruction(*i) for i in made))
    if ctypes.CDLL(None).prctl(_NO_NEW_PRIVS, 1, 0, 0, 0):
        return False
    given = _Program(len(made), array)
    return not _seccomp(_SECCOMP[machine], _SET_FILTER, _ALL_THREADS, ctypes.byref(given))


def _seccomp(number: int, operation: int, flags: int, given: object) -> int:
    call = ctypes.CDLL(None, use_errno=True).syscall
    return int(call(ctypes.c_long(number), ctypes.c_uint(operation), ctypes.c_uint(flags), given))
