"""Properties of what is done to a message before it is stored.

Waiting for the answer to a put.
"""

from __future__ import annotations

import threading

import pytest

from rocketstore.commit_log.port import PutWaiter, QueueOffsets, prepare
from rocketstore.message.message import (
    PROPERTY_DELAY,
    PROPERTY_REAL_QUEUE_ID,
    PROPERTY_REAL_TOPIC,
    SYS_FLAG_COMMITTED,
    SYS_FLAG_PREPARED,
    SYS_FLAG_ROLLED_BACK,
    DelayLevels,
    Message,
)
from rocketstore.types import SCHEDULE_TOPIC, PutMessageStatus, PutResult

LEVELS = DelayLevels.parse("1s 5s 10s")


@pytest.mark.parametrize(("level", "queue_id"), [("1", 0), ("3", 2), ("99", 2)])
def test_a_delayed_message_waits_in_the_queue_of_its_level(level: str, queue_id: int) -> None:
    """Where it belongs is noted; DELAY is the level that it waits for; the caller's properties are not touched."""
    properties = {PROPERTY_DELAY: level}
    message = Message("orders", b"", 7, properties)

    prepare(message, LEVELS)

    assert (message.topic, message.queue_id) == (SCHEDULE_TOPIC, queue_id)
    assert message.properties == {
        PROPERTY_DELAY: str(queue_id + 1),
        PROPERTY_REAL_TOPIC: "orders",
        PROPERTY_REAL_QUEUE_ID: "7",
    }
    assert properties == {PROPERTY_DELAY: level}


def test_a_committed_transactional_message_may_be_delayed() -> None:
    """Only it, of the transactional ones."""
    messages = [
        Message("t", b"", 0, {PROPERTY_DELAY: "1"}, sys_flag=flag)
        for flag in (SYS_FLAG_COMMITTED, SYS_FLAG_PREPARED, SYS_FLAG_ROLLED_BACK)
    ]

    for message in messages:
        prepare(message, LEVELS)

    assert [message.topic for message in messages] == [SCHEDULE_TOPIC, "t", "t"]


@pytest.mark.parametrize("level", ["0", "-1", "x", ""])
def test_a_message_without_a_real_level_is_left_alone(level: str) -> None:
    """Nothing is rewritten."""
    message = Message("t", b"", 0, {PROPERTY_DELAY: level})

    prepare(message, LEVELS)

    assert (message.topic, message.properties) == ("t", {PROPERTY_DELAY: level})


def test_preparing_twice_keeps_the_real_topic() -> None:
    """A message whose put was refused may be submitted again."""
    message = Message("t", b"", 5, {PROPERTY_DELAY: "2"})

    prepare(message, LEVELS)
    prepare(message, LEVELS)

    assert message.properties[PROPERTY_REAL_TOPIC] == "t"
    assert message.properties[PROPERTY_REAL_QUEUE_ID] == "5"


def test_queue_offsets_count_per_queue_and_only_what_is_kept() -> None:
    """Prepared and rolled-back messages get 0 and use none up."""
    offsets = QueueOffsets()
    offsets.replace({("t", 0): 10})
    messages = [
        Message("t", b"", 0),
        Message("t", b"", 1),
        Message("t", b"", 0, sys_flag=SYS_FLAG_PREPARED),
        Message("t", b"", 0, sys_flag=SYS_FLAG_ROLLED_BACK),
        Message("t", b"", 0, sys_flag=SYS_FLAG_COMMITTED),
    ]

    following = offsets.assign(messages)
    before = dict(offsets.table)
    offsets.keep(following)

    assert [message.queue_offset for message in messages] == [10, 0, 0, 0, 11]
    assert before == {("t", 0): 10}
    assert offsets.table == {("t", 0): 12, ("t", 1): 1}


def test_the_table_is_taken_over_as_a_copy() -> None:
    """The caller's stays his."""
    offsets = QueueOffsets()
    table = {("t", 0): 1}

    offsets.replace(table)
    offsets.keep(offsets.assign([Message("t", b"")]))

    assert table == {("t", 0): 1}


def test_a_put_may_be_waited_for_longer_than_the_machine_can_count() -> None:
    """A ``syncFlushTimeout`` of thousands of years is one of never."""
    waiter = PutWaiter()
    results = (PutResult(PutMessageStatus.PUT_OK),)
    answer = threading.Timer(0.01, waiter.done, (results,))

    answer.start()

    assert waiter.wait(1e15) == results
