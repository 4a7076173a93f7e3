"""A study of a model that answers from a list, as a program: `fleet_study FOLDER ON`.

The driver of a Ray cluster in the tests, which kill it and start it again.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flashwright.author.llm.budget import Budget
from flashwright.author.llm.model import Question, Reply
from flashwright.confine import isolate
from flashwright.fleet.fleet import Fleet
from flashwright.fleet.job import Machines, Need
from flashwright.fleet.on_ray import RayCluster
from flashwright.fleet.processes import LocalMachine
from flashwright.study import operators
from flashwright.study.sample import Sample, StudyTerms
from flashwright.study.session import study
from flashwright.study.settings import Settings
from flashwright.study.ways import chosen
from tests.unit.fleet_tune import look
from tests.unit.test_by_model import CARD, SKETCH, SPEC, fenced

TERMS = StudyTerms(CARD, Budget(attempts=2), last="sketch")
SAMPLES = 4


class Scripted:
    """A model whose second answer is a sketch that passes the checks."""

    name, grammars = "scripted", False

    def ask(self, question: Question) -> Reply:
        time.sleep(0.2)
        second = len(question.messages) > 2
        return Reply(fenced(SKETCH if second else SKETCH.replace("=", "==", 1)))


def connected() -> Scripted:
    """Connects on the machine of a sample, where a model's TL is then checked in the same process:
    a new one takes seconds (see `checked_here` of conftest.py)."""
    isolate.call = lambda work, *given, **limits: work(*given)  # type: ignore[assignment]
    return Scripted()


def looked_at(folder: Path, progress: Callable[[str], None]) -> str | None:
    """Stands for a verdict on a GPU."""
    if (folder / "judged.json").exists():
        return None
    progress("judging it")
    (folder / "judged.json").write_text('{"ok": true}')
    return "right on a GPU"


class Told:
    """Prints a line for everything that is kept."""

    def begin(self, sample: Sample, number: int, total: int) -> None:
        print(f"begins {sample}", flush=True)

    def progress(self, sample: Sample, text: str) -> None:
        pass

    def end(self, sample: Sample, text: str) -> None:
        print(f"ends {sample}: {text}", flush=True)


def studied(root: Path, machines: Machines, told: Any = None) -> None:
    """Run a study, or go on with it."""
    small = operators.Operator("small", SPEC)
    wanted = Settings.of("scripted", TERMS, (small,), chosen("tl"), SAMPLES).keep(root)
    with Fleet(machines) as fleet:
        need = Need(fleet.card("h200").name)
        study(wanted, TERMS, connected, root, fleet, need, told or Told(), [looked_at])


if __name__ == "__main__":
    place, on = sys.argv[1:]
    studied(Path(place), LocalMachine(look=look) if on == "local" else RayCluster(on, look))
