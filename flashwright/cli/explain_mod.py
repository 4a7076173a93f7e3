"""`flashwright explain-mod`: a score_mod or mask_mod of FlexAttention as TL."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flashwright.cli.command import FINE, find_gpu, guarded
from flashwright.lang.diagnostic import Diagnostic, Failed

if TYPE_CHECKING:
    from flashwright.author.builtin.mods import Operand, Placed
    from flashwright.flex.capture import Captured

LENGTH = 64
"""The length and the number of heads at which the function is compared with what is captured."""
_MASK, _SCORE = 4, 5  # parameters
_WAYS = {
    "scalar": "one number for a block",
    "row": "a number for each query, copied once",
    "column": "a number for each key, copied in every iteration",
    "tile": "a number for each score, copied in every iteration",
    "gather": "each element reads its own",
}


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("explain-mod", rich_help_panel="Look up")(explain_mod)


@guarded
def explain_mod(
    function: Annotated[str, typer.Argument(metavar="FILE.py:FUNCTION", show_default=False)],
    gpu: Annotated[
        str | None, typer.Option("--gpu", help="Print the whole program for this GPU.")
    ] = None,
    head_dim: Annotated[int, typer.Option(help="Columns of Q, K and V in that program.")] = 128,
    dtype: Annotated[str, typer.Option(help="fp16 or bf16.")] = "bf16",
    length: Annotated[
        int, typer.Option(help="Queries and keys at which function and TL are compared.")
    ] = LENGTH,
    heads: Annotated[int, typer.Option(help="Heads at which they are compared.")] = 4,
    batch: Annotated[int, typer.Option(help="Batches at which they are compared.")] = 1,
) -> int:
    """Print a score_mod or mask_mod of FlexAttention as TL, how it reads its tensors, and which
    keys the kernel visits."""
    found = _function(function)
    captured = _captured(found, {"batch": batch, "heads": heads, "q_len": length, "kv_len": length})
    if gpu is not None:
        print(_program(captured, gpu, heads, head_dim, dtype), end="")
        return FINE
    for line in _explained(captured):
        print(line)
    return FINE


def _function(text: str) -> Any:
    """The function `FILE.py:NAME`. The file runs as your own code."""
    file, _, name = text.rpartition(":")
    if not file.endswith(".py"):
        hint = "flashwright explain-mod mods.py:causal"
        raise Failed(Diagnostic("FW907", f"{text!r} names no function of a file", help=hint))
    if not Path(file).is_file():
        raise Failed(Diagnostic("FW907", f"there is no file {file}"))
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(Path(file).resolve().parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # the user's own code
        text = f"{file} cannot be imported: {type(error).__name__}: {error}"
        raise Failed(Diagnostic("FW907", text)) from None
    found = getattr(module, name, None)
    if not callable(found):
        there = [n for n, f in vars(module).items() if inspect.isfunction(f) and n[0] != "_"]
        known = f"it has {', '.join(there[:12])}" if there else None
        raise Failed(Diagnostic("FW907", f"{file} has no function {name!r}", help=known))
    return found


def _captured(function: Any, dims: dict[str, int]) -> Captured:
    try:
        import torch  # noqa: F401
    except ImportError:
        hint = "pip install 'flashwright[torch]'"
        raise Failed(Diagnostic("FW907", "explain-mod needs PyTorch", help=hint)) from None
    from flashwright.flex.capture import NotCaptured, capture

    count = len(inspect.signature(function).parameters)
    if count not in (_MASK, _SCORE):
        text = f"a function of {count} parameters is neither score_mod nor mask_mod"
        hint = "def score_mod(score, b, h, q_idx, kv_idx), or def mask_mod(b, h, q_idx, kv_idx)"
        raise Failed(Diagnostic("FW907", text, help=hint))
    score, mask = (function, None) if count == _SCORE else (None, function)
    try:
        return capture(score, mask, dims)
    except NotCaptured as refused:
        raise Failed(Diagnostic("FW907", str(refused))) from None


def _explained(captured: Captured) -> list[str]:
    """The mods in a few lines."""
    from flashwright.author.builtin.mods import placed
    from flashwright.lang.format import format_expr, format_stmt
    from flashwright.lang.nodes import Let

    mods = captured.mods
    lines = []
    if mods.score is not None:
        lines.append(f"score: {format_expr(mods.score)}")
    if mods.mask is not None:
        lines.append(f"mask:  {format_expr(mods.mask)}")
    if not lines:
        lines.append("score: S (unchanged)")
    made = placed(mods)
    low, high = made.keys.low or "0", made.keys.high
    until = "kv_len" if high is None else f"min(kv_len, {high})"
    bounded = "" if made.keys.low or high else "  (no bound follows from the mask)"
    lines.append(f"keys:  from {low} to {until}{bounded if mods.mask is not None else ''}")
    named = [format_stmt(s) for s in made.before_loop if isinstance(s, Let)]
    return [*lines, *(f"  {_told(o, made)}" for o in mods.operands), *(f"  {n}" for n in named)]


def _told(operand: Operand, made: Placed) -> str:
    sizes = ", ".join(operand.sizes)
    ways = ", ".join(_WAYS[way] for way in made.ways[operand.name])
    return f"{operand.name} ({sizes}) {operand.dtype}: {ways}"


def _program(captured: Captured, gpu: str, heads: int, head_dim: int, dtype: str) -> str:
    from flashwright.author.builtin.author import write_code, write_sketch
    from flashwright.author.builtin.choose import NothingFits
    from flashwright.author.builtin.variants import make_spec
    from flashwright.spec import BadSpec

    card = find_gpu(gpu)
    assert card is not None
    try:
        spec = make_spec("mha", heads=heads, head_dim=head_dim, dtype=dtype)
        sketch = write_sketch(spec, captured.mods)
        return write_code(sketch, spec, card, captured.mods).code
    except BadSpec as error:
        raise Failed(*(Diagnostic("FW901", line) for line in error.lines)) from None
    except NothingFits as error:
        raise Failed(Diagnostic("FW905", str(error))) from None
