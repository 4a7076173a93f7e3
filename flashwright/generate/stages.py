"""What each stage of `flashwright generate` does: it takes a Run and returns the next.

The same stages check the work of every author; for a model (by_model/), they check every attempt.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from flashwright.build.package import OWN, RECORD, inside
from flashwright.generate.folder import clear, keep
from flashwright.generate.state import Finding, Progress, Run, Skipped
from flashwright.lang.diagnostic import Diagnostic, Failed

if TYPE_CHECKING:
    from flashwright.build.toolchain import Toolchain
    from flashwright.program.program import Program

EMULATION_PROBLEMS = 6  # of the verdict under emulation; `verify --on cpu` puts all of them


def sketch(run: Run, progress: Progress) -> Run:
    """What moves and what is computed, by the built-in author."""
    from flashwright.author.builtin.author import write_sketch

    return keep(run, {"sketch.tl": write_sketch(run.spec, run.mods)})


def parameters(run: Run, progress: Progress) -> Run:
    """The sketch with all its sizes, and the reason for each, by the built-in author."""
    from flashwright.author.builtin.author import write_code
    from flashwright.author.builtin.choose import NothingFits
    from flashwright.author.builtin.reasoning import reasoning

    try:
        sketch = run.artefacts["sketch.tl"]
        written = write_code(sketch, run.spec, run.gpu, run.mods, run.headroom)
        if run.one_tiling:
            written = written.alone()
    except NothingFits as error:
        hint = (
            "another --gpu, --dtype or a smaller --head-dim may fit; `flashwright gpus` lists them"
        )
        raise Failed(Diagnostic("FW905", str(error), help=hint)) from None
    files = {"code.tl": written.code}
    for name, code in written.further.items():
        run = replace(run, kept=(*run.kept, *clear(run.folder, name, {})))
        files |= {f"{name}/code.tl": code, f"{name}/spec.toml": _spec_inside(run)}
    files["reasoning.md"] = reasoning(run.spec, run.gpu, written)
    return keep(replace(run, written=written), files)


def _spec_inside(run: Run) -> str:
    """The spec as a file in a subfolder."""
    from flashwright import spec as specs

    if run.spec.reference is None:
        return run.artefacts["spec.toml"]
    return specs.dump(run.spec.model_copy(update={"reference": f"../{run.spec.reference}"}))


def check(run: Run, progress: Progress) -> Run:
    """Sketch and code through the checker."""
    if run.codes and set(run.programs) == set(run.codes):  # with the author's last attempt
        return run
    from flashwright.check.check import check as checked_by
    from flashwright.lang.parse import parse

    codes = {inside(kernel, "code.tl"): kernel for kernel in run.codes}
    programs: dict[str, Program] = {}
    for name in ("sketch.tl", *codes):
        try:
            checked = checked_by(parse(run.artefacts[name]), run.gpu, run.spec.dims)
            found, program = checked.diagnostics, checked.program
        except Failed as failed:
            found, program = failed.diagnostics, None
        run = run.noting(name, *found)
        if name in codes and program is not None:
            programs[codes[name]] = program
    return replace(run, programs=programs)


def cpu(run: Run, progress: Progress) -> Run:
    """The code run on the CPU: is it attention?"""
    if run.programs and set(run.verdicts) == set(run.programs):  # with the author's last attempt
        return run
    from flashwright.judge.cpu import judge
    from flashwright.spec import BadSpec

    for kernel, program in run.programs.items():
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
    rules = classes.Classes.of(run.written.classes)
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
