"""FlashInfer-Bench: a task is a Definition, whose inputs say how sequences lie.

Which mask it has is not said as data. Its `reference` is run on small workloads, in a confined
process (definition_process.py), and compared with attention under each mask.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from flashwright.formats.confined import ask
from flashwright.formats.task import FLASHINFER, Task
from flashwright.lang.diagnostic import Diagnostic, Failed

NOPE_DIM = 128
"""The width of a key without its rope part before MLA's absorption, which its scale comes from."""
_PAGED = ["kv_indptr", "kv_indices", "sm_scale"]
_FORMS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "gqa_ragged": (["q", "k", "v", "qo_indptr", "kv_indptr", "sm_scale"], {"packed": True}),
    "gqa_paged prefill": (["q", "k_cache", "v_cache", "qo_indptr", *_PAGED], {"packed": True}),
    "gqa_paged decode": (["q", "k_cache", "v_cache", *_PAGED], {"decode": 1}),
    "mla_paged decode": (["q_nope", "q_pe", "ckv_cache", "kpe_cache", *_PAGED], {"decode": 1}),
}
_TYPES = {"bfloat16": "bf16", "float16": "fp16"}


def read(path: Path) -> Task:
    """The task of a Definition. Raises Failed with FW926 if no kernel computes it."""
    try:
        text = path.read_text("utf-8")
        told = json.loads(text)
        options = _options(told)
        answer = ask(path, "flashwright.formats.definition_process", [json.dumps(options)])
    except OSError as error:
        raise Failed(Diagnostic("FW001", f"{path} cannot be read: {error.strerror}")) from None
    except (KeyError, TypeError, AttributeError) as error:
        why = f"it is no Definition of FlashInfer-Bench: {type(error).__name__} {error}"
        raise Failed(Diagnostic("FW926", f"{path}: {why}")) from None
    except ValueError as error:  # also what is no JSON, or not UTF-8
        raise Failed(Diagnostic("FW926", f"{path}: {error}")) from None
    if "wrong" in answer:
        raise Failed(Diagnostic("FW926", f"{path}: reference: {answer['wrong']}"[:600]))
    if answer["causal"]:
        options["causal"] = True
    variant = options.pop("variant")
    arguments = (*told["inputs"], *told["outputs"])
    return Task(
        FLASHINFER,
        str(told["name"]),
        variant,
        options,
        text,
        arguments=arguments,
        rms=float(answer["rms"]),
    )


def _options(told: dict[str, Any]) -> dict[str, Any]:
    """The settings that axes and inputs say. Raises ValueError for a Definition that no kernel
    computes."""
    inputs, kind = dict(told["inputs"]), str(told["op_type"])
    sizes = {name: axis.get("value") for name, axis in told["axes"].items()}
    inputs.pop("kv_last_page_len", None)
    fits = [
        (name, options)
        for name, (wanted, options) in _FORMS.items()
        if name.split()[0] == kind and set(wanted) == set(inputs)
    ]
    if not fits:
        text = f"no kernel takes a {kind} with the inputs {', '.join(inputs)}"
        raise ValueError(f"{text}; there are {', '.join(_FORMS)}")
    if list(told["outputs"]) != ["output", "lse"]:
        raise ValueError(f"its outputs are {', '.join(told['outputs'])}, not output and lse")
    _, options = fits[0]
    if "kv_last_page_len" not in told["inputs"] and sizes.get("page_size", 1) != 1:
        raise ValueError(f"pages of {sizes['page_size']} without kv_last_page_len")
    first = next(iter(inputs.values()))["dtype"]
    if first not in _TYPES:
        raise ValueError(f"q is {first}; there are {', '.join(_TYPES)}")
    found = {"variant": "gqa", **options, "dtype": _TYPES[first], "heads": sizes["num_qo_heads"]}
    if "page_size" in sizes:
        found["page"] = sizes["page_size"]
    if kind == "mla_paged":
        latent, rope = sizes["head_dim_ckv"], sizes["head_dim_kpe"]
        widths = {"head_dim": latent + rope, "v_dim": latent, "variant": "mla-decode"}
        return {**found, **widths, "scale": 1 / math.sqrt(NOPE_DIM + rope)}
    return {**found, "kv_heads": sizes["num_kv_heads"], "head_dim": sizes["head_dim"]}
