"""A task's module in a confined process: traced, its attention recognised and compared.

    python -m flashwright.formats.module_process FILE.py FORMAT [CONFIG.json]

The file is anybody's code. The process returns JSON only.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node

from flashwright.formats import recognise
from flashwright.formats.confined import answering
from flashwright.formats.recognise import Attention, Unrecognised
from flashwright.formats.task import ROBUST_KBENCH

FEW = 2, 40, 40, 40
"""The sizes to which the axes of inputs are reduced, where there are too many scores."""
TOLERANCE = 1e-5
"""Of the RMS; both sides compute in fp64 or fp32."""
_CONSTANT = ("PARAMETER", "BUFFER", "CONSTANT_TENSOR")


@dataclass(frozen=True)
class Traced:
    """A module's graph for inputs of some sizes."""

    graph: Graph
    places: Mapping[str, str]
    """Parameters and buffers: where the module has them, by the names of placeholders."""
    constants: Mapping[str, Any]
    """Their values."""
    attentions: Sequence[Attention]


class Module(torch.nn.Module):  # type: ignore[misc, unused-ignore]
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *given: Any) -> Any:
        """What the function gives."""
        return self.function(*given)


def told(file: str, form: str, *config: str) -> dict[str, Any]:
    """What is known of the task's attention, or why it is none."""
    try:
        return _told(form, Path(file), config)
    except Unrecognised as error:
        return {"wrong": str(error), "at": error.at}
    except Exception as error:  # the user's code fails
        lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == file]
        at = f"{Path(file).name}:{lines[-1]}" if lines else ""
        first = (str(error).strip() or "no message").splitlines()[0]
        return {"wrong": f"{type(error).__name__}: {first}", "at": at}


def _told(form: str, file: Path, config: Sequence[str]) -> dict[str, Any]:
    task = _imported(file)
    if form == ROBUST_KBENCH:
        model, inputs = _of_robust_kbench(task, json.loads(Path(config[0]).read_text()))
    else:
        model = task.Model(*task.get_init_inputs())
        inputs = _sizes_of(task.get_inputs)
    with torch.no_grad():
        traced = _trace(model, inputs)
        looked = _smaller(model, inputs, traced)
        told = [recognise.settings(one, looked.constants) for one in looked.attentions]
        if any(one != told[0] for one in told):
            raise Unrecognised(f"its attentions differ, and a package has one: {told}")
        pairs = zip(looked.attentions, told, strict=True)
        errors = [recognise.error(one, known, looked.constants) for one, known in pairs]
    worst = max(errors)
    if not worst <= TOLERANCE:
        text = f"what was recognised is off the task's own by {worst:.2g} of the RMS: {told[0]}"
        raise Unrecognised(text, looked.attentions[errors.index(worst)].out)
    steps, result = _steps(traced)
    names = [
        n.name for n in traced.graph.nodes if n.op == "placeholder" and n.name not in traced.places
    ]
    return {
        "settings": told[0],
        "rms": worst,
        "keys": max(one.shapes[1][-2] for one in traced.attentions),
        "arguments": names,
        "steps": steps,
        "result": result,
    }


