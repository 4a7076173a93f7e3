"""What the layers of a model of Hugging Face transformers ask for, and their kernels.

transformers calls `make_mask` once for each kind of mask and forward pass. It says which keys a
query sees: as the spec's own causal and window if it is that, so that one kernel serves all
lengths, else as a function to be captured. Offsets and padding are tensors that the mask reads,
never constants of a kernel. Where a sequence has one query, whose keys are a range, it says the
range too: serving/decode_layers.py computes these, and `compute` the others.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch

from flashwright.author.builtin.mods import Mods
from flashwright.flex import attention as flex
from flashwright.flex.capture import Captured, NotCaptured, Source, Watch, capture
from flashwright.flex.form import Form, form_of
from flashwright.flex.task import (
    Bias,
    Dims,
    NoKernel,
    Task,
    dims_of,
    first_results,
    order_of,
)
from flashwright.flex.trial import check
from flashwright.generate import store
from flashwright.gpu import Gpu
from flashwright.lang.format import format_expr
from flashwright.lang.nodes import Binary, Expr
from flashwright.pytorch.operator import Operator
from flashwright.spec import AttentionSpec, scale_of

Function = Callable[..., Any]

_TRUE = re.compile(r"1 != 0|q_idx >= 0|kv_idx >= 0")
_CAUSAL = re.compile(r"kv_idx <= q_idx|q_idx >= kv_idx")
_BEHIND = re.compile(r"kv_idx > q_idx - (\d+)")
_CHUNK = re.compile(r"floor\(\(kv_idx - (.+)\) / (\d+)\) == floor\(\(q_idx - \1\) / \2\)")
_AROUND = re.compile(r"abs\(q_idx - kv_idx\) (<=?) (\d+)")


# --- masks --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SpecMask:
    """A mask in the spec's words. Neither: every key is visible."""

    causal: bool = False
    window: int | None = None


@dataclass(frozen=True)
class KeyRange:
    """The keys that the one query of each sequence sees, from the first one to the end."""

    skipped: int
    """Keys that no sequence sees. The others are counted from there."""
    first: Any
    """int32 for each sequence; None: from key 0."""
    end: Any
    """int32 for each sequence, not less than `first`."""


@dataclass(frozen=True)
class ModelMask:
    """What transformers hands from `make_mask` to each layer: which keys the queries see.

    The last query stands at the last key for `known`; `mask_mod` comes on top of it.
    """

    shape: tuple[int, int, int, int]
    known: SpecMask
    mask_mod: Function | None = None
    keys: KeyRange | None = None
    """All of it, where a sequence has one query and its keys are a range."""

    @property
    def ndim(self) -> int:
        """As a tensor's: transformers tells prepared masks from padding by it."""
        return len(self.shape)

    def contiguous(self) -> ModelMask:
        """As a tensor's: generate with a static cache calls it."""
        return self

    @cached_property
    def form(self) -> Form | None:
        """The form of the mask function, with its tensors as the kernel reads them."""
        found = form_of(self.mask_mod) if self.mask_mod is not None else None
        if found is None:
            return None
        return Form(found.key, tuple(_as_operand(tensor) for tensor in found.tensors))


