"""Answers to messages that asked for one: they go straight to the producer that asked, and are not stored."""

from __future__ import annotations

from typing import Final

from dledger.remoting.codes import FrameError, RequestError
from dledger.remoting.connection import DisconnectedError, RemotingConnection, TooManyCallsError
from dledger.remoting.frame import Frame
from rocketstore.broker.broker import Broker
from rocketstore.broker.clients import ClientTables
from rocketstore.broker.mastership import host_text
from rocketstore.broker_remoting.links import connection_of
from rocketstore.message.properties import decode_properties
from rocketstore.remoting.codes import RequestCode
from rocketstore.remoting.headers import PushReplyHeader, SendAnswer, SendHeader, read_header, write_header

PROPERTY_REPLY_TO: Final = "REPLY_TO_CLIENT"
PROPERTY_PUSHED_AT: Final = "PUSH_REPLY_TIME"
PUSH_S_MAX: Final = 2.5
"""A client that sends a reply hangs up after 3 s without an answer, and loses what else is under way."""
_SEPARATOR: Final = "\x02"
NO_ID: Final = "0"
"""In the place of the message's id, because it is not stored."""


class Replies:
    """On the loop."""

    def __init__(self, broker: Broker, clients: ClientTables) -> None:
        self._broker = broker
        self._clients = clients

    async def send(self, connection: RemotingConnection, frame: Frame) -> Frame:
        """SEND_REPLY_MESSAGE and SEND_REPLY_MESSAGE_V2."""
        header = read_header(SendHeader, frame.fields, short=frame.code != RequestCode.SEND_REPLY_MESSAGE)
        asker_id = decode_properties(header.properties.encode()).get(PROPERTY_REPLY_TO)
        if not asker_id:
            raise RequestError(f"reply message properties[{PROPERTY_REPLY_TO}] is null")
        asker = self._clients.producer_by_id(asker_id)
        if asker is None:
            raise RequestError(f"push reply message fail, channel of <{asker_id}> not found.")
        try:
            answer = await connection_of(asker.link).call(self._pushed(connection, frame, header), PUSH_S_MAX)
        except (TimeoutError, DisconnectedError, TooManyCallsError, FrameError) as error:
            reason = str(error) or f"no answer within {PUSH_S_MAX:g} s"
            raise RequestError(f"push reply message to {asker_id} fail: {reason}") from error
        if answer.code:
            raise RequestError(f"push reply message to {asker_id} fail: {answer.remark}")
        return frame.answer(fields=write_header(SendAnswer(NO_ID, header.queue_id, 0)))

    def _pushed(self, connection: RemotingConnection, frame: Frame, header: SendHeader) -> Frame:
        now_ms = self._broker.loop.clock.wall_ms()
        push = PushReplyHeader(
            header.producer_group,
            header.topic,
            header.default_topic,
            header.default_topic_queue_nums,
            header.queue_id,
            header.sys_flag,
            header.born_timestamp,
            header.flag,
            str(connection.place),
            host_text(self._broker.store_host),
            now_ms,
            f"{header.properties.rstrip(_SEPARATOR)}{_SEPARATOR}{PROPERTY_PUSHED_AT}\x01{now_ms}",
            header.reconsume_times,
            header.unit_mode,
        )
        return Frame(RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT, 0, write_header(push), frame.body)
