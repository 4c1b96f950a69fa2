"""The encoding of client requests and answers: ``proto/dledger/v1/client.proto``.

Answers that also travel over remoting (metadata, errors, transfers) are read here, too, so that an error raised in a
node is the same error in the client.

A request's elements are counted before protobuf makes an object of each: four million empty ones fit into 8 MiB.
Creating them takes a second, during which the process does nothing else. So the fields of a large request are counted
first, up to their limit; nearly always, counting one byte value at memory speed proves that there cannot be too many.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Final, NamedTuple

from dledger import errors
from dledger.errors import CorruptLogError, DLedgerError, InvalidRequestError, LeaderHint, ResponseCode, told
from dledger.monitoring import Condition
from dledger.pb import client_pb2 as pb
from dledger.records import record
from dledger.rpc.fields import index, name, parse
from dledger.rpc.ports import MemberStatus, NodeStatus, PeerStatus, RoleEvent
from dledger.types import AppendedBatch, Entry, LogIndex, MemberRole, NodeId, Position, ProducerBatch, Role, Term

_OVERLONG: Final = 0x80
"""The first byte of a field whose number is encoded longer than necessary."""
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # kinds of fields
_VARINT_BYTES_MAX: Final = 10
_OTHER_FIELDS_MAX: Final = 64


class RepeatedFieldLimit(NamedTuple):
    """A repeated field of bytes, texts or messages (numbered below 16), and its limit per request."""

    field: int
    count_max: int
    what: str


def check_count(data: bytes, limit: RepeatedFieldLimit) -> None:
    """Raise ``InvalidRequestError`` if a request has too many; a malformed one may pass."""
    if _may_exceed(data, limit.field, limit.count_max) and _exceeds(data, limit.field, limit.count_max):
        raise InvalidRequestError(f"more than {limit.count_max} {limit.what} in one request")


def _may_exceed(data: bytes, field: int, count_max: int) -> bool:
    """False if a field cannot occur more than ``count_max`` times, at any depth."""
    tag = field << 3 | _BYTES
    return len(data) > 2 * count_max and data.count(tag) + data.count(tag | _OVERLONG) > count_max


def _exceeds(data: bytes, field: int, count_max: int) -> bool:
    found = 0
    for number, (its_field, _, _) in enumerate(elements(data)):
        found += its_field == field
        if found > count_max or number > 2 * count_max + _OTHER_FIELDS_MAX:
            return True
    return False


def elements(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Number, begin and end of each top-level field, up to the first malformed one."""
    at, end = 0, len(data)
    while at < end:
        key, at = _varint(data, at)
        kind = key & 7
        if kind == _BYTES:
            size, at = _varint(data, at)
            begin, at = at, at + size
        elif kind == _VARINT:
            begin, (_, at) = at, _varint(data, at)
        elif kind in (_FIXED32, _FIXED64):
            begin, at = at, at + (4 if kind == _FIXED32 else 8)
        else:  # a group: obsolete for twenty years, with unbounded contents
            raise InvalidRequestError("a group in a request")
        yield key >> 3, begin, at


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number and its end; an end past the data if there is none."""
    value = 0
    for number, byte in enumerate(data[at : at + _VARINT_BYTES_MAX]):
        value |= (byte & 0x7F) << 7 * number
        if byte < _OVERLONG:
            return value, at + number + 1
    return value, len(data) + 1


APPEND_ENTRIES_MAX: Final = 4096
"""The limit of entries in one request; clients send at most 1,024."""
_BODIES: Final = RepeatedFieldLimit(2, APPEND_ENTRIES_MAX, "entries")


class ReadMode(IntEnum):
    """How current and how certain a read is."""

    COMMITTED = 0
    """Committed entries, as far as the node asked knows; any node answers."""
    LINEARIZABLE = 1
    """Sees every append that finished before the read began; only the leader answers."""
    LOCAL = 2
    """All entries that the node asked has stored, committed or not. For inspection."""


@record(frozen=True, slots=True)
class Append:
    """One append request. ``ordered``: refuse it if an earlier ordered one of its stream failed."""

    group: str
    bodies: Sequence[bytes]
    request_id: int = 0
    ordered: bool = False
    producer: ProducerBatch | None = None


@record(frozen=True, slots=True)
class Read:
    """A read, or without ``count`` and ``max_bytes`` a follow."""

    group: str
    first_index: LogIndex
    count: int = 0
    max_bytes: int = 0
    mode: ReadMode = ReadMode.COMMITTED


@record(frozen=True, slots=True)
class ReadAnswer:
    """Entries, and the answering node's indexes at that time."""

    entries: list[Entry]
    committed_index: LogIndex
    begin_index: LogIndex
    end_index: LogIndex


