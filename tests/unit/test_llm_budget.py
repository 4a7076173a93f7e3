"""The meter: a budget is kept to the last token, and waiting is part of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

import pytest

from flashwright.author.llm.budget import (
    Budget,
    Meter,
    Prices,
    Spent,
    Unusable,
    diagnosis,
    estimate,
    estimate_prompt,
)
from flashwright.author.llm.connect import connect
from flashwright.author.llm.model import Message, NoAnswer, Question, Reply, Usage
from flashwright.author.llm.retry import asked_for, pause
from flashwright.lang.diagnostic import Failed
from tests.unit.llm_server import cut, say, serve, status

PROMPT = Question((Message("user", "x" * 276),), limit=1000)  # estimated: 92 + 8 = 100 tokens
BUSY = NoAnswer("busy", again=True)


@dataclass
class Fake:
    """A model that gives its answers one by one, and a clock that runs as it is slept."""

    answers: list[Reply | NoAnswer | Callable[[Question], Reply]]
    name: str = "fake"
    grammars: bool = False
    takes: float = 0.0
    asked: list[Question] = field(default_factory=list)
    now: float = 0.0
    slept: list[float] = field(default_factory=list)

    def ask(self, question: Question) -> Reply:
        self.asked.append(question)
        self.now += self.takes
        answer = self.answers.pop(0)
        if isinstance(answer, NoAnswer):
            raise answer
        return answer if isinstance(answer, Reply) else answer(question)

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds

    def meter(self, budget: Budget, prices: Prices | None = None, chance: float = 0.0) -> Meter:
        return Meter(
            *(budget, prices), sleep=self.sleep, clock=lambda: self.now, chance=lambda: chance
        )


def full(question: Question) -> Reply:
    """The worst case: the prompt as estimated, the reply as long as allowed."""
    return Reply("x", usage=Usage(100, question.limit))


def until_spent(fake: Fake, meter: Meter) -> Spent:
    def on_and_on() -> None:
        while True:
            meter.ask(fake, PROMPT)

    with pytest.raises(Spent) as caught:
        on_and_on()
    return caught.value


def test_attempts() -> None:
    fake = Fake([full] * 9)
    meter = fake.meter(Budget(attempts=3))
    assert until_spent(fake, meter).which == "attempts"
    assert (meter.spending.attempts, len(fake.asked)) == (3, 3)


@pytest.mark.parametrize("tokens", [500, 1099, 1100, 1455, 1456, 3000, 10_000])
def test_tokens_are_never_exceeded(tokens: int) -> None:
    fake = Fake([full] * 99)
    meter = fake.meter(Budget(attempts=99, tokens=tokens))
    spent = until_spent(fake, meter)
    assert spent.which == "tokens"
    assert f"{tokens} tokens" in spent.why
    assert meter.spending.usage.total <= tokens
    assert all(256 <= q.limit <= 1000 for q in fake.asked)
    # What is left is not worth a request: a prompt (a tenth more to be safe) and 256 tokens.
    assert tokens - meter.spending.usage.total < 110 + 256


def test_the_last_request_is_lowered_to_what_is_left() -> None:
    fake = Fake([full, full])
    meter = fake.meter(Budget(tokens=1100 + 110 + 300))
    meter.ask(fake, PROMPT)
    meter.ask(fake, PROMPT)
    assert [q.limit for q in fake.asked] == [1000, 300]


@pytest.mark.parametrize("dollars", [0.01, 0.0123, 0.05])
@pytest.mark.parametrize("prices", [Prices(3, 15), Prices(0, 10), Prices(50, 0.5)])
def test_dollars_are_never_exceeded(dollars: float, prices: Prices) -> None:
    fake = Fake([full] * 999)
    meter = fake.meter(Budget(attempts=999, tokens=None, dollars=dollars), prices)
    assert until_spent(fake, meter).which == "dollars"
    spent = meter.spending.dollars
    assert spent is not None
    assert 0 < spent <= dollars
    least = prices.of(Usage(110, 257))
    assert dollars - spent < least


def test_a_model_that_is_free_for_replies() -> None:
    fake = Fake([full] * 99)
    meter = fake.meter(Budget(attempts=99, tokens=None, dollars=0.001), Prices(1, 0))
    until_spent(fake, meter)
    assert 8 <= len(fake.asked) <= 10  # 100 tokens of prompt each


def test_dollars_without_prices_are_refused() -> None:
    with pytest.raises(Failed) as caught:
        Meter(Budget(dollars=2))
    assert caught.value.diagnostics[0].code == "FW914"
    assert "prices" in caught.value.diagnostics[0].message


@pytest.mark.parametrize("wrong", [0, -1, float("nan"), float("inf")])
@pytest.mark.parametrize("which", ["attempts", "tokens", "dollars", "seconds"])
def test_budgets_that_are_none(which: str, wrong: float) -> None:
    with pytest.raises(Failed):
        replace(Budget(), **{which: wrong})  # type: ignore[arg-type]
    with pytest.raises(Failed):
        Prices(1, wrong if wrong else -1)


def test_seconds() -> None:
    fake = Fake([full] * 99, takes=4.0)
    meter = fake.meter(Budget(attempts=99, seconds=10.0))
    assert until_spent(fake, meter).which == "seconds"
    assert [q.seconds for q in fake.asked] == [10.0, 6.0, 2.0]


def test_a_prompt_that_counts_more_than_estimated_is_learnt_from() -> None:
    dense = Reply("x", usage=Usage(300, 10))
    fake = Fake([dense, full])
    meter = fake.meter(Budget(tokens=310 + 330 + 400))
    meter.ask(fake, PROMPT)
    meter.ask(fake, PROMPT)
    assert fake.asked[1].limit == 400


def test_a_short_limit_of_the_asker_is_no_reason_to_end() -> None:
    fake = Fake([full])
    meter = fake.meter(Budget(tokens=150))
    assert meter.ask(fake, Question(PROMPT.messages, limit=50))


def test_estimates() -> None:
    assert [estimate(""), estimate("abcd"), estimate("äö"), estimate("\ud800")] == [0, 2, 2, 1]
    assert estimate_prompt(PROMPT.messages) == 100


# Asking again.


def test_waits_grow_and_end() -> None:
    fake = Fake([BUSY] * 20)
    meter = fake.meter(Budget(seconds=None))
    with pytest.raises(NoAnswer, match="busy"):
        meter.ask(fake, PROMPT)
    assert fake.slept == [1, 2, 4, 8, 16, 32, 60]
    assert (len(fake.asked), meter.spending.attempts) == (8, 0)


def test_what_the_server_asks_for_is_waited_and_told_before() -> None:
    fake = Fake([NoAnswer("busy", again=True, wait=90.0), Reply("x")])
    seen: list[object] = []
    meter = Meter(
        Budget(),
        waiting=lambda seconds, why: seen.append((seconds, why)),
        sleep=seen.append,
        chance=lambda: 1,
    )
    assert meter.ask(fake, PROMPT).text == "x"
    assert seen == [(90 * 1.25, "busy"), 90 * 1.25]


def test_no_wait_beyond_the_budget() -> None:
    fake = Fake([NoAnswer("busy", again=True, wait=90.0), Reply("x")])
    with pytest.raises(NoAnswer, match="busy; after 0 seconds of waiting"):
        fake.meter(Budget(seconds=60)).ask(fake, PROMPT)
    assert fake.slept == []


def test_time_that_a_busy_server_has_eaten_is_no_fault_of_the_models() -> None:
    fake = Fake([NoAnswer("HTTP 500", again=True)] * 9)
    with pytest.raises(NoAnswer, match="HTTP 500; after"):
        fake.meter(Budget(seconds=10)).ask(fake, PROMPT)
    assert 3 <= len(fake.slept) <= 4


def test_no_wait_for_a_day() -> None:
    fake = Fake([NoAnswer("busy", again=True, wait=86_400.0)])
    with pytest.raises(NoAnswer, match="86400 seconds"):
        fake.meter(Budget(seconds=None)).ask(fake, PROMPT)
    assert fake.slept == []


def test_a_clear_end_is_one() -> None:
    fake = Fake([NoAnswer("no such model", help="look"), Reply("x")])
    with pytest.raises(NoAnswer) as caught:
        fake.meter(Budget()).ask(fake, PROMPT)
    found = diagnosis(caught.value)
    assert (found.code, found.message, found.help) == ("FW911", "no such model", "look")
    assert fake.slept == []


def test_a_cut_reply_is_counted_and_asked_for_again() -> None:
    half = Reply("half", "cut", Usage(100, 50, counted=False))
    fake = Fake([half, Reply("whole", usage=Usage(100, 10))])
    meter = fake.meter(Budget())
    assert meter.ask(fake, PROMPT).text == "whole"
    spent = meter.spending
    assert (len(fake.asked), spent.attempts) == (2, 1)
    assert spent.usage == Usage(200, 60, counted=False)


def test_a_request_that_brought_nothing_is_counted() -> None:
    fake = Fake([NoAnswer("silent", again=True, usage=Usage(100, 0, counted=False)), Reply("x")])
    meter = fake.meter(Budget())
    meter.ask(fake, PROMPT)
    assert meter.spending.usage.prompt == 100


@pytest.mark.parametrize(("reply", "requests"), [(Reply(" \n"), 3), (Reply("x", "cut"), 8)])
def test_replies_that_are_never_of_use(reply: Reply, requests: int) -> None:
    fake = Fake([reply] * 20)
    with pytest.raises(Unusable) as caught:
        fake.meter(Budget()).ask(fake, PROMPT)
    assert (diagnosis(caught.value).code, len(fake.asked)) == ("FW912", requests)


def test_an_empty_reply_at_the_limit_is_the_stages_to_judge() -> None:
    """All of it was spent on thoughts: the same question would be again."""
    fake = Fake([Reply("", "length")])
    assert fake.meter(Budget()).ask(fake, PROMPT).finish == "length"


def test_the_budget_holds_over_tries_too() -> None:
    half = Reply("half", "cut", Usage(100, 400, counted=False))
    fake = Fake([half] * 20)
    meter = fake.meter(Budget(tokens=2000))
    spent = until_spent(fake, meter)
    assert (spent.which, diagnosis(spent).code) == ("tokens", "FW913")
    assert meter.spending.usage.total <= 2000


def test_an_interruption_while_waiting() -> None:
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    fake = Fake([BUSY, Reply("x")])
    with pytest.raises(KeyboardInterrupt):
        Meter(Budget(), sleep=interrupt).ask(fake, PROMPT)
    assert len(fake.asked) == 1


def test_pauses() -> None:
    assert [pause(n, 0, 0) for n in (1, 2, 7, 8, 5000)] == [1, 2, 60, 60, 60]
    assert (pause(1, 30, 0), pause(1, 0.2, 1)) == (30, 1.25)


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        *[("7", 7.0), ("0.5", 0.5), (None, 0.0), ("", 0.0), ("soon", 0.0), ("-3", 0.0)],
        *[("nan", 0.0), ("inf", 0.0), ("Wed, 01 Jan 2025 00:01:30 GMT", 90.0)],
        *[("Wed, 01 Jan 2025 00:01:30 -0000", 90.0), ("Tue, 31 Dec 2024 00:00:00 GMT", 0.0)],
        ("Wed, 99 Jan 2025 00:00:00 GMT", 0.0),
    ],
)
def test_retry_after(header: str | None, seconds: float) -> None:
    assert asked_for(header, datetime(2025, 1, 1, tzinfo=UTC)) == seconds


def test_through_a_real_server() -> None:
    """429, 500, a cut reply and a whole one: one attempt, four requests, all tokens counted."""
    script = [status(429, retry_after=3), status(500), cut("half"), say("whole", usage=(20, 5))]
    slept: list[float] = []
    with serve(script) as server:
        meter = Meter(Budget(), Prices(1, 2), sleep=slept.append, chance=lambda: 0)
        assert meter.ask(connect("some-model", server.url, env={}), PROMPT).text == "whole"
    assert slept == [3, 2, 4]
    spent = meter.spending
    assert (spent.attempts, len(server.requests)) == (1, 4)
    assert spent.usage == Usage(100 + 20, 2 + 5, counted=False)
    assert spent.dollars == pytest.approx((120 + 2 * 7) / 1e6)
