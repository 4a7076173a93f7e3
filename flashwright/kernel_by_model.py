"""A kernel that a language model writes for TL code: held to its contract, compiled, judged.

An attempt is a package in its own folder of the record, and is judged there: on the GPU, or under
emulation where there is none. The one that is right then becomes the run's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from flashwright import stages
from flashwright.author.llm.attempts import Tried
from flashwright.author.llm.transcript import Lane
from flashwright.build.authored import TranslationByModel, translated_by_model
from flashwright.build.package import OWN
from flashwright.check.budget import in_words
from flashwright.check.program import Program
from flashwright.folder import keep
from flashwright.gpu import Gpu
from flashwright.lang import render
from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.lower.contract import Contract, contract
from flashwright.run import Finding, Run, Skipped

SOURCE = "kernel.cu"


@dataclass(frozen=True)
class Kernel:
    """A kernel that compiles and is not wrong, and the run in which it was judged."""

    made: TranslationByModel
    judged: Run


def facts_of(program: Program, gpu: Gpu) -> dict[str, str]:
    """What a model is told of the kernel that it writes."""
    agreed = contract(program, gpu)
    return {"header": agreed.header, "notes": agreed.notes, "program": in_words(program, gpu)}


def attempted(
    run: Run, program: Program, source: str, lane: Lane, *, agreed: Contract | None = None
) -> Tried[Kernel]:
    """Look at what a model wrote: for the run's TL, or by a contract that knows of none."""
    tl = "" if agreed else run.artefacts["code.tl"]
    try:
        made = translated_by_model(program, run.gpu, run.spec, source, tl=tl, agreed=agreed)
    except Failed as failed:
        if all(d.bad_input for d in failed.diagnostics):
            raise  # no compiler, or one that does not work: no attempt can help
        return _wrong(
            [Finding(SOURCE, d) for d in failed.diagnostics], source, tl, {SOURCE: source}
        )
    trial = _trial(run, lane, made)
    if lane.model is None:  # what the judge said is in the record
        taken, told = lane.before["taken"], lane.before["findings"]
        return Tried(Kernel(made, trial) if taken else None, told, (), made.files)
    judged = _judged(keep(trial, made.files))
    if judged.ok:
        return Tried(Kernel(made, judged), "", (), made.files)
    return _wrong(judged.failed, source, tl, made.files)


def placed(run: Run, done: Kernel) -> Run:
    """The run with a model's kernel in it, and what was found of it."""
    files = {name: data for name, data in done.made.files.items() if name != "spec.toml"}
    return replace(
        keep(run, files),
        findings=run.findings + done.judged.findings,
        builds={OWN: done.made.built},
        translations={OWN: done.made.translation},
        gpu_verdict=done.judged.gpu_verdict,
        emulated=done.judged.emulated,
    )


def _trial(run: Run, lane: Lane, made: TranslationByModel) -> Run:
    """The attempt as a run of its own, in its folder of the record."""
    return replace(
        run,
        folder=lane.here,
        artefacts={},
        binaries={},
        findings=(),
        translations={OWN: made.translation},
        builds={OWN: made.built},
    )


def _judged(run: Run) -> Run:
    try:
        return stages.verdict(run, _silent)
    except Skipped:  # nobody here can tell: it compiles, and that is all that is known
        return run
    except Failed as failed:
        return run.noting(SOURCE, *failed.diagnostics)


def _silent(done: int, total: int, text: str) -> None:
    """Progress that nobody watches: the attempt has a line of its own."""


def _wrong(findings: Any, source: str, tl: str, files: Any) -> Tried[Kernel]:
    """What is wrong, in the lines of the file that each finding is about."""
    found: tuple[Diagnostic, ...] = tuple(f.diagnostic for f in findings)
    in_tl = [f.diagnostic for f in findings if f.file == "code.tl"]
    in_source = [f.diagnostic for f in findings if f.file != "code.tl"]
    told = render.for_model(in_source, source)
    if in_tl:
        told += "\nIn the lines of the TL:\n" + render.for_model(in_tl, tl)
    return Tried(None, told, found, files)
