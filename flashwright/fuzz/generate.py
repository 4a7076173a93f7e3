"""From a seed to a program: an attention-like kernel with features drawn at random."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from flashwright.fuzz.body import LoopBody
from flashwright.fuzz.case import FuzzCase
from flashwright.fuzz.choices import Choices
from flashwright.fuzz.draft import Draft
from flashwright.fuzz.inputs import KINDS
from flashwright.fuzz.loops import write_loop
from flashwright.fuzz.masks import choose_masks
from flashwright.fuzz.plan import ProgramPlan, choose_plan
from flashwright.fuzz.sizes import GPUS, choose_gpu, choose_sizes, problems
from flashwright.fuzz.spoil import spoil
from flashwright.lang.diagnostic import Failed
from flashwright.lang.format import format_tree
from flashwright.lang.parse import parse
from flashwright.rewrite.packed import packed

ALIKE = 32  # programs of so many seeds in a row have one GPU and one set of tiles
SPOILT = 0.1  # share of programs that are edited to be slightly invalid
PACKED = 0.12  # of the others, the share that is rewritten for packed sequences
_OTHER = {"fp16": "bf16", "bf16": "fp16"}
_SWITCHES = ("Overlap", "PingPong", "SplitMasked", "Persistent")


def generate(
    seed: int, gpus: tuple[str, ...] = GPUS, choices: Sequence[int] | None = None
) -> FuzzCase:
    """The program of a seed, or of a recorded list of choices."""
    c = Choices(seed, choices)
    draft = Draft(c)
    # Kernels with the same tiles share the templates of the headers: most of what nvcc has to do.
    with c.stream(seed // ALIKE):
        gpu = choose_gpu(c, gpus)
        sizes = choose_sizes(draft, gpu)
    spoilt = c.chance(SPOILT)
    plan = choose_plan(draft, sizes)
    _ProgramWriter(draft, plan).write()
    given = problems(draft, sizes, plan.group, plan.paged)
    kind = c.weighted(list(zip(KINDS, (55, 15, 12, 8, 10), strict=True)))
    sparing = draft.chance(0.08, "sparing")
    draft.tag(f"gpu:{gpu}", f"inputs:{kind}")
    text = draft.text()
    if spoilt:
        text, how = spoil(c, text)
        draft.tag("spoilt", f"spoilt:{how}")
    elif c.chance(PACKED) and (packed_text := _packed(text)) is not None:
        text, given = packed_text, tuple(_packed_problem(c, dims) for dims in given)
        draft.tag("packed")
    return FuzzCase(
        gpu=gpu,
        text=text,
        problems=given,
        seed=seed,
        inputs=kind,
        spread=_spread(plan),
        tags=tuple(sorted(draft.tags)),
        choices=tuple(c.taken),
        spoilt=spoilt,
        sparing=sparing,
    )


def _packed(text: str) -> str | None:
    """The program for packed sequences; None if it cannot be packed, or is refused as it is."""
    try:
        return format_tree(packed(parse(text)))
    except Failed:
        return None


def _packed_problem(c: Choices, dims: Mapping[str, int]) -> dict[str, int]:
    """Another sequence, and fewer tokens than if all were as long as the longest."""
    found = {**dims, "batch": dims["batch"] + 1}
    for side in ("q", "kv"):
        longest = dims[f"{side}_len"]
        found[f"{side}_tokens"] = max(1, found["batch"] * longest - c.below(longest + 1))
    return found


def _spread(plan: ProgramPlan) -> float:
    """The standard deviation of Q with which scores spread by about 1.5."""
    scaled = plan.scale != "none" or plan.q_space == "prescaled"
    both = 2 if plan.scale != "none" and plan.q_space == "prescaled" else 1
    depth = math.sqrt(plan.sizes.head_dim)
    return 1.5 * (depth if both == 2 else 1.0) if scaled else 1.5 / depth


class _ProgramWriter:
    """Writes a program: everything around the loop; LoopBody writes the loop's body."""

    def __init__(self, draft: Draft, plan: ProgramPlan) -> None:
        self.draft, self.plan, self.c = draft, plan, draft.c

    def write(self) -> None:
        draft, plan = self.draft, self.plan
        self._params()
        self._grid()
        masks = choose_masks(draft, plan)
        self._tensors()
        self._tiles()
        body = LoopBody(draft, plan, masks, self._place)
        if plan.loop == "nested queries":
            with draft.block("for t = 0:min(2, ceil(q_len / BM) - 2 * pair_idx)"):
                draft.line("let block_idx = 2 * pair_idx + t")
                self._around(body)
        else:
            self._around(body)
        self._stages()

    def _around(self, body: LoopBody) -> None:
        if self.plan.lengths:
            self.draft.line("let Length = Lengths[batch_idx]")
        self._prologue()
        write_loop(self.draft, self.plan, body)
        self._epilogue()

    def _params(self) -> None:
        draft, sizes = self.draft, self.plan.sizes
        draft.params |= {"HeadDim": str(sizes.head_dim), "VDim": str(sizes.v_dim)}
        draft.params |= {"BM": str(sizes.bm), "BN": str(sizes.bn), "Warps": str(sizes.warps)}
        draft.params["Scale"] = self.c.weighted(
            [("1 / sqrt(HeadDim)", 75), ("0.125", 15), ("0.0883883", 10)]
        )
        draft.params |= {"Root": "sqrt(HeadDim)", "Log2E": "1.4426950408889634"}
        draft.params |= {
            "Part": "64" if sizes.head_dim == 32 else "32",
            "Group": str(self.plan.group),
        }
        if sizes.gpu == "h200":
            for name in _SWITCHES:
                if draft.chance(0.12, f"{name}=0"):
                    draft.params[name] = "0"

    # --- the grid and the tensors ---------------------------------------------------------

    def _grid(self) -> None:
        draft, plan, c = self.draft, self.plan, self.c
        blocks = ("block_idx", "q_len / BM")
        if plan.loop == "nested queries":
            blocks = ("pair_idx", "q_len / (2 * BM)")
        heads, batch = ("head_idx", plan.heads), ("batch_idx", "batch")
        axes = [blocks, heads] + ([batch] if plan.batched else [])
        form = c.weighted([("usual", 60), ("order", 20), ("together", 10), ("backwards", 10)])
        draft.tag(f"grid:{form}")
        draft.grid = c.shuffled(axes) if form == "order" else axes
        if form == "together" and plan.batched:
            draft.grid = [blocks, ("pair", f"{plan.heads} * batch")]
            draft.lets.append(f"let head_idx = pair % ({plan.heads})")
            draft.lets.append(f"let batch_idx = floor(pair / ({plan.heads}))")
        elif form == "backwards" and plan.loop != "nested queries":
            draft.grid[0] = ("turned", "q_len / BM")
            draft.lets.append("let block_idx = ceil(q_len / BM) - 1 - turned")
        if plan.group > 1:
            spelt = ["floor(head_idx * kv_heads / heads)", "floor(head_idx / Group)"]
            draft.lets.append(f"let kv_head = {spelt[1] if plan.split else c.pick(spelt)}")

    def _shape(self, length: str, width: str, heads: str = "") -> str:
        plan = self.plan
        heads = heads or plan.heads
        if not plan.batched:
            return f"(H: {heads}, L: {length}, D: {width})"
        if plan.swapped:
            return f"(H: {heads}, B: batch, L: {length}, D: {width})"
        return f"(batch, {heads}, {length}, {width})"

    def _transposed_shape(self, width: str, heads: str, length: str = "kv_len") -> str:
        """A shape with positions as the last axis; the letter E means the same order in memory."""
        letter = self.c.pick(["E", "D"])
        if not self.plan.batched:
            return f"(H: {heads}, {letter}: {width}, L: {length})"
        return f"(B: batch, H: {heads}, {letter}: {width}, L: {length})"

    def _queries(self, length: str, width: str) -> str:
        if self.plan.split:
            return f"(B: batch, H: kv_heads, G: Group, L: {length}, D: {width})"
        return self._shape(length, width)

    def _tensors(self) -> None:
        draft, plan = self.draft, self.plan
        kind, kv = plan.sizes.dtype, "kv_heads" if plan.group > 1 else "heads"
        second = "HeadDim" if plan.streams == 2 else "Part"
        tensors = draft.tensors
        for name, width in (("Q", "HeadDim"), ("Q2", second)):
            tensors[name] = f"{self._queries('q_len', width)} as {kind}"
        if "Q" in plan.transposed:
            tensors["Q"] = f"{self._transposed_shape('HeadDim', plan.heads, 'q_len')} as {kind}"
        for name, width in (("K", "HeadDim"), ("K2", second), ("V", "VDim"), ("W", "VDim")):
            shape = self._shape("kv_len", width, kv)
            if name in plan.transposed:
                shape = self._transposed_shape(width, kv)
            if plan.paged:
                shape = f"(P: pages, H: {kv}, L: BN, D: {width})"
            tensors[name] = f"{shape} as {kind}"
        if kind in _OTHER and draft.chance(0.025, "type changed"):
            name = self.c.pick(["Q", "K", "V"])
            tensors[name] = tensors[name].replace(f"as {kind}", f"as {_OTHER[kind]}")
            rows, width = ("BM" if name == "Q" else "BN"), ("VDim" if name == "V" else "HeadDim")
            if name not in plan.transposed:
                draft.shared[name] = f"({rows}, {width}) as {kind}"
        if plan.view:
            sizes = ["kv_len * HeadDim", "(kv_len + 8) * HeadDim", "(kv_len * HeadDim + 3)"]
            size = self.c.weighted(list(zip(sizes, (60, 25, 15), strict=True)))
            offset = f"(batch_idx * heads + head_idx) * {size}"
            tensors["K"] = f"(kv_len, HeadDim) as {kind} with offset {offset}"
        if plan.paged:
            draft.dims = ["pages", "n_blocks"]
            tensors["Table"] = "(B: batch, T: n_blocks) as int32"
        batch = "B: batch, " if plan.batched else ""
        tensors |= {
            "Lengths": "(B: batch) as int32",
            "Slopes": f"(H: {plan.heads}) as fp32",
            "Bias": f"(H: {plan.heads}, L: q_len, M: kv_len) as {self.c.pick(['fp32', 'fp16'])}",
            "KeyBias": f"({batch}L: kv_len) as fp32",
            "RowGain": f"({batch}L: q_len) as fp32",
            "DocQ": f"({batch}L: q_len) as int32",
            "DocK": f"({batch}L: kv_len) as int32",
            "Gate": f"{self._shape('q_len', 'VDim')} as fp16",
            "O": f"{self._queries('q_len', 'VDim')} as {plan.out}",
            "U": f"{self._queries('q_len', 'VDim')} as {plan.out}",
            "LSE": f"({batch}H: {plan.heads}, L: q_len) as fp32",
        }

    def _tiles(self) -> None:
        draft, plan = self.draft, self.plan
        tiles = draft.registers
        for name in (*plan.scores(), "Bias"):
            tiles[name] = "(BM, BN) as fp32"
        for name in ("O", "U", "O1", "O2", "Gate"):
            tiles[name] = "(BM, VDim) as fp32"
        for name in ("LSE", "Extra", "Junk", "RowGain", "DocQ"):
            tiles[name] = "(BM) as fp32"
        for stream in range(plan.streams):
            for name in plan.state(stream):
                tiles[name] = "(BM) as fp32"
        tiles |= {"KeyBias": "(BN) as fp32", "DocK": "(BN) as fp32"}
        tiles |= {"DocQ": "(BM) as int32", "DocK": "(BN) as int32"}
        if draft.chance(0.04, "narrow tile"):
            # bf16 has room for -1e30, where a maximum begins.
            name = self.c.pick([*plan.state(0), *plan.scores(), "O", "LSE", "RowGain", "Bias"])
            tiles[name] = tiles[name].replace("fp32", "bf16")
        if plan.q_space != "shared":
            tiles["Q"] = f"(BM, HeadDim) as {plan.sizes.dtype}"

    def _stages(self) -> None:
        """Stages of the shared tiles, drawn for each tile."""
        draft, plan = self.draft, self.plan
        widths = {"Q": "(BM, HeadDim)", "K": "(BN, HeadDim)", "V": "(BN, VDim)", "W": "(BN, VDim)"}
        if "Q" in plan.transposed:
            widths["Q"] = "(HeadDim, BM)"
        if "V" in plan.transposed:
            widths["V"] = "(VDim, BN)"
        if "K" in plan.transposed:
            widths["K"] = "(HeadDim, BN)"
        for name, shape in widths.items():
            stages = self.c.weighted([(1, 66), (2, 24), (3, 10)])
            if stages > 1 and name not in draft.shared:
                draft.tag(f"stages:{name}:{stages}")
                draft.shared[name] = f"{shape} as {plan.sizes.dtype} with stages {stages}"

    # --- coordinates ----------------------------------------------------------------------

    def _place(self, name: str, block: str) -> str:
        """The coordinates of a tile of keys."""
        plan = self.plan
        head = "kv_head" if plan.group > 1 else "head_idx"
        if plan.paged:
            return f"P = Table[batch_idx, {block}], H = {head}"
        if plan.view and name == "K":
            return f"L = {block}"
        batch = "B = batch_idx, " if plan.batched else ""
        return f"{batch}H = {head}, L = {block}"

    def _rows(self, split: bool = True) -> str:
        plan = self.plan
        batch = "B = batch_idx, " if plan.batched else ""
        if split and plan.split:
            return f"{batch}H = floor(head_idx / Group), G = head_idx % Group, L = block_idx"
        return f"{batch}H = head_idx, L = block_idx"

    # --- before and behind the loop -------------------------------------------------------

    def _prologue(self) -> None:
        draft, plan, c = self.draft, self.plan, self.c
        batch = "B = batch_idx, " if plan.batched else ""
        place = self._rows()
        lines: list[list[str]] = []
        if plan.q_space == "loaded":
            lines.append([f"Copy Q (BM, HeadDim) in coordinate [{place}] from global to register"])
        else:
            tile = "(HeadDim, BM)" if "Q" in plan.transposed else "(BM, HeadDim)"
            copy = f"Copy Q {tile} in coordinate [{place}] from global to shared"
            lines.append(
                [f"if {self.c.pick(['block_idx >= 0', 'q_len > 0'])}", f"  {copy}", "end"]
                if draft.chance(0.03, "Q under if")
                else [copy]
            )
            if plan.q_space != "shared":
                lines[-1].append("Copy Q from shared to register")
            if plan.q_space == "prescaled":
                lines[-1].append("Compute Q_register * Scale and get new Q_register")
        if plan.streams == 2 or plan.parts == 2:
            width = "HeadDim" if plan.streams == 2 else "Part"
            lines.append([f"Copy Q2 (BM, {width}) in coordinate [{place}] from global to shared"])
        vector = f"(BM) in coordinate [{batch}L = block_idx] from global to register"
        if "row vector" in plan.extras:
            lines.append([f"Copy RowGain {vector}"])
        if "documents" in plan.extras:
            lines.append([f"Copy DocQ {vector}"])
        for stream in range(plan.streams):
            if plan.softmax != "none":
                top, total = plan.state(stream)
                least, first = ("0", "1") if plan.sink else ("-1e30", "0")
                lines += [[f"Compute {least} and get {top}"], [f"Compute {first} and get {total}"]]
            lines += [[f"Compute 0 and get {out}"] for out in plan.sums(stream)]
        if plan.p == "read after":
            lines.append(["Compute 0 and get Extra"])
        if plan.p == "late":
            lines.append(["Compute 0 and get Junk"])
        if draft.chance(0.3, "prologue shuffled"):
            lines = c.shuffled(lines)
        for group in lines:
            for text in group:
                draft.line(text)

    def _epilogue(self) -> None:
        draft, plan, c = self.draft, self.plan, self.c
        place = self._rows()
        if plan.softmax != "none":
            form = c.weighted([("where", 60), ("Divide", 20), ("reciprocal", 20)])
            for stream in range(plan.streams):
                total = plan.state(stream)[1]
                for out in plan.sums(stream):
                    draft.line(_divided(form, out, total))
        if plan.streams == 2:
            draft.line("Compute O1 - 0.4 * O2 and get O_register")
        if plan.p == "read after":
            draft.line("Compute O_register + 0.01 * Extra and get new O_register")
        if plan.p == "late":
            draft.line("Compute O_register + 0.125 * Junk and get new O_register")
        if "gate" in plan.extras:
            where = self._rows(split=False)
            draft.line(f"Copy Gate (BM, VDim) in coordinate [{where}] from global to register")
            draft.line("Compute O_register * Gate and get new O_register")
        source = "register"
        if plan.through_shared:
            source = "shared"
            draft.shared["O"] = f"(BM, VDim) as {plan.out}"
            draft.line("Copy O from register to shared")
        draft.line(f"Copy O (BM, VDim) in coordinate [{place}] from {source} to global")
        if plan.two_outputs:
            draft.line(f"Copy U (BM, VDim) in coordinate [{place}] from register to global")
        if plan.lse:
            top, total = plan.state(0)
            where = self._rows(split=False)
            draft.line(f"Compute {top} + log({total}) and get LSE_register")
            draft.line(f"Copy LSE (BM) in coordinate [{where}] from register to global")


def _divided(form: str, out: str, total: str) -> str:
    if form == "Divide":
        return f"Compute Divide {out}, {total} and get new {out}"
    if form == "reciprocal":
        return f"Compute {out} * (1 / {total}) and get new {out}"
    return f"Compute where({total} > 0, {out} / {total}, 0) and get new {out}"
