"""A score_mod or mask_mod of FlexAttention as a TL expression.

    mods = capture(score_mod=alibi, mask_mod=causal)
    print(mods.score)      # S + Slopes[head_idx] * (kv_idx - q_idx)

`make_fx` records the operators that the function calls on scalars. Each operator is one rule of
`aten.py`. An operator without a rule is refused, with the line of the user's function. What
was captured is compared with the function itself on random indices: a rule that differs from
PyTorch raises an error, and no kernel is made.
"""

from __future__ import annotations

import functools
import inspect
import operator
import os
import re
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import FunctionType, MethodType
from typing import Any

import numpy as np

from flashwright.author.builtin.mods import Mods, Operand
from flashwright.author.builtin.mods_reference import evaluate
from flashwright.flex import aten, compare
from flashwright.flex.aten import Refused, Typed
from flashwright.flex.closure import Look, is_constant, variables
from flashwright.lang.diagnostic import Failed
from flashwright.lang.nodes import Expr, Index, Name, Num, expressions
from flashwright.lang.parse import parse
from flashwright.spec import MAX_INT

Function = Callable[..., Any]

INDICES = ("batch_idx", "head_idx", "q_idx", "kv_idx")
_WHERE = "user's line"
REPLAYED = ContextVar("REPLAYED", default="")
"""The user's line that a recorded graph executes now (graphs.py); empty if a function itself runs.
Such a graph has its own `place`, and `tensors` by name."""


class NotCaptured(ValueError):
    """A function that cannot become TL: what was met, where, and what to do."""


@dataclass(frozen=True)
class Source:
    """The tensor that an operand of the kernel is a view of."""

    tensor: Any
    axes: tuple[str, ...]
    """The size that each axis has in TL."""

    def view(self, dims: Mapping[str, int]) -> Any:
        """The part of the tensor that a problem of these sizes reads."""
        from flashwright.flex.narrow import narrowed  # here: only calls need PyTorch

        part = narrowed(self.tensor)
        part = part if part.dim() else part.reshape(1)
        for axis, size in enumerate(self.axes):
            if size in dims and part.shape[axis] > dims[size]:
                part = part.narrow(axis, 0, dims[size])
        return part


@dataclass(frozen=True)
class Captured:
    """The mods of one call, and the tensors that they read, by the name of the operand."""

    mods: Mods
    sources: Mapping[str, Source]

    @property
    def own_dims(self) -> dict[str, int]:
        """The sizes of the axes that have a dim of their own."""
        found: dict[str, int] = {}
        for operand in self.mods.operands:
            if operand.name in self.sources:  # a bias comes with each call
                found |= _extents(operand, self.sources[operand.name].tensor)
        return {name: found[name] for name in self.mods.own_dims}

    def evaluate(self, expr: Expr, values: Mapping[str, Any]) -> Any:
        """An expression that reads these tensors, on arrays of NumPy."""
        return evaluate(expr, values, {n: _Gathered(s.tensor) for n, s in self.sources.items()})


@dataclass(frozen=True)
class _Part:
    """A tensor with its first axes indexed."""

    tensor: Any
    name: str
    args: tuple[Expr, ...] = ()


@dataclass
class _Reads:
    """The operands so far: one for each tensor and kind of index."""

    operands: dict[str, Operand] = field(default_factory=dict)
    sources: dict[str, Source] = field(default_factory=dict)

    def index(self, part: _Part) -> Typed:
        """The element of a tensor as an operand of the kernel."""
        sizes = tuple(
            _size(arg, length, f"{part.name}_{number}")
            for number, (arg, length) in enumerate(zip(part.args, part.tensor.shape, strict=True))
        )
        dtype = aten.dtype_of(part.tensor.dtype)
        if str(part.tensor.dtype) == "torch.int64" and part.tensor.numel():
            low, high = part.tensor.aminmax()
            if int(low) < -MAX_INT or int(high) > MAX_INT:
                raise Refused("a tensor with whole numbers beyond 2**31: kernels take int32")
        name = self._name(part, sizes, dtype)
        args = tuple(_wrapped(a, s) for a, s in zip(part.args, sizes, strict=True))
        return aten.loaded(Index(Name(name), args or (Num("0"),)), part.tensor.dtype)

    def _name(self, part: _Part, sizes: tuple[str, ...], dtype: str) -> str:
        operand = Operand(part.name, sizes or ("1",), dtype)
        number = 1
        while True:
            known = self.operands.get(operand.name)
            same = known is not None and self.sources[operand.name].tensor is part.tensor
            if known is None or (same and known.sizes == operand.sizes):
                break
            number += 1
            operand = Operand(f"{part.name}{number}", operand.sizes, dtype)
        self.operands[operand.name] = operand
        self.sources[operand.name] = Source(part.tensor, operand.sizes)
        return operand.name


