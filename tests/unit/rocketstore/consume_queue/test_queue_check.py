"""Which record is the message of a place in a queue."""

from __future__ import annotations

import pytest

from rocketstore.consume_queue.queue import ConsumeQueue
from rocketstore.consume_queue.queue_check import is_message
from rocketstore.message.message import Message
from rocketstore.message.record import encode_record
from rocketstore.types import QueueUnit


class Queue(ConsumeQueue):
    """A queue's name is all that is looked at."""

    def __init__(self, topic: str = "T", queue_id: int = 1) -> None:
        self.topic = topic
        self.queue_id = queue_id


def record() -> bytes:
    return encode_record(Message("T", b"body", 1), queue_offset=3, physical_offset=1000)


QUEUE = Queue()
UNIT = QueueUnit(1000, len(record()), 0)


@pytest.mark.parametrize("check_body", [True, False])
def test_a_message_is_that_of_its_topic_queue_offset_and_place(*, check_body: bool) -> None:
    """A unit with a turned bit may lead to a sound record of another queue, or to this one's neighbour."""

    def fits(queue: Queue = QUEUE, number: int = 3, unit: QueueUnit = UNIT) -> bool:
        return is_message(record(), unit, queue, number, check_body=check_body)

    assert fits()
    assert not fits(Queue(queue_id=0))
    assert not fits(Queue("U"))
    assert not fits(Queue("TT"))
    assert not fits(number=4)
    assert not fits(unit=UNIT._replace(offset=1001))
    assert not fits(unit=UNIT._replace(size=UNIT.size + 1))


@pytest.mark.parametrize("check_body", [True, False])
def test_a_body_is_checked_where_nobody_else_has_done_so(*, check_body: bool) -> None:
    """A replicated log's entries have CRCs of their own."""
    turned = record().replace(b"body", b"bodz")

    assert is_message(turned, UNIT, QUEUE, 3, check_body=check_body) is not check_body
