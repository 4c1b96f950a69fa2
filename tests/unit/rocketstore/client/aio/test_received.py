"""Records as consumers get them: whole, damaged, compressed, between IPv6 hosts."""

from __future__ import annotations

import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocketstore.client.aio.errors import BadAnswerError
from rocketstore.client.aio.received import decompress, split_records
from rocketstore.message.message import SYS_FLAG_COMPRESSED, HostAddress, Message
from rocketstore.message.record import HEAD_V4_BYTES, MESSAGE_MAGIC_V2, encode_record
from tests.support.compressors import rocketmq_5_compressors
from tests.unit.rocketstore.message.samples import resized

V4 = HostAddress(b"\x7f\0\0\1", 1)
V6 = HostAddress(bytes(15) + b"\1", 1)


def record_of(body: bytes = b"body", **fields: object) -> bytes:
    values: dict[str, object] = {"queue_id": 3, "properties": {"TAGS": "a", "KEYS": "k"}} | fields
    return encode_record(Message("orders", body, **values), queue_offset=7, physical_offset=100)  # type: ignore[arg-type]  # by name


@pytest.mark.parametrize("born", [V4, V6])
@pytest.mark.parametrize("store", [V4, V6])
def test_hosts_of_both_kinds(born: HostAddress, store: HostAddress) -> None:
    """The body stands elsewhere behind an IPv6 address."""
    data = record_of(born_host=born, store_host=store) * 2

    first, second = split_records(data)

    assert first.body == second.body == b"body"
    assert (first.queue_id, first.queue_offset, first.topic, first.tags) == (3, 7, "orders", "a")
    assert len(first.offset_id) == (56 if store is V6 else 32)
    assert first.born_timestamp == 0
    assert (first.message_id, first.keys) == (first.offset_id, ["k"])


def test_a_message_has_the_id_that_its_producer_gave_it() -> None:
    """Java's ``msgId``: the one in the result of the send; where it is stored is another one."""
    (message,) = split_records(record_of(properties={"UNIQ_KEY": "7F0000010001"}))
    assert (message.message_id, len(message.offset_id)) == ("7F0000010001", 32)


def test_blanks_alone_separate_keys() -> None:
    """As the broker's index has them: whoever finds a message by a key sees that key."""
    (message,) = split_records(record_of(properties={"KEYS": "a\tb  c\u3000d"}))

    assert message.keys == ["a\tb", "c\u3000d"]


def test_properties_are_found_before_and_after_decoding() -> None:
    """Both ways say the same."""
    (message,) = split_records(record_of())

    early = (message.tags, message.property("none"))
    message.decode()

    assert (message.tags, message.property("none")) == early == ("a", "")


def test_records_of_version_2_are_read() -> None:
    """RocketMQ 5 writes two bytes of topic length."""
    old = record_of(b"")
    new = old[:HEAD_V4_BYTES] + b"\0" + old[HEAD_V4_BYTES:]

    (message,) = split_records(resized(new, MESSAGE_MAGIC_V2))

    assert message.tags == "a"
    assert message.topic == "orders"


def test_compressed_bodies_are_inflated() -> None:
    """As RocketMQ's consumers do; the stored form stays at hand."""
    packed = zlib.compress(b"x" * 5000)

    (message,) = split_records(record_of(packed, sys_flag=SYS_FLAG_COMPRESSED))

    assert message.body == b"x" * 5000
    assert message.raw_body == packed


@pytest.mark.parametrize(
    ("body", "sys_flag"),
    [(b"no zlib", SYS_FLAG_COMPRESSED), (zlib.compress(b"x" * 99)[:-5], SYS_FLAG_COMPRESSED), (b"lz4", 0x101)],
)
def test_bodies_that_cannot_be_inflated(body: bytes, sys_flag: int) -> None:
    """A typed error where the body is asked for; the rest can be read."""
    (message,) = split_records(record_of(body, sys_flag=sys_flag))

    with pytest.raises(BadAnswerError):
        _ = message.body
    assert message.tags == "a"


def test_bodies_of_rocketmq_5_are_inflated() -> None:
    """LZ4 and Zstandard, with and without the length in the header; a truncated or an endless one is an error."""
    body = b"x" * 5000
    for sys_flag, compress in rocketmq_5_compressors():
        packed = compress(body)
        assert decompress(packed, sys_flag) == body
        for wrong in (packed[:-4], packed[:5], b"none", b""):
            with pytest.raises(BadAnswerError):
                decompress(wrong, sys_flag)
        with pytest.raises(BadAnswerError):
            decompress(packed, sys_flag, bytes_max=4999)
        assert decompress(packed, sys_flag, bytes_max=5000) == body


def test_every_flipped_bit_of_a_body_is_noticed() -> None:
    """By its CRC."""
    good = record_of()
    for bit in range(32):
        bad = bytearray(good)
        bad[HEAD_V4_BYTES + bit // 8] ^= 1 << bit % 8
        with pytest.raises(BadAnswerError, match="CRC"):
            split_records(bytes(bad))


@given(st.data())
def test_damage_is_a_typed_error_or_nothing_worse(data: st.DataObject) -> None:
    """Cut or overwritten anywhere: a ``BadAnswerError``, or messages whose bodies are whole."""
    good = record_of() + record_of(b"other")
    cut = data.draw(st.integers(0, len(good)))
    bad = bytearray(good[:cut])
    for _ in range(data.draw(st.integers(0, 3))):
        if bad:
            bad[data.draw(st.integers(0, len(bad) - 1))] = data.draw(st.integers(0, 255))

    try:
        messages = split_records(bytes(bad))
    except BadAnswerError:
        return
    assert all(message.raw_body in (b"body", b"other", b"") for message in messages)
