"""Kernels for sequences that lie packed or in a cache: the built-in author's programs, rewritten.
Each is made once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from flashwright import spec as specs
from flashwright.author.builtin.author import write_code, write_sketch
from flashwright.author.builtin.choose import NothingFits
from flashwright.files import sha256
from flashwright.generate.backward import BackwardOrder, built
from flashwright.generate.folder import write_package
from flashwright.generate.store import HEADROOMS
from flashwright.gpu import Gpu
from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.lang.format import format_tree
from flashwright.lang.parse import parse
from flashwright.measure.machine import translator
from flashwright.rewrite.grouped import grouped
from flashwright.rewrite.packed import PACKED, packed
from flashwright.rewrite.sequences import Batch
from flashwright.rewrite.split import split
from flashwright.spec import AttentionSpec

_STEP = 64
"""Keys of a step, where queries are few."""


@dataclass(frozen=True)
class PackedOrder:
    """Attention as a spec defines it, of sequences of any lengths: a kernel to find or to make."""

    spec: AttentionSpec
    """Of each sequence."""
    gpu: Gpu
    batch: Batch = PACKED
    """How the sequences lie in memory."""
    rows: int | None = None
    """The most rows of a tile that have work, where queries are few (decode): the heads of a group
    that share keys are rows of one tile, and the keys are split over thread blocks."""

    def code(self, headroom: int | None = None) -> str:
        """The program. Raises Failed with FW905 if no tiling fits the GPU."""
        tree = packed(parse(self.rectangular(headroom)), self.batch)
        if self.rows is not None:
            tree = split(grouped(tree, self.spec.group) if self.spec.group > 1 else tree)
        return format_tree(tree)

    def rectangular(self, headroom: int | None = None) -> str:
        """The author's program for rectangular batches."""
        sketch = write_sketch(self.spec)
        try:
            written = write_code(sketch, self.spec, self.gpu, headroom=headroom, few=self._few)
        except NothingFits as error:
            raise Failed(Diagnostic("FW905", str(error))) from None
        return written.code

    @property
    def _few(self) -> tuple[int, int] | None:
        """What the author has to know of a decode: a page of whole steps is one place in memory."""
        page = self.batch.page
        keys = page if page is not None and page % _STEP == 0 else 2 * _STEP
        return (self.rows, keys) if self.rows is not None else None

    @property
    def backward(self) -> BackwardOrder:
        """The gradients of Q, K and V."""
        wrt = ("q", "k", "v")
        return BackwardOrder(self.rectangular(), self.gpu, self.spec, inputs=wrt, packed=True)

    @cached_property
    def key(self) -> str:
        """A digest of what is computed, for which GPU, and of the translator."""
        how = repr((self.batch, self.rows))
        return sha256("\0".join((how, specs.dump(self.spec), self.gpu.name, translator())))

    @property
    def name(self) -> str:
        """The name of its package."""
        kind = "packed" if self.rows is None else "decode"
        return f"{self.gpu.name}-{kind}-{self.spec.slug}-{self.key[:16]}"

    def in_words(self) -> str:
        """What it computes, for a line of progress."""
        kind = "packed sequences" if self.rows is None else f"decode, {self.rows} rows"
        pages = f", keys in pages of {self.batch.page}" if self.batch.page is not None else ""
        return f"{kind}{pages}, {self.spec.in_words}; {self.gpu.title}"

    def make(self, folder: Path, verified: bool) -> None:
        """Write the package; if it spills, again with more registers free."""
        for number, headroom in enumerate(HEADROOMS, 1):
            try:
                files = built(parse(self.code(headroom)), self.gpu)
            except Failed as failed:
                spills = any(d.code == "FW823" for d in failed.diagnostics)
                if spills and number < len(HEADROOMS):
                    continue
                raise
            write_package(folder, files, self.gpu.name)
            return
