"""Problems of the benchmark: inputs drawn on the GPU, the same in every process.

The process that times a call and the one that checks its output draw the inputs from the same seed.
No tensor has to be sent, and the timed process never holds an expected value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flashwright.sandbox.tensors import Array, torch_dtype
from flashwright.spec import AttentionSpec

LAYOUTS = ("bshd", "bhsd")


@dataclass(frozen=True)
class TimedProblem:
    """One problem whose Q, K and V are drawn from a seed."""

    spec: AttentionSpec
    batch: int
    length: int
    layout: str = "bshd"
    """The memory order of Q, K and V. The candidate always gets (batch, heads, length, dim)."""
    extra: Mapping[str, Array] = field(default_factory=dict)
    """The other inputs (Slopes, Sink, Idx, gates): the same in every call."""
    kv_len: int | None = None
    """Number of keys; None means as many as queries."""
    dims: Mapping[str, int] = field(default_factory=dict)
    """Sizes that no tensor shows."""
    sequences: tuple[tuple[int, int], ...] = ()
    """The queries and the keys of each sequence, where they have any lengths. `batch` and `length`
    are then those of Q: of packed sequences 1, and all tokens."""

    @property
    def shapes(self) -> dict[str, tuple[int, int, int, int]]:
        """The shapes of Q, K and V, as (batch, heads, length, dim); pages take the place of the
        batch."""
        spec = self.spec
        count, rows = self._keys
        found = {
            "Q": (self.batch, spec.heads, self.length, spec.head_dim),
            "K": (count, spec.kv_heads, rows, spec.head_dim),
            "V": (count, spec.kv_heads, rows, spec.value_dim),
        }
        if spec.latent:
            del found["V"]
        return found

    @property
    def _keys(self) -> tuple[int, int]:
        """How many batches, or pages, of how many keys K has."""
        batch = self.spec.batch
        if batch is None:
            return self.batch, self.length if self.kv_len is None else self.kv_len
        if batch.page is not None:
            return sum(-(-keys // batch.page) for _, keys in self.sequences), batch.page
        return 1, sum(keys for _, keys in self.sequences)

    @property
    def outputs(self) -> dict[str, tuple[tuple[int, int, int, int], str]]:
        """Shape and type of what a call returns: O, and the blocks that NSA as a whole chose."""
        spec = self.spec
        found: dict[str, tuple[tuple[int, int, int, int], str]]
        found = {"O": ((self.batch, spec.heads, self.length, spec.value_dim), spec.output_dtype)}
        if spec.branch == "all":
            found["Idx"] = ((self.batch, spec.kv_heads, self.length, spec.top_k), "int32")
        return found

    @property
    def sizes(self) -> dict[str, int]:
        """All sizes of the problem by name."""
        spec, keys = self.spec, self._keys[1]
        heads = {"heads": spec.heads, "kv_heads": spec.kv_heads}
        lengths = {"batch": self.batch, "q_len": self.length, "kv_len": keys}
        if spec.batch is not None:
            longest = (max(pair[side] for pair in self.sequences) for side in (0, 1))
            counts = (len(self.sequences), *longest)
            lengths = dict(zip(("batch", "q_len", "kv_len"), counts, strict=True))
        return {**spec.dims, **heads, **lengths, **self.dims}

    def passed(self, name: str, tensor: Any) -> Any:
        """A tensor of `shapes` as the candidate gets it: those of all tokens have no batch."""
        return tensor[0] if self._of_tokens(name) else tensor

    def returned(self, tensor: Any) -> Any:
        """The O of a call with the axes of Q in `shapes`."""
        return tensor[None] if self._of_tokens("O") else tensor

    def _of_tokens(self, name: str) -> bool:
        if self.spec.batch is None:
            return False
        return self.spec.packed if name in ("Q", "O") else self.spec.page is None

    def empty(self, device: str = "cuda") -> dict[str, Any]:
        """Uninitialised tensors for Q, K and V, in the problem's layout."""
        import torch

        made = {}
        for name, (batch, heads, length, width) in self.shapes.items():
            inner = (length, heads) if self.layout == "bshd" else (heads, length)
            dtype = torch_dtype(self.spec.input_dtype if name == "Q" else self.spec.key_dtype)
            made[name] = torch.empty(batch, *inner, width, dtype=dtype, device=device)
        return {n: x.transpose(1, 2) if self.layout == "bshd" else x for n, x in made.items()}


def draw(problem: TimedProblem, into: Mapping[str, Any], seed: int) -> None:
    """Fill the drawn inputs from a seed, in the order of their memory."""
    import torch

    for number, (name, tensor) in enumerate(sorted(into.items())):
        lying = tensor.transpose(1, 2) if problem.layout == "bshd" else tensor
        generator = torch.Generator(lying.device).manual_seed(1000 * seed + number)
        if lying.element_size() > 1:
            lying.normal_(generator=generator)
        else:  # 8 bits have no normal_
            wide = torch.empty(lying.shape, dtype=torch.float32, device=lying.device)
            wide.normal_(generator=generator)
            lying.copy_(wide if lying.is_floating_point() else (32 * wide).clamp_(-128, 127))
        assert name in problem.shapes


def inputs_of(problem: TimedProblem, seed: int, device: str = "cuda") -> dict[str, Any]:
    """The inputs of a timed call, drawn again: Q, K, V and the extra ones."""
    import torch

    made = problem.empty(device)
    draw(problem, made, seed)
    return {**made, **{n: torch.from_numpy(x).to(device) for n, x in problem.extra.items()}}
