"""A kernel package as a torch operator: `torch_operator(folder)(q, k, v)`."""

from __future__ import annotations

import json
import re
import shutil
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from flashwright import spec as specs
from flashwright.build import classes
from flashwright.build.package import CLASSES, STEPS, inside
from flashwright.build.reading import CUBIN, PLAN, PTX
from flashwright.build.steps import StepsKernel
from flashwright.files import content, sha256
from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.pytorch import reference, rules
from flashwright.pytorch.bound import Bound, Form, new_outputs
from flashwright.pytorch.signature import Signature
from flashwright.spec import AttentionSpec

_NAMESPACE = "flashwright"
_DIGITS = 12  # of the digest in an operator's name
_MOST_FORMS = 64  # of calls whose launches are kept ready
_TAGS = ("pt2_compliant_tag", "needs_exact_strides")


class Operator:
    """A kernel package as a torch operator. Call it with tensors on a CUDA device or on the CPU.

    `inputs` are the names of its tensors, `dims` those of sizes that no tensor shows, `outputs`
    those of its results; `op` is the operator as torch has it (an OpOverload), which returns all
    outputs.
    """

    def __init__(self, signature: Signature, package: _Package, op: Any, on_cuda: _OnCuda) -> None:
        self.inputs, self.outputs, self.op = signature.inputs, signature.outputs, op
        self.dims = signature.dims
        self._package, self._on_cuda = package, on_cuda
        self._lse = self.outputs.index("LSE") if "LSE" in self.outputs else None

    def __repr__(self) -> str:
        return f"<torch operator {self.op._schema}>"

    def check_first_backward(self, trial: rules.BackwardTrial) -> None:
        """Let `trial` look at the first gradients, if the backward is made for them. It gets the
        tensors of the backward and the gradients by their names, and raises if they are wrong."""
        if self._package.awaits_backward:
            self._package.backward_trial = trial

    def __deepcopy__(self, memo: object) -> Operator:
        """Itself: a copy of a model uses the same operator."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """A pickled operator is its folder: the process that reads it needs the package there."""
        return torch_operator, (str(self._package.folder),)

    def __call__(
        self,
        *tensors: Any,
        return_lse: bool = False,
        deterministic: bool | None = None,
        **more: Any,
    ) -> Any:
        """O, or O and LSE with `return_lse`.

        Tensors come in the order of `inputs`, or by name, as (batch, heads, length, dim). A
        dimension that no tensor has as an axis is given by name, as in `tokens=4096`. With
        `deterministic` the backward gives the same bits in every run; by default it does if
        PyTorch's deterministic algorithms are on.
        """
        lse = self._lse if return_lse else 0
        if lse is None or (return_lse and len(self.outputs) < 2):
            given = ", ".join(self.outputs)
            raise ValueError(f"return_lse: the kernel has no LSE; its outputs are {given}")
        found = self.compute(*tensors, all_outputs=return_lse, deterministic=deterministic, **more)
        return (found[0], found[lse]) if return_lse else found[0]

    def compute(
        self,
        *tensors: Any,
        all_outputs: bool = True,
        deterministic: bool | None = None,
        **more: Any,
    ) -> Sequence[Any]:
        """The outputs in their order; others than the first may be missing if not all are asked
        for."""
        whole = len(tensors) == len(self.inputs) and tuple(more) == self.dims
        if whole and undisturbed(tensors) and tensors[0].is_cuda:
            return self._on_cuda.launch((*tensors, *more.values()), all_outputs)
        results = self._recorded(tensors, more, deterministic)
        return results if len(self.outputs) > 1 else (results,)

    def bound(self, tensors: Sequence[Any], dims: Mapping[str, int], form: Form) -> Bound:
        """A call with CUDA tensors of these shapes, strides, types and device, without PyTorch's
        dispatcher: only for calls that are `undisturbed`."""
        return self._on_cuda.bound((*tensors, *(dims[name] for name in self.dims)), form)

    def _recorded(
        self, tensors: Sequence[Any], more: Mapping[str, Any], deterministic: bool | None
    ) -> Any:
        """The operator's results, with what autograd needs to know."""
        if deterministic is None:
            return self.op(*tensors, **more)
        with rules.with_backward(deterministic):
            return self.op(*tensors, **more)


_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))


def undisturbed(tensors: Sequence[Any]) -> bool:
    """Whether PyTorch's dispatcher would only choose the kernel by the device: the tensors are
    plain, and no gradient, autocast, transform, mode or tracer sees the call."""
    if (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._are_functorch_transforms_active()
        or torch._C._is_any_autocast_enabled()
        or torch._C._get_tracing_state() is not None
        or rules.in_forward_mode()
    ):
        return False
    recorded = torch.is_grad_enabled()
    for tensor in tensors:
        if type(tensor) not in _PLAIN or (recorded and tensor.requires_grad):
            return False
    return True


