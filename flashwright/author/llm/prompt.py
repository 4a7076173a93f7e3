"""What a model is told: the messages of each stage, from Markdown files and the facts of the run.

The words are in prompts/*.md; here they are filled in. `digest` says which words they were, so that
a record of a run can be told from one with others.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any, Literal

from jinja2 import Environment, StrictUndefined, Template

from flashwright.author.llm import examples, gpu_words, language, operator_words
from flashwright.author.llm.model import Message
from flashwright.author.llm.operator_words import Given
from flashwright.author.llm.vocabulary import headers, included, vocabulary
from flashwright.gpu import Gpu
from flashwright.spec import AttentionSpec

Stage = Literal["sketch", "code", "translate", "improve", "direct", "pytorch"]
Kind = Literal["tl", "cuda", "python"]
STAGES: tuple[Stage, ...] = ("sketch", "code", "translate", "improve", "direct", "pytorch")

STEPS = ("sketch", "code", "translate")
"""From an operator to a kernel."""
_PARTS = {
    "sketch": "a sketch in TL",
    "code": "TL code with all its sizes",
    "translate": "the code as CuTe C++",
}
_SKETCH_SECTIONS = ("GEMM", "Mask", "Softmax", "Expressions")
_ANSWERS = {
    "tl": "Your answer is TL, in one block fenced with ```tl and ```.",
    "cuda": "Your answer is CUDA C++, in one block fenced with ```cuda and ```.",
    "python": "Your answer is Python, in one block fenced with ```python and ```.",
}
_LETTERS = " (a letter before a size names its axis; `q_idx` and `kv_idx` count along L)"
_WHOLE = 130  # lines of a program that are listed whole in a repair
_AROUND = 6  # lines listed around each that a finding names, in a longer one
_EARLIER = 6  # attempts, or rounds, that are told of besides the last one
_BRIEF = 400  # characters of what is told of each
_PAGES = 3  # codes that are explained in a repair
_WITHOUT_TL: tuple[Stage, ...] = ("direct", "pytorch")
_TL = re.compile(r"\bTL\b")
_MODULES = ("prompt", "examples", "gpu_words", "language", "operator_words", "vocabulary")


@dataclass(frozen=True)
class Facts:
    """All that a stage may tell the model; what a stage does not need stays empty."""

    spec: AttentionSpec
    gpu: Gpu
    description: str | None = None
    """The operator in the user's words."""
    reference: str = ""
    """The user's function that the judge compares with, as text."""
    given: Given | None = None
    """What that function takes and gives."""
    stages: tuple[str, ...] = STEPS
    """The steps that are a model's, in their order."""
    sketch: str = ""
    """The sketch to complete; of a backward pass, the derived one."""
    forward: str = ""
    """The attention whose backward pass is asked for."""
    code: str = ""
    header: str = ""
    """The part of kernel.cu that is fixed (lower/contract.py)."""
    notes: str = ""
    """How the kernel is launched, in words (lower/contract.py)."""
    program: str = ""
    """What is known of the checked program, such as what it takes of the GPU."""
    kernel: str = ""
    """A right kernel.cu, where that is to be improved."""
    speed: str = ""
    """What was measured of it, and what bounds it."""
    schedule: str = ""
    """The path that the translator takes, and what it does not do (lower/report.py)."""
    tried: tuple[str, ...] = ()
    """What became of earlier rounds, a line each."""


def kind(stage: Stage, facts: Facts) -> Kind:
    """What the answer is written in: it says which function of extract.py finds it."""
    if stage == "improve":
        return "cuda" if facts.kernel else "tl"
    kinds: dict[Stage, Kind] = {"translate": "cuda", "direct": "cuda", "pytorch": "python"}
    return kinds.get(stage, "tl")


