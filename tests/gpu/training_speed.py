"""A small Llama-like model, trained with our attention and with PyTorch's.

`python -m tests.gpu.training_speed [STEPS]` prints tokens a second and every tenth loss of each, on
random data: bf16, 8k tokens a step, 4 layers, 8 query heads on 2, head dim 128.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import flashwright

Attention = Callable[[Any, Any, Any], Any]
LENGTH, WIDTH, HEADS, KV_HEADS, LAYERS, WORDS = 8192, 1024, 8, 2, 4, 4096
DIM = WIDTH // HEADS
WARM = 10
"""Steps that are not timed."""


def ours(q: Any, k: Any, v: Any) -> Any:
    return flashwright.attention(q, k, v, causal=True)


def pytorchs(q: Any, k: Any, v: Any) -> Any:
    sdpa = functional.scaled_dot_product_attention
    return sdpa(q, k, v, is_causal=True, enable_gqa=True)


class Layer(nn.Module):  # type: ignore[misc]
    """Attention and a gated MLP, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * DIM, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.gate = (nn.Linear(WIDTH, 3 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Any, attention: Attention) -> Any:
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (-1, DIM)).transpose(1, 2)
        found = attention(*heads.split((HEADS, KV_HEADS, KV_HEADS), dim=1))
        x = x + self.out(found.transpose(1, 2).flatten(2))
        h = self.norms[1](x)
        return x + self.down(functional.silu(self.gate(h)) * self.up(h))


def trained(attention: Attention, steps: int) -> tuple[list[float], float]:
    """The losses, and tokens a second."""
    torch.manual_seed(0)
    words, layers = nn.Embedding(WORDS, WIDTH), nn.ModuleList(Layer() for _ in range(LAYERS))
    head = nn.Linear(WIDTH, WORDS, bias=False)
    model = nn.ModuleList([words, layers, head]).cuda().bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)
    data = torch.randint(0, WORDS, (4, LENGTH + 1), device="cuda")
    losses, begin = [], 0.0
    for step in range(steps):
        if step == WARM:
            torch.cuda.synchronize()
            begin = time.perf_counter()
        tokens = data[step % 4][None]
        x = words(tokens[:, :-1])
        for layer in layers:
            x = layer(x, attention)
        loss = functional.cross_entropy(head(x).flatten(0, 1).float(), tokens[0, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    torch.cuda.synchronize()
    taken = time.perf_counter() - begin
    return [float(x) for x in losses], LENGTH * (steps - WARM) / taken


if __name__ == "__main__":
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    for by in (pytorchs, ours, pytorchs, ours):
        found, speed = trained(by, count)
        shown = " ".join(f"{x:.3f}" for x in found[:: max(1, count // 10)])
        print(f"{by.__name__:9} {speed:8.0f} tokens/s, losses {shown} {found[-1]:.3f}", flush=True)
