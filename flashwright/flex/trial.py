"""The first call of a new kernel: some rows of its output against the user's own functions in fp64.

A kernel from the store has passed this before. It needs no judge: the kernel is our translator's,
and what could be wrong is that the program does not say what the functions say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from flashwright.flex.fallback import dense, mask_of, score_of
from flashwright.flex.task import ROWS, compare_rows
from flashwright.generate.store import tell
from flashwright.spec import AttentionSpec

Function = Callable[..., Any]


def check(
    out: Any,
    score_mod: Function | None,
    mask_mod: Function | None,
    spec: AttentionSpec,
    dims: Mapping[str, int],
    tensors: Mapping[str, Any],
) -> None:
    """Raise WrongKernel if some rows of the output are not what the functions give. If PyTorch
    cannot compute the functions, that is told instead.

    `tensors` has q, k, v, and slopes, sink and bias (of the output's batch and heads) if given.
    """
    if not all(dims.values()):
        return
    query = tensors["q"]
    with torch.no_grad():
        for b, h in {(0, 0), (dims["batch"] - 1, dims["heads"] - 1)}:
            rows = torch.linspace(0, dims["q_len"] - 1, min(ROWS, dims["q_len"])).long()
            rows = rows.to(query.device)
            found = out[b, h, rows].double().cpu()  # an error of the kernel shows here
            try:
                wanted = expected(score_mod, mask_mod, spec, tensors, (b, h, rows))
            except RuntimeError as error:  # vmap of CUDA's logsigmoid fails
                tell(f"the first output is not checked: PyTorch fails on the function: {error}")
                return
            compare_rows(found.numpy(), wanted.cpu().numpy(), spec, (b, h))


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
    source = b if key.shape[0] > 1 else 0
    head = h * key.shape[1] // query.shape[1]
    parts = (query[b, h, rows], key[source, head], value[source, head])
    q, k, v = (part.double()[None, None] for part in parts)
    shift = key.shape[2] - query.shape[2]
    slopes = tensors["slopes"].double() if spec.alibi else None
    score = score_of(spec.softcap, shift, slopes, tensors.get("bias"), score_mod)
    mask = mask_of(spec.causal, spec.window, shift, mask_mod)
    sink = tensors["sink"][h : h + 1] if spec.sink else None
    keys = torch.arange(key.shape[2], device=query.device)
    places = (*(torch.tensor([n], device=query.device) for n in (b, h)), rows, keys)
    out, _ = dense(q, k, v, score, mask, spec.softmax_scale, sink, places)
    return torch.nan_to_num(out[0, 0])  # scores of NaN, which kernels hide
