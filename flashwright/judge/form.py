"""How a candidate is called: its inputs in their order, and the outputs it is given to write to."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from flashwright.build import classes, steps
from flashwright.build.plan_rules import LAYOUTS, caller_order
from flashwright.judge import inputs as trial
from flashwright.judge.answer import FORWARD_OUTPUTS
from flashwright.judge.problems import Problem
from flashwright.judge.reference_process import ReferenceProcess
from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.lower.launch_plan import OPERATORS, LaunchPlan, PlanTensor, evaluate
from flashwright.sandbox.candidate import Candidate
from flashwright.sandbox.tensors import DTYPES, Array
from flashwright.spec import AttentionSpec

MOST_ELEMENTS = 1 << 36
"""The most elements that a tensor of a trial may have."""
Shapes = dict[str, tuple[tuple[int, ...], str]]


class Form(Protocol):
    """How a trial calls a candidate: the tensors and sizes that go in and come out."""

    @property
    def optional(self) -> bool:
        """Whether outputs after the first may be left out."""

    def inputs(self, problem: Problem, reference: ReferenceProcess | None) -> dict[str, Array]:
        """The inputs of a problem by name; of a backward pass, without the attention's outputs."""

    def taken(self, made: Mapping[str, Array]) -> dict[str, Array]:
        """The inputs that the candidate takes, in its order."""

    def outputs(self, problem: Problem, expected: Mapping[str, Array]) -> Shapes:
        """Shapes and types of the outputs that it writes or returns."""

    def dims(self, problem: Problem) -> dict[str, int]:
        """The sizes that it is given by name."""


def form_of(candidate: Candidate, spec: AttentionSpec, spread: float | None = None) -> Form:
    """The form of a candidate: a package's from its launch plan, any other's from the spec.

    `spread` is the spread of a package's scores, for a spec that does not give it.
    """
    if candidate.kind == "package":
        form = package_form(Path(candidate.where), spec, spread)
        for tensor in form.plan.tensors:
            if tensor.read and tensor.written:
                text = f"the kernel changes `{tensor.name}` in place, which is judged by emulation"
                raise Failed(Diagnostic("FW904", text, help="flashwright verify ... --on cpu"))
        return form
    if spec.backward:
        text = "the gradients of a function cannot be judged, only those of a kernel package"
        raise Failed(Diagnostic("FW904", text, help="leave `backward` out of the spec"))
    return SpecForm(spec)


def package_form(folder: Path, spec: AttentionSpec, spread: float | None = None) -> PackageForm:
    """The form of a kernel package. All outputs of a program with several kernels are needed, and
    what a kernel changes in place."""
    plan = classes.plan_of(folder)
    kept = any(t.read and t.written for t in plan.tensors)
    return PackageForm(spec, plan, steps.read(folder) is None and not kept, spread)


def bounds_of(candidate: Candidate) -> list[int]:
    """The numbers of keys at which a package changes from one kernel to another."""
    return classes.read(Path(candidate.where)).bounds if candidate.kind == "package" else []


@dataclass(frozen=True)
class SpecForm:
    """The form of a callable: it takes the spec's inputs and gives O, and LSE if asked."""

    spec: AttentionSpec
    optional: bool = False

    def inputs(self, problem: Problem, reference: ReferenceProcess | None) -> dict[str, Array]:
        """The inputs of the reference's `make_inputs` if it has one, else the spec's."""
        if reference is not None:
            made = reference.make_inputs(np.random.default_rng(problem.seed), problem.dims)
            if made is not None:
                return trial.narrowed(made, self.spec.input_dtype)
        return trial.make_inputs(self.spec, problem.dims, problem.seed, problem.kind)

    def taken(self, made: Mapping[str, Array]) -> dict[str, Array]:
        """All inputs, in the order they were made."""
        return dict(made)

    def outputs(self, problem: Problem, expected: Mapping[str, Array]) -> Shapes:
        """O in the spec's output type, and LSE in fp32 if the spec and the oracle have it."""
        found: Shapes = {"O": (expected["O"].shape, self.spec.output_dtype)}
        if self.spec.lse and "LSE" in expected:  # a user's reference may give none
            found["LSE"] = (expected["LSE"].shape, "fp32")
        return found

    def dims(self, problem: Problem) -> dict[str, int]:
        """No sizes: a callable reads them off its tensors."""
        return {}


