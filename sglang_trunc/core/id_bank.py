"""Numbered places that lanes borrow: KV slots of branches, rows of the state bank.

Pure integers. A bank never creates or loses a number: what was taken is given back once, and may come back as
another number (``engine`` exchanges a branch's slot with a reserved one on commit).
"""

from __future__ import annotations

from collections.abc import Iterable


class IdBank:
    """A set of free numbers; the one given back last is taken first, so that few rows stay warm in the cache."""

    def __init__(self, ids: Iterable[int]):
        self._free = list(ids)[::-1]
        self._known = set(self._free)
        self.size = len(self._free)
        if len(self._known) != self.size:
            raise ValueError("a bank's numbers must be distinct")

    @property
    def free(self) -> int:
        """How many numbers can be taken."""
        return len(self._free)

    def take(self) -> int:
        """A free number; raises ``IndexError`` where there is none."""
        number = self._free.pop()
        self._known.discard(number)
        return number

    def give(self, number: int) -> None:
        """Return a number; the same one twice is an error, since two lanes would share a place."""
        if number in self._known:
            raise ValueError(f"{number} is free already")
        self._free.append(number)
        self._known.add(number)
