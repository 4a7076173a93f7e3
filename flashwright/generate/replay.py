"""Repeats a run with language models from its record, without calling a model.

Up to the compiled kernel everything must come out as it did: what was found in every attempt, and
every file. What a GPU said of a model's kernel is taken from the record.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashwright import gpu as gpus
from flashwright.author.llm.budget import Budget
from flashwright.author.llm.transcript import (
    ATTEMPT,
    BEFORE,
    EXCHANGE,
    FOLDER,
    OUTCOME,
    RUN,
    Transcript,
    set_aside,
)
from flashwright.author.llm.transcript import read as read_exchange
from flashwright.build.package import RECORD
from flashwright.files import cannot, sha256
from flashwright.files import recorded as digests
from flashwright.generate import pipeline
from flashwright.generate.by_model.ask import Authors, StageAuthor
from flashwright.generate.folder import RESULT
from flashwright.gpu import Gpu
from flashwright.judge.reference import split
from flashwright.lang.codes import MACHINE
from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.spec import AttentionSpec, BadSpec

ENDLESS = Budget(attempts=10_000, tokens=None, seconds=None)
COMPARED = ("sketch.tl", "code.tl", "kernel.cu", "launch.json", "kernel.cubin")
COMPILED = ("kernel.cubin", "kernel.ptx")
ASKED = ("sketch", "code", "translate", "improve")
MOST = 16  # candidates, as of generate
VERSION = re.compile(r"[\w.]{1,40}")
CODE = re.compile(r"\bFW\d{3}\b")


@dataclass(frozen=True)
class Replayed:
    """How a replay compares with its record."""

    lines: tuple[str, ...]
    same: bool
    attempts: int
    """How many were compared."""
    files: int


def replay(
    recorded: Path, folder: Path, watcher: pipeline.Watcher, last: str = "build"
) -> Replayed:
    """Repeat the run of a folder in another, up to a stage, and compare."""
    told = _settings(recorded)
    _copy(recorded, folder)
    asked = {s: StageAuthor(None, model, ENDLESS, None, count) for s, model, count in told.asked}
    last = "improve" if _improved(recorded) else last
    text = (told.reference or b"").decode("utf-8", "replace")
    authors = Authors(Transcript(folder / FOLDER), asked, told.description, text)
    run = pipeline.generate(
        told.spec,
        told.gpu,
        folder,
        watcher,
        authors,
        last=last,
        reference=told.reference,
        plan=_plan(recorded),
    )
    here = [f.diagnostic for f in run.failed if f.diagnostic.code in MACHINE]
    if here:
        raise Failed(*here)
    versions = _version(recorded), _version(folder)
    other = versions[0] != versions[1] and None not in versions
    attempts = _outcomes(recorded / FOLDER, folder / FOLDER, other)
    files = _artefacts(recorded, folder, other)
    lines = [*_missing(recorded), *attempts, *files, *_changed(recorded)]
    changed = [name for told in run.asked.values() for name in told["changed"]]
    if changed:
        text = f"the prompts are not what they were: {', '.join(changed)} answered other words"
        lines.append((text, True))
    if other:
        text = f"compiled with nvcc {versions[1]}, then {versions[0]}: its output is not compared"
        lines.append((text, True))
    same = bool(attempts or files) and all(same for _, same in lines)
    return Replayed(tuple(text for text, _ in lines), same, len(attempts), len(files))


def _copy(recorded: Path, folder: Path) -> None:
    """The record to where it is repeated, without links: it may come from anywhere."""
    try:
        if folder.resolve() == recorded.resolve():
            text = f"{folder} is the record itself"
            raise Failed(Diagnostic("FW915", text, help="give another folder with --out"))
        if os.path.lexists(folder / FOLDER):
            set_aside(folder / FOLDER)
        shutil.copytree(recorded / FOLDER, folder / FOLDER, ignore=_links)
        for path in (folder / FOLDER).glob(f"*/{OUTCOME}"):
            path.rename(path.with_name(BEFORE))
    except OSError as error:
        raise cannot("use", folder, error) from None


def _links(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if Path(folder, name).is_symlink()]


def _plan(recorded: Path) -> tuple[pipeline.Stage, ...]:
    """The stages: a run without a sketch, as studies have them, is repeated without one."""
    sketched = not (recorded / RESULT).is_file() or "sketch.tl" in digests(recorded / RESULT)
    return pipeline.STAGES if sketched else pipeline.WITHOUT_SKETCH


def _improved(recorded: Path) -> bool:
    """Whether the run came as far as that: what it made is then what its last rounds made."""
    return any((recorded / FOLDER).glob(f"improve.*/{OUTCOME}"))


@dataclass(frozen=True)
class _RecordedSettings:
    """The settings of the recorded run."""

    spec: AttentionSpec
    gpu: Gpu
    asked: tuple[tuple[str, str, int], ...]
    description: str | None
    reference: bytes | None


def _settings(recorded: Path) -> _RecordedSettings:
    told = Transcript(recorded / FOLDER).read()
    if told is None:
        text = f"{recorded / FOLDER / RUN} is broken: it is not what generate writes"
        hint = "the replies are still there; without its settings nobody knows what they answer"
        raise Failed(Diagnostic("FW915", text, help=hint))
    try:
        settings = told["settings"]
        spec = AttentionSpec.model_validate(settings["spec"])
        gpu = gpus.find(settings["gpu"])
        asked = tuple((s, *_who(a)) for s, a in settings["asked"].items())
        words = settings["description"]
        if not isinstance(words, str | None):
            raise TypeError
        reference = _reference(recorded, spec)
    except (KeyError, TypeError, ValueError, AttributeError, BadSpec, gpus.UnknownGpu):
        text = f"the record in {recorded / FOLDER} is not one that this version can read"
        raise Failed(Diagnostic("FW915", text)) from None
    for stage, *_ in asked:
        if stage not in ASKED:
            text = f"a run of which a model did the stage {stage!r} cannot be replayed"
            hint = "of a study, samples of the ways tl and no-sketch can"
            raise Failed(Diagnostic("FW915", text, help=hint))
    return _RecordedSettings(spec, gpu, asked, words, reference)


def _who(asked: dict[str, Any]) -> tuple[str, int]:
    model, candidates = asked["model"], asked["candidates"]
    if not (isinstance(model, str) and type(candidates) is int and 1 <= candidates <= MOST):
        raise ValueError
    return model, candidates


def _reference(recorded: Path, spec: AttentionSpec) -> bytes | None:
    """The user's function, which lies in the run's folder: no path leads out of it."""
    if spec.reference is None:
        return None
    name = split(spec.reference)[0]
    if Path(name).name != name or (recorded / name).is_symlink():
        raise ValueError
    try:
        return (recorded / name).read_bytes()
    except OSError:
        text = f"{recorded / name}, the function that judged this run, cannot be read"
        raise Failed(Diagnostic("FW915", text)) from None


# --- comparing --------------------------------------------------------------------------------


def _missing(recorded: Path) -> list[tuple[str, bool]]:
    """What there is nothing of to compare with, and why."""
    lines = []
    if not (recorded / RESULT).is_file():
        lines.append((f"no {RESULT}: the run was cut off, and its files are not compared", True))
    if not any((recorded / FOLDER).glob(f"*/{EXCHANGE}")):
        lines.append(("no attempts: no model ever answered", True))
    return lines


def _outcomes(before: Path, after: Path, other: bool) -> list[tuple[str, bool]]:
    """Each attempt: taken or not, with the same findings?"""
    folders = sorted(path for path in before.iterdir() if ATTEMPT.fullmatch(path.name))
    return [_attempt(folder, after / folder.name, other) for folder in folders]


def _attempt(before: Path, after: Path, other: bool) -> tuple[str, bool]:
    name = before.name
    if read_exchange(before / EXCHANGE) is None:
        return f"{name}: NOT THE SAME, its {EXCHANGE} cannot be read", False
    if not (before / OUTCOME).exists():  # the reply broke off, or the run did
        return f"{name}: nothing was made of this reply", True
    one, now = _read(before / OUTCOME), _read(after / OUTCOME)
    if not isinstance(one, dict):
        return f"{name}: NOT THE SAME, its {OUTCOME} cannot be read", False
    if _comparable(one, now, other) == _comparable(now, one, other):
        return f"{name}: {_how(one)}, the same", True
    return f"{name}: {_how(one)}, NOT THE SAME: {_difference(one, now)}", False


def _how(outcome: Mapping[str, Any]) -> str:
    return "taken" if outcome.get("taken") else "sent back"


def _difference(one: Mapping[str, Any], now: Mapping[str, Any] | None) -> str:
    """Why an attempt does not come out as it did: in our words, not in a model's."""
    if now is None:
        return "it is not asked for now"
    if _how(one) != _how(now):
        codes = ", ".join(dict.fromkeys(CODE.findall(str(now.get("findings")))))
        return f"now {_how(now)}" + (f" for {codes}" if codes else "")
    what = "findings" if one.get("findings") != now.get("findings") else "files"
    return f"with other {what}"


