"""Tensors of PyTorch, CuPy and JAX: how each makes an output, and on which stream it works.

All of them reach the launcher through DLPack; this module holds the differences. It imports no
framework that the caller has not imported.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any, Protocol

NAMES = {  # the frameworks' names of our element types
    "fp16": "float16",
    "bf16": "bfloat16",
    "fp32": "float32",
    "int32": "int32",
    "int8": "int8",
    "e4m3": "float8_e4m3fn",
    "e5m2": "float8_e5m2",
}


NO_BACKWARD = "a tensor requires a gradient, and this kernel has none"
NO_GRADIENT = (
    f"{NO_BACKWARD}: call it under torch.no_grad() or torch.inference_mode(), or pass tensors that "
    "are detached"
)


class Framework(Protocol):
    """What the launcher needs from an array library."""

    def new(self, like: Any, shape: Sequence[int], dtype: str, zero: bool = False) -> Any:
        """A new tensor on the device of `like`: of zeros, or its values arbitrary."""

    def clear(self, array: Any) -> None:
        """Set all elements to 0, on the framework's current stream."""

    def launch(self, function: Any, mode: int, tensors: Sequence[Any], dims: Sequence[Any]) -> None:
        """Call the launcher on the framework's current stream."""


def framework_of(array: Any) -> Framework:
    """The framework that an array belongs to."""
    kind: Any = type(array)
    return _framework(kind)


@functools.cache
def _framework(kind: type) -> Framework:
    roots = (base.__module__.partition(".")[0] for base in kind.__mro__)  # also for subclasses
    return next((_KNOWN[root] for root in roots if root in _KNOWN), _OTHER)


class _Torch:
    def new(self, like: Any, shape: Sequence[int], dtype: str, zero: bool = False) -> Any:
        make = like.new_zeros if zero else like.new_empty
        return make(shape, dtype=getattr(sys.modules["torch"], NAMES[dtype]))

    def clear(self, array: Any) -> None:
        array.zero_()

    def launch(self, function: Any, mode: int, tensors: Sequence[Any], dims: Sequence[Any]) -> None:
        recorded = sys.modules["torch"].is_grad_enabled()
        if recorded and any(getattr(t, "requires_grad", False) for t in tensors):
            raise RuntimeError(NO_GRADIENT)
        function(mode, *tensors, *dims)  # tvm-ffi uses torch's current stream


class _CuPy:
    def new(self, like: Any, shape: Sequence[int], dtype: str, zero: bool = False) -> Any:
        cupy = sys.modules["cupy"]
        with like.device:
            return (cupy.zeros if zero else cupy.empty)(shape, _numpy_dtype(dtype))

    def clear(self, array: Any) -> None:
        array.fill(0)

    def launch(self, function: Any, mode: int, tensors: Sequence[Any], dims: Sequence[Any]) -> None:
        import tvm_ffi

        first = next(t for t in tensors if _is_cupy(t))
        with first.device:
            stream = sys.modules["cupy"].cuda.get_current_stream().ptr
        # The kernel goes to CuPy's own stream, so CuPy need not wait for anything (-1).
        given = [
            tvm_ffi.from_dlpack(t.__dlpack__(stream=-1)) if _is_cupy(t) else t for t in tensors
        ]
        with tvm_ffi.use_raw_stream(tvm_ffi.device("cuda", first.device.id), stream):
            function(mode, *given, *dims)


class _Jax:
    """JAX exposes no stream: a call waits for JAX, launches, and waits for the kernel."""

    def new(self, like: Any, shape: Sequence[int], dtype: str, zero: bool = False) -> Any:
        import jax.numpy as jnp

        make = jnp.zeros if zero else jnp.empty
        return make(shape, getattr(jnp, NAMES[dtype]), device=next(iter(like.devices())))

    def clear(self, array: Any) -> None:
        raise TypeError(
            "an output that is added up begins at 0, which no array of JAX can be set to"
        )

    def launch(self, function: Any, mode: int, tensors: Sequence[Any], dims: Sequence[Any]) -> None:
        import jax
        import tvm_ffi

        from flashwright.build.native import launcher

        if any(isinstance(t, getattr(jax.core, "Tracer", ())) for t in tensors):
            raise TypeError(
                "a package cannot be called inside jax.jit: call it with arrays, or call "
                "flashwright.jax.attention"
            )
        jax.block_until_ready([t for t in tensors if isinstance(t, jax.Array)])
        given = [tvm_ffi.from_dlpack(t) if isinstance(t, jax.Array) else t for t in tensors]
        function(mode, *given, *dims)
        if not mode & 2:
            launcher().synchronize(next(t for t in given if t is not None).device.index)


class _AnyDLPack:
    """Any other array with DLPack: usable as an input or `out`, but no output can be allocated."""

    def new(self, like: Any, shape: Sequence[int], dtype: str, zero: bool = False) -> Any:
        kind = f"{type(like).__module__}.{type(like).__name__}"
        if not hasattr(like, "__dlpack__"):
            raise TypeError(f"a kernel takes tensors (PyTorch, CuPy, JAX, DLPack), not {kind}")
        raise TypeError(f"no way is known to make a {kind} for the output: give one, out=...")

    def clear(self, array: Any) -> None:
        kind = f"{type(array).__module__}.{type(array).__name__}"
        raise TypeError(
            f"an output that is added up begins at 0: no way is known to clear a {kind}"
        )

    def launch(self, function: Any, mode: int, tensors: Sequence[Any], dims: Sequence[Any]) -> None:
        function(mode, *tensors, *dims)


def _is_cupy(array: Any) -> bool:
    return isinstance(framework_of(array), _CuPy)


def _numpy_dtype(dtype: str) -> Any:
    import ml_dtypes
    import numpy as np

    name = NAMES[dtype]
    return np.dtype(getattr(np, name, None) or getattr(ml_dtypes, name))


_KNOWN: dict[str, Framework] = {
    "torch": _Torch(),
    "cupy": _CuPy(),
    "jax": _Jax(),
    "jaxlib": _Jax(),
}
_OTHER = _AnyDLPack()
