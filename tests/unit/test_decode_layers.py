"""Decode steps of transformers' models: which keys each sequence's query sees, and the one kernel
that computes all steps. Without a GPU its program is interpreted, as in test_kvcache.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from flashwright.author.builtin.variants import make_spec
from flashwright.flex.model_kernels import step_of
from flashwright.generate.packed import PackedOrder

torch = pytest.importorskip("torch")
from flashwright.flex import attention as flex  # noqa: E402
from flashwright.flex import fallback  # noqa: E402
from flashwright.flex.transformers import KeyRange, ModelMask, layer_call, make_mask  # noqa: E402
from flashwright.serving import decode_layers, kernels, kvcache  # noqa: E402
from tests.unit.uncompiled import CARD, interpret_operators, make_packed  # noqa: E402

BATCH, ROOM = 3, 24


def causal(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return kv <= q


def window(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (kv <= q) & (kv > q - 7)


def every(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return kv >= 0


def chunks(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (kv <= q) & (kv // 8 == q // 8)


def tokens(*pieces: tuple[int, int, int]) -> Any:
    """Where there are tokens: not from one to another, in some sequences."""
    there = torch.ones(BATCH, ROOM, dtype=torch.bool)
    for sequence, start, end in pieces:
        there[sequence, start:end] = False
    return there


PADDING = {
    "none": None,
    "ones": tokens(),
    "left": tokens((0, 0, 5), (1, 0, 11)),
    "right": tokens((0, 17, ROOM), (2, 9, ROOM)),
    "no token": tokens((1, 0, ROOM)),
}
PLACES: dict[str, tuple[Any, int, int]] = {
    "a cache that grows": (18, 0, 19),
    "a cache of a window": (18, 12, 7),
    "a static cache": (torch.tensor(18), 0, ROOM),
    "a static cache of a window": (torch.tensor(18), 12, 7),
}
"""The query's position, that of the first key, and the keys."""


def mask_of(
    function: Callable[..., Any], place: tuple[Any, int, int], there: Any = None
) -> ModelMask:
    position, before, length = place
    given = {"q_length": 1, "q_offset": position, "kv_offset": before, "device": "cpu"}
    found: ModelMask = make_mask(BATCH, length, function, attention_mask=there, **given)
    return found


def shown(keys: KeyRange, length: int) -> Any:
    """The keys of a range, as a table of sequences and keys."""
    places = torch.arange(length) - keys.skipped
    first = keys.first if keys.first is not None else torch.zeros(BATCH)
    return (places >= first[:, None]) & (places >= 0) & (places < keys.end[:, None])


@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("function", [causal, window, every])
def test_a_range_is_what_the_mask_shows(function: Any, place: str, padding: str) -> None:
    position, before, length = PLACES[place]
    keys = mask_of(function, PLACES[place], PADDING[padding]).keys
    assert keys is not None
    positions = torch.arange(length) + before
    wanted = function(0, 0, int(position), positions).expand(BATCH, -1)
    there = PADDING[padding]
    if there is not None:
        wanted = wanted & there[:, before : before + length]
    assert torch.equal(shown(keys, length), wanted)


def test_other_masks_are_no_range() -> None:
    grows = PLACES["a cache that grows"]
    assert mask_of(chunks, grows).keys is None
    assert mask_of(causal, grows, tokens((1, 3, 6))).keys is None
    prefill = make_mask(BATCH, 19, causal, q_length=2, q_offset=17, device="cpu")
    assert prefill.keys is None


# --- layers -------------------------------------------------------------------------------------


