"""`flashwright emulate` for a kernel of your own: any CUDA or PTX, with arguments you name."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from flashwright.cli.command import FINE, WRONG, blaming, tell
from flashwright.cli.own_arguments import (
    BadArgument,
    GivenArguments,
    assigned,
    expected,
    make_arguments,
    names_of,
    sample,
)
from flashwright.files import cannot
from flashwright.lang.diagnostic import Diagnostic

if TYPE_CHECKING:
    from rich.table import Table

    from flashwright.emulate.device_memory import Array
    from flashwright.emulate.own import DeclaredKernel, EmulatedKernel, LaunchReport
    from flashwright.emulate.signature import KernelSignature

SUFFIXES = (".cu", ".cuh", ".ptx")
_THREADS = 128
_LONGEST_NAME = 80  # characters of an instance's name in a command; CuTe's have thousands


@dataclass(frozen=True)
class OwnOptions:
    """The options of the command that are about a kernel of your own."""

    kernel: str | None = None
    grid: str | None = None
    block: str | None = None
    arguments: Sequence[str] = ()
    shared: int | None = None
    cluster: str | None = None
    cooperative: bool | None = None
    order: str | None = None
    races: str | None = None
    arch: str | None = None
    include: Sequence[Path] = ()
    define: Sequence[str] = ()
    flags: Sequence[str] = ()
    out: Path | None = None
    compare: Sequence[str] = ()
    rtol: float | None = None
    atol: float | None = None

    @property
    def given(self) -> list[str]:
        """The names of the options that were given."""
        names = {"arguments": "arg", "flags": "nvcc-flag"}
        return [
            f"--{names.get(n, n)}" for n, value in vars(self).items() if value not in (None, ())
        ]


@dataclass
class _Run:
    """The launch under one schedule."""

    schedule: str
    seconds: float
    report: LaunchReport
    given: GivenArguments
    wrong: list[Diagnostic] = field(default_factory=list)
    compared: dict[str, float] = field(default_factory=dict)
    """The largest difference of each array that was compared."""


def emulate_own(
    file: str,
    options: OwnOptions,
    schedules: Sequence[str],
    seed: int,
    profiled: bool,
    as_json: bool,
) -> int:
    """Launch the kernel, or list those of the file if no launch is described."""
    if not Path(file).is_file():
        raise cannot("read", Path(file), FileNotFoundError(2, "No such file or directory"))
    kernels = None if options.kernel or options.grid else _module(file, options)
    if kernels is not None:
        _list(file, kernels, options, as_json)
    for name, value in (("--grid", options.grid), ("--block", options.block)):
        if value is None:
            text = "a launch needs --grid and --block, such as --grid 8 --block 128"
            raise typer.BadParameter(text, param_hint=name)
    kernel = _kernel(file, options)
    runs = _runs(file, kernel, options, schedules, seed)
    told = _told(runs, options)
    if options.out is not None:
        _save(options.out, runs[0].given)
    if as_json:
        print(json.dumps(_record(file, kernel, options, runs, told, profiled), indent=2))
        return WRONG if told else FINE
    _show(file, kernel, options, runs, profiled)
    if told:
        tell(told, file, _text(file))
    return WRONG if told else FINE


def _text(file: str) -> str:
    return Path(file).read_text(encoding="utf-8", errors="replace")


# --- the kernel -------------------------------------------------------------------------------


def _compile_options(options: OwnOptions) -> dict[str, Any]:
    define = dict(_macro(text) for text in options.define)
    given = {"include": [*options.include], "define": define, "flags": [*options.flags]}
    arch = {"arch": options.arch} if options.arch else {}
    return {**arch, **{name: value for name, value in given.items() if value}}


def _macro(text: str) -> tuple[str, str | None]:
    name, sign, value = text.partition("=")
    if not name.isidentifier():
        text = f"{text!r} is no macro: give NAME or NAME=VALUE"
        raise typer.BadParameter(text, param_hint="--define")
    return name, value if sign else None


def _kernel(file: str, options: OwnOptions) -> EmulatedKernel:
    import flashwright.emulate

    given = _compile_options(options)
    if file.endswith(".ptx") and given:
        text = f"a file of PTX is compiled already: {', '.join(given)} cannot be set"
        raise typer.BadParameter(text, param_hint="WHAT")
    with blaming(file, _text(file)):
        return flashwright.emulate.kernel(Path(file), options.kernel, **given)


def _module(file: str, options: OwnOptions) -> list[DeclaredKernel]:
    """All kernels of a file. Raises Failed if it has none."""
    from flashwright.emulate.own import declared_kernels

    given = _compile_options(options)
    with blaming(file, _text(file)):
        return declared_kernels(Path(file), **given)


def _sizes(text: str, option: str) -> tuple[int, ...]:
    try:
        sizes = tuple(int(part) for part in text.split(","))
    except ValueError:
        sizes = ()
    if not 1 <= len(sizes) <= 3 or min(sizes) < 1:
        text = f"{text!r} is no size: one to three counts of at least 1, such as 8 or 8,4"
        raise typer.BadParameter(text, param_hint=option)
    return sizes


# --- the launches -----------------------------------------------------------------------------


def _runs(
    file: str, kernel: EmulatedKernel, options: OwnOptions, schedules: Sequence[str], seed: int
) -> list[_Run]:
    from flashwright.cli import show
    from flashwright.emulate.machine import library_file

    grid, block = _sizes(options.grid or "", "--grid"), _sizes(options.block or "", "--block")
    made, blocks = [_checked(kernel, options, seed) for _ in schedules], _together(options)
    runs = []
    with show.progress(f"emulating {file}") as step:
        step(0, len(schedules), "compiling the emulator itself, once")
        library_file()
        for number, (schedule, given) in enumerate(zip(schedules, made, strict=True)):
            step(number, len(schedules), schedule)
            start = time.monotonic()
            with blaming(file, kernel.text):
                more = {"shared": options.shared or 0, "schedule": schedule, **blocks}
                report = kernel(grid, block, *given.values, **more)
            run = _Run(schedule, time.monotonic() - start, report, given)
            _compare(run, kernel, options)
            runs.append(run)
    return runs


def _together(options: OwnOptions) -> dict[str, Any]:
    """How blocks run together, as emulate.launch takes it. Raises BadParameter."""
    from flashwright.emulate.emulate import order_of, races_of

    found: dict[str, Any] = {"cooperative": bool(options.cooperative)}
    if options.cluster is not None:
        found["cluster"] = _sizes(options.cluster, "--cluster")
    for name, check in (("order", order_of), ("races", races_of)):
        value = getattr(options, name)
        if value is None:
            continue
        try:
            check(value)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint=f"--{name}") from None
        found[name] = value
    return found


def _checked(kernel: EmulatedKernel, options: OwnOptions, seed: int) -> GivenArguments:
    """The arguments, checked against the kernel's types."""
    from flashwright.emulate.arguments import pack
    from flashwright.emulate.device_memory import Memory

    try:
        given = make_arguments(kernel, options.arguments, seed)
        for number, text in assigned(kernel, options.compare, "--compare").items():
            expected(text, _comparable(kernel, given, number))
    except BadArgument as error:
        raise typer.BadParameter(str(error), param_hint="--arg or --compare") from None
    try:
        pack(kernel.signature, kernel.parameters, given.values, Memory())
    except (TypeError, ValueError) as error:
        raise typer.BadParameter(str(error), param_hint="--arg") from None
    return given


