"""Derived backward passes: the checker accepts them, and they agree with autograd in fp64."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from flashwright.author.builtin.author import write_code, write_sketch
from flashwright.author.builtin.variants import make_spec
from flashwright.check.check import check
from flashwright.gpu import find
from flashwright.grad.grad import backward
from flashwright.lang.diagnostic import Failed
from flashwright.lang.format import format_tree
from flashwright.lang.parse import parse, read
from flashwright.program.kernels import Kernels
from flashwright.program.program import Program
from flashwright.semantics.interpret import NUMPY_DTYPES, interpret_all, shape_of
from tests.example_programs import EXAMPLES

torch = pytest.importorskip("torch")

Array = Any
Tensors = Mapping[str, Any]
Reference = Callable[[Tensors, Mapping[str, int]], dict[str, Any]]
LENGTHS = ((70, 100), (130, 40), (1, 33))
LSE = """Allocate LSE in global (batch, heads, q_len) as fp32
Allocate LSE in register (BM) as fp32
Compute {value} and get LSE_register
Copy LSE (BM) in coordinate [B = batch_idx, H = head_idx, L = block_idx] from register to global
"""


def checked(text: str) -> Program:
    found = check(parse(text))
    assert found.errors == ()
    assert found.program is not None
    return found.program


def authored(variant: str, **options: Any) -> str:
    """The built-in author's program for an A100."""
    spec = make_spec(variant, dtype="bf16", **options)
    return write_code(write_sketch(spec), spec, find("a100")).code


def example(name: str, lse: str = "Smax + log(Ssum)") -> str:
    """An example, with the log-sum-exp as an output."""
    text = read(EXAMPLES / f"{name}.tl")
    return text + LSE.format(value=lse) if lse else text


def derived(text: str) -> str:
    made = format_tree(backward(checked(text)).tree)
    assert format_tree(parse(made)) == made
    return made


def agrees(text: str, reference: Reference, lengths: Any = LENGTHS, **more: Any) -> str:
    """The derived backward pass agrees with autograd of the reference. Returns its text."""
    program, made = checked(text), derived(text)
    verdict = check(parse(made))
    assert verdict.diagnostics == (), verdict.diagnostics
    kernels = Kernels(verdict.kernels)
    for q_len, kv_len in lengths:
        dims = {"batch": 2, "heads": 4, "kv_heads": 2, "q_len": q_len, "kv_len": kv_len}
        dims |= more.get("dims", {})
        inputs = _inputs(program, dims, more.get("given"))
        found, expected = _both(kernels, inputs, reference, dims)
        assert {"dQ", "dK", "dV"} <= found.keys() <= expected.keys()
        for name, gradient in found.items():
            _close(name, gradient.astype(np.float64), expected[name])
    return made


def _inputs(program: Program, dims: Mapping[str, int], given: Any) -> dict[str, Array]:
    rng = np.random.default_rng(dims["q_len"])
    made = {
        t.name: rng.standard_normal(shape_of(t, program, dims)).astype(NUMPY_DTYPES[t.dtype])
        for t in program.inputs
    }
    return made | (given(rng, dims) if given else {})


def _both(
    kernels: Kernels, inputs: dict[str, Array], reference: Reference, dims: Mapping[str, int]
) -> tuple[dict[str, Array], dict[str, Array]]:
    exact = {
        n: torch.tensor(a.astype(np.float64), requires_grad=a.dtype.kind != "i")
        for n, a in inputs.items()
    }
    outputs = reference(exact, dims)
    rng = np.random.default_rng(1)
    wanted = {t.name: t for t in kernels.inputs}
    given = dict(inputs)
    for name, value in outputs.items():
        if name in wanted:
            given[name] = value.detach().numpy().astype(NUMPY_DTYPES[wanted[name].dtype])
    dtype = NUMPY_DTYPES[wanted["dO"].dtype]
    given["dO"] = rng.standard_normal(tuple(outputs["O"].shape)).astype(dtype)
    outputs["O"].backward(torch.tensor(given["dO"].astype(np.float64)))
    found = interpret_all(kernels, given, dims)
    expected = {f"d{n}": t.grad.numpy() for n, t in exact.items() if t.grad is not None}
    return found, expected


