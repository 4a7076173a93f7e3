"""The expected outputs of a problem, and how an output is compared with them.

A backward pass has the attention's outputs among its inputs, and gradients as outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import numpy as np

from flashwright.judge import gradient_noise, oracle
from flashwright.judge.gradient_noise import Gradient, delta_error
from flashwright.judge.gradients import gradients, names, stored_as
from flashwright.judge.inputs import random_tensor, weight_shown
from flashwright.judge.oracle import Array, Dims, Inputs
from flashwright.judge.reference import DELTA, NOISE
from flashwright.judge.reference_process import ReferenceProcess
from flashwright.sandbox.tensors import DTYPES
from flashwright.spec import AttentionSpec, BadSpec

FORWARD_OUTPUTS = ("O", "LSE")
"""The outputs of the attention that are inputs of its backward pass."""

VANISHING = 0.05
"""The noise of a gradient, relative to its RMS, from which on the gradient counts as 0."""


class Answer(dict[str, Array]):
    """The expected outputs of a problem in fp64 by name, and how they are compared."""

    def __init__(
        self,
        outputs: Inputs,
        noise: Inputs | None = None,
        limits: Mapping[str, Gradient] | None = None,
    ) -> None:
        super().__init__(outputs)
        self.noise = dict(noise or {})
        """The error of an output if each of its terms has an error of one roundoff."""
        self.limits = dict(limits or {})
        """The limits of a gradient, if they are known for each element."""

    def is_exact(self, name: str) -> bool:
        """Whether an output is large against its rounding errors, so that a ratio of two relative
        errors says something."""
        limits = self.limits.get(name)
        if limits is None:
            return True
        return bool(np.sum(limits.noise**2) < VANISHING**2 * np.sum(limits.value**2))

    @classmethod
    def of_attention(cls, found: Inputs) -> Answer:
        """What oracle.attention gives, with or without the noise of O."""
        outputs = {name: array for name, array in found.items() if name != oracle.NOISE}
        return cls(outputs, {"O": found[oracle.NOISE]} if oracle.NOISE in found else {})

    def arranged(self, name: str, arrange: Callable[[Array], Array]) -> Answer:
        """One output, with its axes in another order."""
        noise = {n: arrange(x) for n, x in self.noise.items() if n == name}
        limits = {n: x.arranged(arrange) for n, x in self.limits.items() if n == name}
        return Answer({name: arrange(self[name])}, noise, limits)


def placeholders(spec: AttentionSpec, inputs: Inputs) -> Answer:
    """Arrays with the shapes of the outputs that the spec knows, before their values are known."""
    rows = inputs["Q"].shape[:-1]
    shapes: dict[str, tuple[int, ...]] = {"O": (*rows, spec.value_dim), "LSE": rows}
    if spec.backward:
        shapes = {f"d{name}": inputs[name].shape for name in names(spec)}
    return Answer({n: np.broadcast_to(np.float64(0), shape) for n, shape in shapes.items()})


# --- a backward pass ----------------------------------------------------------------------------


def backward_inputs(
    spec: AttentionSpec, inputs: Inputs, answer: Inputs, seed: int
) -> dict[str, Array]:
    """The inputs of a backward pass: those of the attention, the gradient dO, and the attention's
    outputs in `answer` as a kernel stores them. Raises BadSpec if there is no O."""
    if "O" not in answer:
        raise BadSpec(f"{spec.reference}: a backward pass needs O: return O, or O and LSE")
    made = dict(inputs)
    if "dO" not in made:  # a reference draws inputs of its own
        rng = np.random.default_rng(seed)
        made["dO"] = random_tensor(answer["O"].shape, spec.output_dtype, rng)
    kept = (name for name in FORWARD_OUTPUTS if name in answer)
    return made | {name: answer[name].astype(DTYPES[stored_as(spec, name)]) for name in kept}


def expected_gradients(
    spec: AttentionSpec,
    inputs: Inputs,
    dims: Dims,
    reference: ReferenceProcess | None = None,
    lib: ModuleType = np,
    moved: Callable[[Array], Any] = lambda array: array,
) -> Answer:
    """The gradients for the inputs of a backward pass.

    They are those of the user's `reference`, if there is one. Else `lib` computes them (NumPy or
    PyTorch) from inputs that `moved` gives to it.
    """
    unit = oracle.ROUNDOFF[spec.dtype]
    if reference is None:
        limits = gradients(spec, {name: moved(x) for name, x in inputs.items()}, dims, lib)
        noise = {name: one.noise / unit for name, one in limits.items()}
        return Answer({name: one.value for name, one in limits.items()}, noise, limits)
    out, do = (inputs[name].astype(np.float64) for name in ("O", "dO"))
    forward = {name: x for name, x in inputs.items() if name not in FORWARD_OUTPUTS}
    found = reference.gradients({**forward, DELTA: delta_error(do, out, spec.dtype)}, dims)
    values = {name: x for name, x in found.items() if not name.startswith(NOISE)}
    noise = {n: found.get(f"{NOISE}{n[1:]}", np.zeros(x.shape)) / unit for n, x in values.items()}
    return Answer(values, noise)


# --- the comparison -----------------------------------------------------------------------------


def compare(
    spec: AttentionSpec,
    name: str,
    found: Array,
    expected: Answer,
    kind: str = "normal",
) -> oracle.Comparison:
    """Compare one output with the expected one, by the rule for its name and kind of inputs."""
    if spec.batch is not None and found.shape == expected[name].shape:
        return _compare_sequences(spec, name, found, expected, kind)
    if name == "LSE":
        return oracle.compare_lse(spec, found, expected[name])
    limits = expected.limits.get(name)
    if limits is not None and spec.tolerance is None:
        return gradient_noise.compare(found, limits)
    noise = expected.noise.get(name)
    result = oracle.compare(found, expected[name], spec.dtype, spec.tolerance, noise=noise)
    shows_weights = name == "O" and kind == "spectrum" and spec.tolerance is None
    if not shows_weights or noise is None or not result.ok:
        return result
    shown = weight_shown(spec.value_dim)
    return oracle.compare_weights(result, found, expected[name], noise, shown, spec.dtype)


def _compare_sequences(
    spec: AttentionSpec, name: str, found: Array, expected: Answer, kind: str
) -> oracle.Comparison:
    """The same for the rows of all sequences: those that none has must be as they were, NaN."""
    free = np.isnan(expected[name])
    stray = int((free & ~np.isnan(found)).sum())
    if stray:
        first = tuple(int(n) for n in np.argwhere(free & ~np.isnan(found))[0])
        text = f"{stray} elements that belong to no sequence are written, the first at {first}"
        return oracle.Comparison(False, text, found.size, bad=stray, stray=stray)
    known = Answer({name: np.where(free, 0.0, expected[name])})
    if name in expected.noise:
        known.noise[name] = np.where(free, 0.0, expected.noise[name])
    return compare(spec.each, name, np.where(free, 0, found), known, kind)


def variation(spec: AttentionSpec, name: str, one: Array, other: Array) -> tuple[float, float]:
    """How far two runs differ and how far they may, by the rule for that output."""
    if name == "LSE":
        tolerance = oracle.lse_fp8_tolerance(spec.head_dim) if spec.dtype == "fp8" else None
        return oracle.variation(one, other, "fp32", tolerance, floor=1.0)
    return oracle.variation(one, other, spec.dtype, spec.tolerance)
