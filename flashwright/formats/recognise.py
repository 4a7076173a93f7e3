"""The attention in a traced module: where it is, and which settings of a spec describe it.

The graph says where: a product of two tensors that depend on the inputs, a softmax or ReLU of it,
and the product of that with a third. What happens between the first product and the softmax is read
from values, not from its spelling: it is evaluated on scores of known values. So any way to write a
scale, a softcap or a mask is the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

aten = torch.ops.aten
MOST = 1 << 25
"""Scores that are looked at."""
HIDDEN = -1e4
"""A score from here on down hides its key."""
CLOSE = 1e-6
PRODUCTS = {aten.matmul.default, aten.bmm.default}
SDPA = aten.scaled_dot_product_attention.default
WEIGHTS = {
    aten.softmax.int: "softmax",
    aten._softmax.default: "softmax",
    aten.relu.default: "relu",
    aten.relu_.default: "relu",
}
_SAME = {aten.contiguous.default, aten.clone.default, aten.detach.default, aten.alias.default}
_TYPES = {aten.to.dtype, aten._to_copy.default, aten.type_as.default}
_VIEWS = {aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.expand.default}
_SDPA_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale")


class Unrecognised(Exception):
    """A graph has no attention that a spec describes; `at` is the place in the task's file."""

    def __init__(self, why: str, node: Node | None = None) -> None:
        super().__init__(why)
        self.at = place(node) if node is not None else ""


def place(node: Node) -> str:
    """The line of the user's file that a node comes from, as FILE:LINE, or empty."""
    frames = [x.strip() for x in str(node.meta.get("stack_trace") or "").splitlines()]
    lines = [x.split('"') for x in frames if x.startswith("File ")]
    own = [x for x in lines if "/torch/" not in x[1] and "/flashwright/" not in x[1]]
    if not own:
        return ""
    return f"{own[-1][1].rsplit('/', 1)[-1]}:{own[-1][2].split('line ')[1].split(',')[0]}"


@dataclass(frozen=True)
class Attention:
    """Nodes of one attention."""

    q: Node
    k: Node
    v: Node
    out: Node
    transposed: bool = False
    """Whether `k` has its width before the keys."""
    kind: str = "softmax"
    factor: float = 1.0
    """What Q and K were multiplied by before."""
    scores: Node | None = None
    """The first product, and the argument of the softmax; None for PyTorch's own function."""
    weighed: Node | None = None
    given: Mapping[str, Any] = field(default_factory=dict)
    """The arguments of PyTorch's function."""

    @property
    def shapes(self) -> tuple[torch.Size, torch.Size, torch.Size]:
        """Of Q, K and V."""
        q, k, v = (node.meta["val"].shape for node in (self.q, self.k, self.v))
        return q, torch.Size((*k[:-2], k[-1], k[-2])) if self.transposed else k, v

    @property
    def count(self) -> int:
        """How many scores there are."""
        q, k, _ = self.shapes
        return int(math.prod(q[:-1]) * k[-2])


def find(graph: Graph, constants: Mapping[str, Any]) -> list[Attention]:
    """The attentions of a graph, in order. `constants` are the placeholders that are no inputs.
    Raises Unrecognised without any, with the reasons."""
    dynamic = _dynamic(graph, constants)
    found, reasons = [], []
    for node in graph.nodes:
        try:
            if node.target == SDPA:
                found.append(_of_sdpa(node, dynamic))
            elif node.target in WEIGHTS and node in dynamic:
                one = _around(node, dynamic)
                found += [one] if one is not None else []
        except Unrecognised as error:
            reasons.append(error)
    if reasons:
        raise reasons[0]
    if not found:
        text = "no attention: no softmax or ReLU stands between two products of the inputs"
        raise Unrecognised(text)
    return found


def _dynamic(graph: Graph, constants: Mapping[str, Any]) -> set[Node]:
    """The nodes that depend on inputs."""
    found: set[Node] = set()
    for node in graph.nodes:
        own = node.op == "placeholder" and node.name not in constants
        if own or any(one in found for one in node.all_input_nodes):
            found.add(node)
    return found


def _of_sdpa(node: Node, dynamic: set[Node]) -> Attention:
    given = {**dict(zip(_SDPA_ARGUMENTS, node.args, strict=False)), **node.kwargs}
    if given.get("dropout_p"):
        raise Unrecognised(f"dropout of {given['dropout_p']} of the weights", node)
    mask = given.get("attn_mask")
    if isinstance(mask, Node) and mask in dynamic:
        raise Unrecognised("the mask depends on the inputs", node)
    q, k, v = (given[name] for name in _SDPA_ARGUMENTS[:3])
    return _checked(Attention(q, k, v, node, given=given))


