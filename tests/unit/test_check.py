"""The checker on realistic programs: the right line, the labels that explain it, the fix that mends."""

# ruff: noqa: E501  a line of TL is as long as it is

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from flashwright import gpu
from flashwright.check.check import Checked, check, checked_program
from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.lang.fix import apply
from flashwright.lang.parse import parse

# GQA, full attention, with a log-sum-exp. Every case below is this program with a few lines changed.
GQA = """\
param HeadDim = 128
param BM = 64
param BN = 64
param Scale = 1 / sqrt(HeadDim)
grid block_idx = 0:q_len / BM, head_idx = 0:heads, batch_idx = 0:batch
let kv_head = floor(head_idx * kv_heads / heads)
Allocate Q in global (batch, heads, q_len, HeadDim) as bf16
Allocate K in global (batch, kv_heads, kv_len, HeadDim) as bf16
Allocate V in global (batch, kv_heads, kv_len, HeadDim) as bf16
Allocate O in global (batch, heads, q_len, HeadDim) as bf16
Allocate LSE in global (batch, heads, q_len) as fp32
Allocate S in register (BM, BN) as fp32
Allocate O in register (BM, HeadDim) as fp32
Allocate Smax in register (BM) as fp32
Allocate Ssum in register (BM) as fp32
Allocate LSE in register (BM) as fp32
Compute 0 and get O_register
Compute -1e30 and get Smax
Compute 0 and get Ssum
Copy Q (BM, HeadDim) in coordinate [B = batch_idx, H = head_idx, L = block_idx] from global to shared
for i = 0:kv_len / BN
  Copy K (BN, HeadDim) in coordinate [B = batch_idx, H = kv_head, L = i] from global to shared
  Compute GEMM Q_shared, K_shared.T and get S
  Compute Multiply S, Scale and get new S
  Compute Mask S where kv_idx < kv_len
  Copy V (BN, HeadDim) in coordinate [B = batch_idx, H = kv_head, L = i] from global to shared
  Compute Softmax S with Smax and Ssum and rescale O_register
  Reshape S from (MMA_C, MMA_M, MMA_N) to (MMA_A, MMA_M, MMA_N_new)
  Compute GEMM S, V_shared and accumulate O_register
end
Compute where(Ssum > 0, O_register / Ssum, 0) and get new O_register
Copy O (BM, HeadDim) in coordinate [B = batch_idx, H = head_idx, L = block_idx] from register to global
Compute Smax + log(Ssum) and get LSE_register
Copy LSE (BM) in coordinate [B = batch_idx, H = head_idx, L = block_idx] from register to global
"""
COPY_Q = (
    "Copy Q (BM, HeadDim) in coordinate [B = batch_idx, H = head_idx, L = block_idx] from global"
)
COPY_K = (
    "Copy K (BN, HeadDim) in coordinate [B = batch_idx, H = kv_head, L = i] from global to shared"
)
COPY_V = COPY_K.replace("Copy K", "Copy V")
COPY_O = "Copy O (BM, HeadDim) in coordinate [B = batch_idx, H = head_idx, L = block_idx]"
GEMM_S = "Compute GEMM Q_shared, K_shared.T and get S"
GEMM_O = "Compute GEMM S, V_shared and accumulate O_register"
MASK = "  Compute Mask S where kv_idx < kv_len\n"
RESHAPE = "  Reshape S from (MMA_C, MMA_M, MMA_N) to (MMA_A, MMA_M, MMA_N_new)\n"
SOFTMAX = "  Compute Softmax S with Smax and Ssum and rescale O_register\n"
NORMALISE = "Compute where(Ssum > 0, O_register / Ssum, 0) and get new O_register\n"

Change = tuple[str, str]


def changed(*changes: Change, base: str = GQA) -> str:
    for old, new in changes:
        assert base.count(old) == 1, f"{base.count(old)} times: {old}"
        base = base.replace(old, new)
    return base


def run(source: str, gpu_name: str | None = None) -> Checked:
    return check(parse(source), gpu.find(gpu_name) if gpu_name else None)


def codes(source: str, gpu_name: str | None = None) -> list[str]:
    return [d.code for d in run(source, gpu_name).diagnostics]


def line_of(source: str, text: str) -> int:
    """The one line that contains the text."""
    (line,) = [n for n, row in enumerate(source.splitlines(), 1) if text in row]
    return line


def lines(diagnostic: Diagnostic) -> list[int]:
    return [label.span.line for label in diagnostic.secondary]


def the(source: str, code: str, gpu_name: str | None = None) -> Diagnostic:
    """The first finding, which has this code."""
    found = run(source, gpu_name).diagnostics
    assert found, f"{code} was not found"
    assert found[0].code == code, [(d.code, d.message) for d in found]
    assert found[0].span is not None
    return found[0]


@dataclass(frozen=True)
class Case:
    """A mistake: what changes, and what the checker must say where."""

    name: str
    changes: tuple[Change, ...]
    code: str
    line: str | int
    """The line of the first finding: its number, or words that no other line has."""
    also: tuple[str, ...] = ()
    """Lines that secondary labels point at."""
    mends: bool = False
    """The fix makes the program clean."""
    gpu: str | None = None
    says: str = ""
    """Words of the message or the help line."""

    @property
    def source(self) -> str:
        return changed(*self.changes)


HALF_DIM = ("param HeadDim = 128", "param HeadDim = 64")
WIDE_KEYS = ("param BN = 64", "param BN = 128")
UNROUNDED = ("floor(head_idx * kv_heads / heads)", "head_idx * kv_heads / heads")

