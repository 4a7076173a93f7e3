"""FlexAttention's own signature, and attention by keywords, on kernels of ours.

The first call for an operator captures its functions, makes the kernel or finds it in the store
(generate/store.py) and registers it with PyTorch. Later calls look it up.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from flashwright.author.builtin.mods import BlockLists
from flashwright.flex import fallback as by_pytorch
from flashwright.flex.blocks import Blocked, blocked
from flashwright.flex.capture import Captured, NotCaptured, Watch, capture
from flashwright.flex.gradient_trial import GradientTrial
from flashwright.flex.task import (
    Bias,
    Dims,
    NoKernel,
    Task,
    card,
    check_axes,
    check_settings,
    check_shapes,
    check_types,
    dims_of,
    find_or_make,
    first_results,
    order_of,
    spec_of,
)
from flashwright.flex.trial import check
from flashwright.generate.store import tell
from flashwright.gpu import Gpu
from flashwright.lang.diagnostic import Failed
from flashwright.pytorch.operator import Operator, torch_operator
from flashwright.pytorch.rules import is_deterministic

Function = Callable[..., Any]


@dataclass
class _Entry:
    """A kernel that was made for a task and two functions."""

    operator: Operator
    captured: Captured
    watch: Watch
    """What the functions saw when they were captured."""
    folder: Path
    new: bool
    """Whether the kernel was made now, so that its first output is checked."""

    def tensors(self, given: Mapping[str, Any], dims: Dims) -> dict[str, Any]:
        """The operator's inputs by name."""
        found = {name.lower(): s.view(dims) for name, s in self.captured.sources.items()}
        found |= {name: given[name].float() for name in ("slopes", "sink") if name in given}
        found |= {name: given[name] for name in "qkv"}
        if "bias" in given:
            found["bias"] = Bias.of(given["bias"], dims).view(given["bias"])
        if dims["batch"] > 1 and given["k"].shape[0] == 1:
            shape = (dims["batch"], *given["k"].shape[1:])
            found |= {name: given[name].expand(shape).contiguous() for name in "kv"}
        return found


_KERNELS: dict[tuple[Any, ...], _Entry | None] = {}
_QUICK: dict[tuple[Any, ...], _Entry] = {}
"""Those of them that take Q, K and V alone: their calls need no look at sizes."""
_MOST = 512
"""Kernels to remember. A function that is made anew for every batch is another one each time."""


def flex_attention(
    query: Any,
    key: Any,
    value: Any,
    score_mod: Function | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Mapping[str, Any] | None = None,
    *,
    return_aux: Any = None,
) -> Any:
    """torch.nn.attention.flex_attention.flex_attention, by a kernel of ours.

    CPU tensors are computed by PyTorch, with gradients. `kernel_options` are PyTorch's and have no
    effect. Raises NoKernel with the reason and the line where no kernel can be made.
    """
    _check_tensors(query, key, value)
    if score_mod is not None:
        _check_arguments({}, {"score_mod": score_mod})
    if getattr(return_aux, "max_scores", False):
        raise NoKernel("return_aux: max_scores is no output of our kernels; ask for lse alone")
    check_axes(query, key, value)
    if query.shape[1] != key.shape[1] and not enable_gqa:
        raise ValueError(
            f"query has {query.shape[1]} heads and key {key.shape[1]}: pass enable_gqa=True"
        )
    lists = blocked(block_mask, query, key) if block_mask is not None else None
    mask_mod = lists.mask if lists is not None else None
    if query.is_cpu:
        _check_types(query, key, value)
        check_shapes({"q": query, "k": key, "v": value})
        check_settings(None, None, scale)
        out, lse = by_pytorch.dense(query, key, value, score_mod, mask_mod, scale)
    else:
        task = task_of(query, key, value, (False, None, None, scale), ())
        given = {"q": query, "k": key, "v": value}
        if return_aux is None and not return_lse:
            return _run(task, score_mod, mask_mod, given, lists, return_lse=False)
        out, lse = _run(task, score_mod, mask_mod, given, lists)
    if return_aux is not None:
        from torch.nn.attention.flex_attention import AuxOutput

        return out, AuxOutput(lse=lse if return_aux.lse else None)
    return (out, lse) if return_lse else out


