"""Anthropic's API. It takes no grammar: one that a question has is left out."""

from __future__ import annotations

import anthropic
from anthropic.types import MessageParam

from flashwright.author.llm.failures import pick
from flashwright.author.llm.line import Line
from flashwright.author.llm.model import Finish, Message, Question, Reply
from flashwright.author.llm.wire import Heard, Stream, client, hear, timeout

_FINISHES: dict[object, Finish] = {
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "refusal": "refusal",
}
_READ = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")


class AnthropicModel:
    """One model behind Anthropic's messages."""

    grammars = False

    def __init__(self, name: str, line: Line) -> None:
        self.name, self._line = f"anthropic:{name}", line
        self._model = name
        self._client = anthropic.Anthropic(
            api_key=line.key or "none",
            base_url=line.url,
            max_retries=0,  # the meter's business, which knows the budget
            http_client=client(line),
            open_telemetry=False,  # what is asked goes to the model and nowhere else
        )
        self._known = False

    def __repr__(self) -> str:
        return f"AnthropicModel({self._model!r} at {self._line.where})"

    def ask(self, question: Question) -> Reply:
        """One streamed message."""
        reply = hear(
            lambda: self._begin(question),
            _note,
            question,
            self._line,
            errors=anthropic.AnthropicError,
            known=self._known,
        )
        self._known = True
        return reply

    def _begin(self, question: Question) -> Stream:
        system = "\n\n".join(m.text for m in question.messages if m.role == "system")
        return self._client.messages.create(
            model=self._model,
            system=system or anthropic.omit,
            messages=[_message(m) for m in question.messages if m.role != "system"],
            max_tokens=question.limit,
            stream=True,
            timeout=timeout(self._line.limits, question.seconds),
        )


def _message(message: Message) -> MessageParam:
    if message.role == "assistant":
        return {"role": "assistant", "content": message.text}
    return {"role": "user", "content": message.text}


def _note(piece: object, heard: Heard) -> None:
    """One event of a message."""
    match pick(piece, "type"):
        case "message_start":
            model = pick(piece, "message", "model")
            heard.model = model if isinstance(model, str) else ""
            heard.count(_read(pick(piece, "message", "usage")), None)
        case "content_block_start":
            heard.say(pick(piece, "content_block", "text"))
        case "content_block_delta":
            heard.say(pick(piece, "delta", "thinking"), thought=True)
            heard.say(pick(piece, "delta", "text"))
        case "message_delta":
            usage = pick(piece, "usage")
            heard.count(_read(usage), pick(usage, "output_tokens"))
            reason = pick(piece, "delta", "stop_reason")
            if isinstance(reason, str):
                heard.finish = _FINISHES.get(reason, "stop")


def _read(usage: object) -> int | None:
    """Tokens of the prompt, from the cache or not; None where the server does not say."""
    counts = [pick(usage, name) for name in _READ]
    if not isinstance(counts[0], int):
        return None
    return sum(c for c in counts if isinstance(c, int))
