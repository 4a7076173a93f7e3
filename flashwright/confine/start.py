"""Run a command confined: limits, no network, no other processes, only the files that it is told.

    python -P -S -s -m flashwright.confine.start POLICY COMMAND...

It confines itself and then becomes the command: what is given up cannot be had back. (Not between
fork and exec of the caller, which may have threads.)
"""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from flashwright.confine.landlock import restrict
from flashwright.confine.limit import limit
from flashwright.confine.seal import die_with_parent, seal, stop_inspecting

NOT_STARTED = 126
"""The exit status where the command cannot be run at all, as a shell has it."""


@dataclass(frozen=True)
class Policy:
    """What a command may do."""

    readable: tuple[str, ...]
    writable: tuple[str, ...]
    file_bytes: int
    """The largest file it may write."""
    environment: Mapping[str, str]
    """All of it."""
    seconds: int | None = None
    """Of the processor, for each of its processes: they end even where nobody is left to end
    them."""
    addresses: int | None = None
    """Bytes of addresses that one process may have."""


def confined(policy: Policy, command: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The command line and the environment that run a command under a policy."""
    start = [sys.executable, "-P", "-S", "-s", "-m", "flashwright.confine.start"]
    package = str(Path(__file__).resolve().parents[2])
    env = {**policy.environment, "PYTHONPATH": package}
    return [*start, json.dumps(asdict(policy)), *command], env


def main() -> None:
    """Give everything up, then become the command."""
    policy, command = Policy(**json.loads(sys.argv[1])), sys.argv[2:]
    die_with_parent()
    limit(resource.RLIMIT_CORE, 0)
    limit(resource.RLIMIT_FSIZE, policy.file_bytes)
    if policy.seconds is not None:
        limit(resource.RLIMIT_CPU, policy.seconds)
    if policy.addresses is not None:
        limit(resource.RLIMIT_AS, policy.addresses)
    stop_inspecting()
    restrict(policy.readable, policy.writable)
    seal(os.getppid())
    try:
        os.execve(command[0], command, dict(policy.environment))
    except OSError as error:
        print(f"{command[0]} cannot be run: {error.strerror}")
        sys.exit(NOT_STARTED)


if __name__ == "__main__":
    main()
