"""Changes at brokers for the users of the console's page: to messages, topics, offsets, groups.

It acts with its own account, so brokers refuse what that account may not. Changes that lose something are asked about
first: without ``confirmed``, the answer is a question that names what would be lost.

Those affected are the group's clients: producers, the members of consumer groups, and their queues. Nobody tells which
queues a member has: they are computed by the rule that all members follow unless they were configured otherwise.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Final, Literal

from dledger.access.rules import DEAD_PREFIX, RETRY_PREFIX
from dledger.errors import DLedgerError, InvalidRequestError
from dledger.remoting.codes import Language
from dledger_cli.console.browse import QUEUES_MAX, broker_of, rows_of, safe_text
from dledger_cli.console.listing import OFFSET_MAX, BadInputError, Fields
from dledger_cli.messages import send_again
from rocketstore.client import Message, MessageQueue, NotFoundError, SendStatus, TopicInfo
from rocketstore.client.aio.admin import NO_RETENTION
from rocketstore.client.aio.rebalancer import in_java_order_of_queues, owners
from rocketstore.client.aio.routes import PERMISSION_READ, PERMISSION_WRITE
from rocketstore.message.checks import check_client_topic, check_topic
from rocketstore.message.timed import HANDLE_CHARS_MAX, WrongHandleError, decode_handle
from rocketstore.state.attributes import parse_retention
from rocketstore.state.changes import OFFSETS_MAX, TOPIC_QUEUES_MAX
from rocketstore.types import MessageModel, MessageType

if TYPE_CHECKING:
    from dledger_cli.targets import BrokerTarget
    from rocketstore.client import Admin, Producer, QueueProgress

BODY_BYTES_MAX: Final = 256 * 1024
"""Of a message's body; brokers accept more, from other clients."""
NAME_CHARS_MAX: Final = 127
TAG_CHARS_MAX: Final = 256
KEYS_CHARS_MAX: Final = 1024
DELAY_LEVEL_MAX: Final = 18
NAMED_MAX: Final = 5
_PERMISSIONS: Final = {"rw": PERMISSION_READ | PERMISSION_WRITE, "r": PERMISSION_READ, "w": PERMISSION_WRITE, "none": 0}


class BrokerChange(StrEnum):
    """The changes that there are, as parts of a request's path."""

    SEND = "send"
    PUT_TOPIC = "put-topic"
    DELETE_TOPIC = "delete-topic"
    RESET_OFFSETS = "reset-offsets"
    DELETE_GROUP = "delete-group"
    RESEND = "resend"
    RECALL = "recall"

    @property
    def bytes_max(self) -> int:
        """How long the request may be; JSON may take two bytes and more for one."""
        return {BrokerChange.SEND: 2 * BODY_BYTES_MAX, BrokerChange.RESET_OFFSETS: 64 * 1024}.get(self, 4096)


FIELDS: Final[Mapping[BrokerChange, tuple[str, ...]]] = {
    BrokerChange.SEND: ("topic", "tags", "keys", "body", "delay_level", "queue"),
    BrokerChange.PUT_TOPIC: (
        "name",
        "create",
        "read_queues",
        "write_queues",
        "permission",
        "message_type",
        "retention",
        "confirmed",
    ),
    BrokerChange.DELETE_TOPIC: ("name", "confirmed"),
    BrokerChange.RESET_OFFSETS: ("group", "topic", "places"),
    BrokerChange.DELETE_GROUP: ("name", "confirmed"),
    BrokerChange.RESEND: ("group", "offset"),
    BrokerChange.RECALL: ("handle", "confirmed"),
}


@dataclass(frozen=True, slots=True)
class Done:
    """The result of a change: a sentence, and facts for the page."""

    told: str
    facts: Mapping[str, object] = field(default_factory=dict)


class UnconfirmedError(Exception):
    """Raised instead of losing something unasked. ``title`` is the question, the message what would be lost."""

    def __init__(self, title: str, losses: str, yes: str) -> None:
        super().__init__(losses)
        self.title = title
        self.yes = yes


