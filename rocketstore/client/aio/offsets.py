"""Where a group is in its queues: kept by the brokers, or in a file by a consumer that gets all messages."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, Protocol, TypeVar

from dledger.errors import ConfigError
from dledger.remoting.codes import RequestError
from dledger.remoting.frame import Frame
from rocketstore.client.aio.cluster import Cluster
from rocketstore.client.aio.connections import ATTEMPT_S_MAX
from rocketstore.client.aio.errors import (
    BadAnswerError,
    BrokerUnreachableError,
    ClientError,
    ConnectionEndedError,
    NotFoundError,
    OtherIncarnationError,
    RefusedError,
    may_repeat,
)
from rocketstore.remoting.codes import OwnCode, RequestCode
from rocketstore.remoting.extensions import (
    QUEUES_MAX,
    CommitGroupOffsets,
    FetchedOffsets,
    FetchOffsets,
    decode_committed,
)
from rocketstore.remoting.headers import (
    GroupHeader,
    GroupQueueHeader,
    OffsetAnswer,
    OffsetByTimeHeader,
    QueueHeader,
    UpdateOffsetHeader,
    read_header,
    write_header,
)
from rocketstore.remoting.topics import MessageQueue

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_log = logging.getLogger(__name__)
Start = Literal["first", "last"] | int
"""Where a group without an offset starts: at the oldest message, after the newest, or at a time (ms since 1970)."""
LOOKS_MAX: Final = 3
"""How often a commit looks again because another broker became master since it looked."""
REQUESTS_MAX: Final = 64
"""Requests in progress at once: one for each queue of what may be thousands."""
_H = TypeVar("_H", bound="DataclassInstance")
_K = TypeVar("_K")
_T = TypeVar("_T")


class Fetched(NamedTuple):
    """Offsets, and the incarnation of the broker that keeps them; 0: it is none."""

    offsets: dict[MessageQueue, int]
    incarnation: int = 0


class OffsetStore(Protocol):
    """Keeps offsets. Both methods may raise ``ClientError``; a file's, ``OSError``."""

    async def fetch(self, queues: Collection[MessageQueue]) -> Fetched:
        """The offsets of these queues, all of one broker name, without those that have none."""

    async def commit(self, offsets: Mapping[MessageQueue, int], incarnation: int, *, rewind: bool = False) -> None:
        """Store offsets, all of one broker name. Without ``rewind``, none goes back, where brokers can tell.

        Raises ``OtherIncarnationError`` if the broker is of another incarnation, unless that is 0.
        """


class BrokerOffsets:
    """The group's offsets, each at the master of its queue.

    Brokers of this project have requests for many queues, which know the master's incarnation. Elsewhere it is the
    connection that has the number: what goes over one connection goes to one process. RocketMQ's brokers before 5.0
    answer 0 for a group without an offset in a queue that has all its messages.
    """

    def __init__(self, cluster: Cluster, group: str) -> None:
        self._cluster = cluster
        self._group = group

    async def fetch(self, queues: Collection[MessageQueue]) -> Fetched:
        """The offsets of these queues, without those that have none. Raises ``ClientError``."""
        found: dict[MessageQueue, int] = {}
        incarnations: set[int] = set()
        for part in parts(queues):
            offsets, incarnation = await self._at_master(part[0].broker_name, partial(self._fetch, part))
            found |= {queue: offset for queue, offset in offsets.items() if offset is not None}
            incarnations.add(incarnation)
        if len(incarnations) > 1:
            raise OtherIncarnationError("another broker became master, or it was restarted, while it was asked")
        return Fetched(found, *incarnations)

    async def commit(self, offsets: Mapping[MessageQueue, int], incarnation: int, *, rewind: bool = False) -> None:
        """Store offsets; what a broker refuses of one queue keeps no other one from it. Raises ``ClientError``."""
        refused: RefusedError | None = None
        waiting = parts(offsets)
        while waiting:
            part = waiting.pop()
            chosen = {queue: offsets[queue] for queue in part}
            try:
                await self._at_master(part[0].broker_name, partial(self._commit, chosen, incarnation, rewind))
            except RefusedError as error:
                if may_repeat(error, harmless=True):
                    raise
                refused = error
                if len(part) > 1:
                    waiting += [[queue] for queue in part]
        if refused is not None:
            raise refused

    async def _at_master(self, name: str, ask: Callable[[str, bool], Awaitable[_T]]) -> _T:
        """``ask`` the master, told its address and whether it is a broker of this project; again until the deadline."""
        cluster, deadline = self._cluster, self._cluster.deadline()

        async def attempt() -> _T:
            address = (await cluster.broker(name, deadline)).master
            if not address:
                raise BrokerUnreachableError(f"brokers {name or 'of this group'} have no master now")
            any_request = Frame(RequestCode.GET_CONSUMER_LIST_BY_GROUP, 0, write_header(GroupHeader(self._group)))
            timeout_s = min(ATTEMPT_S_MAX, deadline.remaining_s)
            return await ask(address, await cluster.connections.knows_ours(address, any_request, timeout_s))

        return await cluster.repeat(attempt, deadline, harmless=True)

    async def _fetch(
        self, queues: Sequence[MessageQueue], address: str, is_ours: bool
    ) -> tuple[dict[MessageQueue, int | None], int]:
        ask, number = self._cluster.connections.ask, self._cluster.connections.connection_number(address)
        if is_ours:
            wanted = FetchOffsets(self._group, [(one.topic, one.queue_id) for one in queues])
            answer = await ask(address, OwnCode.FETCH_OFFSETS, None, wanted.encode(), timeout_s=ATTEMPT_S_MAX)
            fetched = _decoded(lambda: FetchedOffsets.decode(answer.body, len(queues)))
            known = {one: offset if offset >= 0 else None for one, offset in zip(queues, fetched.offsets, strict=True)}
            return known, fetched.incarnation

        async def fetch(queue: MessageQueue) -> int | None:
            header = GroupQueueHeader(self._group, queue.topic, queue.queue_id, set_zero_if_not_found=False)
            try:
                answer = await ask(address, RequestCode.QUERY_CONSUMER_OFFSET, header, timeout_s=ATTEMPT_S_MAX)
            except NotFoundError:
                return None
            return read_answer(OffsetAnswer, answer).offset

        found = await in_parallel(queues, fetch)
        if not number or self._cluster.connections.connection_number(address) != number:
            raise ConnectionEndedError(f"{address} hung up while it was asked: it may have been restarted")
        return found, number

    async def _commit(
        self, offsets: Mapping[MessageQueue, int], incarnation: int, rewind: bool, address: str, is_ours: bool
    ) -> None:
        connections = self._cluster.connections
        if is_ours:
            places = [(one.topic, one.queue_id, offset) for one, offset in offsets.items()]
            body = CommitGroupOffsets(self._group, places, incarnation, rewind).encode()
            answer = await connections.ask(address, OwnCode.COMMIT_OFFSETS, None, body, timeout_s=ATTEMPT_S_MAX)
            if incarnation in (0, _decoded(lambda: decode_committed(answer.body))):
                return
            raise OtherIncarnationError(
                "the offsets are not committed: another broker became master, or it was restarted"
            )

        async def commit(position: tuple[MessageQueue, int]) -> None:
            queue, offset = position
            if incarnation not in (0, connections.connection_number(address)):
                raise OtherIncarnationError(f"not all offsets are committed: {address} may have been restarted")
            header = UpdateOffsetHeader(self._group, queue.topic, queue.queue_id, offset)
            await connections.ask(address, RequestCode.UPDATE_CONSUMER_OFFSET, header, timeout_s=ATTEMPT_S_MAX)

        await in_parallel(offsets.items(), commit)


