"""`flashwright tune`: the fastest tiles for a kernel package, measured on this machine's GPU."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flashwright.cli.command import (
    FINE,
    INTERRUPTED,
    WRONG,
    find_gpu,
    guarded,
    load_kernels,
    load_spec,
)
from flashwright.cli.fleet import LOCAL, On
from flashwright.cli.kernel import known_gpu
from flashwright.lang.diagnostic import Diagnostic, Failed

if TYPE_CHECKING:
    from rich.table import Table

    from flashwright.build.driver import Card
    from flashwright.fleet.fleet import Fleet
    from flashwright.gpu import Gpu
    from flashwright.measure.tune.state import Tuning
    from flashwright.measure.tune.tune import TuneRequest

CODE = "code.tl"
LENGTHS = "512,1024,2048,4096,8192,16384"
CANDIDATES = 24
BY_HAND = (
    f"change BM, BN, Stages and Warps in {CODE}, `flashwright build` the folder and `flashwright "
    "verify` it"
)


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command(rich_help_panel="On the GPU")(tune)


@guarded
def tune(
    folder: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="FOLDER", help="A kernel package; several only for --write-defaults."
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Default: the one the package was made for."),
    ] = None,
    lengths: Annotated[
        str, typer.Option(metavar="A,B", help="Queries and keys; 16k tokens in all.")
    ] = LENGTHS,
    candidates: Annotated[
        int, typer.Option(metavar="N", min=1, help="How many tilings and schedules to try.")
    ] = CANDIDATES,
    minutes: Annotated[
        float | None, typer.Option(metavar="M", min=0, help="Time limit; the best so far is kept.")
    ] = None,
    jobs: Annotated[
        int, typer.Option(metavar="N", min=0, help="Compilers at a time; default one per core.")
    ] = 0,
    on: On = LOCAL,
    resume: Annotated[
        bool, typer.Option("--resume", metavar=" ", help="Continue an interrupted tuning.")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", metavar=" ", help="Only list what would be tried; needs no GPU."),
    ] = False,
    defaults: Annotated[
        str | None,
        typer.Option(
            metavar="A,B|FILE.toml",
            help="Tune the author's kernels of these operators, in --out; then --write-defaults.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="For --defaults: a package for each operator."),
    ] = None,
    write_defaults: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the FOLDERs' results into the author's table."),
    ] = None,
) -> int:
    """Find the fastest tiles, stages, warps and schedule for a package, and keep them in it.

    Candidates are compiled, judged, and timed as in `bench`. A candidate that is faster than the
    package's own kernel is added to the package; classes.json has the lengths it serves.
    """
    from flashwright.fleet.engine import connect

    folders, limits = folder or [], (_numbers(lengths), candidates, minutes, jobs)
    if defaults is not None:
        made = _operators(defaults, folders, gpu, out)
        orders = [_order(place, find_gpu(gpu or ""), *limits) for place in made]
    elif write_defaults is not None:
        return _write_defaults(write_defaults, folders)
    else:
        if len(folders) != 1:
            raise typer.BadParameter("one package at a time", param_hint="FOLDER")
        target = find_gpu(gpu or _known(folders[0], None if dry_run else on))
        orders = [_order(folders[0], target, *limits)]
    if dry_run:
        return max(_list(order) for order in orders)
    with connect(on) as fleet:
        card = _card(fleet, orders[0].gpu)
        for order in orders:  # each uses the whole fleet; those of --defaults go on by themselves
            code = _run(order, card, fleet, resume or defaults is not None)
            if code != FINE and (defaults is None or code == INTERRUPTED):
                return code
    if write_defaults is not None:
        return _write_defaults(write_defaults, [order.folder for order in orders])
    return FINE


# --- the order --------------------------------------------------------------------------------


def _operators(text: str, folders: Sequence[Path], gpu: str | None, out: Path | None) -> list[Path]:
    """The packages of --defaults, not built yet; one that is there and the same stays."""
    from flashwright.measure.tune.defaults import begin_package
    from flashwright.study import operators

    if folders:
        raise typer.BadParameter("--defaults makes its own packages", param_hint="FOLDER")
    if gpu is None or out is None:
        missing = "--gpu" if gpu is None else "--out"
        raise typer.BadParameter("is required with --defaults", param_hint=missing)
    target = find_gpu(gpu)
    return [begin_package(out / one.name, one.spec, target) for one in operators.chosen(text)]


def _card(fleet: Fleet, gpu: Gpu) -> Card:
    """The kind of card to tune on."""
    try:
        card = fleet.card(gpu.name)
    except Failed as failed:
        found = failed.diagnostics[0]
        hint = "--dry-run lists the candidates without one"
        raise Failed(Diagnostic(found.code, found.message, help=hint)) from None
    if not card.takes(gpu.arch):
        text = f"a kernel for {gpu.title} cannot run on {card.name} ({card.arch})"
        raise Failed(Diagnostic("FW851", text, help="name an older GPU: --gpu a100"))
    return card


def _numbers(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"[1-9]\d{0,6}", part) for part in parts):
        raise typer.BadParameter(
            f"{text!r} is not a list such as {LENGTHS}", param_hint="--lengths"
        )
    return tuple(sorted({int(part) for part in parts}))


def _order(
    folder: Path,
    target: Gpu,
    lengths: tuple[int, ...],
    candidates: int,
    minutes: float | None,
    jobs: int,
) -> TuneRequest:
    from flashwright.author.builtin.retile import NEEDED, tiling_of
    from flashwright.measure.tune.tune import TuneRequest

    file = str(folder / CODE)
    kernels, code = load_kernels(file, target)
    meant = load_spec(None, file)
    if meant is None:
        text = f"{folder} has no spec.toml: nothing says what the kernels should compute"
        raise Failed(Diagnostic("FW852", text, help="`flashwright generate` writes one"))
    if meant[0].reference is not None:
        text = "a spec with a reference has no problems to time"
        raise Failed(Diagnostic("FW904", text, help="tune a package of the built-in variants"))
    if meant[0].batch is not None:
        text = f"`tune` measures rectangular batches, and this package is {meant[0].in_words}"
        hint = f"{BY_HAND}, and time it: `flashwright bench --package {folder}`"
        raise Failed(Diagnostic("FW904", text, help=hint))
    if len(kernels.programs) > 1:
        text = f"`tune` measures one kernel, and {file} has {len(kernels.programs)}"
        raise Failed(
            Diagnostic("FW904", text, help=f"{BY_HAND}, and time its calls (flashwright.load)")
        )
    (program,) = kernels.programs
    if tiling_of(program) is None:
        text = f"{file} has no params {' and '.join(NEEDED)}: its tiles cannot be changed"
        hint = f"call its row tile {NEEDED[0]} and its column tile {NEEDED[1]}"
        raise Failed(Diagnostic("FW904", text, help=hint))
    return TuneRequest(folder, meant[0], program, code, target, lengths, candidates, minutes, jobs)


def _known(folder: Path, on: str | None) -> str:
    """The GPU that a package was made for, or the GPU of this machine if it does not say."""
    from flashwright.build import driver

    try:
        return known_gpu(folder)
    except typer.BadParameter:
        if on != LOCAL:
            raise
    return driver.cards()[0].name


# --- the tuning -------------------------------------------------------------------------------


def _run(order: TuneRequest, card: Card, fleet: Fleet, resume: bool) -> int:
    import secrets

    from flashwright.cli.bench_show import BenchDisplay
    from flashwright.measure.tune.state import read
    from flashwright.measure.tune.tune import OtherTuning
    from flashwright.measure.tune.tune import tune as work

    before = read(order.folder) if resume else None
    with contextlib.closing(BenchDisplay()) as screen:
        try:
            done = work(order, card, fleet, screen, secrets.randbits(31), before)
        except OtherTuning as other:
            text = f"the tuning in {order.folder} is of {other}; leave out --resume"
            raise typer.BadParameter(text, param_hint="--resume") from None
        except KeyboardInterrupt:
            screen.close()
            print(f"{order.folder}: interrupted; results are kept, --resume continues")
            return INTERRUPTED
    return show_tuning(order.folder, done)


def show_tuning(folder: Path, tuning: Tuning) -> int:
    """Print the times, the kernels that were kept, and the failures. Returns the exit code."""
    from flashwright.cli import show

    out = show.console()
    out.print(f"On {tuning.card}, for {tuning.gpu}: microseconds by keys, * serves them.")
    out.print(table(tuning))
    for one in tuning.tried:
        if one.failure:
            out.print(f"  {one.name}: {one.failure}")
    if tuning.note:
        out.print(f"  note: {tuning.note}; --resume continues")
    for line in in_words(tuning):
        out.print(line)
    print(f"{folder}: {len(tuning.kept)} classes, {len(tuning.tried)} candidates tried")
    return FINE if tuning.kept else WRONG


def table(tuning: Tuning) -> Table:
    """A row for each candidate that was timed, the fastest first."""
    from flashwright.cli import show

    served = serving(tuning)
    heads = [str(length) for length in tuning.lengths]
    shown = show.table("candidate", *heads, right=tuple(heads))
    timed = [one for one in tuning.tried if one.first or one.final]

    def order(name: str) -> float:
        return sum(f[name].seconds if name in f else 1e9 for f in map(tuning.at, tuning.lengths))

    for one in sorted(timed, key=lambda one: order(one.name)):
        cells = []
        for length in tuning.lengths:
            figure = one.final.get(length) or one.first.get(length)
            mark = "*" if served.get(length) == one.name else " "
            cells.append(f"{figure.seconds * 1e6:.1f}{mark}" if figure else "- ")
        shown.add_row(one.name, *cells)
    return shown


def serving(tuning: Tuning) -> dict[int, str]:
    """The candidate that serves each length."""
    return {length: kept.tried for kept in tuning.kept for length in kept.lengths}


def in_words(tuning: Tuning) -> list[str]:
    """The lengths that each kernel serves, and the speedup over the package's own kernel."""
    lines = []
    for kept in tuning.kept:
        whose = "the package's own" if kept.kernel == "." else f"in {kept.kernel}/"
        keys = "every other length" if kept.up_to is None else f"up to {kept.up_to} keys"
        lines.append(f"{keys}: {kept.tried}, {whose}")
    served, present = serving(tuning), tuning.tried[0].name if tuning.tried else ""
    ratios = [
        f"{figures[present].seconds / figures[served[length]].seconds:.2f}"
        for length in tuning.lengths
        if (figures := tuning.at(length)) and {present, served.get(length)} <= set(figures)
    ]
    if ratios:
        lines.append(f"times as fast as the package's own, by length: {', '.join(ratios)}")
    return lines


# --- without a GPU ----------------------------------------------------------------------------


def _list(order: TuneRequest) -> int:
    """Print the candidates in their order, with the cost model's estimates."""
    from flashwright.cli import show

    offers = order.offers()
    heads = [str(length) for length in order.lengths]
    shown = show.table("", "candidate", *heads, right=("", *heads))
    for number, offer in enumerate(offers, 1):
        cells = [f"{us:.0f}" for us in offer.microseconds] or ["-"] * len(heads)
        shown.add_row(str(number), offer.name + (" (present)" if number == 1 else ""), *cells)
    out = show.console()
    out.print(f"{order.folder} for {order.gpu.title}: the cost model's microseconds by keys.")
    out.print(shown)
    return FINE


def _write_defaults(table: Path, folders: Sequence[Path]) -> int:
    from flashwright.measure.tune.defaults import write_defaults

    told = write_defaults(table, folders)
    for folder, text in told:
        print(f"{folder}: {text}")
    return WRONG if all(text.startswith("left out") for _, text in told) else FINE
