"""A scripted model server on 127.0.0.1, which speaks OpenAI's dialect and Anthropic's.

    with serve([say("hello"), status(429, retry_after=0), cut("hal")]) as server:
        model = connect("some-model", server.url, env={})

Each request takes the next answer of the script; in place of a list a function may choose one by
the request. `server.requests` holds what was asked. `server.url` is OpenAI's base URL,
`server.root` Anthropic's. A request after the end of the script is answered with 400.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

MODEL = "test-model-2025-01-01"


@dataclass(frozen=True)
class Request:
    """What was asked: the path, the headers in small letters, the body's JSON."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]

    @property
    def key(self) -> str:
        return self.headers.get("authorization", "").removeprefix("Bearer ")

    @property
    def text(self) -> str:
        """The last message."""
        return str(self.body["messages"][-1]["content"])


@dataclass(frozen=True)
class Answer:
    """One scripted answer; made by the functions below."""

    text: str = ""
    thoughts: str = ""
    refusal: str = ""
    finish: str = "stop"
    pieces: int = 4
    usage: tuple[int, int] | Literal["count"] | None = "count"
    pause: float = 0.0  # before each piece
    ending: Literal["done", "cut", "hang", "error"] = "done"
    status: int = 200
    message: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    raw: bytes | None = None
    before: float | None = None  # hang so long, before a word is said
    keep_alives: int = 0  # comments before the first piece, as from a server whose model thinks


def say(text: str, **more: Any) -> Answer:
    """A reply, streamed in `pieces`. `usage`: (prompt, completion), None for a server that does not
    count, or (by default) counted for real, 4 bytes to a token."""
    return Answer(text, **more)


def refuse(text: str = "I cannot help with that.") -> Answer:
    """A refusal in the field for it."""
    return Answer(refusal=text)


def status(code: int, message: str = "", *, retry_after: object = None, **more: Any) -> Answer:
    """An error. `{key}` in the message becomes the key that the client sent."""
    headers = {} if retry_after is None else {"Retry-After": str(retry_after)}
    return Answer(status=code, message=message, headers=headers | more.pop("headers", {}), **more)


def hang(text: str = "") -> Answer:
    """Never ends: silent after the text, or from the beginning."""
    return Answer(text, ending="hang") if text else Answer(before=60)


def cut(text: str = "", **more: Any) -> Answer:
    """The connection breaks after the text."""
    return Answer(text, ending="cut", **more)


def fail(text: str = "", message: str = "overloaded") -> Answer:
    """An error within the stream, after the text."""
    return Answer(text, ending="error", message=message)


def raw(data: bytes, kind: str = "text/event-stream", **headers: str) -> Answer:
    """These bytes as they are."""
    return Answer(raw=data, headers={"Content-Type": kind, **headers})


def malformed() -> Answer:
    """A stream whose JSON is none."""
    return raw(b'data: {"choices": [{"delta": {"content": "x"\n\n')


class Server:
    """What a test sees of it."""

    def __init__(self, script: Sequence[Answer] | Callable[[Request], Answer], owned_by: str):
        self.requests: list[Request] = []
        self.listed = 0
        self.owned_by = owned_by
        self.closing = threading.Event()
        self._script, self._next = script, 0
        self._lock = threading.Lock()
        self.root = ""

    @property
    def url(self) -> str:
        return f"{self.root}/v1"

    def take(self, request: Request) -> Answer:
        with self._lock:
            self.requests.append(request)
            if callable(self._script):
                return self._script(request)
            self._next += 1
            if self._next > len(self._script):
                return status(400, "the script is over")
            return self._script[self._next - 1]


