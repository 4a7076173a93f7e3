"""A package's own spec: it may say what the kernel computes, not how wrong that may be."""

from __future__ import annotations

from flashwright.judge.oracle import RMS_LIMIT, ROUNDOFF
from flashwright.spec import AttentionSpec


def strict(spec: AttentionSpec) -> tuple[AttentionSpec, tuple[str, ...]]:
    """The spec without what only a user may allow, and a note for each thing that is not taken."""
    notes, usual = [], RMS_LIMIT * ROUNDOFF[spec.dtype]
    if spec.tolerance is not None and spec.tolerance > usual:
        text = f"its tolerance of {spec.tolerance:g} is not taken, but {usual:.2g}"
        notes.append(f"{text}: a larger one comes from --spec only")
        spec = spec.model_copy(update={"tolerance": None})
    if not spec.repeatable:
        notes.append("its repeatable = false is not taken: that comes from --spec only")
        spec = spec.model_copy(update={"repeatable": True})
    return spec, tuple(notes)