def parts(queues: Iterable[MessageQueue]) -> list[list[MessageQueue]]:
    """As many as brokers take at once. Those of a topic stay together: a group begins in all its queues, or in none."""
    topics: dict[str, list[MessageQueue]] = {}
    for one in queues:
        topics.setdefault(one.topic, []).append(one)
    found: list[list[MessageQueue]] = []
    for named in topics.values():
        if not found or len(found[-1]) + len(named) > QUEUES_MAX:
            found.append([])
        found[-1] += named
    return found


class LocalOffsets:
    """Offsets in a JSON file, which only one consumer may use at a time. Without a file: in memory."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._offsets: dict[MessageQueue, int] = {} if file is None else _read(file)

    async def fetch(self, queues: Collection[MessageQueue]) -> Fetched:
        """The offsets of these queues, without those that have none."""
        return Fetched({queue: self._offsets[queue] for queue in queues if queue in self._offsets})

    async def commit(self, offsets: Mapping[MessageQueue, int], _incarnation: int, *, rewind: bool = False) -> None:
        """Store offsets. Without ``rewind``, none goes back. Raises ``OSError``."""
        for queue, offset in offsets.items():
            self._offsets[queue] = offset if rewind else max(offset, self._offsets.get(queue, 0))
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
                for surveyed in found:
                    if surveyed is not None:
                        await self._begin_at(self._store, surveyed)
                _log.info("topic %s is new to the group: it begins at %s", topic, self._start)

    @staticmethod
    async def _begin_at(store: OffsetStore, surveyed: Fetched) -> None:
        """Store it, unless another member was faster: then ours are not behind anything sent since that one began."""
        begun = await store.fetch(surveyed.offsets)
        if not begun.offsets and surveyed.offsets:
            await store.commit(surveyed.offsets, surveyed.incarnation)

    async def of(self, queues: Collection[MessageQueue]) -> Fetched:
        """Where to read these queues from; new positions are stored first. Raises ``ClientError``.

        Queues that do not exist are left out.
        """
        if self._store is None:
            return Fetched(await self.offsets_at(queues, self._start))
        known, incarnation = await self._store.fetch(queues)
        fresh = await self.offsets_at([one for one in queues if one not in known], "first")
        if fresh:
            await self._store.commit(fresh, incarnation)
        return Fetched(known | fresh, incarnation)

    async def offsets_at(self, queues: Collection[MessageQueue], start: Start) -> dict[MessageQueue, int]:
        """Where these queues are at ``start``, without those that do not exist. Raises ``ClientError``."""
        found = await in_parallel(queues, lambda queue: self._at(queue, start))
        return {queue: offset for queue, offset in found.items() if offset is not None}

    async def _survey(self, topic: str, by_broker: Sequence[Collection[MessageQueue]]) -> list[Fetched | None]:
        """The answers of the brokers that answer. Raises the first error if none does."""
        answers = await asyncio.gather(*map(self._look, by_broker), return_exceptions=True)
        found: list[Fetched | None] = []
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

    async def _look(self, queues: Collection[MessageQueue]) -> Fetched | None:
        """Where the group would begin in the queues of one broker; None if it has an offset in any of them."""
        assert self._store is not None
        begun, incarnation = await self._store.fetch(queues)
        if begun:
            return None
        return Fetched(await self.offsets_at(queues, self._start), incarnation)

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


def _decoded(decode: Callable[[], _T]) -> _T:
    try:
        return decode()
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
