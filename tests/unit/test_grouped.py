"""Rows that are the heads of a group, query after query (`L = page_idx`, `G = block_idx in
0:q_len * Group`): the checker, the CPU run, the kernels; and `flashwright group`, which makes such
programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import typer

from flashwright import gpu as gpus
from flashwright.author.builtin.author import write_code, write_sketch
from flashwright.author.builtin.variants import make_spec
from flashwright.check.check import check, checked_program
from flashwright.cli.rewrite import group as group_command
from flashwright.emulate.emulate import run as launch
from flashwright.judge.cpu import judge
from flashwright.judge.problems import Problem
from flashwright.lang.diagnostic import Failed
from flashwright.lang.format import format_tree
from flashwright.lang.parse import parse
from flashwright.lower.translate import translate
from flashwright.rewrite.grouped import grouped
from flashwright.rewrite.packed import packed
from flashwright.semantics.interpret import interpret
from flashwright.spec import AttentionSpec, load
from tests.example_programs import EXAMPLES
from tests.share import some
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
        (
            (STORE, STORE.replace("page_idx", "page_idx + 0")),
            "FW305",
            "what others hold",
            STORE[:8],
        ),
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


@pytest.mark.parametrize(
    ("edit", "code", "message"),
    [
        (("S, Scale and", "S, 2 * Scale and"), "FW802", "the score of row 0, key 0"),
        (("O_register / Ssum, 0", "2 * O_register / Ssum, 0"), "FW804", "row 0 of `O`"),
        (("Smax + log(Ssum)", "Smax + 2 * log(Ssum)"), "FW804", "row 0 of `LSE`"),
    ],
)
def test_what_is_wrong_is_found_at_its_statement(
    edit: tuple[str, str], code: str, message: str
) -> None:
    """Rows are known as heads of queries."""
    text, spec = of_group(5)
    wrong = text.replace(*edit)
    case = of_lengths(5, 3, 130)
    found = judge(checked_program(parse(wrong)), spec, cases=[case]).diagnostics[0]
    assert (found.code, message in found.message) == (code, True)
    assert edit[1] in wrong.splitlines()[found.span.line - 1]


def test_queries_and_rows_are_not_the_same_positions() -> None:
    """A vector with a number for each query does not line up with rows of several heads."""
    start = "Allocate Start in global (B: batch, L: q_len) as int32"
    text = CAUSAL.replace("Allocate LSE in global", f"{start}\nAllocate LSE in global")
    load = "Copy Start (BM) in coordinate [B = batch_idx, L = block_idx] from global to register"
    text = text.replace("Compute -1e30 and", f"{load}\nCompute -1e30 and")
    text = text.replace("where kv_idx < kv_len", "where kv_idx >= Start and kv_idx < kv_len")
    assert "FW603" in {d.code for d in check(parse(text)).errors}


# --- the kernel ---------------------------------------------------------------------------------


def test_masked_and_unmasked_iterations_are_split() -> None:
    made = translate(checked_program(parse(CAUSAL)), gpus.find("h200"))
    assert made.report is not None
    assert "masked iterations split, early exit" in made.report.in_words()
    assert {m.tensor for m in made.plan.maps} == {"K", "V"}
    (remark,) = [r for r in made.report.remarks if r.code == "FW813"]
    assert "a tile of `Q` may lie in several pages" in remark.text
    assert not remark.help


@needs_compilers
@pytest.mark.slow
@pytest.mark.parametrize(
    ("gpu", "groups"),
    [
        ("h200", (1, 5, 7, 16, 64, 128)),
        ("a100", (1, 5, 8, 64)),
        ("t4", (5, 6)),
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


# --- vectors ------------------------------------------------------------------------------------


def with_sinks(text: str) -> str:
    """The program with a sink logit for each head, which a vector of rows begins with."""
    text = text.replace(
        "Allocate LSE in global",
        "Allocate Sink in global (H: heads) as fp32\nAllocate LSE in global",
    )
    text = text.replace("0 and get Ssum", "1 and get Ssum")
    return text.replace("-1e30 and get Smax", "Sink[kv_head * Group + q_idx % Group] and get Smax")


def test_a_vector_has_the_positions_of_the_queries() -> None:
    """Before any tile of scores: the rows are those of Q and O."""
    text, spec = of_group(5)
    verdict = judge(
        checked_program(parse(with_sinks(text))), spec.model_copy(update={"sink": True})
    )
    assert verdict.ok


@pytest.mark.parametrize(
    "edit",
    [
        (
            "= page_idx, H = kv_head, G = block_idx in 0:q_len * Group] from global",
            "= 0, H = kv_head, G = 0] from global",
        ),
        ("Smax in register (BM)", "Smax in register (BN)"),
    ],
)
def test_a_vector_without_positions_is_an_error(edit: tuple[str, str]) -> None:
    text = with_sinks(CAUSAL).replace("param BN = 64", "param BN = 32").replace(*edit)
    if edit[1].endswith("from global"):
        text = text.replace(
            "G = block_idx in 0:q_len * Group] from register",
            "G = 0 in 0:q_len * Group] from register",
        )
    assert check(parse(text)).errors


# --- flashwright group --------------------------------------------------------------------------

GROUPED = sorted(
    {p.stem for p in EXAMPLES.glob("*.tl")}
    - {"append", "block_list", "decode", "documents", "packed", "paper", "differential"}
    - {"forgetting", "rope_split", "side_by_side"}
)
VARIANTS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True, "lse": True},
    "window": {"causal": True, "window": 40, "sink_tokens": 4},
    "sink": {"causal": True, "softcap": 30.0, "sink": True, "lse": True},
    "alibi": {"causal": True, "alibi": True},
}


def written(group: int, gpu: str = "h200", **settings: Any) -> tuple[str, AttentionSpec]:
    """The author's program for a variant, and what it computes."""
    name = "mha" if group == 1 else "mqa" if group == 16 else "gqa"
    kv_heads = 1 if name == "mqa" else 2
    dtype = "fp16" if gpu == "t4" else "bf16"
    sizes = {"heads": kv_heads * group, "kv_heads": kv_heads, "head_dim": 64, "dtype": dtype}
    spec = make_spec(name, **{**sizes, **settings})
    return write_code(write_sketch(spec), spec, gpus.find(gpu)).code, spec


