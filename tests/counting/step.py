"""What one step of one block costs: a kernel is emulated for two key lengths, and the difference
is what the steps between them did.

PTX is what is executed, so it is counted as ptxas issues it where that is known: `mov` between
registers is free, and a multiplication whose only reader adds to it is part of that FMA. With this
the arithmetic, exponentials, conversions, shuffles and matrix instructions were those of the
disassembled loop, one for one, in nine kernels; of addresses ptxas saves up to a third more.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashwright import gpu as gpus
from flashwright.author.builtin.author import workload, write_sketch
from flashwright.author.builtin.choose import choose
from flashwright.author.builtin.complete import complete
from flashwright.author.builtin.needs import Tiling
from flashwright.author.builtin.variants import make_spec
from flashwright.emulate.emulate import COUNTS, run
from flashwright.emulate.profile import kind, levels
from flashwright.emulate.ptx import Address, Instruction, Operand, Pair, Register, Vector
from flashwright.judge.form import PackageForm
from flashwright.judge.problems import Problem, sizes
from flashwright.lang.format import format_tree
from flashwright.lang.parse import parse
from flashwright.sandbox.tensors import DTYPES
from flashwright.spec import AttentionSpec
from tests.unit.together import Kernel, kernels

FEW, MANY = 4, 6  # steps of the two runs
# The profile's kinds, as the cost model puts them together.
CLASSES = {
    **{name: name for name in ("mma", "ldmatrix", "special", "conversion", "arithmetic")},
    **dict.fromkeys(("cp.async", "tma", "global", "shared"), "copy"),
    **dict.fromkeys(("control", "barrier", "wait"), "control"),
    "exchange": "exchange",
}
OVERHEAD = ("integer", "copy", "control")
_INTEGER_CONVERSION = re.compile(r"cvt(\.\w+)*\.[usb]\d+\.[usb]\d+$")


@dataclass(frozen=True)
class Sample:
    """A kernel of the built-in author with a tiling of our choice."""

    gpu: str
    dtype: str
    head_dim: int
    tiling: Tiling
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def spec(self) -> AttentionSpec:
        settings = {"head_dim": self.head_dim, "dtype": self.dtype, "heads": 1}
        return make_spec("mha", **settings, **self.options)

    @property
    def scores(self) -> float:
        """What each lane has of a step's scores."""
        return self.tiling.bm * self.tiling.bn / self.lanes

    @property
    def outputs(self) -> float:
        """What each lane has of O."""
        return self.tiling.bm * self.spec.value_dim / self.lanes

    @property
    def rows(self) -> float:
        """The rows that a lane has a part of: four lanes share one."""
        return self.tiling.bm * 4 / self.lanes

    @property
    def copies(self) -> float:
        """The 16 bytes of K and V that a lane copies in a step."""
        return self.key_bytes / 16 / self.lanes

    @property
    def key_bytes(self) -> int:
        """K and V of one step."""
        work = workload(self.spec)
        return self.tiling.bn * work.key_bytes

    @property
    def lanes(self) -> int:
        return 32 * self.tiling.warps


@dataclass(frozen=True)
class Step:
    """One step of one block."""

    instructions: Counter[str]
    """Issued by each warp, by class."""
    wavefronts: float
    """Of reads and plain writes of shared memory; copies that bypass registers have none."""
    ideal: float
    bytes: Counter[str]
    """By the profile's levels."""


def built(samples: Sequence[Sample]) -> Iterator[tuple[Sample, Kernel]]:
    """Their kernels, compiled by one run of nvcc for each GPU."""
    for gpu in dict.fromkeys(s.gpu for s in samples):
        mine = [s for s in samples if s.gpu == gpu]
        yield from zip(mine, kernels([(_code(s), s.spec) for s in mine], gpu), strict=True)


def _code(sample: Sample) -> str:
    card = gpus.find(sample.gpu)
    decision = choose(workload(sample.spec), card)
    forced = replace(decision, chosen=replace(decision.chosen, tiling=sample.tiling))
    return format_tree(complete(parse(write_sketch(sample.spec)), sample.spec, card, forced)[0])


