"""The encoding of members' messages: ``dledger.core.messages`` <-> ``proto/dledger/v1/raft.proto``, and ``pushes``.

Decoding is strict, because a forged or damaged number must not reach the protocol: whatever no correct peer sends
raises ``InvalidRequestError``. Whose a message is, the handshake of its connection has said
(``dledger.rpc.peers.identity``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from google.protobuf.message import Message as ProtoMessage

from dledger.core.messages import (
    CheckedAppend,
    CommittedEntry,
    HeartbeatRequest,
    HeartbeatResponse,
    LoadRun,
    Message,
    PushAppend,
    PushCommit,
    PushCompare,
    PushInstall,
    PushResponse,
    PushTruncate,
    Readmission,
    TakeLeadership,
    VoteRequest,
    VoteResponse,
    VoteResult,
)
from dledger.errors import InvalidRequestError, InvariantError, ResponseCode
from dledger.pb import raft_pb2 as pb
from dledger.records import record
from dledger.rpc.fields import NUMBER_LIMIT, index, name, parse
from dledger.rpc.peers import frames
from dledger.rpc.peers.frames import decode_configuration_entry, encode_configuration_entry
from dledger.types import (
    DIGESTS_MAX,
    NO_ENTRY,
    NO_INDEX,
    BaseLog,
    Boundary,
    Configuration,
    EntryId,
    LogIndex,
    NodeId,
    Position,
    Standing,
    Term,
)

PROTOCOL_VERSION: Final = 6
MEMBERS_MAX: Final = 1024
HEARTBEATS_GROUPS_MAX: Final = 256
"""How many groups' heartbeats are sent together at most."""
READ_LOG_BYTES_MAX: Final = 1 << 20
CHAIN_CRCS_MAX: Final = 64
SNAPSHOT_PIECE_BYTES_MAX: Final = 1 << 20


@record(frozen=True, slots=True)
class EnvelopeHeader:
    """The addresses of a handshake, and of all messages behind it: an ``Envelope`` without its message."""

    cluster_id: str
    group: str
    sender: NodeId
    target: NodeId


@record(frozen=True, slots=True)
class Handshake:
    """The settings on which two nodes must agree before they replicate.

    ``members``: the sorted ids, while those that are configured are the members; else empty.
    """

    header: EnvelopeHeader
    protocol_version: int
    purpose: int
    """See ``frames.Purpose``; any number, because another version's may be unknown here."""
    members: tuple[str, ...]
    segment_bytes: int
    max_entry_bytes: int
    client_address: str = ""
    base_log: BaseLog | None = None


@record(frozen=True, slots=True)
class HandshakeAnswer:
    """``SUCCESS``, or the reason of a refusal."""

    code: ResponseCode
    reason: str = ""
    protocol_version: int = PROTOCOL_VERSION
    client_address: str = ""
    configuration: Configuration | None = None
    """The newest one in the log that the peer knows to be committed: its addresses count, nothing else."""


@record(frozen=True, slots=True)
class GroupHeartbeat:
    """A heartbeat that is sent together with those of other groups."""

    group: str
    sender: NodeId
    repeats: int
    """The ``read_sequence`` of the last heartbeat on its own connection, with which it agrees in all else."""
    read_sequence: int


@record(frozen=True, slots=True)
class SnapshotRequest:
    """Which snapshot a member asks for: see ``raft.proto``."""

    at_least: LogIndex
    index: LogIndex = NO_INDEX
    doubted: LogIndex = NO_INDEX


# --- encoding -------------------------------------------------------------------------------------------------------


def encode(message: Message) -> bytes:
    """Encode a message; its type determines the frame that carries it."""
    return b"".join(encode_pieces(message))


def encode_pieces(message: Message) -> tuple[bytes, ...]:
    """``encode`` in consecutive pieces, which avoids copying a run of log bytes."""
    match message:
        case PushCompare() | PushTruncate() | PushAppend() | PushCommit() | PushInstall():
            return frames.encode_push(message)
        case PushResponse():
            return (frames.encode_answer(message),)
        case LoadRun() | CheckedAppend():
            raise InvariantError(f"{type(message).__name__} never goes on the wire")
        case _:
            return (_to_proto(message).SerializeToString(),)


def encode_heartbeats(heartbeats: Iterable[GroupHeartbeat]) -> bytes:
    """Encode heartbeats of several groups."""
    items = [
        pb.GroupHeartbeat(group=one.group, sender=one.sender, repeats=one.repeats, read_sequence=one.read_sequence)
        for one in heartbeats
    ]
    return pb.Heartbeats(heartbeats=items).SerializeToString()


