"""Scanning finds every record, and stops at whatever is none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from struct import pack

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dledger.records import ENTRY, ENTRY_HEADER_BYTES
from dledger.types import NOOP_CHANNEL
from rocketstore.message.message import DelayLevels, HostAddress, Message
from rocketstore.message.properties import encode_properties, java_hash
from rocketstore.message.record import (
    BLANK_HEAD,
    BLANK_MAGIC,
    MESSAGE_MAGIC,
    MESSAGE_MAGIC_V2,
    OVERHEAD,
    PHYSICAL_OFFSET_AT,
    body_crc,
    encode_record,
)
from rocketstore.message.scan import RecordScanOutcome, scan_entries, scan_records
from rocketstore.types import SCHEDULE_TOPIC, TERM_START_TOPIC, RecordHead
from tests.support.sweeps import thinned
from tests.unit.rocketstore.message.samples import (
    BODY_AT,
    ENTRY_BYTES,
    GOLDEN_V4,
    MESSAGES,
    NEGATIVE_BODY,
    PROPERTIES_LENGTH_AT,
    RECORD,
    RECORD_BYTES,
    TOPIC_AT,
    TOPIC_LENGTH_AT,
    changed,
    entry,
    field,
    golden_message,
    golden_message_v6,
    resized,
)

BASE = 1 << 40
LEVELS = DelayLevels.parse("1s 5s")
NEXT_RECORD = encode_record(golden_message(), physical_offset=ENTRY_BYTES + ENTRY_HEADER_BYTES)
"""What can follow an entry with one golden record, at position 0."""


def log_of(messages: Sequence[Message], base: int = BASE) -> bytes:
    """A plain log's bytes, and each message's ``offset`` set."""
    log = b""
    for number, message in enumerate(messages):
        message.offset = base + len(log)
        log += encode_record(message, queue_offset=number, physical_offset=message.offset)
    return log


def entries_of(messages: Sequence[Message], base: int = BASE, index: int = 7) -> bytes:
    """A replicated log's bytes."""
    log = b""
    for number, message in enumerate(messages):
        at = base + len(log)
        record = encode_record(message, queue_offset=number, physical_offset=at + ENTRY_HEADER_BYTES)
        log += entry(record, index=index + number, position=at)
    return log


def head_of(message: Message, number: int, offset: int) -> RecordHead:
    """What dispatch must learn of the message."""
    return RecordHead(
        message.topic,
        message.queue_id,
        offset,
        message.size,
        java_hash(message.tags),
        message.store_timestamp,
        -1 if message.sys_flag & 0xC in (0x4, 0xC) else number,
        message.sys_flag,
        message.prepared_offset,
        encode_properties(message.properties),
    )


def test_the_golden_record_is_found() -> None:
    """Between IPv4 hosts, at its own physical offset."""
    outcome = scan_records(GOLDEN_V4, 1024, check_crc=True)

    properties = b"KEYS\x01k1 k2\x02TAGS\x01TagA"
    head = RecordHead("TopicTest", 3, 1024, 125, 2598919, 1_700_000_000_123, 5, 0, 9, properties)
    assert outcome == RecordScanOutcome([head], 125, "more", "offset 1149: the data ends")


@given(st.lists(MESSAGES, max_size=6), st.booleans())
def test_every_record_is_found(messages: list[Message], check_crc: bool) -> None:
    """In order, whatever its hosts, properties and transaction type."""
    log = log_of(messages)

    outcome = scan_records(memoryview(log), BASE, check_crc=check_crc)

    assert outcome[1:3] == (len(log), "more")
    assert outcome.heads == [head_of(message, number, message.offset) for number, message in enumerate(messages)]


@given(st.lists(MESSAGES, max_size=6), st.booleans())
def test_every_record_in_entries_is_found(messages: list[Message], check_crc: bool) -> None:
    """With the record's offset, not the entry's."""
    log = entries_of(messages)

    outcome = scan_entries(memoryview(log), BASE, check_crc=check_crc)

    at, heads = BASE, []
    for number, message in enumerate(messages):
        heads.append(head_of(message, number, at + ENTRY_HEADER_BYTES))
        at += ENTRY_HEADER_BYTES + message.size
    assert outcome[1:3] == (len(log), "more")
    assert outcome.heads == heads


