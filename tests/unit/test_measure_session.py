"""A whole run: what is on disk at any moment, Ctrl-C, a full disk, and going on."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flashwright.build import driver
from flashwright.cli.main import app
from flashwright.lang.diagnostic import Failed
from flashwright.measure import journal as journals
from flashwright.measure import session as sessions
from flashwright.measure.journal import RECORDS, Journal, put, read
from flashwright.measure.records import OURS, KernelRecord, NumberRecord, RunRecord
from flashwright.measure.results import Results
from flashwright.measure.session import BenchPlan, OtherRun, session
from flashwright.measure.timing import Rules
from tests.unit.measure_fakes import H200, Behaviour, Quiet, Workshop, World, peer, small

PEERS = (peer("flash"), peer("naive"))


def plan(**more: Any) -> BenchPlan:
    told: dict[str, Any] = {
        "title": "grid",
        "cells": tuple(small(512, 1024, variants=("mha", "mqa"))),
        "gpu": "a100",
        "peers": PEERS,
        "rules": Rules(seconds=0),
    }
    return BenchPlan(**{**told, **more})


def measure(
    folder: Path, world: World, resume: bool = False, put: Any = put, **more: Any
) -> tuple[Journal, Quiet]:
    workshop = more.pop("workshop", None) or Workshop(world)
    journal = Journal.resume(folder, put) if resume else Journal.begin(folder, put)[0]
    quiet = Quiet()
    wanted = plan(**more)
    session(wanted, H200, folder, journal, quiet, 11, dependencies=workshop.dependencies())
    return journal, quiet


# --- a run, whole -----------------------------------------------------------------------------


def test_the_file_has_the_run_the_kernels_and_all_numbers(tmp_path: Path) -> None:
    journal, quiet = measure(tmp_path, World())
    records = read(tmp_path / RECORDS)
    assert records == journal.records
    run, *rest = records
    assert isinstance(run, RunRecord)
    assert run.contestants == (OURS, "flash", "naive")
    assert run.matmul == {"bf16": 790.0}
    assert (run.card, run.translated_for, run.seed) == ("NVIDIA H200", "a100", 11)
    kernels = [r for r in rest if isinstance(r, KernelRecord)]
    kernels.sort(key=lambda kernel: kernel.name)  # they come as their verdicts do
    assert [k.name for k in kernels] == ["mha d64 causal", "mqa d64 causal"]
    assert set(kernels[0].hashes) == {"tl", "source", "cubin"}
    told = kernels[0].verdict
    assert (told["ok"], told["seed"], told["worst_ratio"]) == (True, 3, 0.5)
    assert told["cases"][0]["dims"] == {"q_len": 5, "kv_len": 7}
    assert "spec" not in told
    assert set(kernels[0].seconds) == {"author", "translate", "build", "verdict"}
    assert len([r for r in rest if isinstance(r, NumberRecord)]) == 4 * 3
    assert all(Results.of(records).complete(cell.name) for cell in plan().cells)
    assert quiet.phases == [
        "measuring the machine",
        "compiling for a100",
        "judging the kernels",
        "measuring",
    ]
    assert (quiet.cells[-1].done, quiet.cells[-1].total, quiet.cells[-1].left) == (4, 4, 0)
    package = tmp_path / "kernels" / "mha-d64-causal"
    assert {"code.tl", "kernel.cu", "kernel.cubin", "build.json"} <= set(os.listdir(package))


def test_a_kernel_that_is_rejected_or_not_there_has_no_number_and_the_peers_do(
    tmp_path: Path,
) -> None:
    world = World()
    workshop = Workshop(
        world,
        offences={"mha d64 causal": ("mask_ignored", "wrong")},
        why={"mqa d64 causal": "FW905: it does not fit"},
    )
    journal, _ = measure(tmp_path, world, workshop=workshop)
    results = Results.of(journal.records)
    absent = {cell: r for (cell, who), r in results.absent.items() if who == OURS}
    assert {(r.offence, r.why) for r in absent.values()} == {
        ("mask_ignored", "the judge rejects it: mask_ignored, wrong"),
        (None, "FW905: it does not fit"),
    }
    assert len([1 for _, who in results.numbers if who == "flash"]) == 4
    assert workshop.judged == ["mha d64 causal"]


# --- ctrl-c -----------------------------------------------------------------------------------


def events_of_a_run(tmp_path: Path) -> int:
    world = World()
    measure(tmp_path / "whole", world)
    return len(world.log)


def test_an_interruption_at_any_moment_loses_nothing_and_the_run_goes_on(tmp_path: Path) -> None:
    total = events_of_a_run(tmp_path)
    assert total > 150
    # The first events, where most different things happen, then some of the rest.
    moments = [*range(14), *range(14, total, 31), total - 1]
    for moment in moments:
        folder = tmp_path / str(moment)
        world = World(interrupt=moment)
        with pytest.raises(KeyboardInterrupt):
            measure(folder, world)
        kept = read(folder / RECORDS) if (folder / RECORDS).exists() else []
        before = Results.of(kept)
        again = World()
        journal, _ = measure(folder, again, resume=True)
        after = Results.of(journal.records)
        assert all(after.complete(cell.name) for cell in plan().cells), moment
        assert read(folder / RECORDS) == journal.records
        assert journal.records[: len(kept)] == kept, moment
        done = {cell.length for cell in plan().cells if before.complete(cell.name)}
        for (cell, who), number in before.numbers.items():
            if before.complete(cell):
                assert after.numbers[cell, who] is number or after.numbers[cell, who] == number
        if len(done) == 2 and len([c for c in plan().cells if before.complete(c.name)]) == 4:
            assert not again.asked("turn")
        assert len(again.asked("ceilings")) == (0 if before.run else 1)


def test_a_finished_cell_is_not_measured_again(tmp_path: Path) -> None:
    first = plan().cells[0]

    class Stop(Exception):
        pass

    class OneCell(Quiet):
        def cell(self, step: Any) -> None:
            if step.done == 1:
                raise Stop

    world = World()
    journal, _ = Journal.begin(tmp_path)
    with pytest.raises(Stop):
        session(
            plan(),
            H200,
            tmp_path,
            journal,
            OneCell(),
            1,
            dependencies=Workshop(world).dependencies(),
        )
    again = World()
    workshop = Workshop(again)
    measure(tmp_path, again, resume=True, workshop=workshop)
    assert len(again.asked("prepare", OURS)) == 3
    assert (first.length) not in [e[2] for e in again.asked("prepare", OURS)[:1]]
    assert workshop.judged == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"gpu": "h200"}, "translated for was a100 and is h200"),
        ({"layout": "bhsd"}, "the layout was bshd and is bhsd"),
        ({"peers": PEERS[:1]}, "other contestants: naive"),
        ({"cells": tuple(small(512))}, "other cells"),
        ({"rules": Rules(seconds=0, warm=True)}, "the l2 was cold and is both"),
        ({"cells": tuple(small(512, 1024, variants=("mha", "mqa"), dtype="fp16"))}, "the dtype"),
        ({"cells": tuple(small(512, 1024, variants=("mha", "mqa"), tokens=999))}, "the sizes"),
    ],
)
def test_going_on_with_other_settings_is_refused(
    change: dict[str, Any], words: str, tmp_path: Path
) -> None:
    measure(tmp_path, World())
    with pytest.raises(OtherRun, match=words):
        measure(tmp_path, World(), resume=True, **change)


def test_going_on_on_another_machine_or_with_other_kernels_is_refused(tmp_path: Path) -> None:
    measure(tmp_path, World())
    world = World()
    with pytest.raises(OtherRun, match="the driver was 580 and is 590"):
        measure(
            tmp_path,
            world,
            resume=True,
            workshop=Workshop(world, environment={"torch": "2.11", "driver": "590"}),
        )
    compiler = Workshop(world, environment={"torch": "2.11", "driver": "580", "nvcc": "13"})
    with pytest.raises(OtherRun, match="the nvcc was none and is 13"):
        measure(tmp_path, world, resume=True, workshop=compiler)
    with pytest.raises(OtherRun, match="mha d64 causal is not the one"):
        measure(tmp_path, world, resume=True, workshop=Workshop(world, tl="// another\n"))
    journal = Journal.resume(tmp_path)
    other = driver.Card(0, "NVIDIA A100-SXM4-80GB", (8, 0))
    with pytest.raises(OtherRun, match="the card was NVIDIA H200"):
        session(
            plan(),
            other,
            tmp_path,
            journal,
            Quiet(),
            1,
            dependencies=Workshop(world).dependencies(),
        )


# --- the disk ---------------------------------------------------------------------------------


class Disk:
    """Has no room from one line to another, and leaves half a line each time."""

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last, self.tries = first, last, 0

    def __call__(self, path: Path, at: int, data: bytes) -> None:
        self.tries += 1
        if self.first <= self.tries < self.last:
            put(path, at, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        put(path, at, data)


def test_a_full_disk_is_told_once_and_what_was_kept_is_written_later(tmp_path: Path) -> None:
    journal, quiet = measure(tmp_path, World(), put=Disk(4, 9))
    assert len(quiet.warnings) == 1
    assert "No space left" in quiet.warnings[0]
    assert journal.unsaved == 0
    assert journal.write_error == ""
    assert read(tmp_path / RECORDS) == journal.records


def test_what_never_got_onto_the_disk_is_counted_and_the_file_stays_readable(
    tmp_path: Path,
) -> None:
    journal, quiet = measure(tmp_path, World(), put=Disk(4, 10**9))
    assert len(quiet.warnings) == 1
    assert journal.unsaved == len(journal.records) - 3
    assert "cannot write" in journal.write_error
    assert read(tmp_path / RECORDS) == journal.records[:3]


@pytest.fixture
def little_room() -> Iterator[int]:
    """No file can grow beyond this many bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = 6000
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    yield size
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_the_same_with_a_real_disk(tmp_path: Path, little_room: int) -> None:
    journal, quiet = measure(tmp_path, World())
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    assert len(quiet.warnings) == 1
    assert "File too large" in journal.write_error
    on_disk = read(tmp_path / RECORDS)
    assert 0 < len(on_disk) < len(journal.records)
    assert on_disk == journal.records[: len(on_disk)]
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert journal.save()
    assert read(tmp_path / RECORDS) == journal.records


