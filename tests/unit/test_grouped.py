"""Rows that are the heads of a group, query after query (`L = page_idx`, `G = block_idx in
0:q_len * Group`): the checker, the CPU run, the kernels; and `flashwright group`, which makes such
programs."""

from __future__ import annotations

import pytest

from flashwright import gpu as gpus
from flashwright.author.builtin.variants import make_spec
from flashwright.check.check import check, checked_program
from flashwright.judge.cpu import judge
from flashwright.judge.problems import Problem
from flashwright.lang.parse import parse
from flashwright.lower.translate import translate
from flashwright.spec import AttentionSpec
from tests.unit.emulated import needs_compilers
from tests.unit.together import emulated, kernels

ROWS = "G = block_idx in 0:q_len * Group"
STORE = f"Copy O (BM, HeadDim) in coordinate [B = batch_idx, L = page_idx, H = kv_head, {ROWS}]"
LOAD = STORE.replace("Copy O", "Copy Q")
GRID = "0:q_len * Group / BM"
END = "floor(((block_idx + 1) * BM - 1) / Group) + 1"
MASK = "kv_idx <= floor(q_idx / Group) + kv_len - q_len"
CAUSAL = f"""
param Group = 5
param HeadDim = 64
param BM = 64
param BN = 64
param Scale = 1 / sqrt(HeadDim)

grid block_idx = {GRID}, kv_head = 0:kv_heads, batch_idx = 0:batch

Allocate Q in global (B: batch, L: q_len, H: kv_heads, G: Group, D: HeadDim) as bf16
Allocate K in global (batch, kv_heads, kv_len, HeadDim) as bf16
Allocate V in global (batch, kv_heads, kv_len, HeadDim) as bf16
Allocate O in global (B: batch, L: q_len, H: kv_heads, G: Group, D: HeadDim) as bf16
Allocate LSE in global (B: batch, L: q_len, H: kv_heads, G: Group) as fp32
Allocate K in shared (BN, HeadDim) as bf16 with stages 2
Allocate V in shared (BN, HeadDim) as bf16 with stages 2
Allocate S in register (BM, BN) as fp32
Allocate O in register (BM, HeadDim) as fp32
Allocate Smax in register (BM) as fp32
Allocate Ssum in register (BM) as fp32
Allocate LSE in register (BM) as fp32

{LOAD} from global to shared
Compute -1e30 and get Smax
Compute 0 and get Ssum
Compute 0 and get O_register
for i = 0:min(kv_len, {END} + kv_len - q_len) / BN
  Copy K (BN, HeadDim) in coordinate [B = batch_idx, H = kv_head, L = i] from global to shared
  Copy V (BN, HeadDim) in coordinate [B = batch_idx, H = kv_head, L = i] from global to shared
  Compute GEMM Q_shared, K_shared.T and get S
  Compute Multiply S, Scale and get new S
  Compute Mask S where kv_idx < kv_len and {MASK}
  Compute Softmax S with Smax and Ssum and rescale O_register
  Reshape S from (MMA_C, MMA_M, MMA_N) to (MMA_A, MMA_M, MMA_N_new)
  Compute GEMM S, V_shared and accumulate O_register
end
Compute Smax + log(Ssum) and get LSE_register
Compute where(Ssum > 0, O_register / Ssum, 0) and get new O_register
{STORE} from register to global
{STORE.replace("O (BM, HeadDim)", "LSE (BM)")} from register to global
"""
LENGTHS = ((1, 70), (3, 130), (16, 33), (70, 130))


def of_group(group: int, dtype: str = "bf16") -> tuple[str, AttentionSpec]:
    """The program for a group, and what it computes."""
    sizes = {"heads": 2 * group, "kv_heads": 2, "head_dim": 64}
    spec = make_spec("gqa", causal=True, dtype=dtype, lse=True, **sizes)
    return CAUSAL.replace("Group = 5", f"Group = {group}").replace("bf16", dtype), spec


def of_lengths(group: int, q_len: int, kv_len: int) -> dict[str, int]:
    dims = {"batch": 2 if q_len < 16 else 1, "heads": 2 * group, "kv_heads": 2}
    return {**dims, "q_len": q_len, "kv_len": kv_len}


# --- the checker --------------------------------------------------------------------------------


@pytest.mark.parametrize("group", [1, 2, 5, 7, 8, 64, 100])
def test_a_tile_may_hold_any_part_of_a_group(group: int) -> None:
    assert not check(parse(of_group(group)[0]), gpus.find("h200")).errors


