"""`flashwright tune` as a command, and the table that it writes for the author."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from flashwright import gpu as gpus
from flashwright.author.builtin import tuned
from flashwright.author.builtin.author import workload
from flashwright.author.builtin.retile import name_of
from flashwright.author.builtin.variants import make_spec
from flashwright.build import driver
from flashwright.build.package import TUNING
from flashwright.measure.tune.state import Tuning
from flashwright.spec import AttentionSpec
from tests.unit.fleet_fakes import InLockstep
from tests.unit.measure_fakes import H200, Behaviour
from tests.unit.test_cli import Outcome
from tests.unit.tune_fakes import CROSSING, PRESENT, SHORT, SPEC, Bench, order, package


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return package(tmp_path / "package")


# --- the command ------------------------------------------------------------------------------


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "_look", lambda: ((), "the test says so"))


def test_without_a_gpu_it_says_so_and_lists_what_it_would_try(folder: Path, no_gpu: None) -> None:
    done = Outcome("tune", str(folder), "--gpu", "h200")
    assert done.code == 2
    assert "no GPU can be used here: the test says so" in done.err
    assert "--dry-run lists the candidates" in done.err
    listed = Outcome("tune", str(folder), "--gpu", "h200", "--dry-run", "--candidates", "6")
    assert listed.code == 0, listed.err
    rows = [line.split() for line in listed.out.splitlines() if "-s" in line]
    assert [row[0] for row in rows] == list("123456")
    assert rows[0][1:3] == [PRESENT, "(present)"]
    assert all(float(figure) > 0 for row in rows for figure in row[-6:])
    assert [p.name for p in folder.iterdir()] != [], "and nothing is written"
    assert not (folder / TUNING).exists()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--lengths", "512,many"), "not a list such as"),
        (("--gpu", "h300"), "h300"),
        (("--candidates", "0"), "candidates"),
    ],
)
def test_bad_usage(args: tuple[str, ...], words: str, folder: Path, no_gpu: None) -> None:
    done = Outcome("tune", str(folder), "--gpu", "h200", "--dry-run", *args)
    assert done.code == 2
    assert words in done.err
    assert "Traceback" not in done.err


def test_a_folder_that_cannot_be_tuned(folder: Path, no_gpu: None) -> None:
    options = ("--gpu", "h200", "--dry-run")
    two = Outcome("tune", str(folder), str(folder), *options)
    assert two.code == 2
    assert "one package at a time" in two.err
    (folder / "spec.toml").rename(folder / "other.txt")
    done = Outcome("tune", str(folder), *options)
    assert (done.code, "has no spec.toml" in done.err) == (2, True)
    (folder / "other.txt").rename(folder / "spec.toml")
    code = (folder / "code.tl").read_text().replace("BM", "Rows")
    (folder / "code.tl").write_text(code)
    done = Outcome("tune", str(folder), *options)
    assert (done.code, "has no params BM and BN" in done.err) == (2, True)
    shutil.rmtree(folder)
    assert Outcome("tune", str(folder), *options).code == 2


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--packed",), "this package is every key visible, packed sequences"),
        pytest.param(
            *(("--decode", "1", "--paged", "16"), "this package is every key visible, decode of 1"),
            marks=pytest.mark.slow,
        ),
        pytest.param(("--backward",), "measures one kernel", marks=pytest.mark.slow),
    ],
)
def test_a_package_that_is_not_tuned_says_why_and_what_to_do(
    options: tuple[str, ...], reason: str, tmp_path: Path, no_gpu: None
) -> None:
    folder = tmp_path / "other"
    made = Outcome(
        *("generate", "gqa", "--heads", "8", "--kv-heads", "2", *options, "--gpu", "h200"),
        *("--until", "code", "--out", str(folder)),
    )
    assert made.code == 0, made.err
    done = Outcome("tune", str(folder), "--gpu", "h200", "--dry-run")
    assert (done.code, "error[FW904]: `tune` measures" in done.err) == (2, True)
    assert reason in done.err
    assert "`flashwright build` the folder and `flashwright verify` it" in done.err


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Bench:
    """The command with a GPU that is not there."""
    bench = Bench(CROSSING)
    for offer in order(folder).offers():
        bench.world.behaviours[offer.name] = Behaviour(bench._seconds(offer.name))
    monkeypatch.setattr(driver, "_look", lambda: ((H200,), ""))
    monkeypatch.setattr("flashwright.fleet.engine.connect", lambda on: InLockstep())
    monkeypatch.setattr("flashwright.measure.tune.tune.TuneDependencies", bench.dependencies)
    return bench


COMMAND = ("--lengths", "512,1024,2048", "--candidates", "5")


def test_the_command_tells_what_it_found(folder: Path, fake: Bench) -> None:
    fake.why = {"128x128-s2-w8": "FW823: it spills"}
    done = Outcome("tune", str(folder), "--gpu", "h200", *COMMAND)
    assert done.code == 0, done.err
    row = next(line for line in done.out.splitlines() if line.strip().startswith(SHORT))
    assert row.split()[1:] == ["901.4*", "1802.7*", "4406.6"]
    assert f"up to 1024 keys: {SHORT}, in {SHORT}/" in done.out
    assert f"every other length: {PRESENT}, the package's own" in done.out
    assert "1.11, 1.11, 1.00" in done.out
    assert "128x128-s2-w8: FW823: it spills" in done.out
    assert f"{folder}: 2 classes, 5 candidates tried" in done.out


def test_the_command_is_interrupted_and_goes_on(folder: Path, fake: Bench) -> None:
    fake.world.interrupt = 60
    done = Outcome("tune", str(folder), "--gpu", "h200", *COMMAND)
    assert done.code == 130
    assert "--resume continues" in done.out
    fake.world.interrupt = None
    refused = Outcome("tune", str(folder), "--gpu", "h200", "--resume", "--lengths", "64")
    assert refused.code == 2
    assert "leave out --resume" in " ".join(refused.err.replace("│", " ").split())
    done = Outcome("tune", str(folder), "--gpu", "h200", "--resume", *COMMAND)
    assert done.code == 0, done.err
    assert len(fake.made) == 5, "each once"
    turns = len(fake.world.asked("turn"))
    done = Outcome("tune", str(folder), "--gpu", "h200", "--resume", *COMMAND)
    assert done.code == 0, "there is nothing left to do, and that is no error"
    assert len(fake.world.asked("turn")) == turns
    (folder / TUNING).write_text("{}")
    damaged = Outcome("tune", str(folder), "--gpu", "h200", "--resume", *COMMAND)
    assert (damaged.code, "is not a record of a tuning" in damaged.err) == (2, True)


# --- defaults ---------------------------------------------------------------------------------


def test_operators_are_tuned_one_after_another_and_the_table_has_the_evidence(
    fake: Bench, tmp_path: Path
) -> None:
    operators, table, out = tmp_path / "some.toml", tmp_path / "tuned.json", tmp_path / "out"
    spec = 'variant = "mha"\nheads = 32\nhead_dim = 64\ncausal = true\ndtype = "bf16"\n'
    operators.write_text(f"[one]\n{spec}[other]\n{spec.replace('true', 'false')}")
    wide = ("tune", "--defaults", str(operators), "--gpu", "h200", *COMMAND)
    wide = (*wide, "--out", str(out), "--write-defaults", str(table))
    done = Outcome(*wide)
    assert done.code == 0, done.err
    choices = tuned.read(table.read_text())
    assert {choice.causal for choice in choices} == {False, True}
    for choice in choices:
        (evidence,) = (tmp_path / "tuned").glob(f"{choice.evidence}.json")
        told = Tuning.model_validate_json(evidence.read_text())
        assert told.card == H200.name
        assert told.spec["causal"] == choice.causal
        assert choice.tried == len([one for one in told.tried if one.first])
        assert told.tried[0].final[512].where
    turns, before = len(fake.world.asked("turn")), table.read_bytes()
    assert Outcome(*wide).code == 0
    assert len(fake.world.asked("turn")) == turns, "the same command measures nothing again"
    assert table.read_bytes() == before
    assert len([*(tmp_path / "tuned").iterdir()]) == 2
    (out / "one" / "code.tl").write_text("// mine\n")
    refused = Outcome(*wide)
    assert (refused.code, "has another code.tl" in refused.err) == (2, True)
    missing = Outcome("tune", "--defaults", str(operators), "--gpu", "h200")
    assert (missing.code, "--out" in missing.err) == (2, True)


def test_what_a_tuning_found_becomes_a_line_of_the_authors_table(
    folder: Path, tmp_path: Path
) -> None:
    table = tmp_path / "tuned.json"
    done = Bench({SHORT: lambda n: 0.8, PRESENT: lambda n: 1.0}).run(order(folder))
    told = Outcome("tune", str(folder), "--write-defaults", str(table))
    assert told.code == 0, told.err
    (choice,) = tuned.read(table.read_text())
    assert choice.tiling.bm == 128
    assert choice.key == ("h200", ("bf16", "fp16"), 64, 64, SPEC.causal, ())
    reason = "measured on the H200: fastest of 5 tilings at 512 to 2048 keys"
    assert choice.reason == reason
    assert reason in told.out
    assert done.best == SHORT
    # A later tuning of the same work takes the line's place.
    Bench({PRESENT: lambda n: 0.5}).run(order(folder))
    assert Outcome("tune", str(folder), "--write-defaults", str(table)).code == 0
    (choice,) = tuned.read(table.read_text())
    assert choice.tiling.bm == 192


def test_the_classes_of_a_tuning_are_lines_of_the_table(folder: Path, tmp_path: Path) -> None:
    table = tmp_path / "tuned.json"
    Bench(CROSSING).run(order(folder))
    told = Outcome("tune", str(folder), "--write-defaults", str(table))
    assert told.code == 0, told.err
    short, main = tuned.read(table.read_text())
    assert (short.up_to, name_of(short.tiling)) == (1024, SHORT)
    assert (main.up_to, name_of(main.tiling)) == (None, PRESENT)
    assert short.reason == "measured on the H200: fastest of 5 tilings at 512 to 1024 keys"
    assert main.reason == "measured on the H200: fastest of 5 tilings at 2048 keys"
    assert f"{SHORT}, {short.reason}; {PRESENT}, {main.reason}" in told.out
    assert tuned.dump(tuned.read(table.read_text())) == table.read_text()
    # A later tuning takes the place of them all.
    Bench({PRESENT: lambda n: 0.5}).run(order(folder))
    assert Outcome("tune", str(folder), "--write-defaults", str(table)).code == 0
    (choice,) = tuned.read(table.read_text())
    assert name_of(choice.tiling) == PRESENT


def test_what_was_tuned_with_a_window_serves_windows_and_nothing_else(
    folder: Path, tmp_path: Path
) -> None:
    table = tmp_path / "tuned.json"
    done = Bench({SHORT: lambda n: 0.8, PRESENT: lambda n: 1.0}).run(order(folder))
    spec = {**done.spec, "causal": True, "window": 128}
    done.model_copy(update={"spec": spec}).save(folder)
    told = Outcome("tune", str(folder), "--write-defaults", str(table))
    assert told.code == 0, told.err
    (choice,) = tuned.read(table.read_text())
    assert choice.beyond == ("window",)
    gpu, window = gpus.find("h200"), workload(AttentionSpec.make(**spec))
    assert choice.serves(window, gpu)
    assert not choice.serves(replace(window, window=None), gpu)
    assert not choice.serves(replace(window, options=("softcap",)), gpu)
    assert not choice.serves(replace(window, sinks=4), gpu)


def test_what_the_table_cannot_have_is_left_out_with_its_reason(
    folder: Path, tmp_path: Path
) -> None:
    table = tmp_path / "tuned.json"
    done = Bench(CROSSING).run(order(folder))
    for change, words in (
        ({"complete": False}, "not measured to its end"),
        ({"card": "NVIDIA A100-SXM4-80GB"}, "kernels for h200, measured on NVIDIA A100"),
        ({"spec": make_spec("nsa-selected").model_dump(mode="json")}, "free tiles"),
    ):
        done.model_copy(update=change).save(folder)
        told = Outcome("tune", str(folder), "--write-defaults", str(table))
        assert told.code == 1
        assert words in told.out
    table.write_text("[]")
    bad = Outcome("tune", str(folder), "--write-defaults", str(table))
    assert (bad.code, "not a table of measured choices" in bad.err) == (2, True)
    (folder / TUNING).unlink()
    none = Outcome("tune", str(folder), "--write-defaults", str(tmp_path / "new.json"))
    assert (none.code, "has no tuning.json" in none.err) == (2, True)
