"""Launches kernels that Flashwright made, with PyTorch tensors and the CUDA driver alone.

`flashwright export` copies this file beside the kernels, so it imports neither Flashwright nor a
compiled module. `Kernels(data, read)` takes kernels.json as data and a function that reads a
kernel's file. Tensors are (batch, heads, length, dim), with any strides that the kernel can use.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import struct
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "ceil_div": lambda a, b: -(-a // b),
    "floor_div": lambda a, b: a // b,
    "mod": lambda a, b: a % b,
    "min": min,
    "max": max,
}
Form = tuple[tuple[int, ...], tuple[int, ...]]
"""The shape and the strides of a tensor."""
Plan = Mapping[str, Any]
_GRID_LIMITS = (2**31 - 1, 2**16 - 1, 2**16 - 1)
_MOST_PERSISTENT, _INT_MAX, _UINT_MAX = 1 << 30, 2**31 - 1, 2**32 - 1
_MAP_BYTES, _TMA_UNIT, _TMA_FARTHEST = 128, 16, 1 << 40
_RANGE, _RANGE_AXIS, _RANGE_STRIDE = 1 << 30, (1 << 31) - (1 << 16), 1 << 34
_CACHED_FORMS = 512


def evaluate(size: Sequence[int | str], dims: Mapping[str, Any]) -> Any:
    """The value of a size, an expression of the dims in postfix form."""
    stack: list[Any] = []
    for token in size:
        if isinstance(token, int):
            stack.append(token)
        elif token in OPERATORS:
            right = stack.pop()
            stack.append(OPERATORS[token](stack.pop(), right))
        else:
            stack.append(dims[token])
    return stack[0]


class Kernels:
    """The kernels of a package: one for each range of lengths, or some that run in order."""

    def __init__(self, data: Mapping[str, Any], read: Callable[[str], bytes]) -> None:
        made = [Kernel(one, read) for one in data["kernels"]]
        self.plan: Plan = {"tensors": data["tensors"], "dims": data["dims"]}
        names = [tensor["name"] for tensor in data["tensors"]]
        self._by = data["by"]
        self._bounds = [rule["up_to"] for rule in data["rules"][:-1]]
        self._served = [
            [(made[n], [names.index(t["name"]) for t in made[n].plan["tensors"]]) for n in order]
            for order in (rule["kernels"] for rule in data["rules"])
        ]
        between = any(tensor["scratch"] or tensor["zeroed"] for tensor in data["tensors"])
        self._in_order = between or len(self._served[-1]) > 1
        self._dims = functools.lru_cache(_CACHED_FORMS)(
            lambda shapes, given: read_dims(self.plan, shapes, dict(given))
        )

    def launch(
        self, inputs: Sequence[Any], outputs: Sequence[Any], dims: Mapping[str, int] | None = None
    ) -> None:
        """Launch on PyTorch's current stream; `outputs` are written, and inputs that the kernels
        change.

        Raises TypeError or ValueError, with the argument, for tensors that do not fit.
        """
        import torch

        tensors = self._in_plan_order(inputs, outputs)
        first = next(t for t in tensors if t is not None)
        self._check_kinds(tensors, first.device)
        if self._in_order:
            tensors = self._complete(tensors, dims or {})
        stream = torch.cuda.current_stream(first.device).cuda_stream
        self.launch_on(tensors, dims or {}, first.device.index, stream)

    def launch_on(
        self, tensors: Sequence[Any], dims: Mapping[str, int], device: int, stream: int
    ) -> None:
        """Launch with all tensors in the plan's order: None for outputs that are not wanted, which
        kernels that run in order do not know."""
        forms = tuple(None if t is None else (tuple(t.shape), tuple(t.stride())) for t in tensors)
        given, order = tuple(sorted(dims.items())), self._served[-1]
        if self._bounds or self._in_order:
            found = self._dims(tuple(form and form[0] for form in forms), given)
            if self._in_order:  # not every kernel has the tensors that say all of its dims
                given = tuple(found.items())
            else:
                order = self._served[bisect_left(self._bounds, found[self._by])]
        calls = [kernel.prepared(tuple(forms[p] for p in at), given) for kernel, at in order]
        addresses = [0 if t is None else t.data_ptr() for t in tensors]
        for (kernel, at), call in zip(order, calls, strict=True):
            kernel.launch(call, [addresses[p] for p in at], device, stream)

    def _complete(self, tensors: Sequence[Any], dims: Mapping[str, Any]) -> list[Any]:
        """The tensors with scratch and outputs that are not given, which are allocated; those that
        kernels add to are 0."""
        sizes = read_dims(self.plan, [None if t is None else t.shape for t in tensors], dims)
        like = next(t for t in tensors if t is not None)
        found = []
        for plan, tensor in zip(self.plan["tensors"], tensors, strict=True):
            made = _new(like, plan, sizes) if tensor is None else tensor
            found.append(made.zero_() if plan["zeroed"] else made)
        return found

    def empty(self, inputs: Sequence[Any], dims: Mapping[str, Any] | None = None) -> list[Any]:
        """New outputs for these inputs. Sizes may be symbolic, so torch can trace this."""
        tensors = self._in_plan_order(inputs, ())
        shapes = [None if t is None else t.shape for t in tensors]
        sizes = read_dims(self.plan, shapes, dims or {})
        wanted = (t for t in self.plan["tensors"] if t["written"])
        return [_new(inputs[0], t, sizes) for t in wanted if not (t["read"] or t["scratch"])]

    def _in_plan_order(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
        tensors = self.plan["tensors"]
        taken, given, none = iter(inputs), iter(outputs), iter(())
        kinds = ((taken if t["read"] else none if t["scratch"] else given) for t in tensors)
        return [next(kind, None) for kind in kinds]

    def _check_kinds(self, tensors: Sequence[Any], device: Any) -> None:
        for plan, tensor in zip(self.plan["tensors"], tensors, strict=True):
            if tensor is None:
                continue
            if tensor.device.type != "cuda":
                text = "must be on a CUDA device; it is on"
                raise ValueError(f"`{plan['argument']}` {text} {tensor.device}")
            if tensor.device != device:
                text = f"is on {tensor.device}, but the first tensor is on {device}"
                raise ValueError(f"`{plan['argument']}` {text}")
            found = str(tensor.dtype).removeprefix("torch.")
            if found != plan["dtype"]:
                raise TypeError(f"`{plan['argument']}` must be {plan['dtype']}; it is {found}")


def _new(like: Any, tensor: Plan, sizes: Mapping[str, Any]) -> Any:
    """A new tensor on the device of another. Tiles may fill rows beyond the end of scratch."""
    import torch

    axes = ([tensor["axes"][p]["size"] for p in parts] for parts in tensor["order"])
    shape = [math.prod(evaluate(size, sizes) for size in axis) for axis in axes]
    if tensor["rows"] == 1:
        return like.new_empty(shape, dtype=getattr(torch, tensor["dtype"]))
    *outer, rows, width = shape
    padded = (*outer, -(-rows // tensor["rows"]) * tensor["rows"], width)
    return like.new_empty(padded, dtype=getattr(torch, tensor["dtype"]))[..., :rows, :]


# --- one call: its sizes, its parameters ------------------------------------------------------


class TensorMap(NamedTuple):
    """The arguments of cuTensorMapEncodeTiled; sizes and strides have the last axis first."""

    tensor: int
    type: int
    rank: int
    swizzle: int
    sizes: Any
    strides: Any
    box: Any
    steps: Any
    empty: bool
    optional: bool


class Prepared(NamedTuple):
    """Everything of a launch but the addresses."""

    dims: Mapping[str, int]
    blocks: tuple[int, ...]
    parameters: bytes
    """The struct, with zeros for maps and addresses."""
    pointers: tuple[int, ...]
    """Where in the struct the address of each tensor is."""
    alignments: tuple[int, ...]
    """What each address must be a multiple of."""
    maps: tuple[TensorMap | None, ...]
    """None: TMA cannot load the tensor as it lies, and the kernel copies it in another way."""
    counter: int
    """Where the address of the launch's counter is, if it has one."""


