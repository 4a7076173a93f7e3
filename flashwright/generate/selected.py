"""Attention over selected blocks of keys (NSA), and its gradients. What queries name comes in lists
(sparse/lists.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from flashwright.generate.own_program import OwnProgram
from flashwright.lang.format import format_tree
from flashwright.lang.parse import parse
from flashwright.rewrite.packed import packed
from flashwright.spec import AttentionSpec

_COMMON = {
    "params": """\
param HeadDim = {head_dim}
param VDim = {v_dim}
param Group = {group}
param BM = {rows}
param BN = {keys}
param Stages = {stages}
param Warps = {warps}
param Scale = {scale}
""",
    "listed": """\
dim tiles, slots

grid block_idx = 0:q_len * Group / BM, kv_head = 0:kv_heads, batch_idx = 0:batch

Allocate Q in global (B: batch, L: q_len, H: kv_heads, G: Group, D: HeadDim) as {dtype}
Allocate K in global (batch, kv_heads, kv_len, HeadDim) as {dtype}
Allocate V in global (batch, kv_heads, kv_len, VDim) as {dtype}
Allocate Count in global (B: batch, H: kv_heads, T: tiles) as int32
Allocate Tile in global (B: batch, H: kv_heads, T: tiles, J: slots) as int32
Allocate Named in global (B: batch, H: kv_heads, T: tiles, J: slots) as int32
""",
    "tiles_of_keys": """\
Allocate K in shared (BN, HeadDim) as {dtype} with stages Stages
Allocate V in shared (BN, VDim) as {dtype} with stages Stages
Allocate S in register (BM, BN) as fp32
""",
    "bit": """\
// Which of the bits is the row's query's: dividing by a power of two puts it last.
Compute exp2(block_idx * BM / Group - floor(q_idx / Group)) and get Bit
""",
    "loop": """\
for j = 0:Count[batch_idx, kv_head, block_idx]
  let begin = Tile[batch_idx, kv_head, block_idx, j]
  let bits = Named[batch_idx, kv_head, block_idx, j]
  Copy K (BN, HeadDim) in coordinate [B = batch_idx, H = kv_head, L at begin] from global to shared
""",
    "mask": """\
  Compute Mask S where floor(bits * Bit) % 2 == 1
    and kv_idx <= floor(q_idx / Group) + kv_len - q_len
""",
    "of_tile": "[B = batch_idx, L = page_idx, H = kv_head, G = block_idx in 0:q_len * Group]",
    "gathered": (
        "[B = batch_idx, L = Queries[batch_idx, kv_head, first + page_idx],"
        " H = kv_head, G = i in 0:rows]"
    ),
}
"""What several programs have."""

_FORWARD = """\
// Attention over selected blocks. The rows of a tile are the heads of a group, for {queries}
// queries. The tile reads each block that one of them names, and masks it for the others.
{params}
{two}
{listed}
Allocate O in global (B: batch, L: q_len, H: kv_heads, G: Group, D: VDim) as {dtype}
Allocate LSE in global (B: batch, L: q_len, H: kv_heads, G: Group) as fp32
{gate}
{tiles_of_keys}
Allocate Smax in register (BM) as fp32
Allocate Ssum in register (BM) as fp32
Allocate O in register (BM, VDim) as fp32
Allocate LSE in register (BM) as fp32
Allocate Bit in register (BM) as fp32

Copy Q (BM, HeadDim) in coordinate {of_tile} from global to shared
{loaded}
Compute -1e30 and get Smax
Compute 0 and get Ssum
Compute 0 and get O_register
{bit}
{loop}
  Compute GEMM Q_shared, K_shared.T and get S
  Compute Multiply S, Scale and get new S
{mask}
  Compute Softmax S with Smax and Ssum and rescale O_register
  Reshape S from (MMA_C, MMA_M, MMA_N) to (MMA_A, MMA_M, MMA_N_new)
  Copy V (BN, VDim) in coordinate [B = batch_idx, H = kv_head, L at begin] from global to shared
  Compute GEMM S, V_shared and accumulate O_register
