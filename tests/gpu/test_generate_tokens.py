"""Models of transformers that generate on a GPU: prompts by our prefill, tokens by our decode.

Weights are random, made on the spot. sdpa chooses the tokens, with the same weights in bf16; ours
gets the same ones, step by step, and must choose the same in each. The two best logits of a random
model are often so close that the rounding to bf16 decides: how far it moves logits is measured,
with the same weights in fp32, and a step counts as a tie where less than that is between them.
"""

from __future__ import annotations

from typing import Any

import pytest

import flashwright

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from flashwright.serving import kernels  # noqa: E402

DEVICE = "cuda"
NEW, PROMPT = 256, 100
PADDING = (0, 37)
"""Tokens that are not there before the prompt of each sequence, in batches with padding."""
TIE = 6.0
"""Times the RMS of what rounding moves a logit: steps whose best logits are as close are ties."""
MOST_TIES = 0.2
"""Of all steps."""
COMMON: dict[str, Any] = {
    "num_hidden_layers": 2,
    "vocab_size": 512,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "eos_token_id": None,
    "tie_word_embeddings": False,  # else a token's best successor is itself
}
GEMMA2 = {
    "num_attention_heads": 8,
    "head_dim": 128,
    "sliding_window": 128,
    "attn_logit_softcapping": 30.0,
    "query_pre_attn_scalar": 128,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("sdpa", {}),
    "Qwen2": ("sdpa", {"num_key_value_heads": 2}),
    "Mistral": ("sdpa", {"sliding_window": 128}),
    "Gemma2": ("eager", GEMMA2),  # sdpa has no softcap
}
"""Windows are shorter than what is generated, so that keys leave them."""
BATCHES = [("dynamic", False), ("dynamic", True), ("static", True)]
"""The cache, and whether there is padding."""


def model_of(name: str) -> Any:
    """A model in fp32. Its weights are large enough for attention to matter."""
    flashwright.register_transformers()
    transformers.logging.set_verbosity_error()
    config = getattr(transformers, f"{name}Config")(**COMMON | FAMILIES[name][1])
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = getattr(transformers, f"{name}ForCausalLM")._from_config(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=2 * parameter.shape[-1] ** -0.5)
    return model.float().eval()


class Forced(transformers.LogitsProcessor):  # type: ignore[misc]
    """Chooses these tokens, whatever the logits are."""

    def __init__(self, tokens: Any) -> None:
        self.tokens = tokens

    def __call__(self, ids: Any, scores: Any) -> Any:
        step = self.tokens[:, ids.shape[1] - PROMPT, None]
        return torch.full_like(scores, -1.0).scatter(1, step, 1.0)


def generated(
    model: Any, way: str, cache: str, padded: bool, tokens: Any = None
) -> tuple[Any, Any]:
    """The new tokens (batch, NEW), and the logits of each step (batch, NEW, vocabulary)."""
    model.set_attn_implementation(way)
    torch.manual_seed(1)
    prompt = torch.randint(3, COMMON["vocab_size"], (len(PADDING), PROMPT), device=DEVICE)
    there = torch.ones_like(prompt)
    for row, count in zip(there, PADDING, strict=True):
        row[: count if padded else 0] = 0
    out = model.generate(
        prompt,
        attention_mask=there,
        max_new_tokens=NEW,
        min_new_tokens=NEW,
        do_sample=False,
        disable_compile=True,
        cache_implementation=cache,
        logits_processor=[Forced(tokens)] if tokens is not None else None,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return out.sequences[:, PROMPT:], torch.stack(out.logits, dim=1).float()


def rms(x: Any) -> float:
    return float(x.square().mean().sqrt())


@pytest.mark.parametrize(("cache", "padded"), BATCHES)
@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_are_those_of_sdpa(name: str, cache: str, padded: bool) -> None:
    model, way = model_of(name), FAMILIES[name][0]
    batch = cache, padded
    narrow = model_of(name).bfloat16()
    tokens, theirs = generated(narrow, way, *batch)
    _, exact = generated(model, way, *batch, tokens)
    _, ours = generated(narrow, "wright", *batch, tokens)
    noise = rms(theirs - exact)
    assert rms(ours - exact) <= 1.2 * noise
    chosen = theirs.gather(2, ours.argmax(dim=2)[..., None])[..., 0]
    behind = theirs.max(dim=2).values - chosen
    assert float(behind.max()) <= TIE * noise
    assert float((behind > 0).float().mean()) <= MOST_TIES


@pytest.mark.parametrize("name", FAMILIES)
def test_one_kernel_computes_all_steps(name: str) -> None:
    """With windows and without, dynamic and static caches, with padding and without."""
    model = model_of(name).bfloat16()
    kernels._KERNELS.clear()
    kernels._READY.clear()
    for batch in BATCHES:
        generated(model, "wright", *batch)
    assert len(kernels._KERNELS) == 1