def first(stage: Stage, facts: Facts) -> tuple[Message, ...]:
    """The conversation as a stage begins it."""
    language_of = kind(stage, facts)
    steps = [_PARTS[step] for step in STEPS if step in facts.stages]
    system = _render(
        "system.md",
        answer=_ANSWERS[language_of],
        cuda="translate" in facts.stages,
        steps=steps if len(steps) > 1 else [],
        tl=stage not in _WITHOUT_TL,
        open=operator_words.OPEN,
        close=operator_words.CLOSE,
    )
    if stage == "code" and facts.spec.backward:
        text = _render("backward.md", **_gradient_values(facts))
    else:
        text = _render(f"{stage}.md", fence=language_of, **_values(stage, facts))
    return (Message("system", system), Message("user", text))


def repair(
    stage: Stage,
    facts: Facts,
    history: Sequence[Message],
    findings: str,
    source: str,
    *,
    right: bool = False,
    earlier: Sequence[str] = (),
) -> tuple[Message, ...]:
    """The conversation with what was wrong with the last attempt, and none of those before it.

    `history` is the conversation so far (its beginning is kept as it was; empty: as `first` makes
    it), `source` the program that was found wanting, empty where the reply held none. It may be
    `right`, and too slow. `earlier` are the findings of attempts before it: of each the first is
    told, so that what was mended stays so.
    """
    begin = tuple(history[:2]) or first(stage, facts)
    fence = kind(stage, facts)
    listing, partly = _listing(source, findings)
    text = _render(
        "repair.md",
        kind_words={"tl": "The TL", "cuda": "The CUDA", "python": "The Python"}[fence],
        source=source.strip(),
        right=right,
        findings=findings.strip(),
        pages=[p for p in _pages(findings) if stage not in _WITHOUT_TL or not _TL.search(p)],
        listing=listing,
        partly=" (parts of it)" if partly else "",
        fence=fence,
        earlier=[brief(text) for text in earlier[-_EARLIER:]],
    )
    if not source.strip():  # nothing to quote: two turns of the same side would follow each other
        system, asked = begin
        return (system, Message("user", f"{asked.text.rstrip()}\n\n---\n\n{text}"))
    return (*begin, Message("assistant", fenced(source, fence)), Message("user", text))


def brief(text: str) -> str:
    """The first of some findings, or the beginning of what a model said, as one short line."""
    told, _, _ = text.partition("```")
    paragraphs = [part for part in re.split(r"\n\s*\n", told) if part.strip()]
    titles = itertools.takewhile(lambda part: re.fullmatch(r"\s*#[^\n]*\s*", part), paragraphs)
    said = paragraphs[len(list(titles)) :] or paragraphs or [""]
    line = re.sub(r"^1\. ", "", " ".join(said[0].split()))
    return line if len(line) <= _BRIEF else f"{line[:_BRIEF]} ..."


def digest(stage: Stage) -> str:
    """Which words a stage uses: a hash of every file that its messages are made of."""
    total = hashlib.sha256()
    for name, data in sorted(_files(stage)):
        total.update(f"{name}\0{len(data)}\0".encode() + data)
    return total.hexdigest()


# --- filling in -------------------------------------------------------------------------------


def _values(stage: Stage, facts: Facts) -> dict[str, Any]:
    """What the template of a stage may name; those that a stage does not have raise an error."""
    spec, gpu = facts.spec, facts.gpu
    outputs = operator_words.outputs(spec, facts.given)
    steps = [step for step in STEPS if step in facts.stages]
    several = stage in steps and len(steps) > 1
    values: dict[str, Any] = {
        "operator": operator(facts),
        "gpu_title": gpu.title,
        "arch": gpu.arch,
        "gpu": gpu_words.facts(gpu, spec),
        "outputs": " and ".join(outputs),
        "several": len(outputs) > 1,
        "step": f"Step {steps.index(stage) + 1} of {len(steps)}: " if several else "",
        "arguments": ", ".join(operator_words.inputs(spec)),
    }
    if stage in ("sketch", "code"):
        shown = examples.of_language(spec)
        values |= {
            "example_title": shown.title,
            "example_sketch": shown.sketch,
            "example_code": shown.of_sequences(spec) if spec.batch is not None else shown.code,
            "sketch": facts.sketch if spec.batch is None else "",
            "sequences": spec.batch is not None,
            "splits": spec.decode is not None and not spec.unsplit,
            "head_dim": spec.head_dim,
            "v_dim": spec.value_dim,
        }
    if stage in ("sketch", "code", "improve"):
        told = facts.description or facts.reference or spec.branch
        recipes = None if told else language.recipes_for(spec)
        values["language"] = (
            language.chosen(*_SKETCH_SECTIONS, recipes=recipes)
            if stage == "sketch"
            else language.of_code(spec, recipes)
        )
    if stage in ("code", "improve"):
        values |= {"costs": gpu_words.costs(gpu, spec), "advice": gpu_words.advice(gpu, spec)}
    if stage in ("translate", "improve", "direct"):
        values |= _device(stage, facts)
    return values


