"""The cells of a benchmark: the paper's grid or a user's, and the work that each cell counts as."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flashwright.author.builtin.variants import make_spec
from flashwright.files import cannot
from flashwright.measure.sequences import Sequences, named, problems
from flashwright.measure.work import Work, sum_of, work_of
from flashwright.spec import AttentionSpec, BadSpec

TOKENS = 16_384
HIDDEN = 2_048
LENGTHS = (512, 1024, 2048, 4096, 8192, 16_384)
HEAD_DIMS = (64, 128)
VARIANTS = ("mha", "gqa", "mqa")
GROUP = 4  # query heads to a kv head in grouped-query attention
_SIZES = ("lengths", "tokens", "batch")  # keys of a grid file; all others belong to the spec


@dataclass(frozen=True)
class Cell:
    """One problem of the grid: a spec, a length and a batch size; or sequences of any lengths."""

    spec: AttentionSpec
    length: int
    """Of queries; of packed sequences all tokens, of a decode the keys of a sequence."""
    batch: int
    sequences: Sequences | None = None

    def __post_init__(self) -> None:
        """Raise BadSpec for a spec of sequences without their lengths, and for a backward pass."""
        if self.spec.backward:
            raise BadSpec(f"{self.spec.in_words}: `bench` measures forward passes")
        if (self.spec.batch is None) != (self.sequences is None):
            told = f"{self.spec.in_words}: a grid has rectangular batches"
            raise BadSpec(f"{told}; measure a package of these with --package")

    @classmethod
    def of_sequences(cls, spec: AttentionSpec, sequences: Sequences) -> Cell:
        """The cell of a problem of sequences."""
        return cls(spec, sequences.length, len(sequences.pairs), sequences)

    @classmethod
    def recorded(cls, spec: AttentionSpec, name: str, length: int, batch: int) -> Cell:
        """The cell of a record. Raises BadSpec if there is no such cell."""
        if spec.batch is None:
            return cls(spec, length, batch)
        return cls.of_sequences(spec, named(spec, name.rpartition(" ")[2], length, batch))

    @property
    def kernel(self) -> str:
        """The name of the kernel for this cell: one kernel serves all lengths."""
        return kernel_name(self.spec)

    @property
    def name(self) -> str:
        """Such as `gqa d128 causal 4096`, or `gqa d128 causal packed uniform`."""
        return f"{self.kernel} {self.size}"

    @property
    def size(self) -> str:
        """The last word of the name."""
        return str(self.length) if self.sequences is None else self.sequences.name

    @property
    def kv_len(self) -> int:
        """The number of keys: that of queries, or of the compressed blocks."""
        if self.spec.branch == "compressed":
            return self.spec.compressed_blocks(self.length)
        return self.length

    def work(self, idx: Any = None) -> Work:
        """The operations and bytes of the cell; `idx` are the selected blocks, if there are any."""
        if self.sequences is not None:
            counted = Counter(self.sequences.pairs).items()
            parts = (work_of(self.spec.each, count, *pair) for pair, count in counted)
            return sum_of(parts)
        return work_of(self.spec, self.batch, self.length, self.kv_len, idx)

    def flops(self, work: Work | None = None) -> float:
        """Both GEMMs by the paper's formula: 4 L L D H B, half of it if causal.

        The formula has no windows, no sparsity and one length; for others, the operations actually
        needed.
        """
        spec = self.spec
        if spec.window is not None or spec.branch is not None or spec.batch is not None:
            return (work or self.work()).flops
        whole = 2 * self.length**2 * (spec.head_dim + spec.value_dim) * spec.heads * self.batch
        return whole / 2 if spec.causal else whole

    def tflops(self, seconds: float, work: Work | None = None) -> float:
        """The rate, in 10^12 operations a second."""
        return self.flops(work) / seconds / 1e12


def kernel_name(spec: AttentionSpec) -> str:
    """A short, unique name of a spec; specs of the paper's grid get the shortest ones."""
    width = f"d{spec.head_dim}"
    if spec.value_dim != spec.head_dim:
        width += f"/{spec.value_dim}"
    words = [
        spec.variant,
        "" if _usual_heads(spec) else f"{spec.heads}/{spec.kv_heads}",
        width,
        "causal" if spec.causal else "full",
        f"window {spec.window}" if spec.window is not None else "",
        f"sink tokens {spec.sink_tokens}" if spec.sink_tokens is not None else "",
        f"softcap {spec.softcap:g}" if spec.softcap is not None else "",
        "alibi" if spec.alibi else "",
        "sink" if spec.sink else "",
        "fp8" if spec.dtype == "fp8" else "",
        "packed" if spec.packed else "",
        "cache" if spec.cache else "",
        f"decode {spec.decode}" if spec.decode is not None else "",
        "unsplit" if spec.unsplit else "",
        f"pages of {spec.page}" if spec.page is not None else "",
        f"cache in {spec.kv_dtype}" if spec.kv_dtype is not None else "",
    ]
    return " ".join(filter(None, words))


def _usual_heads(spec: AttentionSpec) -> bool:
    if spec.branch is not None:
        return (spec.heads, spec.kv_heads) == (64, 4)
    return (spec.heads, spec.kv_heads) == _heads(spec.variant, spec.value_dim)


