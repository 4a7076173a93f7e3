"""`flashwright bench`: our kernels beside the libraries on this machine's GPU."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flashwright.cli.command import (
    BAD_INPUT,
    FINE,
    INTERRUPTED,
    WRONG,
    Dtype,
    find_gpu,
    guarded,
    tell,
)
from flashwright.lang.diagnostic import Diagnostic, Failed

if TYPE_CHECKING:
    from flashwright.build.driver import Card
    from flashwright.measure.grid import Cell
    from flashwright.measure.journal import Journal
    from flashwright.measure.kernels import KernelBuild
    from flashwright.measure.peers.registry import Peer
    from flashwright.measure.results import Results
    from flashwright.measure.session import BenchPlan


class Mask(StrEnum):
    """The masks to measure."""

    FULL = "full"
    CAUSAL = "causal"
    BOTH = "both"


class Layout(StrEnum):
    """The axis order of Q, K and V in memory."""

    BSHD = "bshd"
    BHSD = "bhsd"


class L2(StrEnum):
    """What the L2 cache holds before a call."""

    COLD = "cold"
    BOTH = "both"


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command(rich_help_panel="On the GPU")(bench)


@guarded
def bench(
    table: Annotated[
        int | None, typer.Option(metavar="N", help="A table of the paper: 1, 2, 4, 6, 7, 8 or 9.")
    ] = None,
    grid: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Your own shapes, in TOML.")
    ] = None,
    package: Annotated[
        list[Path] | None,
        typer.Option(metavar="FOLDER", help="A kernel package to measure; repeatable."),
    ] = None,
    as_gpu: Annotated[
        str | None,
        typer.Option(
            "--as", metavar="NAME", help="Translate for this GPU, compile for the card at hand."
        ),
    ] = None,
    variant: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Only this value; repeatable.")
    ] = None,
    head_dim: Annotated[
        list[int] | None, typer.Option(metavar="N", help="Only this value; repeatable.")
    ] = None,
    length: Annotated[
        list[int] | None, typer.Option(metavar="N", min=1, help="Only this value; repeatable.")
    ] = None,
    mask: Annotated[Mask, typer.Option(help="Which masks.")] = Mask.BOTH,
    heads: Annotated[int | None, typer.Option(metavar="N", min=1, help="Query heads.")] = None,
    kv_heads: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Heads of K and V.")
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Batch times length. Default 16384."),
    ] = None,
    dtype: Annotated[
        Dtype | None, typer.Option(help="Default bf16; fp16 for the paper's tables.")
    ] = None,
    layout: Annotated[Layout, typer.Option(help="Order of the tensors in memory.")] = Layout.BSHD,
    l2: Annotated[L2, typer.Option(help="Also with a warm L2.")] = L2.COLD,
    peers: Annotated[
        str | None, typer.Option(metavar="A,B", help="Only these: flash, cudnn, flex, ...; none.")
    ] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE:NAME", help="A callable of yours as a peer; repeatable."),
    ] = None,
    jobs: Annotated[
        int, typer.Option(metavar="N", min=0, help="Compilers at a time; default one per core.")
    ] = 0,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Output folder; default out/bench/TITLE-CARD."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", metavar=" ", help="Continue the run in DIR.")
    ] = False,
) -> int:
    """Measure kernels beside torch, FlexAttention, FlashAttention and your own, in one run.

    Without --table, --grid or --package: the paper's grid in bf16, 16k tokens, hidden size 2048.
    """
    from flashwright.build import driver
    from flashwright.judge.judge import need_torch
    from flashwright.measure.session import BenchPlan
    from flashwright.measure.timing import Rules

    card = driver.cards()[0]
    need_torch()
    options = ShapeOptions(variant, head_dim, length, mask, heads, kv_heads, tokens, dtype)
    title, cells, packages = _cells(options, table, grid, package or [])
    plan = BenchPlan(
        title=title,
        cells=tuple(cells),
        gpu=find_gpu(as_gpu or card.name).name,
        peers=tuple(_peers(peers, peer or [], table)),
        table=table,
        layout=layout.value,
        rules=Rules(warm=l2 is L2.BOTH),
        packages=tuple(packages),
    )
    return run(plan, card, out or _folder(title, card.name), resume, jobs)


# --- what is measured -------------------------------------------------------------------------


@dataclass(frozen=True)
class ShapeOptions:
    """The options that choose shapes."""

    variants: Sequence[str] | None = None
    head_dims: Sequence[int] | None = None
    lengths: Sequence[int] | None = None
    mask: Mask = Mask.BOTH
    heads: int | None = None
    kv_heads: int | None = None
    tokens: int | None = None
    dtype: Dtype | None = None

    @property
    def masks(self) -> list[bool]:
        """The values of `causal` to measure."""
        return {Mask.FULL: [False], Mask.CAUSAL: [True], Mask.BOTH: [False, True]}[self.mask]

    def wants(self, cell: Cell) -> bool:
        """Whether the options select a cell of a table, a grid file or a package."""
        spec = cell.spec
        return (
            (not self.variants or spec.variant in [v.lower() for v in self.variants])
            and (not self.head_dims or spec.head_dim in self.head_dims)
            and (not self.lengths or cell.length in self.lengths)
            and spec.causal in self.masks
        )


def _cells(
    options: ShapeOptions, table: int | None, grid: Path | None, packages: Sequence[Path]
) -> tuple[str, list[Cell], list[KernelBuild]]:
    """The title of the run, its cells, and the kernels of `--package`."""
    from flashwright.author.builtin.variants import UnknownVariant
    from flashwright.spec import BadSpec

    chosen = [n for n, g in (("--table", table), ("--grid", grid), ("--package", packages)) if g]
    if len(chosen) > 1:
        raise typer.BadParameter(f"{' and '.join(chosen)} do not go together")
    if chosen and (options.heads or options.kv_heads):
        raise typer.BadParameter(f"{chosen[0]} has its own heads", param_hint="--heads")
    try:
        title, cells, made = _named(options, table, grid, packages)
    except UnknownVariant as error:
        raise Failed(Diagnostic("FW902", str(error), help="see `flashwright variants`")) from None
    except BadSpec as error:
        raise Failed(*(Diagnostic("FW901", line) for line in error.lines)) from None
    kept = [cell for cell in cells if options.wants(cell)] if chosen else list(cells)
    if not kept:
        raise typer.BadParameter(f"no cell of {title} matches the options")
    return title, kept, made


def _named(
    options: ShapeOptions, table: int | None, grid: Path | None, packages: Sequence[Path]
) -> tuple[str, Sequence[Cell], list[KernelBuild]]:
    from flashwright.measure import grid as grids
    from flashwright.measure import kernels
    from flashwright.measure.tables import TABLES

    if table is not None:
        if table not in TABLES:
            known = ", ".join(str(number) for number in TABLES)
            raise typer.BadParameter(f"there are {known}, not {table}", param_hint="--table")
        return f"table {table}", TABLES[table].cells(options.dtype and options.dtype.value), []
    if grid is not None:
        found = grids.load(grid)
        return found.title, found.cells, []
    tokens = options.tokens or grids.TOKENS
    lengths = options.lengths or grids.LENGTHS
    if packages:
        made = [kernels.load(folder) for folder in packages]
        every = [c for one in made for c in grids.of_package(one.spec, lengths, options.tokens)]
        return " and ".join(one.name for one in made), every, made
    shape = grids.Shape(
        options.variants or grids.VARIANTS,
        options.head_dims or grids.HEAD_DIMS,
        lengths,
        options.masks,
        options.dtype.value if options.dtype else "bf16",
        options.heads,
        options.kv_heads,
        tokens,
    )
    return "grid", list(grids.cells(shape)), []


def _peers(names: str | None, callables: Sequence[str], table: int | None) -> list[Peer]:
    from flashwright.measure.peers import registry
    from flashwright.measure.tables import TABLES

    try:
        chosen = [n for n in names.split(",") if n.strip()] if names is not None else None
        always = TABLES[table].peers if table is not None else ()
        return registry.choose(chosen, callables, always)
    except registry.UnknownPeer as error:
        raise typer.BadParameter(str(error), param_hint="--peers") from None


def _folder(title: str, card: str) -> Path:
    plain = re.sub(r"[^a-z0-9]+", "-", f"{title}-{card.removeprefix('NVIDIA ')}".lower())
    return Path("out", "bench", plain.strip("-"))


# --- the run ----------------------------------------------------------------------------------


def run(plan: BenchPlan, card: Card, folder: Path, resume: bool, jobs: int = 0) -> int:
    """Measure a plan, and show the results so far even if the run fails or is interrupted."""
    import secrets

    from flashwright.cli.bench_show import BenchDisplay, show_results
    from flashwright.measure.journal import Journal
    from flashwright.measure.results import Results
    from flashwright.measure.session import OtherRun, session

    if resume:
        journal, kept = Journal.resume(folder), ""
    else:
        journal, kept = Journal.begin(folder)
    if kept:
        print(f"the records of an earlier run are kept as {folder / kept}", file=sys.stderr)
    complete = True
    with contextlib.closing(BenchDisplay()) as screen:
        try:
            session(plan, card, folder, journal, screen, secrets.randbits(31), jobs)
        except KeyboardInterrupt:
            complete = False
        except OtherRun as other:
            text = f"{journal.path} is of another run: {other}"
            hint = "leave out --resume, or give another --out"
            raise typer.BadParameter(f"{text}; {hint}", param_hint="--resume") from None
    results = Results.of(journal.records)
    show_results(results)
    return _end(plan, folder, journal, results, complete)


def _end(plan: BenchPlan, folder: Path, journal: Journal, results: Results, complete: bool) -> int:
    from flashwright.files import write
    from flashwright.measure.markdown import FILE, page
    from flashwright.measure.records import OURS

    done = sum(results.complete(cell.name) for cell in plan.cells)
    code = FINE if all((c.name, OURS) in results.numbers for c in plan.cells) else WRONG
    try:
        write(folder / FILE, page(results))
    except Failed as failed:
        code = tell(failed.diagnostics, "command line", "")
    rest = "" if complete else "; interrupted, --resume continues"
    print(f"{folder}: {done} of {len(plan.cells)} cells{rest}")
    if not journal.save():
        text = f"{journal.unsaved} records are not in their file: {journal.write_error}"
        hint = _rescued(journal)
        tell([Diagnostic("FW001", text, help=hint)], "command line", "")
        code = BAD_INPUT
    return code if complete else INTERRUPTED


def _rescued(journal: Journal) -> str:
    """Write all records to a temporary file. Returns the hint for the user."""
    import tempfile

    try:
        with tempfile.NamedTemporaryFile("wb", suffix=".jsonl", delete=False) as file:
            for record in journal.records:
                file.write(record.model_dump_json().encode() + b"\n")
        return f"all of them are in {file.name}: make room and copy it to {journal.path}"
    except OSError:
        return "the table above has their figures"
