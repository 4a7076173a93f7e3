"""Derived backward passes: the checker accepts them, and they agree with autograd in fp64."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer

from flashwright.author.builtin.author import write_code, write_sketch
from flashwright.author.builtin.mods import BlockLists, Mods, Operand
from flashwright.author.builtin.variants import make_spec
from flashwright.check.check import check
from flashwright.gpu import find
from flashwright.grad.grad import backward
from flashwright.lang.diagnostic import Failed
from flashwright.lang.format import format_tree
from flashwright.lang.nodes import Binary, Index, Name
from flashwright.lang.parse import parse, read
from flashwright.lower.translate import translate
from flashwright.program.kernels import Kernels
from flashwright.program.program import Program
from flashwright.semantics.interpret import NUMPY_DTYPES, interpret_all, shape_of
from flashwright.spec import AttentionSpec
from tests.example_programs import EXAMPLES

torch = pytest.importorskip("torch")
from flashwright.pytorch.lists import of_keys  # noqa: E402

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
    spec = make_spec(variant, **{"dtype": "bf16", **options})
    return write_code(write_sketch(spec), spec, find("a100")).code


def example(name: str, lse: str = "") -> str:
    """An example; with the log-sum-exp as an output, if it is given."""
    text = read(EXAMPLES / f"{name}.tl")
    return text + LSE.format(value=lse) if lse else text


def derived(text: str, wrt: Sequence[str] | None = None) -> str:
    made = format_tree(backward(checked(text), wrt=wrt).tree)
    assert format_tree(parse(made)) == made
    return made


def agrees(text: str, reference: Reference, lengths: Any = LENGTHS, **more: Any) -> str:
    """The derived backward pass agrees with autograd of the reference. Returns its text."""
    program, made = checked(text), derived(text, more.get("wrt"))
    verdict = check(parse(made))
    assert verdict.diagnostics == (), verdict.diagnostics
    kernels = Kernels(verdict.kernels)
    for q_len, kv_len in lengths:
        dims = {"batch": 2, "heads": 4, "kv_heads": 2, "q_len": q_len, "kv_len": kv_len}
        dims |= more.get("dims", {})
        inputs = _inputs(program, dims, more.get("given"))
        found, expected = _both(kernels, inputs, reference, dims)
        wanted = {f"d{name}" for name in "QKV" if name in inputs}
        assert wanted <= found.keys() <= expected.keys()
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


def refused(text: str, **how: Any) -> str:
    with pytest.raises(Failed) as failed:
        backward(checked(text), **how)
    (found,) = failed.value.diagnostics
    assert found.code == "FW908"
    assert found.span is not None
    return f"{found.message}; {found.help}"


def test_the_log_sum_exp_is_computed_again_if_no_output_has_it() -> None:
    def attention(t: Tensors, dims: Mapping[str, int]) -> dict[str, Any]:
        return softmax(scores(t), torch.ones(1, 1, dtype=torch.bool), t)

    made = agrees(example("unscaled"), attention)
    assert "// LSE is computed again: store Smax + log(Ssum) in the forward." in made
    first = made.split("grid ")[1]
    assert first.count("GEMM") == 1
    assert "exp(Smax - Top)" in first
    stored = agrees(example("unscaled", "Smax + log(Ssum)"), attention)
    assert "again" not in stored
    assert stored.count("grid ") == made.count("grid ") - 1


def test_sink_tokens() -> None:
    def attention(t: Tensors, dims: Mapping[str, int]) -> dict[str, Any]:
        q, k = positions(dims)
        return softmax(scores(t) / 8, (k <= q) & ((k > q - 20) | (k < 4)), t)

    text = authored("mha", head_dim=64, heads=4, causal=True, window=20, sink_tokens=4)
    agrees(text, attention, ((150, 250), (130, 40)))


def test_softcap_slopes_and_sink() -> None:
    def attention(t: Tensors, dims: Mapping[str, int]) -> dict[str, Any]:
        q, k = positions(dims)
        s = 3 * torch.tanh(scores(t) / 8 / 3) + t["Slopes"][:, None, None] * (k - q)
        sink = t["Sink"][:, None, None].expand(*s.shape[:-1], 1)
        return softmax(s, k <= q, t, sink)

    # A slope's gradient is a sum over all distances, with the rounding of O in each: fp16 has less.
    options = {"dtype": "fp16", "softcap": 3.0, "alibi": True, "sink": True, "causal": True}
    made = agrees(authored("gqa", head_dim=64, heads=4, kv_heads=2, **options), attention)
    assert "dSink" in made
    assert "dSlopes" in made


def test_compressed_keys() -> None:
    def attention(t: Tensors, dims: Mapping[str, int]) -> dict[str, Any]:
        q = torch.arange(dims["q_len"])[:, None] + dims["tokens"] - dims["q_len"]
        k = torch.arange(dims["kv_len"])
        return softmax(scores(t) / 8, k * 16 + 32 <= q + 1, t)

    text = authored("nsa-compressed", head_dim=64, heads=4, kv_heads=2)
    agrees(text, attention, ((130, 100),), dims={"tokens": 99 * 16 + 32})


def test_softmax_by_hand() -> None:
    def attention(t: Tensors, dims: Mapping[str, int]) -> dict[str, Any]:
        q, k = positions(dims)
        return softmax(scores(t) / 8, k <= q, t)

    agrees(example("softmax_by_hand", "0.125 * Smax + log(Ssum)"), attention)
    agrees(
        example("softmax_by_hand", "Smax * Log2Scale * 0.6931471805599453 + log(Ssum)"), attention
    )


TABLE = "Allocate Table in global (H: heads, R: 2 * Reach + 1) as fp32"
READ = "Table[head_idx, kv_idx - q_idx - (kv_len - q_len) + Reach]"


def relative(read: str, table: str, **more: str) -> str:
    """The example with a relative bias, with another table and another index."""
    text = example("relative_bias", "Smax + log(Ssum)")
    for old, new in {TABLE: table, READ: read, **more}.items():
        assert old in text, old
        text = text.replace(old, new)
    return text


def biased(bias: Callable[[Tensors, Any, Any], Any]) -> Reference:
    """Attention whose scores have a bias, made from the tensors and the positions."""

    def attention(t: Tensors, dims: Mapping[str, int]) -> dict[str, Any]:
        q, k = positions(dims)
        return softmax(scores(t) / 8 + bias(t, q, k), torch.ones(1, 1, dtype=torch.bool), t)

    return attention


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_relative_bias(dtype: str) -> None:
    text = example("relative_bias").replace(TABLE, TABLE.replace("fp32", dtype))
    made = agrees(text, biased(lambda t, q, k: t["Table"][:, (k - q + 100).clamp(0, 200)]))
    total = "dTable" if dtype == "fp32" else "dTablesum"
    assert f"and accumulate {total}[head, kv_idx - q_idx - (kv_len - q_len) + Reach]" in made
    assert ("Conversion: the sums of dTable, rounded." in made) == (dtype != "fp32")


BUCKET = "min(floor(abs(kv_idx - q_idx - (kv_len - q_len)) / 16), Reach)"
TABLES: dict[str, tuple[str, str, Callable[[Tensors, Any, Any], Any]]] = {
    "one axis, clamped": (
        "2 * Table[kv_idx - q_idx]",
        "Allocate Table in global (R: 2 * Reach + 1) as fp32",
        lambda t, q, k: 2 * t["Table"][(k - (q - q[0])).clamp(0, 200)],
    ),
    "buckets of kv heads": (
        f"Table[kv_head, {BUCKET}]",
        "Allocate Table in global (H: kv_heads, R: Reach + 1) as bf16",
        lambda t, q, k: t["Table"].repeat_interleave(2, 0)[:, ((k - q).abs() // 16).clamp(0, 100)],
    ),
    "buckets of the batch": (
        f"Table[batch_idx, head_idx, {BUCKET}]",
        "Allocate Table in global (B: batch, H: heads, R: Reach + 1) as fp32",
        lambda t, q, k: t["Table"][:, :, ((k - q).abs() // 16).clamp(0, 100)],
    ),
    "keys": (
        "Table[batch_idx, min(kv_idx, Reach)]",
        "Allocate Table in global (B: batch, R: Reach + 1) as fp32",
        lambda t, q, k: t["Table"][:, None, None, k.clamp(0, 100)],
    ),
    "a number for each batch element and head": (
        "Table[batch_idx, head_idx] * (kv_idx % Reach % 3)",
        "Allocate Table in global (B: batch, H: heads) as fp32",
        lambda t, q, k: t["Table"][:, :, None, None] * (k % 100 % 3),
    ),
    "twice": (
        f"Table[head_idx, {BUCKET}] + Table[0, min(kv_idx, Reach)]",
        "Allocate Table in global (H: heads, R: Reach + 1) as fp32",
        lambda t, q, k: (
            t["Table"][:, ((k - q).abs() // 16).clamp(0, 100)] + t["Table"][0, k.clamp(0, 100)]
        ),
    ),
}


@pytest.mark.parametrize("case", TABLES)
def test_tables_by_index(case: str) -> None:
    read, table, bias = TABLES[case]
    assert "dTable" in agrees(relative(read, table), biased(bias), ((70, 100), (130, 40)))


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_table_that_no_grid_can_round(dtype: str) -> None:
    table = "Allocate Table in global (B: batch, H: heads, M: 2 * Reach, R: Reach) as"
    made = derived(relative("Table[batch_idx, head_idx, q_idx, kv_idx]", f"{table} {dtype}"))
    told = "No gradient of Table: it has more than 3 axes and is not fp32."
    assert (told in made, "dTable" in made) == (dtype == "bf16", dtype == "fp32")


def test_a_table_that_rows_read() -> None:
    def attention(t: Tensors, dims: Mapping[str, int]) -> dict[str, Any]:
        made = softmax(scores(t) / 8, torch.ones(1, 1, dtype=torch.bool), t)
        rows = torch.arange(dims["q_len"]).clamp(0, 100)
        return {**made, "O": made["O"] * t["Table"][:, rows, None]}

    divided = "O_register / Ssum, 0)"
    text = relative(
        "0",
        "Allocate Table in global (H: heads, R: Reach + 1) as fp32",
        **{divided: f"{divided} * Factor", "Compute where": FACTOR},
    )
    agrees(text, attention)


FACTOR = """Allocate Factor in register (BM) as fp32
Compute 0 * Ssum + Table[head_idx, q_idx] and get Factor
Compute where"""


def test_additions_by_index_have_no_order() -> None:
    told = refused(example("relative_bias"), deterministic=True)
    assert "the additions to the gradient of `Table`, by index, have no order" in told
    assert "dTable" not in derived(example("relative_bias"), wrt=("Q", "K", "V"))


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_bias_of_each_pair(dtype: str) -> None:
    def attention(t: Tensors, dims: Mapping[str, int]) -> dict[str, Any]:
        q, k = positions(dims)
        return softmax(scores(t) / 8 + t["Bias"], (k < 40) | (k <= q), t)

    declared = "Allocate Bias in global (H: heads, L: q_len, M: kv_len) as"
    text = example("bias_prefix").replace(f"{declared} bf16", f"{declared} {dtype}")
    assert f"{declared} {dtype}" in text
    assert "dBias" in agrees(text, attention)


def test_documents() -> None:
    def starts(rng: Any, dims: Mapping[str, int]) -> dict[str, Array]:
        ends = np.sort(rng.integers(0, dims["kv_len"], (dims["batch"], dims["q_len"])), axis=1)
        own = np.arange(dims["q_len"]) + dims["kv_len"] - dims["q_len"]
        return {"Start": np.clip(np.minimum(ends, own), 0, None).astype(np.int32)}

    def attention(t: Tensors, dims: Mapping[str, int]) -> dict[str, Any]:
        q, k = positions(dims)
        return softmax(scores(t) / 8, (k >= t["Start"][:, None, :, None]) & (k <= q), t)

    agrees(example("documents"), attention, ((70, 100), (150, 150)), given=starts)


DOCUMENTS = Mods(
    mask=Binary(
        "==",
        Index(Name("Doc"), (Name("batch_idx"), Name("q_idx"))),
        Index(Name("DocOfKey"), (Name("batch_idx"), Name("kv_idx"))),
    ),
    operands=(
        Operand("Doc", ("batch", "q_len"), "int32"),
        Operand("DocOfKey", ("batch", "kv_len"), "int32"),
    ),
)


def listed_spec(variant: str) -> AttentionSpec:
    heads = {"heads": 4, "kv_heads": 2 if variant == "gqa" else 4}
    return make_spec(variant, head_dim=64, dtype="bf16", **heads)


def listed(variant: str, gpu: str = "a100", **lists: bool) -> str:
    """A program that visits the blocks in lists, of 128 queries and 64 keys."""
    mods, spec = replace(DOCUMENTS, lists=BlockLists(128, 64, **lists)), listed_spec(variant)
    return write_code(write_sketch(spec, mods), spec, find(gpu), mods).code


def drawn_lists(rng: Any, dims: Mapping[str, int], lists: Mapping[str, bool]) -> dict[str, Array]:
    """Lists for blocks of queries and of keys, documents, and the table of blocks."""
    shared = (dims["batch"] if lists["batched"] else 1, dims["heads"] if lists["per_head"] else 1)
    blocks = (-(-dims["q_len"] // 128), -(-dims["kv_len"] // 64))
    table = torch.tensor(rng.integers(0, 2 + lists["full"], (*shared, *blocks)))
    order = table.sort(dim=-1, descending=True, stable=True).indices.int()
    made = {"counts": (table > 0).sum(-1, dtype=torch.int32), "blocks": order}
    if lists["full"]:
        made["full"] = (table == 2).sum(-1, dtype=torch.int32)
    made |= of_keys([f"{name}ofkeys" for name in made], made)
    names = {name: name.capitalize().replace("ofkeys", "OfKeys") for name in made}
    found = {names[name]: tensor.numpy() for name, tensor in made.items()}
    for name, length in (("Doc", "q_len"), ("DocOfKey", "kv_len")):
        found[name] = rng.integers(0, 2, (dims["batch"], dims[length])).astype(np.int32)
    return found | {"Table": table.numpy().astype(np.int32)}


LISTS = {
    "mha": {"batched": True, "per_head": True, "full": True},
    "gqa": {"batched": False, "per_head": False, "full": False},
}


@pytest.mark.parametrize("variant", LISTS)
def test_listed_blocks(variant: str) -> None:
    """Lists that are part of the mask: what is in none is hidden, what is full is all seen."""

    def attention(t: Tensors, dims: Mapping[str, int]) -> dict[str, Any]:
        q, k = torch.arange(dims["q_len"]) // 128, torch.arange(dims["kv_len"]) // 64
        kind = t["Table"][:, :, q][..., k]
        same = t["Doc"][:, None, :, None] == t["DocOfKey"][:, None, None]
        return softmax(scores(t) / 8, (kind == 2) | ((kind == 1) & same), t)

    text, given = listed(variant, **LISTS[variant]), partial(drawn_lists, lists=LISTS[variant])
    made = agrees(text, attention, ((300, 200), (70, 30)), given=given)
    assert "BlocksOfKeys" in made


def test_data_decide_how_long_a_block_takes() -> None:
    made = derived(listed("mha", "h200", **LISTS["mha"]))
    _, main, _ = check(parse(made), find("h200")).kernels
    assert "fw::TileScheduler<-1>" in translate(main, find("h200")).source


def test_gradients_of_some_inputs() -> None:
    """What nobody asks for is not computed: the slopes need a sum over every score."""

    def attention(t: Tensors, dims: Mapping[str, int]) -> dict[str, Any]:
        q, k = positions(dims)
        s = scores(t) / 8 + t["Slopes"][:, None, None] * (k - q)
        return softmax(s, k <= q, t)

    text = authored("gqa", heads=4, kv_heads=2, head_dim=64, causal=True, alibi=True)
    assert "dSlopes" in derived(text)
    made = agrees(text, attention, wrt=("Q", "K", "V"))
    assert "dSlopes" not in made
    assert len(check(parse(made)).kernels) == 3
    assert "dV" not in derived(text, wrt=("Q", "K"))


def test_a_listed_tile_by_two_names() -> None:
    """As a person may write it: V has a tile of its own, which is the same."""
    text = listed("mha", **LISTS["mha"])
    (let,) = (line for line in text.splitlines() if "let KeyTile" in line)
    again = text.replace(let, f"{let}\n{let.replace('KeyTile', 'ValueTile')}")
    place = "Copy V (BN, HeadDim) in coordinate [B = batch_idx, H = head_idx, L = "
    again = again.replace(f"{place}KeyTile", f"{place}ValueTile")
    assert "ValueTile]" in again
    assert derived(again) == derived(text)


def test_lists_of_heads_that_share_keys_are_refused() -> None:
    text = listed("gqa", batched=True, per_head=True, full=True)
    assert "heads that share keys have lists of their own" in refused(text)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("i % (KeyBlock / BN)", "i % 2", "comes from a tensor"),
        ("floor(i * BN / KeyBlock)", "i", "comes from a tensor"),
    ],
)
def test_other_loops_over_lists_are_refused(old: str, new: str, says: str) -> None:
    text = listed("mha", **LISTS["mha"])
    assert old in text
    found = check(parse(text.replace(old, new)))
    assert found.program is not None
    with pytest.raises(Failed, match=says):
        backward(found.program)


def test_lists_and_numbers_of_iterations_are_not_mixed() -> None:
    text = listed("mha", **LISTS["mha"]).replace("grid block_idx", "dim slots\n\ngrid block_idx", 1)
    more = "Allocate Weight in global (B: batch, S: slots) as fp32\nAllocate Counts in global"
    text = text.replace("Allocate Counts in global", more, 1)
    copy = "  Copy Weight (BN) in coordinate [B = batch_idx, S = i] from global to register\n"
    text = text.replace("  Copy DocOfKey (BN) in", f"{copy}  Copy DocOfKey (BN) in", 1)
    text = text.replace(
        "Compute Multiply S, Scale and get", "Compute S * Scale + Weight and get", 1
    )
    assert "`Weight` is read by the number of an iteration" in refused(text)


def test_blocks_in_lists_have_no_order() -> None:
    assert "have no order" in refused(listed("mha", **LISTS["mha"]), deterministic=True)


def test_tiles_that_do_not_divide_a_listed_block_are_refused() -> None:
    made = derived(listed("mha", batched=True, per_head=True, full=True))
    found = check(parse(made.replace("param BM = 64", "param BM = 256"))).errors
    assert "not a whole number" in found[0].message


def test_sigmoid_instead_of_softmax() -> None:
    def attention(t: Tensors, dims: Mapping[str, int]) -> dict[str, Any]:
        q, k = positions(dims)
        weights = torch.sigmoid(scores(t) / 8 - 4).masked_fill(k > q, 0)
        return {"O": weights @ _heads(t["V"], t["Q"])}

    made = agrees(example("sigmoid"), attention)
    assert "LSE" not in made


def test_squared_relu() -> None:
    def attention(t: Tensors, dims: Mapping[str, int]) -> dict[str, Any]:
        q, k = positions(dims)
        weights = torch.relu(scores(t) / 8 - 1).masked_fill(k > q, 0) ** 2
        return {"O": weights @ _heads(t["V"], t["Q"])}

    text = example("sigmoid").replace("sigmoid(S)", "max(S, 0) * max(S, 0)")
    agrees(text.replace("param Bias = -4 ", "param Bias = -1 "), attention)


@pytest.mark.parametrize("name", ["rope_split", "side_by_side"])
def test_two_parts_of_the_heads(name: str) -> None:
    def attention(t: Tensors, dims: Mapping[str, int]) -> dict[str, Any]:
        q, k = positions(dims)
        rope = t["Qrope"] @ t["Krope"][:, None].transpose(-1, -2)
        return softmax((scores(t) + rope) / 192**0.5, k <= q, t)

    assert "dKrope" in agrees(example(name), attention, ((70, 100), (130, 40)))


def test_differential_attention() -> None:
    def attention(t: Tensors, dims: Mapping[str, int]) -> dict[str, Any]:
        q, k = positions(dims)
        parts = []
        for half in (slice(0, 64), slice(64, 128)):
            own = {"Q": t["Q"][..., half], "K": t["K"][..., half], "V": t["V"]}
            parts.append(softmax(scores(own) / 8, k <= q, own))
        o = parts[0]["O"] - t["Lambda"][:, None, None] * parts[1]["O"]
        return {"O": o, "LSE": parts[0]["LSE"], "LSE2": parts[1]["LSE"], "Second": parts[1]["O"]}

    assert "dLambda" in agrees(example("differential"), attention, ((70, 100),))
    text = example("differential", "M1 + log(L1)")
    text += LSE.format(value="M2 + log(L2)").replace("LSE", "LSE2")
    stored = agrees(text + SECOND, attention, ((70, 100),))
    assert "again" not in stored


SECOND = """Allocate Second in global (batch, heads, q_len, Half) as fp32
Allocate Second in register (BM, Half) as fp32
Compute O2 / L2 and get Second_register
Copy Second (BM, Half) in coordinate [B = batch_idx, H = head_idx, L = block_idx]
  from register to global
