"""A whole study: all missing samples, each a job of a fleet.

A sample's folder travels with its job. What changes in it comes back at each step, so a study that
was interrupted goes on from the last one.
"""

from __future__ import annotations

import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from flashwright.author.llm.model import Model
from flashwright.files import write
from flashwright.fleet.fleet import Fleet
from flashwright.fleet.folders import Change, FolderChanges, FolderFiles, apply, packed, unpack
from flashwright.fleet.job import Job, JobPart, Need, Send
from flashwright.generate.by_model.ask import MADE
from flashwright.generate.folder import held
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
Connect = Callable[[], Model]
"""Connects to the model, on the machine that asks it."""


class StudyListener(Protocol):
    """Receives the progress of a study, for display."""

    def begin(self, sample: Sample, number: int, total: int) -> None:
        """A sample starts, is resumed, or is checked on a GPU."""

    def progress(self, sample: Sample, text: str) -> None:
        """The sample has made progress."""

    def end(self, sample: Sample, text: str) -> None:
        """The sample has ended; `text` says how."""


def study(
    settings: Settings,
    terms: StudyTerms,
    connect: Connect,
    root: Path,
    fleet: Fleet,
    need: Need,
    listener: StudyListener,
    checks: Sequence[GpuCheck] = GPU_CHECKS,
) -> None:
    """Run the missing samples, each on a machine of the fleet that has what `need` says.

    A sample that fails, for any reason, is reported and does not end the study. A
    KeyboardInterrupt does; finished samples and the transcripts of the others are kept.
    """
    _run_jobs(settings, terms, connect, root, fleet, need, listener, checks)


def check_on_gpu(
    settings: Settings,
    root: Path,
    fleet: Fleet,
    need: Need,
    listener: StudyListener,
    checks: Sequence[GpuCheck] = GPU_CHECKS,
) -> None:
    """Judge and time the samples of a study on the fleet's GPUs; the model is not asked."""
    _run_jobs(settings, None, None, root, fleet, need, listener, checks)


def _run_jobs(
    settings: Settings,
    terms: StudyTerms | None,
    connect: Connect | None,
    root: Path,
    fleet: Fleet,
    need: Need,
    listener: StudyListener,
    checks: Sequence[GpuCheck],
) -> None:
    every = {str(sample): sample for sample in settings.every}
    numbers = {name: number for number, name in enumerate(every, 1)}
    with held(root):
        jobs = [
            Job(name, SampleJob(sample, terms, connect, packed(sample.folder(root)), checks))
            for name, sample in every.items()
        ]
        for event in fleet.run(need, jobs):
            sample = every[event.name]
            if isinstance(event, JobPart):
                step: SampleStep = event.value
                apply(step.changes, sample.folder(root))
                if step.begins:
                    listener.begin(sample, numbers[event.name], len(every))
                elif step.ends:
                    listener.end(sample, step.text)
                else:
                    listener.progress(sample, step.text)
            elif isinstance(event.error, Failed):  # its machine was lost, or the disk is full
                listener.end(sample, f"open: {event.error.diagnostics[0].message}")
            else:
                event.result()


# --- one sample, on the machine that runs it --------------------------------------------------


@dataclass(frozen=True)
class SampleStep:
    """A part of a sample's job: what is new in words, and in the sample's folder."""

    text: str
    changes: Sequence[Change]
    begins: bool = False
    ends: bool = False


@dataclass(frozen=True)
class SampleJob:
    """Runs or resumes a sample, and checks it on the GPU, if there is one."""

    sample: Sample
    terms: StudyTerms | None
    connect: Connect | None
    """None: only the checks."""
    files: FolderFiles
    """What the sample's folder has already."""
    checks: Sequence[GpuCheck]

    def __call__(self, send: Send) -> None:
        """Run it in a folder of this machine; each step goes to `send`."""
        with tempfile.TemporaryDirectory() as here:
            folder = unpack(self.files, self.sample.folder(Path(here)))
            report = _Report(send, FolderChanges(folder))
            report.begin()
            try:
                self._run(folder, report)
            except Unfinished as unfinished:
                report.end(f"open: {unfinished}")
            except Failed as failed:  # such as a full disk
                report.end(f"open: {failed.diagnostics[0].message}")
            except Exception as error:  # an internal error must not end the study
                _note(folder, error)
                report.end(f"open, because of an error in Flashwright: {type(error).__name__}")

    def _run(self, folder: Path, report: _Report) -> None:
        if self.connect is not None and self.terms is not None and not done(folder):
            for earlier in (judged.FILE, speed.FILE):  # results of a deleted run
                (folder / earlier).unlink(missing_ok=True)
            run = take(self.sample, self.terms, self.connect(), folder, _StageProgress(report))
            (folder / TROUBLE).unlink(missing_ok=True)
            report.end(_ended(run))
        for check in self.checks:
            _run_check(check, folder, report)


@dataclass(frozen=True)
class _Report:
    """Sends the steps of a sample, each with the files that have changed."""

    send: Send
    changes: FolderChanges

    def begin(self) -> None:
        self.send(SampleStep("", (), begins=True))

    def progress(self, text: str) -> None:
        self.send(SampleStep(text, self.changes.take()))

    def end(self, text: str) -> None:
        self.send(SampleStep(text, self.changes.take(), ends=True))


def _run_check(check: GpuCheck, folder: Path, report: _Report) -> None:
    """Run one check of a sample and report its result; a failed check leaves it as it is."""
    try:
        news = check(folder, report.progress)
    except Failed as failed:
        news = f"not judged or timed: {failed.diagnostics[0].message}"
    if news:
        report.end(news)


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

    report: _Report

    def begin(self, stage: Stage, number: int, total: int) -> None:
        """Report the start of a stage of the sample as progress."""
        self.report.progress(stage.name)

    def progress(self, done: int, total: int, text: str) -> None:
        """Report the progress of the stage."""
        self.report.progress(text)

    def end(self, stage: Stage, run: Run) -> None:
        """Nothing: the sample's own line reports the end."""