def _around(node: Node, dynamic: set[Node]) -> Attention | None:
    """The attention whose weights a softmax or ReLU gives; None if it is none."""
    out, weights = _product_of(node)
    if out is None or weights is None or out.args[0] is not weights:
        return None
    v = out.args[1]
    weighed = node.args[0]
    if not isinstance(weighed, Node) or not isinstance(v, Node) or v not in dynamic:
        return None
    scores = _scores(weighed, dynamic)
    if scores is None:
        return None
    if WEIGHTS[node.target] == "softmax":
        rank = len(node.meta["val"].shape)
        if node.args[1] not in (-1, rank - 1):
            raise Unrecognised("the softmax is not over the keys, the last axis", node)
    q, k, factor = scores.args[0], scores.args[1], 1.0
    assert isinstance(q, Node)
    assert isinstance(k, Node)
    q, factor = _unscaled(q, factor)
    k, factor = _unscaled(k, factor)
    k, transposed = _untransposed(k)
    k, factor = _unscaled(k, factor)
    kind = WEIGHTS[node.target]
    return _checked(Attention(q, k, v, out, transposed, kind, factor, scores, weighed))


def _checked(found: Attention) -> Attention:
    """The attention, if its tensors have axes that a kernel takes."""
    q, k, v = found.shapes
    named = f"Q is {tuple(q)}, K {tuple(k)}, V {tuple(v)}"
    if len(q) not in (3, 4) or not len(q) == len(k) == len(v) or k[:-1] != v[:-1]:
        raise Unrecognised(f"{named}: they must be (batch, heads, length, dim)", found.out)
    grouped = found.given.get("enable_gqa") and q[1] % k[1] == 0
    if q[:-2] != k[:-2] and not (grouped and q[0] == k[0]):
        raise Unrecognised(f"{named}: their first axes differ", found.out)
    return found


def _product_of(node: Node) -> tuple[Node | None, Node | None]:
    """The product that takes these weights, and the weights as it takes them."""
    last = node
    while True:
        users = list(last.users)
        if len(users) != 1:
            if any(user.target in PRODUCTS for user in users):
                raise Unrecognised("the weights are used besides their product with V", node)
            return None, None
        if users[0].target in PRODUCTS:
            return users[0], last
        if not _keeps(users[0]):
            return None, None
        last = users[0]


def _keeps(node: Node) -> bool:
    """Whether a node has the values of its argument, with the last two axes as they are."""
    if node.target == aten.dropout.default:
        if node.args[1] and node.args[2]:
            raise Unrecognised(f"dropout of {node.args[1]} of the weights", node)
        return True
    if node.target in _VIEWS:
        before, after = node.args[0].meta["val"].shape, node.meta["val"].shape
        return bool(before[-2:] == after[-2:] and before.numel() == after.numel())
    return node.target in _SAME or node.target in _TYPES


def _scores(node: Node, dynamic: set[Node]) -> Node | None:
    """The product of two inputs that a softmax's argument is made of; None if there is none."""
    while node.target not in PRODUCTS:
        others = [one for one in node.all_input_nodes if one in dynamic]
        if node.op != "call_function" or not others:
            return None
        if len(others) > 1:
            if any(_scores(one, dynamic) is not None for one in others):
                text = f"`{node.target}` joins the scores with another tensor of the inputs"
                raise Unrecognised(f"{text}, such as a bias or a mask", node)
            return None
        node = others[0]
    return node if all(one in dynamic for one in node.all_input_nodes) else None


def _unscaled(node: Node, factor: float) -> tuple[Node, float]:
    """A tensor without the numbers that it was multiplied by."""
    while node.target in (aten.mul.Tensor, aten.div.Tensor):
        first, number = node.args[0], node.args[1]
        if not isinstance(number, int | float) or not isinstance(first, Node) or node.kwargs:
            break
        factor = factor * number if node.target == aten.mul.Tensor else factor / number
        node = first
    return node, factor


def _untransposed(node: Node) -> tuple[Node, bool]:
    """K with its keys before its width, and whether it has them the other way round."""
    if node.target == aten.transpose.int:
        first, *axes = node.args
        rank = len(node.meta["val"].shape)
        if isinstance(first, Node) and {int(a) % rank for a in axes} == {rank - 2, rank - 1}:
            return first, False
    return node, True


# --- its settings -----------------------------------------------------------------------------


