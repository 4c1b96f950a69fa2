"""The connected clients: producers and consumers by group, from their heartbeats. In memory, per node.

Clients send heartbeats to all brokers, so every node has its own tables and none are replicated. Clients of one group
must have the same subscriptions. If they have not, which is told (``Trouble``), those of a group are what was new last,
in the order in which this broker heard of it: RocketMQ goes by the versions, which are times of the clients' clocks, so
a slow one could not change anything.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Final, NamedTuple, Protocol

from dledger.remoting.codes import AnswerCode
from dledger.remoting.connection import DisconnectedError, Place
from dledger.remoting.errors import RequestError
from dledger.remoting.frame import Frame
from rocketstore.remoting.bodies.clients import (
    ConsumeFromWhere,
    ConsumerData,
    ConsumerIdList,
    ConsumeType,
    HeartbeatData,
    MessageModel,
    SubscriptionData,
)

SILENT_S_MAX: Final = 120.0
"""RocketMQ's: a client without a heartbeat for this long is dropped."""
MEMBERS_MAX: Final = 200_000
"""Maximum memberships in groups, of all clients together."""
CONNECTION_MEMBERS_MAX: Final = 4096
"""The maximum for one connection."""
HEARTBEAT_SUBSCRIPTIONS_MAX: Final = 4096
"""Maximum subscriptions in one heartbeat: those of all groups of a client."""
SUBSCRIPTION_BYTES_MAX: Final = 256 * 1024 * 1024
"""About what the subscriptions of all groups may take."""
CLIENT_ID_CHARS_MAX: Final = 1024
NAME_CHARS_MAX: Final = 255
"""RocketMQ's, for the name of a group."""
_SUBSCRIPTION_BYTES: Final = 512
_SAID_BYTES: Final = 128
MEETINGS: Final = 3
MET_MAX: Final = 1024
MEETINGS_S: Final = 120.0
"""So many connections of one client id within this time, each while another is there, are of two clients."""
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


class StreamLink:
    """A stream of ours. What it is told is noted until ``news`` is awaited."""

    def __init__(self, place: Place, may_send: Callable[[str], bool] = lambda _topic: False) -> None:
        self._place = place
        self.may_send = may_send
        """Whether its account may send to a topic, and so be asked about transactions there."""
        self.news = asyncio.Event()
        self.closed_because = ""

    @property
    def place(self) -> Place:
        """The client's address."""
        return self._place

    def tell(self, request: Frame) -> bool:  # noqa: ARG002  # as for every client
        """Returns whether the client will hear of it."""
        return False

    async def call(self, request: Frame, timeout_s: float) -> Frame:  # noqa: ARG002  # as for every client
        """Raises ``DisconnectedError``: these clients answer no requests."""
        raise DisconnectedError(f"the client at {self._place} uses gRPC and answers no requests of code {request.code}")

    def close(self, reason: str) -> None:
        """End the stream."""
        self.closed_because = reason
        self.news.set()


class Trouble(Enum):
    """What is wrong with the members of a consumer group."""

    SUBSCRIPTIONS = "subscriptions"
    CLIENT_ID = "client id"


class Said(NamedTuple):
    """What a client said about a topic: its version of that, and a digest of the rest."""

    version: int
    digest: int


class Client:
    """One member of a group."""

    __slots__ = ("client_id", "connection", "heard_at", "language", "said", "version")

    def __init__(self, client_id: str, connection: ClientLink, language: int, version: int, now: float) -> None:
        self.client_id = client_id
        self.connection = connection
        self.language = language
        self.version = version
        self.heard_at = now
        """In the loop's time."""
        self.said: dict[str, Said] = {}
        """As a consumer, by topic."""