"""


def test_forgetting() -> None:
    def attention(t: Tensors, dims: Mapping[str, int]) -> dict[str, Any]:
        q, k = positions(dims)
        gates = t["Gates"]
        own = gates[..., q.clamp(0)[:, 0]] * (q[:, 0] >= 0)
        return softmax(scores(t) / 8 + own[..., None] - gates[..., None, :], k <= q, t)

    assert "dGates" in agrees(example("forgetting"), attention)


GATE = """Allocate Gate in global (batch, heads, q_len, HeadDim) as fp32
Allocate Gate in register (BM, HeadDim) as fp32
Copy Gate (BM, HeadDim) in coordinate [B = batch_idx, H = head_idx, L = block_idx]
  from global to register
Compute O_register * sigmoid(Gate_register) and get new O_register
"""


def test_a_gate_on_the_output() -> None:
    def attention(t: Tensors, dims: Mapping[str, int]) -> dict[str, Any]:
        q, k = positions(dims)
        found = softmax(scores(t) / 8, k <= q, t)
        return {**found, "O": found["O"] * torch.sigmoid(t["Gate"])}

    text = example("softmax_by_hand", "0.125 * Smax + log(Ssum)")
    made = agrees(text.replace("Copy O (BM", GATE + "Copy O (BM"), attention)
    assert "dGate" in made


def test_a_maximum_that_rises_by_steps() -> None:
    """The rescale is skipped while the maximum rises by less than 8: another reference."""

    def attention(t: Tensors, dims: Mapping[str, int]) -> dict[str, Any]:
        q, k = positions(dims)
        return softmax(scores(t) / 8, k <= q, t)

    lazy = "max(Smax, rowmax(S)) and get Snew\n"
    steps = "  Compute where(Snew - Smax > 8, Snew, Smax) and get new Snew\n"
    text = example("softmax_by_hand", "0.125 * Smax + log(Ssum)").replace(lazy, lazy + steps)
    agrees(text, attention, ((70, 100),))


def test_a_sum_that_decays_is_refused() -> None:
    text = example("softmax_by_hand", "0.125 * Smax + log(Ssum)")
    text = text.replace("O_register * Drop", "O_register * Drop * 0.9")
    assert "it decays" in refused(text)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("paged", "the place of `K` comes from a tensor"),
        ("sink_tile", "a GEMM before the loop"),
    ],
)
def test_examples_without_a_gradient_say_why(name: str, says: str) -> None:
    assert says in refused(example(name))


def test_fp8_is_refused() -> None:
    spec = make_spec("mha", head_dim=64, heads=4, dtype="fp8")
    text = write_code(write_sketch(spec), spec, find("h200")).code
    assert "gradients need fp16 or bf16" in refused(text)


def test_selected_blocks_are_refused() -> None:
    assert "no axis of the grid" in refused(authored("nsa-selected", head_dim=64))


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from flashwright.cli.grad import grad

    forward, out = tmp_path / "forward.tl", tmp_path / "backward.tl"
    forward.write_text(example("unscaled"))
    with pytest.raises(typer.Exit) as ended:
        grad(str(forward), out=out)
    assert ended.value.exit_code == 0
    again = "LSE is computed again: store Smax + log(Ssum) in the forward."
    assert capsys.readouterr().out == f"{out}: dQ, dK, dV\n{again}\n"
    assert check(parse(out.read_text())).diagnostics == ()
    forward.write_text(example("paged"))
    with pytest.raises(typer.Exit) as ended:
        grad(str(forward), None)
    assert ended.value.exit_code == 1
    assert "error[FW908]" in capsys.readouterr().err


@pytest.mark.parametrize("place", ["L = i", "L = i, D = 0"])
def test_keys_that_are_values_as_well(place: str) -> None:
    """As one tile, and as two tiles that have the same elements: their gradients add up."""

    def attention(t: Tensors, dims: Mapping[str, int]) -> dict[str, Any]:
        q, k = positions(dims)
        return softmax(scores(t) / 8, k <= q, {**t, "V": t["K"]})

    made = []
    for line in example("softmax_by_hand").splitlines():
        if line.startswith("Allocate V"):
            line = "Allocate V in shared (BN, HeadDim) as bf16"
        elif line.startswith("  Copy V"):
            line = f"{line.replace('Copy V', 'Copy K').replace('L = i', place)} and get V"
        made.append(line)
    found = agrees("\n".join(made), attention)
    assert ("dKsum" in found) == ("D" in place)


def test_the_number_of_a_block_is_refused() -> None:
    """The tiles of the backward pass have other sizes."""
    seen = "kv_idx <= q_idx + kv_len - q_len"
    text = example("softmax_by_hand").replace(seen, f"{seen} and not kv_idx == i * BN + 5")
    assert "the number of a block, `i`" in refused(text)


NUMBER = """Allocate Number in global (B: batch, H: heads, N: kv_len, L: q_len) as fp32
Allocate Number in register (BM) as fp32
"""
LOAD = """  Copy Number (BM) in coordinate [B = batch_idx, H = head_idx, N = i, L = block_idx]
    from global to register
  Compute S + Number and get new S
