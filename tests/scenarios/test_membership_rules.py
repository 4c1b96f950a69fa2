"""The rules that keep a change of members safe, each in the interleaving that it is for (docs/protocol.md)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dledger.config import FlushMode
from dledger.core.membership import Membership
from dledger.core.messages import HeartbeatRequest, PushAppend, PushCompare, PushInstall, PushResponse, TakeLeadership
from dledger.errors import LeaderNotReadyError, ShutdownError, TermChangedError, TransferFailedError
from dledger.types import (
    NO_INDEX,
    ChangeKind,
    Configuration,
    EntryId,
    HardState,
    LogIndex,
    MemberChange,
    MemberRole,
    NodeId,
    Role,
    Standing,
    Term,
)
from tests.support.cluster import N0, N1, N2, N3, N4, Cluster, Outcome


def _group(size: int, *learners: NodeId, flush_mode: FlushMode = FlushMode.SYNC) -> Cluster:
    """A group that n0 leads, with learners that hold everything and are not promoted."""
    cluster = Cluster(size, flush_mode=flush_mode)
    cluster.elect()
    for one in learners:
        cluster.join(one)
        cluster.change(N0, ChangeKind.ADD, one, promote=False)
        cluster.advance(2000)
    cluster.advance(1500)
    return cluster


def _new_leader(cluster: Cluster, old: NodeId) -> NodeId:
    """Wait until another member leads."""
    cluster.advance_until(lambda: cluster.leader() not in (None, old))
    leader = cluster.leader()
    assert leader is not None
    return leader


def _holds(cluster: Cluster, node_id: NodeId, index: int) -> bool:
    return cluster[node_id].log.last.index >= index


def test_two_leaders_in_succession_cannot_commit_different_changes_without_a_common_member() -> None:
    """M1 a, the bug of July 2015: {0..4} of term 1 and {1, 2, 3} of term 2 have disjoint majorities.

    n0 puts {0..4} in force and is cut off. The next leader must commit an entry of its term before it may remove n0, so
    that a majority of {0, 1, 2, 3} refuses n0 from then on; without that entry, n0 wins with n3 and n4, and nothing is
    lost.
    """
    cluster = _group(4, N4)
    cluster.drop(PushAppend, sender=N0)
    promotion = cluster.change(N0, ChangeKind.PROMOTE, N4)
    assert cluster[N0].membership.quorum == 3
    cluster.isolate(N0)
    cluster.drop(PushAppend, target=N3)
    cluster.drop(PushAppend, target=N4)
    second = _new_leader(cluster, N0)
    assert second in (N1, N2)
    if second == N2:  # only one other member gets its entries
        assert _holds(cluster, N1, cluster[N2].log.last.index)

    refused = cluster.change(second, ChangeKind.REMOVE, N0)

    assert isinstance(refused.error, LeaderNotReadyError)
    cluster.cut.clear()
    cluster.partition([N0, N3, N4], [N1, N2])
    cluster.advance_until(lambda: cluster.leader() == N0, limit_ms=30_000)
    cluster.heal()
    cluster.advance(3000)
    assert isinstance(promotion.error, TermChangedError)
    assert cluster.same_logs()
    assert cluster[N1].membership.current.voters == (N0, N1, N2, N3, N4)


def test_the_change_of_a_leader_without_a_majority_is_undone() -> None:
    """M2: it was in force on that leader, and returns to nothing with its entry."""
    cluster = _group(3)
    cluster.isolate(N0)
    change = cluster.change(N0, ChangeKind.REMOVE, N2)
    assert cluster[N0].membership.current.voters == (N0, N1)
    leader = _new_leader(cluster, N0)
    assert cluster.append(leader, b"x").pending is False
    cluster.heal()
    cluster.advance(3000)

    assert isinstance(change.error, TermChangedError)
    assert cluster[N0].membership.current.voters == (N0, N1, N2)
    assert cluster[N0].membership.is_committed
    assert cluster.same_logs()


# -- M3: what a restart finds -------------------------------------------------------------------------------------


def test_an_appended_configuration_is_in_force_after_a_restart() -> None:
    """M3: it is found in the log, though it was never known to be committed here."""
    cluster = _group(3)
    cluster.drop(PushResponse, target=N0)
    cluster.change(N0, ChangeKind.ADD, N3)
    assert cluster[N1].log.last.index == cluster[N0].log.last.index
    assert cluster[N1].members is None

    cluster.restart(N1)

    assert cluster[N1].membership.current.learners == (N3,)
    assert not cluster[N1].membership.is_committed


def test_a_configuration_whose_entry_was_not_flushed_is_gone_after_a_crash() -> None:
    """M3: nobody can know it to be committed, since only flushed ones are acknowledged."""
    cluster = _group(3, flush_mode=FlushMode.ASYNC)
    cluster[N1].flush_paused = cluster[N2].flush_paused = True
    change = cluster.change(N0, ChangeKind.ADD, N3)
    cluster.advance(100)
    assert cluster[N1].membership.current.learners == (N3,)
    assert change.pending

    cluster[N1].flush_paused = False
    cluster.restart(N1)

    assert cluster[N1].membership.current.learners == ()


def test_entries_before_an_unflushed_configuration_are_acknowledged_in_async_mode() -> None:
    """M3: only it, and what follows it, waits for the flush."""
    cluster = _group(3, flush_mode=FlushMode.ASYNC)
    for one in (N0, N1, N2):
        cluster[one].flush_paused = True
    before = cluster.append(N0, b"before")
    change = cluster.change(N0, ChangeKind.ADD, N3)
    after = cluster.append(N0, b"after")
    cluster.advance(100)
    assert before.value
    assert change.pending
    assert after.pending

    for one in (N0, N1):
        cluster[one].flush_paused = False
        cluster.flush(one)
    cluster.advance(100)

    assert change.value
    assert after.value


def test_a_committed_configuration_outlives_its_entry() -> None:
    """M3, M10: it is in the directory when its segment expires."""
    cluster = _group(3, N3)
    for number in range(5):
        cluster.append(N0, b"%d" % number)
    cluster.advance(500)
    log = cluster[N1].log
    log.expire(LogIndex(log.last.index - 1))

    cluster.restart(N1)

    assert cluster[N1].membership.current.learners == (N3,)
    assert cluster[N1].membership.is_committed


# -- M6, M7 -------------------------------------------------------------------------------------------------------


def _removed_one_leads_with_one_that_forgets(cluster: Cluster) -> None:
    """n0 removes n1 on its own; n1, elected with n2, commits an entry; n2 loses its disk and is left with n0."""
    cluster.drop(PushAppend, sender=N0)
    cluster.change(N0, ChangeKind.REMOVE, N1)
    cluster.isolate(N0)
    cluster.take_leadership(N1)
    assert not cluster.append(N1, b"committed by n1 and n2").pending
    cluster.wipe(N2)
    cluster.start(N2)
    cluster.heal()
    cluster.partition([N1], [N0, N2])


def test_unanimity_spans_the_configuration_before() -> None:
    """M6: n0 and the blank n2 are all of {0, 2}, but n1 has committed an entry with n2 that neither holds."""
    cluster = _group(3)
    _removed_one_leads_with_one_that_forgets(cluster)
    cluster.advance(15_000)
    assert cluster.role(N0) is not Role.LEADER

    cluster.heal()
    cluster.advance(10_000)

    assert cluster.bodies(N0) == [b"committed by n1 and n2"]
    assert cluster.same_logs()


def test_unanimity_of_the_current_configuration_alone_would_lose_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    """M6: the same without the rule."""
    monkeypatch.setattr(Membership, "previous_voters", ())
    cluster = _group(3)
    _removed_one_leads_with_one_that_forgets(cluster)

    with pytest.raises(AssertionError, match=r"committed twice|two leaders in term"):
        cluster.advance(15_000)


def test_a_new_voter_and_a_lost_disk_lose_nothing() -> None:
    """M2: {n0, n1} make n2 a voter, and only n0 and n2 hold that; n0 loses its disk, and n1 knows of no third voter."""
    cluster = _group(2, N2)
    cluster.drop(PushAppend, target=N1)
    change = cluster.change(N0, ChangeKind.PROMOTE, N2)
    append = cluster.append(N0, b"held by n0 and n2")
    cluster.advance(200)
    assert change.pending
    assert append.pending

    cluster.wipe(N0)
    cluster.start(N0)
    cluster.heal()
    cluster.partition([N2], [N0, N1])
    cluster.advance_until(lambda: cluster.leader() == N1, limit_ms=20_000)
    cluster.heal()
    cluster.advance(5000)

    assert cluster.bodies(N1) == []
    assert cluster.same_logs()


def test_a_voter_that_does_not_know_that_it_is_one_votes() -> None:
    """M7: without its vote, nobody could be elected once the leader that promoted it is gone."""
    cluster = _group(3, N3)
    cluster.hold(PushAppend, target=N3)
    assert cluster.change(N0, ChangeKind.PROMOTE, N3).value.voters == (N0, N1, N2, N3)
    cluster.crash(N0)
    assert not cluster[N3].membership.is_voter

    leader = _new_leader(cluster, N0)

    assert leader in (N1, N2)


# -- M8, M9 -------------------------------------------------------------------------------------------------------


def _removed_in_its_absence(cluster: Cluster) -> LogIndex:
    """n2 is removed while it is cut off, and comes back later."""
    cluster.isolate(N2)
    cluster.advance(1500)
    removed = cluster.change(N0, ChangeKind.REMOVE, N2).value
    cluster.advance(12_000)
    assert N2 not in cluster[N0].node.dispatchers
    cluster.heal()
    return removed.index


def test_a_removed_member_that_was_not_told_disturbs_nobody() -> None:
    """M8: it asks for votes once, is told, and asks no more."""
    cluster = _group(3)
    index = _removed_in_its_absence(cluster)
    cluster.advance(3000)
    assert cluster[N2].node.state.removed_at == index
    terms, asked = cluster.term(N0), cluster[N2].node.elector.pre_votes

    cluster.advance(30 * 60_000)

    assert cluster.term(N0) == terms
    assert cluster.leader() == N0
    assert cluster[N2].node.elector.pre_votes == asked


def test_a_learner_that_was_removed_in_its_absence_is_told() -> None:
    """M8: it does not campaign, so it asks only to be told."""
    cluster = _group(3, N3)
    cluster.isolate(N3)
    removed = cluster.change(N0, ChangeKind.REMOVE, N3).value
    cluster.advance(12_000)
    term = cluster.term(N0)
    cluster.heal()
    cluster.advance(3000)

    assert cluster[N3].node.state.removed_at == removed.index
    assert cluster.term(N0) == term


def test_a_removed_member_that_is_added_again_is_one_again() -> None:
    """M8: what it was told counts until a newer configuration has it."""
    cluster = _group(3)
    _removed_in_its_absence(cluster)
    cluster.advance(3000)

    cluster.change(N0, ChangeKind.ADD, N2)
    cluster.advance(5000)

    assert cluster[N2].node.state.removed_at == NO_INDEX
    assert cluster[N2].membership.is_voter
    assert cluster.same_logs()


def test_only_a_configuration_that_is_newer_than_its_own_makes_a_member_believe_that_it_was_removed() -> None:
    """M8: a member that is behind does not know of those that were added since."""
    cluster = _group(3, N3)
    state = cluster[N3].node.state
    own = state.membership.current.index

    for told in (NO_INDEX, LogIndex(0), own):
        state.learn_removed(told)
        assert state.removed_at == NO_INDEX
    state.learn_removed(LogIndex(own + 1))
    assert state.removed_at == own + 1


def test_a_removal_is_not_sent_to_its_subject_before_it_is_committed() -> None:
    """M9: if only n3 held it, n1 and n2 would need the vote of n3, whose log is longer, and which may not lead."""
    cluster = _group(4)
    cluster.drop(PushAppend, target=N1)
    cluster.drop(PushAppend, target=N2)
    change = cluster.change(N0, ChangeKind.REMOVE, N3)
    after = cluster.append(N0, b"after it")
    cluster.advance(200)
    assert change.pending
    assert after.pending
    assert cluster[N3].log.last.index == cluster[N0].membership.current.index - 1

    cluster.crash(N0)
    cluster.heal()

    assert _new_leader(cluster, N0) in (N1, N2, N3)


def test_a_removed_member_is_told_that_its_removal_is_committed() -> None:
    """M9: then nobody speaks to it any more."""
    cluster = _group(3)
    change = cluster.change(N0, ChangeKind.REMOVE, N2)
    cluster.advance(1000)

    removed = change.value
    assert cluster[N2].membership.committed.index == removed.index
    assert not cluster[N2].membership.is_voter
    assert N2 not in cluster[N0].node.dispatchers
    assert N2 not in cluster[N1].node.dispatchers
    cluster.advance(20_000)
    assert cluster.role(N2) is Role.FOLLOWER
    assert cluster.leader() == N0


def test_a_learner_holds_nothing_that_a_voter_may_have_to_catch_up_with() -> None:
    """M9: of {0, 1, 2} n0 alone holds the promotion of n3, for which n3 must vote. n1 leads meanwhile, and is lost
    before any voter has its first entry. Did n3 have it, it would refuse n0, and not be elected itself.
    """
    cluster = _group(3, N3)
    cluster.drop(PushAppend, sender=N0)
    cluster.change(N0, ChangeKind.PROMOTE, N3)
    assert cluster[N0].membership.quorum == 3
    cluster.isolate(N0)
    cluster.drop(PushAppend, target=N1)
    cluster.drop(PushAppend, target=N2)
    first = _new_leader(cluster, N0)
    cluster.advance(300)
    assert cluster[first].log.last > cluster[N0].log.last

    cluster.wipe(first)
    cluster.heal()
    cluster.start(first)

    cluster.advance_until(lambda: cluster.leader() == N0)
    cluster.advance(3000)
    assert cluster.same_logs()
    assert cluster[N3].membership.current.voters == (N0, N1, N2, N3)


def test_a_demotion_is_not_sent_to_its_subject_before_it_is_committed() -> None:
    """M9: as a removal."""
    cluster = _group(4)
    cluster.drop(PushAppend, target=N1)
    cluster.drop(PushAppend, target=N2)
    cluster.change(N0, ChangeKind.DEMOTE, N3)
    cluster.advance(200)
    assert cluster[N3].membership.is_voter

    cluster.heal()
    cluster.advance(2000)

    assert not cluster[N3].membership.is_voter
    assert cluster.same_logs()


# -- M10, M11, M12 ------------------------------------------------------------------------------------------------


def test_a_new_begin_of_the_log_comes_with_the_committed_configuration() -> None:
    """M10: the entry that holds it may have expired, or come later."""
    cluster = _group(3, N3)
    for number in range(5):
        cluster.append(N0, b"%d" % number)
    cluster.advance(500)
    cluster[N0].log.expire(LogIndex(cluster[N0].log.last.index - 1))
    cluster.join(N4)
    cluster.drop(PushAppend, target=N4)
    cluster.change(N0, ChangeKind.ADD, N4)
    cluster.advance(1000)

    assert any(isinstance(sent.message, PushInstall) and sent.target == N4 for sent in cluster.delivered)
    assert cluster[N4].membership.current == cluster[N0].membership.committed
    cluster.heal()
    cluster.advance(3000)
    assert cluster[N4].membership.is_voter


def test_a_lost_disk_comes_back_under_a_new_uid() -> None:
    """M11: the member is readmitted, and then the configuration says whose memory it is."""
    cluster = _group(3, N3)
    cluster.wipe(N2)
    cluster.start(N2)
    cluster.advance(10_000)

    member = cluster[N0].membership.current.find(N2)
    assert member is not None
    assert member.uid == 1902
    assert cluster[N2].node.state.standing is Standing.FULL
    cluster.crash(N1)
    assert not cluster.append(N0, b"held by n0 and n2").pending


def test_the_only_other_voter_counts_once_it_is_readmitted() -> None:
    """M11: its new uid can be committed only with it, so it counts before the configuration says so."""
    cluster = _group(1)
    cluster.join(N1)
    cluster.change(N0, ChangeKind.ADD, N1)
    cluster.advance(5000)
    assert cluster[N0].membership.current.voters == (N0, N1)
    cluster.wipe(N1)
    cluster.start(N1)
    cluster.advance(3000)

    assert cluster.leader() == N0
    assert not cluster.append(N0, b"held by both").pending
    cluster.advance(1000)
    member = cluster[N0].membership.committed.find(N1)
    assert member is not None
    assert member.uid == 1901


def test_an_empty_disk_that_a_person_vouches_for_elects_the_survivor_of_three() -> None:
    """M11: ``dledger restore-vote`` takes its uid, so that it is not another memory to a group that knows uids."""
    cluster = _group(3, N3)
    cluster.append(N0, b"x")
    cluster.advance(1000)
    for lost in (N1, N2):
        cluster.wipe(lost)
        cluster.start(lost)
    cluster.advance(5000)
    assert cluster.leader() is None

    cluster.crash(N1)
    cluster[N1].saved = HardState(cluster[N1].saved.term, standing=Standing.FULL)
    cluster[N1].uid = 0
    cluster.start(N1)
    cluster.advance(10_000)

    assert cluster.leader() == N0
    assert not cluster.append(N0, b"y").pending
    assert cluster[N2].node.state.has_standing
    cluster.advance(1000)
    assert cluster.same_logs()


def test_a_voter_that_loses_its_disk_while_another_is_added_is_readmitted() -> None:
    """M2, M11: the change is committed only once a majority of the two before holds it, which takes n1."""
    cluster = _group(2, N2)
    cluster.wipe(N1)
    change = cluster.change(N0, ChangeKind.PROMOTE, N2)
    cluster.advance(200)
    assert change.pending
    assert cluster.role(N0) is Role.LEADER

    cluster.start(N1)
    cluster.advance(1500)

    assert cluster[N1].node.state.standing is Standing.FULL
    assert change.value.voters == (N0, N1, N2)
    assert cluster.leader() == N0
    assert not cluster.append(N0, b"x").pending


def test_another_directory_under_a_members_id_counts_for_nothing_until_it_is_readmitted() -> None:
    """M11: it is a memory of something else, however sure of itself."""
    cluster = _group(3, N3)
    log = cluster[N2].log
    cluster.crash(N2)
    cluster[N2].saved = HardState(cluster.term(N0), standing=Standing.FULL)
    cluster[N2].uid = 4711
    cluster.isolate(N1)
    cluster.start(N2)
    assert log.last == cluster[N0].log.last
    cluster.drop(HeartbeatRequest, target=N2)
    append = cluster.append(N0, b"held by n0 and another n2")
    cluster.advance(300)
    assert append.pending

    cluster.heal()
    cluster.advance(10_000)

    member = cluster[N0].membership.current.find(N2)
    assert member is not None
    assert member.uid == 4711
    assert cluster.same_logs()


def test_who_waits_to_be_added_founds_no_group() -> None:
    """M12: a conf that lists only the newcomer must not begin a second one."""
    cluster = Cluster(0)
    cluster.join(N0)
    cluster.advance(60_000)
    state = cluster[N0].node.state

    assert cluster.role(N0) is Role.FOLLOWER
    assert (state.term, cluster[N0].node.elector.pre_votes) == (0, 0)


def test_who_was_told_a_configuration_founds_no_group_before_it_holds_an_entry() -> None:
    """M12: {0, 1} grew to {0, 1, 2}. n1, of an empty disk, has heard that from COMPARE when n0 loses its disk, too."""
    cluster = _group(2)
    cluster.join(N2)
    cluster.change(N0, ChangeKind.ADD, N2)
    cluster.advance(5000)
    assert cluster[N0].membership.committed.voters == (N0, N1, N2)
    cluster.drop(PushAppend, target=N1)
    cluster.drop(PushInstall, target=N1)
    cluster.wipe(N1)
    cluster.start(N1)
    cluster.advance(1000)
    assert cluster[N1].membership.current.voters == (N0, N1, N2)
    assert cluster.commit(N1) == NO_INDEX

    cluster.wipe(N0)
    cluster.partition([N0, N1], [N2])
    cluster.start(N0)
    cluster.advance(60_000)

    assert cluster[N0].node.elector.pre_votes > 0
    assert cluster.leader() is None


def test_a_change_needs_no_member_that_leaves() -> None:
    """M16: {0} commits with n0 alone as soon as it is durable there; n1, unaware, gets no vote."""
    cluster = _group(2)
    cluster.isolate(N1)
    change = cluster.change(N0, ChangeKind.REMOVE, N1)
    cluster.settle()
    assert change.value.voters == (N0,)
    cluster.advance(12_000)
    cluster.heal()
    cluster.advance(5000)

    assert cluster.leader() == N0
    assert cluster[N1].node.state.removed_at == change.value.index


def test_a_voter_that_became_a_learner_does_not_take_the_leadership_it_was_offered_before() -> None:
    """M7: the offer may have been long on its way; learners never campaign."""
    cluster = _group(4)
    cluster.hold(TakeLeadership, target=N3)
    offered = cluster.transfer(N0, N3)
    cluster.advance_until(lambda: not offered.pending, limit_ms=60_000)
    assert isinstance(offered.error, TransferFailedError)
    cluster.change(N0, ChangeKind.DEMOTE, N3)
    cluster.advance(1000)
    assert cluster[N3].node.state.is_learner
    term = cluster.term(N3)

    cluster.release()
    cluster.settle()

    assert cluster.term(N3) == term
    assert cluster.role(N3) is Role.FOLLOWER


def test_a_member_added_again_in_the_same_term_is_not_taken_for_its_earlier_life() -> None:
    """M11: what its leader knew of the earlier process went with it."""
    cluster = Cluster(3)
    cluster.drop(PushAppend, PushCompare, target=N2)
    cluster.elect()
    cluster.advance(1500)
    assert cluster[N0].node.state.role.memories[N2][1] == 902  # type: ignore[union-attr]  # it leads
    cluster.isolate(N2)
    cluster.change(N0, ChangeKind.REMOVE, N2)
    cluster.advance(12_000)
    cluster.heal()
    cluster.crash(N2)

    again = cluster.change(N0, ChangeKind.ADD, N2).value.find(N2)

    assert again is not None
    assert again.uid == 0
    assert N2 not in cluster[N0].node.state.remembered


def test_what_was_known_of_a_removed_member_is_forgotten_by_who_missed_its_removal() -> None:
    """M11: a number is given once, so another number is another life, even if both uids are unknown."""
    state = Cluster(3)[N0].node.state
    held = EntryId(Term(1), LogIndex(70))
    state.remember([(N1, held), (N2, held)])
    kept, removed = state.membership.current.members[1:]
    added = replace(removed, number=3, role=MemberRole.LEARNER)

    state.install(Configuration((state.membership.current.members[0], kept, added), LogIndex(9), Term(1), 4))

    assert state.remembered == {N1: held}


def test_a_change_that_waits_is_answered_when_the_node_stops() -> None:
    """And so is a transfer: their outcome is unknown."""
    cluster = _group(3)
    cluster.drop(PushResponse, target=N0)
    change = cluster.change(N0, ChangeKind.ADD, N3)
    assert change.pending
    cluster[N0].node.abandon(ShutdownError("stopped"))
    cluster.act(N0)
    assert isinstance(change.error, ShutdownError)

    cluster = _group(3)
    cluster.hold(TakeLeadership)
    transfer = cluster.transfer(N0, N1)
    cluster[N0].node.abandon(ShutdownError("stopped"))
    cluster.act(N0)
    assert isinstance(transfer.error, ShutdownError)


def test_a_change_of_an_earlier_leadership_is_not_taken_for_one_of_the_next() -> None:
    """Its entry may be gone, and another one committed in its place."""
    cluster = _group(3)
    cluster.drop(PushAppend, sender=N0)
    lost = cluster.change(N0, ChangeKind.ADD, N3)
    node = cluster[N0].node
    state, appended = node.state, node.state.membership.current.index
    now_ms = cluster.now_ms
    state.become_follower(Term(state.term + 1), None, now_ms)
    state.become_candidate(now_ms, pre_vote=False)
    state.truncated(appended)
    state.log.truncate(appended)
    noop = node.noops.append(state.log, state.term, b"").first_index
    state.become_leader(noop, now_ms)

    ignored: Outcome[Configuration] = Outcome()
    node.changes.submit(MemberChange(ChangeKind.ADD, N4, 77, "h", 1), now_ms, ignored)
    for done in state.outbox.take().completions:
        done()

    assert isinstance(lost.error, TermChangedError)
