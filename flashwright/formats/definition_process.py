"""A Definition's reference in a confined process, compared with attention on small workloads.

    python -m flashwright.formats.definition_process FILE.json OPTIONS

The reference is anybody's code. The process returns JSON only.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import torch

from flashwright.author.builtin.variants import make_spec
from flashwright.formats.confined import answering
from flashwright.formats.flashinfer_inputs import arranged
from flashwright.serving import reference

LENGTHS = ((5, 70), (1, 130), (3, 3), (0, 9))
"""Queries and keys of the sequences that are tried."""
TOLERANCE = 0.01
"""Of the RMS: a reference rounds its output to 16 bits."""


def told(file: str, options_text: str) -> dict[str, Any]:
    """Whether it is causal, and how far it is off; or what is wrong."""
    definition, options = json.loads(Path(file).read_text()), json.loads(options_text)
    space: dict[str, Any] = {}
    exec(compile(definition["reference"], "reference", "exec"), space)
    given = workload(definition, options)
    wanted = dict(zip(definition["outputs"], space["run"](**given), strict=True))
    errors = {}
    for causal in (False, True):
        spec = make_spec(**{**options, "causal": causal})
        errors[causal] = _error(spec, given, wanted)
        if errors[causal] <= TOLERANCE:
            return {"causal": causal and options.get("decode") is None, "rms": errors[causal]}
    text = "it is neither attention nor causal attention of its inputs, with lse of base 2"
    return {"wrong": f"{text}: off by {min(errors.values()):.2g} of the RMS"}


def _error(spec: Any, given: dict[str, Any], wanted: dict[str, Any]) -> float:
    """How far attention is off the reference's outputs, of their RMS; infinite for another lse."""
    found, _, _ = arranged(given)
    if "v" not in found:
        found["v"] = found["k"][..., : spec.value_dim]
    for name in ("q", "k", "v"):  # heads and rows change places
        found[name] = found[name].transpose(-3, -2)
    o, lse = reference.attention(spec, found)
    if "startsq" not in found:
        o, lse = o[:, 0], lse[..., 0]
    else:
        lse = lse.transpose(0, 1)
    base2 = wanted["lse"].double()
    difference = (lse.double() / math.log(2) - base2)[base2.isfinite()]
    if not torch.equal(base2.isfinite(), lse.isfinite()) or difference.abs().max() > 0.01:
        return math.inf
    output = wanted["output"].double()
    return float((o.double() - output).norm() / output.norm())


def workload(definition: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Small inputs of a Definition; pages lie in any order."""
    torch.manual_seed(0)
    ragged, decode = "kv_indices" not in definition["inputs"], options.get("decode") is not None
    page = options.get("page", 1)
    queries = [1 if decode else q for q, _ in LENGTHS]
    keys = torch.tensor([k for _, k in LENGTHS])
    pages = -(-keys // page)
    tokens = sum(queries)
    sizes = {n: a.get("value") for n, a in definition["axes"].items()}
    sizes |= {"total_q": tokens, "batch_size": len(LENGTHS), "num_pages": int(pages.sum()) + 3}
    sizes |= {"total_kv": int(keys.sum()), "len_indptr": len(LENGTHS) + 1}
    made: dict[str, Any] = {
        "qo_indptr": _starts(torch.tensor(queries)),
        "kv_indptr": _starts(keys if ragged else pages),
        "kv_indices": torch.randperm(sizes["num_pages"])[: int(pages.sum())].int(),
        "kv_last_page_len": (keys - (pages - 1) * page).int(),
        "sm_scale": make_spec(**options).softmax_scale,
    }
    for name, one in definition["inputs"].items():
        if name not in made:
            shape = [sizes[axis] for axis in one["shape"]]
            made[name] = torch.randn(shape).to(getattr(torch, one["dtype"]))
    return {name: made[name] for name in definition["inputs"]}


def _starts(counts: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()


if __name__ == "__main__":
    answering(lambda: told(*sys.argv[1:]))
