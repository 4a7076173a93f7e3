from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from flashwright.judge import oracle
from flashwright.judge.inputs import DTYPES, KINDS, make_inputs, random_tensor
from flashwright.judge.oracle import compare, compare_lse
from flashwright.judge.reference import user_reference
from flashwright.spec import AttentionSpec, BadSpec
from tests.hardware.matrix import cut_off, rounded

Array = NDArray[Any]
SMALL = {"heads": 4, "kv_heads": 2, "head_dim": 8}


def spec_of(**settings: object) -> AttentionSpec:
    return AttentionSpec.make(**{"variant": "t", **SMALL, **settings})


def sees(spec: AttentionSpec, row: int, key: int, q_len: int, kv_len: int, tokens: int) -> bool:
    """The definition once more, one pair at a time."""
    if spec.branch == "compressed":
        end = key * spec.stride + spec.block - 1
        return not spec.causal or end <= row + tokens - q_len
    p = row + kv_len - q_len
    if spec.causal and key > p:
        return False
    return spec.window is None or (p - spec.window < key < p + spec.window)


def by_loops(
    spec: AttentionSpec, x: dict[str, Array], b: int, h: int, row: int, tokens: int
) -> tuple[list[float], float]:
    """One row of O, and its LSE, in plain Python."""
    heads, q_len = x["Q"].shape[1:3]
    kv_heads, kv_len = x["K"].shape[1:3]
    kv = h // (heads // kv_heads)
    p = row + kv_len - q_len
    scores: dict[int, float] = {}
    for key in range(kv_len):
        if not sees(spec, row, key, q_len, kv_len, tokens):
            continue
        if spec.branch == "selected":
            mine = [int(i) for i in x["Idx"][b, kv, row] if i >= 0]
            if key // spec.selected_block not in mine:
                continue
        pairs = zip(x["Q"][b, h, row], x["K"][b, kv, key], strict=True)
        s = sum(float(a) * float(c) for a, c in pairs)
        s *= spec.scale if spec.scale is not None else spec.head_dim**-0.5
        if spec.softcap is not None:
            s = spec.softcap * math.tanh(s / spec.softcap)
        if spec.alibi:
            s += float(x["Slopes"][h]) * (key - p)
        scores[key] = s
    width = x["V"].shape[3]
    total = sum(math.exp(s) for s in scores.values())
    if spec.sink:
        total += math.exp(float(x["Sink"][h]))
    if total == 0:
        return [0.0] * width, -math.inf
    out = [
        sum(math.exp(s) * float(x["V"][b, kv, key, d]) for key, s in scores.items()) / total
        for d in range(width)
    ]
    return out, math.log(total)


OPTIONS: list[dict[str, object]] = [
    {},
    {"causal": True},
    {"window": 3},
    {"window": 3, "causal": True},
    {"softcap": 2.0},
    {"alibi": True, "causal": True},
    {"sink": True, "causal": True},
    {"scale": 0.7, "v_dim": 16},
    {"dtype": "fp8"},
    {"dtype": "bf16", "kv_heads": 1},
    {"branch": "compressed", "block": 4, "stride": 2},
    {"branch": "compressed", "block": 4, "stride": 2, "causal": True, "sink": True},
    {"branch": "selected", "causal": True, "selected_block": 2, "top_k": 2},
    {"branch": "selected", "causal": True, "selected_block": 4, "top_k": 3, "softcap": 3.0},
    {"branch": "window", "causal": True, "window": 2},
    {"window": 4, "causal": True, "softcap": 5.0, "alibi": True, "sink": True, "scale": 0.2},
]
LENGTHS = [(5, 5), (3, 9), (9, 4), (1, 7), (4, 1)]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_against_loops(
    options: dict[str, object], lengths: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oracle, "_ROWS", 4)  # so that the blocks of rows are tried too
    spec = spec_of(**options)
    q_len, kv_len = lengths
    tokens = 2 * kv_len + 1
    dims = {"batch": 2, "q_len": q_len, "kv_len": kv_len, "tokens": tokens}
    x = make_inputs(spec, dims, seed=3)
    got = oracle.attention(spec, x, dims)
    seen = oracle.visible(spec, q_len, kv_len, tokens)
    for b, h, row in np.ndindex(2, spec.heads, q_len):
        out, lse = by_loops(spec, x, b, h, row, tokens)
        np.testing.assert_allclose(got["O"][b, h, row], out, rtol=1e-12, atol=1e-13)
        np.testing.assert_allclose(got["LSE"][b, h, row], lse, rtol=1e-12, atol=1e-13)
        for key in range(kv_len):
            assert seen[row, key] == sees(spec, row, key, q_len, kv_len, tokens)


