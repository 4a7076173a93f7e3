"""FlexAttention's nodes in a graph of Dynamo, and their functions as capture.py takes them.

Dynamo hands a score_mod or a mask_mod over as a graph of its own. The tensors that the function
captured are inputs of the model's graph, so they may be others in each call.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node

from flashwright.flex.capture import REPLAYED, Function
from flashwright.flex.lists import LISTS

NO_BLOCKS = 1 << 30
"""The block size of a call without a BlockMask."""
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


class NoSize(ValueError):
    """A size of the graph that only a run knows."""


@dataclass(frozen=True)
class FlexNode:
    """A call of flex_attention in a graph of Dynamo."""

    owner: GraphModule
    node: Node
    args: tuple[Any, ...]
    """The node's arguments, which it loses when it is replaced."""
    grad: bool
    """Whether autograd records at this place."""

    @property
    def key(self) -> Any:
        """What a kernel for this call depends on. Alike calls have equal keys."""
        forms = tuple(_form(example(value)) for value in (*self.tensors, *self.buffers))
        same = tuple(self.buffers.index(buffer) for buffer in self.buffers)
        strides = tuple(map(str, self.out.stride()))
        options = (str(example(self.scale)), self.natural_lse, self.out.dtype, strides)
        functions = (self._text(self.args[3]), self.mask_text)
        return *functions, forms, same, options, self.wanted_grads, self.wanted_outputs

    @property
    def wanted_grads(self) -> tuple[bool, ...]:
        """For each tensor and buffer: whether autograd may ask for its gradient."""
        given = (example(value) for value in (*self.tensors, *self.buffers))
        return tuple(self.grad and getattr(one, "requires_grad", False) for one in given)

    @property
    def wanted_outputs(self) -> tuple[int, ...]:
        """The outputs that the graph uses, by number: O, LSE and max_scores."""
        return tuple(sorted({int(user.args[1]) for user in self.node.users if user.users}))

    @property
    def mask_text(self) -> Any:
        """mask_mod as text; two functions with the same text are the same."""
        return self._text(self._mask[-1])

    def _text(self, graph: Any) -> Any:
        module = getattr(self.owner, graph.target)
        own = any(node.op == "get_attr" for node in module.graph.nodes)  # which the text lacks
        return (module.code, len(self.score_buffers), id(module) if own else 0)

    @property
    def known(self) -> bool:
        """Whether this PyTorch hands the call over as it is read here."""
        plain = len(self.args) == 9 and not self.node.kwargs
        return plain and isinstance(self._mask, tuple) and len(self._mask) >= 9

    @property
    def tensors(self) -> tuple[Node, Node, Node]:
        """Query, key and value."""
        return self.args[0], self.args[1], self.args[2]

    @property
    def scale(self) -> Any:
        """The factor of the scores: a number, or a node."""
        return self.args[5]

    @property
    def natural_lse(self) -> bool:
        """Whether the caller takes LSE in natural logarithms; it is in powers of 2 otherwise."""
        options = self.args[6]
        return isinstance(options, dict) and options.get("BACKEND") == "FLASH"

    @property
    def score_buffers(self) -> tuple[Any, ...]:
        """What score_mod captured: nodes, or numbers."""
        return self._captured(7)

    @property
    def mask_buffers(self) -> tuple[Any, ...]:
        """What mask_mod captured."""
        return self._captured(8)

    @property
    def buffers(self) -> tuple[Any, ...]:
        """What both captured: score_mod's, then mask_mod's."""
        return (*self.score_buffers, *self.mask_buffers)

    def _captured(self, place: int) -> tuple[Any, ...]:
        return tuple(self.args[place]) if len(self.args) > place else ()

    @property
    def block_size(self) -> tuple[Any, Any]:
        """Rows and columns of a block of the BlockMask: numbers, or nodes."""
        return self._mask[-3], self._mask[-2]

    @property
    def lists(self) -> dict[str, Any]:
        """The BlockMask's lists of blocks; empty without a BlockMask."""
        if self.block_size == (NO_BLOCKS, NO_BLOCKS):
            return {}
        return dict(zip(LISTS, self._mask[2:6], strict=True))

    @property
    def lengths(self) -> tuple[Any, Any]:
        """The BlockMask's own q_len and kv_len."""
        return self._mask[0], self._mask[1]

    @property
    def _mask(self) -> Any:
        return self.args[4]

    @cached_property
    def place(self) -> str:
        """The user's line that calls flex_attention."""
        return user_line(self.node) or "flex_attention"

    @property
    def out(self) -> Any:
        """O as PyTorch would return it, without data."""
        return self.node.meta["example_value"][0]

    def score(self, values: Sequence[Any]) -> Replay:
        """score_mod, with these values for what it captured."""
        return self._replay(self.args[3], values, self.score_buffers)

    def mask(self, values: Sequence[Any]) -> Replay:
        """mask_mod, with these values for what it captured."""
        return self._replay(self._mask[-1], values, self.mask_buffers)

    def _replay(self, graph: Any, values: Sequence[Any], buffers: Sequence[Any]) -> Replay:
        module = getattr(self.owner, graph.target)
        names = [b.name if isinstance(b, Node) else "number" for b in buffers]
        return Replay(module, tuple(values), tuple(names), self.place)


