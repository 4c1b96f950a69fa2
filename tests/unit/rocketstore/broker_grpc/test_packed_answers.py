"""Packed answers to sends say what the long ones say, and only if all is well."""

from __future__ import annotations

from dledger.errors import DLedgerError
from rocketstore.broker_grpc.codec import ResultEncoder
from rocketstore.client.sends import WIRE, SendFuture, SendOptions, Sent, window_of
from rocketstore.message.message import LOOPBACK
from rocketstore.pb import broker_pb2 as pb
from rocketstore.types import PutMessageStatus, PutResult, StoredPlace

OK = [PutResult(PutMessageStatus.PUT_OK, StoredPlace(100 + at, 90, at, 7 + at, 1000)) for at in range(2)]
BAD = PutResult(PutMessageStatus.FLUSH_DISK_TIMEOUT, StoredPlace(300, 90, 0, 9, 1000), "unknown")


def answered(results: list[PutResult], *, packed: bool) -> pb.SendResponse:
    return pb.SendResponse.FromString(ResultEncoder(LOOPBACK).encode(3, results, packed=packed))


def taken(response: pb.SendResponse) -> list[SendFuture]:
    """What a producer makes of an answer to two messages."""
    window = window_of(SendOptions(linger_s=0))
    futures = [SendFuture(*window.add(b"", 0.0, item=Sent("T", at, f"key{at}"))) for at in range(2)]
    window.seal()
    window.step(0.0)
    window.connected()
    batch = window.next_to_send(0.0)
    assert batch is not None
    window.answered(batch, WIRE.decode(response.SerializeToString(), "here:1")[1], 1.0)
    return futures


def test_packed_and_long_answers_make_the_same_receipts() -> None:
    """Ids, offsets, queues and times."""
    long, packed = answered(OK, packed=False), answered(OK, packed=True)

    assert (packed.request_id, len(packed.results), len(long.results)) == (3, 0, 2)
    assert [one.result() for one in taken(packed)] == [one.result() for one in taken(long)]


def test_an_answer_with_anything_but_put_ok_is_never_packed() -> None:
    """A reason or an unknown outcome has no place in numbers."""
    response = answered([OK[0], BAD], packed=True)

    assert not response.HasField("stored")
    assert [one.status for one in response.results] == ["PUT_OK", "FLUSH_DISK_TIMEOUT"]


def test_a_packed_answer_of_another_length_is_an_error_of_every_message() -> None:
    """Nobody is told a place that is not his."""
    for future in taken(answered(OK[:1], packed=True)):
        assert isinstance(future.exception(), DLedgerError)
