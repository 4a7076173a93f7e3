"""Encodes a launch plan for the launcher: numbers and strings in a fixed order (launcher/plan.h).

Plans are untrusted and the launcher does not check them, so every plan is checked
(plan_rules.py) before it is encoded.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashwright.build.plan_rules import DTYPES, LAYOUTS, SWIZZLES, caller_order, faults
from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.lower.launch_plan import OPERATORS, LaunchPlan, PlanTensor, Postfix

MAP_TYPES = {  # CUtensorMapDataType; bytes are UINT8, and zeros are zeros
    "fp16": 6,
    "bf16": 9,
    "fp32": 7,
    "int32": 3,
    "int8": 0,
    "e4m3": 0,
    "e5m2": 0,
}
_NUMBER, _DIM = 0, 1  # an operator's number is its index in OPERATORS plus these two


@dataclass(frozen=True)
class Encoded:
    """The arguments of launcher.make()."""

    numbers: tuple[int, ...]
    words: tuple[str, ...]


def encode(plan: LaunchPlan) -> Encoded:
    """The encoded plan. Raises Failed with FW852 if the plan is invalid."""
    found = list(faults(plan))
    if found:
        raise Failed(*(Diagnostic("FW852", f"launch.json: {text}") for text in found))
    writer = _PlanWriter(plan.dims)
    writer.plan(plan)
    return Encoded(tuple(writer.numbers), tuple(writer.words))


class _PlanWriter:
    def __init__(self, dims: tuple[str, ...]) -> None:
        self.dims = dims
        self.numbers: list[int] = []
        self.words: list[str] = []

    def plan(self, plan: LaunchPlan) -> None:
        self.words += [plan.entry, plan.arch]
        heads = [self.dims.index(d) if d in self.dims else -1 for d in ("heads", "kv_heads")]
        self.numbers += [plan.threads, plan.shared, plan.stays, plan.counter, *heads]
        self.numbers.append(len(self.dims))
        self.words += self.dims
        self.numbers.append(len(plan.tensors))
        for tensor in plan.tensors:
            self.tensor(tensor)
        self.numbers.append(len(plan.grid))
        for count in plan.grid:
            self.size(count)
        self.numbers.append(len(plan.maps))
        names = [tensor.name for tensor in plan.tensors]
        for one in plan.maps:
            index = names.index(one.tensor)
            self.numbers += [index, MAP_TYPES[plan.tensors[index].dtype]]
            kinds = (one.optional, one.ranges, one.pages)
            self.numbers += [SWIZZLES.index(one.swizzle), *kinds, *one.box]

    def tensor(self, tensor: PlanTensor) -> None:
        self.words += [tensor.name, tensor.dtype]
        self.numbers += [*DTYPES[tensor.dtype], tensor.vector]
        self.numbers += [tensor.read, tensor.written, tensor.flat, tensor.fragments]
        self.numbers.append(len(tensor.axes))
        for axis in tensor.axes:
            self.words.append(axis.label)
            self.size(axis.size)
        for layout in LAYOUTS:
            order = caller_order(tensor, layout)
            self.numbers.append(len(order))
            for parts in order:
                self.numbers += [len(parts), *parts]

    def size(self, expr: Postfix) -> None:
        self.numbers.append(len(expr))
        for token in expr:
            if isinstance(token, int):
                self.numbers += [_NUMBER, token]
            elif token in OPERATORS:
                self.numbers += [_DIM + 1 + list(OPERATORS).index(token), 0]
            else:
                self.numbers += [_DIM, self.dims.index(token)]
