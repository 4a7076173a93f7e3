"""A benchmark's cells: the grid, the numbers, and what becomes of contestants that misbehave."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashwright.author.builtin.author import write_code, write_sketch
from flashwright.author.builtin.variants import make_spec
from flashwright.build.load import dim_sources
from flashwright.check.check import checked_program
from flashwright.gpu import GPUS
from flashwright.lang.parse import parse
from flashwright.lower.translate import translate
from flashwright.measure import machine
from flashwright.measure.bench import Contest, bench, cell_seed, problem_of
from flashwright.measure.ceilings import Ceilings, ceiling_of
from flashwright.measure.contest import Contestant, Missing
from flashwright.measure.grid import LENGTHS, Cell, Shape, cells, kernel_name, load, of_spec
from flashwright.measure.journal import Journal
from flashwright.measure.peers import flex_attention, registry, torch_flash
from flashwright.measure.peers.features import features, need, window_of
from flashwright.measure.records import OURS, AbsentRecord, NumberRecord
from flashwright.measure.tables import TABLES
from flashwright.measure.timing import Rules
from flashwright.sandbox.candidate import Candidate, Unable
from flashwright.sandbox.device import Cpu
from flashwright.sandbox.problem import TimedProblem
from flashwright.sandbox.worker import Worker
from flashwright.spec import AttentionSpec, BadSpec
from tests.share import some
from tests.unit.measure_fakes import MS, Behaviour, World, contestants, run_record, small

GRID = list(cells())
QUICK = Rules(seconds=0)


def measured(
    world: World, wanted: list[Cell], *peers: str, who: list[Contestant] | None = None, **run: Any
) -> dict[tuple[str, str], NumberRecord | AbsentRecord]:
    """All lines by cell and contestant."""
    every = who or contestants(*peers)
    record = run_record(wanted, *(c.name for c in every[1:]), **run)
    journal = Journal(Path("nowhere"), [record], put=lambda path, at, data: None)
    bench(record, wanted, every, journal, QUICK, world.dependencies())
    lines = [r for r in journal.records if isinstance(r, NumberRecord | AbsentRecord)]
    assert len(lines) == len(wanted) * len(every)
    return {(line.cell, line.who): line for line in lines}


def offences(lines: Iterable[NumberRecord | AbsentRecord]) -> list[str | None]:
    return [None if isinstance(line, NumberRecord) else line.offence or "unable" for line in lines]


# --- the grid ---------------------------------------------------------------------------------


def test_the_grid_is_the_papers() -> None:
    assert len(GRID) == 3 * 2 * 2 * 6
    assert {c.length * c.batch for c in GRID} == {16_384}
    assert {c.spec.heads * c.spec.head_dim for c in GRID} == {2048}
    assert {c.length for c in GRID} == set(LENGTHS)
    assert {c.spec.dtype for c in GRID} == {"bf16"}
    sharing = {(c.spec.variant, c.spec.heads // c.spec.kv_heads) for c in GRID}
    assert sharing == {("mha", 1), ("gqa", 4), ("mqa", 16), ("mqa", 32)}
    assert len({c.name for c in GRID}) == len(GRID)
    assert len({c.spec for c in GRID}) == 12


def test_the_work_is_counted_by_the_papers_formula() -> None:
    full = next(c for c in GRID if c.name == "mha d128 full 4096")
    assert full.flops() == 4 * 4096**2 * 128 * 16 * 4
    causal = next(c for c in GRID if c.name == "mha d128 causal 4096")
    assert causal.flops() == full.flops() / 2
    assert full.tflops(1e-3) == pytest.approx(full.flops() / 1e9)


def test_what_a_window_hides_is_not_counted_as_work() -> None:
    (cell,) = of_spec(make_spec("mha", causal=True, window=64), [16384])
    assert cell.flops() == cell.work().flops < Cell(make_spec("mha", causal=True), 16384, 1).flops()


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        (make_spec("gqa", heads=32, kv_heads=8, head_dim=64, causal=True), "gqa d64 causal"),
        (make_spec("gqa", heads=64, kv_heads=8, causal=True), "gqa 64/8 d128 causal"),
        (make_spec("mla", causal=True), "mla d192/128 causal"),
        (make_spec("mha", dtype="fp8"), "mha d128 full fp8"),
        (make_spec("nsa-window"), "nsa-window d128 causal window 512"),
        (
            make_spec("mha", softcap=30.0, alibi=True, sink=True),
            "mha d128 full softcap 30 alibi sink",
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_a_kernels_name_says_what_is_not_usual(spec: AttentionSpec, name: str) -> None:
    assert kernel_name(spec) == name


def test_a_grid_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(
        "lengths = [256, 1000]\ntokens = 2000\n"
        '[[kernel]]\nvariant = "gqa"\nheads = 8\nkv_heads = 2\ncausal = true\n'
        '[[kernel]]\nvariant = "mha"\nheads = 4\nlengths = [77]\nbatch = 3\n'
    )
    found = load(file)
    assert found.title == "mine"
    assert [(c.name, c.batch) for c in found.cells] == [
        ("gqa 8/2 d128 causal 256", 7),
        ("gqa 8/2 d128 causal 1000", 2),
        ("mha 4/4 d128 full 77", 3),
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("lengths = [1", "not valid TOML"),
        ("lengths = [1]", "no [[kernel]]"),
        ("size = 3", "no such setting: size"),
        ('[[kernel]]\nvariant = "mha"\nheads = 0', "kernel 1: heads"),
        ('[[kernel]]\nvariant = "mha"\nlength = 3', "no such setting: length"),
        ('[[kernel]]\nvariant = "mha"\nlengths = [0]', "lengths: must be"),
        ('[[kernel]]\nvariant = "mha"\nbatch = 1.5', "batch: must be"),
        ("[[kernel]]\nheads = 4", "variant: is missing"),
        ('[[kernel]]\nvariant = "nothing"', "no variant"),
    ],
)
def test_a_grid_that_cannot_be_is_refused(text: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "grid.toml"
    file.write_text(text)
    with pytest.raises(BadSpec, match=r"grid\.toml") as refused:
        load(file)
    assert words in str(refused.value)


# --- numbers ----------------------------------------------------------------------------------


def test_a_number_has_all_that_a_reader_asks() -> None:
    world = World({OURS: Behaviour(1 * MS), "flash": Behaviour(2 * MS)})
    (cell,) = small(4096)
    lines = measured(world, [cell], "flash")
    ours, flash = lines[cell.name, OURS], lines[cell.name, "flash"]
    assert isinstance(ours, NumberRecord)
    assert isinstance(flash, NumberRecord)
    assert (ours.kernel, ours.length, ours.batch) == ("mha d64 causal", 4096, 4)
    assert ours.seconds == pytest.approx(1.0015 * MS)
    assert ours.samples == 20
    assert ours.tflops == pytest.approx(cell.flops() / 1.0015e-3 / 1e12)
    assert ours.share == pytest.approx(ours.tflops / 790)
    assert ours.gbs is None  # far more arithmetic than memory
    assert ours.checked >= 2
    assert ours.seed == flash.seed == cell_seed(5, cell)
    assert ours.clock_mhz == 1980.0
    assert flash.seconds / ours.seconds == pytest.approx(2)


def test_where_memory_is_the_limit_its_rate_is_told() -> None:
    (cell,) = of_spec(make_spec("mha", heads=32, head_dim=64, dtype="bf16"), [64], 16384)
    world = World()
    who = contestants(kernel=cell.kernel)
    number = measured(world, [cell], who=who)[cell.name, OURS]
    assert isinstance(number, NumberRecord)
    assert number.gbs == pytest.approx(cell.work().bytes / number.seconds / 1e9)


def test_a_warm_median_is_beside_the_cold_one() -> None:
    world = World({OURS: Behaviour(lambda problem, cold: 2 * MS if cold else 1 * MS)})
    (cell,) = small(512)
    record = run_record([cell])
    journal = Journal(Path("nowhere"), [record], put=lambda path, at, data: None)
    rules = Rules(seconds=0, warm=True)
    bench(record, [cell], contestants(), journal, rules, world.dependencies())
    number = journal.records[-1]
    assert isinstance(number, NumberRecord)
    assert number.warm_seconds == pytest.approx(number.seconds / 2)


def test_everybody_prepares_before_anybody_is_timed() -> None:
    world = World()
    measured(world, small(512), "a", "b")
    kinds = [event[0] for event in world.log]
    assert kinds.index("turn") > max(i for i, kind in enumerate(kinds) if kind == "prepare")


def test_processes_are_kept_from_cell_to_cell() -> None:
    world = World()
    measured(world, small(512, 1024, 2048), "a")
    assert [event[1] for event in world.asked("start")].count("a") == 1
    assert len(world.asked("start", OURS)) == 1
    assert len(world.asked("prepare", OURS)) == 3


def test_another_kernel_comes_into_the_same_process() -> None:
    wanted = small(512, variants=("mha", "mqa"))
    ours = {c.kernel: Candidate("package", c.kernel) for c in wanted}
    world = World()
    measured(world, wanted, who=[Contestant(OURS, ours, watched=True)])
    assert len(world.asked("start", OURS)) == 1
    assert len(world.asked("switch", OURS)) == 1


# --- those who misbehave ----------------------------------------------------------------------


@pytest.mark.parametrize("what", ["start", "prepare", "turn", "fetch", "burst"])
@pytest.mark.parametrize("offence", ["hang", "crash"])
def test_an_end_in_one_cell_loses_nothing(what: str, offence: str) -> None:
    """Whatever it is asked when it ends, it is absent there, and there only."""
    first: list[int] = []

    def ends(asked: str, problem: Any, times: int) -> str | None:
        if asked == what and not first and (problem is None or problem.length == 1024 or not times):
            first.append(1)
            return offence
        return None

    if what == "start":  # the first cell is then the one
        lengths, bad = (1024, 512, 2048), 1024
    else:
        lengths, bad = (512, 1024, 2048), 1024
    world = World({OURS: Behaviour(ends=ends)})
    wanted = small(*lengths)
    lines = measured(world, wanted, "flash", "naive")
    names = {cell.length: cell.name for cell in wanted}
    lost = lines[names[bad], OURS]
    assert isinstance(lost, AbsentRecord)
    assert lost.offence == offence
    rest = [line for line in lines.values() if line is not lost]
    assert all(isinstance(line, NumberRecord) for line in rest)
    assert len(world.asked("start", OURS)) == 2
    assert len(world.asked("start", "flash")) == 1


def test_who_ends_in_three_cells_of_a_kernel_is_not_tried_again() -> None:
    world = World({"bad": Behaviour(ends=lambda what, p, n: "hang" if what == "turn" else None)})
    wanted = small(256, 512, 1024, 2048, 4096)
    lines = measured(world, wanted, "bad")
    found = [lines[cell.name, "bad"] for cell in wanted]
    assert offences(found) == ["hang"] * 5
    assert len(world.asked("start", "bad")) == 3
    assert [isinstance(f, AbsentRecord) and "not tried again" in f.why for f in found] == (
        [False] * 3 + [True] * 2
    )


def test_another_kernel_gives_it_another_chance() -> None:
    bad = Behaviour(ends=lambda what, p, n: "hang" if p and p.spec.variant == "mha" else None)
    wanted = small(256, 512, 1024, 2048, variants=("mha", "mqa"))
    ours = {c.kernel: Candidate("package", c.kernel) for c in wanted}
    world = World({"bad": bad})
    who = [Contestant(OURS, ours), Contestant("bad", Candidate("python", "x", "y", title="bad"))]
    lines = measured(world, wanted, who=who)
    assert all(isinstance(lines[c.name, "bad"], NumberRecord) for c in wanted[4:])


def test_who_cannot_do_a_kernel_says_so_once_and_is_not_started_again() -> None:
    world = World({"flash": Behaviour(unable="it has no windows")})
    lines = measured(world, small(512, 1024, 2048), "flash")
    told = [line for (_, who), line in lines.items() if who == "flash"]
    assert {line.why for line in told if isinstance(line, AbsentRecord)} == {"it has no windows"}
    assert offences(told) == ["unable"] * 3
    assert len(world.asked("start", "flash")) == 1


def test_who_cannot_do_one_length_is_asked_at_the_next() -> None:
    world = World({"a": Behaviour(unable_at=lambda p: "too long" if p.length > 600 else "")})
    wanted = small(1024, 512)
    lines = measured(world, wanted, "a")
    assert offences(lines[c.name, "a"] for c in wanted) == ["unable", None]


@pytest.mark.parametrize(
    ("behaviour", "offence"),
    [
        (Behaviour(output=lambda exact, call: exact * 0), "wrong"),
        (Behaviour(output=lambda exact, call: np.ones((8, 64))), "replay"),
        (Behaviour(1e-6), "too_fast"),
        (Behaviour(wall=5 * MS), "hidden_work"),
        (Behaviour(2 * MS, wall=1.2 * MS), "hidden_work"),
        (Behaviour(linked=False), "wrong"),
    ],
    ids=["wrong", "replay", "too fast", "hidden", "half is hidden", "ahead of the burst"],
)
def test_a_cheat_has_no_number(behaviour: Behaviour, offence: str) -> None:
    world = World({OURS: behaviour})
    (cell,) = small(4096)
    lines = measured(world, [cell], "flash")
    assert offences([lines[cell.name, OURS], lines[cell.name, "flash"]]) == [offence, None]


def test_a_launch_that_takes_its_time_is_no_cheating() -> None:
    world = World({OURS: Behaviour(50e-6, wall=140e-6)})
    lines = measured(world, small(64, tokens=64))
    assert offences(lines.values()) == [None]


def test_libraries_are_not_held_against_the_wall_clock() -> None:
    world = World({"flash": Behaviour(wall=1.0)})
    measured(world, small(512), "flash")
    assert world.asked("burst", OURS)
    assert not world.asked("burst", "flash")


def test_what_the_judge_rejects_is_not_measured() -> None:
    (cell,) = small(512)
    who = [Contestant(OURS, {cell.kernel: Missing("the judge rejects it: zeros", "zeros")})]
    world = World()
    (line,) = measured(world, [cell], who=who).values()
    assert isinstance(line, AbsentRecord)
    assert (line.offence, line.why) == ("zeros", "the judge rejects it: zeros")
    assert not world.log


def test_a_disk_that_has_no_room_for_a_process_is_told_as_such() -> None:
    world = World()

    def make(candidate: Candidate, spec: AttentionSpec) -> Any:
        process = world.make(candidate, spec)
        process.start = lambda: (_ for _ in ()).throw(OSError(28, "No space left on device"))  # type: ignore[method-assign]
        return process

    (cell,) = small(512)
    contest = Contest(run_record([cell]), contestants(), QUICK, world.dependencies())
    for runner in contest.runners.values():
        runner._make = make
    (line,) = contest.measure(cell)
    assert isinstance(line, AbsentRecord)
    assert "No space left" in line.why


# --- ceilings and problems --------------------------------------------------------------------


def test_the_ceiling_is_the_cards_own_or_more_than_was_measured() -> None:
    spec, known = make_spec("mha", dtype="bf16"), Ceilings({"bf16": 100.0}, 1000.0)
    h200 = ceiling_of("NVIDIA H200", spec, known)
    assert h200 is not None
    assert (h200.flops, h200.bandwidth) == (989.4e12, 4.8e12)
    other = ceiling_of("Some Card", spec, known)
    assert other is not None
    assert (other.flops, other.bandwidth) == (pytest.approx(120e12), pytest.approx(1.2e12))
    assert ceiling_of("Some Card", spec, Ceilings()) is None


def test_a_problem_has_what_its_spec_asks_for() -> None:
    wide = make_spec("gqa", heads=8, kv_heads=2, alibi=True, sink=True)
    made = problem_of(Cell(wide, 128, 2), "bhsd", 1)
    assert {name: array.shape for name, array in made.extra.items()} == {
        "Slopes": (8,),
        "Sink": (8,),
    }
    selected = make_spec("nsa-selected", heads=8, kv_heads=2)
    made = problem_of(Cell(selected, 128, 2), "bshd", 1)
    assert made.extra["Idx"].shape == (2, 2, 128, 16)
    compressed = make_spec("nsa-compressed", heads=8, kv_heads=2)
    made = problem_of(Cell(compressed, 128, 2), "bshd", 1)
    assert made.kv_len == compressed.compressed_blocks(128) == 7
    assert made.dims == {"tokens": 128}
    assert problem_of(small(512)[0], "bshd", 1).extra == {}


@pytest.mark.parametrize("branch", some(["compressed", "selected", "window"], 3))
def test_a_timed_kernel_gets_the_dims_that_no_tensor_has(
    branch: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Through the worker, as `bench --table 9` does: the plan is that of the built-in kernel."""
    cell = next(c for c in TABLES[9].cells("fp16") if c.spec.branch == branch)
    card = GPUS["h200"]
    code = write_code(write_sketch(cell.spec), cell.spec, card).code
    plan = translate(checked_program(parse(code), card), card).plan
    problem = problem_of(cell, "bshd", 1)
    called: list[dict[str, Any]] = []

    class Loaded:
        def __init__(self) -> None:
            self.plan = plan

        def __call__(self, *tensors: Any, **named: Any) -> None:
            called.append(named)

    def timed(function: Any, problem: TimedProblem, *more: Any) -> None:
        function(*problem.shapes, *problem.extra)

    monkeypatch.setattr("flashwright.sandbox.timed.Timed", timed)
    worker = Worker(tmp_path)
    worker.candidate, worker.function = Candidate.package(tmp_path), Loaded()
    worker.device, worker.memory = Cpu(), None
    for name, array in problem.extra.items():
        np.save(tmp_path / f"{name}.npy", array)
    sizes = {"batch": problem.batch, "length": problem.length, "layout": problem.layout}
    given = (problem.spec.model_dump(mode="json"), list(problem.extra), dict(problem.dims))
    worker.prepare(*given, [], **sizes, kv_len=problem.kv_len)
    shown = dim_sources(plan, "bhsd")
    assert {d for d in plan.dims if d not in shown} == set(called[0])
    assert called[0] == ({"tokens": cell.length} if branch == "compressed" else {})
    assert {*called[0], *shown} == set(plan.dims), "the launcher knows every dim"