def _comparable(kernel: EmulatedKernel, given: GivenArguments, number: int) -> Array:
    name = names_of(kernel)[number]
    if name not in given.arrays:
        listed = ", ".join(given.arrays) or "none"
        raise BadArgument(f"--compare {name}: this argument has no array; those are: {listed}")
    return given.arrays[name]


def _compare(run: _Run, kernel: EmulatedKernel, options: OwnOptions) -> None:
    """Compare the arrays that have an expected value."""
    import numpy as np

    from flashwright.judge.offences import offence

    rtol, atol = _tolerances(options)
    for number, text in assigned(kernel, options.compare, "--compare").items():
        name, array = names_of(kernel)[number], _comparable(kernel, run.given, number)
        found, wanted = array.astype(np.float64), expected(text, array).astype(np.float64)
        off = ~np.isclose(found, wanted, rtol, atol, equal_nan=True)
        with np.errstate(invalid="ignore"):
            differences = np.abs(found - wanted)
        known = differences[~np.isnan(differences)]
        run.compared[name] = float(known.max()) if known.size else 0.0
        if off.any():
            first = tuple(int(i) for i in np.argwhere(off)[0])
            place = f"{name}[{', '.join(map(str, first))}]"
            text = f"{place} is {found[first]:g}, and {wanted[first]:g} is expected"
            more = f"; {int(off.sum())} of {off.size} elements are off (schedule {run.schedule})"
            run.wrong.append(offence("wrong", text + more).diagnostic)


