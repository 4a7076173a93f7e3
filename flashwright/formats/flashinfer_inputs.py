"""Inputs of a FlashInfer-Bench Definition as a kernel takes them.

Plain functions of PyTorch tensors. Exports contain a copy of this file. It imports nothing of
Flashwright.
"""

from __future__ import annotations

from typing import Any

import torch

PAGES = 64
"""The width of a table is a multiple of it."""
KEYS = 64
"""Of one step, roughly; a split has at least one."""
MOST_SPLITS = 128


def arranged(given: dict[str, Any]) -> tuple[dict[str, Any], int, int]:
    """The kernel's inputs by name, and the queries and keys of the longest sequence. The host waits
    for the GPU, as the lengths are there."""
    if "q_nope" in given:
        given = {
            **given,
            "q": torch.cat([given["q_nope"], given["q_pe"]], -1),
            "k_cache": torch.cat([given["ckv_cache"], given["kpe_cache"]], -1)[:, :, None],
        }
    q = given["q"]
    if "qo_indptr" in given:
        found = {"q": q.transpose(0, 1), "startsq": given["qo_indptr"]}
        rows = int(given["qo_indptr"].diff().max()) if len(given["qo_indptr"]) > 1 else 0
    else:
        found, rows = {"q": q[:, :, None]}, 1
    if "kv_indices" not in given:
        starts = given["kv_indptr"]
        found |= {name: given[name].transpose(0, 1) for name in ("k", "v")}
        found["startsk"] = starts
        return found, rows, int(starts.diff().max()) if len(starts) > 1 else 0
    for name in ("k", "v"):
        if f"{name}_cache" in given:
            found[name] = given[f"{name}_cache"].transpose(1, 2)
    found["table"], found["lengthsk"] = _pages(given, given["k_cache"].shape[1])
    lengths = found["lengthsk"]
    return found, rows, int(lengths.max()) if len(lengths) else 0


def _pages(given: dict[str, Any], size: int) -> tuple[Any, Any]:
    """A row of pages for each sequence, and how many keys it has."""
    starts, indices = given["kv_indptr"], given["kv_indices"]
    counts = starts.diff()
    most = int(counts.max()) if len(counts) else 0
    width = max(-(-most // PAGES), 1) * PAGES
    places = starts[:-1, None] + torch.arange(width, device=starts.device)
    indices = indices if len(indices) else indices.new_zeros(1)
    named = indices[places.clamp(max=len(indices) - 1).long()]
    table = torch.where(places < starts[1:, None], named, 0).to(torch.int32)
    last = given.get("kv_last_page_len")
    lengths = counts * size if last is None else (counts - 1) * size + last
    return table, torch.where(counts > 0, lengths, 0).to(torch.int32)


def splits_for(blocks: int, keys: int, sms: int) -> int:
    """Over how many thread blocks the keys of a sequence are split, if there are `blocks` of them
    without that: so many that the GPU is filled once."""
    return max(1, min(sms // max(blocks, 1), -(-keys // KEYS), MOST_SPLITS))
