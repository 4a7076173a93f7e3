"""A whole study: runs all missing samples, one after the other."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from flashwright.author.llm.model import Model
from flashwright.files import write
from flashwright.generate.by_model.ask import MADE
from flashwright.generate.pipeline import Stage
from flashwright.generate.state import KINDS, Run
from flashwright.lang.diagnostic import Failed
from flashwright.study import judged, speed
from flashwright.study.sample import Sample, StudyTerms, Unfinished, done, take
from flashwright.study.settings import Settings

TROUBLE = "trouble.txt"
"""The file in a sample's folder with the traceback of an internal error."""

GpuCheck = Callable[[Path, Callable[[str], None]], str | None]
"""Judges or times a finished sample on a GPU; returns the result in words, or None."""
GPU_CHECKS: tuple[GpuCheck, ...] = (judged.judge_sample, speed.time_sample)


class StudyListener(Protocol):
    """Receives the progress of a study, for display."""

    def begin(self, sample: Sample, number: int, total: int) -> None:
        """A sample starts, is resumed, or is checked on a GPU."""

    def progress(self, text: str) -> None:
        """The current sample has made progress."""

    def end(self, sample: Sample, text: str) -> None:
        """The sample has ended; `text` says how."""


def study(
    settings: Settings,
    terms: StudyTerms,
    model: Model,
    root: Path,
    listener: StudyListener,
    checks: Sequence[GpuCheck] = GPU_CHECKS,
) -> None:
    """Run the missing samples.

    A sample that fails, for any reason, is reported and does not end the study. A
    KeyboardInterrupt does; finished samples and the transcripts of the others are kept.
    """
    every = settings.every
    for number, sample in enumerate(every, 1):
        folder = sample.folder(root)
        try:
            listener.begin(sample, number, len(every))
            if not done(folder):
                for earlier in (judged.FILE, speed.FILE):  # results of a deleted run
                    (folder / earlier).unlink(missing_ok=True)
                run = take(sample, terms, model, folder, _StageProgress(listener))
                (folder / TROUBLE).unlink(missing_ok=True)
                listener.end(sample, _ended(run))
            for check in checks:
                _run_check(check, sample, folder, listener)
        except Unfinished as unfinished:
            listener.end(sample, f"open: {unfinished}")
        except Failed as failed:  # such as a full disk
            listener.end(sample, f"open: {failed.diagnostics[0].message}")
        except Exception as error:  # an internal error must not end the study
            _note(folder, error)
            listener.end(
                sample, f"open, because of an error in Flashwright: {type(error).__name__}"
            )


def check_on_gpu(
    settings: Settings, root: Path, listener: StudyListener, checks: Sequence[GpuCheck] = GPU_CHECKS
) -> None:
    """Judge and time the samples of a study on the GPU here; the model is not asked."""
    every = settings.every
    for number, sample in enumerate(every, 1):
        listener.begin(sample, number, len(every))
        for one in checks:
            _run_check(one, sample, sample.folder(root), listener)


def _run_check(check: GpuCheck, sample: Sample, folder: Path, listener: StudyListener) -> None:
    """Run one check of a sample and report its result; a failed check leaves it as it is."""
    try:
        news = check(folder, listener.progress)
    except Failed as failed:
        news = f"not judged or timed: {failed.diagnostics[0].message}"
    if news:
        listener.end(sample, news)


def _ended(run: Run) -> str:
    if run.ok:
        return KINDS[run.kind]
    codes = ", ".join(dict.fromkeys(f.diagnostic.code for f in run.failed))
    stage = run.timings[-1].stage
    made = MADE.get("code" if stage == "parameters" else stage)
    how = f"no {made} came out right" if made else f"failed in {stage}"
    return f"{how}: {codes}"


def _note(folder: Path, error: Exception) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write(folder / TROUBLE, "".join(traceback.format_exception(error)))
    except (OSError, Failed):
        return  # the error is reported on the screen anyway


@dataclass(frozen=True)
class _StageProgress:
    """Reports the stages of a sample as progress of the study."""

    listener: StudyListener

    def begin(self, stage: Stage, number: int, total: int) -> None:
        """Report the start of a stage of the sample as progress."""
        self.listener.progress(stage.name)

    def progress(self, done: int, total: int, text: str) -> None:
        """Report the progress of the stage."""
        self.listener.progress(text)

    def end(self, stage: Stage, run: Run) -> None:
        """Nothing: the sample's own line reports the end."""
