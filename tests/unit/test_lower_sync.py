"""Copies, waits and barriers: no race, nothing else read than the program says, and no more of them
than needed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from flashwright import gpu as gpus
from flashwright.author.builtin.author import write_code, write_sketch
from flashwright.author.builtin.choose import NothingFits
from flashwright.author.builtin.variants import VARIANTS, make_spec
from flashwright.gpu import Gpu
from flashwright.lower import ir
from flashwright.lower.frontend.lowering import lower
from flashwright.lower.passes.place_barriers import Travel, place_barriers
from flashwright.lower.passes.prefetch import run_copies_ahead
from flashwright.lower.translate import schedule
from flashwright.program.program import Program
from flashwright.spec import BadSpec
from tests.example_programs import PROGRAMS
from tests.share import some
from tests.unit.happens_before import Checker, Race, block
from tests.unit.lowered import scheduled
from tests.unit.tl_attention import COPY, attention, program

LENGTHS = ((100, 300), (64, 97), (64, 20))
IN_REGISTERS = {
    "copy_q": "Copy Q from shared to register",
    "q": "Q_register",
    "allocate": "Allocate Q in register (BM, HeadDim) as fp16",
}
THROUGH_SHARED = {
    "reshape": "Copy S from register to shared",
    "p": "S_shared",
    "allocate": "Allocate S in shared (BM, BN) as fp16",
}
TWICE = THROUGH_SHARED | {  # which is no attention any more
    "p": "S_shared, V_shared and accumulate O_register\n  Compute S * 1 and get new S\n"
    "  Copy S from register to shared\n  Compute GEMM S_shared",
}
LATER = {
    "low": "floor(block / 2)",
    "mask": "kv_idx < kv_len and kv_idx >= floor(block / 2) * BN",
}
PREFETCH = {
    "copy_q": f"if 0 < kv_len / BN\n  {COPY.format('K').replace('L = i', 'L = 0')}\nend",
    "copy_k": "",
    "scale": f"if i < kv_len / BN - 1\n    {COPY.format('K').replace('L = i', 'L = i + 1')}\n  end",
}
SHAPES = {
    "plain": {},
    "Q in registers": IN_REGISTERS,
    "S through shared": THROUGH_SHARED,
    "S through shared twice": TWICE,
    "begins later": LATER,
    "prefetch": PREFETCH,
}


def blocks(
    made: Program, q_len: int, kv_len: int
) -> Iterator[tuple[dict[str, int], dict[str, int]]]:
    """A problem, and the places of its first and its last block."""
    first, *others = (a.name.id for a in made.grid.axes)
    rows = int(made.params.get("BM", 64))
    for number in {0, -(-q_len // rows) - 1}:
        yield {"q_len": q_len, "kv_len": kv_len}, {first: number, **dict.fromkeys(others, 1)}


def check_all(made: Program, gpu: Gpu) -> None:
    checker = Checker(made, gpu)
    for lengths in LENGTHS:
        for dims, place in blocks(made, *lengths):
            checker.check(dims, place)


@pytest.mark.parametrize("gpu", ["t4", "a100"])
@pytest.mark.parametrize("shape", some(SHAPES, 3))
def test_no_race_whatever_the_stages(shape: str, gpu: str) -> None:
    for k_stages, v_stages in product((1, 2, 3), (1, 2, 4)):
        text = attention(k_stages=k_stages, v_stages=v_stages, **SHAPES[shape])
        strict = k_stages == v_stages and SHAPES[shape] is not TWICE  # once for each shape will do
        check_all(program(text, strict), gpus.find(gpu))


@pytest.mark.parametrize("travel", ["ahead", "at once"])
@pytest.mark.parametrize("shape", some(SHAPES, 3))
def test_no_race_through_registers(shape: str, travel: Travel) -> None:
    for stages in (1, 2):
        text = attention(k_stages=stages, v_stages=stages, **SHAPES[shape])
        made = program(text, strict=SHAPES[shape] is not TWICE)
        body = run_copies_ahead(lower(made).body, made.buffers, ahead=1)
        body = place_barriers(body, made.buffers, travel)
        for dims, place in blocks(made, 100, 300):
            meant = block(made, gpus.find("t4"), dims, place, sequential=True)
            meant.run(lower(made).body)
            done = block(made, gpus.find("t4"), dims, place)
            done.run(body)
            assert meant.seen == done.seen


@pytest.mark.parametrize("gpu", ["t4", "a100"])
def test_two_copies_to_one_place(gpu: str) -> None:
    """The second has the last word, even if nobody has read the first."""
    twice = f"{COPY.format('K').replace('L = i', 'L = 0')}\n  {COPY.format('K')}"
    check_all(program(attention(copy_k=twice), strict=False), gpus.find(gpu))


@pytest.mark.parametrize("gpu", ["a100", "l40s", "t4"])
@pytest.mark.parametrize("path", some(PROGRAMS, 3), ids=lambda p: p.stem)
def test_no_race_in_the_examples(path: Path, gpu: str) -> None:
    check_all(program(path.read_text("utf-8")), gpus.find(gpu))


@pytest.mark.parametrize("gpu", ["a100", "l40s", "t4"])
@pytest.mark.parametrize("variant", some(sorted(VARIANTS), 3))
def test_no_race_in_the_built_in_programs(variant: str, gpu: str) -> None:
    card, tried = gpus.find(gpu), 0
    for options in ({"causal": True}, {"causal": False}, {"causal": True, "window": 70}):
        for dtype in ("fp16", "fp8"):
            try:
                spec = make_spec(variant, dtype=dtype, **options)
                if not card.takes(spec.input_dtype):
                    continue
                text = write_code(write_sketch(spec), spec, card).code
            except (BadSpec, NothingFits):
                continue
            check_all(program(text, strict=False), card)  # test_builtin.py has them checked
            tried += 1
    unfit = gpu == "t4" or (variant == "mla-decode" and gpu != "h200")  # O has 512 columns
    assert tried or unfit


# --- the checker itself: it sees what is taken away --------------------------------------------


def without(body: tuple[ir.Statement, ...]) -> Iterator[tuple[str, tuple[ir.Statement, ...]]]:
    """The body with one wait, barrier or put left out, each in turn."""
    for position, node in enumerate(body):
        rest = body[:position], body[position + 1 :]
        if isinstance(node, (ir.Wait, ir.Barrier, ir.Put)):
            yield type(node).__name__, (*rest[0], *rest[1])
        elif isinstance(node, ir.Loop):
            for name, inner in without(node.body):
                yield f"{name} in the loop", (*rest[0], replace(node, body=inner), *rest[1])


@pytest.mark.parametrize("gpu", ["t4", "a100"])
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("shape", ["plain", "Q in registers", "prefetch"])
def test_nothing_can_be_left_out(shape: str, stages: int, gpu: str) -> None:
    made = program(attention(k_stages=stages, v_stages=stages, **SHAPES[shape]))
    dims, place = {"q_len": 64, "kv_len": 300}, {"block": 0, "head": 1, "item": 1}
    meant = block(made, gpus.find(gpu), dims, place, sequential=True)
    meant.run(lower(made).body)
    free = []
    for name, body in without(schedule(made, gpus.find(gpu), lower(made).body)):
        run = block(made, gpus.find(gpu), dims, place)
        try:
            run.run(body)
            if run.seen == meant.seen:
                free.append(name)
        except Race:
            pass
    # Before a loop with stages all know that Q is there, though the loop's first barrier would do;
    # and a barrier that is due for another reason waits for Q as well.
    assert set(free) <= {"Barrier", "Wait", "Wait in the loop"}, free
    assert len(free) <= 2


# --- as few as are needed ----------------------------------------------------------------------


def loop(text: str, gpu: str) -> list[ir.Statement]:
    (found,) = (n for n in scheduled(text, gpu) if isinstance(n, ir.Loop))
    return list(found.body)


def events(text: str, gpu: str) -> list[str]:
    """The loop's copies, waits, barriers and products, in a few letters each."""
    found = []
    for node in loop(text, gpu):
        match node:
            case ir.Wait(left):
                found.append(f"wait {left}")
            case ir.Barrier():
                found.append("meet")
            case ir.Put(dest):
                found.append(f"put {dest[0]}")
            case ir.Gemm(target):
                found.append(f"gemm {target[0]}")
            case ir.Load(dest):
                found.append(f"load {dest[0]}")
            case ir.Branch(_, then):
                found += [f"load {n.dest[0]}" for n in then if isinstance(n, ir.Load)]
    return found


