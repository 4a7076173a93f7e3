"""Receipts: numbers that still hold, that do not, and that cannot be checked here."""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from typer.testing import CliRunner

from flashwright import gpu as gpus
from flashwright.author.builtin.author import write_code, write_sketch
from flashwright.build import driver
from flashwright.cli.main import app
from flashwright.cli.receipt import exit_code, in_words, table
from flashwright.files import sha256
from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.measure import journal, kernels, receipt, seal
from flashwright.measure.ceilings import Ceilings
from flashwright.measure.fields import RULES, Field
from flashwright.measure.journal import RECORDS, Journal
from flashwright.measure.kernels import KernelBuild
from flashwright.measure.receipt import (
    ReceiptDependencies,
    ReceiptFinding,
    Tolerances,
    check,
    numbers,
)
from flashwright.measure.records import OURS, AbsentRecord, KernelRecord, NumberRecord, RunRecord
from flashwright.measure.session import BenchPlan, run_id, session
from flashwright.spec import AttentionSpec
from tests.share import some
from tests.unit.measure_fakes import (
    H200,
    MS,
    Behaviour,
    Quiet,
    Workshop,
    World,
    peer,
    small,
    verdict,
)

CELLS = small(512, 1024)
SPEC = CELLS[0].spec
NAMES = [cell.name for cell in CELLS]
ENVIRONMENT = {
    "flashwright": "0.1.0",
    "python": "3.12.3",
    "torch": "2.11",
    "driver": "580",
    "nvcc": "13.0",
    "translator": "abc",
    "flash": "1.0",
}
PEERS = ("flash", "naive", "unable")
RECORDED = Path(__file__).parents[2] / "docs" / "results" / "grid-h200"


@functools.cache
def made() -> KernelBuild:
    """A kernel whose translation is the real one."""
    code = write_code(write_sketch(SPEC), SPEC, gpus.find("a100")).code
    one = kernels.from_tl(code, SPEC, "a100", None)
    ptxas = {"registers": 200, "stack": 0}
    return replace(one, files={**one.files, "kernel.cubin": b"cubin"}, ptxas=ptxas, reasoning="so")


def times(ours: float = 1 * MS, flash: float = 2 * MS) -> World:
    """We take 1 ms at 512, and 2 ms at 1024; one peer does nothing."""

    def of(seconds: float) -> Behaviour:
        return Behaviour(lambda problem, cold: seconds * problem.length / 512)

    unable = Behaviour(unable="it has no such thing")
    return World({OURS: of(ours), "flash": of(flash), "naive": of(9 * MS), "unable": unable})


def judged(candidate: Any, spec: Any) -> Any:
    return replace(verdict(), candidate=candidate.title)


def rates(dtypes: Any) -> Ceilings:
    return Ceilings({"bf16": 790.0}, 4000.0)


def measured(folder: Path) -> Path:
    """The file of a benchmark: one kernel, two cells, four contestants."""
    plan = BenchPlan("grid", tuple(CELLS), "a100", tuple(peer(name) for name in PEERS))
    workshop = Workshop(times(), environment=ENVIRONMENT)
    dependencies = replace(workshop.dependencies(), make=lambda *asked: [made()], judge=judged)
    book, _ = Journal.begin(folder)
    session(plan, H200, folder, book, Quiet(), 11, dependencies=dependencies)
    return folder / RECORDS


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return measured(tmp_path)


Told = list[dict[str, Any]]


def lines(file: Path) -> Told:
    return [json.loads(line) for line in file.read_text().splitlines()]


def write(file: Path, told: Told) -> None:
    file.write_text("".join(json.dumps(one) + "\n" for one in told))


def sealed(told: Told) -> Told:
    """As a forger writes it who knows how digests are made: all of them are right again."""
    before = ""
    for one in told:
        before = one["digest"] = seal.digest(before, one)
    return told


def change(
    file: Path, record: str, edit: Callable[[dict[str, Any]], object], again: bool = False
) -> None:
    """Change the lines of one kind; `again`: and make all digests anew."""
    told = lines(file)
    for one in told:
        if one["record"] == record:
            edit(one)
    write(file, sealed(told) if again else told)


