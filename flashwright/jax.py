"""Attention on JAX arrays, by the kernels of `flashwright.attention`.

    from flashwright.jax import attention

    out = jax.jit(partial(attention, causal=True))(q, k, v)

On a GPU the kernel is found or made when XLA asks for the code of a call, and XLA launches it
without Python. On the CPU the same definition in jax.numpy is computed.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

try:
    import jax
    import jax.numpy as jnp
    import jax_tvm_ffi
    from jax.extend.core import Primitive
    from jax.interpreters import batching, mlir
except ImportError as error:
    _TEXT = f"flashwright.jax needs JAX and jax-tvm-ffi, which cannot be imported ({error}): "
    raise ImportError(_TEXT + "pip install 'flashwright[jax]'") from error

from flashwright.author.builtin.mods import Mods
from flashwright.build import classes
from flashwright.build.arrays import NAMES, NO_BACKWARD
from flashwright.build.load import load
from flashwright.flex.capture import Captured
from flashwright.flex.task import (
    ROWS,
    Bias,
    NoKernel,
    Task,
    card,
    check_axes,
    check_types,
    compare_rows,
    dims_of,
    find_or_make,
    order_of,
    spec_of,
)
from flashwright.lang.diagnostic import Failed
from flashwright.spec import AttentionSpec

__all__ = ["NoKernel", "attention"]

Arrays = Mapping[str, Any]


class _Settings(NamedTuple):
    """What a call asks for beside its arrays."""

    causal: bool
    window: int | None
    softcap: float | None
    scale: float | None
    lse: bool


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
    return_lse: bool = False,
) -> Any:
    """Attention of (batch, heads, length, dim) arrays: O, or O and LSE with `return_lse`.

    The arguments are those of `flashwright.attention`. It works under jax.jit and jax.vmap. A
    gradient is an error, as kernels have no backward. On a GPU it raises NoKernel with the reason
    if no kernel can be made.
    """
    check_axes(query, key, value)
    given = {"q": query, "k": key, "v": value, "slopes": alibi, "sink": sink, "bias": bias}
    given = {name: array for name, array in given.items() if array is not None}
    _check_shapes(given)
    if bias is not None:
        given["bias"] = jnp.expand_dims(given["bias"], tuple(range(4 - given["bias"].ndim)))
    found = _compiled(_Settings(causal, window, softcap, scale, return_lse), given)
    return tuple(found) if return_lse else found[0]


def _check_shapes(given: Arrays) -> None:
    """Raise ValueError for an array that does not fit the query or the key."""
    q, k, v = given["q"], given["k"], given["v"]
    check_types(q, k, v)
    dims = dims_of(q, k)
    shared = (1 if k.shape[0] == 1 else q.shape[0], *k.shape[1:3])  # one batch of keys serves all
    for name, array, shape in (
        ("key", k, (*shared, q.shape[3])),
        ("value", v, (*shared, v.shape[3])),
        ("alibi", given.get("slopes"), q.shape[1:2]),
        ("sink", given.get("sink"), q.shape[1:2]),
    ):
        if array is not None and array.shape != shape:
            raise ValueError(f"{name} must have the shape {shape}, not {array.shape}")
    if not k.shape[1] or dims["heads"] % k.shape[1]:
        heads = f"kv_heads = {k.shape[1]} must divide heads = {dims['heads']}"
        raise ValueError(f"{heads}: give K and V fewer heads")
    if "bias" in given:
        Bias.own_axes(given["bias"], dims)


# --- the operation as JAX sees it ---------------------------------------------------------------

_operation = Primitive("flashwright_attention")  # its rules are at the end of this file
_operation.multiple_results = True


def _bind(settings: _Settings, given: Arrays) -> list[Any]:
    names, arrays = zip(*given.items(), strict=True)
    found: list[Any] = _operation.bind(*arrays, names=names, settings=settings)
    return found


def _refuse(settings: _Settings, saved: None, grads: Any) -> Any:
    fix = "call jax.lax.stop_gradient on its inputs or on its result"
    raise RuntimeError(f"backward of flashwright.jax.attention: {NO_BACKWARD}: {fix}")


_differentiable = jax.custom_vjp(_bind, nondiff_argnums=(0,))
_differentiable.defvjp(lambda settings, given: (_bind(settings, given), None), _refuse)
_compiled = jax.jit(_differentiable, static_argnums=0)


def _result_types(q: Any, v: Any, lse: bool) -> list[tuple[tuple[int, ...], Any]]:
    """The shape and the type of each result: O has the query's type, bf16 for fp8."""
    wide = jnp.float64 if q.dtype == jnp.float64 else jnp.float32
    out = jnp.bfloat16 if q.dtype.itemsize == 1 else q.dtype
    return [((*q.shape[:3], v.shape[3]), out), (q.shape[:3], wide)][: 1 + lse]


