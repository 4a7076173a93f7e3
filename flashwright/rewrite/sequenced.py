"""A program for rectangular batches, rewritten for what a spec says of its sequences."""

from __future__ import annotations

from flashwright.lang.nodes import Tree
from flashwright.rewrite.grouped import grouped
from flashwright.rewrite.packed import packed
from flashwright.rewrite.split import split
from flashwright.spec import AttentionSpec


def sequenced(tree: Tree, spec: AttentionSpec) -> Tree:
    """A program for rectangular batches, rewritten for a spec's sequences. In a decode the heads of
    a group that share keys are rows of one tile, and the keys are split over thread blocks unless
    the spec says `unsplit`. Raises Failed if it cannot be rewritten."""
    assert spec.batch is not None
    made = packed(tree, spec.batch)
    if spec.decode is None:
        return made
    made = grouped(made, spec.group) if spec.group > 1 else made
    return made if spec.unsplit else split(made)
