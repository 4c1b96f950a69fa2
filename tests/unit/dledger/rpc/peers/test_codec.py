"""The peer codec: everything comes back as it went, and nothing wrong comes through."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
    PushKind,
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
from dledger.records import RecordLayout
from dledger.rpc.fields import NUMBER_LIMIT
from dledger.rpc.peers import codec, frames
from dledger.rpc.peers.frames import encode_configuration_entry
from dledger.types import (
    MEMBERS_MAX,
    NO_ENTRY,
    Boundary,
    CheckedRun,
    ClusterMember,
    Configuration,
    EntryId,
    EntryRun,
    LogIndex,
    MemberRole,
    NodeId,
    Position,
    Standing,
    Term,
)

Decode = Callable[[bytes], Message]

numbers = st.integers(0, NUMBER_LIMIT - 1)
terms = numbers.map(Term)
indexes = st.integers(-1, NUMBER_LIMIT - 1).map(LogIndex)
crcs = st.integers(0, 0xFFFFFFFF)
committed = st.lists(st.builds(CommittedEntry, indexes, crcs), max_size=codec.CHAIN_CRCS_MAX).map(tuple)
names = st.text(min_size=1, max_size=30)
entry_ids = st.builds(EntryId, indexes.map(Term), indexes)
uids = st.integers(0, (1 << 64) - 1)


def configured() -> Configuration:
    """With everything that a member can have."""
    members = (
        ClusterMember(NodeId("n1"), "10.0.0.1", 30911, uid=(1 << 64) - 1),
        ClusterMember(NodeId("n4"), "::1", 30911, MemberRole.LEARNER, 3, promote=True, replaces="n1"),
    )
    return Configuration(members, LogIndex(9), Term(2), 4, (1 << 64) - 1)


def crowd(size: int) -> Configuration:
    """Links are made to all of them."""
    members = tuple(ClusterMember(NodeId(f"n{number}"), "h", 1) for number in range(size))
    return Configuration(members, LogIndex(9), Term(2))


@st.composite
def runs(draw: st.DrawFn) -> EntryRun:
    first = draw(st.integers(0, NUMBER_LIMIT - 2))
    last = draw(st.integers(first, NUMBER_LIMIT - 1))
    previous = EntryId(draw(indexes.map(Term)), LogIndex(first - 1))
    body = draw(st.binary(min_size=1, max_size=300))
    return EntryRun(previous, draw(crcs), LogIndex(first), LogIndex(last), Position(draw(numbers)), body)


messages: list[tuple[Decode, st.SearchStrategy[Message]]] = [
    (
        codec.decode_vote_request,
        st.builds(VoteRequest, terms, entry_ids, st.booleans(), st.booleans(), entry_ids, committed),
    ),
    (
        codec.decode_vote_response,
        st.builds(
            VoteResponse,
            terms,
            st.booleans(),
            st.booleans(),
            st.sampled_from(VoteResult),
            st.sampled_from(Standing),
            numbers,
            st.booleans(),
            entry_ids,
            leads=st.booleans(),
            begin=st.none() | st.builds(Boundary, indexes, indexes.map(Term), numbers.map(Position), crcs),
            committed=committed,
            other_history=st.booleans(),
            uid=uids,
            removed_at=indexes,
        ),
    ),
    (
        codec.decode_heartbeat_request,
        st.builds(
            HeartbeatRequest,
            terms,
            numbers,
            names,
            names,
            st.none() | st.builds(Readmission, st.integers(1, NUMBER_LIMIT - 1), indexes),
            st.booleans(),
            st.lists(st.tuples(names.map(NodeId), entry_ids), max_size=3).map(tuple),
            numbers,
        ),
    ),
    (
        codec.decode_heartbeat_response,
        st.builds(
            HeartbeatResponse,
            terms,
            numbers,
            st.booleans(),
            names,
            st.sampled_from(Standing),
            numbers,
            uids,
            indexes,
        ),
    ),
    (codec.decode_take_leadership, st.builds(TakeLeadership, terms)),
    (
        frames.decode_push,
        st.builds(PushCompare, terms, numbers, entry_ids, crcs, st.booleans(), st.none() | st.builds(configured)),
    ),
    (frames.decode_push, st.builds(PushTruncate, terms, numbers, entry_ids, crcs)),
    (frames.decode_push, st.builds(PushAppend, terms, numbers, indexes, runs())),
    (frames.decode_push, st.builds(PushCommit, terms, numbers, indexes)),
    (
        frames.decode_push,
        st.builds(
            PushInstall, terms, numbers, entry_ids, crcs, numbers.map(Position), st.none() | st.builds(configured)
        ),
    ),
    (
        frames.decode_answer,
        st.builds(
            PushResponse,
            terms,
            numbers,
            st.sampled_from(PushKind),
            st.sampled_from(ResponseCode),
            indexes,
            indexes,
            indexes,
            entry_ids,
            numbers,
            st.sampled_from(Standing),
        ),
    ),
]
DECODERS = sorted({decode for decode, _ in messages}, key=lambda decode: decode.__name__)


@given(st.data())
def test_codec_round_trip(data: st.DataObject) -> None:
    """Every message of the wire comes back equal."""
    decode, strategy = data.draw(st.sampled_from(messages))
    message = data.draw(strategy)

    assert decode(codec.encode(message)) == message


@given(st.sampled_from(DECODERS), st.binary(max_size=200))
def test_codec_survives_garbage(decode: Decode, data: bytes) -> None:
    """Arbitrary bytes are a message or an ``InvalidRequestError``, nothing else."""
    try:
        decode(data)
    except InvalidRequestError:
        return


@given(st.data(), st.sampled_from(DECODERS))
def test_codec_survives_damaged_messages(data: st.DataObject, decode: Decode) -> None:
    """A flipped byte gives another valid message or an ``InvalidRequestError``."""
    strategy = data.draw(st.sampled_from([strategy for one, strategy in messages if one is decode]))
    damaged = bytearray(codec.encode(data.draw(strategy)) or b"\0")
    damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        decode(bytes(damaged))
    except InvalidRequestError:
        return


HEADER = pb.Header(cluster_id="c", group="g", sender="a", target="b")
HUGE = 1 << 62
ID = pb.EntryId(term=1, index=1)


@pytest.mark.parametrize(
    ("decode", "message", "reason"),
    [
        (codec.decode_vote_request, pb.VoteRequest(term=1), "last is missing"),
        (codec.decode_vote_request, pb.VoteRequest(term=-1, last=ID), "term=-1"),
        (codec.decode_vote_request, pb.VoteRequest(term=HUGE, last=ID), "is not a valid term"),
        (codec.decode_vote_request, pb.VoteRequest(term=1, last=pb.EntryId(term=-2)), "last.term=-2"),
        (codec.decode_vote_request, pb.VoteRequest(term=1, last=pb.EntryId(index=HUGE)), "last.index"),
        (codec.decode_vote_response, pb.VoteResponse(result=99), "vote result 99"),
        (
            codec.decode_vote_response,
            pb.VoteResponse(committed=[pb.ChainCrc()] * (codec.CHAIN_CRCS_MAX + 1)),
            "lists 65 entries",
        ),
        (codec.decode_heartbeat_request, pb.HeartbeatRequest(read_sequence=-1), "read_sequence=-1"),
        (codec.decode_heartbeats, pb.Heartbeats(heartbeats=[pb.GroupHeartbeat(repeats=-1)]), "repeats=-1"),
        (codec.decode_heartbeats, pb.Heartbeats(heartbeats=[pb.GroupHeartbeat(read_sequence=HUGE)]), "read_sequence="),
        (codec.decode_heartbeats, pb.Heartbeats(heartbeats=[pb.GroupHeartbeat(group="x" * 2000)]), "group has 2000"),
        (codec.decode_heartbeats, pb.Heartbeats(heartbeats=[pb.GroupHeartbeat(sender="x" * 2000)]), "sender has 2000"),
        (
            codec.decode_heartbeats,
            pb.Heartbeats(heartbeats=[pb.GroupHeartbeat()] * (codec.HEARTBEATS_GROUPS_MAX + 1)),
            "heartbeats of 257 groups at once; at most 256",
        ),
        (
            codec.decode_heartbeats_answer,
            pb.HeartbeatsAnswer(answers=[pb.GroupHeartbeatAnswer(answer=pb.HeartbeatResponse(term=-1))]),
            "term=-1",
        ),
        (
            codec.decode_heartbeat_request,
            pb.HeartbeatRequest(client_address="x" * 2000),
            "client_address has 2000 characters",
        ),
    ],
)
def test_codec_refuses_what_no_peer_sends(decode: Decode, message: pb.VoteRequest, reason: str) -> None:
    """Numbers out of range, missing parts and overlong names are refused with their name."""
    with pytest.raises(InvalidRequestError, match=reason):
        decode(message.SerializeToString())


def test_codec_knows_no_internal_messages() -> None:
    """``LoadRun`` and ``CheckedAppend`` never leave the process."""
    run = EntryRun(NO_ENTRY, 0, LogIndex(0), LogIndex(0), Position(0), b"x")
    internal: list[Message] = [
        LoadRun(Term(1), 0, LogIndex(0), LogIndex(0), LogIndex(0)),
        CheckedAppend(Term(1), 0, LogIndex(0), CheckedRun(run, NO_ENTRY, 0, b"")),
    ]

    for message in internal:
        with pytest.raises(InvariantError, match="never goes on the wire"):
            codec.encode(message)


ANSWER = PushResponse(
    Term(1),
    2,
    PushKind.APPEND,
    ResponseCode.SUCCESS,
    LogIndex(3),
    LogIndex(4),
    LogIndex(5),
    EntryId(Term(6), LogIndex(7)),
    8,
    Standing.FOUNDER,
)
APPEND = PushAppend(
    Term(1), 2, LogIndex(3), EntryRun(EntryId(Term(1), LogIndex(6)), 5, LogIndex(7), LogIndex(8), Position(9), b"run")
)


def test_an_answer_to_a_push_is_read_as_it_was_written() -> None:
    """Each of its numbers is another one's neighbour, and of the same size."""
    assert frames.decode_answer(codec.encode(ANSWER)) == ANSWER


