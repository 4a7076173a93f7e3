"""flash_attn_varlen_func: packed sequences in PyTorch. Without a GPU the CUDA path is tried with an
operator that interprets the program that was made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from flashwright import gpu as gpus
from flashwright.author.builtin.variants import make_spec
from flashwright.emulate.package import read_package
from flashwright.generate.backward import BackwardOrder
from flashwright.generate.packed import PackedOrder
from flashwright.judge.emulated import launch
from flashwright.spec import Batch

torch = pytest.importorskip("torch")
import flashwright  # noqa: E402
from flashwright.flex import attention as flex  # noqa: E402
from flashwright.flex.task import NoKernel, WrongKernel, spec_of  # noqa: E402
from flashwright.serving import kernels, reference, varlen  # noqa: E402
from tests.unit.emulated import launched_in_order, needs_compilers  # noqa: E402
from tests.unit.uncompiled import (  # noqa: E402
    CARD,
    interpret_operators,
    make_backward,
    make_packed,
)

MAKE, MAKE_BACKWARD = PackedOrder.make, BackwardOrder.make
QUERIES, KEYS = [3, 0, 70, 1], [9, 5, 70, 130]


@pytest.fixture(autouse=True)
def launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    monkeypatch.setenv("FLASHWRIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(PackedOrder, "make", make_packed)
    monkeypatch.setattr(BackwardOrder, "make", make_backward)
    monkeypatch.setattr(kernels, "_KERNELS", {})
    monkeypatch.setattr(flex, "_TASKS", {})
    torch.manual_seed(0)
    return interpret_operators(monkeypatch)


def starts(lengths: list[int]) -> Any:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def tensors(kind: Any = torch.bfloat16) -> list[Any]:
    shapes = ((sum(QUERIES), 4), (sum(KEYS), 2), (sum(KEYS), 2))
    made = [torch.randn(*shape, 64).to(kind) for shape in shapes]
    return [*made, starts(QUERIES), starts(KEYS), max(QUERIES), max(KEYS)]


def in_pages(size: int, sequences: list[tuple[Any, Any]]) -> tuple[Any, Any, Any]:
    """A table, and pages in any order, NaN where no key is. The rest of the table names no page."""
    counts = [-(-len(rows) // size) for rows, _ in sequences]
    order = torch.randperm(sum(counts) + 2).int()
    table = torch.full((len(counts), max(counts) + 1), 2**31 - 1, dtype=torch.int32)
    caches = [torch.full((len(order), size, 2, 64), torch.nan).bfloat16() for _ in "kv"]
    taken = 0
    for b, (count, pair) in enumerate(zip(counts, sequences, strict=True)):
        table[b, :count] = order[taken : taken + count]
        taken += count
        for cache, rows in zip(caches, pair, strict=True):
            for n, part in enumerate(rows.split(size)[:count]):
                cache[table[b, n], : len(part)] = part
    return table, *caches


def on_gpu(monkeypatch: pytest.MonkeyPatch, *given: Any, **settings: Any) -> Any:
    """The call as it is with CUDA tensors."""
    monkeypatch.setattr(flex, "card_of", lambda device: CARD)
    monkeypatch.setattr(varlen, "_on_cpu", lambda tensor: False)
    return flashwright.flash_attn_varlen_func(*given, **settings)


SETTINGS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True, "softmax_scale": 0.3},
    "window": {"causal": True, "window_size": (15, 0), "softcap": 20.0},
    "both sides": {"window_size": (7, 7)},
    "alibi": {"causal": True, "alibi_slopes": torch.tensor([0.7, 0.5, 0.3, 0.2])},
    "sink": {"causal": True, "sink": torch.tensor([1.5, -0.5, 0.2, -1.0])},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_kernel_computes_it(
    name: str, monkeypatch: pytest.MonkeyPatch, launched: list[tuple[str, ...]]
) -> None:
    given, settings = tensors(), {**SETTINGS[name], "return_softmax_lse": True}
    wanted = flashwright.flash_attn_varlen_func(*given, **settings)
    assert not launched
    found = on_gpu(monkeypatch, *given, **settings)
    assert launched == [("O", "LSE")]
    assert found[0].shape == given[0].shape
    assert found[0].is_contiguous()
    torch.testing.assert_close(found[0].float(), wanted[0].float(), atol=0.02, rtol=0.02)
    torch.testing.assert_close(found[1], wanted[1], atol=1e-4, rtol=1e-4)


def test_a_window_that_ends_at_the_query_is_causal() -> None:
    given = tensors()
    for window, same in (((-1, 0), (-1, -1)), ((15, 0), (15, 3))):
        wanted = flashwright.flash_attn_varlen_func(*given, causal=True, window_size=same)
        found = flashwright.flash_attn_varlen_func(*given, window_size=window)
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("name", ["causal", pytest.param("sink", marks=pytest.mark.slow)])
@pytest.mark.parametrize("page", [None, 16, 256])
def test_keys_in_a_cache(
    name: str, page: int | None, monkeypatch: pytest.MonkeyPatch, launched: list[tuple[str, ...]]
) -> None:
    """As if they lay behind each other; what is not a key of a sequence is NaN."""
    q, k, v, begin, begin_k, *longest = tensors()
    settings = {**SETTINGS[name], "return_softmax_lse": True}
    wanted = flashwright.flash_attn_varlen_func(q, k, v, begin, begin_k, *longest, **settings)
    used = torch.tensor(KEYS, dtype=torch.int32)
    parts = zip(k.split(KEYS), v.split(KEYS), strict=True)
    if page is None:
        room = starts([n + 7 for n in KEYS])
        caches = [torch.full((int(room[-1]), 2, 64), torch.nan).bfloat16() for _ in "kv"]
        for b, pair in enumerate(parts):
            for cache, rows in zip(caches, pair, strict=True):
                cache[room[b] : room[b] + KEYS[b]] = rows
        found = on_gpu(monkeypatch, q, *caches, begin, room, *longest, seqused_k=used, **settings)
    else:
        table, *caches = in_pages(page, list(parts))
        found = on_gpu(
            monkeypatch,
            *(q, *caches, begin, None, *longest),
            **{"seqused_k": used, "block_table": table, **settings},
        )
    assert launched == [("O", "LSE")]
    torch.testing.assert_close(found[0].float(), wanted[0].float(), atol=0.02, rtol=0.02)
    torch.testing.assert_close(found[1], wanted[1], atol=1e-4, rtol=1e-4)


def test_pytorch_computes_each_sequence_alone() -> None:
    """As attention of a rectangular batch does."""
    q, k, v, *sequences = tensors(torch.float32)
    out = flashwright.flash_attn_varlen_func(q.half(), k.half(), v.half(), *sequences, causal=True)
    rows, keys = slice(3, 73), slice(14, 84)
    one = (x[at].half().transpose(0, 1)[None] for x, at in ((q, rows), (k, keys), (v, keys)))
    alone = flashwright.attention(*one, causal=True)
    torch.testing.assert_close(out[rows].transpose(0, 1)[None], alone)


def test_a_kernel_is_made_once_and_its_first_output_checked(
    monkeypatch: pytest.MonkeyPatch, launched: list[tuple[str, ...]]
) -> None:
    checked: list[Any] = []
    right = reference.check

    def counted(*given: Any) -> None:
        checked.append(given)
        right(*given)

    monkeypatch.setattr(reference, "check", counted)
    given = tensors()
    for _ in range(2):
        on_gpu(monkeypatch, *given, causal=True)
    assert len(checked) == 1
    assert len(launched) == 2

    def wrong(*_: Any) -> None:
        raise WrongKernel("it is wrong")

    monkeypatch.setattr(reference, "check", wrong)
    monkeypatch.setattr(kernels, "_KERNELS", {})
    monkeypatch.setattr(kernels, "_READY", {})
    assert on_gpu(monkeypatch, *given, causal=True) is not None  # from the store: checked before
    with pytest.raises(WrongKernel):
        on_gpu(monkeypatch, *given)
    monkeypatch.setattr(reference, "check", right)
    assert on_gpu(monkeypatch, *given) is not None  # made again


def test_the_check_finds_a_wrong_output() -> None:
    given = tensors()
    named = dict(zip(("q", "k", "v", "startsq", "startsk"), given, strict=False))
    out = flashwright.flash_attn_varlen_func(*given, causal=True)
    spec = spec_of(*(x.transpose(0, 1)[None] for x in given[:3]), causal=True)
    reference.check(spec, named, {"o": out.transpose(0, 1)})
    out[3:73, 3] += 1
    with pytest.raises(WrongKernel, match="batch 2, head 3"):
        reference.check(spec, named, {"o": out.transpose(0, 1)})


@pytest.mark.parametrize("exactly", [False, True])
@pytest.mark.parametrize("name", ["full", "causal", "window", "alibi", "sink"])
def test_gradients_are_those_of_each_sequence(
    name: str,
    exactly: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    launched: list[tuple[str, ...]],
) -> None:
    *given, starts_q, starts_k, q_len, kv_len = tensors()
    others = (starts_q, starts_k, q_len, kv_len)
    grad = torch.randn(sum(QUERIES), 4, 64)
    settings = SETTINGS[name]
    extras = {n: x for n, x in settings.items() if isinstance(x, torch.Tensor)}

    def gradients(call: Any) -> Any:
        leaves = [x.bfloat16().requires_grad_() for x in given]
        own = {n: x.clone().requires_grad_() for n, x in extras.items()}
        out = call(*leaves, *others, **{**settings, **own}, deterministic=exactly)
        return torch.autograd.grad(out, [*leaves, *own.values()], grad.to(out.dtype))

    found = gradients(lambda *a, **s: on_gpu(monkeypatch, *a, **s))
    last = {"alibi": ("dSlopes",), "sink": ("dSink",)}.get(name, ())
    assert launched == [("O", "LSE"), ("dK", "dV", "dQ", *last)]
    programs = [p.read_text() for p in (tmp_path / "cache").rglob("code.tl")]
    assert any("at turn" in text for text in programs) is exactly
    monkeypatch.undo()
    wanted = gradients(flashwright.flash_attn_varlen_func)
    for ours, right in zip(found, wanted, strict=True):
        assert ours.shape == right.shape
        assert (ours.float() - right.float()).norm() < 0.02 * right.float().norm()


def test_the_check_of_gradients_finds_wrong_ones() -> None:
    given = tensors()
    named = dict(zip(("q", "k", "v", "startsq", "startsk"), given, strict=False))
    named["sink"] = torch.randn(4)
    names = ("q", "k", "v", "sink")
    leaves = [named[name].requires_grad_() for name in names]
    out = flashwright.flash_attn_varlen_func(*given, causal=True, sink=named["sink"])
    grad = torch.randn_like(out)
    found = torch.autograd.grad(out, leaves, grad)
    spec = spec_of(*(x.transpose(0, 1)[None] for x in given[:3]), causal=True, sink=True)
    results = {
        f"d{n}": x.transpose(0, 1) if x.ndim > 1 else x for n, x in zip(names, found, strict=True)
    }
    reference.check_gradients(spec, named, results, names, grad)
    for name, message in (("dk", "dk of sequence 0"), ("dsink", "dsink is")):
        wrong = {**results, name: results[name] * 1.1}
        with pytest.raises(WrongKernel, match=message):
            reference.check_gradients(spec, named, wrong, names, grad)


def test_pytorchs_setting_asks_for_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, *others = tensors()
    out = on_gpu(monkeypatch, q.requires_grad_(), *others, causal=True)
    torch.use_deterministic_algorithms(True)
    try:
        out.sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    programs = [p.read_text() for p in (tmp_path / "cache").rglob("code.tl")]
    assert any("at turn" in text for text in programs)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({0: torch.zeros(2, 4, 10, 64)}, ValueError, "q must have the axes"),
        ({3: torch.tensor([0, 74])}, TypeError, "cu_seqlens_q must be int32"),
        ({4: starts([1, 2])}, TypeError, r"cu_seqlens_k must be int32 of shape \(5\)"),
        ({2: torch.zeros(214, 1, 64)}, ValueError, "k and v must have"),
        ({0: torch.zeros(74, 4, 32).bfloat16()}, ValueError, "k is 64 wide and q 32"),
        ({0: [0]}, TypeError, "q must be a torch.Tensor, not list"),
        ({3: None}, TypeError, "cu_seqlens_q must be a torch.Tensor, not None"),
        ({3: starts([3, 0, 70, 2])}, ValueError, "cu_seqlens_q must rise from 0 to 74"),
        ({4: torch.tensor([0, 9, 5, 84, 214]).int()}, ValueError, "cu_seqlens_k must rise"),
        ({5: 69}, ValueError, "the longest sequence has 70: max_seqlen_q is 69"),
        ({6: 129}, ValueError, "the longest sequence has 130: max_seqlen_k is 129"),
        ({6: None}, TypeError, "max_seqlen_q and max_seqlen_k must be numbers"),
    ],
)
def test_tensors_that_do_not_fit(change: dict[int, Any], error: Any, message: str) -> None:
    given = tensors()
    for place, tensor in change.items():
        given[place] = tensor
    with pytest.raises(error, match=message):
        flashwright.flash_attn_varlen_func(*given)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"block_table": torch.zeros(4, 9, dtype=torch.int32)}, ValueError, "k must have the axes"),
        ({"seqused_k": torch.zeros(4)}, TypeError, r"seqused_k must be int32 of shape \(4\)"),
        (
            {"seqused_k": torch.tensor([9, 5, 70, 131]).int()},
            ValueError,
            "seqused_k behind cu_seqlens_k has 215: the cache ends at 214",
        ),
        ({"window_size": (1, 2, 3)}, TypeError, r"window_size must be \(left, right\)"),
        ({"sink": 0.5}, TypeError, "sink must be a torch.Tensor, not float"),
    ],
)
def test_caches_that_do_not_fit(settings: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        flashwright.flash_attn_varlen_func(*tensors(), **settings)


def test_rows_of_no_sequence_are_zeros_on_the_cpu() -> None:
    q, *others = tensors()
    wanted, logs = flashwright.flash_attn_varlen_func(q, *others, return_softmax_lse=True)
    more = torch.cat((q, torch.full_like(q[:5], torch.nan)))
    out, lse = flashwright.flash_attn_varlen_func(more, *others, return_softmax_lse=True)
    assert torch.equal(out, torch.cat((wanted, torch.zeros_like(q[:5]))))
    assert torch.equal(lse, torch.cat((logs, torch.full((4, 5), -torch.inf)), dim=1))


def test_an_output_of_fp8_is_bf16() -> None:
    given = tensors()
    narrow = [x.to(torch.float8_e4m3fn) for x in given[:3]]
    out = flashwright.flash_attn_varlen_func(*narrow, *given[3:])
    wanted = flashwright.flash_attn_varlen_func(*(x.bfloat16() for x in narrow), *given[3:])
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, wanted)


def test_keys_in_a_cache_have_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    q, *others = tensors()
    used = torch.tensor(KEYS, dtype=torch.int32)
    with pytest.raises(NoKernel, match=r"keys in a cache .* have no gradient"):
        on_gpu(monkeypatch, q.requires_grad_(), *others, seqused_k=used)


@pytest.mark.parametrize(
    "settings",
    [
        {"window_size": (7, 3)},
        {"window_size": (-1, 3)},
        {"alibi_slopes": torch.rand(4)},
        {"alibi_slopes": torch.rand(2, 4), "causal": True},
    ],
)
def test_what_no_kernel_does_is_said(settings: dict[str, Any]) -> None:
    with pytest.raises(NoKernel, match=r"window_size|alibi_slopes"):
        flashwright.flash_attn_varlen_func(*tensors(), **settings)


@needs_compilers
@pytest.mark.slow
@pytest.mark.parametrize("page", [None, 48])
def test_the_package_that_is_made_computes_it(page: int | None, tmp_path: Path) -> None:
    """Compiled, and under emulation. A tile has pieces of several pages, NaN behind the keys."""
    spec = make_spec("gqa", heads=4, kv_heads=2, head_dim=64, dtype="bf16", causal=True)
    batch = Batch(lengths=page is not None, page=page)
    MAKE(PackedOrder(spec.of_sequences(batch), CARD), tmp_path / "made", False)
    given = tensors()
    wanted = flashwright.flash_attn_varlen_func(*given, causal=True, return_softmax_lse=True)
    arrays = {"StartsQ": given[3].numpy()}
    sizes = {"q_tokens": sum(QUERIES), "kv_tokens": sum(KEYS)}
    if page is None:
        arrays["StartsK"] = given[4].numpy()
    else:
        keys = zip(*(x.split(KEYS) for x in given[1:3]), strict=True)
        table, *given[1:3] = in_pages(page, list(keys))
        arrays |= {"Table": table.numpy(), "LengthsK": np.array(KEYS, np.int32)}
        sizes |= {"pages": len(given[1]), "max_pages": table.shape[1]}
    for name, x in zip(("Q", "K", "V"), given, strict=False):
        bits = x.transpose(-3, -2).float().numpy().astype(ml_dtypes.bfloat16)
        arrays[name] = np.ascontiguousarray(bits)
    out = {
        "O": np.zeros((4, sum(QUERIES), 64), ml_dtypes.bfloat16),
        "LSE": np.zeros((4, sum(QUERIES)), np.float32),
    }
    dims = {"batch": 4, "heads": 4, "kv_heads": 2, "q_len": max(QUERIES), "kv_len": max(KEYS)}
    package = read_package(tmp_path / "made")
    result = launch(package, {**arrays, **out}, dims | sizes, "eager", 600.0)
    assert not result.findings
    found = torch.from_numpy(out["O"].astype(np.float32)).transpose(0, 1)
    torch.testing.assert_close(found, wanted[0].float(), atol=0.02, rtol=0.02)
    torch.testing.assert_close(torch.from_numpy(out["LSE"]), wanted[1], atol=1e-4, rtol=1e-4)


@needs_compilers
@pytest.mark.slow
@pytest.mark.parametrize("gpu", ["h200"])
def test_the_deterministic_backward_that_is_made_computes_it(gpu: str, tmp_path: Path) -> None:
    """Compiled, and under emulation: with turns in each sequence, and the sums of a sink."""
    spec = make_spec("gqa", heads=4, kv_heads=2, head_dim=64, dtype="bf16", causal=True, sink=True)
    names = ("q", "k", "v", "sink")
    order = PackedOrder(spec.of_sequences(Batch()), gpus.find(gpu)).backward(names, True)
    MAKE_BACKWARD(order, tmp_path / "made", False)
    *given, starts_q, starts_k, q_len, kv_len = tensors()
    given.append(torch.randn(4))
    leaves = [x.requires_grad_() for x in given]
    every = (*leaves[:3], starts_q, starts_k, q_len, kv_len)
    out, lse = flashwright.flash_attn_varlen_func(
        *every, causal=True, sink=leaves[3], return_softmax_lse=True
    )
    grad = torch.randn_like(out)
    wanted = dict(zip(names, torch.autograd.grad(out, leaves, grad), strict=True))
    rows = {"Q": given[0], "K": given[1], "V": given[2], "O": out, "dO": grad}
    arrays = {"StartsQ": starts_q.numpy(), "StartsK": starts_k.numpy()}
    arrays |= {"LSE": lse.detach().numpy(), "Sink": given[3].detach().numpy()}
    for name, x in rows.items():
        bits = x.detach().transpose(0, 1).float().numpy().astype(ml_dtypes.bfloat16)
        arrays[name] = np.ascontiguousarray(bits)
    dims = {"batch": 4, "heads": 4, "kv_heads": 2, "q_len": q_len, "kv_len": kv_len}
    dims |= {"q_tokens": sum(QUERIES), "kv_tokens": sum(KEYS)}
    found = launched_in_order(tmp_path / "made", arrays, dims)
    for name, right in wanted.items():
        ours = torch.from_numpy(found[f"d{name.title()}"].astype(np.float32))
        right = right.transpose(0, 1) if right.ndim > 1 else right
        assert (ours - right.float()).norm() < 0.02 * right.float().norm(), name