end

Compute where(Ssum > 0, O_register / Ssum, 0) and get new O_register
{gated}
Copy O (BM, VDim) in coordinate {of_tile} from register to global
Compute Smax + log(Ssum) and get LSE_register
Copy LSE (BM) in coordinate {of_tile} from register to global
"""

_GATE = {
    "gate": """\
Allocate Gate in global (B: batch, L: q_len, H: kv_heads, G: Group) as {dtype}
""",
    "loaded": """\
Copy Gate (BM) in coordinate {of_tile} from global to register
""",
    "gated": """\
Compute O_register * Gate and get new O_register
""",
}
"""What the program has for a factor of each row of O."""

_BACKWARD = """\
// The gradients of selected blocks. A thread block has a block of keys and some of the queries that
// name it, with the heads of their groups as columns.
{about}
{params}
param Persistent = 0              // they take very different times: the next begins when one ends
dim items, entries

Allocate Q in global (B: batch, L: q_len, H: kv_heads, G: Group, D: HeadDim) as {dtype}
Allocate K in global (batch, kv_heads, kv_len, HeadDim) as {dtype}
Allocate V in global (batch, kv_heads, kv_len, VDim) as {dtype}
Allocate Begin in global (B: batch, H: kv_heads, I: items) as int32
Allocate First in global (B: batch, H: kv_heads, I: items) as int32
Allocate Size in global (B: batch, H: kv_heads, I: items) as int32
Allocate Queries in global (B: batch, H: kv_heads, N: entries) as int32
Allocate LSE in global (B: batch, L: q_len, H: kv_heads, G: Group) as fp32
Allocate Delta in global (B: batch, L: q_len, H: kv_heads, G: Group) as fp32
Allocate dO in global (B: batch, L: q_len, H: kv_heads, G: Group, D: VDim) as {dtype}
Allocate dKsum in global (batch, kv_heads, kv_len, HeadDim) as fp32
Allocate dVsum in global (batch, kv_heads, kv_len, VDim) as fp32
Allocate dK in global (batch, kv_heads, kv_len, HeadDim) as {dtype}
Allocate dV in global (batch, kv_heads, kv_len, VDim) as {dtype}
{tensors}
grid item = 0:items, kv_head = 0:kv_heads, batch_idx = 0:batch
let begin = Begin[batch_idx, kv_head, item]
let first = First[batch_idx, kv_head, item]
let rows = Size[batch_idx, kv_head, item] * Group
Allocate Q in shared (BM, HeadDim) as {dtype} with stages Stages
Allocate dO in shared (BM, VDim) as {dtype} with stages Stages
Allocate S in register (BN, BM) as fp32
Allocate P in register (BN, BM) as fp32
Allocate dP in register (BN, BM) as fp32
Allocate dK in register (BN, HeadDim) as fp32
Allocate dV in register (BN, VDim) as fp32
{tiles}
Allocate Shift in register (BM) as fp32
if rows > 0
  Copy K (BN, HeadDim) in coordinate [B = batch_idx, H = kv_head, L at begin] from global to shared
  Copy V (BN, VDim) in coordinate [B = batch_idx, H = kv_head, L at begin] from global to shared
  Compute 0 and get dK_register
  Compute 0 and get dV_register
  for i = 0:rows / BM
    Copy Q (BM, HeadDim) in coordinate {gathered} from global to shared
    Copy dO (BM, VDim) in coordinate {gathered} from global to shared
    Copy LSE (BM) in coordinate {gathered} from global to register
    Copy Delta (BM) in coordinate {gathered} from global to register
    Compute where(LSE > -1e29, LSE, inf) and get Shift
    Compute GEMM K_shared, Q_shared.T and get S
    Compute S * Scale and get new S
    Compute Mask S where
      kv_idx <= Queries[batch_idx, kv_head, first + floor(q_idx / Group)] + kv_len - q_len
    Compute exp(S - Shift) and get P
    Compute GEMM V_shared, dO_shared.T and get dP
    Compute P * (dP - Delta) and get new dP
{kept}
    Reshape P from (MMA_C, MMA_M, MMA_N) to (MMA_A, MMA_M, MMA_N_new)
    Compute GEMM P, dO_shared and accumulate dV_register
    Reshape dP from (MMA_C, MMA_M, MMA_N) to (MMA_A, MMA_M, MMA_N_new)
    Compute GEMM dP, Q_shared and accumulate dK_register
{added}
  end
  Copy dK (BN, HeadDim) in coordinate [B = batch_idx, H = kv_head, L at begin]
    from register to global and accumulate dKsum
  Copy dV (BN, VDim) in coordinate [B = batch_idx, H = kv_head, L at begin]
    from register to global and accumulate dVsum