def _gradient_values(facts: Facts) -> dict[str, Any]:
    """What the template of a backward pass names."""
    spec = facts.spec.attention()
    told = facts.description or facts.reference
    exact = "The same inputs must give the same bits: `and accumulate` adds in any order, but with "
    exact += "`at turn N` after exactly N other additions to the same tile."
    loose = "dQ may be added up in any order; dK and dV must have the same bits in every call."
    more = [*["dSlopes"] * spec.alibi, *["dSink"] * spec.sink]
    return {
        "operator": operator(replace(facts, spec=spec)),
        "gradients": ", ".join(["dQ", "dK", "dV", *more]),
        "formulas": operator_words.gradient_formulas(spec),
        "deterministic": exact if facts.spec.repeatable else loose,
        "gpu_title": facts.gpu.title,
        "gpu": gpu_words.facts(facts.gpu, spec),
        "language": language.of_code(facts.spec, None if told else language.recipes_for(spec)),
        "forward": facts.forward,
        "derived": facts.sketch,
    }


def _device(stage: Stage, facts: Facts) -> dict[str, Any]:
    """What is said where CUDA is written."""
    include = included(facts.header)
    hopper = include == "hopper.cuh"
    way = {"cp_async": facts.gpu.cp_async}
    values = {
        "header": facts.header,
        "notes": facts.notes.strip(),
        "include": include,
        "hopper": hopper,
        "code": facts.code,
        "numbered": numbered(facts.code),
        "program": facts.program,
        "kernel": facts.kernel,
        "speed": facts.speed,
        "schedule": facts.schedule.strip(),
        "tried": facts.tried[-_EARLIER:],
        "synchronisation": _render("sync_hopper.md" if hopper else "sync_plain.md", **way).strip(),
    }
    if stage == "direct":
        return values | {"vocabulary": vocabulary("global.cuh")}
    shown = examples.of_translation(facts.code)
    statements = "statements_hopper.md" if hopper else "statements_plain.md"
    return values | {
        "vocabulary": vocabulary(include, bytes_too=facts.spec.dtype == "fp8"),
        "statements": _render(statements, **way).strip(),
        "example_title": shown.title,
        "example_code": shown.translated(hopper=hopper),
        "example_kernel": shown.kernel(facts.gpu, hopper=hopper),
    }


def operator(facts: Facts) -> str:
    """The operator in words, with what the user said of it between marks."""
    spec = facts.spec
    lettered = spec.batch is not None or (
        facts.given is not None and any(":" in line[1] for line in facts.given.drawn)
    )
    return _render(
        "operator.md",
        description=operator_words.quoted(facts.description) if facts.description else "",
        reference=operator_words.quoted(facts.reference) if facts.reference else "",
        words=spec.in_words[:1].upper() + spec.in_words[1:],
        tensors=operator_words.tensors(spec, facts.given),
        letters=_LETTERS if lettered else "",
        sequences=spec.batch is not None,
        formulas=operator_words.formulas(spec),
        notes=operator_words.notes(spec, custom=bool(facts.reference), given=facts.given),
    ).strip()


