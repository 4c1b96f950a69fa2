"""``dledger.group_members``: what can be wrong with a group's members, and when it is over."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dledger.config import Member, ServerConfig
from dledger.core.membership import Membership, implicit_configuration
from dledger.group_members import GONE_MS, STUCK_MS, MemberWatch, removal_index
from dledger.monitoring import ConditionKind, Conditions
from dledger.rpc.ports import MemberStatus, NodeStatus, PeerStatus
from dledger.types import NO_INDEX, ClusterMember, Configuration, LogIndex, MemberRole, NodeId
from tests.support.fake_node import FakeNode
from tests.support.waiting import ManualClock

N0, N1, N2 = NodeId("n0"), NodeId("n1"), NodeId("n2")
CONFIG = ServerConfig(members=tuple(Member(one, "h", port) for port, one in enumerate((N0, N1, N2), 1)))


def cluster(*ones: NodeId, index: int = 9) -> Configuration:
    """Voters at the configured addresses."""
    ports = {one.node_id: one.port for one in CONFIG.members}
    return Configuration(tuple(ClusterMember(one, "h", ports.get(one, 7)) for one in ones), LogIndex(index))


class Watched:
    """Member n0 of three, which leads."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.conditions = Conditions("n0", self.clock)
        self.membership = Membership(N0, implicit_configuration(CONFIG))
        self.watch = MemberWatch(CONFIG, self.membership, self.conditions, self.clock)
        self.node = FakeNode(members=tuple(MemberStatus(one, "h:1") for one in (N0, N1, N2)))

    def appended(self, configuration: Configuration, *, committed: bool) -> None:
        self.membership.adopt(configuration)
        if committed:
            self.membership.commit(configuration.index)
        self.watch.members_changed(self.membership.copy())

    def status(self, contact_ms: int = 5, match: int = 99) -> NodeStatus:
        """Of a leader that heard from n2 this long ago."""
        self.node.peers = tuple(
            PeerStatus(one, LogIndex(match if one == N2 else 99), LogIndex(100), "APPEND", 0, 0, ago_ms)
            for one, ago_ms in ((N1, 5), (N2, contact_ms))
        )
        return self.node.status()

    def kinds(self, status: NodeStatus | None = None, removed_at: int = NO_INDEX) -> dict[str, str]:
        """What is the matter, with its text."""
        self.watch.look(status or self.status(), LogIndex(removed_at))
        return {one.kind: f"{one.subject} {one.message}".strip() for one in self.conditions.now()}


@pytest.fixture
def watched() -> Watched:
    return Watched()


def test_nothing_is_the_matter_with_configured_members(watched: Watched) -> None:
    """Nor with those of the log, if the settings name them."""
    assert watched.kinds() == {}
    watched.appended(cluster(N0, N1, N2), committed=True)
    assert watched.kinds() == {}


def test_other_settings_than_the_group_has_are_told_with_the_right_ones(watched: Watched) -> None:
    """A condition, no error: some of them are enough to find the others. Only what is committed is worth writing."""
    watched.appended(cluster(N0, N1), committed=False)
    assert watched.kinds() == {}
    watched.appended(cluster(N0, N1, index=10), committed=True)
    assert watched.kinds()[ConditionKind.PEERS_DIFFER].endswith("write dLegerPeers=n0-h:1;n1-h:2")
    watched.appended(cluster(N0, N1, N2, index=11), committed=True)
    assert watched.kinds() == {}


def test_who_is_not_in_the_committed_members_was_removed(watched: Watched) -> None:
    """Its settings do not matter any more."""
    watched.appended(cluster(N1, N2), committed=True)
    assert list(watched.kinds()) == [ConditionKind.REMOVED]
    assert "configuration 9" in watched.kinds()[ConditionKind.REMOVED]
    watched.appended(cluster(N0, N1, N2, index=12), committed=True)
    assert watched.kinds() == {}


def test_who_waits_to_join_was_not_removed(watched: Watched) -> None:
    """It has no configuration yet."""
    watched.watch.members_changed(Membership(N0, Configuration()))
    assert watched.kinds() == {}


def test_who_was_added_and_does_not_hold_the_entry_yet_was_not_removed(watched: Watched) -> None:
    """It catches up, and has been told of the members before it (M10): nobody may stop it for that."""
    watched.appended(cluster(N1, N2), committed=True)
    assert watched.kinds(replace(watched.status(), voter=False)) == {}


