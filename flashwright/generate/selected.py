"""The gradients of attention over selected blocks (NSA), whose places come from a tensor."""

from __future__ import annotations

from dataclasses import dataclass

from flashwright.generate.own_program import OwnProgram
from flashwright.spec import AttentionSpec

_CODE = """\
// The gradients of selected blocks. A thread block has a query's group of heads as columns, and
// adds to the gradients of the blocks that it reads.
param HeadDim = {head_dim}
param VDim = {v_dim}
param Group = {group}
param TopK = {top_k}
param BM = {rows}
param BN = {block}
param Warps = {warps}
param Scale = {scale}

Allocate Q in global (B: batch, L: q_len, H: kv_heads, G: Group, D: HeadDim) as {dtype}
Allocate K in global (batch, kv_heads, kv_len, HeadDim) as {dtype}
Allocate V in global (batch, kv_heads, kv_len, VDim) as {dtype}
Allocate Idx in global (B: batch, H: kv_heads, L: q_len, T: TopK) as int32
Allocate LSE in global (B: batch, L: q_len, H: kv_heads, G: Group) as fp32
Allocate Delta in global (B: batch, L: q_len, H: kv_heads, G: Group) as fp32
Allocate dO in global (B: batch, L: q_len, H: kv_heads, G: Group, D: VDim) as {dtype}
Allocate dKsum in global (batch, kv_heads, kv_len, HeadDim) as fp32
Allocate dVsum in global (batch, kv_heads, kv_len, VDim) as fp32
Allocate dQ in global (B: batch, L: q_len, H: kv_heads, G: Group, D: HeadDim) as {dtype}
Allocate dK in global (batch, kv_heads, kv_len, HeadDim) as {dtype}
Allocate dV in global (batch, kv_heads, kv_len, VDim) as {dtype}

grid kv_head = 0:kv_heads, q_pos = 0:q_len, batch_idx = 0:batch
Allocate S in register (BN, BM) as fp32
Allocate P in register (BN, BM) as fp32
Allocate dP in register (BN, BM) as fp32
Allocate dS in shared (BN, BM) as {dtype}
Allocate dK in register (BN, HeadDim) as fp32
Allocate dV in register (BN, VDim) as fp32
Allocate dQ in register (BM, HeadDim) as fp32
Allocate Shift in register (BM) as fp32
Copy Q (BM, HeadDim) in coordinate [B = batch_idx, L = q_pos, H = kv_head] from global to shared
Copy dO (BM, VDim) in coordinate [B = batch_idx, L = q_pos, H = kv_head] from global to shared
Copy LSE (BM) in coordinate [B = batch_idx, L = q_pos, H = kv_head] from global to register
Copy Delta (BM) in coordinate [B = batch_idx, L = q_pos, H = kv_head] from global to register
Compute where(LSE > -1e29, LSE, inf) and get Shift
Compute 0 and get dQ_register
for j = 0:TopK{times}
  let Chosen = Idx[batch_idx, kv_head, q_pos, {slot}]
  if Chosen >= 0
    Copy K (BN, HeadDim) in coordinate [B = batch_idx, H = kv_head, L = {tile}]
      from global to shared
    Copy V (BN, VDim) in coordinate [B = batch_idx, H = kv_head, L = {tile}] from global to shared
    Compute GEMM K_shared, Q_shared.T and get S
    Compute S * Scale and get new S
    Compute Mask S where kv_idx <= q_pos + kv_len - q_len
    Compute exp(S - Shift) and get P
    Compute GEMM V_shared, dO_shared.T and get dP
    Compute P * (dP - Delta) and get new dP
    Copy dP from register to shared and get dS
    Reshape P from (MMA_C, MMA_M, MMA_N) to (MMA_A, MMA_M, MMA_N_new)
    Compute GEMM P, dO_shared and get dV_register
    Copy dV (BN, VDim) in coordinate [B = batch_idx, H = kv_head, L = {tile}]
      from register to global and accumulate dVsum
    Reshape dP from (MMA_C, MMA_M, MMA_N) to (MMA_A, MMA_M, MMA_N_new)
    Compute GEMM dP, Q_shared and get dK_register
    Copy dK (BN, HeadDim) in coordinate [B = batch_idx, H = kv_head, L = {tile}]
      from register to global and accumulate dKsum
    Compute GEMM dS_shared.T, K_shared and accumulate dQ_register
  end
end
Compute dQ_register * Scale and get new dQ_register
Copy dQ (BM, HeadDim) in coordinate [B = batch_idx, L = q_pos, H = kv_head] from register to global

// Conversion: the sums of dK and dV, rounded.
grid block_idx = 0:kv_len / BN, kv_head = 0:kv_heads, batch_idx = 0:batch
Allocate dK in register (BN, HeadDim) as fp32
Copy dKsum (BN, HeadDim) in coordinate [B = batch_idx, H = kv_head, L = block_idx]
  from global to register
Copy dVsum (BN, VDim) in coordinate [B = batch_idx, H = kv_head, L = block_idx]
  from global to register
Compute dKsum_register * Scale and get dK_register
Copy dK (BN, HeadDim) in coordinate [B = batch_idx, H = kv_head, L = block_idx]
  from register to global
Copy dVsum (BN, VDim) in coordinate [B = batch_idx, H = kv_head, L = block_idx]
  from register to global and get dV
"""


_TILE = 64
"""Keys of a step at the most."""


@dataclass(frozen=True)
class SelectedBackward(OwnProgram):
    """The gradients of a spec with selected blocks."""

    spec: AttentionSpec

    @property
    def code(self) -> str:
        """The program."""
        spec, block = self.spec, self.spec.selected_block
        parts = block // _TILE if block > _TILE and block % _TILE == 0 else 1
        keys = block // parts
        own = {"times": "", "slot": "j", "tile": "Chosen"}
        if parts > 1:
            own = {"times": f" * {parts}", "slot": f"floor(j / {parts})"}
            own["tile"] = f"Chosen * {parts} + j % {parts}"
        scale = "1 / sqrt(HeadDim)" if spec.scale is None else f"{spec.scale!r}"
        sizes = {"group": spec.group, "rows": -(-spec.group // keys) * keys, "block": keys}
        sizes |= {"head_dim": spec.head_dim, "v_dim": spec.value_dim, "top_k": spec.top_k}
        return _CODE.format(**own, **sizes, dtype=spec.dtype, warps=keys // 16, scale=scale)

    def in_words(self) -> str:
        """What it computes, for a line of progress."""
        return f"the backward pass of {self.spec.in_words}; {self.gpu.title}"