@torch.compiler.disable  # type: ignore[untyped-decorator,unused-ignore]  # torch may be absent
def make_mask(
    batch_size: int,
    kv_length: int,
    mask_function: Function,
    q_length: int | None = None,
    q_offset: Any = 0,
    kv_offset: int = 0,
    attention_mask: Any = None,
    cache_position: Any = None,
    device: Any = None,
    **unused: Any,
) -> ModelMask:
    """The mask function of transformers' AttentionMaskInterface.

    Query `q` stands at position q + q_offset, key `kv` at kv + kv_offset. `attention_mask` has a
    row for each sequence and is False where there is no token. transformers 4 gives the queries'
    positions as `cache_position` instead of `q_length` and `q_offset`.
    """
    if isinstance(attention_mask, ModelMask):  # made before, for generate with a static cache
        return attention_mask
    if cache_position is not None:
        q_length, q_offset = len(cache_position), int(cache_position[0])
        device = cache_position.device
    assert q_length is not None
    shape = (batch_size, 1, q_length, kv_length)
    known = recognised(mask_function)
    padding = _padding(attention_mask, kv_offset, kv_length)
    keys = key_range(known, shape, q_offset - kv_offset, padding, device)
    last_at_last = isinstance(q_offset, int) and q_offset + q_length == kv_offset + kv_length
    mask_mod: Function | None = None
    if known is None:
        mask_mod = _bounded(mask_function)
        if not (isinstance(q_offset, int) and q_offset == kv_offset == 0):
            offsets = (_number(offset, device) for offset in (q_offset, kv_offset))
            mask_mod = _moved(mask_mod, *offsets)
    elif known != SpecMask() and not last_at_last:
        mask_mod = _shifted(known, _number(q_offset - kv_offset, device))
        known = SpecMask()
    together = flex.both.__wrapped__(padding.mask if padding is not None else None, mask_mod)
    return ModelMask(shape, known or SpecMask(), together, keys)


def key_range(
    known: SpecMask | None, shape: tuple[int, ...], place: Any, padding: Padding | None, device: Any
) -> KeyRange | None:
    """The keys of a mask whose only query stands at key `place`; None if they are no range."""
    batch, _, queries, length = shape
    if queries != 1 or known is None or (known.window is not None and not known.causal):
        return None
    skipped, first, end = 0, None, place + 1 if known.causal else length
    if isinstance(end, int):
        skipped = max(0, end - known.window) if known.window is not None else 0
        end = torch.full((batch,), end - skipped, dtype=torch.int32, device=device)
    else:
        end = _number(end, device).clamp(max=length).expand(batch)
        first = (end - known.window).clamp(min=0) if known.window is not None else None
    if padding is not None:
        if padding.range is None:
            return None
        start, stop = (edge - skipped for edge in padding.range)
        first = torch.maximum(start.clamp(min=0), first if first is not None else start)
        end = torch.maximum(torch.minimum(stop, end), first)
    return KeyRange(skipped, first, end)


def recognised(mask_function: Function) -> SpecMask | None:
    """The mask in the spec's words; None if the spec has no words for it."""
    parts = _parts_of(mask_function)
    if parts is None:
        return None
    causal, behind, around = False, [], []
    for text in parts:
        if _CAUSAL.fullmatch(text):
            causal = True
        elif found := _BEHIND.fullmatch(text):
            behind.append(int(found[1]))
        elif found := _AROUND.fullmatch(text):
            around.append(int(found[2]) + (found[1] == "<="))
        elif not _TRUE.fullmatch(text):
            return None
    if behind and not causal:  # the spec's window of a mask that is not causal has two sides
        return None
    return SpecMask(causal, min(behind + around, default=None))


def _bounded(mask_function: Function) -> Function:
    """The same mask with a bound for chunks whose start is data: the checker of TL sees that the
    loop misses no key only if the mask says so without data."""
    for text in _parts_of(mask_function) or ():
        if found := _CHUNK.fullmatch(text):
            near = _shifted(SpecMask(False, int(found[2])), None)
            together = flex.both.__wrapped__(mask_function, near)
            assert together is not None
            return together
    return mask_function


def _parts_of(mask_function: Function) -> tuple[str, ...] | None:
    """The conditions of a mask as TL, all of which must hold; None if it cannot be captured, which
    is told where its kernel is made."""
    form = form_of(mask_function)
    if form is None:
        return None
    if form.key not in _PARTS:
        dims = {"batch": 1, "heads": 1, "kv_heads": 1, "q_len": 1, "kv_len": 1}
        if not form.tensors:  # compared with the function in this range
            dims |= {"q_len": 64, "kv_len": 64}
        try:
            mask = capture(None, mask_function, dims, form.device).mods.mask
            _PARTS[form.key] = tuple(format_expr(e) for e in _conjuncts(mask)) if mask else None
        except NotCaptured:
            _PARTS[form.key] = None
    return _PARTS[form.key]


