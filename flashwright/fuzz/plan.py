"""The features of a generated program, drawn before its text is written."""

from __future__ import annotations

from dataclasses import dataclass, field

from flashwright.fuzz.draft import Draft
from flashwright.fuzz.sizes import MOST_REGISTERS, ProgramSizes

WEIGHTS = (
    *("sigmoid(S)", "max(S, 0)", "exp(min(S, 2))", "tanh(max(S, 0))"),
    *("where(S > 0, S, 0)", "max(S, 0) * max(S, 0)"),
)
"""Weights without a softmax; a masked score (-inf) has the weight 0."""


@dataclass
class ProgramPlan:
    """The features of one program."""

    sizes: ProgramSizes
    group: int = 1
    """Query heads for each head of K and V."""
    heads_split: bool = False
    """Whether Q has its heads as two axes, H and G."""
    swapped: bool = False
    """Whether the tensors have heads before batches."""
    batched: bool = True
    paged: bool = False
    view: bool = False
    """Whether K is a view with an offset."""
    streams: int = 1
    parts: int = 1
    """GEMMs that add up to one tile of scores."""
    shared_kv: bool = False
    """Whether one tile of K also serves as V."""
    two_outputs: bool = False
    softmax: str = "statement"
    weights: str = ""
    scale: str = "Multiply"
    q_space: str = "shared"
    p: str = "in place"
    loop: str = "plain"
    masks: list[str] = field(default_factory=list)
    bound: str = "full"
    transposed: str = ""
    """The tensors among K and V that have positions as their last axis."""
    lengths: bool = False
    """Whether a tensor has the length of each sequence."""
    lse: bool = False
    sink: bool = False
    """Sums begin with a weight of 1 at the score 0."""
    move_v: bool = False
    move_k: bool = False
    out: str = "fp16"
    through_shared: bool = False
    """Whether O is stored from shared memory."""
    extras: list[str] = field(default_factory=list)

    @property
    def split(self) -> bool:
        """Whether the heads of Q are two axes; only in the usual order of axes."""
        return self.heads_split and self.batched and not self.swapped

    @property
    def heads(self) -> str:
        """How many query heads there are, as TL."""
        return "kv_heads * Group" if self.split else "heads"

    def scores(self) -> list[str]:
        """The tiles of scores, one for each stream."""
        return ["S"] if self.streams == 1 else ["S1", "S2"]

    def state(self, stream: int) -> tuple[str, str]:
        """The running maximum and the running sum of a stream."""
        tail = "" if self.streams == 1 else str(stream + 1)
        return f"Smax{tail}", f"Ssum{tail}"

    def sums(self, stream: int) -> list[str]:
        """The output tiles that a stream's weights are summed into."""
        if self.streams == 2:
            return [f"O{stream + 1}"]
        return ["O_register", "U_register"] if self.two_outputs else ["O_register"]


