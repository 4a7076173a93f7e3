"""`flashwright judge selftest`: its cases, what it calls a hole or a false alarm, its table."""

from __future__ import annotations

import importlib.util
import json
import platform
import secrets
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from flashwright.judge.judge import judge
from flashwright.judge.offences import CODES
from flashwright.lang.codes import CODES as EXPLAINED
from flashwright.selftest import packages, receipts, run, sources, table
from flashwright.selftest.case import CLASSES, HONEST, KERNELS, SelftestCase
from flashwright.selftest.cases import CASES, chosen
from flashwright.selftest.kernels import escapes
from flashwright.selftest.needs import missing
from flashwright.selftest.run import judged
from flashwright.selftest.ways import CaseOutcome
from tests.inside import Inside
from tests.unit.emulated import needs_compilers
from tests.unit.test_cli import Outcome as Command

ROOT = Path(__file__).parents[2]
BY_NAME = {case.name: case for case in CASES}
ZEROS = replace(BY_NAME["cpu/zeros"], lengths=((9, 9),))


# --- the table of cases -----------------------------------------------------------------------


def test_there_are_enough_cases_and_each_has_a_name_of_its_own() -> None:
    assert len(BY_NAME) == len(CASES)
    count = Counter((case.on, case.honest) for case in CASES)
    assert count["cpu", False] + count["gpu", False] >= 60
    assert count["cpu", True] + count["gpu", True] >= 25
    assert all(count.values())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_case_is_whole(case: SelftestCase) -> None:
    """Its class is known, its expected names exist, and so does what is judged."""
    assert case.kind in CLASSES
    assert (case.kind == HONEST) == case.honest
    fields = {"number.digest", "number.tflops", "number.seed", "number.run"}
    assert set(case.expected) <= {*CODES, *EXPLAINED, *fields}
    known = {
        "sources": {*sources.REFUSED, *sources.TAKEN},
        "receipts": {*receipts.RECEIPTS, "unchanged_receipt"},
        "packages": {*packages.OPTIONS, *vars(packages)},
    }
    if case.module in known:
        assert case.function in known[case.module]
        return
    assert case.spec is not None
    found = importlib.util.find_spec(f"{KERNELS}.{case.module}")
    assert found is not None
    text = Path(found.origin or "").read_text()
    assert f"\ndef {case.function}(" in text or f"\n{case.function} = " in text


def test_every_class_is_used() -> None:
    assert {case.kind for case in CASES} == set(CLASSES)


def test_the_page_lists_exactly_these_cases() -> None:
    """Bring it up to date: python -m flashwright.selftest.table docs/judge.md"""
    page = (ROOT / "docs" / "judge.md").read_text()
    assert table.BEGIN in page
    assert table.with_cases(page) == page


def test_cases_are_chosen_by_name_class_and_place() -> None:
    assert [c.name for c in chosen(["zeros"])] == ["cpu/zeros", "gpu/zeros"]
    assert [c.name for c in chosen(["cpu/zeros"])] == ["cpu/zeros"]
    assert {c.on for c in chosen(on="gpu")} == {"gpu"}
    assert {c.kind for c in chosen(kinds=["receipt"])} == {"receipt"}
    assert len(chosen(["own_*"], on="cpu")) == 5
    assert chosen() == list(CASES)


# --- what came of them ------------------------------------------------------------------------


def test_what_is_a_hole_and_what_a_false_alarm() -> None:
    honest = BY_NAME["cpu/causal"]
    refused = BY_NAME["cpu/judge_memory"]
    assert judged(ZEROS, CaseOutcome(("zeros", "key_ignored"))).status == "ok"
    assert judged(ZEROS, CaseOutcome(())).status == "HOLE"
    assert judged(ZEROS, CaseOutcome(("crash",))).status == "HOLE"
    assert judged(refused, CaseOutcome(("raises",), "Refused: EPERM")).status == "ok"
    assert judged(refused, CaseOutcome(("raises",), "NameError: x")).status == "HOLE"
    assert judged(honest, CaseOutcome(())).status == "ok"
    assert judged(honest, CaseOutcome(("wrong",))).status == "FALSE ALARM"


QUICK = (
    *("cpu/scales_q_in_place", "cpu/judge_memory", "cpu/internet", "cpu/overwrites_the_judge"),
    *("cpu/forges_an_answer", "cpu/calls_sdpa", "cpu/includes_a_secret", "cpu/plain_source"),
    *("cpu/faster_number", "cpu/unchanged_receipt", "gpu/zeros", "cpu/prints_a_lot"),
)


@pytest.mark.slow
def test_from_end_to_end_with_planted_holes_and_alarms() -> None:
    """An honest kernel as an attack is a hole, an attack as an honest kernel a false alarm."""
    honest = BY_NAME["cpu/prints_a_lot"]
    planted = [
        replace(honest, label="accepted attack", kind="output", expected=("zeros",)),
        replace(ZEROS, label="other name", expected=("replay",)),
        replace(ZEROS, label="rejected honesty", kind=HONEST, expected=()),
        replace(ZEROS, label="no such kernel", function="nothing_of_the_kind"),
    ]
    rows = run.run([*(BY_NAME[name] for name in QUICK), *planted], jobs=2)
    found = {row.case.name: row.status for row in rows}
    assert [row.case.name for row in rows[: len(QUICK)]] == list(QUICK)
    gpu = "not tried" if missing(BY_NAME["gpu/zeros"]) else "ok"
    assert found.pop("gpu/zeros") == gpu
    assert found.pop("cpu/accepted attack") == "HOLE"
    assert found.pop("cpu/other name") == "HOLE"
    assert found.pop("cpu/rejected honesty") == "FALSE ALARM"
    assert found.pop("cpu/no such kernel") == "HOLE"
    assert set(found.values()) == {"ok"}
    assert table.exit_code(rows) == 1
    assert "3 holes, 1 false alarm" in table.summary(rows)