@contextmanager
def serve(
    script: Sequence[Answer] | Callable[[Request], Answer], *, owned_by: str = "somebody"
) -> Iterator[Server]:
    """Run the server in a thread. `owned_by` is what its list of models says of it."""
    server = Server(script, owned_by)
    http = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (_Handler,), {"server_": server}))
    http.daemon_threads, http.block_on_close = True, False
    server.root = f"http://127.0.0.1:{http.server_port}"
    thread = threading.Thread(target=http.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.closing.set()
        http.shutdown()
        http.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else each small chunk waits 40 ms
    server_: Server

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self.server_.listed += 1
        listed = {"data": [{"id": MODEL, "object": "model", "owned_by": self.server_.owned_by}]}
        self._whole(200, json.dumps(listed).encode(), {"Content-Type": "application/json"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        headers = {name.lower(): value for name, value in self.headers.items()}
        request = Request(self.path, headers, body)
        answer = self.server_.take(request)
        with suppress(OSError):  # the client may have hung up
            self._answer(answer, request)

    def _answer(self, answer: Answer, request: Request) -> None:
        if answer.before is not None:
            self.server_.closing.wait(answer.before)
            self.close_connection = True
        elif answer.raw is not None:
            self._whole(answer.status, answer.raw, answer.headers)
        elif answer.status != 200:
            message = answer.message.replace("{key}", request.key)
            error = {"type": "error", "error": {"message": message, "type": "some_error"}}
            headers = {"Content-Type": "application/json", **answer.headers}
            self._whole(answer.status, json.dumps(error).encode(), headers)
        else:
            self._stream(answer, request)

    def _whole(self, code: int, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _stream(self, answer: Answer, request: Request) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        events = _anthropic if self.path.endswith("/messages") else _openai
        for event in (*[": keep-alive\n\n"] * answer.keep_alives, *events(answer, request)):
            time.sleep(answer.pause)
            self._chunk(event.replace("{key}", request.key).encode())
        if answer.ending == "hang":
            self.server_.closing.wait(60)
        if answer.ending in ("hang", "cut"):
            self.close_connection = True  # without the last chunk: the client sees the break
        else:
            self._chunk(b"")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()


def _usage(answer: Answer, request: Request) -> tuple[int, int] | None:
    if answer.usage != "count":
        return answer.usage
    asked = json.dumps(request.body["messages"]) + str(request.body.get("system", ""))
    return len(asked) // 4, len(answer.text + answer.thoughts + answer.refusal) // 4


def _pieces(text: str, count: int) -> list[str]:
    size = max(1, -(-len(text) // count))
    return [text[i : i + size] for i in range(0, len(text), size)]


def _openai(answer: Answer, request: Request) -> Iterator[str]:
    def event(**fields: Any) -> str:
        whole = {"id": "1", "object": "chat.completion.chunk", "model": MODEL, **fields}
        return f"data: {json.dumps(whole)}\n\n"

    def delta(finish: str | None = None, **fields: Any) -> str:
        return event(choices=[{"index": 0, "delta": fields, "finish_reason": finish}])

    yield delta(role="assistant", content="")
    for name, text in (
        ("reasoning_content", answer.thoughts),
        ("content", answer.text),
        ("refusal", answer.refusal),
    ):
        yield from (delta(**{name: piece}) for piece in _pieces(text, answer.pieces))
    if answer.ending == "error":
        yield f"data: {json.dumps({'error': {'message': answer.message, 'code': 502}})}\n\n"
    if answer.ending != "done":
        return
    yield delta(finish=answer.finish)
    usage = _usage(answer, request)
    if usage and request.body.get("stream_options"):
        yield event(choices=[], usage={"prompt_tokens": usage[0], "completion_tokens": usage[1]})
    yield "data: [DONE]\n\n"


_REASONS = {"stop": "end_turn", "length": "max_tokens", "content_filter": "refusal"}


def _anthropic(answer: Answer, request: Request) -> Iterator[str]:
    def event(kind: str, **fields: Any) -> str:
        return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n"

    def delta(kind: str, **fields: str) -> str:
        return event("content_block_delta", index=0, delta={"type": kind, **fields})

    usage = _usage(answer, request)
    start: dict[str, Any] = {"id": "1", "type": "message", "role": "assistant", "model": MODEL}
    read = {"input_tokens": usage[0], "output_tokens": 1} if usage else None
    start |= {"content": [], "usage": read}
    yield event("message_start", message=start)
    yield event("content_block_start", index=0, content_block={"type": "text", "text": ""})
    yield "event: ping\ndata: {}\n\n"
    for piece in _pieces(answer.thoughts, answer.pieces):
        yield delta("thinking_delta", thinking=piece)
    for piece in _pieces(answer.text or answer.refusal, answer.pieces):
        yield delta("text_delta", text=piece)
    if answer.ending == "error":
        yield event("error", error={"type": "overloaded_error", "message": answer.message})
    if answer.ending != "done":
        return
    yield event("content_block_stop", index=0)
    reason = "refusal" if answer.refusal else _REASONS.get(answer.finish, answer.finish)
    counted = {"output_tokens": usage[1]} if usage else None
    yield event("message_delta", delta={"stop_reason": reason}, usage=counted)
    yield event("message_stop")
