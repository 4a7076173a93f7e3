"""What an untrusted process may not do to others: a seccomp filter, for itself and its children.

Such a process is a candidate's, or the compiler's with code that a model wrote. It can reach
neither the judge (signals, ptrace, its memory) nor the network. No privilege is needed for this,
and none can be gained afterwards. Where the system has no seccomp, nothing is sealed, and the
caller is told.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import signal
import socket
from collections.abc import Sequence

_PDEATHSIG, _NO_NEW_PRIVS, _SET_SECCOMP, _MODE_FILTER = 1, 38, 22, 2  # prctl
_DROP, _INSPECTING = 24, (19, 21, 38)  # capabilities: sys_ptrace, sys_admin, perfmon
_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06  # BPF: ld abs word, jeq, ret
_ALLOW, _PRETEND = 0x7FFF0000, 0x00050000  # the latter: nothing happens, and that is success
_REFUSE = _PRETEND | errno.EPERM
_NUMBER, _ARCH, _FIRST = 0, 4, 16  # offsets in seccomp_data; the low half of the first argument
_SYSTEMS = {  # the machine: its audit number, and the numbers of its system calls
    "x86_64": (
        0xC000003E,
        {"kill": 62, "tkill": 200, "tgkill": 234, "ptrace": 101, "socket": 41}
        | {"setsid": 112, "setpgid": 109}
        | {"process_vm_readv": 310, "process_vm_writev": 311},
    ),
    "aarch64": (
        0xC00000B7,
        {"kill": 129, "tkill": 130, "tgkill": 131, "ptrace": 117, "socket": 198}
        | {"setsid": 157, "setpgid": 154}
        | {"process_vm_readv": 270, "process_vm_writev": 271},
    ),
}
_EVERYWHERE = {"pidfd_send_signal": 424, "pidfd_getfd": 438}


class _Instruction(ctypes.Structure):
    _fields_ = (
        ("code", ctypes.c_uint16),
        ("yes", ctypes.c_uint8),
        ("no", ctypes.c_uint8),
        ("value", ctypes.c_uint32),
    )


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_uint16), ("filter", ctypes.POINTER(_Instruction)))


def die_with_parent() -> None:
    """Be killed when the judge is gone: a hung kernel must not outlive it."""
    ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)


def stop_inspecting() -> None:
    """What is executed from now on sees into no other process, even as root.

    Linux shows the environment of all, the judge's keys too, to whoever may watch performance.
    """
    for capability in _INSPECTING:
        ctypes.CDLL(None).prctl(_DROP, capability, 0, 0, 0)


def seal(judge: int) -> bool:
    """Seal this process off from the judge's and from the network; whether that could be done."""
    known = _SYSTEMS.get(platform.machine())
    if known is None:
        return False
    audit, numbers = known
    instructions = _filter(audit, numbers | _EVERYWHERE, judge)
    array = (_Instruction * len(instructions))(*(_Instruction(*i) for i in instructions))
    program = _Program(len(instructions), array)
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    if prctl(_NO_NEW_PRIVS, 1, 0, 0, 0):
        return False
    return not prctl(_SET_SECCOMP, _MODE_FILTER, ctypes.byref(program))


def _filter(audit: int, numbers: dict[str, int], judge: int) -> list[tuple[int, int, int, int]]:
    """Each rule loads the call's number again, for the one before may have loaded an argument."""
    # The judge itself, its group (or what the number means without a sign), and everybody at once.
    targets = [judge, -judge & 0xFFFFFFFF, -os.getpgid(judge) & 0xFFFFFFFF, 0xFFFFFFFF]
    networks = [int(socket.AF_INET), int(socket.AF_INET6), int(socket.AF_PACKET)]
    program = [(_LOAD, 0, 0, _ARCH), (_EQUAL, 1, 0, audit), (_RETURN, 0, 0, _ALLOW)]
    for name in ("ptrace", "process_vm_readv", "process_vm_writev", "tkill", *_EVERYWHERE):
        program += _rule(numbers[name], ())
    for name in ("setsid", "setpgid"):  # whoever leaves the group is not killed with it
        program += _rule(numbers[name], (), _PRETEND)
    for name, values in (("kill", targets), ("tgkill", targets[:1]), ("socket", networks)):
        program += _rule(numbers[name], values)
    return [*program, (_RETURN, 0, 0, _ALLOW)]


def _rule(
    number: int, values: Sequence[int], answer: int = _REFUSE
) -> list[tuple[int, int, int, int]]:
    """Refuse a call: always, or where its first argument is one of these."""
    if not values:
        return [(_LOAD, 0, 0, _NUMBER), (_EQUAL, 0, 1, number), (_RETURN, 0, 0, answer)]
    tests = [(_EQUAL, len(values) - n - 1, 0, value) for n, value in enumerate(values[:-1])]
    tests.append((_EQUAL, 0, 1, values[-1]))
    body = [(_LOAD, 0, 0, _FIRST), *tests, (_RETURN, 0, 0, _REFUSE)]
    return [(_LOAD, 0, 0, _NUMBER), (_EQUAL, 0, len(body), number), *body]
