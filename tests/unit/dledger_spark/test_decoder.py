"""The vectorised decoder against the store's own codec, field by field; no Spark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dledger.errors import InvariantError
from dledger.records import ENTRY, ENTRY_HEADER_BYTES
from dledger.types import NOOP_CHANNEL, Magic
from dledger_spark.decode import DecodeContext, WalkEnd, batches, columns, decode, decode_stretch, named_columns, walk
from dledger_spark.errors import BrokenRecordError
from dledger_spark.schema import COLUMN_NAMES, COLUMNS, arrow_schema
from rocketstore.message.message import HostAddress, Message
from rocketstore.message.record import (
    BLANK,
    HEAD_V4,
    HEAD_V4_BYTES,
    LENGTHS_BYTES,
    MESSAGE_MAGIC,
    MESSAGE_MAGIC_V2,
    CorruptRecordError,
    decode_record,
    encode_record,
)
from rocketstore.message.record import BLANK_MAGIC as PLAIN_BLANK_MAGIC
from tests.support.log_bytes import Stretch, entry_rows, message_row
from tests.unit.rocketstore.message.samples import NEGATIVE_BODY, RECORD, changed, field, resized

I32 = st.integers(-(1 << 31), (1 << 31) - 1)
I64 = st.integers(-(1 << 63), (1 << 63) - 1)
MS = st.integers(-(1 << 52), 1 << 52)
NAMES = st.text(st.characters(exclude_characters="\x01\x02", exclude_categories=["Cs"]), min_size=1, max_size=6)
VALUES = st.text(st.characters(exclude_characters="\x02", exclude_categories=["Cs"]), max_size=8)
HOSTS = st.builds(HostAddress, st.binary(min_size=4, max_size=4) | st.binary(min_size=16, max_size=16), I32)
PROPERTIES = st.dictionaries(st.sampled_from(["TAGS", "KEYS", "XTAGS", "T", "WAIT"]) | NAMES, VALUES, max_size=5)
TOPICS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)


@st.composite
def messages(draw: st.DrawFn) -> Message:
    """Any message that a record can hold."""
    return Message(
        draw(TOPICS),
        draw(st.binary(max_size=40)),
        draw(I32),
        draw(PROPERTIES),
        draw(I32),
        draw(I32),
        draw(MS),
        draw(HOSTS),
        draw(HOSTS),
        draw(I32),
        draw(I64),
        draw(MS),
    )


NOOPS = st.sampled_from([(Magic.NOOP, 0), (Magic.NORMAL, NOOP_CHANNEL), (Magic.CONFIG_CHANGE, 0)])
ITEMS = st.lists(st.tuples(messages(), I64) | st.tuples(NOOPS, st.binary(max_size=30)), max_size=12)


def stretch_of(items: Sequence[tuple[object, object]], base: int = 0) -> Stretch:
    stretch = Stretch(base)
    for what, more in items:
        if isinstance(what, Message):
            assert isinstance(more, int)
            stretch.add_message(what, more)
        else:
            assert isinstance(what, tuple)
            assert isinstance(more, bytes)
            stretch.add(more, magic=what[0], channel=what[1])
    return stretch


def plain(batch: pa.RecordBatch) -> list[dict[str, Any]]:  # Any: the values of any column
    """Rows as the naive reader has them: times in microseconds, properties as dictionaries."""
    columns = [one.cast(pa.int64()) if pa.types.is_timestamp(one.type) else one for one in batch.columns]
    rows: list[dict[str, Any]] = pa.RecordBatch.from_arrays(columns, names=batch.schema.names).to_pylist()
    for row in rows:
        if isinstance(row.get("properties"), list):
            row["properties"] = dict(row["properties"])
    return rows


@given(items=ITEMS, base=st.integers(0, 1 << 40))
def test_every_column_is_what_the_stores_codec_reads(items: list[tuple[object, object]], base: int) -> None:
    """All columns of messages between NOOPs of every kind (with and without bodies), IPv4 and IPv6 hosts mixed."""
    stretch = stretch_of(items, base)
    context = DecodeContext(base=base, segment="s")

    batch = decode(bytes(stretch.data), np.array(stretch.starts, np.int64), COLUMN_NAMES, context)

    assert batch.schema.equals(arrow_schema(COLUMNS))
    batch.validate(full=True)
    assert plain(batch) == [{name: row[name] for name in COLUMN_NAMES} for row in entry_rows(stretch, "s")]


@given(items=st.lists(st.tuples(messages(), I64), max_size=10), base=st.integers(0, 1 << 40))
def test_messages_of_a_plain_log_have_no_index_and_no_term(items: list[tuple[Message, int]], base: int) -> None:
    """Records without entry headers, ended by a blank; found by walking."""
    data, positions = bytearray(), []
    for message, offset in items:
        positions.append(base + len(data))
        data += encode_record(message, queue_offset=offset, physical_offset=base + len(data))
    expected = [
        message_row(bytes(data[position - base :][: message.size]))
        | {"position": position, "index": None, "term": None, "segment": ""}
        for position, (message, _) in zip(positions, items, strict=True)
    ]
    data += BLANK.pack(64, PLAIN_BLANK_MAGIC) + bytes(56)

    found = list(decode_stretch(bytes(data), named_columns(COLUMN_NAMES[:-1], DecodeContext()), _plain(base)))

    assert [row for batch in found for row in plain(batch)] == expected


def _plain(base: int = 0) -> DecodeContext:
    return DecodeContext(framing="plain", base=base)


@given(items=ITEMS, cut=st.integers(1, 200))
def test_a_walk_ends_before_a_record_that_is_cut_off(items: list[tuple[object, object]], cut: int) -> None:
    """A torn tail is told apart from the end, and nothing of it is a record."""
    stretch = stretch_of([*items, (Message("t", b"x" * 200), 0)])
    data = bytes(stretch.data[: len(stretch.data) - cut])

    found = walk(data, "entry")

    assert found.starts.tolist() == stretch.starts[:-1]
    assert (found.kind, found.end) == (WalkEnd.CUT, stretch.starts[-1])


@given(
    topics=st.lists(st.binary(min_size=1, max_size=9), min_size=1, max_size=5),
    properties=st.lists(st.binary(max_size=30), min_size=5, max_size=5),
)
def test_bytes_that_are_no_utf8_do_not_fail_the_batch(topics: list[bytes], properties: list[bytes]) -> None:
    """Whatever stands in topics and property strings reads as the store's own reader reads it."""
    stretch = Stretch()
    for topic, encoded in zip(topics, properties, strict=False):
        message = Message("t" * len(topic), b"body", property_string=encoded)
        record = encode_record(message, physical_offset=stretch.end + ENTRY_HEADER_BYTES)
        before = b"body" + bytes([len(topic)])  # a bare "t" may be a part of any number
        stretch.add(record.replace(before + b"t" * len(topic), before + topic))
    starts = np.array(stretch.starts, np.int64)

    batch = decode(bytes(stretch.data), starts, ("topic", "properties", "tags", "keys"), DecodeContext())

    from rocketstore.message.properties import decode_properties

    for row, topic, encoded in zip(plain(batch), topics, properties, strict=False):
        read = decode_properties(encoded)
        assert row == {
            "topic": topic.decode(errors="replace"),
            "properties": read,
            "tags": read.get("TAGS"),
            "keys": read.get("KEYS"),
        }


