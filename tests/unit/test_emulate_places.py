"""Where a finding is: its lines in TL, in the source and in the PTX, its thread and its block."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

import flashwright.emulate
from flashwright.emulate.emulate import KINDS, Finding
from flashwright.emulate.parse import parse
from flashwright.emulate.places import CODES, Extent, Origin, block, diagnostics, locate, thread
from flashwright.emulate.ptx import Address, Immediate, Instruction, Register, SourceLine
from flashwright.lang import codes
from flashwright.lang.render import terminal
from flashwright.lower.source_map import SourceMap, Stretch
from tests.unit.emulated import needs_compilers

TL = "Copy K\nCompute GEMM\nCopy O\n"
MAP = SourceMap(
    lines=(
        Stretch(cu=(40, 45), tl=(1, 1)),
        Stretch(cu=(50, 55), tl=(2, 2)),
        Stretch(cu=(80, 90), tl=(3, 3)),
    )
)
ORIGIN = Origin(map=MAP, tl=TL, grid=(4, 2, 3), tensors=(Extent("K", 0x100000, 0x1000),))


def at(*places: tuple[str, int], opcode: str = "ld.global.v4.u32", line: int = 7) -> Instruction:
    return Instruction(opcode, (), None, line, tuple(SourceLine(*p) for p in places))


LOAD = at(("/inc/fw/copy.cuh", 9), ("/tmp/x/kernel.cu", 43))
STORE = at(("/tmp/x/kernel.cu", 82), opcode="st.shared.v4.u32", line=91)


def finding(kind: str = "race", instruction: Instruction = LOAD, **more: object) -> Finding:
    one = Finding(kind, instruction, 13, 1, 5, 0x100FF0, None, (0, 0))
    return replace(one, **more)  # type: ignore[arg-type]


def test_a_call_of_the_vocabulary_is_told_by_the_line_that_made_it() -> None:
    found = locate(LOAD, ORIGIN)
    assert (found.tl, found.source, found.ptx) == (1, 43, 7)
    assert str(found) == "code.tl:1, kernel.cu:43, PTX line 7"


def test_of_several_lines_of_the_source_the_innermost_with_tl_counts() -> None:
    helper = at(("kernel.cu", 12), ("kernel.cu", 81), ("kernel.cu", 44))
    assert locate(helper, ORIGIN).tl == 3
    assert locate(at(("kernel.cu", 12)), Origin(map=MAP)).source == 12


def test_a_barrier_belongs_to_the_statement_before_it() -> None:
    assert locate(at(("kernel.cu", 60), opcode="bar.sync"), ORIGIN).tl == 2


@pytest.mark.parametrize("where", [(), (("copy.cuh", 43),), (("kernel.cu", 0),)])
def test_without_a_line_of_the_source_the_ptx_line_is_told(where: tuple[tuple[str, int]]) -> None:
    found = locate(at(*where), ORIGIN)
    assert (found.source, found.tl) == (None, None)
    assert str(found) == "PTX line 7"


def test_threads_and_blocks_in_words() -> None:
    assert thread(finding(warp=1, lane=5)) == "thread 37 (warp 1, lane 5)"
    assert thread(finding(warp=2, lane=-1)) == "warp 2"
    assert block(13, (4, 2, 3)) == "block (1, 1, 1)"
    assert block(13, (20, 1, 1)) == block(13, (20,)) == "block 13"


def test_every_kind_has_a_code_a_page_and_words_of_its_own() -> None:
    assert set(CODES) == set(KINDS)
    assert set(CODES.values()) <= set(codes.CODES)
    told = set()
    for kind in KINDS:
        (one,) = diagnostics([finding(kind, other=STORE, detail=(2, 64))], ORIGIN)
        assert one.code == CODES[kind]
        assert one.message.startswith(f"{kind} at code.tl:1, kernel.cu:43, PTX line 7: thread 37")
        assert "block (1, 1, 1)" in one.message
        told.add(one.message.partition("block (1, 1, 1) ")[2])
    assert len(told) == len(KINDS)


def test_the_same_line_is_told_once_and_other_lines_apart() -> None:
    unrolled = [finding(instruction=replace(LOAD, line=n)) for n in range(7, 11)]
    found = diagnostics([*unrolled, finding(instruction=STORE)], ORIGIN)
    assert len(found) == 2
    assert "at 4 instructions of that line" in found[0].message
    assert "instructions of that line" not in found[1].message
    bare = [finding(instruction=replace(at(), line=n)) for n in (7, 8)]
    assert len(diagnostics(bare, ORIGIN)) == 2, "where no line is known, each is told"


def test_both_sides_of_a_race_are_shown_in_tl() -> None:
    (found,) = diagnostics([finding(other=STORE)], ORIGIN)
    shown = terminal([found], TL, "code.tl")
    assert "code.tl:1:1" in shown
    assert "1 | Copy K" in shown
    assert "3 | Copy O" in shown
    assert "kernel.cu:82, PTX line 91" in found.message


def test_an_instruction_behind_a_label_and_its_line_is_kept() -> None:
    """nvcc puts the line between a label and the instruction: both belong to it."""
    text = """.version 9.0