_PARTS: dict[Hashable, tuple[str, ...] | None] = {}


def _conjuncts(expr: Expr) -> list[Expr]:
    if isinstance(expr, Binary) and expr.op == "and":
        return _conjuncts(expr.left) + _conjuncts(expr.right)
    return [expr]


def _number(value: Any, device: Any) -> Any:
    """A number as a tensor, without waiting for the GPU."""
    if isinstance(value, torch.Tensor):
        return value.reshape(1).int()
    return torch.full((1,), value, dtype=torch.int32, device=device)


def _shifted(known: SpecMask, shift: Any) -> Function:
    """A mask in the spec's words whose first query stands at key `shift`; None: at the first."""
    causal, window = known.causal, known.window

    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        position = q + shift[0] if shift is not None else q
        seen = kv <= position if causal else kv >= 0
        if window is not None:
            seen = seen & (kv > position - window)
        if window is not None and not causal:
            seen = seen & (kv < position + window)
        return seen

    return mask


def _moved(mask_function: Function, q_offset: Any, kv_offset: Any) -> Function:
    """A mask of positions as one of indices."""

    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return mask_function(b, h, q + q_offset[0], kv + kv_offset[0])

    return mask


class Padding(NamedTuple):
    """Tokens that are not there, in some sequence."""

    mask: Function
    """Whether one is there."""
    range: tuple[Any, Any] | None
    """The first token of each sequence and the end, as int32; None if some between them are not
    there."""


def _padding(attention_mask: Any, kv_offset: int, kv_length: int) -> Padding | None:
    """The padding of a batch; None if all tokens are there. Beyond `attention_mask` is none."""
    if attention_mask is None:
        return None
    there = attention_mask[:, kv_offset : kv_offset + kv_length].bool()
    if there.shape[1] < kv_length:
        there = torch.nn.functional.pad(there, (0, kv_length - there.shape[1]))
    if there.all():  # the one wait for the GPU, as with sdpa; the rest is for padding
        return None
    count = there.sum(dim=-1)
    start = there.int().argmax(dim=-1)
    end = start + count
    after_last = kv_length - there.flip(-1).int().argmax(dim=-1)
    if ((after_last == end) | (count == 0)).all():
        tokens = start.int(), end.int()
        return Padding(tokens_from_to(*tokens), tokens)
    return Padding(_tokens_there(there.int()), None)


def tokens_from_to(first_token: Any, end_token: Any) -> Function:
    """The mask of a batch whose sequences have padding before the first token and from the end."""

    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (kv >= first_token[b]) & (kv < end_token[b])

    return mask


def _tokens_there(there: Any) -> Function:
    """The mask of a batch with padding between tokens."""

    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return there[b, kv] != 0

    return mask


def _as_operand(tensor: Any) -> Any:
    return tensor if tensor.is_floating_point() else tensor.int()


# --- one layer ----------------------------------------------------------------------------------


class LayerCall(NamedTuple):
    """What a layer asks for, apart from Q, K and V."""

    known: SpecMask
    softcap: float | None
    scale: float | None
    mask: ModelMask | None
    """A mask of functions and tensors on top; None if `known` says all."""
    tensors: Mapping[str, Any]
    """`sink` and `bias`, if there are any."""
    keys: KeyRange | None = None
    """The mask, where a sequence has one query and its keys are a range."""

    @property
    def settings(self) -> tuple[Any, ...]:
        """causal, window, softcap and scale."""
        return (self.known.causal, self.known.window, self.softcap, self.scale)


