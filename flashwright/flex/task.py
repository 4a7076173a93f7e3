"""What a call asks for, and the kernel for it: the part that PyTorch and JAX share.

Nothing here imports PyTorch or JAX. A tensor is anything with `shape`, `ndim` and `dtype`.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from flashwright import gpu as gpus
from flashwright.author.builtin.mods import Mods, Operand, mapped
from flashwright.author.builtin.mods_reference import FILE, Sample, reference_text
from flashwright.build import driver
from flashwright.flex import aten
from flashwright.flex.capture import Captured
from flashwright.generate import store
from flashwright.generate.store import tell
from flashwright.gpu import Gpu
from flashwright.lang.diagnostic import Failed
from flashwright.lang.nodes import Binary, Expr, Index, Name, Num
from flashwright.spec import AttentionSpec, BadSpec

Dims = Mapping[str, int]

DTYPES = {"float16": "fp16", "bfloat16": "bf16", "float8_e4m3fn": "fp8"}
"""The spec's name of a type, by the name that PyTorch and JAX have for it."""
KEY_DTYPES = {"float8_e4m3fn": "fp8", "int8": "int8"}
"""The same of the types that keys and values may have beside 16-bit queries."""
ROWS = 16
"""Rows of a head that the check of a first output compares."""
LIMIT = {"fp16": 2.0**-8, "bf16": 2.0**-5, "fp8": 2.0**-2}
"""Of an element's error, relative to the RMS of its row: many times what rounding gives."""


class NoKernel(RuntimeError):
    """No kernel can be made for a call, and why."""


class WrongKernel(RuntimeError):
    """A new kernel differs from the functions that it was made from."""


@dataclass(frozen=True, eq=False)
class Task:
    """What a call asks for, apart from its functions and tensors. There is one object for each
    (`task_of`), as a spec is slow to compare."""

    spec: AttentionSpec
    card: Gpu


@dataclass(frozen=True)
class Bias:
    """A bias for each score: its type, and the axes that are not broadcast."""

    dtype: str
    axes: tuple[str, ...]

    @classmethod
    def of(cls, tensor: Any, dims: Dims) -> Bias:
        """The form of a tensor that broadcasts to (batch, heads, q_len, kv_len)."""
        own = cls.own_axes(tensor, dims)
        try:
            return cls(aten.dtype_of(tensor.dtype), own)
        except aten.Refused as refused:
            raise NoKernel(f"bias: {refused}") from None

    @staticmethod
    def own_axes(tensor: Any, dims: Dims) -> tuple[str, ...]:
        """The axes that are not broadcast. Raises ValueError if one has another size."""
        if tensor.ndim > 4:
            raise ValueError(f"bias has {tensor.ndim} axes: (batch, heads, queries, keys) at most")
        names = ("batch", "heads", "q_len", "kv_len")[4 - tensor.ndim :]
        for name, size in zip(names, tensor.shape, strict=True):
            if size not in (1, dims[name]):
                raise ValueError(f"bias has {size} along {name}, which is {dims[name]} here")
        return tuple(n for n, s in zip(names, tensor.shape, strict=True) if s > 1)

    def added(self, mods: Mods) -> Mods:
        """The mods of scores to which the bias was added before."""
        index = {"batch": "batch_idx", "heads": "head_idx", "q_len": "q_idx", "kv_len": "kv_idx"}
        place = tuple(Name(index[axis]) for axis in self.axes) or (Num("0"),)
        score = Binary("+", Name("S"), Index(Name("Bias"), place))
        operand = Operand("Bias", self.axes or ("1",), self.dtype)

        def with_bias(expr: Expr) -> Expr:
            return score if expr == Name("S") else expr

        own = score if mods.score is None else mapped(mods.score, with_bias)
        return replace(mods, score=own, operands=(*mods.operands, operand))

    def view(self, tensor: Any) -> Any:
        """The tensor without its broadcast axes."""
        return tensor.reshape([s for s in tensor.shape if s > 1] or [1])


def order_of(task: Task, captured: Captured) -> store.Order:
    """The kernel to find or make. A score or a mask of one's own has a reference with it."""
    if captured.mods == Mods():
        return store.Order(task.spec, task.card)
    spec = task.spec.model_copy(update={"reference": FILE, "dims": captured.own_dims})
    text = reference_text(captured.mods, task.spec, samples(captured))
    return store.Order(spec, task.card, captured.mods, text)


def samples(captured: Captured) -> dict[str, Sample]:
    """What the captured tensors are like, for the judge's own inputs."""
    found = {}
    for name, source in captured.sources.items():
        tensor = source.tensor
        whole = not tensor.is_floating_point()
        if tensor.numel() and (whole or tensor.ndim == 0):
            numbers = tensor.int() if whole else tensor
            rising = whole and tensor.ndim > 0 and bool((numbers.diff(dim=-1) >= 0).all())
            found[name] = Sample(float(numbers.min()), float(numbers.max()), rising)
    return found


def find_or_make(order: store.Ordered) -> tuple[Path, bool]:
    """The package of an order, and whether it was made now, so that its first output is to be
    checked. Raises NoKernel."""
    new = store.find(order) is None
    try:
        return store.find_or_make(order, tell), new
    except (Failed, BadSpec) as error:
        raise NoKernel(str(error)) from None


class New(Protocol):
    """A kernel in the store, and whether it was made now."""

    folder: Path
    new: bool


