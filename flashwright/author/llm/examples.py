"""The worked examples in the prompts: never the operator that is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources

from flashwright.gpu import Gpu
from flashwright.lang.format import format_tree
from flashwright.lang.parse import parse
from flashwright.rewrite.sequenced import sequenced
from flashwright.spec import AttentionSpec

NAMES = {
    "window": "a window to both sides, with ALiBi, 32 wide, in bf16",
    "sigmoid": "weights by a sigmoid instead of a softmax, causal, 64 wide, in fp16",
}
FILES = (
    "sketch.tl",
    "code.tl",
    "code.sm90.tl",
    "kernel.sm75.cu",
    "kernel.sm80.cu",
    "kernel.sm90.cu",
)


@dataclass(frozen=True)
class Example:
    """One operator at every step."""

    name: str

    @property
    def title(self) -> str:
        """What it computes."""
        return NAMES[self.name]

    @property
    def sketch(self) -> str:
        """Step 1."""
        return self.read("sketch.tl")

    @property
    def code(self) -> str:
        """Step 2."""
        return self.read("code.tl")

    def of_sequences(self, spec: AttentionSpec) -> str:
        """The code for sequences that lie as a spec says, with a kv head for each query head."""
        alone = spec.model_copy(update={"heads": 1, "kv_heads": 1})
        return format_tree(sequenced(parse(self.code), alone))

    def translated(self, *, hopper: bool) -> str:
        """The code that `kernel` is a translation of; Hopper's has the sizes of a real one."""
        return self.read("code.sm90.tl") if hopper else self.code

    def kernel(self, gpu: Gpu, *, hopper: bool) -> str:
        """Step 3: with TMA and wgmma, or as all GPUs of the generation can do it."""
        generation = "90" if hopper else "80" if gpu.cp_async else "75"
        return self.read(f"kernel.sm{generation}.cu")

    def read(self, name: str) -> str:
        """One of its files."""
        folder = resources.files(__package__) / "prompts" / "examples" / self.name
        return (folder / name).read_text(encoding="utf-8")


def of_language(spec: AttentionSpec) -> Example:
    """For the sketch and the code: one with a softmax, unless that says too much."""
    told = spec.window is not None or spec.alibi or spec.branch is not None
    return Example("sigmoid" if told else "window")


def of_translation(code: str) -> Example:
    """For the translation: the short one, unless that is what is being translated."""
    words = code.lower()
    return Example("window" if "sigmoid" in words and "softmax" not in words else "sigmoid")
