"""The reference for relative_bias.tl, in fp64."""

import numpy as np

REACH = 100


def softmax(scores):
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def reference(inputs, dims):
    q, k, v = inputs["Q"], inputs["K"], inputs["V"]
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat(group, axis=1), v.repeat(group, axis=1)
    position = np.arange(dims["q_len"])[:, None] + dims["kv_len"] - dims["q_len"]
    distance = np.clip(np.arange(dims["kv_len"]) - position, -REACH, REACH)
    bias = inputs["Table"][:, distance + REACH]
    return {"O": softmax(q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1]) + bias) @ v}
