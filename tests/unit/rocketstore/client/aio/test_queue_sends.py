"""Messages that RocketMQ's own requests send: how long they have."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import pytest

from dledger.remoting.frame import Frame
from rocketstore.client.aio.errors import ClientError, TimedOutError
from rocketstore.client.aio.outgoing import OutgoingMessage, PendingMessages, PipelineLimits, outgoing
from rocketstore.client.aio.queue_sends import QueueSends, in_time
from rocketstore.client.aio.routes import RoutedBroker
from rocketstore.message.message import Message
from rocketstore.remoting.topics import MessageQueue
from tests.support.on_loop import on_loop

if TYPE_CHECKING:
    from rocketstore.client.aio.cluster import Cluster
    from rocketstore.client.aio.queue_sends import QueueSelector


@on_loop
async def test_a_message_fails_when_its_time_is_up_whatever_stands_before_it() -> None:
    """The first one of a batch has more time than those behind it, if it was sent before and its queue is gone."""
    loop = asyncio.get_running_loop()
    pending = PendingMessages(PipelineLimits())
    first, second = outgoing(Message("T", b"1"), 1024), outgoing(Message("T", b"2"), 1024)
    first.deadline, second.deadline = loop.time() + 60, loop.time() - 1
    second.future = loop.create_future()
    pending.add((first, second))

    assert in_time(pending, [first, second], None) == [first]
    assert len(pending) == 1
    with pytest.raises(TimedOutError):
        await second.future


@on_loop
async def test_a_request_is_waited_for_as_long_as_any_of_its_messages_has_time() -> None:
    """Given up earlier, it leaves the outcome of all of them unknown, also of those that could have waited."""
    loop = asyncio.get_running_loop()
    broker = _Broker()
    pending, queue = PendingMessages(PipelineLimits()), MessageQueue("T", "a", 0)
    cluster, selector = cast("Cluster", broker), cast("QueueSelector", broker)
    sends = QueueSends(cluster, selector, pending, "g", PipelineLimits(), _nowhere, allow_duplicates=False)
    messages = [outgoing(Message("T", body), 1024) for body in (b"1", b"2", b"3")]
    for message, left_s in zip(messages, (5, 60, 1), strict=True):
        message.queue, message.deadline, message.future = queue, loop.time() + left_s, loop.create_future()
    pending.add(messages)
    sends.add(messages)
    async with asyncio.timeout(30):
        waits_s = await broker.asked
    assert 50 < waits_s <= 60
    await sends.close()
    for message in messages:
        assert message.future is not None
        assert isinstance(message.future.exception(), TimedOutError)


def _nowhere(_messages: Sequence[OutgoingMessage], _why: ClientError) -> None:
    raise AssertionError("no queue is gone")


class _Broker:
    """A cluster of one broker that never answers; ``asked`` gets how long it would be waited for."""

    timeout_s = 0.5

    def __init__(self) -> None:
        self.routes = self.connections = self
        self.asked: asyncio.Future[float] = asyncio.get_running_loop().create_future()

    def broker(self, name: str) -> RoutedBroker:
        return RoutedBroker("", name, {0: "127.0.0.1:1"})

    def connection_number(self, _address: str) -> int:
        return 1

    async def call(self, _address: str, _request: Frame, timeout_s: float) -> Frame:
        self.asked.set_result(timeout_s)
        never: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        return await never
