"""The reference and the inputs for documents.tl: documents of random lengths, one after another."""

import numpy as np


def make_inputs(rng, dims):
    longest = max(dims["q_len"], dims["kv_len"])
    first = np.where(rng.random((dims["batch"], longest)) < 0.05, np.arange(longest), 0)
    start = np.maximum.accumulate(first, axis=1)[:, -dims["q_len"] :]
    # The last query and the last key are the same token; keys are counted from 0.
    start = start - (longest - dims["kv_len"])
    return {"Start": np.maximum(start, 0).astype(np.int32)}


def softmax(scores, visible):
    scores = np.where(visible, scores, -np.inf)
    top = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isfinite(top), top, 0))
    total = weights.sum(axis=-1, keepdims=True)
    return weights / np.where(total > 0, total, 1)


def causal(dims):
    position = np.arange(dims["q_len"])[:, None] + dims["kv_len"] - dims["q_len"]
    return np.arange(dims["kv_len"]) <= position


def reference(inputs, dims):
    q, k, v = inputs["Q"], inputs["K"], inputs["V"]
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat(group, axis=1), v.repeat(group, axis=1)
    same = np.arange(dims["kv_len"]) >= inputs["Start"][:, None, :, None]
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    return {"O": softmax(scores, same & causal(dims)) @ v}
