"""The table of diagnostic codes. The long form of each is explain/CODE.md."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True)
class Code:
    """What a code stands for, in one line."""

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
    # syntax
    "FW101": Code("a statement is not written as TL expects it"),
    "FW102": Code("a word that begins no statement"),
    "FW103": Code("a block without its end, or an end without its block"),
    # names
    "FW201": Code("a name that nothing defines"),
    "FW202": Code("a name defined twice"),
    "FW203": Code("a name that nothing uses", severity="warning"),
    "FW204": Code("an operation or function that TL does not have"),
    "FW205": Code("an operand or clause missing, or one too many"),
    "FW206": Code("a name used as something it is not"),
    "FW207": Code("code without a grid"),
    "FW208": Code("an element type that TL does not have"),
    "FW209": Code("an axis that the tensor does not have"),
    # shapes
    "FW301": Code("GEMM operands whose shapes do not multiply"),
    "FW302": Code("a result that does not fit its tile"),
    "FW303": Code("operands that do not line up"),
    "FW304": Code("a Copy whose tile does not fit the tensor or the buffer"),
    "FW305": Code("a Copy that does not say where"),
    "FW306": Code("a size, count or coordinate that is not a whole number of the right kind"),
    # spaces
    "FW401": Code("a Copy between spaces that this GPU cannot do"),
    "FW402": Code("an operand in the wrong space"),
    "FW403": Code("a tile used before any Copy or Compute gives it a value"),
    "FW404": Code("a Copy of a tensor that is not allocated"),
    # layouts
    "FW501": Code("fused GEMMs without a Reshape between them"),
    "FW502": Code("a Reshape that does not apply"),
    "FW503": Code("a GEMM over axes that are not the same (a transpose is missing)"),
    "FW504": Code("GEMM operands of different element types"),
    # flow
    "FW601": Code("an accumulator that is never initialised"),
    "FW602": Code("a buffer overwritten while its value is still needed"),
    "FW603": Code("tiles of different positions put together"),
    "FW604": Code("part of the sequence is missed"),
    "FW605": Code("a coordinate outside the tensor"),
    "FW606": Code("part of the sequence is counted twice"),
    "FW607": Code("softmax state not rescaled when the maximum moves"),
    "FW608": Code("a mask applied after the exponential"),
    "FW609": Code("positions past the end of the sequence are not masked"),
    "FW610": Code("an output that is not written exactly once"),
    "FW611": Code("a program too long-running to check whole", severity="warning"),
    # the GPU
    "FW701": Code("more shared memory than the GPU has"),
    "FW702": Code("more registers than a thread has"),
    "FW703": Code("an element type that the GPU's MMA does not take"),
    "FW704": Code("a tile that is not a whole number of MMA tiles"),
    "FW705": Code("a GPU that Flashwright does not know", bad_input=True),
    # the CPU run
    "FW801": Code("the output is not what the spec asks for"),
    "FW802": Code("the scores are not what the spec asks for"),
    "FW803": Code("the mask is not what the spec asks for"),
    "FW804": Code("the accumulation is not what the spec asks for"),
    "FW805": Code("the program gives NaN or infinity"),
    "FW806": Code("a program that takes too much to run"),
    # the translation
    "FW811": Code("a program that cannot be translated for this GPU"),
    "FW812": Code("the GEMMs do not use wgmma", severity="note"),
    "FW813": Code("a Copy does not use TMA", severity="note"),
    "FW814": Code("a loop is not overlapped", severity="note"),
    "FW815": Code("warpgroups do not run in ping-pong", severity="note"),
    "FW816": Code("masked iterations are not split", severity="note"),
    "FW817": Code("the kernel is not persistent", severity="note"),
    "FW818": Code("copies do not run ahead", severity="note"),
    "FW819": Code("a slower translation is taken, because the fast one spills", severity="note"),
    "FW820": Code("a simpler schedule is taken", severity="note"),
    # the build
    "FW821": Code("what is needed to compile is not there", bad_input=True),
    "FW822": Code("the compiler does not take the generated code"),
    "FW823": Code("the kernel spills registers"),
    "FW824": Code("the compiler gives up what makes the kernel fast"),
    "FW825": Code("the compiler did not come to an end", bad_input=True),
    "FW826": Code("the build cache cannot be used", severity="warning"),
    "FW827": Code("model-written code that does not keep to its contract"),
    "FW828": Code("code that reaches outside"),
    "FW829": Code("a kernel slower than asked for", severity="warning"),
    # the kernel under emulation
    "FW831": Code("PTX that the emulator cannot execute", bad_input=True),
    "FW833": Code("an access outside of every tensor and of shared memory"),
    "FW834": Code("an address that is not a multiple of what is moved"),
    "FW835": Code("a store to memory that is only for reading"),
    "FW836": Code("a read of memory that nothing has written"),
    "FW837": Code("two threads at the same bytes, with no barrier between them"),
    "FW838": Code("threads that wait for ever"),
    "FW839": Code("an instruction of a whole warp that a part of it executes"),
    "FW840": Code("ordinary stores read by the asynchronous proxy without its fence"),
    "FW841": Code("more bytes arrive at a barrier than it was told to expect"),
    "FW842": Code("a register of a wgmma that is still under way"),
    "FW843": Code("a wgmma that takes registers written since its fence"),
    "FW844": Code("a barrier that is not initialised, or has too many arrivals"),
    "FW845": Code("a kernel that stops itself"),
    # the kernel on a GPU
    "FW851": Code("no GPU here can run the kernel", bad_input=True),
    "FW852": Code("a kernel package that cannot be loaded", bad_input=True),
    "FW853": Code("the output is not what the spec asks for"),
    "FW854": Code("less exact than a library's attention"),
    "FW855": Code("different answers to the same question"),
    "FW856": Code("a candidate that does not run"),
    "FW857": Code("a candidate that cannot be loaded", bad_input=True),
    "FW858": Code("too few problems for a verdict", bad_input=True),
    # what the judge finds: the output
    "FW861": Code("an output that is all zeros"),
    "FW862": Code("NaN or infinity where the answer is finite"),
    "FW863": Code("elements of the output that nothing writes"),
    "FW864": Code("an output of another shape or type than asked for"),
    # right only where one would look
    "FW865": Code("right for the usual inputs only"),
    "FW866": Code("right for the usual shapes only"),
    "FW867": Code("a masked position that changes the output"),
    "FW868": Code("a key that the output does not depend on"),
    "FW869": Code("an earlier result given again"),
    # what a candidate does beside its work
    "FW870": Code("the work is left to a library"),
    "FW871": Code("an input that is changed, or given back as the output"),
    "FW872": Code("memory outside the tensors that is touched"),
    "FW873": Code("threads that do not wait for each other"),
    "FW874": Code("work that goes on behind the caller's back"),
    "FW875": Code("a candidate that meddles with its judge"),
    "FW876": Code("faster than the GPU can be"),
    # how it ends
    "FW877": Code("a candidate that does not come to an end"),
    "FW878": Code("a candidate that ends its own process"),
    "FW879": Code("an error on the GPU itself"),
    "FW880": Code("more memory than is allowed"),
    "FW881": Code("too little was tried for a verdict"),
    "FW882": Code("weights that are wrong in the mean, or left out"),
    # specs and usage
    "FW901": Code("a spec that no attention can meet", bad_input=True),
    "FW902": Code("a variant that Flashwright does not know", bad_input=True),
    "FW903": Code("a spec that cannot be read", bad_input=True),
    "FW904": Code("a program and a spec that do not belong together", bad_input=True),
    "FW905": Code("no configuration fits this GPU", bad_input=True),
    "FW906": Code("words that no spec has", bad_input=True),
    # language models
    "FW911": Code("a model that cannot be reached", bad_input=True),
    "FW912": Code("a model's reply that cannot be used"),
    "FW913": Code("the budget is used up"),
    "FW914": Code("a budget that cannot be kept", bad_input=True),
    "FW915": Code("a record that cannot be replayed", bad_input=True),
}

MACHINE = frozenset({"FW001", "FW821", "FW851"})
"""Trouble of this machine, which no attempt can help: a disk, a compiler or a GPU is missing."""