def attention(
    query: Any,
    key: Any,
    value: Any,
    *,
    causal: bool = False,
    window: int | None = None,
    softcap: float | None = None,
    sink: Any = None,
    alibi: Any = None,
    bias: Any = None,
    scale: float | None = None,
    score_mod: Function | None = None,
    mask_mod: Function | None = None,
    block_mask: Any = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    fallback: bool = False,
) -> Any:
    """Attention of (batch, heads, length, dim) tensors, by a kernel that is made for it once.

    The last query stands at the last key for `causal` and `window`. `sink` has a logit and `alibi`
    a slope for each head, `bias` a number for each score, broadcast from the last axes. `score_mod`
    comes after all of these, `mask_mod` and `block_mask` on top of the other masks; both are
    FlexAttention's. With `deterministic` the gradients have the same bits in every run; by default
    they do if PyTorch's deterministic algorithms are on. With `fallback` PyTorch computes what no
    kernel can be made for, with a warning; otherwise that is NoKernel with the reason.
    """
    _check_tensors(query, key, value)
    if not sink is alibi is bias is score_mod is mask_mod is None:
        tensors = {"sink": sink, "alibi": alibi, "bias": bias}
        _check_arguments(tensors, {"score_mod": score_mod, "mask_mod": mask_mod})
    check_axes(query, key, value)
    lists = blocked(block_mask, query, key) if block_mask is not None else None
    if lists is not None:
        mask_mod = both(mask_mod, lists.mask)
    if not query.is_cpu:
        given = {"q": query, "k": key, "v": value}
        flags: tuple[str, ...] = ()
        if alibi is not None:
            given["slopes"], flags = alibi, ("alibi",)
        if sink is not None:
            given["sink"], flags = sink, (*flags, "sink")
        if bias is not None:
            given["bias"] = bias
        try:
            task = task_of(query, key, value, (causal, window, softcap, scale), flags)
            return _run(task, score_mod, mask_mod, given, lists, return_lse, deterministic)
        except NoKernel as error:
            if not fallback:
                raise
            warnings.warn(f"PyTorch computes it: {error}", RuntimeWarning, stacklevel=2)
    _check_types(query, key, value)
    extras = {"sink": sink, "alibi": alibi, "bias": bias}
    extras |= {"score_mod": score_mod, "mask_mod": mask_mod}
    more = {name: extra for name, extra in extras.items() if extra is not None}
    how: dict[str, Any] = {"causal": causal, "window": window, "softcap": softcap, "scale": scale}
    return by_pytorch.attention(query, key, value, return_lse=return_lse, **how, **more)


def _check_tensors(query: Any, key: Any, value: Any) -> None:
    """Raise TypeError for one that is no tensor."""
    if isinstance(query, _TENSOR) and isinstance(key, _TENSOR) and isinstance(value, _TENSOR):
        return
    for name, given in (("query", query), ("key", key), ("value", value)):
        if not isinstance(given, _TENSOR):
            raise TypeError(f"{name} must be a torch.Tensor, not {type(given).__name__}")


_TENSOR = torch.Tensor


def _check_arguments(tensors: Mapping[str, Any], functions: Mapping[str, Any]) -> None:
    """Raise TypeError for an argument that is given and is no tensor, or no function."""
    for name, tensor in tensors.items():
        if tensor is not None and not isinstance(tensor, _TENSOR):
            raise TypeError(f"{name} must be a torch.Tensor, not {type(tensor).__name__}")
    for name, function in functions.items():
        if function is not None and not callable(function):
            raise TypeError(f"{name} must be a function, not {type(function).__name__}")
    if tensors.get("bias") is not None and tensors["bias"].dtype == torch.bool:
        raise TypeError("bias is bool, and numbers are added to the scores: pass a mask_mod")