def changed(message: PushAppend | PushResponse, layout: RecordLayout, name: str, number: int) -> bytes:
    """An encoded message with another number in one of its fields."""
    data = bytearray(codec.encode(message))
    data[layout.at(name) : layout.behind(name)] = layout.part(name).pack(number)
    return bytes(data)


@pytest.mark.parametrize(
    ("name", "number", "reason"),
    [
        ("term", -1, "out of range: .* term=-1"),
        ("epoch", HUGE, "epoch="),
        ("commit_index", -2, "commit_index=-2"),
        ("previous_term", -2, "previous_term=-2"),
        ("position", -1, "position=-1"),
        ("first_index", 8, "not contiguous"),
        ("last_index", 6, "not contiguous"),
        ("kind", 9, "no known kind"),
    ],
)
def test_a_push_that_no_peer_sends_is_refused(name: str, number: int, reason: str) -> None:
    """Numbers out of range, with their names, and runs that are none."""
    with pytest.raises(InvalidRequestError, match=reason):
        frames.decode_push(changed(APPEND, frames.LAYOUTS[PushKind.APPEND], name, number))


@pytest.mark.parametrize(
    ("name", "number", "reason"),
    [
        ("flushed_index", HUGE, "flushed_index"),
        ("conflict_index", -2, "conflict_index=-2"),
        ("boot_id", -1, "boot_id=-1"),
        ("kind", 9, "push kind 9"),
        ("standing", 9, "standing 9"),
    ],
)
def test_an_answer_that_no_peer_sends_is_refused(name: str, number: int, reason: str) -> None:
    """Whoever may count must be known."""
    with pytest.raises(InvalidRequestError, match=reason):
        frames.decode_answer(changed(ANSWER, frames.ANSWER_LAYOUT, name, number))