def test_rows_that_see_nothing() -> None:
    dims = {"batch": 1, "q_len": 6, "kv_len": 4}
    spec = spec_of(causal=True)
    got = oracle.attention(spec, make_inputs(spec, dims, 0), dims)
    assert not got["O"][:, :, :2].any()
    assert np.isneginf(got["LSE"][:, :, :2]).all()
    assert np.isfinite(got["LSE"][:, :, 2:]).all()
    spec = spec_of(causal=True, sink=True)
    x = make_inputs(spec, dims, 0)
    got = oracle.attention(spec, x, dims)
    assert not got["O"][:, :, :2].any()
    np.testing.assert_allclose(got["LSE"][0, :, 0], x["Sink"], rtol=1e-15)


def test_tokens_default_to_q_len() -> None:
    spec = spec_of(branch="compressed", causal=True, block=4, stride=2)
    assert (oracle.visible(spec, 9, 3) == oracle.visible(spec, 9, 3, tokens=9)).all()
    assert oracle.visible(spec, 9, 3).sum(axis=1).tolist() == [0, 0, 0, 1, 1, 2, 2, 3, 3]
    assert spec.compressed_blocks(9) == 3
    assert spec.compressed_blocks(3) == 0


def test_unused_blocks_are_not_seen() -> None:
    spec = spec_of(branch="selected", causal=True, selected_block=2, top_k=3)
    idx = np.array([[0, -1, -1], [-1, -1, -1], [1, 2, 99]], np.int32)
    seen = oracle.chosen(spec, idx, 5)
    assert seen.astype(int).tolist() == [[1, 1, 0, 0, 0], [0, 0, 0, 0, 0], [0, 0, 1, 1, 1]]


@pytest.mark.parametrize("sizes", [(0, 4), (4, 0), (0, 0)])
def test_empty_lengths(sizes: tuple[int, int]) -> None:
    spec = spec_of(sink=True)
    dims = {"batch": 1, "q_len": sizes[0], "kv_len": sizes[1]}
    x = make_inputs(spec, dims, 0)
    got = oracle.attention(spec, x, dims)
    assert got["O"].shape == (1, 4, sizes[0], 8)
    assert oracle.weights(spec, x, dims, 0, 0).scores.shape == sizes
    if sizes[0]:
        np.testing.assert_allclose(got["LSE"][0, :, 0], x["Sink"])


def test_weights_rebuild_the_output() -> None:
    spec = spec_of(causal=True, window=5)
    dims = {"batch": 1, "q_len": 9, "kv_len": 12}
    x = make_inputs(spec, dims, 1)
    w, s = oracle.weights(spec, x, dims, 0, 3)
    v = x["V"][0, 1].astype(float)
    expected = oracle.attention(spec, x, dims)["O"][0, 3]
    np.testing.assert_allclose((w @ v) / w.sum(1, keepdims=True), expected, rtol=1e-12)
    assert (w.max(axis=1) == 1).all()
    assert ((w == 0) == np.isneginf(s)).all()


def test_huge_logits_do_not_overflow() -> None:
    spec = spec_of()
    dims = {"batch": 1, "q_len": 3, "kv_len": 4}
    x = make_inputs(spec, dims, 0)
    x["Q"] = (x["Q"].astype(np.float64) * 1e5).astype(np.float64)
    got = oracle.attention(spec, x, dims)
    assert np.isfinite(got["O"]).all()
    assert np.isfinite(got["LSE"]).all()


