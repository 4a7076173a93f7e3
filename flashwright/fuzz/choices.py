"""A recorded list of choices: what a generator draws, so that a program can be drawn again.

A generator asks for small numbers and gets them from a seed or from a list. The list that it used
is the program's recipe. A shrinker edits the list: whatever it contains, the generator still
returns a program, because numbers out of range wrap around and a list that is too short goes on
with zeros. Option 0 is therefore always the simplest one.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")
_PARTS = 1000  # resolution of a probability


class Choices:
    """Draws from a seed, or replays a recorded list; `taken` is what was drawn."""

    def __init__(self, seed: int | None = None, replay: Sequence[int] | None = None) -> None:
        self._random = random.Random(seed) if replay is None else None
        self._replay = list(replay or ())
        self.taken: list[int] = []

    @contextmanager
    def stream(self, seed: int) -> Iterator[None]:
        """Draw from another seed inside the block: programs that share it draw the same there."""
        before = self._random
        if before is not None:
            self._random = random.Random(seed)
        yield
        self._random = before

    def below(self, limit: int) -> int:
        """A number from 0 to limit - 1."""
        if self._random is not None:
            value = self._random.randrange(limit)
        elif len(self.taken) < len(self._replay):
            value = self._replay[len(self.taken)] % limit
        else:
            value = 0
        self.taken.append(value)
        return value

    def pick(self, options: Sequence[T]) -> T:
        """One of the options, each as likely as the others."""
        return options[self.below(len(options))]

    def weighted(self, options: Sequence[tuple[T, int]]) -> T:
        """One of the options by their weights; the recorded number is the option's index."""
        return options[self._index([weight for _, weight in options])][0]

    def chance(self, probability: float) -> bool:
        """True with this probability; a recorded 0 is False."""
        if probability <= 0:
            return False
        likely = max(1, round(_PARTS * probability))
        return bool(self._index([_PARTS - likely, likely]))

    def _index(self, weights: Sequence[int]) -> int:
        if self._random is not None:
            value = self._random.choices(range(len(weights)), weights)[0]
            self.taken.append(value)
            return value
        return self.below(len(weights))

    def shuffled(self, items: Sequence[T]) -> list[T]:
        """The items in some order; zeros keep the order as it is."""
        left, found = list(items), []
        while left:
            found.append(left.pop(self.below(len(left))))
        return found