def test_a_judge_that_is_stopped_is_a_hole_and_the_next_case_is_judged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Something that cannot be sent back ends the judge's process as a signal would."""
    child = run.JudgeProcess()
    try:
        first = child.outcome(replace(BY_NAME["cpu/plain_source"], how="no such way"))  # type: ignore[arg-type]
        assert isinstance(first, str)
        assert "the judge failed" in first
        child._process.kill()
        child._process.join()
        stopped = child.outcome(BY_NAME["cpu/plain_source"])
        assert isinstance(stopped, str)
        assert "the judge was stopped" in stopped
        assert child.outcome(BY_NAME["cpu/plain_source"]) == CaseOutcome(())
    finally:
        child.close()


FREE = (
    *("judge_environment", "judge_signal", "judge_limits", "judge_affinity", "judge_priority"),
    *("judge_queued_signal", "internet", "unix_socket", "reads_the_system", "lists_the_root"),
    *("overwrites_its_own_file", "writes_to_the_temporary_folder"),
)


@pytest.mark.parametrize("name", FREE)
def test_an_attempt_that_nothing_refuses_is_a_hole(name: str) -> None:
    """A judge without its sandbox accepts it. "The judge" is here the parent of this process."""
    case = BY_NAME[f"cpu/{name}"]
    assert case.spec is not None
    given = {"lengths": case.lengths, "device": "cpu", "sandbox": Inside}
    found = judge(case.candidate, case.spec, **given)
    assert found.ok
    assert judged(case, CaseOutcome(tuple(o.name for o in found.offences))).status == "HOLE"


@pytest.mark.skipif(platform.machine() != "aarch64", reason="it is code for Arm")
def test_machine_code_is_run() -> None:
    assert escapes._machine_code("a00080d2c0035fd6")() == 5  # mov x0, #5; ret


def test_why_a_case_cannot_be_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    foreign = "calls_of_x32" if platform.machine() != "x86_64" else "program_of_32_bits"
    case = BY_NAME[f"cpu/{foreign}"]
    assert missing(case) == f"it is code for {case.needs[0]}"
    case = replace(ZEROS, needs=("a_module_that_is_not_there",))
    assert missing(case) == "a_module_that_is_not_there is not installed"
    assert missing(ZEROS) == ""


# --- what is shown ----------------------------------------------------------------------------


def test_exit_codes_and_the_summary() -> None:
    fine = judged(ZEROS, CaseOutcome(("zeros",)))
    honest = judged(BY_NAME["cpu/causal"], CaseOutcome(()))
    untried = run.SelftestResult(BY_NAME["gpu/zeros"], "not tried", "no GPU")
    assert table.exit_code([fine, untried]) == 0
    assert table.exit_code([untried]) == 2
    assert table.exit_code([judged(ZEROS, CaseOutcome(()))]) == 1
    assert (
        table.summary([fine, honest, untried])
        == "1 adversarial and 1 honest cases tried: no holes, no false alarms; 1 not tried here"
    )
    assert table.cells(untried)[-2:] == ("not tried here: no GPU", "-")
    assert table.summary([untried]) == "nothing could be tried here: 1 case"
    hole = judged(ZEROS, CaseOutcome(("crash",), "its process ended", 7))
    assert table.details(hole) == "HOLE: cpu/zeros: its process ended (seed 7)"
    assert table.cells(honest)[0] == "cpu/causal *"  # it has the whole trial


def test_the_command() -> None:
    asked = (
        "judge",
        "selftest",
        "--only",
        "plain_source",
        "--only",
        "faster_number",
        "--jobs",
        "1",
    )
    shown = Command(*asked)
    assert shown.code == 0
    assert "1 adversarial and 1 honest cases tried: no holes, no false alarms" in shown.out
    assert "cpu/faster_number: ok: rejected as number.digest" in shown.err
    told = json.loads(Command(*asked, "--json").out)
    assert told["ok"] is True
    assert {row["case"]: row["status"] for row in told["rows"]} == {
        "cpu/faster_number": "ok",
        "cpu/plain_source": "ok",
    }


def test_the_command_is_told_what_there_is() -> None:
    assert Command("judge", "selftest", "--only", "no_such_case").code == 2
    assert Command("judge", "selftest", "--on", "tpu").code == 2
    unknown = Command("judge", "selftest", "--class", "no_such_class")
    assert unknown.code == 2
    assert "library" in unknown.err


@pytest.mark.slow
@needs_compilers
def test_a_sixth_of_the_cpu() -> None:
    """No hole and no false alarm in what needs no GPU: others in every run, since all of them take
    five minutes. `flashwright judge selftest --only NAME` runs one again."""
    all_of = chosen(on="cpu")
    rows = run.run(secrets.SystemRandom().sample(all_of, len(all_of) // 6))
    assert [(r.case.name, r.happened) for r in rows if r.status not in ("ok", "not tried")] == []
