"""Wrong TL of every kind that the checker knows, put in a model's mouth: what it is told of it.

The programs are those of `flashwright explain`: for each code one that is wrong just so, and the
right one beside it. test_by_model.py shows the same through a server, for some.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import flashwright
from flashwright import gpu
from flashwright.author.llm import extract, prompt
from flashwright.author.llm.attempts import Tried
from flashwright.author.llm.prompt import Facts
from flashwright.generate.by_model import tl as tl_by_model
from flashwright.lang.codes import CODES
from flashwright.lang.diagnostic import Diagnostic, Failed
from tests.unit.llm_server import say, serve
from tests.unit.test_by_model import CARD, CODE, SKETCH, SPEC, WRONG_SCALE, fenced, generate
from tests.unit.test_explain import PROGRAMS, Fence

PACKAGE = Path(flashwright.__file__).parent
FACTS = Facts(SPEC, CARD, sketch=SKETCH)
OF_FILES = {"FW001", "FW002", "FW003", "FW006"}
"""A reply is no file, and its size is limited before."""
OF_OPTIONS = {"FW705"}
DEEP = "let a = " + "(" * 400 + "1" + ")" * 400 + "\n"
SHORT = {"FW004": (DEEP, None), "FW005": ("// nothing yet\n", None)}
"""Codes whose pages have no program."""

WRONG = {
    **{c: (f.text, f.gpu) for c, f in PROGRAMS if f.heading == "Wrong" and c < "FW8"},
    **SHORT,
}
WARNINGS = {code for code in WRONG if CODES[code].severity == "warning"}


def tried(text: str, card: str | None) -> tuple[Tried[str], tuple[Diagnostic, ...]]:
    """What the stage does with an attempt, without a process, and before the CPU run."""
    try:
        found = tl_by_model._checked_sketch(text, gpu.find(card) if card else None)  # type: ignore[arg-type]
    except Failed as failed:
        found = failed.diagnostics
    right = not tl_by_model._errors(found)
    return tl_by_model._tried(text if right else None, found, text, "code.tl"), found


def test_every_code_that_the_checker_can_emit_has_a_case() -> None:
    """A new one fails here until its page has a wrong program."""
    known = {code for code in CODES if code < "FW8"}
    assert set(WRONG) == known - OF_FILES - OF_OPTIONS
    sources = [
        *(p for d in ("check", "program", "semantics") for p in (PACKAGE / d).rglob("*.py")),
        *(PACKAGE / "lang").glob("*.py"),
    ]
    named = {c for p in sources if p.name != "codes.py" for c in _codes(p.read_text())}
    assert {c for c in named if c < "FW8"} <= set(WRONG) | OF_FILES | OF_OPTIONS
    assert len(named) > 30


def test_every_code_in_our_source_is_in_the_table() -> None:
    """One that is not ends in a KeyError where the user should read it."""
    for path in PACKAGE.rglob("*.py"):
        assert _codes(path.read_text()) <= set(CODES), path.name


def _codes(text: str) -> set[str]:
    return set(re.findall(r'"(FW\d{3})"', text))


@pytest.mark.parametrize("code", sorted(set(WRONG) - WARNINGS))
def test_a_repair_names_the_code_the_line_and_what_to_do(code: str) -> None:
    text, card = WRONG[code]
    outcome, found = tried(text, card)
    assert outcome.value is None
    assert code in {d.code for d in found}
    history = prompt.first("code", FACTS)
    asked = prompt.repair("code", FACTS, history, outcome.findings, text)
    assert asked[:2] == history
    told = asked[-1].text
    lines = text.split("\n")
    for d in found:
        assert f"{d.severity} {d.code}" in told
        if d.span:
            assert f"{d.code} on line {d.span.line}: " in told
            assert f"line {d.span.line}: {lines[d.span.line - 1].strip()[:100]}" in told
        for hint in (d.help, d.fix.title if d.fix else None):
            assert hint is None or hint in told
    assert f"About {code}: {CODES[code].title}. " in told  # which says what to do
    assert len(asked[2].text) >= len(text)  # its own program, as it wrote it


@pytest.mark.parametrize("code", sorted(WARNINGS))
def test_a_warning_is_no_reason_to_ask_again(code: str) -> None:
    outcome, found = tried(*WRONG[code])
    assert {d.code for d in found} == {code}
    assert outcome.value is not None


RIGHT = [pytest.param(f, id=c) for c, f in PROGRAMS if f.heading == "Right" and c < "FW8"]


@pytest.mark.parametrize("fence", RIGHT)
def test_the_corrected_reply_is_taken(fence: Fence) -> None:
    reply = f"You are right, here it is:\n\n```tl\n{fence.text}```\n"
    outcome, _ = tried(extract.tl(reply), fence.gpu)
    assert outcome.value == extract.tl(reply)


def test_so_many_findings_leave_room_for_the_program() -> None:
    """The first errors are told, with their number: a prompt with all of them is refused."""
    text = CODE + "Copy X (BM, 64) in coordinate [L = q] from global to shared\n" * 300
    outcome, found = tried(text, "a100")
    assert len(found) > 300
    assert len(outcome.diagnostics) == tl_by_model.MOST_TOLD
    assert f"There are {len(found) - tl_by_model.MOST_TOLD} more findings." in outcome.findings
    long = tried(CODE.replace("kv_len", "k" * 60_000), "a100")[0]
    assert len(long.findings) < 1.1 * tl_by_model.LONGEST_TOLD


@pytest.mark.slow
def test_one_conversation_through_several_kinds(tmp_path: Path) -> None:
    """Syntax, names, shapes and the CPU run, one after the other, each from a wrong reply."""
    wrong = {
        "FW101": CODE.replace("param BM = ", "param BM := ", 1),
        "FW201": CODE.replace("Compute GEMM Q_shared,", "Compute GEMM Q_shard,", 1),
        "FW503": CODE.replace("K_shared.T", "K_shared", 1),
        "FW802": WRONG_SCALE,
    }
    with serve([*(say(fenced(text)) for text in wrong.values()), say(fenced(CODE))]) as server:
        run = generate(server, tmp_path, attempts=8)
    assert run.ok, run.failed
    for (code, text), request in zip(wrong.items(), server.requests[1:], strict=True):
        assert text != CODE
        assert code in request.text, code
    # What was mended is named, so that it is not brought back; what is wrong now stands alone.
    now, _, before = server.requests[-1].text.partition("do not bring it back:")
    assert "FW802" in now
    told = [line.split()[2] for line in before.splitlines() if line.startswith("- error")]
    assert told == [
        "FW101",
        "FW201",
        "FW301",
    ]  # of the transpose that is missing, the first finding
    assert "do not bring it back" not in server.requests[1].text
