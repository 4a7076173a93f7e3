"""How fast gradients are, beside others, in one run on a GPU.

`python -m tests.gpu.backward_speed PART`: `grid` (the paper's sizes, beside FlashAttention-3 if it
is installed, else torch's flash backend), `deterministic` (the same with the same bits in every
run, beside FlashAttention-3's deterministic backward), `older` (kernels for an A100 beside torch's
flash backend), `mla` (beside cuDNN), `options` (beside compiled FlexAttention). Gradients are
compared with the other library's before they are timed.
"""

from __future__ import annotations

import importlib
import importlib.util
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import flashwright
from flashwright import gpu as gpus
from flashwright.author.builtin.author import write_code, write_sketch
from flashwright.author.builtin.variants import make_spec
from flashwright.build import steps
from flashwright.generate import store
from flashwright.generate.backward import BackwardOrder

Call = Callable[[], Sequence[Any]]
TOKENS, WIDTH = 16384, 2048
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
LIMIT = 2e-2
"""Of the difference of two libraries' gradients, relative to their norm."""


def times(*calls: Call) -> list[float]:
    """Milliseconds of each call: the median of alternating ones."""
    taken: list[list[Any]] = [[] for _ in calls]
    for turn in range(15):
        for call, own in zip(calls, taken, strict=True):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            if turn >= 3:
                own.append((begin, end))
    torch.cuda.synchronize()
    return [statistics.median(a.elapsed_time(b) for a, b in own) for own in taken]


def difference(found: Sequence[Any], wanted: Sequence[Any]) -> float:
    pairs = zip(found, wanted, strict=True)
    return max(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in pairs)


def same_bits(call: Call, runs: int = 5) -> bool:
    """Whether a call gives the same bits each time."""
    first = [t.clone() for t in call()]
    return all(all(map(torch.equal, call(), first)) for _ in range(runs))


def line(name: str, ours: Call, theirs: Call, limit: float = LIMIT) -> float:
    """Compare both, time both, print a line; theirs by ours."""
    off = difference(ours(), theirs())
    a, b = times(ours, theirs)
    wrong = "  WRONG" if not off < limit else ""
    print(f"{name:34} {a:8.3f} {b:8.3f} {b / a:6.3f}   {off:.1e}{wrong}", flush=True)
    return b / a


def mean(ratios: Sequence[float]) -> str:
    found = statistics.geometric_mean(ratios)
    return f"geometric mean {found:.3f}, worst {min(ratios):.3f}, of {len(ratios)}"


