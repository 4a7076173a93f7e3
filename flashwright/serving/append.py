"""New keys and values of a call, written into a cache, and rotated with the queries.

Kernels do it, whose programs are TL (generate/append.py): one for the keys and values, and one for
queries that are rotated. As in kernels.py, a call's form is looked at once, and a later one passes
on where its tensors lie. PyTorch does it on the CPU, where its dispatcher has to see the call, and
for widths that no tile has, which is said.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from flashwright.build import classes
from flashwright.build.arrays import NAMES
from flashwright.build.load import unshown
from flashwright.flex import attention as flex
from flashwright.flex.task import DTYPES, LIMIT, WrongKernel, find_or_make, first_results
from flashwright.generate.append import COLUMNS, Append, Rotate, Rotation
from flashwright.generate.store import Ordered, tell
from flashwright.serving import arguments, kernels
from flashwright.serving.cache import Cache, positions

_TYPES = {getattr(torch, kind): name for name, kind in NAMES.items()}
_ANGLES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
Views = Mapping[str, tuple[int, Any]]
"""The tensors of a program by their names: which of the caller's each is a view of, and the view.
"""


@dataclass(frozen=True)
class Turn:
    """Angles by position, (positions, half of the columns), and what they rotate."""

    cos: Any
    sin: Any
    pairs: bool
    """Whether neighbouring columns are rotated, else the first half with the second."""
    by_first: bool = False
    """Whether all tokens of a sequence are rotated as its first one is."""

    @property
    def half(self) -> int:
        """The columns of the angles."""
        return int(self.cos.shape[-1])

    @property
    def rotation(self) -> Rotation:
        """The same for a program."""
        return Rotation(self.half, _ANGLES[self.cos.dtype], self.pairs, self.by_first)

    def halves(self, x: Any) -> Any:
        """The rotated columns of x, (..., tokens, heads, dim), as (..., heads, 2, tokens, half)."""
        part = x[..., : 2 * self.half]
        if self.pairs:
            part = part.unflatten(-1, (self.half, 2)).transpose(-1, -2)
        else:
            part = part.unflatten(-1, (2, self.half))
        return part.movedim(-4, -2)

    def rest(self, x: Any) -> Any:
        """The other columns, as (..., heads, tokens, dim)."""
        return x[..., 2 * self.half :].transpose(-3, -2)

    def by_pytorch(self, x: Any, lengths: Any) -> Any:
        """Tokens behind so many, (batch, tokens, heads, dim), with the first columns rotated."""
        places = positions(lengths, 1 if self.by_first else x.shape[1]).long()
        cos, sin = (angle[places][:, None].float() for angle in (self.cos, self.sin))
        first, second = self.halves(x).float().unbind(-3)
        turned = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-3)
        found = x.clone()
        self.halves(found).copy_(turned)
        return found

    def obstacle(self, widths: Sequence[int]) -> str | None:
        """Why no kernel rotates columns of such heads; None if one does."""
        if self.cos.dtype not in _ANGLES or self.sin.dtype != self.cos.dtype:
            return f"rotary_cos is {self.cos.dtype} and rotary_sin {self.sin.dtype}"
        return _obstacle([self.half, *(width - 2 * self.half for width in widths)])


def _obstacle(widths: Sequence[int]) -> str | None:
    odd = [width for width in widths if width % COLUMNS]
    return f"{odd[0]} columns are no multiple of {COLUMNS}" if odd else None


@dataclass(frozen=True)
class New:
    """New keys and values of a call, if it has some, and how its queries and these are rotated."""

    k: Any
    v: Any
    cos: Any
    sin: Any
    pairs: bool
    """Whether neighbouring columns are rotated, else the first half with the second."""
    first: int
    """The position of a cache's first key."""

    def check(self, q: Any, cache: Cache, most: int, ordered: bool) -> None:
        """Raise ValueError or TypeError for new keys or angles that do not fit. `most` is the
        longest sequence that the host knows of."""
        count = 0
        if self.k is not None:
            named = {"k": self.k, "v": self.v}
            arguments.check_axes(named, dict.fromkeys(named, "batch, tokens, heads, dim"))
            count = self.k.shape[1]
            self._check_like("k", self.k, q, cache.k)
            self._check_like("v", self.v, q, cache.v)
            if most + count > cache.longest:
                text = f"no room for {count} new keys behind {most}: the cache has room for"
                raise ValueError(f"{text} {cache.longest} (cache_seqlens says where they begin)")
        if self.cos is not None:
            self._check_angles(q, self.first + most + max(count, q.shape[1] if ordered else 1))

    def _check_like(self, name: str, new: Any, q: Any, cache: Any) -> None:
        wanted = (q.shape[0], self.k.shape[1], *cache.shape[2:])
        if tuple(new.shape) != wanted:
            text = f"{name} must have the shape {wanted}, as q and the cache"
            raise ValueError(f"{text}; it has {tuple(new.shape)}")
        if new.dtype not in (q.dtype, cache.dtype) or new.device != q.device:
            text = f"{name} must be {q.dtype} on {q.device}, as q"
            raise TypeError(f"{text}; it is {new.dtype} on {new.device}")

    def _check_angles(self, q: Any, positions: int) -> None:
        named = {"rotary_cos": self.cos, "rotary_sin": self.sin}
        arguments.check_axes(named, dict.fromkeys(named, "positions, half of the width"))
        count, half = self.cos.shape
        if self.sin.shape != self.cos.shape or 2 * half > q.shape[3]:
            text = f"rotary_cos and rotary_sin must have one shape, (positions, {q.shape[3] // 2})"
            raise ValueError(
                f"{text} or less wide; they have {(count, half)} and {tuple(self.sin.shape)}"
            )
        if positions > count:
            text = f"rotary_cos and rotary_sin have {count} positions"
            raise ValueError(f"{text}, and {positions} are needed")

    def written(
        self, q: Any, cache: Cache, lengths: Any, ordered: bool, scales: Mapping[str, Any]
    ) -> tuple[Any, Any]:
        """The queries, and how many keys there are once the new ones are in the cache. If `ordered`
        each query is rotated by a position of its own, else all of a sequence by that of the first.
        """
        turn = None
        if self.cos is not None:
            cos, sin = (x[self.first :] if self.first else x for x in (self.cos, self.sin))
            turn = Turn(cos, sin, self.pairs)
            q = _rotated(q, lengths, replace(turn, by_first=not ordered))
        if self.k is None:
            return q, lengths
        _append(cache, Rows(self.k, self.v, lengths, scales, turn))
        return q, lengths + self.k.shape[1]


