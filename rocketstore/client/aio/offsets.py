"""Where a group is in its queues: kept by the brokers, or in a file by a consumer that gets all messages."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, Protocol, TypeVar

from dledger.errors import ConfigError
from dledger.remoting.errors import RequestError
from dledger.remoting.frame import Frame
from rocketstore.client.aio.cluster import Cluster
from rocketstore.client.aio.errors import BadAnswerError, ClientError, NotFoundError
from rocketstore.remoting.bodies.queues import MessageQueue
from rocketstore.remoting.codes import RequestCode
from rocketstore.remoting.headers import (
    GroupQueueHeader,
    OffsetAnswer,
    OffsetByTimeHeader,
    QueueHeader,
    UpdateOffsetHeader,
    read_header,
)

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_log = logging.getLogger(__name__)
Start = Literal["first", "last"] | int
"""Where a group without an offset starts: at the oldest message, after the newest, or at a time (ms since 1970)."""
REQUESTS_MAX: Final = 64
"""Requests in progress at once: one for each queue of what may be thousands."""
_H = TypeVar("_H", bound="DataclassInstance")
_K = TypeVar("_K")
_T = TypeVar("_T")


class OffsetStore(Protocol):
    """Keeps offsets. Both methods may raise ``ClientError``; a file's, ``OSError``."""

    async def fetch(self, queues: Collection[MessageQueue]) -> dict[MessageQueue, int]:
        """The offsets of these queues, without those that have none."""

    async def commit(self, offsets: Mapping[MessageQueue, int]) -> None:
        """Store offsets."""


class BrokerOffsets:
    """The group's offsets, each at the master of its queue.

    RocketMQ's brokers before 5.0 answer 0 for a group without an offset in a queue that has all its messages.
    """

    def __init__(self, cluster: Cluster, group: str) -> None:
        self._cluster = cluster
        self._group = group

    async def fetch(self, queues: Collection[MessageQueue]) -> dict[MessageQueue, int]:
        """The offsets of these queues, without those that have none. Raises ``ClientError``."""
        found = await in_parallel(queues, self._fetch)
        return {queue: offset for queue, offset in found.items() if offset is not None}

    async def commit(self, offsets: Mapping[MessageQueue, int]) -> None:
        """Store offsets. Raises ``ClientError``."""
        await in_parallel(offsets.items(), self._commit)

    async def _fetch(self, queue: MessageQueue) -> int | None:
        header = GroupQueueHeader(self._group, queue.topic, queue.queue_id, set_zero_if_not_found=False)
        try:
            answer = await self._ask(queue, RequestCode.QUERY_CONSUMER_OFFSET, header)
        except NotFoundError:
            return None
        return read_answer(OffsetAnswer, answer).offset

    async def _commit(self, position: tuple[MessageQueue, int]) -> None:
        queue, offset = position
        header = UpdateOffsetHeader(self._group, queue.topic, queue.queue_id, offset)
        await self._ask(queue, RequestCode.UPDATE_CONSUMER_OFFSET, header)

    async def _ask(self, queue: MessageQueue, code: RequestCode, header: DataclassInstance) -> Frame:
        return await self._cluster.ask_master(queue.broker_name, code, header, deadline=self._cluster.deadline())


