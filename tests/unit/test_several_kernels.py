"""Programs of several kernels: a backward pass as the example, and what can be wrong with one."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from typer.testing import CliRunner

from flashwright import gpu as gpus
from flashwright.check.check import Checked, check
from flashwright.cli.main import app
from flashwright.lang.parse import parse
from flashwright.program.kernels import Kernels
from flashwright.semantics.interpret import Array, interpret_all

BACKWARD = Path(__file__).parents[1] / "backward.tl"


def checked(*changes: tuple[str, str]) -> Checked:
    source = BACKWARD.read_text()
    for old, new in changes:
        assert old in source, old
        source = source.replace(old, new)
    return check(parse(source))


def codes(*changes: tuple[str, str]) -> set[str]:
    return {d.code for d in checked(*changes).diagnostics}


@pytest.mark.parametrize("gpu", ["a100", "h200"])
def test_it_is_clean(gpu: str) -> None:
    assert not check(parse(BACKWARD.read_text()), gpus.find(gpu)).diagnostics


def test_what_the_caller_gives_and_gets() -> None:
    kernels = Kernels(checked().kernels)
    assert {t.name for t in kernels.inputs} == {"Q", "K", "V", "O", "dO", "LSE"}
    assert {t.name for t in kernels.scratch} == {"Delta", "dQsum"}
    assert {t.name for t in kernels.outputs} == {"dQ", "dK", "dV"}
    assert [t.name for t in kernels.zeroed] == ["dQsum"]


def test_names_belong_to_their_kernel() -> None:
    first, second, third = checked(
        ("Warps = 4\nAllocate Delta", "Warps = 2\nAllocate Delta")
    ).kernels
    assert (first.warps, second.warps, third.warps) == (2, 4, 4)
    assert ("dQ", "register") not in first.buffers
    assert set(first.tensors) == {"O", "dO", "Delta"}


@pytest.mark.parametrize(("q_len", "kv_len"), [(130, 150), (64, 64), (70, 30), (1, 100)])
def test_gradients(q_len: int, kv_len: int) -> None:
    given, expected = problem(q_len, kv_len)
    found = interpret_all(Kernels(checked().kernels), given)
    for name, wanted in expected.items():
        error = np.sqrt(np.mean((found[name].astype(np.float64) - wanted) ** 2))
        assert error <= 4e-3 * np.sqrt(np.mean(wanted**2)), name


def problem(q_len: int, kv_len: int) -> tuple[dict[str, Array], dict[str, Array]]:
    """Inputs of causal attention with grouped heads, and its gradients in fp64."""
    rng = np.random.default_rng(0)
    shapes = {"Q": (1, 4, q_len, 64), "K": (1, 2, kv_len, 64), "V": (1, 2, kv_len, 64)}
    shapes["dO"] = shapes["Q"]
    given = {n: rng.normal(size=s).astype(ml_dtypes.bfloat16) for n, s in shapes.items()}
    q, k, v, do = (x.astype(np.float64) for x in given.values())
    k, v = k.repeat(2, axis=1), v.repeat(2, axis=1)
    shown = np.arange(kv_len) <= np.arange(q_len)[:, None] + kv_len - q_len
    scores = np.where(shown, q @ k.swapaxes(2, 3) / 8, -np.inf)
    top = np.maximum(scores.max(-1, keepdims=True), -1e30)
    total = np.exp(scores - top).sum(-1, keepdims=True)
    p = np.exp(scores - top) / np.where(total > 0, total, 1)
    o, dp = p @ v, do @ v.swapaxes(2, 3)
    ds = p * (dp - (do * o).sum(-1, keepdims=True))
    with np.errstate(divide="ignore"):
        lse = np.where(total > 0, top + np.log(total), np.inf)[..., 0]
    given |= {"O": o.astype(ml_dtypes.bfloat16), "LSE": lse.astype(np.float32)}
    dk, dv = ds.swapaxes(2, 3) @ q / 8, p.swapaxes(2, 3) @ do
    grouped = (1, 2, 2, kv_len, 64)
    sums = {"dK": dk.reshape(grouped).sum(2), "dV": dv.reshape(grouped).sum(2)}
    return given, {"dQ": ds @ k / 8, **sums}


BOUND = "floor((block_idx * BN - (kv_len - q_len)) / BM)"
ADDED = (
    "  Copy dQ (BM, HeadDim) in coordinate [B = batch_idx, H = head, L = i] "
    "from register to global and accumulate dQsum\n"
)


@pytest.mark.parametrize(
    ("old", "new", "code"),
    [
        pytest.param(BOUND, f"{BOUND} + 1", "FW604", id="the first queries are missed"),
        pytest.param(ADDED, 2 * ADDED, "FW606", id="dQ is added twice"),
        pytest.param("kv_idx <= q_idx", "q_idx <= kv_idx", "FW604", id="the mask is reversed"),
        pytest.param("0:kv_len / BN", "0:floor(kv_len / BN)", "FW604", id="keys are missed"),
        pytest.param("L = i] from reg", "L = 0] from reg", "FW603", id="added elsewhere"),
        pytest.param(" and accumulate dQsum", " and get dQsum", "FW604", id="dQ is stored"),
        pytest.param("HeadDim) as fp32\nAll", "HeadDim) as bf16\nAll", "FW205", id="in bf16"),
        pytest.param("and get dS", "and accumulate dS", "FW205", id="added to a tile"),
    ],
)
def test_what_is_wrong_is_found(old: str, new: str, code: str) -> None:
    assert code in codes((old, new))


def test_the_order_of_factors_does_not_matter() -> None:
    assert not codes(("Compute S * (dP - Delta)", "Compute (dP - Delta) * S"))


def test_a_tensor_that_a_later_kernel_writes_is_not_read() -> None:
    first, second, third = BACKWARD.read_text().split("\ngrid ")[1:]
    header = BACKWARD.read_text().split("\ngrid ")[0]
    found = check(parse("\ngrid ".join([header, second, first, third]))).diagnostics
    assert [(d.code, d.message) for d in found] == [
        ("FW612", "`Delta` is read before it is written")
    ]


def test_a_kernel_does_not_read_what_it_writes() -> None:
    found = checked(("Copy dQsum (BM", "Copy dQ (BM"), ("Compute dQsum *", "Compute dQ *"))
    assert "`dQ` is read and written by one kernel" in {d.message for d in found.diagnostics}


def test_a_tensor_is_stored_by_one_kernel_only() -> None:
    text = BACKWARD.read_text()
    found = check(parse(f"{text}\ngrid {text.split('grid ')[-1]}")).diagnostics
    assert {d.code for d in found} == {"FW610"}
    assert "`dQ` is written by two kernels" in {d.message for d in found}


def test_what_no_kernel_uses_is_told() -> None:
    found = checked(("param BM = 64", "param BM = 64\nparam Spare = 3")).diagnostics
    assert [(d.code, d.message) for d in found] == [("FW203", "`Spare` is not used by any kernel")]


def test_a_wrong_statement_of_one_kernel_does_not_run() -> None:
    found = checked(("Compute dQsum * Scale and get dQ_register", "Compute dQsum")).errors
    assert ("FW205", "the result has no target") in [(d.code, d.message) for d in found]


def test_commands() -> None:
    run = CliRunner().invoke
    told = run(app, ["check", str(BACKWARD), "--gpu", "a100"]).output
    assert "3 kernels" in told
    assert "kernel at line 27: shared memory 40 of 163 KB" in told
    refused = run(app, ["translate", str(BACKWARD), "--gpu", "a100"])
    assert refused.exit_code == 1
    assert "this program has 3 kernels; the command takes one" in refused.output
