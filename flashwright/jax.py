"""Attention on JAX arrays, by the kernels of `flashwright.attention`.

    from flashwright.jax import attention

    out = jax.jit(partial(attention, causal=True))(q, k, v)

On a GPU the kernel is found or made when XLA asks for the code of a call, and XLA launches it
without Python. So is the derived backward, when XLA asks for the code of a gradient. On the CPU the
same definition in jax.numpy is computed.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

try:
    import jax
    import jax.numpy as jnp
    import jax_tvm_ffi
    from jax.extend.core import Primitive
    from jax.interpreters import ad, batching, mlir
except ImportError as error:
    _TEXT = f"flashwright.jax needs JAX and jax-tvm-ffi, which cannot be imported ({error}): "
    raise ImportError(_TEXT + "pip install 'flashwright[jax]'") from error

from flashwright.author.builtin.mods import Mods
from flashwright.build import classes
from flashwright.build.arrays import NAMES
from flashwright.build.load import Kernel, load
from flashwright.flex.capture import Captured
from flashwright.flex.task import (
    ROWS,
    Bias,
    NoKernel,
    Task,
    WrongKernel,
    card,
    check_axes,
    check_shapes,
    check_types,
    compare_rows,
    dims_of,
    find_or_make,
    order_of,
    spec_of,
)
from flashwright.generate import store
from flashwright.generate.backward import BackwardOrder
from flashwright.lang.diagnostic import Failed
from flashwright.spec import AttentionSpec, BadSpec

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

    The arguments are those of `flashwright.attention`. It works under jax.jit, jax.vmap and
    jax.grad. On a GPU it raises NoKernel with the reason if no kernel can be made, or no backward
    can be derived.
    """
    check_axes(query, key, value)
    given = {"q": query, "k": key, "v": value, "slopes": alibi, "sink": sink, "bias": bias}
    given = {name: array for name, array in given.items() if array is not None}
    check_types(query, key, value)
    check_shapes(given)
    if bias is not None:
        given["bias"] = jnp.expand_dims(given["bias"], tuple(range(4 - given["bias"].ndim)))
    found = _compiled(_Settings(causal, window, softcap, scale, return_lse), given)
    return tuple(found) if return_lse else found[0]


# --- the operations as JAX sees them ------------------------------------------------------------

_operation = Primitive("flashwright_attention")  # its rules are at the end of this file
_operation.multiple_results = True
_backward = Primitive("flashwright_attention_backward")
_backward.multiple_results = True
_FROM_FORWARD = ("o", "lse", "do", "dlse")
"""What the backward takes beside the arrays of the call; `dlse` if the caller has the LSE."""


def _bind(operation: Any, settings: _Settings, given: Arrays) -> list[Any]:
    names, arrays = zip(*given.items(), strict=True)
    found: list[Any] = operation.bind(*arrays, names=names, settings=settings)
    return found


def _forward(settings: _Settings, given: Arrays) -> tuple[list[Any], Arrays]:
    """The results under jax.grad, and what the backward needs."""
    out, lse = _bind(_operation, settings._replace(lse=True), given)
    return [out, lse][: 1 + settings.lse], {**given, "o": out, "lse": lse}


def _gradients(settings: _Settings, saved: Arrays, grads: Sequence[Any]) -> tuple[Arrays]:
    """The gradients of the arrays, from those of the results."""
    given = {**saved, **dict(zip(("do", "dlse"), grads, strict=False))}
    found = _bind(_backward, settings, given)
    return (dict(zip(_differentiated(tuple(given)), found, strict=True)),)


def _differentiated(names: Sequence[str]) -> list[str]:
    """The arrays of a call among those of its backward."""
    return [name for name in names if name not in _FROM_FORWARD]


def _refuse(*_: Any, **settings: Any) -> Any:
    """A derivative of the backward, or of the forward under another derivative."""
    raise NotImplementedError(
        "flashwright.jax.attention: a second derivative has no kernel: call jax.lax.stop_gradient "
        "on the arrays of which the first one is taken"
    )


_differentiable = jax.custom_vjp(partial(_bind, _operation), nondiff_argnums=(0,))
_differentiable.defvjp(_forward, _gradients)
_compiled = jax.jit(_differentiable, static_argnums=0)


