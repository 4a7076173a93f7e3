"""Models of transformers on a GPU, at real widths with random weights and few layers.

`python -m tests.gpu.test_transformers [LENGTH ...]` prints the time of a prefill of 8192 and 32768
tokens beside the other attention implementations at hand.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from typing import Any

import pytest

import flashwright

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

COMMON = {"num_hidden_layers": 2, "vocab_size": 8192, "max_position_embeddings": 65536}
GEMMA = {"attn_logit_softcapping": 50.0, "query_pre_attn_scalar": 224, "sliding_window": 4096}
GPT_OSS = {"sliding_window": 128, "num_local_experts": 4, "num_experts_per_tok": 4}
# hidden size, intermediate size, heads, KV heads, head dim
WIDTHS = {
    "Llama": (4096, 14336, 32, 8, 128),
    "Mistral": (4096, 14336, 32, 8, 128),
    "Gemma2": (3584, 14336, 16, 8, 256),
    "GptOss": (2880, 2880, 64, 8, 64),
}
MORE: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {"sliding_window": 4096},
    "Gemma2": GEMMA,
    "GptOss": GPT_OSS,
}
PEERS = ("sdpa", "flex_attention", "flash_attention_2", "flash_attention_3", "eager")
LONGEST_EAGER = 8192


def model_of(name: str, **more: Any) -> Any:
    """A model in bf16 on the GPU. Its weights are large enough for attention to matter."""
    flashwright.register_transformers()
    transformers.logging.set_verbosity_error()
    keys = ("hidden_size", "intermediate_size", "num_attention_heads")
    keys += ("num_key_value_heads", "head_dim")
    widths = dict(zip(keys, WIDTHS[name], strict=True))
    settings = {**COMMON, **widths, **MORE[name], **more}
    config = getattr(transformers, f"{name}Config")(**settings)
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = getattr(transformers, f"{name}ForCausalLM")._from_config(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return model.bfloat16().eval()


def tokens(batch: int, length: int) -> Any:
    torch.manual_seed(1)
    return torch.randint(3, 8000, (batch, length), device="cuda")


def logits(model: Any, way: str, **given: Any) -> Any:
    model.set_attn_implementation(way)
    with torch.inference_mode():
        return model(**given).logits.double()


def distance(found: Any, wanted: Any) -> float:
    """The RMS of a difference, relative to the RMS of what is wanted."""
    return float((found - wanted).square().mean().sqrt() / wanted.square().mean().sqrt())


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("name", WIDTHS)
def test_logits_are_as_exact_as_with_eager(name: str, padding: str) -> None:
    """Both in bf16, against the same weights in fp32. The window is shorter than the sequence."""
    model = model_of(name, **({} if name in ("Llama", "GptOss") else {"sliding_window": 300}))
    ids = tokens(2, 1000)
    there = torch.ones_like(ids)
    if padding != "none":
        there[1, slice(0, 333) if padding == "left" else slice(777, None)] = 0
    given = {"input_ids": ids, "attention_mask": there}
    ours = logits(model, "wright", **given)[there.bool()]
    theirs = logits(model, "eager", **given)[there.bool()]
    exact = logits(model.float(), "eager", **given)[there.bool()]
    assert distance(ours, exact) <= 1.2 * distance(theirs, exact) + 1e-3
    assert distance(ours, exact) < 0.05


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", WIDTHS)
def test_decoding_sees_what_prefill_sees(name: str, cache: str) -> None:
    """The logits of a token at a time are those of all tokens at once."""
    model = model_of(name, **({} if name in ("Llama", "GptOss") else {"sliding_window": 100}))
    model.set_attn_implementation("wright")
    ids, new = tokens(2, 300), 8
    there = torch.ones_like(ids)
    there[0, :77] = 0
    how = {
        "max_new_tokens": new,
        "min_new_tokens": new,
        "do_sample": False,
        "disable_compile": True,
    }
    how |= {"output_logits": True, "return_dict_in_generate": True, "cache_implementation": cache}
    out = model.generate(ids, attention_mask=there, **how)
    whole = torch.cat([there, torch.ones(2, new, device="cuda", dtype=there.dtype)], dim=1)
    again = logits(model, "wright", input_ids=out.sequences, attention_mask=whole)
    assert distance(torch.stack(out.logits, dim=1).double(), again[:, -new - 1 : -1]) < 0.02


def gradients(model: Any, way: str, **given: Any) -> Any:
    """Of the parameters of the first layer's attention, for the loss of the model, as one vector in
    which each has the same weight."""
    model.train().set_attn_implementation(way)
    model.zero_grad()
    model(**given, use_cache=False).loss.backward()
    found = [p.grad.double() for _, p in model.model.layers[0].self_attn.named_parameters()]
    return torch.cat([(grad / grad.square().mean().sqrt()).flatten() for grad in found])


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("name", WIDTHS)
def test_gradients_are_as_exact_as_with_eager(name: str, checkpointed: bool) -> None:
    """By the derived backward, with padding; gpt-oss has a gradient of its sinks."""
    model = model_of(name, **({} if name in ("Llama", "GptOss") else {"sliding_window": 300}))
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    ids = tokens(2, 1000)
    there = torch.ones_like(ids)
    there[1, 777:] = 0
    labels = ids.masked_fill(there == 0, -100)
    given = {"input_ids": ids, "attention_mask": there, "labels": labels}
    ours, theirs = gradients(model, "wright", **given), gradients(model, "eager", **given)
    exact = gradients(model.float(), "eager", **given)
    assert distance(ours, exact) <= 1.2 * distance(theirs, exact) + 1e-3
    assert distance(ours, exact) < 0.1


def test_training_under_autocast() -> None:
    """Weights in fp32, as a Trainer with bf16=True has them: the loss falls as with sdpa."""
    losses: dict[str, list[float]] = {}
    for way in ("wright", "sdpa"):
        model = model_of("Llama", hidden_size=512, intermediate_size=1024, num_attention_heads=8)
        model.float().train().set_attn_implementation(way)
        optimizer, ids = torch.optim.AdamW(model.parameters(), lr=1e-3), tokens(2, 500)
        losses[way] = []
        for _ in range(5):
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[way].append(float(loss))
    assert losses["wright"][-1] < 0.9 * losses["wright"][0]
    torch.testing.assert_close(
        *(torch.tensor(found) for found in losses.values()), rtol=0.02, atol=0
    )


# --- times --------------------------------------------------------------------------------------


def milliseconds(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """The median time of each call, in turns; the first call of a turn, which sets the way, is not
    timed."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(9):
        for name, call in calls.items():
            call()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(2):
                call()
            end.record()
            torch.cuda.synchronize()
            if turn >= 2:
                times[name].append(start.elapsed_time(end) / 2)
    return {name: statistics.median(found) for name, found in times.items()}


