"""The same kernels on the GPU and under emulation: the same answers, up to rounding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flashwright.author.builtin.variants import make_spec
from flashwright.emulate.emulate import prepare, run
from flashwright.judge.form import PackageForm
from flashwright.judge.oracle import ROUNDOFF
from flashwright.judge.problems import problems
from flashwright.sandbox.tensors import DTYPES, dtype_name, to_torch
from tests.gpu.made import code_of, made_of

LENGTHS = ((1, 1), (70, 133), (150, 90), (300, 300))
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("a100", "gqa", {"head_dim": 128, "dtype": "bf16", "causal": True}),
    ("a100", "mha", {"head_dim": 64, "dtype": "fp16", "softcap": 30.0}),
    ("h200", "gqa", {"head_dim": 128, "dtype": "bf16", "causal": True}),
    ("h200", "mha", {"head_dim": 64, "dtype": "fp16", "causal": True}),
    ("h200", "mla", {"dtype": "bf16", "causal": True}),
    ("a100", "mla", {"dtype": "bf16", "causal": True}),
    ("a100", "mqa", {"head_dim": 256, "dtype": "fp16", "alibi": True}),
    ("t4", "gqa", {"head_dim": 128, "dtype": "fp16", "causal": True}),
    ("t4", "mha", {"head_dim": 64, "dtype": "fp16", "window": 70}),
    ("l40s", "gqa", {"head_dim": 64, "dtype": "fp8", "causal": True}),
    ("l40s", "mha", {"head_dim": 128, "dtype": "fp8"}),
    ("l40s", "mha", {"head_dim": 96, "dtype": "bf16", "sink": True}),
]


@pytest.mark.parametrize(("gpu", "variant", "settings"), CASES, ids=str)
def test_the_gpu_says_the_same(gpu: str, variant: str, settings: dict[str, Any]) -> None:
    """MMA units add in another order and with other roundings: less than one rounding of O."""
    spec = make_spec(variant, **settings)
    kernel, ptx = made_of(code_of(spec, gpu), gpu)
    program, form = prepare(ptx, kernel.plan.entry), PackageForm(spec, kernel.plan)
    for problem in problems(spec, 1, "cpu", LENGTHS):
        given = form.taken(form.inputs(problem, None))
        tensors = {n: to_torch(a, dtype_name(a.dtype)) for n, a in given.items()}
        found = kernel(**tensors, **form.dims(problem)).float().cpu().numpy()
        output = next(t for t in kernel.plan.tensors if t.name == "O")
        emulated = np.full(found.shape, np.nan, np.float32).astype(DTYPES[output.dtype])
        arrays = {n: np.ascontiguousarray(a) for n, a in given.items()} | {"O": emulated}
        assert not run(program, kernel.plan, arrays, problem.dims).findings
        other = emulated.astype(np.float32)
        rms = float(np.sqrt(np.mean(found.astype(np.float64) ** 2)))
        difference = float(np.sqrt(np.mean((found - other).astype(np.float64) ** 2)))
        assert difference <= ROUNDOFF[spec.dtype] * rms
