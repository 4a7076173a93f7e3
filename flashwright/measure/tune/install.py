"""The chosen kernels put into their package.

New folders first, then classes.json in one step: whoever loads the package, and whoever interrupts
this, has the kernels of before or those of now. The package's own kernel stays what it is.
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

Class = tuple[int | None, str]
"""Up to which length, and the candidate that serves it."""


def install(folder: Path, work: Path, kept: Sequence[Class], present: str) -> list[Class]:
    """Put the kernels of `work` into `folder`; the classes, with the names that they have there."""
    try:
        old = _others(folder)
        _renew(folder, work / present)
        names = {present: OWN}
        for _, name in kept:
            if name not in names:
                names[name] = _put(folder, work / name)
        rules = [(up_to, names[name]) for up_to, name in kept]
        told = Classes.of(rules)
        if told.others:
            write(folder / package.CLASSES, told.dump())
        else:
            (folder / package.CLASSES).unlink(missing_ok=True)
        for name in old:
            if name not in told.others:
                shutil.rmtree(folder / name, ignore_errors=True)
        _record(folder, told.others)
    except OSError as error:
        raise cannot("use", folder, error) from None
    return rules


def _others(folder: Path) -> tuple[str, ...]:
    """The further kernels of before; of a damaged package none are known, and none taken away."""
    try:
        return classes.read(folder).others
    except Failed:
        return ()


def _renew(folder: Path, made: Path) -> None:
    """The package's own kernel built anew, where it is not what its code.tl becomes today."""
    names = (*package.TRANSLATED, *package.COMPILED, package.RECORD)
    there = [n for n in names if (made / n).is_file()]
    same = all(_same(folder / n, made / n) for n in package.TRANSLATED)
    if not there or (same and all((folder / n).is_file() for n in there)):
        return
    # Without its plan a kernel is not called: better none than the plan of another.
    last = (PLAN, package.RECORD)
    for name in last:
        (folder / name).unlink(missing_ok=True)
    for name in sorted(there, key=lambda n: last.index(n) if n in last else -1):
        write(folder / name, (made / name).read_bytes())


def _put(folder: Path, made: Path) -> str:
    """A kernel as a subfolder, under a name that is free; one that is there already stays."""
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
    """build.json with the digests of what is there now."""
    path = folder / package.RECORD
    try:
        told = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return  # a package that somebody else has made: it has no record to keep
    names = [*package.IN_RECORD, package.CLASSES, *(f"{n}/{package.RECORD}" for n in others)]
    there = [n for n in names if (folder / n).is_file()]
    told["artefacts"] = {n: sha256((folder / n).read_bytes()) for n in there}
    write(path, json.dumps(told, indent=2) + "\n")
