"""The tile IR: what the kernel does, statement by statement, with the TL lines each came from.

Everything that a schedule decides is a node of its own here (commit, wait, barrier, put), so that
passes can move it and the printer only has to say it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from flashwright.lang import nodes as tl
from flashwright.lang.format import format_stmt
from flashwright.lower.element import ROW, Element, Leaf, leaves, with_leaves
from flashwright.lower.names import page_name
from flashwright.lower.term import ONE, Axes, Term, Var, binary, call, integer, plus
from flashwright.program.program import Buffer, Key, Tensor
from flashwright.program.vocabulary import DTYPES, PAGE

Lines = tuple[int, int]


RANGE_END = Var("fw::range_end")
"""Where ranges of rows end in their tensor map (launch_plan.RANGE)."""


@dataclass(frozen=True)
class Origin:
    """The lines of TL that a node comes from; `title` is the statement, where one starts here."""

    lines: Lines | None = None
    title: str = ""

    @property
    def untitled(self) -> Origin:
        """The same lines, for a further node of the statement."""
        return Origin(self.lines)


def origin(stmt: tl.Statement) -> Origin:
    """Where the first node of a statement comes from."""
    return Origin((stmt.span.line, stmt.span.end_line), format_stmt(stmt).splitlines()[0])


@dataclass(frozen=True)
class Node:
    """A statement of the IR; one that a pass has put in has no origin."""

    origin: Origin = field(default=Origin(), kw_only=True)


@dataclass(frozen=True)
class Define(Node):
    """A scalar gets its name."""

    name: str
    value: Term
    note: str = ""  # `{}` stands for the denominator
    below: Term = ONE
    varies: bool = False  # loops that follow go on with it
    again: bool = False  # it is there already, and gets a new value


PAGE_IDX = Var(PAGE)
"""In the coordinates of a window with pages: the page of a row."""


@dataclass(frozen=True)
class Pages:
    """Where the rows of a tile lie if a page is no whole number of tiles: position `first` of the
    sequence and those that follow, so many in each page."""

    first: Term
    size: int
    named: bool = True  # by a table; else they follow each other along an axis


def rows_of_a_page(tensor: Tensor) -> Var:
    """How many rows lie from one page of a tensor to the next: a name that the kernel declares."""
    return Var(page_name(tensor.name))


@dataclass(frozen=True)
class Window:
    """A tile of a tensor in global memory: where it begins on every axis, and how many of its rows
    and columns lie inside (None: all of them, whatever the problem).

    Where it may begin before the start of the tensor, the rows and columns before `first_row` and
    `first_col` are outside too.
    """

    tensor: Tensor
    start: tuple[Term, ...]
    rows: Term | None
    cols: Term | None
    offset: Term | None = None  # in elements, of a view into memory
    first_row: Term | None = None
    first_col: Term | None = None
    width: int | None = None  # of the tensor's last axis, where it is a number
    view: Term | None = None  # which of the views that lie back to back in memory, where they do
    aligned: bool = True  # whether rows begin at multiples of 16 bytes, if all strides are such
    line: bool = False  # a vector
    last: Term | None = None  # the end of the range whose rows are inside, where there is one
    converts: bool = False  # to another element type, on the way to shared memory
    pages: Pages | None = None  # where rows lie in several ones: `start` is that of each page
    page_rows: int | None = None  # the most at once that lie in one page, wherever its tile begins

    @property
    def chunked(self) -> bool:
        """Whether what lies inside of each row is whole chunks of 16 bytes, so that a tile wider
        than its tensor needs no copy element by element. (A tile is a multiple of 16 bytes wide,
        so it begins at one where it is counted in tiles.)"""
        size = DTYPES[self.tensor.dtype]
        whole = self.width is not None and self.width * size % 16 == 0
        plain = not self.line and not self.converts
        return plain and self.aligned and (self.cols is None or whole)

    @property
    def coordinates(self) -> tuple[Term, ...]:
        """Where it begins on every axis of a tensor map. That of a range ends where its rows do
        (launch_plan.RANGE), and so does that of pages, whose first rows are counted in the whole
        tensor: what is left of the rows says how far from there the tile begins. If rows lie in
        several pages, it is where one's begin."""
        if self.page_rows is not None:
            return self._in_page(self.page_rows)
        if self.last is None or self.line or self.pages is not None:
            return self.start if self.view is None else (self.view, *self.start)
        *outer, row, col = self.start
        left = binary("-", RANGE_END, binary("-", self.last, row))
        return RANGE_END, self.last, *outer, left, col

    def _in_page(self, size: int) -> tuple[Term, ...]:
        """The coordinates of a box of so many rows, which lie in one page."""
        assert self.rows is not None  # they have a range
        page, *outer, row, col = self.start
        left = call("min", self.rows, integer(size), type="int")
        first = binary("*", page, rows_of_a_page(self.tensor))
        return RANGE_END, plus(plus(first, row), left), *outer, binary("-", RANGE_END, left), col

    @property
    def terms(self) -> tuple[Term, ...]:
        """All that a place and the bounds are made of."""
        first = None if self.pages is None else self.pages.first
        lows = (self.first_row, self.first_col, first)
        bounds = (self.rows, self.cols, self.offset, *lows, self.last)
        return (*self.coordinates, *(t for t in bounds if t is not None))

    def changed(self, change: Callable[[Term], Term]) -> Window:
        """The same tile with other terms."""

        def other(x: Term | None) -> Term | None:
            return None if x is None else change(x)

        return replace(
            self,
            start=tuple(map(change, self.start)),
            rows=other(self.rows),
            cols=other(self.cols),
            offset=other(self.offset),
            first_row=other(self.first_row),
            first_col=other(self.first_col),
            view=other(self.view),
            last=other(self.last),
            pages=self.pages and replace(self.pages, first=change(self.pages.first)),
        )


