"""Counts what the cost model needs to know and writes it: `python -m tests.counting.count`.

A spread of the built-in author's kernels is emulated (about a minute and a half). What a lane does
in a step is so much for each score, each element of O and each row that it holds, exactly; what a
warp does besides (addresses, copies, barriers) is nearly so much and something for each copy.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flashwright import gpu as gpus
from flashwright.author.builtin import cost
from flashwright.author.builtin.author import workload
from flashwright.author.builtin.needs import Tiling
from tests.counting.step import OVERHEAD, Sample, Step, built, one_mask, one_step

FILE = Path(cost.__file__).with_name("counted.json")
LANE = ("arithmetic", "special", "conversion", "exchange")
"""The classes that follow from scores, elements of O and rows alone."""

_D64 = (Tiling(128, 112, 1, 4), Tiling(128, 64, 1, 4), Tiling(64, 64, 1, 4), Tiling(64, 128, 1, 4))
_D128 = (Tiling(128, 48, 1, 4), Tiling(128, 32, 1, 4), Tiling(64, 64, 1, 4), Tiling(128, 64, 1, 8))
_T64 = (Tiling(128, 64, 1, 8), Tiling(64, 64, 1, 4), Tiling(128, 112, 1, 8))
_T128 = (Tiling(128, 64, 1, 8), Tiling(64, 32, 1, 4), Tiling(64, 64, 1, 4))
_F64 = (Tiling(128, 64, 1, 4), Tiling(128, 96, 1, 4), Tiling(64, 128, 1, 4))
_F128 = (Tiling(128, 32, 1, 4), Tiling(128, 64, 1, 8), Tiling(64, 64, 1, 4))
SHAPES = (
    *(("a100", "fp16", 64, t) for t in _D64),
    *(("a100", "fp16", 128, t) for t in _D128),
    *(("a100", "bf16", 64, t) for t in _D64[:2]),
    *(("a100", "bf16", 128, t) for t in _D128[:2]),
    *(("l40s", "fp16", 64, t) for t in _D64[1:3]),
    *(("l40s", "fp16", 128, t) for t in _D128[1:3]),
    *(("l40s", "fp8", 64, t) for t in _F64),
    *(("l40s", "fp8", 128, t) for t in _F128),
    *(("t4", "fp16", 64, t) for t in _T64),
    *(("t4", "fp16", 128, t) for t in _T128),
)
PLAIN = tuple(Sample(*shape) for shape in SHAPES)
OPTIONS: dict[str, dict[str, Any]] = {"softcap": {"softcap": 30.0}, "alibi": {"alibi": True}}
MASKS: dict[str, dict[str, Any]] = {
    "ragged": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": 1024},
}
OPTED = tuple(
    Sample(*shape, options)
    for shape in (("a100", "fp16", 64, _D64[1]), ("a100", "fp16", 128, _D128[1]))
    for options in (*OPTIONS.values(), *MASKS.values())
    if options
)

Steps = Sequence[tuple[Sample, Step]]


def main() -> None:
    """Count all, and write the file."""
    made = list(built((*PLAIN, *OPTED)))
    steps = [(sample, one_step(sample, kernel)) for sample, kernel in made]
    masks = [(sample, one_mask(sample, kernel)) for sample, kernel in made]
    FILE.write_text(json.dumps(told(steps, masks), indent=2) + "\n", "utf-8")
    for sample, step in steps:
        print(_line(sample, step))


def told(steps: Steps, masks: Steps) -> dict[str, Any]:
    """The figures, as the file has them."""
    plain = [(sample, step) for sample, step in steps if not sample.options]
    lanes = {name: _by_lane(plain, name) for name in LANE}
    kinds = list(dict.fromkeys(_kind(sample) for sample, _ in plain))
    copied = list(dict.fromkeys(_copied(sample) for sample, _ in plain))
    return {
        "made by": "python -m tests.counting.count",
        "what": "PTX instructions of one step under emulation, without those that ptxas folds away",
        "kernels": len(steps),
        "score": _nested({k: _some({n: lanes[n][k] for n in LANE}) for k in kinds}),
        "element of O": _some({n: lanes[n]["outputs"] for n in LANE}),
        "row of a lane": _some({n: lanes[n]["rows"] for n in LANE}),
        "option, each score": {name: _added(steps, OPTIONS[name]) for name in OPTIONS},
        "mask, each score of its step": {name: _masked(masks, MASKS[name]) for name in MASKS},
        "warp": _nested({k: _by_warp([p for p in plain if _copied(p[0]) == k]) for k in copied}),
    }


def _kind(sample: Sample) -> tuple[str, str]:
    return gpus.find(sample.gpu).arch, sample.spec.input_dtype


def _copied(sample: Sample) -> tuple[str, str]:
    """The way of K and V into shared memory, and their bytes: addresses depend on nothing else."""
    way = "cp.async" if gpus.find(sample.gpu).cp_async else "registers"
    return way, str(workload(sample.spec).element_bytes)


def _by_lane(steps: Steps, name: str) -> dict[Any, float]:
    """A class of instructions as a sum over what a lane holds; scores apart for each type."""
    columns = [*dict.fromkeys(_kind(sample) for sample, _ in steps), "outputs", "rows"]
    table = np.zeros((len(steps), len(columns)))
    for line, (sample, _) in zip(table, steps, strict=True):
        line[columns.index(_kind(sample))] = sample.scores
        line[-2:] = sample.outputs, sample.rows
    counted = np.array([step.instructions[name] for _, step in steps])
    fitted = np.linalg.lstsq(table, counted, rcond=None)[0]
    assert np.allclose(table @ fitted, counted), f"{name} is no such sum"
    return {column: round(float(v), 3) for column, v in zip(columns, fitted, strict=True)}


def _by_warp(steps: Steps) -> dict[str, float]:
    """What a warp issues besides in each step, and for each copy of 16 bytes a lane."""
    table = np.array([[1.0, sample.copies] for sample, _ in steps])
    counted = np.array([overhead(step) for _, step in steps])
    fitted = np.linalg.lstsq(table, counted, rcond=None)[0]
    off = np.abs(table @ fitted / counted - 1).max()
    figures = {"step": fitted[0], "copy": fitted[1], "off by at most": off}
    return {name: round(float(figure), 2) for name, figure in figures.items()}


def overhead(step: Step) -> float:
    """Instructions of a warp that belong to no score."""
    return sum(step.instructions[name] for name in OVERHEAD)


def _added(steps: Steps, options: Mapping[str, Any]) -> dict[str, float]:
    """What an option adds to each score: of all classes, as it may need an index too."""
    plain = {_shape(sample): step for sample, step in steps if not sample.options}
    mine = [(sample, step) for sample, step in steps if sample.options == options]
    scores = sum(sample.scores for sample, _ in mine)
    more = {
        name: sum(s.instructions[name] - plain[_shape(x)].instructions[name] for x, s in mine)
        for name in (*LANE, "integer")
    }
    return _some({name: round(float(n / scores), 2) for name, n in more.items()})


def _masked(masks: Steps, options: Mapping[str, Any]) -> dict[str, float]:
    mine = [(s, m) for s, m in masks if s.options == options and s.gpu == "a100"]
    scores = sum(sample.scores for sample, _ in mine)
    return {"integer": round(float(sum(overhead(m) for _, m in mine) / scores), 2)}


def _shape(sample: Sample) -> tuple[Any, ...]:
    return sample.gpu, sample.dtype, sample.head_dim, sample.tiling


def _some(figures: Mapping[str, float]) -> dict[str, float]:
    return {name: figure for name, figure in figures.items() if abs(figure) > 1e-6}


def _nested(figures: Mapping[tuple[str, str], Any]) -> dict[str, dict[str, Any]]:
    archs = sorted({arch for arch, _ in figures})
    return {a: {dtype: v for (arch, dtype), v in figures.items() if arch == a} for a in archs}


def _line(sample: Sample, step: Step) -> str:
    options = " ".join(sample.options) or "plain"
    counts = ", ".join(f"{n:.0f} {name}" for name, n in sorted(step.instructions.items()) if n)
    moved = ", ".join(f"{n:.0f} {name}" for name, n in step.bytes.items() if n)
    return (
        f"{sample.gpu} {sample.dtype} d{sample.head_dim} {options}, {sample.tiling}: a warp "
        f"{counts}; a block {step.wavefronts:.0f} wavefronts ({step.ideal:.0f} would do), {moved}"
    )


if __name__ == "__main__":
    main()
