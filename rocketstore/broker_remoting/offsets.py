"""Offsets over remoting: the progress of groups, and the bounds of queues."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import Final, NamedTuple

from dledger.errors import DLedgerError
from dledger.remoting.codes import AnswerCode
from dledger.remoting.connection import RemotingConnection
from dledger.remoting.errors import RequestError
from dledger.remoting.frame import Frame
from dledger.rpc.bridge import LoopCallback
from rocketstore.broker.broker import Broker
from rocketstore.broker.ports import StateDone
from rocketstore.broker.refusal import Refusal
from rocketstore.remoting.group_offsets import CommitOffsets, FetchedOffsets, FetchOffsets, encode_committed
from rocketstore.remoting.headers import (
    GroupQueueHeader,
    OffsetAnswer,
    OffsetByTimeHeader,
    QueueHeader,
    TimestampAnswer,
    UpdateOffsetHeader,
    read_header,
    write_header,
)
from rocketstore.types import PutResult

_LOG: Final = logging.getLogger(__name__)
_NONE: Final = -1
PULLED_INTERVAL_S: Final = 0.2
"""Offsets committed with pulls are replicated this often: a busy consumer commits with each of thousands of pulls."""
PULLED_MAX: Final = 4096
"""Maximum of them that wait for that; then they are replicated at once."""


class _Pulled(NamedTuple):
    """An offset committed with a pull, and the group's offset before: another one by now is newer."""

    offset: int
    before: int


