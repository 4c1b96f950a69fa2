"""Where a group is in its queues: kept by the brokers, or in a file by a member that gets all messages."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Final, Literal, NamedTuple, Protocol

from dledger.errors import ConfigError, InvalidRequestError
from rocketstore.client.aio.errors import BadAnswerError
from rocketstore.client.connection import BrokerConnection
from rocketstore.client.errors import NotFoundError, OtherIncarnationError
from rocketstore.client.methods import COMMIT_OFFSETS, FETCH_OFFSETS, OFFSET_BY_TIME, QUEUE_RANGE
from rocketstore.client.shares import QueueName
from rocketstore.pb import broker_pb2 as pb

_log = logging.getLogger(__name__)
Start = Literal["first", "last"] | int
"""Where a group without an offset starts: at the oldest message, after the newest, or at a time (ms since 1970)."""

OFFSETS_MAX: Final = 1024
"""In one request: brokers take no more, and a topic has no more queues."""

LOOKS_MAX: Final = 3
"""How often a commit looks again because another broker became master since it looked."""


class Fetched(NamedTuple):
    """Offsets, and the incarnation of the broker that keeps them; 0: it is none."""

    offsets: dict[QueueName, int]
    incarnation: int = 0


class OffsetStore(Protocol):
    """Keeps offsets. Both methods may raise ``DLedgerError``."""

    def fetch(self, topics: Collection[str]) -> Fetched:
        """All offsets in these topics."""

    def commit(self, offsets: Mapping[QueueName, int], incarnation: int, *, rewind: bool = False) -> None:
        """Store offsets. Without ``rewind``, none goes back.

        Raises ``OtherIncarnationError`` if the broker is of another incarnation, unless that is 0.
        """


class BrokerOffsets:
    """The group's offsets at the master of one group of brokers."""

    def __init__(self, connection: BrokerConnection, group: str, broker_name: str) -> None:
        self._connection = connection
        self._group = group
        self._broker_name = broker_name

    def fetch(self, topics: Collection[str]) -> Fetched:
        """All offsets in these topics."""
        found: dict[QueueName, int] = {}
        incarnations: set[int] = set()
        for topic in topics:
            request = pb.FetchOffsetsRequest(group=self._group, topic=topic)
            answer = self._connection.ask_master(FETCH_OFFSETS, request, self._connection.deadline())
            incarnations.add(answer.incarnation)
            for one in answer.offsets:
                if one.topic in (topic, ""):
                    found[QueueName(topic, one.queue_id, self._broker_name)] = one.offset
        if len(incarnations) > 1:
            raise OtherIncarnationError("another broker became master, or it was restarted, while it was asked")
        return Fetched(found, *incarnations)

    def commit(self, offsets: Mapping[QueueName, int], incarnation: int, *, rewind: bool = False) -> None:
        """Store offsets. Without ``rewind``, none goes back."""
        for names in _parts(offsets):
            wire = [pb.ConsumerOffset(topic=one.topic, queue_id=one.queue_id, offset=offsets[one]) for one in names]
            request = pb.CommitOffsetsRequest(group=self._group, offsets=wire, reset=rewind, incarnation=incarnation)
            answer = self._connection.ask_master(COMMIT_OFFSETS, request, self._connection.deadline())
            if incarnation and answer.incarnation != incarnation:
                raise OtherIncarnationError(
                    "the offsets are not committed: another broker became master, or it was restarted"
                )


def _parts(names: Iterable[QueueName]) -> list[list[QueueName]]:
    """As many as brokers take at once. Those of a topic stay together: a group begins in all its queues, or in none."""
    topics: dict[str, list[QueueName]] = {}
    for one in names:
        topics.setdefault(one.topic, []).append(one)
    parts: list[list[QueueName]] = [[]]
    for queues in topics.values():
        if parts[-1] and len(parts[-1]) + len(queues) > OFFSETS_MAX:
            parts.append([])
        parts[-1] += queues
    return parts


