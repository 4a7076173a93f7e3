"""How fast a study's kernels are beside their peers: measured where there is a GPU, else not."""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Callable
from pathlib import Path

from flashwright.build import driver
from flashwright.files import write
from flashwright.folder import RESULT
from flashwright.judge.judge import need_torch
from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.measure import kernels
from flashwright.measure.bench import Step
from flashwright.measure.grid import of_spec
from flashwright.measure.journal import Journal
from flashwright.measure.peers import registry
from flashwright.measure.results import Results
from flashwright.measure.session import OtherRun, Plan, session

LENGTHS = (1024, 4096, 16_384)
FOLDER, FILE = "bench", "speed.json"
Measure = Callable[[Path, Callable[[str], None]], float]
"""Measure the package in a folder, and say how many times as fast as the best peer it is."""


def wanted(folder: Path) -> bool:
    """Whether a sample is a package that is right on a GPU, and not measured yet."""
    try:
        told = json.loads((folder / RESULT).read_bytes())
        right = bool(told["ok"]) and told["verdict"] == "gpu"
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return right and (folder / "kernel.cubin").is_file() and ratio(folder) is None


def ratio(folder: Path) -> float | None:
    """What was measured; None where nothing was."""
    try:
        found = float(json.loads((folder / FILE).read_bytes())["ratio"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if math.isfinite(found) and found > 0 else None


def measure(folder: Path, progress: Callable[[str], None]) -> float:
    """By the benchmark, with all peers that are installed; Failed where that cannot be."""
    card = driver.cards()[0]
    need_torch()
    made = kernels.load(folder)
    plan = Plan(
        title="study",
        cells=tuple(of_spec(made.spec, LENGTHS)),
        gpu=made.gpu,
        peers=tuple(registry.choose(None)),
        packages=(made,),
    )
    try:
        journal = Journal.resume(folder / FOLDER)
        session(plan, card, folder / FOLDER, journal, _Watcher(progress), secrets.randbits(31))
    except OtherRun as other:
        text = f"{folder / FOLDER} is of another run: {other}"
        raise Failed(Diagnostic("FW851", text, help="remove it, and it is measured anew")) from None
    found = beside_the_best(Results.of(journal.records))
    if found is None:
        raise Failed(Diagnostic("FW851", "no problem was done by it and by a peer"))
    write(folder / FILE, json.dumps({"ratio": found, "card": card.name}) + "\n")
    return found


def beside_the_best(results: Results) -> float | None:
    """The speed over that of the fastest peer, as the geometric mean over all cells."""
    best = [(cell, results.fastest_peer(cell)) for cell in results.cells]
    ratios = [results.ratio(cell, peer) for cell, peer in best if peer is not None]
    logs = [math.log(ratio) for ratio in ratios if ratio]
    return math.exp(sum(logs) / len(logs)) if logs else None


class _Watcher:
    """A benchmark as one line of the study."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell

    def phase(self, title: str) -> None:
        self._tell(title)

    def progress(self, done: int, total: int, text: str) -> None:
        self._tell(text)

    def cell(self, step: Step) -> None:
        self._tell("measuring")

    def trouble(self, text: str) -> None:
        self._tell(text)
