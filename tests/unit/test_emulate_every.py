"""Every kernel that the translator emits for Turing, Ampere and Ada: right under emulation."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from flashwright import gpu as gpus
from flashwright import spec as specs
from flashwright.author.builtin.author import write_code, write_sketch
from flashwright.author.builtin.choose import NothingFits
from flashwright.author.builtin.variants import make_spec
from flashwright.build import toolchain
from flashwright.judge.problems import problems
from flashwright.judge.reference import UserReference, user_reference
from flashwright.spec import AttentionSpec
from tests.example_programs import PROGRAMS
from tests.unit.together import SCHEDULES, Kernel, emulated, kernels

pytestmark = [
    pytest.mark.skipif(not toolchain.has_nvcc(), reason="there is no CUDA compiler here"),
    pytest.mark.slow,
]

DTYPES = {
    "a100": ("bf16",),
    "t4": ("fp16",),
    "l40s": ("fp8",),
    "h200": ("bf16", "fp8"),
}
"""Ada differs from Ampere in fp8; kernels for fp16 differ from those for bf16 in the type alone."""
MIXES = [(gpu, dtype) for gpu, dtypes in DTYPES.items() for dtype in dtypes]
HEAD_DIMS = (64, 96, 128, 256)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 70},
    "softcap": {"softcap": 30.0},
    "alibi": {"alibi": True},
    "sink": {"sink": True},
}
OTHERS = ("nsa-compressed", "nsa-selected")
LENGTHS = ((1, 1), (70, 133), (150, 90))


def right(kernel: Kernel, reference: UserReference | None = None) -> None:
    """Ragged lengths, each under another schedule, and one of them under all."""
    asked = problems(kernel.spec, 1, "cpu", LENGTHS)
    outputs = []
    wanted = [(problem, s) for problem, s in zip(asked, itertools.cycle(SCHEDULES))]
    wanted += [(asked[1], s) for s in SCHEDULES[:3] if s != SCHEDULES[1]]
    for problem, schedule in wanted:
        result, found, compared = emulated(kernel, problem, schedule, reference)
        if problem is asked[1]:
            outputs.append(found)
        told = [(f.kind, f.instruction.opcode, f.instruction.line) for f in result.findings]
        assert not told, f"{kernel.spec}: {problem}: {told}"
        assert compared.ok, f"{kernel.spec}: {problem}: {compared.reason}"
    assert len(outputs) == 3
    for other, name in itertools.product(outputs[1:], outputs[0]):
        np.testing.assert_array_equal(other[name].view(np.uint8), outputs[0][name].view(np.uint8))


def built(wanted: Sequence[AttentionSpec], gpu: str) -> list[Kernel]:
    """The built-in author's kernels, of those that fit the GPU."""
    codes = []
    for spec in wanted:
        try:
            codes.append((write_code(write_sketch(spec), spec, gpus.find(gpu)).code, spec))
        except NothingFits:
            continue
    return kernels(codes, gpu)


@pytest.mark.parametrize(("gpu", "dtype"), MIXES)
def test_built_in(gpu: str, dtype: str) -> None:
    """Every option with every other size, others for the next option and the next GPU; every other
    one is causal. One run of nvcc compiles all of them."""
    sizes: list[tuple[str, dict[str, Any]]] = [("gqa", {"head_dim": width}) for width in HEAD_DIMS]
    wanted = [
        make_spec(name, dtype=dtype, causal=number % 4 < 2, **size, **option)
        for first, option in enumerate(OPTIONS.values(), MIXES.index((gpu, dtype)))
        for number, (name, size) in enumerate([*sizes, ("mla", {})], first)
        if number % 2
    ]
    made = built(wanted, gpu)
    assert len(made) > len(OPTIONS)
    for kernel in made:
        right(kernel)


@pytest.mark.parametrize(("gpu", "dtype"), MIXES[::2])
def test_sparse(gpu: str, dtype: str) -> None:
    wanted = [make_spec(name, dtype=dtype) for name in OTHERS]
    made = built(wanted, gpu)
    assert made
    for kernel in made:
        right(kernel)


@pytest.mark.parametrize("gpu", ["a100", "l40s", "h200"])
def test_examples(gpu: str) -> None:
    mine = PROGRAMS[::3] if gpu == "l40s" else PROGRAMS  # Ada differs from Ampere in what fits
    listed = [(path.read_text(), specs.load(path.with_suffix(".toml"))) for path in mine]
    for path, kernel in zip(mine, kernels(listed, gpu), strict=True):
        own = kernel.spec.reference
        right(kernel, user_reference(path.parent / own) if own else None)
