"""What became of one sample, from its records alone: result.json, and the model's exchanges."""

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

# What the CPU run finds: such code has passed the checker. (FW806 may come before that.)
_RUN = re.compile(r"^\d+\. error FW80[1-5]\b", re.MULTILINE)


@dataclass(frozen=True)
class Outcome:
    """How far a sample came, and what it took."""

    passed: Mapping[str, bool | None]
    """Whether each level of its way was reached; None if unknown."""
    kind: str = "checked"
    """What its verdict rests on: run.KINDS."""
    ratio: float | None = None
    """Its speed over that of the best peer; None where it was not measured."""
    attempts: int = 0
    usage: Usage = Usage()  # noqa: RUF009 - frozen
    dollars: float = 0.0
    asking: float = 0.0
    """Seconds in which the model was waited for."""


def read(sample: Sample, root: Path) -> Outcome | None:
    """The outcome of a sample; None if it has not ended."""
    folder = sample.folder(root)
    try:
        told = json.loads((folder / RESULT).read_bytes())
        levels = _levels(told, folder)
        dollars = sum(float(part["dollars"]) for part in told.get("asked", {}).values())
        kind, found = str(told["verdict"]), judged.right(folder)
        if found is not None:  # later, maybe
            kind, levels["right"] = "gpu", found
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    said = [exchange.reply for *_, exchange in Transcript(folder / FOLDER).attempts()]
    return Outcome(
        {level: levels[level] for level in sample.way.levels},
        kind,
        speed.ratio(folder) if levels["right"] else None,
        len(said),
        sum((reply.usage for reply in said), Usage()),
        dollars,
        sum(reply.seconds for reply in said),
    )


def _levels(told: Mapping[str, Any], folder: Path) -> dict[str, bool | None]:
    """Whether each level was reached; None where it was not tried, and nothing speaks against it.

    A stage that failed may have been passed in part: code that is wrong when it is run, a kernel
    that is wrong when it is judged. The attempts tell.
    """
    ok = bool(told["ok"])
    status = {str(part["stage"]): str(part["status"]) for part in told["stages"]}
    tried = _attempts(folder)

    def reached(stage: str) -> bool | None:
        return True if status.get(stage) == "ok" else None if ok else False

    checked = any(_RUN.search(findings) for findings, _ in tried["code"])
    compiled = any(
        "kernel.cubin" in files for stage in ("translate", "direct") for _, files in tried[stage]
    )
    right = reached("verdict") if told["verdict"] in ("gpu", "emulated") else None if ok else False
    return {
        "sketch": reached("sketch"),
        "code": reached("parameters") or checked or reached("parameters"),
        "cpu": reached("cpu"),
        "compiles": reached("build") or compiled or reached("build"),
        "right": right,
    }


def _attempts(folder: Path) -> dict[str, list[tuple[str, tuple[str, ...]]]]:
    """What became of each reply, by stage: findings, names of files."""
    found: dict[str, list[tuple[str, tuple[str, ...]]]] = {}
    for stage in ("code", "translate", "direct"):
        found[stage] = []
        for path in sorted((folder / FOLDER).glob(f"{stage}.*.*/{OUTCOME}")):
            if not re.fullmatch(rf"{stage}\.\d+\.\d+", path.parent.name):
                continue  # set aside: of an earlier conversation
            try:
                told = json.loads(path.read_bytes())
                files = tuple(map(str, told["artefacts"]))
                found[stage].append((str(told["findings"]), files))
            except (OSError, ValueError, KeyError, TypeError):
                continue
    return found
