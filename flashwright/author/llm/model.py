"""A language model as the stages see it: messages in, one reply out, and what it cost.

Who is behind it (a hosted API, a server on this machine, a record of an earlier run) is the matter
of the files beside this one; no stage asks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

Role = Literal["system", "user", "assistant"]
Finish = Literal["stop", "length", "refusal", "cut"]
"""Why a reply ended: by itself, at the limit of tokens, refused, or with the connection."""


@dataclass(frozen=True)
class Message:
    """What one side said."""

    role: Role
    text: str


@dataclass(frozen=True)
class Usage:
    """Tokens that were read and written; `counted` is False where the server did not say."""

    prompt: int = 0
    completion: int = 0
    counted: bool = True

    @property
    def total(self) -> int:
        """All of them."""
        return self.prompt + self.completion

    def __add__(self, other: Usage) -> Usage:
        counted = self.counted and other.counted
        return Usage(self.prompt + other.prompt, self.completion + other.completion, counted)


@dataclass(frozen=True)
class Reply:
    """What a model answered, as it came."""

    text: str
    finish: Finish = "stop"
    usage: Usage = Usage()
    seconds: float = 0.0
    model: str = ""
    """The name that the server gives the model, which may say more than the one asked for."""


@dataclass(frozen=True)
class Question:
    """One request: the conversation so far, and what the reply may be."""

    messages: tuple[Message, ...]
    limit: int = 16_000
    """Tokens of the reply at most."""
    grammar: str | None = None
    """GBNF that the reply must follow, for a server that can constrain it."""
    seconds: float | None = field(default=None, compare=False)
    """Time for the whole reply, which is cut then; how long it may take does not change what is
    asked, so two questions that differ in this alone are the same."""


class Model(Protocol):
    """Anything that can be asked."""

    @property
    def name(self) -> str:
        """As the user named it."""

    @property
    def grammars(self) -> bool:
        """Whether it takes a grammar (llama.cpp does)."""

    def ask(self, question: Question) -> Reply:
        """Ask once; NoAnswer says why there is none."""


class NoAnswer(Exception):
    """A request that brought no reply, as the user is told; `again` where another may.

    `usage` is what it may have cost all the same: a server that falls silent has read the prompt.
    """

    def __init__(
        self,
        why: str,
        *,
        help: str = "",
        again: bool = False,
        wait: float = 0.0,
        usage: Usage = Usage(),
    ) -> None:
        super().__init__(why)
        self.why, self.help, self.again, self.wait, self.usage = why, help, again, wait, usage


def transcript(messages: Sequence[Message]) -> str:
    """A conversation as Markdown, for a person."""
    return "\n\n".join(f"## {m.role}\n\n{m.text.rstrip()}" for m in messages) + "\n"
