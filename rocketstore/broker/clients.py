"""The connected clients: producers and consumers by group, from their heartbeats. In memory, per node.

Clients send heartbeats to all brokers, so every node has its own tables and none are replicated. Clients of one group
must have the same subscriptions. If they have not, which is told (``Trouble``), those of a group are what was new last,
in the order in which this broker heard of it: RocketMQ goes by the versions, which are times of the clients' clocks, so
a slow one could not change anything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Final, NamedTuple, Protocol

from dledger.access.rules import RETRY_PREFIX
from dledger.records import record
from rocketstore.broker.refusal import Refusal, RefusalKind
from rocketstore.types import ConsumeFromWhere, ConsumeType, MessageModel

SILENT_S_MAX: Final = 120.0
"""RocketMQ's: a client without a heartbeat for this long is dropped."""
MEMBERS_MAX: Final = 200_000
"""Maximum memberships in groups, of all clients together."""
_CONNECTION_MEMBERS_MAX: Final = 4096
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
_TAG_BYTES: Final = 128
"""About what a subscription, a client's word about one, and a tag with its hash take besides their texts."""
MEETINGS: Final = 3
_MEETINGS_S: Final = 120.0
"""So many connections of one client id within this time, each while another is there, are of two clients."""
_MET_MAX: Final = 1024


class HalfCheck(NamedTuple):
    """A question to a producer: the record of a half message with its real topic and queue, and its places."""

    topic: str
    record: bytes
    queue_offset: int
    offset: int
    message_id: str
    """By its offset in the log."""
    unique_id: str
    """The producer's; may be empty."""


class ClientLink(Protocol):
    """A client's connection, whatever protocol it speaks. Equal links are one connection."""

    @property
    def host(self) -> str:
        """Where the client is: its IP address."""

    @property
    def address(self) -> str:
        """``host:port`` of the client."""

    def may_send(self, topic: str) -> bool:
        """Whether an account that uses it may send to a topic, and so be asked about its transactions."""

    def members_changed(self, group: str) -> bool:
        """Tell a consumer that its group has other members now; returns whether it will hear of it."""

    def check_half(self, check: HalfCheck) -> bool:
        """Ask a producer what became of a transaction; returns whether it will hear of it."""

    def close(self, reason: str) -> None:
        """Hang up."""


@record(frozen=True, slots=True)
class Subscription:
    """A topic that a consumer wants: all of it, or messages with one of the ``tags``, whose hashes are ``codes``."""

    topic: str
    expression: str = "*"
    tags: tuple[str, ...] = ()
    codes: tuple[int, ...] = ()
    version: int = 0
    """A time of the client's clock, in milliseconds."""
    kind: str = "TAG"
    class_filter: bool = False


@record(frozen=True, slots=True)
class ConsumingClient:
    """How a client consumes in a group."""

    group: str
    consume_type: ConsumeType = ConsumeType.CONSUME_PASSIVELY
    message_model: MessageModel = MessageModel.CLUSTERING
    consume_from_where: ConsumeFromWhere = ConsumeFromWhere.CONSUME_FROM_LAST_OFFSET
    subscriptions: tuple[Subscription, ...] = ()


@record(frozen=True, slots=True)
class Heartbeat:
    """In which groups a client produces and consumes. ``language`` and ``version`` are shown to administrators."""

    client_id: str
    producer_groups: tuple[str, ...] = ()
    consumers: tuple[ConsumingClient, ...] = ()
    language: int = 0
    version: int = 0


class Trouble(Enum):
    """A problem of the members of a consumer group."""

    SUBSCRIPTIONS = "subscriptions"
    CLIENT_ID = "client id"


class _Said(NamedTuple):
    """A client's subscription to a topic: its version, and a digest of the rest."""

    version: int
    digest: int


class Client:
    """One member of a group."""

    __slots__ = ("client_id", "heard_at", "language", "link", "said", "version")

    def __init__(self, beat: Heartbeat, link: ClientLink, now: float) -> None:
        self.client_id = beat.client_id
        self.link = link
        self.language = beat.language
        self.version = beat.version
        self.heard_at = now
        """In the loop's time."""
        self.said: dict[str, _Said] = {}
        """As a consumer, by topic."""