def _form(value: Any) -> Any:
    """What of a value a kernel depends on."""
    if isinstance(value, torch.Tensor):
        return (*map(str, value.shape), value.dtype, value.device)
    return type(value)


class Replay:
    """A function of one element that Dynamo recorded, with values for what it captured."""

    def __init__(
        self, graph: GraphModule, values: tuple[Any, ...], names: tuple[str, ...], place: str
    ) -> None:
        self.graph, self.values = graph, values
        lines = [user_line(node) for node in graph.graph.nodes if node.op.startswith("call")]
        self.place = next((line for line in lines if line), place)
        self.tensors = {_plain(n): v for n, v in zip(names, values, strict=True)}

    def __call__(self, *indices: Any) -> Any:
        """The result for a score (if it takes one) and the indices of an element."""
        found = _WithLines(self.graph).run(*indices, *self.values)
        return found[0] if isinstance(found, tuple) else found

    def __repr__(self) -> str:
        return self.place


class _WithLines(Interpreter):  # type: ignore[misc,unused-ignore]  # torch may be absent
    """Tells capture.py the user's line of each node that it executes."""

    def run_node(self, n: Node) -> Any:
        token = REPLAYED.set(user_line(n) or "")
        try:
            return super().run_node(n)
        finally:
            REPLAYED.reset(token)


def _plain(name: str) -> str:
    """The name of a captured tensor in the user's text. Dynamo has l_doc_ for a local `doc`, and
    l_self_modules_layer_buffers_slopes_ for a module's `slopes`."""
    return re.sub(r"^(?:.*_(?:buffers|parameters)_|[a-z]_)", "", name).strip("_") or name


def user_line(node: Node) -> str | None:
    """The innermost line in a node's stack trace that is not PyTorch's; None without one."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    own = [f"{file}:{line}" for file, line in frames if not _is_torch(file)]
    return own[-1] if own else None


def _is_torch(file: str) -> bool:
    return re.search(r"[\\/]torch[\\/](?:nn|_dynamo|_functorch|_higher|utils|fx)", file) is not None


def flex_nodes(graph: GraphModule) -> Iterator[FlexNode]:
    """The calls of flex_attention in a graph and in the graphs inside it."""
    for owner in graph.modules():
        if not isinstance(owner, GraphModule):
            continue
        modes = [torch.is_grad_enabled()]
        for node in owner.graph.nodes:
            if node.op != "call_function":
                continue
            if node.target is torch._C._set_grad_enabled:
                modes[-1] = bool(node.args[0])
            elif node.target is torch.autograd.grad_mode._enter_inference_mode:
                modes.append(modes[-1] and not node.args[0])
            elif node.target is torch.autograd.grad_mode._exit_inference_mode:
                modes.pop()
            elif node.target is torch.ops.higher_order.flex_attention:
                yield FlexNode(owner, node, node.args, modes[-1])


def outermost(graph: GraphModule, call: FlexNode) -> tuple[Node, dict[Node, Any]]:
    """The node of a graph that runs a call, and what the inputs of a region around the call are in
    the graph. Raises ValueError for a region other than torch.utils.checkpoint's."""
    if call.owner is graph:
        return call.node, {}
    for node in graph.graph.nodes:
        if node.target is torch.ops.higher_order.tag_activation_checkpoint:
            body, *given = node.args
            if getattr(graph, body.target) is call.owner:
                return node, dict(zip(placeholders(call.owner), given, strict=True))
    raise ValueError("the lists of its BlockMask cannot be checked in a nested region of the graph")


