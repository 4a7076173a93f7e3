"""Products of bytes on Hopper under emulation: right with every schedule, where the sums are long
too; and what is found where a part of it is missing."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest

from flashwright import gpu as gpus
from flashwright.author.builtin.author import write_code, write_sketch
from flashwright.author.builtin.variants import make_spec
from flashwright.build import toolchain
from flashwright.judge.problems import Problem
from flashwright.spec import AttentionSpec
from tests.share import some, wanted
from tests.unit.together import SCHEDULES, Kernel, emulated, kernels

pytestmark = pytest.mark.skipif(not toolchain.has_nvcc(), reason="there is no CUDA compiler here")

# Many steps; no block of rows or keys is whole.
SIZES = {"batch": 1, "heads": 2, "kv_heads": 1, "q_len": 150, "kv_len": 1203}
PROBLEM = Problem(SIZES, "normal", 1)
# What is planted: the code, what stands there instead, what is found (nothing: a wrong answer).
PLANTED: dict[str, tuple[str, str, Sequence[str]]] = {
    "readers who wait for one of those that turn": (
        *("V_ring.init(Warps, fw::helpers);", "V_ring.init(Warps);"),
        ("barrier", "race", "unwritten"),
    ),
    "a loader who waits for one of those that turn": (
        *("V_landed_ring.init(fw::helpers);", "V_landed_ring.init(1);"),
        ("barrier", "race"),
    ),
    "a tile that is turned once too seldom": (
        *("fw::transpose<Warps>(", "if (i != 2) fw::transpose<Warps>("),
        ("deadlock",),
    ),
    "a sum without its steps": ("* drops_before(m) + O_step(m, n);", "* drops_before(m);", ()),
    "a factor of this round, not of the one before": (
        *("O(m, n) * drops_before(m)", "O(m, n) * drops(m)"),
        (),
    ),
}


def written(**settings: Any) -> tuple[str, AttentionSpec]:
    spec = make_spec("gqa", **{"dtype": "fp8", **settings})
    return write_code(write_sketch(spec), spec, gpus.find("h200")).code, spec


@pytest.fixture(scope="module")
def made(request: pytest.FixtureRequest) -> dict[str, Kernel]:
    """The kernel as it is, and with each bug that is looked for."""
    code, spec = written(head_dim=64)
    code = re.sub(r"param BN = \d+", "param BN = 128", code)
    code = re.sub(r"param Stages = \d+", "param Stages = 1", code)  # bugs show sooner
    bugs = [bug for bug in PLANTED if bug in wanted(request, "bug")]
    edits = [("", ""), *(PLANTED[bug][:2] for bug in bugs)]
    return dict(zip(["right", *bugs], kernels([(code, spec)], "h200", edits), strict=True))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_kernel_without_a_bug_is_right(made: dict[str, Kernel], schedule: str) -> None:
    result, _, compared = emulated(made["right"], PROBLEM, schedule)
    assert made["right"].plan.maps
    assert not result.findings
    assert compared.ok, compared.reason


@pytest.mark.parametrize("bug", some(PLANTED, 4))
def test_a_planted_bug_is_found(made: dict[str, Kernel], bug: str) -> None:
    kinds = set(PLANTED[bug][2])
    tried = [emulated(made[bug], PROBLEM, schedule) for schedule in SCHEDULES]
    found = [{f.kind for f in result.findings} for result, _, _ in tried]
    if kinds:  # a barrier that counts wrong may be right by chance
        assert any(one & kinds for one in found), found
    else:
        assert not any(found)
        assert not any(compared.ok for _, _, compared in tried)


@pytest.mark.slow
def test_operands_may_be_fetched_in_turn() -> None:
    """Head dim 256 goes by mma.sync, and spills otherwise."""
    edit = ("fw::gemm<Mma>(O,", "fw::gemm_in_order<Mma>(O,")
    (kernel,) = kernels([written(head_dim=256)], "h200", [edit])
    result, _, compared = emulated(kernel, Problem({**SIZES, "kv_len": 70}, "normal", 1))
    assert not result.findings
    assert compared.ok, compared.reason


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
def test_all_widths_in_many_steps(causal: bool) -> None:
    codes = [written(head_dim=width, causal=causal) for width in (64, 96, 128)]
    for kernel in kernels(codes, "h200"):
        assert kernel.plan.maps
        for schedule in SCHEDULES:
            result, _, compared = emulated(kernel, PROBLEM, schedule)
            assert not result.findings
            assert compared.ok, f"{kernel.spec}: {compared.reason}"
