"""A whole study: all samples that its folder does not have yet, one after the other."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from flashwright.author.llm.model import Model
from flashwright.files import write
from flashwright.lang.diagnostic import Failed
from flashwright.pipeline import Stage
from flashwright.run import KINDS, Run
from flashwright.study import speed
from flashwright.study.sample import Sample, Terms, Unfinished, done, take
from flashwright.study.settings import Settings

TROUBLE = "trouble.txt"
"""In a sample's folder: why it is open, where that is our own fault."""


class Watcher(Protocol):
    """Whoever shows the study to a person."""

    def begin(self, sample: Sample, number: int, total: int) -> None:
        """A sample starts, or goes on."""

    def progress(self, text: str) -> None:
        """It is this far."""

    def end(self, sample: Sample, text: str) -> None:
        """It has ended; how, in words."""


def study(
    settings: Settings,
    terms: Terms,
    model: Model,
    root: Path,
    watcher: Watcher,
    measuring: speed.Measure | None = speed.measure,
) -> int:
    """Take the samples that are missing; how many of them are still open then.

    A sample that fails, whatever the reason, is told and does not end the study. A
    KeyboardInterrupt does: what was finished is kept, and what was said of the rest.
    """
    every, left = settings.every, 0
    for number, sample in enumerate(every, 1):
        folder = sample.folder(root)
        try:
            if not done(folder):
                watcher.begin(sample, number, len(every))
                run = take(sample, terms, model, folder, _Stages(watcher))
                (folder / TROUBLE).unlink(missing_ok=True)
                watcher.end(sample, _ended(run))
            if measuring is not None:
                _measured(measuring, sample, folder, watcher)
        except Unfinished as unfinished:
            left += 1
            watcher.end(sample, f"open: {unfinished}")
        except Failed as failed:  # such as a disk that is full
            left += 1
            watcher.end(sample, f"open: {failed.diagnostics[0].message}")
        except Exception as error:  # ours: it must not cost the other samples
            left += 1
            _note(folder, error)
            watcher.end(sample, f"open, by a mistake of Flashwright's: {type(error).__name__}")
    return left


def _measured(measuring: speed.Measure, sample: Sample, folder: Path, watcher: Watcher) -> None:
    """The speed of a kernel that is right on a GPU; one that cannot be had is none."""
    if not speed.wanted(folder):
        return
    watcher.progress(f"{sample}: measuring")
    try:
        ratio = measuring(folder, watcher.progress)
    except Failed as failed:
        watcher.end(sample, f"not measured: {failed.diagnostics[0].message}")
    else:
        watcher.end(sample, f"measured: {ratio:.2f} times as fast as the best peer")


def _ended(run: Run) -> str:
    if run.ok:
        return KINDS[run.kind]
    codes = ", ".join(dict.fromkeys(f.diagnostic.code for f in run.failed))
    return f"failed in {run.timings[-1].stage}: {codes}"


def _note(folder: Path, error: Exception) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write(folder / TROUBLE, "".join(traceback.format_exception(error)))
    except (OSError, Failed):
        return  # it is told on the screen all the same


@dataclass(frozen=True)
class _Stages:
    """The stages of a sample, as steps of the study."""

    watcher: Watcher

    def begin(self, stage: Stage, number: int, total: int) -> None:
        """A stage starts."""
        self.watcher.progress(stage.name)

    def progress(self, done: int, total: int, text: str) -> None:
        """It is this far."""
        self.watcher.progress(text)

    def end(self, stage: Stage, run: Run) -> None:
        """It has ended: the sample's own line tells how."""
