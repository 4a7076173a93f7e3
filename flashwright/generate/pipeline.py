"""What `flashwright generate` does: a tuple of stages, each taking a Run and returning the next.

A stage writes its artefact as soon as it has it, so an interruption loses nothing that is finished.
`result.json` comes last and is replaced whole: where it stands, the run it tells of has ended.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from flashwright.build.package import OWN
from flashwright.files import sha256, write
from flashwright.generate import stages
from flashwright.generate.folder import RESULT, TASK, held, keep, place, prepare, published
from flashwright.generate.state import Finding, Progress, Run, Skipped, StageTiming, Status
from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.version import __version__

if TYPE_CHECKING:
    from flashwright.author.builtin.mods import Mods
    from flashwright.generate.by_model.ask import Authors
    from flashwright.gpu import Gpu
    from flashwright.judge.verdict import Verdict as GpuVerdict
    from flashwright.spec import AttentionSpec

SCHEMA = 1


@dataclass(frozen=True)
class Stage:
    """One step. `proves` may be said once it has passed, `lacks` must be said before."""

    name: str
    title: str
    work: Callable[[Run, Progress], Run]
    proves: str
    lacks: str


class Watcher(Protocol):
    """The display of a run; cli/screen.py has one."""

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
    authors: Authors | None = None,
    last: str = "improve",
    reference: bytes | None = None,
    task: str | None = None,
    plan: Sequence[Stage] | None = None,
    allow_spills: int = 0,
    all_problems: bool = False,
    mods: Mods | None = None,
    headroom: int | None = None,
    one_tiling: bool = False,
) -> Run:
    """Run all stages; a failed one is the last. The folder then holds what was made.

    Failed with FW001 where another process makes a kernel in the folder. If one is finished there,
    it stays until this run has come to its end.

    `authors` names the language models that do some of them. `last` is the stage to end with. One
    that cannot run on this machine is skipped, and so is what needs its result. `reference` is the
    file that the spec's `reference` names, `task` a benchmark's task: the folder gets both. `plan`
    are other stages than the usual ones: what is claimed at the end is by their names. `mods` are a
    score and a mask that the spec does not describe, `headroom` the registers that the built-in
    author leaves free; `one_tiling` leaves out kernels for short lengths.
    """
    from flashwright import spec as specs

    steps = _steps(authors, plan or STAGES, last)
    mine = {_reference(spec): reference} if reference is not None else {}
    mine |= {TASK: task.encode()} if task is not None else {}
    given = {"spec.toml": specs.dump(spec).encode(), **mine}
    with held(folder), place(folder) as made_in:
        kept = prepare(folder, given) if made_in == folder else ()
        run = Run(spec, gpu, made_in, kept=kept)
        run = replace(run, allow_spills=allow_spills, all_problems=all_problems)
        run = replace(run, mods=mods, headroom=headroom, one_tiling=one_tiling)
        run = keep(run, {"spec.toml": specs.dump(spec), **mine})
        for number, stage in enumerate(steps, 1):
            watcher.begin(stage, number, len(steps))
            run = _timed(stage, run, watcher.progress)
            watcher.end(stage, run)
            if not run.ok or stage.name == last:
                break
        run = published(run, folder, given)
        write(folder / RESULT, json.dumps(result(run), indent=2, ensure_ascii=False) + "\n")
    if authors and run.ok and _whole(authors, run):
        authors.transcript.end("right")
    return run


def _whole(authors: Authors, run: Run) -> bool:
    """Whether nothing is left to ask: rounds that could not begin, or broke off, may go on."""
    return IMPROVE.name not in authors.asked or bool(run.asked.get(IMPROVE.name, {}).get("whole"))


def _steps(authors: Authors | None, plan: Sequence[Stage], last: str) -> list[Stage]:
    """The stages, those of a model with its work; to improve a kernel only where that is asked."""
    if authors is None:
        return list(plan)
    from flashwright.generate.by_model import improve
    from flashwright.generate.by_model import kernel as kernel_by_model
    from flashwright.generate.by_model import tl as tl_by_model

    # The model that writes the final TL also gets the results of later stages, if those stages are
    # our own work.
    short = last in ("sketch", "parameters", "check", "cpu")
    whole = "translate" not in authors.asked and not short
    works: dict[str, tuple[str, Callable[[Authors, Run, Progress], Run]]] = {
        "sketch": ("sketch", partial(tl_by_model.sketch, whole=whole)),
        "parameters": ("code", partial(tl_by_model.code, whole=whole)),
        "translate": ("translate", kernel_by_model.kernel),
    }
    steps = [
        replace(stage, work=partial(works[stage.name][1], authors))
        if stage.name in works and works[stage.name][0] in authors.asked
        else stage
        for stage in plan
    ]
    if IMPROVE.name not in authors.asked:
        return steps
    if authors.asked[IMPROVE.name].model is None:  # a replay: what the judge said is in the record
        steps = [stage for stage in steps if stage.name != "verdict"]
    return [*steps, replace(IMPROVE, work=partial(improve.improve, authors))]


def _reference(spec: AttentionSpec) -> str:
    """The file of the spec's reference, without the function's name."""
    from flashwright.judge.reference import split

    return split(spec.reference or "")[0]


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
    timing = StageTiming(stage.name, status, time.perf_counter() - start, why)
    return replace(after, timings=(*run.timings, timing))


# The measurement will stand behind these, in this tuple. Each takes the Run that the one before
# returned and adds its own fields and files to it; its line then moves from LATER into its Stage.
STAGES: tuple[Stage, ...] = (
    Stage(
        "sketch",
        "Sketch: what moves and what is computed",
        stages.sketch,
        proves="the operator is thought through in TL",
        lacks="no sketch",
    ),
    Stage(
        "parameters",
        "Parameters: sizes that fit the GPU, and why",
        stages.parameters,
        proves="every size is chosen for this GPU, with its reason",
        lacks="no sizes chosen",
    ),
    Stage(
        "check",
        "Check: shapes, spaces, layouts, order, budgets",
        stages.check,
        proves="the TL code passes the checker and fits the GPU's budgets",
        lacks="not checked",
    ),
    Stage(
        "cpu",
        "CPU run: is it attention?",
        stages.cpu,
        proves="run block by block on the CPU, it agrees with fp64 attention on all problems tried",
        lacks="not compared with fp64 attention",
    ),
    Stage(
        "translate",
        "Translation: CuTe C++, each block under its TL line",
        stages.translate,
        proves="the TL code is translated to CuTe C++",
        lacks="not translated to CUDA",
    ),
    Stage(
        "build",
        "Build: nvcc, and what ptxas says",
        stages.build,
        proves="it compiles for this GPU without spilling a register",
        lacks="not compiled",
    ),
    Stage(
        "verdict",
        "Verdict: right on the GPU, or under emulation?",
        stages.verdict,
        proves="run on the GPU at hand, it agrees with fp64 attention on all problems tried",
        lacks="not run on a GPU",
    ),
)

WITHOUT_SKETCH = tuple(stage for stage in STAGES if stage.name != "sketch")
"""The stages of a run whose author begins with the code."""

IMPROVE = Stage(
    "improve",
    "Improve: faster, and still right?",
    lambda run, progress: run,
    proves="what was changed since is right as well, and was measured to be faster",
    lacks="not made faster by measuring",
)
"""The last stage of a run with a model, where it is asked for (improve.py)."""

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
    passed, proves = _passed(run), {stage.name: stage.proves for stage in (*STAGES, IMPROVE)}
    if run.gpu_verdict is None:
        proves["verdict"] = EMULATED
    spilled = max((built.spills for built in run.builds.values()), default=0)
    if spilled and run.allow_spills:
        allowed = f"{run.allow_spills} bytes are allowed"
        proves["build"] = f"it compiles for this GPU and spills {spilled} bytes ({allowed})"
    if "code" in run.asked:
        proves["parameters"] = "every size is there, as its author chose it"
    if run.spec.reference:
        proves = {n: text.replace("fp64 attention", "its reference") for n, text in proves.items()}
    return [text for name, text in proves.items() if name in passed]


def not_claimed(run: Run) -> list[str]:
    """What this run has not shown: the words of every stage that did not pass or does not exist."""
    passed = _passed(run) - ({"verdict"} if run.gpu_verdict is None else set())
    asked = [IMPROVE] if any(t.stage == IMPROVE.name for t in run.timings) else []
    later = {} if IMPROVE.name in run.asked else LATER  # it measures first
    stages = STAGES if _began_with(STAGES[0], run) else WITHOUT_SKETCH
    every = {**{stage.name: stage.lacks for stage in (*stages, *asked)}, **later}
    return [text for name, text in every.items() if name not in passed]


def _began_with(stage: Stage, run: Run) -> bool:
    return not run.timings or run.timings[0].stage == stage.name


def _passed(run: Run) -> set[str]:
    """The stages that have shown what they are for: to improve in vain shows nothing."""
    passed = {t.stage for t in run.timings if t.status == "ok"}
    rounds = run.asked.get(IMPROVE.name, {}).get("rounds", ())
    return passed if any(one["kept"] for one in rounds) else passed - {IMPROVE.name}


# --- the record -------------------------------------------------------------------------------


def result(run: Run) -> dict[str, Any]:
    """The run as plain data, without absolute paths."""
    return {
        "schema": SCHEMA,
        "flashwright": __version__,
        "ok": run.ok,
        "reached": run.unreached is None,
        "spec": run.spec.model_dump(mode="json"),
        "gpu": run.gpu.name,
        "stages": [_stage(timing) for timing in run.timings],
        **({"asked": dict(run.asked)} if run.asked else {}),
        "parameters": [asdict(c) for c in run.written.choices] if run.written else [],
        "findings": [_finding(f) for f in run.findings],
        **_kernel(run, OWN),
        "others": {name: _kernel(run, name) for name in _others(run)},
        "verdict": run.kind,
        "emulated_run": _verdict(run, run.emulated),
        "gpu_run": _verdict(run, run.gpu_verdict),
        "artefacts": {name: sha256(data) for name, data in run.files.items()},
        "claimed": claimed(run),
        "not_claimed": not_claimed(run),
    }


def _others(run: Run) -> list[str]:
    """The kernels beside the package's own, or those that run one after another."""
    steps = run.steps.steps if run.steps is not None else ()
    return [name for name in (*run.codes, *steps) if name != OWN]


def _verdict(run: Run, verdict: GpuVerdict | None) -> dict[str, Any] | None:
    """A verdict on the package, which it knows by its place on this machine."""
    return {**verdict.record(), "candidate": run.folder.name or "."} if verdict else None


def _kernel(run: Run, kernel: str) -> dict[str, Any]:
    """What is known of one kernel of the package."""
    verdict, built = run.verdicts.get(kernel), run.builds.get(kernel)
    return {
        "cpu": verdict.record() if verdict else None,
        "cpu_unreached": list(verdict.unreached) if verdict else [],
        "build": built.record() if built else None,
    }


def _stage(timing: StageTiming) -> dict[str, Any]:
    """A stage's line in the record; why is there only where it was skipped."""
    line = {"stage": timing.stage, "status": timing.status, "seconds": round(timing.seconds, 3)}
    why = [{"code": d.code, "message": d.message, "help": d.help} for d in timing.why]
    return {**line, "why": why} if why else line


def _finding(finding: Finding) -> dict[str, Any]:
    from flashwright.lang.render import as_json

    record: dict[str, Any] = json.loads(as_json([finding.diagnostic], finding.file))[0]
    return record