def layer_call(
    module: Any,
    query: Any,
    key: Any,
    attention_mask: Any,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Any = None,
    sliding_window: int | None = None,
    position_bias: Any = None,
    **given: Any,
) -> LayerCall:
    """What a layer asks for by its keyword arguments. Raises ValueError for what is not offered."""
    _refuse(dropout, given)
    extras = {"sink": s_aux, "bias": position_bias}
    tensors = {name: tensor for name, tensor in extras.items() if tensor is not None}
    known, mask, keys = SpecMask(), None, None
    if isinstance(attention_mask, ModelMask):
        lengths, here = attention_mask.shape[2:], (query.shape[2], key.shape[2])
        if lengths != here:
            raise ValueError(
                f"the mask is for {lengths[0]} queries and {lengths[1]} keys, and this layer has "
                f"{here[0]} and {here[1]}"
            )
        known, keys = attention_mask.known, attention_mask.keys
        mask = attention_mask if attention_mask.mask_mod is not None else None
    elif attention_mask is not None:
        mask = _given_mask(attention_mask, query, key, tensors)
    else:
        if is_causal if is_causal is not None else getattr(module, "is_causal", True):
            known = SpecMask(True, sliding_window)
        elif sliding_window is not None and sliding_window < key.shape[2]:
            raise ValueError(
                f"a layer that looks both ways, with a window of {sliding_window} and no mask: "
                "what the window hides is not told. Pass the model an attention_mask"
            )
        shape, last = (*query.shape[:3], key.shape[2]), key.shape[2] - 1
        keys = key_range(known, shape, last, None, query.device)
    return LayerCall(known, softcap, scale_of(scaling, query.shape[3]), mask, tensors, keys)


def _refuse(dropout: float, given: Mapping[str, Any]) -> None:
    if dropout:
        raise ValueError(
            f"attention dropout of {dropout}: our kernels have none. Set attention_dropout to 0 in "
            "the model's config, call model.eval(), or train with attn_implementation='sdpa'"
        )
    if given.get("output_attentions"):
        raise ValueError(
            "output_attentions: our kernels keep no weights. Use attn_implementation='eager'"
        )
    if given.get("cache") is not None:
        raise ValueError(
            "a paged cache (continuous batching) is not supported. Use attn_implementation='sdpa'"
        )


def _given_mask(
    attention_mask: Any, query: Any, key: Any, tensors: dict[str, Any]
) -> ModelMask | None:
    """A mask that the caller or the model has made: a bool tensor as a mask, else as a bias."""
    if not isinstance(attention_mask, torch.Tensor) or attention_mask.dim() != 4:
        raise TypeError(
            f"attention_mask is {_kind(attention_mask)}: pass (batch, tokens) for padding, or "
            "(batch, heads or 1, queries, keys)"
        )
    table = attention_mask[..., : key.shape[2]]
    if table.dtype != torch.bool:
        tensors["bias"] = table + tensors["bias"] if "bias" in tensors else table
        return None
    batches, heads = (size > 1 for size in table.shape[:2])

    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return table[b if batches else 0, h if heads else 0, q, kv]

    shape = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    return ModelMask(shape, SpecMask(), mask)


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of {value.dim()} axes"
    return f"a {type(value).__name__}"


