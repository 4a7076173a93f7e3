"""What `flashwright generate` does: a tuple of stages, each taking a Run and returning the next.

A stage writes its artefact as soon as it has it, so an interruption loses nothing that is finished.
`result.json` comes last and is replaced whole: where it stands, the run it tells of has ended.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from flashwright import __version__
from flashwright.build.package import CLASSES, TUNING
from flashwright.files import cannot, recorded, set_aside, sha256, write
from flashwright.lang.diagnostic import Diagnostic, Failed

if TYPE_CHECKING:
    from flashwright.author.builtin.author import Written
    from flashwright.build.compile import Built
    from flashwright.check.program import Program
    from flashwright.gpu import Gpu
    from flashwright.judge.cpu import Verdict
    from flashwright.judge.verdict import Verdict as GpuVerdict
    from flashwright.lower.translate import Translation
    from flashwright.spec import AttentionSpec

SCHEMA = 1
RESULT = "result.json"
EMULATION_SECONDS = 8.0  # for the verdict under emulation; `verify --on cpu` takes its time
KINDS: Mapping[str, str] = {
    "gpu": "right on a GPU",
    "emulated": "right under emulation",
    "checked": "only checked",
}
"""The kinds of verdict that a run can end with: each says less than the one before."""
ARTEFACTS = (
    *("spec.toml", "sketch.tl", "code.tl", "reasoning.md"),
    *("kernel.cu", "kernel.map.json", "launch.json"),
    *("kernel.cubin", "kernel.ptx", "build.json"),
)

Progress = Callable[[int, int, str], None]
Status = Literal["ok", "failed", "skipped"]


@dataclass(frozen=True)
class Finding:
    """A diagnostic and the artefact it is about."""

    file: str
    diagnostic: Diagnostic


@dataclass(frozen=True)
class Timing:
    """How a stage went. One that could not run is skipped, which is neither right nor wrong."""

    stage: str
    status: Status
    seconds: float
    why: tuple[Diagnostic, ...] = ()
    """Why it was skipped, and how to get what is missing."""


class Skipped(Exception):
    """A stage cannot run here, and the kernel is not to blame."""

    def __init__(self, *why: Diagnostic) -> None:
        super().__init__(*why)
        self.why = why


@dataclass(frozen=True)
class Run:
    """Everything known so far. Stages do not change it: they return the next one."""

    spec: AttentionSpec
    gpu: Gpu
    folder: Path
    artefacts: Mapping[str, str] = field(default_factory=dict)
    """The text of each file written, by its name in the folder."""
    binaries: Mapping[str, bytes] = field(default_factory=dict)
    """The files written that are not text."""
    timings: tuple[Timing, ...] = ()
    findings: tuple[Finding, ...] = ()
    written: Written | None = None
    program: Program | None = None
    verdict: Verdict | None = None
    translation: Translation | None = None
    built: Built | None = None
    gpu_verdict: GpuVerdict | None = None
    emulated: GpuVerdict | None = None
    """The verdict on the kernel's PTX, executed on the CPU: where no GPU can run it."""
    kept: tuple[str, ...] = ()
    """Files that were in the folder, not as we wrote them: they are now NAME.bak."""

    @property
    def files(self) -> dict[str, str | bytes]:
        """All that was written, text or not."""
        return {**self.artefacts, **self.binaries}

    @property
    def failed(self) -> tuple[Finding, ...]:
        """The findings that are errors."""
        return tuple(f for f in self.findings if f.diagnostic.severity == "error")

    @property
    def ok(self) -> bool:
        """Nothing is wrong so far."""
        verdicts = (self.verdict, self.gpu_verdict, self.emulated)
        return not self.failed and all(v is None or v.ok for v in verdicts)

    @property
    def kind(self) -> str:
        """What its verdict rests on: one of KINDS."""
        if self.gpu_verdict is not None:
            return "gpu"
        return "checked" if self.emulated is None else "emulated"


