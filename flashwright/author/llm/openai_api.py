"""A server that speaks OpenAI's API: OpenAI's own, or llama.cpp, vLLM, Ollama and many more."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import openai

from flashwright.author.llm.failures import pick, said
from flashwright.author.llm.line import Line
from flashwright.author.llm.model import Finish, Question, Reply
from flashwright.author.llm.wire import Heard, Stream, client, hear, timeout

# How a kind of server takes a grammar, by what it calls itself in its list of models. Others
# (Ollama, OpenAI) take none.
GRAMMARS: dict[str, Callable[[str], dict[str, object]]] = {
    "llamacpp": lambda grammar: {"grammar": grammar},
    "vllm": lambda grammar: {"structured_outputs": {"grammar": grammar}},
}
_FINISHES: dict[object, Finish] = {"length": "length", "content_filter": "refusal"}
_OPENAI = "api.openai.com"
_LOOK = 10.0  # seconds for a server to list its models


class OpenAIModel:
    """One model behind OpenAI's chat completions."""

    def __init__(self, name: str, line: Line) -> None:
        self.name, self._line = name, line
        self._client = openai.OpenAI(
            api_key=line.key or "none",  # a server of one's own asks for none, the SDK does
            base_url=line.url,
            max_retries=0,  # the meter's business, which knows the budget
            http_client=client(line),
        )
        self._known = False
        self._refused: set[str] = set()
        if line.where == _OPENAI:
            self._refused.add("max_tokens")  # its newer models do

    def __repr__(self) -> str:
        return f"OpenAIModel({self.name!r} at {self._line.where})"

    @property
    def grammars(self) -> bool:
        """Whether the server says of itself that it is of a kind that takes them."""
        return "grammar" not in self._refused and self._kind in GRAMMARS

    def ask(self, question: Question) -> Reply:
        """One streamed completion."""
        reply = hear(
            lambda: self._begin(question),
            _note,
            question,
            self._line,
            errors=openai.OpenAIError,
            known=self._known,
        )
        self._known = True
        return reply

    def _begin(self, question: Question) -> Stream:
        """The request; made again without what the server turns out not to know."""
        while True:
            try:
                stream: Stream = self._client.chat.completions.create(
                    **self._request(question), timeout=timeout(self._line.limits, question.seconds)
                )
                return stream
            except openai.APIStatusError as error:
                unknown = self._unknown(error, question)
                if unknown is None:
                    raise
                self._refused.add(unknown)

    def _request(self, question: Question) -> dict[str, Any]:
        limit = "max_completion_tokens" if "max_tokens" in self._refused else "max_tokens"
        request: dict[str, Any] = {
            "model": self.name,
            "messages": [{"role": m.role, "content": m.text} for m in question.messages],
            "stream": True,
            limit: question.limit,
        }
        if "stream_options" not in self._refused:
            request["stream_options"] = {"include_usage": True}
        if question.grammar and self.grammars:
            request["extra_body"] = GRAMMARS[self._kind](question.grammar)
        return request

    def _unknown(self, error: openai.APIStatusError, question: Question) -> str | None:
        """The option that the server refuses, if one that can be left out and has not been."""
        if error.status_code not in (400, 422):
            return None
        text = said(error.body)
        options = {
            "stream_options": "stream_options" in text or "include_usage" in text,
            "max_tokens": "max_completion_tokens" in text,  # "use it instead"
            "grammar": bool(question.grammar) and self.grammars and "grammar" in text,
        }
        return next((o for o, meant in options.items() if meant and o not in self._refused), None)

    @cached_property
    def _kind(self) -> str:
        """What the server calls the owner of its models, which tells one kind from another."""
        if self._line.where == _OPENAI:
            return ""
        try:
            listed = self._client.get("/models", cast_to=object, options={"timeout": _LOOK})
        except (openai.OpenAIError, ValueError, RecursionError):
            return ""  # one that lists no models is asked without a grammar
        models = pick(listed, "data")
        for model in models if isinstance(models, list) else ():
            if pick(model, "owned_by") in GRAMMARS:
                return str(pick(model, "owned_by"))
        return ""


def _note(piece: object, heard: Heard) -> None:
    """One chunk of a completion."""
    model, usage = pick(piece, "model"), pick(piece, "usage")
    heard.model = model if isinstance(model, str) and model else heard.model
    if usage is not None:
        heard.count(pick(usage, "prompt_tokens"), pick(usage, "completion_tokens"))
    choice = pick(piece, "choices", 0)
    delta = pick(choice, "delta")
    heard.say(pick(delta, "reasoning_content") or pick(delta, "reasoning"), thought=True)
    heard.say(pick(delta, "content"))
    refusal = pick(delta, "refusal")
    heard.say(refusal)
    ended = pick(choice, "finish_reason")
    if refusal:
        heard.finish = "refusal"
    elif ended and heard.finish is None:
        heard.finish = _FINISHES.get(ended, "stop") if isinstance(ended, str) else "stop"
