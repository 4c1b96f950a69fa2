"""REGISTER_BROKER's body: as JSON, in RocketMQ's compact form, and as old brokers send it."""

from __future__ import annotations

import struct
import zlib

import pytest

from dledger.remoting.codes import RequestError
from dledger.remoting.frame import FRAME_BYTES_MAX
from rocketstore.remoting.body import ITEMS_MAX
from rocketstore.remoting.topics import (
    FILTER_SERVERS_MAX,
    DataVersion,
    RegisterBrokerBody,
    TopicConfigData,
    TopicConfigTable,
    body_crc32,
)

TOPICS = TopicConfigTable(
    DataVersion(3, 1795330144179),
    {"T": TopicConfigData("T", 4, 8, 6), "%RETRY%g": TopicConfigData("%RETRY%g", 1, 1, 2)},
)
BODY = RegisterBrokerBody(TOPICS, ("h:1", "h:2"))


def _block(data: bytes) -> bytes:
    return struct.pack(">i", len(data)) + data


COMPACT = b"".join(
    (
        _block(b'{"counter":3,"timestamp":1795330144179}'),
        struct.pack(">i", 2),
        _block(b"T 4 8 6 SINGLE_TAG"),
        _block(b"%RETRY%g 1 1 2 SINGLE_TAG"),
        _block(b'["h:1","h:2"]'),
    )
)


def _read(body: bytes, *, compressed: bool = False, version: int = 409, crc32: int = 0) -> RegisterBrokerBody:
    return RegisterBrokerBody.of_request(body, compressed=compressed, version=version, crc32=crc32)


def test_each_form_reads_as_it_was_written() -> None:
    """Version 37 brought the list around the topics."""
    assert _read(BODY.encode()) == BODY
    assert _read(BODY.encode(), version=37) == BODY
    assert _read(TOPICS.encode(), version=36) == RegisterBrokerBody(TOPICS)
    assert _read(BODY.encode_compressed(), compressed=True) == BODY
    assert zlib.decompress(BODY.encode_compressed()) == COMPACT


def test_the_compact_form_has_no_room_for_order() -> None:
    """As in Java."""
    ordered = TopicConfigData("T", order=True, topic_sys_flag=1)
    body = RegisterBrokerBody(TopicConfigTable(topic_config_table={"T": ordered}))
    found = RegisterBrokerBody.decode_compressed(body.encode_compressed())
    assert found.topics.topic_config_table == {"T": TopicConfigData("T")}


def test_the_sum_is_checked_where_there_is_one() -> None:
    """Of the body as sent; its top bit is cleared, since Java has no unsigned numbers."""
    for body, compressed in ((BODY.encode(), False), (BODY.encode_compressed(), True)):
        assert _read(body, compressed=compressed, crc32=body_crc32(body)) == BODY
        with pytest.raises(RequestError, match="crc32 not match"):
            _read(body, compressed=compressed, crc32=body_crc32(body) ^ 1)
    assert body_crc32(b"a") == zlib.crc32(b"a") & 0x7FFFFFFF != zlib.crc32(b"a")


def test_no_body_is_no_topics() -> None:
    """With a version that equals no other."""
    for compressed in (False, True):
        assert _read(b"", compressed=compressed).topics == TopicConfigTable(DataVersion(0, 0), {})


def _compact(*parts: bytes) -> bytes:
    return zlib.compress(b"".join(parts))


VERSION = _block(b"{}")
NO_TOPICS = struct.pack(">i", 0)
MALFORMED = {
    "not zlib": b"x",
    "empty": _compact(),
    "cut short": BODY.encode_compressed()[:-1],
    "negative length": _compact(struct.pack(">i", -1)),
    "too long a block": _compact(struct.pack(">i", 9), b"{}"),
    "a version that is a list": _compact(_block(b"[]"), NO_TOPICS, _block(b"[]")),
    "no number": _compact(VERSION, b"\0\0"),
    "a negative number": _compact(VERSION, struct.pack(">i", -1), _block(b"[]")),
    "too many topics": _compact(VERSION, struct.pack(">i", ITEMS_MAX + 1), _block(b"[]")),
    "more topics than there are": _compact(VERSION, struct.pack(">i", 2), _block(b"T 1 1 6 SINGLE_TAG"), _block(b"[]")),
    "a topic of four parts": _compact(VERSION, struct.pack(">i", 1), _block(b"T 1 1 6"), _block(b"[]")),
    "a topic of six parts": _compact(VERSION, struct.pack(">i", 1), _block(b"a b 1 1 6 SINGLE_TAG"), _block(b"[]")),
    "queues in words": _compact(VERSION, struct.pack(">i", 1), _block(b"T one 1 6 SINGLE_TAG"), _block(b"[]")),
    "a topic that is not UTF-8": _compact(
        VERSION, struct.pack(">i", 1), _block(b"\xff 1 1 6 SINGLE_TAG"), _block(b"[]")
    ),
    "no filter servers": _compact(VERSION, NO_TOPICS),
    "filter servers as an object": _compact(VERSION, NO_TOPICS, _block(b"{}")),
    "filter servers that are none": _compact(VERSION, NO_TOPICS, _block(b"[{}]")),
    "too many filter servers": _compact(
        VERSION, NO_TOPICS, _block(b"[" + b",".join([b'""'] * (FILTER_SERVERS_MAX + 1)) + b"]")
    ),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_compact_form_is_refused(name: str) -> None:
    """Always with the same kind of error."""
    with pytest.raises(RequestError, match="malformed"):
        _read(MALFORMED[name], compressed=True)


def test_a_small_body_that_inflates_without_end_is_refused() -> None:
    """At the size of a frame: what is behind is never made."""
    with pytest.raises(RequestError, match="longer than"):
        _read(zlib.compress(bytes(FRAME_BYTES_MAX + 1)), compressed=True)
