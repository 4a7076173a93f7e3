"""Kernels as an attention implementation of transformers: models, masks, and which kernels.

Without a GPU the kernels' programs are interpreted, as in test_flex_attention.py.
"""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from flashwright.check.check import check
from flashwright.emulate.package import read_package
from flashwright.flex.model_kernels import specs_of
from flashwright.generate import store
from flashwright.judge.emulated import launch, new_outputs
from flashwright.lang.parse import parse
from tests.unit.emulated import needs_compilers

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.23")
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from transformers import masking_utils as masks  # noqa: E402

import flashwright  # noqa: E402
from flashwright.flex import attention as flex  # noqa: E402
from flashwright.flex import fallback  # noqa: E402
from flashwright.flex import transformers as wright  # noqa: E402
from flashwright.flex.form import form_of  # noqa: E402
from flashwright.flex.task import WrongKernel  # noqa: E402
from flashwright.flex.transformers import LayerCall, ModelMask, SpecMask  # noqa: E402
from flashwright.pytorch.operator import torch_operator  # noqa: E402
from flashwright.serving import decode_layers  # noqa: E402
from tests.unit import uncompiled  # noqa: E402
from tests.unit.test_flex_attention import CARD, Interpreted  # noqa: E402

transformers.logging.set_verbosity_error()
flashwright.register_transformers()
LENGTH = 24
SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
    "max_position_embeddings": 128,
}
GEMMA = {"sliding_window": 7, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 24}
GPT_OSS = {"sliding_window": 7, "num_local_experts": 2, "num_experts_per_tok": 2}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("sdpa", {}),
    "Mistral": ("sdpa", {"sliding_window": 7}),
    "Gemma2": ("eager", GEMMA),
    "GptOss": ("eager", GPT_OSS),
}


def made(name: str, kind: str = "ForCausalLM", **more: Any) -> Any:
    """A model with random weights that are not small, so that attention matters."""
    config = getattr(transformers, f"{name}Config")(**more)
    model = getattr(transformers, name.removesuffix("Text") + kind)._from_config(config)
    draw = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=draw) * 0.3
    return model.eval()


def family(name: str, **more: Any) -> Any:
    return made(name, **{**SMALL, **FAMILIES[name][1], **more})


def tokens(batch: int = 3) -> Any:
    return torch.randint(1, 64, (batch, LENGTH), generator=torch.Generator().manual_seed(1))


def padding(*pieces: tuple[int, int, int]) -> Any:
    """Ones, and zeros from one token to another in some sequences."""
    found = torch.ones(3, LENGTH, dtype=torch.long)
    for sequence, start, end in pieces:
        found[sequence, start:end] = 0
    return found


LEFT = padding((0, 0, 5), (1, 0, 11))
BATCHES: dict[str, dict[str, Any]] = {
    "no mask": {},
    "ones": {"attention_mask": padding()},
    "left": {"attention_mask": LEFT},
    "right": {"attention_mask": padding((0, 19, 24), (2, 15, 24))},
    "holes": {"attention_mask": padding((1, 0, 1), (1, 3, 6))},
    "packed": {
        "position_ids": torch.cat([torch.arange(9), torch.arange(15)]).expand(3, -1),
        "use_cache": False,
    },
}


def assert_same(model: Any, other: str, tolerance: float = 1e-5, **given: Any) -> None:
    """The first output is that of another implementation, where there are tokens."""
    with torch.no_grad():
        model.set_attn_implementation("wright")
        found = model(**given)[0]
        model.set_attn_implementation(other)
        expected = model(**given)[0]
    there = given.get("attention_mask")
    if there is not None and there.dim() == 2 and there.shape == found.shape[:2]:
        found, expected = found[there.bool()], expected[there.bool()]
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


# --- models on the CPU ------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_logits(name: str) -> None:
    model = family(name)
    for given in BATCHES.values():
        assert_same(model, FAMILIES[name][0], input_ids=tokens(), **given)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generate(name: str, cache: str) -> None:
    """Prefill, then a token at a time; the window leaves the cache behind."""
    model = family(name)
    how = {"max_new_tokens": 12, "do_sample": False, "cache_implementation": cache}
    how |= {"output_logits": True, "return_dict_in_generate": True}
    found = {}
    for way in ("wright", FAMILIES[name][0]):
        model.set_attn_implementation(way)
        found[way] = model.generate(tokens(), attention_mask=LEFT, **how)
    ours, theirs = found.values()
    assert torch.equal(ours.sequences, theirs.sequences)
    torch.testing.assert_close(torch.stack(ours.logits), torch.stack(theirs.logits))


