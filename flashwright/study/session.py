"""A whole study: all samples that its folder does not have yet, one after the other."""

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
from flashwright.study.sample import Sample, Terms, Unfinished, done, take
from flashwright.study.settings import Settings

TROUBLE = "trouble.txt"
"""In a sample's folder: why it is open, where that is our own fault."""

Look = Callable[[Path, Callable[[str], None]], str | None]
"""What a GPU can tell of a finished sample in a folder, in words; None where that is no news."""
LOOKS: tuple[Look, ...] = (judged.look, speed.look)


class Watcher(Protocol):
    """The display of a running study."""

    def begin(self, sample: Sample, number: int, total: int) -> None:
        """A sample starts, continues, or is only looked at."""

    def progress(self, text: str) -> None:
        """The current sample has made progress."""

    def end(self, sample: Sample, text: str) -> None:
        """The sample has ended; `text` says how."""


def study(
    settings: Settings,
    terms: Terms,
    model: Model,
    root: Path,
    watcher: Watcher,
    looks: Sequence[Look] = LOOKS,
) -> None:
    """Take the samples that are missing.

    A sample that fails, whatever the reason, is told and does not end the study. A
    KeyboardInterrupt does: what was finished is kept, and what was said of the rest.
    """
    every = settings.every
    for number, sample in enumerate(every, 1):
        folder = sample.folder(root)
        try:
            watcher.begin(sample, number, len(every))
            if not done(folder):
                for earlier in (judged.FILE, speed.FILE):  # of a run that somebody has taken away
                    (folder / earlier).unlink(missing_ok=True)
                run = take(sample, terms, model, folder, _Stages(watcher))
                (folder / TROUBLE).unlink(missing_ok=True)
                watcher.end(sample, _ended(run))
            for look in looks:
                _looked(look, sample, folder, watcher)
        except Unfinished as unfinished:
            watcher.end(sample, f"open: {unfinished}")
        except Failed as failed:  # such as a disk that is full
            watcher.end(sample, f"open: {failed.diagnostics[0].message}")
        except Exception as error:  # ours: it must not cost the other samples
            _note(folder, error)
            watcher.end(sample, f"open, by a mistake of Flashwright's: {type(error).__name__}")


def look(settings: Settings, root: Path, watcher: Watcher, looks: Sequence[Look] = LOOKS) -> None:
    """What the GPU here tells of a study that was made elsewhere; nobody is asked."""
    every = settings.every
    for number, sample in enumerate(every, 1):
        watcher.begin(sample, number, len(every))
        for one in looks:
            _looked(one, sample, sample.folder(root), watcher)


def _looked(look: Look, sample: Sample, folder: Path, watcher: Watcher) -> None:
    """What a GPU tells of a sample; what it cannot tell leaves the sample as it is."""
    try:
        told = look(folder, watcher.progress)
    except Failed as failed:
        told = f"not judged or timed: {failed.diagnostics[0].message}"
    if told:
        watcher.end(sample, told)


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
        return  # it is told on the screen all the same


@dataclass(frozen=True)
class _Stages:
    """The stages of a sample, as steps of the study."""

    watcher: Watcher

    def begin(self, stage: Stage, number: int, total: int) -> None:
        """Report the start of a stage of the sample as progress."""
        self.watcher.progress(stage.name)

    def progress(self, done: int, total: int, text: str) -> None:
        """Report the progress of the stage."""
        self.watcher.progress(text)

    def end(self, stage: Stage, run: Run) -> None:
        """It has ended: the sample's own line tells how."""