def autocast(*tensors: Any) -> tuple[Any, ...]:
    """The tensors in torch.autocast's type where it is on: rotary embeddings leave fp32 behind."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    return tuple(tensor.to(torch.get_autocast_dtype(device)) for tensor in tensors)


def compute(call: LayerCall, query: Any, key: Any, value: Any, fallback: bool) -> Any:
    """O of a layer, (batch, heads, length, dim). CPU tensors are computed by PyTorch, and with
    `fallback` what no kernel can be made for."""
    if not query.is_cuda:
        return _by_pytorch(call, query, key, value)
    try:
        return by_kernel(call, *autocast(query, key, value))
    except NoKernel as error:
        if not fallback:
            raise
        warnings.warn(f"PyTorch computes it: {error}", RuntimeWarning, stacklevel=3)
        return _by_pytorch(call, query, key, value)


def _by_pytorch(call: LayerCall, query: Any, key: Any, value: Any) -> Any:
    from flashwright.flex import fallback

    more = dict(call.tensors)
    if call.mask is not None:
        more["mask_mod"] = call.mask.mask_mod
    how = dict(zip(("causal", "window", "softcap", "scale"), call.settings, strict=True))
    return fallback.attention(query, key, value, **how, **more)


# --- kernels ------------------------------------------------------------------------------------


def by_kernel(call: LayerCall, query: Any, key: Any, value: Any) -> Any:
    """O of a layer by its kernel, which is made or found once. Raises NoKernel with the reason."""
    flags = ("sink",) if "sink" in call.tensors else ()
    task = flex.task_of(query, key, value, call.settings, flags)
    given = {"q": query, "k": key, "v": value, **call.tensors}
    if call.mask is None:
        return flex._run(task, None, None, given, return_lse=False)
    form = call.mask.form
    if form is None:  # it sees an object that may change: captured for each function
        return flex._run(task, None, call.mask.mask_mod, given, return_lse=False)
    return _masked(task, call.mask, form, given)


@dataclass
class _MaskedKernel:
    """A kernel of a mask's form. It keeps no tensor of the call that it was made for."""

    operator: Operator
    mods: Mods
    operands: Mapping[str, tuple[int, tuple[str, ...]]]
    """For each operand: which of the form's tensors it is a view of, and its axes."""
    folder: Path
    new: bool
    """Whether its first output is still to be checked."""

    def bound(self, tensors: tuple[Any, ...], device: Any) -> flex._Entry:
        """The kernel with the tensors of one call."""
        sources = {
            name: Source(tensors[number].to(device), axes)
            for name, (number, axes) in self.operands.items()
        }
        captured = Captured(self.mods, sources)
        return flex._Entry(self.operator, captured, Watch(), self.folder, self.new)


_MASKED: dict[Hashable, _MaskedKernel | None] = {}


def _masked(task: Task, mask: ModelMask, form: Form, given: Mapping[str, Any]) -> Any:
    dims = dims_of(given["q"], given["k"])
    bias = Bias.of(given["bias"], dims) if "bias" in given else None
    known = (task, form.key, bias)
    if known not in _MASKED:
        _MASKED[known] = _new_masked(task, mask, bias, dims)
    kernel = _MASKED[known]
    if kernel is None:
        return flex._run(task, None, mask.mask_mod, given, return_lse=False)
    device = given["q"].device
    tensors = kernel.bound(form.tensors, device).tensors(given, dims)
    if flex.trains(given):
        flex.check_first_gradients(kernel.operator, task, None, mask.mask_mod, given)
    out = kernel.operator(*(tensors[name] for name in kernel.operator.inputs))
    near = all(tensor.device == device for tensor in form.tensors)
    if kernel.new and near and all(dims.values()):  # else a later call is looked at
        with first_results(kernel, _MASKED, known):
            check(out, None, mask.mask_mod, task.spec, dims, given)
    return out


def _new_masked(task: Task, mask: ModelMask, bias: Bias | None, dims: Dims) -> _MaskedKernel | None:
    """The kernel of a mask's form; None if the mask reads a tensor that its form does not have."""
    assert mask.mask_mod is not None
    form = form_of(mask.mask_mod)
    assert form is not None
    entry = flex._new_entry(task, (None, mask.mask_mod), bias, None, dims, form.device)
    operands = {}
    for name, source in entry.captured.sources.items():
        numbers = [n for n, tensor in enumerate(form.tensors) if tensor is source.tensor]
        if not numbers:
            return None
        operands[name] = (numbers[0], source.axes)
    return _MaskedKernel(entry.operator, entry.captured.mods, operands, entry.folder, entry.new)


def padded_order(spec: AttentionSpec, card: Gpu) -> store.Order:
    """The kernel of a spec for batches whose sequences have padding before or behind."""
    start = torch.tensor([0, 3], dtype=torch.int32)
    dims = {"batch": 2, "heads": spec.heads, "kv_heads": spec.kv_heads, "q_len": 64, "kv_len": 64}
    captured = capture(None, tokens_from_to(start, start + 60), dims)
    return order_of(Task(spec, card), captured)
