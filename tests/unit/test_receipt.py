"""Receipts: numbers that still hold, that do not, and that cannot be checked here."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flashwright import gpu as gpus
from flashwright.author.builtin.author import write_code, write_sketch
from flashwright.build import driver
from flashwright.cli.main import app
from flashwright.cli.receipt import exit_code, in_words, table
from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.measure import kernels, receipt
from flashwright.measure.journal import RECORDS
from flashwright.measure.kernels import Made
from flashwright.measure.receipt import Finding, Parts, check, numbers
from flashwright.measure.records import OURS
from flashwright.spec import AttentionSpec
from tests.unit.measure_fakes import H200, MS, Behaviour, World, peer, small, verdict
from tests.unit.test_measure_tables import results_of

CELLS = small(512, 1024)
SPEC = CELLS[0].spec
NAMES = [cell.name for cell in CELLS]
ENVIRONMENT = {"flashwright": "0.1.0", "translator": "abc", "nvcc": "13.0"}


@functools.cache
def made() -> Made:
    """A kernel whose translation is the real one."""
    code = write_code(write_sketch(SPEC), SPEC, gpus.find("a100")).code
    one = kernels.from_tl(code, SPEC, "a100", None)
    return replace(one, files={**one.files, "kernel.cubin": b"cubin"})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A benchmark in which we take 1 ms at 512, and 2 ms at 1024."""
    times = {OURS: 1 * MS, "flash": 2 * MS, "naive": 9 * MS, "gone": 1.5 * MS}
    found = results_of(None, CELLS, times, ("flash", "naive", "gone"))
    assert found.run is not None
    run = found.run.model_copy(update={"environment": ENVIRONMENT})
    kernel = made().record({"ok": True, "seed": 1, "offences": []}, {})
    path = tmp_path / RECORDS
    records = [run, kernel, *found.numbers.values()]
    path.write_text("".join(record.model_dump_json() + "\n" for record in records))
    return path


def change(file: Path, record: str, edit: Callable[[dict[str, Any]], object]) -> None:
    """Change the lines of one kind."""
    told = [json.loads(line) for line in file.read_text().splitlines()]
    for one in told:
        if one["record"] == record:
            edit(one)
    file.write_text("".join(json.dumps(one) + "\n" for one in told))


def times(ours: float = 1 * MS, flash: float = 2 * MS) -> World:
    def of(seconds: float) -> Behaviour:
        return Behaviour(lambda problem, cold: seconds * problem.length / 512)

    return World({OURS: of(ours), "flash": of(flash)})


def parts(world: World | None = None, **more: Any) -> Parts:
    def build(tl: str, spec: AttentionSpec, gpu: str, card: driver.Card) -> Made:
        assert (tl, spec, gpu) == (made().files["code.tl"], SPEC, "a100")
        return made()

    known = {name: peer(name) for name in ("flash", "naive")}
    told: dict[str, Any] = {
        "card": H200,
        "tools": (world or times()).tools(),
        "build": build,
        "judge": lambda candidate, spec: verdict(),
        "peers": lambda: known,
        "environment": lambda: ENVIRONMENT,
    }
    return Parts(**{**told, **more})


def checked(file: Path, tmp_path: Path, given: Parts, **more: Any) -> list[Finding]:
    return list(check(file, numbers(file), tmp_path / "built", given, **more))


def test_a_number_that_is_still_so_holds(file: Path, tmp_path: Path) -> None:
    world = times(1.02 * MS, 2.02 * MS)
    found = checked(file, tmp_path, parts(world))
    assert [(f.cell, f.status, f.why) for f in found] == [(n, "holds", ()) for n in NAMES]
    first = found[0]
    assert first.then == 1 * MS
    assert first.now == pytest.approx(1.02 * MS, rel=0.01)
    assert first.peer == "flash"  # `gone` was faster, and is not here now
    assert first.ratio_then == 2.0
    assert first.ratio_now == pytest.approx(2.02 / 1.02)
    assert exit_code(found) == 0
    # One process for all cells of a kernel, and only the peer that counts.
    assert sorted(event[1] for event in world.asked("start")) == ["flash", OURS]


@pytest.mark.parametrize(("seconds", "words"), [(1.1 * MS, "more time"), (0.9 * MS, "less time")])
def test_a_time_that_has_changed_differs(
    seconds: float, words: str, file: Path, tmp_path: Path
) -> None:
    found = checked(file, tmp_path, parts(times(seconds)))
    assert {f.status for f in found} == {"differs"}
    assert words in found[0].why[0]
    assert exit_code(found) == 1
    within = checked(file, tmp_path, parts(times(seconds)), within=0.15)
    assert {f.status for f in within} == {"holds"}


