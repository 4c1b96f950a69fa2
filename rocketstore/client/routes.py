"""A client's routes of topics, and the address books of the groups in them: both follow the name servers."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import field, replace
from typing import Final

from dledger.client.discovery import Directory, parse_addresses
from dledger.client.security import ClientSecurity
from dledger.errors import DLedgerError
from dledger.records import record
from rocketstore.client.frames import open_frames
from rocketstore.client.spread import Route, route_of
from rocketstore.nameserver.groups import BrokerGroup, TopicShare, groups_of, shares_of
from rocketstore.nameserver.lookups import REFRESH_S, ROUTES_MAX, TIMEOUT_S, NameServers

UNKNOWN_REFRESH_S: Final = 0.5
"""How often a topic without a route is looked up."""
DOUBTED_REFRESH_S: Final = 5.0
"""How often a route is looked up whose group fails."""
MISSING_S: Final = 30.0
"""How long a group stays in a route that name servers no longer know: one that was restarted knows it again once its
brokers have registered, RocketMQ's every 30 s. Otherwise keys would change their queues meanwhile.
"""


@record(frozen=True, slots=True)
class _Known:
    route: Route | None
    asked_at: float
    until: float
    failure: DLedgerError | None = None
    missing: Mapping[str, float] = field(default_factory=dict)
    """Groups in the route that name servers do not know, and since when."""


class Routes:
    """Has at most one request in progress. An old route stays in use while no name server answers."""

    def __init__(self, name_servers: Sequence[str] | str, timeout_s: float, security: ClientSecurity) -> None:
        addresses = parse_addresses(name_servers)
        self._frames = open_frames(addresses, security)
        self._name_servers = NameServers(addresses, self._frames, timeout_s=min(timeout_s, TIMEOUT_S))
        self._lock = threading.Lock()  # guards the fields below, and is held during a request
        self._known: dict[str, _Known] = {}
        self._directories: dict[str, tuple[BrokerGroup, Directory]] = {}

    def close(self) -> None:
        """Close the connections to the name servers. Idempotent."""
        self._frames.close()

    def find(self, topic: str) -> Route | None:
        """Where a topic is; None if no name server knows it. Raises ``NameServerError`` if nothing is cached."""
        known = self._known.get(topic)
        usable = known is not None and known.route is not None
        if known is not None and (time.monotonic() < known.until or (usable and self._lock.locked())):
            return _answer(known)
        with self._lock:
            known = self._known.get(topic)
            if known is None or time.monotonic() >= known.until:  # otherwise another one asked while we waited
                known = self._ask(topic, known)
                self._known.pop(topic, None)
                self._known[topic] = known
                if len(self._known) > ROUTES_MAX:
                    self._known.pop(next(iter(self._known)), None)
            return _answer(known)

    def doubt(self, topic: str) -> None:
        """Look the route up soon: something in it does not work."""
        known = self._known.get(topic)
        if known is not None and known.until > known.asked_at + DOUBTED_REFRESH_S:
            self._known[topic] = replace(known, until=known.asked_at + DOUBTED_REFRESH_S)

    def missing(self, topic: str) -> Collection[str]:
        """The groups of the route that name servers do not know any more."""
        known = self._known.get(topic)
        return () if known is None else known.missing.keys()

    def groups(self) -> tuple[BrokerGroup, ...]:
        """All registered groups. Raises ``NameServerError``."""
        return groups_of(self._name_servers.clusters())

    def directory(self, group: BrokerGroup) -> Directory:
        """The address book of a group, which follows later routes."""
        found = self._directories.get(group.name)
        if found is None:
            found = self._directories[group.name] = (group, Directory(group.addresses, leader_is="master"))
        return found[1]

    def _ask(self, topic: str, before: _Known | None) -> _Known:
        asked_at = time.monotonic()
        try:
            found = self._name_servers.route(topic, refresh=True)
            shares = () if found is None else shares_of(found)
        except DLedgerError as error:
            if before is not None and before.route is not None:
                return _Known(before.route, asked_at, asked_at + REFRESH_S)
            return _Known(None, asked_at, asked_at + UNKNOWN_REFRESH_S, error)
        for one in shares:
            self._follow(one.group)
        missing = _missing(shares, before, asked_at)
        if found is None and not missing:
            return _Known(None, asked_at, asked_at + UNKNOWN_REFRESH_S)
        kept = () if before is None or before.route is None else before.route.shares
        shares = (*shares, *(one for one in kept if one.group.name in missing))
        route = route_of(sorted(shares, key=lambda one: one.group.name))
        return _Known(route, asked_at, asked_at + (DOUBTED_REFRESH_S if missing else REFRESH_S), missing=missing)

    def _follow(self, group: BrokerGroup) -> None:
        known = self._directories.get(group.name)
        if known is not None and set(known[0].addresses) != set(group.addresses):
            known[1].replace_given(group.addresses)
            self._directories[group.name] = group, known[1]


def _missing(shares: Sequence[TopicShare], before: _Known | None, now: float) -> dict[str, float]:
    """The groups of the route before that are not in these shares, without those that have not been for too long."""
    if before is None or before.route is None:
        return {}
    found = {one.group.name for one in shares}
    since = {
        name: before.missing.get(name, now) for one in before.route.shares if (name := one.group.name) not in found
    }
    return {name: at for name, at in since.items() if now - at < MISSING_S}


def _answer(known: _Known) -> Route | None:
    if known.failure is not None:
        raise known.failure
    return known.route
