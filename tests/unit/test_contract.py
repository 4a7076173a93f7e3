"""What is fixed of a kernel.cu that a model writes, and what becomes of one that differs."""

from __future__ import annotations

import functools
import re
from dataclasses import replace

import pytest

from flashwright import gpu as gpus
from flashwright.author.builtin.author import write_code, write_sketch
from flashwright.check.check import check
from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.lang.parse import parse
from flashwright.lower.launch_plan import LaunchPlan
from flashwright.lower.translate import translate
from flashwright.program.program import Program
from flashwright.untrusted.contract import Contract, Flavour, bound, contract
from tests.golden.cases import CASES, Case
from tests.share import some
from tests.unit.emulated import SPEC

KINDS: tuple[tuple[str, Flavour], ...] = (
    *(("t4", "full"), ("a100", "plain"), ("h200", "full"), ("h200", "plain")),
)


@functools.cache
def program(gpu: str) -> Program:
    card = gpus.find(gpu)
    spec = SPEC if gpu != "t4" else SPEC.model_copy(update={"dtype": "fp16"})
    made = check(parse(write_code(write_sketch(spec), spec, card).code), card).program
    assert made is not None
    return made


@functools.cache
def agreed(gpu: str = "a100", flavour: Flavour = "full") -> Contract:
    return contract(program(gpu), gpus.find(gpu), flavour)


@functools.cache
def ours(gpu: str = "a100", flavour: Flavour = "full") -> tuple[str, LaunchPlan]:
    """Our own translation, as if a model had written it."""
    card = gpus.find(gpu)
    made = translate(program(gpu), card if flavour == "full" else replace(card, wgmma=False))
    threads, shared = made.plan.threads, made.plan.shared
    lines = f"constexpr int Threads = {threads // 32} * 32;\nconstexpr int SharedBytes = {shared};"
    return re.sub(r"constexpr int Threads = [^;]*;", lines, made.source), made.plan


def broken(source: str, gpu: str = "a100", flavour: Flavour = "full") -> Diagnostic:
    with pytest.raises(Failed) as caught:
        bound(agreed(gpu, flavour), source)
    (found,) = caught.value.diagnostics
    assert found.code == "FW827"
    return found


@pytest.mark.parametrize(("gpu", "flavour"), KINDS)
def test_our_own_translation_keeps_it(gpu: str, flavour: Flavour) -> None:
    source, plan = ours(gpu, flavour)
    assert bound(agreed(gpu, flavour), source) == plan


@pytest.mark.parametrize(("gpu", "flavour"), KINDS)
def test_the_header_keeps_itself(gpu: str, flavour: Flavour) -> None:
    made = agreed(gpu, flavour)
    assert bound(made, made.header + "}\n") == ours(gpu, flavour)[1]


def test_flavours_differ_where_the_gpu_has_more() -> None:
    plain, full = agreed("h200", "plain"), agreed("h200", "full")
    assert (len(full.plan.maps), full.plan.stays, len(full.plan.grid)) == (3, True, 1)
    assert (len(plain.plan.maps), plain.plan.stays, len(plain.plan.grid)) == (0, False, 3)
    assert plain.plan.arch == full.plan.arch == "sm_90a"
    assert "fw::Map" in full.header
    assert "fw::Map" not in plain.header
    assert "tensor map of K" in full.notes
    assert "blockIdx.x is block_idx" in plain.notes
    assert agreed("a100", "plain").header == agreed("a100", "full").header
    assert "Field" in broken(ours("h200", "plain")[0], "h200", "full").message.capitalize()


@pytest.mark.parametrize("case", some(CASES, 3), ids=lambda c: c.name)
def test_every_golden_program_has_one(case: Case) -> None:
    card = gpus.find(case.gpu)
    made = check(parse(case.program.read_text("utf-8")), card).program
    assert made is not None
    found = contract(made, card)
    assert bound(found, found.header + "}\n") == case.translate().plan