# --- requests -------------------------------------------------------------------------------------------------------


def decode_append(data: bytes) -> Append:
    """Raises ``InvalidRequestError``, like every ``decode_*`` of requests."""
    check_count(data, _BODIES)
    wire = parse(pb.AppendRequest, data)
    producer = ProducerBatch(wire.producer, wire.sequence, len(wire.bodies)) if wire.producer else None
    return Append(wire.group, tuple(wire.bodies), wire.request_id, wire.ordered, producer)


def encode_producer_request(group: str, producer: str) -> bytes:
    """Ask for the number of a producer's next entry."""
    return pb.ProducerRequest(group=group, producer=producer).SerializeToString()


def decode_producer_request(data: bytes) -> tuple[str, str]:
    """The group and the producer; the node checks its name."""
    wire = parse(pb.ProducerRequest, data)
    return name(wire.group, "group"), wire.producer


def decode_read(data: bytes) -> Read:
    """A read request, its numbers in range (the index may still be beyond the log)."""
    wire = parse(pb.ReadRequest, data)
    if wire.count < 0 or wire.max_bytes < 0:
        raise InvalidRequestError(f"count={wire.count} and max_bytes={wire.max_bytes} must not be negative")
    return Read(wire.group, index(wire.first_index, "first_index"), wire.count, wire.max_bytes, _mode(wire.mode))


def decode_follow(data: bytes) -> Read:
    wire = parse(pb.FollowRequest, data)
    return Read(wire.group, index(wire.first_index, "first_index"), mode=_mode(wire.mode))


def encode_metadata_request(group: str) -> bytes:
    """Ask a node for its metadata."""
    return pb.MetadataRequest(group=group).SerializeToString()


def group_named(data: bytes) -> str:
    """The group that a request of any kind names, in the field that all of them have for it; empty: none."""
    return name(parse(pb.MetadataRequest, data).group, "group")


def decode_metadata_request(data: bytes) -> str:
    """The group asked about; empty for the one that the node serves."""
    return name(parse(pb.MetadataRequest, data).group, "group")


def encode_watch_role(group: str) -> bytes:
    """Subscribe to role changes."""
    return pb.WatchRoleRequest(group=group).SerializeToString()


def decode_watch_role(data: bytes) -> str:
    """The group asked about; empty for the one that the node serves."""
    return name(parse(pb.WatchRoleRequest, data).group, "group")


def encode_transfer(group: str, target: NodeId | None) -> bytes:
    """Ask the leader to transfer leadership."""
    return pb.TransferLeadershipRequest(group=group, target=target or "").SerializeToString()


def decode_transfer(data: bytes) -> tuple[str, NodeId | None]:
    """The group and the target; None for the most up-to-date member."""
    wire = parse(pb.TransferLeadershipRequest, data)
    target = name(wire.target, "target")
    return name(wire.group, "group"), NodeId(target) if target else None


# --- answers --------------------------------------------------------------------------------------------------------


def encode_appended(request_id: int, outcome: AppendedBatch | DLedgerError) -> bytes:
    """The answer to an append."""
    if isinstance(outcome, DLedgerError):
        return pb.AppendResponse(status=status_of(outcome), request_id=request_id).SerializeToString()
    return pb.AppendResponse(
        status=SUCCESS,
        request_id=request_id,
        term=outcome.term,
        first_index=outcome.first_index,
        count=outcome.last_index - outcome.first_index + 1,
        positions=outcome.positions,
        duplicates=[
            pb.StoredRun(first_index=run.first_index, count=run.count, term=run.term, positions=run.positions)
            for run in outcome.duplicates
        ],
    ).SerializeToString()


