"""`torch.compile(model, backend="flashwright")`: kernels of ours for a model's flex_attention.

Each call of flex_attention in the graph that Dynamo hands over becomes a kernel, made here if the
store does not have it, and Inductor compiles the rest. If gradients may be asked for, the derived
backward is made here too: AOTAutograd finds it by the rules of the kernel's operator. A call that
no kernel or no backward can be made for stays PyTorch's, with one warning that has the reason. On
CPU tensors every call stays PyTorch's.

The backend is an entry point of PyTorch's (group `torch_dynamo_backends`): PyTorch imports this
module when a model first asks for it.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from flashwright.author.builtin.mods_reference import evaluate
from flashwright.flex import graphs
from flashwright.flex.attention import card_of
from flashwright.flex.capture import Captured, Function, Source, capture
from flashwright.flex.gradient_trial import GradientTrial
from flashwright.flex.graphs import FlexNode
from flashwright.flex.lists import Extent, Seen, disagreement
from flashwright.flex.task import NoKernel, Task, WrongKernel, dims_of, order_of, spec_of
from flashwright.flex.trial import check
from flashwright.generate import store
from flashwright.lang.diagnostic import Failed
from flashwright.lang.nodes import Name, expressions
from flashwright.pytorch.operator import Operator, torch_operator
from flashwright.pytorch.rules import NoBackward
from flashwright.spec import scale_of

Compiled = Callable[..., Any]
Compiler = Callable[[GraphModule, Sequence[Any]], Compiled]

REST = "rest"
"""The option that names the backend of the rest of the graph."""
MAX_SCORES = 2
"""The number of that output of flex_attention, after O and LSE."""


def backend(
    graph: GraphModule,
    inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Compiled:
    """A graph of Dynamo, compiled. `options` and `mode` are Inductor's, but for the option `rest`:
    the backend that compiles what is not flex_attention."""
    compiler = _compiler(mode, dict(options or {}))
    taken = []
    work = _Compilation(graph, graphs.with_data(inputs))
    for call in graphs.flex_nodes(graph):
        if not call.known or takes(graphs.example(call.tensors[0]).device):
            try:
                taken.append(work.replacement(call))
            except _Stays as reason:
                _warn(call, str(reason))
    if not taken:
        return compiler(graph, inputs)
    guards = list({id(one.guard): one.guard for one in taken if one.guard}.values())
    original = _copied(graph) if guards else graph
    for number, one in enumerate(taken):
        one.put(f"flashwright_{number}")
    graph.recompile()
    compiled = compiler(graph, inputs)
    return _Guarded(compiled, guards, _PyTorchs(original, compiler)) if guards else compiled


def takes(device: Any) -> bool:
    """Whether kernels run on a device."""
    return bool(device.type == "cuda")


def operator_of(order: store.Order) -> Operator:
    """The kernel of an order as an operator; made if the store does not have it."""
    return torch_operator(store.find_or_make(order, store.tell))


def _compiler(mode: str | None, options: dict[str, Any]) -> Compiler:
    rest = options.pop(REST, "inductor")
    if rest == "inductor":
        return torch._TorchCompileInductorWrapper(mode, options, None)  # type: ignore[no-any-return]
    if mode or options:
        given = ", ".join([*options, *(["mode"] if mode else [])])
        raise ValueError(f"{given}: an option of Inductor, but `rest` is {rest!r}; leave one out")
    found: Compiler = torch._dynamo.lookup_backend(rest)
    return found


class _Stays(Exception):
    """Why a call of flex_attention stays PyTorch's."""


_WARNED: set[tuple[str, str]] = set()


def _warn(call: FlexNode, reason: str) -> None:
    """Say once for each call and reason why PyTorch computes it."""
    if (call.place, reason) in _WARNED:
        return
    _WARNED.add((call.place, reason))
    file, _, line = call.place.rpartition(":")
    text = f"flashwright: this flex_attention stays PyTorch's: {reason}"
    warnings.warn_explicit(text, RuntimeWarning, file or call.place, int(line) if file else 0)


# --- one call of flex_attention -----------------------------------------------------------------


