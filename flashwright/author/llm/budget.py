"""What a stage may cost, and the meter that keeps to it.

The worst case of a request (its prompt, and a reply as long as its limit) is set against what is
left before it is made, so a budget is not found exceeded afterwards.
"""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from flashwright.author.llm.model import Message, Model, NoAnswer, Question, Reply, Usage
from flashwright.author.llm.retry import PATIENCE, TRIES, pause
from flashwright.lang.diagnostic import Diagnostic, Failed

Which = Literal["attempts", "tokens", "dollars", "seconds"]
USEFUL = 256
"""Tokens of a reply that are worth a request."""
_NOTHING = "the model's reply is empty, each time"
_EMPTY = 3  # a model that says nothing three times is not asked again
_SOON = 1.0  # seconds; with less left no reply is to be expected


@dataclass(frozen=True)
class Budget:
    """What one stage may cost at most; None: no limit of this kind."""

    attempts: int = 6
    """Replies that were used; the last one's findings end the stage."""
    tokens: int | None = None
    dollars: float | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        for which in ("attempts", "tokens", "dollars", "seconds"):
            limit = getattr(self, which)
            if limit is not None and not (math.isfinite(limit) and limit > 0):
                raise Failed(Diagnostic("FW914", f"a budget of {limit} {which} allows nothing"))


@dataclass(frozen=True)
class Prices:
    """Dollars per million tokens, as the user gives them."""

    prompt: float
    completion: float

    def __post_init__(self) -> None:
        for name, price in (("prompt", self.prompt), ("completion", self.completion)):
            if not (math.isfinite(price) and price >= 0):
                raise Failed(Diagnostic("FW914", f"{price} is no price of a {name} token"))

    def of(self, usage: Usage) -> float:
        """What so many tokens cost."""
        return (usage.prompt * self.prompt + usage.completion * self.completion) / 1e6


@dataclass(frozen=True)
class Spending:
    """What a stage has cost so far. Every request counts, whether its reply was used or not."""

    attempts: int = 0
    usage: Usage = Usage()  # noqa: RUF009 - frozen
    dollars: float | None = None
    """None: no prices are given."""
    seconds: float = 0.0


class Spent(Exception):
    """A budget is used up; `which` one, and in words."""

    def __init__(self, which: Which, why: str) -> None:
        super().__init__(why)
        self.which, self.why = which, why


class Unusable(NoAnswer):
    """Replies came, again and again, and none of them can be used."""


