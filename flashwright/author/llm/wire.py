"""One request on the wire: limits of time and size, and what has arrived when it ends.

What a server sends is text of a stranger. It is measured before it is kept.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import httpx2

from flashwright.author.llm.budget import estimate_prompt
from flashwright.author.llm.failures import TooLong, explain, plain, redact
from flashwright.author.llm.line import Limits, Line
from flashwright.author.llm.model import Finish, NoAnswer, Question, Reply, Usage

_SECRET = 8  # characters; a shorter key is a placeholder ("none"), and a word that replies may use
_LONG = 10  # bytes of a token, on average, that no tokenizer reaches


class Stream(Protocol):
    """What both SDKs give for a reply that arrives in pieces."""

    @property
    def response(self) -> httpx2.Response:
        """The answer whose body the pieces are."""

    def __iter__(self) -> Iterator[object]: ...

    def close(self) -> None:
        """Have no more of it."""


@dataclass
class Heard:
    """What has arrived of a reply."""

    parts: list[str] = field(default_factory=list)
    bytes: int = 0
    """Of the text and of the thoughts before it, which are paid for and no part of it."""
    finish: Finish | None = None
    prompt: int | None = None
    completion: int | None = None
    model: str = ""
    late: bool = False

    def say(self, text: object, *, thought: bool = False) -> None:
        """Add a piece, if it is one."""
        if isinstance(text, str):
            self.bytes += len(text.encode("utf-8", "replace"))
            if not thought:
                self.parts.append(text)

    def count(self, prompt: object, completion: object) -> None:
        """Take over what the server counts, where it is a count."""
        self.prompt = _count(prompt, self.prompt)
        self.completion = _count(completion, self.completion)


def _count(value: object, before: int | None) -> int | None:
    return value if type(value) is int and value >= 0 else before


def client(line: Line) -> httpx2.Client:
    """An HTTP client that reads no more than allowed and goes nowhere else.

    A redirect is not followed: the key would go with it. Compressed answers are refused, for a
    small one may be a large text. The environment's proxies are passed by for a server of this
    machine.
    """

    def measure(response: httpx2.Response) -> None:
        if response.headers.get("content-encoding", "identity").lower() != "identity":
            response.close()
            raise httpx2.DecodingError("compressed", request=response.request)
        assert isinstance(response.stream, httpx2.SyncByteStream)
        response.stream = _Measured(response.stream, line.limits.sent)

    return httpx2.Client(
        event_hooks={"response": [measure]},
        headers={"accept-encoding": "identity"},
        follow_redirects=False,
        trust_env=not line.local,
    )


def timeout(limits: Limits, seconds: float | None) -> httpx2.Timeout:
    """The SDK's timeouts: those of the limits, or less where less time is left."""
    left = limits.silence if seconds is None else max(0.1, seconds)
    return httpx2.Timeout(min(limits.silence, left), connect=min(limits.connect, left))


def hear(
    begin: Callable[[], Stream],
    note: Callable[[object, Heard], None],
    question: Question,
    line: Line,
    *,
    errors: type[Exception],
    known: bool,
) -> Reply:
    """Ask once and gather the reply; NoAnswer where nothing of it arrives.

    `begin` makes the request, `note` takes over a piece, `errors` are those of the SDK.
    """
    began, heard, trouble = time.monotonic(), Heard(), None
    read = Usage(estimate_prompt(question.messages), counted=False)
    try:
        stream = begin()
        left = None if question.seconds is None else question.seconds - (time.monotonic() - began)
        with contextlib.closing(stream), _hang_up(stream.response, left, heard):
            for piece in stream:
                note(piece, heard)
                if heard.bytes > _most(question, line):
                    heard.finish = "length"
                    break
            trouble = _unheard(stream.response, line, read)
    except (errors, httpx2.HTTPError, httpx2.StreamError, ValueError, RecursionError) as error:
        trouble = explain(error, line, known, read)
    if heard.finish is None and not heard.bytes:
        if heard.late:
            trouble = NoAnswer(f"{line.where} takes too long", again=True, usage=read)
        assert trouble is not None
        raise trouble  # out here: within `except` it would carry the SDK's error, headers and all
    return _reply(heard, question, line, time.monotonic() - began)


def _most(question: Question, line: Line) -> int:
    """Bytes of a reply: a server may not know its limit of tokens, or not care."""
    return min(line.limits.reply, _LONG * question.limit + 1000)


def _reply(heard: Heard, question: Question, line: Line, seconds: float) -> Reply:
    text = "".join(heard.parts)
    if len(line.key) >= _SECRET:
        text = redact(text, line.key)  # before any of it is cut off
    data = text.encode("utf-8", "replace")  # half a surrogate pair is good JSON
    text = data[: _most(question, line)].decode("utf-8", "ignore")
    prompt, completion = heard.prompt, heard.completion
    counted = prompt is not None and completion is not None and heard.finish is not None
    if prompt is None:
        prompt = estimate_prompt(question.messages)
    if not counted:
        completion = max(completion or 0, -(-heard.bytes // 3))
    usage = Usage(prompt, completion or 0, counted)
    return Reply(text, heard.finish or "cut", usage, seconds, plain(heard.model, line.key, 100))


def _unheard(response: httpx2.Response, line: Line, read: Usage) -> NoAnswer:
    """What to say of an answer that is over, should nothing have come of it."""
    kind = response.headers.get("content-type", "")
    if "event-stream" not in kind.lower():
        text = f"{line.where} answers with {plain(kind, line.key, 60) or 'no type'}, not a stream"
        return NoAnswer(text, help="is the base URL right (most end in /v1)?", usage=read)
    return NoAnswer(f"{line.where} ended its answer before it began", again=True, usage=read)


@contextlib.contextmanager
def _hang_up(response: httpx2.Response, left: float | None, heard: Heard) -> Iterator[None]:
    """Cut the connection when the time is over: a server that sends a little now and then is never
    silent for long."""
    if left is None:
        yield
        return

    def cut() -> None:
        heard.late = True
        with contextlib.suppress(OSError, KeyError, TypeError, AttributeError):
            inner = response.extensions["network_stream"].get_extra_info("socket")
            # Wakes the thread that reads, as closing would not.
            socket.socket.shutdown(inner, socket.SHUT_RDWR)

    timer = threading.Timer(max(0.0, left), cut)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class _Measured(httpx2.SyncByteStream):
    """A body that breaks off when it has become too long."""

    def __init__(self, inner: httpx2.SyncByteStream, most: int) -> None:
        self._inner, self._most = inner, most

    def __iter__(self) -> Iterator[bytes]:
        left = self._most
        for piece in self._inner:
            yield piece[:left]
            left -= len(piece)
            if left <= 0:
                raise TooLong("")

    def close(self) -> None:
        self._inner.close()
