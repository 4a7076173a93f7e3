"""The folder of a run: what an earlier run left goes, and what is made is put there as it comes."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from flashwright.build.package import CLASSES, IN_RECORD, RECORD, TUNING, inside
from flashwright.files import cannot, recorded, set_aside, sha256, write
from flashwright.generate.state import Run

RESULT = "result.json"
ARTEFACTS = (
    *("spec.toml", "sketch.tl", "code.tl", "reasoning.md"),
    *("kernel.cu", "kernel.map.json", "launch.json"),
    *("kernel.cubin", "kernel.ptx", "build.json"),
)


def finished(folder: Path) -> bool:
    """Whether it has what a run made that came out right."""
    try:
        return bool(json.loads((folder / RESULT).read_bytes())["ok"])
    except (OSError, ValueError, KeyError, TypeError):
        return False


def prepare(folder: Path, mine: Mapping[str, bytes]) -> tuple[str, ...]:
    """Make the folder and take away what an earlier run left; the names of what is kept as .bak.

    A file of `mine` that is there already stays.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        records = [folder / RESULT, folder / RECORD]
        ours = {name: digest for path in records for name, digest in recorded(path).items()}
        for path in records:  # nobody's work: they tell of files that now go
            path.unlink(missing_ok=True)
    except OSError as error:
        raise cannot("use", folder, error) from None
    ours |= _there(folder, {name: sha256(data) for name, data in mine.items()})
    for attempt in folder.glob("model/*.*.*/outcome.json"):  # of a run that was cut off
        ours |= _there(folder, recorded(attempt))
    kept = set_aside(folder, (*ARTEFACTS, CLASSES, TUNING, *mine), ours)
    others = {name.partition("/")[0] for name in ours if "/" in name} - {"", ".", ".."}
    return (*kept, *(name for other in sorted(others) for name in clear(folder, other, ours)))


def _there(folder: Path, files: Mapping[str, str]) -> dict[str, str]:
    """Those of the files, by their digests, that the folder has just so."""
    places = {Path(name).name: digest for name, digest in files.items()}
    return {
        name: digest
        for name, digest in places.items()
        if (folder / name).is_file() and sha256((folder / name).read_bytes()) == digest
    }


def clear(folder: Path, kernel: str, ours: Mapping[str, str]) -> tuple[str, ...]:
    """The same for a further kernel's subfolder, which goes where nothing else is in it."""
    told = recorded(folder / kernel / RECORD)
    known = {**ours, **{f"{kernel}/{name}": digest for name, digest in told.items()}}
    kept = set_aside(folder, [inside(kernel, name) for name in IN_RECORD], known)
    with contextlib.suppress(OSError):
        (folder / kernel / RECORD).unlink(missing_ok=True)
        (folder / kernel).rmdir()
    return kept


def keep(run: Run, files: Mapping[str, str | bytes]) -> Run:
    """Write files, in their order."""
    for name, data in files.items():
        path = run.folder / name
        try:
            path.parent.mkdir(exist_ok=True)
        except OSError as error:
            raise cannot("use", path.parent, error) from None
        write(path, data)
    text = {name: data for name, data in files.items() if isinstance(data, str)}
    binary = {name: data for name, data in files.items() if isinstance(data, bytes)}
    artefacts, binaries = {**run.artefacts, **text}, {**run.binaries, **binary}
    return replace(run, artefacts=artefacts, binaries=binaries)
