"""A row's number leaves its scores for the maximum and the exponent, and no result changes."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from flashwright.author.builtin.variants import make_spec
from flashwright.emulate.emulate import run
from flashwright.semantics.interpret import interpret
from tests.unit.emulated import needs_compilers
from tests.unit.lowered import printed
from tests.unit.test_lower_partial import BY_HAND, VECTORS
from tests.unit.tl_attention import attention, program
from tests.unit.together import kernels

GATES = """\
Allocate Gate in global (H: heads, L: q_len) as fp32
Allocate Past in global (H: heads, T: kv_len) as fp32
Allocate Gate in register (BM) as fp32
Allocate Past in register (BN) as fp32
"""
COPY_GATE = "Copy Gate (BM) in coordinate [H = head, L = block] from global to register"
COPY_PAST = "Copy Past (BN) in coordinate [H = head, T = i] from global to register"


def gated(score: str, **parts: object) -> str:
    """Attention with a number for each query and one for each key in its scores."""
    allocate = GATES + str(parts.pop("allocate", ""))
    scale = f"{COPY_PAST}\n  Compute {score} and get new S"
    return attention(allocate=allocate, copy_q=COPY_GATE, scale=scale, **parts)


def moved(text: str) -> bool:
    """Whether the number is in the maximum and in the exponent, not in each score."""
    source = printed(text, strict=False)
    exponent = re.search(r"row_0 = .*Gate\(m\).* \* fw::log2_e;", source)
    maximum = re.search(r"fw::max\(Smax\(m\), most \+ .*Gate\(m\)", source)
    assert bool(exponent) == bool(maximum)
    return bool(exponent)


@pytest.mark.parametrize(
    "score",
    ["S * Scale + Gate - Past", "Gate + S * Scale", "S * Scale - Past - Gate"],
)
@pytest.mark.parametrize("parts", [{}, {"softmax": BY_HAND, "allocate": VECTORS}])
def test_a_number_that_is_added_to_the_score(score: str, parts: dict[str, Any]) -> None:
    assert moved(gated(score, **parts))


@pytest.mark.parametrize(
    "score",
    [
        "S * Scale + (Gate - Past)",  # two large numbers may cancel
        "(S + Gate) * Scale",
        "S * Gate",
        "tanh(S * Scale + Gate)",
        "where(Past > 0, S * Scale + Gate, S)",
    ],
)
def test_other_uses_stay_as_they_are_written(score: str) -> None:
    assert not moved(gated(score))


def test_scores_that_something_else_reads_keep_it() -> None:
    more = "Allocate Total in register (BM) as fp32"
    count = "Compute rowsum(S) and get Total\n  "
    softmax = "Compute Softmax S with Smax and Ssum and rescale O_register"
    use = "\n  Compute Ssum + 0 * Total and get new Ssum"
    assert not moved(gated("S * Scale + Gate", allocate=more, softmax=count + softmax + use))


@needs_compilers
@pytest.mark.parametrize("gpu", ["a100", "h200"])
def test_results_are_those_of_the_program(gpu: str) -> None:
    """Also of rows whose number is large, or hides all keys."""
    text = gated("S * Scale + Gate - Past").replace("fp16", "bf16")
    spec = make_spec("mha", heads=2, head_dim=64, dtype="bf16")
    (kernel,) = kernels([(text, spec)], gpu)
    dims = {"batch": 1, "heads": 2, "kv_heads": 2, "q_len": 70, "kv_len": 90}
    given = _inputs(dims)
    wanted = interpret(program(text, strict=False), given, dims)["O"]
    assert not wanted[:, :, 5].any(), "the row that sees no key"
    out = {"O": np.full(given["Q"].shape, np.nan, given["Q"].dtype)}
    own = {name: dims[name] for name in kernel.plan.dims}
    result = run(kernel.program, kernel.plan, {**given, **out}, own, "eager")
    assert not result.findings
    np.testing.assert_allclose(out["O"].astype(np.float64), wanted, atol=0.02)


def _inputs(dims: dict[str, int]) -> dict[str, Any]:
    import ml_dtypes

    random = np.random.default_rng(7)
    rows = {"Q": dims["q_len"], "K": dims["kv_len"], "V": dims["kv_len"]}
    given: dict[str, Any] = {
        name: random.standard_normal((1, 2, length, 64)).astype(ml_dtypes.bfloat16)
        for name, length in rows.items()
    }
    given["Gate"] = random.standard_normal((2, dims["q_len"]), dtype=np.float32)
    given["Past"] = random.standard_normal((2, dims["kv_len"]), dtype=np.float32)
    given["Gate"][:, 3], given["Gate"][:, 5] = 4000, -np.inf
    return given