def test_a_prompt_in_pieces() -> None:
    """Several queries on a cache that is not empty."""
    model = family("Mistral")
    model.set_attn_implementation("wright")
    with torch.no_grad():
        whole = model(tokens()).logits
        first = model(tokens()[:, :10])
        rest = model(tokens()[:, 10:], past_key_values=first.past_key_values).logits
    torch.testing.assert_close(torch.cat([first.logits, rest], dim=1), whole)


LLAMA4 = {"intermediate_size_mlp": 64, "num_local_experts": 2, "attention_chunk_size": 8}
T5 = {"vocab_size": 64, "d_model": 64, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 4}
BERT = {k: v for k, v in SMALL.items() if k not in ("num_key_value_heads", "head_dim")}


def test_chunks() -> None:
    text = {**SMALL, **LLAMA4, "no_rope_layer_interval": 2}
    model = transformers.Llama4ForCausalLM._from_config(transformers.Llama4TextConfig(**text))
    for batch in ("no mask", "left"):
        assert_same(model.eval(), "eager", input_ids=tokens(), **BATCHES[batch])


def test_a_position_bias_and_two_lengths() -> None:
    model = made("T5", "ForConditionalGeneration", **T5, decoder_start_token_id=0, pad_token_id=0)
    right = BATCHES["right"]["attention_mask"]
    given = {"input_ids": tokens(), "decoder_input_ids": tokens()[:, :9]}
    with torch.no_grad():
        outs = []
        for way in ("wright", "eager"):
            model.set_attn_implementation(way)
            outs.append(model(**given, attention_mask=right).logits)
    torch.testing.assert_close(*outs)


@pytest.mark.parametrize("name", ["Bert", "ModernBert"])
def test_encoders_see_all_keys(name: str) -> None:
    model = made(name, "Model", **BERT, **({"local_attention": 8} if name != "Bert" else {}))
    for batch in ("no mask", "left", "right"):
        assert_same(model, "sdpa", input_ids=tokens(), **BATCHES[batch])


def test_masks_of_the_callers_own() -> None:
    model = family("Llama")
    seen = torch.rand(3, 1, LENGTH, LENGTH, generator=torch.Generator().manual_seed(2)) < 0.5
    seen |= torch.eye(LENGTH, dtype=torch.bool)
    assert_same(model, "sdpa", input_ids=tokens(), attention_mask=seen)
    added = torch.where(seen, 0.0, torch.finfo(torch.float32).min)
    assert_same(model, "sdpa", input_ids=tokens(), attention_mask=added)


def test_gradients_on_the_cpu() -> None:
    model, grads = family("GptOss").train(), []
    for way in ("wright", "eager"):
        model.set_attn_implementation(way)
        model.zero_grad()
        labels = tokens().masked_fill(LEFT == 0, -100)
        model(tokens(), attention_mask=LEFT, labels=labels).loss.backward()
        layer = model.model.layers[0].self_attn
        grads.append([layer.q_proj.weight.grad, layer.v_proj.weight.grad, layer.sinks.grad])
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_a_compiled_model() -> None:
    model = family("Llama")
    model.set_attn_implementation("wright")
    with torch.no_grad():
        out = torch.compile(model, backend="eager")(tokens()).logits
        torch.testing.assert_close(out, model(tokens()).logits)


# --- what a layer asks for --------------------------------------------------------------------


def mask_of(function: Any, q_length: int, kv_length: int, **more: Any) -> ModelMask:
    made: ModelMask = wright.make_mask(
        batch_size=2, q_length=q_length, kv_length=kv_length, mask_function=function, **more
    )
    return made


CAUSAL = masks.causal_mask_function
WINDOW = masks.sliding_window_causal_mask_function(8)
ALL = torch.ones(2, 30, dtype=torch.bool)


