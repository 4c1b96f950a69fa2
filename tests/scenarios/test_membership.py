"""Members come and go: what a group does when it is asked to change."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dledger.core.member_changes import WAITING_MAX
from dledger.core.membership import decode_configuration
from dledger.core.messages import PushAppend, RoleReason
from dledger.errors import (
    ChangeInProgressError,
    DLedgerError,
    InvalidRequestError,
    LeaderNotReadyError,
    LeaderTransferringError,
    MemberExistsError,
    MemberUnknownError,
    NotLeaderError,
    NotReadyToPromoteError,
    StaleConfigurationError,
    TermChangedError,
    TooManyMembersError,
    UnknownMemberError,
    WouldLoseQuorumError,
)
from dledger.types import ChangeKind, Configuration, LogIndex, MemberChange, MemberRole, NodeId, Role, Standing
from tests.support.cluster import N0, N1, N2, N3, N4, Cluster, Outcome

N5 = NodeId("n5")


def _settled(cluster: Cluster, *voters: NodeId) -> bool:
    """Whether these are the voters by the committed configuration of each of them, and they hold the same."""
    states = [cluster[one].node.state for one in voters]
    return all(
        state.membership.is_committed
        and state.membership.current.voters == voters
        and state.log.last == states[0].log.last
        and state.commit_index == state.log.last.index
        for state in states
    )


def _group(size: int, *newcomers: NodeId) -> Cluster:
    """A group that n0 leads, and members that wait to be added."""
    cluster = Cluster(size)
    cluster.elect()
    for one in newcomers:
        cluster.join(one)
    cluster.advance(1000)
    return cluster


def test_a_group_grows_from_one_to_three_and_shrinks_again() -> None:
    """M13, M16: the leader is removed last but one, and every append is kept."""
    cluster = _group(1)
    for newcomer, voters in ((N1, (N0, N1)), (N2, (N0, N1, N2))):
        cluster.join(newcomer)
        added = cluster.change(N0, ChangeKind.ADD, newcomer)
        cluster.advance_until(lambda voters=voters: _settled(cluster, *voters))  # type: ignore[misc]  # bound now
        assert added.value.learners == (newcomer,)
        assert cluster.append(N0, b"with %s" % newcomer.encode()).value

    refused = cluster.change(N0, ChangeKind.REMOVE, N0)
    cluster.advance(1000)
    assert isinstance(refused.error, NotLeaderError)
    leader = cluster.leader()
    assert leader in (N1, N2)
    assert refused.error.leader is not None
    assert refused.error.leader.node_id == leader
    cluster.change(leader, ChangeKind.REMOVE, N0)
    cluster.advance_until(lambda: _settled(cluster, N1, N2))
    cluster.change(leader, ChangeKind.REMOVE, N1 if leader == N2 else N2)
    cluster.advance_until(lambda: _settled(cluster, leader))

    cluster.advance(5000)
    assert cluster.leader() == leader
    assert cluster.append(leader, b"alone").value
    assert cluster.bodies(leader) == [b"with n1", b"with n2", b"alone"]


def test_numbers_and_uids_stay_with_their_members() -> None:
    """M11: a number is given once and never again; a uid is that of the process that was promoted."""
    cluster = _group(3, N3)
    cluster.change(N0, ChangeKind.ADD, N3)
    cluster.advance_until(lambda: _settled(cluster, N0, N1, N2, N3))
    cluster.change(N0, ChangeKind.REMOVE, N2)
    cluster.advance_until(lambda: _settled(cluster, N0, N1, N3))
    cluster.join(N4)
    cluster.change(N0, ChangeKind.ADD, N4)
    cluster.advance_until(lambda: _settled(cluster, N0, N1, N3, N4))

    members = cluster[N0].membership.current.members

    assert [(one.node_id, one.number, one.uid) for one in members] == [
        (N0, 0, 900),
        (N1, 1, 901),
        (N3, 3, 903),
        (N4, 4, 904),
    ]
    assert cluster[N0].membership.current.next_number == 5


# -- requests that are refused ------------------------------------------------------------------------------------


def _refusal(cluster: Cluster, kind: ChangeKind, member: NodeId, **more: object) -> DLedgerError:
    before = cluster[N0].log.last
    error = cluster.change(N0, kind, member, **more).error
    assert cluster[N0].log.last == before
    return error


@pytest.mark.parametrize(
    ("kind", "member", "more", "error"),
    [
        (ChangeKind.ADD, N1, {}, MemberExistsError),
        (ChangeKind.ADD, N3, {"port": 20912}, MemberExistsError),
        (ChangeKind.ADD, N3, {"port": 0}, InvalidRequestError),
        (ChangeKind.ADD, N3, {"replaces": "n7"}, MemberUnknownError),
        (ChangeKind.PROMOTE, N3, {}, MemberUnknownError),
        (ChangeKind.PROMOTE, N1, {}, MemberExistsError),
        (ChangeKind.DEMOTE, N3, {}, MemberUnknownError),
        (ChangeKind.REMOVE, N3, {}, MemberUnknownError),
        (ChangeKind.UPDATE, N1, {"port": 20913}, MemberExistsError),
        (ChangeKind.REMOVE, N1, {"expected_index": LogIndex(5)}, StaleConfigurationError),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(
    kind: ChangeKind, member: NodeId, more: dict[str, object], error: type[DLedgerError]
) -> None:
    """Each for a reason of its own, and nothing is written."""
    cluster = _group(3)
    assert isinstance(_refusal(cluster, kind, member, **more), error)


def test_an_id_that_could_not_be_configured_is_refused() -> None:
    """``dLegerPeers`` ends ids at the first minus."""
    cluster = _group(3)
    outcome: Outcome[Configuration] = Outcome()
    change = MemberChange(ChangeKind.ADD, NodeId("n3-x"), 1, "127.0.0.1", 20914)
    cluster[N0].node.changes.submit(change, cluster.now_ms, outcome)
    cluster.act(N0)

    assert isinstance(outcome.error, InvalidRequestError)


def test_only_a_leader_changes_the_members() -> None:
    """A follower names it."""
    error = _group(3).change(N1, ChangeKind.REMOVE, N2).error

    assert isinstance(error, NotLeaderError)
    assert error.leader is not None
    assert error.leader.node_id == N0


def test_one_change_waits_for_the_one_before() -> None:
    """M1 b: two uncommitted configurations could have majorities without a common member."""
    cluster = _group(3)
    cluster.drop(PushAppend)
    first = cluster.change(N0, ChangeKind.ADD, N3)

    second = cluster.change(N0, ChangeKind.REMOVE, N2)

    assert first.pending
    assert isinstance(second.error, ChangeInProgressError)
    assert "n1, n2" in str(second.error)


def test_a_change_waits_for_an_entry_of_the_leaders_own_term() -> None:
    """M1 a: before that, a configuration of another leader may be committed without this one knowing."""
    cluster = _group(3)
    cluster.drop(PushAppend)
    cluster.crash(N0)
    cluster.advance_until(lambda: cluster.leader() is not None)
    leader = cluster.leader()
    assert leader is not None

    assert isinstance(cluster.change(leader, ChangeKind.REMOVE, N0).error, LeaderNotReadyError)


def test_no_change_during_a_transfer_and_no_transfer_during_a_change() -> None:
    """M1 c: the next leader would not know whether the change is committed."""
    cluster = _group(3)
    cluster.drop(PushAppend)
    cluster.append(N0, b"not yet acknowledged")
    cluster.transfer(N0, N1)
    assert isinstance(cluster.change(N0, ChangeKind.REMOVE, N2).error, LeaderTransferringError)

    cluster = _group(3)
    cluster.drop(PushAppend)
    cluster.change(N0, ChangeKind.REMOVE, N2)
    assert isinstance(cluster.transfer(N0, N1).error, ChangeInProgressError)


def test_members_of_a_group_that_has_never_been_complete_cannot_change() -> None:
    """M1 d: while the leader is a founder, a lost disk may be taken for a beginning."""
    cluster = _group(3)
    leader = cluster[N0].node.state
    leader.hard_state = replace(leader.hard_state, standing=Standing.FOUNDER)

    assert isinstance(cluster.change(N0, ChangeKind.REMOVE, N2).error, LeaderNotReadyError)


def test_a_change_that_would_leave_too_few_live_voters_is_refused() -> None:
    """M5: a dead member of three may leave, but not the live one; the last voter may not."""
    cluster = _group(3)
    cluster.crash(N2)
    cluster.advance(1200)
    error = _refusal(cluster, ChangeKind.REMOVE, N1)
    assert isinstance(error, WouldLoseQuorumError)
    assert "n0, n2, of whom n0" in str(error)

    assert cluster.change(N0, ChangeKind.REMOVE, N2).value.voters == (N0, N1)

    alone = _group(1)
    assert isinstance(alone.change(N0, ChangeKind.REMOVE, N0).error, WouldLoseQuorumError)
    assert isinstance(alone.change(N0, ChangeKind.DEMOTE, N0).error, WouldLoseQuorumError)


def test_a_group_has_bounds() -> None:
    """M13: at most four learners at a time, and nine voters."""
    cluster = _group(1)
    for number in range(1, 5):
        assert cluster.change(N0, ChangeKind.ADD, NodeId(f"n{number}")).value
    assert isinstance(_refusal(cluster, ChangeKind.ADD, N5), TooManyMembersError)
    assert isinstance(_refusal(cluster, ChangeKind.DEMOTE, N0), TooManyMembersError)

    large = _group(9)
    assert isinstance(_refusal(large, ChangeKind.ADD, NodeId("n9")), TooManyMembersError)
    assert large.change(N0, ChangeKind.ADD, NodeId("n9"), replaces="n8").value


def test_a_repeated_request_changes_nothing() -> None:
    """The answer may have been lost, and the learner promoted since."""
    cluster = _group(3, N3)
    seen = cluster[N0].membership.current.index
    first = cluster.change(N0, ChangeKind.ADD, N3, change_id=77, expected_index=seen)
    cluster.advance_until(lambda: _settled(cluster, N0, N1, N2, N3))
    before = cluster[N0].log.last

    again = cluster.change(N0, ChangeKind.ADD, N3, change_id=77, expected_index=seen)

    assert first.value.index < again.value.index
    assert again.value.voters == (N0, N1, N2, N3)
    assert cluster[N0].log.last == before


def test_only_so_many_repetitions_wait_for_a_change() -> None:
    """M1: it may be a long time until it is committed, and a client that repeats itself must not fill the memory."""
    cluster = _group(3)
    cluster.isolate(N0)
    waiting = [cluster.change(N0, ChangeKind.REMOVE, N2, change_id=77) for _ in range(WAITING_MAX)]

    refused = cluster.change(N0, ChangeKind.REMOVE, N2, change_id=77)

    assert isinstance(refused.error, ChangeInProgressError)
    assert all(one.pending for one in waiting)


def test_a_change_whose_leader_is_deposed_has_an_unknown_outcome() -> None:
    """It may survive, or not."""
    cluster = _group(3)
    cluster.isolate(N0)
    change = cluster.change(N0, ChangeKind.REMOVE, N2)
    cluster.advance_until(lambda: cluster.role(N0) is Role.FOLLOWER)
    cluster.settle()

    assert isinstance(change.error, TermChangedError)
    assert change.error.outcome == "unknown"


# -- learners -----------------------------------------------------------------------------------------------------


def test_a_learner_that_lags_is_not_promoted() -> None:
    """M4: with a slow path, neither on request nor by intent; the state says why."""
    cluster = _group(3, N3)
    cluster.change(N0, ChangeKind.ADD, N3)
    cluster.drop(PushAppend, target=N3)
    for number in range(10):
        cluster.append(N0, b"%d" % number)
        cluster.advance(200)

    error = _refusal(cluster, ChangeKind.PROMOTE, N3)
    (told,) = (one for one in cluster[N0].node.changes.progress(cluster.now_ms) if one.node_id == N3)

    assert isinstance(error, NotReadyToPromoteError)
    assert cluster[N0].membership.current.learners == (N3,)
    assert told.not_ready
    assert told.state == "catching up"
    assert told.lag_entries == 10
    cluster.heal()
    cluster.advance_until(lambda: _settled(cluster, N0, N1, N2, N3))


def test_a_learner_without_the_wish_to_be_promoted_stays_one() -> None:
    """Until it is asked for; then it is at once, since it holds everything."""
    cluster = _group(3, N3)
    cluster.change(N0, ChangeKind.ADD, N3, promote=False)
    cluster.advance(5000)
    assert cluster[N0].membership.current.learners == (N3,)
    assert cluster.role(N3) is Role.FOLLOWER

    assert cluster.change(N0, ChangeKind.PROMOTE, N3).value.voters == (N0, N1, N2, N3)


def test_learners_count_for_nothing() -> None:
    """Neither for a commit, nor for check-quorum, nor for reads; and they never campaign."""
    cluster = _group(2, N2)
    cluster.change(N0, ChangeKind.ADD, N2, promote=False)
    cluster.advance(2000)
    cluster.isolate(N1)

    append, read = cluster.append(N0, b"held by one voter and a learner"), cluster.read(N0)
    cluster.advance(500)
    assert append.pending
    assert read.pending
    cluster.advance(10_000)

    assert cluster.role(N0) is not Role.LEADER
    assert cluster.term(N2) == cluster.term(N0)
    assert cluster[N2].node.elector.elections == cluster[N2].node.elector.pre_votes == 0


def test_a_leader_that_only_learners_answer_steps_down() -> None:
    """Check-quorum: another one may have been elected."""
    cluster = _group(2, N2)
    cluster.change(N0, ChangeKind.ADD, N2, promote=False)
    cluster.advance(2000)
    cluster.isolate(N1)
    cluster.advance(1500)

    assert cluster.role(N0) is not Role.LEADER
    assert RoleReason.QUORUM_LOST in [change.reason for change in cluster[N0].role_changes]


def test_leadership_is_handed_to_no_learner() -> None:
    """It could not be elected, and appends would wait for that."""
    cluster = _group(3, N3)
    cluster.change(N0, ChangeKind.ADD, N3, promote=False)
    cluster.advance(2000)

    refused = cluster.transfer(N0, N3)

    assert isinstance(refused.error, UnknownMemberError)
    assert cluster.append(N0, b"x").value


def test_a_demoted_voter_follows_on() -> None:
    """It loses its say, not its log; the leader hands over before it is demoted itself."""
    cluster = _group(3)
    assert cluster.change(N0, ChangeKind.DEMOTE, N2).value.learners == (N2,)
    append = cluster.append(N0, b"x")
    cluster.advance(1000)
    assert append.value
    assert cluster.same_logs()
    assert not cluster[N2].membership.is_voter

    refused = cluster.change(N0, ChangeKind.DEMOTE, N0)
    cluster.advance(1000)
    assert isinstance(refused.error, NotLeaderError | WouldLoseQuorumError)
    assert cluster[N0].membership.current.voters == (N0, N1)


def test_an_addition_can_be_cancelled() -> None:
    """A learner that never comes is removed like any other member."""
    cluster = _group(3)
    cluster.change(N0, ChangeKind.ADD, N3)
    cluster.advance(2000)

    assert cluster.change(N0, ChangeKind.REMOVE, N3).value.learners == ()
    cluster.advance(11_000)
    assert N3 not in cluster[N0].node.dispatchers


# -- replacements -------------------------------------------------------------------------------------------------


def _configurations(cluster: Cluster, node_id: NodeId) -> list[tuple[NodeId, ...]]:
    """The voters by each configuration in a member's log."""
    log = cluster[node_id].log
    found = (decode_configuration(log.read(LogIndex(index)).body) for index in range(log.last.index + 1))
    return [one.voters for one in found if one is not None]


