"""``rpc.clients.member_codec``: requests that change the members, and their answers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dledger.errors import InvalidRequestError, WouldLoseQuorumError
from dledger.pb import client_pb2 as pb
from dledger.rpc.clients import group_codec
from dledger.types import (
    NO_INDEX,
    NO_TERM,
    ChangeKind,
    ClusterMember,
    Configuration,
    LogIndex,
    MemberChange,
    MemberRole,
    NodeId,
    Term,
)

N4 = NodeId("n4")
CHANGES = [
    MemberChange(ChangeKind.ADD, N4, 1, "10.0.0.4", 30911),
    MemberChange(ChangeKind.ADD, N4, 1, "::1", 30911, promote=False, expected_index=NO_INDEX),
    MemberChange(ChangeKind.ADD, N4, 1, "h", 1, replaces="n3", expected_index=LogIndex(0)),
    MemberChange(ChangeKind.PROMOTE, N4, (1 << 63) - 1),
    MemberChange(ChangeKind.DEMOTE, N4, 2, expected_index=LogIndex(1 << 40)),
    MemberChange(ChangeKind.REMOVE, N4, 3),
    MemberChange(ChangeKind.UPDATE, N4, 4, "h", 65535),
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda one: one.kind.value)
def test_a_request_arrives_as_it_was_sent(change: MemberChange) -> None:
    """Every kind; to expect the configured members (-1) is not to expect nothing."""
    assert group_codec.decode_change(group_codec.encode_change("g", change)) == ("g", change)


@pytest.mark.parametrize("kind", ChangeKind)
def test_every_kind_is_tried(kind: ChangeKind) -> None:
    """So that a new one gets its line above."""
    assert kind in [one.kind for one in CHANGES]


@pytest.mark.parametrize(
    "wire",
    [
        pb.ChangeMembersRequest(change_id=1),
        pb.ChangeMembersRequest(remove="n4"),
        pb.ChangeMembersRequest(remove="n4", change_id=1 << 63),
        pb.ChangeMembersRequest(remove="", change_id=1),
        pb.ChangeMembersRequest(remove="n-4", change_id=1),
        pb.ChangeMembersRequest(remove="n;4", change_id=1),
        pb.ChangeMembersRequest(remove="n/4", change_id=1),
        pb.ChangeMembersRequest(remove="n\n4", change_id=1),
        pb.ChangeMembersRequest(remove="n" * 1025, change_id=1),
        pb.ChangeMembersRequest(remove="n4", change_id=1, expected_index=-2),
        pb.ChangeMembersRequest(add=pb.AddMember(id="n4", host="h"), change_id=1),
        pb.ChangeMembersRequest(add=pb.AddMember(id="n4", host="", port=1), change_id=1),
        pb.ChangeMembersRequest(add=pb.AddMember(id="n4", host=" h", port=1), change_id=1),
        pb.ChangeMembersRequest(add=pb.AddMember(id="n4", host="h", port=65536), change_id=1),
        pb.ChangeMembersRequest(update=pb.UpdateMember(id="n4", host="h"), change_id=1),
    ],
)
def test_a_malformed_request_is_refused(wire: pb.ChangeMembersRequest) -> None:
    """Before the core sees it; an id that no setting could name would make a member that nobody can configure."""
    with pytest.raises(InvalidRequestError):
        group_codec.decode_change(wire.SerializeToString())


def test_a_configuration_arrives_as_it_was_sent() -> None:
    """All that is known of each member; ``next_number`` concerns the leader alone."""
    members = (
        ClusterMember(NodeId("n1"), "10.0.0.1", 1),
        ClusterMember(N4, "::1", 2, MemberRole.LEARNER, 4, (1 << 64) - 1, promote=True, replaces="n1"),
    )
    for sent in (Configuration(members, LogIndex(7), Term(3), 5, 9), Configuration(members, NO_INDEX, NO_TERM, 5)):
        assert group_codec.decode_changed(group_codec.encode_changed(sent)) == replace(sent, next_number=0)


def test_a_refusal_arrives_as_itself() -> None:
    """With what would be left."""
    with pytest.raises(WouldLoseQuorumError, match="n1 alone"):
        group_codec.decode_changed(group_codec.encode_changed(WouldLoseQuorumError("n1 alone")))


def test_a_member_without_an_address_is_no_member() -> None:
    """An answer that names one is malformed."""
    wire = pb.ChangeMembersResponse(members=[pb.MemberInfo(id="n1", member_role="voter")])
    wire.status.code = 200
    with pytest.raises(InvalidRequestError):
        group_codec.decode_changed(wire.SerializeToString())
