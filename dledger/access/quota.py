"""Limits what one client may occupy of a server, so that it cannot keep the others out.

Everything is counted three times: for the connection, for its owner (the account, or the address where there are no
accounts), and in total. The last eighth of an owner's and of the total limit is reserved for connections that have
little, so that a latecomer to a crowded server, or a client that shares an address with a greedy one, still gets
something.

``HostQuota`` counts what hosts have of something limited, so that one host cannot keep the others out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from dledger.errors import PendingFullError
from dledger.values import MIB

_CONNECTION_SHARE_PERCENT: Final = 50
"""The share of each limit for one connection; or the owner's share, if that is less."""
ANSWER_BYTES_MAX: Final = 256 * MIB
_KEPT_PART: Final = 8
"""This part of each limit is reserved for connections that have little of it ..."""
_LITTLE_PART: Final = 64
"""... which is less than this part."""
_IDLE_MAX: Final = 1024
_OWNERS_MOST: Final = "the limit per account or address"
_CONNECTIONS_MOST: Final = "the limit per connection"


class TooManyWaitsError(PendingFullError):
    """Raised when a client has reached its limit of streams or waiting pulls."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one client, or of all. A request that exceeds a whole limit is accepted alone."""

    entries_max: int
    bytes_max: int
    streams_max: int
    """Of each kind."""
    waits_max: int = 1
    """Pulls that wait."""
    answer_bytes_max: int = ANSWER_BYTES_MAX
    """Bytes of answers not yet read."""

    def share(self, percent: int) -> Limits:
        """A share of each limit, at least one."""
        all_of_it = (self.entries_max, self.bytes_max, self.streams_max, self.waits_max, self.answer_bytes_max)
        return Limits(*(max(1, number * percent // 100) for number in all_of_it))


class Quota:
    """The entries and bytes that one connection, one owner or all together occupy; lives on the loop."""

    __slots__ = (
        "_bytes_soft",
        "_entries_soft",
        "_is_connection",
        "_limits",
        "_parent",
        "_room_wanted",
        "answer_bytes",
        "bytes",
        "entries",
        "most",
        "name",
        "percent",
        "streams",
        "waits",
    )

    def __init__(
        self, limits: Limits, name: str, most: str, *, percent: int = 100, parent: Quota | None = None
    ) -> None:
        self.name = name
        self.most = most
        """The name of its limit in refusals."""
        self.percent = percent
        self._is_connection = parent is not None and parent.percent < 100
        self._limits = limits = limits.share(percent)
        self._entries_soft = limits.entries_max - limits.entries_max // _KEPT_PART
        self._bytes_soft = limits.bytes_max - limits.bytes_max // _KEPT_PART
        self._parent = parent
        self.entries = 0
        self.bytes = 0
        self.streams: dict[str, int] = {}
        """By kind."""
        self.waits = 0
        self.answer_bytes = 0
        self._room_wanted: set[asyncio.Event] = set()

    @property
    def owner(self) -> str:
        """The owner in words: the account or the address of a connection."""
        above = self._parent
        return self.name if above is None or above._parent is None else above.name

    # -- waiting entries -----------------------------------------------------------------------------------------------

    @property
    def is_full(self) -> bool:
        """Whether no further entries should be accepted for now."""
        return self._full_one() is not None

    def _full_one(self) -> Quota | None:
        limits = self._limits
        if self.entries >= limits.entries_max or self.bytes >= limits.bytes_max:
            return self
        little = self.entries <= limits.entries_max // _LITTLE_PART and self.bytes <= limits.bytes_max // _LITTLE_PART
        one = self._parent
        while one is not None:
            if little:
                limits = one._limits
                if one.entries >= limits.entries_max or one.bytes >= limits.bytes_max:
                    return one
            elif one.entries >= one._entries_soft or one.bytes >= one._bytes_soft:
                return one
            one = one._parent
        return None

    def full_error(self) -> PendingFullError:
        """The error for further entries."""
        one = self._full_one() or self
        return PendingFullError(f"{one.name} has {one.entries} entries of {one.bytes} bytes waiting, {one._most()}")

    def take(self, entries: int, size: int) -> None:
        """Count entries that wait from now on."""
        one: Quota | None = self
        while one is not None:
            one.entries += entries
            one.bytes += size
            one = one._parent

    def give(self, entries: int, size: int) -> None:
        """Entries no longer wait."""
        one: Quota | None = self
        while one is not None:
            one.entries -= entries
            one.bytes -= size
            if one._room_wanted:
                for room in one._room_wanted:
                    room.set()
            one = one._parent

    async def wait_room(self, room: asyncio.Event) -> None:
        """Wait until ``room`` is set, or a level that is full has answered something."""
        room.clear()
        full = self._full_one()
        if full is None:
            return
        full._room_wanted.add(room)
        try:
            await room.wait()
        finally:
            full._room_wanted.discard(room)

    # -- streams and waits ---------------------------------------------------------------------------------------------

    @contextmanager
    def stream(self, kind: str, setting: str, *, number_max: int = 0) -> Iterator[None]:
        """Count an open stream of this kind while it runs; ``setting`` names the limit of all (``number_max``).

        Raises ``TooManyWaitsError``.
        """
        number_max = number_max or self._root._limits.streams_max
        little = self.streams.get(kind, 0) < _little(number_max)
        for one in self._levels():
            have = one.streams.get(kind, 0)
            if have >= one._room(number_max, little=little):
                raise TooManyWaitsError(f"{one.name} has {have} open {kind} streams, {one._most(setting)}")
        self._add_stream(kind, 1)
        try:
            yield
        finally:
            self._add_stream(kind, -1)

    def _add_stream(self, kind: str, number: int) -> None:
        for one in self._levels():
            one.streams[kind] = one.streams.get(kind, 0) + number

    @contextmanager
    def wait(self, setting: str) -> Iterator[None]:
        """Count a waiting pull while it waits; ``setting`` names the limit. Raises ``TooManyWaitsError``."""
        number_max = self._root._limits.waits_max
        little = self.waits < _little(number_max)
        for one in self._levels():
            if one.waits >= one._room(number_max, little=little):
                raise TooManyWaitsError(f"{one.name} has {one.waits} waiting pulls, {one._most(setting)}")
        for one in self._levels():
            one.waits += 1
        try:
            yield
        finally:
            for one in self._levels():
                one.waits -= 1

    # -- answers -------------------------------------------------------------------------------------------------------

    def try_answer(self, size: int) -> bool:
        """Take room for an answer of this size, if there is any now."""
        bytes_max = self._root._limits.answer_bytes_max
        little = self.answer_bytes + size <= _little(bytes_max)
        for one in self._levels():
            if one.answer_bytes and one.answer_bytes + size > one._room(bytes_max, little=little):
                return False
        self.change_answer(size)
        return True

    def change_answer(self, size: int) -> None:
        """Adjust the room of an answer; a negative size means smaller than assumed, or read by the client."""
        for one in self._levels():
            one.answer_bytes += size

    # -- internals -----------------------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Whether it counts nothing."""
        return not (self.entries or self.bytes or self.waits or self.answer_bytes or any(self.streams.values()))

    def _levels(self) -> Iterator[Quota]:
        one: Quota | None = self
        while one is not None:
            yield one
            one = one._parent

    @property
    def _root(self) -> Quota:
        *_, root = self._levels()
        return root

    def _most(self, setting: str = "") -> str:
        settings = [setting, "account_share_percent" if self._parent is not None else ""]
        return f"{self.most} ({', '.join(filter(None, settings))})".removesuffix(" ()")

    def _room(self, number_max: int, *, little: bool) -> int:
        """The part of a total ``number_max`` that may be filled here; ``little``: for a connection that has little."""
        share = max(1, number_max * self.percent // 100)
        return share if little or self._is_connection else share - share // _KEPT_PART


def _little(number_max: int) -> int:
    return max(1, number_max // _LITTLE_PART)


class Quotas:
    """The quotas of all clients that occupy anything. ``limits`` are the totals."""

    def __init__(self, limits: Limits, *, owner_percent: int) -> None:
        self.root: Final = Quota(limits, "this server", "the limit for all clients together")
        self._limits = limits
        self._owner_percent = owner_percent
        self._connection_percent = min(owner_percent, _CONNECTION_SHARE_PERCENT)
        self._owners: dict[str, Quota] = {}
        self._connections: dict[tuple[str, str], Quota] = {}
        self._forget_at = _IDLE_MAX

    def of(self, owner: str, name: str, peer: str) -> Quota:
        """The quota of an owner's connection, ``peer``; the same object while it counts anything."""
        quota = self._connections.get((owner, peer))
        if quota is None:
            if len(self._connections) >= self._forget_at:
                self.forget_idle()
            above = self._owners.get(owner)
            if above is None:
                percent = self._owner_percent
                above = self._owners[owner] = Quota(self._limits, name, _OWNERS_MOST, percent=percent, parent=self.root)
            percent, name = self._connection_percent, f"a connection of {name}"
            quota = Quota(self._limits, name, _CONNECTIONS_MOST, percent=percent, parent=above)
            self._connections[owner, peer] = quota
        return quota

    def forget_idle(self) -> None:
        self._connections = {key: one for key, one in self._connections.items() if not one.idle}
        kept = {owner for owner, _ in self._connections}
        self._owners = {owner: one for owner, one in self._owners.items() if owner in kept}
        self._forget_at = max(_IDLE_MAX, 2 * len(self._connections))

    def __len__(self) -> int:
        """The number of connections counted."""
        return len(self._connections)


class HostQuota:
    """Counts the shares of hosts in a total: all together have at most ``most``, each host at most ``host_most``.

    A host is a name of ``dledger.access.addresses.counted_host``.
    """

    def __init__(self, most: int, host_most: int) -> None:
        self._most = most
        self._host_most = host_most
        self._total = 0
        self._by_host: dict[str, int] = {}

    def change(self, host: str, more: int) -> None:
        """Add ``more`` (negative: less)."""
        self._total += more
        here = self._by_host.get(host, 0) + more
        if here:
            self._by_host[host] = here
        else:
            self._by_host.pop(host, None)

    def of(self, host: str) -> int:
        """The share of this host."""
        return self._by_host.get(host, 0)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is counted."""
        return not self._total and not self._by_host

    def is_over(self, host: str) -> bool:
        """Whether this host, or all together, have more than they may."""
        return self._total > self._most or self._by_host.get(host, 0) > self._host_most

    def has_room(self, host: str, *, little: bool) -> bool:
        """Whether this host may have one more; ``little``: for a connection that has little itself."""
        most, host_most = self._most, self._host_most
        if not little:
            most -= most // _KEPT_PART
            host_most -= host_most // _KEPT_PART
        return self._total < most and self._by_host.get(host, 0) < host_most
