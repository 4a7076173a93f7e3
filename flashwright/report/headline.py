"""The headline of a report: the verdict, then the speed, in the same words in every format.

It claims only what the files show: each verdict with its card, each ratio with its peer, its card
and the number of cells.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flashwright.report import words
from flashwright.report.model import (
    Bench,
    RecordedCheck,
    RecordedVerdict,
    Report,
    ReportKernel,
    State,
)
from flashwright.report.ratios import Ratios, every

ORDER: tuple[State, ...] = (
    *("rejected", "missing", "changed", "unjudged", "cpu", "emulated", "right"),
)
MARKS: dict[State, str] = {
    "right": "✓",
    "rejected": "✗",
    "missing": "✗",
    "cpu": "◐",
    "emulated": "◐",
    "unjudged": "?",
    "changed": "?",
}


@dataclass(frozen=True)
class HeadlinePoint:
    """The headline of kernels that share a state, with what is shown and not shown."""

    state: State
    title: str
    shown: tuple[str, ...] = ()
    not_shown: tuple[str, ...] = ()


@dataclass(frozen=True)
class RunSpeed:
    """The speed headline of one run: its title and the ratios to the peers."""

    title: str
    ratios: tuple[Ratios, ...]
    notes: tuple[str, ...] = ()


def verdicts(report: Report) -> list[HeadlinePoint]:
    """The verdict headlines, rejections first; kernels of one state and card are grouped."""
    groups: dict[tuple[State, str], list[ReportKernel]] = {}
    for state in ORDER:
        for kernel in report.kernels:
            if kernel.state == state:
                where = kernel.verdict.device if state == "right" and kernel.verdict else ""
                groups.setdefault((state, where), []).append(kernel)
    total = len(report.kernels)
    return [_point(state, where, kernels, total) for (state, where), kernels in groups.items()]


def _point(state: State, where: str, kernels: Sequence[ReportKernel], total: int) -> HeadlinePoint:
    count = f"{len(kernels)} of {words.plural(total, 'kernel')} " if total > 1 else ""
    title = {
        "right": f"right on {where}",
        "rejected": f"rejected: {', '.join(_offence_names(kernels))}",
        "missing": "could not be made",
        "changed": "not judged: files have changed since they were",
        "cpu": "right on the CPU, not run on a GPU",
        "emulated": "right under emulation, not run on a GPU",
        "unjudged": "not run on a GPU" if any(k.folder for k in kernels) else "not judged",
    }[state]
    text = f"{count}{title}"
    shown = [line for k in kernels for line in _shown(k, total > 1)]
    lacks = [line for k in kernels for line in _not_shown(k)]
    if state == "right" and total > 1:
        shown = [_together([k.verdict for k in kernels if k.verdict])]
    return HeadlinePoint(state, text[:1].upper() + text[1:], _once(shown), _once(lacks))


def _shown(kernel: ReportKernel, named: bool) -> list[str]:
    """The lines that support a kernel's state."""
    lines: list[str] = []
    if kernel.state == "rejected":
        lines = [*kernel.failures, *(_rejections(kernel.verdict) if kernel.verdict else ())]
    elif kernel.state == "missing":
        lines = [kernel.why]
    elif kernel.state == "changed":
        lines = [f"changed since result.json was written: {', '.join(kernel.changed)}"]
    elif kernel.verdict is not None:
        lines = [accuracy(kernel.verdict), _checks(kernel.verdict.checks)]
    else:
        lines = list(kernel.claimed)
    return [f"{kernel.name}: {line}" if named else line for line in lines if line]


def _not_shown(kernel: ReportKernel) -> list[str]:
    if kernel.state in ("rejected", "missing"):
        return []
    verdict = kernel.verdict
    missing = []
    if verdict is not None and verdict.open:
        missing = [f"too little was tried for a verdict: {verdict.missing}"]
    return [*missing, *kernel.not_claimed, *kernel.skipped]