@dataclass(frozen=True)
class Piece:
    """Some columns of a shared tile, and the tile of a tensor that they are filled from."""

    column: int
    width: int
    window: Window


@dataclass(frozen=True)
class Load(Node):
    """A tile starts on its way from global to shared memory: from one window, or in pieces that lie
    side by side."""

    dest: Key
    window: Window  # of the first piece
    stage: Term | None = None
    pieces: tuple[Piece, ...] = ()
    helped: bool = False  # by helper warps, where TMA cannot
    tma_optional: bool = False  # by TMA or by helper warps: whether TMA can, only the call shows

    @property
    def windows(self) -> tuple[Window, ...]:
        """All that is loaded."""
        return tuple(p.window for p in self.pieces) or (self.window,)

    def filled(self, width: int) -> tuple[Piece, ...]:
        """What fills a tile of so many columns: several pieces, or one."""
        return self.pieces or (Piece(0, width, self.window),)

    def moved(self, change: Callable[[Term], Term]) -> Load:
        """The same copy with other terms."""
        pieces = tuple(replace(p, window=p.window.changed(change)) for p in self.pieces)
        return replace(self, window=self.window.changed(change), pieces=pieces)


@dataclass(frozen=True)
class Put(Node):
    """A tile that waits in registers goes into shared memory (where there is no cp.async)."""

    dest: Key
    stage: Term | None = None


@dataclass(frozen=True)
class Commit(Node):
    """The loads since the last commit are one group."""


@dataclass(frozen=True)
class Wait(Node):
    """Until at most `left` groups are on their way."""

    left: int


@dataclass(frozen=True)
class Barrier(Node):
    """All threads of the block meet."""


@dataclass(frozen=True)
class Fill(Node):
    """Registers from global memory, each thread its own elements."""

    dest: Key
    window: Window
    helped: bool = False  # by helper warps: an element at a time, where it is used


@dataclass(frozen=True)
class Store(Node):
    """Registers or a shared tile to global memory."""

    source: Key
    window: Window
    optional: bool
    adds: bool = False  # to what is there, in fp32; other thread blocks may add to it as well


@dataclass(frozen=True)
class Scatter(Node):
    """Each element of a tile or vector in registers is added to the element of a tensor that its
    index names, in fp32; zeros are not. `held` is its element, `place` the tensor's. `rows` and
    `cols` are where the tile begins, for an index that speaks of positions."""

    source: Key
    held: Leaf
    place: Element
    tensor: Tensor
    shape: tuple[int, ...]
    rows: Term | None
    cols: Term | None
    optional: bool

    def begin(self, axes: Axes) -> Term | None:
        """Where the positions along its rows or its columns begin."""
        return _begin(self, axes)


@dataclass(frozen=True)
class TakeTurn(Node):
    """Each warp waits until so many others have added their part to the same tile of a tensor.
    `counters` is the place of those of the tile."""

    counters: Window
    turn: Term


@dataclass(frozen=True)
class PassTurn(Node):
    """Each warp tells that its part is added, if it has taken a turn and not told so yet."""

    counters: Tensor


@dataclass(frozen=True)
class Move(Node):
    """Between shared memory and registers."""

    source: Key
    dest: Key
    stage: Term | None = None
    operand: bool = False  # it is loaded as the left operand of a GEMM, and nothing else
    in_place: bool = False  # a vector that is read where it lies, in shared memory


@dataclass(frozen=True)
class Restage(Node):
    """Elementwise work from one shared tile to another; `held` stands for the element."""

    source: Key
    dest: Key
    buffer: Buffer
    held: Leaf
    value: Element
    stage: Term | None = None
    helped: bool = False  # by helper warps, into a ring

    @property
    def converts(self) -> bool:
        """Whether the tile gets another element type and nothing else is done."""
        return self.value == self.held