def one_step(sample: Sample, kernel: Kernel) -> Step:
    """The cost of a step in which no score is masked."""
    bm, bn = sample.tiling.bm, sample.tiling.bn
    # So many more keys than queries that the steps between the two are whole in any case.
    start = -(-bm // bn) * bn
    few, many = (_counts(kernel, bm, start + n * bn) for n in (FEW, MANY))
    return _told(sample, kernel, (many - few) / (MANY - FEW))


def one_mask(sample: Sample, kernel: Kernel) -> Step:
    """What a step costs more when some of its scores are masked.

    One key less makes one step more a masked one: without a mask the last step, which is then
    ragged, with one the first that the diagonal would otherwise just miss.
    """
    bm, bn = sample.tiling.bm, sample.tiling.bn
    keys = FEW * bn + (bm - 1 if sample.spec.causal else 0)
    return _told(sample, kernel, _counts(kernel, bm, keys - 1) - _counts(kernel, bm, keys))


def _counts(kernel: Kernel, q_len: int, kv_len: int) -> NDArray[np.float64]:
    """Of one thread block, as tall as its tile."""
    spec = kernel.spec
    problem = Problem(sizes(spec, q_len, kv_len, 1, 1), "normal", 1)
    form = PackageForm(spec, kernel.plan)
    arrays = {n: np.ascontiguousarray(a) for n, a in form.taken(form.inputs(problem, None)).items()}
    arrays["O"] = np.zeros((1, 1, q_len, spec.value_dim), DTYPES[spec.output_dtype])
    arrays["LSE"] = np.zeros((1, 1, q_len), np.float32)
    result = run(kernel.program, kernel.plan, arrays, problem.dims)
    assert not result.findings, result.findings[0]
    return result.counts.astype(np.float64)


def _told(sample: Sample, kernel: Kernel, counts: NDArray[np.float64]) -> Step:
    source = kernel.program.source
    free = _free(source)
    instructions: Counter[str] = Counter()
    moved: Counter[str] = Counter()
    for number, (instruction, row) in enumerate(zip(source, counts, strict=True)):
        if number not in free:
            instructions[_class(instruction)] += row[0] / sample.tiling.warps
        for level in levels(instruction):
            moved[level] += row[COUNTS.index("bytes")]
    wavefronts, ideal = (counts[:, COUNTS.index(c)].sum() for c in ("wavefronts", "ideal"))
    return Step(instructions, float(wavefronts), float(ideal), moved)


def _class(instruction: Instruction) -> str:
    if _INTEGER_CONVERSION.match(instruction.opcode):
        return "integer"
    return CLASSES.get(kind(instruction), "integer")


def _free(source: Sequence[Instruction]) -> set[int]:
    """The instructions that are gone once ptxas is done."""
    uses: Counter[str] = Counter()
    products: dict[str, int] = {}
    free = set()
    for number, instruction in enumerate(source):
        uses.update(r for o in instruction.operands[1:] for r in _registers(o))
        if re.fullmatch(r"mul(\.ftz)?\.f32", instruction.opcode):
            products.update(dict.fromkeys(_registers(instruction.operands[0]), number))
        # Two halves put together are a PRMT, unless they never were apart.
        packs = any(isinstance(o, Vector) for o in instruction.operands[1:])
        if instruction.opcode.startswith("mov.") and not packs:
            free.add(number)
    # A bit that is tested alone: ptxas makes predicates of seven at once.
    tests = Counter(
        r for i in source if i.opcode.startswith("setp.") for r in _registers(i.operands[1])
    )
    bits = {
        register
        for i in source
        if i.opcode == "and.b32" and _one_bit(i.operands[2])
        for register in _registers(i.operands[0])
        if tests[register] == uses[register]
    }
    for number, instruction in enumerate(source):
        place = {"and.b32": 0}.get(instruction.opcode, 1)
        tested = instruction.opcode == "and.b32" or instruction.opcode.startswith("setp.")
        if tested and bits & {*_registers(instruction.operands[place])}:
            free.add(number)
    for instruction in source:
        if re.fullmatch(r"(add|sub)(\.ftz)?\.f32", instruction.opcode):
            read = [r for o in instruction.operands[1:] for r in _registers(o)]
            fused = (products[r] for r in read if r in products and uses[r] == 1)
            free.add(next(fused, -1))
    return free


def _one_bit(operand: Operand) -> bool:
    """Whether an operand is a number with one bit set."""
    value = getattr(operand, "value", None)
    return isinstance(value, int) and (value & 0xFFFFFFFF).bit_count() == 1


def _registers(operand: Operand) -> Iterator[str]:
    match operand:
        case Register():
            yield operand.name
        case Vector():
            for item in operand.items:
                yield from _registers(item)
        case Pair():
            yield from _registers(operand.first)
            yield from _registers(operand.second)
        case Address():
            yield from _registers(operand.base)
