"""How much of what may wait on a server one account can take up, so that it cannot keep the others out."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from dledger.errors import PendingFullError

_IDLE_MAX: Final = 1024
_MOST: Final = "the most that one account may have (account_share_percent)"


class TooManyWaitsError(PendingFullError):
    """Raised when an account has as many streams or waiting pulls as it may."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Per account. A request that is larger than all of it is taken alone."""

    entries_max: int
    bytes_max: int
    streams_max: int
    waits_max: int = 1
    """Pulls that wait."""

    def share(self, percent: int) -> Limits:
        """A part of each, at least one."""
        all_of_it = (self.entries_max, self.bytes_max, self.streams_max, self.waits_max)
        return Limits(*(max(1, number * percent // 100) for number in all_of_it))


class Quota:
    """One account's share; lives on the loop."""

    __slots__ = ("_limits", "_room_wanted", "bytes", "entries", "streams", "waits")

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.entries = 0
        self.bytes = 0
        self.streams = 0
        self.waits = 0
        self._room_wanted: set[asyncio.Event] = set()

    @property
    def is_full(self) -> bool:
        """Whether nothing more of it shall be taken for now."""
        return self.entries >= self._limits.entries_max or self.bytes >= self._limits.bytes_max

    @contextmanager
    def stream(self, name: str) -> Iterator[None]:
        """An open stream meanwhile. Raises ``TooManyWaitsError``."""
        if self.streams >= self._limits.streams_max:
            raise TooManyWaitsError(f"{name} has {self.streams} open streams, {_MOST}")
        self.streams += 1
        try:
            yield
        finally:
            self.streams -= 1

    @contextmanager
    def wait(self, name: str) -> Iterator[None]:
        """A pull that waits meanwhile. Raises ``TooManyWaitsError``."""
        if self.waits >= self._limits.waits_max:
            raise TooManyWaitsError(f"{name} has {self.waits} waiting pulls, {_MOST}")
        self.waits += 1
        try:
            yield
        finally:
            self.waits -= 1

    def full_error(self, name: str) -> PendingFullError:
        """Why nothing more is taken."""
        return PendingFullError(f"{name} has {self.entries} entries of {self.bytes} bytes waiting, {_MOST}")

    @property
    def idle(self) -> bool:
        """Whether nothing of it is here."""
        return not (self.entries or self.bytes or self.streams or self.waits)

    def take(self, entries: int, size: int) -> None:
        """Something of it waits from now on."""
        self.entries += entries
        self.bytes += size

    def give(self, entries: int, size: int) -> None:
        """It does not any more."""
        self.entries -= entries
        self.bytes -= size
        if self._room_wanted and not self.is_full:
            for room in self._room_wanted:
                room.set()

    async def wait_room(self, room: asyncio.Event) -> None:
        """Wait until ``room`` is set, or something of this account was answered."""
        room.clear()
        self._room_wanted.add(room)
        try:
            await room.wait()
        finally:
            self._room_wanted.discard(room)


class Quotas:
    """Of all accounts that have something here."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._quotas: dict[str, Quota] = {}

    def of(self, access_key: str) -> Quota:
        """One account's; the same object as long as something of it is here."""
        quota = self._quotas.get(access_key)
        if quota is None:
            if len(self._quotas) >= _IDLE_MAX:
                self.forget_idle()
            quota = self._quotas[access_key] = Quota(self._limits)
        return quota

    def forget_idle(self) -> None:
        """Keep those that matter."""
        self._quotas = {key: one for key, one in self._quotas.items() if not one.idle}
