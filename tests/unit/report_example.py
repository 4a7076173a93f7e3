"""Made-up benchmarks and verdicts for the tests of the report: no figure here was ever measured."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from flashwright.author.builtin.variants import make_spec
from flashwright.files import sha256
from flashwright.measure.records import (
    OURS,
    AbsentRecord,
    KernelRecord,
    NumberRecord,
    RunRecord,
    _Record,
)
from flashwright.spec import AttentionSpec

GOLDEN = Path(__file__).parents[1] / "golden" / "gqa_causal_128_bf16_a100"
CARD = "Made-up GPU"
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
PEERS = {"torch flash": 1.0, "torch cuDNN": 1.6, "FlexAttention": 0.82, "naive torch": 0.16}
CEILING = 690.0
REJECTED = "mqa d64 full"
WHOLE = "mha d64 full"  # whose verdict has every case; the others have what a receipt keeps
FEW = (WHOLE, "gqa d64 causal", "gqa d128 causal", REJECTED)  # for a page that is there sooner
UNABLE = "FlexAttention"
RUN = "run-1"

KINDS = ("normal", "scaled", "shifted", "opposed", "peaked", "one_hot_v", "outliers")
CHECKS: tuple[tuple[str, str, bool | None, int, str], ...] = (
    ("repeat", "the same inputs give the same bits", True, 12, ""),
    ("poison", "nothing is left over from memory that was there", True, 12, ""),
    ("masked", "a key that is masked changes nothing", True, 24, ""),
    ("unmasked", "a key that is seen changes something", True, 24, ""),
    ("inputs", "the inputs are as they were", True, 48, ""),
    ("guards", "nothing is written beside the outputs", True, 48, ""),
    ("sanitize", "compute-sanitizer finds nothing", None, 0, "was not asked for (--sanitize)"),
)


def spec_of(variant: str, head_dim: int, causal: bool) -> AttentionSpec:
    heads = 2048 // head_dim
    kv_heads = {"gqa": heads // 4, "mqa": 1}.get(variant, heads)
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    return make_spec(variant, **sizes, causal=causal, dtype="bf16")


SPECS = {
    f"{variant} d{head_dim} {'causal' if causal else 'full'}": spec_of(variant, head_dim, causal)
    for variant in ("mha", "gqa", "mqa")
    for head_dim in (64, 128)
    for causal in (False, True)
}


def verdict(spec: AttentionSpec, **changes: Any) -> dict[str, Any]:
    """What Verdict.record() would say of a kernel that is right."""
    chance = random.Random(7)
    cases: list[dict[str, Any]] = []
    for number, kind in enumerate(KINDS):
        for q_len, kv_len in ((1, 1), (63, 63), (1000, 1000), (100, 257), (257, 100), (4097, 4097)):
            dims = {"batch": 1 + number % 3, "heads": 8, "kv_heads": 2}
            dims |= {"q_len": q_len, "kv_len": kv_len}
            base = 1.7e-3 * math.exp(chance.gauss(0, 0.2)) * (0.6 if kind == "peaked" else 1)
            found = 0.0 if q_len == 1 else base * chance.uniform(0.93, 1.15)
            common = {"dims": dims, "kind": kind, "ok": True, "reason": ""}
            cases.append(
                common
                | {"output": "O", "relative_rms": found, "relative_max": found * 9}
                | {"library_rms": base if q_len > 1 else 0.0}
            )
            error = 4e-8 * math.exp(chance.gauss(0, 0.3))
            cases.append(
                common
                | {"output": "LSE", "relative_rms": error, "relative_max": error * 3}
                | {"library_rms": None}
            )
    ratios = [c["relative_rms"] / c["library_rms"] for c in cases if c["library_rms"]]
    grid = [[4e-3 * math.exp(chance.gauss(i / 40, 0.35)) for _ in range(32)] for i in range(32)]
    return {
        "schema": 1,
        "ok": True,
        "candidate": "made/up",
        "device": CARD,
        "arch": "sm_90",
        "spec": spec.model_dump(mode="json"),
        "seed": 1234,
        "offences": [],
        "checks": [
            dict(zip(("name", "question", "passed", "tried", "note"), c, strict=True))
            for c in CHECKS
        ],
        "cases": cases,
        "library": "torch's flash backend",
        "unable": None,
        "worst": max(c["relative_rms"] for c in cases if c["output"] == "O"),
        "worst_ratio": max(ratios),
        "picture": {"dims": {"q_len": 4097, "kv_len": 4097}, "error": grid},
        "seconds": 31.2,
        "notes": ["these figures are made up"],
        **changes,
    }


def rejected(spec: AttentionSpec, name: str = "replay") -> dict[str, Any]:
    """A verdict that rejects."""
    message = "the outputs of two calls with different inputs are the same"
    return verdict(spec, ok=False, offences=[{"name": name, "code": "FW853", "message": message}])


def receipt(told: dict[str, Any]) -> dict[str, Any]:
    """A verdict as a kernel's record has it (measure/kernels.py): the spec stands beside it."""
    return {name: value for name, value in told.items() if name != "spec"}


def run_record(**changes: Any) -> RunRecord:
    told: dict[str, Any] = {
        "id": RUN,
        "started": "2000-01-01T00:00:00Z",
        "title": "table 1 (made up)",
        "card": CARD,
        "arch": "sm_90",
        "translated_for": "a100",
        "layout": "bshd",
        "contestants": (OURS, *PEERS),
        "cells": tuple(f"{name} {length}" for name in SPECS for length in LENGTHS),
        "environment": {"flashwright": "0.1.0", "torch": "0.0 (made up)", "driver": "000.00"},
        "clocks": {"sm MHz": 1980.0, "power W": 120.0},
        "matmul": {"bf16": CEILING},
        "copy_gbs": 4100.0,
        "settings": {"l2": "cold", "dtype": "bf16"},
        "seed": 99,
    }
    return RunRecord(**{**told, **changes})


