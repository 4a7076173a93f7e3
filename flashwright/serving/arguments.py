"""The arguments that FlashAttention's functions share, as a task for our kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from flashwright.flex.attention import SETTINGS, task_of
from flashwright.flex.task import KEY_DTYPES, NoKernel, Task, spec_of
from flashwright.spec import AttentionSpec, scale_of

Tensors = Mapping[str, Any]
FLAGS = {"slopes": "alibi", "sink": "sink"}
"""The settings of a spec that tensors of a call stand for."""
ARGUMENTS = {"slopes": "alibi_slopes", "sink": "sink"}
SCALES = ("kdescale", "vdescale")
CACHE_TYPES = {getattr(torch, name): kind for name, kind in KEY_DTYPES.items()}
"""The types that keys and values may have beside 16-bit queries."""


def masks_of(causal: bool, window: Any) -> tuple[bool, tuple[int, int]]:
    """Whether no later key is seen, and a window's keys to the left and to the right, -1 for all. A
    window that ends at a query's own key is causal. Raises TypeError for what is no window."""
    pair = window if type(window) is tuple else tuple(window) if isinstance(window, list) else ()
    if len(pair) != 2:
        raise TypeError(f"window_size must be (left, right), -1 for all; it is {window!r}")
    left, right = pair
    return (True, (left, -1)) if causal or right == 0 else (False, (left, right))


def check_tensors(tensors: Tensors, names: Mapping[str, str], *needed: str) -> None:
    """Raise TypeError, with the argument that `names` has for it, for what is no tensor. Those that
    are `needed` may not be None."""
    for name, tensor in tensors.items():
        if isinstance(tensor, torch.Tensor) or (tensor is None and name not in needed):
            continue
        kind = "None" if tensor is None else type(tensor).__name__
        raise TypeError(f"{names.get(name, name)} must be a torch.Tensor, not {kind}")


def check_range(name: str, numbers: Any, most: int, limit: str) -> None:
    """Raise ValueError for a number below 0 or above the most, which is what `limit` says. Numbers
    on a GPU are not looked at, as that would wait for it."""
    if numbers.is_cpu and numbers.numel():
        low, high = int(numbers.min()), int(numbers.max())
        if low < 0 or high > most:
            raise ValueError(f"{name} has {high if high > most else low}: {limit} {most}")


def check_splits(splits: Any) -> None:
    """Raise ValueError unless it is a number of thread blocks, or 0."""
    if not isinstance(splits, int) or splits < 0:
        text = "num_splits must be a number of thread blocks, or 0 to have it chosen"
        raise ValueError(f"{text}; it is {splits!r}")


def settings_of(
    scale: float | None, causal: bool, window: Sequence[int], softcap: float
) -> dict[str, Any]:
    """The spec's settings for FlashAttention's. Raises NoKernel for windows that no kernel has."""
    found: dict[str, Any] = {"causal": True} if causal else {}
    left, right = window
    if left >= 0 or right >= 0:
        if not causal and left != right:
            text = (
                f"window_size = {(left, right)}: kernels see as far to the left as to the right, "
            )
            raise NoKernel(text + "or to the left alone with causal=True")
        found["window"] = left + 1
    if softcap:
        found["softcap"] = float(softcap)
    if scale is not None:
        found["scale"] = float(scale)
    return found


def extras_of(slopes: Any, sink: Any, causal: bool, heads: int) -> dict[str, Any]:
    """The tensors with a number for each head. Raises NoKernel for others."""
    if slopes is not None and not causal:
        raise NoKernel("alibi_slopes: kernels have ALiBi with causal=True alone")
    found = {n: x for n, x in (("slopes", slopes), ("sink", sink)) if x is not None}
    for name, tensor in found.items():
        if tuple(tensor.shape) != (heads,):
            text = f"{ARGUMENTS[name]} must have a number for each of {heads} heads"
            raise NoKernel(f"{text}, not the shape {tuple(tensor.shape)}")
    return found


