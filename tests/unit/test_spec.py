from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from flashwright.spec import AttentionSpec, BadSpec, dump, load, parse, parse_inline, problems


def complaints(**settings: object) -> str:
    with pytest.raises(BadSpec) as caught:
        AttentionSpec.make(**{"variant": "x", **settings})
    return "\n".join(caught.value.lines)


def test_defaults() -> None:
    spec = AttentionSpec.make(variant="mha")
    assert (spec.heads, spec.kv_heads, spec.head_dim, spec.value_dim) == (32, 32, 128, 128)
    assert AttentionSpec.make(variant="mha", heads=6).kv_heads == 6
    assert AttentionSpec.make(variant="gqa", heads=8, kv_heads=2).group == 4
    assert AttentionSpec.make(variant="x", head_dim=64).softmax_scale == 1 / 8


def test_dtypes() -> None:
    fp8 = AttentionSpec.make(variant="x", dtype="fp8")
    assert (fp8.input_dtype, fp8.output_dtype) == ("e4m3", "bf16")
    fp16 = AttentionSpec.make(variant="x")
    assert (fp16.input_dtype, fp16.output_dtype) == ("fp16", "fp16")


def test_frozen_and_hashable() -> None:
    spec = AttentionSpec.make(variant="x", dims={"pages": 4})
    with pytest.raises(ValidationError):
        spec.heads = 3
    assert hash(spec) == hash(AttentionSpec.make(variant="x", dims={"pages": 4}))


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (
            {"heads": 8, "kv_heads": 3},
            "kv_heads: kv heads (3) must divide the query heads (8): use 1, 2, 4 or 8",
        ),
        ({"heads": 1, "kv_heads": 2}, "(1): use 1"),
        ({"heads": 0}, "heads: must be at least 1, not 0"),
        ({"heads": 10**5000}, "heads: must be at most 65535, not a number that large"),
        ({"head_dim": 0}, "head_dim: must be at least 8, not 0: use a multiple of 8"),
        ({"head_dim": -64}, "head_dim: must be at least 8, not -64"),
        ({"head_dim": 520}, "head_dim: must be at most 512, not 520"),
        ({"head_dim": 100}, "head_dim: must be a multiple of 8, not 100: use 96 or 104"),
        ({"v_dim": 3}, "v_dim: must be a multiple of 8, not 3: use 8"),
        ({"window": 0}, "window: must be at least 1, not 0: leave it out for no window"),
        ({"softcap": 0.0}, "softcap: must be above 0, not 0: leave it out"),
        ({"softcap": -3.0}, "softcap: must be above 0"),
        ({"softcap": float("nan")}, "softcap: must be a finite number, not nan"),
        ({"scale": float("inf")}, "scale: must be a finite number, not inf"),
        ({"scale": 1e300}, "scale: must lie between 1e-30 and 1e30"),
        ({"tolerance": 1.0}, "tolerance: must lie between 0 and 1"),
        ({"dtype": "fp32"}, "dtype: must be 'fp16', 'bf16' or 'fp8', not 'fp32'"),
        ({"causal": 1}, "causal: must be true or false"),
        ({"heads": "8"}, "heads: must be a whole number, not '8'"),
        ({"heads": True}, "heads: must be a whole number, not true"),
        ({"hed_dim": 64}, "hed_dim: no such setting: did you mean head_dim?"),
        ({"variant": ""}, "variant: '' is not a name"),
        ({"variant": "../x"}, "variant: '../x' is not a name"),
        ({"reference": "ref.txt"}, "reference: 'ref.txt' is not a Python file"),
        ({"reference": "\ud800.py"}, "is not a Python file"),
        ({"dims": {"q_len": 4}}, "dims: q_len is always there"),
        ({"dims": {"pages": 0}}, "dims: pages must lie between 1 and"),
        ({"dims": {"a b": 1}}, "dims: 'a b' is not a name"),
        ({"stride": 64}, "stride: stride (64) must not exceed block (32)"),
        ({"top_k": 0}, "top_k: must be at least 1"),
        ({"branch": "window"}, "window: branch 'window' needs its width"),
        ({"branch": "compressed", "window": 4}, "window: branch 'compressed' has no window"),
        ({"branch": "compressed", "alibi": True}, "alibi: compressed blocks have no token"),
        ({"branch": "selected"}, "causal: branch 'selected' never looks ahead"),
        ({"backward": 1}, "backward: must be true or false"),
        ({"backward": True, "dtype": "fp8"}, "backward: gradients have no fp8: set dtype"),
    ],
)
def test_messages(settings: dict[str, object], line: str) -> None:
    assert line in complaints(**settings)


def test_every_problem_has_a_line_and_none_is_an_echo() -> None:
    lines = complaints(heads=0, head_dim=7).splitlines()
    assert [line.split(":")[0] for line in lines] == ["heads", "head_dim"]
    with pytest.raises(ValidationError) as caught:
        AttentionSpec.model_validate({})
    assert problems(caught.value) == ['variant: is missing: add variant = "mha" (any name)']


