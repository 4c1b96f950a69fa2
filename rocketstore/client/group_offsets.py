"""Where a group is in its queues: kept by the brokers, or in a file by a member that gets all messages."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Protocol

from dledger.access.permissions import RETRY_PREFIX
from dledger.errors import ConfigError
from rocketstore.client.connection import BrokerConnection
from rocketstore.client.consumer import Start
from rocketstore.client.errors import BadAnswerError
from rocketstore.client.methods import COMMIT_OFFSETS, FETCH_OFFSETS, OFFSET_BY_TIME, QUEUE_RANGE
from rocketstore.client.shares import QueueName
from rocketstore.pb import broker_pb2 as pb

_log = logging.getLogger(__name__)


class OffsetStore(Protocol):
    """Keeps offsets. Both methods may raise ``DLedgerError``."""

    def fetch(self, topics: Collection[str]) -> dict[QueueName, int]:
        """All offsets in these topics."""

    def commit(self, offsets: Mapping[QueueName, int], *, rewind: bool = False) -> None:
        """Store offsets. Without ``rewind``, none goes back."""


class BrokerOffsets:
    """The group's offsets at the master."""

    def __init__(self, connection: BrokerConnection, group: str) -> None:
        self._connection = connection
        self._group = group

    def fetch(self, topics: Collection[str]) -> dict[QueueName, int]:
        """All offsets in these topics."""
        found: dict[QueueName, int] = {}
        for topic in topics:
            request = pb.FetchOffsetsRequest(group=self._group, topic=topic)
            answer = self._connection.ask_master(FETCH_OFFSETS, request, self._connection.deadline())
            found |= {QueueName(topic, one.queue_id): one.offset for one in answer.offsets if one.topic in (topic, "")}
        return found

    def commit(self, offsets: Mapping[QueueName, int], *, rewind: bool = False) -> None:
        """Store offsets. Without ``rewind``, none goes back."""
        wire = [pb.ConsumerOffset(topic=one.topic, queue_id=one.queue_id, offset=offsets[one]) for one in offsets]
        request = pb.CommitOffsetsRequest(group=self._group, offsets=wire, reset=rewind)
        self._connection.ask_master(COMMIT_OFFSETS, request, self._connection.deadline())


class LocalOffsets:
    """Offsets in a JSON file, which only one member may use at a time. Without a file: in memory."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._offsets: dict[QueueName, int] = {} if file is None else _read(file)

    def fetch(self, topics: Collection[str]) -> dict[QueueName, int]:
        """All offsets in these topics."""
        with self._lock:
            return {name: offset for name, offset in self._offsets.items() if name.topic in topics}

    def commit(self, offsets: Mapping[QueueName, int], *, rewind: bool = False) -> None:
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
            QueueName(str(topic), int(queue_id)): int(offset)
            for topic, queues in topics.items()
            for queue_id, offset in queues.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError([f"{file} does not contain offsets ({error}): remove it to start anew"]) from error


def _write(file: Path, offsets: Mapping[QueueName, int]) -> None:
    topics: dict[str, dict[str, int]] = {}
    for name, offset in sorted(offsets.items()):
        topics.setdefault(name.topic, {})[str(name.queue_id)] = offset
    made = file.with_name(f"{file.name}.new")
    with made.open("w") as stream:
        json.dump({"offsets": topics}, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())
    made.replace(file)


class Beginnings:
    """Where queues without an offset begin."""

    def __init__(self, connection: BrokerConnection, store: OffsetStore, start: Start) -> None:
        self._connection = connection
        self._store = store
        self._start = start

    def of(self, queues: Mapping[str, int], wanted: Iterable[QueueName]) -> dict[QueueName, int]:
        """The offsets of the wanted queues; ``queues``: how many each topic has.

        A group that is new in a topic begins where it was told to, in all queues at once, and that is stored before
        anything is consumed: a member that takes a queue over later must not begin behind what was sent meanwhile. A
        queue that is new in a topic begins with its first message.
        """
        wanted = list(wanted)
        topics = {one.topic for one in wanted}
        known = self._store.fetch(topics)
        new = topics - {one.topic for one in known}
        made = {
            QueueName(topic, queue_id): self._offset_at(QueueName(topic, queue_id), self._start_in(topic))
            for topic in new
            for queue_id in range(queues[topic])
        }
        if made:
            self._store.commit(made)
            known |= self._store.fetch(new)  # another new member may have stored later ones
        return {one: known[one] if one in known else self._offset_at(one, "first") for one in wanted}

    def _start_in(self, topic: str) -> Start:
        return "first" if topic.startswith(RETRY_PREFIX) else self._start

    def _offset_at(self, name: QueueName, start: Start) -> int:
        deadline = self._connection.deadline()
        if isinstance(start, int):
            by_time = pb.OffsetByTimeRequest(topic=name.topic, queue_id=name.queue_id, timestamp_ms=start)
            offset = self._connection.ask_master(OFFSET_BY_TIME, by_time, deadline).offset
        else:
            where = pb.QueueRequest(topic=name.topic, queue_id=name.queue_id)
            found = self._connection.ask_master(QUEUE_RANGE, where, deadline)
            offset = found.max_offset if start == "last" else max(found.min_offset, 0)
        if offset < 0:
            raise BadAnswerError(f"queue {name.queue_id} of {name.topic}: a broker returned offset {offset}")
        return offset
