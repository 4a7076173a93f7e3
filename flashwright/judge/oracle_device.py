"""The fp64 oracle for large problems, on the device that the inputs are on.

It computes what oracle.py computes (a test compares them), with PyTorch for PyTorch tensors: length
4097 with many heads then takes milliseconds. It uses only functions that both libraries have under
one name.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from flashwright.judge.oracle import NOISE, SMALLEST_WEIGHT
from flashwright.spec import AttentionSpec

_ROWS = 2048  # rows of scores held at a time: 256 MB each at 16k keys


def attention(
    lib: ModuleType,
    spec: AttentionSpec,
    inputs: Mapping[str, Any],
    dims: Mapping[str, int],
    noise: bool = False,
) -> dict[str, Any]:
    """O (batch, heads, q_len, v_dim) and LSE (batch, heads, q_len) in fp64.

    `lib` is torch or numpy, the library of the inputs. `noise` is as in oracle.py.
    """
    q, k, v = inputs["Q"], inputs["K"], spec.values(inputs)
    (batch, heads, q_len, _), (kv_heads, kv_len) = q.shape, k.shape[1:3]
    out = zeros(lib, q, batch, heads, q_len, v.shape[3])
    lse = zeros(lib, q, batch, heads, q_len)
    found, least = {"O": out, "LSE": lse}, SMALLEST_WEIGHT[spec.dtype]
    if noise:
        found[NOISE] = zeros(lib, q, batch, heads, q_len, v.shape[3])
    if not kv_len:
        alone = fp64(lib, inputs["Sink"])[None, :, None] if spec.sink else float("-inf")
        return {**found, "LSE": lse + alone}
    for b, h in itertools.product(range(batch), range(heads)):
        g = h * kv_heads // heads
        keys, values = (fp64(lib, x[b, g]) for x in (k, v))
        if spec.scales:
            of_keys, of_values = (spec.scales[name] for name in ("K", "K" if spec.latent else "V"))
            keys = keys * fp64(lib, inputs[of_keys][b, g])
            values = values * fp64(lib, inputs[of_values][b, g])
        for start in range(0, q_len, _ROWS):
            rows = slice(start, min(start + _ROWS, q_len))
            p = positions(lib, spec, inputs, dims, rows)
            s = scores(lib, spec, fp64(lib, q[b, h, rows]), keys, p, inputs, h)
            s = lib.where(seen(lib, spec, inputs, p, (b, g, rows)), s, float("-inf"))
            sink = fp64(lib, inputs["Sink"][h]) if spec.sink else None
            weight, total, lse[b, h, rows] = _softmax(lib, s, sink)
            out[b, h, rows] = (weight / total) @ values
            if noise:
                full = lib.where((weight > 0) & (weight < least), least, weight) / total
                found[NOISE][b, h, rows] = ((full**2) @ (values**2)) ** 0.5
    return found


def positions(
    lib: Any, spec: AttentionSpec, inputs: Mapping[str, Any], dims: Mapping[str, int], rows: slice
) -> Any:
    """The positions of some query rows, as a column."""
    q_len, kv_len = inputs["Q"].shape[2], inputs["K"].shape[2]
    end = dims.get("tokens", q_len) if spec.branch == "compressed" else kv_len
    return count(lib, inputs["Q"], rows.start, rows.stop)[:, None] + (end - q_len)


def seen(
    lib: Any,
    spec: AttentionSpec,
    inputs: Mapping[str, Any],
    p: Any,
    at: tuple[int, int, slice],
) -> Any:
    """Which keys some rows see, for their positions `p` and `at`: batch, kv head and rows."""
    kv_len = inputs["K"].shape[2]
    found = _visible(spec, p, count(lib, inputs["K"], 0, kv_len)[None, :])
    if spec.branch == "selected":
        found = found & _chosen(lib, spec, inputs["Idx"][at], kv_len)
    return found


def scores(
    lib: Any, spec: AttentionSpec, q: Any, k: Any, p: Any, inputs: Mapping[str, Any], h: int
) -> Any:
    """The scores of some rows of a head, without the mask; `p` are the rows' positions."""
    s = (q @ k.swapaxes(-1, -2)) * spec.softmax_scale
    if spec.softcap is not None:
        s = spec.softcap * lib.tanh(s / spec.softcap)
    if spec.alibi:
        s = s + fp64(lib, inputs["Slopes"][h]) * (count(lib, k, 0, len(k))[None, :] - p)
    return s


def _visible(spec: AttentionSpec, p: Any, key: Any) -> Any:
    seen = (p == p) & (key == key)
    if spec.branch == "compressed":
        return (key * spec.stride + spec.block - 1 <= p) if spec.causal else seen
    if spec.causal:
        seen = seen & (key <= p)
    if spec.window is not None:
        seen = seen & ((abs(p - key) < spec.window) | (key < (spec.sink_tokens or 0)))
    return seen


def _chosen(lib: Any, spec: AttentionSpec, idx: Any, kv_len: int) -> Any:
    block = count(lib, idx, 0, kv_len)[None, :] // spec.selected_block
    found = idx[:, :1] == block
    for slot in range(1, idx.shape[1]):
        found = found | (idx[:, slot : slot + 1] == block)
    return found


def _softmax(lib: Any, s: Any, sink: Any) -> tuple[Any, Any, Any]:
    """The rows' weights, their sum and its logarithm; 0, 1 and -inf in a row without keys."""
    top = lib.amax(s, -1)
    if sink is not None:
        top = lib.where(top < sink, sink, top)
    top = lib.where(top == float("-inf"), 0.0, top)
    weight = lib.exp(s - top[:, None])
    total = weight.sum(-1)
    if sink is not None:
        total = total + lib.exp(sink - top)
    some = total > 0
    safe = lib.where(some, total, 1.0)
    return weight, safe[:, None], lib.where(some, top + lib.log(safe), float("-inf"))


def fp64(lib: Any, x: Any) -> Any:
    """A tensor in fp64."""
    # Through fp32, which holds every element type: not all of torch's casts go from fp8 to fp64.
    return x.to(lib.float32).to(lib.float64) if hasattr(x, "to") else x.astype(lib.float64)


def zeros(lib: Any, like: Any, *shape: int) -> Any:
    """Zeros in fp64 on the device of a tensor."""
    place = {"device": like.device} if hasattr(like, "to") else {}
    return lib.zeros(shape, dtype=lib.float64, **place)


def count(lib: Any, like: Any, start: int, stop: int) -> Any:
    """The whole numbers from `start` to before `stop`, on the device of a tensor."""
    place = {"device": like.device} if hasattr(like, "to") else {}
    return lib.arange(start, stop, **place)