def torch_operator(folder: str | Path) -> Operator:
    """The operator of a kernel package, registered at the first call for this content.

    Raises Failed with FW852 if the folder has no usable package.
    """
    folder = Path(folder).absolute()  # the kernel is loaded later, perhaps from another directory
    plan = classes.plan_of(folder)
    package = _Package(folder)
    name = f"{re.sub(r'[^A-Za-z0-9_]', '_', plan.entry)}_{package.digest[:_DIGITS]}"
    with _LOCK:
        known = _OPERATORS.get(name)
        if known is None:
            known = _OPERATORS[name] = _register(name, Signature(plan), package)
        else:
            known._package.folder = folder  # the same content, and certainly still there
        return known


_LOCK = threading.Lock()
_OPERATORS: dict[str, Operator] = {}
_LIBRARY = torch.library.Library(_NAMESPACE, "FRAGMENT")  # an operator lives as long as this
_LIBRARY.define(rules.NO_BACKWARD_SCHEMA, tags=(torch.Tag.pt2_compliant_tag,))
_LIBRARY.impl(rules.NO_BACKWARD, rules.refuse_backward, "CompositeExplicitAutograd")
torch.library.register_fake(f"{_NAMESPACE}::{rules.NO_BACKWARD}", rules.fake_backward, lib=_LIBRARY)


def _register(name: str, signature: Signature, package: _Package) -> Operator:
    """Define the operator and all of its implementations and rules."""
    qualified = f"{_NAMESPACE}::{name}"
    tags = [getattr(torch.Tag, tag) for tag in _TAGS if hasattr(torch.Tag, tag)]
    _LIBRARY.define(signature.schema(name), tags=tags)
    op = getattr(getattr(torch.ops, _NAMESPACE), name).default
    on_cpu = _OnCpu(qualified, signature, package.spec)

    def fake(*arguments: Any) -> Any:
        signature.check(arguments)
        return signature.results(signature.empty(arguments, signature.types_for(arguments[0])))

    on_cuda = _OnCuda(signature, package)
    _LIBRARY.impl(name, on_cuda.__call__, "CUDA")
    _LIBRARY.impl(name, on_cpu.__call__, "CPU")
    torch.library.register_fake(qualified, fake, lib=_LIBRARY)
    traced = None if on_cpu.obstacle else on_cpu.compute
    derived = (package.backward, package.check_backward)
    gradient = rules.Gradient(name, signature, op, traced, *derived)
    _LIBRARY.impl(name, gradient.__call__, "Autograd")
    autocast = rules.Autocast(signature, op)
    _LIBRARY.impl(name, autocast.on_cuda, "AutocastCUDA")
    _LIBRARY.impl(name, autocast.on_cpu, "AutocastCPU")
    torch.library.register_vmap(qualified, rules.Vmap(name, signature, op), lib=_LIBRARY)
    return Operator(signature, package, op, on_cuda)


