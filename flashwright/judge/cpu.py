"""The verdict on a TL program: the interpreter runs it on the CPU, fp64 attention is the truth."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashwright.judge import inputs as trial
from flashwright.judge import oracle, sequences
from flashwright.judge.answer import Answer, backward_inputs, compare, expected_gradients
from flashwright.judge.coverage import (
    BOUNDED,
    LENGTHS,
    MANY,
    Budget,
    Coverage,
    cover,
    tokens_of,
)
from flashwright.judge.localise import blame_kernel, localise
from flashwright.judge.reference_process import ReferenceProcess
from flashwright.judge.sequences import sized
from flashwright.judge.tiling import Served, joined, spread_in, tiling_of
from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.program.kernels import Kernels
from flashwright.program.program import Program, Tensor
from flashwright.semantics.interpret import axis_sizes, interpret_all, shape_of
from flashwright.spec import AttentionSpec

Array = NDArray[Any]
Progress = Callable[[int, int, str], None]

BUDGET = Budget(500_000, 1_500_000, "too long for a run on the CPU")
_SHOWN = 12  # sequences whose lengths are told
LOW = (33, 33)
"""The lengths of one more problem, whose scores are all far below 0. A running maximum that starts
at 0 instead of -inf loses all weights there. (With a sink, the maximum starts at the sink, and a
row whose weight is all the sink's has nothing to compare.)"""
SMALL = (24, 24)
"""The lengths of the problem that measures the spread of the scores."""

# The caller's order of a tensor's axes; a head's group members are part of the head axis.
_CALLER_ORDER = "BHGLD"


@dataclass(frozen=True)
class CaseResult:
    """The comparison of one output of one problem."""

    dims: Mapping[str, int]
    output: str
    comparison: oracle.Comparison


@dataclass(frozen=True)
class CpuVerdict:
    """Whether a program computes its spec's attention, from runs of the interpreter."""

    cases: tuple[CaseResult, ...]
    diagnostics: tuple[Diagnostic, ...] = ()
    unreached: tuple[str, ...] = ()
    """Lengths at which the program changes path and that no case has, each with the reason."""

    @property
    def ok(self) -> bool:
        """Whether every output of every case agrees."""
        return not self.diagnostics and all(c.comparison.ok for c in self.cases)

    @property
    def worst(self) -> float:
        """The largest error of O over all cases, relative to the output's RMS."""
        found = [c.comparison.relative_rms for c in self.cases if c.output == "O"]
        return max(found, default=0.0)

    @property
    def of_limit(self) -> float | None:
        """The largest error of a gradient over its limit; None if there are no such limits."""
        found = (c.comparison.of_limit for c in self.cases)
        return max((share for share in found if share is not None), default=None)

    def record(self) -> list[dict[str, Any]]:
        """The cases as plain data. NaN and infinities become words, as JSON has none."""
        return [
            {
                "dims": dict(case.dims),
                "output": case.output,
                "ok": case.comparison.ok,
                "relative_rms": _number(case.comparison.relative_rms),
                "relative_max": _number(case.comparison.relative_max),
                "max_abs": _number(case.comparison.max_abs),
                "reason": case.comparison.reason,
                **_share(case.comparison),
            }
            for case in self.cases
        ]


def _share(result: oracle.Comparison) -> dict[str, float | str]:
    return {} if result.of_limit is None else {"of_limit": _number(result.of_limit)}


def _number(value: float) -> float | str:
    return float(value) if math.isfinite(value) else str(float(value))


def judge(
    program: Program | Kernels,
    spec: AttentionSpec,
    *,
    cases: Sequence[Mapping[str, int]] | None = None,
    seed: int = 0,
    base: Path | None = None,
    progress: Progress | None = None,
    kind: str = "normal",
) -> CpuVerdict:
    """Run the cases in order. The first wrong one ends the run, with the statement at fault (of
    several kernels, the one that stores the wrong output).

    `base` is the folder that the spec's `reference` is relative to; `kind` the distribution of
    the inputs (see inputs.py).
    """
    reference = ReferenceProcess((base or Path()) / spec.reference) if spec.reference else None
    kernels = _kernels(program)
    _check_dtypes(kernels, spec)
    chosen = coverage(kernels, spec) if cases is None else None
    whole = has_groups(kernels)
    listed = cases or ()
    if chosen is not None:
        listed = cases_of(chosen, spec, whole)
    problems = [(dict(c), kind) for c in listed]
    spread = None
    if reference is not None and len(kernels.programs) == 1 and not spec.backward:
        spread = reference_spread(kernels.programs[0], spec, reference)
    if cases is None and reference is None and kind == "normal" and not spec.sink:
        problems.append((default_cases(spec, [LOW], whole)[0], "opposed"))
    results: list[CaseResult] = []
    for number, (dims, drawn) in enumerate(problems):
        if progress is not None:
            progress(number, len(problems), f"q_len {dims['q_len']}, kv_len {dims['kv_len']}")
        sizes = {**spec.dims, **dims}
        run = CpuTrial(kernels, spec, sizes, seed + number, reference, drawn, spread)
        results += run.results
        if run.diagnostics:
            return CpuVerdict(tuple(results), run.diagnostics)
    left = chosen.unreached(dims for dims, _ in problems) if chosen is not None else ()
    return CpuVerdict(tuple(results), unreached=tuple(left))


def coverage(program: Program | Kernels, spec: AttentionSpec) -> Coverage:
    """The lengths of a program's CPU run, chosen from its tile sizes and constants."""
    budget = replace(BUDGET, longest=BOUNDED) if spec.dims else BUDGET
    tiling = joined([tiling_of(one) for one in _kernels(program).programs])
    return cover((Served(tiling),), spec, budget, with_many=True)


def _kernels(program: Program | Kernels) -> Kernels:
    return program if isinstance(program, Kernels) else Kernels((program,))


def cases_of(chosen: Coverage, spec: AttentionSpec, whole: bool = False) -> list[dict[str, int]]:
    """The problems of a CPU run, shortest first: a short failure is easier to read."""
    found = []
    for pair in sorted(chosen.pairs, key=lambda pair: (pair[0] * pair[1], pair)):
        lengths = [(pair[0], tokens_of(spec, pair[1]))]
        found += default_cases(spec, lengths, whole, many=pair == chosen.many)
    return found


def _check_dtypes(kernels: Kernels, spec: AttentionSpec) -> None:
    """Fail if a tensor's element type is not the spec's: the error limit would be the wrong one."""
    meant: dict[str, str] = {"Q": spec.input_dtype, "O": spec.output_dtype}
    meant |= dict.fromkeys("KV", spec.key_dtype)
    if spec.backward:
        meant |= dict.fromkeys(("dO", "dQ", "dK", "dV"), spec.output_dtype) | {"LSE": "fp32"}
    for tensor in (t for program in kernels.programs for t in program.tensors.values()):
        wanted = meant.get(tensor.name, tensor.dtype)
        if tensor.dtype != wanted:
            text = f"`{tensor.name}` is {tensor.dtype}, but the spec's dtype makes it {wanted}"
            hint = f"`Allocate {tensor.name} in global (...) as {wanted}`, or change the spec"
            raise Failed(Diagnostic("FW904", text, tensor.declared.span, help=hint))


def has_groups(kernels: Kernels) -> bool:
    """Whether a program has an axis for the heads of a group, so that it serves one group only."""
    return any(tiling_of(program).grouped for program in kernels.programs)


def default_cases(
    spec: AttentionSpec,
    lengths: Sequence[tuple[int, int]] = LENGTHS,
    whole_groups: bool = False,
    many: bool = False,
) -> list[dict[str, int]]:
    """Small problems with the spec's kind of head sharing, with two query heads for a kv head, or
    all (`whole_groups`).

    The short ones, and any with `many`, have two batches and two kv heads, so that a wrong batch or
    head shows. The longer ones have one of each.
    """
    cases = []
    for q_len, kv_len in lengths:
        short = many or max(q_len, 16) * kv_len <= 10_000  # a row costs as much as a few
        kv_heads = min(spec.kv_heads, MANY[1]) if short else 1
        group = spec.group if whole_groups or spec.branch == "selected" else min(spec.group, 2)
        dims = {"batch": MANY[0] if many or q_len * kv_len <= 300 else 1}
        dims |= {"heads": kv_heads * group, "kv_heads": kv_heads, "q_len": q_len}
        if spec.branch == "compressed":
            tokens = max(kv_len, spec.block)
            dims |= {"kv_len": spec.compressed_blocks(tokens), "tokens": tokens}
        else:
            dims |= {"kv_len": kv_len}
        cases.append(sized(spec, dims))
    return cases


class CpuTrial:
    """One problem of a TL program: inputs, the run, the oracle's answer, the comparison."""

    def __init__(
        self,
        kernels: Kernels,
        spec: AttentionSpec,
        dims: dict[str, int],
        seed: int,
        reference: ReferenceProcess | None,
        kind: str,
        spread: float | None = None,
    ) -> None:
        self.kernels, self.spec, self.dims = kernels, spec, dims
        self.results: list[CaseResult] = []
        self.diagnostics: tuple[Diagnostic, ...] = ()
        self.inputs = _inputs(kernels, spec, dims, seed, reference, kind, spread)
        self.dims = dims = {**axis_sizes(kernels, self.inputs), **dims}
        answer = reference or (lambda given, sizes: oracle.attention(spec, given, sizes))
        self.expected = Answer(answer(self.inputs, dims))
        if spec.backward:
            self.inputs = backward_inputs(spec, self.inputs, self.expected, seed)
            self.expected = expected_gradients(spec, self.inputs, dims, reference)
        _check_inputs(kernels, self.inputs)
        try:
            found = interpret_all(kernels, self.arranged(), dims)
        except Failed as failed:
            self.diagnostics = failed.diagnostics
            return
        self._compare(found, standard=reference is None)

    def arranged(self) -> dict[str, Array]:
        """The inputs in the order of axes that the program declares."""
        arrays = {t.name: self._arrange(self.inputs[t.name], t) for t in self.kernels.inputs}
        for tensor in self.kernels.outputs:  # the caller decides the size of a view's memory
            if tensor.offset is not None and tensor.name in self.expected:
                arrays[tensor.name] = self.expected[tensor.name]
        return arrays

    def _arrange(self, array: Array, tensor: Tensor) -> Array:
        return arrange(array, tensor, shape_of(tensor, self.kernels.owner(tensor), self.dims))

    def _compare(self, found: dict[str, Array], standard: bool) -> None:
        outputs = [t for t in self.kernels.outputs if t.name in self.expected]
        if self.spec.backward:
            self._check_gradients()
        if not outputs:
            names = ", ".join(self.expected)
            text = f"the program writes none of the outputs that the spec knows ({names})"
            raise Failed(Diagnostic("FW904", text))
        self.diagnostics = tuple(self._unwritten())
        for tensor in outputs:
            result = self._comparison(tensor, found[tensor.name])
            self.results.append(CaseResult(self.dims, tensor.name, result))
            if not result.ok and not self.diagnostics:
                found_at = self._blame(tensor, result, standard and not self.spec.batch)
                self.diagnostics = tuple(self._with_lengths(d) for d in found_at)

    def _blame(
        self, tensor: Tensor, result: oracle.Comparison, standard: bool
    ) -> tuple[Diagnostic, ...]:
        if len(self.kernels.programs) > 1 or self.spec.backward:
            return (blame_kernel(self.kernels, tensor, result, self.dims),)
        (program,) = self.kernels.programs
        truth = (self.spec, self.inputs) if standard else None
        return localise(program, tensor, result, self.arranged(), self.dims, truth)

    def _with_lengths(self, found: Diagnostic) -> Diagnostic:
        """With the lengths of the sequences, if they have any and there is no other help."""
        if self.spec.batch is None or found.help is not None:
            return found
        pairs = sequences.each_length(self.inputs)
        told = "; ".join(f"{rows} and {keys}" for rows, keys in pairs[:_SHOWN])
        rest = " ..." if len(pairs) > _SHOWN else ""
        return replace(found, help=f"queries and keys of the sequences, in order: {told}{rest}")

    def _check_gradients(self) -> None:
        """Fail if a gradient is missing, or is none of an input."""
        written = {t.name: t for t in self.kernels.outputs}
        known = ", ".join(self.expected)
        for name in ("dQ", "dK", "dV"):
            if name in self.expected and name not in written:
                text = f"the spec asks for a backward pass, but nothing is stored in `{name}`"
                hint = f"the gradients of this spec are {known}"
                raise Failed(Diagnostic("FW904", text, help=hint))
        for name, tensor in written.items():
            if name not in self.expected:
                text = f"`{name}` is no gradient of this spec: it has {known}"
                raise Failed(Diagnostic("FW904", text, tensor.declared.span))

    def _unwritten(self) -> Iterator[Diagnostic]:
        """A finding for each output of the spec that the program declares and never stores."""
        programs = self.kernels.programs
        written = {t.name for program in programs for t in program.outputs}
        declared = {name: t for program in programs for name, t in program.tensors.items()}
        for tensor in declared.values():
            if tensor.name in self.expected and tensor.name not in written:
                text = f"`{tensor.name}` is an output of the spec, but nothing is stored in it"
                hint = f"end with `Copy {tensor.name} ... from register to global`"
                yield Diagnostic("FW801", text, tensor.declared.span, help=hint)

    def _comparison(self, tensor: Tensor, found: Array) -> oracle.Comparison:
        expected = self.expected.arranged(tensor.name, lambda array: self._arrange(array, tensor))
        return compare(self.spec, tensor.name, found, expected)


def _check_inputs(kernels: Kernels, made: Mapping[str, Array]) -> None:
    """Fail if the program reads what the spec does not have."""
    for tensor in kernels.inputs:
        if tensor.name not in made:
            text = f"the spec has no input `{tensor.name}`, which the program reads"
            hint = "the reference must return O and LSE" if tensor.name == "LSE" else None
            raise Failed(Diagnostic("FW904", text, tensor.declared.span, help=hint))


def _inputs(
    kernels: Kernels,
    spec: AttentionSpec,
    dims: Mapping[str, int],
    seed: int,
    reference: ReferenceProcess | None,
    kind: str,
    spread: float | None = None,
) -> dict[str, Array]:
    made = None
    if reference is not None:
        made = reference.make_inputs(np.random.default_rng(seed), dims)
    if made is not None:
        made = trial.narrowed(made, spec.input_dtype)
    elif reference is None or reference.by_name:
        known = spread if reference is None else spread or 1.0
        made = trial.make_inputs(spec, dims, seed, kind, known)
    made = made or {}
    if reference is None:
        return made
    for number, tensor in enumerate(kernels.inputs):
        if tensor.name not in made and not (spec.backward and tensor.name in ("O", "LSE", "dO")):
            shape = shape_of(tensor, kernels.owner(tensor), dims)
            rng = np.random.default_rng([seed, number])
            factor = trial.named_factor(tensor.name, tensor.dtype, spread)
            made[tensor.name] = trial.random_tensor(shape, tensor.dtype, rng, kind, factor)
    return made


def reference_spread(
    program: Program, spec: AttentionSpec, reference: ReferenceProcess
) -> float | None:
    """The spread of a program's scores on normal inputs, for a spec that gives no scale."""
    (small,) = default_cases(spec, [SMALL], has_groups(Kernels((program,))))
    dims = {**spec.dims, **small}
    made = _inputs(Kernels((program,)), spec, dims, 0, reference, "normal")
    dims = {**axis_sizes(Kernels((program,)), made), **dims}
    arrays = {t.name: arrange(made[t.name], t, shape_of(t, program, dims)) for t in program.inputs}
    return spread_in(program, arrays, dims)


def arrange(array: Array, tensor: Tensor, shape: tuple[int, ...]) -> Array:
    """A caller's array with its axes as the program declares them.

    The caller's order is batch, head, position, dimension. A program may declare another order
    and may split the heads into groups. Other axes stay in order.
    """
    labels = [a.label for a in tensor.axes]
    known = [label for label in labels if label in _CALLER_ORDER]
    ordered = array.shape == shape and sorted(known, key=_rank) == known
    if ordered or tensor.offset is not None:
        return array
    if array.size != int(np.prod(shape)) or len(known) < len(labels):
        text = f"`{tensor.name}` is {shape} here, but the spec gives it as {array.shape}"
        raise Failed(Diagnostic("FW904", text, tensor.declared.span))
    order = sorted(range(len(labels)), key=lambda i: _rank(labels[i]))
    split = array.reshape([shape[i] for i in order])
    back = [order.index(i) for i in range(len(labels))]
    return np.ascontiguousarray(split.transpose(back))


def _rank(label: str) -> int:
    return _CALLER_ORDER.find(label)
