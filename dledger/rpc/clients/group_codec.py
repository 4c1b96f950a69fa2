"""The encoding of requests about a group's members, and about its state machine: commands, queries, snapshots.

The messages are those of ``proto/dledger/v1/client.proto``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from dledger.errors import DLedgerError, InvalidRequestError
from dledger.pb import client_pb2 as pb
from dledger.records import record
from dledger.rpc.clients.codec import (
    SUCCESS,
    ReadMode,
    RepeatedFieldLimit,
    check_count,
    encode_member_role,
    member_role_of,
    raise_failure,
    status_of,
)
from dledger.rpc.fields import index, name, parse
from dledger.types import (
    ANY_CONFIGURATION,
    NO_INDEX,
    Body,
    ChangeKind,
    ClusterMember,
    Configuration,
    LogIndex,
    MemberChange,
    NodeId,
    ProducerBatch,
    QueryAnswer,
    SnapshotState,
    Term,
)
from dledger.values import PORT_MAX, address_text, parse_address

_CHANGE_ID_LIMIT: Final = 1 << 63
_SEPARATORS: Final = frozenset("-,;=/ ")


def encode_change(group: str, change: MemberChange) -> bytes:
    """Ask the leader for a change."""
    wire = pb.ChangeMembersRequest(group=group, change_id=change.change_id)
    if change.expected_index != ANY_CONFIGURATION:
        wire.expected_index = change.expected_index
    node_id = change.node_id
    match change.kind:
        case ChangeKind.ADD:
            wire.add.MergeFrom(
                pb.AddMember(
                    id=node_id,
                    host=change.host,
                    port=change.port,
                    learner=not change.promote,
                    replaces=change.replaces,
                )
            )
        case ChangeKind.PROMOTE:
            wire.promote = node_id
        case ChangeKind.DEMOTE:
            wire.demote = node_id
        case ChangeKind.REMOVE:
            wire.remove = node_id
        case ChangeKind.UPDATE:
            wire.update.MergeFrom(pb.UpdateMember(id=node_id, host=change.host, port=change.port))
    return wire.SerializeToString()


def decode_change(data: bytes) -> tuple[str, MemberChange]:
    """The group and the change, its fields in range. Raises ``InvalidRequestError``."""
    wire = parse(pb.ChangeMembersRequest, data)
    which = wire.WhichOneof("change")
    if which is None:
        raise InvalidRequestError("no change is named: add, promote, demote, remove or update a member")
    if not 0 < wire.change_id < _CHANGE_ID_LIMIT:
        raise InvalidRequestError(f"change_id={wire.change_id} must be positive and below 2^63")
    expected = index(wire.expected_index, "expected_index") if wire.HasField("expected_index") else ANY_CONFIGURATION
    match which:
        case "add":
            added = wire.add
            change = MemberChange(
                ChangeKind.ADD,
                _node_id(added.id),
                wire.change_id,
                *_place(added.host, added.port),
                promote=not added.learner,
                replaces=name(added.replaces, "replaces"),
                expected_index=expected,
            )
        case "update":
            place = _place(wire.update.host, wire.update.port)
            node_id = _node_id(wire.update.id)
            change = MemberChange(ChangeKind.UPDATE, node_id, wire.change_id, *place, expected_index=expected)
        case _:
            node_id = _node_id(getattr(wire, which))
            change = MemberChange(ChangeKind(which), node_id, wire.change_id, expected_index=expected)
    return name(wire.group, "group"), change


def encode_changed(outcome: Configuration | DLedgerError) -> bytes:
    """The answer: the configuration that is committed now."""
    if isinstance(outcome, DLedgerError):
        return pb.ChangeMembersResponse(status=status_of(outcome)).SerializeToString()
    return pb.ChangeMembersResponse(
        status=SUCCESS,
        configuration_index=outcome.index,
        configuration_term=outcome.term,
        change_id=outcome.change_id,
        members=[
            pb.MemberInfo(
                id=one.node_id,
                peer_address=address_text(one.host, one.port),
                member_role=encode_member_role(one.role),
                number=one.number,
                uid=one.uid,
                promote=one.promote,
                replaces=one.replaces,
            )
            for one in outcome.members
        ],
    ).SerializeToString()


def decode_changed(data: bytes) -> Configuration:
    """The answer; ``next_number`` is not told. Raises the error that it tells of."""
    wire = parse(pb.ChangeMembersResponse, data)
    raise_failure(wire.status)
    return Configuration(
        tuple(_members(wire.members)),
        LogIndex(wire.configuration_index),
        Term(wire.configuration_term),
        change_id=wire.change_id,
    )


def _members(wire: Iterable[pb.MemberInfo]) -> Iterable[ClusterMember]:
    for one in wire:
        try:
            host, port = parse_address(one.peer_address)
        except ValueError as error:
            raise InvalidRequestError(f"member {one.id}: {error}") from error
        yield ClusterMember(
            NodeId(one.id),
            host,
            port,
            member_role_of(one.member_role),
            one.number,
            one.uid,
            one.promote,
            one.replaces,
        )


def _node_id(text: str) -> NodeId:
    """Ids are words of settings, so what separates words there may not be part of one."""
    if not text or not text.isprintable() or not _SEPARATORS.isdisjoint(text):
        raise InvalidRequestError(f"invalid member id {text[:64]!r}")
    return NodeId(name(text, "id"))


def _place(host: str, port: int) -> tuple[str, int]:
    if not name(host, "host") or host != host.strip() or not host.isprintable():
        raise InvalidRequestError("the member's host is missing, or no name of a host")
    if not 0 < port <= PORT_MAX:
        raise InvalidRequestError(f"port={port} must be between 1 and {PORT_MAX}")
    return host, port


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
    check_commands(wire.commands, producer)
    return Commands(name(wire.group, "group"), tuple(wire.commands), producer)


def check_commands(commands: Sequence[Body], producer: ProducerBatch | None) -> None:
    """Check how many commands one request holds, of clients or of this process. Raises ``InvalidRequestError``."""
    limit = COMMANDS_MAX if producer is None else NUMBERED_COMMANDS_MAX
    if not 0 < len(commands) <= limit:
        raise InvalidRequestError(f"{len(commands)} commands in one request: send 1 to {limit}")


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
