"""The table of diagnostic codes. The long form of each is explain/CODE.md."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True)
class Code:
    """A code's title and severity; `bad_input` codes give exit code 2."""

    title: str
    severity: Severity = "error"
    bad_input: bool = False


CODES: dict[str, Code] = {
    # reading the file
    "FW001": Code("a file cannot be read or written", bad_input=True),
    "FW002": Code("the file is not UTF-8 text", bad_input=True),
    "FW003": Code("the file is too large", bad_input=True),
    "FW004": Code("nested too deeply, or a statement is too long", bad_input=True),
    "FW005": Code("there is no TL in this file", bad_input=True),
    "FW006": Code("a path outside of the workspace", bad_input=True),
    # syntax
    "FW101": Code("syntax error in a statement"),
    "FW102": Code("unknown statement keyword"),
    "FW103": Code("a block without `end`, or an `end` without a block"),
    # names
    "FW201": Code("undefined name"),
    "FW202": Code("a name is defined twice"),
    "FW203": Code("unused name", severity="warning"),
    "FW204": Code("unknown operation or function"),
    "FW205": Code("missing or extra operand or clause"),
    "FW206": Code("a name of the wrong kind"),
    "FW207": Code("missing grid"),
    "FW208": Code("unknown element type"),
    "FW209": Code("unknown axis"),
    "FW210": Code("earlier name of a param", severity="warning"),
    # shapes
    "FW301": Code("GEMM operand shapes do not match"),
    "FW302": Code("the result does not fit its target tile"),
    "FW303": Code("operand shapes do not match"),
    "FW304": Code("the tile of a Copy does not fit the tensor or the buffer"),
    "FW305": Code("a Copy without a coordinate"),
    "FW306": Code("a size, count or coordinate that is not a whole number of the right kind"),
    # spaces
    "FW401": Code("a Copy between spaces that this GPU does not support"),
    "FW402": Code("an operand in the wrong memory space"),
    "FW403": Code("a tile is read before it is written"),
    "FW404": Code("a Copy of a tensor that is not allocated"),
    # layouts
    "FW501": Code("missing Reshape between two fused GEMMs"),
    "FW502": Code("invalid Reshape"),
    "FW503": Code("a GEMM over mismatched axes (missing transpose)"),
    "FW504": Code("GEMM operands of different element types"),
    # flow
    "FW601": Code("accumulator not initialised"),
    "FW602": Code("a buffer is overwritten before its value is read"),
    "FW603": Code("tiles of different positions are combined"),
    "FW604": Code("part of the sequence is missed"),
    "FW605": Code("a coordinate is outside the tensor"),
    "FW606": Code("part of the sequence is counted twice"),
    "FW607": Code("softmax state is not rescaled when the maximum changes"),
    "FW608": Code("mask applied after the exponential"),
    "FW609": Code("positions past the end of the sequence are not masked"),
    "FW610": Code("an output is not written exactly once"),
    "FW611": Code("the program is too long to check completely", severity="warning"),
    "FW612": Code("kernels use a tensor in the wrong order"),
    "FW613": Code("additions at turns that are not in order"),
    # the GPU
    "FW701": Code("not enough shared memory"),
    "FW702": Code("not enough registers"),
    "FW703": Code("the GPU's MMA does not support this element type"),
    "FW704": Code("tile size is not a multiple of the MMA tile"),
    "FW705": Code("unknown GPU", bad_input=True),
    # the CPU run
    "FW801": Code("the output differs from the spec"),
    "FW802": Code("the scores differ from the spec"),
    "FW803": Code("the mask differs from the spec"),
    "FW804": Code("the accumulation differs from the spec"),
    "FW805": Code("the output has NaN or infinity"),
    "FW806": Code("the program exceeds its run limits"),
    # the translation
    "FW811": Code("the program cannot be translated for this GPU"),
    "FW812": Code("the GEMMs do not use wgmma", severity="note"),
    "FW813": Code("a Copy does not use TMA", severity="note"),
    "FW814": Code("a loop is not overlapped", severity="note"),
    "FW815": Code("warpgroups do not run in ping-pong", severity="note"),
    "FW816": Code("masked iterations are not split", severity="note"),
    "FW817": Code("the kernel is not persistent", severity="note"),
    "FW818": Code("copies are not prefetched", severity="note"),
    "FW819": Code("fallback to a slower translation, because the fast one spills", severity="note"),
    "FW820": Code("fallback to a simpler schedule", severity="note"),
    "FW883": Code("the tiles of packed sequences are not taken from a queue", severity="note"),
    # the build
    "FW821": Code("the toolchain is missing", bad_input=True),
    "FW822": Code("nvcc rejects the generated code"),
    "FW823": Code("the kernel spills registers"),
    "FW824": Code("ptxas serialises wgmma or ignores setmaxnreg"),
    "FW825": Code("the compiler was stopped", bad_input=True),
    "FW826": Code("the build cache cannot be used", severity="warning"),
    "FW827": Code("model-written code breaks its contract"),
    "FW828": Code("forbidden construct in untrusted code"),
    "FW829": Code("the kernel is slower than requested", severity="warning"),
    "FW830": Code("the CUDA compiler cannot be used", severity="warning"),
    # the kernel under emulation
    "FW831": Code("unsupported PTX", bad_input=True),
    "FW833": Code("out-of-bounds memory access"),
    "FW834": Code("misaligned address"),
    "FW835": Code("store to read-only memory"),
    "FW836": Code("read of uninitialised memory"),
    "FW837": Code("data race in shared memory"),
    "FW838": Code("deadlock"),
    "FW839": Code("warp-wide instruction executed by part of a warp"),
    "FW840": Code("missing fence for the async proxy"),
    "FW841": Code("more bytes arrive at an mbarrier than expected"),
    "FW842": Code("a register of a pending wgmma is used"),
    "FW843": Code("missing wgmma.fence"),
    "FW844": Code("an mbarrier is not initialised, or has too many arrivals"),
    "FW845": Code("the kernel executes a trap"),
    # the kernel on a GPU
    "FW851": Code("no usable GPU", bad_input=True),
    "FW852": Code("a kernel package cannot be loaded", bad_input=True),
    "FW853": Code("wrong output"),
    "FW854": Code("less precise than a library's attention"),
    "FW855": Code("results are not repeatable"),
    "FW856": Code("the candidate fails to run"),
    "FW857": Code("the candidate cannot be loaded", bad_input=True),
    "FW858": Code("too few problems for a verdict", bad_input=True),
    "FW859": Code("a machine of the fleet cannot be used", bad_input=True),
    # what the judge finds: the output
    "FW861": Code("the output is all zeros"),
    "FW862": Code("NaN or infinity where the answer is finite"),
    "FW863": Code("output elements are not written"),
    "FW864": Code("wrong shape or type of an output"),
    # right only for usual problems
    "FW865": Code("right only for usual inputs"),
    "FW866": Code("right only for usual shapes"),
    "FW867": Code("a masked position changes the output"),
    "FW868": Code("a visible key does not affect the output"),
    "FW869": Code("a cached result is returned"),
    # conduct of a candidate
    "FW870": Code("the work is done by a library"),
    "FW871": Code("an input is modified, or returned as the output"),
    "FW872": Code("memory outside the tensors is accessed"),
    "FW873": Code("data race or barrier error"),
    "FW874": Code("work runs outside the caller's stream"),
    "FW875": Code("the candidate tampers with the judge"),
    "FW876": Code("faster than the hardware limit"),
    # how a candidate ends
    "FW877": Code("the candidate does not finish in time"),
    "FW878": Code("the candidate's process ends"),
    "FW879": Code("a CUDA error on the device"),
    "FW880": Code("memory limit exceeded"),
    "FW881": Code("a kernel of the package was not tested"),
    "FW882": Code("biased or missing softmax weights"),
    # specs and usage
    "FW901": Code("invalid spec", bad_input=True),
    "FW902": Code("unknown variant", bad_input=True),
    "FW903": Code("the spec cannot be read", bad_input=True),
    "FW904": Code("the program and the spec do not match", bad_input=True),
    "FW905": Code("no configuration fits this GPU", bad_input=True),
    "FW906": Code("unknown words in the description", bad_input=True),
    "FW907": Code("a function of FlexAttention that cannot become TL", bad_input=True),
    "FW908": Code("the program has no derived gradient"),
    "FW909": Code("the program cannot be packed"),
    "FW910": Code("the program cannot be split"),
    "FW916": Code("the heads of the program cannot be grouped"),
    "FW926": Code("a task whose attention is not recognised", bad_input=True),
    # language models
    "FW911": Code("the model cannot be reached", bad_input=True),
    "FW912": Code("unusable model reply"),
    "FW913": Code("the budget is used up"),
    "FW914": Code("invalid budget", bad_input=True),
    "FW915": Code("the record cannot be replayed", bad_input=True),
    # this machine
    "FW931": Code("an optional package is missing", bad_input=True),
}

MACHINE = frozenset({"FW001", "FW821", "FW851"})
"""Errors of this machine, which no new attempt can mend: a disk, a compiler or a GPU is missing."""


def page_of(code: str) -> Path:
    """The file with the long form of a code."""
    return Path(__file__).with_name("explain") / f"{code}.md"