@pytest.mark.parametrize(("transaction", "queue_offset"), [(0, 5), (0x4, -1), (0x8, 5), (0xC, -1)])
def test_prepared_and_rolled_back_messages_have_no_place_in_a_queue(transaction: int, queue_offset: int) -> None:
    """Committed ones and plain ones have."""
    record = encode_record(replace(golden_message(), sys_flag=transaction), queue_offset=5)

    assert scan_records(record, 0, check_crc=True).heads[0].queue_offset == queue_offset


@pytest.mark.parametrize(
    ("topic", "properties", "levels", "code"),
    [
        (SCHEDULE_TOPIC, {"TAGS": "TagA", "DELAY": "1"}, LEVELS, 1_700_000_001_123),
        (SCHEDULE_TOPIC, {"DELAY": "2"}, LEVELS, 1_700_000_005_123),
        (SCHEDULE_TOPIC, {"DELAY": "18"}, LEVELS, 1_700_000_005_123),
        (SCHEDULE_TOPIC, {"TAGS": "TagA", "DELAY": "0"}, LEVELS, 2598919),
        (SCHEDULE_TOPIC, {"TAGS": "TagA", "DELAY": "x"}, LEVELS, 2598919),
        (SCHEDULE_TOPIC, {"TAGS": "TagA"}, LEVELS, 2598919),
        (SCHEDULE_TOPIC, {"TAGS": "TagA", "DELAY": "1"}, None, 2598919),
        ("TopicTest", {"TAGS": "TagA", "DELAY": "1"}, LEVELS, 2598919),
        ("TopicTest", {}, LEVELS, 0),
    ],
)
def test_the_tags_code_of_a_delayed_message_is_when_it_is_due(
    topic: str, properties: dict[str, str], levels: DelayLevels | None, code: int
) -> None:
    """Only in the schedule topic, with a level and a table of levels."""
    message = replace(golden_message(), topic=topic, properties=properties)

    heads = scan_records(encode_record(message), 0, check_crc=True, delay_levels=levels).heads
    assert heads[0].tags_code == code
    heads = scan_entries(entries_of([message], base=0), 0, check_crc=True, delay_levels=levels).heads
    assert heads[0].tags_code == code


@pytest.mark.parametrize(
    ("properties", "tag"),
    [
        (b"TAGS\x01a", "a"),
        (b"TAGS\x01a\x02", "a"),
        (b"TAGS\x01a\x02x\x01y", "a"),
        (b"x\x01y\x02TAGS\x01a", "a"),
        (b"TAGS\x01a\x02TAGS\x01b", "b"),
        (b"TAGS\x01a\x02TAGS\x01", "a"),
        (b"TAGS\x01a\x02TAGS\x01\x02", "a"),
        (b"MYTAGS\x01a", ""),
        (b"TAGS\x01a\x02MYTAGS\x01b", "a"),
        (b"x\x01TAGS\x01a", ""),
        (b"TAGS\x01", ""),
        (b"TAGS", ""),
    ],
)
def test_the_tag_is_found_as_reading_the_properties_would_find_it(properties: bytes, tag: str) -> None:
    """Nothing that only looks like it."""
    record = resized(RECORD[:PROPERTIES_LENGTH_AT] + len(properties).to_bytes(2, "big") + properties)

    outcome = scan_records(record, 1024, check_crc=True)

    assert outcome.heads[0].tags_code == java_hash(tag)
    assert outcome.heads[0].properties == properties


@pytest.mark.parametrize(("topic_bytes", "end"), [(127, "more"), (128, "more"), (255, "more"), (256, "damaged")])
def test_a_topic_is_at_most_as_long_as_a_directorys_name(topic_bytes: int, end: str) -> None:
    """Version 2 could say more."""
    topic = topic_bytes.to_bytes(2, "big") + b"t" * topic_bytes
    record = resized(RECORD[:TOPIC_LENGTH_AT] + topic + b"\0\0", MESSAGE_MAGIC_V2)

    assert scan_records(record, 1024, check_crc=True).end == end