@pytest.mark.parametrize(
    ("decode", "message"),
    [(frames.decode_push, PushCommit(Term(1), 2, LogIndex(3))), (frames.decode_answer, ANSWER)],
)
def test_pushes_and_answers_have_their_length(decode: Decode, message: Message) -> None:
    """One byte more or less is damage; only an append goes on, with log bytes."""
    for data in (b"", codec.encode(message)[:-1], codec.encode(message) + b"x"):
        with pytest.raises(InvalidRequestError, match="bytes"):
            decode(data)


def test_an_append_without_log_bytes_is_refused() -> None:
    """It stores nothing."""
    with pytest.raises(InvalidRequestError, match="carries no data"):
        frames.decode_push(codec.encode(APPEND)[:-3])


def test_unknown_response_code_reads_as_unknown() -> None:
    """A newer peer's code is no reason to hang up."""
    message = frames.decode_answer(changed(ANSWER, frames.ANSWER_LAYOUT, "code", 999))

    assert isinstance(message, PushResponse)
    assert message.code is ResponseCode.UNKNOWN


@given(
    st.builds(
        codec.Handshake,
        st.builds(codec.EnvelopeHeader, names, names, names.map(NodeId), names.map(NodeId)),
        st.integers(0, 1000),
        st.integers(0, 9),
        st.lists(names, max_size=5).map(tuple),
        numbers,
        numbers,
        names,
    )
)
def test_handshake_round_trip(handshake: codec.Handshake) -> None:
    """As for the messages."""
    assert codec.decode_handshake(codec.encode_handshake(handshake)) == handshake


