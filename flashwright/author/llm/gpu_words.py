"""A GPU told to a model: what it has, in numbers, and what tiles cost on it for this operator."""

from __future__ import annotations

from flashwright.gpu import Gpu
from flashwright.spec import AttentionSpec

KB = 1024
_BYTES = {"fp16": 2, "bf16": 2, "e4m3": 1}


def facts(gpu: Gpu, spec: AttentionSpec) -> str:
    """What the GPU has, one line each."""
    lines = [
        f"{gpu.title} ({gpu.generation}, {gpu.arch}): {gpu.sms} SMs.",
        f"Shared memory: {gpu.shared_per_block // KB} KB for one thread block at most, "
        f"{gpu.shared_per_sm // KB} KB for all blocks on an SM.",
        f"Registers: {gpu.registers_per_sm} on an SM; a thread may have "
        + ", ".join(f"{gpu.register_limit(warps)} with Warps = {warps}" for warps in _warps(gpu))
        + ".",
        f"Matrix products of {spec.input_dtype}: {_products(gpu, spec)}.",
        f"Copies from global to shared memory: {_copies(gpu)}.",
        f"Speeds: {gpu.tensor_flops[spec.input_dtype] / 1e12:.0f} TFLOPS of products, "
        f"{gpu.exp_per_clock_per_sm} exponentials a clock and SM, "
        f"{gpu.bandwidth / 1e12:.2f} TB/s of memory, {gpu.l2_bytes >> 20} MB of L2."
        if gpu.takes(spec.input_dtype)
        else f"It does not multiply {spec.input_dtype}.",
    ]
    return "\n".join(f"- {line}" for line in lines)


def costs(gpu: Gpu, spec: AttentionSpec) -> str:
    """What a tiling takes of the GPU, as formulas with this operator's widths in them."""
    size, dv = _BYTES[spec.input_dtype], spec.value_dim
    operand = "" if gpu.reshape_in_place else f" + {size} * BM * BN"
    rounded = "" if gpu.reshape_in_place else ", S rounded for the second GEMM"
    lines = [
        f"shared bytes = {_shared(spec)}, at most {gpu.shared_per_block}",
        f"registers of a thread = (4 * BM * BN + 4 * BM * {dv}{operand} + 3 * 16 * BM) "
        f"/ (128 * Warps) + {gpu.register_overhead}, at most the limit above",
        f"    (S, O{rounded} and three vectors. A further tile adds bytes * rows * columns / "
        "(128 * Warps), a further vector 4 * bytes * length / (128 * Warps), if it is alive where "
        "these are: from the statement that writes it to the last one that reads it, or throughout "
        "a loop that carries it. Tiles that are not alive together do not add up.)",
        "blocks on an SM at once = what shared memory, and "
        f"{gpu.registers_per_sm} / (32 * Warps * registers of a thread), leave room for",
    ]
    return "\n".join(lines)


def _shared(spec: AttentionSpec) -> str:
    """The bytes of the tiles of Q, K and V."""
    size, d = _BYTES[spec.input_dtype], spec.head_dim
    columns = d if spec.latent else d + spec.value_dim
    if spec.key_dtype == spec.input_dtype:
        return f"{size} * (BM * {d} + Stages * BN * {columns})"
    inputs = f"{_BYTES[spec.key_dtype]} * Stages * BN * {columns}"
    return f"{size} * BM * {d} + {inputs} + {size} * BN * {columns} (converted)"


def advice(gpu: Gpu, spec: AttentionSpec) -> str:
    """How sizes are chosen on such a GPU, one line each."""
    depth = 32 if spec.input_dtype == "e4m3" else 16
    lines = [
        f"BN is a multiple of {depth}. BM is " + _rows(gpu),
        "Every K and V tile is read once for each tile of queries: a larger BM reads less. A "
        "larger BN has fewer steps, barriers and rescalings, and takes registers for S.",
        _schedule(gpu),
    ]
    if spec.decode is not None:
        least = "64, with Warps = 4" if gpu.wgmma else "16, with Warps = 1"
        lines.append(
            f"With the heads of a group as rows of one tile there are {spec.decode * spec.group} "
            f"at most: take the smallest BM that has them. The least is {least}."
        )
    return "\n".join(f"- {line}" for line in lines)


def _rows(gpu: Gpu) -> str:
    if gpu.wgmma:
        return (
            "16 * Warps exactly, Warps a multiple of 4: four warps (a warpgroup) multiply 64 rows "
            "with wgmma, and two or three warpgroups (BM 128 or 192) keep the SM busy."
        )
    return (
        "a multiple of 16 * Warps: 16 rows for each warp at a time. 32 rows for each warp halve "
        "what is read from shared memory for each product, if the registers allow it."
    )


def _schedule(gpu: Gpu) -> str:
    if gpu.tma:
        return (
            "One thread beside the warps loads tiles ahead (TMA), as far as `with stages N` "
            "allows: 2 for K and V is the usual. One block on an SM takes nearly all of its shared "
            "memory. The products of one warpgroup hide the softmax of another."
        )
    if gpu.cp_async:
        return (
            "The softmax of one block hides under the products of another: leave room for two "
            "blocks on an SM rather than one large one. `with stages 2` for K and V loads the next "
            "block meanwhile; with one stage, a Copy of the next K placed right after the first "
            "GEMM does nearly as well and takes half of the shared memory."
        )
    return (
        "There is no asynchronous copy: tiles travel through registers, so leave some free. "
        "Small tiles, several blocks on an SM."
    )


def _products(gpu: Gpu, spec: AttentionSpec) -> str:
    if not gpu.takes(spec.input_dtype):
        return "none"
    shapes = gpu.mma[spec.input_dtype]
    m, n, k = max((s for s in shapes if s[0] == 16), key=lambda s: s[2])
    told = f"mma.sync, {m} x {n} x {k} for each warp"
    deep = [s for s in shapes if s[0] == 64]
    if deep:
        told += f"; wgmma, 64 x N x {deep[0][2]} for four warps, N up to {max(s[1] for s in deep)}"
    return told + ", summed in fp32"


def _copies(gpu: Gpu) -> str:
    if gpu.tma:
        return "TMA (whole tiles, asked for by one thread), cp.async (16 bytes a thread)"
    return "cp.async, 16 bytes a thread" if gpu.cp_async else "through registers only"


def _warps(gpu: Gpu) -> tuple[int, ...]:
    return (4, 8, 12) if gpu.wgmma else (4, 8)