CASES = [
    # listing 1 and listing 2 in a whole program
    Case("no reshape", ((RESHAPE, ""),), "FW501", GEMM_O, also=(GEMM_O,), mends=True),
    Case(
        "k not transposed, square tiles",
        (HALF_DIM, ("K_shared.T", "K_shared")),
        "FW503",
        "GEMM Q_shared",
        also=(COPY_Q, COPY_K),
        mends=True,
    ),
    Case(
        "v transposed, square tiles",
        (HALF_DIM, ("GEMM S, V_shared", "GEMM S, V_shared.T")),
        "FW503",
        "GEMM S, V",
        mends=True,
    ),
    # shapes
    Case("k not transposed", (("K_shared.T", "K_shared"),), "FW301", "GEMM Q_shared", mends=True),
    Case(
        "v transposed",
        (("GEMM S, V_shared", "GEMM S, V_shared.T"),),
        "FW301",
        "GEMM S, V",
        mends=True,
    ),
    Case(
        "scores as wide as the head",
        (("Allocate S in register (BM, BN)", "Allocate S in register (BM, HeadDim)"),),
        "FW302",
        GEMM_S,
        also=("Allocate S in register",),
        says="(BM, HeadDim) = (64, 128)",
    ),
    Case(
        "a maximum for each key",
        (WIDE_KEYS, ("Allocate Smax in register (BM)", "Allocate Smax in register (BN)")),
        "FW303",
        "Compute Softmax",
        says="`S` has 64 rows",
    ),
    Case(
        "a tile of another height",
        (("Copy O (BM, HeadDim)", "Copy O (32, HeadDim)"),),
        "FW304",
        "Copy O (32",
        also=("Allocate O in register",),
    ),
    Case(
        "no head",
        ((COPY_K, COPY_K.replace("H = kv_head, ", "")),),
        "FW305",
        "Copy K (BN",
        also=("Allocate K",),
        says="axis H",
    ),
    Case(
        "a size of the caller's",
        (("S in register (BM, BN)", "S in register (BM, kv_len)"),),
        "FW306",
        "Allocate S in",
    ),
    # use before Copy or Allocate
    Case(
        "q never copied",
        ((f"{COPY_Q} to shared\n", ""),),
        "FW403",
        GEMM_S,
        says="writes `Q` in shared",
    ),
    Case(
        "k copied too late", ((f"  {COPY_K}\n", ""), (MASK, f"{MASK}  {COPY_K}\n")), "FW403", GEMM_S
    ),
    Case(
        "k not in global",
        (("Allocate K in global (batch, kv_heads, kv_len, HeadDim) as bf16\n", ""),),
        "FW404",
        "Copy K (BN",
    ),
    Case("s not allocated", (("Allocate S in register (BM, BN) as fp32\n", ""),), "FW201", GEMM_S),
    Case(
        "allocated below its use",
        (
            ("Allocate Ssum in register (BM) as fp32\n", ""),
            (COPY_Q, f"Allocate Ssum in register (BM)\n{COPY_Q}"),
        ),
        "FW201",
        "Compute 0 and get Ssum",
        also=("Allocate Ssum",),
        says="before it is allocated",
    ),
    # spaces
    Case(
        "store from shared memory before Hopper",
        ((f"{COPY_O} from register", f"Copy O from register to shared\n{COPY_O} from shared"),),
        "FW401",
        "from shared to global",
        gpu="a100",
        says="TMA",
    ),
    Case(
        "global to global",
        ((f"{COPY_O} from register", f"{COPY_O} from global"),),
        "FW401",
        "global to global",
    ),
    Case(
        "softmax in shared memory",
        ((SOFTMAX, SOFTMAX.replace("Softmax S", "Softmax Q_shared")),),
        "FW402",
        "Compute Softmax",
        says="Copy Q from shared to register",
    ),
    Case(
        "compute on global memory",
        (("Multiply S, Scale", "Multiply Q_global, Scale"),),
        "FW402",
        "Multiply",
    ),
    # names
    Case("misspelt tile", (("K_shared.T", "K_shraed.T"),), "FW201", "GEMM Q_shared", mends=True),
    Case(
        "misspelt size",
        (("Allocate O in register (BM, HeadDim)", "Allocate O in register (BM, HeadDimm)"),),
        "FW201",
        "Allocate O in register",
        mends=True,
    ),
    Case(
        "misspelt operation",
        ((SOFTMAX, SOFTMAX.replace("Softmax", "Sofmax")),),
        "FW204",
        "Sofmax",
        mends=True,
    ),
    Case(
        "misspelt type",
        (
            (
                "Allocate V in global (batch, kv_heads, kv_len, HeadDim) as bf16",
                "Allocate V in global (batch, kv_heads, kv_len, HeadDim) as b16",
            ),
        ),
        "FW208",
        "Allocate V",
        mends=True,
    ),
    Case(
        "param twice",
        (("param Scale", "param BN = 32\nparam Scale"),),
        "FW202",
        "param BN = 32",
        also=("param BN = 64",),
    ),
    Case(
        "allocated twice",
        (("Allocate Ssum", "Allocate Smax in register (BN)\nAllocate Ssum"),),
        "FW202",
        "Smax in register (BN)",
        also=("Smax in register (BM)",),
    ),
    Case(
        "a tile named like a number",
        (("Allocate Ssum", "Allocate BN in register (BM)\nAllocate Ssum"),),
        "FW202",
        "Allocate BN",
        also=("param BN",),
    ),
    Case(
        "unused parameter",
        (("param Scale", "param Stages = 2\nparam Scale"),),
        "FW203",
        "param Stages",
    ),
    Case(
        "unused tile",
        (("Allocate Ssum", "Allocate P in shared (BM, BN)\nAllocate Ssum"),),
        "FW203",
        "Allocate P",
    ),
    Case("a number as a tile", (("and get S\n", "and get BN\n"),), "FW206", "GEMM Q_shared"),
    Case(
        "no grid",
        (("grid block_idx = 0:q_len / BM, head_idx = 0:heads, batch_idx = 0:batch\n", ""),),
        "FW207",
        "let kv_head",
        mends=True,
    ),
    # loops and coordinates
    Case(
        "loop too short",
        (("0:kv_len / BN", "0:kv_len / BN - 1"),),
        "FW604",
        "for i",
        also=("Compute where",),
    ),
    Case("loop rounded down", (("0:kv_len / BN", "0:floor(kv_len / BN)"),), "FW604", "for i"),
    Case(
        "loop starts late",
        (("0:kv_len / BN", "1:kv_len / BN"),),
        "FW604",
        "for i",
        says="kv_len 0..63",
    ),
    Case(
        "loop too long",
        (("0:kv_len / BN", "0:kv_len / BN + 1"),),
        "FW605",
        "Copy K",
        says="kv_len = 193",
    ),
    Case("loop over elements", (("0:kv_len / BN", "0:kv_len"),), "FW605", "Copy K"),
    Case(
        "k of the next block", ((COPY_K, COPY_K.replace("L = i", "L = i + 1")),), "FW605", "Copy K"
    ),
    Case(
        "v of the first block",
        ((COPY_V, COPY_V.replace("L = i", "L = 0")),),
        "FW603",
        GEMM_O,
        also=(COPY_K, "Copy V"),
    ),
    Case(
        "v of another head",
        ((COPY_V, COPY_V.replace("H = kv_head", "H = 0")),),
        "FW603",
        GEMM_O,
        says="kv_heads",
    ),
    Case(
        "query heads for k",
        ((COPY_K, COPY_K.replace("kv_head,", "head_idx,")),),
        "FW605",
        "Copy K",
        says="axis H",
    ),
    Case(
        "stored in the wrong rows",
        ((f"{COPY_O} from", f"{COPY_O.replace('L = block_idx', 'L = 0')} from"),),
        "FW603",
        "L = 0] from register",
        also=(COPY_Q,),
    ),
    Case(
        "some rows never stored",
        (("0:q_len / BM", "0:floor(q_len / BM)"),),
        "FW610",
        "Copy O (BM",
        says="never written",
    ),
    Case("one batch only", (("0:batch", "0:1"),), "FW610", "Copy O (BM", says="B = 1"),
    Case("heads not rounded", (UNROUNDED,), "FW306", "Copy K", mends=True, says="1/2"),
    # hazards
    Case(
        "get for accumulate",
        ((GEMM_O, GEMM_O.replace("accumulate", "get")),),
        "FW602",
        "GEMM S, V",
        also=("Compute Softmax",),
    ),
    Case(
        "q overwritten unread",
        ((f"{COPY_Q} to shared\n", f"{COPY_Q} to shared\n" * 2),),
        "FW602",
        21,
    ),
    # state
    Case(
        "o not initialised",
        (("Compute 0 and get O_register\n", ""),),
        "FW601",
        "Compute Softmax",
        says="Compute 0 and get O_register",
    ),
    Case(
        "maximum not initialised",
        (("Compute -1e30 and get Smax\n", ""),),
        "FW601",
        "Compute Softmax",
        says="Compute -1e30 and get Smax",
    ),
    Case(
        "sum not initialised",
        (("Compute 0 and get Ssum\n", ""),),
        "FW601",
        "Compute Softmax",
        says="`Ssum`",
    ),
    Case(
        "o not rescaled",
        ((" and rescale O_register", ""),),
        "FW607",
        "Compute Softmax",
        also=(GEMM_O,),
        mends=True,
    ),
    Case(
        "softmax forgets",
        (
            (SOFTMAX, "  Compute Softmax S\n"),
            (NORMALISE, ""),
            ("Compute -1e30 and get Smax\nCompute 0 and get Ssum\n", ""),
            ("Compute Smax + log(Ssum) and get LSE_register", "Compute 0 and get LSE_register"),
            (
                "Allocate Smax in register (BM) as fp32\nAllocate Ssum in register (BM) as fp32\n",
                "",
            ),
        ),
        "FW604",
        "for i",
        also=("Compute Softmax",),
        says="with Smax and Ssum",
    ),
    Case(
        "causal mask after the exponential",
        ((RESHAPE, f"  Compute Mask S where kv_idx <= q_idx\n{RESHAPE}"),),
        "FW608",
        "kv_idx <= q_idx",
    ),
    Case("tail not masked", ((MASK, ""),), "FW609", "Compute Softmax", says="kv_idx < kv_len"),
    Case(
        "tail masked on the wrong side",
        ((MASK, MASK.replace("kv_idx", "q_idx")),),
        "FW609",
        "Compute Softmax",
    ),
    Case(
        "reshape before the softmax",
        ((RESHAPE, ""), (SOFTMAX, RESHAPE + SOFTMAX)),
        "FW502",
        "Compute Softmax",
    ),
    Case("reshaped twice", ((RESHAPE, RESHAPE * 2),), "FW502", 29),
    Case(
        "mixed types",
        (
            (
                "Allocate V in global (batch, kv_heads, kv_len, HeadDim) as bf16",
                "Allocate V in global (batch, kv_heads, kv_len, HeadDim) as fp16",
            ),
            (RESHAPE, RESHAPE.replace("new)", "new) as bf16")),
        ),
        "FW504",
        GEMM_O,
        says="as fp16",
    ),
    # the GPU
    Case(
        "shared memory",
        (("param BM = 64", "param BM = 256"),),
        "FW701",
        "param BM",
        gpu="t4",
        also=(COPY_Q, COPY_K, COPY_V),
    ),
    Case(
        "registers",
        (("param BM = 64", "param BM = 128"), WIDE_KEYS),
        "FW702",
        "param BM",
        gpu="h200",
    ),
    Case("bf16 on Turing", (), "FW703", GEMM_S, gpu="t4", also=(COPY_K,), says="fp16"),
    Case(
        "rows of no whole warp",
        (("param BM = 64", "param BM = 48"),),
        "FW704",
        GEMM_S,
        gpu="a100",
        says="multiple of 64",
    ),
    Case(
        "columns of no half swizzle for warpgroups that share rows",
        (
            ("param HeadDim = 128", "param HeadDim = 96"),
            ("param BM = 64", "param BM = 64\nparam Warps = 8"),
        ),
        "FW704",
        GEMM_O,
        gpu="h200",
        says="96 columns are not a multiple of 64: 2 warpgroups with the same 64 rows",
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_mistake(case: Case) -> None:
    found = the(case.source, case.code, case.gpu)
    line = case.line if isinstance(case.line, int) else line_of(case.source, case.line)
    assert found.span is not None
    assert found.span.line == line
    assert {line_of(case.source, text) for text in case.also} <= set(lines(found))
    assert case.says in f"{found.message} {found.help}"


@pytest.mark.parametrize("case", [c for c in CASES if c.mends], ids=lambda c: c.name)
def test_the_fix_mends(case: Case) -> None:
    source = case.source
    for _ in range(3):  # a second mistake of the same kind may show only when the first is gone
        source, _count = apply(source, run(source).diagnostics)
    assert codes(source) == []


def test_the_program_itself_is_clean_everywhere() -> None:
    assert codes(GQA) == []
    for name in ("a100", "l40s", "h100", "h200"):
        assert codes(GQA, name) == []
    program = checked_program(parse(GQA))
    assert [t.name for t in program.inputs] == ["Q", "K", "V"]
    assert [t.name for t in program.outputs] == ["O", "LSE"]


# --- the paper's listings, as printed ---------------------------------------------------------

LISTING_1 = """\
Compute GEMM Q_shared, K_shared.T and
get S
if i < (kv_len/BN) - 1
Copy K (BN, HeadDim) in coordinate [L
= i+1] from global to shared
end
Compute Softmax S
// No reshape!
Compute GEMM S, V_shared and accumulate
0_register
"""
LISTING_2 = """\
Compute GEMM Q_shared, K_shared and get
S //K_shared should be transposed
Compute Softmax S with Smax and Ssum
Reshape S from (MMA_C, MMA_M, MMA_N) to
(MMA_A, MMA_M, MMA_N_new)
Compute GEMM S, V_shared and accumulate
0_reg
"""


@pytest.mark.parametrize(
    ("listing", "last", "code", "line"),
    [(LISTING_1, 10, "FW501", 9), (LISTING_2, 7, "FW503", 1)],
    ids=["listing 1", "listing 2"],
)
def test_listing_as_a_bare_fragment(listing: str, last: int, code: str, line: int) -> None:
    """Print has a zero for the letter O; mended, the fragment still shows its mistake."""
    with pytest.raises(Failed) as failed:
        parse(listing)
    (slip,) = failed.value.diagnostics
    assert slip.code == "FW101"
    assert slip.span is not None
    assert slip.span.line == last
    mended, count = apply(listing, [slip])
    assert count == 1
    (found,) = [d for d in run(mended).errors if d.code == code]
    assert found.span is not None
    assert found.span.line == line
    again, count = apply(mended, [found])
    assert count == 1
    assert code not in codes(again)


def test_a_fragment_says_once_what_is_undefined() -> None:
    fragment = LISTING_2.replace("0_reg", "O_reg")
    unknown = [d.message for d in run(fragment).errors if d.code == "FW201"]
    assert len(unknown) == len(set(unknown))
    assert not [d for d in run(fragment).errors if d.code == "FW201" and d.fix]


PRELUDE = GQA[: GQA.index("for i")].replace("as bf16", "as fp16").replace("128", "64")
AFTER = GQA[GQA.index("Compute where") :]


def test_listing_1_in_a_program() -> None:
    """Its Softmax has no state, and its Copy has no batch and head: the checker says all of it."""
    loop = LISTING_1.replace("0_register", "O_register")
    loop = loop.replace("[L\n= i+1]", "[B = batch_idx, H = kv_head, L\n= i+1]")
    first = COPY_K.replace("L = i", "L = 0")
    source = f"{PRELUDE}{first}\nfor i = 0:kv_len / BN\n{COPY_V}\n{loop}end\n{AFTER}"
    found = {d.code: d for d in run(source).errors}
    assert set(found) == {"FW501", "FW604", "FW609"}
    assert found["FW501"].span is not None
    assert found["FW501"].span.line == line_of(source, "Compute GEMM S, V_shared")
    assert lines(found["FW604"]) == [line_of(source, "Compute Softmax S")]


def test_listing_2_in_a_program() -> None:
    loop = LISTING_2.replace("0_reg", "O_reg").replace("Ssum", "Ssum and rescale O", 1)
    loop = loop.replace("Compute Softmax", MASK + "Compute Softmax")
    source = f"{PRELUDE}for i = 0:kv_len / BN\n{COPY_K}\n{COPY_V}\n{loop}end\n{AFTER}"
    source = source.replace("param Scale = 1 / sqrt(HeadDim)\n", "")
    found = the(source, "FW503")
    assert found.span is not None
    assert found.span.line == line_of(source, "Compute GEMM Q_shared, K_shared and get")
    mended, _ = apply(source, [found])
    assert codes(mended) == []


# --- spellings --------------------------------------------------------------------------------

SPELLINGS = {
    "prefixes": [
        ("GEMM Q_shared, K_shared.T and get S", "GEMM sQ, sK.T and get rS"),
        ("GEMM S, V_shared and accumulate O_register", "GEMM rS, sV and accumulate rO"),
    ],
    "short suffixes": [
        ("GEMM Q_shared, K_shared.T and get S", "GEMM Q_smem, K_smem.T and get S_reg")
    ],
    "plain names": [
        ("GEMM Q_shared, K_shared.T", "GEMM Q, K.T"),
        ("S, V_shared and accumulate O_register", "S, V and accumulate O"),
    ],
    "colon and end": [("for i = 0:kv_len / BN\n", "for i in 0:kv_len / BN:\n")],
    "colon, closed by indentation": [
        ("for i = 0:kv_len / BN\n", "for i in 0:kv_len / BN:\n"),
        (f"{GEMM_O}\nend\n", f"{GEMM_O}\n"),
    ],
    "capitals": [("for i =", "FOR i ="), ("Compute Multiply", "compute multiply")],
    "wrapped lines": [(GEMM_S, "Compute GEMM Q_shared,\nK_shared.T and\nget S")],
    "reshape with a name": [("MMA_N_new)", "MMA_N_new) and get P"), ("GEMM S, V", "GEMM P, V")],
    "reshape with a type": [("MMA_N_new)", "MMA_N_new) as bf16")],
    "a sum of expressions": [
        (
            "Compute Multiply S, Scale and get new S",
            "Compute 30 * tanh(S * Scale / 30) and get new S",
        )
    ],
    "two stages": [
        (
            "Allocate S in register",
            "Allocate K in shared (BN, HeadDim) as bf16 with stages 2\nAllocate S in register",
        )
    ],
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_spelling(name: str) -> None:
    assert codes(changed(*SPELLINGS[name])) == []


def offsets(*changes: Change) -> str:
    """The paper's way to batch and head: matrices with an offset, as in listing 3."""
    source = GQA.replace("B = batch_idx, H = head_idx, ", "").replace(
        "B = batch_idx, H = kv_head, ", ""
    )
    source = source.replace(
        "(batch, heads, q_len, HeadDim) as bf16", "(q_len, HeadDim) as bf16 with offset q_offset"
    )
    source = source.replace(
        "(batch, kv_heads, kv_len, HeadDim) as bf16",
        "(kv_len, HeadDim) as bf16 with offset kv_offset",
    )
    source = source.replace(
        "(batch, heads, q_len) as fp32", "(q_len) as fp32 with offset row_offset"
    )
    lets = (
        "let row_offset = (batch_idx * heads + head_idx) * q_len\n"
        "let q_offset = row_offset * HeadDim\n"
        "let kv_offset = (batch_idx * kv_heads + kv_head) * kv_len * HeadDim\n"
    )
    return changed(("Allocate Q in", f"{lets}Allocate Q in"), *changes, base=source)


def test_offsets_are_clean() -> None:
    assert codes(offsets()) == []


def test_a_dropped_offset_of_an_output() -> None:
    source = offsets(
        (
            "O in global (q_len, HeadDim) as bf16 with offset q_offset",
            "O in global (q_len, HeadDim) as bf16",
        )
    )
    found = the(source, "FW610")
    assert found.span is not None
    assert found.span.line == line_of(source, "Copy O (BM")
    assert "8 times" in found.message


def test_an_offset_defined_below() -> None:
    source = offsets(
        ("let q_offset = row_offset * HeadDim\n", ""),
        (
            COPY_Q.replace("B = batch_idx, H = head_idx, ", ""),
            "let q_offset = row_offset * HeadDim\n"
            + COPY_Q.replace("B = batch_idx, H = head_idx, ", ""),
        ),
    )
    found = the(source, "FW201")
    assert found.span is not None
    assert found.span.line == line_of(source, "Allocate Q")
    assert lines(found) == [line_of(source, "let q_offset")]


# --- prefetch ---------------------------------------------------------------------------------

NEXT_K = f"  if i < kv_len / BN - 1\n    {COPY_K.replace('L = i', 'L = i + 1')}\n  end\n"


def prefetched(*changes: Change) -> str:
    source = changed(
        (
            f"for i = 0:kv_len / BN\n  {COPY_K}\n",
            f"{COPY_K.replace('L = i', 'L = 0')}\nfor i = 0:kv_len / BN\n",
        ),
        (f"  {GEMM_S}\n", f"  {GEMM_S}\n{NEXT_K}"),
    )
    return changed(*changes, base=source)


def test_prefetch_after_the_last_read_is_right() -> None:
    assert codes(prefetched()) == []


def test_prefetch_before_the_read_is_a_hazard() -> None:
    source = prefetched((f"  {GEMM_S}\n{NEXT_K}", f"{NEXT_K}  {GEMM_S}\n"))
    found = the(source, "FW602")
    assert found.span is not None
    assert found.span.line == line_of(source, "L = i + 1]")
    assert lines(found) == [line_of(source, "H = kv_head, L = 0]")]
    assert codes(source) == ["FW602"]  # what follows from it is not said again


def test_what_is_hidden_once_is_not_added_twice() -> None:
    """Sinks in a tile of their own, and a loop that comes by the same keys."""
    source = (Path(__file__).parents[2] / "examples" / "sink_tile.tl").read_text()
    assert codes(source) == []
    behind = " and kv_idx <= q_idx + kv_len - q_len - Window\n"
    assert source.count(behind) == 1
    found = the(source.replace(behind, "\n"), "FW606")
    assert "kv_len 0..15 is added a second time" in found.message
    assert "Mask" in (found.help or "")
    near = source.replace(behind, behind.replace("- Window", "- Window + 1"))  # by one key
    assert codes(near) == ["FW606"]


@pytest.mark.parametrize(
    ("change", "code", "line"),
    [
        (("L = i + 1", "L = i + 2"), "FW605", "L = i + 2"),
        (("kv_len / BN - 1\n", "kv_len / BN\n"), "FW605", "L = i + 1"),
        (("kv_len / BN - 1\n", "kv_len / BN - 2\n"), "FW606", "for i"),
        (("L = i + 1", "L = i"), "FW606", "for i"),
        ((f"{COPY_K.replace('L = i', 'L = 0')}\n", ""), "FW403", GEMM_S),
    ],
    ids=["two ahead", "past the end", "not the last", "the same again", "no first block"],
)
def test_prefetch_of_the_wrong_block(change: Change, code: str, line: str) -> None:
    source = prefetched(change)
    found = the(source, code)
    assert found.span is not None
    assert found.span.line == line_of(source, line)


def test_prefetch_of_v_over_its_own_block() -> None:
    ahead = NEXT_K.replace("Copy K", "Copy V")
    source = changed(
        (f"  {COPY_V}\n", ""),
        ("for i", f"{COPY_V.replace('L = i', 'L = 0')}\nfor i"),
        (RESHAPE, ahead + RESHAPE),
    )
    found = the(source, "FW602")
    assert found.span is not None
    assert found.span.line == line_of(source, "L = i + 1")
    right = changed((ahead, ""), (f"  {GEMM_O}\n", f"  {GEMM_O}\n{ahead}"), base=source)
    assert codes(right) == []


# --- other ways to attention ------------------------------------------------------------------

DOCUMENTS = [
    (
        "Allocate S in register",
        "Allocate QDoc in global (B: batch, L: q_len) as int32\n"
        "Allocate KDoc in global (B: batch, L: kv_len) as int32\nAllocate S in register",
    ),
    (
        "for i",
        "Copy QDoc (BM) in coordinate [B = batch_idx, L = block_idx] from global to register\nfor i",
    ),
    (
        MASK,
        "  Copy KDoc (BN) in coordinate [B = batch_idx, L = i] from global to register\n"
        "  Compute Mask S where kv_idx < kv_len and QDoc == KDoc\n",
    ),
]


def test_document_ids_lie_along_the_columns_though_tiles_are_square() -> None:
    source = changed(*DOCUMENTS)
    assert "param BM = 64\nparam BN = 64" in source
    assert codes(source) == []


def test_document_ids_of_other_keys() -> None:
    source = changed(
        (
            "KDoc (BN) in coordinate [B = batch_idx, L = i]",
            "KDoc (BN) in coordinate [B = batch_idx, L = 0]",
        ),
        base=changed(*DOCUMENTS),
    )
    found = the(source, "FW603")
    assert found.span is not None
    assert found.span.line == line_of(source, "QDoc == KDoc")
    assert set(lines(found)) == {line_of(source, "Copy KDoc"), line_of(source, COPY_K)}


def test_two_axes_are_not_batch_and_length_by_default() -> None:
    source = changed(("(B: batch, L: q_len)", "(batch, q_len)"), base=changed(*DOCUMENTS))
    found = the(source, "FW209")
    assert codes(source) == ["FW209"]
    assert found.help is not None
    assert "name the axes" in found.help


THROUGH_SHARED = [
    ("Allocate S in register", "Allocate P in shared (BM, BN) as bf16\nAllocate S in register"),
    (RESHAPE, "  Copy S from register to shared and get P\n"),
    ("GEMM S, V", "GEMM P, V"),
]


def test_weights_through_shared_memory_need_no_reshape() -> None:
    assert codes(changed(*THROUGH_SHARED)) == []


def test_weights_in_shared_memory_but_the_registers_read() -> None:
    """The plain name means the register tile, which is still in the layout of a result."""
    source = changed(*THROUGH_SHARED[:2])
    assert {d.code for d in run(source).errors} == {"FW501", "FW602"}


def test_weights_in_shared_memory_keep_fp32_unless_allocated() -> None:
    source = changed(
        (RESHAPE, "  Copy S from register to shared\n"), ("GEMM S, V", "GEMM S_shared, V")
    )
    found = the(source, "FW504")
    assert found.help is not None
    assert "as bf16" in found.help


WRITTEN_OUT = [
    ("Allocate Smax", "Allocate M in register (BM)\nAllocate A in register (BM)\nAllocate Smax"),
    (
        SOFTMAX,
        "  Compute max(Smax, rowmax(S)) and get M\n"
        "  Compute exp(Smax - M) and get A\n"
        "  Compute exp(S - M) and get new S\n"
        "  Compute Ssum * A + rowsum(S) and get new Ssum\n"
        "  Compute O_register * A and get new O_register\n"
        "  Compute M and get new Smax\n",
    ),
]


def test_softmax_written_out_is_clean() -> None:
    assert codes(changed(*WRITTEN_OUT)) == []


@pytest.mark.parametrize(
    ("change", "mixes"),
    [
        (("  Compute O_register * A and get new O_register\n", ""), GEMM_O),
        (("Ssum * A + rowsum(S)", "Ssum + rowsum(S)"), "rowsum(S)"),
        (
            (
                "Compute Ssum * A + rowsum(S) and get new Ssum",
                "Compute rowsum(S) and accumulate Ssum",
            ),
            "rowsum(S)",
        ),
    ],
    ids=["output", "sum", "accumulated sum"],
)
def test_softmax_written_out_without_a_rescale(change: Change, mixes: str) -> None:
    source = changed(change, base=changed(*WRITTEN_OUT))
    found = the(source, "FW607")
    assert found.span is not None
    assert found.span.line == line_of(source, "rowmax(S)")
    assert lines(found) == [line_of(source, mixes)]


def test_mask_after_an_exponential_written_out() -> None:
    late = "  Compute Mask S where kv_idx <= q_idx\n  Compute Ssum *"
    source = changed(("  Compute Ssum *", late), base=changed(*WRITTEN_OUT))
    found = the(source, "FW608")
    assert found.span is not None
    assert found.span.line == line_of(source, "kv_idx <= q_idx")


def test_scores_may_be_made_with_an_exponential() -> None:
    """A tanh written out, before the mask: that exponential weighs nothing."""
    for tanh in (
        "1 - 2 / (1 + exp(S * Scale / 15))",
        "1 - exp(0 - abs(S) * Scale)",
        "-1 * exp(0 - abs(S) * Scale) + 1",
    ):
        assert codes(changed((MASK, f"  Compute 30 * ({tanh}) and get new S\n{MASK}"))) == []


CAUSAL_MASK = ("kv_idx < kv_len", "kv_idx <= q_idx + kv_len - q_len")
CAUSAL = [
    ("0:kv_len / BN", "0:min(kv_len, (block_idx + 1) * BM + kv_len - q_len) / BN"),
    CAUSAL_MASK,
]
WINDOW = [
    (
        "0:kv_len / BN",
        "max(0, floor((block_idx * BM + kv_len - q_len - 255) / BN)):"
        "min(kv_len, (block_idx + 1) * BM + kv_len - q_len) / BN",
    ),
    (
        "kv_idx < kv_len",
        "kv_idx <= q_idx + kv_len - q_len and kv_idx > q_idx + kv_len - q_len - 256",
    ),
]


@pytest.mark.parametrize("changes", [CAUSAL, WINDOW], ids=["causal", "window"])
def test_a_loop_may_skip_what_the_mask_hides(changes: list[Change]) -> None:
    assert codes(changed(*changes)) == []


@pytest.mark.parametrize(
    "bound",
    ["min(kv_len, block_idx * BM + kv_len - q_len) / BN", "min(kv_len, (block_idx + 1) * BM) / BN"],
    ids=["one block short", "no offset of the lengths"],
)
def test_a_causal_loop_too_short(bound: str) -> None:
    source = changed(("0:kv_len / BN", f"0:{bound}"), CAUSAL[1])
    found = the(source, "FW604")
    assert found.span is not None
    assert found.span.line == line_of(source, "for i")


def test_a_causal_mask_that_lets_the_tail_through() -> None:
    """Without the offset, rows past the keys would see columns that do not exist."""
    assert codes(changed(("kv_idx < kv_len", "kv_idx <= q_idx"))) == ["FW609"]


def test_sink_and_sigmoid() -> None:
    sink = changed(
        (
            "Allocate S in register",
            "Allocate Sink in global (heads) as fp32\nAllocate S in register",
        ),
        (NORMALISE, f"Compute Ssum + exp(Sink[head_idx] - Smax) and get new Ssum\n{NORMALISE}"),
    )
    assert codes(sink) == []
    outside = sink.replace("Sink[head_idx]", "Sink[head_idx + 1]")
    assert the(outside, "FW605").span is not None


# --- several at once, sketches, never a traceback ---------------------------------------------


def test_several_mistakes_in_one_pass() -> None:
    source = changed(
        HALF_DIM, ("K_shared.T", "K_shared"), (RESHAPE, ""), (" and rescale O_register", "")
    )
    found = run(source).errors
    assert [d.code for d in found] == ["FW503", "FW607", "FW501"]
    mended, count = apply(source, found)
    assert count == 3
    assert codes(mended) == []


def test_several_names_in_one_pass() -> None:
    source = changed(
        ("K_shared.T", "K_shraed.T"),
        ("Allocate Smax in register (BM)", "Allocate Smax in register (BMM)"),
        (SOFTMAX, SOFTMAX.replace("Softmax", "Softmaxx")),
    )
    found = run(source).errors
    assert [d.code for d in found] == ["FW201", "FW201", "FW204"]
    mended, count = apply(source, found)
    assert count == 3
    assert codes(mended) == []


def test_no_output_at_all() -> None:
    source = GQA[: GQA.index("Copy O (BM")]
    assert "FW610" in [d.code for d in run(source).errors]


def test_errors_come_first_and_in_order() -> None:
    source = changed(("param Scale", "param Stages = 2\nparam Scale"), (RESHAPE, ""), (MASK, ""))
    assert codes(source) == ["FW609", "FW501", "FW203"]


def test_the_figures_of_a_budget() -> None:
    source = changed(("param BM = 64", "param BM = 128"), ("param BN = 64", "param BN = 192"))
    source = source.replace("param Scale", "param Warps = 8\nparam Scale")
    found = the(source, "FW701", "l40s")
    assert "128 KB" in found.message
    assert "99 KB" in found.message
    assert found.help is not None
    change = re.search(r"\b(BM|BN) = (\d+) \(now (\d+)\)", found.help)
    assert change is not None
    name, new, old = change.groups()
    mended = changed((f"param {name} = {old}", f"param {name} = {new}"), base=source)
    assert "FW701" not in codes(mended, "l40s")


SKETCH = """\
Copy Q from global to shared
for i = 0:N
  Copy K from global to shared
  Compute GEMM Q_shared, K_shared.T and get S
  Compute Softmax S with Smax and Ssum and rescale O_register
  Copy V from global to shared
  Compute GEMM S, V_shared and accumulate O_register
end
Copy O from register to global
"""


def test_a_sketch_is_clean_and_gives_no_program() -> None:
    verdict = run(SKETCH)
    assert verdict.level == "sketch"
    assert verdict.diagnostics == ()
    assert verdict.program is None
    with pytest.raises(Failed):
        checked_program(parse(SKETCH.replace("Softmax", "Softmaxx")))


@pytest.mark.parametrize(
    ("change", "code", "line"),
    [
        (("K_shared.T", "K_shared"), "FW503", 4),
        (("  Copy V from global to shared\n", ""), "FW403", 6),
        (("Copy O from register", "Copy P from register"), "FW403", 9),
        (("  Copy V", "  Compute Mask S where kv_idx <= q_idx\n  Copy V"), "FW608", 6),
        (("  Copy V", "  Compute where(kv_idx <= q_idx, S, -inf) and get S\n  Copy V"), "FW608", 6),
        (("Compute Softmax", "Compute Softmx"), "FW204", 5),
        ((" and rescale O_register", ""), "FW607", 5),
        ((" with Smax and Ssum and rescale O_register", ""), "FW604", 5),
        (("accumulate O", "get O"), "FW602", 7),
        (("  Copy K from global to shared\n", "  Copy K from global to shared\n" * 2), "FW602", 4),
        (("Softmax S ", "Softmax Q "), "FW402", 5),
        (("Softmax S ", "Softmax P "), "FW403", 5),
        (("Q_shared, K_shared.T", "Q, P.T"), "FW403", 4),
        (("Copy V from global to shared", "Copy V from global to register"), "FW403", 7),
        (("GEMM S, V_shared", "GEMM S, S"), "FW402", 7),
        (("Copy O from register to global\n", ""), "FW610", 2),
        (("from register to global", "from register to register"), "FW401", 9),
    ],
)
def test_a_sketch_can_be_wrong(change: Change, code: str, line: int) -> None:
    found = the(changed(change, base=SKETCH), code)
    assert found.span is not None
    assert found.span.line == line


@pytest.mark.parametrize(
    "change",
    [
        (
            "  Copy K",
            "  if i > 0\n    Copy K from global to shared\n  else\n    Copy K from global to shared\n  end\n  Copy K2",
        ),
        ("Copy O from register", "Compute 0 and get Smax\nCopy O from register"),
        (
            "  Compute Softmax",
            "  Compute where(kv_idx < kv_len, S, -inf) and get new S\n  Compute Softmax",
        ),
        ("  Compute Softmax", "  Compute Bias + S and get new S\n  Compute Softmax"),
        (
            "Copy O from register",
            "Compute Divide O_register, Ssum and get new O_register\nCopy O from register",
        ),
        ("  Copy V", "  if i < N - 1\n    Copy K from global to shared\n  end\n  Copy V"),
    ],
)
def test_a_sketch_that_is_right_in_another_way(change: Change) -> None:
    source = changed(change, base=SKETCH).replace("  Copy K2 from global to shared\n", "")
    if "N - 1" in source:  # the first block is copied before the loop
        once = "  Copy K from global to shared\n  Compute GEMM Q"
        source = changed(
            (once, "  Compute GEMM Q"),
            ("for i", "Copy K from global to shared\nfor i"),
            base=source,
        )
    assert codes(source) == []


@pytest.mark.parametrize(
    "change",
    [
        (GEMM_S, "Compute GEMM Q_shared, kv_idx and get S"),
        (GEMM_S, "Compute GEMM inf, K_shared.T and get S"),
        (GEMM_S, GEMM_S.replace("get S", "get q_len")),
        (SOFTMAX, SOFTMAX.replace("Smax", "i")),
        (SOFTMAX, SOFTMAX.replace("rescale O_register", "rescale batch")),
        (SOFTMAX, SOFTMAX.replace("Softmax S", "Softmax heads")),
        (MASK, MASK.replace("Mask S", "Mask kv_idx")),
        (RESHAPE, RESHAPE.replace("Reshape S", "Reshape i")),
        ("0:q_len / BM", "0:inf"),
        ("0:kv_len / BN", "0:1 / 0"),
        ("0:kv_len / BN", "0:Smax"),
        ("0:kv_len / BN", "0:1000000000"),
        ("0:batch", "0:1000000000"),
        ("param BN = 64", "param BN = 0"),
        ("param BN = 64", "param BN = 1e400"),
        ("param BN = 64", "param BN = sqrt(0 - 1)"),
        ("Allocate S in register (BM, BN)", "Allocate S in register (BM, BN, BM)"),
    ],
    ids=lambda change: change[1].strip(),
)
def test_nonsense_gives_diagnostics_and_no_traceback(change: Change) -> None:
    found = run(changed(change), "h200").diagnostics
    assert found
    assert all(d.span is not None for d in found)


def test_an_empty_loop_of_a_billion_rounds_ends() -> None:
    source = changed(("for i = ", "for j = 0:1000000000\nend\nfor i = "))
    assert codes(source) == ["FW611"]


@pytest.mark.parametrize(
    "change",
    [
        (GEMM_O, GEMM_O.replace("V_shared", "K2_shared")),
        (COPY_K, f"{COPY_K} and get K2"),
        (COPY_V, f"{COPY_V} and get K"),
        (f"{COPY_Q} to shared", f"{COPY_Q} to register"),
        ("param Scale", "param Warps = 0\nparam Scale"),
        ("param Scale", "param Warps = inf\nparam Scale"),
        ("param Scale", "param Warps = 1 / 2\nparam Scale"),
    ],
    ids=lambda change: change[1].strip(),
)
def test_a_tile_that_nothing_fills_is_a_finding(change: Change) -> None:
    found = run(changed(change), "a100").errors
    assert found
    assert all(d.span is not None for d in found)


def test_a_copy_under_another_name_fills_another_tile() -> None:
    source = changed(
        (COPY_K, f"{COPY_K} and get K1"),
        ("K_shared.T", "K1_shared.T"),
        (GEMM_O, GEMM_O.replace("V", "K")),
    )
    found = the(source, "FW403")
    assert "writes `K` in shared" in found.message
    assert "Copy K" in (found.help or "")


# --- values that are right to stay unread -----------------------------------------------------

LOOP = GQA[GQA.index("for i") : GQA.index("Compute where")]
START = GQA[GQA.index("Compute 0 and get O_register") : GQA.index("Copy Q (BM")]
STORE = GQA[GQA.index("Compute where") : GQA.index("Compute Smax + log")]
TWO_BLOCKS = (
    GQA[: GQA.index(START)]
    .replace("0:q_len / BM", "0:q_len / (2 * BM)")
    .replace("Allocate LSE in global (batch, heads, q_len) as fp32\n", "")
    .replace("Allocate LSE in register (BM) as fp32\n", "")
    + "for t = 0:min(2, q_len / BM - 2 * block_idx)\n"
    + (START + f"{COPY_Q} to shared\n" + LOOP + STORE).replace("block_idx", "2 * block_idx + t")
    + "end\n"
)


def test_a_maximum_is_started_anew_for_the_next_block() -> None:
    assert codes(TWO_BLOCKS) == []


def test_a_maximum_is_started_anew_though_no_key_was_visited() -> None:
    """With more queries than keys, a causal loop has no rounds for the first queries."""
    block = "2 * block_idx + t + 1"
    source = changed(
        ("0:kv_len / BN", f"0:min(kv_len, ({block}) * BM + kv_len - q_len) / BN"),
        CAUSAL[1],
        base=TWO_BLOCKS,
    )
    assert codes(source) == []


def test_a_maximum_is_started_anew_between_two_loops() -> None:
    second = START + LOOP + NORMALISE + "Compute O1 + O_register and get new O_register\n"
    source = changed(
        ("Allocate Smax", "Allocate O1 in register (BM, HeadDim)\nAllocate Smax"),
        (NORMALISE, f"{NORMALISE}Compute O_register and get O1\n{second}"),
    )
    assert codes(source) == []


@pytest.mark.parametrize(
    ("start", "code"),
    [
        ("Compute -1e30 and get Smax\n", "FW607"),
        ("Compute 0 and get Ssum\n", "FW602"),
        ("Compute 0 and get O_register\n", "FW602"),
    ],
)
def test_a_start_in_every_round_forgets_the_rounds_before(start: str, code: str) -> None:
    source = changed((start, ""), (f"  {COPY_K}\n", f"  {COPY_K}\n  {start}"))
    assert codes(source) == [code]


SKIPPED = [
    (
        f"  {COPY_K}\n",
        f"  {COPY_K}\n  {COPY_V}\n  if i * BN < (block_idx + 1) * BM + kv_len - q_len\n",
    ),
    (f"  {COPY_V}\n  Compute Softmax", "  Compute Softmax"),
    (f"  {GEMM_O}\n", f"  {GEMM_O}\n  end\n"),
]


def test_tiles_of_a_skipped_round_stay_unread() -> None:
    source = changed(*SKIPPED, CAUSAL_MASK)
    assert codes(source) == []
    visible = "if i * BN < (block_idx + 1) * BM + kv_len - q_len"
    too_few = changed((visible, visible.replace("+ 1) * BM", ") * BM")), base=source)
    assert codes(too_few) == ["FW604"]


def test_a_tile_is_overwritten_before_the_round_that_would_skip_it() -> None:
    source = changed(*SKIPPED, CAUSAL_MASK)
    twice = changed((f"  {COPY_V}\n", f"  {COPY_V}\n" * 2), base=source)
    assert codes(twice) == ["FW602"]


BIAS = [
    (
        "Allocate S in register",
        "Allocate Bias in global (H: heads, L: q_len, M: kv_len) as fp32\nAllocate S in register",
    ),
    (
        MASK,
        "  Copy Bias (BM, BN) in coordinate [H = head_idx, L = block_idx, M = i] from global to register\n"
        f"  Compute Bias + S and get new S\n{MASK}",
    ),
]


@pytest.mark.parametrize("spelt", ["Bias + S", "S + Bias", "Add Bias, S", "1 * Bias - -1 * S"])
def test_the_order_of_operands_does_not_matter(spelt: str) -> None:
    assert codes(changed(("Bias + S", spelt), base=changed(*BIAS))) == []
    columns = changed(
        ("L: q_len, M: kv_len", "M: q_len, L: kv_len"),
        ("L = block_idx, M = i", "M = block_idx, L = i"),
        ("Bias + S", spelt),
        base=changed(*BIAS),
    )
    assert codes(columns) == []


@pytest.mark.parametrize("total", ["Ssum + rowsum(S)", "rowsum(S) + Ssum"])
def test_a_missing_rescale_is_found_in_either_order(total: str) -> None:
    source = changed(("Ssum * A + rowsum(S)", total), base=changed(*WRITTEN_OUT))
    found = the(source, "FW607")
    assert found.span is not None
    assert found.span.line == line_of(source, "rowmax(S)")


def test_reductions_are_verbs_too() -> None:
    source = changed(
        ("Allocate M in", "Allocate R in register (BM)\nAllocate M in"),
        (
            "  Compute max(Smax, rowmax(S)) and get M\n",
            "  Compute RowMax S and get R\n  Compute Max R, Smax and get M\n",
        ),
        ("rowsum(S) and get new Ssum", "R and get new Ssum"),
        ("  Compute Ssum *", "  Compute RowSum S and get R\n  Compute Ssum *"),
        base=changed(*WRITTEN_OUT),
    )
    assert codes(source) == []
    wrong = changed(("RowMax S and get R", "RowMax Smax and get R"), base=source)
    assert "two-dimensional" in the(wrong, "FW303").message
    assert "FW205" in codes(source.replace("RowMax S", "Max S"))


# --- masks written as where -------------------------------------------------------------------


@pytest.mark.parametrize(
    "spelt",
    [
        "where(kv_idx < kv_len, S, -inf)",
        "where(kv_idx >= kv_len, -inf, S)",
        "where(not (kv_idx < kv_len), -inf, S)",
        "where(kv_idx < kv_len, S * 2, -1e30)",
        "2 * where(kv_len > kv_idx, S, -inf)",
    ],
)
def test_where_is_a_mask(spelt: str) -> None:
    assert codes(changed((MASK, f"  Compute {spelt} and get new S\n"))) == []
    wrong = spelt.replace("kv_idx", "q_idx")
    assert codes(changed((MASK, f"  Compute {wrong} and get new S\n"))) == ["FW609"]


def test_where_hides_what_a_loop_may_skip() -> None:
    spelt = "where(kv_idx <= q_idx + kv_len - q_len, S, -inf)"
    source = changed(CAUSAL[0], (MASK, f"  Compute {spelt} and get new S\n"))
    assert codes(source) == []
    assert codes(
        changed(("kv_idx <= q_idx + kv_len", "kv_idx <= q_idx + 1 + kv_len"), base=source)
    ) == ["FW604", "FW609"]


def test_where_after_the_exponential() -> None:
    late = "  Compute where(kv_idx <= q_idx, S, {}) and get new S\n"
    assert codes(changed((RESHAPE, late.format("-inf") + RESHAPE))) == ["FW608"]
    assert codes(changed((RESHAPE, late.format("0") + RESHAPE))) == []  # a weight of 0 is right


# --- what the caller's data decide ------------------------------------------------------------

LENS = (
    "Allocate S in register",
    "Allocate Lens in global (B: batch) as int32\nAllocate S in register",
)
LET_N = ("for i", "let n = Lens[batch_idx]\nfor i")


def bounded(bound: str, mask: str, *more: Change) -> str:
    mine = ("0:kv_len / BN", bound), (MASK, f"  Compute Mask S where {mask}\n")
    return changed(LENS, *mine, *more)


@pytest.mark.parametrize(
    ("bound", "mask"),
    [
        ("0:min(kv_len, Lens[batch_idx]) / BN", "kv_idx < min(kv_len, Lens[batch_idx])"),
        ("0:min(kv_len, Lens[batch_idx]) / BN", "kv_idx < kv_len"),
        ("0:Lens[batch_idx] / BN", "kv_idx < Lens[batch_idx]"),
        ("0:n / BN", "kv_idx < n"),
        ("0:n / BN", "n > kv_idx"),
        ("0:n", "kv_idx < kv_len"),  # a number of blocks
        (
            "0:min(n, (block_idx + 1) * BM + n - q_len) / BN",
            "kv_idx < n and kv_idx <= q_idx + n - q_len",
        ),
        ("floor(n / BN):kv_len / BN", "kv_idx >= n and kv_idx < kv_len"),  # where keys begin
    ],
)
def test_a_length_from_data(bound: str, mask: str) -> None:
    found = run(bounded(bound, mask, LET_N)).diagnostics
    assert [d for d in found if d.code != "FW203"] == []  # `n` is not used by all


@pytest.mark.parametrize(
    ("bound", "mask", "code"),
    [
        ("0:n / BN - 1", "kv_idx < n", "FW604"),
        ("1:n / BN", "kv_idx < n", "FW604"),
        ("1:n / BN", "kv_idx < kv_len", "FW604"),
        ("0:n / BN + 1", "kv_idx < n", "FW605"),
        ("0:n / BN", "kv_idx <= n", "FW609"),
    ],
)
def test_a_loop_that_does_not_fit_a_length_from_data(bound: str, mask: str, code: str) -> None:
    assert the(bounded(bound, mask, LET_N), code)


FLAGS = (
    "Allocate S in register",
    "Allocate Skip in global (B: batch, N: n_blocks) as int32\nAllocate S in register",
)
OWN_DIM = ("grid block_idx", "dim n_blocks\ngrid block_idx")


@pytest.mark.parametrize("cond", ["Skip[batch_idx, i] > 0", "not (Skip[batch_idx, i] > 0)"])
@pytest.mark.parametrize("copies", ["inside", "before"])
def test_a_round_that_data_skip(cond: str, copies: str) -> None:
    inside = (f"  {COPY_K}\n", f"  if {cond}\n  {COPY_K}\n"), SKIPPED[2]
    before = (f"  {COPY_K}\n", f"  {COPY_K}\n  {COPY_V}\n  if {cond}\n"), *SKIPPED[1:]
    source = changed(FLAGS, OWN_DIM, *(inside if copies == "inside" else before))
    assert codes(source) == []
    assert codes(changed(("0:kv_len / BN", "0:kv_len / BN - 1"), base=source)) == ["FW604"]


def test_values_that_data_skip_while_they_are_used() -> None:
    guarded = f"  if Skip[batch_idx, i] > 0\n  {COPY_V}\n  end\n"
    source = changed(FLAGS, OWN_DIM, (f"  {COPY_V}\n", guarded))
    assert the(source, "FW403").message == "`V_shared` has no value yet"


# A fixed number of keys, all in one tile: no loop and no running softmax.
FIXED = changed(
    ("param BN = 64", "param BN = 80\nparam Keys = 77"),
    ("K in global (batch, kv_heads, kv_len", "K in global (batch, kv_heads, Keys"),
    ("V in global (batch, kv_heads, kv_len", "V in global (batch, kv_heads, Keys"),
    ("for i = 0:kv_len / BN\n", ""),
    (f"  {GEMM_O}\nend\n", "  Compute GEMM S, V_shared and get O_register\n"),
    (MASK, "  Compute Mask S where kv_idx < Keys\n"),
    (SOFTMAX, "  Compute Softmax S\n"),
    (START, ""),
    (NORMALISE, ""),
    ("Allocate Smax in register (BM) as fp32\nAllocate Ssum in register (BM) as fp32\n", ""),
    ("Allocate LSE in global (batch, heads, q_len) as fp32\n", ""),
    ("Allocate LSE in register (BM) as fp32\n", ""),
    (GQA[GQA.index("Compute Smax + log") :], ""),
).replace("L = i]", "L = 0]")


def test_a_fixed_number_of_keys_in_one_tile() -> None:
    assert codes(FIXED) == []
    assert codes(FIXED.replace(", L = 0]", "]")) == []
    exact = FIXED.replace("BN = 80", "BN = 77").replace(
        "  Compute Mask S where kv_idx < Keys\n", ""
    )
    assert codes(exact) == []
    square = FIXED.replace("BN = 80", "BN = 64").replace("Keys = 77", "Keys = 64")
    assert codes(square.replace("HeadDim = 128", "HeadDim = 64")) == []
    unmasked = FIXED.replace("  Compute Mask S where kv_idx < Keys\n", "")
    assert "columns past 77 are" in the(unmasked, "FW609").message


def test_a_loop_over_a_fixed_number_of_keys() -> None:
    source = GQA.replace("kv_heads, kv_len", "kv_heads, 77").replace(
        "kv_idx < kv_len", "kv_idx < 77"
    )
    source = source.replace("0:kv_len / BN", "0:77 / BN").replace("param BN = 64", "param BN = 32")
    assert codes(source) == []
    assert codes(source.replace("0:77 / BN", "0:77 / BN - 1")) == ["FW604"]


def test_the_spec_says_how_long_a_dim_is() -> None:
    """Whether one tile holds all the keys only the caller knows."""
    tree = parse(FIXED.replace("param Keys = 77", "dim Keys"))
    assert [d.code for d in check(tree).diagnostics] == ["FW604", "FW604"]
    assert check(tree, dims={"Keys": 77}).diagnostics == ()
    assert check(tree, dims={"Keys": 81}).diagnostics != ()


PAGED = (Path(__file__).parents[2] / "examples" / "paged.tl").read_text()


@pytest.mark.parametrize(
    "changes",
    [
        [],
        [
            ("T: n_blocks", "T: 64"),
            (", n_blocks\n", "\n"),
        ],  # a table longer than what is read
        [("for i = 0:kv_len / BN", "for i = 0:n_blocks")],
        [
            ("  Copy K", "  if page >= 0\n  Copy K"),
            ("accumulate O_register\n", "accumulate O_register\n  end\n"),
        ],
        [
            ("0:kv_len / BN", "0:Lens[batch_idx] / BN"),
            ("+ kv_idx < kv_len", "+ kv_idx < Lens[batch_idx]"),
            LENS,
        ],
    ],
    ids=["as it is", "longer table", "as many as the table", "holes", "lengths"],
)
def test_a_table_is_as_long_as_the_caller_makes_it(changes: list[Change]) -> None:
    source = changed(*changes, base=PAGED)
    assert codes(source) == []
    for dims in ({"pages": 3, "n_blocks": 2}, {"pages": 11, "n_blocks": 5}):
        assert check(parse(source), dims=dims).diagnostics == ()


def test_elements_of_a_table_that_is_not_read_whole() -> None:
    source = changed(
        ("Allocate S in register", "Allocate T in global (N: 8) as fp32\nAllocate S in register"),
        ("Multiply S, Scale", "Multiply S, Scale * T[1] + T[2]"),
    )
    assert codes(source) == []


# --- registers that are alive together --------------------------------------------------------

LARGE = (("param BM = 64", "param BM = 128"), ("param BN = 64", "param BN = 96"))
SECOND = re.sub(r"\bS\b", "T", START + LOOP)
TWICE = changed(
    ("Allocate Smax", "Allocate T in register (BM, BN)\nAllocate Smax"),
    ("Allocate O in", "Allocate P in global (batch, heads, q_len, HeadDim) as bf16\nAllocate O in"),
    (NORMALISE, f"{NORMALISE}{COPY_O} from register to global and get P\n{SECOND}{NORMALISE}"),
    base=GQA.replace("Allocate O in register", "Allocate  O in register"),
)
"""Two loops, one after the other, each with scores of its own."""


def test_registers_are_counted_by_what_is_alive_together() -> None:
    assert codes(TWICE) == []
    once, twice = (run(changed(*LARGE, base=text), "a100").diagnostics for text in (GQA, TWICE))
    need = [
        re.search(r"about (\d+) registers", d.message) for d in (*once, *twice) if d.code == "FW702"
    ]
    assert [found and found[1] for found in need] == [need[0] and need[0][1]] * 2


def test_the_tiles_that_are_alive_together_are_named() -> None:
    source = changed(("param BM = 64", "param BM = 128"), ("param BN = 64", "param BN = 128"))
    found = next(d for d in run(source, "a100").diagnostics if d.code == "FW702")
    assert "`O`, `S`" in found.message
    assert "LSE" not in found.message  # it has a value only after the loop
    assert any(label.text.startswith("live here: `O`, `S`") for label in found.secondary)


def test_programs_with_a_line_or_a_name_changed_end_in_findings_or_pass() -> None:
    """Whatever is left out or exchanged, the checker answers, and each finding has its place."""
    rng = random.Random(18)
    rows = GQA.splitlines(keepends=True)
    words = sorted(set(re.findall(r"[A-Za-z_]\w*", GQA)) - {"end"})
    texts = ["".join(rows[:n] + rows[n + 1 :]) for n in range(0, len(rows), 2)]
    for _ in range(40):
        found = rng.choice(list(re.finditer(r"[A-Za-z_]\w*", GQA)))
        texts.append(GQA[: found.start()] + rng.choice(words) + GQA[found.end() :])
    for text in texts:
        try:
            tree = parse(text)
        except Failed:
            continue
        assert all(d.span is not None for d in check(tree, gpu.find("h200")).diagnostics), text


ROW_SUM = """\
param BM = 64
param BN = 64
grid block_idx = 0:q_len / BM
Allocate A in global (L: q_len, M: kv_len) as fp32
Allocate T in global (L: q_len) as fp32
Allocate T in register (BM) as fp32
Compute 0 and get T
for i = 0:kv_len / BN
  Copy A (BM, BN) in coordinate [L = block_idx, M = i] from global to register
  Compute rowsum(A) and accumulate T
end
Copy T (BM) in coordinate [L = block_idx] from register to global
"""


def test_zeros_past_the_end_add_nothing_to_a_sum() -> None:
    assert codes(ROW_SUM) == []
    assert codes(ROW_SUM.replace("rowsum(A)", "rowsum(A + 1)")) == ["FW609"]
    assert codes(ROW_SUM.replace("rowsum(A)", "rowmax(A)")) == ["FW609"]