def kernel_record(name: str, **changes: Any) -> KernelRecord:
    spec = SPECS[name]
    tl, source = (GOLDEN.with_suffix(s).read_text() for s in (".tl", ".cu"))
    told: dict[str, Any] = {
        "name": name,
        "spec": spec.model_dump(mode="json"),
        "gpu": "a100",
        "tl": tl,
        "source": source,
        "map": json.loads(GOLDEN.with_suffix(".map.json").read_text()),
        "reasoning": f"# {name}\n\n- Made up.\n\n| a | b |\n|---|---:|\n| 1 | 2 |\n",
        "hashes": {n: sha256(f"{name} {n}") for n in ("tl", "source", "cubin")},
        "ptxas": {"registers": 214, "spills": 0, "stack": 0, "shared": 163840, "threads": 256},
        "seconds": {"author": 0.03, "translate": 0.09, "nvcc": 5.2},
        "verdict": rejected(spec) if name == REJECTED else verdict(spec),
    }
    return KernelRecord(**{**told, **changes})


def number(cell: str, who: str, tflops: float, **changes: Any) -> NumberRecord:
    """A figure; its time follows from the rate by the paper's formula."""
    kernel, _, length = cell.rpartition(" ")
    spec, size = SPECS[kernel], int(length)
    batch = 16384 // size
    flops = 4 * size**2 * spec.head_dim * spec.heads * batch / (2 if spec.causal else 1)
    told: dict[str, Any] = {
        "run": RUN,
        "cell": cell,
        "kernel": kernel,
        "length": size,
        "batch": batch,
        "who": who,
        "seconds": flops / tflops / 1e12,
        "spread": 0.006,
        "samples": 40,
        "tflops": tflops,
        "share": tflops / CEILING,
        "checked": 3,
        "relative_rms": 1.9e-3,
        "seed": 5,
    }
    return NumberRecord(**{**told, **changes})


def records(names: Sequence[str] = tuple(SPECS)) -> Iterator[_Record]:
    """A run: 12 kernels or some of them, 6 lengths, 5 contestants; some absent, one rejected."""
    chance = random.Random(3)
    yield run_record(cells=tuple(f"{name} {length}" for name in names for length in LENGTHS))
    for name in names:
        spec = SPECS[name]
        whole = kernel_record(name)
        kept = whole.verdict if name in (WHOLE, REJECTED) else receipt(whole.verdict)
        yield whole.model_copy(update={"verdict": kept})
        for length in LENGTHS:
            cell = f"{name} {length}"
            full = 330 * (1 - 0.55 / (length / 256)) * (1.12 if spec.head_dim == 128 else 0.95)
            full *= 1 - 0.45 * (spec.causal / (1 + length / 2048))
            for who, factor in {OURS: 1.04, **PEERS}.items():
                if who == OURS and name == REJECTED:
                    told = "the judge rejects it"
                    yield AbsentRecord(run=RUN, cell=cell, who=who, why=told, offence="replay")
                elif who == UNABLE and spec.kv_heads == 1:
                    why = "it takes no single kv head (made up)"
                    yield AbsentRecord(run=RUN, cell=cell, who=who, why=why)
                elif who == "naive torch" and length == 16384:
                    yield AbsentRecord(run=RUN, cell=cell, who=who, why="out of memory")
                else:
                    rate = full * factor * chance.uniform(0.97, 1.03)
                    spread = 0.05 if length == 512 else chance.uniform(0.002, 0.012)
                    yield number(cell, who, rate, spread=spread)


def write_records(path: Path, lines: Iterator[_Record] | list[_Record] | None = None) -> Path:
    """The records as the file that a benchmark leaves."""
    every = records() if lines is None else lines
    path.write_text("".join(f"{one.model_dump_json()}\n" for one in every))
    return path


def write_package(folder: Path, gpu_run: dict[str, Any] | None = None, **changes: Any) -> Path:
    """A folder as `generate` leaves it, with files of a golden translation."""
    folder.mkdir(parents=True, exist_ok=True)
    spec = SPECS["gqa d128 causal"]
    files = {
        "code.tl": GOLDEN.with_suffix(".tl").read_text(),
        "kernel.cu": GOLDEN.with_suffix(".cu").read_text(),
        "kernel.map.json": GOLDEN.with_suffix(".map.json").read_text(),
        "reasoning.md": "# gqa\n\nBecause.\n",
        "launch.json": json.dumps({"threads": 256, "shared": 163840}),
    }
    for name, text in files.items():
        (folder / name).write_text(text)
    build = {"gpu": "a100", "registers": 214, "spill_stores": 0, "spill_loads": 0, "seconds": 5.2}
    (folder / "build.json").write_text(json.dumps(build))
    lacks = [] if gpu_run else ["not run on a GPU"]
    result = {
        "schema": 1,
        "ok": gpu_run is None or gpu_run["ok"],
        "spec": spec.model_dump(mode="json"),
        "gpu": "a100",
        "stages": [{"stage": "check", "status": "ok", "seconds": 0.27}],
        "findings": [],
        "cpu": [],
        "gpu_run": gpu_run,
        "artefacts": {name: sha256(text) for name, text in files.items()},
        "claimed": ["the TL code passes the checker and fits the GPU's budgets"],
        "not_claimed": [*lacks, "not measured: every speed is an estimate"],
        **changes,
    }
    (folder / "result.json").write_text(json.dumps(result))
    return folder