_SIZES = {"batch_idx": "batch", "head_idx": "heads", "q_idx": "q_len", "kv_idx": "kv_len"}


def _size(arg: Expr, length: int, own: str) -> str:
    """The size of an axis in TL: the dim that its index runs over, else its own."""
    if isinstance(arg, Name) and arg.id in _SIZES:
        return _SIZES[arg.id]
    return own if not isinstance(arg, Num) else str(length)


def _wrapped(arg: Expr, size: str) -> Expr:
    """An index from the end, as PyTorch has negative ones, unless it is seen not to be negative."""
    if aten.never_negative(arg):
        return arg
    if isinstance(arg, Num):  # a constant from the end
        return Num(str(int(arg.text) + int(size)))
    return aten.where(aten.binary("<", arg, Num("0")), aten.binary("+", arg, Name(size)), arg)


def capture(
    score_mod: Function | None,
    mask_mod: Function | None,
    dims: Mapping[str, int],
    device: Any = "cpu",
) -> Captured:
    """Both functions of one call as TL. Raises NotCaptured with the operator and its line.

    `dims` has the sizes of the call: batch, heads, q_len, kv_len. They are the range in which the
    result is compared with the functions; the expressions hold for all sizes. `device` is that of
    the tensors.
    """
    reads = _Reads()
    score = mask = None
    if score_mod is not None:
        score = _expression(score_mod, reads, device, with_score=True)
        _compare(score_mod, score, reads, dims, device, with_score=True)
    if mask_mod is not None:
        mask = _expression(mask_mod, reads, device, with_score=False)
        _compare(mask_mod, mask, reads, dims, device, with_score=False)
        varies = any(isinstance(part, (Name, Index)) for part in expressions(mask))
        if not varies and evaluate(mask, {}, {}):  # as FlexAttention's noop_mask
            mask = None
    mods = Mods(score, mask, tuple(reads.operands.values()))
    return Captured(mods.hoisted(), dict(reads.sources))


def _compare(
    function: Function,
    expr: Expr,
    reads: _Reads,
    dims: Mapping[str, int],
    device: Any,
    with_score: bool,
) -> None:
    """Raise NotCaptured if an expression is not what its function computes.

    The same code with the same result was compared before, also if it saw other tensors.
    """
    import torch

    known = (getattr(getattr(function, "func", function), "__code__", function), expr)
    if known in _COMPARED:
        return
    own: dict[str, int] = {}
    for operand in reads.operands.values():
        own |= _extents(operand, reads.sources[operand.name].tensor)
    elements = list(compare.elements(dims))
    places = {name: np.array([e[name] for e in elements], float) for name in INDICES}
    scores = np.array([(n % 7 - 3) * 1.7 for n in range(len(elements))], np.float32).astype(float)
    inputs = {name: _Gathered(source.tensor) for name, source in reads.sources.items()}
    results = evaluate(expr, {**own, **dims, **places, "S": scores}, inputs)
    results = np.broadcast_to(results, scores.shape).tolist()
    for element, score, found in zip(elements, scores.tolist(), results, strict=True):
        given = [torch.tensor(element[n], dtype=torch.int32, device=device) for n in INDICES]
        if with_score:
            given = [torch.tensor(score, device=device), *given]
        told = ", ".join(f"{name} {value}" for name, value in element.items())
        try:
            expected = float(function(*given))
        except Exception as error:  # the user's function, as with an index out of range
            why = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            raise NotCaptured(f"{_last_line(function, error)}: at {told}: {why}") from None
        if compare.differs(found, expected):
            raise NotCaptured(
                f"{_place_of(function)}: what was recorded gives {found:g} at {told}, and the "
                f"function {expected:g}. It may use operators of PyTorch only, no NumPy and no "
                "random numbers"
            )
    _COMPARED.add(known)


_COMPARED: set[tuple[Any, Expr]] = set()


