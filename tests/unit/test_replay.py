"""Records: what goes on from them, what is set aside, and when a replay is the same."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flashwright.author.llm.attempts import Task, Tried, best
from flashwright.author.llm.budget import Budget, Meter
from flashwright.author.llm.connect import connect
from flashwright.author.llm.model import Message, Question, Reply
from flashwright.author.llm.prompt import Facts
from flashwright.author.llm.transcript import EXCHANGE, FOLDER, Lane, Transcript
from flashwright.cli.main import app
from flashwright.files import sha256
from flashwright.generate import pipeline
from flashwright.generate import replay as replays
from flashwright.generate.by_model import ask as asking
from flashwright.generate.by_model.ask import Authors, StageAuthor
from flashwright.lang.diagnostic import Diagnostic, Failed
from tests.unit.llm_server import cut, say, serve
from tests.unit.test_by_model import CARD, CODE, SPEC, Nobody, fenced, generate

pytestmark = pytest.mark.usefixtures("checked_here")


class Parrot:
    """A model that says what it was asked last, after a while."""

    name, grammars = "parrot", False

    def __init__(self, seconds: float = 0.0) -> None:
        self.asked: list[str] = []
        self.seconds = seconds

    def ask(self, question: Question) -> Reply:
        self.asked.append(question.messages[-1].text)
        time.sleep(self.seconds)
        return Reply(f"said {question.messages[-1].text}")


def question(text: str) -> Question:
    return Question((Message("user", text),))


# --- the record -------------------------------------------------------------------------------


def test_a_question_that_has_changed_is_asked_and_the_old_reply_is_kept(tmp_path: Path) -> None:
    first = Lane(tmp_path, "code", 1, Parrot())
    for text in ("a", "b", "c"):
        first.ask(question(text))
        first.outcome(False, f"not {text}", {"code.tl": text})
    model = Parrot()
    again = Lane(tmp_path, "code", 1, model)
    assert [again.ask(question(t)).text for t in ("a", "B")] == ["said a", "said B"]
    assert model.asked == ["B"]
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        *("code.1.01", "code.1.02", "code.1.02-1", "code.1.03-1")
    ]
    assert (tmp_path / "code.1.02-1" / "reply.md").read_text() == "said b"
    assert (tmp_path / "code.1.03-1" / "findings.md").read_text() == "not c"
    attempts = Transcript(tmp_path).attempts()
    assert [e.reply.text for *_, e in attempts] == ["said a", "said B"]


def test_a_question_is_its_words_and_not_what_the_server_said_of_itself(tmp_path: Path) -> None:
    """A list of models that comes too late is no reason to ask, and to pay, again."""
    asked, model = question("a"), Parrot()
    Lane(tmp_path, "code", 1, Parrot()).ask(replace(asked, grammar="root ::= x", limit=300))
    assert Lane(tmp_path, "code", 1, model).ask(asked).text == "said a"
    assert model.asked == []


def test_a_record_of_older_days_is_read(tmp_path: Path) -> None:
    """Its questions had a temperature, which nobody ever set."""
    Lane(tmp_path, "code", 1, Parrot()).ask(question("a"))
    path = tmp_path / "code.1.01" / EXCHANGE
    told = json.loads(path.read_text())
    told["question"]["temperature"] = None
    path.write_text(json.dumps(told))
    assert Lane(tmp_path, "code", 1, None).ask(question("a")).text == "said a"


def test_an_exchange_is_whole_before_anything_else_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is killed in between goes on from it all the same."""
    from flashwright.author.llm import transcript

    written: list[str] = []
    put = transcript._put

    def dies(folder: Path, name: str, data: str | bytes) -> None:
        if written:
            raise SystemExit
        written.append(name)
        put(folder, name, data)

    monkeypatch.setattr(transcript, "_put", dies)
    with pytest.raises(SystemExit):
        Lane(tmp_path, "code", 1, Parrot()).ask(question("a"))
    model = Parrot()
    assert Lane(tmp_path, "code", 1, model).ask(question("a")).text == "said a"
    assert model.asked == []


