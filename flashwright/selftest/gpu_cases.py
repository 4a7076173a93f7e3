"""The cases that need a GPU: Triton kernels, libraries, our own packages, the benchmark's clock."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from flashwright.sandbox.limits import Limits
from flashwright.selftest.case import HONEST, SelftestCase
from flashwright.spec import AttentionSpec

SPEC = AttentionSpec.make(
    variant="gqa", heads=4, kv_heads=2, head_dim=64, dtype="fp16", causal=True, lse=False
)
FLAT = SPEC.model_copy(update={"scale": 5e-5})  # normal inputs have nearly equal weights
WIDE = SPEC.model_copy(update={"head_dim": 128})
BF16 = AttentionSpec.make(
    variant="gqa", heads=8, kv_heads=2, head_dim=128, dtype="bf16", causal=True, lse=False
)
VARIED = SPEC.model_copy(update={"repeatable": False})  # two runs may differ a little
FULL = AttentionSpec.make(variant="mha", heads=4, head_dim=64, dtype="fp16", lse=False)
SHORT = ((9, 9), (100, 260))
USUAL = ((256, 256), (100, 260))
LONG = ((256, 256), (2100, 2100))
LIMITED = Limits(gpu_memory=16 << 30)
TRITON = ("triton",)

Lengths = tuple[tuple[int, int], ...] | None

# Function, class, expected, spec, lengths (None: the whole trial).
OUTPUTS: tuple[tuple[str, str, str, AttentionSpec, Lengths], ...] = (
    ("zeros", "output", "zeros", SPEC, USUAL),
    ("noise", "output", "wrong", SPEC, USUAL),
    ("some_rows_nan", "output", "nonfinite", SPEC, USUAL),
    ("last_rows_unwritten", "output", "unwritten", SPEC, USUAL),
    ("wider_type", "output", "wrong_form", SPEC, SHORT),
    ("on_the_host", "output", "wrong_form", SPEC, SHORT),
    ("weights_in_e4m3", "precision", "low_precision", SPEC, None),
    ("sums_in_fp16", "precision", "low_precision", SPEC, None),
    ("inputs_in_e4m3", "precision", "low_precision", SPEC, None),
    ("quadratic_exp2", "precision", "approximation", BF16, None),
    ("small_weights_dropped", "precision", "approximation", BF16, None),
    ("other_bits", "output", "not_repeatable", SPEC, USUAL),
    ("mean_of_v", "inputs", "wrong", FLAT, None),
    ("no_maximum", "inputs", "special_inputs", WIDE, None),
    ("tail_of_keys_dropped", "shapes", "special_shapes", SPEC, None),
    ("equal_lengths_only", "shapes", "special_shapes", SPEC, None),
    ("no_mask", "mask", "mask_ignored", SPEC, None),
    ("one_key_too_many", "mask", "mask_ignored", SPEC, None),
    ("one_key_too_few", "mask", "key_ignored", SPEC, None),
    ("heads_mixed_up", "mask", "mask_ignored", SPEC, None),
    ("first_batch_only", "mask", "key_ignored", SPEC, None),
    ("replay_by_shape", "replay", "replay", SPEC, USUAL),
    ("replay_by_address", "replay", "replay", SPEC, USUAL),
    ("leftover", "replay", "replay", SPEC, USUAL),
)
SPECIAL: tuple[tuple[str, str, str, Lengths], ...] = (
    ("strides_ignored", "inputs", "special_inputs", None),
    ("offsets_of_32_bits", "inputs", "special_inputs", None),
    ("keys_beyond_4097", "shapes", "special_shapes key_ignored", None),
    ("wrong_from_the_fourth_batch", "shapes", "special_shapes", None),
    ("wrong_for_many_blocks", "shapes", "special_shapes", None),
    ("independent_keys_only", "inputs", "special_inputs", None),
    ("wrong_from_the_twentieth_call", "replay", "not_repeatable special_shapes wrong zeros", None),
    ("wrong_from_call_600", "replay", "not_repeatable", None),
    ("window_of_256", "mask", "special_shapes key_ignored", None),
    ("slightly_too_large", "precision", "low_precision wrong", None),
)
CONDUCT = (
    ("scales_q_in_place", "memory", "inputs_changed", Limits()),
    ("output_over_q", "memory", "inputs_changed", Limits()),
    ("writes_behind_v", "memory", "out_of_bounds", Limits()),
    ("reads_behind_v", "memory", "out_of_bounds", Limits()),
    ("on_another_stream", "hidden", "hidden_work", Limits()),
    ("in_a_thread", "hidden", "hidden_work zeros", Limits()),
    ("raises", "end", "raises", Limits()),
    ("device_assert", "end", "device_error", Limits()),
    ("illegal_address", "end", "device_error", Limits()),
    ("endless", "end", "hang", Limits(seconds=15)),
    ("too_much_at_once", "end", "out_of_memory", Limits()),
    ("leaks", "end", "out_of_memory", LIMITED),
    ("leaks_past_torch", "end", "out_of_memory", LIMITED),
)
REFUSALS = (  # function, class, what the system says
    ("judge_memory", "process", "PermissionError"),
    ("internet", "system", "PermissionError"),
)
LIBRARIES: tuple[
    tuple[str, Lengths], ...
] = (  # function, lengths: each is found by what it launches
    ("torch_flash", USUAL),
    ("torch_cudnn", USUAL),
    ("torch_efficient", USUAL),
    ("torch_matmul", USUAL),
    ("in_a_sibling", USUAL),
    ("unless_profiled", USUAL),
    ("among_own_kernels", USUAL),
    ("long_ones_only", LONG),
    ("several_batches_only", ((64, 64), (64, 64), (64, 64))),
    ("from_the_third_call", USUAL),
    ("in_a_graph", USUAL),
    ("lazily_by_function", USUAL),
    ("lazily_by_dispatch", USUAL),
)
LAZY = "hidden_work wrong_form unwritten tampering"
TIMED = (  # module, function, expected
    ("cuda_timing", "forges_times", "too_fast hidden_work"),
    ("cuda_timing", "forges_plausible_times", "hidden_work"),
    ("cuda_timing", "replay_when_timed", "replay too_fast"),
    ("cuda_conduct", "on_another_stream", "hidden_work too_fast wrong"),
    ("cuda_conduct", "in_a_thread", "hidden_work too_fast wrong replay"),
    ("cuda", "zeros", "wrong too_fast"),
    ("cuda_conduct", "device_assert", "device_error"),
    ("cuda_conduct", "endless", "hang"),
    ("lazy", "half_the_time", f"{LAZY} too_fast wrong replay"),
    ("lazy", "fetched_head_only", f"{LAZY} too_fast wrong"),
)
HABITS: tuple[tuple[str, Lengths], ...] = (  # function, lengths
    ("plain", None),
    ("on_a_stream_that_waits", USUAL),
    ("graph", USUAL),
    ("workspace", USUAL),
    ("transposed_output", USUAL),
    ("padded_output", USUAL),
    ("takes_its_own_head_dim_only", None),
    ("two_halves", USUAL),
    ("autotuned", USUAL),
)
FORMS: tuple[tuple[str, str, str, Lengths], ...] = (  # module, function, label, lengths
    ("triton_parts", "split_kv", "split_kv", None),
    ("triton_parts", "persistent", "persistent", None),
    ("named_like_a_library", "attention", "named_like_a_library", USUAL),
    ("tests_itself", "attention", "tests_itself", USUAL),
)
# Factory of libraries.py, further needs, lengths.
BACKENDS: tuple[tuple[str, tuple[str, ...], Lengths], ...] = (
    ("flash", (), None),
    ("cudnn", (), USUAL),
    ("efficient", (), USUAL),
    ("math", (), USUAL),
    ("naive", (), USUAL),
    ("flex", TRITON, ((256, 256), (130, 200))),
    ("compiled", TRITON, ((256, 256), (130, 200))),
    ("flash_attention_3", ("flash_attn_interface",), USUAL),
)
OWN = ("mha", "gqa", "mqa", "mla", "window", "softcap", "alibi", "sink")
"""Operators of the built-in author, compiled for the GPU at hand."""


def gpu_cases() -> Iterator[SelftestCase]:
    """All cases with a GPU, by class of attack; the honest ones last."""
    for function, kind, expected, spec, lengths in OUTPUTS:
        yield _triton("cuda", function, kind, expected, spec=spec, lengths=lengths)
    for function, kind, expected, lengths in SPECIAL:
        yield _triton("cuda_special", function, kind, expected, lengths=lengths)
    for function, kind, expected, limits in CONDUCT:
        lengths = SHORT * 4 if function == "leaks" else SHORT
        yield _triton("cuda_conduct", function, kind, expected, lengths=lengths, limits=limits)
    for function, kind, says in REFUSALS:
        yield _triton("cuda_conduct", function, kind, "raises", says=says, lengths=SHORT)
    for function, lengths in LIBRARIES:
        expected = f"library_call {LAZY}" if function.startswith("lazily") else "library_call"
        yield _triton("cuda_libraries", function, "library", expected, lengths=lengths)
    yield _triton("triton_parts", "atomic_sums", "output", "not_repeatable", lengths=LONG)
    for function in ("by_function", "by_dispatch"):
        yield _triton("lazy", function, "hidden", LAZY, lengths=USUAL, label=f"lazy_{function}")
    for module, function, expected in TIMED:
        limits = Limits(seconds=15, start_seconds=20 if function == "endless" else 120)
        more: dict[str, Any] = {"label": f"timed_{function}", "limits": limits, "how": "timed"}
        yield _triton(module, function, "timing", expected, **more)
    yield from _honest()


def _triton(module: str, function: str, kind: str, expected: str = "", **more: Any) -> SelftestCase:
    spec = more.pop("spec", SPEC)
    given = (function, kind, module, spec, tuple(expected.split()))
    return SelftestCase("gpu", *given, needs=TRITON, **more)


def _honest() -> Iterator[SelftestCase]:
    for function, lengths in HABITS:
        yield _triton("honest_cuda", function, HONEST, lengths=lengths)
    for module, function, label, lengths in FORMS:
        yield _triton(module, function, HONEST, label=label, lengths=lengths)
    varied: dict[str, Any] = {"spec": VARIED, "label": "atomic_sums_where_allowed"}
    yield _triton("triton_parts", "atomic_sums", HONEST, **varied)
    for spec, label in ((BF16, "triton_bf16"), (FULL, "triton_full")):
        more: dict[str, Any] = {"spec": spec, "label": label, "factory": True, "lengths": USUAL}
        yield _triton("triton_attention", "honest", HONEST, **more)
    yield _triton(
        "honest_cuda", "on_a_stream_that_waits", HONEST, label="timed_honest", how="timed"
    )
    for function, needs, lengths in BACKENDS:
        given = (function, HONEST, "libraries", BF16)
        more = {"lengths": lengths, "libraries": True, "factory": True, "needs": needs}
        yield SelftestCase("gpu", *given, **more, label=f"library_{function}")
    for name in OWN:
        lengths = None if name in ("mha", "gqa") else USUAL
        more = {"label": f"own_{name}", "lengths": lengths, "how": "own", "needs": ("nvcc",)}
        yield SelftestCase("gpu", name, HONEST, "packages", None, **more)
