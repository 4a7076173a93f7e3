"""The body of a loop over keys: copies, scores, masks, weights, and the second product."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from flashwright.fuzz.draft import Draft
from flashwright.fuzz.masks import MaskConditions, write_masks
from flashwright.fuzz.plan import ProgramPlan

RESHAPE_LONG = "(MMA_C, MMA_M, MMA_N) to (MMA_A, MMA_M, MMA_N_new)"


@dataclass
class LoopBody:
    """Writes one iteration; `place` gives the coordinates of a tile of keys."""

    draft: Draft
    plan: ProgramPlan
    masks: MaskConditions
    place: Callable[[str, str], str]
    """Gives the coordinates of a tile, without brackets, for a tensor and the name of a block."""
    ahead: tuple[str, ...] = ()
    """Tensors whose tiles a prefetch copies."""
    tail: str = ""
    """A suffix for the names of shared tiles, for a second loop with its own tiles."""
    order: list[str] = field(default_factory=list)

    # --- copies ---------------------------------------------------------------------------

    def loads(self) -> list[str]:
        """The tensors whose tiles an iteration needs, in the order of their copies."""
        plan = self.plan
        if not self.order:
            names = ["K"]
            names += ["K2"] if plan.streams == 2 or plan.parts == 2 else []
            names += [] if plan.shared_kv else ["V"]
            names += ["W"] if plan.two_outputs else []
            if self.draft.chance(0.2, "copies reordered"):
                names = self.draft.c.shuffled(names[::-1])
            self.order = names
        return self.order

    def copy(self, name: str, block: str) -> str:
        """One Copy from global to shared memory."""
        width = {"K": "HeadDim", "K2": self.second, "V": "VDim", "W": "VDim"}[name]
        tile = f"({width}, BN)" if name in self.plan.transposed else f"(BN, {width})"
        got = f" and get {name}{self.tail}" if self.tail else ""
        place = self.place(name, block)
        return f"Copy {name} {tile} in coordinate [{place}] from global to shared{got}"

    @property
    def second(self) -> str:
        """The depth of the second pair of Q and K."""
        return "HeadDim" if self.plan.streams == 2 else "Part"

    def tile(self, name: str) -> str:
        """The shared tile of a tensor."""
        return f"{name}{self.tail}_shared"

    def copies(self, block: str) -> None:
        """All copies of an iteration, sometimes in both arms of an `if`."""
        draft, c = self.draft, self.draft.c
        names = [n for n in self.loads() if n not in self.ahead]
        if names and draft.chance(0.05, "copies in both arms"):
            with draft.block(f"if {block} % 2 == 0"):
                for name in names:
                    draft.line(self.copy(name, block))
                draft.else_arm()
                for name in names:
                    draft.line(self.copy(name, block))
        else:
            late = len(names) > 1 and names[-1] in "VW" and draft.chance(0.12, "V late")
            for name in names[:-1] if late else names:
                if c.chance(0.02):
                    draft.tag("copy under if")
                    with draft.block("if kv_len > 0"):
                        draft.line(self.copy(name, block))
                else:
                    draft.line(self.copy(name, block))
            self._late = names[-1:] if late else []
            self._vectors(block)
            return
        self._late = []
        self._vectors(block)

    def _vectors(self, block: str) -> None:
        plan, draft = self.plan, self.draft
        batch = "B = batch_idx, " if plan.batched else ""
        if "key vector" in plan.extras and not plan.paged:
            draft.line(
                f"Copy KeyBias (BN) in coordinate [{batch}L = {block}] from global to register"
            )
        if "documents" in plan.extras:
            draft.line(f"Copy DocK (BN) in coordinate [{batch}L = {block}] from global to register")
        if "bias tile" in plan.extras and not plan.paged:
            place = f"H = head_idx, L = {self.rows}, M = {block}"
            draft.line(f"Copy Bias (BM, BN) in coordinate [{place}] from global to register")

    rows = "block_idx"

    # --- scores ---------------------------------------------------------------------------

    def write(self, block: str) -> None:
        """A whole iteration for one block of keys."""
        self.copies(block)
        self.compute(block)

    def compute(self, block: str, between: Callable[[], None] | None = None) -> None:
        """An iteration without its copies; `between` writes a prefetch after the scores."""
        plan, draft = self.plan, self.draft
        self._moves()
        for stream, tile in enumerate(plan.scores()):
            self._gemm(stream, tile)
        for name in self._late:
            draft.line(self.copy(name, block))
        if between is not None:
            between()
        for tile in plan.scores():
            self._scaled(tile, block)
        for stream, tile in enumerate(plan.scores()):
            self._weights(stream, tile)
        for stream, tile in enumerate(plan.scores()):
            self._second(stream, tile)

    def _moves(self) -> None:
        draft, plan = self.draft, self.plan
        for name, wanted in (("K", plan.move_k), ("V", plan.move_v)):
            if wanted and name not in self.ahead:
                width = "HeadDim" if name == "K" else "VDim"
                draft.registers[name] = f"(BN, {width}) as {plan.sizes.dtype}"
                draft.shared[f"{name}x"] = f"(BN, {width}) as {plan.sizes.dtype}"
                source = f"{name}{self.tail}"
                got = f" and get {name}" if self.tail else ""
                draft.line(f"Copy {source} from shared to register{got}")
                draft.line(f"Compute {name}_register * 0.5 and get new {name}_register")
                draft.line(f"Copy {name} from register to shared and get {name}x")

    def _k(self) -> str:
        moved = self.plan.move_k and "K" not in self.ahead
        return "Kx_shared" if moved else self.tile("K")

    def _v(self) -> str:
        plan = self.plan
        if plan.shared_kv:
            return self._k()
        tile = "Vx_shared" if plan.move_v and "V" not in self.ahead else self.tile("V")
        return f"{tile}.T" if "V" in plan.transposed else tile

    def _gemm(self, stream: int, tile: str) -> None:
        plan, draft = self.plan, self.draft
        q = "Q_shared" if plan.q_space == "shared" else "Q_register"
        q += ".T" if "Q" in plan.transposed else ""
        if stream == 1:
            draft.line(f"Compute GEMM Q2_shared, {self.tile('K2')}.T and get {tile}")
            return
        turn = "" if "K" in plan.transposed else ".T"
        draft.line(f"Compute GEMM {q}, {self._k()}{turn} and get {tile}")
        if plan.parts == 2:
            draft.line(f"Compute GEMM Q2_shared, {self.tile('K2')}.T and accumulate {tile}")

    def _scaled(self, tile: str, block: str) -> None:
        plan, draft = self.plan, self.draft
        lines = {
            "Multiply": [f"Multiply {tile}, Scale"],
            "S * Scale": [f"{tile} * Scale"],
            "Scale * S": [f"Scale * {tile}"],
            "S / Root": [f"{tile} / Root"],
            "twice": [f"{tile} * 2", f"{tile} * (Scale / 2)"],
            "half and half": [f"{tile} * Scale * 0.5 + 0.5 * Scale * {tile}"],
            "negative": [f"{tile} * (-Scale)", f"-{tile}"],
        }.get(plan.scale, [])
        for text in lines:
            draft.line(f"Compute {text} and get new {tile}")
        self._extras(tile, block)
        write_masks(draft, plan, self.masks, tile, block)
        if plan.scale == "after the mask":
            draft.line(f"Compute {tile} * Scale and get new {tile}")

    def _extras(self, tile: str, block: str) -> None:
        plan, draft = self.plan, self.draft
        key = f"(kv_idx + {block} * BN)" if plan.paged else "kv_idx"
        if "softcap" in plan.extras:
            draft.line(f"Compute 3 * tanh({tile} / 3) and get new {tile}")
        if "alibi" in plan.extras:
            slope = draft.c.pick(["Slopes[head_idx]", "0.02", "Slopes[head_idx] * 0.5"])
            draft.line(f"Compute {tile} + {slope} * 0.05 * ({key} - q_idx) and get new {tile}")
        if "bias tile" in plan.extras and not plan.paged:
            draft.line(f"Compute {tile} + Bias and get new {tile}")
        if "key vector" in plan.extras and not plan.paged:
            draft.line(f"Compute {tile} + KeyBias and get new {tile}")
        if "row vector" in plan.extras:
            draft.line(f"Compute {tile} * RowGain and get new {tile}")
        if "sometimes" in plan.extras:
            test = draft.c.pick([f"{block} % 2 == 0", f"{block} > 0", f"{block} * 2 >= 3"])
            with draft.block(f"if {test}"):
                draft.line(f"Compute {tile} * 0.75 and get new {tile}")
                if draft.chance(0.4, "else arm"):
                    draft.else_arm()
                    draft.line(f"Compute {tile} + 0.25 and get new {tile}")

    # --- weights --------------------------------------------------------------------------

    def _weights(self, stream: int, tile: str) -> None:
        plan, draft = self.plan, self.draft
        top, total = plan.state(stream)
        sums = plan.sums(stream)
        if plan.softmax == "none":
            text = plan.weights.replace("S", tile)
            draft.line(f"Compute {text} and get new {tile}")
        elif plan.softmax == "statement":
            held = ", ".join(sums + (["Extra"] if plan.p == "read after" and stream == 0 else []))
            draft.line(f"Compute Softmax {tile} with {top} and {total} and rescale {held}")
        else:
            self._by_hand(tile, top, total, sums, stream)

    def _by_hand(self, tile: str, top: str, total: str, sums: list[str], stream: int) -> None:
        draft, plan = self.draft, self.plan
        exp, factor = "exp", ""
        if plan.softmax == "hand exp2":
            exp, factor = "exp2", " * Log2E"
        tail = "" if plan.streams == 1 else str(stream + 1)
        new, drop = f"Snew{tail}", f"Drop{tail}"
        draft.registers |= {new: "(BM) as fp32", drop: "(BM) as fp32"}
        draft.line(f"Compute max({top}, rowmax({tile})) and get {new}")
        draft.line(f"Compute {exp}(({top} - {new}){factor}) and get {drop}")
        inner = f"{tile}{factor} - {new}{factor}" if factor else f"{tile} - {new}"
        weigh = f"Compute {exp}({inner}) and get new {tile}"
        scale = [f"Compute {o} * {drop} and get new {o}" for o in sums]
        if plan.p == "read after" and stream == 0:
            scale.append(f"Compute Extra * {drop} and get new Extra")
        if plan.softmax == "hand late":
            draft.line(f"Compute {total} * {drop} and get new {total}")
            for text in scale:
                draft.line(text)
            draft.line(weigh)
            draft.line(f"Compute rowsum({tile}) and accumulate {total}")
        else:
            draft.line(weigh)
            draft.line(f"Compute {total} * {drop} + rowsum({tile}) and get new {total}")
            for text in scale:
                draft.line(text)
        draft.line(f"Compute {new} and get new {top}")

    # --- the second product ---------------------------------------------------------------

    def _second(self, stream: int, tile: str) -> None:
        plan, draft = self.plan, self.draft
        sums, operand = plan.sums(stream), tile
        values = [self._v(), self.tile("W")] if plan.two_outputs else [self._v()]
        short = draft.c.pick([RESHAPE_LONG, "mma_C to mma_A"])
        shape = f"(BM, BN) as {plan.sizes.dtype}"
        if plan.p == "shared" and stream == 0:
            draft.shared[tile] = shape
            draft.line(f"Copy {tile} from register to shared")
            operand = f"{tile}_shared"
        elif plan.p == "in place" or stream == 1:
            draft.line(f"Reshape {tile} from {short}")
        else:
            operand = "P"
            draft.registers["P"] = shape
            draft.line(f"Reshape {tile} from {short} and get P")
        if plan.p == "late":
            draft.registers["Junk"] = "(BM) as fp32"
            draft.line("Compute Junk + 1 and get new Junk")
        if plan.p == "read after" and stream == 0:
            draft.line(f"Compute {tile} * {tile} and get new {tile}")
            draft.line(f"Compute rowsum({tile}) and accumulate Extra")
        if plan.p == "twice" and len(sums) == 2:
            draft.registers["P2"] = shape
            draft.line(f"Reshape {tile} from {short} and get P2")
            draft.line(f"Compute GEMM P, {values[0]} and accumulate {sums[0]}")
            draft.line(f"Compute GEMM P2, {values[1]} and accumulate {sums[1]}")
            return
        for out, value in zip(sums, values, strict=True):
            draft.line(f"Compute GEMM {operand}, {value} and accumulate {out}")
