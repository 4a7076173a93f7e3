"""Kernels that a model is to make faster: what is kept, what is not, and what it is told of it.

No GPU is here: a kernel takes as long as a comment in it says, and the judge believes it.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flashwright.author.builtin.author import write_code, write_sketch
from flashwright.author.llm.budget import Budget
from flashwright.author.llm.connect import connect
from flashwright.author.llm.transcript import FOLDER, Transcript
from flashwright.build import cache, make
from flashwright.build.driver import Card
from flashwright.cli.main import app
from flashwright.files import sha256
from flashwright.generate import pipeline, stages
from flashwright.generate.by_model import kernel as kernel_by_model
from flashwright.generate.by_model.ask import Authors, StageAuthor
from flashwright.generate.by_model.speed import BUILTIN, SpeedGoal, Stopwatch
from flashwright.generate.replay import replay
from flashwright.generate.state import Run
from flashwright.gpu import find
from flashwright.judge import cpu
from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.measure.contest import Contestant
from flashwright.measure.race import RaceResult, RaceTime, package, race
from flashwright.sandbox.candidate import Candidate
from tests.unit import measure_fakes
from tests.unit.emulated import SPEC
from tests.unit.fake_nvcc import WORKS, FakeNvcc, nvcc
from tests.unit.llm_server import Answer, Request, Server, say, serve, status
from tests.unit.measure_fakes import H200, MS, Behaviour, World
from tests.unit.test_authored import PTX
from tests.unit.test_by_model import Nobody
from tests.unit.test_contract import ours, program

__all__ = ["nvcc"]  # a fixture

CARD = find("a100")
CODE = write_code(write_sketch(SPEC), SPEC, CARD).code
LENGTHS = (1024, 4096)
TAKES = re.compile(r"// takes ([\d.]+)")


def cuda(takes: float) -> str:
    return f"```cuda\n{ours()[0]}// takes {takes}\n```\n"


def tl(takes: float, code: str = CODE) -> str:
    return f"```tl\n// takes {takes}\n{code}```\n"


class Clock:
    """A race in which kernels take what they say; `moods` change the first one's, race by race."""

    def __init__(self, *moods: float) -> None:
        self.races: list[list[str]] = []
        self.moods = list(moods)

    def __call__(self, spec: Any, contestants: Sequence[Contestant]) -> RaceResult:
        self.races.append([c.name for c in contestants])
        mood = self.moods.pop(0) if self.moods else 1.0
        times = {c.name: _takes(c) for c in contestants}
        times["this kernel"] = mood * times.get("this kernel", 1.0)
        figure = {who: RaceTime(t * MS, 0.0005, 100 / t) for who, t in times.items()}
        return RaceResult({c.name: dict.fromkeys(LENGTHS, figure[c.name]) for c in contestants})


def _takes(contestant: Contestant) -> float:
    assert isinstance(contestant.candidates, Candidate)
    if contestant.candidates.kind != "package":
        return 1.0  # a peer
    folder = Path(contestant.candidates.where)
    texts = [(folder / name).read_text() for name in ("kernel.cu", "code.tl")]
    found = [float(m[1]) for m in map(TAKES.search, texts) if m]
    return found[0] if found else 1.0


