"""How long emulation takes: a promise to whoever puts it into a loop."""

from __future__ import annotations

import time

import pytest

from flashwright import gpu as gpus
from flashwright.author.builtin.author import write_code, write_sketch
from flashwright.author.builtin.variants import make_spec
from flashwright.build import toolchain
from flashwright.judge.problems import Problem
from tests.unit.together import emulated, kernels

pytestmark = pytest.mark.skipif(not toolchain.has_nvcc(), reason="there is no CUDA compiler here")


def test_half_a_thousand_keys_in_seconds(record_property: pytest.RecordProperty) -> None:
    """One block of a d128 kernel over 512 keys under 2 s, a causal problem of 2 heads under 20."""
    wanted = [make_spec("mha", head_dim=128, dtype="bf16", causal=c) for c in (False, True)]
    codes = [(write_code(write_sketch(s), s, gpus.find("a100")).code, s) for s in wanted]
    block, causal = kernels(codes, "a100")
    sizes = {"batch": 1, "heads": 1, "kv_heads": 1, "q_len": 128, "kv_len": 512}
    whole = sizes | {"heads": 2, "kv_heads": 2, "q_len": 512}
    for kernel, dims, limit in ((block, sizes, 2.0), (causal, whole, 20.0)):
        start = time.process_time()
        result, _, compared = emulated(kernel, Problem(dims, "normal", 1))
        seconds = time.process_time() - start
        record_property(f"seconds_{dims['q_len']}", seconds)
        assert compared.ok
        assert not result.findings
        assert seconds < limit
