"""`flashwright translate` and `flashwright build`: from TL code to CUDA, and to a cubin."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from flashwright.cli.command import (
    FINE,
    WRONG,
    AllowSpills,
    Blamed,
    blaming,
    exit_code,
    find_gpu,
    guarded,
    load_kernels,
    load_program,
    load_spec,
    messages_as_json,
    show_diagnostics,
    shown_name,
    tell,
)
from flashwright.files import cannot, content, recorded, set_aside, sha256, write
from flashwright.lang.diagnostic import Failed

if TYPE_CHECKING:
    from flashwright.build.compile import Built
    from flashwright.build.toolchain import Toolchain
    from flashwright.gpu import Gpu
    from flashwright.lower.launch_plan import LaunchPlan
    from flashwright.lower.report import Report
    from flashwright.lower.translate import Translation
    from flashwright.program.kernels import Kernels
    from flashwright.program.program import Program

CODE = "code.tl"
KB = 1024
PANEL = "Make"


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    for command in (translate, build):
        app.command(rich_help_panel=PANEL)(command)


# --- translate --------------------------------------------------------------------------------


@guarded
def translate(
    file: Annotated[str, typer.Argument(metavar="FILE", help="TL code; - reads stdin.")],
    gpu: Annotated[str, typer.Option(metavar="NAME", help="See `flashwright gpus`.")],
    out: Annotated[
        str,
        typer.Option("--out", "-o", metavar="FILE", help="Output file; default stdout."),
    ] = "-",
) -> int:
    """Translate TL code to CuTe C++, each block under the TL line it implements.

    Also writes FILE.map.json (CUDA lines to TL lines) and launch.json beside FILE.cu.
    """
    card = find_gpu(gpu)
    program, source = load_program(file, card)
    made = _translated(file, program, source, card)
    if out == "-":
        print(made.source, end="")
        _tell_schedule(made, card, shown_name(file), source, program, sys.stderr)
        return FINE
    path = Path(out) / "kernel.cu" if Path(out).is_dir() else Path(out)
    write(path, made.source)
    write(path.with_suffix(".map.json"), made.map.dump())
    write(path.with_name("launch.json"), made.plan.dump())
    print(f"{path}: {made.source.count(chr(10))} lines for {made.plan.arch}")
    _tell_schedule(made, card, shown_name(file), source, program)
    return FINE


def _translated(file: str, program: Program, source: str, card: Gpu) -> Translation:
    from flashwright.lower.translate import translate as to_cuda

    with blaming(shown_name(file), source):
        return to_cuda(program, card)


# --- build ------------------------------------------------------------------------------------


@guarded
def build(
    what: Annotated[
        str,
        typer.Argument(metavar="FILE|FOLDER", help="TL code, or a folder with code.tl in it."),
    ],
    gpu: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Default: the one the folder was made for."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="DIR", help="Default: FOLDER, or out/FILE-GPU."),
    ] = None,
    ptx: Annotated[
        bool, typer.Option("--ptx/--no-ptx", help="Also the PTX, by which newer GPUs can run it.")
    ] = True,
    real: Annotated[
        str | None,
        typer.Option(metavar="ARCH", help="Compile the same PTX for a newer GPU, such as sm_90."),
    ] = None,
    allow_spills: AllowSpills = 0,
) -> int:
    """Translate and compile TL code to a cubin, or take it from the cache."""
    from flashwright.build import package, toolchain
    from flashwright.generate.folder import held

    is_folder = what != "-" and Path(what).is_dir()
    file = str(Path(what, CODE)) if is_folder else what
    card = find_gpu(gpu if gpu is not None else known_gpu(Path(what)))
    tools = toolchain.find()  # first: without a compiler no file is changed
    tell(tools.warnings, "nvcc", "")
    folder = out or (Path(what) if is_folder else Path("out", f"{_stem(file)}-{card.name}"))
    options = _BuildOptions(card, tools, ptx, real, allow_spills)
    further: dict[str, str | bytes] = {}
    with held(folder):
        for name in _further_kernels(Path(what)) if is_folder else ():
            own = str(Path(what, name, CODE))
            _build(own, load_program(own, card), folder / name, options)
            further[f"{name}/{package.RECORD}"] = (folder / name / package.RECORD).read_bytes()
        if further:
            further[package.CLASSES] = Path(what, package.CLASSES).read_bytes()
        kernels, source = load_kernels(file, card)
        if len(kernels.programs) > 1:
            _build_steps(file, source, kernels, folder, options)
        else:
            _build(file, (kernels.programs[0], source), folder, options, further)
    return FINE


def _build_steps(
    file: str, source: str, kernels: Kernels, folder: Path, options: _BuildOptions
) -> None:
    """Build a program of several kernels: each in a subfolder, with its own part of the program."""
    from flashwright.build import package
    from flashwright.build.make import step_programs
    from flashwright.build.steps import Steps

    steps = Steps.of(kernels)
    files: dict[str, str | bytes] = {**_inputs(file, source), package.STEPS: steps.dump()}
    for name, (text, program) in step_programs(kernels, options.card).items():
        own = folder / name / CODE
        _put(own.parent, {CODE: text})
        _build(str(own), (program, text), own.parent, options)
        files[f"{name}/{package.RECORD}"] = (own.parent / package.RECORD).read_bytes()
    _put(folder, {**files, package.RECORD: package.record_of_steps(options.card, files)})
    print(f"{folder}: {len(steps.steps)} kernels, launched in order by one call")


@dataclass(frozen=True)
class _BuildOptions:
    """The options that all kernels of a package are built with."""

    card: Gpu
    tools: Toolchain
    ptx: bool
    real: str | None
    allow_spills: int


def _further_kernels(folder: Path) -> tuple[str, ...]:
    """The further kernels of a package. Raises Failed if a built one does not fit the package."""
    from flashwright.build import classes, package

    return classes.read(folder).others if (folder / package.CLASSES).is_file() else ()


def _build(
    file: str,
    loaded: tuple[Program, str],
    folder: Path,
    options: _BuildOptions,
    further: Mapping[str, str | bytes] | None = None,
) -> None:
    """Build one kernel, from the checked program and its text. `further`: records and rules of the
    package's other kernels."""
    from flashwright.build import package

    card = options.card
    program, source = loaded
    made = _translated(file, program, source, card)
    files = {**_inputs(file, source), **package.translated(made)}
    try:
        with blaming(shown_name(file), source):
            made, built = _compiled(program, made, source, options)
    except Blamed as blamed:
        if exit_code(blamed.diagnostics) == WRONG:
            _put(folder, files)  # so that the user can inspect the rejected source
        raise
    files |= {**package.translated(made), **package.compiled(built, options.ptx), **(further or {})}
    record = {package.RECORD: package.record(built, card, files, made.report)}
    kept = _put(folder, {**files, **record})
    _tell_built(built, made, folder, kept)
    _tell_schedule(made, card, shown_name(file), source, program)