def test_a_repeated_property_counts_as_it_was_last_given() -> None:
    """Of two properties with one name the later one is read, by every column."""
    stretch = Stretch()
    stretch.add_message(Message("t", b"", property_string=b"TAGS\x01a\x02KEYS\x01k\x02TAGS\x01b\x02TAGS\x01"))
    stretch.add_message(Message("t", b"", property_string=b"XTAGS\x01a\x02TAGS"))
    columns = ("tags", "keys", "properties", "tagsCode")

    rows = plain(decode(bytes(stretch.data), np.array(stretch.starts, np.int64), columns, DecodeContext()))

    assert rows[0] == {"tags": "b", "keys": "k", "properties": {"TAGS": "b", "KEYS": "k"}, "tagsCode": ord("b")}
    assert rows[1] == {"tags": None, "keys": None, "properties": {"XTAGS": "a"}, "tagsCode": 0}


def test_long_topics_of_version_2_are_read() -> None:
    """RocketMQ 5's records have a topic length of two bytes."""
    message = Message("t", b"body", 3, {"TAGS": "x"})
    record = bytearray(encode_record(message, physical_offset=ENTRY_HEADER_BYTES))
    topic = b"long-topic" * 30
    at = record.index(b"\x01t")
    record[at : at + 2] = len(topic).to_bytes(2, "big") + topic
    record[0:4] = len(record).to_bytes(4, "big")
    record[4:8] = MESSAGE_MAGIC_V2.to_bytes(4, "big", signed=True)
    stretch = Stretch()
    stretch.add(bytes(record))
    stretch.add_message(Message("short", b"", 4, {"TAGS": "y"}))

    rows = plain(
        decode(bytes(stretch.data), np.array(stretch.starts, np.int64), ("topic", "tags", "crcOk"), DecodeContext())
    )

    assert [(row["topic"], row["tags"], row["crcOk"]) for row in rows] == [
        (topic.decode(), "x", True),
        ("short", "y", True),
    ]


