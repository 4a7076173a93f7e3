"""`flashwright verify`: a kernel package on this machine's GPU, beside attention in fp64."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flashwright.cli.command import FINE, WRONG, exit_code, guarded, load_spec, tell
from flashwright.lang.diagnostic import Diagnostic, Failed

if TYPE_CHECKING:
    from rich.table import Table

    from flashwright.judge.gpu import GpuVerdict
    from flashwright.spec import AttentionSpec

CODE = "code.tl"


def register(app: typer.Typer) -> None:
    """Put the command on the command line."""
    app.command(rich_help_panel="On the GPU")(verify)


@guarded
def verify(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="A kernel package: generate or build makes it.")
    ],
    q_len: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="One problem only: its queries.")
    ] = None,
    kv_len: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Its keys; default as many.")
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Of the random inputs.")] = 0,
    as_json: Annotated[
        bool, typer.Option("--json", metavar=" ", help="Print the verdict as JSON.")
    ] = False,
) -> int:
    """Run a kernel on this machine's GPU and compare it with attention in fp64."""
    from flashwright.cli import show
    from flashwright.judge import gpu as judge

    spec = _spec(folder)
    lengths = None
    if q_len is not None or kv_len is not None:
        lengths = [(q_len or kv_len or 1, kv_len or q_len or 1)]
    with show.progress(f"running {folder}") as step:
        found = judge.verdict(folder, spec, lengths=lengths, seed=seed, progress=step)
    if as_json:
        print(json.dumps({"folder": str(folder), **found.record()}, indent=2))
    else:
        out = show.console()
        out.print(f"{folder} on {found.card} ({found.arch}): {show.spec_in_words(spec)}")
        out.print(table(found))
        if found.diagnostics:
            tell(found.diagnostics, str(folder), "")
        else:
            out.print(in_words(found))
    return FINE if found.ok else max(WRONG, exit_code(found.diagnostics))


def _spec(folder: Path) -> AttentionSpec:
    if not folder.is_dir():
        text = f"{folder} is no kernel package: it is not a folder"
        hint = "make one: flashwright generate gqa --gpu a100 --causal --out DIR"
        raise Failed(Diagnostic("FW852", text, help=hint))
    found = load_spec(None, str(folder / CODE))
    if found is None:
        text = f"{folder} has no spec.toml: nothing says what the kernel should compute"
        raise Failed(Diagnostic("FW852", text, help="put a spec beside it (docs/language.md)"))
    return found[0]


def table(found: GpuVerdict) -> Table:
    """Each problem, how far each output is from fp64, and the library's error beside it."""
    from rich.text import Text

    from flashwright.cli import show

    sizes = ("q_len", "kv_len", "batch", "heads", "kv heads")
    errors = ("rms error", "max error", "to flash")
    shown = show.table(*sizes, "output", *errors, "verdict", right=(*sizes, *errors))
    before: object = None
    for case in found.cases:
        result, dims = case.comparison, case.dims
        row = ["" if dims is before else str(dims.get(n.replace(" ", "_"), "")) for n in sizes]
        before = dims
        good, bad = Text("agrees", "green"), Text(result.reason, "bold red")
        row += [case.output, f"{result.relative_rms:.1e}", f"{result.relative_max:.1e}"]
        row.append(f"{case.ratio:.2f}x" if case.ratio is not None else "")
        shown.add_row(*row, good if result.ok else bad)
    return shown


def in_words(found: GpuVerdict) -> str:
    """The line under the table of a kernel that is right."""
    line = f"agrees with fp64; the largest rms error of O is {found.worst:.1e}"
    if found.worst_ratio is not None:
        return f"{line}, at most {found.worst_ratio:.2f} times that of torch's flash backend"
    return f"{line}; {found.unable}" if found.unable else line
