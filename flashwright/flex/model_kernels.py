"""The kernels that a model of transformers asks for, from its config.json, made ahead of time.

    for kernel in warm("meta-llama/config.json", "h200"):
        print(kernel.folder, kernel.spec.in_words)

Nothing of transformers is needed. The specs are those that flex/transformers.py and
serving/decode_layers.py ask for when the model runs, so that its first calls find the kernels in
the store.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashwright.flex.task import DTYPES
from flashwright.generate import store
from flashwright.generate.packed import PackedOrder
from flashwright.generate.packed_sizes import batch_of_few
from flashwright.gpu import Gpu
from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.spec import AttentionSpec, BadSpec, scale_of

CONFIG = "config.json"
SINKS = frozenset(("gpt_oss", "openai_privacy_filter"))
"""Model types with a sink logit for each head in every layer."""
ALTERNATING = frozenset(("gemma2", "gemma3", "gemma3_text", "cohere2", "gpt_oss", "vaultgemma"))
"""Model types with windows in some layers, where an older config.json has no `layer_types`."""
CHUNKED = "chunked_attention"
_HEADS = ("num_attention_heads", "n_head", "num_heads")
_WIDTHS = ("hidden_size", "n_embd", "d_model")


@dataclass(frozen=True)
class ModelKernel:
    """A kernel of a model in the store."""

    spec: AttentionSpec
    folder: Path
    made: bool
    """Whether it was made now; else the store had it."""
    padded: bool
    """Whether it is for batches with padding."""

    @property
    def in_words(self) -> str:
        """What it computes."""
        spec = self.spec.model_copy(update={"reference": None})
        return spec.in_words + (", padded batches" if self.padded else "")


def warm(
    config: str | Path | Mapping[str, Any],
    gpu: Gpu,
    *,
    dtype: str | None = None,
    padded: bool = False,
    verified: bool = False,
    tell: Callable[[str], None] = lambda text: None,
) -> Iterator[ModelKernel]:
    """Make each kernel of a model that the store does not have, one by one.

    `config` is config.json, its folder or its content. `padded` makes the kernels of batches with
    padding as well, which needs PyTorch. `verified` judges new kernels on the GPU or under
    emulation. Raises Failed if the config cannot be used or a kernel cannot be made.
    """
    content = config if isinstance(config, Mapping) else read_config(config)
    specs = specs_of(content, dtype)
    steps = dict.fromkeys(step_of(spec) for spec in specs)
    orders: list[tuple[AttentionSpec, store.Order | PackedOrder]] = [
        *((spec, store.Order(spec, gpu)) for spec in specs),
        *((spec, _padded(spec, gpu)) for spec in specs if padded),
        *((spec, PackedOrder(spec, gpu)) for spec in steps),
    ]
    for spec, order in orders:
        there = store.find(order)
        folder = there or store.find_or_make(order, tell, verified)
        yield ModelKernel(spec, folder, there is None, order.mods is not None)


def step_of(spec: AttentionSpec) -> AttentionSpec:
    """The spec of a layer's decode steps, with padding or without: its mask is a range of keys,
    which is data."""
    every = spec.model_copy(update={"causal": False, "window": None})
    return every.of_sequences(batch_of_few(1, spec.group, spec.value_dim))


def _padded(spec: AttentionSpec, gpu: Gpu) -> store.Order:
    """The kernel of the same attention for batches with padding at their ends."""
    try:
        from flashwright.flex.transformers import padded_order
    except ImportError as error:
        text = f"kernels of padded batches need PyTorch, which cannot be imported ({error})"
        hint = "pip install 'flashwright[torch]', or leave out --padded"
        raise Failed(Diagnostic("FW821", text, help=hint)) from None
    return padded_order(spec, gpu)


# --- the config ---------------------------------------------------------------------------------


def read_config(path: str | Path) -> Mapping[str, Any]:
    """The content of a config.json, or of the one in a folder. Raises Failed."""
    file = Path(path)
    if file.is_dir():
        file = file / CONFIG
    try:
        content = json.loads(file.read_bytes())
    except FileNotFoundError:
        hint = "give the config.json of a model, or the folder that it is in"
        raise Failed(Diagnostic("FW001", f"{file}: there is no such file", help=hint)) from None
    except OSError as error:
        raise Failed(Diagnostic("FW001", f"{file}: cannot be read: {error.strerror}")) from None
    except (ValueError, RecursionError) as error:
        raise Failed(Diagnostic("FW903", f"{file}: is not JSON: {error}")) from None
    if not isinstance(content, dict):
        raise Failed(Diagnostic("FW903", f"{file}: is not a JSON object"))
    return content


def specs_of(config: Mapping[str, Any], dtype: str | None = None) -> list[AttentionSpec]:
    """The specs of a model's layers, each once. Raises Failed with the key that is at fault."""
    config = text_config(config)
    _refuse(config)
    settings = _heads(config) | _softmax(config)
    settings["dtype"] = dtype or _dtype(config)
    found: dict[AttentionSpec, None] = {}
    for window in _windows(config):
        more = {} if window is None else {"window": window}
        try:
            found[AttentionSpec.make(**settings, **more)] = None
        except BadSpec as error:
            raise _bad(*error.lines) from None
    return list(found)


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of the language model in that of a model of several kinds of input."""
    text = config.get("text_config")
    if not isinstance(text, Mapping) or any(key in config for key in _HEADS):
        return config
    return {**{key: config[key] for key in ("dtype", "torch_dtype") if key in config}, **text}


def left_out(config: Mapping[str, Any]) -> list[str]:
    """The types of layers with attention whose kernels are not known from the config."""
    types = text_config(config).get("layer_types")
    return [CHUNKED] if isinstance(types, list) and CHUNKED in types else []


def _bad(*lines: str) -> Failed:
    return Failed(*(Diagnostic("FW901", line) for line in lines))


def _refuse(config: Mapping[str, Any]) -> None:
    """Raise Failed for models whose calls are not known from the config alone."""
    later = "its kernels are made at the first call of each layer"
    if config.get("is_encoder_decoder"):
        raise _bad(f"is_encoder_decoder: an encoder and a decoder differ; {later}")
    if config.get("kv_lora_rank"):
        raise _bad(f"kv_lora_rank: latent attention (MLA) is not read from a config; {later}")
    if config.get("use_bidirectional_attention") or config.get("is_causal") is False:
        raise _bad(f"is_causal: a model without a causal mask is not read from a config; {later}")


def _heads(config: Mapping[str, Any]) -> dict[str, Any]:
    heads = _whole(config, *_HEADS)
    kv_heads = 1 if config.get("multi_query") else heads
    if config.get("num_key_value_heads") is not None:
        kv_heads = _whole(config, "num_key_value_heads")
    if config.get("head_dim") is not None:
        width = _whole(config, "head_dim")
    else:
        total = _whole(config, *_WIDTHS)
        if total % heads:
            raise _bad(f"hidden_size: {total} is no multiple of the {heads} heads: add head_dim")
        width = total // heads
    shared = {"heads": heads, "kv_heads": kv_heads, "head_dim": width}
    return {"variant": "mha" if heads == kv_heads else "gqa", "causal": True, **shared}


def _whole(config: Mapping[str, Any], *names: str) -> int:
    """The first of these keys that the config has, a positive number."""
    name = next((name for name in names if config.get(name) is not None), None)
    if name is None:
        raise _bad(f"{names[0]}: is missing: this is not the config of a model with attention")
    value = config[name]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise _bad(f"{name}: must be a whole number above 0, not {value!r}")
    return value


def _real(config: Mapping[str, Any], name: str) -> float | None:
    """A positive number; None if the config has none."""
    value = config.get(name)
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise _bad(f"{name}: must be a number above 0, not {value!r}")
    return float(value)


def _softmax(config: Mapping[str, Any]) -> dict[str, Any]:
    """Softcap, scale and sinks."""
    found: dict[str, Any] = {}
    softcap = _real(config, "attn_logit_softcapping")
    if softcap is not None:
        found["softcap"] = softcap
    scale, width = _real(config, "attention_multiplier"), _real(config, "query_pre_attn_scalar")
    if width is not None:
        scale = width**-0.5
    own = scale_of(scale, _heads(config)["head_dim"])
    if own is not None:
        found["scale"] = own
    if str(config.get("model_type")) in SINKS:
        found["sink"] = True
    return found


def _dtype(config: Mapping[str, Any]) -> str:
    """The type that the weights are loaded in; bf16 if a kernel has no such type."""
    named = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    return DTYPES.get(named.removeprefix("torch."), "bf16")


def _windows(config: Mapping[str, Any]) -> list[int | None]:
    """The windows of the layers, each once; None for a layer that sees all earlier keys."""
    types = config.get("layer_types")
    if types is None:
        types = _layer_types(config)
    if not isinstance(types, list):
        raise _bad(f"layer_types: must be a list, not {types!r}")
    found: dict[int | None, None] = {}
    for kind in types:
        if kind == "full_attention":
            found[None] = None
        elif kind == "sliding_attention":
            found[_whole(config, "sliding_window")] = None
    if not found:
        raise _bad(
            f"layer_types: none of {', '.join(sorted(set(map(str, types))))} is full_attention or "
            "sliding_attention; kernels of other layers are made at their first call"
        )
    return list(found)


def _layer_types(config: Mapping[str, Any]) -> list[str]:
    full, sliding = "full_attention", "sliding_attention"
    if config.get("sliding_window") is None or config.get("use_sliding_window") is False:
        return [full]
    if str(config.get("model_type")) in ALTERNATING or config.get("max_window_layers"):
        return [sliding, full]
    return [sliding]