def _check_types(query: Any, key: Any, value: Any) -> None:
    """Raise TypeError or ValueError for types that PyTorch cannot compute attention with."""
    check_types(query, key, value)
    if not query.is_floating_point():
        raise TypeError(f"query is {query.dtype}: pass a floating-point type")


@lru_cache(_MOST)
def both(one: Function | None, other: Function | None) -> Function | None:
    """The mask of two masks."""
    if one is None or other is None:
        return one or other
    first, second = one, other

    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return first(b, h, q, kv) & second(b, h, q, kv)

    return mask


# --- one call -----------------------------------------------------------------------------------


def _run(
    task: Task,
    score_mod: Function | None,
    mask_mod: Function | None,
    given: Mapping[str, Any],
    lists: Blocked | None = None,
    return_lse: bool = True,
    deterministic: bool | None = None,
) -> Any:
    """O of a call, or O and LSE. `given` has q, k, v, and slopes, sink and bias if there are any.

    torch.compile leaves its graph for this: what is looked up here is no part of a graph.
    """
    if torch.compiler.is_compiling():
        more = (lists, return_lse, deterministic)
        return torch.compiler.disable(_run)(task, score_mod, mask_mod, given, *more)
    q, k, v = given["q"], given["k"], given["v"]
    used = _used(lists)
    why = _no_gradient(used, given, deterministic) if used is not None else ""
    if why:
        _tell_once(f"block_mask: the kernel visits the blocks within the mask's own bounds: {why}")
        lists = used = None
    quick = _QUICK.get((task, score_mod, mask_mod)) if len(given) == 3 and lists is None else None
    if quick is not None and quick.watch.same() and q.shape[0] == k.shape[0]:
        return quick.operator(q, k, v, return_lse=return_lse, deterministic=deterministic)
    dims = dims_of(q, k)
    bias = Bias.of(given["bias"], dims) if "bias" in given else None
    known = (task, score_mod, mask_mod, bias, used)
    entry = _KERNELS.get(known)
    if entry is not None and not entry.watch.same():
        entry = _KERNELS[known] = _renewed(
            entry, (score_mod, mask_mod), bias, lists, dims, q.device
        )
    if entry is None:
        while len(_KERNELS) >= _MOST:
            del _KERNELS[next(iter(_KERNELS))]
            _QUICK.clear()
        entry = _KERNELS[known] = _new_entry(
            task, (score_mod, mask_mod), bias, lists, dims, q.device
        )
    tensors = entry.tensors(given, dims)
    if lists is not None:
        tensors |= {"counts": lists.counts, "full": lists.full, "blocks": lists.blocks}
    inputs = entry.operator.inputs
    if len(given) == 3 or trains(given):  # a later call may be a quick one
        check_first_gradients(entry.operator, task, score_mod, mask_mod, given)
    arguments = (tensors[name] for name in inputs)
    found = entry.operator(*arguments, return_lse=return_lse, deterministic=deterministic)
    if entry.new and all(dims.values()):  # else a later call is looked at
        out = found[0] if return_lse else found
        with first_results(entry, _KERNELS, known):
            check(out, score_mod, mask_mod, task.spec, dims, given)
    if inputs == ("q", "k", "v") and lists is None and not entry.new:
        _QUICK[task, score_mod, mask_mod] = entry
    return found


def _new_entry(
    task: Task,
    functions: tuple[Function | None, Function | None],
    bias: Bias | None,
    lists: Blocked | None,
    dims: Dims,
    device: Any,
) -> _Entry:
    watch = Watch(*functions)
    try:
        captured = _captured(functions, bias, lists, dims, device)
        folder, new = find_or_make(order_of(task, captured))
        made = _Entry(torch_operator(folder), captured, watch, folder, new)
    except (NotCaptured, Failed) as error:
        raise NoKernel(str(error)) from None
    if new and lists is not None:
        tell(f"block_mask: {lists.decision}")
    if watch.blind:
        tell(
            f"{watch.blind!r} is an object that may change inside, so the function is recorded at "
            "every call (milliseconds); tensors and numbers that it names directly are watched"
        )
    return made


