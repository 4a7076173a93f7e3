"""The reference and the inputs for forgetting.tl: gates between 0 and 1 (fp64)."""

import numpy as np


def make_inputs(rng, dims):
    gates = rng.uniform(0.8, 1, (dims["batch"], dims["heads"], dims["kv_len"]))
    return {"Gates": np.cumsum(np.log(gates), axis=-1).astype(np.float32)}


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
    gates = inputs["Gates"]
    position = np.arange(dims["q_len"]) + dims["kv_len"] - dims["q_len"]
    decay = gates[:, :, np.maximum(position, 0), None] - gates[:, :, None, :]
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1]) + decay
    return {"O": softmax(scores, causal(dims)) @ v}