# --- new keys and values ------------------------------------------------------------------------


@dataclass(frozen=True)
class Rows:
    """New keys and values, (batch, tokens, heads, dim), of sequences that have `lengths` keys."""

    k: Any
    v: Any
    lengths: Any
    scales: Mapping[str, Any]
    turn: Turn | None

    def by_pytorch(self, cache: Cache) -> Iterator[tuple[Any, Any]]:
        """What is written to the cache of keys and to that of values, and the caches."""
        k = self.k if self.turn is None else self.turn.by_pytorch(self.k, self.lengths)
        for new, kept, name in ((k, cache.k, "kdescale"), (self.v, cache.v, "vdescale")):
            yield stored(new, kept.dtype, self.scales.get(name)), kept

    def callers(self, cache: Cache) -> tuple[Any, ...]:
        """The tensors of the call."""
        scales = (self.scales.get(name) for name in arguments.SCALES)
        angles = (None, None) if self.turn is None else (self.turn.cos, self.turn.sin)
        where = (self.lengths, cache.table, cache.entries)
        return (self.k, self.v, cache.k, cache.v, *where, *scales, *angles)

    def views(self, cache: Cache) -> Views:
        """The tensors of the program, as views of those of the call."""
        names = ("LengthsK", "Table", "Entry", "KDescale", "VDescale", "Cos", "Sin")
        given = self.callers(cache)
        found = {name: (n, given[n]) for n, name in enumerate(names, 4)}
        for name, turn, new, kept in (("K", self.turn, 0, 2), ("V", None, 1, 3)):
            for prefix, n in (("New", new), ("", kept)):
                for own, view in _parts(name, given[n], turn):
                    found[prefix + own] = n, view
        return found

    def order(self, cache: Cache) -> Append:
        """The kernel to find or to make."""
        return Append(
            flex.card_of(self.k.device),
            (_TYPES[self.k.dtype], _TYPES[self.v.dtype]),
            _TYPES[cache.k.dtype],
            (self.k.shape[-1], self.v.shape[-1]),
            None if cache.table is None else cache.k.shape[1],
            cache.entries is not None,
            None if self.turn is None else self.turn.rotation,
        )

    def check(self, cache: Cache) -> None:
        """Raise WrongKernel if a cache has not what PyTorch would have written."""
        places = cache.places(self.lengths, self.k.shape[1])
        for wanted, kept in self.by_pytorch(cache):
            plain = kept.view(torch.uint8) if kept.element_size() == 1 else kept  # no index else
            _compare(plain[places].view(kept.dtype), wanted)


def stored(new: Any, kind: Any, scale: Any) -> Any:
    """New keys or values as a cache of some type has them. One of 8 bits has no infinity; in int8
    they are rounded to the nearest number, of two to the even one."""
    if scale is not None and new.dtype != kind:
        whole = not kind.is_floating_point
        limits = torch.iinfo(kind) if whole else torch.finfo(kind)
        new = (new.float() / scale[:, None, :, None]).clamp(limits.min, limits.max)
        new = new.round().nan_to_num() if whole else new
    return new.to(kind)


