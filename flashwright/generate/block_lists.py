"""Which blocks of keys queries read (NSA): chosen by their weights, and merged for neighbouring
queries. The rows of a tile are queries, or groups of them, and all of its work is comparisons."""

from __future__ import annotations

from dataclasses import dataclass

from flashwright.generate.own_program import OwnProgram

_HEAVIEST = """\
// The blocks that each query reads: its own, the first, the one before its own, then in each turn
// the heaviest of those that are left, in their order if several are as heavy.
param BM = {rows}
param BN = {keys}
param Warps = {warps}
dim slots

grid block_idx = 0:q_len / BM, kv_head = 0:kv_heads, batch_idx = 0:batch

Allocate Weights in global (B: batch, H: kv_heads, Q: q_len, L: kv_len) as fp16
Allocate Own in global (Q: q_len) as int32
Allocate Far in global (T: ceil(q_len / BM)) as int32
Allocate Found in global (B: batch, H: kv_heads, J: slots, Q: q_len) as int32
Allocate S in register (BM, BN) as fp32
Allocate Here in register (BM) as fp32
Allocate HerePlace in register (BM) as fp32
Allocate Most in register (BM) as fp32
Allocate Place in register (BM) as fp32
Allocate Last in register (BM) as fp32
Allocate LastPlace in register (BM) as fp32

let far = Far[block_idx]
Copy Own (BM) in coordinate [Q = block_idx] from global to register
Copy Own (BM) in coordinate [B = batch_idx, H = kv_head, J = 0, Q = block_idx]
  from register to global and get Found
if slots > 1
  Compute where(Own > 0, 0, -1) and get Place
  Copy Place (BM) in coordinate [B = batch_idx, H = kv_head, J = 1, Q = block_idx]
    from register to global and get Found
end
if slots > 2
  Compute where(Own > 1, Own - 1, -1) and get Place
  Copy Place (BM) in coordinate [B = batch_idx, H = kv_head, J = 2, Q = block_idx]
    from register to global and get Found
end
Compute inf and get Last
Compute 0 and get LastPlace
for j = 3:slots
  Compute -1 and get Most
  Compute -1 and get Place
  for i = 0:min(kv_len, far - 1) / BN
    Copy Weights (BM, BN) in coordinate [B = batch_idx, H = kv_head, Q = block_idx, L = i]
      from global to register
    Compute where(Weights < Last or (Weights == Last and kv_idx > LastPlace), Weights, -inf)
      and get S
    Compute Mask S where kv_idx < kv_len and kv_idx > 0 and kv_idx < Own - 1
    Compute rowmax(S) and get Here
    Compute -rowmax(where(S == Here and kv_idx < kv_len, -kv_idx, -inf)) and get HerePlace
    Compute where(Here > Most, HerePlace, Place) and get new Place
    Compute max(Here, Most) and get new Most
  end
  Compute Most and get new Last
  Compute Place and get new LastPlace
  Copy Place (BM) in coordinate [B = batch_idx, H = kv_head, J = j, Q = block_idx]
    from register to global and get Found
end
"""

