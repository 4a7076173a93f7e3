"""Landlock: restricts the files that a process can open. It needs no privilege and is permanent.

A restricted process cannot inspect one outside its domain. Newer systems also restrict its signals,
abstract sockets and TCP. On a system without Landlock (Linux before 5.13, or disabled), `restrict`
refuses nothing and returns False.
"""

from __future__ import annotations

import ctypes
import os
import stat
import sys
from collections.abc import Iterable

PROGRAMS = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/nix/store", "/gnu/store")
LOADER = ("/etc/alternatives", "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d")
"""The files through which programs find each other and their libraries."""
SYSTEM = ("/usr", "/opt", *PROGRAMS, *LOADER)
"""The folders of programs and libraries, without any user's files."""
_CREATE, _ADD, _RESTRICT = 444, 445, 446  # system calls, the same numbers on every machine
_VERSION, _BENEATH, _NO_NEW_PRIVS = 1, 1, 38
_EXECUTE, _WRITE, _READ, _LIST = 1, 2, 4, 8
_TRUNCATE, _DEVICE = 1 << 14, 1 << 15
_READING = _EXECUTE | _READ | _LIST
_OF_A_FILE = _EXECUTE | _WRITE | _READ | _TRUNCATE | _DEVICE
# The number of file rights by Landlock version: execute to make_sym, refer, truncate, and ioctl on
# devices. A request for an unknown right fails.
_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}
_NEWEST = 16
_TCP, _SCOPES = 3, 3  # bind and connect; abstract sockets and signals
_SINCE_TCP, _SINCE_SCOPES = 4, 6


class _Ruleset(ctypes.Structure):
    _fields_ = (
        ("files", ctypes.c_uint64),
        ("network", ctypes.c_uint64),
        ("scopes", ctypes.c_uint64),
    )


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("folder", ctypes.c_int32))


def available() -> bool:
    """Whether the system has Landlock."""
    return sys.platform == "linux" and _version(ctypes.CDLL(None, use_errno=True)) >= 1


def keeps_signals() -> bool:
    """Whether a process that is restricted can send signals to its own domain only."""
    return _version(ctypes.CDLL(None, use_errno=True)) >= _SINCE_SCOPES


def restrict(readable: Iterable[str], writable: Iterable[str], *, network: bool = False) -> bool:
    """Restrict this process and its children to these files and folders.

    `readable` files may be executed too. Missing paths are ignored. TCP is refused unless `network`
    is given. Signals to others and their abstract sockets are refused, if the system supports it.
    Returns whether the system has Landlock.
    """
    system = ctypes.CDLL(None, use_errno=True)
    version = _version(system)
    if version < 1:
        return False
    every = (1 << _RIGHTS.get(version, _NEWEST)) - 1
    tcp = _TCP if version >= _SINCE_TCP and not network else 0
    rules = _Ruleset(every, tcp, _SCOPES if version >= _SINCE_SCOPES else 0)
    size = ctypes.c_size_t(_size(version))
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


def _size(version: int) -> int:
    """The size of the ruleset struct that this version accepts."""
    known = 3 if version >= _SINCE_SCOPES else 2 if version >= _SINCE_TCP else 1
    return known * ctypes.sizeof(ctypes.c_uint64)


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
