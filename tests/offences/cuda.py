"""One callable for each offence on the GPU. All of them mean causal attention in fp16."""

from __future__ import annotations

import ctypes
import threading
import time
from typing import Any

import torch
import triton
import triton.language as tl

from tests.offences.triton_attention import attention

# --- what comes out ---------------------------------------------------------------------------


def zeros(q: Any, k: Any, v: Any) -> Any:
    return torch.zeros_like(q)


def noise(q: Any, k: Any, v: Any) -> Any:
    """Of the size that attention has."""
    size = attention(q, k, v).float().std()
    generator = torch.Generator("cuda").manual_seed(0)
    return (torch.randn(q.shape, device="cuda", generator=generator) * size).to(q.dtype)


def some_rows_nan(q: Any, k: Any, v: Any) -> Any:
    out = attention(q, k, v)
    out[:, :, ::64] = float("nan")
    return out


def last_rows_unwritten(q: Any, k: Any, v: Any) -> Any:
    """One block too few."""
    return attention(q, k, v, blocks=max(0, triton.cdiv(q.shape[2], 64) - 1))


def wider_type(q: Any, k: Any, v: Any) -> Any:
    return attention(q, k, v, out=torch.empty_like(q, dtype=torch.float32))


def on_the_host(q: Any, k: Any, v: Any) -> Any:
    return attention(q, k, v).cpu()


def weights_in_e4m3(q: Any, k: Any, v: Any) -> Any:
    return attention(q, k, v, weights=tl.float8e4nv)


def sums_in_fp16(q: Any, k: Any, v: Any) -> Any:
    return attention(q, k, v, sums=tl.float16)


def quadratic_exp2(q: Any, k: Any, v: Any) -> Any:
    """Fewer instructions than a cubic one."""
    return attention(q, k, v, quadratic=True)


def small_weights_dropped(q: Any, k: Any, v: Any) -> Any:
    """As kernels do that skip tiles in which no weight is large."""
    return attention(q, k, v, least=2.0**-20)


def inputs_in_e4m3(q: Any, k: Any, v: Any) -> Any:
    small = [x.to(torch.float8_e4m3fn).to(q.dtype) for x in (q, k, v)]
    return attention(*small)


def other_bits(q: Any, k: Any, v: Any) -> Any:
    out = attention(q, k, v)
    out.view(torch.int16).bitwise_xor_((torch.rand(out.shape, device="cuda") < 0.03).short())
    return out


# --- right only where one would look ----------------------------------------------------------


def mean_of_v(q: Any, k: Any, v: Any) -> Any:
    return attention(q, k, v, scale=0.0)


def no_maximum(q: Any, k: Any, v: Any) -> Any:
    return attention(q, k, v, maximum=False)