class ConsumerGroup:
    """The consumers of one group, and its subscriptions."""

    __slots__ = (
        "_digests",
        "_encoded_ids",
        "_ids",
        "_met",
        "_said",
        "clients",
        "consume_from_where",
        "consume_type",
        "message_model",
        "owner",
        "subscription_bytes",
        "subscriptions",
    )

    def __init__(self) -> None:
        self._encoded_ids = b""
        self._ids: Counter[str] = Counter()
        self._met: dict[str, tuple[int, float]] = {}  # how often one connected while another of its id was there, since
        self._said = 0  # how much, of all clients
        self._digests: dict[str, Counter[int]] = {}  # of what clients say, by topic
        self.owner = ""
        """Whose share the subscriptions take up."""
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
        self._ids[client.client_id] += 1
        if known is not None:
            client.said = known.said
            _take(self._ids, known.client_id, 1)
        if known is not None and known.client_id == client.client_id:
            return False
        self._encoded_ids = b""
        return True

    def remove(self, connection: ClientLink) -> bool:
        """Remove a client; returns whether it was here."""
        self._encoded_ids = b""
        known = self.clients.pop(connection, None)
        if known is None:
            return False
        _take(self._ids, known.client_id, 1)
        if not self.clients:
            self._met.clear()
        self._forget(known)
        return True

    def namesake(self, client: Client, before: float | None) -> Client | None:
        """Another client of the same id that has been heard since ``before``, the last heartbeat of this one (None: it
        is new).

        One that has connected again is heard at its old connection no more; two that connect again and again, because
        they get the same queues, do so while the other is there.
        """
        name = client.client_id
        if self._ids[name] < 2:  # itself
            return None
        if before is None:
            count, since = self._met.get(name, (0, client.heard_at))
            count, since = (0, client.heard_at) if client.heard_at - since > MEETINGS_S else (count, since)
            if len(self._met) >= MET_MAX:
                self._met.clear()
            self._met[name] = count + 1, since
            if count + 1 < MEETINGS:
                return None
        others = (one for one in self.clients.values() if one.client_id == name and one is not client)
        return next((one for one in others if before is None or one.heard_at >= before), None)

    def differing(self, client: Client) -> tuple[str, Client] | None:
        """A topic to which another client subscribes differently, and that client."""
        if self.message_model is MessageModel.BROADCASTING:
            return None
        for topic, said in client.said.items():
            if len(self._digests[topic]) > 1:
                others = (one for one in self.clients.values() if topic in one.said)
                found = next((one for one in others if one.said[topic].digest != said.digest), None)
                if found is not None:
                    return topic, found
        return None

    def _forget(self, client: Client) -> None:
        for topic, said in client.said.items():
            counts = self._digests[topic]
            counts[said.digest] -= 1
            if not counts[said.digest]:
                del counts[said.digest]
            if not counts:
                del self._digests[topic]
        self._said -= len(client.said)
        client.said = {}

    @property
    def ids(self) -> tuple[str, ...]:
        """The clients' ids. One that has connected again, and whose old connection has not ended yet, is one client:
        counted twice, it would be given queues that it does not take.
        """
        return tuple(dict.fromkeys(one.client_id for one in self.clients.values()))

    def encoded_ids(self) -> bytes:
        """The clients' ids as the body of an answer: after each change, all of them ask for it."""
        if not self._encoded_ids:
            self._encoded_ids = ConsumerIdList(self.ids).encode()
        return self._encoded_ids

    def newest(self, connection: ClientLink, data: ConsumerData) -> dict[str, SubscriptionData]:
        """What the group subscribes to after a client's heartbeat, by topic: what it has not said before counts."""
        client = self.clients.get(connection)
        said = {} if client is None else client.said
        found: dict[str, SubscriptionData] = {}
        for one in data.subscription_data_set:
            known, before = self.subscriptions.get(one.topic), said.get(one.topic)
            is_old = known is not None and before is not None and before.digest == _digest(one)
            found[one.topic] = known if known is not None and is_old else one
        return found

    def bytes_after(self, connection: ClientLink, data: ConsumerData) -> int:
        """``subscription_bytes`` after a client's heartbeat."""
        client = self.clients.get(connection)
        said = self._said - (0 if client is None else len(client.said)) + len(data.subscription_data_set)
        return _bytes_of(self.newest(connection, data).values()) + _SAID_BYTES * said

    def version_of(self, connection: ClientLink, topic: str) -> int:
        """The newest version of its subscription that a client, or the group, is known to have."""
        client, known = self.clients.get(connection), self.subscriptions.get(topic)
        said = None if client is None else client.said.get(topic)
        return max(-1 if said is None else said.version, -1 if known is None else known.sub_version)

    def subscribe(self, client: Client, data: ConsumerData) -> bool:
        """Apply a client's heartbeat; returns whether a topic was added or removed."""
        self.consume_type = data.consume_type
        self.message_model = data.message_model
        self.consume_from_where = data.consume_from_where
        wanted = self.newest(client.connection, data)
        self._forget(client)
        client.said = {one.topic: Said(one.sub_version, _digest(one)) for one in data.subscription_data_set}
        for topic, said in client.said.items():
            self._digests.setdefault(topic, Counter())[said.digest] += 1
        changed = wanted.keys() != self.subscriptions.keys()
        self.subscriptions = wanted
        self._said += len(client.said)
        self.subscription_bytes = _bytes_of(wanted.values()) + _SAID_BYTES * self._said
        return changed


