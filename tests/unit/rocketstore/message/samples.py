"""Messages and bytes whose form is known from RocketMQ 4.9.8."""

from __future__ import annotations

from ipaddress import ip_address
from struct import pack
from typing import Final

from hypothesis import strategies as st

from dledger.records import ENTRY, ENTRY_HEADER_BYTES
from rocketstore.message.message import HostAddress, Message
from rocketstore.message.record import HEAD_V4, HEAD_V4_BYTES, MESSAGE_MAGIC, encode_record, tail_of

GOLDEN_V4: Final = bytes.fromhex(
    "0000007DDAA320A73610A686000000030000000700000000000000050000000000000400000000000000018BCFE56800"
    "7F0000010000D4310000018BCFE5687B7F00000100002A9F0000000200000000000000090000000568656C6C6F"
    "09546F7069635465737400144B455953016B31206B3202544147530154616741"
)
"""Queue offset 5, physical offset 1024. Written down in bytes, and so an independent check of the format."""


def golden_message() -> Message:
    """The message of ``GOLDEN_V4``, before it is stored."""
    return Message(
        topic="TopicTest",
        body=b"hello",
        queue_id=3,
        properties={"KEYS": "k1 k2", "TAGS": "TagA"},
        flag=7,
        born_timestamp=1_700_000_000_000,
        born_host=HostAddress(ip_address("127.0.0.1").packed, 54_321),
        store_host=HostAddress(ip_address("127.0.0.1").packed, 10_911),
        reconsume_times=2,
        prepared_offset=9,
        store_timestamp=1_700_000_000_123,
    )


RECORD: Final = encode_record(golden_message(), queue_offset=5, physical_offset=1024)
"""The same as the layout has it, for tests of something else than the format."""
RECORD_BYTES: Final = len(RECORD)
ENTRY_BYTES: Final = ENTRY_HEADER_BYTES + RECORD_BYTES
BODY_AT: Final = HEAD_V4_BYTES
TOPIC_LENGTH_AT, TOPIC_AT, PROPERTIES_LENGTH_AT, _ = tail_of(RECORD, MESSAGE_MAGIC, BODY_AT, 5, RECORD_BYTES)


def field(name: str, value: int) -> tuple[int, bytes]:
    """Where a field of a record's head is, and what it holds with this value."""
    return HEAD_V4.at(name), HEAD_V4.part(name).pack(value)


def changed(record: bytes, *places: tuple[int, bytes]) -> bytes:
    """The record with other bytes in these places."""
    made = bytearray(record)
    for at, value in places:
        made[at : at + len(value)] = value
    return bytes(made)


def resized(record: bytes, magic: int = MESSAGE_MAGIC) -> bytes:
    """The record with the size that it has."""
    return changed(record, field("size", len(record)), field("magic", magic))


_TOPIC_IN_HEAD: Final = 16
NEGATIVE_BODY: Final = changed(
    RECORD,
    field("crc", 0),
    field("body_length", -_TOPIC_IN_HEAD),
    (BODY_AT - _TOPIC_IN_HEAD, b"\x01t" + pack(">h", RECORD_BYTES - BODY_AT + _TOPIC_IN_HEAD - 4)),
)
"""No record: its body has -16 bytes, after which a topic, "t", and properties seem to follow."""


def golden_message_v6() -> Message:
    """The same message between IPv6 hosts."""
    message = golden_message()
    message.born_host = HostAddress(ip_address("1050::5:600:300c:326b").packed, 54_321)
    message.store_host = HostAddress(ip_address("::1").packed, 10_911)
    return message


def entry(body: bytes, *, index: int, position: int, magic: int = 1, channel: int = 0) -> bytes:
    """A DLedger entry with this body."""
    size = ENTRY_HEADER_BYTES + len(body)
    return ENTRY.struct().pack(magic, size, index, 1, position, channel, 7, 8, len(body)) + body


_I32 = st.integers(-(2**31), 2**31 - 1)
_I64 = st.integers(-(2**63), 2**63 - 1)
_HOSTS = st.builds(HostAddress, st.binary(min_size=4, max_size=4) | st.binary(min_size=16, max_size=16), _I32)
_TEXT = st.text(st.characters(exclude_characters="\x01\x02", exclude_categories=["Cs"]), min_size=1, max_size=8)

MESSAGES: Final = st.builds(
    Message,
    topic=st.text("abcXYZ019%|-_", min_size=1, max_size=127),
    body=st.binary(max_size=40),
    queue_id=_I32,
    properties=st.dictionaries(_TEXT | st.just("TAGS"), _TEXT, max_size=4),
    flag=_I32,
    sys_flag=st.integers(0, 0x7FF),
    born_timestamp=_I64,
    born_host=_HOSTS,
    store_host=_HOSTS,
    reconsume_times=_I32,
    prepared_offset=_I64,
    store_timestamp=_I64,
)
"""Any message that can be stored."""