def dependencies(world: World | None = None, **more: Any) -> ReceiptDependencies:
    def build(tl: str, spec: AttentionSpec, gpu: str, card: driver.Card) -> KernelBuild:
        assert (tl, spec, gpu) == (made().files["code.tl"], SPEC, "a100")
        return made()

    known = {name: peer(name) for name in PEERS}
    told: dict[str, Any] = {
        "card": H200,
        "contest": (world or times()).dependencies(),
        "build": build,
        "judge": judged,
        "peers": lambda: known,
        "environment": lambda peers: ENVIRONMENT,
        "ceilings": rates,
    }
    return ReceiptDependencies(**{**told, **more})


def checked(
    file: Path, tmp_path: Path, given: ReceiptDependencies, **more: Any
) -> list[ReceiptFinding]:
    return list(check(file, numbers(file), tmp_path / "built", given, Tolerances(**more)))


def names(found: ReceiptFinding, status: str) -> set[str]:
    return {one.name for one in found.fields if one.status == status}


def reasons(found: ReceiptFinding, status: str = "unchecked") -> str:
    return "; ".join(one.why for one in found.fields if one.status == status)


def test_a_number_that_is_still_so_holds(file: Path, tmp_path: Path) -> None:
    world = times(1.02 * MS, 2.02 * MS)
    found = checked(file, tmp_path, dependencies(world))
    assert [(f.cell, f.status, f.why) for f in found] == [(n, "holds", ()) for n in NAMES]
    first = found[0]
    assert first.then == pytest.approx(1 * MS, rel=0.01)
    assert first.now == pytest.approx(1.02 * MS, rel=0.01)
    assert first.peer == "flash"
    assert first.ratio_then == pytest.approx(2.0)
    assert first.ratio_now == pytest.approx(2.02 / 1.02)
    assert not first.unchecked
    assert "run.started" in names(first, "told")
    assert exit_code(found) == 0
    # One process for all cells of a kernel.
    assert sorted(event[1] for event in world.asked("start")) == sorted((OURS, *PEERS))


@pytest.mark.parametrize("seconds", [1.1 * MS, 0.9 * MS])
def test_a_time_that_has_changed_does_not_hold(seconds: float, file: Path, tmp_path: Path) -> None:
    found = checked(file, tmp_path, dependencies(times(seconds, 2 * seconds)))
    assert {f.status for f in found} == {"differs"}
    assert {"number.seconds", "number.tflops"} <= names(found[0], "differs")
    assert f"recorded 0.0010015, found {seconds * 1.0015:.6g}" in found[0].why[0]
    assert exit_code(found) == 1
    within = checked(file, tmp_path, dependencies(times(seconds, 2 * seconds)), within=0.15)
    assert {f.status for f in within} == {"holds"}


def test_a_peer_that_has_changed_does_not_hold(file: Path, tmp_path: Path) -> None:
    found = checked(file, tmp_path, dependencies(times(flash=3 * MS)))
    assert {f.status for f in found} == {"differs"}
    assert names(found[0], "differs") == {
        "number.seconds (flash)",
        "number.tflops (flash)",
        "ratio (flash)",
    }


# --- forged fields ----------------------------------------------------------------------------

MODELS: dict[str, type[BaseModel]] = {
    "run": RunRecord,
    "kernel": KernelRecord,
    "number": NumberRecord,
    "absent": AbsentRecord,
}
Where = tuple[str, str, tuple[str, ...]]
"""The kind of a record, whose it is, and the path of a field in it."""


def test_every_field_of_every_record_has_a_rule() -> None:
    assert {kind: set(fields) for kind, fields in RULES.items()} == {
        kind: set(model.model_fields) for kind, model in MODELS.items()
    }


def test_the_page_on_receipts_has_the_rule_of_every_field() -> None:
    page = (RECORDED.parents[1] / "receipts.md").read_text()
    rows = [line.strip("| ").split("|") for line in page.splitlines() if line.startswith("| `")]
    told = {
        row[0].strip().strip("`"): [re.findall(r"`(\w+)`", column) for column in row[1:]]
        for row in rows
    }
    order = ("exact", "within", "record", "told")
    for kind, rules in RULES.items():
        found = {
            name: rule for rule, names in zip(order, told[kind], strict=True) for name in names
        }
        assert found == rules


