"""A record's bytes are RocketMQ's, and nothing else is taken for a record.

A property is added to a stored record as if its producer had set it.
"""

from __future__ import annotations

from dataclasses import replace
from struct import pack_into

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dledger.errors import InvalidRequestError
from rocketstore.message.message import HostAddress, Message
from rocketstore.message.record import (
    MESSAGE_MAGIC,
    MESSAGE_MAGIC_V2,
    CorruptRecordError,
    body_at,
    body_crc,
    decode_record,
    encode_record,
    encode_record_buffer,
    is_same_message,
    place_record,
    queue_place_of,
    store_timestamp_at,
    stored_at,
    with_property,
)
from tests.unit.rocketstore.message.samples import GOLDEN_V4, MESSAGES, NEGATIVE_BODY, golden_message, golden_message_v6


def long_topic_record(topic: bytes = b"t" * 200) -> bytes:
    """A record of version 2, as RocketMQ 5 writes it for long topics."""
    body = b"hello"
    tail = len(topic).to_bytes(2, "big") + topic + b"\0\x06TAGS\x01a"
    record = bytearray(GOLDEN_V4[:88] + body + tail)
    pack_into(">ii", record, 0, len(record), MESSAGE_MAGIC_V2)
    return bytes(record)


def test_a_message_is_the_same_at_another_position_of_another_log() -> None:
    """As in a log that was exported from a group's; anything else makes it another one."""
    message = golden_message()
    here, elsewhere = (encode_record(message, queue_offset=5, physical_offset=at) for at in (1024, 1 << 40))
    assert is_same_message(here, elsewhere)
    assert not is_same_message(here, encode_record(message, queue_offset=6, physical_offset=1024))
    assert not is_same_message(here, encode_record(replace(message, body=b"x"), queue_offset=5, physical_offset=1024))
    assert not is_same_message(here, here[:-1])


def test_a_record_between_ipv4_hosts_has_rocketmqs_bytes() -> None:
    """Golden bytes made by RocketMQ 4.9.8."""
    message = golden_message()

    assert encode_record(message, queue_offset=5, physical_offset=1024) == GOLDEN_V4
    assert (message.size, message.body_crc, message.sys_flag) == (125, 907_060_870, 0)


def test_a_record_between_ipv6_hosts_is_24_bytes_longer_and_says_so() -> None:
    """Both flags of the system flag are set, every field after a host moves by 12 bytes."""
    message = golden_message_v6()

    record = encode_record(message, queue_offset=5, physical_offset=1024)

    assert len(record) == message.size == 149
    assert message.sys_flag == 0x30
    assert record[:4] == b"\0\0\0\x95"
    assert record[36:40] == b"\0\0\0\x30"
    assert record[48:68] == bytes.fromhex("105000000000000000050600300c326b0000d431")
    assert record[68:76] == GOLDEN_V4[56:64]
    assert record[76:96] == bytes(15) + bytes.fromhex("0100002a9f")
    assert record[96:] == GOLDEN_V4[72:]


@pytest.mark.parametrize(("born", "store", "flags", "timestamp_at"), [(16, 4, 0x10, 68), (4, 16, 0x20, 56)])
def test_hosts_may_be_of_different_kinds(born: int, store: int, flags: int, timestamp_at: int) -> None:
    """103 bytes of overhead instead of 91."""
    message = replace(golden_message(), born_host=HostAddress(bytes(born), 1), store_host=HostAddress(bytes(store), 2))

    record = encode_record(message)

    assert len(record) == message.size == 137
    assert message.sys_flag == flags
    assert store_timestamp_at(flags) == timestamp_at
    assert record[body_at(flags) :].startswith(b"hello")
    assert decode_record(record) == message


def test_the_crc_is_zlibs_over_the_stored_body_without_the_top_bit() -> None:
    """0 for an empty body."""
    assert body_crc(b"hello") == 907_060_870
    assert body_crc(b"123456789") == 1_274_296_614
    assert body_crc(b"") == 0


