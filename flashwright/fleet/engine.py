"""The fleet that `--on` names."""

from __future__ import annotations

import re

from flashwright.fleet.fleet import Fleet
from flashwright.fleet.processes import LocalMachine
from flashwright.lang.diagnostic import Diagnostic, Failed

LOCAL, RAY = "local", "ray"
FORMS = "local, ray or ray://HOST:PORT"
_CLIENT = re.compile(r"ray://[^\s/@?#]+")


def connect(on: str = LOCAL) -> Fleet:
    """The machines by name: `local`, `ray` (the cluster that this machine is a node of), or
    `ray://HOST:PORT`. Raises Failed."""
    if on == LOCAL:
        return Fleet(LocalMachine())
    if on != RAY and not _CLIENT.fullmatch(on):
        raise Failed(Diagnostic("FW859", f"{on!r} is not a fleet", help=f"give {FORMS}"))
    from flashwright.fleet.on_ray import RayCluster

    return Fleet(RayCluster("auto" if on == RAY else on))
