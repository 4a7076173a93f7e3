"""Studies: what is asked, what is counted of it, and that nothing is asked twice."""

from __future__ import annotations

import json
import math
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flashwright import spec as specs
from flashwright.author.builtin.variants import make_spec
from flashwright.author.llm.budget import Budget
from flashwright.author.llm.connect import connect
from flashwright.cli.main import app
from flashwright.cli.study import _show, _StudyProgress
from flashwright.fleet.job import CPU
from flashwright.generate.by_model.speed import Stopwatch
from flashwright.generate.replay import replay
from flashwright.judge.offences import offence
from flashwright.judge.verdict import Verdict
from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.measure import race
from flashwright.sandbox.candidate import Candidate
from flashwright.study import (
    direct,
    funnel,
    judged,
    operators,
    page,
    pytorch,
    report,
    session,
    speed,
)
from flashwright.study.funnel import pass_at
from flashwright.study.sample import Sample, StudyTerms
from flashwright.study.settings import OtherStudy, Settings
from flashwright.study.ways import WAYS
from flashwright.study.ways import chosen as chosen_ways
from flashwright.untrusted.contract import bound, contract
from tests.unit.fleet_fakes import InLockstep
from tests.unit.llm_server import Answer, hang, say, serve, status
from tests.unit.measure_fakes import H200
from tests.unit.test_by_model import CARD, CODE, SPEC, WRONG_SCALE, Nobody, fenced

pytestmark = pytest.mark.usefixtures("checked_here")

SMALL = operators.Operator("small", SPEC)
OTHER = operators.Operator("other", make_spec("gqa"))
NONSENSE = fenced("param = (\n")
TERMS = StudyTerms(CARD, Budget(attempts=1), last="cpu")


