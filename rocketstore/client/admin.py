"""``Admin``: topics, queues, queries, offsets and broker statuses, for tools and tests."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Literal

from dledger.client.discovery import DISCOVERY_TIMEOUT_S, Addresses, nobody_answers
from dledger.client.security import ClientSecurity
from dledger.client.shared import Deadline
from dledger.conditions import Condition
from dledger.errors import DLedgerError, InvalidRequestError
from rocketstore.client.aio.errors import BadAnswerError
from rocketstore.client.aio.received import ReceivedMessage, split_records
from rocketstore.client.connection import BrokerConnection
from rocketstore.client.errors import NotFoundError
from rocketstore.client.methods import (
    COMMIT_OFFSETS,
    COMMIT_POSITION,
    DELAYED,
    DELETE_GROUP,
    DELETE_TOPIC,
    FETCH_OFFSETS,
    GROUP_OFFSETS,
    LIST_GROUPS,
    LIST_TOPICS,
    NEWEST,
    OFFSET_BY_TIME,
    PULL,
    PUT_TOPIC,
    QUERY_BY_ID,
    QUERY_BY_KEY,
    QUEUE_RANGE,
    SEND_BACK,
    STATUS,
    TOPIC_RANGES,
    is_master,
    report_of_broker,
)
from rocketstore.client.topic_cache import no_such_topic
from rocketstore.client.topics import TopicInfo, topic_of
from rocketstore.message.message import Message
from rocketstore.message.record import CorruptRecordError, decode_record
from rocketstore.pb import broker_pb2 as pb

_log = logging.getLogger("rocketstore")
SURVEYED_AT_ONCE: Final = 1024
"""Topics or groups named in one request."""


@dataclass(frozen=True, slots=True)
class BrokerStatus:
    """A broker's status. Offsets are physical (bytes of the log), times milliseconds since 1970."""

    address: str
    cluster: str
    broker_name: str
    node_id: str
    role: str
    broker_id: int
    replicated: bool
    raft_role: str
    term: int
    leader: str
    leader_address: str
    members: dict[str, str]
    min_offset: int
    max_offset: int
    end_offset: int
    dispatch_behind_bytes: int
    put_tps: float
    get_tps: float
    disk_ratio: float
    put_total: int
    get_total: int
    earliest_message_ms: int
    version: str
    boot_ms: int
    runtime: dict[str, str]
    is_master: bool
    conditions: tuple[Condition, ...] = ()
    """Current conditions, oldest first."""


@dataclass(frozen=True, slots=True)
class QueueRange:
    """One queue's first offset and its end, and the store time of its newest message (-1 if there is none)."""

    queue_id: int
    min_offset: int
    max_offset: int
    last_update_ms: int


@dataclass(frozen=True, slots=True)
class QueueProgress:
    """A group's progress in one queue; ``committed`` is -1 if it never committed."""

    topic: str
    queue_id: int
    committed: int
    min_offset: int
    max_offset: int

    @property
    def lag(self) -> int:
        """The number of messages still to be consumed."""
        return max(self.max_offset - max(self.committed, self.min_offset, 0), 0)


@dataclass(frozen=True, slots=True)
class DelayLevelStatus:
    """Messages that wait at one delay level: those from ``next_offset`` to before ``end_offset``.

    ``next_due_ms`` (since 1970) is when the next one is due; -1 if none waits.
    """

    level: int
    delay_ms: int
    next_offset: int
    end_offset: int
    next_due_ms: int