def encode_producer_answer(outcome: int | DLedgerError) -> bytes:
    """The number of a producer's next entry."""
    if isinstance(outcome, DLedgerError):
        return pb.ProducerResponse(status=status_of(outcome)).SerializeToString()
    return pb.ProducerResponse(status=SUCCESS, next_sequence=outcome).SerializeToString()


def decode_producer_answer(data: bytes) -> int:
    """The number of a producer's next entry."""
    wire = parse(pb.ProducerResponse, data)
    raise_failure(wire.status)
    return wire.next_sequence


def encode_read_answer(outcome: ReadAnswer | DLedgerError) -> bytes:
    """The answer to a read, or one message of a follow."""
    if isinstance(outcome, DLedgerError):
        return pb.ReadResponse(status=status_of(outcome)).SerializeToString()
    response = pb.ReadResponse(
        status=SUCCESS,
        committed_index=outcome.committed_index,
        begin_index=outcome.begin_index,
        end_index=outcome.end_index,
    )
    for entry in outcome.entries:
        response.entries.add(
            index=entry.index,
            term=entry.term,
            position=entry.position,
            magic=entry.magic,
            body=entry.body,
            body_crc=entry.body_crc,
            chain_crc=entry.chain_crc,
        )
    return response.SerializeToString()


def encode_metadata(outcome: NodeStatus | DLedgerError) -> bytes:
    """Encode a node's metadata."""
    if isinstance(outcome, DLedgerError):
        return pb.MetadataResponse(status=status_of(outcome)).SerializeToString()
    leader_id, leader_address = _hint(outcome.leader)
    return pb.MetadataResponse(
        status=SUCCESS,
        group=outcome.group,
        node_id=outcome.node_id,
        role=outcome.role,
        term=outcome.term,
        leader_id=leader_id,
        leader_address=leader_address,
        members=[
            pb.MemberInfo(
                id=one.node_id,
                peer_address=one.peer_address,
                client_address=one.client_address,
                member_role=encode_member_role(one.role),
                number=one.number,
                uid=one.uid,
                promote=one.promote,
                replaces=one.replaces,
            )
            for one in outcome.members
        ],
        begin_index=outcome.begin_index,
        end_index=outcome.end_index,
        committed_index=outcome.committed_index,
        flushed_index=outcome.flushed_index,
        begin_position=outcome.begin_position,
        end_position=outcome.end_position,
        peers=[
            pb.PeerProgress(
                id=one.node_id,
                match_index=one.match_index,
                next_index=one.next_index,
                state=one.state,
                lag_entries=one.lag_entries,
                inflight=one.inflight,
                last_contact_ms=one.last_contact_ms,
                health=one.health,
                lag_bytes=one.lag_bytes,
                rate=one.rate,
                not_ready=one.not_ready,
            )
            for one in outcome.peers
        ],
        flush_mode=outcome.flush_mode,
        disk_full=outcome.disk_full,
        pending_entries=outcome.pending_entries,
        cluster_id=outcome.cluster_id,
        voter=outcome.voter,
        version=outcome.version,
        committed_position=outcome.committed_position,
        is_broker=outcome.is_broker,
        conditions=[
            pb.Condition(kind=one.kind, message=one.message, since_ms=one.since_ms, subject=one.subject)
            for one in outcome.conditions
        ],
        role_age_ms=outcome.role_age_ms if outcome.role_age_ms >= 0 else None,
        grpc_port=outcome.grpc_port,
        configuration_index=outcome.configuration_index,
        configuration_term=outcome.configuration_term,
        configuration_committed=outcome.configuration_committed,
        change_id=outcome.change_id,
        applied_index=outcome.applied_index,
        snapshot_index=outcome.snapshot_index,
        snapshot_bytes=outcome.snapshot_bytes,
    ).SerializeToString()