def test_half_a_line_at_the_end_is_left_out_and_overwritten(tmp_path: Path) -> None:
    journal, _ = measure(tmp_path, World())
    file = tmp_path / RECORDS
    whole = file.read_bytes()
    file.write_bytes(whole[:-40])
    assert read(file) == journal.records[:-1]
    assert read(tmp_path) == journal.records[:-1]
    again = Journal.resume(tmp_path)
    again.add(journal.records[-1])
    assert file.read_bytes() == whole


def test_nothing_of_half_a_long_line_is_left_behind_a_short_one(tmp_path: Path) -> None:
    journal, _ = measure(tmp_path, World())
    file, run, short = tmp_path / RECORDS, journal.records[0], journal.records[-1]
    file.write_bytes(f"{run.model_dump_json()}\n{'x' * 5000}".encode())
    again = Journal.resume(tmp_path)
    again.add(short)
    kept = again.records[-1]  # with the digest that it has behind another line
    assert kept == short.model_copy(update={"digest": kept.digest})
    assert file.read_text() == f"{run.model_dump_json()}\n{kept.model_dump_json()}\n"


def test_a_last_line_without_its_end_counts(tmp_path: Path) -> None:
    journal, _ = measure(tmp_path, World())
    file = tmp_path / RECORDS
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    assert read(file) == journal.records
    again = Journal.resume(tmp_path)
    again.add(journal.records[-1])
    assert read(file) == again.records
    assert again.records[:-1] == journal.records