def test_where_one_candidate_cannot_go_on_the_others_ask_no_more(tmp_path: Path) -> None:
    """A full disk, or no compiler: what ends a stage ends it for all."""
    slow = Parrot(0.2)
    lanes = [Lane(tmp_path, "code", 1, Parrot()), Lane(tmp_path, "code", 2, slow)]

    def attempt(source: str, lane: Lane) -> Tried[str]:
        if lane.candidate == 1:
            while not slow.asked:  # on a busy machine the other thread may begin later
                time.sleep(0.01)
            raise Failed(Diagnostic("FW821", "no compiler"))
        return Tried(None, "again", (), {})

    task = Task[str]("code", Facts(SPEC, CARD), lambda reply: reply.text, attempt)
    with pytest.raises(Failed, match="FW821"):
        best(task, lanes, [Meter(Budget(50)) for _ in lanes])
    time.sleep(0.6)
    assert len(slow.asked) == 1


# --- a replay ---------------------------------------------------------------------------------


def outcomes(tmp_path: Path, one: dict[str, Any], now: dict[str, Any], other: bool) -> bool:
    for name, told in (("one", one), ("now", now)):
        folder = tmp_path / name / "translate.1.01"
        if not folder.exists():
            Lane(tmp_path / name, "translate", 1, Parrot()).ask(question("a"))
        (folder / "outcome.json").write_text(json.dumps(told))
    ((_, same),) = replays._outcomes(tmp_path / "one", tmp_path / "now", other)
    return same


def told(taken: bool = True, findings: str = "", **files: str) -> dict[str, Any]:
    digests = {name.replace("_", "."): sha256(text) for name, text in files.items()}
    return {"schema": 1, "taken": taken, "findings": findings, "artefacts": digests}


def test_what_differs_from_run_to_run_is_not_compared(tmp_path: Path) -> None:
    one = told(kernel_cu="x", build_json="12.1 seconds")
    assert outcomes(tmp_path, one, told(kernel_cu="x", build_json="9.7 seconds"), False)
    assert not outcomes(tmp_path, one, told(kernel_cu="y", build_json="12.1 seconds"), False)
    assert not outcomes(tmp_path, one, told(False, kernel_cu="x"), False)
    assert not outcomes(tmp_path, one, {}, False)


def test_another_nvcc_makes_another_cubin_and_says_it_otherwise(tmp_path: Path) -> None:
    one = told(findings="error: a", kernel_cu="x", kernel_cubin="1", kernel_ptx="1")
    now = told(findings="error: b", kernel_cu="x", kernel_cubin="2", kernel_ptx="2")
    assert not outcomes(tmp_path, one, now, other=False)
    assert outcomes(tmp_path, one, now, other=True)
    assert not outcomes(tmp_path, one, {**now, "taken": False}, other=True)
    of_tl = told(findings="FW201", code_tl="x")
    assert not outcomes(tmp_path, of_tl, {**of_tl, "findings": "FW202"}, other=True)


REFERENCE = b"def reference(q, k, v):\n    return q\n"