@pytest.mark.parametrize(
    ("options", "break_it", "message"),
    [
        ({"sink": True}, lambda x: x.pop("Sink"), "Sink must have the shape"),
        ({}, lambda x: x.update(K=x["K"][:, :, :, :4]), "K must have the shape"),
        ({}, lambda x: x.update(V=x["V"][:, :1]), "V must have the shape"),
        ({}, lambda x: x.update(K=x["K"][:, [0, 1, 1]]), "K has 3 heads"),
        ({}, lambda x: x.update(Q=x["Q"][0]), "Q must be given as"),
        ({}, lambda x: x.update(Q=x["Q"][:, :, 1:]), "dim q_len is 3"),
    ],
)
def test_inputs_that_do_not_fit(options: dict[str, object], break_it: Any, message: str) -> None:
    spec = spec_of(**options)
    dims = {"batch": 1, "q_len": 3, "kv_len": 4}
    x = make_inputs(spec, dims, 0)
    break_it(x)
    with pytest.raises(ValueError, match=message):
        oracle.attention(spec, x, dims)


# inputs


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("asked", "done"),
    [
        ({"sink": True}, {}),
        ({"causal": True}, {}),
        ({"window": 64}, {"window": 65}),
        ({"alibi": True, "causal": True}, {"causal": True}),
    ],
    ids=["sink", "causal", "window", "alibi"],
)
def test_inputs_show_what_was_left_out(
    kind: str, asked: dict[str, object], done: dict[str, object]
) -> None:
    if kind == "spectrum" and {"sink", "alibi"} & set(asked):
        pytest.skip("its sinks and slopes are so small that they leave the weights as they are")
    spec, lazy = spec_of(**asked, dtype="bf16"), spec_of(**done, dtype="bf16")
    dims = {"batch": 1, "q_len": 150, "kv_len": 200}
    x = make_inputs(spec, dims, 2, kind)
    found, true = oracle.attention(lazy, x, dims), oracle.attention(spec, x, dims)
    assert not compare(found["O"], true["O"], "bf16").ok


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_follow_the_seed(kind: str) -> None:
    spec = spec_of(dtype="bf16", alibi=True, sink=True)
    dims = {"batch": 2, "q_len": 5, "kv_len": 40}
    one, same, other = (make_inputs(spec, dims, seed, kind) for seed in (1, 1, 2))
    assert set(one) == {"Q", "K", "V", "Slopes", "Sink"}
    assert one["Q"].dtype == ml_dtypes.bfloat16
    for name in one:
        assert one[name].tobytes() == same[name].tobytes()
        assert np.isfinite(one[name].astype(float)).all()
    assert one["Q"].tobytes() != other["Q"].tobytes()
    plain = make_inputs(spec_of(dtype="bf16"), dims, 1, kind)
    assert plain["V"].tobytes() == one["V"].tobytes()  # another tensor's stream is its own


def test_kinds_are_what_they_say() -> None:
    spec = spec_of(head_dim=64)
    dims = {"batch": 1, "q_len": 64, "kv_len": 256}
    logits = {}
    for kind in KINDS:
        x = make_inputs(spec, dims, 0, kind)
        logits[kind] = oracle.weights(spec, x, dims, 0, 0).scores
        if kind == "one_hot_v":
            assert (x["V"].astype(float).sum(axis=-1) == 1).all()
    assert np.abs(logits["scaled"]).max() < 0.1
    assert logits["shifted"].mean() > 60
    assert logits["peaked"].std() > 6
    assert np.abs(logits["outliers"]).max() > 2 * np.abs(logits["normal"]).max()


def test_slopes() -> None:
    slopes = make_inputs(spec_of(alibi=True), {"batch": 1, "q_len": 1, "kv_len": 1}, 0)["Slopes"]
    assert slopes.tolist() == [2**-2, 2**-4, 2**-6, 2**-8]


