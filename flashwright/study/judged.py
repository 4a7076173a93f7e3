"""GPU verdicts for samples made on a machine without a GPU, given when the study is resumed."""

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


def judge_sample(folder: Path, progress: Callable[[str], None]) -> str | None:
    """Judge a sample on the GPU here if it has no GPU verdict; returns the result in words.

    Returns None if there is nothing to do. The model is not asked again, whatever the verdict.
    """
    candidate = candidate_of(folder)
    if candidate is None or not finished(folder) or right(folder) is not None or not _gpu():
        return None
    progress("judging it on the GPU")
    spec, libraries = specs.load(folder / "spec.toml"), candidate.kind == "python"
    verdict = judge(candidate, spec, base=folder, libraries=libraries)
    record = {**verdict.record(), "candidate": folder.name, "ok": verdict.ok}
    write(folder / FILE, json.dumps(record, indent=1) + "\n")
    return "right on a GPU" if verdict.ok else f"wrong on a GPU: {verdict.diagnostics[0].message}"


def _gpu() -> bool:
    """Whether a GPU and PyTorch are available."""
    try:
        card_here()
    except Failed:
        return False
    return True


def candidate_of(folder: Path) -> Candidate | None:
    """The kernel or function of a sample; None if it has none that can run."""
    if (folder / "kernel.cubin").is_file():
        return Candidate.package(folder)
    file = folder / pytorch.FILE
    if file.is_file():
        where, title = str(file.resolve()), str(file)
        return Candidate("python", where, pytorch.FUNCTION, title=title, untrusted=True)
    return None


def right(folder: Path) -> bool | None:
    """The GPU verdict on a sample, from its run or from later; None if there is none."""
    try:
        result = json.loads((folder / RESULT).read_bytes())
        if result["verdict"] == "gpu":
            return bool(result["ok"])
        return bool(json.loads((folder / FILE).read_bytes())["ok"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