def test_entries_that_hold_no_messages_have_a_body_and_nulls() -> None:
    """``recordFormat=entry``: the body is the entry's, message columns are null."""
    stretch = Stretch()
    for body in (b"", b"hello", bytes(300)):
        stretch.add(body, term=4)
    context = DecodeContext(content="entry")

    rows = plain(decode(bytes(stretch.data), np.array(stretch.starts, np.int64), COLUMN_NAMES, context))

    assert [row["body"] for row in rows] == [b"", b"hello", bytes(300)]
    assert [row["size"] for row in rows] == [48, 53, 348]
    assert all(row["topic"] is None and row["properties"] is None and row["tagsCode"] is None for row in rows)
    assert all(row["crcOk"] and row["term"] == 4 for row in rows)


def test_kafkas_columns_are_ours_under_other_names() -> None:
    """``schemaStyle=kafka``: key, value, partition, offset, headers."""
    stretch = Stretch()
    stretch.add_message(Message("t", b"v", 2, {"KEYS": "k", "a": "b"}, store_timestamp=5), 9)
    stretch.add_message(Message("t", b"", 0), 0)
    context = DecodeContext(schema_style="kafka")
    names = ("key", "value", "topic", "partition", "offset", "timestamp", "timestampType", "headers")

    rows = plain(decode(bytes(stretch.data), np.array(stretch.starts, np.int64), names, context))

    headers = [{"key": "KEYS", "value": b"k"}, {"key": "a", "value": b"b"}]
    assert rows[0] == dict(zip(names, (b"k", b"v", "t", 2, 9, 5000, 1, headers), strict=True))
    assert (rows[1]["key"], rows[1]["headers"]) == (None, None)


BROKEN_BYTES = {
    "a term in the header": ENTRY.at("term") + 7,
    "the channel": ENTRY.at("channel") + 3,
    "the chain's checksum": ENTRY.at("chain_crc") + 1,
    "the body's checksum": ENTRY.at("body_crc") + 1,
    "a byte of the message's head": ENTRY_HEADER_BYTES + HEAD_V4.at("flag") + 1,
    "a byte of the body": ENTRY_HEADER_BYTES + HEAD_V4_BYTES + 2,
}


@pytest.mark.parametrize("offset", BROKEN_BYTES.values(), ids=BROKEN_BYTES.keys())
def test_one_flipped_bit_is_one_broken_record(offset: int) -> None:
    """``verifyCrc``: fail names segment and offset, column marks exactly that record, skip leaves exactly it out."""
    stretch = Stretch(1 << 30)
    for number in range(9):
        stretch.add_message(Message("t", b"some body %d" % number, number))
    stretch.data[stretch.starts[4] + offset] ^= 0x10
    data, starts = bytes(stretch.data), np.array(stretch.starts, np.int64)
    context = DecodeContext(base=1 << 30, segment="00000000001073741824", segment_base=1 << 30)

    with pytest.raises(BrokenRecordError) as failed:
        decode(data, starts, ("index",), replace(context, verify_crc="fail"))
    marked = plain(decode(data, starts, ("position", "crcOk"), replace(context, verify_crc="column")))
    kept = plain(decode(data, starts, ("position",), replace(context, verify_crc="skip")))

    positions = [stretch.base + start for start in stretch.starts]
    assert f"segment 00000000001073741824, offset {stretch.starts[4]}:" in str(failed.value)
    assert marked == [{"position": one, "crcOk": one != positions[4]} for one in positions]
    assert [row["position"] for row in kept] == positions[:4] + positions[5:]


