"""A small attention program in TL with its parts exchangeable, for tests of the translator."""

from __future__ import annotations

from functools import cache

from flashwright.check.check import check
from flashwright.check.names import Names
from flashwright.lang.parse import parse
from flashwright.program.program import Program

HEAD = """\
param HeadDim = 64
param BM = 64
param BN = 32
param Warps = 4
param Scale = 1 / sqrt(HeadDim)
{params}
grid block = 0:q_len / BM, head = 0:heads, item = 0:batch
Allocate Q in global (batch, heads, q_len, HeadDim) as {dtype}
Allocate K in global (batch, heads, kv_len, HeadDim) as {dtype}
Allocate V in global (batch, heads, kv_len, HeadDim) as {dtype}
Allocate O in global (batch, heads, q_len, HeadDim) as {dtype}
Allocate K in shared (BN, HeadDim) as {dtype} with stages {k_stages}
Allocate V in shared (BN, HeadDim) as {dtype} with stages {v_stages}
Allocate S in register (BM, BN) as fp32
Allocate O in register (BM, HeadDim) as fp32
Allocate Smax in register (BM) as fp32
Allocate Ssum in register (BM) as fp32
{allocate}
Copy Q (BM, HeadDim) in coordinate [B = item, H = head, L = block] from global to shared
{copy_q}
Compute -1e30 and get Smax
Compute {start} and get Ssum
Compute 0 and get O_register
"""
BODY = """\
  {copy_k}
  {copy_v}
  Compute GEMM {q}, K_shared.T and get S
  {scale}
  Compute Mask S where {mask}
  {softmax}
  {reshape}
  Compute GEMM {p}, V_shared and accumulate O_register
"""
TAIL = """\
Compute where(Ssum > 0, O_register / Ssum, 0) and get new O_register
{end}
Copy O (BM, HeadDim) in coordinate [B = item, H = head, L = block] from register to global
"""
COPY = "Copy {0} (BN, HeadDim) in coordinate [B = item, H = head, L = i] from global to shared"
DEFAULTS: dict[str, object] = {
    "params": "",
    "dtype": "fp16",
    "k_stages": 1,
    "v_stages": 1,
    "allocate": "",
    "copy_q": "",
    "q": "Q_shared",
    "start": "0",
    "low": "0",
    "high": "kv_len / BN",
    "copy_k": COPY.format("K"),
    "copy_v": COPY.format("V"),
    "scale": "Compute Multiply S, Scale and get new S",
    "mask": "kv_idx < kv_len",
    "softmax": "Compute Softmax S with Smax and Ssum and rescale O_register",
    "reshape": "Reshape S from mma_C to mma_A",
    "p": "S",
    "end": "",
}


def attention(**parts: object) -> str:
    """The program's text, with some of its parts replaced."""
    unknown = set(parts) - set(DEFAULTS)
    assert not unknown, unknown
    text = HEAD + "for i = {low}:{high}\n" + BODY + "end\n" + TAIL
    return text.format(**{**DEFAULTS, **parts})


@cache
def program(text: str, strict: bool = True) -> Program:
    """A program that the checker has nothing against; or one whose names and shapes are right.

    It is made once for all GPUs that a test takes it to.
    """
    if not strict:
        made = Names(parse(text)).program()
        assert made is not None
        return made
    checked = check(parse(text))
    assert checked.program is not None, [(d.code, d.message, d.span) for d in checked.diagnostics]
    return checked.program