def _result_types(q: Any, v: Any, lse: bool) -> list[tuple[tuple[int, ...], Any]]:
    """The shape and the type of each result: O has the query's type, bf16 for fp8."""
    wide = jnp.float64 if q.dtype == jnp.float64 else jnp.float32
    out = jnp.bfloat16 if q.dtype.itemsize == 1 else q.dtype
    return [((*q.shape[:3], v.shape[3]), out), (q.shape[:3], wide)][: 1 + lse]


def _results(*arrays: Any, names: Sequence[str], settings: _Settings) -> list[Any]:
    q, v = (arrays[names.index(name)] for name in "qv")
    return [jax.core.ShapedArray(*kind) for kind in _result_types(q, v, settings.lse)]


def _gradient_types(*arrays: Any, names: Sequence[str], settings: _Settings) -> list[Any]:
    given = dict(zip(names, arrays, strict=True))
    own = (given[name] for name in _differentiated(names))
    return [jax.core.ShapedArray(array.shape, array.dtype) for array in own]


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
        found = jax.lax.map(lambda one: _bind(_operation, settings, {**fixed, **one}), each)
    else:
        batch = given["q"].shape[1 if mapped["q"] else 0]
        folded = {n: _folded(x, mapped[n], many, batch) for n, x in given.items()}
        found = [x.reshape(many, batch, *x.shape[1:]) for x in _bind(_operation, settings, folded)]
    return found, [0] * len(found)


def _mapped_gradients(
    arrays: Sequence[Any], axes: Sequence[int | None], *, names: Sequence[str], settings: _Settings
) -> tuple[list[Any], Sequence[int]]:
    """jax.vmap of the backward: the mapped axis joins the batch. If a gradient is a sum over the
    batch, one by one."""
    many = next(x.shape[a] for x, a in zip(arrays, axes, strict=True) if a is not None)
    rows = zip(names, arrays, axes, strict=True)
    given = {
        n: jnp.broadcast_to(x, (many, *x.shape)) if a is None else jnp.moveaxis(x, a, 0)
        for n, x, a in rows
    }
    batch = given["q"].shape[1]
    if all(x.ndim > 2 and x.shape[1] == batch for x in given.values()):
        folded = {n: x.reshape(many * batch, *x.shape[2:]) for n, x in given.items()}
        found = [x.reshape(many, batch, *x.shape[1:]) for x in _bind(_backward, settings, folded)]
    else:
        found = jax.lax.map(partial(_bind, _backward, settings), given)
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


def _gradients_by_definition(*arrays: Any, names: Sequence[str], settings: _Settings) -> list[Any]:
    given = dict(zip(names, arrays, strict=True))
    own = _differentiated(names)
    define = partial(_by_definition, names=own, settings=settings)
    _, pull = jax.vjp(define, *(given[name] for name in own))
    return list(pull([given[name] for name in ("do", "dlse")[: 1 + settings.lse]]))


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
_KERNELS: dict[str, Kernel] = {}
"""The kernels that XLA knows, by the name that it calls."""
_LOCK = threading.RLock()  # several threads may compile
_FLAGS = {"alibi": "slopes", "sink": "sink"}


def _by_kernel(*arrays: Any, names: Sequence[str], settings: _Settings) -> Any:
    """The call as XLA's code for a GPU; the kernel is found or made now."""
    given = dict(zip(names, arrays, strict=True))
    folder = _forward_package(given, settings)
    serving = classes.serving(folder, dims_of(given["q"], given["k"]))
    outputs = ("O", "LSE")[: 1 + settings.lse]
    target = _target(folder, serving, load, outputs)
    kinds = _result_types(given["q"], given["v"], settings.lse)
    ready = _arranged(given)
    inputs = (ready[name.lower()] for name in _KERNELS[target].inputs)
    return jax.ffi.ffi_call(target, [jax.ShapeDtypeStruct(*kind) for kind in kinds])(*inputs)