def encode_heartbeats_answer(answers: Iterable[HeartbeatResponse | None]) -> bytes:
    """Encode the answers to heartbeats of several groups; None: there is none."""
    items = [
        pb.GroupHeartbeatAnswer(answer=None if one is None else _heartbeat_answer_to_proto(one)) for one in answers
    ]
    return pb.HeartbeatsAnswer(answers=items).SerializeToString()


def _to_proto(
    message: VoteRequest | VoteResponse | HeartbeatRequest | HeartbeatResponse | TakeLeadership,
) -> ProtoMessage:
    match message:
        case VoteRequest():
            return pb.VoteRequest(
                term=message.term,
                last=_entry_id_to_proto(message.last),
                pre_vote=message.pre_vote,
                transfer=message.transfer,
                remembered=_memory_to_proto(message.remembered),
                committed=_committed_to_proto(message.committed),
                countersign=message.countersign,
            )
        case VoteResponse():
            return pb.VoteResponse(
                term=message.term,
                granted=message.granted,
                pre_vote=message.pre_vote,
                result=message.result,
                standing=message.standing,
                boot_id=message.boot_id,
                used=message.used,
                remembered=_memory_to_proto(message.remembered),
                leads=message.leads,
                begin=_begin_to_proto(message.begin),
                committed=_committed_to_proto(message.committed),
                other_history=message.other_history,
                uid=message.uid,
                removed_at=_optional(message.removed_at),
            )
        case HeartbeatRequest():
            return _heartbeat_to_proto(message)
        case HeartbeatResponse():
            return _heartbeat_answer_to_proto(message)
        case TakeLeadership():
            return pb.TakeLeadershipRequest(term=message.term)


def _optional(index: LogIndex) -> int | None:
    return None if index == NO_INDEX else index


def _heartbeat_to_proto(message: HeartbeatRequest) -> pb.HeartbeatRequest:
    readmission = message.readmission
    return pb.HeartbeatRequest(
        term=message.term,
        read_sequence=message.read_sequence,
        client_address=message.client_address,
        transfer_target=message.transfer_target,
        readmit_boot_id=0 if readmission is None else readmission.boot_id,
        readmit_index=0 if readmission is None else readmission.index,
        founded=message.founded,
        watermarks=[pb.Watermark(node_id=one, last=_entry_id_to_proto(last)) for one, last in message.watermarks],
        doubted_boot_id=message.doubted_boot_id,
        countersign=message.countersign,
    )


def _heartbeat_answer_to_proto(message: HeartbeatResponse) -> pb.HeartbeatResponse:
    return pb.HeartbeatResponse(
        term=message.term,
        read_sequence=message.read_sequence,
        disk_full=message.disk_full,
        client_address=message.client_address,
        standing=message.standing,
        boot_id=message.boot_id,
        uid=message.uid,
        removed_at=_optional(message.removed_at),
    )


def _begin_to_proto(begin: Boundary | None) -> pb.Install | None:
    if begin is None:
        return None
    before = pb.EntryId(term=begin.term, index=begin.index)
    return pb.Install(before_begin=before, chain_crc=begin.chain_crc, position=begin.position)


def _entry_id_to_proto(entry_id: EntryId) -> pb.EntryId:
    return pb.EntryId(term=entry_id.term, index=entry_id.index)


def _memory_to_proto(entry_id: EntryId) -> pb.EntryId | None:
    return None if entry_id == NO_ENTRY else _entry_id_to_proto(entry_id)


def encode_handshake(handshake: Handshake) -> bytes:
    """The bytes of a ``Handshake`` request."""
    header = handshake.header
    return pb.HandshakeRequest(
        header=pb.Header(cluster_id=header.cluster_id, group=header.group, sender=header.sender, target=header.target),
        protocol_version=handshake.protocol_version,
        purpose=handshake.purpose,
        members=handshake.members,
        segment_bytes=handshake.segment_bytes,
        max_entry_bytes=handshake.max_entry_bytes,
        client_address=handshake.client_address,
        base_log=None if handshake.base_log is None else _base_log_to_proto(handshake.base_log),
    ).SerializeToString()


def _base_log_to_proto(base_log: BaseLog) -> pb.BaseLog:
    return pb.BaseLog(
        begin=base_log.begin,
        end=base_log.end,
        file_bytes=base_log.file_bytes,
        digests=base_log.digests,
        kept_from=base_log.kept_from,
    )


