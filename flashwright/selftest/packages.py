"""Kernel packages of the built-in author, and doctored copies that try to evade checks."""

from __future__ import annotations

import functools
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flashwright import gpu as gpus
from flashwright import spec as specs
from flashwright.author.builtin.author import write_code, write_sketch
from flashwright.author.builtin.variants import make_spec
from flashwright.build import package
from flashwright.build.compile import build
from flashwright.build.make import make
from flashwright.check.check import check
from flashwright.files import sha256
from flashwright.gpu import Gpu
from flashwright.lang.parse import parse
from flashwright.spec import AttentionSpec

GPU = "a100"
PLAN, BUILD, CLASSES = "launch.json", "build.json", "classes.json"
SOURCE, PTX, CUBIN = "kernel.cu", "kernel.ptx", "kernel.cubin"
OPTIONS: Mapping[str, dict[str, Any]] = {
    "mha": {"heads": 4, "head_dim": 64, "dtype": "fp16"},
    "gqa": {"heads": 8, "kv_heads": 2, "head_dim": 64, "dtype": "bf16", "causal": True},
    "mqa": {"heads": 4, "head_dim": 128, "dtype": "bf16", "causal": True},
    "mla": {"causal": True},
    "window": {"heads": 4, "head_dim": 64, "dtype": "bf16", "causal": True, "window": 100},
    "softcap": {"heads": 4, "head_dim": 64, "dtype": "fp16", "causal": True, "softcap": 20.0},
    "alibi": {"heads": 4, "head_dim": 64, "dtype": "bf16", "causal": True, "alibi": True},
    "sink": {"heads": 4, "head_dim": 64, "dtype": "bf16", "causal": True, "sink": True},
}
"""The options of each of our operators; a name that is no variant is MHA with these options."""


def spec_of(name: str) -> AttentionSpec:
    """The spec of one of our own operators."""
    variant = name if name in ("mha", "gqa", "mqa", "mla") else "mha"
    return make_spec(variant, **OPTIONS[name])


def written(name: str, folder: Path, gpu: Gpu | None = None) -> Path:
    """The package of an operator for a GPU, as `generate` writes it."""
    folder.mkdir(parents=True)
    for file, data in _files(name, gpu or gpus.find(GPU)).items():
        (folder / file).write_bytes(data if isinstance(data, bytes) else data.encode())
    return folder


@functools.cache
def _files(name: str, card: Gpu) -> Mapping[str, str | bytes]:
    spec = spec_of(name)
    code = write_code(write_sketch(spec), spec, card).code
    program = check(parse(code), card).program
    assert program is not None
    made, built = make(program, card)
    texts = {"code.tl": code, "spec.toml": specs.dump(spec)}
    return {**texts, **package.translated(made), **package.compiled(built)}


# --- doctored ones ----------------------------------------------------------------------------

ORIGINAL = "gqa"


def _changed(path: Path, edit: Callable[[Any], None]) -> None:
    told = json.loads(path.read_text())
    edit(told)
    path.write_text(json.dumps(told))


def _with_second_kernel(folder: Path, rules: Mapping[str, Any]) -> None:
    copy = folder.parent / "second"
    shutil.copytree(folder, copy)
    shutil.move(copy, folder / "second")
    (folder / CLASSES).write_text(json.dumps(rules))


def output_renamed(folder: Path) -> None:
    """Rename the output, so that nothing is compared with O."""

    def edit(plan: Any) -> None:
        for tensor in plan["tensors"]:
            tensor["name"] = {"O": "Other"}.get(tensor["name"], tensor["name"])

    _changed(folder / PLAN, edit)


def chosen_by_queries(folder: Path, by: str = "q_len") -> None:
    """A second kernel serves more queries than a trial has."""
    rules = [{"up_to": 5, "kernel": "."}, {"kernel": "second"}]
    _with_second_kernel(folder, {"by": by, "rules": rules})


def kernel_without_problems(folder: Path) -> None:
    """A second kernel begins beyond all problems."""
    rules = [{"up_to": 10**6, "kernel": "."}, {"kernel": "second"}]
    _with_second_kernel(folder, {"rules": rules})


def another_cubin(folder: Path) -> None:
    """Replace the cubin: the PTX is judged, and another kernel would run."""
    cubin = (folder / CUBIN).read_bytes()
    ptx = (folder / PTX).read_bytes()
    digests = {PTX: sha256(ptx), CUBIN: sha256(cubin)}
    (folder / BUILD).write_text(json.dumps({"schema": 1, "gpu": GPU, "artefacts": digests}))
    (folder / CUBIN).write_bytes(cubin + b"\0")


def threads_beyond_the_gpu(folder: Path) -> None:
    """The plan asks for more threads than a block has."""
    _changed(folder / PLAN, lambda plan: plan.update(threads=10**9))


def pipe_for_a_file(folder: Path) -> None:
    """A reader of the PTX would wait for ever."""
    (folder / PTX).unlink()
    os.mkfifo(folder / PTX)


def _compiled_again(folder: Path, old: str, new: str) -> None:
    source = (folder / SOURCE).read_text()
    assert old in source
    changed = source.replace(old, new)
    built = build(changed, gpus.find(GPU).arch, may_spill=True)
    (folder / SOURCE).write_text(changed)
    (folder / PTX).write_text(built.ptx)
    (folder / CUBIN).write_bytes(built.cubin)


def kernel_without_bounds(folder: Path) -> None:
    """Rows past the end of O are stored as well."""
    _compiled_again(folder, "O, q_len - block_idx * BM);", "O, BM);")


def kernel_without_mask(folder: Path) -> None:
    """Every key is seen."""
    mask = "visible[n] ? S(m, n) : -INFINITY"
    _compiled_again(folder, mask, "S(m, n)")


def kernel_without_barrier(folder: Path) -> None:
    """The barrier behind the first GEMM goes: K is overwritten while others still read it."""
    lines = (folder / SOURCE).read_text().splitlines(keepends=True)
    second = [n for n, line in enumerate(lines) if line.strip() == "__syncthreads();"][1]
    _compiled_again(folder, "".join(lines), "".join(lines[:second] + lines[second + 1 :]))


def doctored(function: str, folder: Path) -> tuple[Path, AttentionSpec]:
    """The package of one of our operators, or the doctored one of that name, and its spec."""
    if function in OPTIONS:
        return written(function, folder), spec_of(function)
    globals()[function](written(ORIGINAL, folder))
    return folder, spec_of(ORIGINAL)