def choose_plan(draft: Draft, sizes: ProgramSizes) -> ProgramPlan:
    """Draw the features, limited to those that fit the registers."""
    c, plan = draft.c, ProgramPlan(sizes)
    eight = sizes.dtype == "e4m3"
    plan.softmax = c.weighted(
        [("statement", 55), ("hand", 12), ("hand exp2", 10), ("none", 18), ("hand late", 5)]
    )
    if plan.softmax == "none":
        plan.weights = c.pick(WEIGHTS)
    plan.streams = 2 if draft.chance(0.1, "two streams") else 1
    if plan.streams == 1:
        plan.parts = 2 if draft.chance(0.12, "two parts") else 1
        plan.two_outputs = draft.chance(0.12, "two outputs")
        plan.shared_kv = not plan.two_outputs and draft.chance(0.07, "V is K")
    if plan.shared_kv and sizes.shares > 1:
        sizes.head_dim = sizes.v_dim
    if plan.shared_kv:
        sizes.v_dim = sizes.head_dim
    _fit(plan)
    plan.scale = c.weighted(
        [
            *(("Multiply", 35), ("S * Scale", 15), ("Scale * S", 6), ("S / Root", 6), ("twice", 8)),
            *(("none", 10), ("after the mask", 8), ("half and half", 6), ("negative", 3)),
        ]
    )
    if not eight and draft.chance(0.16, "Q in registers"):
        plan.q_space = c.weighted([("register", 70), ("prescaled", 20), ("loaded", 10)])
        draft.tag(f"q:{plan.q_space}")
    plan.p = c.weighted(
        [
            ("in place", 60),
            ("and get P", 14),
            ("twice", 4),
            ("late", 6),
            ("read after", 6 if plan.streams == 1 else 0),
        ]
        + ([] if eight else [("shared", 7)])
    )
    if not eight:
        plan.move_v = not plan.shared_kv and draft.chance(0.06, "V moved")
        plan.move_k = draft.chance(0.05, "K moved")
        if (plan.move_v or plan.move_k) and c.chance(0.9):
            sizes.bn = sizes.rows  # a register tile has rows for every warp
            _fit(plan)
    _places(draft, plan)
    if not plan.paged and not plan.view:
        plan.transposed = "K" if draft.chance(0.04, "K turned") else ""
        if not plan.shared_kv:
            plan.transposed += "V" if draft.chance(0.05, "V turned") else ""
        plan.lengths = plan.batched and draft.chance(0.05, "lengths")
    plan.move_k = plan.move_k and "K" not in plan.transposed
    plan.move_v = plan.move_v and "V" not in plan.transposed
    if plan.transposed:
        plan.shared_kv = False
    plan.loop = c.weighted(
        [
            *(("plain", 38), ("let", 10), ("split", 9), ("prefetch", 8), ("prefetch where", 5)),
            *(("unrolled", 6), ("reversed", 5), ("peeled", 5), ("nested keys", 4), ("skipped", 5)),
            *(("nested queries", 4), ("sink", 3)),
        ]
    )
    if plan.paged and plan.loop in ("prefetch where", "sink"):
        plan.loop = "let"
    plan.lse = plan.softmax != "none" and draft.chance(0.25, "lse")
    if plan.loop == "nested queries" and plan.softmax != "none":
        plan.lse = True
    plan.through_shared = sizes.gpu == "h200" and draft.chance(0.05, "O through shared")
    kinds = ["fp32", "fp16" if eight else sizes.dtype]
    plan.out = c.weighted([(kinds[1], 55), (kinds[0], 45)])
    if plan.through_shared:
        plan.out = kinds[1]
    for name in ("alibi", "bias tile", "key vector", "row vector", "softcap", "gate", "sometimes"):
        if draft.chance(0.07, name):
            plan.extras.append(name)
    if plan.q_space == "shared" and not eight and not plan.split and draft.chance(0.05, "Q turned"):
        plan.transposed += "Q"
    plan.sink = plan.softmax != "none" and draft.chance(0.08, "a first weight")
    draft.tag(f"softmax:{plan.softmax}", f"scale:{plan.scale}", f"p:{plan.p}", f"loop:{plan.loop}")
    return plan


def _fit(plan: ProgramPlan) -> None:
    """Make the tiles smaller until they fit the registers of a thread."""
    sizes, outputs = plan.sizes, max(plan.streams, 2 if plan.two_outputs else 1)
    most = MOST_REGISTERS if sizes.warps < 12 else MOST_REGISTERS * 2 // 3
    if sizes.registers(plan.streams, outputs) > most:
        sizes.bm = sizes.rows
    if sizes.registers(plan.streams, outputs) > most:
        sizes.bn = min(sizes.bn, 32)
    if sizes.registers(plan.streams, outputs) > most:
        sizes.v_dim = 64 * sizes.shares
        if plan.shared_kv:
            sizes.head_dim = sizes.v_dim


def _places(draft: Draft, plan: ProgramPlan) -> None:
    """Draw the order of heads, batches and pages in memory."""
    c = draft.c
    plan.group = 2 if draft.chance(0.2, "gqa") else 1
    plan.heads_split = plan.group > 1 and draft.chance(0.3, "heads split")
    plan.paged = not plan.shared_kv and draft.chance(0.06, "paged")
    plan.swapped = not plan.paged and draft.chance(0.08, "heads first")
    plan.batched = plan.paged or not c.chance(0.08)
    if not plan.batched:
        draft.tag("no batch")
    plain = plan.group == 1 and not plan.paged and not plan.swapped and plan.batched
    plan.view = plain and draft.chance(0.04, "view")
