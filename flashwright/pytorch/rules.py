"""What autograd, autocast and vmap do with an operator. Each class holds the rules of one operator.

The backward of a kernel is a package of its own, derived from its program and made at the first
`backward()`. If none can be derived, `backward()` raises. While torch.compile or torch.export trace
a model, nothing may raise yet, so there the backward is one more operator, which raises when it
runs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch._subclasses import FakeTensor
from torch.autograd import forward_ad

from flashwright.build.arrays import NO_GRADIENT
from flashwright.build.plan_rules import caller_order
from flashwright.lower.launch_plan import PlanTensor
from flashwright.pytorch.lists import of_keys
from flashwright.pytorch.signature import EXACT, LAYOUT, Signature, dtype_of

NO_BACKWARD = "no_backward"
"""The operator that stands for a gradient that no kernel computes."""
NO_BACKWARD_SCHEMA = f"{NO_BACKWARD}(Tensor grad, SymInt[] size, str name, str why) -> Tensor"
_NARROW = ("fp16", "bf16")


class NoBackward(RuntimeError):
    """A gradient that no kernel computes, and why."""


def refuse_backward(grad: Any, size: Sequence[int], name: str, why: str) -> Any:
    """The implementation of that operator."""
    raise NoBackward(f"backward of flashwright::{name}: {NO_GRADIENT} ({why})")


def fake_backward(grad: Any, size: Sequence[Any], name: str, why: str) -> Any:
    """Its shape, for tracing."""
    return grad.new_empty(size)


_DETERMINISTIC: ContextVar[bool | None] = ContextVar("deterministic", default=None)


@contextmanager
def with_backward(deterministic: bool) -> Iterator[None]:
    """Calls inside have a deterministic backward, or one that need not be, whatever PyTorch's
    setting is."""
    before = _DETERMINISTIC.set(deterministic)
    try:
        yield
    finally:
        _DETERMINISTIC.reset(before)


def in_forward_mode() -> bool:
    """Whether forward-mode derivatives are computed."""
    return int(getattr(forward_ad, "_current_level", -1)) >= 0


def is_deterministic(asked: bool | None) -> bool:
    """Whether gradients have the same bits in every run: as asked, else by PyTorch's setting."""
    return torch.are_deterministic_algorithms_enabled() if asked is None else asked


