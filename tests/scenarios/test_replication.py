"""Replication between real members: what is lost, late, repeated or refused never stops it and never harms it."""

from __future__ import annotations

from dledger.core.dispatcher import DispatcherState
from dledger.core.messages import PushAppend, PushCommit
from tests.support.cluster import N0, N1, N2, Cluster
from tests.support.solo import Solo


def test_commit_reaches_a_restarted_follower_without_further_appends() -> None:
    """A follower whose checkpoint is behind learns the commit index from an idle leader."""
    cluster = Cluster(3)
    cluster.elect()
    cluster.append(N0, b"a")
    cluster.advance(20)
    assert cluster.commit(N1) == 1

    cluster.restart(N1)  # its checkpoint was written with the flush of the entry, before that was committed
    assert cluster.commit(N1) == 0
    cluster.advance(2000)

    assert cluster.commit(N1) == 1


def test_commit_messages_are_not_repeated_without_need() -> None:
    """An idle leader whose followers know the commit index pushes nothing."""
    cluster = Cluster(3)
    cluster.elect()
    cluster.append(N0, b"a")
    cluster.advance(50)
    cluster.delivered.clear()

    cluster.advance(10_000)

    assert not [sent for sent in cluster.delivered if isinstance(sent.message, PushCommit | PushAppend)]


def test_commit_messages_follow_each_other_while_one_is_unanswered() -> None:
    """A commit that moves while an earlier message of it is on its way is told once that is answered."""
    cluster = Cluster(3)
    cluster.elect()
    cluster.hold(PushCommit, target=N1)
    for body in (b"a", b"b"):
        cluster.append(N0, body)
        cluster.advance(20)

    cluster.release()
    cluster.advance(20)

    assert cluster.commit(N1) == 2


def test_a_full_disk_of_a_follower_is_probed_not_flooded() -> None:
    """A follower without room gets one push per retry, not a window of them, and catches up once it has room."""
    cluster = Cluster(3, push_bytes_max=1)
    cluster.elect()
    cluster[N2].log.disk_full = True
    cluster.advance(200)
    cluster.append(N0, *[bytes(60_000) for _ in range(40)])  # more than fits into its last file
    cluster.advance(200)
    assert 0 < cluster[N2].log.last.index < cluster[N0].log.last.index
    cluster.delivered.clear()

    cluster.advance(1000)
    pushes = [sent for sent in cluster.delivered if isinstance(sent.message, PushAppend) and sent.target == N2]
    cluster[N2].log.disk_full = False
    cluster.advance(1000)

    assert 1 <= len(pushes) <= 10
    assert cluster.same_logs()


def test_an_unreachable_peer_is_not_tried_in_a_busy_loop() -> None:
    """A stream that breaks whenever something is sent on it is tried again after the retry interval."""
    solo = Solo()
    solo.lead()
    tries = 0
    for _ in range(100):
        tries += len(solo.dispatch(N1, ms=10))
        solo.node.connection_lost(N1)

    assert 9 <= tries <= 11


def test_dispatchers_rest_when_leadership_ends() -> None:
    """A deposed leader's dispatchers are woken, so that none of them keeps its window or shows a stale state."""
    cluster = Cluster(3)
    cluster.elect()
    cluster.append(N0, b"a")

    cluster.take_leadership(N1)

    assert {one.state for one in cluster[N0].node.dispatchers.values()} == {DispatcherState.IDLE}
