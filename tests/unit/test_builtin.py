"""Every built-in program, for every GPU it fits, checks clean and is attention."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flashwright.author.builtin.author import Written, write_code, write_sketch
from flashwright.author.builtin.choose import NothingFits
from flashwright.author.builtin.needs import footprint
from flashwright.author.builtin.variants import VARIANTS, make_spec
from flashwright.check.budget import check_budget, use
from flashwright.check.check import check, checked_program
from flashwright.check.spaces import check_copies
from flashwright.gpu import GPUS, Gpu
from flashwright.judge.cpu import default_cases, judge
from flashwright.lang.nodes import Reshape, statements
from flashwright.lang.parse import parse
from flashwright.spec import AttentionSpec, BadSpec
from tests.share import some

WINDOW = 70  # small enough to matter at the lengths below
MASKS: tuple[dict[str, object], ...] = (
    {"causal": False},
    {"causal": True},
    {"causal": True, "window": WINDOW},
    {"causal": False, "window": WINDOW},
)
OPTIONS: tuple[dict[str, object], ...] = (
    {},
    {"softcap": 20.0},
    {"alibi": True},
    {"sink": True},
)
DTYPES = ("fp16", "bf16", "fp8")
LENGTHS = ((1, 1), (17, 17), (64, 64), (100, 100), (257, 257), (64, 257), (257, 100))
ODD = ((64, 257), (257, 100))


def head_dims(variant: str) -> tuple[int, ...]:
    return (192,) if variant == "mla" else (64, 96, 128, 256)


@cache
def specs(variant: str, head_dim: int, dtype: str) -> tuple[AttentionSpec, ...]:
    """All masks; each option on the causal one, at one head dim, as it does not touch the sizes."""
    wanted = [(mask, OPTIONS[0]) for mask in MASKS]
    if head_dim in (64, 192):
        wanted += [({"causal": True}, option) for option in OPTIONS[1:]]
    made = []
    for mask, option in wanted:
        try:
            made.append(make_spec(variant, head_dim=head_dim, dtype=dtype, **mask, **option))
        except BadSpec:
            continue  # e.g. a selected branch that is not causal
    return tuple(made)


@cache
def written(spec: AttentionSpec, gpu: Gpu) -> Written | None:
    try:
        return write_code(write_sketch(spec), spec, gpu)
    except NothingFits:
        return None


# Two cards for each way of multiplying and copying: the others differ in sizes and speeds.
USUAL = [GPUS[name] for name in ("t4", "rtx8000", "a100", "l40s", "h100", "h200")]


def programs(spec: AttentionSpec) -> Iterator[tuple[Gpu, str]]:
    for gpu in USUAL:
        made = written(spec, gpu) if gpu.takes(spec.input_dtype) else None
        if made is not None:
            yield gpu, made.code


def bare(code: str) -> str:
    """The program without its comments: what two GPUs may share."""
    return re.sub(r"\s*//.*", "", code)


# mla-decode has widths of its own, and keys in pages: test_mla.py.
WIDTHS = [(v, d) for v in VARIANTS if v != "mla-decode" for d in head_dims(v)]
EVERY = [(*width, dtype) for width in WIDTHS for dtype in DTYPES]
# On the CPU bf16 differs from fp16 in its rounding alone, an mqa from a gqa in its heads, and so
# does NSA's window.
CASES = [
    (variant, width, dtype)
    for number, (variant, width) in enumerate(WIDTHS)
    if variant not in ("mqa", "nsa-window") or width == 128
    for dtype in DTYPES
    if dtype != "bf16" or number % 4 == 0
]
# The others are among the slow tests.
FEW = [("mqa", 128, "fp8"), ("nsa-compressed", 256, "fp16")]


@pytest.mark.parametrize(
    ("variant", "head_dim", "dtype"),
    [c if c in FEW else pytest.param(*c, marks=pytest.mark.slow) for c in CASES],
)
def test_checks_clean_and_is_attention(variant: str, head_dim: int, dtype: str) -> None:
    """On all lengths for the first GPU; for those with other tiles on the least even ones."""
    clean: dict[str, object] = {}
    for spec in specs(variant, head_dim, dtype):
        lengths = LENGTHS
        for gpu, code in programs(spec):
            tree = parse(code)
            if bare(code) in clean:
                program = checked = clean[bare(code)]
                assert checked is not None
                found = [*check_budget(program, gpu), *check_copies(tree, gpu)]  # type: ignore[arg-type]
                assert not found, (spec, gpu.name, found)
                continue
            verdict = check(tree, gpu)
            assert not verdict.diagnostics, (spec, gpu.name, verdict.diagnostics)
            assert verdict.program is not None
            clean[bare(code)] = verdict.program
            result = judge(verdict.program, spec, cases=default_cases(spec, lengths))
            assert result.ok, (spec, gpu.name, result.diagnostics)
            assert {c.output for c in result.cases} == {"O", "LSE"}
            lengths = ODD
    assert clean


def test_without_the_log_sum_exp() -> None:
    spec = make_spec("gqa", causal=True, lse=False)
    made = written(spec, GPUS["a100"])
    assert made is not None
    program = checked_program(parse(made.code), GPUS["a100"])
    assert [t.name for t in program.outputs] == ["O"]
    assert judge(program, spec).ok


@pytest.mark.slow
def test_the_author_serves_every_gpu() -> None:
    """What the table of variants promises; the exceptions are the ones listed here."""
    too_small = set()
    for variant, head_dim, dtype in EVERY:
        for gpu in (*USUAL, GPUS["a6000"], GPUS["b200"], GPUS["rtx5090"]):
            spec = specs(variant, head_dim, dtype)[0]
            if gpu.takes(spec.input_dtype) and written(spec, gpu) is None:
                too_small.add((gpu.name, variant, head_dim, dtype))
    # 64 keys of 256 in one block of 64 KB leave no room for Q; bytes that Hopper's mma.sync has to
    # unpack leave none in registers for 64 keys beside O (it spills).
    assert too_small == {
        *((g, "nsa-selected", 256, "fp16") for g in ("t4", "rtx8000")),
        *((g, "nsa-selected", 256, "fp8") for g in ("h100", "h200")),
    }


def test_turing_has_no_bf16_and_ampere_no_fp8() -> None:
    for dtype, first in (("fp16", 75), ("bf16", 80), ("e4m3", 89)):
        assert all(gpu.takes(dtype) == (gpu.capability >= first) for gpu in GPUS.values())


@pytest.mark.parametrize("gpu", some(USUAL), ids=lambda gpu: gpu.name)
def test_the_cost_model_and_the_checker_agree_on_what_a_program_needs(gpu: Gpu) -> None:
    for variant in ("mha", "mla"):
        spec = make_spec(variant)
        made = written(spec, gpu)
        assert made is not None
        program = checked_program(parse(made.code), gpu)
        need = use(program, gpu)
        priced = footprint(made.decision.workload, made.decision.tiling, gpu)
        assert need.shared == priced.shared_bytes
        assert need.registers == priced.registers


def test_every_number_has_its_reason_beside_it() -> None:
    spec = make_spec("gqa", causal=True, softcap=30.0, window=512)
    made = written(spec, GPUS["h200"])
    assert made is not None
    lines = [line for line in made.code.splitlines() if line.startswith("param")]
    assert len(lines) == len(made.choices)
    for line, choice in zip(lines, made.choices, strict=True):
        assert line.startswith(f"param {choice.name} = {choice.value}")
        assert "// " in line
        assert choice.reason


def test_one_buffer_is_prefetched_and_several_are_not() -> None:
    ampere = written(make_spec("mha"), GPUS["a100"])
    hopper = written(make_spec("mha"), GPUS["h200"])
    assert ampere is not None
    assert hopper is not None
    assert "L = i + 1" in ampere.code
    assert "stages" not in ampere.code
    assert "L = i + 1" not in hopper.code
    assert hopper.code.count("with stages Stages") == 2


def test_the_sketch_is_a_sketch_and_the_code_is_its_completion() -> None:
    spec = make_spec("gqa", causal=True)
    sketch = parse(write_sketch(spec))
    assert sketch.level == "sketch"
    assert not check(sketch).diagnostics
    made = written(spec, GPUS["a100"])
    assert made is not None
    assert any(isinstance(s, Reshape) for s in statements(parse(made.code).body))


@settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_lengths_heads_and_options(data: st.DataObject) -> None:
    tried(data)


@pytest.mark.slow
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_many_lengths_heads_and_options(data: st.DataObject) -> None:
    tried(data)


def tried(data: st.DataObject) -> None:
    variant = data.draw(st.sampled_from(sorted(VARIANTS.keys() - {"mla-decode"})))  # test_mla.py
    head_dim = data.draw(st.sampled_from(head_dims(variant)))
    dtype = data.draw(st.sampled_from(DTYPES))
    spec = data.draw(st.sampled_from(specs(variant, head_dim, dtype)))
    gpu = data.draw(st.sampled_from([g for g in GPUS.values() if g.takes(spec.input_dtype)]))
    made = written(spec, gpu)
    if made is None:
        return
    lengths = (data.draw(st.integers(1, 300)), data.draw(st.integers(1, 300)))
    case = default_cases(spec, [lengths])[0]
    case["batch"] = data.draw(st.integers(1, 2))
    seed = data.draw(st.integers(0, 99))
    verdict = judge(checked_program(parse(made.code), gpu), spec, cases=[case], seed=seed)
    assert verdict.ok, verdict.diagnostics
