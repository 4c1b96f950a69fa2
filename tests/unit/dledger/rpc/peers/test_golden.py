"""The bytes of frames between members, one of each kind: whoever changes them raises ``PROTOCOL_VERSION``."""

from __future__ import annotations

from typing import Final

import pytest

from dledger.core.messages import (
    CommittedEntry,
    HeartbeatRequest,
    HeartbeatResponse,
    PushAppend,
    PushCommit,
    PushCompare,
    PushInstall,
    PushKind,
    PushResponse,
    PushTruncate,
    Readmission,
    TakeLeadership,
    VoteRequest,
    VoteResponse,
    VoteResult,
)
from dledger.errors import ResponseCode
from dledger.rpc.peers import codec, frames
from dledger.rpc.peers.frames import FrameKind, Purpose
from dledger.types import (
    BaseLog,
    Boundary,
    ClusterMember,
    Configuration,
    EntryId,
    EntryRun,
    LogIndex,
    NodeId,
    Position,
    Standing,
    Term,
)

AT: Final = EntryId(Term(2), LogIndex(7))
RUN: Final = EntryRun(AT, 0xA1B2C3D4, LogIndex(8), LogIndex(9), Position(4096), b"run")
HANDSHAKE: Final = codec.Handshake(
    codec.EnvelopeHeader("c", "g", NodeId("n0"), NodeId("n1")),
    codec.PROTOCOL_VERSION,
    Purpose.PUSH,
    ("n0", "n1"),
    1 << 20,
    1 << 16,
    "h:1",
    BaseLog(0, 300, 100, (1, 2), 100),
)
MEMBERS: Final = Configuration((ClusterMember(NodeId("n1"), "h", 1),), LogIndex(8), Term(2), 1)
VERDICT: Final = codec.HandshakeAnswer(ResponseCode.UNEXPECTED_ARGUMENT, "why", 5, "h:2", MEMBERS)
SAID: Final[list[tuple[FrameKind, bytes, str]]] = [
    (
        FrameKind.HANDSHAKE,
        codec.encode_handshake(HANDSHAKE),
        (
            "010000003c0a0e0a01631201671a026e3022026e311006180222026e3022026e3128808040308080043a0368"
            "3a31421110ac021864220801000000020000002864"
        ),
    ),
    (
        FrameKind.HANDSHAKE_ANSWER,
        codec.encode_handshake_answer(VERDICT),
        "0200000054089b03120377687918052203683a322a430000000000000008000000000000000289444c50524f440a010300000025000000000000000000000000010001000000000000000000000000010000010201006e3168",
    ),
    (FrameKind.REFUSAL, b"why", "0300000003776879"),
    (
        FrameKind.VOTE,
        codec.encode(VoteRequest(Term(3), AT, True, True, AT, (CommittedEntry(LogIndex(7), 5),), 9)),
        "040000001d0803120408021007180120012a04080210073207080715050000003809",
    ),
    (
        FrameKind.VOTE_ANSWER,
        codec.encode(
            VoteResponse(
                Term(3),
                granted=True,
                pre_vote=True,
                result=VoteResult.REJECT_ALREADY_VOTED,
                standing=Standing.FOUNDER,
                boot_id=4,
                used=True,
                remembered=AT,
                leads=True,
                begin=Boundary(LogIndex(1), Term(1), Position(64), 5),
                committed=(CommittedEntry(LogIndex(7), 5),),
                other_history=True,
                uid=10,
                removed_at=LogIndex(11),
            )
        ),
        (
            "050000003b08031001180120022801300438014204080210074801520d0a0408011001150500000018405a07080715050000006001690a00000000000000700b"
        ),
    ),
    (
        FrameKind.HEARTBEAT,
        codec.encode(
            HeartbeatRequest(Term(3), 6, "h:1", "n1", Readmission(4, LogIndex(7)), True, ((NodeId("n1"), AT),), 8, 9)
        ),
        "0600000023080310061a03683a3122026e31280430073801420a0a026e3112040802100748085009",
    ),
    (
        FrameKind.HEARTBEAT_ANSWER,
        codec.encode(HeartbeatResponse(Term(3), 6, True, "h:2", Standing.DOUBTFUL, 4, 10, LogIndex(11))),
        "070000001a0803100618012203683a3228023004390a00000000000000400b",
    ),
    (
        FrameKind.HEARTBEATS,
        codec.encode_heartbeats([codec.GroupHeartbeat("g", NodeId("n0"), 5, 6)]),
        "140000000d0a0b0a016712026e3018052006",
    ),
    (
        FrameKind.HEARTBEATS_ANSWER,
        codec.encode_heartbeats_answer([None, HeartbeatResponse(Term(3), 6)]),
        "150000000a0a000a060a0408031006",
    ),
    (FrameKind.TAKE_LEADERSHIP, codec.encode(TakeLeadership(Term(3))), "08000000020803"),
    (FrameKind.TAKE_LEADERSHIP_ANSWER, b"", "0900000000"),
    (
        FrameKind.PUSH,
        codec.encode(PushCompare(Term(3), 1, AT, 5, True)),
        "0a000000260000000000000000030000000000000001000000000000000200000000000000070000000501",
    ),
    (
        FrameKind.PUSH,
        codec.encode(PushTruncate(Term(3), 1, AT, 5)),
        "0a0000002501000000000000000300000000000000010000000000000002000000000000000700000005",
    ),
    (
        FrameKind.PUSH,
        codec.encode(PushAppend(Term(3), 1, LogIndex(6), RUN)),
        "0a00000048020000000000000003000000000000000100000000000000020000000000000007a1b2c3d4000000000000000600000000000000080000000000000009000000000000100072756e",
    ),
    (
        FrameKind.PUSH,
        codec.encode(PushCommit(Term(3), 1, LogIndex(6))),
        "0a0000001903000000000000000300000000000000010000000000000006",
    ),
    (
        FrameKind.PUSH,
        codec.encode(PushInstall(Term(3), 1, AT, 5, Position(64), MEMBERS)),
        "0a000000700400000000000000030000000000000001000000000000000200000000000000070000000500000000000000400000000000000008000000000000000289444c50524f440a010300000025000000000000000000000000010001000000000000000000000000010000010201006e3168",
    ),
    (
        FrameKind.PUSH_ANSWER,
        codec.encode(
            PushResponse(
                Term(3),
                1,
                PushKind.APPEND,
                ResponseCode.SUCCESS,
                LogIndex(9),
                LogIndex(8),
                LogIndex(10),
                AT,
                4,
                Standing.DOUBTFUL,
            )
        ),
        "0b00000044020000000000000003000000000000000100c80200000000000000090000000000000008000000000000000a000000000000000200000000000000070000000000000004",
    ),
    (FrameKind.READ_LOG, codec.encode_read_log(4096, 100), "0c000000050880201064"),
    (FrameKind.READ_LOG_ANSWER, codec.encode_log_bytes(b"log"), "0d00000007080112036c6f67"),
    (FrameKind.CHAIN_CRCS, codec.encode_chain_crcs_request([LogIndex(7), LogIndex(4)]), "0e000000040a020704"),
    (FrameKind.CHAIN_CRCS_ANSWER, codec.encode_chain_crcs({LogIndex(7): 5}), "0f000000090a0708071505000000"),
    (
        FrameKind.SNAPSHOT,
        codec.encode_snapshot_request(codec.SnapshotRequest(LogIndex(7), LogIndex(9), LogIndex(4))),
        "1000000006080710091804",
    ),
    (FrameKind.SNAPSHOT_ANSWER, codec.encode_snapshot_description(b"meta"), "11000000060a046d657461"),
    (FrameKind.SNAPSHOT_PIECE, codec.encode_piece_request("state", 4096), "120000000a0a057374617465108020"),
    (FrameKind.SNAPSHOT_PIECE_ANSWER, codec.encode_piece(b"piece"), "13000000070a057069656365"),
]


@pytest.mark.parametrize(("kind", "payload", "expected"), SAID)
def test_a_frame_is_these_bytes(kind: FrameKind, payload: bytes, expected: str) -> None:
    """Of every kind, with every field set."""
    assert frames.pack(kind, payload).hex() == expected


def test_there_is_one_of_each_kind() -> None:
    """A new kind needs its bytes here."""
    assert {kind for kind, _, _ in SAID} == set(FrameKind)
