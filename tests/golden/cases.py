"""The kernels that a reviewer reads: for each architecture, with what attention is made of.

For each case there are the program NAME.tl (those of examples/ are there), the kernel NAME.cu and
NAME.map.json. A change of the translator shows as a change of these files.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flashwright import gpu as gpus
from flashwright.author.builtin.author import write_code, write_sketch
from flashwright.author.builtin.variants import make_spec
from flashwright.check.check import check
from flashwright.lang.parse import parse
from flashwright.lower.translate import Translation, translate

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples"


@dataclass(frozen=True)
class Case:
    """A kernel: of a built-in program, or, without a variant, of an example."""

    name: str
    gpu: str
    variant: str | None = None
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def program(self) -> Path:
        """The file with its TL."""
        return (HERE if self.variant else EXAMPLES) / f"{self.name}.tl"

    def write(self) -> str | None:
        """The built-in program as the author writes it now."""
        if self.variant is None:
            return None
        spec = make_spec(self.variant, **self.options)
        return write_code(write_sketch(spec), spec, gpus.find(self.gpu)).code

    def translate(self) -> Translation:
        """The kernel as it is translated now."""
        gpu = gpus.find(self.gpu)
        checked = check(parse(self.program.read_text("utf-8")), gpu)
        assert checked.program is not None, checked.diagnostics
        return translate(checked.program, gpu)


def _builtin(name: str, gpu: str, variant: str, **options: Any) -> Case:
    return Case(name, gpu, variant, options)


CASES = (
    _builtin("gqa_causal_128_bf16_a100", "a100", "gqa", causal=True, head_dim=128, dtype="bf16"),
    _builtin("mha_full_64_fp16_t4", "t4", "mha", head_dim=64, dtype="fp16"),
    _builtin("mha_causal_64_fp8_l40s", "l40s", "mha", causal=True, head_dim=64, dtype="fp8"),
    _builtin(
        "mqa_window_softcap_alibi_128_bf16_a100",
        "a100",
        "mqa",
        causal=True,
        window=1024,
        softcap=30.0,
        alibi=True,
        head_dim=128,
        dtype="bf16",
    ),
    _builtin("nsa_selected_128_bf16_a100", "a100", "nsa-selected", head_dim=128, dtype="bf16"),
    Case("documents", "a100"),
    Case("differential", "a100"),
    Case("sigmoid", "a100"),
)
