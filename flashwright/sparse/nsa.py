"""Native sparse attention (NSA): each query attends to the means of all blocks of keys, to the
blocks that matter most, and to the latest keys. Gates weigh the three.

The conventions are those of the fla library's `parallel_nsa`: tensors are (batch, tokens, heads,
dim). On a GPU each branch is a kernel, made once; means and lists of blocks are PyTorch's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from itertools import pairwise
from typing import Any

import torch

from flashwright.author.builtin.variants import make_spec
from flashwright.flex import attention as flex
from flashwright.flex.task import (
    DTYPES,
    ROWS,
    NoKernel,
    Task,
    compare_rows,
)
from flashwright.generate.selected import (
    SelectedBackward,
    SelectedForward,
    SelectedGated,
    SelectedKeys,
    SelectedQueries,
)
from flashwright.generate.store import tell
from flashwright.pytorch.rules import is_deterministic
from flashwright.serving import arguments
from flashwright.serving.kernels import Wanted
from flashwright.serving.reference import check_gradient
from flashwright.serving.varlen import flash_attn_varlen_func
from flashwright.sparse import lists, packed, reference
from flashwright.sparse.choose import Own, merged, pick, weigh
from flashwright.sparse.selection import (
    Choice,
    heaviest,
    in_blocks,
    limited,
    means,
    most_of,
    positions,
    weights,
)
from flashwright.spec import AttentionSpec, BadSpec, scale_of

_MOST_QUERIES = 512
"""Queries that one thread block takes, of those that name a block, for its gradients."""

_MOST_READ = 1 << 24
"""Elements of keys and values that queries read, in first gradients that are checked."""


def nsa(
    q: Any,
    k: Any,
    v: Any,
    g_cmp: Any = None,
    g_slc: Any = None,
    g_swa: Any = None,
    block_indices: Any = None,
    block_counts: Any = 16,
    block_size: int = 64,
    window_size: int = 512,
    scale: float | None = None,
    cu_seqlens: Any = None,
    *,
    compress: Callable[[Any, Any], tuple[Any, Any]] | None = None,
    return_block_indices: bool = False,
) -> Any:
    """Native sparse attention of q, (batch, tokens, heads, dim), over k and v with fewer heads.

    `g_cmp`, `g_slc` and `g_swa`, (batch, tokens, heads), weigh the branches over compressed blocks,
    selected blocks and the latest `window_size` keys. A branch without a gate is left out, except
    the selected one, which then counts once. The last query stands at the last key.

    `block_indices`, (batch, tokens, kv heads, blocks), names the blocks of `block_size` keys that
    each query reads; -1 is none. Without it they are chosen: the query's own, the first and the one
    before its own, and those to whose means its group attends most. `block_counts`, a number or
    (batch, tokens, kv heads), says how many. `cu_seqlens` says where the sequences of a packed
    batch begin (then batch is 1).

    `compress` makes one key and one value of each whole block: from those in blocks, (batch,
    blocks, block_size, kv heads, dim), to (batch, blocks, kv heads, dim), such as a module that is
    trained. None takes the means. It also decides which blocks are chosen.

    Returns O, and with `return_block_indices` also the blocks. Gradients pass through all branches
    and gates, not through the choice of blocks. They are deterministic if PyTorch is asked to be.
    CPU tensors are computed by PyTorch. Raises NoKernel with the reason where no kernel can be
    made.
    """
    if torch.compiler.is_compiling():  # what is looked up here is no part of a graph
        more = (block_indices, block_counts, block_size, window_size, scale, cu_seqlens)
        named = {"compress": compress, "return_block_indices": return_block_indices}
        return torch.compiler.disable(nsa)(q, k, v, g_cmp, g_slc, g_swa, *more, **named)
    given = _Given(q, k, v, (g_cmp, g_slc, g_swa), block_indices)
    given.check(block_counts)
    factor = q.shape[-1] ** -0.5 if scale is None else float(scale)
    call = _Call(block_size, window_size, factor, block_counts, compress or means)
    if cu_seqlens is None:
        out, blocks = call.one(given)
    else:
        out, blocks = call.packed(given, cu_seqlens)
    return (out, blocks) if return_block_indices else out


@dataclass(frozen=True)
class _Given:
    """The tensors of a call: with a first axis of the batch and a second one of tokens."""

    q: Any
    k: Any
    v: Any
    gates: tuple[Any, Any, Any]
    """Of compressed blocks, selected blocks, the window."""
    blocks: Any

    starts: list[int] | None = None
    """Where the sequences of a packed batch begin, and where the last one ends."""

    @cached_property
    def place(self) -> Any:
        """Where the queries stand."""
        return positions(self.q.shape[1], self.k.shape[1], self.q.device)

    @cached_property
    def first(self) -> Any:
        """The first key of each query's sequence."""
        if self.starts is None:
            return torch.zeros_like(self.place)
        starts = torch.tensor(self.starts, device=self.q.device)
        return starts[torch.searchsorted(starts, self.place, right=True) - 1]

    def every_tile(self, keys: int) -> Any:
        """Where the tiles of so many keys begin, in all sequences."""
        bounds = pairwise(self.starts or (0, self.k.shape[1]))
        return torch.cat([torch.arange(*pair, keys, device=self.k.device) for pair in bounds])

    def check(self, counts: Any) -> None:
        """Raise TypeError or ValueError, with the argument, for what does not fit."""
        named = {"q": self.q, "k": self.k, "v": self.v}
        arguments.check_axes(named, dict.fromkeys(named, "batch, tokens, heads, dim"))
        batch, tokens, heads, _ = self.q.shape
        kv_heads = self.k.shape[2]
        if self.k.shape[:3] != self.v.shape[:3] or self.k.shape[0] != batch:
            raise ValueError(
                "q, k and v must have one batch, and k and v the same tokens and heads"
            )
        if heads % kv_heads:
            raise ValueError(f"q has {heads} heads, which the {kv_heads} of k do not divide")
        if self.k.shape[1] < tokens:
            raise ValueError(f"q has {tokens} tokens and k {self.k.shape[1]}: queries are the last")
        arguments.check_widths(self.q, "k", self.k)
        for name, tensor in named.items():
            if tensor.dtype != self.q.dtype:
                raise TypeError(f"{name} must be {self.q.dtype}, as q; it is {tensor.dtype}")
        shapes = {"g_cmp": 3, "g_slc": 3, "g_swa": 3, "block_indices": 4, "block_counts": 3}
        others = (*self.gates, self.blocks, counts)
        for (name, axes), tensor in zip(shapes.items(), others, strict=True):
            if tensor is None or isinstance(tensor, (int, float)):
                continue
            arguments.check_tensors({name: tensor}, {})
            if tensor.device != self.q.device:
                raise ValueError(f"{name} is on {tensor.device}, q on {self.q.device}")
            wanted = (batch, tokens, heads if name.startswith("g_") else kv_heads)
            if tensor.ndim != axes or tuple(tensor.shape[:3]) != wanted:
                shape = tuple(tensor.shape)
                raise ValueError(f"{name} must have the shape {wanted}; it has {shape}")

    def part(self, rows: slice) -> _Given:
        """Some of the tokens."""
        first, second, third = (g if g is None else g[:, rows] for g in self.gates)
        blocks = None if self.blocks is None else self.blocks[:, rows]
        tensors = (self.q[:, rows], self.k[:, rows], self.v[:, rows])
        return _Given(*tensors, (first, second, third), blocks)


