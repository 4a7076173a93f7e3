"""Derived backward passes: all kernels of one, run under emulation one after another, against fp64.
They are compiled together, which takes most of the time. test_judge_backward.py has one that is no
slow test."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from flashwright import gpu as gpus
from flashwright.author.builtin.author import write_code, write_sketch
from flashwright.author.builtin.backward import tilings
from flashwright.author.builtin.variants import make_spec
from flashwright.build import toolchain
from flashwright.build.steps import Steps
from flashwright.check.check import check, checked_program
from flashwright.emulate.emulate import run
from flashwright.grad.grad import backward
from flashwright.judge import oracle
from flashwright.judge.answer import backward_inputs
from flashwright.judge.form import planned_shape
from flashwright.judge.gradient_noise import compare
from flashwright.judge.gradients import gradients
from flashwright.judge.inputs import make_inputs
from flashwright.lang.format import format_tree
from flashwright.lang.parse import parse, read
from flashwright.program.kernels import Kernels
from flashwright.rewrite.packed import packed
from flashwright.sandbox.tensors import DTYPES
from flashwright.semantics.interpret import interpret_all, shape_of
from flashwright.spec import AttentionSpec, load
from tests.example_programs import EXAMPLES
from tests.unit.test_grad import LISTS, drawn_lists, listed, listed_spec
from tests.unit.together import SCHEDULES, Kernel, kernels

pytestmark = pytest.mark.skipif(not toolchain.has_nvcc(), reason="there is no CUDA compiler here")

OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "wide": {"causal": True, "head_dim": 128},
    "window": {"causal": True, "window": 70},
    "softcap": {"causal": True, "softcap": 30.0},
    "alibi": {"causal": True, "alibi": True},
    "sink": {"causal": True, "sink": True},
    "wider": {"causal": True, "head_dim": 256},  # kernels apart, or warps that share rows
    "mla": {"variant": "mla", "heads": 2, "kv_heads": 2, "head_dim": 192, "causal": True},
    "no lse": {"causal": True, "lse": False},  # the forward's loop once more
}
DTYPE = {"t4": "fp16", "a100": "bf16", "h200": "bf16"}
LENGTHS = ((1, 1), (70, 133), (144, 90))  # dQ is in fragments if the queries are a multiple of 16


def derived(
    option: str, gpu: str, deterministic: bool = False
) -> tuple[list[str], Steps, AttentionSpec]:
    """The kernels of a backward pass as programs, with the author's first sizes."""
    card = gpus.find(gpu)
    settings = {"variant": "gqa", "heads": 4, "kv_heads": 2, "head_dim": 64, **OPTIONS[option]}
    spec = make_spec(**{**settings, "dtype": DTYPE[gpu]})
    forward = write_code(write_sketch(spec), spec, card).code
    made = backward(checked_program(parse(forward)), deterministic=deterministic)
    _, sized = next(tilings(made.tree, card))
    programs = check(sized, card).kernels
    return [format_tree(p.tree) for p in programs], Steps.of(Kernels(programs)), spec


def launched(
    steps: Sequence[Kernel], record: Steps, given: dict[str, Any], dims: dict[str, int], how: str
) -> dict[str, Any]:
    """All tensors after the kernels have run one after another. New ones are NaN, or 0."""
    tensors = {name: np.ascontiguousarray(array) for name, array in given.items()}
    for kernel in steps:
        for tensor in kernel.plan.tensors:
            if tensor.name not in tensors:
                start = 0.0 if tensor.name in record.zeroed else np.nan
                shape = tensor.padded(planned_shape(tensor, dims))
                tensors[tensor.name] = np.full(shape, start).astype(DTYPES[tensor.dtype])
        own = {t.name: tensors[t.name] for t in kernel.plan.tensors}
        sizes = {name: dims[name] for name in kernel.plan.dims}
        found = run(kernel.program, kernel.plan, own, sizes, how).findings
        assert not found, [(f.kind, f.instruction.opcode, f.instruction.line) for f in found]
    return tensors


