"""Row sums in parts: only those that nobody looks at before the end of the loop."""

from __future__ import annotations

import pytest

from flashwright.lower import ir
from tests.unit.lowered import printed, scheduled
from tests.unit.tl_attention import attention

SOFTMAX = "Compute Softmax S with Smax and Ssum and rescale O_register"
NOTE = "// In the loop each of the four threads of a row has had its own part of Ssum."
BY_HAND = """\
Compute max(Smax, rowmax(S)) and get Snew
  Compute exp(Smax - Snew) and get Drop
  Compute exp(S - Snew) and get new S
  Compute Ssum * Drop + rowsum(S) and get new Ssum
  Compute O_register * Drop and get new O_register
  Compute Snew and get new Smax"""
VECTORS = "Allocate Snew in register (BM) as fp32\nAllocate Drop in register (BM) as fp32"


def kept(text: str) -> bool:
    """Whether the sum of Ssum is left in parts; then it is put together exactly once."""
    nodes = list(ir.flat(scheduled(text, strict=False)))
    parts = [a for n in nodes if isinstance(n, ir.Compute) for a in n.assigns if a.partial]
    source = printed(text, strict=False)
    assert (NOTE in source) == bool(parts)
    assert source.count("Ssum(m) = fw::row_sum(Ssum(m));") == bool(parts)
    return bool(parts)


def test_softmax() -> None:
    assert kept(attention())
    source = printed(attention())
    body = source[source.index("for (int i") : source.index(NOTE)]
    assert "fw::row_sum" not in body
    assert "fw::row_max" in body, "a maximum is needed whole in every round"
    assert "cute::clear(Ssum);" in source


def test_softmax_by_hand() -> None:
    assert kept(attention(softmax=BY_HAND, allocate=VECTORS))


def test_a_start_belongs_to_one_of_the_four_threads() -> None:
    start = attention(
        allocate="Allocate Sink in global (H: heads) as fp32",
        start="exp(Sink[head])",
    )
    assert kept(start)
    assert "fw::row_part(fw::exp2(float(*p.Sink.at(head)) * fw::log2_e))" in printed(start)


@pytest.mark.parametrize(
    "also",
    [
        "Compute Ssum * 0.5 and get Half\n  Compute S * Half and get new S",
        "Compute where(Ssum > 1, S, 0) and get new S",
        "Compute max(Ssum, 0) and get new Ssum",
        "Compute rowsum(S * Ssum) and accumulate Ssum",
        "Copy Ssum (BM) in coordinate [B = item, H = head, L = i] from register to global",
        "Copy Ssum (BM) in coordinate [B = item, H = head, L = i] from global to register",
    ],
)
def test_whole_in_every_round_where_the_loop_needs_it(also: str) -> None:
    allocate = """\
Allocate Ssum in global (batch, heads, kv_len) as fp32
Allocate Half in register (BM) as fp32"""
    assert kept(attention(allocate=allocate))
    assert not kept(attention(allocate=allocate, softmax=f"{SOFTMAX}\n  {also}"))


@pytest.mark.parametrize(
    "between",
    [
        "Compute Ssum + 1 and get new Ssum",
        "Compute Ssum and get Half",
        "Copy Ssum (BM) in coordinate [B = item, H = head, L = 0] from global to register",
        "if kv_len > 7\n  Compute 1 and get Ssum\nend",
    ],
)
def test_whole_where_more_happens_before_the_loop(between: str) -> None:
    """The start that would be given to one thread is not the last one, or is read whole."""
    allocate = """\
Allocate Ssum in global (batch, heads, kv_len) as fp32
Allocate Half in register (BM) as fp32"""
    text = attention(allocate=allocate)
    again = text.replace("for i = 0", f"{between}\nfor i = 0")
    assert again != text
    nodes = list(ir.flat(scheduled(again, strict=False)))
    parts = [a for n in nodes if isinstance(n, ir.Compute) for a in n.assigns if a.partial]
    started = [n for n in nodes if isinstance(n, ir.Compute) and "row_part" in str(n.assigns)]
    assert bool(parts) == bool(started), "in parts only from a start in parts"
    if between.startswith(("Copy", "if")):
        assert not parts
