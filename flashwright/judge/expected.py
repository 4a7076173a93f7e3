"""The expected outputs of a problem in fp64, and the error of a library beside them.

All of this happens in the judge's process. A candidate never holds an expected value.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from flashwright.judge import flash, oracle, oracle_device
from flashwright.judge.inputs import weight_shown
from flashwright.judge.reference_process import ReferenceProcess
from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.sandbox.tensors import Array, dtype_name, to_torch
from flashwright.spec import AttentionSpec, BadSpec


class Expected:
    """The oracle, on the GPU if the judge uses one."""

    def __init__(self, spec: AttentionSpec, device: str, base: Path | None = None) -> None:
        if spec.backward:
            text = "the gradients of a kernel package cannot be judged yet"
            hint = "flashwright run judges the gradients of a TL program on the CPU"
            raise Failed(Diagnostic("FW904", text, help=hint))
        self.spec, self.device = spec, device
        self.reference: ReferenceProcess | None = None
        if spec.reference:
            try:
                self.reference = ReferenceProcess((base or Path()) / spec.reference)
            except BadSpec as error:
                raise Failed(*(Diagnostic("FW903", line) for line in error.lines)) from None
        self._tensors: dict[str, Any] = {}
        self._exact: Any = None

    @property
    def unable(self) -> str | None:
        """Why no library's error is measured; None if one is."""
        return "there is no library on the CPU" if self.device == "cpu" else flash.unable(self.spec)

    def outputs(self, inputs: Mapping[str, Array], dims: Mapping[str, int]) -> dict[str, Array]:
        """The expected outputs by name, in fp64. Raises Failed if the user's reference fails."""
        if self.reference is not None:
            try:
                return dict(self.reference(inputs, dims))
            except BadSpec as error:  # the user's own reference cannot be used
                raise Failed(*(Diagnostic("FW903", line) for line in error.lines)) from None
        if self.device == "cpu":
            return dict(oracle.attention(self.spec, inputs, dims, noise=True))
        import torch

        self._tensors = {n: to_torch(x, dtype_name(x.dtype)) for n, x in inputs.items()}
        answer = oracle_device.attention(torch, self.spec, self._tensors, dims, noise=True)
        self._exact = answer["O"]
        return {name: value.cpu().numpy() for name, value in answer.items()}

    def library_error(self, dims: Mapping[str, int]) -> float | None:
        """The library's error on the inputs of the last `outputs` call; None without a library."""
        if self._exact is None or not self._exact.numel() or self.unable is not None:
            return None
        return flash.error(self.spec, self._tensors, dims, self._exact)


def compare(
    spec: AttentionSpec,
    name: str,
    found: Array,
    expected: Mapping[str, Array],
    kind: str = "normal",
) -> oracle.Comparison:
    """Compare one output with the expected one, by the rule for its name and kind of inputs."""
    if name == "LSE":
        return oracle.compare_lse(spec, found, expected[name])
    noise = expected.get(oracle.NOISE) if name == "O" else None
    result = oracle.compare(found, expected[name], spec.dtype, spec.tolerance, noise=noise)
    if kind != "spectrum" or noise is None or not result.ok or spec.tolerance is not None:
        return result
    shown = weight_shown(spec.value_dim)
    return oracle.compare_weights(result, found, expected[name], noise, shown, spec.dtype)


def variation(spec: AttentionSpec, name: str, one: Array, other: Array) -> tuple[float, float]:
    """How far two runs differ and how far they may, by the rule for that output."""
    if name == "LSE":
        tolerance = oracle.lse_fp8_tolerance(spec.head_dim) if spec.dtype == "fp8" else None
        return oracle.variation(one, other, "fp32", tolerance, floor=1.0)
    return oracle.variation(one, other, spec.dtype, spec.tolerance)


def error_map(found: Array, expected: Array, rows: int = 24, columns: int = 16) -> Array:
    """The greatest error over batches and heads in a grid of (query, dim), relative to the RMS."""
    rms = float(np.sqrt(np.mean(expected**2))) or 1.0
    error: Array = np.abs(found.astype(np.float64) - expected).max(axis=(0, 1)) / rms
    for axis, most in enumerate((rows, columns)):
        size = error.shape[axis]
        starts = np.unique(np.linspace(0, size, min(most, size), endpoint=False).astype(int))
        error = np.maximum.reduceat(error, starts, axis=axis)
    return error
