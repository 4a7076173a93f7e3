"""All cases of the self-test, as data."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence

from flashwright.selftest.case import SelftestCase
from flashwright.selftest.cpu_cases import cpu_cases
from flashwright.selftest.gpu_cases import gpu_cases

CASES: tuple[SelftestCase, ...] = (*cpu_cases(), *gpu_cases())


def chosen(
    only: Sequence[str] = (), kinds: Sequence[str] = (), on: str | None = None
) -> list[SelftestCase]:
    """The cases with one of these names (`cpu/zeros`, `zeros`, `gpu/own_*`), classes and devices.

    An empty sequence selects all.
    """
    return [
        case
        for case in CASES
        if (not only or any(_named(case, name) for name in only))
        and (not kinds or case.kind in kinds)
        and (on is None or case.on == on)
    ]


def _named(case: SelftestCase, name: str) -> bool:
    short = case.name.partition("/")[2]
    return fnmatch.fnmatchcase(case.name, name) or fnmatch.fnmatchcase(short, name)