def made(text: str, group: int) -> str:
    return format_tree(grouped(parse(text), group))


@pytest.mark.parametrize("name", GROUPED)
def test_examples_are_grouped(name: str) -> None:
    text = made((EXAMPLES / f"{name}.tl").read_text(), 5)
    assert not check(parse(text)).diagnostics
    assert "L = page_idx, H = kv_head, G = block_idx in 0:q_len * Group" in text
    assert "head_idx" not in text


def test_the_rewritten_program() -> None:
    text = made((EXAMPLES / "sink_softcap.tl").read_text(), 4)
    for line in (
        "param Group = 4",
        "grid block_idx = 0:q_len * Group / BM, kv_head = 0:kv_heads, batch_idx = 0:batch",
        "Allocate LSE in global (B: batch, L: q_len, H: kv_heads, G: Group) as fp32",
        "Compute Sink[kv_head * Group + q_idx % Group] and get SinkRow",
        "Compute SinkRow and get Smax",
        "for i = 0:min(kv_len, ceil((block_idx + 1) * BM / Group) + kv_len - q_len) / BN",
        "  Compute Mask S where kv_idx <= floor(q_idx / Group) + kv_len - q_len",
    ):
        assert f"{line}\n" in text
    window = made((EXAMPLES / "sink_tile.tl").read_text(), 4)
    assert "floor(block_idx * BM / Group) + kv_len - q_len - Window + 1" in window


@pytest.mark.parametrize("group", some([5, 16, 1], 3))
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_grouped_program_computes_the_same(variant: str, group: int) -> None:
    text, spec = written(group, **VARIANTS[variant])
    program = checked_program(parse(made(text, group)))
    kv_heads = spec.kv_heads
    for q_len, kv_len in LENGTHS:
        dims = {"batch": 1, "heads": kv_heads * group, "kv_heads": kv_heads}
        verdict = judge(program, spec, cases=[{**dims, "q_len": q_len, "kv_len": kv_len}])
        assert verdict.ok, verdict.diagnostics


@pytest.mark.slow
@pytest.mark.parametrize("group", [7, 8])
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_grouped_program_at_all_lengths(variant: str, group: int) -> None:
    text, spec = written(group, **VARIANTS[variant])
    verdict = judge(checked_program(parse(made(text, group))), spec)
    assert verdict.ok, verdict.diagnostics
    assert not verdict.unreached


def test_the_schedule_stays() -> None:
    """But for TMA, which does not load rows of several queries."""
    text, _ = written(8, causal=True, head_dim=128)
    card = gpus.find("h200")
    before = translate(checked_program(parse(text), card), card)
    after = translate(checked_program(parse(made(text, 8)), card), card)
    assert before.report is not None
    assert after.report is not None
    assert after.report.in_words().split(";")[1] == before.report.in_words().split(";")[1]
    assert after.plan.stays