.target sm_80
.address_size 64
.visible .entry k(
)
{
\t.reg .b32 %r<3>;
$L__BB0_1:
\t.loc\t1 5 3, function_name $L__info_string0, inlined_at 1 9 3
\tmov.u32 %r1, 1;
$L__BB0_2:
\t.loc\t1 6 1
\tadd.s32 %r2, %r1, %r1;
\tret;
}
\t.file\t1 "kernel.cu"
"""
    entry = parse(text).entries["k"]
    assert [one.opcode for one in entry.code] == ["mov.u32", "add.s32", "ret"]
    assert [p.line for p in entry.code[0].source_lines] == [5, 9]
    assert [p.line for p in entry.code[1].source_lines] == [6]
    assert entry.labels == {"$L__BB0_1": 0, "$L__BB0_2": 1}


def test_without_tl_the_source_itself_is_shown() -> None:
    origin = Origin(shown="mine.cu", text="int x;\nx = y;\n")
    (found,) = diagnostics([finding(instruction=at(("/tmp/kernel.cu", 2)))], origin)
    assert "mine.cu:2" in found.message
    assert "2 | x = y;" in terminal([found], origin.text, "mine.cu")


@pytest.mark.parametrize(
    ("address", "words"),
    [
        (0x100000, "byte 0 of `K`"),
        (0x101010, "byte 16 behind the end of `K`"),
        (0x0FFFF0, "byte 16 before the beginning of `K`"),
        (0x4000000, "global address 0x4000000"),
    ],
)
def test_an_address_is_told_by_its_tensor(address: int, words: str) -> None:
    (found,) = diagnostics([finding("out_of_bounds", address=address)], ORIGIN)
    assert f"reads 16 bytes at {words}" in found.message


def test_what_a_barrier_waits_for_is_told() -> None:
    wait = at(opcode="mbarrier.try_wait.parity.shared::cta.b64")
    stuck = finding("deadlock", wait, address=0x80, detail=(1, 4096))
    (found,) = diagnostics([stuck], ORIGIN)
    assert "at the mbarrier at 0x80: 1 arrivals and 4096 bytes are missing" in found.message
    plain = finding("deadlock", at(opcode="bar.sync"), address=3, detail=(32, 0))
    assert "at barrier 3: 32 arrivals are missing" in diagnostics([plain], ORIGIN)[0].message
    endless = finding("deadlock", at(), detail=(-1, 0))
    assert "does not come to an end" in diagnostics([endless], ORIGIN)[0].message


@pytest.mark.parametrize(
    ("kind", "address", "detail", "words"),
    [
        (
            *("misaligned", 0x100000, (0, 5)),
            "copies a box of `K` that begins at 5 along the innermost axis, which is no multiple "
            "of 16 bytes",
        ),
        (
            *("out_of_bounds", 0x4000000, (2, -1)),
            "copies a box of the tensor at 0x4000000 that begins at -1 along axis 2 (0 is the "
            "innermost), before the tensor: a load may, a store may not",
        ),
    ],
)
def test_where_a_box_begins_is_told(
    kind: str, address: int, detail: tuple[int, int], words: str
) -> None:
    store = at(opcode="cp.async.bulk.tensor.3d.global.shared::cta.bulk_group")
    one = finding(kind, store, address=address, detail=detail)
    assert diagnostics([one], ORIGIN)[0].message.endswith(words)
    (plain,) = diagnostics([replace(one, detail=(0, 0))], ORIGIN)
    assert "box" not in plain.message, "an address is"


def test_the_size_of_a_copy_is_its_operand() -> None:
    where = Address(Register("%r1"))
    copy = Instruction("cp.async.cg.shared.global", (where, where, Immediate(16)), None, 3)
    (found,) = diagnostics([finding("misaligned", copy, address=0x100008)], ORIGIN)
    assert "copies 16 bytes at byte 8 of `K`, which is no multiple of 16" in found.message


CALLS = """
__device__ __forceinline__ void inner(int* y, int i) {
  y[i] = 1;
}
__device__ __forceinline__ void outer(int* y, int i) {
  inner(y, i + 100);
}
__device__ __noinline__ void called(int* y, int i) {
  y[i] = 2;
}
extern "C" __global__ void inlined(int* y) {
  outer(y, threadIdx.x);
}
extern "C" __global__ void calling(int* y) {
  called(y, threadIdx.x);
  called(y, threadIdx.x + 100);
}
"""


@needs_compilers
def test_a_finding_has_the_lines_of_the_helper_and_of_its_callers() -> None:
    kernel = flashwright.emulate.kernel(CALLS, "inlined")
    done = kernel(1, 32, np.zeros(32, np.int32))
    lines = r"kernel\.cu:3, called at kernel\.cu:6, called at kernel\.cu:12, PTX line \d+: thread 0"
    assert re.search(lines, str(done)), done
    done = kernel.other("calling")(1, 32, np.zeros(32, np.int32))
    lines = r"kernel\.cu:9, PTX line \d+, called at kernel\.cu:16, PTX line \d+: thread 0"
    assert re.search(lines, str(done)), done


SPACES = """
__device__ __noinline__ void write(int* y, int i) { y[i] = i; }
extern "C" __global__ void spaces(int* y, int which) {
  __shared__ int tile[64];
  int own[4];
  if (which == 0) write(tile, threadIdx.x / 2);
  if (which == 0 && threadIdx.x == 0) y[0] = tile[7];
  if (which == 1) write(own, 1 << 20);
  if (which == 2) atomicAdd(which == 2 ? tile + threadIdx.x : y, 1);
}
"""


@needs_compilers
@pytest.mark.parametrize(
    ("which", "said"),
    [
        (0, "shared address 0x1c with no barrier"),
        (1, "local address 0x4000"),
        (2, "shared address 0x0, which nothing has written"),
    ],
)
def test_addresses_are_named_by_their_space(which: int, said: str) -> None:
    done = flashwright.emulate.kernel(SPACES, "spaces")(1, 32, np.zeros(64, np.int32), which)
    assert said in str(done), done