class Heard:
    """What a person is told."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.ended: list[str] = []

    def begin(self, sample: Sample, number: int, total: int) -> None:
        self.begun.append(str(sample))

    def progress(self, sample: Sample, text: str) -> None:
        pass

    def end(self, sample: Sample, text: str) -> None:
        self.ended.append(f"{sample}: {text}")


def settings(ways: str = "no-sketch", samples: int = 1, *many: operators.Operator) -> Settings:
    return Settings.of("m", TERMS, many or (SMALL,), chosen_ways(ways), samples)


def studied(root: Path, wanted: Settings, *script: Answer) -> tuple[Heard, int]:
    """A study with a scripted model; how many requests there were."""
    heard = Heard()
    wanted.keep(root)
    with serve([*script]) as server:
        asked = partial(connect, "m", server.url, env={})
        session.study(wanted, TERMS, asked, root, InLockstep(), CPU, heard)
    return heard, len(server.requests)


def rows(root: Path) -> dict[str, Any]:
    told = json.loads((root / "study.json").read_text())
    return {f"{row['operator']} {row['way']}": row for row in told["rows"]}


# --- counting ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("samples", "right", "k", "chance"),
    [
        (5, 2, 1, 0.4),
        (5, 2, 3, 0.9),
        (3, 1, 2, 2 / 3),
        (3, 1, 3, 1.0),
        (3, 0, 3, 0.0),
        (1, 1, 1, 1),
    ],
)
def test_pass_at_k_as_by_hand(samples: int, right: int, k: int, chance: float) -> None:
    assert pass_at(samples, right, k) == pytest.approx(chance)


@pytest.mark.slow
def test_one_right_one_wrong_and_one_that_is_no_program_are_counted_where_they_ended(
    tmp_path: Path,
) -> None:
    replies = [say(fenced(text)) for text in (CODE, WRONG_SCALE)]
    heard, asked = studied(tmp_path, settings(samples=3), *replies, say(NONSENSE))
    assert asked == 3
    assert [line.partition(": ")[2].partition(":")[0] for line in heard.ended] == [
        "only checked",
        "no code came out right",
        "no code came out right",
    ]
    told = report.make(tmp_path)
    row = rows(tmp_path)["small no-sketch"]
    levels = row["levels"]
    assert list(levels) == ["code", "cpu", "compiles", "right"]
    assert (levels["code"]["passed"], levels["code"]["failed"]) == (2, 1)
    assert (levels["cpu"]["passed"], levels["cpu"]["failed"]) == (1, 2)
    assert levels["cpu"]["pass_at"] == pytest.approx([1 / 3, 2 / 3, 1])
    # The run ended with the CPU: of the one that is right there nobody knows the rest.
    assert levels["right"] == {"passed": 0, "failed": 2, "unknown": 1, "pass_at": []}
    assert row["fast"] is None
    assert row["attempts"] == 1
    assert row["tokens"] > 1000
    text = (tmp_path / "study.md").read_text()
    assert "| 2/3 | 1/3 | 0/3 (1 not judged) |" in text
    assert "not measured" in text
    assert told.open == 0


def test_what_is_asked_for_without_a_sketch_speaks_of_none(tmp_path: Path) -> None:
    wanted = settings()
    wanted.keep(tmp_path)
    with serve([say(NONSENSE)]) as server:
        asked = partial(connect, "m", server.url, env={})
        session.study(wanted, TERMS, asked, tmp_path, InLockstep(), CPU, Heard())
    asked = server.requests[0].text
    assert not re.search(r"\bsketch\b", asked, re.IGNORECASE)
    assert "What code has" in asked
    assert not (tmp_path / "small/no-sketch/1/sketch.tl").exists()


def recorded(root: Path, sample: Sample, right: bool, ratio: float | None = None) -> None:
    """A sample as a run on a GPU leaves it."""
    folder = sample.folder(root)
    folder.mkdir(parents=True)
    names = ["sketch", "parameters", "check", "cpu", "translate", "build", "verdict"]
    stages = [{"stage": name, "status": "ok"} for name in names]
    stages = stages if right else [*stages[:4], {"stage": "translate", "status": "failed"}]
    told = {"ok": right, "verdict": "gpu" if right else "checked", "stages": stages}
    (folder / "result.json").write_text(json.dumps(told))
    if ratio is not None:
        (folder / "speed.json").write_text(json.dumps({"ratio": ratio}))


def test_how_many_are_faster_is_told_where_all_that_are_right_were_measured(tmp_path: Path) -> None:
    wanted = settings("tl", 3).keep(tmp_path)
    first, second, third = wanted.every
    recorded(tmp_path, first, True, 1.6)
    recorded(tmp_path, second, True, 1.2)
    recorded(tmp_path, third, False)
    (row,) = funnel.rows(wanted, tmp_path)
    assert row.fast == {1.0: pytest.approx(2 / 3), 1.5: pytest.approx(1 / 3)}
    assert row.kinds == {"gpu": 2}
    assert row.levels["right"].at == pytest.approx((2 / 3, 1, 1))
    (second.folder(tmp_path) / "speed.json").unlink()
    (row,) = funnel.rows(wanted, tmp_path)
    assert row.fast is None


def test_a_kernel_that_compiled_and_was_wrong_has_compiled(tmp_path: Path) -> None:
    wanted = settings("tl", 1).keep(tmp_path)
    (sample,) = wanted.every
    recorded(tmp_path, sample, False)
    attempt = sample.folder(tmp_path) / "model" / "translate.1.01"
    attempt.mkdir(parents=True)
    files = {"kernel.cu": "1", "kernel.cubin": "2"}
    outcome = {"taken": False, "findings": "1. error FW861: wrong", "artefacts": files}
    (attempt / "outcome.json").write_text(json.dumps(outcome))
    (row,) = funnel.rows(wanted, tmp_path)
    assert row.levels["compiles"].passed == 1
    assert row.levels["right"].failed == 1


def test_of_all_operators_counts_are_added_and_chances_are_means(tmp_path: Path) -> None:
    wanted = settings("tl", 2, SMALL, OTHER).keep(tmp_path)
    for sample in wanted.every:  # one of two right, both right
        recorded(tmp_path, sample, sample.operator == OTHER or sample.number == 1)
    *_, together = funnel.rows(wanted, tmp_path)
    assert (together.operator, together.levels["right"].passed) == ("all", 3)
    assert together.levels["right"].at == pytest.approx((0.75, 1.0))


# --- going on ---------------------------------------------------------------------------------


def arguments(root: Path, url: str, *more: str) -> list[str]:
    file = root.parent / "operators.toml"
    file.write_text('[small]\nvariant = "mha"\ncausal = true\nhead_dim = 64\n')
    told = ["study", "--model", "m", "--base-url", url, "--gpu", "a100", "--out", str(root)]
    told += ["--operators", str(file), "--ways", "no-sketch", "--samples", "2", "--attempts", "1"]
    return [*told, *more]


@pytest.mark.slow
def test_a_study_that_was_killed_asks_only_for_what_is_missing(tmp_path: Path) -> None:
    root = tmp_path / "study"
    with serve([say(NONSENSE), hang()]) as server:
        command = [sys.executable, "-m", "flashwright", *arguments(root, server.url)]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            until(lambda: len(server.requests) == 2 or process.poll() is not None)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
    assert len(server.requests) == 2
    with serve([say(fenced(WRONG_SCALE))]) as server:
        again = CliRunner().invoke(app, arguments(root, server.url))
        assert again.exit_code == 0, again.output
        assert len(server.requests) == 1
    with serve([]) as server:
        assert CliRunner().invoke(app, arguments(root, server.url)).exit_code == 0
    assert not server.requests
    levels = rows(root)["small no-sketch"]["levels"]
    assert (levels["code"]["passed"], levels["code"]["failed"]) == (1, 1)


@pytest.mark.slow
def test_a_study_that_has_grown_goes_on_with_all_of_it(tmp_path: Path) -> None:
    root = tmp_path / "study"
    with serve([status(401, "no such key"), status(401, "no such key")]) as server:
        told = CliRunner().invoke(app, arguments(root, server.url))
        assert told.exit_code == 2
    with serve([say(NONSENSE)] * 4) as server:
        told = CliRunner().invoke(app, arguments(root, server.url, "--ways", "tl"))
        assert len(server.requests) == 4
    assert told.exit_code == 0, told.output
    assert set(rows(root)) == {"small no-sketch", "small tl"}


def until(what: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not what() and time.monotonic() < end:
        time.sleep(0.02)


def test_the_report_is_made_again_from_the_records_alone(tmp_path: Path) -> None:
    studied(tmp_path, settings("no-sketch", 1), say(NONSENSE))
    report.make(tmp_path)
    before = {name: (tmp_path / name).read_bytes() for name in report.FILES}
    for name in before:
        (tmp_path / name).unlink()
    told = CliRunner().invoke(app, ["study", "--report", str(tmp_path)])
    assert told.exit_code == 0, told.output
    assert "no-sketch" in told.output
    assert {name: (tmp_path / name).read_bytes() for name in report.FILES} == before


@pytest.mark.parametrize(
    "more", [["--judge", "D"], ["--model", "m"], ["--gpu", "a100"], ["--out", "D"]]
)
def test_a_report_takes_the_study_as_it_is(more: list[str], tmp_path: Path) -> None:
    told = CliRunner().invoke(app, ["study", "--report", str(tmp_path), *more])
    assert told.exit_code == 2
    assert f"leave out {more[0]}" in told.output


@pytest.mark.parametrize("option", ["--report", "--judge"])
def test_a_folder_that_is_no_study_is_told_so(option: str, tmp_path: Path) -> None:
    told = CliRunner().invoke(app, ["study", option, str(tmp_path)])
    assert told.exit_code == 2
    assert "error[FW903]" in told.output
    assert "is not a study: it has no settings.json" in told.output


def test_the_legend_is_there_where_something_was_not_told(tmp_path: Path) -> None:
    (sample,) = settings("no-sketch", 1).keep(tmp_path).every
    recorded(tmp_path, sample, True)  # and not measured
    told = CliRunner().invoke(app, ["study", "--report", str(tmp_path)])
    assert "?: unknown on this machine" in told.output
    (sample.folder(tmp_path) / "speed.json").write_text('{"ratio": 1.2}')
    told = CliRunner().invoke(app, ["study", "--report", str(tmp_path)])
    assert "?" not in told.output


def test_another_study_in_the_same_folder_is_refused_and_more_of_the_same_is_not(
    tmp_path: Path,
) -> None:
    settings().keep(tmp_path)
    grown = settings("tl", 2, OTHER).keep(tmp_path)
    assert [o.name for o in grown.operators] == ["small", "other"]
    assert [way.name for way in grown.ways] == ["no-sketch", "tl"]
    with pytest.raises(OtherStudy, match="model was m and is n"):
        replace(settings(), model="n").keep(tmp_path)
    other = operators.Operator("small", make_spec("gqa"))
    with pytest.raises(OtherStudy, match="small was another operator"):
        settings("tl", 1, other).keep(tmp_path)
    told = CliRunner().invoke(app, arguments(tmp_path, "http://127.0.0.1:9/v1"))
    assert told.exit_code == 2
    said = " ".join(told.output.replace("│", " ").split())  # typer puts a frame around it
    assert "has another study: its last was cpu and is verdict" in said


# --- trouble ----------------------------------------------------------------------------------


def test_a_sample_without_an_answer_stays_open_and_the_others_go_on(tmp_path: Path) -> None:
    wanted = settings(samples=2)
    heard, asked = studied(tmp_path, wanted, status(401, "no such key"), say(NONSENSE))
    assert asked == 2
    assert "small, no-sketch, sample 1: open: " in heard.ended[0]
    assert "no code came out right" in heard.ended[1]
    assert report.make(tmp_path).open == 1
    assert "Unfinished samples: 1." in (tmp_path / "study.md").read_text()
    told = CliRunner().invoke(app, ["study", "--report", str(tmp_path)])
    assert told.exit_code == 2
    _, asked = studied(tmp_path, wanted, say(NONSENSE))
    assert asked == 1
    assert report.make(tmp_path).open == 0


@pytest.mark.parametrize("trouble", [status(401, "no such key"), status(429, retry_after=1000)])
@pytest.mark.slow
def test_a_server_that_goes_away_after_a_wrong_attempt_leaves_the_sample_open(
    trouble: Answer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    terms = replace(TERMS, budget=Budget(attempts=2))
    monkeypatch.setattr(sys.modules[__name__], "TERMS", terms)
    wanted = settings()
    heard, asked = studied(tmp_path, wanted, say(fenced(WRONG_SCALE)), trouble)
    assert asked == 2
    assert "small, no-sketch, sample 1: open: " in heard.ended[0]
    heard, asked = studied(tmp_path, wanted, say(fenced(CODE)))
    assert asked == 1  # the first attempt is in the record
    assert heard.ended == ["small, no-sketch, sample 1: only checked"]


@pytest.mark.parametrize(
    ("codes", "is_open"),
    [
        (["FW821"], True),
        (["FW851"], True),
        (["FW905"], True),
        (["FW825"], False),  # by what the model wrote
        (["FW821", "FW822"], False),
    ],
)
def test_only_trouble_of_this_machine_excuses_a_sample_that_was_answered(
    codes: list[str], is_open: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def attempted(*_: Any) -> Any:
        raise Failed(*(Diagnostic(code, "it cannot be") for code in codes))

    monkeypatch.setattr(pytorch, "_attempted", attempted)
    heard, _ = studied(tmp_path, settings("pytorch"), python(RIGHT))
    assert (": open: it cannot be" in heard.ended[0]) is is_open


def test_a_mistake_of_ours_costs_one_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = session.take

    def broken(sample: Sample, *rest: Any) -> Any:
        if sample.number == 1:
            raise RuntimeError("who has thought of this?")
        return take(sample, *rest)

    monkeypatch.setattr(session, "take", broken)
    heard, asked = studied(tmp_path, settings(samples=2), say(NONSENSE))
    assert asked == 1
    assert "error in Flashwright" in heard.ended[0]
    assert "who has thought" in (tmp_path / "small/no-sketch/1/trouble.txt").read_text()


# --- the ways ---------------------------------------------------------------------------------


def test_the_direct_way_has_a_contract_without_tl() -> None:
    agreed = direct.without_tl(contract(direct._program(SPEC, CARD), CARD, "plain"))
    assert not re.search(r"\b(BN|Mma|Warps|Stages)\b", agreed.header + agreed.notes)
    assert "constexpr int BM = 128;  // queries of a block" in agreed.header
    own = "constexpr int BN = 8;\n"
    source = agreed.header.replace("struct Params", f"{own}struct Params") + "}\n"
    assert bound(agreed, source).threads == agreed.plan.threads
    with pytest.raises(Failed, match="FW827"):
        bound(agreed, source.replace("BM = 128", "BM = 64"))


RIGHT = "import torch\n\ndef attention(Q, K, V):\n    return Q, Q\n"
LAZY = RIGHT.replace("return Q", "return torch.nn.functional.scaled_dot_product_attention(Q, K, V)")


def python(text: str) -> Answer:
    return say(f"```python\n{text}```\n")


def test_a_pytorch_function_is_not_judged_where_there_is_no_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none() -> None:
        raise Failed(Diagnostic("FW851", "no GPU"))

    monkeypatch.setattr(pytorch, "need_torch", none)
    replies = python(RIGHT), python(LAZY), python("def attention(:\n")
    heard, asked = studied(tmp_path, settings("pytorch", 3), *replies)
    assert asked == 3
    assert "FW870" in heard.ended[1]
    assert "FW857" in heard.ended[2]
    report.make(tmp_path)
    levels = rows(tmp_path)["small pytorch"]["levels"]
    assert levels == {"right": {"passed": 0, "failed": 2, "unknown": 1, "pass_at": []}}
    assert (tmp_path / "small/pytorch/1/attention.py").read_text() == RIGHT


def test_a_pytorch_function_that_the_judge_rejects_is_sent_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = iter([(offence("wrong", "O is off"),), ()])

    def judged(candidate: Any, spec: Any, **rest: Any) -> Verdict:
        assert rest["libraries"]
        assert candidate.untrusted
        return Verdict("it", "a GPU", "sm_80", spec, 1, (), offences=next(found))

    monkeypatch.setattr(pytorch, "need_torch", lambda: None)
    monkeypatch.setattr(pytorch, "judge", judged)
    monkeypatch.setattr(sys.modules[__name__], "TERMS", replace(TERMS, budget=Budget(attempts=2)))
    _, asked = studied(tmp_path, settings("pytorch"), python(RIGHT), python(RIGHT))
    assert asked == 2
    report.make(tmp_path)
    row = rows(tmp_path)["small pytorch"]
    assert row["levels"]["right"]["pass_at"] == [1.0]
    assert row["right"] == {"gpu": 1, "emulated": 0}
    assert row["attempts"] == 2


def goes_on(root: Path, wanted: Settings, checks: Sequence[session.GpuCheck]) -> Heard:
    """A study that has nothing to ask any more, on a machine with a GPU."""
    heard = Heard()
    with serve([]) as server:
        asked = partial(connect, "m", server.url, env={})
        session.study(wanted, TERMS, asked, root, InLockstep(), CPU, heard, checks)
    return heard


def raced(us: float, **peers: float) -> race.RaceResult:
    """A race at two lengths, at the second of which peers take twice as long."""
    times = {speed.KERNEL: {n: race.RaceTime(us * 1e-6, 0.001, 1.0) for n in (1024, 4096)}}
    for name, took in peers.items():
        each = {1024: took * 1e-6, 4096: 2 * took * 1e-6}
        times[name] = {n: race.RaceTime(seconds, 0.001, 1.0) for n, seconds in each.items()}
    return race.RaceResult(times)


def test_a_kernel_that_is_right_on_a_gpu_is_timed_once_beside_the_best_peer_of_each_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = settings("tl", 1).keep(tmp_path)
    (sample,) = wanted.every
    recorded(tmp_path, sample, True)
    folder = sample.folder(tmp_path)
    (folder / "kernel.cubin").write_bytes(b"1")
    (folder / "spec.toml").write_text(specs.dump(SPEC))
    races = []

    def timed(spec: Any, contestants: Sequence[Any]) -> race.RaceResult:
        races.append([c.name for c in contestants])
        return raced(20.0, flash=30.0, efficient=90.0)

    watch = partial(Stopwatch, race=timed, card=lambda: H200)
    monkeypatch.setattr(speed, "Stopwatch", watch)
    heard = goes_on(tmp_path, wanted, [speed.time_sample])
    assert goes_on(tmp_path, wanted, [speed.time_sample]).ended == []
    assert len(races) == 1
    assert "naive" not in " ".join(races[0])
    expected = math.sqrt(1.5 * 3)
    assert heard.ended == [f"{sample}: {expected:.2f} times as fast as the best peer"]
    assert speed.ratio(folder) == pytest.approx(expected)
    (row,) = funnel.rows(wanted, tmp_path)
    assert row.fast == {1.0: 1.0, 1.5: 1.0}
    assert row.speed == pytest.approx(expected)
    report.make(tmp_path)
    assert f"| {expected:.2f} |" in (tmp_path / "study.md").read_text()


def test_one_that_no_peer_does_or_that_cannot_be_timed_has_no_speed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = settings("tl", 2).keep(tmp_path)
    for sample in wanted.every:
        recorded(tmp_path, sample, True)
        (sample.folder(tmp_path) / "kernel.cubin").write_bytes(b"1")
        (sample.folder(tmp_path) / "spec.toml").write_text(specs.dump(SPEC))
    found = iter([raced(20.0), race.RaceResult(lost={speed.KERNEL: "it hangs"})])
    watch = partial(Stopwatch, race=lambda spec, those: next(found), card=lambda: H200)
    monkeypatch.setattr(speed, "Stopwatch", watch)
    heard = goes_on(tmp_path, wanted, [speed.time_sample])
    assert "no peer supports this operator" in heard.ended[0]
    assert "it hangs" in heard.ended[1]
    (row,) = funnel.rows(wanted, tmp_path)
    assert row.fast is None
    assert row.speed is None


def test_without_a_gpu_nothing_can_be_judged_and_that_is_said(tmp_path: Path) -> None:
    settings("pytorch", 1).keep(tmp_path)
    told = CliRunner().invoke(app, ["study", "--judge", str(tmp_path)])
    assert told.exit_code == 2
    assert "FW851" in told.output


@pytest.mark.parametrize("right", [True, False])
def test_what_was_made_without_a_gpu_is_judged_where_there_is_one(
    right: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = settings("pytorch", 1)
    function = "def attention(q, k, v):\n    return v\n"
    answer = say(f"```python\n{function}```")
    studied(tmp_path, wanted, answer)
    (row,) = funnel.rows(wanted, tmp_path)
    assert row.levels["right"].unknown == 1
    candidates = []

    def judge(candidate: Candidate, spec: Any, **more: Any) -> Verdict:
        candidates.append(Path(candidate.where).read_text())
        assert more["libraries"]
        assert candidate.untrusted
        offences = () if right else (offence("wrong", "not attention"),)
        return Verdict("it", "H200", "sm_90", spec, 1, (), offences=offences)

    monkeypatch.setattr(judged, "judge", judge)
    assert goes_on(tmp_path, wanted, [judged.judge_sample]).ended == []  # no GPU here
    monkeypatch.setattr(judged, "card_here", lambda: H200)
    session.check_on_gpu(wanted, tmp_path, InLockstep(), CPU, Heard(), [judged.judge_sample])
    goes_on(tmp_path, wanted, [judged.judge_sample])
    assert candidates == [function]
    (row,) = funnel.rows(wanted, tmp_path)
    assert row.levels["right"].passed == right
    assert row.levels["right"].failed == (not right)
    assert row.kinds == ({"gpu": 1} if right else {})


# --- what is asked for, and what is shown -----------------------------------------------------


def test_the_bar_names_the_sample_that_is_looked_at_and_names_it_once(tmp_path: Path) -> None:
    wanted = settings("tl", 2).keep(tmp_path)
    for sample in wanted.every:
        recorded(tmp_path, sample, True)

    def look(folder: Path, progress: Callable[[str], None]) -> None:
        progress("judging it")

    shown: list[tuple[int, int, str]] = []
    screen = _StudyProgress(lambda *bar: shown.append(bar))
    unasked = partial(connect, "m", "http://127.0.0.1:9/v1", env={})
    session.study(wanted, TERMS, unasked, tmp_path, InLockstep(), CPU, screen, [look])
    assert shown == [
        (0, 2, "small, tl, sample 1"),
        (0, 2, "small, tl, sample 1: judging it"),
        (1, 2, "small, tl, sample 2"),
        (1, 2, "small, tl, sample 2: judging it"),
    ]
    before, shown[:] = [*shown], []
    session.check_on_gpu(wanted, tmp_path, InLockstep(), CPU, screen, [look])
    assert shown == before


@pytest.mark.parametrize("columns", [100, 120])
def test_names_of_operators_are_not_broken_where_there_is_room(
    columns: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TTY_COMPATIBLE", "1")  # rich takes what is captured for a terminal
    long = operators.Operator("gqa-window-sinks" + "-and-more" * (columns > 100), SPEC)
    wanted = settings("tl,no-sketch,direct,pytorch", 3, long).keep(tmp_path)
    for sample in wanted.every:
        recorded(tmp_path, sample, True, 1.2)
    _show(report.make(tmp_path))
    head, *lines = capsys.readouterr().out.splitlines()[1:]
    assert "pass@3" in head
    assert all(len(line) <= columns for line in lines)
    for way in wanted.ways:
        assert any({long.name, way.name} <= {*line.split()} for line in lines)


def test_operators_are_variants_or_those_of_a_file(tmp_path: Path) -> None:
    assert [o.name for o in operators.chosen("MHA, gqa")] == ["mha", "gqa"]
    file = tmp_path / "some.toml"
    file.write_text('[long]\nvariant = "gqa"\ncausal = true\n\n[mqa]\n')
    long, mqa = operators.chosen(str(file))
    assert (long.name, long.spec) == ("long", make_spec("gqa", causal=True))
    assert mqa.spec == make_spec("mqa")


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ('["../x"]\nvariant = "mha"\n', "FW903"),
        ('[a]\nvariant = "mha"\nreference = "x.py"\n', "FW903"),
        ('[a]\nvariant = "mha"\nsize = 3\n', "FW903"),
        ('[a]\nvariant = "mha"\n[A]\nvariant = "mha"\n', "FW903"),
        ('[a]\nvariant = "mhaa"\n', "FW902"),
        ('[a]\nvariant = "mha"\nheads = -1\n', "FW901"),
        ('variant = "mha"\n', "FW903"),
        ("[a\n", "FW903"),
    ],
)
def test_operators_that_cannot_be_are_refused(text: str, code: str, tmp_path: Path) -> None:
    file = tmp_path / "some.toml"
    file.write_text(text)
    with pytest.raises(Failed, match=code):
        operators.chosen(str(file))


def test_the_page_is_whole_and_escapes_what_it_is_told(tmp_path: Path) -> None:
    name = "<script>alert(1)</script>"
    wanted = replace(settings("tl,direct", 1), model=name).keep(tmp_path)
    recorded(tmp_path, Sample(SMALL, WAYS["tl"], 1), True)
    report.make(tmp_path)
    text = (tmp_path / "study.html").read_text()
    assert name not in text
    assert "&lt;script&gt;" in text
    assert "http" not in text.replace('http-equiv="Content', "")
    (shown,) = page.drawings(funnel.rows(wanted, tmp_path))
    assert "tl: sketch valid 100%" in shown[1]
    assert "direct" not in shown[1]  # nothing is known of it


BODY = """
  int const head = blockIdx.y, batch = blockIdx.z;
  int const row = blockIdx.x * BM + threadIdx.x;
  if (row >= p.q_len) return;
  int const seen = min(p.kv_len, row + p.kv_len - p.q_len + 1);
  float acc[HeadDim], q[HeadDim];
  for (int d = 0; d < HeadDim; ++d) {
    acc[d] = 0;
    q[d] = static_cast<float>(*p.Q.at(batch, head, row, d)) * Scale;
  }
  float most = -1e30f, sum = 0;
  for (int k = 0; k < seen; ++k) {
    float s = 0;
    for (int d = 0; d < HeadDim; ++d) s += q[d] * static_cast<float>(*p.K.at(batch, head, k, d));
    float const now = fmaxf(most, s), drop = __expf(most - now), weight = __expf(s - now);
    sum = sum * drop + weight;
    most = now;
    for (int d = 0; d < HeadDim; ++d) {
      acc[d] = acc[d] * drop + weight * static_cast<float>(*p.V.at(batch, head, k, d));
    }
  }
  if (p.O.data) {
    for (int d = 0; d < HeadDim; ++d) {
      *p.O.at(batch, head, row, d) = static_cast<fw::fp16>(sum > 0 ? acc[d] / sum : 0);
    }
  }
  if (p.LSE.data) *p.LSE.at(batch, head, row) = sum > 0 ? most + __logf(sum) : -INFINITY;
}
"""


@pytest.mark.slow
def test_cuda_without_tl_is_compiled_and_judged(tmp_path: Path) -> None:
    agreed = direct.without_tl(contract(direct._program(SPEC, CARD), CARD, "plain"))
    threads = agreed.header.replace(f"Threads = {agreed.plan.threads}", "Threads = BM")
    right = threads.rstrip() + BODY
    wrong = right.replace("row + p.kv_len - p.q_len + 1", "row + 1")
    sources = (right.replace("float acc[", "flaot acc["), wrong, right)
    replies = [say(f"Step by step.\n```cuda\n{source}```\n") for source in sources]
    terms = replace(TERMS, budget=Budget(attempts=3), last="verdict")
    wanted = Settings.of("m", terms, (SMALL,), chosen_ways("direct"), 1).keep(tmp_path)
    with serve(replies) as server:
        asked = partial(connect, "m", server.url, env={})
        session.study(wanted, terms, asked, tmp_path, InLockstep(), CPU, Heard())
    assert len(server.requests) == 3
    assert "TL" not in server.requests[1].text
    report.make(tmp_path)
    row = rows(tmp_path)["small direct"]
    assert row["levels"]["right"]["passed"] == 1
    assert row["attempts"] == 3
    assert not (tmp_path / "small/direct/1/code.tl").exists()


@pytest.mark.slow
def test_a_sample_without_a_sketch_can_be_replayed_and_one_without_tl_cannot(
    tmp_path: Path,
) -> None:
    answers = say(fenced(CODE)), say("no"), say("no")
    studied(tmp_path, settings("no-sketch,direct,pytorch"), *answers)
    again = replay(tmp_path / "small/no-sketch/1", tmp_path / "again", Nobody(), last="cpu")
    assert again.same, again.lines
    assert not [line for line in again.lines if "prompts" in line]
    for way in ("direct", "pytorch"):
        with pytest.raises(Failed, match=f"FW915: .*{way}.* cannot be replayed"):
            replay(tmp_path / "small" / way / "1", tmp_path / way, Nobody())
