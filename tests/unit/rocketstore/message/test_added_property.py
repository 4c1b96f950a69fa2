"""A property is added to a stored record as if its producer had set it."""

from __future__ import annotations

import pytest

from rocketstore.message.added_property import with_property
from rocketstore.message.message import Message
from rocketstore.message.record import CorruptRecordError, decode_record, encode_record, queue_place_of
from tests.unit.rocketstore.message.samples import golden_message, golden_message_v6


def bare_message() -> Message:
    return Message("T", b"body", 3)


@pytest.mark.parametrize("make", [golden_message, golden_message_v6, bare_message])
def test_the_record_is_that_of_the_message_with_it(make: object) -> None:
    """Everything else stays, the CRC included; also of a message without properties, and between IPv6 hosts."""
    assert callable(make)
    message: Message = make()
    record = encode_record(message, queue_offset=7, physical_offset=1 << 33)
    made = with_property(record, "POP_CK", "1 2 3")
    before, after = decode_record(record), decode_record(made)
    assert after.properties == before.properties | {"POP_CK": "1 2 3"}
    assert (after.body, after.topic, after.queue_offset, after.offset) == (
        before.body,
        before.topic,
        before.queue_offset,
        before.offset,
    )
    assert len(made) == after.size


def test_the_last_of_several_of_one_name_counts() -> None:
    """A producer that sets a reserved name cannot replace what the broker says."""
    record = encode_record(Message("T", b"b", properties={"POP_CK": "forged"}))
    assert decode_record(with_property(record, "POP_CK", "true")).properties["POP_CK"] == "true"


def test_a_property_that_does_not_fit_is_left_out() -> None:
    """A message at the limit of its properties is delivered all the same."""
    record = encode_record(Message("T", b"b", properties={"a": "x" * 32_700}))
    assert with_property(record, "POP_CK", "y" * 100) is record


def test_nothing_is_added_to_what_is_no_record() -> None:
    """Its length would be wrong."""
    record = encode_record(Message("T", b"b", properties={"a": "b"}))
    with pytest.raises(CorruptRecordError):
        with_property(record[:-1], "n", "v")


@pytest.mark.parametrize("make", [golden_message, golden_message_v6])
def test_the_place_of_a_record_is_found_without_decoding_it(make: object) -> None:
    """Topic, queue and offset, also between IPv6 hosts."""
    assert callable(make)
    message: Message = make()
    record = encode_record(message, queue_offset=9)
    assert queue_place_of(record) == (message.topic, message.queue_id, 9)
