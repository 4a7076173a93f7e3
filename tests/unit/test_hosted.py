"""What goes to a hosted provider's own address, and what is made of its answer: over the SDKs' mock
transport, for a server on loopback is never at that address."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import pytest

from flashwright.author.llm.connect import connect
from flashwright.author.llm.model import Message, NoAnswer, Question, Reply

KEY = "sk-do-not-show-0123456789"
ASKED = (Message("system", "be brief"), Message("user", "hello"))
Handler = Callable[[httpx2.Request], httpx2.Response]
Sent = list[httpx2.Request]


def events(*data: dict[str, Any]) -> Iterator[bytes]:
    """A stream of server-sent events, as both providers write them."""
    for one in data:
        yield f"event: {one.get('type', 'message')}\ndata: {json.dumps(one)}\n\n".encode()


def ask(name: str, handler: Handler, monkeypatch: pytest.MonkeyPatch) -> tuple[Reply, Sent]:
    sent: Sent = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        sent.append(request)
        return handler(request)

    mock = httpx2.MockTransport(answer)  # below our own client, which measures and follows nothing
    monkeypatch.setattr(httpx2.HTTPTransport, "handle_request", lambda _, r: mock.handle_request(r))
    model = connect(name, None, env={"OPENAI_API_KEY": KEY, "ANTHROPIC_API_KEY": KEY})
    return model.ask(Question(ASKED, limit=500)), sent


def test_openai(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(request: httpx2.Request) -> httpx2.Response:
        delta = {"choices": [{"index": 0, "delta": {"content": "hi"}, "finish_reason": None}]}
        end = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
        usage = {"choices": [], "usage": {"prompt_tokens": 12, "completion_tokens": 3}}
        body = b"".join(events(*({"model": "gpt-x-1", **one} for one in (delta, end, usage))))
        kind = {"content-type": "text/event-stream"}
        return httpx2.Response(200, headers=kind, content=body + b"data: [DONE]\n\n")

    reply, (request,) = ask("gpt-x", answer, monkeypatch)
    assert (reply.text, reply.finish, reply.model) == ("hi", "stop", "gpt-x-1")
    assert (reply.usage.prompt, reply.usage.completion, reply.usage.counted) == (12, 3, True)
    assert (request.method, str(request.url)) == (
        "POST",
        "https://api.openai.com/v1/chat/completions",
    )
    assert request.headers["authorization"] == f"Bearer {KEY}"
    assert KEY.encode() not in request.content
    assert json.loads(request.content) == {
        "model": "gpt-x",
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "hello"},
        ],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_completion_tokens": 500,  # its newer models refuse max_tokens
    }


def test_anthropic(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(request: httpx2.Request) -> httpx2.Response:
        message = {"id": "m", "type": "message", "role": "assistant", "model": "claude-x-1"}
        begun = {**message, "content": [], "usage": {"input_tokens": 12, "output_tokens": 1}}
        stop = {"stop_reason": "end_turn", "stop_sequence": None}
        text = {"type": "text", "text": ""}
        body = events(
            {"type": "message_start", "message": begun},
            {"type": "content_block_start", "index": 0, "content_block": text},
            {
                "type": "content_block_delta",
                "index": 0,
                "delta": {"type": "text_delta", "text": "hi"},
            },
            {"type": "content_block_stop", "index": 0},
            {"type": "message_delta", "delta": stop, "usage": {"output_tokens": 3}},
            {"type": "message_stop"},
        )
        kind = {"content-type": "text/event-stream"}
        return httpx2.Response(200, headers=kind, content=b"".join(body))

    reply, (request,) = ask("anthropic:claude-x", answer, monkeypatch)
    assert (reply.text, reply.finish, reply.model) == ("hi", "stop", "claude-x-1")
    assert (reply.usage.prompt, reply.usage.completion, reply.usage.counted) == (12, 3, True)
    assert (request.method, str(request.url)) == ("POST", "https://api.anthropic.com/v1/messages")
    assert [name for name, value in request.headers.items() if KEY in value] == ["authorization"]
    told = json.loads(request.content)
    assert told["model"] == "claude-x"
    assert told["system"] == "be brief"
    assert told["messages"] == [{"role": "user", "content": "hello"}]
    assert (told["max_tokens"], told["stream"]) == (500, True)


@pytest.mark.parametrize("name", ["gpt-x", "anthropic:claude-x"])
def test_a_key_goes_to_no_other_host(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: Sent = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        sent.append(request)
        return httpx2.Response(307, headers={"location": "https://example.com/v1"})

    with pytest.raises(NoAnswer, match="307") as none:
        ask(name, answer, monkeypatch)
    assert {request.url.host for request in sent} <= {"api.openai.com", "api.anthropic.com"}
    assert KEY not in str(none.value)
