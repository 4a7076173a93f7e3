"""What each stage of `flashwright generate` does: it takes a Run and returns the next.

The same stages check the work of every author; for a model (by_model/), they check every attempt.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from flashwright.build.package import OWN, RECORD, inside
from flashwright.generate.folder import DERIVED, FORWARD, RECTANGULAR, clear, keep
from flashwright.generate.state import Finding, Progress, Run, Skipped
from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.program.kernels import Kernels

if TYPE_CHECKING:
    from flashwright.build.steps import Steps
    from flashwright.build.toolchain import Toolchain

EMULATION_PROBLEMS = 6  # of the verdict under emulation; `verify --on cpu` puts all of them


def sketch(run: Run, progress: Progress) -> Run:
    """What moves and what is computed, by the built-in author."""
    if run.spec.backward:
        return _derived(run)
    from flashwright.author.builtin.author import write_sketch

    return keep(run, {"sketch.tl": write_sketch(run.spec, run.mods)})


def _derived(run: Run) -> Run:
    """The backward pass of the attention that the built-in author writes, without sizes."""
    from flashwright.author.builtin.author import write_code, write_sketch
    from flashwright.author.builtin.choose import fitting
    from flashwright.check.check import checked_program
    from flashwright.grad.grad import backward
    from flashwright.lang.format import format_tree
    from flashwright.lang.parse import parse

    spec = run.spec.attention()
    with fitting():
        forward = write_code(write_sketch(spec, run.mods), spec, run.gpu, run.mods).code
    run = keep(run, {FORWARD: forward})
    try:
        program = checked_program(parse(forward), run.gpu)
        made = backward(program, deterministic=run.spec.repeatable)
    except Failed as failed:
        return run.noting(FORWARD, *failed.diagnostics)
    return keep(run, {DERIVED: format_tree(made.tree)})


def parameters(run: Run, progress: Progress) -> Run:
    """The sketch with all its sizes, and the reason for each, by the built-in author."""
    if run.spec.backward:
        return _sized(run)
    if run.spec.batch is not None:
        return _rewritten(run)
    from flashwright.author.builtin.author import write_code
    from flashwright.author.builtin.choose import fitting
    from flashwright.author.builtin.reasoning import reasoning

    with fitting():
        sketch = run.artefacts["sketch.tl"]
        written = write_code(sketch, run.spec, run.gpu, run.mods, run.headroom)
        if run.one_tiling:
            written = written.alone()
    files = {"code.tl": written.code}
    for name, code in written.further.items():
        run = replace(run, kept=(*run.kept, *clear(run.folder, name, {})))
        files |= {f"{name}/code.tl": code, f"{name}/spec.toml": _spec_inside(run)}
    files["reasoning.md"] = reasoning(run.spec, run.gpu, written)
    return keep(replace(run, written=written), files)


def _sized(run: Run) -> Run:
    """The derived backward pass with sizes for the GPU."""
    from flashwright.author.builtin.author import Written
    from flashwright.generate.backward_sizes import sized
    from flashwright.lang.format import format_tree
    from flashwright.lang.parse import parse

    tiling, tree = sized(parse(run.artefacts[DERIVED]), run.gpu)
    written = Written(format_tree(tree), tiling.choices)
    return keep(replace(run, written=written), {"code.tl": written.code})


def _rewritten(run: Run) -> Run:
    """The program for rectangular batches with its sizes, rewritten for the spec's sequences."""
    from flashwright.author.builtin.choose import HEADROOMS, fitting
    from flashwright.author.builtin.reasoning import reasoning
    from flashwright.generate.packed_sizes import rewritten
    from flashwright.lang.format import format_tree

    rooms = HEADROOMS if run.headroom is None else (run.headroom,)
    given = (run.artefacts["sketch.tl"], run.spec, run.gpu, run.mods)
    with fitting():
        made = rewritten(*given, rooms, may_spill=run.allow_spills > 0)
    whole, code = made.rectangular, format_tree(made.tree)
    files = {RECTANGULAR: whole.code, "code.tl": code}
    files["reasoning.md"] = reasoning(run.spec, run.gpu, whole)
    return keep(replace(run, written=replace(whole, code=code)), files)


def _spec_inside(run: Run) -> str:
    """The spec as a file in a subfolder."""
    from flashwright import spec as specs

    if run.spec.reference is None:
        return run.artefacts["spec.toml"]
    return specs.dump(run.spec.model_copy(update={"reference": f"../{run.spec.reference}"}))


def check(run: Run, progress: Progress) -> Run:
    """Sketch and code through the checker."""
    if run.codes and set(run.operators) == set(run.codes):  # with the author's last attempt
        return run
    from flashwright.check.check import check as checked_by
    from flashwright.lang.parse import parse

    codes = {inside(kernel, "code.tl"): kernel for kernel in run.codes}
    for name in (*(n for n in ("sketch.tl",) if n in run.artefacts), *codes):
        try:
            checked = checked_by(parse(run.artefacts[name]), run.gpu, run.spec.dims)
            found, kernels = checked.diagnostics, checked.kernels
        except Failed as failed:
            found, kernels = failed.diagnostics, ()
        run = run.noting(name, *found)
        if name in codes and kernels:
            run = with_program(run, codes[name], Kernels(kernels))
    return run