def _tolerances(options: OwnOptions) -> tuple[float, float]:
    rtol = 1e-3 if options.rtol is None else options.rtol
    return rtol, 1e-5 if options.atol is None else options.atol


def _told(runs: Sequence[_Run], options: OwnOptions) -> list[Diagnostic]:
    """The findings of all runs, without repetitions."""
    from flashwright.judge.offences import offence

    found: dict[str, Diagnostic] = {}
    for run in runs:
        for one in run.report.diagnostics:
            found.setdefault(f"{one.code}{one.span}{one.help}", one)
    for run in runs:
        for one in run.wrong:
            found.setdefault(one.message.partition(" (schedule")[0], one)
        names = [name for name in run.given.written if _varies(runs[0], run, name, options)]
        if names:
            text = f"schedules {runs[0].schedule} and {run.schedule} give different {names[0]}"
            found.setdefault("differs", offence("not_repeatable", text).diagnostic)
    return list(found.values())


def _varies(one: _Run, other: _Run, name: str, options: OwnOptions) -> bool:
    """Whether an array differs: in any bit, or by more than the tolerances that are given."""
    import numpy as np

    first, second = one.given.arrays[name], other.given.arrays[name]
    if options.rtol is None and options.atol is None:
        return first.tobytes() != second.tobytes()
    rtol, atol = _tolerances(options)
    values, others = first.astype(np.float64), second.astype(np.float64)
    return not np.allclose(values, others, rtol, atol, equal_nan=True)


def _save(folder: Path, given: GivenArguments) -> None:
    """Write the arrays that the kernel may have changed, each as NAME.npy."""
    import numpy as np

    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in given.written:
            np.save(folder / f"{name}.npy", given.arrays[name])
    except OSError as error:
        raise cannot("write", folder, error) from None


# --- in the terminal --------------------------------------------------------------------------


def _show(
    file: str, kernel: EmulatedKernel, options: OwnOptions, runs: Sequence[_Run], profiled: bool
) -> None:
    from flashwright.cli import show
    from flashwright.cli.emulate_tables import kinds_table, lines_table

    out = show.console()
    target = kernel.program.target
    out.print(f"{file} on the CPU, by emulation of {target}")
    launch = f"grid {options.grid}, block {options.block}"
    out.print(f"{kernel.signature.shown}, {launch}", soft_wrap=True)
    if runs[0].report.printed:
        print(runs[0].report.printed, end="" if runs[0].report.printed.endswith("\n") else "\n")
    out.print(_runs_table(runs))
    if runs[0].given.written:
        out.print(_arrays_table(runs[0]))
    if not options.compare:
        out.print("NOTHING WAS COMPARED: --compare NAME=@expected.npy says what is right.")
    if profiled and runs[0].report.profile is not None:
        out.print(lines_table(runs[0].report.profile, out.width))
        out.print(kinds_table(runs[0].report.profile))
    if not any(run.report.findings or run.wrong for run in runs):
        agrees = "agrees with what is expected; " if options.compare else ""
        out.print(f"{agrees}no access out of bounds, no race, no barrier fault")


def _runs_table(runs: Sequence[_Run]) -> Table:
    from flashwright.cli import show

    numbers = ("seconds", "instructions", "findings")
    shown = show.table("schedule", *numbers, right=numbers, gap=2)
    for run in runs:
        executed = f"{int(run.report.counts[:, 0].sum()):,}"
        shown.add_row(run.schedule, f"{run.seconds:.2f}", executed, str(len(run.report.findings)))
    return shown


def _arrays_table(run: _Run) -> Table:
    """The arrays that the kernel may have written."""
    import numpy as np

    from flashwright.cli import show

    numbers = ("least", "largest", "mean", "max error")
    shown = show.table("array", "dtype", "shape", *numbers, right=numbers, gap=2)
    for name in run.given.written:
        array = run.given.arrays[name]
        cells = ["", "", ""]
        if array.size and array.dtype.kind not in "cSU" and array.dtype.names is None:
            values = array.astype(np.float64)
            cells = [f"{value:.6g}" for value in (values.min(), values.max(), values.mean())]
        error = f"{run.compared[name]:.1e}" if name in run.compared else ""
        shown.add_row(name, str(array.dtype), str(array.shape), *cells, error)
    return shown


