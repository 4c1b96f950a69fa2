"""What a reader knows to be at its broker, from one incarnation to the next."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rocketstore.client.aio.queue_reader import PullSettings, QueueReader, _Shown
from rocketstore.client.aio.received import split_pulled
from rocketstore.message.message import Message
from rocketstore.message.record import encode_record
from rocketstore.remoting.headers import PullAnswer
from rocketstore.remoting.topics import MessageQueue
from tests.support.on_loop import on_loop


@on_loop
async def test_what_only_the_offset_can_tell_remains_so_when_the_queue_goes_back() -> None:
    """Further messages are lost: that says nothing about those before them, which nobody has compared."""
    cluster: Any = SimpleNamespace(timeout_s=1.0)
    reader = QueueReader(cluster, MessageQueue("T", "b", 0), 8, PullSettings("g"), lambda: None, 1)
    assert await reader._look_back(2)  # another master, and nothing was read of the one before
    assert reader.has_nothing_to_compare
    reader._go_to(7, 3, "the message before 8 is another one")
    reader.take()
    assert reader.has_nothing_to_compare
    assert not await reader.is_at(3)
    reader.confirm(3)
    assert await reader.is_at(3)


@on_loop
async def test_what_was_read_since_the_exchange_is_only_there_for_the_incarnation_that_has_it() -> None:
    """One that was not compared may have other messages in these places, and so may one that has lost some."""
    cluster: Any = SimpleNamespace(timeout_s=1.0)
    reader = QueueReader(cluster, MessageQueue("T", "b", 0), 8, PullSettings("g"), lambda: None, 1)
    assert not reader.has_read_since(8, 1)
    assert await reader._look_back(2)
    assert reader.has_read_since(8, 2)
    assert not reader.has_read_since(7, 2)
    assert not reader.has_read_since(8, 3)
    reader._go_to(8, 2, "messages were lost")
    assert not reader.has_read_since(8, 2)


@on_loop
async def test_a_commit_that_looks_beside_a_pull_sees_what_that_has_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would hold the queue for lost, and with nobody left to look again leave its position out."""
    cluster: Any = SimpleNamespace(timeout_s=1.0)
    reader = QueueReader(cluster, MessageQueue("T", "b", 0), 8, PullSettings("g"), lambda: None, 1)
    (known,) = split_pulled(encode_record(Message("T", b"x"), queue_offset=7), reader.queue)
    reader._last = known
    looks = [reader._look_back]

    async def message_at(offset: int, _timeout_s: float) -> _Shown:
        assert offset == 7
        if looks:
            assert await looks.pop()(2)
        return _Shown(PullAnswer(0, 8, 0, 9), known, 2)

    monkeypatch.setattr(reader, "_message_at", message_at)
    assert await reader.is_at(2)
    assert not looks