def _append(cache: Cache, rows: Rows) -> None:
    """Write new rows behind those that are there, divided by the scales of 8-bit ones."""

    def make() -> _Kernel:
        widths = (rows.k.shape[-1],)
        why = rows.turn.obstacle(widths) if rows.turn is not None else _obstacle(widths)
        why = why or _obstacle([rows.v.shape[-1]])
        how = partial(rows.order, cache)
        return _Kernel.of(why, "new keys are written", how, callers, rows.views(cache))

    callers = rows.callers(cache)
    options = "append", rows.turn is not None and rows.turn.pairs
    if _launched(options, callers, make, partial(rows.check, cache)):
        return
    places = cache.places(rows.lengths, rows.k.shape[1])
    for new, kept in rows.by_pytorch(cache):
        if new.element_size() == 1:  # 8-bit floats have no index
            kept, new = kept.view(torch.uint8), new.view(torch.uint8)
        kept[places] = new


# --- queries ------------------------------------------------------------------------------------


def _rotated(q: Any, lengths: Any, turn: Turn) -> Any:
    """Queries behind so many keys, rotated."""
    out = torch.empty_like(q)
    callers = q, out, lengths, turn.cos, turn.sin

    def make() -> _Kernel:
        def order() -> Rotate:
            return Rotate(flex.card_of(q.device), _TYPES[q.dtype], q.shape[-1], turn.rotation)

        found = {"LengthsK": (2, lengths), "Cos": (3, turn.cos), "Sin": (4, turn.sin)}
        for number, (name, x) in enumerate((("Q", q), ("Turned", out))):
            found |= {own: (number, view) for own, view in _parts(name, x, turn)}
        why = turn.obstacle([q.shape[-1]])
        return _Kernel.of(why, "queries are rotated", order, callers, found)

    def check() -> None:
        _compare(out, turn.by_pytorch(q, lengths))

    done = _launched(("rotate", turn.pairs, turn.by_first), callers, make, check)
    return out if done else turn.by_pytorch(q, lengths)


# --- launches -----------------------------------------------------------------------------------


@dataclass
class _Kernel:
    """What does calls of one form: a launch, or none if PyTorch has to do them."""

    launch: Callable[..., None] | None
    folder: Path = Path()
    new: bool = False

    @classmethod
    def of(
        cls,
        obstacle: str | None,
        what: str,
        order: Callable[[], Ordered],
        callers: Sequence[Any],
        views: Views,
    ) -> _Kernel:
        """The kernel that takes views of a caller's tensors, found or made."""
        if obstacle is not None:
            tell(f"{what} by PyTorch, in several steps: {obstacle}")
            return cls(None)
        folder, new = find_or_make(order())
        kernel: Any = classes.load(folder)
        given = [views[tensor.name] for tensor in kernel.plan.tensors]
        places = [(n, _bytes_before(view) - _bytes_before(callers[n])) for n, view in given]
        heads = callers[0].shape[-2]
        unused = {"heads": heads, "kv_heads": heads, "kv_len": 1}  # these programs have one of each
        hidden = unshown(kernel.plan)
        dims = [unused[name] if name in hidden else None for name in kernel.plan.dims]
        return cls(kernel.bound([view for _, view in given], dims, places), folder, new)


def _bytes_before(tensor: Any) -> int:
    return int(tensor.storage_offset() * tensor.itemsize)


def _launched(
    options: kernels.Form,
    callers: tuple[Any, ...],
    make: Callable[[], _Kernel],
    check: Callable[[], None],
) -> bool:
    """Whether a kernel has done a call. `check` sees what one has done that was made now."""
    form = None if _on_cpu(callers[0]) else kernels.form_of(options, callers)
    if form is None:
        return False
    kernel = kernels.known(form)
    if kernel is None:
        kernel = make()
        if not kernels.captured(callers[0]):
            kernels.remember(form, kernel)
    if kernel.launch is None:
        return False
    kernel.launch(*callers)
    if kernel.new and not kernels.captured(callers[0]):
        with first_results(kernel, {form: kernel}, form):
            check()
    return True


def _on_cpu(tensor: Any) -> bool:
    return bool(tensor.is_cpu)


def _parts(name: str, x: Any, turn: Turn | None) -> Iterator[tuple[str, Any]]:
    """A tensor, (batch, tokens, heads, dim), as the program has it, by the name there."""
    if turn is None:
        yield name, x.transpose(-3, -2)
    else:
        yield name, turn.halves(x)
        yield f"Rest{name}", turn.rest(x)


def _compare(found: Any, wanted: Any) -> None:
    """Raise WrongKernel if a kernel has not written what PyTorch gives: but for 1 in whole numbers,
    and for a step of the type in others, which the order of additions may decide."""
    whole = not wanted.dtype.is_floating_point
    limit = 1.0 if whole else LIMIT[DTYPES[str(wanted.dtype).removeprefix("torch.")]]
    step = 0.0 if whole else torch.finfo(wanted.dtype).eps
    found, wanted = found.float(), wanted.float()
    size = 1.0 if whole else wanted.square().mean(dim=-1, keepdim=True).sqrt().clamp(min=1e-3)
    off = (found - wanted).abs() - step * wanted.abs()
    error = float((off / size).max()) if wanted.numel() else 0.0
    if not error <= limit:
        unit = "" if whole else " of the RMS"
        text = f"a new kernel is wrong: what it wrote is {error:.2g}{unit} from what PyTorch gives"
        raise WrongKernel(f"{text}. Please report the shapes")
