"""Attention of sequences that lie packed or in a cache, by PyTorch: a sequence at a time.

The tensors of a call have these names. `q`: (tokens, heads, dim) with `startsq`, else (batch,
tokens, heads, dim). `k` and `v`: (tokens, heads, dim) with `startsk`, and `lengthsk` if they end
before the next sequence begins; or (pages, positions, heads, dim) with `table` and `lengthsk`.
`kdescale` and `vdescale`: (batch, heads), by which keys and values of 8 bits are multiplied.
`tree`: bool (batch, tokens, tokens), which of the newest keys each query sees. `since`: (tokens of
k), the first query of its sequence that sees a key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from flashwright.flex.task import LIMIT, ROWS, WrongKernel, compare_rows
from flashwright.generate.store import tell
from flashwright.pytorch import reference
from flashwright.serving.arguments import check_range
from flashwright.serving.tree import seen
from flashwright.spec import AttentionSpec

Tensors = Mapping[str, Any]
_CHECKED = 4  # sequences of a first output
_MOST_SCORES = 1 << 20  # of the sequence whose first gradients are checked


def attention(spec: AttentionSpec, given: Tensors) -> tuple[Any, Any]:
    """O, with the axes of `q`, and LSE; every step is differentiable."""
    q, count = given["q"], _count(given)
    if not count:
        shape = (0, q.shape[1], q.shape[2])
        return q.new_zeros((*shape, given["v"].shape[-1])), q.new_zeros(shape).float().mT
    found = [_sequence(spec, given, b, torch.float32) for b in range(count)]
    rows, logs = (tuple(parts) for parts in zip(*found, strict=True))
    if "startsq" in given:
        out, lse = torch.cat([o.transpose(0, 1) for o in rows]), torch.cat(logs, dim=1)
        starts = given["startsq"].tolist()
        outside = starts[0], q.shape[0] - starts[-1]  # rows of no sequence
        out = torch.nn.functional.pad(out, (0, 0, 0, 0, *outside))
        lse = torch.nn.functional.pad(lse, outside, value=-torch.inf)
    else:
        out, lse = torch.stack(rows).transpose(1, 2), torch.stack(logs)
    return out.to(torch.bfloat16 if q.itemsize == 1 else q.dtype), lse


def check_numbers(
    given: Tensors, names: Mapping[str, str], longest: tuple[int, int] | None = None
) -> None:
    """Raise ValueError, with the argument, for lengths, places and pages that the tensors do not
    have. `longest` are the most queries and keys that a sequence may have."""
    if "table" in given:
        keys, table, size = given["lengthsk"], given["table"], given["k"].shape[1]
        check_range(names["lengthsk"], keys, table.shape[1] * size, "the pages have room for")
        held = torch.arange(table.shape[1]) * size < keys[:, None]
        check_range(names["table"], table[held], given["k"].shape[0] - 1, "the last page is")
    elif "lengthsk" in given:
        keys, room = given["lengthsk"], given["k"].shape[0]
        starts = given["startsk"][: len(keys)]
        check_range(names["lengthsk"], keys, room, "the cache has room for")
        check_range(names["startsk"], starts, room, "the cache has room for")
        name = f"{names['lengthsk']} behind {names['startsk']}"
        check_range(name, starts + keys, room, "the cache ends at")
    else:
        keys = _counts(names["startsk"], given["startsk"], given["k"].shape[0])
    if "startsq" in given:
        queries = _counts(names["startsq"], given["startsq"], given["q"].shape[0])
        for number, name, most in zip((queries, keys), ("q", "k"), longest or (), strict=False):
            check_range("the longest sequence", number, most, f"max_seqlen_{name} is")


def _counts(name: str, starts: Any, tokens: int) -> Any:
    """How many tokens each sequence has."""
    if int(starts[0]) < 0 or int(starts.diff().min()) < 0 or int(starts[-1]) > tokens:
        text = f"{name} must rise from 0 to {tokens}, the tokens that there are, at most"
        raise ValueError(f"{text}; it is {starts.tolist()}")
    return starts.diff()


def check(spec: AttentionSpec, given: Tensors, results: Tensors) -> None:
    """Raise WrongKernel if rows of a first output are not what PyTorch gives in fp64."""
    filled = [b for b in range(_count(given)) if _queries(given, b).shape[0]]
    with torch.no_grad():
        for b in filled[:_CHECKED]:
            wanted, _ = _sequence(spec, given, b, torch.float64)
            found = _queries({**given, "q": results["o"].transpose(-3, -2)}, b).transpose(0, 1)
            rows = torch.linspace(0, found.shape[1] - 1, min(ROWS, found.shape[1])).long()
            for head in {0, found.shape[0] - 1}:
                at = head, rows.to(found.device)
                ours, right = (x[at].double().cpu().numpy() for x in (found, wanted))
                compare_rows(ours, right, spec, (b, head))


def check_gradients(
    spec: AttentionSpec, given: Tensors, results: Tensors, names: Sequence[str], grad: Any
) -> None:
    """Raise WrongKernel if the first gradients are not PyTorch's in fp64: those of a short packed
    sequence, and of what all sequences share if they are short together."""
    places = {name: given[f"starts{name[-1]}"].tolist() for name in ("q", "k")}
    places["v"] = places["k"]
    lengths = [torch.tensor(places[name]).diff() for name in "qk"]
    scores = (lengths[0] * lengths[1]).tolist()
    whole = sum(scores) <= _MOST_SCORES
    short = [b for b, count in enumerate(scores) if 0 < count <= _MOST_SCORES]
    if not whole:
        found = f"no sequence has at most {_MOST_SCORES} scores"
        found = f"the sequences have more than {_MOST_SCORES} scores" if short else found
        unseen = [f"d{name}" for name in names if name not in places or not short]
        if unseen:
            tell(f"the first {' and '.join(unseen)} are not checked: {found}")
    totals = {name: torch.zeros_like(given[name]).double() for name in names if name not in places}
    for b in short if whole and totals else short[:1]:
        own = {n: given[n].detach().double().requires_grad_() for n in names}
        with torch.enable_grad():
            out, _ = _sequence(spec, {**given, **own}, b, torch.float64)
            rows = slice(*places["q"][b : b + 2])
            asked = grad[rows].transpose(0, 1).double()
            wanted = dict(
                zip(names, torch.autograd.grad(out, tuple(own.values()), asked), strict=True)
            )
        for name, right in wanted.items():
            if name in totals:
                totals[name] += right
            elif b == short[0]:
                at = slice(*places[name][b : b + 2])
                found = results[f"d{name}"].transpose(0, 1)[at]
                check_gradient(spec, f"d{name} of sequence {b}", found, right[at])
    for name, right in totals.items() if whole else ():
        check_gradient(spec, f"d{name}", results[f"d{name}"], right)


def check_gradient(spec: AttentionSpec, name: str, found: Any, right: Any) -> None:
    """Raise WrongKernel if a first gradient is not the right one."""
    error = float((found.double() - right).norm() / right.norm().clamp(min=1e-6))
    if not error <= LIMIT[spec.dtype]:
        text = f"a new backward is wrong: {name} is {error:.2g} of its norm"
        raise WrongKernel(f"{text} from PyTorch's. Please report the shapes")


def _count(given: Tensors) -> int:
    """The sequences of the batch."""
    return int(given["startsq"].shape[0] - 1 if "startsq" in given else given["q"].shape[0])


def _sequence(spec: AttentionSpec, given: Tensors, b: int, kind: Any) -> tuple[Any, Any]:
    """O (heads, tokens, dim) and LSE (heads, tokens) of one sequence."""
    parts = [_queries(given, b).to(kind), *(_scaled_keys(given, name, b, kind) for name in "kv")]
    extras = {name: given[name] for name in ("slopes", "sink") if name in given}
    turned = (x.transpose(0, 1)[None] for x in parts)
    if "tree" in given:
        extras["mask"] = seen(given["tree"][b], parts[1].shape[0])
    if "since" in given:
        rows = torch.arange(parts[0].shape[0], device=parts[0].device)
        extras["mask"] = _keys(given, "since", b) <= rows[:, None]
    out, lse = reference.attention(spec, *turned, **extras)
    return out[0], lse[0]


def _queries(given: Tensors, b: int) -> Any:
    """(tokens, heads, dim)."""
    if "startsq" not in given:
        return given["q"][b]
    first, last = given["startsq"][b : b + 2].tolist()
    return given["q"][first:last]


def _scaled_keys(given: Tensors, name: str, b: int, kind: Any) -> Any:
    """(tokens, heads, dim)."""
    keys = _keys(given, name, b).to(kind)
    scales = given.get(f"{name}descale")
    return keys if scales is None else keys * scales[b, :, None].to(kind)


def _keys(given: Tensors, name: str, b: int) -> Any:
    """(tokens, heads, dim), as they are in memory."""
    cache = given[name]
    if "table" in given:
        length, size = int(given["lengthsk"][b]), cache.shape[1]
        pages = given["table"][b, : -(-length // size)].long()
        plain = cache.view(torch.uint8) if cache.element_size() == 1 else cache  # no index else
        return plain[pages].view(cache.dtype).flatten(0, 1)[:length]
    first = int(given["startsk"][b])
    last = first + int(given["lengthsk"][b]) if "lengthsk" in given else given["startsk"][b + 1]
    return cache[first : int(last)]


COMPUTING = (attention, _count, _sequence, _queries, _scaled_keys, _keys)
"""The functions that a reference apart from Flashwright needs, with those of pytorch/reference.py
(export/flashinfer.py copies them)."""