def test_a_live_voter_leaves_after_its_successor_has_come() -> None:
    """M14: three of four live voters to spare one, rather than two of two."""
    cluster = _group(3, N3)
    cluster.change(N0, ChangeKind.ADD, N3, replaces="n2")
    cluster.advance_until(lambda: _settled(cluster, N0, N1, N3))

    assert _configurations(cluster, N0) == [(N0, N1, N2), (N0, N1, N2, N3), (N0, N1, N3)]
    assert not any(one.replaces or one.promote for one in cluster[N0].membership.current.members)


def test_a_dead_voter_leaves_before_its_successor_comes() -> None:
    """M14: two of two for some milliseconds, rather than three of four."""
    cluster = _group(3, N3)
    cluster.crash(N2)
    cluster.advance(1200)
    cluster.change(N0, ChangeKind.ADD, N3, replaces="n2")
    cluster.advance_until(lambda: _settled(cluster, N0, N1, N3))

    assert _configurations(cluster, N0) == [(N0, N1, N2), (N0, N1), (N0, N1, N3)]


def test_a_leader_is_replaced_by_itself_handing_over() -> None:
    """D6: one request is enough."""
    cluster = _group(3, N3)
    cluster.change(N0, ChangeKind.ADD, N3, replaces="n0")
    cluster.advance_until(lambda: _settled(cluster, N1, N2, N3))

    assert cluster.leader() in (N1, N2, N3)


