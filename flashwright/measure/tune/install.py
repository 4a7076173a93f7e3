"""Install the chosen kernels in their package.

New folders come first, then classes.json is replaced atomically: a reader or an interruption sees
either the old or the new kernels. The package's own kernel does not change.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from flashwright.build import classes, package
from flashwright.build.classes import Classes
from flashwright.build.load import PLAN
from flashwright.build.package import OWN
from flashwright.files import cannot, sha256, write
from flashwright.lang.diagnostic import Failed

ClassRule = tuple[int | None, str]
"""The largest length of a class (None: no limit), and the candidate that serves it."""


def install(folder: Path, work: Path, kept: Sequence[ClassRule], present: str) -> list[ClassRule]:
    """Copy the chosen kernels from `work` to `folder`; returns the classes with installed names."""
    try:
        old = _others(folder)
        _renew(folder, work / present)
        names = {present: OWN}
        for _, name in kept:
            if name not in names:
                names[name] = _put(folder, work / name)
        rules = [(up_to, names[name]) for up_to, name in kept]
        chosen = Classes.of(rules)
        if chosen.others:
            write(folder / package.CLASSES, chosen.dump())
        else:
            (folder / package.CLASSES).unlink(missing_ok=True)
        for name in old:
            if name not in chosen.others:
                shutil.rmtree(folder / name, ignore_errors=True)
        _record(folder, chosen.others)
    except OSError as error:
        raise cannot("use", folder, error) from None
    return rules


def _others(folder: Path) -> tuple[str, ...]:
    """The further kernels installed before; none if the package is damaged, so none is removed."""
    try:
        return classes.read(folder).others
    except Failed:
        return ()


def _renew(folder: Path, made: Path) -> None:
    """Replace the package's own kernel if its code.tl translates differently today."""
    names = (*package.TRANSLATED, *package.COMPILED, package.RECORD)
    there = [n for n in names if (made / n).is_file()]
    same = all(_same(folder / n, made / n) for n in package.TRANSLATED)
    if not there or (same and all((folder / n).is_file() for n in there)):
        return
    # Remove the plan first: a kernel without a plan is not called, one with a wrong plan would be.
    last = (PLAN, package.RECORD)
    for name in last:
        (folder / name).unlink(missing_ok=True)
    for name in sorted(there, key=lambda n: last.index(n) if n in last else -1):
        write(folder / name, (made / name).read_bytes())


def _put(folder: Path, made: Path) -> str:
    """Copy a kernel to a subfolder with an unused name; an equal one that exists is reused."""
    for name in (made.name, *(f"{made.name}-{n}" for n in range(2, 1000))):
        place = folder / name
        if not place.exists():
            fresh = folder / f".{name}.{os.urandom(4).hex()}.tmp"
            shutil.copytree(made, fresh)
            os.replace(fresh, place)
            return name
        if all(_same(place / n, made / n) for n in package.TRANSLATED):
            return name
    raise FileExistsError(17, "there are too many kernels of this name", str(folder / made.name))


def _same(one: Path, other: Path) -> bool:
    return one.is_file() and other.is_file() and one.read_bytes() == other.read_bytes()


def _record(folder: Path, others: Sequence[str]) -> None:
    """Update build.json with the digests of the current files."""
    path = folder / package.RECORD
    try:
        record = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return  # a package made elsewhere, without a record
    names = [*package.IN_RECORD, package.CLASSES, *(f"{n}/{package.RECORD}" for n in others)]
    there = [n for n in names if (folder / n).is_file()]
    record["artefacts"] = {n: sha256((folder / n).read_bytes()) for n in there}
    write(path, json.dumps(record, indent=2) + "\n")