@cache
def _environment() -> Environment:
    made = Environment(
        autoescape=False, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    made.filters["fenced"] = fenced
    return made


def _render(name: str, **values: Any) -> str:
    return _template(name).render(**values).rstrip() + "\n"


@cache
def _template(name: str) -> Template:
    return _environment().from_string(_read(name))


def _read(name: str) -> str:
    return (resources.files(__package__) / "prompts" / name).read_text(encoding="utf-8")


def fenced(text: str, label: str = "") -> str:
    """A block of Markdown that the text cannot end early."""
    longest = max((len(run) for run in re.findall(r"`{3,}", text)), default=2)
    fence = "`" * (longest + 1)
    return f"{fence}{label}\n{text.rstrip()}\n{fence}"


# --- repairs ----------------------------------------------------------------------------------


def numbered(text: str) -> str:
    """A program with the numbers of its lines."""
    return "\n".join(f"{n:>4} | {line}" for n, line in enumerate(text.rstrip().split("\n"), 1))


def _listing(source: str, findings: str) -> tuple[str, bool]:
    """The program with numbers; of a long one the lines around those that the findings name."""
    if not source.strip():
        return "", False
    lines = numbered(source).split("\n")
    named = {int(n) for n in re.findall(r"\bline (\d{1,6})\b", findings)}
    named = {n for n in named if n <= len(lines)}
    if len(lines) <= _WHOLE or not named:
        return "\n".join(lines), False
    shown = sorted({m for n in named for m in range(max(1, n - _AROUND), n + _AROUND + 1)})
    out: list[str] = []
    for before, n in zip([0, *shown], shown, strict=False):
        if n > len(lines):
            break
        if n > before + 1:
            out.append("...")
        out.append(lines[n - 1])
    return "\n".join(out), True


def _pages(findings: str) -> Iterator[str]:
    """What `flashwright explain` says of the codes, without its programs."""
    for code in [*dict.fromkeys(re.findall(r"\bFW\d{3}\b", findings))][:_PAGES]:
        page = resources.files("flashwright.lang") / "explain" / f"{code}.md"
        if page.is_file():
            text = page.read_text(encoding="utf-8")
            begin = text.partition("\n## ")[0]
            end = text.rpartition("\n```\n")[2] if "\n```\n" in text else ""
            end = "" if end.lstrip().startswith("#") else end
            title, _, rest = begin.partition("\n")
            told = language.without_commands(f"{rest.strip()}\n{_causes(end, findings)}")
            yield f"About {title.removeprefix('# ')}. {' '.join(told.split())}"


def _causes(text: str, findings: str) -> str:
    """The end of a page; of a list of causes those whose message is among the findings."""
    begin, *causes = re.split(r"^- (?=`)", text.strip(), flags=re.MULTILINE)
    if not causes:
        return begin
    told = [cause.partition("`: ") for cause in causes]
    return " ".join(cause for said, _, cause in told if said.removeprefix("`") in findings)


# --- hashes and counts ------------------------------------------------------------------------


def _files(stage: Stage) -> Iterator[tuple[str, bytes]]:
    here = resources.files(__package__)
    names = ["system.md", "operator.md", "repair.md", f"{stage}.md"]
    names += ["backward.md"] if stage == "code" else []
    shown: tuple[str, ...] = ()
    if stage in ("sketch", "code", "improve"):
        names.append("language.md")
    if stage in ("sketch", "code"):
        shown = ("sketch.tl", "code.tl")
    if stage in ("translate", "improve", "direct"):
        parts = ("statements_plain", "statements_hopper", "sync_plain", "sync_hopper")
        names += [f"{part}.md" for part in parts]
        shown = examples.FILES
    names += [f"examples/{example}/{file}" for example in examples.NAMES for file in shown]
    for name in names:
        yield f"prompts/{name}", (here / "prompts" / name).read_bytes()
    for module in _MODULES:
        yield f"{module}.py", (here / f"{module}.py").read_bytes()
    if shown == examples.FILES:
        device = resources.files("flashwright") / "device" / "fw"
        for name in headers():
            yield f"fw/{name}", (device / name).read_bytes()
    for page in (resources.files("flashwright.lang") / "explain").iterdir():
        if page.name.endswith(".md"):
            yield f"explain/{page.name}", page.read_bytes()
