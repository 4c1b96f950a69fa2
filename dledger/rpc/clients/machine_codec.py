"""The encoding of commands, queries and snapshots of a state machine: ``proto/dledger/v1/client.proto``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from dledger.errors import DLedgerError, InvalidRequestError
from dledger.pb import client_pb2 as pb
from dledger.records import record
from dledger.rpc.clients.codec import SUCCESS, ReadMode, raise_failure, status_of
from dledger.rpc.clients.repeated_field_limit import RepeatedFieldLimit, check_count
from dledger.rpc.fields import index, name, parse
from dledger.types import NO_INDEX, LogIndex, ProducerBatch, QueryAnswer, SnapshotState

COMMANDS_MAX: Final = 1024
"""In one request."""
NUMBERED_COMMANDS_MAX: Final = 32
"""In one with a producer: so many results of each are kept for its repetition."""
QUERY_WAIT_MS_MAX: Final = 15_000
_COMMANDS: Final = RepeatedFieldLimit(2, COMMANDS_MAX, "commands")


@record(frozen=True, slots=True)
class Commands:
    """A request of commands."""

    group: str
    commands: Sequence[bytes]
    producer: ProducerBatch | None = None


@record(frozen=True, slots=True)
class Query:
    """A query. With ``wait_ms``, it is answered once an entry after ``after`` is applied, or that time later."""

    group: str
    request: bytes
    mode: ReadMode = ReadMode.LINEARIZABLE
    after: LogIndex = NO_INDEX
    wait_ms: int = 0


def encode_commands(request: Commands) -> bytes:
    producer = request.producer
    return pb.CommandRequest(
        group=request.group,
        commands=request.commands,
        producer="" if producer is None else producer.producer,
        sequence=0 if producer is None else producer.sequence,
    ).SerializeToString()


def decode_commands(data: bytes) -> Commands:
    """Raises ``InvalidRequestError``, like every ``decode_*`` of requests."""
    check_count(data, _COMMANDS)
    wire = parse(pb.CommandRequest, data)
    producer = ProducerBatch(wire.producer, wire.sequence, len(wire.commands)) if wire.producer else None
    if producer is not None:
        index(producer.sequence, "sequence")
    limit = COMMANDS_MAX if producer is None else NUMBERED_COMMANDS_MAX
    if not 0 < len(wire.commands) <= limit:
        raise InvalidRequestError(f"{len(wire.commands)} commands in one request: send 1 to {limit}")
    return Commands(name(wire.group, "group"), tuple(wire.commands), producer)


def encode_results(outcome: Sequence[bytes] | DLedgerError) -> bytes:
    """The results of commands."""
    if isinstance(outcome, DLedgerError):
        return pb.CommandResponse(status=status_of(outcome)).SerializeToString()
    return pb.CommandResponse(status=SUCCESS, results=outcome).SerializeToString()


def decode_results(data: bytes) -> tuple[bytes, ...]:
    """The results. Raises the error that the answer carries."""
    wire = parse(pb.CommandResponse, data)
    raise_failure(wire.status)
    return tuple(wire.results)


def encode_query(query: Query) -> bytes:
    return pb.QueryRequest(
        group=query.group,
        request=query.request,
        mode=pb.ReadMode.Name(query.mode),
        after_index=query.after,
        wait_ms=query.wait_ms,
    ).SerializeToString()


def decode_query(data: bytes) -> Query:
    """A query, its wait within ``QUERY_WAIT_MS_MAX``."""
    wire = parse(pb.QueryRequest, data)
    try:
        mode = ReadMode(wire.mode)
    except ValueError as error:
        raise InvalidRequestError(f"read mode {wire.mode} is unknown") from error
    if mode is ReadMode.LOCAL:
        raise InvalidRequestError("a state machine has applied committed entries only: use LINEARIZABLE or COMMITTED")
    if wire.wait_ms and mode is not ReadMode.COMMITTED:
        raise InvalidRequestError("only a query in mode COMMITTED can wait for the next entry")
    after, wait_ms = index(wire.after_index, "after_index"), min(wire.wait_ms, QUERY_WAIT_MS_MAX)
    return Query(name(wire.group, "group"), wire.request, mode, after, wait_ms)


def encode_answer(outcome: QueryAnswer | DLedgerError) -> bytes:
    """The answer to a query."""
    if isinstance(outcome, DLedgerError):
        return pb.QueryResponse(status=status_of(outcome)).SerializeToString()
    return pb.QueryResponse(
        status=SUCCESS, result=outcome.result, applied_index=outcome.applied_index
    ).SerializeToString()


def decode_answer(data: bytes) -> QueryAnswer:
    """The answer. Raises the error that it carries."""
    wire = parse(pb.QueryResponse, data)
    raise_failure(wire.status)
    return QueryAnswer(wire.result, LogIndex(wire.applied_index))


def encode_snapshot_request(group: str) -> bytes:
    """Have the node asked write a snapshot."""
    return pb.SnapshotRequest(group=group).SerializeToString()


def decode_snapshot_request(data: bytes) -> str:
    """The group."""
    return name(parse(pb.SnapshotRequest, data).group, "group")


def encode_snapshot_state(outcome: SnapshotState | DLedgerError) -> bytes:
    """The snapshot that was written."""
    if isinstance(outcome, DLedgerError):
        return pb.SnapshotResponse(status=status_of(outcome)).SerializeToString()
    return pb.SnapshotResponse(status=SUCCESS, index=outcome.index, bytes=outcome.size).SerializeToString()


def decode_snapshot_state(data: bytes) -> SnapshotState:
    """The snapshot. Raises the error that the answer carries."""
    wire = parse(pb.SnapshotResponse, data)
    raise_failure(wire.status)
    return SnapshotState(LogIndex(wire.index), wire.bytes)
