"""What a report says: never more than its files show, and the arithmetic behind it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flashwright.cli.main import app
from flashwright.files import sha256
from flashwright.generate import pipeline
from flashwright.generate.state import Run
from flashwright.gpu import find
from flashwright.judge import verdict
from flashwright.judge.oracle import Comparison
from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.measure.records import OURS, AbsentRecord
from flashwright.report import headline, ratios, reproduce
from flashwright.report.gather import NOT_RUN, gather
from flashwright.report.model import PaperFigure, Report
from flashwright.spec import AttentionSpec
from tests.unit import report_example as example

SPEC = example.SPECS["gqa d128 causal"]
NAME = "mha d64 causal"


def said(report: Report) -> str:
    """Everything that the headline claims, shown and not shown apart."""
    points = headline.verdicts(report)
    return "\n".join(line for p in points for line in (p.title, *p.shown))


def states(report: Report) -> list[str]:
    return [p.state for p in headline.verdicts(report)]


def bench(path: Path, *lines: Any, **changes: Any) -> Report:
    """A report of a run with these lines."""
    records = [example.run_record(**changes), example.kernel_record(NAME), *lines]
    return gather([example.write_records(path / "records.jsonl", records)])


# --- packages and verdicts --------------------------------------------------------------------


def test_a_kernel_that_no_gpu_has_run_is_not_called_right(tmp_path: Path) -> None:
    report = gather([example.write_package(tmp_path / "kernel")])
    (point,) = headline.verdicts(report)
    assert (point.state, point.title) == ("unjudged", "Not run on a GPU")
    assert point.shown == ("the TL code passes the checker and fits the GPU's budgets",)
    assert "not measured: every speed is an estimate" in point.not_shown
    assert "right" not in said(report).lower()
    assert headline.speeds(report) == []


def test_a_right_kernel_is_right_on_a_card_that_is_named(tmp_path: Path) -> None:
    report = gather([example.write_package(tmp_path / "kernel", example.verdict(SPEC))])
    (point,) = headline.verdicts(report)
    assert point.title == f"Right on {example.CARD}"
    assert "torch's flash backend" in point.shown[0]
    assert "6 checks passed, 1 could not run here" in point.shown


@pytest.mark.parametrize(
    "against",
    [
        {"ok": False},
        {"offences": [{"name": "replay", "code": "FW869", "message": "the same again"}]},
        {"checks": [{"name": "repeat", "question": "same bits?", "passed": False}]},
        {"cases": [{"ok": False, "relative_rms": 0.5, "reason": "every element is 0"}]},
    ],
    ids=["not ok", "an offence", "a failed check", "a wrong case"],
)
def test_whatever_speaks_against_a_kernel_rejects_it(tmp_path: Path, against: Any) -> None:
    told = example.verdict(SPEC, **against)
    (point,) = headline.verdicts(gather([example.write_package(tmp_path / "kernel", told)]))
    assert point.state == "rejected"


def test_a_rejection_says_the_offence_and_what_was_seen(tmp_path: Path) -> None:
    told = example.rejected(SPEC, "replay")
    report = gather([example.write_package(tmp_path / "kernel", told)])
    (point,) = headline.verdicts(report)
    assert point.title == "Rejected: replay"
    assert "the outputs of two calls with different inputs are the same" in point.shown[0]


def test_what_the_sanitizer_finds_rejects_a_kernel_too(tmp_path: Path) -> None:
    path = tmp_path / "verdict.json"
    found = [{"name": "data_race", "message": "two threads write there"}]
    path.write_text(json.dumps({**example.verdict(SPEC), "sanitizer": found}))
    (point,) = headline.verdicts(gather([path]))
    assert (point.state, point.title) == ("rejected", "Rejected: data_race")
    path.write_text(json.dumps({**example.verdict(SPEC), "sanitizer": []}))
    assert states(gather([path])) == ["right"]


def test_the_verdict_in_a_receipt_says_as_much(tmp_path: Path) -> None:
    for told, state in ((example.verdict(SPEC), "right"), (example.rejected(SPEC), "rejected")):
        kernel = example.kernel_record(NAME, verdict=example.receipt(told))
        records = [example.run_record(), kernel]
        report = gather([example.write_records(tmp_path / "records.jsonl", records)])
        (point,) = headline.verdicts(report)
        assert point.state == state
        expected = "agrees with fp64 on 84 outputs" if state == "right" else "replay"
        assert point.shown[0].startswith(expected)


def test_a_verdict_from_the_cpu_does_not_count_as_one_from_a_gpu(tmp_path: Path) -> None:
    path = tmp_path / "verdict.json"
    path.write_text(json.dumps(example.verdict(SPEC, device="cpu")))
    (point,) = headline.verdicts(gather([path]))
    assert (point.state, point.title) == ("cpu", "Right on the CPU, not run on a GPU")


def test_a_file_changed_after_the_verdict_takes_the_verdict_away(tmp_path: Path) -> None:
    for told in (example.verdict(SPEC), example.rejected(SPEC)):
        folder = example.write_package(tmp_path / "kernel", told)
        (folder / "kernel.cu").write_text("// something else\n")
        report = gather([folder])
        (point,) = headline.verdicts(report)
        assert point.state == "changed"
        assert "kernel.cu" in point.shown[0]
        assert "agrees" not in " ".join((point.title, *point.shown))
        assert (report.kernels[0].verdict, report.kernels[0].claimed) == (None, ())


def test_a_generate_that_stopped_says_why(tmp_path: Path) -> None:
    finding = {"code": "FW823", "message": "the kernel spills registers", "severity": "error"}
    folder = example.write_package(tmp_path / "kernel", ok=False, findings=[finding])
    (point,) = headline.verdicts(gather([folder]))
    assert (point.state, point.title) == ("rejected", "Rejected: FW823")
    assert point.shown == ("FW823: the kernel spills registers",)


def test_a_verdict_file_joins_the_package_it_is_about(tmp_path: Path) -> None:
    folder = example.write_package(tmp_path / "kernel")
    path = tmp_path / "verdict.json"
    spec = gather([folder]).kernels[0].spec
    assert spec is not None
    path.write_text(json.dumps(example.verdict(spec, candidate="elsewhere/kernel")))
    report = gather([folder, path])
    assert len(report.kernels) == 1
    (point,) = headline.verdicts(report)
    assert point.state == "right"
    assert "not run on a GPU" not in point.not_shown
    path.write_text(json.dumps(example.verdict(spec, candidate="elsewhere/other")))
    assert [k.state for k in gather([folder, path]).kernels] == ["unjudged", "right"]


def test_a_second_verdict_does_not_mend_a_rejection(tmp_path: Path) -> None:
    spec = gather([example.write_package(tmp_path / "kernel")]).kernels[0].spec
    assert spec is not None
    folder = example.write_package(tmp_path / "kernel", example.rejected(spec))
    path = tmp_path / "verdict.json"
    path.write_text(json.dumps(example.verdict(spec, candidate=str(folder))))
    assert states(gather([folder, path])) == ["rejected"]


class Nobody:
    """Watches a run and says nothing."""

    def begin(self, stage: pipeline.Stage, number: int, total: int) -> None:
        pass

    def progress(self, done: int, total: int, text: str) -> None:
        pass

    def end(self, stage: pipeline.Stage, run: Run) -> None:
        pass


def generate(spec: AttentionSpec, folder: Path, *without: str) -> Run:
    """A kernel for the H200, without these stages."""
    stages = tuple(stage for stage in pipeline.STAGES if stage.name not in without)
    return pipeline.generate(spec, find("h200"), folder, Nobody(), plan=stages)


def test_what_generate_writes_can_be_reported(tmp_path: Path) -> None:
    run = generate(SPEC, tmp_path / "kernel", "cpu", "build", "verdict")
    (kernel,) = gather([tmp_path / "kernel"]).kernels
    assert (kernel.state, kernel.changed) == ("unjudged", ())
    assert kernel.claimed == tuple(pipeline.claimed(run))
    assert kernel.not_claimed == tuple(pipeline.not_claimed(run))
    assert NOT_RUN in kernel.not_claimed
    assert run.translation is not None
    assert kernel.map == run.translation.map.lines
    assert kernel.ptxas["threads"] == run.translation.plan.threads


def test_what_the_judge_says_can_be_reported(tmp_path: Path) -> None:
    offence = verdict.Offence("replay", "the same again", Diagnostic("FW869", "the same again"))
    checks = (verdict.Check("repeat", "the same bits?", True, 3),)
    comparison = Comparison(True, "", 10, relative_rms=2e-3, relative_max=1e-2)
    case = verdict.Case({"q_len": 5, "kv_len": 7}, "normal", "O", comparison, 1.9e-3)
    picture = verdict.Picture({"q_len": 5}, ((1e-3, 2e-3),))
    for offences, state in (((), "right"), ((offence,), "rejected")):
        said = verdict.Verdict(
            "mine.py:f", "some GPU", "sm_90", SPEC, 7, (case,), checks, offences, picture=picture
        )
        path = tmp_path / "verdict.json"
        path.write_text(json.dumps(said.record()))
        report = gather([path])
        assert states(report) == [state]
        told = report.kernels[0].verdict
        assert told is not None
        assert (told.candidate, told.seed, told.cases[0].ratio) == ("mine.py:f", 7, case.ratio)
        kernel = example.kernel_record(NAME, verdict=example.receipt(said.record()))
        records = [example.run_record(), kernel]
        report = gather([example.write_records(tmp_path / "records.jsonl", records)])
        assert states(report) == [state]
        assert report.kernels[0].verdict is not None
        assert report.kernels[0].verdict.outputs == 1


# --- benchmarks -------------------------------------------------------------------------------


def test_the_ratio_is_of_times_and_its_mean_is_geometric(tmp_path: Path) -> None:
    report = bench(
        tmp_path,
        example.number(f"{NAME} 512", OURS, 200.0),
        example.number(f"{NAME} 512", "torch cuDNN", 400.0),
        example.number(f"{NAME} 1024", OURS, 300.0),
        example.number(f"{NAME} 1024", "torch cuDNN", 150.0),
        example.number(f"{NAME} 2048", OURS, 300.0),  # no peer here: it does not count
    )
    found = ratios.against(report.benches[0], "torch cuDNN")
    assert found is not None
    assert math.isclose(found.mean, 1.0)
    assert (found.cells, found.verdict) == (2, "level")
    assert math.isclose(found.worst, 0.5)
    assert found.where == f"{NAME} 512"
    assert ratios.against(report.benches[0], "torch flash") is None


def test_the_fastest_peer_is_another_one_in_each_cell(tmp_path: Path) -> None:
    rates = {512: (100.0, 200.0, 50.0), 1024: (100.0, 50.0, 400.0)}
    lines = [
        example.number(f"{NAME} {length}", who, rate)
        for length, three in rates.items()
        for who, rate in zip((OURS, "torch cuDNN", "torch flash"), three, strict=True)
    ]
    first, *rest = ratios.every(bench(tmp_path, *lines).benches[0])
    assert first.peer == ratios.BEST
    assert math.isclose(first.mean, math.sqrt(0.5 * 0.25))
    assert {r.peer for r in rest} == {"torch cuDNN", "torch flash"}


def test_a_slow_result_is_told_as_slow_with_its_peer_card_and_cells(tmp_path: Path) -> None:
    report = bench(
        tmp_path,
        example.number(f"{NAME} 512", OURS, 100.0),
        example.number(f"{NAME} 512", "torch cuDNN", 400.0),
    )
    (speed,) = headline.speeds(report)
    assert example.CARD in speed.title
    assert "a100" in speed.title  # for which the kernels were translated
    (found,) = speed.ratios
    text = headline.in_words(found)
    assert text.startswith("0.25 times as fast as torch cuDNN (slower)")
    assert "1 cell" in text
    assert f"at {NAME} 512" in text


def test_without_a_peer_no_speed_is_claimed(tmp_path: Path) -> None:
    (speed,) = headline.speeds(bench(tmp_path, example.number(f"{NAME} 512", OURS, 100.0)))
    assert speed.ratios == ()
    assert any("no ratio" in note for note in speed.notes)


def test_a_rejected_kernel_has_no_speed(tmp_path: Path) -> None:
    """Not even where a file has its times: a kernel caught once is caught everywhere."""
    lines = [
        example.number(f"{NAME} 512", OURS, 900.0),
        example.number(f"{NAME} 512", "torch cuDNN", 400.0),
    ]
    caught = AbsentRecord(
        run=example.RUN, cell=f"{NAME} 1024", who=OURS, why="twice the same", offence="replay"
    )
    report = bench(tmp_path, *lines, caught)
    assert states(report) == ["rejected"]
    assert headline.speeds(report)[0].ratios == ()
    assert "twice the same" in said(report)
    assert states(bench(tmp_path, *lines)) == ["right"]


def test_an_interrupted_run_says_that_it_is_not_finished(tmp_path: Path) -> None:
    path = example.write_records(tmp_path / "records.jsonl")
    whole = path.read_text().splitlines(keepends=True)
    path.write_text("".join(whole[:100]) + whole[100][:50])
    (speed,) = headline.speeds(gather([path]))
    assert any(note.startswith("not finished: ") for note in speed.notes)
    path.write_text("".join(whole))
    (speed,) = headline.speeds(gather([tmp_path]))
    assert not any("not finished" in note for note in speed.notes)


def test_the_paper_stands_beside_its_tables_only(tmp_path: Path) -> None:
    lines = [example.number(f"{NAME} 512", OURS, 100.0)]
    assert bench(tmp_path, *lines).benches[0].cells[0].paper is None
    told = bench(tmp_path, *lines, table=1).benches[0].cells[0].paper
    assert told == PaperFigure("A100", "TFLOPS", 107.4, pytest.approx(107.4 / 95.3), "cuDNN")


def test_a_package_and_its_benchmark_are_one_kernel(tmp_path: Path) -> None:
    folder = example.write_package(tmp_path / "kernel")
    (folder / "kernel.cubin").write_bytes(b"made up")
    files = {"tl": "code.tl", "source": "kernel.cu", "cubin": "kernel.cubin"}
    hashes = {n: sha256((folder / f).read_bytes()) for n, f in files.items()}
    name = "gqa d128 causal"
    for told, state in ((example.verdict(SPEC), "right"), (example.rejected(SPEC), "rejected")):
        records = [
            example.run_record(),
            example.kernel_record(name, hashes=hashes, verdict=told),
            example.number(f"{name} 512", OURS, 100.0),
        ]
        path = example.write_records(tmp_path / "records.jsonl", records)
        for given in ([folder, path], [path, folder]):
            report = gather(given)
            (kernel,) = report.kernels
            assert (kernel.name, kernel.state) == (name, state)
            assert kernel.folder == str(folder)
            assert report.benches[0].kernels == {name: name}


# --- what cannot be taken ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "place"),
    [
        ("verdict.json", "{", "line 1"),
        ("verdict.json", "[1]", "neither a verdict nor"),
        ("verdict.json", '{"ok": true, "cases": [{"ok": 1}]}', "cases.0.relative_rms"),
        ("verdict.json", '{"ok": true, "spec": {"variant": "x", "heads": 0}}', "heads"),
        ("records.jsonl", "", "no run"),
        ("records.jsonl", '{"record": "nothing"}\n', "line 1"),
        ("other.txt", '{"record": "absent", "run": 1}\n', "line 1"),
    ],
)
def test_a_bad_file_is_a_diagnostic_with_the_place(
    tmp_path: Path, name: str, text: str, place: str
) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(Failed) as failed:
        gather([path])
    (diagnostic,) = failed.value.diagnostics
    assert diagnostic.code in ("FW852", "FW001")
    assert str(path) in diagnostic.message
    assert place in diagnostic.message


@pytest.mark.parametrize("name", ["result.json", "kernel.map.json", "launch.json", "build.json"])
def test_a_bad_file_of_a_package_is_named(tmp_path: Path, name: str) -> None:
    folder = example.write_package(tmp_path / "kernel")
    (folder / name).write_text('{"threads": [], "registers": [], "lines": 1, "stages": 1}')
    with pytest.raises(Failed, match=name):
        gather([folder])


def test_an_empty_folder_and_a_missing_file_say_so(tmp_path: Path) -> None:
    with pytest.raises(Failed, match="nothing to report"):
        gather([tmp_path])
    with pytest.raises(Failed, match="No such file"):
        gather([tmp_path / "none.json"])


# --- the command ------------------------------------------------------------------------------


def run(*words: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["report", *map(str, words)])
    return done.exit_code, done.output


def test_the_page_goes_beside_what_it_is_about(tmp_path: Path) -> None:
    folder = example.write_package(tmp_path / "kernel")
    code, out = run(folder)
    assert (code, (folder / "report.html").is_file()) == (0, True)
    assert str(folder / "report.html") in out.replace("\n", "")
    path = example.write_records(tmp_path / "records.jsonl")
    assert run(path)[0] == 0
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")
    assert run(path)[0] == 0  # again: it is ours


def test_a_page_that_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    folder = example.write_package(tmp_path / "kernel")
    (folder / "report.html").write_text("my thesis")
    code, out = run(folder)
    assert (code, "FW001" in out) == (2, True)
    assert (folder / "report.html").read_text() == "my thesis"
    assert run(folder, "--out", tmp_path / "new" / "page.html")[0] == 0
    assert (tmp_path / "new" / "page.html").is_file()


def test_the_form_follows_from_the_name_or_is_asked_for(tmp_path: Path) -> None:
    folder = example.write_package(tmp_path / "kernel")
    assert run(folder, "--out", tmp_path / "page.md")[0] == 0
    assert (tmp_path / "page.md").read_text().startswith("# gqa d128 causal")
    assert run(folder, "--format", "markdown")[1].startswith("# gqa d128 causal")
    assert "Not run on a GPU" in run(folder, "--format", "terminal")[1]
    assert run(folder, "--format", "terminal", "--out", tmp_path / "page.txt")[0] == 0
    assert "Not run on a GPU" in (tmp_path / "page.txt").read_text()
    assert not (folder / "report.html").exists()


def test_bad_input_ends_with_2_and_no_traceback(tmp_path: Path) -> None:
    code, out = run(tmp_path / "none")
    assert code == 2
    assert "FW001" in out
    assert "Traceback" not in out


# --- how to get it again ----------------------------------------------------------------------


def test_the_commands_make_the_same_kernel_and_judge_it_alike(tmp_path: Path) -> None:
    folder = example.write_package(tmp_path / "a kernel", example.verdict(SPEC))
    steps = [s.command for s in reproduce.steps(gather([folder]))]
    assert steps[0] == (
        "flashwright generate gqa --gpu a100 --causal --head-dim 128 --heads 16 --kv-heads 4 "
        f"--dtype bf16 --out '{folder}'"
    )
    assert steps[1] == f"flashwright verify '{folder}' --seed 1234"


def test_the_benchmark_is_asked_for_as_it_was(tmp_path: Path) -> None:
    lines = [example.number(f"{NAME} 512", OURS, 100.0)]
    report = bench(tmp_path, *lines, table=1, contestants=(OURS, "torch flash", "my.py:mine"))
    steps = [s.command for s in reproduce.steps(report)]
    assert steps[0] == (
        "flashwright bench --table 1 --as a100 --dtype bf16 --layout bshd --l2 cold "
        "--peers flash --peer my.py:mine"
    )
    assert steps[1] == f"flashwright receipt check {tmp_path / 'records.jsonl'}"
    report = bench(tmp_path, *lines, title="grid", cells=(f"{NAME} 512",))
    steps = [s.command for s in reproduce.steps(report)]
    assert steps[0].endswith("--variant mha --head-dim 64 --length 512 --mask causal")


def test_a_kernel_that_the_author_did_not_write_is_built_from_its_tl(tmp_path: Path) -> None:
    spec = SPEC.model_copy(update={"variant": "mine", "scale": 0.5})
    folder = example.write_package(tmp_path / "kernel", spec=spec.model_dump(mode="json"))
    steps = [s.command for s in reproduce.steps(gather([folder]))]
    assert steps[0] == f"flashwright build {folder} --gpu a100"
