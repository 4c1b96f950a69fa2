"""Offsets over remoting: the progress of groups, and the bounds of queues."""

from __future__ import annotations

from collections.abc import Callable

from dledger.access.quota import Quota
from dledger.remoting.codes import AnswerCode, RequestError
from dledger.remoting.connection import RemotingConnection
from dledger.remoting.frame import Frame
from rocketstore.broker.offsets import NONE, Offsets
from rocketstore.broker_remoting.decoding import BodyDecoder
from rocketstore.remoting.group_offsets import (
    CommitGroupOffsets,
    CommitPosition,
    FetchedOffsets,
    FetchOffsets,
    encode_committed,
    encode_reached,
)
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


class OffsetRequests:
    """On the loop."""

    def __init__(
        self, offsets: Offsets, quota_of: Callable[[RemotingConnection, Frame], Quota], decoder: BodyDecoder
    ) -> None:
        self._offsets = offsets
        self._quota_of = quota_of
        self._decoder = decoder

    async def query(self, _: RemotingConnection, frame: Frame) -> Frame:
        """QUERY_CONSUMER_OFFSET: a group without an offset starts a short queue at its begin, unless it asks not to."""
        header = read_header(GroupQueueHeader, frame.fields)
        found = await self._offsets.of_group(
            header.consumer_group,
            header.topic,
            header.queue_id,
            begins_short_queues=header.set_zero_if_not_found,
        )
        if found == NONE:
            raise RequestError(
                f"Not found, V3_0_6_SNAPSHOT maybe this group consumer boot first: {header.consumer_group} has no "
                "offset here",
                AnswerCode.QUERY_NOT_FOUND,
            )
        return _offset(frame, found)

    async def update(self, connection: RemotingConnection, frame: Frame) -> Frame:
        """UPDATE_CONSUMER_OFFSET."""
        header = read_header(UpdateOffsetHeader, frame.fields)
        owner = self._quota_of(connection, frame).owner
        await self._offsets.commit(owner, header.consumer_group, header.topic, header.queue_id, header.commit_offset)
        return frame.answer()

    async def fetch_many(self, _: RemotingConnection, frame: Frame) -> Frame:
        """FETCH_OFFSETS."""
        wanted = FetchOffsets.decode(frame.body)
        return frame.answer(body=FetchedOffsets(*self._offsets.fetch_many(wanted.group, wanted.queues)).encode())

    async def commit_many(self, connection: RemotingConnection, frame: Frame) -> Frame:
        """COMMIT_OFFSETS."""
        wanted = CommitGroupOffsets.decode(frame.body)
        owner = self._quota_of(connection, frame).owner
        current = await self._offsets.commit_many(
            owner, wanted.group, wanted.offsets, wanted.incarnation, rewind=wanted.rewind
        )
        return frame.answer(body=encode_committed(current))

    async def commit_position(self, connection: RemotingConnection, frame: Frame) -> Frame:
        """COMMIT_POSITION."""
        wanted = await self._decoder.run(connection, frame, CommitPosition.decode, frame.body)
        owner = self._quota_of(connection, frame).owner
        reached = await self._offsets.commit_position(owner, wanted.group, wanted.position, wanted.topics)
        return frame.answer(body=encode_reached(reached))

    async def maximum(self, _: RemotingConnection, frame: Frame) -> Frame:
        """GET_MAX_OFFSET."""
        header = read_header(QueueHeader, frame.fields)
        return _offset(frame, (await self._offsets.bounds(header.topic, header.queue_id))[1])

    async def minimum(self, _: RemotingConnection, frame: Frame) -> Frame:
        """GET_MIN_OFFSET."""
        header = read_header(QueueHeader, frame.fields)
        return _offset(frame, (await self._offsets.bounds(header.topic, header.queue_id))[0])

    async def by_time(self, _: RemotingConnection, frame: Frame) -> Frame:
        """SEARCH_OFFSET_BY_TIMESTAMP."""
        header = read_header(OffsetByTimeHeader, frame.fields)
        return _offset(frame, await self._offsets.by_time(header.topic, header.queue_id, header.timestamp))

    async def earliest_time(self, _: RemotingConnection, frame: Frame) -> Frame:
        """GET_EARLIEST_MSG_STORETIME."""
        header = read_header(QueueHeader, frame.fields)
        found = await self._offsets.earliest_time(header.topic, header.queue_id)
        return frame.answer(fields=write_header(TimestampAnswer(found)))


def _offset(frame: Frame, offset: int) -> Frame:
    return frame.answer(fields=write_header(OffsetAnswer(offset)))
