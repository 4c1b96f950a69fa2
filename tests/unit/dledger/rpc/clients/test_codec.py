"""The client codec: what a node says is what the client reads, errors included."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dledger import errors
from dledger.errors import DLedgerError, InvalidRequestError, LeaderHint, ResponseCode
from dledger.pb import client_pb2 as pb
from dledger.rpc.clients import codec, group_codec
from dledger.rpc.clients.codec import ReadMode
from dledger.rpc.ports import MemberStatus, NodeStatus, PeerStatus, RoleEvent
from dledger.types import AppendedBatch, Entry, LogIndex, Magic, MemberRole, NodeId, Position, Role, Term
from tests.support import grpc_log

numbers = st.integers(0, 2**62 - 1)
hints = st.none() | st.builds(LeaderHint, st.text(min_size=1).map(NodeId), st.text())

ERRORS: list[DLedgerError] = [
    errors.NotLeaderError("n1 leads", leader=LeaderHint(NodeId("n1"), "h:1")),
    errors.LeaderNotReadyError("x"),
    errors.LeaderTransferringError("x"),
    errors.PendingFullError("x"),
    errors.QuorumAckTimeoutError("x"),
    errors.TermChangedError("x"),
    errors.DiskFullError("x"),
    errors.DiskError("x"),
    errors.IdentityError("x"),
    errors.UnknownMemberError("x"),
    errors.InvalidRequestError("x"),
    errors.EntryTooLargeError("x"),
    errors.EmptyBatchError("x"),
    errors.EarlierRequestFailedError("x"),
    errors.IndexOutOfRangeError("x"),
    errors.IndexBeforeBeginError("x"),
    errors.TransferFailedError("x"),
    errors.FallBehindError("x"),
    errors.ChangeInProgressError("x"),
    errors.NotReadyToPromoteError("x"),
    errors.WouldLoseQuorumError("x"),
    errors.MemberExistsError("x"),
    errors.MemberUnknownError("x"),
    errors.StaleConfigurationError("x"),
    errors.TooManyMembersError("x"),
    errors.MemberRemovedError("x"),
    errors.ShutdownError("x"),
    errors.InvariantError("x"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_arrives_as_itself(error: DLedgerError) -> None:
    """Class, message, outcome and leader survive the way; the response code alone could not tell them apart."""
    _, arrived = grpc_log.decode_appended(codec.encode_appended(7, error))

    assert isinstance(arrived, DLedgerError)
    assert type(arrived) is type(error)
    assert (str(arrived), arrived.outcome, arrived.leader) == (str(error), error.outcome, error.leader)


def test_the_node_decides_the_outcome() -> None:
    """The same error may come before or after something was written."""
    error = errors.ShutdownError("stopping")
    error.outcome = "not_applied"

    _, arrived = grpc_log.decode_appended(codec.encode_appended(7, error))

    assert isinstance(arrived, errors.ShutdownError)
    assert arrived.outcome == "not_applied"


def test_damage_arrives_with_its_place() -> None:
    """``CorruptLogError`` names the file of the node and the offset in it: that is what a person repairs."""
    error = errors.CorruptLogError(Path("/log"), 8, "bodyCrc differs", "restore it")

    with pytest.raises(errors.CorruptLogError, match="damaged at offset 8") as caught:
        grpc_log.decode_read_answer(codec.encode_read_answer(error))

    arrived = caught.value
    assert (arrived.path, arrived.offset, arrived.reason, arrived.advice) == (
        Path("/log"),
        8,
        "bodyCrc differs",
        "restore it",
    )
    assert arrived.outcome == "unknown"


def test_an_error_with_its_own_constructor_arrives_as_what_its_code_says() -> None:
    """``ConfigError`` lists problems; what arrives says them as one sentence."""
    with pytest.raises(errors.InvalidRequestError, match="a; b"):
        grpc_log.decode_read_answer(codec.encode_read_answer(errors.ConfigError(["a", "b"])))


@pytest.mark.parametrize("code", [ResponseCode.INSTALL_SNAPSHOT_ERROR, 9999])
def test_an_unknown_code_is_the_base_error(code: int) -> None:
    """A newer node's error still says what it says."""
    data = pb.AppendResponse(status=pb.Status(code=code)).SerializeToString()

    _, arrived = grpc_log.decode_appended(data)

    assert type(arrived) is DLedgerError
    assert f"answered {int(code)}" in str(arrived)


@given(st.text(), st.lists(st.binary()).map(tuple), st.integers(0, 2**63 - 1), st.booleans())
def test_append_round_trip(group: str, bodies: tuple[bytes, ...], request_id: int, ordered: bool) -> None:
    """Requests arrive as they were sent."""
    request = codec.Append(group, bodies, request_id, ordered)

    assert codec.decode_append(grpc_log.encode_append(request)) == request