def recorded(folder: Path) -> None:
    """A short run that a user's function judges: a reply that was cut off, and one without TL."""
    spec = SPEC.model_copy(update={"reference": "mine.py"})
    with serve([cut("I thi"), say("I do not know.")]) as server:
        who = StageAuthor(connect("m", server.url, env={}), "m", Budget(attempts=1))
        text = REFERENCE.decode()
        authors = Authors(Transcript(folder / FOLDER), {"code": who}, reference=text)
        authors.begin(spec, CARD)
        pipeline.generate(
            spec, CARD, folder, Nobody(), authors, last="parameters", reference=REFERENCE
        )


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of such a run, to copy."""
    folder = tmp_path_factory.mktemp("record")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asking, "Meter", partial(Meter, sleep=lambda seconds: None))
        recorded(folder)
    return folder


def test_a_replay_has_the_users_function_and_waits_for_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []

    def meter(*given: Any, **more: Any) -> Meter:
        return Meter(*given, **{"sleep": waits.append, **more})

    monkeypatch.setattr(asking, "Meter", meter)
    recorded(tmp_path / "run")
    assert len(waits) == 1  # where the reply was cut off
    again = replays.replay(tmp_path / "run", tmp_path / "again", Nobody(), last="parameters")
    assert len(waits) == 1
    assert again.same, again.lines
    assert "code.1.02: sent back, the same" in again.lines
    assert (tmp_path / "again" / "mine.py").read_bytes() == REFERENCE


def test_a_replay_overwrites_no_record(record: Path, tmp_path: Path) -> None:
    shutil.copytree(record, tmp_path / "run")
    with pytest.raises(Failed, match="the record itself"):
        replays.replay(tmp_path / "run", tmp_path / "run", Nobody(), last="parameters")
    for _ in range(2):
        replays.replay(tmp_path / "run", tmp_path / "again", Nobody(), last="parameters")
    assert (tmp_path / "again" / f"{FOLDER}-1").is_dir()


def test_a_replay_says_where_the_prompts_have_changed_since(record: Path, tmp_path: Path) -> None:
    shutil.copytree(record, tmp_path / "run")
    same = replays.replay(tmp_path / "run", tmp_path / "again", Nobody(), last="parameters")
    assert not [line for line in same.lines if "prompts" in line]
    path = tmp_path / "run" / FOLDER / "code.1.02" / "exchange.json"
    exchange = json.loads(path.read_text())
    exchange["question"]["messages"][-1]["text"] += "In rhyme."
    path.write_text(json.dumps(exchange))
    told = replays.replay(tmp_path / "run", tmp_path / "once more", Nobody(), last="parameters")
    (line,) = [line for line in told.lines if "prompts" in line]
    assert "code.1.02" in line
    assert "code.1.01" not in line
    assert told.same, "replies are looked at as before"


@pytest.mark.slow
def test_a_file_that_was_changed_by_hand_is_told_and_one_that_is_gone_is_not(
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    with serve([say(fenced(CODE))]) as server:
        assert generate(server, run).ok
    (run / "sketch.tl").unlink()
    again = replays.replay(run, tmp_path / "again", Nobody(), last="cpu")
    assert again.same, again.lines
    (run / "code.tl").write_text(CODE + "// mine\n")
    told = replays.replay(run, tmp_path / "other", Nobody(), last="cpu")
    assert not told.same
    assert [line for line in told.lines if "code.tl" in line] == [
        *("code.tl: the same", "code.tl: CHANGED since it was recorded")
    ]


@pytest.mark.slow
def test_an_attempt_that_comes_out_otherwise_says_how(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with serve([say(fenced(CODE))]) as server:
        assert generate(server, run).ok
    path = run / FOLDER / "code.1.01" / EXCHANGE
    whole = path.read_text()
    path.write_text(whole.replace("get S\\n", "get\\n"))
    told = replays.replay(run, tmp_path / "again", Nobody(), last="cpu")
    assert not told.same
    assert "code.1.01: taken, NOT THE SAME: now sent back for FW1" in "\n".join(told.lines)
    path.write_text(whole[:-30])
    told = replays.replay(run, tmp_path / "other", Nobody(), last="cpu")
    assert not told.same
    assert "code.1.01: NOT THE SAME, its exchange.json cannot be read" in told.lines


def said(*arguments: str | Path) -> tuple[int, list[str]]:
    """What `flashwright replay` ends with, and its lines."""
    done = CliRunner().invoke(app, ["replay", *map(str, arguments)])
    return done.exit_code, done.output.splitlines()


def test_the_command_ends_with_a_verdict(record: Path, tmp_path: Path) -> None:
    shutil.copytree(record, tmp_path, dirs_exist_ok=True)
    code, lines = said(tmp_path)
    assert (code, lines[-1]) == (0, "the same: 2 attempts and 1 file")
    assert "code.1.01: nothing was made of this reply" in lines
    (tmp_path / "sketch.tl").write_text("mine")
    code, lines = said(tmp_path)
    assert (code, lines[-1]) == (1, "NOT the same: see above")


def test_a_run_that_was_cut_off_or_never_answered_says_so(record: Path, tmp_path: Path) -> None:
    shutil.copytree(record, tmp_path, dirs_exist_ok=True)
    (tmp_path / "result.json").unlink()
    code, lines = said(tmp_path)
    assert (code, lines[-1]) == (0, "the same: 2 attempts and 0 files")
    assert "no result.json: the run was cut off, and its files are not compared" in lines
    for attempt in ("code.1.01", "code.1.02"):
        shutil.rmtree(tmp_path / FOLDER / attempt)
    code, lines = said(tmp_path)
    assert (code, lines[-1]) == (1, "nothing to compare")
    assert "no attempts: no model ever answered" in lines


def test_a_broken_record_is_not_called_none(tmp_path: Path) -> None:
    code, lines = said(tmp_path)
    assert code == 2
    assert "has no record" in " ".join(lines)
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "run.json").write_text('{"settings": ')
    code, lines = said(tmp_path)
    assert code == 2
    assert "FW915" in lines[0]
    assert "is broken" in " ".join(lines)
