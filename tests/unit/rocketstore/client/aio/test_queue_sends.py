"""Messages that RocketMQ's own requests send: whose time is up."""

from __future__ import annotations

import asyncio

import pytest

from rocketstore.client.aio.errors import TimedOutError
from rocketstore.client.aio.outgoing import outgoing
from rocketstore.client.aio.pending import PendingMessages, PipelineLimits
from rocketstore.client.aio.queue_sends import in_time
from rocketstore.message.message import Message
from tests.support.on_loop import on_loop


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