_MERGED = """\
// The tiles of keys that {queries} neighbouring queries read, in their order, each with a bit for
// every query that names it. One that a query names twice is listed twice.
param BM = {rows}
param Slots = {slots}
param Queries = {queries}
param Block = {block}
param Warps = {warps}
dim tiles, turns

grid block_idx = 0:tiles / BM, kv_head = 0:kv_heads, batch_idx = 0:batch

Allocate Blocks in global (B: batch, H: kv_heads, R: Queries, T: tiles, J: Slots) as int32
Allocate Own in global (R: Queries, T: tiles) as int32
Allocate First in global (R: Queries, T: tiles) as int32
Allocate Tile in global (B: batch, H: kv_heads, J: turns, T: tiles) as int32
Allocate Named in global (B: batch, H: kv_heads, J: turns, T: tiles) as int32
Allocate Count in global (B: batch, H: kv_heads, T: tiles) as int32
{allocated}
Allocate Now in register (BM) as fp32
Allocate Next in register (BM) as fp32
Allocate Again in register (BM) as fp32
Allocate Listed in register (BM) as fp32
Allocate Tile in register (BM) as fp32
Allocate Named in register (BM) as fp32
Allocate Count in register (BM) as fp32

// Where the blocks begin that a query reads: counted from the beginning of its sequence, up to its
// own.
{copied}
Compute -1 and get Now
Compute 0 and get Listed
Compute 0 and get Count_register
for j = 0:turns
  // The next place, unless a query names this one more often than it has been listed.
  Compute inf and get Next
{next}
  Compute where({most} > Listed, 1, 0) and get Again
  Compute where(Again > 0, Now, Next) and get new Now
  Compute where(Again > 0, Listed, 0) and get new Listed
{counted}
  Compute where(Now < inf, {bits}, 0) and get Named_register
  Compute where(Now < inf, Now, 0) and get Tile_register
  Compute Count_register + where(Now < inf, 1, 0) and get new Count_register
  Compute Listed + 1 and get new Listed
  Copy Tile (BM) in coordinate [B = batch_idx, H = kv_head, J = j, T = block_idx]
    from register to global
  Copy Named (BM) in coordinate [B = batch_idx, H = kv_head, J = j, T = block_idx]
    from register to global
end
Copy Count (BM) in coordinate [B = batch_idx, H = kv_head, T = block_idx] from register to global
"""

_OF_QUERY = {
    "allocated": """\
Allocate Key{r} in register (BM, Slots) as fp32
Allocate Times{r} in register (BM) as fp32
""",
    "copied": """\
Copy Blocks (BM, Slots) in coordinate [B = batch_idx, H = kv_head, R = {r}, T = block_idx]
  from global to register and get Blocks{r}
Copy Own (BM) in coordinate [R = {r}, T = block_idx] from global to register and get Own{r}
Copy First (BM) in coordinate [R = {r}, T = block_idx] from global to register and get First{r}
Compute where(Blocks{r} >= 0 and Blocks{r} <= Own{r}, First{r} + Blocks{r} * Block, inf)
  and get Key{r}
Compute 0 and get Times{r}
""",
    "next": """\
  Compute min(Next, -rowmax(where(Key{r} > Now, -Key{r}, -inf))) and get new Next
""",
    "counted": """\
  Compute rowsum(where(Key{r} == Now, 1, 0)) and get Times{r}
""",
}
"""What the program has for each query of a row."""

_ROWS = 64
_KEYS = 64
"""Blocks of a tile."""

_MOST_NAMES = 128
"""The most names of a row: registers hold them, and each is looked at in as many turns."""

_EXACT = 1 << 24
"""Whole numbers up to this one are exact in fp32."""


@dataclass(frozen=True)
class HeaviestBlocks(OwnProgram):
    """Which blocks each query reads, by how much its group attends to them."""

    rows = _ROWS

    @property
    def code(self) -> str:
        """The program."""
        return _HEAVIEST.format(rows=self.rows, keys=_KEYS, warps=self.rows // 16)

    def in_words(self) -> str:
        """What it computes, for a line of progress."""
        return f"the choice of blocks by their weights; {self.gpu.title}"


@dataclass(frozen=True)
class MergedLists(OwnProgram):
    """What some neighbouring queries read, of blocks of so many keys, each query up to `slots`."""

    block: int
    queries: int
    slots: int

    def fits(self, keys: int) -> bool:
        """Whether the names of a row are few, and fp32 holds the places of so many keys."""
        return self.queries * self.slots <= _MOST_NAMES and keys < _EXACT

    @property
    def code(self) -> str:
        """The program."""
        each = range(self.queries)
        parts = {n: "".join(x.format(r=r) for r in each) for n, x in _OF_QUERY.items()}
        most = "Times0"
        for r in each[1:]:
            most = f"max({most}, Times{r})"
        bits = " + ".join(f"where(Times{r} > Listed, {1 << r}, 0)" for r in each)
        sizes = {"rows": _ROWS, "warps": _ROWS // 16, "slots": self.slots, "block": self.block}
        lines = {name: part.rstrip("\n") for name, part in parts.items()}
        return _MERGED.format(queries=self.queries, most=most, bits=bits, **sizes, **lines)

    def in_words(self) -> str:
        """What it computes, for a line of progress."""
        return f"the blocks that {self.queries} queries read together; {self.gpu.title}"
