"""Messages that are acknowledged one by one, as a simple consumer gets them, and how their answers are read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from dledger.errors import DLedgerError
from dledger.remoting.codes import RequestError
from rocketstore.client.aio.errors import BadAnswerError
from rocketstore.client.aio.received import ReceivedMessage, split_records
from rocketstore.message.message import PROPERTY_RETRY_TOPIC
from rocketstore.message.properties import PROPERTY_CHECK_POINT
from rocketstore.message.record import queue_place_of
from rocketstore.remoting.bodies.queues import MessageQueue
from rocketstore.remoting.headers import read_header
from rocketstore.remoting.pop import CheckPoint, PopAnswer

_RETRY: Final = "%RETRY%"


class PoppedMessage(ReceivedMessage):
    """One message of a topic, for one consumer and a time; read-only."""

    __slots__ = ("point", "queue", "received_at")

    queue: MessageQueue
    """Where it came from: topic, broker, number. For a message that comes again, that is a topic of the group's own."""
    point: CheckPoint
    """The broker's name for this delivery."""
    received_at: float
    """In the loop's time."""

    @property
    def topic(self) -> str:
        """The topic that it was sent to, also if it comes again."""
        return self.property(PROPERTY_RETRY_TOPIC) or self.queue.topic

    @property
    def attempts(self) -> int:
        """How often it was delivered before."""
        return self.decode().reconsume_times

    @property
    def expires_at(self) -> float:
        """When it becomes visible to others, in the loop's time, unless it was acknowledged or its time was changed."""
        return self.received_at + self.point.invisible_time / 1000


def read_popped(
    fields: Mapping[str, str], body: bytes, topic: str, broker: str, received_at: float
) -> list[PoppedMessage]:
    """The messages of an answer to POP_MESSAGE. Raises ``BadAnswerError``."""
    try:
        answer = read_header(PopAnswer, fields)
        starts = _starts(answer.start_offset_info)
        messages = split_records(body, kind=PoppedMessage)
        for one in messages:
            text = one.property(PROPERTY_CHECK_POINT)
            stored = queue_place_of(one.record).topic  # who wants no more of it need not decode it
            one.point = CheckPoint.parse(text) if text else _point(one, stored, answer, starts, broker)
            one.queue = MessageQueue(stored, broker, one.queue_id)
            one.received_at = received_at
    except (DLedgerError, RequestError) as error:
        raise BadAnswerError(f"the answer to a pop for {topic}: {error}") from error
    return messages


def _starts(info: str) -> dict[tuple[bool, int], int]:
    found: dict[tuple[bool, int], int] = {}
    for one in info.split(";") if info else ():
        try:
            retry, queue_id, start = one.split(" ")
            found[retry != "0", int(queue_id)] = int(start)
        except ValueError:
            raise BadAnswerError(f"startOffsetInfo {info[:64]!r} cannot be understood") from None
    return found


def _point(
    message: PoppedMessage, stored: str, answer: PopAnswer, starts: Mapping[tuple[bool, int], int], broker: str
) -> CheckPoint:
    """Apache's brokers leave it to clients."""
    is_retry = stored.startswith(_RETRY)
    start = starts.get((is_retry, message.queue_id), message.queue_offset)
    times = answer.pop_time, answer.invisible_time, answer.revive_qid
    return CheckPoint(start, *times, is_retry, broker, message.queue_id, message.queue_offset)


def by_broker(messages: Iterable[PoppedMessage]) -> dict[str, list[PoppedMessage]]:
    """Messages by the name of the brokers that must hear of them."""
    found: dict[str, list[PoppedMessage]] = {}
    for one in messages:
        found.setdefault(one.queue.broker_name, []).append(one)
    return found