@dataclass(frozen=True)
class Stage:
    """One step. `proves` may be said once it has passed, `lacks` must be said before."""

    name: str
    title: str
    work: Callable[[Run, Progress], Run]
    proves: str
    lacks: str


class Watcher(Protocol):
    """Whoever shows the run to a person."""

    def begin(self, stage: Stage, number: int, total: int) -> None:
        """A stage starts."""

    def progress(self, done: int, total: int, text: str) -> None:
        """It is this far."""

    def end(self, stage: Stage, run: Run) -> None:
        """It has ended, well or not: the last of run.timings says which."""


def generate(
    spec: AttentionSpec, gpu: Gpu, folder: Path, watcher: Watcher, stages: tuple[Stage, ...] = ()
) -> Run:
    """Run all stages; a failed one is the last. The folder then holds what was made.

    A stage that cannot run on this machine is skipped, and so is what needs its result.
    """
    from flashwright import spec as specs

    stages = stages or STAGES
    kept = _prepare(folder)
    run = _keep(Run(spec, gpu, folder, kept=kept), "spec.toml", specs.dump(spec))
    for number, stage in enumerate(stages, 1):
        watcher.begin(stage, number, len(stages))
        run = _timed(stage, run, watcher.progress)
        watcher.end(stage, run)
        if not run.ok:
            break
    write(folder / RESULT, json.dumps(result(run), indent=2, ensure_ascii=False) + "\n")
    return run