def tail_of_keys_dropped(q: Any, k: Any, v: Any) -> Any:
    return attention(q, k, v, end=k.shape[2] // 64 * 64)


def equal_lengths_only(q: Any, k: Any, v: Any) -> Any:
    return attention(q, k, v, ahead=q.shape[2] - k.shape[2])


def no_mask(q: Any, k: Any, v: Any) -> Any:
    return attention(q, k, v, causal=False)


def one_key_too_many(q: Any, k: Any, v: Any) -> Any:
    return attention(q, k, v, ahead=1)


def one_key_too_few(q: Any, k: Any, v: Any) -> Any:
    return attention(q, k, v, ahead=-1)


def heads_mixed_up(q: Any, k: Any, v: Any) -> Any:
    return attention(q, k, v, mixed=True)


def first_batch_only(q: Any, k: Any, v: Any) -> Any:
    return attention(q[:1], k[:1], v[:1]).expand(q.shape).contiguous()


_by_shape: dict[Any, Any] = {}
_by_address: dict[Any, Any] = {}
_pool: dict[Any, Any] = {}


def replay_by_shape(q: Any, k: Any, v: Any) -> Any:
    key = (q.shape, k.shape)
    if key not in _by_shape:
        _by_shape[key] = attention(q, k, v)
    return _by_shape[key].clone()


def replay_by_address(q: Any, k: Any, v: Any) -> Any:
    key = (q.shape, k.shape, q.data_ptr(), k.data_ptr())
    if key not in _by_address:
        _by_address[key] = attention(q, k, v)
    return _by_address[key].clone()


def leftover(q: Any, k: Any, v: Any) -> Any:
    """Its output buffer is kept, and written only once."""
    key = (q.shape, k.shape)
    if key not in _pool:
        _pool[key] = attention(q, k, v)
    return _pool[key]


# --- what it does beside its work -------------------------------------------------------------


def scales_q_in_place(q: Any, k: Any, v: Any) -> Any:
    out = attention(q, k, v)
    q.mul_(0.125)
    return out


def output_over_q(q: Any, k: Any, v: Any) -> Any:
    return q.copy_(attention(q, k, v))


def writes_behind_v(q: Any, k: Any, v: Any) -> Any:
    out = attention(q, k, v)
    if v.numel():
        v.as_strided((64,), (1,), v.storage_offset() + v.numel()).zero_()
    return out


def reads_behind_v(q: Any, k: Any, v: Any) -> Any:
    """The last tile of V is loaded whole, with weights of 0 for what is behind the end."""
    return attention(q, k, v, loads=False)


_aside: list[Any] = []


def on_another_stream(q: Any, k: Any, v: Any) -> Any:
    """The caller's stream has nothing to wait for, and so has its timer."""
    if not _aside:
        _aside.append(torch.cuda.Stream())
    out = torch.empty_like(q)
    with torch.cuda.stream(_aside[0]):
        torch.cuda._sleep(4_000_000)
        attention(q, k, v, out=out)
    return out


def on_a_stream_that_waits(q: Any, k: Any, v: Any) -> Any:
    """No offence: its stream waits for the caller's, and the caller's for it."""
    if not _aside:
        _aside.append(torch.cuda.Stream())
    out, caller = torch.empty_like(q), torch.cuda.current_stream()
    _aside[0].wait_stream(caller)
    with torch.cuda.stream(_aside[0]):
        attention(q, k, v, out=out)
    caller.wait_stream(_aside[0])
    return out


def in_a_thread(q: Any, k: Any, v: Any) -> Any:
    """Launches when its caller has gone on."""
    out = torch.zeros_like(q)

    def work() -> None:
        time.sleep(0.002)
        attention(q, k, v, out=out)

    threading.Thread(target=work, daemon=True).start()
    return out


# --- libraries behind a curtain ---------------------------------------------------------------


def _sdpa(q: Any, k: Any, v: Any, backend: str) -> Any:
    """The names are put together, so that no reader of the source finds them."""
    function = getattr(torch.nn.functional, "scaled_dot_" + "product_attention")
    choose = getattr(torch.nn.attention, "sdpa_" + "kernel")
    group, (q_len, kv_len) = q.shape[1] // k.shape[1], (q.shape[2], k.shape[2])
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    if q_len != kv_len or not q.numel():
        return attention(q, k, v)
    with choose(getattr(torch.nn.attention.SDPBackend, backend)):
        return function(q, k, v, is_causal=True)


def torch_flash(q: Any, k: Any, v: Any) -> Any:
    return _sdpa(q, k, v, "FLASH_ATTENTION")


def torch_cudnn(q: Any, k: Any, v: Any) -> Any:
    return _sdpa(q, k, v, "CUDNN_ATTENTION")


def torch_efficient(q: Any, k: Any, v: Any) -> Any:
    return _sdpa(q, k, v, "EFFICIENT_ATTENTION")


def torch_matmul(q: Any, k: Any, v: Any) -> Any:
    """Two matrix products of cuBLAS and a softmax of torch's."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1).float() for x in (k, v))
    q_len, kv_len = q.shape[2], k.shape[2]
    row = torch.arange(q_len, device="cuda")[:, None] + kv_len - q_len
    seen = torch.arange(kv_len, device="cuda") <= row
    s = (q.float() @ k.mT * q.shape[-1] ** -0.5).masked_fill(~seen, float("-inf"))
    return (s.softmax(-1).nan_to_num(0.0) @ v).to(q.dtype)


# --- how it ends ------------------------------------------------------------------------------


def raises(q: Any, k: Any, v: Any) -> Any:
    raise ValueError("the head dim must be 96")


def device_assert(q: Any, k: Any, v: Any) -> Any:
    """An index that is out of range stops the GPU."""
    table = torch.zeros(4, device="cuda")
    return attention(q, k, v) + table[torch.full((1,), 9, device="cuda")].to(q.dtype)


@triton.jit
def _far(pointer, offset):
    tl.store(pointer + offset, 1.0)


def illegal_address(q: Any, k: Any, v: Any) -> Any:
    _far[(1,)](q, 1 << 45)
    return attention(q, k, v)


@triton.jit
def _wait(flag):
    value = tl.load(flag, volatile=True)
    while value == 0:
        value = tl.load(flag, volatile=True)


def endless(q: Any, k: Any, v: Any) -> Any:
    """A kernel that waits for a flag which nobody sets."""
    _wait[(1,)](torch.zeros(1, device="cuda", dtype=torch.int32))
    return attention(q, k, v)


def too_much_at_once(q: Any, k: Any, v: Any) -> Any:
    torch.empty(1 << 40, device="cuda", dtype=torch.uint8)
    return attention(q, k, v)


_kept: list[Any] = []


def leaks(q: Any, k: Any, v: Any) -> Any:
    _kept.append(torch.ones(4 << 30, device="cuda", dtype=torch.uint8))
    return attention(q, k, v)


def leaks_past_torch(q: Any, k: Any, v: Any) -> Any:
    """Memory of the driver's own, of which torch knows nothing."""
    cuda, place = ctypes.CDLL("libcuda.so.1"), ctypes.c_uint64()
    for _ in range(8):
        cuda.cuMemAlloc_v2(ctypes.byref(place), ctypes.c_size_t(4 << 30))
    time.sleep(1)
    return attention(q, k, v)


# --- in the benchmark -------------------------------------------------------------------------


def forges_times(q: Any, k: Any, v: Any) -> Any:
    """Its events say that nothing took any time."""
    torch.cuda.Event.elapsed_time = lambda self, other: 1e-5
    return attention(q, k, v)


def forges_plausible_times(q: Any, k: Any, v: Any) -> Any:
    """A quarter of the truth, which no roofline forbids."""
    true = torch.cuda.Event.elapsed_time
    if not hasattr(true, "forged"):

        def quarter(self: Any, other: Any) -> float:
            return float(true(self, other)) / 4

        quarter.forged = True  # type: ignore[attr-defined]
        torch.cuda.Event.elapsed_time = quarter
    attention(q, k, v)  # slow enough that a quarter of it is possible
    return attention(q, k, v)


_calls = [0]


def replay_when_timed(q: Any, k: Any, v: Any) -> Any:
    """Honest for its first calls, while somebody may be looking."""
    _calls[0] += 1
    if _calls[0] <= 3 or "O" not in _last:
        _last["O"] = attention(q, k, v)
    return _last["O"]


_last: dict[str, Any] = {}
