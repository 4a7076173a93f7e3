"""`flashwright export`: a kernel package in the form that others load."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from flashwright.cli.command import FINE, guarded


class ExportForm(StrEnum):
    """The forms of `export`."""

    HUB = "hub"
    FLASHINFER = "flashinfer"
    HEADER = "header"
    KERNELBENCH = "kernelbench"
    ROBUST_KBENCH = "robust-kbench"


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command(rich_help_panel="Make")(export)


@guarded
def export(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A kernel package.")],
    form: Annotated[ExportForm, typer.Option("--as", help="The form.", show_default=False)],
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="OUT", help="The folder to write; a new one.")
    ],
    kernel: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Of a package with several kernels, this one; . is its own."
        ),
    ] = None,
) -> int:
    """Export a kernel package: to the Hugging Face Hub, to benchmarks, or as C++ source.

    hub: a package of Hugging Face's `kernels`, with a function `attention`, which needs PyTorch and
    the CUDA driver only. flashinfer: a Definition and a Solution of FlashInfer-Bench. header:
    kernel.cu with its headers, the launch plan and a C++ program that launches it. kernelbench,
    robust-kbench: the submission for the task that `generate --from` read.
    """
    from flashwright.export import (
        flashinfer,
        header,
        hub,
        kernelbench,
        package,
        robust_kbench,
        write,
    )

    write.check_target(out)
    found = package.read(folder, kernel)
    made = {
        ExportForm.HUB: hub,
        ExportForm.FLASHINFER: flashinfer,
        ExportForm.HEADER: header,
        ExportForm.KERNELBENCH: kernelbench,
        ExportForm.ROBUST_KBENCH: robust_kbench,
    }[form]
    files = made.files(found)
    write.write(out, files)
    print(f"{out}: {len(files)} files; {found.title}; for {found.plan.arch}")
    print(f"  {made.summary(found, out)}")
    return FINE
