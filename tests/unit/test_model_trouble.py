"""Whole runs with a model's server that misbehaves: a retry, a repair or a clear end, each time.

Whatever happens, what was heard is on the disk, the budget is kept, and no traceback ends it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from flashwright.author.llm import budget as budgets
from flashwright.author.llm import extract
from flashwright.author.llm.attempts import Tried
from flashwright.author.llm.budget import Budget
from flashwright.author.llm.connect import connect
from flashwright.author.llm.line import Limits
from flashwright.author.llm.transcript import FOLDER, Lane, Transcript
from flashwright.generate import pipeline
from flashwright.generate.by_model import ask as asking
from flashwright.generate.by_model import tl as tl_by_model
from flashwright.generate.by_model.ask import Authors, StageAuthor
from flashwright.generate.state import Progress, Run
from flashwright.lang.codes import CODES
from tests.unit.llm_server import (
    Answer,
    Request,
    Server,
    cut,
    fail,
    hang,
    malformed,
    raw,
    refuse,
    say,
    serve,
    status,
)
from tests.unit.test_by_model import CARD, CODE, SKETCH, SPEC, WITHOUT_RESHAPE, Nobody, fenced

ROOT = Path(__file__).parents[2]


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The waits between requests, which nobody waits here."""
    found: list[float] = []
    monkeypatch.setattr(asking, "Meter", partial(budgets.Meter, sleep=found.append))
    return found