def known_gpu(folder: Path) -> str:
    """The GPU that a folder was made for, from its records."""
    for name in ("build.json", "result.json"):
        try:
            return str(json.loads(content(folder / name) or b"")["gpu"])
        except (Failed, ValueError, KeyError, TypeError, RecursionError):
            continue
    raise typer.BadParameter("name the GPU; `flashwright gpus` lists them", param_hint="--gpu")


def _compiled(
    program: Program, made: Translation, source: str, options: _BuildOptions
) -> tuple[Translation, Built]:
    from flashwright.build import compile as compiler
    from flashwright.build.make import make

    card, real = options.card, options.real
    how = partial(make, first=made, real=real, tl=source, allow_spills=options.allow_spills)
    try:
        compiler.target(card.arch, real or card.arch)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--real") from None
    with _spinner():
        return how(program, card, toolchain=options.tools)


@contextmanager
def _spinner() -> Iterator[None]:
    """Shows progress while nvcc runs, in a terminal or to a program."""
    if not (
        sys.stderr.isatty() or messages_as_json()
    ):  # a script, or a build from the cache: rich would cost 0.1 s
        yield
        return
    from flashwright.cli import show

    with show.progress("compiling"):
        yield


def _stem(file: str) -> str:
    return "kernel" if file == "-" else Path(file).stem


