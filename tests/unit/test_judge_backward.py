"""The verdict on backward packages, under emulation, and the parts of it that are theirs alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from flashwright import gpu as gpus
from flashwright import spec as specs
from flashwright.author.builtin.author import write_code, write_sketch
from flashwright.author.builtin.backward import BackwardTiling, with_sizes
from flashwright.author.builtin.variants import make_spec
from flashwright.check.check import checked_program
from flashwright.generate.backward import built
from flashwright.grad.grad import backward
from flashwright.judge.emulated import judge_emulated
from flashwright.judge.expected import Expected
from flashwright.judge.form import form_of
from flashwright.judge.gradients import gradients
from flashwright.judge.inputs import make_inputs
from flashwright.judge.own_spec import strict
from flashwright.judge.problems import Problem
from flashwright.judge.trial import Outcome, Trial
from flashwright.lang.diagnostic import Failed
from flashwright.lang.format import format_tree
from flashwright.lang.parse import parse
from flashwright.sandbox.candidate import Candidate
from flashwright.sandbox.process import Called, Output
from tests.unit.emulated import needs_compilers

CARD = gpus.find("a100")
FORWARD = make_spec("gqa", heads=4, kv_heads=2, head_dim=64, dtype="bf16", causal=True)
SPEC = FORWARD.differentiated()


def derived() -> str:
    forward = write_code(write_sketch(FORWARD), FORWARD, CARD).code
    made = backward(checked_program(parse(forward)))
    return format_tree(with_sizes(made.tree, BackwardTiling(32, 32, 2, 2)))


def package(folder: Path, code: str) -> Path:
    for name, data in built(parse(code), CARD, {"spec.toml": specs.dump(SPEC)}).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data if isinstance(data, bytes) else data.encode())
    return folder


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return package(tmp_path_factory.mktemp("backward"), derived())


@needs_compilers
def test_a_right_package_is_accepted(right: Path) -> None:
    found = judge_emulated(right, SPEC, seed=3, most=2)
    assert found.ok, found
    assert {case.output for case in found.cases} == {"dQ", "dK", "dV"}
    asked = {c.name: c for c in found.checks if c.passed}
    assert set(asked) >= {"fp64", "written", "repeat", "fresh", "mask", "instructions", "hazards"}
    assert "same bits of dK and dV" in asked["repeat"].question
    assert "of its limit" in found.headline
    assert 0.1 < found.record()["of_limit"] < 1


WRONG = {
    "delta doubled": ("P * (dP - Delta)", "P * (dP - 2 * Delta)"),
    "mask off by one": ("kv_idx <= q_idx + kv_len - q_len", "kv_idx < q_idx + kv_len - q_len"),
    "dK without its scale": ("dK_register * Scale", "dK_register"),
}


@pytest.mark.slow
@needs_compilers
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_package_is_rejected(name: str, tmp_path: Path) -> None:
    assert WRONG[name][0] in derived()
    found = judge_emulated(package(tmp_path, derived().replace(*WRONG[name])), SPEC, seed=3, most=2)
    assert not found.ok
    assert {o.name for o in found.offences} <= {"wrong", "mask_ignored", "key_ignored"}


@needs_compilers
def test_a_spec_without_backward_does_not_fit(right: Path) -> None:
    with pytest.raises(Failed, match="which the kernel reads"):
        judge_emulated(right, FORWARD, seed=3, most=1)


def test_the_default_lets_dq_vary_and_nothing_else() -> None:
    made = specs.AttentionSpec.make(variant="gqa", backward=True)
    assert [made.repeats(name) for name in ("dQ", "dK", "dV")] == [False, True, True]
    exact = specs.AttentionSpec.make(variant="gqa", backward=True, repeatable=True)
    assert all(exact.repeats(name) for name in ("dQ", "dK", "dV"))
    for spec in (made, exact, SPEC):
        assert specs.parse(specs.dump(spec)) == spec
        assert specs.AttentionSpec.make(**spec.model_dump()) == spec
        assert strict(spec) == (spec, ())
    assert "repeatable" not in made.slug


@pytest.mark.parametrize(
    ("output", "by", "allowed"), [("dQ", 1e-4, True), ("dQ", 0.1, False), ("dK", 1e-4, False)]
)
def test_two_runs(output: str, by: float, allowed: bool) -> None:
    rng = np.random.default_rng(0)
    arrays = {n: rng.standard_normal((1, 2, 8, 4)).astype(np.float32) for n in ("dQ", "dK", "dV")}
    other = {**arrays, output: arrays[output] * np.float32(1 + by)}
    one, two = (Called({n: Output(a, "fp32") for n, a in x.items()}) for x in (arrays, other))
    trial = Trial(None, None, SPEC, Expected(SPEC, "cpu"))  # type: ignore[arg-type]
    told = trial.varies(Outcome(Problem({}, "normal", 0)), one, two)
    assert (told == "") is allowed
    assert allowed or output in told


def test_gradients_by_torch_are_those_by_numpy() -> None:
    torch = pytest.importorskip("torch")
    options: tuple[dict[str, object], ...] = ({"window": 5}, {"softcap": 3.0, "alibi": True})
    for more in ({}, *options, {"sink": True}):
        spec = SPEC.model_copy(update=more)
        dims = {"batch": 2, "heads": 4, "kv_heads": 2, "q_len": 9, "kv_len": 7}
        made = make_inputs(spec, dims, 1, "normal")
        moved = {n: torch.from_numpy(x.astype(np.float32)) for n, x in made.items()}
        found = gradients(spec, moved, dims, torch)
        for name, one in gradients(spec, made, dims).items():
            for part in ("value", "noise", "bound"):
                a, b = getattr(one, part), getattr(found[name], part)
                np.testing.assert_allclose(b, a, rtol=1e-9, atol=1e-12)


def test_a_function_has_no_gradients_to_judge(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def attention(q, k, v): return q\n")
    candidate = Candidate.parse(f"{tmp_path / 'mine.py'}:attention")
    with pytest.raises(Failed, match="only those of a kernel package"):
        form_of(candidate, SPEC)