@dataclass(frozen=True)
class _Replacement:
    """A call and what stands in for it."""

    call: FlexNode
    kernel: _Kernel
    guard: _Guard | None
    """What must hold in each run; None if nothing can change."""

    def put(self, name: str) -> None:
        """Change the graph. The node's users take O and LSE by number, as before."""
        owner, node = self.call.owner, self.call.node
        owner.add_submodule(name, self.kernel)
        given = (*self.call.tensors, *self.call.buffers)
        with owner.graph.inserting_before(node):
            made = owner.graph.call_module(name, given)
        made.meta = {**node.meta, "example_value": node.meta["example_value"][:2]}
        for user in list(node.users):
            if user.args[1] == MAX_SCORES:  # which nothing reads
                owner.graph.erase_node(user)
        node.replace_all_uses_with(made)
        owner.graph.erase_node(node)
        owner.recompile()


class _Compilation:
    """The replacements within one graph. Calls that are alike share a kernel, and calls with the
    same BlockMask share its guard: a model calls flex_attention in each of its layers."""

    def __init__(self, graph: GraphModule, real: Sequence[Any]) -> None:
        self.graph, self.real = graph, real
        self.given = dict(zip(graphs.placeholders(graph), real, strict=True))
        self.kernels: dict[Any, _Kernel] = {}
        self.guards: dict[Any, _Guard] = {}

    def replacement(self, call: FlexNode) -> _Replacement:
        """A kernel for a call. Raises _Stays with the reason if there is none."""
        _check(call)
        with _untraced():
            try:
                guard = self._guard(call)
                key = call.key
                if key not in self.kernels:
                    self.kernels[key] = self._kernel(call)
                return _Replacement(call, self.kernels[key], guard)
            except (NoKernel, NoBackward, WrongKernel, ValueError) as error:
                raise _Stays(str(error)) from None
            except Failed as error:
                raise _Stays("; ".join(d.message for d in error.diagnostics)) from None

    def _kernel(self, call: FlexNode) -> _Kernel:
        """The kernel, with its first output and its first gradients checked."""
        query, key, value = (_random(call, node) for node in call.tensors)
        dims = dims_of(query, key)
        scale = scale_of(graphs.constant(call.scale), query.shape[3])
        spec = spec_of(query, key, value, scale=scale)
        task = Task(spec, card_of(query.device))
        values = {b: graphs.concrete(b, self.given) for b in call.buffers}
        on_cpu = {b: v.cpu() for b, v in values.items()}
        captured = _plain(capture(*_functions(call, on_cpu), dims))
        operator = operator_of(order_of(task, captured))
        kernel = _Kernel(call, operator, captured, [on_cpu[b] for b in call.buffers])
        given = (query, key, value, *(values[b] for b in call.buffers))
        functions = _functions(call, values)
        check(kernel(*given)[0], *functions, spec, dims, {"q": query, "k": key, "v": value})
        if any(call.wanted_grads):
            operator.check_first_backward(GradientTrial(spec, *functions, {}))
            _differentiate(call, kernel, given)
        return kernel

    def _guard(self, call: FlexNode) -> _Guard | None:
        """What must hold for the lists of a call's BlockMask; None without one. Raises _Stays if
        it does not hold in the call that is compiled."""
        if not call.lists:
            return None
        node, inputs = graphs.outermost(self.graph, call)
        own = (*call.lists.values(), *call.lengths, *call.block_size, *call.mask_buffers)
        wanted = tuple(inputs.get(value, value) for value in own)
        if any(isinstance(value, Node) and value.graph is not node.graph for value in wanted):
            raise _Stays("its BlockMask is made inside torch.utils.checkpoint; make it outside")
        key = (wanted, call.mask_text)
        if key not in self.guards:
            part, numbers = graphs.part(self.graph, wanted, node)
            guard = _Guard(call, part, numbers, self._differs(call), Seen())
            guard.check_now(self.real)
            self.guards[key] = guard
        return self.guards[key]

    def _differs(self, call: FlexNode) -> tuple[bool, bool]:
        """Whether the mask may differ within the batch, and from head to head."""
        shapes = [graphs.example(node).shape for node in call.tensors[:2]]
        sizes = [[graphs.size(n) for n in shape] for shape in shapes]
        lengths = {"batch": sizes[0][0], "heads": sizes[0][1]}
        lengths |= {"q_len": sizes[0][2], "kv_len": sizes[1][2]}
        values = [graphs.concrete(b, self.given).cpu() for b in call.mask_buffers]
        mask = capture(None, call.mask(values), lengths).mods.mask
        assert mask is not None
        names = {e.id for e in expressions(mask) if isinstance(e, Name)}
        one = [isinstance(n, int) and n == 1 for n in shapes[0][:2]]
        return "batch_idx" in names and not one[0], "head_idx" in names and not one[1]


