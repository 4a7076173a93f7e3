"""Bugs planted in a translated kernel: each is found and named, at the right line of TL."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

from flashwright import gpu as gpus
from flashwright.author.builtin.author import write_code, write_sketch
from flashwright.author.builtin.variants import make_spec
from flashwright.build import toolchain
from flashwright.emulate.places import locate
from flashwright.judge.problems import Problem
from tests.share import some, wanted
from tests.unit.together import SCHEDULES, Kernel, emulated, kernels

pytestmark = pytest.mark.skipif(not toolchain.has_nvcc(), reason="there is no CUDA compiler here")

BARRIER = """    fw::wait<0>();
    __syncthreads();

    //  37"""
SIZES = {"batch": 1, "heads": 2, "kv_heads": 1, "q_len": 150, "kv_len": 203}
PROBLEM = Problem(SIZES, "normal", 1)
# What is planted: the code, what stands there instead, what is found, at which statements.
PLANTED: dict[str, tuple[str, str, Sequence[str], str]] = {
    "a removed barrier": (
        *(BARRIER, BARRIER.replace("    __syncthreads();\n", "")),
        *(("race", "unwritten"), "Copy K .* i \\+ 1|GEMM S, V_shared"),
    ),
    "a removed wait": (
        *(BARRIER, BARRIER.replace("    fw::wait<0>();\n", "")),
        *(("race",), "GEMM S, V_shared"),
    ),
    "a store past the end": (
        *("O, q_len - block_idx * BM);", "O, BM);"),
        *(("out_of_bounds",), "Copy O .* to global"),
    ),
    "a load past the end": (
        *("i * BN), kv_len - i * BN);", "i * BN), BN);"),
        *(("out_of_bounds",), "Copy V"),
    ),
    "an off-by-one coordinate": (
        *("p.V.tile(batch_idx, kv_head, i * BN)", "p.V.tile(batch_idx, kv_head, i * BN + 1)"),
        *(("out_of_bounds",), "Copy V"),
    ),
    "a swapped buffer": (
        *("fw::right(V_shared));", "fw::right(K_shared));"),
        *(("race",), "GEMM S, V_shared"),
    ),
    "a tile off its alignment": (
        *("BN, HeadDim>(shared + 32768);", "BN, HeadDim>(shared + 32776);"),
        *(("misaligned",), "Copy K|GEMM Q_shared"),
    ),
    "a copy that is not made": (
        *(
            "  fw::copy_async<Threads>(Q_shared,",
            "  if (q_len < 0) fw::copy_async<Threads>(Q_shared,",
        ),
        *(("unwritten",), "GEMM Q_shared"),
    ),
    "an input written to": (
        *("fw::store<Warps>(p.O.tile(", "fw::store<Warps>(p.Q.tile("),
        *(("read_only",), "Copy O .* to global"),
    ),
    "a barrier that some warps never reach": (
        *(BARRIER, BARRIER.replace("__syncthreads", "if (threadIdx.x < 64) __syncthreads")),
        *(("deadlock", "race"), "for i|GEMM|Copy"),
    ),
    "a barrier that half a warp never reaches": (
        *(BARRIER, BARRIER.replace("__syncthreads", "if (threadIdx.x % 32 < 16) __syncthreads")),
        *(("divergent",), "for i|GEMM Q_shared"),
    ),
}


@pytest.fixture(scope="module")
def made(request: pytest.FixtureRequest) -> dict[str, Kernel]:
    """The kernel as it is, and with each bug that is looked for."""
    spec = make_spec("gqa", head_dim=128, dtype="bf16")
    code = write_code(write_sketch(spec), spec, gpus.find("a100")).code
    bugs = [bug for bug in PLANTED if bug in wanted(request, "bug")]
    edits = [("", ""), *(PLANTED[bug][:2] for bug in bugs)]
    return dict(zip(["right", *bugs], kernels([(code, spec)], "a100", edits, True), strict=True))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_kernel_without_a_bug_gives_no_finding(made: dict[str, Kernel], schedule: str) -> None:
    result, _, compared = emulated(made["right"], PROBLEM, schedule)
    assert not result.findings
    assert compared.ok, compared.reason


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("bug", some(PLANTED, 4))
def test_a_planted_bug_is_found_at_its_line(
    made: dict[str, Kernel], bug: str, schedule: str
) -> None:
    kernel, (_, _, kinds, statement) = made[bug], PLANTED[bug]
    findings = emulated(kernel, PROBLEM, schedule)[0].findings
    named = [f for f in findings if f.kind in kinds]
    assert named, [f.kind for f in findings]
    lines = kernel.tl.splitlines()
    where = [locate(f.instruction, kernel.origin).tl for f in named]
    told = [lines[line - 1] for line in where if line is not None]
    assert any(re.search(statement, line) for line in told), told


@pytest.mark.slow
def test_a_mask_that_is_not_applied_gives_a_wrong_answer() -> None:
    """No rule of the hardware is broken: only the answer tells."""
    spec = make_spec("gqa", head_dim=64, dtype="fp16", causal=True)
    code = write_code(write_sketch(spec), spec, gpus.find("a100")).code
    edit = (re.search(r"S\(m, n\) = (.*) \? S\(m, n\) : -INFINITY;", _source(code)) or [""])[0]
    (kernel,) = kernels([(code, spec)], "a100", [(edit, "")])
    result, _, compared = emulated(kernel, PROBLEM)
    assert not result.findings
    assert not compared.ok


def _source(code: str) -> str:
    from flashwright.check.check import check
    from flashwright.lang.parse import parse
    from flashwright.lower.translate import translate

    card = gpus.find("a100")
    program = check(parse(code), card).program
    assert program is not None
    return translate(program, card).source
