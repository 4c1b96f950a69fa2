"""What of a queue is in use when its broker turns out to have lost messages."""

from __future__ import annotations

from collections import deque
from typing import cast

from rocketstore.client.aio.assignment import Assignment
from rocketstore.client.aio.queue_reader import PulledBatch, QueueReader
from rocketstore.remoting.bodies.queues import MessageQueue


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
