"""Elections between real members: pre-vote, check-quorum, one-way cuts, late answers."""

from __future__ import annotations

import pytest

from dledger.core.messages import HeartbeatRequest, HeartbeatResponse, VoteRequest, VoteResponse, VoteResult
from dledger.errors import NotLeaderError, TermChangedError
from dledger.types import EntryId, HardState, LogIndex, Role, Standing, Term
from tests.support.cluster import N0, N1, N2, N3, N4, Cluster, Sent
from tests.support.solo import Solo


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_a_group_settles_on_one_leader(size: int) -> None:
    """DLedger LeaderElectorTest: one leader, all others follow it, nothing changes afterwards."""
    cluster = Cluster(size)
    cluster.elect()

    cluster.advance(20_000)

    assert cluster.leader() == N0
    assert [cluster.term(one) for one in cluster.ids] == [1] * size
    assert [cluster[one].node.state.leader_id for one in cluster.ids] == [N0] * size


@pytest.mark.parametrize("size", [3, 5])
def test_a_killed_leader_whose_end_all_notice_is_replaced_without_a_silence(size: int) -> None:
    """Long before any election timeout, in one election; nothing acknowledged is lost."""
    cluster = Cluster(size)
    cluster.elect()
    acknowledged = cluster.append(N0, b"a").value
    cluster.crash(N0)

    for one in cluster.ids[1:]:
        cluster[one].node.leader_lost(N0, Term(1), cluster.now_ms, gone=True)
        cluster.act(one)
    cluster.advance(100)

    leader = cluster.leader()
    assert leader is not None
    assert cluster.term(leader) == 2
    assert cluster.append(leader, b"b").value.last_index > acknowledged.last_index
    assert cluster.bodies(leader) == [b"a", b"b"]


@pytest.mark.parametrize("told", [1, 2])
def test_a_false_alarm_costs_at_most_an_election(told: int) -> None:
    """One member alone gets no pre-vote and goes on with its leader; two elect one of them, the old leader follows."""
    cluster = Cluster(3)
    cluster.elect()
    acknowledged = cluster.append(N0, b"a").value
    cluster.advance(50)  # the leader has nothing to say now, until its next heartbeat

    for one in (N1, N2)[:told]:
        cluster[one].node.leader_lost(N0, Term(1), cluster.now_ms, gone=True)
        cluster.act(one)
    cluster.advance(400)

    leader = cluster.leader()
    assert leader is not None
    assert (leader == N0, cluster.term(leader)) == ((True, 1) if told == 1 else (False, 2))
    assert cluster.append(leader, b"b").value.last_index > acknowledged.last_index
    cluster.advance(200)
    assert cluster.same_logs()


@pytest.mark.parametrize("size", [3, 5])
def test_a_killed_leader_is_replaced_within_two_election_timeouts(size: int) -> None:
    """DLedger LeaderElectorTest: the leader stops, another takes over, and appends go on."""
    cluster = Cluster(size)
    cluster.elect()
    acknowledged = cluster.append(N0, b"a").value
    cluster.crash(N0)

    cluster.advance(1500)

    assert cluster.leader() == N1
    assert cluster.append(N1, b"b").value.last_index > acknowledged.last_index
    assert cluster.bodies(N1) == [b"a", b"b"]


def test_a_restarted_follower_changes_neither_leader_nor_term() -> None:
    """DLedger LeaderElectorTest: a follower that restarts rejoins quietly."""
    cluster = Cluster(3)
    cluster.elect()

    cluster.restart(N1)
    cluster.advance(5000)

    assert cluster.leader() == N0
    assert cluster.term(N0) == 1


def test_a_restarted_single_member_leads_a_new_term() -> None:
    """DLedger kept the term here; every campaign of ours is a new one (design decision 1)."""
    cluster = Cluster(1)
    cluster.elect()
    cluster.append(N0, b"a")

    cluster.restart(N0)
    cluster.settle()

    assert cluster.term(N0) == 2
    assert cluster.bodies(N0) == [b"a"]


def test_a_leader_without_followers_steps_down() -> None:
    """DLedger LeaderElectorTest: both followers stop, the leader resigns, in the same term."""
    cluster = Cluster(3)
    cluster.elect()
    cluster.crash(N1)
    cluster.crash(N2)

    cluster.advance(1500)

    assert cluster.role(N0) is not Role.LEADER
    assert cluster.term(N0) == 1
    cluster.delivered.clear()
    cluster.start(N1)
    cluster.advance(3000)
    assert cluster.leader() is not None


def test_check_quorum_ends_a_cut_off_leader_and_its_heartbeats() -> None:
    """Trap 24, openraft #2080: a leader that no quorum answers stops within an election timeout."""
    cluster = Cluster(3)
    cluster.elect()
    cluster.drop(target=N0)
    cluster.advance(1100)
    assert cluster.role(N0) is not Role.LEADER

    cluster.delivered.clear()
    cluster.advance(300)

    late = [sent for sent in cluster.delivered if sent.sender == N0 and isinstance(sent.message, HeartbeatRequest)]
    assert late == []


