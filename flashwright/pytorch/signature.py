"""The signature of a kernel's operator: its schema, what it takes, and the outputs it returns.

Sizes may be symbolic (torch.SymInt): everything here also runs while torch traces a model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import guard_or_false

from flashwright.build.arrays import NAMES
from flashwright.build.load import OutputShapes, unshown
from flashwright.build.plan_rules import LAYOUTS, caller_order
from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.lower.launch_plan import LaunchPlan, PlanTensor, Postfix, evaluate

LAYOUT = LAYOUTS[0]
EXACT = "fp32"
"""Inputs and outputs of this type keep it on the CPU; the others have the caller's type there."""
_FP8 = ("e4m3", "e5m2")


class Signature:
    """A launch plan as an operator: input tensors, then the dims that no tensor shows.

    Raises Failed with FW852 for a plan that is no function of its inputs. With `in_place` tensors
    that are read and written are inputs that the operator changes.
    """

    def __init__(self, plan: LaunchPlan, in_place: bool = False) -> None:
        for tensor in plan.tensors:
            changed = tensor.read and tensor.written
            if (changed and not in_place) or (tensor.written and tensor.flat):
                why = "is read and written" if changed else "has a size that only a caller knows"
                text = f"launch.json: `{tensor.name}` {why}, so the kernel cannot be an operator"
                hint = "call it without torch.compile: flashwright.load(folder)(..., out=...)"
                raise Failed(Diagnostic("FW852", text, help=hint))
        self.plan = plan
        self.read = [t for t in plan.tensors if t.read]
        self.written = [t for t in plan.tensors if t.written and not t.read]
        self.dims = tuple(d for d in unshown(plan) if d != "kv_heads" or "heads" not in plan.dims)
        names = [*(t.name for t in self.read), *self.dims]
        lower = [*(t.name.lower() for t in self.read), *self.dims]
        self.arguments = lower if len(set(lower)) == len(lower) else names
        self.inputs = tuple(self.arguments[: len(self.read)])
        self.changed = tuple(
            name for name, t in zip(self.arguments, self.read, strict=False) if t.written
        )
        """The inputs that the operator changes."""
        self.outputs = tuple(t.name for t in self.written)
        self._shapes = OutputShapes(plan, LAYOUT)
        order = [*self.read, *self.written]
        self._in_plan_order = itemgetter(*(order.index(t) for t in plan.tensors))
        self.types = tuple(dtype_of(t) for t in self.written)
        """The outputs' types, except on the CPU."""
        self._no_outputs, self._no_dims = (None,) * len(self.written), (None,) * len(plan.dims)
        self._written = [
            (plan.tensors.index(t), _has_heads_and_rows(t) and _has_heads_and_rows(self.read[0]))
            for t in self.written
        ]

    def schema(self, name: str) -> str:
        """The schema, as torch.library defines an operator by it."""
        kinds = [f"Tensor(a{n}!)" if t.written else "Tensor" for n, t in enumerate(self.read)]
        kinds += ["SymInt"] * len(self.dims)
        taken = ", ".join(f"{k} {n}" for k, n in zip(kinds, self.arguments, strict=True))
        given = ", ".join(["Tensor"] * len(self.written))
        return f"{name}({taken}) -> " + (given if len(self.written) == 1 else f"({given})")

    def tensors(self, arguments: Sequence[Any]) -> Sequence[Any]:
        """The tensors among the operator's arguments."""
        return arguments[: len(self.read)]

    def results(self, found: Sequence[Any]) -> Any:
        """What the operator returns: one tensor alone, else a tuple."""
        return tuple(found) if len(self.written) > 1 else found[0]

    # --- what it takes ------------------------------------------------------------------------

    def check(self, arguments: Sequence[Any]) -> None:
        """Raise TypeError or ValueError, with the argument, for tensors that do not fit."""
        tensors = self.tensors(arguments)
        on_cpu = tensors[0].device.type == "cpu"
        for name, plan, tensor in zip(self.inputs, self.read, tensors, strict=True):
            if tensor.device != tensors[0].device:
                first = f"`{self.inputs[0]}` on {tensors[0].device}"
                raise ValueError(f"`{name}` is on {tensor.device}, {first}: move one to the other")
            self._check_type(name, plan, tensor, tensors[0].dtype if on_cpu else None)
            self._check_rank(name, plan, tensor)
        dims = self.sizes(arguments)
        for name, plan, tensor in zip(self.inputs, self.read, tensors, strict=True):
            if not plan.flat:
                self._check_shape(name, plan, tensor, dims)
        if "heads" in dims and "kv_heads" in dims:
            self._check_heads(dims["heads"], dims["kv_heads"])

    def _check_type(self, name: str, plan: PlanTensor, tensor: Any, first: Any) -> None:
        """On the CPU (`first` is the first input's type) any floating type will do."""
        wanted = dtype_of(plan)
        if first is None or not wanted.is_floating_point:
            if tensor.dtype != wanted:
                fix = f"give {name}.to({wanted})"
                raise TypeError(f"`{name}` must be {wanted}, not {tensor.dtype}: {fix}")
        elif not tensor.dtype.is_floating_point:
            raise TypeError(f"`{name}` must have a floating-point type, not {tensor.dtype}")
        elif plan.dtype != EXACT and tensor.dtype != first:
            fix = f"give {name}.to({first})"
            text = f"`{name}` is {tensor.dtype}, but `{self.inputs[0]}` is {first}: {fix}"
            raise TypeError(text)

    def _check_rank(self, name: str, plan: PlanTensor, tensor: Any) -> None:
        axes = caller_order(plan, LAYOUT)
        if not plan.flat and tensor.dim() != len(axes):
            labels = ", ".join("".join(plan.axes[p].label for p in parts) for parts in axes)
            text = f"`{name}` must have {len(axes)} axes ({labels})"
            raise ValueError(f"{text}; its shape is {tuple(tensor.shape)}")

    def _check_shape(self, name: str, plan: PlanTensor, tensor: Any, dims: dict[str, Any]) -> None:
        for axis, parts in enumerate(caller_order(plan, LAYOUT)):
            sizes = [plan.axes[p].size for p in parts]
            wanted = math.prod(evaluate(size, dims) for size in sizes)
            found = tensor.shape[axis]
            # Not `if`: of sizes that only the run knows, torch asserts it at run time.
            torch._check_value(
                found == wanted,
                lambda a=axis, w=wanted, s=sizes: (
                    f"`{name}` must be {w} long on axis {a}{self._reason(s)}, not "
                    f"{tensor.shape[a]}; its shape is {tuple(tensor.shape)}"
                ),
            )

    def _reason(self, sizes: Sequence[Postfix]) -> str:
        """Where the size of an axis comes from."""
        (token, *rest), *others = sizes
        if rest or others:
            return ""
        source = self._shapes.sources.get(str(token))
        if source is None:
            return " (the kernel is made for it)" if isinstance(token, int) else ""
        names = [t.name for t in self.read]
        return f" ({token} of `{self.inputs[names.index(self.plan.tensors[source[0]].name)]}`)"

    def _check_heads(self, heads: Any, kv_heads: Any) -> None:
        text = f"kv_heads = {kv_heads} must divide heads = {heads}: give K and V fewer heads"
        torch._check_value(kv_heads > 0, lambda: text)
        torch._check_value(heads % kv_heads == 0, lambda: text)

    # --- what it returns ----------------------------------------------------------------------

    def sizes(self, arguments: Sequence[Any]) -> dict[str, Any]:
        """All run-time dims of a call."""
        found = self._shapes.dims(*self.arranged(arguments))
        if "kv_heads" in self.plan.dims and "heads" in found:  # as the launcher has it
            found.setdefault("kv_heads", found["heads"])
        return found

    def empty(self, arguments: Sequence[Any], types: Sequence[Any]) -> list[Any]:
        """New outputs of these types: as many as there are types, from the first on.

        Their shapes and strides are those of every call, traced or not: an output with the axes of
        the first input has its order of heads and rows in memory, others are contiguous.
        """
        given, dims = self.arranged(arguments)
        first, found = arguments[0], []
        for (index, like_first), kind in zip(self._written, types, strict=False):
            shape = self._shapes.of(index, given, dims)
            if like_first and _rows_outside(first):
                *outer, heads, rows, width = shape
                batch = (rows * heads * width,) if outer else ()
                strides = (*batch, width, heads * width, 1)
                found.append(first.new_empty_strided(shape, strides, dtype=kind))
            else:
                found.append(first.new_empty(shape, dtype=kind))
        return found

    def types_for(self, first: Any) -> Sequence[Any]:
        """The outputs' types: the plan's; on the CPU that of the first input, except fp32 ones."""
        fp8 = [getattr(torch, NAMES[name]) for name in _FP8]
        if first.device.type != "cpu" or first.dtype in fp8:
            return self.types
        return [dtype_of(t) if t.dtype == EXACT else first.dtype for t in self.written]

    def arranged(
        self, arguments: Sequence[Any], outputs: Sequence[Any] = ()
    ) -> tuple[Sequence[Any], Sequence[Any]]:
        """The tensors and the dims in the plan's order, None for what is not given."""
        missing = self._no_outputs[len(outputs) :]
        given = self._in_plan_order((*self.tensors(arguments), *outputs, *missing))
        if not self.dims:
            return given, self._no_dims
        extra = dict(zip(self.dims, arguments[len(self.read) :], strict=True))
        return given, [extra.get(name) for name in self.plan.dims]


def _has_heads_and_rows(tensor: PlanTensor) -> bool:
    """Whether a caller may have a tensor in either order of heads and rows."""
    labels = [axis.label for axis in tensor.axes]
    return len(set(labels)) == len(labels) and set("HLD") <= set(labels) <= set("BHGLD")


def _rows_outside(tensor: Any) -> bool:
    """Whether (..., heads, rows, dim) lies in memory as (..., rows, heads, dim)."""
    *_, heads, rows, _ = tensor.stride()
    found = heads < rows
    return found if found is True or found is False else guard_or_false(found)


def dtype_of(tensor: PlanTensor) -> Any:
    """The torch.dtype of a tensor of the plan."""
    return getattr(torch, NAMES[tensor.dtype])
