"""The spec inside a package: it defines what the kernel computes, not how wrong it may be."""

from __future__ import annotations

from flashwright.judge.oracle import RMS_LIMIT, ROUNDOFF
from flashwright.spec import AttentionSpec


def strict(spec: AttentionSpec) -> tuple[AttentionSpec, tuple[str, ...]]:
    """The spec without the allowances that only a user may make, and a note for each of them."""
    notes, usual = [], RMS_LIMIT * ROUNDOFF[spec.dtype]
    if spec.tolerance is not None and spec.tolerance > usual:
        text = f"the package's tolerance of {spec.tolerance:g} is ignored, {usual:.2g} applies"
        notes.append(f"{text}: pass --spec to allow a larger one")
        spec = spec.model_copy(update={"tolerance": None})
    if not spec.repeatable and not spec.backward:  # there it is the default, about dQ alone
        notes.append("the package's repeatable = false is ignored: pass --spec to allow it")
        spec = spec.model_copy(update={"repeatable": True})
    return spec, tuple(notes)
