"""Tells the consumers of a group that its members have changed.

Each change concerns every member, and makes every member ask for the list: a thousand consumers that join one by one
would cause half a million of both. So changes that follow each other closely are told together, later the more
consumers there are to tell.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

from rocketstore.broker.clients import ClientLink

INTERVAL_S: Final = 0.1
"""The least time between two rounds."""
NOTICES_PER_S: Final = 2000
"""Of all groups, on average."""
AT_ONCE_MAX: Final = 500
"""How many are told before others get their turn."""


class Notices:
    """On the loop. ``links_of`` gives the consumers of a group that are to be told."""

    def __init__(self, links_of: Callable[[str], Iterable[ClientLink]]) -> None:
        self._links_of = links_of
        self._changed: dict[str, None] = {}  # in the order of their changes
        self._links: deque[ClientLink] = deque()  # the rest of one group
        self._group = ""
        """The group of ``_links``."""
        self._timer: asyncio.Handle | None = None

    def changed(self, group: str) -> None:
        """Tell this group's consumers: in the next turn of the loop, unless others were told just now."""
        self._changed[group] = None
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_soon(self._tell)

    def close(self) -> None:
        """Tell nobody any more."""
        if self._timer is not None:
            self._timer.cancel()

    def _tell(self) -> None:
        if not self._changed and not self._links:
            self._timer = None
            return
        told = 0
        while told < AT_ONCE_MAX and (self._links or self._changed):
            if not self._links:
                self._group = next(iter(self._changed))
                del self._changed[self._group]
                self._links.extend(self._links_of(self._group))
            while self._links and told < AT_ONCE_MAX:
                self._links.popleft().members_changed(self._group)
                told += 1
        self._timer = asyncio.get_running_loop().call_later(max(INTERVAL_S, told / NOTICES_PER_S), self._tell)