def accepted(run: Run, source: str, lane: Lane) -> Tried[str]:
    """Looks at an attempt: right is what ours is."""
    found = tl_by_model._checked_sketch(source, run.gpu) if source != CODE else ()
    return tl_by_model._tried(source if source == CODE else None, found, source, "code.tl")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a process for each attempt, and a CPU run in it."""

    def code(authors: Authors, run: Run, progress: Progress, whole: bool) -> Run:
        assert not whole
        attempt = partial(accepted, run)
        return asking.ask(authors, run, "code", extract.tl, attempt, progress)[0]

    monkeypatch.setattr(tl_by_model, "code", code)


def generate(server: Server, folder: Path, budget: Budget, silence: float = 300.0) -> Run:
    limits = Limits(silence=silence)
    model = connect("m", server.url, env={}, limits=limits)
    authors = Authors(Transcript(folder / FOLDER), {"code": StageAuthor(model, "m", budget)})
    authors.begin(SPEC, CARD)
    return pipeline.generate(SPEC, CARD, folder, Nobody(), authors, last="parameters")


def codes(run: Run) -> list[str]:
    return [finding.diagnostic.code for finding in run.failed]


def heard(folder: Path) -> list[str]:
    """The replies in the record, in their order."""
    paths = sorted((folder / FOLDER).glob("code.1.*/exchange.json"))
    return [json.loads(path.read_text())["reply"]["text"] for path in paths]


def taken(folder: Path) -> list[bool]:
    paths = sorted((folder / FOLDER).glob("code.1.*/outcome.json"))
    return [json.loads(path.read_text())["taken"] for path in paths]


RIGHT = fenced(CODE)
HUGE = "It begins. " * 40_000


# What the server does, how many requests that takes, and which replies then are in the record.
TROUBLE: dict[str, tuple[list[Answer], list[str]]] = {
    "one word at a time": ([say(RIGHT, pieces=2000)], [RIGHT]),
    "429": ([status(429, retry_after=7), say(RIGHT)], [RIGHT]),
    "429 until a date": (
        [status(429, retry_after="Wed, 21 Oct 2015 07:28:00 GMT"), say(RIGHT)],
        [RIGHT],
    ),
    "500s": ([status(500), status(502), status(503), status(529), say(RIGHT)], [RIGHT]),
    "cut in the middle": ([cut(RIGHT[:300]), say(RIGHT)], [RIGHT[:300], RIGHT]),
    "cut before a word": ([cut(), say(RIGHT)], [RIGHT]),
    "silent": ([hang(), say(RIGHT)], [RIGHT]),
    "silent in the middle": ([hang(RIGHT[:200]), say(RIGHT)], [RIGHT[:200], RIGHT]),
    "an error in the stream": ([fail(RIGHT[:100]), say(RIGHT)], [RIGHT[:100], RIGHT]),
    "malformed": ([malformed(), say(RIGHT)], [RIGHT]),
    "not UTF-8": ([raw(b"data: \xff\xfe{}\n\n"), say(RIGHT)], [RIGHT]),
    "empty": ([say(""), say("\n \n"), say(RIGHT)], ["", "\n \n", RIGHT]),
    "a refusal": ([refuse("No."), say(RIGHT)], ["No.", RIGHT]),
    "chatter": ([say("Let me think about that."), say(RIGHT)], ["Let me think about that.", RIGHT]),
    "thoughts": ([say(RIGHT, thoughts="hm " * 500)], [RIGHT]),
    "no fence": ([say(CODE)], [CODE]),
    "other fences": (
        [say(f"Not this:\n```python\nprint(1)\n```\nbut this:\n~~~~TL\n{CODE}~~~~\nBye.")],
        [f"Not this:\n```python\nprint(1)\n```\nbut this:\n~~~~TL\n{CODE}~~~~\nBye."],
    ),
}


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("name", TROUBLE)
def test_trouble_ends_in_an_answer(name: str, tmp_path: Path, waits: list[float]) -> None:
    script, replies = TROUBLE[name]
    with serve(script) as server:
        run = generate(server, tmp_path, Budget(attempts=6), silence=0.3)
    assert run.ok, run.failed
    assert len(server.requests) == len(script)
    assert heard(tmp_path) == replies
    assert taken(tmp_path)[-1]
    if name == "429":
        assert 7 <= waits[0] <= 7 * 1.25


def test_a_huge_reply_is_cut_recorded_and_asked_for_again(
    tmp_path: Path, waits: list[float], quick: None
) -> None:
    with serve([say(HUGE), say(RIGHT)]) as server:
        run = generate(server, tmp_path, Budget(attempts=2))
    assert run.ok, run.failed
    first = heard(tmp_path)[0]
    assert HUGE.startswith(first)
    assert 100_000 < len(first) < len(HUGE)
    assert "cut off before the program" in server.requests[1].text
    assert len(server.requests[1].text) < 40_000  # of the huge reply nothing is sent back


ENDS: dict[str, tuple[Callable[[Request], Answer], str, str, int]] = {
    "refusals": (lambda r: refuse(), "FW913", "3 attempts", 3),
    "empty": (lambda r: say(""), "FW912", "is empty, each time", 3),
    "wrong": (lambda r: say(fenced("Compute nothing\n")), "FW913", "3 attempts", 3),
    "429 for an hour": (lambda r: status(429, retry_after=3600), "FW911", "asks to wait 3600", 1),
    "no such model": (lambda r: status(404, "no model m"), "FW911", "no model m", 1),
    "no key": (lambda r: status(401, "bad key"), "FW911", "answers 401: bad key", 1),
    "500 for ever": (lambda r: status(500, "oh \x1b[31mno"), "FW911", "answers 500: oh [31mno", 8),
    "a page": (lambda r: raw(b"<html>", "text/html"), "FW911", "not a stream", 1),
    "compressed": (
        lambda r: raw(b"x", **{"Content-Encoding": "gzip"}),
        "FW911",
        "compresses its answers",
        1,
    ),
}


@pytest.mark.usefixtures("quick", "waits")
@pytest.mark.parametrize("name", ENDS)
def test_what_does_not_mend_ends_with_the_reason(name: str, tmp_path: Path) -> None:
    script, code, why, requests = ENDS[name]
    with serve(script) as server:
        run = generate(server, tmp_path, Budget(attempts=3, tokens=None, seconds=None))
    assert codes(run)[-1] == code
    assert set(codes(run)) <= set(CODES)
    assert why in run.failed[-1].diagnostic.message
    assert len(server.requests) == requests
    assert json.loads((tmp_path / "result.json").read_text())["ok"] is False


def test_nothing_answers(tmp_path: Path) -> None:
    with serve([]) as server:
        pass
    run = generate(server, tmp_path, Budget(attempts=3))
    assert codes(run) == ["FW911"]
    assert "nothing answers at 127.0.0.1" in run.failed[0].diagnostic.message


# --- the budget -------------------------------------------------------------------------------


def spent(server: Server, replies: Sequence[str]) -> int:
    """Tokens as the server counts them, 4 bytes to one."""
    prompts = sum(len(json.dumps(request.body["messages"])) // 4 for request in server.requests)
    return prompts + sum(len(text) // 4 for text in replies)


@pytest.mark.usefixtures("quick", "waits")
@pytest.mark.parametrize("tokens", [3_000, 12_000, 30_000, 60_000])
def test_tokens_are_never_exceeded(tokens: int, tmp_path: Path) -> None:
    wrong = "So be it. " * 500 + fenced(WITHOUT_RESHAPE)

    def script(request: Request) -> Answer:  # as long as it may be
        return say(wrong[: 4 * request.body["max_tokens"]])

    with serve(script) as server:
        run = generate(server, tmp_path, Budget(attempts=50, tokens=tokens))
    assert spent(server, heard(tmp_path)) <= tokens
    assert f"the budget of {tokens} tokens is used up" in run.failed[-1].diagnostic.message
    assert len(server.requests) == len(heard(tmp_path))
    assert bool(server.requests) == (tokens > 10_000)
    if run.asked["code"]["tokens"]:
        assert run.asked["code"]["tokens"] == spent(server, heard(tmp_path))


@pytest.mark.usefixtures("quick")
def test_time_is_not_exceeded_by_a_server_that_never_ends(tmp_path: Path) -> None:
    whole = "hm. " * 1000  # 20 seconds
    with serve(lambda r: say(whole, pieces=1000, pause=0.02)) as server:
        run = generate(server, tmp_path, Budget(attempts=5, seconds=1.5))
    assert "1.5 seconds is used up" in run.failed[-1].diagnostic.message
    (came,) = heard(tmp_path)
    assert came.startswith("hm. ")  # what came is kept
    assert len(came) < len(whole)


# --- the end of the process -------------------------------------------------------------------


def command(server: Server, folder: Path) -> list[str]:
    options = ["--gpu", "a100", "--causal", "--head-dim", "64", "--sketch", "m"]
    options += ["--base-url", server.url, "--out", str(folder), "--candidates", "2"]
    return [sys.executable, "-m", "flashwright", "generate", "mha", *options]


def started(server: Server, folder: Path) -> subprocess.Popen[str]:
    plain = {k: v for k, v in os.environ.items() if not k.startswith(("OPENAI", "ANTHROPIC"))}
    plain |= {"PYTHONPATH": str(ROOT), "NO_COLOR": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(
        command(server, folder), text=True, env=plain, start_new_session=True, **pipes
    )


def ended(process: subprocess.Popen[str]) -> tuple[str, str]:
    """What it said, once it and all that it started have ended."""
    try:
        return process.communicate(timeout=10)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    "kind", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGKILL]
)
def test_a_run_that_is_ended_goes_on_from_its_record(kind: signal.Signals, tmp_path: Path) -> None:
    """Two candidates: one reply each, then silence. The same command again asks nothing twice."""
    silent = threading.Event()
    count = 0

    def script(request: Request) -> Answer:
        nonlocal count
        count += 1
        if count == 4:
            silent.set()
        return say("One moment, please.") if count <= 2 else hang()

    with serve(script) as server, started(server, tmp_path) as process:
        assert silent.wait(30)
        os.killpg(process.pid, kind)  # as a terminal does: to all processes of the command
        _, err = ended(process)
    if kind == signal.SIGINT:
        assert process.returncode == 130
        assert err == "\nInterrupted. What was finished is kept.\n"
    exchanges = sorted((tmp_path / FOLDER).glob("*/exchange.json"))
    assert [path.parent.name for path in exchanges] == ["sketch.1.01", "sketch.2.01"]
    with serve(lambda request: say(fenced(SKETCH))) as server:
        with started(server, tmp_path) as process:
            assert _seen(server, 2)
            os.killpg(process.pid, signal.SIGKILL)
        asked = [request.text for request in server.requests]
    assert all("no block of ```tl" in text for text in asked)  # what the first reply lacked


def _seen(server: Server, requests: int) -> bool:
    end = time.monotonic() + 30
    while len(server.requests) < requests and time.monotonic() < end:
        time.sleep(0.05)
    return len(server.requests) == requests


# --- the process of an attempt ----------------------------------------------------------------

WORKING = """
from flashwright.confine import isolate
from tests.unit.test_model_trouble import says_so
isolate.call(says_so, seconds=30.0, memory=1 << 40)
"""


def says_so() -> None:
    print("at work", flush=True)
    time.sleep(30)


@pytest.mark.parametrize(
    "kind", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGKILL]
)
def test_the_process_of_an_attempt_ends_with_its_caller(kind: signal.Signals) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    script = [sys.executable, "-c", WORKING]
    with subprocess.Popen(script, text=True, env=env, start_new_session=True, **pipes) as process:
        assert process.stdout
        assert process.stdout.readline() == "at work\n"
        if kind == signal.SIGINT:
            os.killpg(process.pid, kind)
        else:
            process.kill()  # the caller alone
        _, err = ended(process)  # both have closed their output
    assert err.count("KeyboardInterrupt") == (kind == signal.SIGINT)  # the caller's own
