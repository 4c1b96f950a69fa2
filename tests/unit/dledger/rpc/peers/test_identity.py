"""``PeerIdentity``: what a member notes of its peers' old logs."""

from __future__ import annotations

import pytest

from dledger.config import Member, ServerConfig
from dledger.core.membership import Membership
from dledger.errors import ResponseCode
from dledger.rpc.peers.codec import HandshakeAnswer
from dledger.rpc.peers.frames import Purpose
from dledger.rpc.peers.identity import BaseLogs, PeerAddresses, PeerIdentity
from dledger.types import BaseLog, ClusterMember, Configuration, LogIndex, NodeId, Term

N0, N1 = NodeId("n0"), NodeId("n1")
RECORD = BaseLog(begin=0, end=200, file_bytes=100, digests=(1, 2), kept_from=0)


def identity(own: NodeId, noted: list[tuple[NodeId, str]], record: BaseLog | None = RECORD) -> PeerIdentity:
    """A member of two that notes what it compared."""
    logs = BaseLogs(lambda: record, lambda peer, why: noted.append((peer, why)))
    members = (Member(N0, "h", 1), Member(N1, "h", 2))
    addresses = PeerAddresses.of(ServerConfig(node_id=own, members=members))
    return PeerIdentity("c", "g", own, addresses, 100, 50, logs)


@pytest.mark.parametrize(
    ("code", "noted"),
    [
        (ResponseCode.SUCCESS, [(N1, "")]),
        (ResponseCode.OTHER_HISTORY, [(N1, "why")]),
        (ResponseCode.UNEXPECTED_ARGUMENT, []),
    ],
)
def test_an_answer_tells_whether_the_old_logs_agree(code: ResponseCode, noted: list[tuple[NodeId, str]]) -> None:
    """That they agree now, too: what was said of them before is over. Other refusals say nothing of old logs."""
    found: list[tuple[NodeId, str]] = []
    identity(N0, found).take_answer(N1, HandshakeAnswer(code, "why"))
    assert found == noted


@pytest.mark.parametrize("theirs", [RECORD, None])
def test_both_sides_of_a_handshake_note_the_same(theirs: BaseLog | None) -> None:
    """Whoever asks learns from the answer what the other has found."""
    ours: list[tuple[NodeId, str]] = []
    others: list[tuple[NodeId, str]] = []
    asking, asked = identity(N0, ours), identity(N1, others, theirs)
    asking.take_answer(N1, asked.judge(asking.handshake(N1, "", Purpose.CONTROL), ""))
    ((peer, said),) = ours
    assert (peer, others) == (N1, [(N0, said)])
    assert bool(said) == (theirs is None)


@pytest.mark.parametrize(
    ("asking", "asked", "code"),
    [
        (False, False, ResponseCode.UNEXPECTED_ARGUMENT),
        (True, False, ResponseCode.SUCCESS),
        (False, True, ResponseCode.SUCCESS),
        (True, True, ResponseCode.SUCCESS),
    ],
)
def test_members_are_compared_while_they_are_the_configured_ones_on_both_sides(
    asking: bool, asked: bool, code: ResponseCode
) -> None:
    """M7: whoever is behind must hear the others, and be heard."""
    members = (Member(N0, "h", 1), Member(NodeId("n7"), "h", 7))
    other = PeerAddresses.of(ServerConfig(node_id=N0, members=members))
    caller, host = PeerIdentity("c", "g", N0, other, 100, 50), identity(N1, [], None)
    for one, changed in ((caller, asking), (host, asked)):
        if changed:
            committed = Configuration((ClusterMember(N0, "h", 1), ClusterMember(N1, "h", 2)), LogIndex(4), Term(1))
            one.addresses.adopt(Membership(one.node_id, committed), frozenset())

    answer = host.judge(caller.handshake(N1, "", Purpose.CONTROL), "")

    assert answer.code is code
    assert (answer.configuration is not None) is asked