def _prepare(folder: Path) -> tuple[str, ...]:
    """Make the folder and take away what an earlier run left; the names of what is kept as .bak."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        records = [folder / RESULT, folder / "build.json"]
        ours = {name: digest for path in records for name, digest in recorded(path).items()}
        for path in records:  # nobody's work: they tell of files that now go
            path.unlink(missing_ok=True)
    except OSError as error:
        raise cannot("use", folder, error) from None
    return set_aside(folder, (*ARTEFACTS, CLASSES, TUNING), ours)


def _timed(stage: Stage, run: Run, progress: Progress) -> Run:
    start = time.perf_counter()
    why: tuple[Diagnostic, ...] = ()
    try:
        after = stage.work(run, progress)
    except Failed as failed:
        findings = tuple(Finding("", d) for d in failed.diagnostics)
        after = replace(run, findings=run.findings + findings)
    except Skipped as skipped:
        after, why = run, skipped.why
    status: Status = "skipped" if why else "ok" if after.ok else "failed"
    timing = Timing(stage.name, status, time.perf_counter() - start, why)
    return replace(after, timings=(*run.timings, timing))


# --- the stages -------------------------------------------------------------------------------


def _sketch(run: Run, progress: Progress) -> Run:
    from flashwright.author.builtin.author import write_sketch

    return _keep(run, "sketch.tl", write_sketch(run.spec))


def _parameters(run: Run, progress: Progress) -> Run:
    from flashwright.author.builtin.author import write_code
    from flashwright.author.builtin.choose import NothingFits
    from flashwright.author.builtin.reasoning import reasoning

    try:
        written = write_code(run.artefacts["sketch.tl"], run.spec, run.gpu)
    except NothingFits as error:
        hint = (
            "another --gpu, --dtype or a smaller --head-dim may fit; `flashwright gpus` lists them"
        )
        raise Failed(Diagnostic("FW905", str(error), help=hint)) from None
    run = _keep(replace(run, written=written), "code.tl", written.code)
    return _keep(run, "reasoning.md", reasoning(run.spec, run.gpu, written))


def _check(run: Run, progress: Progress) -> Run:
    from flashwright.check.check import check
    from flashwright.lang.parse import parse

    for name in ("sketch.tl", "code.tl"):
        try:
            checked = check(parse(run.artefacts[name]), run.gpu)
            found, program = checked.diagnostics, checked.program
        except Failed as failed:
            found, program = failed.diagnostics, None
        findings = (*run.findings, *(Finding(name, d) for d in found))
        run = replace(run, findings=findings, program=program)
    return run


def _cpu(run: Run, progress: Progress) -> Run:
    from flashwright.judge.cpu import judge

    assert run.program is not None  # the check before this one stops the run otherwise
    verdict = judge(run.program, run.spec, progress=progress)
    findings = tuple(Finding("code.tl", d) for d in verdict.diagnostics)
    return replace(run, verdict=verdict, findings=run.findings + findings)


def _translate(run: Run, progress: Progress) -> Run:
    from flashwright.build import package
    from flashwright.lower.translate import translate

    assert run.program is not None
    try:
        translation = translate(run.program, run.gpu)
    except Failed as failed:
        # Not an error of the program: the translator does not do this GPU, or not this yet.
        if all(d.bad_input for d in failed.diagnostics):
            raise Skipped(*failed.diagnostics) from None
        raise
    run = replace(run, translation=translation)
    for name, text in package.translated(translation).items():
        run = _keep(run, name, text)
    return run


def _build(run: Run, progress: Progress) -> Run:
    from flashwright.build import package, toolchain
    from flashwright.build.make import make

    if run.translation is None:
        raise Skipped(Diagnostic("FW821", "there is no CUDA source to compile"))
    try:
        tools = toolchain.find()
    except Failed as failed:
        raise Skipped(*failed.diagnostics) from None
    assert run.program is not None
    try:
        code = run.artefacts["code.tl"]
        made, built = make(run.program, run.gpu, first=run.translation, tl=code, toolchain=tools)
    except Failed as failed:
        found = [Finding("code.tl" if d.span else "kernel.cu", d) for d in failed.diagnostics]
        return replace(run, findings=(*run.findings, *found))
    warnings = tuple(Finding("kernel.cu", d) for d in built.warnings)
    run = replace(run, built=built, translation=made, findings=run.findings + warnings)
    for name, data in {**package.translated(made), **package.compiled(built)}.items():
        run = _keep(run, name, data)
    return _keep(run, "build.json", package.record(built, run.gpu, run.files))


def _verdict(run: Run, progress: Progress) -> Run:
    from flashwright.judge.judge import judge
    from flashwright.sandbox.candidate import Candidate

    if run.built is None:
        raise Skipped(Diagnostic("FW851", "there is no compiled kernel to run"))
    try:
        package = Candidate("package", str(run.folder.resolve()), title=str(run.folder))
        found = judge(package, run.spec, progress=progress)
    except Failed as failed:
        # No GPU, or none that takes the kernel: nothing is known of it, for good or ill.
        if all(d.code == "FW851" for d in failed.diagnostics):
            return _emulate(run, progress, failed.diagnostics)
        raise
    findings = tuple(Finding("kernel.cu", d) for d in found.diagnostics)
    return replace(run, gpu_verdict=found, findings=run.findings + findings)


def _emulate(run: Run, progress: Progress, why: tuple[Diagnostic, ...]) -> Run:
    """The verdict without a GPU; skipped where the emulator cannot be had or knows too little."""
    from flashwright.judge.emulated import judge_emulated

    try:
        found = judge_emulated(run.folder, run.spec, seconds=EMULATION_SECONDS, progress=progress)
    except Failed as failed:
        if all(d.bad_input for d in failed.diagnostics):
            raise Skipped(*why, *failed.diagnostics) from None
        raise
    findings = tuple(Finding("code.tl" if d.span else "kernel.cu", d) for d in found.diagnostics)
    noted = replace(found, notes=(f"instead of a GPU: {why[0].message}", *found.notes))
    return replace(run, emulated=noted, findings=run.findings + findings)


# The measurement will stand behind these, in this tuple. Each takes the Run that the one before
# returned and adds its own fields and files to it; its line then moves from LATER into its Stage.
STAGES: tuple[Stage, ...] = (
    Stage(
        "sketch",
        "Sketch: what moves and what is computed",
        _sketch,
        proves="the operator is thought through in TL",
        lacks="no sketch",
    ),
    Stage(
        "parameters",
        "Parameters: sizes that fit the GPU, and why",
        _parameters,
        proves="every size is chosen for this GPU, with its reason",
        lacks="no sizes chosen",
    ),
    Stage(
        "check",
        "Check: shapes, spaces, layouts, order, budgets",
        _check,
        proves="the TL code passes the checker and fits the GPU's budgets",
        lacks="not checked",
    ),
    Stage(
        "cpu",
        "CPU run: is it attention?",
        _cpu,
        proves="run block by block on the CPU, it agrees with fp64 attention on all problems tried",
        lacks="not compared with fp64 attention",
    ),
    Stage(
        "translate",
        "Translation: CuTe C++, each block under its TL line",
        _translate,
        proves="the TL code is translated to CuTe C++",
        lacks="not translated to CUDA",
    ),
    Stage(
        "build",
        "Build: nvcc, and what ptxas says",
        _build,
        proves="it compiles for this GPU without spilling a register",
        lacks="not compiled",
    ),
    Stage(
        "verdict",
        "Verdict: right on the GPU, or under emulation?",
        _verdict,
        proves="run on the GPU at hand, it agrees with fp64 attention on all problems tried",
        lacks="not run on a GPU",
    ),
)

# What a kernel needs beyond the stages that exist; a stage of that name takes its line away.
LATER: Mapping[str, str] = {
    "measure": "not measured: every speed is an estimate",
}


# What the last stage proves where there is no GPU.
EMULATED = (
    "its PTX, executed on the CPU by the GPU's rules, agrees with fp64 attention on all problems "
    "tried, with no race and no bad access"
)


def claimed(run: Run) -> list[str]:
    """What this run has shown."""
    passed, proves = _passed(run), {stage.name: stage.proves for stage in STAGES}
    if run.gpu_verdict is None:
        proves["verdict"] = EMULATED
    return [text for name, text in proves.items() if name in passed]


def not_claimed(run: Run) -> list[str]:
    """What this run has not shown: the words of every stage that did not pass or does not exist."""
    passed = _passed(run) - ({"verdict"} if run.gpu_verdict is None else set())
    every = {**{stage.name: stage.lacks for stage in STAGES}, **LATER}
    return [text for name, text in every.items() if name not in passed]


def _passed(run: Run) -> set[str]:
    return {t.stage for t in run.timings if t.status == "ok"}


# --- the record -------------------------------------------------------------------------------


def result(run: Run) -> dict[str, Any]:
    """The run as plain data, without absolute paths."""
    return {
        "schema": SCHEMA,
        "flashwright": __version__,
        "ok": run.ok,
        "spec": run.spec.model_dump(mode="json"),
        "gpu": run.gpu.name,
        "stages": [_stage(timing) for timing in run.timings],
        "parameters": [asdict(c) for c in run.written.choices] if run.written else [],
        "findings": [_finding(f) for f in run.findings],
        "cpu": run.verdict.record() if run.verdict else None,
        "build": run.built.record() if run.built else None,
        "verdict": run.kind,
        "emulated_run": run.emulated.record() if run.emulated else None,
        "gpu_run": run.gpu_verdict.record() if run.gpu_verdict else None,
        "artefacts": {name: sha256(data) for name, data in run.files.items()},
        "claimed": claimed(run),
        "not_claimed": not_claimed(run),
    }


def _stage(timing: Timing) -> dict[str, Any]:
    """A stage's line in the record; why is there only where it was skipped."""
    line = {"stage": timing.stage, "status": timing.status, "seconds": round(timing.seconds, 3)}
    why = [{"code": d.code, "message": d.message, "help": d.help} for d in timing.why]
    return {**line, "why": why} if why else line


def _finding(finding: Finding) -> dict[str, Any]:
    from flashwright.lang.render import as_json

    record: dict[str, Any] = json.loads(as_json([finding.diagnostic], finding.file))[0]
    return record


# --- files ------------------------------------------------------------------------------------


def _keep(run: Run, name: str, data: str | bytes) -> Run:
    write(run.folder / name, data)
    if isinstance(data, bytes):
        return replace(run, binaries={**run.binaries, name: data})
    return replace(run, artefacts={**run.artefacts, name: data})
