"""A row's number leaves the scores of a loop for their maximum, and no result changes."""

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
SUMS = """\
Allocate LSE in global (batch, heads, q_len) as fp32
Allocate LSE in register (BM) as fp32
"""
STORE_SUMS = """\
Compute Smax + log(Ssum) and get LSE_register
Copy LSE (BM) in coordinate [B = item, H = head, L = block] from register to global"""
COPY_GATE = "Copy Gate (BM) in coordinate [H = head, L = block] from global to register"
COPY_PAST = "Copy Past (BN) in coordinate [H = head, T = i] from global to register"


def gated(score: str, **parts: object) -> str:
    """Attention with a number for each query and one for each key in its scores."""
    allocate = GATES + str(parts.pop("allocate", ""))
    scale = f"{COPY_PAST}\n  Compute {score} and get new S"
    return attention(allocate=allocate, copy_q=COPY_GATE, scale=scale, **parts)


def moved(text: str) -> bool:
    """Whether the maximum is lower by the number, and no score has it."""
    source = printed(text, strict=False)
    inside = source[source.index("for (int i") :]
    lower = "The scores of the loop have no Gate" in source
    assert lower == ("Gate(m)" not in inside[: inside.index("\n  }")])
    assert bool(re.search(r"Smax\(m\) = .*Gate\(m\);", source)) == lower, "and gets it back"
    return lower


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
@pytest.mark.parametrize("gpu", [pytest.param("a100", marks=pytest.mark.slow), "h200"])
def test_results_are_those_of_the_program(gpu: str) -> None:
    """Also of rows whose number is large, or hides all keys."""
    text = gated("S * Scale + Gate - Past", allocate=SUMS, end=STORE_SUMS).replace("fp16", "bf16")
    spec = make_spec("mha", heads=2, head_dim=64, dtype="bf16")
    (kernel,) = kernels([(text, spec)], gpu)
    dims = {"batch": 1, "heads": 2, "kv_heads": 2, "q_len": 70, "kv_len": 90}
    given = _inputs(dims)
    wanted = interpret(program(text, strict=False), given, dims)
    assert not wanted["O"][:, :, 5].any(), "the row that sees no key"
    out = {"O": np.full(given["Q"].shape, np.nan, given["Q"].dtype)}
    out["LSE"] = np.full(given["Q"].shape[:3], np.nan, np.float32)
    own = {name: dims[name] for name in kernel.plan.dims}
    result = run(kernel.program, kernel.plan, {**given, **out}, own, "eager")
    assert not result.findings
    np.testing.assert_allclose(out["O"].astype(np.float64), wanted["O"], atol=0.02)
    np.testing.assert_allclose(out["LSE"], wanted["LSE"], rtol=1e-5, atol=1e-3)


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