@pytest.fixture
def decodes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The queries of each decode step. CPU tensors go the way of CUDA tensors, to PyTorch's
    reference of the function for decode."""
    found = []

    def decode(q: Any, *cache: Any, **settings: Any) -> Any:
        found.append(q)
        narrow = (x.half() if x.dtype == torch.float32 else x for x in (q, *cache))
        return kvcache.flash_attn_with_kvcache(*narrow, **settings).to(q.dtype)

    monkeypatch.setattr(decode_layers, "_on_gpu", lambda tensor: True)
    monkeypatch.setattr(decode_layers, "flash_attn_with_kvcache", decode)
    return found


def heads(length: int, strided: bool = False) -> tuple[Any, Any, Any]:
    """Q of one query, K and V of a layer, (batch, heads, length, dim)."""
    draw = torch.Generator().manual_seed(length)
    q = torch.randn(BATCH, 1, 4, 32, generator=draw).bfloat16().transpose(1, 2)
    k, v = torch.randn(2, BATCH, 2, length, 32, generator=draw).bfloat16()
    if strided:  # (batch, length, heads, dim) in memory
        k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    return q, k, v


LAYER = torch.nn.Module()
EXTRAS: dict[str, Any] = {"softcap": 20.0, "scaling": 0.3, "s_aux": torch.tensor([0.0, 1, -1, 2])}


@pytest.mark.parametrize("given", [{}, EXTRAS], ids=["plain", "softcap, scale and sinks"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("strided", [False, True])
def test_a_step_is_attention_of_what_the_mask_shows(
    given: dict[str, Any], place: str, strided: bool, decodes: list[Any]
) -> None:
    """Keys that the mask hides are NaN: they are not read."""
    length = PLACES[place][2]
    q, k, v = heads(length, strided)
    for there in (None, PADDING["left"]):
        mask = mask_of(window, PLACES[place], there)
        wanted = layer_output(q, k, v, mask, **given)
        assert mask.keys is not None
        hidden = ~shown(mask.keys, length)[:, None, :, None]
        unseen = (x.masked_fill(hidden, torch.nan) for x in (k, v))
        found, _ = decode_layers.attend(LAYER, q, *unseen, mask, **given)
        torch.testing.assert_close(found.float(), wanted, atol=0.02, rtol=0.02)
    assert len(decodes) == 2


def layer_output(q: Any, k: Any, v: Any, mask: ModelMask, **given: Any) -> Any:
    """(batch, length, heads, dim), by the mask as a function."""
    call = layer_call(LAYER, q, k, mask, **given)
    more = dict(zip(("causal", "window", "softcap", "scale"), call.settings, strict=True))
    more |= {"mask_mod": mask.mask_mod, **call.tensors}
    exact = (x.float() for x in (q, k, v))
    return fallback.attention(*exact, **more).transpose(1, 2)


def test_a_layer_without_a_mask(decodes: list[Any]) -> None:
    q, k, v = heads(19)
    for given in ({}, {"sliding_window": 7}, {"is_causal": False}):
        found, _ = decode_layers.attend(LAYER, q, k, v, None, **given)
        function = window if "sliding_window" in given else every
        wanted = layer_output(q, k, v, mask_of(function, PLACES["a cache that grows"]))
        torch.testing.assert_close(found.float(), wanted, atol=0.02, rtol=0.02)
    assert len(decodes) == 3


@pytest.mark.parametrize("why", ["prompt", "bias", "gradient", "sink", "table", "chunks"])
def test_what_is_no_decode(why: str, decodes: list[Any]) -> None:
    q, k, v = heads(19)
    mask: Any = mask_of(chunks if why == "chunks" else causal, PLACES["a cache that grows"])
    given = {"position_bias": torch.zeros(1, 1, 1, 19)} if why == "bias" else {}
    if why == "prompt":
        q, mask = q.expand(-1, -1, 2, -1), make_mask(BATCH, 19, causal, q_length=2, q_offset=17)
    if why == "sink":
        given = {"s_aux": torch.zeros(4, requires_grad=True)}
    if why == "gradient":
        q = q.clone().requires_grad_()
    if why == "table":
        mask = torch.ones(BATCH, 1, 1, 19, dtype=torch.bool)
    out, _ = decode_layers.attend(LAYER, q, k, v, mask, **given)
    assert out.shape == (BATCH, q.shape[2], 4, 32)
    assert not decodes


def test_one_kernel_computes_all_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of caches that grow, of static ones, with windows and padding; its first output is checked
    once."""
    monkeypatch.setenv("FLASHWRIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(PackedOrder, "make", make_packed)
    monkeypatch.setattr(kernels, "_KERNELS", {})
    monkeypatch.setattr(flex, "_TASKS", {})
    monkeypatch.setattr(flex, "card_of", lambda device: CARD)
    monkeypatch.setattr(kvcache, "_on_cpu", lambda tensor: False)
    monkeypatch.setattr(decode_layers, "_on_gpu", lambda tensor: True)
    launched, looks = interpret_operators(monkeypatch), []
    check = kvcache.reference.check
    monkeypatch.setattr(kvcache.reference, "check", lambda *x: looks.append(x) or check(*x))
    steps = [
        (causal, (18, 0, 19), None),
        (causal, (19, 0, 20), PADDING["left"]),
        (window, PLACES["a static cache"], PADDING["left"]),
    ]
    for function, place, there in steps:
        q, k, v = heads(place[2])
        mask = mask_of(function, place, there)
        found, _ = decode_layers.attend(LAYER, q, k, v, mask)
        wanted = layer_output(q, k, v, mask)
        torch.testing.assert_close(found.float(), wanted, atol=0.02, rtol=0.02)
    assert len(launched) == 3
    assert len(looks) == 1
    (wanted,) = kernels._KERNELS
    spec = make_spec("gqa", heads=4, kv_heads=2, head_dim=32, dtype="bf16", causal=True, window=7)
    assert wanted.order.key == PackedOrder(step_of(spec), CARD).key  # `flashwright warm` made it


# --- models -------------------------------------------------------------------------------------


@pytest.fixture
def models() -> ModuleType:
    """Small models of several families, with random weights."""
    pytest.importorskip("transformers", minversion="5.23")
    from tests.unit import test_transformers

    return test_transformers


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["Llama", "Mistral", "Gemma2", "GptOss"])
def test_models_generate_the_same_tokens(
    name: str, cache: str, padded: bool, decodes: list[Any], models: ModuleType
) -> None:
    model, new = models.family(name), 12
    settings = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False}
    settings |= {"cache_implementation": cache, "disable_compile": True}
    settings |= {"attention_mask": models.LEFT if padded else models.padding()}
    found = []
    for way in ("wright", models.FAMILIES[name][0]):
        model.set_attn_implementation(way)
        found.append(model.generate(models.tokens(), **settings))
    assert torch.equal(*found)
    assert len(decodes) == 2 * (new - 1)  # of each layer