class _Gathered:
    """A tensor that gives its elements at arrays of indices as an array of NumPy."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor.detach() if tensor.dim() else tensor.detach().reshape(1)
        self.shape = self.tensor.shape

    def __getitem__(self, place: tuple[Any, ...]) -> Any:
        indices = tuple(self.tensor.new_tensor(p, dtype=int) for p in place)
        return self.tensor[indices].double().cpu().numpy()


def _extents(operand: Operand, tensor: Any) -> dict[str, int]:
    return dict(zip(operand.sizes, tensor.shape if tensor.dim() else (1,), strict=True))


def _expression(function: Function, reads: _Reads, device: Any, with_score: bool) -> Expr:
    graph = _trace(function, device, with_score)
    names = _names_of(function)
    values: dict[Any, Typed | _Part] = {}
    given = iter((*(("S",) if with_score else ()), *INDICES))
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            name = next(given)
            values[node] = Typed(Name(name), "float" if name == "S" else "int")
        elif node.op == "get_attr":
            tensor = getattr(graph, node.target)
            values[node] = _constant(tensor, names, len(reads.sources))
        elif node.op == "call_function":
            values[node] = _called(node, values, reads)
        else:  # the output
            found = _single(node.args[0], values, reads)
    return aten.converted(found, "float" if with_score else "bool").expr


def _constant(tensor: Any, names: Mapping[int, str], number: int) -> Typed | _Part:
    return _Part(tensor, names.get(id(tensor), f"Tensor{number}"))


def _single(value: Any, values: Mapping[Any, Typed | _Part], reads: _Reads) -> Typed:
    """A node's value as a scalar: a tensor without axes is read."""
    found = values[value] if not isinstance(value, int | float | bool) else aten.number(value)
    if isinstance(found, _Part):
        left = found.tensor.dim() - len(found.args)
        if left:
            raise Refused(
                f"a tensor of {left} axes where a number is needed: index all of its axes"
            )
        return reads.index(found)
    return found


def _called(node: Any, values: Mapping[Any, Typed | _Part], reads: _Reads) -> Typed | _Part:
    try:
        if str(node.target) == "aten.lift_fresh_copy.default":
            return _literal(values[node.args[0]])
        if node.target is operator.getitem and node.args[1] == 0:  # of an operator's results
            return values[node.args[0]]
        part = _indexed(node, values)
        if part is not None:
            return part if part.tensor.dim() > len(part.args) else reads.index(part)
        args = [_argument(a, values, reads) for a in node.args]
        return aten.apply(str(node.target), args, dict(node.kwargs), node.meta.get("val"))
    except Refused as refused:
        raise NotCaptured(f"{_where(node)}: {refused}") from None


def _indexed(node: Any, values: Mapping[Any, Typed | _Part]) -> _Part | None:
    """A tensor of the user's with one more axis indexed; None if the node is no index."""
    name = str(node.target)
    if not node.args or not isinstance(values.get(_key(node.args[0])), _Part):
        return None
    part = values[node.args[0]]
    assert isinstance(part, _Part)
    if name == "aten.index.Tensor":
        given = [values[a] if a is not None else None for a in node.args[1]]
        if any(not isinstance(a, Typed) or a.kind != "int" for a in given):
            raise Refused("an index that is no whole number for each element")
        more = tuple(a.expr for a in given if isinstance(a, Typed))
    elif name == "aten.select.int" and node.args[1] == 0:
        more = (Num(str(node.args[2])),)
    elif name in ("aten.detach.default", "aten.alias.default"):
        return part
    else:
        return None
    return _Part(part.tensor, part.name, part.args + more)


def _literal(found: Typed | _Part) -> Typed | _Part:
    """A number in the function's text, which the tracer has made a tensor."""
    if isinstance(found, _Part) and not found.tensor.dim():
        return aten.number(found.tensor.item())
    return found


def _key(arg: Any) -> Any:
    return arg if not isinstance(arg, list) else None


def _argument(arg: Any, values: Mapping[Any, Typed | _Part], reads: _Reads) -> Any:
    if isinstance(arg, int | float | bool):
        return aten.number(arg)
    return _single(arg, values, reads) if _key(arg) in values else arg


def _trace(function: Function, device: Any, with_score: bool) -> Any:
    """The function's operators on scalars, as a graph."""
    import torch
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
    from torch.fx.experimental.proxy_tensor import make_fx

    indices = [torch.zeros((), dtype=torch.int32, device=device) for _ in INDICES]
    given = [torch.zeros((), device=device), *indices] if with_score else indices
    lines: list[tuple[str, str]] = []
    try:
        with TransformGetItemToIndex():
            graph = make_fx(_with_lines(function, lines))(*given)
        _give_lines(graph, lines)
        graph.graph.eliminate_dead_code()
        return graph
    except Exception as error:  # of the user's function, or of the tracer
        place = _last_line(function, error)
        raise NotCaptured(
            f"{place}: the function cannot be recorded. It may use operators on its arguments and "
            "on tensors that it indexes by them; no `if` on them, no .item(), no NumPy "
            f"({type(error).__name__}: {str(error).split('. ')[0]})"
        ) from None