def _heads(variant: str, width: int) -> tuple[int, int]:
    """Query and kv heads that make up the hidden size."""
    heads = max(1, HIDDEN // width)
    return heads, {"gqa": max(1, heads // GROUP), "mqa": 1}.get(variant, heads)


@dataclass(frozen=True)
class Shape:
    """The settings of a grid; the defaults are the paper's."""

    variants: Sequence[str] = VARIANTS
    head_dims: Sequence[int] = HEAD_DIMS
    lengths: Sequence[int] = LENGTHS
    masks: Sequence[bool] = (False, True)
    dtype: str = "bf16"
    heads: int | None = None
    kv_heads: int | None = None
    tokens: int = TOKENS


def cells(shape: Shape | None = None) -> Iterator[Cell]:
    """The cells of a grid; all lengths of a kernel are adjacent."""
    shape = shape or Shape()
    for variant in shape.variants:
        for head_dim in shape.head_dims:
            for causal in shape.masks:
                spec = _spec(shape, variant, head_dim, causal)
                for length in shape.lengths:
                    yield Cell(spec, length, max(1, shape.tokens // length))


def _spec(shape: Shape, variant: str, head_dim: int, causal: bool) -> AttentionSpec:
    heads, kv_heads = _heads(variant, head_dim)
    if shape.heads is not None:
        heads = shape.heads
        kv_heads = {"gqa": max(1, heads // GROUP), "mqa": 1}.get(variant, heads)
    return make_spec(
        variant,
        heads=heads,
        kv_heads=kv_heads if shape.kv_heads is None else shape.kv_heads,
        head_dim=head_dim,
        causal=causal,
        dtype=shape.dtype,
    )


def of_spec(spec: AttentionSpec, lengths: Sequence[int], tokens: int = TOKENS) -> list[Cell]:
    """One kernel at several lengths. Raises BadSpec for sequences of any lengths."""
    return [Cell(spec, length, max(1, tokens // length)) for length in lengths]


def of_package(
    spec: AttentionSpec, lengths: Sequence[int], tokens: int | None = None
) -> list[Cell]:
    """The cells of a package: one kernel at several lengths, or over the problems of sequences that
    fit its spec."""
    if spec.batch is None:
        return of_spec(spec, lengths, tokens or TOKENS)
    return [Cell.of_sequences(spec, one) for one in problems(spec, tokens)]


# --- a grid from a file -----------------------------------------------------------------------


@dataclass(frozen=True)
class BenchGrid:
    """The cells of a grid file, and its title."""

    title: str
    cells: tuple[Cell, ...]


def load(path: Path) -> BenchGrid:
    """Read a grid in TOML: `lengths` and `tokens` for all kernels, and a [[kernel]] with each spec.

        lengths = [1024, 4096]
        [[kernel]]
        variant = "gqa"
        heads = 32
        kv_heads = 8
        causal = true
        batch = 1

    Raises BadSpec with lines that name the file.
    """
    try:
        settings = tomllib.loads(path.read_bytes().decode())
    except OSError as error:
        raise cannot("read", path, error) from None
    except (ValueError, RecursionError) as error:
        raise BadSpec(f"{path}: not valid TOML: {error}") from None
    known = ("title", "kernel", *_SIZES)
    strange = [key for key in settings if key not in known]
    kernels = settings.get("kernel", [])
    if strange:
        raise BadSpec(f"{path}: no such setting: {strange[0]}; there are {', '.join(known)}")
    if not isinstance(kernels, list) or not kernels:
        raise BadSpec(f"{path}: it has no [[kernel]]")
    found: dict[str, Cell] = {}
    for number, kernel in enumerate(kernels, 1):
        try:
            found |= {cell.name: cell for cell in _of_file(kernel, settings)}
        except (BadSpec, ValueError) as error:
            raise BadSpec(f"{path}: kernel {number}: {error}") from None
    return BenchGrid(str(settings.get("title", path.stem)), tuple(found.values()))


def _of_file(kernel: Mapping[str, Any], common: Mapping[str, Any]) -> Iterator[Cell]:
    sizes = {name: kernel.get(name, common.get(name)) for name in _SIZES}
    options = {name: value for name, value in kernel.items() if name not in _SIZES}
    if "variant" not in options:
        raise BadSpec('variant: is missing: add variant = "mha"')
    strange = sorted(set(options) - set(AttentionSpec.model_fields))
    if strange:
        raise BadSpec(f"no such setting: {strange[0]}")
    spec = make_spec(**options)
    lengths = LENGTHS if sizes["lengths"] is None else sizes["lengths"]
    if not isinstance(lengths, list | tuple) or not all(_count(n) for n in lengths):
        raise BadSpec("lengths: must be a list of whole numbers above 0")
    for name in ("tokens", "batch"):
        if sizes[name] is not None and not _count(sizes[name]):
            raise BadSpec(f"{name}: must be a whole number above 0")
    for cell in of_spec(spec, lengths, sizes["tokens"] or TOKENS):
        yield cell if sizes["batch"] is None else replace(cell, batch=sizes["batch"])


def _count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
