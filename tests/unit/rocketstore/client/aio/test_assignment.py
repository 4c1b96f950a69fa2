"""What of a queue is in use when its broker turns out to have lost messages."""

from __future__ import annotations

from collections import deque
from typing import cast

from rocketstore.client.aio.assignment import Assignment, DeliveryQueue
from rocketstore.client.aio.queue_reader import PulledBatch, QueueReader
from rocketstore.client.aio.received import split_pulled
from rocketstore.message.message import Message
from rocketstore.message.record import encode_record
from rocketstore.remoting.topics import MessageQueue
from tests.support.on_loop import on_loop


class Batches:
    """In the place of a reader."""

    def __init__(self, *batches: PulledBatch) -> None:
        self.batches = deque(batches)
        self.sought: list[int] = []

    def take(self) -> PulledBatch | None:
        return self.batches.popleft() if self.batches else None

    def seek(self, offset: int) -> None:
        self.sought.append(offset)


def assigned(reader: Batches) -> Assignment:
    return Assignment(MessageQueue("T", "b", 0), cast(QueueReader, reader), 0, 0)


def test_what_is_in_use_before_a_lost_end_comes_again() -> None:
    """Nothing that was handed out counts any more, so the position must not be behind its first message."""
    reader = Batches(PulledBatch([], 4, rewinds=True))
    assignment = assigned(reader)
    before = assignment.in_flight
    before.hand_out(2, 3, 10)
    before.hand_out(3, 6, 10)
    assignment.refill()
    assert before.is_abandoned
    assert (assignment.in_flight.done, assignment.position, reader.sought) == (2, 2, [2])
    assert assignment.may_rewind


def test_a_lost_end_that_was_done_is_all_that_is_read_anew() -> None:
    """Where reading goes on is known to the reader already."""
    reader = Batches(PulledBatch([], 4, rewinds=True))
    assignment = assigned(reader)
    assignment.in_flight.hand_out(2, 6, 10)
    assignment.in_flight.settle(2)
    assignment.refill()
    assert (assignment.in_flight.done, assignment.position, reader.sought) == (4, 4, [])


@on_loop
async def test_what_is_in_use_of_a_lost_end_holds_up_nothing_that_is_read_anew() -> None:
    """It does not count against the limits any more: what follows is handed out at once, not at the next change."""
    deliveries = DeliveryQueue(deliveries_max=9, bytes_max=99, span_max=2)
    reader = Batches()
    assignment = assigned(reader)
    deliveries.add(assignment)
    assignment.in_flight.hand_out(0, 2, 10)
    assert deliveries.at_once(9) is None
    read_anew = split_pulled(encode_record(Message("T", b"anew")), assignment.queue)
    reader.batches += [PulledBatch([], 0, rewinds=True), PulledBatch(read_anew, 1)]
    found = deliveries.at_once(9)
    assert found is not None
    assert found.messages == read_anew
