"""Members whose disk is new: how a group begins, and what a lost disk may not do (reliability trap 30)."""

from __future__ import annotations

import pytest

from dledger.core.messages import HeartbeatRequest, PushAppend, PushCompare, PushKind
from dledger.types import HardState, Role, Standing
from tests.support.cluster import N0, N1, N2, N3, N4, Cluster, FixedTimeouts, made_log
from tests.support.solo import Solo


def test_an_all_new_group_elects_a_leader() -> None:
    """Three members with new disks elect one of them, all three together: nobody can know of anything committed."""
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


@pytest.mark.parametrize("up", [1, 2])
def test_a_new_group_waits_for_all_its_members(up: int) -> None:
    """Blank members elect nobody while one is missing: it might be the one that remembers. They use up no terms."""
    cluster = Cluster(3, start=False, voters=False)
    for one in cluster.ids[:up]:
        cluster.start(one)

    cluster.advance(10_000)

    assert cluster.leader() is None
    assert all(cluster[one].saved == HardState() for one in cluster.ids)
    assert "election needs the votes of all 3" in cluster[N0].node.elector.vote_problem


def test_a_new_group_needs_all_its_members_once() -> None:
    """Afterwards a majority is enough, also one that has received no entry: its leader's first word counts."""
    cluster = Cluster(3, voters=False)
    cluster.hold(PushCompare)
    cluster.advance_until(lambda: cluster.leader() is not None)
    cluster.settle()
    leader = cluster.leader()
    assert leader is not None

    cluster.crash(leader)
    cluster.holds.clear()
    cluster.advance_until(lambda: cluster.leader() not in (None, leader), 3000)

    assert all(cluster[one].saved.standing is Standing.FOUNDER for one in cluster.ids)


def test_a_group_whose_first_leader_dies_at_once_begins_all_the_same() -> None:
    """Its standing is durable, nobody else's: two blank disks of three, but nothing can have been committed."""
    cluster = Cluster(3, voters=False)
    cluster.drop(HeartbeatRequest)
    cluster.advance_until(lambda: cluster.leader() is not None)
    leader = cluster.leader()
    assert leader is not None
    assert [cluster[one].saved.standing for one in cluster.ids].count(Standing.BLANK) == 2

    cluster.restart(leader)
    cluster.heal()
    cluster.advance_until(lambda: cluster.leader() is not None)
    cluster.advance(1000)

    assert cluster.same_logs()
    assert {cluster[one].saved.standing for one in cluster.ids} == {Standing.FULL}


def test_two_disks_lost_before_a_group_is_founded_do_not_begin_it_anew() -> None:
    """What founders acknowledged among them went with their disks, also in the first second: a person decides.

    n2 has not been heard with standing yet, so that the other two are founders; one of them and n2 lose their disks.
    """
    cluster = Cluster(3, voters=False)
    cluster.advance_until(lambda: cluster.leader() is not None)
    leader = cluster.leader()
    assert leader is not None
    other, silent = (one for one in cluster.ids if one != leader)
    cluster.isolate(silent)
    acked = cluster.append(leader, b"acknowledged")
    cluster.advance_until(lambda: not acked.pending)
    assert acked.value
    assert cluster[leader].saved.standing is Standing.FOUNDER

    for one in (other, silent):
        cluster.wipe(one)
    cluster.advance_until(lambda: cluster.leader() is None)
    cluster.heal()
    for one in (other, silent):
        cluster.start(one)
    cluster.advance(10_000)

    assert cluster.leader() is None
    assert "a majority of the disks is new" in cluster[leader].node.elector.vote_problem


def test_one_lost_disk_and_an_empty_voter_do_not_begin_a_new_group() -> None:
    """n2 has standing and has received nothing yet, n1 loses its disk, n0 holds what is acknowledged.

    n1 and n2 are a majority of empty logs, and n0 is slow to campaign: n2 must not win.
    """
    cluster = Cluster(3)
    cluster.isolate(N2)
    cluster.elect()
    cluster.append(N0, b"acknowledged")
    cluster.wipe(N1)
    cluster.restart(N0)
    cluster[N0].random, cluster[N2].random = FixedTimeouts(450), FixedTimeouts(0)
    cluster.heal()
    cluster.partition([N0], [N1])
    cluster.start(N1)

    cluster.advance(5000)
    assert cluster.leader() == N0, "n2 may elect it, n1 nobody"

    cluster.heal()
    cluster.advance(1000)
    assert cluster.same_logs()
    assert all(cluster[one].saved.voter for one in cluster.ids)


def test_a_lost_disk_and_a_member_that_was_never_up_begin_no_new_group() -> None:
    """However late the intact member comes: its word is needed, not only its silence."""
    cluster = Cluster(3)
    cluster[N1].saved = HardState()
    cluster.crash(N1)
    cluster.elect()
    cluster.append(N0, b"acknowledged")
    cluster.wipe(N2)
    cluster.crash(N0)
    cluster.start(N1)
    cluster.start(N2)

    cluster.advance(20_000)

    assert cluster.leader() is None
    assert [cluster[one].log.last.index for one in (N1, N2)] == [-1, -1]


def test_two_lost_disks_of_three_halt_the_group_and_say_so() -> None:
    """What only they held is gone: that is for a person to accept, also when all three are up."""
    cluster = Cluster(3)
    cluster.elect()
    cluster.append(N0, b"acknowledged")
    for one in (N1, N2):
        cluster.wipe(one)
    for one in (N1, N2):
        cluster.start(one)

    cluster.advance(20_000)

    assert cluster.leader() is None
    assert "n1 (blank), n2 (blank)" in cluster[N0].node.elector.vote_problem
    assert "restore-vote" in cluster[N0].node.elector.vote_problem


def test_a_group_of_two_survives_a_lost_disk() -> None:
    """The other one holds whatever both acknowledged, and both together elect it."""
    cluster = Cluster(2)
    cluster.elect()
    cluster.append(N0, b"acknowledged")
    cluster.wipe(N1)
    cluster.start(N1)

    cluster.advance_until(lambda: cluster[N1].saved.voter)
    cluster.advance(100)

    assert cluster.bodies(N1) == [b"acknowledged"]


def test_three_doubtful_members_elect_the_longest_log() -> None:
    """Three imported logs, or a power cut of all with ``flush_mode=async``: together they know all that is known."""
    logs = {N0: made_log(1, 1), N1: made_log(1, 1, 2), N2: made_log(1)}
    cluster = Cluster(3, start=False, logs=logs)
    for one in cluster.ids:
        cluster[one].saved = cluster[one].saved.doubted("it was imported")
        cluster.start(one)

    cluster.advance_until(lambda: cluster.leader() is not None)
    cluster.advance(1000)

    assert cluster.leader() == N1
    assert cluster.same_logs()
    assert {cluster[one].saved.standing for one in cluster.ids} == {Standing.FULL}