@pytest.mark.parametrize("lengths", [(20, 20), (3, 33), (9, 4)])
def test_selected_blocks(lengths: tuple[int, int]) -> None:
    spec = spec_of(branch="selected", causal=True, selected_block=4, top_k=3)
    q_len, kv_len = lengths
    idx = make_inputs(spec, {"batch": 2, "q_len": q_len, "kv_len": kv_len}, 5)["Idx"]
    assert idx.shape == (2, 2, q_len, 3)
    assert idx.dtype == np.int32
    for b, h, row in np.ndindex(2, 2, q_len):
        p = row + kv_len - q_len
        used = [int(i) for i in idx[b, h, row] if i >= 0]
        assert idx[b, h, row].tolist() == used + [-1] * (3 - len(used))
        assert used == sorted(set(used))
        if p < 0:
            assert not used
        else:
            assert p // 4 in used
            assert max(used) <= p // 4
            assert len(used) == min(3, p // 4 + 1)


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("kind", KINDS)
def test_random_tensor(dtype: str, kind: str) -> None:
    rng = np.random.default_rng(0)
    x = random_tensor((3, 300, 16), dtype, rng, kind)
    assert x.dtype == DTYPES[dtype]
    assert np.isfinite(x.astype(float)).all()
    assert random_tensor((), dtype, rng, kind).shape == ()
    assert random_tensor((0, 4), dtype, rng, kind).shape == (0, 4)
    if dtype == "int32":
        assert x.min() >= 0
        assert x.max() < 16


def test_unknown_names() -> None:
    rng = np.random.default_rng(0)
    with pytest.raises(ValueError, match="no such kind of inputs: odd"):
        random_tensor((1,), "fp16", rng, "odd")
    with pytest.raises(ValueError, match="no such dtype: fp4"):
        random_tensor((1,), "fp4", rng)
    with pytest.raises(ValueError, match="dims lack batch"):
        make_inputs(spec_of(), {"q_len": 1, "kv_len": 1}, 0)


# compare


def honest(spec: AttentionSpec, x: dict[str, Array]) -> dict[str, Array]:
    """fp32 scores and sums; P and O rounded, as a kernel does it."""
    f = np.float32
    group = spec.group
    k, v = (np.repeat(x[n].astype(f), group, axis=1) for n in ("K", "V"))
    s = x["Q"].astype(f) @ np.swapaxes(k, 2, 3) * f(spec.softmax_scale)
    s[..., ~oracle.visible(spec, s.shape[2], s.shape[3])] = -np.inf
    top = s.max(axis=-1, keepdims=True)
    p = np.exp(s - np.where(np.isneginf(top), f(0), top))
    total = p.sum(axis=-1, keepdims=True)
    out = p.astype(DTYPES[spec.input_dtype]).astype(f) @ v
    with np.errstate(divide="ignore", invalid="ignore"):
        out = np.where(total > 0, out / total, f(0)).astype(DTYPES[spec.output_dtype])
        return {"O": out, "LSE": (top + np.log(total))[..., 0]}


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp8"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", [(1, 7), (40, 33), (200, 520)])
def test_honest_rounding_passes(dtype: str, kind: str, lengths: tuple[int, int]) -> None:
    spec = spec_of(dtype=dtype, causal=True, head_dim=64)
    dims = {"batch": 1, "q_len": lengths[0], "kv_len": lengths[1]}
    x = make_inputs(spec, dims, 7, kind)
    true, found = oracle.attention(spec, x, dims), honest(spec, x)
    result = compare(found["O"], true["O"], dtype)
    assert result.ok, result.reason
    assert result.bad == 0
    assert result.worst is None
    lse = compare_lse(spec, found["LSE"], true["LSE"])
    assert lse.ok, lse.reason


@pytest.fixture(scope="module")
def sample() -> dict[str, Array]:
    spec = AttentionSpec.make(variant="t", heads=2, head_dim=64, causal=True)
    dims = {"batch": 1, "q_len": 300, "kv_len": 300}
    return {**oracle.attention(spec, make_inputs(spec, dims, 0), dims)}


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp8"])
def test_one_element_off_by_20_roundoffs(sample: dict[str, Array], dtype: str) -> None:
    true = sample["O"]
    row = np.sqrt((true[0, 1, 250] ** 2).mean())
    found = true.copy()
    found[0, 1, 250, 9] += 20 * oracle.ROUNDOFF[dtype] * row
    result = compare(found, true, dtype)
    assert not result.ok
    assert result.bad == 1
    assert result.first is not None
    assert result.first == result.worst
    assert result.first.index == (0, 1, 250, 9)
    assert result.first.expected == true[0, 1, 250, 9]
    assert "the worst at (0, 1, 250, 9)" in result.reason


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp8"])
def test_noise_below_the_elements_limit_still_fails_as_rms(
    sample: dict[str, Array], dtype: str
) -> None:
    true = sample["O"]
    row = np.sqrt((true**2).mean(axis=-1, keepdims=True))
    sign = np.random.default_rng(0).choice([-1, 1], true.shape)
    result = compare(true + 4 * oracle.ROUNDOFF[dtype] * row * sign, true, dtype)
    assert not result.ok
    assert result.bad == 0
    assert "relative RMS error" in result.reason
    assert compare(true + 4 * oracle.ROUNDOFF[dtype] * row * sign, true, dtype, 0.4).ok


