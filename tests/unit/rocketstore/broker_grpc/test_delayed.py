"""What a broker shows of messages that wait for their delivery time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from rocketstore.broker_config import BrokerConfig
from rocketstore.broker_grpc.delayed import MESSAGES_MAX
from rocketstore.client.admin import Admin
from rocketstore.client.producer import Producer
from rocketstore.client.topics import TopicInfo
from rocketstore.message.message import Message
from rocketstore.pb import broker_pb2 as pb
from rocketstore.server import BrokerServer
from tests.support.waiting import wait_until
from tests.unit.rocketstore.broker.harness import Harness, failing
from tests.unit.rocketstore.test_server import plain


@contextmanager
def running(config: BrokerConfig) -> Iterator[Admin]:
    """Of a broker that runs."""
    server = BrokerServer(config).start()
    try:
        with Admin([f"127.0.0.1:{server.port}"], timeout_s=20) as found:
            yield found
    finally:
        server.stop()


@pytest.fixture
def admin(tmp_path: Path) -> Iterator[Admin]:
    """Of a broker with three delay levels and the topic T."""
    with running(plain(tmp_path, messageDelayLevel="1s 1h 2h")) as found:
        found.put_topic(TopicInfo("T", 1, 1))
        yield found


def send(admin: Admin, level: int, *bodies: bytes) -> None:
    """One after the other, so that they wait in this order."""
    with Producer([admin.status().address], timeout_s=20) as producer:
        for body in bodies:
            producer.send(Message("T", body, delay_level=level))


def waiting(admin: Admin, level: int) -> int:
    one = admin.delayed()[0][level - 1]
    return one.end_offset - one.next_offset


def test_levels_and_their_messages_are_shown(admin: Admin) -> None:
    """Each with its delay, how many wait, and when the first of them is due; messages from any offset on."""
    send(admin, 2, b"a", b"b", b"c")
    wait_until(lambda: waiting(admin, 2) == 3, "dispatch")

    levels, messages = admin.delayed(2, max_messages=2)
    _, later = admin.delayed(2, 2, max_messages=100)

    assert [(one.level, one.delay_ms, one.end_offset) for one in levels] == [
        (1, 1000, 0),
        (2, 3600000, 3),
        (3, 7200000, 0),
    ]
    assert [one.next_due_ms for one in levels] == [-1, messages[0].store_timestamp + 3_600_000, -1]
    assert [one.body for one in messages] == [b"a", b"b"]
    assert [(one.body, one.properties["REAL_TOPIC"]) for one in later] == [(b"c", "T")]
    assert admin.delayed(2, 3, max_messages=9)[1] == []
    assert admin.delayed(3, max_messages=9)[1] == []


def test_a_delivered_message_waits_no_longer(admin: Admin) -> None:
    """It is not shown, not even if asked for by its offset."""
    send(admin, 1, b"soon")
    wait_until(lambda: admin.queue_range("T", 0).max_offset == 1, "it is delivered")
    wait_until(lambda: admin.delayed()[0][0].next_offset == 1, "that is noted")

    levels, messages = admin.delayed(1, 0, max_messages=1)

    assert (levels[0].end_offset, levels[0].next_due_ms, messages) == (1, -1, [])


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (pb.DelayedRequest(level=-1), "delay level -1: use 1 to 18, or 0"),
        (pb.DelayedRequest(level=19), "delay level 19: use 1 to 18, or 0"),
        (pb.DelayedRequest(level=1, offset=-2), "offset must be -1 or more"),
        (pb.DelayedRequest(level=1, max_messages=MESSAGES_MAX + 1), "at most 100"),
        (pb.DelayedRequest(level=1, max_messages=-1), "at most 100"),
    ],
)
def test_impossible_numbers_are_refused(request_: pb.DelayedRequest, words: str) -> None:
    with Harness() as broker, failing(grpc.StatusCode.INVALID_ARGUMENT, words):
        broker.call("Delayed", request_, pb.DelayedResponse)


def test_what_waits_in_a_level_that_the_settings_name_no_longer_is_shown(tmp_path: Path) -> None:
    """It is delivered all the same, so nobody may think that there is nothing; its delay is that of the last level."""
    with running(plain(tmp_path, messageDelayLevel="1h 2h 3h")) as admin:
        admin.put_topic(TopicInfo("T", 1, 1))
        send(admin, 3, b"a", b"b")
        wait_until(lambda: waiting(admin, 3) == 2, "dispatch")
    with running(plain(tmp_path, messageDelayLevel="1h 2h")) as admin:
        levels, messages = admin.delayed(3, max_messages=9)
        assert [(one.level, one.delay_ms, one.end_offset - one.next_offset) for one in levels] == [
            (1, 3_600_000, 0),
            (2, 7_200_000, 0),
            (3, 7_200_000, 2),
        ]
        assert [one.body for one in messages] == [b"a", b"b"]
        assert levels[2].next_due_ms == messages[0].store_timestamp + 7_200_000
