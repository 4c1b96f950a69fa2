"""Elements of requests are counted before they are made."""

from __future__ import annotations

import os

import pytest

from dledger.errors import InvalidRequestError
from dledger.pb import client_pb2 as pb
from dledger.rpc.clients import codec
from dledger.rpc.clients.codec import RepeatedFieldLimit, check_count

THREE = RepeatedFieldLimit(2, 3, "entries")


def append(count: int, body: bytes = b"") -> bytes:
    return pb.AppendRequest(group="g", bodies=[body] * count, request_id=7).SerializeToString()


@pytest.mark.parametrize("body", [b"", b"\x12" * 50, b"\x92\x12\x00" * 50])
def test_elements_are_counted_exactly_where_bytes_could_be_more(body: bytes) -> None:
    """What looks like the beginning of an element inside of one counts for nothing."""
    check_count(append(3, body), THREE)
    with pytest.raises(InvalidRequestError, match="more than 3 entries in one request"):
        check_count(append(4, body), THREE)


@pytest.mark.parametrize(
    "element",
    [b"\x92\x00\x00", b"\x92\x80\x00\x00", b"\x12\x80\x00"],
    ids=["long tag", "longer tag", "long length"],
)
def test_elements_written_longer_than_need_be_count_as_well(element: bytes) -> None:
    """As protobuf takes them for what they are."""
    assert len(pb.AppendRequest.FromString(element * 4).bodies) == 4

    with pytest.raises(InvalidRequestError, match="more than 3"):
        check_count(element * 4, THREE)


def test_what_could_hide_elements_is_refused() -> None:
    """Groups, and more fields of other kinds than any request has."""
    with pytest.raises(InvalidRequestError, match="group"):
        check_count(b"\x7b\x7c" + append(10), THREE)
    with pytest.raises(InvalidRequestError, match="more than 3"):
        check_count(b"\x18\x01" * 100 + b"\x12\x00" * 4, THREE)


def test_garbage_is_left_to_the_parser() -> None:
    """Counting it ends, with whatever it begins."""
    for _ in range(200):
        try:
            check_count(b"\x12" * 10 + os.urandom(100), THREE)
        except InvalidRequestError:
            continue


def test_a_request_of_millions_of_empty_entries_is_refused_before_they_are_made() -> None:
    """8 MiB would be four million objects."""
    with pytest.raises(InvalidRequestError, match="more than 4096 entries in one request"):
        codec.decode_append(b"\x12\x00" * (4 << 20))
    assert len(codec.decode_append(append(codec.APPEND_ENTRIES_MAX)).bodies) == codec.APPEND_ENTRIES_MAX
