"""The reference and the inputs for append.tl."""

import numpy as np

PAGE, WIDTH = 16, 64


def make_inputs(rng, dims):
    batch, heads, new = dims["batch"], dims["kv_heads"], dims["q_len"]
    lengths = rng.integers(0, dims["kv_len"] + 1, batch)
    counts = -(-(lengths + new) // PAGE)
    pages = rng.permutation(counts.sum() + 2)  # two are of no sequence
    table = np.full((batch, counts.max() + 1), 2**31 - 1, dtype=np.int32)
    for row, (first, count) in enumerate(zip(np.cumsum(counts) - counts, counts, strict=True)):
        table[row, :count] = pages[first : first + count]
    rows = {name: rng.standard_normal((batch, heads, new, WIDTH)) for name in ("NewK", "NewV")}
    cache = {name: rng.standard_normal((len(pages), heads, PAGE, WIDTH)) for name in ("K", "V")}
    return {**rows, "Table": table, "Lengths": lengths.astype(np.int32), **cache}


def reference(inputs, dims):
    found = {name: inputs[name].copy() for name in ("K", "V")}
    for b, length in enumerate(inputs["Lengths"]):
        for n in range(dims["q_len"]):
            page, row = divmod(length + n, PAGE)
            for name, cache in found.items():
                cache[inputs["Table"][b, page], :, row] = inputs[f"New{name}"][b, :, n]
    return found
