"""New keys and values written into a cache, and rotated queries: by the programs, interpreted or
under emulation, as PyTorch does it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashwright.author.builtin.variants import make_spec
from flashwright.check.check import check
from flashwright.emulate.emulate import run
from flashwright.generate.append import Append, Rotate, Rotation
from flashwright.generate.own_program import OwnProgram
from flashwright.lang.parse import parse
from flashwright.sandbox.tensors import DTYPES

torch = pytest.importorskip("torch")
from flashwright.flex import attention as flex  # noqa: E402
from flashwright.flex.task import WrongKernel  # noqa: E402
from flashwright.serving import append  # noqa: E402
from flashwright.serving.append import New, Rows, Turn  # noqa: E402
from flashwright.serving.cache import Cache  # noqa: E402
from tests.share import some  # noqa: E402
from tests.unit.emulated import needs_compilers  # noqa: E402
from tests.unit.together import SCHEDULES  # noqa: E402
from tests.unit.together import kernels as kernels_of  # noqa: E402
from tests.unit.uncompiled import CARD, interpret_operators, make_own  # noqa: E402

LENGTHS = [0, 1, 17, 40]
ROOM, HEADS, WIDTH = 64, 2, 32


@pytest.fixture(autouse=True)
def on_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors are taken for CUDA tensors, and programs interpreted."""
    monkeypatch.setenv("FLASHWRIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(OwnProgram, "make", make_own)
    monkeypatch.setattr(flex, "card_of", lambda device: CARD)
    monkeypatch.setattr(append, "_on_cpu", lambda tensor: False)
    interpret_operators(monkeypatch)
    torch.manual_seed(0)


def a_cache(kind: str, dtype: Any) -> Cache:
    """An empty one, of 99: in entries, in order or not, or in pages of a size."""
    batch = len(LENGTHS)
    if kind in ("in order", "entries"):
        k, v = (torch.full((7 - 3 * (kind == "in order"), ROOM, HEADS, WIDTH), 99.0) for _ in "kv")
        entries = torch.tensor([5, 0, 2, 6], dtype=torch.int32) if kind == "entries" else None
        return Cache(k.to(dtype), v.to(dtype), None, entries)
    size = int(kind)
    pages = torch.randperm(batch * (ROOM // size) + 3)[: batch * (ROOM // size)]
    k, v = (torch.full((len(pages) + 3, size, HEADS, WIDTH), 99.0).to(dtype) for _ in "kv")
    return Cache(k, v, pages.view(batch, -1).int())


def a_copy(cache: Cache) -> Cache:
    return replace(cache, k=cache.k.clone(), v=cache.v.clone())


def new_rows(tokens: int, turn: Turn | None = None, dtype: Any = torch.bfloat16) -> Rows:
    k, v = (torch.randn(len(LENGTHS), tokens, HEADS, WIDTH).to(dtype) for _ in "kv")
    return Rows(k, v, torch.tensor(LENGTHS, dtype=torch.int32), {}, turn)


def turn_of(half: int, pairs: bool) -> Turn:
    angles = torch.arange(ROOM)[:, None] * 0.9 ** torch.arange(half)
    return Turn(angles.cos(), angles.sin(), pairs)


def by_pytorch(cache: Cache, rows: Rows) -> Cache:
    found = a_copy(cache)
    for new, kept in rows.by_pytorch(found):
        plain = (x.view(torch.uint8) if x.element_size() == 1 else x for x in (kept, new))
        to, rest = plain
        to[found.places(rows.lengths, rows.k.shape[1])] = rest
    return found


def same(found: Cache, wanted: Cache) -> None:
    """Also where nothing was written."""
    for ours, theirs in ((found.k, wanted.k), (found.v, wanted.v)):
        torch.testing.assert_close(ours.float(), theirs.float(), atol=0.01, rtol=0.01)


CACHES = ["in order", "entries", "16", "1", "8"]


@pytest.mark.parametrize("kind", some(CACHES, 4))
@pytest.mark.parametrize("tokens", [1, 19])
def test_new_rows_lie_behind_those_that_are_there(kind: str, tokens: int) -> None:
    cache, rows = a_cache(kind, torch.bfloat16), new_rows(tokens)
    wanted = by_pytorch(cache, rows)
    append._append(cache, rows)
    same(cache, wanted)
    assert (cache.k != 99).sum() == rows.k.numel()


@pytest.mark.parametrize("pairs", [True, False])
@pytest.mark.parametrize("half", [16, 8])
@pytest.mark.parametrize("kind", ["in order", "8"])
def test_new_keys_are_rotated(pairs: bool, half: int, kind: str) -> None:
    cache, rows = a_cache(kind, torch.bfloat16), new_rows(3, turn_of(half, pairs))
    wanted = by_pytorch(cache, rows)
    append._append(cache, rows)
    same(cache, wanted)
    again = a_cache(kind, torch.bfloat16)
    append._append(again, replace(rows, turn=None))
    assert not torch.equal(again.k, cache.k)


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.int8], ids=str)
@pytest.mark.parametrize("turn", [None, turn_of(16, False)], ids=["plain", "rotated"])
def test_new_rows_are_divided_by_the_scales_of_a_narrow_cache(turn: Turn | None, kind: Any) -> None:
    scales = {f"{x}descale": (torch.rand(len(LENGTHS), HEADS) + 0.1) / 50 for x in "kv"}
    cache, rows = a_cache("16", kind), replace(new_rows(2, turn), scales=scales)
    rows.v[0, 0] = 1e4  # beyond the type's range
    wanted = by_pytorch(cache, rows)
    append._append(cache, rows)
    near = {"atol": 0.02, "rtol": 0.13} if kind.is_floating_point else {"atol": 1.0, "rtol": 0.0}
    for ours, theirs in ((cache.k, wanted.k), (cache.v, wanted.v)):
        torch.testing.assert_close(ours.float(), theirs.float(), **near)
    assert cache.v.float().max() == (448 if kind.is_floating_point else 127)
    narrow = replace(rows, k=rows.k.to(kind), v=rows.v.clamp(-99, 99).to(kind), turn=None)
    wanted = by_pytorch(cache, narrow)
    append._append(cache, narrow)
    same(cache, wanted)


@pytest.mark.parametrize("pairs", [True, False])
@pytest.mark.parametrize("ordered", [True, False])
def test_queries_are_rotated_by_their_positions(pairs: bool, ordered: bool) -> None:
    """Half of the columns; those of a tensor of Q, K and V together too."""
    q = torch.randn(len(LENGTHS), 3, 5 * HEADS, WIDTH).bfloat16()
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    turn = replace(turn_of(8, pairs), by_first=not ordered)
    for x in (q, q[:, :, : 2 * HEADS]):
        found, wanted = append._rotated(x, lengths, turn), turn.by_pytorch(x, lengths)
        torch.testing.assert_close(found, wanted, atol=0.01, rtol=0.01)
        assert torch.equal(found[..., 16:], x[..., 16:])


def test_a_known_form_is_not_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tensors of the same shapes: only where they lie counts."""
    append._append(a_cache("16", torch.bfloat16), new_rows(2))
    monkeypatch.setattr(append, "find_or_make", lambda order: pytest.fail("made again"))
    cache, rows = a_cache("16", torch.bfloat16), new_rows(2)
    wanted = by_pytorch(cache, rows)
    append._append(cache, rows)
    same(cache, wanted)


def test_a_wrong_kernel_is_found_at_its_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    code = Append.code.fget  # type: ignore[attr-defined]
    wrong = property(lambda order: code(order).replace("NewK / KDescale", "NewK * KDescale"))
    monkeypatch.setattr(Append, "code", wrong)
    scales = {f"{x}descale": torch.rand(len(LENGTHS), HEADS) + 0.1 for x in "kv"}
    with pytest.raises(WrongKernel, match="what it wrote"):
        append._append(a_cache("16", torch.float8_e4m3fn), replace(new_rows(2), scales=scales))


def test_neighbours_in_a_narrow_type_are_no_error() -> None:
    """Which of two the order of additions may decide. In e4m3 they lie up to an eighth apart."""
    wanted = torch.tensor([[3.5, 0.5, -0.25, 0.125]]).to(torch.float8_e4m3fn)
    steps = wanted.view(torch.uint8)
    append._compare((steps + 1).view(wanted.dtype), wanted)
    with pytest.raises(WrongKernel, match="what it wrote"):
        append._compare((steps + 3).view(wanted.dtype), wanted)


def test_what_no_tile_has_is_done_by_pytorch_and_said(capsys: pytest.CaptureFixture[str]) -> None:
    cache, turn = a_cache("16", torch.bfloat16), turn_of(3, True)
    rows = new_rows(2, turn)
    wanted = by_pytorch(cache, rows)
    for _ in range(2):
        append._append(cache, rows)
    same(cache, wanted)
    said = capsys.readouterr().err
    assert said.count("new keys are written by PyTorch, in several steps: 3 columns") == 1


def test_positions_behind_a_prefix() -> None:
    """Of a prompt that sequences share, whose keys are rotated by the first positions."""
    cache, rows = a_cache("in order", torch.bfloat16), new_rows(2)
    full = turn_of(16, False)
    wanted = by_pytorch(cache, replace(rows, turn=Turn(full.cos[5:], full.sin[5:], False)))
    new = New(rows.k, rows.v, full.cos, full.sin, False, 5)
    q = torch.randn(len(LENGTHS), 2, 4, WIDTH).bfloat16()
    turned, lengths = new.written(q, cache, rows.lengths, True, {})
    same(cache, wanted)
    assert torch.equal(lengths, rows.lengths + 2)
    assert not torch.equal(turned, q)


# --- the programs ---------------------------------------------------------------------------------

HALVES = Rotation(16, "fp32")
PAIRS = replace(HALVES, pairs=True)
PROGRAMS: dict[str, Append | Rotate] = {
    "pages": Append(CARD, ("bf16", "bf16"), "bf16", (64, 64), page=16),
    "small pages": Append(CARD, ("bf16", "bf16"), "bf16", (64, 64), page=1),
    "rotated": Append(CARD, ("bf16", "bf16"), "bf16", (64, 32), page=16, rotation=HALVES),
    "narrow": Append(CARD, ("fp16", "fp16"), "e4m3", (32, 64), entries=True, rotation=PAIRS),
    "whole numbers": Append(CARD, ("bf16", "bf16"), "int8", (64, 64), page=16, rotation=HALVES),
    "in order": Append(CARD, ("bf16", "bf16"), "bf16", (64, 64)),
    "queries": Rotate(CARD, "bf16", 64, HALVES),
    "by first": Rotate(CARD, "bf16", 32, replace(PAIRS, by_first=True)),
}


def findings(text: str) -> set[str]:
    return {d.code for d in check(parse(text), CARD).errors}


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_checker_finds_what_is_written_twice_or_elsewhere(name: str) -> None:
    code = PROGRAMS[name].code
    written = {"FW605", "FW610"}  # twice, or to a page beyond the table
    assert not findings(code)
    for one, other in (
        ("E = 1, L = block_idx in", "E = 0, L = block_idx in"),
        ("E = 1, L = block_idx] from r", "E = 0, L = block_idx] from r"),
        ("Table[batch_idx, page_idx]", "Table[0, page_idx]"),
        ("Entry[batch_idx]", "Entry[0]"),
    ):
        assert one not in code or findings(code.replace(one, other)) & written, other
    for one, other in (
        ("H = kv_head, L = block_idx in", "H = 0, L = block_idx in"),
        ("L = block_idx in first:", "L = 0 in first:"),
        (" in place", ""),
    ):
        assert one not in code or findings(code.replace(one, other)), other


def views_of(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tensors of a program as it declares them: before, and as PyTorch leaves them."""
    order = PROGRAMS[name]
    turn = turn_of(HALVES.half, order.rotation.pairs) if order.rotation else None
    if isinstance(order, Rotate):
        q = torch.randn(len(LENGTHS), 3, 4, order.width).bfloat16()
        assert turn is not None
        turn = replace(turn, by_first=order.rotation.by_first)
        lengths = torch.tensor(LENGTHS, dtype=torch.int32)
        given = {"LengthsK": lengths, "Cos": turn.cos, "Sin": turn.sin}
        made = {"Q": q, "Turned": torch.full_like(q, torch.nan)}
        right = {**made, "Turned": turn.by_pytorch(q, lengths)}
        return tuple(  # type: ignore[return-value]
            {**given, **dict(p for n, x in each.items() for p in append._parts(n, x, turn))}
            for each in (made, right)
        )
    kinds = {"bf16": torch.bfloat16, "fp16": torch.float16, "e4m3": torch.float8_e4m3fn}
    kinds["int8"] = torch.int8
    scales, spare = {}, torch.nan if kinds[order.kept].is_floating_point else 99
    if DTYPES[order.kept].itemsize == 1:
        scales = {f"{x}descale": (torch.rand(len(LENGTHS), HEADS) + 0.1) / 50 for x in "kv"}
    cache = a_cache(str(order.page or "entries" * order.entries or "in order"), torch.bfloat16)
    sizes = order.widths
    cache = replace(
        cache,
        k=torch.full((*cache.k.shape[:-1], sizes[0]), spare).to(kinds[order.kept]),
        v=torch.full((*cache.v.shape[:-1], sizes[1]), spare).to(kinds[order.kept]),
    )
    rows = new_rows(19, turn)
    k, v = (torch.randn(*rows.k.shape[:-1], n).to(kinds[order.types[0]]) for n in sizes)
    rows = replace(rows, k=k, v=v, scales=scales)
    wanted = by_pytorch(cache, rows)
    return tuple(  # type: ignore[return-value]
        {n: x for n, (_, x) in rows.views(c).items() if x is not None} for c in (cache, wanted)
    )


def in_numpy(x: Any, dtype: str) -> Any:
    plain = x.float() if x.is_floating_point() else x
    return np.ascontiguousarray(plain.numpy().astype(DTYPES[dtype]))


EMULATED = {
    "h200": ["small pages", "rotated", "narrow", "whole numbers", "queries", "by first"],
    "t4": ["narrow"],
}


@needs_compilers
@pytest.mark.slow
@pytest.mark.parametrize("gpu", EMULATED)
def test_the_kernels_under_emulation(gpu: str) -> None:
    """Nothing but new rows is written, and nothing is read that no sequence has."""
    names = EMULATED[gpu]
    made = kernels_of([(PROGRAMS[name].code, make_spec("mha")) for name in names], gpu)
    for kernel, name, how in zip(made, names, SCHEDULES * 2, strict=False):
        before, wanted = views_of(name)
        plan = kernel.plan
        arrays = {t.name: in_numpy(before[t.name], t.dtype) for t in plan.tensors}
        shape = before["NewV" if "NewV" in before else "RestQ" if "RestQ" in before else "Q"].shape
        sizes = {"batch": shape[0], "heads": shape[1], "kv_heads": shape[1], "q_len": shape[-2]}
        own = {"positions": ROOM, "room": ROOM, "entries": 7, "kv_len": 1}
        if "Table" in before:
            own |= {"pages": before["V"].shape[0], "max_pages": before["Table"].shape[1]}
        dims = {dim: {**sizes, **own}[dim] for dim in plan.dims}
        found = run(kernel.program, plan, arrays, dims, how).findings
        assert not found, [(f.kind, f.instruction.opcode, f.instruction.line) for f in found]
        for tensor in (t for t in plan.tensors if t.written):
            ours = arrays[tensor.name].astype(np.float32)
            theirs = in_numpy(wanted[tensor.name], tensor.dtype).astype(np.float32)
            loose, least = (0.13 if tensor.dtype == "e4m3" else 0.01), 0.02
            if tensor.dtype == "int8":
                loose, least = 0.0, 1.0  # where a number lies in the middle
            np.testing.assert_allclose(ours, theirs, atol=least, rtol=loose, err_msg=name)