def test_a_member_that_missed_its_removal_learns_of_it(watched: Watched) -> None:
    """The others say so (M8)."""
    assert "configuration 30" in watched.kinds(removed_at=30)[ConditionKind.REMOVED]
    assert watched.kinds() == {}


def test_a_change_that_is_not_committed_for_ten_seconds_is_stuck(watched: Watched) -> None:
    """And is told with who did not acknowledge it."""
    watched.appended(cluster(N0, N1, N2), committed=False)
    watched.clock.now_ms += STUCK_MS - 1
    assert watched.kinds(watched.status(match=8)) == {}
    watched.clock.now_ms += 1
    assert "for 10 s: n2 did not" in watched.kinds(watched.status(match=8))[ConditionKind.CHANGE_STUCK]
    watched.appended(cluster(N0, N1, N2), committed=True)
    assert watched.kinds() == {}


def test_other_news_of_the_members_put_nothing_off(watched: Watched) -> None:
    """A member that has left is released, for example."""
    watched.appended(cluster(N0, N1, N2), committed=False)
    watched.clock.now_ms += STUCK_MS - 1
    watched.watch.members_changed(watched.membership.copy())
    watched.clock.now_ms += 1

    assert ConditionKind.CHANGE_STUCK in watched.kinds()


def test_the_last_removal_is_the_one_that_is_told() -> None:
    """A member that missed both may hold the first."""
    without = cluster(N1, N2, index=20)

    told = [removal_index(N0, without, LogIndex(at), has_standing=True) for at in (NO_INDEX, 10, 30)]

    assert told == [20, 20, 30]


def test_each_change_has_its_own_ten_seconds(watched: Watched) -> None:
    """Also right after another one."""
    watched.appended(cluster(N0, N1, N2), committed=True)
    watched.clock.now_ms += STUCK_MS
    watched.appended(cluster(N0, N1, N2, index=20), committed=False)
    assert watched.kinds() == {}


def test_a_member_that_is_silent_for_ten_minutes_is_gone(watched: Watched) -> None:
    """Until it is heard again; a learner is to be cancelled, not replaced."""
    assert watched.kinds(watched.status(GONE_MS - 1)) == {}
    gone = watched.kinds(watched.status(GONE_MS))[ConditionKind.MEMBER_GONE]
    assert gone.startswith("n2 not heard from for 10 min")
    assert "dledger member replace n2" in gone
    watched.node.members = tuple(
        replace(one, role=MemberRole.LEARNER if one.node_id == N2 else one.role) for one in watched.node.members
    )
    assert "dledger member cancel n2" in watched.kinds(watched.status(GONE_MS))[ConditionKind.MEMBER_GONE]
    assert watched.kinds(watched.status(0)) == {}


def test_a_member_that_was_never_heard_is_gone_as_well(watched: Watched) -> None:
    """Ten minutes after the first look."""
    assert watched.kinds(watched.status(-1)) == {}
    watched.clock.now_ms += GONE_MS
    assert ConditionKind.MEMBER_GONE in watched.kinds(watched.status(-1))


def test_who_is_removed_is_not_gone_any_more(watched: Watched) -> None:
    """The condition ends with the membership."""
    assert ConditionKind.MEMBER_GONE in watched.kinds(watched.status(GONE_MS))
    watched.status()
    watched.node.peers = watched.node.peers[:1]
    assert watched.kinds(watched.node.status()) == {}


def test_one_id_of_two_processes_is_found_by_its_requests_for_votes(watched: Watched) -> None:
    """One follows the leader, the other does not hear it and goes on asking."""
    for _ in range(3):
        watched.watch.asked_for_vote(N2, 5)
        watched.clock.now_ms += 1500
    watched.watch.asked_for_vote(N2, 5)
    assert watched.kinds()[ConditionKind.DUPLICATE_MEMBER].startswith("n2 a process that calls itself n2")


@pytest.mark.parametrize(("contact_ms", "pause_ms"), [(5, 500), (2000, 1500), (5, 20_000)])
def test_a_member_that_merely_seeks_its_leader_is_no_second_one(
    watched: Watched, contact_ms: int, pause_ms: int
) -> None:
    """After a lost election or a break it asks for a moment; cut off, it answers the leader no more."""
    for _ in range(4):
        watched.watch.asked_for_vote(N2, contact_ms)
        watched.clock.now_ms += pause_ms
    assert watched.kinds() == {}