names = st.from_regex(r"[a-z][a-z0-9_]{0,8}", fullmatch=True)
widths = st.integers(1, 64).map(lambda n: 8 * n)
factors = st.floats(1e-30, 1e30)


@st.composite
def specs(draw: st.DrawFn) -> AttentionSpec:
    kv_heads = draw(st.integers(1, 64))
    branch = draw(st.sampled_from([None, "compressed", "selected", "window"]))
    window = draw(st.integers(1, 2**31 - 1)) if branch == "window" else None
    text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
    dtype = draw(st.sampled_from(["fp16", "bf16", "fp8"]))
    return AttentionSpec.make(
        variant=draw(names),
        heads=kv_heads * draw(st.integers(1, 16)),
        kv_heads=kv_heads,
        head_dim=draw(widths),
        v_dim=draw(st.none() | widths),
        dtype=dtype,
        causal=branch == "selected" or draw(st.booleans()),
        window=window,
        softcap=draw(st.none() | factors),
        alibi=branch != "compressed" and draw(st.booleans()),
        sink=draw(st.booleans()),
        scale=draw(st.none() | factors),
        lse=draw(st.booleans()),
        backward=dtype != "fp8" and draw(st.booleans()),
        branch=branch,
        block=draw(st.integers(16, 64)),
        top_k=draw(st.integers(1, 64)),
        reference=draw(st.none() | text.map(lambda t: t + ".py")),
        tolerance=draw(st.none() | st.floats(1e-9, 0.5)),
        repeatable=draw(st.booleans()),
        dims=draw(st.dictionaries(names.map("n_".__add__), st.integers(1, 2**31 - 1), max_size=3)),
    )


@given(specs())
def test_toml_round_trip(spec: AttentionSpec) -> None:
    assert parse(dump(spec)) == spec
    assert dump(parse(dump(spec))) == dump(spec)


def test_backward_is_a_flag_that_older_records_lack() -> None:
    spec = AttentionSpec.make(variant="x", **parse_inline("causal, backward"))
    assert spec.backward
    assert "backward" in spec.in_words
    assert "backward" in spec.slug
    assert spec.model_dump()["backward"] is True
    assert "backward" not in AttentionSpec.make(variant="x").model_dump()


def test_dump_is_short() -> None:
    spec = AttentionSpec.make(variant="mha", causal=True)
    assert dump(spec).splitlines() == [
        'variant = "mha"',
        "heads = 32",
        "kv_heads = 32",
        "head_dim = 128",
        'dtype = "fp16"',
        "causal = true",
    ]


def bad_file(path: Path) -> str:
    with pytest.raises(BadSpec) as caught:
        load(path)
    return "\n".join(caught.value.lines)


def test_load(tmp_path: Path) -> None:
    file = tmp_path / "spec.toml"
    file.write_text('variant = "gqa"\nkv_heads = 8\nscale = 1\n')
    assert load(file) == AttentionSpec.make(variant="gqa", kv_heads=8, scale=1.0)


def test_load_says_where(tmp_path: Path) -> None:
    file = tmp_path / "spec.toml"
    assert bad_file(file) == f"{file}: there is no such file"
    assert "cannot be read" in bad_file(tmp_path)
    file.write_text('variant = "x"\nheads = \n')
    assert bad_file(file).startswith(f"{file}:2:9: not valid TOML: ")
    file.write_text('variant = "x"\n\nhead-dim = 64\n')
    assert bad_file(file) == f"{file}:3: head-dim: no such setting: did you mean head_dim?"
    file.write_bytes(b"\xff\xfe")
    assert "is not a text file in UTF-8" in bad_file(file)
    file.write_text("a=" + "[" * 5000)
    assert "not valid TOML" in bad_file(file)


def test_inline() -> None:
    assert parse_inline("causal=true, head_dim=64, kv_heads=4") == {
        "causal": True,
        "head_dim": 64,
        "kv_heads": 4,
    }
    assert parse_inline("sink, head-dim=64, scale=0.5, dtype=fp8, window=none, dims.pages=4") == {
        "sink": True,
        "head_dim": 64,
        "scale": 0.5,
        "dtype": "fp8",
        "window": None,
        "dims": {"pages": 4},
    }
    assert parse_inline("repeatable=false, lse=false") == {"repeatable": False, "lse": False}
    assert parse_inline(" , ") == {}
    assert parse_inline("variant=12, reference='a.py'") == {"variant": "12", "reference": "a.py"}


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("head_dim", "head_dim: needs a value"),
        ("causal=", "causal: needs a value"),
        ("casual", "casual: no such setting: did you mean causal?"),
        ("=3", "=3: no such setting"),
        ("causal, causal=false", "causal: is given twice"),
        ("dims=3", "dims: give each one as dims.name=4"),
        ("dims.pages", "dims.pages: needs a value"),
    ],
)
def test_inline_messages(text: str, line: str) -> None:
    with pytest.raises(BadSpec) as caught:
        parse_inline(text)
    assert caught.value.lines[0].startswith(line)


@given(st.text())
def test_inline_never_fails_otherwise(text: str) -> None:
    with contextlib.suppress(BadSpec):
        AttentionSpec.make(**{"variant": "x", **parse_inline(text)})
