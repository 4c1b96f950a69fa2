"""Members of different flush modes in one group: the leader's is the promise that appends get."""

from __future__ import annotations

import pytest

from dledger.config import FlushMode, ServerConfig
from dledger.types import NodeId
from tests.support.cluster import N0, N1, N2, Cluster, make_config


class _Mixed(Cluster):
    """n0 as told, the others with the other mode."""

    mode = FlushMode.SYNC

    def config(self, node_id: NodeId) -> ServerConfig:
        """Each member has its own."""
        other = FlushMode.ASYNC if self.mode is FlushMode.SYNC else FlushMode.SYNC
        return make_config(node_id, self.size, flush_mode=self.mode if node_id == N0 else other, **self.changes)


def test_a_leader_that_flushes_does_not_count_a_followers_page_cache() -> None:
    """Else a power cut of that follower and the leader's loss would lose what was acknowledged as durable."""
    cluster = _Mixed(3)
    cluster.elect()
    cluster.isolate(N2)
    cluster[N1].flush_paused = True

    outcome = cluster.append(N0, b"x")
    cluster.advance(300)

    assert cluster.bodies(N1) == [b"x"]
    assert outcome.pending
    cluster[N1].flush_paused = False
    cluster.advance(10)
    assert outcome.value


@pytest.mark.parametrize("mode", list(FlushMode))
def test_a_mixed_group_appends_and_changes_its_leader(mode: FlushMode) -> None:
    """Both ways round nothing stands still."""
    cluster = _Mixed(3, start=False)
    cluster.mode = mode
    for one in cluster.ids:
        cluster.start(one)
    cluster.elect()
    assert cluster.append(N0, b"a").value
    cluster.advance(200)
    cluster.crash(N0)
    cluster.advance_until(lambda: cluster.leader() in (N1, N2), 5000)
    cluster.advance(300)
    assert cluster.append(cluster.leader() or N1, b"b").value
    cluster.start(N0)
    cluster.advance(3000)

    assert cluster.same_logs()
    assert cluster.bodies(N0) == [b"a", b"b"]
