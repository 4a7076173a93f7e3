"""The reference and the inputs for decode.tl: one query a sequence, keys in pages of a cache."""

import numpy as np

PAGE, WIDTH, GROUP = 16, 64, 2


def make_inputs(rng, dims):
    batch, kv_heads, longest = dims["batch"], dims["kv_heads"], dims["kv_len"]
    lengths = rng.integers(0, longest + 1, batch)
    lengths[0] = longest
    table, cache = paged(rng, lengths, longest, kv_heads)
    queries = rng.standard_normal((batch, kv_heads, GROUP, WIDTH))
    return {"Q": queries, **cache, "Table": table, "Lengths": lengths.astype(np.int32)}


def paged(rng, lengths, longest, kv_heads):
    """Pages in any order. Entries of the table past the end of a sequence name no page; pages that
    no sequence has are full of NaN, and so are the last ones past the end."""
    counts = -(-lengths // PAGE)
    most = len(lengths) * -(-longest // PAGE) + 1
    pages = rng.permutation(most)
    table = np.full((len(lengths), -(-longest // PAGE) + 1), 2**31 - 1, dtype=np.int32)
    cache = {name: np.full((most, kv_heads, PAGE, WIDTH), np.nan) for name in ("K", "V")}
    taken = 0
    for row, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        table[row, :count] = pages[taken : taken + count]
        for page in range(count):
            rows = min(length - page * PAGE, PAGE)
            for held in cache.values():
                held[table[row, page], :, :rows] = rng.standard_normal((kv_heads, rows, WIDTH))
        taken += count
    return table, cache


def reference(inputs, dims):
    outputs, logs = np.zeros(inputs["Q"].shape), np.zeros(inputs["Q"].shape[:3])
    for b, length in enumerate(inputs["Lengths"]):
        pages = inputs["Table"][b, : -(-length // PAGE)]
        k, v = (
            inputs[name][pages].swapaxes(0, 1).reshape(dims["kv_heads"], -1, WIDTH)[:, :length]
            for name in ("K", "V")
        )
        scores = inputs["Q"][b] @ k.swapaxes(-1, -2) / np.sqrt(WIDTH)
        most = scores.max(axis=-1, keepdims=True, initial=-1e30)
        weights = np.exp(scores - most)
        total = weights.sum(axis=-1, keepdims=True)
        outputs[b] = weights / np.where(total == 0, 1, total) @ v
        with np.errstate(divide="ignore"):
            logs[b] = (most + np.log(total))[..., 0]
    return {"O": outputs, "LSE": logs}