def test_the_length_is_the_one_rocketmqs_tests_expect() -> None:
    """A body of 1024 bytes and a topic of 36 make a record of 1151 bytes."""
    assert len(encode_record(Message("t" * 36, bytes(1024)))) == 1151


def test_the_golden_record_is_read_back() -> None:
    """Field by field."""
    stored = replace(golden_message(), queue_offset=5, offset=1024, size=125, body_crc=907_060_870)

    assert decode_record(GOLDEN_V4) == stored


@pytest.mark.parametrize("message", [golden_message(), golden_message_v6()])
def test_a_record_encoded_before_the_lock_is_completed_in_place(message: Message) -> None:
    """Only the two offsets and the store timestamp are left to be filled in."""
    buffer = encode_record_buffer(replace(message, store_timestamp=0))
    encode_record(message)

    place_record(buffer, message, 5, 1024)

    assert buffer == encode_record(message, queue_offset=5, physical_offset=1024)


def test_a_final_separator_of_the_properties_is_read() -> None:
    """RocketMQ 4.6 stores one."""
    record = bytearray(GOLDEN_V4 + b"\x02")
    pack_into(">i", record, 0, 126)
    pack_into(">h", record, 103, 21)

    assert decode_record(bytes(record)).properties == golden_message().properties


def test_a_record_of_version_2_is_read() -> None:
    """RocketMQ 5 writes it for topics longer than 127 bytes."""
    message = decode_record(long_topic_record())

    assert message.topic == "t" * 200
    assert message.properties == {"TAGS": "a"}


@given(MESSAGES, st.integers(0, 2**63 - 1), st.integers(0, 2**63 - 1))
def test_every_message_is_read_back_as_it_was_written(message: Message, queue_offset: int, offset: int) -> None:
    """Whatever its fields."""
    record = encode_record(message, queue_offset=queue_offset, physical_offset=offset)

    assert decode_record(record) == replace(message, queue_offset=queue_offset, offset=offset)
    assert len(record) == message.size


@pytest.mark.parametrize(
    "message",
    [
        Message("", b""),
        Message("t" * 128, b""),
        Message("\u4e2d" * 43, b""),
        Message("\ud800", b""),
        Message("t", b"", properties={"a": "b" * 32_766}),
        Message("t", b"", properties={"a": "\u4e2d" * 20_000}),
        Message("t", b"", properties={"a": "b\x02c"}),
        Message("t", b"", queue_id=2**31),
        Message("t", b"", flag=-(2**31) - 1),
        Message("t", b"", born_timestamp=2**63),
        Message("t", b"", born_host=HostAddress(b"", 0)),
        Message("t", b"", store_host=HostAddress(bytes(5), 0)),
        Message("t", b"", store_host=HostAddress(bytes(4), 2**31)),
    ],
)
def test_what_no_record_can_hold_is_refused(message: Message) -> None:
    """With an error that callers expect, not one of struct."""
    with pytest.raises(InvalidRequestError):
        encode_record(message)


@pytest.mark.parametrize("properties_bytes", [255, 256, 32_767])
def test_properties_may_fill_their_length_field(properties_bytes: int) -> None:
    """Up to 32767 bytes."""
    message = Message("t", b"x", properties={"a": "b" * (properties_bytes - 2)})

    assert decode_record(encode_record(message)) == message


def test_more_topics_than_are_remembered_are_still_written_right() -> None:
    """The memory of topics is bounded."""
    for number in range(5000):
        assert decode_record(encode_record(Message(f"t{number}", b""))).topic == f"t{number}"


def test_no_part_of_a_record_passes_for_a_record() -> None:
    """Cut at any byte, or with a byte too many."""
    for cut in range(len(GOLDEN_V4)):
        with pytest.raises(CorruptRecordError):
            decode_record(GOLDEN_V4[:cut])
    with pytest.raises(CorruptRecordError):
        decode_record(GOLDEN_V4 + b"\0")