def test_an_isolated_member_does_not_raise_its_term() -> None:
    """Pre-vote (§9.6): a member that nobody answers asks for ever in its old term, and returns without disturbance."""
    cluster = Cluster(3)
    cluster.elect()
    cluster.isolate(N2)
    cluster.advance(30_000)
    assert cluster.term(N2) == 1

    cluster.heal()
    cluster.advance(2000)

    assert cluster.leader() == N0
    assert cluster.term(N0) == 1
    assert cluster[N2].node.state.leader_id == N0


def test_a_member_that_hears_nobody_does_not_depose_a_leader() -> None:
    """#7, #25: one that can send but not receive campaigns for ever and is refused for ever."""
    cluster = Cluster(3)
    cluster.elect()
    cluster.cut = [(N0, N2), (N1, N2)]

    cluster.advance(20_000)

    assert cluster.leader() == N0
    assert cluster.term(N0) == 1
    assert cluster.append(N0, b"a").value


def test_members_that_cannot_talk_to_each_other_share_a_leader_through_a_bridge() -> None:
    """Trap 29: n0 and n1 are cut from each other; n2 hears both, so the leader stays."""
    cluster = Cluster(3)
    cluster.elect()
    cluster.partition([N0], [N1])

    cluster.advance(10_000)

    assert cluster.leader() == N0
    assert cluster.term(N0) == 1
    assert cluster.append(N0, b"a").value


def test_a_bridge_of_five_makes_progress() -> None:
    """Trap 29: two halves joined by one member elect one leader within 10 s."""
    cluster = Cluster(5)
    cluster.elect()
    cluster.partition([N0, N1], [N3, N4])

    cluster.advance(10_000)

    leader = cluster.leader()
    assert leader is not None
    assert cluster.append(leader, b"a").value


def test_a_majorities_ring_makes_progress() -> None:
    """Trap 29: five members in a ring, each hearing its two neighbours, keep or find a leader within 10 s."""
    cluster = Cluster(5)
    cluster.elect()
    for number, one in enumerate(cluster.ids):
        far = [cluster.ids[(number + 2) % 5], cluster.ids[(number + 3) % 5]]
        cluster.cut += [(one, other) for other in far]

    cluster.advance(10_000)

    leader = cluster.leader()
    assert leader is not None
    assert cluster.append(leader, b"a").value


def test_reelection_after_heal() -> None:
    """618062a (Jepsen): after a partition without any quorum the group elects a leader again."""
    cluster = Cluster(5)
    cluster.elect()
    cluster.partition([N0, N1], [N2, N3, N4])
    cluster.partition([N2], [N3, N4])
    cluster.advance(20_000)
    assert cluster.leader() is None

    cluster.heal()
    cluster.advance(2000)

    leader = cluster.leader()
    assert leader is not None
    assert cluster.append(leader, b"a").value
    cluster.advance(50)
    assert cluster.same_logs()


def test_a_follower_with_a_higher_term_rejoins() -> None:
    """#325, #247: its term makes the leader step down once, and one new term later it is a follower like any other."""
    cluster = Cluster(3)
    cluster.elect()
    cluster.append(N0, b"a")
    cluster.crash(N2)
    cluster[N2].saved = HardState(Term(9), standing=Standing.FULL)

    cluster.start(N2)
    cluster.advance(3000)

    leader = cluster.leader()
    assert leader is not None
    assert cluster.term(leader) == 10
    assert cluster[N2].node.state.leader_id == leader
    assert cluster.append(leader, b"b").value
    cluster.advance(50)
    assert cluster.same_logs()


def test_a_stale_candidate_of_a_later_term_lifts_the_others() -> None:
    """F13: a better-logged member adopts the later term of a vote request that it refuses."""
    solo = Solo(terms=(1, 1))

    response = solo.ask_vote(N1, 7, EntryId(Term(1), LogIndex(0)))

    assert response == VoteResponse(Term(7), granted=False, result=VoteResult.REJECT_SMALL_LEDGER_END, boot_id=1)
    assert solo.state.term == 7


def test_the_longer_log_of_an_older_term_does_not_win() -> None:
    """#52: logs are ordered by the term of their last entry, not by a term the member has merely heard of."""
    solo = Solo(terms=(1, 2), hard_state=HardState(Term(5), standing=Standing.FULL))

    assert not solo.ask_vote(N1, 6, EntryId(Term(1), LogIndex(9))).granted
    assert solo.ask_vote(N2, 6, EntryId(Term(2), LogIndex(1))).granted


def test_the_highest_term_among_heartbeat_answers_counts() -> None:
    """F10: DLedger kept the last answer's term; here a lower one that comes later changes nothing."""
    solo = Solo()
    solo.lead()

    solo.beat(N1, term=9)
    solo.beat(N2, term=4)

    assert solo.state.term == 9
    assert solo.role is Role.FOLLOWER