class BrokerChanges:
    """Changes of one group of brokers. Thread-safe; everything raises ``DLedgerError`` and ``BadInputError``."""

    def __init__(self, brokers: BrokerTarget, admin: Admin, clients: ClientLists) -> None:
        self._brokers = brokers
        self._admin = admin
        self._clients = clients
        self._lock = threading.Lock()  # guards the producer
        self._producer: Producer | None = None

    def close(self) -> None:
        """Close the producer, if there is one."""
        with self._lock:
            producer, self._producer = self._producer, None
        if producer is not None:
            producer.close()

    def carry_out(self, change: BrokerChange, asked: Fields) -> Done:
        """Do it. Raises ``UnconfirmedError``."""
        work: Mapping[BrokerChange, Callable[[Fields], Done]] = {
            BrokerChange.SEND: self._send,
            BrokerChange.PUT_TOPIC: self._put_topic,
            BrokerChange.DELETE_TOPIC: self._delete_topic,
            BrokerChange.RESET_OFFSETS: self._reset_offsets,
            BrokerChange.DELETE_GROUP: self._delete_group,
            BrokerChange.RESEND: self._resend,
            BrokerChange.RECALL: self._recall,
        }
        return work[change](asked)

    # --- messages ----------------------------------------------------------------------------------------------------

    def _send(self, asked: Fields) -> Done:
        topic = _topic_name(asked, "topic")
        body = asked.body("body", longest=BODY_BYTES_MAX).encode()
        if len(body) > BODY_BYTES_MAX:
            raise BadInputError(f"body has {len(body):,} bytes: at most {BODY_BYTES_MAX:,} can be sent here", "body")
        level = asked.optional_number("delay_level", 0, DELAY_LEVEL_MAX) or 0
        queue = asked.optional_number("queue", 0, TOPIC_QUEUES_MAX - 1)
        if queue is not None and queue >= (queues := self._admin.topic(topic)[0].write_queues):
            raise BadInputError(f"topic {topic} has {queues} queues, numbered from 0", "queue")
        message = Message(
            topic,
            body,
            tags=asked.text("tags", longest=TAG_CHARS_MAX, shortest=0).strip(),
            keys=asked.text("keys", longest=KEYS_CHARS_MAX, shortest=0).split(),
            delay_level=level,
        )
        sent = self._sender().send(message, queue=queue)
        facts = {
            "topic": topic,
            "queue": sent.queue,
            "offset": sent.offset,
            "message_id": sent.message_id,
            "offset_message_id": sent.offset_id,
            "delay_level": level,
            "status": str(sent.status),
        }
        stored = "" if sent.status is SendStatus.SEND_OK else f", stored as {sent.status!s}"
        if level:
            return Done(
                f"sent a message to {topic}, which waits at delay level {level}: id {sent.offset_id}{stored}", facts
            )
        place = f"queue {sent.queue}, offset {sent.offset}"
        return Done(f"sent a message to {topic}: {place}, id {sent.offset_id}{stored}", facts)

    def _sender(self) -> Producer:
        from rocketstore.client import Producer

        with self._lock:
            if self._producer is None:
                brokers = self._brokers
                security = brokers.security.for_client()
                self._producer = Producer(brokers.addresses, timeout_s=brokers.timeout_s, security=security)
            return self._producer

    def _resend(self, asked: Fields) -> Done:
        group, offset = _group_name(asked, "group"), asked.number("offset", 0, OFFSET_MAX)
        topic = f"{DEAD_PREFIX}{group}"
        found, _ = self._admin.messages(MessageQueue(topic, broker_of(self._admin, topic), 0), offset, max_messages=1)
        if not found or found[0].queue_offset != offset:
            raise NotFoundError(f"dead letter {offset} of {group} no longer exists")
        send_again(self._admin, group, found[0].offset)
        return Done(f"dead letter {offset} of {group} goes to its consumers again, once")

    def _recall(self, asked: Fields) -> Done:
        text = asked.text("handle", longest=HANDLE_CHARS_MAX)
        try:
            handle = decode_handle(text)
        except WrongHandleError as error:
            raise BadInputError(str(error), "handle") from error
        if not asked.flag("confirmed"):
            due = datetime.fromtimestamp(handle.due_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
            losses = f"Message {handle.message_id} for {handle.topic}, due {due}, will never be delivered."
            raise UnconfirmedError("Recall this message?", losses, "Recall the message")
        message_id = self._admin.recall(text)
        return Done(f"recalled message {message_id} for {handle.topic}: it will not be delivered")

    # --- topics ------------------------------------------------------------------------------------------------------

    def _put_topic(self, asked: Fields) -> Done:
        name = _topic_name(asked, "name")
        wanted = TopicInfo(
            name,
            asked.number("read_queues", 1, TOPIC_QUEUES_MAX),
            asked.number("write_queues", 1, TOPIC_QUEUES_MAX),
            _PERMISSIONS[asked.choice("permission", _PERMISSIONS)],
            message_type=_type(asked),
            retention=_retention(asked),
        )
        known = {one.name: one for one in self._admin.topics()}
        if asked.flag("create"):
            if name in known:
                raise BadInputError(f"topic {name} exists already: change it instead", "name")
        elif name not in known:
            raise NotFoundError(f"topic {name} does not exist")
        elif not asked.flag("confirmed"):
            self._check_kept(known[name], wanted)
        self._admin.put_topic(wanted)
        word = "created" if asked.flag("create") else "changed"
        permission = asked.choice("permission", _PERMISSIONS)
        return Done(
            f"{word} topic {name}: {wanted.write_queues} write queues, {wanted.read_queues} read queues, {permission}"
        )

    def _check_kept(self, before: TopicInfo, wanted: TopicInfo) -> None:
        losses = []
        if wanted.write_queues < before.write_queues:
            losses.append(f"{_queues(wanted.write_queues, before.write_queues)} no new messages any more.")
        if wanted.read_queues < before.read_queues:
            count = self._count(before.name, range(wanted.read_queues, before.read_queues))
            gone = _queues(wanted.read_queues, before.read_queues).removesuffix(" get").removesuffix(" gets")
            where = "it" if before.read_queues == wanted.read_queues + 1 else "them"
            losses.append(f"{gone} cannot be read any more, with {count} in {where}, consumed or not.")
        if losses:
            raise UnconfirmedError(f"Shrink topic {before.name}?", " ".join(losses), f"Shrink {before.name}")

    def _delete_topic(self, asked: Fields) -> Done:
        name = _topic_name(asked, "name")
        if not asked.flag("confirmed"):
            count = self._count(name, range(TOPIC_QUEUES_MAX))
            users = self._admin.groups_of_topic(name)
            losses = f"Its {count} can no longer be read." if count != "no messages" else "It has no messages."
            if users:
                losses += f" {_named(users)} {'loses its' if len(users) == 1 else 'lose their'} offsets in it."
            raise UnconfirmedError(f"Delete topic {name} and its messages?", losses, f"Delete {name}")
        self._admin.delete_topic(name)
        return Done(f"deleted topic {name}")

    def _count(self, topic: str, queues: range) -> str:
        """How many messages are in these queues, in words."""
        ranges = [one for one in self._admin.queue_ranges(topic) if one.queue.queue_id in queues]
        count = sum(max(one.max_offset - one.min_offset, 0) for one in ranges)
        return {0: "no messages", 1: "1 message"}.get(count, f"{count:,} messages")

    # --- groups ------------------------------------------------------------------------------------------------------

    def plan_reset(self, group: str, topic: str, start: Literal["first", "last"] | int) -> dict[str, object]:
        """The effect that a reset would have, queue by queue. ``start``: an end, or a time (ms since 1970)."""
        for name, what in ((group, "group"), (topic, "topic")):
            if problem := check_topic(name):
                raise BadInputError(problem.replace("the topic", f"the {what}"), what)
        queues = self._admin.topic(topic)[0].read_queues
        if queues > QUEUES_MAX:
            raise BadInputError(f"{topic} has {queues} queues: use `dledger consumer reset-offset`", "topic")
        offsets = self._offsets(group, topic)
        rows = []
        for one in self._admin.queue_ranges(topic):
            if one.queue.queue_id < queues:
                low, high = one.min_offset, one.max_offset
                to = min(max(self._admin.offset_at(one.queue, start), low), high)
                before = offsets.get(one.queue, -1)
                rows.append(
                    {"queue": one.queue.queue_id, "from": before, "to": to, "min_offset": low, "max_offset": high}
                )
        members = -1
        with suppress(DLedgerError):  # who is connected is not known, then
            connected = self._clients.consumers(group)
            members = len(connected.members) if connected is not None else 0
        return {"group": group, "topic": topic, "rows": rows, "members": members, "is_new": not offsets}

    def _reset_offsets(self, asked: Fields) -> Done:
        group, topic = _group_name(asked, "group"), _topic_name(asked, "topic", of_clients=False)
        places = asked.places("places", most=OFFSETS_MAX)
        info = self._admin.topic(topic)[0]
        ranges = {one.queue.queue_id: one for one in self._admin.queue_ranges(topic)}
        for queue_id, offset in places.items():
            if queue_id >= info.read_queues or queue_id not in ranges:
                there = f"topic {topic} has {info.read_queues} read queues: there is no queue {queue_id}"
                raise BadInputError(there, "places")
            low, high = ranges[queue_id].min_offset, ranges[queue_id].max_offset
            if not low <= offset <= high:
                there = f"queue {queue_id} of {topic} now has offsets {low} to {high}"
                raise BadInputError(f"{there}, not {offset}: look again", "places")
        offsets = {MessageQueue(topic, info.broker, queue_id): offset for queue_id, offset in places.items()}
        self._admin.set_offsets(group, offsets)
        shown = [f"queue {queue_id} to {offset}" for queue_id, offset in sorted(places.items())]
        more = f" and {len(shown) - NAMED_MAX} more" if len(shown) > NAMED_MAX else ""
        return Done(f"reset {group} in {topic}: {', '.join(shown[:NAMED_MAX])}{more}")

    def _offsets(self, group: str, topic: str = "") -> dict[MessageQueue, int]:
        """A group's offsets; none for one that has none."""
        try:
            return self._admin.offsets(group, topic)
        except NotFoundError:
            return {}

    def _delete_group(self, asked: Fields) -> Done:
        name = _group_name(asked, "name")
        if not asked.flag("confirmed"):
            if name not in {one.name for one in self._admin.groups()}:
                raise NotFoundError(f"group {name} does not exist")
            topics = sorted({one.topic for one in self._offsets(name)})
            losses = f"Its offsets in {_named(topics)} are lost" if topics else "It has no offsets"
            losses += "; what it has to try again and its dead letters are deleted."
            with suppress(DLedgerError):  # who is connected only adds to the question
                consumers = self._clients.consumers(name)
                losses += f" {_connected(len(consumers.members))}." if consumers is not None else ""
            losses += " Stop its consumers first, or their next commit creates it again."
            raise UnconfirmedError(f"Delete group {name}, its offsets and dead letters?", losses, f"Delete {name}")
        self._admin.delete_group(name)
        return Done(f"deleted group {name}")


def _topic_name(asked: Fields, name: str, *, of_clients: bool = True) -> str:
    topic = asked.text(name, longest=NAME_CHARS_MAX).strip()
    if problem := check_client_topic(topic) if of_clients else check_topic(topic):
        raise BadInputError(problem, name)
    return topic


def _group_name(asked: Fields, name: str) -> str:
    group = asked.text(name, longest=NAME_CHARS_MAX).strip()
    if problem := check_topic(group):
        raise BadInputError(problem.replace("the topic", "the group"), name)
    return group


def _type(asked: Fields) -> str:
    """Empty: as it is."""
    found = asked.text("message_type", longest=NAME_CHARS_MAX, shortest=0)
    if found and found not in {one.value for one in MessageType}:
        raise BadInputError(f"message_type must be one of {', '.join(MessageType)}", "message_type")
    return found


def _retention(asked: Fields) -> str:
    """Empty: as it is."""
    found = asked.text("retention", longest=NAME_CHARS_MAX, shortest=0)
    if found in ("", NO_RETENTION):
        return found
    try:
        parse_retention(found)
    except InvalidRequestError as error:
        raise BadInputError(str(error), "retention") from error
    return found


def _queues(begin: int, end: int) -> str:
    return f"Queue {begin} gets" if end == begin + 1 else f"Queues {begin} to {end - 1} get"


def _connected(count: int) -> str:
    return "1 consumer is connected" if count == 1 else f"{count} consumers are connected"


def _named(names: list[str]) -> str:
    more = [f"{len(names) - NAMED_MAX} more"] if len(names) > NAMED_MAX else []
    shown = [*names[:NAMED_MAX], *more]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


GROUPS_PER_PAGE: Final = 50
CLIENTS_MAX: Final = 500
"""In one list."""
TOPICS_SHOWN_MAX: Final = 64
_VERSION_4_9_0: Final = 393
_VERSION_5_0_0: Final = 413
"""RocketMQ counts its versions, with a snapshot before each."""


@dataclass(frozen=True, slots=True)
class ConnectedGroup:
    """The members of a consumer group that are connected."""

    members: tuple[dict[str, object], ...]
    subscriptions: dict[str, str]
    """Expressions of tags by topic."""
    broadcast: bool

    @property
    def ids(self) -> list[str]:
        """The client ids of the members."""
        return [str(one["id"]) for one in self.members]


class ClientLists:
    """Of one group of brokers. Thread-safe; raises ``DLedgerError``."""

    def __init__(self, admin: Admin, everywhere: Admin | None = None) -> None:
        """``everywhere``: of all groups that may have queues of the same topics, if there are others."""
        self._admin = admin
        self._everywhere = everywhere

    # --- who is connected --------------------------------------------------------------------------------------------

    def consumers(self, group: str) -> ConnectedGroup | None:
        """The connected members of a group; None if there are none."""
        try:
            found = self._admin.members(group)
        except NotFoundError:
            return None
        members = tuple(_client(one.client_id, one.client_addr, one.language, one.version) for one in found.clients)
        return ConnectedGroup(members, dict(found.topics), found.model is MessageModel.BROADCASTING)

    def everybody(self, wanted: str, first: int) -> dict[str, object]:
        """Producers, and the consumers of a page of groups from ``first`` on, if their names contain ``wanted``."""
        producers = [
            {"group": safe_text(group), **_client(one.client_id, one.remote_ip.lstrip("/"), one.language, one.version)}
            for group, ones in self._admin.all_producers().items()
            for one in ones
            if wanted in group
        ]
        groups = [one.name for one in self._admin.groups() if wanted in one.name]
        known: dict[str, ConnectedGroup | None] = {}
        if wanted and wanted not in groups and not check_topic(wanted):
            known[wanted] = self.consumers(wanted)
            if known[wanted] is not None:  # it has committed nothing yet
                groups.insert(0, wanted)
        consumers: list[dict[str, object]] = []
        for group in groups[first : first + GROUPS_PER_PAGE]:
            connected = known[group] if group in known else self.consumers(group)
            if connected is not None:
                topics = [
                    _subscription(*one) for one in connected.subscriptions.items() if one[0] != RETRY_PREFIX + group
                ]
                about = {"group": group, "topics": topics[:TOPICS_SHOWN_MAX], "broadcast": connected.broadcast}
                consumers += [{**about, **one} for one in connected.members]
        return {
            "producers": producers[:CLIENTS_MAX],
            "all_producers": len(producers),
            "consumers": consumers[:CLIENTS_MAX],
            "all_consumers": len(consumers),
            "first": first,
            "groups": len(groups),
            "per_page": GROUPS_PER_PAGE,
        }

    # --- who has which queue -----------------------------------------------------------------------------------------

    def members(self, group: str) -> dict[str, object]:
        """A group's members, and its progress in every queue with the member that has it."""
        connected = self.consumers(group)
        progress: list[QueueProgress] = []
        with suppress(NotFoundError):  # it has no offsets
            progress = self._admin.progress(group)
        subscribed = set(connected.subscriptions) if connected is not None else set()
        topics = {one.queue.topic for one in progress} | subscribed | {RETRY_PREFIX + group}
        rows = rows_of(self._admin, progress, topics)
        shown = rows[:QUEUES_MAX]
        having: dict[tuple[str, int], str] = {}
        for topic in {str(row["topic"]) for row in shown} & subscribed:
            if connected is not None and not connected.broadcast:
                having |= self._owners(connected, topic)
        for row in shown:
            row["member"] = having.get((str(row["topic"]), int(str(row["queue"]))), "")
        return {
            "group": group,
            "members": list(connected.members[:CLIENTS_MAX]) if connected else [],
            "all_members": len(connected.members) if connected else 0,
            "subscriptions": [_subscription(*one) for one in connected.subscriptions.items()] if connected else [],
            "broadcast": connected is not None and connected.broadcast,
            "rows": shown,
            "all_rows": len(rows),
        }

    def _owners(self, connected: ConnectedGroup, topic: str) -> dict[tuple[str, int], str]:
        """The owner of each of a topic's queues here: the members divide those of all groups of brokers."""
        here = self._admin.topic(topic)[0]
        places = {here.broker: here}
        if self._everywhere is not None:
            with suppress(NotFoundError):  # name servers do not know it yet
                places |= {one.broker: one for one in self._everywhere.topic(topic)}
        queues = [
            MessageQueue(topic, one.broker, number)
            for one in places.values()
            if one.permission & PERMISSION_READ
            for number in range(one.read_queues)
        ]
        divided = owners(in_java_order_of_queues(queues), connected.ids)
        return {
            (topic, one.queue_id): safe_text(member)
            for one, member in divided.items()
            if one.broker_name == here.broker
        }


def _client(client_id: str, address: str, language: Language, version: int) -> dict[str, object]:
    return {
        "id": safe_text(client_id),
        "address": safe_text(address),
        "language": language.name.lower(),
        "version": _version_text(version) if language is Language.JAVA else "",
    }


def _version_text(version: int) -> str:
    """RocketMQ's 4.9 by name; others by RocketMQ's number."""
    if _VERSION_4_9_0 <= version < _VERSION_5_0_0:
        return f"4.9.{(version - _VERSION_4_9_0) // 2}"
    return f"number {version}"


def _subscription(topic: str, tags: str) -> str:
    return safe_text(topic if tags == "*" else f"{topic} ({tags})")