def _place_of(function: Function) -> str:
    """The file and line where a function is defined."""
    if hasattr(function, "place"):
        return str(function.place)
    code = getattr(inspect.unwrap(getattr(function, "func", function)), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else repr(function)


def _last_line(function: Function, error: BaseException) -> str:
    """The last line of the user's file in an error's traceback."""
    found = _place_of(function)
    file = found.rpartition(":")[0]
    step = error.__traceback__
    while step is not None:
        if step.tb_frame.f_code.co_filename == file:
            found = f"{file}:{step.tb_lineno}"
        step = step.tb_next
    return found


def _with_lines(function: Function, lines: list[tuple[str, str]]) -> Function:
    """The function; each operator that it calls is listed with the user's line."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Lines(TorchDispatchMode):  # type: ignore[misc,unused-ignore]  # torch may be absent
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            lines.append((str(func), _user_line()))
            return func(*args, **(kwargs or {}))

    def run(*args: Any) -> Any:
        with Lines():
            return function(*args)

    return run


def _user_line() -> str:
    """The innermost line on the stack that is neither PyTorch's nor ours."""
    if REPLAYED.get():
        return REPLAYED.get()
    frame = inspect.currentframe()
    while frame is not None:
        file = frame.f_code.co_filename
        if f"{os.sep}torch{os.sep}" not in file and file != __file__:
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return "the function"


def _give_lines(graph: Any, lines: list[tuple[str, str]]) -> None:
    """Write the lines into the graph: operators come in the order in which they were called."""
    done = 0
    for node in graph.graph.nodes:
        names = [name for name, _ in lines[done:]]
        if node.op == "call_function" and str(node.target) in names:
            done += names.index(str(node.target)) + 1
            node.meta[_WHERE] = lines[done - 1][1]


def _where(node: Any) -> str:
    """The line of the user's function that an operator comes from."""
    return str(node.meta.get(_WHERE, "the function"))


def _names_of(function: Function) -> dict[int, str]:
    """The names that the function's tensors have in its text, as names of TL."""
    names: dict[int, str] = {}
    seen = ((name, value) for name, value, *_ in variables(function))
    for name, value in (*getattr(function, "tensors", {}).items(), *seen):
        if _is_tensor(value):
            names.setdefault(id(value), _tl_name(name))
    return names


class Watch:
    """What functions see outside of themselves. A tensor that was replaced is another one, though
    its name and the function are the same: what was captured then no longer holds.

    `blind` names what cannot be watched: an object may change inside. Functions that see one are
    captured at every call.
    """

    def __init__(self, *functions: Function | None) -> None:
        self.seen: list[tuple[Look, Any]] = []
        self.blind = ""
        for function in functions:
            for name, value, look, _ in variables(function) if function is not None else ():
                if not (isinstance(value, _FOLLOWED) or _is_tensor(value) or is_constant(value)):
                    self.blind = self.blind or name or getattr(function, "__name__", repr(function))
                if look is not None:
                    self.seen.append((look, look()))

    def same(self) -> bool:
        """Whether all of it is certainly still there."""
        return not self.blind and all(look() is value for look, value in self.seen)


_FOLLOWED = (FunctionType, MethodType, functools.partial, tuple)


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "dtype") and hasattr(value, "dim")


def _tl_name(name: str) -> str:
    words = re.sub(r"[^A-Za-z0-9]+", " ", name).split()
    text = "".join(word[:1].upper() + word[1:] for word in words)
    free = text and text[0].isalpha() and text not in _TAKEN and not _is_keyword(text)
    return text if free else f"Tensor{text}"


def _is_keyword(text: str) -> bool:
    """Whether TL has another use for a word, such as End."""
    try:
        parse(f"let x = {text}[0]")
    except Failed:
        return True
    return False


_TAKEN = frozenset(
    ("S", "Q", "K", "V", "O", "LSE", "P", "BM", "BN", "Scale", "Smax", "Ssum", "Stages", "QStages")
) | frozenset(("HeadDim", "VDim", "HeadTile", "VTile", "Group", "Warps", "Window", "Start"))
_TAKEN |= {"Counts", "Full", "Blocks", "Visited", "FullEnd", "RowBlock", "KeyBlock", "KeyTile"}