end

// Conversion: the sums of dK and dV, rounded.
grid block_idx = 0:kv_len / BN, kv_head = 0:kv_heads, batch_idx = 0:batch
param Warps = {rounding_warps}
Allocate dK in register (BN, HeadDim) as fp32
Copy dKsum (BN, HeadDim) in coordinate [B = batch_idx, H = kv_head, L = block_idx]
  from global to register
Compute dKsum_register * Scale and get dK_register
Copy dK (BN, HeadDim) in coordinate [B = batch_idx, H = kv_head, L = block_idx]
  from register to global
Copy dVsum (BN, VDim) in coordinate [B = batch_idx, H = kv_head, L = block_idx]
  from global to register
Copy dVsum (BN, VDim) in coordinate [B = batch_idx, H = kv_head, L = block_idx]
  from register to global and get dV
{conversion}
"""

_SUM_OF_DQ = {
    "about": """\
// dQ is a sum over the blocks of a query.
""",
    "tensors": """\
Allocate dQsum in global (B: batch, L: q_len, H: kv_heads, G: Group, D: HeadDim) as fp32
Allocate dQ in global (B: batch, L: q_len, H: kv_heads, G: Group, D: HeadDim) as {dtype}
""",
    "tiles": """\
Allocate dS in shared (BN, BM) as {dtype}
Allocate dQ in register (BM, HeadDim) as fp32
""",
    "kept": """\
    Copy dP from register to shared and get dS
""",
    "added": """\
    Compute GEMM dS_shared.T, K_shared and get dQ_register
    Copy dQ (BM, HeadDim) in coordinate {gathered}
      from register to global and accumulate dQsum
""",
    "conversion": """

// Conversion: those of dQ.
grid block_idx = 0:q_len * Group / BM, kv_head = 0:kv_heads, batch_idx = 0:batch
param Warps = {rounding_warps}
Allocate dQ in register (BM, HeadDim) as fp32
Copy dQsum (BM, HeadDim) in coordinate {of_tile} from global to register
Compute dQsum_register * Scale and get dQ_register
Copy dQ (BM, HeadDim) in coordinate {of_tile} from register to global
""",
}
"""What the program has for dQ, if that is added up in any order."""

_QUERIES = """\
// dQ of selected blocks, in a fixed order. The rows of a tile are the heads of a group, for
// {queries} queries, and the tile reads each block that one of them names, as in the forward.
{params}
{two}
{listed}
Allocate LSE in global (B: batch, L: q_len, H: kv_heads, G: Group) as fp32
Allocate Delta in global (B: batch, L: q_len, H: kv_heads, G: Group) as fp32
Allocate dO in global (B: batch, L: q_len, H: kv_heads, G: Group, D: VDim) as {dtype}
Allocate dQ in global (B: batch, L: q_len, H: kv_heads, G: Group, D: HeadDim) as {dtype}
{tiles_of_keys}
Allocate dP in register (BM, BN) as fp32
Allocate dQ in register (BM, HeadDim) as fp32
Allocate Shift in register (BM) as fp32
Allocate Bit in register (BM) as fp32