def _results(*arrays: Any, names: Sequence[str], settings: _Settings) -> list[Any]:
    q, v = (arrays[names.index(name)] for name in "qv")
    return [jax.core.ShapedArray(*kind) for kind in _result_types(q, v, settings.lse)]


def _mapped(
    arrays: Sequence[Any], axes: Sequence[int | None], *, names: Sequence[str], settings: _Settings
) -> tuple[list[Any], Sequence[int]]:
    """jax.vmap: the mapped axis joins the batch. If slopes or sinks are mapped, one by one."""
    many = next(x.shape[a] for x, a in zip(arrays, axes, strict=True) if a is not None)
    mapped = {n: a is not None for n, a in zip(names, axes, strict=True)}
    rows = zip(names, arrays, axes, strict=True)
    given = {n: x if a is None else jnp.moveaxis(x, a, 0) for n, x, a in rows}
    if mapped.get("slopes") or mapped.get("sink"):
        fixed = {n: x for n, x in given.items() if not mapped[n]}
        each = {n: x for n, x in given.items() if mapped[n]}
        found = jax.lax.map(lambda one: _bind(settings, {**fixed, **one}), each)
    else:
        batch = given["q"].shape[1 if mapped["q"] else 0]
        folded = {n: _folded(x, mapped[n], many, batch) for n, x in given.items()}
        found = [x.reshape(many, batch, *x.shape[1:]) for x in _bind(settings, folded)]
    return found, [0] * len(found)


def _folded(array: Any, mapped: bool, many: int, batch: int) -> Any:
    """An array with the mapped axis in its batch; the same one if all batches share it."""
    if not mapped and (array.ndim == 1 or array.shape[0] == 1):
        return array
    size = (many, batch, *array.shape[-3:])
    return jnp.broadcast_to(array, size).reshape(many * batch, *size[2:])


# --- on the CPU ---------------------------------------------------------------------------------


def _by_definition(*arrays: Any, names: Sequence[str], settings: _Settings) -> list[Any]:
    given = dict(zip(names, arrays, strict=True))
    kinds = _result_types(given["q"], given["v"], True)
    found = _defined(jnp, kinds[1][1], given, settings)
    return [x.astype(kind) for x, (_, kind) in zip(found, kinds, strict=True)][: 1 + settings.lse]


