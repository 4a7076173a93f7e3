"""What `flashwright generate` does: a tuple of stages, each taking a Run and returning the next.

A stage writes its artefact as soon as it has it, so an interruption loses nothing that is finished.
`result.json` comes last and is replaced whole: where it stands, the run it tells of has ended.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from flashwright import __version__
from flashwright.build.package import CLASSES, IN_RECORD, OWN, RECORD, TUNING, inside
from flashwright.files import cannot, recorded, set_aside, sha256, write
from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.run import Finding, Progress, Run, Skipped, Status, Timing

if TYPE_CHECKING:
    from flashwright.build.toolchain import Toolchain
    from flashwright.check.program import Program
    from flashwright.gpu import Gpu
    from flashwright.spec import AttentionSpec

SCHEMA = 1
RESULT = "result.json"
EMULATION_SECONDS = 8.0  # for the verdict under emulation; `verify --on cpu` takes its time
ARTEFACTS = (
    *("spec.toml", "sketch.tl", "code.tl", "reasoning.md"),
    *("kernel.cu", "kernel.map.json", "launch.json"),
    *("kernel.cubin", "kernel.ptx", "build.json"),
)


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
    spec: AttentionSpec,
    gpu: Gpu,
    folder: Path,
    watcher: Watcher,
    stages: tuple[Stage, ...] = (),
    reference: bytes | None = None,
) -> Run:
    """Run all stages; a failed one is the last. The folder then holds what was made.

    A stage that cannot run on this machine is skipped, and so is what needs its result. `reference`
    is the file that the spec's `reference` names: the folder gets it.
    """
    from flashwright import spec as specs

    stages = stages or STAGES
    mine = {_reference(spec): reference} if reference is not None else {}
    kept = _prepare(folder, mine)
    run = _keep(Run(spec, gpu, folder, kept=kept), {"spec.toml": specs.dump(spec), **mine})
    for number, stage in enumerate(stages, 1):
        watcher.begin(stage, number, len(stages))
        run = _timed(stage, run, watcher.progress)
        watcher.end(stage, run)
        if not run.ok:
            break
    write(folder / RESULT, json.dumps(result(run), indent=2, ensure_ascii=False) + "\n")
    return run


def _reference(spec: AttentionSpec) -> str:
    """The file of the spec's reference, without the function's name."""
    from flashwright.judge.reference import split

    return split(spec.reference or "")[0]


def _prepare(folder: Path, mine: Mapping[str, bytes]) -> tuple[str, ...]:
    """Make the folder and take away what an earlier run left; the names of what is kept as .bak.

    A file of `mine` that is there already stays.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        records = [folder / RESULT, folder / RECORD]
        ours = {name: digest for path in records for name, digest in recorded(path).items()}
        for path in records:  # nobody's work: they tell of files that now go
            path.unlink(missing_ok=True)
    except OSError as error:
        raise cannot("use", folder, error) from None
    ours |= {name: sha256(data) for name, data in mine.items()}
    kept = set_aside(folder, (*ARTEFACTS, CLASSES, TUNING, *mine), ours)
    others = {name.partition("/")[0] for name in ours if "/" in name} - {"", ".", ".."}
    return (*kept, *(name for other in sorted(others) for name in _clear(folder, other, ours)))


def _clear(folder: Path, kernel: str, ours: Mapping[str, str]) -> tuple[str, ...]:
    """The same for a subfolder with a further kernel, which goes where nothing else is in it."""
    told = recorded(folder / kernel / RECORD)
    known = {**ours, **{f"{kernel}/{name}": digest for name, digest in told.items()}}
    kept = set_aside(folder, [inside(kernel, name) for name in IN_RECORD], known)
    with contextlib.suppress(OSError):
        (folder / kernel / RECORD).unlink(missing_ok=True)
        (folder / kernel).rmdir()
    return kept


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

    return _keep(run, {"sketch.tl": write_sketch(run.spec)})


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
    files = {"code.tl": written.code}
    for name, code in written.further.items():
        run = replace(run, kept=(*run.kept, *_clear(run.folder, name, {})))
        files |= {f"{name}/code.tl": code, f"{name}/spec.toml": _spec_inside(run)}
    files["reasoning.md"] = reasoning(run.spec, run.gpu, written)
    return _keep(replace(run, written=written), files)


def _spec_inside(run: Run) -> str:
    """The spec as a file in a subfolder."""
    from flashwright import spec as specs

    if run.spec.reference is None:
        return run.artefacts["spec.toml"]
    return specs.dump(run.spec.model_copy(update={"reference": f"../{run.spec.reference}"}))


def _check(run: Run, progress: Progress) -> Run:
    from flashwright.check.check import check
    from flashwright.lang.parse import parse

    codes = {inside(kernel, "code.tl"): kernel for kernel in run.codes}
    programs: dict[str, Program] = {}
    for name in ("sketch.tl", *codes):
        try:
            checked = check(parse(run.artefacts[name]), run.gpu)
            found, program = checked.diagnostics, checked.program
        except Failed as failed:
            found, program = failed.diagnostics, None
        run = run.noting(name, *found)
        if name in codes and program is not None:
            programs[codes[name]] = program
    return replace(run, programs=programs)