class LocalOffsets:
    """Offsets in a JSON file, which only one member may use at a time. Without a file: in memory."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._offsets: dict[QueueName, int] = {} if file is None else _read(file)

    def fetch(self, topics: Collection[str]) -> Fetched:
        """All offsets in these topics."""
        with self._lock:
            return Fetched({name: offset for name, offset in self._offsets.items() if name.topic in topics})

    def commit(self, offsets: Mapping[QueueName, int], incarnation: int, *, rewind: bool = False) -> None:  # noqa: ARG002  # a file has none
        """Store offsets. Without ``rewind``, none goes back. Raises ``OSError``."""
        with self._lock:
            for name, offset in offsets.items():
                self._offsets[name] = offset if rewind else max(offset, self._offsets.get(name, 0))
            if self._file is not None:
                _write(self._file, self._offsets)


def _read(file: Path) -> dict[QueueName, int]:
    try:
        text = file.read_text()
    except FileNotFoundError:
        return {}
    try:
        topics = json.loads(text)["offsets"]
        return {
            _queue_of(str(topic), str(name)): int(offset)
            for topic, queues in topics.items()
            for name, offset in queues.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError([f"{file} does not contain offsets ({error}): remove it to start anew"]) from error


def _queue_of(topic: str, name: str) -> QueueName:
    """``name`` is the number of the queue, after the name of its brokers and a colon if that is known."""
    broker_name, _, queue_id = name.rpartition(":")
    return QueueName(topic, int(queue_id), broker_name)


def _write(file: Path, offsets: Mapping[QueueName, int]) -> None:
    topics: dict[str, dict[str, int]] = {}
    for one, offset in sorted(offsets.items()):
        name = f"{one.broker_name}:{one.queue_id}" if one.broker_name else str(one.queue_id)
        topics.setdefault(one.topic, {})[name] = offset
    made = file.with_name(f"{file.name}.new")
    with made.open("w") as stream:
        json.dump({"offsets": topics}, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())
    made.replace(file)


class Beginnings:
    """Where queues of one group of brokers begin.

    A consumer group that is new in a topic begins where it was told to, in all queues at once, and that is stored
    before anything is consumed: a member that takes a queue over later must not begin behind what was sent meanwhile. A
    queue that is new in a topic, also one of further brokers, begins with its first message.
    """

    def __init__(self, connection: BrokerConnection, store: OffsetStore, broker_name: str) -> None:
        self._connection = connection
        self._store = store
        self._broker_name = broker_name
        self._incarnation = 0  # of the broker that was surveyed

    def survey(self, topics: Mapping[str, int], start: Start) -> dict[str, dict[QueueName, int] | None]:
        """Where new groups would begin in these topics, of so many queues; None for a topic where this group has begun.

        The offsets to store if it has begun nowhere else.
        """
        begun, self._incarnation = self._begun(topics)
        return {
            topic: None
            if topic in begun
            else self.offsets_at([QueueName(topic, queue_id, self._broker_name) for queue_id in range(count)], start)
            for topic, count in topics.items()
        }

    def begin(self, offsets: Mapping[QueueName, int]) -> None:
        """Store what ``survey`` found, but for topics where another member was faster.

        That must have come after our look: then ours are not behind anything sent since that member began.
        """
        begun, _ = self._begun({one.topic for one in offsets})
        mine = {one: offset for one, offset in offsets.items() if one.topic not in begun}
        if mine:
            self._store.commit(mine, self._incarnation)

    def of(self, wanted: Collection[QueueName]) -> Fetched:
        """The offsets of these queues, but for those that do not exist. Those of new queues are stored first."""
        stored, incarnation = self._store.fetch({one.topic for one in wanted})
        known = {one: stored[one] for one in wanted if one in stored}
        fresh = self.offsets_at([one for one in wanted if one not in known], "first")
        if fresh:
            self._store.commit(fresh, incarnation)
        return Fetched(known | fresh, incarnation)

    def _begun(self, topics: Collection[str]) -> tuple[set[str], int]:
        found = self._store.fetch(topics)
        return {one.topic for one in found.offsets if one.broker_name == self._broker_name}, found.incarnation

    def offsets_at(self, names: Iterable[QueueName], start: Start) -> dict[QueueName, int]:
        """Where these queues are at ``start``, but for those that do not exist."""
        found: dict[QueueName, int] = {}
        for one in names:
            try:
                found[one] = self.offset_at(one, start)
            except (NotFoundError, InvalidRequestError) as error:  # the route is not that of today
                _log.info("%s: %s", one, error)
        return found

    def offset_at(self, name: QueueName, start: Start) -> int:
        """The same of one. Raises ``NotFoundError`` and ``InvalidRequestError``."""
        deadline = self._connection.deadline()
        if isinstance(start, int):
            by_time = pb.OffsetByTimeRequest(topic=name.topic, queue_id=name.queue_id, timestamp_ms=start)
            offset = self._connection.ask_master(OFFSET_BY_TIME, by_time, deadline).offset
        else:
            where = pb.QueueRequest(topic=name.topic, queue_id=name.queue_id)
            found = self._connection.ask_master(QUEUE_RANGE, where, deadline)
            offset = found.max_offset if start == "last" else max(found.min_offset, 0)
        if offset < 0:
            raise BadAnswerError(f"{name}: a broker returned offset {offset}")
        return offset
