"""Which messages were recalled, by hour, in memory, so that a recall need not read the file of its hour. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

INDEXED_MAX: Final = 250_000
"""Recalls known by heart, of all hours; about 100 bytes each."""


class RecallIndex:
    """Bounded: an hour whose recalls would be too many is not known from then on, and its file must be read."""

    def __init__(self, indexed_max: int = INDEXED_MAX) -> None:
        self._indexed_max = indexed_max
        self._size = 0
        self._known: dict[int, set[int]] = {}
        self._overflown: set[int] = set()

    def __len__(self) -> int:
        return self._size

    def add(self, hour: int, origin: int) -> None:
        """A message of this hour was recalled."""
        if hour in self._overflown:
            return
        known = self._known.setdefault(hour, set())
        if origin in known:
            return
        if self._size >= self._indexed_max:
            self.forget(hour)
            self._overflown.add(hour)
            return
        known.add(origin)
        self._size += 1

    def replace(self, hour: int, origins: Iterable[int]) -> None:
        """These are all recalls of an hour."""
        self.forget(hour)
        for origin in origins:
            self.add(hour, origin)

    def forget(self, hour: int) -> None:
        """An hour is over."""
        self._size -= len(self._known.pop(hour, ()))
        self._overflown.discard(hour)

    def is_recalled(self, hour: int, origin: int) -> bool | None:
        """None: the file of the hour knows."""
        return None if hour in self._overflown else origin in self._known.get(hour, ())