def test_a_late_grant_of_an_earlier_term_elects_nobody() -> None:
    """ABA: a vote for term 1 does not count in term 2, nor does a pre-vote count as a vote."""
    solo = Solo(5)
    solo.campaign()
    solo.take()
    solo.campaign()
    assert solo.state.term == 2

    solo.vote(N1, term=1)
    solo.vote(N2, term=2, pre_vote=True)
    solo.vote(N3, pre_vote=True)
    solo.vote(N1)
    solo.vote(N1)  # the same voter twice is one vote
    before = solo.role
    solo.vote(N2)

    assert before is Role.CANDIDATE
    assert solo.role is Role.LEADER


def test_a_late_pre_vote_starts_no_campaign() -> None:
    """ABA: a granted pre-vote that arrives when its asker follows again, or asks for another term, is ignored."""
    solo = Solo()
    solo.time_out()
    solo.hear(N2, 1)

    solo.vote(N1, term=1, pre_vote=True)

    assert solo.role is Role.FOLLOWER
    assert solo.state.term == 1


def test_a_live_leader_is_not_voted_down() -> None:
    """§4.2.3: neither pre-vote nor vote is given while a leader is heard, unless it said that it hands over."""
    solo = Solo(hard_state=HardState(Term(1), standing=Standing.FULL))
    solo.hear(N1, 1)

    assert solo.ask_vote(N2, 2, pre_vote=True).result is VoteResult.REJECT_ALREADY_HAS_LEADER
    assert solo.ask_vote(N2, 2).result is VoteResult.REJECT_ALREADY_HAS_LEADER
    assert solo.ask_vote(N2, 2, transfer=True).result is VoteResult.REJECT_ALREADY_HAS_LEADER
    assert solo.state.term == 1
    solo.hear(N1, 1, transfer_target=N2)
    assert solo.ask_vote(N2, 2, transfer=True).granted


def test_each_reason_to_refuse_a_vote() -> None:
    """DLedger VoteRequestTest, with this core's reasons."""
    voted = HardState(Term(3), N2, standing=Standing.FULL)

    assert Solo(hard_state=voted).ask_vote(N1, 2).result is VoteResult.REJECT_EXPIRED_TERM
    assert Solo(hard_state=voted).ask_vote(N1, 2, pre_vote=True).result is VoteResult.REJECT_EXPIRED_TERM
    assert Solo(hard_state=voted).ask_vote(N1, 3).result is VoteResult.REJECT_ALREADY_VOTED
    assert Solo(hard_state=voted).ask_vote(N1, 3, pre_vote=True).result is VoteResult.REJECT_EXPIRED_TERM
    assert Solo(terms=(1,)).ask_vote(N1, 2, pre_vote=True).result is VoteResult.REJECT_SMALL_LEDGER_END
    following = Solo(hard_state=HardState(Term(3), standing=Standing.FULL))
    following.hear(N2, 3)
    assert following.ask_vote(N1, 3).result is VoteResult.REJECT_ALREADY_HAS_LEADER


def test_a_vote_survives_a_crash() -> None:
    """One vote per term across restarts (§5.2): the vote is part of what a restart loads."""
    cluster = Cluster(3)
    cluster.deliver(Sent(N1, N0, VoteRequest(Term(5), cluster[N0].log.last)))
    assert cluster[N0].saved == HardState(Term(5), N1, standing=Standing.FULL)

    cluster.restart(N0)
    cluster.deliver(Sent(N2, N0, VoteRequest(Term(5), cluster[N0].log.last)))

    answers = [sent.message for sent in cluster.wire if sent.sender == N0 and isinstance(sent.message, VoteResponse)]
    assert [answer.granted for answer in answers] == [True, False]


def test_appends_of_a_deposed_leader_end_as_unknown() -> None:
    """Trap 21: what was written but not committed when leadership is lost may or may not survive."""
    cluster = Cluster(3)
    cluster.elect()
    cluster.isolate(N0)
    outcome = cluster.append(N0, b"lost")

    cluster.advance(3000)
    assert isinstance(outcome.error, TermChangedError)
    assert outcome.error.outcome == "unknown"
    refused = cluster.append(N0, b"later").error
    assert isinstance(refused, NotLeaderError)
    cluster.heal()
    cluster.advance(3000)

    assert cluster.same_logs()
    assert cluster.bodies(N0) == []


def test_a_paused_leader_resigns_when_it_wakes() -> None:
    """Trap 25: after a long pause (SIGSTOP) the old leader neither serves reads nor keeps leading."""
    cluster = Cluster(3)
    cluster.elect()
    cluster.drop(sender=N0)
    cluster.drop(target=N0)
    cluster.advance_until(lambda: cluster.term(N1) > 1)
    read = cluster.read(N0)

    cluster.heal()
    cluster.advance(1500)

    assert isinstance(read.error, NotLeaderError)
    assert cluster.role(N0) is Role.FOLLOWER
    assert cluster.term(N0) == cluster.term(N1)


def test_lost_heartbeat_answers_do_not_end_a_leader_that_replicates() -> None:
    """Any answer of a follower counts as contact, also those to pushes."""
    cluster = Cluster(3)
    cluster.elect()
    cluster.drop(HeartbeatResponse)

    for number in range(40):
        assert cluster.append(N0, b"%d" % number).value
        cluster.advance(100)

    assert cluster.leader() == N0
