"""The connected clients: producers and consumers by group, from their heartbeats. In memory, per node.

Clients send heartbeats to all brokers, so every node has its own tables and none are replicated. The subscriptions of a
group are those of its last heartbeat, as in RocketMQ: clients of one group must have the same subscriptions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, Protocol

from rocketstore.remoting.bodies.clients import (
    ConsumeFromWhere,
    ConsumerData,
    ConsumerIdList,
    ConsumeType,
    HeartbeatData,
    MessageModel,
    SubscriptionData,
)
from rocketstore.remoting.codes import AnswerCode
from rocketstore.remoting.connection import Place
from rocketstore.remoting.errors import RequestError
from rocketstore.remoting.frame import Frame

SILENT_S_MAX: Final = 120.0
"""RocketMQ's: a client without a heartbeat for this long is dropped."""
MEMBERS_MAX: Final = 200_000
"""Maximum memberships in groups, of all clients together."""
CONNECTION_MEMBERS_MAX: Final = 4096
"""The maximum for one connection."""
SUBSCRIPTION_BYTES_MAX: Final = 256 * 1024 * 1024
"""About what the subscriptions of all groups may take."""
CLIENT_ID_CHARS_MAX: Final = 1024
NAME_CHARS_MAX: Final = 255
"""RocketMQ's, for the name of a group."""
_SUBSCRIPTION_BYTES: Final = 512
"""About what one takes, and one tag with its hash, besides their texts."""
_TAG_BYTES: Final = 128


class ClientLink(Protocol):
    """A client's connection: of RocketMQ's remoting protocol, or a stream of ours."""

    @property
    def place(self) -> Place:
        """Where the client is."""

    def tell(self, request: Frame) -> bool:
        """Send a request that has no answer; returns whether it could be sent."""

    async def call(self, request: Frame, timeout_s: float) -> Frame:
        """Ask the client."""

    def close(self, reason: str) -> None:
        """Hang up."""


class Client:
    """One member of a group."""

    __slots__ = ("client_id", "connection", "heard_at", "language", "version")

    def __init__(self, client_id: str, connection: ClientLink, language: int, version: int, now: float) -> None:
        self.client_id = client_id
        self.connection = connection
        self.language = language
        self.version = version
        self.heard_at = now
        """In the loop's time."""


class ConsumerGroup:
    """The consumers of one group, and its subscriptions."""

    __slots__ = (
        "_encoded_ids",
        "clients",
        "consume_from_where",
        "consume_type",
        "message_model",
        "subscription_bytes",
        "subscriptions",
    )

    def __init__(self) -> None:
        self._encoded_ids = b""
        self.subscription_bytes = 0
        """About how much memory the subscriptions take."""
        self.clients: dict[ClientLink, Client] = {}
        self.subscriptions: dict[str, SubscriptionData] = {}
        self.consume_type = ConsumeType.CONSUME_PASSIVELY
        self.message_model = MessageModel.CLUSTERING
        self.consume_from_where = ConsumeFromWhere.CONSUME_FROM_LAST_OFFSET

    def put(self, client: Client) -> bool:
        """Add or refresh a client; returns whether it is a new one."""
        known = self.clients.get(client.connection)
        self.clients[client.connection] = client
        if known is not None and known.client_id == client.client_id:
            return False
        self._encoded_ids = b""
        return True

    def remove(self, connection: ClientLink) -> bool:
        """Remove a client; returns whether it was here."""
        self._encoded_ids = b""
        return self.clients.pop(connection, None) is not None

    def encoded_ids(self) -> bytes:
        """The clients' ids as the body of an answer: after each change, all of them ask for it."""
        if not self._encoded_ids:
            self._encoded_ids = ConsumerIdList(tuple(one.client_id for one in self.clients.values())).encode()
        return self._encoded_ids

    def subscribe(self, data: ConsumerData) -> bool:
        """Apply a heartbeat; returns whether a topic was added or removed."""
        self.consume_type = data.consume_type
        self.message_model = data.message_model
        self.consume_from_where = data.consume_from_where
        wanted = {one.topic: one for one in data.subscription_data_set}
        changed = wanted.keys() != self.subscriptions.keys()
        for topic, one in wanted.items():
            known = self.subscriptions.get(topic)
            if known is not None and known.sub_version > one.sub_version:
                wanted[topic] = known
        self.subscriptions = wanted
        self.subscription_bytes = _bytes_of(data)
        return changed