Copy Q (BM, HeadDim) in coordinate {of_tile} from global to shared
Copy dO (BM, VDim) in coordinate {of_tile} from global to shared
Copy LSE (BM) in coordinate {of_tile} from global to register
Copy Delta (BM) in coordinate {of_tile} from global to register
Compute where(LSE > -1e29, LSE, inf) and get Shift
{bit}
Compute 0 and get dQ_register
{loop}
  Copy V (BN, VDim) in coordinate [B = batch_idx, H = kv_head, L at begin] from global to shared
  Compute GEMM Q_shared, K_shared.T and get S
  Compute S * Scale and get new S
{mask}
  Compute exp(S - Shift) and get new S
  Compute GEMM dO_shared, V_shared.T and get dP
  Compute S * (dP - Delta) and get new S
  Reshape S from (MMA_C, MMA_M, MMA_N) to (MMA_A, MMA_M, MMA_N_new)
  Compute GEMM S, K_shared and accumulate dQ_register
end
Compute dQ_register * Scale and get new dQ_register
Copy dQ (BM, HeadDim) in coordinate {of_tile} from register to global
"""

_WEIGHTS = """\
// How much each group of heads attends to the mean of each block of keys. The columns of a tile are
// the heads of a group, for {queries} queries. A block that ends behind the query has 0.
{params}
param Block = {block}
param Columns = {columns}  // for the queries of a tile
{tokens}

grid block_idx = 0:q_len * Group / BM, kv_head = 0:kv_heads, batch_idx = 0:batch

{queries_and_sums}
Allocate K in global (batch, kv_heads, kv_len, HeadDim) as {dtype}
Allocate K in shared (BN, HeadDim) as {dtype} with stages Stages
Allocate S in register (BN, BM) as fp32
Allocate Shift in register (BM) as fp32

Copy Q (BM, HeadDim) in coordinate {here} from global to shared
{copied}
Copy LSE (BM) in coordinate {here} from global to register
Compute where(LSE > -1e29, LSE, inf) and get Shift
for i = 0:kv_len / BN
  Copy K (BN, HeadDim) in coordinate [B = batch_idx, H = kv_head, L = i] from global to shared
  Compute GEMM K_shared, Q_shared.T and get S
  Compute S * Scale and get new S
  // Queries of other tiles have sums of their own.
  Compute Mask S where q_idx >= block_idx * BM and q_idx < (block_idx + 1) * BM
    and kv_idx * Block + Block <= floor(q_idx / Group) + 1{shift}
  Compute exp(S - Shift) and get new S
{summed}
end
"""

_OF_GROUPS = {
    "here": _COMMON["of_tile"],
    "queries_and_sums": """\
Allocate Q in global (B: batch, L: q_len, H: kv_heads, G: Group, D: HeadDim) as {dtype}
Allocate LSE in global (B: batch, L: q_len, H: kv_heads, G: Group) as fp32
Allocate Sums in global
  (B: batch, H: kv_heads, T: ceil(q_len * Group / BM), N: kv_len, C: Columns) as fp16
Allocate Own in global (L: q_len, G: Group, C: Columns) as fp16
Allocate Sums in register (BN, Columns) as fp32
""",
    "copied": """\
Copy Own (BM, Columns) in coordinate [L = page_idx, G = block_idx in 0:q_len * Group]
  from global to shared
""",
    "summed": """\
  Reshape S from (MMA_C, MMA_M, MMA_N) to (MMA_A, MMA_M, MMA_N_new)
  Compute GEMM S, Own_shared and get Sums_register  // of the columns of a query
  Copy Sums (BN, Columns) in coordinate [B = batch_idx, H = kv_head, T = block_idx, N = i]
    from register to global
""",
}
"""What the program has for groups of heads."""

_OF_ONE_HEAD = {
    "here": "[B = batch_idx, H = kv_head, L = block_idx]",
    "queries_and_sums": """\
Allocate Q in global (batch, kv_heads, q_len, HeadDim) as {dtype}
Allocate LSE in global (batch, kv_heads, q_len) as fp32
Allocate Sums in global (B: batch, H: kv_heads, N: kv_len, L: q_len) as fp16
""",
    "copied": "",
    "summed": """\
  Copy S (BN, BM) in coordinate [B = batch_idx, H = kv_head, N = i, L = block_idx]
    from register to global and get Sums