def test_two_cells_have_different_inputs_and_a_run_again_the_same() -> None:
    seeds = [cell_seed(9, cell) for cell in GRID]
    assert len(set(seeds)) == len(seeds)
    assert seeds == [cell_seed(9, cell) for cell in GRID]
    assert all(0 <= seed < 2**31 for seed in seeds)


# --- peers ------------------------------------------------------------------------------------


def test_peers_are_chosen_by_their_names() -> None:
    names = [peer.key for peer in registry.choose(None)]
    assert names[:5] == ["flash", "cudnn", "efficient", "flex", "naive"]
    chosen = registry.choose(["cudnn", "naive torch"])
    assert [peer.name for peer in chosen] == ["torch cuDNN", "naive torch"]
    assert registry.choose(["none"]) == []
    with pytest.raises(registry.UnknownPeer, match=r"did you mean flash\?"):
        registry.choose(["flahs"])


def test_every_built_in_peer_can_be_loaded_by_its_name() -> None:
    import importlib

    for peer in registry.BUILT_IN:
        module = importlib.import_module(peer.candidate.where)
        assert callable(getattr(module, peer.candidate.function))
        assert peer.candidate.factory


def test_a_package_that_is_not_installed_takes_no_part_unless_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registry, "find_spec", lambda name: None)
    assert "fa3" not in [peer.key for peer in registry.choose(None)]
    assert [peer.key for peer in registry.choose(["fa3"])] == ["fa3"]


