"""Recognizes messages that are sent again: clients repeat a send that took too long, under the same id.

In the leader's memory, for a short time: a repetition gets the answer of the first. See ``docs/protocol.md`` for what
that means over failovers.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import Final, NamedTuple

from rocketstore.types import PutResult

KEPT_S: Final = 10.0
"""How long a message is remembered."""
KEPT_MAX: Final = 200_000
"""Messages of all owners; one owner may have ``account_share_percent`` of them."""
OWNERS_MAX: Final = 4096
"""Beyond, those are forgotten of whom nothing was heard for ``KEPT_S``."""


class _Sent(NamedTuple):
    at: float
    result: asyncio.Future[PutResult]


class DuplicateWindow:
    """On the loop. Owners (accounts, or addresses) cannot see each other's messages, nor push them out."""

    def __init__(self, now: Callable[[], float], share_percent: int, kept_max: int = KEPT_MAX) -> None:
        self._now = now
        self._share = max(1, kept_max * share_percent // 100)
        self._kept_max = kept_max
        self._owners: dict[str, OrderedDict[tuple[str, str], _Sent]] = {}
        self._kept = 0
        self.recognized = 0
        """How many messages were sent again."""

    def __len__(self) -> int:
        """How many are remembered."""
        return self._kept

    def find(self, owner: str, topic: str, message_id: str) -> asyncio.Future[PutResult] | None:
        """The result of a message that was sent before, perhaps not there yet."""
        sent = self._owners.get(owner)
        found = None if sent is None else sent.get((topic, message_id))
        if found is None or found.at < self._now() - KEPT_S:
            return None
        self.recognized += 1
        return found.result

    def begin(self, owner: str, topic: str, message_id: str) -> asyncio.Future[PutResult]:
        """Remember a message that is being sent; give its result to ``settle``."""
        result: asyncio.Future[PutResult] = asyncio.get_running_loop().create_future()
        sent = self._owners.setdefault(owner, OrderedDict())
        if sent.pop((topic, message_id), None) is not None:
            self._kept -= 1
        sent[topic, message_id] = _Sent(self._now(), result)
        self._kept += 1
        self._make_room(owner, sent)
        return result

    def settle(
        self, owner: str, topic: str, message_id: str, begun: asyncio.Future[PutResult], result: PutResult
    ) -> None:
        """The result of a message is known. One that is not stored for sure is forgotten: sent again, it is stored."""
        if not begun.done():
            begun.set_result(result)
        if result.ok and result.outcome == "stored":
            return
        sent = self._owners.get(owner)
        found = None if sent is None else sent.get((topic, message_id))
        if sent is not None and found is not None and found.result is begun:
            del sent[topic, message_id]
            self._kept -= 1
            if not sent:
                del self._owners[owner]

    def _make_room(self, owner: str, sent: OrderedDict[tuple[str, str], _Sent]) -> None:
        """Forget what is old, and the oldest of clients that have too many."""
        too_old = self._now() - KEPT_S
        while sent and (next(iter(sent.values())).at < too_old or len(sent) > self._share):
            sent.popitem(last=False)
            self._kept -= 1
        while self._kept > self._kept_max:
            longest = max(self._owners, key=lambda one: len(self._owners[one]))
            self._owners[longest].popitem(last=False)
            self._kept -= 1
            if not self._owners[longest] and longest != owner:
                del self._owners[longest]
        if len(self._owners) > OWNERS_MAX:
            self._owners = {name: one for name, one in self._owners.items() if one and _newest(one) >= too_old}
            self._kept = sum(map(len, self._owners.values()))


def _newest(sent: OrderedDict[tuple[str, str], _Sent]) -> float:
    return next(reversed(sent.values())).at
