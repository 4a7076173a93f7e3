"""The paper's grid: 16k tokens in all, a hidden size of 2048, and how the work in it is counted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from flashwright.author.builtin.variants import make_spec
from flashwright.spec import AttentionSpec

TOKENS = 16_384
HIDDEN = 2_048
LENGTHS = (512, 1024, 2048, 4096, 8192, 16_384)
HEAD_DIMS = (64, 128)
VARIANTS = ("mha", "gqa", "mqa")
GROUP = 4  # query heads to a kv head in grouped-query attention


@dataclass(frozen=True)
class Cell:
    """One problem of the grid."""

    spec: AttentionSpec
    length: int
    batch: int

    @property
    def name(self) -> str:
        """Such as `gqa d128 causal 4096`."""
        return f"{kernel_name(self.spec)} {self.length}"

    @property
    def flops(self) -> float:
        """Both GEMMs, by the paper's formula: 4 L L D H B, half of it where causal."""
        spec = self.spec
        whole = 2 * self.length**2 * (spec.head_dim + spec.value_dim) * spec.heads * self.batch
        return whole / 2 if spec.causal else whole

    def tflops(self, seconds: float) -> float:
        """The rate, in 10^12 operations a second."""
        return self.flops / seconds / 1e12


def kernel_name(spec: AttentionSpec) -> str:
    """A spec of the grid in a few words."""
    return f"{spec.variant} d{spec.head_dim} {'causal' if spec.causal else 'full'}"


def cells(
    variants: Sequence[str] = VARIANTS,
    head_dims: Sequence[int] = HEAD_DIMS,
    lengths: Sequence[int] = LENGTHS,
    masks: Sequence[bool] = (False, True),
    dtype: str = "bf16",
) -> Iterator[Cell]:
    """The grid, or a part of it; one kernel's lengths come together."""
    for variant in variants:
        for head_dim in head_dims:
            for causal in masks:
                spec = _spec(variant, head_dim, causal, dtype)
                for length in lengths:
                    yield Cell(spec, length, max(1, TOKENS // length))


def _spec(variant: str, head_dim: int, causal: bool, dtype: str) -> AttentionSpec:
    heads = HIDDEN // head_dim
    kv_heads = {"gqa": heads // GROUP, "mqa": 1}.get(variant, heads)
    settings = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    return make_spec(variant, **settings, causal=causal, dtype=dtype)
