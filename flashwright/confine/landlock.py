"""Which files a process can open at all: Landlock, which needs no privilege and cannot be undone.

Where the system has none (Linux before 5.13, or switched off), nothing is refused, and the caller
is told.
"""

from __future__ import annotations

import ctypes
import os
import stat
from collections.abc import Iterable

SYSTEM = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/opt", "/nix/store", "/gnu/store"),
    *("/etc/alternatives", "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d"),
)
"""Programs and libraries, which are nobody's own."""
_CREATE, _ADD, _RESTRICT = 444, 445, 446  # system calls, the same numbers on every machine
_VERSION, _BENEATH, _NO_NEW_PRIVS = 1, 1, 38
_EXECUTE, _WRITE, _READ, _LIST = 1, 2, 4, 8
_TRUNCATE, _DEVICE = 1 << 14, 1 << 15
_READING = _EXECUTE | _READ | _LIST
_OF_A_FILE = _EXECUTE | _WRITE | _READ | _TRUNCATE | _DEVICE
# How many rights of files the system knows by version: execute to make_sym, refer, truncate, and
# ioctl on devices. What it does not know must not be asked for.
_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}
_NEWEST = 16


class _Ruleset(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64),)


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("folder", ctypes.c_int32))


def available() -> bool:
    """Whether the system does it at all."""
    return _version(ctypes.CDLL(None, use_errno=True)) >= 1


def restrict(readable: Iterable[str], writable: Iterable[str]) -> bool:
    """From now on this process and its children open these files and folders only.

    What is `readable` may be executed too. Paths that are not there are left out. Returns whether
    the system does it.
    """
    system = ctypes.CDLL(None, use_errno=True)
    version = _version(system)
    if version < 1:
        return False
    every = (1 << _RIGHTS.get(version, _NEWEST)) - 1
    rules = _Ruleset(every)
    size = ctypes.c_size_t(ctypes.sizeof(rules))
    ruleset = system.syscall(_CREATE, ctypes.byref(rules), size, ctypes.c_uint32(0))
    if ruleset < 0:
        return False
    try:
        for path in readable:
            _allow(system, ruleset, path, _READING & every)
        for path in writable:
            _allow(system, ruleset, path, every)
        if system.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0):
            return False
        return not system.syscall(_RESTRICT, ctypes.c_int(ruleset), ctypes.c_uint32(0))
    finally:
        os.close(ruleset)


def _version(system: ctypes.CDLL) -> int:
    return int(system.syscall(_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint32(_VERSION)))


def _allow(system: ctypes.CDLL, ruleset: int, path: str, rights: int) -> None:
    try:
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        if not stat.S_ISDIR(os.fstat(opened).st_mode):
            rights &= _OF_A_FILE
        rule = _Beneath(rights, opened)
        arguments = (ctypes.c_int(_BENEATH), ctypes.byref(rule), ctypes.c_uint32(0))
        system.syscall(_ADD, ctypes.c_int(ruleset), *arguments)
    finally:
        os.close(opened)
