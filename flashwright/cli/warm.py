"""`flashwright warm`: makes the kernels of a transformers model ahead of time."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flashwright.cli.command import FINE, WRONG, Dtype, blaming, find_gpu, flag, guarded

if TYPE_CHECKING:
    from flashwright.flex.model_kernels import ModelKernel


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command(rich_help_panel="Make")(warm)


@guarded
def warm(
    config: Annotated[
        Path, typer.Argument(metavar="CONFIG", help="A model's config.json, or its folder.")
    ],
    gpu: Annotated[str, typer.Option(metavar="NAME", help="See `flashwright gpus`.")],
    dtype: Annotated[
        Dtype | None, typer.Option(help="Of Q, K and V; default the config's, else bf16.")
    ] = None,
    padded: Annotated[
        bool, flag("--padded", help="Also kernels for batches with padding; needs PyTorch.")
    ] = False,
    verify: Annotated[
        bool, flag("--verify", help="Judge new kernels, on the GPU or emulated; takes minutes.")
    ] = False,
    as_json: Annotated[bool, flag("--json", help="Print JSON.")] = False,
) -> int:
    """Make the kernels that a transformers model needs, so that its first call waits for none.

    They are kept in the cache, where `flashwright.register_transformers` finds them.

    Exit code 1: some layers have kernels that only their first call can make.
    """
    from flashwright.flex.model_kernels import left_out, read_config

    card = find_gpu(gpu)
    with blaming(str(config)):
        content = read_config(config)
        made = _made(content, card, dtype, padded, verify, as_json)
    if as_json:
        print(json.dumps({"config": str(config), "gpu": card.name, "kernels": made}, indent=2))
    for kind in left_out(content):
        print(f"{kind}: the kernels of these layers are made at their first call", file=sys.stderr)
    return WRONG if left_out(content) else FINE


def _made(
    content: Mapping[str, Any],
    card: Any,
    dtype: Dtype | None,
    padded: bool,
    verify: bool,
    as_json: bool,
) -> list[dict[str, Any]]:
    """The records of the kernels; a line is printed for each as it is ready."""
    from flashwright.flex import model_kernels

    records, begun = [], time.monotonic()
    for kernel in model_kernels.warm(
        content, card, dtype=dtype.value if dtype else None, padded=padded, verified=verify
    ):
        took = time.monotonic() - begun
        records.append(_record(kernel, took))
        if not as_json:
            word = f"made in {took:.0f} s" if kernel.made else "found"
            print(f"{word}: {kernel.in_words}\n  {kernel.folder}", flush=True)
        begun = time.monotonic()
    return records


def _record(kernel: ModelKernel, took: float) -> dict[str, Any]:
    return {
        "made": kernel.made,
        "seconds": round(took, 3),
        "padded": kernel.padded,
        "folder": str(kernel.folder),
        "spec": kernel.spec.model_dump(mode="json"),
    }