def test_zeros_nan_and_unwritten(sample: dict[str, Array]) -> None:
    true = sample["O"]
    assert compare(np.zeros_like(true), true, "fp8", 0.99).reason == "every element is 0"
    found = true.copy()
    found[0, 0, 5, 1] = np.nan
    found[0, 0, 7, 1] = np.inf
    result = compare(found, true, "fp16")
    assert not result.ok
    assert result.nonfinite == 2
    assert result.first is not None
    assert result.first.index == (0, 0, 5, 1)
    assert not compare(np.full_like(true, np.nan), true, "fp16").ok
    assert compare(np.zeros((2, 3)), np.zeros((2, 3)), "fp16").ok
    assert not compare(np.ones((2, 3)), np.zeros((2, 3)), "fp16").ok


def test_one_wrong_small_row(sample: dict[str, Array]) -> None:
    true = sample["O"] * np.geomspace(1, 1e-4, 300)[:, None]
    found = true.copy()
    found[0, 0, -1] = 0  # 1e-4 of the greatest row: only the row's own RMS shows it
    assert not compare(found, true, "fp16").ok


def test_shapes() -> None:
    assert compare(np.ones((2, 3)), np.ones((3, 2)), "fp16").reason == (
        "the shape is (2, 3), not (3, 2)"
    )
    assert compare(np.ones((0, 3)), np.ones((0, 3)), "fp16").ok
    assert compare(np.array(1.0), np.array(1.0), "fp16").ok
    assert not compare(np.array(1.0), np.array(2.0), "fp16").ok
    assert "the reference has 1 NaN" in compare(np.ones(2), np.array([1, np.nan]), "fp16").reason


def test_lse(sample: dict[str, Array]) -> None:
    spec = spec_of()
    true = sample["LSE"].copy()
    true[0, 0, :3] = -np.inf
    assert compare_lse(spec, true.astype(np.float32), true).ok
    for value in (-1e30, 0.0, np.nan, np.inf):
        found = true.copy()
        found[0, 0, 1] = value
        result = compare_lse(spec, found, true)
        assert not result.ok
        assert result.first is not None
        assert result.first.index == (0, 0, 1)
    found = true.copy()
    found[0, 0, 200] = -np.inf
    assert compare_lse(spec, found, true).nonfinite == 1
    found = true.copy()
    found[0, 0, 200] += 1 / 4096  # one key of 4096 forgotten
    assert not compare_lse(spec, found, true).ok


def scores_of_bytes(q: Array, k: Array) -> Array:
    """Q K^T as Hopper's wgmma adds it up, 32 bytes at a time."""
    sums, kinds = np.zeros((len(q), len(k)), np.uint32), ("e4m3", "e4m3", "f32")
    for at in range(0, q.shape[1], 32):
        left, right = (x[:, at : at + 32].view(np.uint8) for x in (q, k))
        sums = rounded(cut_off(left, right.T, sums, kinds).d, "f32")
    return sums.view(np.float32).astype(np.float64)


def lse_of(scores: Array) -> Array:
    top = scores.max(axis=1)
    found: Array = top + np.log(np.exp(scores - top[:, None]).sum(axis=1))
    return found[None, None]


def bytes_of(kind: str, width: int) -> tuple[AttentionSpec, Array, Array, Array]:
    """Q and K of one head, and their scores."""
    spec = spec_of(dtype="fp8", head_dim=width, heads=1, kv_heads=1)
    x = make_inputs(spec, {"batch": 1, "q_len": 100, "kv_len": 100}, 3, kind)
    q, k = (x[name][0, 0] for name in ("Q", "K"))
    return spec, q, k, q.astype(np.float64) @ k.astype(np.float64).T * spec.softmax_scale


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [64, 128])
def test_a_tensor_cores_sums_of_bytes_pass(kind: str, width: int) -> None:
    spec, q, k, exact = bytes_of(kind, width)
    found = lse_of(scores_of_bytes(q, k) * spec.softmax_scale)
    result = compare_lse(spec, found, lse_of(exact))
    assert result.ok, result.reason