@pytest.mark.parametrize(
    ("mask", "known"),
    [
        (mask_of(CAUSAL, 30, 30), SpecMask(True)),
        (mask_of(CAUSAL, 30, 30, attention_mask=ALL), SpecMask(True)),
        (mask_of(CAUSAL, 1, 30, q_offset=29), SpecMask(True)),
        (mask_of(CAUSAL, 4, 30, q_offset=126, kv_offset=100), SpecMask(True)),
        (mask_of(CAUSAL, None, 30, cache_position=torch.arange(26, 30)), SpecMask(True)),
        (mask_of(WINDOW, 30, 30), SpecMask(True, 8)),
        (mask_of(lambda b, h, q, kv: q >= 0, 9, 30), SpecMask()),
        (mask_of(lambda b, h, q, kv: abs(q - kv) <= 8, 30, 30), SpecMask(False, 9)),
    ],
)
def test_usual_masks_are_the_specs_own(mask: ModelMask, known: SpecMask) -> None:
    assert (mask.known, mask.mask_mod) == (known, None)


def visible(mask: ModelMask) -> Any:
    """Which keys each query sees, by the mask function."""
    assert mask.mask_mod is not None
    return fallback.over(mask.mask_mod, with_score=False)(*(torch.arange(n) for n in mask.shape))


def packed(length: int, *starts: int) -> Any:
    positions = torch.arange(length).expand(2, -1).clone()
    for start in starts:
        positions[:, start:] = torch.arange(length - start)
    ids = masks.find_packed_sequence_indices(positions)
    return masks.packed_sequence_compatibility_function(CAUSAL, positions, ids)


def cached(length: int) -> Any:
    """Offsets as a static cache has them."""
    return {"q_offset": torch.tensor(length)}


SAME_FORM = {
    "a static cache": (
        mask_of(CAUSAL, 4, 64, **cached(7)),
        mask_of(CAUSAL, 1, 96, **cached(30)),
    ),
    "left or right padding": (
        mask_of(CAUSAL, 30, 30, attention_mask=torch.arange(30).expand(2, -1) > 3),
        mask_of(CAUSAL, 1, 30, q_offset=29, attention_mask=torch.arange(25).expand(2, -1) < 20),
    ),
    "chunks": (
        mask_of(masks.chunked_causal_mask_function(8, torch.tensor([0, 3])), 4, 30, q_offset=26),
        mask_of(masks.chunked_causal_mask_function(8, torch.tensor([1, 0])), 1, 40, q_offset=39),
    ),
    "packed sequences": (
        mask_of(packed(30, 9), 30, 30),
        mask_of(packed(40, 5, 20), 40, 40),
    ),
}


@pytest.mark.parametrize("name", SAME_FORM)
def test_a_mask_has_one_kernel_for_all_lengths_and_offsets(name: str) -> None:
    one, other = SAME_FORM[name]
    assert one.form is not None
    assert other.form is not None
    assert one.form.key == other.form.key
    tensors = [*one.form.tensors, *other.form.tensors]
    assert {t.dtype for t in tensors} == {torch.int32}


def test_masks_show_what_transformers_shows() -> None:
    """Offsets, a window, padding with and without gaps, and tokens that are not there yet."""
    gaps = torch.rand(2, 25, generator=torch.Generator().manual_seed(3)) < 0.7
    for given in (
        {"q_length": 6, "kv_length": 40, "q_offset": torch.tensor(20)},
        {"q_length": 6, "kv_length": 30, "q_offset": 21, "kv_offset": 4, "attention_mask": gaps},
        {"q_length": 6, "kv_length": 30, "q_offset": 24, "attention_mask": ALL[:, :25]},
    ):
        for function in (CAUSAL, WINDOW, masks.chunked_causal_mask_function(8, torch.arange(2))):
            more = {"batch_size": 2, "mask_function": function}
            if isinstance(given["q_offset"], int):
                more["attention_mask"] = given.get("attention_mask")
            mask = wright.make_mask(**{**more, **given})
            call = LayerCall(mask.known, None, None, mask, {})
            expected = masks.sdpa_mask(**{**more, **given}, allow_is_causal_skip=False)
            shown = visible(mask)
            if call.known.causal:  # the last query at the last key
                shift = mask.shape[3] - mask.shape[2]
                q, kv = torch.arange(mask.shape[2])[:, None], torch.arange(mask.shape[3])
                shown = shown & (kv <= q + shift)
                if call.known.window is not None:
                    shown = shown & (kv > q + shift - call.known.window)
            assert torch.equal(shown, expected)


