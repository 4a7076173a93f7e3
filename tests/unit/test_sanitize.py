"""What compute-sanitizer says, brought back to the lines of the kernel and of TL."""

from __future__ import annotations

import pytest

from flashwright.judge.sanitize import Lines, findings
from flashwright.judge.sass_lines import line_at, read
from flashwright.lower.source_map import SourceMap, Stretch

MAP = SourceMap(lines=(Stretch(cu=(40, 45), tl=(25, 25)), Stretch(cu=(80, 90), tl=(36, 36))))
# As nvdisasm prints it: comments from the innermost call to the outermost, then instructions.
LISTING = """
.text.attention:
\t//## File "/src/fw/copy.cuh", line 49 inlined at "/src/fw/copy.cuh", line 36
\t//## File "/src/fw/copy.cuh", line 36 inlined at "/tmp/x/kernel.cu", line 43
\t//## File "/tmp/x/kernel.cu", line 43
        /*0010*/                   LDGSTS.E.BYPASS.128 [R1], [R2.64] ;
        /*0020*/                   IADD3 R1, R1, 0x10, RZ ;
\t//## File "/src/fw/mma.cuh", line 17 inlined at "/tmp/x/kernel.cu", line 82
\t//## File "/tmp/x/kernel.cu", line 82
        /*0030*/                   LDSM.16.M88.4 R4, [R3] ;
\t//## File "/src/elsewhere.cuh", line 3
        /*0040*/                   EXIT ;
"""
RACE = """========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at fw::copy_async<int>(T2)+0x20 in copy.cuh:49
=========     and Read access at fw::ldmatrix(unsigned (&)[4])+0x30 in mma.cuh:17 [456 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
WRITE = """========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 16 bytes
=========     at attention+0x1f0 in kernel.cu:84
=========     by thread (96,0,0) in block (0,0,0)
=========     Access to 0x7f00 is out of bounds
=========
========= ERROR SUMMARY: 1 error
"""


def test_an_instruction_belongs_to_the_outermost_line_of_the_kernel() -> None:
    found = read(LISTING)
    assert found == {0x10: 43, 0x20: 43, 0x30: 82}
    assert line_at(found, 0x28) == 43
    assert line_at({}, 0x28) is None


def test_a_race_in_the_vocabulary_is_told_by_the_lines_that_called_it() -> None:
    (found,) = findings("racecheck", RACE, Lines(read(LISTING), MAP))
    assert (found.cu_lines, found.tl_lines) == ((43, 82), (25, 36))
    told = "racecheck: Race reported between Write access and Read access [456 hazards]"
    assert str(found) == f"{told} (kernel.cu:43, 82) from code.tl:25, 36"


def test_a_line_of_the_kernel_needs_no_disassembler() -> None:
    (found,) = findings("memcheck", WRITE, Lines(map=MAP))
    assert (found.cu_lines, found.tl_lines) == ((84,), (36,))
    assert found.text == "Invalid __global__ write of size 16 bytes"


@pytest.mark.parametrize(
    ("log", "count"),
    [
        ("========= ERROR SUMMARY: 0 errors\n", 0),
        ("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n", 0),
        ("========= ERROR SUMMARY: 3 errors\n", 1),
        ("", 0),
    ],
)
def test_a_count_is_a_finding_too(log: str, count: int) -> None:
    assert len(findings("memcheck", log, Lines())) == count
