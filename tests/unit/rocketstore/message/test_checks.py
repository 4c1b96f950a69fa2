"""What is refused before it reaches the log."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocketstore.config import KIB, MIB, MessageStoreConfig
from rocketstore.message.checks import check_body, check_client_topic, check_message, check_topic
from rocketstore.message.message import HostAddress, Message
from rocketstore.message.record import encode_record
from rocketstore.types import (
    BROKER_STATE_TOPIC,
    HIDDEN_TOPICS,
    SCHEDULE_TOPIC,
    TERM_START_TOPIC,
    PutMessageStatus,
    PutResult,
)
from tests.unit.rocketstore.message.samples import MESSAGES, golden_message, golden_message_v6

CONFIG = MessageStoreConfig()


def status(refusal: PutResult | None) -> PutMessageStatus | None:
    """Of a refusal, which must say that nothing was stored, and why."""
    if refusal is None:
        return None
    assert (refusal.outcome, refusal.stored, refusal.ok) == ("not_applied", None, False)
    assert refusal.reason
    return refusal.status


@pytest.mark.parametrize(
    "topic", ["TopicTest", "%RETRY%group", "a|b", "_-", "t" * 127, SCHEDULE_TOPIC, BROKER_STATE_TOPIC, TERM_START_TOPIC]
)
def test_good_topics_pass(topic: str) -> None:
    """RocketMQ's alphabet, up to 127 characters; asked twice, because answers are remembered."""
    assert check_topic(topic) == check_topic(topic) == ""


@pytest.mark.parametrize(
    "topic",
    ["", ".", "..", "../a", "a/b", "a.b", "a b", "a\n", "a\0", "t" * 128, "\u4e2d", "\u0661", "\xe9", "\ud800", "a\\b"],
)
def test_other_topics_are_refused(topic: str) -> None:
    """Among them every name that could lead out of a directory; a refusal is not remembered as a pass."""
    assert check_topic(topic)
    assert check_topic(topic)
    assert check_client_topic(topic)
    assert status(check_message(Message(topic, b""), CONFIG)) is PutMessageStatus.MESSAGE_ILLEGAL


def test_more_topics_than_are_remembered_are_still_checked() -> None:
    """The memory of good topics is bounded."""
    assert not any(check_topic(f"topic{number}") for number in range(5000))
    assert check_topic("a/b")


@pytest.mark.parametrize(
    "topic", [*sorted(HIDDEN_TOPICS), SCHEDULE_TOPIC, "RMQ_SYS_TRANS_HALF_TOPIC", "OFFSET_MOVED_EVENT"]
)
def test_clients_may_not_send_to_the_brokers_topics_but_the_broker_may(topic: str) -> None:
    """The store takes them, for the broker writes them through it."""
    assert check_client_topic(topic)
    assert check_message(Message(topic, b"x"), CONFIG) is None
    assert check_client_topic("TopicTest") == ""


@pytest.mark.parametrize(
    ("body_bytes", "refused"), [(4 * MIB, False), (4 * MIB + 1, True), (4 * MIB + 64 * KIB, True), (0, False)]
)
def test_bodies_are_limited(body_bytes: int, refused: bool) -> None:
    """To ``max_message_size``."""
    assert bool(check_body(Message("t", bytes(body_bytes)), CONFIG)) is refused


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("b" * 32_765, None),
        ("b" * 32_766, PutMessageStatus.MESSAGE_ILLEGAL),
        ("\u4e2d" * 10_921, None),
        ("\u4e2d" * 10_922, PutMessageStatus.PROPERTIES_SIZE_EXCEEDED),
        ("\u4e2d" * 32_766, PutMessageStatus.MESSAGE_ILLEGAL),
        ("b\x02c", PutMessageStatus.MESSAGE_ILLEGAL),
        ("\ud800", PutMessageStatus.MESSAGE_ILLEGAL),
    ],
)
def test_properties_are_limited_in_characters_and_in_bytes(value: str, expected: PutMessageStatus | None) -> None:
    """32767 of each, with RocketMQ's two statuses; and no separators or broken text in them."""
    assert status(check_message(Message("t", b"", properties={"a": value}), CONFIG)) is expected


def test_a_delayed_message_must_have_room_for_what_the_schedule_adds() -> None:
    """Its real topic and queue are kept as properties."""
    properties = {"DELAY": "1", "a": "b" * 32_700}

    assert (
        status(check_message(Message("t" * 60, b"", properties=properties), CONFIG))
        is PutMessageStatus.PROPERTIES_SIZE_EXCEEDED
    )
    del properties["DELAY"]
    assert check_message(Message("t" * 60, b"", properties=properties), CONFIG) is None


@pytest.mark.parametrize(("message", "overhead"), [(golden_message(), 125 - 5), (golden_message_v6(), 149 - 5)])
@pytest.mark.parametrize(("replicated", "around"), [(False, 8), (True, 56)])
def test_a_record_must_fit_a_file_with_the_blank_after_it(
    message: Message, overhead: int, replicated: bool, around: int
) -> None:
    """RocketMQ would say PUT_OK for a record that fits none."""
    config = MessageStoreConfig(mapped_file_size_commit_log=4096, enable_dledger_commit_log=replicated)
    room = 4096 - overhead - around

    assert check_message(replace(message, body=bytes(room)), config) is None
    assert status(check_message(replace(message, body=bytes(room + 1)), config)) is PutMessageStatus.MESSAGE_ILLEGAL


def test_what_was_accepted_once_is_stored_again_if_it_fits_into_a_file() -> None:
    """A delayed, half or retried message, although ``max_message_size`` was lowered since it was sent."""
    config = MessageStoreConfig(max_message_size=100, mapped_file_size_commit_log=1 << 20)
    delayed = Message("t", bytes(500_000), properties={"DELAY": "1"})

    assert check_body(delayed, config)
    assert check_message(delayed, config) is None
    assert check_message(Message("t", bytes(500_000), property_string=b"a\x01b"), config) is None
    assert status(check_message(Message("t", bytes(1 << 20)), config)) is PutMessageStatus.MESSAGE_ILLEGAL


@pytest.mark.parametrize(
    "message",
    [
        Message("t", b"", queue_id=-1),
        Message("t", b"", queue_id=2**31),
        Message("t", b"", flag=2**31),
        Message("t", b"", sys_flag=2**31),
        Message("t", b"", born_timestamp=2**63),
        Message("t", b"", prepared_offset=2**63),
        Message("t", b"", reconsume_times=2**31),
        Message("t", b"", born_host=HostAddress(bytes(5), 0)),
        Message("t", b"", store_host=HostAddress(bytes(4), 2**31)),
    ],
)
def test_numbers_that_do_not_fit_their_fields_are_refused(message: Message) -> None:
    """Before they could fail under the put lock."""
    assert status(check_message(message, CONFIG)) is PutMessageStatus.MESSAGE_ILLEGAL


@given(
    st.builds(
        Message,
        topic=st.text("ab/%", max_size=3),
        body=st.binary(max_size=3),
        queue_id=st.integers(-(2**32), 2**32),
        properties=st.dictionaries(
            st.text("a\x01\x02\ud800", max_size=2), st.text("a\x01\x02\ud800", max_size=2), max_size=2
        ),
        born_host=st.builds(HostAddress, st.binary(min_size=3, max_size=5), st.integers(0, 2**32)),
    )
    | MESSAGES
)
def test_what_passes_can_be_encoded(message: Message) -> None:
    """The checks are complete."""
    if check_message(message, CONFIG) is None:
        encode_record(message)
