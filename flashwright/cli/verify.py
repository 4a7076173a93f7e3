"""`flashwright verify`: the judge's verdict on a kernel package, a callable or a shared library."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flashwright.cli.command import FINE, WRONG, exit_code, guarded, load_spec, tell
from flashwright.lang.diagnostic import Diagnostic, Failed

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from flashwright.judge.verdict import Offence, Verdict
    from flashwright.sandbox.candidate import Candidate
    from flashwright.sandbox.limits import Limits
    from flashwright.spec import AttentionSpec

CODE = "code.tl"
GB = 1 << 30


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command(rich_help_panel="On the GPU")(verify)


@guarded
def verify(
    what: Annotated[
        str,
        typer.Argument(
            metavar="WHAT", help="A kernel package, file.py:function, or library.so:function."
        ),
    ],
    spec: Annotated[
        str | None,
        typer.Option(metavar="TOML|TEXT", help="What it should compute; a package has its own."),
    ] = None,
    q_len: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="One problem only: its queries.")
    ] = None,
    kv_len: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Its keys; default as many.")
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(metavar="N", min=0, help="Seed of shapes and inputs; default random."),
    ] = None,
    on: Annotated[
        str | None,
        typer.Option(metavar="gpu|cpu", help="A package on the CPU is emulated. Default: the GPU."),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(metavar="cuda|cpu", help="The device of a callable; --on works too."),
    ] = None,
    libraries: Annotated[
        bool, typer.Option("--libraries", metavar=" ", help="It may call torch, cuDNN and others.")
    ] = False,
    sanitize: Annotated[
        bool, typer.Option("--sanitize", metavar=" ", help="Also under compute-sanitizer.")
    ] = False,
    seconds: Annotated[
        float, typer.Option(metavar="S", min=0.1, help="Time limit of one call.")
    ] = 60.0,
    memory: Annotated[
        float, typer.Option(metavar="GB", min=0.1, help="Limit of host memory.")
    ] = 24.0,
    gpu_memory: Annotated[
        float | None,
        typer.Option(metavar="GB", min=0.1, help="Limit of GPU memory; default nearly all."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", metavar=" ", help="Print the verdict as JSON.")
    ] = False,
) -> int:
    """Judge a kernel: compare it with fp64 on random shapes, detect cheating and side effects."""
    from flashwright.cli import show
    from flashwright.judge.judge import judge
    from flashwright.sandbox.candidate import Candidate
    from flashwright.sandbox.limits import Limits

    device = _device(on, device)
    candidate = Candidate.parse(what)
    meant, base = _spec(candidate, what, spec)
    notes: tuple[str, ...] = ()
    if own := spec is None and candidate.kind == "package":
        meant, notes = _own_spec(meant)
    lengths = None
    if q_len is not None or kv_len is not None:
        lengths = [(q_len or kv_len or 1, kv_len or q_len or 1)]
    most = None if gpu_memory is None else int(gpu_memory * GB)
    limits = Limits(seconds=seconds, memory=int(memory * GB), gpu_memory=most)
    with show.progress(f"judging {what}") as step, _offering(candidate, what):
        if candidate.kind == "package" and on == "cpu":
            found = _emulated(what, meant, base, seed, lengths, limits, step)
        else:
            found = judge(
                candidate,
                meant,
                seed=seed,
                device=device,
                base=base,
                lengths=lengths,
                limits=limits,
                libraries=libraries,
                progress=step,
            )
    found = replace(found, own_spec=own, notes=(*found.notes, *notes))
    unsafe = _sanitized(candidate, meant, base, what) if sanitize else ()
    if as_json:
        more = [{"name": o.name, "message": o.message} for o in unsafe]
        told = {"sanitizer": more} if sanitize else {}
        print(json.dumps({**found.record(), **told}, indent=2))
    else:
        _show(what, found, meant, sanitize, unsafe)
    bad = (*found.diagnostics, *(o.diagnostic for o in unsafe))
    return max(WRONG, exit_code(bad)) if bad else FINE


def _device(on: str | None, device: str | None) -> str | None:
    if on not in (None, "gpu", "cpu"):
        raise typer.BadParameter("gpu or cpu", param_hint="--on")
    if device not in (None, "cuda", "cpu"):
        raise typer.BadParameter("cuda or cpu", param_hint="--device")
    meant = {"gpu": "cuda", "cpu": "cpu"}.get(on or "", device)
    if device is not None and meant != device:
        raise typer.BadParameter(f"--device is {device}", param_hint="--on")
    return meant


@contextmanager
def _offering(candidate: Candidate, what: str) -> Iterator[None]:
    """Suggests the emulator if a package cannot run without a GPU."""
    try:
        yield
    except Failed as failed:
        if candidate.kind != "package" or any(d.code != "FW851" for d in failed.diagnostics):
            raise
        offer = f"without a GPU, judge it under emulation: flashwright verify {what} --on cpu"
        raise Failed(*(replace(d, help=offer) for d in failed.diagnostics)) from None


def _emulated(
    what: str,
    spec: AttentionSpec,
    base: Path,
    seed: int | None,
    lengths: list[tuple[int, int]] | None,
    limits: Limits,
    step: Callable[[int, int, str], None],
) -> Verdict:
    from flashwright.judge.emulated import judge_emulated

    return judge_emulated(
        what, spec, seed=seed, base=base, lengths=lengths, limits=limits, progress=step
    )


def _sanitized(
    candidate: Candidate, spec: AttentionSpec, base: Path, what: str
) -> tuple[Offence, ...]:
    from flashwright.cli import show
    from flashwright.judge.sanitize import sanitize

    with show.progress(f"compute-sanitizer on {what}") as step:
        return sanitize(candidate, spec, base=base, progress=step)


def _spec(candidate: Candidate, what: str, option: str | None) -> tuple[AttentionSpec, Path]:
    """The spec of the candidate, and the folder that its reference is relative to."""
    beside = str(Path(what, CODE)) if candidate.kind == "package" else "-"
    found = load_spec(option, beside)
    if found is not None:
        return found
    if candidate.kind == "package":
        text = f"{what} has no spec.toml: nothing says what the kernel should compute"
        raise Failed(Diagnostic("FW852", text, help="put a spec beside it (docs/language.md)"))
    text = f"nothing says what {what} should compute"
    hint = "--spec 'causal, heads=32, kv_heads=8, head_dim=128, dtype=bf16', or a TOML file"
    raise Failed(Diagnostic("FW857", text, help=hint))


def _own_spec(spec: AttentionSpec) -> tuple[AttentionSpec, tuple[str, ...]]:
    """A package's own spec with the default tolerances, and notes on what was ignored or run."""
    from flashwright.judge.own_spec import strict

    notes = ["judged by the package's own spec.toml: --spec gives yours"]
    if spec.reference:
        notes.append(
            f"the expected outputs come from the package's own {spec.reference}, run confined"
        )
    spec, more = strict(spec)
    return spec, (*notes, *more)


