"""No false alarm: libraries and honest kernels are accepted, over all plain specs."""

from __future__ import annotations

import itertools

import pytest

from flashwright.author.builtin.variants import make_spec
from flashwright.judge.judge import judge
from flashwright.judge.verdict import Verdict
from flashwright.sandbox.candidate import Candidate
from flashwright.selftest.case import KERNELS, SelftestCase
from flashwright.selftest.cases import CASES
from flashwright.spec import AttentionSpec
from tests.inside import judged

pytest.importorskip("torch")

HONEST = [case for case in CASES if case.on == "gpu" and case.honest and case.how == "judge"]
HONEST = [case for case in HONEST if not case.libraries and not case.factory]
SHARING = {"mha": (8, 8), "gqa": (8, 2), "mqa": (8, 1)}


def spec_of(sharing: str, dtype: str, width: int, causal: bool) -> AttentionSpec:
    heads, kv_heads = SHARING[sharing]
    return make_spec(
        sharing, heads=heads, kv_heads=kv_heads, dtype=dtype, head_dim=width, causal=causal
    )


ALL = list(itertools.product(SHARING, ("fp16", "bf16"), (64, 128), (False, True)))
SOME = [
    ("mha", "fp16", 64, False),
    ("gqa", "bf16", 128, True),
    ("mqa", "fp16", 128, True),
    ("gqa", "bf16", 64, False),
]


def shown(value: object) -> str:
    return {True: "causal", False: "full"}.get(value, str(value))  # type: ignore[call-overload]


def accepts(found: Verdict) -> None:
    assert found.ok, f"seed {found.seed}\n" + "\n".join(
        f"{o.name}: {o.message}" for o in found.offences
    )
    assert found.cases


def library(name: str) -> Candidate:
    return Candidate("python", f"{KERNELS}.libraries", name, factory=True)


@pytest.mark.parametrize("name", ["flash", "cudnn", "efficient", "math"])
@pytest.mark.parametrize(("sharing", "dtype", "width", "causal"), ALL, ids=shown)
def test_backends(name: str, sharing: str, dtype: str, width: int, causal: bool) -> None:
    accepts(judged(library(name), spec_of(sharing, dtype, width, causal), libraries=True))


@pytest.mark.parametrize(("sharing", "dtype", "width", "causal"), SOME, ids=shown)
def test_naive(sharing: str, dtype: str, width: int, causal: bool) -> None:
    accepts(judged(library("naive"), spec_of(sharing, dtype, width, causal), libraries=True))


@pytest.mark.parametrize(("sharing", "dtype", "width", "causal"), SOME, ids=shown)
def test_flex(sharing: str, dtype: str, width: int, causal: bool) -> None:
    """Each shape is compiled anew, so there are only a few."""
    spec = spec_of(sharing, dtype, width, causal)
    accepts(judged(library("flex"), spec, libraries=True, lengths=[(256, 256), (130, 200)]))


@pytest.mark.parametrize(("sharing", "dtype", "width", "causal"), SOME, ids=shown)
def test_triton(sharing: str, dtype: str, width: int, causal: bool) -> None:
    """Without leave to call libraries: its kernel is what the profile shows."""
    pytest.importorskip("triton")
    spec = spec_of(sharing, dtype, width, causal)
    one = Candidate(
        "python", "flashwright.selftest.kernels.triton_attention", "honest", factory=True
    )
    found = judged(one, spec)
    accepts(found)
    assert {c.name for c in found.checks if c.passed} >= {"libraries", "exactness", "mask"}


@pytest.mark.parametrize("case", HONEST, ids=lambda case: case.name)
def test_unusual_habits(case: SelftestCase) -> None:
    """As the self-test has them, but by the whole trial."""
    pytest.importorskip("triton")
    assert case.spec is not None
    accepts(judged(case.candidate, case.spec))


@pytest.mark.parametrize("name", ["flash", "cudnn", "naive"])
def test_in_a_process_of_its_own(name: str) -> None:
    spec = spec_of("gqa", "bf16", 128, True)
    accepts(judge(library(name), spec, libraries=True))
