"""flashwright.nsa as a contestant of `bench`, which names this module: its kernels as files, and
the call as a factory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from flashwright.build.cache import Cache
from flashwright.generate import store
from flashwright.sparse.nsa import nsa
from flashwright.spec import AttentionSpec

LENGTHS = (63, 1000, 16_384)
"""Tokens of the calls that make the kernels: every length has the same ones."""


def packages(spec: AttentionSpec, device: str = "cuda") -> dict[str, bytes]:
    """The files of all kernels that a call needs, by their paths in the store. Kernels that are not
    in the store yet are made. Raises NoKernel if one cannot be."""
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[spec.dtype]
    call, many = _call(spec), (spec.heads, spec.kv_heads, spec.kv_heads)
    with store.noted() as used, torch.no_grad():
        for tokens in LENGTHS:
            shapes = [(1, heads, tokens, spec.head_dim) for heads in many]
            rows = [torch.randn(shape, dtype=dtype, device=device) for shape in shapes]
            gates = torch.rand(3, 1, tokens, spec.heads, dtype=dtype, device=device)
            call(*rows, *gates)
    every = [file for folder in used for file in sorted(folder.rglob("*")) if file.is_file()]
    roots = {file: next(f for f in used if file.is_relative_to(f)).parent for file in every}
    return {
        f"{store.PACKAGES}/{file.relative_to(roots[file]).as_posix()}": file.read_bytes()
        for file in every
    }


def contestant(folder: Path) -> Callable[[AttentionSpec], Callable[..., Any]]:
    """A factory of the call, by the kernels in a folder, which its own store has then."""
    kernels = Cache().root / store.PACKAGES
    kernels.mkdir(parents=True, exist_ok=True)
    for package in (folder / store.PACKAGES).iterdir():
        if not (kernels / package.name).exists():
            (kernels / package.name).symlink_to(package)
    return _call


def _call(spec: AttentionSpec) -> Callable[..., Any]:
    """A function of Q, K and V, (batch, heads, length, dim), and of the gates, (batch, length,
    heads), that returns O and the chosen blocks."""
    sizes = (spec.top_k, spec.block, spec.window or 0, spec.scale)

    def attention(q: Any, k: Any, v: Any, *gates: Any) -> Any:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        compress, select, window = (gate.to(q.dtype) for gate in gates)
        every = (compress, select, window, None, *sizes)
        found = nsa(q, k, v, *every, return_block_indices=True)
        return [x.transpose(1, 2) for x in found]

    return attention
