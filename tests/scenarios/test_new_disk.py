"""Members whose disk is new: who may vote, and when (design decision 11, reliability trap 30)."""

from __future__ import annotations

from dledger.core.messages import PushAppend, PushCommit, PushKind
from dledger.types import HardState, LogIndex, Role, Term
from tests.support.cluster import N0, N1, N2, N3, N4, Cluster
from tests.support.solo import Solo, Source


def test_an_all_new_group_elects_a_leader() -> None:
    """Three members with new disks bootstrap themselves: a quorum of empty logs proves that nothing was committed."""
    cluster = Cluster(3, voters=False)

    cluster.advance_until(lambda: cluster.leader() is not None)
    cluster.advance(200)

    assert all(cluster[one].saved.voter for one in cluster.ids)
    assert cluster.same_logs()


def test_an_all_new_group_of_five_elects_a_leader() -> None:
    """The same with five members."""
    cluster = Cluster(5, voters=False)

    cluster.advance_until(lambda: cluster.leader() is not None)
    cluster.advance(200)

    assert all(cluster[one].saved.voter for one in cluster.ids)
    assert cluster.same_logs()


def test_a_group_of_one_leads_again_after_losing_the_hard_state_that_made_it_a_voter() -> None:
    """Found by the simulator (seed 3022): its first no-op was durable, the hard state of that moment was not.

    The log is not empty then, so emptiness may not be what the right to vote hangs on: nobody else could grant it.
    """
    solo = Solo(1, terms=(1,), hard_state=HardState())

    solo.node.elector.step(solo.now_ms)

    assert solo.state.hard_state.voter
    assert solo.state.role_name is Role.LEADER
    assert solo.state.term == 2


def test_a_new_group_of_one_leads_at_once() -> None:
    """A single member needs nobody's permission and waits for no election timeout."""
    cluster = Cluster(1, voters=False)

    cluster.settle()

    assert cluster.role(N0) is Role.LEADER
    assert cluster.append(N0, b"one").value.last_index == 1


def test_one_new_member_alone_stays_silent() -> None:
    """Without a quorum of empty logs a new disk neither votes nor campaigns."""
    cluster = Cluster(3, start=False, voters=False)
    cluster.start(N0)

    cluster.advance(10_000)

    assert cluster.role(N0) is Role.FOLLOWER
    assert cluster.term(N0) == 0
    assert not cluster[N0].saved.voter


def test_a_late_third_member_catches_up_and_becomes_a_voter() -> None:
    """A member that starts after the group was bootstrapped is filled by its leader, then votes."""
    cluster = Cluster(3, start=False, voters=False)
    cluster.start(N0)
    cluster.start(N1)
    cluster.advance_until(lambda: cluster.leader() is not None)
    leader = cluster.leader()
    assert leader is not None
    cluster.append(leader, b"a", b"b")

    cluster.start(N2)
    cluster.advance(2000)

    assert cluster.leader() == leader
    assert cluster[N2].saved.voter
    assert cluster.same_logs()


def test_a_wiped_member_does_not_vote_until_it_has_caught_up() -> None:
    """A wiped member may have acknowledged entries that it no longer has, so it elects nobody meanwhile."""
    cluster = Cluster(3)
    cluster.elect()
    cluster.crash(N2)
    cluster.append(N0, b"only on n0 and n1")
    cluster.wipe(N1)
    cluster.crash(N0)

    cluster.start(N1)
    cluster.start(N2)
    cluster.advance(20_000)

    assert cluster.leader() is None
    assert not cluster[N1].saved.voter

    cluster.start(N0)
    cluster.advance_until(lambda: cluster.leader() is not None)
    cluster.advance(2000)

    assert cluster.leader() == N0
    assert cluster[N1].saved.voter
    assert cluster.bodies(N1) == [b"only on n0 and n1"]


def test_two_lost_disks_do_not_begin_a_new_group_while_the_third_has_everything() -> None:
    """Two empty members are a quorum, but not of a new group: with two copies lost, halt and let a person decide."""
    cluster = Cluster(3)
    cluster.elect()
    cluster.append(N0, b"only on n0 from now on")
    cluster.wipe(N1)
    cluster.wipe(N2)
    cluster.advance(2000)

    cluster.start(N1)
    cluster.start(N2)
    cluster.advance(20_000)

    assert cluster.leader() is None
    assert not cluster[N1].saved.voter
    assert not cluster[N2].saved.voter