def test_forms() -> None:
    def behind(table: Any, reach: int) -> Any:
        return lambda b, h, q, kv: (kv > q - reach) & (table[b] > 0)

    ones, twos = torch.ones(2), torch.full((2,), 2.0)
    first = form_of(behind(ones, 3))
    assert first is not None
    assert first.tensors == (ones,)
    for other, same in ((behind(twos, 3), True), (behind(ones, 4), False), (CAUSAL, False)):
        form = form_of(other)
        assert form is not None
        assert (form.key == first.key) is same

    def two(one: Any, other: Any) -> Any:
        return lambda b, h, q, kv: one[b] > other[b]

    alike, apart = form_of(two(ones, ones)), form_of(two(ones, twos))
    assert alike is not None
    assert apart is not None
    assert alike.key != apart.key
    config = transformers.LlamaConfig()
    assert form_of(lambda b, h, q, kv: kv > q - config.num_attention_heads) is None


def heads(q_len: int = 30, kv_len: int = 30) -> tuple[Any, Any]:
    return torch.randn(2, 4, q_len, 16), torch.randn(2, 2, kv_len, 16)


@pytest.mark.parametrize(
    ("given", "settings", "extras"),
    [
        ({"scaling": 0.25}, (True, None, None, None), ()),
        ({"scaling": 16**-0.5, "is_causal": False}, (False, None, None, None), ()),
        ({"scaling": 0.2, "softcap": 30.0}, (True, None, 30.0, 0.2), ()),
        ({"sliding_window": 9}, (True, 9, None, None), ()),
        ({"s_aux": torch.zeros(4)}, (True, None, None, None), ("sink",)),
        ({"position_bias": torch.zeros(1, 4, 30, 30)}, (True, None, None, None), ("bias",)),
    ],
)
def test_keyword_arguments(given: Any, settings: tuple[Any, ...], extras: tuple[str, ...]) -> None:
    call = wright.layer_call(torch.nn.Module(), *heads(), None, **given)
    assert call.settings == settings
    assert tuple(call.tensors) == extras


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"dropout": 0.1}, "attention dropout of 0.1: our kernels have none"),
        ({"output_attentions": True}, "attn_implementation='eager'"),
        ({"cache": object()}, "a paged cache"),
        ({"attention_mask": mask_of(CAUSAL, 30, 31)}, "the mask is for 30 queries and 31 keys"),
        ({"attention_mask": torch.ones(2, 30)}, "a tensor of 2 axes"),
        ({"attention_mask": "causal"}, "attention_mask is a str"),
        ({"sliding_window": 9, "is_causal": False}, "Pass the model an attention_mask"),
    ],
)
def test_what_is_refused(given: dict[str, Any], told: str) -> None:
    with pytest.raises((ValueError, TypeError), match=told):
        decode_layers.attend(
            torch.nn.Module(), *heads(), heads()[1], **{"attention_mask": None} | given
        )


def test_a_name_with_flash_is_refused() -> None:
    with pytest.raises(ValueError, match="for a FlashAttention package; choose another"):
        flashwright.register_transformers("flashwright")


# --- kernels ----------------------------------------------------------------------------------


@pytest.fixture
def by_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors go the way of CUDA tensors."""
    monkeypatch.setenv("FLASHWRIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(flex, "torch_operator", Interpreted)
    monkeypatch.setattr(store, "_make", uncompiled.make_program)
    monkeypatch.setattr(flex, "card_of", lambda device: CARD)
    for name in ("_KERNELS", "_QUICK", "_TASKS"):
        monkeypatch.setattr(flex, name, {})
    monkeypatch.setattr(wright, "_MASKED", {})
    monkeypatch.setattr(wright, "_by_pytorch", _by_kernel)


def _by_kernel(call: LayerCall, *tensors: Any) -> Any:
    return wright.by_kernel(call, *(t.bfloat16() for t in tensors)).float()


def packages(root: Path) -> set[str]:
    return {folder.name for folder in (root / "cache" / store.PACKAGES).iterdir()}


@pytest.mark.usefixtures("by_kernels")
@pytest.mark.parametrize("name", ["Gemma2", "GptOss"])
def test_a_model_by_kernels(name: str, tmp_path: Path) -> None:
    """The kernels are those that `warm` makes: for the config, and for its padded batches."""
    model = family(name)
    for batch in ("no mask", "left"):
        assert_same(model, "eager", 0.05, input_ids=tokens(), **BATCHES[batch])
    with torch.no_grad():
        model.set_attn_implementation("wright")
        model.generate(tokens(), attention_mask=LEFT, max_new_tokens=3, do_sample=False)
    specs = specs_of(model.config.to_dict(), "bf16")
    orders = [store.Order(spec, CARD) for spec in specs]
    orders += [wright.padded_order(spec, CARD) for spec in specs]
    assert packages(tmp_path) == {order.name for order in orders}


# --- training -----------------------------------------------------------------------------------


@pytest.fixture
def launched(by_kernels: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The outputs of each launch, of operators that are real but for their kernels."""
    uncompiled.without_compiler(monkeypatch, tmp_path / "cache")
    monkeypatch.setattr(flex, "torch_operator", torch_operator)
    return uncompiled.interpret_operators(monkeypatch)