class Offsets:
    """On the loop."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._pulled: dict[tuple[str, str, int], _Pulled] = {}
        self._pulled_timer: asyncio.TimerHandle | None = None

    async def query(self, _: RemotingConnection, frame: Frame) -> Frame:
        """QUERY_CONSUMER_OFFSET: a group without an offset starts a short queue at its begin, unless it asks not to."""
        broker, header = self._broker, read_header(GroupQueueHeader, frame.fields)
        broker.mastership.require_caught_up()
        found = broker.state.offset(header.consumer_group, header.topic, header.queue_id)
        if found == _NONE:
            low, high = await self._range(header.topic, header.queue_id)
            if low > 0 or not header.set_zero_if_not_found or await self._is_long(header.topic, header.queue_id, high):
                raise RequestError(
                    f"Not found, V3_0_6_SNAPSHOT maybe this group consumer boot first: {header.consumer_group} has no "
                    "offset here",
                    AnswerCode.QUERY_NOT_FOUND,
                )
            found = 0
        return frame.answer(fields=write_header(OffsetAnswer(found)))

    async def update(self, _: RemotingConnection, frame: Frame) -> Frame:
        """UPDATE_CONSUMER_OFFSET: any offset from the client, also backwards; but not beyond the end."""
        broker, header = self._broker, read_header(UpdateOffsetHeader, frame.fields)
        broker.mastership.require()
        self._pulled.pop((header.consumer_group, header.topic, header.queue_id), None)  # it is older
        outcome: LoopCallback[PutResult] = LoopCallback(broker.loop.bridge)
        self._commit(header.consumer_group, header.topic, header.queue_id, header.commit_offset, outcome.done)
        result = await outcome.future
        if not result.ok:
            raise RequestError(result.reason or str(result.status))
        return frame.answer()

    async def fetch_many(self, _: RemotingConnection, frame: Frame) -> Frame:
        """FETCH_OFFSETS."""
        broker, wanted = self._broker, FetchOffsets.decode(frame.body)
        broker.mastership.require()
        broker.mastership.require_caught_up()
        incarnation = broker.store.incarnation
        found = [broker.state.offset(wanted.group, topic, queue_id) for topic, queue_id in wanted.queues]
        return frame.answer(body=FetchedOffsets(incarnation, found).encode())

    async def commit_many(self, _: RemotingConnection, frame: Frame) -> Frame:
        """COMMIT_OFFSETS: not beyond the end, and backwards only if that is asked for."""
        broker, wanted = self._broker, CommitOffsets.decode(frame.body)
        broker.mastership.require()
        incarnation = broker.store.incarnation
        if wanted.incarnation in (0, incarnation):
            for topic, queue_id, _offset in wanted.offsets:
                self._pulled.pop((wanted.group, topic, queue_id), None)  # it is older
            outcome: LoopCallback[PutResult] = LoopCallback(broker.loop.bridge)
            broker.state.commit_offsets(wanted.group, wanted.offsets, wanted.rewind, outcome.done)
            result = await outcome.future
            if not result.ok:
                raise RequestError(result.reason or str(result.status))
        return frame.answer(body=encode_committed(incarnation))

    def commit(self, group: str, topic: str, queue_id: int, offset: int) -> None:
        """The offset committed with a pull: the last one counts, soon, and the pull does not depend on it."""
        if not self._broker.mastership.is_master:
            return
        key = group, topic, queue_id
        waiting = self._pulled.get(key)
        before = self._broker.state.offset(*key) if waiting is None else waiting.before
        if waiting is None and offset == before:
            return
        self._pulled[key] = _Pulled(offset, before)
        if len(self._pulled) >= PULLED_MAX:
            self._commit_pulled()
        elif self._pulled_timer is None:
            self._pulled_timer = asyncio.get_running_loop().call_later(PULLED_INTERVAL_S, self._commit_pulled)

    def close(self) -> None:
        """Commit what waits."""
        self._commit_pulled()

    async def maximum(self, _: RemotingConnection, frame: Frame) -> Frame:
        """GET_MAX_OFFSET."""
        header = read_header(QueueHeader, frame.fields)
        _low, high = await self._range(header.topic, header.queue_id)
        return frame.answer(fields=write_header(OffsetAnswer(high)))

    async def minimum(self, _: RemotingConnection, frame: Frame) -> Frame:
        """GET_MIN_OFFSET."""
        header = read_header(QueueHeader, frame.fields)
        low, _high = await self._range(header.topic, header.queue_id)
        return frame.answer(fields=write_header(OffsetAnswer(low)))

    async def by_time(self, _: RemotingConnection, frame: Frame) -> Frame:
        """SEARCH_OFFSET_BY_TIMESTAMP."""
        broker, header = self._broker, read_header(OffsetByTimeHeader, frame.fields)
        if not self._is_readable(header.topic, header.queue_id):
            return frame.answer(fields=write_header(OffsetAnswer(0)))
        found = await broker.loop.readers.run(
            broker.store.offset_by_time, header.topic, header.queue_id, header.timestamp
        )
        found = max(found, broker.topics.begin_offset(header.topic, header.queue_id))
        return frame.answer(fields=write_header(OffsetAnswer(found)))

    async def earliest_time(self, _: RemotingConnection, frame: Frame) -> Frame:
        """GET_EARLIEST_MSG_STORETIME."""
        broker, header = self._broker, read_header(QueueHeader, frame.fields)
        low, high = await self._range(header.topic, header.queue_id)
        timestamp = _NONE
        if high > low:
            timestamp = await broker.loop.readers.run(broker.store.store_time, header.topic, header.queue_id, low)
        return frame.answer(fields=write_header(TimestampAnswer(timestamp)))

    def _commit(self, group: str, topic: str, queue_id: int, offset: int, done: StateDone) -> None:
        """Consumers commit every queue every 5 s: an unchanged offset must cost nothing, and it may go back."""
        state = self._broker.state
        goes_back = offset < state.offset(group, topic, queue_id)
        state.commit_offsets(group, [(topic, queue_id, offset)], goes_back, done)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _commit_pulled(self) -> None:
        if self._pulled_timer is not None:
            self._pulled_timer.cancel()
            self._pulled_timer = None
        pulled, self._pulled = self._pulled, {}
        if not self._broker.mastership.is_master:
            return
        for (group, topic, queue_id), (offset, before) in pulled.items():
            if self._broker.state.offset(group, topic, queue_id) != before:
                continue  # it was reset or committed otherwise meanwhile
            said = f"offset {offset} of {group} for queue {queue_id} of {topic}"
            try:
                self._commit(group, topic, queue_id, offset, partial(_log_failure, said))
            except DLedgerError as error:
                _LOG.debug("%s: %s", said, error)

    def _is_readable(self, topic: str, queue_id: int) -> bool:
        try:
            self._broker.topics.check_readable(topic, queue_id)
        except Refusal:
            return False
        return True

    async def _range(self, topic: str, queue_id: int) -> tuple[int, int]:
        """The bounds of a queue; 0 if it does not exist."""
        self._broker.mastership.require_caught_up()
        if not self._is_readable(topic, queue_id):
            return 0, 0
        return await self._broker.loop.readers.run(self.range_of, topic, queue_id)

    def range_of(self, topic: str, queue_id: int) -> tuple[int, int]:
        """The bounds of a queue. May wait for a disk."""
        broker = self._broker
        low = max(broker.store.min_offset(topic, queue_id), broker.topics.begin_offset(topic, queue_id), 0)
        return low, max(broker.store.max_offset(topic, queue_id), low)

    async def _is_long(self, topic: str, queue_id: int, high: int) -> bool:
        """Whether the begin of a queue is too far back for a group to start there implicitly."""
        if not high:
            return False
        broker = self._broker
        position = await broker.loop.readers.run(broker.store.position_of, topic, queue_id, 0)
        return broker.store.log.max_offset - position > broker.store.memory_bytes_max


def _log_failure(said: str, result: PutResult) -> None:
    if not result.ok:
        _LOG.debug("%s: %s", said, result.reason)
