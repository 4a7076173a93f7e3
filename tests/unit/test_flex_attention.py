"""flashwright.attention and flashwright.flex_attention.

Without a GPU the CUDA path is tried with an operator that interprets the program that was made.
"""

from __future__ import annotations

import math
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashwright import gpu as gpus
from flashwright.check.check import check
from flashwright.generate import store
from flashwright.lang.parse import parse
from flashwright.semantics.interpret import interpret
from flashwright.spec import AttentionSpec

torch = pytest.importorskip("torch")
import flashwright  # noqa: E402
from flashwright.flex import attention as flex  # noqa: E402
from flashwright.flex import fallback, trial  # noqa: E402
from flashwright.flex.blocks import blocked  # noqa: E402
from flashwright.flex.task import NoKernel, Task, WrongKernel, spec_of  # noqa: E402
from tests.share import some  # noqa: E402
from tests.unit.uncompiled import make_program  # noqa: E402

CARD = gpus.find("h200")
Tensors = dict[str, Any]
HALF = torch.arange(256) // 128
EYE = torch.eye(128)


class Interpreted:
    """An operator that interprets the program of a package."""

    calls = 0

    def __init__(self, folder: Path) -> None:
        program = check(parse((folder / "code.tl").read_text()), CARD).program
        assert program is not None
        self.program = program
        self.inputs = tuple(t.name.lower() for t in program.inputs)
        self.trial: Any = None

    def check_first_backward(self, trial: Any) -> None:
        self.trial = trial

    def __call__(
        self, *tensors: Any, return_lse: bool = False, deterministic: bool | None = None
    ) -> Any:
        type(self).calls += 1
        named = zip(self.program.inputs, tensors, strict=True)
        arrays = {t.name: self._numpy(x) for t, x in named}
        k = arrays["K"]
        out = interpret(self.program, arrays, {"kv_heads": k.shape[1]})
        o = torch.from_numpy(out["O"].astype(np.float32)).bfloat16()
        return (o, torch.from_numpy(out["LSE"])) if return_lse else o

    @staticmethod
    def _numpy(tensor: Any) -> Any:
        made = tensor.float() if tensor.is_floating_point() else tensor
        return made.detach().contiguous().numpy()


@pytest.fixture(autouse=True)
def without_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHWRIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(flex, "torch_operator", Interpreted)
    monkeypatch.setattr(store, "_make", make_program)
    monkeypatch.setattr(flex, "_KERNELS", {})
    monkeypatch.setattr(flex, "_QUICK", {})
    torch.manual_seed(0)


def qkv(
    batch: int = 2, heads: int = 4, kv_heads: int = 2, q_len: int = 40, kv_len: int = 50
) -> Tensors:
    shapes = {"q": (heads, q_len), "k": (kv_heads, kv_len), "v": (kv_heads, kv_len)}
    return {n: torch.randn(batch, h, m, 16).bfloat16() for n, (h, m) in shapes.items()}


def run(
    given: Tensors, score_mod: Any = None, mask_mod: Any = None, lists: Any = None, **settings: Any
) -> tuple[Any, Any]:
    """The call as it is on a GPU."""
    task = _task(spec_of(given["q"], given["k"], given["v"], **settings))
    return flex._run(task, score_mod, mask_mod, given, lists)


@lru_cache
def _task(spec: AttentionSpec) -> Task:
    return Task(spec, CARD)


def assert_like_pytorch(
    found: Any, given: Tensors, score_mod: Any = None, mask_mod: Any = None, **settings: Any
) -> None:
    extras = {"alibi": "slopes", "sink": "sink", "bias": "bias"}
    more = {name: given[key] for name, key in extras.items() if key in given}
    mods = {"score_mod": score_mod, "mask_mod": mask_mod}
    more |= {name: function for name, function in mods.items() if function is not None}
    plain = {n: s for n, s in settings.items() if n not in ("alibi", "sink")}
    q, k, v = (given[name].double() for name in "qkv")
    if k.shape[0] < q.shape[0]:
        k, v = (t.expand(q.shape[0], *t.shape[1:]) for t in (k, v))
    out, lse = fallback.attention(q, k, v, return_lse=True, **plain, **more)
    torch.testing.assert_close(found[0].double(), out, atol=0.02, rtol=0.02)
    torch.testing.assert_close(found[1].double(), lse.double(), atol=1e-4, rtol=1e-4)


