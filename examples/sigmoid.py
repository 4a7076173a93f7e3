"""The reference for sigmoid.tl, in fp64."""

import numpy as np


def reference(inputs, dims):
    q, k, v = inputs["Q"], inputs["K"], inputs["V"]
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat(group, axis=1), v.repeat(group, axis=1)
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1]) - 4
    position = np.arange(dims["q_len"])[:, None] + dims["kv_len"] - dims["q_len"]
    weights = np.where(np.arange(dims["kv_len"]) <= position, 1 / (1 + np.exp(-scores)), 0)
    return {"O": weights @ v}
