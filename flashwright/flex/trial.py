"""The first call of a new kernel: some rows of its output against the user's own functions in fp64.

A kernel from the store has passed this before. It needs no judge: the kernel is our translator's,
and what could be wrong is that the program does not say what the functions say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from flashwright.spec import AttentionSpec

Function = Callable[..., Any]

ROWS = 16
LIMIT = {"fp16": 2.0**-8, "bf16": 2.0**-5, "fp8": 2.0**-2}
"""Of an element's error, relative to the RMS of its row: many times what rounding gives."""


class WrongKernel(RuntimeError):
    """A new kernel differs from the functions that it was made from."""


def check(
    out: Any,
    score_mod: Function | None,
    mask_mod: Function | None,
    spec: AttentionSpec,
    dims: Mapping[str, int],
    tensors: Mapping[str, Any],
) -> None:
    """Raise WrongKernel if some rows of the output are not what the functions give.

    `tensors` has q, k, v, and slopes, sink and bias (of the output's batch and heads) if given.
    """
    if not all(dims.values()):
        return
    query = tensors["q"]
    with torch.no_grad():
        for b, h in {(0, 0), (dims["batch"] - 1, dims["heads"] - 1)}:
            rows = torch.linspace(0, dims["q_len"] - 1, min(ROWS, dims["q_len"])).long()
            rows = rows.to(query.device)
            wanted = expected(score_mod, mask_mod, spec, tensors, (b, h, rows))
            found = out[b, h, rows].double()
            size = wanted.square().mean(dim=-1, keepdim=True).sqrt().clamp(min=1e-3)
            error = float(((found - wanted).abs() / size).max())
            if not error <= LIMIT[spec.dtype]:
                where = f"batch {b}, head {h}"
                raise WrongKernel(
                    f"a new kernel is wrong: at {where} its rows are {error:.2g} of their RMS from "
                    "what the functions give. Please report the functions and the shapes"
                )


def expected(
    score_mod: Function | None,
    mask_mod: Function | None,
    spec: AttentionSpec,
    tensors: Mapping[str, Any],
    place: tuple[int, int, Any],
) -> Any:
    """Rows of the output in fp64, by the functions themselves."""
    query, key, value = (tensors[name] for name in "qkv")
    b, h, rows = place
    shared = query.shape[1] // key.shape[1]
    source = b if key.shape[0] > 1 else 0
    k, v = (t[source, h // shared].double() for t in (key, value))
    scores = query[b, h, rows].double() @ k.T * spec.softmax_scale
    keys = torch.arange(len(k), device=query.device)
    batch, head = (torch.tensor(n, device=query.device) for n in (b, h))
    q_len, kv_len = query.shape[2], key.shape[2]
    hidden = torch.zeros_like(scores, dtype=torch.bool)
    position = rows[:, None] + kv_len - q_len
    if spec.causal:
        hidden |= keys > position
    if spec.window is not None:
        hidden |= (position - keys).abs() >= spec.window
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    if spec.alibi:
        scores = scores + tensors["slopes"][h].double() * (keys - position)
    if "bias" in tensors:
        full = tensors["bias"].expand(*query.shape[:3], kv_len)
        scores = scores + full[b, h, rows].double()
    if score_mod is not None:
        scores = over(score_mod, scores)(scores, batch, head, rows, keys).double()
    if mask_mod is not None:
        hidden |= ~over(mask_mod, None)(batch, head, rows, keys)
    scores = scores.masked_fill(hidden, -torch.inf)
    if spec.sink:  # one more column, which has no value
        logit = tensors["sink"][h].double().expand(len(rows), 1)
        scores = torch.cat([scores, logit], dim=1)
    weights = torch.softmax(scores, dim=-1)[:, :kv_len]
    return torch.nan_to_num(weights) @ v  # a row without keys


def over(function: Function, scores: Any) -> Function:
    """A function of one element over rows and keys."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    first = () if scores is None else (0,)
    over_keys = torch.vmap(function, in_dims=(*first, None, None, None, 0))
    over_rows = torch.vmap(over_keys, in_dims=(*first, None, None, 0, None))

    def run(*args: Any) -> Any:
        with TransformGetItemToIndex():
            return over_rows(*args)

    return run
