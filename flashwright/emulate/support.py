"""Which instructions the emulator refuses, and why."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

REFUSED: Mapping[str, str] = MappingProxyType(
    {
        r"(?:tex|tld4|txq|istypep)\b": "textures are not emulated",
        r"(?:suld|sust|sured|suq)\b": "surfaces are not emulated",
        r"(?:mma|wgmma)\b.*\bsp\b": "products of sparse matrices are not emulated",
        r"mma\..*\.m8n8k4\..*\.f16\.f16": "the fp16 product m8n8k4 of Volta is not emulated",
        r"multimem\b": "memory of several GPUs is not emulated",
        r"tcgen05\b": "the tensor cores of Blackwell are not emulated",
        r"clusterlaunchcontrol\b": "the tile scheduler of Blackwell is not emulated",
        r"cp\..*\.im2col\b": "im2col is not emulated",
        r"cp\..*\.tile::": "gathering and scattering copies are not emulated",
        r"cp\.reduce\.async\.bulk\.tensor\b": "a reduction by a tensor map is not emulated",
        r"tensormap\b": "tensor maps that a kernel changes are not emulated",
        r"(?:alloca|stacksave|stackrestore)\b": "local memory of any size is not emulated",
        r"mbarrier\.pending_count\b": "the state of an mbarrier has no count here",
        r"cvt\.rs\b": "stochastic rounding is not emulated",
        r"cudaLaunch|cudaGetParameterBuffer": "kernels that launch kernels are not emulated",
    }
)
"""Instructions that are refused, as regular expressions of their beginning, with the reason."""


def refusal(opcode: str) -> str | None:
    """Why an instruction is refused; None for one that is not known to be."""
    return next((why for how, why in REFUSED.items() if re.match(how, opcode)), None)
