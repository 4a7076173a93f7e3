"""What went wrong between us and a server, in our own words.

An SDK's error may carry the request with its headers, and a server may repeat the key that it was
sent: nothing is passed on but a status and the server's message, without the key and without what
a terminal would obey.
"""

from __future__ import annotations

import httpx2

from flashwright.author.llm.line import Line
from flashwright.author.llm.model import NoAnswer, Usage
from flashwright.author.llm.retry import asked_for, worthwhile

_SHOWN = 300  # characters of a server's message
_HELP = {
    401: "the server does not take the key; see {variable} in the environment",
    403: "the key in {variable} is not allowed to do this",
    404: "is the model named as its server names it, and the base URL right (most end in /v1)?",
}
_NO_USE = ("insufficient_quota", "invalid_request", "authentication", "permission", "not_found")


class TooLong(httpx2.ReadError):
    """An answer of more bytes than any may have."""


def redact(text: str, key: str) -> str:
    """The text without the key, wherever it occurs."""
    return text.replace(key, "[key]") if key else text


def plain(text: str, key: str, most: int = _SHOWN) -> str:
    """One printable line of a server's text, not too long; the key goes first, so that no cut
    leaves a part of it."""
    line = redact(text, key)[: 100 * most]
    line = " ".join("".join(c if c.isprintable() else " " for c in line).split())
    line = redact(line, key)
    return line if len(line) <= most else line[: most - 3] + "..."


def pick(thing: object, *path: str | int) -> object:
    """A part of what a server sent, which may have any form: None where there is no such part."""
    for step in path:
        if isinstance(thing, dict):
            thing = thing.get(step)
        elif isinstance(step, int):
            thing = thing[step] if isinstance(thing, list) and step < len(thing) else None
        else:
            thing = getattr(thing, step, None)
    return thing


def said(body: object) -> str:
    """The message in an error's body, wherever servers put it."""
    for path in (("error", "message"), ("message",), ("error",), ("detail",), ()):
        part = pick(body, *path)
        if isinstance(part, str) and part.strip():
            return part
    return str(body) if body else ""


def explain(error: Exception, line: Line, known: bool, read: Usage) -> NoAnswer:
    """An SDK's error as NoAnswer.

    `known`: the server has answered before, so that one which is not reached now may be again.
    `read`: what it has cost where the server took the request and then failed.
    """
    status, body = pick(error, "status_code"), pick(error, "body")
    if isinstance(status, int) and status >= 300:
        return _refused(error, status, body, line)
    if body is not None:
        return _failed(body, line, read)
    cause = error.__cause__ if isinstance(error.__cause__, httpx2.HTTPError) else error
    if isinstance(cause, httpx2.ConnectError | httpx2.ConnectTimeout):
        help = "is the server running, and the base URL right?"
        return NoAnswer(f"nothing answers at {line.where}", help=help, again=known)
    if isinstance(cause, httpx2.DecodingError):
        return NoAnswer(f"{line.where} compresses its answers, unasked", usage=read)
    if isinstance(cause, TooLong):
        return NoAnswer(f"{line.where} sends more than a reply can be", usage=read)
    if isinstance(cause, httpx2.TimeoutException):
        why = f"{line.where} sent nothing for too long (--reply-timeout SECONDS waits longer)"
    elif isinstance(cause, httpx2.HTTPError | httpx2.StreamError):
        why = f"{line.where} closed the connection"
    else:
        why = f"what {line.where} sends cannot be read"
    return NoAnswer(why, again=True, usage=read)


def _refused(error: Exception, status: int, body: object, line: Line) -> NoAnswer:
    message = plain(said(body), line.key)
    text = f"{line.where} answers {status}" + (f": {message}" if message else "")
    help = _HELP.get(status, "").format(variable=line.variable)
    # What is paid for and used up stays so, however long one waits.
    again = worthwhile(status) and not _no_use(body, ("insufficient_quota",))
    response = pick(error, "response")
    header = response.headers.get("retry-after") if isinstance(response, httpx2.Response) else None
    return NoAnswer(text, help=help, again=again, wait=asked_for(header))


def _failed(body: object, line: Line, read: Usage) -> NoAnswer:
    """An error after the reply had begun; what kind it is, only the body can say."""
    message = plain(said(body), line.key)
    text = f"{line.where} ends in an error" + (f": {message}" if message else "")
    code = pick(body, "code")
    again = worthwhile(code) if isinstance(code, int) else not _no_use(body, _NO_USE)
    return NoAnswer(text, again=again, usage=read)


def _no_use(body: object, kinds: tuple[str, ...]) -> bool:
    paths = (("code",), ("type",), ("error", "code"), ("error", "type"))
    words = [str(pick(body, *path)) for path in paths]
    return any(kind in word for kind in kinds for word in words)