def decode_metadata(data: bytes) -> NodeStatus:
    """Decode a node's metadata."""
    wire = parse(pb.MetadataResponse, data)
    raise_failure(wire.status)
    return NodeStatus(
        cluster_id=wire.cluster_id,
        group=wire.group,
        node_id=NodeId(wire.node_id),
        role=_role(wire.role),
        term=Term(wire.term),
        leader=_leader(wire.leader_id, wire.leader_address),
        members=tuple(
            MemberStatus(
                NodeId(one.id),
                one.peer_address,
                one.client_address,
                member_role_of(one.member_role),
                one.number,
                one.uid,
                one.promote,
                one.replaces,
            )
            for one in wire.members
        ),
        begin_index=LogIndex(wire.begin_index),
        end_index=LogIndex(wire.end_index),
        committed_index=LogIndex(wire.committed_index),
        flushed_index=LogIndex(wire.flushed_index),
        begin_position=Position(wire.begin_position),
        end_position=Position(wire.end_position),
        flush_mode=wire.flush_mode,
        disk_full=wire.disk_full,
        voter=wire.voter,
        pending_entries=wire.pending_entries,
        peers=tuple(
            PeerStatus(
                NodeId(one.id),
                LogIndex(one.match_index),
                LogIndex(one.next_index),
                one.state,
                one.lag_entries,
                one.inflight,
                one.last_contact_ms,
                one.health,
                one.lag_bytes,
                one.rate,
                one.not_ready,
            )
            for one in wire.peers
        ),
        version=wire.version,
        committed_position=Position(wire.committed_position),
        is_broker=wire.is_broker,
        conditions=tuple(Condition(one.kind, one.message, one.since_ms, one.subject) for one in wire.conditions),
        role_age_ms=wire.role_age_ms if wire.HasField("role_age_ms") else -1,
        grpc_port=wire.grpc_port,
        configuration_index=LogIndex(wire.configuration_index),
        configuration_term=Term(wire.configuration_term),
        configuration_committed=wire.configuration_committed,
        change_id=wire.change_id,
        applied_index=LogIndex(wire.applied_index) if wire.HasField("applied_index") else None,
        snapshot_index=LogIndex(wire.snapshot_index),
        snapshot_bytes=wire.snapshot_bytes,
    )


def encode_role_event(event: RoleEvent) -> bytes:
    """One message of a role watch."""
    leader_id, leader_address = _hint(event.leader)
    return pb.RoleChange(
        node_id=event.node_id, role=event.role, term=event.term, leader_id=leader_id, leader_address=leader_address
    ).SerializeToString()


def decode_role_event(data: bytes) -> RoleEvent:
    """One message of a role watch."""
    wire = parse(pb.RoleChange, data)
    return RoleEvent(
        NodeId(wire.node_id), _role(wire.role), Term(wire.term), _leader(wire.leader_id, wire.leader_address)
    )


def encode_transferred(outcome: LeaderHint | DLedgerError, term: Term) -> bytes:
    """The answer to a transfer: the new leader."""
    if isinstance(outcome, DLedgerError):
        return pb.TransferLeadershipResponse(status=status_of(outcome)).SerializeToString()
    status = pb.Status(code=ResponseCode.SUCCESS, leader_id=outcome.node_id, leader_address=outcome.address)
    return pb.TransferLeadershipResponse(status=status, leader_id=outcome.node_id, term=term).SerializeToString()


def decode_transferred(data: bytes) -> LeaderHint:
    wire = parse(pb.TransferLeadershipResponse, data)
    raise_failure(wire.status)
    return LeaderHint(NodeId(wire.leader_id), wire.status.leader_address)


# --- parts ----------------------------------------------------------------------------------------------------------

SUCCESS: Final = pb.Status(code=ResponseCode.SUCCESS)


def status_of(error: DLedgerError) -> pb.Status:
    leader_id, leader_address = _hint(error.leader)
    return pb.Status(
        code=error.code,
        message=told(error),
        outcome_unknown=error.outcome == "unknown",
        leader_id=leader_id,
        leader_address=leader_address,
        error=type(error).__name__,
        damage=_damage(error),
    )


def _damage(error: DLedgerError) -> pb.Damage | None:
    if not isinstance(error, CorruptLogError):
        return None
    return pb.Damage(path=str(error.path), offset=error.offset, reason=error.reason, advice=error.advice)