class LocalOffsets:
    """Offsets in a JSON file, which only one consumer may use at a time. Without a file: in memory."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._offsets: dict[MessageQueue, int] = {} if file is None else _read(file)

    async def fetch(self, queues: Collection[MessageQueue]) -> dict[MessageQueue, int]:
        """The offsets of these queues, without those that have none."""
        return {queue: self._offsets[queue] for queue in queues if queue in self._offsets}

    async def commit(self, offsets: Mapping[MessageQueue, int]) -> None:
        """Store offsets. Raises ``OSError``."""
        self._offsets.update(offsets)
        if self._file is not None:
            await asyncio.to_thread(_write, self._file, dict(self._offsets))


class StartOffsets:
    """Where a group begins.

    A group that is new in a topic begins where it was told to, in all queues at once, and that is stored before
    anything is consumed: a member that takes a queue over later must not begin behind messages sent meanwhile. A queue
    that is new in a topic, also one of further brokers, begins with its first message.
    """

    def __init__(self, cluster: Cluster, store: OffsetStore | None, start: Start) -> None:
        self._cluster = cluster
        self._store = store
        self._start = start

    async def begin(self, topics: Mapping[str, Collection[MessageQueue]]) -> None:
        """Store where a group begins in those of these topics that are new to it. Raises ``ClientError``.

        Brokers that do not answer are left out, if any does: their queues begin with the first message, so nothing is
        missed.
        """
        if self._store is None:
            return
        for topic, queues in topics.items():
            by_broker: dict[str, list[MessageQueue]] = {}
            for one in queues:
                by_broker.setdefault(one.broker_name, []).append(one)
            found = await self._survey(topic, list(by_broker.values()))
            if not any(offsets is None for offsets in found):
                made = {queue: offset for offsets in found for queue, offset in (offsets or {}).items()}
                await self._store.commit(made)
                _log.info("topic %s is new to the group: it begins at %s", topic, self._start)

    async def of(self, queues: Collection[MessageQueue]) -> dict[MessageQueue, int]:
        """Where to read these queues from; what was not stored before is stored first. Raises ``ClientError``.

        Queues that do not exist are left out.
        """
        if self._store is None:
            return await self.offsets_at(queues, self._start)
        known = await self._store.fetch(queues)
        fresh = await self.offsets_at([one for one in queues if one not in known], "first")
        if fresh:
            await self._store.commit(fresh)
        return known | fresh

    async def offsets_at(self, queues: Collection[MessageQueue], start: Start) -> dict[MessageQueue, int]:
        """Where these queues are at ``start``, without those that do not exist. Raises ``ClientError``."""
        found = await in_parallel(queues, lambda queue: self._at(queue, start))
        return {queue: offset for queue, offset in found.items() if offset is not None}

    async def _survey(
        self, topic: str, by_broker: Sequence[Collection[MessageQueue]]
    ) -> list[dict[MessageQueue, int] | None]:
        """The answers of the brokers that answer. Raises the first error if none does."""
        answers = await asyncio.gather(*map(self._look, by_broker), return_exceptions=True)
        found: list[dict[MessageQueue, int] | None] = []
        errors: list[ClientError] = []
        for one in answers:
            if isinstance(one, ClientError):
                errors.append(one)
            elif isinstance(one, BaseException):
                raise one
            else:
                found.append(one)
        if errors and not found:
            raise errors[0]
        for error in errors:
            _log.warning(
                "the group may be new in topic %s, and reads its queues at some brokers from their first message then, "
                "because these do not answer: %s",
                topic,
                error,
            )
        return found

    async def _look(self, queues: Collection[MessageQueue]) -> dict[MessageQueue, int] | None:
        """Where the group would begin in the queues of one broker; None if it has an offset in any of them."""
        assert self._store is not None
        if await self._store.fetch(queues):
            return None
        return await self.offsets_at(queues, self._start)

    async def _at(self, queue: MessageQueue, start: Start) -> int | None:
        header: DataclassInstance
        if isinstance(start, int):
            header = OffsetByTimeHeader(queue.topic, queue.queue_id, start)
            code = RequestCode.SEARCH_OFFSET_BY_TIMESTAMP
        else:
            header = QueueHeader(queue.topic, queue.queue_id)
            code = RequestCode.GET_MAX_OFFSET if start == "last" else RequestCode.GET_MIN_OFFSET
        try:
            answer = await self._cluster.ask_master(queue.broker_name, code, header, deadline=self._cluster.deadline())
        except NotFoundError as error:  # the route is not that of today
            _log.info("%s: %s", queue, error)
            return None
        return max(read_answer(OffsetAnswer, answer).offset, 0)


def read_answer(kind: type[_H], answer: Frame) -> _H:
    """The header of an answer. Raises ``BadAnswerError``."""
    try:
        return read_header(kind, answer.fields)
    except RequestError as error:
        raise BadAnswerError(f"an answer cannot be read: {error}") from error


async def in_parallel(items: Iterable[_K], ask: Callable[[_K], Awaitable[_T]]) -> dict[_K, _T]:
    """The answer for each item, ``REQUESTS_MAX`` at a time. Raises the first error, once all of its part have ended."""
    answers: dict[_K, _T] = {}
    waiting = list(items)
    while waiting:
        part, waiting = waiting[:REQUESTS_MAX], waiting[REQUESTS_MAX:]
        found = await asyncio.gather(*map(ask, part), return_exceptions=True)
        for item, one in zip(part, found, strict=True):
            if isinstance(one, BaseException):
                raise one
            answers[item] = one
    return answers


def _read(file: Path) -> dict[MessageQueue, int]:
    try:
        text = file.read_text()
    except FileNotFoundError:
        return {}
    try:
        return {
            MessageQueue(str(topic), str(broker), int(queue_id)): int(offset)
            for topic, brokers in json.loads(text)["offsets"].items()
            for broker, queues in brokers.items()
            for queue_id, offset in queues.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError([f"{file} does not contain offsets ({error}): remove it to start anew"]) from error


def _write(file: Path, offsets: Mapping[MessageQueue, int]) -> None:
    topics: dict[str, dict[str, dict[str, int]]] = {}
    for one in sorted(offsets, key=lambda one: (one.topic, one.broker_name, one.queue_id)):
        topics.setdefault(one.topic, {}).setdefault(one.broker_name, {})[str(one.queue_id)] = offsets[one]
    made = file.with_name(f"{file.name}.new")
    with made.open("w") as stream:
        json.dump({"offsets": topics}, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())
    made.replace(file)
