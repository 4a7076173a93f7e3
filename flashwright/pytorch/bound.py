"""Launches whose tensors have known shapes and strides: a call passes on where they lie.

All checks and choices are made once, so a call costs the host two allocations and one call of the
launcher, however many kernels the package has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import zip_longest
from math import prod
from typing import Any

import torch

from flashwright.build.arrays import NAMES
from flashwright.build.load import Kernel
from flashwright.pytorch.signature import Signature

Form = Callable[[Sequence[Any]], Sequence[Any]]
"""From the first outputs of a package to views of them, which a caller gets."""
_ALIGNED = 256
"""The bytes to which parts of scratch are aligned."""


class Bound:
    """A launch of a package for arguments of known shapes, strides, types and device.

    Raises what the launcher says of arguments that do not fit.
    """

    def __init__(
        self, signature: Signature, package: Any, arguments: Sequence[Any], form: Form
    ) -> None:
        outputs = new_outputs(signature, package, arguments, signature.types)
        results = form(outputs)
        names = signature.outputs[: len(results)]
        self.outputs, self._count = signature.outputs, len(results)
        kernel: Kernel = package.serving(*signature.arranged(arguments, outputs))
        given, dims = signature.arranged(arguments, outputs[: len(results)])
        tensors = dict(zip_longest((t.name for t in kernel.plan.tensors), given))
        scratch = _Scratch(kernel, names, [*tensors.values()], dims)
        bases = scratch.pieces(arguments[0].device)
        tensors |= scratch.parts(bases)
        whole = (*(t.name for t in signature.read), *names)
        places = {name: (n, 0) for n, name in enumerate(whole)}
        places |= {n: (len(whole) + base, at) for n, (base, at) in scratch.places.items()}
        self._launch = kernel.bound(
            [*tensors.values()], dims, [places.get(name, (-1, 0)) for name in tensors]
        )
        self._new = [
            _maker(x, zeroed=name in kernel.zeroed) for name, x in zip(names, results, strict=True)
        ]
        self._new += [_maker(x, zeroed=n > 0) for n, x in enumerate(bases)]

    def __call__(self, *tensors: Any) -> list[Any]:
        """New results, from tensors that lie anywhere. They are in the order of the inputs."""
        made = [new() for new in self._new]
        self._launch(*tensors, *made)
        return made[: self._count]


def new_outputs(
    signature: Signature, kernel: Any, arguments: Sequence[Any], types: Sequence[Any]
) -> list[Any]:
    """New outputs of these types. If the arguments do not fit the plan, the launcher reports it."""
    try:
        return signature.empty(arguments, types)
    except Exception:
        kernel.launch(*signature.arranged(arguments), check_only=True)
        raise


def _maker(like: Any, zeroed: bool) -> Callable[[], Any]:
    """What makes tensors like a dense one, which gives up its memory."""
    like.untyped_storage().resize_(0)
    new = partial(torch.empty_like, like)
    return (lambda: new().zero_()) if zeroed else new


class _Scratch:
    """What kernels need beside a caller's tensors, in one piece of memory, and in a second one what
    begins at 0."""

    def __init__(
        self, kernel: Kernel, wanted: Sequence[str], tensors: Sequence[Any], dims: Sequence[Any]
    ) -> None:
        needed = kernel.needed(wanted)
        self.shapes = kernel.shapes(needed, tensors, dims)
        self.places: dict[str, tuple[int, int]] = {}
        """Of each tensor, the piece of memory and the first byte there."""
        sizes = [0, 0]
        for name, zeroed in needed.items():
            self.places[name] = int(zeroed), sizes[zeroed]
            sizes[zeroed] += -(-self._bytes(name) // _ALIGNED) * _ALIGNED
        self._sizes = sizes

    def _kind(self, name: str) -> Any:
        return getattr(torch, NAMES[self.shapes[name][1]])

    def _bytes(self, name: str) -> int:
        return int(prod(self.shapes[name][0]) * self._kind(name).itemsize)

    def pieces(self, device: Any) -> list[Any]:
        """The pieces of memory; the last ones only if they are needed."""
        plain, zeroed = self._sizes
        wanted = (plain, zeroed) if zeroed else (plain,) if plain else ()
        return [torch.empty(size, dtype=torch.uint8, device=device) for size in wanted]

    def parts(self, pieces: Sequence[Any]) -> dict[str, Any]:
        """The tensors in the pieces."""
        found = {}
        for name, (piece, first) in self.places.items():
            part = pieces[piece][first : first + self._bytes(name)]
            found[name] = part.view(self._kind(name)).view(self.shapes[name][0])
        return found