def settings(found: Attention, constants: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a spec that describe an attention: a variant and its options. Raises
    Unrecognised if none do."""
    q, k, v = found.shapes
    heads, kv_heads = (q[1], k[1]) if len(q) == 4 else (1, 1)
    factor, cap, visible = _scored(found, constants)
    told: dict[str, Any] = {
        "variant": "relu" if found.kind == "relu" else "mha" if heads == kv_heads else "gqa",
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": q[-1],
        "v_dim": v[-1] if v[-1] != q[-1] else None,
        "scale": None if math.isclose(factor, 1 / math.sqrt(q[-1]), rel_tol=CLOSE) else factor,
        "softcap": cap,
        "lse": False,
    }
    told |= _mask(visible, found) if visible is not None else {}
    return {name: value for name, value in told.items() if value is not None}


def _scored(
    found: Attention, constants: Mapping[str, Any]
) -> tuple[float, float | None, torch.Tensor | None]:
    """The scale, the softcap, and which keys are visible (None: all of them)."""
    if found.scores is None:
        return _of_arguments(found, constants)
    shape = found.scores.meta["val"].shape
    chain = _between(found.scores, found.weighed, constants)
    at = partial_value(chain, found)
    zeros = at(torch.zeros(shape, dtype=torch.float64))
    if zeros.isnan().any():
        raise Unrecognised("scores of 0 become NaN before the softmax", found.out)
    visible = zeros > HIDDEN
    if zeros[visible].abs().max() > CLOSE:
        text = "a bias is added to the scores; write its program in TL, as docs/howto/bias.md"
        raise Unrecognised(text, found.weighed)
    small, large = (
        _one(at(torch.full(shape, x, dtype=torch.float64)), visible, found) for x in (1e-3, 1e9)
    )
    slope = small / 1e-3
    cap = None if math.isclose(large, slope * 1e9, rel_tol=1e-3) else large
    if cap is not None:
        slope = _one(at(torch.full(shape, 1e-6, dtype=torch.float64)), visible, found) / 1e-6
    _confirm(at, shape, visible, slope, cap, found)
    factor = slope * found.factor
    if factor <= 0:
        raise Unrecognised(f"the scores are multiplied by {factor:g}", found.weighed)
    return _plain(factor), None if cap is None else _plain(cap), None if visible.all() else visible


def _plain(number: float) -> float:
    """A number without the last digits, which the evaluation has rounded."""
    return float(f"{number:.7g}")


def _one(values: torch.Tensor, visible: torch.Tensor, found: Attention) -> float:
    """The value that all visible scores have."""
    seen = values[visible]
    if float(seen.max() - seen.min()) > CLOSE * max(1.0, float(seen.abs().max())):
        raise Unrecognised("scores are multiplied by numbers that differ", found.weighed)
    return float(seen[0])


def _confirm(
    at: Callable[[torch.Tensor], torch.Tensor],
    shape: torch.Size,
    visible: torch.Tensor,
    slope: float,
    cap: float | None,
    found: Attention,
) -> None:
    """Raise Unrecognised unless random scores become what slope and cap say."""
    generator = torch.Generator().manual_seed(0)
    given = torch.randn(shape, dtype=torch.float64, generator=generator) * 4
    wanted = given * slope if cap is None else cap * torch.tanh(given * slope / cap)
    if float((at(given) - wanted)[visible].abs().max()) > 1e-4 * max(1.0, slope):
        text = "scores go through another function than a scale, a softcap and a mask"
        raise Unrecognised(f"{text}; write its program in TL", found.weighed)


def partial_value(
    chain: Callable[[torch.Tensor], torch.Tensor], found: Attention
) -> Callable[[torch.Tensor], torch.Tensor]:
    """The scores before the softmax, from those of the product; with the product's shape."""

    def at(scores: torch.Tensor) -> torch.Tensor:
        return chain(scores).double().reshape(scores.shape)

    return at


def _of_arguments(
    found: Attention, constants: Mapping[str, Any]
) -> tuple[float, float | None, torch.Tensor | None]:
    """The same from the arguments of PyTorch's function."""
    q, k, _ = found.shapes
    scale = found.given.get("scale")
    factor = 1 / math.sqrt(q[-1]) if scale is None else float(scale)
    shape = torch.Size((*q[:-1], k[-2]))
    if found.given.get("is_causal"):
        rows, keys = shape[-2:]
        return factor, None, torch.ones(rows, keys).tril().bool().expand(shape)
    mask = found.given.get("attn_mask")
    if mask is None:
        return factor, None, None
    known = evaluate(mask, dict(constants)).expand(shape)
    if known.dtype != torch.bool:
        seen = known > HIDDEN
        if known[seen].abs().max() > CLOSE:
            raise Unrecognised("the mask adds numbers to the scores", found.out)
        known = seen
    return factor, None, known


def _mask(visible: torch.Tensor, found: Attention) -> dict[str, Any]:
    """The settings of a mask. Raises Unrecognised if it is neither causal nor a window."""
    rows, keys = visible.shape[-2:]
    flat = visible.reshape(-1, rows, keys)
    if not bool((flat == flat[:1]).all()):
        raise Unrecognised(
            "the mask differs between heads or sequences", found.weighed or found.out
        )
    seen = flat[0]
    behind = torch.arange(rows)[:, None] + keys - rows - torch.arange(keys)
    causal = not bool(seen[behind < 0].any())
    near = behind[seen].abs()
    window = int(near.max()) + 1 if len(near) else 0
    wanted = (behind.abs() < window) & ((behind >= 0) | (not causal))
    if not window or not torch.equal(seen, wanted):
        text = f"its mask of {rows} queries and {keys} keys is neither causal nor a window"
        raise Unrecognised(f"{text}: use flashwright.flex_attention", found.weighed or found.out)
    whole = bool((behind.abs() < window)[(behind >= 0) | (not causal)].all())
    told: dict[str, Any] = {"causal": causal or None}
    return told if whole else {**told, "window": window}


# --- values -----------------------------------------------------------------------------------


def evaluate(node: Any, known: dict[str, Any]) -> Any:
    """The value of a node, from known values of others by name, which are added to."""
    if not isinstance(node, Node):
        return node
    for one in _order(node, known):
        if one.op == "get_attr":
            known[one.name] = getattr(one.graph.owning_module, str(one.target))
            continue
        if one.op != "call_function" or not callable(one.target):
            raise Unrecognised(f"`{one.name}` is not known without the inputs", one)
        args, kwargs = torch.fx.node.map_arg((one.args, one.kwargs), lambda n: known[n.name])
        known[one.name] = one.target(*args, **kwargs)
    return known[node.name]


def _order(node: Node, known: Mapping[str, Any]) -> Iterator[Node]:
    """The nodes that a node needs beyond those known, and itself, in the graph's order."""
    wanted, todo = set(), [node]
    while todo:
        one = todo.pop()
        if one.name not in known and one not in wanted:
            wanted.add(one)
            todo += one.all_input_nodes
    return (one for one in node.graph.nodes if one in wanted)


def _between(
    first: Node, last: Node | None, constants: Mapping[str, Any]
) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function from the values of one node to those of a later one."""

    def run(given: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = evaluate(last, {**constants, first.name: given})
        return found

    return run


def has_constants(found: Attention) -> bool:
    """Whether scores meet tensors on their way to the softmax, or a mask."""
    if found.scores is None:
        return found.given.get("attn_mask") is not None
    node = found.weighed
    while node is not None and node is not found.scores:
        if len(node.all_input_nodes) > 1:
            return True
        node = node.all_input_nodes[0]
    return False


def attend(q: Any, k: Any, v: Any, told: Mapping[str, Any]) -> Any:
    """The attention that settings describe, as PyTorch computes it."""
    group = q.shape[-3] // k.shape[-3] if q.ndim == 4 else 1
    k, v = (x.repeat_interleave(group, -3) if group > 1 else x for x in (k, v))
    scores = q @ k.transpose(-2, -1) * told.get("scale", 1 / math.sqrt(q.shape[-1]))
    if "softcap" in told:
        scores = told["softcap"] * torch.tanh(scores / told["softcap"])
    rows, keys = scores.shape[-2:]
    behind = torch.arange(rows)[:, None] + keys - rows - torch.arange(keys)
    hidden = torch.zeros(rows, keys, dtype=torch.bool)
    if told.get("causal"):
        hidden |= behind < 0
    if "window" in told:
        hidden |= behind.abs() >= told["window"]
    scores = scores.masked_fill(hidden, -math.inf)
    return (scores.relu() if told["variant"] == "relu" else scores.softmax(-1)) @ v


def error(found: Attention, told: Mapping[str, Any], constants: Mapping[str, Any]) -> float:
    """How far the described attention is off the graph's own, on random tensors: the RMS of the
    difference relative to that of the result."""
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(x, dtype=torch.float64, generator=generator) for x in found.shapes)
    wide = k.transpose(-2, -1) if found.transposed else k
    own = evaluate(found.out, {**constants, found.q.name: q, found.k.name: wide, found.v.name: v})
    difference = own - attend(q, k, v, told)
    return float(difference.pow(2).mean().sqrt() / own.pow(2).mean().sqrt())