@dataclass(frozen=True)
class _Call:
    """The settings of a call."""

    block: int
    window: int
    scale: float
    counts: Any
    compress: Callable[[Any, Any], tuple[Any, Any]]

    def __post_init__(self) -> None:
        for name, value, least in (("block_size", self.block, 1), ("window_size", self.window, 0)):
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be a whole number from {least} on, not {value!r}")
        if isinstance(self.counts, int) and self.counts < 1:
            raise ValueError(f"block_counts must be at least 1, not {self.counts}")
        if not isinstance(self.counts, (int, torch.Tensor)):
            raise TypeError(f"block_counts must be a number or a tensor, not {self.counts!r}")

    def packed(self, given: _Given, starts: Any) -> tuple[Any, Any]:
        """O and the blocks of sequences that lie behind each other."""
        arguments.check_numbers("cu_seqlens", starts.int(), given.q.device, (None,))
        bounds = starts.tolist()
        ends = given.q.shape[1]
        rising = all(a <= b for a, b in pairwise(bounds)) and len(bounds) > 1
        fits = rising and (bounds[0], bounds[-1]) == (0, ends)
        if given.q.shape[0] != 1 or given.k.shape[1] != ends or not fits:
            text = f"cu_seqlens must rise from 0 to {ends}, the tokens of q and k, and batch be 1"
            raise ValueError(f"{text}; it is {bounds}")
        given = replace(given, starts=bounds)
        return self._sum(given, *self._coarse_of_packed(given))

    def _coarse_of_packed(self, given: _Given) -> tuple[Any, Any]:
        """What _coarse gives, of sequences that lie behind each other."""
        q, starts, blocks = given.q, given.starts or [0], given.blocks
        if given.gates[0] is None and blocks is not None:
            return None, blocks
        every = packed.Sequences(tuple(starts), self.block, q.device)
        task = self._selected_task(given) if every.firsts[-1] and not _on_cpu(q) else None
        if task is None or not packed.fits(task, every):
            rows = [slice(*pair) for pair in pairwise(starts)]
            each = [self._of_rows(given, x)._coarse(given.part(x)) for x in rows]
            most = max(x.shape[3] for _, x in each)
            wide = [torch.nn.functional.pad(x, (0, most - x.shape[3]), value=-1) for _, x in each]
            coarse = None if given.gates[0] is None else torch.cat([x for x, _ in each], dim=1)
            return coarse, torch.cat(wide, dim=1)
        pools = self._pooled([every.in_blocks(x) for x in (given.k, given.v)])
        coarse, lse = packed.compressed(every, q, *pools, self.scale)
        if blocks is None:
            choice = Choice(q, pools[0], lse, q.shape[1], self.block, self.scale)
            with torch.no_grad():
                found = packed.blocks(task, every, choice, most_of(self.counts))
            blocks = limited(found, self.counts)
        return coarse, blocks

    def _of_rows(self, given: _Given, rows: slice) -> _Call:
        """The settings for some tokens."""
        counts = self.counts if isinstance(self.counts, int) else self.counts[:, rows]
        return replace(self, counts=counts)

    def one(self, given: _Given) -> tuple[Any, Any]:
        """O and the blocks of sequences of one length."""
        return self._sum(given, *self._coarse(given))

    def _coarse(self, given: _Given) -> tuple[Any, Any]:
        """What the compressed branch gives, None if there is none, and the blocks."""
        blocks, coarse = given.blocks, None
        if given.gates[0] is not None or blocks is None:
            pools = self._pooled([in_blocks(x, self.block) for x in (given.k, given.v)])
            coarse, lse = self._compressed(given, *pools)
        if blocks is None:
            choice = Choice(given.q, pools[0], lse, given.k.shape[1], self.block, self.scale)
            by_pytorch = _on_cpu(given.q) or not (given.q.numel() and pools[0].numel())
            task = None if by_pytorch else self._selected_task(given)
            steps = (partial(weigh, task), partial(pick, task)) if task else (weights, heaviest)
            with torch.no_grad():
                blocks = choice.blocks(self.counts, *steps)
        return coarse, blocks

    def _sum(self, given: _Given, coarse: Any, blocks: Any) -> tuple[Any, Any]:
        """O, the sum of the branches, and the blocks."""
        compress, select, window = given.gates
        out = self._selected(given, blocks.int(), select)
        if compress is not None:
            out = torch.addcmul(out, coarse, compress[..., None].to(out.dtype))
        if window is not None and self.window:
            latest = self._latest(given)
            out = torch.addcmul(out, latest, window[..., None].to(out.dtype))
        return out, blocks

    def _pooled(self, whole: list[Any]) -> tuple[Any, Any]:
        """A key and a value for each whole block."""
        found = self.compress(*whole)
        for name, x, y in zip("kv", whole, found, strict=True):
            wanted = (*x.shape[:2], *x.shape[3:])
            if tuple(y.shape) != wanted or y.dtype != x.dtype:
                text = f"compress must give {name} of the shape {wanted} in {x.dtype}"
                raise ValueError(f"{text}; it has {tuple(y.shape)} in {y.dtype}")
        return found

    def _compressed(self, given: _Given, k: Any, v: Any) -> tuple[Any, Any]:
        q, how = given.q, (self.block, self.scale)
        if _on_cpu(q) or not q.numel() or not k.numel():
            out, lse = reference.compressed(q, k, v, *how, given.place)
            return out.to(q.dtype), lse
        task = self._task(given, "nsa-compressed", block=self.block, stride=self.block)
        wanted = Wanted(task, None)
        turned = [x.transpose(1, 2) for x in (q, k, v)]
        out, lse = wanted.entry().operator(*turned, tokens=given.k.shape[1], return_lse=True)

        def right(rows: Any) -> Any:
            exact = (q[:1, rows].double(), k[:1].double(), v[:1].double())
            return reference.compressed(*exact, *how, given.place[rows])[0]

        check = partial(_check, task.spec, right)
        wanted.entry().look(wanted, {"o": out}, check)
        return out.transpose(1, 2), lse

    def _selected(self, given: _Given, blocks: Any, gate: Any) -> Any:
        """The selected branch, times its gate if there is one."""
        q, k, v, how = given.q, given.k, given.v, (self.block, self.scale)
        trains = torch.is_grad_enabled() and any(
            x.requires_grad for x in (q, k, v, gate) if x is not None
        )
        if _on_cpu(q) or not q.numel():
            out = reference.selected(q, k, v, blocks, *how, given.place, given.first).to(q.dtype)
        else:
            one = _Selected(self._selected_task(given), given, blocks, how)
            if not trains:
                return one.forward(gate)[0]
            out = _WithGradients.apply(one, q, k, v)
        return out if gate is None else out * gate[..., None].to(out.dtype)

    def _selected_task(self, given: _Given) -> Task:
        """The task of what has to do with selected blocks. Raises NoKernel."""
        if self.block % 16:
            raise NoKernel(f"block_size is {self.block}: kernels take multiples of 16")
        return self._task(given, "nsa-selected", selected_block=self.block)

    def _latest(self, given: _Given) -> Any:
        if given.starts is None:
            q, k, v = (x.transpose(1, 2) for x in (given.q, given.k, given.v))
            found = flex.attention(q, k, v, causal=True, window=self.window, scale=self.scale)
            return found.transpose(1, 2)
        if _on_cpu(given.q):
            rows = (slice(*pair) for pair in pairwise(given.starts))
            return torch.cat([self._latest(given.part(x)) for x in rows], dim=1)
        starts = torch.tensor(given.starts, dtype=torch.int32, device=given.q.device)
        longest = max(last - first for first, last in pairwise(given.starts))
        q, k, v = (x[0] for x in (given.q, given.k, given.v))
        attend = partial(flash_attn_varlen_func, q, k, v, starts, starts, longest, longest)
        window = (self.window - 1, 0)
        return attend(softmax_scale=self.scale, causal=True, window_size=window)[None]

    def _task(self, given: _Given, variant: str, **settings: int) -> Task:
        """The task of a branch. Raises NoKernel."""
        q, k, v = given.q, given.k, given.v
        widths = (q.shape[2], k.shape[2], q.shape[3], v.shape[3])
        scale = scale_of(self.scale, q.shape[3])
        return _task(variant, q.dtype, q.device, widths, scale, tuple(settings.items()))