def test_an_installed_package_brings_its_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.metadata import EntryPoint

    point = EntryPoint("mine", "my_package.kernels:factory", registry.GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda group: [point])
    peer = registry.known()["mine"]
    assert (peer.candidate.where, peer.candidate.function) == ("my_package.kernels", "factory")
    assert peer.candidate.factory
    assert peer.watched


def test_any_callable_is_a_peer(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def attention(q, k, v): return q\n")
    (peer,) = registry.choose(["none"], [f"{file}:attention"])
    assert peer.candidate.where == str(file)
    assert not peer.candidate.factory
    assert peer.watched


@pytest.mark.parametrize(
    ("factory", "spec", "words"),
    [
        (torch_flash, make_spec("mha", dtype="fp8"), "no fp8"),
        (torch_flash, make_spec("mha", window=7, softcap=2.0), "no windows and no softcap"),
        (flex_attention, make_spec("mha", sink=True), "no sinks"),
        (flex_attention, make_spec("nsa-selected"), "no selected blocks"),
    ],
)
def test_a_peer_that_cannot_do_a_spec_says_why(factory: Any, spec: Any, words: str) -> None:
    with pytest.raises(Unable, match=words):
        factory(spec)


def test_features_of_a_spec() -> None:
    assert features(make_spec("mha")) == []
    need(make_spec("mla"), "V of another width than K")
    assert window_of(make_spec("mha", window=5)) == (4, 4)
    assert window_of(make_spec("mha", window=5, causal=True)) == (4, 0)
    assert window_of(make_spec("mha")) == (-1, -1)


# --- the machine ------------------------------------------------------------------------------


def test_the_driver_is_asked_for_clocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text('#!/bin/sh\necho "$@" > "$0.asked"\necho "1980, 3201, [N/A], 350.5, 700, 41"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    assert machine.clocks() == {
        "sm_mhz": 1980.0,
        "memory_mhz": 3201.0,
        "watts": 350.5,
        "limit_watts": 700.0,
        "celsius": 41.0,
    }
    assert (tmp_path / "nvidia-smi.asked").read_text().rstrip().endswith("-i 3")


@pytest.mark.parametrize("script", [None, "#!/bin/sh\nexit 9\n", "#!/bin/sh\necho no\n"])
def test_without_the_drivers_tool_clocks_are_left_out(
    script: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    if script:
        (tmp_path / "nvidia-smi").write_text(script)
        (tmp_path / "nvidia-smi").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert machine.clocks() == {}
    assert machine.clock_mhz() is None


def test_shapes_can_be_asked_for() -> None:
    (cell,) = cells(Shape(("gqa",), (128,), (1000,), (True,), "fp16", 24, 6, 4000))
    assert (cell.spec.heads, cell.spec.kv_heads, cell.batch) == (24, 6, 4)
    assert json.loads(cell.spec.model_dump_json())["dtype"] == "fp16"