def scales_of(
    given: Tensors, batch: int, k_descale: Any, v_descale: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings and the tensors of a call whose keys and values have 8 bits and queries 16.
    Raises NoKernel or ValueError for scales without such, and for those of another shape."""
    query, key = given["q"], given["k"]
    named = {"k_descale": k_descale, "v_descale": v_descale}
    if key.dtype == query.dtype or key.dtype not in CACHE_TYPES:
        if any(scale is not None for scale in named.values()):
            kinds = " or ".join(str(kind) for kind in CACHE_TYPES)
            raise NoKernel(f"k_descale and v_descale are for keys in {kinds} and 16-bit queries")
        return {}, {}
    shape = batch, key.shape[-2]
    tensors = {
        name.replace("_", ""): _scale(name, scale, shape, query.device)
        for name, scale in named.items()
    }
    return {"kv_dtype": CACHE_TYPES[key.dtype]}, tensors


_NUMBERS: dict[tuple[float, Any], Any] = {}


def _number(number: float, device: Any) -> Any:
    """A number as a tensor with two axes; made once."""
    known = number, device
    tensor = _NUMBERS.get(known)
    if tensor is None:
        tensor = torch.full((1, 1), number, device=device)
        if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
            _NUMBERS[known] = tensor  # else it belongs to the graph
    return tensor


def _scale(name: str, scale: Any, shape: tuple[int, int], device: Any) -> Any:
    """A scale as (batch, KV heads) in fp32, from such a tensor, or from a number for all."""
    if scale is None or isinstance(scale, (int, float)):
        return _number(1.0 if scale is None else float(scale), device).expand(shape)
    if not isinstance(scale, torch.Tensor):
        raise TypeError(f"{name} must be a number or a torch.Tensor, not {type(scale).__name__}")
    if scale.dtype != torch.float32 or scale.device != device:
        kind = f"{scale.dtype} on {scale.device}"
        raise TypeError(f"{name} must be float32 on {device}; it is {kind}")
    if scale.numel() == 1:
        return scale.reshape(1, 1).expand(shape)
    if tuple(scale.shape) != shape:
        wanted = "a number, or (batch, KV heads)"
        raise ValueError(f"{name} must be {wanted} = {shape}, not {tuple(scale.shape)}")
    return scale


def in_fp32(tensor: Any) -> Any:
    """A tensor in the type that kernels take. What is none is refused where a call is checked."""
    plain = not isinstance(tensor, torch.Tensor) or tensor.dtype == torch.float32
    return tensor if plain else tensor.float()


def take_scales(tensors: dict[str, Any], k_scale: Any, v_scale: Any) -> tuple[Any, Any]:
    """Put the scales of 8-bit keys and values that are tensors among a call's tensors, and return
    those that are numbers; None in the other place."""
    if k_scale is None and v_scale is None:
        tensors["kdescale"] = tensors["vdescale"] = None
        return None, None
    numbers = []
    for name, scale in zip(SCALES, (k_scale, v_scale), strict=True):
        is_tensor = isinstance(scale, torch.Tensor)
        tensors[name] = scale if is_tensor else None
        numbers.append(None if is_tensor else scale)
    return numbers[0], numbers[1]


def given_scales(tensors: Tensors, numbers: Sequence[Any]) -> list[Any]:
    """What `take_scales` was given."""
    pairs = zip(SCALES, numbers, strict=True)
    return [number if tensors[name] is None else tensors[name] for name, number in pairs]


def task(given: Tensors, settings: Mapping[str, Any]) -> Task:
    """The task of a call with tensors on a GPU: (..., tokens, heads, dim)."""
    flags = tuple(flag for name, flag in FLAGS.items() if name in given)
    query, key, value = _alike(given)
    usual = _with_usual_scale(settings, query)
    return task_of(query, key, value, tuple(usual.get(name) for name in SETTINGS), flags)


def spec(given: Tensors, settings: Mapping[str, Any]) -> AttentionSpec:
    """The spec of a call with tensors anywhere."""
    flags = dict.fromkeys((flag for name, flag in FLAGS.items() if name in given), True)
    query, key, value = _alike(given)
    return spec_of(query, key, value, **_with_usual_scale(settings, query), **flags)


def _with_usual_scale(settings: Mapping[str, Any], query: Any) -> dict[str, Any]:
    """The settings, where engines that say the usual scale have the same kernel as others."""
    return {**settings, "scale": scale_of(settings.get("scale"), query.shape[-1])}


def _alike(given: Tensors) -> list[Any]:
    """Q, K and V with the axes (batch, heads, tokens, dim), to read shapes and types from."""
    turned = (given[name].transpose(-3, -2) for name in "qkv")
    return [x if x.ndim == 4 else x[None] for x in turned]


def check_axes(given: Tensors, axes: Mapping[str, str]) -> None:
    """Raise ValueError for a tensor that has other axes than these, which are told by name."""
    check_tensors({name: given[name] for name in axes}, {}, *axes)
    for name, wanted in axes.items():
        if given[name].ndim != wanted.count(",") + 1:
            shape = tuple(given[name].shape)
            raise ValueError(f"{name} must have the axes ({wanted}); its shape is {shape}")


def check_widths(q: Any, name: str, keys: Any) -> None:
    """Raise ValueError for keys of another width than queries."""
    if keys.shape[-1] != q.shape[-1]:
        text = f"{name} is {keys.shape[-1]} wide and q {q.shape[-1]}: make them alike"
        raise ValueError(text)


def check_numbers(name: str, tensor: Any, device: Any, shape: Sequence[int | None]) -> None:
    """Raise TypeError or ValueError unless a tensor has int32 numbers, of that shape and there."""
    check_tensors({name: tensor}, {}, name)
    fits = tensor.ndim == len(shape) and all(
        want in (None, have) for want, have in zip(shape, tensor.shape, strict=True)
    )
    if tensor.dtype != torch.int32 or not fits:
        wanted = ", ".join("any" if n is None else str(n) for n in shape)
        text = f"{name} must be int32 of shape ({wanted})"
        raise TypeError(f"{text}; it is {tensor.dtype}, of shape {tuple(tensor.shape)}")
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}, q on {device}")
