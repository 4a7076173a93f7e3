"""The seccomp filter as a BPF program: it allows system calls by number and by argument.

Other calls are refused. A program of another architecture (int 0x80, 32-bit Arm) or with x32's
numbers is killed, because its numbers mean other calls. A filter sees the arguments but not the
memory they point to, so no rule follows a pointer. A process id is an int, of which the kernel
takes the low half.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from flashwright.confine.calls import ALLOWED, REFUSED, RULED

Instruction = tuple[int, int, int, int]
"""Code, jump if true, jump if false, value."""
AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""The machines that have a filter, with their audit numbers."""

_LOAD, _AND, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06  # BPF
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_PRETEND = _ERROR  # with errno 0: the call does nothing and reports success
_REFUSE, _UNKNOWN, _INVALID = (_ERROR | n for n in (errno.EPERM, errno.ENOSYS, errno.EINVAL))
_NUMBER, _ARCH, _ARGUMENTS = 0, 4, 16  # offsets in seccomp_data; arguments have eight bytes each
_X32 = 0x40000000
_CLONE3 = 435

# Namespaces (new mount, cgroup, uts, ipc, user, pid, net), and a child with the judge as parent.
_CLONE_FLAGS = 0x7E020000 | 0x8000
_UNIX, _STREAM, _SEQPACKET, _TYPE = 1, 1, 5, 0xF  # a datagram could be sent to any other socket
_PRIO_PROCESS, _IOPRIO_PROCESS = 0, 1
_PDEATHSIG, _SIGKILL = 1, 9
_PRCTL = (22, 35, 62)  # set_seccomp, set_mm, sched_core
_SET_PTRACER = 0x59616D61
_FCNTL = (8, 10, 15)  # setown, setsig, setown_ex: they make the system signal any process
_IOCTL = (0x5412, 0x541C, 0x8901, 0x8902)  # tiocsti, tioclinux; fiosetown, siocspgrp


@dataclass(frozen=True)
class Party:
    """The processes that a signal rule is about: the confined one and the judge's."""

    own: int
    """The confined process's id, which is its group's and its session's too."""
    judge: int
    group: int
    """The judge's process group."""
    scoped: bool
    """Whether Landlock confines its signals to its own processes."""


def program(machine: str, party: Party) -> list[Instruction]:
    """The instructions of the filter for a machine of AUDIT."""
    rules = _rules(party)
    made = [(_LOAD, 0, 0, _ARCH), (_EQUAL, 1, 0, AUDIT[machine]), (_RETURN, 0, 0, _KILL)]
    made.append((_LOAD, 0, 0, _NUMBER))
    if machine == "x86_64":
        made += [(_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, _KILL)]
    for number in sorted(_on(machine, ALLOWED)):
        made += _answered(number, _ALLOW)
    for name, numbers in RULED.items():
        if machine in numbers:
            made += [(_EQUAL, 0, len(rules[name]), numbers[machine]), *rules[name]]
    for number in sorted(_on(machine, REFUSED)):
        made += _answered(number, _REFUSE)
    # clone3's flags are behind a pointer. The C library falls back to clone.
    return [*made, *_answered(_CLONE3, _UNKNOWN), (_RETURN, 0, 0, _UNKNOWN)]


def _on(machine: str, table: dict[str, dict[str, int]]) -> Iterable[int]:
    return (numbers[machine] for numbers in table.values() if machine in numbers)


def _answered(number: int, answer: int) -> list[Instruction]:
    return [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, answer)]


def _rules(party: Party) -> dict[str, list[Instruction]]:
    """The instructions for each call of RULED, each ending in a return."""
    own = _only(0, (0, party.own))
    signals = [*_signals(party), _end()]
    unix = [*_only(0, (_UNIX,)), *_only(1, (_STREAM, _SEQPACKET), _TYPE), _end()]
    prctl = [*_never(0, _PRCTL), *_never(0, (_SET_PTRACER,), _INVALID), *_die_with_parent()]
    return {
        "clone": [*_without(0, _CLONE_FLAGS), _end()],
        **dict.fromkeys(("kill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo"), signals),
        "prctl": prctl,
        "fcntl": [*_never(1, _FCNTL), _end()],
        "ioctl": [*_never(1, _IOCTL), _end()],
        # CUDA's driver does not start unless it can listen on a socket. It never connects.
        **dict.fromkeys(("socket", "socketpair"), unix),
        "prlimit64": [*own, _end()],
        "sched_setaffinity": [*own, _end()],
        "sched_setscheduler": [*own, _end()],
        "sched_setparam": [*own, _end()],
        "sched_setattr": [*own, _end()],
        "setpriority": [*_only(0, (_PRIO_PROCESS,)), *_only(1, (0, party.own)), _end()],
        "ioprio_set": [*_only(0, (_IOPRIO_PROCESS,)), *_only(1, (0, party.own)), _end()],
        # A process that leaves the group would not be killed with it.
        "setsid": [_end(_PRETEND)],
        "setpgid": [_end(_PRETEND)],
    }


def _signals(party: Party) -> list[Instruction]:
    """Allow signals to itself; with Landlock's scope, to all but the judge.

    Without Landlock's scope a filter cannot tell a child from a stranger.
    """
    if not party.scoped:
        return _only(0, (0, party.own, _negative(party.own)))
    # The judge itself, its group (or what the number means without a sign), and all at once.
    return _never(0, (party.judge, _negative(party.judge), _negative(party.group), _negative(1)))


def _negative(number: int) -> int:
    return -number & 0xFFFFFFFF


def _die_with_parent() -> list[Instruction]:
    """Allow prctl(PR_SET_PDEATHSIG) with SIGKILL only."""
    milder = [*_only(1, (_SIGKILL,), answer=_PRETEND), _end()]
    return [_argument(0), (_EQUAL, 0, len(milder), _PDEATHSIG), *milder, _end()]


def _only(
    number: int, values: Sequence[int], mask: int | None = None, answer: int = _REFUSE
) -> list[Instruction]:
    """Continue if an argument is one of these."""
    load = [_argument(number), *([] if mask is None else [(_AND, 0, 0, mask)])]
    tests = [(_EQUAL, len(values) - n, 0, value) for n, value in enumerate(values)]
    return [*load, *tests, _end(answer)]


def _never(number: int, values: Sequence[int], answer: int = _REFUSE) -> list[Instruction]:
    """Continue if an argument is none of these."""
    last = len(values) - 1
    tests = [(_EQUAL, last - n, int(n == last), value) for n, value in enumerate(values)]
    return [_argument(number), *tests, _end(answer)]


def _without(number: int, bits: int) -> list[Instruction]:
    """Continue if an argument has none of these bits."""
    return [_argument(number), (_ANY_BIT, 0, 1, bits), _end(_REFUSE)]


def _argument(number: int) -> Instruction:
    """Load the low half of an argument: both machines are little-endian."""
    return (_LOAD, 0, 0, _ARGUMENTS + 8 * number)


def _end(answer: int = _ALLOW) -> Instruction:
    return (_RETURN, 0, 0, answer)
