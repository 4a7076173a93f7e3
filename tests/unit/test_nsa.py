"""flashwright.nsa: native sparse attention. Without a GPU the CUDA path is tried with operators
that interpret the programs that were made."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from flashwright import gpu as gpus
from flashwright.author.builtin.variants import make_spec
from flashwright.check.check import check
from flashwright.generate.block_lists import HeaviestBlocks, MergedLists
from flashwright.generate.own_program import OwnProgram
from flashwright.generate.selected import (
    BlockWeights,
    PackedWeights,
    SelectedBackward,
    SelectedForward,
    SelectedGated,
    SelectedKeys,
    SelectedQueries,
)
from flashwright.lang.format import format_tree
from flashwright.lang.parse import parse
from flashwright.lower.translate import translate
from flashwright.program.kernels import Kernels
from flashwright.semantics.interpret import interpret_all

torch = pytest.importorskip("torch")
import flashwright  # noqa: E402
from flashwright.flex import attention as flex  # noqa: E402
from flashwright.flex.task import Task, WrongKernel  # noqa: E402
from flashwright.serving import kernels  # noqa: E402
from flashwright.sparse import choose, lists, nsa, reference, selection  # noqa: E402
from tests.share import some  # noqa: E402
from tests.unit.emulated import launched_in_order, needs_compilers  # noqa: E402
from tests.unit.uncompiled import CARD, interpret_operators, make_own, without_compiler  # noqa: E402

BLOCK = 16
LISTS = ("Tile", "Named", "Count")


def tensors(tokens: int, heads: int, kv_heads: int, kind: Any = torch.float32) -> list[Any]:
    torch.manual_seed(tokens)
    shapes = ((heads, 32), (kv_heads, 32), (kv_heads, 48))
    rows = [torch.randn(2, tokens, *shape).to(kind) for shape in shapes]
    return [*rows, *(torch.rand(2, tokens, heads).to(kind) for _ in range(3))]


def weighted(scores: list[Any], values: list[Any]) -> Any:
    """Softmax over a list of scores, and the sum of the values."""
    if not scores:
        return 0.0
    return torch.stack(scores).softmax(0) @ torch.stack(values)


def by_hand(given: list[Any], blocks: Any, window: int) -> Any:
    """A query at a time, in loops."""
    q, k, v, *gates = given
    out = torch.zeros(*q.shape[:3], v.shape[3])
    group, scale = q.shape[2] // k.shape[2], q.shape[3] ** -0.5
    for b, t, h in torch.cartesian_prod(*(torch.arange(n) for n in q.shape[:3])).tolist():
        row, keys, values = q[b, t, h] * scale, k[b, :, h // group], v[b, :, h // group]
        whole = [slice(n, n + BLOCK) for n in range(0, t + 2 - BLOCK, BLOCK)]
        read = [n * BLOCK + i for n in blocks[b, t, h // group] if n >= 0 for i in range(BLOCK)]
        read = [n for n in read if n <= t]
        latest = list(range(max(0, t - window + 1), t + 1))
        pools = [keys[s].mean(0) for s in whole], [values[s].mean(0) for s in whole]
        parts = [weighted([row @ x for x in pools[0]], pools[1])]
        parts += [
            weighted([row @ keys[n] for n in p], [values[n] for n in p]) for p in (read, latest)
        ]
        out[b, t, h] = sum(g[b, t, h] * part for g, part in zip(gates, parts, strict=True))
    return out


@pytest.mark.parametrize(("tokens", "heads", "kv_heads"), [(63, 4, 1), (40, 2, 2), (5, 4, 2)])
def test_it_is_the_sum_of_its_branches(tokens: int, heads: int, kv_heads: int) -> None:
    given = tensors(tokens, heads, kv_heads)
    how = {"block_size": BLOCK, "block_counts": 3, "window_size": 10}
    out, blocks = flashwright.nsa(*given, **how, return_block_indices=True)
    assert blocks.shape == (2, tokens, kv_heads, 3)
    torch.testing.assert_close(out, by_hand(given, blocks, 10), atol=1e-5, rtol=1e-5)
    assert torch.equal(flashwright.nsa(*given, blocks, **how), out)


def test_the_blocks_that_matter_most_are_chosen() -> None:
    """Its own, the first, the one before, then those that hold what the query looks for."""
    q, k, v, *gates = tensors(8 * BLOCK, 4, 1)
    k[:, 3 * BLOCK : 4 * BLOCK] += 5 * q[:, -1:, :2].sum(2, keepdim=True)
    for count, wanted in ((1, {7}), (2, {7, 0}), (3, {7, 0, 6}), (4, {7, 0, 6, 3})):
        how = {"block_size": BLOCK, "block_counts": count, "return_block_indices": True}
        _, blocks = flashwright.nsa(q, k, v, *gates, **how)
        assert set(blocks[0, -1, 0].tolist()) == wanted
        own = torch.arange(8 * BLOCK) // BLOCK
        assert (blocks <= own[None, :, None, None]).all()
    assert blocks[0, 0, 0].tolist() == [0, -1, -1, -1]
    counts = torch.tensor([1, 4]).repeat(2, 4 * BLOCK)[..., None]
    _, fewer = flashwright.nsa(q, k, v, *gates, **{**how, "block_counts": counts})
    assert torch.equal(fewer[:, 1::2], blocks[:, 1::2])
    assert torch.equal(fewer[:, ::2, :, 0], blocks[:, ::2, :, 0])
    assert (fewer[:, ::2, :, 1:] == -1).all()


def test_many_queries_are_looked_at_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    given, how = tensors(70, 4, 2), {"block_size": BLOCK, "block_counts": 3, "window_size": 10}
    whole = flashwright.nsa(*given, **how)
    monkeypatch.setattr(selection, "_ROOM", 100)
    monkeypatch.setattr(reference, "_ROOM", 1)
    torch.testing.assert_close(flashwright.nsa(*given, **how), whole)


def test_blocks_that_are_named_twice_or_not_there() -> None:
    """Twice they count twice, as in the loop over them; behind the query not at all."""
    given = tensors(40, 2, 2)
    blocks = torch.tensor([0, 0, 1, 2, 7, -1]).expand(2, 40, 2, 6)
    how = {"block_size": BLOCK, "window_size": 0}
    out = flashwright.nsa(*given[:3], None, given[4], None, blocks, **how)
    zeros = torch.zeros_like(given[3])
    wanted = by_hand([*given[:3], zeros, given[4], zeros], blocks.clamp(max=2), 1)
    last = blocks == 7
    assert last.any()
    once = by_hand([*given[:3], zeros, given[4], zeros], torch.where(last, -1, blocks), 1)
    torch.testing.assert_close(out, once, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(once, wanted)


def test_gradients_on_the_cpu() -> None:
    given = [x[:1, :20, :2].double().requires_grad_() for x in tensors(20, 2, 2)]
    blocks = torch.tensor([0, 1, 2, -1]).expand(1, 20, 2, 4)

    def call(*leaves: Any) -> Any:
        return flashwright.nsa(*leaves, blocks, block_size=8, window_size=5)

    assert torch.autograd.gradcheck(call, given, fast_mode=True)


def test_a_compression_that_is_trained() -> None:
    """In place of the means: in the output, in the choice, with gradients of its own."""
    given, how = tensors(6 * BLOCK, 2, 2), {"block_size": BLOCK, "block_counts": 4}
    weights = torch.zeros(BLOCK, requires_grad=True)

    def compress(k: Any, v: Any) -> tuple[Any, Any]:
        shares = weights.softmax(0)[:, None, None]
        return (k * shares).sum(2), (v * shares).sum(2)

    out = flashwright.nsa(*given, **how, compress=compress)
    torch.testing.assert_close(out, flashwright.nsa(*given, **how))
    out.sum().backward()
    assert weights.grad.abs().max() > 0
    k = given[1]
    k[:, 2 * BLOCK] += 40 * given[0][:, -1]
    how |= {"return_block_indices": True}
    last = flashwright.nsa(*given, **how, compress=lambda k, v: (k[:, :, 0], v[:, :, 0]))[1][0, -1]
    assert (last == 2).any(1).all()
    with pytest.raises(ValueError, match=r"compress must give k of the shape \(2, 6, 2, 32\)"):
        flashwright.nsa(*given, **how, compress=lambda k, v: (k.mean(3), v.mean(2)))


def test_sequences_of_a_packed_batch_are_computed_alone() -> None:
    given = [x[:1] for x in tensors(60, 4, 2)]
    how = {"block_size": BLOCK, "block_counts": 3, "window_size": 10}
    starts = torch.tensor([0, 17, 17, 60])
    out, blocks = flashwright.nsa(*given, **how, cu_seqlens=starts, return_block_indices=True)
    parts = [flashwright.nsa(*(x[:, s] for x in given), **how) for s in (slice(17), slice(17, 60))]
    assert torch.equal(out, torch.cat(parts, dim=1))
    assert torch.equal(flashwright.nsa(*given, blocks, **how, cu_seqlens=starts), out)


def test_torch_compile_leaves_its_graph_for_it() -> None:
    given = tensors(40, 2, 2)

    def layer(*x: Any) -> Any:
        return flashwright.nsa(*(2 * y for y in x), block_size=BLOCK) + 1

    torch.testing.assert_close(torch.compile(layer, backend="eager")(*given), layer(*given))


# --- by kernels ---------------------------------------------------------------------------------


@pytest.fixture
def on_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """CPU tensors take the way of CUDA tensors, into kernels that are interpreted."""
    without_compiler(monkeypatch, tmp_path / "cache")
    monkeypatch.setattr(OwnProgram, "make", make_own)
    monkeypatch.setattr(kernels, "_KERNELS", {})
    monkeypatch.setattr(flex, "_TASKS", {})
    monkeypatch.setattr(flex, "_KERNELS", {})
    monkeypatch.setattr(flex, "card_of", lambda device: CARD)
    monkeypatch.setattr(nsa, "_on_cpu", lambda tensor: False)
    monkeypatch.setattr(nsa._Call, "_latest", lambda call, given: given.q[..., :1] * 0)
    nsa._task.cache_clear()
    return interpret_operators(monkeypatch)


def half(tokens: int, heads: int, kv_heads: int) -> list[Any]:
    return [x.bfloat16() for x in tensors(tokens, heads, kv_heads)]


RIGHT = SelectedBackward.code.fget
WRONG = property(lambda order: RIGHT(order).replace("dKsum_register * Scale", "dKsum_register * 2"))
HOW = {"block_size": 64, "block_counts": 2, "window_size": 0}


@pytest.mark.parametrize("heads", [4, 2])
def test_kernels_compute_it(
    heads: int, on_gpu: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v, *gates = half(150, heads, 2)
    v = torch.cat((v, v), dim=3)[..., :64]
    out, blocks = flashwright.nsa(q, k, v, *gates, **HOW, return_block_indices=True)
    merged = [LISTS] * (heads == 2)  # of more queries in a tile by PyTorch
    assert on_gpu == [("O", "LSE"), ("Sums",), ("Found",), *merged, ("O", "LSE")]
    monkeypatch.setattr(nsa, "_on_cpu", lambda tensor: True)
    _, right = flashwright.nsa(q, k, v, *gates, **HOW, return_block_indices=True)
    assert torch.equal(blocks, right)
    wanted = flashwright.nsa(q, k, v, *gates, blocks, **HOW)
    torch.testing.assert_close(out.float(), wanted.float(), atol=0.02, rtol=0.02)


def test_a_wrong_kernel_is_found(
    on_gpu: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = reference.selected
    monkeypatch.setattr(reference, "selected", lambda *a: real(*a) + 0.5)
    q, k, v, *gates = half(150, 4, 2)
    with pytest.raises(WrongKernel, match="batch 0, head"):
        flashwright.nsa(q, k, v[..., :32], *gates, **HOW)


def test_wrong_weights_are_found(
    on_gpu: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = BlockWeights.code.fget  # type: ignore[attr-defined]
    wrong = property(lambda order: right(order).replace("Compute S * Scale", "Compute S * 0.1"))
    monkeypatch.setattr(BlockWeights, "code", wrong)
    with pytest.raises(WrongKernel, match="the weights of blocks of query"):
        flashwright.nsa(*half(150, 4, 2), **HOW)


def test_wrong_choices_are_found(
    on_gpu: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = HeaviestBlocks.code.fget  # type: ignore[attr-defined]
    wrong = property(lambda order: right(order).replace("rowmax(S)", "-rowmax(-S)"))
    monkeypatch.setattr(HeaviestBlocks, "code", wrong)
    with pytest.raises(WrongKernel, match="the blocks of query"):
        flashwright.nsa(*half(330, 4, 2), **{**HOW, "block_counts": 4})


def test_the_heaviest_blocks_by_a_kernel(
    on_gpu: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch.topk chooses them; of those that are as heavy, the first ones. There may be fewer
    blocks than are wanted, and more columns than blocks."""
    spec = make_spec("nsa-selected", heads=4, kv_heads=2, head_dim=64, dtype="bf16")
    pick = partial(choose.pick, Task(spec, CARD))
    own = torch.arange(70) // 3
    weights = torch.rand(1, 2, 70, 24).argsort(-1).half() / 24
    for most in (1, 2, 3, 9):
        found, right = pick(weights, own, most), selection.heaviest(weights, own, most)
        assert torch.equal(found.long().sort(-1).values, right.sort(-1).values)
    weights[..., 4:20] = 0.5
    found = pick(weights, own, 9)[0, 0, -1].tolist()
    better = [n for n in (1, 2, 3, 20, 21) if weights[0, 0, -1, n] > 0.5]
    rest = sorted(set(range(4, 20)))[: 6 - len(better)]
    assert found[:3] == [23, 0, 22]
    assert set(found[3:]) == {*better, *rest}