def leaves() -> list[Where]:
    """Every field that the records have; of those with fields of their own, each of them."""
    found = []
    for kind, who in (("run", ""), ("kernel", ""), *(("number", w) for w in (OURS, "flash"))):
        found += [(kind, who, path) for path in _paths(kind, who)]
    return [*found, *(("absent", "unable", path) for path in _paths("absent", "unable"))]


def _paths(kind: str, who: str) -> Iterator[tuple[str, ...]]:
    told = _example(kind, who)
    assert set(told) == set(MODELS[kind].model_fields)
    for name, value in told.items():
        yield (name,)
        if isinstance(value, dict):
            yield from ((name, key) for key in value)


@functools.cache
def _written() -> str:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        return measured(Path(folder)).read_text()


def _example(kind: str, who: str) -> dict[str, Any]:
    every = [json.loads(line) for line in _written().splitlines()]
    return next(x for x in every if x["record"] == kind and x.get("who", "") == who)


def forged(name: str, value: Any) -> Any:
    """Another value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value * 3 + 1
    if isinstance(value, str):
        digest = len(value) == 64 and set(value) <= set("0123456789abcdef")
        return "bhsd" if name == "layout" else "0" * 64 if digest else f"{value}x"
    if isinstance(value, list):
        return value[:-1] or ["x"]
    if isinstance(value, dict):
        return {**value, "more": next(iter(value.values()), 1)}
    return "sparse" if name in ("offence", "branch", "reference") else 3


def forge(told: Told, where: Where) -> None:
    kind, who, (*outer, name) = where
    one = next(x for x in told if x["record"] == kind and x.get("who", "") == who)
    for key in outer:
        one = one[key]
    one[name] = forged(name, one[name])


def label(where: Where) -> str:
    return ".".join((*where[:2], *where[2])).replace("..", ".")


def outcome(
    file: Path, tmp_path: Path, given: ReceiptDependencies | None = None
) -> tuple[list[ReceiptFinding], str]:
    """What is found of the first numbers, or why the file is refused."""
    try:
        return list(check(file, numbers(file)[:2], tmp_path / "built", given or dependencies())), ""
    except Failed as failed:
        return [], str(failed)


@pytest.mark.parametrize("where", some(leaves(), 3), ids=label)
def test_a_forged_field_does_not_hold(where: Where, tmp_path: Path) -> None:
    told = [json.loads(line) for line in _written().splitlines()]
    forge(told, where)
    file = tmp_path / RECORDS
    write(file, told)
    found, refused = outcome(file, tmp_path)
    if refused:
        assert where[2][0] in refused
        return
    assert "differs" in {f.status for f in found}
    said = [one for f in found for one in f.differing]
    assert all(one.recorded != one.found or one.why for one in said)
    # A chain that is broken is said, whatever else is.
    assert any(one.name.startswith(f"{where[0]}.digest") for f in found for one in f.differing) or (
        where[2][0] in ("cell", "who", "record", "name")
    )


@pytest.mark.parametrize("where", some(leaves(), 3), ids=label)
def test_a_forged_field_under_new_digests_is_found_or_named(where: Where, tmp_path: Path) -> None:
    """A forger who makes every digest anew is caught by what is found again, or by other fields. A
    field that was seen once is never said to hold."""
    told = [json.loads(line) for line in _written().splitlines()]
    forge(told, where)
    kind, _, path = where
    if kind == "run" and path[0] != "id":
        own = {**told[0], "schema_version": 1, "record": "run"}
        told[0]["id"] = run_id(RunRecord.model_validate_json(json.dumps(own)))
        for one in told:
            if "run" in one:
                one["run"] = told[0]["id"]
    file = tmp_path / RECORDS
    write(file, sealed(told))
    found, refused = outcome(file, tmp_path)
    if refused:
        assert path[0] in refused
        return
    rule = RULES[kind][path[0]]
    name = ".".join((kind, *path))
    seen_once = rule == "told" or any(f.startswith(name) for f in names(found[0], "told"))
    own_version = path == ("environment", "flashwright") or path == ("environment", "translator")
    if path == ("digest",):  # the forger has made it right
        assert {f.status for f in found} == {"holds"}
    elif path == ("verdict",):  # one more thing that a verdict says
        assert "kernel.verdict.more" in names(found[0], "told")
    elif seen_once:
        assert not any(name in names(f, "holds") for f in found)
    elif path == ("environment",):  # one more version, of something that is not here
        assert {f.status for f in found} == {"part"}
    elif own_version:
        assert {f.status for f in found} == {"part"}
        assert name in names(found[0], "unchecked")
    else:
        assert "differs" in {f.status for f in found}


@pytest.mark.slow
def test_the_fields_of_a_recorded_run_cannot_be_forged_without_a_gpu(tmp_path: Path) -> None:
    """It has no digests: what follows from other fields is found all the same."""
    whole = (RECORDED / RECORDS).read_text().splitlines()
    kernel = "mha d64 full"
    cells = [f"{kernel} {length}" for length in (512, 1024)]
    given = ReceiptDependencies(None, "there is no GPU", environment=lambda peers: {})
    forgeries: list[tuple[int, str, Any]] = []
    for number, line in enumerate(whole):
        one = json.loads(line)
        if one["record"] == "run":
            free = ("record", "started", "clocks", "title", "copy_gbs")  # no other field tells
            forgeries += [(number, n, v) for n, v in one.items() if n not in free]
        elif one["record"] == "kernel" and one["name"] == kernel:
            own = ("name", "spec", "tl", "source", "hashes", "why")
            forgeries += [(number, name, one[name]) for name in own]
        elif one.get("cell") == cells[0]:
            fields = ("run", "cell", "kernel", "length", "batch", "who", "seconds", "tflops")
            forgeries += [(number, name, one[name]) for name in (*fields, "share", "gbs", "seed")]
    assert len(forgeries) > 50
    file = tmp_path / RECORDS
    for number, name, value in forgeries:
        one = json.loads(whole[number])
        one[name] = forged(name, value)
        if name == "hashes":
            one[name] = dict.fromkeys(value, "0" * 64)
        if name == "spec":
            one[name] = {**value, "scale": 0.5}
        file.write_text("\n".join([*whole[:number], json.dumps(one), *whole[number + 1 :]]) + "\n")
        found, refused = outcome(file, tmp_path, given)
        said = {f.status for f in found}
        assert name in refused if refused else "differs" in said, (name, one["record"])


def test_a_recorded_run_is_whole_and_the_missing_digests_are_said(tmp_path: Path) -> None:
    given = ReceiptDependencies(None, "there is no GPU", environment=lambda peers: {})
    assert len(numbers(RECORDED)) == 72
    found, _ = outcome(RECORDED, tmp_path, given)
    assert {f.status for f in found} == {"unchecked"}
    assert {"run.digest", "number.digest (FlexAttention)", "number.seconds"} <= names(
        found[0], "unchecked"
    )
    assert "the file has no digests" in reasons(found[0])


def test_a_line_that_is_taken_out_breaks_the_chain(file: Path, tmp_path: Path) -> None:
    told = [x for x in lines(file) if (x.get("cell"), x.get("who")) != (NAMES[0], "flash")]
    write(file, told)
    found = checked(file, tmp_path, dependencies())
    assert found[0].status == "differs"
    assert "number.digest (naive)" in names(found[0], "differs")
    write(file, sealed(told))
    found = checked(file, tmp_path, dependencies())
    assert [f.status for f in found] == ["differs", "holds"]
    assert names(found[0], "differs") == {"absent.who (flash)"}


def test_without_digests_nothing_holds_but_in_part(file: Path, tmp_path: Path) -> None:
    told = lines(file)
    for one in told:
        del one["digest"]
    write(file, told)
    found = checked(file, tmp_path, dependencies())
    assert {f.status for f in found} == {"part"}
    assert {"run.digest", "run.started", "number.digest"} <= names(found[0], "unchecked")
    assert exit_code(found) == 2


def test_a_file_without_digests_that_goes_on_vouches_for_what_was_there(
    file: Path, tmp_path: Path
) -> None:
    told = lines(file)
    for one in told[:4]:
        del one["digest"]
    write(file, told[:4])
    again = Journal.resume(tmp_path)
    again.add(AbsentRecord(run="run", cell=NAMES[1], who="naive", why="so"))
    assert [line.link.broken for line in journal.read_lines(file)] == [False] * 5
    change(file, "run", lambda run: run.update(started="2027"))
    assert [line.link.broken for line in journal.read_lines(file)] == [False] * 4 + [True]


def test_the_files_beside_a_record_are_held_against_its_digests(file: Path, tmp_path: Path) -> None:
    (tmp_path / "kernels" / "mha-d64-causal" / "kernel.cubin").write_bytes(b"another")
    found = checked(file, tmp_path, dependencies())
    assert {f.status for f in found} == {"differs"}
    assert "kernel.hashes.cubin" in names(found[0], "differs")


def test_a_cubin_is_compared_without_a_gpu_where_the_compiler_is_the_same(
    file: Path, tmp_path: Path
) -> None:
    given = replace(dependencies(), card=None, missing="there is no GPU")
    assert "kernel.hashes.cubin" in names(checked(file, tmp_path, given)[0], "holds")
    change(file, "kernel", lambda k: k["hashes"].update(cubin="1" * 64), again=True)
    (tmp_path / "kernels" / "mha-d64-causal" / "kernel.cubin").unlink()
    found = checked(file, tmp_path, given)
    assert {f.status for f in found} == {"differs"}
    assert names(found[0], "differs") == {"kernel.hashes.cubin"}


# --- what is read -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("record", "field", "value"),
    [
        ("number", "seconds", 0),
        ("number", "seconds", -1.0),
        ("number", "seconds", math.nan),
        ("number", "seconds", math.inf),
        ("number", "seconds", "fast"),
        ("number", "seconds", "0.001"),
        ("number", "seconds", None),
        ("number", "tflops", 0),
        ("number", "length", 0),
        ("number", "length", 10**30),
        ("number", "batch", 1.5),
        ("number", "samples", -1),
        ("number", "digest", "short"),
        ("number", "unheard_of", 1),
        ("kernel", "spec", {"scale": math.nan}),
        ("kernel", "spec", []),
        ("kernel", "verdict", {"ok": "yes"}),
        ("kernel", "verdict", {"ok": True, "offences": [1]}),
        ("kernel", "seconds", {"build": -1}),
        ("run", "schema_version", 2),
        ("run", "matmul", {"bf16": 0}),
        ("run", "layout", "other"),
        ("run", "contestants", "flashwright"),
    ],
)
def test_what_cannot_be_is_refused_with_its_file_and_field(
    record: str, field: str, value: Any, file: Path
) -> None:
    change(file, record, lambda one: one.update({field: value}))
    done = command(str(file))
    assert done.exit_code == 2, done.output
    said = " ".join(done.stderr.split())
    assert (
        f", line {1 if record == 'run' else 2 if record == 'kernel' else 3} is not a record" in said
    )
    assert f"{record}.{field}" in said
    assert "bug" not in said


@pytest.mark.parametrize("field", sorted(set(NumberRecord.model_fields) - {"digest"}))
def test_a_missing_field_is_refused_or_does_not_hold(
    field: str, file: Path, tmp_path: Path
) -> None:
    change(file, "number", lambda one: one.pop(field))
    found, refused = outcome(file, tmp_path)
    assert field in refused if refused else {f.status for f in found} == {"differs"}


def test_numbers_too_long_and_files_too_large_are_refused(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = file.read_text()
    file.write_text(told.replace('"spec":{', '"spec":{"more":' + "9" * 5000 + ",", 1))
    done = command(str(file))
    assert (done.exit_code, "is not a record" in done.stderr) == (2, True), done.output
    file.write_text(told.replace('"spec":{', '"spec":{"more":' + "[" * 5000 + "]" * 5000 + ",", 1))
    assert command(str(file)).exit_code == 2
    monkeypatch.setattr(journal, "MAX_BYTES", 1000)
    done = command(str(file))
    assert (done.exit_code, "is too large" in done.stderr) == (2, True)
    done = command("/dev/zero")
    assert (done.exit_code, "is too large" in done.stderr) == (2, True)


# --- kernels ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("edit", "field"),
    [
        (lambda k: k.update(tl=k["tl"] + "// more\n"), "kernel.tl"),
        (lambda k: k.update(source=k["source"] + "\n"), "kernel.source"),
        (lambda k: k["hashes"].update(tl="0" * 64), "kernel.hashes.tl"),
        (lambda k: k["spec"].update(causal=False), "kernel.spec"),
        (lambda k: k["spec"].update(heads=0), "kernel.spec"),
        (lambda k: k["spec"].update(tolerance=0.9), "run.settings.specs"),
    ],
    ids=["tl", "source", "digest", "spec", "bad spec", "tolerance"],
)
def test_a_kernel_that_was_tampered_with_does_not_hold_without_a_gpu_too(
    edit: Any, field: str, file: Path, tmp_path: Path
) -> None:
    change(file, "kernel", edit, again=True)
    without = ReceiptDependencies(None, "there is no GPU", environment=lambda peers: {})
    for given in (dependencies(), without):
        found = checked(file, tmp_path, given)
        assert {f.status for f in found} == {"differs"}
        assert field in names(found[0], "differs")


def another_source(kernel: dict[str, Any]) -> None:
    kernel["source"] += "// of another translator\n"
    kernel["hashes"]["source"] = sha256(kernel["source"])


def test_another_source_is_told_as_the_translators(file: Path, tmp_path: Path) -> None:
    change(file, "kernel", another_source, again=True)
    (tmp_path / "kernels" / "mha-d64-causal" / "kernel.cu").unlink()
    found = checked(file, tmp_path, dependencies())
    assert {f.status for f in found} == {"differs"}
    assert "the same translator makes different output from its TL" in found[0].why[0]
    newer = {**ENVIRONMENT, "translator": "def", "flashwright": "0.2.0"}
    found = checked(file, tmp_path, dependencies(environment=lambda peers: newer))
    assert {f.status for f in found} == {"part"}
    assert "another translator: 0.1.0 (abc) then, 0.2.0 (def) now" in reasons(found[0])
    assert {"kernel.source", "kernel.hashes.cubin"} <= names(found[0], "unchecked")


def test_other_versions_do_not_hold_unless_they_may_differ(file: Path, tmp_path: Path) -> None:
    newer = {**ENVIRONMENT, "nvcc": "13.1", "flash": "2.0"}
    given = dependencies(environment=lambda peers: newer)
    found = checked(file, tmp_path, given)
    assert {f.status for f in found} == {"differs"}
    assert names(found[0], "differs") == {"run.environment.nvcc", "run.environment.flash"}
    assert "run.environment.flash: recorded 1.0, found 2.0 (another version)" in found[0].why
    found = checked(file, tmp_path, given, versions=True)
    assert {f.status for f in found} == {"part"}
    assert "nvcc 13.0 then, 13.1 now" in reasons(found[0])


def test_what_the_judge_now_rejects_does_not_hold_and_is_not_measured(
    file: Path, tmp_path: Path
) -> None:
    world = times()
    found = checked(
        file, tmp_path, dependencies(world, judge=lambda c, s: verdict("race", "wrong"))
    )
    assert {f.status for f in found} == {"differs"}
    assert "the judge now rejects it: race, wrong" in found[0].why[0]
    assert not world.log


def test_what_ends_now_does_not_hold(file: Path, tmp_path: Path) -> None:
    world = times()
    world.behaviours[OURS].ends = lambda what, p, n: "hang" if what == "turn" else None
    found = checked(file, tmp_path, dependencies(world))
    assert found[0].status == "differs"
    assert "it has no time now: hang: at turn" in found[0].why[0]


def test_on_another_card_no_time_is_held(file: Path, tmp_path: Path) -> None:
    other = driver.Card(0, "NVIDIA A100-SXM4-80GB", (8, 0))
    found = checked(file, tmp_path, dependencies(times(4 * MS, 8 * MS), card=other))
    assert {f.status for f in found} == {"unchecked"}
    assert "another card is here: NVIDIA A100-SXM4-80GB" in reasons(found[0])
    assert "number.seconds" not in names(found[0], "holds")
    assert found[0].ratio_now == pytest.approx(2.0)
    assert exit_code(found) == 2


@pytest.mark.parametrize(
    ("why", "status"), [("FW821: there is no nvcc", "unchecked"), ("FW823: it spills", "differs")]
)
def test_what_cannot_be_built(why: str, status: str, file: Path, tmp_path: Path) -> None:
    found = checked(file, tmp_path, dependencies(build=lambda *given: replace(made(), why=why)))
    assert {f.status for f in found} == {status}
    assert why in reasons(found[0])


def test_what_cannot_be_judged_is_not_checked(file: Path, tmp_path: Path) -> None:
    def judge(candidate: Any, spec: Any) -> Any:
        raise Failed(Diagnostic("FW851", "no GPU"))

    assert {f.status for f in checked(file, tmp_path, dependencies(judge=judge))} == {"unchecked"}


def test_a_peer_that_is_not_here_is_named_and_never_held(file: Path, tmp_path: Path) -> None:
    gone = peer("flash", module="no_such_module")
    world = times()
    given = dependencies(world, peers=lambda: {"flash": gone, "naive": peer("naive")})
    found = checked(file, tmp_path, given)
    assert [(f.status, f.peer) for f in found] == [("part", "naive")] * 2
    named = names(found[0], "unchecked")
    assert {"number.seconds (flash)", "ratio (flash)", "absent.offence (unable)"} <= named
    assert "it is not installed here" in reasons(found[0])
    assert "no such peer is known here" in reasons(found[0])
    assert not {n for n in names(found[0], "holds") if n.startswith("ratio (flash)")}
    assert sorted(event[1] for event in world.asked("start")) == [OURS, "naive"]
    assert exit_code(found) == 2


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda k: k.update(tl="", source="", hashes={}), "its TL is not in the file"),
        (lambda k: k.update(name="other"), "no record of its kernel"),
        (lambda k: k.update(gpu="unheard of"), "cannot be translated here"),
        (lambda k: k["spec"].update(reference="mine.py"), "the reference"),
    ],
    ids=["tl", "kernel", "gpu", "reference"],
)
def test_what_the_file_lacks_is_said(edit: Any, words: str, file: Path, tmp_path: Path) -> None:
    change(file, "kernel", edit, again=True)
    found = checked(file, tmp_path, dependencies())
    assert not {f.status for f in found} & {"holds", "part"}
    assert words in reasons(found[0])


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
    assert f"[1/2] {NAMES[0]}: cannot be checked here (" in done.output
    change(file, "kernel", lambda k: k.update(tl=k["tl"] + "// more\n"))
    assert command(str(file)).exit_code == 1


@pytest.mark.usefixtures("without_gpu")
def test_the_command_as_json(file: Path) -> None:
    done = command(str(file), "--json", "--cell", NAMES[0])
    told = json.loads(done.stdout)
    assert [one["cell"] for one in told["numbers"]] == [NAMES[0]]
    assert told["numbers"][0]["status"] == "unchecked"
    fields = {one["name"]: one["status"] for one in told["numbers"][0]["fields"]}
    assert (fields["kernel.tl"], fields["number.seconds"]) == ("holds", "unchecked")


def test_with_a_gpu_the_command_says_what_holds(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "cards", lambda: (H200,))
    monkeypatch.setattr("flashwright.judge.judge.need_torch", lambda: None)
    monkeypatch.setattr(
        receipt, "ReceiptDependencies", lambda card: dependencies(times(1.001 * MS))
    )
    done = command(str(file))
    assert done.exit_code == 0, done.output
    assert "2 hold" in done.output
    assert "1.002 ms" in done.output
    assert "[0/2] measuring the machine" in done.stderr
    assert "measuring 512, beside flash, naive, unable" in done.stderr
    assert f"[2/2] {NAMES[1]}: holds (" in done.stderr
    assert "protected only by the digests: absent.why, kernel.reasoning" in done.output
    assert command(str(file), "--within", "0.0001").exit_code == 1


@pytest.mark.usefixtures("without_gpu")
@pytest.mark.parametrize(
    ("text", "words"), [("nonsense\n", "line 1 is not a record"), (None, "No such file")]
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
    slower = Field("number.seconds", "differs", 1.0, 2.0)
    missing = Field("number.seconds", "unchecked")
    found = [
        ReceiptFinding("a", now=1.0),
        ReceiptFinding("b", (slower,), now=2.0),
        ReceiptFinding("c", (missing,)),
        ReceiptFinding("d", (replace(missing, name="ratio (x)"),), now=1.0),
    ]
    assert table(found).row_count == 4
    said = "1 holds, 1 holds in part, 1 does not hold, 1 cannot be checked here"
    assert in_words(found) == said