def _gradients_by_kernel(*arrays: Any, names: Sequence[str], settings: _Settings) -> list[Any]:
    """The backward as XLA's code for a GPU: one call launches its kernels. Scratch is among the
    results, and what is added up begins as an input of zeros in the same memory."""
    given = dict(zip(names, arrays, strict=True))
    own = {name: given[name] for name in _differentiated(names)}
    folder = _backward_package(own, settings)
    target = _target(folder, folder, classes.load)
    kernel = _KERNELS[target]
    ready, pull = jax.vjp(_arranged, own)
    ready |= {name: given[name] for name in _FROM_FORWARD if name in given}
    inputs = [ready[name.lower()] for name in kernel.inputs]
    memory = kernel.memory(inputs)
    kinds = {n: jax.ShapeDtypeStruct(shape, NAMES[kind]) for n, (shape, kind) in memory.items()}
    zeros = [jnp.zeros(kinds[name].shape, kinds[name].dtype) for name in kernel.zeroed]
    places = {len(inputs) + n: [*kinds].index(name) for n, name in enumerate(kernel.zeroed)}
    call = jax.ffi.ffi_call(target, [*kinds.values()], input_output_aliases=places)
    found = dict(zip(map(str.lower, kinds), call(*inputs, *zeros), strict=True))
    missing = [name for name in own if f"d{name}" not in found]
    if missing:
        raise NoKernel(f"{_NO_BACKWARD}: it gives no gradient of {missing[0]}: {_STOP}")
    (grads,) = pull({name: found[f"d{name}"].astype(ready[name].dtype) for name in own})
    return [grads[name] for name in own]


_NO_BACKWARD = "backward of flashwright.jax.attention"
_STOP = "call jax.lax.stop_gradient on its inputs or on its result"


def _arranged(given: Arrays) -> dict[str, Any]:
    """The arrays of a call as its kernel takes them."""
    q = given["q"]
    found = {**given, **{n: given[n].astype(jnp.float32) for n in _FLAGS.values() if n in given}}
    found |= {x: jnp.broadcast_to(given[x], (q.shape[0], *given[x].shape[1:])) for x in "kv"}
    if "bias" in given:
        bias = Bias.of(given["bias"], dims_of(q, given["k"]))
        found["bias"] = bias.view(given["bias"]).astype(NAMES[bias.dtype])
    return found


def _spec(given: Arrays, settings: _Settings) -> AttentionSpec:
    flags = {name: array in given for name, array in _FLAGS.items()}
    how = settings._asdict() | {"lse": True}
    return spec_of(given["q"], given["k"], given["v"], **how, **flags)


def _forward_package(given: Arrays, settings: _Settings) -> Path:
    """The package of a call's kernel."""
    mods = Mods()
    if "bias" in given:
        mods = Bias.of(given["bias"], dims_of(given["q"], given["k"])).added(mods)
    order = order_of(Task(_spec(given, settings), card(0)), Captured(mods, {}))
    return _package(order, partial(_check_first_output, given, settings))


def _backward_package(given: Arrays, settings: _Settings) -> Path:
    """The package of a call's backward. Raises NoKernel if none can be derived."""
    forward = _forward_package(given, settings)
    try:
        order = BackwardOrder.of(forward, ("O", "LSE")[: 1 + settings.lse])
        return _package(order, partial(_check_first_gradients, given, settings))
    except (Failed, BadSpec) as error:
        raise NoKernel(f"{_NO_BACKWARD}: {error}: {_STOP}") from None


def _package(order: store.Ordered, check: Callable[[], None]) -> Path:
    """The package of an order. A new one is checked."""
    with _LOCK:
        if order.key not in _FOLDERS:
            _FOLDERS[order.key], new = find_or_make(order)
            try:
                if new:
                    check()
            except BaseException:  # it is not checked, so it is not kept
                shutil.rmtree(_FOLDERS.pop(order.key), ignore_errors=True)
                raise
        return _FOLDERS[order.key]


def _target(
    package: Path, folder: Path, load: Callable[[Path], Any], outputs: Sequence[str] = ()
) -> str:
    """The name by which XLA calls a kernel of a package, the same in every process. Its results are
    `outputs`; if none are named, all outputs and scratch."""
    name = "/".join(("flashwright", package.name, str(folder.relative_to(package)), *outputs))
    with _LOCK:
        if name in _KERNELS:
            return name
        try:
            kernel = load(folder)
        except Failed as error:
            raise NoKernel(str(error)) from None
        results = outputs or (*kernel.outputs, *kernel.scratch)
        # A CUDA graph may hold the launch: it copies the parameters and the tensor maps.
        jax_tvm_ffi.register_ffi_target(
            name,
            kernel.of_tensors((*kernel.inputs, *kernel.zeroed, *results)),
            platform=_PLATFORM,
            allow_cuda_graph=True,
        )
        _KERNELS[name] = kernel
        return name


