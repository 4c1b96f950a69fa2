"""``ClusterAdmin``: the groups of brokers behind name servers, with an ``Admin`` for each."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from dledger.client.discovery import Directory, parse_addresses
from dledger.client.security import ClientSecurity
from rocketstore.client.admin import Admin
from rocketstore.client.errors import NotFoundError
from rocketstore.client.frames import open_frames
from rocketstore.nameserver.groups import BrokerGroup, groups_of, shares_of
from rocketstore.nameserver.lookups import NameServers


class ClusterAdmin:
    """Needs no address of a broker: it asks ``name_servers``. Thread-safe.

    ``timeout_s`` is the time for one request to a name server, and for one call of an ``Admin``.
    """

    def __init__(
        self, name_servers: Sequence[str] | str, *, timeout_s: float = 5.0, security: ClientSecurity | None = None
    ) -> None:
        addresses = parse_addresses(name_servers)
        self._timeout_s = timeout_s
        self._security = security or ClientSecurity()
        self._frames = open_frames(addresses, self._security)
        self._name_servers = NameServers(addresses, self._frames, timeout_s=timeout_s)
        self._lock = threading.Lock()  # guards what follows
        self._admins: dict[str, tuple[Directory, Admin]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close every connection. Idempotent."""
        self._frames.close()
        with self._lock:
            admins = [admin for _, admin in self._admins.values()]
        for one in admins:
            one.close()

    def groups(self) -> tuple[BrokerGroup, ...]:
        """All registered groups. Raises ``NotFoundError`` if there are none, and ``NameServerError``."""
        found = groups_of(self._name_servers.clusters())
        if not found:
            raise NotFoundError("no broker has registered with the name server")
        return found

    def group(self, name: str) -> BrokerGroup:
        """The group of this name. Raises ``NotFoundError``, which lists those that exist."""
        found = self.groups()
        for one in found:
            if one.name == name:
                return one
        raise NotFoundError(f"no brokers named {name} have registered, only {', '.join(one.name for one in found)}")

    def groups_with(self, topic: str) -> tuple[BrokerGroup, ...]:
        """The groups that have a topic. Raises ``NotFoundError``."""
        route = self._name_servers.route(topic, refresh=True)
        found = () if route is None else shares_of(route)
        if not found:
            raise NotFoundError(f"topic {topic} does not exist: no name server has a route to it")
        return tuple(one.group for one in found)

    def at(self, group: BrokerGroup) -> Admin:
        """An ``Admin`` of this group, which is closed together with this object."""
        with self._lock:
            known = self._admins.get(group.name)
            if known is not None:
                known[0].replace_given(group.addresses)
                return known[1]
            directory = Directory(group.addresses, leader_is="master")
            admin = Admin(directory, timeout_s=self._timeout_s, security=self._security)
            self._admins[group.name] = directory, admin
            return admin
