"""The verdict on the GPU: a kernel package is run and compared with attention in fp64.

Every output is filled with NaN before each run, so that what the kernel leaves out shows; each
problem is run again and must give the same bits; and O must be nearly as exact as PyTorch's flash
backend.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flashwright.build import driver
from flashwright.build.encode import LAYOUTS, caller_order
from flashwright.build.load import Kernel, load
from flashwright.interpret import NUMPY_DTYPES
from flashwright.judge import flash, oracle, oracle_device
from flashwright.judge import inputs as trial
from flashwright.judge.cpu import LENGTHS as SHORT
from flashwright.judge.cpu import LOW, Progress
from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.lower.launch_plan import PlanTensor, evaluate
from flashwright.spec import AttentionSpec, BadSpec

if TYPE_CHECKING:
    from flashwright.check.program import Program

LENGTHS = (
    *((1, 1), (63, 63), (128, 128), (1000, 1000), (4097, 4097)),
    *((1, 4097), (63, 1000), (128, 4097), (1000, 128), (4097, 1000), (1000, 63)),
)
"""Pairs of q_len and kv_len: equal, fewer queries than keys, more queries than keys."""
COUNTS = ((2, 2), (1, 3), (3, 1), (2, 4))
"""Batch and kv heads of problems, in turn; the largest problems have one batch and two kv heads."""
LARGE = 2_000_000  # pairs of positions from which a problem is large
MOST = 1.5  # how much less exact than the library a kernel may be
SLACK = 0.05  # units of roundoff that are no matter: at length 1 the library's error is 0
SLACK_SINK = 1.0  # the library has no sinks: at length 1 it weighs by 1 exactly, a sink does not

_INTEGERS = {1: "uint8", 2: "int16", 4: "int32"}  # by bytes, to carry bits from library to library


@dataclass(frozen=True)
class GpuCase:
    """One output of one problem; `library` is the error of torch's flash backend beside it."""

    dims: Mapping[str, int]
    output: str
    comparison: oracle.Comparison
    library: float | None = None

    @property
    def ratio(self) -> float | None:
        """Our error over the library's."""
        return self.comparison.relative_rms / self.library if self.library else None

    def record(self) -> dict[str, Any]:
        """The case as plain data."""
        return {
            "dims": dict(self.dims),
            "output": self.output,
            "ok": self.comparison.ok,
            "relative_rms": self.comparison.relative_rms,
            "relative_max": self.comparison.relative_max,
            "library_rms": self.library,
            "reason": self.comparison.reason,
        }


@dataclass(frozen=True)
class GpuVerdict:
    """Whether a kernel is the attention its spec asks for, on this GPU."""

    card: str
    arch: str
    cases: tuple[GpuCase, ...]
    diagnostics: tuple[Diagnostic, ...] = ()
    unable: str | None = None
    """Why the library is no yardstick here."""

    @property
    def ok(self) -> bool:
        """Every output of every problem agrees."""
        return not self.diagnostics and all(c.comparison.ok for c in self.cases)

    @property
    def worst(self) -> float:
        """The largest error of O, relative to the output's RMS."""
        return max((c.comparison.relative_rms for c in self.cases if c.output == "O"), default=0.0)

    @property
    def worst_ratio(self) -> float | None:
        """The largest ratio of an error to the library's."""
        return max((c.ratio for c in self.cases if c.ratio is not None), default=None)

    def record(self) -> dict[str, Any]:
        """The verdict as plain data."""
        return {
            "ok": self.ok,
            "gpu": self.card,
            "arch": self.arch,
            "cases": [case.record() for case in self.cases],
            "diagnostics": [{"code": d.code, "message": d.message} for d in self.diagnostics],
        }


