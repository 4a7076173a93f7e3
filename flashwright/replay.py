"""A run with language models, repeated from its record: nobody is asked, all else is done anew.

Up to the compiled kernel everything must come out as it did: what was found in every attempt, and
every file. What a GPU said of a model's kernel is taken from the record.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashwright import gpu as gpus
from flashwright import pipeline
from flashwright.author.llm.budget import Budget
from flashwright.author.llm.transcript import BEFORE, FOLDER, OUTCOME, Transcript
from flashwright.by_model import Authors, Who
from flashwright.files import cannot
from flashwright.folder import RESULT
from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.spec import AttentionSpec, BadSpec

ENDLESS = Budget(attempts=10_000, tokens=None, seconds=None)
COMPARED = ("sketch.tl", "code.tl", "kernel.cu", "launch.json", "kernel.cubin")


@dataclass(frozen=True)
class Replayed:
    """How a replay compares with its record."""

    lines: tuple[str, ...]
    same: bool


def replay(
    recorded: Path, folder: Path, watcher: pipeline.Watcher, last: str = "build"
) -> Replayed:
    """Repeat the run of a folder in another, up to a stage, and compare."""
    settings = _settings(recorded)
    try:
        shutil.copytree(recorded / FOLDER, folder / FOLDER, dirs_exist_ok=True)
        for path in (folder / FOLDER).glob(f"*/{OUTCOME}"):
            path.rename(path.with_name(BEFORE))
    except OSError as error:
        raise cannot("use", folder, error) from None
    asked = {s: Who(None, a["model"], ENDLESS, None, a["candidates"]) for s, a in settings.asked}
    authors = Authors(Transcript(folder / FOLDER), asked, settings.description)
    pipeline.generate(settings.spec, gpus.find(settings.gpu), folder, watcher, authors, last=last)
    lines = [*_outcomes(recorded / FOLDER, folder / FOLDER), *_artefacts(recorded, folder)]
    return Replayed(tuple(text for text, _ in lines), all(same for _, same in lines))


@dataclass(frozen=True)
class _Settings:
    """Of the recorded run."""

    spec: AttentionSpec
    gpu: str
    asked: tuple[tuple[str, dict[str, Any]], ...]
    description: str | None


def _settings(recorded: Path) -> _Settings:
    told = Transcript(recorded / FOLDER).read()
    try:
        settings = (told or {})["settings"]
        spec = AttentionSpec.model_validate(settings["spec"])
        asked = tuple((s, dict(a)) for s, a in settings["asked"].items())
        return _Settings(spec, settings["gpu"], asked, settings["description"])
    except (KeyError, TypeError, ValueError, AttributeError, BadSpec):
        text = f"the record in {recorded / FOLDER} is not one that this version can read"
        raise Failed(Diagnostic("FW915", text)) from None


def _outcomes(before: Path, after: Path) -> list[tuple[str, bool]]:
    """Each attempt: taken or not, with the same findings?"""
    lines = []
    for path in sorted(before.glob(f"*/{OUTCOME}")):
        name = path.parent.name
        one, other = _read(path), _read(after / name / OUTCOME)
        same = one == other and one is not None
        how = "taken" if one and one.get("taken") else "sent back"
        lines.append((f"{name}: {how}, {'the same' if same else 'NOT THE SAME'}", same))
    return lines


def _artefacts(recorded: Path, folder: Path) -> list[tuple[str, bool]]:
    """Each file that the run made, by its digest."""
    one, other = _digests(recorded / RESULT), _digests(folder / RESULT)
    names = [name for name in COMPARED if name in one]
    return [
        (f"{name}: {'the same' if one[name] == other.get(name) else 'NOT THE SAME'}",
         one[name] == other.get(name))
        for name in names
    ]  # fmt: skip


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None


def _digests(path: Path) -> dict[str, str]:
    told = _read(path)
    return dict(told.get("artefacts", {})) if isinstance(told, dict) else {}
