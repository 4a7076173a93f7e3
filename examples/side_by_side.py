"""The reference for side_by_side.tl, in fp64."""

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
    scores = q @ k.swapaxes(-1, -2)
    scores = scores + inputs["Qrope"] @ inputs["Krope"][:, None].swapaxes(-1, -2)
    return {"O": softmax(scores / np.sqrt(192), causal(dims)) @ v}
