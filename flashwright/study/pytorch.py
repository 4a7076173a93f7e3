"""The way without a kernel: the model writes a PyTorch function, judged like a kernel.

It is judged if PyTorch and a GPU are available. Otherwise it is kept without a verdict.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from flashwright.author.llm import extract
from flashwright.author.llm.attempts import Tried
from flashwright.author.llm.transcript import Lane
from flashwright.files import write
from flashwright.generate.by_model.ask import FILES, Authors, ask
from flashwright.generate.folder import keep
from flashwright.generate.pipeline import STAGES, Stage
from flashwright.generate.state import Progress, Run, Skipped
from flashwright.judge import static
from flashwright.judge.judge import judge, need_torch
from flashwright.judge.verdict import Verdict
from flashwright.lang import render
from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.sandbox.candidate import Candidate

FILE, FUNCTION = FILES["pytorch"], "attention"


@dataclass(frozen=True)
class PyTorchFunction:
    """A function without known errors; without a verdict if there is no GPU."""

    source: str
    verdict: Verdict | None


def plan(authors: Authors) -> Sequence[Stage]:
    """The stages of a run: the model writes the function, then its verdict is reported."""
    asking = Stage("pytorch", "PyTorch: a function", partial(work, authors), proves="", lacks="")
    usual = next(stage for stage in STAGES if stage.name == "verdict")
    return [asking, replace(usual, work=_report_verdict)]


def work(authors: Authors, run: Run, progress: Progress) -> Run:
    """Ask the model for the function until one is right."""
    done: PyTorchFunction | None
    attempt = partial(_attempted, run)
    run, done = ask(authors, run, "pytorch", extract.python, attempt, progress)
    if done is None:
        return run
    return replace(keep(run, {FILE: done.source}), gpu_verdict=done.verdict)


def _report_verdict(run: Run, progress: Progress) -> Run:
    """Keep the verdict of the last attempt. Raises Skipped if there is none."""
    if run.gpu_verdict is None:
        try:
            need_torch()
        except Failed as failed:
            raise Skipped(*failed.diagnostics) from None
        raise Skipped(Diagnostic("FW851", "the function was not judged"))
    return run


def _attempted(run: Run, source: str, lane: Lane) -> Tried[PyTorchFunction]:
    files = {FILE: source}
    path = lane.here / FILE
    write(path, source)
    candidate = Candidate("python", str(path.resolve()), FUNCTION, title=FILE, untrusted=True)
    found = tuple(_read(source, candidate))
    if found:
        return _wrong(found, source)
    try:
        need_torch()
    except Failed:
        return Tried(PyTorchFunction(source, None), "", (), files)
    try:
        # PyTorch's own GEMM libraries are allowed.
        verdict = judge(candidate, run.spec, base=run.folder, libraries=True)
    except Failed as failed:
        if all(d.code == "FW851" for d in failed.diagnostics):
            raise  # the GPU is gone: no attempt can help
        return _wrong(failed.diagnostics, source)
    if not verdict.ok:
        return _wrong(verdict.diagnostics, source)
    return Tried(PyTorchFunction(source, verdict), "", (), files)


def _read(source: str, candidate: Candidate) -> Iterator[Diagnostic]:
    """Errors that are found without running the source."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        yield Diagnostic("FW857", f"this is not valid Python: {error}")
        return
    if not any(isinstance(node, ast.FunctionDef) and node.name == FUNCTION for node in tree.body):
        yield Diagnostic("FW857", f"there is no function `{FUNCTION}` at the top level")
    named = static.libraries(candidate)
    if named:
        text = f"its source names {', '.join(named)}, and it has to do the work itself"
        yield Diagnostic("FW870", text)


def _wrong(found: tuple[Diagnostic, ...], source: str) -> Tried[PyTorchFunction]:
    return Tried(None, render.for_model(found, source), found, {FILE: source})