def encode_handshake_answer(answer: HandshakeAnswer) -> bytes:
    """The bytes of a ``Handshake`` response."""
    return pb.HandshakeResponse(
        code=answer.code,
        reason=answer.reason,
        protocol_version=answer.protocol_version,
        client_address=answer.client_address,
        configuration=encode_configuration_entry(answer.configuration),
    ).SerializeToString()


def encode_read_log(position: int, length: int) -> bytes:
    """The bytes of a question for a part of the log."""
    return pb.ReadLogRequest(position=position, length=length).SerializeToString()


def encode_log_bytes(data: bytes | None) -> bytes:
    """The bytes of its answer; None: not all of the range is held."""
    return pb.ReadLogResponse(held=data is not None, data=data or b"").SerializeToString()


def encode_snapshot_request(request: SnapshotRequest) -> bytes:
    """The bytes of a question for a snapshot."""
    return pb.FetchSnapshotRequest(
        at_least=request.at_least, index=request.index, doubted=request.doubted
    ).SerializeToString()


def encode_snapshot_description(meta: bytes) -> bytes:
    """The bytes of its answer."""
    return pb.FetchSnapshotResponse(meta=meta).SerializeToString()


def encode_piece_request(file: str, offset: int) -> bytes:
    """The bytes of a question for a piece of a snapshot's file."""
    return pb.SnapshotPieceRequest(file=file, offset=offset).SerializeToString()


def encode_piece(data: bytes) -> bytes:
    """The bytes of its answer."""
    return pb.SnapshotPieceResponse(data=data).SerializeToString()


def encode_chain_crcs_request(indexes: Sequence[LogIndex]) -> bytes:
    """The bytes of a question for chain CRCs."""
    return pb.ChainCrcsRequest(indexes=indexes).SerializeToString()


def encode_chain_crcs(crcs: Mapping[LogIndex, int]) -> bytes:
    """The bytes of its answer."""
    return pb.ChainCrcsResponse(
        crcs=[pb.ChainCrc(index=index, chain_crc=crc) for index, crc in crcs.items()]
    ).SerializeToString()


# --- decoding -------------------------------------------------------------------------------------------------------


def decode_vote_request(data: bytes | memoryview) -> VoteRequest:
    """Raises ``InvalidRequestError``, like every ``decode_*``."""
    wire = parse(pb.VoteRequest, data)
    return VoteRequest(
        term=_term(wire.term),
        last=_entry_id(wire.last, wire.HasField("last"), "last"),
        pre_vote=wire.pre_vote,
        transfer=wire.transfer,
        remembered=_memory(wire.remembered, wire.HasField("remembered")),
        committed=_committed(wire.committed),
        countersign=wire.countersign,
    )


def decode_vote_response(data: bytes | memoryview) -> VoteResponse:
    """The answer to a vote request."""
    wire = parse(pb.VoteResponse, data)
    try:
        result = VoteResult(wire.result)
    except ValueError as error:
        raise InvalidRequestError(f"vote result {wire.result} is unknown") from error
    return VoteResponse(
        term=_term(wire.term),
        granted=wire.granted,
        pre_vote=wire.pre_vote,
        result=result,
        standing=_standing(wire.standing),
        boot_id=wire.boot_id,
        used=wire.used,
        remembered=_memory(wire.remembered, wire.HasField("remembered")),
        leads=wire.leads,
        begin=_begin(wire.begin) if wire.HasField("begin") else None,
        committed=_committed(wire.committed),
        other_history=wire.other_history,
        uid=wire.uid,
        removed_at=index(wire.removed_at, "removed_at") if wire.HasField("removed_at") else NO_INDEX,
    )


def _committed_to_proto(entries: Iterable[CommittedEntry]) -> list[pb.ChainCrc]:
    return [pb.ChainCrc(index=entry.index, chain_crc=entry.chain_crc) for entry in entries]


def _committed(wire: Sequence[pb.ChainCrc]) -> tuple[CommittedEntry, ...]:
    """Refuses more entries than there are powers of two: no correct peer sends them."""
    if len(wire) > CHAIN_CRCS_MAX:
        raise InvalidRequestError(f"vote lists {len(wire)} entries; at most {CHAIN_CRCS_MAX} are allowed")
    return tuple(CommittedEntry(index(one.index, "committed"), one.chain_crc) for one in wire)


def _begin(wire: pb.Install) -> Boundary:
    before = _entry_id(wire.before_begin, wire.HasField("before_begin"), "begin")
    return Boundary(before.index, before.term, Position(_count(wire.position, "position")), wire.chain_crc)


