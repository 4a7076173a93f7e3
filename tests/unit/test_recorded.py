"""Recorded runs with language models (tests/recorded/, docs/results/improve-h200): they hold no
secret, and still come out so.

Each folder is one that `flashwright generate` left: nobody is asked here, all else is done anew.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flashwright import gpu as gpus
from flashwright.author.llm import extract
from flashwright.author.llm.transcript import FOLDER, Transcript
from flashwright.build import toolchain
from flashwright.check.check import check
from flashwright.generate.replay import replay
from flashwright.lang.parse import parse
from flashwright.study import report
from flashwright.untrusted.contract import bound, contract
from flashwright.untrusted.screen import screen
from tests.unit.test_by_model import Nobody

RECORDED = Path(__file__).parents[1] / "recorded"
RESULTS = Path(__file__).parents[2] / "docs" / "results"
STUDY, IMPROVED = RESULTS / "study-h200", RESULTS / "improve-h200"
FILES = {"sketch": "sketch.tl", "code": "code.tl", "translate": "kernel.cu"}


def runs(*folders: Path) -> list[Path]:
    return sorted(path.parents[1] for one in folders for path in one.glob(f"*/{FOLDER}/run.json"))


recorded = pytest.mark.parametrize("run", runs(RECORDED, IMPROVED), ids=lambda path: path.name)


# --- secrets ----------------------------------------------------------------------------------

SECRETS = {
    "a key": r"\b(?:sk|pk|rk)-[A-Za-z0-9][A-Za-z0-9_-]{15,}",
    "a token": r"\b(?:gh[pousr]|github_pat|hf|glpat|xox[abp])[_-]\w{16,}",
    "a cloud's key": r"\bA(?:KI|SI)A[0-9A-Z]{16}\b|\bAIza[\w-]{30,}",
    "a header": r"(?i)\bbearer\s+[\w.~+/-]{8,}|\b(?:x-api-key|authorization)\W{1,4}[\w.~+/-]{8,}",
    "a setting": r"(?i)(?:api_?key|secret|password|access_token)['\"]?\s*[:=]\s*['\"]?[\w.-]{8,}",
    "a private key": r"-----BEGIN [A-Z ]*PRIVATE KEY",
    "somebody's folder": r"(?<![\w.])/(?:home|root|tmp|Users|private|var/folders|work)/[\w.-]+",
    "somebody's folder on Windows": r"(?i)\b[a-z]:\\+users\\+\w+",
}


def secrets(text: str, env: dict[str, str] | os._Environ[str] = os.environ) -> Iterator[str]:
    """What a record must not have in it."""
    for what, pattern in SECRETS.items():
        yield from (f"{what}: {match[0][:40]}" for match in re.finditer(pattern, text))
    for name, value in env.items():
        if re.search(r"KEY|TOKEN|SECRET|PASSWORD", name) and len(value) >= 8 and value in text:
            yield f"the value of {name}"


def test_no_record_has_a_key_or_a_path_of_a_machine() -> None:
    for path in (p for folder in (RECORDED, STUDY, IMPROVED) for p in folder.rglob("*")):
        if path.is_file():
            text = path.read_bytes().decode("utf-8", "replace")
            assert [*secrets(text)] == [], path


@pytest.mark.parametrize(
    "text",
    [
        "my key is sk-proj-abcdefghij0123456789",
        '"Authorization": "Bearer abcdef0123456789"',
        "x-api-key: 0123456789abcdef",
        "OPENAI_API_KEY=something-long",
        "hf_abcdefghijklmnopqrst",
        "AKIAIOSFODNN7EXAMPLE",
        "File /home/somebody/run/model/code.tl",
        "cannot write /tmp/pytest-of-x/code.tl",
        r"C:\\Users\\somebody",
        "it said hush-hush-hush, twice",
    ],
)
def test_the_search_finds_what_it_is_for(text: str) -> None:
    assert [*secrets(text, {"SOME_API_KEY": "hush-hush-hush"})]


def test_the_search_lets_our_own_words_pass() -> None:
    text = "Compute Softmax S // max over /tmp? no. A task-force of 16 keys; kv_heads = 8; sk-1"
    assert [*secrets(text, {"SHORT_KEY": "none", "OTHER": "Compute Softmax"})] == []


# --- what was made ----------------------------------------------------------------------------


@recorded
def test_links_are_no_part_of_a_record(run: Path) -> None:
    assert not [path for path in run.rglob("*") if path.is_symlink()]


@recorded
def test_what_was_taken_passes_the_reader_and_the_checker_today(run: Path) -> None:
    card = gpus.find(_settings(run)["gpu"])
    for name in ("sketch.tl", "code.tl"):
        found = check(parse((run / name).read_text()), card)
        assert [d for d in found.diagnostics if d.severity == "error"] == []
    program = check(parse((run / "code.tl").read_text()), card).program
    assert program is not None
    if "translate" in _settings(run)["asked"]:
        source = (run / "kernel.cu").read_text()
        screen(source)
        plan = bound(contract(program, card), source)
        assert plan.entry == json.loads((run / "launch.json").read_text())["entry"]


@recorded
def test_each_reply_still_holds_the_program_that_was_tried(run: Path) -> None:
    exchanges = Transcript(run / FOLDER).attempts()
    assert exchanges
    improved = "translate" if "translate" in _settings(run)["asked"] else "code"
    for stage, candidate, number, exchange in exchanges:
        wrote = improved if stage == "improve" else stage
        file = run / FOLDER / f"{stage}.{candidate}.{number:02}" / FILES[wrote]
        if file.exists():
            take = extract.cuda if wrote == "translate" else extract.tl
            assert take(exchange.reply) == file.read_text()


def test_the_study_in_the_docs_is_what_its_records_say(tmp_path: Path) -> None:
    again = Path(shutil.copytree(STUDY, tmp_path / "study"))
    for name in report.FILES:
        (again / name).unlink()
    made = report.make(again)
    assert made.open == 0
    for name in report.FILES:
        assert (again / name).read_text() == (STUDY / name).read_text()
    drawn = (STUDY / "study.html").read_text()
    assert "mla-causal, tl: 1.01" in drawn  # the speeds, and no lines that are flat
    assert "Every sample reached every level." in drawn
    told = (STUDY.parents[1] / "models.md").read_text()
    head, *body = report.brief(made.rows)
    speed = head.index("speed")
    for line in body:
        shown = f"| {line[0]} | {line[1]} | "
        (found,) = [one for one in told.splitlines() if one.startswith(shown)]
        assert found.endswith(f" {line[speed]} |"), found


def test_the_rounds_in_the_docs_are_what_their_records_say() -> None:
    told = (RESULTS.parent / "models.md").read_text().splitlines()
    assert len(runs(IMPROVED)) == 3
    for run in runs(IMPROVED):
        found = json.loads((run / "result.json").read_text())["asked"]["improve"]
        speeds = [
            next(iter(found[when]["times_as_fast_as"].values())) for when in ("before", "after")
        ]
        rounds = []
        for one in found["rounds"]:
            file = run / FOLDER / one["attempt"] / "findings.md"
            gain = re.search(r"[0-9.]+ % faster", one["why"])
            code = re.search(r"FW\d{3}", file.read_text() if file.exists() else "")
            rounds += [f"kept ({gain[0]})"] if one["kept"] and gain else [code[0]] if code else []
        wrote = "CUDA" if "translate" in _settings(run)["asked"] else "TL"
        before, after = (f"{speed:.2f}" for speed in speeds)
        assert f"| {run.name} | {wrote} | {before} | {', '.join(rounds)} | {after} |" in told


@pytest.mark.slow  # nvcc: some 10 s for each kernel
@pytest.mark.parametrize(
    "run", [*runs(RECORDED), IMPROVED / "window-sinks"], ids=lambda path: path.name
)
def test_a_replay_comes_to_the_same_kernel(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHWRIGHT_CACHE", str(tmp_path / "cache"))
    last = "build" if toolchain.has_nvcc() else "cpu"
    if last == "cpu" and "translate" in _settings(run)["asked"]:
        pytest.skip("there is no CUDA compiler here")
    again = replay(run, tmp_path / "again", Nobody(), last=last)
    assert again.same, "\n".join(again.lines)


def _settings(run: Path) -> dict[str, Any]:
    told: dict[str, Any] = json.loads((run / FOLDER / "run.json").read_text())["settings"]
    return told