def test_lists_of_neighbouring_queries_by_a_kernel(on_gpu: list[tuple[str, ...]]) -> None:
    """As PyTorch makes them: sorted, each block once for those that name it, twice if one names it
    twice. Sequences begin within a group of queries; blocks behind a query are left out."""
    spec = make_spec("nsa-selected", heads=32, kv_heads=2, head_dim=64, dtype="bf16")
    task = Task(spec, CARD)
    forward = SelectedForward(CARD, spec)
    assert forward.queries == 4
    place, first = torch.arange(150), (torch.arange(150) >= 70) * 70
    blocks = torch.randint(-1, 3, (1, 150, 2, 6)).int()
    found = choose.merged(task, forward, blocks, place, first, 150)
    right = lists.merged(lists.tiles_of(blocks, 64, 64, place, first), 4)
    assert on_gpu == [LISTS]
    assert torch.equal(found["count"], right["count"])
    assert int(found["count"].max()) > 4  # some are listed twice
    listed = torch.arange(24) < found["count"][..., None]
    for name in ("tile", "named"):
        assert torch.equal(found[name][..., :24][listed], right[name][..., :24][listed]), name


def test_wrong_lists_are_found(
    on_gpu: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = MergedLists.code.fget  # type: ignore[attr-defined]
    wrong = property(lambda order: right(order).replace("> Listed, 1, 0)", "> Listed, 0, 0)"))
    monkeypatch.setattr(MergedLists, "code", wrong)
    spec = make_spec("nsa-selected", heads=32, kv_heads=2, head_dim=64, dtype="bf16")
    blocks, place = torch.zeros(1, 20, 2, 2).int(), torch.arange(20)
    with pytest.raises(WrongKernel, match="is not PyTorch's"):
        choose.merged(Task(spec, CARD), SelectedForward(CARD, spec), blocks, place, place * 0, 20)


@pytest.mark.parametrize("sizes", some([(4, 64), (4, 128), (10, 48), (2, 16)]))
def test_gradients_by_kernels(
    sizes: tuple[int, int], on_gpu: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block of 128 keys is two tiles. Some queries are before the first key."""
    heads, block = sizes
    q, k, v, *_ = half(150, heads, 2)
    blocks = torch.randint(-1, 3, (2, 150, 2, 2))
    grad = torch.randn(2, 150, heads, 32).bfloat16()

    def gradients() -> Any:
        leaves = [x.detach().requires_grad_() for x in (q, k, v[..., :32])]
        out = flashwright.nsa(*leaves, block_indices=blocks, block_size=block)
        return torch.autograd.grad(out, leaves, grad)

    found = gradients()
    assert on_gpu[-2:] == [("O", "LSE"), ("dK", "dV", "dQ")]
    monkeypatch.setattr(nsa, "_on_cpu", lambda tensor: True)
    for ours, right in zip(found, gradients(), strict=True):
        assert (ours.float() - right.float()).norm() < 0.02 * right.float().norm()


def test_packed_sequences_share_kernels(
    on_gpu: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks are counted from the beginning of each sequence; a tile may have queries of two."""
    q, k, v, *_ = (x[:1] for x in half(150, 4, 2))
    starts = torch.tensor([0, 37, 37, 129, 150])
    blocks = torch.randint(-1, 3, (1, 150, 2, 3))
    grad = torch.randn(1, 150, 4, 32).bfloat16()

    def results() -> list[Any]:
        leaves = [x.detach().requires_grad_() for x in (q, k, v[..., :32])]
        out = flashwright.nsa(*leaves, block_indices=blocks, cu_seqlens=starts)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad)]

    found = results()
    assert on_gpu == [("O", "LSE"), ("dK", "dV", "dQ")]
    monkeypatch.setattr(nsa, "_on_cpu", lambda tensor: True)
    rows = [slice(0, 37), slice(37, 129), slice(129, 150)]
    given = (q, k, v[..., :32])
    alone = [flashwright.nsa(*(x[:, r] for x in given), block_indices=blocks[:, r]) for r in rows]
    torch.testing.assert_close(found[0], torch.cat(alone, dim=1), atol=0.02, rtol=0.02)
    for ours, right in zip(found, results(), strict=True):
        assert (ours.float() - right.float()).norm() < 0.02 * right.float().norm()


