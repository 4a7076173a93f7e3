"""Which instructions our kernels are made of.

`python -m tests.hardware.emitted` writes emitted.txt: a wide spread of kernels is translated and
compiled to PTX, which takes minutes. The tests look at the file, and at a few kernels.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flashwright import gpu as gpus
from flashwright.author.builtin.author import write_code, write_sketch
from flashwright.author.builtin.variants import make_spec
from flashwright.build import toolchain
from flashwright.build.compile import FLAGS
from flashwright.check.check import check
from flashwright.emulate.parse import parse as parse_ptx
from flashwright.gpu import Gpu
from flashwright.lang.diagnostic import Failed
from flashwright.lang.parse import parse, read
from flashwright.lower.translate import Translation, translate
from tests.example_programs import PROGRAMS

HERE = Path(__file__).parent
LIST = HERE / "emitted.txt"

_CAUSAL = {"causal": True, "head_dim": 128}
SPREAD: tuple[tuple[str, str, dict[str, Any]], ...] = (
    *(("t4", "mha", {"head_dim": d, "causal": c}) for d, c in ((64, False), (96, True))),
    ("t4", "gqa", _CAUSAL),
    ("t4", "mqa", {**_CAUSAL, "window": 512, "softcap": 30.0, "alibi": True}),
    ("t4", "mla", {"causal": True}),
    ("t4", "nsa-compressed", {"head_dim": 128}),
    ("t4", "nsa-selected", {"head_dim": 128}),
    *(
        ("a100", "mha", {"head_dim": d, "causal": c, "dtype": t})
        for d, c, t in (
            *((64, False, "fp16"), (96, True, "bf16"), (128, False, "fp16"), (192, True, "bf16")),
            *((256, True, "fp16"), (256, False, "bf16")),
        )
    ),
    ("a100", "gqa", {**_CAUSAL, "dtype": "bf16"}),
    ("a100", "gqa", {"head_dim": 64, "sink": True, "causal": True, "window": 128}),
    ("a100", "mqa", {**_CAUSAL, "window": 1024, "softcap": 30.0, "alibi": True, "dtype": "bf16"}),
    ("a100", "mqa", {**_CAUSAL, "softcap": 50.0, "sink": True}),
    ("a100", "mla", {"causal": True, "dtype": "bf16"}),
    ("a100", "nsa-compressed", {"head_dim": 128, "dtype": "bf16"}),
    ("a100", "nsa-selected", {"head_dim": 128, "dtype": "bf16"}),
    ("a100", "nsa-window", {"head_dim": 128}),
    *(("l40s", "mha", {"head_dim": d, "causal": True, "dtype": "fp8"}) for d in (64, 128, 256)),
    ("l40s", "gqa", {**_CAUSAL, "dtype": "fp8", "window": 256, "softcap": 20.0, "alibi": True}),
    ("l40s", "mla", {"causal": True, "dtype": "fp8"}),
    ("l40s", "nsa-compressed", {"head_dim": 128, "dtype": "fp8"}),
    ("l40s", "nsa-selected", {"head_dim": 128, "dtype": "fp8"}),
    ("l40s", "mha", {"head_dim": 128, "dtype": "bf16"}),
    *(("h200", v, {**_CAUSAL, "dtype": t}) for v, t in (("mha", "fp16"), ("gqa", "bf16"))),
    ("h200", "mha", {**_CAUSAL, "dtype": "fp8"}),
    ("h200", "mla", {"causal": True, "dtype": "bf16"}),
    *(
        ("h200", "mha", {"head_dim": d, "causal": c, "dtype": t})
        for d, c, t in (
            *((64, True, "bf16"), (96, True, "fp16"), (128, False, "fp16"), (192, False, "bf16")),
            (256, True, "bf16"),
        )
    ),
    ("h200", "mla", {"causal": True, "dtype": "fp16"}),
)


def translations() -> Iterator[tuple[str, Translation]]:
    """Kernels of the built-in author, and of the examples."""
    for name, variant, options in SPREAD:
        gpu, spec = gpus.find(name), make_spec(variant, **options)
        code = write_code(write_sketch(spec), spec, gpu).code
        yield f"{name} {variant} {options}", _translated(code, gpu)
    for path in PROGRAMS:
        for name in ("a100", "h200"):
            yield f"{name} {path.stem}", _translated(read(path), gpus.find(name))


def _translated(code: str, gpu: Gpu) -> Translation:
    checked = check(parse(code), gpu)
    if checked.program is None:
        raise Failed(*checked.diagnostics)
    return translate(checked.program, gpu)


def opcodes(ptx: str) -> set[str]:
    """The spellings in a file of PTX."""
    return {one.opcode for entry in parse_ptx(ptx).entries.values() for one in entry.code}


def ptx_of(made: Translation) -> str:
    """What nvcc makes of it, without the assembler's part."""
    tools = toolchain.find()
    flags = [flag for flag in FLAGS if flag.startswith(("-std", "-O", "--expt"))]
    with tempfile.TemporaryDirectory() as place:
        source, target = Path(place, "kernel.cu"), Path(place, "kernel.ptx")
        source.write_text(made.source, "utf-8")
        arch = "-arch=" + made.plan.arch.replace("sm_", "compute_")
        includes = [f"-I{tools.device}", f"-I{tools.cutlass}"]
        command = [str(tools.nvcc), "-ptx", *flags, arch, *includes, str(source), "-o", str(target)]
        subprocess.run(command, check=True)
        return target.read_text()


def listed() -> set[str]:
    """What the file holds."""
    return set(LIST.read_text().split())


def main() -> None:
    """Collect from the whole spread, and write the file."""
    found: set[str] = set()
    for name, translation in translations():
        new = opcodes(ptx_of(translation)) - found
        found |= new
        print(f"{name}: {' '.join(sorted(new)) or 'nothing new'}", flush=True)
    LIST.write_text("\n".join(sorted(found)) + "\n")


if __name__ == "__main__":
    main()
