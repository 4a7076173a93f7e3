"""Models behind an API: every way in which a server can answer, and where the key may not show."""

from __future__ import annotations

import gzip
import json
import logging
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from types import FrameType

import pytest
from typer.testing import CliRunner

from flashwright.author.llm.budget import Budget, Meter
from flashwright.author.llm.connect import connect
from flashwright.author.llm.failures import plain, redact
from flashwright.author.llm.line import Limits
from flashwright.author.llm.model import Message, Model, NoAnswer, Question, Reply
from flashwright.cli.budget import MINUTES
from flashwright.cli.main import app
from flashwright.lang.diagnostic import Diagnostic, Failed
from tests.unit.llm_server import (
    MODEL,
    Answer,
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

KEY = "sk-do-not-show-0123456789"
ENV = {"OPENAI_API_KEY": KEY, "ANTHROPIC_API_KEY": KEY}
HELLO = Question((Message("system", "be brief"), Message("user", "hello")), limit=1000)
QUICK = Limits(connect=2.0, silence=0.25)
both = pytest.mark.parametrize("provider", ["openai", "anthropic"])


def reach(provider: str, server: Server, limits: Limits = QUICK) -> Model:
    if provider == "openai":
        return connect("some-model", server.url, env=ENV, limits=limits)
    return connect("anthropic:some-model", server.root, env=ENV, limits=limits)


def ask(provider: str, answer: Answer, question: Question = HELLO, limits: Limits = QUICK) -> Reply:
    with serve([answer]) as server:
        return reach(provider, server, limits).ask(question)


def no_answer(provider: str, answer: Answer, question: Question = HELLO) -> NoAnswer:
    with pytest.raises(NoAnswer) as caught:
        ask(provider, answer, question)
    return caught.value


def refused(
    name: str, base_url: str | None = None, env: dict[str, str] | None = None
) -> Diagnostic:
    with pytest.raises(Failed) as caught:
        connect(name, base_url, env=ENV if env is None else env)
    (found,) = caught.value.diagnostics
    assert found.code == "FW911"
    return found


# What is asked.


def test_the_openai_request() -> None:
    with serve([say("hi")]) as server:
        reach("openai", server).ask(Question(HELLO.messages, limit=300))
    (request,) = server.requests
    assert (request.path, request.key) == ("/v1/chat/completions", KEY)
    assert [m["role"] for m in request.body["messages"]] == ["system", "user"]
    assert request.body["max_tokens"] == 300
    assert request.body["stream"] is True


def test_the_anthropic_request() -> None:
    with serve([say("hi")]) as server:
        reach("anthropic", server).ask(Question(HELLO.messages, limit=300))
    (request,) = server.requests
    assert (request.path, request.body["system"]) == ("/v1/messages", "be brief")
    assert request.body["messages"] == [{"role": "user", "content": "hello"}]
    assert (request.body["max_tokens"], request.body["model"]) == (300, "some-model")


# What comes back.


@both
def test_a_reply_in_pieces(provider: str) -> None:
    reply = ask(provider, say("Copy Q from global to shared", usage=(21, 7)))
    assert (reply.text, reply.finish) == ("Copy Q from global to shared", "stop")
    assert (reply.usage.prompt, reply.usage.completion, reply.usage.counted) == (21, 7, True)
    assert (reply.model, reply.seconds > 0) == (MODEL, True)


@both
def test_the_limit_of_tokens(provider: str) -> None:
    assert ask(provider, say("half a", finish="length")).finish == "length"


@both
@pytest.mark.parametrize("answer", [refuse("No."), say("No.", finish="content_filter")])
def test_a_refusal(provider: str, answer: Answer) -> None:
    reply = ask(provider, answer)
    assert (reply.text, reply.finish) == ("No.", "refusal")


@both
def test_thoughts_are_paid_for_and_no_part_of_the_text(provider: str) -> None:
    reply = ask(provider, say("yes", thoughts="w" * 600, usage=None))
    assert reply.text == "yes"
    assert reply.usage.completion >= 200


@both
def test_a_server_that_does_not_count(provider: str) -> None:
    usage = ask(provider, say("x" * 300, usage=None)).usage
    assert not usage.counted
    assert usage.completion == 100
    assert usage.prompt >= len("be briefhello") / 3


def test_counts_that_are_none() -> None:
    usage = ask("openai", say("x" * 300, usage=(-5, True))).usage
    assert (usage.completion, usage.counted) == (100, False)


@both
def test_an_empty_reply(provider: str) -> None:
    reply = ask(provider, say("", usage=(9, 0)))
    assert (reply.text, reply.finish, reply.usage.prompt) == ("", "stop", 9)


@both
def test_a_reply_that_does_not_stop(provider: str) -> None:
    """A server that knows no limit of tokens: 1000 of them are never 20000 bytes."""
    reply = ask(provider, say("y" * 20_000, pieces=100))
    assert (reply.finish, len(reply.text)) == ("length", 11_000)
    assert reply.usage.completion > 1000
    assert not reply.usage.counted


@both
def test_a_reply_of_more_than_two_megabytes(provider: str) -> None:
    answer = say("y" * 3_000_000, pieces=30)
    reply = ask(provider, answer, Question(HELLO.messages, limit=10**6), Limits())
    assert (reply.finish, len(reply.text)) == ("length", 2_000_000)


def test_an_answer_that_is_one_endless_line() -> None:
    limits = Limits(sent=200_000)
    with serve([raw(b"data: " + b"x" * 1_000_000)]) as server:
        model = reach("openai", server, limits)
        with pytest.raises(NoAnswer, match="more than a reply can be"):
            model.ask(HELLO)


def test_a_compressed_answer_is_not_unpacked() -> None:
    bomb = raw(gzip.compress(b"\n" * 1_000_000), **{"Content-Encoding": "gzip"})
    assert "compresses" in no_answer("openai", bomb).why


def test_half_a_surrogate_pair_can_be_written_to_a_file() -> None:
    event = {"choices": [{"delta": {"content": "a\ud800b"}, "finish_reason": "stop"}]}
    reply = ask("openai", raw(f"data: {json.dumps(event)}\n\n".encode()))
    assert reply.text.encode("utf-8") == b"a?b"


# What does not come back.


@both
def test_a_cut_reply_is_kept(provider: str) -> None:
    reply = ask(provider, cut("half of "))
    assert (reply.text, reply.finish, reply.usage.counted) == ("half of ", "cut", False)
    assert reply.usage.total > 0


@both
@pytest.mark.parametrize("answer", [cut(), hang(), fail()], ids=["cut", "hang", "error"])
def test_nothing_arrives_and_may_later(provider: str, answer: Answer) -> None:
    error = no_answer(provider, answer)
    assert error.again
    assert error.usage.prompt > 0  # the server has read it, for all we know
    assert not error.usage.counted


@both
@pytest.mark.parametrize("answer", [hang("half of "), fail("half of ")], ids=["hang", "error"])
def test_a_reply_that_breaks_off_otherwise(provider: str, answer: Answer) -> None:
    reply = ask(provider, answer)
    assert (reply.text, reply.finish) == ("half of ", "cut")


@both
def test_keep_alives_are_no_silence(provider: str) -> None:
    reply = ask(provider, say("hi", keep_alives=8, pause=0.05))
    assert (reply.text, reply.finish) == ("hi", "stop")


def test_a_model_may_think_as_long_as_its_stage_has_time() -> None:
    assert Limits().silence >= 60 * MINUTES


@both
def test_silence_names_the_limit_that_it_exceeded(provider: str) -> None:
    assert "--reply-timeout" in no_answer(provider, hang()).why


@pytest.mark.parametrize("command", ["generate", "study"])
def test_the_users_limit_of_silence_reaches_the_server(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Limits] = []

    def refuse(name: str, base_url: str | None, *, limits: Limits) -> Model:
        seen.append(limits)
        raise Failed(Diagnostic("FW911", "seen enough"))

    monkeypatch.setattr("flashwright.author.llm.connect.connect", refuse)
    words = [command, *(["mha"] if command == "generate" else []), "--gpu", "a100", "--model", "m"]
    words += ["--out", str(tmp_path), "--reply-timeout", "5400"]
    short = CliRunner().invoke(app, words)
    assert (short.exit_code, seen) == (2, [])
    assert "--minutes 30" in short.output
    CliRunner().invoke(app, [*words, "--minutes", "120"])
    assert [limits.silence for limits in seen] == [5400]


@both
def test_a_server_that_drips_is_cut_when_the_time_is_over(provider: str) -> None:
    began = time.monotonic()
    question = Question(HELLO.messages, seconds=0.5)
    reply = ask(provider, say("x" * 60, pieces=60, pause=0.1), question)
    assert (reply.finish, 0 < len(reply.text) < 10) == ("cut", True)
    assert time.monotonic() - began < 1.5


def test_malformed_json() -> None:
    assert no_answer("openai", malformed()).again


@pytest.mark.parametrize(
    "data", [b"data: [1]", b'data: {"choices": "abc", "usage": 5}', b"data: " + b"[" * 200_000]
)
def test_json_of_another_form(data: bytes) -> None:
    assert no_answer("openai", raw(data + b"\n\n")).again


@both
def test_a_page_in_place_of_an_answer(provider: str) -> None:
    error = no_answer(provider, raw(b"<html>Log in</html>", "text/html"))
    assert "text/html" in error.why
    assert "base URL" in error.help
    assert not error.again


@both
@pytest.mark.parametrize("code", [408, 409, 429, 500, 503, 529])
def test_worth_asking_again(provider: str, code: int) -> None:
    error = no_answer(provider, status(code, "busy", retry_after=7))
    assert (error.again, error.wait, error.usage.total) == (True, 7.0, 0)
    assert f"answers {code}: busy" in error.why


@both
@pytest.mark.parametrize("code", [400, 401, 403, 404])
def test_a_clear_end(provider: str, code: int) -> None:
    error = no_answer(provider, status(code, "no such thing"))
    assert not error.again
    assert f"answers {code}: no such thing" in error.why
    assert bool(error.help) == (code != 400)


def test_an_account_that_is_used_up_is_a_clear_end() -> None:
    body = json.dumps({"error": {"message": "pay", "code": "insufficient_quota"}}).encode()
    error = no_answer("openai", Answer(status=429, raw=body))
    assert not error.again


@both
def test_the_sdk_does_not_ask_again_itself(provider: str) -> None:
    with serve([status(500), say("hi")]) as server, pytest.raises(NoAnswer):
        reach(provider, server).ask(HELLO)
    assert len(server.requests) == 1


def test_nothing_listens() -> None:
    with serve([say("hi")]) as server:
        model = reach("openai", server)
        fresh = reach("openai", server)
        model.ask(HELLO)
    with pytest.raises(NoAnswer, match=r"nothing answers at 127.0.0.1") as caught:
        fresh.ask(HELLO)
    assert not caught.value.again  # it may never have been there
    with pytest.raises(NoAnswer) as caught:
        model.ask(HELLO)
    assert caught.value.again  # it was, and may come back


@both
def test_a_redirect_is_not_followed(provider: str) -> None:
    with serve([say("hi")]) as other:
        there = status(302, headers={"Location": f"{other.url}/chat/completions"})
        assert "302" in no_answer(provider, there).why
    assert other.requests == []


@both
def test_an_interruption_passes_through_at_once(provider: str) -> None:
    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with serve([hang("x"), say("hi")]) as server:
            model = reach(provider, server, Limits())
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            began = time.monotonic()
            with pytest.raises(KeyboardInterrupt):
                Meter(Budget()).ask(model, HELLO)
            assert time.monotonic() - began < 2
            assert len(server.requests) == 1
    finally:
        signal.signal(signal.SIGALRM, before)


# Servers that do not know an option.


@pytest.mark.parametrize(
    ("message", "gone"),
    [
        ("stream_options: extra inputs are not permitted", "stream_options"),
        ("Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead.", "max_tokens"),
    ],
)
def test_an_option_that_is_refused_is_left_out_from_then_on(message: str, gone: str) -> None:
    question = Question(HELLO.messages, limit=300)
    with serve([status(400, message), say("hi"), say("again")]) as server:
        model = reach("openai", server)
        assert [model.ask(question).text, model.ask(question).text] == ["hi", "again"]
    assert [gone in request.body for request in server.requests] == [True, False, False]
    if gone == "max_tokens":
        assert server.requests[1].body["max_completion_tokens"] == 300


def test_anthropic_takes_no_grammar() -> None:
    question = Question(HELLO.messages, grammar="root ::= x")
    with serve([say("hi")]) as server:
        assert reach("anthropic", server).ask(question).text == "hi"
    assert "grammar" not in server.requests[0].body


@pytest.mark.parametrize(
    ("owner", "sent"),
    [
        ("llamacpp", {"grammar": "root ::= x"}),
        ("vllm", {"structured_outputs": {"grammar": "root ::= x"}}),
        ("library", {}),
    ],
)
def test_a_grammar_goes_to_the_servers_that_take_one(owner: str, sent: dict[str, object]) -> None:
    question = Question(HELLO.messages, grammar="root ::= x")
    with serve([say("x"), say("x")], owned_by=owner) as server:
        model = reach("openai", server)
        assert server.listed == 0  # no request before the first question
        assert model.grammars == bool(sent)
        model.ask(question)
        model.ask(question)
        assert server.listed == 1
    body = server.requests[0].body
    assert {k: v for k, v in body.items() if k in ("grammar", "structured_outputs")} == sent


def test_a_grammar_that_is_refused_is_left_out() -> None:
    question = Question(HELLO.messages, grammar="root ::= x")
    with serve([status(400, "cannot parse grammar"), say("x")], owned_by="llamacpp") as server:
        model = reach("openai", server)
        assert model.ask(question).text == "x"
        assert not model.grammars
    assert "grammar" not in server.requests[1].body


# The key.


@both
@pytest.mark.parametrize(
    "answer",
    [
        status(401, "Incorrect key {key}, that is {key}"),
        status(500, "x" * 290 + "{key}"),  # where the message is cut
        Answer(status=400, raw=f"<p>{KEY}</p>".encode()),
        Answer(status=403, raw=json.dumps({"detail": [{"loc": ["header", KEY]}]}).encode()),
    ],
)
def test_a_server_that_echoes_the_key(
    provider: str, answer: Answer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with serve([answer]) as server:
        model = reach(provider, server)
        with pytest.raises(NoAnswer) as caught:
            model.ask(HELLO)
        assert server.requests[0].key == KEY
    error = caught.value
    shown = "".join(traceback.format_exception(error, chain=True))
    for text in (error.why, error.help, repr(error), shown, repr(model), repr(vars(model))):
        assert KEY[:12] not in text
    assert (error.__cause__, error.__context__) == (None, None)
    ours = [r.getMessage() for r in caplog.records]
    assert ours  # the SDKs do log
    assert not [message for message in ours if KEY in message]


@both
def test_the_key_is_not_in_a_reply_either(provider: str) -> None:
    reply = ask(provider, say(f"your key is {KEY}.", pieces=3))
    assert reply.text == "your key is [key]."


def test_what_a_terminal_would_obey_is_not_passed_on() -> None:
    error = no_answer("openai", status(400, "a\x1b[2Jb\r\n\u202ec\x07"))
    assert error.why.endswith("answers 400: a [2Jb c")


def test_redact_and_plain() -> None:
    assert redact("k1 and k1", "k1") == "[key] and [key]"
    assert redact("text", "") == "text"
    assert plain("x" * 400, "", 10) == "xxxxxxx..."
    assert KEY[:5] not in plain(" " * 29_990 + KEY, KEY)


# From a name to a model.


def test_a_local_server_needs_no_key_and_gets_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # nor is a proxy asked for it
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    with serve([say("hi")]) as server:
        assert connect("some-model", server.url, env={}).ask(HELLO).text == "hi"
    assert KEY not in str(server.requests[0].headers)


def test_the_base_url_of_the_environment() -> None:
    with serve([say("hi"), say("ho")]) as server:
        env = {"OPENAI_BASE_URL": server.url, "ANTHROPIC_BASE_URL": server.root}
        assert connect("qwen3:8b", env=env).ask(HELLO).text == "hi"
        assert connect("anthropic:some", env=env).ask(HELLO).text == "ho"
    assert [r.body["model"] for r in server.requests] == ["qwen3:8b", "some"]


def test_names() -> None:
    assert connect("gpt-x", env=ENV).name == "gpt-x"
    assert connect("anthropic:some", env=ENV).name == "anthropic:some"
    assert not connect("anthropic:some", env=ENV).grammars
    for name in ("", " ", "anthropic:", "a\x1bb"):
        assert "name" in refused(name).message


def test_no_key() -> None:
    assert "OPENAI_API_KEY" in (refused("gpt-x", env={}).help or "")
    assert "--base-url URL" in (refused("local", env={}).help or "")
    assert "ANTHROPIC_API_KEY" in (refused("anthropic:some", env={}).help or "")
    assert "no key is set for box.lan:8000" in refused("x", "http://box.lan:8000/v1", {}).message


def test_a_key_that_no_header_can_hold() -> None:
    found = refused("gpt-x", env={"OPENAI_API_KEY": f"{KEY}\n“more”"})
    assert KEY not in found.message + (found.help or "")


@pytest.mark.parametrize(
    "url",
    [
        "http://user:hunter2@127.0.0.1/v1",
        "https://hunter2@host/v1",
        "https://host/v1?api_key=hunter2",
        "https://host/v1#hunter2",
        "ftp://hunter2/v1",
        "hunter2",
        "http://hunter2:port/v1",
        "http://[hunter2/v1",
    ],
)
def test_a_base_url_that_is_refused_is_not_repeated(url: str) -> None:
    found = refused("some-model", url)
    assert "the base URL" in found.message
    assert "hunter2" not in found.message + (found.help or "")


def test_a_base_url_of_the_environment_is_named() -> None:
    found = refused("some-model", env={"OPENAI_BASE_URL": "http://a:b@host/v1"})
    assert "OPENAI_BASE_URL" in found.message


@pytest.mark.parametrize(("name", "extra"), [("x", "models"), ("anthropic:x", "anthropic")])
def test_without_the_sdk(name: str, extra: str) -> None:
    """A fresh Python in which neither can be imported: all else works."""
    code = (
        "import sys; sys.modules.update(openai=None, anthropic=None, httpx2=None)\n"
        "import flashwright.author.llm.budget, flashwright.author.llm.retry\n"
        "from flashwright.author.llm.connect import connect\n"
        "from flashwright.lang.diagnostic import Failed\n"
        f"try: connect({name!r}, 'http://127.0.0.1:1/v1', env={{}})\n"
        "except Failed as failed: print(failed.diagnostics[0].help)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"pip install 'flashwright[{extra}]'"
