"""What a spec asks for beyond plain attention, and the peers that do not have it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from flashwright.sandbox.candidate import Unable
from flashwright.spec import AttentionSpec

_FEATURES: Mapping[str, Callable[[AttentionSpec], object]] = {
    "fp8": lambda spec: spec.dtype == "fp8",
    "windows": lambda spec: spec.window is not None,
    "softcap": lambda spec: spec.softcap is not None,
    "ALiBi": lambda spec: spec.alibi,
    "sinks": lambda spec: spec.sink,
    "sink tokens": lambda spec: spec.sink_tokens is not None,
    "compressed keys": lambda spec: spec.branch == "compressed",
    "selected blocks of keys": lambda spec: spec.branch == "selected",
    "V of another width than K": lambda spec: spec.value_dim != spec.head_dim,
    "a reference of its own": lambda spec: spec.reference is not None,
}


def features(spec: AttentionSpec) -> list[str]:
    """What of it a library may lack, in words."""
    return [name for name, has in _FEATURES.items() if has(spec)]


def need(spec: AttentionSpec, *known: str) -> None:
    """Unable where the spec has a feature that is not among the known ones."""
    lacking = [name for name in features(spec) if name not in known]
    if lacking:
        raise Unable(f"it has no {' and no '.join(lacking)}")


def window_of(spec: AttentionSpec) -> tuple[int, int]:
    """How many keys before and after its own a query sees, as flash-attention counts: -1 is all."""
    if spec.window is None:
        return -1, -1
    return spec.window - 1, 0 if spec.causal else spec.window - 1


def first_line(error: BaseException) -> str:
    """What an exception says, in a line."""
    said = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return said[:300] or type(error).__name__


def is_memory(error: BaseException) -> bool:
    """Whether it is memory that ran out: that is the problem's size, not what a peer can do."""
    return isinstance(error, MemoryError) or "out of memory" in str(error)


def package(name: str) -> Any:
    """An installed package; Unable where it is not there or does not work."""
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError as error:
        gone = isinstance(error, ModuleNotFoundError) and error.name == name.partition(".")[0]
        why = "is not installed" if gone else f"cannot be imported: {first_line(error)}"
        raise Unable(f"{name} {why}") from None