def test_a_record_of_version_2_is_found_and_its_topic_does_not_make_version_1_valid() -> None:
    """Version 1 cannot have a topic of more than 127 bytes, also once such a topic is known."""
    topic = b"t" * 200
    second = resized(RECORD[:TOPIC_LENGTH_AT] + b"\0\xc8" + topic + b"\0\0", MESSAGE_MAGIC_V2)
    first = resized(RECORD[:TOPIC_LENGTH_AT] + b"\xc8" + topic + b"\0\0")

    for _ in range(2):
        assert scan_records(second, 1024, check_crc=True).heads[0].topic == "t" * 200
        assert scan_records(first, 1024, check_crc=True).end == "damaged"


def test_a_scan_stops_before_a_blank_and_says_how_long_it_is() -> None:
    """Also where the blank is not wholly in the data."""
    blank = pack(">ii", 100, BLANK_MAGIC)

    for rest in (blank, blank + bytes(92)):
        outcome = scan_records(RECORD + rest, 1024, check_crc=True)
        assert (len(outcome.heads), outcome.consumed, outcome.end, outcome.needed) == (1, RECORD_BYTES, "blank", 100)
    assert scan_records(pack(">ii", 7, BLANK_MAGIC), 0, check_crc=True).end == "damaged"
    assert scan_records(RECORD + blank[:7], 1024, check_crc=True).end == "more"


@pytest.mark.sweep
@pytest.mark.parametrize("cut", thinned(range(RECORD_BYTES)))
def test_a_cut_off_record_is_asked_for_again(cut: int) -> None:
    """At every byte; its length is known from the eighth on."""
    log = log_of([golden_message(), golden_message()], base=0)

    outcome = scan_records(log[: RECORD_BYTES + cut], 0, check_crc=True)

    assert (len(outcome.heads), outcome.consumed, outcome.end) == (1, RECORD_BYTES, "more")
    assert outcome.needed == (RECORD_BYTES if cut >= 8 else 0)


@pytest.mark.sweep
@pytest.mark.parametrize("cut", thinned(range(RECORD_BYTES + 48)))
def test_a_cut_off_entry_is_asked_for_again(cut: int) -> None:
    """At every byte of it."""
    log = entries_of([golden_message(), golden_message()], base=0)

    outcome = scan_entries(log[: ENTRY_BYTES + cut], 0, check_crc=True)

    assert (len(outcome.heads), outcome.consumed, outcome.end) == (1, ENTRY_BYTES, "more")
    assert outcome.needed == (ENTRY_BYTES if cut >= 8 else 0)


def test_no_ops_and_blanks_between_entries_are_skipped() -> None:
    """DLedger's empty no-op, one in the form of a message, and blanks that are wholly there."""
    log = entry(b"", index=1, position=0, magic=2)
    start = encode_record(Message(TERM_START_TOPIC, b"n0 1"), physical_offset=len(log) + ENTRY_HEADER_BYTES)
    log += entry(start, index=2, position=len(log), channel=NOOP_CHANNEL)
    log += pack(">ii", -1, 100) + bytes(92)
    message_at = len(log) + ENTRY_HEADER_BYTES
    log += entries_of([golden_message()], base=len(log), index=3)
    log += pack(">ii", -1, 8)

    outcome = scan_entries(log, 0, check_crc=True)

    assert [head.offset for head in outcome.heads] == [message_at]
    assert (outcome.consumed, outcome.end) == (len(log), "more")


def test_a_message_cannot_hide_as_a_no_op() -> None:
    """The channel is not protected: only records of the term's topic are skipped for it."""
    record = encode_record(golden_message(), physical_offset=ENTRY_HEADER_BYTES)

    outcome = scan_entries(entry(record, index=1, position=0, channel=NOOP_CHANNEL), 0, check_crc=True)

    assert (outcome.consumed, outcome.end) == (0, "damaged")


@pytest.mark.parametrize("rest", [pack(">ii", -1, 100), pack(">ii", -1, 100) + bytes(60)])
def test_a_blank_that_is_cut_off_ends_the_scan_of_entries(rest: bytes) -> None:
    """The caller goes on after it, at the next file."""
    outcome = scan_entries(entries_of([golden_message()], base=0) + rest, 0, check_crc=True)

    assert (len(outcome.heads), outcome.consumed, outcome.end, outcome.needed) == (1, ENTRY_BYTES, "blank", 100)


