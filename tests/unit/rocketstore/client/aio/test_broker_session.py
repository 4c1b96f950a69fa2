"""What a session commits when only the group's offset tells what its broker still has."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from dledger.remoting.frame import Frame
from rocketstore.client.aio import broker_session
from rocketstore.client.aio.assignment import Assignment, DeliveryQueue
from rocketstore.client.aio.broker_session import BrokerSession, SessionPlan, Subscriptions
from rocketstore.client.aio.consumer_options import ConsumerOptions
from rocketstore.client.aio.offsets import Fetched, StartOffsets
from rocketstore.client.aio.queue_reader import QueueReader
from rocketstore.client.aio.received import split_pulled
from rocketstore.message.message import Message
from rocketstore.message.record import encode_record
from rocketstore.remoting.groups import LockedQueuesBody, LockQueuesBody
from rocketstore.remoting.topics import MessageQueue
from tests.support.on_loop import on_loop, until

QUEUE = MessageQueue("T", "b", 0)
INCARNATION = 2


class Unsure:
    """In the place of a reader that has nothing to compare since the broker was exchanged."""

    max_offset = 9

    def __init__(self, *, goes_back: bool) -> None:
        self.goes_back = goes_back
        self.has_nothing_to_compare = True
        self.sought: list[tuple[int, int]] = []

    async def is_at(self, _incarnation: int) -> bool:
        return False

    def has_looked_at(self, _incarnation: int) -> bool:
        return True

    def has_read_since(self, _offset: int, _incarnation: int) -> bool:
        return False

    def confirm(self, _incarnation: int) -> None:
        self.has_nothing_to_compare = False

    def seek(self, offset: int, incarnation: int) -> None:
        self.sought.append((offset, incarnation))
        self.goes_back = False

    def stop(self) -> None:
        """Nothing runs."""


class Offsets:
    """A store with an offset of the group."""

    def __init__(self, offset: int) -> None:
        self.offset = offset
        self.committed: list[int] = []

    async def fetch(self, queues: Collection[MessageQueue]) -> Fetched:
        return Fetched(dict.fromkeys(queues, self.offset), INCARNATION)

    async def commit(self, offsets: Mapping[MessageQueue, int], _incarnation: int, *, rewind: bool = False) -> None:
        self.committed += [*offsets.values(), *([-1] if rewind else [])]


async def committed(reader: Unsure, offset: int, handed_out: int, done: int) -> tuple[Assignment, Offsets]:
    """A queue that was begun at 3 and of which so much was handed out and done, after a commit."""
    no_broker: Any = SimpleNamespace(routes=SimpleNamespace(broker=lambda _name: None))
    store, deliveries = Offsets(offset), DeliveryQueue(deliveries_max=9, bytes_max=99, span_max=9)
    starts = StartOffsets(no_broker, store, "first")
    subscriptions = Subscriptions("g", "c1", {"T": "*"}, ConsumerOptions(commit_s=None))
    session = BrokerSession("b", no_broker, subscriptions, deliveries, starts, store)
    source: Any = reader
    assignment = Assignment(QUEUE, source, 3, 3)
    for one in range(3, 3 + handed_out):
        assignment.in_flight.hand_out(one, one + 1, 1)
    for one in range(3, 3 + done):
        assignment.in_flight.settle(one)
    deliveries.add(assignment)
    await session.commit()
    deliveries.remove(assignment)
    await session.stop()
    return assignment, store


@pytest.mark.parametrize(("handed_out", "goes_back"), [(0, True), (2, False), (2, True)])
def test_nothing_in_hand_counts_if_only_the_offset_tells(handed_out: int, goes_back: bool) -> None:
    """Also at the very offset that is stored: what was read may have been replaced."""

    @on_loop
    async def commits() -> None:
        reader = Unsure(goes_back=goes_back)
        assignment, store = await committed(reader, 3, handed_out, 0)
        assert reader.sought == [(3, INCARNATION)]
        assert (assignment.in_flight.done, assignment.in_flight.next) == (3, 3)
        assert store.committed == []

    commits()


@on_loop
async def test_what_is_done_and_not_stored_comes_again_if_only_the_offset_tells() -> None:
    """It is not committed: other messages may be in its place."""
    reader = Unsure(goes_back=False)
    assignment, store = await committed(reader, 3, 2, 2)
    assert (reader.sought, assignment.in_flight.done, store.committed) == ([(3, INCARNATION)], 3, [])


@on_loop
async def test_a_queue_of_which_nothing_was_read_goes_on_at_its_offset() -> None:
    """There is nothing to forget."""
    reader = Unsure(goes_back=False)
    assignment, _ = await committed(reader, 3, 0, 0)
    assert (reader.sought, reader.has_nothing_to_compare, assignment.in_flight.done) == ([], False, 3)


@on_loop
async def test_a_queue_that_comes_back_while_its_message_is_handled_begins_once_that_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else two handlers of an ordered consumer would have messages of one queue at a time."""
    monkeypatch.setattr(broker_session, "SETTLE_S", 0.01)
    monkeypatch.setattr(broker_session, "RETRY_S", 0.01)
    monkeypatch.setattr(QueueReader, "start", lambda _reader: None)

    async def ask_master(_name: str, _code: int, _header: None, body: bytes, **_: object) -> Frame:
        return Frame(0, 0, {}, LockedQueuesBody(LockQueuesBody.decode(body).mq_set).encode())

    cluster: Any = SimpleNamespace(
        routes=SimpleNamespace(broker=lambda _name: None), ask_master=ask_master, deadline=lambda: None
    )
    store, deliveries = Offsets(0), DeliveryQueue(deliveries_max=1, bytes_max=99, span_max=9)
    subscriptions = Subscriptions("g", "c1", {"T": "*"}, ConsumerOptions(ordered=True, commit_s=None))
    session = BrokerSession("b", cluster, subscriptions, deliveries, StartOffsets(cluster, store, "first"), store)
    mine, nothing = SessionPlan(frozenset({QUEUE})), SessionPlan()
    session.assign(mine)
    await until(lambda: session.is_settled, "it has the queue")
    assignment = deliveries.assignments[QUEUE]
    assignment.rest.extend(split_pulled(encode_record(Message("T", b"slow")), QUEUE))
    delivery = deliveries.at_once(1)
    assert delivery is not None
    session.assign(nothing)
    await until(lambda: session.is_settled, "it gives the queue back")
    session.assign(SessionPlan(frozenset({QUEUE})))
    await until(lambda: session.is_settled, "it may have it again")
    assert QUEUE not in deliveries.assignments
    assert deliveries.claim(delivery)
    deliveries.finish(delivery)
    session.message_done()
    await until(lambda: QUEUE in deliveries.assignments, "the next one may begin")
    await session.stop()