def read_dims(
    plan: Plan, shapes: Sequence[Sequence[Any] | None], given: Mapping[str, Any]
) -> dict[str, Any]:
    """All run-time dims: from the inputs' axes, or as given by name."""
    dims: dict[str, Any] = {}
    heads = None  # of a head axis that the plan has in two parts
    for tensor, shape in zip(plan["tensors"], shapes, strict=True):
        if shape is None or not tensor["read"] or tensor["flat"]:
            continue
        if len(shape) != len(tensor["order"]):
            labels = ("".join(tensor["axes"][p]["label"] for p in a) for a in tensor["order"])
            text = f"must have {len(tensor['order'])} axes ({', '.join(labels)})"
            raise _wrong(tensor, f"{text}; its shape is {tuple(shape)}")
        for size, parts in zip(shape, tensor["order"], strict=True):
            names = [tensor["axes"][p]["size"] for p in parts]
            known = math.prod(n[0] for n in names if len(n) == 1 and isinstance(n[0], int))
            for name in (n[0] for n in names if len(n) == 1 and isinstance(n[0], str)):
                found = size // known if len(parts) > 1 else size
                if dims.setdefault(name, found) != found:
                    text = f"has {name} = {found}, but another input has {name} = {dims[name]}"
                    raise _wrong(tensor, text)
                if name == "kv_heads" and len(parts) > 1 and heads is None:
                    heads = size
    if "heads" in plan["dims"] and heads is not None:
        dims.setdefault("heads", heads)
    return _with_given(plan, dims, given)


