"""What a message is when it goes out: what the application has said stays, and the rest is filled in."""

from __future__ import annotations

import time

import pytest

from rocketstore.client.errors import MessageRefusedError
from rocketstore.client.outgoing import TOPIC_CHARS_MAX, check_message, encode
from rocketstore.message.message import PROPERTY_UNIQUE_KEY, Message
from rocketstore.message.properties import decode_properties
from rocketstore.pb import broker_pb2 as pb


def sent(message: Message) -> tuple[pb.Message, str]:
    """As a broker reads it; and the unique key that its receipt will have."""
    data, said = encode(message, 3)
    (one,) = pb.SendRequest.FromString(data).messages
    assert (said.topic, said.queue_id, one.queue_id) == (message.topic, 3, 3)
    return one, said.unique_key


def test_what_the_application_said_of_its_message_is_sent() -> None:
    """A message that is sent on is as old, and was consumed as often, as it was where it came from."""
    one, _ = sent(Message("T", b"body", born_timestamp=1_234, flag=5, sys_flag=8, reconsume_times=2))

    assert (one.topic, one.body, one.born_timestamp_ms) == ("T", b"body", 1_234)
    assert (one.flag, one.sys_flag, one.reconsume_times) == (5, 8, 2)


def test_a_message_is_born_when_it_is_sent_if_it_was_not_before() -> None:
    before_ms = time.time_ns() // 1_000_000

    one, _ = sent(Message("T", b""))

    assert before_ms <= one.born_timestamp_ms <= time.time_ns() // 1_000_000


@pytest.mark.parametrize("properties", [{}, {"KEYS": "k"}, {"KEYS": "k", PROPERTY_UNIQUE_KEY: ""}])
def test_a_message_without_a_unique_key_gets_one(properties: dict[str, str]) -> None:
    """An empty one is none: all such messages would be the same one to whoever looks for duplicates."""
    keys = set()
    for _ in range(2):
        one, unique_key = sent(Message("T", b"", properties=properties))
        assert decode_properties(one.property_string) == {**properties, PROPERTY_UNIQUE_KEY: unique_key}
        keys.add(unique_key)

    assert len(keys) == 2
    assert "" not in keys


def test_what_brokers_just_take_is_not_refused() -> None:
    check_message(Message("t" * TOPIC_CHARS_MAX, bytes(100)), None, 100)
    for topic, size in (("", 0), ("t" * (TOPIC_CHARS_MAX + 1), 0), ("t", 101)):
        with pytest.raises(MessageRefusedError):
            check_message(Message(topic, bytes(size)), None, 100)