def _check(call: FlexNode) -> None:
    """Raise _Stays for a call that no kernel computes."""
    if not call.known:
        raise _Stays(f"PyTorch {torch.__version__} records it in a form that is not known here")
    if MAX_SCORES in call.wanted_outputs:
        raise _Stays("max_scores is no output of our kernels; ask for lse alone")


def _functions(call: FlexNode, values: Mapping[Any, Any]) -> tuple[Function, Function]:
    """score_mod and mask_mod with values for what they captured."""
    score = call.score([values[b] for b in call.score_buffers])
    return score, call.mask([values[b] for b in call.mask_buffers])


def _differentiate(call: FlexNode, kernel: _Kernel, given: Sequence[Any]) -> None:
    """Run the backward that a call asks for, which makes it. Raises NoBackward if there is none."""
    with torch.enable_grad():
        pairs = zip(given, call.wanted_grads, strict=True)
        found = kernel(*(tensor.detach().requires_grad_(wanted) for tensor, wanted in pairs))
        used = [found[number] for number in call.wanted_outputs]
        torch.autograd.backward(used, [torch.randn_like(result) for result in used])


def _random(call: FlexNode, node: Node) -> Any:
    """Random numbers in the place of an input. Under autocast O has another type than it."""
    like = graphs.example(node)
    for axis in (1, 3):  # heads and head dim, which a kernel is made for
        graphs.constant(like.shape[axis])
    return torch.randn(graphs.shape(like), device=like.device).to(call.out.dtype)


def _plain(captured: Captured) -> Captured:
    """Without a mask that shows everything, which a call without a BlockMask has."""
    mask = captured.mods.mask
    constant = mask is not None and not any(isinstance(e, Name) for e in expressions(mask))
    if mask is None or not constant or not evaluate(mask, {}, {}):
        return captured
    return replace(captured, mods=replace(captured.mods, mask=None))


@contextlib.contextmanager
def _untraced() -> Iterator[None]:
    """Tensors have data here, though Dynamo traces."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with torch._guards.tracing(None), unset_fake_temporarily(), torch.no_grad():
        yield


class _Kernel(torch.nn.Module):  # type: ignore[misc,unused-ignore]  # torch may be absent
    """A kernel with the signature of its call: query, key, value, what the functions captured."""

    def __init__(
        self, call: FlexNode, operator: Operator, captured: Captured, buffers: Sequence[Any]
    ) -> None:
        """`buffers` has the tensors that were captured for those of the call."""
        super().__init__()
        self.operator, self.natural, self.dtype = operator, call.natural_lse, call.out.dtype
        self.sources: dict[str, tuple[int, tuple[str, ...], Any]] = {}
        for name, source in captured.sources.items():
            numbers = [n for n, buffer in enumerate(buffers) if buffer is source.tensor]
            if not numbers:
                raise NoKernel(
                    f"{call.place}: a function makes a tensor of its own; make it outside"
                )
            self.sources[name] = (numbers[0], source.axes, source.tensor.dtype)
        strides = [graphs.size(s) for s in call.out.stride()]
        self.memory = sorted(range(4), key=lambda axis: (-strides[axis], axis))
        """The axes of O from the slowest to the fastest."""

    def forward(self, query: Any, key: Any, value: Any, *buffers: Any) -> tuple[Any, Any]:
        """O in the memory order of PyTorch's, and LSE."""
        dims = dims_of(query, key)
        found = {
            name.lower(): Source(_tensor(buffers[number], dtype, query.device), axes).view(dims)
            for name, (number, axes, dtype) in self.sources.items()
        }
        given = zip("qkv", (query, key, value), strict=True)
        found |= {name: _aligned(tensor.to(self.dtype)) for name, tensor in given}
        if key.shape[0] == 1 and query.shape[0] != 1:
            shape = (query.shape[0], -1, -1, -1)
            found |= {name: found[name].expand(shape).contiguous() for name in "kv"}
        inputs = self.operator.inputs
        out, lse = self.operator(*(found[name] for name in inputs), return_lse=True)
        back = [self.memory.index(axis) for axis in range(4)]
        out = out.to(self.dtype).permute(self.memory).contiguous().permute(back)
        return out, lse if self.natural else lse / math.log(2)