def prefill(model: Any, way: str, ids: Any) -> Callable[[], object]:
    def call() -> object:
        if model.config._attn_implementation != way:
            model.set_attn_implementation(way)
        with torch.inference_mode():
            return model(ids, use_cache=False, logits_to_keep=1).logits

    return call


def main(*lengths: str) -> None:
    """Print a line for each model and length; a peer that does not run says why."""
    for name in WIDTHS:
        model = model_of(name)
        for length in map(int, lengths or ("8192", "32768")):
            ids = tokens(1, length)
            calls = {"wright": prefill(model, "wright", ids)}
            calls["wright"]()  # makes the kernels
            for way in PEERS:
                if way == "eager" and length > LONGEST_EAGER:
                    continue
                call = prefill(model, way, ids)
                try:
                    call()
                    calls[way] = call
                except Exception as error:
                    print(f"{name} {length} {way}: {str(error).splitlines()[0][:100]}")
            alone = {way: calls.pop(way) for way in ("eager",) if way in calls}  # it is so slow
            times = milliseconds(calls) | milliseconds(alone)
            best = min((t for way, t in times.items() if way != "wright"), default=float("nan"))
            told = "  ".join(f"{way} {time:.2f}" for way, time in times.items())
            print(f"{name:8} {length:6}  {told}  ms; {best / times['wright']:.2f} times the best")
        del model
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main(*sys.argv[1:])
