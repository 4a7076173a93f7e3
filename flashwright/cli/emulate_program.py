"""`flashwright emulate-program`: runs a CUDA program without a GPU, its kernels in the emulator."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from flashwright.cli.command import find_gpu, guarded

_SIGNAL = 128  # added to a signal's number for the exit status, as shells do


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    settings = {"ignore_unknown_options": True, "allow_interspersed_args": False}
    app.command(rich_help_panel="On the CPU", context_settings=settings)(emulate_program)


@guarded
def emulate_program(
    command: Annotated[
        list[str], typer.Argument(metavar="PROGRAM [ARGS]...", help="The program, behind `--`.")
    ],
    gpu: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The GPU it finds; default one that takes its kernels."),
    ] = None,
    sms: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="The number of SMs that it is told.")
    ] = None,
    schedule: Annotated[
        list[str] | None,
        typer.Option(
            metavar="eager|lazy|random:SEED|all",
            help="When asynchronous work is done. With several, the program runs several times.",
        ),
    ] = None,
) -> int:
    """Run a CUDA program on the CPU, with the hardware's rules checked while its kernels run.

    Exit code: 2 if a call or a kernel is not emulated, 1 if something was found, else that of the
    program.
    """
    from flashwright.cli import show
    from flashwright.cli.emulate import _schedules
    from flashwright.emulate.host_library import library_folder
    from flashwright.emulate.machine import library_file
    from flashwright.emulate.program import Options, run_program

    card = find_gpu(gpu) if gpu is not None else None
    several = _schedules(schedule or ["eager"], 0)
    with show.progress(f"emulating {command[0]}") as step:  # before the program has the terminal
        step(0, 2, "compiling the emulator itself, once")
        library_file()
        step(1, 2, "compiling its CUDA library, once")
        library_folder()
    statuses = []
    for one in several:
        status, report = run_program(command, Options(card, sms, one))
        shown = f" under schedule {one}" if len(several) > 1 else ""
        ended = f"; it ended with exit status {status}" if status > 0 else ""
        ended = f"; it was ended by signal {-status}" if status < 0 else ended
        print(f"flashwright: {command[0]}{shown}: {report}{ended}", file=sys.stderr)
        own = status if status >= 0 else _SIGNAL - status
        statuses.append(own if report.status is None else report.status)
    return max(statuses)
