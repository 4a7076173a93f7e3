"""Kernels for the emulator, compiled together: nvcc spends most of its time on the headers."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashwright import gpu as gpus
from flashwright.build import toolchain
from flashwright.build.compile import FLAGS
from flashwright.check.check import check
from flashwright.emulate.emulate import LaunchResult, run
from flashwright.emulate.encode import EncodedKernel, encode
from flashwright.emulate.parse import parse as parse_ptx
from flashwright.emulate.places import Origin
from flashwright.judge import oracle
from flashwright.judge.answer import Answer, compare
from flashwright.judge.form import PackageForm
from flashwright.judge.problems import Problem
from flashwright.judge.reference import UserReference
from flashwright.lang.parse import parse
from flashwright.lower.launch_plan import LaunchPlan
from flashwright.lower.source_map import SourceMap
from flashwright.lower.translate import translate
from flashwright.sandbox.tensors import DTYPES
from flashwright.spec import AttentionSpec

SCHEDULES = ("eager", "lazy", "random:1", "random:2")


@dataclass(frozen=True)
class Kernel:
    """A translated kernel that can be run under emulation."""

    program: EncodedKernel
    plan: LaunchPlan
    spec: AttentionSpec
    source: str
    map: SourceMap
    tl: str

    @property
    def origin(self) -> Origin:
        """Where its lines come from."""
        return Origin(map=self.map, tl=self.tl)


def compiled(
    sources: Sequence[str], entry: str, arch: str, lines: bool = False
) -> list[EncodedKernel]:
    """Each source as a program of its own, from one run of nvcc; all of them define `entry`."""
    includes = dict.fromkeys(re.findall(r"^#include .*$", "\n".join(sources), re.MULTILINE))
    parts = [_apart(source, entry, number) for number, source in enumerate(sources)]
    tools = toolchain.find()
    flags = [f for f in FLAGS if f not in ("-cubin", "--keep", "-Xptxas", "-v")]
    with TemporaryDirectory() as place:
        file = Path(place) / "all.cu"
        file.write_text("\n".join([*includes, *parts]))
        paths = ["-I", str(tools.device), "-I", str(tools.cutlass)]
        more = ["-lineinfo"] if lines else []
        command = [str(tools.nvcc), *flags, *more, "-ptx", f"-arch={arch}", *paths, file.name]
        done = subprocess.run(command, cwd=place, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        module = parse_ptx((Path(place) / "all.ptx").read_text())
    return [encode(module, module.entries[f"{entry}_{n}"]) for n in range(len(sources))]


def _apart(source: str, entry: str, number: int) -> str:
    text = re.sub(r"^#include .*$", "", source, flags=re.MULTILINE)
    text = re.sub(rf"(?<=\s){entry}(?=\(__grid_constant__)", f"{entry}_{number}", text)
    return f'namespace n{number} {{\n#line 1 "kernel.cu"\n{text}\n}}'


def kernels(
    codes: Sequence[tuple[str, AttentionSpec]],
    gpu: str,
    edits: Sequence[tuple[str, str]] = (("", ""),),
    lines: bool = False,
) -> list[Kernel]:
    """The kernels of TL programs for a GPU; one for each edit of each source."""
    card = gpus.find(gpu)
    made = [(code, spec, translate(_checked(code, card), card)) for code, spec in codes]
    listed = [(m, old, new) for m in made for old, new in edits]
    for (_, _, one), old, _ in listed:
        assert old in one.source, old
    texts = [m[2].source.replace(old, new, 1) for m, old, new in listed]
    programs = compiled(texts, made[0][2].plan.entry, card.arch, lines)
    return [
        Kernel(program, m[2].plan, m[1], text, m[2].map, m[0])
        for program, (m, _, _), text in zip(programs, listed, texts, strict=True)
    ]


def _checked(code: str, card: Any) -> Any:
    checked = check(parse(code), card, part=True)
    assert checked.program is not None, checked.diagnostics
    return checked.program


def emulated(
    kernel: Kernel,
    problem: Problem,
    schedule: str = "eager",
    reference: UserReference | None = None,
) -> tuple[LaunchResult, dict[str, NDArray[Any]], oracle.Comparison]:
    """What was found, the outputs, and how far O is from the fp64 answer."""
    form = PackageForm(kernel.spec, kernel.plan)
    made = form.inputs(problem, reference)
    if reference is None:
        expected = oracle.attention(kernel.spec, made, problem.dims, noise=True)
    else:
        expected = reference(made, problem.dims)
    answer = Answer.of_attention(expected)
    shapes = form.outputs(problem, answer) or {}
    given = {n: np.ascontiguousarray(a) for n, a in form.taken(made).items()}
    outputs = {  # those in place have what the caller has written
        n: given[n].copy() if n in given else np.full(s, np.nan, np.float32).astype(DTYPES[d])
        for n, (s, d) in shapes.items()
    }
    arrays = given | outputs
    result = run(kernel.program, kernel.plan, arrays, problem.dims, schedule)
    name = "O" if "O" in outputs else next(iter(outputs))
    return result, outputs, compare(kernel.spec, name, outputs[name].astype(np.float64), answer)