@pytest.mark.parametrize(
    ("edit", "code", "message", "line"),
    [
        ((MASK, MASK.replace("floor(q_idx / Group)", "q_idx")), "FW604", "never added in", "for"),
        ((MASK, MASK.replace("floor", "ceil")), "FW604", "never added in", "for"),
        ((END, "floor(block_idx * BM / Group) + 1"), "FW604", "never added in", "for"),
        ((GRID, "0:q_len / BM"), "FW610", "is never written", STORE),
        ((STORE, STORE.replace("Group]", "Group - 1]")), "FW603", "up to", STORE[:8]),
        ((STORE, STORE.replace("* Group]", "]")), "FW603", "up to", STORE[:8]),
        ((LOAD, LOAD.replace("* Group]", "]")), "FW603", "up to", STORE[:8]),
        ((LOAD, LOAD.replace("Group]", "Group + 1]")), "FW605", "rows together", LOAD[:8]),
        ((STORE, STORE.replace("= block_idx in", "= 0 in")), "FW603", "stored at", STORE[:8]),
        ((STORE, STORE.replace("H = kv_head", "H = 0")), "FW603", "kv_heads 0", STORE[:8]),
        ((STORE, STORE.replace("page_idx", "page_idx + 0")), "FW305", "not written", STORE[:8]),
        ((STORE, STORE.replace("page_idx", "0")), "FW605", "not inside axis G", STORE[:8]),
        ((STORE, STORE.replace(" in 0:q_len * Group", "")), "FW305", "how many", STORE[:8]),
    ],
)
def test_the_checker_knows_rows_in_pages(
    edit: tuple[str, str], code: str, message: str, line: str
) -> None:
    assert edit[0] in CAUSAL
    text = CAUSAL.replace(*edit, 1)
    found = check(parse(text), gpus.find("h200")).errors
    assert [d for d in found if d.code == code and message in d.message], found
    lines = text.splitlines()
    assert any(lines[d.span.line - 1].strip().startswith(line[:8]) for d in found), found


def test_rows_in_pages_are_not_added_to() -> None:
    text = CAUSAL.replace("as bf16", "as fp32")
    text = text.replace(
        f"{STORE} from register to global", f"{STORE} from register to global and accumulate"
    )
    assert any("stored, not added to" in d.message for d in check(parse(text)).errors)


# --- the CPU run --------------------------------------------------------------------------------


@pytest.mark.parametrize("group", [1, 5, 8])
def test_the_cpu_run(group: int) -> None:
    text, spec = of_group(group)
    cases = [of_lengths(group, *lengths) for lengths in LENGTHS]
    assert judge(checked_program(parse(text)), spec, cases=cases).ok


def test_all_cases_of_a_program_with_groups_have_whole_ones() -> None:
    text, spec = of_group(5)
    verdict = judge(checked_program(parse(text)), spec)
    assert verdict.ok
    assert {r.dims["heads"] // r.dims["kv_heads"] for r in verdict.cases} == {5}


def test_what_is_wrong_is_found_at_its_statement() -> None:
    text, spec = of_group(5)
    wrong = text.replace("S, Scale and", "S, 2 * Scale and")
    (found,) = judge(checked_program(parse(wrong)), spec).diagnostics[:1]
    assert found.code.startswith("FW80")
    assert "Multiply S" in wrong.splitlines()[found.span.line - 1]


# --- the kernel ---------------------------------------------------------------------------------


def test_masked_and_unmasked_iterations_are_split() -> None:
    made = translate(checked_program(parse(CAUSAL)), gpus.find("h200"))
    assert made.report is not None
    assert "masked iterations split, early exit" in made.report.in_words()
    assert {m.tensor for m in made.plan.maps} == {"K", "V"}


@needs_compilers
@pytest.mark.parametrize(
    ("gpu", "groups"),
    [
        ("h200", (5, 16)),
        pytest.param("h200", (1, 7, 64, 128), marks=pytest.mark.slow),
        pytest.param("a100", (1, 5, 8, 64), marks=pytest.mark.slow),
        pytest.param("t4", (5, 6), marks=pytest.mark.slow),
    ],
)
def test_the_kernels(gpu: str, groups: tuple[int, ...]) -> None:
    """Tiles that hold parts of queries, whole ones, and part of one."""
    codes = [of_group(g, "fp16" if gpu == "t4" else "bf16") for g in groups]
    for group, kernel in zip(groups, kernels(codes, gpu), strict=True):
        for lengths in LENGTHS:
            dims = of_lengths(group, *lengths)
            found, _, compared = emulated(kernel, Problem(dims, "normal", 3))
            assert not found.findings, dims
            assert compared.ok, dims
