"""Where the topics of a member's group are: at brokers whose addresses were given, or wherever name servers know."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from dledger.access.permissions import RETRY_PREFIX
from dledger.client.security import ClientSecurity
from dledger.errors import DLedgerError
from rocketstore.client.connection import BrokerConnection
from rocketstore.client.errors import NotFoundError
from rocketstore.client.routes import Routes
from rocketstore.client.topic_cache import TopicCache, no_such_topic
from rocketstore.nameserver.groups import BrokerGroup, TopicShare


class Places(Protocol):
    """Both kinds. Used by one thread at a time, but for ``stop``."""

    def find(self, topic: str, answering: Collection[str] = ()) -> tuple[TopicShare, ...] | None:
        """The shares of a topic; None if it does not exist. Raises ``DLedgerError`` if that is unknown.

        ``answering``: the names of groups of brokers that answer.
        """

    def missing(self, topic: str) -> DLedgerError:
        """The error for a topic that was not found."""

    def connect(self, group: BrokerGroup) -> BrokerConnection:
        """A connection, which the caller closes."""

    def stop(self) -> None:
        """Let a call in progress end."""

    def close(self) -> None:
        """Close what is open. Idempotent."""


class GivenBrokers:
    """One group of brokers, with an empty name."""

    def __init__(self, addresses: Sequence[str] | str, timeout_s: float, security: ClientSecurity) -> None:
        self._connection = BrokerConnection(addresses, timeout_s=timeout_s, security=security)
        self._topics = TopicCache(self._connection)
        self._group = BrokerGroup("", "", self._connection.directory.addresses, has_master=True)

    def find(self, topic: str, answering: Collection[str] = ()) -> tuple[TopicShare, ...] | None:  # noqa: ARG002
        """As the brokers know it."""
        found = self._topics.find(topic)
        if found is None:
            return None
        return (TopicShare(self._group, found.read_queues, found.write_queues, found.permission),)

    def missing(self, topic: str) -> DLedgerError:
        """It does not exist, or access is denied."""
        return no_such_topic(self._connection, topic)

    def connect(self, group: BrokerGroup) -> BrokerConnection:  # noqa: ARG002  # there is only one
        """The connection that is also used here."""
        return self._connection

    def stop(self) -> None:
        """Calls end by their deadline."""

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


class KnownToNameServers:
    """All groups of brokers with a route, also one that name servers forgot, as long as it answers (``MISSING_S``)."""

    def __init__(self, name_servers: Sequence[str] | str, timeout_s: float, security: ClientSecurity) -> None:
        self._timeout_s = timeout_s
        self._security = security
        self._routes = Routes(name_servers, timeout_s, security)

    def find(self, topic: str, answering: Collection[str] = ()) -> tuple[TopicShare, ...] | None:
        """As in the route."""
        route = self._routes.find(topic)
        names = set() if route is None else {one.group.name for one in route.shares}
        if topic.startswith(RETRY_PREFIX) and not names >= set(answering):
            self._routes.doubt(topic)  # each group makes it when members join
        if route is None:
            return None
        gone = set(self._routes.missing(topic)) - set(answering)
        return tuple(one for one in route.shares if one.group.name not in gone)

    def missing(self, topic: str) -> DLedgerError:
        """No name server has a route to it."""
        return NotFoundError(f"topic {topic} does not exist: no name server has a route to it")

    def connect(self, group: BrokerGroup) -> BrokerConnection:
        """Follows later routes."""
        directory = self._routes.directory(group)
        return BrokerConnection(directory, timeout_s=self._timeout_s, security=self._security)

    def stop(self) -> None:
        """Close the connections to name servers, so that a lookup ends."""
        self._routes.close()

    def close(self) -> None:
        """As ``stop``."""
        self._routes.close()
