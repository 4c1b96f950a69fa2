"""Messages, properties, offsets and topics of a request are counted before they are made."""

from __future__ import annotations

import pytest
from google.protobuf.message import Message as Wire

from dledger.errors import InvalidRequestError
from rocketstore.broker_grpc.codec import parse
from rocketstore.pb import broker_pb2 as pb

MANY = 1 << 20


@pytest.mark.parametrize(
    ("kind", "data", "what"),
    [
        (pb.SendRequest, b"\x0a\x00" * MANY, "more than 16384 messages"),
        (pb.CommitOffsetsRequest, b"\x12\x00" * MANY, "more than 16384 offsets"),
        (pb.CommitPositionRequest, b"\x22\x00" * MANY, "more than 16384 topics"),
        (pb.SendRequest, b"\x0a\x80\x80\x80\x01" + b"\x1a\x00" * MANY, "more than 16384 properties of a message"),
    ],
    ids=["messages", "offsets", "topics", "properties"],  # else all of the bytes are part of the test's name
)
def test_requests_of_very_many_empty_elements_are_refused(kind: type[Wire], data: bytes, what: str) -> None:
    """To make an object of each would hold everything up for a second."""
    with pytest.raises(InvalidRequestError, match=what):
        parse(kind, data)


def test_ordinary_requests_pass_whatever_their_bodies_look_like() -> None:
    """Bytes that look like the beginnings of elements are counted, and then the elements."""
    message = pb.Message(topic="t", body=b"\x0a\x1a" * 20_000, properties={"a": "\x1a" * 20_000})

    assert parse(pb.SendRequest, pb.SendRequest(messages=[message] * 2).SerializeToString()).messages[1] == message
