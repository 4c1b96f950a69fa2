"""Counts what hosts have of something limited, so that one host cannot keep the others out."""

from __future__ import annotations

from typing import Final

KEPT_PART: Final = 8
"""This part of a limit is reserved for who has little, as in ``dledger.access.quota``."""


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
            most -= most // KEPT_PART
            host_most -= host_most // KEPT_PART
        return self._total < most and self._by_host.get(host, 0) < host_most