def _aligned(tensor: Any) -> Any:
    """A tensor whose strides kernels can load: the last axis contiguous, others of 16 bytes."""
    unit = 16 // tensor.element_size()
    *others, last = tensor.stride()
    fits = last == 1 and all(stride % unit == 0 for stride in others)
    return tensor if fits else tensor.contiguous()


def _tensor(value: Any, dtype: Any, device: Any) -> Any:
    """What a function captured as a tensor on a device."""
    if isinstance(value, torch.Tensor):
        moved = value.to(device)
        return moved if not moved.dim() or moved.stride(-1) == 1 else moved.contiguous()
    return torch.full((), value, dtype=dtype, device=device)


# --- block masks --------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Guard:
    """A BlockMask whose lists must agree with its function, whenever one of them changes."""

    call: FlexNode
    part: Compiled
    """The lists, lengths, block size and what the mask captured, from inputs of the graph."""
    numbers: Sequence[int]
    """Which inputs `part` takes."""
    differs: tuple[bool, bool]
    seen: Seen

    def check_now(self, real: Sequence[Any]) -> None:
        """Raise _Stays if the lists disagree in the call that is compiled."""
        if all(real[number] is not None for number in self.numbers):
            obstacle = self.obstacle(real)
            if obstacle:
                raise _Stays(obstacle)

    def obstacle(self, inputs: Sequence[Any]) -> str:
        """Why PyTorch must compute a run with these inputs; empty if it need not."""
        own = [inputs[number] for number in self.numbers]
        if self.seen.same(own):
            return ""
        found = self.part(*own)
        lists = dict(zip(self.call.lists, found[:4], strict=True))
        q_len, kv_len, *block = (int(n) for n in found[4:8])
        extent = Extent(q_len, kv_len, (block[0], block[1]), self.differs)
        where = disagreement(lists, self.call.mask(found[8:]), extent)
        if where:
            return f"its BlockMask is not that of its mask function: {where}"
        self.seen.keep(own)
        return ""


class _Guarded:
    """A compiled graph; PyTorch's own attention runs if the lists of a BlockMask ask for it."""

    def __init__(self, compiled: Compiled, guards: Sequence[_Guard], other: Compiled) -> None:
        self.compiled, self.guards, self.other = compiled, guards, other

    def __call__(self, *inputs: Any) -> Any:
        for guard in self.guards:
            obstacle = guard.obstacle(inputs)
            if obstacle:
                _warn(guard.call, obstacle)
                return self.other(*inputs)
        return self.compiled(*inputs)


class _PyTorchs:
    """The graph as Dynamo made it, compiled when it is first needed, once for each shape."""

    def __init__(self, graph: GraphModule, compiler: Compiler) -> None:
        self.graph, self.compiler = graph, compiler
        self.known: dict[tuple[Any, ...], Compiled] = {}

    def __call__(self, *inputs: Any) -> Any:
        key = tuple(
            (*t.shape, *t.stride(), t.dtype) if isinstance(t, torch.Tensor) else t for t in inputs
        )
        if key not in self.known:
            self.known[key] = self.compiler(_copied(self.graph), list(inputs))
        return self.known[key](*inputs)


def _copied(graph: GraphModule) -> GraphModule:
    """A copy of a graph and of those inside it, without the values that they were traced with."""
    made = torch.fx.Graph()
    copies: dict[Node, Node] = {}
    made.output(made.graph_copy(graph.graph, copies))
    for node in made.nodes:
        node.meta = {n: v for n, v in node.meta.items() if n != "example_value"}
    found = GraphModule(graph, made)
    for name, inside in graph.named_children():
        if isinstance(inside, GraphModule):
            setattr(found, name, _copied(inside))
    return found
