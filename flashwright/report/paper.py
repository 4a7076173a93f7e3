"""The paper's figures for the cells of a report."""

from __future__ import annotations

from flashwright.measure import tables
from flashwright.report.model import PaperFigure
from flashwright.spec import AttentionSpec

LIBRARIES = ("cuDNN", "FlexAttention", "flash-attn v1", "flash-attn v2")


def figure(table: int, spec: AttentionSpec, length: int) -> PaperFigure | None:
    """The paper's figure in a cell on its main GPU, and its ratio to the fastest library."""
    found = tables.figures(table, spec, length) if table in tables.TABLES else ()
    if not found or found[0].ours is None:
        return None
    figures = found[0]
    ratios = [(r, name) for name in LIBRARIES if (r := figures.ratio(name)) is not None]
    ratio, library = min(ratios, default=(None, ""))
    return PaperFigure(figures.gpu, figures.unit, figures.by_system[tables.OURS], ratio, library)