def _with_given(plan: Plan, dims: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    for name in plan["dims"]:
        if name in given and dims.setdefault(name, given[name]) != given[name]:
            raise ValueError(f"`{name}` is given as {given[name]}, but a tensor has {dims[name]}")
        if name == "kv_heads" and "heads" in dims:
            dims.setdefault(name, dims["heads"])
        if name not in dims:
            raise TypeError(f"no tensor says what `{name}` is: give it by name, {name}=...")
        # Not of a symbolic size: torch would make it a condition of what it compiles.
        if isinstance(dims[name], int) and not 0 <= dims[name] <= _INT_MAX:
            raise ValueError(f"`{name}` must lie between 0 and {_INT_MAX}, not {dims[name]}")
    if "heads" in plan["dims"] and "kv_heads" in plan["dims"]:
        heads, kv_heads = dims["heads"], dims["kv_heads"]
        if heads != 0 and (kv_heads == 0 or heads % kv_heads != 0):
            raise ValueError(f"kv_heads = {kv_heads} must divide heads = {heads}")
    return {name: dims[name] for name in plan["dims"]}


def prepare(plan: Plan, forms: Sequence[Form | None], given: Mapping[str, int]) -> Prepared:
    """Check shapes and strides against the plan, and pack the kernel's parameter.

    The parameter is a struct: the tensor maps, then each tensor's address and strides, then the
    address of the launch's counter, if it has one, and the dims as int32.
    """
    dims = read_dims(plan, [form and form[0] for form in forms], given)
    at = len(plan["maps"]) * _MAP_BYTES
    packed, pointers, strides_of = [bytes(at)], [], []
    for tensor, form in zip(plan["tensors"], forms, strict=True):
        if form is None and tensor["read"]:
            raise TypeError(f"the input `{tensor['argument']}` is missing")
        sizes = [evaluate(axis["size"], dims) for axis in tensor["axes"]]
        strides = [0] * len(sizes) if form is None else _strides(tensor, form, sizes)
        pointers.append(at)
        strides_of.append(strides)
        packed.append(struct.pack(f"=Q{len(strides)}q", 0, *strides))
        at += 8 * (1 + len(strides))
    counter = at
    if plan["counter"]:
        packed.append(bytes(8))
    packed.append(struct.pack(f"={len(dims)}i", *dims.values()))
    maps = tuple(_map(plan, one, forms, strides_of, dims) for one in plan["maps"])
    return Prepared(
        dims,
        _blocks(plan, dims),
        b"".join(packed),
        tuple(pointers),
        tuple(
            t["vector"] * t["bytes"] if f is not None and all(f[0]) else 1
            for t, f in zip(plan["tensors"], forms, strict=True)
        ),
        maps,
        counter,
    )


def _wrong(tensor: Plan, text: str) -> ValueError:
    return ValueError(f"`{tensor['argument']}` {text}")


def _strides(tensor: Plan, form: Form, sizes: Sequence[int]) -> list[int]:
    """The strides of the plan's axes."""
    shape, strides = form
    if tensor["flat"]:
        _check_dense(tensor, form)
        return [math.prod(sizes[a + 1 :]) for a in range(len(sizes))]
    if len(shape) != len(tensor["order"]):
        raise _wrong(tensor, f"must have {len(tensor['order'])} axes; its shape is {shape}")
    found, last = [0] * len(sizes), len(sizes) - 1
    for axis, parts in reversed(list(enumerate(tensor["order"]))):
        wanted = math.prod(sizes[p] for p in parts)
        if shape[axis] != wanted:
            label = tensor["axes"][parts[0]]["label"]
            text = f"must be {wanted} long on axis {label}, not {shape[axis]}"
            raise _wrong(tensor, f"{text}; its shape is {shape}")
        stride = strides[axis]
        if tensor["written"] and all(shape) and wanted > 1 and stride == 0:
            text = "is written, but its elements share memory: its strides are"
            raise _wrong(tensor, f"{text} {strides}")
        for p in reversed(parts):
            found[p] = _fitting(tensor, form, p == last, sizes[p], stride)
            in_tile = p >= last - 1 and sizes[p] > 1
            if found[p] < 0 or (in_tile and found[p] > _UINT_MAX // tensor["bytes"]):
                raise _wrong(tensor, f"has strides that the kernel cannot use: {strides}")
            stride *= sizes[p]
    return found


def _fitting(tensor: Plan, form: Form, last: bool, size: int, stride: int) -> int:
    """A stride that the kernel can use. Along an axis of one position any number will do."""
    vector = tensor["vector"]
    if vector <= 1 or (stride == 1 if last else stride % vector == 0):
        return stride
    if size <= 1 or not all(form[0]):
        return int(last and size <= 1)
    if last:
        raise _wrong(tensor, f"must be contiguous along its last axis; its strides are {form[1]}")
    text = f"must have strides that are multiples of {vector} elements; they are"
    raise _wrong(tensor, f"{text} {form[1]}")


def _check_dense(tensor: Plan, form: Form) -> None:
    dense = 1
    for size, stride in zip(reversed(form[0]), reversed(form[1]), strict=True):
        if size > 1 and stride != dense:
            raise _wrong(tensor, f"must be contiguous; its strides are {form[1]}")
        dense *= size


def _blocks(plan: Plan, dims: Mapping[str, int]) -> tuple[int, ...]:
    """The grid; of a persistent kernel, the number of its tiles."""
    counts = [evaluate(count, dims) for count in plan["grid"]]
    if plan["stays"]:
        tiles = math.prod(counts)
        if tiles > _MOST_PERSISTENT:
            text = f"this problem needs {tiles} blocks; the kernel counts to {_MOST_PERSISTENT}"
            raise ValueError(text)
        return (tiles, 1, 1)
    counts += [1] * (3 - len(counts))
    for axis, (count, most) in enumerate(zip(counts, _GRID_LIMITS, strict=True)):
        if count > most:
            text = f"this problem needs {count} blocks along axis {axis} of the grid"
            raise ValueError(f"{text}; CUDA allows {most}")
    return tuple(counts)


def _map(
    plan: Plan,
    one: Plan,
    forms: Sequence[Form | None],
    strides_of: Sequence[Sequence[int]],
    dims: Mapping[str, int],
) -> TensorMap | None:
    """A tensor map without its address."""
    index = one["tensor"]
    tensor, form = plan["tensors"][index], forms[index]
    assert form is not None  # a tensor with a map is read
    sizes = [evaluate(axis["size"], dims) for axis in reversed(tensor["axes"])]
    strides = [s * tensor["bytes"] for s in reversed(strides_of[index])]
    if tensor["flat"]:  # one axis more: the views that lie back to back
        view = math.prod(sizes)
        sizes.append(math.prod(form[0]) // view if view else 0)
        strides.append(view * tensor["bytes"])
    strides = [_TMA_UNIT if n == 1 else s for n, s in zip(sizes, strides, strict=True)]
    empty = not all(sizes)
    if one["ranges"]:  # two axes more, so that a tile ends where its range does
        sizes[1:] = [_RANGE, *sizes[2:], _RANGE_AXIS, _RANGE_AXIS]
        strides += [strides[1], _RANGE_STRIDE - strides[1]]
    if one["pages"]:  # the same, of the rows of all pages together
        _check_pages(tensor, sizes[-1], strides[-1], strides[1])
        sizes[1:] = [_RANGE, *sizes[2:-1], _RANGE_AXIS, _RANGE_AXIS]
        strides[-1:] = [strides[1], _RANGE_STRIDE - strides[1]]
    rank = len(sizes)
    if empty:  # the driver takes no map of an empty tensor: it gets one of a single zero
        sizes, strides = [1] * rank, [_TMA_UNIT] * rank
    elif one["optional"]:
        fits = sizes[0] == 1 or strides[0] == tensor["bytes"]
        if not fits or any(s % _TMA_UNIT or s >= _TMA_FARTHEST for s in strides[1:]):
            return None
    return TensorMap(
        index,
        one["type"],
        rank,
        one["swizzle"],
        (ctypes.c_uint64 * rank)(*sizes),
        (ctypes.c_uint64 * max(rank - 1, 1))(*strides[1:]),
        (ctypes.c_uint32 * rank)(*reversed(one["box"])),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        empty,
        one["optional"],
    )


def _check_pages(tensor: Plan, pages: int, page: int, row: int) -> None:
    if pages < 2:
        return
    if not row or page % row:
        raise _wrong(tensor, "must have pages that are whole rows apart: make it contiguous")
    if pages * page // row > _RANGE_AXIS:
        raise _wrong(tensor, f"is too large: the kernel counts {_RANGE_AXIS} rows")


# --- the driver -------------------------------------------------------------------------------

_NO_BINARY = 209  # CUDA_ERROR_NO_BINARY_FOR_GPU
_SMS, _MAJOR, _MINOR, _SHARED_OPTIN = 16, 75, 76, 97  # CU_DEVICE_ATTRIBUTE_...
_MAX_THREADS, _MAX_DYNAMIC_SHARED = 0, 8  # CU_FUNC_ATTRIBUTE_...
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_L2_128B = 2  # CU_TENSOR_MAP_L2_PROMOTION_L2_128B
_RELEASE_THRESHOLD = 4  # CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
_LOG, _LOG_SIZE = 5, 6  # CU_JIT_ERROR_LOG_BUFFER, and its size in bytes
_ZEROS = (
    b".version 8.0\n.target sm_90\n.address_size 64\n.visible .global .align 16 .b8 zeros[16];\n"
)


@functools.cache
def _cuda() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise RuntimeError(f"there is no CUDA driver: {error}") from None
    p, u, i = ctypes.c_void_p, ctypes.c_uint, ctypes.c_int
    library.cuLaunchKernel.argtypes = [p, *[u] * 7, p, p, p]
    library.cuCtxPushCurrent_v2.argtypes = [p]
    library.cuFuncSetAttribute.argtypes = [p, i, i]
    library.cuFuncGetAttribute.argtypes = [p, i, p]
    library.cuModuleGetFunction.argtypes = [p, p, ctypes.c_char_p]
    _check(library, library.cuInit(0), "cuInit")
    return library


def _check(library: ctypes.CDLL, result: int, what: str) -> None:
    if result:
        name, text = ctypes.c_char_p(), ctypes.c_char_p()
        library.cuGetErrorName(result, ctypes.byref(name))
        library.cuGetErrorString(result, ctypes.byref(text))
        told = (name.value or b"unknown").decode(), (text.value or b"").decode()
        raise RuntimeError(f"{what} failed: {told[0]} ({told[1]})")


class _Context:
    """Makes a device's primary context current for the length of a `with`."""

    def __init__(self, context: Any) -> None:
        self.context, self.pushed = context, False

    def __enter__(self) -> None:
        cuda, current = _cuda(), ctypes.c_void_p()
        _check(cuda, cuda.cuCtxGetCurrent(ctypes.byref(current)), "cuCtxGetCurrent")
        if current.value != self.context.value:
            _check(cuda, cuda.cuCtxPushCurrent_v2(self.context), "cuCtxPushCurrent")
            self.pushed = True

    def __exit__(self, *_: object) -> None:
        if self.pushed:
            _cuda().cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))


class _Loaded(NamedTuple):
    """A kernel on one device. It is never unloaded: a captured graph may hold it."""

    context: Any
    function: Any
    sms: int


class Kernel:
    """One kernel: its plan, its code, and the devices that have it."""

    def __init__(self, plan: Plan, read: Callable[[str], bytes]) -> None:
        self.plan = plan
        self._images = [(name, read(plan[name])) for name in ("cubin", "ptx") if plan[name]]
        self._lock = threading.Lock()
        self._loaded: dict[int, _Loaded] = {}
        self._zeros: dict[int, int] = {}
        self._pools: dict[int, ctypes.c_void_p] = {}
        self._cached = functools.lru_cache(_CACHED_FORMS)(
            lambda forms, given: prepare(plan, forms, dict(given))
        )

    def prepared(
        self, forms: tuple[Form | None, ...], given: tuple[tuple[str, int], ...]
    ) -> Prepared:
        """The launch for tensors of these forms; the last ones are kept."""
        return self._cached(forms, given)

    def launch(self, call: Prepared, addresses: Sequence[int], device: int, stream: int) -> None:
        """Launch with tensors at these addresses."""
        for tensor, address, unit in zip(
            self.plan["tensors"], addresses, call.alignments, strict=True
        ):
            if address % unit:
                text = f"must begin at a multiple of {unit} bytes: give it a copy"
                raise _wrong(tensor, f"{text} (contiguous memory of its own)")
        if not all(call.blocks):
            return
        code, cuda = self._on(device), _cuda()
        buffer = ctypes.create_string_buffer(len(call.parameters) + 2 * _MAP_BYTES)
        start = -ctypes.addressof(buffer) % _MAP_BYTES
        base = ctypes.addressof(buffer) + start
        ctypes.memmove(base, call.parameters, len(call.parameters))
        for offset, address in zip(call.pointers, addresses, strict=True):
            struct.pack_into("=Q", buffer, start + offset, address)
        blocks = (min(call.blocks[0], code.sms), 1, 1) if self.plan["stays"] else call.blocks
        with _Context(code.context), self._counter(device, stream) as counter:
            if counter:
                struct.pack_into("=Q", buffer, start + call.counter, counter)
            for number, one in enumerate(call.maps):
                if one is not None:
                    self._encode(one, base + number * _MAP_BYTES, addresses[one.tensor], device)
            pointer = ctypes.c_void_p(base)
            result = cuda.cuLaunchKernel(
                code.function,
                *blocks,
                *(self.plan["threads"], 1, 1, self.plan["shared"]),
                *(stream, ctypes.addressof(pointer), None),
            )
        _check(cuda, result, "launching the kernel")

    @contextlib.contextmanager
    def _counter(self, device: int, stream: int) -> Iterator[int]:
        """The address of an int32 of one launch alone, which begins at 0, in the order of the
        stream; 0 for a kernel that has none."""
        if not self.plan["counter"]:
            yield 0
            return
        cuda, found = _cuda(), ctypes.c_void_p()
        with self._lock:
            if device not in self._pools:
                self._pools[device] = _pool(device)
        result = cuda.cuMemAllocFromPoolAsync(
            *(ctypes.byref(found), ctypes.c_size_t(4), self._pools[device]), ctypes.c_void_p(stream)
        )
        _check(cuda, result, "getting memory for the kernel's counter")
        result = cuda.cuMemsetD32Async(found, 0, ctypes.c_size_t(1), ctypes.c_void_p(stream))
        _check(cuda, result, "clearing the kernel's counter")
        yield found.value or 0
        cuda.cuMemFreeAsync(found, ctypes.c_void_p(stream))

    def _encode(self, one: TensorMap, target: int, address: int, device: int) -> None:
        if one.optional and not one.empty and address % _TMA_UNIT:
            return  # zeros: the kernel copies in another way
        cuda = _cuda()
        where = self._zeros_on(device) if one.empty else address
        # No interleaving, and zeros beyond the ends of the tensor.
        result = cuda.cuTensorMapEncodeTiled(
            *(ctypes.c_void_p(target), one.type, one.rank, ctypes.c_void_p(where)),
            *(one.sizes, one.strides, one.box, one.steps, 0, one.swizzle, _L2_128B, 0),
        )
        name = self.plan["tensors"][one.tensor]["argument"]
        _check(cuda, result, f"encoding the tensor map of `{name}`")

    def _on(self, device: int) -> _Loaded:
        found = self._loaded.get(device)
        if found is None:
            with self._lock:
                found = self._loaded.get(device) or self._load(device)
                self._loaded[device] = found
        return found

    def _load(self, number: int) -> _Loaded:
        cuda, device, context = _cuda(), ctypes.c_int(), ctypes.c_void_p()
        _check(cuda, cuda.cuDeviceGet(ctypes.byref(device), number), "cuDeviceGet")
        shared = _attribute(device, _SHARED_OPTIN)
        if self.plan["shared"] > shared:
            text = f"this kernel needs {self.plan['shared']} bytes of shared memory per block"
            raise RuntimeError(f"{text}; cuda:{number} has {shared}")
        result = cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
        _check(cuda, result, "cuDevicePrimaryCtxRetain")
        with _Context(context):
            module = self._module(10 * _attribute(device, _MAJOR) + _attribute(device, _MINOR))
            function, threads = ctypes.c_void_p(), ctypes.c_int()
            entry = self.plan["entry"].encode()
            result = cuda.cuModuleGetFunction(ctypes.byref(function), module, entry)
            _check(cuda, result, f"finding the kernel {self.plan['entry']}")
            cuda.cuFuncGetAttribute(ctypes.addressof(threads), _MAX_THREADS, function)
            if self.plan["threads"] > threads.value:
                text = f"this kernel needs {self.plan['threads']} threads per block"
                text += f", but its registers allow {threads.value} on cuda:{number}"
                raise RuntimeError(text)
            result = cuda.cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED, self.plan["shared"])
            _check(cuda, result, "setting the shared memory of the kernel")
        return _Loaded(context, function, _attribute(device, _SMS))

    def _module(self, version: int) -> Any:
        """The cubin if the device takes it, else the PTX."""
        compiled = self.plan["cubin_version"]
        for name, image in self._images:
            fits = compiled // 10 == version // 10 and compiled <= version
            if name == "cubin" and not fits:
                continue
            module, result, log = _load_module(image)
            if name == "ptx" or result != _NO_BINARY:
                _check(_cuda(), result, f"loading the {name}{log and f' ({log})'}")
                return module
        text = f"this kernel is compiled for {self.plan['arch']}"
        raise RuntimeError(f"{text}, which a GPU of sm_{version} cannot run")

    def _zeros_on(self, device: int) -> int:
        """The address of zeros on a device, in its context."""
        with self._lock:
            if device not in self._zeros:
                module, result, _ = _load_module(_ZEROS)
                _check(_cuda(), result, "loading zeros, for the map of an empty tensor,")
                found = ctypes.c_void_p()
                result = _cuda().cuModuleGetGlobal_v2(ctypes.byref(found), None, module, b"zeros")
                _check(_cuda(), result, "cuModuleGetGlobal")
                self._zeros[device] = found.value or 0
            return self._zeros[device]