@pytest.mark.parametrize(
    ("at", "value"),
    [
        field("size", RECORD_BYTES - 1),
        field("size", OVERHEAD - 1),
        field("size", 0),
        field("size", -1),
        (0, bytes(RECORD_BYTES)),
        field("magic", MESSAGE_MAGIC + 1),
        field("crc", body_crc(b"hello") + 1),
        field("physical_offset", 1025),
        field("sys_flag", 0x10),
        field("body_length", -1),
        field("body_length", 2**31 - 1),
        field("body_length", 6),
        (BODY_AT, b"H"),
        (TOPIC_LENGTH_AT, b"\x00"),
        (TOPIC_LENGTH_AT, b"\x08"),
        (TOPIC_LENGTH_AT, b"\xff"),
        (TOPIC_AT, b"\xff"),
        (TOPIC_AT, b"/"),
        (TOPIC_AT, b"\0"),
        (PROPERTIES_LENGTH_AT, pack(">h", 21)),
        (PROPERTIES_LENGTH_AT, pack(">h", -1)),
    ],
)
def test_a_damaged_record_stops_the_scan_and_is_named(at: int, value: bytes) -> None:
    """In a plain log and in an entry, with the records before it kept."""
    good = log_of([golden_message()], base=1024)
    record = changed(encode_record(golden_message(), physical_offset=1024 + RECORD_BYTES), (at, value))
    outcome = scan_records(good + record + good, 1024, check_crc=True)
    assert (len(outcome.heads), outcome.consumed, outcome.end, outcome.needed) == (1, RECORD_BYTES, "damaged", 0)
    assert outcome.reason.startswith(f"offset {1024 + RECORD_BYTES}: ")

    log = entries_of([golden_message()], base=1024)
    position = 1024 + ENTRY_BYTES
    value = value if at != PHYSICAL_OFFSET_AT else pack(">q", 1)
    record = changed(encode_record(golden_message(), physical_offset=position + ENTRY_HEADER_BYTES), (at, value))
    log += entry(record, index=8, position=position)
    outcome = scan_entries(log, 1024, check_crc=True)
    assert (len(outcome.heads), outcome.consumed, outcome.end) == (1, ENTRY_BYTES, "damaged")
    assert outcome.reason.startswith(f"offset {position}: ")


@pytest.mark.parametrize("topic", [b".", b"..", b"../../etc", b"a/b", b"/", b"a\nb", b"\xc0\xaf"])
def test_topics_that_lead_out_of_their_directory_are_damage(topic: bytes) -> None:
    """A topic becomes the name of a directory."""
    record = resized(RECORD[:TOPIC_LENGTH_AT] + bytes((len(topic),)) + topic + b"\0\0")

    assert scan_records(record, 1024, check_crc=False).end == "damaged"


@pytest.mark.parametrize(
    "damaged",
    [
        entry(NEXT_RECORD, index=9, position=ENTRY_BYTES),
        entry(NEXT_RECORD, index=7, position=ENTRY_BYTES),
        entry(NEXT_RECORD, index=8, position=ENTRY_BYTES + 1),
        entry(NEXT_RECORD, index=8, position=ENTRY_BYTES, magic=3),
        entry(NEXT_RECORD, index=8, position=ENTRY_BYTES, magic=0),
        ENTRY.struct().pack(1, ENTRY_HEADER_BYTES - 1, 8, 1, ENTRY_BYTES, 0, 0, 0, -1) + bytes(200),
        ENTRY.struct().pack(1, ENTRY_BYTES, 8, 1, ENTRY_BYTES, 0, 0, 0, RECORD_BYTES - 1) + bytes(RECORD_BYTES),
        ENTRY.struct().pack(2, ENTRY_HEADER_BYTES + 2, 8, 1, ENTRY_BYTES, 0, 0, 0, 1) + bytes(RECORD_BYTES),
        entry(b"", index=8, position=ENTRY_BYTES),
        pack(">ii", -1, 7) + bytes(100),
        pack(">ii", -1, -1),
        bytes(100),
        bytes(8),
        pack(">ii", 1, 40),
    ],
)
def test_a_damaged_entry_stops_the_scan(damaged: bytes) -> None:
    """Wrong place, wrong order, wrong length, or none at all."""
    good = entries_of([golden_message()], base=0)

    outcome = scan_entries(good + damaged, 0, check_crc=True)

    assert (len(outcome.heads), outcome.consumed, outcome.end) == (1, ENTRY_BYTES, "damaged")
    assert len(scan_entries(good + entry(NEXT_RECORD, index=8, position=ENTRY_BYTES), 0, check_crc=True).heads) == 2


