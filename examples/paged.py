"""The reference and the inputs for paged.tl: each sequence's blocks lie in pages of a pool."""

import numpy as np

PAGE = 64


def make_inputs(rng, dims):
    pages = [rng.permutation(dims["pages"])[: dims["n_blocks"]] for _ in range(dims["batch"])]
    return {"Table": np.array(pages, dtype=np.int32)}


def reference(inputs, dims):
    q, table = inputs["Q"], inputs["Table"]
    outputs = []
    for b in range(dims["batch"]):
        # (blocks, heads, page, dim) -> (heads, tokens, dim), cut to the sequence's length
        k, v = (
            np.concatenate(list(inputs[name][table[b]]), axis=1)[:, : dims["kv_len"]]
            for name in ("K", "V")
        )
        group = q.shape[1] // k.shape[0]
        k, v = k.repeat(group, axis=0), v.repeat(group, axis=0)
        scores = q[b] @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        outputs.append(weights / weights.sum(axis=-1, keepdims=True) @ v)
    return {"O": np.stack(outputs)}
