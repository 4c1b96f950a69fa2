"""A configuration is committed, and only some know it: what the others do (docs/protocol.md, M2 and M6)."""

from __future__ import annotations

import pytest

from dledger.core.messages import HeartbeatRequest, PushCommit
from dledger.types import ChangeKind, HardState, Standing
from tests.support.cluster import N0, N1, N2, Cluster


@pytest.mark.parametrize("is_lost", [False, True], ids=["same disk", "empty disk"])
def test_a_growth_of_two_whose_commit_nobody_else_heard_of_waits_for_the_second_of_the_two(*, is_lost: bool) -> None:
    """M2: all hold the third voter's entry, and the leader that committed it ends before it tells anybody.

    To the next leader, n0 may hold none of it and lose its disk, so it commits nothing before n0 is back.
    """
    cluster = Cluster(2)
    cluster.elect()
    cluster.join(N2)
    cluster.change(N0, ChangeKind.ADD, N2, promote=False)
    cluster.advance(3500)
    cluster.drop(PushCommit)
    promotion = cluster.change(N0, ChangeKind.PROMOTE, N2)
    cluster.settle()
    assert promotion.value.index == cluster.commit(N0)
    cluster.crash(N0)
    cluster.heal()
    cluster.advance_until(lambda: cluster.leader() in (N1, N2))
    append = cluster.append(cluster.leader() or N1, b"x")
    cluster.advance(2000)
    assert append.pending
    assert cluster.commit(N1) < promotion.value.index

    if is_lost:
        cluster.wipe(N0)
    cluster.start(N0)
    cluster.advance_until(lambda: cluster.commit(N1) > promotion.value.index, limit_ms=30_000)

    assert cluster[N1].membership.is_committed
    cluster.advance(3000)
    assert cluster.same_logs()


@pytest.mark.parametrize("is_emptied", [False, True], ids=["kept", "emptied"])
def test_a_removed_members_directory_counts_until_the_others_know_that_it_is_removed(*, is_emptied: bool) -> None:
    """M6: n0 removes n2, tells n2 but not n1, and loses its disk. To n1, n0 and n2 may have committed more without it.

    n2 can tell it otherwise, unless its directory was emptied: then two of three disks are lost, and a person decides.
    """
    cluster = Cluster(3)
    cluster.elect()
    cluster.advance(1500)
    cluster.drop(PushCommit, target=N1)
    cluster.drop(HeartbeatRequest, target=N1)
    removal = cluster.change(N0, ChangeKind.REMOVE, N2)
    cluster.advance(200)
    index = removal.value.index
    assert cluster[N1].log.last.index >= index > cluster.commit(N1)
    assert cluster.commit(N2) >= index
    cluster.crash(N1)
    cluster.wipe(N0)
    if is_emptied:
        cluster.wipe(N2)
        cluster.start(N2)
    cluster.heal()
    cluster.start(N0)
    cluster.start(N1)
    cluster.advance(20_000)

    if not is_emptied:
        assert cluster.leader() == N1
        return
    assert cluster.leader() is None
    problem = cluster[N1].node.elector.vote_problem
    assert "a majority of the disks is new or has lost entries: n0 (blank), n2 (blank)" in problem

    cluster.crash(N0)  # ``dledger restore-vote``
    cluster[N0].saved = HardState(cluster[N0].saved.term, standing=Standing.FULL)
    cluster[N0].uid = 0
    cluster.start(N0)
    cluster.advance(20_000)
    assert cluster.leader() == N1
    assert cluster[N1].membership.current.voters == (N0, N1)
    assert cluster[N1].membership.is_committed
