"""The reference for differential.tl, in fp64."""

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
    (q1, q2), (k1, k2) = np.split(q, 2, axis=-1), np.split(k, 2, axis=-1)
    first = softmax(q1 @ k1.swapaxes(-1, -2) / 8, causal(dims))
    second = softmax(q2 @ k2.swapaxes(-1, -2) / 8, causal(dims))
    return {"O": first @ v - inputs["Lambda"][:, None, None] * (second @ v)}
