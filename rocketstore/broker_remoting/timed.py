"""Timed messages over remoting: RECALL_MESSAGE of RocketMQ 5, and our LIST_TIMED."""

from __future__ import annotations

from typing import Final

from dledger.remoting.codes import AnswerCode
from dledger.remoting.connection import RemotingConnection
from dledger.remoting.frame import Frame
from rocketstore.broker.broker import Broker
from rocketstore.broker.refusal import Refusal, RefusalKind
from rocketstore.broker.timed.listing import TimedList, TimedListEntry, list_timed
from rocketstore.remoting.bodies.timed import TimedMessageBody, TimedMessagesBody
from rocketstore.remoting.headers import ListTimedHeader, RecallAnswer, RecallHeader, read_header, write_header

_FINAL: Final = (RefusalKind.INVALID, RefusalKind.NO_MESSAGE)


class RemotingTimed:
    """On the loop."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    async def recall(self, _: RemotingConnection, frame: Frame) -> Frame:
        """RECALL_MESSAGE."""
        header = read_header(RecallHeader, frame.fields)
        try:
            message_id = await self._broker.timed.recall(header.topic, header.recall_handle)
        except Refusal as error:
            if error.kind not in _FINAL:
                raise
            return frame.answer(AnswerCode.ILLEGAL_OPERATION, str(error))
        return frame.answer(fields=write_header(RecallAnswer(message_id)))

    async def list(self, _: RemotingConnection, frame: Frame) -> Frame:
        """LIST_TIMED."""
        broker, header = self._broker, read_header(ListTimedHeader, frame.fields)
        broker.mastership.require_caught_up()
        found: TimedList = await broker.loop.readers.run(
            list_timed,
            broker.store,
            broker.state,
            broker.config.name,
            topic=header.topic,
            key=header.key,
            begin=(header.from_ms, header.from_offset),
            count=header.count,
        )
        counts = await broker.loop.readers.run(broker.timed.counts)
        messages = tuple(map(_body, found.messages))
        next_ = (found.next_ms, found.next_offset)
        body = TimedMessagesBody(messages, *next_, counts.open, counts.late, counts.next_due_ms)
        return frame.answer(body=body.encode())


def _body(found: TimedListEntry) -> TimedMessageBody:
    return TimedMessageBody(
        found.topic,
        found.queue_id,
        found.due_ms,
        found.message_id,
        found.keys,
        found.tags,
        found.size,
        found.born_ms,
        found.handle,
    )
