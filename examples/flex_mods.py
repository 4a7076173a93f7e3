"""Score and mask functions of FlexAttention, after the patterns that people use.

`flashwright explain-mod examples/flex_mods.py:causal` prints the TL of one. The tests make a kernel
of each and compare it with FlexAttention. Functions that read tensors are made for sequences of up
to LENGTH tokens, HEADS heads and a batch of BATCH; the environment may name other sizes
(FLEX_MODS=2,16,8192) and a device (FLEX_MODS_DEVICE=cuda).
"""

import math
import os

import torch

BATCH, HEADS, LENGTH = map(int, os.environ.get("FLEX_MODS", "2,4,512").split(","))
DEVICE = os.environ.get("FLEX_MODS_DEVICE", "cpu")
_random = torch.Generator(DEVICE).manual_seed(0)


def _normal(*shape):
    return torch.randn(*shape, generator=_random)


def _documents(*sizes):
    """A document number for each token; the sizes are those at 512 tokens."""
    times = torch.tensor(sizes) * (LENGTH // 512)
    return torch.repeat_interleave(torch.arange(len(sizes)), times)


with torch.device(DEVICE):
    slopes = 2.0 ** (-8 * torch.arange(1, HEADS + 1) / HEADS)
    document = _documents(100, 37, 200, 75, 100)
    segment = torch.stack([_documents(60, 196, 256), _documents(300, 1, 211)])
    prefix = torch.tensor([70, 200]) * (LENGTH // 512)
    length = torch.tensor([401, 512]) * (LENGTH // 512)
    relative = _normal(HEADS, 2 * LENGTH)
    pair_bias = _normal(BATCH, HEADS, LENGTH, LENGTH).bfloat16()
    head_bias = _normal(HEADS, LENGTH, LENGTH)
    t5_table = _normal(32, HEADS)
    forget = -torch.rand(BATCH, HEADS, LENGTH, generator=_random).cumsum(-1) / 8
    key_weight = _normal(BATCH, LENGTH)
    cap = torch.tensor(20.0)
    is_global = torch.rand(LENGTH, generator=_random) < 0.05
    parent_sees = torch.tril(torch.rand(64, 64, generator=_random) < 0.4).fill_diagonal_(True)
    head_window = torch.tensor([16, 48, 128, 512]).repeat(HEADS // 4)
    temperature = 0.5 + torch.rand(HEADS, generator=_random)
    permutation = torch.randperm(LENGTH, generator=_random)


# --- masks --------------------------------------------------------------------------------------


def causal(b, h, q, kv):
    return q >= kv


def full(b, h, q, kv):
    return q >= 0


def sliding_window(b, h, q, kv):
    return (q >= kv) & (q - kv <= 64)


def two_sided_window(b, h, q, kv):
    return (q - kv).abs() < 48


def window_with_sinks(b, h, q, kv):
    return (q >= kv) & ((q - kv < 64) | (kv < 4))


def dilated(b, h, q, kv):
    return (q >= kv) & ((q - kv) % 4 == 0)


def dilated_window(b, h, q, kv):
    return ((q - kv).abs() <= 128) & ((q - kv) % 4 == 0)


def documents(b, h, q, kv):
    return document[q] == document[kv]


def causal_documents(b, h, q, kv):
    return (document[q] == document[kv]) & causal(b, h, q, kv)


def batched_documents(b, h, q, kv):
    return (segment[b, q] == segment[b, kv]) & (q >= kv)


def prefix_lm(b, h, q, kv):
    return (kv < prefix[b]) | (q >= kv)


def padded(b, h, q, kv):
    return kv < length[b]


def chunked(b, h, q, kv):
    return (q // 64 == kv // 64) & (q >= kv)


def block_diffusion(b, h, q, kv):
    return q // 32 >= kv // 32


def neighbourhood(b, h, q, kv):
    """A 2-D neighbourhood of 7 x 7 on an image 16 pixels wide."""
    return ((q // 16 - kv // 16).abs() <= 3) & ((q % 16 - kv % 16).abs() <= 3)


def tiled_neighbourhood(b, h, q, kv):
    """Tiles of 4 x 4 pixels: the same neighbourhood for all pixels of a tile."""
    row, column = q // 64 * 4, (q % 64) // 16 * 4
    near = (row - kv // 64 * 4).abs() <= 4
    return near & ((column - (kv % 64) // 16 * 4).abs() <= 4)


def global_tokens(b, h, q, kv):
    return is_global[kv] | is_global[q] | ((q - kv).abs() < 32)


def tree(b, h, q, kv):
    """Speculative decoding: each node sees its ancestors, by a table, and all of the past."""
    return (kv < q - q % 64) | ((kv // 64 == q // 64) & parent_sees[q % 64, kv % 64])


def window_per_head(b, h, q, kv):
    return (q >= kv) & (q - kv < head_window[h])


def strided(b, h, q, kv):
    """Half of the heads see a window, the others every 16th key."""
    return (q >= kv) & torch.where(h < HEADS // 2, q - kv < 32, kv % 16 == 15)


def not_the_future(b, h, q, kv):
    return ~(kv > q) & ~((kv > 10) & (kv < 20))


def permuted(b, h, q, kv):
    """Causal in the order of a permutation."""
    return permutation[q] >= permutation[kv]


# --- scores -------------------------------------------------------------------------------------


def unchanged(score, b, h, q, kv):
    return score


def alibi(score, b, h, q, kv):
    return score + slopes[h] * (kv - q)


def causal_score(score, b, h, q, kv):
    return torch.where(q >= kv, score, -float("inf"))


def softcap(score, b, h, q, kv):
    return 20 * torch.tanh(score / 20)


def softcap_of_a_tensor(score, b, h, q, kv):
    return cap * torch.tanh(score / cap)


def relative_bias(score, b, h, q, kv):
    return score + relative[h, q - kv + LENGTH]


def bias_per_head(score, b, h, q, kv):
    return score + head_bias[h, q, kv]


def pair(score, b, h, q, kv):
    """A bias of its own for each pair of tokens, as in models of proteins."""
    return score + pair_bias[b][h][q][kv]


def t5(score, b, h, q, kv):
    far = (q - kv).clamp(min=0)
    bucket = 16 + (torch.log(far.clamp(min=16) / 16) / math.log(8) * 16).floor().to(torch.int32)
    return score + t5_table[torch.where(far < 16, far, bucket.clamp(max=31)), h]


def forgetting(score, b, h, q, kv):
    """The forgetting transformer: a gate for each token, summed along the sequence."""
    return score + forget[b, h, q] - forget[b, h, kv]


def weighted_keys(score, b, h, q, kv):
    return score + torch.log(torch.sigmoid(key_weight[b, kv]))  # vmap of logsigmoid fails on CUDA


def temperature_per_head(score, b, h, q, kv):
    return score / temperature[h]


def soft_distance(score, b, h, q, kv):
    return score - 0.1 * torch.sqrt((q - kv).abs() + 1.0)


def capped_alibi(score, b, h, q, kv):
    return torch.where(q >= kv, 30 * torch.tanh(score / 30) + slopes[h] * (kv - q), -math.inf)


def sigmoid_gate(score, b, h, q, kv):
    return score * torch.sigmoid(score)


MASKS = (
    causal, full, sliding_window, two_sided_window, window_with_sinks, dilated, dilated_window,
    documents, causal_documents, batched_documents, prefix_lm, padded, chunked, block_diffusion,
    neighbourhood, tiled_neighbourhood, global_tokens, tree, window_per_head, strided,
    not_the_future, permuted,
)  # fmt: skip
SCORES = (
    unchanged, alibi, causal_score, softcap, softcap_of_a_tensor, relative_bias, bias_per_head,
    pair, t5, forgetting, weighted_keys, temperature_per_head, soft_distance, capped_alibi,
    sigmoid_gate,
)  # fmt: skip