def _comparable(outcome: Any, beside: Any, other: bool) -> Any:
    """An outcome without what differs from run to run, or with `other` versions of nvcc.

    Of what was taken both times, the files that both have: without a compiler there are fewer.
    """
    if not isinstance(outcome, dict) or not isinstance(outcome.get("artefacts"), dict):
        return outcome
    left = (RECORD, *COMPILED) if other else (RECORD,)  # which has the time that it took
    files = {name: digest for name, digest in outcome["artefacts"].items() if name not in left}
    if isinstance(beside, dict) and outcome.get("taken") and beside.get("taken"):
        there = beside.get("artefacts")
        files = {n: d for n, d in files.items() if isinstance(there, dict) and n in there}
    told = {**outcome, "artefacts": files}
    if other and "kernel.cu" in files:
        del told["findings"]  # in the compiler's words
    return told


def _artefacts(recorded: Path, folder: Path, other: bool) -> list[tuple[str, bool]]:
    """Each file that the run made, by its digest."""
    one, now = digests(recorded / RESULT), digests(folder / RESULT)
    names = [n for n in COMPARED if n in one and not (other and n in COMPILED)]
    return [
        (f"{name}: {'the same' if one[name] == now.get(name) else 'NOT THE SAME'}",
         one[name] == now.get(name))
        for name in names
    ]  # fmt: skip


def _changed(recorded: Path) -> list[tuple[str, bool]]:
    """The files beside the record that are no longer what it says; one that is gone is none."""
    lines = []
    for name, digest in digests(recorded / RESULT).items():
        path = recorded / name
        if name == RECORD or Path(name).is_absolute() or ".." in Path(name).parts:
            continue  # a build's record has the time that it took; and no name leads out
        try:
            if path.is_file() and sha256(path.read_bytes()) != digest:
                lines.append((f"{name}: CHANGED since it was recorded", False))
        except OSError as error:
            raise cannot("read", path, error) from None
    return lines


def _version(folder: Path) -> str | None:
    """Of the nvcc that compiled the kernel of a run; None where there is none."""
    told = _read(folder / RECORD)
    version = told.get("nvcc") if isinstance(told, dict) else None
    return version if isinstance(version, str) and VERSION.fullmatch(version) else None


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