def verdict(
    folder: str | Path,
    spec: AttentionSpec,
    program: Program | None = None,
    *,
    lengths: Sequence[tuple[int, int]] | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> GpuVerdict:
    """Run the kernel in a folder on all problems; the first wrong one ends the trial.

    Raises Failed with FW851 where no GPU or no PyTorch can be used: that is no verdict. The spec's
    `reference` is relative to the folder. The launch plan says all that is asked of the `program`.
    """
    driver.cards()
    need_torch()
    kernel = load(folder)
    return judge(kernel, spec, Path(folder), lengths=lengths, seed=seed, progress=progress)


def judge(
    kernel: Kernel,
    spec: AttentionSpec,
    base: Path | None = None,
    *,
    lengths: Sequence[tuple[int, int]] | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> GpuVerdict:
    """`verdict` for a kernel that is loaded; `base` is what the spec's reference is relative to."""
    card = driver.cards()[0]
    if not card.takes(kernel.plan.arch):
        text = f"the kernel is for {kernel.plan.arch}, which {card.name} ({card.arch}) cannot run"
        raise Failed(Diagnostic("FW851", text))
    problems = list(_problems(spec, lengths))
    found: list[GpuCase] = []
    diagnostics: tuple[Diagnostic, ...] = ()
    try:
        path = (base or Path()) / spec.reference if spec.reference else None
        reference = oracle.user_reference(path) if path else None
        for number, (dims, kind) in enumerate(problems):
            if progress is not None:
                text = f"q_len {dims['q_len']}, kv_len {dims['kv_len']}"
                progress(number, len(problems), text)
            one = Trial(kernel, spec, {**spec.dims, **dims}, seed + number, reference, kind)
            found += one.cases
            diagnostics = one.diagnostics
            if diagnostics:
                break
    except BadSpec as error:  # the user's own reference cannot be used
        raise Failed(*(Diagnostic("FW903", line) for line in error.lines)) from None
    return GpuVerdict(card.name, card.arch, tuple(found), diagnostics, flash.unable(spec))


def need_torch() -> Any:
    """PyTorch with a GPU; Failed with FW851 where there is none."""
    try:
        import torch
    except ImportError:
        text = "running kernels beside the libraries needs PyTorch, which is not installed"
        raise Failed(Diagnostic("FW851", text, help="pip install torch")) from None
    if not torch.cuda.is_available():
        text = "the PyTorch that is installed cannot use this machine's GPU"
        raise Failed(Diagnostic("FW851", text))
    return torch


def _problems(
    spec: AttentionSpec, lengths: Sequence[tuple[int, int]] | None
) -> Iterator[tuple[dict[str, int], str]]:
    """Sizes and kinds of inputs; a reference in NumPy is slow, extra dims may bound the keys."""
    chosen = lengths
    if chosen is None:
        longer = () if spec.dims else ((1000, 1000), (130, 4097), (1000, 63))
        chosen = (*SHORT, *longer) if spec.reference else LENGTHS
    for number, (q_len, kv_len) in enumerate(chosen):
        large = q_len * kv_len >= LARGE
        batch, most = (1, 2) if large else COUNTS[number % len(COUNTS)]
        yield _sizes(spec, q_len, kv_len, batch, most), "normal"
    if lengths is None and not spec.reference and not spec.sink:
        yield _sizes(spec, *LOW, 1, 1), "opposed"


def _sizes(
    spec: AttentionSpec, q_len: int, kv_len: int, batch: int, kv_heads: int
) -> dict[str, int]:
    kv_heads = min(spec.kv_heads, kv_heads)
    group = spec.group if spec.branch == "selected" else min(spec.group, 4)
    dims = {"batch": batch, "heads": kv_heads * group, "kv_heads": kv_heads, "q_len": q_len}
    if spec.branch == "compressed":
        tokens = max(kv_len, spec.block)
        return dims | {"kv_len": spec.compressed_blocks(tokens), "tokens": tokens}
    return dims | {"kv_len": kv_len}


class Trial:
    """One problem: inputs, the oracle's answer, three runs, the comparison."""

    def __init__(
        self,
        kernel: Kernel,
        spec: AttentionSpec,
        dims: Mapping[str, int],
        seed: int,
        reference: oracle.UserReference | None,
        kind: str,
    ) -> None:
        self.kernel, self.spec, self.dims = kernel, spec, dims
        self.torch = need_torch()
        self.cases: list[GpuCase] = []
        self.diagnostics: tuple[Diagnostic, ...] = ()
        self.tensors = {t.name: t for t in kernel.plan.tensors}
        arrays = self._arrays(seed, reference, kind)
        self.inputs = {
            name: to_torch(array, self.tensors[name].dtype)
            for name, array in arrays.items()
            if name in self.tensors
        }
        if reference is not None:
            self.expected = reference(arrays, dims)
        else:
            self.expected = self._oracle()
        try:
            self._runs(standard=reference is None)
        except RuntimeError as error:  # the launcher's, or torch's when it next meets the GPU
            self._blame("FW856", f"the kernel does not run: {str(error).splitlines()[0]}")

    def _arrays(
        self, seed: int, reference: oracle.UserReference | None, kind: str
    ) -> dict[str, Any]:
        if reference is None:
            made = trial.make_inputs(self.spec, self.dims, seed, kind)
        else:
            made = reference.make_inputs(np.random.default_rng(seed), self.dims) or {}
        for number, tensor in enumerate(t for t in self.kernel.plan.tensors if t.read):
            if tensor.name not in made:
                if reference is None:
                    text = f"the spec has no input `{tensor.name}`, which the kernel reads"
                    raise Failed(Diagnostic("FW904", text))
                rng = np.random.default_rng([seed, number])
                made[tensor.name] = trial.random_tensor(
                    self._shape(tensor), tensor.dtype, rng, kind
                )
        return made

    def _shape(self, tensor: PlanTensor) -> tuple[int, ...]:
        """In the caller's order of axes."""
        if tensor.flat and tensor.written:  # a view: its memory is the caller's to size
            expected: tuple[int, ...] = self.expected[tensor.name].shape
            return expected
        sizes = [evaluate(axis.size, self.dims) for axis in tensor.axes]
        order = caller_order(tensor, LAYOUTS[0])
        return tuple(int(np.prod([sizes[p] for p in parts])) for parts in order)

    def _oracle(self) -> dict[str, Any]:
        answer = oracle_device.attention(self.torch, self.spec, self.inputs, self.dims)
        self.exact = answer["O"]
        return {name: value.cpu().numpy() for name, value in answer.items()}

    # --- the runs -----------------------------------------------------------------------------

    def _runs(self, standard: bool) -> None:
        names = self.kernel.outputs
        known = [name for name in names if name in self.expected]
        if not known:
            text = f"the kernel writes none of the outputs that the spec knows: {', '.join(names)}"
            raise Failed(Diagnostic("FW904", text))
        first = self._run(names)
        for name in known:
            self._compare(name, first[name], standard)
        if self.diagnostics:
            return
        self._same(first, self._run(names), names, "")
        if len(names) > 1:
            self._same(first, self._run(names[:1]), names[:1], " without the other outputs")

    def _run(self, names: Sequence[str]) -> dict[str, Any]:
        """One run into memory that is all NaN."""
        out = {name: self._poisoned(self.tensors[name]) for name in names}
        sizes = {d: self.dims[d] for d in self.kernel.plan.dims if d in self.dims}
        arguments: dict[str, Any] = {**self.inputs, **sizes}
        try:
            self.kernel(out=out, **arguments)
        except (TypeError, ValueError) as error:
            text = f"the kernel does not take the problems of this spec: {error}"
            raise Failed(Diagnostic("FW904", text)) from None
        self.torch.cuda.synchronize()
        return out

    def _poisoned(self, tensor: PlanTensor) -> Any:
        return to_torch(np.full(self._shape(tensor), np.nan, np.float32), tensor.dtype)

    def _same(
        self, first: Mapping[str, Any], again: Mapping[str, Any], names: Sequence[str], how: str
    ) -> None:
        for name in names:
            if not self.torch.equal(_bits(first[name]), _bits(again[name])):
                text = f"the same inputs gave `{name}` with other bits, run again{how}"
                self._blame("FW855", text)

    def _compare(self, name: str, found: Any, standard: bool) -> None:
        array, expected = to_numpy(found), self.expected[name]
        if name == "LSE":
            result = oracle.compare_lse(self.spec, array, expected)
        else:
            result = oracle.compare(array, expected, self.spec.dtype, self.spec.tolerance)
        library = None
        if name == "O" and standard and result.ok:
            library = flash.error(self.spec, self.inputs, self.dims, self.exact)
        case = GpuCase(self.dims, name, result, library)
        self.cases.append(case)
        if not result.ok:
            self._blame("FW853", f"`{name}` is wrong: {result.reason}")
        elif library is not None:
            slack = SLACK_SINK if self.spec.sink else SLACK
            limit = MOST * library + slack * oracle.ROUNDOFF[self.spec.dtype]
            if result.relative_rms > limit:
                text = f"{result.relative_rms:.2e}, torch's flash backend has {library:.2e}"
                self._blame("FW854", f"the relative RMS error of `{name}` is {text}")

    def _blame(self, code: str, text: str) -> None:
        sizes = ", ".join(f"{name} {size}" for name, size in self.dims.items())
        self.diagnostics += (Diagnostic(code, f"{text} ({sizes})"),)


# --- between NumPy and PyTorch ----------------------------------------------------------------


def to_torch(array: Any, dtype: str, device: str = "cuda") -> Any:
    """A NumPy array as a tensor of one of our element types, which NumPy itself may not have."""
    import torch

    from flashwright.build.arrays import NAMES

    exact = np.array(array, NUMPY_DTYPES[dtype], order="C")
    bits = exact.view(_INTEGERS[exact.dtype.itemsize])
    return torch.from_numpy(bits).view(getattr(torch, NAMES[dtype])).to(device)


def to_numpy(tensor: Any) -> Any:
    """A tensor as a NumPy array that holds its values: fp32, or integers as they are."""
    return (tensor.float() if tensor.is_floating_point() else tensor).cpu().numpy()


def _bits(tensor: Any) -> Any:
    import torch

    return tensor.contiguous().view(getattr(torch, _INTEGERS[tensor.element_size()]))