def test_one_stage_and_a_prefetch() -> None:
    """Two barriers a round: V flies while the scores are computed, K while the output is."""
    assert events(attention(**PREFETCH), "a100") == [
        *("wait 0", "meet", "load V", "gemm S"),
        *("wait 0", "meet", "load K", "gemm O"),
    ]


def test_two_stages() -> None:
    """One barrier a round: it says both that block i is there and that block i - 1 is done with."""
    text = attention(k_stages=2, v_stages=2)
    assert events(text, "a100") == ["wait 0", "meet", "load K", "load V", "gemm S", "gemm O"]


def test_three_stages() -> None:
    """Of the copies on their way, only the older one is waited for."""
    text = attention(k_stages=3, v_stages=3)
    assert events(text, "a100") == ["wait 1", "meet", "load K", "load V", "gemm S", "gemm O"]


def test_through_registers() -> None:
    """What is put is put before the barrier of its reader; Q is put once, before the loop."""
    assert events(attention(**PREFETCH), "t4") == [
        *("load V", "meet", "put K", "put V", "meet", "gemm S", "load K", "gemm O")
    ]
    outside = [n for n in scheduled(attention(**PREFETCH), "t4") if isinstance(n, ir.Put)]
    assert [n.dest[0] for n in outside] == ["Q"]


def test_two_stages_through_registers() -> None:
    """The next blocks travel in registers while the present ones are computed with."""
    text = attention(k_stages=2, v_stages=2)
    assert events(text, "t4") == [
        *("load K", "load V", "meet", "gemm S", "gemm O", "put K", "put V")
    ]