""",
}

_KEYS = 64
"""Keys of a tile at the most."""

_BESIDE = 4096
"""Bytes of shared memory that are left for barriers and the like."""

_BESIDE_TWO = 32768
"""The same of two thread blocks on an SM, with what of O is on its way."""

_TWO = """\
param Persistent = 0  // two thread blocks on an SM hide each other's latency
"""

_BITS = 24
"""Queries of a tile at the most: their bits are a number in fp32."""


def _with(template: str, parts: Mapping[str, str]) -> str:
    """A template with its parts. What is lines, or nothing, takes the place of a whole line."""
    for name, part in parts.items():
        place = f"{{{name}}}"
        lines = part.endswith("\n") or not part
        template = template.replace(place + "\n" if lines else place, part)
    return template


@dataclass(frozen=True)
class SelectedProgram(OwnProgram):
    """A program of a spec with selected blocks."""

    spec: AttentionSpec

    @cached_property
    def keys(self) -> int:
        """The keys of a tile, a multiple of 16: a block, or a part of one that is large."""
        sizes = [n for n in range(_KEYS, 0, -16) if self.spec.selected_block % n == 0]
        return next((n for n in sizes if self._stages(n)), sizes[-1])

    @property
    def _widths(self) -> int:
        return self.spec.head_dim + self.spec.value_dim

    def _stages(self, keys: int) -> int:
        """How many stages of tiles of so many keys fit into shared memory."""
        raise NotImplementedError

    def _fit(self, once: int, each: int) -> int:
        """How often `each` so many elements fit into shared memory, beside others."""
        return ((self.gpu.shared_per_block - _BESIDE) // 2 - once) // each

    def _filled(self, template: str, **sizes: int | str) -> str:
        spec = self.spec
        scale = "1 / sqrt(HeadDim)" if spec.scale is None else f"{spec.scale!r}"
        given: Mapping[str, int | str] = {
            "head_dim": spec.head_dim,
            "v_dim": spec.value_dim,
            "group": spec.group,
            "keys": self.keys,
            "dtype": spec.dtype,
            "scale": scale,
        }
        return _with(template, _COMMON).format(**given, **sizes)


@dataclass(frozen=True)
class SelectedForward(SelectedProgram):
    """Attention over selected blocks."""

    template = _with(_FORWARD, dict.fromkeys(_GATE, ""))
    most_stages = 3

    @cached_property
    def queries(self) -> int:
        """The queries of a tile: their rows fill a warpgroup, or four warps where there are none.
        (More of them share more blocks, and have more products that the mask hides.)"""
        group = self.spec.group
        rows = [n for n in range(group, group * _BITS + 1, group) if n % 16 == 0]
        wide = [n for n in rows if n % 64 == 0 and n <= 128 and self.gpu.wgmma]
        fitting = wide[:1] or [n for n in rows if n <= 64]
        return (fitting[-1] if fitting else rows[0]) // group

    def _two(self, rows: int) -> bool:
        """Whether two thread blocks with so many rows and two stages fit on an SM."""
        tiles = rows * self._kept + 2 * _KEYS * self._widths
        return rows == 64 and 4 * tiles + _BESIDE_TWO <= self.gpu.shared_per_sm

    @property
    def code(self) -> str:
        """The program."""
        rows = self.queries * self.spec.group
        sizes = {"queries": self.queries, "rows": rows, "warps": rows // 16}
        two = self.gpu.wgmma and self._two(rows)
        stages = 2 if two else max(1, self._stages(self.keys))
        template = _with(self.template, {"two": _TWO if two else ""})
        return self._filled(template, **sizes, stages=stages)

    @property
    def _kept(self) -> int:
        """The widths of the tiles that stay in shared memory."""
        return self.spec.head_dim

    def _stages(self, keys: int) -> int:
        rows = self.queries * self.spec.group
        return min(self.most_stages, self._fit(rows * self._kept, keys * self._widths))

    def in_words(self) -> str:
        """What it computes, for a line of progress."""
        return f"{self.spec.in_words}; {self.gpu.title}"


@dataclass(frozen=True)
class SelectedGated(SelectedForward):
    """Attention over selected blocks, times a gate for each query and head."""

    template = _with(_FORWARD, _GATE)


@dataclass(frozen=True)
class SelectedQueries(SelectedForward):
    """dQ of a spec with selected blocks, in a fixed order."""

    template = _QUERIES
    most_stages = 2

    @property
    def _kept(self) -> int:
        return self._widths

    def in_words(self) -> str:
        """What it computes, for a line of progress."""
        return f"the gradients of the queries of {self.spec.in_words}; {self.gpu.title}"


@dataclass(frozen=True)
class SelectedBackward(SelectedProgram):
    """The gradients of a spec with selected blocks, dQ added up in any order."""

    parts: ClassVar[Mapping[str, str]] = _SUM_OF_DQ

    @property
    def code(self) -> str:
        """The program."""
        rows, stages = self.keys, max(1, self._stages(self.keys))
        warps = self.keys // 16
        if self.gpu.wgmma and warps == 4 and self._widths > 256:
            warps = 8  # two warpgroups share the columns: else registers spill
        sizes = {"rows": rows, "warps": warps, "rounding_warps": rows // 16}
        return self._filled(_with(_BACKWARD, self.parts), **sizes, stages=stages)

    def _stages(self, keys: int) -> int:
        return min(2, self._fit(keys * (self._widths + keys), keys * self._widths))

    def in_words(self) -> str:
        """What it computes, for a line of progress."""
        return f"the backward pass of {self.spec.in_words}; {self.gpu.title}"


@dataclass(frozen=True)
class SelectedKeys(SelectedBackward):
    """dK and dV alone."""

    parts = dict.fromkeys(_SUM_OF_DQ, "")


@dataclass(frozen=True)
class BlockWeights(SelectedProgram):
    """How much each group attends to the means of blocks, by which they are chosen."""

    @cached_property
    def queries(self) -> int:
        """The queries of a tile."""
        group = self.spec.group
        rows = [n for n in range(group, group * _KEYS + 1, group) if n % 16 == 0]
        fitting = (n for n in rows if n <= 128 and self._stages_beside(n))
        return max(fitting, default=rows[0]) // group

    @property
    def columns(self) -> int:
        """The columns of the sums: those of the queries, and as many as a product asks for."""
        return -(-self.queries // 16) * 16

    @cached_property
    def keys(self) -> int:
        """The blocks of a tile."""
        return _KEYS

    @property
    def code(self) -> str:
        """The program."""
        parts = _OF_GROUPS if self.spec.group > 1 else _OF_ONE_HEAD
        return self._with(parts | {"tokens": "dim tokens\n", "shift": " + tokens - q_len"})

    def _with(self, parts: Mapping[str, str]) -> str:
        sizes = {"rows": self.queries * self.spec.group, "warps": self.keys // 16}
        stages = min(3, max(1, self._stages_beside(sizes["rows"])))
        more = {"queries": self.queries, "columns": self.columns, "stages": stages}
        return self._filled(_with(_WEIGHTS, parts), **sizes, **more, block=self.spec.selected_block)

    def _stages_beside(self, rows: int) -> int:
        """How many stages fit beside so many columns, and their part in the sums."""
        once = rows * (self.spec.head_dim + max(16, rows // self.spec.group))
        return self._fit(once, self.keys * self.spec.head_dim)

    def in_words(self) -> str:
        """What it computes, for a line of progress."""
        return f"the choice of blocks of {self.spec.in_words}; {self.gpu.title}"


@dataclass(frozen=True)
class PackedWeights(BlockWeights):
    """The same for packed sequences, whose last query stands at the last key."""

    @cached_property
    def code(self) -> str:
        """The program."""
        return format_tree(packed(parse(self._with(_OF_GROUPS | {"tokens": "", "shift": ""}))))