def _imported(file: Path) -> Any:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _sizes_of(make: Callable[..., Any], **settings: Any) -> list[Any]:
    """Inputs of a task, tensors without values: memory that is never touched."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        made = make(**settings)
    return [torch.empty(x.shape, dtype=x.dtype) if isinstance(x, torch.Tensor) else x for x in made]


def _of_robust_kbench(task: Any, config: Mapping[str, Any]) -> tuple[torch.nn.Module, list[Any]]:
    """forward_fn as a module, and what Model calls it with."""

    def first(name: str) -> dict[str, Any]:
        found = config.get(f"single_{name}_configs") or [{}]
        return {**found[0], **(config.get("single_shared_configs") or [{}])[0]}

    given: list[Any] = []

    def recorded(*arguments: Any, **named: Any) -> Any:
        if named:
            raise Unrecognised(f"Model calls forward_fn with names: {', '.join(named)}")
        given[:] = arguments
        return task.forward_fn(*arguments)

    inputs = _sizes_of(task.get_inputs, **first("input"))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        model = task.Model(**first("init"))
        model(
            *(mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in inputs),
            fn=recorded,
        )
    arguments = [
        torch.empty(x.shape, dtype=x.dtype) if isinstance(x, torch.Tensor) else x for x in given
    ]
    return Module(task.forward_fn), arguments


# --- tracing ----------------------------------------------------------------------------------


def _trace(model: torch.nn.Module, inputs: Sequence[Any]) -> Traced:
    program = torch.export.export(model, tuple(inputs), strict=False)
    graph = program.graph_module.graph
    graph.eliminate_dead_code()
    kept = {**program.state_dict, **program.constants}
    places = {
        one.arg.name: str(one.target)
        for one in program.graph_signature.input_specs
        if one.kind.name in _CONSTANT and one.target is not None
    }
    if program.graph_signature.buffers_to_mutate:
        changed = ", ".join(program.graph_signature.buffers_to_mutate.values())
        raise Unrecognised(f"the module changes its buffers: {changed}")
    constants = {name: kept[where] for name, where in places.items() if where in kept}
    return Traced(graph, places, constants, recognise.find(graph, places))


def _smaller(model: torch.nn.Module, inputs: Sequence[Any], whole: Traced) -> Traced:
    """A trace with so few scores that all can be looked at: of fewer sequences, and of shorter ones
    if no mask could look different there."""
    found, given = whole, list(inputs)
    for axis, few in enumerate(FEW):
        if max(one.count for one in found.attentions) <= recognise.MOST:
            return found
        masked = any(recognise.has_constants(one) for one in found.attentions)
        sizes = {x.shape[axis] for x in given if isinstance(x, torch.Tensor) and x.ndim > axis}
        for size in sorted(size for size in sizes if size > few and not (axis and masked)):
            reduced = [_reduced(x, axis, size, few) for x in given]
            try:
                traced = _trace(model, reduced)
            except Exception:  # the module has this size elsewhere
                continue
            if _widths(traced) == _widths(whole):
                found, given = traced, reduced
    most = max(one.count for one in found.attentions)
    if most > recognise.MOST:
        text = f"{most} scores are too many to look at its mask"
        raise Unrecognised(f"{text}: give get_inputs fewer sequences", found.attentions[0].out)
    return found


def _reduced(x: Any, axis: int, size: int, few: int) -> Any:
    fits = isinstance(x, torch.Tensor) and x.ndim > axis and x.shape[axis] == size
    return x.narrow(axis, 0, few).clone() if fits else x


def _widths(traced: Traced) -> list[tuple[int, ...]]:
    """Heads and widths of the attentions, which stay when inputs get fewer or shorter."""
    return [
        tuple(
            x
            for shape in one.shapes
            for x in (*(shape[1:-2] if len(shape) == 4 else ()), shape[-1])
        )
        for one in traced.attentions
    ]


# --- what is around the attention -------------------------------------------------------------


def _steps(traced: Traced) -> tuple[list[dict[str, Any]], str]:
    """The graph's operators as data, with calls of the kernel in place of the attentions."""
    graph = traced.graph
    for one in traced.attentions:
        with graph.inserting_after(one.out):
            called = graph.call_function(recognise.attend, (one.q, one.k, one.v, one.transposed))
        one.out.replace_all_uses_with(called)
    for node in reversed(graph.nodes):
        if node.op == "call_function" and not node.users:  # also what draws random numbers
            graph.erase_node(node)
    steps = []
    for node in graph.nodes:
        if node.op == "call_function":
            steps.append(_step(node))
        elif node.op == "placeholder" and node.name in traced.places and node.users:
            steps.append(_constant(node, traced))
    (outputs,) = next(n for n in graph.nodes if n.op == "output").args
    if not isinstance(outputs, tuple | list) or len(outputs) != 1:
        raise Unrecognised("the module's output is not one tensor")
    return steps, outputs[0].name


def _step(node: Node) -> dict[str, Any]:
    if node.target is recognise.attend:
        operator = "attention"
    elif isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "aten":
        operator = str(node.target)
    elif getattr(node.target, "__name__", "") == "getitem":
        operator = "getitem"
    else:
        raise Unrecognised(f"`{node.target}` is no operator of PyTorch's own", node)
    return {
        "name": node.name,
        "operator": operator,
        "args": [_data(x) for x in node.args],
        "kwargs": {name: _data(x) for name, x in node.kwargs.items()},
    }


def _constant(node: Node, traced: Traced) -> dict[str, Any]:
    where, value = traced.places[node.name], traced.constants[node.name]
    if where.startswith("lifted") or "lifted_tensor" in where:
        if value.numel() > 64:
            raise Unrecognised(f"a tensor of {value.numel()} numbers is made in forward")
        made = {"tensor": value.tolist(), "dtype": str(value.dtype).removeprefix("torch.")}
        return {"name": node.name, "operator": "constant", "args": [made], "kwargs": {}}
    return {"name": node.name, "operator": "attribute", "args": [where], "kwargs": {}}


def _data(x: Any) -> Any:
    """An argument as JSON: nodes, types and the like are objects with one key."""
    if isinstance(x, Node):
        return {"step": x.name}
    if isinstance(x, list | tuple):
        return [_data(one) for one in x]
    if isinstance(x, torch.dtype | torch.layout | torch.memory_format):
        return {"torch": str(x).removeprefix("torch.")}
    if isinstance(x, torch.device):
        return {"device": True}
    if (isinstance(x, float) and x != x) or x in (float("inf"), float("-inf")):
        return {"float": str(x)}
    if x is None or isinstance(x, bool | int | float | str):
        return x
    raise Unrecognised(f"an operator has the argument {x!r}")


if __name__ == "__main__":
    answering(lambda: told(*sys.argv[1:]))