@pytest.mark.parametrize(
    "tail",
    [
        b"\0\0\0",
        b"\x01t\0\x01",
        b"\x01t\xff\xff",
        b"\x03t\0\xff",
        b"\x02t\0\xff",
        b"\x80" + b"t" * 128 + b"\0\0",
        b"\x01\xff\0\0",
    ],
)
def test_lengths_that_do_not_add_up_are_refused(tail: bytes) -> None:
    """Of topic and properties; also an empty topic and one that is no text."""
    record = bytearray(GOLDEN_V4[:93] + tail)
    pack_into(">i", record, 0, len(record))

    with pytest.raises(CorruptRecordError):
        decode_record(bytes(record))


def test_a_negative_body_length_is_refused_also_where_the_rest_adds_up_to_it() -> None:
    """With -16 the topic would be found among the fields before the body."""
    with pytest.raises(CorruptRecordError):
        decode_record(NEGATIVE_BODY)


def test_a_flipped_bit_of_the_body_is_noticed() -> None:
    """Unless the caller does not want to know."""
    for bit in range(40):
        record = bytearray(GOLDEN_V4)
        record[88 + bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptRecordError, match="CRC"):
            decode_record(bytes(record))
        assert decode_record(bytes(record), check_crc=False).queue_id == 3


@given(st.integers(0, len(GOLDEN_V4) * 8 - 1))
def test_a_flipped_bit_anywhere_is_read_or_refused_but_never_another_error(bit: int) -> None:
    """Most of a record is unprotected."""
    record = bytearray(GOLDEN_V4)
    record[bit // 8] ^= 1 << bit % 8

    _decode_or_refuse(bytes(record))


def test_a_topics_length_is_signed() -> None:
    """Of two bytes in version 2, as RocketMQ reads it; all else of this record would fit a topic of 32 KiB."""
    longest, too_long = long_topic_record(b"t" * 0x7FFF), long_topic_record(b"t" * 0x8000)

    assert len(decode_record(longest).topic) == 0x7FFF
    with pytest.raises(CorruptRecordError, match="the topic's length, -32768, does not fit"):
        decode_record(too_long)


def test_the_time_of_storing_is_read_from_the_first_bytes_of_a_record_and_of_nothing_else() -> None:
    """The bodies of a log's entries may be anything of any length; what is behind an IPv6 host stands later."""
    record = encode_record(golden_message_v6())

    assert stored_at(record[:76]) == golden_message_v6().store_timestamp
    assert stored_at(GOLDEN_V4) == golden_message().store_timestamp
    assert [stored_at(record[:length]) for length in range(76)] == [None] * 76
    assert stored_at(bytes(100)) is None


@given(st.binary(max_size=200))
@example(b"")
@example(long_topic_record(b""))
@example(long_topic_record(b"\xff"))
@example(GOLDEN_V4[:93] + b"\xff" + GOLDEN_V4[94:])
@example(GOLDEN_V4[:93] + b"\x00" + GOLDEN_V4[94:])
@example(GOLDEN_V4[:36] + b"\0\0\0\x30" + GOLDEN_V4[40:])
@example(GOLDEN_V4[:84] + b"\xff\xff\xff\xff" + GOLDEN_V4[88:])
@example(GOLDEN_V4[:84] + b"\x7f\xff\xff\xff" + GOLDEN_V4[88:])
@example(b"\0\0\0\x5b" + GOLDEN_V4[4:36] + b"\0\0\0\x30" + bytes(51))
def test_any_bytes_are_read_or_refused_but_never_another_error(data: bytes) -> None:
    """Damaged files and hostile peers."""
    _decode_or_refuse(data)


@given(st.binary(max_size=60))
def test_any_bytes_after_a_good_head_are_read_or_refused_but_never_another_error(tail: bytes) -> None:
    """The same, deeper in."""
    for magic in (MESSAGE_MAGIC, MESSAGE_MAGIC_V2):
        record = bytearray(GOLDEN_V4[:88] + b"hello" + tail)
        pack_into(">ii", record, 0, len(record), magic)
        _decode_or_refuse(bytes(record))


def _decode_or_refuse(data: bytes) -> None:
    try:
        decode_record(data)
    except CorruptRecordError:
        return


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
