"""The reference and the inputs for packed.tl: sequences of several lengths behind each other."""

import numpy as np


def make_inputs(rng, dims):
    made = {}
    for name, longest in (("Q", dims["q_len"]), ("K", dims["kv_len"])):
        # How many tokens there are depends on the dims alone, how they are shared out does not.
        made[f"Starts{name}"] = starts(
            rng, dims["batch"], (dims["batch"] + 1) * longest // 2, longest
        )
    heads, kv_heads, width = dims["heads"], dims["kv_heads"], 64
    q_tokens, kv_tokens = (int(made[name][-1]) for name in ("StartsQ", "StartsK"))
    made["Q"] = rng.standard_normal((heads, q_tokens, width))
    made["K"] = rng.standard_normal((kv_heads, kv_tokens, width))
    made["V"] = rng.standard_normal((kv_heads, kv_tokens, width))
    return made


def starts(rng, count, tokens, longest):
    """Where `count` sequences begin, none longer than the longest, and where the last one ends."""
    found = [0]
    for left in reversed(range(count)):
        rest = tokens - found[-1]
        found.append(
            found[-1] + rng.integers(max(0, rest - left * longest), min(longest, rest) + 1)
        )
    return np.array(found, dtype=np.int32)


def reference(inputs, dims):
    q, k, v = (inputs[name] for name in ("Q", "K", "V"))
    group = q.shape[0] // k.shape[0]
    k, v = k.repeat(group, axis=0), v.repeat(group, axis=0)
    outputs = np.zeros((*q.shape[:2], v.shape[2]))
    lse = np.zeros(q.shape[:2])
    for b in range(dims["batch"]):
        rows = slice(*inputs["StartsQ"][b : b + 2])
        keys = slice(*inputs["StartsK"][b : b + 2])
        scores = q[:, rows] @ k[:, keys].swapaxes(-1, -2) / np.sqrt(q.shape[-1])
        n, m = scores.shape[1:]
        scores = np.where(np.arange(m) <= np.arange(n)[:, None] + m - n, scores, -np.inf)
        most = scores.max(axis=-1, keepdims=True, initial=-1e30)
        weights = np.exp(scores - most)
        total = weights.sum(axis=-1, keepdims=True)
        outputs[:, rows] = weights / np.where(total == 0, 1, total) @ v[:, keys]
        with np.errstate(divide="ignore"):
            lse[:, rows] = (most + np.log(total))[..., 0]
    return {"O": outputs, "LSE": lse}
