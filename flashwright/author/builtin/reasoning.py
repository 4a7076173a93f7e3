"""reasoning.md: the reasons for the code, with the figures behind them."""

from __future__ import annotations

from collections.abc import Iterator

from flashwright.author.builtin.author import Written
from flashwright.author.builtin.choose import Candidate, Decision
from flashwright.author.builtin.mask import mask_text
from flashwright.gpu import Gpu
from flashwright.spec import AttentionSpec

KB = 1024


def reasoning(spec: AttentionSpec, gpu: Gpu, written: Written) -> str:
    """The text of reasoning.md for code of the built-in author."""
    assert written.decision is not None
    parts = (
        _task(spec, gpu),
        _structure(written),
        _candidates(written.decision),
        _ranking(written.decision),
        _classes(written),
        _numbers(written),
        _model(),
    )
    texts = [list(part) for part in parts]
    return "\n".join(line for text in texts if text for line in (*text, ""))


def _task(spec: AttentionSpec, gpu: Gpu) -> Iterator[str]:
    width = f"{spec.head_dim}"
    if spec.value_dim != spec.head_dim:
        width = f"{spec.head_dim} (Q and K) and {spec.value_dim} (V)"
    yield f"# {spec.variant} for {gpu.title}"
    yield ""
    heads = f"{spec.heads} of Q, {spec.kv_heads} of K and V"
    yield f"- Heads: {heads}; {width} wide; {spec.input_dtype}."
    if spec.branch == "selected":
        blocks = f"{spec.top_k} blocks of {spec.selected_block} keys"
        yield f"- Mask: a query sees what of its {blocks} lies at or before its position."
    else:
        yield f"- Mask: {mask_text(spec).words}."
    copies = "TMA" if gpu.tma else "cp.async" if gpu.cp_async else "loads through registers"
    mma = "wgmma" if gpu.wgmma else "mma.sync"
    yield (
        f"- {gpu.title} ({gpu.arch}): {gpu.sms} SMs, {gpu.shared_per_block // KB} KB of shared "
        f"memory per block, {mma}, {copies}."
    )


ALLOCATED = """\
- Every tensor, tile and running value is allocated. What a loop adds to starts at 0, the running
  maximum at -1e30: below every score, and finite, so that a row whose keys are all masked gives
  exp(-inf) = 0 and not NaN."""
RESHAPED = """\
- The scores leave the first GEMM in its accumulator layout (MMA_C) and enter the second as an
  operand (MMA_A), in registers: the Reshape says so. This is where they are rounded."""
PREFETCHED = """\
- K has one buffer. Its next block is copied as soon as the first GEMM has read this one, and
  travels under the softmax and the second GEMM: the prefetch."""
STAGED = """\
- K and V have several buffers (stages): the copies are written where they are needed, and the
  hardware runs ahead of them as far as the buffers go."""
MODEL = """\
A step takes as long as its busiest unit, plus the part of the others that finds nothing to hide
under; a block takes its steps plus filling and emptying; the grid takes its waves of blocks, the
last one whole; and no faster than its bytes come from memory. Blocks that the mask cuts through
are computed whole (waste). Every term is a function in `flashwright/author/builtin/cost.py`."""


def _structure(written: Written) -> Iterator[str]:
    """The parts that the parameter stage added to the sketch, derived from the code."""
    yield "## From sketch to code"
    yield ""
    yield ALLOCATED
    if "Reshape" in written.code:
        yield RESHAPED
    if "let Last" in written.code:
        yield PREFETCHED
    elif "stages Stages" in written.code:
        yield STAGED


def _candidates(decision: Decision) -> Iterator[str]:
    w = decision.workload
    fits = decision.enumerated - decision.over_shared - decision.over_registers
    yield "## What was considered"
    yield ""
    yield f"Reference problem: batch {w.batch}, {w.q_len} queries, {w.kv_len} keys for each head."
    yield ""
    yield f"- {decision.enumerated} tilings enumerated"
    yield f"- {decision.over_shared} need more shared memory than a block has"
    yield f"- {decision.over_registers} need more registers than a thread has"
    yield f"- {fits} fit and were priced"
    if decision.measured:
        yield f"- taken whatever its price: {decision.tiling}, {decision.measured}"


def _ranking(decision: Decision) -> Iterator[str]:
    yield "## The best of them"
    yield ""
    yield "Cycles are of one SM for one step (one tile of keys); times are estimates."
    yield ""
    yield (
        "| BM x BN | stages | warps | Q buffers | MMA | softmax | shared memory | L2 | step "
        "| shared KB | registers | blocks/SM | waste | est. us |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|"
    for candidate in decision.ranked:
        yield _row(candidate, candidate is decision.chosen)


def _row(candidate: Candidate, chosen: bool) -> str:
    t, f, c = candidate.tiling, candidate.footprint, candidate.cost
    name = f"**{t.bm} x {t.bn}**" if chosen else f"{t.bm} x {t.bn}"
    cells = (
        name, t.stages, t.warps, t.q_stages, f"{c.mma_cycles:.0f}", f"{c.softmax_cycles:.0f}",
        f"{c.shared_cycles:.0f}", f"{c.load_cycles:.0f}", f"{c.step_cycles:.0f}",
        f"{f.shared_bytes / KB:.0f}", f"{f.registers} of {f.register_limit}", c.occupancy,
        f"{100 * (c.waste - 1):.0f} %", f"{c.microseconds:.1f}",
    )  # fmt: skip
    return "| " + " | ".join(map(str, cells)) + " |"


def classes_in_words(written: Written) -> list[str]:
    """The number of keys up to which each program is used, and why; empty if there is only one."""
    served = zip(written.classes[:-1], written.chosen, strict=True)
    return [
        f"up to {up_to} keys {f'`{name}`' if name else 'this kernel'} is called: {c.reason}"
        for (up_to, name), c in served
        if written.further
    ]


def _classes(written: Written) -> Iterator[str]:
    told = classes_in_words(written)
    if not told:
        return
    yield "## Other lengths"
    yield ""
    yield "The same program with other tiles is faster at some lengths, and is beside this one:"
    yield ""
    yield from (f"- {line}" for line in told)


def _numbers(written: Written) -> Iterator[str]:
    yield "## Each number, and why"
    yield ""
    yield "| parameter | value | why |"
    yield "|---|---|---|"
    for choice in written.choices:
        yield f"| {choice.name} | {choice.value} | {choice.reason} |"


def _model() -> Iterator[str]:
    yield "## The cost model"
    yield ""
    yield MODEL