def decode_heartbeat_request(data: bytes | memoryview) -> HeartbeatRequest:
    wire = parse(pb.HeartbeatRequest, data)
    if len(wire.watermarks) > MEMBERS_MAX:
        raise InvalidRequestError(f"heartbeat names {len(wire.watermarks)} members; at most {MEMBERS_MAX} are possible")
    readmit_index = index(wire.readmit_index, "readmit_index")
    return HeartbeatRequest(
        term=_term(wire.term),
        read_sequence=_count(wire.read_sequence, "read_sequence"),
        client_address=name(wire.client_address, "client_address"),
        transfer_target=name(wire.transfer_target, "transfer_target"),
        readmission=Readmission(wire.readmit_boot_id, readmit_index) if wire.readmit_boot_id else None,
        founded=wire.founded,
        watermarks=tuple(
            (NodeId(name(one.node_id, "node_id")), _entry_id(one.last, one.HasField("last"), "watermark"))
            for one in wire.watermarks
        ),
        doubted_boot_id=wire.doubted_boot_id,
        countersign=wire.countersign,
    )


def decode_heartbeat_response(data: bytes | memoryview) -> HeartbeatResponse:
    """The answer to a heartbeat."""
    return _heartbeat_answer(parse(pb.HeartbeatResponse, data))


def _heartbeat_answer(wire: pb.HeartbeatResponse) -> HeartbeatResponse:
    return HeartbeatResponse(
        _term(wire.term),
        _count(wire.read_sequence, "read_sequence"),
        wire.disk_full,
        name(wire.client_address, "client_address"),
        _standing(wire.standing),
        wire.boot_id,
        wire.uid,
        index(wire.removed_at, "removed_at") if wire.HasField("removed_at") else NO_INDEX,
    )


def decode_heartbeats(data: bytes | memoryview) -> tuple[GroupHeartbeat, ...]:
    """Heartbeats of several groups."""
    wire = parse(pb.Heartbeats, data)
    if len(wire.heartbeats) > HEARTBEATS_GROUPS_MAX:
        raise InvalidRequestError(
            f"heartbeats of {len(wire.heartbeats)} groups at once; at most {HEARTBEATS_GROUPS_MAX} are allowed"
        )
    return tuple(
        GroupHeartbeat(
            name(one.group, "group"),
            NodeId(name(one.sender, "sender")),
            _count(one.repeats, "repeats"),
            _count(one.read_sequence, "read_sequence"),
        )
        for one in wire.heartbeats
    )


def decode_heartbeats_answer(data: bytes | memoryview) -> tuple[HeartbeatResponse | None, ...]:
    """The answers to heartbeats of several groups; None: there is none."""
    wire = parse(pb.HeartbeatsAnswer, data)
    return tuple(_heartbeat_answer(one.answer) if one.HasField("answer") else None for one in wire.answers)


def decode_take_leadership(data: bytes | memoryview) -> TakeLeadership:
    """The leader's request to campaign immediately."""
    wire = parse(pb.TakeLeadershipRequest, data)
    return TakeLeadership(_term(wire.term))


def decode_handshake(data: bytes | memoryview) -> Handshake:
    wire = parse(pb.HandshakeRequest, data)
    if len(wire.members) > MEMBERS_MAX:
        raise InvalidRequestError(f"handshake names {len(wire.members)} members; at most {MEMBERS_MAX} are possible")
    return Handshake(
        header=_header(wire.header),
        protocol_version=wire.protocol_version,
        purpose=wire.purpose,
        members=tuple(name(member, "member") for member in wire.members),
        segment_bytes=_count(wire.segment_bytes, "segment_bytes"),
        max_entry_bytes=_count(wire.max_entry_bytes, "max_entry_bytes"),
        client_address=name(wire.client_address, "client_address"),
        base_log=_base_log(wire.base_log) if wire.HasField("base_log") else None,
    )


def _base_log(wire: pb.BaseLog) -> BaseLog:
    begin, end, size = (_count(value, "base_log") for value in (wire.begin, wire.end, wire.file_bytes))
    kept_from = _count(wire.kept_from, "kept_from")
    if not size or len(wire.digests) > DIGESTS_MAX or len(wire.digests) * size > end - begin or kept_from > end:
        raise InvalidRequestError("the old log that a handshake describes is impossible")
    return BaseLog(begin, end, size, tuple(wire.digests), kept_from)