@dataclass(frozen=True)
class _Selected:
    """A call of the selected branch, by kernels."""

    task: Task
    given: _Given
    blocks: Any
    how: tuple[int, float]
    """The keys of a block, and the scale."""

    def _tensors(self) -> dict[str, Any]:
        """The inputs by name, with heads before tokens."""
        named = {"q": self.given.q, "k": self.given.k, "v": self.given.v}
        return {name: x.transpose(1, 2) for name, x in named.items()}

    def _tiles(self, keys: int) -> Any:
        """The tiles of so many keys that queries read."""
        where = (self.given.place, self.given.first)
        return lists.tiles_of(self.blocks, self.how[0], keys, *where)

    def _merged(self, order: SelectedForward) -> dict[str, Any]:
        """What neighbouring queries read."""
        where = (self.given.place, self.given.first)
        return merged(self.task, order, self.blocks, *where, self.given.k.shape[1])

    def forward(self, gate: Any = None) -> tuple[Any, Any]:
        """O, (batch, tokens, heads, dim), times its gate, and LSE, (batch, heads, tokens)."""
        wanted = Own(self.task, None, program=SelectedForward if gate is None else SelectedGated)
        check = partial(_check, self.task.spec, partial(self._rows, gate))
        given = self._tensors() | self._merged(wanted.order)
        if gate is not None:
            given["gate"] = gate.transpose(1, 2).to(self.given.q.dtype)
        found = wanted.run(given, {}, check)
        return found["o"].transpose(1, 2), found["lse"]

    def _rows(self, gate: Any, rows: Any) -> Any:
        """Some rows of the first output, in fp64."""
        q, k, v = self.given.q[:1, rows].double(), self.given.k[:1], self.given.v[:1]
        blocks, where = self.blocks[:1, rows], (self.given.place[rows], self.given.first[rows])
        out = reference.selected(q, k.double(), v.double(), blocks, *self.how, *where)
        return out if gate is None else out * gate[:1, rows, :, None].double()

    def backward(self, out: Any, lse: Any, grad: Any) -> list[Any]:
        """The gradients of q, k and v. By PyTorch's setting they are deterministic."""
        delta = (grad.float() * out.float()).sum(-1).transpose(1, 2)
        more = {"do": grad.transpose(1, 2), "lse": lse, "delta": delta.contiguous()}
        given, exactly = self._tensors() | more, is_deterministic(None)
        check = partial(self._check_gradients, grad)
        wanted = Own(self.task, None, program=SelectedKeys if exactly else SelectedBackward)
        keys, most = wanted.order.keys, None if exactly else _MOST_QUERIES
        items = lists.by_tile(self._tiles(keys), self.given.every_tile(keys), most)
        found = wanted.run(given | items, {}, check)
        if exactly:
            apart = Own(self.task, None, program=SelectedQueries)
            found |= apart.run(given | self._merged(apart.order), {}, check)
        return [found[f"d{name}"].transpose(1, 2) for name in "qkv"]

    def _check_gradients(self, grad: Any, results: Any) -> None:
        """Raise WrongKernel if the first gradients are not PyTorch's in fp64."""
        q, k, v = self.given.q, self.given.k, self.given.v
        read = self.blocks.numel() * self.how[0] * (k.shape[3] + v.shape[3])
        if read > _MOST_READ:
            tell(f"the first gradients are not checked: the blocks have {read} elements")
            return
        q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
        with torch.enable_grad():
            where = (self.given.place, self.given.first)
            out = reference.selected(q, k, v, self.blocks, *self.how, *where)
            wanted = torch.autograd.grad(out, (q, k, v), grad.double())
        for name, right in zip("qkv", wanted, strict=True):
            if f"d{name}" not in results:
                continue  # another kernel gives it
            ours = results[f"d{name}"].transpose(1, 2)
            check_gradient(self.task.spec, f"d{name}", ours, right)


