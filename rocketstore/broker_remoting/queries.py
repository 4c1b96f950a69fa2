"""Messages by key, by a producer's unique id, and by position in the log."""

from __future__ import annotations

from typing import Final

from dledger.remoting.codes import AnswerCode, RequestError
from dledger.remoting.connection import RemotingConnection
from dledger.remoting.frame import FRAME_BYTES_MAX, Frame
from rocketstore.broker.broker import Broker
from rocketstore.broker_remoting.administration import Administration
from rocketstore.remoting.headers import (
    QueryMessageAnswer,
    QueryMessageHeader,
    ViewMessageHeader,
    read_header,
    write_header,
)
from rocketstore.types import HIDDEN_TOPICS

UNIQUE_FIELD: Final = "_UNIQUE_KEY_QUERY"
"""Marks the key as a producer's unique id; not part of any header class."""
ANSWER_BYTES_MAX: Final = FRAME_BYTES_MAX - (64 << 10)
"""For the records of one response; the rest is for its header."""


class Queries:
    """On the loop."""

    def __init__(self, broker: Broker, admin: Administration) -> None:
        self._broker = broker
        self._admin = admin

    async def by_key(self, _: RemotingConnection, frame: Frame) -> Frame:
        """QUERY_MESSAGE: the newest messages, as many as fit; clients compare the keys themselves."""
        header = read_header(QueryMessageHeader, frame.fields)
        self._broker.mastership.require_caught_up()
        unique = frame.fields.get(UNIQUE_FIELD, "").lower() == "true"
        found, fields = await self._admin.read(self._find, header, unique)
        if not found:
            reason = "can not find message, maybe time range not correct"
            raise RequestError(reason, AnswerCode.QUERY_NOT_FOUND)
        return frame.answer(fields=fields, body=b"".join(found))

    async def by_offset(self, _: RemotingConnection, frame: Frame) -> Frame:
        """VIEW_MESSAGE_BY_ID: clients extract the offset from the id."""
        header = read_header(ViewMessageHeader, frame.fields)
        self._broker.mastership.require_caught_up()
        record = await self._admin.read(self.record_at, header.offset)
        if record is None:
            raise RequestError(f"can not find message by the offset, {header.offset}")
        return frame.answer(body=record)

    def record_at(self, offset: int) -> bytes | None:
        """The message at an untrusted offset, if clients may see it. May wait for a disk."""
        record = self._broker.store.read_record(offset) if offset >= 0 else None
        return record if record is not None and self._broker.topics.may_be_seen(record) else None

    def _find(self, header: QueryMessageHeader, unique: bool) -> tuple[list[bytes], dict[str, str]]:
        broker, found = self._broker, list[bytes]()
        if header.topic not in HIDDEN_TOPICS and header.max_num > 0:
            found = broker.store.query(
                header.topic,
                header.key,
                header.max_num,
                header.begin_timestamp,
                header.end_timestamp,
                unique=unique,
                max_bytes=min(broker.config.pull_bytes_max, ANSWER_BYTES_MAX),
            )
        end = broker.store.index_end()
        fields = write_header(QueryMessageAnswer(end.store_ms, end.offset))
        return [record for record in found if self._broker.topics.may_be_seen(record)], fields