def _inputs(file: str, source: str) -> dict[str, str | bytes]:
    """The program, its spec and the spec's reference, which a later verdict needs."""
    if file == "-":
        return {CODE: source}
    code = Path(file)
    files: dict[str, str | bytes] = {CODE: code.read_bytes()}
    meant = load_spec(None, file)
    if meant is not None:
        from flashwright import spec as specs

        spec, base = meant
        if spec.reference is not None:
            from flashwright.judge.reference import split

            path, _ = split(str(base / spec.reference))
            files[Path(path).name] = Path(path).read_bytes()
            spec = spec.model_copy(update={"reference": Path(spec.reference).name})
        own = code.with_name("spec.toml")
        there = code.name == CODE and own.is_file() and not code.with_suffix(".toml").is_file()
        files["spec.toml"] = own.read_bytes() if there else specs.dump(spec)
    return files


def _put(folder: Path, files: Mapping[str, str | bytes]) -> tuple[str, ...]:
    """Write the changed files, the record last. Returns the user-edited files kept as NAME.bak."""
    from flashwright.build import package

    try:
        folder.mkdir(parents=True, exist_ok=True)
        record, result = folder / package.RECORD, folder / "result.json"
        ours = {**recorded(result), **recorded(record)}
        record.unlink(missing_ok=True)
        new = [name for name, data in files.items() if not _same(folder / name, data)]
    except OSError as error:
        raise cannot("use", folder, error) from None
    old = [name for name in (*package.COMPILED, package.STEPS) if name not in files]
    kept = set_aside(folder, [*new, *old], ours)
    for name in new:
        write(folder / name, files[name])
    return kept


def _same(path: Path, data: str | bytes) -> bool:
    return path.is_file() and sha256(path.read_bytes()) == sha256(data)


def _tell_built(built: Built, made: Translation, folder: Path, kept: tuple[str, ...]) -> None:
    if built.warnings:
        tell(built.warnings, "build cache", "")
    lines = made.source.count("\n")
    print(f"{folder}: kernel.cu of {lines} lines; {launch_in_words(made.plan)}")
    for line in build_in_words(built, made.report):
        print(f"  {line}")
    for name in kept:
        print(f"  your changed {name} is kept as {name}.bak")


def _tell_schedule(
    made: Translation,
    card: Gpu,
    name: str,
    source: str,
    program: Program,
    stream: TextIO | None = None,
) -> None:
    """Print the schedule of the kernel and the notes on missed optimizations."""
    from flashwright.lower.report import notes

    if made.report is None:
        return
    stream = stream or sys.stdout
    print(f"{card.name}: {made.report.in_words()}", file=stream)
    show_diagnostics(notes(made.report, source, program.tree), name, source, stream)


# --- words ------------------------------------------------------------------------------------


def launch_in_words(plan: LaunchPlan) -> str:
    """Threads and shared memory of a thread block."""
    return f"{plan.threads} threads and {plan.shared / KB:g} KB of shared memory a block"


def build_in_words(built: Built, report: Report | None = None) -> tuple[str, str]:
    """Registers and spills, then the cubin. The translator's report adds the register headroom."""
    stack = f", {built.stack} bytes of stack" if built.stack else ""
    static = f", {built.shared} bytes of static shared memory" if built.shared else ""
    took = f"{built.seconds:.1f} s"
    when = f"from the cache; it took {took} to compile" if built.cached else f"compiled in {took}"
    size = f"cubin for {built.real} of {len(built.cubin) / KB:.0f} KB"
    registers = f"{built.registers} registers a thread"
    if report is not None:
        registers = report.registers_in_words(built.registers)
    return (
        f"{registers}, {_spills(built)}{stack}{static}",
        f"{size}, {when} with nvcc {built.nvcc}",
    )


def _spills(built: Built) -> str:
    if not built.spills:
        return "no spills"
    allowed = f" ({built.allowed_spills} are allowed)" if built.allowed_spills else ""
    return f"{built.spills} bytes of spills{allowed}"
