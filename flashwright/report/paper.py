"""The paper's figures beside ours."""

from __future__ import annotations

from flashwright.measure import tables
from flashwright.report.model import PaperFigure
from flashwright.spec import AttentionSpec

LIBRARIES = ("cuDNN", "FlexAttention", "flash-attn v1", "flash-attn v2")


def figure(table: int, spec: AttentionSpec, length: int) -> PaperFigure | None:
    """The paper's own system in a cell, on its main GPU, and beside its fastest library there."""
    found = tables.figures(table, spec, length) if table in tables.TABLES else ()
    if not found or found[0].ours is None:
        return None
    told = found[0]
    ratios = [(r, name) for name in LIBRARIES if (r := told.ratio(name)) is not None]
    ratio, library = min(ratios, default=(None, ""))
    return PaperFigure(told.gpu, told.unit, told.by_system[tables.OURS], ratio, library)
