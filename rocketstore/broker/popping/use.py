"""A group is consumed either by pop or by pulls (P11): both move its offset, and know nothing of each other."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from dledger.access.rules import RETRY_PREFIX
from rocketstore.broker.permissions import TOOLS_GROUP
from rocketstore.broker.refusal import Refusal, RefusalKind

RECENT_S: Final = 20.0
"""A group was used in the one way if it was within this time: consumers that wait ask again after 15 s."""
GROUPS_MAX: Final = 65_536
"""Groups that are remembered in either way."""
NAMED_MAX: Final = 8
"""Clients that a refusal names."""


class GroupUse:
    """On the loop, of the master. ``clients_of`` a group: those that pull or pop over remoting, by their heartbeats.

    ``parked_of``: how many of its messages are invisible for long, which a group's offset has passed.
    """

    def __init__(self, clients_of: Callable[[str], tuple[str, ...]], parked_of: Callable[[str], int]) -> None:
        self._clients_of = clients_of
        self._parked_of = parked_of
        self._pulled: OrderedDict[str, float] = OrderedDict()
        self._popped: OrderedDict[str, dict[str, float]] = OrderedDict()

    def pulled(self, group: str, topic: str) -> None:
        """A consumer pulls. Raises ``Refusal`` if others of its group pop."""
        if not group or group == TOOLS_GROUP or topic == f"{RETRY_PREFIX}{group}":
            return  # it moves nothing; and retry topics are always pulled
        now = asyncio.get_running_loop().time()
        if self._pulled.get(group, now - 2 * RECENT_S) <= now - RECENT_S:
            self._begin_to_pull(group, now)
        self._pulled[group] = now
        self._pulled.move_to_end(group)
        if len(self._pulled) > GROUPS_MAX:
            self._pulled.popitem(last=False)

    def _begin_to_pull(self, group: str, now: float) -> None:
        recent = [one for one, at in self._popped.get(group, {}).items() if at > now - RECENT_S]
        if recent:
            raise Refusal(
                RefusalKind.NOT_PERMITTED,
                f"group {group} is consumed by pop, and cannot be by pulls at the same time: clients "
                f"{_named(recent)}. Give these consumers a group of their own, or stop those for {RECENT_S:g} s",
            )
        parked = self._parked_of(group)
        if parked:
            raise Refusal(
                RefusalKind.NOT_PERMITTED,
                f"group {group} was consumed by pop, and {parked} of its messages are invisible for a while: pulls "
                "would never get them. Consume those by pop, or reset the group's offsets",
            )
        self._popped.pop(group, None)

    def popped(self, group: str, client_id: str) -> None:
        """A consumer receives by pop. Raises ``Refusal`` if others of its group pull."""
        now = asyncio.get_running_loop().time()
        if self._pulled.get(group, now - 2 * RECENT_S) > now - RECENT_S:
            ids = self._clients_of(group)
            named = f": clients {_named(ids)}" if ids else ""
            raise Refusal(
                RefusalKind.NOT_PERMITTED,
                f"group {group} is consumed by pulls, and cannot be by pop at the same time{named}. Give these "
                f"consumers a group of their own, or stop those for {RECENT_S:g} s",
            )
        self._pulled.pop(group, None)
        clients = self._popped.setdefault(group, {})
        if client_id in clients or len(clients) < NAMED_MAX:
            clients[client_id] = now
        else:  # any of them will do
            clients.pop(next(iter(clients)))
            clients[client_id] = now
        self._popped.move_to_end(group)
        if len(self._popped) > GROUPS_MAX:
            self._popped.popitem(last=False)


def _named(ids: list[str] | tuple[str, ...]) -> str:
    more = f" and {len(ids) - NAMED_MAX} more" if len(ids) > NAMED_MAX else ""
    return ", ".join(ids[:NAMED_MAX]) + more
