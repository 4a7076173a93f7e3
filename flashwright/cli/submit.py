"""`flashwright submit`: takes a program that somebody wrote through the stages of `generate`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flashwright.cli.asked import Request, with_reference
from flashwright.cli.command import (
    AllowSpills,
    find_gpu,
    flag,
    guarded,
    load_spec,
    read_source,
    shown_name,
)
from flashwright.cli.generate import RunSettings, Until, code_of, make
from flashwright.lang.diagnostic import Diagnostic, Failed

if TYPE_CHECKING:
    from flashwright.generate.by_model.ask import Authors
    from flashwright.generate.state import Run
    from flashwright.gpu import Gpu


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command(rich_help_panel="Make")(submit)


@guarded
def submit(
    file: Annotated[str, typer.Argument(metavar="FILE", help="TL code.")],
    gpu: Annotated[str, typer.Option(metavar="NAME", help="See `flashwright gpus`.")],
    spec: Annotated[
        str | None,
        typer.Option(metavar="SPEC", help="A TOML file, or inline: 'causal, head_dim=64'."),
    ] = None,
    author: Annotated[
        str, typer.Option(metavar="NAME", help="Who wrote it, for the record.")
    ] = "unnamed",
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Output folder; default out/SPEC-GPU.")
    ] = None,
    all_problems: Annotated[
        bool, flag("--all-problems", help="Emulate all problems, not only the first few.")
    ] = False,
    allow_spills: AllowSpills = 0,
    as_json: Annotated[bool, flag("--json", help="Print what was shown as JSON.")] = False,
) -> int:
    """Judge a program as `generate` judges a model's: the same stages, package and record.

    The spec is --spec, else the TOML file of FILE's own name, else spec.toml beside it. After a
    wrong program the next one goes on with the same record.
    """
    from flashwright.generate.folder import held
    from flashwright.generate.pipeline import WITHOUT_SKETCH

    card, source = find_gpu(gpu), read_source(file)
    request = _request(file, spec)
    folder = out or Path("out", f"{request.spec.slug}-{card.name}")
    settings = RunSettings(Until.VERDICT, allow_spills, all_problems, quiet=as_json)
    authors = _authors(author, source, folder, request)
    with held(folder):
        _refuse_another(authors, request, card, folder)
        authors.begin(request.spec, card)
        run = make(request, card, folder, settings, authors, WITHOUT_SKETCH)
    if as_json:
        print(json.dumps(_record(run, folder), indent=2))
    return code_of(run)


def _request(file: str, option: str | None) -> Request:
    found = load_spec(option, file)
    if found is None:
        text = f"nothing says what {shown_name(file)} should compute"
        hint = f"write {Path(file).with_suffix('.toml')} (docs/language.md), or give --spec"
        raise Failed(Diagnostic("FW857", text, help=hint))
    meant, base = found
    alone = Request(meant.model_copy(update={"reference": None}), meant.variant)
    return with_reference(alone, str(base / meant.reference)) if meant.reference else alone


def _authors(name: str, source: str, folder: Path, request: Request) -> Authors:
    """The author of the code. Earlier attempts come from the record."""
    from flashwright.author.llm.budget import Budget
    from flashwright.author.llm.submitted import Submission
    from flashwright.author.llm.transcript import FOLDER, Transcript
    from flashwright.generate.by_model.ask import Authors, StageAuthor

    who, transcript = f"submitted by {name}", Transcript(folder / FOLDER)
    # One more than there will be: a wrong program ends the run in the words of Submission.
    budget = Budget(attempts=len(transcript.attempts()) + 2)
    author = StageAuthor(Submission(who, source), who, budget, is_answered=True)
    function = (request.reference or b"").decode("utf-8", "replace")
    return Authors(transcript, {"code": author}, reference=function)


def _refuse_another(authors: Authors, request: Request, card: Gpu, folder: Path) -> None:
    """Refuse to replace the kernel of another operator, GPU or author."""
    from flashwright.generate.folder import finished

    if finished(folder) and authors.known(request.spec, card) in ("nothing", "another"):
        why = f"{folder} has another finished kernel: give another folder"
        raise typer.BadParameter(why, param_hint="--out")


def _record(run: Run, folder: Path) -> dict[str, Any]:
    """What the run has shown; result.json in the folder has all of it."""
    from flashwright.generate.pipeline import claimed, not_claimed

    reached, judged = run.unreached is None, run.gpu_verdict or run.emulated
    return {
        "ok": run.ok and reached,
        "folder": str(folder),
        "verdict": run.headline if run.ok and reached else "not right",
        "attempts": sum(run.asked.get("code", {}).get("attempts", ())),
        "stages": {timing.stage: timing.status for timing in run.timings},
        "claimed": claimed(run),
        "not_claimed": not_claimed(run),
        "notes": list(judged.notes) if judged else [],
    }
