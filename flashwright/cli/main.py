"""The command `flashwright`. Exit codes: 0 fine, 1 the program is wrong, 2 bad input or usage.

Start-up matters, so this file imports nothing heavy at the top: each command imports what it uses.
"""

from __future__ import annotations

import difflib
import gc
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flashwright.cli import (
    bench,
    emulate,
    emulate_program,
    explain_mod,
    export,
    fuzz,
    generate,
    grad,
    grammar,
    kernel,
    lsp,
    mcp,
    receipt,
    replay,
    report,
    rewrite,
    selftest,
    study,
    submit,
    tune,
    verify,
    warm,
)
from flashwright.cli.command import (
    FINE,
    WRONG,
    blaming,
    exit_code,
    find_gpu,
    flag,
    guarded,
    messages_as_json,
    own_dims,
    read_source,
    show_diagnostics,
    shown_name,
    write_source,
)
from flashwright.lang.codes import CODES, page_of
from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.version import __version__

if TYPE_CHECKING:
    from flashwright.check.check import Checked
    from flashwright.gpu import Gpu
    from flashwright.program.program import Program

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Attention kernels, written in TL first: checked, run on the CPU, compiled, judged.",
)


class CheckFormat(StrEnum):
    """Output formats of `check`."""

    TEXT = "text"
    JSON = "json"
    MODEL = "model"


class RunFormat(StrEnum):
    """Output formats of `run`."""

    TEXT = "text"
    JSON = "json"


def size(**settings: Any) -> Any:
    """An option for a size of the problem, up to what a CPU run can do."""
    return typer.Option(metavar="N", min=1, max=1 << 17, show_default=False, **settings)


File = Annotated[str, typer.Argument(metavar="FILE", help="A TL program; - reads stdin.")]


