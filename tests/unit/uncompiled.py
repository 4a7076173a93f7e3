"""Packages that are translated and not compiled, and torch operators that interpret their kernels.

All of an operator but the launch is real: its registration, its rules for autograd, the backward
that is derived for it, the store.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flashwright import gpu as gpus
from flashwright import spec as specs
from flashwright.build import package, steps
from flashwright.build.reading import PTX
from flashwright.build.steps import Steps
from flashwright.check.check import check
from flashwright.files import write
from flashwright.generate import store
from flashwright.generate.backward import CODE, SPEC, BackwardOrder
from flashwright.generate.folder import RESULT
from flashwright.generate.own_program import OwnProgram
from flashwright.generate.packed import PackedOrder
from flashwright.generate.pipeline import STAGES, generate
from flashwright.gpu import Gpu
from flashwright.lang.diagnostic import Failed
from flashwright.lang.parse import parse
from flashwright.lower.translate import translate
from flashwright.program.kernels import Kernels
from flashwright.program.program import Program

CARD = gpus.find("h200")


def make_program(order: store.Order, folder: Path, verified: bool) -> None:
    """In place of store._make: a package up to its program."""
    plan = [s for s in STAGES if s.name in ("sketch", "parameters", "check")]
    reference = order.reference.encode() if order.reference is not None else None
    how = partial(generate, order.spec, order.gpu, folder, store._Quiet(), mods=order.mods)
    run = how(plan=plan, last="check", reference=reference)
    assert run.ok, run.findings


def make_forward(order: store.Order, folder: Path, verified: bool) -> None:
    """In place of store._make: the package without its code for the GPU."""
    make_program(order, folder, verified)
    _write(folder, {**_translated(_programs(folder)[0], order.gpu), **_record(order.gpu)})


def make_backward(order: BackwardOrder, folder: Path, verified: bool) -> None:
    """In place of BackwardOrder.make: the same for the derived backward."""
    told = {SPEC: specs.dump(order.spec.differentiated())} if order.spec is not None else {}
    _make_code(order.code, order.gpu, folder, told)


def make_packed(order: PackedOrder, folder: Path, verified: bool) -> None:
    """In place of PackedOrder.make: the same for packed sequences and caches."""
    text = order.code()
    _make_code(text, order.gpu, folder, {PTX: text})  # each has an operator of its own


def make_own(order: OwnProgram, folder: Path, verified: bool) -> None:
    """In place of OwnProgram.make: the same for programs of our own."""
    _make_code(order.code, order.gpu, folder, {PTX: order.code})


def _make_code(text: str, gpu: Gpu, folder: Path, told: Mapping[str, str]) -> None:
    verdict = check(parse(text))
    if verdict.errors:
        raise Failed(*verdict.errors)
    files = {CODE: text, **told, **_record(gpu), RESULT: '{"ok": true}'}
    if verdict.program is not None:
        _write(folder, {**files, **_translated(verdict.program, gpu)})
        return
    record = Steps.of(Kernels(verdict.kernels))
    files[package.STEPS] = record.dump()
    for name, program in zip(record.steps, verdict.kernels, strict=True):
        own = {**_translated(program, gpu), **{f: x for f, x in told.items() if f == PTX}}
        files |= {f"{name}/{file}": made for file, made in own.items()}
    _write(folder, files)


def _programs(folder: Path) -> tuple[Program, ...]:
    """The kernels of a package as programs."""
    return tuple(check(parse((folder / CODE).read_text())).kernels)


def _translated(program: Program, gpu: Gpu) -> dict[str, str]:
    return package.translated(translate(program, gpu))


def _record(gpu: Gpu) -> dict[str, str]:
    return {package.RECORD: f'{{"gpu": "{gpu.name}"}}'}


def _write(folder: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write(folder / name, text)


def without_compiler(patch: pytest.MonkeyPatch, cache: Path) -> None:
    """A store of its own, whose packages are not compiled."""
    patch.setenv("FLASHWRIGHT_CACHE", str(cache))
    patch.setattr(store, "_make", make_forward)
    patch.setattr(BackwardOrder, "make", make_backward)


_LAUNCHED: list[tuple[str, ...]] = []
"""One for all tests: an operator that one has registered stays."""


def interpret_operators(patch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Torch operators take CPU tensors as they take CUDA tensors, and interpret the programs. The
    outputs of each launch are appended to the list."""
    from flashwright.pytorch import bound, operator, reference
    from flashwright.serving import append, kernels
    from tests.unit.test_steps import Interpreted

    _LAUNCHED.clear()

    def load(folder: Path) -> Any:
        made = [Interpreted(program) for program in _programs(folder)]
        record = steps.read(folder)
        return made[0] if record is None else steps.StepsKernel(made, record)

    def launch(on_cpu: operator._OnCpu, *arguments: Any) -> Any:
        called = operator._OPERATORS[on_cpu.name.partition("::")[2]]
        _LAUNCHED.append(called.outputs)
        count = len(_LAUNCHED)
        found = called._on_cuda(*arguments)
        del _LAUNCHED[count:]  # the same launch, where it was kept ready
        return found

    def in_order(functions: list[Any]) -> Any:
        return lambda *tensors: [function(*tensors) for function in functions]

    def call(found: bound.Bound, *tensors: Any) -> Any:
        _LAUNCHED.append(found.outputs)
        return again(found, *tensors)

    def look(*tensors: Any) -> Any:
        return tuple((x.shape, x.stride(), x.dtype, x.device) for x in tensors)

    again = bound.Bound.__call__
    patch.setattr(kernels, "_look", lambda: look)
    patch.setattr(kernels, "_READY", {})
    patch.setattr(bound.Bound, "__call__", call)
    patch.setattr(steps, "launcher", lambda: SimpleNamespace(in_order=in_order))
    patch.setattr(operator._Package, "load", lambda package: load(package.folder))
    patch.setattr(append, "classes", SimpleNamespace(load=load))
    patch.setattr(operator._OnCpu, "__call__", launch)
    patch.setattr(reference, "obstacle", lambda spec, plan: "its kernels are interpreted")
    return _LAUNCHED