@dataclass(frozen=True)
class Gemm(Node):
    """An accumulator gets the product of two tiles, or has it added."""

    target: Key
    left: Key
    right: Key
    transposed: bool  # the right tile lies as N rows of k columns
    fresh: bool
    left_transposed: bool = False  # the left tile, a shared one, lies as k rows of M columns
    left_stage: Term | None = None
    right_stage: Term | None = None
    sparing: bool = False  # slower, but fewer operands are in flight
    depth: int | None = None  # columns of both operands that count: zeros follow
    ahead: bool = False  # the right tile is the younger one of two values that are held


@dataclass(frozen=True)
class Operand(Node):
    """An accumulator, rounded, becomes the left operand of a GEMM."""

    target: Key
    source: Key
    dtype: str


@dataclass(frozen=True)
class Open(Node):
    """Products into these accumulators may be started."""

    targets: tuple[Key, ...]


@dataclass(frozen=True)
class Start(Node):
    """A product begins, as a group of its own."""

    gemm: Gemm


@dataclass(frozen=True)
class Finish(Node):
    """Until at most `left` groups of products are under way; these accumulators can be used."""

    left: int
    targets: tuple[Key, ...]


@dataclass(frozen=True)
class PingPong(Node):
    """A consumer warpgroup waits until it may start its products, or signals the next one."""

    step: Literal["wait", "signal"]


@dataclass(frozen=True)
class Assign:
    """One tile, vector or name local to the row gets the value of an expression."""

    target: Leaf
    value: Element
    buffer: Buffer | None = None  # None: a name local to the row
    partial: bool = False  # sums stay split over the four threads of a row
    kept: bool = False  # a name local to the row that lasts: a vector


@dataclass(frozen=True)
class Compute(Node):
    """Elementwise work. `unless` is a condition on the whole block under which it changes nothing,
    `clear` one on a row.

    `rows` and `cols` are where the tile begins, for expressions that speak of positions. From the
    column `end` on, a mask leaves nothing of a warpgroup's rows.
    """

    shape: tuple[int, ...]
    assigns: tuple[Assign, ...]
    rows: Term | None = None
    cols: Term | None = None
    unless: Term | None = None
    note: str = ""
    kept: tuple[str, ...] = ()  # vectors that it makes of names local to the row
    end: Term | None = None
    clear: Element | None = None
    in_place: tuple[Key, ...] = ()  # vectors that it reads in shared memory

    def begin(self, axes: Axes) -> Term | None:
        """Where the positions along its rows or its columns begin."""
        return _begin(self, axes)


def _begin(node: Compute | Scatter, axes: Axes) -> Term | None:
    """Where positions along some axes begin; a vector has only one axis."""
    return node.rows if axes == ROW or len(node.shape) == 1 else node.cols


@dataclass(frozen=True)
class Loop(Node):
    """For every whole number from `low` on while `condition` holds.

    The number may be one that was defined before; a loop that `resumes` goes on with it where the
    loop before it ended. Numbers for which `where` does not hold are passed over.
    """

    var: str
    low: Term
    condition: Term
    body: tuple[Statement, ...]
    number: Literal["own", "defined", "resumes"] = "own"
    where: Term | None = None


@dataclass(frozen=True)
class Branch(Node):
    """The same way for all threads of a block, or of a warp (where no others wait for it)."""

    condition: Term
    then: tuple[Statement, ...]
    orelse: tuple[Statement, ...] = ()


@dataclass(frozen=True)
class Await(Node):
    """A consumer waits until a tile has been filled: `ahead` while it still holds the value
    before."""

    key: Key
    ahead: bool = False


@dataclass(frozen=True)
class Release(Node):
    """A consumer is done with what is in a tile, and says so once the vector `known` is computed
    (if one is named)."""

    key: Key
    known: str = ""


@dataclass(frozen=True)
class Refill(Node):
    """A tile gets its next value here: consumers hand back the stage that they hold, if any."""

    key: Key


@dataclass(frozen=True)
class Drain(Node):
    """A block is done: consumers hand back the stage of a tile that they hold, if any."""

    key: Key


@dataclass(frozen=True)
class Sync(Node):
    """All consumers meet, on account of shared tiles that they write. With `publish`, what they
    have written can then be read by wgmma.

    In two steps, each warpgroup tells the others that it has written its part of a stage, and later
    hears that the others have.
    """

    keys: tuple[Key, ...]
    publish: bool = False
    step: Literal["meet", "tell", "hear"] = "meet"
    stage: Term | None = None


@dataclass(frozen=True)
class Exchange(Node):
    """Warpgroups that share rows have each found a vector's values over its own columns: they
    become those of the whole rows."""

    vector: str
    op: Literal["max", "sum"]