def test_lengths_that_no_record_can_have_are_damage_at_once() -> None:
    """No more bytes are asked for."""
    for size in (-1, 0, 8, OVERHEAD - 1):
        outcome = scan_records(changed(RECORD, field("size", size))[: BLANK_HEAD.size], 0, check_crc=True)
        assert (outcome.end, outcome.needed) == ("damaged", 0)


def test_a_negative_body_length_is_damage_also_where_the_rest_adds_up_to_it() -> None:
    """With -16 the topic would be found among the fields before the body."""
    outcome = scan_records(NEGATIVE_BODY, 1024, check_crc=True)

    assert outcome.end == "damaged"


def test_a_damaged_body_is_only_found_where_it_is_looked_for() -> None:
    """``check_crc`` is what recovery asks for and dispatch does not."""
    log = bytearray(log_of([golden_message()], base=0))
    log[BODY_AT + 2] ^= 1

    assert scan_records(bytes(log), 0, check_crc=False).end == "more"
    assert scan_records(bytes(log), 0, check_crc=True).end == "damaged"


def test_negative_lengths_are_damage_also_where_as_many_bytes_follow() -> None:
    """An i16 below 0 must not be read as a number above 32767."""
    for tail, magic in (
        (b"\x01t" + b"\x80\x00" + bytes(0x8000), MESSAGE_MAGIC),
        (b"\x80\x00" + b"t" * 0x8000 + b"\0\0", MESSAGE_MAGIC_V2),
    ):
        record = resized(RECORD[:TOPIC_LENGTH_AT] + tail, magic)
        assert scan_records(record, 1024, check_crc=True).end == "damaged"


@given(st.lists(MESSAGES, min_size=1, max_size=3), st.data())
def test_any_flipped_bit_leaves_the_records_before_it_and_never_raises(
    messages: list[Message], data: st.DataObject
) -> None:
    """In both kinds of log."""
    for log, scan in ((log_of(messages), scan_records), (entries_of(messages), scan_entries)):
        whole = scan(log, BASE, check_crc=True, delay_levels=LEVELS)
        bit = data.draw(st.integers(0, len(log) * 8 - 1))
        damaged = bytearray(log)
        damaged[bit // 8] ^= 1 << bit % 8

        outcome = scan(bytes(damaged), BASE, check_crc=True, delay_levels=LEVELS)

        kept = [head for head in whole.heads if head.offset + head.size <= BASE + bit // 8]
        assert outcome.heads[: len(kept)] == kept
        assert outcome.consumed <= len(log)


@given(st.binary(max_size=300), st.binary(max_size=60), st.sampled_from([0, 1024, 976, 1 << 62]), st.booleans())
@example(changed(RECORD, field("sys_flag", 0x30)), b"", 1024, True)
@example(changed(RECORD[:OVERHEAD], field("size", OVERHEAD), field("sys_flag", 0x30)), b"", 1024, True)
def test_any_bytes_are_scanned_without_an_error(data: bytes, tail: bytes, base: int, check_crc: bool) -> None:
    """Whatever a disk or a peer gives."""
    crafted = resized(RECORD[:BODY_AT] + tail)
    crafted_entry = entry(crafted, index=0, position=base)
    for bytes_given in (data, crafted, RECORD + data, crafted_entry, crafted_entry + data):
        for scan in (scan_records, scan_entries):
            outcome = scan(bytes_given, base, check_crc=check_crc, delay_levels=LEVELS)
            assert 0 <= outcome.consumed <= len(bytes_given)
            assert outcome.reason


def test_more_topics_than_are_remembered_are_still_found() -> None:
    """The memory of topics is bounded."""
    messages = [Message(f"topic{number}", b"", born_host=HostAddress(bytes(16), 1)) for number in range(5000)]

    outcome = scan_records(log_of(messages), BASE, check_crc=True)

    assert [head.topic for head in outcome.heads] == [message.topic for message in messages]


def test_the_hosts_kinds_do_not_hide_the_fields_behind_them() -> None:
    """The store timestamp moves with the born host, the body with both."""
    message = golden_message_v6()

    assert scan_records(encode_record(message), 0, check_crc=True).heads == [head_of(message, 0, 0)]