def _close(name: str, found: Array, expected: Array) -> None:
    """Within twice the rounding of 16-bit weights and results, relative to the largest element of
    the gradient's own size."""
    assert np.isfinite(found).all(), name
    scale = np.sqrt((expected**2).mean())
    error = np.sqrt(((found - expected) ** 2).mean())
    assert error <= 8e-3 * scale + 1e-6, f"{name}: {error} of {scale}"
    assert np.abs(found - expected).max() <= 0.1 * np.abs(expected).max() + 1e-6, name


def scores(t: Tensors) -> Any:
    """Q K^T, for each query head."""
    return t["Q"] @ _heads(t["K"], t["Q"]).transpose(-1, -2)


def _heads(x: Any, like: Any) -> Any:
    return x.repeat_interleave(like.shape[1] // x.shape[1], 1)


def positions(dims: Mapping[str, int]) -> tuple[Any, Any]:
    """The positions of queries among the keys, as a column, and those of the keys."""
    q, k = torch.arange(dims["q_len"])[:, None], torch.arange(dims["kv_len"])
    return q + dims["kv_len"] - dims["q_len"], k


def softmax(s: Any, visible: Any, t: Tensors, sink: Any = None) -> dict[str, Any]:
    """Attention with these scores; rows that see no key are 0."""
    s = s.masked_fill(~visible, -torch.inf)
    logits = s if sink is None else torch.cat([s, sink], -1)
    empty = torch.isinf(logits).all(-1, keepdim=True)
    lse = torch.logsumexp(logits.masked_fill(empty, 0), -1, keepdim=True)
    p = torch.exp(s - lse).masked_fill(empty, 0)
    saved = lse.masked_fill(empty, -torch.inf).squeeze(-1)
    return {"O": p @ _heads(t["V"], t["Q"]), "LSE": saved}


def test_plain_attention() -> None:
    def attention(t: Tensors, dims: Mapping[str, int]) -> dict[str, Any]:
        return softmax(scores(t) / 8, torch.ones(1, 1, dtype=torch.bool), t)

    agrees(authored("mha", head_dim=64, heads=4), attention)


@pytest.mark.parametrize(("variant", "heads"), [("mha", 4), ("gqa", 2)])
def test_causal_attention_with_unequal_lengths(variant: str, heads: int) -> None:
    def attention(t: Tensors, dims: Mapping[str, int]) -> dict[str, Any]:
        q, k = positions(dims)
        return softmax(scores(t) / 8, k <= q, t)

    made = agrees(authored(variant, head_dim=64, heads=4, kv_heads=heads, causal=True), attention)
    assert "floor((block_idx * BN + q_len - kv_len) / BM)" in made


@pytest.mark.parametrize("causal", [False, True])
def test_sliding_window(causal: bool) -> None:
    def attention(t: Tensors, dims: Mapping[str, int]) -> dict[str, Any]:
        q, k = positions(dims)
        near = (k > q - 20) & ((k <= q) if causal else (k < q + 20))
        return softmax(scores(t) / 8, near, t)

    text = authored("gqa", head_dim=64, heads=4, kv_heads=2, causal=causal, window=20)
    agrees(text, attention, ((150, 150), (70, 200), (130, 40)))


@pytest.mark.parametrize("gpu", ["a100", "h200"])
@pytest.mark.parametrize("width", [64, 128])
def test_the_kernels_fit_the_gpu(gpu: str, width: int) -> None:
    made = derived(authored("gqa", head_dim=width, causal=True))
    verdict = check(parse(made), find(gpu))
    assert verdict.errors == (), verdict.errors


def refused(text: str) -> str:
    with pytest.raises(Failed) as failed:
        backward(checked(text))
    (found,) = failed.value.diagnostics
    assert found.code == "FW908"
    assert found.span is not None
    return f"{found.message}; {found.help}"


def test_a_program_without_the_log_sum_exp_is_refused() -> None:
    said = refused(example("unscaled", lse=""))
    assert "log-sum-exp" in said
    assert "Compute Smax + log(Ssum) and get LSE_register" in said
