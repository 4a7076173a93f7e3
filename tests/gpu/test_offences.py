"""Every offence on the GPU is found, and has its name: callables and packages.

What does no harm is judged in this process, the rest in one of its own.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import pytest

from flashwright import gpu as gpus
from flashwright.author.builtin.variants import make_spec
from flashwright.build.compile import build
from flashwright.build.package import compiled, translated
from flashwright.check.check import check
from flashwright.judge.judge import judge
from flashwright.judge.verdict import Verdict
from flashwright.lang.parse import parse
from flashwright.lower.translate import translate
from flashwright.sandbox.candidate import Candidate
from flashwright.selftest.case import KERNELS, SelftestCase
from flashwright.selftest.cases import CASES
from tests.gpu.made import code_of, package_of
from tests.inside import judged

pytest.importorskip("torch")
pytest.importorskip("triton")

SPEC = make_spec("gqa", heads=4, kv_heads=2, head_dim=64, dtype="fp16", causal=True)


def names(found: Verdict) -> tuple[str, ...]:
    return tuple(offence.name for offence in found.offences)


def told(found: Verdict) -> str:
    return "\n".join(f"{o.name}: {o.message}" for o in found.offences)


# --- callables --------------------------------------------------------------------------------

JUDGED = [c for c in CASES if c.on == "gpu" and not c.honest and c.how == "judge"]
FROM_OUTSIDE = [c for c in JUDGED if c.kind in ("end", "hidden", "process", "system")]
FOUND = [c for c in JUDGED if c not in FROM_OUTSIDE]


def by_name(case: SelftestCase) -> str:
    return f"{case.function}-{case.expected[0]}"


@pytest.mark.parametrize("case", FOUND, ids=by_name)
def test_found_by_the_whole_trial(case: SelftestCase) -> None:
    assert case.spec is not None
    found = judged(case.candidate, case.spec)
    assert set(case.expected) & set(names(found)), told(found)


@pytest.mark.parametrize("function", ["torch_flash", "torch_matmul"])
def test_a_library_is_only_that(function: str) -> None:
    """It is right, after all."""
    one = Candidate("python", f"{KERNELS}.cuda_libraries", function)
    assert names(judged(one, SPEC)) == ("library_call",)


@pytest.mark.parametrize("case", FROM_OUTSIDE, ids=by_name)
def test_found_from_outside(case: SelftestCase) -> None:
    """In a process of its own; ours can use the GPU as before."""
    import torch

    found = judge(case.candidate, SPEC, seed=1, lengths=case.lengths, limits=case.limits)
    assert set(case.expected) & set(names(found)), told(found)
    assert case.says in told(found)
    assert float(torch.ones(4, device="cuda").sum()) == 4


def test_a_fallback_in_an_except_is_found_by_reading() -> None:
    found = judged(
        Candidate("python", f"{KERNELS}.calls_sdpa", "attention"), SPEC, lengths=[(9, 9)]
    )
    assert "library_call" in names(found)


# --- packages ---------------------------------------------------------------------------------

NARROW = """
struct Narrow {  // sums in fp16, as a faster instruction does
  __device__ static void fma(float& d0, float& d1, float& d2, float& d3, uint32_t a0, uint32_t a1,
                             uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1, float c0, float c1,
                             float c2, float c3) {
    cutlass::half_t c[4] = {cutlass::half_t(c0), cutlass::half_t(c1), cutlass::half_t(c2),
                            cutlass::half_t(c3)};
    uint32_t& x = reinterpret_cast<uint32_t*>(c)[0];
    uint32_t& y = reinterpret_cast<uint32_t*>(c)[1];
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%0, %1}, {%2, %3, %4, %5}, {%6, %7}, "
        "{%0, %1};"
        : "+r"(x), "+r"(y)
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    d0 = c[0], d1 = c[1], d2 = c[2], d3 = c[3];
  }
};
using Mma = Narrow;
"""
HEAD = "fw::floor_div(head_idx * kv_heads, heads)"
STORE = "if (p.O.data != nullptr) {"
MASK = "visible[n] ? S(m, n) : -INFINITY"
EDITS: dict[str, tuple[str, str, str]] = {
    "no rescale": ("O(m, n) = O(m, n) * drop;", "O(m, n) = O(m, n);", "wrong"),
    "no mask": (MASK, "S(m, n)", "mask_ignored"),
    "mask off by one": ("kv_len - q_len + 1 - i * BN", "kv_len - q_len - i * BN", "key_ignored"),
    "another head": (HEAD, "head_idx % kv_heads", "mask_ignored"),
    "no store": (STORE, STORE.replace(")", " && block_idx)"), "unwritten"),
    "rows behind the end": ("O, q_len - block_idx * BM);", "O, BM);", "out_of_bounds"),
    "sums in fp16": ("using Mma = cute::SM80_16x8x16_F32F16F16F32_TN;", NARROW, "low_precision"),
}
GPU = "a100"


@functools.cache
def edited(edit: str) -> Candidate:
    """A package whose kernel.cu was changed by hand, and compiled."""
    old, new, _ = EDITS[edit]
    card = gpus.find(GPU)
    program = check(parse(code_of(SPEC, GPU)), card).program
    assert program is not None
    made = translate(program, card, sparing=True)
    assert old in made.source
    source = made.source.replace(old, new)
    folder = Path(_FOLDERS.name, edit.replace(" ", "-"))
    folder.mkdir()
    files = {**translated(made), **compiled(build(source, made.plan.arch)), "kernel.cu": source}
    for name, data in files.items():
        (folder / name).write_bytes(data.encode() if isinstance(data, str) else data)
    return Candidate.package(folder)


_FOLDERS = tempfile.TemporaryDirectory(prefix="flashwright-tests-")


@pytest.mark.parametrize("edit", EDITS)
def test_a_package_with_a_wrong_kernel(edit: str) -> None:
    found = judged(edited(edit), SPEC)
    assert EDITS[edit][2] in names(found), told(found)


def test_a_package_that_multiplies_in_8_bits() -> None:
    plain = make_spec("mha", heads=4, head_dim=64, dtype="bf16", causal=True)
    fp8 = plain.model_copy(update={"dtype": "fp8"})
    found = judged(package_of(code_of(fp8, "l40s"), "l40s"), plain)
    assert "low_precision" in names(found), told(found)
    assert any("e4m3" in o.message for o in found.offences), told(found)