def _pool(device: int) -> ctypes.c_void_p:
    """A pool of a device's memory that keeps what is given back."""
    cuda, found, mode = _cuda(), ctypes.c_void_p(), ctypes.c_int(_RELAXED)
    # CUmemPoolProps: pinned memory, no handles, of a device
    props = struct.pack("=4i72x", 1, 0, 1, device)
    cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    try:
        _check(cuda, cuda.cuMemPoolCreate(ctypes.byref(found), props), "cuMemPoolCreate")
        most = ctypes.c_uint64(2**64 - 1)
        result = cuda.cuMemPoolSetAttribute(found, _RELEASE_THRESHOLD, ctypes.byref(most))
        _check(cuda, result, "cuMemPoolSetAttribute")
    finally:
        cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    return found


def _attribute(device: Any, number: int) -> int:
    value = ctypes.c_int()
    _cuda().cuDeviceGetAttribute(ctypes.byref(value), number, device)
    return value.value


def _load_module(image: bytes) -> tuple[Any, int, str]:
    """The module, the driver's result and its log. A stream may be in capture meanwhile."""
    cuda, module, mode = _cuda(), ctypes.c_void_p(), ctypes.c_int(_RELAXED)
    log = ctypes.create_string_buffer(8192)
    options = (ctypes.c_int * 2)(_LOG, _LOG_SIZE)
    values = (ctypes.c_void_p * 2)(ctypes.addressof(log), len(log) - 1)
    cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    try:
        result = cuda.cuModuleLoadDataEx(ctypes.byref(module), image, 2, options, values)
    finally:
        cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    return module, result, log.value.decode(errors="replace").strip()
