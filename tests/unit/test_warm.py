"""`flashwright warm` and flashwright.warm: the kernels of a config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import flashwright
from flashwright import Failed
from flashwright.cli.main import app
from flashwright.flex.model_kernels import specs_of
from flashwright.generate import store
from flashwright.generate.packed import PackedOrder
from tests.unit.uncompiled import make_packed, make_program

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
}
GEMMA2: dict[str, Any] = {
    "model_type": "gemma2",
    "hidden_size": 3584,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 256,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "query_pre_attn_scalar": 224,
}
GPT_OSS: dict[str, Any] = {
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
EACH = {
    "llama": (LLAMA, ["causal, 32 query heads on 8 KV heads, head dim 128, bf16"]),
    "every head has its keys": (
        {"n_head": 12, "n_embd": 768, "dtype": "float16"},
        ["causal, 12 heads, head dim 64, fp16"],
    ),
    "mistral": (
        LLAMA | {"sliding_window": 4096},
        ["causal, window of 4096, 32 query heads on 8 KV heads, head dim 128, bf16"],
    ),
    "a window that is not used": (
        LLAMA | {"sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 28},
        ["causal, 32 query heads on 8 KV heads, head dim 128, bf16"],
    ),
    "gemma 2": (
        GEMMA2,
        [
            "causal, window of 4096, softcap 50, scale 0.0668153104781061, 16 query heads on 8 KV "
            "heads, head dim 256, bf16",
            "causal, softcap 50, scale 0.0668153104781061, 16 query heads on 8 KV heads, head dim "
            "256, bf16",
        ],
    ),
    "the usual scale, said": (
        GEMMA2 | {"query_pre_attn_scalar": 256, "layer_types": ["full_attention"]},
        ["causal, softcap 50, 16 query heads on 8 KV heads, head dim 256, bf16"],
    ),
    "gpt-oss": (
        GPT_OSS,
        [
            "causal, window of 128, sink logit, 64 query heads on 8 KV heads, head dim 64, bf16",
            "causal, sink logit, 64 query heads on 8 KV heads, head dim 64, bf16",
        ],
    ),
    "text in a model of images": (
        {"model_type": "llava", "torch_dtype": "float16", "text_config": {"num_heads": 4}}
        | {"text_config": {"num_attention_heads": 4, "hidden_size": 256}},
        ["causal, 4 heads, head dim 64, fp16"],
    ),
}


@pytest.mark.parametrize("name", EACH)
def test_the_kernels_of_a_config(name: str) -> None:
    config, expected = EACH[name]
    assert [spec.in_words for spec in specs_of(config)] == expected


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({}, "num_attention_heads: is missing"),
        (LLAMA | {"hidden_size": 100}, "hidden_size: 100 is no multiple of the 32 heads"),
        (LLAMA | {"head_dim": "64"}, "head_dim: must be a whole number above 0, not '64'"),
        (LLAMA | {"head_dim": 100}, "head_dim: must be a multiple of 8"),
        (LLAMA | {"num_key_value_heads": 5}, "kv heads (5) must divide the query heads (32)"),
        (LLAMA | {"sliding_window": "x"}, "sliding_window: must be a whole number"),
        (LLAMA | {"layer_types": "full_attention"}, "layer_types: must be a list"),
        (LLAMA | {"layer_types": ["mamba"]}, "layer_types: none of mamba"),
        (GEMMA2 | {"query_pre_attn_scalar": True}, "query_pre_attn_scalar: must be a number"),
        (LLAMA | {"is_encoder_decoder": True}, "is_encoder_decoder"),
        (LLAMA | {"kv_lora_rank": 512}, "kv_lora_rank"),
    ],
)
def test_a_config_that_cannot_be_used(config: dict[str, Any], told: str) -> None:
    with pytest.raises(Failed) as failed:
        specs_of(config)
    assert told in failed.value.diagnostics[0].message
    assert failed.value.diagnostics[0].bad_input


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLASHWRIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(store, "_make", make_program)
    monkeypatch.setattr(PackedOrder, "make", make_packed)
    (tmp_path / "config.json").write_text(json.dumps(GPT_OSS))
    return tmp_path


def warm(*args: object) -> Any:
    return CliRunner().invoke(app, ["warm", *map(str, args)])


def test_kernels_are_made_once(config: Path) -> None:
    first = warm(config, "--gpu", "h200")
    assert first.exit_code == 0
    told = first.stdout.splitlines()[::2]
    assert [line.split(" in ")[0] for line in told] == ["made"] * 3
    assert "decode of up to 2 queries, keys in a cache" in told[2]
    second = warm(config / "config.json", "--gpu", "h200", "--json")
    kernels = json.loads(second.stdout)["kernels"]
    assert [kernel["made"] for kernel in kernels] == [False] * 3
    assert [Path(kernel["folder"]).is_dir() for kernel in kernels] == [True] * 3
    again = flashwright.warm(config, "h200", dtype="bf16")
    assert [str(kernel.folder) for kernel in again] == [kernel["folder"] for kernel in kernels]


@pytest.mark.usefixtures("config")
def test_padded_batches_have_kernels_of_their_own() -> None:
    pytest.importorskip("torch")
    made = flashwright.warm({**GPT_OSS, "layer_types": ["full_attention"]}, "h200", padded=True)
    assert [kernel.padded for kernel in made] == [False, True, False]
    assert made[1].in_words == f"{made[0].in_words}, padded batches"
    mask = "kv_idx >= FirstTokenHere and kv_idx < EndTokenHere"
    assert mask in (made[1].folder / "code.tl").read_text()


def test_layers_that_are_left_out_are_told(config: Path) -> None:
    types = {"layer_types": ["chunked_attention", "full_attention"]}
    (config / "config.json").write_text(json.dumps(LLAMA | types))
    result = warm(config, "--gpu", "h200")
    assert result.exit_code == 1
    assert result.stdout.startswith("made in ")
    assert "chunked_attention: the kernels of these layers are made at" in result.stderr


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, "there is no such file"),
        ("{", "is not JSON"),
        ("[1]", "is not a JSON object"),
        ("{}", "num_attention_heads: is missing"),
    ],
)
def test_bad_input(config: Path, text: str | None, told: str) -> None:
    file = config / "other.json"
    if text is not None:
        file.write_text(text)
    result = warm(file, "--gpu", "h200")
    assert result.exit_code == 2
    assert told in result.stderr
    assert "other.json" in result.stderr
