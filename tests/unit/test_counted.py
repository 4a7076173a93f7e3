"""counted.json says what the kernels do: a few of them are counted again."""

from __future__ import annotations

import json
from functools import cache

import pytest

from flashwright import gpu as gpus
from flashwright.author.builtin import cost, counted
from flashwright.author.builtin.author import workload
from flashwright.author.builtin.needs import ELEMENT_BYTES, Tiling, Workload
from flashwright.emulate.profile import operations
from flashwright.gpu import GPUS, Gpu
from tests.counting.count import FILE, MASKS, OPTIONS, overhead
from tests.counting.step import Sample, Step, built, one_mask, one_step
from tests.unit.emulated import needs_compilers
from tests.unit.together import Kernel

AGAIN = "if this is meant, run `python -m tests.counting.count` and read the difference"
# Tilings that the figures were not made from, too.
PLAIN = Sample("a100", "bf16", 64, Tiling(128, 48, 1, 4))
CAPPED = Sample("a100", "fp16", 128, Tiling(128, 48, 1, 4), {**OPTIONS["softcap"], "causal": True})
BIASED = Sample("a100", "fp16", 64, Tiling(64, 64, 1, 2), OPTIONS["alibi"])
SAMPLES = (PLAIN, CAPPED, BIASED)


@cache
def made() -> dict[str, tuple[Kernel, Step]]:
    return {_name(s): (kernel, one_step(s, kernel)) for s, kernel in built(SAMPLES)}


def _name(sample: Sample) -> str:
    return " ".join(sample.options) or "plain"


def lanes(sample: Sample) -> counted.Work:
    """What each lane should do in a step."""
    w = workload(sample.spec)
    score = counted.score(gpus.find(sample.gpu).capability, w.dtype, w.options)
    each = ((sample.scores, score), (sample.outputs, counted.element()))
    parts = [*each, (sample.rows, counted.row())]
    return counted.Work(sum(n * p.plain for n, p in parts), sum(n * p.special for n, p in parts))


@needs_compilers
@pytest.mark.parametrize("sample", SAMPLES, ids=_name)
@pytest.mark.slow
def test_a_step_is_what_the_file_says(sample: Sample) -> None:
    step = made()[_name(sample)][1]
    told = lanes(sample)
    assert step.instructions["special"] == pytest.approx(told.special), AGAIN
    here = sum(step.instructions[n] for n in ("arithmetic", "conversion", "exchange"))
    besides = counted.overhead(cp_async=True, element_bytes=2)
    warp = besides.step + besides.copy * sample.copies
    # Of addresses some kernels need a fifth more or less, and an index belongs to them as well.
    assert here + overhead(step) == pytest.approx(told.plain + warp, rel=0.06), AGAIN
    if not sample.spec.alibi:
        assert here == pytest.approx(told.plain, rel=0.01), AGAIN


@needs_compilers
@pytest.mark.parametrize("sample", SAMPLES, ids=_name)
@pytest.mark.slow
def test_bytes_and_products_are_those_of_the_model(sample: Sample) -> None:
    kernel, step = made()[_name(sample)]
    w, card = workload(sample.spec), gpus.find(sample.gpu)
    moved = step.bytes["shared_read"] + step.bytes["shared_written"]
    assert moved == cost.shared_cycles(w, sample.tiling, card) * cost.SHARED_BYTES_PER_CLOCK
    assert step.wavefronts == step.ideal == step.bytes["shared_read"] / 128
    tile = cost.load_cycles(w, sample.tiling, card) * cost.l2_bytes_per_clock(card)
    assert step.bytes["global_read"] == pytest.approx(tile, rel=0.02)  # a slope for each lane
    each = next(filter(None, map(operations, kernel.program.source)))
    flops = cost.mma_cycles(w, sample.tiling, card) * card.flops_per_clock(w.dtype)
    assert step.instructions["mma"] * sample.tiling.warps * each == pytest.approx(flops)


@needs_compilers
@pytest.mark.parametrize("sample", [PLAIN, CAPPED], ids=_name)
@pytest.mark.slow
def test_a_mask_is_what_the_file_says(sample: Sample) -> None:
    more = overhead(one_mask(sample, made()[_name(sample)][0]))
    told = counted.mask("causal" if sample.spec.causal else "ragged")
    assert more == pytest.approx(told * sample.scores, rel=0.1), AGAIN


@pytest.mark.parametrize("gpu", GPUS.values(), ids=list(GPUS))
def test_there_are_figures_for_all_that_is_written(gpu: Gpu) -> None:
    for dtype in gpu.mma:
        for options in ((), *((name,) for name in OPTIONS), tuple(OPTIONS)):
            work = counted.score(gpu.capability, dtype, options)
            assert 3 < work.plain < 14
            assert work.special in (1, 2.5)
        each = counted.overhead(gpu.cp_async, ELEMENT_BYTES[dtype])
        assert each.step > 0 < each.copy
    assert all(counted.mask(name) > 1 for name in MASKS)


def test_the_model_lives_on_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every figure of the file moves the estimate of a tiling that needs it."""
    w = Workload(64, 64, causal=True, options=tuple(OPTIONS))
    tiling, card = Tiling(128, 64, 1, 4), gpus.find("a100")

    def estimate(data: object) -> float:
        for function in (counted.score, counted.element, counted.row, counted.mask):
            function.cache_clear()
        counted.overhead.cache_clear()
        monkeypatch.setattr(counted, "_data", lambda: data)
        return cost.estimate(w, tiling, card).microseconds

    text = FILE.read_text("utf-8")
    usual = estimate(json.loads(text))
    for path in (
        ("score", "sm_80", "fp16", "arithmetic"),
        ("element of O", "arithmetic"),
        ("row of a lane", "arithmetic"),
        ("option, each score", "softcap", "arithmetic"),
        ("option, each score", "alibi", "integer"),
        ("mask, each score of its step", "causal", "integer"),
        ("warp", "cp.async", "2", "step"),
        ("warp", "cp.async", "2", "copy"),
    ):
        data = inner = json.loads(text)
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] *= 2
        assert estimate(data) > usual, path
    estimate(json.loads(text))  # leaves the right figures in the caches
