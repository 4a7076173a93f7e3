"""The backward pass of every example and of the built-in author's programs: derived, checked with
sizes for each GPU, run on the CPU against fp64, translated."""

from __future__ import annotations

from typing import Any

import pytest

from flashwright.author.builtin.author import write_code, write_sketch
from flashwright.author.builtin.backward import tilings
from flashwright.author.builtin.variants import make_spec
from flashwright.check.check import check, checked_program
from flashwright.gpu import find
from flashwright.grad.grad import Gradients, backward
from flashwright.judge.cpu import default_cases, judge
from flashwright.lang.format import format_tree
from flashwright.lang.nodes import Tree
from flashwright.lang.parse import parse, read
from flashwright.lower.translate import translate
from flashwright.program.kernels import Kernels
from flashwright.spec import AttentionSpec, load
from tests.example_programs import PROGRAMS
from tests.share import some

GPUS = ("t4", "a100", "h200")
REFUSED = ("append", "block_list", "packed", "paged", "sink_tile")
"""Examples without a derived backward: test_grad.py has the reasons."""
EXAMPLES = [p for p in PROGRAMS if p.stem not in REFUSED]
MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": 30},
    "near": {"window": 20},
}
SCORES: dict[str, dict[str, Any]] = {
    "softcap": {"causal": True, "softcap": 5.0},
    "alibi": {"causal": True, "alibi": True},
    "sink": {"causal": True, "sink": True},
    "sink tokens": {"causal": True, "window": 20, "sink_tokens": 4},
    "all": {"causal": True, "softcap": 5.0, "alibi": True, "sink": True},
}
HEADS = {"mha": {"heads": 2}, "gqa": {"heads": 4, "kv_heads": 2}, "mqa": {"heads": 3}}


def settings() -> list[tuple[str, dict[str, Any]]]:
    """The variants with their options; the type of elements alternates."""
    made: list[tuple[str, dict[str, Any]]] = []
    for head_dim in (64, 96, 128, 256):
        wide = {"head_dim": head_dim}
        made += [(v, {**h, **wide, **m}) for v, h in HEADS.items() for m in MASKS.values()]
        made += [("gqa", {**HEADS["gqa"], **wide, **s}) for s in SCORES.values()]
    made += [("mla", {"heads": 2, **option}) for option in (*MASKS.values(), *SCORES.values())]
    small = {"heads": 4, "kv_heads": 2, "head_dim": 64}
    made += [(f"nsa-{branch}", small) for branch in ("compressed", "window")]
    return made


CASES = [
    make_spec(variant, **{**options, "dtype": ("bf16", "fp16")[number % 2]})
    for number, (variant, options) in enumerate(settings())
]


def words(spec: AttentionSpec) -> str:
    return f"{spec.variant} {spec.in_words}"


def derived(spec: AttentionSpec, gpu: str) -> Gradients:
    code = write_code(write_sketch(spec), spec, find(gpu)).code
    return backward(checked_program(parse(code)))


def translates(tree: Tree, gpu: str) -> None:
    """The backward pass gets sizes for a GPU, and every kernel of it translates."""
    card = find(gpu)
    _, sized = next(iter(tilings(tree, card)))
    for kernel in check(sized, card).kernels:
        translate(checked_program(parse(format_tree(kernel.tree)), card, part=True), card)


@pytest.mark.parametrize("spec", some(CASES, 5), ids=words)
def test_author(spec: AttentionSpec) -> None:
    made = derived(spec, "a100")
    assert made.notes == ()
    verdict = check(made.tree)
    assert verdict.diagnostics == ()
    wanted = spec.model_copy(update={"backward": True})
    cases = default_cases(wanted, [(21, 34), (70, 66), (34, 21)])
    found = judge(Kernels(verdict.kernels), wanted, cases=cases)
    assert found.ok, found.diagnostics


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_example(path: Any) -> None:
    made = backward(checked_program(parse(read(path))))
    assert {"dQ", "dK", "dV"} <= set(made.gradients)
    verdict = check(made.tree)
    assert verdict.diagnostics == ()
    spec = load(path.with_suffix(".toml")).model_copy(update={"backward": True})
    if not spec.reference:  # test_grad.py compares the others with fp64
        cases = default_cases(spec, [(21, 34), (70, 66)])
        found = judge(Kernels(verdict.kernels), spec, cases=cases)
        assert found.ok, found.diagnostics


SOME_WIDE = [("mla", {"heads": 2}), ("gqa", {**HEADS["gqa"], "head_dim": 256})]


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize(("variant", "options"), SOME_WIDE)
def test_wide_heads_fit(variant: str, options: dict[str, Any], gpu: str) -> None:
    spec = make_spec(variant, **{**options, "dtype": "fp16", "causal": True})
    card, wanted = find(gpu), spec.model_copy(update={"backward": True})
    tiling, sized = next(iter(tilings(derived(spec, gpu).tree, card)))
    assert tiling.apart == (gpu != "h200")
    found = judge(
        Kernels(check(sized, card).kernels), wanted, cases=default_cases(wanted, [(34, 40)])
    )
    assert found.ok, found.diagnostics


@pytest.mark.slow
@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_example_translates(path: Any, gpu: str) -> None:
    text = read(path).replace("as bf16", "as fp16")
    translates(backward(checked_program(parse(text))).tree, gpu)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "spec"), list(enumerate(CASES)), ids=[words(s) for s in CASES])
def test_author_translates(number: int, spec: AttentionSpec) -> None:
    """For one of the GPUs in turn."""
    taking = [gpu for gpu in GPUS if find(gpu).takes(spec.dtype)]
    gpu = taking[(number + number // 3) % len(taking)]
    translates(derived(spec, gpu).tree, gpu)