def decode_read_log(data: bytes | memoryview) -> tuple[Position, int]:
    """The position to read from, and the number of bytes. Raises ``InvalidRequestError``."""
    wire = parse(pb.ReadLogRequest, data)
    position, length = _count(wire.position, "position"), _count(wire.length, "length")
    if length > READ_LOG_BYTES_MAX:
        raise InvalidRequestError(f"{length} bytes of log requested at once; the limit is {READ_LOG_BYTES_MAX}")
    return Position(position), length


def decode_log_bytes(data: bytes | memoryview) -> bytes | None:
    """The bytes that a peer sent; None if it does not hold all of them."""
    wire = parse(pb.ReadLogResponse, data)
    return wire.data if wire.held else None


def decode_snapshot_request(data: bytes | memoryview) -> SnapshotRequest:
    """A question for a snapshot."""
    wire = parse(pb.FetchSnapshotRequest, data)
    return SnapshotRequest(index(wire.at_least, "at_least"), index(wire.index, "index"), index(wire.doubted, "doubted"))


def decode_snapshot_description(data: bytes | memoryview) -> bytes:
    """The ``meta.json`` of the snapshot that a peer sends."""
    return parse(pb.FetchSnapshotResponse, data).meta


def decode_piece_request(data: bytes | memoryview) -> tuple[str, int]:
    """The file, and where the piece begins."""
    wire = parse(pb.SnapshotPieceRequest, data)
    return name(wire.file, "file"), _count(wire.offset, "offset")


def decode_piece(data: bytes | memoryview) -> bytes:
    """A piece that a peer sent. Raises ``InvalidRequestError`` for one that is too long."""
    piece = parse(pb.SnapshotPieceResponse, data).data
    if len(piece) > SNAPSHOT_PIECE_BYTES_MAX:
        raise InvalidRequestError(f"a piece of {len(piece)} bytes: the limit is {SNAPSHOT_PIECE_BYTES_MAX}")
    return piece


def decode_chain_crcs_request(data: bytes | memoryview) -> tuple[LogIndex, ...]:
    """The entries in question. Raises ``InvalidRequestError``."""
    wire = parse(pb.ChainCrcsRequest, data)
    if len(wire.indexes) > CHAIN_CRCS_MAX:
        raise InvalidRequestError(f"{len(wire.indexes)} chain CRCs requested; the limit is {CHAIN_CRCS_MAX}")
    return tuple(index(one, "index") for one in wire.indexes)


def decode_chain_crcs(data: bytes | memoryview) -> dict[LogIndex, int]:
    """The CRCs that a peer sent."""
    wire = parse(pb.ChainCrcsResponse, data)
    return {index(one.index, "index"): one.chain_crc for one in wire.crcs[:CHAIN_CRCS_MAX]}


def decode_handshake_answer(data: bytes | memoryview) -> HandshakeAnswer:
    wire = parse(pb.HandshakeResponse, data)
    return HandshakeAnswer(
        ResponseCode(wire.code),
        wire.reason,
        wire.protocol_version,
        name(wire.client_address, "client_address"),
        decode_configuration_entry(wire.configuration),
    )


def _header(wire: pb.Header) -> EnvelopeHeader:
    sender, target = name(wire.sender, "sender"), name(wire.target, "target")
    if not sender or not target:
        raise InvalidRequestError("a handshake without a header: sender and target are required")
    return EnvelopeHeader(
        name(wire.cluster_id, "cluster_id"), name(wire.group, "group"), NodeId(sender), NodeId(target)
    )


def _entry_id(wire: pb.EntryId, present: bool, field: str) -> EntryId:
    # An absent EntryId would read as (0, 0), which names a real entry: a peer that means "none" must send -1.
    if not present:
        raise InvalidRequestError(f"{field} is missing")
    if not -1 <= wire.term < NUMBER_LIMIT:
        raise InvalidRequestError(f"{field}.term={wire.term} is not a valid term")
    return EntryId(Term(wire.term), index(wire.index, f"{field}.index"))


def _memory(wire: pb.EntryId, present: bool) -> EntryId:
    """A peer's memory; a missing one is empty."""
    return _entry_id(wire, True, "remembered") if present else NO_ENTRY


def _standing(value: int) -> Standing:
    try:
        return Standing(value)
    except ValueError as error:
        raise InvalidRequestError(f"standing {value} is unknown") from error


def _term(value: int) -> Term:
    if not 0 <= value < NUMBER_LIMIT:
        raise InvalidRequestError(f"term={value} is not a valid term")
    return Term(value)


def _count(value: int, field: str) -> int:
    if not 0 <= value < NUMBER_LIMIT:
        raise InvalidRequestError(f"{field}={value} is out of range")
    return value