@dataclass(frozen=True)
class Transpose(Node):
    """Helper warps transpose a tile that has landed."""

    key: Key


@dataclass(frozen=True)
class Roles(Node):
    """Warp specialization: what the producer thread, the consumer warpgroups and the helper warps
    do for one tile of the grid. All take the same tiles from the scheduler."""

    producer: tuple[Statement, ...]
    consumers: tuple[Statement, ...]
    helpers: tuple[Statement, ...] = ()


Statement = (
    Define | Load | Put | Commit | Wait | Barrier | Fill | Store | Scatter | TakeTurn | PassTurn
    | Move | Restage | Gemm | Operand | Compute
    | Loop | Branch | Await | Release | Refill | Drain | Sync | Roles | Open | Start | Finish
    | PingPong | Transpose | Exchange
)  # fmt: skip

Side = Literal["rows", "columns"]


@dataclass(frozen=True)
class GridAxis:
    """One coordinate of the block, and at which end of it the blocks with most iterations are."""

    name: str
    low: Term
    longest: Literal["first", "last"] | None = None
    count: Term = ONE


HELPERS = 3
"""The helper warps of the producer's warpgroup."""


@dataclass(frozen=True)
class Sequences:
    """Sequences that lie behind each other: the tensor that says where they begin, and the rows of
    a tile. The grid's first axis counts a sequence's tiles, the last one the sequences."""

    starts: str
    rows: int


@dataclass(frozen=True)
class Work:
    """How much a tile's loops do, where data say it: what is defined for it, and the sum of the
    loops. The place along the grid's first axis alone decides."""

    defined: tuple[Define, ...]
    amount: Term


@dataclass(frozen=True)
class Kernel:
    """A kernel: its grid, its statements, and how its register tiles lie."""

    grid: tuple[GridAxis, ...]
    body: tuple[Statement, ...]
    sides: dict[Key, Side]  # of the vectors in registers
    operands: dict[Key, str]  # left operands in registers: their element types
    wide: frozenset[Key] = frozenset()  # accumulators whose threads hold 4 columns in every 16
    beside: frozenset[Key] = frozenset()  # register tiles whose columns warpgroups share
    waves: int = 0  # of a group of tiles (plan.py, scheduler_waves)
    sequences: Sequences | None = None  # only tiles of these are visited
    work: Work | None = None  # the tiles with the most are visited first
    helpers: int = HELPERS  # warps, which fill up the producer's warpgroup and others

    @property
    def queued(self) -> bool:
        """Whether thread blocks take the next tile when they are done with one."""
        return self.sequences is not None or self.work is not None


def flat(body: tuple[Statement, ...]) -> Iterator[Statement]:
    """All statements in order, those inside loops and branches included."""
    for node in body:
        yield node
        if isinstance(node, Loop):
            yield from flat(node.body)
        elif isinstance(node, Branch):
            yield from flat((*node.then, *node.orelse))
        elif isinstance(node, Roles):
            yield from flat((*node.producer, *node.helpers, *node.consumers))
        elif isinstance(node, Start):
            yield node.gemm


def combined(body: tuple[Statement, ...]) -> Iterator[tuple[Leaf, ...]]:
    """The elements, each time those that lie alike because they are computed with together."""
    for node in flat(body):
        if isinstance(node, Compute):
            yield from ((a.target, *leaves(a.value)) for a in node.assigns)
        elif isinstance(node, Scatter):
            yield (node.held, *leaves(node.place))


def defined_names(body: tuple[Statement, ...]) -> set[str]:
    """The names of scalars that statements define, and of loops' variables."""
    nodes = list(flat(body))
    found = {n.name for n in nodes if isinstance(n, Define)}
    return found | {n.var for n in nodes if isinstance(n, Loop)}


def renamed(assign: Assign, new: Mapping[Term, Leaf]) -> Assign:
    """An assignment with other leaves in the place of some; a target with another name lasts."""
    target = new.get(assign.target.term, assign.target)
    value = with_leaves(assign.value, new)
    return replace(assign, target=target, value=value, kept=assign.kept or target != assign.target)


def changed(
    body: tuple[Statement, ...],
    change: Callable[[Statement], Statement | tuple[Statement, ...] | None],
) -> tuple[Statement, ...]:
    """The statements, each but loops and branches put through a change, which may give several or
    none."""
    out: list[Statement] = []
    for node in body:
        if isinstance(node, Loop):
            out.append(replace(node, body=changed(node.body, change)))
        elif isinstance(node, Branch):
            then, orelse = (changed(part, change) for part in (node.then, node.orelse))
            out.append(replace(node, then=then, orelse=orelse))
        elif (new := change(node)) is not None:
            out += new if isinstance(new, tuple) else (new,)
    return tuple(out)