def _cpu(run: Run, progress: Progress) -> Run:
    from flashwright.judge.cpu import judge
    from flashwright.spec import BadSpec

    for kernel, program in run.programs.items():
        try:
            verdict = judge(program, run.spec, base=run.folder, progress=progress)
        except BadSpec as error:  # the user's own reference cannot be used
            raise Failed(*(Diagnostic("FW903", line) for line in error.lines)) from None
        run = replace(run, verdicts={**run.verdicts, kernel: verdict})
        run = run.noting(inside(kernel, "code.tl"), *verdict.diagnostics)
        if not run.ok:
            break
    return run


def _translate(run: Run, progress: Progress) -> Run:
    from flashwright.build import classes, package
    from flashwright.lower.translate import translate

    assert run.written is not None
    try:
        made = {kernel: translate(program, run.gpu) for kernel, program in run.programs.items()}
    except Failed as failed:
        # Not an error of the program: the translator does not do this GPU, or not this yet.
        if all(d.bad_input for d in failed.diagnostics):
            raise Skipped(*failed.diagnostics) from None
        raise
    files = {kernel: package.translated(one) for kernel, one in made.items()}
    rules = classes.Classes.of(run.written.classes)
    return _keep(replace(run, translations=made), classes.packed(files, rules))


def _build(run: Run, progress: Progress) -> Run:
    from flashwright.build import toolchain

    if not run.translations:
        raise Skipped(Diagnostic("FW821", "there is no CUDA source to compile"))
    try:
        tools = toolchain.find()
    except Failed as failed:
        raise Skipped(*failed.diagnostics) from None
    # The package's own is the last: its record names those of the others.
    for kernel in sorted(run.translations, key=lambda name: name == OWN):
        run = _built(run, kernel, tools)
        if not run.ok:
            break
    return run


def _built(run: Run, kernel: str, tools: Toolchain) -> Run:
    """One kernel compiled, and its files written."""
    from flashwright.build import package
    from flashwright.build.make import make

    code, source = inside(kernel, "code.tl"), inside(kernel, "kernel.cu")
    program, first = run.programs[kernel], run.translations[kernel]
    try:
        tl = run.artefacts[code]
        made, built = make(program, run.gpu, first=first, tl=tl, toolchain=tools)
    except Failed as failed:
        for found in failed.diagnostics:
            run = run.noting(code if found.span else source, found)
        return run
    run = replace(
        run.noting(source, *built.warnings),
        builds={**run.builds, kernel: built},
        translations={**run.translations, kernel: made},
    )
    files = {**package.translated(made), **package.compiled(built)}
    run = _keep(run, {inside(kernel, name): data for name, data in files.items()})
    record = package.record(built, run.gpu, run.files_of(kernel))
    return _keep(run, {inside(kernel, RECORD): record})


def _verdict(run: Run, progress: Progress) -> Run:
    from flashwright.judge.judge import judge
    from flashwright.sandbox.candidate import Candidate

    if run.built is None:
        raise Skipped(Diagnostic("FW851", "there is no compiled kernel to run"))
    try:
        package = Candidate("package", str(run.folder.resolve()), title=str(run.folder))
        found = judge(package, run.spec, base=run.folder, progress=progress)
    except Failed as failed:
        # No GPU, or none that takes the kernel: nothing is known of it, for good or ill.
        if all(d.code == "FW851" for d in failed.diagnostics):
            return _emulate(run, progress, failed.diagnostics)
        raise
    return replace(run, gpu_verdict=found).noting("kernel.cu", *found.diagnostics)


def _emulate(run: Run, progress: Progress, why: tuple[Diagnostic, ...]) -> Run:
    """The verdict without a GPU; skipped where the emulator cannot be had or knows too little."""
    from flashwright.judge.emulated import judge_emulated

    try:
        judged = partial(judge_emulated, run.folder, run.spec, base=run.folder)
        found = judged(seconds=EMULATION_SECONDS, progress=progress)
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
        **_kernel(run, OWN),
        "others": {kernel: _kernel(run, kernel) for kernel in run.codes if kernel != OWN},
        "verdict": run.kind,
        "emulated_run": run.emulated.record() if run.emulated else None,
        "gpu_run": run.gpu_verdict.record() if run.gpu_verdict else None,
        "artefacts": {name: sha256(data) for name, data in run.files.items()},
        "claimed": claimed(run),
        "not_claimed": not_claimed(run),
    }


def _kernel(run: Run, kernel: str) -> dict[str, Any]:
    """What is known of one kernel of the package."""
    verdict, built = run.verdicts.get(kernel), run.builds.get(kernel)
    return {
        "cpu": verdict.record() if verdict else None,
        "build": built.record() if built else None,
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


def _keep(run: Run, files: Mapping[str, str | bytes]) -> Run:
    """Write files, in their order."""
    for name, data in files.items():
        path = run.folder / name
        try:
            path.parent.mkdir(exist_ok=True)
        except OSError as error:
            raise cannot("use", path.parent, error) from None
        write(path, data)
    text = {name: data for name, data in files.items() if isinstance(data, str)}
    binary = {name: data for name, data in files.items() if isinstance(data, bytes)}
    artefacts, binaries = {**run.artefacts, **text}, {**run.binaries, **binary}
    return replace(run, artefacts=artefacts, binaries=binaries)
