"""FlexAttention's functions as TL: the capture, the program, and kernels under emulation."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashwright import gpu as gpus
from flashwright.author.builtin.author import write_code, write_sketch
from flashwright.author.builtin.mods import Mods, placed
from flashwright.author.builtin.needs import Tiling
from flashwright.author.builtin.retile import retiled
from flashwright.author.builtin.variants import make_spec
from flashwright.check.check import check
from flashwright.emulate.emulate import run
from flashwright.emulate.package import read_package
from flashwright.generate import store
from flashwright.judge.emulated import launch, new_outputs
from flashwright.judge.oracle import compare, compare_lse
from flashwright.lang.format import format_expr, format_stmt
from flashwright.lang.parse import parse
from flashwright.semantics.interpret import interpret
from flashwright.spec import AttentionSpec
from tests.unit.emulated import needs_compilers
from tests.unit.together import Kernel, kernels

torch = pytest.importorskip("torch")
from flashwright.flex.blocks import blocked  # noqa: E402
from flashwright.flex.capture import Captured, NotCaptured, capture  # noqa: E402

ROOT = Path(__file__).parents[2]
FILE = ROOT / "examples" / "flex_mods.py"
Function = Callable[..., Any]


def _gallery() -> Any:
    spec = importlib.util.spec_from_file_location("flex_mods", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # Dynamo imports it by its name
    spec.loader.exec_module(module)
    return module


GALLERY = _gallery()
EVERY = (*GALLERY.MASKS, *GALLERY.SCORES)
SMALL = {"batch": 2, "heads": 4, "kv_heads": 2, "q_len": 45, "kv_len": 53}


def captured(function: Function, dims: dict[str, int]) -> Captured:
    if function in GALLERY.SCORES:
        return capture(function, None, dims)
    return capture(None, function, dims)


def spec_of(found: Captured, head_dim: int) -> AttentionSpec:
    own = dict(found.own_dims)
    return make_spec("gqa", heads=4, kv_heads=2, head_dim=head_dim, dtype="bf16", dims=own)


def problem(found: Captured, dims: dict[str, int], width: int) -> dict[str, Any]:
    """Q, K, V and the operands as arrays."""
    draw = torch.Generator().manual_seed(1)
    shapes = {"Q": ("heads", "q_len"), "K": ("kv_heads", "kv_len"), "V": ("kv_heads", "kv_len")}
    made = {
        name: torch.randn(dims["batch"], dims[h], dims[n], width, generator=draw).bfloat16()
        for name, (h, n) in shapes.items()
    }
    return {**made, **{name: source.view(dims) for name, source in found.sources.items()}}


def expected(function: Function, given: dict[str, Any], dims: dict[str, int]) -> dict[str, Any]:
    """What FlexAttention itself computes, in fp64."""
    from torch.nn.attention import flex_attention as flex
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

    flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True  # else Dynamo traces it first
    q, k, v = (given[name].double() for name in "QKV")
    how: dict[str, Any] = {"score_mod": function}
    if function in GALLERY.MASKS:
        sizes = (dims[name] for name in ("batch", "heads", "q_len", "kv_len"))
        how = {"block_mask": create_block_mask(function, *sizes, device="cpu")}
    aux = AuxRequest(lse=True)
    out, more = flex_attention(q, k, v, enable_gqa=True, return_aux=aux, **how)
    return {"O": out.numpy(), "LSE": more.lse.numpy()}


def numpy(tensor: Any) -> Any:
    import ml_dtypes

    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def assert_same(found: dict[str, Any], wanted: dict[str, Any], spec: AttentionSpec) -> None:
    for name, array in wanted.items():
        if name == "LSE":
            result = compare_lse(spec, found[name], array)
        else:
            result = compare(found[name], array, "bf16")
        assert result.ok, f"{name}: {result.reason}"


def text_of(mods: Mods) -> list[str]:
    """The statements of the mods, in order, and the mask."""
    made = placed(mods)
    score = [made.score] if made.score else []
    told = [format_stmt(s) for s in (*made.before_loop, *made.in_loop, *score)]
    return [*told, *([format_expr(made.mask)] if made.mask else [])]


# --- what is captured -------------------------------------------------------------------------

TEXTS = {
    "alibi": [
        "let SlopesHere = Slopes[head_idx]",
        "Compute S + SlopesHere * (kv_idx - q_idx) and get new S",
    ],
    "softcap": ["Compute tanh(S / 20) * 20 and get new S"],
    "causal_score": ["q_idx >= kv_idx"],
    "causal_documents": [
        "Copy Document from global to register",
        "Copy Document2 from global to register",
        "Document == Document2 and q_idx >= kv_idx",
    ],
    "pair": ["Copy PairBias from global to register", "Compute S + PairBias and get new S"],
    "prefix_lm": ["let PrefixHere = Prefix[batch_idx]", "kv_idx < PrefixHere or q_idx >= kv_idx"],
    "chunked": ["floor(q_idx / 64) == floor(kv_idx / 64) and q_idx >= kv_idx"],
    "not_the_future": ["kv_idx <= q_idx and (kv_idx <= 10 or kv_idx >= 20)"],
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_function_is_readable_tl(name: str) -> None:
    found = captured(getattr(GALLERY, name), SMALL)
    assert text_of(found.mods) == TEXTS[name]


BOUNDS = {
    "causal": (None, "(block_idx + 1) * BM"),
    "sliding_window": ("block_idx * BM - 64", "(block_idx + 1) * BM"),
    "two_sided_window": ("block_idx * BM - 47", "(block_idx + 1) * BM + 47"),
    "prefix_lm": (None, "max(PrefixHere, (block_idx + 1) * BM)"),
    "block_diffusion": (None, "(block_idx + 1) * BM + 31"),
    "neighbourhood": ("block_idx * BM - 63", "(block_idx + 1) * BM + 63"),
    "padded": (None, "LengthHere"),
    "window_per_head": ("block_idx * BM + 1 - HeadWindowHere", "(block_idx + 1) * BM"),
    "documents": (None, None),
    "permuted": (None, None),
}


@pytest.mark.parametrize("name", BOUNDS)
def test_a_mask_bounds_the_loop(name: str) -> None:
    keys = placed(captured(getattr(GALLERY, name), SMALL).mods).keys
    assert (keys.low, keys.high) == BOUNDS[name]


def test_bounds_hide_no_key_that_a_mask_shows() -> None:
    """For every mask of the gallery without data, three rows of every block and every key."""
    from flashwright.author.builtin.mods_reference import evaluate as on_arrays
    from flashwright.program.scalars import evaluate

    length = 150
    key = np.arange(length)
    for function in GALLERY.MASKS:
        mods = captured(function, SMALL).mods
        if mods.operands or mods.mask is None:
            continue
        keys = placed(mods).keys
        for block in range(-(-length // 16)):
            names = {"block_idx": block, "BM": 16}
            low, high = (
                evaluate(_expr(text), names) if text is not None else None
                for text in (keys.low, keys.high)
            )
            for q in (block * 16, block * 16 + 7, block * 16 + 15):
                here = {"q_idx": q, "kv_idx": key, "head_idx": 0, "batch_idx": 0}
                shown = key[np.broadcast_to(on_arrays(mods.mask, here, {}), length)]
                assert low is None or (shown >= low).all(), (function.__name__, q, shown)
                assert high is None or (shown < high).all(), (function.__name__, q, shown)


def _expr(text: str) -> Any:
    return parse(f"let x = {text}").body[0].value  # type: ignore[union-attr]


# --- what is refused --------------------------------------------------------------------------

table = torch.randn(8, 8)
doubles = torch.randn(64, dtype=torch.float64)
hashes = torch.full((64,), 2**40)


def by_if(b: Any, h: Any, q: Any, kv: Any) -> Any:
    if q >= kv:
        return q >= 0
    return q < 0


def by_erf(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    twice = score * 2
    return torch.erf(twice)


def by_a_sum(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return score + table[q].sum()


def by_doubles(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return score + doubles[q]


def by_numpy(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return score + float(np.sin(1.0 + kv.numpy())) if not _recorded(kv) else score + 0.5


def by_a_short_table(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return score + table[q, 0]


def by_hashes(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return hashes[q] == hashes[kv]


def by_random_numbers(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return score + torch.rand(())


def _recorded(tensor: Any) -> bool:
    return type(tensor) is not torch.Tensor


@pytest.mark.parametrize(
    ("function", "offset", "what"),
    [
        (by_if, 1, "no `if` on them"),
        (by_erf, 2, "TL has no counterpart of aten.erf.default"),
        (by_a_sum, 1, "a tensor of 1 axes where a number is needed"),
        (by_doubles, 1, "a tensor of float64"),
        (by_numpy, 0, "what was recorded gives"),
        (by_a_short_table, 1, "IndexError: index 44 is out of bounds for dimension 0"),
        (by_hashes, 1, "whole numbers beyond 2**31"),
        (by_random_numbers, 1, "aten.rand.default"),
    ],
)
def test_what_cannot_be_recorded_is_refused_with_its_line(
    function: Function, offset: int, what: str
) -> None:
    mask = function in (by_if, by_hashes)
    with pytest.raises(NotCaptured) as error:
        capture(None if mask else function, function if mask else None, SMALL)
    line = function.__code__.co_firstlineno + offset
    assert f"{Path(__file__).name}:{line}: " in str(error.value)
    assert what in str(error.value)


def test_an_index_from_the_end_is_pytorchs() -> None:
    biases = torch.arange(10.0)

    def late(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return score + biases[kv - 5] + biases[-1]

    sizes = {"batch": 1, "heads": 1, "q_len": 8, "kv_len": 8}
    read, text = text_of(capture(late, None, sizes).mods)
    assert "kv_idx - 5 + Biases_0" in text  # from the end
    assert read == "let Biases2Here = Biases2[9]"


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda s, b, h, q, kv: s / (kv - q), "S / (kv_idx - q_idx)"),
        (lambda s, b, h, q, kv: s % (kv - 1), "S % (kv_idx - 1)"),
        (lambda s, b, h, q, kv: torch.log(s * q), "log(S * q_idx)"),
        (lambda s, b, h, q, kv: torch.exp(s * 1000), "exp(S * 1000)"),
        (lambda s, b, h, q, kv: s + torch.tensor(1.0) / 0, "S + 1.0 / 0"),
    ],
)
def test_numbers_that_are_not_finite_are_pytorchs(function: Function, text: str) -> None:
    """What is recorded is compared with the function, also where Python has no number."""
    assert text_of(capture(function, None, SMALL).mods) == [f"Compute {text} and get new S"]


# --- what it computes -------------------------------------------------------------------------

FAST = ("causal_documents", "prefix_lm", "window_per_head", "global_tokens", "t5", "pair")


@pytest.mark.parametrize("name", FAST)
def test_the_program_computes_what_flex_attention_does(name: str) -> None:
    """Tiles of 16, so that the loops have ends, gaps and ragged blocks."""
    function = getattr(GALLERY, name)
    found = captured(function, SMALL)
    spec, card = spec_of(found, 16), gpus.find("a100")
    code = write_code(write_sketch(spec, found.mods), spec, card, found.mods).code
    checked = check(parse(retiled(parse(code), Tiling(16, 16, 1, 1), "small")), None, spec.dims)
    assert not checked.diagnostics
    assert checked.program is not None
    given = problem(found, SMALL, 16)
    arrays = {name: numpy(tensor) for name, tensor in given.items()}
    out = interpret(checked.program, arrays, {**spec.dims, **SMALL})
    assert_same(dict(out), expected(function, given, SMALL), spec)


GROUPED: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 64, "dtype": "bf16"}
LARGE = {"batch": 1, "heads": 4, "kv_heads": 2, "q_len": 140, "kv_len": 210}


PACKED = EVERY[::6]
"""Those whose package is made, as a call makes it; of the others the program is compiled."""
OTHERS = [f for f in EVERY if f not in PACKED]


@pytest.mark.slow
@needs_compilers
@pytest.mark.parametrize("function", PACKED, ids=lambda f: f.__name__)
def test_the_package_computes_what_flex_attention_does(
    function: Function, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel for an H200, by wgmma and TMA, under emulation."""
    emulate(captured(function, LARGE), function, tmp_path, monkeypatch)


