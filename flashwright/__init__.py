"""Flashwright writes attention kernels in TL, checks and runs them, and translates them to CUDA."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from flashwright.lang.diagnostic import Failed as Failed
from flashwright.version import __version__ as __version__

if TYPE_CHECKING:
    from pathlib import Path

    from flashwright.build.classes import Kernels
    from flashwright.build.load import Kernel
    from flashwright.flex.attention import attention as attention
    from flashwright.flex.attention import flex_attention as flex_attention
    from flashwright.flex.model_kernels import ModelKernel
    from flashwright.flex.task import NoKernel as NoKernel
    from flashwright.judge.verdict import Verdict
    from flashwright.pytorch.operator import Operator
    from flashwright.sandbox.candidate import Candidate
    from flashwright.serving.kvcache import flash_attn_with_kvcache as flash_attn_with_kvcache
    from flashwright.serving.merge import merge_states as merge_states
    from flashwright.serving.mla import flash_mla_with_kvcache as flash_mla_with_kvcache
    from flashwright.serving.mla import get_mla_metadata as get_mla_metadata
    from flashwright.serving.varlen import flash_attn_varlen_func as flash_attn_varlen_func
    from flashwright.sparse.nsa import nsa as nsa
    from flashwright.spec import AttentionSpec


def load(folder: str | Path) -> Kernel | Kernels:
    """The kernel package in a folder as a function: `flashwright.load(folder)(q, k, v)`."""
    from flashwright.build import classes as package  # here: the command line does not need it

    return package.load(folder)


def torch_operator(folder: str | Path) -> Operator:
    """The kernel package in a folder as a torch operator, which torch.compile keeps whole.

    `attention = flashwright.torch_operator(folder)`, then `attention(q, k, v)`, with
    `return_lse=True` for O and LSE. It is registered once for each content of a package, without a
    GPU too. CUDA tensors go to the kernel, CPU tensors to the same definition in plain PyTorch.
    Raises ImportError without PyTorch, Failed if the folder has no usable package.
    """
    try:
        import torch  # noqa: F401
    except ImportError as error:
        text = f"an operator needs PyTorch, which cannot be imported ({error}): "
        raise ImportError(text + "pip install 'flashwright[torch]'") from error
    from flashwright.pytorch import operator

    return operator.torch_operator(folder)


def register_transformers(name: str = "wright", *, fallback: bool = False) -> None:
    """Make kernels of ours an attention implementation of Hugging Face transformers.

    Then `from_pretrained(..., attn_implementation="wright")`, or
    `model.set_attn_implementation("wright")`. The name may not contain "flash". With `fallback`
    PyTorch computes what no kernel can be made for, with a warning; otherwise that is NoKernel with
    the reason. Raises ImportError without PyTorch or transformers.
    """
    try:
        from flashwright.serving import decode_layers
    except ImportError as error:
        text = f"this needs PyTorch, which cannot be imported ({error}): "
        raise ImportError(text + "pip install 'flashwright[transformers]'") from error
    decode_layers.register_transformers(name, fallback=fallback)


def warm(
    config: str | Path | Mapping[str, Any],
    gpu: str,
    *,
    dtype: str | None = None,
    padded: bool = False,
    verified: bool = False,
) -> list[ModelKernel]:
    """Make the kernels of a transformers model ahead of time: `flashwright.warm(folder, "h200")`.

    `config` is a config.json, its folder or its content. `gpu` is a name of `flashwright gpus`.
    `dtype` is fp16 or bf16; the default is the config's. `padded` adds the kernels of batches with
    padding, which need PyTorch; `verified` runs the judge on new kernels. Returns the kernels in
    the store, each with its spec and folder. Raises Failed if one cannot be made.
    """
    from flashwright import gpu as gpus
    from flashwright.flex import model_kernels

    card = gpus.find(gpu)
    return list(model_kernels.warm(config, card, dtype=dtype, padded=padded, verified=verified))


def verify(
    candidate: Callable[..., Any] | str | Candidate,
    spec: str | AttentionSpec,
    *,
    on: str | None = None,
    **options: Any,
) -> Verdict:
    """The judge's verdict on a kernel: `print(flashwright.verify(attention, "causal"))`.

    `candidate` is a function that takes Q, K, V as (batch, heads, length, dim) and returns O, or a
    text as `flashwright verify` takes it. `spec` says what it should compute: a text such as
    "causal, heads=32, kv_heads=8, head_dim=128, dtype=bf16", or an AttentionSpec. The candidate
    runs in a separate process. `on` is "gpu" or "cpu"; the default is the GPU if there is one. On
    the CPU a kernel package is emulated. Options are those of `flashwright.judge.judge.judge`:
    seed, lengths, device, limits, libraries, progress.
    """
    from flashwright.judge.judge import judge
    from flashwright.sandbox.candidate import Candidate, InWorker
    from flashwright.sandbox.place import IN_WORKER
    from flashwright.spec import AttentionSpec, parse_inline

    if os.environ.get(IN_WORKER):
        raise InWorker
    if isinstance(spec, str):
        spec = AttentionSpec.make(**{"variant": "custom", **parse_inline(spec)})
    if isinstance(candidate, str):
        candidate = Candidate.parse(candidate)
    elif not isinstance(candidate, Candidate):
        candidate = Candidate.of(candidate)
    if on == "cpu" and candidate.kind == "package":
        from flashwright.judge.emulated import judge_emulated

        return judge_emulated(candidate.where, spec, **options)
    if on is not None:
        options["device"] = {"gpu": "cuda", "cpu": "cpu"}[on]
    return judge(candidate, spec, **options)


_LATER = {
    "attention": "flex.attention",
    "flex_attention": "flex.attention",
    "flash_attn_varlen_func": "serving.varlen",
    "flash_attn_with_kvcache": "serving.kvcache",
    "flash_mla_with_kvcache": "serving.mla",
    "get_mla_metadata": "serving.mla",
    "merge_states": "serving.merge",
    "nsa": "sparse.nsa",
    "NoKernel": "flex.task",
}


def __getattr__(name: str) -> Any:
    """Names of modules that are imported when they are first used; the functions need PyTorch."""
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f"flashwright.{_LATER[name]}"), name)
    globals()[name] = found
    return found
