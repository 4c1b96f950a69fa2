"""A leader that heartbeats keep in office, and that commits nothing all the same, makes room for another one."""

from __future__ import annotations

from dledger.core.failure_detection import STALLED_TIMEOUTS, full_members
from dledger.core.member_state import Leader
from dledger.core.messages import (
    PushAppend,
    PushCommit,
    PushCompare,
    PushInstall,
    PushTruncate,
    RoleReason,
    VoteRequest,
)
from dledger.errors import DiskFullError, NotLeaderError
from dledger.types import LogIndex
from tests.support.cluster import N0, N1, N2, N3, Cluster
from tests.support.solo import Solo

PUSHES = (PushAppend, PushCommit, PushCompare, PushInstall, PushTruncate)
STALLED_MS = STALLED_TIMEOUTS * 1000
"""With the longest election time-out of the default configuration."""


def test_a_leader_whose_pushes_do_not_arrive_makes_room_for_another() -> None:
    """Heartbeats share nothing with pushes: a leader without a way for the latter would stay for ever.

    It says why, and leaves the others the time to win: the way that it lacks is its own.
    """
    cluster = Cluster(3)
    cluster.elect()
    cluster.drop(*PUSHES, sender=N0)
    waiting = cluster.append(N0, b"unknown")

    cluster.advance(STALLED_MS + 3000)
    leader = cluster.leader()

    assert leader in (N1, N2)
    assert leader is not None
    assert RoleReason.NO_PROGRESS in [change.reason for change in cluster[N0].role_changes]
    assert not waiting.pending
    assert cluster.append(leader, b"a").value


def test_a_new_leader_that_cannot_commit_its_no_op_makes_room_for_another() -> None:
    """The same from the first moment on, when nobody has appended anything yet."""
    cluster = Cluster(3)
    cluster.drop(*PUSHES, sender=N0)
    cluster.advance_until(lambda: cluster.leader() == N0)

    cluster.advance(STALLED_MS + 3000)

    assert cluster.leader() in (N1, N2)
    assert cluster.commit(N1) >= 0


def test_a_leader_that_made_no_progress_does_not_take_leadership_back_at_once() -> None:
    """A preferred leader without a way to the others would else be handed leadership for ever again."""
    cluster = Cluster(3, preferred_leaders=(N0,))
    cluster.elect()
    cluster.drop(*PUSHES, sender=N0)
    cluster.append(N0, b"x")
    cluster.advance(STALLED_MS + 1000)
    led = 0

    for _ in range(3000):
        cluster.advance(100)
        led += cluster.leader() == N0

    assert led <= 400  # of 3000: some seconds each time, and a longer pause before the next


def test_a_member_whose_trouble_is_over_leads_within_seconds_where_nobody_else_can() -> None:
    """However often it stepped down: only what it is offered, it declines for longer each time.

    Its disk hung, say, one of the others is down, and the other one has no way to it: nobody else would lead.
    """
    cluster = Cluster(3)
    cluster.elect()
    cluster.crash(N2)
    cluster.drop(VoteRequest, sender=N1)
    cluster.drop(*PUSHES, sender=N0)
    cluster.append(N0, b"x")
    for _ in range(6):
        cluster.advance_until(lambda: cluster.leader() == N0, 60_000)
        cluster.advance_until(lambda: cluster.leader() is None, 60_000)
    cluster.heal()
    cluster.drop(VoteRequest, sender=N1)
    healed_ms = cluster.now_ms

    cluster.advance_until(lambda: cluster.leader() == N0, 60_000)

    assert [change.reason for change in cluster[N0].role_changes].count(RoleReason.NO_PROGRESS) >= 6
    assert cluster.now_ms - healed_ms <= 2 * STALLED_MS + 2000


def test_an_idle_leader_stays() -> None:
    """Without anything to commit there is no progress to be missed, however long ago the last one was."""
    cluster = Cluster(3)
    cluster.elect()
    cluster.advance(60_000)

    assert cluster.append(N0, b"a").value
    cluster.advance(5000)

    assert cluster.leader() == N0
    assert cluster.term(N0) == 1


def test_a_follower_that_catches_up_slowly_is_progress() -> None:
    """Where a quorum depends on one that lacks much, the leader waits as long as it gets on, but not for others."""
    cluster = Cluster(5)
    cluster.elect()
    leader = cluster[N0].node.state.role
    assert isinstance(leader, Leader)
    for one in (N1, N2, N3):
        cluster.drop(*PUSHES, target=one)
    cluster.append(N0, b"needs one more than n4")
    cluster.advance(STALLED_MS - 1000)
    last = cluster[N0].log.last.index

    for behind in range(last - 5, last):
        leader.match[N1] = LogIndex(behind)  # told in answers that come slowly
        cluster.append(N0, b"n4 takes it")
        cluster.advance(STALLED_MS - 1000)
        assert cluster.leader() == N0
    for _ in range(10):
        cluster.append(N0, b"n4 takes it")  # whose progress moves nothing
        cluster.advance(STALLED_MS // 4)

    assert RoleReason.NO_PROGRESS in [change.reason for change in cluster[N0].role_changes]


def test_appends_are_refused_while_too_few_members_have_room() -> None:
    """They could not be committed: refused, they are certainly not applied, and nothing piles up on the leader.

    No other member could do better, so nobody steps down; with room on one disk everything goes on.
    """
    cluster = Cluster(3)
    cluster.elect()
    for full in (N1, N2):
        cluster[full].log.disk_full = True
    cluster.append(N0, b"finds it out")
    cluster.advance(200)
    end = cluster[N0].log.last

    for _ in range(100):
        error = cluster.append(N0, b"x").error
        assert isinstance(error, DiskFullError)
        assert error.outcome == "not_applied"
        cluster.advance(100)
    cluster[N0].node.quorum_ack.write_snapshot(cluster.now_ms)
    stayed = cluster[N0].log.last == end and cluster.term(N0) == 1
    cluster[N2].log.disk_full = False
    cluster.advance(1000)

    assert stayed
    assert cluster.leader() == N0
    assert cluster.append(N0, b"a").value


def test_a_leaders_own_disk_counts_among_the_full_ones() -> None:
    """With one of the others it leaves no quorum with room, and nobody who could do better."""
    solo = Solo()
    solo.lead()
    leader = solo.leader_role

    solo.log.disk_full = True
    alone = full_members(solo.state, leader)
    leader.disk_full[N1] = True

    assert (alone, full_members(solo.state, leader)) == ((), (N0, N1))


def test_where_nobody_leads_for_want_of_room_clients_hear_of_the_disk() -> None:
    """All disks are full, and the leader restarts: nobody may lead, and whoever appends is told why."""
    cluster = Cluster(3)
    cluster.elect()
    for one in cluster.ids:
        cluster[one].log.disk_full = True
    cluster.restart(N0)
    cluster.advance(3000)

    for one in cluster.ids:
        error = cluster.append(one, b"x").error
        assert isinstance(error, NotLeaderError)
        assert error.outcome == "not_applied"
        assert "disk is full" in str(error)
