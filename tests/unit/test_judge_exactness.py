"""Where the judge draws the line between a kernel's roundings and an approximation."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from flashwright.judge import judge as judging
from flashwright.judge import oracle
from flashwright.judge.answer import Answer, compare
from flashwright.judge.expected import Expected
from flashwright.judge.inputs import make_inputs
from flashwright.judge.problems import Problem, problems
from flashwright.judge.trial import Outcome
from flashwright.judge.verdict import Verdict
from flashwright.sandbox.candidate import Candidate
from flashwright.selftest.kernels import tiled
from flashwright.spec import AttentionSpec
from tests.inside import judged
from tests.share import some

DTYPES = ("bf16", "fp16")
KINDS = ("normal", "spectrum", "cancelling")


def usual(*given: Any) -> list[Problem]:
    """The inputs that this is about, at lengths that are quick."""
    chosen = [p for p in problems(*given) if p.usual and p.kind in KINDS]
    return [replace(p, dims={**p.dims, "q_len": 96, "kv_len": 160}) for p in chosen]


@pytest.fixture
def few() -> Iterator[None]:
    with (
        mock.patch.object(judging, "problems", usual),
        mock.patch.object(judging, "probe", lambda trial, spec, seed: Outcome(usual(spec, 0)[0])),
        mock.patch.object(judging, "FRESH", 0),
    ):
        yield


def verdict(kernel: str, dtype: str, **options: Any) -> Verdict:
    spec = AttentionSpec.make(
        variant="any", **{"heads": 2, "head_dim": 64, "causal": True, **options}, dtype=dtype
    )
    one = Candidate("python", "flashwright.selftest.kernels.tiled", kernel, factory=True)
    return judged(one, spec, device="cpu")


def names(found: Verdict) -> tuple[str, ...]:
    return tuple(offence.name for offence in found.offences)


# --- honest kernels ---------------------------------------------------------------------------


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", some(tiled.HONEST, 5))
def test_honest_kernels_pass(kernel: str, dtype: str) -> None:
    found = verdict(kernel, dtype, heads=4, kv_heads=2)
    assert found.ok, str(found)
    assert {c.kind for c in found.cases} == set(KINDS)
    assert {c.name for c in found.checks if c.passed} >= {"fp64", "weights"}
    errors = [c.comparison.weight_error for c in found.cases if c.kind == "spectrum"]
    assert any(error is not None and error < 4e-4 for error in errors), errors


OPTIONS: dict[str, dict[str, Any]] = {
    "full": {"causal": False},
    "window": {"window": 8},
    "one key": {"window": 1},
    "both sides": {"causal": False, "window": 20},
    "sink tokens": {"window": 16, "sink_tokens": 4},
    "softcap": {"softcap": 5.0},
    "alibi": {"alibi": True},
    "sink": {"sink": True, "window": 8},
    "narrow": {"head_dim": 8},
    "wide": {"head_dim": 192, "v_dim": 128, "heads": 4, "kv_heads": 1},
    "scale": {"scale": 0.01},
}


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("option", ["sink tokens", "wide"])
def test_honest_kernels_pass_whatever_the_spec(option: str, dtype: str) -> None:
    """The whole trial below has all of them."""
    found = verdict("cubic_lazy_split", dtype, **OPTIONS[option])
    assert found.ok, str(found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "dtype"), list(zip(tiled.HONEST, itertools.cycle(DTYPES), strict=False))
)
def test_honest_kernels_pass_the_whole_trial(kernel: str, dtype: str) -> None:
    """Each with every fourth of the options: all of them in turn."""
    for option in list(OPTIONS)[list(tiled.HONEST).index(kernel) % 4 :: 4]:
        found = verdict(kernel, dtype, **OPTIONS[option])
        assert found.ok, str(found)


# --- approximations ---------------------------------------------------------------------------

# By what the inputs of this page show. In fp16 the roundings are too small to hide the others.
REFUSED = [
    ("quadratic_exp2", "bf16", "approximation"),
    ("too_large", "bf16", "approximation"),
    ("weights_cut_off", "bf16", "approximation"),
    ("exp2_in_the_type", "bf16", "approximation"),
    ("weights_below_2_12_dropped", "bf16", "approximation"),
    ("weights_below_2_12_dropped", "fp16", "approximation"),
    ("weights_below_e_13_dropped", "bf16", "approximation"),
    ("weights_below_e_20_dropped", "bf16", "approximation"),
    ("scores_summed_in_fp16", "bf16", "low_precision"),
    *((kernel, "fp16", "low_precision") for kernel in ("quadratic_exp2", "too_large")),
    *(("weights_below_2_8_dropped", dtype, "low_precision") for dtype in DTYPES),
    *(("line_for_exp2", dtype, "low_precision") for dtype in DTYPES),
    *(("weights_in_e4m3", dtype, "low_precision") for dtype in DTYPES),
    *(("scores_summed_in_bf16", dtype, "low_precision") for dtype in DTYPES),
]


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize(("kernel", "dtype", "offence"), REFUSED)
def test_approximations_are_named(kernel: str, dtype: str, offence: str) -> None:
    found = verdict(kernel, dtype, causal=False, lse=False)
    assert names(found) == (offence,), str(found)
    failed = {c.name for c in found.checks if c.passed is False}
    assert ("weights" in failed) == (offence == "approximation")


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize(
    "option", some(["window", "both sides", "softcap", "alibi", "sink", "wide"], 3)
)
def test_approximations_are_found_whatever_the_spec(option: str) -> None:
    found = verdict("quadratic_exp2", "bf16", **OPTIONS[option], lse=False)
    assert names(found) == ("approximation",), str(found)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", tiled.CHEATS)
def test_no_approximation_passes_the_whole_trial(kernel: str, dtype: str) -> None:
    found = verdict(kernel, dtype, causal=False, lse=False)
    below = kernel in ("weights_below_e_13_dropped", "weights_below_e_20_dropped")
    if dtype == "fp16" and below:  # fp16 itself has no such weights in full
        assert found.ok, str(found)
    else:
        assert names(found), str(found)


def test_a_wrong_kernel_is_not_called_an_approximation() -> None:
    spec = AttentionSpec.make(variant="any", heads=2, head_dim=16, dtype="bf16", causal=True)
    one = Candidate("python", "flashwright.selftest.kernels.cpu", "scaled_twice")
    found = judged(one, spec, device="cpu")
    assert names(found) == ("wrong",), str(found)


# --- the rule itself --------------------------------------------------------------------------


def spectrum(
    dtype: str, keys: int = 256, **options: Any
) -> tuple[AttentionSpec, dict[str, Any], dict[str, Any]]:
    spec = AttentionSpec.make(variant="any", heads=2, head_dim=64, dtype=dtype, **options)
    dims = {"batch": 1, "heads": 2, "kv_heads": 2, "q_len": 256, "kv_len": keys}
    made = make_inputs(spec, dims, 3, "spectrum")
    return spec, made, Answer.of_attention(oracle.attention(spec, made, dims, noise=True))


@pytest.mark.parametrize(("dtype", "least"), [("bf16", 2.0**-39), ("fp16", 2.0**-12.9)])
def test_the_spectrum_has_weights_of_every_size(dtype: str, least: float) -> None:
    """And its outputs are of one size: V undoes it."""
    spec, made, expected = spectrum(dtype)
    weights = oracle.weights(spec, made, None, 0, 0).weights
    assert weights.min() < least
    sizes = np.sort(-np.log2(weights[0]))
    assert np.diff(sizes).max() < -np.log2(least) / 8
    assert 0.1 < expected["O"].min() * 16 < expected["O"].max() * 16 < 20


def test_the_limit_is_of_the_mean() -> None:
    """One element may be off by its roundings, all of them by a tenth of that may not."""
    spec, _, expected = spectrum("bf16")
    rng = np.random.default_rng(0)
    exact = expected["O"]
    rounded = exact * (1 + rng.uniform(-2e-3, 2e-3, exact.shape))
    assert compare(spec, "O", rounded, expected, "spectrum").ok
    for factor, good in ((1 + 4e-4, True), (1 + 1e-3, False), (1 - 1e-3, False)):
        found = compare(spec, "O", rounded * factor, expected, "spectrum")
        assert found.ok == good, found.reason
        assert compare(spec, "O", rounded * factor, expected, "normal").ok
    assert "too small in the mean" in found.reason


@pytest.mark.parametrize("keys", [1, 2, 3, 5, 9])
def test_roundings_that_are_alike_are_no_approximation(keys: int) -> None:
    """With few keys a column has nearly the same value in all rows, and rounds in one direction."""
    spec, made, expected = spectrum("bf16", keys)
    for kernel in (tiled.plain, tiled.cubic_exp2):
        found = kernel(spec)(*made.values())[0].astype(np.float64)
        result = compare(spec, "O", found, expected, "spectrum")
        assert result.ok, result.reason


def test_a_weight_that_the_type_does_not_have_may_be_lost() -> None:
    """e4m3 has no weights below 2^-9: a row of two keys then loses the smaller one whole."""
    dims = {"batch": 1, "heads": 1, "kv_heads": 1, "q_len": 1, "kv_len": 2}
    for dtype, good in (("fp8", True), ("fp16", False)):
        spec = AttentionSpec.make(variant="any", heads=1, head_dim=16, dtype=dtype)
        made = make_inputs(spec, dims, 3)
        made["Q"][:], made["K"][:, :, 0], made["K"][:, :, 1], made["V"][:, :, 0] = 1, 1.875, 0, 0
        expected = Answer.of_attention(oracle.attention(spec, made, dims, noise=True))
        assert expected["O"].any()
        nothing = np.zeros_like(expected["O"])
        nothing[..., 0] = expected["O"][..., 0]  # all zeros is an offence by itself
        assert compare(spec, "O", nothing, expected, "tail").ok == good


@pytest.mark.usefixtures("few")
def test_only_the_mean_counts_for_the_spectrum() -> None:
    """A few rows rule its RMS: the ratio of two honest kernels' errors would be any number."""
    with mock.patch.object(Expected, "library_errors", return_value={"O": 1.0}):
        found = verdict("plain", "bf16", lse=False)
    assert found.ok, str(found)
    assert {c.kind for c in found.cases if c.library is None} == {"spectrum"}


def test_a_spec_with_its_own_tolerance_has_no_line() -> None:
    spec, _, expected = spectrum("bf16", tolerance=0.02)
    assert compare(spec, "O", expected["O"] * 1.005, expected, "spectrum").ok


def test_8_bits_are_not_asked() -> None:
    spec = AttentionSpec.make(variant="mha", heads=2, head_dim=64, dtype="fp8")
    for device in ("cuda", "cpu", "emulated"):
        assert not {p.kind for p in problems(spec, 1, device)} & {"spectrum", "cancelling"}
