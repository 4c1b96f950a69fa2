"""What a client of ``dledger.v1`` sends, and how it reads the answers; ours speak remoting."""

from __future__ import annotations

from dledger.errors import DLedgerError
from dledger.pb import client_pb2 as pb
from dledger.rpc.clients.codec import Append, Read, ReadAnswer, raise_failure
from dledger.rpc.fields import parse
from dledger.types import AppendedBatch, Entry, LogIndex, Magic, Position, StoredRun, Term


def encode_append(request: Append) -> bytes:
    """One append request."""
    producer = request.producer
    if producer is None:
        return pb.AppendRequest(
            group=request.group, bodies=request.bodies, request_id=request.request_id, ordered=request.ordered
        ).SerializeToString()
    return pb.AppendRequest(
        group=request.group,
        bodies=request.bodies,
        request_id=request.request_id,
        ordered=request.ordered,
        producer=producer.producer,
        sequence=producer.sequence,
    ).SerializeToString()


def encode_read(request: Read) -> bytes:
    """A read request."""
    return pb.ReadRequest(
        group=request.group,
        first_index=request.first_index,
        count=request.count,
        max_bytes=request.max_bytes,
        mode=pb.ReadMode.Name(request.mode),
    ).SerializeToString()


def encode_follow(request: Read) -> bytes:
    """A follow request."""
    return pb.FollowRequest(
        group=request.group, first_index=request.first_index, mode=pb.ReadMode.Name(request.mode)
    ).SerializeToString()


def decode_appended(data: bytes) -> tuple[int, AppendedBatch | DLedgerError]:
    """The request's id and its outcome (an error is returned, not raised: it belongs to one of many requests)."""
    wire = parse(pb.AppendResponse, data)
    try:
        raise_failure(wire.status)
    except DLedgerError as failure:
        return wire.request_id, failure
    first = LogIndex(wire.first_index)
    last = LogIndex(first + wire.count - 1)
    duplicates = tuple(
        StoredRun(LogIndex(run.first_index), run.count, Term(run.term), tuple(run.positions)) for run in wire.duplicates
    )
    return wire.request_id, AppendedBatch(Term(wire.term), first, last, tuple(wire.positions), duplicates)


def decode_read_answer(data: bytes) -> ReadAnswer:
    """Raises the error in the answer."""
    wire = parse(pb.ReadResponse, data)
    raise_failure(wire.status)
    return ReadAnswer(
        [_entry(entry) for entry in wire.entries],
        LogIndex(wire.committed_index),
        LogIndex(wire.begin_index),
        LogIndex(wire.end_index),
    )


def _entry(wire: pb.Entry) -> Entry:
    return Entry(
        LogIndex(wire.index),
        Term(wire.term),
        Position(wire.position),
        wire.body,
        Magic(wire.magic),
        body_crc=wire.body_crc,
        chain_crc=wire.chain_crc,
    )
