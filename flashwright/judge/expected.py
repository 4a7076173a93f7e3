"""The expected outputs of a problem in fp64, and the error of a library beside them.

All of this happens in the judge's process. A candidate never holds an expected value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from flashwright.judge import flash, oracle, oracle_device, sequences
from flashwright.judge.answer import Answer, backward_inputs, expected_gradients
from flashwright.judge.reference_process import ReferenceProcess
from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.sandbox.tensors import Array, dtype_name, to_torch
from flashwright.spec import AttentionSpec, BadSpec


class Expected:
    """The oracle, on the GPU if the judge uses one."""

    def __init__(self, spec: AttentionSpec, device: str, base: Path | None = None) -> None:
        self.spec, self.device = spec, device
        self.reference: ReferenceProcess | None = None
        if spec.reference:
            with _reporting_reference():
                self.reference = ReferenceProcess((base or Path()) / spec.reference)
        self._tensors: dict[str, Any] = {}

    @property
    def unable(self) -> str | None:
        """Why no library's error is measured; None if one is."""
        return "there is no library on the CPU" if self.device == "cpu" else flash.unable(self.spec)

    def inputs(
        self, made: Mapping[str, Array], dims: Mapping[str, int], seed: int
    ) -> dict[str, Array]:
        """What a candidate gets for inputs of the attention: these, and for a backward pass dO and
        the attention's outputs. Raises Failed if the user's reference fails."""
        if not self.spec.backward:
            return dict(made)
        with _reporting_reference():
            return backward_inputs(self.spec, made, self._attention(made, dims), seed)

    def outputs(self, inputs: Mapping[str, Array], dims: Mapping[str, int]) -> Answer:
        """The expected outputs, for what `inputs` gives. Raises Failed if the user's reference
        fails."""
        with _reporting_reference():
            if self.spec.backward:
                given = (self.spec, inputs, dims, self.reference)
                return expected_gradients(*given, *self._library)
            return Answer.of_attention(self._attention(inputs, dims))

    def _attention(self, inputs: Mapping[str, Array], dims: Mapping[str, int]) -> dict[str, Array]:
        if self.reference is not None:
            return dict(self.reference(inputs, dims))
        if self.device == "cpu":
            return dict(oracle.attention(self.spec, inputs, dims, noise=True))
        if self.spec.batch is not None:
            return sequences.attention(self.spec, inputs, lambda one: self._on_device(one, {}))
        return self._on_device(inputs, dims)

    def _on_device(self, inputs: Mapping[str, Array], dims: Mapping[str, int]) -> dict[str, Array]:
        """The attention of a rectangular batch, on the judge's GPU."""
        lib, moved = self._library
        self._tensors = {n: moved(x) for n, x in inputs.items()}
        answer = oracle_device.attention(lib, self.spec.each, self._tensors, dims, noise=True)
        return {name: value.cpu().numpy() for name, value in answer.items()}

    @property
    def _library(self) -> tuple[ModuleType, Callable[[Array], Any]]:
        """What computes the gradients, and how an array becomes one of its tensors."""
        if self.device == "cpu":
            return np, lambda array: array
        import torch

        return torch, lambda array: to_torch(array, dtype_name(array.dtype))

    def library_errors(self, answer: Answer, dims: Mapping[str, int]) -> dict[str, float | None]:
        """The library's error of each output on the inputs of the last call, for its `answer`; none
        without a library."""
        if not self._tensors or self.unable is not None or not all(x.size for x in answer.values()):
            return {}
        return flash.errors(self.spec, self._tensors, dims, answer)


@contextmanager
def _reporting_reference() -> Iterator[None]:
    """Raises Failed with FW903 if the user's own reference cannot be used."""
    try:
        yield
    except BadSpec as error:
        raise Failed(*(Diagnostic("FW903", line) for line in error.lines)) from None


def error_map(found: Array, expected: Array, rows: int = 24, columns: int = 16) -> Array:
    """The greatest error over batches and heads in a grid of (query, dim), relative to the RMS."""
    rms = float(np.sqrt(np.mean(expected**2))) or 1.0
    error: Array = np.abs(found.astype(np.float64) - expected).max(axis=(0, 1)) / rms
    for axis, most in enumerate((rows, columns)):
        size = error.shape[axis]
        starts = np.unique(np.linspace(0, size, min(most, size), endpoint=False).astype(int))
        error = np.maximum.reduceat(error, starts, axis=axis)
    return error