class ConsumerGroup:
    """The consumers of one group, and its subscriptions."""

    __slots__ = (
        "__weakref__",
        "_digests",
        "_id_list",
        "_ids",
        "_met",
        "_said",
        "_subscribers",
        "clients",
        "consume_from_where",
        "consume_type",
        "message_model",
        "owner",
        "subscription_bytes",
        "subscriptions",
    )

    def __init__(self) -> None:
        self._id_list: tuple[str, ...] | None = None
        self._ids: Counter[str] = Counter()
        self._met: dict[str, tuple[int, float]] = {}  # how often one connected while another of its id was there, since
        self._said = 0  # how much, of all clients
        self._digests: dict[str, Counter[int]] = {}  # of what clients say, by topic
        self._subscribers = 0  # clients that have said anything
        self.owner = ""
        """Whose share the subscriptions take up."""
        self.subscription_bytes = 0
        """About how much memory the subscriptions take."""
        self.clients: dict[ClientLink, Client] = {}
        self.subscriptions: dict[str, Subscription] = {}
        self.consume_type = ConsumeType.CONSUME_PASSIVELY
        self.message_model = MessageModel.CLUSTERING
        self.consume_from_where = ConsumeFromWhere.CONSUME_FROM_LAST_OFFSET

    def put(self, client: Client) -> bool:
        """Add or refresh a client; returns whether it is a new one."""
        known = self.clients.get(client.link)
        self.clients[client.link] = client
        self._ids[client.client_id] += 1
        if known is not None:
            client.said = known.said
            _take(self._ids, known.client_id, 1)
        if known is not None and known.client_id == client.client_id:
            return False
        self._id_list = None
        return True

    def remove(self, link: ClientLink) -> bool:
        """Remove a client; returns whether it was here."""
        self._id_list = None
        known = self.clients.pop(link, None)
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
            count, since = (0, client.heard_at) if client.heard_at - since > _MEETINGS_S else (count, since)
            if len(self._met) >= _MET_MAX:
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

    def lacking(self, client: Client) -> tuple[str, Client, Client] | None:
        """A topic to which either this client or another one subscribes, which of them does, and which does not."""
        if self.message_model is MessageModel.BROADCASTING or not client.said:
            return None
        for topic, digests in self._digests.items():
            if topic.startswith(RETRY_PREFIX) or digests.total() == self._subscribers:
                continue
            has = topic in client.said
            other = next((one for one in self.clients.values() if one.said and (topic in one.said) != has), None)
            if other is not None:
                return (topic, client, other) if has else (topic, other, client)
        return None

    def _forget(self, client: Client) -> None:
        self._subscribers -= bool(client.said)
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
        """The clients' ids, the same object until they change: after each change, all of them ask for it.

        One that has connected again, and whose old connection has not ended yet, is one client: counted twice, it would
        be given queues that it does not take.
        """
        if self._id_list is None:
            self._id_list = tuple(dict.fromkeys(one.client_id for one in self.clients.values()))
        return self._id_list

    def newest(self, link: ClientLink, data: ConsumingClient) -> dict[str, Subscription]:
        """The group's subscriptions after a client's heartbeat, by topic: those that are new in it count."""
        client = self.clients.get(link)
        said = {} if client is None else client.said
        found: dict[str, Subscription] = {}
        for one in data.subscriptions:
            known, before = self.subscriptions.get(one.topic), said.get(one.topic)
            is_old = known is not None and before is not None and before.digest == _digest(one)
            found[one.topic] = known if known is not None and is_old else one
        return found

    def bytes_after(self, link: ClientLink, data: ConsumingClient) -> int:
        """``subscription_bytes`` after a client's heartbeat."""
        client = self.clients.get(link)
        said = self._said - (0 if client is None else len(client.said)) + len(data.subscriptions)
        return _bytes_of(self.newest(link, data).values()) + _SAID_BYTES * said

    def version_of(self, link: ClientLink, topic: str) -> int:
        """The newest version of its subscription that a client, or the group, is known to have."""
        client, known = self.clients.get(link), self.subscriptions.get(topic)
        said = None if client is None else client.said.get(topic)
        return max(-1 if said is None else said.version, -1 if known is None else known.version)

    def subscribe(self, client: Client, data: ConsumingClient) -> bool:
        """Apply a client's heartbeat; returns whether a topic was added or removed."""
        self.consume_type = data.consume_type
        self.message_model = data.message_model
        self.consume_from_where = data.consume_from_where
        wanted = self.newest(client.link, data)
        self._forget(client)
        client.said = {one.topic: _Said(one.version, _digest(one)) for one in data.subscriptions}
        self._subscribers += bool(client.said)
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

    def heartbeat(self, link: ClientLink, beat: Heartbeat, owner: str = "") -> None:
        """Record the groups in a client's heartbeat. Raises ``Refusal`` if there are too many."""
        if len(beat.client_id) > CLIENT_ID_CHARS_MAX:
            raise Refusal(
                RefusalKind.INVALID,
                f"a client id of {len(beat.client_id)} characters: at most {CLIENT_ID_CHARS_MAX} are allowed",
            )
        if any(len(one) > NAME_CHARS_MAX for one in beat.producer_groups):
            raise Refusal(RefusalKind.INVALID, f"a producer group's name has more than {NAME_CHARS_MAX} characters")
        subscriptions = sum(len(one.subscriptions) for one in beat.consumers)
        if subscriptions > HEARTBEAT_SUBSCRIPTIONS_MAX:
            raise Refusal(
                RefusalKind.INVALID,
                f"{subscriptions} subscriptions of one client: at most {HEARTBEAT_SUBSCRIPTIONS_MAX} are allowed",
            )
        as_consumer, as_producer = self._groups_of.setdefault(link, (set(), set()))
        owner = self._owners.setdefault(link, owner)
        named = {one.group for one in beat.consumers} - as_consumer
        named_producers = set(beat.producer_groups) - as_producer
        new = len(named) + len(named_producers)
        if len(as_consumer) + len(as_producer) + new > _CONNECTION_MEMBERS_MAX:
            raise Refusal(RefusalKind.TOO_MANY, "too many groups for one connection")
        self._check_room("groups", self._members, owner, new, new, MEMBERS_MAX)
        groups = {data.group: data for data in beat.consumers}
        known = {name: self._consumers.get(name) or ConsumerGroup() for name in groups}
        total = sum(known[name].bytes_after(link, data) for name, data in groups.items())
        more = total - sum(one.subscription_bytes for one in known.values())
        of_owner = total - sum(one.subscription_bytes for one in known.values() if one.owner == owner)
        self._check_room("subscriptions", self._subscription_bytes, owner, more, of_owner, SUBSCRIPTION_BYTES_MAX)
        now = self._now()
        for data in groups.values():
            self._consumer_beat(Client(beat, link, now), data, owner)
            as_consumer.add(data.group)
        if beat.producer_groups and self._producer_ids.get(link) != beat.client_id:
            self._forget_id(link)
            self._producer_ids[link] = beat.client_id
        if beat.producer_groups:
            self._producer_at[beat.client_id] = link
        for name in beat.producer_groups:
            clients = self._producers.setdefault(name, {})
            clients[link] = Client(beat, link, now)
            as_producer.add(name)
        self._members[owner] += new

    def _check_room(self, what: str, used: Counter[str], owner: str, more: int, of_owner: int, limit: int) -> None:
        """Raises ``Refusal`` if there is no room for ``more`` in all, or for ``of_owner`` of the owner."""
        if more > 0 and used.total() + more > limit:
            raise Refusal(RefusalKind.TOO_MANY, f"too many {what} for this broker")
        if of_owner > 0 and used[owner] + of_owner > limit * self._share_percent // 100:
            reason = f"too many {what} of this client's account or address (account_share_percent)"
            raise Refusal(RefusalKind.TOO_MANY, reason)

    def _consumer_beat(self, client: Client, data: ConsumingClient, owner: str) -> None:
        group = self._consumers.setdefault(data.group, ConsumerGroup())
        _take(self._subscription_bytes, group.owner, group.subscription_bytes)
        known = group.clients.get(client.link)
        is_new = group.put(client)
        is_changed = group.subscribe(client, data)
        self._look(data.group, group, client, None if known is None else known.heard_at)
        group.owner = owner
        self._subscription_bytes[owner] += group.subscription_bytes
        if is_new or is_changed:
            self._changed(data.group)

    def _look(self, name: str, group: ConsumerGroup, client: Client, heard_at: float | None) -> None:
        """Tell what is wrong with a group that a client belongs to, last heard at ``heard_at``."""
        namesake = group.namesake(client, heard_at)
        if namesake is not None:
            self._tell(
                Trouble.CLIENT_ID,
                name,
                f"two consumers of group {name} have the client id {client.client_id}, at {client.link.address} "
                f"and {namesake.link.address}: some queues are read twice and others by nobody. Give each an "
                "id of its own (instanceName in Java)",
            )
        difference = self.difference(name, client.link)
        if difference:
            self._tell(Trouble.SUBSCRIPTIONS, name, difference)

    def unregister(self, link: ClientLink, producer_group: str, consumer_group: str) -> None:
        """Remove a client from these groups; an empty name means none."""
        if producer_group:
            self._leave_producers(link, producer_group)
        if consumer_group:
            self._leave_consumers(link, consumer_group)

    def closed(self, link: ClientLink) -> None:
        """Remove a disconnected client."""
        self._forget_id(link)
        as_consumer, as_producer = self._groups_of.pop(link, (set(), set()))
        for name in tuple(as_producer):
            self._leave_producers(link, name)
        for name in tuple(as_consumer):
            self._leave_consumers(link, name)
        _take(self._members, self._owners.pop(link, ""), len(as_consumer) + len(as_producer))

    def heard(self, link: ClientLink) -> None:
        """A client is there, as if it had sent a heartbeat."""
        as_consumer, as_producer = self._groups_of.get(link, (set(), set()))
        known = [self._consumers[name].clients[link] for name in as_consumer]
        known += [self._producers[name][link] for name in as_producer]
        for one in known:
            one.heard_at = self._now()

    def silent(self) -> list[ClientLink]:
        """Connections of clients whose last heartbeat is too old."""
        before = self._now() - SILENT_S_MAX
        found: dict[ClientLink, None] = {}
        for clients in (*(group.clients for group in self._consumers.values()), *self._producers.values()):
            found.update(dict.fromkeys(link for link, one in clients.items() if one.heard_at < before))
        return list(found)

    # -- questions -----------------------------------------------------------------------------------------------------

    def consumers(self, group: str) -> ConsumerGroup | None:
        """The consumers of a group, or None if it has none."""
        return self._consumers.get(group)

    def producers(self, group: str) -> Iterable[Client]:
        return self._producers.get(group, {}).values()

    def difference(self, name: str, link: ClientLink) -> str:
        """How a consumer's subscriptions differ from another one's of its group, for people; empty if they do not."""
        group = self._consumers.get(name)
        client = None if group is None else group.clients.get(link)
        if group is None or client is None:
            return ""
        advice = "Give each subscription a group of its own"
        differing = group.differing(client)
        if differing is not None:
            topic, other = differing
            return (
                f"consumers of group {name} subscribe to topic {topic} with different tags ({client.client_id} and "
                f"{other.client_id}): each misses the messages in the other's queues. {advice}"
            )
        lacking = group.lacking(client)
        if lacking is None:
            return ""
        topic, subscriber, other = lacking
        return (
            f"consumers of group {name} subscribe to different topics: {subscriber.client_id} to {topic}, and "
            f"{other.client_id} does not, so nobody reads the queues of that topic that are its share. {advice}"
        )

    def consumer(self, group: str, client_id: str) -> Client | None:
        """One consumer by its id, at its newest connection."""
        found = self._consumers.get(group)
        if found is None:
            return None
        return next((one for one in reversed(found.clients.values()) if one.client_id == client_id), None)

    def producer_by_id(self, client_id: str) -> Client | None:
        """Any producer with this id."""
        link = self._producer_at.get(client_id)
        if link is None:
            return None
        return next((self._producers[name][link] for name in self._groups_of[link][1]), None)

    def groups_of(self, link: ClientLink) -> Iterable[str]:
        """In which groups a client consumes."""
        as_consumer, _as_producer = self._groups_of.get(link, (frozenset[str](), frozenset[str]()))
        return as_consumer

    def consumer_groups(self) -> list[str]:
        return list(self._consumers)

    def producer_groups(self) -> list[str]:
        return list(self._producers)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _forget_id(self, link: ClientLink) -> None:
        client_id = self._producer_ids.pop(link, "")
        if self._producer_at.get(client_id) == link:  # links of one connection are equal, not the same
            del self._producer_at[client_id]

    def _leave_producers(self, link: ClientLink, name: str) -> None:
        clients = self._producers.get(name, {})
        if clients.pop(link, None) is None:
            return
        if not clients:
            del self._producers[name]
        if link in self._groups_of:
            self._groups_of[link][1].discard(name)
            _take(self._members, self._owners[link], 1)

    def _leave_consumers(self, link: ClientLink, name: str) -> None:
        group = self._consumers.get(name)
        if group is None or not group.remove(link):
            return
        if not group.clients:
            del self._consumers[name]
            _take(self._subscription_bytes, group.owner, group.subscription_bytes)
        if link in self._groups_of:
            self._groups_of[link][0].discard(name)
            _take(self._members, self._owners[link], 1)
        self._changed(name)


def _take(counts: Counter[str], owner: str, number: int) -> None:
    counts[owner] -= number
    if not counts[owner]:
        del counts[owner]


def _digest(one: Subscription) -> int:
    """Of what is selected, however it is written."""
    selected = frozenset(one.tags) if one.tags else one.expression
    return hash((selected, one.kind, one.class_filter))


def _bytes_of(subscriptions: Iterable[Subscription]) -> int:
    return sum(
        _SUBSCRIPTION_BYTES
        + len(one.topic)
        + len(one.expression)
        + sum(map(len, one.tags))
        + _TAG_BYTES * max(len(one.tags), len(one.codes))
        for one in subscriptions
    )