class Backward(Protocol):
    """The backward of a kernel as an operator: by their names it takes the kernel's inputs, its
    outputs and their gradients (`do`, `dlse`), and gives those of the inputs (`dQ`)."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    dims: tuple[str, ...]
    """Sizes that no tensor shows, given by name."""

    def compute(self, *tensors: Any, **dims: Any) -> Sequence[Any]:
        """All outputs."""


Tensors = Mapping[str, Any]
BackwardTrial = Callable[[Tensors, Tensors], None]
"""A look at gradients: the tensors of a backward by their names, and what it gave."""


@dataclass(frozen=True)
class BackwardOf:
    """Which backward a call needs: the outputs that have a gradient, the inputs that need one, and
    whether it is to have the same bits in every run."""

    outputs: tuple[str, ...]
    inputs: tuple[str, ...]
    deterministic: bool


class Gradient:
    """Autograd: on the CPU the gradient of the reference, on a GPU the derived backward."""

    def __init__(
        self,
        name: str,
        signature: Signature,
        operator: Any,
        reference: Callable[..., Any] | None,
        derived: Callable[[BackwardOf], Backward | str],
        check: Callable[[BackwardOf, Tensors, Tensors], None] = lambda of, given, found: None,
    ) -> None:
        self.name, self.signature, self.operator = name, signature, operator
        self.reference = reference
        self.derived = derived
        """The backward for a call, or why there is none."""
        self.check = check
        methods = (self.forward, self.setup_context, self.backward, self.jvp)
        names = {method.__name__: staticmethod(method) for method in methods}
        self.function: Any = type(f"Attention_{name}", (torch.autograd.Function,), names)

    def __call__(self, *arguments: Any) -> Any:
        """The operator under autograd. torch.library.register_autograd would do less: its results
        have a forward-mode derivative of 0."""
        forward_mode = in_forward_mode()
        if not forward_mode and not (torch.is_grad_enabled() and self._recorded(arguments)):
            return self.forward(*arguments)
        in_transform = torch._C._are_functorch_transforms_active()  # torch.func.grad and others
        if not forward_mode and not in_transform:
            return self.function.apply(*arguments)
        if self.reference is not None and arguments[0].device.type == "cpu":
            self.signature.check(arguments)
            return self.reference(*arguments)
        return self.jvp() if in_transform else self.function.apply(*arguments)

    def _recorded(self, arguments: Sequence[Any]) -> bool:
        return any(t.requires_grad for t in self.signature.tensors(arguments))

    def jvp(self, *_: Any) -> Any:
        """A forward-mode derivative, and any derivative by torch.func: there is none."""
        raise RuntimeError(f"derivative of flashwright::{self.name}: {NO_GRADIENT}")

    def forward(self, *arguments: Any) -> Any:
        """The operator's implementation for these tensors."""
        with torch._C._AutoDispatchBelowAutograd():
            return self.operator(*arguments)

    def setup_context(self, ctx: Any, inputs: Sequence[Any], output: Any) -> None:
        """Keep what the backward needs; a backward that only raises keeps no tensors."""
        tensors = self.signature.tensors(inputs)
        ctx.shapes = [t.shape for t in tensors]
        ctx.more = inputs[len(tensors) :]
        ctx.deterministic = _DETERMINISTIC.get()
        ctx.on_cpu = tensors[0].device.type == "cpu" and self.reference is not None
        if ctx.on_cpu:
            ctx.save_for_backward(*tensors)
        else:
            found = output if isinstance(output, tuple) else (output,)
            ctx.save_for_backward(*tensors, *found)
            ctx.set_materialize_grads(False)

    def backward(self, ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """The inputs' gradients, None for those that need none."""
        needed, rest = ctx.needs_input_grad[: len(ctx.shapes)], (None,) * len(ctx.more)
        if ctx.on_cpu:
            return (*self._by_torch(ctx.saved_tensors, ctx.more, grads, needed), *rest)
        return (*self._by_kernel(ctx, grads, needed), *rest)

    def _by_kernel(self, ctx: Any, grads: Sequence[Any], needed: Any) -> list[Any]:
        """The derived backward, or the operator that raises."""
        of = {n: g for n, g in zip(self.signature.outputs, grads, strict=True) if g is not None}
        wanted, made = self._derived(tuple(of), self._wanted(needed), ctx.deterministic)
        names = [*self.signature.inputs, *(name.lower() for name in self.signature.outputs)]
        saved = ctx.saved_tensors  # once: torch.utils.checkpoint allows no more
        given = dict(zip(names, saved, strict=True))
        given |= {f"d{name.lower()}": grad for name, grad in of.items()}
        why = made if isinstance(made, str) else self._obstacle(made, needed)
        if why is not None:
            refuse = torch.ops.flashwright.no_backward
            return [
                refuse(saved[0], shape, self.name, why) if asked else None
                for shape, asked in zip(ctx.shapes, needed, strict=True)
            ]
        assert not isinstance(made, str)
        given |= of_keys(made.inputs, given)
        for name in set(made.inputs) - given.keys():  # an output that the caller has not used
            given[name] = torch.zeros_like(given[name.removeprefix("d")])
        sizes = dict(zip(self.signature.dims, ctx.more, strict=True))
        dims = {name: sizes[name] for name in made.dims}
        results = made.compute(*(_with_rows(given[name]) for name in made.inputs), **dims)
        found = dict(zip((name.lower() for name in made.outputs), results, strict=True))
        if not any(isinstance(tensor, FakeTensor) for tensor in results):
            self.check(wanted, given, found)
        each = zip(self.signature.inputs, needed, strict=True)
        return [found[f"d{name}"] if asked else None for name, asked in each]

    def _wanted(self, needed: Sequence[bool]) -> tuple[str, ...]:
        """The inputs whose gradients are computed: those that need one, and always those of q, k
        and v, so that there are few kernels."""
        each = zip(self.signature.inputs, needed, strict=True)
        return tuple(name for name, asked in each if asked or name in ("q", "k", "v"))

    def _derived(
        self, outputs: tuple[str, ...], inputs: tuple[str, ...], deterministic: bool | None
    ) -> tuple[BackwardOf, Backward | str]:
        """The backward of a call, by PyTorch's setting if the call has none of its own. Where that
        only warns, one that is not deterministic is better than none."""
        of = BackwardOf(outputs, inputs, is_deterministic(deterministic))
        made = self.derived(of)
        lenient = deterministic is None and torch.is_deterministic_algorithms_warn_only_enabled()
        if isinstance(made, str) and of.deterministic and lenient:
            warnings.warn(f"flashwright::{self.name} is not deterministic: {made}", stacklevel=2)
            of = replace(of, deterministic=False)
            made = self.derived(of)
        return of, made

    def _obstacle(self, made: Backward, needed: Any) -> str | None:
        """Why a call cannot have its gradients, if so."""
        for name, asked in zip(self.signature.inputs, needed, strict=True):
            if asked and f"d{name}" not in {n.lower() for n in made.outputs}:
                return f"the backward gives no gradient of {name}"
        return None

    def _by_torch(
        self, tensors: Sequence[Any], more: Sequence[Any], grads: Sequence[Any], needed: Any
    ) -> list[Any]:
        """Compute the reference again, with a graph, and go back through it."""
        assert self.reference is not None
        again = torch.is_grad_enabled()  # for second derivatives
        with torch.enable_grad(), torch.autocast("cpu", enabled=False):
            # Views, since the same tensor may be given as several inputs.
            views = [t.view_as(t) for t in tensors]
            found = self.reference(*views, *more)
            found = found if isinstance(found, tuple) else (found,)
            asked = [t for t, wanted in zip(views, needed, strict=True) if wanted]
            each = iter(torch.autograd.grad(found, asked, grads, create_graph=again))
        return [next(each) if wanted else None for wanted in needed]


def _with_rows(tensor: Any) -> Any:
    """A tensor that kernels can read. A gradient may be a number that is expanded."""
    return tensor if tensor.stride(-1) == 1 and 0 not in tensor.stride() else tensor.contiguous()


class Autocast:
    """torch.autocast: the inputs take the kernel's type; on the CPU they take autocast's.

    Inputs that the kernel wants in fp32 become fp32. Nothing is cast to fp8, whose scale is the
    caller's choice.
    """

    def __init__(self, signature: Signature, operator: Any) -> None:
        self.signature, self.operator = signature, operator

    def on_cuda(self, *arguments: Any) -> Any:
        """The operator under autocast with CUDA tensors."""
        return self._call("cuda", arguments, None)

    def on_cpu(self, *arguments: Any) -> Any:
        """The operator under autocast with CPU tensors."""
        return self._call("cpu", arguments, torch.get_autocast_dtype("cpu"))

    def _call(self, device: str, arguments: Sequence[Any], kind: Any) -> Any:
        tensors = self.signature.tensors(arguments)
        cast = [
            self._cast(plan, tensor, kind)
            for plan, tensor in zip(self.signature.read, tensors, strict=True)
        ]
        with torch.autocast(device, enabled=False):
            return self.operator(*cast, *arguments[len(cast) :])

    @staticmethod
    def _cast(plan: PlanTensor, tensor: Any, kind: Any) -> Any:
        # As torch's own operators: fp64 stays, so that it is never lost unasked.
        if not tensor.is_floating_point() or tensor.dtype == torch.float64:
            return tensor
        if plan.dtype == EXACT:
            return tensor.to(torch.float32)
        return tensor.to(kind or dtype_of(plan)) if plan.dtype in _NARROW else tensor


class Vmap:
    """torch.vmap: the mapped axis becomes part of the batch."""

    def __init__(self, name: str, signature: Signature, operator: Any) -> None:
        self.name, self.signature, self.operator = name, signature, operator

    def __call__(self, info: Any, in_dims: Sequence[Any], *arguments: Any) -> Any:
        """The operator's results for a mapped call, and the mapped axis of each."""
        many, signature = info.batch_size, self.signature
        tensors = signature.tensors(arguments)
        rows = zip(signature.inputs, signature.read, tensors, in_dims, strict=False)
        folded = [self._fold(name, plan, t, axis, many) for name, plan, t, axis in rows]
        found = self.operator(*folded, *arguments[len(tensors) :])
        each = found if isinstance(found, tuple) else (found,)
        places = [self._batch(t.name, t) for t in signature.written]
        apart = [
            t.unflatten(place, (many, t.shape[place] // many))
            for t, place in zip(each, places, strict=True)
        ]
        return signature.results(apart), signature.results(places)

    def _fold(self, name: str, plan: PlanTensor, tensor: Any, mapped: int | None, many: int) -> Any:
        if mapped is None and self._batch_or_none(plan) is None:
            return tensor  # the same for the whole batch
        place = self._batch(name, plan)
        if mapped is None:
            tensor = tensor.unsqueeze(place)
            sizes = [*tensor.shape]
            sizes[place] = many
            return tensor.expand(sizes).flatten(place, place + 1)
        return tensor.movedim(mapped, place).flatten(place, place + 1)

    def _batch(self, name: str, plan: PlanTensor) -> int:
        place = self._batch_or_none(plan)
        if place is None:
            text = (
                f"torch.vmap over `{name}` of flashwright::{self.name}: it has no batch axis that "
            )
            raise ValueError(f"{text}the mapped one could join; map over the other tensors only")
        return place

    @staticmethod
    def _batch_or_none(plan: PlanTensor) -> int | None:
        """The batch axis of a tensor as the caller has it."""
        for place, parts in enumerate(caller_order(plan, LAYOUT)):
            if [plan.axes[p].size for p in parts] == [("batch",)]:
                return place
        return None