def test_a_changed_time_in_the_file_differs(file: Path, tmp_path: Path) -> None:
    def faster(one: dict[str, Any]) -> None:
        if one["cell"] == NAMES[1] and one["who"] == OURS:
            one["seconds"] /= 2

    change(file, "number", faster)
    assert [f.status for f in checked(file, tmp_path, parts())] == ["holds", "differs"]


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda k: k.update(tl=k["tl"] + "// more\n"), "the tl in the file is not that"),
        (lambda k: k.update(source=k["source"] + "\n"), "the source in the file is not that"),
        (lambda k: k["hashes"].update(tl="0" * 64), "the tl in the file is not that"),
        (lambda k: k["spec"].update(causal=False), "its spec is not what its name says"),
    ],
    ids=["tl", "source", "digest", "spec"],
)
def test_a_kernel_that_was_tampered_with_differs_without_a_gpu_too(
    edit: Any, words: str, file: Path, tmp_path: Path
) -> None:
    change(file, "kernel", edit)
    for given in (parts(), Parts(None, "there is no GPU", environment=lambda: ENVIRONMENT)):
        found = checked(file, tmp_path, given)
        assert {f.status for f in found} == {"differs"}
        assert words in found[0].why[0]


def another_source(kernel: dict[str, Any]) -> None:
    from flashwright.files import sha256

    kernel["source"] += "// of another translator\n"
    kernel["hashes"]["source"] = sha256(kernel["source"])


def test_another_source_is_told_as_the_translators(file: Path, tmp_path: Path) -> None:
    change(file, "kernel", another_source)
    found = checked(file, tmp_path, parts())
    assert {f.status for f in found} == {"differs"}
    assert found[0].why == ("the same translator makes another source of its TL",)
    newer = {**ENVIRONMENT, "translator": "def", "flashwright": "0.2.0"}
    found = checked(file, tmp_path, parts(environment=lambda: newer))
    assert {f.status for f in found} == {"holds"}
    assert found[0].why == ("another translator: 0.1.0 (abc) then, 0.2.0 (def) now",)


def test_another_cubin_is_told_with_its_compiler(file: Path, tmp_path: Path) -> None:
    change(file, "kernel", lambda k: k["hashes"].update(cubin="1" * 64))
    found = checked(file, tmp_path, parts())
    assert {f.status for f in found} == {"holds"}
    assert "the cubin differs, by the same nvcc 13.0" in found[0].why[0]
    newer = {**ENVIRONMENT, "nvcc": "13.1"}
    found = checked(file, tmp_path, parts(environment=lambda: newer))
    assert found[0].why == ("the cubin differs: nvcc 13.0 then, 13.1 now",)


def test_what_the_judge_now_rejects_differs_and_is_not_measured(file: Path, tmp_path: Path) -> None:
    world = times()
    found = checked(file, tmp_path, parts(world, judge=lambda c, s: verdict("race", "wrong")))
    assert {f.status for f in found} == {"differs"}
    assert found[0].why == ("the judge now rejects it: race, wrong",)
    assert not world.log


def test_what_ends_now_differs(file: Path, tmp_path: Path) -> None:
    world = times()
    world.behaviours[OURS].ends = lambda what, p, n: "hang" if what == "turn" else None
    found = checked(file, tmp_path, parts(world))
    assert found[0].status == "differs"
    assert found[0].why == ("it has no time now: hang: at turn",)


def test_another_card_tells_the_ratio_only(file: Path, tmp_path: Path) -> None:
    other = driver.Card(0, "NVIDIA A100-SXM4-80GB", (8, 0))
    found = checked(file, tmp_path, parts(times(4 * MS, 8 * MS), card=other))
    assert {f.status for f in found} == {"unchecked"}
    assert "NVIDIA H200 then, NVIDIA A100-SXM4-80GB now" in found[0].why[0]
    assert (found[0].ratio_then, found[0].ratio_now) == (2.0, pytest.approx(2.0))
    assert exit_code(found) == 2


@pytest.mark.parametrize(
    ("why", "status"), [("FW821: there is no nvcc", "unchecked"), ("FW823: it spills", "differs")]
)
def test_what_cannot_be_built(why: str, status: str, file: Path, tmp_path: Path) -> None:
    found = checked(file, tmp_path, parts(build=lambda *given: replace(made(), why=why)))
    assert {f.status for f in found} == {status}
    assert why in found[0].why[0]


