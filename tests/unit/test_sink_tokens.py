"""Sink tokens: the first keys stay visible behind a window, for all that reasons of it."""

from __future__ import annotations

import numpy as np
import pytest

from flashwright.author.builtin import steps
from flashwright.author.builtin.author import write_code, write_sketch
from flashwright.author.builtin.reasoning import reasoning
from flashwright.author.builtin.variants import make_spec
from flashwright.check.check import check, checked_program
from flashwright.gpu import GPUS
from flashwright.judge import oracle, oracle_device
from flashwright.judge.cpu import default_cases, judge
from flashwright.judge.inputs import make_inputs
from flashwright.judge.problems import coverage, problems
from flashwright.lang.parse import parse
from flashwright.lower.translate import translate
from flashwright.measure.peers.features import features, need
from flashwright.measure.work import work_of
from flashwright.sandbox.candidate import Unable
from flashwright.spec import AttentionSpec, BadSpec
from tests.share import some

LENGTHS = ((1, 1), (100, 257), (257, 100))


def spec_with(**settings: object) -> AttentionSpec:
    return make_spec("gqa", heads=4, kv_heads=2, head_dim=64, **settings)


def test_visible_by_hand() -> None:
    causal = spec_with(causal=True, window=2, sink_tokens=1)
    assert oracle.visible(causal, 5, 5).astype(int).tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 0, 1, 1, 0],
        [1, 0, 0, 1, 1],
    ]
    both_sides = spec_with(window=1, sink_tokens=2)
    assert oracle.visible(both_sides, 4, 4).astype(int).tolist() == [
        [1, 1, 0, 0],
        [1, 1, 0, 0],
        [1, 1, 1, 0],
        [1, 1, 0, 1],
    ]
    # Queries before the first key: sinks are seen, unless the causal rule hides them.
    assert oracle.visible(spec_with(window=1, sink_tokens=2), 3, 2)[0].tolist() == [True, True]
    assert not oracle.visible(spec_with(causal=True, window=1, sink_tokens=2), 3, 2)[0].any()


def test_attention_by_hand() -> None:
    spec = make_spec("mha", heads=1, head_dim=8, causal=True, window=1, sink_tokens=1)
    dims = {"batch": 1, "heads": 1, "kv_heads": 1, "q_len": 3, "kv_len": 3}
    made = make_inputs(spec, dims, 0)
    flat = {**made, "Q": np.zeros_like(made["Q"])}  # every visible key weighs the same
    v = made["V"][0, 0].astype(np.float64)
    found = oracle.attention(spec, flat, dims)["O"][0, 0]
    np.testing.assert_allclose(found, [v[0], (v[0] + v[1]) / 2, (v[0] + v[2]) / 2])
    device = oracle_device.attention(np, spec, flat, dims)["O"][0, 0]
    np.testing.assert_allclose(found, device)


@pytest.mark.parametrize(("causal", "window", "tokens"), [(True, 40, 2), (False, 20, 140)])
@pytest.mark.parametrize("gpu", some(["a100", "h200"]))
def test_the_built_in_author_writes_them(gpu: str, causal: bool, window: int, tokens: int) -> None:
    spec = spec_with(causal=causal, window=window, sink_tokens=tokens, softcap=30.0)
    sketch = write_sketch(spec)
    assert not check(parse(sketch)).diagnostics
    made = write_code(sketch, spec, GPUS[gpu])
    program = checked_program(parse(made.code), GPUS[gpu])
    verdict = judge(program, spec, cases=default_cases(spec, LENGTHS))
    assert verdict.ok, verdict.diagnostics
    assert "no block between the two is visited" in reasoning(spec, GPUS[gpu], made)
    # The mask's positions are those of the block that a round takes, not of the round.
    text = " ".join(translate(program, GPUS[gpu]).source.split())
    assert "+ 1 - (i < Start + SinkBlocks ? i - Start : i) * BN)" in text
    without = spec.model_copy(update={"sink_tokens": None})
    assert not judge(program, without, cases=default_cases(without, LENGTHS)).ok


def test_a_window_that_no_usual_length_reaches_past_has_its_problem() -> None:
    """Else a program that forgets the window, or the sinks, would pass."""
    spec = spec_with(causal=True, window=512, sink_tokens=4)
    for device in ("cpu", "emulated", "cuda"):
        tried = [(p.dims["q_len"], p.dims["kv_len"]) for p in problems(spec, 0, device)]
        assert any(q >= 33 and kv >= 516 + 128 + 33 for q, kv in tried)
        assert {512, 513} <= {kv for _, kv in tried}
    left = coverage(spec_with(window=10**6), "cuda").unreached([])
    assert "kv_len = window 1000000 (too long for a trial)" in left
    gpu = GPUS["a100"]
    other = spec.model_copy(update={"sink_tokens": None})
    forgetful = checked_program(parse(write_code(write_sketch(other), other, gpu).code), gpu)
    assert not judge(forgetful, spec).ok


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("tokens", [1, 5, 90])
def test_counts_of_work_and_steps(causal: bool, tokens: int) -> None:
    spec = spec_with(causal=causal, window=7, sink_tokens=tokens)
    for q_len, kv_len in ((60, 60), (20, 60), (60, 20)):
        seen = int(oracle.visible(spec, q_len, kv_len).sum())
        assert work_of(spec, 2, q_len, kv_len).pairs == 2 * spec.heads * seen
    assert steps.needed(60, 60, causal, 7, tokens) == int(oracle.visible(spec, 60, 60).sum())
    tiles = oracle.visible(spec, 64, 64).reshape(4, 16, 8, 8).any(axis=(1, 3))
    assert steps.walk(64, 64, causal, 7, 16, 8, tokens).steps == int(tiles.sum())


def test_peers_have_them_or_say_so() -> None:
    spec = spec_with(causal=True, window=7, sink_tokens=2)
    assert features(spec) == ["windows", "sink tokens"]
    with pytest.raises(Unable, match="it has no sink tokens"):
        need(spec, "windows")


def test_a_spec_says_what_is_wrong_with_them() -> None:
    with pytest.raises(BadSpec) as caught:
        spec_with(causal=True, sink_tokens=2)
    assert "sink_tokens: changes nothing without a window: add window = 512" in str(caught.value)
    with pytest.raises(BadSpec, match="sink_tokens: must be at least 1"):
        spec_with(window=7, sink_tokens=0)