def test_what_may_be_written_otherwise() -> None:
    source, plan = ours()
    entry = re.search(
        r'extern "C" __global__.*?\)\s*\{', source.replace("Threads, 2", "Threads"), re.S
    )
    assert entry is not None
    other = source.replace("Threads, 2", "Threads").replace(
        entry[0],
        'extern "C" {\n__global__ void attention(const __grid_constant__ Params args) {',
    )
    other = other.replace("int batch, heads,", "int batch;\n  int heads; /* of Q */ int ")
    other = other.replace(
        "constexpr int SharedBytes = ", "static constexpr int SharedBytes = 0x10u + "
    )
    other = re.sub(r"constexpr int Warps = \d+;", "constexpr int Warps = 2;", other)
    assert bound(agreed(), other + "}\n").shared == plan.shared + 16


CHANGES: dict[str, tuple[str, str, str]] = {
    "a type": ("Global<float, 3> LSE", "Global<fw::fp16, 3> LSE", "field 5 of Params"),
    "a name": ("Global<fw::bf16, 4> K;", "Global<fw::bf16, 4> Key;", "field 2 of Params"),
    "a field more": ("q_len, kv_len;\n", "q_len, kv_len, more;\n", "one too many"),
    "a field less": ("q_len, kv_len;\n", "q_len;\n", "missing"),
    "another order": ("int batch, heads,", "int heads, batch,", "field 6 of Params"),
    "a pointer": ("int batch, heads", "int batch, *heads", "field 6 of Params"),
    "no struct": ("struct Params {", "struct Parameters {", "no `struct Params`"),
    "no entry": ("    attention(", "    flash(", "no kernel `attention`"),
    "another parameter": ("__grid_constant__ Params const p", "Params const* p", "does not take"),
    "mangled": ('extern "C" ', "", 'not `extern "C"`'),
    "another tile": ("int BM = 128", "int BM = 64", "BM is 128 in the given header"),
    "no threads": ("constexpr int Threads", "constexpr int Thread_s", "no constant `Threads`"),
    "threads by a call": ("int Threads = 4 * 32", "int Threads = f(4)", "cannot be read: f"),
    "threads twice": (
        "struct P",
        "constexpr int Threads = 64;\nstruct P",
        "more than one constant",
    ),
    "half a warp": ("int Threads = 4 * 32", "int Threads = 48", "whole warps"),
    "too many": ("int Threads = 4 * 32", "int Threads = 64 * 32", "1024 threads at most"),
    "none": ("int Threads = 4 * 32", "int Threads = 0", "whole warps"),
    "too much shared": ("int SharedBytes = ", "int SharedBytes = 9", "bytes of shared memory"),
    "negative": ("int SharedBytes = ", "int SharedBytes = 1 - ", "bytes of shared memory"),
    "endless": ("int SharedBytes = ", "int SharedBytes = SharedBytes + ", "cannot be read"),
    "a macro": ("struct P", "#define Threads 64\nstruct P", "no macro"),
    "only in a comment": ("constexpr int Threads", "// constexpr int Threads", "no constant"),
    "only in a string": ("struct Params {", 'char a[] = "struct Params {', "not closed"),
}


@pytest.mark.parametrize(("old", "new", "says"), CHANGES.values(), ids=CHANGES.keys())
def test_what_breaks_it(old: str, new: str, says: str) -> None:
    source = ours()[0]
    assert old in source
    found = broken(source.replace(old, new, 1))
    assert says in found.message
    if found.span is not None:
        text = source.replace(old, new, 1)
        assert text[found.span.start : found.span.end].strip()


def test_constants_do_not_grow_without_end() -> None:
    steps = "".join(f"constexpr int A{n + 1} = A{n} * A{n};\n" for n in range(300))
    source = f"constexpr int A0 = 9;\n{steps}" + ours()[0].replace("= 4 * 32", "= A300")
    assert "cannot be read" in broken(source).message