def _defined(xp: Any, kind: Any, given: Arrays, settings: _Settings, rows: Any = None) -> Any:
    """O and LSE in a floating type, by NumPy or jax.numpy; 0 and -inf in rows that see no key.

    `rows` are the rows that the query holds and their number in all; all of them if not given.
    """
    given = {name: x.astype(kind) for name, x in given.items()}
    q, k, v = given["q"], given["k"], given["v"]
    k, v = (xp.repeat(x, q.shape[1] // k.shape[1], axis=1) for x in (k, v))
    scale = q.shape[3] ** -0.5 if settings.scale is None else settings.scale
    scores = q @ k.swapaxes(2, 3) * scale
    if settings.softcap is not None:
        scores = settings.softcap * xp.tanh(scores / settings.softcap)
    which, q_len = (xp.arange(q.shape[2]), q.shape[2]) if rows is None else rows
    distance = xp.arange(k.shape[2]) - (which + k.shape[2] - q_len)[:, None]
    if "slopes" in given:
        scores = scores + given["slopes"][:, None, None] * distance
    scores = scores + given.get("bias", 0)
    seen = distance <= 0 if settings.causal else distance == distance
    if settings.window is not None:
        seen = seen & (abs(distance) < settings.window)
    scores = xp.where(seen, scores, -xp.inf)
    sink = given["sink"][:, None, None] if "sink" in given else xp.asarray(-xp.inf, dtype=kind)
    top = xp.maximum(scores.max(axis=-1, keepdims=True, initial=-xp.inf), sink)
    top = xp.where(top == -xp.inf, 0, top)
    weights = xp.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True) + xp.exp(sink - top)
    some = total != 0
    total = xp.where(some, total, 1)
    lse = xp.where(some, top + xp.log(total), -xp.inf)
    return weights / total @ v, lse[..., 0]


# --- on a GPU -----------------------------------------------------------------------------------

_PLATFORM = "gpu"
_FOLDERS: dict[str, Path] = {}
"""The packages of this process, by the digest of what they compute."""
_INPUTS: dict[str, tuple[str, ...]] = {}
"""The inputs of each kernel that XLA knows, by the name that it calls."""
_LOCK = threading.RLock()  # several threads may compile


def _by_kernel(*arrays: Any, names: Sequence[str], settings: _Settings) -> Any:
    """The call as XLA's code for a GPU; the kernel is found or made now."""
    given = dict(zip(names, arrays, strict=True))
    q, k, v = given["q"], given["k"], given["v"]
    dims, mods = dims_of(q, k), Mods()
    flags = {name: array in given for name, array in _FLAGS.items()}
    spec = spec_of(q, k, v, **settings._asdict() | {"lse": True}, **flags)
    if "bias" in given:
        bias = Bias.of(given["bias"], dims)
        mods = bias.added(mods)
        given["bias"] = bias.view(given["bias"]).astype(NAMES[bias.dtype])
    given |= {name: given[name].astype(jnp.float32) for name in _FLAGS.values() if name in given}
    given |= {x: jnp.broadcast_to(given[x], (q.shape[0], *given[x].shape[1:])) for x in "kv"}
    order = order_of(Task(spec, card(0)), Captured(mods, {}))
    with _LOCK:
        new = False
        if order.key not in _FOLDERS:
            _FOLDERS[order.key], new = find_or_make(order)
        folder = _FOLDERS[order.key]
        try:
            target = _target(folder, classes.serving(folder, dims), settings.lse)
            if new:
                _check_first_output(arrays, names, settings, spec)
        except BaseException as error:
            if new:  # it is not checked, so it is not kept
                shutil.rmtree(_FOLDERS.pop(order.key), ignore_errors=True)
            if isinstance(error, Failed):
                raise NoKernel(str(error)) from None
            raise
    kinds = [jax.ShapeDtypeStruct(*kind) for kind in _result_types(q, v, settings.lse)]
    return jax.ffi.ffi_call(target, kinds)(*(given[name.lower()] for name in _INPUTS[target]))


_FLAGS = {"alibi": "slopes", "sink": "sink"}


def _target(package: Path, folder: Path, lse: bool) -> str:
    """The name by which XLA calls a kernel of a package, the same in every process."""
    outputs = ("O", "LSE")[: 1 + lse]
    name = "/".join(("flashwright", package.name, str(folder.relative_to(package)), *outputs))
    if name not in _INPUTS:
        kernel = load(folder)
        # A CUDA graph may hold the launch: it copies the parameters and the tensor maps.
        jax_tvm_ffi.register_ffi_target(
            name,
            kernel.of_tensors((*kernel.inputs, *outputs)),
            platform=_PLATFORM,
            allow_cuda_graph=True,
        )
        _INPUTS[name] = kernel.inputs
    return name


def _check_first_output(
    arrays: Sequence[Any], names: Sequence[str], settings: _Settings, spec: AttentionSpec
) -> None:
    """Raise WrongKernel if rows of a new kernel are not what the definition gives in fp64.

    A traced call has no values yet, so its arrays are random ones, of at most two batches.
    """
    sizes = [(min(x.shape[0], 2), *x.shape[1:]) if x.ndim == 4 else x.shape for x in arrays]
    if not all(map(all, sizes)):
        return
    draw = np.random.default_rng(0)
    given = {
        name: np.resize(draw.standard_normal(1_000_003).astype(x.dtype), size)
        for name, x, size in zip(names, arrays, sizes, strict=True)
    }
    if "slopes" in given:
        given["slopes"] = abs(given["slopes"]) / 8
    with jax.ensure_compile_time_eval():
        on_gpu = jax.device_put([*given.values()], jax.local_devices(backend=_PLATFORM)[0])
        run = jax.jit(partial(_by_kernel, names=names, settings=settings))
        out = np.asarray(run(*on_gpu)[0], np.float64)
    heads, q_len = given["q"].shape[1:3]
    group, keys = heads // given["k"].shape[1], np.arange(given["k"].shape[2])
    rows = np.linspace(0, q_len - 1, min(ROWS, q_len)).astype(int)
    for b, h in {(0, 0), (out.shape[0] - 1, heads - 1)}:
        part = {n: x[h : h + 1] for n, x in given.items() if x.ndim == 1}
        part |= {n: _rows(given[n], b, h // group, keys) for n in "kv"}
        part |= {n: _rows(given[n], b, h, rows) for n in ("q", "bias") if n in given}
        wanted, _ = _defined(np, np.float64, part, settings, (rows, q_len))
        compare_rows(out[b, h, rows], wanted[0, 0], spec, (b, h))


def _rows(array: Any, batch: int, head: int, rows: Any) -> Any:
    """Rows of one head, in four axes; an axis of one position serves all."""
    one = array[batch % array.shape[0], head % array.shape[1]]
    return one[rows % one.shape[0]][None, None]


_operation.def_abstract_eval(_results)
batching.primitive_batchers[_operation] = _mapped
for _platform, _rule in (("cpu", _by_definition), ("cuda", _by_kernel)):
    _lowering = mlir.lower_fun(_rule, multiple_results=True)
    mlir.register_lowering(_operation, _lowering, platform=_platform)