@pytest.mark.parametrize("first", [0, 5])
def test_the_chain_is_checked_across_batches(first: int) -> None:
    """The first header of a batch is held against the last one of the batch before it."""
    stretch = Stretch()
    for number in range(10):
        stretch.add_message(Message("t", b"body", number))
    stretch.data[stretch.starts[first] + 23] ^= 1  # a term
    window = np.frombuffer(bytes(stretch.data), np.uint8)
    context = DecodeContext(verify_crc="column", chain_before=(0, 0))

    found = batches(window, np.array(stretch.starts), named_columns(("index", "crcOk"), context), context, 1)

    assert [row["index"] for batch in found for row in plain(batch) if not row["crcOk"]] == [first]


def test_a_damaged_magic_does_not_make_a_record_a_noop() -> None:
    """A record whose magic reads as a NOOP's is not lost in silence where checksums are checked."""
    stretch = Stretch()
    for number in range(4):
        stretch.add_message(Message("t", b"body", number))
    stretch.data[stretch.starts[2] + 3] = Magic.NOOP
    data, starts = bytes(stretch.data), np.array(stretch.starts, np.int64)

    rows = plain(decode(data, starts, ("index", "queueId", "crcOk"), DecodeContext(verify_crc="column")))

    assert [row["crcOk"] for row in rows] == [True, True, False, True]
    assert rows[2]["queueId"] is None
    with pytest.raises(BrokenRecordError, match="damaged"):
        decode(data, starts, ("index",), DecodeContext(verify_crc="fail"))


def test_a_broken_length_is_an_error_even_unchecked_and_a_row_when_marked() -> None:
    """Lengths that inconsistent lengths never lead outside the record: an error, or a row of nulls in its place."""
    stretch = Stretch()
    for number in range(3):
        stretch.add_message(Message("t", b"body", number))
    stretch.data[stretch.starts[1] + ENTRY_HEADER_BYTES + HEAD_V4.at("body_length")] = 0x7F  # the body's length
    data, starts = bytes(stretch.data), np.array(stretch.starts, np.int64)

    with pytest.raises(BrokenRecordError, match=f"offset {stretch.starts[1]}.*inconsistent lengths"):
        decode(data, starts, ("queueId", "body"), DecodeContext())
    rows = plain(decode(data, starts, ("position", "queueId", "crcOk", "topic"), DecodeContext(verify_crc="column")))

    assert rows[1] == {"position": stretch.starts[1], "queueId": None, "crcOk": False, "topic": None}
    assert [row["queueId"] for row in rows] == [0, None, 2]


def _claiming(body: int, tail: bytes, magic: int = MESSAGE_MAGIC) -> bytes:
    """A record at position 1024 whose body claims to have so many bytes; ``tail`` is all that follows its head."""
    head = changed(RECORD[:HEAD_V4_BYTES], field("crc", 0), field("body_length", body))
    return resized(head + tail, magic)


