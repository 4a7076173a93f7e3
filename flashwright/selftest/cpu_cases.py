"""The cases that need no GPU: NumPy kernels, attacks on the judge, packages under emulation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from flashwright.sandbox.limits import Limits
from flashwright.selftest.case import HONEST, SelftestCase
from flashwright.selftest.sources import REFUSED, TAKEN
from flashwright.spec import AttentionSpec

SPEC = AttentionSpec.make(
    variant="gqa", heads=4, kv_heads=2, head_dim=16, dtype="fp16", causal=True, lse=False
)
FLAT = SPEC.model_copy(update={"scale": 5e-5})  # normal inputs have nearly equal weights
SMALL = SPEC.model_copy(update={"scale": 2e-3})  # of scores, whose exponential is nearly 1 + s
VARIED = SPEC.model_copy(update={"repeatable": False})  # two runs may differ a little
WIDE = SPEC.model_copy(update={"head_dim": 128})  # scores near 100 where inputs are shifted
IN_BF16 = SPEC.model_copy(update={"dtype": "bf16", "head_dim": 64})
PACKED = SPEC.model_copy(update={"packed": True, "lse": True})
PAGED = SPEC.model_copy(update={"causal": False, "decode": 2, "page": 16, "lse": True})
SHORT = ((9, 9), (40, 70))
USUAL = ((256, 256), (1, 1), (40, 70), (130, 61))
FIRST = ((9, 9),)
LIMITS = Limits(seconds=4)

CpuRow = tuple[str, str, str, AttentionSpec]

PLAIN: tuple[CpuRow, ...] = (  # function, class, expected, spec: found with few lengths
    ("zeros", "output", "zeros", SPEC),
    ("noise", "output", "wrong", SPEC),
    ("scaled_twice", "output", "wrong", SPEC),
    ("some_rows_nan", "output", "nonfinite", SPEC),
    ("last_rows_unwritten", "output", "unwritten", SPEC),
    ("wider_type", "output", "wrong_form", SPEC),
    ("turned", "output", "wrong_form", SPEC),
    ("a_list", "output", "wrong_form", SPEC),
    ("nothing", "output", "wrong_form", SPEC),
    ("no_output", "output", "wrong_form", SPEC),
    ("weights_in_e4m3", "precision", "low_precision", SPEC),
    ("sums_in_fp16", "precision", "low_precision", SPEC),
    ("inputs_in_e4m3", "precision", "low_precision", SPEC),
    ("other_bits", "output", "not_repeatable", SPEC),
    ("noisy", "output", "not_repeatable", SPEC),
    ("too_noisy", "output", "not_repeatable", VARIED),
    ("replay_by_shape", "replay", "replay", SPEC),
    ("replay_by_address", "replay", "replay", SPEC),
    ("replay_by_sample", "replay", "replay", SPEC),
    ("leftover", "replay", "replay", SPEC),
)
WHOLE: tuple[CpuRow, ...] = (  # found by the whole trial
    ("mean_of_v", "inputs", "wrong", FLAT),
    ("first_order", "inputs", "wrong", SMALL),
    ("no_maximum", "inputs", "special_inputs", WIDE),
    ("maximum_from_zero", "inputs", "special_inputs", SPEC),
    ("tail_of_keys_dropped", "shapes", "special_shapes", SPEC),
    ("equal_lengths_only", "shapes", "special_shapes", SPEC),
    ("no_rows_without_keys", "shapes", "special_shapes", SPEC),
    ("no_mask", "mask", "mask_ignored", SPEC),
    ("one_key_too_many", "mask", "mask_ignored", SPEC),
    ("one_key_too_few", "mask", "key_ignored", SPEC),
    ("heads_mixed_up", "mask", "mask_ignored", SPEC),
    ("first_batch_only", "mask", "key_ignored", SPEC),
)
CONDUCT: tuple[CpuRow, ...] = (
    ("scales_q_in_place", "memory", "inputs_changed", SPEC),
    ("output_over_q", "memory", "inputs_changed", SPEC),
    ("writes_behind_v", "memory", "out_of_bounds", SPEC),
    ("writes_before_q", "memory", "out_of_bounds", SPEC),
    ("reads_behind_v", "memory", "out_of_bounds", SPEC),
    ("scales_q_afterwards", "memory", "inputs_changed", SPEC),
    ("enormous", "output", "wrong_form", SPEC),
    ("raises", "end", "raises", SPEC),
    ("raises_for_ragged", "end", "raises", SPEC),
)
SPECIAL: tuple[CpuRow, ...] = (
    ("wrong_from_the_fourth_batch", "shapes", "special_shapes", SPEC),
    ("independent_keys_only", "inputs", "special_inputs", SPEC),
    ("strides_ignored", "inputs", "special_inputs", SPEC),
    ("offsets_of_32_bits", "inputs", "special_inputs", SPEC),
    ("window_of_64", "mask", "key_ignored", SPEC),
    ("every_eighth_block_skipped", "shapes", "special_shapes key_ignored wrong", SPEC),
    ("slightly_too_large", "precision", "low_precision wrong", SPEC),
    ("wrong_from_the_twentieth_call", "replay", "not_repeatable special_shapes wrong zeros", SPEC),
    ("wrong_from_call_600", "replay", "not_repeatable", SPEC),
    ("wrong_from_call_60_of_a_shape", "replay", "not_repeatable", SPEC),
    ("kept_by_k_and_v", "replay", "replay wrong", SPEC),
    ("kept_by_q_and_v", "replay", "key_ignored", SPEC),
    ("kept_by_a_row_of_v", "replay", "key_ignored replay wrong", SPEC),
    ("strides_of_k_for_v", "inputs", "special_inputs", SPEC),
    ("all_views_or_none", "inputs", "special_inputs", SPEC),
    ("aligned_to_256_bytes", "inputs", "special_inputs", SPEC),
    ("wrong_from_key_900", "shapes", "special_shapes", SPEC),
    ("wrong_from_the_sixth_batch", "shapes", "special_shapes", SPEC),
    ("declines_the_probe", "mask", "raises", SPEC),
    ("declines_after_300_calls", "replay", "raises", SPEC),
)
SEQUENCES: tuple[CpuRow, ...] = (
    ("key_of_the_next_one", "sequences", "nonfinite", PACKED),
    ("row_of_the_next_one", "sequences", "out_of_bounds", PACKED),
    ("keys_from_the_first_one", "sequences", "wrong", PACKED),
    ("nothing_of_sequences_without_keys", "sequences", "nonfinite", PACKED),
    ("pages_in_order", "sequences", "nonfinite", PAGED),
    ("position_behind_the_last", "sequences", "nonfinite", PAGED),
    ("page_behind_the_last", "sequences", "raises", PAGED),
    ("parts_not_rescaled", "sequences", "wrong", PAGED),
    ("longest_alone", "sequences", "nonfinite", PAGED),
)
ENDS = (  # function, class, expected, limits: found from outside, with few lengths
    ("in_a_thread", "hidden", "hidden_work", Limits()),
    ("hangs", "end", "hang", Limits(seconds=0.5)),
    ("hangs_deaf", "end", "hang", Limits(seconds=0.5)),
    ("crashes", "end", "crash", Limits()),
    ("writes_to_null", "end", "crash", Limits()),
    ("exits", "end", "crash", Limits()),
    ("exits_politely", "end", "raises", Limits()),
    ("takes_memory", "end", "out_of_memory", Limits(memory=1 << 29)),
)
MEDDLING = (  # function, class, expected: rejected, and the judge goes on
    ("writes_garbage", "forgery", "tampering"),
    ("forges_an_answer", "forgery", "tampering"),
    ("forges_no_output", "forgery", "tampering wrong_form"),
    ("answers_twice", "forgery", "tampering"),
    ("forges_an_error", "forgery", "tampering"),
    ("forges_nonsense", "forgery", "tampering"),
    ("forges_infinity", "forgery", "tampering"),
    ("nests_deeply", "forgery", "tampering"),
    ("floods", "forgery", "tampering"),
    ("closes_the_pipe", "forgery", "tampering crash"),
    ("cuts_the_memory_short", "forgery", "tampering"),
    ("log_is_a_pipe", "forgery", "crash"),
    ("log_is_a_link", "forgery", "crash"),
    ("no_scratch_folder", "forgery", "tampering raises"),
    ("takes_over_the_worker", "forgery", "inputs_changed"),
    ("overwrites_the_output", "forgery", "out_of_bounds hidden_work"),
    ("patches_the_judge", "forgery", "zeros"),
    ("hides_its_thread", "hidden", "hidden_work zeros not_repeatable"),
    ("looks_in_memory", "search", "zeros"),
    ("looks_in_files", "search", "zeros"),
    ("looks_at_its_parent", "search", "zeros"),
)
PROCESS = (
    *("judge_memory", "judge_memory_by_thread", "judge_memory_by_grandchild", "judge_environment"),
    *("judge_addresses", "judge_open_files", "judge_folder", "judge_oom_score", "judge_signal"),
    *("judge_group_signal", "signal_to_all", "judge_thread_signal", "judge_queued_signal"),
    *("judge_limits", "judge_affinity", "judge_scheduling", "judge_priority"),
    *("judge_disk_priority", "judge_ptrace", "judge_vm_read", "judge_vm_write", "judge_pidfd"),
    *("judge_kcmp", "sibling_of_the_judge"),
)
SYSTEM = (
    *("internet", "internet_datagrams", "unix_socket", "netlink", "virtual_machine_socket"),
    *("io_uring", "user_faults", "bpf", "performance_counters", "keyring", "mount"),
    *("shared_memory", "file_handles", "another_filter", "namespace", "namespace_by_clone"),
    *("socket_by_an_older_thread",),
)
ARCHITECTURES = (
    ("program_of_32_bits", "aarch64"),
    ("calls_of_32_bits", "x86_64"),
    ("calls_of_x32", "x86_64"),
)
FILES = (
    *("reads_the_system", "lists_the_root", "lists_shared_memory", "overwrites_the_judge"),
    *("overwrites_its_own_file", "overwrites_numpy", "writes_to_the_temporary_folder"),
)
APPROXIMATE = ("quadratic_exp2", "weights_below_e_13_dropped")
"""Kernels of tiled.py whose error is close to the rounding of bf16."""
CALLERS = ("calls_sdpa", "calls_flash_attn", "calls_by_name")
HONEST_SPECS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "full": {},
    "window": {"causal": True, "window": 40},
    "window_on_both_sides": {"window": 40},
    "shared_heads": {"causal": True, "heads": 4, "kv_heads": 2},
    "one_kv_head": {"heads": 4, "kv_heads": 1},
    "softcap": {"causal": True, "softcap": 20.0},
    "alibi": {"causal": True, "alibi": True},
    "sink": {"causal": True, "sink": True},
    "wide_values": {"causal": True, "v_dim": 24},
    "scale": {"scale": 0.05},
    "bf16": {"causal": True, "dtype": "bf16"},
    "fp8": {"causal": True, "dtype": "fp8"},
}
TRIED_WHOLE = ("causal", "shared_heads", "softcap", "alibi", "sink", "fp8")
HABITS = (
    *("transposed_output", "padded_output", "workspace", "threads", "two_parts"),
    *("takes_its_own_head_dim_only", "uses_the_system", "compiles"),
)
PACKAGES = (  # function of packages.py, expected
    ("output_renamed", "wrong_form"),
    ("chosen_by_queries", "FW852"),
    ("kernel_without_problems", "untried"),
    ("another_cubin", "FW852"),
    ("threads_beyond_the_gpu", "FW852"),
    ("pipe_for_a_file", "FW852"),
    ("kernel_without_bounds", "out_of_bounds"),
    ("kernel_without_mask", "wrong"),
    ("kernel_without_barrier", "race"),
)
RECEIPTS = (  # function of receipts.py, the field that differs
    ("faster_number", "number.digest"),
    ("more_flops", "number.tflops"),
    ("chosen_seed", "number.seed"),
    ("number_of_another_run", "number.run"),
    ("line_taken_out", "number.digest"),
)
OWN = ("mha", "gqa", "mqa", "softcap", "sink")
"""Operators of the built-in author, judged by emulation."""
EMULATED = ((70, 70), (33, 100))
COMPILERS = ("nvcc", "c++")


def cpu_cases() -> Iterator[SelftestCase]:
    """All cases without a GPU, by class of attack; the honest ones last."""
    for module, rows, lengths in (
        *(("cpu", PLAIN, SHORT), ("cpu", WHOLE, None)),
        *(("cpu_conduct", CONDUCT, SHORT), ("cpu_special", SPECIAL, None)),
        ("cpu_sequences", SEQUENCES, SHORT),
    ):
        for function, kind, expected, spec in rows:
            given = (function, kind, module, spec, tuple(expected.split()))
            yield SelftestCase("cpu", *given, lengths=lengths)
    for function, kind, expected, limits in ENDS:
        given = (function, kind, "cpu_conduct", SPEC, tuple(expected.split()))
        yield SelftestCase("cpu", *given, lengths=SHORT, limits=limits)
    for function, kind, expected in MEDDLING:
        given = (function, kind, "meddling", SPEC, tuple(expected.split()))
        yield SelftestCase("cpu", *given, lengths=SHORT, limits=LIMITS)
    for module in CALLERS:
        given = ("attention", "library", module, SPEC, ("library_call",))
        yield SelftestCase("cpu", *given, label=module, lengths=FIRST)
    for function in APPROXIMATE:
        given = (function, "precision", "tiled", IN_BF16, ("approximation",))
        yield SelftestCase("cpu", *given, factory=True)
    yield from _escapes()
    yield from _files_of_others()
    yield from _honest()


def _escapes() -> Iterator[SelftestCase]:
    rows = [
        *((name, "process", "escapes", ()) for name in PROCESS),
        *((name, "system", "escapes", ()) for name in SYSTEM),
        *((name, "system", "escapes", (machine,)) for name, machine in ARCHITECTURES),
        *((name, "files", "file_escapes", ()) for name in FILES),
    ]
    for name, kind, module, needs in rows:
        given = (name, kind, module, SPEC, ("raises",))
        yield SelftestCase("cpu", *given, says="Refused", lengths=FIRST, needs=needs)


def _files_of_others() -> Iterator[SelftestCase]:
    """Packages, CUDA source and receipts."""
    for function, expected in PACKAGES:
        lengths = None if expected == "untried" else EMULATED
        given = (function, "package", "packages", None, (expected,))
        yield SelftestCase("cpu", *given, how="emulated", lengths=lengths, needs=COMPILERS)
    for name in REFUSED:
        yield SelftestCase("cpu", name, "source", "sources", None, ("FW828",), how="screen")
    for name, field in RECEIPTS:
        yield SelftestCase("cpu", name, "receipt", "receipts", None, (field,), how="receipt")


def _honest() -> Iterator[SelftestCase]:
    for name, options in HONEST_SPECS.items():
        told = {"variant": "any", "heads": 2, "head_dim": 16, "dtype": "fp16", **options}
        spec = AttentionSpec.make(**told)
        lengths = None if name in TRIED_WHOLE else USUAL
        given = ("honest", HONEST, "honest", spec)
        yield SelftestCase("cpu", *given, label=name, factory=True, lengths=lengths)
    for function in HABITS:
        yield SelftestCase("cpu", function, HONEST, "honest_cpu", SPEC, lengths=USUAL)
    for function, spec in (("packed", PACKED), ("paged", PAGED)):
        yield SelftestCase("cpu", function, HONEST, "cpu_sequences", spec)
    with_lse = SPEC.model_copy(update={"lse": True})
    yield SelftestCase("cpu", "with_lse", HONEST, "honest_cpu", with_lse, lengths=USUAL)
    yield SelftestCase(
        "cpu", "noisy", HONEST, "cpu", VARIED, label="noise_that_is_allowed", lengths=USUAL
    )
    yield SelftestCase("cpu", "cubic_exp2", HONEST, "tiled", IN_BF16, factory=True)
    for function in ("prints_a_lot", "leaves_children"):
        yield SelftestCase("cpu", function, HONEST, "cpu_conduct", SPEC, lengths=SHORT)
    for name in TAKEN:
        yield SelftestCase("cpu", name, HONEST, "sources", None, how="screen")
    yield SelftestCase("cpu", "unchanged_receipt", HONEST, "receipts", None, how="receipt")
    for name in OWN:
        more: dict[str, Any] = {"label": f"own_{name}", "lengths": EMULATED, "needs": COMPILERS}
        yield SelftestCase("cpu", name, HONEST, "packages", None, how="emulated", **more)