class _WithGradients(torch.autograd.Function):  # type: ignore[misc]
    """The selected branch by kernels, and its gradients."""

    @staticmethod
    def forward(ctx: Any, one: _Selected, *inputs: Any) -> Any:
        """O."""
        out, lse = one.forward()
        ctx.one = one
        ctx.save_for_backward(out, lse, *inputs)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[Any, ...]:
        """The gradients of q, k and v."""
        out, lse, *_ = ctx.saved_tensors  # with the inputs, so that PyTorch sees changes to them
        return None, *ctx.one.backward(out, lse, grad.contiguous())


def _on_cpu(tensor: Any) -> bool:
    return bool(tensor.is_cpu)


def _check(spec: AttentionSpec, right: Callable[[Any], Any], results: Mapping[str, Any]) -> None:
    """Raise WrongKernel if rows of a new kernel's first output are not the `right` ones, which are
    PyTorch's in fp64."""
    out = results["o"].detach().transpose(1, 2)
    rows = torch.linspace(0, out.shape[1] - 1, min(ROWS, out.shape[1])).long().to(out.device)
    with torch.no_grad():
        exact = right(rows)
    for head in {0, out.shape[2] - 1}:
        ours, wanted = (x.double().cpu().numpy() for x in (out[0, rows, head], exact[0, :, head]))
        compare_rows(ours, wanted, spec, (0, head))


@lru_cache
def _task(
    variant: str,
    kind: Any,
    device: Any,
    widths: tuple[int, int, int, int],
    scale: float | None,
    settings: tuple[tuple[str, int], ...],
) -> Task:
    """The task of a branch. Raises NoKernel."""
    dtype = DTYPES.get(str(kind).removeprefix("torch."))
    if dtype not in ("fp16", "bf16"):
        raise NoKernel(f"q is {kind}: kernels of nsa take float16 and bfloat16")
    heads, kv_heads, head_dim, v_dim = widths
    own = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "dtype": dtype}
    try:
        spec = make_spec(variant, **own, v_dim=v_dim, scale=scale, **dict(settings))
    except BadSpec as error:
        raise NoKernel(str(error)) from None
    return Task(spec, flex.card_of(device))
