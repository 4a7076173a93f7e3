"""`flashwright generate`: from the request for an attention operator to a kernel package."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flashwright.cli.asked import Request, read_request, request_of_task
from flashwright.cli.budget import (
    ATTEMPTS,
    MINUTES,
    MODELS,
    TOKENS,
    Attempts,
    BaseUrl,
    Dollars,
    Minutes,
    Price,
    ReplyTimeout,
    Tokens,
    model_option,
    read_budget,
    read_limits,
)
from flashwright.cli.command import (
    FINE,
    WRONG,
    AllowSpills,
    Dtype,
    KeyDtype,
    exit_code,
    find_gpu,
    flag,
    guarded,
    tell,
)

if TYPE_CHECKING:
    from flashwright.author.llm.budget import Budget, Prices
    from flashwright.author.llm.line import Limits
    from flashwright.generate.by_model.ask import Authors
    from flashwright.generate.by_model.speed import SpeedGoal
    from flashwright.generate.pipeline import Stage
    from flashwright.generate.state import Run
    from flashwright.gpu import Gpu

BUILTIN = "builtin"
_TL_ALONE = {"sketch": BUILTIN, "translate": BUILTIN}
"""Where a model writes the TL, and nothing else."""


class Until(StrEnum):
    """The stages of a run, as `--until` names them."""

    SKETCH = "sketch"
    CODE = "code"
    CHECK = "check"
    CPU = "cpu"
    TRANSLATE = "translate"
    BUILD = "build"
    VERDICT = "verdict"


STAGE_NAMES = {"parameters": "code"}
"""The names of stages for `--until`, where they differ from the names in the pipeline."""


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command(rich_help_panel="Make")(generate)


@guarded
def generate(
    gpu: Annotated[str, typer.Option(metavar="NAME", help="See `flashwright gpus`.")],
    variant: Annotated[
        str | None,
        typer.Argument(
            metavar="VARIANT",
            help="See `flashwright variants`; or plain English. With --reference: default mha.",
        ),
    ] = None,
    causal: Annotated[bool, flag("--causal", help="A query sees no later key.")] = False,
    window: Annotated[
        int | None, typer.Option(metavar="N", help="Sliding window, in positions.")
    ] = None,
    head_dim: Annotated[int | None, typer.Option(metavar="N", help="Columns of Q and K.")] = None,
    v_dim: Annotated[
        int | None, typer.Option(metavar="N", help="Columns of V and O, if different.")
    ] = None,
    heads: Annotated[int | None, typer.Option(metavar="N", help="Query heads.")] = None,
    kv_heads: Annotated[int | None, typer.Option(metavar="N", help="Heads of K and V.")] = None,
    dtype: Annotated[Dtype | None, typer.Option(help="Of Q, K, V and O.")] = None,
    kv_dtype: Annotated[
        KeyDtype | None, typer.Option(help="Of K and V beside a 16-bit Q, with scales.")
    ] = None,
    softcap: Annotated[
        float | None, typer.Option(metavar="X", help="s becomes X * tanh(s / X).")
    ] = None,
    alibi: Annotated[bool, flag("--alibi", help="Add ALiBi's slopes.")] = False,
    sink: Annotated[bool, flag("--sink", help="A sink logit for each head.")] = False,
    sink_tokens: Annotated[
        int | None, typer.Option(metavar="N", help="First keys that a window does not hide.")
    ] = None,
    no_lse: Annotated[bool, flag("--no-lse", help="Do not return log-sum-exp.")] = False,
    backward: Annotated[
        bool, flag("--backward", help="Its gradients: a program of several kernels.")
    ] = False,
    deterministic: Annotated[
        bool, flag("--deterministic", help="With --backward: the same bits in every run.")
    ] = False,
    packed: Annotated[
        bool, flag("--packed", help="Sequences of any lengths, behind each other.")
    ] = False,
    decode: Annotated[
        int | None,
        typer.Option(metavar="QUERIES", help="So few queries a sequence, over keys in a cache."),
    ] = None,
    cache: Annotated[
        bool, flag("--cache", help="Keys lie in a cache that has room for more.")
    ] = False,
    paged: Annotated[
        int | None, typer.Option(metavar="N", help="Keys lie in pages of N positions.")
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(metavar="FILE.py", help="A function that defines the right output."),
    ] = None,
    task_file: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="FILE",
            help="A task of KernelBench, robust-kbench or FlashInfer-Bench: docs/formats.md.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Output folder; default out/SPEC-GPU.")
    ] = None,
    until: Annotated[Until, typer.Option(help="The last stage to run.")] = Until.VERDICT,
    all_problems: Annotated[
        bool, flag("--all-problems", help="Emulate all problems, not only the first few.")
    ] = False,
    allow_spills: AllowSpills = 0,
    quiet: Annotated[bool, flag("--quiet", "-q", help="Print the verdict only.")] = False,
    model: Annotated[
        str | None, model_option(metavar="NAME", help="The model for all three stages below.")
    ] = None,
    sketch: Annotated[
        str | None, model_option(metavar="NAME", help="Author of the sketch: builtin, or a model.")
    ] = None,
    params: Annotated[
        str | None, model_option(metavar="NAME", help="Author of the sizes: builtin, or a model.")
    ] = None,
    translate: Annotated[
        str | None, model_option(metavar="NAME", help="Author of the CUDA: builtin, or a model.")
    ] = None,
    base_url: BaseUrl = None,
    candidates: Annotated[
        int,
        model_option(metavar="N", min=1, max=16, help="Per stage, in parallel; the best is kept."),
    ] = 1,
    attempts: Attempts = ATTEMPTS,
    tokens: Tokens = TOKENS,
    minutes: Minutes = MINUTES,
    reply_timeout: ReplyTimeout = None,
    dollars: Dollars = None,
    price: Price = None,
    improve: Annotated[
        int,
        model_option(metavar="N", min=0, max=100, help="Iterations that make it faster; on a GPU."),
    ] = 0,
    faster_than: Annotated[
        str | None,
        model_option(metavar="X[:PEER]", help="Times the built-in author's speed; needs a GPU."),
    ] = None,
    bounded_grammar: Annotated[
        bool,
        flag(
            "--bounded-grammar",
            rich_help_panel=MODELS,
            help="A grammar of finite length, for tiny models on llama.cpp or vLLM.",
        ),
    ] = False,
    fresh: Annotated[
        bool,
        flag(
            "--fresh",
            rich_help_panel=MODELS,
            help="Ignore the record of an earlier run in the folder.",
        ),
    ] = False,
) -> int:
    """Make an attention operator: TL sketch, sizes, check, CPU run, CUDA, cubin, verdict.

    A language model does the stages that name it; the built-in author does the others.
    Exits with 0 if the last stage was reached, 1 if not, 2 if the input is at fault.
    """
    if task_file is not None and (variant is not None or reference is not None):
        raise typer.BadParameter("the file says what to make: no VARIANT, no --reference")
    if variant is None and reference is None and task_file is None:
        raise typer.BadParameter("name a variant or describe the operator", param_hint="VARIANT")
    if improve and until is not Until.VERDICT:
        raise typer.BadParameter("--improve needs the whole run", param_hint="--until")
    if deterministic and not backward:
        raise typer.BadParameter("only with --backward", param_hint="--deterministic")
    _refuse_empty(
        {"--model": model, "--sketch": sketch, "--params": params, "--translate": translate}
    )
    named = {"sketch": sketch, "code": params, "translate": translate}
    names = {stage: name or model or BUILTIN for stage, name in named.items()}
    no_model = {
        "--sketch": sketch is not None,
        "--translate": translate is not None,
        "--improve": improve > 0,
        "--faster-than": faster_than is not None,
    }
    if backward:
        _refuse_beside_tl("with --backward", {**no_model, "--no-lse": no_lse})
        names |= _TL_ALONE
    if all(name == BUILTIN for name in names.values()):
        _refuse_without_model(
            {
                "--base-url": base_url is not None,
                "--reply-timeout": reply_timeout is not None,
                "--candidates": candidates > 1,
                "--bounded-grammar": bounded_grammar,
                "--fresh": fresh,
            }
        )
    options = {
        "causal": causal or None,
        "window": window,
        "head_dim": head_dim,
        "v_dim": v_dim,
        "heads": heads,
        "kv_heads": kv_heads,
        "dtype": dtype.value if dtype else None,
        "kv_dtype": kv_dtype.value if kv_dtype else None,
        "softcap": softcap,
        "alibi": alibi or None,
        "sink": sink or None,
        "sink_tokens": sink_tokens,
        "lse": False if no_lse else None,
        "backward": backward or None,
        "repeatable": deterministic or None,
        "packed": packed or None,
        "decode": decode,
        "cache": cache or None,
        "page": paged,
    }
    card = find_gpu(gpu)
    if task_file is not None:
        request = request_of_task(task_file, options)
    else:
        request = read_request(variant or "mha", options, reference)
    if request.spec.batch is not None:
        _refuse_beside_tl("for packed sequences, caches and decode", no_model)
        names |= _TL_ALONE
    name = request.task.name if request.task is not None else request.spec.slug
    folder = out or Path("out", f"{name}-{card.name}")
    budget = read_budget(attempts, tokens, minutes, dollars, price)
    speed = (improve, _goal(faster_than))
    limits = read_limits(reply_timeout, minutes)
    model_options = _ModelOptions(base_url, limits, candidates, *budget, bounded_grammar, *speed)
    authors = _authors(names, model_options, folder, request)
    settings = RunSettings(until, allow_spills, all_problems, quiet)
    if authors is None:
        _tell_replaced(request, card, folder)
        return _generate(request, card, folder, settings, None)
    if not fresh and _is_finished(authors, request, card, folder):
        print(f"{folder} is finished: --fresh starts again, --improve N makes it faster")
        return FINE
    from flashwright.generate.folder import held

    with held(folder):  # before the record of the models is touched
        authors.begin(request.spec, card, fresh=fresh)
        return _generate(request, card, folder, settings, authors)


@dataclass(frozen=True)
class RunSettings:
    """The options for how far a run goes and what it prints."""

    until: Until
    allow_spills: int
    all_problems: bool
    quiet: bool

    @property
    def last(self) -> str:
        """The last stage, by its name in the pipeline. A whole run ends with `improve`."""
        names = {option: name for name, option in STAGE_NAMES.items()}
        last = names.get(self.until.value, self.until.value)
        return "improve" if self.until is Until.VERDICT else last


def _tell_replaced(request: Request, card: Gpu, folder: Path) -> None:
    """Warn if the folder has another operator, or the operator for another GPU."""
    from flashwright.generate.folder import RESULT, finished
    from flashwright.spec import BadSpec, load

    if not finished(folder):
        return
    try:
        there, gpu = load(folder / "spec.toml"), json.loads((folder / RESULT).read_bytes())["gpu"]
    except (BadSpec, OSError, ValueError, KeyError):
        return
    if (there, gpu) != (request.spec, card.name):
        text = f"{folder} has another operator, which is replaced: {there.variant}, "
        print(f"{text}{there.in_words}, for {gpu}", file=sys.stderr)


def _refuse_empty(names: Mapping[str, str | None]) -> None:
    """Refuse an empty name of a model, as an unset shell variable gives."""
    for option, name in names.items():
        if name is not None and not name.strip():
            raise typer.BadParameter("is empty", param_hint=option)


def _refuse_beside_tl(what: str, given: Mapping[str, bool]) -> None:
    """Refuse options of what a model does not write where it writes the TL alone."""
    for option, is_given in given.items():
        if is_given:
            why = f"not {what}: a model writes the TL (--params), nothing else"
            raise typer.BadParameter(why, param_hint=option)


def _refuse_without_model(given: Mapping[str, bool]) -> None:
    """Refuse options of language models if no model is named."""
    for option, is_given in given.items():
        if is_given:
            raise typer.BadParameter("name a model: --model", param_hint=option)


@dataclass(frozen=True)
class _ModelOptions:
    """The options of the language models."""

    base_url: str | None
    limits: Limits
    candidates: int
    budget: Budget
    prices: Prices | None
    bounded: bool
    improve: int
    goal: SpeedGoal | None


def _authors(
    names: Mapping[str, str],
    options: _ModelOptions,
    folder: Path,
    request: Request,
) -> Authors | None:
    """The authors of the stages; None if the built-in author does all of them."""
    named = {stage: name for stage, name in names.items() if name != BUILTIN}
    _refuse_speed(named, options)
    if not named:
        return None
    from flashwright.author.llm.connect import connect
    from flashwright.author.llm.transcript import FOLDER, Transcript
    from flashwright.generate.by_model.ask import Authors, StageAuthor

    costs = options.budget, options.prices
    models = {
        name: connect(name, options.base_url, limits=options.limits) for name in set(named.values())
    }
    every = {
        stage: StageAuthor(models[name], name, *costs, options.candidates, options.bounded)
        for stage, name in named.items()
    }
    if options.improve:  # by the author of the CUDA, or of the TL
        author = every["translate" if "translate" in every else "code"]
        iterations = replace(options.budget, attempts=options.improve)
        every["improve"] = replace(author, budget=iterations, candidates=1)
    words = request.description or None
    function = (request.reference or b"").decode("utf-8", "replace")
    return Authors(Transcript(folder / FOLDER), every, words, function, options.goal)


def _is_finished(authors: Authors, request: Request, card: Gpu, folder: Path) -> bool:
    """Whether the folder has this run, finished. Refuses to replace the kernel of another run: a
    model may give no answer, and the old package would be lost."""
    from flashwright.generate.folder import finished

    if not finished(folder):
        return False
    known = authors.known(request.spec, card)
    if known == "open":  # iterations are left
        return "improve" not in authors.asked
    if known == "ended":
        return True
    why = f"{folder} has a finished kernel: give another folder, or --fresh to replace it"
    raise typer.BadParameter(why, param_hint="--out")


def _goal(text: str | None) -> SpeedGoal | None:
    """The speed goal of `--faster-than`, such as `0.9` or `0.8:flash`."""
    if text is None:
        return None
    from flashwright.generate.by_model.speed import SpeedGoal

    try:
        return SpeedGoal.parse(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--faster-than") from None


def _refuse_speed(named: Mapping[str, str], options: _ModelOptions) -> None:
    """Refuse speed options if no model writes the kernel or the TL."""
    if options.improve and not {"translate", "code"} & set(named):
        why = "name the model that writes the kernel (--translate) or the TL (--params)"
        raise typer.BadParameter(why, param_hint="--improve")
    if options.goal is not None and "translate" not in named:
        why = "name the model that writes the kernel: --translate"
        raise typer.BadParameter(why, param_hint="--faster-than")


def _worst(run: Run) -> str:
    """The largest error of the CPU run, in words."""
    shares = [v.of_limit for v in run.verdicts.values() if v.of_limit is not None]
    if shares:
        return f"largest error {max(shares):.2f} of its limit"
    return f"largest rms error {max(verdict.worst for verdict in run.verdicts.values()):.1e}"


def make(
    request: Request,
    card: Gpu,
    folder: Path,
    settings: RunSettings,
    authors: Authors | None,
    plan: Sequence[Stage] | None = None,
) -> Run:
    """Run the stages, and show them and what is wrong. Other stages than the usual: `plan`."""
    from flashwright.cli.screen import GenerateScreen
    from flashwright.cli.show import console
    from flashwright.generate import pipeline

    screen = GenerateScreen(console(quiet=settings.quiet))
    screen.header(request.summary, request.spec, card)
    try:
        run = pipeline.generate(
            *(request.spec, card, folder, screen, authors),
            last=settings.last,
            reference=request.reference,
            plan=plan,
            task=request.task.dump() if request.task is not None else None,
            allow_spills=settings.allow_spills,
            all_problems=settings.all_problems,
        )
    finally:
        screen.close()
    if not run.ok:
        for finding in run.failed:
            name = finding.file or "command line"
            tell([finding.diagnostic], name, run.artefacts.get(finding.file, ""))
    screen.closing(run, str(folder))
    return run


def _generate(
    request: Request, card: Gpu, folder: Path, settings: RunSettings, authors: Authors | None
) -> int:
    from flashwright.build.package import COMPILED
    from flashwright.generate.folder import finished

    had_kernel = finished(folder) and (folder / COMPILED[0]).is_file()
    run = make(request, card, folder, settings, authors)
    if settings.quiet and run.ok and run.verdicts:
        rest = "" if run.built else "; not compiled"
        print(f"{folder}: agrees with fp64, {_worst(run)}; {run.headline}{rest}")
    sys.stdout.flush()
    if had_kernel and not run.built:
        text = "had a compiled kernel, which this run has replaced without making another"
        print(f"{folder} {text}", file=sys.stderr)
    if run.unreached is not None:
        print(_not_reached(run), file=sys.stderr)
    return code_of(run)


def code_of(run: Run) -> int:
    """The exit code of a run."""
    if run.unreached is None:
        return FINE
    # What a model wrote into a file is not the user's bad input.
    own = [f.diagnostic for f in run.failed if not (run.asked and f.file)]
    return max(WRONG, exit_code(own))


def _not_reached(run: Run) -> str:
    """The last line of a run that ends early: the stage not reached, why, and what to do."""
    stage = run.unreached
    assert stage is not None
    name = STAGE_NAMES.get(stage.stage, stage.stage)
    why = stage.why or tuple(finding.diagnostic for finding in run.failed)
    said = f": {why[0].message} ({why[0].code})" if why else ""
    text = f"not reached: {name}{said}"
    before = [timing.stage for timing in run.timings if timing.status == "ok"]
    if stage.status != "skipped" or not before:
        return text
    help = f"; {why[0].help}" if why and why[0].help else ""
    less = STAGE_NAMES.get(before[-1], before[-1])
    return f"{text}{help}; or ask for less: --until {less}"