SHARES = [
    pytest.param("h200", list(OPTIONS), marks=pytest.mark.slow, id="h200-all"),
    pytest.param("t4", list(OPTIONS)[::2], marks=pytest.mark.slow, id="t4"),
    pytest.param(
        "a100",
        ["full", "causal", "wide", "softcap", "wider", "mla", "no lse"],
        marks=pytest.mark.slow,
        id="a100",
    ),
]


@pytest.mark.parametrize(("gpu", "options"), SHARES)
def test_gradients(gpu: str, options: list[str]) -> None:
    made = [derived(option, gpu) for option in options]
    built = iter(kernels([(code, spec) for codes, _, spec in made for code in codes], gpu))
    for codes, record, spec in made:
        steps = [next(built) for _ in codes]
        for (q_len, kv_len), how in zip(LENGTHS, SCHEDULES, strict=False):
            right(steps, record, spec, (q_len, kv_len), how)


def right(
    steps: Sequence[Kernel], record: Steps, spec: AttentionSpec, lengths: tuple[int, int], how: str
) -> dict[str, Any]:
    """All tensors after the kernels have run, with gradients that agree with fp64."""
    dims = {"batch": 1, "heads": spec.heads, "kv_heads": spec.kv_heads}
    dims |= dict(zip(("q_len", "kv_len"), lengths, strict=True))
    drawn = make_inputs(spec.differentiated(), dims, 1, "normal")
    given = backward_inputs(spec, drawn, oracle.attention(spec, drawn, dims), 0)
    given = {name: given[name] for name in given if spec.lse or name != "LSE"}
    found = launched(steps, record, given, dims, how)
    for name, expected in gradients(spec, drawn, dims).items():
        if name in found:
            compared = compare(found[name], expected)
            assert compared.ok, f"{spec.in_words} {dims} {name}: {compared.reason}"
    return found


DETERMINISTIC = [
    pytest.param("h200", ["causal"], id="h200"),
    pytest.param(
        *("h200", ["full", "window", "alibi", "mla"]),
        marks=pytest.mark.slow,
        id="h200-more",
    ),
    pytest.param("t4", ["wider"], marks=pytest.mark.slow, id="t4"),
    pytest.param("a100", ["alibi"], marks=pytest.mark.slow, id="a100"),
]


@pytest.mark.parametrize(("gpu", "options"), DETERMINISTIC)
def test_deterministic_gradients(gpu: str, options: list[str]) -> None:
    """Right, and of the same bits under every schedule. Each tile of queries has as many turns as
    blocks of keys see it."""
    made = [derived(option, gpu, deterministic=True) for option in options]
    built = iter(kernels([(code, spec) for codes, _, spec in made for code in codes], gpu))
    for codes, record, spec in made:
        assert "dQsum_turns" in set(record.scratch) & set(record.zeroed)
        steps = [next(built) for _ in codes]
        for lengths in LENGTHS:
            first, *more = (right(steps, record, spec, lengths, how) for how in SCHEDULES[:3])
            for found in more:
                assert all(found[n].tobytes() == first[n].tobytes() for n in ("dQ", "dK", "dV"))
            assert first["dQsum_turns"].any()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gpu", "deterministic"), [("a100", False), ("h200", False), ("a100", True)]
)
def test_examples(gpu: str, deterministic: bool) -> None:
    """Gradients of other tensors, two softmaxes, tiles side by side, and blocks in lists."""
    names = ["differential", "side_by_side", "bias_prefix"]
    names += [] if deterministic else ["forgetting", "relative_bias"]
    given = [(load(EXAMPLES / f"{name}.toml"), read(EXAMPLES / f"{name}.tl")) for name in names]
    if gpu == "h200":
        given += [(listed_spec(v), listed(v, gpu, **LISTS[v])) for v in LISTS]
    card, made = gpus.find(gpu), []
    for spec, text in given:
        tree = backward(checked_program(parse(text)), deterministic=deterministic).tree
        _, sized = next(tilings(tree, card))
        made.append((spec, check(sized, card).kernels))
    texts = [(format_tree(p.tree), spec) for spec, programs in made for p in programs]
    built = iter(kernels(texts, gpu))
    for spec, programs in made:
        as_interpreted([next(built) for _ in programs], Kernels(programs), spec)