"""


def test_what_the_last_iteration_leaves_is_refused() -> None:
    late = "Compute O_register + Number and get new O_register\n"
    text = example("unscaled").replace("Copy O", f"{late}Copy O", 1)
    text = text.replace("Allocate S in", f"{NUMBER}Allocate S in", 1)
    text = text.replace("  Compute Mask", f"{LOAD}  Compute Mask", 1)
    assert "as the last iteration left it" in refused(text)


def test_a_gradient_that_would_lack_a_part_is_not_given() -> None:
    """The loop and the epilogue both add Gate to something."""
    gate = GATE.replace("O_register * sigmoid(Gate_register)", "O_register + rowsum(Gate_register)")
    text = example("softmax_by_hand").replace(
        "Compute -1e30", f"{gate.partition('Compute')[0]}Compute -1e30"
    )
    text = text.replace(
        "Compute max(Smax", "Compute S + rowsum(Gate_register) and get new S\n  Compute max(Smax"
    )
    text = text.replace("Copy O (BM", f"Compute{gate.partition('Compute')[2]}Copy O (BM")
    made = derived(text)
    assert "No gradient of Gate" in made
    assert "dGate" not in made


@pytest.mark.parametrize("name", ["n", "head", "kv_head_"])
def test_names_of_the_forward_are_no_trouble(name: str) -> None:
    text = example("softmax_by_hand", "0.125 * Smax + log(Ssum)").replace("head_idx", name)
    assert check(parse(derived(text))).diagnostics == ()


def test_tensors_of_the_forward_keep_their_names() -> None:
    """The backward has a Shift and a Delta of its own."""
    text = example("bias_prefix")
    for name in ("Shift", "Delta"):
        made = derived(text.replace("Bias", name))
        assert check(parse(made)).diagnostics == ()
        assert f"d{name}" in made
