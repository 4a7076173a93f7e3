"""What a GPU says of samples that were made where there was none: judged when the study goes on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from flashwright import spec as specs
from flashwright.files import write
from flashwright.generate.by_model.speed import card_here
from flashwright.generate.folder import RESULT, finished
from flashwright.judge.judge import judge
from flashwright.lang.diagnostic import Failed
from flashwright.sandbox.candidate import Candidate
from flashwright.study import pytorch

FILE = "judged.json"


def look(folder: Path, progress: Callable[[str], None]) -> str | None:
    """Judge a sample on the GPU here if it has not been; returns the news in words.

    The model is not asked again, whatever comes out: its run has ended.
    """
    candidate = candidate_of(folder)
    if candidate is None or not finished(folder) or right(folder) is not None or not _gpu():
        return None
    progress("judging it on the GPU")
    spec, libraries = specs.load(folder / "spec.toml"), candidate.kind == "python"
    verdict = judge(candidate, spec, base=folder, libraries=libraries)
    told = {**verdict.record(), "candidate": folder.name, "ok": verdict.ok}
    write(folder / FILE, json.dumps(told, indent=1) + "\n")
    return "right on a GPU" if verdict.ok else f"wrong on a GPU: {verdict.diagnostics[0].message}"


def _gpu() -> bool:
    """Whether there is what it takes; where not, nothing is known of the sample, as before."""
    try:
        card_here()
    except Failed:
        return False
    return True


def candidate_of(folder: Path) -> Candidate | None:
    """What a sample has made, if it can be run."""
    if (folder / "kernel.cubin").is_file():
        return Candidate.package(folder)
    file = folder / pytorch.FILE
    if file.is_file():
        where, title = str(file.resolve()), str(file)
        return Candidate("python", where, pytorch.FUNCTION, title=title, untrusted=True)
    return None


def right(folder: Path) -> bool | None:
    """What a GPU said of a sample, in its run or later; None where none was asked."""
    try:
        told = json.loads((folder / RESULT).read_bytes())
        if told["verdict"] == "gpu":
            return bool(told["ok"])
        return bool(json.loads((folder / FILE).read_bytes())["ok"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