@dataclass(frozen=True)
class PackageForm:
    """The form of a kernel package: its launch plan names the tensors and the dims."""

    spec: AttentionSpec
    plan: LaunchPlan
    optional: bool = True
    spread: float | None = None
    """The spread of the scores on normal inputs, if only the program shows it."""

    def inputs(self, problem: Problem, reference: ReferenceProcess | None) -> dict[str, Array]:
        """As SpecForm, and random tensors for further inputs of a plan with a reference."""
        made = None
        if reference is not None:
            made = reference.make_inputs(np.random.default_rng(problem.seed), problem.dims)
        if made is not None:
            made = trial.narrowed(made, self.spec.input_dtype)
        elif reference is None or reference.by_name:
            spread = self.spread if reference is None else self.spread or 1.0
            drawn = (problem.dims, problem.seed, problem.kind)
            made = trial.make_inputs(self.spec, *drawn, spread)
        made = made or {}
        known = (*FORWARD_OUTPUTS, "dO") if self.spec.backward else ()
        for number, tensor in enumerate(t for t in self.plan.tensors if t.read):
            if reference is not None and tensor.name not in (*made, *known):
                rng = np.random.default_rng([problem.seed, number])
                given = (self._shape(tensor, problem), tensor.dtype, rng, problem.kind)
                factor = trial.named_factor(tensor.name, tensor.dtype, self.spread)
                made[tensor.name] = trial.random_tensor(*given, factor)
        return made

    def taken(self, made: Mapping[str, Array]) -> dict[str, Array]:
        """The inputs that the plan reads, in its order and types. Raises Failed with FW904 if the
        spec does not have one."""
        read = [tensor for tensor in self.plan.tensors if tensor.read]
        for tensor in read:
            if tensor.name not in made:
                text = f"the spec has no input `{tensor.name}`, which the kernel reads"
                raise Failed(Diagnostic("FW904", text))
        return {t.name: made[t.name].astype(DTYPES[t.dtype]) for t in read}

    def outputs(self, problem: Problem, expected: Mapping[str, Array]) -> Shapes:
        """The outputs that the plan writes; Failed with FW904 if the spec knows none of them."""
        made: Shapes = {}
        for tensor in self.plan.tensors:
            if tensor.written:
                # The caller decides the size of a view's memory, and dims that only inputs show.
                own = tensor.flat or not _dims_of(tensor) <= problem.dims.keys()
                own = own and tensor.name in expected
                shape = expected[tensor.name].shape if own else self._shape(tensor, problem)
                made[tensor.name] = (tuple(shape), tensor.dtype)
        if not set(made) & set(expected):
            text = f"the kernel writes none of the outputs that the spec knows: {', '.join(made)}"
            raise Failed(Diagnostic("FW904", text))
        return made

    def dims(self, problem: Problem) -> dict[str, int]:
        """The dims of the plan that the problem has."""
        return {d: problem.dims[d] for d in self.plan.dims if d in problem.dims}

    def _shape(self, tensor: PlanTensor, problem: Problem) -> tuple[int, ...]:
        return planned_shape(tensor, problem.dims)


def _dims_of(tensor: PlanTensor) -> set[str]:
    """The dims that a tensor's sizes are made of."""
    tokens = {token for axis in tensor.axes for token in axis.size}
    return {token for token in tokens if isinstance(token, str) and token not in OPERATORS}


def planned_shape(tensor: PlanTensor, dims: Mapping[str, int]) -> tuple[int, ...]:
    """A tensor's shape in the caller's order of axes. Raises Failed with FW852 if it is invalid."""
    axes = [evaluate(axis.size, dims) for axis in tensor.axes]
    order = caller_order(tensor, LAYOUTS[0])
    shape = tuple(math.prod(axes[p] for p in parts) for parts in order)
    if min(axes, default=0) < 0 or math.prod(shape) > MOST_ELEMENTS:
        sizes = ", ".join(f"{name} {size}" for name, size in dims.items())
        text = f"launch.json: tensors.{tensor.name}: no tensor has the shape {shape} (with {sizes})"
        raise Failed(Diagnostic("FW852", text))
    return shape