def _version(wanted: bool) -> None:
    if wanted:
        print(f"flashwright {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        flag("--version", callback=_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    pass


# --- check and fmt ----------------------------------------------------------------------------


@app.command(rich_help_panel="Work on TL")
@guarded
def check(
    file: File,
    gpu: Annotated[
        str | None, typer.Option(metavar="NAME", help="Also against this GPU's budgets.")
    ] = None,
    fix: Annotated[bool, flag("--fix", help="Apply the fixes, then check again.")] = False,
    format: Annotated[CheckFormat, typer.Option(help="Output format.")] = CheckFormat.TEXT,
) -> int:
    """Check a sketch or code: what is wrong, where, and how to fix it."""
    card = find_gpu(gpu) if gpu is not None else None
    try:
        source = read_source(file)
    except Failed as failed:
        return _report(failed.diagnostics, "", file, format)
    diagnostics, verdict = _checked(source, card, file)
    if fix:
        source, diagnostics, verdict = _fixed(file, source, diagnostics, verdict, card)
    translation = (
        _translation_summary(verdict, source, card)
        if verdict is not None and card is not None
        else _TranslationSummary()
    )
    return _report(
        diagnostics, source, file, format, verdict, card, fixed=fix, translation=translation
    )


@dataclass(frozen=True)
class _TranslationSummary:
    """The schedule of a program on a GPU in one line, and notes on missed optimizations."""

    line: str = ""
    notes: Sequence[Diagnostic] = ()


def _translation_summary(verdict: Checked, source: str, card: Gpu) -> _TranslationSummary:
    """Translate a correct program for its summary; empty for a sketch or a program with errors."""
    from flashwright.lower.report import notes
    from flashwright.lower.translate import translate

    lines: list[str] = []
    told: list[Diagnostic] = []
    for program in verdict.kernels:
        name = card.name if len(verdict.kernels) == 1 else f"{card.name}, {_line_of(program)}"
        try:
            report = translate(program, card).report
        except Failed as failed:
            found = failed.diagnostics[0]
            where = f"line {found.span.line}: " if found.span else ""
            lines.append(f"{name}: no translation: {where}{found.message} ({found.code})")
            continue
        assert report is not None
        told += notes(report, source, program.tree)
        lines.append(f"{name}: {report.in_words()}")
    return _TranslationSummary("\n".join(lines), told)


def _line_of(program: Program) -> str:
    return f"kernel at line {program.grid.span.line}"


def _checked(
    source: str, card: Gpu | None, file: str
) -> tuple[Sequence[Diagnostic], Checked | None]:
    from flashwright.check.check import check as run_check
    from flashwright.lang.parse import parse

    try:
        tree = parse(source)
        verdict = run_check(tree, card, own_dims(tree, None, file))
    except Failed as failed:
        return failed.diagnostics, None
    return verdict.diagnostics, verdict


def _fixed(
    file: str,
    source: str,
    diagnostics: Sequence[Diagnostic],
    verdict: Checked | None,
    card: Gpu | None,
) -> tuple[str, Sequence[Diagnostic], Checked | None]:
    """Apply fixes until none is left. Returns the new text and its remaining diagnostics."""
    from flashwright.lang.fix import apply_all

    def check(text: str) -> Sequence[Diagnostic]:
        nonlocal diagnostics, verdict
        diagnostics, verdict = _checked(text, card, file)
        return diagnostics

    mended, total = apply_all(source, diagnostics, check)
    if file == "-":
        print(mended, end="")
    elif mended != source:
        write_source(file, mended)
    print(f"{shown_name(file)}: {total} fix{'' if total == 1 else 'es'} applied", file=sys.stderr)
    return mended, diagnostics, verdict


def _report(
    diagnostics: Sequence[Diagnostic],
    source: str,
    file: str,
    format: CheckFormat,
    verdict: Checked | None = None,
    card: Gpu | None = None,
    fixed: bool = False,
    translation: _TranslationSummary | None = None,
) -> int:
    from flashwright.lang import render

    translation = translation or _TranslationSummary()
    told = [*diagnostics, *translation.notes]

    # The fixed text of stdin goes to stdout, so the messages go to stderr.
    stream = sys.stderr if fixed and file == "-" else sys.stdout
    name = shown_name(file)
    if format is CheckFormat.JSON:
        print(render.as_json(told, name), file=stream)
    elif format is CheckFormat.MODEL:
        print(render.for_model(told, source), end="", file=stream)
    else:
        show_diagnostics(told, name, source, stream)
        if told and not messages_as_json():
            print(file=stream)
        print(_summary(diagnostics, name, verdict, card), file=stream)
        if translation.line:
            print(translation.line, file=stream)
    return exit_code(diagnostics)


def _summary(
    diagnostics: Sequence[Diagnostic], name: str, verdict: Checked | None, card: Gpu | None
) -> str:
    from flashwright.lang import render

    if verdict is None or not verdict.ok:
        return f"{name}: {render.summary(diagnostics)}"
    count = render.summary(diagnostics) if diagnostics else "0 errors, 0 warnings"
    line = f"{name}: {verdict.level}, {'passes' if diagnostics else 'clean'}: {count}"
    several = len(verdict.kernels) > 1
    line += f"; {len(verdict.kernels)} kernels" if several else ""
    for program in verdict.kernels if card is not None else ():
        from flashwright.check.budget import in_words as budget_in_words

        assert card is not None
        line += f"\n{_line_of(program)}: " if several else "; "
        line += f"{budget_in_words(program, card)} on {card.title}"
    return line


@app.command(rich_help_panel="Work on TL")
@guarded
def fmt(
    file: File,
    check: Annotated[
        bool, flag("--check", help="Change nothing; exit 1 if a change is needed.")
    ] = False,
    stdout: Annotated[bool, flag("--stdout", help="Print, write nothing.")] = False,
) -> int:
    """Format a program in the canonical form."""
    from flashwright.lang.format import format_tree
    from flashwright.lang.parse import parse

    with blaming(shown_name(file)):
        source = read_source(file)
    with blaming(shown_name(file), source):
        text = format_tree(parse(source))
    if check:
        same = text == source
        print(f"{shown_name(file)}: {'is formatted' if same else 'would be changed'}")
        return FINE if same else WRONG
    if stdout or file == "-":
        print(text, end="")
    elif text != source:
        write_source(file, text)
        print(f"{file}: formatted")
    else:
        print(f"{file}: unchanged")
    return FINE


# --- run --------------------------------------------------------------------------------------


@app.command(rich_help_panel="Work on TL")
@guarded
def run(
    file: File,
    spec: Annotated[
        str | None,
        typer.Option(metavar="SPEC", help="A TOML file, or inline: 'causal, head_dim=64'."),
    ] = None,
    q_len: Annotated[int | None, size(help="Queries.")] = None,
    kv_len: Annotated[int | None, size(help="Keys; default as many as queries.")] = None,
    batch: Annotated[int | None, size(help="Sequences.")] = None,
    heads: Annotated[int | None, size(help="Query heads.")] = None,
    kv_heads: Annotated[int | None, size(help="Heads of K and V.")] = None,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Of the random inputs.")] = 0,
    format: Annotated[RunFormat, typer.Option(help="Output format.")] = RunFormat.TEXT,
) -> int:
    """Run code on the CPU and compare it with attention in fp64.

    The spec is --spec, else the TOML file of FILE's own name, else spec.toml beside it.
    """
    from flashwright.cli import run as on_cpu

    given = [("q_len", q_len), ("kv_len", kv_len), ("batch", batch)]
    given += [("heads", heads), ("kv_heads", kv_heads)]
    sizes = {name: size for name, size in given if size is not None}
    return on_cpu.run(on_cpu.RunOptions(file, sizes, seed, format is RunFormat.JSON), spec)


# --- lists and explanations -------------------------------------------------------------------


@app.command(rich_help_panel="Look up")
@guarded
def explain(
    code: Annotated[
        str | None, typer.Argument(metavar="[CODE]", help="Such as FW301; without it, all codes.")
    ] = None,
) -> int:
    """Explain a diagnostic, with a wrong and a right example."""
    from flashwright.cli import show

    out = show.console()
    if code is None:
        out.print(show.pairs_table(("code", "means"), ((c, e.title) for c, e in CODES.items())))
        return FINE
    known = _code(code)
    out.print(show.markdown(page_of(known).read_text(encoding="utf-8")))
    return FINE


def _code(given: str) -> str:
    """The code in its full form: `fw301` and `301` are FW301."""
    text = given.strip().upper()
    known = text if text.startswith("FW") else f"FW{text}"
    if known in CODES:
        return known
    said = [c for c, entry in CODES.items() if given.strip() and text in entry.title.upper()]
    near = said[:3] or difflib.get_close_matches(known.replace("O", "0"), CODES, 1, 0.5)
    guess = " or ".join(f"{c} ({CODES[c].title})" for c in near)
    hint = f"did you mean {guess}?" if near else "`flashwright explain` lists them"
    raise typer.BadParameter(f"there is no code {given!r}: {hint}", param_hint="CODE")


@app.command(rich_help_panel="Look up")
@guarded
def variants() -> int:
    """List the variants that the built-in author writes."""
    from flashwright.author.builtin.variants import OTHERS, VARIANTS
    from flashwright.cli import show

    rows = ((v.name, v.summary) for v in (VARIANTS | OTHERS).values())
    show.console().print(show.pairs_table(("variant", "what it is"), rows))
    return FINE


@app.command(rich_help_panel="Look up")
@guarded
def gpus() -> int:
    """List the GPUs that Flashwright knows."""
    from flashwright.cli import show
    from flashwright.gpu import GPUS

    show.console().print(show.gpus_table(GPUS.values()))
    return FINE


for part in (
    *(
        generate,
        submit,
        kernel,
        grad,
        rewrite,
        replay,
        emulate,
        emulate_program,
        verify,
        selftest,
        bench,
        tune,
    ),
    *(receipt, report, export, lsp, mcp, warm, study, fuzz, grammar, explain_mod),
):
    part.register(app)


def main() -> None:
    """Run the command line; `flashwright.__main__` is the entry point."""
    # A short process makes little garbage; collecting it costs 5 % of a check.
    gc.set_threshold(100_000, 50, 50)
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure:
            reconfigure(errors="replace")  # a terminal that lacks a character shows a ?
    app()