def as_interpreted(steps: Sequence[Kernel], whole: Kernels, spec: AttentionSpec) -> None:
    """Kernels compute what the interpreter does, which test_grad.py compares with fp64."""
    dims = {"batch": 1, "heads": spec.heads, "kv_heads": spec.kv_heads, "q_len": 70, "kv_len": 133}
    rng = np.random.default_rng(0)
    inputs = {
        t.name: rng.standard_normal(shape_of(t, program, dims))
        for program in whole.programs
        for t in program.inputs
    }
    if "BlocksOfKeys" in inputs:
        inputs |= drawn_lists(rng, dims, LISTS[spec.variant])
    given = {t.name: inputs[t.name].astype(DTYPES[t.dtype]) for t in whole.inputs}
    expected = interpret_all(whole, given, dims)
    found = launched(steps, Steps.of(whole), given, dims, SCHEDULES[0])
    for name, array in expected.items():
        error = found[name].astype(np.float64) - array.astype(np.float64)
        size = np.sqrt(np.mean(array.astype(np.float64) ** 2))
        assert np.sqrt(np.mean(error**2)) <= 2e-3 * size, (spec.variant, name)


@pytest.mark.slow
@pytest.mark.parametrize(("gpu", "option"), [("h200", "causal"), ("a100", "window")])
def test_packed_gradients(gpu: str, option: str) -> None:
    """Sequences behind each other, one of which has no queries, as if each were alone."""
    card = gpus.find(gpu)
    settings = {"variant": "gqa", "heads": 4, "kv_heads": 2, "head_dim": 64, **OPTIONS[option]}
    spec = make_spec(**{**settings, "dtype": DTYPE[gpu]})
    forward = write_code(write_sketch(spec), spec, card).code
    _, sized = next(tilings(backward(checked_program(parse(forward))).tree, card))
    programs = check(packed(sized), card).kernels
    made = kernels([(format_tree(p.tree), spec) for p in programs], gpu)
    parts, sequences = [], ((70, 133), (0, 5), (144, 90), (1, 1))
    for seed, (q_len, kv_len) in enumerate(sequences):
        dims = {"batch": 1, "heads": 4, "kv_heads": 2, "q_len": q_len, "kv_len": kv_len}
        drawn = make_inputs(spec.differentiated(), dims, seed, "normal")
        given = backward_inputs(spec, drawn, oracle.attention(spec, drawn, dims), 0)
        right = gradients(spec, drawn, dims) if q_len else {}
        zeros = {f"d{name}": np.zeros(drawn[name].shape) for name in "QKV"}
        parts.append({**given, **zeros, **{n: g.value for n, g in right.items()}})
    joined = {n: np.concatenate([p[n][0] for p in parts], axis=1) for n in parts[0]}
    starts = np.cumsum([(0, 0), *sequences], axis=0).astype(np.int32)
    joined |= {"StartsQ": starts[:, 0].copy(), "StartsK": starts[:, 1].copy()}
    read = {t.name for k in made for t in k.plan.tensors if t.name in joined}
    given = {n: joined[n] for n in read if n not in ("dQ", "dK", "dV")}
    dims = {"batch": len(sequences), "heads": 4, "kv_heads": 2, "q_len": 144, "kv_len": 133}
    dims |= {"q_tokens": int(starts[-1, 0]), "kv_tokens": int(starts[-1, 1])}
    for how in SCHEDULES[:2]:
        found = launched(made, Steps.of(Kernels(programs)), given, dims, how)
        for name in ("dQ", "dK", "dV"):
            error = np.linalg.norm(found[name].astype(np.float64) - joined[name])
            assert error < 0.01 * np.linalg.norm(joined[name]), name
