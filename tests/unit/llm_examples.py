"""How the kernels of the prompts' examples are made: by our own translator, in its simplest form.

python -m tests.unit.llm_examples        writes them anew
"""

from __future__ import annotations

import re
from pathlib import Path

import flashwright.author.llm.examples as examples
from flashwright.check.check import check
from flashwright.gpu import find
from flashwright.lang.parse import parse
from flashwright.lower.translate import translate

FOLDER = Path(examples.__file__).parent / "prompts" / "examples"
GPUS = {"75": "t4", "80": "a100", "90": "h200"}
# At the end, so that the lines keep their numbers.
PLAIN = "".join(
    f"param {name} = 0\n" for name in ("Overlap", "PingPong", "SplitMasked", "Persistent")
)


def kernel(name: str, generation: str) -> str:
    """An example's code.tl as CUDA, with the launch number that a model has to state besides."""
    code = (FOLDER / name / "code.tl").read_text()
    if generation == "75":
        code = code.replace("bf16", "fp16")  # Turing multiplies nothing else
    program = check(parse(code + PLAIN if generation == "90" else code)).program
    assert program is not None
    made = translate(program, find(GPUS[generation]))
    shared = f"constexpr int SharedBytes = {made.plan.shared};"
    text = re.sub(r"^constexpr int Threads = .*$", rf"\g<0>\n{shared}", made.source, flags=re.M)
    return text.split("\n", 2)[2]  # without who translated it


def main() -> None:
    for name in examples.NAMES:
        for generation in GPUS:
            (FOLDER / name / f"kernel.sm{generation}.cu").write_text(kernel(name, generation))


if __name__ == "__main__":
    main()