# --- the first results of a new kernel ----------------------------------------------------------

_LONGEST = 512
"""Queries and keys for which first gradients are computed by definition."""
_GRADIENT_LIMIT = 0.1
"""Of the error of a row of a gradient, relative to the gradient's RMS: many times what rounding
gives."""


def _drawn(given: Arrays, longest: int | None = None) -> dict[str, Any]:
    """Random arrays in place of a call's, which have no values yet: of at most two batches."""
    draw = np.random.default_rng(0)
    found = {}
    for name, array in given.items():
        size = [*array.shape]
        if len(size) == 4:
            size[0] = min(size[0], 2)
            for axis in (2, 3) if name == "bias" else (2,):
                size[axis] = min(size[axis], longest or size[axis])
        numbers = draw.standard_normal(1_000_003).astype(array.dtype)
        found[name] = np.resize(numbers, size)
    if "slopes" in found:
        found["slopes"] = abs(found["slopes"]) / 8
    return found


def _on_gpu(rule: Callable[..., Any], settings: _Settings, given: Arrays) -> list[Any]:
    """What a rule gives for arrays of NumPy, while JAX traces something else."""
    with jax.ensure_compile_time_eval():
        arrays = jax.device_put([*given.values()], jax.local_devices(backend=_PLATFORM)[0])
        found = jax.jit(partial(rule, names=tuple(given), settings=settings))(*arrays)
        return [np.asarray(array) for array in found]


def _check_first_output(given: Arrays, settings: _Settings) -> None:
    """Raise WrongKernel if rows of a new kernel are not what the definition gives in fp64."""
    spec, given = _spec(given, settings), _drawn(given)
    if not all(x.size for x in given.values()):
        return
    out = _on_gpu(_by_kernel, settings, given)[0].astype(np.float64)
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


def _check_first_gradients(given: Arrays, settings: _Settings) -> None:
    """Raise WrongKernel if gradients of a new backward are not those of the definition."""
    given = _drawn(given, _LONGEST)
    if not all(x.size for x in given.values()):
        return
    results = _on_gpu(_by_kernel, settings._replace(lse=True), given)
    draw = np.random.default_rng(1)
    grads = [draw.standard_normal(x.shape).astype(x.dtype) for x in results]
    saved = dict(zip(_FROM_FORWARD, (*results, *grads[: 1 + settings.lse]), strict=False))
    found = _on_gpu(_gradients_by_kernel, settings, {**given, **saved})
    wanted = _on_gpu(_gradients_by_definition, settings, {**given, **saved})
    for name, one, other in zip(given, found, wanted, strict=True):
        one, other = one.astype(np.float64), other.astype(np.float64)
        size = np.sqrt(np.square(other).mean())
        error = np.sqrt(np.square(one - other).mean(axis=-1)).max() / max(size, 1e-6)
        if not error <= _GRADIENT_LIMIT:
            raise WrongKernel(
                f"a new backward is wrong: a row of d{name} is {error:.2g} of its RMS from what "
                "the definition gives. Please report the arguments and the shapes"
            )


_operation.def_abstract_eval(_results)
_backward.def_abstract_eval(_gradient_types)
batching.primitive_batchers[_operation] = _mapped
batching.primitive_batchers[_backward] = _mapped_gradients
ad.primitive_jvps[_operation] = ad.primitive_jvps[_backward] = _refuse
_RULES = {
    _operation: {"cpu": _by_definition, "cuda": _by_kernel},
    _backward: {"cpu": _gradients_by_definition, "cuda": _gradients_by_kernel},
}
for _one, _by_platform in _RULES.items():
    for _platform, _rule in _by_platform.items():
        _lowering = mlir.lower_fun(_rule, multiple_results=True)
        mlir.register_lowering(_one, _lowering, platform=_platform)
