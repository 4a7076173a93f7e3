"""The emulator: executes a kernel's PTX on the CPU, by the rules of the hardware.

The functions are those for kernels of your own; docs/emulator.md explains them. They import what
they need when they are called, because it imports NumPy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from flashwright.emulate.arguments import Empty
    from flashwright.emulate.device_memory import Address, Array, Memory, Stored, Struct, TensorMap
    from flashwright.emulate.own import EmulatedKernel


def kernel(
    source: str | Path,
    entry: str | None = None,
    *,
    arch: str = "sm_80",
    include: Sequence[str | Path] = (),
    define: Mapping[str, str | int | None] | None = None,
    flags: Sequence[str] = (),
    instantiate: str | Sequence[str] = (),
    memory: Memory | None = None,
    untrusted: bool = False,
) -> EmulatedKernel:
    """A CUDA kernel, to launch on NumPy arrays.

    `source` is CUDA or PTX: the text, or a file. `entry` names one of several kernels as the source
    does, also an instance of a template: `reduce<float, 256>`. `include` are folders of headers
    (the one of the file is searched too), `define` macros, `flags` options of nvcc, `instantiate`
    instances of templates to compile. With a `memory`, arrays keep their addresses from launch to
    launch. `untrusted` code is screened, compiled and executed in confinement.
    """
    from flashwright.emulate import own

    return own.kernel(
        source,
        entry,
        arch=arch,
        include=include,
        define=define,
        flags=flags,
        instantiate=instantiate,
        memory=memory,
        untrusted=untrusted,
    )


def memory() -> Memory:
    """Device memory that outlives a launch, for `kernel(..., memory=)`: arrays keep their
    addresses, so that pointers in memory stay valid from one kernel to the next."""
    from flashwright.emulate.device_memory import Memory

    return Memory()


def empty(array: Array) -> Empty:
    """An array for a launch, as memory that is allocated and not set: a read before a write is a
    finding."""
    from flashwright.emulate.arguments import Empty

    return Empty(array)


def address(array: Array, offset: int = 0) -> Address:
    """A pointer to the element `offset` of an array, of which the kernel may use all."""
    from flashwright.emulate.device_memory import make_address

    return make_address(array, offset)


def pointers(*values: Array | Address | None) -> Stored:
    """An array of device pointers, for a parameter such as `float**`."""
    from flashwright.emulate.device_memory import make_pointers

    return make_pointers(values)


def struct(layout: Any, /, *values: Any, **named: Any) -> Struct:
    """A struct for a parameter, with arrays where it has pointers.

    `layout` is a format of Python's `struct` module (pointers are P), a NumPy dtype with fields
    (pointers are uint64; say align=True), or a subclass of ctypes.Structure. Values come in the
    order of the fields or, for the latter two, by name.
    """
    from flashwright.emulate.device_memory import make_struct

    return make_struct(layout, values, named)


def tiled_tensor_map(
    array: Array,
    box: Sequence[int],
    *,
    swizzle: str = "none",
    fill: str = "zeros",
    interleave: str = "none",
    element_strides: Sequence[int] | None = None,
    mode: str = "tiled",
) -> TensorMap:
    """The tensor map of an array, as cuTensorMapEncodeTiled makes it: for a parameter of the type
    `__grid_constant__ const CUtensorMap`, or a pointer to one.

    The axes of the array and of the `box` come in NumPy's order, the contiguous one last; the array
    may be a view with strides. `swizzle` is "none", "32B", "64B" or "128B"; `fill` says what a load
    gives out of range, "zeros" or "nan". Raises ValueError where the driver refuses the map, and
    for what is not emulated: im2col, interleaved layouts, element strides other than 1.
    """
    from flashwright.emulate.device_memory import make_tensor_map

    given = {"interleave": interleave, "mode": mode, "element_strides": element_strides}
    return make_tensor_map(array, box, swizzle, fill, given)
