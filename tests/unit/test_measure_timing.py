"""Rounds of turns, their statistics, the roofline, and what the outputs of timed calls tell."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from flashwright.author.builtin.variants import make_spec
from flashwright.judge import oracle
from flashwright.judge.inputs import make_inputs
from flashwright.measure import spot
from flashwright.measure.timing import Rules, Timing, Turn, run_rounds
from flashwright.measure.work import Ceiling, work_of
from flashwright.sandbox.problem import TimedProblem
from flashwright.sandbox.process import Ended
from tests.unit.measure_fakes import right


class Player:
    """Takes a fixed time and writes down its turns."""

    def __init__(
        self, name: str, log: list[Any], clock: list[float], seconds: float = 1e-3, ends: int = 0
    ) -> None:
        self.name, self.log, self.clock, self.seconds, self.ends = name, log, clock, seconds, ends

    def turn(self, calls: int, seed: int, cold: bool = True) -> list[float]:
        self.log.append((self.name, seed, calls, cold))
        if self.ends and len([e for e in self.log if e[0] == self.name]) == self.ends:
            raise Ended("hang", "no answer")
        self.clock[0] += calls * self.seconds
        # Spread over 10 %: the medians do not settle early.
        return [self.seconds * (1 + 0.1 * random.random()) for _ in range(calls)]


def players(*names: str, **seconds: float) -> tuple[dict[str, Player], list[Any], list[float]]:
    log: list[Any] = []
    clock = [0.0]
    made = {name: Player(name, log, clock, seconds.get(name, 1e-3)) for name in names}
    return made, log, clock


def rounds_of(log: list[Any], count: int) -> list[list[Any]]:
    """The turns of each round, without the first of each player, which only finds out its speed."""
    timed = log[count:]
    return [timed[i : i + count] for i in range(0, len(timed), count)]


def test_each_round_has_everybody_once_and_begins_with_another() -> None:
    made, log, clock = players("a", "b", "c")
    timed = run_rounds(made, 100, Rules(seconds=0), clock=lambda: clock[0])
    rounds = rounds_of(log, 3)
    assert timed.rounds == len(rounds) == 5
    order = ["".join(turn[0] for turn in one) for one in rounds]
    assert order == ["abc", "bca", "cab", "abc", "bca"]
    assert all(len(samples) == 5 * 4 for samples in timed.cold.values())


def test_in_a_round_all_get_the_same_inputs_and_in_the_next_others() -> None:
    made, log, clock = players("a", "b")
    run_rounds(made, 100, Rules(seconds=0), clock=lambda: clock[0])
    seeds = [{turn[1] for turn in one} for one in rounds_of(log, 2)]
    assert all(len(one) == 1 for one in seeds)
    used = [seed + call for one in seeds for seed in one for call in range(4)]
    assert len(used) == len(set(used))


def test_rounds_go_on_until_the_time_is_up_or_the_medians_have_settled() -> None:
    made, _, clock = players("a", "b")
    assert run_rounds(made, 0, Rules(seconds=9), clock=lambda: clock[0]).rounds == 25
    made, _, clock = players("a", "b")
    # 8 ms a round, and the least rounds take 40 ms: the eighth round ends after the time.
    assert run_rounds(made, 0, Rules(seconds=0.060), clock=lambda: clock[0]).rounds == 8
    made, _, clock = players("a", "b")
    assert run_rounds(made, 0, Rules(settled=0.5), clock=lambda: clock[0]).rounds == 5


def test_who_is_slow_has_fewer_calls_in_a_turn() -> None:
    made, log, clock = players("quick", "slow", "slower", slow=0.015, slower=0.5)
    run_rounds(made, 0, Rules(), clock=lambda: clock[0])
    assert {(name, calls) for name, _, calls, _ in log[3:]} == {
        ("quick", 4),
        ("slow", 2),
        ("slower", 1),
    }


def test_who_ends_is_out_and_nobody_else_loses_anything() -> None:
    made, log, clock = players("a", "b", "c")
    made["b"].ends = 3
    timed = run_rounds(made, 0, Rules(seconds=0), clock=lambda: clock[0])
    assert set(timed.failed) == {"b"}
    assert timed.failed["b"].offence == "hang"
    assert set(timed.cold) == {"a", "c"}
    assert all(len(samples) == 20 for samples in timed.cold.values())
    assert [e[0] for e in log].count("b") == 3


def test_when_all_have_ended_the_rounds_are_over() -> None:
    made, _, clock = players("a")
    made["a"].ends = 1
    timed = run_rounds(made, 0, clock=lambda: clock[0])
    assert (timed.rounds, set(timed.failed), timed.cold) == (0, {"a"}, {})


def test_a_warm_turn_follows_each_cold_one() -> None:
    made, log, clock = players("a")
    timed = run_rounds(made, 0, Rules(seconds=0, warm=True), clock=lambda: clock[0])
    assert [cold for *_, cold in log[1:]] == [True, False] * 5
    assert len(timed.warm["a"]) == 20
    seeds = [seed for _, seed, _, _ in log]
    assert len(set(seeds)) == len(seeds)


def test_timings_are_medians_and_quartiles() -> None:
    found = Timing.of([5.0, 1.0, 2.0, 3.0, 100.0])
    assert found.median == 3.0
    assert found.spread == pytest.approx((5.0 - 2.0) / 2 / 3.0)
    assert found.samples == 5


def test_the_uncertainty_is_the_medians_standard_error() -> None:
    rng = np.random.default_rng(0)
    drawn = [Timing.of(list(rng.normal(10, 0.1, 60))) for _ in range(600)]
    told = np.mean([one.uncertainty for one in drawn])
    seen = np.std([one.median for one in drawn]) / 10
    assert told == pytest.approx(seen, rel=0.15)


# --- the work ---------------------------------------------------------------------------------

SPECS = (
    make_spec("mha", heads=2, causal=True),
    make_spec("mha", heads=2),
    make_spec("gqa", heads=4, kv_heads=2, causal=True, window=7),
    make_spec("gqa", heads=4, kv_heads=2, window=7),
    make_spec("mla", heads=2, causal=True),
    make_spec("nsa-compressed", heads=4, kv_heads=2),
    make_spec("nsa-selected", heads=4, kv_heads=2, top_k=3),
    make_spec("nsa-window", heads=4, kv_heads=2, window=9),
)


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: f"{s.variant} {s.causal} {s.window}")
@pytest.mark.parametrize(("q_len", "kv_len"), [(70, 70), (200, 200), (5, 90), (90, 5)])
def test_visible_pairs_are_counted_exactly(spec: Any, q_len: int, kv_len: int) -> None:
    tokens = q_len
    if spec.branch == "compressed":
        kv_len = spec.compressed_blocks(tokens)
    dims = {"batch": 2, "q_len": q_len, "kv_len": kv_len}
    seen = oracle.visible(spec, q_len, kv_len, tokens)
    idx = None
    if spec.branch == "selected":
        idx = make_inputs(spec, dims, 0)["Idx"]
        pairs = sum(
            int((seen & oracle.chosen(spec, idx[b, h], kv_len)).sum()) * spec.group
            for b in range(2)
            for h in range(spec.kv_heads)
        )
    else:
        pairs = int(seen.sum()) * 2 * spec.heads
    found = work_of(spec, 2, q_len, kv_len, idx)
    assert found.pairs == pairs
    assert found.flops == 2 * pairs * (spec.head_dim + spec.value_dim)
    assert found.written == 2 * spec.heads * q_len * spec.value_dim * 2


def test_the_roofline_is_the_narrower_of_arithmetic_and_memory() -> None:
    spec = make_spec("mha", heads=16, causal=False)
    long = work_of(spec, 1, 16384, 16384)
    gpu = Ceiling(1e15, 4e12, l2_bytes=0)
    assert gpu.least_seconds(long) == pytest.approx(4 * 16384**2 * 128 * 16 / 1e15)
    short = work_of(spec, 1024, 16, 16)
    assert short.bytes == 4 * 1024 * 16 * 16 * 128 * 2
    assert gpu.least_seconds(short) == pytest.approx(short.bytes / 4e12)
    # What fits into the L2 need not have been written when the kernel ends.
    cached = Ceiling(1e15, 4e12, l2_bytes=10**9)
    assert cached.least_seconds(short) == pytest.approx(short.read / 4e12)


# --- the outputs of timed calls ---------------------------------------------------------------

PROBLEM = TimedProblem(make_spec("mha", heads=4, dtype="bf16", causal=True), 3, 256)


class Outputs:
    """Gives the right answer, or what somebody makes of it."""

    def __init__(self, change: Any = lambda exact, seed: exact) -> None:
        self.change, self.seed = change, 0
        self.fetched: list[tuple[int, int, int]] = []

    def fetch(self, call: int, batch: int, head: int, name: str = "O") -> Any:
        self.fetched.append((call, batch, head))
        seed = self.seed + call
        found = self.change(right(PROBLEM, seed, batch, head), seed)
        return np.asarray(found, np.float32)


def sampled_check(
    player: Outputs, chance: int = 0, rounds: int = 12, slack: float = 1.0
) -> spot.OutputCheck:
    sampler = spot.OutputSampler(player, PROBLEM, Rules(), random.Random(chance))
    for number in range(rounds):
        player.seed = 1000 + 64 * number
        sampler.sample(Turn("a", number, player.seed, 4))
    return sampler.judge(right, slack)


@pytest.mark.parametrize("chance", range(8))
def test_at_least_two_turns_are_looked_at(chance: int) -> None:
    player = Outputs()
    found = sampled_check(player, chance, rounds=5)
    assert found.offence is None
    assert found.checked == 2
    assert found.relative_rms is not None
    assert found.relative_rms < 1e-6
    assert len({(batch, head) for _, batch, head in player.fetched}) == 1


def test_which_turns_and_heads_are_looked_at_is_drawn() -> None:
    looked = set()
    for chance in range(20):
        player = Outputs()
        sampled_check(player, chance, rounds=5)
        looked.add(player.fetched[0])
    assert len(looked) > 5


@pytest.mark.parametrize(
    ("change", "offence"),
    [
        (lambda exact, seed: exact * 0, "wrong"),
        (lambda exact, seed: exact + 0.1, "wrong"),
        (lambda exact, seed: exact * np.nan, "wrong"),
        (lambda exact, seed: exact[:4], "wrong"),
        (lambda exact, seed: right(PROBLEM, 1, 0, 0), "replay"),
        # cached by address: there are three sets of inputs, so call 3 looks like call 0
        (lambda exact, seed: right(PROBLEM, seed % 64 % 3, 0, 0), "replay"),
    ],
    ids=["zeros", "off", "nan", "shape", "replay", "by address"],
)
def test_a_wrong_output_is_named(change: Any, offence: str) -> None:
    assert sampled_check(Outputs(change)).offence == offence


def test_honest_only_at_first_is_caught_in_the_end() -> None:
    late = Outputs(lambda exact, seed: exact if seed < 1000 + 64 * 5 else exact * 0)
    caught = [sampled_check(late, chance, rounds=25).offence for chance in range(20)]
    assert caught.count("wrong") >= 12


def test_who_rounds_more_is_given_its_slack() -> None:
    unit = oracle.ROUNDOFF["bf16"]

    def coarse(exact: Any, seed: int) -> Any:
        return exact * (1 + 4 * unit)

    assert sampled_check(Outputs(coarse)).offence == "wrong"
    assert sampled_check(Outputs(coarse), slack=4.0).offence is None