@pytest.mark.slow
@needs_compilers
@pytest.mark.parametrize("share", range(4))
def test_the_kernels_compute_what_flex_attention_does(share: int) -> None:
    """The same of several programs that are compiled at once."""
    functions = OTHERS[share::4]
    spec, card = make_spec("gqa", **GROUPED), gpus.find("h200")
    found = [captured(function, LARGE) for function in functions]
    codes = [write_code(write_sketch(spec, f.mods), spec, card, f.mods).code for f in found]
    made = kernels([(code, spec) for code in codes], "h200")
    for function, own, kernel in zip(functions, found, made, strict=True):
        assert {"wgmma.mma_async", "cp.async.bulk"} <= {
            ".".join(name.split(".")[: 3 if name.startswith("cp") else 2])
            for name in kernel.program.names
        }
        assert kernel.plan.stays

        def launched(arrays: dict[str, Any], dims: dict[str, int], kernel: Kernel = kernel) -> Any:
            own = {name: dims[name] for name in kernel.plan.dims}
            return run(kernel.program, kernel.plan, arrays, own, "eager")

        agrees(own, function, spec, launched)


@pytest.mark.slow
@needs_compilers
@pytest.mark.parametrize(
    ("name", "full"), [("causal_documents", False), ("documents", True), ("tree", True)]
)
def test_a_kernel_that_visits_listed_blocks(
    name: str, full: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    function = getattr(GALLERY, name)
    given = problem(captured(function, LARGE), LARGE, 64)
    made = create_block_mask(function, 1, 4, 140, 210, device="cpu", BLOCK_SIZE=(64, 32))
    found = captured(function, LARGE)
    lists = blocked(made, given["Q"], given["K"])
    assert lists.used is not None
    found = replace(found, mods=replace(found.mods, lists=lists.used))
    extra = {"Counts": lists.counts, "Blocks": lists.blocks}
    extra |= {"Full": lists.full} if full else {}
    code = emulate(found, function, tmp_path, monkeypatch, extra)
    assert "for i = 0:Visited * (KeyBlock / BN)" in code
    assert ("i < FullEnd or" in code) == full


@pytest.mark.slow
@needs_compilers
def test_a_number_for_each_score_at_128_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Q is multiplied from registers, and the batches that share the numbers follow each other."""
    function = GALLERY.bias_per_head
    code = emulate(captured(function, LARGE), function, tmp_path, monkeypatch, head_dim=128)
    assert "Compute GEMM Q_register, K_shared.T and get S" in code
    assert "grid batch_idx = 0:batch, block_idx" in code


def emulate(
    found: Captured,
    function: Function,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    extra: dict[str, Any] | None = None,
    **changes: Any,
) -> str:
    """Compare a kernel under emulation with FlexAttention. Returns its program."""
    from flashwright.flex.task import Task, order_of

    monkeypatch.setenv("FLASHWRIGHT_CACHE", str(folder))
    spec = make_spec("gqa", **{**GROUPED, **changes})
    made = store.find_or_make(order_of(Task(spec, gpus.find("h200")), found), print)
    schedule = json.loads((made / "build.json").read_text())["schedule"]
    assert (schedule["products"], schedule["copies"]) == ("wgmma", "TMA")
    assert schedule["persistent"]
    package = read_package(made)
    agrees(found, function, spec, lambda a, d: launch(package, a, d, "eager", 600.0), extra)
    return (made / "code.tl").read_text()


def agrees(
    found: Captured,
    function: Function,
    spec: AttentionSpec,
    launched: Callable[[dict[str, Any], dict[str, int]], Any],
    extra: dict[str, Any] | None = None,
) -> None:
    """Compare what a launch computes with FlexAttention."""
    given = {**problem(found, LARGE, spec.head_dim), **(extra or {})}
    arrays = {name: np.ascontiguousarray(numpy(tensor)) for name, tensor in given.items()}
    wanted = expected(function, given, LARGE)
    kinds = {"O": "bf16", "LSE": "fp32"}
    out = new_outputs({name: (array.shape, kinds[name]) for name, array in wanted.items()}, {})
    result = launched({**arrays, **out}, {**found.own_dims, **LARGE})
    assert not result.findings, function.__name__
    assert_same(out, wanted, spec)


# --- the command ------------------------------------------------------------------------------


def explained(*args: str) -> tuple[int, str, str]:
    from tests.unit.test_cli import Outcome

    done = Outcome("explain-mod", *args)
    return done.code, done.out, done.err


def test_a_function_is_explained() -> None:
    code, out, _ = explained(f"{FILE}:prefix_lm", "--batch", "2")
    assert code == 0
    assert out.splitlines() == [
        "mask:  kv_idx < Prefix[batch_idx] or q_idx >= kv_idx",
        "keys:  from 0 to min(kv_len, max(PrefixHere, (block_idx + 1) * BM))",
        "  Prefix (batch) int32: one number for a block",
        "  let PrefixHere = Prefix[batch_idx]",
    ]


def test_the_whole_program_of_a_function_is_clean() -> None:
    code, out, _ = explained(f"{FILE}:alibi", "--gpu", "h200")
    assert code == 0
    assert not check(parse(out), gpus.find("h200")).diagnostics


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (f"{FILE}:causl", "has no function 'causl'"),
        (f"{FILE}:MASKS", "has no function 'MASKS'"),
        ("causal", "'causal' names no function of a file"),
        ("nowhere.py:causal", "there is no file nowhere.py"),
        (f"{FILE}:_normal", "neither score_mod nor mask_mod"),
        (f"{__file__}:by_erf", "TL has no counterpart of aten.erf.default"),
    ],
)
def test_what_cannot_be_explained_is_said(name: str, text: str) -> None:
    code, _, err = explained(name)
    assert code == 2
    assert "error[FW907]" in err
    assert text in err