def _rejections(verdict: RecordedVerdict) -> list[str]:
    """Each offence with its message; without offences, the failed checks and cases."""
    told = [f"{o.name}: {o.message}" if o.message else o.name for o in verdict.offences]
    if told or verdict.right:
        return told
    checks = [f"{c.name}: {c.note or c.question}" for c in verdict.checks if c.passed is False]
    cases = [f"{c.output} ({c.problem}): {c.reason}" for c in verdict.cases if not c.ok]
    return [*checks, *cases[:3]] or ["the judge's record gives no reason"]


def _offence_names(kernels: Sequence[ReportKernel]) -> list[str]:
    names = [o.name for k in kernels if k.verdict for o in k.verdict.offences]
    names += [line.partition(":")[0] for k in kernels for line in k.failures]
    return list(dict.fromkeys(names)) or ["no reason recorded"]


def accuracy(verdict: RecordedVerdict) -> str:
    """The accuracy of a kernel, compared with the library's error."""
    outputs = f" on {words.plural(verdict.outputs, 'output')}" if verdict.outputs else ""
    worst = verdict.worst
    line = f"agrees with fp64{outputs}"
    if worst is not None:
        line += f"; the largest rms error of O is {words.error(worst)}"
    if verdict.worst_ratio is not None:
        library = verdict.library or "the library"
        return f"{line}, at most {words.ratio(verdict.worst_ratio)} times that of {library}"
    return f"{line}; {verdict.unable}" if verdict.unable else line


def _checks(checks: Sequence[RecordedCheck]) -> str:
    asked = [c for c in checks if c.passed is not None]
    if not checks:
        return ""
    rest = len(checks) - len(asked)
    line = f"{words.plural(len(asked), 'check')} passed"
    return f"{line}, {rest} could not run here" if rest else line


def _together(verdicts: Sequence[RecordedVerdict]) -> str:
    """The accuracy of several kernels in one line."""
    worst = [v.worst for v in verdicts if v.worst is not None]
    ratios = [v.worst_ratio for v in verdicts if v.worst_ratio is not None]
    line = "all agree with fp64"
    if worst:
        line += f"; the largest rms error of O is {words.error(max(worst))}"
    if ratios:
        libraries = {v.library for v in verdicts if v.library}
        library = libraries.pop() if len(libraries) == 1 else "the library"
        line += f", at most {words.ratio(max(ratios))} times that of {library}"
    return line


# --- speed ------------------------------------------------------------------------------------


def speeds(report: Report) -> list[RunSpeed]:
    """A speed headline for each run of the benchmark."""
    return [_speed(bench) for bench in report.benches]


def _speed(bench: Bench) -> RunSpeed:
    run = bench.record
    wanted = max(len(run.cells), len(bench.cells))
    title = f"{run.title} on {run.card}, {words.plural(wanted, 'cell')}"
    if run.translated_for:
        title += f", kernels translated for {run.translated_for}"
    notes = []
    if bench.measured < wanted:
        notes.append(f"not finished: {bench.measured} of {words.plural(wanted, 'cell')} measured")
    out = sum(not c.counts for c in bench.cells)
    if out:
        notes.append(f"{words.plural(out, 'cell')} of a rejected kernel left out of every ratio")
    ratios = every(bench)
    if not ratios:
        notes.append("no ratio: there is no cell in which ours and a peer both have a figure")
    return RunSpeed(title[:1].upper() + title[1:], tuple(ratios), tuple(notes))


def in_words(found: Ratios) -> str:
    """A ratio with its peer, the number of cells and the worst cell."""
    how = {"faster": "faster", "slower": "slower", "level": "level"}[found.verdict]
    return (
        f"{words.ratio(found.mean)} times as fast as {found.peer} ({how}): geometric mean over "
        f"{words.plural(found.cells, 'cell')}, worst {words.ratio(found.worst)} at {found.where}"
    )


def _once(lines: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(lines))