# --- one call ---------------------------------------------------------------------------------


def every_third(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (q - kv) % 3 == 0


def doubled(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return score * 2


@pytest.mark.parametrize(
    ("shape", "settings"),
    [
        ((2, 4, 40, 50), {"causal": True}),
        pytest.param((4, 40, 50), {"softcap": 10.0}, marks=pytest.mark.slow),
        pytest.param((2, 1, 1, 50), {}, marks=pytest.mark.slow),
        ((40, 1), {"window": 9, "causal": True}),
        pytest.param((1, 1, 1, 1), {}, marks=pytest.mark.slow),
    ],
)
def test_a_bias_of_any_broadcast_shape(shape: tuple[int, ...], settings: dict[str, Any]) -> None:
    given = {**qkv(), "bias": torch.randn(*shape)}
    assert_like_pytorch(run(given, **settings), given, **settings)


def test_all_at_once() -> None:
    """Softcap, ALiBi, bias, then the score; the sink, the window and the mask."""
    given = {**qkv(), "slopes": torch.rand(4), "sink": torch.randn(4), "bias": torch.randn(40, 50)}
    settings = {"causal": True, "window": 30, "softcap": 20.0}
    found = run(given, doubled, every_third, alibi=True, sink=True, **settings)
    assert_like_pytorch(found, given, doubled, every_third, **settings)


def gate(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return score * torch.sigmoid(score)


def test_in_inference_mode() -> None:
    """The first call records the functions there, the second one is outside of it."""
    with torch.inference_mode():
        given, slopes = qkv(), torch.rand(4)

        def sloped(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
            return score * torch.sigmoid(score) + slopes[h] * (kv - q)

        for score in (gate, sloped):
            assert_like_pytorch(run(given, score, every_third), given, score, every_third)
    for score in (gate, sloped):
        assert_like_pytorch(run(given, score, every_third), given, score, every_third)


def test_keys_of_one_batch_serve_all() -> None:
    given = {**qkv(), **{n: t for n, t in qkv(batch=1).items() if n != "q"}}
    assert_like_pytorch(run(given, None, every_third), given, None, every_third)


def test_a_kernel_is_made_once_and_its_first_output_checked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checked: list[Any] = []
    real = trial.check
    monkeypatch.setattr(flex, "check", lambda *args: (checked.append(args), real(*args)))
    given = qkv()
    run(given, None, every_third)
    run(qkv(q_len=33, kv_len=65), None, every_third)  # other lengths, the same kernel
    told = capsys.readouterr().err
    assert told.count("making a kernel, once: a mask of your own") == 1
    assert len(checked) == 1
    flex._KERNELS.clear()  # another process
    flex._QUICK.clear()
    run(given, None, every_third)
    assert capsys.readouterr().err == ""
    assert len(checked) == 1


def test_first_gradients_are_looked_at_with_the_functions_of_the_call() -> None:
    run(qkv(), None, every_third)
    (entry,) = flex._KERNELS.values()
    trial = entry.operator.trial  # type: ignore[attr-defined]
    assert (trial.score_mod, trial.mask_mod) == (None, every_third)


def test_a_wrong_kernel_is_not_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(Interpreted):
        def __call__(self, *tensors: Any, **how: Any) -> Any:
            out, lse = super().__call__(*tensors, return_lse=True)
            return out.roll(1, dims=2), lse

    monkeypatch.setattr(flex, "torch_operator", Wrong)
    for _ in range(2):  # and it is not kept for the next call
        with pytest.raises(WrongKernel, match="a new kernel is wrong: at batch"):
            run(qkv(), None, every_third)


def test_a_function_that_pytorch_cannot_compute_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(*_: Any) -> Any:
        raise RuntimeError("vmap: not implemented")

    monkeypatch.setattr(trial, "expected", failing)
    given = qkv()
    assert_like_pytorch(run(given, None, every_third), given, None, every_third)
    told = capsys.readouterr().err
    assert "not checked: PyTorch fails on the function: vmap: not implemented" in told


def test_a_tensor_that_is_replaced_or_changed_is_seen() -> None:
    limit = torch.tensor([10, 20])

    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return kv < limit[b]

    given = qkv()
    assert_like_pytorch(run(given, None, mask), given, None, mask)
    limit += 7  # in place
    assert_like_pytorch(run(given, None, mask), given, None, mask)
    limit = torch.tensor([5, 40])  # another tensor under the same name
    assert_like_pytorch(run(given, None, mask), given, None, mask)


class Module:
    """Functions that see an object, whose parts may change."""

    def __init__(self) -> None:
        self.limit, self.reach = torch.tensor([10, 20]), 30

    def mask(self, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (kv < self.limit[b]) & (q - kv < self.reach)

    def __call__(self, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return self.mask(b, h, q, kv)


@pytest.mark.parametrize("form", some(["method", "object", "closure"], 3))
def test_what_an_object_holds_is_seen_when_it_changes(
    form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    module, given = Module(), qkv()
    forms: dict[str, Any] = {
        "method": module.mask,
        "object": module,
        "closure": lambda b, h, q, kv: module.mask(b, h, q, kv),
    }
    mask = forms[form]
    for limit, reach in (([10, 20], 30), ([25, 5], 30), ([25, 5], 12)):
        module.limit, module.reach = torch.tensor(limit), reach
        assert_like_pytorch(run(given, None, mask), given, None, mask)
    told = capsys.readouterr().err
    assert told.count("making a kernel") == 2  # one for each number
    assert "is an object that may change inside" in told


def test_a_number_that_changes_is_seen() -> None:
    reach = 5

    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (q - kv).abs() < reach

    given = qkv()
    assert_like_pytorch(run(given, None, mask), given, None, mask)
    reach = 11
    assert_like_pytorch(run(given, None, mask), given, None, mask)


def test_torch_compile_leaves_its_graph_for_a_call() -> None:
    given = qkv()
    task = _task(spec_of(given["q"], given["k"], given["v"]))

    def model(q: Any, k: Any, v: Any) -> Any:
        return flex._run(task, None, every_third, {"q": q * 2, "k": k, "v": v})[0] + 1

    found = torch.compile(model, backend="eager")(given["q"], given["k"], given["v"])
    wanted, _ = run({**given, "q": given["q"] * 2}, None, every_third)
    torch.testing.assert_close(found, wanted + 1)


# --- block masks ------------------------------------------------------------------------------


def causal(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return q >= kv


def block_mask(mask_mod: Any) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(mask_mod, 1, 4, 48, 64, device="cpu", BLOCK_SIZE=16)


def test_a_block_mask_that_its_function_made_is_the_function() -> None:
    given = qkv(q_len=48, kv_len=64)
    assert blocked(block_mask(causal), given["q"], given["k"]).mask is causal


def test_lists_of_blocks_that_say_something_else_are_honoured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from torch.nn.attention.flex_attention import BlockMask

    made = block_mask(causal)
    counts = made.kv_num_blocks.clone()
    counts[:, 1] = 0  # head 1 skips every block that its function masks
    lists = (counts, made.kv_indices, made.full_kv_num_blocks, made.full_kv_indices)
    other = BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=16, mask_mod=causal, seq_lengths=(48, 64))
    given = qkv(q_len=48, kv_len=64)
    lists = blocked(other, given["q"], given["k"])

    def meant(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (q >= kv) & ((h != 1) | (q // 16 > kv // 16))

    assert_like_pytorch(run(given, None, lists.mask, lists=lists), given, None, meant)
    assert "blocks of 16 x 16 are not whole tiles" in capsys.readouterr().err


def test_lists_of_blocks_are_visited_where_the_mask_bounds_no_keys(tmp_path: Path) -> None:
    """Packed documents: each block of queries visits the blocks of its own documents."""
    document = torch.arange(300) // 70

    def documents(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return document[q] == document[kv]

    from torch.nn.attention.flex_attention import create_block_mask

    given = qkv(q_len=300, kv_len=300)
    mask = create_block_mask(documents, None, None, 300, 300, device="cpu", BLOCK_SIZE=(128, 64))
    lists = blocked(mask, given["q"], given["k"])
    assert lists.counts.flatten().tolist() == [3, 4, 2]
    found = run(given, None, documents, lists=lists)
    assert_like_pytorch(found, given, None, documents)
    text = only_program(tmp_path)
    assert "for i = 0:Visited * (KeyBlock / BN)" in text
    assert "Copy Document2 (BN) in coordinate [L = KeyTile]" in text
    assert "FullEnd" not in text


@pytest.mark.parametrize("heads", [None, 4])
def test_lists_where_a_gradient_is_wanted(
    heads: int | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are visited, unless heads that share keys have lists of their own."""
    document = torch.arange(300) // 70

    def documents(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return document[q] == document[kv]

    from torch.nn.attention.flex_attention import create_block_mask

    given = qkv(q_len=300, kv_len=300)
    given["k"].requires_grad_()
    mask = create_block_mask(documents, None, heads, 300, 300, device="cpu", BLOCK_SIZE=(128, 64))
    found = run(given, None, documents, lists=blocked(mask, given["q"], given["k"]))
    assert_like_pytorch(found, given, None, documents)
    assert ("Visited" in only_program(tmp_path)) == (heads is None)
    told = "heads that share keys have lists of their own" in capsys.readouterr().err
    assert told == (heads is not None)


def halves(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return HALF[q] == HALF[kv]


def minus_infinity(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return torch.where(kv % 3 == 0, score, -math.inf)


@pytest.mark.parametrize(
    ("score", "mask", "masked"),
    [
        pytest.param(doubled, None, "i < FullEnd or", marks=pytest.mark.slow),
        (None, every_third, "(q_idx - kv_idx) % 3 == 0 and"),
        (minus_infinity, None, "and kv_idx % 3 == 0"),
    ],
)
def test_full_blocks_are_masked_only_by_what_the_block_mask_does_not_say(
    score: Any, mask: Any, masked: str, tmp_path: Path
) -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    given = qkv(batch=1, q_len=256, kv_len=256)
    made = create_block_mask(halves, None, None, 256, 256, device="cpu", BLOCK_SIZE=64)
    lists = blocked(made, given["q"], given["k"])
    assert lists.full.flatten().tolist() == [2, 2, 2, 2]
    every = flex.both(mask, lists.mask)
    found = run(given, score, every, lists=lists)
    assert_like_pytorch(found, given, score, every)
    text = only_program(tmp_path)
    assert masked in text
    assert ("FullEnd" in text) == ("FullEnd" in masked)


@pytest.mark.parametrize("own", [None, every_third])
def test_blocks_of_ones_own_choice_are_asked_of_the_lists_alone(own: Any, tmp_path: Path) -> None:
    from torch.nn.attention.flex_attention import BlockMask

    given = qkv(batch=1, q_len=256, kv_len=256)
    table = torch.tensor([[2, 0, 0, 1], [0, 1, 0, 0], [0, 0, 0, 0], [1, 2, 0, 2]])
    some, full = ((table == kind).int() for kind in (1, 2))
    lists = [
        made[None, None]
        for x in (some, full)
        for made in (x.sum(1).int(), x.argsort(dim=1, descending=True, stable=True).int())
    ]
    mask = BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=64, mask_mod=own)

    def meant(b: Any, h: Any, q: Any, kv: Any) -> Any:
        here = table[q // 64, kv // 64]
        return (here == 2) | ((here == 1) & (own(b, h, q, kv) if own is not None else True))

    found = blocked(mask, given["q"], given["k"])
    assert_like_pytorch(run(given, None, found.mask, lists=found), given, None, meant)
    text = only_program(tmp_path)
    assert ("FullEnd" in text) == (own is not None)
    assert "Table" not in text


def only_program(folder: Path) -> str:
    """The program of the kernel that was made."""
    (program,) = (folder / "cache" / "packages").glob("*/code.tl")
    return program.read_text()


def test_a_mask_that_bounds_its_keys_needs_no_lists(tmp_path: Path) -> None:
    given = qkv(q_len=48, kv_len=64)
    lists = blocked(block_mask(causal), given["q"], given["k"])
    run(given, None, causal, lists=lists)
    assert "for i = 0:min(kv_len, (block_idx + 1) * BM) / BN" in only_program(tmp_path)


def window_with_sinks(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (q >= kv) & ((q - kv < 64) | (kv < 4))


def strided(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (q >= kv) & torch.where(h < 2, q - kv < 32, kv % 16 == 15)


def plain_window(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (q - kv).abs() < 100


def by_table(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (q >= kv) & ((kv < q - 127) | (EYE[q % 128, kv % 128] > 0))


def window_per_head(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (q >= kv) & (q - kv < torch.tensor([16, 48, 128, 512])[h])


@pytest.mark.parametrize(
    ("function", "visited"),
    [
        (window_with_sinks, (2.625, 0, 4.5)),  # 1, 2, then 3 of 1, 2, 3, .. blocks
        (strided, (3.1875, 0, 4.5)),
        (by_table, (4.5, 2.625, 4.5)),  # full blocks need no look at the table
        (causal, None),
        (plain_window, None),
        (window_per_head, None),
    ],
)
def test_lists_are_used_if_they_visit_clearly_fewer_blocks(
    function: Any, visited: tuple[float, float, float] | None
) -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    made = create_block_mask(function, None, 4, 1024, 1024, device="cpu")
    given = qkv(batch=1, q_len=1024, kv_len=1024)
    lists = blocked(made, given["q"], given["k"])
    if visited is None:
        assert lists.visited[0] == lists.visited[2]
        assert "within the mask's own bounds" in lists.decision
    else:
        assert lists.visited == visited
        assert "in its lists" in lists.decision
    assert (lists.used is not None) == (visited is not None)


def test_a_block_mask_for_other_lengths_is_refused() -> None:
    given = qkv(q_len=41)
    with pytest.raises(ValueError, match="block_mask is for 48 x 64 tokens, the call has 41 x 50"):
        blocked(block_mask(causal), given["q"], given["k"])


# --- what is refused --------------------------------------------------------------------------


def test_no_kernel_says_why_with_the_line() -> None:
    def by_erf(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return torch.erf(score)

    with pytest.raises(NoKernel, match=r"test_flex_attention.py:\d+: TL has no counterpart of"):
        run(qkv(), by_erf)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"q": torch.zeros(4, 40, 16)}, ValueError, "query has 3 axes"),
        ({"k": torch.zeros(2, 2, 50, 16)}, ValueError, "key is torch.float32 and query"),
        ({n: torch.zeros(2, 2, 50, 16) for n in "qkv"}, NoKernel, "query is torch.float32"),
        ({n: torch.zeros(2, 2, 5, 12).half() for n in "qkv"}, NoKernel, "head_dim: must be a mul"),
        ({"k": torch.zeros(2, 3, 50, 16).bfloat16()}, NoKernel, "must divide the query heads"),
        ({"bias": torch.zeros(3, 50)}, ValueError, "bias has 3 along q_len, which is 40 here"),
        ({"bias": torch.zeros(50).double()}, NoKernel, "bias: a tensor of float64"),
    ],
)
def test_tensors_that_do_not_fit(change: Tensors, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        run({**qkv(), **change})


# --- on the CPU -------------------------------------------------------------------------------


def test_on_the_cpu_it_is_pytorchs() -> None:
    given = {name: t.float() for name, t in qkv().items()}
    q, k, v = given["q"], given["k"], given["v"]
    out = flashwright.attention(q, k, v, causal=True)
    keys, values = (t.repeat_interleave(2, dim=1) for t in (k, v))
    bias = torch.ones(40, 50).tril(10).log()  # the last query stands at the last key
    wanted = torch.nn.functional.scaled_dot_product_attention(q, keys, values, attn_mask=bias)
    torch.testing.assert_close(out, wanted)
    found, lse = flashwright.flex_attention(q, k, v, doubled, enable_gqa=True, return_lse=True)
    scores = q @ keys.transpose(2, 3) * (2 / math.sqrt(16))
    torch.testing.assert_close(lse, scores.logsumexp(-1))
    torch.testing.assert_close(found, scores.softmax(-1) @ values)


def test_a_score_that_is_no_number_shows_on_the_cpu() -> None:
    """As in PyTorch's own flex_attention."""
    given = {name: t.float() for name, t in qkv(kv_heads=4).items()}

    def odd(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return torch.where((q == 3) & (kv == 2), torch.nan, score)

    out, lse = flashwright.flex_attention(*given.values(), odd, return_lse=True)
    rows = torch.arange(40) == 3
    assert torch.equal(lse.isnan(), rows.expand(2, 4, 40))
    assert torch.equal(out.isnan().all(-1), rows.expand(2, 4, 40))


def by_formula(
    query: Any, key: Any, value: Any, settings: dict[str, Any]
) -> tuple[Any, Any, tuple[int, ...]]:
    """O and LSE of one attention in fp64, a score at a time."""
    batch, heads, q_len, dim = query.shape
    kv_len, shared = key.shape[2], heads // key.shape[1]
    shift, o, lse = kv_len - q_len, [], []
    given = {"scale": dim**-0.5, "window": kv_len + q_len + 1, "causal": False} | settings
    for b, h, i in np.ndindex(batch, heads, q_len):
        logits, values = [], []
        for j in range(kv_len):
            s = float(query[b, h, i] @ key[b, h // shared, j]) * given["scale"]
            s = given["softcap"] * math.tanh(s / given["softcap"]) if "softcap" in given else s
            s += float(given["alibi"][h]) * (j - i - shift) if "alibi" in given else 0
            if "bias" in given:
                s += float(given["bias"].expand(batch, heads, q_len, kv_len)[b, h, i, j])
            s = s * 2 if "score_mod" in given else s
            seen = j <= i + shift or not given["causal"]
            if (
                seen
                and abs(j - i - shift) < given["window"]
                and ("mask_mod" not in given or (i - j) % 3 == 0)
            ):
                logits.append(s)
                values.append(value[b, h // shared, j])
        total = sum(map(math.exp, logits))
        total += math.exp(float(given["sink"][h])) if "sink" in given else 0
        row = sum(
            (math.exp(s) / total * v for s, v in zip(logits, values, strict=True)), 0 * value.sum()
        )
        o.append(row + torch.zeros(value.shape[3], dtype=torch.float64))
        lse.append(math.log(total) if total else -math.inf)
    rows = torch.stack(o) if o else torch.zeros(0, value.shape[3], dtype=torch.float64)
    return rows, torch.tensor(lse, dtype=torch.float64), (batch, heads, q_len)


OPTIONS: dict[str, Any] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": 2, "causal": True},
    "softcap": {"softcap": 2.0},
    "scale": {"scale": 0.3, "causal": True},
    "alibi": {"alibi": torch.tensor([0.5, 0.25, 1.0, 2.0]), "causal": True},
    "sink": {"sink": torch.tensor([0.5, -0.25, 1.0, 2.0]), "window": 1},
    "bias of a head": {"bias": torch.tensor([0.5, -0.25, 1.0, 2.0]).view(4, 1, 1)},
    "bias of all": {"bias": torch.tensor(0.5), "softcap": 3.0},
    "score_mod": {"score_mod": doubled, "causal": True},
    "mask_mod": {"mask_mod": every_third},
}
SIZES = {
    "usual": (2, 2, 3, 5, 4),
    "more queries than keys": (1, 4, 5, 3, 8),
    "no batch": (0, 2, 3, 5, 8),
    "no query": (2, 2, 0, 5, 8),
    "no key": (2, 1, 3, 0, 8),
    "nothing": (1, 2, 0, 0, 8),
}


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("options", OPTIONS)
def test_every_option_is_its_formula_on_the_cpu(options: str, sizes: str) -> None:
    """Also without keys: 0 and -inf, or the sink alone."""
    batch, kv_heads, q_len, kv_len, v_dim = SIZES[sizes]
    shapes = ((4, q_len, 8), (kv_heads, kv_len, 8), (kv_heads, kv_len, v_dim))
    q, k, v = (torch.randn(batch, *s, dtype=torch.float64).requires_grad_() for s in shapes)
    out, lse = flashwright.attention(q, k, v, return_lse=True, **OPTIONS[options])
    out.sum().backward()
    rows, logs, axes = by_formula(q.detach(), k.detach(), v.detach(), OPTIONS[options])
    torch.testing.assert_close(out.detach(), rows.view(*axes, v_dim), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(lse.detach(), logs.view(axes), atol=1e-6, rtol=1e-6)
    assert torch.equal(flashwright.attention(q, k, v, **OPTIONS[options]), out)
    assert all(t.grad is not None and t.grad.isfinite().all() for t in (q, k, v))


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"softcap": 0.0}, ValueError, "softcap: must be above 0"),
        ({"window": 0}, ValueError, "window: must be at least 1"),
        ({"window": (1, 1)}, ValueError, "window: must be a whole number"),
        ({"scale": math.nan}, ValueError, "scale: must be a finite number"),
        ({"alibi": torch.ones(5)}, ValueError, r"alibi must have the shape \(4,\), not \(5,\)"),
        ({"alibi": [1.0] * 4}, TypeError, "alibi must be a torch.Tensor, not list"),
        ({"sink": torch.ones(1)}, ValueError, r"sink must have the shape \(4,\), not \(1,\)"),
        ({"bias": torch.ones(40, 60)}, ValueError, "bias has 60 along kv_len, which is 50 here"),
        ({"bias": torch.ones(1, 1, 1, 1, 50)}, ValueError, "bias has 5 axes"),
        ({"bias": torch.ones(50).bool()}, TypeError, "bias is bool, .* pass a mask_mod"),
        ({"score_mod": 2}, TypeError, "score_mod must be a function, not int"),
        ({"mask_mod": lambda b, h, q, k: q - k}, TypeError, "mask_mod gives torch.int64"),
        ({"block_mask": "causal"}, TypeError, "block_mask must be a BlockMask"),
        ({"query": np.zeros(1)}, TypeError, "query must be a torch.Tensor, not ndarray"),
        (
            {"key": torch.zeros(3, 2, 50, 16)},
            ValueError,
            r"key must have the shape \(2, 2, 50, 16\)",
        ),
        ({"value": torch.zeros(2, 2, 49, 16)}, ValueError, "value must have the shape"),
        ({"value": torch.zeros(2, 2, 50, 16).half()}, ValueError, "value is torch.float16 and"),
        ({n: torch.zeros(2, 3, 50, 16) for n in ("key", "value")}, ValueError, "must divide heads"),
        ({n: torch.ones(2, 2, 50, 16).int() for n in ("query", "key", "value")}, TypeError, "floa"),
    ],
)
def test_what_does_not_fit_is_said_on_the_cpu(
    change: Tensors, error: type[Exception], text: str
) -> None:
    named = zip(("query", "key", "value"), qkv().values(), strict=True)
    given = {**{name: tensor.float() for name, tensor in named}, **change}
    with pytest.raises(error, match=text):
        flashwright.attention(**given)


def test_an_output_of_fp8_is_bf16_on_the_cpu_too() -> None:
    given = [t.to(torch.float8_e4m3fn) for t in qkv().values()]
    wanted = flashwright.attention(*(t.float() for t in given))
    found = flashwright.attention(*given)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), wanted, atol=0.01, rtol=0.01)


def test_a_first_call_without_keys_leaves_the_look_to_a_later_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked: list[Any] = []
    monkeypatch.setattr(flex, "check", lambda *given: looked.append(given))
    run(qkv(kv_len=0))
    assert not looked
    run(qkv())
    run(qkv())
    assert len(looked) == 1


def test_gradients_work_on_the_cpu() -> None:
    given = {name: t.float().requires_grad_() for name, t in qkv().items()}
    flashwright.attention(given["q"], given["k"], given["v"], causal=True).sum().backward()
    assert all(t.grad is not None and t.grad.isfinite().all() for t in given.values())


def test_a_table_of_another_length_needs_no_other_kernel(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for size in (200, 300):
        table = torch.randn(size)

        def score(s: Any, b: Any, h: Any, q: Any, kv: Any, table: Any = table) -> Any:
            return s + table[q - kv + 100]

        given = qkv()
        assert_like_pytorch(run(given, score), given, score)
    assert capsys.readouterr().err.count("making a kernel") == 1


@pytest.mark.parametrize("function", [flashwright.attention, flashwright.flex_attention])
def test_a_tensor_without_four_axes_is_named(function: Any) -> None:
    given = [torch.zeros(1, 2, 8, 16) for _ in "qkv"]
    for place, name in enumerate(("query", "key", "value")):
        wrong = [t[0] if n == place else t for n, t in enumerate(given)]
        with pytest.raises(
            ValueError, match=f"{name} has 3 axes: pass .batch, heads, length, dim."
        ):
            function(*wrong)