def test_a_new_disk_does_not_become_voter_through_entries_of_an_older_term() -> None:
    """Only a commit of the present leader's own term proves a leader elected without the new disk."""
    solo = Solo(hard_state=HardState())
    source = Source(2, 1, 1)
    solo.push(N1, source.compare(-1))

    solo.push(N1, source.append(0, 1, commit=1))

    assert solo.state.commit_index == 1
    assert not solo.state.hard_state.voter


def test_a_wiped_minority_of_five_does_not_stop_the_others() -> None:
    """Two wiped members of five are filled again and vote again."""
    cluster = Cluster(5)
    cluster.elect()
    cluster.append(N0, b"x")
    cluster.wipe(N3)
    cluster.wipe(N4)

    cluster.start(N3)
    cluster.start(N4)
    cluster.advance(3000)

    assert cluster.leader() == N0
    assert cluster.same_logs()
    assert cluster[N3].saved.voter
    assert cluster[N4].saved.voter


def test_appends_are_acknowledged_by_a_new_process_after_a_wipe() -> None:
    """After the wiped member has answered, replication to it starts from nothing and completes."""
    cluster = Cluster(3)
    cluster.elect()
    cluster.append(N0, b"a")
    cluster.hold(PushAppend, target=N1)
    cluster.append(N0, b"b")
    cluster.wipe(N1)
    cluster.start(N1)
    cluster.holds.clear()

    cluster.advance(3000)

    assert cluster.same_logs()
    assert cluster[N1].saved.voter


def test_a_wiped_member_votes_only_after_holding_all_its_leader_had_committed() -> None:
    """The leader's commit index decides, not the part of it that was received so far.

    n1 acknowledged entries 0 to 4, lost its disk, and has now durably received 0 to 1 again together with the news that
    4 is committed. A vote of n1 could still elect a member that lacks 2 to 4.
    """
    solo = Solo(hard_state=HardState())
    source = Source(1, 1, 1, 1, 1, 1)
    solo.push(N1, source.compare(-1))

    solo.push(N1, source.append(0, 1, commit=4))
    early = solo.state.hard_state.voter
    solo.push(N1, source.append(2, 4, commit=4))

    assert solo.state.commit_index == 4
    assert not early
    assert solo.state.hard_state.voter


def test_a_new_disk_ignores_commit_news_below_its_begin() -> None:
    """A commit index from before the log's begin says nothing; it must not stop the node."""
    solo = Solo(hard_state=HardState())
    source = Source(1, 1, 1, 1)
    solo.push(N1, source.compare(-1))
    solo.push(N1, source.append(0, 2, commit=-1))
    solo.state.advance_commit(LogIndex(2))
    solo.log.expire(LogIndex(1))

    solo.push(N1, PushCommit(Term(1), source.epoch, LogIndex(0)))

    assert not solo.state.hard_state.voter


def test_a_member_that_caught_up_has_voted_for_its_leader_in_that_term() -> None:
    """Its earlier self may have voted in the present term, so it must not vote again in it (one vote per term)."""
    solo = Solo(hard_state=HardState())
    source = Source(1, 1)
    solo.push(N1, source.compare(-1))
    solo.push(N1, source.append(0, commit=0))
    assert solo.state.hard_state.voter

    restarted = Solo(hard_state=solo.state.hard_state, log=solo.log, boot_id=2)

    assert not restarted.ask_vote(N2, 1, solo.log.last).granted
    assert restarted.state.hard_state.vote == N1


def test_a_new_disk_that_hears_a_leader_does_not_bootstrap() -> None:
    """A leader has a no-op, so the group is not new: the leader's log decides, not the number of empty ones."""
    solo = Solo(hard_state=HardState())
    solo.hear(N1, 3)

    solo.ask_vote(N2, 4, pre_vote=True, fresh=True)

    assert not solo.state.hard_state.voter


def test_a_late_answer_of_a_wiped_process_counts_for_nothing() -> None:
    """Answers of the process before the wipe must not raise the watermark once the new process was heard.

    The leader hears the new process (boot 8), then two late answers of the old one (boot 7): the first looks like
    another restart, and the second must not pass for that process's own.
    """
    solo = Solo()
    solo.lead()
    solo.streaming(N1)
    epoch = solo.epochs[N1]
    assert solo.leader_role.match[N1] == 0

    solo.respond(N1, PushKind.APPEND, verified=-1, epoch=epoch, boot_id=8)
    solo.respond(N1, PushKind.APPEND, verified=0, epoch=epoch, boot_id=7)
    solo.respond(N1, PushKind.APPEND, verified=0, epoch=epoch, boot_id=7)

    assert solo.leader_role.match[N1] == -1
