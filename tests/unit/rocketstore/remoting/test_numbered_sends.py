"""The bodies of our requests for numbered messages: their bytes, and what is no such body."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as some

from dledger.remoting.codes import RequestError
from rocketstore.remoting.extensions import (
    NumberedMessage,
    NumberedSend,
    decode_name,
    decode_next,
    decode_stored,
    encode_name,
    encode_next,
    encode_stored,
)
from rocketstore.types import PutMessageStatus, PutResult, StoredPlace

REQUEST = NumberedSend(
    "p1",
    258,
    [
        NumberedMessage("T", -1, 7, 1, 1700000000123, b"TAGS\x01a", b"hello"),
        NumberedMessage("Other", 3, 0, 0, 1, b"", b""),
    ],
    wait=False,
)
GOLDEN_REQUEST = bytes.fromhex(
    "00 02 7031 0000000000000102 00000002"
    "01 54 ffffffff 00000007 00000001 0000018bcfe5687b 0006 544147530161 00000005 68656c6c6f"
    "05 4f74686572 00000003 00000000 00000000 0000000000000001 0000 00000000"
)
HOST = (b"\x7f\0\0\1", 10911)
STORED = [
    PutResult(PutMessageStatus.PUT_OK, StoredPlace(4096, 120, 2, 17, 1700000000456)),
    PutResult(PutMessageStatus.PUT_OK),
]
GOLDEN_STORED = bytes.fromhex(
    "04 7f000001 00002a9f 0000000000001000 00000002 0000000000000011 0000018bcfe569c8" + " ff" * 28
)


def test_a_request_has_these_bytes() -> None:
    """As in docs/protocol.md: clients of other languages can be written from it."""
    assert REQUEST.encode() == GOLDEN_REQUEST
    assert NumberedSend.decode(GOLDEN_REQUEST) == REQUEST


def test_an_answer_has_these_bytes() -> None:
    """A place that is not remembered is -1 everywhere."""
    assert encode_stored(*HOST, STORED) == GOLDEN_STORED
    host, rows = decode_stored(GOLDEN_STORED, 2)
    assert (host, list(rows)) == (HOST, [(4096, 2, 17, 1700000000456), (-1, -1, -1, -1)])


@pytest.mark.parametrize("count", [0, 1, 3])
def test_an_answer_has_a_place_for_each_message(count: int) -> None:
    with pytest.raises(RequestError, match=f"answer to {count} numbered messages: 56 bytes"):
        decode_stored(GOLDEN_STORED, count)


def test_questions_about_a_producer_have_these_bytes() -> None:
    assert encode_name("p1") == bytes.fromhex("02 7031")
    assert decode_name(bytes.fromhex("02 7031")) == "p1"
    assert encode_next(5, "ab") == bytes.fromhex("0000000000000005 02 6162")
    assert decode_next(bytes.fromhex("0000000000000005 02 6162")) == (5, "ab")


@pytest.mark.parametrize("size", range(len(GOLDEN_REQUEST)))
def test_a_request_that_was_cut_short_is_refused(size: int) -> None:
    """Wherever it ends."""
    with pytest.raises(RequestError, match="numbered messages"):
        NumberedSend.decode(GOLDEN_REQUEST[:size])


def test_bytes_after_the_last_message_are_refused() -> None:
    with pytest.raises(RequestError, match="1 bytes after the last one"):
        NumberedSend.decode(GOLDEN_REQUEST + b"x")


@pytest.mark.parametrize("count", [0, -1, 4097, 1 << 30])
def test_a_number_of_messages_that_cannot_be_meant_is_refused(count: int) -> None:
    """Before anything is made of them."""
    data = b"\x01\x01p" + bytes(8) + (count & 0xFFFFFFFF).to_bytes(4, "big") + bytes(64)
    with pytest.raises(RequestError, match="1 to 4096 can be sent at once"):
        NumberedSend.decode(data)


@given(some.binary(max_size=200))
def test_no_bytes_do_anything_but_be_decoded_or_refused(data: bytes) -> None:
    for decode in (NumberedSend.decode, lambda body: decode_stored(body, 1), decode_name, decode_next):
        with suppress(RequestError):
            decode(data)