def with_program(run: Run, kernel: str, kernels: Kernels) -> Run:
    """A run with the checked code of a kernel. If that has several itself, each is a program of its
    own, in a subfolder."""
    from flashwright.build.make import step_programs
    from flashwright.build.package import STEPS
    from flashwright.build.steps import Steps

    if len(kernels.programs) == 1:
        return replace(run, programs={**run.programs, kernel: kernels.programs[0]})
    steps, cut = Steps.of(kernels), step_programs(kernels, run.gpu)
    for name in cut:
        run = replace(run, kept=(*run.kept, *clear(run.folder, name, {})))
    run = replace(run, steps=steps, programs={name: program for name, (_, program) in cut.items()})
    texts = {f"{name}/code.tl": text for name, (text, _) in cut.items()}
    return keep(run, {**texts, STEPS: steps.dump()})


def cpu(run: Run, progress: Progress) -> Run:
    """The code run on the CPU: is it attention?"""
    if run.programs and set(run.verdicts) == set(run.operators):  # with the author's last attempt
        return run
    from flashwright.judge.cpu import judge
    from flashwright.spec import BadSpec

    for kernel, program in run.operators.items():
        try:
            verdict = judge(program, run.spec, base=run.folder, progress=progress)
        except BadSpec as error:  # the user's own reference cannot be used
            raise Failed(*(Diagnostic("FW903", line) for line in error.lines)) from None
        run = replace(run, verdicts={**run.verdicts, kernel: verdict})
        told = [_with_way_out(run, found) for found in verdict.diagnostics]
        run = run.noting(inside(kernel, "code.tl"), *told)
        if not run.ok:
            break
    return run


def _with_way_out(run: Run, found: Diagnostic) -> Diagnostic:
    """What is wrong by the user's own function, where the built-in author wrote the program: it
    writes a variant, whatever the function says."""
    if run.spec.reference is None or {"sketch", "code"} & set(run.asked):
        return found
    hint = (
        f"the built-in author wrote {run.spec.variant}, and {run.spec.reference} says something "
        "else: a language model writes what the function says, --model NAME"
    )
    return replace(found, help=f"{found.help}; {hint}" if found.help else hint)


def translate(run: Run, progress: Progress) -> Run:
    """The code as CuTe C++, by the translator."""
    if run.built is not None:  # with the author's last attempt, and perhaps not the first way
        return run
    from flashwright.build import classes, package
    from flashwright.lower.translate import translate as to_cuda

    assert run.written is not None
    made = {}
    for kernel, program in run.programs.items():
        try:
            made[kernel] = to_cuda(program, run.gpu)
        except Failed as failed:
            return run.noting(inside(kernel, "code.tl"), *failed.diagnostics)
    files = {kernel: package.translated(one) for kernel, one in made.items()}
    rules = classes.ALONE if run.steps else classes.Classes.of(run.written.classes)
    return keep(replace(run, translations=made), classes.packed(files, rules))


def build(run: Run, progress: Progress) -> Run:
    """The source compiled; skipped where there is no compiler."""
    if run.built is not None:  # with the author's last attempt
        return run
    from flashwright.build import toolchain

    try:
        tools = toolchain.find()
    except Failed as failed:
        raise Skipped(*failed.diagnostics) from None
    run = run.noting("kernel.cu", *tools.warnings)
    # The package's own is the last: its record names those of the others.
    for kernel in sorted(run.translations, key=lambda name: name == OWN):
        run = _built(run, kernel, tools)
        if not run.ok:
            return run
    return run if run.steps is None else _bound(run, run.steps)


def _bound(run: Run, steps: Steps) -> Run:
    """The record of a package whose kernels run one after another."""
    from flashwright.build import package

    names = ("code.tl", "spec.toml", package.STEPS, *(f"{name}/{RECORD}" for name in steps.steps))
    digested = {name: run.files[name] for name in names}
    return keep(run, {RECORD: package.record_of_steps(run.gpu, digested)})


def _built(run: Run, kernel: str, tools: Toolchain) -> Run:
    """One kernel compiled, and its files written."""
    from flashwright.build import package
    from flashwright.build.make import make

    code, source = inside(kernel, "code.tl"), inside(kernel, "kernel.cu")
    program, first = run.programs[kernel], run.translations[kernel]
    try:
        tl = run.artefacts[code]
        how = partial(make, first=first, tl=tl, allow_spills=run.allow_spills)
        made, built = how(program, run.gpu, toolchain=tools)
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
    run = keep(run, {inside(kernel, name): data for name, data in files.items()})
    record = package.record(built, run.gpu, run.files_of(kernel), made.report)
    return keep(run, {inside(kernel, RECORD): record})


def verdict(run: Run, progress: Progress) -> Run:
    """Right on the GPU, or under emulation where there is none?"""
    if run.gpu_verdict is not None or run.emulated is not None:  # with the author's last attempt
        return run
    from flashwright.judge.judge import judge
    from flashwright.sandbox.candidate import Candidate

    if run.built is None:
        raise Skipped(Diagnostic("FW851", "there is no compiled kernel to run"))
    try:
        package = Candidate.package(run.folder)
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
        most = None if run.all_problems else EMULATION_PROBLEMS
        found = judged(most=most, progress=progress)
    except Failed as failed:
        if all(d.bad_input for d in failed.diagnostics):
            raise Skipped(*why, *failed.diagnostics) from None
        raise
    if found.missing and not found.offences:
        raise Skipped(*why, *found.diagnostics)
    findings = tuple(Finding("code.tl" if d.span else "kernel.cu", d) for d in found.diagnostics)
    noted = replace(found, notes=(f"instead of a GPU: {why[0].message}", *found.notes))
    return replace(run, emulated=noted, findings=run.findings + findings)