def example(value: Any) -> Any:
    """The value of an argument while Dynamo traced: a tensor without data, or a number."""
    return value.meta["example_value"] if isinstance(value, Node) else value


def size(value: Any) -> int:
    """A size of the graph in the call that is compiled. Raises NoSize if no call shows it."""
    if isinstance(value, int):
        return value
    hint = value.node.hint
    if hint is None:
        raise NoSize(f"the size {value} is known at run time only")
    return int(hint)


def constant(value: Any) -> float:
    """A number that a kernel is made for. If calls may differ in it, Dynamo compiles the model
    again for another one. Raises NoSize if only a run knows it."""
    found = example(value)
    if isinstance(found, torch.SymInt | torch.SymFloat):
        if found.node.hint is None:
            raise NoSize(f"{found} is known at run time only")
        return float(found)  # a guard
    return float(found)


def shape(tensor: Any) -> tuple[int, ...]:
    """The shape of a tensor in the call that is compiled."""
    return tuple(size(n) for n in tensor.shape)


def concrete(value: Any, given: Mapping[Node, Any]) -> Any:
    """A tensor with data for an argument of a function: the call's own, if the graph has it as an
    input, else one of the same shape. A number becomes a tensor without axes."""
    own = given.get(value) if isinstance(value, Node) else value
    if isinstance(own, torch.Tensor):
        return own.detach()
    found = example(value)
    if isinstance(found, torch.Tensor):
        if not found.is_floating_point():  # 0 is an index of every axis
            return torch.zeros(shape(found), dtype=found.dtype, device=found.device)
        return torch.randn(shape(found), device=found.device).to(found.dtype)
    if isinstance(found, float | torch.SymFloat):
        hint = found if isinstance(found, float) else found.node.hint
        return torch.tensor(0.5 if hint is None else float(hint))
    return torch.tensor(size(found), dtype=torch.int32)


def placeholders(graph: GraphModule) -> list[Node]:
    """The inputs of a graph."""
    return [node for node in graph.graph.nodes if node.op == "placeholder"]


def with_data(inputs: Sequence[Any]) -> list[Any]:
    """The inputs of the call that is compiled, with None for those without data."""
    from torch._subclasses.fake_tensor import FakeTensor

    def found(value: Any) -> Any:
        if isinstance(value, torch.SymInt | torch.SymFloat):
            return value.node.hint
        return None if isinstance(value, FakeTensor) else value

    return [found(value) for value in inputs]


def part(graph: GraphModule, wanted: Sequence[Any], before: Node) -> tuple[Function, list[int]]:
    """The part of a graph that computes some arguments of a node, as a function of graph inputs.

    Returns the function and the numbers of its inputs. It computes all of `wanted`, in a tuple.
    """
    found = [value for value in wanted if isinstance(value, Node)]
    needed = set(_closure([*found, *_effects(graph, before)]))
    made = torch.fx.Graph()
    copies: dict[Node, Node] = {}
    numbers = []
    holders = placeholders(graph)
    for node in graph.graph.nodes:
        if node in needed:
            copies[node] = made.node_copy(node, copies.__getitem__)
            if node.op == "placeholder":
                numbers.append(holders.index(node))
    made.output(tuple(copies[v] if isinstance(v, Node) else v for v in wanted))
    return GraphModule(graph, made), numbers


def _effects(graph: GraphModule, before: Node) -> Iterator[Node]:
    """Nodes that act on others without being their inputs: vmap's levels, writes to tensors."""
    for node in graph.graph.nodes:
        if node is before:
            return
        module = getattr(node.target, "__module__", None) or ""
        name = getattr(node.target, "__name__", str(node.target))
        augmented = module == "_operator" and name[0] == "i" and hasattr(operator, name[1:])
        in_place = name.endswith("_") and not name.endswith("__")
        writes = node.op.startswith("call") and (in_place or augmented or "out" in node.kwargs)
        if module.endswith("predispatch") or name == "setitem" or writes:
            yield node


def _closure(nodes: Sequence[Node]) -> Iterator[Node]:
    seen: set[Node] = set()
    left = list(nodes)
    while left:
        node = left.pop()
        if node not in seen:
            seen.add(node)
            yield node
            left += node.all_input_nodes