def _show(
    what: str, found: Verdict, spec: AttentionSpec, sanitized: bool, unsafe: tuple[Offence, ...]
) -> None:
    from flashwright.cli import show

    out = show.console()
    out.print(f"{what} on {found.where}: {spec.in_words}")
    out.print(table(found))
    for line in in_words(found):
        out.print(line)
    if sanitized and not unsafe:
        out.print("compute-sanitizer finds no bad access, no race and no uninitialised read")
    wrong = (*found.diagnostics, *(o.diagnostic for o in unsafe))
    if wrong:
        code = Path(what, CODE)
        source = code.read_text(errors="replace") if code.is_file() else ""
        tell(wrong, str(code) if any(d.span for d in wrong) else what, source)


def table(found: Verdict) -> Table:
    """Each problem, how far each output is from fp64, and the library's error beside it."""
    from rich.text import Text

    from flashwright.cli import show

    second = "max error" if found.of_limit is None else "of its limit"
    errors = ("rms error", second, "to flash")
    shown = show.table(
        "queries x keys", "batch x heads", "inputs", "output", *errors, "", right=errors
    )
    before: object = None
    for case in found.cases:
        result, dims, new = case.comparison, case.dims, case.dims is not before
        before = dims
        heads = f"{dims.get('batch', 1)} x {dims.get('heads', 1)}/{dims.get('kv_heads', 1)}"
        row = [f"{dims['q_len']} x {dims['kv_len']}", heads, case.kind] if new else ["", "", ""]
        row += [case.output, *show.errors(result)]
        row.append(f"{case.ratio:.2f}x" if case.ratio is not None else "")
        shown.add_row(*row, Text("agrees", "green") if result.ok else Text("wrong", "bold red"))
    return shown


def in_words(found: Verdict) -> list[RenderableType]:
    """The lines under the table: checks, notes and the headline."""
    from rich.text import Text

    from flashwright.cli import show

    lines: list[RenderableType] = []
    for check in found.checks:
        if check.passed is None:
            lines.append(Text(f"  - {check.question}: not checked ({check.note})", "bright_black"))
        else:
            mark, style = ("✓", "green") if check.passed else ("✗", "bold red")
            times = f" ({check.tried} times)" if check.tried > 1 else ""
            lines.append(Text(f"  {mark} {check.question}{times}", style))
    lines += [Text(f"  note: {note}", "bright_black") for note in found.notes]
    lines += show.not_reached(found.unreached)
    lines.append(Text(found.headline, "bold green" if found.ok else "bold red"))
    return lines