class Admin:
    """Thread-safe; every call has a deadline (``timeout_s``), and is retried until then as long as that may help."""

    def __init__(self, addresses: Addresses, *, timeout_s: float = 5.0, security: ClientSecurity | None = None) -> None:
        self._connection = BrokerConnection(addresses, timeout_s=timeout_s, security=security)

    def __enter__(self) -> Admin:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close every connection. Idempotent."""
        self._connection.close()

    # --- brokers ----------------------------------------------------------------------------------------------------

    def status(self, address: str | None = None) -> BrokerStatus:
        """A broker's status: of the one at ``address``, otherwise of the master, or of any live one."""
        deadline = self._connection.deadline()
        chosen = address or self._connection.retry(deadline, lambda: self._connection.seeker.reader(deadline))
        answer = self._connection.ask(STATUS, pb.StatusRequest(), chosen, deadline)
        return _status_of(chosen, answer)

    def cluster(self) -> dict[str, BrokerStatus | DLedgerError]:
        """Every broker's status by address, or its error. Raises ``UnavailableError`` if nobody responds."""
        deadline = Deadline(max(DISCOVERY_TIMEOUT_S, self._connection.timeout_s / 2))
        answers: dict[str, BrokerStatus | DLedgerError] = {}
        directory = self._connection.directory
        while addresses := [one for one in directory.addresses if one not in answers]:
            for address, answer in self._connection.ask_all(addresses, deadline):
                if isinstance(answer, DLedgerError):
                    answers[address] = answer
                    directory.note_tried(address)
                else:
                    answers[address] = _status_of(address, answer)
                    directory.learn(address, report_of_broker(answer))
        statuses = [one for one in answers.values() if isinstance(one, BrokerStatus)]
        if not statuses:
            raise nobody_answers(one for one in answers.values() if isinstance(one, DLedgerError))
        # The same broker may have responded under two names.
        names = {one.node_id: one.address for one in reversed(statuses) if one.node_id}
        return {
            address: one
            for address, one in sorted(answers.items())
            if isinstance(one, DLedgerError) or names.get(one.node_id, address) == address
        }

    # --- topics -----------------------------------------------------------------------------------------------------

    def topics(self) -> list[TopicInfo]:
        """Every topic, by name."""
        answer = self._connection.ask_reader(LIST_TOPICS, pb.ListTopicsRequest(), self._connection.deadline())
        return sorted(map(topic_of, answer.topics), key=lambda topic: topic.name)

    def topic(self, name: str) -> TopicInfo:
        """One topic. Raises ``NotFoundError``."""
        for topic in self.topics():
            if topic.name == name:
                return topic
        raise no_such_topic(self._connection, name)

    def put_topic(self, topic: TopicInfo) -> None:
        """Create a topic, or change its queue counts and permission."""
        wanted = pb.Topic(
            name=topic.name,
            read_queues=topic.read_queues,
            write_queues=topic.write_queues,
            permission=topic.permission,
        )
        self._connection.ask_master(PUT_TOPIC, pb.PutTopicRequest(topic=wanted), self._connection.deadline())

    def delete_topic(self, name: str) -> None:
        """Delete a topic and its messages. Raises ``NotFoundError``."""
        self._connection.ask_master(DELETE_TOPIC, pb.DeleteTopicRequest(name=name), self._connection.deadline())

    def queue_ranges(self, topic: str) -> list[QueueRange]:
        """The offsets of all the topic's queues, also of those that may only be written. Raises ``NotFoundError``."""
        try:
            found = self.topic_ranges([topic])
        except InvalidRequestError:  # of an older version
            found = {}
        if topic in found:
            return found[topic]
        return [self.queue_range(topic, one) for one in range(self.topic(topic).read_queues)]  # or the reason why not

    def queue_range(self, topic: str, queue_id: int) -> QueueRange:
        """The offsets of one queue."""
        request = pb.QueueRequest(topic=topic, queue_id=queue_id)
        answer = self._connection.ask_reader(QUEUE_RANGE, request, self._connection.deadline())
        return QueueRange(queue_id, answer.min_offset, answer.max_offset, answer.last_update_ms)

    def topic_ranges(self, topics: Sequence[str]) -> dict[str, list[QueueRange]]:
        """The queues of many topics, without topics that do not exist or that this account may not read."""
        found: dict[str, list[QueueRange]] = {}
        covered = 0
        while covered < len(topics):
            request = pb.TopicRangesRequest(topics=topics[covered : covered + SURVEYED_AT_ONCE])
            answer = self._connection.ask_reader(TOPIC_RANGES, request, self._connection.deadline())
            covered += _progress(answer.covered, len(request.topics))
            for one in answer.topics:
                found[one.topic] = [
                    QueueRange(queue, it.min_offset, it.max_offset, it.last_update_ms)
                    for queue, it in enumerate(one.queues)
                ]
        return found

    # --- messages ---------------------------------------------------------------------------------------------------

    def message_by_id(self, message_id: str) -> Message:
        """The message with an offset message id. Raises ``NotFoundError``."""
        request = pb.QueryByIdRequest(message_id=message_id)
        answer = self._connection.ask_reader(QUERY_BY_ID, request, self._connection.deadline())
        messages = _decoded(answer)
        if not messages:
            raise NotFoundError(f"no message with id {message_id}")
        return messages[0]

    def messages_by_key(
        self, topic: str, key: str, *, max_messages: int = 32, begin_ms: int = 0, end_ms: int = 0, unique: bool = False
    ) -> list[Message]:
        """Messages with this key (or, with ``unique``, this producer-assigned id) stored between two times (0: now)."""
        request = pb.QueryByKeyRequest(
            topic=topic, key=key, max_messages=max_messages, begin_ms=begin_ms, end_ms=end_ms, unique=unique
        )
        return _decoded(self._connection.ask_reader(QUERY_BY_KEY, request, self._connection.deadline()))

    def messages(
        self, topic: str, queue_id: int, offset: int, *, max_messages: int = 32, tags: str = "*"
    ) -> tuple[list[ReceivedMessage], int]:
        """One pull without a group: messages of a queue from ``offset`` on, and the offset for the next pull.

        No messages and the same offset: there is nothing more.
        """
        request = pb.PullRequest(
            topic=topic, queue_id=queue_id, offset=offset, max_messages=max_messages, tag_expression=tags
        )
        answer = self._connection.ask_reader(PULL, request, self._connection.deadline())
        return split_records(answer.records), max(answer.next_offset, 0)

    def newest(
        self,
        topic: str,
        ends: Sequence[int] = (),
        *,
        max_messages: int = 32,
        queue_id: int | None = None,
        stored: tuple[int, int] = (0, 0),
        oldest_first: bool = False,
    ) -> tuple[list[ReceivedMessage], tuple[int, ...]]:
        """A topic's messages from the newest one backwards (or from the oldest one on), across its queues (or of one).

        Of those ``stored`` at the first time or later, and before the second one (0: no limit), in milliseconds.
        Returns them with the ``ends`` for the next ones; these are empty when there are none left. Raises
        ``NotFoundError``.
        """
        request = pb.NewestRequest(
            topic=topic,
            max_messages=max_messages,
            queue_id=queue_id,
            ends=ends,
            oldest_first=oldest_first,
            since_ms=stored[0],
            before_ms=stored[1],
        )
        answer = self._connection.ask_reader(NEWEST, request, self._connection.deadline())
        found = [one for record in answer.records for one in split_records(record)]
        return found, tuple(answer.ends) if answer.more else ()

    def delayed(
        self, level: int = 0, offset: int = -1, *, max_messages: int = 0
    ) -> tuple[list[DelayLevelStatus], list[Message]]:
        """Every delay level, and messages that wait at one, from ``offset`` on (-1: the next one to be delivered).

        They are as stored: the topic and queue that they are for are properties. Requires an administrator's account.
        """
        request = pb.DelayedRequest(level=level, offset=offset, max_messages=max_messages)
        answer = self._connection.ask_reader(DELAYED, request, self._connection.deadline())
        levels = [
            DelayLevelStatus(one.level, one.delay_ms, one.next_offset, one.end_offset, one.next_due_ms)
            for one in answer.levels
        ]
        return levels, _decoded(answer)

    # --- groups -----------------------------------------------------------------------------------------------------

    def groups(self) -> list[str]:
        """Every consumer group that has offsets, by name."""
        answer = self._connection.ask_reader(LIST_GROUPS, pb.ListGroupsRequest(), self._connection.deadline())
        return sorted(answer.groups)

    def delete_group(self, name: str) -> None:
        """Delete a consumer group and its offsets; its consumers should be stopped. Raises ``NotFoundError``."""
        self._connection.ask_master(DELETE_GROUP, pb.DeleteGroupRequest(name=name), self._connection.deadline())

    def send_back(self, group: str, topic: str, offset: int, *, delay_level: int, retries_max: int) -> None:
        """Have a message of ``topic``, at this ``offset`` of the log, delivered to the group again after a delay.

        If it was delivered ``retries_max`` times, it goes to the group's dead letters. An answer that got lost may lead
        to a second copy. Raises ``NotFoundError``.
        """
        request = pb.SendBackRequest(
            group=group, topic=topic, offset=offset, delay_level=delay_level, retries_max=retries_max
        )
        self._connection.ask_master(SEND_BACK, request, self._connection.deadline())

    def offsets(self, group: str, topic: str = "") -> dict[tuple[str, int], int]:
        """A group's committed offsets, by topic and queue: the master's.

        While there is none, those that another member knows, which may be older; a warning in the log says so.
        """
        request = pb.FetchOffsetsRequest(group=group, topic=topic)
        answer = self._connection.ask_reader(FETCH_OFFSETS, request, self._connection.deadline())
        self._say_if_not_the_masters(f"the offsets of group {group}")
        return {(one.topic or topic, one.queue_id): one.offset for one in answer.offsets}

    def group_offsets(self, groups: Sequence[str]) -> dict[str, dict[tuple[str, int], int]]:
        """The committed offsets of many groups, without groups that do not exist or are not this account's.

        For whose they are, see ``offsets``.
        """
        found: dict[str, dict[tuple[str, int], int]] = {}
        covered = 0
        while covered < len(groups):
            request = pb.GroupOffsetsRequest(groups=groups[covered : covered + SURVEYED_AT_ONCE])
            answer = self._connection.ask_reader(GROUP_OFFSETS, request, self._connection.deadline())
            covered += _progress(answer.covered, len(request.groups))
            for one in answer.groups:
                found[one.group] = {(it.topic, it.queue_id): it.offset for it in one.offsets}
        if groups:
            self._say_if_not_the_masters("the offsets of groups")
        return found

    def _say_if_not_the_masters(self, what: str) -> None:
        if self._connection.directory.leader is None:
            _log.warning(
                "there is no master: %s are those that another member knows, and may be older than committed", what
            )

    def progress(self, group: str, topic: str = "") -> list[QueueProgress]:
        """A group's progress in every queue of its topics (or of one). Raises ``NotFoundError`` if unknown."""
        committed = self.offsets(group, topic)
        if not committed:
            raise NotFoundError(f"group {group} has no offsets" + (f" in topic {topic}" if topic else ""))
        rows: list[QueueProgress] = []
        for name in sorted({name for name, _ in committed}):
            try:
                ranges = self.queue_ranges(name)
            except NotFoundError:  # deleted in the meantime
                continue
            for one in ranges:
                place = committed.get((name, one.queue_id), -1)
                rows.append(QueueProgress(name, one.queue_id, place, one.min_offset, one.max_offset))
        return rows

    def commit_position(
        self, group: str, *, index: int | None = None, position: int | None = None, topics: Sequence[str] = ()
    ) -> dict[tuple[str, int], int]:
        """Record that a group which reads the log itself has consumed everything before an entry, so that its lag is
        visible.

        Give either the entry's ``index`` (replicated brokers only) or its start ``position``. The corresponding queue
        offsets in ``topics`` (default: all) are committed and returned. Messages not in the queues yet are left for the
        next call; no offset moves back. Raises ``NotFoundError`` for an unknown topic.
        """
        request = pb.CommitPositionRequest(group=group, index=index, position=position, topics=topics)
        answer = self._connection.ask_master(COMMIT_POSITION, request, self._connection.deadline())
        return {(one.topic, one.queue_id): one.offset for one in answer.offsets}

    def offset_at(self, topic: str, queue_id: int, start: Literal["first", "last"] | int) -> int:
        """A queue's first offset, its end, or the offset of the first message stored at a time (ms) or later."""
        if isinstance(start, int):
            request = pb.OffsetByTimeRequest(topic=topic, queue_id=queue_id, timestamp_ms=start)
            return self._connection.ask_reader(OFFSET_BY_TIME, request, self._connection.deadline()).offset
        found = self.queue_range(topic, queue_id)
        return found.max_offset if start == "last" else max(found.min_offset, 0)

    def reset_offsets(
        self, group: str, topic: str, start: Literal["first", "last"] | int, queues: Sequence[int] | None = None
    ) -> dict[int, int]:
        """Move a group's offsets, forwards or backwards; returns the offset of each queue. Its consumers should be
        stopped.

        ``start``: the first message, after the last one, or a time (ms since 1970).
        """
        chosen = range(self.topic(topic).read_queues) if queues is None else queues
        places = {queue_id: self.offset_at(topic, queue_id, start) for queue_id in chosen}
        self.set_offsets(group, topic, places)
        return places

    def set_offsets(self, group: str, topic: str, places: dict[int, int]) -> None:
        """Set a group's offsets in these queues, forwards or backwards."""
        offsets = [pb.ConsumerOffset(topic=topic, queue_id=one, offset=places[one]) for one in places]
        request = pb.CommitOffsetsRequest(group=group, offsets=offsets, reset=True)
        self._connection.ask_master(COMMIT_OFFSETS, request, self._connection.deadline())