def estimate(text: str) -> int:
    """Tokens of a text where nobody has counted them: a third of its bytes, more than most take."""
    return -(-len(text.encode("utf-8", "replace")) // 3)  # rounded up


def estimate_prompt(messages: Sequence[Message]) -> int:
    """Tokens of a conversation likewise, with a few for the frame of each message."""
    return sum(estimate(m.text) + 8 for m in messages)


def diagnosis(end: NoAnswer | Spent) -> Diagnostic:
    """The end of a conversation as the user is told."""
    if isinstance(end, Spent):
        return Diagnostic("FW913", end.why)
    code = "FW912" if isinstance(end, Unusable) else "FW911"
    return Diagnostic(code, end.why, help=end.help or None)


class Meter:
    """Asks a model within the budget of one stage, and counts. The time runs from its making.

    `waiting` is told each wait before it begins: how many seconds, and why.
    """

    def __init__(
        self,
        budget: Budget,
        prices: Prices | None = None,
        *,
        waiting: Callable[[float, str], None] | None = None,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        if budget.dollars is not None and prices is None:
            text = f"a budget of {budget.dollars:g} dollars needs the prices of the model"
            hint = "give dollars per million tokens of prompt and of reply, or no dollars"
            raise Failed(Diagnostic("FW914", text, help=hint))
        self.budget, self.prices = budget, prices
        self._waiting = waiting
        self._sleep, self._clock, self._chance = sleep, clock, chance
        self._began = clock()
        self._attempts = 0
        self._usage = Usage()
        self._last: dict[str, tuple[int, int]] = {}  # a model's last prompt: counted, estimated

    @property
    def spending(self) -> Spending:
        """What has been spent until now."""
        dollars = self.prices.of(self._usage) if self.prices else None
        seconds = self._clock() - self._began
        return Spending(self._attempts, self._usage, dollars, seconds)

    def ask(self, model: Model, question: Question) -> Reply:
        """A reply that can be used; Spent, or the NoAnswer that no waiting mends."""
        empty, trouble = 0, ""
        for tries in itertools.count(1):
            try:
                allowed = self._allowed(model, question)
            except Spent as spent:
                if trouble and spent.which == "seconds":  # the model has not had them
                    raise self._in_vain(trouble) from None
                raise
            answer = self._once(model, allowed)
            if isinstance(answer, Reply):
                self._attempts += 1
                return answer
            empty += answer.why == _NOTHING
            if not answer.again or tries == TRIES or empty == _EMPTY:
                raise answer
            trouble = "" if isinstance(answer, Unusable) else answer.why
            self._wait(tries, answer)
        raise AssertionError("the tries come to an end")

    def _once(self, model: Model, question: Question) -> Reply | NoAnswer:
        """One request, counted: the reply if it can be used, else what is wrong with it."""
        try:
            reply = model.ask(question)
        except NoAnswer as none:
            self._usage += none.usage
            return none
        self._usage += reply.usage
        if reply.usage.counted and reply.usage.prompt:
            self._last[model.name] = reply.usage.prompt, estimate_prompt(question.messages)
        if reply.finish == "cut":
            return Unusable("the model's reply was cut off, each time", again=True)
        if reply.finish == "stop" and not reply.text.strip():
            return Unusable(_NOTHING, again=True)
        return reply

    def _allowed(self, model: Model, question: Question) -> Question:
        """The question with its limits lowered to what is left; Spent where that is of no use."""
        budget, spent = self.budget, self.spending
        if spent.attempts >= budget.attempts:
            raise Spent("attempts", f"the budget of {budget.attempts} attempts is used up")
        if budget.seconds is not None and budget.seconds - spent.seconds < _SOON:
            raise self._spent("seconds")
        prompt = self._expected(model, question)
        limit, least = question.limit, min(USEFUL, question.limit)
        for which, room in self._rooms(prompt):
            if room < least:
                raise self._spent(which, f"and the next prompt takes about {prompt} tokens")
            limit = min(limit, room)
        seconds = None if budget.seconds is None else budget.seconds - spent.seconds
        return replace(question, limit=limit, seconds=_smaller(seconds, question.seconds))

    def _expected(self, model: Model, question: Question) -> int:
        """Tokens of the prompt: a tenth more than the last one took for its size, as the next is
        of the same kind; before the first, the estimate."""
        estimated = estimate_prompt(question.messages)
        if model.name not in self._last:
            return estimated
        counted, then = self._last[model.name]
        return -(-estimated * counted * 11 // (then * 10))  # rounded up

    def _rooms(self, prompt: int) -> list[tuple[Which, int]]:
        """The tokens of a reply that each budget leaves after a prompt."""
        rooms: list[tuple[Which, int]] = []
        if self.budget.tokens is not None:
            rooms.append(("tokens", self.budget.tokens - self._usage.total - prompt))
        if self.budget.dollars is not None and self.prices:
            left = self.budget.dollars - self.prices.of(self._usage + Usage(prompt))
            price = self.prices.completion / 1e6
            if left < 0 or price:
                rooms.append(("dollars", math.floor(left / price) if price else -1))
        return rooms

    def _wait(self, tries: int, trouble: NoAnswer) -> None:
        seconds = pause(tries, trouble.wait, self._chance())
        if self.budget.seconds is not None:
            left = self.budget.seconds - self.spending.seconds
            if seconds > left - _SOON:
                if isinstance(trouble, Unusable):
                    raise self._spent("seconds", f"and no reply can be used: {trouble.why}")
                raise self._in_vain(trouble.why)
        if trouble.wait > PATIENCE:
            raise NoAnswer(f"{trouble.why}; it asks to wait {trouble.wait:.0f} seconds")
        if self._waiting:
            self._waiting(seconds, trouble.why)
        self._sleep(seconds)

    def _in_vain(self, trouble: str) -> NoAnswer:
        """No time is left to ask again: it is the server that has failed, not the model."""
        return NoAnswer(f"{trouble}; after {self.spending.seconds:.0f} seconds of waiting")

    def _spent(self, which: Which, more: str = "") -> Spent:
        spent = self.spending
        amount = {
            "tokens": f"{spent.usage.total} are spent",
            "dollars": f"{spent.dollars or 0:.4f} are spent",
            "seconds": f"{spent.seconds:.0f} are over",
        }[which]
        limit = getattr(self.budget, which)
        text = f"the budget of {limit:.10g} {which} is used up: {amount}"
        return Spent(which, f"{text}, {more}" if more else text)


def _smaller(one: float | None, other: float | None) -> float | None:
    return min((s for s in (one, other) if s is not None), default=None)
