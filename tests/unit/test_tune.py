"""`flashwright tune`: what is tried, kept and told, and what survives an interruption."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from flashwright.author.builtin.variants import make_spec
from flashwright.build import classes
from flashwright.build.classes import CLASSES, OWN
from flashwright.files import sha256
from flashwright.judge.emulated import judge_emulated
from flashwright.lang.diagnostic import Failed
from flashwright.measure.tune import install as installing
from flashwright.measure.tune import select
from flashwright.measure.tune.state import TUNING, Tuning, read
from flashwright.measure.tune.tune import TIME_UP, WORK, OtherTuning
from tests.unit.emulated import needs_compilers
from tests.unit.measure_fakes import H200, MS, Behaviour, World
from tests.unit.tune_fakes import CROSSING, LENGTHS, PRESENT, SHORT, SPEC, Bench, order, package


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return package(tmp_path / "package")


def kept(done: Tuning) -> list[tuple[int | None, str, str]]:
    return [(k.up_to, k.kernel, k.tried) for k in done.kept]


# --- the choice -------------------------------------------------------------------------------


def test_each_class_of_lengths_gets_its_kernel(folder: Path) -> None:
    bench = Bench(CROSSING)
    done = bench.run(order(folder))
    assert kept(done) == [(1024, SHORT, SHORT), (None, OWN, PRESENT)]
    assert done.complete
    rules = classes.read(folder)
    assert [rules.pick(n) for n in (1, 1024, 1025)] == [SHORT, SHORT, OWN]
    assert (folder / SHORT / "kernel.cubin").read_bytes() == SHORT.encode()
    assert "param BM = 128" in (folder / SHORT / "code.tl").read_text()
    assert not (folder / WORK).exists()
    assert len(done.tried) == 5
    assert read(folder) == done, "the file has it all"


def test_all_that_was_tried_is_told_with_its_figures(folder: Path) -> None:
    done = Bench(CROSSING).run(order(folder))
    told = json.loads((folder / TUNING).read_text())
    assert told["card"] == H200.name
    assert told["environment"] == {"driver": "580", "nvcc": "13.0"}
    assert told["started"].startswith("2026-01-01")
    assert told["code"] == sha256((folder / "code.tl").read_text())
    one = done.by_name()[SHORT]
    assert one.params == {"BM": 128, "BN": 128, "Stages": 2, "Warps": 8, "QStages": 2}
    assert one.registers == 168
    assert one.final[512].seconds == pytest.approx(0.9 * MS, rel=0.01)
    assert one.final[2048].seconds == pytest.approx(4 * 1.1 * MS, rel=0.01)
    assert len(one.model_us) == len(LENGTHS)


def test_the_record_of_the_package_names_the_further_kernel(folder: Path) -> None:
    Bench(CROSSING).run(order(folder))
    artefacts = json.loads((folder / "build.json").read_text())["artefacts"]
    assert artefacts[CLASSES] == sha256((folder / CLASSES).read_bytes())
    assert artefacts[f"{SHORT}/build.json"] == sha256((folder / SHORT / "build.json").read_bytes())
    assert artefacts["kernel.cubin"] == sha256((folder / "kernel.cubin").read_bytes())


def test_a_gain_within_the_noise_changes_nothing(folder: Path) -> None:
    done = Bench({SHORT: lambda n: 0.985, PRESENT: lambda n: 1.0}).run(order(folder))
    assert kept(done) == [(None, OWN, PRESENT)]
    assert not (folder / CLASSES).exists()
    assert [p.name for p in folder.iterdir() if p.is_dir()] == []
    assert (folder / "kernel.cubin").read_bytes() == PRESENT.encode(), "its own is built"


def test_one_that_is_faster_everywhere_serves_everything(folder: Path) -> None:
    done = Bench({SHORT: lambda n: 0.8, PRESENT: lambda n: 1.0}).run(order(folder))
    assert kept(done) == [(None, SHORT, SHORT)]
    assert classes.read(folder).pick(10) == SHORT
    assert "192" in (folder / "code.tl").read_text(), "the package's own TL stays"


# --- failures ---------------------------------------------------------------------------------


def test_what_does_not_compile_or_is_wrong_is_told_and_not_timed(folder: Path) -> None:
    wanted = order(folder)
    names = [offer.name for offer in wanted.offers()]
    bench = Bench({n: (lambda n: 0.5) for n in names[1:]})
    bench.why = {names[1]: "FW823: 12 bytes spilled"}
    bench.offences = {names[2]: ("wrong",)}
    bench.source = {names[3]: "// the same\n", names[4]: "// the same\n"}
    done = bench.run(wanted)
    failures = {one.name: one.failure for one in done.tried}
    assert failures[names[1]] == "FW823: 12 bytes spilled"
    assert failures[names[2]] == "the judge rejects it: wrong"
    assert failures[names[4]] == f"the same kernel as {names[3]}"
    assert {e[1] for e in bench.world.asked("turn")} == {names[0], names[3]}
    assert names[1] not in bench.judged
    assert done.best == names[3]


def test_who_gives_wrong_answers_while_it_is_timed_is_out(folder: Path) -> None:
    bench = Bench(CROSSING)
    bench.world.behaviours[SHORT] = Behaviour(0.6 * MS, output=lambda exact, call: exact * 2)
    done = bench.run(order(folder))
    assert "the output of a timed call is wrong" in done.by_name()[SHORT].failure
    assert kept(done) == [(None, OWN, PRESENT)]


def test_who_is_out_does_not_make_the_others_be_timed_again(folder: Path) -> None:
    """Interrupted in the last round, with one that failed in the first and one in the last."""
    wanted = order(folder)
    names = [offer.name for offer in wanted.offers()]

    def bench() -> Bench:
        made = Bench({**CROSSING, **{n: (lambda n: 1.01) for n in names[2:]}})
        at = {
            names[3]: 1,
            names[4]: 4,
        }  # the problem at which it ends: of the first round, the last
        for name, number in at.items():
            made.world.behaviours[name] = Behaviour(
                made._seconds(name),
                ends=lambda what, problem, times, number=number: (
                    "crash" if what == "prepare" and times == number else None
                ),
            )
        return made

    whole = bench()
    expected = whole.run(order(package(folder.parent / "other")))
    assert {one.name for one in expected.tried if one.out} == {names[3], names[4]}
    first = bench()
    first.world.interrupt = len(whole.world.log) - 40
    with pytest.raises(KeyboardInterrupt):
        first.run(wanted)
    again = Bench(CROSSING)
    done = again.resumed(wanted)
    assert {one.name: one.first for one in done.tried} == {
        one.name: one.first for one in expected.tried
    }
    assert not (folder / WORK).exists()
    assert {event[2] for event in again.world.asked("prepare")} == {2048}, "one cell was left"


def test_a_package_whose_own_kernel_does_not_build_is_told_so(folder: Path) -> None:
    bench = Bench(CROSSING, why={PRESENT: "FW823: spills"})
    with pytest.raises(Failed, match=r"own kernel cannot be built: FW823: spills") as failed:
        bench.run(order(folder))
    assert failed.value.diagnostics[0].help
    assert not bench.world.asked("turn")


# --- rounds -----------------------------------------------------------------------------------


def test_only_the_best_have_a_long_round(folder: Path) -> None:
    bench = Bench({**CROSSING, "128x128-s2-w8": lambda n: 1.5})
    done = bench.run(order(folder, wanted=4))
    short, slow = done.by_name()[SHORT], done.by_name()["128x128-s2-w8"]
    assert set(slow.first) == set(LENGTHS)
    assert not slow.final
    assert short.final[512].samples > short.first[512].samples
    assert len(bench.listener.phases) == 4, bench.listener.phases


def test_groups_are_compared_by_the_one_that_is_in_all_of_them(folder: Path) -> None:
    """The clocks halve after the first group: nobody in the second is slower for that."""
    bench = Bench()
    wanted = order(folder, wanted=12)
    names = [offer.name for offer in wanted.offers()]
    fast = names[-1]

    def seconds(name: str) -> Any:
        relative = 0.7 if name == fast else 1.0
        late = 9  # processes of the first group, and one

        def of(problem: Any, cold: bool) -> float:
            slow = 2 if len(bench.world.asked("start")) >= late else 1
            return relative * slow * MS

        return of

    bench.world.behaviours = {n: Behaviour(seconds(n)) for n in names}
    done = bench.run(wanted)
    assert done.by_name()[fast].first[512].seconds == pytest.approx(0.7 * MS, rel=0.01)
    assert done.by_name()[names[9]].first[512].seconds == pytest.approx(1.0 * MS, rel=0.01)
    assert done.best == fast


# --- interruptions ----------------------------------------------------------------------------


@pytest.mark.parametrize("events", [2, 5, 40, 150, 220])
def test_ctrl_c_keeps_what_was_found_and_resume_goes_on(events: int, folder: Path) -> None:
    wanted = order(folder)
    bench = Bench(CROSSING, world=World(interrupt=events))
    with pytest.raises(KeyboardInterrupt):
        bench.run(wanted)
    assert not (folder / CLASSES).exists()
    before = read(folder)
    assert before is not None
    assert not before.complete
    again = Bench(CROSSING)
    done = again.resumed(wanted)
    assert kept(done) == [(1024, SHORT, SHORT), (None, OWN, PRESENT)]
    built = {one.name for one in before.tried if one.built}
    assert set(again.made) == {one.name for one in before.tried} - built
    assert not {one.name for one in before.tried if one.judged} & set(again.judged)
    for one in before.tried:
        for length in one.final:
            assert done.by_name()[one.name].final[length] == one.final[length]


def test_kernels_that_are_gone_are_made_again(folder: Path) -> None:
    wanted, bench = order(folder), Bench(CROSSING, world=World(interrupt=40))
    with pytest.raises(KeyboardInterrupt):
        bench.run(wanted)
    shutil.rmtree(folder / WORK)
    again = Bench(CROSSING)
    assert again.resumed(wanted).complete
    assert len(again.made) == 5


def test_rules_go_by_keys_where_these_are_not_the_length(tmp_path: Path) -> None:
    """Compressed attention: a key stands for several tokens."""
    spec = make_spec("nsa-compressed", dtype="bf16")
    folder = package(tmp_path, spec=spec)
    wanted = order(folder, 3, spec=spec)
    names = [offer.name for offer in wanted.offers()]
    bench = Bench({names[0]: lambda n: 1.0, names[1]: lambda n: 0.5 if n <= 1024 else 2.0})
    done = bench.run(wanted)
    assert kept(done) == [(spec.compressed_blocks(1024), names[1], names[1]), (None, OWN, names[0])]
    assert done.kept[0].lengths == [512, 1024]
    assert spec.compressed_blocks(1024) < 1024


def test_cells_that_are_measured_are_not_measured_again(folder: Path) -> None:
    wanted, bench = order(folder), Bench(CROSSING, world=World(interrupt=200))
    with pytest.raises(KeyboardInterrupt):
        bench.run(wanted)
    before = read(folder)
    assert before is not None
    whole = Bench(CROSSING)
    whole.run(order(package(folder.parent / "other")))
    again = Bench(CROSSING)
    again.resumed(wanted)
    turns = [len(b.world.asked("turn")) for b in (again, whole)]
    assert 0 < turns[0] < turns[1]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"lengths": (512, 1024)}, "lengths"),
        ({"wanted": 4}, "number of candidates"),
    ],
)
def test_resume_of_another_tuning_is_refused(
    change: dict[str, Any], words: str, folder: Path
) -> None:
    Bench(CROSSING).run(order(folder))
    with pytest.raises(OtherTuning, match=words):
        Bench(CROSSING).resumed(order(folder, **change))
    (folder / "code.tl").write_text("// mine\n" + (folder / "code.tl").read_text())
    with pytest.raises(OtherTuning, match=r"code\.tl"):
        Bench(CROSSING).resumed(order(folder))
    with pytest.raises(OtherTuning, match="environment"):
        Bench(CROSSING, environment={"driver": "999"}).resumed(order(folder))


def test_when_the_time_is_up_the_best_so_far_is_kept(folder: Path) -> None:
    everything = Bench(CROSSING)
    everything.run(order(package(folder.parent / "other")))
    half = everything.world.time / 60 / 2
    bench = Bench(CROSSING)
    done = bench.run(order(folder, minutes=half))
    assert not done.complete
    assert "the time was up" in done.note
    assert kept(done), "what was measured decides"
    assert (folder / WORK).is_dir()
    later = Bench(CROSSING).resumed(order(folder))
    assert later.complete
    assert kept(later) == [(1024, SHORT, SHORT), (None, OWN, PRESENT)]


def test_compilers_have_half_of_the_time(folder: Path) -> None:
    bench = Bench(CROSSING)

    class Slow(World):
        def event(self, *what: Any) -> None:
            super().event(*what)
            self.time += 60.0 if what[0] == "make" else 0.0

    bench.world = Slow()
    done = bench.run(order(folder, minutes=4.5))
    assert [one.failure == TIME_UP for one in done.tried] == [False, False, False, True, True]
    again = Bench(CROSSING)
    assert again.resumed(order(folder)).complete
    assert len(again.made) == 2, "those that were not compiled"


def test_an_interrupted_switch_leaves_the_package_as_it_was(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Bench(CROSSING).run(order(folder))
    before = (folder / CLASSES).read_text()

    def stop(path: Path, data: str | bytes) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(installing, "write", stop)
    other = {"128x128-s2-w8": lambda n: 0.5, PRESENT: lambda n: 1.0}
    with pytest.raises(KeyboardInterrupt):
        Bench(other).run(order(folder))
    assert (folder / CLASSES).read_text() == before
    assert classes.read(folder).others == (SHORT,)


def test_tuned_again_the_kernels_of_before_go_and_nobody_elses(folder: Path) -> None:
    mine = folder / "128x128-s2-w8"
    mine.mkdir()
    (mine / "notes.txt").write_text("mine")
    Bench(CROSSING).run(order(folder))
    done = Bench({"128x128-s2-w8": lambda n: 0.5, PRESENT: lambda n: 1.0}).run(order(folder))
    assert kept(done) == [(None, "128x128-s2-w8-2", "128x128-s2-w8")]
    assert not (folder / SHORT).exists()
    assert (mine / "notes.txt").read_text() == "mine"
    assert classes.read(folder).others == ("128x128-s2-w8-2",)


# --- choosing, by itself ----------------------------------------------------------------------


def test_a_kernel_goes_on_serving_where_it_is_as_good() -> None:
    times = {
        1: {"main": 1.0, "a": 0.90, "b": 0.91},
        2: {"main": 1.0, "a": 0.91, "b": 0.90},
        3: {"main": 1.0, "a": 1.5, "b": 0.99},
        4: {"main": 1.0, "a": 1.5, "b": 0.5},
    }
    chosen = select.serving(times, "main")
    assert chosen == {1: "a", 2: "a", 3: "main", 4: "b"}
    assert select.merged(chosen) == [([1, 2], "a"), ([3], "main"), ([4], "b")]
    assert select.merged({}) == []


def test_the_main_kernel_was_timed_everywhere() -> None:
    times = {1: {"present": 1.0, "new": 0.9, "once": 0.1}, 2: {"present": 1.0, "new": 0.97}}
    assert select.fastest(times, "present") == "new"
    assert select.fastest(times, "present", noise=0.1) == "present"
    assert select.fastest({1: {"a": 1.0}, 2: {"b": 1.0}}, "a") == ""
    assert select.fastest({}, "a") == ""


def test_finalists_are_near_the_best_somewhere() -> None:
    many = {f"k{n}": 1.0 + n / 1000 for n in range(20)}
    times = {1: {"present": 9.0, "far": 1.2, **many}, 2: {"present": 9.0, "far": 1.2, "k0": 1.0}}
    found = select.finalists(times, "present")
    assert found[0] == "present"
    assert len(found) == select.FINALISTS
    assert "far" not in found


@pytest.mark.slow
@needs_compilers
def test_real_kernels_are_compiled_side_by_side_and_both_are_right(folder: Path) -> None:
    """All but the GPU: the times are told, the kernels and their answers are real."""
    bench = Bench({SHORT: lambda n: 0.9 if n <= 512 else 1.1, PRESENT: lambda n: 1.0})
    bench.real = True
    done = bench.run(order(folder, wanted=2, lengths=(512, 1024), jobs=2))
    assert kept(done) == [(512, SHORT, SHORT), (None, OWN, PRESENT)]
    assert all(one.registers for one in done.tried)
    found = judge_emulated(folder, SPEC, seed=1, lengths=[(100, 100), (16, 513)])
    assert found.ok, found