@pytest.fixture
def clock(nvcc: FakeNvcc, checked_here: None, monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A machine with a GPU, a compiler and a judge that find everything in order."""
    text = PTX.format(align=8, size=216, threads=128)
    nvcc.set(f"{WORKS}; cat kernel.cu > kernel.cubin; cat > kernel.ptx <<'END'\n{text}END\n")
    # No header changes in these tests, so none is read for the key of a build.
    monkeypatch.setattr(
        "flashwright.build.compile.digest", lambda parts, trees: cache.digest(parts, ())
    )
    monkeypatch.setattr("flashwright.judge.judge.judge", lambda *given, **more: _on_gpu())
    monkeypatch.setattr("flashwright.judge.cpu.judge", lambda *given, **more: _on_cpu())
    return Clock()


@functools.cache
def _on_gpu() -> Any:
    return measure_fakes.verdict()


@functools.cache
def _on_cpu() -> cpu.CpuVerdict:
    return _judge(program("a100"), SPEC)


_judge = cpu.judge


def generate(
    server: Server,
    folder: Path,
    clock: Clock,
    *stages: str,
    improve: int = 0,
    goal: SpeedGoal | None = None,
    attempts: int = 3,
    candidates: int = 1,
    card: Callable[[], Card] = lambda: H200,
) -> Run:
    model = connect("m", server.url, env={"OPENAI_API_KEY": ""})
    one = StageAuthor(model, "m", Budget(attempts, None), candidates=candidates)
    asked = dict.fromkeys(stages or ("translate",), one)
    if improve:
        asked["improve"] = replace(one, budget=Budget(improve, None), candidates=1)
    watch = Stopwatch(clock, lambda spec, *more: measure_fakes.made(spec), peers=list, card=card)
    transcript = Transcript(folder / FOLDER)
    authors = Authors(transcript, asked, goal=goal, stopwatch=watch)
    authors.begin(SPEC, CARD)
    return pipeline.generate(SPEC, CARD, folder, Nobody(), authors)


def rounds(folder: Path) -> list[tuple[bool, str]]:
    told = json.loads((folder / "result.json").read_text())["asked"]["improve"]["rounds"]
    return [(one["kept"], one["why"]) for one in told]


# --- kernels ----------------------------------------------------------------------------------


def test_a_compiler_that_comes_to_no_end_is_the_kernels_fault_and_no_compiler_is_not(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes = iter(["FW825", "", "FW821"])
    real = kernel_by_model.translated_by_model

    def translated(*given: Any, **more: Any) -> Any:
        code = next(codes)
        if code:
            raise Failed(Diagnostic(code, "after 120 s"))
        return real(*given, **more)

    monkeypatch.setattr(kernel_by_model, "translated_by_model", translated)
    with serve([say(cuda(1.0)), say(cuda(0.9))]) as server:
        assert generate(server, tmp_path / "one", clock).ok
    assert "FW825: after 120 s" in server.requests[1].text
    with serve([say(cuda(1.0))]) as server:
        run = generate(server, tmp_path / "two", clock)
        assert len(server.requests) == 1
    assert [f.diagnostic.code for f in run.failed] == ["FW821"]


def test_a_kernel_is_judged_by_the_users_own_function(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each attempt is judged in its own folder: the function has to be there."""
    text = b"def attention(q, k, v):\n    return v\n"
    found = []

    def judge(*given: Any, base: Path, **more: Any) -> Any:
        found.append((base / "mine.py").read_bytes())
        return _on_gpu()

    monkeypatch.setattr("flashwright.judge.judge.judge", judge)
    spec = SPEC.model_copy(update={"reference": "mine.py"})
    with serve([say(cuda(1.0))]) as server:
        who = StageAuthor(connect("m", server.url, env={}), "m", Budget(1, None))
        authors = Authors(Transcript(tmp_path / FOLDER), {"translate": who, "improve": who})
        run = pipeline.generate(spec, CARD, tmp_path, Nobody(), authors, reference=text)
        assert len(server.requests) == 1, "what has no problems that are timed is not improved"
    assert run.ok
    assert found == [text]


def test_trouble_in_the_users_own_function_ends_a_kernels_run(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def judge(*given: Any, **more: Any) -> Any:
        raise Failed(Diagnostic("FW903", "mine.py:2: not yet"))

    monkeypatch.setattr("flashwright.judge.judge.judge", judge)
    for stage in ("translate", "code"):
        reply = cuda(1.0) if stage == "translate" else tl(1.0)
        with serve([say(reply)]) as server:
            run = generate(server, tmp_path / stage, clock, stage)
            assert len(server.requests) == 1, "no model can mend it"
        assert [f.diagnostic.code for f in run.failed] == ["FW903"]


@pytest.mark.parametrize("stage", ["sketch", "code"])
def test_what_the_compiler_says_of_a_models_tl_goes_back_to_the_model(
    stage: str, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where our translator makes the kernel, who wrote the last of the TL has to mend a spill."""
    real = stages.build

    def build(run: Run, progress: Any) -> Run:
        if run.folder.name == f"{stage}.1.01":
            return run.noting("kernel.cu", Diagnostic("FW823", "the kernel spills: 24 bytes"))
        return real(run, progress)

    monkeypatch.setattr(stages, "build", build)
    text = write_sketch(SPEC) if stage == "sketch" else CODE
    with serve([say(tl(1.0, text)), say(tl(0.9, text))]) as server:
        run = generate(server, tmp_path / "run", clock, stage)
        assert len(server.requests) == 2
    assert run.ok, run.failed
    assert "FW823: the kernel spills" in server.requests[1].text
    assert "// takes 0.9" in run.artefacts[f"{stage}.tl"]
    assert run.gpu_verdict is not None
    again = replay(tmp_path / "run", tmp_path / "again", Nobody())
    assert (again.same, again.attempts) == (True, 2), again.lines
    with serve([say(tl(1.0, text))]) as server:  # up to the CPU run nobody compiles anything
        who = StageAuthor(connect("m", server.url, env={}), "m", Budget(1, None))
        authors = Authors(Transcript(tmp_path / "cpu" / FOLDER), {stage: who})
        run = pipeline.generate(SPEC, CARD, tmp_path / "cpu", Nobody(), authors, last="cpu")
    assert run.ok
    assert run.built is None


@pytest.mark.parametrize("stage", ["sketch", "code"])
def test_a_kernel_that_was_translated_another_way_comes_with_its_source(
    stage: str, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the first way spills, the second is compiled: that one is in the package."""
    real, compiled = make.build, list[str]()

    def build(source: str, arch: str, **more: Any) -> Any:
        compiled.append(source)
        built = real(source, arch, **more)
        return replace(built, spill_stores=24) if len(compiled) == 1 else built

    monkeypatch.setattr(make, "build", build)
    text = write_sketch(SPEC) if stage == "sketch" else CODE
    with serve([say(tl(1.0, text))]) as server:
        run = generate(server, tmp_path, clock, stage)
    assert run.ok, run.failed
    first, second = compiled
    assert first != second
    assert (tmp_path / "kernel.cu").read_text() == second
    told = json.loads((tmp_path / "build.json").read_text())["artefacts"]
    assert told["kernel.cu"] == sha256(second)


def test_a_sketch_that_was_recorded_without_a_compiler_is_replayed_with_one(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find() -> None:
        raise Failed(Diagnostic("FW821", "no compiler in this test"))

    with monkeypatch.context() as patch:
        patch.setattr("flashwright.build.toolchain.find", find)
        with serve([say(tl(1.0, write_sketch(SPEC)))]) as server:
            run = generate(server, tmp_path / "run", clock, "sketch")
    assert (run.ok, run.built) == (True, None)
    again = replay(tmp_path / "run", tmp_path / "again", Nobody())
    assert again.same, again.lines


# --- rounds -----------------------------------------------------------------------------------


def test_only_what_is_right_and_measured_to_be_faster_is_kept(clock: Clock, tmp_path: Path) -> None:
    wrong = cuda(0.5).replace("```cuda\n", '```cuda\n#include "/etc/passwd"\n')
    replies = [cuda(1.0), f"Fewer barriers.\n\n{cuda(0.9)}", cuda(0.95), wrong, cuda(0.895)]
    folder = tmp_path / "run"
    with serve([say(text) for text in replies]) as server:
        run = generate(server, folder, clock, improve=4)
    assert run.ok, run.failed
    assert "// takes 0.9\n" in (folder / "kernel.cu").read_text()
    assert b"// takes 0.9\n" in (folder / "kernel.cubin").read_bytes()
    kept, whys = zip(*rounds(folder), strict=True)
    assert kept == (True, False, False, False)
    assert "11.1 % faster" in whys[0]
    assert "5.3 % slower" in whys[1]
    assert "no header that may be included" in whys[2]
    assert "not faster" in whys[3]
    questions = [request.text for request in server.requests]
    assert "1000.0 us with 4096 keys: 100 TFLOPS" in questions[1]
    assert "1.00 times as fast as the built-in author's kernel" in questions[1]
    assert "168 registers a thread" in questions[1]
    assert "the narrowest is" in questions[1]
    assert "// takes 0.9\n" in questions[2]  # the new kernel is what is to be improved now
    assert "1.11 times as fast as the built-in author's kernel" in questions[2]
    assert "It is right, and it is not fast enough." in questions[3]
    assert "FW829: right, but 5.3 % slower" in questions[3]
    assert "FW828" in questions[4]
    assert "What to write\n\nFind the cause" in questions[4]
    so_far = [request.body["messages"][1]["content"] for request in server.requests]
    assert "Rounds before this one" not in so_far[1]
    gain = "- kept: right, and 11.1 % faster (noise 0.1 %); the idea was: Fewer barriers.\n"
    assert gain in so_far[2]
    assert gain in so_far[3]  # without the last one, which is told in full
    assert "- not kept: right, but 5.3 % slower than the kernel before" not in so_far[3]
    assert f"{gain}- not kept: right, but 5.3 % slower than the kernel before" in so_far[4]
    outcomes = [json.loads(p.read_text()) for p in sorted(folder.glob("model/improve.*/outcome.*"))]
    assert [one["taken"] for one in outcomes] == list(kept)
    assert (folder / "model" / "improve.1.02" / "measured.json").is_file()
    assert any("measured to be faster" in text for text in pipeline.claimed(run))
    again = replay(folder, tmp_path / "again", Nobody())
    assert again.same, again.lines
    assert "improve.1.01: taken, the same" in again.lines
    assert "kernel.cu: the same" in again.lines
    assert not [line for line in again.lines if "prompts" in line], "with the figures of then"


def test_a_gain_has_to_show_twice(clock: Clock, tmp_path: Path) -> None:
    clock.moods = [1.0, 0.8, 1.0]  # the first measurement, then the two of the round
    with serve([say(cuda(1.0)), say(cuda(1.001))]) as server:
        generate(server, tmp_path, clock, improve=1)
    assert [kept for kept, _ in rounds(tmp_path)] == [False]
    assert "when timed again" in rounds(tmp_path)[0][1]
    told = json.loads((tmp_path / "result.json").read_text())
    assert "not made faster by measuring" in told["not_claimed"]
    assert not any("faster" in text for text in told["claimed"])
    assert clock.races[1] == clock.races[2][::-1]


def test_a_run_that_is_right_can_be_improved_later(clock: Clock, tmp_path: Path) -> None:
    with serve([say(cuda(1.0))]) as server:
        assert generate(server, tmp_path, clock).ok
    with serve([say(cuda(0.5))]) as server:
        run = generate(server, tmp_path, clock, improve=1)
        assert len(server.requests) == 1, "the kernel is there, and is not asked for again"
    assert "// takes 0.5" in run.artefacts["kernel.cu"]
    assert not (tmp_path / "model-1").exists()
    with serve([say(cuda(1.0)), say(cuda(0.9))]) as server:  # the whole command again: a new run
        generate(server, tmp_path, clock, improve=1)
        assert len(server.requests) == 2
    assert (tmp_path / "model-1" / "improve.1.01").is_dir()


def ended(folder: Path) -> str:
    told: dict[str, str] = json.loads((folder / FOLDER / "run.json").read_text())
    return told["ended"]


def test_rounds_that_could_not_begin_or_broke_off_go_on(clock: Clock, tmp_path: Path) -> None:
    def absent() -> Card:
        raise Failed(Diagnostic("FW851", "no GPU can be used here"))

    with serve([say(cuda(1.0))]) as server:
        run = generate(server, tmp_path, clock, improve=2, card=absent)
    assert (run.ok, run.timings[-1].status, ended(tmp_path)) == (True, "skipped", "")
    for script in ([status(401)], [say(cuda(0.8)), status(401)]):
        with serve(script) as server:
            run = generate(server, tmp_path, clock, improve=2)
            assert len(server.requests) == len(script)
        assert (run.ok, ended(tmp_path)) == (True, "")
    assert "// takes 0.8" in run.artefacts["kernel.cu"], "what was gained stays"
    with serve([say(cuda(0.5))]) as server:
        run = generate(server, tmp_path, clock, improve=2)
        assert len(server.requests) == 1
    assert [kept for kept, _ in rounds(tmp_path)] == [True, True]
    assert ended(tmp_path) == "right"
    assert not (tmp_path / "model-1").exists()


def test_a_round_that_this_machine_broke_off_is_looked_at_later(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No compiler just now, or the kernel before cannot be timed: the reply is there, and paid."""
    real, lost = kernel_by_model.translated_by_model, ["the kernel before"]

    def translated(program: Any, gpu: Any, spec: Any, source: str, **more: Any) -> Any:
        if "takes 0.5" in source:
            raise Failed(Diagnostic("FW821", "no compiler just now"))
        return real(program, gpu, spec, source, **more)

    def race(spec: Any, contestants: Sequence[Contestant]) -> RaceResult:
        raced = clock(spec, contestants)
        gone = {c.name for c in contestants} & {*lost[:1]}
        times = {who: found for who, found in raced.times.items() if who not in gone}
        return RaceResult(times, {who: lost.pop() for who in gone})

    with monkeypatch.context() as patch:
        patch.setattr(kernel_by_model, "translated_by_model", translated)
        with serve([say(cuda(1.0)), say(cuda(0.5))]) as server:
            run = generate(server, tmp_path, clock, improve=1)
    assert (run.asked["improve"]["rounds"], ended(tmp_path)) == ([], "")
    with serve([]) as server:
        run = generate(server, tmp_path, race, improve=1)  # type: ignore[arg-type]
    assert "cannot be timed" in run.asked["improve"]["ended"]
    assert ended(tmp_path) == ""
    with serve([]) as server:
        run = generate(server, tmp_path, race, improve=1)  # type: ignore[arg-type]
        assert server.requests == []
    assert [kept for kept, _ in rounds(tmp_path)] == [True]
    assert ended(tmp_path) == "right"


def test_what_a_judge_refused_reads_the_same_in_a_replay(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def judge(package: Candidate, *given: Any, **more: Any) -> Any:
        wrong = "takes 0.5" in (Path(package.where) / "kernel.cu").read_text()
        return measure_fakes.verdict("wrong") if wrong else measure_fakes.verdict()

    monkeypatch.setattr("flashwright.judge.judge.judge", judge)
    with serve([say(cuda(1.0)), say(cuda(0.5)), say(cuda(0.9)), say(cuda(0.8))]) as server:
        generate(server, tmp_path / "run", clock, improve=3)
    again = replay(tmp_path / "run", tmp_path / "again", Nobody())
    assert again.same, again.lines
    assert not [line for line in again.lines if "prompts" in line]
    assert rounds(tmp_path / "run") == rounds(tmp_path / "again")


def test_without_its_rounds_a_run_that_was_cut_off_leaves_them_aside(
    clock: Clock, tmp_path: Path
) -> None:
    with serve([say(cuda(1.0)), say(cuda(0.8)), status(401)]) as server:
        generate(server, tmp_path / "run", clock, improve=2)
    (tmp_path / "run" / "result.json").unlink()  # as after Ctrl-C
    with serve([]) as server:
        run = generate(server, tmp_path / "run", clock)
    assert (run.ok, ended(tmp_path / "run")) == (True, "right")
    assert (tmp_path / "run" / FOLDER / "improve.1.01-1" / "reply.md").is_file()
    again = replay(tmp_path / "run", tmp_path / "again", Nobody())
    assert again.same, again.lines


def test_rounds_that_were_all_there_are_followed_by_more_with_what_was_measured_then(
    clock: Clock, tmp_path: Path
) -> None:
    with serve([say(cuda(1.0)), say(cuda(0.8)), say(cuda(0.9))]) as server:
        generate(server, tmp_path, clock, improve=2)
    first = rounds(tmp_path)
    assert [kept for kept, _ in first] == [True, False]
    timed = len(clock.races)
    clock.moods = [1.3, 0.7, 1.2, 0.9]  # another day, other times
    with serve([say(cuda(0.5))]) as server:
        run = generate(server, tmp_path, clock, improve=3)
        assert len(server.requests) == 1, "the replies that are there are not asked for again"
    assert rounds(tmp_path)[:2] == first
    assert "// takes 0.5" in run.artefacts["kernel.cu"]
    assert len(clock.races) == timed + 2, "only the new one is timed"


def test_where_our_translator_makes_the_kernel_the_tl_is_improved(
    clock: Clock, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    bad = tl(0.5, CODE.replace("Reshape S", "Reshape T", 1))
    with serve([say(tl(1.0)), say(bad), say(tl(0.9))]) as server:
        run = generate(server, folder, clock, "code", improve=2)
    assert run.ok, run.failed
    assert [kept for kept, _ in rounds(folder)] == [False, True]
    assert "Improve the TL" in server.requests[1].text
    assert "FW2" in server.requests[2].text  # a name that is not there
    assert "// takes 0.9\n" in (folder / "code.tl").read_text()
    assert run.artefacts["code.tl"] == (folder / "code.tl").read_text()
    digests = json.loads((folder / "build.json").read_text())["artefacts"]
    assert set(digests) >= {"code.tl", "spec.toml", "kernel.cu", "kernel.cubin"}
    again = replay(folder, tmp_path / "again", Nobody())
    assert again.same, again.lines


def test_a_model_that_sees_nothing_better_is_not_asked_on(clock: Clock, tmp_path: Path) -> None:
    with serve([say(cuda(1.0)), say(cuda(1.0))]) as server:
        run = generate(server, tmp_path, clock, improve=5)
    assert run.ok
    assert len(server.requests) == 2
    assert "nothing better" in run.asked["improve"]["ended"]


def test_without_a_gpu_nothing_is_improved_and_nothing_claimed(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(*given: Any, **more: Any) -> None:
        raise Failed(Diagnostic("FW851", "no GPU can be used here"))

    monkeypatch.setattr("flashwright.judge.judge.judge", absent)
    monkeypatch.setattr("flashwright.judge.emulated.judge_emulated", absent)
    with serve([say(cuda(1.0))]) as server:
        run = generate(server, tmp_path, clock, improve=2)
    assert run.ok
    assert (run.timings[-1].stage, run.timings[-1].status) == ("improve", "skipped")
    assert "measured" in run.timings[-1].why[0].message
    assert len(server.requests) == 1
    assert "improve" not in run.asked
    assert not any("faster" in text for text in pipeline.claimed(run))
    assert "not made faster by measuring" in pipeline.not_claimed(run)


# --- fast enough ------------------------------------------------------------------------------


def test_a_right_kernel_that_is_too_slow_goes_back_with_its_times(
    clock: Clock, tmp_path: Path
) -> None:
    with serve([say(cuda(1.5)), say(cuda(1.1))]) as server:
        run = generate(server, tmp_path, clock, goal=SpeedGoal(0.9))
    assert run.ok
    told = server.requests[1].text
    assert "FW829: right, but 0.67 times as fast as the built-in author's kernel" in told
    assert "0.9 is asked for" in told
    assert "1500.0 us against 1000.0 with 4096 keys" in told
    assert "the narrowest is" in told
    assert "// takes 1.1\n" in (tmp_path / "kernel.cu").read_text()
    assert not [f for f in run.findings if f.diagnostic.code == "FW829"]
    assert clock.races[0] == ["this kernel", BUILTIN]


def test_a_kernel_that_was_too_slow_is_not_timed_or_asked_for_again(
    clock: Clock, tmp_path: Path
) -> None:
    with serve([say(cuda(1.5)), say(cuda(1.1))]) as server:
        generate(server, tmp_path, clock, goal=SpeedGoal(0.9))
    path = tmp_path / FOLDER / "run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "ended": ""}))  # cut off
    timed = len(clock.races)
    clock.moods = [1.2, 0.7]  # other times, if anybody looked
    with serve([]) as server:
        assert generate(server, tmp_path, clock, goal=SpeedGoal(0.9)).ok
        assert server.requests == []
    assert len(clock.races) == timed
    again = replay(tmp_path, tmp_path / "again", Nobody())
    assert again.same, again.lines
    assert not [line for line in again.lines if "prompts" in line]


def test_a_goal_beside_a_peer_that_is_timed_for_nothing_else_is_looked_at_to_the_end(
    clock: Clock, tmp_path: Path
) -> None:
    goal = SpeedGoal(5.0, "flex")
    with serve([say(cuda(1.0)), say(cuda(0.5))]) as server:
        run = generate(server, tmp_path, clock, improve=1, goal=goal, attempts=1)
    assert "// takes 0.5" in run.artefacts["kernel.cu"]
    (warning,) = [f for f in run.findings if f.diagnostic.code == "FW829"]
    assert "2.00 times as fast as FlexAttention" in warning.diagnostic.message


def test_if_none_is_fast_enough_the_fastest_is_kept_with_a_warning(
    clock: Clock, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    with serve([say(cuda(1.5)), say(cuda(1.2)), say(cuda(1.4))]) as server:
        run = generate(server, folder, clock, goal=SpeedGoal(1.0))
    assert run.ok
    assert "// takes 1.2\n" in (folder / "kernel.cu").read_text()
    (warning,) = [f for f in run.findings if f.diagnostic.code == "FW829"]
    assert "0.83 times as fast" in warning.diagnostic.message
    again = replay(folder, tmp_path / "again", Nobody())
    assert again.same, again.lines


@pytest.mark.parametrize(("takes", "reached"), [(1.1, "0.91"), (0.9, "")])
def test_after_the_rounds_the_goal_is_looked_at_again(
    takes: float, reached: str, clock: Clock, tmp_path: Path
) -> None:
    with serve([say(cuda(1.5)), say(cuda(takes))]) as server:
        run = generate(server, tmp_path, clock, goal=SpeedGoal(1.0), attempts=1, improve=1)
    assert [kept for kept, _ in rounds(tmp_path)] == [True]
    found = [f.diagnostic.message for f in run.findings if f.diagnostic.code == "FW829"]
    assert len(found) == bool(reached)
    assert all(f"{reached} times as fast" in text for text in found)


def test_without_a_gpu_a_warning_says_that_nobody_looked_how_fast_it_is(
    clock: Clock, tmp_path: Path
) -> None:
    def card() -> Any:
        raise Failed(Diagnostic("FW851", "no GPU can be used here"))

    with serve([say(cuda(1.5))]) as server:
        run = generate(server, tmp_path, clock, goal=SpeedGoal(1.0), card=card)
    assert run.ok
    (warning,) = [f for f in run.findings if f.diagnostic.code == "FW829"]
    assert "was not looked at: no GPU can be used here" in warning.diagnostic.message
    assert not clock.races


def test_of_several_right_kernels_the_fastest_is_kept(clock: Clock, tmp_path: Path) -> None:
    texts = iter([cuda(1.3), cuda(0.7), cuda(1.1)])

    def script(request: Request) -> Answer:
        return say(next(texts))

    with serve(script) as server:
        run = generate(server, tmp_path / "run", clock, candidates=3, attempts=1)
    assert run.ok
    assert "// takes 0.7\n" in (tmp_path / "run" / "kernel.cu").read_text()
    assert clock.races == [["candidate 1", "candidate 2", "candidate 3"]]  # all in one race
    clock.races.clear()
    again = replay(tmp_path / "run", tmp_path / "again", Nobody())
    assert again.same, again.lines
    assert not clock.races


def test_of_several_right_programs_the_one_with_the_better_estimate_is_kept(
    clock: Clock, tmp_path: Path
) -> None:
    slow = re.sub(r"(param BN = )\d+", r"\g<1>16", CODE)
    assert slow != CODE
    texts = iter([f"```tl\n{slow}```", f"```tl\n{CODE}```", f"```tl\n{slow}```"])

    def script(request: Request) -> Answer:
        return say(next(texts))

    with serve(script) as server:
        run = generate(server, tmp_path, clock, "code", candidates=3, attempts=1)
    assert run.ok, run.failed
    assert (tmp_path / "code.tl").read_text() == CODE


# --- the race ---------------------------------------------------------------------------------


def raced(one: float, other: float, uncertainty: float) -> RaceResult:
    times = {"a": RaceTime(one, uncertainty, 1.0), "b": RaceTime(other, uncertainty, 1.0)}
    return RaceResult({who: dict.fromkeys(LENGTHS, figure) for who, figure in times.items()})


@pytest.mark.parametrize(
    ("gain", "uncertainty", "faster"),
    [(0.02, 0.0005, True), (0.008, 0.0005, False), (0.02, 0.02, False), (-0.05, 0.0005, False)],
)
def test_what_counts_as_faster(gain: float, uncertainty: float, faster: bool) -> None:
    assert raced(1 - gain, 1.0, uncertainty).faster("a", "b") is faster


def test_a_race_is_run_in_turns_and_who_is_wrong_has_no_time() -> None:
    world = World()
    world.behaviours = {
        "a": Behaviour(seconds=2 * MS),
        "b": Behaviour(seconds=MS),
        "c": Behaviour(output=lambda exact, call: exact + 1),
    }
    every = [package(name, Path(name)) for name in "abc"]
    found = race(SPEC, every, card=H200, dependencies=world.dependencies())
    assert found.ratio("a", "b") == pytest.approx(2.0, rel=0.01)
    assert found.faster("b", "a")
    assert set(found.lost) == {"c"}
    assert "wrong" in found.lost["c"]
    turns = [event[1] for event in world.asked("turn")][3:]  # after each has been woken up
    assert turns[:6] == ["a", "b", "c", "b", "c", "a"]


# --- the command line -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--improve", "2"], "name the model"),
        (["--improve", "2", "--sketch", "gpt-x"], "name the model"),
        (["--base-url", "http://127.0.0.1:9/v1"], "--base-url: name a model: --model"),
        (["--candidates", "2"], "--candidates: name a model: --model"),
        (["--bounded-grammar"], "--bounded-grammar: name a model: --model"),
        (["--fresh", "--model", "builtin"], "--fresh: name a model: --model"),
        (["--model", ""], "--model: is empty"),
        (["--params", " ", "--model", "gpt-x"], "--params: is empty"),
        (["--faster-than", "0.9"], "--translate"),
        (["--faster-than", "fast", "--translate", "gpt-x"], "is not X or X:PEER"),
        (["--faster-than", "1:nobody", "--translate", "gpt-x"], "there is no peer"),
    ],
)
def test_what_cannot_be_asked_for(options: list[str], says: str, tmp_path: Path) -> None:
    command = ["generate", "mha", "--gpu", "a100", "--out", str(tmp_path / "x"), *options]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 2, done.output
    assert says in " ".join(done.output.split())
    assert not (tmp_path / "x").exists()