@given(st.integers(0, 2**63 - 1), numbers, numbers, st.lists(numbers, min_size=1, max_size=9))
def test_appended_round_trip(request_id: int, term: int, first: int, positions: list[int]) -> None:
    """As do positive answers."""
    batch = AppendedBatch(Term(term), LogIndex(first), LogIndex(first + len(positions) - 1), tuple(positions))

    assert grpc_log.decode_appended(codec.encode_appended(request_id, batch)) == (request_id, batch)


@given(st.text(max_size=99), numbers, numbers, numbers, st.sampled_from(ReadMode))
def test_read_round_trip(group: str, first: int, count: int, max_bytes: int, mode: ReadMode) -> None:
    """Reads and follows."""
    request = codec.Read(group, LogIndex(first), count, max_bytes, mode)

    assert codec.decode_read(grpc_log.encode_read(request)) == request
    assert codec.decode_follow(grpc_log.encode_follow(codec.Read(group, LogIndex(first), mode=mode))).mode is mode


@given(st.builds(RoleEvent, st.text().map(NodeId), st.sampled_from(Role), numbers.map(Term), hints))
def test_role_event_round_trip(event: RoleEvent) -> None:
    """An unknown leader stays None."""
    assert codec.decode_role_event(codec.encode_role_event(event)) == event


def test_read_answer_round_trip() -> None:
    """Every field of an entry arrives."""
    entry = Entry(LogIndex(3), Term(2), Position(99), b"body", Magic.NOOP, body_crc=0xFFFFFFFF, chain_crc=1)
    answer = codec.ReadAnswer([entry], LogIndex(3), LogIndex(0), LogIndex(4))

    assert grpc_log.decode_read_answer(codec.encode_read_answer(answer)) == answer


_LEARNER = MemberStatus(
    NodeId("n1"), "h:3", role=MemberRole.LEARNER, number=3, uid=(1 << 64) - 1, promote=True, replaces="n2"
)


@pytest.mark.parametrize("age_ms", [-1, 0, 7])
def test_metadata_round_trip(age_ms: int) -> None:
    """Every field of a status arrives; how old its role is, only if it is known."""
    status = NodeStatus(
        cluster_id="c",
        group="g",
        node_id=NodeId("n0"),
        role=Role.LEADER,
        term=Term(4),
        leader=LeaderHint(NodeId("n0"), "h:1"),
        members=(MemberStatus(NodeId("n0"), "h:2", "h:1"), _LEARNER),
        begin_index=LogIndex(1),
        end_index=LogIndex(-1),
        committed_index=LogIndex(3),
        flushed_index=LogIndex(4),
        begin_position=Position(5),
        end_position=Position(6),
        flush_mode="sync",
        disk_full=True,
        voter=True,
        pending_entries=7,
        peers=(PeerStatus(NodeId("n1"), LogIndex(1), LogIndex(2), "APPEND", 3, 4, -1, "in sync", 5, 6, "why"),),
        version="9",
        role_age_ms=age_ms,
        grpc_port=30913,
        configuration_index=LogIndex(-1),
        configuration_term=Term(8),
        configuration_committed=False,
        change_id=(1 << 63) - 1,
    )

    assert codec.decode_metadata(codec.encode_metadata(status)) == status


def test_transfer_round_trip() -> None:
    """With and without a target."""
    assert codec.decode_transfer(codec.encode_transfer("g", NodeId("n1"))) == ("g", NodeId("n1"))
    assert codec.decode_transfer(codec.encode_transfer("g", None)) == ("g", None)
    leader = LeaderHint(NodeId("n1"), "h:1")
    assert codec.decode_transferred(codec.encode_transferred(leader, Term(2))) == leader


@given(
    st.sampled_from(
        [
            codec.decode_append,
            codec.decode_read,
            codec.decode_follow,
            codec.decode_metadata_request,
            codec.decode_watch_role,
            codec.decode_transfer,
            group_codec.decode_change,
        ]
    ),
    st.binary(max_size=100),
)
def test_requests_survive_garbage(decode: Callable[[bytes], object], data: bytes) -> None:
    """Arbitrary bytes are a request or an ``InvalidRequestError``."""
    try:
        decode(data)
    except InvalidRequestError:
        return


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (pb.ReadRequest(count=-1), "count=-1"),
        (pb.ReadRequest(max_bytes=-1), "max_bytes=-1"),
        (pb.ReadRequest(first_index=-2), "first_index=-2 is not a valid index"),
        (pb.ReadRequest(mode=9), "read mode 9"),  # type: ignore[arg-type]  # that is the point
    ],
)
def test_a_read_that_cannot_be_meant_is_refused(message: pb.ReadRequest, reason: str) -> None:
    """Named, not guessed."""
    with pytest.raises(InvalidRequestError, match=reason):
        codec.decode_read(message.SerializeToString())


def test_answers_with_unknown_words_are_refused() -> None:
    """A role that this version does not know is an error of the answer, not of the program."""
    with pytest.raises(InvalidRequestError, match="role 'KING'"):
        codec.decode_role_event(pb.RoleChange(role="KING").SerializeToString())