def test_what_cannot_be_judged_is_not_checked(file: Path, tmp_path: Path) -> None:
    def judge(candidate: Any, spec: Any) -> Any:
        raise Failed(Diagnostic("FW851", "no GPU"))

    assert {f.status for f in checked(file, tmp_path, parts(judge=judge))} == {"unchecked"}


def test_without_a_peer_of_then_the_time_alone_is_told(file: Path, tmp_path: Path) -> None:
    found = checked(file, tmp_path, parts(peers=dict))
    assert [(f.status, f.peer, f.ratio_now) for f in found] == [("holds", None, None)] * 2


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda k: k.update(tl=""), "its TL is not in the file"),
        (lambda k: k.update(name="other"), "no record of its kernel"),
        (lambda k: k.update(gpu="unheard of"), "cannot be translated here"),
        (lambda k: k["spec"].update(heads=0), "its spec: heads"),
        (lambda k: k["spec"].update(reference="mine.py"), "the reference"),
    ],
    ids=["tl", "kernel", "gpu", "spec", "reference"],
)
def test_what_the_file_lacks_is_said(edit: Any, words: str, file: Path, tmp_path: Path) -> None:
    change(file, "kernel", edit)
    found = checked(file, tmp_path, parts())
    assert {f.status for f in found} == {"unchecked"}
    assert words in found[0].why[0]


def test_some_of_the_numbers(file: Path) -> None:
    assert numbers(file) == NAMES
    assert numbers(file.parent, [NAMES[1]]) == [NAMES[1]]
    assert len(numbers(file, sample=1)) == 1
    assert numbers(file, sample=9) == NAMES
    with pytest.raises(Failed, match="no number of ours for 'mha d7'"):
        numbers(file, ["mha d7"])


@pytest.mark.parametrize("kept", ["run", "kernel"])
def test_a_file_without_numbers_has_nothing_to_check(kept: str, file: Path) -> None:
    lines = [x for x in file.read_text().splitlines() if json.loads(x)["record"] == kept]
    file.write_text("\n".join(lines) + "\n")
    with pytest.raises(Failed, match="nothing to check"):
        numbers(file)


# --- the command ------------------------------------------------------------------------------


def command(*args: str) -> Any:
    return CliRunner().invoke(app, ["receipt", "check", *args])


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def cards() -> Any:
        raise Failed(Diagnostic("FW851", "no GPU can be used here: none is plugged in"))

    monkeypatch.setattr(driver, "cards", cards)
    monkeypatch.setattr("flashwright.measure.machine.translator", lambda: "abc")


@pytest.mark.usefixtures("without_gpu")
def test_without_a_gpu_the_digests_are_checked_and_that_is_said(file: Path) -> None:
    done = command(str(file))
    assert done.exit_code == 2, done.output
    assert "No time was measured: no GPU can be used here: none is plugged in" in done.output
    assert "2 cannot be checked here" in done.output
    change(file, "kernel", lambda k: k.update(tl=k["tl"] + "// more\n"))
    assert command(str(file)).exit_code == 1


@pytest.mark.usefixtures("without_gpu")
def test_the_command_as_json(file: Path) -> None:
    done = command(str(file), "--json", "--cell", NAMES[0])
    told = json.loads(done.stdout)
    assert [one["cell"] for one in told["numbers"]] == [NAMES[0]]
    assert told["numbers"][0]["status"] == "unchecked"
    assert "the digests hold" in told["numbers"][0]["why"][0]


def test_with_a_gpu_the_command_says_what_holds(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "cards", lambda: (H200,))
    monkeypatch.setattr("flashwright.judge.judge.need_torch", lambda: None)
    monkeypatch.setattr(receipt, "Parts", lambda card: parts())
    done = command(str(file))
    assert done.exit_code == 0, done.output
    assert "2 hold" in done.output
    assert "1.002 ms" in done.output
    assert command(str(file), "--within", "0.0001").exit_code == 1


@pytest.mark.usefixtures("without_gpu")
@pytest.mark.parametrize(
    ("text", "words"), [("nonsense\n", "line 1 is no record"), (None, "No such file")]
)
def test_a_file_that_cannot_be_read_is_refused(
    text: str | None, words: str, tmp_path: Path
) -> None:
    path = tmp_path / "x.jsonl"
    if text is not None:
        path.write_text(text)
    done = command(str(path))
    assert done.exit_code == 2
    assert words in done.stderr


def test_the_table_has_a_line_for_each() -> None:
    found = [Finding("a", "holds"), Finding("b", "differs", ("slower",)), Finding("c", "unchecked")]
    assert table(found).row_count == 3
    assert in_words(found) == "1 holds, 1 differs, 1 cannot be checked here"