class _Package:
    """A package on disk, and the kernels in it once they are loaded."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.digest = _digest(folder)
        self.spec = _spec(folder)
        self._lock = threading.Lock()
        self._backward: dict[rules.BackwardOf, Operator | str] = {}
        self._new_backward: set[rules.BackwardOf] = set()
        self.backward_trial: rules.BackwardTrial | None = None
        """What looks at the first gradients of a backward that was made now."""

    def load(self) -> Any:
        """The kernels as a function. Raises Failed if the package is another one by now."""
        with self._lock:
            if _digest(self.folder) != self.digest:
                text = f"{self.folder} has changed since its operator was made"
                hint = "make the operator again: flashwright.torch_operator(folder)"
                raise Failed(Diagnostic("FW852", text, help=hint))
            return classes.load(self.folder)

    def backward(self, of: rules.BackwardOf) -> Operator | str:
        """The operator of a backward of the package, made at the first call; why, if there is
        none."""
        if of not in self._backward:
            from flashwright.generate import backward, store  # here: a forward needs neither

            try:
                asked = (of.outputs, of.inputs, of.deterministic)
                folder, new = backward.find_or_make(self.folder, *asked, store.tell)
                self._backward[of] = torch_operator(folder)
                self._new_backward |= {of} if new else set()
            except (Failed, specs.BadSpec) as error:
                self._backward[of] = str(error)
        return self._backward[of]

    @property
    def awaits_backward(self) -> bool:
        """Whether there were no gradients yet."""
        return not self._backward or bool(self._new_backward)

    def check_backward(
        self, of: rules.BackwardOf, given: Mapping[str, Any], found: Mapping[str, Any]
    ) -> None:
        """Look at the first gradients of a backward that was made now. A wrong backward is removed
        from the store."""
        if of not in self._new_backward or self.backward_trial is None:
            return
        self._new_backward.discard(of)
        try:
            self.backward_trial(given, found)
        except Exception:
            made = self._backward.pop(of)
            if isinstance(made, Operator):
                shutil.rmtree(made._package.folder, ignore_errors=True)
            raise
        self.backward_trial = None


class _OnCuda:
    """The implementation for CUDA tensors: the kernel, loaded at the first call."""

    def __init__(self, signature: Signature, package: _Package) -> None:
        self.signature, self.package = signature, package
        self.kernel: Any = None
        self._bounds: dict[tuple[Any, ...], Bound] = {}

    def __call__(self, *arguments: Any) -> Any:
        """All outputs of a launch on the current stream."""
        return self.signature.results(self.launch(arguments, all_outputs=True))

    def bound(self, arguments: Sequence[Any], form: Form) -> Bound:
        """Launches for such arguments."""
        return Bound(self.signature, self._loaded(), arguments, form)

    def _loaded(self) -> Any:
        if self.kernel is None:
            self.kernel = self.package.load()
        return self.kernel

    def launch(self, arguments: Sequence[Any], all_outputs: bool) -> list[Any]:
        """The same as a list, or the first output alone: the kernel does not store the others."""
        signature, kernel = self.signature, self._loaded()
        if isinstance(kernel, StepsKernel) and signature.tensors(arguments)[0].numel():
            return self._ready(arguments, all_outputs)(*signature.tensors(arguments))
        types = signature.types if all_outputs else signature.types[:1]
        found = new_outputs(signature, kernel, arguments, types)
        kernel.launch(*signature.arranged(arguments, found))
        return found

    def _ready(self, arguments: Sequence[Any], all_outputs: bool) -> Bound:
        """The launches of several kernels for arguments of these shapes: they take the host long to
        prepare, and are kept for the next call."""
        tensors = self.signature.tensors(arguments)
        shapes = tuple((t.shape, t.stride(), t.dtype) for t in tensors)
        form = (all_outputs, tensors[0].device, shapes, *arguments[len(tensors) :])
        found = self._bounds.get(form)
        if found is None:
            while len(self._bounds) >= _MOST_FORMS:
                del self._bounds[next(iter(self._bounds))]
            count = None if all_outputs else 1
            found = self.bound(arguments, lambda outputs: outputs[:count])
            self._bounds[form] = found
        return found


class _OnCpu:
    """The implementation for CPU tensors: the spec's definition in PyTorch."""

    def __init__(self, name: str, signature: Signature, spec: AttentionSpec | None) -> None:
        self.name, self.signature, self.spec = name, signature, spec
        self.obstacle = reference.obstacle(spec, signature.plan)

    def __call__(self, *arguments: Any) -> Any:
        """All outputs, computed in fp32."""
        if self.obstacle:
            text = f"{self.name} has no implementation for CPU tensors: {self.obstacle}"
            raise NotImplementedError(f"{text}; call it with CUDA tensors")
        self.signature.check(arguments)
        new = self.signature.empty(arguments, self.signature.types_for(arguments[0]))
        found = self._all(arguments)
        return self.signature.results([n.copy_(t) for n, t in zip(new, found, strict=True)])

    def compute(self, *arguments: Any) -> Any:
        """The same without checks, by operations that autograd can follow."""
        return self.signature.results(self._all(arguments))

    def _all(self, arguments: Sequence[Any]) -> Sequence[Any]:
        assert self.spec is not None
        names = [tensor.name for tensor in self.signature.read]
        given = {n.lower(): t for n, t in zip(names, arguments, strict=True)}
        out, lse = reference.attention(self.spec, **given)
        kinds = self.signature.types_for(arguments[0])
        found = {"O": out, "LSE": lse}
        return [found[n].to(k) for n, k in zip(self.signature.outputs, kinds, strict=True)]


def _spec(folder: Path) -> AttentionSpec | None:
    """The package's spec, or None without the file. Raises Failed if it is not valid."""
    path = folder / classes.SPEC
    try:
        return specs.load(path) if path.is_file() else None
    except specs.BadSpec as error:
        raise Failed(*(Diagnostic("FW852", line) for line in error.lines)) from None


def _digest(folder: Path) -> str:
    """A digest of the files that decide what the package computes and how it is called."""
    found = {name: content(folder / name) for name in (CLASSES, STEPS, classes.SPEC)}
    for kernel, place in classes.folders(folder).items():
        for name in (PLAN, classes.SPEC, CUBIN, PTX):
            found[inside(kernel, name)] = content(place / name)
    return sha256(json.dumps({n: sha256(d) for n, d in sorted(found.items()) if d is not None}))
