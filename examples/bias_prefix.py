"""The reference for bias_prefix.tl, in fp64."""

import numpy as np


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
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1]) + inputs["Bias"]
    visible = causal(dims) | (np.arange(dims["kv_len"]) < 40)
    return {"O": softmax(scores, visible) @ v}
