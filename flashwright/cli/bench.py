"""`flashwright bench`: our kernels beside the libraries on this machine's GPU."""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flashwright.cli.command import FINE, INTERRUPTED, WRONG, find_gpu, guarded
from flashwright.lang.diagnostic import Diagnostic, Failed

if TYPE_CHECKING:
    from rich.table import Table

    from flashwright.build.driver import Card
    from flashwright.measure.bench import Measured
    from flashwright.measure.grid import Cell


class Mask(StrEnum):
    """Which part of the grid."""

    FULL = "full"
    CAUSAL = "causal"
    BOTH = "both"


class Layout(StrEnum):
    """How Q, K and V lie in memory."""

    BSHD = "bshd"
    BHSD = "bhsd"


def register(app: typer.Typer) -> None:
    """Put the command on the command line."""
    app.command(rich_help_panel="On the GPU")(bench)


@guarded
def bench(
    as_gpu: Annotated[
        str | None,
        typer.Option(
            "--as", metavar="NAME", help="Translate for this GPU, compile for the card at hand."
        ),
    ] = None,
    variant: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Only this one; repeatable.")
    ] = None,
    head_dim: Annotated[
        list[int] | None, typer.Option(metavar="N", help="Only this one; repeatable.")
    ] = None,
    length: Annotated[
        list[int] | None, typer.Option(metavar="N", min=1, help="Only this one; repeatable.")
    ] = None,
    mask: Annotated[Mask, typer.Option(help="Which masks.")] = Mask.BOTH,
    layout: Annotated[Layout, typer.Option(help="Order of the tensors in memory.")] = Layout.BSHD,
    jobs: Annotated[
        int, typer.Option(metavar="N", min=0, help="Compilers at a time; default one per core.")
    ] = 0,
    out: Annotated[
        Path, typer.Option(metavar="FILE", help="Where the figures go, as JSON.")
    ] = Path("out/bench.json"),
) -> int:
    """Measure the paper's grid: 16k tokens, hidden 2048, beside torch's backends, in one run."""
    from flashwright.build import driver
    from flashwright.cli import show
    from flashwright.judge.gpu import need_torch
    from flashwright.measure import bench as measuring
    from flashwright.measure import kernels

    card = driver.cards()[0]
    need_torch()
    gpu = find_gpu(as_gpu or card.name).name
    cells = _cells(variant, head_dim, length, mask)
    with show.progress(f"compiling for {gpu}") as step:
        made = {m.spec: m for m in kernels.make_all((c.spec for c in cells), gpu, card, step, jobs)}
    measured: list[Measured] = []
    complete = True
    with show.progress("measuring") as step:

        def done(one: Measured) -> None:
            measured.append(one)
            step(len(measured), len(cells), one.cell.name)
            _write(out, card, gpu, measured)  # after each: an interruption loses no figure

        try:
            measuring.bench(cells, made, layout=layout.value, done=done)
        except KeyboardInterrupt:
            complete = False
    _show(card, gpu, measured)
    print(f"{out}: {len(measured)} of {len(cells)} cells")
    if not complete:
        return INTERRUPTED
    return FINE if all(measuring.OURS in m.timings for m in measured) else WRONG


def _cells(
    variants: Sequence[str] | None,
    head_dims: Sequence[int] | None,
    lengths: Sequence[int] | None,
    mask: Mask,
) -> list[Cell]:
    from flashwright.author.builtin.variants import UnknownVariant
    from flashwright.measure import grid
    from flashwright.spec import BadSpec

    masks = {Mask.FULL: [False], Mask.CAUSAL: [True], Mask.BOTH: [False, True]}[mask]
    try:
        return list(
            grid.cells(
                variants or grid.VARIANTS,
                head_dims or grid.HEAD_DIMS,
                lengths or grid.LENGTHS,
                masks,
            )
        )
    except UnknownVariant as error:
        raise Failed(Diagnostic("FW902", str(error), help="see `flashwright variants`")) from None
    except BadSpec as error:
        raise Failed(*(Diagnostic("FW901", line) for line in error.lines)) from None


def _write(path: Path, card: Card, gpu: str, measured: Sequence[Measured]) -> None:
    from flashwright import __version__
    from flashwright.files import write
    from flashwright.measure.bench import record

    told = {
        "flashwright": __version__,
        "card": card.name,
        "arch": card.arch,
        "translated_for": gpu,
        "torch": _torch_version(),
        "cells": [record(one) for one in measured],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, json.dumps(told, indent=1) + "\n")


def _torch_version() -> str:
    import torch

    return f"{torch.__version__}, CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"


def _show(card: Card, gpu: str, measured: Sequence[Measured]) -> None:
    from flashwright.cli import show
    from flashwright.measure.bench import OURS, summarise
    from flashwright.measure.peers import PEERS

    out = show.console()
    out.print(f"On {card.name}, translated for {gpu}; TFLOPS, a causal cell counted as half")
    out.print(table(measured))
    for name in (OURS, *(p.name for p in PEERS)):
        reasons = {m.reasons[name]: m.cell.name for m in measured if name in m.reasons}
        for reason, where in reasons.items():
            out.print(f"  {name} at {where}: {reason}")
    for peer in PEERS:
        found = summarise(measured, peer.name)
        if found is not None:
            out.print(
                f"against {found.peer}: geometric mean {found.mean:.3f} over {found.cells} cells, "
                f"worst {found.worst:.3f} ({found.where})"
            )


def table(measured: Sequence[Measured]) -> Table:
    """A row for each cell: our rate, the peers', and ours relative to the first peer."""
    from flashwright.cli import show
    from flashwright.measure.bench import OURS
    from flashwright.measure.grid import kernel_name
    from flashwright.measure.peers import PEERS, YARDSTICK

    numbers = ("length", "ours", *(p.name for p in PEERS), "ratio", "spread")
    shown = show.table("kernel", *numbers, right=numbers)
    before = ""
    for one in measured:
        name = kernel_name(one.cell.spec)
        rates = [one.tflops(n) for n in (OURS, *(p.name for p in PEERS))]
        ratio, ours = one.ratio(YARDSTICK), one.timings.get(OURS)
        shown.add_row(
            "" if name == before else name,
            str(one.cell.length),
            *("-" if rate is None else f"{rate:.0f}" for rate in rates),
            "-" if ratio is None else f"{ratio:.2f}",
            "-" if ours is None else f"{ours.spread:.1%}",
        )
        before = name
    return shown