def _no_gradient(used: BlockLists, given: Mapping[str, Any], deterministic: bool | None) -> str:
    """Why lists have no gradient that a call may ask for; empty if they have."""
    if not trains(given):
        return ""
    if used.per_head and given["q"].shape[1] > given["k"].shape[1]:
        return "heads that share keys have lists of their own, which have no gradient"
    ordered = is_deterministic(deterministic)
    return "blocks in lists have no order for deterministic gradients" if ordered else ""


def trains(given: Mapping[str, Any]) -> bool:
    """Whether a call's gradients may be asked for."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in given.values())


def check_first_gradients(
    operator: Operator,
    task: Task,
    score_mod: Function | None,
    mask_mod: Function | None,
    given: Mapping[str, Any],
) -> None:
    """Have the first gradients of a call compared with its functions, if there were none yet. What
    the call reads beside q, k and v stays in memory until then."""
    extras = {name: x for name, x in given.items() if name not in ("q", "k", "v")}
    operator.check_first_backward(GradientTrial(task.spec, score_mod, mask_mod, extras))


@lru_cache
def _tell_once(text: str) -> None:
    tell(text)


def _used(lists: Blocked | None) -> BlockLists | None:
    """The lists that a kernel visits."""
    try:
        return lists.used if lists is not None else None
    except NotCaptured as error:
        raise NoKernel(str(error)) from None


def _captured(
    functions: tuple[Function | None, Function | None],
    bias: Bias | None,
    lists: Blocked | None,
    dims: Dims,
    device: Any,
) -> Captured:
    """The functions with the lists and the bias of a call."""
    captured = capture(*functions, dims, device)
    if lists is None or lists.used is None:
        walked = None
    elif captured.mods.mask == lists.captured.mods.mask:
        # Which blocks are visited, and which are full, is not asked again for each element.
        captured = capture(functions[0], lists.function, dims, device)
        walked = replace(lists.used, full=lists.used.full and captured.mods.mask is not None)
    else:  # more is hidden than the BlockMask hides, in full blocks as well
        walked = replace(lists.used, full=False)
    mods = replace(captured.mods, lists=walked)
    return replace(captured, mods=mods if bias is None else bias.added(mods))


def _renewed(
    entry: _Entry,
    functions: tuple[Function | None, Function | None],
    bias: Bias | None,
    lists: Blocked | None,
    dims: Dims,
    device: Any,
) -> _Entry | None:
    """The entry with what the functions see now; None if that is another kernel."""
    try:
        captured = _captured(functions, bias, lists, dims, device)
    except NotCaptured as error:
        raise NoKernel(str(error)) from None
    if captured.mods != entry.captured.mods:
        return None
    return replace(entry, captured=captured, watch=Watch(*functions))


# --- what a call asks for -----------------------------------------------------------------------


SETTINGS = ("causal", "window", "softcap", "scale", "kv_dtype", "latent")


def task_of(
    query: Any, key: Any, value: Any, plain: tuple[Any, ...], flags: tuple[str, ...]
) -> Task:
    """The task of a call: `plain` are the values of SETTINGS, without the last ones if they are
    None."""
    shape = query.shape
    shapes = (shape[1], shape[3], key.shape[1], value.shape[3])
    known = (query.dtype, key.dtype, value.dtype, query.device, shapes, plain, flags)
    task = _TASKS.get(known)
    if task is None:
        pairs = zip(SETTINGS, plain, strict=False)
        settings = {n: s for n, s in pairs if s is not None and s is not False}  # 0 is a mistake
        spec = spec_of(query, key, value, **settings, **dict.fromkeys(flags, True))
        task = _TASKS[known] = Task(spec, card_of(query.device))
    return task


_TASKS: dict[tuple[Any, ...], Task] = {}


def card_of(device: Any) -> Gpu:
    """The GPU of a CUDA device."""
    return card(device.index if device.index is not None else torch.cuda.current_device())
