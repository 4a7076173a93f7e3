"""The outcome of one sample, read from its records: result.json and the transcript."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashwright.author.llm.model import Usage
from flashwright.author.llm.transcript import FOLDER, OUTCOME, Transcript
from flashwright.generate.folder import RESULT
from flashwright.study import judged, speed
from flashwright.study.sample import Sample

# Findings of the CPU run: such code has passed the checker. (FW806 may come before that.)
_RUN = re.compile(r"^\d+\. error FW80[1-5]\b", re.MULTILINE)


@dataclass(frozen=True)
class SampleOutcome:
    """The levels a sample reached, its speed, and its cost."""

    passed: Mapping[str, bool | None]
    """Whether each level of its way was reached; None if unknown."""
    kind: str = "checked"
    """The kind of its verdict: a key of generate.state.KINDS."""
    ratio: float | None = None
    """Its speed over that of the best peer; None if it was not timed."""
    attempts: int = 0
    usage: Usage = Usage()  # noqa: RUF009 - frozen
    dollars: float = 0.0
    asking: float = 0.0
    """Seconds spent waiting for the model."""


def read(sample: Sample, root: Path) -> SampleOutcome | None:
    """The outcome of a sample; None if it has not ended."""
    folder = sample.folder(root)
    try:
        data = json.loads((folder / RESULT).read_bytes())
        levels = _levels(data, folder)
        dollars = sum(float(part["dollars"]) for part in data.get("asked", {}).values())
        kind, found = str(data["verdict"]), judged.right(folder)
        if found is not None:  # possibly judged after its run
            kind, levels["right"] = "gpu", found
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    said = [exchange.reply for *_, exchange in Transcript(folder / FOLDER).attempts()]
    return SampleOutcome(
        {level: levels[level] for level in sample.way.levels},
        kind,
        speed.ratio(folder) if levels["right"] else None,
        len(said),
        sum((reply.usage for reply in said), Usage()),
        dollars,
        sum(reply.seconds for reply in said),
    )


def _levels(data: Mapping[str, Any], folder: Path) -> dict[str, bool | None]:
    """Whether each level was reached; None if it was not tried and the sample did not fail.

    A failed stage may have reached a level: code that checks but computes wrong values, a kernel
    that compiles but is judged wrong. The attempts show it.
    """
    ok = bool(data["ok"])
    status = {str(part["stage"]): str(part["status"]) for part in data["stages"]}
    tried = _attempts(folder)

    def reached(stage: str) -> bool | None:
        return True if status.get(stage) == "ok" else None if ok else False

    checked = any(_RUN.search(findings) for findings, _ in tried["code"])
    compiled = any(
        "kernel.cubin" in files for stage in ("translate", "direct") for _, files in tried[stage]
    )
    right = reached("verdict") if data["verdict"] in ("gpu", "emulated") else None if ok else False
    return {
        "sketch": reached("sketch"),
        "code": reached("parameters") or checked or reached("parameters"),
        "cpu": reached("cpu"),
        "compiles": reached("build") or compiled or reached("build"),
        "right": right,
    }


def _attempts(folder: Path) -> dict[str, list[tuple[str, tuple[str, ...]]]]:
    """The outcome of each reply by stage: its findings and the names of its files."""
    found: dict[str, list[tuple[str, tuple[str, ...]]]] = {}
    for stage in ("code", "translate", "direct"):
        found[stage] = []
        for path in sorted((folder / FOLDER).glob(f"{stage}.*.*/{OUTCOME}")):
            if not re.fullmatch(rf"{stage}\.\d+\.\d+", path.parent.name):
                continue  # set aside from an earlier conversation
            try:
                data = json.loads(path.read_bytes())
                files = tuple(map(str, data["artefacts"]))
                found[stage].append((str(data["findings"]), files))
            except (OSError, ValueError, KeyError, TypeError):
                continue
    return found
