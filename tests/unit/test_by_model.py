"""Whole runs with a scripted model on loopback: what is asked, repaired, recorded and replayed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flashwright.author.builtin.author import write_code, write_sketch
from flashwright.author.builtin.variants import make_spec
from flashwright.author.llm.budget import Budget
from flashwright.author.llm.connect import connect
from flashwright.author.llm.transcript import FOLDER, Transcript
from flashwright.cli.main import app
from flashwright.cli.screen import asked_in_words
from flashwright.generate import pipeline
from flashwright.generate.by_model.ask import Authors, StageAuthor
from flashwright.generate.pipeline import Stage
from flashwright.generate.replay import replay
from flashwright.generate.state import Run
from flashwright.gpu import find
from flashwright.lang.diagnostic import Diagnostic, Failed
from tests.share import some
from tests.unit.llm_server import Answer, Request, Server, cut, say, serve, status

pytestmark = pytest.mark.usefixtures("checked_here")

SPEC = make_spec("mha", causal=True, head_dim=64)
CARD = find("a100")
SKETCH = write_sketch(SPEC)
CODE = write_code(SKETCH, SPEC, CARD).code
WITHOUT_RESHAPE = "".join(
    line for line in CODE.splitlines(keepends=True) if not line.strip().startswith("Reshape")
)
WRONG_SCALE = CODE.replace("1 / sqrt(HeadDim)", "1 / HeadDim")


def fenced(text: str) -> str:
    return f"Here it is.\n\n```tl\n{text}```\n\nI hope that helps!"


class Nobody:
    """A watcher that looks away."""

    def begin(self, stage: Stage, number: int, total: int) -> None:
        pass

    def progress(self, done: int, total: int, text: str) -> None:
        pass

    def end(self, stage: Stage, run: Run) -> None:
        pass


def generate(
    server: Server,
    folder: Path,
    *stages: str,
    key: str = "",
    attempts: int = 6,
    candidates: int = 1,
) -> Run:
    """A run up to the verdict of the CPU: what comes after it needs a compiler, and time."""
    model = connect("m", server.url, env={"OPENAI_API_KEY": key})
    one = StageAuthor(model, "m", Budget(attempts), candidates=candidates)
    authors = Authors(Transcript(folder / FOLDER), dict.fromkeys(stages or ("code",), one))
    authors.begin(SPEC, CARD)
    return pipeline.generate(SPEC, CARD, folder, Nobody(), authors, last="cpu")


def outcome(folder: Path, attempt: str) -> dict[str, object]:
    told: dict[str, object] = json.loads((folder / "model" / attempt / "outcome.json").read_text())
    return told


def test_a_wrong_program_is_sent_back_with_its_line_and_fix_and_the_next_is_taken(
    tmp_path: Path,
) -> None:
    with serve([say(fenced(WITHOUT_RESHAPE)), say(fenced(CODE))]) as server:
        run = generate(server, tmp_path)
    assert run.ok, run.failed
    assert len(server.requests) == 2
    second = server.requests[1].text
    line = WITHOUT_RESHAPE[: WITHOUT_RESHAPE.index("Compute GEMM S, V_shared")].count("\n") + 1
    assert f"FW501 on line {line}" in second
    assert "Reshape S from" in second  # the fix
    assert outcome(tmp_path, "code.1.01")["taken"] is False
    assert outcome(tmp_path, "code.1.02")["taken"] is True
    assert (tmp_path / "code.tl").read_text() == CODE
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["asked"]["code"]["attempts"] == [2]
    tokens = result["asked"]["code"]["tokens"]
    assert tokens > 0
    assert [*asked_in_words(run)] == [f"code: m, 2 attempts, {tokens:,} tokens"]


@pytest.mark.slow
def test_what_the_cpu_run_finds_is_sent_back_too(tmp_path: Path) -> None:
    assert WRONG_SCALE != CODE
    with serve([say(fenced(WRONG_SCALE)), say(fenced(CODE))]) as server:
        run = generate(server, tmp_path)
    assert run.ok, run.failed
    assert "FW802" in server.requests[1].text


def test_trouble_in_the_users_own_function_is_no_fault_of_the_models(tmp_path: Path) -> None:
    spec = SPEC.model_copy(update={"reference": "mine.py"})
    text = b"def attention(q, k, v):\n    raise ValueError('not yet')\n"
    with serve([say(fenced(CODE)), say(fenced(CODE))]) as server:
        who = StageAuthor(connect("m", server.url, env={}), "m", Budget(3))
        authors = Authors(Transcript(tmp_path / FOLDER), {"code": who})
        run = pipeline.generate(spec, CARD, tmp_path, Nobody(), authors, last="cpu", reference=text)
        assert len(server.requests) == 1
    (found,) = run.failed
    assert found.diagnostic.code == "FW903"
    assert "not yet" in found.diagnostic.message


@pytest.mark.slow
def test_of_a_sketch_and_a_code_in_one_reply_each_stage_takes_its_own(tmp_path: Path) -> None:
    both = say(fenced(SKETCH) + "and with sizes:\n" + fenced(CODE))
    with serve([both, both]) as server:
        run = generate(server, tmp_path, "sketch", "code")
    assert run.ok
    assert "grid" not in run.artefacts["sketch.tl"]
    assert run.artefacts["code.tl"].strip() == CODE.strip()


@pytest.mark.slow
def test_each_stage_has_its_own_author(tmp_path: Path) -> None:
    with serve([say(fenced(SKETCH))]) as server:
        run = generate(server, tmp_path, "sketch")
    assert run.ok, run.failed
    assert (tmp_path / "sketch.tl").read_text() == SKETCH
    assert (tmp_path / "code.tl").read_text() == CODE  # the built-in author's, from that sketch


@pytest.mark.slow
def test_the_budget_of_attempts_ends_a_run_and_more_of_it_goes_on(tmp_path: Path) -> None:
    with serve([say(fenced(WITHOUT_RESHAPE))] * 2) as server:
        run = generate(server, tmp_path, attempts=2)
    assert len(server.requests) == 2
    # why it ended, and what was wrong with the last attempt
    assert [f.diagnostic.code for f in run.failed] == ["FW501", "FW913"]
    with serve([say(fenced(CODE))]) as server:
        run = generate(server, tmp_path, attempts=3)
    assert run.ok, run.failed
    assert len(server.requests) == 1  # the first two replies were in the record


@pytest.mark.parametrize(
    "trouble",
    [
        pytest.param(status(429, retry_after=0), id="429", marks=pytest.mark.slow),
        pytest.param(status(500), id="500", marks=pytest.mark.slow),
        pytest.param(cut(fenced(CODE)[:300]), id="cut"),
        pytest.param(say(""), id="empty", marks=pytest.mark.slow),
    ],
)
def test_trouble_on_the_line_costs_a_request_and_nothing_else(
    trouble: Answer, tmp_path: Path
) -> None:
    with serve([trouble, say(fenced(CODE))]) as server:
        run = generate(server, tmp_path)
    assert run.ok, run.failed
    assert len(server.requests) == 2


@pytest.mark.slow
def test_a_replay_asks_nobody_and_finds_the_same(tmp_path: Path) -> None:
    recorded = tmp_path / "run"
    with serve([say("I cannot say."), say(fenced(WITHOUT_RESHAPE)), say(fenced(CODE))]) as server:
        assert generate(server, recorded).ok
    again = replay(recorded, tmp_path / "again", Nobody(), last="cpu")
    assert again.same
    assert "code.1.02: sent back, the same" in again.lines
    assert "code.tl: the same" in again.lines
    reply = recorded / "model" / "code.1.03" / "exchange.json"
    reply.write_text(reply.read_text().replace("// mha, 64 wide", "// MHA, 64 wide"))
    other = replay(recorded, tmp_path / "other", Nobody(), last="cpu")
    assert not other.same
    assert "code.tl: NOT THE SAME" in other.lines


def test_no_key_is_ever_written(tmp_path: Path) -> None:
    key = "sk-very-secret-4711"
    with serve([say(f"my key is {key}"), say(fenced(CODE))]) as server:
        run = generate(server, tmp_path, key=key)
    assert run.ok
    assert server.requests[0].key == key
    written = [p for p in tmp_path.rglob("*") if p.is_file()]
    assert any(p.name == "exchange.json" for p in written)
    assert all(key.encode() not in p.read_bytes() for p in written)


@pytest.mark.slow
def test_of_several_candidates_one_that_is_right_is_kept(tmp_path: Path) -> None:
    texts = iter([fenced(WITHOUT_RESHAPE), fenced(CODE)])

    def script(request: Request) -> Answer:
        return say(next(texts, fenced(WITHOUT_RESHAPE)))

    with serve(script) as server:
        run = generate(server, tmp_path, attempts=1, candidates=2)
    assert run.ok, run.failed
    assert run.asked["code"]["attempts"] == [1, 1]
    assert (tmp_path / "code.tl").read_text() == CODE


# --- the command ------------------------------------------------------------------------------

SKETCH_REPLY = fenced(SKETCH)


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def find() -> None:
        raise Failed(Diagnostic("FW821", "no compiler in this test"))

    monkeypatch.setattr("flashwright.build.toolchain.find", find)


def command(server: Server, folder: Path, *more: str) -> Any:
    words = ["generate", "mha", "--causal", "--head-dim", "64", "--gpu", "a100"]
    where = ["--out", str(folder), "--base-url", server.url]
    return CliRunner().invoke(app, [*words, *where, *more])


@pytest.mark.slow
def test_a_finished_run_is_not_asked_for_again_and_no_other_one_takes_its_place(
    tmp_path: Path, no_compiler: None
) -> None:
    until = ("--until", "translate")
    wanted = ("--sketch", "m", *until)
    with serve([say(SKETCH_REPLY)]) as server:
        done = command(server, tmp_path, *wanted)
        assert done.exit_code == 0, done.output
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    with serve([]) as server:
        again = command(server, tmp_path, *wanted)
        assert (again.exit_code, server.requests) == (0, [])
        assert "is finished: --fresh starts again" in again.output
        other = command(server, tmp_path, "--sketch", "somebody", *until)
        assert (other.exit_code, server.requests) == (2, [])
        assert "--fresh" in other.output
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    assert after == before
    with serve([say(SKETCH_REPLY)]) as server:
        assert command(server, tmp_path, *wanted, "--fresh").exit_code == 0
        assert len(server.requests) == 1


@pytest.mark.slow
def test_a_run_that_was_cut_off_leaves_nothing_that_passes_as_the_users(tmp_path: Path) -> None:
    both = ("--sketch", "m", "--params", "m")
    with serve([say(SKETCH_REPLY), status(401)]) as server:
        assert command(server, tmp_path, *both).exit_code == 2
    assert (tmp_path / "sketch.tl").is_file()
    (tmp_path / "result.json").unlink()  # as after Ctrl-C
    with serve([status(401)]) as server:
        assert command(server, tmp_path, *both).exit_code == 2
    assert not [*tmp_path.glob("*.bak")]


FOUR_AXES = CODE.replace("batch_idx = 0:batch", "batch_idx = 0:batch, part = 0:1").replace(
    "L = block_idx]", "L = block_idx + part]"
)
"""Right on the CPU, and without a translation: a grid has three axes at most."""


@pytest.mark.slow
def test_a_program_without_a_translation_is_sent_back(tmp_path: Path, no_compiler: None) -> None:
    with serve([say(fenced(FOUR_AXES)), say(fenced(CODE))]) as server:
        done = command(server, tmp_path, "--params", "m")
        assert done.exit_code == 1  # there is no compiler
        assert "not reached: build" in done.output
        assert len(server.requests) == 2
    line = FOUR_AXES[: FOUR_AXES.index("grid ")].count("\n") + 1
    assert f"FW811 on line {line}" in server.requests[1].text
    assert (tmp_path / "code.tl").read_text() == CODE
    assert (tmp_path / "kernel.cu").is_file()


@pytest.mark.slow
def test_a_run_does_not_end_well_without_a_translation(tmp_path: Path, no_compiler: None) -> None:
    with serve([say(fenced(FOUR_AXES))] * 2) as server:
        done = command(server, tmp_path, "--params", "m", "--attempts", "2")
        assert len(server.requests) == 2
    assert done.exit_code != 0
    assert "FW811" in done.output


@pytest.mark.slow
def test_a_program_without_a_contract_is_sent_back(tmp_path: Path, no_compiler: None) -> None:
    """A model writes the kernel too: what it writes would have no contract to keep."""
    with serve([say(fenced(FOUR_AXES)), say(fenced(CODE)), status(401)]) as server:
        command(server, tmp_path, "--params", "m", "--translate", "m")
    assert "FW811" in server.requests[1].text
    assert len(server.requests) == 3  # the last asks for the kernel


REFERENCES = {
    "raises": ("raise ValueError('not yet')", "not yet"),
    "has another shape": ("return q[:, :, :1]", "an O of shape"),
    "is not a number": ("return q * float('nan')", "NaN"),
}


@pytest.mark.parametrize("kind", some(REFERENCES, 3))
def test_a_function_that_cannot_be_right_is_told_before_anybody_is_asked(
    kind: str, tmp_path: Path
) -> None:
    body, says = REFERENCES[kind]
    (tmp_path / "mine.py").write_text(f"def attention(q, k, v):\n    {body}\n")
    with serve([]) as server:
        more = ("--model", "m", "--reference", str(tmp_path / "mine.py"))
        told = command(server, tmp_path / "out", *more)
        assert (told.exit_code, server.requests) == (2, [])
    assert "FW903" in told.output
    assert says in told.output