# --- kernels of our own --------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """An attention and the GPU whose kernel computes its gradients."""

    variant: str
    dim: int
    causal: bool
    gpu: str = "h200"
    group: int = 1
    value_dim: int = 0
    deterministic: bool = False

    @property
    def name(self) -> str:
        """Such as `mha d128 causal`."""
        group = f" by {self.group}" if self.group > 1 else ""
        return f"{self.variant}{group} d{self.dim} {'causal' if self.causal else 'full'}"

    def order(self) -> BackwardOrder:
        """The backward package, to find or to make."""
        card = gpus.find(self.gpu)
        heads = WIDTH // (self.value_dim or self.dim)
        sizes = {"heads": heads, "kv_heads": heads // self.group, "head_dim": self.dim}
        spec = make_spec(self.variant, **sizes, causal=self.causal, dtype="bf16")
        forward = write_code(write_sketch(spec), spec, card).code
        return BackwardOrder(forward, card, spec, deterministic=self.deterministic)

    def tensors(self, length: int) -> list[Any]:
        """Q, K, V and dO as (batch, length, heads, dim)."""
        torch.manual_seed(0)
        wide = self.value_dim or self.dim
        heads, kv_heads = WIDTH // wide, WIDTH // wide // self.group
        shapes = ((heads, self.dim), (kv_heads, self.dim), (kv_heads, wide), (heads, wide))
        return [
            torch.randn(TOKENS // length, length, h, d, device="cuda", dtype=torch.bfloat16)
            for h, d in shapes
        ]


@cache
def package(setting: Setting) -> Path:
    """The package of a setting, from the store."""
    return store.find_or_make(setting.order(), store.tell)


def ours(setting: Setting, tensors: Sequence[Any], out: Any, lse: Any) -> Call:
    folder = package(setting)
    record = steps.read(folder)
    assert record is not None
    kernel = steps.load(folder, record)
    q, k, v, grad, out = (t.transpose(1, 2) for t in (*tensors, out))
    into = {f"d{n}": torch.empty_like(t) for n, t in zip("QKV", (q, k, v), strict=True)}
    given = {"Q": q, "K": k, "V": v, "O": out, "LSE": lse, "dO": grad}
    given = {name: t for name, t in given.items() if name in kernel.inputs}
    return lambda: [t.transpose(1, 2) for t in kernel(**given, outputs=tuple(into), out=into)]


def compared(settings: Sequence[Setting], peer: Callable[..., Any]) -> None:
    """A table of these settings beside a peer's forward, which gives O, LSE and the backward."""
    with ProcessPoolExecutor(8, get_context("spawn")) as pool:
        list(pool.map(package, settings))
    ratios = []
    print(f"{'':34} {'ours':>8} {'other':>8} ratio   difference")
    for setting in settings:
        for length in LENGTHS:
            tensors = setting.tensors(length)
            try:
                out, lse, theirs = peer(setting, *tensors)
                own = ours(setting, tensors, out, lse)
                if setting.deterministic and not same_bits(own):
                    print(f"{setting.name} {length}: DIFFERENT BITS", flush=True)
                ratios.append(line(f"{setting.name} {length}", own, theirs))
            except RuntimeError as error:
                print(f"{setting.name} {length}: {str(error).splitlines()[0][:100]}", flush=True)
    if ratios:
        print(mean(ratios))


def flash_attention_3(setting: Setting, q: Any, k: Any, v: Any, grad: Any) -> tuple[Any, Any, Call]:
    scale = setting.dim**-0.5
    ops = torch.ops.flash_attn_3
    how = {"softmax_scale": scale, "is_causal": setting.causal}
    out, lse, *_ = ops.fwd(q, k, v, num_splits=1, **how)
    into = [torch.empty_like(t) for t in (q, k, v)]

    def backward() -> Sequence[Any]:
        ops.bwd(grad, q, k, v, out, lse, *into, **how, deterministic=setting.deterministic)
        return into

    return out, lse, backward


def of_torch(name: str, setting: Setting, *tensors: Any) -> tuple[Any, Any, Call]:
    """A backend of scaled_dot_product_attention: `flash` or `cudnn`."""
    q, k, v, grad = (t.transpose(1, 2) for t in tensors)
    k, v = (t.repeat_interleave(setting.group, 1) if setting.group > 1 else t for t in (k, v))
    aten, causal = torch.ops.aten, setting.causal
    if name == "flash":
        forward = aten._scaled_dot_product_flash_attention
        out, lse, cq, ck, mq, mk, seed, offset, _ = forward(q, k, v, 0.0, causal, False)
        end = aten._scaled_dot_product_flash_attention_backward
        given: tuple[Any, ...] = (grad, q, k, v, out, lse, cq, ck, mq, mk)
        given = (*given, 0.0, causal, seed, offset)
    else:
        forward = aten._scaled_dot_product_cudnn_attention
        found = forward(q, k, v, None, True, 0.0, causal, False)
        out, lse, cq, ck, mq, mk, seed, offset, _ = found
        end = aten._scaled_dot_product_cudnn_attention_backward
        given = (grad, q, k, v, out, lse, seed, offset, None, cq, ck, mq, mk, 0.0, causal)
    lse = lse.reshape(lse.shape[:3])

    def backward() -> Sequence[Any]:
        dq, dk, dv = (t.transpose(1, 2) for t in end(*given)[:3])
        if setting.group == 1:
            return [dq, dk, dv]
        return [dq, *(t.unflatten(2, (-1, setting.group)).sum(3) for t in (dk, dv))]

    return out.transpose(1, 2), lse, backward


def grid(deterministic: bool = False) -> None:
    """The paper's grid."""
    if importlib.util.find_spec("flash_attn_interface") is not None:
        importlib.import_module("flash_attn_interface")
    own = hasattr(torch.ops.flash_attn_3, "bwd")
    peer: Callable[..., Any] = flash_attention_3 if own else partial(of_torch, "flash")
    settings = [Setting("mha", dim, causal) for dim in (64, 128) for causal in (False, True)]
    settings.append(Setting("gqa", 128, causal=True, group=4))
    compared([replace(one, deterministic=deterministic) for one in settings], peer)


def deterministic() -> None:
    """The paper's grid with the same bits in every run."""
    grid(deterministic=True)


def older() -> None:
    """Kernels by mma.sync."""
    mha = [Setting("mha", dim, causal, "a100") for dim in (64, 128) for causal in (False, True)]
    compared(mha, partial(of_torch, "flash"))


def mla() -> None:
    """Keys of 192, values of 128."""
    settings = [Setting("mla", 192, causal, value_dim=128) for causal in (False, True)]
    compared(settings, partial(of_torch, "cudnn"))


# --- FlexAttention -------------------------------------------------------------------------------


def functions(length: int, heads: int) -> dict[str, dict[str, Any]]:
    """Functions for flex_attention by name."""
    device = torch.device("cuda")
    document = torch.arange(length, device=device) * 8 // length
    slopes = 2.0 ** -torch.linspace(0.5, 8, heads, device=device)
    past = {"mask_mod": lambda b, h, q, kv: kv <= q}
    return {
        "window 1024": {"mask_mod": lambda b, h, q, kv: (kv <= q) & (q - kv < 1024)},
        "documents": {
            "mask_mod": lambda b, h, q, kv: (kv <= q) & (document[q] == document[kv]),
        },
        "prefix": {"mask_mod": lambda b, h, q, kv: (kv <= q) | (kv < length // 4)},
        "softcap": {**past, "score_mod": lambda s, b, h, q, kv: torch.tanh(s / 30) * 30},
        "alibi": {**past, "score_mod": lambda s, b, h, q, kv: s + slopes[h] * (kv - q)},
    }


def flex(name: str, dim: int, length: int) -> tuple[str, Call, Call]:
    """Our gradients and FlexAttention's, both called once."""
    how = functions(length, WIDTH // dim)[name]
    mask = create_block_mask(how.pop("mask_mod"), None, None, length, length, "cuda")
    torch.manual_seed(0)
    shape = (TOKENS // length, WIDTH // dim, length, dim)
    made = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    given, grad = [t.requires_grad_() for t in made[:3]], made[3]
    calls = []
    both: tuple[Any, ...] = (
        flashwright.flex_attention,
        torch.compile(flex_attention, dynamic=False),
    )
    for by in both:
        out = by(*given, block_mask=mask, **how)
        calls.append(partial(torch.autograd.grad, out, given, grad, retain_graph=True))
        calls[-1]()
    torch.cuda.synchronize()
    return f"{name} d{dim} {length}", calls[0], calls[1]


def option(name: str, dim: int, start: Any, turn: Any) -> None:
    """One function at two lengths: the first calls at the same time as others', then the times."""
    pairs = []
    try:
        pairs = [flex(name, dim, length) for length in (2048, 8192)]
    except Exception as error:
        print(f"{name} d{dim}: {type(error).__name__}: {str(error)[:300]}", flush=True)
    start.wait()
    with turn:
        for pair in pairs:
            line(*pair)


def options() -> None:
    """Functions of scores and masks."""
    spawn = get_context("spawn")
    cells = [(name, dim) for name in functions(8, 1) for dim in (64, 128)]
    start, turn = spawn.Barrier(len(cells)), spawn.Lock()
    running = [spawn.Process(target=option, args=(*cell, start, turn)) for cell in cells]
    for process in running:
        process.start()
    for process in running:
        process.join()


def parts() -> Iterator[Callable[[], None]]:
    known = {part.__name__: part for part in (grid, deterministic, older, mla, options)}
    yield from (known[name] for name in sys.argv[1:] or known)


if __name__ == "__main__":
    for part in parts():
        print(f"--- {part.__name__}: {(part.__doc__ or '').strip()}", flush=True)
        part()