def gradients(model: Any, **given: Any) -> dict[str, Any]:
    """Of a layer's parameters, for the loss of the model."""
    model.zero_grad()
    model(**given).loss.backward()
    layer = model.model.layers[0].self_attn
    return {name: parameter.grad for name, parameter in layer.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("batch", "checkpointed"), [("no mask", True), ("left", True), ("packed", False)]
)
def test_training(batch: str, checkpointed: bool, launched: list[Any]) -> None:
    """By the derived backward of each layer's kernel, with windows, softcap and padding; a
    checkpointed layer launches its forward once more."""
    model = family("Gemma2" if batch != "packed" else "Mistral", head_dim=64).train()
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    there = BATCHES[batch].get("attention_mask", padding())
    seen = there * there.roll(1, dims=1)  # what a row without keys foretells is no part of the loss
    labels = tokens().masked_fill(seen == 0, -100)
    given = {"input_ids": tokens(), "labels": labels, **BATCHES[batch]}
    model.set_attn_implementation("wright")
    found = gradients(model, **given)
    assert launched.count(("O", "LSE")) == 2 * (1 + checkpointed)
    assert sum("dQ" in outputs for outputs in launched) == 2
    model.set_attn_implementation("eager")
    for name, wanted in gradients(model, **given).items():
        error = (found[name] - wanted).square().mean().sqrt() / wanted.square().mean().sqrt()
        assert error < 0.03, name


@pytest.mark.slow
def test_a_learned_sink(launched: list[Any]) -> None:
    model = family("GptOss", head_dim=64).train()
    given = {"input_ids": tokens(), "labels": tokens()}
    model.set_attn_implementation("wright")
    found = gradients(model, **given)["sinks"]
    assert "dSink" in launched[-1]
    model.set_attn_implementation("eager")
    torch.testing.assert_close(found, gradients(model, **given)["sinks"], rtol=0.05, atol=1e-4)