def _record(
    file: str,
    kernel: EmulatedKernel,
    options: OwnOptions,
    runs: Sequence[_Run],
    told: Sequence[Diagnostic],
    profiled: bool,
) -> dict[str, Any]:
    """The result as JSON-compatible data."""
    from flashwright.lang.render import as_json

    counted = runs[0].report.profile
    return {
        "what": file,
        "kernel": str(kernel.signature),
        "ok": not told,
        "arch": kernel.program.target,
        "grid": [*_sizes(options.grid or "", "--grid")],
        "block": [*_sizes(options.block or "", "--block")],
        "compared": bool(options.compare),
        "runs": [
            {
                "schedule": run.schedule,
                "seconds": round(run.seconds, 3),
                "findings": len(run.report.findings),
                "max_error": run.compared,
                "printed": run.report.printed,
            }
            for run in runs
        ],
        "diagnostics": json.loads(as_json(told, file)),
        **({"profile": counted.record()} if profiled and counted is not None else {}),
    }


# --- the kernels of a file --------------------------------------------------------------------


def _list(
    file: str, kernels: Sequence[DeclaredKernel], options: OwnOptions, as_json: bool
) -> NoReturn:
    """List the kernels with a command line for each. Nothing was run, so the exit code is 2."""
    from flashwright.cli import show
    from flashwright.emulate.signature import cut, templates

    known = {kernel.signature.symbol: kernel.signature for kernel in kernels}
    commands = [_command(file, kernel, known, options) for kernel in kernels]
    if as_json:
        found = [
            {"kernel": str(kernel.signature), "symbol": kernel.signature.symbol, "command": command}
            for kernel, command in zip(kernels, commands, strict=True)
        ]
        print(json.dumps({"what": file, "ok": False, "kernels": found}, indent=2))
    else:
        out = show.console()
        for kernel, command in zip(kernels, commands, strict=True):
            typed = kernel.signature.parameters
            listed = ", ".join(map(cut, map(str, typed) if typed else names_of(kernel)))
            out.print(f"{cut(kernel.signature.name)}({listed})", soft_wrap=True)
            out.print(f"  {command}\n", soft_wrap=True)
        for one in templates(_text(file), [*known.values()]):
            name = one.partition("<")[0]
            out.print(f"{one}: a template without an instance: --kernel '{name}<...>'")
    raise typer.BadParameter(
        f"nothing was run: {file} has {len(kernels)} kernels; give --kernel, --grid, --block and "
        "an --arg for each parameter, as listed",
        param_hint="--kernel",
    )


def _command(
    file: str,
    kernel: DeclaredKernel,
    known: Mapping[str, KernelSignature],
    options: OwnOptions,
) -> str:
    """A command line that launches a kernel, with sizes to be changed."""
    from flashwright.cli.show import called

    words = [called(), "emulate", file, "--kernel", _shortest(kernel.signature, known)]
    words += [word for folder in options.include for word in ("--include", str(folder))]
    words += [word for macro in options.define for word in ("--define", macro)]
    words += [word for one in options.flags for word in ("--nvcc-flag", one)]
    words += ["--arch", options.arch] if options.arch else []
    bound = kernel.directives.get("reqntid") or kernel.directives.get("maxntid")
    threads = ",".join(map(str, bound or (_THREADS,)))
    words += ["--grid", "8", "--block", threads.removesuffix(",1").removesuffix(",1")]
    for number, name in enumerate(names_of(kernel)):
        words += ["--arg", f"{name}={sample(kernel, number)}"]
    return shlex.join(words)


def _shortest(kernel: KernelSignature, known: Mapping[str, KernelSignature]) -> str:
    """The shortest name that is the kernel's alone."""
    from flashwright.emulate.signature import chosen, numbered

    if len(kernel.name) > _LONGEST_NAME:
        return numbered(known, kernel.symbol)
    own = kernel.name if "<" in kernel.name else kernel.name.rpartition("::")[2]
    names = (own, kernel.name, str(kernel))
    return next((name for name in names if len(chosen(known, name)) == 1), kernel.symbol)
