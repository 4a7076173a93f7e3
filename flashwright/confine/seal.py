"""What a confined process gives up before it executes untrusted code.

It gives up system calls (seccomp) and capabilities, and dies with its parent. This needs no
privilege, and none can be gained afterwards. `seal` returns False on a system without seccomp.
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
    """Ask to be killed when the parent dies, so that a hung kernel does not outlive the judge."""
    ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)


# --- capabilities -----------------------------------------------------------------------------


def drop_capabilities() -> None:
    """Drop all capabilities, even as root, for this process and everything it executes.

    Root regains capabilities on exec unless they are removed from the bounding set.
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
    """Hides this process from other processes of the same user, while at least one caller asks.

    Linux then refuses its memory, its environment and its files in /proc to all but root, and
    writes no core.
    """

    def __init__(self) -> None:
        self._lock, self._askers, self._before = threading.Lock(), 0, 1

    def begin(self) -> None:
        """Hide the process, for one more caller."""
        with self._lock:
            self._askers += 1
            if self._askers == 1 and sys.platform == "linux":
                system = ctypes.CDLL(None)
                self._before = int(system.prctl(_GET_DUMPABLE, 0, 0, 0, 0))
                system.prctl(_SET_DUMPABLE, 0, 0, 0, 0)

    def end(self) -> None:
        """End one caller's request. The last one restores the previous state."""
        with self._lock:
            self._askers -= 1
            # A program that only root may read has 2, which prctl cannot set.
            if self._askers == 0 and self._before == 1 and sys.platform == "linux":
                ctypes.CDLL(None).prctl(_SET_DUMPABLE, 1, 0, 0, 0)


hidden = Hidden()
"""The instance of this process."""


# --- system calls -----------------------------------------------------------------------------


def available() -> bool:
    """Whether this system has seccomp and this machine a filter."""
    number = _SECCOMP.get(platform.machine()) if sys.platform == "linux" else None
    if number is None:
        return False
    asked = ctypes.c_uint32(_KILL_PROCESS)
    return not _seccomp(number, _GET_ACTION, 0, ctypes.byref(asked))


def seal(judge: int, scoped: bool) -> bool:
    """Restrict this process, in all its threads, to the calls that filter.py allows.

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
