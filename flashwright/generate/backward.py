"""The backward pass of a kernel package: derived from its program, built once, in the store."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType

from flashwright import gpu as gpus
from flashwright import spec as specs
from flashwright.build import package
from flashwright.build.make import make, step_programs
from flashwright.build.reading import unusable
from flashwright.build.steps import Steps
from flashwright.check.check import check, checked_program
from flashwright.files import content, sha256
from flashwright.generate import store
from flashwright.generate.backward_sizes import sized
from flashwright.generate.folder import write_package
from flashwright.gpu import Gpu
from flashwright.grad.grad import backward
from flashwright.lang.diagnostic import Failed
from flashwright.lang.format import format_tree
from flashwright.lang.nodes import Tree
from flashwright.lang.parse import parse
from flashwright.measure.machine import translator
from flashwright.program.kernels import Kernels
from flashwright.program.program import Program
from flashwright.rewrite.packed import packed
from flashwright.spec import AttentionSpec

CODE, SPEC = "code.tl", "spec.toml"


@dataclass(frozen=True)
class BackwardOrder:
    """The backward pass of a program, to find or to make."""

    forward: str
    """The text of the forward program."""
    gpu: Gpu
    spec: AttentionSpec | None = None
    """The forward's."""
    outputs: tuple[str, ...] = ()
    """The outputs that have a gradient, beside O."""
    inputs: tuple[str, ...] | None = None
    """The inputs whose gradients are wanted, in lower case; None for all."""
    deterministic: bool = False
    """Whether every run gives the same bits."""
    packed: bool = False
    """Whether it is for packed sequences; `forward` is for rectangular batches all the same."""

    @classmethod
    def of(
        cls,
        folder: Path,
        outputs: tuple[str, ...] = (),
        inputs: tuple[str, ...] | None = None,
        deterministic: bool = False,
    ) -> BackwardOrder:
        """For the kernel in a package. Raises Failed with FW852 if it says too little."""
        code = content(folder / CODE)
        try:
            record = json.loads(content(folder / package.RECORD) or b"")
            card = gpus.find(str(record["gpu"]))
        except (ValueError, KeyError, TypeError, gpus.UnknownGpu):
            raise unusable(folder / package.RECORD, "it does not name the GPU") from None
        if code is None:
            raise unusable(folder / CODE, "the program is missing, which a backward needs")
        spec = folder / SPEC
        known = specs.load(spec) if spec.is_file() else None
        return cls(code.decode(), card, known, outputs, inputs, deterministic)

    @cached_property
    def derived(self) -> Tree:
        """The backward program, for rectangular batches. Raises Failed if it cannot be derived."""
        program = checked_program(parse(self.forward))
        names = self.inputs
        wrt = None if names is None else [t.name for t in program.inputs if t.name.lower() in names]
        return backward(program, self.outputs, wrt, self.deterministic).tree

    @cached_property
    def code(self) -> str:
        """The text of the backward program, before its sizes are chosen. Raises Failed if it cannot
        be derived or packed."""
        return format_tree(packed(self.derived) if self.packed else self.derived)

    @cached_property
    def key(self) -> str:
        """A digest of what is computed, for which GPU, and of the translator."""
        return sha256("\0".join((self.code, self.gpu.name, translator())))

    @property
    def name(self) -> str:
        """The name of its package."""
        return f"{self.gpu.name}-backward-{self.key[:16]}"

    def in_words(self) -> str:
        """What it computes, for a line of progress."""
        kind = "packed " if self.packed else ""
        kind += "deterministic " if self.deterministic else ""
        if self.spec is None:
            return f"the {kind}backward pass; {self.gpu.title}"
        spec = self.spec.model_copy(update={"reference": None})
        return f"the {kind}backward pass of {spec.in_words}; {self.gpu.title}"

    def make(self, folder: Path, verified: bool) -> None:
        """Write the package. Raises Failed if a kernel cannot be made."""
        spec = self.spec
        told = {}
        if spec is not None and not self.packed:
            told[SPEC] = specs.dump(spec.differentiated(self.deterministic))
        rewrite = [packed] if self.packed else []
        _, tree = sized(parse(format_tree(self.derived)), self.gpu, *rewrite)
        write_package(folder, built(tree, self.gpu, told), self.gpu.name)


def find_or_make(
    folder: Path,
    outputs: tuple[str, ...],
    inputs: tuple[str, ...],
    deterministic: bool,
    tell: store.Tell,
) -> tuple[Path, bool]:
    """The backward package of a forward package, for gradients of these outputs and of O with
    respect to these inputs, and whether it was made now."""
    order = BackwardOrder.of(folder, outputs, inputs, deterministic)
    new = store.find(order) is None
    return store.find_or_make(order, tell), new


def built(
    tree: Tree, gpu: Gpu, told: Mapping[str, str] = MappingProxyType({})
) -> dict[str, str | bytes]:
    """The files of a program, compiled, beside those that are `told`."""
    verdict = check(tree, gpu)
    if verdict.errors:
        raise Failed(*verdict.errors)
    if verdict.program is not None:
        return _of_one(verdict.program, gpu, {CODE: format_tree(tree), **told})
    kernels = Kernels(verdict.kernels)
    steps = Steps.of(kernels).dump()
    files: dict[str, str | bytes] = {CODE: format_tree(tree), **told, package.STEPS: steps}
    found: dict[str, str | bytes] = {}
    for name, (text, program) in step_programs(kernels, gpu).items():
        own = _of_one(program, gpu, {CODE: text})
        found |= {f"{name}/{file}": data for file, data in own.items()}
        files[f"{name}/{package.RECORD}"] = own[package.RECORD]
    return {**found, **files, package.RECORD: package.record_of_steps(gpu, files)}


def _of_one(program: Program, gpu: Gpu, told: Mapping[str, str]) -> dict[str, str | bytes]:
    """The files of one kernel, compiled."""
    translation, made = make(program, gpu, tl=told[CODE])
    files: dict[str, str | bytes] = {
        **told,
        **package.translated(translation),
        **package.compiled(made),
    }
    files[package.RECORD] = package.record(made, gpu, files, translation.report)
    return files
