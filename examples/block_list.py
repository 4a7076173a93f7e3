"""The reference and the inputs for block_list.tl: lists of up to three blocks of keys."""

import numpy as np

BLOCK = 64


def make_inputs(rng, dims):
    queries, keys = (-(-dims[name] // BLOCK) for name in ("q_len", "kv_len"))
    listed = np.arange(dims["heads"])[:, None] + np.arange(queries) + 1
    counts = np.minimum(keys, listed % 4)
    lists = [rng.permutation(keys)[:count] for count in counts.flat]
    ends = np.cumsum([0, *counts.flat]).astype(np.int32)
    begin = [ends[n * queries : (n + 1) * queries + 1] for n in range(dims["heads"])]
    blocks = np.concatenate([*lists, np.zeros(1, int)])  # the last one is in no list
    return {"Begin": np.array(begin), "Blocks": blocks.astype(np.int32)}


def reference(inputs, dims):
    q, k, v = inputs["Q"], inputs["K"], inputs["V"]
    begin, blocks = inputs["Begin"], inputs["Blocks"]
    out = np.zeros(q.shape)
    for head in range(begin.shape[0]):
        for n in range(begin.shape[1] - 1):
            rows = slice(n * BLOCK, (n + 1) * BLOCK)
            listed = blocks[begin[head, n] : begin[head, n + 1]]
            keys = (listed[:, None] * BLOCK + np.arange(BLOCK)).ravel()
            keys = keys[keys < k.shape[2]]
            if keys.size == 0:
                continue
            scores = q[:, head, rows] @ k[:, head, keys].swapaxes(-1, -2) / np.sqrt(q.shape[-1])
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            out[:, head, rows] = weights / weights.sum(axis=-1, keepdims=True) @ v[:, head, keys]
    return {"O": out}