class ClientTables:
    """On the loop. ``changed`` is called for a consumer group whose clients or topics have changed.

    ``share_percent``: of the limits, what the clients of one owner may use, an account or an address. ``tell`` gets
    what is wrong with a group's members, at each heartbeat that shows it.
    """

    def __init__(
        self,
        now: Callable[[], float],
        changed: Callable[[str], None],
        share_percent: int = 100,
        tell: Callable[[Trouble, str, str], None] = lambda _trouble, _group, _message: None,
    ) -> None:
        self._now = now
        self._tell = tell
        self._changed = changed
        self._share_percent = share_percent
        self._owners: dict[ClientLink, str] = {}
        self._consumers: dict[str, ConsumerGroup] = {}
        self._producers: dict[str, dict[ClientLink, Client]] = {}
        self._groups_of: dict[ClientLink, tuple[set[str], set[str]]] = {}  # as consumer, as producer
        self._producer_ids: dict[ClientLink, str] = {}
        self._producer_at: dict[str, ClientLink] = {}  # by id, the last that had it
        self._members: Counter[str] = Counter()  # by owner
        self._subscription_bytes: Counter[str] = Counter()  # by the owner of the last heartbeat

    def heartbeat(
        self, connection: ClientLink, language: int, version: int, beat: HeartbeatData, owner: str = ""
    ) -> None:
        """Record the groups in a client's heartbeat. Raises ``RequestError`` if there are too many."""
        if len(beat.client_id) > CLIENT_ID_CHARS_MAX:
            raise RequestError(
                f"a client id of {len(beat.client_id)} characters: at most {CLIENT_ID_CHARS_MAX} are allowed"
            )
        if any(len(one.group_name) > NAME_CHARS_MAX for one in beat.producer_data_set):
            raise RequestError(f"a producer group's name has more than {NAME_CHARS_MAX} characters")
        subscriptions = sum(len(one.subscription_data_set) for one in beat.consumer_data_set)
        if subscriptions > HEARTBEAT_SUBSCRIPTIONS_MAX:
            raise RequestError(
                f"{subscriptions} subscriptions of one client: at most {HEARTBEAT_SUBSCRIPTIONS_MAX} are allowed"
            )
        as_consumer, as_producer = self._groups_of.setdefault(connection, (set(), set()))
        owner = self._owners.setdefault(connection, owner)
        named = {one.group_name for one in beat.consumer_data_set} - as_consumer
        named_producers = {one.group_name for one in beat.producer_data_set} - as_producer
        new = len(named) + len(named_producers)
        if len(as_consumer) + len(as_producer) + new > CONNECTION_MEMBERS_MAX:
            raise RequestError("too many groups for one connection", AnswerCode.SYSTEM_BUSY)
        self._check_room("groups", self._members, owner, new, new, MEMBERS_MAX)
        groups = {data.group_name: data for data in beat.consumer_data_set}
        known = {name: self._consumers.get(name) or ConsumerGroup() for name in groups}
        total = sum(known[name].bytes_after(connection, data) for name, data in groups.items())
        more = total - sum(one.subscription_bytes for one in known.values())
        of_owner = total - sum(one.subscription_bytes for one in known.values() if one.owner == owner)
        self._check_room("subscriptions", self._subscription_bytes, owner, more, of_owner, SUBSCRIPTION_BYTES_MAX)
        now = self._now()
        for data in groups.values():
            self._consumer_beat(Client(beat.client_id, connection, language, version, now), data, owner)
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
        self._members[owner] += new

    def _check_room(self, what: str, used: Counter[str], owner: str, more: int, of_owner: int, limit: int) -> None:
        """Raises ``RequestError`` if there is no room for ``more`` in all, or for ``of_owner`` of the owner."""
        if more > 0 and used.total() + more > limit:
            raise RequestError(f"too many {what} for this broker", AnswerCode.SYSTEM_BUSY)
        if of_owner > 0 and used[owner] + of_owner > limit * self._share_percent // 100:
            reason = f"too many {what} of this client's account or address (account_share_percent)"
            raise RequestError(reason, AnswerCode.SYSTEM_BUSY)

    def _consumer_beat(self, client: Client, data: ConsumerData, owner: str) -> None:
        group = self._consumers.setdefault(data.group_name, ConsumerGroup())
        _take(self._subscription_bytes, group.owner, group.subscription_bytes)
        known = group.clients.get(client.connection)
        is_new = group.put(client)
        is_changed = group.subscribe(client, data)
        self._look(data.group_name, group, client, None if known is None else known.heard_at)
        group.owner = owner
        self._subscription_bytes[owner] += group.subscription_bytes
        if is_new or is_changed:
            self._changed(data.group_name)

    def _look(self, name: str, group: ConsumerGroup, client: Client, heard_at: float | None) -> None:
        """Tell what is wrong with a group that a client belongs to, last heard at ``heard_at``."""
        namesake = group.namesake(client, heard_at)
        if namesake is not None:
            self._tell(
                Trouble.CLIENT_ID,
                name,
                f"two consumers of group {name} have the client id {client.client_id}, at {client.connection.place} "
                f"and {namesake.connection.place}: some queues are read twice and others by nobody. Give each an "
                "id of its own (instanceName in Java)",
            )
        differing = group.differing(client)
        if differing is not None:
            topic, other = differing
            self._tell(
                Trouble.SUBSCRIPTIONS,
                name,
                f"consumers of group {name} subscribe to topic {topic} with different tags ({client.client_id} and "
                f"{other.client_id}): each misses the messages in the other's queues. Give each subscription a group "
                "of its own",
            )

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
        _take(self._members, self._owners.pop(connection, ""), len(as_consumer) + len(as_producer))

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
        """One consumer by its id, at its newest connection."""
        found = self._consumers.get(group)
        if found is None:
            return None
        return next((one for one in reversed(found.clients.values()) if one.client_id == client_id), None)

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
            _take(self._members, self._owners[connection], 1)

    def _leave_consumers(self, connection: ClientLink, name: str) -> None:
        group = self._consumers.get(name)
        if group is None or not group.remove(connection):
            return
        if not group.clients:
            del self._consumers[name]
            _take(self._subscription_bytes, group.owner, group.subscription_bytes)
        if connection in self._groups_of:
            self._groups_of[connection][0].discard(name)
            _take(self._members, self._owners[connection], 1)
        self._changed(name)


def _take(counts: Counter[str], owner: str, number: int) -> None:
    counts[owner] -= number
    if not counts[owner]:
        del counts[owner]


def _digest(one: SubscriptionData) -> int:
    """Of what is selected, however it is written."""
    selected = frozenset(one.tags_set) if one.tags_set else one.sub_string
    return hash((selected, one.expression_type, one.class_filter_mode))


def _bytes_of(subscriptions: Iterable[SubscriptionData]) -> int:
    return sum(
        _SUBSCRIPTION_BYTES
        + len(one.topic)
        + len(one.sub_string)
        + sum(map(len, one.tags_set))
        + _TAG_BYTES * max(len(one.tags_set), len(one.code_set))
        for one in subscriptions
    )
