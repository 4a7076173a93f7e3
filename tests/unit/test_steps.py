"""Packages of programs with several kernels: one call runs all, on kernels that are interpreted."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashwright
from flashwright import gpu as gpus
from flashwright.author.builtin.author import write_code, write_sketch
from flashwright.author.builtin.variants import make_spec
from flashwright.build import package, steps
from flashwright.build.load import CHECK_ONLY, Kernel, unshown
from flashwright.build.plan_rules import caller_order
from flashwright.build.steps import Steps, StepsKernel
from flashwright.check.check import check, checked_program
from flashwright.grad.grad import backward as derive
from flashwright.lang.diagnostic import Failed
from flashwright.lang.parse import parse
from flashwright.lower.launch_plan import PlanTensor
from flashwright.lower.translate import translate
from flashwright.program.kernels import Kernels
from flashwright.program.program import Program
from flashwright.semantics.interpret import interpret
from tests.unit.test_several_kernels import BACKWARD, problem

torch = pytest.importorskip("torch")
from torch._subclasses import FakeTensorMode  # noqa: E402


class Interpreted(Kernel):
    """A kernel that the interpreter runs on CPU tensors."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._describe(translate(program, gpus.find("a100")).plan, self.interpret)

    def interpret(self, mode: int, *arguments: Any) -> None:
        tensors = dict(zip((t.name for t in self.plan.tensors), arguments, strict=False))
        dims = dict(zip(self.plan.dims, arguments[len(tensors) :], strict=True))
        # Where no tensor shows how many KV heads there are, there are as many as heads.
        needed = {*unshown(self.plan)} - ({"kv_heads"} if "heads" in dims else set())
        assert all(dims[name] for name in needed), "no tensor of this kernel says it"
        if mode & CHECK_ONLY:
            return
        added = {t.name for t in self.program.outputs if t.added}
        axes = {t.name: sum(caller_order(t, "bhsd"), ()) for t in self.plan.tensors}
        read = (t for t in self.plan.tensors if t.name in self.inputs or t.name in added)
        given = {t.name: self._declared(_numpy(tensors[t.name]), t) for t in read}
        known = {name: size for name, size in dims.items() if size is not None}
        for name, found in interpret(self.program, given, known).items():
            if tensors[name] is not None:
                turned = torch.from_numpy(found.astype(np.float32)).permute(axes[name])
                tensors[name].copy_(turned.reshape(tensors[name].shape))

    def bound(self, tensors: Any, dims: Any, places: Any) -> Any:
        """As the launcher does it: of later tensors it takes the memory alone."""
        forms = [t if t is None else (t.dtype, t.shape, t.stride()) for t in tensors]

        def there(form: Any, place: tuple[int, int], given: Any) -> Any:
            if form is None or place[0] < 0:
                return None
            memory, (kind, shape, strides) = given[place[0]], form
            first = memory.storage_offset() * memory.itemsize + place[1]
            empty, storage = torch.empty(0, dtype=kind), memory.untyped_storage()
            return empty.set_(storage, first // kind.itemsize, shape, strides)

        def launch(*given: Any) -> None:
            pairs = zip(forms, places, strict=True)
            self.interpret(0, *(there(f, p, given) for f, p in pairs), *dims)

        return launch

    @staticmethod
    def _declared(array: Any, tensor: PlanTensor) -> Any:
        """A caller's array with the axes of the plan, which may have heads in groups."""
        order, shape = caller_order(tensor, "bhsd"), []
        for size, parts in zip(array.shape, order, strict=True):
            inner = [tensor.axes[n].size[0] for n in parts[1:]]
            shape += [size // math.prod(inner), *inner]
        return array.reshape(shape).transpose(np.argsort(sum(order, ())))


def _numpy(tensor: Any) -> Any:
    return (tensor.float() if tensor.is_floating_point() else tensor).numpy()


@pytest.fixture(scope="module")
def backward() -> StepsKernel:
    programs = check(parse(BACKWARD.read_text())).kernels
    return StepsKernel([Interpreted(p) for p in programs], Steps.of(Kernels(programs)))


def given(q_len: int, kv_len: int) -> tuple[dict[str, Any], dict[str, Any]]:
    tensors, expected = problem(q_len, kv_len)
    made = {n: torch.from_numpy(x.astype(np.float32)) for n, x in tensors.items()}
    return {n: x if n == "LSE" else x.bfloat16() for n, x in made.items()}, expected


def test_one_call_runs_all(backward: StepsKernel) -> None:
    assert backward.inputs == ("O", "dO", "Q", "K", "V", "LSE")
    assert backward.outputs == ("dK", "dV", "dQ")
    tensors, expected = given(70, 90)
    found = backward(**tensors, outputs=("dQ", "dK", "dV"))
    for name, out in zip(("dQ", "dK", "dV"), found, strict=True):
        assert out.dtype == torch.bfloat16
        error = np.sqrt(np.mean((_numpy(out) - expected[name]) ** 2))
        assert error < 4e-3 * np.sqrt(np.mean(expected[name] ** 2))


def test_scratch_is_new_in_each_call(backward: StepsKernel) -> None:
    """A sum that began at the last call's would be twice as large."""
    tensors, _ = given(20, 20)
    first, second = (backward(**tensors, outputs="dQ")[0] for _ in range(2))
    assert torch.equal(first, second)


def test_launch_allocates_scratch(backward: StepsKernel) -> None:
    tensors, expected = given(20, 20)
    out = torch.empty(expected["dQ"].shape, dtype=torch.bfloat16)
    called = [t.name for t in backward.plan.tensors if t.name not in backward.scratch]
    listed = [{**tensors, "dQ": out}.get(name) for name in called]
    backward.launch(listed, [None] * len(backward.plan.dims))
    assert np.abs(_numpy(out) - expected["dQ"]).max() < 0.1
    backward.launch(listed, [None] * len(backward.plan.dims), check_only=True)


def test_a_sum_begins_at_zero_in_memory_of_the_caller() -> None:
    """As the torch operator gives it: new memory, with anything in it."""
    spec = make_spec("gqa", heads=4, kv_heads=2, head_dim=64, dtype="bf16", alibi=True, sink=True)
    forward = write_code(write_sketch(spec), spec, gpus.find("a100")).code
    programs = check(derive(checked_program(parse(forward))).tree).kernels
    kernel = StepsKernel([Interpreted(p) for p in programs], Steps.of(Kernels(programs)))
    assert {"dSlopes", "dSink"} <= set(kernel.zeroed) & set(kernel.outputs)
    tensors, _ = given(20, 20)
    tensors |= {"Slopes": torch.full((4,), 0.25), "Sink": torch.zeros(4)}
    shapes = {"dQ": tensors["Q"].shape, "dK": tensors["K"].shape, "dV": tensors["V"].shape}
    results = []
    for value in (float("nan"), 1e6):
        out = {n: torch.full(shape, value).bfloat16() for n, shape in shapes.items()}
        out |= {n: torch.full((4,), value) for n in ("dSlopes", "dSink")}
        kernel(**tensors, out=out)
        results.append(out)
    for name in ("dSlopes", "dSink"):
        assert torch.equal(results[0][name], results[1][name]), name
        assert results[0][name].any()


def test_an_input_that_is_missing_is_told(backward: StepsKernel) -> None:
    tensors, _ = given(20, 20)
    del tensors["LSE"]
    with pytest.raises(TypeError, match="the input `LSE` is missing"):
        backward(**tensors)


def test_a_broken_record_is_told(tmp_path: Path) -> None:
    assert steps.read(tmp_path) is None
    (tmp_path / "steps.json").write_text('{"steps": ["1"]}')
    with pytest.raises(Failed, match="there is no subfolder '1'"):
        steps.read(tmp_path)
    (tmp_path / "steps.json").write_text('{"steps": [".."]}')
    with pytest.raises(Failed, match="there is no subfolder"):
        steps.read(tmp_path)


def test_a_package_is_a_torch_operator(tmp_path: Path) -> None:
    programs = check(parse(BACKWARD.read_text())).kernels
    record = Steps.of(Kernels(programs))
    for name, program in zip(record.steps, programs, strict=True):
        (tmp_path / name).mkdir()
        for file, text in package.translated(translate(program, gpus.find("a100"))).items():
            (tmp_path / name / file).write_text(text)
    (tmp_path / "steps.json").write_text(record.dump())
    operator = flashwright.torch_operator(tmp_path)
    assert operator.inputs == ("o", "do", "q", "k", "v", "lse")
    assert operator.outputs == ("dK", "dV", "dQ")
    with FakeTensorMode():
        wide, narrow = (
            torch.empty(1, heads, 100, 64, dtype=torch.bfloat16, device="cuda") for heads in (4, 2)
        )
        lse = torch.empty(1, 4, 100, device="cuda")
        shapes = [x.shape for x in operator.op(wide, wide, wide, narrow, narrow, lse)]
    assert shapes == [narrow.shape, narrow.shape, wide.shape]
