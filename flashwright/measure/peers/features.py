"""The features of a spec beyond plain attention, and checks that a peer supports them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from flashwright.sandbox.candidate import Unable
from flashwright.spec import AttentionSpec

SEQUENCES = "sequences of any lengths"
_FEATURES: Mapping[str, Callable[[AttentionSpec], object]] = {
    "fp8": lambda spec: spec.dtype == "fp8",
    "windows": lambda spec: spec.window is not None,
    "softcap": lambda spec: spec.softcap is not None,
    "ALiBi": lambda spec: spec.alibi,
    "sinks": lambda spec: spec.sink,
    "sink tokens": lambda spec: spec.sink_tokens is not None,
    "compressed keys": lambda spec: spec.branch == "compressed",
    "selected blocks of keys": lambda spec: spec.branch == "selected",
    "NSA as a whole": lambda spec: spec.branch == "all",
    "V of another width than K": lambda spec: spec.value_dim != spec.head_dim,
    SEQUENCES: lambda spec: spec.batch is not None,
    "caches in 8 bits with scales": lambda spec: spec.kv_dtype is not None,
    "latent caches": lambda spec: spec.latent,
    "a reference of its own": lambda spec: spec.reference is not None,
}


def features(spec: AttentionSpec) -> list[str]:
    """The features that a library may lack, in words."""
    return [name for name, has in _FEATURES.items() if has(spec)]


def need(spec: AttentionSpec, *known: str) -> None:
    """Raises Unable if the spec has a feature that is not in `known`."""
    lacking = [name for name in features(spec) if name not in known]
    if lacking:
        raise Unable(f"it has no {' and no '.join(lacking)}")


def window_of(spec: AttentionSpec) -> tuple[int, int]:
    """The visible keys before and after a query, in flash-attention's convention: -1 is all."""
    if spec.window is None:
        return -1, -1
    return spec.window - 1, 0 if spec.causal else spec.window - 1


def first_line(error: BaseException) -> str:
    """The first line of an exception's message."""
    said = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return said[:300] or type(error).__name__


def is_memory(error: BaseException) -> bool:
    """Whether memory ran out: that depends on the problem's size, not on the peer's features."""
    return isinstance(error, MemoryError) or "out of memory" in str(error)


def package(name: str) -> Any:
    """Import a package. Raises Unable if it is missing or cannot be imported."""
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError as error:
        gone = isinstance(error, ModuleNotFoundError) and error.name == name.partition(".")[0]
        why = "is not installed" if gone else f"cannot be imported: {first_line(error)}"
        raise Unable(f"{name} {why}") from None