def _decoded(answer: pb.RecordsResponse | pb.DelayedResponse) -> list[Message]:
    try:
        return [decode_record(record) for record in answer.records]
    except CorruptRecordError as error:
        raise BadAnswerError(f"a broker answered with an invalid record: {error}") from error


def _status_of(address: str, status: pb.StatusResponse) -> BrokerStatus:
    return BrokerStatus(
        address=address,
        cluster=status.cluster,
        broker_name=status.broker_name,
        node_id=status.node_id,
        role=status.broker_role,
        broker_id=status.broker_id,
        replicated=status.replicated,
        raft_role=status.raft_role,
        term=status.term,
        leader=status.leader,
        leader_address=status.leader_address,
        members=dict(status.members),
        min_offset=status.min_offset,
        max_offset=status.max_offset,
        end_offset=status.end_offset,
        dispatch_behind_bytes=status.dispatch_behind_bytes,
        put_tps=status.put_tps,
        get_tps=status.get_tps,
        disk_ratio=status.disk_ratio,
        put_total=status.put_total,
        get_total=status.get_total,
        earliest_message_ms=status.earliest_message_ms,
        version=status.version,
        boot_ms=status.boot_ms,
        runtime=dict(status.runtime),
        is_master=is_master(status),
        conditions=tuple(Condition(one.kind, one.message, one.since_ms, one.subject) for one in status.conditions),
    )


def _progress(covered: int, asked: int) -> int:
    """How many names an answer covers. Raises ``BadAnswerError`` for a broker that would be asked for ever."""
    if not 0 < covered <= asked:
        raise BadAnswerError(f"a broker answered for {covered} of {asked} names")
    return covered