@pytest.mark.parametrize("width", [64, 128])
def test_wrong_scores_of_bytes_do_not(width: int) -> None:
    """A key in fifty that is forgotten; scores that are half a percent too large."""
    spec, _, _, exact = bytes_of("normal", width)
    assert not compare_lse(spec, lse_of(exact[:, :-2]), lse_of(exact)).ok
    for kind in ("shifted", "peaked"):
        spec, _, _, exact = bytes_of(kind, width)
        assert not compare_lse(spec, lse_of(exact * 1.005), lse_of(exact)).ok


def test_underflow_in_fp16_is_excused() -> None:
    true = np.full((2, 8), 2.0**-26)
    assert compare(np.zeros((2, 8)), true, "fp16").ok
    assert not compare(np.zeros((2, 8)), true, "bf16").ok


# the user's own reference


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_user_reference(tmp_path: Path) -> None:
    file = write(
        tmp_path / "mine.py",
        "import numpy as np\n"
        "def reference(inputs, dims):\n"
        "    assert inputs['Q'].dtype == np.float64 and inputs['I'].dtype == np.int32\n"
        "    inputs['Q'] += 1\n"
        "    return {'O': inputs['Q'] * dims['n']}\n"
        "def make_inputs(rng, dims):\n"
        "    return {'Q': rng.random(dims['n'])}\n",
    )
    reference = user_reference(file)
    q = np.ones(3, ml_dtypes.bfloat16)
    assert reference({"Q": q, "I": np.zeros(2, np.int32)}, {"n": 2})["O"].tolist() == [4, 4, 4]
    assert (q == 1).all()
    made = reference.make_inputs(np.random.default_rng(0), {"n": 5})
    assert made is not None
    assert made["Q"].shape == (5,)
    single = user_reference(write(tmp_path / "one.py", "reference = lambda i, d: i['Q']"))
    assert single({"Q": q}, {})["O"].tolist() == [1, 1, 1]
    assert single.make_inputs(np.random.default_rng(0), {}) is None


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("x = 1\ndef reference(:\n", ":2: SyntaxError: "),
        ("x = 1\ny = 1 / 0\n", ":2: ZeroDivisionError: division by zero"),
        ("import no_such_module_here\n", ":1: ModuleNotFoundError"),
        ("raise SystemExit(3)\n", ":1: SystemExit: 3"),
        ("x = 1\n", ": defines no reference: add def reference(inputs, dims)"),
        ("reference = 3\n", ": defines no reference"),
        ("def reference(i, d): pass\nmake_inputs = 3\n", ": make_inputs is no function"),
        ("x = '\0'\n", "mine.py"),
    ],
)
def test_user_reference_that_does_not_load(tmp_path: Path, text: str, line: str) -> None:
    file = write(tmp_path / "mine.py", text)
    with pytest.raises(BadSpec) as caught:
        user_reference(file)
    assert str(file) in caught.value.lines[0]
    assert line in caught.value.lines[0]


@pytest.mark.parametrize(
    ("body", "line"),
    [
        ("return inputs['X']", ":2: KeyError: 'X'"),
        ("return np.linalg.inv(3)", ":2: NameError"),
        ("return 'text'", ": reference returned no array of numbers for O"),
        ("return None", ": reference returned no array of numbers for O"),
        ("return {'O': [[1], [1, 2]]}", ": reference returned no array of numbers for O"),
    ],
)
def test_user_reference_that_fails(tmp_path: Path, body: str, line: str) -> None:
    file = write(tmp_path / "mine.py", f"def reference(inputs, dims):\n    {body}\n")
    reference = user_reference(file)
    with pytest.raises(BadSpec) as caught:
        reference({}, {})
    assert f"{file}{line}" in caught.value.lines[0]


def test_missing_user_reference(tmp_path: Path) -> None:
    with pytest.raises(BadSpec, match="cannot be read"):
        user_reference(tmp_path / "none.py")