@contextlib.contextmanager
def first_results(kernel: New, kernels: dict[Any, Any], known: object) -> Iterator[None]:
    """Around a look at the first results of a new kernel: a wrong one is forgotten, and removed
    from the store."""
    try:
        yield
    except WrongKernel:
        del kernels[known]
        shutil.rmtree(kernel.folder, ignore_errors=True)
        raise
    kernel.new = False


def compare_rows(found: Any, wanted: Any, spec: AttentionSpec, place: tuple[int, int]) -> None:
    """Raise WrongKernel if rows of a first output, in NumPy, are not the rows that are wanted."""
    size = np.sqrt(np.square(wanted).mean(axis=-1, keepdims=True)).clip(min=1e-3)
    error = float((abs(found - wanted) / size).max())
    if not error <= LIMIT[spec.dtype]:
        where = "batch {}, head {}".format(*place)
        raise WrongKernel(
            f"a new kernel is wrong: at {where} its rows are {error:.2g} of their RMS from "
            "what the functions give. Please report the functions and the shapes"
        )


def spec_of(query: Any, key: Any, value: Any, **settings: Any) -> AttentionSpec:
    """The spec of a call. Raises NoKernel or ValueError with the tensor and the fix."""
    check_axes(query, key, value)
    check_types(query, key, value, settings.get("kv_dtype"))
    dtype = DTYPES.get(str(query.dtype).removeprefix("torch."))
    if dtype is None:
        raise NoKernel(f"query is {query.dtype}: kernels take float16, bfloat16 and float8_e4m3fn")
    heads, kv_heads = query.shape[1], key.shape[1]
    given = {name: setting for name, setting in settings.items() if setting is not None}
    widths = {"head_dim": query.shape[3]}
    if value.shape[3] != query.shape[3]:
        widths["v_dim"] = value.shape[3]
    try:
        return AttentionSpec.make(
            variant=_variant(heads, kv_heads, bool(given.get("latent"))),
            heads=heads,
            kv_heads=kv_heads,
            dtype=dtype,
            **widths,
            **given,
        )
    except BadSpec as error:
        raise NoKernel(str(error)) from None


def _variant(heads: int, kv_heads: int, latent: bool) -> str:
    """The author's variant for a call."""
    return "mla-decode" if latent else "mha" if heads == kv_heads else "gqa"


def check_axes(query: Any, key: Any, value: Any) -> None:
    """Raises ValueError for a tensor that has not four axes."""
    if query.ndim == key.ndim == value.ndim == 4:
        return
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.ndim != 4:
            raise ValueError(f"{name} has {tensor.ndim} axes: pass (batch, heads, length, dim)")


def check_types(query: Any, key: Any, value: Any, kv_dtype: str | None = None) -> None:
    """Raises ValueError for a tensor of another type than the query, or than `kv_dtype`."""
    for name, tensor in (("key", key), ("value", value)):
        if kv_dtype is None and tensor.dtype != query.dtype:
            raise ValueError(f"{name} is {tensor.dtype} and query {query.dtype}: make them alike")
        if kv_dtype is not None and KEY_DTYPES.get(str(tensor.dtype).split(".")[-1]) != kv_dtype:
            raise ValueError(f"{name} is {tensor.dtype}, and not {kv_dtype} as the other one")


def check_shapes(given: Mapping[str, Any]) -> None:
    """Raises ValueError for a tensor of q, k, v, slopes, sink and bias that does not fit q or k."""
    q, k, v = given["q"], given["k"], given["v"]
    heads = q.shape[1]
    shared = (1 if k.shape[0] == 1 else q.shape[0], *k.shape[1:3])  # one batch of keys serves all
    for name, tensor, shape in (
        ("key", k, (*shared, q.shape[3])),
        ("value", v, (*shared, v.shape[3])),
        ("alibi", given.get("slopes"), (heads,)),
        ("sink", given.get("sink"), (heads,)),
    ):
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ValueError(f"{name} must have the shape {shape}, not {tuple(tensor.shape)}")
    if not k.shape[1] or heads % k.shape[1]:
        text = f"kv_heads = {k.shape[1]} must divide heads = {heads}"
        raise ValueError(f"{text}: give K and V fewer heads")
    if not q.shape[3]:
        raise ValueError("query has a head dim of 0")
    if "bias" in given:
        Bias.own_axes(given["bias"], dims_of(q, k))


def check_settings(window: int | None, softcap: float | None, scale: float | None) -> None:
    """Raises ValueError for a setting that no attention has, such as a softcap of 0."""
    given = {"window": window, "softcap": softcap, "scale": scale}
    named = {name: setting for name, setting in given.items() if setting is not None}
    try:
        AttentionSpec.make(variant="mha", heads=1, kv_heads=1, head_dim=64, dtype="fp16", **named)
    except BadSpec as error:
        raise ValueError(str(error)) from None


def dims_of(query: Any, key: Any) -> dict[str, int]:
    """The sizes of a call."""
    return {
        "batch": query.shape[0],
        "heads": query.shape[1],
        "kv_heads": key.shape[1],
        "q_len": query.shape[2],
        "kv_len": key.shape[2],
    }


def card(number: int) -> Gpu:
    """A GPU of this machine by its number. Raises NoKernel if nothing is known of it."""
    if number not in _CARDS:
        try:
            found = driver.cards()[number]
            major, minor = found.capability
            _CARDS[number] = gpus.of_card(found.name, 10 * major + minor)
        except (gpus.UnknownGpu, Failed) as error:
            raise NoKernel(str(error)) from None
    return _CARDS[number]


_CARDS: dict[int, Gpu] = {}