class ClientTables:
    """On the loop. ``changed`` is called for a consumer group whose clients or topics have changed."""

    def __init__(self, now: Callable[[], float], changed: Callable[[str], None]) -> None:
        self._now = now
        self._changed = changed
        self._consumers: dict[str, ConsumerGroup] = {}
        self._producers: dict[str, dict[ClientLink, Client]] = {}
        self._groups_of: dict[ClientLink, tuple[set[str], set[str]]] = {}  # as consumer, as producer
        self._producer_ids: dict[ClientLink, str] = {}
        self._producer_at: dict[str, ClientLink] = {}  # by id, the last that had it
        self._members = 0
        self._subscription_bytes = 0

    def heartbeat(self, connection: ClientLink, language: int, version: int, beat: HeartbeatData) -> None:
        """Record the groups in a client's heartbeat. Raises ``RequestError`` if there are too many."""
        if len(beat.client_id) > CLIENT_ID_CHARS_MAX:
            raise RequestError(
                f"a client id of {len(beat.client_id)} characters: at most {CLIENT_ID_CHARS_MAX} are allowed"
            )
        if any(len(one.group_name) > NAME_CHARS_MAX for one in beat.producer_data_set):
            raise RequestError(f"a producer group's name has more than {NAME_CHARS_MAX} characters")
        as_consumer, as_producer = self._groups_of.setdefault(connection, (set(), set()))
        named = {one.group_name for one in beat.consumer_data_set} - as_consumer
        named_producers = {one.group_name for one in beat.producer_data_set} - as_producer
        new = len(named) + len(named_producers)
        if len(as_consumer) + len(as_producer) + new > CONNECTION_MEMBERS_MAX or self._members + new > MEMBERS_MAX:
            raise RequestError("too many groups for one connection, or for this broker", AnswerCode.SYSTEM_BUSY)
        more = sum(_bytes_of(data) - self._bytes_known(data.group_name) for data in beat.consumer_data_set)
        if more > 0 and self._subscription_bytes + more > SUBSCRIPTION_BYTES_MAX:
            raise RequestError("too many subscriptions for this broker", AnswerCode.SYSTEM_BUSY)
        now = self._now()
        for data in beat.consumer_data_set:
            self._consumer_beat(Client(beat.client_id, connection, language, version, now), data)
            as_consumer.add(data.group_name)
        if beat.producer_data_set and self._producer_ids.get(connection) != beat.client_id:
            self._forget_id(connection)
            self._producer_ids[connection] = beat.client_id
        if beat.producer_data_set:
            self._producer_at[beat.client_id] = connection
        for producer in beat.producer_data_set:
            clients = self._producers.setdefault(producer.group_name, {})
            clients[connection] = Client(beat.client_id, connection, language, version, now)
            as_producer.add(producer.group_name)
        self._members += new

    def _bytes_known(self, name: str) -> int:
        group = self._consumers.get(name)
        return 0 if group is None else group.subscription_bytes

    def _consumer_beat(self, client: Client, data: ConsumerData) -> None:
        group = self._consumers.setdefault(data.group_name, ConsumerGroup())
        self._subscription_bytes -= group.subscription_bytes
        is_new = group.put(client)
        is_changed = group.subscribe(data)
        self._subscription_bytes += group.subscription_bytes
        if is_new or is_changed:
            self._changed(data.group_name)

    def unregister(self, connection: ClientLink, producer_group: str, consumer_group: str) -> None:
        """Remove a client from these groups; an empty name means none."""
        if producer_group:
            self._leave_producers(connection, producer_group)
        if consumer_group:
            self._leave_consumers(connection, consumer_group)

    def closed(self, connection: ClientLink) -> None:
        """Remove a disconnected client."""
        self._forget_id(connection)
        as_consumer, as_producer = self._groups_of.pop(connection, (set(), set()))
        for name in tuple(as_producer):
            self._leave_producers(connection, name)
        for name in tuple(as_consumer):
            self._leave_consumers(connection, name)
        self._members -= len(as_consumer) + len(as_producer)

    def silent(self) -> list[ClientLink]:
        """Connections of clients whose last heartbeat is too old."""
        before = self._now() - SILENT_S_MAX
        found: dict[ClientLink, None] = {}
        for clients in (*(group.clients for group in self._consumers.values()), *self._producers.values()):
            found.update(dict.fromkeys(connection for connection, one in clients.items() if one.heard_at < before))
        return list(found)

    # -- questions -----------------------------------------------------------------------------------------------------

    def consumers(self, group: str) -> ConsumerGroup | None:
        """The consumers of a group, or None if it has none."""
        return self._consumers.get(group)

    def producers(self, group: str) -> Iterable[Client]:
        """The producers of a group."""
        return self._producers.get(group, {}).values()

    def consumer(self, group: str, client_id: str) -> Client | None:
        """One consumer by its id."""
        found = self._consumers.get(group)
        if found is None:
            return None
        return next((one for one in found.clients.values() if one.client_id == client_id), None)

    def producer_by_id(self, client_id: str) -> Client | None:
        """Any producer with this id."""
        connection = self._producer_at.get(client_id)
        if connection is None:
            return None
        return next((self._producers[name][connection] for name in self._groups_of[connection][1]), None)

    def groups_of(self, connection: ClientLink) -> Iterable[str]:
        """In which groups a client consumes."""
        as_consumer, _as_producer = self._groups_of.get(connection, (frozenset[str](), frozenset[str]()))
        return as_consumer

    def consumer_groups(self) -> list[str]:
        """All groups with consumers."""
        return list(self._consumers)

    def producer_groups(self) -> list[str]:
        """All groups with producers."""
        return list(self._producers)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _forget_id(self, connection: ClientLink) -> None:
        client_id = self._producer_ids.pop(connection, "")
        if self._producer_at.get(client_id) is connection:
            del self._producer_at[client_id]

    def _leave_producers(self, connection: ClientLink, name: str) -> None:
        clients = self._producers.get(name, {})
        if clients.pop(connection, None) is None:
            return
        if not clients:
            del self._producers[name]
        if connection in self._groups_of:
            self._groups_of[connection][1].discard(name)
            self._members -= 1

    def _leave_consumers(self, connection: ClientLink, name: str) -> None:
        group = self._consumers.get(name)
        if group is None or not group.remove(connection):
            return
        if not group.clients:
            del self._consumers[name]
            self._subscription_bytes -= group.subscription_bytes
        if connection in self._groups_of:
            self._groups_of[connection][0].discard(name)
            self._members -= 1
        self._changed(name)


def _bytes_of(data: ConsumerData) -> int:
    return sum(
        _SUBSCRIPTION_BYTES
        + len(one.topic)
        + len(one.sub_string)
        + sum(map(len, one.tags_set))
        + _TAG_BYTES * max(len(one.tags_set), len(one.code_set))
        for one in data.subscription_data_set
    )