@pytest.mark.parametrize("line", ['{"record": "number"}', "nonsense", '{"record": "other"}'])
def test_a_line_that_is_no_record_is_refused_with_its_place(line: str, tmp_path: Path) -> None:
    measure(tmp_path, World())
    file = tmp_path / RECORDS
    lines = file.read_text().splitlines()
    lines[3] = line
    file.write_text("\n".join(lines) + "\n")
    with pytest.raises(Failed) as failed:
        read(file)
    assert "line 4 is not a record" in failed.value.diagnostics[0].message


def test_an_earlier_file_is_kept(tmp_path: Path) -> None:
    measure(tmp_path, World())
    before = (tmp_path / RECORDS).read_bytes()
    _, kept = Journal.begin(tmp_path)
    assert kept == "records.jsonl.bak"
    assert (tmp_path / kept).read_bytes() == before


# --- the command ------------------------------------------------------------------------------


class Bench:
    """The command with everything but the GPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, world: World) -> None:
        self.folder, self.world = folder, world
        self.workshop = Workshop(world)
        monkeypatch.setattr(driver, "cards", lambda: (H200,))
        monkeypatch.setattr("flashwright.judge.judge.need_torch", lambda: None)
        monkeypatch.setattr(sessions, "SessionDependencies", self.workshop.dependencies)

    def __call__(self, *options: str) -> Any:
        grid = ["--variant", "mha", "--head-dim", "64", "--mask", "causal"]
        out = ["--out", str(self.folder), "--as", "a100", "--peers", "flash,naive"]
        return CliRunner().invoke(app, ["bench", *grid, *out, *options])


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Bench:
    return Bench(monkeypatch, tmp_path / "deep" / "out", World())


LENGTHS = ("--length", "512", "--length", "1024")


def test_the_command_measures_and_tells(bench: Bench) -> None:
    bench.world.behaviours["torch flash"] = Behaviour(2e-3)
    done = bench(*LENGTHS)
    assert done.exit_code == 0, done.output
    assert "On NVIDIA H200, translated for a100" in done.output
    assert "against torch flash: geometric mean 2.000 over 2 cells" in done.output
    assert "2 of 2 cells" in done.output
    assert "[2/2] mha d64 causal 1024: flashwright" in done.stderr
    line = next(x for x in done.stderr.splitlines() if x.startswith("[2/2] mha d64 causal 1024: "))
    assert re.search(r" in \d+\.\d s", line), line
    page = (bench.folder / "table.md").read_text()
    assert "| mha d64 causal | 512 |" in page
    assert "| torch flash | 2 | 2.000 | 2.000 |" in page


def test_ctrl_c_keeps_what_was_measured_and_resume_goes_on(bench: Bench) -> None:
    bench.world.interrupt = 90
    done = bench(*LENGTHS)
    assert done.exit_code == 130
    assert "1 of 2 cells; interrupted, --resume continues" in done.output
    assert "mha d64 causal" in (bench.folder / "table.md").read_text()
    bench.world.interrupt = None
    prepared = len(bench.world.asked("prepare", OURS))
    again = bench(*LENGTHS, "--resume")
    assert again.exit_code == 0, again.output
    assert "2 of 2 cells" in again.output
    assert len(bench.world.asked("prepare", OURS)) == prepared + 1


@pytest.mark.parametrize("moment", [0, 1, 2, 3])
def test_ctrl_c_before_anything_was_measured(moment: int, bench: Bench) -> None:
    bench.world.interrupt = moment
    done = bench(*LENGTHS)
    assert done.exit_code == 130
    assert "Nothing was measured" in done.output
    assert "0 of 2 cells" in done.output


def test_other_settings_are_refused_by_name(bench: Bench) -> None:
    assert bench(*LENGTHS).exit_code == 0
    done = bench("--length", "512", "--resume")
    assert done.exit_code == 2
    assert "other cells: mha d64 causal 1024" in " ".join(done.stderr.replace("│", "").split())


def test_a_full_disk_ends_in_a_code_and_a_rescued_file(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    full = Disk(3, 10**9)
    begin = Journal.begin
    monkeypatch.setattr(Journal, "begin", lambda folder: begin(folder, full))
    done = bench(*LENGTHS)
    assert done.exit_code == 2
    assert done.stderr.count("warning: cannot write") == 1
    assert "6 records are not in their file" in done.stderr
    assert "geometric mean" in done.output
    (rescued,) = tmp_path.glob("*.jsonl")
    assert len(read(rescued)) == 8
    assert len(read(bench.folder)) == 2


def test_a_kernel_without_a_number_is_the_exit_code(bench: Bench) -> None:
    bench.world.behaviours[OURS] = Behaviour(output=lambda exact, call: exact * 0)
    done = bench("--length", "512")
    assert done.exit_code == 1
    assert "flashwright at mha d64 causal 512: wrong: the output of a timed call" in done.output


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--variant", "flash"], "FW902"),
        (["--head-dim", "7"], "FW901"),
        (["--table", "3"], "there are 1, 2, 4, 6, 7, 8, 9, not 3"),
        (["--table", "1", "--length", "300"], "no cell of table 1"),
        (["--table", "1", "--heads", "3"], "has its own heads"),
        (["--table", "1", "--grid", "x.toml"], "do not go together"),
        (["--grid", "nowhere.toml"], "FW001"),
        (["--package", "nowhere"], "FW852"),
        (["--peers", "flahs"], "did you mean flash?"),
        (["--peer", "nothing.py:f"], "FW857"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    options: list[str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "cards", lambda: (H200,))
    monkeypatch.setattr("flashwright.judge.judge.need_torch", lambda: None)
    done = CliRunner().invoke(app, ["bench", *options])
    assert done.exit_code == 2
    assert words in " ".join(done.stderr.replace("│", "").split())


def test_a_package_of_ones_own_is_measured(bench: Bench, tmp_path: Path) -> None:
    from flashwright.author.builtin.variants import make_spec
    from flashwright.measure import kernels

    spec = make_spec("mha", heads=4, head_dim=64, causal=True, dtype="fp16", lse=False)
    from flashwright import gpu as gpus
    from flashwright.author.builtin.author import write_code, write_sketch

    code = write_code(write_sketch(spec), spec, gpus.find("a100")).code
    one = kernels.from_tl(code, spec, "a100", None)
    saved = kernels.save(one, tmp_path / "mine")
    done = bench("--package", saved.folder, "--length", "256", "--tokens", "512")
    assert done.exit_code == 0, done.output
    results = Results.of(read(bench.folder))
    (number,) = [n for n in results.numbers.values() if n.who == OURS]
    assert (number.cell, number.batch) == ("mha 4/4 d64 causal 256", 2)
    kernel = results.kernels["mha 4/4 d64 causal"]
    assert kernel.tl == code
    assert not bench.world.asked("make")
    Path(saved.folder, "build.json").write_text('{"registers": "x"}')
    done = bench("--package", saved.folder)
    assert (done.exit_code, "FW852" in done.output) == (2, True), done.output
    assert "build.json: registers: Input should be a valid integer" in " ".join(done.output.split())


def test_records_are_plain_json(bench: Bench) -> None:
    bench("--length", "512")
    lines = (bench.folder / journals.RECORDS).read_text().splitlines()
    told = [json.loads(line) for line in lines]
    assert [one["record"] for one in told] == ["run", "kernel", "number", "number", "number"]