def _failure(status: pb.Status) -> DLedgerError | None:
    if status.code == ResponseCode.SUCCESS:
        return None
    if status.HasField("damage"):
        damage = status.damage
        return CorruptLogError(Path(damage.path), damage.offset, damage.reason, damage.advice)
    kind = _BY_NAME.get(status.error) or _BY_CODE.get(status.code, DLedgerError)
    message = status.message or f"the node answered {status.code} without a message"
    error = kind(message, leader=_leader(status.leader_id, status.leader_address))
    # The node knows better than the class: the same error may occur before or after something was written.
    error.outcome = "unknown" if status.outcome_unknown else "not_applied"
    return error


def raise_failure(status: pb.Status) -> None:
    """Raise the error that a status carries, if any."""
    failure = _failure(status)
    if failure is not None:
        raise failure


def encode_error(error: DLedgerError) -> bytes:
    """An error by itself, as a ``Status``."""
    return status_of(error).SerializeToString()


def decode_error(data: bytes) -> DLedgerError:
    """The error. Raises ``InvalidRequestError`` if there is none."""
    failure = _failure(parse(pb.Status, data))
    if failure is None:
        raise InvalidRequestError("an error that says success")
    return failure


_KINDS: Final[tuple[type[DLedgerError], ...]] = (
    errors.NotLeaderError,
    errors.LeaderNotReadyError,
    errors.LeaderTransferringError,
    errors.PendingFullError,
    errors.QuorumAckTimeoutError,
    errors.TermChangedError,
    errors.DiskFullError,
    errors.DiskError,
    errors.IdentityError,
    errors.UnknownMemberError,
    errors.InvalidRequestError,
    errors.AppendsNotServedError,
    errors.AccessDeniedError,
    errors.EmptyBatchError,
    errors.EarlierRequestFailedError,
    errors.OutOfOrderSequenceError,
    errors.UnknownProducerError,
    errors.TooManyProducersError,
    errors.IndexOutOfRangeError,
    errors.IndexBeforeBeginError,
    errors.TransferFailedError,
    errors.FallBehindError,
    errors.ChangeInProgressError,
    errors.NotReadyToPromoteError,
    errors.WouldLoseQuorumError,
    errors.MemberExistsError,
    errors.MemberUnknownError,
    errors.StaleConfigurationError,
    errors.TooManyMembersError,
    errors.MemberRemovedError,
    errors.ShutdownError,
    errors.UnavailableError,
    errors.RequestTimeoutError,
    errors.ResultForgottenError,
    errors.DamagedSnapshotError,
    errors.SnapshotBusyError,
)
_BY_CODE: Final[dict[int, type[DLedgerError]]] = {int(kind.code): kind for kind in _KINDS}
# Errors that share a code with one above; a ConfigError comes back as the error of its code.
_BY_NAME: Final[dict[str, type[DLedgerError]]] = {
    kind.__name__: kind
    for kind in (
        *_KINDS,
        errors.EntryTooLargeError,
        errors.UntimedLogError,
        errors.InvariantError,
        errors.FencedError,
        errors.NoStateMachineError,
        errors.StateMachineError,
    )
}


def _hint(leader: LeaderHint | None) -> tuple[str, str]:
    return (leader.node_id, leader.address) if leader is not None else ("", "")


def _leader(leader_id: str, leader_address: str) -> LeaderHint | None:
    return LeaderHint(NodeId(leader_id), leader_address) if leader_id else None


def _mode(value: int) -> ReadMode:
    try:
        return ReadMode(value)
    except ValueError as error:
        raise InvalidRequestError(f"read mode {value} is unknown") from error


def _role(value: str) -> Role:
    try:
        return Role(value)
    except ValueError as error:
        raise InvalidRequestError(f"role {value!r} is unknown") from error


def encode_member_role(role: MemberRole) -> str:
    """A member's part in the group, as a word."""
    return role.name.lower()


def member_role_of(word: str) -> MemberRole:
    """The role. Raises ``InvalidRequestError`` for another word."""
    try:
        return MemberRole[word.upper()]
    except KeyError as error:
        raise InvalidRequestError(f"role {word!r} of a member is unknown") from error
