"""`flashwright emulate`: executes a kernel's PTX on the CPU, compares outputs, reports faults."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flashwright.cli.command import (
    FINE,
    WRONG,
    blaming,
    find_gpu,
    guarded,
    load_program,
    load_spec,
    shown_name,
    tell,
)
from flashwright.cli.emulate_own import SUFFIXES, OwnOptions, emulate_own
from flashwright.cli.emulate_tables import kinds_table, lines_table
from flashwright.files import cannot
from flashwright.lang.diagnostic import Diagnostic, Failed

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from rich.console import Console
    from rich.table import Table

    from flashwright.emulate.emulate import LaunchResult
    from flashwright.emulate.machine import Machine
    from flashwright.emulate.package import Package
    from flashwright.emulate.profile import Profile
    from flashwright.judge.oracle import Comparison
    from flashwright.spec import AttentionSpec

CODE = "code.tl"
KERNELS = (".ptx", ".cu")
LONGEST = 1 << 14  # positions; a CPU needs minutes for more
SECONDS = 600.0


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command(rich_help_panel="On the CPU")(emulate)


def _size(**settings: Any) -> Any:
    return typer.Option(metavar="N", min=1, max=LONGEST, show_default=False, **settings)


def _own(*names: str, **settings: Any) -> Any:
    return typer.Option(
        *names, show_default=False, rich_help_panel="A kernel of your own", **settings
    )


@guarded
def emulate(
    what: Annotated[
        str,
        typer.Argument(
            metavar="WHAT",
            help="A kernel package, its kernel.ptx or kernel.cu, TL code, or CUDA of your own.",
        ),
    ],
    kernel: Annotated[
        str | None, _own(metavar="NAME", help="The kernel, such as `reduce<float, 256>`.")
    ] = None,
    grid: Annotated[str | None, _own(metavar="X[,Y[,Z]]", help="Thread blocks.")] = None,
    block: Annotated[str | None, _own(metavar="X[,Y[,Z]]", help="Threads of a block.")] = None,
    arg: Annotated[
        list[str] | None,
        _own(
            metavar="[NAME=]VALUE",
            help="An argument: `n=1000`, `x=float32[64,128]:random` (or zeros, ones, arange, "
            "empty, a number, @FILE), `x=@x.npy`, `y=&x+64`, `p=null`, `s=hex:00ff`.",
        ),
    ] = None,
    shared: Annotated[
        int | None, _own(metavar="BYTES", min=0, help="Dynamic shared memory.")
    ] = None,
    cluster: Annotated[
        str | None, _own(metavar="X[,Y[,Z]]", help="Thread blocks of a cluster.")
    ] = None,
    cooperative: Annotated[
        bool, _own("--cooperative", metavar=" ", help="The kernel synchronises its grid.")
    ] = False,
    order: Annotated[
        str | None,
        _own(metavar="in-order|reversed|all|random:SEED", help="In which thread blocks begin."),
    ] = None,
    races: Annotated[
        str | None, _own(metavar="none|shared|global", help="Where to find races; default shared.")
    ] = None,
    arch: Annotated[str | None, _own(metavar="sm_NN", help="Default sm_80.")] = None,
    include: Annotated[list[Path] | None, _own(metavar="DIR", help="A folder of headers.")] = None,
    define: Annotated[list[str] | None, _own(metavar="NAME[=VALUE]", help="A macro.")] = None,
    nvcc_flag: Annotated[
        list[str] | None, _own(metavar="FLAG", help="A further option of nvcc.")
    ] = None,
    out: Annotated[
        Path | None, _own(metavar="DIR", help="Write the arrays that the kernel may change.")
    ] = None,
    compare: Annotated[
        list[str] | None,
        _own(metavar="NAME=@FILE", help="What an array should be; or a number for all of it."),
    ] = None,
    rtol: Annotated[
        float | None, _own(metavar="R", min=0, help="Relative tolerance, default 1e-3.")
    ] = None,
    atol: Annotated[
        float | None, _own(metavar="A", min=0, help="Absolute tolerance, default 1e-5.")
    ] = None,
    spec: Annotated[
        str | None,
        typer.Option(metavar="TOML|TEXT", help="What it should compute; a package has its own."),
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(metavar="NAME", help="For TL code: the GPU to compile it for.")
    ] = None,
    q_len: Annotated[int | None, _size(help="Queries.")] = None,
    kv_len: Annotated[int | None, _size(help="Keys; default as many as queries.")] = None,
    batch: Annotated[int | None, _size(help="Sequences.")] = None,
    heads: Annotated[int | None, _size(help="Query heads.")] = None,
    kv_heads: Annotated[int | None, _size(help="Heads of K and V.")] = None,
    schedule: Annotated[
        list[str] | None,
        typer.Option(
            metavar="eager|lazy|random:SEED|all",
            help="When asynchronous work is done; may be given several times.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Of the random inputs.")] = 0,
    profile: Annotated[
        bool,
        typer.Option("--profile", metavar=" ", help="Count instructions and bytes by line of TL."),
    ] = False,
    seconds: Annotated[
        float, typer.Option(metavar="S", min=0.1, help="For one launch, before it counts as hung.")
    ] = SECONDS,
    as_json: Annotated[
        bool, typer.Option("--json", metavar=" ", help="Print all of it as JSON.")
    ] = False,
) -> int:
    """Execute a kernel's PTX on the CPU, with the hardware's rules checked while it runs."""
    from flashwright.cli import run as on_cpu
    from flashwright.cli import show
    from flashwright.emulate.machine import library_file
    from flashwright.judge.tiling import HEADS_OF_GROUP

    given = {"q_len": q_len, "kv_len": kv_len, "batch": batch, "heads": heads}
    sizes = {n: s for n, s in {**given, "kv_heads": kv_heads}.items() if s is not None}
    schedules = _schedules(schedule or ["eager"], seed)
    own = OwnOptions(
        kernel=kernel,
        grid=grid,
        block=block,
        arguments=tuple(arg or ()),
        shared=shared,
        cluster=cluster,
        cooperative=cooperative or None,
        order=order,
        races=races,
        arch=arch,
        include=tuple(include or ()),
        define=tuple(define or ()),
        flags=tuple(nvcc_flag or ()),
        out=out,
        compare=tuple(compare or ()),
        rtol=rtol,
        atol=atol,
    )
    of_packages = [name for name, value in (("spec", spec), ("gpu", gpu)) if value is not None]
    if _is_own(what, own, [*of_packages, *sizes]):
        return emulate_own(what, own, schedules, seed, profile, as_json)
    with show.progress(f"emulating {what}") as step:
        step(0, len(schedules), "compiling")
        package = _package(what, gpu)
        step(0, len(schedules), "compiling the emulator itself, once")
        library_file()
        meant, base = _meant(what, spec)
        axes = (axis.label for tensor in package.plan.tensors for axis in tensor.axes)
        usual = on_cpu.problem(sizes, meant, whole_groups=HEADS_OF_GROUP in axes)
        dims = {**(dict(meant.dims) if meant else {}), **usual}
        serving = _serving(what, dims)
        if Path(serving) != Path(what):
            what, package = serving, _package(serving, gpu)
        trial = _EmulatedProblem(package, meant, base, dims, seed, seconds)
        for number, one in enumerate(schedules):
            step(number, len(schedules), one)
            trial.run(one)
    source = package.tl or ""
    counted = trial.profile() if profile else None
    if as_json:
        print(json.dumps(trial.record(what, counted), indent=2))
    else:
        _show(show.console(), what, trial, counted)
        if trial.diagnostics:
            tell(trial.diagnostics, _file(what, package), source)
    return FINE if trial.ok else WRONG


def _is_own(what: str, own: OwnOptions, of_packages: Sequence[str]) -> bool:
    """Whether the command is about a kernel without a package. Raises BadParameter for options that
    do not go together."""
    from flashwright.build.reading import PLAN

    is_file = what != "-" and Path(what).suffix in SUFFIXES
    if own.given and not is_file:
        text = f"{', '.join(own.given)}: for a file of CUDA or PTX, and {what} is none"
        raise typer.BadParameter(text, param_hint="WHAT")
    taken = is_file and (bool(own.given) or not (Path(what).parent / PLAN).is_file())
    if taken and of_packages:
        listed = ", ".join(f"--{name.replace('_', '-')}" for name in of_packages)
        text = f"{listed}: for kernel packages and TL code, and {what} is a kernel of your own"
        raise typer.BadParameter(text, param_hint="WHAT")
    return taken


def _schedules(given: Sequence[str], seed: int) -> list[str]:
    from flashwright.emulate.emulate import schedule_of

    found: list[str] = []
    for one in given:
        found += ["eager", "lazy", f"random:{seed}"] if one == "all" else [one]
    for one in found:
        try:
            schedule_of(one)
        except ValueError:
            text = f"{one!r} is no schedule: give eager, lazy, random:SEED or all"
            raise typer.BadParameter(text, param_hint="--schedule") from None
    return list(dict.fromkeys(found))


# --- what is emulated -------------------------------------------------------------------------


def _package(what: str, gpu: str | None) -> Package:
    """The kernel, with source lines in its PTX if the source can be compiled again."""
    from flashwright.emulate.package import compile_package, read_package

    path = Path(what)
    if what != "-" and path.is_dir():
        return read_package(path, what).with_lines()
    if path.suffix == ".ptx":
        return read_package(path.parent, what, path.name).with_lines()
    if path.suffix == ".cu":
        return compile_package(path, what)
    return _compiled(what, gpu)


def _serving(what: str, dims: Mapping[str, int]) -> str:
    """The folder of the kernel that serves these sizes, for a package with several kernels."""
    from flashwright.build.classes import serving

    is_folder = what != "-" and Path(what).is_dir()
    return str(serving(Path(what), dims)) if is_folder else what


def _compiled(file: str, gpu: str | None) -> Package:
    from flashwright.build.make import make
    from flashwright.emulate.package import Package

    if file != "-" and not Path(file).is_file():
        raise cannot("read", Path(file), FileNotFoundError(2, "No such file or directory"))
    if gpu is None:
        text = "name the GPU; `flashwright gpus` lists them"
        raise typer.BadParameter(text, param_hint="--gpu")
    card = find_gpu(gpu)
    program, source = load_program(file, card)
    with blaming(shown_name(file), source):
        made, built = make(program, card, tl=source)
    parts = (made.plan, built.ptx, made.source, made.map, source)
    return Package(shown_name(file), *parts, translated=True).with_lines()


def _meant(what: str, option: str | None) -> tuple[AttentionSpec | None, Path]:
    """The spec of the kernel, if there is one, and the folder its paths are relative to."""
    path = Path(what)
    beside = path / CODE if path.is_dir() else path
    if path.suffix in KERNELS:
        beside = path.parent / CODE
    found = load_spec(option, "-" if what == "-" else str(beside))
    return found if found is not None else (None, Path())


def _file(what: str, package: Package) -> str:
    """The file that the lines of the diagnostics refer to."""
    path = Path(what)
    folder = path if path.is_dir() else path.parent
    return str(folder / CODE) if path.is_dir() or path.suffix in KERNELS else package.name


# --- one problem ------------------------------------------------------------------------------


def _machine(package: Package) -> Machine:
    """The machine that executes the kernel: a confined process for a kernel read from a folder."""
    from flashwright.emulate.machine import here
    from flashwright.emulate.machine_process import MachineProcess
    from flashwright.sandbox.limits import Limits

    return here if package.translated or sys.platform != "linux" else MachineProcess(Limits())


@dataclass
class _ScheduleRun:
    """The problem under one schedule: outputs, comparison and findings."""

    schedule: str
    seconds: float
    outputs: dict[str, NDArray[Any]]
    result: LaunchResult
    compared: dict[str, Comparison]
    findings: tuple[Diagnostic, ...]


class _EmulatedProblem:
    """One problem, executed under several schedules."""

    def __init__(
        self,
        package: Package,
        spec: AttentionSpec | None,
        base: Path,
        dims: Mapping[str, int],
        seed: int,
        seconds: float,
    ) -> None:
        from flashwright.judge.emulated import pose

        self.package, self.spec, self.dims, self.seconds = package, spec, dims, seconds
        self.problem = pose(package.plan, spec, base, dims, seed)
        self.machine = _machine(package)
        self.runs: list[_ScheduleRun] = []

    def run(self, schedule: str) -> None:
        """Execute the problem under a schedule and compare the outputs."""
        from flashwright.emulate.places import diagnostics
        from flashwright.judge.answer import compare
        from flashwright.judge.emulated import launch
        from flashwright.sandbox.process import Ended

        problem, start = self.problem, time.monotonic()
        tensors = problem.tensors()
        try:
            given = (tensors, self.dims, schedule, self.seconds, None, self.machine)
            result = launch(self.package, *given)
        except Ended as ended:
            text = f"schedule {schedule}: {ended.message}"
            raise Failed(Diagnostic("FW877", f"hang: {text}")) from None
        took = time.monotonic() - start
        made = {name: tensors[name] for name in problem.outputs}
        compared = {}
        if self.spec is not None:
            known = [name for name in made if name in problem.expected]
            compared = {
                n: compare(self.spec, n, made[n].astype("float64"), problem.expected) for n in known
            }
        origin = self.package.origin(self.dims, tensors)
        told = diagnostics(result.findings, origin)
        self.runs.append(_ScheduleRun(schedule, took, made, result, compared, told))

    @property
    def diagnostics(self) -> list[Diagnostic]:
        """The findings of all runs, without repetitions."""
        from flashwright.judge.offences import offence

        found: dict[str, Diagnostic] = {}
        for run in self.runs:
            for one in run.findings:
                found.setdefault(f"{one.code}{one.span}{one.help}", one)
        for run in self.runs:
            for name, result in run.compared.items():
                if not result.ok:
                    text = f"{name} under schedule {run.schedule}: {result.reason}"
                    found.setdefault(f"wrong {name}", offence("wrong", text).diagnostic)
            if any(self._varies(n, x, run.outputs[n]) for n, x in self.runs[0].outputs.items()):
                text = f"schedules {self.runs[0].schedule} and {run.schedule} give different bits"
                found.setdefault("differs", offence("not_repeatable", text).diagnostic)
        return list(found.values())

    def _varies(self, name: str, one: NDArray[Any], other: NDArray[Any]) -> bool:
        """Whether two runs of an output differ by more than the spec allows."""
        from flashwright.judge.answer import variation
        from flashwright.sandbox.tensors import bits

        if self.spec is None or self.spec.repeats(name):
            return not bool((bits(one) == bits(other)).all())
        found, limit = variation(self.spec, name, one, other)
        return found > limit

    @property
    def ok(self) -> bool:
        """Whether no run has a finding."""
        return not self.diagnostics

    def profile(self) -> Profile:
        """The counts of the first schedule."""
        from flashwright.emulate.profile import profile

        source, counts = self.package.program.source, self.runs[0].result.counts
        return profile(source, counts, self.package.origin(self.dims))

    def record(self, what: str, counted: Profile | None) -> dict[str, Any]:
        """The result as JSON-compatible data."""
        from flashwright.lang.render import as_json

        return {
            "what": what,
            "ok": self.ok,
            "arch": self.package.plan.arch,
            "dims": dict(self.dims),
            "compared": self.spec is not None,
            "runs": [
                {
                    "schedule": run.schedule,
                    "seconds": round(run.seconds, 3),
                    "findings": len(run.result.findings),
                    "outputs": {
                        name: {
                            "ok": result.ok,
                            "relative_rms": result.relative_rms,
                            "relative_max": result.relative_max,
                            "reason": result.reason,
                        }
                        for name, result in run.compared.items()
                    },
                }
                for run in self.runs
            ],
            "diagnostics": json.loads(as_json(self.diagnostics, _file(what, self.package))),
            **({"profile": counted.record()} if counted is not None else {}),
        }


# --- in the terminal --------------------------------------------------------------------------


def _show(out: Console, what: str, trial: _EmulatedProblem, counted: Profile | None) -> None:
    spec = trial.spec
    words = f": {spec.in_words}" if spec else ""
    out.print(f"{what} on the CPU, by emulation of {trial.package.plan.arch}{words}")
    out.print(", ".join(f"{name} {size}" for name, size in trial.dims.items()))
    out.print(_runs_table(trial))
    if spec is None:
        out.print("NOTHING WAS COMPARED: there is no spec that says what is right.")
    if counted is not None:
        out.print(lines_table(counted, out.width))
        out.print(kinds_table(counted))
    if trial.ok:
        agrees = "agrees with fp64; " if spec else ""
        out.print(f"{agrees}no access out of bounds, no race, no barrier fault")


def _runs_table(trial: _EmulatedProblem) -> Table:
    from rich.text import Text

    from flashwright.cli import show

    numbers = ("seconds", "instructions", "findings", "rms error", "max error")
    names = ("schedule", "output", "")
    columns = (names[0], *numbers[:3], names[1], *numbers[3:], names[2])
    shown = show.table(*columns, right=numbers, whole=names, gap=2)
    for run in trial.runs:
        executed = f"{int(run.result.counts[:, 0].sum()):,}"
        row = [run.schedule, f"{run.seconds:.2f}", executed, str(len(run.result.findings))]
        for name, result in run.compared.items():
            verdict = Text("agrees", "green") if result.ok else Text("wrong", "bold red")
            errors = (f"{result.relative_rms:.1e}", f"{result.relative_max:.1e}")
            shown.add_row(*row, name, *errors, verdict)
            row = [""] * len(row)
        if not run.compared:
            shown.add_row(*row, "", "", "", "")
    return shown