@pytest.mark.parametrize("killed_after_ms", [0, 150, 450, 600, 800, 1000, 1300])
def test_a_replacement_goes_on_under_whoever_leads(killed_after_ms: int) -> None:
    """D5: the configuration says what is intended, so neither client nor leader is needed to finish it."""
    cluster = _group(5, N5)
    cluster.change(N0, ChangeKind.ADD, N5, replaces="n4")
    cluster.advance(killed_after_ms)
    cluster.crash(N0)
    cluster.advance_until(lambda: cluster.leader() is not None)
    cluster.start(N0)

    cluster.advance_until(lambda: _settled(cluster, N0, N1, N2, N3, N5))
    cluster.advance(2000)
    assert cluster.same_logs() or not cluster[N4].up or cluster[N4].membership.current.find(N4) is None


def test_a_learner_that_is_replaced_in_two_ways_is_refused() -> None:
    """One voter has one successor."""
    cluster = _group(3)
    cluster.change(N0, ChangeKind.ADD, N3, replaces="n2")

    assert isinstance(_refusal(cluster, ChangeKind.ADD, N4, replaces="n2"), MemberExistsError)


def _address(configuration: Configuration, node_id: NodeId) -> tuple[str, int]:
    member = configuration.find(node_id)
    assert member is not None
    return member.host, member.port


def test_an_address_changes_with_its_commit() -> None:
    """Until then others know it where it was, too."""
    cluster = _group(3)
    cluster.drop(PushAppend)
    cluster.change(N0, ChangeKind.UPDATE, N2, host="elsewhere", port=7)
    membership = cluster[N0].membership
    assert _address(membership.committed, N2) == ("127.0.0.1", 20913)
    assert _address(membership.current, N2) == ("elsewhere", 7)
    cluster.heal()
    cluster.advance(2000)

    assert _address(membership.committed, N2) == ("elsewhere", 7)
    assert _address(membership.committed, N1) == ("127.0.0.1", 20912)
    assert [one.role for one in membership.current.members] == [MemberRole.VOTER] * 3