@pytest.mark.parametrize(
    "record",
    [
        pytest.param(NEGATIVE_BODY, id="a body of -16 bytes"),
        pytest.param(_claiming(0, b"\x80" + b"t" * 0x80 + b"\0\0"), id="a topic of -128 bytes"),
        pytest.param(_claiming(0, b"\x80\0" + b"t" * 0x8000 + b"\0\0", MESSAGE_MAGIC_V2), id="a topic of -32768 bytes"),
        pytest.param(_claiming(0, b"\1t\x80\0" + bytes(0x8000)), id="properties of -32768 bytes"),
        pytest.param(_claiming(0, b"\1t\0\2\0"), id="properties that end behind the record"),
    ],
)
def test_a_record_whose_lengths_none_can_have_is_broken(record: bytes) -> None:
    """Lengths are signed; read as large numbers these would fit. The codec of the store reads it no more than this."""
    with pytest.raises(CorruptRecordError):
        decode_record(record)
    data = record + encode_record(Message("t", b"body", 4), physical_offset=1024 + len(record))
    starts = np.array([0, len(record)], np.int64)

    with pytest.raises(BrokenRecordError, match="offset 1024: damaged record: inconsistent lengths"):
        decode(data, starts, ("queueId", "topic"), _plain(1024))
    marking = replace(_plain(1024), verify_crc="column")
    rows = plain(decode(data, starts, ("queueId", "topic", "crcOk"), marking))

    assert rows[0] == {"queueId": None, "topic": None, "crcOk": False}
    assert rows[1] == {"queueId": 4, "topic": "t", "crcOk": True}


@pytest.mark.parametrize("missing", [1, 2, 3])
def test_a_body_leaves_room_for_what_follows_it(missing: int) -> None:
    """Also where only the body is read: the lengths of topic and properties are three bytes."""
    record = _claiming(10 - LENGTHS_BYTES + missing, bytes(10))

    with pytest.raises(BrokenRecordError, match="inconsistent lengths"):
        decode(record, np.array([0], np.int64), ("body",), _plain(1024))


def test_an_entry_says_where_it_is() -> None:
    """One that was written for another place is broken, whatever it holds."""
    stretch = Stretch(base=4096)
    stretch.add(b"body")
    starts = np.array(stretch.starts, np.int64)
    here, elsewhere = (DecodeContext(base=base, content="entry") for base in (4096, 8192))

    assert decode(bytes(stretch.data), starts, ("body",), here).num_rows == 1
    with pytest.raises(BrokenRecordError, match="entry_position 4096 where 8192 was expected"):
        decode(bytes(stretch.data), starts, ("body",), elsewhere)


def test_java_entries_without_checksums_are_checked_by_the_messages_own() -> None:
    """Java's DLedger leaves both CRCs of an entry 0; the message's body still has one."""
    stretch = Stretch()
    for number in range(3):
        stretch.add_message(Message("t", b"body", number))
    for start in stretch.starts:
        stretch.data[start + 36 : start + 44] = bytes(8)
    stretch.data[stretch.starts[2] + ENTRY_HEADER_BYTES + HEAD_V4_BYTES] ^= 1

    rows = plain(decode(bytes(stretch.data), np.array(stretch.starts, np.int64), ("crcOk",), DecodeContext()))

    assert [row["crcOk"] for row in rows] == [True, True, False]


def test_entries_with_checksums_may_follow_javas_without() -> None:
    """A log that a Java node began and a node of ours continues: the chain begins anew with 0."""
    stretch = Stretch()
    for number in range(3):
        stretch.add_message(Message("t", b"body", number))
    for start in stretch.starts:
        stretch.data[start + 36 : start + 44] = bytes(8)
    stretch.chain = 0
    for number in range(3):
        stretch.add_message(Message("t", b"body", number))

    batch = decode(bytes(stretch.data), np.array(stretch.starts, np.int64), ("crcOk",), DecodeContext())

    assert batch.column(0).to_pylist() == [True] * 6


def test_raw_properties_are_the_stored_string() -> None:
    """``propertiesFormat=raw``."""
    stretch = Stretch()
    stretch.add_message(Message("t", b"", property_string=b"a\x01b\x02c\x01\xff"))
    context = DecodeContext(properties_format="raw")

    batch = decode(bytes(stretch.data), np.array(stretch.starts, np.int64), ("properties",), context)

    assert batch.column(0).to_pylist() == ["a\x01b\x02c\x01\ufffd"]


def test_a_field_wider_than_its_column_is_refused_before_anything_is_read() -> None:
    with pytest.raises(InvariantError, match=r"fits Spark's column.*queue_offset"):
        columns._int("queue_offset")