@pytest.mark.slow
@pytest.mark.parametrize("heads", [4, 2])
def test_packed_sequences_share_what_has_to_do_with_whole_blocks(
    heads: int, on_gpu: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compressed branch and the choice of blocks are a launch each; blocks are counted in each
    sequence, one of which has none that is whole."""
    q, k, v, *gates = (x[:1] for x in half(170, heads, 2))
    starts, how = torch.tensor([0, 60, 60, 70, 170]), {**HOW, "block_size": 16}
    counts = torch.randint(1, 5, (1, 170, 2))
    grad = torch.randn(1, 170, heads, 32).bfloat16()

    def results() -> list[Any]:
        leaves = [x.detach().requires_grad_() for x in (q, k, v[..., :32], gates[0])]
        more = {**how, "block_counts": counts, "cu_seqlens": starts}
        out, blocks = flashwright.nsa(*leaves, gates[1], **more, return_block_indices=True)
        return [blocks, out.detach(), *torch.autograd.grad(out, leaves, grad)]

    found = results()
    merged = [LISTS] * (heads == 2)
    assert on_gpu[:4] == [("O", "LSE"), ("Sums",), ("Found",), *merged, ("O", "LSE")][:4]
    monkeypatch.setattr(nsa, "_on_cpu", lambda tensor: True)
    right = results()
    same = (found[0].sort(-1).values == right[0].sort(-1).values).all(-1)
    assert (
        same.float().mean() > 0.99
    )  # the others have two blocks that are as heavy, but for rounding
    for ours, wanted in zip(found[1:], right[1:], strict=True):
        assert (ours.float() - wanted.float()).norm() < 0.03 * wanted.float().norm()


def test_wrong_gradients_are_found(
    on_gpu: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v, *gates = half(70, 4, 2)
    out = flashwright.nsa(q, k.requires_grad_(), v[..., :32], *gates, **HOW)
    monkeypatch.setattr(SelectedBackward, "code", WRONG)
    with pytest.raises(WrongKernel, match="dk is"):
        out.float().sum().backward()


def test_deterministic_gradients(
    on_gpu: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """dQ is a kernel of its own, and a thread block has all queries of a block of keys."""
    q, k, v, *gates = half(150, 4, 2)
    leaves = [x.requires_grad_() for x in (q, k, v[..., :32].detach())]
    grad = torch.randn(2, 150, 4, 32).bfloat16()
    out, blocks = flashwright.nsa(*leaves, None, *gates[1:], **HOW, return_block_indices=True)
    torch.use_deterministic_algorithms(True)
    monkeypatch.setattr(nsa, "_MOST_QUERIES", 1)
    try:
        found = torch.autograd.grad(out, leaves, grad)
    finally:
        torch.use_deterministic_algorithms(False)
    assert on_gpu[4:] == [("dK", "dV"), ("dQ",)]
    monkeypatch.setattr(nsa, "_on_cpu", lambda tensor: True)
    wanted = flashwright.nsa(*leaves, None, *gates[1:], blocks, **HOW)
    for ours, right in zip(found, torch.autograd.grad(wanted, leaves, grad), strict=True):
        assert (ours.float() - right.float()).norm() < 0.02 * right.float().norm()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": torch.zeros(2, 40, 32)}, ValueError, "q must have the axes"),
        ({"q": torch.zeros(2, 40, 3, 32)}, ValueError, "the 2 of k do not divide"),
        ({"q": torch.zeros(2, 41, 4, 32)}, ValueError, "queries are the last"),
        ({"k": torch.zeros(2, 40, 2, 32).half()}, TypeError, "k must be torch.float32"),
        ({"v": torch.zeros(2, 30, 2, 48)}, ValueError, "k and v the same tokens"),
        ({"g_slc": torch.zeros(2, 40)}, ValueError, "g_slc must have the shape"),
        ({"block_indices": torch.zeros(2, 40, 4, 3)}, ValueError, "block_indices must have"),
        ({"block_indices": [0]}, TypeError, "block_indices must be a torch.Tensor"),
        ({"block_counts": 0}, ValueError, "block_counts must be at least 1"),
        ({"block_counts": 2.5}, TypeError, "block_counts must be a number or a tensor"),
        ({"block_size": 0}, ValueError, "block_size must be a whole number from 1 on"),
        ({"window_size": -1}, ValueError, "window_size must be a whole number from 0 on"),
        ({"cu_seqlens": torch.tensor([0, 40])}, ValueError, "and batch be 1"),
        ({"cu_seqlens": torch.tensor([40])}, ValueError, "must rise from 0 to 40"),
    ],
)
def test_what_does_not_fit_is_said(change: dict[str, Any], error: Any, message: str) -> None:
    names = ("q", "k", "v", "g_cmp", "g_slc", "g_swa")
    given = {**dict(zip(names, tensors(40, 4, 2), strict=True)), **change}
    with pytest.raises(error, match=message):
        flashwright.nsa(**given)


def heads_first(x: Any) -> Any:
    """(batch, tokens, kv heads, group, ...) as (batch, heads, tokens, ...), as a caller has it."""
    return np.ascontiguousarray(np.moveaxis(x.reshape(*x.shape[:2], -1, *x.shape[4:]), 1, 2))


def emulated(order: OwnProgram, given: dict[str, Any], dims: dict[str, int], folder: Path) -> None:
    """The package that is made computes what its program does."""
    order.make(folder, False)
    programs = Kernels(tuple(check(parse(order.code)).kernels))
    wanted = interpret_all(programs, given, dims)
    by_rows = {name for name, x in given.items() if x.shape[:2] == (1, dims["q_len"])}
    callers = {n: heads_first(x) if n in by_rows else x for n, x in given.items()}
    found = launched_in_order(folder, callers, dims)
    for name, right in wanted.items():
        right = heads_first(right) if right.shape[:2] == (1, dims["q_len"]) else right
        ours, right = (x.astype(np.float32) for x in (found[name], right))
        seen = np.isfinite(right)
        assert (ours[~seen] == right[~seen]).all()
        error = np.linalg.norm(ours[seen] - right[seen])
        assert error < 0.01 * np.linalg.norm(right[seen]), name


@pytest.mark.parametrize("widths", [(192, 128), pytest.param((256, 256), marks=pytest.mark.slow)])
def test_wide_heads_have_kernels_on_hopper(widths: tuple[int, int]) -> None:
    card, sizes = gpus.find("h200"), dict(zip(("head_dim", "v_dim"), widths, strict=True))
    spec = make_spec("nsa-selected", heads=8, kv_heads=2, dtype="bf16", **sizes)
    backward = (SelectedBackward, SelectedKeys, SelectedQueries)
    for program in (SelectedForward, SelectedGated, BlockWeights, *backward):
        checked = check(parse(program(card, spec).code), card)
        assert not [d for d in checked.diagnostics if d.severity == "error"]
        for kernel in checked.kernels:
            products = translate(kernel, card).report.products
            assert products == "wgmma" or "GEMM" not in format_tree(kernel.tree)


@needs_compilers
@pytest.mark.slow
@pytest.mark.parametrize("gpu", ["h200", "a100"])
def test_the_kernels_that_are_made_compute_it(gpu: str, tmp_path: Path) -> None:
    """Compiled, and under emulation. A group of queries shares some blocks, one names none, and
    blocks are cut up into items."""
    settings = {"heads": 8, "kv_heads": 2, "head_dim": 64, "dtype": "bf16"}
    spec, card = make_spec("nsa-selected", **settings), gpus.find(gpu)
    tokens, keys = 40, 150
    blocks = torch.tensor([2, -1, 0]).repeat(1, tokens, 2, 1)
    blocks[:, 20:, :, 1], blocks[:, 3] = 1, -1
    blocks[:, 7, 0] = 0  # three times
    place = selection.positions(tokens, keys, "cpu")
    tiles = lists.tiles_of(blocks, 64, 64, place, torch.zeros_like(place))
    rng = np.random.default_rng(0)
    rows, columns = (1, tokens, 2, 4), (1, 2, keys)
    given = {
        name: rng.standard_normal((*shape, 64)).astype(ml_dtypes.bfloat16)
        for name, shape in {"Q": rows, "K": columns, "V": columns, "dO": rows}.items()
    }

    def listed(found: dict[str, Any]) -> dict[str, Any]:
        return {name.capitalize(): x.numpy() for name, x in found.items()}

    dims = {"batch": 1, "heads": 8, "kv_heads": 2, "q_len": tokens, "kv_len": keys}
    forward = SelectedForward(card, spec)
    read = listed(lists.merged(tiles, forward.queries))
    grad, sizes = given.pop("dO"), {"tiles": read["Tile"].shape[2], "slots": read["Tile"].shape[3]}
    emulated(forward, given | read, dims | sizes, tmp_path / "forward")

    gate = {"Gate": rng.random(rows).astype(ml_dtypes.bfloat16)}
    gated = SelectedGated(card, spec)
    emulated(gated, given | gate | read, dims | sizes, tmp_path / "gated")

    choice = BlockWeights(card, spec)
    means = {"Q": given["Q"], "K": given["K"][:, :, ::50]}
    own = np.eye(choice.columns)[np.arange(tokens) % choice.queries][:, None]
    means["Own"] = np.repeat(own, 4, axis=1).astype(np.float16)
    means["LSE"] = rng.standard_normal(rows).astype(np.float32) + 4
    emulated(choice, means, dims | {"kv_len": 3, "tokens": keys}, tmp_path / "weights")

    given |= {"dO": grad, "LSE": rng.standard_normal(rows).astype(np.float32) + 4}
    given["Delta"] = rng.standard_normal(rows).astype(np.float32)
    given["LSE"][0, 3] = -np.inf  # as in a query that names no block
    items = listed(lists.by_tile(tiles, torch.arange(3) * 64, 16))
    sizes |= {"items": items["Begin"].shape[2], "entries": items["Queries"].shape[2]}
    orders = (SelectedBackward(card, spec), SelectedKeys(card, spec))
    for number, order in enumerate((*orders, SelectedQueries(card, spec))):
        tensors = read if isinstance(order, SelectedQueries) else items
        used = {n: x for n, x in sizes.items() if f" {n}" in order.code.split("\ndim")[1]}
        emulated(order, given | tensors, dims | used, tmp_path / f"{number}")

    of_blocks = rng.random((1, 2, tokens, 72)).astype(np.float16)
    stands = (np.arange(tokens) * 2).astype(np.int32)
    picks = {"Weights": of_blocks, "Own": stands, "Far": stands[-1:]}
    heavy = HeaviestBlocks(card)
    emulated(heavy, picks, dims | {"kv_len": 72, "slots": 16}, tmp_path / "heaviest")

    merging = MergedLists(card, 64, 4, 8)
    names = {"Blocks": rng.integers(-1, 5, (1, 2, 4, 10, 8)).astype(np.int32)}
    names |= {name: np.zeros((4, 10), np.int32) + n for n, name in ((3, "Own"), (70, "First"))}
    emulated(merging, names, dims | {"tiles": 10, "turns": 32}, tmp_path / "merged")


@needs_compilers
@pytest.mark.slow
@pytest.mark.parametrize("gpu", ["h200", "a100"])
def test_the_weights_of_packed_sequences(gpu: str, tmp_path: Path) -> None:
    """Compiled, and under emulation: each sequence has its own blocks and tiles of queries."""
    settings = {"heads": 8, "kv_heads": 2, "head_dim": 64, "dtype": "bf16", "selected_block": 16}
    order = PackedWeights(gpus.find(gpu), make_spec("nsa-selected", **settings))
    starts, rng = np.array([0, 40, 45, 85], np.int32), np.random.default_rng(0)
    firsts = np.array([0, 2, 2, 4], np.int32)
    numbers = {"Q": (85, 2, 4, 64), "K": (2, 4, 64)}
    given: dict[str, Any] = {
        name: rng.standard_normal(shape).astype(ml_dtypes.bfloat16)
        for name, shape in numbers.items()
    }
    given["LSE"] = rng.standard_normal((85, 2, 4)).astype(np.float32) + 4
    own = np.eye(order.columns)[np.arange(40) % order.queries][:, None]
    given["Own"] = np.repeat(own, 4, axis=1).astype(np.float16)
    given |= {"StartsQ": starts, "StartsK": firsts}
    dims = {"batch": 3, "heads": 8, "kv_heads": 2, "q_len": 40, "kv_len": 2}
    dims |= {"q_tokens": 85, "kv_tokens": 4}
    order.make(tmp_path, False)
    wanted = interpret_all(Kernels(tuple(check(parse(order.code)).kernels)), given, dims)["Sums"]

    def of_heads(x: Any) -> Any:
        return np.ascontiguousarray(np.moveaxis(x.reshape(85, 8, *x.shape[3:]), 0, 1))

    callers = {**given, "Q": of_heads(given["Q"]), "LSE": of_heads(given["LSE"])}
    found = launched_in_order(tmp_path, callers, dims)["Sums"]
    tiles = -(-40 // order.queries)
    assert found.shape == wanted.shape == (2, tiles, 4, order.columns)
    assert np.abs(wanted).max() > 0.01
    np.testing.assert_allclose(found.astype(np.float32), wanted, atol=2e-3, rtol=0.02)
