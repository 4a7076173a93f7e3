"""The libraries that a kernel is measured beside. A peer that cannot do a cell says why."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flashwright.measure.grid import Cell


class Unable(Exception):
    """This peer does not do this cell; the message says why."""


@dataclass(frozen=True)
class Sdpa:
    """One backend of torch's scaled_dot_product_attention."""

    name: str
    backend: str
    """Its name in torch.nn.attention.SDPBackend."""

    def prepare(self, cell: Cell, q: Any, k: Any, v: Any) -> Callable[[], Any]:
        """A call without arguments that gives O (batch, heads, length, dim); Unable with why."""
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel

        backend = getattr(SDPBackend, self.backend, None)
        if backend is None:
            raise Unable("this torch does not have it")
        spec = cell.spec
        if spec.window or spec.softcap or spec.alibi or spec.sink or spec.branch:
            raise Unable("it has full and causal attention only")

        def call() -> Any:
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(
                    *(q, k, v),
                    is_causal=spec.causal,
                    scale=spec.softmax_scale,
                    enable_gqa=spec.kv_heads != spec.heads,
                )

        _try(call)
        return call


PEERS = (
    Sdpa("torch flash", "FLASH_ATTENTION"),
    Sdpa("torch cuDNN", "CUDNN_ATTENTION"),
    Sdpa("torch efficient", "EFFICIENT_ATTENTION"),
)
YARDSTICK = PEERS[0].name
"""The peer that ratios are told against first: FlashAttention-2."""


def _try(call: Callable[[], Any]) -> None:
    """Call once; torch says in warnings why a backend does not take a problem."""
    import torch

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            call()
            torch.cuda.synchronize()
        except (RuntimeError, NotImplementedError) as error:
            lines = [str(w.message).splitlines()[0] for w in said] + [str(error).splitlines()[0]]
            reasons = [line for line in lines if "not used because" not in line]
            raise Unable(reasons[0].partition(" (Triggered")[0]) from None