def test_first_gradients_of_a_masked_batch_are_checked(
    launched: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = []
    monkeypatch.setattr(flex, "GradientTrial", lambda *given: looked.append(given) or refuse)

    def refuse(given: Any, found: Any) -> None:
        raise WrongKernel(", ".join(found))

    model = family("Llama", head_dim=64).train()
    model.set_attn_implementation("wright")
    with pytest.raises(WrongKernel, match="dq"):
        gradients(model, input_ids=tokens(), labels=tokens(), **BATCHES["left"])
    assert all(functions[1:3] != (None, None) for functions in looked)


def test_autocast_decides_the_type() -> None:
    q, k = (t.half() for t in heads())
    assert [t.dtype for t in wright.autocast(q.float(), k)] == [torch.float32, torch.float16]
    with torch.autocast("cpu", torch.bfloat16):
        assert {t.dtype for t in wright.autocast(q.float(), k)} == {torch.bfloat16}


class Waits(TorchDispatchMode):
    """Lists the operators for whose result the host waits, with the file that asks."""

    NAMES = ("is_nonzero", "_local_scalar_dense", "item", "equal", "nonzero")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in self.NAMES:
            files = [Path(frame.filename) for frame in traceback.extract_stack()]
            asks = [f.name for f in files if {"transformers", "flashwright"} & set(f.parts)]
            self.found.append((func.overloadpacket.__name__, asks[-1]))
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("by_kernels")
@pytest.mark.parametrize("name", ["Llama", "Mistral", "Gemma2"])
def test_a_further_prefill_waits_for_no_result_and_captures_nothing(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither transformers nor we may stall the GPU, except to see whether there is padding."""
    model = family(name)
    model.set_attn_implementation("wright")

    class Silent:  # the interpreter's own work is no part of a forward
        inputs = ("q", "k", "v")

        def __init__(self, folder: Path) -> None:
            pass

        def check_first_backward(self, trial: Any) -> None:
            pass

        def __call__(self, q: Any, k: Any, v: Any, return_lse: bool, deterministic: bool) -> Any:
            assert not return_lse
            return torch.empty_like(q)

    def refuse(*given: Any, **more: Any) -> None:
        raise AssertionError("a mask is captured again")

    monkeypatch.setattr(flex, "torch_operator", Silent)
    monkeypatch.setattr(flex, "check", lambda *given: None)
    positions = torch.arange(LENGTH).expand(3, -1)
    usual = {"input_ids": tokens(), "position_ids": positions}
    with torch.inference_mode():
        model(**usual)
        for module in (flex, wright):
            monkeypatch.setattr(module, "capture", refuse)
        with Waits() as waits:
            model(**usual)
        assert not waits.found
        with Waits() as waits:
            model(**usual, attention_mask=padding())
    kinds = 2 if name == "Gemma2" else 1  # of masks
    assert waits.found == [("is_nonzero", "transformers.py")] * kinds


@pytest.mark.usefixtures("by_kernels")
@pytest.mark.parametrize("name", SAME_FORM)
def test_a_kernel_takes_the_tensors_of_each_call(name: str, tmp_path: Path) -> None:
    for mask in SAME_FORM[name]:
        assert_kernel_right(mask)
    assert len(packages(tmp_path)) == 1


def assert_kernel_right(mask: ModelMask, width: int = 16) -> None:
    draw = torch.Generator().manual_seed(4)
    q = torch.randn(2, mask.shape[2], 4, width, generator=draw).bfloat16().transpose(1, 2)
    k, v = torch.randn(2, 2, 2, mask.shape[3], width, generator=draw).bfloat16()
    call = wright.layer_call(torch.nn.Module(), q, k, mask, s_aux=torch.zeros(4))
    known = {"causal": mask.known.causal, "window": mask.known.window}
    exact = (t.double() for t in (q, k, v))
    wanted = fallback.attention(*exact, sink=torch.zeros(4), mask_mod=mask.mask_mod, **known)
    found = wright.by_kernel(call, q, k, v).double()
    torch.testing.assert_close(found, wanted, rtol=0.02, atol=0.02)


@pytest.mark.usefixtures("by_kernels")
def test_a_wrong_kernel_is_found_and_thrown_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Wrong(Interpreted):
        def __call__(self, *tensors: Any, return_lse: bool = False) -> Any:
            return super().__call__(*tensors, return_lse=return_lse) + 1

    monkeypatch.setattr(flex, "torch_operator", Wrong)
    with pytest.raises(WrongKernel):
        assert_kernel_right(SAME_FORM["a static cache"][0])
    assert not packages(tmp_path)
    assert not wright._MASKED


class Emulated:
    """An operator that emulates the kernel of a package."""

    def __init__(self, folder: Path) -> None:
        self.package = read_package(folder)
        program = check(parse((folder / "code.tl").read_text()), CARD).program
        assert program is not None
        self.names = [tensor.name for tensor in program.inputs]
        self.inputs = tuple(name.lower() for name in self.names)

    def check_first_backward(self, trial: Any) -> None:
        """There is no backward here."""

    def __call__(self, *tensors: Any, return_lse: bool = False) -> Any:
        arrays = {n: self._numpy(t) for n, t in zip(self.names, tensors, strict=True)}
        sizes = tensors[0].shape[:3]
        outputs = {"O": ((*sizes, tensors[2].shape[3]), "bf16"), "LSE": (sizes, "fp32")}
        dims = flex.dims_of(tensors[0], tensors[1])
        out = new_outputs(outputs, {})
        result = launch(self.package, {**arrays, **out}, dims, "eager", 600.0)
        assert not result.findings
        o = torch.from_numpy(out["O"].astype(np.float32)).bfloat16()
        return (o, torch.from_numpy(out["LSE"])) if return_lse else o

    @staticmethod
    def _numpy(tensor: Any) -> Any:
        if tensor.dtype != torch.bfloat16:
            return tensor.contiguous().numpy()
        return tensor.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)


@pytest.mark.slow
@needs_compilers
@pytest.mark.parametrize("name", SAME_FORM)
def test_kernels_under_emulation(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiled kernel for an H200, with the tensors of two calls."""
    monkeypatch.setenv("FLASHWRIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(flex, "torch_operator", Emulated)
    monkeypatch.setattr(flex, "card_of", lambda device: CARD)
    monkeypatch.setattr(flex, "_TASKS", {})
    monkeypatch.setattr(wright, "_MASKED", {})
    for mask in SAME_FORM[name]:
        assert_kernel_right(mask, width=64)
    assert len(packages(tmp_path)) == 1
