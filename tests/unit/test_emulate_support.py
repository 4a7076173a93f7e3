"""The page of what the emulator supports, and refusals by name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import flashwright.emulate
from flashwright.emulate import support_page
from flashwright.lang.diagnostic import Failed
from tests.unit.emulated import needs_compilers
from tests.unit.test_emulate_words import kernel

pytestmark = needs_compilers
PAGE = Path(__file__).parents[2] / "docs" / "emulator-support.md"


def test_the_page_says_what_the_emulator_does() -> None:
    how = "python -m flashwright.emulate.support_page > docs/emulator-support.md"
    assert PAGE.read_text(encoding="utf-8") == support_page.page(), how


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("tex.1d.v4.f32.s32 {%f1, %f2, %f3, %f4}, [%rd1, {%r1}];", "textures are not emulated"),
        ("multimem.red.global.add.f32 [%rd1], %f1;", "memory of several GPUs is not emulated"),
        ("alloca.u64 %rd1, %rd2;", "local memory of any size is not emulated"),
        ("mbarrier.pending_count.b64 %r1, %rd1;", "the state of an mbarrier has no count here"),
        ("mov.u32 %r1, %pm0;", "the register %pm0 is not declared"),
        ("add.u32 %r1, [%r2], 3;", "an operand of this kind is not expected here"),
    ],
)
def test_a_refusal_names_the_instruction_and_its_line(code: str, said: str) -> None:
    with pytest.raises(Failed, match=said) as refused:
        kernel(code)
    assert f"PTX line 19: `{code.split()[0]}`" in str(refused.value)


def test_an_unknown_instruction_is_refused_at_the_launch() -> None:
    with pytest.raises(Failed, match=r"PTX line 19: the machine does not know frob\.u32"):
        kernel("frob.u32 %r1, %r2;")(1, 32, np.zeros(1, np.int32), np.zeros(1, np.int32))


def test_a_refusal_has_the_line_of_the_source() -> None:
    source = """
extern "C" __global__ void k(unsigned long long t, float* y) {
  y[0] = 1;
  y[1] = tex1Dfetch<float>(t, threadIdx.x);
}
"""
    with pytest.raises(Failed, match=r"PTX line \d+ \(.*:\d+\): `tex.*textures are not emulated"):
        flashwright.emulate.kernel(source)