def test_a_handshake_says_whose_it_is() -> None:
    """The messages behind it do not."""
    nobodys = pb.HandshakeRequest(header=pb.Header(cluster_id="c", group="g", target="b"))

    with pytest.raises(InvalidRequestError, match="sender and target"):
        codec.decode_handshake(nobodys.SerializeToString())


def test_handshake_limits_its_members() -> None:
    """A forged list is not walked through."""
    forged = pb.HandshakeRequest(header=HEADER, members=["x"] * (codec.MEMBERS_MAX + 1))

    with pytest.raises(InvalidRequestError, match="1025 members"):
        codec.decode_handshake(forged.SerializeToString())


def test_an_unknown_standing_is_refused() -> None:
    """Of a later version, or damage: whoever may count must be known."""
    with pytest.raises(InvalidRequestError, match="standing 9"):
        codec.decode_heartbeat_response(pb.HeartbeatResponse(standing=9).SerializeToString())


def test_a_configuration_comes_back_from_an_answer_to_a_handshake() -> None:
    """And none, as none."""
    for known in (configured(), None):
        answer = codec.HandshakeAnswer(ResponseCode.SUCCESS, client_address="h:2", configuration=known)
        assert codec.decode_handshake_answer(codec.encode_handshake_answer(answer)) == answer


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (bytes(16), "a configuration of 16 bytes"),
        (bytes(5000), "a configuration of 5000 bytes"),
        (bytes(17), "malformed configuration of 1 bytes"),
        (encode_configuration_entry(configured()) + b"x", "malformed configuration"),
        (b"\xff" * 8 + encode_configuration_entry(configured())[8:], "at entry -1 of term 2 is impossible"),
        (encode_configuration_entry(configured())[:-1], "damaged"),
        (encode_configuration_entry(crowd(MEMBERS_MAX + 1)), "14 members"),
    ],
)
def test_a_configuration_that_no_peer_sends_is_refused(data: bytes, reason: str) -> None:
    """In both places."""
    with pytest.raises(InvalidRequestError, match=reason):
        codec.decode_handshake_answer(pb.HandshakeResponse(code=200, configuration=data).SerializeToString())
    with pytest.raises(InvalidRequestError, match=reason):
        frames.decode_push(codec.encode(PushInstall(Term(3), 1, NO_ENTRY, 5, Position(64))) + data)