Q_OF_G = "Q in global (G: batch, H: heads, L: q_len, D:"
PLAIN = (EXAMPLES / "sigmoid.tl").read_text()
REFUSED = {
    "no tensor has an axis of `heads`": (EXAMPLES / "packed.tl").read_text(),
    "`Start` has rows for queries": (EXAMPLES / "documents.tl").read_text(),
    "for one query head, and a tile holds": (EXAMPLES / "forgetting.tl").read_text(),
    "`Q` has an axis G": PLAIN.replace("Q in global (batch, heads, q_len,", Q_OF_G).replace(
        "Copy Q (BM, HeadDim) in coordinate [B", "Copy Q (BM, HeadDim) in coordinate [G"
    ),
    "no axis of the grid is `0:heads`": PLAIN.replace("0:heads,", "0:heads * 1,"),
    "no longer a block of BM queries": PLAIN.replace(
        "0:min(kv_len, (b", "0:min(kv_len, (1 + 1 * b"
    ),
    "differs between the heads": PLAIN.replace(
        "0:min(kv_len, (b", "0:min(kv_len + 0 * head_idx, (b"
    ),
    "is no name of a block": PLAIN.replace("L = block_idx]", "L at block_idx * BM]"),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_grouped_is_said(message: str) -> None:
    with pytest.raises(Failed) as failed:
        grouped(parse(REFUSED[message]), 5)
    assert failed.value.diagnostics[0].code == "FW916"
    assert message in failed.value.diagnostics[0].message


def run(*args: Any) -> int:
    with pytest.raises(typer.Exit) as ended:
        group_command(*args)
    return ended.value.exit_code


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "grouped.tl"
    assert run(str(EXAMPLES / "sigmoid.tl"), 4, out) == 0
    assert capsys.readouterr().out == f"{out}: grouped\n"
    assert run(str(EXAMPLES / "sigmoid.tl"), 4, None) == 0
    assert capsys.readouterr().out == out.read_text()
    assert run(str(out), 4, None) == 1
    assert "error[FW916]" in capsys.readouterr().err


@needs_compilers
@pytest.mark.slow
@pytest.mark.parametrize("gpu", ["h200", "a100", "t4"])
def test_the_grouped_kernels(gpu: str) -> None:
    cases = [(5, "window"), (7, "sink"), (16, "alibi"), (1, "causal")]
    codes = []
    for group, variant in cases:
        text, spec = written(group, gpu, **VARIANTS[variant])
        codes.append((made(text, group), spec))
    for kernel in kernels(codes, gpu):
        spec = kernel.spec
        for q_len, kv_len in LENGTHS:
            dims = {"batch": 2, "heads": spec.heads, "kv_heads": spec.kv_heads}
            problem = Problem({**dims, "q_len": q_len, "kv_len": kv_len}, "normal", 3)
            found, _, compared = emulated(kernel, problem)
            assert not found.findings, problem
            assert compared.ok, problem


def test_examples_with_a_spec_agree_when_grouped() -> None:
    spec = load(EXAMPLES / "sink_tile.toml")
    spec = spec.model_copy(update={"heads": 6, "kv_heads": 2})
    text = made((EXAMPLES / "sink_tile.tl").read_text(), 3)
    assert judge(checked_program(parse(text)), spec).ok


# --- packed sequences ---------------------------------------------------------------------------


def of_sequences() -> tuple[dict[str, Any], dict[str, int]]:
    """Three packed sequences, one of them without queries; heads are split in groups of 3."""
    drawn = np.random.default_rng(5)
    starts_q, starts_k = [0, 30, 30, 31], [0, 40, 49, 200]
    dims = {"batch": 3, "heads": 6, "kv_heads": 2, "q_len": 30, "kv_len": 151}
    dims |= {"q_tokens": 31, "kv_tokens": 200}
    arrays = {name: drawn.standard_normal((2, 200, 64)).astype(np.float32) for name in "KV"}
    arrays["Q"] = drawn.standard_normal((6, 31, 64)).astype(np.float32)
    arrays |= {"StartsQ": np.array(starts_q, np.int32), "StartsK": np.array(starts_k, np.int32)}
    return arrays, dims


def test_a_grouped_program_can_be_packed() -> None:
    """It gives what the packed program gives that is not grouped."""
    arrays, dims = of_sequences()
    plain = (EXAMPLES / "sink_tile.tl").read_text()
    one = checked_program(packed(parse(plain)))
    rows = packed(grouped(parse(plain), 3))
    assert "if block_idx * BM < q_length * Group\n" in format_tree(rows)
    results = interpret(one, arrays, dims)
    queries = np.ascontiguousarray(arrays["Q"].reshape(2, 3, 31, 64).transpose(2, 0, 1, 3))
    found = interpret(checked_program(rows), {**arrays, "Q": queries}, dims)["O"]
    again = found.transpose(1, 2, 0, 3).reshape(6, 31, 64).astype(np.float32)
    assert np.abs(again - results["O"].astype(np.float32)).max() < 0.01
    assert np.abs(again).max() > 0.1


@needs_compilers
@pytest.mark.slow
@pytest.mark.parametrize("gpu", ["h200", "a100"])
def test_packed_kernels_with_groups(gpu: str) -> None:
    """They get Q and O as the caller has them, with all heads in one axis."""
    arrays, dims = of_sequences()
    arrays = {n: a.astype(ml_dtypes.bfloat16) if n in "QKV" else a for n, a in arrays.items()}
    plain = (EXAMPLES / "sink_tile.tl").read_text()
    expected = interpret(checked_program(packed(parse(plain))), arrays, dims)["O"]
    text = format_tree(packed(grouped(parse(plain), 3)))
    (kernel,) = kernels([(text, load(EXAMPLES / "sink_tile.toml"))], gpu)
    out = np.full((6, 31, 64), np.nan, np.float32).astype(ml_dtypes.bfloat16)
    assert not launch(kernel.program, kernel.plan, {**arrays, "O": out}, dims).findings
    assert np.abs(out.astype(np.float32) - expected.astype(np.float32)).max() < 0.02
