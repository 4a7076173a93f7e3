"""Runs a command confined: limits, no network, no other processes, only the listed files.

    python -P -S -s -m flashwright.confine.start POLICY COMMAND...

It confines itself, checks the confinement (selftest.py), and then executes the command. The
confinement is permanent, and no thread exists from before. (This cannot happen between fork and
exec of the caller, which may have threads.)
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from flashwright.confine.landlock import keeps_signals, restrict
from flashwright.confine.limit import limit
from flashwright.confine.seal import die_with_parent, drop_capabilities, seal
from flashwright.confine.selftest import open_calls, open_files

UNCONFINED = "FLASHWRIGHT_UNCONFINED"
"""Set to 1 to compile and run code that a model wrote without confinement."""
NOT_STARTED = 126
"""The exit status if the command cannot be executed, as in a shell."""
NOT_CONFINED = 125
"""The exit status if the required confinement failed."""
NOT_REFUSED = "this system does not refuse a process what it should"
"""The start of the message for NOT_CONFINED."""
FILES, CALLS = "files", "calls"
"""The kinds of confinement: Landlock and seccomp."""


@dataclass(frozen=True)
class Policy:
    """What a confined command may do."""

    readable: tuple[str, ...]
    writable: tuple[str, ...]
    file_bytes: int
    """The largest file it may write."""
    environment: Mapping[str, str]
    """The command's whole environment."""
    seconds: int | None = None
    """CPU seconds of each process. The system ends them even if the caller is gone."""
    addresses: int | None = None
    """Bytes of address space of one process."""
    must: tuple[str, ...] = ()
    """The kinds of confinement (FILES, CALLS) without which the command is not run."""
    watched: bool = False
    """Whether the command is a tool that watches another, or runs under one: it has sockets and all
    system calls."""
    inherits: bool = False
    """Whether it runs under a tool: it keeps the variables that the tool has set."""


def confined(policy: Policy, command: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The command line and the environment that run a command under a policy."""
    start = [sys.executable, "-P", "-S", "-s", "-m", "flashwright.confine.start"]
    package = str(Path(__file__).resolve().parents[2])
    env = {**policy.environment, "PYTHONPATH": package}
    return [*start, json.dumps(asdict(policy)), *command], env


def main() -> None:
    """Confine this process, then execute the command."""
    policy, command = Policy(**json.loads(sys.argv[1])), sys.argv[2:]
    die_with_parent()
    if not policy.inherits:
        with contextlib.suppress(PermissionError):  # it leads its group already
            os.setsid()
    limit(resource.RLIMIT_CORE, 0)
    limit(resource.RLIMIT_FSIZE, policy.file_bytes)
    if policy.seconds is not None:
        limit(resource.RLIMIT_CPU, policy.seconds)
    if policy.addresses is not None:
        limit(resource.RLIMIT_AS, policy.addresses)
    drop_capabilities()
    missing = [part for part in _confine(policy) if part in policy.must]
    if missing := missing or list(_unrefused(policy)):
        print(f"{NOT_REFUSED}: {', '.join(missing)}")
        sys.exit(NOT_CONFINED)
    given = dict(os.environ) if policy.inherits else {}
    try:
        os.execve(command[0], command, {**given, **policy.environment})
    except OSError as error:
        print(f"{command[0]} cannot be run: {error.strerror}")
        sys.exit(NOT_STARTED)


def _confine(policy: Policy) -> Iterator[str]:
    """Give up files and system calls. Yields the kinds that this system does not support."""
    inside = restrict(policy.readable, policy.writable, network=policy.watched)
    if not inside:
        yield FILES
    if not policy.watched and not seal(os.getppid(), inside and keeps_signals()):
        yield CALLS


def _unrefused(policy: Policy) -> Iterator[str]:
    """What this process can do although it must not; nothing with FLASHWRIGHT_UNCONFINED."""
    if policy.environment.get(UNCONFINED) == "1":
        return
    if FILES in policy.must:
        yield from open_files(os.getppid(), (*policy.readable, *policy.writable))
    if CALLS in policy.must and not policy.watched:
        yield from open_calls(os.getppid())


if __name__ == "__main__":
    main()
